//! Pinned memory of the host, and copies of the device's memory to it.

use super::{Cuda, Lane};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::CUevent_flags;
use candle_core::cuda_backend::cudarc::driver::{CudaEvent, CudaStream, result, sys};
use candle_core::{CpuStorage, DType, Device, Layout, Result, Storage, Tensor, bail};
use rayon::prelude::*;
use std::ffi::c_void;
use std::sync::Arc;

/// Bytes that one thread touches at a time, and what the smallest page has.
const TOUCH: usize = 16 << 20;
const PAGE: usize = 4096;
/// What the largest page has that isn't a huge one.
const LARGE_PAGE: usize = 64 << 10;

/// Zeros of the host on pages that nothing else lies on. Whole pages are pinned, and copies between the device and any
/// memory that is on these are still under way when their calls return, which those who copy what isn't pinned don't
/// expect.
pub(crate) fn zeros_on_own_pages(shape: &[usize], dtype: DType) -> Result<Tensor> {
    let (count, size) = (shape.iter().product::<usize>(), dtype.size_in_bytes());
    let zeros = Tensor::zeros(count + 2 * LARGE_PAGE / size, dtype, &Device::Cpu)?;
    let (address, _) = memory(&zeros)?;
    let start = (address.next_multiple_of(LARGE_PAGE) - address) / size;
    zeros.narrow(0, start, count)?.reshape(shape)
}

/// The memory of a tensor of [`zeros_on_own_pages`], pinned so that the device writes to it at the speed of the bus, and
/// beside other work. It is dropped before the tensor.
#[derive(Debug)]
pub(crate) struct Pinned {
    address: usize,
    stream: Arc<CudaStream>,
}

impl Pinned {
    pub(crate) fn new(tensor: &Tensor, device: &Device) -> Result<Self> {
        let stream = Cuda::on(device)?.stream;
        let (address, bytes) = memory(tensor)?;
        // Pages come into being where they are touched first, which the driver does with one thread.
        let pages: Vec<usize> = (0..bytes).step_by(TOUCH).collect();
        pages.into_par_iter().for_each(|start| {
            for byte in (start..bytes.min(start + TOUCH)).step_by(PAGE) {
                // SAFETY: within the tensor, which is new and zero and which nobody else has.
                unsafe { ((address + byte) as *mut u8).write_volatile(0) };
            }
        });
        stream.context().bind_to_thread().w()?;
        // SAFETY: the memory is that of the tensor, and is unpinned before that is dropped.
        unsafe { sys::cuMemHostRegister_v2(address as *mut c_void, bytes, 0) }.result().w()?;
        Ok(Self { address, stream })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // What fails here has nobody to tell; the memory then stays pinned until the process ends.
        let _ = self.stream.context().bind_to_thread();
        // Kernels may be at work on it. Others' streams may be captured, which waiting for the whole device would end.
        let _ = self.stream.synchronize();
        // SAFETY: pinned by this, and nothing is under way that finds it.
        let _ = unsafe { sys::cuMemHostUnregister(self.address as *mut c_void) }.result();
    }
}

/// Copies that were launched.
#[derive(Debug)]
pub(crate) struct Copied {
    event: CudaEvent,
    /// They lie on the device until then.
    _sources: Vec<Tensor>,
}

impl Copied {
    pub(crate) fn wait(self) -> Result<()> {
        self.event.synchronize().w()
    }
}

impl Drop for Copied {
    fn drop(&mut self) {
        // The host's memory may be given back now.
        let _ = self.event.synchronize();
    }
}

/// Launches copies of those contiguous tensors that are on the device to the memory of contiguous ones of the host, which
/// outlive what is returned.
pub(crate) fn copy_to_host(device: &Device, from: &[Tensor], to: &[Tensor]) -> Result<Copied> {
    let cuda = Cuda::on(device)?;
    super::refuse_in_recording("a copy to the host")?;
    cuda.stream.context().bind_to_thread().w()?;
    for (from, to) in from.iter().zip(to) {
        if from.elem_count() == 0 || from.device().is_cpu() {
            continue;
        }
        if !from.device().same_device(device) {
            bail!("metal-candle-kernels: host: tensors to copy are on several devices")
        }
        let pointer = cuda.strided(from)?.pointer;
        let (address, bytes) = memory(to)?;
        // SAFETY: both have so many bytes; the host's are read after the event below.
        unsafe {
            let bytes = std::slice::from_raw_parts_mut(address as *mut u8, bytes);
            result::memcpy_dtoh_async(bytes, pointer, cuda.stream.cu_stream())
        }
        .w()?;
    }
    // The thread that waits leaves its core to others.
    let event = cuda.stream.record_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC)).w()?;
    Ok(Copied { event, _sources: from.to_vec() })
}

