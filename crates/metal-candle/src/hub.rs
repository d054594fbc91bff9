//! Models from the Hugging Face hub, by the cache and variables that its other programs use.
//!
//! A model is named by a folder or by an id `owner/name`. An id is asked for at the hub, which
//! answers with the commit that the revision stands for and the files it has. What the library
//! needs of these is downloaded into the cache, one snapshot folder a commit:
//!
//! ```text
//! <cache>/models--owner--name/refs/<revision>              the commit
//!                            /blobs/<etag>                 the content of a file
//!                            /snapshots/<commit>/<file>    a link to it
//! ```
//!
//! The file of the revision is written last, so it only ever points at a complete snapshot.
//! Without a network, a complete snapshot that is in the cache is used.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use hf_hub::api::sync::{Api, ApiBuilder, ApiError, ApiRepo};
use hf_hub::api::{Progress, RepoInfo};
use hf_hub::{Cache, Repo, RepoType};

use crate::{Error, Result, files};

/// Files besides the weights that are fetched where a repository has them.
const FILES: [&str; 11] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
];
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// How long the hub has to say what a repository holds.
const ANSWER_TIME: Duration = Duration::from_secs(30);
/// How often a file's download is taken up again after the connection broke.
const ATTEMPTS: usize = 4;

/// Where models come from, and where they are kept.
#[derive(Clone, PartialEq, Eq)]
pub struct HubOptions {
    /// The cache's folder.
    pub cache: PathBuf,
    /// The access token, for gated and private models.
    pub token: Option<String>,
    /// The hub's address.
    pub endpoint: String,
    /// Whether only the cache is used.
    pub offline: bool,
}

impl fmt::Debug for HubOptions {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.debug_struct("HubOptions")
            .field("cache", &self.cache)
            // A token is a password, and this goes to logs.
            .field("token", &self.token.as_ref().map(|_| "hidden"))
            .field("endpoint", &self.endpoint)
            .field("offline", &self.offline)
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
    ///
    /// An empty variable counts as unset.
    ///
    /// # Errors
    /// [`Error::Option`] for an endpoint or a token that cannot be one, and when there is no home
    /// folder to keep the cache in.
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
            .or_else(|| hf_home.as_ref().map(|home| home.join("hub")))
            .ok_or_else(|| {
                Error::option("HF_HOME", "there is no home folder to keep models in; set HF_HOME")
            })?;
        let token = variable("HF_TOKEN").or_else(|| {
            let path = folder("HF_TOKEN_PATH").or_else(|| Some(hf_home?.join("token")))?;
            fs::read_to_string(path).ok()
        });
        let token = token.map(|token| token.trim().to_string()).filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.chars().all(|c| c.is_ascii_graphic())) {
            return Err(Error::option("HF_TOKEN", "has characters that no token has"));
        }
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
        let offline = variable("HF_HUB_OFFLINE").is_some_and(|value| {
            ["1", "true", "yes", "on"].contains(&value.trim().to_ascii_lowercase().as_str())
        });
        Ok(Self { cache, token, endpoint, offline })
    }
}

/// How far a download is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Download<'a> {
    /// The file's name in the repository.
    pub file: &'a str,
    /// Its place among the model's files, from 0. Those that are in the cache are passed over.
    pub index: usize,
    /// How many files that are; more become known once a list of shards has arrived.
    pub files: usize,
    /// The bytes that are here.
    pub bytes: u64,
    /// The bytes of the whole file.
    pub total: u64,
}

/// Gives the folder of a model: `model` itself if it is a folder, otherwise the snapshot of the
/// hub's repository `model` (`owner/name`) at `revision` (a branch, tag or commit; `main` if
/// `None`), downloaded if needed. Options come from the environment, see
/// [`HubOptions::from_env`].
///
/// # Errors
/// [`Error::File`] when `model` looks like a path and is no folder; [`Error::Option`] for a
/// revision of a folder or one that cannot be a revision; [`Error::Hub`] when the model cannot be
/// had, saying what was missing and where it was looked for.
pub fn resolve(model: &str, revision: Option<&str>) -> Result<PathBuf> {
    resolve_with(model, revision, &HubOptions::from_env()?, &mut |_| {})
}

