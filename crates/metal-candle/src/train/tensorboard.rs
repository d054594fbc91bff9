//! Event files for TensorBoard.
//!
//! A file is a row of TFRecords, each the length of its data (u64), a checksum of the length, the
//! data and a checksum of the data, all little-endian. The checksum is CRC-32C (RFC 3720,
//! appendix B.4), masked: `rotate_right(crc, 15) + 0xa282ead8`. The data is an `Event` of
//! TensorFlow's `event.proto`, of which a few fields are needed:
//!
//! ```text
//! Event            1 wall_time: double   2 step: int64   3 file_version: string
//!                  5 summary: Summary    7 session_log: SessionLog
//! SessionLog       1 status: enum, START = 1
//! Summary          1 value: repeated Value
//! Value            1 tag: string   2 simple_value: float   8 tensor: TensorProto
//!                  9 metadata: SummaryMetadata
//! SummaryMetadata  1 plugin_data: { 1 plugin_name: string }
//! TensorProto      1 dtype: enum, DT_STRING = 7   2 tensor_shape: { 2 dim: { 1 size: int64 } }
//!                  8 string_val: repeated bytes
//! ```

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::metrics::{self, Metric, MetricsSink, Position};
use crate::{Error, Result};

/// What the names of event files begin with.
const FILE_NAME: &str = "events.out.tfevents.";

/// Writes a run's scalars and sampled texts to an event file.
///
/// Each TFRecord is handed to the system in one piece as soon as it is logged.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    file: File,
}

impl TensorBoard {
    /// Begins an event file in `folder`, which is made if it is missing.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder or the file cannot be written.
    pub fn create(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
        let seconds = wall_time() as u64;
        let name = format!("{FILE_NAME}{seconds:010}.{}", host_name());
        // Runs of the same second must not share a file, and TensorBoard reads a folder's files in
        // the order of their names.
        for attempt in 0u32.. {
            let path = folder.join(format!("{name}.{attempt}"));
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => {
                    let mut writer = Self { path, file };
                    writer.event(0, &file_version())?;
                    return Ok(writer);
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io(&path)(error)),
            }
        }
        Err(Error::file(folder, format!("holds every name of the form {name}.<number>")))
    }

    /// Begins an event file that continues the others in `folder` from `position`. What they hold of
    /// later is cut off, and a TensorBoard that has read it already no longer shows it.
    ///
    /// # Errors
    /// As [`TensorBoard::create`].
    pub fn resume(folder: impl AsRef<Path>, position: Position) -> Result<Self> {
        truncate_after(folder.as_ref(), position)?;
        let mut writer = Self::create(folder)?;
        writer.event(position.step.saturating_add(1), &session_start())?;
        Ok(writer)
    }

    /// The event files in a folder, which none may be.
    ///
    /// # Errors
    /// [`Error::Io`] when the folder cannot be read.
    pub fn files_in(folder: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
        let folder = folder.as_ref();
        let entries = match std::fs::read_dir(folder) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(Error::io(folder)(error)),
        };
        let mut files = Vec::new();
        for entry in entries {
            let entry = entry.map_err(Error::io(folder))?;
            if entry.file_name().to_string_lossy().starts_with(FILE_NAME) {
                files.push(entry.path());
            }
        }
        Ok(files)
    }

    /// The event file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Logs numbers under their tags.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be written.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<()> {
        self.event(step, &scalar_summary(values))
    }

    /// Logs a text, shown as Markdown, under its tag.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be written.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) -> Result<()> {
        self.event(step, &text_summary(tag, text))
    }

    fn event(&mut self, step: u64, content: &[u8]) -> Result<()> {
        let framed = tf_record(&event(wall_time(), step, content));
        self.file.write_all(&framed).map_err(Error::io(&self.path))
    }
}

/// An objective's metrics under the tags of a group.
fn tagged(group: &str, metrics: &BTreeMap<String, f64>) -> Vec<(String, f64)> {
    metrics.iter().map(|(name, value)| (format!("{group}/{name}"), *value)).collect()
}

