//! Checkpoints: everything a run needs to continue with the same bits.
//!
//! A checkpoint is the folder `checkpoints/step-<n>` of the run. It holds the adapter as PEFT
//! writes it (or, in full fine-tuning, the model in f32), what the optimiser keeps, and
//! `trainer_state.json`, which has the hashes of the files with tensors. The folder appears under its name only when it is
//! complete.

use super::evaluate::Evaluation;
use super::loss_scale::LossScale;
use super::metrics::{Phase, Position, number_or_null};
use super::objectives::{MetricSums, Objective};
use super::optimizer::{Home, Optimizer, OptimizerState};
use super::options::{BestBy, TrainOptions};
use super::schedule::LearningRate;
use crate::adapter::{Adapter, LoraConfig, TrainedFiles, read_config};
use crate::data::BatchOptions;
use crate::hash::{Hash, of_file};
use crate::model::Config;
use crate::parallel::{Group, elsewhere};
use crate::{Error, Result, files};
use candle_core::{DType, Tensor};
use indexmap::IndexMap;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

const FOLDER: &str = "checkpoints";
const STATE: &str = "trainer_state.json";
const OPTIMIZER: &str = "optimizer.safetensors";
const VERSION: u32 = 6;
/// The first version whose checkpoints can be resumed. Those of version 5 have no hashes of their files.
const FIRST_VERSION: u32 = 5;
/// What the names of files with tensors end with.
const TENSORS: &str = ".safetensors";

/// Where a run stands. Together with the parameters and what the optimiser keeps it decides every later step.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct State {
    pub version: u32,
    /// Optimiser steps taken, skipped ones included.
    pub step: u64,
    /// What was done of the evaluation and the samples that are due after this step.
    pub phase: Phase,
    /// Steps that changed the parameters.
    pub updates: u64,
    /// The epoch under way and the batches of it that have been used.
    pub epoch: usize,
    pub batch: usize,
    /// Target tokens trained on.
    pub trained_tokens: u64,
    pub skipped: u64,
    pub skipped_in_a_row: u64,
    /// See [`LossScale`]. Versions before took overflows back where this one doubles.
    #[serde(default)]
    pub overflows: i32,
    #[serde(default)]
    pub doublings: i32,
    #[serde(default)]
    pub rescaled_at: u64,
    /// Sums since the last report, so that the next one is the same after a resume.
    #[serde(deserialize_with = "number_or_null")]
    pub loss_sum: f64,
    /// What the loss is a mean over: target tokens, pairs or answers.
    pub loss_count: u64,
    pub report_tokens: u64,
    pub metrics: MetricSums,
    /// The best evaluation so far.
    pub best_loss: Option<f64>,
    /// What it is the best by; lower is better.
    pub best_value: Option<f64>,
    pub best_step: Option<u64>,
    pub evaluations_without_gain: u64,
    pub last_evaluation: Option<Evaluation>,
    /// A hash of the weights that are the reference in full fine-tuning, which are gone once the run has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference_weights: Option<String>,
    /// The hashes of the checkpoint's files with tensors, by their names.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub files: BTreeMap<String, String>,
    /// What must not change between the parts of one run.
    pub fingerprint: Fingerprint,
}

/// What decides the bits of a run. Resuming with another one would continue a different run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Fingerprint {
    pub objective: Objective,
    /// A hash of the reference's adapter, where it has one.
    pub reference: Option<String>,
    pub seed: u64,
    pub batch_size: usize,
    pub grad_accumulation: usize,
    pub max_seq_length: usize,
    pub packing: bool,
    pub shuffle: bool,
    pub data_seed: u64,
    /// Batches of pairs are laid out by it. Not known of runs that began before it was kept.
    #[serde(default)]
    pub share_prompts: Option<bool>,
    /// Before the data, which another template changes.
    pub chat_template: Option<String>,
    /// Examples, their tokens, and a hash of them.
    pub examples: usize,
    pub tokens: u64,
    pub data_hash: String,
    pub validation_hash: Option<String>,
    pub validation_batches: Option<BatchOptions>,
    pub model_hash: String,
    /// Hashes of the files that the base was read from, by their names.
    pub base_files: BTreeMap<String, String>,
    /// What LoRA was told; `None` when every weight is trained.
    pub adapter: Option<LoraConfig>,
    pub trainable_parameters: usize,
    pub total_steps: u64,
    pub learning_rate: LearningRate,
    pub optimizer: Optimizer,
    pub loraplus_lr_ratio: f64,
    pub clip_norm: Option<f64>,
    pub eval_every: u64,
    #[serde(default)]
    pub epoch_ends: bool,
    pub eval_batches: Option<usize>,
    pub patience: Option<u64>,
    pub best_by: BestBy,
    pub keep_best: bool,
}

