//! Devices of this machine that compute one model together, each with a part of every layer: tensor parallelism. They are
//! threads of this process, which add up over NCCL on NVIDIA GPUs, and through the memory that they share on CPUs.

use crate::model::{Holding, Model, Placement, Quantization, Sums, TensorRank};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A model of which each of `devices` has a part. An [`Engine`](crate::engine::Engine) of it writes texts; it takes
/// adapters that are low-rank updates of linear layers, loaded for this model.
///
/// # Errors
/// When the model's heads or width can't be divided by the number of devices, and as [`Model::load_with`].
pub fn load(
    path: impl AsRef<Path>,
    dtype: DType,
    devices: &[Device],
    quantization: Option<Quantization>,
) -> Result<Model> {
    let path = path.as_ref();
    build(devices, |device, placement| {
        Model::load_with(path, dtype, device, Holding { quantization, placement })
    })
}

/// The model whose part for each device `make` gives, with this placement, all at the same time.
///
/// # Errors
/// Those of `make`, and when the devices aren't all CPUs, or NVIDIA GPUs with NCCL.
pub fn build(
    devices: &[Device],
    make: impl Fn(&Device, Placement) -> Result<Model> + Sync,
) -> Result<Model> {
    let sums = join(devices)?;
    let size = devices.len();
    let make = |index: usize, device: &Device, sums: Arc<dyn Sums>| {
        let rank = TensorRank { index, size, sums };
        make(device, Placement::TensorParallel(rank)).map(Arc::new)
    };
    let parts: Result<Vec<_>> = std::thread::scope(|scope| {
        let threads: Vec<_> = devices
            .iter()
            .zip(sums)
            .enumerate()
            .map(|(index, (device, sums))| {
                let make = &make;
                scope.spawn(move || make(index, device, sums))
            })
            .collect();
        threads.into_iter().map(joined).collect()
    });
    Model::over(parts?)
}

