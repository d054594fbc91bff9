//! What happens in training, as typed events, and where they go.
//!
//! [`JsonLines`] keeps them in a file, one JSON object a line, so that a run can be followed with
//! `tail -f`, read by any tool, and continued: [`truncate_after`] takes a file back to the position
//! of a checkpoint, so that the log of a run is the same whether or not it was interrupted.

use std::collections::BTreeMap;
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
        /// Mean cross entropy a trainable token, in nats; of another objective its mean over pairs or answers.
        #[serde(deserialize_with = "number_or_null")]
        loss: f64,
        /// What else the objective reports, by name: means over these steps.
        #[serde(
            default,
            skip_serializing_if = "BTreeMap::is_empty",
            deserialize_with = "numbers_or_nulls"
        )]
        metrics: BTreeMap<String, f64>,
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
        /// Tokens a second that were read in these steps: the trainable ones and those before them, but
        /// not padding. 0 in files of versions that didn't count them.
        #[serde(default, deserialize_with = "number_or_null")]
        processed_tokens_per_second: f64,
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
        /// Mean cross entropy a trainable token, in nats; of another objective its mean over pairs or answers.
        #[serde(deserialize_with = "number_or_null")]
        loss: f64,
        /// `exp(loss)`, of a cross entropy.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        perplexity: Option<f64>,
        /// What else the objective reports, by name.
        #[serde(
            default,
            skip_serializing_if = "BTreeMap::is_empty",
            deserialize_with = "numbers_or_nulls"
        )]
        metrics: BTreeMap<String, f64>,
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
        /// How long training waited for it, in seconds.
        #[serde(default)]
        waited: f64,
        /// How long it was being written, most of it beside training, in seconds.
        #[serde(default)]
        seconds: f64,
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

/// What an optimiser step is followed by, in this order, where it is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// The step is taken and reported.
    Trained,
    /// It was evaluated, if that was due.
    Evaluated,
    /// Samples were shown, if they were due.
    Sampled,
}

/// How far a run had come when a checkpoint was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    /// Optimiser steps taken.
    pub step: u64,
    /// What was done after the last of them.
    pub phase: Phase,
}

impl Position {
    /// Whether a log that is taken back to this position keeps an event: all that happened before.
    /// A run that continues from here logs its checkpoint again if one was due, and its end.
    pub(super) fn keeps(self, event: &str, step: u64) -> bool {
        let phase = match event {
            "finished" => return false,
            "checkpoint" => return step < self.step,
            "evaluation" => Phase::Evaluated,
            "sample" => Phase::Sampled,
            _ => Phase::Trained,
        };
        Self { step, phase } <= self
    }
}

pub(super) fn number_or_null<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or(f64::NAN))
}

pub(super) fn numbers_or_nulls<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, f64>, D::Error> {
    let numbers = BTreeMap::<String, Option<f64>>::deserialize(deserializer)?;
    Ok(numbers.into_iter().map(|(name, number)| (name, number.unwrap_or(f64::NAN))).collect())
}

/// Something that takes the events of a run: a file, a progress bar, a closure.
pub trait MetricsSink {
    /// Takes one event.
    ///
    /// # Errors
    /// What keeps the sink from taking it, such as a full disk; the caller decides whether the run
    /// goes on.
    fn log(&mut self, metric: &Metric) -> Result<()>;

    /// Is told after every optimiser step, whether or not there is something to report, how many were
    /// taken.
    ///
    /// # Errors
    /// As [`Self::log`].
    fn step(&mut self, _step: u64) -> Result<()> {
        Ok(())
    }

    /// The files that hold what was logged, by their paths. They are flushed to the disk before a checkpoint gets its
    /// name, so that after a power cut no log ends before it.
    ///
    /// # Errors
    /// [`Error::Io`] when a file has no further handle.
    fn files(&self) -> Result<Vec<(PathBuf, File)>> {
        Ok(Vec::new())
    }
}

/// A further handle of a log, if it is a file that can be flushed to the disk, as a pipe can't.
pub(super) fn handle(path: &Path, file: &File) -> Result<Vec<(PathBuf, File)>> {
    if !file.metadata().map_err(Error::io(path))?.is_file() {
        return Ok(Vec::new());
    }
    Ok(vec![(path.to_path_buf(), file.try_clone().map_err(Error::io(path))?)])
}

