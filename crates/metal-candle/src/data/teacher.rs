//! What a teacher says of the tokens of examples, in a file.

use super::dataset::{Dataset, SampleKind};
use super::store;
use crate::hash::Hash;
use crate::{Error, Result, files};
use candle_core::DType;
use half::{bf16, f16};
use memmap2::Mmap;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::HashMap;
use std::fs::File;
use std::io::{self, BufWriter, IntoInnerError, Seek, Write};
use std::ops::{Range, RangeInclusive};
use std::path::{Path, PathBuf};
use std::sync::Arc;

const INPUT_IDS: &str = "input_ids";
const LENGTHS: &str = "lengths";
const ROWS: &str = "rows";
const POSITIONS: &str = "positions";
const TOP_IDS: &str = "top_ids";
const TOP_LOGPROBS: &str = "top_logprobs";
/// In the metadata.
const TEMPLATE_TIME: &str = "template_time";

/// How many likeliest tokens there may be for each.
pub const TOP_K: RangeInclusive<usize> = 1..=1024;

/// A log-probability may be above 0 by what rounding it to bf16 does.
const ROUNDING: f32 = 0.01;

/// What a teacher says of the tokens of examples: its likeliest tokens in their place, with log-probabilities.
///
/// A safetensors file of
///
/// | tensor | shape | dtype | |
/// |---|---|---|---|
/// | `input_ids` | `(tokens)` | I32 | the tokens of all examples, one behind the other |
/// | `lengths` | `(examples)` | I32 | how many tokens each example has |
/// | `rows` | `(examples)` | I32 | of how many of them something is said |
/// | `positions` | `(rows)` | I32 | which these are, in their example, from 1 on and in order |
/// | `top_ids` | `(rows, k)` | I32 | the likeliest tokens there, none twice; -1 in place of one that is missing, never the first |
/// | `top_logprobs` | `(rows, k)` | F32, F16, BF16 | their natural logarithms of probabilities |
///
/// Examples are found by their tokens, in any order. `template_time` in the metadata is the time that the chat template was
/// told.
///
/// The file is mapped into memory.
#[derive(Debug)]
pub struct Teacher {
    path: PathBuf,
    map: Mmap,
    parts: Parts,
    /// The largest token id.
    largest: u32,
    hash: u64,
}

/// Where the file's rows lie, and what of the file is read at once.
#[derive(Debug)]
struct Parts {
    /// Likeliest tokens of a row.
    width: usize,
    top_ids: Range<usize>,
    top_logprobs: Range<usize>,
    dtype: Dtype,
    positions: Vec<u32>,
    /// The rows of each example.
    rows: Vec<Range<usize>>,
    /// The examples with tokens of this hash.
    examples: HashMap<u64, Vec<u32>>,
    /// See [`Teacher::template_time`].
    template_time: Option<String>,
}

impl Teacher {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// [`Error::Io`], and [`Error::File`] saying what isn't as it has to be.
    pub fn read(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (file, _) = files::open_regular(path)?;
        // SAFETY: as with a model's weights, the file must not be changed while it is read.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io(path))?;
        let parts = Parts::read(&map).map_err(|message| Error::file(path, message))?;
        let mut hash = Hash::new();
        hash.add(&map);
        let (path, hash) = (path.to_path_buf(), hash.finish());
        let mut teacher = Self { path, map, parts, largest: 0, hash };
        teacher.largest = teacher.check()?;
        Ok(teacher)
    }

    /// How many tokens it names in place of each.
    pub fn width(&self) -> usize {
        self.parts.width
    }

    /// The time that the chat template was told, where the file says so: one that prints the date makes other tokens
    /// another day.
    pub fn template_time(&self) -> Option<&str> {
        self.parts.template_time.as_deref()
    }

    /// How many examples it knows.
    pub fn len(&self) -> usize {
        self.parts.rows.len()
    }

    /// Whether it knows none.
    pub fn is_empty(&self) -> bool {
        self.parts.rows.is_empty()
    }

