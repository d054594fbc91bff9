//! Models: which files of a repository are needed, and whether a snapshot has them all.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use super::cache::{Kind, Repository};
use super::names::{is_id, is_name, is_revision};
use super::transfer::{Client, Failure};
use super::{Download, HubOptions, expand_home};
use crate::files::companions::{TOKENIZER, is_companion};
use crate::gguf::is_gguf;
use crate::{Error, Result, files};

const CONFIG: &str = "config.json";
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// Gives the folder of a model: `model` itself if it is a folder or a GGUF file, otherwise the snapshot of the
/// hub's repository `model` (`owner/name`) at `revision` (a branch, tag or commit; `main` if
/// `None`), downloaded if needed. Options come from the environment, see
/// [`HubOptions::from_env`].
///
/// # Errors
/// [`Error::File`] when `model` looks like a path and is no folder; [`Error::Option`] for a
/// revision of a folder or one that cannot be a revision; [`Error::Hub`] when the model cannot be
/// had, saying what was missing and where it was looked for.
pub fn resolve(model: &str, revision: Option<&str>) -> Result<PathBuf> {
    resolve_with(model, revision, &HubOptions::from_env()?, &mut |_| {})
}

/// [`resolve`] with given options, telling `progress` of each piece that arrives.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_with(
    model: &str,
    revision: Option<&str>,
    options: &HubOptions,
    progress: &mut dyn FnMut(Download),
) -> Result<PathBuf> {
    resolve_needed(Needed::All, model, revision, options, progress)
}

/// As [`resolve_with`], for the sake of `config.json` alone: of the hub's repository nothing else is needed.
///
/// # Errors
/// As [`resolve`].
pub fn resolve_config_with(
    model: &str,
    revision: Option<&str>,
    options: &HubOptions,
    progress: &mut dyn FnMut(Download),
) -> Result<PathBuf> {
    resolve_needed(Needed::Config, model, revision, options, progress)
}

/// What of a repository is needed.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Needed {
    All,
    Config,
}

fn resolve_needed(
    needed: Needed,
    model: &str,
    revision: Option<&str>,
    options: &HubOptions,
    progress: &mut dyn FnMut(Download),
) -> Result<PathBuf> {
    let path = expand_home(model, std::env::home_dir().as_deref());
    if path.is_dir() || (path.exists() && is_gguf(&path)) {
        if let Some(revision) = revision {
            return Err(Error::option(
                "revision",
                format!(
                    "found {revision:?}, but {model} is here; only models of the hub have revisions"
                ),
            ));
        }
        return Ok(path);
    }
    if path.exists() {
        return Err(Error::file(
            path,
            "is a file; give the model's folder, a .gguf file or a hub id owner/name",
        ));
    }
    if !is_id(model) {
        return Err(Error::file(
            path,
            "no such folder, and not the id of a model on the hub, which looks like owner/name",
        ));
    }
    let revision = revision.unwrap_or("main");
    if !is_revision(revision) {
        return Err(Error::option(
            "revision",
            format!("found {revision:?}; expected a branch, a tag or a commit"),
        ));
    }
    let repository = Repository { kind: Kind::Model, id: model, revision, options };
    repository.resolve(
        |name| needed == Needed::All && is_companion(name),
        |snapshot| needed == Needed::Config || snapshot.join(TOKENIZER).exists(),
        || cached(&repository, needed),
        || fetch(&repository, needed, progress),
    )
}

/// The snapshot of the revision in the cache with what is needed, or what is missing of it.
fn cached(repository: &Repository, needed: Needed) -> Result<PathBuf, String> {
    let (_, snapshot) = repository.cached_snapshot()?;
    let mut missing = missing_files(&snapshot).map_err(|error| error.to_string())?;
    if needed == Needed::Config {
        missing.retain(|name| name == CONFIG);
    }
    if missing.is_empty() {
        Ok(snapshot)
    } else {
        Err(format!("{} lacks {}", snapshot.display(), missing.join(", ")))
    }
}

