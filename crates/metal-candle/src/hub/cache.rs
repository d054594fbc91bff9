//! A repository's folder in the cache, as huggingface_hub lays it out.
//!
//! ```text
//! <cache>/models--owner--name/refs/<revision>              the commit
//!                            /blobs/<etag>                 the content of a file
//!                            /blobs/<etag>.incomplete      as much of it as has arrived
//!                            /snapshots/<commit>/<file>    a link to it
//!                            /trees/<commit>.json          which files the commit has
//! <cache>/.locks/models--owner--name/<etag>.lock           held by who downloads it
//! ```
//!
//! Data sets have `datasets--` for `models--`.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde_json::json;

use super::HubOptions;
use super::names::{is_commit, is_path};
use super::transfer::{Failure, Listing};
use crate::{Error, HubFault, Result, files};

/// How often a lock is tried that another process holds.
const LOCK_PAUSE: Duration = Duration::from_millis(100);

/// What a repository of the hub holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Model,
    /// Which lies in a repository of models.
    Adapter,
    Dataset,
}

impl Kind {
    /// For messages.
    pub(super) fn noun(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::Adapter => "adapter",
            Self::Dataset => "data set",
        }
    }

    /// In the cache's folders and in the addresses of the hub's API.
    pub(super) fn plural(self) -> &'static str {
        match self {
            Self::Model | Self::Adapter => "models",
            Self::Dataset => "datasets",
        }
    }

    /// Before the id in the addresses of files.
    pub(super) fn prefix(self) -> &'static str {
        match self {
            Self::Model | Self::Adapter => "",
            Self::Dataset => "datasets/",
        }
    }
}

/// One revision of a repository, and where it comes from and goes to.
#[derive(Clone, Copy)]
pub(super) struct Repository<'a> {
    pub(super) kind: Kind,
    pub(super) id: &'a str,
    pub(super) revision: &'a str,
    pub(super) options: &'a HubOptions,
}