    /// Checks all rows, and gives the largest token id.
    fn check(&self) -> Result<u32> {
        let wrong = |row: usize, message: String| {
            Error::file(&self.path, format!("row {row} of {TOP_IDS} and {TOP_LOGPROBS} {message}"))
        };
        let mut largest = 0;
        let mut sorted = Vec::with_capacity(self.parts.width);
        for row in 0..self.parts.positions.len() {
            let (ids, logprobs) = self.row(row);
            match ids[0] {
                None => return Err(wrong(row, "has no first token".into())),
                Some(id) if !logprobs[0].is_finite() => {
                    return Err(wrong(
                        row,
                        format!(
                            "give the first token, {id}, {}, expected a finite log-probability",
                            logprobs[0]
                        ),
                    ));
                }
                Some(_) => {}
            }
            let mut total = 0.0;
            sorted.clear();
            for (id, logprob) in ids.iter().zip(&logprobs) {
                let Some(id) = id else { continue };
                if logprob.is_nan() || *logprob > ROUNDING {
                    return Err(wrong(
                        row,
                        format!("give token {id} {logprob}, which is no log-probability"),
                    ));
                }
                total += f64::from(*logprob).exp();
                sorted.push(*id);
            }
            if !(total > 0.0 && total < 1.0 + 2.0 * f64::from(ROUNDING)) {
                return Err(wrong(
                    row,
                    format!(
                        "give probabilities that add up to {total}, expected above 0 and at most 1"
                    ),
                ));
            }
            sorted.sort_unstable();
            if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                return Err(wrong(row, format!("have token {} twice", twice[0])));
            }
            largest = largest.max(sorted.last().copied().unwrap_or(0));
        }
        Ok(largest)
    }

    fn row(&self, row: usize) -> (Vec<Option<u32>>, Vec<f32>) {
        let of_row = row * self.parts.width..(row + 1) * self.parts.width;
        let ids = numbers(&self.map[self.parts.top_ids.clone()])[of_row.clone()].iter();
        let ids = ids.map(|bytes| u32::try_from(i32::from_le_bytes(*bytes)).ok()).collect();
        let bytes = &self.map[self.parts.top_logprobs.clone()];
        let logprobs = match self.parts.dtype {
            Dtype::F32 => {
                bytes.as_chunks().0[of_row].iter().map(|bytes| f32::from_le_bytes(*bytes)).collect()
            }
            Dtype::BF16 => bytes.as_chunks().0[of_row]
                .iter()
                .map(|bytes| bf16::from_le_bytes(*bytes).to_f32())
                .collect(),
            _ => bytes.as_chunks().0[of_row]
                .iter()
                .map(|bytes| f16::from_le_bytes(*bytes).to_f32())
                .collect(),
        };
        (ids, logprobs)
    }

    /// The tokens that the teacher finds likeliest, with their probabilities among each other, and `Σ p·ln p` of these.
    pub(super) fn distribution(&self, row: usize) -> (Vec<(u32, f64)>, f64) {
        let (ids, logprobs) = self.row(row);
        let tokens = || {
            let named = ids.iter().zip(&logprobs);
            named.filter_map(|(id, logprob)| Some(((*id)?, f64::from(*logprob))))
        };
        let total: f64 = tokens().map(|(_, logprob)| logprob.exp()).sum();
        let mut negative_entropy = 0.0;
        let shares = tokens().map(|(id, logprob)| {
            let share = logprob.exp() / total;
            if share > 0.0 {
                negative_entropy += share * share.ln();
            }
            (id, share)
        });
        let shares = shares.collect();
        (shares, negative_entropy)
    }

    /// The row about the token at an index of an example.
    fn row_of(&self, example: u32, index: usize) -> Option<usize> {
        let rows = self.parts.rows.get(example as usize)?;
        let found = self.parts.positions[rows.clone()].binary_search(&(index as u32)).ok()?;
        Some(rows.start + found)
    }
}

