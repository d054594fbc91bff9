//! Where the token goes, what is accepted as a file's content, and what becomes of a transfer that
//! breaks off or goes silent.

use super::server::{Asked, COMMIT, Server, Then, hub_etag};
use super::*;
use std::time::Instant;

const WEIGHTS: &str = "model.safetensors";
const REPOSITORY: &str = "models--owner--name";

/// Some bytes that are not the same anywhere.
fn content(bytes: u32) -> Vec<u8> {
    (0..bytes).map(|i| (i % 251 + i / 251 % 7) as u8).collect()
}

fn model(weights: &[u8]) -> Vec<(&str, &[u8])> {
    vec![("config.json", b"{}"), (WEIGHTS, weights)]
}

/// Where each download of the weights started.
fn starts(server: &Server) -> Vec<usize> {
    let is_download = |asked: &Asked| asked.method == "GET" && asked.path.ends_with(WEIGHTS);
    let requests = server.requests();
    requests.iter().filter(|asked| is_download(asked)).map(|a| a.range.unwrap_or(0)).collect()
}

fn has_token(asked: &Asked) -> bool {
    asked.token.as_deref() == Some("Bearer secret")
}

#[test]
fn the_token_reaches_no_other_host_or_port() {
    let files = model(b"the weights");
    // Another port of the same host, and the same port under another name of the host.
    for by_name in [false, true] {
        // With and without the headers by which the hub itself describes the file.
        for names_first in [true, false] {
            let (hub, storage) = (Server::new(&files), Server::new(&files));
            let target = if by_name {
                hub.endpoint.replace("127.0.0.1", "localhost")
            } else {
                storage.endpoint.clone()
            };
            for server in [&hub, &storage] {
                server.change(|state| state.names_first = names_first);
            }
            hub.change(|state| state.file_moved = Some((WEIGHTS, target.clone())));
            let cache = tempfile::tempdir().unwrap();
            let mut options = options(cache.path(), &hub.endpoint);
            options.token = Some("secret".into());
            let folder = fetch(&options).unwrap();
            assert_eq!(fs::read(folder.join(WEIGHTS)).unwrap(), b"the weights");

            let all = [hub.requests(), storage.requests()].concat();
            let endpoint = hub.endpoint.trim_start_matches("http://");
            let (home, away): (Vec<_>, Vec<_>) =
                all.into_iter().partition(|asked| asked.host == endpoint);
            assert!(home.iter().all(has_token), "{home:?}");
            assert!(away.iter().all(|asked| asked.token.is_none()), "{away:?}");
            // The content, and before it what the file is where the hub did not say.
            assert!(away.iter().all(|asked| asked.path == format!("/cdn/{WEIGHTS}")), "{away:?}");
            assert_eq!(away.len(), if names_first { 1 } else { 2 }, "{away:?}");
        }
    }
}

#[test]
fn the_token_stays_away_once_a_redirect_has_left_the_endpoint() {
    let files = model(b"the weights");
    let (hub, storage) = (Server::new(&files), Server::new(&files));
    // The list of files goes to another server, which sends it back.
    hub.change(|state| state.list_moved = Some(storage.endpoint.clone()));
    storage.change(|state| state.list_moved = Some(format!("{}/api/back?", hub.endpoint)));
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(cache.path(), &hub.endpoint);
    options.token = Some("secret".into());
    options.timeout = PATIENCE;
    let message = refusal(&options);
    assert!(message.contains("redirected more than 10 times"), "{message}");
    let at_storage = storage.requests();
    assert!(!at_storage.is_empty() && at_storage.iter().all(|asked| asked.token.is_none()));
    let tokens = hub.requests().iter().map(has_token).collect::<Vec<_>>();
    assert!(tokens.len() > 1 && tokens[0] && !tokens[1..].contains(&true), "{tokens:?}");

    // What a server that did not get the token refuses is not blamed on the token.
    storage.change(|state| {
        state.list_moved = None;
        state.status.0 = 401;
    });
    let message = refusal(&options);
    assert!(
        message.contains("status 401") && message.contains("for the endpoint alone"),
        "{message}"
    );
}