/// What a thread gives, or its panic.
fn joined<T>(thread: std::thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Each device's way to add up with the others.
fn join(devices: &[Device]) -> Result<Vec<Arc<dyn Sums>>> {
    if devices.iter().all(Device::is_cpu) {
        return Ok(Threads::all(devices.len()));
    }
    #[cfg(feature = "cuda")]
    if devices.iter().all(Device::is_cuda) {
        return gpus::join(devices);
    }
    Err(Error::Unsupported(
        "tensor parallelism over these devices; expected NVIDIA GPUs, or CPUs alone".into(),
    ))
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn ended() -> Error {
    Error::option("tensor_parallel", "another rank can't go on")
}

/// A rank whose tensors lie in the memory of this process.
#[derive(Debug)]
struct Threads {
    index: usize,
    table: Arc<Table>,
}

/// Where they lay down what is added up.
#[derive(Debug, Default)]
struct Table {
    sum: Mutex<Round>,
    changed: Condvar,
}

/// A sum under way.
#[derive(Debug, Default)]
struct Round {
    given: Vec<Option<Tensor>>,
    sum: Option<Tensor>,
    /// How many have taken it.
    taken: usize,
    is_over: bool,
}

impl Threads {
    fn all(size: usize) -> Vec<Arc<dyn Sums>> {
        let sum = Mutex::new(Round { given: vec![None; size], ..Round::default() });
        let table = Arc::new(Table { sum, changed: Condvar::new() });
        let rank = |index| Arc::new(Self { index, table: table.clone() }) as Arc<dyn Sums>;
        (0..size).map(rank).collect()
    }

    /// Waits until it is so.
    fn until(&self, is_so: impl Fn(&Round) -> bool) -> Result<MutexGuard<'_, Round>> {
        let round = locked(&self.table.sum);
        let waits = |round: &mut Round| !round.is_over && !is_so(round);
        let waited = self.table.changed.wait_while(round, waits);
        let round = waited.unwrap_or_else(PoisonError::into_inner);
        if round.is_over { Err(ended()) } else { Ok(round) }
    }
}

impl Sums for Threads {
    fn sum(&self, x: &Tensor) -> Result<Tensor> {
        // All have taken the last one.
        let mut round = self.until(|round| round.sum.is_none())?;
        round.given[self.index] = Some(x.clone());
        if round.given.iter().all(Option::is_some) {
            let mut sum: Option<Tensor> = None;
            for part in round.given.iter_mut().filter_map(Option::take) {
                let part = part.to_dtype(DType::F32)?;
                sum = Some(sum.map_or(Ok(part.clone()), |sum| sum + part)?);
            }
            round.sum = sum.map(|sum| sum.to_dtype(x.dtype())).transpose()?;
            self.table.changed.notify_all();
        }
        drop(round);
        let mut round = self.until(|round| round.sum.is_some())?;
        let sum = round.sum.clone().ok_or_else(ended)?;
        round.taken += 1;
        if round.taken == round.given.len() {
            (round.sum, round.taken) = (None, 0);
            self.table.changed.notify_all();
        }
        Ok(sum)
    }

    fn end(&self) {
        locked(&self.table.sum).is_over = true;
        self.table.changed.notify_all();
    }

    fn abort(&self) {
        self.end();
    }

    fn begin_anew(&self) -> Result<()> {
        let mut round = locked(&self.table.sum);
        *round = Round { given: vec![None; round.given.len()], ..Round::default() };
        Ok(())
    }
}

#[cfg(feature = "cuda")]
mod gpus {
    use super::{ended, joined, locked};
    use crate::model::Sums;
    use crate::{Error, Result};
    use candle_core::{Device, Tensor};
    use metal_candle_kernels::nccl::{Communicator, ID_BYTES, unique_id};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};
    use std::time::{Duration, Instant};

    /// How long a rank waits for the others to join.
    const LIMIT: Duration = Duration::from_secs(60);

    /// A rank with a GPU.
    #[derive(Debug)]
    struct Gpu {
        index: usize,
        device: Device,
        all: Arc<Gpus>,
    }

    #[derive(Debug)]
    struct Gpus {
        /// Those of all ranks, as who can't go on ends the work of all.
        communicators: Vec<Mutex<Option<Communicator>>>,
        is_over: AtomicBool,
        meeting: Mutex<Meeting>,
    }

    /// Where ranks meet to join: what they are known by, of the first, and how many have come.
    #[derive(Debug, Default)]
    struct Meeting {
        group: Option<Arc<Group>>,
        came: usize,
    }

    #[derive(Debug)]
    struct Group {
        id: [u8; ID_BYTES],
        /// Why somebody can't join.
        failure: Mutex<Option<String>>,
    }

    pub(super) fn join(devices: &[Device]) -> Result<Vec<Arc<dyn Sums>>> {
        let all = Arc::new(Gpus {
            communicators: devices.iter().map(|_| Mutex::default()).collect(),
            is_over: AtomicBool::new(false),
            meeting: Mutex::default(),
        });
        let ranks = devices.iter().enumerate();
        let ranks: Vec<_> = ranks
            .map(|(index, device)| Gpu { index, device: device.clone(), all: all.clone() })
            .collect();
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                ranks.iter().map(|rank| scope.spawn(|| rank.begin_anew())).collect();
            let joined: Vec<_> = threads.into_iter().map(joined).collect();
            joined.into_iter().collect::<Result<()>>()
        })?;
        Ok(ranks.into_iter().map(|rank| Arc::new(rank) as Arc<dyn Sums>).collect())
    }

    impl Gpu {
        /// Those who join now.
        fn group(&self) -> Result<Arc<Group>> {
            let mut meeting = locked(&self.all.meeting);
            let group = match meeting.group.take() {
                Some(group) => group,
                None => Arc::new(Group { id: unique_id()?, failure: Mutex::default() }),
            };
            meeting.came += 1;
            if meeting.came == self.all.communicators.len() {
                *meeting = Meeting::default();
            } else {
                meeting.group = Some(group.clone());
            }
            Ok(group)
        }
    }

    impl Sums for Gpu {
        fn sum(&self, x: &Tensor) -> Result<Tensor> {
            let wait = || match self.all.is_over.load(Ordering::Relaxed) {
                true => Err(ended()),
                false => Ok(()),
            };
            wait()?;
            match &*locked(&self.all.communicators[self.index]) {
                Some(communicator) => communicator.sum(x, wait)?,
                None => return Err(ended()),
            }
            Ok(x.clone())
        }

        fn end(&self) {
            self.all.is_over.store(true, Ordering::Relaxed);
        }

        fn abort(&self) {
            self.end();
            for communicator in &self.all.communicators {
                *locked(communicator) = None;
            }
        }

        fn begin_anew(&self) -> Result<()> {
            // Work that waits for a sum which nobody makes any more.
            *locked(&self.all.communicators[self.index]) = None;
            let group = self.group()?;
            let begun = Instant::now();
            let wait = || match locked(&group.failure).as_ref() {
                Some(failure) => Err(Error::option("tensor_parallel", failure)),
                None if begun.elapsed() > LIMIT => Err(Error::option(
                    "tensor_parallel",
                    format!("the ranks have not found each other within {} s", LIMIT.as_secs()),
                )),
                None => Ok(()),
            };
            let size = self.all.communicators.len();
            match Communicator::join(&self.device, group.id, self.index, size, wait) {
                Ok(communicator) => {
                    *locked(&self.all.communicators[self.index]) = Some(communicator);
                    self.all.is_over.store(false, Ordering::Relaxed);
                    Ok(())
                }
                Err(error) => {
                    // What the first says is why the others can't.
                    locked(&group.failure).get_or_insert_with(|| error.to_string());
                    Err(error)
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_add_up_and_end_together() {
        let ranks = Threads::all(3);
        let all_are_done = std::sync::Barrier::new(3);
        let work = |index: usize, rank: &Arc<dyn Sums>| {
            let mut sums = Vec::new();
            for round in 0..50 {
                let x = Tensor::new(&[index as f32, (round * index) as f32], &Device::Cpu).unwrap();
                sums.push(rank.sum(&x).unwrap().to_vec1::<f32>().unwrap());
            }
            all_are_done.wait();
            if index == 1 {
                rank.end();
            }
            (sums, rank.sum(&Tensor::zeros(1, DType::BF16, &Device::Cpu).unwrap()))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .iter()
                .enumerate()
                .map(|(index, rank)| {
                    let work = &work;
                    scope.spawn(move || work(index, rank))
                })
                .collect();
            for thread in threads {
                let (sums, last) = thread.join().unwrap();
                let expected: Vec<_> = (0..50).map(|round| vec![3.0, 3.0 * round as f32]).collect();
                assert_eq!(sums, expected);
                assert!(last.unwrap_err().to_string().contains("another rank"));
            }
        });
    }
}
