//! What the Metal operations share: where the elements of a tensor lie, results, and dispatches.
//!
//! Candle encodes everything of a device concurrently and looks for hazards by the buffers that a kernel
//! is said to read and to write, so every buffer is passed as what it is. An operation encodes all its
//! kernels under one lock of the encoder.
//!
//! What a call has that decides about a kernel's code (a head's size, whether there is a bias) is a function
//! constant of the kernel; what it only counts with is an argument.
//!
//! Tests run the kernels, and what is passed to them, in an emulator, or on a Mac's GPU with the feature
//! `metal`; `encode.rs`, `library.rs`, `memory.rs` and `mps.rs`, which speak to Metal, were type-checked only.
//! Nothing ran on a Mac yet.

mod copy;
#[cfg(feature = "metal")]
mod encode;
#[cfg(feature = "metal")]
mod library;
#[cfg(feature = "metal")]
mod memory;
#[cfg(feature = "metal")]
mod mps;
#[cfg(any(feature = "metal", test))]
mod pipelines;
#[cfg(any(feature = "metal", test))]
mod pool;
pub(crate) mod product;
mod source;
mod sums;
// Tests on machines without Metal run the kernels in an emulator, with tensors of the CPU.
#[cfg(not(feature = "metal"))]
#[path = "emulated.rs"]
mod encode;
#[cfg(test)]
mod tests;

use super::cpu::collapsed_rows;
use candle_core::{DType, Result, Tensor, bail};
use encode::{Buffer, Pipeline};

#[cfg(not(feature = "metal"))]
pub(crate) use encode::is_emulating;
#[cfg(all(feature = "metal-emulation", not(feature = "metal")))]
pub use encode::{Bound, Run};
#[cfg(not(feature = "metal"))]
pub use encode::{Emulator, Launch, emulate};
pub(crate) use encode::{Metal, computes};
#[cfg(feature = "metal")]
pub(crate) use encode::{count, is_suitable, nothing, open, zeros};
#[cfg(feature = "metal")]
pub(crate) use memory::{end_round, free_memory, memory, reset_peak};
#[cfg(all(feature = "metal-emulation", not(feature = "metal")))]
pub(crate) use source::source;
pub(crate) use sums::Groups;

/// The kernel `$name` for elements of dtype `$dtype`.
macro_rules! by_dtype {
    ($name:literal, $dtype:expr) => {
        $crate::backend::kernel_name!("Metal", $name, $dtype)
    };
}
pub(crate) use by_dtype;

/// Elements of a thread in kernels that have one thread for some elements; as in `common.metal.h`.
const AHEAD: usize = 4;
/// Threads of a simdgroup on all of Apple's GPUs.
const SIMDGROUP: usize = 32;
/// Threads of a threadgroup that shares no sums.
const THREADS: usize = 256;

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

    /// Whether all rows of the last dimension start at multiples of so many elements.
    pub(crate) fn rows_start_at_multiples_of(&self, elements: usize) -> bool {
        let rows = self.tensor.dims().iter().zip(self.tensor.stride());
        let rows = rows.take(self.tensor.rank().saturating_sub(1));
        self.offset.is_multiple_of(elements * self.dtype.size_in_bytes())
            && rows.filter(|(size, _)| **size > 1).all(|(_, stride)| stride % elements == 0)
    }
}

/// What a kernel is given, in the order of its buffers.
#[derive(Clone, Copy)]
pub(crate) enum Argument<'a> {
    /// It only reads these elements, or doesn't touch them.
    Input(&'a Array),
    /// It writes these elements.
    Output(&'a Array),
    /// It is left out by a function constant.
    Absent,
    U32(u32),
    U64(u64),
    F32(f32),
    U32s(&'a [u32]),
    F32s(&'a [f32]),
    U64s(&'a [u64]),
}

/// A value that a kernel's code is made for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Constant {
    /// `bool` in Metal.
    Bool(bool),
    /// `ushort` in Metal.
    U16(u16),
}

/// A kernel by its name, and its function constants by their indices.
#[derive(Clone, Copy)]
pub(crate) struct Kernel<'a> {
    pub(crate) name: &'static str,
    pub(crate) constants: &'a [(usize, Constant)],
}

/// One without function constants.
impl From<&'static str> for Kernel<'_> {
    fn from(name: &'static str) -> Self {
        Kernel { name, constants: &[] }
    }
}

/// A kernel that is ready to be encoded.
pub(crate) struct Dispatch<'a> {
    pipeline: Pipeline,
    arguments: &'a [Argument<'a>],
    groups: [usize; 3],
    threads: usize,
}

impl Metal {
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