#[test]
fn content_that_is_not_what_was_announced_is_refused_and_not_kept() {
    let good = content(1000);
    let mut same_size = good.clone();
    same_size[500] ^= 1;
    let longer = [good.as_slice(), b"more"].concat();
    for (wrong, expected) in [(same_size, "SHA-256"), (longer, "1000 bytes")] {
        let server = Server::new(&model(&good));
        server.change(|state| state.altered = Some((WEIGHTS, wrong)));
        let cache = tempfile::tempdir().unwrap();
        let options = options(cache.path(), &server.endpoint);
        let message = refusal(&options);
        assert!(message.contains(WEIGHTS) && message.contains(expected), "{message}");
        assert_eq!(blobs(cache.path(), REPOSITORY), [hub_etag("config.json", b"{}")]);
        assert!(fetch(&HubOptions { offline: true, ..options.clone() }).is_err());
        server.change(|state| state.altered = None);
        let folder = fetch(&options).unwrap();
        assert_eq!(fs::read(folder.join(WEIGHTS)).unwrap(), good);
    }

    // A plain file, whose hash is git's.
    let server = Server::new(&model(&good));
    server.change(|state| state.altered = Some(("config.json", b"[]".to_vec())));
    let cache = tempfile::tempdir().unwrap();
    let message = refusal(&options(cache.path(), &server.endpoint));
    assert!(message.contains("config.json") && message.contains("git's SHA-1"), "{message}");
    assert!(blobs(cache.path(), REPOSITORY).is_empty());
}

#[test]
fn a_short_file_is_refused_also_where_etags_are_no_hashes() {
    let good = content(1000);
    for has_hashes in [true, false] {
        let server = Server::new(&model(&good));
        server.change(|state| {
            state.has_hashes = has_hashes;
            state.altered = Some((WEIGHTS, good[..999].to_vec()));
        });
        let cache = tempfile::tempdir().unwrap();
        let options = HubOptions { timeout: PATIENCE, ..options(cache.path(), &server.endpoint) };
        let message = refusal(&options);
        assert!(message.contains(WEIGHTS) && message.contains("given up after 5"), "{message}");
        assert!(fetch(&HubOptions { offline: true, ..options.clone() }).is_err());
        // Where the etag says nothing, the size alone decides.
        let same_size = vec![7; 1000];
        server.change(|state| state.altered = Some((WEIGHTS, same_size)));
        assert_eq!(fetch(&options).is_ok(), !has_hashes);
    }
}

#[test]
fn a_broken_download_continues_where_it_stopped() {
    let good = content(100_000);
    let server = Server::new(&model(&good));
    server.change(|state| state.cut = Some((WEIGHTS, 10_000, Then::Close)));
    let cache = tempfile::tempdir().unwrap();
    let mut options = options(cache.path(), &server.endpoint);
    options.timeout = PATIENCE;
    // More attempts than would be made without getting any further.
    let folder = fetch(&options).unwrap();
    assert_eq!(fs::read(folder.join(WEIGHTS)).unwrap(), good);
    assert_eq!(starts(&server), (0..100_000).step_by(10_000).collect::<Vec<_>>());
}

#[test]
fn a_download_continues_what_an_earlier_process_left() {
    let good = content(1000);
    let etag = hub_etag(WEIGHTS, &good);
    let damaged = vec![1; 400];
    for (left, expected) in [
        (&good[..400], vec![400]),
        // All of it: the process died before the rename.
        (&good[..], vec![]),
        // What doesn't fit is left behind.
        (&damaged[..], vec![400, 0]),
        (&[good.as_slice(), b"more"].concat(), vec![0]),
    ] {
        let server = Server::new(&model(&good));
        let cache = tempfile::tempdir().unwrap();
        let folder = cache.path().join(REPOSITORY).join("blobs");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join(format!("{etag}.incomplete")), left).unwrap();
        let snapshot = fetch(&options(cache.path(), &server.endpoint)).unwrap();
        assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), good);
        assert_eq!(starts(&server), expected);
        assert_eq!(blobs(cache.path(), REPOSITORY).len(), 2, "nothing else is left");
    }
}

