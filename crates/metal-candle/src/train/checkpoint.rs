//! Checkpoints: everything a run needs to continue with the same bits.
//!
//! A checkpoint is the folder `checkpoints/step-<n>` of the run. It holds the adapter as PEFT
//! writes it (or, in full fine-tuning, the model in f32), the optimiser's moments, and
//! `trainer_state.json`. The folder appears under its name only when it is complete.

use crate::model::{Model, Weights};
use crate::{Error, Result, files};
use candle_core::{DType, Device, Tensor};
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

const FOLDER: &str = "checkpoints";
const STATE: &str = "trainer_state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const VERSION: u32 = 1;

/// Where a run stands. Together with the parameters and the moments it decides every later step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    pub version: u32,
    /// Optimiser steps taken, skipped ones included.
    pub step: u64,
    /// Steps that changed the parameters.
    pub updates: u64,
    /// The epoch under way and the batches of it that have been used.
    pub epoch: usize,
    pub batch: usize,
    /// Target tokens trained on.
    pub trained_tokens: u64,
    pub skipped: u64,
    pub skipped_in_a_row: u64,
    /// Sums since the last report, so that the next one is the same after a resume.
    pub loss_sum: f64,
    pub loss_tokens: u64,
    /// The best evaluation so far.
    pub best_loss: Option<f64>,
    pub best_step: Option<u64>,
    pub evaluations_without_gain: u64,
    /// What must not change between the parts of one run.
    pub fingerprint: Fingerprint,
}

/// What decides the bits of a run. Resuming with another one would continue a different run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fingerprint {
    pub seed: u64,
    pub batch_size: usize,
    pub accumulation: usize,
    pub max_seq_length: usize,
    pub packing: bool,
    pub shuffle: bool,
    pub data_seed: u64,
    /// Examples, their tokens, and a hash of them.
    pub examples: usize,
    pub tokens: u64,
    pub data_hash: String,
    pub validation_hash: Option<String>,
    pub model_hash: String,
    pub adapter: String,
    pub trainable_parameters: usize,
    pub total_steps: u64,
    pub learning_rate: String,
    pub optimizer: String,
    pub evaluation: String,
}

impl State {
    pub fn new(fingerprint: Fingerprint) -> Self {
        Self {
            version: VERSION,
            step: 0,
            updates: 0,
            epoch: 0,
            batch: 0,
            trained_tokens: 0,
            skipped: 0,
            skipped_in_a_row: 0,
            loss_sum: 0.0,
            loss_tokens: 0,
            best_loss: None,
            best_step: None,
            evaluations_without_gain: 0,
            fingerprint,
        }
    }
}

impl Fingerprint {
    /// Names the first thing that differs.
    pub fn check(&self, saved: &Self, path: &Path) -> Result<()> {
        let as_map = |value: &Self| match serde_json::to_value(value) {
            Ok(serde_json::Value::Object(map)) => map,
            _ => serde_json::Map::new(),
        };
        for (key, now) in as_map(self) {
            let before = as_map(saved).remove(&key).unwrap_or_default();
            if before != now {
                return Err(Error::file(
                    path,
                    format!(
                        "cannot be resumed: {key} was {before} and is now {now}; resume with the same \
                     options and data, or start a new run in another folder"
                    ),
                ));
            }
        }
        Ok(())
    }
}

/// The folder of the checkpoint of a step.
pub(super) fn folder(output: &Path, step: u64) -> PathBuf {
    output.join(FOLDER).join(format!("step-{step:08}"))
}

/// The folder of all checkpoints.
pub(super) fn parent(output: &Path) -> PathBuf {
    output.join(FOLDER)
}

/// The complete checkpoints of a run and their steps, oldest first.
pub(super) fn list(output: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let parent = output.join(FOLDER);
    let entries = match std::fs::read_dir(&parent) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(&parent)(error)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(Error::io(&parent))?;
        let name = entry.file_name();
        let step = name.to_str().and_then(|name| name.strip_prefix("step-")?.parse().ok());
        if let Some(step) = step {
            found.push((step, entry.path()));
        }
    }
    found.sort_unstable();
    Ok(found)
}

/// The newest complete checkpoint of a run, if there is one.
pub fn latest(output: impl AsRef<Path>) -> Result<Option<PathBuf>> {
    Ok(list(output.as_ref())?.pop().map(|(_, path)| path))
}

