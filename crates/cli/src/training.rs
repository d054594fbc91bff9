//! A training run from its settings to its files, in two parts: [`Run::prepare`] reads and checks
//! everything, [`Run::train`] trains. Between them the model can be used as it is.

use crate::datasets::{self, Found, Wanted};
use crate::errors::usage;
use crate::interrupt;
use crate::models::{self, device, same_folder};
use crate::output::{Terminal, are, grouped, plural, shell_word};
use crate::plan::{self, DataPlan, Plan};
use crate::plot::{self, LossCurve};
use crate::progress::{self, Progress, clock};
use crate::prompts;
use crate::run_folder::{self, CONFIG, EVENTS, METRICS, PICTURES, Resume, Start};
use crate::settings::file::with_resume_from;
use crate::settings::{
    ActivationPlacement, BasePlacement, Data, FineTuneType, OptimizerPlacement, Precision,
    Settings, limit,
};
use crate::template;
use anyhow::Context;
use candle_core::{DType, Device, Tensor};
use chrono::NaiveDateTime;
use metal_candle::adapter::{Adapter, LoraConfig, StartFrom};
use metal_candle::data::{
    BatchOptions, Batcher, DataOptions, Dataset, SampleKind, Split, Teacher, Tokenized, tokenize,
};
use metal_candle::generate::{GenerateOptions, generate};
use metal_candle::model::{Config, Holding, Model, Placement};
use metal_candle::text::Tokenizer;
use metal_candle::train::{
    Evaluation, FanOut, FolderLock, JsonLines, Metric, Outcome, Resumed, Task, TensorBoard,
    TrainOptions, Trainer, eva, latest_checkpoint, layer_ranks, metrics, run_steps, total_steps,
    total_steps_resumed,
};
use metal_candle::{Error, files};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The outcome of a run whose last steps changed nothing.
pub const LAST_STEPS_SKIPPED: &str = "last_steps_skipped";
/// How many names of a list a message has.
const NAMED: usize = 4;
const TIME_FORMAT: &str = "%Y-%m-%dT%H:%M:%S";

/// A run that is ready to train.
pub struct Run {
    pub settings: Settings,
    pub model: Arc<Model>,
    /// None in a dry run of full fine-tuning.
    pub adapter: Option<Arc<Adapter>>,
    /// The adapter that a run goes on from, as it was, where answers are compared with it.
    reference: Option<Arc<Adapter>>,
    pub tokenizer: Tokenizer,
    pub plan: Plan,
    train: Batcher,
    valid: Option<Batcher>,
    test: Option<Batcher>,
    options: TrainOptions,
    /// A chat template that isn't the model's own.
    chat_template: Option<String>,
    folder: PathBuf,
    base_model: String,
    start: Start,
    /// Holds the output folder; a dry run has none.
    lock: Option<Arc<FolderLock>>,
}

/// What a run came to.
#[derive(Debug, Clone, Serialize)]
pub struct Summary {
    pub outcome: &'static str,
    pub step: u64,
    /// Steps up to the last one that changed nothing.
    pub skipped_in_a_row: u64,
    pub steps: u64,
    pub trained_tokens: u64,
    pub seconds: f64,
    pub train_loss: Option<f64>,
    pub validation: Option<Evaluation>,
    pub best: Option<Best>,
    pub test: Option<Evaluation>,
    pub output: PathBuf,
    pub checkpoint: Option<PathBuf>,
    pub files: Vec<PathBuf>,
    #[serde(skip)]
    pub curve: LossCurve,
    #[serde(skip)]
    pub interrupted: bool,
}

/// The best evaluation.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Best {
    pub loss: f64,
    pub step: u64,
}