#[test]
fn a_server_without_ranges_sends_everything_again() {
    let good = content(1000);
    let server = Server::new(&model(&good));
    server.change(|state| state.has_ranges = false);
    let cache = tempfile::tempdir().unwrap();
    let folder = cache.path().join(REPOSITORY).join("blobs");
    fs::create_dir_all(&folder).unwrap();
    let name = format!("{}.incomplete", hub_etag(WEIGHTS, &good));
    fs::write(folder.join(name), &good[..400]).unwrap();
    let mut options = options(cache.path(), &server.endpoint);
    let snapshot = fetch(&options).unwrap();
    assert_eq!(fs::read(snapshot.join(WEIGHTS)).unwrap(), good);
    assert_eq!(starts(&server), [400]);

    // One that also breaks off never gets any further, and comes to an end.
    server.change(|state| state.cut = Some((WEIGHTS, 500, Then::Close)));
    fs::remove_dir_all(cache.path().join(REPOSITORY)).unwrap();
    options.timeout = PATIENCE;
    let message = refusal(&options);
    assert!(message.contains("broke off after 500 of 1000 bytes"), "{message}");
}

#[test]
fn a_silent_transfer_ends_with_an_error_and_continues_the_next_time() {
    let good = content(1000);
    let server = Server::new(&model(&good));
    server.change(|state| state.cut = Some((WEIGHTS, 0, Then::Silence)));
    let cache = tempfile::tempdir().unwrap();
    let options = HubOptions { timeout: PATIENCE, ..options(cache.path(), &server.endpoint) };
    let message = refusal(&options);
    assert!(message.contains("broke off after 0 of 1000 bytes"), "{message}");
    assert!(message.contains("nothing came for 0.5 s (HF_HUB_DOWNLOAD_TIMEOUT"), "{message}");
    assert!(message.contains("given up after 5 attempts"), "{message}");

    // Silent after every 400 bytes, it still gets there.
    server.requests();
    server.change(|state| state.cut = Some((WEIGHTS, 400, Then::Silence)));
    let folder = fetch(&options).unwrap();
    assert_eq!(fs::read(folder.join(WEIGHTS)).unwrap(), good);
    assert_eq!(starts(&server), [0, 400, 800]);
}

#[test]
fn a_silent_answer_ends_with_an_error() {
    // It listens, and takes no connection.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let cache = tempfile::tempdir().unwrap();
    let options = HubOptions {
        timeout: PATIENCE,
        ..options(cache.path(), &format!("http://{}", listener.local_addr().unwrap()))
    };
    let message = refusal(&options);
    assert!(message.contains("nothing came for 0.5 s"), "{message}");
}

