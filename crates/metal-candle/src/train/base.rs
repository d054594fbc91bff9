//! The files that a frozen base was read from, by their contents.
//!
//! All of every file is hashed once for a run. The hashes are kept in the run's folder, each with the
//! path, size, time of modification and inode of its file, and a file of which all these are the same
//! is not read again when the run is resumed. Runs of one server know them from one of its folders.

use crate::hash::of_file;
use crate::model::Model;
use crate::{Error, Result, files};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

const NAME: &str = "base_files.json";

/// A file whose hash is known.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Known {
    path: PathBuf,
    size: u64,
    /// Nanoseconds since 1970.
    modified: u64,
    inode: u64,
    hash: String,
}

/// Finds out what the files of a frozen base hold, for a run in the folder `run` that a
/// [`Trainer`](crate::train::Trainer) begins or resumes after this, which reads none of them then: so it can do that while
/// others wait for the device. `shared` is a folder of several runs of this base. A file is read, all of it, unless its hash
/// is known there, where it is kept.
///
/// # Errors
/// When a file of the base cannot be read, or one in these folders not be written.
pub fn know_base(model: &Model, run: &Path, shared: &Path) -> Result<()> {
    know(model.files(), run, shared)
}

fn know(paths: &[PathBuf], run: &Path, shared: &Path) -> Result<()> {
    let hashes = hashes(paths, shared)?;
    keep(paths, &hashes, shared)?;
    keep(paths, &hashes, run)
}

/// The hash of each file's content, by the file's name. `folder` is the run's, where the hashes may be
/// known from.
pub(super) fn hashes(paths: &[PathBuf], folder: &Path) -> Result<BTreeMap<String, String>> {
    let known = read(folder);
    paths.iter().map(|path| Ok((name(path), look_up(path, &known)?.hash))).collect()
}

/// Keeps the hashes in the run's folder.
pub(super) fn keep(
    paths: &[PathBuf],
    hashes: &BTreeMap<String, String>,
    folder: &Path,
) -> Result<()> {
    if hashes.is_empty() {
        return Ok(());
    }
    let known = read(folder);
    let now: Vec<Known> = paths
        .iter()
        .map(|path| match hashes.get(&name(path)) {
            Some(hash) => identity(path, hash.clone()),
            None => Err(Error::file(path, "is a file of the base without a known hash")),
        })
        .collect::<Result<_>>()?;
    if now == known {
        return Ok(());
    }
    let path = folder.join(NAME);
    let bytes =
        serde_json::to_vec_pretty(&now).map_err(|error| Error::file(&path, error.to_string()))?;
    files::write_bytes_atomic(&path, bytes)
}

/// What is known; nothing where that cannot be read, as it can be found out again.
fn read(folder: &Path) -> Vec<Known> {
    let path = folder.join(NAME);
    if !path.exists() {
        return Vec::new();
    }
    files::read_json(&path).unwrap_or_else(|error| {
        tracing::debug!("the base is read again: {error}");
        Vec::new()
    })
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

fn look_up(path: &Path, known: &[Known]) -> Result<Known> {
    let mut file = identity(path, String::new())?;
    let same = known.iter().find(|known| Known { hash: String::new(), ..(*known).clone() } == file);
    file.hash = match same {
        Some(known) => known.hash.clone(),
        None => of_file(path, file.size)?,
    };
    Ok(file)
}

fn identity(path: &Path, hash: String) -> Result<Known> {
    let path = path.canonicalize().map_err(Error::io(path))?;
    let metadata = path.metadata().map_err(Error::io(&path))?;
    let modified = metadata.modified().map_err(Error::io(&path))?;
    // A file from before 1970 only shares its time with others of that age.
    let modified = modified.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    #[cfg(unix)]
    let inode = std::os::unix::fs::MetadataExt::ino(&metadata);
    #[cfg(not(unix))]
    let inode = 0;
    Ok(Known { path, size: metadata.len(), modified, inode, hash })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, File};
    use std::time::{Duration, SystemTime};

    fn set_time(path: &Path, seconds: u64) {
        let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
        File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    }

    #[test]
    fn several_runs_read_a_base_once() {
        let folder = tempfile::tempdir().unwrap();
        let paths = [folder.path().join("a.safetensors")];
        let write = |byte: u8, seconds: u64| {
            fs::write(&paths[0], [byte; 100]).unwrap();
            set_time(&paths[0], seconds);
        };
        let [shared, first, second, third] = [(); 4].map(|()| tempfile::tempdir().unwrap());
        write(7, 1000);
        know(&paths, first.path(), shared.path()).unwrap();
        let known = hashes(&paths, first.path()).unwrap();
        // What is read after this is told from what is known by its hash.
        write(8, 1000);
        know(&paths, second.path(), shared.path()).unwrap();
        assert_eq!(hashes(&paths, second.path()).unwrap(), known);
        write(8, 1001);
        know(&paths, third.path(), shared.path()).unwrap();
        assert_ne!(hashes(&paths, third.path()).unwrap(), known);
        fs::remove_file(&paths[0]).unwrap();
        assert!(know(&paths, third.path(), shared.path()).is_err());
    }

    #[test]
    fn a_change_anywhere_is_found_and_an_unchanged_file_is_not_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let paths = [folder.path().join("a.safetensors"), folder.path().join("b.safetensors")];
        let mut content = vec![7u8; 3 << 20];
        for path in &paths {
            fs::write(path, &content).unwrap();
            set_time(path, 1000);
        }
        let run = tempfile::tempdir().unwrap();
        let first = hashes(&paths, run.path()).unwrap();
        keep(&paths, &first, run.path()).unwrap();
        assert_eq!(first["a.safetensors"], first["b.safetensors"]);

        // The last byte of one of them.
        *content.last_mut().unwrap() = 8;
        fs::write(&paths[1], &content).unwrap();
        set_time(&paths[1], 1001);
        let second = hashes(&paths, run.path()).unwrap();
        assert_eq!(second["a.safetensors"], first["a.safetensors"]);
        assert_ne!(second["b.safetensors"], first["b.safetensors"]);

        // With everything but the content as it was, what is kept is believed.
        set_time(&paths[1], 1000);
        assert_eq!(hashes(&paths, run.path()).unwrap(), first);

        // What is kept can be lost.
        for lost in ["", "[", "{}", "[{\"path\": 3}]"] {
            fs::write(run.path().join(NAME), lost).unwrap();
            assert_eq!(hashes(&paths, run.path()).unwrap(), second, "{lost:?}");
        }
        fs::remove_file(&paths[0]).unwrap();
        assert!(hashes(&paths, run.path()).unwrap_err().to_string().contains("a.safetensors"));
    }
}
