//! Which files of a model are fetched, and what is said when it cannot be had.

use super::server::{COMMIT, OTHER, Server};
use super::*;

const MODEL: [(&str, &[u8]); 4] = [
    ("README.md", b"not needed"),
    ("config.json", b"{}"),
    ("model.safetensors", b"the weights"),
    ("tokenizer.json", b"{\"a\":1}"),
];

#[test]
fn a_model_is_downloaded_once_and_used_without_a_network_after() {
    let server = Server::new(&MODEL);
    server.change(|state| {
        state.file_moved = Some(("model.safetensors", server.endpoint.clone()));
    });
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(cache.path(), &server.endpoint);
    options.token = Some("secret".into());
    let mut seen = Vec::new();
    let folder = resolve_with("owner/name", None, &options, &mut |download| {
        assert!(download.bytes <= download.total && download.index < download.files);
        if download.bytes == download.total {
            seen.push((download.file.to_string(), download.total));
        }
    })
    .unwrap();
    seen.dedup();
    assert_eq!(
        seen,
        [
            ("config.json".to_string(), 2),
            ("tokenizer.json".to_string(), 7),
            ("model.safetensors".to_string(), 11)
        ]
    );
    assert_eq!(folder, cache.path().join("models--owner--name").join("snapshots").join(COMMIT));
    assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"the weights");
    assert!(!folder.join("README.md").exists() && !folder.join("vocab.json").exists());
    let is_known = |token: &Option<String>| token.as_deref() == Some("Bearer secret");
    assert!(server.requests().iter().all(|request| is_known(&request.token)));

    assert_eq!(fetch(&options).unwrap(), folder);
    assert_eq!(server.requests().len(), 1, "only the commit is asked for");

    options.endpoint = nowhere();
    assert_eq!(fetch(&options).unwrap(), folder);
    server.change(|state| state.status.0 = 503);
    options.endpoint = server.endpoint.clone();
    assert_eq!(fetch(&options).unwrap(), folder);
    options.offline = true;
    server.requests();
    assert_eq!(fetch(&options).unwrap(), folder);
    let by_commit = resolve_with("owner/name", Some(COMMIT), &options, &mut |_| {});
    assert_eq!(by_commit.unwrap(), folder);
    assert!(server.requests().is_empty());
}

#[test]
fn what_stands_beside_the_weights_is_downloaded() {
    let beside = [
        "added_tokens.json",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "chat_template.json",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "vocab.json",
    ];
    let others = ["additional_chat_templates/notes.md", "onnx/tokenizer.json", "training_args.bin"];
    let mut files: Vec<(&str, &[u8])> = vec![("config.json", b"{}"), ("model.safetensors", b"1")];
    files.extend(beside.iter().chain(&others).map(|name| (*name, name.as_bytes())));
    let server = Server::new(&files);
    let cache = tempfile::tempdir().unwrap();
    let folder = fetch(&options(cache.path(), &server.endpoint)).unwrap();
    for name in beside {
        assert_eq!(fs::read(folder.join(name)).unwrap(), name.as_bytes());
    }
    for name in others {
        assert!(!folder.join(name).exists(), "{name}");
    }
}

#[test]
fn a_configuration_alone_is_no_model_in_the_cache() {
    let server = Server::new(&MODEL);
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(cache.path(), &server.endpoint);
    let config = |options: &HubOptions| {
        resolve_config_with("owner/name", None, options, &mut |download| {
            assert_eq!((download.file, download.files), ("config.json", 1));
        })
    };
    let folder = config(&options).unwrap();
    let names: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["config.json"]);
    options.offline = true;
    assert!(fetch(&options).is_err());
    options.offline = false;
    assert_eq!(fetch(&options).unwrap(), folder);
    // A new commit's configuration leaves the whole model that is there, which it is read of without a network.
    server.change(|state| state.commit = OTHER.into());
    assert_ne!(config(&options).unwrap(), folder);
    options.offline = true;
    assert_eq!(fetch(&options).unwrap(), folder);
    assert_eq!(config(&options).unwrap(), folder);
}

#[test]
fn all_shards_of_the_index_are_downloaded() {
    let index = br#"{"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors", "c": "x-1.safetensors"}}"#;
    let server = Server::new(&[
        ("config.json", b"{}"),
        ("model.safetensors.index.json", index),
        ("x-1.safetensors", b"1"),
        ("x-2.safetensors", b"22"),
        ("x-3.safetensors", b"333"),
    ]);
    let cache = tempfile::tempdir().unwrap();
    let options = options(cache.path(), &server.endpoint);
    let folder = fetch(&options).unwrap();
    assert_eq!(fs::read(folder.join("x-2.safetensors")).unwrap(), b"22");
    assert!(!folder.join("x-3.safetensors").exists());

    fs::remove_file(folder.join("x-2.safetensors")).unwrap();
    let offline = HubOptions { offline: true, ..options.clone() };
    let message = refusal(&offline);
    assert!(message.contains("lacks x-2.safetensors"), "{message}");
    fetch(&options).unwrap();
    fetch(&offline).unwrap();
}

