//! What the Metal operations share: where the elements of a tensor lie, results, and dispatches.
//!
//! Candle encodes everything of a device concurrently and looks for hazards by the buffers that a kernel
//! is said to read and to write, so every buffer is passed as what it is. An operation encodes all its
//! kernels under one lock of the encoder.
//!
//! The kernels were run in an emulator and this code was type-checked; neither ran on a Mac yet.

mod copy;
mod library;
mod source;
mod sums;

use candle_core::metal_backend::{MetalDevice, MetalError, MetalStorage};
use candle_core::op::BackpropOp;
use candle_core::{DType, Device, Result, Shape, Storage, Tensor, bail};
use candle_metal_kernels::metal::{Buffer, ComputePipeline};
use objc2_metal::MTLSize;

pub(crate) use library::by_dtype;
pub(crate) use sums::Groups;

/// Elements of a thread in kernels that have one thread for some elements; as in `common.metal.h`.
const AHEAD: usize = 4;
/// Threads of a simdgroup on all of Apple's GPUs.
const SIMDGROUP: usize = 32;
/// Threads of a threadgroup that shares no sums.
const THREADS: usize = 256;

/// The device of some tensors.
#[derive(Clone)]
pub(crate) struct Metal {
    device: MetalDevice,
}

/// The elements of a tensor on the device. The tensor keeps its buffer out of Candle's pool until the
/// work with it is encoded; work that is encoded later waits for it.
pub(crate) struct Array {
    buffer: Buffer,
    /// Where the first element is, in bytes.
    offset: usize,
    pub(crate) dtype: DType,
    pub(crate) tensor: Tensor,
}

impl Array {
    /// The same buffer from `bytes` further on.
    pub(crate) fn at(&self, bytes: usize) -> Array {
        let Array { buffer, offset, dtype, tensor } = self;
        let (buffer, tensor) = (buffer.clone(), tensor.clone());
        Array { buffer, offset: offset + bytes, dtype: *dtype, tensor }
    }
}

