//! Models and data sets from the Hugging Face hub, by the cache and variables that its other
//! programs use.
//!
//! A model or a data set is named by an id `owner/name`. The hub is asked for the commit that the
//! revision stands for and the files it has, and what is needed of these is downloaded into the
//! cache, one snapshot folder a commit. A file gets its name in the cache when all of it is there
//! and is what the hub announced: by its SHA-256 or git's SHA-1 where its etag is one (as
//! huggingface.co's are), by its size otherwise. A download that broke off is continued.
//!
//! The token goes to the endpoint's scheme, host and port alone, wherever that redirects to.
//!
//! The file of the revision is written last. Where the hub can't be reached or refuses access, what the
//! cache has is used, with a warning, if there is all that nobody can do without.

mod adapters;
mod cache;
mod check;
mod datasets;
mod layout;
mod models;
mod names;
mod transfer;

#[cfg(test)]
mod tests;

pub use adapters::{parse_adapter, resolve_adapter_with};
pub use datasets::{
    DatasetChoice, DatasetFiles, is_dataset_id, resolve_dataset, resolve_dataset_with,
};
pub use models::{resolve, resolve_config_with, resolve_with};

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::{Error, Result};

/// Where models and data sets come from, and where they are kept.
#[derive(Clone, PartialEq, Eq)]
pub struct HubOptions {
    /// The cache's folder.
    pub cache: PathBuf,
    /// The access token, for what is gated or private.
    pub token: Option<String>,
    /// The hub's address.
    pub endpoint: String,
    /// Whether only the cache is used.
    pub offline: bool,
    /// How long to wait for a connection, an answer, or the next bytes of a file.
    pub timeout: Duration,
    /// How often the list of a repository's files is asked for, at most, where the cache has nothing to
    /// use instead: a hub that can't be reached or counts requests may be asked again after a while. Once
    /// is for somebody who waits for an answer.
    pub list_attempts: u32,
}

/// [`HubOptions::timeout`] where the environment says nothing.
const TIMEOUT: Duration = Duration::from_secs(30);
/// The longest that can be asked for, in seconds.
const MAX_TIMEOUT: u64 = 24 * 60 * 60;

impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("HubOptions")
            .field("cache", &self.cache)
            // A token is a password, and this goes to logs.
            .field("token", &self.token.as_ref().map(|_| "hidden"))
            .field("endpoint", &self.endpoint)
            .field("offline", &self.offline)
            .field("timeout", &self.timeout)
            .field("list_attempts", &self.list_attempts)
            .finish()
    }
}

impl HubOptions {
    /// The options that the environment gives:
    ///
    /// - cache: `HF_HUB_CACHE`, or `hub` in `HF_HOME`, which is `huggingface` in `XDG_CACHE_HOME`
    ///   or in `~/.cache` if unset
    /// - token: `HF_TOKEN`, or the file `HF_TOKEN_PATH`, or the file `token` in `HF_HOME`
    /// - endpoint: `HF_ENDPOINT`, or `https://huggingface.co`
    /// - offline: `HF_HUB_OFFLINE` is 1, true, yes or on
    /// - timeout: `HF_HUB_DOWNLOAD_TIMEOUT` in whole seconds, or 30
    ///
    /// Where they are unset, the older names count that huggingface_hub still reads: `HUGGINGFACE_HUB_CACHE`,
    /// `HUGGING_FACE_HUB_TOKEN` and `TRANSFORMERS_OFFLINE`. Lists are asked for up to five times. An empty variable counts as unset.
    ///
    /// # Errors
    /// [`Error::Option`] for an endpoint, a token or a timeout that cannot be one, and when there
    /// is no home folder to keep the cache in.
    pub fn from_env() -> Result<Self> {
        Self::from_variables(|name| std::env::var(name).ok(), std::env::home_dir())
    }

    fn from_variables(
        variable: impl Fn(&str) -> Option<String>,
        home: Option<PathBuf>,
    ) -> Result<Self> {
        let variable = |name| variable(name).filter(|value| !value.trim().is_empty());
        let folder = |name| variable(name).map(|path| expand_home(&path, home.as_deref()));
        let hf_home = folder("HF_HOME")
            .or_else(|| folder("XDG_CACHE_HOME").map(|cache| cache.join("huggingface")))
            .or_else(|| home.as_ref().map(|home| home.join(".cache").join("huggingface")));
        let cache = folder("HF_HUB_CACHE")
            .or_else(|| folder("HUGGINGFACE_HUB_CACHE"))
            .or_else(|| hf_home.as_ref().map(|home| home.join("hub")))
            .ok_or_else(|| {
                Error::option("HF_HOME", "there is no home folder to keep models in; set HF_HOME")
            })?;
        let named = ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"]
            .into_iter()
            .find_map(|name| Some((name, variable(name)?)));
        let token = named.or_else(|| {
            let path = folder("HF_TOKEN_PATH").or_else(|| Some(hf_home?.join("token")))?;
            Some(("HF_TOKEN", fs::read_to_string(path).ok()?))
        });
        let token = match token {
            Some((name, token)) if !token.trim().chars().all(|c| c.is_ascii_graphic()) => {
                return Err(Error::option(name, "has characters that no token has"));
            }
            token => token.map(|(_, token)| token.trim().to_string()),
        };
        let token = token.filter(|token| !token.is_empty());
        let endpoint =
            variable("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
        let endpoint = endpoint.trim().trim_end_matches('/').to_string();
        let host = endpoint.strip_prefix("https://").or(endpoint.strip_prefix("http://"));
        if !host.is_some_and(|host| {
            !host.is_empty()
                && host.chars().all(|c| c.is_ascii_graphic() && !"?#\\\"<>".contains(c))
        }) {
            return Err(Error::option(
                "HF_ENDPOINT",
                format!("found {endpoint:?}; expected an address such as https://huggingface.co"),
            ));
        }
        let offline = variable("HF_HUB_OFFLINE").or_else(|| variable("TRANSFORMERS_OFFLINE"));
        let offline = offline.is_some_and(|value| {
            ["1", "true", "yes", "on"].contains(&value.trim().to_ascii_lowercase().as_str())
        });
        let timeout = match variable("HF_HUB_DOWNLOAD_TIMEOUT") {
            None => TIMEOUT,
            Some(text) => match text.trim().parse() {
                Ok(seconds @ 1..=MAX_TIMEOUT) => Duration::from_secs(seconds),
                _ => {
                    return Err(Error::option(
                        "HF_HUB_DOWNLOAD_TIMEOUT",
                        format!("found {text:?}; expected seconds, from 1 to {MAX_TIMEOUT}"),
                    ));
                }
            },
        };
        Ok(Self { cache, token, endpoint, offline, timeout, list_attempts: transfer::ATTEMPTS })
    }
}

/// How far a download is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Download<'a> {
    /// The file's name in the repository.
    pub file: &'a str,
    /// Its place among the files that are needed, from 0. Those that are in the cache are passed
    /// over.
    pub index: usize,
    /// How many files that are; more become known once a list of shards has arrived.
    pub files: usize,
    /// The bytes that are here.
    pub bytes: u64,
    /// The bytes of the whole file.
    pub total: u64,
}

/// `path` with a leading `~` replaced by the home folder.
fn expand_home(path: &str, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix('~'), home) {
        (Some(""), Some(home)) => home.to_path_buf(),
        (Some(rest), Some(home)) if rest.starts_with('/') => {
            home.join(rest.trim_start_matches('/'))
        }
        _ => PathBuf::from(path),
    }
}
