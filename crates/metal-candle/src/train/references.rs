//! The log-probabilities of answers under the reference, computed once before a run and kept in a file beside its
//! checkpoints, also those that are known where the run was stopped meanwhile.

use super::task::Task;
use crate::data::{Answer, Batcher, Role};
use crate::hash::Hash;
use crate::parallel::{Group, elsewhere};
use crate::turns::Turns;
use crate::{Error, Result, files};
use candle_core::DType;
use std::path::Path;
use std::time::{Duration, Instant};

/// The file of the reference's log-probabilities, in the folder of a run's checkpoints.
pub const FILE: &str = "reference_logps.safetensors";
const TENSOR: &str = "logps";
/// The bytes of an example's numbers.
const EXAMPLE: usize = 16;
/// The tensors where not all are known: the numbers, and of each example whether it has any.
const SOME: &str = "some_logps";
const KNOWN: &str = "known";
/// The key of the hash of what they were computed from.
const HASH: &str = "hash";
/// The key of the hash of the numbers, which files of earlier versions have not.
const CONTENT: &str = "content";
/// What ranks tell each other of it.
const WHAT: &str = "what the reference says";
/// What rank 0 tells the others before.
const KEPT: &str = "what is known of the reference";
/// How many bytes of that at a time, as messages are bounded.
const PIECE: usize = 16 << 20;
/// How often it is told how many are known.
const REPORT: Duration = Duration::from_secs(60);

/// The sums of the log-probabilities of a data set's answers: of each example that is known that of the chosen answer, or
/// of the only one, and that of the rejected one.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct References(Vec<Option<[f64; 2]>>);

/// An answer's example, whether it is the rejected one, and its sum.
type Found = (usize, bool, f64);

impl References {
    /// Those of so many examples, of which none is known.
    pub fn none(length: usize) -> Self {
        Self(vec![None; length])
    }

    /// Whether all are known.
    pub fn are_complete(&self) -> bool {
        self.0.iter().all(Option::is_some)
    }

    /// That of an answer.
    pub fn of(&self, answer: &Answer) -> Result<f64> {
        let of_example = self.0.get(answer.example).copied().flatten().ok_or_else(|| {
            let count = self.0.iter().flatten().count();
            Error::option("data", format!("have example {}, and {count} are known", answer.example))
        })?;
        Ok(of_example[usize::from(answer.role == Role::Rejected)])
    }

    /// Computes what is missing, in batches of examples by length, of which each rank computes its rows. All know the same
    /// before each batch; false when it was given up there, because one of them is to stop.
    pub fn compute(
        &mut self,
        task: &Task,
        batches: &Batcher,
        group: Group<'_>,
        stop: &dyn Fn() -> bool,
    ) -> Result<bool> {
        let together = task.shards().is_some();
        let (mut mine, mut done): (Vec<Found>, Vec<usize>) = Default::default();
        let mut reported = Instant::now();
        for plan in batches.by_length() {
            let examples = plan.rows.concat();
            if examples.iter().all(|example| matches!(self.0.get(*example), Some(Some(_)))) {
                continue;
            }
            if self.tell(group, stop(), &done, &mine)? {
                return Ok(false);
            }
            if group.is_root() && reported.elapsed() > REPORT {
                let (known, all) = (self.0.iter().flatten().count(), self.0.len());
                tracing::info!("what the reference says is known of {known} of {all} examples");
                reported = Instant::now();
            }
            (mine, done) = (Vec::new(), examples);
            let Some(rows) = group.rows(&plan, together) else { continue };
            let batch = task.batch(batches, &rows.plan)?;
            let sums = Turns::train(task.turns, task.model.device(), || {
                task.log_probabilities(&batch, task.reference)
            })?;
            let found = batch.answers.iter().zip(sums).filter(|_| rows.counts);
            mine.extend(found.map(|(it, sum)| (it.example, it.role == Role::Rejected, sum)));
        }
        self.tell(group, false, &done, &mine)?;
        Ok(true)
    }

