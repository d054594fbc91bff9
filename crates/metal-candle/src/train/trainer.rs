//! The loop: batches, loss, gradients, one optimiser step; evaluation, samples and checkpoints
//! between steps.

use super::base;
use super::checkpoint::{self, Contents, Fingerprint, Loaded, Refused, State};
use super::evaluate::Evaluation;
use super::gradients::Gradients;
use super::lock::FolderLock;
use super::metrics::{Metric, MetricsSink, Phase, Position};
use super::objectives::MetricSums;
use super::optimizer::{Home, OptimizerState, Rates, is_moved_with_b};
use super::options::{ActivationPlacement, TrainOptions};
use super::references::{self, References};
use super::saving::{Held, Saved, Saver, SavingFn, untold};
use super::summing::{Summing, Tables};
use super::task::{Part, Task};
use crate::adapter::{Adapter, Kept, TrainedFiles};
use crate::autograd::{Parameter, Tape};
use crate::data::{Batch, BatchPlan, Batcher, SampleKind};
use crate::memory::peak_bytes;
use crate::model::Model;
use crate::parallel::Group;
use crate::random::SplitMix64;
use crate::text::ChatTemplate;
use crate::turns::Turns;
use crate::{Error, Result, files};
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::offload::Offload;
use metal_candle_kernels::{devices, host};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// All steps were taken.
    Finished,
    /// All steps were taken, but the last ones changed nothing, as their loss or gradient was NaN or
    /// infinite. What is in the output folder are the parameters before them.
    LastStepsSkipped,
    /// The validation loss stopped falling.
    StoppedEarly,
    /// The caller asked for it; a checkpoint was written first.
    Interrupted,
}

/// What a run came to.
#[derive(Debug, Clone, PartialEq)]
pub struct Summary {
    /// Why it ended.
    pub outcome: Outcome,
    /// Optimiser steps taken.
    pub step: u64,
    /// How many of them, up to the last one, were skipped in a row.
    pub skipped_in_a_row: u64,
    /// Target tokens trained on.
    pub trained_tokens: u64,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// The best evaluation's loss and step.
    pub best: Option<(f64, u64)>,
    /// How long this process trained, in seconds.
    pub seconds: f64,
}

/// Where a run goes on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Resumed {
    /// The checkpoint.
    pub checkpoint: PathBuf,
    /// Optimiser steps taken.
    pub step: u64,
    /// How many steps the run was to have when the checkpoint was written, if it has more now.
    pub extended_from: Option<u64>,
}

/// Writes texts with the model and its adapter as it is, to be shown while it trains: pairs of prompt and text.
pub type SampleFn<'a> =
    Box<dyn FnMut(&Arc<Model>, &Arc<Adapter>, u64) -> Result<Vec<(String, String)>> + Send + 'a>;

/// One training run of an adapter. It owns the gradients and what the optimiser keeps.
pub struct Trainer<'a> {
    model: Arc<Model>,
    adapter: Arc<Adapter>,
    /// The reference's adapter, where it isn't the frozen model.
    reference: Option<Arc<Adapter>>,
    /// What was computed of the reference: of the training data, and of the validation data.
    known: Vec<References>,
    gradients: Gradients,
    /// Where activations wait, if that isn't the device.
    offload: Option<Arc<Offload>>,
    batches: &'a Batcher,
    validation: Option<&'a Batcher>,
    options: TrainOptions,
    output: PathBuf,
    base_model: String,
    companions: Option<PathBuf>,
    chat_template: Option<String>,
    sample: Option<SampleFn<'a>>,
    stop: Arc<AtomicBool>,
    saving: SavingFn,
    /// While it runs.
    saver: Option<Saver>,
    lock: Option<&'a FolderLock>,
    turns: Option<Arc<Turns>>,
    group: Group<'a>,
    /// Where the run goes on, if it does.
    origin: Option<Origin>,
    /// Whether [`Self::prepare`] has succeeded.
    prepared: bool,
    state: State,
    /// From the first step, or what a checkpoint is read into.
    optimizer: Option<OptimizerState>,
    plans: Option<(usize, Vec<BatchPlan>)>,
}

/// The checkpoint that a run goes on from.
struct Origin {
    checkpoint: PathBuf,
    /// The folder it lies in, with the others of its run.
    parent: PathBuf,
    /// The checkpoint of the best step, where that is another one and is kept.
    best: Option<PathBuf>,
}

impl<'a> Trainer<'a> {
    /// A run that trains the model's adapter on `batches` and writes into the folder `output`. `base_model` is
    /// what a saved adapter names as the model it belongs to.
    pub fn new(
        model: &Arc<Model>,
        adapter: &Arc<Adapter>,
        batches: &'a Batcher,
        options: TrainOptions,
        output: impl Into<PathBuf>,
        base_model: impl Into<String>,
    ) -> Result<Self> {
        options.validate()?;
        options.objective.check(batches.dataset())?;
        adapter.check(model)?;
        let parameters = adapter.parameters();
        let no_b = match adapter.is_full() {
            true => Some("full fine-tuning has no B"),
            false => (!parameters.entries().iter().any(is_moved_with_b))
                .then_some("there is no B of a linear layer, no bias and no magnitude"),
        };
        if let Some(no_b) = no_b.filter(|_| options.loraplus_lr_ratio != 1.0) {
            let ratio = options.loraplus_lr_ratio;
            return Err(Error::option("loraplus_lr_ratio", format!("is {ratio}, but {no_b}")));
        }
        let data = batches.options();
        let dataset = batches.dataset();
        let fingerprint = Fingerprint {
            objective: options.objective,
            reference: None,
            seed: options.seed,
            batch_size: data.batch_size,
            grad_accumulation: options.grad_accumulation,
            max_seq_length: data.max_seq_length,
            packing: data.packing,
            shuffle: data.shuffle,
            data_seed: data.seed,
            share_prompts: (options.objective.samples() == SampleKind::Pair)
                .then_some(data.share_prompts),
            examples: dataset.len(),
            tokens: dataset.report.tokens as u64,
            data_hash: format!("{:016x}", dataset.fingerprint()),
            validation_hash: None,
            validation_batches: None,
            chat_template: None,
            model_hash: format!("{:016x}", model.fingerprint()?),
            base_files: BTreeMap::new(),
            adapter: adapter.config().cloned(),
            trainable_parameters: parameters.len(),
            total_steps: options.steps,
            learning_rate: options.learning_rate.clone(),
            optimizer: options.optimizer,
            loraplus_lr_ratio: options.loraplus_lr_ratio,
            clip_norm: options.clip_norm,
            eval_every: options.eval_every,
            epoch_ends: options.epoch_ends,
            eval_batches: options.eval_batches,
            patience: options.patience,
            best_by: options.best_by,
            keep_best: options.keep_best,
        };
        batches.dataset().check_vocabulary(model.config().vocab_size)?;
        Ok(Self {
            model: model.clone(),
            adapter: adapter.clone(),
            reference: None,
            known: Vec::new(),
            gradients: Gradients::new(parameters)?,
            offload: match options.activation_placement {
                ActivationPlacement::Device => None,
                ActivationPlacement::Host => Some(Offload::new(model.device())?),
            },
            batches,
            validation: None,
            options,
            output: output.into(),
            base_model: base_model.into(),
            companions: None,
            chat_template: None,
            sample: None,
            stop: Arc::default(),
            saving: untold(),
            saver: None,
            lock: None,
            turns: None,
            group: Group::default(),
            origin: None,
            prepared: false,
            state: State::new(fingerprint),
            optimizer: None,
            plans: None,
        })
    }

