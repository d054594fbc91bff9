//! The log-probabilities of answers under the reference, computed once before a run and kept in a file beside its
//! checkpoints.

use super::task::Task;
use crate::data::{Answer, Batcher, Role};
use crate::hash::Hash;
use crate::parallel::Group;
use crate::turns::Turns;
use crate::{Error, Result, files};
use candle_core::DType;
use std::path::Path;

/// The file of the reference's log-probabilities, in the folder of a run's checkpoints.
pub const FILE: &str = "reference_logps.safetensors";
const TENSOR: &str = "logps";
/// The key of the hash of what they were computed from.
const HASH: &str = "hash";
/// The key of the hash of the numbers, which files of earlier versions have not.
const CONTENT: &str = "content";

/// The sums of the log-probabilities of a data set's answers: of each example that of the chosen answer, or of the only
/// one, and that of the rejected one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct References(Vec<[f64; 2]>);

impl References {
    /// That of an answer.
    pub fn of(&self, answer: &Answer) -> Result<f64> {
        let of_example = self.0.get(answer.example).ok_or_else(|| {
            let count = self.0.len();
            Error::option("data", format!("have example {}, and {count} are known", answer.example))
        })?;
        Ok(of_example[usize::from(answer.role == Role::Rejected)])
    }

    /// Computes those of all examples, in batches of examples by length, of which each rank computes its rows.
    pub fn compute(task: &Task, batches: &Batcher, group: Group<'_>) -> Result<Self> {
        let mut found = vec![[0.0; 2]; batches.dataset().len()];
        let together = task.shards().is_some();
        for rows in batches.by_length().iter().filter_map(|plan| group.rows(plan, together)) {
            let batch = task.batch(batches, &rows.plan)?;
            let sums = Turns::train(task.turns, task.model.device(), || {
                task.log_probabilities(&batch, task.reference)
            })?;
            for (answer, sum) in batch.answers.iter().zip(sums).filter(|_| rows.counts) {
                if let Some(of_example) = found.get_mut(answer.example) {
                    of_example[usize::from(answer.role == Role::Rejected)] = sum;
                }
            }
        }
        // Of each example, one rank has the sums and all others zeros.
        group.add_up("what the reference says", found.as_flattened_mut())?;
        Ok(Self(found))
    }
}

/// Those of several data sets as they are kept in a folder of checkpoints, if they were computed from what has this hash.
///
/// # Errors
/// For a file that isn't one of these, or not whole.
pub(super) fn read(
    folder: &Path,
    hash: &str,
    lengths: &[usize],
) -> Result<Option<Vec<References>>> {
    let path = folder.join(FILE);
    if !path.is_file() {
        return Ok(None);
    }
    let bytes = std::fs::read(&path).map_err(Error::io(&path))?;
    let wrong = |message: String| Error::file(&path, message);
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes)
        .map_err(|error| wrong(format!("isn't whole ({error})")))?;
    let saved = |key: &str| metadata.metadata().as_ref().and_then(|it| it.get(key));
    if saved(HASH).map(String::as_str) != Some(hash) {
        return Ok(None);
    }
    let tensors = safetensors::SafeTensors::deserialize(&bytes)
        .map_err(|error| wrong(format!("isn't whole ({error})")))?;
    let tensor = tensors.tensor(TENSOR).map_err(|error| wrong(error.to_string()))?;
    let expected = lengths.iter().sum::<usize>();
    if tensor.shape() != [expected, 2] || tensor.dtype() != safetensors::Dtype::F64 {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        return Err(wrong(format!("has {shape:?} of {dtype:?}, expected [{expected}, 2] of F64")));
    }
    let content = of_content(tensor.data());
    if let Some(expected) = saved(CONTENT).filter(|expected| **expected != content) {
        return Err(wrong(format!(
            "is not what was written here: the XXH3 of its numbers is {content}, expected {expected}"
        )));
    }
    let numbers: Vec<f64> =
        tensor.data().as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
    let mut pairs = numbers.as_chunks::<2>().0.iter().copied();
    let of = |length: &usize| References(pairs.by_ref().take(*length).collect());
    Ok(Some(lengths.iter().map(of).collect()))
}

/// Keeps those of several data sets in a folder of checkpoints, which is made where it is missing.
pub(super) fn write(folder: &Path, hash: &str, all: &[References]) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
    let path = folder.join(FILE);
    let numbers = all.iter().flat_map(|references| references.0.iter().flatten());
    let bytes: Vec<u8> = numbers.flat_map(|number| number.to_le_bytes()).collect();
    let count = all.iter().map(|references| references.0.len()).sum();
    let metadata = [(HASH, hash.to_string()), (CONTENT, of_content(&bytes))];
    let metadata = metadata.map(|(key, value)| (key.to_string(), value)).into();
    let tensor = (TENSOR, DType::F64, &[count, 2][..]);
    let mut content = files::safetensors_header(&path, [tensor], Some(metadata))?;
    content.extend(bytes);
    files::write_bytes_atomic(&path, content)
}

fn of_content(bytes: &[u8]) -> String {
    let mut hash = Hash::new();
    hash.add(bytes);
    format!("{:016x}", hash.finish())
}
