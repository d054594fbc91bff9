//! One run in one folder at a time.
//!
//! The lock is a file in the folder. The process that works there holds it by an advisory lock of the
//! operating system, which ends with the process however that ends, so a dead one never stands in the
//! way; what is written in the file says who holds it.

use crate::files::write_error;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

const NAME: &str = ".metal-candle.lock";

/// Holds a folder for this process until it is dropped.
#[derive(Debug)]
pub struct FolderLock {
    folder: PathBuf,
    path: PathBuf,
    /// Keeps the lock.
    _file: File,
    made: MadeFolders,
}

/// Who holds a lock, as its file says.
#[derive(Debug, Serialize, Deserialize)]
struct Holder {
    process: u32,
    host: String,
    since: String,
}

impl FolderLock {
    /// Takes the folder, which is made if it is missing, and removed again with the lock if nothing
    /// was written into it.
    ///
    /// On a file system without locks the folder is taken all the same, with a warning.
    ///
    /// # Errors
    /// [`Error::File`] naming the process that holds it; [`Error::Io`] when the folder cannot be made
    /// or written to.
    pub fn acquire(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        Self::lock(folder, folder.join(NAME), MadeFolders::make(folder)?)
    }

    /// Takes a folder that is written beside its place and then moved there as a whole, so that the lock
    /// can't be in it.
    ///
    /// # Errors
    /// As [`Self::acquire`].
    pub fn acquire_beside(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let Some(name) = folder.file_name() else {
            return Err(Error::file(folder, "has no name; give the path of a folder"));
        };
        let parent = match folder.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        let path = parent.join(format!(".{}{NAME}", name.to_string_lossy()));
        Self::lock(folder, path, MadeFolders::make(parent)?)
    }

    fn lock(folder: &Path, path: PathBuf, made: MadeFolders) -> Result<Self> {
        loop {
            let mut file = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(&path)
                .map_err(|error| write_error(folder, error))?;
            match file.try_lock() {
                // Its last holder has removed it between our opening and locking it.
                Ok(()) if !is_at(&file, &path) => continue,
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(taken(folder, &mut file)),
                Err(TryLockError::Error(error)) => tracing::warn!(
                    "{}: cannot be locked ({error}), so take care that no other run writes here",
                    folder.display()
                ),
            }
            let holder = Holder {
                process: std::process::id(),
                host: super::tensorboard::host_name(),
                since: chrono::Local::now().format("%Y-%m-%d %H:%M:%S").to_string(),
            };
            let text = serde_json::to_vec(&holder)
                .map_err(|error| Error::file(&path, error.to_string()))?;
            file.set_len(0)
                .and_then(|()| file.write_all(&text))
                .map_err(|error| write_error(folder, error))?;
            let folder = folder.to_path_buf();
            return Ok(Self { folder, path, _file: file, made });
        }
    }

    /// The folder that is held.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

impl FolderLock {
    /// Gives the folder free before the lock is dropped, for a process that is about to end without
    /// dropping anything. Nothing may be written into the folder afterwards.
    pub fn release(&self) {
        // While it is still locked. One that stays is taken over by the next run.
        match fs::remove_file(&self.path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                tracing::debug!("{}: {error}", self.path.display());
            }
            _ => self.made.remove_empty(),
        }
    }
}

impl Drop for FolderLock {
    fn drop(&mut self) {
        self.release();
    }
}

/// What to say about a folder whose lock another process has.
fn taken(folder: &Path, file: &mut File) -> Error {
    let mut text = String::new();
    let holder = file
        .take(4096)
        .read_to_string(&mut text)
        .ok()
        .and_then(|_| serde_json::from_str::<Holder>(&text).ok());
    let holder = match holder {
        Some(Holder { process, host, since }) => {
            format!("process {process} on {host}, since {since}")
        }
        // It was locked a moment ago.
        None => "another process".into(),
    };
    Error::file(
        folder,
        format!("is in use by another run ({holder}); wait for its end, or choose another folder"),
    )
}

/// Whether the open file is the one at `path`.
#[cfg(unix)]
fn is_at(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(open), Ok(there)) => (open.dev(), open.ino()) == (there.dev(), there.ino()),
        _ => false,
    }
}

