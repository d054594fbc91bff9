//! Finding and opening devices, and how much memory is in use.

use super::recording::Opening;
use candle_core::cuda_backend::cudarc::driver::sys::{
    self, CUmemPool_attribute_enum as PoolAttribute, CUmemoryPool,
};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, result};
use candle_core::cuda_backend::{CudaDevice, WrapErr};
use candle_core::{Device, Result, bail};
use std::ffi::c_void;

/// Whether NVIDIA's libraries can be loaded. Loading one that is missing would panic.
#[cfg(feature = "dynamic-loading")]
fn missing_library() -> Option<&'static str> {
    use candle_core::cuda_backend::cudarc::{cublas, cublaslt, curand};
    // SAFETY: these only try to open libraries.
    unsafe {
        let libraries = [
            ("the driver, libcuda", sys::is_culib_present()),
            ("libcublas", cublas::sys::is_culib_present()),
            ("libcublasLt", cublaslt::sys::is_culib_present()),
            ("libcurand", curand::sys::is_culib_present()),
        ];
        libraries.into_iter().find(|(_, found)| !found).map(|(name, _)| name)
    }
}

/// A program that is linked with them would not have started.
#[cfg(not(feature = "dynamic-loading"))]
fn missing_library() -> Option<&'static str> {
    None
}

/// The number of devices; 0 without a driver.
pub(crate) fn count() -> usize {
    if missing_library().is_some() || result::init().is_err() {
        return 0;
    }
    CudaContext::device_count().map_or(0, |count| count.max(0) as usize)
}

/// A device with a stream of its own, whose memory stays with the process once it is taken.
pub(crate) fn open(ordinal: usize) -> Result<Device> {
    if let Some(library) = missing_library() {
        bail!(
            "metal-candle-kernels: CUDA cannot be used: {library} was not found; install NVIDIA's driver and CUDA 13's libraries, or name their folder in LD_LIBRARY_PATH"
        )
    }
    let count = count();
    if ordinal >= count {
        bail!("metal-candle-kernels: there is no CUDA device {ordinal}; {count} were found")
    }
    let _opening = Opening::begin(ordinal)?;
    let device = CudaDevice::new_with_stream(ordinal)?;
    let stream = device.cuda_stream();
    let (major, minor) = stream.context().compute_capability().w()?;
    if major < 8 {
        bail!(
            "metal-candle-kernels: CUDA device {ordinal} has compute capability {major}.{minor}, expected at least 8.0 (Ampere)"
        )
    }
    // SAFETY: everything of this device is launched on its one stream, but transfers, which begin behind it and are waited
    // for, by the host or by that stream, before their memory is used or given back (`lane.rs`).
    unsafe { device.disable_event_tracking() };
    let pool = pool(ordinal)?;
    // What is freed is kept for the next allocation instead of going back to the system.
    let everything = u64::MAX;
    set(pool, PoolAttribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, everything)?;
    // Memory goes from work to later work of one stream. Looking for some that another stream is done with
    // makes an allocation and a launch take twice the host's time.
    for reuse in [
        PoolAttribute::CU_MEMPOOL_ATTR_REUSE_FOLLOW_EVENT_DEPENDENCIES,
        PoolAttribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC,
        PoolAttribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES,
    ] {
        set(pool, reuse, 0)?;
    }
    Ok(Device::Cuda(device))
}

/// Bytes in use now and at most since the device was opened or [`reset_peak`] was called.
pub(crate) fn memory(device: &Device) -> Result<(u64, u64)> {
    let pool = pool(ordinal(device)?)?;
    Ok((
        get(pool, PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
        get(pool, PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH)?,
    ))
}

/// Bytes that are free, with those that the process keeps for its next tensors.
pub(crate) fn free_memory(device: &Device) -> Result<u64> {
    if let Device::Cuda(device) = device {
        // The driver tells of the device that the thread is bound to.
        device.cuda_stream().context().bind_to_thread().w()?;
    }
    let pool = pool(ordinal(device)?)?;
    let kept = get(pool, PoolAttribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?
        .saturating_sub(get(pool, PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?);
    let (free, _) = result::mem_get_info().w()?;
    Ok(free as u64 + kept)
}

/// Gives what the process keeps for its next tensors back to the system, for who takes memory otherwise.
pub(crate) fn give_back(device: &Device) -> Result<()> {
    let pool = pool(ordinal(device)?)?;
    // SAFETY: the pool is the device's; what is in use stays.
    unsafe { sys::cuMemPoolTrimTo(pool, 0) }.result().w()
}

/// Starts to look for the peak anew.
pub(crate) fn reset_peak(device: &Device) -> Result<()> {
    set(pool(ordinal(device)?)?, PoolAttribute::CU_MEMPOOL_ATTR_USED_MEM_HIGH, 0)
}

fn ordinal(device: &Device) -> Result<usize> {
    match device {
        Device::Cuda(device) => Ok(device.cuda_stream().context().ordinal()),
        _ => bail!("metal-candle-kernels: expected a CUDA device"),
    }
}

/// The pool that memory comes from.
fn pool(ordinal: usize) -> Result<CUmemoryPool> {
    let device = result::device::get(ordinal as i32).w()?;
    let mut pool: CUmemoryPool = std::ptr::null_mut();
    // SAFETY: the pointer is to a live place for the answer.
    unsafe { sys::cuDeviceGetDefaultMemPool(&mut pool, device) }.result().w()?;
    Ok(pool)
}

fn set(pool: CUmemoryPool, attribute: PoolAttribute, mut value: u64) -> Result<()> {
    let value: *mut c_void = (&raw mut value).cast();
    // SAFETY: the attributes used here are numbers of at most 64 bits; of shorter ones the first bits count.
    unsafe { sys::cuMemPoolSetAttribute(pool, attribute, value) }.result().w()
}

fn get(pool: CUmemoryPool, attribute: PoolAttribute) -> Result<u64> {
    let mut value = 0u64;
    // SAFETY: the attributes used here are 64-bit numbers.
    unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()) }.result().w()?;
    Ok(value)
}