impl Parts {
    fn read(bytes: &[u8]) -> Result<Self, String> {
        let tensors = SafeTensors::deserialize(bytes)
            .map_err(|error| format!("isn't a safetensors file that is whole ({error})"))?;
        let tensor = |name: &str, rank: usize, dtypes: &[Dtype]| -> Result<TensorView, String> {
            let tensor = tensors
                .tensor(name)
                .map_err(|_| format!("has no tensor {name:?}, which a teacher's file has"))?;
            if tensor.shape().len() != rank || !dtypes.contains(&tensor.dtype()) {
                return Err(format!(
                    "{name} has shape {:?} and dtype {:?}, expected {rank} dimensions of {dtypes:?}",
                    tensor.shape(),
                    tensor.dtype()
                ));
            }
            Ok(tensor)
        };
        let list = |name: &str, least: i32| -> Result<Vec<u32>, String> {
            let tensor = tensor(name, 1, &[Dtype::I32])?;
            let found = numbers(tensor.data()).iter().map(|bytes| i32::from_le_bytes(*bytes));
            found
                .enumerate()
                .map(|(index, number)| match number {
                    _ if number >= least => Ok(number as u32),
                    _ => Err(format!("{name} has {number} at {index}, expected at least {least}")),
                })
                .collect()
        };
        let (ids, lengths) = (list(INPUT_IDS, 0)?, list(LENGTHS, 2)?);
        let (counts, positions) = (list(ROWS, 0)?, list(POSITIONS, 1)?);
        let all = |counts: &[u32]| counts.iter().map(|count| u64::from(*count)).sum::<u64>();
        for (name, found, what, expected) in [
            (ROWS, counts.len() as u64, "numbers, one for each length", lengths.len() as u64),
            (LENGTHS, all(&lengths), "in all, the length of input_ids", ids.len() as u64),
            (ROWS, all(&counts), "in all, the length of positions", positions.len() as u64),
        ] {
            if found != expected {
                return Err(format!("{name}: found {found} {what}, which is {expected}"));
            }
        }
        let top_ids = tensor(TOP_IDS, 2, &[Dtype::I32])?;
        let top_logprobs = tensor(TOP_LOGPROBS, 2, &[Dtype::F32, Dtype::F16, Dtype::BF16])?;
        let width = top_ids.shape()[1];
        if !TOP_K.contains(&width) {
            return Err(format!(
                "{TOP_IDS} names {width} tokens in place of each, expected {} to {}",
                TOP_K.start(),
                TOP_K.end()
            ));
        }
        for (name, tensor) in [(TOP_IDS, &top_ids), (TOP_LOGPROBS, &top_logprobs)] {
            if tensor.shape() != [positions.len(), width] {
                return Err(format!(
                    "{name} has shape {:?}, expected [{}, {width}]",
                    tensor.shape(),
                    positions.len()
                ));
            }
        }
        let (mut rows, mut examples) =
            (Vec::with_capacity(lengths.len()), HashMap::<u64, Vec<u32>>::new());
        let (mut token, mut row) = (0, 0);
        for (example, (length, count)) in (0..).zip(lengths.iter().zip(&counts)) {
            let of_example = row..row + *count as usize;
            let known = &positions[of_example.clone()];
            let in_order = known.windows(2).all(|pair| pair[0] < pair[1]);
            if !in_order || known.last().is_some_and(|last| last >= length) {
                return Err(format!(
                    "{POSITIONS} of example {example} aren't in order, or not below its length of {length}"
                ));
            }
            let words = &ids[token..token + *length as usize];
            let of_hash: &mut Vec<u32> =
                examples.entry(hash_of(words.iter().copied())).or_default();
            of_hash.push(example);
            token += *length as usize;
            row = of_example.end;
            rows.push(of_example);
        }
        let metadata = SafeTensors::read_metadata(bytes).ok();
        let template_time = metadata
            .and_then(|(_, metadata)| metadata.metadata().as_ref()?.get(TEMPLATE_TIME).cloned());
        let within = |view: &TensorView| {
            let start = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
            start..start + view.data().len()
        };
        Ok(Self {
            width,
            top_ids: within(&top_ids),
            top_logprobs: within(&top_logprobs),
            dtype: top_logprobs.dtype(),
            positions,
            rows,
            examples,
            template_time,
        })
    }
}

/// Whole numbers of 4 bytes.
fn numbers(bytes: &[u8]) -> &[[u8; 4]] {
    bytes.as_chunks().0
}

fn hash_of(ids: impl Iterator<Item = u32>) -> u64 {
    let mut hash = Hash::new();
    ids.for_each(|id| hash.add(&id.to_le_bytes()));
    hash.finish()
}

/// What a teacher says of a data set's examples.
#[derive(Debug, Clone)]
pub(super) struct Taught {
    pub teacher: Arc<Teacher>,
    /// The teacher's example of each of the data set's.
    examples: Vec<u32>,
}

impl Taught {
    /// Finds all of a data set's examples and trainable tokens.
    pub fn find(dataset: &Dataset, teacher: &Arc<Teacher>) -> Result<Self> {
        let wrong = |message: String| Error::file(&teacher.path, message);
        if dataset.kind() != SampleKind::Plain {
            return Err(wrong(format!(
                "is about sequences, but the data are {}",
                dataset.kind().name()
            )));
        }
        let mut examples = Vec::with_capacity(dataset.len());
        for index in 0..dataset.len() {
            let words = dataset.words(index)?.0;
            let hash = hash_of(words.iter().map(|word| store::id(*word)));
            let found = teacher.parts.examples.get(&hash).map(Vec::as_slice).unwrap_or_default();
            if found.is_empty() {
                return Err(wrong(format!(
                    "says nothing of example {index} of the data; it was made of other data, with another tokenizer or \
                     chat template, with another max_seq_length, or where the template prints the date, on another day"
                )));
            }
            // Of the same tokens there may be several examples, of which other tokens are learned.
            let learned = || (0..).zip(words).filter(|(_, word)| store::is_trainable(**word));
            let missing = |example: u32| {
                learned()
                    .map(|(place, _)| place)
                    .find(|place| teacher.row_of(example, *place).is_none())
            };
            let Some(&example) = found.iter().find(|example| missing(**example).is_none()) else {
                let place = missing(found[0]).unwrap_or_default();
                return Err(wrong(format!(
                    "says nothing of token {place} of example {index} of the data, which is to be learned; it was made \
                     with another loss_on"
                )));
            };
            examples.push(example);
        }
        Ok(Self { teacher: teacher.clone(), examples })
    }

