//! A whole model to download: the base with what a job has made of it in its weights, as `metal-candle fuse` writes it.
//!
//! The weights are merged one after the other while they are sent, so there is never a second model in memory or on the
//! disk. The small files beside them lie in a folder of the data folder for as long as the download takes.

use super::jobs::{TAR, made, step};
use super::query::{Id, Pairs};
use super::stream::{Entry, archive, download};
use crate::app::{App, Shared};
use crate::body;
use crate::error::{ApiError, Result};
use axum::extract::State;
use axum::response::Response;
use metal_candle::DType;
use metal_candle::adapter::Merged;
use metal_candle::model::{Companions, stored_dtype};
use metal_candle::text::chat_template_in;
use std::fs::File;
use std::io::{self, Cursor, Read};
use std::path::Path;
use tempfile::TempDir;

/// Downloads at once. Each holds one weight in memory.
pub const AT_ONCE: usize = 4;

/// The base with the adapter that a job has made, or that of a checkpoint, as a tar of a model's folder.
pub async fn download_merged(
    State(app): State<Shared>,
    Id(id): Id,
    body::Asked(pairs): body::Asked<Pairs>,
) -> Result<Response> {
    app.require_whole("merging")?;
    let step = step(pairs)?;
    let (tuned, folder) = app.blocking(move |app| made(app, &id, step)).await?;
    let permit = app.merging.clone().try_acquire_owned().map_err(|_| {
        ApiError::busy(format!("{AT_ONCE} merged models are being downloaded already"))
    })?;
    let chosen = app.choose_on_first(&tuned.name).await?;
    let adapter = chosen.adapter.ok_or_else(|| ApiError::no_model(&tuned.name))?;
    let (entries, beside) = app
        .blocking(move |app| {
            let merged = Merged::new(&app.model, &adapter, dtype(app)?)?;
            entries(app, &tuned.folder, merged.with_turns(app.turns.clone()))
        })
        .await?;
    let folder = format!("{folder}-merged");
    let (length, archive) = archive(&folder, entries)?;
    let reader = Held { reader: archive, _with: (beside, permit) };
    Ok(download(&app, &format!("{folder}.tar"), TAR, length, reader))
}

/// The dtype of the base's files, or that which the server computes in where this is a shorter one.
fn dtype(app: &App) -> Result<DType> {
    match app.model.dtype() {
        DType::F32 => Ok(stored_dtype(&app.folder)?),
        shorter => Ok(shorter),
    }
}

/// The files of a model with the adapter of a folder in its weights, and the folder where those beside the weights lie.
fn entries(app: &App, adapter: &Path, merged: Merged) -> Result<(Vec<Entry>, TempDir)> {
    let beside = app.store.temporary_folder()?;
    let template = chat_template_in(adapter)?;
    let companions = Companions { from: &app.folder, chat_template: template.as_deref() };
    companions.copy(beside.path())?;
    let config = merged.config()?;
    let mut entries = vec![Entry::new(Merged::CONFIG, config.len() as u64, Cursor::new(config))];
    add_folder(beside.path(), "", &mut entries)?;
    entries.push(Entry::new(Merged::WEIGHTS, merged.length(), merged.weights()));
    Ok((entries, beside))
}

/// Adds what lies in a folder, by name, and in the folders in it.
fn add_folder(folder: &Path, prefix: &str, entries: &mut Vec<Entry>) -> Result<()> {
    let found = folder.read_dir().and_then(Iterator::collect::<io::Result<Vec<_>>>);
    let mut found = found.map_err(ApiError::internal)?;
    found.sort_by_key(std::fs::DirEntry::file_name);
    for entry in found {
        let path = entry.path();
        let name = format!("{prefix}{}", entry.file_name().to_string_lossy());
        if path.is_dir() {
            add_folder(&path, &format!("{name}/"), entries)?;
        } else {
            entries.push(Entry::of(name, File::open(&path).map_err(ApiError::internal)?)?);
        }
    }
    Ok(())
}

/// A reader, with what is held until it has been read or is dropped.
struct Held<R, T> {
    reader: R,
    _with: T,
}

impl<R: Read, T> Read for Held<R, T> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.reader.read(buffer)
    }
}