#[test]
fn a_new_commit_reuses_the_files_that_did_not_change() {
    let server = Server::new(&MODEL);
    let cache = tempfile::tempdir().unwrap();
    let options = options(cache.path(), &server.endpoint);
    let first = fetch(&options).unwrap();
    server.requests();
    server.change(|state| {
        state.commit = OTHER.into();
        state.files.insert("config.json".into(), b"{\"new\":1}".to_vec());
    });
    let second = fetch(&options).unwrap();
    assert_ne!(first, second);
    assert_eq!(fs::read(second.join("config.json")).unwrap(), b"{\"new\":1}");
    assert_eq!(fs::read(second.join("model.safetensors")).unwrap(), b"the weights");
    let requests = server.requests();
    let weights = requests.iter().filter(|asked| asked.path.contains("model.safetensors"));
    assert!(weights.map(|asked| asked.method.as_str()).eq(["HEAD"]), "{requests:?}");
}

#[test]
fn refusals_say_what_to_do() {
    let server = Server::new(&MODEL);
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(cache.path(), &server.endpoint);
    server.change(|state| state.status.0 = 401);
    let message = refusal(&options);
    assert!(message.contains("HF_TOKEN") && message.contains("does not exist"), "{message}");
    server.change(|state| state.status.0 = 404);
    let message = refusal(&options);
    assert!(message.contains("no model of this id"), "{message}");
    assert!(message.contains(&server.endpoint), "{message}");
    server.change(|state| state.error_code = "RevisionNotFound");
    let message = refusal(&options);
    assert!(message.contains("no revision \"main\""), "{message}");
    // Gated models show their list of files to everyone.
    server.change(|state| state.status = (200, 403));
    let message = refusal(&options);
    assert!(message.contains("accept its terms") && message.contains("no token was given"));
    options.token = Some("weak".into());
    assert!(refusal(&options).contains("the token given"));
    server.change(|state| state.status = (200, 404));
    assert!(refusal(&options).contains("does not have its file config.json"));
}

#[test]
fn what_was_downloaded_before_is_used_where_access_is_refused() {
    let server = Server::new(&MODEL);
    let cache = tempfile::tempdir().unwrap();
    let options = options(cache.path(), &server.endpoint);
    let folder = fetch(&options).unwrap();
    for status in [401, 403, 404] {
        server.change(|state| state.status.0 = status);
        assert_eq!(fetch(&options).unwrap(), folder, "{status}");
    }
    // A gated model shows its new commit, and not its files.
    server.change(|state| {
        state.commit = OTHER.into();
        state.status = (200, 403);
    });
    assert_eq!(fetch(&options).unwrap(), folder);
    // What the hub knows and doesn't have isn't what is in the cache.
    server.change(|state| state.status = (200, 404));
    assert!(refusal(&options).contains("does not have its file config.json"));
    server.change(|state| {
        state.status.0 = 404;
        state.error_code = "RevisionNotFound";
    });
    assert!(refusal(&options).contains("no revision \"main\""));
    // And what is only a part is no model.
    server.change(|state| {
        state.status.0 = 401;
        state.error_code = "";
    });
    fs::remove_file(folder.join("model.safetensors")).unwrap();
    assert!(refusal(&options).contains("refused access"));
}

#[test]
fn a_pinned_commit_gets_what_another_program_left_out_of_the_cache() {
    let server = Server::new(&MODEL);
    let pinned =
        |options: &HubOptions| resolve_with("owner/name", Some(COMMIT), options, &mut |_| {});
    // Servers that say less of the files give no list to keep.
    for has_hashes in [true, false] {
        server.change(|state| state.has_hashes = has_hashes);
        let cache = tempfile::tempdir().unwrap();
        let snapshot = cache.path().join("models--owner--name").join("snapshots").join(COMMIT);
        fs::create_dir_all(&snapshot).unwrap();
        fs::write(snapshot.join("config.json"), "{}").unwrap();
        fs::write(snapshot.join("model.safetensors"), "x").unwrap();
        let options = options(cache.path(), &server.endpoint);
        let silent = HubOptions { endpoint: nowhere(), timeout: PATIENCE, ..options.clone() };
        assert_eq!(pinned(&silent).unwrap(), snapshot, "what is there will do without a network");
        assert_eq!(pinned(&options).unwrap(), snapshot);
        assert_eq!(fs::read(snapshot.join("tokenizer.json")).unwrap(), b"{\"a\":1}");
        assert_eq!(fs::read(snapshot.join("model.safetensors")).unwrap(), b"x", "it was there");
        server.requests();
        assert_eq!(pinned(&options).unwrap(), snapshot);
        assert!(server.requests().is_empty(), "who has fetched the tokenizer wanted all");
        fs::remove_file(snapshot.join("tokenizer.json")).unwrap();
        assert_eq!(pinned(&options).unwrap(), snapshot);
        assert!(snapshot.join("tokenizer.json").exists());
        server.requests();
    }
    // The configuration alone needs nothing beside it.
    let cache = tempfile::tempdir().unwrap();
    let snapshot = cache.path().join("models--owner--name").join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join("config.json"), "{}").unwrap();
    let options = options(cache.path(), &server.endpoint);
    let config = resolve_config_with("owner/name", Some(COMMIT), &options, &mut |_| {});
    assert_eq!(config.unwrap(), snapshot);
    assert!(server.requests().is_empty());
}