    /// Evaluates on this data, every [`TrainOptions::eval_every`] steps and at the end.
    #[must_use]
    pub fn with_validation(mut self, validation: &'a Batcher) -> Self {
        let fingerprint = &mut self.state.fingerprint;
        fingerprint.validation_hash = Some(format!("{:016x}", validation.dataset().fingerprint()));
        fingerprint.validation_batches = Some(*validation.options());
        self.validation = Some(validation);
        self
    }

    /// Compares with the model and this adapter, which stays as it is, instead of the model alone: for a run that goes on
    /// from an adapter.
    ///
    /// # Errors
    /// When it is another model's, or is the one that is trained.
    pub fn with_reference(mut self, reference: Arc<Adapter>) -> Result<Self> {
        reference.check(&self.model)?;
        if Arc::ptr_eq(&reference, &self.adapter) {
            return Err(Error::option("reference", "is the adapter that is trained"));
        }
        let hash = reference.parameters().fingerprint()?;
        self.state.fingerprint.reference = Some(format!("{hash:016x}"));
        self.reference = Some(reference);
        Ok(self)
    }

    /// Shows texts of the model every [`TrainOptions::sample_every`] steps. The function gets the
    /// model and a seed that depends on the step alone. Where turns are taken, it takes its own. Once the run is to stop
    /// it may give up: what it gives then is left out, and made by the run that continues this one.
    #[must_use]
    pub fn with_samples(mut self, sample: SampleFn<'a>) -> Self {
        self.sample = Some(sample);
        self
    }

    /// In full fine-tuning, copies the tokenizer's files from this folder beside saved weights.
    #[must_use]
    pub fn with_companions(mut self, folder: impl Into<PathBuf>) -> Self {
        self.companions = Some(folder.into());
        self
    }

    /// Says which chat template has made the data, so that another one is noticed when the run is
    /// resumed.
    #[must_use]
    pub fn with_chat_template(mut self, template: &ChatTemplate) -> Self {
        self.state.fingerprint.chat_template = Some(format!("{:016x}", template.fingerprint()));
        self
    }

    /// Writes this chat template beside what is saved, where it isn't the base's own.
    #[must_use]
    pub fn with_saved_chat_template(mut self, source: impl Into<String>) -> Self {
        self.chat_template = Some(source.into());
        self
    }

    /// Trains in a folder that the caller has locked. Without it, [`Self::run`] locks the output folder
    /// itself.
    #[must_use]
    pub fn with_lock(mut self, lock: &'a FolderLock) -> Self {
        self.lock = Some(lock);
        self
    }

    /// Shares the device: what the run does there it does in turns, with a pass of a batch as the longest.
    #[must_use]
    pub fn with_turns(mut self, turns: Arc<Turns>) -> Self {
        self.turns = Some(turns);
        self
    }

    /// Trains together with other ranks, each of which has a trainer of the same model, data and options. Batches are
    /// those of all ranks together, of which each takes its rows. The first rank alone writes files, logs metrics and
    /// shows samples; the others read checkpoints from the same folder.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model on a device for which this group has no sums.
    pub fn with_group(mut self, group: Group<'a>) -> Result<Self> {
        let device = self.model.device();
        if !group.takes(device) {
            return Err(Error::Unsupported(format!(
                "a model on {:?} with {} processes that add up on other devices",
                device.location(),
                group.size()
            )));
        }
        self.group = group;
        Ok(self)
    }

    /// Ends the run after the step under way, with a checkpoint, once this is true for one rank. An evaluation under
    /// way is given up, and made by the run that continues this one.
    #[must_use]
    pub fn with_stop(mut self, stop: Arc<AtomicBool>) -> Self {
        self.stop = stop;
        self
    }

    /// Is told of the staging folder of a checkpoint before and after each of its files, by the thread that
    /// writes them.
    #[must_use]
    pub fn with_saving(mut self, saving: impl FnMut(&Path) + Send + 'static) -> Self {
        self.saving = Box::new(saving);
        self
    }

    /// Optimiser steps taken so far.
    pub fn step(&self) -> u64 {
        self.state.step
    }

    /// How far the run has come: where logs of it are to be continued from.
    pub fn position(&self) -> Position {
        self.state.position()
    }

    /// Continues from a checkpoint: every later step is the same, bit for bit, as if the run had
    /// never stopped. Call it after the other `with_` functions.
    ///
    /// A run may have become longer. Every later step then has the learning rate that it has in a run
    /// which was that long from the beginning, as with transformers.
    ///
    /// # Errors
    /// For a checkpoint that is not whole, and for one of a run with other options or data.
    pub fn resume(&mut self, checkpoint: impl AsRef<Path>) -> Result<Resumed> {
        self.know_base()?;
        Ok(self.load(checkpoint.as_ref())?)
    }

    /// [`Self::resume`] from the newest checkpoint of the run in this folder that is whole; `None` when
    /// it has no checkpoint at all. One that is damaged is told of in a warning, and removed by
    /// [`Self::run`].
    ///
    /// # Errors
    /// When all checkpoints are damaged, and for one of a run with other options or data.
    pub fn resume_newest(&mut self, run: impl AsRef<Path>) -> Result<Option<Resumed>> {
        self.know_base()?;
        let mut damaged = Vec::new();
        for (_, checkpoint) in checkpoint::list(run.as_ref())?.into_iter().rev() {
            match self.load(&checkpoint) {
                Ok(resumed) => {
                    for error in damaged {
                        tracing::warn!(
                            "a checkpoint is damaged ({error}); going on from the one before, {}",
                            checkpoint.display()
                        );
                    }
                    return Ok(Some(resumed));
                }
                Err(Refused::Damaged(error)) => damaged.push(error),
                Err(Refused::Other(error)) => return Err(error),
            }
        }
        match damaged.into_iter().next() {
            Some(error) => Err(Error::file(
                run,
                format!("has no checkpoint that is whole ({error}); start a new run"),
            )),
            None => Ok(None),
        }
    }

    fn load(&mut self, checkpoint: &Path) -> Result<Resumed, Refused> {
        let mut state = checkpoint::read_state(checkpoint, &self.state.fingerprint)?;
        let parent = match checkpoint.canonicalize() {
            Ok(path) => path.parent().unwrap_or(checkpoint).to_path_buf(),
            Err(error) => return Err(Refused::Other(Error::io(checkpoint)(error))),
        };
        if self.adapter.is_full() {
            // The weights of the base are the reference, and give way to those of the checkpoint.
            self.know_references_of_base(&parent, &state).map_err(Refused::Other)?;
        }
        let best = self.find_best(&parent, &mut state)?;
        let fingerprint = &self.state.fingerprint;
        let Loaded { state, optimizer, extended_from } =
            checkpoint::load(checkpoint, state, fingerprint, &self.adapter, self.home())?;
        (self.state, self.optimizer) = (state, Some(optimizer));
        self.plans = None;
        self.prepared = false;
        self.origin = Some(Origin { checkpoint: checkpoint.to_path_buf(), parent, best });
        Ok(Resumed { checkpoint: checkpoint.to_path_buf(), step: self.state.step, extended_from })
    }

