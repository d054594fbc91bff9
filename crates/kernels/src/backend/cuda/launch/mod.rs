//! What an operation takes at least, one behind the other: memory for its result, and a kernel.

use super::{Cuda, Module, module};
use candle_core::cuda_backend::WrapErr;
use candle_core::{DType, Device, Result};
use std::time::{Duration, Instant};

static MODULE: Module = module!("launch");

/// Elements of a result.
const ELEMENTS: usize = 1024;

/// The time of `count` kernels that do nothing, each with memory of its own for a result, until all are done.
pub(crate) fn launch_time(device: &Device, count: usize) -> Result<Duration> {
    let cuda = Cuda::on(device)?;
    let mut kept = Vec::with_capacity(count);
    cuda.stream.synchronize().w()?;
    let started = Instant::now();
    for _ in 0..count {
        let result = cuda.storage(ELEMENTS, DType::F32)?;
        let launch = MODULE.launch(&cuda, "nothing", (1, 1, 1), 32, 0)?.overlapping();
        let pointer = 0u64;
        // SAFETY: the kernel doesn't follow the pointer.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&pointer);
            })?;
        }
        kept.push(result);
    }
    cuda.stream.synchronize().w()?;
    Ok(started.elapsed())
}
