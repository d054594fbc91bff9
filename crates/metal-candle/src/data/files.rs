//! Which files are which split: those of a folder by their names, or one file.

use std::path::{Path, PathBuf};

use super::format::{Format, READ, stem_and_format};
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

/// What a file's records are for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Split {
    /// To learn.
    Train,
    /// To watch while learning.
    Valid,
    /// To measure at the end.
    Test,
}

/// The words for each split, in names of files and folders.
const WORDS: &[(&str, Split)] = &[
    ("train", Split::Train),
    ("training", Split::Train),
    ("valid", Split::Valid),
    ("validation", Split::Valid),
    ("val", Split::Valid),
    ("dev", Split::Valid),
    ("eval", Split::Valid),
    ("evaluation", Split::Valid),
    ("test", Split::Test),
    ("testing", Split::Test),
];

impl Split {
    /// The split's usual name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Train => "train",
            Self::Valid => "valid",
            Self::Test => "test",
        }
    }

    /// What a split of this name is for, if a word in it says so: `train`, `validation`, `test_sft`.
    pub fn named(name: &str) -> Option<Self> {
        Self::of(name).map(|(split, _)| split)
    }

    /// The split of a name such as `train`, `my-data.validation` or `test-00000-of-00002`, and the word that says so.
    fn of(stem: &str) -> Option<(Self, &'static str)> {
        stem.split(['-', '_', '.', ' ']).find_map(|part| {
            let part = part.trim_end_matches(|digit: char| digit.is_ascii_digit());
            let word = WORDS.iter().find(|(word, _)| word.eq_ignore_ascii_case(part));
            word.map(|(word, split)| (*split, *word))
        })
    }
}

/// The files of each split, in the order of their records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DataFiles {
    /// What to learn; see [`DataFiles::require`].
    pub train: Vec<PathBuf>,
    /// What to watch while learning.
    pub valid: Vec<PathBuf>,
    /// What to measure at the end.
    pub test: Vec<PathBuf>,
    /// Where they were looked for, as messages name it.
    pub origin: PathBuf,
}

impl DataFiles {
    /// The files of a folder by their names, or a single file as the training data.
    ///
    /// A file or subfolder belongs to the split that a word of its name says: `train` or `training`; `valid`,
    /// `validation`, `val`, `dev`, `eval` or `evaluation`; `test` or `testing`. Several files of a split are its shards.
    /// Where no name says a split, all files are training data, or what the subfolder `data` has where there is no other.
    /// Hidden files and those that are not data by their names are passed over. Text (`.txt`, `.md`) that no name says a
    /// split of is data only where there is nothing else, also in `data`, as there may be notes beside data; what is left
    /// out is told.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::File`] when the folder has no data, two words for one split, or a split in two formats.
    pub fn find(path: &Path) -> Result<Self> {
        let found = Self::find_any(path)?;
        if found.is_empty() {
            let folder = &found.origin;
            return Err(Error::file(folder, format!("{EXPECTED}; {}", found_in(folder)?)));
        }
        Ok(found)
    }

