//! What a training run tells, as events and checkpoints of its job.

use crate::app::now;
use crate::store::{Event, Job, Level, NewEvent, Place, Status, Store};
use metal_candle::train::{Metric, MetricsSink, TOKEN_ACCURACY};
use metal_candle::{Error, Result};
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Instant;

pub(super) const TRAIN_LOSS: &str = "train_loss";
pub(super) const TRAIN_ACCURACY: &str = "train_mean_token_accuracy";
pub(super) const VALID_LOSS: &str = "valid_loss";
pub(super) const VALID_ACCURACY: &str = "valid_mean_token_accuracy";
/// All of the validation data are read each time.
const FULL_VALID_LOSS: &str = "full_valid_loss";
const FULL_VALID_ACCURACY: &str = "full_valid_mean_token_accuracy";

/// How long a run is, in steps.
#[derive(Debug, Clone, Copy)]
pub(super) struct Length {
    pub steps: u64,
    /// One epoch. Each ends with a checkpoint.
    pub of_epoch: u64,
    /// Between the checkpoints within an epoch; 0 where there are none.
    pub save_every: u64,
}

impl Length {
    /// Whether the run itself makes a checkpoint after this step.
    fn has_checkpoint(&self, step: u64) -> bool {
        let is_multiple = |of: u64| of > 0 && step.is_multiple_of(of);
        step > 0
            && (is_multiple(self.save_every) || is_multiple(self.of_epoch) || step == self.steps)
    }
}

/// Takes what a run tells.
pub(super) struct Log<'a> {
    store: &'a Store,
    job: &'a Job,
    length: Length,
    /// Of the whole run.
    steps: i64,
    /// The step of the last sample, and how many it has so far.
    samples: (i64, usize),
    /// When this part of the run began, and after which step.
    began: (Instant, i64),
}

impl<'a> Log<'a> {
    /// That of a run which goes on after the step `from`.
    pub fn new(store: &'a Store, job: &'a Job, length: Length, from: u64) -> Self {
        let began = (Instant::now(), whole(from));
        Self { store, job, length, steps: whole(length.steps), samples: (0, 0), began }
    }

    fn tell(&self, message: String, data: Map<String, Value>, place: (i64, Place)) -> Result<()> {
        let (step, of_step) = place;
        let event = NewEvent::told(format!("Step {step}/{}: {message}", self.steps));
        let event = event.at(step, of_step).with(data);
        self.store.tell(self.job, event, self.estimated_finish(step))
    }

    /// When the run ends if it goes on as it has so far.
    fn estimated_finish(&self, step: i64) -> Option<i64> {
        let (began, from) = self.began;
        let done = step - from;
        (done > 0).then(|| {
            let left = (self.steps - step) as f64 * began.elapsed().as_secs_f64() / done as f64;
            now() + left.ceil() as i64
        })
    }

    /// The figures of a step, all of the names that OpenAI has.
    fn figures(&self, step: i64, known: &[(&str, Value)]) -> Map<String, Value> {
        let mut data = Map::new();
        data.insert("step".into(), json!(step));
        data.insert("total_steps".into(), json!(self.steps));
        for name in [TRAIN_LOSS, TRAIN_ACCURACY, VALID_LOSS, VALID_ACCURACY] {
            data.insert(name.into(), Value::Null);
        }
        for (name, value) in known {
            data.insert((*name).into(), value.clone());
        }
        data
    }

    fn sample(&mut self, step: i64, prompt: &str, text: &str) -> Result<()> {
        let number = if self.samples.0 == step { self.samples.1 + 1 } else { 1 };
        self.samples = (step, number);
        let data = [("step", json!(step)), ("prompt", json!(prompt)), ("text", json!(text))];
        let data = data.map(|(name, value)| (name.to_string(), value)).into_iter().collect();
        self.tell(format!("sample {number}"), data, (step, Place::Sampled(number)))
    }

