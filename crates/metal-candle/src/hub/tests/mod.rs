//! Against hubs on this machine.

mod adapters;
mod datasets;
mod models;
mod server;
mod transfer;

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::{HubOptions, resolve_config_with, resolve_with};
use crate::{Error, Result};

/// Where attempts fail. Any answer of this machine comes faster.
const PATIENCE: Duration = Duration::from_millis(500);

/// What a server that answers keeps to also on a machine that stalls.
const UNHURRIED: Duration = Duration::from_secs(2);

fn options(cache: &Path, endpoint: &str) -> HubOptions {
    HubOptions {
        cache: cache.to_path_buf(),
        token: None,
        endpoint: endpoint.to_string(),
        offline: false,
        timeout: Duration::from_secs(20),
        list_attempts: 5,
    }
}

/// A port where nothing listens.
fn nowhere() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    format!("http://{}", listener.local_addr().unwrap())
}

fn fetch(options: &HubOptions) -> Result<PathBuf> {
    resolve_with("owner/name", None, options, &mut |_| {})
}

fn refusal(options: &HubOptions) -> String {
    let error = fetch(options).unwrap_err();
    assert!(matches!(error, Error::Hub { .. }), "{error}");
    error.to_string()
}

/// The names of a repository's blobs, finished or not.
fn blobs(cache: &Path, repository: &str) -> Vec<String> {
    let Ok(entries) = fs::read_dir(cache.join(repository).join("blobs")) else { return Vec::new() };
    let mut names =
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect::<Vec<_>>();
    names.sort();
    names
}

#[test]
fn variables_are_read_by_the_hubs_conventions() {
    let home = tempfile::tempdir().unwrap();
    let read = |pairs: &[(&str, &str)]| {
        let pairs =
            pairs.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect::<BTreeMap<_, _>>();
        HubOptions::from_variables(|name| pairs.get(name).cloned(), Some(home.path().into()))
    };
    let plain = read(&[("HF_TOKEN", " "), ("HF_HUB_OFFLINE", "0")]).unwrap();
    assert_eq!(plain.cache, home.path().join(".cache/huggingface/hub"));
    assert_eq!(plain.endpoint, "https://huggingface.co");
    assert_eq!((plain.token, plain.offline), (None, false));
    assert_eq!(plain.timeout, Duration::from_secs(30));

    fs::write(home.path().join("token"), "from-home\n").unwrap();
    fs::write(home.path().join("other"), "from-path").unwrap();
    let mut pairs = vec![("HF_HOME", "~/"), ("XDG_CACHE_HOME", "/xdg")];
    let options = read(&pairs).unwrap();
    assert_eq!(options.cache, home.path().join("hub"));
    assert_eq!(options.token.as_deref(), Some("from-home"));
    pairs.push(("HF_TOKEN_PATH", "~/other"));
    assert_eq!(read(&pairs).unwrap().token.as_deref(), Some("from-path"));
    pairs.extend([
        ("HF_TOKEN", "direct"),
        ("HF_HUB_CACHE", "/cache"),
        ("HF_HUB_OFFLINE", "YES"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "120"),
    ]);
    pairs.push(("HF_ENDPOINT", "http://mirror:80/"));
    let options = read(&pairs).unwrap();
    assert_eq!((options.token.as_deref(), options.offline), (Some("direct"), true));
    assert_eq!(options.cache, Path::new("/cache"));
    assert_eq!(options.endpoint, "http://mirror:80");
    assert_eq!(options.timeout, Duration::from_secs(120));
    assert!(!format!("{options:?}").contains("direct"));

    assert_eq!(
        read(&[("XDG_CACHE_HOME", "/xdg")]).unwrap().cache,
        Path::new("/xdg/huggingface/hub")
    );
    let older = [
        ("HUGGINGFACE_HUB_CACHE", "~/older"),
        ("HUGGING_FACE_HUB_TOKEN", "older"),
        ("TRANSFORMERS_OFFLINE", "1"),
    ];
    let options = read(&older).unwrap();
    assert_eq!(options.cache, home.path().join("older"));
    assert_eq!((options.token.as_deref(), options.offline), (Some("older"), true));
    let newer = [("HF_HUB_CACHE", "/cache"), ("HF_TOKEN", "direct"), ("HF_HUB_OFFLINE", "0")];
    let options = read(&[older, newer].concat()).unwrap();
    assert_eq!(options.cache, Path::new("/cache"));
    assert_eq!((options.token.as_deref(), options.offline), (Some("direct"), false));
    let error = read(&[("HUGGING_FACE_HUB_TOKEN", "two words")]).unwrap_err().to_string();
    assert!(error.contains("HUGGING_FACE_HUB_TOKEN"), "{error}");

    assert!(read(&[("HF_ENDPOINT", "mirror")]).is_err());
    assert!(read(&[("HF_TOKEN", "two words")]).is_err());
    for timeout in ["0", "-1", "soon", "86401", "99999999999999999999"] {
        let error = read(&[("HF_HUB_DOWNLOAD_TIMEOUT", timeout)]).unwrap_err().to_string();
        assert!(error.contains("HF_HUB_DOWNLOAD_TIMEOUT") && error.contains(timeout), "{error}");
    }
    assert!(HubOptions::from_variables(|_| None, None).is_err());
}
