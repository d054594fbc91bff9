//! Data for a command: files of this machine and data sets of the hub, one or several.

use crate::errors::usage;
use crate::models;
use crate::output::Terminal;
use crate::settings::{Data, DataFlags, Entry};
use anyhow::Context;
use metal_candle::data::{DataFiles, DataSource, Slice, Split};
use metal_candle::hub::{self, DatasetChoice, DatasetFiles, HubOptions};
use metal_candle::{Error, Result};
use std::path::{Path, PathBuf};

/// What a command needs of the data.
#[derive(Debug, Clone, Copy)]
pub enum Wanted {
    /// What is learned, the validation data if there are any, and test data if asked for.
    Training { test: bool },
    /// One split to measure on: this one, or else test or validation data.
    Measuring(Option<Split>),
    /// Every split, by the name that it has.
    Everything,
}

/// The files of a split of one source.
#[derive(Debug, Clone)]
pub struct Found {
    /// The split; for [`Wanted::Measuring`] always the same.
    pub split: String,
    pub source: DataSource,
}

/// Those of a split.
pub fn of(found: &[Found], split: Split) -> Vec<DataSource> {
    found
        .iter()
        .filter(|found| found.split == split.name())
        .map(|found| found.source.clone())
        .collect()
}

/// The files of the splits that are wanted, downloaded if needed. Their first records are read, so that a mistake shows
/// before anything long begins.
pub fn find(
    data: &Data,
    flags: &DataFlags,
    wanted: Wanted,
    terminal: Terminal,
) -> anyhow::Result<Vec<Found>> {
    let mut all = Vec::new();
    for entry in data.completed(flags)? {
        let columns = entry.columns()?;
        let splits = match entry.hub_id() {
            Some(id) => of_the_hub(id, &entry, wanted, terminal)?,
            None => of_this_machine(&entry, wanted)?,
        };
        for Part { split, files, slice } in splits {
            let weight = entry.weight.filter(|_| split == Split::Train.name());
            let source = DataSource { files, slice, columns: columns.clone(), weight };
            source.check()?;
            all.push(Found { split, source });
        }
    }
    Ok(all)
}

struct Part {
    split: String,
    files: Vec<PathBuf>,
    slice: Option<Slice>,
}

impl Part {
    fn whole(split: Split, files: &[PathBuf]) -> Self {
        Self { split: split.name().into(), files: files.to_vec(), slice: None }
    }
}

fn of_this_machine(entry: &Entry, wanted: Wanted) -> anyhow::Result<Vec<Part>> {
    let path = &entry.path;
    if !Path::new(path).exists() {
        anyhow::bail!(
            "{path}: there is no such file or folder, and a data set of the hub is named owner/name"
        );
    }
    for (key, value) in [
        ("config", &entry.config),
        ("revision", &entry.revision),
        ("split", &entry.split),
        ("valid_split", &entry.valid_split),
        ("test_split", &entry.test_split),
    ] {
        if value.is_some() {
            return Err(usage(format!("{key}: is for a data set of the hub, and {path} is none")));
        }
    }
    let files = DataFiles::find(Path::new(path))?;
    let part = |split| Part::whole(split, files.of(split));
    let is_there = |part: &Part| !part.files.is_empty();
    let parts = match wanted {
        Wanted::Training { test } => {
            files.require(Split::Train)?;
            let mut splits = vec![part(Split::Train), part(Split::Valid)];
            splits.extend(test.then(|| part(Split::Test)));
            splits
        }
        Wanted::Everything if Path::new(path).is_dir() => {
            [Split::Train, Split::Valid, Split::Test].map(part).into()
        }
        Wanted::Everything => {
            let name = Path::new(path).file_name().unwrap_or_default().to_string_lossy();
            let split = Split::named(&name).unwrap_or(Split::Train);
            vec![Part { split: split.name().into(), ..part(Split::Train) }]
        }
        Wanted::Measuring(split) => {
            let is_folder = Path::new(path).is_dir();
            let split = match split {
                Some(_) if !is_folder => {
                    return Err(usage(format!("split: {path} is one file; a folder has splits")));
                }
                Some(split) => split,
                None if !is_folder => Split::Train,
                None if files.test.is_empty() && files.valid.is_empty() => {
                    return Err(usage(format!(
                        "split: {path} has training data alone, neither test nor validation data; --split train measures \
                         on these"
                    )));
                }
                None if files.test.is_empty() => Split::Valid,
                None => Split::Test,
            };
            files.require(split).context("--split names another")?;
            vec![Part { split: Split::Test.name().into(), ..part(split) }]
        }
    };
    Ok(parts.into_iter().filter(is_there).collect())
}