    fn checkpoint(&self, step: u64, folder: &Path) -> Result<()> {
        let is_due = self.length.has_checkpoint(step);
        let step = whole(step);
        // One that is made as the server ends is only for the run that goes on.
        let status = self.store.job(&self.job.id)?.map(|job| job.status);
        let is_wanted = matches!(status, Some(Status::Paused | Status::Cancelled));
        if step == 0 || !(is_due || is_wanted) {
            return Ok(());
        }
        let metrics = checkpoint_metrics(&self.store.run_events(self.job)?, step);
        let there = match folder.parent() {
            Some(parent) => steps_there(parent)?,
            None => BTreeSet::from([step]),
        };
        self.store.add_checkpoint(self.job, step, &metrics, &there)
    }
}

impl MetricsSink for Log<'_> {
    fn log(&mut self, metric: &Metric) -> Result<()> {
        let step = whole(metric.step());
        match metric {
            Metric::Train {
                epoch,
                loss,
                metrics,
                learning_rate,
                tokens_per_second,
                trained_tokens,
                ..
            } => {
                let mut known = vec![
                    (TRAIN_LOSS, json!(loss)),
                    ("epoch", json!(epoch)),
                    ("learning_rate", json!(learning_rate)),
                    ("tokens_per_second", json!(tokens_per_second)),
                    ("trained_tokens", json!(trained_tokens)),
                ];
                known.extend(
                    metrics.get(TOKEN_ACCURACY).map(|share| (TRAIN_ACCURACY, json!(share))),
                );
                known.extend(others(metrics));
                let data = self.figures(step, &known);
                self.tell(format!("training loss={loss:.4}"), data, (step, Place::Trained))
            }
            Metric::Evaluation { loss, metrics, .. } => {
                let mut known = vec![(VALID_LOSS, json!(loss)), (FULL_VALID_LOSS, json!(loss))];
                if let Some(share) = metrics.get(TOKEN_ACCURACY) {
                    known.push((VALID_ACCURACY, json!(share)));
                    known.push((FULL_VALID_ACCURACY, json!(share)));
                }
                known.extend(others(metrics));
                let data = self.figures(step, &known);
                self.tell(format!("validation loss={loss:.4}"), data, (step, Place::Evaluated))
            }
            Metric::Skipped { reason, .. } => {
                let message = format!("Step {step}/{} was skipped: {reason}", self.steps);
                let event = NewEvent::of(Level::Warn, message).at(step, Place::Skipped);
                self.store.tell(self.job, event, None)
            }
            Metric::Sample { prompt, text, .. } => self.sample(step, prompt, text),
            Metric::Checkpoint { step, path, .. } => self.checkpoint(*step, path),
            _ => Ok(()),
        }
    }
}

/// What else an objective reports, such as rewards.
fn others(metrics: &BTreeMap<String, f64>) -> Option<(&'static str, Value)> {
    let others: BTreeMap<_, _> =
        metrics.iter().filter(|(name, _)| *name != TOKEN_ACCURACY).collect();
    (!others.is_empty()).then(|| ("metrics", json!(others)))
}

/// The figures of a checkpoint: the last training loss before it, and what its evaluation found.
fn checkpoint_metrics(events: &[Event], step: i64) -> Map<String, Value> {
    let mut metrics = Map::new();
    metrics.insert("step".into(), json!(step));
    for event in events {
        let (Some((of, _)), Some(data)) = (&event.place, &event.data) else { continue };
        for name in [
            TRAIN_LOSS,
            TRAIN_ACCURACY,
            VALID_LOSS,
            VALID_ACCURACY,
            FULL_VALID_LOSS,
            FULL_VALID_ACCURACY,
        ] {
            let is_of_training = [TRAIN_LOSS, TRAIN_ACCURACY].contains(&name);
            let counts = *of == step || (is_of_training && *of < step);
            if let Some(value) = data.get(name).filter(|value| counts && !value.is_null()) {
                metrics.insert(name.into(), value.clone());
            }
        }
    }
    metrics
}

/// The steps of the checkpoints in a folder of them.
pub(super) fn steps_there(folder: &Path) -> Result<BTreeSet<i64>> {
    let mut steps = BTreeSet::new();
    let entries = match std::fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(steps),
        entries => entries.map_err(Error::io(folder))?,
    };
    for entry in entries {
        let name = entry.map_err(Error::io(folder))?.file_name();
        steps
            .extend(name.to_str().and_then(|name| name.strip_prefix("step-")?.parse::<i64>().ok()));
    }
    Ok(steps)
}

fn whole(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}