impl<F: FnMut(&Metric) -> Result<()>> MetricsSink for F {
    fn log(&mut self, metric: &Metric) -> Result<()> {
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
    fn log(&mut self, metric: &Metric) -> Result<()> {
        let mut result = Ok(());
        for sink in &mut self.sinks {
            result = result.and(sink.log(metric));
        }
        result
    }

    fn step(&mut self, step: u64) -> Result<()> {
        let mut result = Ok(());
        for sink in &mut self.sinks {
            result = result.and(sink.step(step));
        }
        result
    }

    fn files(&self) -> Result<Vec<(PathBuf, File)>> {
        let of_each = self.sinks.iter().map(|sink| sink.files()).collect::<Result<Vec<_>>>()?;
        Ok(of_each.into_iter().flatten().collect())
    }
}

/// Writes events to a file, one JSON object a line with the key `event`. Each line is handed to
/// the system in one piece as soon as it is logged, so a killed process loses none that it
/// logged and leaves at most the last one incomplete.
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

    /// Continues a file from `position`, after [`truncate_after`].
    ///
    /// # Errors
    /// As [`truncate_after`].
    pub fn resume(path: impl AsRef<Path>, position: Position) -> Result<Self> {
        let path = path.as_ref().to_path_buf();
        truncate_after(&path, position)?;
        let file =
            OpenOptions::new().create(true).append(true).open(&path).map_err(Error::io(&path))?;
        Ok(Self { path, file })
    }
}

impl MetricsSink for JsonLines {
    fn log(&mut self, metric: &Metric) -> Result<()> {
        let mut line = serde_json::to_vec(metric)
            .map_err(|error| Error::file(&self.path, format!("cannot be written: {error}")))?;
        line.push(b'\n');
        self.file.write_all(&line).map_err(Error::io(&self.path))
    }

    fn files(&self) -> Result<Vec<(PathBuf, File)>> {
        handle(&self.path, &self.file)
    }
}

/// Removes the lines of what happened after `position` from a metrics file, those of the run's end and
/// an incomplete last line. The file is replaced as a whole, and only when there is something to
/// remove; one that does not exist stays so.
///
/// A line that is no event goes as well, as no log should keep a run from going on. The file as it was stays beside it
/// then, under its name with `.damaged` behind it, and a warning says so.
///
/// # Errors
/// [`Error::Io`] when the file cannot be read or replaced. It is unchanged then.
pub fn truncate_after(path: impl AsRef<Path>, position: Position) -> Result<()> {
    #[derive(Deserialize)]
    struct Line {
        event: String,
        step: u64,
    }
    let path = path.as_ref();
    let Some(content) = read_if_there(path)? else { return Ok(()) };
    let mut kept = Vec::with_capacity(content.len());
    let mut damaged = None;
    for (number, line) in complete_lines(&content) {
        let whole = parse::<Metric>(path, number, line);
        match whole.and_then(|_| parse::<Line>(path, number, line)) {
            Ok(Line { event, step }) if position.keeps(&event, step) => {
                kept.extend_from_slice(line);
            }
            Ok(_) => {}
            Err(error) => damaged = damaged.or(Some(error)),
        }
    }
    if let Some(error) = damaged {
        let aside = free_name(path);
        files::write_bytes_atomic(&aside, &content)?;
        tracing::warn!(
            "{error}; the log goes on with the lines that are whole, and stays as it was in {}",
            aside.display()
        );
    }
    if kept.len() == content.len() { Ok(()) } else { files::write_bytes_atomic(path, kept) }
}

