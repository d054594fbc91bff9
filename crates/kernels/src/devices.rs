//! The devices of this machine: how many there are, opening one, a step of a loop on it, and how much of its
//! memory is in use.

use candle_core::{Device, Result, Tensor};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

/// How many CUDA devices there are; 0 when this build has no CUDA, or the machine no driver.
pub fn cuda_count() -> usize {
    #[cfg(feature = "cuda")]
    return crate::backend::cuda::count();
    #[cfg(not(feature = "cuda"))]
    0
}

/// The CUDA device `ordinal`. Its work goes to one stream of its own, and memory that is freed is kept
/// for the next tensor of that stream; another of the process, as a second call opens one, gets it once the
/// first has been synchronized. It waits for work that other threads record on the GPU
/// ([`Recording`](crate::recording::Recording)).
///
/// # Errors
/// When this build has no CUDA, NVIDIA's libraries or the device are missing, the device is older than compute capability
/// 8.0, or this thread records work.
pub fn cuda(ordinal: usize) -> Result<Device> {
    #[cfg(feature = "cuda")]
    return crate::backend::cuda::open(ordinal);
    #[cfg(not(feature = "cuda"))]
    candle_core::bail!(
        "metal-candle-kernels: there is no CUDA device {ordinal} in this build; build it with the feature `cuda`"
    )
}

/// Whether the device multiplies e4m3 codes, as [`Arithmetic::Fp8`](crate::quantized::Arithmetic::Fp8) wants it: a CUDA
/// device of compute capability 9.0 (Hopper), in a build with kernels for it.
///
/// # Errors
/// When the driver fails.
pub fn multiplies_fp8(device: &Device) -> Result<bool> {
    #[cfg(feature = "cuda")]
    if device.is_cuda() {
        return crate::backend::cuda::Cuda::on(device)?.has_warpgroups();
    }
    let _ = device;
    Ok(false)
}

/// How many Metal devices there are; 0 when this build has no Metal, or macOS is older than 15.
pub fn metal_count() -> usize {
    #[cfg(feature = "metal")]
    return crate::backend::metal::count();
    #[cfg(not(feature = "metal"))]
    0
}

/// Whether the Metal device `ordinal` is there and has all that this crate's kernels are made for: family
/// Apple7, which the M1 began, or a later one. [`metal`] opens others, too, if they take the kernels.
pub fn metal_is_suitable(ordinal: usize) -> bool {
    #[cfg(feature = "metal")]
    return crate::backend::metal::is_suitable(ordinal);
    #[cfg(not(feature = "metal"))]
    {
        let _ = ordinal;
        false
    }
}

/// The Metal device `ordinal`, with this crate's kernels compiled for it.
///
/// # Errors
/// When this build has no Metal, macOS is older than 15, the device is missing, or it doesn't take the
/// kernels.
pub fn metal(ordinal: usize) -> Result<Device> {
    #[cfg(feature = "metal")]
    return crate::backend::metal::open(ordinal);
    #[cfg(not(feature = "metal"))]
    candle_core::bail!(
        "metal-candle-kernels: there is no Metal device {ordinal} in this build; build it with the feature `metal` on a Mac"
    )
}

/// That the variable `METAL_CANDLE_SIMD`, if it is set, names instructions of this machine's processor that the kernels can
/// keep to: `baseline`, and on x86-64 `avx2`, `avx512`, `avx512bf16` and `amx`. For programs that begin to compute: the
/// kernels take the best instructions if it names others.
///
/// # Errors
/// When it names others, with those of this machine.
pub fn check_cpu_instructions() -> Result<()> {
    metal_candle_cpu::simd::check().map_err(candle_core::Error::msg)
}

/// Runs one step of a loop on a device: of training, of evaluation, of writing a text. Where the device is
/// a Metal device, Objective-C objects that the step left behind are freed, it is waited for, also when it
/// failed, what failed on the device is reported, and memory goes back that the last two steps had
/// no use for. Without it, a long loop on Metal takes ever more memory. No other thread may use that Metal
/// device meanwhile: it could be told of this step's failure, and this step of none, and what it computes could be
/// wrong, as Candle forgets then which work has to wait for which.
///
/// # Errors
/// Those of the step, and of what it left on the device to be computed.
pub fn step<R, E: From<candle_core::Error>>(
    device: &Device,
    step: impl FnOnce() -> std::result::Result<R, E>,
) -> std::result::Result<R, E> {
    match device {
        #[cfg(feature = "metal")]
        Device::Metal(metal) => objc2::rc::autoreleasepool(|_| {
            // The next step would be told of what a step that failed left on the device.
            both(step, || crate::backend::metal::end_round(metal))
        }),
        _ => step(),
    }
}

/// Does both in this order, the second also when the first fails. Gives what the first gives, or the first error.
#[cfg(any(feature = "metal", test))]
pub(crate) fn both<R, E: From<candle_core::Error>>(
    first: impl FnOnce() -> std::result::Result<R, E>,
    second: impl FnOnce() -> Result<()>,
) -> std::result::Result<R, E> {
    let (result, ended) = (first(), second());
    let result = result?;
    ended?;
    Ok(result)
}

/// Who makes the large products of linear layers on Metal: `x·Wᵀ`, and `dy·W` in the backward pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MetalMatmul {
    /// This crate's kernels, in which an adapter's low-rank product is a part of the same sums, so that the
    /// result is written once.
    #[default]
    Fused,
    /// Candle's own product. What an adapter adds is added to it afterwards.
    Candle,
    /// Apple's `MPSMatrixMultiplication`, for f32 and f16 only. It cannot be put among the work that Candle
    /// has encoded: that is waited for, and so is each product, which makes it slow for small ones. What an
    /// adapter adds is added afterwards.
    Mps,
}

