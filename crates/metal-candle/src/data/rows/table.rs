//! CSV and TSV: a header, and rows as objects of strings (RFC 4180).

use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

use serde_json::{Map, Value};

use super::{MAX_ROW_BYTES, Place, Row, RowContent, Stream};
use crate::Result;

/// Counts what is read since the last row, and fails where a row has no end.
struct Bounded {
    stream: Stream,
    since: Rc<Cell<u64>>,
}

impl Read for Bounded {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.stream.read(buffer)?;
        self.since.set(self.since.get() + read as u64);
        if self.since.get() > MAX_ROW_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        Ok(read)
    }
}

pub(super) struct Table {
    reader: csv::Reader<Bounded>,
    since: Rc<Cell<u64>>,
    columns: Vec<String>,
    record: csv::ByteRecord,
    /// How many lines the reader is behind: where lines end by CR and LF, it has not read the LF yet.
    behind: u64,
    place: Place,
}

impl Table {
    pub fn open(stream: Stream, separator: u8, place: Place) -> Result<Self> {
        let since = Rc::new(Cell::new(0));
        let mut reader = csv::ReaderBuilder::new()
            .delimiter(separator)
            .flexible(true)
            .from_reader(Bounded { stream, since: since.clone() });
        let header = reader.byte_headers().map_err(|error| failed(&place, 1, error))?;
        let columns: Vec<String> =
            header.iter().map(|name| String::from_utf8_lossy(name).trim().to_string()).collect();
        for (index, name) in columns.iter().enumerate() {
            if columns.iter().take(index).any(|other| other == name) {
                return Err(place.at(1, format!("the header has two columns named {name:?}")));
            }
        }
        if let [name] = columns.as_slice()
            && let Some(other) =
                [',', '\t', ';', '|'].into_iter().find(|other| name.contains(*other))
        {
            let expected = if separator == b'\t' { "tabs" } else { "commas" };
            return Err(place.at(
                1,
                format!(
                    "the header is one column {name:?}; its fields seem to be separated by {other:?}, expected {expected}"
                ),
            ));
        }
        let inside =
            columns.iter().flat_map(|name| name.bytes()).filter(|byte| *byte == b'\n').count();
        let behind = u64::from(reader.position().line() <= 1 + inside as u64);
        Ok(Self { reader, since, columns, record: csv::ByteRecord::new(), behind, place })
    }

    pub fn next(&mut self) -> Option<Result<Row>> {
        self.since.set(0);
        let before = self.reader.position().line() + self.behind;
        match self.reader.read_byte_record(&mut self.record) {
            Ok(false) => None,
            Ok(true) => Some(self.row(before as usize)),
            Err(error) => Some(Err(failed(&self.place, before as usize, error))),
        }
    }

    fn row(&self, line: usize) -> Result<Row> {
        let (found, expected) = (self.record.len(), self.columns.len());
        if found != expected {
            return Err(self.place.at(
                line,
                format!(
                    "the row has {found} fields and the header {expected}; a field with a separator, a quote or a \
                     line end in it stands in double quotes"
                ),
            ));
        }
        let mut fields = Map::new();
        for (name, field) in self.columns.iter().zip(&self.record) {
            let text = std::str::from_utf8(field)
                .map_err(|_| self.place.at(line, format!("the column {name:?} is not UTF-8")))?;
            fields.insert(name.clone(), Value::from(text));
        }
        Ok(Row { line, content: RowContent::Value(Value::Object(fields)) })
    }
}

fn failed(place: &Place, line: usize, error: csv::Error) -> crate::Error {
    match error.into_kind() {
        csv::ErrorKind::Io(error) if error.kind() == io::ErrorKind::FileTooLarge => {
            place.too_large(line)
        }
        csv::ErrorKind::Io(error) => place.read(error),
        _ => place.at(line, "the row cannot be read"),
    }
}