impl Run {
    /// Reads the data and the model and checks that the run can be made.
    pub fn prepare(
        mut settings: Settings,
        start: Start,
        terminal: Terminal,
    ) -> anyhow::Result<Self> {
        let device = match &start.device {
            Some(device) => device.clone(),
            None => device(settings.device)?,
        };
        models::set_matmul(settings.matmul, &device)?;
        let placement = placement(settings.base_placement, &device, &start)?;
        check_optimizer_placement(&settings, &device, start.group.size())?;
        if settings.activation_placement == ActivationPlacement::Host {
            models::check_host("activation_placement", &device)?;
        }
        let dtype = models::dtype(settings.dtype);
        let compute = models::describe_compute(settings.dtype, settings.base_compute, &device);
        // What `auto` stands for here is kept with the run, which may continue on another machine.
        settings.dtype = Precision::of(dtype);
        let data = settings.data.name();
        let lock = match start.dry_run || !start.group.is_root() {
            true => None,
            false => Some(run_folder::take(&settings, &start)?),
        };
        let wanted = Wanted::Training { test: settings.test };
        let found = datasets::find(&settings.data, &settings.data_flags(), wanted, terminal)?;
        for read in files_of_folders(&settings.data, &found) {
            terminal.note(read);
        }
        let sources = |split| datasets::of(&found, split);
        let has_valid = !sources(Split::Valid).is_empty();
        let held_out = settings.held_out().filter(|_| !has_valid);
        if !has_valid && held_out.is_none() {
            for (key, wanted) in
                [("keep_best", settings.keep_best), ("patience", settings.patience.is_some())]
            {
                if wanted {
                    return Err(usage(format!(
                        "{key}: there is no validation data; add valid.jsonl, or hold some out with --valid-fraction"
                    )));
                }
            }
        }
        if settings.test && sources(Split::Test).is_empty() {
            return Err(usage(format!("test: there is no test.jsonl in {data}")));
        }
        let folder = match (&settings.from_config, &settings.model) {
            (Some(path), _) if path.is_file() => match path.parent() {
                // The folder of a bare name has no name.
                Some(folder) if !folder.as_os_str().is_empty() => folder.into(),
                _ => PathBuf::from("."),
            },
            (Some(folder), _) => folder.clone(),
            (None, Some(model)) => models::resolve(model, settings.revision.as_deref(), terminal)?,
            (None, None) => return Err(usage("no model: give --model")),
        };
        let full = settings.fine_tune_type == FineTuneType::Full;
        if same_folder(&settings.output, &folder) {
            return Err(usage(format!(
                "output: {} is the model's own folder, where the run's files do not belong; choose another",
                settings.output.display()
            )));
        }
        if start.resume.is_none() && start.group.is_root() {
            let model = if settings.from_config.is_some() { "from_config" } else { "model" };
            let inputs = [
                (model, Some(folder.as_path())),
                ("init_adapter", settings.init_adapter.as_deref()),
                ("teacher", settings.teacher.as_deref()),
            ];
            run_folder::check_inputs(&settings.output, &inputs)?;
        }
        let config = Config::load(&folder)?;
        let mut tokenizer = Tokenizer::load(&folder)?;
        let mut chat_template = match &settings.init_adapter {
            Some(adapter) => tokenizer.take_chat_template(adapter)?,
            None => None,
        };
        if let Some(source) = &settings.chat_template {
            template::set(&mut tokenizer, source)?;
            chat_template = Some(source.clone());
        }
        template::check_variables(&tokenizer, &settings.chat_template_kwargs)?;

        let objective = settings.objective()?;
        let teacher = match &settings.teacher {
            Some(path) => Some(Arc::new(Teacher::read(path)?)),
            None => None,
        };
        if let (None, Some(time)) =
            (&settings.template_time, teacher.as_ref().and_then(|teacher| teacher.template_time()))
        {
            settings.template_time = Some(time.into());
        }
        // That of one process for all.
        let now = template_time(&mut settings.template_time)?.format(TIME_FORMAT).to_string();
        let now = start.group.of_root("the time that templates are told", now.as_bytes())?;
        settings.template_time = Some(String::from_utf8(now)?);
        let now = template_time(&mut settings.template_time)?;
        let output = &settings.output;
        let data_options = DataOptions {
            now: Some(now),
            folder: if output.is_dir() { output.clone() } else { std::env::temp_dir() },
            samples: objective.samples(),
            ..settings.data_options()
        };
        let named = |split: Split| format!("{} data of {data}", split.name());
        let read = |split: Split| -> anyhow::Result<Tokenized> {
            tokenize(&sources(split), &tokenizer, &data_options).with_context(|| named(split))
        };
        if full && settings.test && objective.uses_reference() {
            return Err(usage(format!(
                "test: is not supported for {} in full fine-tuning, whose reference is gone at the end; give the data as \
                 validation data",
                objective.name()
            )));
        }
        let batch = |dataset: Dataset, split: Split, packing| -> anyhow::Result<Batcher> {
            let dataset = match &teacher {
                Some(teacher) => dataset.with_teacher(teacher).with_context(|| named(split))?,
                None => dataset,
            };
            let dataset = match objective.samples() {
                SampleKind::Labelled => dataset.unpaired(),
                SampleKind::Plain | SampleKind::Pair => dataset,
            };
            objective.check(&dataset).map_err(usage)?;
            dataset.check_vocabulary(config.vocab_size)?;
            // Each process has the batch that the settings say, so this is that of all.
            let options = BatchOptions { packing, ..settings.batch_options() };
            let batch_size = options.batch_size.saturating_mul(start.group.size());
            let options = BatchOptions { batch_size, ..options };
            Ok(Batcher::new(Arc::new(dataset), options)?)
        };
        let whole = |split: Split| -> anyhow::Result<Dataset> {
            read(split)?.into_dataset().with_context(|| named(split))
        };
        let (train, valid) = match held_out {
            Some(held_out) => {
                let (train, valid) =
                    read(Split::Train)?.hold_out(held_out).with_context(|| named(Split::Train))?;
                (train, Some(valid))
            }
            None if !has_valid => (whole(Split::Train)?, None),
            None => (whole(Split::Train)?, Some(whole(Split::Valid)?)),
        };
        let train = batch(train, Split::Train, settings.packing)?;
        let valid = valid.map(|dataset| batch(dataset, Split::Valid, false)).transpose()?;
        let test = match settings.test {
            true => Some(batch(whole(Split::Test)?, Split::Test, false)?),
            false => None,
        };
        let batches = train.batch_count(0);
        let before = start.resume.as_ref().map(|resume| run_steps(resume.from())).transpose()?;
        let (duration, accumulation) = (settings.duration(), settings.grad_accumulation);
        let of_epoch = |epoch| train.batch_count(epoch);
        let steps = match before.flatten() {
            Some(before) => total_steps_resumed(duration, of_epoch, accumulation, before)?,
            None => total_steps(duration, of_epoch, accumulation)?,
        };
        let options =
            settings.train_options(steps, settings.learning_rate(steps).map_err(usage)?)?;
        options.validate().map_err(usage)?;

        let holding = Holding { quantization: settings.quantization()?, placement };
        let model = match (settings.from_config.is_some(), start.dry_run) {
            (false, false) => Model::load_with(&folder, dtype, &device, holding)?,
            (false, true) => Model::outline(&folder, dtype, &device, settings.quantization()?)?,
            (true, false) => Model::random_with(config, dtype, &device, settings.seed, holding)?,
            (true, true) => Model::from_fn(config, dtype, &device, |_, shape| {
                Ok(Tensor::zeros((), dtype, &device)?.broadcast_as(shape)?)
            })?,
        };
        let parameters = model.weight_count() as u64;
        let adapter = match (full, &settings.init_adapter) {
            (true, _) if start.dry_run => None,
            (true, _) => Some(Adapter::full(&model)?),
            (false, Some(folder)) => Some(Adapter::load(&model, folder)?),
            (false, None) => Some(new_adapter(&settings, &start, &model, &train, terminal)?),
        };
        let reference = match &settings.init_adapter {
            Some(folder) if options.objective.uses_reference() && !start.dry_run => {
                Some(Arc::new(Adapter::load(&model, folder)?))
            }
            _ => None,
        };
        let model = Arc::new(if full && !start.dry_run { model.without_weights() } else { model });
        let lora = match adapter.as_ref().and_then(Adapter::config) {
            Some(config) => Some(plan::lora_plan(config, &model)?),
            None => None,
        };
        let entries = match &adapter {
            Some(adapter) => adapter.parameters().entries().to_vec(),
            None => Adapter::full_entries(&model),
        };
        let trainable = entries.iter().map(|entry| entry.shape.elem_count() as u64).sum();
        let dataset = train.dataset();
        let others = [("validation", valid.as_ref()), ("test", test.as_ref())];
        let data: Vec<(&str, &Dataset)> = std::iter::once(("training", dataset.as_ref()))
            .chain(others.into_iter().filter_map(|(name, it)| Some((name, it?.dataset().as_ref()))))
            .collect();
        let warnings = plan::length_warnings(&settings, model.config().context(), &data);
        for warning in &warnings {
            terminal.note(format!("warning: {warning}"));
        }
        let plan = Plan {
            model: match (&settings.model, &settings.from_config) {
                (Some(model), _) => model.clone(),
                (None, _) => format!("random weights by {}", folder.join("config.json").display()),
            },
            family: model.config().architecture.class_name(),
            parameters,
            trainable_parameters: trainable,
            trainable_share: trainable as f64
                / (parameters + if full { 0 } else { trainable }).max(1) as f64,
            lora,
            data: DataPlan {
                train: dataset.report.clone(),
                valid: valid.as_ref().map(|batches| batches.dataset().report.clone()),
                test: test.as_ref().map(|batches| batches.dataset().report.clone()),
            },
            steps,
            processes: start.group.size(),
            batches_per_epoch: batches as u64,
            tokens_per_epoch: dataset.report.tokens as u64,
            peak_learning_rate: (settings.relative_step != Some(true))
                .then(|| plan::highest(&options.learning_rate, steps)),
            memory: plan::memory(
                &settings,
                &model,
                start.group.size() as u64,
                2 * trainable * DType::F32.size_in_bytes() as u64,
                options.optimizer.state_bytes(&entries),
                // Both sequences of a pair.
                if dataset.kind() == SampleKind::Pair { 2 } else { 1 } * dataset.report.longest,
            ),
            objective: options.objective.describe(),
            optimizer: options.optimizer.describe(),
            compute,
            warnings,
            settings: settings.clone(),
        };
        let base_model = models::base_name(settings.model.as_deref(), &folder);
        Ok(Self {
            settings,
            model,
            adapter: adapter.map(Arc::new),
            reference,
            tokenizer,
            plan,
            train,
            valid,
            test,
            options,
            chat_template,
            folder,
            base_model,
            start,
            lock,
        })
    }