impl State {
    /// What the loss is multiplied by for the backward pass.
    pub fn loss_scale(&self) -> LossScale {
        let Self { overflows, doublings, rescaled_at, .. } = *self;
        LossScale { overflows, doublings, rescaled_at }
    }

    pub fn set_loss_scale(&mut self, scale: LossScale) {
        let LossScale { overflows, doublings, rescaled_at } = scale;
        (self.overflows, self.doublings, self.rescaled_at) = (overflows, doublings, rescaled_at);
    }

    pub fn new(fingerprint: Fingerprint) -> Self {
        Self {
            version: VERSION,
            step: 0,
            phase: Phase::Sampled,
            updates: 0,
            epoch: 0,
            batch: 0,
            trained_tokens: 0,
            skipped: 0,
            skipped_in_a_row: 0,
            overflows: 0,
            doublings: 0,
            rescaled_at: 0,
            loss_sum: 0.0,
            loss_count: 0,
            report_tokens: 0,
            metrics: MetricSums::default(),
            best_loss: None,
            best_value: None,
            best_step: None,
            evaluations_without_gain: 0,
            last_evaluation: None,
            reference_weights: None,
            files: BTreeMap::new(),
            fingerprint,
        }
    }

    /// How far the run has come.
    pub fn position(&self) -> Position {
        Position { step: self.step, phase: self.phase }
    }
}

impl Fingerprint {
    /// A hash of what the log-probabilities of answers under the reference depend on (XXH3), with that of its weights where it
    /// is known.
    pub fn of_references(&self, dtype: DType, weights: Option<&str>) -> String {
        let mut hash = Hash::new();
        hash.add(weights.unwrap_or_default().as_bytes());
        let validation = self.validation_hash.as_deref().unwrap_or_default();
        let reference = self.reference.as_deref().unwrap_or_default();
        let model = [self.model_hash.as_str(), dtype.as_str(), reference];
        for text in model.into_iter().chain([self.data_hash.as_str(), validation]) {
            hash.add(text.as_bytes());
            hash.add(&[0]);
        }
        for (name, of_file) in &self.base_files {
            hash.add(name.as_bytes());
            hash.add(of_file.as_bytes());
        }
        hash.add(&(self.batch_size as u64).to_le_bytes());
        format!("{:016x}", hash.finish())
    }

    /// Names the first thing that differs. A run that is longer now than it was is the same run, as is one that waits for
    /// another number of evaluations without a gain: it has taken the same steps.
    pub fn check(&self, saved: &Self, path: &Path) -> Result<()> {
        let mut saved = saved.clone();
        if let (Some(before), Some(now)) = (&mut saved.patience, self.patience) {
            *before = now;
        }
        saved.share_prompts = saved.share_prompts.or(self.share_prompts);
        if self.total_steps > saved.total_steps {
            saved.total_steps = self.total_steps;
            saved.learning_rate = saved.learning_rate.with_lengths_of(&self.learning_rate);
        }
        let value = |of: &Self| {
            serde_json::to_value(of).map_err(|error| Error::file(path, error.to_string()))
        };
        let names = [&saved, self].map(|of| of.optimizer.name());
        let found = if names[0] == names[1] {
            difference("", &value(&saved)?, &value(self)?)
        } else {
            Some(("optimizer".into(), names[0].into(), names[1].into()))
        };
        let Some((key, before, now)) = found else { return Ok(()) };
        let advice = match key.as_str() {
            "total_steps" => {
                "a run can be made longer when it is resumed, not shorter; with --steps it has as many as it had"
            }
            "batch_size" => {
                "it counts the rows of all processes together, each of which reads --batch-size of them; resume so that \
                 their product is what it was"
            }
            "loraplus_lr_ratio" => {
                "resume with the same one, or, as full fine-tuning has no B for it, start a new run in another folder"
            }
            _ => "resume with the same options and data, or start a new run in another folder",
        };
        let differs = match key.as_str() {
            "model_hash" => {
                "the base model, its dtype or its quantisation is not what it was".to_string()
            }
            "data_hash" => "the training data are not what they were".into(),
            "validation_hash" => "the validation data are not what they were".into(),
            "chat_template" => "the chat template is not what it was".into(),
            "reference" => "the adapter of the reference is not what it was".into(),
            _ => format!("{key} was {before} and is now {now}"),
        };
        Err(Error::file(path, format!("cannot be resumed: {differs}; {advice}")))
    }
}