impl Repository<'_> {
    pub(super) fn error(&self, message: impl Into<String>) -> Error {
        self.error_of(HubFault::Unusable, message)
    }

    pub(super) fn error_of(&self, fault: HubFault, message: impl Into<String>) -> Error {
        Error::Hub { repository: self.id.to_string(), message: message.into(), fault }
    }

    pub(super) fn failure(&self, message: impl Into<String>) -> Failure {
        Failure::Final(self.error(message))
    }

    /// `<kind>s--owner--name`.
    fn name(&self) -> String {
        format!("{}--{}", self.kind.plural(), self.id.replace('/', "--"))
    }

    pub(super) fn folder(&self) -> PathBuf {
        self.options.cache.join(self.name())
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.folder().join("blobs").join(etag)
    }

    /// The snapshot of the revision in the cache with its commit, or why there is none.
    pub(super) fn cached_snapshot(&self) -> Result<(String, PathBuf), String> {
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
        Ok((commit, snapshot))
    }

    /// Notes that the revision is this commit.
    pub(super) fn refer_to(&self, commit: &str) -> Result<()> {
        let reference = self.folder().join("refs").join(self.revision);
        let is_known = || fs::read_to_string(&reference).is_ok_and(|known| known.trim() == commit);
        if self.revision == commit || is_known() {
            return Ok(());
        }
        let parent = reference.parent().unwrap_or(&reference);
        fs::create_dir_all(parent).map_err(Error::io(parent))?;
        files::write_bytes_atomic(&reference, commit)
    }

    /// Where the list of a commit's files is.
    fn list_path(&self, commit: &str) -> PathBuf {
        self.folder().join("trees").join(format!("{commit}.json"))
    }

    /// The names of the commit's files, if the list of them is in the cache.
    pub(super) fn known_files(&self, commit: &str) -> Option<Vec<String>> {
        let list: serde_json::Value = files::read_json(self.list_path(commit)).ok()?;
        let list = list.get("files")?.as_object()?;
        Some(list.keys().filter(|name| is_path(name)).cloned().collect())
    }

    /// Keeps the list of the commit's files, in huggingface_hub's form, where the hub told enough of
    /// them for that. A cache that can't be written to is used without: the hub is asked again.
    pub(super) fn remember_files(&self, listing: &Listing) {
        let path = self.list_path(&listing.commit);
        let mut list = serde_json::Map::new();
        for file in &listing.files {
            let (Some(size), Some(blob)) = (file.size, &file.blob) else { return };
            let mut entry = json!({ "size": size, "blob_id": blob });
            if let (Some(lfs), Some(entry)) = (&file.lfs, entry.as_object_mut()) {
                entry.insert("lfs_sha256".into(), json!(lfs.sha256));
                entry.insert("lfs_size".into(), json!(lfs.size));
            }
            list.insert(file.name.clone(), entry);
        }
        if path.exists() {
            return;
        }
        let parent = path.parent().unwrap_or(&path);
        let list = json!({ "format_version": 1, "files": list }).to_string();
        let kept = fs::create_dir_all(parent)
            .map_err(Error::io(parent))
            .and_then(|()| files::write_bytes_atomic(&path, list));
        if let Err(error) = kept {
            tracing::debug!("{}: the list of its files is not kept: {error}", self.id);
        }
    }

    /// Those of the files `beside` what nobody can do without that the snapshot in the cache lacks; `None` where it isn't
    /// known which there are.
    fn absent(&self, beside: impl Fn(&str) -> bool) -> Option<Vec<String>> {
        let (commit, snapshot) = self.cached_snapshot().ok()?;
        let mut names = self.known_files(&commit)?;
        names.retain(|name| beside(name) && !snapshot.join(name).exists());
        Some(names)
    }

    /// What the cache or the hub gives: the cache alone when the options say offline, and for a
    /// commit, which never changes, when the cache has all of it; otherwise the hub, for which the cache
    /// stands in when it cannot be reached or refuses access.
    ///
    /// `cached` gives what is there once nothing is missing that nobody can do without. `beside` says which other files are
    /// wanted where the repository has them: another program may have left them out. Where it isn't known which the commit
    /// has, `is_whole` says by its snapshot whether who filled it wanted those, too.
    pub(super) fn resolve<T>(
        &self,
        beside: impl Fn(&str) -> bool,
        is_whole: impl Fn(&Path) -> bool,
        cached: impl Fn() -> Result<T, String>,
        fetch: impl FnOnce() -> Result<T, Failure>,
    ) -> Result<T> {
        let cached_as_it_is = || -> Result<T, String> {
            let found = cached()?;
            let absent = self.absent(&beside).unwrap_or_default();
            if !absent.is_empty() {
                tracing::warn!(
                    "{}: the cache lacks {}, which the repository has; going on without",
                    self.id,
                    absent.join(", ")
                );
            }
            Ok(found)
        };
        if self.options.offline {
            return cached_as_it_is().map_err(|missing| {
                let message = format!(
                    "{missing}; HF_HUB_OFFLINE (or TRANSFORMERS_OFFLINE) is set, so nothing is downloaded"
                );
                self.error_of(HubFault::Unreachable, message)
            });
        }
        let lacks_nothing = || match self.absent(&beside) {
            Some(absent) => absent.is_empty(),
            None => self.cached_snapshot().is_ok_and(|(_, snapshot)| is_whole(&snapshot)),
        };
        if is_commit(self.revision)
            && lacks_nothing()
            && let Ok(found) = cached()
        {
            return Ok(found);
        }
        match fetch() {
            Ok(found) => Ok(found),
            Err(Failure::Final(error)) => Err(error),
            Err(Failure::Refused(reason)) => match cached_as_it_is() {
                Ok(found) => {
                    tracing::warn!("{}: {reason}; using what was downloaded before", self.id);
                    Ok(found)
                }
                Err(_) => Err(self.error_of(HubFault::NotFound, reason)),
            },
            Err(Failure::Network { reason, .. }) => match cached_as_it_is() {
                Ok(found) => {
                    tracing::warn!("{}: {reason}; using what was downloaded before", self.id);
                    Ok(found)
                }
                Err(missing) => {
                    let message = format!("{reason}, and {missing}");
                    Err(self.error_of(HubFault::Unreachable, message))
                }
            },
        }
    }

    /// The right to download the blob of this etag. Waits while another process has it. On a file
    /// system without locks there is none to wait for, and every process downloads for itself.
    pub(super) fn lock(&self, etag: &str) -> Result<Option<File>> {
        let folder = self.options.cache.join(".locks").join(self.name());
        fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
        let path = folder.join(format!("{etag}.lock"));
        let file = File::options()
            .create(true)
            .truncate(false)
            .write(true)
            .open(&path)
            .map_err(Error::io(&path))?;
        let mut is_new = true;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) => {
                    if is_new {
                        tracing::warn!(
                            "{}: another process is downloading; waiting for it ({} is locked)",
                            self.id,
                            path.display()
                        );
                        is_new = false;
                    }
                    std::thread::sleep(LOCK_PAUSE);
                }
                Err(TryLockError::Error(error)) => {
                    tracing::debug!("downloading without a lock: {error}");
                    return Ok(None);
                }
            }
        }
    }

    /// Makes `file` of the commit's snapshot stand for the blob of this etag.
    pub(super) fn link(&self, etag: &str, commit: &str, file: &str) -> io::Result<()> {
        let pointer = self.snapshot(commit).join(file);
        if let Some(parent) = pointer.parent() {
            fs::create_dir_all(parent)?;
        }
        if pointer.is_symlink() {
            // Its blob is gone, or another process made it just now.
            match fs::remove_file(&pointer) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        let blob = self.blob(etag);
        // Not every file system has symbolic links; another name for the same file will do.
        let links: [Link; 2] =
            [&|pointer| symlink(etag, file, pointer), &|pointer| fs::hard_link(&blob, pointer)];
        match place(&blob, &pointer, links) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }
}