    /// Trains, shows it, and leaves the run's files in the output folder.
    pub fn train(&self, terminal: Terminal) -> anyhow::Result<Summary> {
        let settings = &self.settings;
        let output = &settings.output;
        let adapter = self.adapter.as_ref().context("a dry run trains nothing")?;
        let (options, base_model) = (self.options.clone(), &self.base_model);
        let group = self.start.group;
        let mut trainer =
            Trainer::new(&self.model, adapter, &self.train, options, output, base_model)?
                .with_group(group)?
                .with_stop(interrupt::watch(
                    "stopping after this step and saving a checkpoint; Ctrl-C again stops at once",
                ));
        if let Some(valid) = &self.valid {
            trainer = trainer.with_validation(valid);
        }
        if let Some(reference) = &self.reference {
            trainer = trainer.with_reference(reference.clone())?;
        }
        if settings.fine_tune_type == FineTuneType::Full {
            trainer = trainer.with_companions(&self.folder);
        }
        if settings.sample_every > 0 {
            trainer = trainer
                .with_samples(Box::new(|model, adapter, seed| self.samples(model, adapter, seed)));
        }
        if let Some(template) = self.tokenizer.chat_template() {
            trainer = trainer.with_chat_template(template);
        }
        if let Some(source) = &self.chat_template {
            trainer = trainer.with_saved_chat_template(source);
        }
        if let Some(lock) = &self.lock {
            trainer = trainer.with_lock(lock);
        }
        let resumed = match &self.start.resume {
            None => None,
            Some(Resume::At(checkpoint) | Resume::Again { checkpoint, .. }) => {
                Some(trainer.resume(checkpoint)?)
            }
            Some(Resume::Newest(run)) => Some(trainer.resume_newest(run)?.with_context(|| {
                format!("resume: {} no longer has a checkpoint", run.display())
            })?),
        };
        match &resumed {
            // Until all is checked, nothing of the run in the folder changes.
            Some(resumed) => {
                trainer.prepare()?;
                terminal.note(self.going_on(resumed));
            }
            None if group.is_root() => run_folder::clear(output, self.start.overwrite)?,
            None => {}
        }
        let position = trainer.position();
        let config = output.join(CONFIG);
        let of_root = resumed.as_ref().filter(|_| group.is_root());
        let from = of_root.and_then(|it| resume_from(output, &it.checkpoint));
        if group.is_root() {
            // From here on the run is what was asked for, wherever it is killed: first its settings say so, then what it no
            // longer has goes.
            let mut text = settings.to_yaml()?;
            if let Some(from) = &from {
                text = with_resume_from(text, from)?;
            }
            files::write_bytes_atomic(&config, text)?;
            if resumed.is_some() {
                trainer.take_over()?;
            }
        }
        group.wait("the run's folder")?;

        let outcome = if group.is_root() {
            let mut sinks = FanOut::new();
            let path = output.join(METRICS);
            let events = output.join(EVENTS);
            sinks.push(if resumed.is_some() {
                JsonLines::resume(&path, position)?
            } else {
                JsonLines::create(&path)?
            });
            if settings.tensorboard {
                sinks.push(if resumed.is_some() && events.is_dir() {
                    TensorBoard::resume(&events, position)?
                } else {
                    TensorBoard::create(&events)?
                });
            }
            sinks.push(Progress::new(terminal, self.options.steps, position.step));
            if from.is_some() {
                files::write_bytes_atomic(&config, settings.to_yaml()?)?;
            }
            trainer.run(&mut sinks).map_err(|error| way_on(error, output))?
        } else {
            trainer.run(&mut FanOut::new())?
        };
        // The run's files are written; from here on Ctrl-C has nothing left to save.
        interrupt::unwatch();
        let interrupted = outcome.outcome == Outcome::Interrupted;
        let (events, is_whole) = match group.is_root().then(|| metrics::read(output.join(METRICS)))
        {
            Some(Ok(events)) => (events, true),
            Some(Err(error)) => {
                tracing::warn!("{error}; the loss curve is left out");
                (Vec::new(), false)
            }
            None => (Vec::new(), false),
        };
        let curve = LossCurve::from_metrics(
            Path::new(&self.plan.model).file_name().map_or_else(
                || self.plan.model.clone(),
                |name| name.to_string_lossy().into_owned(),
            ),
            &events,
        );
        if settings.plot && is_whole {
            let [svg, png] = PICTURES;
            files::write_bytes_atomic(output.join(svg), plot::loss_curve_svg(&curve)?)?;
            files::write_bytes_atomic(output.join(png), plot::loss_curve_png(&curve)?)?;
        }
        let test = match &self.test {
            Some(batches) if !interrupted => {
                let task = Task {
                    model: &self.model,
                    adapter: Some(adapter),
                    objective: &self.options.objective,
                    reference: self.reference.as_ref(),
                    turns: None,
                };
                Some(task.evaluate_with(group, batches, limit(settings.test_batches))?)
            }
            _ => None,
        };

        let checkpoint = if interrupted { latest_checkpoint(output)? } else { None };
        let train_loss = events.iter().rev().find_map(|metric| match metric {
            Metric::Train { loss, .. } => Some(*loss),
            _ => None,
        });
        Ok(Summary {
            outcome: match outcome.outcome {
                Outcome::Finished => "finished",
                Outcome::LastStepsSkipped => LAST_STEPS_SKIPPED,
                Outcome::StoppedEarly => "stopped_early",
                Outcome::Interrupted => "interrupted",
            },
            step: outcome.step,
            skipped_in_a_row: outcome.skipped_in_a_row,
            steps: self.options.steps,
            trained_tokens: outcome.trained_tokens,
            seconds: outcome.seconds,
            train_loss,
            validation: outcome.evaluation,
            best: outcome.best.map(|(loss, step)| Best { loss, step }),
            test,
            output: output.clone(),
            checkpoint,
            files: run_folder::written(output, !interrupted),
            curve,
            interrupted,
        })
    }