    /// The checkpoint of the best step of a run that goes on from one in the folder `parent`, where it is another one and is
    /// to be kept. If it can't be read, a warning says so, and the best is counted from here.
    fn find_best(&self, parent: &Path, state: &mut State) -> Result<Option<PathBuf>, Refused> {
        let best = state.best_step.filter(|best| self.options.keep_best && *best != state.step);
        let Some(best) = best else { return Ok(None) };
        let mut lost = None;
        for folder in [checkpoint::at(parent, best), checkpoint::folder(&self.output, best)] {
            match checkpoint::read_parameters(&folder, &self.adapter) {
                Ok(()) => return Ok(Some(folder)),
                Err(error) => match Refused::from_reading(error) {
                    Refused::Damaged(error) => lost = lost.or(Some(error)),
                    other => return Err(other),
                },
            }
        }
        if let Some(error) = lost {
            tracing::warn!(
                "the checkpoint of the best step, {best}, can't be read ({error}); the best is looked for from step {0} on. \
                 To keep it, stop this run, put that checkpoint back and resume from that of step {0}",
                state.step
            );
        }
        (state.best_loss, state.best_value, state.best_step) = (None, None, None);
        Ok(None)
    }

    /// Takes the contents of the files of a frozen base into the fingerprint.
    fn know_base(&mut self) -> Result<()> {
        let known = &mut self.state.fingerprint.base_files;
        if known.is_empty() && !self.adapter.is_full() {
            *known = base::hashes(self.model.files(), &self.output)?;
        }
        Ok(())
    }

    /// Trains to the end and writes the parameters into the output folder.
    ///
    /// # Errors
    /// When another run is at work in the output folder, or was and isn't resumed; when files cannot be
    /// written; [`Error::Diverged`] when too many steps in a row, or all of them, had to be skipped.
    pub fn run(&mut self, metrics: &mut dyn MetricsSink) -> Result<Summary> {
        let started = Instant::now();
        let is_root = self.group.is_root();
        let mut unheard = |_: &Metric| Ok(());
        let metrics: &mut dyn MetricsSink = if is_root { metrics } else { &mut unheard };
        let _own = match self.lock {
            _ if !is_root => None,
            Some(lock) if lock.folder() == self.output => None,
            _ => Some(FolderLock::acquire(&self.output)?),
        };
        let outcome = self.train(metrics);
        self.rest();
        if let (Err(_), Some(saver)) = (&outcome, &mut self.saver) {
            // The others wait for a checkpoint under way only as long as they are told of it.
            saver.finish(self.group);
        }
        let outcome = outcome?;
        let seconds = started.elapsed().as_secs_f64();
        let reason = match outcome {
            Outcome::Finished => "all steps were taken".into(),
            Outcome::LastStepsSkipped => format!(
                "all steps were taken, and the last {} of them skipped",
                self.state.skipped_in_a_row
            ),
            Outcome::StoppedEarly => "the validation loss stopped falling".into(),
            Outcome::Interrupted => "interrupted".into(),
        };
        metrics.log(&Metric::Finished { step: self.state.step, reason, seconds })?;
        Ok(Summary {
            outcome,
            step: self.state.step,
            skipped_in_a_row: self.state.skipped_in_a_row,
            trained_tokens: self.state.trained_tokens,
            evaluation: self.state.last_evaluation.clone(),
            best: self.state.best_loss.zip(self.state.best_step),
            seconds,
        })
    }

    /// All of a run that uses the device.
    fn train(&mut self, metrics: &mut dyn MetricsSink) -> Result<Outcome> {
        let is_root = self.group.is_root();
        self.prepare()?;
        self.take_over()?;
        let (optimizer, parameters) = (&self.options.optimizer, self.adapter.parameters());
        if self.optimizer.is_none() {
            let new = || OptimizerState::new(*optimizer, parameters, self.home());
            self.optimizer = Some(self.in_turn(new)?);
        }
        if is_root {
            let mut like = OptimizerState::outline(optimizer, parameters);
            like.insert(0, (vec![parameters.len()], parameters.values().dtype()));
            let saving = std::mem::replace(&mut self.saving, untold());
            let in_parts = self.optimizer()?.is_shared();
            self.saver = Some(Saver::new(like, self.model.device(), in_parts, saving));
        }
        let outcome = match self.prepared {
            true => self.steps(metrics)?,
            false => {
                self.save(metrics)?;
                Outcome::Interrupted
            }
        };
        self.await_saved(metrics)?;
        self.saver = None;
        self.group.wait("the end of the run")?;
        if outcome != Outcome::Interrupted {
            self.finish()?;
        }
        Ok(outcome)
    }

    /// That nothing more is wanted of the device.
    fn rest(&self) {
        if let Some(turns) = &self.turns {
            turns.training_rests();
        }
    }

    /// Checks what has to hold before the first step, and finds out what has to be known for it. Nothing that an earlier
    /// part of the run left is removed before this has succeeded. Call it after the `with_` functions and
    /// [`Self::resume`]; [`Self::run`] does it otherwise. If the run is to stop meanwhile, what is known of the reference is
    /// kept, and [`Self::run`] ends with a checkpoint and without a step.
    ///
    /// # Errors
    /// Those of [`Self::run`] that are known before the first step.
    pub fn prepare(&mut self) -> Result<()> {
        if self.prepared {
            return Ok(());
        }
        let known = self.check().and_then(|()| self.know_base()).and_then(|()| self.agree());
        let known = known.and_then(|()| self.know_references());
        match known {
            Ok(are_complete) => self.prepared = are_complete,
            Err(_) => self.rest(),
        }
        known.map(drop)
    }

    /// Makes the output folder that of a run which goes on from where this one does: removes checkpoints of later steps, and
    /// brings the checkpoint, and that of the best step, from another folder. It can be called again if it was broken off.
    /// Logs are to be taken back to [`Self::position`] only after this. Call it after [`Self::prepare`] and in a locked
    /// folder; [`Self::run`] does it otherwise.
    ///
    /// # Errors
    /// When files cannot be read or written.
    pub fn take_over(&self) -> Result<()> {
        if !self.group.is_root() {
            return Ok(());
        }
        base::keep(self.model.files(), &self.state.fingerprint.base_files, &self.output)?;
        for folder in [checkpoint::parent(&self.output), self.output.clone()] {
            if folder.is_dir() {
                files::remove_stale_partials(&folder)?;
            }
        }
        checkpoint::remove_after(&self.output, self.state.step)?;
        let Some(Origin { checkpoint, best, .. }) = &self.origin else { return Ok(()) };
        let copy = |from: &Path, step: u64| {
            let to = checkpoint::folder(&self.output, step);
            self.group.busy_with(move || checkpoint::copy(from, &to))
        };
        if let (Some(best), Some(step)) = (best, self.state.best_step) {
            copy(best, step)?;
        }
        copy(checkpoint, self.state.step)
    }

