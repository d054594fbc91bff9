//! What the server keeps, in one folder:
//!
//! ```text
//! server.sqlite   files, jobs, events, checkpoints, keys and bases
//! files/ID        what was uploaded, and the results of jobs
//! jobs/ID/        the folder of a job's training run
//! base_files.json the hashes of the base's files, which the jobs share
//! temporary/      what is gone when the server is started again
//! ```
//!
//! A path is made of an identifier only after that was found in the database, and names that users give are data. A
//! file is complete on the disk before the database knows of it; what the database doesn't know of is removed when the
//! folder is opened. All of it waits for the disk, so handlers call it through `App::blocking`.

mod base;
mod events;
mod files;
mod jobs;
mod keys;
mod schema;
#[cfg(test)]
mod tests;
mod tuned;

pub(crate) use base::identity;
pub(crate) use events::{Event, Level, NewEvent, Place};
pub(crate) use files::{NewFile, Purpose, Removal, StoredFile};
pub(crate) use jobs::{Job, JobError, NewJob, ORGANIZATION, Refusal, Started, Status};
pub use keys::{Key, Keys, Limits};
pub use tuned::Tuned;
pub(crate) use tuned::checkpoint_folder;

use crate::jobs::Signals;
use metal_candle::train::FolderLock;
use metal_candle::{Error, Result};
use rusqlite::{Connection, Transaction, TransactionBehavior};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tempfile::TempDir;

const DATABASE: &str = "server.sqlite";
const FILES: &str = "files";
const JOBS: &str = "jobs";
const TEMPORARY: &str = "temporary";

/// The database and the files beside it.
#[derive(Debug)]
pub struct Store {
    folder: PathBuf,
    connection: Mutex<Connection>,
    /// What is told to the threads that work on jobs.
    pub(crate) signals: Signals,
    /// Given up last.
    _lock: FolderLock,
}

/// A part of a list.
#[derive(Debug, PartialEq)]
pub(crate) struct Page<T> {
    pub items: Vec<T>,
    /// Whether others follow.
    pub has_more: bool,
}

impl<T> Page<T> {
    /// The first `limit` of what was read, which is one more where others follow.
    fn new(mut items: Vec<T>, limit: usize) -> Self {
        let has_more = items.len() > limit;
        items.truncate(limit);
        Self { items, has_more }
    }
}

impl Store {
    /// Opens a folder, which is made if it is missing.
    ///
    /// # Errors
    /// When a living server uses it, when its database is another program's or a newer version's, when there are files
    /// without a database, and when it cannot be read or written.
    pub fn open(folder: &Path) -> Result<Self> {
        // The lock would make one that others can read.
        if !folder.exists() {
            make_private(folder)?;
        }
        let lock = FolderLock::acquire(folder)?;
        metal_candle::files::remove_folder_atomic(folder.join(TEMPORARY))?;
        metal_candle::files::remove_stale_partials(folder)?;
        for name in [FILES, JOBS, TEMPORARY] {
            make_private(&folder.join(name))?;
        }
        let path = folder.join(DATABASE);
        if !path.exists() {
            without_database(folder)?;
        }
        let connection = schema::open(&path)?;
        let store = Self {
            folder: folder.to_path_buf(),
            connection: Mutex::new(connection),
            signals: Signals::default(),
            _lock: lock,
        };
        store.remove_orphans()?;
        Ok(store)
    }

    /// Where all of this is.
    pub(crate) fn folder(&self) -> &Path {
        &self.folder
    }

    /// The folder of a job's training run; of an identifier that the database has.
    pub(crate) fn run_folder(&self, job: &Job) -> PathBuf {
        self.folder.join(JOBS).join(&job.id)
    }

    /// A new folder for what is needed while a request is answered; it is removed when it is dropped.
    ///
    /// # Errors
    /// When it cannot be made.
    pub(crate) fn temporary_folder(&self) -> Result<TempDir> {
        let folder = self.folder.join(TEMPORARY);
        tempfile::tempdir_in(&folder).map_err(Error::io(&folder))
    }

    /// A message without the folder's path, which is nobody's business outside.
    pub(crate) fn without_paths(&self, message: &str) -> String {
        let folder = self.folder.display().to_string();
        let inside = format!("{folder}{}", std::path::MAIN_SEPARATOR);
        message.replace(&inside, "").replace(&folder, "the data folder")
    }

    fn database(&self) -> PathBuf {
        self.folder.join(DATABASE)
    }

    fn lock(&self) -> MutexGuard<'_, Connection> {
        // A panic cannot leave it half changed: its transaction was rolled back.
        self.connection.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads.
    fn read<T>(&self, read: impl FnOnce(&Connection) -> rusqlite::Result<T>) -> Result<T> {
        read(&self.lock()).map_err(|error| told(&self.database(), &error))
    }

    /// Changes all that `change` does, or nothing.
    fn change<T>(&self, change: impl FnOnce(&Transaction) -> rusqlite::Result<T>) -> Result<T> {
        let mut connection = self.lock();
        let attempt = || {
            let transaction =
                connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
            let result = change(&transaction)?;
            transaction.commit()?;
            Ok(result)
        };
        attempt().map_err(|error| told(&self.database(), &error))
    }

    /// Removes what was begun by a server that has died: files and runs that the database doesn't know.
    fn remove_orphans(&self) -> Result<()> {
        metal_candle::files::remove_stale_partials(self.folder.join(JOBS))?;
        for name in names(&self.folder.join(FILES))? {
            let known = || self.file(&name).map(|file| file.is_some());
            if name.starts_with(files::UPLOAD) || (name.starts_with(files::ID) && !known()?) {
                let path = self.folder.join(FILES).join(&name);
                std::fs::remove_file(&path).map_err(Error::io(&path))?;
            }
        }
        for name in names(&self.folder.join(JOBS))? {
            if name.starts_with(jobs::ID) && self.job(&name)?.is_none() {
                metal_candle::files::remove_folder_atomic(self.folder.join(JOBS).join(&name))?;
            }
        }
        Ok(())
    }
}

/// What the database says.
fn told(path: &Path, error: &rusqlite::Error) -> Error {
    Error::file(path, error.to_string())
}

/// Makes a folder that only this user can read.
fn make_private(folder: &Path) -> Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(folder).map_err(Error::io(folder))
}

/// The names in a folder, as far as they are text.
fn names(folder: &Path) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let entry = entry.map_err(Error::io(folder))?;
        names.extend(entry.file_name().into_string());
    }
    Ok(names)
}

/// That the folder of a database that is missing has no file and no run, which it would have known of.
fn without_database(folder: &Path) -> Result<()> {
    for (part, start) in [(FILES, files::ID), (JOBS, jobs::ID)] {
        if !folder.join(part).exists() {
            continue;
        }
        let found = names(&folder.join(part))?;
        if let Some(name) = found.into_iter().find(|name| name.starts_with(start)) {
            return Err(Error::file(
                folder.join(DATABASE),
                format!(
                    "is missing, but there is {part}/{name}, which it knew of; put the database back, or choose another \
                     folder"
                ),
            ));
        }
    }
    Ok(())
}