    /// Where a resumed run goes on.
    fn going_on(&self, resumed: &Resumed) -> String {
        let steps = self.options.steps;
        let Resumed { checkpoint, step, extended_from } = resumed;
        let mut text =
            format!("Going on after step {step} of {steps}, from {}", checkpoint.display());
        if let Some(before) = extended_from {
            text.push_str(&format!(
                "\nThe run was of {before} steps. Those that follow have the learning rates of a run of {steps} \
                 steps, the next one {:.2e}.",
                self.options.learning_rate.at(*step)
            ));
            let TrainOptions { eval_every, epoch_ends, keep_best, patience, .. } = &self.options;
            let is_due = *epoch_ends || (*eval_every > 0 && step.is_multiple_of(*eval_every));
            if step == before && !is_due && (*keep_best || patience.is_some()) {
                text.push_str(&format!(
                    "\nThe evaluation after step {step} counts for --keep-best and --patience; a run of {steps} steps from the \
                     beginning has none there."
                ));
            }
        } else if *step >= steps {
            text.push_str(
                "\nAll its steps were taken; a larger --steps or --epochs goes on with it.",
            );
        }
        text
    }

    /// What the model makes of the sample prompts.
    fn samples(
        &self,
        model: &Arc<Model>,
        adapter: &Arc<Adapter>,
        seed: u64,
    ) -> metal_candle::Result<Vec<(String, String)>> {
        let mut options = GenerateOptions {
            max_tokens: self.settings.sample_tokens,
            continues_prompt: prompts::is_continued(&self.tokenizer, false),
            ..Default::default()
        };
        options.sampling.seed = seed;
        self.settings
            .sample_prompt
            .iter()
            .map(|prompt| {
                let variables = &self.settings.chat_template_kwargs;
                let ids = prompts::encode(&self.tokenizer, prompt, None, false, variables)?;
                let (text, _) =
                    generate(model, Some(adapter), &self.tokenizer, &ids, options.clone())?;
                Ok((prompt.clone(), text))
            })
            .collect()
    }