fn of_the_hub(
    id: &str,
    entry: &Entry,
    wanted: Wanted,
    terminal: Terminal,
) -> anyhow::Result<Vec<Part>> {
    let choose = |known: &[&str]| -> Result<Vec<Chosen>> {
        match wanted {
            Wanted::Training { test } => {
                let mut chosen = choose(known, entry)?;
                chosen.retain(|chosen| test || chosen.split != Split::Test.name());
                Ok(chosen)
            }
            Wanted::Measuring(split) => Ok(vec![choose_one(known, entry, split)?]),
            Wanted::Everything => match &entry.split {
                Some(written) => Ok(vec![Chosen::named(written, None)?]),
                None => known.iter().map(|name| Chosen::named(name, None)).collect(),
            },
        }
    };
    let choice = DatasetChoice {
        config: entry.config.as_deref(),
        revision: entry.revision.as_deref(),
        splits: &|known| {
            let mut names: Vec<String> =
                choose(known)?.into_iter().map(|chosen| chosen.name).collect();
            names.sort();
            names.dedup();
            Ok(names)
        },
    };
    let options = HubOptions::from_env()?;
    let found = models::with_progress(terminal, |progress| {
        hub::resolve_dataset_with(id, &choice, &options, progress)
    })
    .with_context(|| {
        format!("there is no file or folder {id} here, so it is a data set of the hub")
    })?;
    let DatasetFiles { config, splits, .. } = found;
    let names = splits.keys().map(String::as_str).collect::<Vec<_>>();
    let chosen = choose(&names)?;
    let said = chosen.iter().map(Chosen::describe).collect::<Vec<_>>().join(", ");
    terminal.note(format!("data set {id}, configuration {config}: {said}"));
    Ok(chosen
        .into_iter()
        .map(|Chosen { split, name, slice }| Part {
            split,
            files: splits.get(&name).cloned().unwrap_or_default(),
            slice,
        })
        .collect())
}

/// A split that is used.
#[derive(Debug, PartialEq)]
struct Chosen {
    /// What it is used as.
    split: String,
    /// What it is called on the hub.
    name: String,
    slice: Option<Slice>,
}

impl Chosen {
    /// A split as it is written, with the part of it that is meant, used as `split` or by its own name.
    fn named(written: &str, split: Option<Split>) -> Result<Self> {
        let (name, slice) = Slice::parse("data_split", written)?;
        let split = split.map_or_else(|| written.to_string(), |split| split.name().to_string());
        Ok(Self { split, name: name.to_string(), slice })
    }

    fn describe(&self) -> String {
        format!("{}{}", self.name, self.slice.map_or(String::new(), |slice| slice.to_string()))
    }
}

fn ambiguous(known: &[&str], what: &str) -> Error {
    Error::option(
        "data_split",
        format!("name the split {what} with --data-split; there is {}", known.join(", ")),
    )
}

fn named<'a>(known: &[&'a str], split: Split) -> Vec<&'a str> {
    known.iter().copied().filter(|name| Split::named(name) == Some(split)).collect()
}

/// The split to learn from, by its name or by the words in the names that are `known`; and those for validation and test
/// by such words, of several the one that differs from the first in the word alone (`train_sft`, `test_sft`).
fn choose(known: &[&str], entry: &Entry) -> Result<Vec<Chosen>> {
    let train = match (&entry.split, &named(known, Split::Train)[..], known) {
        (Some(written), _, _) => written.as_str(),
        (None, [one], _) | (None, [], [one]) => one,
        _ => return Err(ambiguous(known, "to learn from")),
    };
    let train = Chosen::named(train, Some(Split::Train))?;
    let rest = |name: &str| name.split_once(['_', '-', '.']).map(|(_, rest)| rest.to_string());
    let mut chosen = Vec::new();
    for (split, written) in [(Split::Valid, &entry.valid_split), (Split::Test, &entry.test_split)] {
        if let Some(written) = written {
            chosen.push(Chosen::named(written, Some(split))?);
            continue;
        }
        let mut others = named(known, split);
        others.retain(|name| *name != train.name);
        if others.len() > 1 {
            others.retain(|name| rest(name) == rest(&train.name));
        }
        if let [one] = others[..] {
            chosen.push(Chosen::named(one, Some(split))?);
        }
    }
    chosen.insert(0, train);
    Ok(chosen)
}