/// The first place where two values differ: its path below `key`, and what stands there in each, in
/// words.
fn difference(key: &str, before: &Value, now: &Value) -> Option<(String, String, String)> {
    const MISSING: Value = Value::Null;
    if before == now {
        return None;
    }
    if let (Value::Object(before), Value::Object(now)) = (before, now) {
        return now.keys().chain(before.keys()).find_map(|name| {
            let path = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
            let of = |map: &Map<String, Value>| map.get(name).cloned().unwrap_or(MISSING);
            difference(&path, &of(before), &of(now))
        });
    }
    Some((key.to_string(), in_words(before), in_words(now)))
}

/// A value of a fingerprint as a message shows it, at a readable length.
fn in_words(value: &Value) -> String {
    const MOST: usize = 60;
    let text = match value {
        Value::Null => "none".to_string(),
        Value::String(text) => text.clone(),
        Value::Array(list) => {
            format!("[{}]", list.iter().map(in_words).collect::<Vec<_>>().join(", "))
        }
        Value::Object(map) => {
            let pairs: Vec<String> =
                map.iter().map(|(key, value)| format!("{key}: {}", in_words(value))).collect();
            format!("{{{}}}", pairs.join(", "))
        }
        other => other.to_string(),
    };
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// That all ranks of a group have the same state, options and parameters, of which the last are a hash.
///
/// # Errors
/// [`Error::Rank`] naming the first that has others than rank 0, and what differs.
pub(super) fn agree(
    group: Group<'_>,
    state: &State,
    options: &TrainOptions,
    parameters: u64,
) -> Result<()> {
    const WHAT: &str = "the options and the data";
    let State { step, phase, epoch, batch, best_step, fingerprint, .. } = state;
    let told = serde_json::json!({
        "options": fingerprint,
        "step": step,
        "phase": phase,
        "epoch": epoch,
        "batch": batch,
        "best_step": best_step,
        "parameters": format!("{parameters:016x}"),
        "other options": format!("{options:?}"),
    });
    let mut first: Option<Value> = None;
    for (rank, text) in group.gather(WHAT, told.to_string().as_bytes())?.iter().enumerate() {
        let found = serde_json::from_slice(text).map_err(|_| elsewhere(rank, WHAT))?;
        let first = first.get_or_insert_with(|| Value::clone(&found));
        if let Some((key, expected, found)) = difference("", first, &found) {
            let key = key.trim_start_matches("options.");
            return Err(Error::Rank {
                rank,
                message: format!(
                    "{key} is {found}, and {expected} at rank 0; give all processes the same settings, files and folders"
                ),
            });
        }
    }
    Ok(())
}

/// The folder of the checkpoint of a step.
pub(super) fn folder(output: &Path, step: u64) -> PathBuf {
    at(&parent(output), step)
}

/// The folder of the checkpoint of a step in the folder of all checkpoints.
pub(super) fn at(parent: &Path, step: u64) -> PathBuf {
    parent.join(format!("step-{step:08}"))
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

/// The ranks that EVA has found for a run, by path: those of a checkpoint, or of the newest one of a run's folder that can
/// be read. `None` where none has any.
///
/// # Errors
/// When the folder cannot be read.
pub fn layer_ranks(folder: impl AsRef<Path>) -> Result<Option<IndexMap<String, usize>>> {
    Ok(in_newest(folder.as_ref(), "/fingerprint/adapter/layer_ranks")?.flatten())
}

/// The rows of a batch of a run, those of all processes together, from a checkpoint or from the newest one of a run's
/// folder that can be read. `None` where there is none.
///
/// # Errors
/// When the folder cannot be read.
pub fn batch_rows(folder: impl AsRef<Path>) -> Result<Option<usize>> {
    in_newest(folder.as_ref(), "/fingerprint/batch_size")
}

/// The optimiser steps of a whole run, from a checkpoint or from the newest one of a run's folder that can be read. `None`
/// where there is none.
///
/// # Errors
/// When the folder cannot be read.
pub fn run_steps(folder: impl AsRef<Path>) -> Result<Option<u64>> {
    in_newest(folder.as_ref(), "/fingerprint/total_steps")
}

/// What stands at a place of the state of a checkpoint, or of the newest one of a run's folder that has it.
fn in_newest<T: DeserializeOwned>(folder: &Path, pointer: &str) -> Result<Option<T>> {
    let checkpoints = match folder.join(STATE).is_file() {
        true => vec![folder.to_path_buf()],
        false => list(folder)?.into_iter().rev().map(|(_, path)| path).collect(),
    };
    let read = |checkpoint: PathBuf| {
        // What is wrong with a checkpoint is said when it is resumed.
        let state: Value = files::read_json(checkpoint.join(STATE)).ok()?;
        serde_json::from_value(state.pointer(pointer)?.clone()).ok()
    };
    Ok(checkpoints.into_iter().find_map(read))
}

/// A checkpoint but for its tensors. Any thread can write it.
#[derive(Debug)]
pub(super) struct Contents {
    pub output: PathBuf,
    pub state: State,
    pub files: TrainedFiles,
    /// The names of the optimiser's tensors.
    pub optimizer: Vec<String>,
    /// How many checkpoints stay, not counting that of step `best`.
    pub keep: usize,
    pub best: Option<u64>,
    /// The files of the run's logs.
    pub logs: Vec<(PathBuf, File)>,
}

impl Contents {
    /// Writes the checkpoint, removes those that don't stay, and returns its folder. `tensors` are the
    /// values of the parameters and the optimiser's tensors.
    pub fn write(&self, tensors: &[Tensor], saving: &mut dyn FnMut(&Path)) -> Result<PathBuf> {
        let Some((values, optimizer)) = tensors.split_first() else {
            return Err(Error::option("checkpoint", "has no tensors"));
        };
        let folder = folder(&self.output, self.state.step);
        let parent = parent(&self.output);
        std::fs::create_dir_all(&parent).map_err(Error::io(&parent))?;
        let mut place = PathBuf::new();
        files::write_folder_atomic(&folder, |staging| {
            place = staging.to_path_buf();
            saving(staging);
            self.files.write(staging, values)?;
            saving(staging);
            let named: Vec<(String, Tensor)> =
                self.optimizer.iter().cloned().zip(optimizer.iter().cloned()).collect();
            files::write_safetensors(staging.join(OPTIMIZER), &named, None)?;
            saving(staging);
            let state = State { files: hashes(staging)?, ..self.state.clone() };
            let path = staging.join(STATE);
            let bytes = serde_json::to_vec_pretty(&state)
                .map_err(|error| Error::file(&path, error.to_string()))?;
            files::write_bytes_atomic(&path, bytes)?;
            saving(staging);
            // After a power cut the logs must not end before the checkpoint.
            self.logs.iter().try_for_each(|(path, log)| log.sync_data().map_err(Error::io(path)))
        })
        .map_err(|error| under_its_name(error, &place, &folder))?;
        prune(&self.output, self.keep, self.best)?;
        Ok(folder)
    }
}

/// An error about a file in the staging folder, with the place that the file was to have.
fn under_its_name(error: Error, staging: &Path, folder: &Path) -> Error {
    match error {
        Error::Io { path, source } => match path.strip_prefix(staging) {
            Ok(name) if !staging.as_os_str().is_empty() => {
                Error::Io { path: folder.join(name), source }
            }
            _ => Error::Io { path, source },
        },
        error => error,
    }
}

/// The hashes of the files with tensors in a folder.
fn hashes(folder: &Path) -> Result<BTreeMap<String, String>> {
    let mut found = BTreeMap::new();
    for entry in std::fs::read_dir(folder).map_err(Error::io(folder))? {
        let entry = entry.map_err(Error::io(folder))?;
        if let Some(name) = entry.file_name().to_str().filter(|name| name.ends_with(TENSORS)) {
            found.insert(name.to_string(), hash(&entry.path())?);
        }
    }
    Ok(found)
}

/// The hash of a file's content.
fn hash(path: &Path) -> Result<String> {
    let (_, metadata) = files::open_regular(path)?;
    of_file(path, metadata.len())
}

/// That the files of a checkpoint are what was written.
fn check_files<'a>(
    folder: &Path,
    files: impl IntoIterator<Item = (&'a String, &'a String)>,
) -> Result<()> {
    for (name, expected) in files {
        let path = folder.join(name);
        let found = hash(&path)?;
        if found != *expected {
            return Err(Error::file(
                path,
                format!(
                    "is not what was written here: its hash is {found}, expected {expected}; bring it back, or go on from an \
                     earlier checkpoint"
                ),
            ));
        }
    }
    Ok(())
}

/// Copies a checkpoint, unless it is at `to` already, and whole.
pub(super) fn copy(from: &Path, to: &Path) -> Result<()> {
    if to.canonicalize().is_ok_and(|to| from.canonicalize().is_ok_and(|from| from == to)) {
        return Ok(());
    }
    let state = |folder: &Path| std::fs::read(folder.join(STATE)).ok();
    if state(to).is_some_and(|there| state(from) == Some(there)) && check_own_files(to).is_ok() {
        return Ok(());
    }
    let parent = to.parent().unwrap_or(to);
    std::fs::create_dir_all(parent).map_err(Error::io(parent))?;
    files::write_folder_atomic(to, |staging| {
        for entry in std::fs::read_dir(from).map_err(Error::io(from))? {
            let entry = entry.map_err(Error::io(from))?;
            let path = entry.path();
            if path.is_file() {
                std::fs::copy(&path, staging.join(entry.file_name())).map_err(Error::io(&path))?;
            }
        }
        Ok(())
    })
}

/// The hashes that a checkpoint has of its files, none in an earlier version.
fn hashes_of(folder: &Path) -> Result<BTreeMap<String, String>> {
    let state: Value = files::read_json(folder.join(STATE))?;
    match state.get("files") {
        Some(files) => serde_json::from_value(files.clone())
            .map_err(|error| Error::file(folder.join(STATE), format!("files: {error}"))),
        None => Ok(BTreeMap::new()),
    }
}

fn check_own_files(folder: &Path) -> Result<()> {
    check_files(folder, &hashes_of(folder)?)
}

/// Reads the parameters of a checkpoint into the adapter.
pub(super) fn read_parameters(folder: &Path, adapter: &Adapter) -> Result<()> {
    let files = hashes_of(folder)?;
    check_files(folder, files.iter().filter(|(name, _)| *name != OPTIMIZER))?;
    adapter.load_parameters(folder)
}

/// A checkpoint as it was read; the parameters are in the adapter.
#[derive(Debug)]
pub(super) struct Loaded {
    pub state: State,
    pub optimizer: OptimizerState,
    /// How long the run was to be when the checkpoint was written, if it is longer now.
    pub extended_from: Option<u64>,
}

/// Why a checkpoint cannot be resumed.
#[derive(Debug)]
pub(super) enum Refused {
    /// A file of it is missing or not what was written; one before it may be whole.
    Damaged(Error),
    /// It is of another run or of another version of this program, or cannot be read now.
    Other(Error),
}

impl Refused {
    /// What an error in reading a checkpoint's file says about it.
    pub fn from_reading(error: Error) -> Self {
        use std::io::ErrorKind::{
            InvalidData, IsADirectory, NotADirectory, NotFound, UnexpectedEof,
        };
        let damaged = match &error {
            Error::File { .. } => true,
            Error::Io { source, .. } => matches!(
                source.kind(),
                NotFound | UnexpectedEof | InvalidData | IsADirectory | NotADirectory
            ),
            _ => false,
        };
        if damaged { Self::Damaged(error) } else { Self::Other(error) }
    }
}

impl From<Refused> for Error {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Damaged(error) | Refused::Other(error) => error,
        }
    }
}