    /// As [`Self::find`], of a folder that may have none.
    fn find_any(path: &Path) -> Result<Self> {
        let mut found = Self { origin: path.to_path_buf(), ..Self::default() };
        if !path.is_dir() {
            std::fs::metadata(path).map_err(Error::io(path))?;
            found.train.push(path.to_path_buf());
            return Ok(found);
        }
        let mut words: Vec<(Split, &str)> = Vec::new();
        let mut others = Vec::new();
        let mut folder = None;
        for entry in entries(path)? {
            let named = name(&entry);
            let is_folder = entry.is_dir();
            let split = if is_folder {
                WORDS
                    .iter()
                    .find(|(word, _)| word.eq_ignore_ascii_case(&named))
                    .map(|(word, split)| (*split, *word))
            } else if is_data(&named) {
                Split::of(stem_and_format(&named).0)
            } else {
                continue;
            };
            match split {
                Some((split, word)) => {
                    if let Some((_, other)) =
                        words.iter().find(|(known, other)| *known == split && *other != word)
                    {
                        return Err(Error::file(
                            path,
                            format!(
                                "has both {other} and {word}, which mean the same split; keep one of them"
                            ),
                        ));
                    }
                    words.push((split, word));
                    let files = found.of_mut(split);
                    if is_folder {
                        let mut inner = entries(&entry)?;
                        inner.retain(|file| !file.is_dir() && is_data(&name(file)));
                        files.extend(without_notes(&entry, inner));
                    } else {
                        files.push(entry);
                    }
                }
                None if is_folder && named == "data" => folder = Some(entry),
                None if is_folder => {}
                None => others.push(entry),
            }
        }
        if words.is_empty() {
            // Text beside it may be notes.
            if let Some(folder) = folder.filter(|_| others.iter().all(|file| is_text(file))) {
                let inner = Self::find_any(&folder)?;
                if !inner.is_empty() || others.is_empty() {
                    warn_of_notes(path, &others);
                    return Ok(inner);
                }
            }
            found.train = without_notes(path, others);
        }
        for files in [&found.train, &found.valid, &found.test] {
            same_twice(path, files)?;
        }
        Ok(found)
    }

    fn is_empty(&self) -> bool {
        [&self.train, &self.valid, &self.test].iter().all(|files| files.is_empty())
    }

    /// The files of a split.
    pub fn of(&self, split: Split) -> &[PathBuf] {
        match split {
            Split::Train => &self.train,
            Split::Valid => &self.valid,
            Split::Test => &self.test,
        }
    }

    fn of_mut(&mut self, split: Split) -> &mut Vec<PathBuf> {
        match split {
            Split::Train => &mut self.train,
            Split::Valid => &mut self.valid,
            Split::Test => &mut self.test,
        }
    }

    /// The files of a split that there has to be.
    ///
    /// # Errors
    /// [`Error::File`] when there is none.
    pub fn require(&self, split: Split) -> Result<&[PathBuf]> {
        match self.of(split) {
            [] => {
                let found =
                    if self.origin.is_dir() { found_in(&self.origin)? } else { String::new() };
                Err(Error::file(&self.origin, format!("no {}.jsonl; {found}", split.name())))
            }
            files => Ok(files),
        }
    }
}

const EXPECTED: &str = "no data: expected train.jsonl, and if wanted valid.jsonl and test.jsonl";