/// [`resolve`] with given options, telling `progress` of each piece that arrives.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_with(
    model: &str,
    revision: Option<&str>,
    options: &HubOptions,
    progress: &mut dyn FnMut(Download),
) -> Result<PathBuf> {
    let path = expand_home(model, std::env::home_dir().as_deref());
    if path.is_dir() {
        if let Some(revision) = revision {
            return Err(Error::option(
                "revision",
                format!(
                    "found {revision:?}, but {model} is a folder; only models of the hub have revisions"
                ),
            ));
        }
        return Ok(path);
    }
    if path.exists() {
        return Err(Error::file(path, "is a file; give the model's folder or a hub id owner/name"));
    }
    if !is_id(model) {
        return Err(Error::file(
            path,
            "no such folder, and not the id of a model on the hub, which looks like owner/name",
        ));
    }
    let revision = revision.unwrap_or("main");
    if !is_revision(revision) {
        return Err(Error::option(
            "revision",
            format!("found {revision:?}; expected a branch, a tag or a commit"),
        ));
    }
    let repository = Repository { id: model, revision, options };
    if options.offline {
        return repository.cached().map_err(|missing| {
            repository.error(format!("{missing}; HF_HUB_OFFLINE is set, so nothing is downloaded"))
        });
    }
    if is_commit(revision)
        && let Ok(snapshot) = repository.cached()
    {
        // A commit does not change, so there is nothing to ask.
        return Ok(snapshot);
    }
    match repository.fetch(progress) {
        Ok(snapshot) => Ok(snapshot),
        Err(Failure::Final(error)) => Err(error),
        Err(Failure::Network(reason)) => match repository.cached() {
            Ok(snapshot) => {
                tracing::warn!(
                    "{model}: {} cannot be reached ({reason}); using what was downloaded before, {}",
                    options.endpoint,
                    snapshot.display()
                );
                Ok(snapshot)
            }
            Err(missing) => Err(repository.error(format!(
                "{} cannot be reached ({reason}), and {missing}",
                options.endpoint
            ))),
        },
    }
}

/// Why a model could not be fetched.
enum Failure {
    /// The network, for which the cache may stand in.
    Network(String),
    /// Anything else.
    Final(Error),
}

struct Repository<'a> {
    id: &'a str,
    revision: &'a str,
    options: &'a HubOptions,
}