    /// Takes in what all ranks have found of the examples that are `done`; of each answer one rank has it. True if one of
    /// them is to stop.
    fn tell(
        &mut self,
        group: Group<'_>,
        stop: bool,
        done: &[usize],
        mine: &[Found],
    ) -> Result<bool> {
        let mut message = vec![u8::from(stop)];
        for (example, is_rejected, sum) in mine {
            message.extend((*example as u64).to_le_bytes());
            message.extend(u64::from(*is_rejected).to_le_bytes());
            message.extend(sum.to_le_bytes());
        }
        for example in done {
            if let Some(of_example) = self.0.get_mut(*example) {
                *of_example = Some([0.0; 2]);
            }
        }
        let mut stops = false;
        for (rank, message) in group.gather(WHAT, &message)?.iter().enumerate() {
            let (stop, found) = message.split_first().ok_or_else(|| elsewhere(rank, WHAT))?;
            stops |= *stop == 1;
            let (words, bytes) = found.as_chunks::<8>();
            let (found, words) = words.as_chunks::<3>();
            if !bytes.is_empty() || !words.is_empty() {
                return Err(elsewhere(rank, WHAT));
            }
            for [example, is_rejected, sum] in found {
                let example = u64::from_le_bytes(*example) as usize;
                let of_example = self.0.get_mut(example).and_then(Option::as_mut);
                let of_example = of_example.ok_or_else(|| elsewhere(rank, WHAT))?;
                of_example[usize::from(u64::from_le_bytes(*is_rejected) == 1)] =
                    f64::from_le_bytes(*sum);
            }
        }
        Ok(stops)
    }
}

/// Whether all of several data sets are known.
pub(super) fn are_complete(all: &[References]) -> bool {
    all.iter().all(References::are_complete)
}

/// Of how many examples they are known.
pub(super) fn count(all: &[References]) -> usize {
    all.iter().flat_map(|references| &references.0).flatten().count()
}

/// What rank 0 has read of data sets with so many examples each, for all ranks: others may see a folder that isn't shared, or
/// that is as it was a while ago.
pub(super) fn of_root(
    group: Group<'_>,
    read: Vec<References>,
    lengths: &[usize],
) -> Result<Vec<References>> {
    if group.size() == 1 {
        return Ok(read);
    }
    let mine = match group.is_root() {
        true => [numbers(&read), known(&read)].concat(),
        false => Vec::new(),
    };
    let examples = lengths.iter().sum::<usize>();
    let bytes = examples * (EXAMPLE + 1);
    // Where it is of other data, ranks would tell each other other numbers of pieces.
    if group.of_root(KEPT, &(bytes as u64).to_le_bytes())? != (bytes as u64).to_le_bytes() {
        return Err(elsewhere(0, KEPT));
    }
    let mut all = Vec::with_capacity(bytes);
    for start in (0..bytes).step_by(PIECE) {
        let piece = mine.get(start..bytes.min(start + PIECE)).unwrap_or_default();
        all.extend(group.of_root(KEPT, piece)?);
    }
    let (numbers, known) =
        all.split_at_checked(examples * EXAMPLE).ok_or_else(|| elsewhere(0, KEPT))?;
    Ok(of_parts(numbers, known, lengths))
}

/// The numbers as a file has them, of an example that isn't known zeros.
fn numbers(all: &[References]) -> Vec<u8> {
    let examples = all.iter().flat_map(|references| &references.0);
    examples.flat_map(|it| it.unwrap_or_default()).flat_map(f64::to_le_bytes).collect()
}

/// Of each example whether it is known.
fn known(all: &[References]) -> Vec<u8> {
    let examples = all.iter().flat_map(|references| &references.0);
    examples.map(|it| u8::from(it.is_some())).collect()
}

/// Those of data sets with so many examples each, of their [`numbers`] and of which are [`known`].
fn of_parts(numbers: &[u8], known: &[u8], lengths: &[usize]) -> Vec<References> {
    let numbers: Vec<f64> =
        numbers.as_chunks::<8>().0.iter().map(|bytes| f64::from_le_bytes(*bytes)).collect();
    let pairs = numbers.as_chunks::<2>().0.iter().zip(known);
    let mut examples = pairs.map(|(pair, known)| (*known == 1).then_some(*pair));
    let of = |length: &usize| References(examples.by_ref().take(*length).collect());
    lengths.iter().map(of).collect()
}

/// Those of several data sets as they are kept in a folder of checkpoints, if they were computed from what has this hash;
/// all or some of them.
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
    let is_some = tensors.tensor(SOME).is_ok();
    let tensor = |name: &str| tensors.tensor(name).map_err(|error| wrong(error.to_string()));
    let flags = if is_some { Some(tensor(KNOWN)?) } else { None };
    let tensor = tensor(if is_some { SOME } else { TENSOR })?;
    let expected = lengths.iter().sum::<usize>();
    if tensor.shape() != [expected, 2] || tensor.dtype() != safetensors::Dtype::F64 {
        let (shape, dtype) = (tensor.shape(), tensor.dtype());
        return Err(wrong(format!("has {shape:?} of {dtype:?}, expected [{expected}, 2] of F64")));
    }
    if let Some(flags) = flags.as_ref()
        && (flags.shape() != [expected] || flags.dtype() != safetensors::Dtype::U8)
    {
        let (shape, dtype) = (flags.shape(), flags.dtype());
        return Err(wrong(format!(
            "has {KNOWN} as {shape:?} of {dtype:?}, expected [{expected}] of U8"
        )));
    }
    let flags = flags.map_or(vec![1; expected], |flags| flags.data().to_vec());
    let content = of_content(tensor.data(), is_some.then_some(&flags));
    if let Some(expected) = saved(CONTENT).filter(|expected| **expected != content) {
        return Err(wrong(format!(
            "is not what was written here: the XXH3 of its numbers is {content}, expected {expected}"
        )));
    }
    Ok(Some(of_parts(tensor.data(), &flags, lengths)))
}