    /// The command to try on what was trained.
    pub fn next_command(&self) -> String {
        let output = shell_word(&self.settings.output.display().to_string());
        let flag = match self.settings.fine_tune_type {
            FineTuneType::Full => "--model",
            FineTuneType::Lora | FineTuneType::Dora => "--adapter",
        };
        // The template is kept beside the weights, but nothing there can hold what it was told.
        let variables = &self.settings.chat_template_kwargs;
        let told = match serde_json::to_string(variables) {
            Ok(json) if !variables.is_empty() => {
                format!(" --chat-template-kwargs {}", shell_word(&json))
            }
            _ => String::new(),
        };
        format!("metal-candle chat {flag} {output}{told}")
    }
}

impl Summary {
    /// The summary as a person reads it.
    pub fn describe(&self) -> String {
        let what = match self.outcome {
            "stopped_early" => "Stopped early",
            "interrupted" => "Interrupted",
            LAST_STEPS_SKIPPED => "Ended in skipped steps",
            _ => "Finished",
        };
        let mut text = format!(
            "{what} after {} of {} in {}",
            grouped(self.step),
            plural(self.steps, "step"),
            clock(self.seconds)
        );
        if let Some(loss) = self.train_loss {
            text.push_str(&format!(": loss {loss:.4}"));
        }
        if let Some(found) = &self.validation {
            text.push_str(&format!(", validation loss {}", described(found)));
        }
        if let Some(best) = self.best {
            text.push_str(&format!(", best {:.4} at step {}", best.loss, best.step));
        }
        if let Some(found) = &self.test {
            text.push_str(&format!(", test loss {}", described(found)));
        }
        text.push('\n');
        for file in &self.files {
            text.push_str(&format!("  {}\n", file.display()));
        }
        text
    }
}