impl Repository<'_> {
    fn error(&self, message: impl Into<String>) -> Error {
        Error::Hub { repository: self.id.to_string(), message: message.into() }
    }

    fn failure(&self, message: impl Into<String>) -> Failure {
        Failure::Final(self.error(message))
    }

    fn repo(&self, revision: &str) -> Repo {
        Repo::with_revision(self.id.to_string(), RepoType::Model, revision.to_string())
    }

    fn folder(&self) -> PathBuf {
        self.options.cache.join(self.repo(self.revision).folder_name())
    }

    fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    /// The complete snapshot of the revision in the cache, or what is missing of it.
    fn cached(&self) -> Result<PathBuf, String> {
        let reference = self.folder().join("refs").join(self.revision);
        let commit = match fs::read_to_string(&reference) {
            Ok(commit) => commit.trim().to_string(),
            Err(_) if is_commit(self.revision) => self.revision.to_string(),
            Err(_) => {
                return Err(format!(
                    "revision {} is not in the cache (no {})",
                    self.revision,
                    reference.display()
                ));
            }
        };
        if !is_commit(&commit) {
            return Err(format!("{} does not hold a commit", reference.display()));
        }
        let snapshot = self.snapshot(&commit);
        if !snapshot.is_dir() {
            return Err(format!("the cache has no {}", snapshot.display()));
        }
        let missing = missing_files(&snapshot).map_err(|error| error.to_string())?;
        if missing.is_empty() {
            Ok(snapshot)
        } else {
            Err(format!("{} lacks {}", snapshot.display(), missing.join(", ")))
        }
    }

    /// Downloads what is not in the cache yet.
    fn fetch(&self, progress: &mut dyn FnMut(Download)) -> Result<PathBuf, Failure> {
        let options = self.options;
        let cache = Cache::new(options.cache.clone());
        let api = ApiBuilder::from_cache(cache)
            .with_endpoint(options.endpoint.clone())
            .with_token(options.token.clone())
            .with_progress(false)
            .with_user_agent("metal-candle", env!("CARGO_PKG_VERSION"))
            .build()
            .map_err(|error| self.failure(format!("the connection cannot be set up: {error}")))?;
        let info = self.info(&api)?;
        let commit = info.sha;
        if !is_commit(&commit) {
            return Err(self.failure(format!(
                "{} names the commit {commit:?}, which cannot be one",
                options.endpoint
            )));
        }
        let available = info.siblings.into_iter().map(|file| file.rfilename).collect();
        let source = Source {
            repository: self,
            api: &api,
            repo: api.repo(self.repo(&commit)),
            commit: &commit,
        };
        let snapshot = self.snapshot(&commit);

        let mut wanted = self.wanted(&available)?;
        let shards = wanted.contains(&INDEX.to_string());
        let mut index = 0;
        while index < wanted.len() {
            let files = wanted.len();
            let Some(file) = wanted.get(index).cloned() else { break };
            source.fetch(&file, &mut |bytes, total| {
                progress(Download { file: &file, index, files, bytes, total });
            })?;
            index += 1;
            // The list of shards comes last of the files known so far.
            if shards && index == files && file == INDEX {
                let shards = shard_names(&snapshot.join(INDEX)).map_err(Failure::Final)?;
                if let Some(absent) = shards.iter().find(|shard| !available.contains(*shard)) {
                    return Err(self.failure(format!(
                        "{INDEX} names {absent}, which the repository at {} does not have",
                        options.endpoint
                    )));
                }
                wanted.extend(shards);
            }
        }
        if self.revision != commit {
            let reference = self.folder().join("refs").join(self.revision);
            let parent = reference.parent().unwrap_or(&reference);
            fs::create_dir_all(parent).map_err(|error| Failure::Final(Error::io(parent)(error)))?;
            files::write_bytes_atomic(&reference, &commit).map_err(Failure::Final)?;
        }
        Ok(snapshot)
    }

    /// What the hub says of the repository.
    fn info(&self, api: &Api) -> Result<RepoInfo, Failure> {
        let request = api.repo(self.repo(self.revision)).info_request();
        let request =
            request.config().http_status_as_error(false).timeout_global(Some(ANSWER_TIME)).build();
        let mut response = request.call().map_err(|error| Failure::Network(error.to_string()))?;
        let status = response.status().as_u16();
        if status != 200 {
            let code = response.headers().get("x-error-code");
            let code = code.and_then(|code| code.to_str().ok()).unwrap_or_default();
            return Err(self.refusal(status, code, None));
        }
        response.body_mut().read_json().map_err(|error| {
            self.failure(format!(
                "{} gave an answer that is not the hub's: {error}; check HF_ENDPOINT",
                self.options.endpoint
            ))
        })
    }

    /// The failure that an HTTP status stands for. `file` is what was asked for; `None` is the
    /// repository itself.
    fn refusal(&self, status: u16, code: &str, file: Option<&str>) -> Failure {
        let endpoint = &self.options.endpoint;
        let token = if self.options.token.is_some() {
            "the token given (HF_TOKEN or the saved one) has no access"
        } else {
            "no token was given; set HF_TOKEN to one that has access"
        };
        let what = file.map_or(String::new(), |file| format!(" to {file}"));
        match status {
            401 if file.is_none() && code != "GatedRepo" => self.failure(format!(
                "{endpoint} refused access (status 401): the model does not exist under this id, or \
                 it is private or gated and {token}"
            )),
            401 | 403 => self.failure(format!(
                "{endpoint} refused access{what} (status {status}): the model is private or gated; \
                 accept its terms on its page there. {token}"
            )),
            404 if code == "RevisionNotFound" => self.failure(format!(
                "{endpoint} has this model, but no revision {:?}",
                self.revision
            )),
            404 => match file {
                Some(file) => self.failure(format!("{endpoint} does not have its file {file}")),
                None => self.failure(format!(
                    "there is no model of this id at {endpoint} (revision {}), and no folder of \
                     this name here",
                    self.revision
                )),
            },
            429 | 500.. => Failure::Network(format!("status {status}{what}")),
            _ => self.failure(format!("{endpoint} answered with status {status}{what}")),
        }
    }

    /// The files to fetch; with a list of shards, that comes last and the shards after it.
    fn wanted(&self, available: &BTreeSet<String>) -> Result<Vec<String>, Failure> {
        let has = |name: &str| available.contains(name);
        let endpoint = &self.options.endpoint;
        if !has("config.json") {
            return Err(self.failure(format!(
                "the repository at {endpoint} has no config.json, so it holds no transformers model"
            )));
        }
        let mut wanted =
            FILES.iter().filter(|name| has(name)).map(|name| name.to_string()).collect::<Vec<_>>();
        if has(SINGLE) {
            wanted.push(SINGLE.to_string());
        } else if has(INDEX) {
            wanted.push(INDEX.to_string());
        } else {
            let other = available.iter().find(|name| {
                [".safetensors", ".gguf", ".bin", ".pt", ".pth"].iter().any(|e| name.ends_with(e))
            });
            let found = other.map_or("no weights".to_string(), |name| name.clone());
            return Err(self.failure(format!(
                "the repository at {endpoint} has neither {SINGLE} nor {INDEX}, but {found}; only \
                 safetensors checkpoints can be used"
            )));
        }
        Ok(wanted)
    }
}

