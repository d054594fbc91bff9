//! Whose the jobs and models of a data folder are: a base is known by its name, and checked by its weights.

use super::Store;
use metal_candle::{Error, Result};
use rusqlite::OptionalExtension;
use sha2::{Digest, Sha256};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;

/// Of each file of weights so many pieces of so many bytes are looked at.
const PIECES: u64 = 16;
const PIECE: u64 = 4096;

/// What tells a base's weights from others: a hash of pieces of its files, which takes no time.
///
/// # Errors
/// When they cannot be read.
pub(crate) fn identity(weights: &[PathBuf]) -> Result<String> {
    let mut weights = weights.to_vec();
    weights.sort();
    let mut hash = Sha256::new();
    for path in weights {
        let read = || -> std::io::Result<Vec<u8>> {
            let mut file = File::open(&path)?;
            let length = file.metadata()?.len();
            let mut read = length.to_le_bytes().to_vec();
            for piece in 0..PIECES {
                let place = length.saturating_sub(PIECE) / (PIECES - 1) * piece;
                file.seek(SeekFrom::Start(place))?;
                (&mut file).take(PIECE).read_to_end(&mut read)?;
            }
            Ok(read)
        };
        hash.update(read().map_err(Error::io(&path))?);
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

impl Store {
    /// Says which base has this name from now on; false where jobs or models are here of another with the same name.
    ///
    /// # Errors
    /// When the database cannot be read or written.
    pub(crate) fn take_base(&self, name: &str, identity: &str) -> Result<bool> {
        self.change(|transaction| {
            let known = "SELECT identity FROM bases WHERE name = ?1";
            let known: Option<String> =
                transaction.query_row(known, [name], |row| row.get(0)).optional()?;
            let has_jobs = "SELECT EXISTS (SELECT 1 FROM jobs WHERE base = ?1)";
            let has_jobs: bool = transaction.query_row(has_jobs, [name], |row| row.get(0))?;
            if has_jobs && known.is_some_and(|known| known != identity) {
                return Ok(false);
            }
            let keep = "INSERT OR REPLACE INTO bases (name, identity) VALUES (?1, ?2)";
            transaction.execute(keep, [name, identity]).map(|_| true)
        })
    }

    /// Puts back what a server of another base was training, and gives the names of the bases that jobs here wait for.
    ///
    /// # Errors
    /// When the database cannot be read or written.
    pub(crate) fn others_wait(&self, base: &str) -> Result<Vec<String>> {
        self.change(|transaction| {
            let back = "UPDATE jobs SET status = 'queued', deaths = 0 WHERE status = 'running' AND base <> ?1";
            transaction.execute(back, [base])?;
            let mut waiting = transaction.prepare(
                "SELECT DISTINCT base FROM jobs
                 WHERE base <> ?1 AND status IN ('validating_files', 'queued') ORDER BY base",
            )?;
            waiting.query_map([base], |row| row.get(0))?.collect()
        })
    }
}