impl MetricsSink for TensorBoard {
    fn log(&mut self, metric: &Metric) -> Result<()> {
        match metric {
            Metric::Train {
                step,
                epoch,
                loss,
                learning_rate,
                gradient_norm,
                tokens_per_second,
                processed_tokens_per_second,
                peak_memory,
                metrics,
                ..
            } => {
                let mut values = vec![
                    ("train/loss", *loss),
                    ("train/learning_rate", *learning_rate),
                    ("train/gradient_norm", *gradient_norm),
                    ("train/epoch", *epoch),
                    ("performance/tokens_per_second", *tokens_per_second),
                    ("performance/processed_tokens_per_second", *processed_tokens_per_second),
                ];
                if let Some(bytes) = peak_memory {
                    values
                        .push(("performance/peak_memory_gib", *bytes as f64 / (1u64 << 30) as f64));
                }
                let named = tagged("train", metrics);
                values.extend(named.iter().map(|(tag, value)| (tag.as_str(), *value)));
                self.scalars(*step, &values)
            }
            Metric::Evaluation { step, loss, perplexity, metrics, .. } => {
                let mut values = vec![("evaluation/loss", *loss)];
                values.extend(perplexity.map(|it| ("evaluation/perplexity", it)));
                let named = tagged("evaluation", metrics);
                values.extend(named.iter().map(|(tag, value)| (tag.as_str(), *value)));
                self.scalars(*step, &values)
            }
            Metric::Sample { step, prompt, text } => {
                // Indented by four, Markdown shows a text as it is.
                let quoted = |text: &str| format!("    {}", text.replace('\n', "\n    "));
                let text = format!("Prompt\n\n{}\n\nText\n\n{}", quoted(prompt), quoted(text));
                self.text(*step, "sample", &text)
            }
            Metric::Skipped { step, reason } => self.text(*step, "skipped", reason),
            Metric::Checkpoint { .. } | Metric::Finished { .. } => Ok(()),
        }
    }

    fn files(&self) -> Result<Vec<(PathBuf, File)>> {
        metrics::handle(&self.path, &self.file)
    }
}

/// Cuts the event files in `folder` off where what happened after `position` begins, or where a
/// record is incomplete.
fn truncate_after(folder: &Path, position: Position) -> Result<()> {
    for path in TensorBoard::files_in(folder)? {
        let content = std::fs::read(&path).map_err(Error::io(&path))?;
        let mut kept = 0;
        let end = loop {
            match next_tf_record(content.get(kept..).unwrap_or_default()) {
                TfRecord::Whole(data, length) if keeps(position, data) => kept += length,
                TfRecord::Whole(..) | TfRecord::Incomplete => break Some(kept),
                TfRecord::Malformed => break None,
            }
        };
        match end {
            Some(end) if end < content.len() => {
                let file = OpenOptions::new().write(true).open(&path).map_err(Error::io(&path))?;
                file.set_len(end as u64).map_err(Error::io(&path))?;
            }
            Some(_) => {}
            None => tracing::warn!("{}: is no event file, and stays as it is", path.display()),
        }
    }
    Ok(())
}

/// Whether a log that is taken back to `position` keeps this event.
fn keeps(position: Position, event: &[u8]) -> bool {
    let Some(event) = fields(event) else { return true };
    let step = event.iter().find(|field| field.0 == 2).map_or(0, |field| field.1);
    let summary = event.iter().find(|field| field.0 == 5).and_then(|field| fields(field.2));
    let value = summary.and_then(|values| fields(values.first()?.2));
    let Some((_, _, tag)) = value.and_then(|value| value.into_iter().find(|field| field.0 == 1))
    else {
        // The version of the file, or the start of a session.
        return true;
    };
    let kind = if tag.starts_with(b"evaluation/") {
        "evaluation"
    } else if tag == b"sample" {
        "sample"
    } else {
        "train"
    };
    position.keeps(kind, step)
}

/// The beginning of a row of TFRecords.
enum TfRecord<'a> {
    /// The data, and the length of the record around it.
    Whole(&'a [u8], usize),
    /// The file ends before the record.
    Incomplete,
    /// A checksum is wrong.
    Malformed,
}

