//! The memory of Metal devices: where results lie, how much there is, and what is given back.

use super::encode::metal_error;
use super::pool::{Pool, buffer_size, room};
use crate::devices::both;
use candle_core::metal_backend::{DeviceId, MetalDevice};
use candle_core::{Result, bail};
use candle_metal_kernels::MetalKernelError;
use candle_metal_kernels::metal::Buffer;
use objc2_metal::MTLResourceOptions;
use std::sync::{Arc, Mutex};

struct Memory {
    device: DeviceId,
    pool: Pool<Buffer>,
    /// The most bytes that were seen allocated.
    peak: u64,
}

static MEMORIES: Mutex<Vec<Memory>> = Mutex::new(Vec::new());

/// Only the device sees what is in a buffer, and hazards are looked for by Candle, as in its own.
const OPTIONS: MTLResourceOptions = MTLResourceOptions(
    MTLResourceOptions::StorageModePrivate.0 | MTLResourceOptions::HazardTrackingModeUntracked.0,
);

fn with<R>(device: &MetalDevice, task: impl FnOnce(&mut Memory) -> Result<R>) -> Result<R> {
    let Ok(mut memories) = MEMORIES.lock() else {
        bail!("metal-candle-kernels: another thread failed while it allocated memory")
    };
    let id = device.id();
    if let Some(memory) = memories.iter_mut().find(|memory| memory.device == id) {
        return task(memory);
    }
    let mut memory = Memory { device: id, pool: Pool::new(), peak: 0 };
    let result = task(&mut memory);
    memories.push(memory);
    result
}

/// A buffer for so many bytes, which hold anything.
pub(super) fn buffer(device: &MetalDevice, bytes: usize) -> Result<Arc<Buffer>> {
    with(device, |memory| {
        if let Some(buffer) = memory.pool.take(bytes) {
            return Ok(buffer);
        }
        let (size, metal) = (buffer_size(bytes), device.metal_device());
        let most = metal.recommended_max_working_set_size();
        if metal.current_allocated_size().saturating_add(size) > most {
            release(device, memory.pool.remove_free())?;
        }
        let buffer = match metal.new_buffer(size, OPTIONS) {
            Ok(buffer) => Arc::new(buffer),
            Err(MetalKernelError::FailedToCreateResource(_)) => {
                let taken = metal.current_allocated_size();
                bail!(
                    "metal-candle-kernels: the Metal device is out of memory: {} MiB were asked for while {} of the {} MiB that it recommends to take are taken",
                    bytes >> 20,
                    taken >> 20,
                    most >> 20
                )
            }
            Err(error) => return Err(metal_error(error)),
        };
        device.register_buffers([&*buffer]);
        memory.pool.keep(bytes, &buffer);
        memory.peak = memory.peak.max(metal.current_allocated_size() as u64);
        Ok(buffer)
    })
}

/// Gives buffers back that nothing on the host holds.
fn release(device: &MetalDevice, buffers: Vec<Arc<Buffer>>) -> Result<()> {
    if buffers.is_empty() {
        return Ok(());
    }
    // The device may still be at work with them.
    device.flush_and_wait_current()?;
    device.unregister_buffers(buffers.iter().map(|buffer| &**buffer));
    Ok(())
}

/// Waits for the device, reports what failed there, and gives back memory that the last two rounds of a
/// loop had no use for, Candle's included.
pub(crate) fn end_round(device: &MetalDevice) -> Result<()> {
    let wait = || {
        both(
            // This waits for what was encoded even where another thread has taken the last command buffer.
            || device.flush_and_wait_current(),
            // A value that was read back shows the failure of its own command buffer only; this looks at all, and lets
            // go of those that failed, which the next round would be told of.
            || device.wait_until_completed(),
        )
    };
    both(wait, || with(device, |memory| release(device, memory.pool.end_round())))
}

/// Bytes that are allocated now, and at most as far as was seen: whenever a result needed a new buffer.
pub(crate) fn memory(device: &MetalDevice) -> Result<(u64, u64)> {
    with(device, |memory| {
        let current = device.metal_device().current_allocated_size() as u64;
        memory.peak = memory.peak.max(current);
        Ok((current, memory.peak))
    })
}

/// Bytes that can still be allocated.
pub(crate) fn free_memory(device: &MetalDevice) -> u64 {
    let metal = device.metal_device();
    room(metal.recommended_max_working_set_size(), metal.current_allocated_size())
}

/// Starts to look for the peak anew.
pub(crate) fn reset_peak(device: &MetalDevice) -> Result<()> {
    with(device, |memory| {
        memory.peak = 0;
        Ok(())
    })
}
