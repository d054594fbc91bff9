//! What the CUDA operations share: where the elements of a tensor lie, results, and launches.
//!
//! All work of a device goes to one stream, in order, and memory is given back to the stream as well,
//! so nothing here waits for the device. Transfers beside the work have a stream of their own (`lane.rs`).

mod blas;

mod copy;
mod host;
mod lane;
mod launch;
mod module;
mod offload;
mod open;
mod product;
mod recording;
mod rows;
mod thin_product;
mod tma;

use super::cpu::collapsed_rows;
use candle_core::cuda_backend::cudarc::driver::sys::{CUdevice_attribute, CUresult};
use candle_core::cuda_backend::cudarc::driver::{
    CudaSlice, CudaStream, DevicePtr, DeviceRepr, result,
};
use candle_core::cuda_backend::{CudaDevice, CudaStorage, CudaStorageSlice, WrapErr};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Layout, Result, Shape, Storage, Tensor, bail};
use half::{bf16, f16};
use std::sync::Arc;

pub(crate) use blas::{Matrix, Rows, require_floats};
pub(crate) use host::{Copied, Pinned, copy_to_host, launch_uploads, zeros_on_own_pages};
pub(crate) use lane::{Event, Lane};
pub(crate) use launch::launch_time;
pub(crate) use module::{Launch, Module, by_dtype, module};
pub(crate) use offload::{Offload, Ticket};
pub(crate) use open::{count, free_memory, give_back, memory, open, reset_peak};
pub(crate) use product::{CodesTerm, MOST_OUTPUTS as MOST_SUMS, Sum, TILE, Term};
pub(crate) use recording::{Recorded, can_record, is_recording, next_part, refuse_in_recording};
pub(crate) use rows::{ANY_THREADS, Parameter, RowPlan, a_block_a_row, any_groups};
pub(crate) use thin_product::ThinProduct;
pub(crate) use tma::TmaDescriptor;

/// The device of some tensors.
pub(crate) struct Cuda<'a> {
    /// Cloning it takes a while beside a launch: it is a handful of counted pointers.
    pub(crate) device: &'a CudaDevice,
    pub(crate) stream: Arc<CudaStream>,
}

/// The elements of a tensor on the device, which lives as long as this. Work that is launched before
/// it is dropped still finds them: memory is given back in the order of the stream.
pub(crate) struct Array {
    /// The address of the first element.
    pub(crate) pointer: u64,
    pub(crate) dtype: DType,
    pub(crate) tensor: Tensor,
}

impl Array {
    /// Elements between the starts of dimension `index`.
    pub(crate) fn stride(&self, index: usize) -> i64 {
        self.tensor.stride()[index] as i64
    }
}

