//! Data on disk: a folder with `train.jsonl`, `valid.jsonl` and `test.jsonl`, or one file.

use std::path::{Path, PathBuf};

use super::record::{Record, read_records};
use crate::random::SplitMix64;
use crate::{Error, Result};

/// How much of the training records to keep for validation when the data brings none.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HeldOut {
    /// The part of the records, above 0 and below 1. At least one record is held out and one is left.
    pub fraction: f64,
    /// Which records: the same seed holds out the same ones on every platform.
    pub seed: u64,
}

/// The records of each split, in the order of their files.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DataFolder {
    /// What to learn; see [`DataFolder::require_train`].
    pub train: Option<Vec<Record>>,
    /// What to watch while learning.
    pub valid: Option<Vec<Record>>,
    /// What to measure at the end.
    pub test: Option<Vec<Record>>,
    path: PathBuf,
}

impl DataFolder {
    /// Reads a folder's `train.jsonl`, `valid.jsonl` (or `validation.jsonl`) and `test.jsonl`, as many as there are, or
    /// a single file as the training records. With `held_out` and no validation file, records picked by its seed move
    /// from training to validation.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::Record`] about a file; [`Error::File`] when the folder has none of the files or has
    /// both names of the validation file; [`Error::Option`] when the fraction is not between 0 and 1, or when a single
    /// record is to be split.
    pub fn open(path: &Path, held_out: Option<HeldOut>) -> Result<Self> {
        let mut folder = Self { path: path.to_path_buf(), ..Self::default() };
        if path.is_dir() {
            let read = |name: &str| -> Result<Option<Vec<Record>>> {
                let file = path.join(name);
                if file.is_file() { read_records(&file).map(Some) } else { Ok(None) }
            };
            folder.train = read("train.jsonl")?;
            folder.test = read("test.jsonl")?;
            folder.valid = match (read("valid.jsonl")?, read("validation.jsonl")?) {
                (Some(_), Some(_)) => {
                    return Err(Error::file(
                        path,
                        "has both valid.jsonl and validation.jsonl; keep one of them",
                    ));
                }
                (one, other) => one.or(other),
            };
            if folder.train.is_none() && folder.valid.is_none() && folder.test.is_none() {
                return Err(Error::file(path, format!("{EXPECTED}; {}", found_in(path)?)));
            }
        } else {
            folder.train = Some(read_records(path)?);
        }
        if let (Some(held_out), Some(train), None) = (held_out, &folder.train, &folder.valid) {
            let (train, valid) = split(train, held_out)?;
            folder.train = Some(train);
            folder.valid = Some(valid);
        }
        Ok(folder)
    }

    /// The training records.
    ///
    /// # Errors
    /// [`Error::File`] when the folder has no `train.jsonl`.
    pub fn require_train(&self) -> Result<&[Record]> {
        match &self.train {
            Some(train) => Ok(train),
            None => {
                Err(Error::file(&self.path, format!("no train.jsonl; {}", found_in(&self.path)?)))
            }
        }
    }
}

const EXPECTED: &str = "no data: expected train.jsonl, and if wanted valid.jsonl and test.jsonl";

fn found_in(path: &Path) -> Result<String> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(path).map_err(Error::io(path))? {
        names.push(entry.map_err(Error::io(path))?.file_name().to_string_lossy().into_owned());
    }
    names.sort();
    let more = if names.len() > 10 { ", ..." } else { "" };
    names.truncate(10);
    Ok(if names.is_empty() {
        "the folder is empty".into()
    } else {
        format!("found {}{more}", names.join(", "))
    })
}

fn split(records: &[Record], held_out: HeldOut) -> Result<(Vec<Record>, Vec<Record>)> {
    let HeldOut { fraction, seed } = held_out;
    if !(fraction > 0.0 && fraction < 1.0) {
        return Err(Error::option(
            "held-out fraction",
            format!("is {fraction}, expected more than 0 and less than 1"),
        ));
    }
    if records.len() < 2 {
        return Err(Error::option(
            "held-out fraction",
            "there is one record, and it cannot be split",
        ));
    }
    let count = ((records.len() as f64 * fraction).round() as usize).clamp(1, records.len() - 1);
    let mut order: Vec<usize> = (0..records.len()).collect();
    SplitMix64::new(seed).shuffle(&mut order);
    let mut is_held_out = vec![false; records.len()];
    for index in order.into_iter().take(count) {
        if let Some(flag) = is_held_out.get_mut(index) {
            *flag = true;
        }
    }
    let part = |wanted: bool| {
        records
            .iter()
            .zip(&is_held_out)
            .filter(|(_, held)| **held == wanted)
            .map(|(record, _)| record.clone())
            .collect()
    };
    Ok((part(false), part(true)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::Body;

    fn write(path: &Path, count: usize) {
        let lines: String =
            (0..count).map(|index| format!("{{\"text\": \"{index}\"}}\n")).collect();
        std::fs::write(path, lines).unwrap();
    }

    fn texts(records: &Option<Vec<Record>>) -> Vec<usize> {
        records
            .iter()
            .flatten()
            .map(|record| match &record.body {
                Body::Text { text } => text.parse().unwrap(),
                _ => unreachable!(),
            })
            .collect()
    }

    #[test]
    fn a_folder_gives_the_splits_it_has() {
        let folder = tempfile::tempdir().unwrap();
        let message = DataFolder::open(folder.path(), None).unwrap_err().to_string();
        assert!(
            message.contains("expected train.jsonl") && message.contains("the folder is empty"),
            "{message}"
        );
        write(&folder.path().join("validation.jsonl"), 2);
        let data = DataFolder::open(folder.path(), None).unwrap();
        assert_eq!(texts(&data.valid), [0, 1]);
        let message = data.require_train().unwrap_err().to_string();
        assert!(message.contains("no train.jsonl; found validation.jsonl"), "{message}");
        write(&folder.path().join("train.jsonl"), 3);
        let data =
            DataFolder::open(folder.path(), Some(HeldOut { fraction: 0.5, seed: 0 })).unwrap();
        assert_eq!((data.require_train().unwrap().len(), texts(&data.valid).len()), (3, 2));
        write(&folder.path().join("valid.jsonl"), 2);
        assert!(
            DataFolder::open(folder.path(), None).unwrap_err().to_string().contains("keep one")
        );
    }

    #[test]
    fn holding_out_splits_a_file_by_its_seed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("all.jsonl");
        write(&path, 20);
        let open = |fraction, seed| DataFolder::open(&path, Some(HeldOut { fraction, seed }));
        let data = open(0.25, 7).unwrap();
        assert_eq!((texts(&data.train).len(), texts(&data.valid).len()), (15, 5));
        let mut all = [texts(&data.train), texts(&data.valid)].concat();
        assert!(all[..15].is_sorted() && all[15..].is_sorted());
        all.sort_unstable();
        assert_eq!(all, (0..20).collect::<Vec<_>>());
        assert_eq!(open(0.25, 7).unwrap(), data);
        assert_ne!(open(0.25, 8).unwrap(), data);
        assert_eq!(texts(&open(1e-9, 7).unwrap().valid).len(), 1);
        assert_eq!(texts(&open(0.9999, 7).unwrap().train).len(), 1);
        for fraction in [0.0, 1.0, -1.0, f64::NAN] {
            assert!(open(fraction, 7).is_err());
        }
        write(&path, 1);
        assert!(open(0.5, 7).unwrap_err().to_string().contains("one record"));
        assert!(DataFolder::open(&folder.path().join("none.jsonl"), None).is_err());
    }
}
