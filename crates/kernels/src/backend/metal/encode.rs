//! The device of some tensors: its memory, and how kernels are encoded.

use super::{Argument, Array, Dispatch, Kernel, library, memory, mps};
use crate::devices::{MetalMatmul, metal_matmul};
use candle_core::metal_backend::{MetalDevice, MetalError, MetalStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Shape, Storage, Tensor, bail};
use candle_metal_kernels::metal::ComputeCommandEncoder;
use candle_metal_kernels::{GemmDType, call_mlx_gemm};
use objc2::runtime::AnyClass;
use objc2_metal::{MTLDevice, MTLGPUFamily, MTLSize};

pub(super) use candle_metal_kernels::metal::{Buffer, ComputePipeline as Pipeline};

/// Whether the tensor's device is one that Metal's operations compute on.
pub(crate) fn computes(tensor: &Tensor) -> bool {
    tensor.device().is_metal()
}

/// The device of some tensors.
#[derive(Clone)]
pub(crate) struct Metal {
    device: MetalDevice,
}

impl Metal {
    pub(crate) fn of(tensor: &Tensor) -> Result<Metal> {
        match tensor.device() {
            Device::Metal(device) => Ok(Metal { device: device.clone() }),
            _ => bail!(
                "metal-candle-kernels: the Metal operation was given a tensor that is elsewhere"
            ),
        }
    }

    /// The elements of a tensor as they lie, to be found by its strides.
    pub(crate) fn strided(&self, tensor: &Tensor) -> Result<Array> {
        let tensor = tensor.clone();
        let dtype = tensor.dtype();
        let (buffer, offset) = {
            let (storage, layout) = tensor.storage_and_layout();
            match &*storage {
                Storage::Metal(storage) => {
                    (storage.buffer().clone(), layout.start_offset() * dtype.size_in_bytes())
                }
                _ => bail!(
                    "metal-candle-kernels: the Metal operation was given a tensor that is elsewhere"
                ),
            }
        };
        Ok(Array { buffer, offset, dtype, tensor })
    }

    /// A tensor that is not yet written.
    pub(crate) fn empty(&self, shape: impl Into<Shape>, dtype: DType) -> Result<Array> {
        let shape = shape.into();
        let count = shape.elem_count();
        // Metal has no buffer of nothing.
        let buffer = memory::buffer(&self.device, count.max(1) * dtype.size_in_bytes())?;
        let storage = MetalStorage::new(buffer.clone(), self.device.clone(), count, dtype);
        let storage = Storage::Metal(storage);
        let tensor = Tensor::from_storage(storage, shape, BackpropOp::none(), false);
        Ok(Array { buffer: (*buffer).clone(), offset: 0, dtype, tensor })
    }

    pub(super) fn matmul(&self) -> MetalMatmul {
        metal_matmul()
    }

    /// A product by Candle's or Apple's kernels, of contiguous matrices of the dtype of `to`; the transposed
    /// ones are stored transposed.
    pub(super) fn multiply(
        &self,
        sizes: [usize; 3],
        operands: [(&Array, bool); 2],
        to: &Array,
    ) -> Result<()> {
        match self.matmul() {
            MetalMatmul::Mps => mps::multiply(&self.device, sizes, operands, to),
            _ => self.multiply_by_candle(sizes, operands, to),
        }
    }

    fn multiply_by_candle(
        &self,
        [rows, columns, inner]: [usize; 3],
        [(left, left_transposed), (right, right_transposed)]: [(&Array, bool); 2],
        to: &Array,
    ) -> Result<()> {
        let dtype = match to.dtype {
            DType::F32 => GemmDType::F32,
            DType::F16 => GemmDType::F16,
            DType::BF16 => GemmDType::BF16,
            other => {
                bail!("metal-candle-kernels: Candle multiplies no {other:?} matrices on Metal")
            }
        };
        if to.offset != 0 {
            bail!("metal-candle-kernels: Candle's product begins where its buffer does")
        }
        let strides = |transposed: bool, rows: usize, columns: usize| {
            if transposed { [1, rows] } else { [columns, 1] }
        };
        let encoder = self.device.command_encoder()?;
        call_mlx_gemm(
            self.device.metal_device(),
            &encoder,
            self.device.kernels(),
            dtype,
            (1, rows, columns, inner),
            &strides(left_transposed, rows, inner),
            left.offset,
            &left.buffer,
            &strides(right_transposed, inner, columns),
            right.offset,
            &right.buffer,
            &to.buffer,
        )
        .map_err(metal_error)
    }