/// Downloads what is not in the cache yet.
fn fetch(
    repository: &Repository,
    needed: Needed,
    progress: &mut dyn FnMut(Download),
) -> Result<PathBuf, Failure> {
    let client = Client::new(*repository)?;
    let listing = client.list(|| cached(repository, needed).is_ok())?;
    let available = listing.files.iter().map(|file| file.name.clone()).collect();
    let snapshot = repository.snapshot(&listing.commit);

    let mut wanted = wanted(repository, &available)?;
    if needed == Needed::Config {
        wanted.retain(|name| name == CONFIG);
    }
    let shards = wanted.contains(&INDEX.to_string());
    let mut index = 0;
    while let Some(file) = wanted.get(index).cloned() {
        let files = wanted.len();
        client.fetch(&listing.commit, &file, &mut |bytes, total| {
            progress(Download { file: &file, index, files, bytes, total });
        })?;
        index += 1;
        // The list of shards comes last of the files known so far.
        if shards && index == files && file == INDEX {
            let shards = shard_names(&snapshot.join(INDEX)).map_err(Failure::Final)?;
            if let Some(absent) = shards.iter().find(|shard| !available.contains(*shard)) {
                return Err(repository.failure(format!(
                    "{INDEX} names {absent}, which the repository at {} does not have",
                    repository.options.endpoint
                )));
            }
            wanted.extend(shards);
        }
    }
    repository.remember_files(&listing);
    // The revision goes on naming what is in the cache as a whole.
    if needed == Needed::All {
        repository.refer_to(&listing.commit).map_err(Failure::Final)?;
    }
    Ok(snapshot)
}

/// The files to fetch; with a list of shards, that comes last and the shards after it.
fn wanted(repository: &Repository, available: &BTreeSet<String>) -> Result<Vec<String>, Failure> {
    let has = |name: &str| available.contains(name);
    let endpoint = &repository.options.endpoint;
    if !has(CONFIG) {
        return Err(repository.failure(format!(
            "the repository at {endpoint} has no config.json, so it holds no transformers model"
        )));
    }
    let mut wanted = vec![CONFIG.to_string()];
    wanted.extend(available.iter().filter(|name| is_companion(name)).cloned());
    if has(SINGLE) {
        wanted.push(SINGLE.to_string());
    } else if has(INDEX) {
        wanted.push(INDEX.to_string());
    } else {
        let other = available.iter().find(|name| {
            [".safetensors", ".gguf", ".bin", ".pt", ".pth"].iter().any(|e| name.ends_with(e))
        });
        let found = other.map_or("no weights".to_string(), |name| name.clone());
        return Err(repository.failure(format!(
            "the repository at {endpoint} has neither {SINGLE} nor {INDEX}, but {found}; only \
             safetensors checkpoints can be used"
        )));
    }
    Ok(wanted)
}

/// What of a model's files a snapshot lacks.
fn missing_files(snapshot: &Path) -> Result<Vec<String>> {
    let absent = |name: &str| !snapshot.join(name).exists();
    let mut missing = Vec::new();
    if absent(CONFIG) {
        missing.push(CONFIG.to_string());
    }
    if absent(SINGLE) {
        if absent(INDEX) {
            missing.push(format!("{SINGLE} (or {INDEX})"));
        } else {
            missing.extend(shard_names(&snapshot.join(INDEX))?.into_iter().filter(|n| absent(n)));
        }
    }
    Ok(missing)
}

/// The files that an index of shards names, each once.
fn shard_names(index: &Path) -> Result<BTreeSet<String>> {
    let value: serde_json::Value = files::read_json(index)?;
    let names = value
        .get("weight_map")
        .and_then(|map| map.as_object())
        .ok_or_else(|| Error::file(index, "has no weight_map, which should list the tensors"))?
        .values()
        .map(|name| match name.as_str() {
            // The name becomes part of a path.
            Some(name) if is_name(name) => Ok(name.to_string()),
            _ => Err(Error::file(index, format!("weight_map has {name}; expected a file's name"))),
        })
        .collect::<Result<BTreeSet<_>>>()?;
    if names.is_empty() {
        return Err(Error::file(index, "weight_map is empty; it should list the tensors"));
    }
    Ok(names)
}