/// A name beside a damaged file that nothing has yet.
fn free_name(path: &Path) -> PathBuf {
    let named = |end: String| {
        let mut name = path.as_os_str().to_os_string();
        name.push(end);
        PathBuf::from(name)
    };
    let mut aside = named(".damaged".into());
    let mut count = 1;
    while aside.exists() {
        count += 1;
        aside = named(format!(".damaged-{count}"));
    }
    aside
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

#[cfg(test)]
mod tests {
    use super::*;

    fn train(step: u64, loss: f64) -> Metric {
        Metric::Train {
            step,
            epoch: 0.25,
            loss,
            metrics: BTreeMap::from([("rewards/margins".into(), 0.25)]),
            learning_rate: 1e-4,
            gradient_norm: 0.5,
            tokens: 128,
            tokens_per_second: 1000.0,
            processed_tokens_per_second: 3000.0,
            trained_tokens: 128 * step,
            skipped: 0,
            peak_memory: None,
        }
    }

    fn every_kind(step: u64) -> Vec<Metric> {
        vec![
            train(step, 1.5),
            Metric::Evaluation {
                step,
                loss: 1.0,
                perplexity: Some(2.7),
                metrics: BTreeMap::new(),
                tokens: 9,
                seconds: 0.1,
            },
            Metric::Skipped { step, reason: "the loss is NaN".into() },
            Metric::Sample { step, prompt: "a\nb".into(), text: "\"ü\u{1f600}\"\r\n".into() },
            Metric::Checkpoint {
                step,
                path: "out/checkpoint-3".into(),
                waited: 0.01,
                seconds: 0.5,
            },
            Metric::Finished { step, reason: "all steps are done".into(), seconds: 3.5 },
        ]
    }

    fn written(path: &Path, metrics: &[Metric]) {
        let mut lines = JsonLines::create(path).expect("created");
        for metric in metrics {
            lines.log(metric).expect("logged");
        }
    }

    #[test]
    fn events_are_one_line_each_and_read_back_the_same() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        written(&path, &every_kind(3));
        let text = std::fs::read_to_string(&path).expect("UTF-8");
        assert_eq!(text.lines().count(), every_kind(3).len());
        assert!(text.starts_with(r#"{"event":"train","step":3,"#), "{text}");
        assert_eq!(read(&path).expect("read"), every_kind(3));
        assert!(every_kind(3).iter().all(|metric| metric.step() == 3));
    }

    #[test]
    fn numbers_that_json_lacks_become_null_and_then_nan() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let Metric::Train { mut metrics, .. } = train(1, 0.0) else { panic!("a report") };
        metrics.insert("entropy".into(), f64::NAN);
        let evaluation = Metric::Evaluation {
            step: 1,
            loss: f64::NAN,
            perplexity: Some(f64::NAN),
            metrics,
            tokens: 1,
            seconds: 0.1,
        };
        written(&path, &[train(1, f64::INFINITY), evaluation]);
        let text = std::fs::read_to_string(&path).expect("UTF-8");
        assert!(text.contains(r#""loss":null"#) && text.contains(r#""entropy":null"#), "{text}");
        let read = read(&path).expect("read");
        let [Metric::Train { loss, .. }, Metric::Evaluation { metrics, .. }] = &read[..] else {
            panic!("two events")
        };
        assert!(loss.is_nan() && metrics["entropy"].is_nan());
    }

    fn after(step: u64) -> Position {
        Position { step, phase: Phase::Sampled }
    }

    #[test]
    fn truncation_removes_later_steps_and_an_incomplete_line() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let metrics: Vec<_> = (1..=5)
            .flat_map(every_kind)
            .filter(|metric| !matches!(metric, Metric::Finished { .. }))
            .collect();
        for incomplete in ["", "{", r#"{"event":"train","step":2"#, "\0\0\0", "\u{fffd}"] {
            written(&path, &metrics);
            let mut file = OpenOptions::new().append(true).open(&path).expect("open");
            file.write_all(incomplete.as_bytes()).expect("written");
            assert_eq!(read(&path).expect("read"), metrics, "{incomplete:?}");

            truncate_after(&path, after(u64::MAX)).expect("truncated");
            assert_eq!(read(&path).expect("read"), metrics, "{incomplete:?}");
            let mut lines = JsonLines::resume(&path, after(3)).expect("resumed");
            lines.log(&train(4, 9.0)).expect("logged");
            // The checkpoint of step 3 is logged again by the run that continues from it.
            let mut expected = metrics[..14].to_vec();
            expected.push(train(4, 9.0));
            assert_eq!(read(&path).expect("read"), expected);
            assert_eq!(std::fs::read(&path).expect("read").last(), Some(&b'\n'));
        }
    }

    #[test]
    fn truncation_keeps_of_the_last_step_what_came_before_the_checkpoint() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let metrics: Vec<_> = (1..=2).flat_map(every_kind).collect();
        for phase in [Phase::Trained, Phase::Evaluated, Phase::Sampled] {
            written(&path, &metrics);
            truncate_after(&path, Position { step: 2, phase }).expect("truncated");
            let mut expected = metrics.clone();
            // The end of the first part.
            expected.remove(5);
            expected.retain(|metric| {
                metric.step() == 1
                    || match metric {
                        Metric::Evaluation { .. } => phase >= Phase::Evaluated,
                        Metric::Sample { .. } => phase >= Phase::Sampled,
                        Metric::Checkpoint { .. } | Metric::Finished { .. } => false,
                        _ => true,
                    }
            });
            assert_eq!(read(&path).expect("read"), expected, "{phase:?}");
        }
    }

    #[test]
    fn a_file_cut_at_any_byte_can_be_resumed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        written(&path, &every_kind(1));
        let whole = std::fs::read(&path).expect("read");
        for length in 0..=whole.len() {
            std::fs::write(&path, &whole[..length]).expect("written");
            let mut lines = JsonLines::resume(&path, after(2)).expect("resumed");
            lines.log(&train(3, 1.0)).expect("logged");
            let complete = whole[..length].iter().filter(|&&byte| byte == b'\n').count();
            // All but the end of the run.
            assert_eq!(read(&path).expect("read").len(), complete.min(5) + 1, "cut at {length}");
        }
    }

    #[test]
    fn a_missing_file_is_an_empty_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        truncate_after(&path, after(3)).expect("nothing to do");
        assert!(!path.exists());
        assert_eq!(read(&path).expect("read"), []);
        JsonLines::resume(&path, after(3)).expect("begun").log(&train(4, 1.0)).expect("logged");
        assert_eq!(read(&path).expect("read"), [train(4, 1.0)]);
    }

    #[test]
    fn a_log_with_a_line_that_is_no_event_is_set_aside_and_goes_on() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let bad_lines = [
            "oops",
            "{}",
            "[]",
            r#"{"event":"train","step":-1}"#,
            r#"{"event":"train","step":1}"#,
            "\0",
            "",
        ];
        for (count, bad) in (1..).zip(bad_lines) {
            let good = "{\"event\":\"skipped\",\"step\":1,\"reason\":\"\"}\n";
            let later = "{\"event\":\"skipped\",\"step\":9,\"reason\":\"\"}\n";
            let content = format!("{good}{bad}\n{good}{later}");
            std::fs::write(&path, &content).expect("written");
            let error = read(&path).expect_err(bad).to_string();
            assert!(error.contains("metrics.jsonl:2: not an event"), "{error}");

            let mut lines = JsonLines::resume(&path, after(1)).expect("resumed");
            lines.log(&train(2, 1.0)).expect("logged");
            let skipped = Metric::Skipped { step: 1, reason: String::new() };
            assert_eq!(read(&path).expect(bad), [skipped.clone(), skipped, train(2, 1.0)]);
            let aside = match count {
                1 => "metrics.jsonl.damaged".to_string(),
                count => format!("metrics.jsonl.damaged-{count}"),
            };
            let aside = std::fs::read_to_string(folder.path().join(aside)).expect("set aside");
            assert_eq!(aside, content);
        }
    }

    #[test]
    fn sinks_name_their_files_to_be_flushed() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("metrics.jsonl");
        let mut sinks = FanOut::new();
        sinks.push(|_: &Metric| Ok(()));
        sinks.push(JsonLines::create(&path).expect("created"));
        sinks.push(crate::train::TensorBoard::create(folder.path()).expect("created"));
        let files = sinks.files().expect("handles");
        assert_eq!(files.len(), 2);
        assert_eq!(files[0].0, path);
    }

    #[test]
    fn every_sink_gets_every_event_also_after_one_failed() {
        let (mut first, mut last) = (Vec::new(), Vec::new());
        let mut sinks = FanOut::new();
        sinks.push(|metric: &Metric| {
            first.push(metric.step());
            Ok(())
        });
        sinks.push(|_: &Metric| Err(Error::Unsupported("this".into())));
        sinks.push(|metric: &Metric| {
            last.push(metric.step());
            Ok(())
        });
        assert!(sinks.log(&train(1, 1.0)).is_err());
        assert!(sinks.log(&train(2, 1.0)).is_err());
        drop(sinks);
        assert_eq!((first, last), (vec![1, 2], vec![1, 2]));
    }
}