/// The split to measure on: by its name, or by the word for `split`, or else that for test or validation data.
fn choose_one(known: &[&str], entry: &Entry, split: Option<Split>) -> Result<Chosen> {
    if let Some(written) = &entry.split {
        return Chosen::named(written, Some(Split::Test));
    }
    let usual = [Split::Test, Split::Valid];
    let wanted = split.as_ref().map_or(&usual[..], std::slice::from_ref);
    for split in wanted {
        match named(known, *split)[..] {
            [] => {}
            [one] => return Chosen::named(one, Some(Split::Test)),
            _ => break,
        }
    }
    Err(ambiguous(known, "to measure on"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(split: Option<&str>) -> Entry {
        Entry { split: split.map(String::from), ..Entry::at("owner/name") }
    }

    #[test]
    fn a_folder_with_training_data_alone_needs_the_split() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("train.jsonl"), "{\"text\": \"a\"}\n").unwrap();
        let entry = Entry { path: folder.path().display().to_string(), ..Entry::default() };
        let find = |split| of_this_machine(&entry, Wanted::Measuring(split));
        let error = find(None).err().unwrap().to_string();
        assert!(
            error.contains("training data alone") && error.contains("--split train"),
            "{error}"
        );
        assert_eq!(find(Some(Split::Train)).unwrap().len(), 1);
    }

    #[test]
    fn splits_are_chosen_by_their_words() {
        let chosen = |known: &[&str], name| {
            let mut names = ["train", "valid", "test"].map(|_| String::new());
            for chosen in choose(known, &entry(name)).unwrap() {
                let place = ["train", "valid", "test"].iter().position(|it| *it == chosen.split);
                names[place.unwrap()] = chosen.describe();
            }
            names
        };
        assert_eq!(chosen(&["test", "train", "validation"], None), ["train", "validation", "test"]);
        assert_eq!(chosen(&["all"], None), ["all", "", ""]);
        let zephyr = ["test_gen", "test_sft", "train_gen", "train_sft"];
        assert_eq!(chosen(&zephyr, Some("train_sft")), ["train_sft", "", "test_sft"]);
        assert_eq!(chosen(&zephyr, Some("train_sft[:9]")), ["train_sft[:9]", "", "test_sft"]);
        let message = choose(&zephyr, &entry(None)).unwrap_err().to_string();
        assert!(message.contains("--data-split; there is test_gen, test_sft"), "{message}");
        assert!(choose(&["a", "b"], &entry(None)).is_err());
        assert_eq!(chosen(&["a", "dev1", "dev2"], Some("a")), ["a", "", ""]);
        let sliced =
            Entry { valid_split: Some("train[-10%:]".into()), ..entry(Some("train[:80%]")) };
        let found = choose(&["test", "train", "validation"], &sliced).unwrap();
        let found: Vec<String> = found.iter().map(Chosen::describe).collect();
        assert_eq!(found, ["train[:80%]", "train[-10%:]", "test"]);
    }

    #[test]
    fn one_split_is_chosen_to_measure_on() {
        let one = |known: &[&str], name, split| {
            choose_one(known, &entry(name), split).map(|chosen| chosen.describe())
        };
        assert_eq!(one(&["test", "train", "validation"], None, None).unwrap(), "test");
        assert_eq!(one(&["dev", "train"], None, None).unwrap(), "dev");
        assert_eq!(one(&["test", "train"], None, Some(Split::Train)).unwrap(), "train");
        assert_eq!(
            one(&["test_gen", "test_sft"], Some("test_sft[:5]"), None).unwrap(),
            "test_sft[:5]"
        );
        let message = one(&["test_gen", "test_sft", "dev"], None, None).unwrap_err().to_string();
        assert!(message.contains("--data-split; there is test_gen"), "{message}");
        assert!(one(&["train"], None, None).is_err());
    }
}
