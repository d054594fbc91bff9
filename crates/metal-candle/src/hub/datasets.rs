//! Data sets: which files of a repository are which split, and the way to them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::cache::{Kind, Repository};
use super::layout::{self, CONVERTED, Splits};
use super::names::{is_id, is_revision};
use super::transfer::{Client, Failure};
use super::{Download, HubOptions};
use crate::{Error, Result, files};

/// Where the configurations may be named, the first that names any counting.
const CARDS: [&str; 2] = [layout::YAML_CARD, "README.md"];
/// The largest card that is read, in bytes.
const MAX_CARD: u64 = 16 << 20;

/// What is wanted of a data set.
pub struct DatasetChoice<'a> {
    /// The configuration; `None` for the default one or the only one.
    pub config: Option<&'a str>,
    /// The branch, tag or commit; `main` if `None`.
    pub revision: Option<&'a str>,
    /// Which of the splits that there are. Only their files are downloaded.
    pub splits: &'a dyn Fn(&[&str]) -> Result<Vec<String>>,
}

/// A data set's files in the cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DatasetFiles {
    /// The commit that they are of.
    pub commit: String,
    /// The configuration; `default` where none is named.
    pub config: String,
    /// The files of each split, in the order of their names in the repository.
    pub splits: BTreeMap<String, Vec<PathBuf>>,
}

/// Whether `name` can be that of a data set on the hub: `owner/name`.
pub fn is_dataset_id(name: &str) -> bool {
    is_id(name)
}

/// Gives the files of all splits of the hub's data set `id` (`owner/name`), downloaded if needed,
/// by its configuration `config` (the default one or the only one if `None`) at `revision` (a
/// branch, tag or commit; `main` if `None`). Options come from the environment, see
/// [`HubOptions::from_env`].
///
/// Which files are which split goes by the rules of Hugging Face's `datasets`: by the `configs` of
/// the data set's card, or else by the names of files and folders. The splits have the names that
/// they have there, usually `train`, `validation` and `test`. Files are Parquet, JSON, JSON Lines,
/// CSV, TSV or text, as they are or compressed by gzip or zstd. The revision `refs/convert/parquet`
/// is the hub's own Parquet copy, which it makes of many data sets that have other files.
///
/// # Errors
/// [`Error::Option`] for what cannot be an id or a revision; [`Error::Hub`] when the data set cannot
/// be had, when it has several configurations and none is chosen or other ones than the chosen, and
/// when it has no files that are read.
pub fn resolve_dataset(
    id: &str,
    config: Option<&str>,
    revision: Option<&str>,
) -> Result<DatasetFiles> {
    let all = |splits: &[&str]| Ok(splits.iter().map(|split| split.to_string()).collect());
    let choice = DatasetChoice { config, revision, splits: &all };
    resolve_dataset_with(id, &choice, &HubOptions::from_env()?, &mut |_| {})
}

/// [`resolve_dataset`] of chosen splits with given options, telling `progress` of each piece that
/// arrives.
///
/// # Errors
/// As [`resolve_dataset`], and what `choice` gives.
pub fn resolve_dataset_with(
    id: &str,
    choice: &DatasetChoice,
    options: &HubOptions,
    progress: &mut dyn FnMut(Download),
) -> Result<DatasetFiles> {
    if !is_id(id) {
        return Err(Error::option(
            "data set",
            format!("found {id:?}; expected the id of a data set on the hub, such as owner/name"),
        ));
    }
    let revision = choice.revision.unwrap_or("main");
    if !is_revision(revision) {
        return Err(Error::option(
            "revision",
            format!("found {revision:?}; expected a branch, a tag or a commit"),
        ));
    }
    let repository = Repository { kind: Kind::Dataset, id, revision, options };
    // Which files are wanted, and so all that may be missing, is known where the list of them is.
    repository.resolve(
        |_| false,
        |_| false,
        || cached(&repository, choice),
        || fetch(&repository, choice, progress),
    )
}

/// The complete files in the cache, or what is missing of them.
fn cached(repository: &Repository, choice: &DatasetChoice) -> Result<DatasetFiles, String> {
    let (commit, snapshot) = repository.cached_snapshot()?;
    let known = repository.known_files(&commit);
    let is_known = known.is_some();
    let listed = match known {
        Some(files) => files,
        None => {
            let mut files = Vec::new();
            walk(&snapshot, "", &mut files).map_err(|error| error.to_string())?;
            tracing::warn!(
                "{}: the cache has no list of the repository's files, so what is in {} is taken for all of it",
                repository.id,
                snapshot.display()
            );
            files
        }
    };
    let names = listed.iter().map(String::as_str).collect::<Vec<_>>();
    let mut missing = Vec::new();
    let mut has = |name: &str| {
        let path = snapshot.join(name);
        if !path.exists() {
            missing.push(name.to_string());
        }
        path
    };
    let cards =
        CARDS.iter().filter(|card| names.contains(card)).map(|card| has(card)).collect::<Vec<_>>();
    let lacks =
        |missing: &[String]| format!("{} lacks {}", snapshot.display(), layout::list(missing));
    if !missing.is_empty() {
        return Err(lacks(&missing));
    }
    let text = |error: Error| match error {
        Error::Hub { message, .. } => message,
        other => other.to_string(),
    };
    let (config, splits) = plan(repository, choice, &names, &cards).map_err(text)?;
    let mut missing = splits
        .values()
        .flatten()
        .filter(|file| !snapshot.join(file).exists())
        .cloned()
        .collect::<Vec<_>>();
    if !is_known {
        missing.extend(absent_shards(&splits));
    }
    if !missing.is_empty() {
        return Err(lacks(&missing));
    }
    Ok(found(commit, config, &splits, &snapshot))
}