/// One commit of a repository, from which files are fetched.
struct Source<'a> {
    repository: &'a Repository<'a>,
    api: &'a Api,
    repo: ApiRepo,
    commit: &'a str,
}

impl Source<'_> {
    /// Brings a file into the snapshot, unless it is there.
    fn fetch(&self, file: &str, progress: &mut dyn FnMut(u64, u64)) -> Result<(), Failure> {
        let pointer = self.repository.snapshot(self.commit).join(file);
        if pointer.exists() {
            return Ok(());
        }
        let mut attempt = 1;
        loop {
            match self.download(file, &pointer, progress) {
                Err(Failure::Network(reason)) if attempt < ATTEMPTS => {
                    tracing::warn!("{}: {file}: {reason}; trying again", self.repository.id);
                    std::thread::sleep(Duration::from_millis(250 << attempt));
                    attempt += 1;
                }
                other => return other,
            }
        }
    }

    fn download(
        &self,
        file: &str,
        pointer: &Path,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), Failure> {
        let endpoint = &self.repository.options.endpoint;
        let metadata =
            self.api.metadata(&self.repo.url(file)).map_err(|error| self.failure(file, error))?;
        // Both become parts of paths.
        if metadata.commit_hash() != self.commit || !is_etag(metadata.etag()) {
            return Err(self.repository.failure(format!(
                "{endpoint} gave {file} of commit {:?} with etag {:?}; expected commit {}",
                metadata.commit_hash(),
                metadata.etag(),
                self.commit
            )));
        }
        let size = metadata.size() as u64;
        let blob = self.repository.folder().join("blobs").join(metadata.etag());
        let length = |path: &Path| fs::metadata(path).map(|found| found.len()).ok();
        if pointer.is_symlink() {
            // Its blob is gone; the name must be free for the new link.
            fs::remove_file(pointer).map_err(|e| Failure::Final(Error::io(pointer)(e)))?;
        }
        if length(&blob) == Some(size) {
            // Another commit has the same content.
            return link(&self.repository.folder(), metadata.etag(), pointer)
                .map_err(|error| Failure::Final(Error::io(pointer)(error)));
        }
        let part = blob.with_extension("part");
        if length(&part).is_some_and(|length| length >= size) {
            // The hub has nothing to send after the last byte, and would answer with an error.
            fs::remove_file(&part).map_err(|error| Failure::Final(Error::io(&part)(error)))?;
        }
        let reporter = Reporter { done: 0, total: size, progress };
        self.repo
            .download_with_progress(file, reporter)
            .map_err(|error| self.failure(file, error))?;
        match length(&blob) {
            Some(found) if found == size => Ok(()),
            found => {
                // Left in place, it would be taken for the whole file from now on.
                for path in [pointer, blob.as_path()] {
                    fs::remove_file(path).map_err(|e| Failure::Final(Error::io(path)(e)))?;
                }
                Err(Failure::Network(format!(
                    "{file} arrived with {} bytes instead of {size}",
                    found.unwrap_or(0)
                )))
            }
        }
    }

    fn failure(&self, file: &str, error: ApiError) -> Failure {
        let cache = self.repository.options.cache.display();
        match error {
            ApiError::RequestError(error) => {
                // The HTTP client's error type is not part of this crate's dependencies; this is
                // how it writes a status.
                let text = error.to_string();
                match text.strip_prefix("http status: ").and_then(|status| status.parse().ok()) {
                    Some(status) => self.repository.refusal(status, "", Some(file)),
                    None => Failure::Network(format!("{file}: {text}")),
                }
            }
            ApiError::TooManyRetries(error) => self.failure(file, *error),
            ApiError::IoError(error) => match error.kind() {
                std::io::ErrorKind::StorageFull
                | std::io::ErrorKind::QuotaExceeded
                | std::io::ErrorKind::PermissionDenied
                | std::io::ErrorKind::ReadOnlyFilesystem => self.repository.failure(format!(
                    "{file} cannot be written to the cache {cache}: {error}; free some space or \
                     set HF_HOME to another folder"
                )),
                _ => Failure::Network(format!("{file}: {error}")),
            },
            ApiError::LockAcquisition(path) => self.repository.failure(format!(
                "{file} is being downloaded by another process ({} is locked); wait for it",
                path.display()
            )),
            other => self.repository.failure(format!(
                "{} gave an answer for {file} that is not the hub's: {other}; check HF_ENDPOINT",
                self.repository.options.endpoint
            )),
        }
    }
}