fn next_tf_record(bytes: &[u8]) -> TfRecord<'_> {
    let Some((head, rest)) = bytes.split_first_chunk::<12>() else { return TfRecord::Incomplete };
    let [a, b, c, d, e, f, g, h, head_crc @ ..] = *head;
    let length = [a, b, c, d, e, f, g, h];
    if u32::from_le_bytes(head_crc) != masked_crc(&length) {
        return TfRecord::Malformed;
    }
    let length = usize::try_from(u64::from_le_bytes(length)).unwrap_or(usize::MAX);
    let Some((data, rest)) = rest.split_at_checked(length) else { return TfRecord::Incomplete };
    match rest.first_chunk::<4>() {
        None => TfRecord::Incomplete,
        Some(crc) if u32::from_le_bytes(*crc) != masked_crc(data) => TfRecord::Malformed,
        Some(_) => TfRecord::Whole(data, length + 16),
    }
}

/// A message's fields by their numbers: the value of an integer, the bytes of the rest.
fn fields(mut message: &[u8]) -> Option<Vec<(u64, u64, &[u8])>> {
    fn integer(message: &mut &[u8]) -> Option<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = message.split_first()?;
            *message = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    }
    let mut fields = Vec::new();
    while !message.is_empty() {
        let key = integer(&mut message)?;
        let (number, length) = match key & 7 {
            VARIABLE => (integer(&mut message)?, 0),
            FIXED_64 => (0, 8),
            FIXED_32 => (0, 4),
            BYTES => (0, usize::try_from(integer(&mut message)?).ok()?),
            _ => return None,
        };
        let (content, rest) = message.split_at_checked(length)?;
        fields.push((key >> 3, number, content));
        message = rest;
    }
    Some(fields)
}

fn event(wall_time: f64, step: u64, content: &[u8]) -> Vec<u8> {
    [&key(1, FIXED_64), &wall_time.to_le_bytes()[..], &integer_field(2, step), content].concat()
}

fn file_version() -> Vec<u8> {
    bytes_field(3, b"brain.Event:2")
}

fn session_start() -> Vec<u8> {
    bytes_field(7, &integer_field(1, 1))
}

fn scalar_summary(values: &[(&str, f64)]) -> Vec<u8> {
    let value = |&(tag, number): &(&str, f64)| {
        let number = (number as f32).to_le_bytes();
        let value = [&bytes_field(1, tag.as_bytes()), &key(2, FIXED_32), &number[..]].concat();
        bytes_field(1, &value)
    };
    bytes_field(5, &values.iter().flat_map(value).collect::<Vec<u8>>())
}

fn text_summary(tag: &str, text: &str) -> Vec<u8> {
    let shape = bytes_field(2, &integer_field(1, 1));
    let tensor = [integer_field(1, 7), bytes_field(2, &shape), bytes_field(8, text.as_bytes())];
    let plugin = bytes_field(1, &bytes_field(1, b"text"));
    let value =
        [bytes_field(1, tag.as_bytes()), bytes_field(8, &tensor.concat()), bytes_field(9, &plugin)];
    bytes_field(5, &bytes_field(1, &value.concat()))
}

const VARIABLE: u64 = 0;
const FIXED_64: u64 = 1;
const BYTES: u64 = 2;
const FIXED_32: u64 = 5;

/// The key of a field, from its number and wire type.
fn key(field: u64, wire_type: u64) -> Vec<u8> {
    variable(field << 3 | wire_type)
}

fn integer_field(field: u64, value: u64) -> Vec<u8> {
    [key(field, VARIABLE), variable(value)].concat()
}

/// A field of bytes, text or a message.
fn bytes_field(field: u64, bytes: &[u8]) -> Vec<u8> {
    [&key(field, BYTES), &variable(bytes.len() as u64), bytes].concat()
}

/// Seven bits a byte, the lowest first, the top bit set where more follow.
fn variable(mut value: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    while value >= 0x80 {
        bytes.push(value as u8 | 0x80);
        value >>= 7;
    }
    bytes.push(value as u8);
    bytes
}

