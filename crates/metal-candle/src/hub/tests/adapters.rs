//! Which files of an adapter are fetched, and what is said when it cannot be had.

use super::super::{parse_adapter, resolve_adapter_with};
use super::server::{COMMIT, Server};
use super::*;
use crate::HubFault;

const ADAPTER: [(&str, &[u8]); 4] = [
    ("README.md", b"not needed"),
    ("adapter_config.json", b"{}"),
    ("adapter_model.safetensors", b"the weights"),
    ("chat_template.jinja", b"{{ x }}"),
];

fn fetch(most: u64, options: &HubOptions) -> Result<PathBuf> {
    resolve_adapter_with("owner/name", None, most, options, &mut |_| {})
}

/// Why an adapter can't be had.
fn fault(most: u64, options: &HubOptions, words: &str) -> HubFault {
    match fetch(most, options).unwrap_err() {
        Error::Hub { message, fault, .. } => {
            assert!(message.contains(words), "{message}");
            fault
        }
        other => panic!("{other}"),
    }
}

#[test]
fn an_adapter_is_downloaded_once_and_used_without_a_network_after() {
    let server = Server::new(&ADAPTER);
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(cache.path(), &server.endpoint);
    let folder = fetch(20, &options).unwrap();
    assert_eq!(folder, cache.path().join("models--owner--name").join("snapshots").join(COMMIT));
    let read = |name: &str| fs::read(folder.join(name)).unwrap();
    assert_eq!(read("adapter_model.safetensors"), b"the weights");
    assert_eq!(read("chat_template.jinja"), b"{{ x }}");
    assert!(!folder.join("README.md").exists());
    server.requests();
    options.offline = true;
    assert_eq!(fetch(20, &options).unwrap(), folder);
    assert!(server.requests().is_empty());
}

#[test]
fn a_pinned_adapter_gets_its_chat_template_where_another_program_left_that_out() {
    let server = Server::new(&ADAPTER);
    let cache = tempfile::tempdir().unwrap();
    let snapshot = cache.path().join("models--owner--name").join("snapshots").join(COMMIT);
    fs::create_dir_all(&snapshot).unwrap();
    fs::write(snapshot.join("adapter_config.json"), "{}").unwrap();
    fs::write(snapshot.join("adapter_model.safetensors"), "the weights").unwrap();
    let options = options(cache.path(), &server.endpoint);
    let pinned = || resolve_adapter_with("owner/name", Some(COMMIT), 20, &options, &mut |_| {});
    assert_eq!(pinned().unwrap(), snapshot);
    assert_eq!(fs::read(snapshot.join("chat_template.jinja")).unwrap(), b"{{ x }}");
    server.requests();
    assert_eq!(pinned().unwrap(), snapshot);
    assert!(server.requests().is_empty());
}

#[test]
fn what_is_no_adapter_or_not_to_be_had_is_said() {
    let server = Server::new(&ADAPTER);
    let cache = tempfile::tempdir().unwrap();
    let options = options(cache.path(), &server.endpoint);
    // 2 bytes, 7 and 11.
    assert_eq!(fault(19, &options, "11 bytes, expected at most 10"), HubFault::Unusable);
    assert!(blobs(cache.path(), "models--owner--name").len() == 2);
    server.change(|state| {
        state.files.remove("adapter_model.safetensors");
    });
    assert_eq!(fault(99, &options, "neither adapter_model"), HubFault::Unusable);
    server.change(|state| {
        state.files.remove("adapter_config.json");
    });
    assert_eq!(fault(99, &options, "holds no adapter"), HubFault::Unusable);
    server.change(|state| state.status.0 = 404);
    assert_eq!(fault(99, &options, "there is no adapter of this id"), HubFault::NotFound);
    let silent = HubOptions { endpoint: nowhere(), timeout: PATIENCE, ..options.clone() };
    assert_eq!(fault(99, &silent, "cannot be reached"), HubFault::Unreachable);
    let offline = HubOptions { offline: true, ..options.clone() };
    assert_eq!(fault(99, &offline, "HF_HUB_OFFLINE"), HubFault::Unreachable);
    for wrong in ["name", "/etc/passwd", "../owner/name", "owner/name/more", ""] {
        assert!(resolve_adapter_with(wrong, None, 99, &options, &mut |_| {}).is_err(), "{wrong}");
    }
}

#[test]
fn a_name_may_have_a_revision() {
    assert_eq!(parse_adapter("owner/name"), Some(("owner/name", None)));
    assert_eq!(parse_adapter("owner/name@v1.0"), Some(("owner/name", Some("v1.0"))));
    assert_eq!(parse_adapter("owner/name@refs/pr/1"), Some(("owner/name", Some("refs/pr/1"))));
    for wrong in ["name", "owner/name@", "owner/name@../x", "a/b/c", "ft:demo:x::y", "owner/../x"] {
        assert_eq!(parse_adapter(wrong), None, "{wrong}");
    }
}
