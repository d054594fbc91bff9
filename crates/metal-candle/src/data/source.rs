//! Where records come from: files that are taken together, in what part of them, and by which keys.

use std::path::PathBuf;

use super::columns::Columns;
use super::dataset::SampleKind;
use super::record::{Record, Records};
use super::rows::Rows;
use super::slice::Slice;
use crate::{Error, Result};

/// Records that are worked on at a time, and about how many bytes of them.
const RECORDS_AT_A_TIME: usize = 4096;
const BYTES_AT_A_TIME: usize = 64 << 20;

/// Files whose records are taken together.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DataSource {
    /// The files, in the order of their records.
    pub files: Vec<PathBuf>,
    /// The part of all these records that is meant; `None` for all of it.
    pub slice: Option<Slice>,
    /// The keys that records are taken from, where they are not the usual ones.
    pub columns: Columns,
    /// The source's share of an epoch, relative to the other sources' weights. Without weights every example is in an
    /// epoch once.
    pub weight: Option<f64>,
}

impl DataSource {
    /// All records of files, by their usual keys.
    pub fn new(files: impl Into<Vec<PathBuf>>) -> Self {
        Self { files: files.into(), ..Self::default() }
    }

    /// Reads the first record of each file, so that a mistake in all of them shows before anything long begins. Pipes,
    /// which can be read once only, are passed over.
    ///
    /// # Errors
    /// Those of [`super::read_records`] about a first record; [`Error::Option`] for columns that don't go together.
    pub fn check(&self) -> Result<()> {
        self.columns.check()?;
        for path in &self.files {
            let metadata = std::fs::metadata(path).map_err(Error::io(path))?;
            if metadata.is_file() || metadata.is_dir() {
                Records::open(path, &self.columns, SampleKind::default())?.next().transpose()?;
            }
        }
        Ok(())
    }

    /// Gives the records to `take`, some at a time and in their order, so that they are never all in memory. Those with keys
    /// of several shapes are taken as what is `wanted`.
    ///
    /// # Errors
    /// What `take` returns; [`Error::Io`], [`Error::File`] and [`Error::Record`] about a file or a record that cannot be
    /// read; [`Error::Option`] when the slice holds none.
    pub(super) fn in_parts(
        &self,
        wanted: SampleKind,
        mut take: impl FnMut(Vec<Record>) -> Result<()>,
    ) -> Result<()> {
        self.columns.check()?;
        let indices = match self.slice {
            None => 0..usize::MAX,
            Some(slice) if slice.needs_count() => slice.range(self.count()?),
            Some(slice) => slice.range(usize::MAX),
        };
        let mut index = 0;
        for path in &self.files {
            if index >= indices.end {
                break;
            }
            let mut records = Records::open(path, &self.columns, wanted)?;
            let before = index;
            let (mut part, mut bytes) = (Vec::new(), 0);
            while index < indices.end {
                if index < indices.start {
                    match records.pass_over() {
                        None => break,
                        Some(skipped) => skipped?,
                    }
                } else {
                    let Some(record) = records.next().transpose()? else { break };
                    bytes += record.size();
                    part.push(record);
                    if part.len() == RECORDS_AT_A_TIME || bytes >= BYTES_AT_A_TIME {
                        take(std::mem::take(&mut part))?;
                        bytes = 0;
                    }
                }
                index += 1;
            }
            if index == before {
                return Err(Error::file(path, "no records: the file is empty"));
            }
            if !part.is_empty() {
                take(part)?;
            }
        }
        match self.slice {
            Some(slice) if index <= indices.start => Err(Error::option(
                "split",
                format!("the part {slice} holds none of the {index} records that were read"),
            )),
            _ => Ok(()),
        }
    }

    /// How many records there are in the files.
    fn count(&self) -> Result<usize> {
        let mut count = 0;
        for path in &self.files {
            for row in Rows::open(path)? {
                row?;
                count += 1;
            }
        }
        Ok(count)
    }
}
