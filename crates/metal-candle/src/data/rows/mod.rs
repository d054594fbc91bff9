//! The rows of a data file, one after the other, whatever its format.

mod json;
mod parquet;
mod table;
mod text;

use std::io::{BufRead, Read};
use std::path::{Path, PathBuf};

use serde_json::Value;

use super::format::{self, Content, Format};
use crate::{Error, Result};

/// The largest row of a file, in bytes. More at once is a file without line ends, or one made to fill the memory.
pub(super) const MAX_ROW_BYTES: u64 = if cfg!(test) { 2 << 20 } else { 256 << 20 };

/// A row and where it stands.
#[derive(Debug)]
pub(super) struct Row {
    /// The line it starts on, in a Parquet file the row; counted from 1.
    pub line: usize,
    pub content: RowContent,
}

#[derive(Debug)]
pub(super) enum RowContent {
    /// A record: a JSON value, or a table's row as an object of its columns.
    Value(Value),
    /// A piece of a plain text, and whether it is the last.
    Text { text: String, last: bool },
}

/// The rows of a file.
pub(super) struct Rows(Inner);

enum Inner {
    JsonLines(json::Lines),
    Json(json::Items),
    Table(table::Table),
    Parquet(parquet::Table),
    Text(text::Pieces),
}

type Stream = std::io::BufReader<Box<dyn Read>>;

impl Rows {
    /// Opens a file.
    ///
    /// # Errors
    /// [`Error::Io`]; [`Error::File`] when it is nothing that is read.
    pub fn open(path: &Path) -> Result<Self> {
        let input = format::open(path)?;
        let place = Place(path.to_path_buf());
        Ok(Self(match (input.content, input.format) {
            (Content::File(file), _) => Inner::Parquet(parquet::Table::open(file, place)?),
            (Content::Stream(stream), Format::Json) => Inner::Json(json::Items::new(stream, place)),
            (Content::Stream(stream), Format::Csv) => {
                Inner::Table(table::Table::open(stream, b',', place)?)
            }
            (Content::Stream(stream), Format::Tsv) => {
                Inner::Table(table::Table::open(stream, b'\t', place)?)
            }
            (Content::Stream(stream), Format::Text) => {
                Inner::Text(text::Pieces::new(stream, place))
            }
            (Content::Stream(stream), Format::JsonLines | Format::Parquet) => {
                Inner::JsonLines(json::Lines::new(stream, place))
            }
        }))
    }
}

impl Iterator for Rows {
    type Item = Result<Row>;

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.0 {
            Inner::JsonLines(lines) => lines.next(),
            Inner::Json(items) => items.next(),
            Inner::Table(table) => table.next(),
            Inner::Parquet(table) => table.next(),
            Inner::Text(pieces) => pieces.next(),
        }
    }
}

/// The file that messages name.
pub(super) struct Place(PathBuf);

impl Place {
    fn at(&self, line: usize, message: impl Into<String>) -> Error {
        Error::Record { path: self.0.clone(), line, message: message.into() }
    }

    /// What the system, or a decompressor, said while reading.
    fn read(&self, error: std::io::Error) -> Error {
        Error::io(&self.0)(error)
    }

    fn too_large(&self, line: usize) -> Error {
        self.at(
            line,
            format!(
                "is longer than {} MiB, the most that is read as one record; is the file what its name says?",
                MAX_ROW_BYTES >> 20
            ),
        )
    }
}

/// Reads up to a line end, which stays, into `line`; false at the end of the file.
fn read_line(stream: &mut Stream, line: &mut Vec<u8>) -> std::io::Result<bool> {
    line.clear();
    stream.take(MAX_ROW_BYTES + 1).read_until(b'\n', line)?;
    Ok(!line.is_empty())
}

#[cfg(test)]
mod tests;