/// Passes a download's progress on.
struct Reporter<'a> {
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

impl Progress for Reporter<'_> {
    fn init(&mut self, size: usize, _file: &str) {
        self.done = 0;
        self.total = size as u64;
    }

    fn update(&mut self, size: usize) {
        self.done += size as u64;
        (self.progress)(self.done, self.total);
    }

    fn finish(&mut self) {
        (self.progress)(self.total, self.total);
    }
}

/// What of a model's files a snapshot lacks.
fn missing_files(snapshot: &Path) -> Result<Vec<String>> {
    let absent = |name: &str| !snapshot.join(name).exists();
    let mut missing = Vec::new();
    if absent("config.json") {
        missing.push("config.json".to_string());
    }
    if absent(SINGLE) {
        if absent(INDEX) {
            missing.push(format!("{SINGLE} (or {INDEX})"));
        } else {
            missing.extend(shard_names(&snapshot.join(INDEX))?.into_iter().filter(|n| absent(n)));
        }
    }
    Ok(missing)
}

/// The files that an index of shards names, each once.
fn shard_names(index: &Path) -> Result<BTreeSet<String>> {
    let value: serde_json::Value = files::read_json(index)?;
    let names = value
        .get("weight_map")
        .and_then(|map| map.as_object())
        .ok_or_else(|| Error::file(index, "has no weight_map, which should list the tensors"))?
        .values()
        .map(|name| match name.as_str() {
            // The name becomes part of a path.
            Some(name) if is_name(name) => Ok(name.to_string()),
            _ => Err(Error::file(index, format!("weight_map has {name}; expected a file's name"))),
        })
        .collect::<Result<BTreeSet<_>>>()?;
    if names.is_empty() {
        return Err(Error::file(index, "weight_map is empty; it should list the tensors"));
    }
    Ok(names)
}