/// Keeps those of several data sets, all or some of them, in a folder of checkpoints, unless it has as many: computing them
/// takes long.
pub(super) fn keep(folder: &Path, hash: &str, all: &[References]) -> Result<()> {
    let lengths: Vec<usize> = all.iter().map(|references| references.0.len()).collect();
    match read(folder, hash, &lengths) {
        Ok(Some(kept)) if count(&kept) >= count(all) => Ok(()),
        _ => write(folder, hash, all),
    }
}

/// Writes those of several data sets into a folder of checkpoints, which is made where it is missing.
fn write(folder: &Path, hash: &str, all: &[References]) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(Error::io(folder))?;
    let path = folder.join(FILE);
    let (bytes, flags) = (numbers(all), known(all));
    let count = flags.len();
    let flags = (!are_complete(all)).then_some(flags);
    let content_hash = of_content(&bytes, flags.as_ref());
    let metadata = [(HASH, hash.to_string()), (CONTENT, content_hash)];
    let metadata = metadata.map(|(key, value)| (key.to_string(), value)).into();
    let shape = [count, 2];
    let tensors = match &flags {
        None => vec![(TENSOR, DType::F64, &shape[..])],
        Some(_) => vec![(SOME, DType::F64, &shape[..]), (KNOWN, DType::U8, &shape[..1])],
    };
    let mut content = files::safetensors_header(&path, tensors, Some(metadata))?;
    content.extend(bytes);
    content.extend(flags.into_iter().flatten());
    files::write_bytes_atomic(&path, content)
}

fn of_content(bytes: &[u8], flags: Option<&Vec<u8>>) -> String {
    let mut hash = Hash::new();
    hash.add(bytes);
    hash.add(flags.map_or(&[], Vec::as_slice));
    format!("{:016x}", hash.finish())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_and_some_of_them_are_read_as_they_were_written() {
        let folder = tempfile::tempdir().unwrap();
        let all = |third| {
            let first = References(vec![Some([1.5, -2.0]), Some([f64::MIN, 0.0])]);
            [first, References(vec![third])]
        };
        for (written, are_all) in [(all(Some([-0.25, 3.0])), true), (all(None), false)] {
            write(folder.path(), "a hash", &written).unwrap();
            let read = |hash, lengths: &[usize]| read(folder.path(), hash, lengths);
            let found = read("a hash", &[2, 1]).unwrap().unwrap();
            assert_eq!(found, written);
            assert_eq!(are_complete(&found), are_all);
            assert!(read("another", &[2, 1]).unwrap().is_none());
            assert!(read("a hash", &[2, 2]).unwrap_err().to_string().contains("expected [4, 2]"));
        }
        // A flag that has changed is noticed as a number is.
        let path = folder.path().join(FILE);
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() = 1;
        std::fs::write(&path, bytes).unwrap();
        let error = read(folder.path(), "a hash", &[2, 1]).unwrap_err().to_string();
        assert!(error.contains("is not what was written here"), "{error}");
    }

    #[test]
    fn what_is_kept_is_replaced_by_more_alone() {
        let folder = tempfile::tempdir().unwrap();
        let of = |known: &[Option<[f64; 2]>]| vec![References(known.to_vec())];
        let (none, one, two) =
            (of(&[None, None]), of(&[Some([1.0; 2]), None]), of(&[Some([1.0; 2]); 2]));
        let kept = |hash| read(folder.path(), hash, &[2]).unwrap();
        for (all, expected) in [(&none, &none), (&one, &one), (&none, &one), (&two, &two)] {
            keep(folder.path(), "a hash", all).unwrap();
            assert_eq!(kept("a hash").as_ref(), Some(expected));
        }
        for all in [&none, &one] {
            keep(folder.path(), "a hash", all).unwrap();
            assert_eq!(kept("a hash").as_ref(), Some(&two));
        }
        // What is of other data, or damaged, isn't more.
        keep(folder.path(), "another", &none).unwrap();
        assert_eq!(kept("another"), Some(none.clone()));
        std::fs::write(folder.path().join(FILE), "nothing").unwrap();
        keep(folder.path(), "a hash", &one).unwrap();
        assert_eq!(kept("a hash"), Some(one));
    }
}
