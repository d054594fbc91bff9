//! The log-probabilities of answers under the reference, computed once before a run and kept in a file beside its
//! checkpoints.

use super::checkpoint;
use super::task::Task;
use crate::data::{Answer, Batcher, Role};
use crate::parallel::Group;
use crate::turns::Turns;
use crate::{Error, Result, files};
use std::path::{Path, PathBuf};

/// The file in the folder of the run's checkpoints.
const FILE: &str = "reference_logps.safetensors";
const TENSOR: &str = "logps";
const HASH: &str = "hash";

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

/// Where they are kept.
pub(super) fn path(output: &Path) -> PathBuf {
    checkpoint::parent(output).join(FILE)
}

/// Those of several data sets as they are kept, if they were computed from what has this hash.
///
/// # Errors
/// For a file that isn't one of these.
pub(super) fn read(
    output: &Path,
    hash: &str,
    lengths: &[usize],
) -> Result<Option<Vec<References>>> {
    let path = path(output);
    if !path.is_file() {
        return Ok(None);
    }
    let bytes = std::fs::read(&path).map_err(Error::io(&path))?;
    let wrong = |message: String| {
        Error::file(&path, format!("{message}; delete it, and it is computed again"))
    };
    let (_, metadata) = safetensors::SafeTensors::read_metadata(&bytes)
        .map_err(|error| wrong(format!("isn't whole ({error})")))?;
    let saved = metadata.metadata().as_ref().and_then(|it| it.get(HASH));
    if saved.map(String::as_str) != Some(hash) {
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
    let numbers: Vec<f64> =
        tensor.data().as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
    let mut pairs = numbers.as_chunks::<2>().0.iter().copied();
    let of = |length: &usize| References(pairs.by_ref().take(*length).collect());
    Ok(Some(lengths.iter().map(of).collect()))
}

/// Keeps those of several data sets.
pub(super) fn write(output: &Path, hash: &str, all: &[References]) -> Result<()> {
    let path = path(output);
    let numbers = all.iter().flat_map(|references| references.0.iter().flatten());
    let bytes: Vec<u8> = numbers.flat_map(|number| number.to_le_bytes()).collect();
    let count = all.iter().map(|references| references.0.len()).sum();
    let wrong = |error: safetensors::SafeTensorError| Error::file(&path, error.to_string());
    let view =
        safetensors::tensor::TensorView::new(safetensors::Dtype::F64, vec![count, 2], &bytes)
            .map_err(wrong)?;
    let metadata = [(HASH.to_string(), hash.to_string())].into();
    let content = safetensors::serialize([(TENSOR, view)], Some(metadata)).map_err(wrong)?;
    files::write_bytes_atomic(&path, content)
}