/// The checkpoint that a run goes on from, by a path from its folder, where that isn't the newest one in it.
fn resume_from(output: &Path, checkpoint: &Path) -> Option<PathBuf> {
    let newest = latest_checkpoint(output).ok().flatten();
    if newest.is_some_and(|newest| same_folder(&newest, checkpoint)) {
        return None;
    }
    let (output, checkpoint) = (output.canonicalize().ok()?, checkpoint.canonicalize().ok()?);
    let path = checkpoint.strip_prefix(&output).map_or(checkpoint.clone(), Path::to_path_buf);
    // The settings are a text.
    path.to_str().is_some().then_some(path)
}

/// An error of a run, with how to go on where a file could not be written.
fn way_on(error: Error, output: &Path) -> anyhow::Error {
    match (&error, latest_checkpoint(output)) {
        (Error::Io { .. }, Ok(Some(_))) => anyhow::anyhow!(
            "{error}. Once that is mended, metal-candle train --resume --output {} goes on from the newest checkpoint",
            shell_word(&output.display().to_string())
        ),
        _ => error.into(),
    }
}

/// What is read of each folder, where the names of files decide. What a data set of the hub has is told where it is found.
fn files_of_folders(data: &Data, found: &[Found]) -> Vec<String> {
    let folders = data.0.iter().map(|entry| Path::new(&entry.path)).filter(|path| path.is_dir());
    let of_split = |folder: &Path, Found { split, source }: &Found| {
        let inner = source.files.iter().filter_map(|file| file.strip_prefix(folder).ok());
        let names: Vec<String> = inner.map(|file| file.display().to_string()).collect();
        (!names.is_empty()).then(|| format!("{split} {}", first_of(&names)))
    };
    folders
        .map(|folder| {
            let splits: Vec<String> = found.iter().filter_map(|it| of_split(folder, it)).collect();
            format!("data in {}: {}", folder.display(), splits.join("; "))
        })
        .collect()
}

