//! The training run of a job, on the server's own frozen base and in turns with its engine.

use super::basis::Basis;
use super::log::{Length, Log, steps_there};
use super::plan::Plan;
use super::results;
use super::samples::Samples;
use super::validate::tokenizer;
use crate::app::Shared;
use crate::store::{Job, JobError, Started, Store, checkpoint_folder};
use metal_candle::adapter::{Adapter, LoraConfig};
use metal_candle::data::{Batcher, DataSource, tokenize};
use metal_candle::text::{Tokenizer, chat_template_in};
use metal_candle::train::{Outcome, Trainer, know_base, latest_checkpoint};
use metal_candle::{Error, Result, files};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::runtime::Handle;

/// What only a run that goes on has a use for.
const OF_THE_RUN: [&str; 2] = ["optimizer.safetensors", "trainer_state.json"];

/// How a run came to its end.
enum Ended {
    /// All steps were taken. How many tokens were read.
    Trained(i64),
    /// It was told to stop.
    Stopped,
    /// It cannot go on from its checkpoints with this server, and stays as it is. Why.
    Waits(String),
}

/// Why a run failed.
enum Failure {
    /// The file that this parameter names cannot be learned from.
    File(&'static str, Error),
    Run(Error),
    Told(JobError),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Run(error)
    }
}

/// Trains a job, or goes on with it, until it has ended or is told to stop.
pub(super) fn work(app: &Shared, runtime: &Handle, job: &Job) -> Result<()> {
    let store = &app.store;
    let stop = store.signals.begin(&job.id);
    let result = match store.start_job(&job.id)? {
        // Whoever turned it has the word.
        Started::No => Ok(Ended::Stopped),
        Started::Yes => train(app, runtime, job, &stop),
        Started::Deadly(deaths) => Err(Failure::Told(JobError {
            code: "server_died".into(),
            message: format!(
                "The server has died {deaths} times while it trained this job and before the next checkpoint. There may be \
                 too little memory for it; a smaller batch_size or shorter examples take less."
            ),
            param: None,
        })),
    };
    store.signals.end();
    match result {
        Ok(Ended::Trained(tokens)) => {
            let mut results = store.begin_file()?;
            results.write(results::csv(&store.run_events(job)?).as_bytes())?;
            store.finish_job(job, tokens, results, results::NAME)?;
        }
        Ok(Ended::Stopped) => store.put_back(&job.id)?,
        Ok(Ended::Waits(reason)) => {
            tracing::warn!("{}: {reason}", job.id);
            store.set_aside(&job.id, &reason)?;
        }
        Err(failure) => store.fail_job(&job.id, &told(app, failure))?,
    }
    if store.job(&job.id)?.is_some_and(|job| job.status.has_ended()) {
        tidy(store, job)?;
    }
    Ok(())
}

fn train(
    app: &Shared,
    runtime: &Handle,
    job: &Job,
    stop: &Arc<AtomicBool>,
) -> Result<Ended, Failure> {
    let Some(plan) = &job.plan else {
        return Err(Failure::Run(Error::option("plan", "is missing in the queue")));
    };
    let folder = app.store.run_folder(job);
    std::fs::create_dir_all(&folder).map_err(Error::io(&folder))?;
    let tokenizer = tokenizer(app, runtime, job).map_err(Failure::Told)?;
    let basis = Basis::of(app, &tokenizer);
    if latest_checkpoint(&folder)?.is_some()
        && let Some(refusal) = Basis::kept(&folder).and_then(|begun| basis.refusal(&begun))
    {
        return Ok(Ended::Waits(refusal));
    }
    let asked = &job.asked;
    let training = batches(app, job, plan, &tokenizer, "training_file", &asked.training_file)?;
    let validation = match &asked.validation_file {
        Some(file) => Some(batches(app, job, plan, &tokenizer, "validation_file", file)?),
        None => None,
    };
    if stop.load(Ordering::Relaxed) {
        return Ok(Ended::Stopped);
    }
    let batches_of_epoch = training.batch_count(0);
    let options = plan.train_options(batches_of_epoch)?;
    let samples = samples(app, job, plan, &tokenizer, stop)?;
    let length = Length {
        steps: options.steps,
        of_epoch: plan.steps_of_epoch(batches_of_epoch),
        save_every: options.save_every,
    };
    let start = start_folder(app, job)?;
    let refused = |error: Error| -> Result<Ended, Failure> {
        if latest_checkpoint(&folder)?.is_none() {
            return Err(error.into());
        }
        // Whoever looks after the server may put back what is missing, so nothing is given up.
        let error = app.store.without_paths(&error.to_string());
        Ok(Ended::Waits(format!(
            "The job waits, as the server cannot go on from its checkpoints: {error}. Nothing of it is removed: resume it \
             once that is mended, or cancel it."
        )))
    };
    // A large base takes minutes to read, in which texts go on being written.
    if let Err(error) = know_base(&app.model, &folder, app.store.folder()) {
        return refused(error);
    }
    let (mut trainer, position) = {
        let _turn = app.turns.hold();
        let adapter = match &start {
            None => Adapter::new(&app.model, &LoraConfig::default(), plan.seed)?,
            Some(start) => Adapter::load(&app.model, start)?,
        };
        let compares = options.objective.uses_reference();
        let mut trainer = Trainer::new(
            &app.model,
            &Arc::new(adapter),
            &training,
            options,
            &folder,
            &app.options.model_name,
        )?
        .with_turns(app.turns.clone())
        .with_stop(stop.clone())
        .with_samples(Box::new(|model, adapter, _| samples.write(model, adapter)));
        if let Some(validation) = &validation {
            trainer = trainer.with_validation(validation);
        }
        if let Some(template) = tokenizer.chat_template() {
            trainer = trainer.with_chat_template(template);
        }
        if let Some(start) = &start {
            if compares {
                trainer = trainer.with_reference(Arc::new(Adapter::load(&app.model, start)?))?;
            }
            if let Some(source) = chat_template_in(start)? {
                trainer = trainer.with_saved_chat_template(source);
            }
        }
        if let Err(error) = trainer.resume_newest(&folder) {
            return refused(error);
        }
        app.model.device().synchronize().map_err(Error::from)?;
        let position = trainer.position();
        (trainer, position)
    };
    basis.keep(&folder);
    app.store.rewind(job, position)?;
    let mut log = Log::new(&app.store, job, length, position.step);
    let summary = trainer.run(&mut log)?;
    if summary.outcome == Outcome::Interrupted {
        return Ok(Ended::Stopped);
    }
    let tokens = training.dataset().report.tokens as i64;
    Ok(Ended::Trained(tokens.saturating_mul(i64::from(plan.n_epochs))))
}