/// Data as a TFRecord: length and data, each with its checksum.
fn tf_record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked_crc(&length).to_le_bytes(), data, &masked_crc(data).to_le_bytes()]
        .concat()
}

fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC-32C, a bit at a time: a record is some hundred bytes, and there is one a report.
fn crc32c(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            if crc & 1 == 1 { crc >> 1 ^ 0x82f6_3b78 } else { crc >> 1 }
        })
    })
}

fn wall_time() -> f64 {
    // A clock before 1970 is wrong anyway, and no reason to end a run.
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

/// This machine's name as far as a file name can hold it; it only tells files of several machines
/// apart.
pub(super) fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .or_else(|| std::env::var("COMPUTERNAME").ok())
        .unwrap_or_default();
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' };
    let name: String = name.trim().chars().take(64).map(allowed).collect();
    if name.is_empty() { "localhost".into() } else { name }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::super::metrics::Phase;
    use super::*;

    #[test]
    fn checksums_are_those_of_rfc_3720() {
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
    }

    /// Written by `RecordWriter` and the protobuf classes of tensorboard 2.21.0.
    #[test]
    fn tf_records_are_those_of_tensorboard() {
        let scalar = event(1.5, 300, &scalar_summary(&[("train/loss", 0.25)]));
        let text = event(1.5, 300, &text_summary("sample", "hi"));
        let start = event(1.5, 41, &session_start());
        for (event, expected) in [
            (
                scalar,
                "2100000000000000017becf609000000000000f83f10ac022a130a110a0a747261696e2f6c6f7373\
                 150000803e6557981f",
            ),
            (
                text,
                "300000000000000095f5d05f09000000000000f83f10ac022a220a200a0673616d706c65420c0807\
                 120412020801420268694a080a060a047465787422c65a7c",
            ),
            (start, "0f000000000000006d532b0909000000000000f83f10293a020801a6ac353d"),
        ] {
            let found: String =
                tf_record(&event).iter().map(|byte| format!("{byte:02x}")).collect();
            assert_eq!(found, expected);
        }
    }

    /// The data of each record.
    fn tf_records(mut file: &[u8]) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while !file.is_empty() {
            let TfRecord::Whole(data, length) = next_tf_record(file) else {
                panic!("a broken record")
            };
            records.push(data.to_vec());
            file = &file[length..];
        }
        records
    }

    /// Step, tag and number of every scalar in a file.
    fn scalars(path: &Path) -> Vec<(u64, String, f32)> {
        let mut found = Vec::new();
        for event in tf_records(&std::fs::read(path).expect("the file is there")) {
            let event = fields(&event).expect("a message");
            let step = event.iter().find(|field| field.0 == 2).expect("a step").1;
            for (_, _, summary) in event.iter().filter(|field| field.0 == 5) {
                for (_, _, value) in fields(summary).expect("a message") {
                    let value: BTreeMap<_, _> = fields(value)
                        .expect("a message")
                        .into_iter()
                        .map(|field| (field.0, field.2))
                        .collect();
                    if let Some(number) = value.get(&2) {
                        let number = (*number).try_into().expect("four bytes");
                        let tag = String::from_utf8(value[&1].to_vec()).expect("UTF-8");
                        found.push((step, tag, f32::from_le_bytes(number)));
                    }
                }
            }
        }
        found
    }

    #[test]
    fn a_file_holds_every_number_of_its_events() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut board = TensorBoard::create(folder.path().join("new")).expect("created");
        let (step, epoch, skipped) = (300, 0.5, 1);
        board
            .log(&Metric::Train {
                step,
                epoch,
                loss: 1.25,
                metrics: BTreeMap::from([("rewards/accuracies".to_string(), 0.5)]),
                learning_rate: 1e-4,
                gradient_norm: 0.75,
                tokens: 10,
                tokens_per_second: 99.0,
                processed_tokens_per_second: 198.0,
                trained_tokens: 20,
                skipped,
                peak_memory: Some(3 << 29),
            })
            .expect("logged");
        let (loss, perplexity) = (2.0, 2f64.exp());
        let (tokens, seconds) = (5, 0.5);
        let metrics = BTreeMap::from([("rewards/margins".to_string(), 0.75)]);
        let evaluation = Metric::Evaluation {
            step,
            loss,
            perplexity: Some(perplexity),
            metrics,
            tokens,
            seconds,
        };
        board.log(&evaluation).expect("logged");
        board
            .log(&Metric::Sample { step, prompt: "a\nb".into(), text: "c".into() })
            .expect("logged");

        let name = board.path().file_name().and_then(|name| name.to_str()).expect("a name");
        assert!(name.starts_with("events.out.tfevents.") && name.ends_with(".0"), "{name}");
        let first = &tf_records(&std::fs::read(board.path()).expect("read"))[0];
        let first = fields(first).expect("a message");
        assert!(first.iter().any(|field| field.0 == 3 && field.2 == b"brain.Event:2"));
        let expected = [
            ("train/loss", 1.25),
            ("train/learning_rate", 1e-4),
            ("train/gradient_norm", 0.75),
            ("train/epoch", 0.5),
            ("performance/tokens_per_second", 99.0),
            ("performance/processed_tokens_per_second", 198.0),
            ("performance/peak_memory_gib", 1.5),
            ("train/rewards/accuracies", 0.5),
            ("evaluation/loss", 2.0),
            ("evaluation/perplexity", perplexity as f32),
            ("evaluation/rewards/margins", 0.75),
        ];
        let expected = expected.map(|(tag, number)| (300, tag.to_owned(), number));
        assert_eq!(scalars(board.path()), expected);
    }

    #[test]
    fn a_resumed_run_has_a_file_of_its_own_that_names_the_next_step() {
        let folder = tempfile::tempdir().expect("a folder");
        let first = TensorBoard::create(folder.path()).expect("created");
        let second = TensorBoard::resume(folder.path(), after(40)).expect("created");
        assert_ne!(first.path(), second.path());
        assert!(first.path() < second.path());
        let records = tf_records(&std::fs::read(second.path()).expect("read"));
        let start = fields(&records[1]).expect("a message");
        assert!(start.iter().any(|field| field.0 == 2 && field.1 == 41));
        assert!(start.iter().any(|field| field.0 == 7 && field.2 == [8, 1]));
    }
    fn after(step: u64) -> Position {
        Position { step, phase: Phase::Sampled }
    }

    #[test]
    fn a_resumed_run_shows_no_step_twice() {
        let folder = tempfile::tempdir().expect("a folder");
        let mut board = TensorBoard::create(folder.path()).expect("created");
        let evaluation = |step| Metric::Evaluation {
            step,
            loss: 1.0,
            perplexity: Some(2.0),
            metrics: BTreeMap::new(),
            tokens: 5,
            seconds: 0.5,
        };
        let sample = |step| Metric::Sample { step, prompt: "a".into(), text: "b".into() };
        for step in 1..=3 {
            board.scalars(step, &[("train/loss", 1.0)]).expect("logged");
            board.log(&evaluation(step)).expect("logged");
            board.log(&sample(step)).expect("logged");
        }
        let whole = std::fs::read(board.path()).expect("read");
        let length = |path: &Path| tf_records(&std::fs::read(path).expect("read")).len();
        // The version, three records a step, and what came after the second one's training.
        for (phase, expected) in [(Phase::Trained, 5), (Phase::Evaluated, 6), (Phase::Sampled, 7)] {
            std::fs::write(board.path(), &whole).expect("written");
            TensorBoard::resume(folder.path(), Position { step: 2, phase }).expect("resumed");
            assert_eq!(length(board.path()), expected, "{phase:?}");
        }
        // Wherever a process was killed, what is left is whole.
        for cut in 0..whole.len() {
            std::fs::write(board.path(), &whole[..cut]).expect("written");
            truncate_after(folder.path(), after(9)).expect("cut");
            length(board.path());
        }
        // What isn't ours isn't touched.
        let foreign = folder.path().join(format!("{FILE_NAME}notes"));
        std::fs::write(&foreign, "these are my notes, not events").expect("written");
        truncate_after(folder.path(), after(1)).expect("cut");
        assert_eq!(std::fs::read_to_string(foreign).expect("read").len(), 30);
    }
}