    /// That all ranks are at the same place of the same run.
    fn agree(&self) -> Result<()> {
        if self.group.size() == 1 {
            return Ok(());
        }
        let parameters = self.adapter.parameters().fingerprint()?;
        checkpoint::agree(self.group, &self.state, &self.options, parameters)
    }

    /// The fingerprints of all ranks' parameters.
    fn fingerprints(&self) -> Result<Vec<Vec<u8>>> {
        const WHAT: &str = "the parameters before a checkpoint";
        if self.group.size() == 1 {
            return Ok(Vec::new());
        }
        let mine = self.adapter.parameters().fingerprint()?.to_le_bytes();
        self.group.gather(WHAT, &mine)
    }

    /// That the ranks' parameters are still the same, which machines that compute differently would drift from.
    fn check_same(&self, fingerprints: &[Vec<u8>]) -> Result<()> {
        match fingerprints.iter().position(|of_rank| Some(of_rank) != fingerprints.first()) {
            None => Ok(()),
            Some(rank) => Err(Error::Rank {
                rank,
                message: format!(
                    "has other parameters than rank 0 at step {}: its machine computes differently; train on machines of \
                     one kind, or set METAL_CANDLE_SIMD to what all have",
                    self.state.step
                ),
            }),
        }
    }

    /// Whether the run is to stop, which is the same for all ranks.
    fn is_stopped(&self) -> Result<bool> {
        self.group.any("whether to stop", self.stop.load(Ordering::Relaxed))
    }

    /// What has to hold before the first step.
    fn check(&self) -> Result<()> {
        if let Some(validation) = self.validation {
            validation.dataset().check_vocabulary(self.model.config().vocab_size)?;
            self.options.objective.check(validation.dataset())?;
        } else {
            for (name, wanted) in [
                ("patience", self.options.patience.is_some()),
                ("keep_best", self.options.keep_best),
            ] {
                if wanted {
                    return Err(Error::option(name, "needs validation data, and there is none"));
                }
            }
        }
        if self.options.patience.is_some()
            && self.options.eval_every == 0
            && !self.options.epoch_ends
        {
            return Err(Error::option("patience", "needs eval_every, which is 0"));
        }
        if self.options.objective.estimates_kl()
            && self.batches.options().batch_size * self.options.grad_accumulation < 2
        {
            return Err(Error::option(
                "batch_size",
                "is 1 without accumulation, but kto estimates its KL divergence from the other answers of a step: take 2 \
                 or more",
            ));
        }
        if self.options.objective.uses_reference() && self.adapter.is_full() {
            if self.options.objective.estimates_kl() {
                return Err(Error::Unsupported(
                    "kto in full fine-tuning, which keeps no second model as the reference; train an adapter".into(),
                ));
            }
            if !self.options.precompute_ref_log_probs {
                return Err(Error::option(
                    "precompute_ref_log_probs",
                    format!(
                        "has to be set for {} in full fine-tuning, which keeps no second model as the reference",
                        self.options.objective.name()
                    ),
                ));
            }
        }
        self.task().check_shards(self.group)?;
        if self.is_sharded() && self.sample.is_some() {
            return Err(Error::option(
                "sample_every",
                "is set, but one process alone can't write texts with a part of the weights",
            ));
        }
        if self.options.sample_every > 0 && self.sample.is_none() {
            return Err(Error::option(
                "sample_every",
                "needs something to sample, and there is nothing",
            ));
        }
        if self.origin.is_none()
            && let Some((step, path)) = checkpoint::list(&self.output)?.pop()
        {
            return Err(Error::file(
                path,
                format!(
                    "is step {step} of an earlier run; resume it, or give another output folder"
                ),
            ));
        }
        if self.adapter.is_full()
            && let Some(companions) = &self.companions
        {
            // One that is gone would be noticed at the first checkpoint.
            let companions = companions.canonicalize().map_err(Error::io(companions))?;
            if self.output.canonicalize().is_ok_and(|output| output == companions) {
                return Err(Error::file(
                    &self.output,
                    "is the folder of the base model, which would be overwritten; give another output folder",
                ));
            }
        }
        Ok(())
    }