/// What is in a folder, by name, without what is hidden.
fn entries(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let path = entry.map_err(Error::io(folder))?.path();
        if !name(&path).starts_with('.') {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn name(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether a file is data by its name, and none of those that describe data.
fn is_data(name: &str) -> bool {
    const ABOUT: [&str; 9] = [
        "readme",
        "license",
        "licence",
        "changelog",
        "dataset_info",
        "dataset_infos",
        "dataset_dict",
        "state",
        "metadata",
    ];
    let (stem, format) = stem_and_format(name);
    format.is_some() && !ABOUT.iter().any(|about| stem.eq_ignore_ascii_case(about))
}

fn is_text(file: &Path) -> bool {
    stem_and_format(&name(file)).1 == Some(Format::Text)
}

/// The data files of a folder without the text that stands beside those of other formats.
fn without_notes(folder: &Path, files: Vec<PathBuf>) -> Vec<PathBuf> {
    let (notes, others): (Vec<PathBuf>, Vec<PathBuf>) =
        files.into_iter().partition(|file| is_text(file));
    if others.is_empty() {
        return notes;
    }
    warn_of_notes(folder, &notes);
    others
}

/// Tells which texts of a folder are left out, if there are any.
fn warn_of_notes(folder: &Path, notes: &[PathBuf]) {
    if !notes.is_empty() {
        tracing::warn!(
            "{}: {}: not read, as text beside other data is taken for notes; to learn it, give it as data of its own",
            folder.display(),
            shown(notes)
        );
    }
}

/// That no two files are the same in two formats.
fn same_twice(folder: &Path, files: &[PathBuf]) -> Result<()> {
    for (index, path) in files.iter().enumerate() {
        let (one, parent) = (name(path), path.parent());
        let same = files.iter().take(index).find(|other| {
            other.parent() == parent && stem_and_format(&name(other)).0 == stem_and_format(&one).0
        });
        if let Some(other) = same {
            return Err(Error::file(
                folder,
                format!("has both {} and {one}; keep one of them", name(other)),
            ));
        }
    }
    Ok(())
}

fn found_in(path: &Path) -> Result<String> {
    let found = entries(path)?;
    Ok(if found.is_empty() {
        format!("the folder is empty; read are {READ}")
    } else {
        format!("found {}; read are {READ}", shown(&found))
    })
}

/// The names of files for a message, not too many of them.
fn shown(files: &[PathBuf]) -> String {
    let more = if files.len() > 10 { ", ..." } else { "" };
    let names: Vec<String> = files.iter().take(10).map(|path| name(path)).collect();
    format!("{}{more}", names.join(", "))
}

impl HeldOut {
    /// Checks the fraction.
    ///
    /// # Errors
    /// [`Error::Option`] when it is not between 0 and 1.
    pub fn validate(self) -> Result<()> {
        if !(self.fraction > 0.0 && self.fraction < 1.0) {
            return Err(Error::option(
                "valid_fraction",
                format!("is {}, expected a share above 0 and below 1", self.fraction),
            ));
        }
        Ok(())
    }

    /// Which of `count` records are held out.
    ///
    /// # Errors
    /// [`Error::Option`] when the fraction is not between 0 and 1, or when there is only one record.
    pub(super) fn choose(self, count: usize) -> Result<Vec<bool>> {
        self.validate()?;
        let Self { fraction, seed } = self;
        if count < 2 {
            return Err(Error::option(
                "valid_fraction",
                "there is one record, and it cannot be split",
            ));
        }
        let held_out = ((count as f64 * fraction).round() as usize).clamp(1, count - 1);
        let mut order: Vec<usize> = (0..count).collect();
        SplitMix64::new(seed).shuffle(&mut order);
        let mut is_held_out = vec![false; count];
        for index in order.into_iter().take(held_out) {
            is_held_out[index] = true;
        }
        Ok(is_held_out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn touch(folder: &Path, names: &[&str]) {
        for name in names {
            let path = folder.join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "{\"text\": \"a\"}\n").unwrap();
        }
    }

    /// The names of each split's files.
    fn splits(names: &[&str]) -> Result<[Vec<String>; 3]> {
        let folder = tempfile::tempdir().unwrap();
        touch(folder.path(), names);
        let found = DataFiles::find(folder.path())?;
        Ok([&found.train, &found.valid, &found.test].map(|files| {
            let relative = |file: &PathBuf| file.strip_prefix(folder.path()).unwrap().to_path_buf();
            files.iter().map(|file| relative(file).display().to_string()).collect()
        }))
    }

    fn error(names: &[&str]) -> String {
        splits(names).unwrap_err().to_string()
    }

    #[test]
    fn splits_go_by_the_words_of_names() {
        for word in ["valid", "validation", "val", "dev", "eval", "Validation"] {
            let file = format!("{word}.jsonl");
            let found = splits(&["train.jsonl", &file, "test.csv.gz", "notes.jsonl", ".train.swp"]);
            assert_eq!(
                found.unwrap(),
                [vec!["train.jsonl".to_string()], vec![file], vec!["test.csv.gz".into()]]
            );
        }
        let hub = splits(&[
            "README.md",
            "data/train-00001-of-00002.parquet",
            "data/train-00000-of-00002.parquet",
            "data/validation-00000-of-00001.parquet",
        ]);
        let [train, valid, test] = hub.unwrap();
        assert_eq!(
            train,
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"]
        );
        assert_eq!((valid.len(), test.len()), (1, 0));
    }

    #[test]
    fn text_is_data_where_there_is_nothing_else() {
        let train = |names: &[&str]| splits(names).map(|[train, ..]| train).unwrap();
        let beside =
            ["b.jsonl", "a.csv.gz", "NOTES.md", "requirements.txt", "LICENSE.txt", "a.png"];
        assert_eq!(train(&beside), ["a.csv.gz", "b.jsonl"]);
        assert_eq!(train(&["b.txt", "a.md", "README.md", "a.png"]), ["a.md", "b.txt"]);
        assert_eq!(train(&["data/b.jsonl", "data/a.txt"]), ["data/b.jsonl"]);
        // Also beside the folder of the data, unless that has none.
        assert_eq!(train(&["NOTES.md", "data/b.jsonl", "data/a.txt"]), ["data/b.jsonl"]);
        assert_eq!(train(&["NOTES.md", "data/a.txt"]), ["data/a.txt"]);
        assert_eq!(train(&["a.txt", "b.md", "data/x.png"]), ["a.txt", "b.md"]);
        assert_eq!(train(&["a.txt", "c.csv", "data/b.jsonl"]), ["c.csv"]);
        let [named, valid, _] = splits(&["NOTES.md", "data/train.jsonl", "data/dev.txt"]).unwrap();
        assert_eq!(named, ["data/train.jsonl"]);
        assert_eq!(valid, ["data/dev.txt"]);
        let [train, valid, _] =
            splits(&["train/b.json", "train/notes.txt", "dev/x.txt", "dev/y.md"]).unwrap();
        assert_eq!(train, ["train/b.json"]);
        assert_eq!(valid, ["dev/x.txt", "dev/y.md"]);
        // A name that says a split is no note's.
        let [train, valid, _] = splits(&["train-0.jsonl", "train-1.txt", "valid.txt"]).unwrap();
        assert_eq!((train.len(), valid.len()), (2, 1));
    }

    #[test]
    fn a_folder_whose_splits_are_not_clear_is_refused() {
        assert!(
            error(&[]).contains("expected train.jsonl")
                && error(&[]).contains("the folder is empty")
        );
        assert!(error(&["a.png"]).contains("found a.png; read are JSON Lines"));
        let inside = error(&["data/a.png"]);
        assert!(inside.contains("data: no data") && inside.contains("found a.png"), "{inside}");
        assert!(error(&["valid.jsonl", "validation.jsonl"]).contains("both valid and validation"));
        assert!(error(&["train.jsonl", "train.csv"]).contains("both train.csv and train.jsonl"));
        let folder = tempfile::tempdir().unwrap();
        touch(folder.path(), &["validation.jsonl"]);
        let found = DataFiles::find(folder.path()).unwrap();
        let message = found.require(Split::Train).unwrap_err().to_string();
        assert!(message.contains("no train.jsonl; found validation.jsonl"), "{message}");
        assert!(DataFiles::find(&folder.path().join("none.jsonl")).is_err());
    }

    #[test]
    fn holding_out_goes_by_the_seed() {
        let choose = |fraction, seed, count| HeldOut { fraction, seed }.choose(count);
        let held = |held: Result<Vec<bool>>| held.unwrap().into_iter().filter(|held| *held).count();
        assert_eq!(held(choose(0.25, 7, 20)), 5);
        assert_eq!(choose(0.25, 7, 20).unwrap(), choose(0.25, 7, 20).unwrap());
        assert_ne!(choose(0.25, 7, 20).unwrap(), choose(0.25, 8, 20).unwrap());
        assert_eq!((held(choose(1e-9, 7, 20)), held(choose(0.9999, 7, 20))), (1, 19));
        for fraction in [0.0, 1.0, -1.0, f64::NAN] {
            assert!(choose(fraction, 7, 20).is_err());
        }
        assert!(choose(0.5, 7, 1).unwrap_err().to_string().contains("one record"));
    }
}