/// Downloads what is not in the cache yet.
fn fetch(
    repository: &Repository,
    choice: &DatasetChoice,
    progress: &mut dyn FnMut(Download),
) -> Result<DatasetFiles, Failure> {
    let client = Client::new(*repository)?;
    let listing = client.list(|| cached(repository, choice).is_ok())?;
    let commit = &listing.commit;
    let names = listing.files.iter().map(|file| file.name.as_str()).collect::<Vec<_>>();
    let cards = CARDS
        .iter()
        .filter(|card| names.contains(card))
        .map(|card| client.fetch(commit, card, &mut |_, _| {}))
        .collect::<Result<Vec<_>, _>>()?;
    let (config, splits) = plan(repository, choice, &names, &cards).map_err(Failure::Final)?;
    // A file may be in several splits.
    let wanted = splits.values().flatten().collect::<BTreeSet<_>>();
    for (index, file) in wanted.iter().enumerate() {
        client.fetch(commit, file, &mut |bytes, total| {
            progress(Download { file, index, files: wanted.len(), bytes, total });
        })?;
    }
    repository.remember_files(&listing);
    repository.refer_to(commit).map_err(Failure::Final)?;
    Ok(found(commit.clone(), config, &splits, &repository.snapshot(commit)))
}

/// The configuration and the files of the chosen splits, by the repository's files and its cards.
fn plan(
    repository: &Repository,
    choice: &DatasetChoice,
    names: &[&str],
    cards: &[PathBuf],
) -> Result<(String, Splits)> {
    let error = |message: String| repository.error(message);
    let mut configs = Vec::new();
    for card in cards.iter().filter(|_| choice.revision != Some(CONVERTED)) {
        let bytes = files::read_limited(card, MAX_CARD)?;
        let is_yaml = card.ends_with(layout::YAML_CARD);
        configs = layout::read_card(&String::from_utf8_lossy(&bytes), is_yaml)
            .map_err(|message| Error::file(card, message))?;
        if !configs.is_empty() {
            break;
        }
    }
    if choice.revision == Some(CONVERTED) {
        configs = layout::converted(names);
    }
    let config = layout::choose(configs, choice.config).map_err(error)?;
    let mut splits = layout::splits(names, &config).map_err(error)?;
    let known = splits.keys().map(String::as_str).collect::<Vec<_>>();
    let chosen = (choice.splits)(&known)?;
    if let Some(unknown) = chosen.iter().find(|split| !splits.contains_key(*split)) {
        return Err(error(format!(
            "there is no split {unknown:?}; there is {}",
            layout::list(&known)
        )));
    }
    splits.retain(|split, _| chosen.contains(split));
    if let Some((split, _)) = splits.iter().find(|(_, files)| files.is_empty()) {
        return Err(error(format!(
            "no file fits what the card names as the split {split} of configuration {}",
            config.name
        )));
    }
    Ok((config.name, splits))
}

fn found(commit: String, config: String, splits: &Splits, snapshot: &Path) -> DatasetFiles {
    let paths = |files: &Vec<String>| files.iter().map(|file| snapshot.join(file)).collect();
    let splits = splits.iter().map(|(split, files)| (split.clone(), paths(files))).collect();
    DatasetFiles { commit, config, splits }
}

/// Shards that other shards' names count and that are not there.
fn absent_shards(splits: &Splits) -> Vec<String> {
    let mut absent = BTreeSet::new();
    for file in splits.values().flatten() {
        let Some((at, _)) = file.rmatch_indices("-of-").next() else { continue };
        let digits = |range: std::ops::Range<usize>| {
            file.get(range).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()))
        };
        let number = at.checked_sub(5).and_then(|from| digits(from..at));
        let (Some(_), Some(count)) = (number, digits(at + 4..at + 9)) else { continue };
        let (Some(before), Some(after)) = (file.get(..at - 5), file.get(at..)) else { continue };
        for index in 0..count.parse::<u32>().unwrap_or(0) {
            let shard = format!("{before}{index:05}{after}");
            if splits.values().all(|files| files.binary_search(&shard).is_err()) {
                absent.insert(shard);
            }
        }
    }
    absent.into_iter().collect()
}

/// The files below a folder, with `/` between the parts of their names.
fn walk(folder: &Path, prefix: &str, found: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io(folder))? {
        let path = entry.map_err(Error::io(folder))?.path();
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        let name = format!("{prefix}{name}");
        // Files are links; folders are none.
        if path.is_dir() && !path.is_symlink() {
            walk(&path, &format!("{name}/"), found)?;
        } else {
            found.push(name);
        }
    }
    Ok(())
}
