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

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use super::metrics::{Metric, MetricsSink};
use crate::{Error, Result};

/// Writes a run's scalars and sampled texts to an event file.
///
/// Each record is handed to the system in one piece as soon as it is recorded.
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
        let name = format!("events.out.tfevents.{seconds:010}.{}", host_name());
        // Runs of the same second must not share a file, and TensorBoard reads a folder's files in
        // the order of their names.
        for attempt in 0u32.. {
            let path = folder.join(format!("{name}.{attempt}"));
            match OpenOptions::new().append(true).create_new(true).open(&path) {
                Ok(file) => {
                    let mut writer = Self { path, file };
                    writer.event(0, &bytes_field(3, b"brain.Event:2"))?;
                    return Ok(writer);
                }
                Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::io(&path)(error)),
            }
        }
        Err(Error::file(folder, format!("holds every name of the form {name}.<number>")))
    }

    /// Begins an event file that continues the others in `folder` after `step`: what they hold of
    /// later steps is no longer shown.
    ///
    /// # Errors
    /// As [`TensorBoard::create`].
    pub fn resume(folder: impl AsRef<Path>, step: u64) -> Result<Self> {
        let mut writer = Self::create(folder)?;
        let start = integer_field(1, 1);
        writer.event(step.saturating_add(1), &bytes_field(7, &start))?;
        Ok(writer)
    }

    /// The event file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Records numbers under their tags.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be written.
    pub fn scalars(&mut self, step: u64, values: &[(&str, f64)]) -> Result<()> {
        let mut summary = Vec::new();
        for &(tag, number) in values {
            let mut value = bytes_field(1, tag.as_bytes());
            value.extend(key(2, FIXED_32));
            value.extend((number as f32).to_le_bytes());
            summary.extend(bytes_field(1, &value));
        }
        self.event(step, &bytes_field(5, &summary))
    }

    /// Records a text, shown as Markdown, under its tag.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be written.
    pub fn text(&mut self, step: u64, tag: &str, text: &str) -> Result<()> {
        let shape = bytes_field(2, &integer_field(1, 1));
        let tensor = [integer_field(1, 7), bytes_field(2, &shape), bytes_field(8, text.as_bytes())];
        let plugin = bytes_field(1, &bytes_field(1, b"text"));
        let value = [
            bytes_field(1, tag.as_bytes()),
            bytes_field(8, &tensor.concat()),
            bytes_field(9, &plugin),
        ];
        self.event(step, &bytes_field(5, &bytes_field(1, &value.concat())))
    }

    fn event(&mut self, step: u64, content: &[u8]) -> Result<()> {
        let mut event = key(1, FIXED_64);
        event.extend(wall_time().to_le_bytes());
        event.extend(integer_field(2, step));
        event.extend(content);
        self.file.write_all(&record(&event)).map_err(Error::io(&self.path))
    }
}

impl MetricsSink for TensorBoard {
    fn record(&mut self, metric: &Metric) -> Result<()> {
        match metric {
            Metric::Train {
                step,
                epoch,
                loss,
                learning_rate,
                gradient_norm,
                tokens_per_second,
                peak_memory,
                ..
            } => {
                let mut values = vec![
                    ("train/loss", *loss),
                    ("train/learning_rate", *learning_rate),
                    ("train/gradient_norm", *gradient_norm),
                    ("train/epoch", *epoch),
                    ("performance/tokens_per_second", *tokens_per_second),
                ];
                if let Some(bytes) = peak_memory {
                    values
                        .push(("performance/peak_memory_gib", *bytes as f64 / (1u64 << 30) as f64));
                }
                self.scalars(*step, &values)
            }
            Metric::Evaluation { step, loss, perplexity, .. } => self.scalars(
                *step,
                &[("evaluation/loss", *loss), ("evaluation/perplexity", *perplexity)],
            ),
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

fn record(data: &[u8]) -> Vec<u8> {
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
fn host_name() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .or_else(|| std::env::var("HOSTNAME").ok())
        .or_else(|| std::env::var("COMPUTERNAME").ok())
        .unwrap_or_default();
    let allowed = |c: char| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' };
    let name: String = name.trim().chars().take(64).map(allowed).collect();
    if name.is_empty() { "localhost".into() } else { name }
}
