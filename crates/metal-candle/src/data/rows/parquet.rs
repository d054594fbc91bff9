//! Parquet: rows as objects of their columns.

use std::fs::File;
use std::panic::{AssertUnwindSafe, catch_unwind};

use parquet::errors::ParquetError;
use parquet::file::reader::SerializedFileReader;
use parquet::record::reader::RowIter;
use parquet::record::{Field, Row as ParquetRow};
use serde_json::{Map, Value};

use super::{Place, Row, RowContent};
use crate::Result;

pub(super) struct Table {
    rows: RowIter<'static>,
    row: usize,
    failed: bool,
    place: Place,
}

impl Table {
    pub fn open(file: File, place: Place) -> Result<Self> {
        let rows = guarded(|| {
            SerializedFileReader::new(file).map(|reader| RowIter::from_file_into(Box::new(reader)))
        });
        match rows {
            Ok(rows) => Ok(Self { rows, row: 0, failed: false, place }),
            Err(problem) => Err(place.at(1, broken(&problem))),
        }
    }

    pub fn next(&mut self) -> Option<Result<Row>> {
        if self.failed {
            return None;
        }
        let rows = &mut self.rows;
        self.row += 1;
        match guarded(|| rows.next().transpose()) {
            Ok(None) => None,
            Ok(Some(row)) => {
                let content = RowContent::Value(object(row));
                Some(Ok(Row { line: self.row, content }))
            }
            Err(problem) => {
                self.failed = true;
                Some(Err(self.place.at(self.row, broken(&problem))))
            }
        }
    }
}

fn broken(problem: &str) -> String {
    format!("the Parquet file cannot be read: {problem}")
}

/// What the reader gives. It panics on some files that are broken, which is no more than an error here.
fn guarded<T>(read: impl FnOnce() -> Result<T, ParquetError>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(read)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("it is broken".into()),
    }
}

fn object(row: ParquetRow) -> Value {
    Value::Object(
        row.into_columns().into_iter().map(|(name, field)| (name, value(&field))).collect(),
    )
}

/// A field as JSON. Times and decimal numbers become what they read as, and bytes that are no text null.
fn value(field: &Field) -> Value {
    match field {
        Field::Null => Value::Null,
        Field::Bool(value) => Value::from(*value),
        Field::Byte(value) => Value::from(*value),
        Field::Short(value) => Value::from(*value),
        Field::Int(value) => Value::from(*value),
        Field::Long(value) => Value::from(*value),
        Field::UByte(value) => Value::from(*value),
        Field::UShort(value) => Value::from(*value),
        Field::UInt(value) => Value::from(*value),
        Field::ULong(value) => Value::from(*value),
        Field::Float16(value) => Value::from(value.to_f32()),
        Field::Float(value) => Value::from(*value),
        Field::Double(value) => Value::from(*value),
        Field::Str(text) => Value::from(text.as_str()),
        Field::Bytes(bytes) => std::str::from_utf8(bytes.data()).map_or(Value::Null, Value::from),
        Field::Group(row) => Value::Object(
            row.get_column_iter().map(|(name, field)| (name.clone(), value(field))).collect(),
        ),
        Field::ListInternal(list) => list.elements().iter().map(value).collect(),
        Field::MapInternal(map) => Value::Object(
            map.entries()
                .iter()
                .map(|(key, field)| {
                    let key = match value(key) {
                        Value::String(text) => text,
                        other => other.to_string(),
                    };
                    (key, value(field))
                })
                .collect::<Map<_, _>>(),
        ),
        other => Value::from(other.to_string()),
    }
}