/// Launches copies of contiguous tensors in pinned memory of the host to new ones of the device, on `lane`. Those of the
/// host stay until the lane is done.
pub(crate) fn launch_uploads(lane: &Lane, from: &[Tensor], device: &Device) -> Result<Vec<Tensor>> {
    let cuda = Cuda::on(device)?;
    let to = from
        .iter()
        .map(|tensor| cuda.empty(tensor.shape(), tensor.dtype()))
        .collect::<Result<Vec<_>>>()?;
    lane.follow()?;
    let launch = || -> Result<()> {
        for (from, to) in from.iter().zip(&to) {
            if from.elem_count() == 0 {
                continue;
            }
            let (address, bytes) = memory(from)?;
            let address = address as *const c_void;
            // SAFETY: both have so many bytes, and live until the lane is done, which is waited for below or by the caller.
            unsafe { sys::cuMemcpyHtoDAsync_v2(to.pointer, address, bytes, lane.stream()) }
                .result()
                .w()?;
        }
        Ok(())
    };
    if let Err(error) = launch() {
        // Those that were launched write to memory that is given back now.
        lane.wait()?;
        return Err(error);
    }
    Ok(to.into_iter().map(|array| array.tensor).collect())
}

/// Where the device finds the elements of a contiguous tensor in pinned memory of the host.
pub(super) fn mapped(cuda: &Cuda, tensor: &Tensor) -> Result<u64> {
    let (address, bytes) = memory(tensor)?;
    if bytes == 0 {
        return Ok(0);
    }
    cuda.stream.context().bind_to_thread().w()?;
    let mut pointer: sys::CUdeviceptr = 0;
    // SAFETY: the place is one for an address, and the driver looks nothing up at the other.
    let code = unsafe {
        sys::cuPointerGetAttribute(
            (&raw mut pointer).cast(),
            sys::CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_POINTER,
            address as sys::CUdeviceptr,
        )
    };
    if code.result().is_err() {
        bail!(
            "metal-candle-kernels: {:?} of {:?} are in memory of the host that isn't pinned, expected HostBuffers'",
            tensor.shape(),
            tensor.dtype()
        )
    }
    Ok(pointer)
}

/// Where the elements of a contiguous tensor of the host start, and their bytes.
pub(super) fn memory(tensor: &Tensor) -> Result<(usize, usize)> {
    let (storage, layout) = tensor.storage_and_layout();
    let start = match &*storage {
        Storage::Cpu(CpuStorage::U8(values)) => address(values, layout),
        Storage::Cpu(CpuStorage::U32(values)) => address(values, layout),
        Storage::Cpu(CpuStorage::I64(values)) => address(values, layout),
        Storage::Cpu(CpuStorage::BF16(values)) => address(values, layout),
        Storage::Cpu(CpuStorage::F16(values)) => address(values, layout),
        Storage::Cpu(CpuStorage::F32(values)) => address(values, layout),
        Storage::Cpu(CpuStorage::F64(values)) => address(values, layout),
        _ => bail!("metal-candle-kernels: host: {:?} tensors cannot be copied", tensor.dtype()),
    };
    Ok((start, tensor.elem_count() * tensor.dtype().size_in_bytes()))
}

fn address<T>(values: &[T], layout: &Layout) -> usize {
    values[layout.start_offset()..].as_ptr() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeros_are_alone_on_their_pages() {
        for (shape, dtype) in [
            (&[1][..], DType::U32),
            (&[3, 5], DType::U8),
            (&[70_001], DType::BF16),
            (&[2, 16384], DType::F64),
        ] {
            let zeros = zeros_on_own_pages(shape, dtype).unwrap();
            assert_eq!((zeros.dims(), zeros.dtype(), zeros.is_contiguous()), (shape, dtype, true));
            let (start, bytes) = memory(&zeros).unwrap();
            let (storage, layout) = zeros.storage_and_layout();
            let size = dtype.size_in_bytes();
            let all = match &*storage {
                Storage::Cpu(CpuStorage::U8(values)) => values.len(),
                Storage::Cpu(CpuStorage::U32(values)) => values.len(),
                Storage::Cpu(CpuStorage::BF16(values)) => values.len(),
                Storage::Cpu(CpuStorage::F64(values)) => values.len(),
                _ => panic!("other storage"),
            };
            let end = start - layout.start_offset() * size + all * size;
            assert!(start.is_multiple_of(LARGE_PAGE), "{start:x}");
            assert!(
                (start + bytes).next_multiple_of(LARGE_PAGE) <= end,
                "{start:x} {bytes} {end:x}"
            );
        }
    }
}