/// The first names of a list, for a message.
fn first_of<S: AsRef<str>>(names: &[S]) -> String {
    let shown: Vec<&str> = names.iter().take(NAMED).map(AsRef::as_ref).collect();
    format!("{}{}", shown.join(", "), if names.len() > NAMED { ", ..." } else { "" })
}

/// A new adapter as the settings describe it.
fn new_adapter(
    settings: &Settings,
    start: &Start,
    model: &Model,
    batches: &Batcher,
    terminal: Terminal,
) -> anyhow::Result<Adapter> {
    let mut config = settings.lora()?;
    if start.resume.is_none() {
        config.refuse_experts(model)?;
        plan::check_patterns(&config, &model.target_paths(), model.config().layers.len())?;
    }
    if config.start == StartFrom::Eva {
        if start.resume.is_none() && !start.dry_run {
            return eva_adapter(settings, &config, model, batches, terminal);
        }
        // Those of the run that goes on, whose A is in its checkpoint.
        let known = match &start.resume {
            Some(resume) => layer_ranks(resume.from())?,
            None => None,
        };
        config.layer_ranks = Some(known.unwrap_or_default());
    }
    Ok(Adapter::new(model, &config, settings.seed)?)
}

/// Reads batches for EVA's start, shows how far it is, and says what it has found.
fn eva_adapter(
    settings: &Settings,
    config: &LoraConfig,
    model: &Model,
    batches: &Batcher,
    terminal: Terminal,
) -> anyhow::Result<Adapter> {
    let mut search = progress::Search::new(terminal);
    let (seed, rows) = (settings.seed, settings.batch_size);
    let (adapter, found) = eva::start(model, config, seed, batches, rows, &mut |it| {
        search.show(it);
    })?;
    drop(search);
    let ranks = found.ranks.values().copied();
    let left_out: Vec<&str> = found
        .ranks
        .iter()
        .filter_map(|(path, rank)| (*rank == 0).then_some(path.as_str()))
        .collect();
    let least = ranks.clone().filter(|rank| *rank > 0).min().unwrap_or_default();
    let most = ranks.max().unwrap_or_default();
    terminal.note(format!(
        "EVA: read {} ({}); {}{}",
        plural(found.batches as u64, "batch"),
        plural(found.tokens as u64, "target token"),
        match least == most {
            true => format!("all ranks are {most}"),
            false => format!("ranks are {least} to {most}"),
        },
        match left_out.as_slice() {
            [] => String::new(),
            paths => {
                let count = are(paths.len() as u64, "layer");
                format!(", and {count} left out: {}", first_of(paths))
            }
        }
    ));
    Ok(adapter)
}

