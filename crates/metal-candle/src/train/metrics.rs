//! What happens in training, as typed events, and where they go.
//!
//! [`JsonLines`] keeps them in a file, one JSON object a line, so that a run can be followed with
//! `tail -f`, read by any tool, and continued: [`truncate_after`] takes a file back to the step
//! that a checkpoint was made at.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Deserializer, Serialize};

use crate::{Error, Result, files};

/// One event of a training run. `step` is the number of optimiser steps taken when it happened.
///
/// A number that JSON has no word for (NaN, infinity) is written as `null` and read as NaN.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Metric {
    /// A report over the steps since the last one.
    Train {
        /// Optimiser steps taken.
        step: u64,
        /// Passes over the training data, with the fraction of the one under way.
        epoch: f64,
        /// Mean cross entropy a trainable token, in nats.
        #[serde(deserialize_with = "number_or_null")]
        loss: f64,
        /// The rate of the last step.
        learning_rate: f64,
        /// L2 norm of the last step's gradient, before clipping.
        #[serde(deserialize_with = "number_or_null")]
        gradient_norm: f64,
        /// Trainable tokens in these steps.
        tokens: u64,
        /// Trainable tokens a second in these steps.
        #[serde(deserialize_with = "number_or_null")]
        tokens_per_second: f64,
        /// Trainable tokens since the run began.
        trained_tokens: u64,
        /// Steps skipped since the run began.
        skipped: u64,
        /// The most resident memory so far, in bytes, where the system says.
        peak_memory: Option<u64>,
    },
    /// A pass over the validation data.
    Evaluation {
        /// Optimiser steps taken.
        step: u64,
        /// Mean cross entropy a trainable token, in nats.
        #[serde(deserialize_with = "number_or_null")]
        loss: f64,
        /// `exp(loss)`.
        #[serde(deserialize_with = "number_or_null")]
        perplexity: f64,
        /// Trainable tokens it was measured on.
        tokens: u64,
        /// How long it took.
        seconds: f64,
    },
    /// A step that left the parameters as they were.
    Skipped {
        /// The step.
        step: u64,
        /// Why, in words.
        reason: String,
    },
    /// A text generated while training.
    Sample {
        /// Optimiser steps taken.
        step: u64,
        /// What it continues.
        prompt: String,
        /// What the model wrote.
        text: String,
    },
    /// A checkpoint is complete on the disk.
    Checkpoint {
        /// Optimiser steps taken.
        step: u64,
        /// The checkpoint's folder.
        path: PathBuf,
    },
    /// The run has ended.
    Finished {
        /// Optimiser steps taken.
        step: u64,
        /// Why, in words.
        reason: String,
        /// How long this process trained.
        seconds: f64,
    },
}

impl Metric {
    /// The number of optimiser steps taken when it happened.
    pub fn step(&self) -> u64 {
        match self {
            Self::Train { step, .. }
            | Self::Evaluation { step, .. }
            | Self::Skipped { step, .. }
            | Self::Sample { step, .. }
            | Self::Checkpoint { step, .. }
            | Self::Finished { step, .. } => *step,
        }
    }
}

fn number_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

/// Something that takes the events of a run: a file, a progress bar, a closure.
pub trait MetricsSink {
    /// Takes one event.
    ///
    /// # Errors
    /// What keeps the sink from taking it, such as a full disk; the caller decides whether the run
    /// goes on.
    fn record(&mut self, metric: &Metric) -> Result<()>;
}

impl<F: FnMut(&Metric) -> Result<()>> MetricsSink for F {
    fn record(&mut self, metric: &Metric) -> Result<()> {
        self(metric)
    }
}

/// Gives every event to several sinks, in the order they were added.
#[derive(Default)]
pub struct FanOut<'a> {
    sinks: Vec<Box<dyn MetricsSink + 'a>>,
}