/// Reads the rest of a checkpoint whose state is this, into the adapter.
pub(super) fn load(
    folder: &Path,
    mut state: State,
    fingerprint: &Fingerprint,
    adapter: &Adapter,
    home: Home,
) -> Result<Loaded, Refused> {
    check_files(folder, &std::mem::take(&mut state.files)).map_err(Refused::from_reading)?;
    // What the parameters are of isn't needed here, but by whoever uses the checkpoint otherwise.
    match adapter.config() {
        Some(_) => read_config(folder).map(|_| ()),
        None => Config::load(folder).map(|_| ()),
    }
    .map_err(Refused::from_reading)?;
    adapter.load_parameters(folder).map_err(Refused::from_reading)?;
    let path = folder.join(OPTIMIZER);
    let optimizer = OptimizerState::load(fingerprint.optimizer, adapter.parameters(), home, &path)
        .map_err(Refused::from_reading)?;
    let before = std::mem::replace(&mut state.fingerprint, fingerprint.clone()).total_steps;
    let extended_from = (before < fingerprint.total_steps).then_some(before);
    Ok(Loaded { state, optimizer, extended_from })
}

/// Reads where a checkpoint's run stood, which has to be the run with this fingerprint.
pub(super) fn read_state(folder: &Path, fingerprint: &Fingerprint) -> Result<State, Refused> {
    let path = &folder.join(STATE);
    let damaged = |message: String| Refused::Damaged(Error::file(path, message));
    // Another version may have other keys, so it comes first.
    let value: Value = files::read_json(path).map_err(Refused::from_reading)?;
    let Some(version) = value.get("version") else {
        return Err(damaged("has no version, so it is not the state of a run".into()));
    };
    let known = u64::from(FIRST_VERSION)..=u64::from(VERSION);
    if !version.as_u64().is_some_and(|version| known.contains(&version)) {
        return Err(Refused::Other(Error::file(
            path,
            format!(
                "version is {}, expected {FIRST_VERSION} to {VERSION}; it was written by another version of this \
                 program, which can continue the run",
                in_words(version)
            ),
        )));
    }
    let mut state: State = serde_json::from_value(value).map_err(|error| {
        let message = files::plain(&error.to_string());
        damaged(format!("is not the state of a run: {message}"))
    })?;
    state.version = VERSION;
    fingerprint.check(&state.fingerprint, path).map_err(Refused::Other)?;
    let State { step, updates, epoch, batch, .. } = state;
    let most = fingerprint.total_steps.saturating_mul(fingerprint.grad_accumulation as u64);
    if updates > step
        || step > state.fingerprint.total_steps
        || epoch as u64 > most
        || batch as u64 > most
    {
        return Err(damaged(format!(
            "step {step}, updates {updates}, epoch {epoch} and batch {batch} cannot be of a run of {} steps",
            state.fingerprint.total_steps
        )));
    }
    Ok(state)
}