#[test]
fn without_network_and_cache_the_error_says_where_it_looked() {
    let cache = tempfile::tempdir().unwrap();
    let mut options = HubOptions { timeout: PATIENCE, ..options(cache.path(), &nowhere()) };
    let message = refusal(&options);
    assert!(message.contains(&options.endpoint) && message.contains("refs/main"), "{message}");
    assert!(message.contains(&cache.path().display().to_string()), "{message}");
    options.offline = true;
    assert!(refusal(&options).contains("HF_HUB_OFFLINE"));
}

#[test]
fn a_cache_made_by_another_program_is_used_when_complete() {
    let cache = tempfile::tempdir().unwrap();
    let folder = cache.path().join("models--owner--name");
    let snapshot = folder.join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::create_dir_all(folder.join("refs")).unwrap();
    fs::write(folder.join("refs/main"), format!("{COMMIT}\n")).unwrap();
    fs::write(snapshot.join("config.json"), "{}").unwrap();
    let offline = HubOptions { offline: true, ..options(cache.path(), "http://none") };
    let message = refusal(&offline);
    assert!(message.contains("lacks model.safetensors"), "{message}");
    fs::write(snapshot.join("model.safetensors"), "x").unwrap();
    assert_eq!(fetch(&offline).unwrap(), snapshot);
    fs::write(folder.join("refs/main"), "../../elsewhere").unwrap();
    assert!(refusal(&offline).contains("does not hold a commit"));
}

#[test]
fn a_repository_that_cannot_be_used_is_refused_before_anything_is_downloaded() {
    let cache = tempfile::tempdir().unwrap();
    let refused = |files: &[(&str, &[u8])]| {
        let server = Server::new(files);
        let message = refusal(&options(cache.path(), &server.endpoint));
        assert_eq!(server.requests().len(), 1);
        message
    };
    assert!(refused(&[("model.safetensors", b"x")]).contains("no config.json"));
    let message = refused(&[("config.json", b"{}"), ("model-q4.gguf", b"x")]);
    assert!(message.contains("model-q4.gguf") && message.contains("safetensors"), "{message}");
    let server = Server::new(&MODEL);
    server.change(|state| state.commit = "../../../outside".into());
    assert!(refusal(&options(cache.path(), &server.endpoint)).contains("cannot be one"));
    let outside = br#"{"weight_map": {"a": "../../x.safetensors"}}"#;
    let server = Server::new(&[("config.json", b"{}"), ("model.safetensors.index.json", outside)]);
    let error = fetch(&options(cache.path(), &server.endpoint)).unwrap_err().to_string();
    assert!(error.contains("expected a file's name"), "{error}");
}

#[test]
fn paths_and_ids_are_told_apart() {
    let folder = tempfile::tempdir().unwrap();
    let options = HubOptions { timeout: PATIENCE, ..options(folder.path(), &nowhere()) };
    let name = folder.path().to_str().unwrap();
    let resolve = |model: &str, revision| resolve_with(model, revision, &options, &mut |_| {});
    assert_eq!(resolve(name, None).unwrap(), folder.path());
    assert!(matches!(resolve(name, Some("main")), Err(Error::Option { .. })));
    let file = folder.path().join("a.gguf");
    fs::write(&file, "x").unwrap();
    assert_eq!(resolve(file.to_str().unwrap(), None).unwrap(), file);
    assert!(matches!(resolve(file.to_str().unwrap(), Some("main")), Err(Error::Option { .. })));
    let file = folder.path().join("a.safetensors");
    fs::write(&file, "x").unwrap();
    let error = resolve(file.to_str().unwrap(), None).unwrap_err().to_string();
    assert!(error.contains("is a file"), "{error}");
    for path in ["./no", "../no/model", "/no/such", "~/no-such-folder", "a/b/c", "no", "", "a//b"] {
        let error = resolve(path, None).unwrap_err();
        assert!(matches!(error, Error::File { .. }), "{path:?}: {error}");
        assert!(error.to_string().contains("no such folder"), "{error}");
    }
    assert!(matches!(resolve("owner/name", Some("a/../b")), Err(Error::Option { .. })));
    assert!(matches!(resolve("owner/name", None), Err(Error::Hub { .. })));
}