static METAL_MATMUL: AtomicU8 = AtomicU8::new(MetalMatmul::Fused as u8);

/// Chooses who makes the large products on Metal from now on, in the whole process. The result may differ in
/// its last bits. Weights of another dtype than the activations are converted for each product, unless it is
/// [`MetalMatmul::Fused`].
pub fn set_metal_matmul(choice: MetalMatmul) {
    METAL_MATMUL.store(choice as u8, Ordering::Relaxed);
}

/// What [`set_metal_matmul`] chose last.
pub fn metal_matmul() -> MetalMatmul {
    const CANDLE: u8 = MetalMatmul::Candle as u8;
    const MPS: u8 = MetalMatmul::Mps as u8;
    match METAL_MATMUL.load(Ordering::Relaxed) {
        CANDLE => MetalMatmul::Candle,
        MPS => MetalMatmul::Mps,
        _ => MetalMatmul::Fused,
    }
}

/// Whether operations on this tensor are computed by a GPU.
pub fn computes_on_gpu(tensor: &Tensor) -> bool {
    #[cfg(all(any(feature = "metal-emulation", test), not(feature = "metal")))]
    if crate::backend::metal::is_emulating() {
        return true;
    }
    !tensor.device().is_cpu()
}

/// The time of `count` kernels on a GPU that do nothing, launched one behind the other with memory of their
/// own for a result, until all are done: what operations take at least. `None` where it isn't measured: on the
/// CPU and on Metal.
///
/// # Errors
/// When the driver refuses.
pub fn launch_time(device: &Device, count: usize) -> Result<Option<Duration>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => crate::backend::cuda::launch_time(device, count).map(Some),
        _ => {
            let _ = count;
            Ok(None)
        }
    }
}

/// Memory of a device that tensors take, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryUse {
    /// Now.
    pub current: u64,
    /// At most, since the device was opened or [`reset_peak_memory`] was called.
    pub peak: u64,
}

/// The memory that tensors on `device` take; `None` for the CPU. On Metal it is what the process has
/// allocated there, with what is kept for the next tensors.
///
/// # Errors
/// When the driver doesn't answer.
pub fn memory(device: &Device) -> Result<Option<MemoryUse>> {
    let found: Option<(u64, u64)> = match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => Some(crate::backend::cuda::memory(device)?),
        #[cfg(feature = "metal")]
        Device::Metal(metal) => Some(crate::backend::metal::memory(metal)?),
        _ => None,
    };
    Ok(found.map(|(current, peak)| MemoryUse { current, peak }))
}

/// The memory of a GPU that new tensors can take, in bytes; `None` for the CPU. On Metal, whose memory is the
/// machine's, it is what the process may still take of what the system recommends.
///
/// # Errors
/// When the driver doesn't answer.
pub fn free_memory(device: &Device) -> Result<Option<u64>> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => crate::backend::cuda::free_memory(device).map(Some),
        #[cfg(feature = "metal")]
        Device::Metal(metal) => Ok(Some(crate::backend::metal::free_memory(metal))),
        _ => Ok(None),
    }
}

/// A place in the work of a device, of which it can be said whether it is done.
#[derive(Debug)]
pub struct Mark {
    #[cfg(feature = "cuda")]
    event: Option<crate::backend::cuda::Event>,
}

impl Mark {
    /// Behind all work so far that this thread hasn't recorded.
    ///
    /// # Errors
    /// When the driver doesn't answer.
    pub fn new(device: &Device) -> Result<Self> {
        #[cfg(feature = "cuda")]
        return Ok(Self {
            event: device
                .is_cuda()
                .then(|| crate::backend::cuda::Event::new(device))
                .transpose()?,
        });
        #[cfg(not(feature = "cuda"))]
        {
            let _ = device;
            Ok(Self {})
        }
    }

    /// Whether the work before it is done, without waiting: at once on the CPU, and on Metal it isn't looked at.
    ///
    /// # Errors
    /// That of the work.
    pub fn is_done(&self) -> Result<bool> {
        #[cfg(feature = "cuda")]
        if let Some(event) = &self.event {
            return event.is_done();
        }
        Ok(true)
    }
}

/// Starts to look for the peak of [`memory`] anew; on the CPU gives back the working memory that this thread keeps for its next
/// operations, so that it isn't counted with what those need.
///
/// # Errors
/// When the driver doesn't answer.
pub fn reset_peak_memory(device: &Device) -> Result<()> {
    match device {
        #[cfg(feature = "cuda")]
        Device::Cuda(_) => crate::backend::cuda::reset_peak(device),
        #[cfg(feature = "metal")]
        Device::Metal(metal) => crate::backend::metal::reset_peak(metal),
        _ => {
            metal_candle_cpu::scratch::give_back();
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Error;
    use std::cell::RefCell;

    #[test]
    fn the_second_is_done_also_when_the_first_fails_and_the_first_error_is_told() {
        let fails = |fails: bool, what: &'static str| match fails {
            true => Err(Error::Msg(what.into())),
            false => Ok(()),
        };
        for (first, second, expected) in [
            (false, false, None),
            (true, false, Some("first")),
            (false, true, Some("second")),
            (true, true, Some("first")),
        ] {
            let done = RefCell::new(Vec::new());
            let work = |what, is_to_fail| {
                done.borrow_mut().push(what);
                fails(is_to_fail, what)
            };
            let result = both(|| work("first", first), || work("second", second));
            assert_eq!(result.err().map(|error| error.to_string()).as_deref(), expected);
            assert_eq!(*done.borrow(), ["first", "second"]);
        }
    }
}