/// Where the base's weights lie, if that is possible here.
fn placement(asked: BasePlacement, device: &Device, start: &Start) -> anyhow::Result<Placement> {
    match asked {
        BasePlacement::Device => Ok(Placement::Device),
        BasePlacement::Host => models::host(device),
        BasePlacement::Sharded => match &start.shards {
            Some(shards) => Ok(Placement::Sharded(shards.clone())),
            None => Err(usage(
                "base_placement: is sharded, which needs several processes with an NVIDIA GPU each (--gpus, or torchrun); with one, \
                 expected device or host",
            )),
        },
    }
}

/// An error unless what the optimiser keeps can lie there.
fn check_optimizer_placement(
    settings: &Settings,
    device: &Device,
    processes: usize,
) -> anyhow::Result<()> {
    let placement = settings.optimizer_placement;
    metal_candle::train::OptimizerPlacement::from(placement)
        .check(&settings.optimizer()?, processes)
        .map_err(|error| usage(error.to_string()))?;
    match placement {
        OptimizerPlacement::Host => models::check_host("optimizer_placement", device),
        OptimizerPlacement::Device | OptimizerPlacement::Sharded => Ok(()),
    }
}

/// A loss with what else is worth knowing of it.
fn described(found: &Evaluation) -> String {
    match found.perplexity {
        Some(perplexity) => format!("{:.4} (perplexity {perplexity:.3})", found.loss),
        None => format!("{:.4}{}", found.loss, progress::most_telling(&found.metrics)),
    }
}

/// The time that chat templates are told: the one that is kept, or now, which is kept then.
pub fn template_time(kept: &mut Option<String>) -> anyhow::Result<NaiveDateTime> {
    let text = kept.get_or_insert_with(|| chrono::Local::now().format(TIME_FORMAT).to_string());
    NaiveDateTime::parse_from_str(text, TIME_FORMAT).map_err(|error| {
        usage(format!(
            "template_time: is {text:?}, expected a time such as 2025-01-31T12:00:00 ({error})"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use metal_candle::data::DataSource;

    #[test]
    fn files_of_folders_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display().to_string();
        let data = Data::of(&[path.clone(), "elsewhere.jsonl".into()]);
        let found = |split: &str, files: &[&str]| {
            let files: Vec<PathBuf> = files.iter().map(|file| folder.path().join(file)).collect();
            Found { split: split.into(), source: DataSource::new(files) }
        };
        let many: Vec<String> = (0..9).map(|index| format!("{index}.jsonl")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let elsewhere = DataSource::new([PathBuf::from("elsewhere.jsonl")]);
        let all = [
            found("train", &many),
            Found { split: "train".into(), source: elsewhere },
            found("valid", &["dev/a.jsonl"]),
        ];
        let expected = "train 0.jsonl, 1.jsonl, 2.jsonl, 3.jsonl, ...; valid dev/a.jsonl";
        assert_eq!(files_of_folders(&data, &all), [format!("data in {path}: {expected}")]);
    }
}
