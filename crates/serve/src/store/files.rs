//! Uploads and the results of jobs.

use super::{FILES, Page, Store};
use crate::app::{new_id, now};
use metal_candle::{Error, Result};
use rusqlite::{Connection, OptionalExtension, Row, ToSql, params};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Write;
use std::path::PathBuf;

/// How identifiers of files begin.
pub(super) const ID: &str = "file-";
/// How the names of files begin that are still being written.
pub(super) const UPLOAD: &str = ".upload-";
const COLUMNS: &str = "number, id, created_at, name, purpose, bytes";

/// What a file is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Data to learn from.
    FineTune,
    /// What a job has left.
    FineTuneResults,
}

impl Purpose {
    const ALL: [Self; 2] = [Self::FineTune, Self::FineTuneResults];

    pub fn name(self) -> &'static str {
        match self {
            Self::FineTune => "fine-tune",
            Self::FineTuneResults => "fine-tune-results",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|purpose| purpose.name() == name)
    }
}

/// A file that is complete.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct StoredFile {
    number: i64,
    pub id: String,
    pub created: i64,
    pub name: String,
    pub purpose: Purpose,
    pub bytes: i64,
}

impl StoredFile {
    fn read(row: &Row) -> rusqlite::Result<Self> {
        let purpose: String = row.get(4)?;
        Ok(Self {
            number: row.get(0)?,
            id: row.get(1)?,
            created: row.get(2)?,
            name: row.get(3)?,
            purpose: Purpose::named(&purpose).ok_or_else(|| unknown(4, &purpose))?,
            bytes: row.get(5)?,
        })
    }

    /// OpenAI's object.
    pub fn object(&self) -> Value {
        json!({
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": self.created,
            "filename": self.name,
            "purpose": self.purpose.name(),
            "status": "processed",
        })
    }
}

/// That a column has a word that this version doesn't know.
pub(super) fn unknown(column: usize, word: &str) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(
        column,
        rusqlite::types::Type::Text,
        format!("has the unknown word {word:?}").into(),
    )
}

/// A file that is being written; it is gone when it is dropped.
#[derive(Debug)]
pub(crate) struct NewFile {
    id: String,
    partial: PathBuf,
    file: File,
    bytes: i64,
}

impl NewFile {
    /// Adds bytes.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_all(bytes).map_err(Error::io(&self.partial))?;
        self.bytes += bytes.len() as i64;
        Ok(())
    }

    /// How many bytes it has.
    pub fn len(&self) -> u64 {
        self.bytes.unsigned_abs()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        // It has another name by now if it was finished; one that stays is removed when the store is opened again.
        let _ = std::fs::remove_file(&self.partial);
    }
}

/// What became of a file that was to be removed.
#[derive(Debug, PartialEq)]
pub(crate) enum Removal {
    Done,
    Missing,
    /// A job that has not ended uses it.
    UsedBy(String),
}

impl Store {
    /// Begins a file.
    pub(crate) fn begin_file(&self) -> Result<NewFile> {
        let id = new_id(ID);
        let partial = self.folder.join(FILES).join(format!("{UPLOAD}{id}"));
        let file = File::create_new(&partial).map_err(Error::io(&partial))?;
        Ok(NewFile { id, partial, file, bytes: 0 })
    }

    /// Completes a file on the disk; the database is to learn of it next, by [`insert`].
    pub(super) fn place(&self, new: NewFile, name: &str, purpose: Purpose) -> Result<StoredFile> {
        let folder = self.folder.join(FILES);
        new.file.sync_all().map_err(Error::io(&new.partial))?;
        let path = folder.join(&new.id);
        std::fs::rename(&new.partial, &path).map_err(Error::io(&path))?;
        // The new name, too, is to outlive a loss of power.
        #[cfg(unix)]
        File::open(&folder).and_then(|folder| folder.sync_all()).map_err(Error::io(&folder))?;
        Ok(StoredFile {
            number: 0,
            id: new.id.clone(),
            created: now(),
            name: name.to_string(),
            purpose,
            bytes: new.bytes,
        })
    }

    /// Completes a file.
    pub(crate) fn finish_file(
        &self,
        new: NewFile,
        name: &str,
        purpose: Purpose,
    ) -> Result<StoredFile> {
        let file = self.place(new, name, purpose)?;
        self.change(|transaction| insert(transaction, &file))?;
        Ok(file)
    }

    /// The file of this identifier.
    pub(crate) fn file(&self, id: &str) -> Result<Option<StoredFile>> {
        self.read(|connection| find(connection, id))
    }

    /// Where its bytes are.
    pub(crate) fn file_path(&self, file: &StoredFile) -> PathBuf {
        self.folder.join(FILES).join(&file.id)
    }

    /// Files in the order in which they came; `None` where there is no file `after`.
    pub(crate) fn list_files(
        &self,
        after: Option<&str>,
        limit: usize,
        descending: bool,
        purpose: Option<&str>,
    ) -> Result<Option<Page<StoredFile>>> {
        self.read(|connection| {
            let start = match after {
                None => None,
                Some(id) => match find(connection, id)? {
                    Some(file) => Some(file.number),
                    None => return Ok(None),
                },
            };
            let (beyond, order) = if descending { ("<", "DESC") } else { (">", "ASC") };
            let sql = format!(
                "SELECT {COLUMNS} FROM files WHERE (?1 IS NULL OR number {beyond} ?1) AND (?2 IS NULL OR purpose = ?2) \
                 ORDER BY number {order} LIMIT ?3"
            );
            let mut statement = connection.prepare(&sql)?;
            let values: [&dyn ToSql; 3] = [&start, &purpose, &(limit as i64 + 1)];
            let found = statement.query_map(values, StoredFile::read)?;
            Ok(Some(Page::new(found.collect::<rusqlite::Result<_>>()?, limit)))
        })
    }

    /// Removes a file that no job needs.
    pub(crate) fn remove_file(&self, id: &str) -> Result<Removal> {
        let path = self.folder.join(FILES);
        let removal = self.change(|transaction| {
            let user = transaction
                .query_row(
                    "SELECT id FROM jobs WHERE (training_file = ?1 OR validation_file = ?1) \
                     AND status IN ('validating_files', 'queued', 'running', 'paused')",
                    [id],
                    |row| row.get(0),
                )
                .optional()?;
            if let Some(job) = user {
                return Ok(Removal::UsedBy(job));
            }
            Ok(match transaction.execute("DELETE FROM files WHERE id = ?1", [id])? {
                0 => Removal::Missing,
                _ => Removal::Done,
            })
        })?;
        if removal == Removal::Done {
            let path = path.join(id);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io(&path)(error));
                }
                _ => {}
            }
        }
        Ok(removal)
    }
}

/// Tells the database of a file that is complete.
pub(super) fn insert(connection: &Connection, file: &StoredFile) -> rusqlite::Result<()> {
    connection.execute(
        "INSERT INTO files (id, created_at, name, purpose, bytes) VALUES (?1, ?2, ?3, ?4, ?5)",
        params![file.id, file.created, file.name, file.purpose.name(), file.bytes],
    )?;
    Ok(())
}

fn find(connection: &Connection, id: &str) -> rusqlite::Result<Option<StoredFile>> {
    let sql = format!("SELECT {COLUMNS} FROM files WHERE id = ?1");
    connection.query_row(&sql, [id], StoredFile::read).optional()
}