    /// The teacher's row about the token at an index of an example of the data.
    pub fn row_of(&self, example: usize, index: usize) -> Option<usize> {
        self.teacher.row_of(*self.examples.get(example)?, index)
    }

    /// That every token it names is a row of an embedding of `vocabulary` rows.
    pub fn check_vocabulary(&self, vocabulary: usize) -> Result<()> {
        let (teacher, largest) = (&self.teacher, self.teacher.largest as usize);
        if largest < vocabulary {
            return Ok(());
        }
        Err(Error::file(
            &teacher.path,
            format!("names token {largest}, but the model's vocabulary has {vocabulary}"),
        ))
    }

    /// By which a resumed run knows it.
    pub fn hash(&self) -> u64 {
        self.teacher.hash
    }
}

/// Collects what a teacher says, for a file. The likeliest tokens, most of it, wait in files without a name.
pub(crate) struct TeacherWriter<'a> {
    path: &'a Path,
    folder: PathBuf,
    ids: Vec<u8>,
    lengths: Vec<u8>,
    rows: Vec<u8>,
    positions: Vec<u8>,
    /// Likeliest tokens of a row.
    width: usize,
    top_ids: BufWriter<File>,
    top_logprobs: BufWriter<File>,
}

impl<'a> TeacherWriter<'a> {
    /// For a file at `path`, beside which there has to be room for as much again. Each row names `width` tokens.
    pub fn new(path: &'a Path, width: usize) -> Result<Self> {
        let (folder, _) = files::parent_and_name(path)?;
        let nameless = || {
            let file = tempfile::tempfile_in(&folder).map_err(Error::io(&folder))?;
            Ok::<_, Error>(BufWriter::with_capacity(1 << 20, file))
        };
        let (top_ids, top_logprobs) = (nameless()?, nameless()?);
        let [ids, lengths, rows, positions] = [const { Vec::new() }; 4];
        Ok(Self { path, folder, ids, lengths, rows, positions, width, top_ids, top_logprobs })
    }

    /// Adds an example: its tokens, and for each token that something is said of its index, in order.
    pub fn push(&mut self, ids: &[u32], positions: &[usize]) {
        let whole = |number: usize| (number as i32).to_le_bytes();
        self.ids.extend(ids.iter().flat_map(|id| whole(*id as usize)));
        self.lengths.extend(whole(ids.len()));
        self.rows.extend(whole(positions.len()));
        self.positions.extend(positions.iter().flat_map(|position| whole(*position)));
    }

    /// Adds what is said of one of these tokens.
    pub fn say(&mut self, likeliest: &[(u32, f32)]) -> Result<()> {
        for (id, logprob) in likeliest {
            let written = self
                .top_ids
                .write_all(&(*id as i32).to_le_bytes())
                .and_then(|()| self.top_logprobs.write_all(&logprob.to_le_bytes()));
            written.map_err(Error::io(&self.folder))?;
        }
        Ok(())
    }

    /// Writes the file, whole or not at all.
    pub fn write(self, template_time: Option<&str>) -> Result<()> {
        let Self { path, folder, ids, lengths, rows, positions, width, top_ids, top_logprobs } =
            self;
        let count = |bytes: &[u8]| [bytes.len() / size_of::<i32>()];
        let lists = [(INPUT_IDS, ids), (LENGTHS, lengths), (ROWS, rows), (POSITIONS, positions)];
        let shapes = lists.each_ref().map(|(_, bytes)| count(bytes));
        let [of_rows] = shapes[3];
        let of_rows = [of_rows, width];
        let described =
            lists.iter().zip(&shapes).map(|((name, _), shape)| (*name, DType::I32, &shape[..]));
        let described = described
            .chain([(TOP_IDS, DType::I32, &of_rows[..]), (TOP_LOGPROBS, DType::F32, &of_rows[..])]);
        let metadata = template_time.map(|time| [(TEMPLATE_TIME.into(), time.into())].into());
        let header = files::safetensors_header(path, described, metadata)?;
        let from_start = |file: BufWriter<File>| {
            let file = file.into_inner().map_err(IntoInnerError::into_error);
            let file = file.and_then(|mut file| file.rewind().map(|()| file));
            file.map_err(Error::io(&folder))
        };
        let tops = [from_start(top_ids)?, from_start(top_logprobs)?];
        files::write_atomic(path, |writer| {
            writer.write_all(&header)?;
            for (_, bytes) in &lists {
                writer.write_all(bytes)?;
            }
            for mut file in tops {
                io::copy(&mut file, writer)?;
            }
            Ok(())
        })
    }
}