    /// The kernel, a threadgroup for each of `rows`, whose threads share its `columns`.
    pub(crate) fn by_row<'a>(
        &self,
        kernel: impl Into<Kernel<'a>>,
        rows: usize,
        columns: usize,
        arguments: &'a [Argument<'a>],
    ) -> Result<Dispatch<'a>> {
        const ELEMENTS: usize = 8;
        const MOST_THREADS: usize = 1024;
        let wanted = columns.div_ceil(ELEMENTS).next_multiple_of(SIMDGROUP).min(MOST_THREADS);
        self.dispatch(kernel, wanted, |_| [rows, 1, 1], arguments)
    }

    /// The kernel for `rows` of `count` elements each, of which a thread has `AHEAD`.
    pub(crate) fn by_elements<'a>(
        &self,
        kernel: impl Into<Kernel<'a>>,
        count: usize,
        rows: usize,
        arguments: &'a [Argument<'a>],
    ) -> Result<Dispatch<'a>> {
        let wanted = count.div_ceil(AHEAD).next_multiple_of(SIMDGROUP).min(THREADS);
        self.dispatch(
            kernel,
            wanted,
            |threads| [count.div_ceil(AHEAD * threads), rows, 1],
            arguments,
        )
    }

    /// The kernel for `rows` of `count` things each, of which a thread has one.
    pub(crate) fn by_thread<'a>(
        &self,
        kernel: impl Into<Kernel<'a>>,
        count: usize,
        rows: usize,
        arguments: &'a [Argument<'a>],
    ) -> Result<Dispatch<'a>> {
        let wanted = count.next_multiple_of(SIMDGROUP).min(THREADS);
        self.dispatch(kernel, wanted, |threads| [count.div_ceil(threads), rows, 1], arguments)
    }

    /// The kernel, whose threadgroups are whole simdgroups, `most` of them where the pipeline allows
    /// it; `groups` says how many threadgroups there are of so many simdgroups.
    pub(crate) fn by_simdgroups<'a>(
        &self,
        kernel: impl Into<Kernel<'a>>,
        most: usize,
        groups: impl Fn(usize) -> [usize; 3],
        arguments: &'a [Argument<'a>],
    ) -> Result<Dispatch<'a>> {
        let kernel = kernel.into();
        let pipeline = self.pipeline(kernel)?;
        let simdgroups = most.min(pipeline.max_total_threads_per_threadgroup() / SIMDGROUP);
        if simdgroups == 0 {
            bail!(
                "metal-candle-kernels: `{}` has {} threads on this device, expected {SIMDGROUP} at least",
                kernel.name,
                pipeline.max_total_threads_per_threadgroup()
            )
        }
        prepare(kernel.name, pipeline, simdgroups * SIMDGROUP, groups(simdgroups), arguments)
    }

    /// The kernel, which is made for threadgroups of `threads` threads and no other.
    pub(crate) fn exactly<'a>(
        &self,
        kernel: impl Into<Kernel<'a>>,
        threads: usize,
        groups: [usize; 3],
        arguments: &'a [Argument<'a>],
    ) -> Result<Dispatch<'a>> {
        let kernel = kernel.into();
        let dispatch = self.dispatch(kernel, threads, |_| groups, arguments)?;
        if !encode::takes(&dispatch.pipeline, threads) {
            bail!(
                "metal-candle-kernels: `{}` takes {} threads on this GPU, expected {threads}",
                kernel.name,
                dispatch.threads
            )
        }
        Ok(Dispatch { threads, ..dispatch })
    }

    /// `groups` says how many threadgroups there are of so many threads.
    fn dispatch<'a>(
        &self,
        kernel: impl Into<Kernel<'a>>,
        wanted: usize,
        groups: impl Fn(usize) -> [usize; 3],
        arguments: &'a [Argument<'a>],
    ) -> Result<Dispatch<'a>> {
        let kernel = kernel.into();
        let pipeline = self.pipeline(kernel)?;
        let threads = wanted.min(pipeline.max_total_threads_per_threadgroup()).max(1);
        prepare(kernel.name, pipeline, threads, groups(threads), arguments)
    }
}

fn prepare<'a>(
    name: &str,
    pipeline: Pipeline,
    threads: usize,
    groups: [usize; 3],
    arguments: &'a [Argument<'a>],
) -> Result<Dispatch<'a>> {
    if groups.iter().any(|groups| u32::try_from(*groups).is_err()) {
        bail!(
            "metal-candle-kernels: `{name}` would need {groups:?} threadgroups, expected less than 2^32"
        )
    }
    Ok(Dispatch { pipeline, arguments, groups, threads })
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
    Ok(Argument::U32(dtype_code(operation, parameter.dtype)?.into()))
}

/// The code of a dtype, as kernels know it.
fn dtype_code(operation: &str, dtype: DType) -> Result<u16> {
    match dtype {
        DType::F32 => Ok(0),
        DType::F16 => Ok(1),
        DType::BF16 => Ok(2),
        other => bail!(
            "metal-candle-kernels: {operation} on Metal does not support {other:?} tensors, expected F32, BF16 or F16"
        ),
    }
}