impl<'a> FanOut<'a> {
    /// Without sinks: events go nowhere.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a sink.
    pub fn push(&mut self, sink: impl MetricsSink + 'a) {
        self.sinks.push(Box::new(sink));
    }
}

impl MetricsSink for FanOut<'_> {
    /// Gives the event to every sink, also after one has failed.
    ///
    /// # Errors
    /// The first sink's error.
    fn record(&mut self, metric: &Metric) -> Result<()> {
        let mut result = Ok(());
        for sink in &mut self.sinks {
            result = result.and(sink.record(metric));
        }
        result
    }
}

/// Writes events to a file, one JSON object a line with the key `event`. Each line is handed to
/// the system in one piece as soon as it is recorded, so a killed process loses none that it
/// recorded and leaves at most the last one incomplete.
#[derive(Debug)]
pub struct JsonLines {
    path: PathBuf,
    file: File,
}

impl JsonLines {
    /// Begins an empty file, in the place of one that is there.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be written.
    pub fn create(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        let file = File::create(&path).map_err(Error::io(&path))?;
        Ok(Self { path, file })
    }

    /// Continues a file from `step`, after [`truncate_after`].
    ///
    /// # Errors
    /// As [`truncate_after`].
    pub fn resume(path: impl AsRef<Path>, step: u64) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        truncate_after(&path, step)?;
        let file =
            OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io(&path))?;
        Ok(Self { path, file })
    }
}

impl MetricsSink for JsonLines {
    fn record(&mut self, metric: &Metric) -> Result<()> {
        let mut line = serde_json::to_vec(metric)
            .map_err(|error| Error::file(&self.path, format!("cannot be written: {error}")))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(Error::io(&self.path))
    }
}

/// Removes the lines of steps after `step` from a metrics file, and an incomplete last line. The
/// file is replaced as a whole, and only when there is something to remove; one that does not
/// exist stays so.
///
/// # Errors
/// [`Error::Io`] when the file cannot be read or replaced, [`Error::Record`] for a complete line
/// that is not an object with a `step`. The file is unchanged then.
pub fn truncate_after(path: impl AsRef<Path>, step: u64) -> Result<()> {
    #[derive(Deserialize)]
    struct Step {
        step: u64,
    }
    let path = path.as_ref();
    let Some(content) = read_if_there(path)? else { return Ok(()) };
    let mut kept = Vec::with_capacity(content.len());
    for (number, line) in complete_lines(&content) {
        let found: Step = parse(path, number, line)?;
        if found.step <= step {
            kept.extend_from_slice(line);
        }
    }
    if kept.len() == content.len() { Ok(()) } else { files::write_bytes_atomic(path, kept) }
}

/// Reads a metrics file's events, without an incomplete last line, for a curve over a run that was
/// resumed. A file that does not exist has none.
///
/// # Errors
/// [`Error::Io`] when the file cannot be read, [`Error::Record`] for a line that is not an event.
pub fn read(path: impl AsRef<Path>) -> Result<Vec<Metric>> {
    let path = path.as_ref();
    let Some(content) = read_if_there(path)? else { return Ok(Vec::new()) };
    complete_lines(&content).map(|(number, line)| parse(path, number, line)).collect()
}

fn read_if_there(path: &Path) -> Result<Option<Vec<u8>>> {
    match std::fs::read(path) {
        Ok(content) => Ok(Some(content)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(Error::io(path)(error)),
    }
}

/// The lines that end in a line feed, with it, counted from 1.
fn complete_lines(content: &[u8]) -> impl Iterator<Item = (usize, &[u8])> {
    (1..).zip(content.split_inclusive(|&byte| byte == b'\n').filter(|line| line.ends_with(b"\n")))
}

fn parse<'a, T: Deserialize<'a>>(path: &Path, line: usize, content: &'a [u8]) -> Result<T> {
    serde_json::from_slice(content).map_err(|error| Error::Record {
        path: path.to_path_buf(),
        line,
        message: format!("not an event of a metrics file: {error}"),
    })
}