#[test]
fn the_list_of_files_is_asked_for_again_when_the_hub_says() {
    let server = Server::new(&model(b"the weights"));
    // A header of the hub's own, which counts before the other and beside no other status.
    let limits = "RateLimit: \"api\";r=0;t=1\r\nRetry-After: 100\r\n";
    let busy = "RateLimit: \"api\";r=0;t=100\r\nRetry-After: 1\r\n";
    server.change(|state| state.refusals = vec![(429, limits), (503, busy)]);
    let cache = tempfile::tempdir().unwrap();
    let options = HubOptions { timeout: PATIENCE, ..options(cache.path(), &server.endpoint) };
    let start = Instant::now();
    let folder = fetch(&options).unwrap();
    assert!(start.elapsed() >= Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(fs::read(folder.join(WEIGHTS)).unwrap(), b"the weights");

    // What is in the cache is used at once instead.
    server.requests();
    server.change(|state| state.status.0 = 503);
    assert_eq!(fetch(&options).unwrap(), folder);
    assert_eq!(server.requests().len(), 1);

    fs::remove_dir_all(cache.path().join(REPOSITORY)).unwrap();
    let message = refusal(&options);
    assert!(message.contains("status 503 (given up after 5 attempts"), "{message}");
    assert_eq!(server.requests().len(), 5);
    let options = HubOptions { list_attempts: 2, ..options };
    assert!(refusal(&options).contains("status 503 (given up after 2 attempts"));
    assert_eq!(server.requests().len(), 2);
    for list_attempts in [0, 1] {
        let message = refusal(&HubOptions { list_attempts, ..options.clone() });
        assert!(message.contains("status 503, and"), "{message}");
        assert_eq!(server.requests().len(), 1);
    }
}

#[test]
fn a_wait_that_is_too_long_ends_at_once() {
    let server = Server::new(&model(b"the weights"));
    let cache = tempfile::tempdir().unwrap();
    let options = HubOptions { timeout: UNHURRIED, ..options(cache.path(), &server.endpoint) };
    for (status, headers) in
        [(429, "RateLimit: \"api\";r=0;t=55\r\n"), (503, "Retry-After: 55\r\n")]
    {
        server.change(|state| state.refusals = vec![(status, headers)]);
        let message = refusal(&options);
        let said =
            format!("status {status} and asks to wait for 55 s; 55 s are more than the 20 s");
        assert!(message.contains(&said), "{message}");
        assert_eq!(server.requests().len(), 1);
    }
}

#[test]
fn what_another_server_refuses_for_good_is_not_asked_for_again() {
    let files = model(b"the weights");
    let (hub, mirror) = (Server::new(&files), Server::new(&files));
    let cache = tempfile::tempdir().unwrap();
    let options = HubOptions { timeout: UNHURRIED, ..options(cache.path(), &hub.endpoint) };
    let folder = fetch(&options).unwrap();
    hub.change(|state| state.list_moved = Some(mirror.endpoint.clone()));
    let elsewhere = tempfile::tempdir().unwrap();
    let empty = HubOptions { cache: elsewhere.path().to_path_buf(), ..options.clone() };
    for (status, attempts) in [(401, 1), (403, 1), (404, 1), (408, 5), (503, 5)] {
        mirror.change(|state| state.status.0 = status);
        let message = refusal(&empty);
        assert!(message.contains(&format!("answered with status {status}")), "{message}");
        assert_eq!(mirror.requests().len(), attempts, "{status}");
        assert_eq!(fetch(&options).unwrap(), folder, "what is in the cache is used instead");
        assert_eq!(mirror.requests().len(), 1, "{status}");
    }
}

#[test]
fn a_download_waits_for_the_process_that_has_the_lock() {
    let good = content(1000);
    let server = Server::new(&model(&good));
    let cache = tempfile::tempdir().unwrap();
    let etag = hub_etag(WEIGHTS, &good);
    let locks = cache.path().join(".locks").join(REPOSITORY);
    fs::create_dir_all(&locks).unwrap();
    let lock = fs::File::create(locks.join(format!("{etag}.lock"))).unwrap();
    lock.lock().unwrap();
    let options = options(cache.path(), &server.endpoint);
    let download = std::thread::spawn({
        let options = options.clone();
        move || fetch(&options)
    });
    // It has read what the weights are, and can only be waiting then.
    let is_described = |asked: &Asked| asked.method == "HEAD" && asked.path.ends_with(WEIGHTS);
    let mut asked = Vec::new();
    while !asked.iter().any(is_described) {
        asked.extend(server.requests());
        std::thread::yield_now();
    }
    // The other process finishes.
    fs::write(cache.path().join(REPOSITORY).join("blobs").join(&etag), &good).unwrap();
    drop(lock);
    let folder = download.join().unwrap().unwrap();
    assert_eq!(fs::read(folder.join(WEIGHTS)).unwrap(), good);
    assert!(starts(&server).is_empty(), "it was downloaded again");
}

#[test]
fn an_etag_that_leads_out_of_the_cache_is_refused() {
    let server = Server::new(&model(b"x"));
    server.change(|state| state.etag = Some("../../../outside"));
    let cache = tempfile::tempdir().unwrap();
    let message = refusal(&options(cache.path(), &server.endpoint));
    assert!(message.contains("etag that can be a file's name"), "{message}");
    assert!(message.contains(COMMIT), "{message}");
}