/// Elsewhere a file that is open keeps its name.
#[cfg(not(unix))]
fn is_at(_: &File, _: &Path) -> bool {
    true
}

/// Folders that were made, the outermost first. Those that stay empty are removed again.
#[derive(Debug)]
struct MadeFolders(Vec<PathBuf>);

impl MadeFolders {
    fn make(folder: &Path) -> Result<Self> {
        let mut made = Self(Vec::new());
        let missing: Vec<&Path> = folder
            .ancestors()
            .take_while(|path| !path.as_os_str().is_empty() && !path.exists())
            .collect();
        for path in missing.into_iter().rev() {
            match fs::create_dir(path) {
                Ok(()) => made.0.push(path.to_path_buf()),
                // Another process was faster.
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(write_error(path, error)),
            }
        }
        if folder.is_dir() {
            return Ok(made);
        }
        Err(Error::file(folder, "is a file; a folder is to be written here"))
    }
}

impl MadeFolders {
    fn remove_empty(&self) {
        for folder in self.0.iter().rev() {
            // This refuses a folder that has something in it.
            if fs::remove_dir(folder).is_err() {
                break;
            }
        }
    }
}

impl Drop for MadeFolders {
    fn drop(&mut self) {
        self.remove_empty();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_run_is_told_who_holds_the_folder_and_a_later_one_gets_it() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("run");
        let first = FolderLock::acquire(&folder).unwrap();
        let error = FolderLock::acquire(&folder).unwrap_err().to_string();
        assert!(error.contains(&format!("process {} on ", std::process::id())), "{error}");
        assert!(error.contains("since 20"), "{error}");
        fs::write(folder.join("result"), "x").unwrap();
        drop(first);
        assert!(!folder.join(NAME).exists());
        FolderLock::acquire(&folder).unwrap();
        assert!(folder.join("result").exists());
    }

    #[test]
    fn a_folder_that_is_moved_into_its_place_is_locked_beside_it() {
        let parent = tempfile::tempdir().unwrap();
        let folder = parent.path().join("new/fused");
        let first = FolderLock::acquire_beside(&folder).unwrap();
        let error = FolderLock::acquire_beside(&folder).unwrap_err().to_string();
        assert!(error.contains("fused") && error.contains("in use"), "{error}");
        FolderLock::acquire_beside(parent.path().join("new/other")).unwrap();
        fs::create_dir(&folder).unwrap();
        drop(first);
        assert_eq!(fs::read_dir(parent.path().join("new")).unwrap().count(), 1);
        assert!(FolderLock::acquire_beside("/").is_err());
    }

    #[test]
    fn what_a_dead_process_left_is_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        for left in ["", "{\"process\": 1, \"host\": \"a\", \"since\": \"2020\"}", "\u{0}\u{0}"] {
            fs::write(folder.path().join(NAME), left).unwrap();
            let lock = FolderLock::acquire(folder.path()).unwrap();
            let text = fs::read_to_string(folder.path().join(NAME)).unwrap();
            let holder: Holder = serde_json::from_str(&text).unwrap();
            assert_eq!(holder.process, std::process::id(), "{left:?}");
            drop(lock);
        }
    }

    #[test]
    fn folders_that_stay_empty_are_removed_and_others_are_not() {
        let parent = tempfile::tempdir().unwrap();
        let inner = parent.path().join("a/b/c");
        drop(FolderLock::acquire(&inner).unwrap());
        assert!(!parent.path().join("a").exists());

        fs::create_dir(parent.path().join("a")).unwrap();
        drop(FolderLock::acquire(&inner).unwrap());
        assert!(parent.path().join("a").exists() && !parent.path().join("a/b").exists());

        let lock = FolderLock::acquire(&inner).unwrap();
        fs::write(parent.path().join("a/b/kept"), "x").unwrap();
        drop(lock);
        assert!(parent.path().join("a/b/kept").exists() && !inner.exists());

        fs::write(parent.path().join("file"), "x").unwrap();
        assert!(FolderLock::acquire(parent.path().join("file")).is_err());
        assert!(FolderLock::acquire(parent.path().join("file/run")).is_err());
    }
}