    fn task(&self) -> Task<'_> {
        Task {
            model: &self.model,
            adapter: Some(&self.adapter),
            objective: &self.options.objective,
            reference: self.reference.as_ref(),
            turns: self.turns.as_ref(),
        }
    }

    /// Whether each rank has a part of the weights.
    fn is_sharded(&self) -> bool {
        self.task().shards().is_some()
    }

    /// As [`in_turn`].
    fn in_turn<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        in_turn(self.turns.as_ref(), self.model.device(), work)
    }

    /// Reads or computes the log-probabilities under the reference, if they are to be known beforehand, and keeps them beside
    /// the run's checkpoints. False when the run is to stop before all are known.
    fn know_references(&mut self) -> Result<bool> {
        if !self.options.precompute_ref_log_probs {
            return Ok(true);
        }
        if self.known.is_empty() {
            let folders = self.reference_folders(self.origin.as_ref().map(|it| &*it.parent));
            if self.adapter.is_full() && self.adapter.parameters().partition().is_none() {
                let hash = self.in_turn(|| self.adapter.parameters().fingerprint())?;
                self.state.reference_weights = Some(format!("{hash:016x}"));
            }
            self.known = self.kept_references(&folders, self.state.reference_weights.as_deref())?;
        }
        let mut known = std::mem::take(&mut self.known);
        let computed = self.compute_references(&mut known);
        self.known = known;
        computed?;
        self.keep_references(self.state.reference_weights.as_deref(), &self.known)?;
        Ok(references::are_complete(&self.known))
    }

    /// Keeps what is known of the reference beside the run's checkpoints.
    fn keep_references(&self, weights: Option<&str>, known: &[References]) -> Result<()> {
        let (hash, _) = self.references_wanted(weights);
        match self.group.is_root() {
            true => references::keep(&checkpoint::parent(&self.output), &hash, known),
            false => Ok(()),
        }
    }

    /// Knows in full fine-tuning what the base says, whose weights are still there, for a run that goes on from a checkpoint
    /// in the folder `parent` with this state.
    fn know_references_of_base(&mut self, parent: &Path, state: &State) -> Result<()> {
        if !self.options.precompute_ref_log_probs || !self.known.is_empty() {
            return Ok(());
        }
        if state.updates == 0 {
            // The checkpoint's weights are the base's.
            return Ok(());
        }
        let folders = self.reference_folders(Some(parent));
        let weights = state.reference_weights.as_deref();
        let mut known = self.kept_references(&folders, weights)?;
        if !references::are_complete(&known) {
            // Of weights in parts there is no hash of all.
            let found = match self.adapter.parameters().partition() {
                None => Some(format!("{:016x}", self.adapter.parameters().fingerprint()?)),
                Some(_) => None,
            };
            if found.is_none() || found.as_deref() != weights {
                return Err(Error::file(
                    parent.join(references::FILE),
                    "is missing or damaged, and the base, by which it would be computed again, is not known to be what it was \
                     when the run began; bring the file back, or start a new run",
                ));
            }
        }
        self.compute_references(&mut known)?;
        if !references::are_complete(&known) {
            self.keep_references(weights, &known)?;
            return Err(Error::file(
                parent.join(references::FILE),
                "was missing or damaged, and the run is to stop before all of it is computed again; resume the run as before",
            ));
        }
        self.known = known;
        Ok(())
    }

    /// Where the log-probabilities under the reference may be kept: in the run's own folder of checkpoints, and in that of the
    /// run that it goes on with.
    fn reference_folders(&self, parent: Option<&Path>) -> Vec<PathBuf> {
        let own = checkpoint::parent(&self.output);
        let is_own = |folder: &Path| own.canonicalize().is_ok_and(|own| own == folder);
        let other = parent.filter(|parent| !is_own(parent)).map(Path::to_path_buf);
        std::iter::once(own.clone()).chain(other).collect()
    }

    /// The hash of what the log-probabilities under the reference are computed from, and how many examples each data set has.
    fn references_wanted(&self, weights: Option<&str>) -> (String, Vec<usize>) {
        let data = std::iter::once(self.batches).chain(self.validation);
        let lengths = data.map(|batches| batches.dataset().len()).collect();
        (self.state.fingerprint.of_references(self.model.dtype(), weights), lengths)
    }

    /// The log-probabilities under the reference, all or some of them, as rank 0 reads them: of these folders of checkpoints that
    /// which has the most.
    fn kept_references(
        &self,
        folders: &[PathBuf],
        weights: Option<&str>,
    ) -> Result<Vec<References>> {
        let (hash, lengths) = self.references_wanted(weights);
        let none = || lengths.iter().map(|length| References::none(*length)).collect();
        let mut known: Option<Vec<References>> = None;
        for folder in folders.iter().filter(|_| self.group.is_root()) {
            match references::read(folder, &hash, &lengths) {
                Ok(read) => {
                    known = known.into_iter().chain(read).max_by_key(|all| references::count(all))
                }
                Err(error) => tracing::warn!("{error}; what it holds is computed again"),
            }
        }
        references::of_root(self.group, known.unwrap_or_else(none), &lengths)
    }

    /// Computes what of them isn't known, as long as the run isn't to stop. In full fine-tuning the reference is what is
    /// trained, as long as that is what it was in the beginning.
    fn compute_references(&self, known: &mut [References]) -> Result<()> {
        let task = match self.adapter.is_full() {
            true => Task { reference: Some(&self.adapter), ..self.task() },
            false => self.task(),
        };
        let stop = || self.stop.load(Ordering::Relaxed);
        for (batches, known) in std::iter::once(self.batches).chain(self.validation).zip(known) {
            if !known.compute(&task, batches, self.group, &stop)? {
                break;
            }
        }
        Ok(())
    }

    fn steps(&mut self, metrics: &mut dyn MetricsSink) -> Result<Outcome> {
        let mut timer = Instant::now();
        let (mut timed_tokens, mut timed_processed) = (0, 0);
        // Every step leaves them so, unless it fails.
        self.in_turn(|| self.gradients.clear())?;
        loop {
            self.log_saved(metrics)?;
            let paused = Instant::now();
            let ended = self.after_step(metrics);
            let ended = self.or_save_alone(ended, metrics)?;
            if ended.is_some() || self.is_save_due() {
                self.save(metrics)?;
            }
            if let Some(outcome) = ended {
                return Ok(outcome);
            }
            timer += paused.elapsed();

            let learning_rate = self.options.learning_rate.at(self.state.step);
            let device = self.model.device().clone();
            let before = (self.group.size() > 1).then(|| self.state.clone());
            let step = match self.turns {
                // Each of its turns is a step of the device.
                Some(_) => self.one_step(learning_rate),
                None => devices::step(&device, || self.one_step(learning_rate)),
            };
            if let (Err(_), Some(before)) = (&step, before) {
                // What ranks do together comes before the parameters and the optimiser change.
                self.state = before;
            }
            let step = self.or_save_alone(step, metrics)?;
            timed_tokens += step.tokens;
            timed_processed += step.processed;
            metrics.step(self.state.step)?;
            if let Some(reason) = &step.skipped {
                metrics.log(&Metric::Skipped { step: self.state.step, reason: reason.clone() })?;
                if self.state.skipped_in_a_row >= self.options.skip_limit {
                    return Err(Error::Diverged(format!(
                        "{} steps in a row were skipped, the last at step {}: {reason}; a lower \
                         learning rate, clipping or f32 may help, and the checkpoints so far are in {}",
                        self.state.skipped_in_a_row,
                        self.state.step,
                        self.output.display()
                    )));
                }
            }
            let last = self.state.step == self.options.steps;
            if self.state.step.is_multiple_of(self.options.report_every) || last {
                let seconds = timer.elapsed().as_secs_f64();
                metrics.log(&Metric::Train {
                    step: self.state.step,
                    epoch: self.epoch_progress(),
                    loss: self.state.loss_sum / self.state.loss_count as f64,
                    metrics: self.state.metrics.means(),
                    learning_rate,
                    gradient_norm: step.norm,
                    tokens: self.state.report_tokens,
                    tokens_per_second: timed_tokens as f64 / seconds,
                    processed_tokens_per_second: timed_processed as f64 / seconds,
                    trained_tokens: self.state.trained_tokens,
                    skipped: self.state.skipped,
                    peak_memory: peak_bytes(self.model.device())?,
                })?;
                (self.state.loss_sum, self.state.loss_count) = (0.0, 0);
                self.state.report_tokens = 0;
                self.state.metrics = MetricSums::default();
                (timer, timed_tokens, timed_processed) = (Instant::now(), 0, 0);
            }
        }
    }

    /// What is due between two steps but for the checkpoint; it may have been done in part before the
    /// run was interrupted. Gives the outcome when no other step follows.
    fn after_step(&mut self, metrics: &mut dyn MetricsSink) -> Result<Option<Outcome>> {
        let last = self.state.step >= self.options.steps;
        if last && self.state.updates == 0 {
            return Err(Error::Diverged(format!(
                "all {} steps were skipped, so nothing was learned; a lower learning rate, clipping or f32 \
                 may help",
                self.state.step
            )));
        }
        if self.options.epoch_ends {
            self.plan_epoch();
        }
        if self.state.phase == Phase::Trained {
            let due = last || self.is_due(self.options.eval_every);
            if due && self.validation.is_some() && !self.evaluate(metrics)? {
                return Ok(Some(Outcome::Interrupted));
            }
            self.state.phase = Phase::Evaluated;
        }
        if self.state.phase == Phase::Evaluated {
            if self.is_due(self.options.sample_every) && !self.show_samples(metrics)? {
                return Ok(Some(Outcome::Interrupted));
            }
            self.state.phase = Phase::Sampled;
        }
        Ok(if last && self.state.skipped_in_a_row > 0 {
            Some(Outcome::LastStepsSkipped)
        } else if last {
            Some(Outcome::Finished)
        } else if self.patience_is_over() {
            Some(Outcome::StoppedEarly)
        } else if self.is_stopped()? {
            Some(Outcome::Interrupted)
        } else {
            None
        })
    }

    /// Whether the parameters as they are belong into a checkpoint although the run goes on.
    fn is_save_due(&self) -> bool {
        let is_best = self.options.keep_best && self.state.best_step == Some(self.state.step);
        self.state.step > 0 && (is_best || self.is_due(self.options.save_every))
    }

    fn is_due(&self, every: u64) -> bool {
        (every > 0 && self.state.step.is_multiple_of(every)) || self.ends_epoch()
    }

    /// Whether the last step was an epoch's last, and something is due there. The epoch is to be planned.
    fn ends_epoch(&self) -> bool {
        let batches = self.plans.as_ref().map_or(usize::MAX, |(_, plans)| plans.len());
        self.options.epoch_ends && self.state.batch > 0 && self.state.batch >= batches
    }

    fn patience_is_over(&self) -> bool {
        self.options
            .patience
            .is_some_and(|patience| self.state.evaluations_without_gain >= patience)
    }

    fn epoch_progress(&self) -> f64 {
        let batches = self.plans.as_ref().map_or(1, |(_, plans)| plans.len().max(1));
        self.state.epoch as f64 + self.state.batch as f64 / batches as f64
    }

    /// Lays out the batches of the epoch under way, unless they are.
    fn plan_epoch(&mut self) {
        if self.plans.as_ref().is_none_or(|(epoch, _)| *epoch != self.state.epoch) {
            self.plans = Some((self.state.epoch, self.batches.epoch(self.state.epoch)));
        }
    }

    /// The batches of the next step, all of one epoch.
    fn next_batches(&mut self) -> Result<Vec<BatchPlan>> {
        self.plan_epoch();
        if self.plans.as_ref().is_some_and(|(_, plans)| self.state.batch >= plans.len()) {
            self.state.epoch += 1;
            self.state.batch = 0;
            self.plan_epoch();
        }
        let chosen: Vec<BatchPlan> = self
            .plans
            .iter()
            .flat_map(|(_, plans)| plans.iter().skip(self.state.batch))
            .take(self.options.grad_accumulation)
            .cloned()
            .collect();
        if chosen.is_empty() {
            return Err(Error::option("data", "gave an epoch without batches"));
        }
        self.state.batch += chosen.len();
        Ok(chosen)
    }

    fn one_step(&mut self, learning_rate: f64) -> Result<Step> {
        let plans = self.next_batches()?;
        let parts: Vec<Option<Part>> = plans
            .iter()
            .map(|plan| self.task().part(self.batches, plan, self.group))
            .collect::<Result<_>>()?;
        let tokens = counted(&parts).map(|batch| batch.target_tokens).sum();
        let processed = counted(&parts).map(|batch| batch.tokens).sum();
        let [tokens, processed] = self.group.count("the tokens of a step", [tokens, processed])?;
        // With a part of the weights for each rank, the ways between them are needed for that.
        let (tables, beside) = (self.tables(), !self.is_sharded());
        let mut sums = Summing::new(&self.gradients, self.group, tables, parts.len(), beside);
        let passed = match self.options.objective.compares_answers() {
            false => self.learn(&parts, tokens, &mut sums)?,
            true => self.compare(&plans, &parts, &mut sums)?,
        };
        let Passed { loss, count, metrics } = self.of_all(passed, &mut sums)?;
        self.state.step += 1;
        self.state.phase = Phase::Trained;
        // Leaves the gradients zero for the next step.
        let norm = if loss.is_finite() {
            let number = self.state.updates as usize + 1;
            let TrainOptions { clip_norm, loraplus_lr_ratio, .. } = self.options;
            let rates = Rates { base: learning_rate, b_ratio: loraplus_lr_ratio };
            let parameters = self.adapter.parameters();
            let (optimizer, group) = (self.optimizer()?, self.group);
            self.in_turn(|| {
                if self.loss_scale() != 1.0 {
                    self.gradients.scale(self.loss_scale().recip())?;
                }
                optimizer.step(parameters, &self.gradients, rates, number, clip_norm, group)
            })?
        } else {
            self.in_turn(|| self.gradients.clear())?;
            f64::NAN
        };
        let skipped = if !loss.is_finite() {
            Some(format!("the loss is {loss}"))
        } else if !norm.is_finite() {
            Some(format!("the norm of the gradient is {norm}"))
        } else {
            None
        };
        if skipped.is_some() {
            self.state.skipped += 1;
            let mut scale = self.state.loss_scale();
            if loss.is_finite() && scale.lower(self.model.dtype(), self.state.updates) {
                // The scale was too large, not the step.
                self.state.set_loss_scale(scale);
            } else {
                self.state.skipped_in_a_row += 1;
            }
            return Ok(Step { tokens, processed, norm, skipped });
        }
        self.state.updates += 1;
        let mut scale = self.state.loss_scale();
        scale.raise(self.model.dtype(), self.state.updates);
        self.state.set_loss_scale(scale);
        self.state.skipped_in_a_row = 0;
        self.state.loss_sum += loss;
        self.state.loss_count += count as u64;
        self.state.report_tokens += tokens as u64;
        self.state.metrics.extend(&metrics);
        self.state.trained_tokens += tokens as u64;
        Ok(Step { tokens, processed, norm, skipped: None })
    }

    /// What the passes of all ranks came to; their gradients are added up.
    fn of_all(&self, passed: Passed, sums: &mut Summing) -> Result<Passed> {
        const LOSS: &str = "the loss of a step";
        if self.group.size() == 1 {
            return Ok(passed);
        }
        let mut loss = [passed.loss];
        self.group.add_up(LOSS, &mut loss)?;
        let metrics = match self.options.objective.compares_answers() {
            true => passed.metrics.of_all(self.group, LOSS)?,
            false => passed.metrics,
        };
        if loss[0].is_finite() || sums.is_early() {
            sums.finish()?;
        }
        Ok(Passed { loss: loss[0], count: passed.count, metrics })
    }

    /// The parameters that stand in the place of the embedding and the head.
    fn tables(&self) -> Tables {
        let id = |parameter: Option<&Parameter>| parameter.map(Parameter::id);
        Tables {
            embedding: id(self.adapter.replacement(self.model.embedding)),
            head: id(match self.model.head {
                Some(head) => self.adapter.replacement(head),
                None => self.adapter.tied_head(),
            }),
        }
    }

    /// What the loss is multiplied by for the backward pass.
    fn loss_scale(&self) -> f64 {
        self.state.loss_scale().of(self.model.dtype())
    }

    /// A tape for one of a step's batches. Each rank has other random numbers.
    fn tape(&self, index: usize) -> Tape {
        let index = index * self.group.size() + self.group.rank();
        let seed = SplitMix64::stream(self.options.seed, self.state.step)
            .next_u64()
            .wrapping_add(index as u64);
        Tape::training()
            .with_dropout(seed)
            .with_checkpointing(self.options.grad_checkpoint)
            .with_offload(self.offload.clone())
    }

    /// Both passes of an objective of single tokens over the batches of a step.
    fn learn(
        &self,
        parts: &[Option<Part>],
        tokens: usize,
        gradients: &mut Summing,
    ) -> Result<Passed> {
        let last = parts.iter().rposition(Option::is_some);
        let mut sums = Vec::with_capacity(parts.len());
        for (index, part) in parts.iter().enumerate() {
            let Some(Part { batch, counts }) = part else { continue };
            let sum = self.in_turn(|| {
                let tape = self.tape(index);
                let sum = self.model.loss(&tape, batch, Some(&self.adapter))?.sum;
                let factor = if *counts { self.loss_scale() / tokens as f64 } else { 0.0 };
                if Some(index) == last {
                    gradients.last_pass(batch)?;
                }
                tape.backward(&sum, factor, gradients)?;
                let sum = sum.into_tensor();
                // A turn waits for the device anyway, and nothing may be read after it.
                Ok(match self.turns {
                    Some(_) => sum.to_device(&Device::Cpu)?,
                    None => sum,
                })
            })?;
            sums.extend(counts.then_some(sum));
        }
        gradients.passes_are_over()?;
        // Read when everything is under way: a GPU would wait for the next pass otherwise.
        let mut loss: f64 = counted(parts).map(Batch::loss_offset).sum();
        for sum in sums {
            loss += f64::from(sum.to_dtype(DType::F32)?.to_scalar::<f32>()?);
        }
        Ok(Passed { loss, count: tokens, metrics: MetricSums::default() })
    }

    /// All passes of an objective that compares answers over the batches of a step.
    fn compare(
        &self,
        plans: &[BatchPlan],
        parts: &[Option<Part>],
        gradients: &mut Summing,
    ) -> Result<Passed> {
        let last = parts.iter().rposition(Option::is_some);
        let task = self.task();
        let known = self.known.first();
        let references = parts
            .iter()
            .map(|part| match part {
                Some(Part { batch, .. }) => self.in_turn(|| task.references(batch, known)),
                None => Ok(Vec::new()),
            })
            .collect::<Result<Vec<_>>>()?;
        let kl = self.in_turn(|| task.kl(self.batches, plans, self.group))?;
        let totals = task.totals(counted(parts), kl, self.group)?;
        // The step is skipped then; but others may wait for the passes that this rank makes.
        let is_lost = |loss: f64| !loss.is_finite() && !self.is_sharded();
        let mut passed =
            Passed { loss: 0.0, count: totals.samples, metrics: MetricSums::default() };
        for (index, (part, references)) in parts.iter().zip(&references).enumerate() {
            let Some(Part { batch, counts }) = part else { continue };
            self.in_turn(|| {
                let tape = self.tape(index);
                let losses =
                    self.model.token_losses(&tape, batch, Some(&self.adapter), false)?.losses;
                let (compared, mut gradient) =
                    task.compare(batch, losses.tensor(), references, &totals)?;
                if *counts {
                    passed.loss += compared.loss * totals.samples as f64;
                    passed.metrics.extend(&compared.metrics);
                    gradient.iter_mut().for_each(|slope| *slope *= self.loss_scale() as f32);
                } else {
                    gradient.fill(0.0);
                }
                if is_lost(passed.loss) {
                    return Ok(());
                }
                let gradient = Tensor::from_vec(gradient, losses.shape(), self.model.device())?
                    .to_dtype(losses.tensor().dtype())?;
                if Some(index) == last {
                    gradients.last_pass(batch)?;
                }
                tape.backward_from(&losses, gradient, gradients)
            })?;
            if is_lost(passed.loss) {
                break;
            }
        }
        gradients.passes_are_over()?;
        Ok(passed)
    }

    /// False when it was given up because the run is to stop.
    fn evaluate(&mut self, metrics: &mut dyn MetricsSink) -> Result<bool> {
        let Some(validation) = self.validation else { return Ok(true) };
        let (limit, known) = (self.options.eval_batches, self.known.get(1));
        let stop = || self.is_stopped();
        let found = self.task().evaluate_until(&stop, self.group, validation, limit, known)?;
        let Some(evaluation) = found else { return Ok(false) };
        metrics.log(&Metric::Evaluation {
            step: self.state.step,
            loss: evaluation.loss,
            perplexity: evaluation.perplexity,
            metrics: evaluation.metrics.clone(),
            tokens: evaluation.tokens,
            seconds: evaluation.seconds,
        })?;
        let loss = evaluation.loss;
        let value = match self.options.best_by.metric() {
            None => loss,
            Some(name) => -evaluation.metrics.get(name).copied().unwrap_or(f64::NAN),
        };
        self.state.last_evaluation = Some(evaluation);
        let better = self.state.best_value.is_none_or(|best| value < best);
        if loss.is_finite() && value.is_finite() && better {
            self.state.best_loss = Some(loss);
            self.state.best_value = Some(value);
            self.state.best_step = Some(self.state.step);
            self.state.evaluations_without_gain = 0;
        } else {
            self.state.evaluations_without_gain += 1;
        }
        Ok(true)
    }

    /// False when it was given up because the run is to stop.
    fn show_samples(&mut self, metrics: &mut dyn MetricsSink) -> Result<bool> {
        let step = self.state.step;
        let seed = SplitMix64::stream(self.options.seed, step).next_u64();
        if self.sample.is_none() {
            return Ok(true);
        }
        if self.is_stopped()? {
            return Ok(false);
        }
        let samples = match &mut self.sample {
            Some(sample) if self.group.is_root() => sample(&self.model, &self.adapter, seed)?,
            _ => Vec::new(),
        };
        if self.is_stopped()? {
            return Ok(false);
        }
        for (prompt, text) in samples {
            metrics.log(&Metric::Sample { step, prompt, text })?;
        }
        Ok(true)
    }

    /// [`Self::begin_to_save`], of parameters that are the same for all ranks.
    fn save(&mut self, metrics: &mut dyn MetricsSink) -> Result<()> {
        let of_ranks = self.fingerprints();
        let of_ranks = self.or_save_alone(of_ranks, metrics)?;
        self.check_same(&of_ranks)?;
        let begun = self.begin_to_save(metrics);
        self.or_save_alone(begun, metrics)
    }

    /// Begins to write the checkpoint, unless it is there, as of a run that has just been resumed from it. What ranks have
    /// parts of all of them put together; otherwise nobody is asked.
    fn begin_to_save(&mut self, metrics: &mut dyn MetricsSink) -> Result<()> {
        let is_shared = self.optimizer()?.is_shared();
        let mut is_there = self.is_saved(metrics)?;
        if is_shared {
            is_there = self.group.any("whether there is a checkpoint", is_there)?;
        }
        if is_there {
            return Ok(());
        }
        let begun = Instant::now();
        let (turns, device) = (self.turns.clone(), self.model.device().clone());
        in_turn(turns.as_ref(), &device, || self.save_in_turn(begun, is_shared, metrics))
    }

    /// Begins to write the checkpoint, whose numbers are read from the device, and for which training has waited since
    /// `begun`.
    fn save_in_turn(
        &mut self,
        begun: Instant,
        is_shared: bool,
        metrics: &mut dyn MetricsSink,
    ) -> Result<()> {
        let (names, kept) = self.kept()?;
        let (group, device) = (self.group, self.model.device().clone());
        let held = match self.saver.as_mut().filter(|_| is_shared).and_then(Saver::room) {
            Some(room) => {
                for (index, kept) in kept.iter().enumerate() {
                    kept.put_together(group, &device, |start, piece| {
                        Ok(room.write(index, start, piece)?)
                    })?;
                }
                Held::Copied(room)
            }
            None => {
                let whole = kept.iter().map(|kept| kept.whole(group, &device));
                Held::Live(whole.filter_map(Result::transpose).collect::<Result<_>>()?)
            }
        };
        if !group.is_root() {
            return Ok(());
        }
        let contents = Contents {
            output: self.output.clone(),
            state: self.state.clone(),
            files: self.trained_files()?,
            optimizer: names,
            keep: self.options.keep,
            best: self.best_to_keep(),
            logs: metrics.files()?,
        };
        match &mut self.saver {
            Some(saver) => saver.begin(self.state.step, contents, held, begun, group),
            None => Err(Error::option("checkpoint", "can only be written by a run")),
        }
    }

    /// Whether this rank, if it writes checkpoints, has written that of this step, as after a run was resumed from it. The one
    /// before is waited for.
    fn is_saved(&mut self, metrics: &mut dyn MetricsSink) -> Result<bool> {
        if !self.group.is_root() {
            return Ok(false);
        }
        self.await_saved(metrics)?;
        let (step, path) = (self.state.step, checkpoint::folder(&self.output, self.state.step));
        if !path.is_dir() {
            return Ok(false);
        }
        metrics.log(&Metric::Checkpoint { step, path, waited: 0.0, seconds: 0.0 })?;
        checkpoint::prune(&self.output, self.options.keep, self.best_to_keep())?;
        Ok(true)
    }

    /// The step of the best evaluation, if its checkpoint is to stay.
    fn best_to_keep(&self) -> Option<u64> {
        self.state.best_step.filter(|_| self.options.keep_best)
    }

    /// What a checkpoint has: the parameters, and what the optimiser keeps behind them, and the names of that.
    fn kept(&self) -> Result<(Vec<String>, Vec<Kept>)> {
        let parameters = self.adapter.parameters();
        let (names, mut kept): (_, Vec<_>) =
            self.optimizer()?.all_kept(parameters)?.into_iter().unzip();
        kept.insert(0, parameters.kept());
        Ok((names, kept))
    }

    /// Writes a checkpoint of what all ranks did, when one of them is lost; the error stays.
    fn or_save_alone<T>(&mut self, outcome: Result<T>, metrics: &mut dyn MetricsSink) -> Result<T> {
        if matches!(outcome, Err(Error::Rank { .. })) && self.group.is_root() {
            let (optimizer, parameters) = (self.optimizer()?, self.adapter.parameters());
            if optimizer.is_shared() {
                let what = match parameters.partition() {
                    Some(_) => "the parameters",
                    None => "what the optimiser keeps",
                };
                tracing::warn!(
                    "no checkpoint of step {} is written: the rank that is lost had a part of {what}",
                    self.state.step
                );
                return outcome;
            }
            self.begin_to_save(metrics)?;
            self.await_saved(metrics)?;
        }
        outcome
    }

    fn home(&self) -> Home<'a> {
        Home { placement: self.options.optimizer_placement, group: self.group }
    }

    fn optimizer(&self) -> Result<&OptimizerState> {
        let missing = || Error::option("optimizer", "keeps nothing before a run begins");
        self.optimizer.as_ref().ok_or_else(missing)
    }

    fn trained_files(&self) -> Result<TrainedFiles> {
        let files =
            self.adapter.files(&self.model, &self.base_model, self.companions.as_deref())?;
        Ok(files.with_chat_template(self.chat_template.clone()))
    }

    /// Logs a checkpoint that has become complete, without waiting for one.
    fn log_saved(&mut self, metrics: &mut dyn MetricsSink) -> Result<()> {
        match &mut self.saver {
            Some(saver) => log(saver.poll()?, metrics),
            None => Ok(()),
        }
    }

    /// Waits for the checkpoint that is being written, and logs it.
    fn await_saved(&mut self, metrics: &mut dyn MetricsSink) -> Result<()> {
        match &mut self.saver {
            Some(saver) => log(saver.wait(self.group)?, metrics),
            None => Ok(()),
        }
    }

    /// Leaves the last, or the best, parameters in the output folder.
    fn finish(&mut self) -> Result<()> {
        if let (true, Some(best)) = (self.options.keep_best, self.state.best_step)
            && best != self.state.step
        {
            let folder = checkpoint::folder(&self.output, best);
            let read = self.in_turn(|| checkpoint::read_parameters(&folder, &self.adapter));
            if self.group.any("whether the best checkpoint is lost", read.is_err())? {
                if let Err(error) = read {
                    tracing::warn!(
                        "the checkpoint of the best step, {best}, can't be read ({error}); the result are the parameters of \
                         the last step"
                    );
                }
                let state = &mut self.state;
                (state.best_loss, state.best_value, state.best_step) = (None, None, None);
                let last = checkpoint::folder(&self.output, state.step);
                self.in_turn(|| self.adapter.load_parameters(last))?;
            }
        }
        let values = self.in_turn(|| {
            let values = self.adapter.parameters().kept().whole(self.group, self.model.device())?;
            // Nothing may be read after the turn, and files aren't written within it: others would wait for the disk.
            match (&self.turns, values) {
                (Some(_), Some(values)) => Ok(Some(host::on_the_host(&values)?)),
                (_, values) => Ok(values),
            }
        })?;
        match values {
            Some(values) => {
                let (files, output) = (self.trained_files()?, self.output.clone());
                self.group.busy_with(move || files.write(&output, &values))
            }
            None => Ok(()),
        }
    }
}