/// Removes the checkpoints of later steps, which a run that continues from `step` makes again. The newest goes first, so
/// the newest of those that are left is always one that the logs reach up to.
pub(super) fn remove_after(output: &Path, step: u64) -> Result<()> {
    for (found, path) in list(output)?.into_iter().rev() {
        if found > step {
            files::remove_folder_atomic(&path)?;
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
            files::remove_folder_atomic(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_first_difference_is_told_in_words() {
        let before =
            json!({"seed": 1, "adapter": {"rank": 8, "targets": ["q_proj"], "exclude": null}});
        let with = |key: &str, value: Value| {
            let mut now = before.clone();
            *now.pointer_mut(key).unwrap() = value;
            difference("", &before, &now).map(|(key, was, is)| format!("{key} was {was}, is {is}"))
        };
        assert_eq!(with("/seed", json!(1)), None);
        assert_eq!(with("/seed", json!(2)).unwrap(), "seed was 1, is 2");
        assert_eq!(with("/adapter/rank", json!(4)).unwrap(), "adapter.rank was 8, is 4");
        assert_eq!(
            with("/adapter/exclude", json!(["v_proj", "o_proj"])).unwrap(),
            "adapter.exclude was none, is [v_proj, o_proj]"
        );
        assert_eq!(with("/adapter", Value::Null).unwrap().split(" was ").next(), Some("adapter"));
        let long = with("/adapter/targets", json!(vec!["down_proj"; 1000])).unwrap();
        assert!(long.chars().count() < 160 && long.ends_with('…'), "{long}");
    }
}