impl Cuda<'_> {
    pub(crate) fn of(tensor: &Tensor) -> Result<Cuda<'_>> {
        Cuda::on(tensor.device())
    }

    pub(crate) fn on(device: &Device) -> Result<Cuda<'_>> {
        match device {
            Device::Cuda(device) => {
                let stream = recording::stream().unwrap_or_else(|| device.cuda_stream());
                Ok(Cuda { device, stream })
            }
            _ => bail!(
                "metal-candle-kernels: the CUDA operation was given a tensor that is elsewhere"
            ),
        }
    }

    /// What the driver says of the device.
    pub(crate) fn attribute(&self, attribute: CUdevice_attribute) -> Result<usize> {
        Ok(self.stream.context().attribute(attribute).w()?.max(0) as usize)
    }

    /// How many blocks can run side by side, at one each.
    pub(crate) fn multiprocessors(&self) -> Result<usize> {
        Ok(self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?.max(1))
    }

    /// Whether this build and the device have Hopper's products of warpgroups.
    pub(crate) fn has_warpgroups(&self) -> Result<bool> {
        Ok(cfg!(hopper) && self.stream.context().compute_capability().w()? == (9, 0))
    }

    /// Bytes of shared memory that all blocks on a multiprocessor may have at most.
    pub(crate) fn shared_memory_at_once(&self) -> Result<usize> {
        self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR)
    }

    /// Bytes of shared memory that a block may have at most.
    pub(crate) fn most_shared_memory(&self) -> Result<usize> {
        self.attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)
    }

    /// The elements of a tensor, copied only when they aren't contiguous.
    pub(crate) fn contiguous(&self, tensor: &Tensor) -> Result<Array> {
        if tensor.is_contiguous() { self.strided(tensor) } else { self.copy(tensor) }
    }

    /// The elements of a tensor, copied only when its rows don't lie at one distance from each other.
    pub(crate) fn collapsed_rows(&self, tensor: &Tensor) -> Result<Array> {
        match collapsed_rows(tensor.layout()) {
            Some(_) => self.strided(tensor),
            None => self.contiguous(tensor),
        }
    }

    /// The elements of a tensor, copied only when its last dimension isn't contiguous.
    pub(crate) fn strided_rows(&self, tensor: &Tensor) -> Result<Array> {
        match (tensor.stride().last(), tensor.dims().last()) {
            (Some(stride), Some(size)) if *stride == 1 || *size <= 1 => self.strided(tensor),
            _ => self.contiguous(tensor),
        }
    }

    /// The elements of a tensor as they lie, to be found by its strides.
    pub(crate) fn strided(&self, tensor: &Tensor) -> Result<Array> {
        let tensor = tensor.clone();
        let (pointer, dtype) = {
            let (storage, layout) = tensor.storage_and_layout();
            match &*storage {
                Storage::Cuda(storage) => (self.address(storage, layout)?, tensor.dtype()),
                _ => bail!(
                    "metal-candle-kernels: the CUDA operation was given a tensor that is elsewhere"
                ),
            }
        };
        recording::note_given(&tensor, pointer)?;
        Ok(Array { pointer, dtype, tensor })
    }

    /// The elements of a tensor as they lie on the device, or of a contiguous one in pinned memory of the host, where
    /// kernels read and write them over the bus.
    pub(crate) fn within_reach(&self, tensor: &Tensor) -> Result<Array> {
        if !tensor.device().is_cpu() {
            return self.strided(tensor);
        }
        recording::refuse_in_recording("work on memory of the host")?;
        let pointer = host::mapped(self, tensor)?;
        Ok(Array { pointer, dtype: tensor.dtype(), tensor: tensor.clone() })
    }

    /// The address of the first element of a layout.
    pub(crate) fn address(&self, storage: &CudaStorage, layout: &Layout) -> Result<u64> {
        fn start<T>(stream: &CudaStream, slice: &impl DevicePtr<T>) -> u64 {
            slice.device_ptr(stream).0
        }
        let stream = &*self.stream;
        let (start, size) = match &storage.slice {
            CudaStorageSlice::U8(slice) => (start(stream, slice), 1),
            CudaStorageSlice::U32(slice) => (start(stream, slice), 4),
            CudaStorageSlice::I64(slice) => (start(stream, slice), 8),
            CudaStorageSlice::BF16(slice) => (start(stream, slice), 2),
            CudaStorageSlice::F16(slice) => (start(stream, slice), 2),
            CudaStorageSlice::F32(slice) => (start(stream, slice), 4),
            CudaStorageSlice::F64(slice) => (start(stream, slice), 8),
            _ => bail!(
                "metal-candle-kernels: the CUDA operation does not support this dtype, expected F32, BF16, F16 or U32"
            ),
        };
        Ok(start + (layout.start_offset() * size) as u64)
    }

    /// Memory for `count` elements, not yet written, as Candle stores it.
    fn storage(&self, count: usize, dtype: DType) -> Result<CudaStorage> {
        // CUDA has no allocation of nothing.
        let count = count.max(1);
        let device = self.device.clone();
        Ok(match dtype {
            DType::U8 => CudaStorage::wrap_cuda_slice(self.slice::<u8>(count)?, device),
            DType::U32 => CudaStorage::wrap_cuda_slice(self.slice::<u32>(count)?, device),
            DType::I64 => CudaStorage::wrap_cuda_slice(self.slice::<i64>(count)?, device),
            DType::BF16 => CudaStorage::wrap_cuda_slice(self.slice::<bf16>(count)?, device),
            DType::F16 => CudaStorage::wrap_cuda_slice(self.slice::<f16>(count)?, device),
            DType::F32 => CudaStorage::wrap_cuda_slice(self.slice::<f32>(count)?, device),
            DType::F64 => CudaStorage::wrap_cuda_slice(self.slice::<f64>(count)?, device),
            other => bail!("metal-candle-kernels: no CUDA operation gives {other:?} tensors"),
        })
    }

    fn slice<T: DeviceRepr>(&self, count: usize) -> Result<CudaSlice<T>> {
        // SAFETY: whoever asks for a result launches the work that writes all of it.
        unsafe { self.stream.alloc::<T>(count) }.or_else(|error| {
            if error.0 != CUresult::CUDA_ERROR_OUT_OF_MEMORY {
                return Err(error).w();
            }
            let context = self.stream.context();
            let total = context.total_mem().unwrap_or(0) >> 20;
            let used = open::memory(&Device::Cuda(self.device.clone())).map_or(0, |(used, _)| used);
            bail!(
                "metal-candle-kernels: CUDA device {} is out of memory: {} MiB were asked for while tensors take {} of its {total} MiB",
                context.ordinal(),
                (count * size_of::<T>()) >> 20,
                used >> 20
            )
        })
    }

    /// A tensor that is not yet written.
    pub(crate) fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Array> {
        let shape = shape.into();
        if let Some(tensor) = recording::made_before(&shape, dtype)? {
            return self.strided(&tensor);
        }
        let storage = self.storage(shape.elem_count(), dtype)?;
        let pointer = self.address(&storage, &Layout::contiguous(&shape))?;
        let tensor = Tensor::from_storage(Storage::Cuda(storage), shape, BackpropOp::none(), false);
        recording::note_made(&tensor);
        Ok(Array { pointer, dtype, tensor })
    }

    /// A tensor of zeros.
    pub(crate) fn zeros(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Array> {
        let array = self.empty(shape, dtype)?;
        self.clear(&array)?;
        Ok(array)
    }

    /// Sets every byte of a contiguous tensor to zero.
    pub(crate) fn clear(&self, array: &Array) -> Result<()> {
        let bytes = array.tensor.elem_count() * array.dtype.size_in_bytes();
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the memory belongs to the array, which is alive, and later work comes later in
        // the stream.
        unsafe {
            candle_core::cuda_backend::cudarc::driver::result::memset_d8_async(
                array.pointer,
                0,
                bytes,
                self.stream.cu_stream(),
            )
        }
        .w()
    }

    /// Numbers of the host on the device.
    pub(crate) fn upload<T: DeviceRepr + candle_core::WithDType>(
        &self,
        values: &[T],
        shape: impl Into<Shape>,
    ) -> Result<Array> {
        refuse_in_recording("a copy from the host")?;
        let shape = shape.into();
        if shape.elem_count() != values.len() {
            bail!("metal-candle-kernels: {} numbers of the host, expected {shape:?}", values.len())
        }
        let array = self.empty(shape, T::DTYPE)?;
        copy_from_host(&self.stream, array.pointer, values)?;
        Ok(array)
    }
}

/// Copies numbers of the host to where there is room for them, behind what was launched on the stream, for which the host
/// doesn't wait: the driver takes so much at once itself, but before it copies more, the work has to be done.
pub(crate) fn copy_from_host<T: DeviceRepr>(
    stream: &CudaStream,
    to: u64,
    values: &[T],
) -> Result<()> {
    const AT_ONCE: usize = 64 << 10;
    stream.context().bind_to_thread().w()?;
    let piece = AT_ONCE / size_of::<T>();
    for (index, values) in values.chunks(piece).enumerate() {
        let to = to + (index * piece * size_of::<T>()) as u64;
        // SAFETY: the room is there, as the caller knows; the driver is done with the host's numbers when it returns.
        unsafe { result::memcpy_htod_async(to, values, stream.cu_stream()) }.w()?;
    }
    Ok(())
}