/// Does a part of a run in a turn of its own, where turns are taken. It is a step of the device then, which ends within
/// the turn, as no other thread may use the device until it has.
fn in_turn<T>(
    turns: Option<&Arc<Turns>>,
    device: &Device,
    work: impl FnOnce() -> Result<T>,
) -> Result<T> {
    match turns {
        Some(_) => Turns::train(turns, device, || devices::step(device, work)),
        None => work(),
    }
}

fn log(saved: Option<Saved>, metrics: &mut dyn MetricsSink) -> Result<()> {
    match saved {
        Some(Saved { step, path, waited, seconds }) => {
            metrics.log(&Metric::Checkpoint { step, path, waited, seconds })
        }
        None => Ok(()),
    }
}

/// The batches whose rows are this rank's own.
fn counted(parts: &[Option<Part>]) -> impl Iterator<Item = &Batch> + Clone {
    parts.iter().flatten().filter(|part| part.counts).map(|part| &part.batch)
}

/// What the passes over a step's batches came to.
struct Passed {
    /// The sum of the loss over what it is a mean over.
    loss: f64,
    /// How many that are.
    count: usize,
    metrics: MetricSums,
}

struct Step {
    /// Whose prediction was learned.
    tokens: usize,
    /// That were read.
    processed: usize,
    norm: f64,
    skipped: Option<String>,
}