/// Makes `pointer`, in `snapshots/<commit>`, stand for the blob of this etag.
fn link(_folder: &Path, etag: &str, pointer: &Path) -> std::io::Result<()> {
    if let Some(parent) = pointer.parent() {
        fs::create_dir_all(parent)?;
    }
    #[cfg(unix)]
    return std::os::unix::fs::symlink(Path::new("../../blobs").join(etag), pointer);
    #[cfg(not(unix))]
    return fs::copy(_folder.join("blobs").join(etag), pointer).map(|_| ());
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

/// A file's name without folders, in characters that need no escape in an address.
fn is_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= 255
        && !name.starts_with('.')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
}

/// `owner/name`, by the hub's rules.
fn is_id(model: &str) -> bool {
    let part = |part: &str| {
        is_name(part) && part.len() <= 96 && !part.contains("--") && !part.contains("..")
    };
    model.split_once('/').is_some_and(|(owner, name)| part(owner) && part(name))
}

fn is_revision(revision: &str) -> bool {
    !revision.is_empty() && revision.split('/').all(|part| is_name(part) && !part.contains(".."))
}

fn is_commit(commit: &str) -> bool {
    commit.len() == 40 && commit.chars().all(|c| c.is_ascii_hexdigit())
}

/// A file's etag, strong or weak (`W/...`), as the cache can use it for a path.
fn is_etag(etag: &str) -> bool {
    let strong = etag.strip_prefix("W/").unwrap_or(etag);
    // The cache names the unfinished file by replacing what follows a dot.
    is_name(strong) && !strong.contains('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::collections::BTreeMap;
    use std::io::{BufRead, BufReader, Write};
    use std::net::{TcpListener, TcpStream};
    use std::sync::{Arc, Mutex};

    const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
    const OTHER: &str = "89abcdef0123456789abcdef0123456789abcdef";

    /// What the server answers with, and what it was asked.
    struct State {
        commit: String,
        files: BTreeMap<String, Vec<u8>>,
        /// The status of the repository, and of each file.
        status: (u16, u16),
        error_code: &'static str,
        /// A file that is redirected to another address, as large files are.
        redirected: Option<&'static str>,
        /// A file whose connection breaks after so many bytes, as long as this is set.
        broken: Option<(&'static str, usize)>,
        requests: Vec<String>,
    }

    /// A hub on this machine with one model `owner/name`.
    struct Server {
        endpoint: String,
        state: Arc<Mutex<State>>,
    }

    impl Server {
        fn new(files: &[(&str, &[u8])]) -> Self {
            let state = Arc::new(Mutex::new(State {
                commit: COMMIT.to_string(),
                files: files.iter().map(|(n, c)| (n.to_string(), c.to_vec())).collect(),
                status: (200, 200),
                error_code: "",
                redirected: None,
                broken: None,
                requests: Vec::new(),
            }));
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let endpoint = format!("http://{}", listener.local_addr().unwrap());
            let shared = state.clone();
            let address = endpoint.clone();
            std::thread::spawn(move || {
                for stream in listener.incoming() {
                    // A client that goes away early is none of the server's business.
                    let _ = answer(stream.unwrap(), &shared, &address);
                }
            });
            Self { endpoint, state }
        }

        fn change(&self, change: impl FnOnce(&mut State)) {
            change(&mut self.state.lock().unwrap());
        }

        fn requests(&self) -> Vec<String> {
            std::mem::take(&mut self.state.lock().unwrap().requests)
        }
    }

    fn answer(mut stream: TcpStream, state: &Mutex<State>, endpoint: &str) -> std::io::Result<()> {
        let mut reader = BufReader::new(stream.try_clone()?);
        let mut line = String::new();
        reader.read_line(&mut line)?;
        let path = line.split(' ').nth(1).unwrap_or_default().to_string();
        let (mut start, mut last, mut token) = (0usize, None, String::new());
        loop {
            let mut header = String::new();
            if reader.read_line(&mut header)? == 0 || header.trim().is_empty() {
                break;
            }
            let (name, value) = header.split_once(':').unwrap();
            if name.eq_ignore_ascii_case("range") {
                let (from, to) = value.trim()["bytes=".len()..].split_once('-').unwrap();
                start = from.parse().unwrap();
                last = to.parse::<usize>().ok();
            } else if name.eq_ignore_ascii_case("authorization") {
                token = value.trim().to_string();
            }
        }
        let mut state = state.lock().unwrap();
        state.requests.push(format!("{path} from {start} {token}").trim_end().to_string());
        let mut reply = |status: u16, headers: &str, body: &[u8], sent: usize| {
            write!(
                stream,
                "HTTP/1.1 {status} X\r\nContent-Length: {}\r\nConnection: close\r\n{headers}\r\n",
                body.len()
            )?;
            stream.write_all(&body[..sent.min(body.len())])
        };
        if path == "/api/models/owner/name/revision/main" {
            let siblings = state
                .files
                .keys()
                .map(|name| serde_json::json!({ "rfilename": name }))
                .collect::<Vec<_>>();
            let body = serde_json::json!({ "sha": state.commit, "siblings": siblings }).to_string();
            let code = format!("X-Error-Code: {}\r\n", state.error_code);
            return reply(state.status.0, &code, body.as_bytes(), usize::MAX);
        }
        let resolved = format!("/owner/name/resolve/{}/", state.commit);
        let (name, elsewhere) = match (path.strip_prefix(&resolved), path.strip_prefix("/cdn/")) {
            (Some(name), _) => (name, false),
            (None, Some(name)) => (name, true),
            (None, None) => return reply(404, "", b"", 0),
        };
        let Some(content) = state.files.get(name) else { return reply(404, "", b"", 0) };
        if state.status.1 != 200 {
            return reply(state.status.1, "", b"", 0);
        }
        let etag = content.iter().fold(name.len() as u64, |h, b| h * 31 % 1_000_003 + *b as u64);
        let commit = &state.commit;
        if state.redirected == Some(name) && !elsewhere {
            let headers = format!(
                "X-Repo-Commit: {commit}\r\nX-Linked-Etag: \"{etag}\"\r\n\
                 Location: {endpoint}/cdn/{name}\r\n"
            );
            return reply(302, &headers, b"", 0);
        }
        if start >= content.len() {
            return reply(416, "", b"", 0);
        }
        let end = last.map_or(content.len(), |last| (last + 1).min(content.len()));
        let range = format!("Content-Range: bytes {start}-{}/{}\r\n", end - 1, content.len());
        let headers = if elsewhere {
            range
        } else {
            format!("X-Repo-Commit: {commit}\r\nETag: \"{etag}\"\r\n{range}")
        };
        let sent = match state.broken {
            Some((broken, bytes)) if broken == name && last.is_none() => bytes,
            _ => usize::MAX,
        };
        reply(206, &headers, &content[start..end], sent)
    }

    fn options(cache: &Path, endpoint: &str) -> HubOptions {
        HubOptions {
            cache: cache.to_path_buf(),
            token: None,
            endpoint: endpoint.to_string(),
            offline: false,
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

    const MODEL: [(&str, &[u8]); 4] = [
        ("README.md", b"not needed"),
        ("config.json", b"{}"),
        ("model.safetensors", b"the weights"),
        ("tokenizer.json", b"{\"a\":1}"),
    ];

    #[test]
    fn a_model_is_downloaded_once_and_used_without_a_network_after() {
        let server = Server::new(&MODEL);
        server.change(|state| state.redirected = Some("model.safetensors"));
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
        assert!(server.requests().iter().all(|request| request.ends_with("Bearer secret")));

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
        let weights = |r: &&String| r.contains("model.safetensors");
        assert_eq!(server.requests().iter().filter(weights).count(), 1, "only its size is asked");
    }

    #[test]
    fn a_broken_download_continues_where_it_stopped() {
        let content = (0..100_000u32).map(|i| (i % 251) as u8).collect::<Vec<_>>();
        let server = Server::new(&[("config.json", b"{}"), ("model.safetensors", &content)]);
        server.change(|state| state.broken = Some(("model.safetensors", 30_000)));
        let cache = tempfile::tempdir().unwrap();
        let options = options(cache.path(), &server.endpoint);
        // Four attempts of 30 000 bytes bring the whole file.
        let folder = fetch(&options).unwrap();
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), content);
        let starts = server
            .requests()
            .iter()
            .filter(|request| {
                request.contains("model.safetensors from") && !request.ends_with(" 0")
            })
            .map(|request| request.rsplit(' ').next().unwrap().parse::<usize>().unwrap())
            .collect::<Vec<_>>();
        assert_eq!(starts, [30_000, 60_000, 90_000]);
    }

    #[test]
    fn a_finished_but_unnamed_download_does_not_block_the_next() {
        let server = Server::new(&MODEL);
        let cache = tempfile::tempdir().unwrap();
        let options = options(cache.path(), &server.endpoint);
        let folder = fetch(&options).unwrap();
        let blob = fs::canonicalize(folder.join("model.safetensors")).unwrap();
        // A process that died between the last byte and the rename leaves this behind.
        fs::rename(&blob, blob.with_extension("part")).unwrap();
        fetch(&options).unwrap();
        assert_eq!(fs::read(folder.join("model.safetensors")).unwrap(), b"the weights");
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
    fn without_network_and_cache_the_error_says_where_it_looked() {
        let cache = tempfile::tempdir().unwrap();
        let mut options = options(cache.path(), &nowhere());
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
        let server =
            Server::new(&[("config.json", b"{}"), ("model.safetensors.index.json", outside)]);
        let error = fetch(&options(cache.path(), &server.endpoint)).unwrap_err().to_string();
        assert!(error.contains("expected a file's name"), "{error}");
    }

    #[test]
    fn paths_and_ids_are_told_apart() {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path(), &nowhere());
        let name = folder.path().to_str().unwrap();
        let resolve = |model: &str, revision| resolve_with(model, revision, &options, &mut |_| {});
        assert_eq!(resolve(name, None).unwrap(), folder.path());
        assert!(matches!(resolve(name, Some("main")), Err(Error::Option { .. })));
        let file = folder.path().join("a.gguf");
        fs::write(&file, "x").unwrap();
        let error = resolve(file.to_str().unwrap(), None).unwrap_err().to_string();
        assert!(error.contains("is a file"), "{error}");
        for path in
            ["./no", "../no/model", "/no/such", "~/no-such-folder", "a/b/c", "no", "", "a//b"]
        {
            let error = resolve(path, None).unwrap_err();
            assert!(matches!(error, Error::File { .. }), "{path:?}: {error}");
            assert!(error.to_string().contains("no such folder"), "{error}");
        }
        assert!(matches!(resolve("owner/name", Some("a/../b")), Err(Error::Option { .. })));
        assert!(matches!(resolve("owner/name", None), Err(Error::Hub { .. })));
    }

    #[test]
    fn variables_are_read_by_the_hubs_conventions() {
        let home = tempfile::tempdir().unwrap();
        let read = |pairs: &[(&str, &str)]| {
            let pairs = pairs
                .iter()
                .map(|(a, b)| (a.to_string(), b.to_string()))
                .collect::<BTreeMap<_, _>>();
            HubOptions::from_variables(|name| pairs.get(name).cloned(), Some(home.path().into()))
        };
        let plain = read(&[("HF_TOKEN", " "), ("HF_HUB_OFFLINE", "0")]).unwrap();
        assert_eq!(plain.cache, home.path().join(".cache/huggingface/hub"));
        assert_eq!(plain.endpoint, "https://huggingface.co");
        assert_eq!((plain.token, plain.offline), (None, false));

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
        ]);
        pairs.push(("HF_ENDPOINT", "http://mirror:80/"));
        let options = read(&pairs).unwrap();
        assert_eq!((options.token.as_deref(), options.offline), (Some("direct"), true));
        assert_eq!(options.cache, Path::new("/cache"));
        assert_eq!(options.endpoint, "http://mirror:80");
        assert!(!format!("{options:?}").contains("direct"));

        assert_eq!(
            read(&[("XDG_CACHE_HOME", "/xdg")]).unwrap().cache,
            Path::new("/xdg/huggingface/hub")
        );
        assert!(read(&[("HF_ENDPOINT", "mirror")]).is_err());
        assert!(read(&[("HF_TOKEN", "two words")]).is_err());
        assert!(HubOptions::from_variables(|_| None, None).is_err());
    }
}