/// The moments of AdamW.
#[derive(Debug)]
pub(super) struct Moments {
    pub first: Tensor,
    pub second: Tensor,
}

impl Moments {
    pub fn zeros(count: usize, device: &Device) -> Result<Self> {
        Ok(Self {
            first: Tensor::zeros(count, DType::F32, device)?,
            second: Tensor::zeros(count, DType::F32, device)?,
        })
    }
}

/// Writes the checkpoint of a step and returns its folder. A checkpoint of the same step that is
/// there already is left as it is.
pub(super) fn save(
    output: &Path,
    state: &State,
    model: &Model,
    moments: &Moments,
    base_model: &str,
    companions: Option<&Path>,
    saving: &mut dyn FnMut(&Path),
) -> Result<PathBuf> {
    let folder = folder(output, state.step);
    if folder.is_dir() {
        return Ok(folder);
    }
    let parent = output.join(FOLDER);
    std::fs::create_dir_all(&parent).map_err(Error::io(&parent))?;
    files::write_folder_atomic(&folder, |staging| {
        saving(staging);
        save_parameters(staging, model, base_model, companions)?;
        saving(staging);
        let tensors = [
            ("first_moment".to_string(), moments.first.clone()),
            ("second_moment".to_string(), moments.second.clone()),
        ];
        files::write_safetensors(staging.join(OPTIMIZER), &tensors, None)?;
        saving(staging);
        let path = staging.join(STATE);
        let bytes = serde_json::to_vec_pretty(state)
            .map_err(|error| Error::file(&path, error.to_string()))?;
        files::write_bytes_atomic(&path, bytes)?;
        saving(staging);
        Ok(())
    })?;
    Ok(folder)
}

/// Writes the adapter, or the whole model in f32.
pub(super) fn save_parameters(
    folder: &Path,
    model: &Model,
    base_model: &str,
    companions: Option<&Path>,
) -> Result<()> {
    if model.adapter().is_some() {
        model.save_adapter(folder, base_model)
    } else {
        model.save(folder, DType::F32, companions)
    }
}

/// Reads a checkpoint into the model and gives back the state and the moments.
pub(super) fn load(
    folder: &Path,
    fingerprint: &Fingerprint,
    model: &Model,
) -> Result<(State, Moments)> {
    let path = folder.join(STATE);
    let state: State = files::read_json(&path)?;
    if state.version != VERSION {
        return Err(Error::file(
            &path,
            format!(
                "version is {}, expected {VERSION}; it was written by another version of this program",
                state.version
            ),
        ));
    }
    fingerprint.check(&state.fingerprint, &path)?;
    let State { step, updates, epoch, batch, .. } = state;
    let most = fingerprint.total_steps.saturating_mul(fingerprint.accumulation as u64);
    if updates > step
        || step > fingerprint.total_steps
        || epoch as u64 > most
        || batch as u64 > most
    {
        return Err(Error::file(
            &path,
            format!(
                "step {step}, updates {updates}, epoch {epoch} and batch {batch} cannot be of a run of {} steps",
                fingerprint.total_steps
            ),
        ));
    }
    model.load_parameters(folder)?;
    let weights = Weights::from_files([folder.join(OPTIMIZER)])?;
    let count = [fingerprint.trainable_parameters];
    let read = |name| weights.tensor(name, &count, DType::F32, model.device());
    let moments = Moments { first: read("first_moment")?, second: read("second_moment")? };
    Ok((state, moments))
}

/// Removes the checkpoints of later steps, which a run that continues from `step` makes again.
pub(super) fn remove_after(output: &Path, step: u64) -> Result<()> {
    for (found, path) in list(output)? {
        if found > step {
            std::fs::remove_dir_all(&path).map_err(Error::io(&path))?;
        }
    }
    Ok(())
}

/// Removes the oldest checkpoints until `keep` are left, not counting the one of step `best`.
pub(super) fn prune(output: &Path, keep: usize, best: Option<u64>) -> Result<()> {
    let found = list(output)?;
    let newest = found.len().saturating_sub(keep);
    for (step, path) in found.into_iter().take(newest) {
        if Some(step) != best {
            std::fs::remove_dir_all(&path).map_err(Error::io(&path))?;
        }
    }
    Ok(())
}