/// A way to make a path stand for a blob.
type Link<'a> = &'a dyn Fn(&Path) -> io::Result<()>;

/// Makes `pointer` stand for a blob by the first of these links that the file system has, or else by a copy.
fn place(blob: &Path, pointer: &Path, links: [Link; 2]) -> io::Result<()> {
    for link in links {
        match link(pointer) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                tracing::debug!("{}: no link to it can be made: {error}", blob.display());
            }
            linked => return linked,
        }
    }
    let copy = |to: &mut io::BufWriter<File>| io::copy(&mut File::open(blob)?, to).map(|_| ());
    files::write_atomic(pointer, copy).map_err(io::Error::other)
}

/// The link to a blob. Its target is relative, so the cache may be moved.
#[cfg(unix)]
fn symlink(etag: &str, file: &str, pointer: &Path) -> io::Result<()> {
    let up = "../".repeat(2 + file.matches('/').count());
    std::os::unix::fs::symlink(format!("{up}blobs/{etag}"), pointer)
}

/// Elsewhere links need rights that not everybody has.
#[cfg(not(unix))]
fn symlink(_etag: &str, _file: &str, _pointer: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The bytes of a file, if it is one.
pub(super) fn length(path: &Path) -> Option<u64> {
    fs::metadata(path).ok().filter(|found| found.is_file()).map(|found| found.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_placed_where_there_are_no_links() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name| folder.path().join(name);
        let blob = path("blob");
        fs::write(&blob, "content").unwrap();
        let refused = |_: &Path| Err(io::ErrorKind::PermissionDenied.into());
        let hard = |pointer: &Path| fs::hard_link(&blob, pointer);
        place(&blob, &path("linked"), [&refused, &hard]).unwrap();
        place(&blob, &path("copied"), [&refused, &refused]).unwrap();
        for name in ["linked", "copied"] {
            assert_eq!(fs::read(path(name)).unwrap(), b"content", "{name}");
        }
        // Another process was faster.
        let error = place(&blob, &path("linked"), [&refused, &hard]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AlreadyExists);
        // Nothing is left of what can't be copied.
        assert!(place(&path("missing"), &path("other"), [&refused, &refused]).is_err());
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3);
    }
}