    pub(super) fn pipeline(&self, kernel: Kernel) -> Result<Pipeline> {
        library::pipeline(&self.device, kernel)
    }

    /// Encodes kernels, which run in this order where one reads what another writes. Those without
    /// threadgroups are left out.
    pub(crate) fn run(&self, dispatches: &[Dispatch]) -> Result<()> {
        let guard = self.device.command_encoder()?;
        let encoder = guard.as_ref();
        for Dispatch { pipeline, arguments, groups, threads } in dispatches {
            if groups.contains(&0) {
                continue;
            }
            encoder.set_compute_pipeline_state(pipeline);
            for (index, argument) in arguments.iter().enumerate() {
                match *argument {
                    Argument::Input(array) => {
                        encoder.set_input_buffer(index, Some(&array.buffer), array.offset);
                    }
                    Argument::Output(array) => {
                        encoder.set_output_buffer(index, Some(&array.buffer), array.offset);
                    }
                    Argument::Absent => {}
                    Argument::U32(value) => encoder.set_bytes(index, &value),
                    Argument::U64(value) => encoder.set_bytes(index, &value),
                    Argument::F32(value) => encoder.set_bytes(index, &value),
                    Argument::U32s(values) => set_all(encoder, index, values),
                    Argument::F32s(values) => set_all(encoder, index, values),
                    Argument::U64s(values) => set_all(encoder, index, values),
                }
            }
            let [width, height, depth] = *groups;
            encoder.dispatch_thread_groups(
                MTLSize { width, height, depth },
                MTLSize { width: *threads, height: 1, depth: 1 },
            );
        }
        Ok(())
    }
}

/// Passes the bytes of numbers, of which there are few.
fn set_all<T>(encoder: &ComputeCommandEncoder, index: usize, values: &[T]) {
    encoder.set_bytes_directly(index, size_of_val(values), values.as_ptr().cast());
}

/// Whether a threadgroup of the kernel may have so many threads.
pub(super) fn takes(pipeline: &Pipeline, threads: usize) -> bool {
    threads <= pipeline.max_total_threads_per_threadgroup()
}

/// Whether this macOS has what Candle opens a device with: residency sets, since macOS 15.
fn has_residency_sets() -> bool {
    AnyClass::get(c"MTLResidencySetDescriptor").is_some()
}

/// How many Metal devices there are; 0 before macOS 15.
pub(crate) fn count() -> usize {
    if has_residency_sets() { candle_metal_kernels::metal::Device::all().len() } else { 0 }
}

/// Whether the device is there, of a family with simdgroup matrices (the M1's or a later one).
pub(crate) fn is_suitable(ordinal: usize) -> bool {
    has_residency_sets()
        && candle_metal_kernels::metal::Device::all()
            .get(ordinal)
            .is_some_and(|device| device.as_ref().supportsFamily(MTLGPUFamily::Apple7))
}

/// The Metal device `ordinal`, with the library of kernels. A failure to compile it shows here, and so does
/// a device that refuses simdgroup matrices.
pub(crate) fn open(ordinal: usize) -> Result<Device> {
    if !has_residency_sets() {
        bail!("metal-candle-kernels: Metal needs macOS 15 or later")
    }
    let count = count();
    if ordinal >= count {
        bail!("metal-candle-kernels: there is no Metal device {ordinal}; {count} were found")
    }
    let device = Device::new_metal(ordinal)?;
    if let Device::Metal(device) = &device {
        Metal { device: device.clone() }.require_tiles()?;
    }
    Ok(device)
}

/// A small storage that takes the place of one that is moved out of its tensor.
pub(crate) fn nothing(device: &MetalDevice) -> Result<MetalStorage> {
    let buffer = device.new_buffer_builder().with_size_for(1, DType::U8).build()?;
    Ok(MetalStorage::new(buffer, device.clone(), 1, DType::U8))
}

/// Zeros in a buffer of this crate's pool, which is little larger than they are.
pub(crate) fn zeros(device: &MetalDevice, shape: Shape, dtype: DType) -> Result<Tensor> {
    let Array { buffer, tensor, .. } = Metal { device: device.clone() }.empty(shape, dtype)?;
    device.blit_command_encoder()?.fill_buffer(&buffer, (0, buffer.length()), 0);
    Ok(tensor)
}

/// What Candle's Metal backend reports, as its errors.
pub(super) fn metal_error(error: candle_metal_kernels::MetalKernelError) -> candle_core::Error {
    MetalError::from(error).into()
}
