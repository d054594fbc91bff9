//! Adapters: a repository's few files that are one, as PEFT or mlx-lm writes them.

use std::path::PathBuf;

use super::cache::{Kind, Repository, length};
use super::names::{is_id, is_revision};
use super::transfer::{Client, Failure};
use super::{Download, HubOptions};
use crate::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, MLX_WEIGHTS};
use crate::files::companions::{CHAT_TEMPLATE, TOKENIZER_CONFIG};
use crate::{Error, Result};

/// What else an adapter may have: a chat template of its own.
const BESIDE: [&str; 2] = [CHAT_TEMPLATE, TOKENIZER_CONFIG];

/// The id and the revision of an adapter's name `owner/name` or `owner/name@revision`, if it can be one on the hub.
pub fn parse_adapter(name: &str) -> Option<(&str, Option<&str>)> {
    let (id, revision) = match name.split_once('@') {
        Some((id, revision)) => (id, Some(revision)),
        None => (name, None),
    };
    (is_id(id) && revision.is_none_or(is_revision)).then_some((id, revision))
}

/// Gives the folder of the adapter in the hub's repository `id` (`owner/name`) at `revision` (a branch, tag or commit;
/// `main` if `None`), downloaded if needed. Its files have at most `most` bytes together. No folder on this machine is
/// looked for under this name.
///
/// # Errors
/// [`Error::Option`] for what cannot be an id or a revision; [`Error::Hub`] when the adapter cannot be had, is too large, or
/// is none.
pub fn resolve_adapter_with(
    id: &str,
    revision: Option<&str>,
    most: u64,
    options: &HubOptions,
    progress: &mut dyn FnMut(Download),
) -> Result<PathBuf> {
    if !is_id(id) {
        let message = format!("found {id:?}; expected the id of an adapter, such as owner/name");
        return Err(Error::option("adapter", message));
    }
    let revision = revision.unwrap_or("main");
    if !is_revision(revision) {
        let message = format!("found {revision:?}; expected a branch, a tag or a commit");
        return Err(Error::option("revision", message));
    }
    let repository = Repository { kind: Kind::Adapter, id, revision, options };
    repository.resolve(
        |name| BESIDE.contains(&name),
        |snapshot| BESIDE.iter().any(|name| snapshot.join(name).exists()),
        || cached(&repository),
        || fetch(&repository, most, progress),
    )
}

/// The snapshot in the cache, or what is missing of it.
fn cached(repository: &Repository) -> Result<PathBuf, String> {
    let (_, snapshot) = repository.cached_snapshot()?;
    let lacks = |name: &str| Err(format!("{} lacks {name}", snapshot.display()));
    let has = |name: &str| snapshot.join(name).exists();
    if !has(ADAPTER_CONFIG) {
        return lacks(ADAPTER_CONFIG);
    }
    match has(ADAPTER_WEIGHTS) || has(MLX_WEIGHTS) {
        true => Ok(snapshot),
        false => lacks(ADAPTER_WEIGHTS),
    }
}

/// Downloads what is not in the cache yet.
fn fetch(
    repository: &Repository,
    most: u64,
    progress: &mut dyn FnMut(Download),
) -> Result<PathBuf, Failure> {
    let client = Client::new(*repository)?;
    let listing = client.list(|| cached(repository).is_ok())?;
    let has = |name: &&str| listing.files.iter().any(|file| file.name == *name);
    let endpoint = &repository.options.endpoint;
    if !has(&ADAPTER_CONFIG) {
        return Err(repository.failure(format!(
            "the repository at {endpoint} has no {ADAPTER_CONFIG}, so it holds no adapter"
        )));
    }
    let Some(weights) = [ADAPTER_WEIGHTS, MLX_WEIGHTS].into_iter().find(has) else {
        return Err(repository.failure(format!(
            "the repository at {endpoint} has neither {ADAPTER_WEIGHTS} nor {MLX_WEIGHTS}; only adapters in safetensors \
             can be used"
        )));
    };
    // The weights are the last: whoever finds them in the cache finds all that was downloaded here.
    let wanted: Vec<&str> = std::iter::once(ADAPTER_CONFIG)
        .chain(BESIDE.into_iter().filter(has))
        .chain([weights])
        .collect();
    let mut left = most;
    for (index, file) in wanted.iter().enumerate() {
        let files = wanted.len();
        let mut tell = |bytes, total| progress(Download { file, index, files, bytes, total });
        let path = client.fetch_within(left, &listing.commit, file, &mut tell)?;
        left = left.saturating_sub(length(&path).unwrap_or(0));
    }
    repository.remember_files(&listing);
    repository.refer_to(&listing.commit).map_err(Failure::Final)?;
    Ok(repository.snapshot(&listing.commit))
}