/// What a kernel is given, in the order of its buffers.
#[derive(Clone, Copy)]
pub(crate) enum Argument<'a> {
    /// It only reads these elements, or doesn't touch them.
    Input(&'a Array),
    /// It writes these elements.
    Output(&'a Array),
    U32(u32),
    U64(u64),
    F32(f32),
    U32s(&'a [u32]),
    U64s(&'a [u64]),
}

/// A kernel that is ready to be encoded.
pub(crate) struct Dispatch<'a> {
    pipeline: ComputePipeline,
    arguments: &'a [Argument<'a>],
    groups: [usize; 3],
    threads: usize,
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

    /// The elements of a tensor, copied only when they aren't contiguous.
    pub(crate) fn contiguous(&self, tensor: &Tensor) -> Result<Array> {
        if tensor.is_contiguous() { self.strided(tensor) } else { self.copy(tensor) }
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
        let buffer = self.device.new_buffer_builder().with_size_for(count.max(1), dtype).build()?;
        let storage = MetalStorage::new(buffer.clone(), self.device.clone(), count, dtype);
        let storage = Storage::Metal(storage);
        let tensor = Tensor::from_storage(storage, shape, BackpropOp::none(), false);
        Ok(Array { buffer: (*buffer).clone(), offset: 0, dtype, tensor })
    }

    /// The kernel `name`, a threadgroup for each of `rows`, whose threads share its `columns`.
    pub(crate) fn by_row<'a>(
        &self,
        name: &'static str,
        rows: usize,
        columns: usize,
        arguments: &'a [Argument<'a>],
    ) -> Result<Dispatch<'a>> {
        const ELEMENTS: usize = 8;
        const MOST_THREADS: usize = 1024;
        let wanted = columns.div_ceil(ELEMENTS).next_multiple_of(SIMDGROUP).min(MOST_THREADS);
        self.dispatch(name, wanted, |_| [rows, 1, 1], arguments)
    }

    /// The kernel `name` for `rows` of `count` elements each, of which a thread has `AHEAD`.
    pub(crate) fn by_elements<'a>(
        &self,
        name: &'static str,
        count: usize,
        rows: usize,
        arguments: &'a [Argument<'a>],
    ) -> Result<Dispatch<'a>> {
        let wanted = count.div_ceil(AHEAD).next_multiple_of(SIMDGROUP).min(THREADS);
        self.dispatch(name, wanted, |threads| [count.div_ceil(AHEAD * threads), rows, 1], arguments)
    }

    /// The kernel `name` for `rows` of `count` things each, of which a thread has one.
    pub(crate) fn by_thread<'a>(
        &self,
        name: &'static str,
        count: usize,
        rows: usize,
        arguments: &'a [Argument<'a>],
    ) -> Result<Dispatch<'a>> {
        let wanted = count.next_multiple_of(SIMDGROUP).min(THREADS);
        self.dispatch(name, wanted, |threads| [count.div_ceil(threads), rows, 1], arguments)
    }

    /// `groups` says how many threadgroups there are of so many threads.
    fn dispatch<'a>(
        &self,
        name: &'static str,
        wanted: usize,
        groups: impl Fn(usize) -> [usize; 3],
        arguments: &'a [Argument<'a>],
    ) -> Result<Dispatch<'a>> {
        let pipeline = library::pipeline(&self.device, name)?;
        let threads = wanted.min(pipeline.max_total_threads_per_threadgroup()).max(1);
        let groups = groups(threads);
        if groups.iter().any(|groups| u32::try_from(*groups).is_err()) {
            bail!(
                "metal-candle-kernels: `{name}` would need {groups:?} threadgroups, expected less than 2^32"
            )
        }
        Ok(Dispatch { pipeline, arguments, groups, threads })
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
                    Argument::U32(value) => encoder.set_bytes(index, &value),
                    Argument::U64(value) => encoder.set_bytes(index, &value),
                    Argument::F32(value) => encoder.set_bytes(index, &value),
                    Argument::U32s(values) => {
                        encoder.set_bytes_directly(
                            index,
                            size_of_val(values),
                            values.as_ptr().cast(),
                        );
                    }
                    Argument::U64s(values) => {
                        encoder.set_bytes_directly(
                            index,
                            size_of_val(values),
                            values.as_ptr().cast(),
                        );
                    }
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

/// A size as kernels take it.
pub(crate) fn size(operation: &str, size: usize) -> Result<u32> {
    match u32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!(
            "metal-candle-kernels: {operation} on Metal: a size is {size}, expected less than 2^32"
        ),
    }
}

/// The code of a norm's parameter's dtype, as `parameter_at` in `common.metal.h` knows it.
pub(crate) fn parameter_code(operation: &str, parameter: &Array) -> Result<Argument<'static>> {
    match parameter.dtype {
        DType::F32 => Ok(Argument::U32(0)),
        DType::F16 => Ok(Argument::U32(1)),
        DType::BF16 => Ok(Argument::U32(2)),
        other => bail!(
            "metal-candle-kernels: {operation} on Metal does not support {other:?} parameters, expected F32, BF16 or F16"
        ),
    }
}

/// How many Metal devices there are.
pub(crate) fn count() -> usize {
    candle_metal_kernels::metal::Device::all().len()
}

/// The Metal device `ordinal`, with the library of kernels, so that a failure to compile it shows here.
pub(crate) fn open(ordinal: usize) -> Result<Device> {
    let count = count();
    if ordinal >= count {
        bail!("metal-candle-kernels: there is no Metal device {ordinal}; {count} were found")
    }
    let device = Device::new_metal(ordinal)?;
    if let Device::Metal(device) = &device {
        library::pipeline(device, "fill_zeros")?;
    }
    Ok(device)
}

/// A small storage that takes the place of one that is moved out of its tensor.
pub(crate) fn nothing(device: &MetalDevice) -> Result<MetalStorage> {
    let buffer = device.new_buffer_builder().with_size_for(1, DType::U8).build()?;
    Ok(MetalStorage::new(buffer, device.clone(), 1, DType::U8))
}

/// What Candle's Metal backend reports, as its errors.
fn metal_error(error: candle_metal_kernels::MetalKernelError) -> candle_core::Error {
    MetalError::from(error).into()
}