/// What writes samples of the job: to prompts of its validation file, or of its training file where it has no other.
fn samples(
    app: &Shared,
    job: &Job,
    plan: &Plan,
    tokenizer: &Arc<Tokenizer>,
    stop: &Arc<AtomicBool>,
) -> Result<Samples, Failure> {
    let (param, file) = match &job.asked.validation_file {
        Some(file) => ("validation_file", file),
        None => ("training_file", &job.asked.training_file),
    };
    let path = stored(app, param, file)?;
    let options = plan.data_options(&app.store.run_folder(job))?;
    let context = app.model.config().context();
    let samples = Samples::of_file(&path, &options, tokenizer, context, &app.turns, stop);
    samples.map_err(|error| Failure::File(param, error))
}

/// Where a file of the job lies.
fn stored(app: &Shared, param: &'static str, file: &str) -> Result<PathBuf, Failure> {
    let missing = || Error::option("file", format!("{file} is not there any more"));
    let stored = app.store.file(file)?.ok_or_else(|| Failure::File(param, missing()))?;
    Ok(app.store.file_path(&stored))
}

/// The examples of a file, in batches.
fn batches(
    app: &Shared,
    job: &Job,
    plan: &Plan,
    tokenizer: &Tokenizer,
    param: &'static str,
    file: &str,
) -> Result<Batcher, Failure> {
    let options = plan.data_options(&app.store.run_folder(job))?;
    let source = DataSource::new([stored(app, param, file)?]);
    let read = || {
        let dataset = tokenize(&[source], tokenizer, &options)?.into_dataset()?;
        dataset.check_vocabulary(app.model.config().vocab_size)?;
        Batcher::new(Arc::new(dataset), plan.batch_options())
    };
    read().map_err(|error| Failure::File(param, error))
}

/// The folder of the model that a job goes on from, if it isn't the base.
fn start_folder(app: &Shared, job: &Job) -> Result<Option<PathBuf>, Failure> {
    if job.asked.model == job.asked.base {
        return Ok(None);
    }
    match app.store.tuned_by_name(&job.asked.model)? {
        Some(tuned) => Ok(Some(tuned.folder)),
        None => Err(Failure::Told(JobError {
            code: "model_not_found".into(),
            message: format!("The model {} is not there any more.", job.asked.model),
            param: Some("model".into()),
        })),
    }
}

/// What is said of a failure.
fn told(app: &Shared, failure: Failure) -> JobError {
    let (code, param, error) = match failure {
        Failure::Told(error) => return error,
        Failure::File(param, error) => (format!("invalid_{param}"), Some(param), error),
        Failure::Run(error @ Error::Diverged(_)) => ("training_diverged".into(), None, error),
        Failure::Run(error) => ("training_failed".into(), None, error),
    };
    let message = app.store.without_paths(&error.to_string());
    JobError { code, message, param: param.map(String::from) }
}

/// Removes what nobody needs of a run that has ended: the checkpoints that nobody was told of, and of the others what
/// only a run that goes on reads.
pub(crate) fn tidy(store: &Store, job: &Job) -> Result<()> {
    let folder = store.run_folder(job);
    let told_of = store.checkpoint_steps(job)?;
    for step in steps_there(&folder.join("checkpoints"))? {
        let checkpoint = checkpoint_folder(&folder, step);
        if !told_of.contains(&step) {
            files::remove_folder_atomic(&checkpoint)?;
            continue;
        }
        for name in OF_THE_RUN {
            let path = checkpoint.join(name);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io(&path)(error));
                }
                _ => {}
            }
        }
    }
    Ok(())
}

/// Tidies the runs of all jobs that have ended, as a server may have died between the end of one and its tidying. What
/// cannot be removed is told of and stays.
pub(crate) fn tidy_ended(store: &Store) -> Result<()> {
    for job in store.ended_jobs()? {
        if let Err(error) = tidy(store, &job) {
            tracing::warn!("what the run of {} has left cannot be removed: {error}", job.id);
        }
    }
    Ok(())
}
