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
        if is_so(&round) { Ok(round) } else { Err(ended()) }
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
}

#[cfg(feature = "cuda")]
mod gpus {
    use super::{ended, joined, locked};
    use crate::model::Sums;
    use crate::{Error, Result};
    use candle_core::{Device, Tensor};
    use metal_candle_kernels::nccl::{Communicator, unique_id};
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex, PoisonError};

    /// A rank with a GPU.
    #[derive(Debug)]
    struct Gpu {
        index: usize,
        all: Arc<Gpus>,
    }

    #[derive(Debug)]
    struct Gpus {
        /// Those of all ranks, as who can't go on ends the work of all.
        communicators: Vec<Mutex<Communicator>>,
        is_over: AtomicBool,
    }

    pub(super) fn join(devices: &[Device]) -> Result<Vec<Arc<dyn Sums>>> {
        let (id, failure) = (unique_id()?, Mutex::new(None));
        let wait = || if locked(&failure).is_some() { Err(ended()) } else { Ok(()) };
        let join = |index: usize, device: &Device| {
            let joined = Communicator::join::<Error>(device, id, index, devices.len(), wait);
            match joined {
                Ok(communicator) => Some(Mutex::new(communicator)),
                // What the first says that fails is why the others do.
                Err(error) => {
                    locked(&failure).get_or_insert(error);
                    None
                }
            }
        };
        let communicators = std::thread::scope(|scope| {
            let (ranks, join) = (devices.iter().enumerate(), &join);
            let threads: Vec<_> =
                ranks.map(|(index, device)| scope.spawn(move || join(index, device))).collect();
            threads.into_iter().filter_map(joined).collect()
        });
        if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            return Err(error);
        }
        let all = Arc::new(Gpus { communicators, is_over: AtomicBool::new(false) });
        let rank = |index| Arc::new(Gpu { index, all: all.clone() }) as Arc<dyn Sums>;
        Ok((0..devices.len()).map(rank).collect())
    }

    impl Sums for Gpu {
        fn sum(&self, x: &Tensor) -> Result<Tensor> {
            let wait = || match self.all.is_over.load(Ordering::Relaxed) {
                true => Err(ended()),
                false => Ok(()),
            };
            wait()?;
            locked(&self.all.communicators[self.index]).sum(x, wait)?;
            Ok(x.clone())
        }

        fn end(&self) {
            self.all.is_over.store(true, Ordering::Relaxed);
            for communicator in &self.all.communicators {
                locked(communicator).abort_beside();
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
        let work = |index: usize, rank: &Arc<dyn Sums>| {
            let mut sums = Vec::new();
            for round in 0..50 {
                let x = Tensor::new(&[index as f32, (round * index) as f32], &Device::Cpu).unwrap();
                sums.push(rank.sum(&x).unwrap().to_vec1::<f32>().unwrap());
            }
            if index == 1 {
                rank.end();
            }
            (sums, rank.sum(&Tensor::zeros(1, DType::BF16, &Device::Cpu).unwrap()))
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = ranks
                .iter()
                .enumerate()
                .map(|(index, rank)| scope.spawn(move || work(index, rank)))
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
