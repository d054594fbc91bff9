//! What the CPU operations share: element types and the types their sums are kept in, reading a
//! tensor's storage, matrix products and parallel loops.

mod element;
pub(crate) mod gemm;
mod parallel;

use candle_core::{
    CpuStorage, CudaStorage, DType, InplaceOp1, InplaceOp2, Layout, MetalStorage, Result, Storage,
    StorageRef, Tensor, WithDType, bail,
};
use metal_candle_cpu::simd::vectorize;
use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;

pub(crate) use metal_candle_cpu::unwritten::unwritten;

pub(crate) use element::{Element, Real, Sum, Values, dot, map_and_sum, max, sum, sums, zeros};
#[cfg(target_arch = "x86_64")]
pub(crate) use element::{as_f32, as_f32_mut};
pub(crate) use parallel::{
    Disjoint, PARALLEL_CHUNK, for_each_chunk, for_each_chunk2, for_each_index, rows_per_task,
    threads,
};

/// Whether tensors may be f64: a quarter of what has to be compiled, which no program needs.
pub(crate) const HAS_F64: bool = cfg!(any(test, feature = "f64"));

/// The dtypes of [`dispatch`].
pub(crate) const DTYPES: &str = if HAS_F64 {
    "F32, BF16, F16 or F64"
} else {
    "F32, BF16 or F16 (and F64 in a build with the feature `f64`)"
};

/// The dtypes of what is kept in full precision.
pub(crate) const FULL_PRECISION: &str =
    if HAS_F64 { "F32 or F64" } else { "F32 (or F64 in a build with the feature `f64`)" };

/// Runs `$body` with the type `$element` standing for the stored type of dtype `$dtype`.
macro_rules! dispatch {
    ($operation:expr, $dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $element = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $element = half::f16;
                $body
            }
            #[cfg(any(test, feature = "f64"))]
            candle_core::DType::F64 => {
                type $element = f64;
                $body
            }
            other => candle_core::bail!(
                "metal-candle-kernels: {} does not support {other:?} tensors, expected {}",
                $operation,
                $crate::backend::cpu::DTYPES
            ),
        }
    };
}
pub(crate) use dispatch;

/// Runs `$body` with the type `$element` standing for f32, or for f64 where that is `$dtype`.
macro_rules! dispatch_full {
    ($dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            #[cfg(any(test, feature = "f64"))]
            candle_core::DType::F64 => {
                type $element = f64;
                $body
            }
            _ => {
                type $element = f32;
                $body
            }
        }
    };
}
pub(crate) use dispatch_full;

/// Whether a tensor of this dtype is kept in full precision.
pub(crate) fn is_full_precision(dtype: DType) -> bool {
    dtype == DType::F32 || HAS_F64 && dtype == DType::F64
}

/// A CPU tensor made ready to be read: contiguous unless asked otherwise.
pub(crate) struct Input(Tensor);

impl Input {
    /// Copies only when the tensor isn't contiguous.
    pub(crate) fn contiguous(tensor: &Tensor) -> Result<Input> {
        Ok(Input(tensor.detach().contiguous()?))
    }

    /// Copies only when the last dimension isn't contiguous; the others keep their strides.
    pub(crate) fn strided_rows(tensor: &Tensor) -> Result<Input> {
        match (tensor.stride().last(), tensor.dims().last()) {
            (Some(stride), Some(size)) if *stride == 1 || *size <= 1 => Ok(Input(tensor.detach())),
            _ => Self::contiguous(tensor),
        }
    }

    /// Copies only when the rows don't lie at one distance from each other: see [`collapsed_rows`].
    pub(crate) fn collapsed_rows(tensor: &Tensor) -> Result<Input> {
        match collapsed_rows(tensor.layout()) {
            Some(_) => Ok(Input(tensor.detach())),
            None => Self::contiguous(tensor),
        }
    }

    pub(crate) fn read(&self) -> Read<'_> {
        let (storage, layout) = self.0.storage_and_layout();
        Read { storage, layout }
    }
}

/// A tensor's storage, locked for reading.
pub(crate) struct Read<'a> {
    storage: StorageRef<'a>,
    pub(crate) layout: &'a Layout,
}

impl Read<'_> {
    fn cpu(&self) -> Result<&CpuStorage> {
        require_no_emulation()?;
        match &*self.storage {
            Storage::Cpu(storage) => Ok(storage),
            _ => bail!(
                "metal-candle-kernels: the CPU operation was given a tensor that is elsewhere"
            ),
        }
    }

    pub(crate) fn dtype(&self) -> DType {
        self.storage.dtype()
    }

    /// The elements of a contiguous tensor.
    pub(crate) fn slice<T: WithDType>(&self) -> Result<&[T]> {
        let (start, end) = contiguous_range(self.layout)?;
        Ok(&self.cpu()?.as_slice::<T>()?[start..end])
    }

    /// The elements of a contiguous tensor, to be read as `A`.
    pub(crate) fn values<A: Real>(&self) -> Result<Values<'_, A>> {
        let (start, end) = contiguous_range(self.layout)?;
        Ok(storage_values(self.cpu()?)?.slice(start..end))
    }

    /// The rows of a tensor of [`Input::collapsed_rows`].
    pub(crate) fn rows<T: WithDType>(&self) -> Result<StridedRows<'_, T>> {
        match collapsed_rows(self.layout) {
            Some((_, columns, stride)) => Ok(StridedRows {
                storage: self.storage_slice()?,
                start: self.layout.start_offset(),
                columns,
                stride,
            }),
            None => bail!(
                "metal-candle-kernels: expected rows at one distance from each other, found {:?}",
                self.layout
            ),
        }
    }

    /// The whole storage, to be read through the layout's offset and strides.
    pub(crate) fn storage_slice<T: WithDType>(&self) -> Result<&[T]> {
        self.cpu()?.as_slice()
    }

    /// The whole storage, to be read as `A` through the layout's offset and strides.
    pub(crate) fn storage_values<A: Real>(&self) -> Result<Values<'_, A>> {
        storage_values(self.cpu()?)
    }
}

/// An error where a tensor of the CPU stands for one of another device, which this operation should have
/// been computed on.
#[cfg(all(any(feature = "metal-emulation", test), not(feature = "metal")))]
fn require_no_emulation() -> Result<()> {
    if crate::backend::metal::is_emulating() {
        bail!("metal-candle-kernels: an operation was left to the CPU, expected Metal's")
    }
    Ok(())
}

#[cfg(not(all(any(feature = "metal-emulation", test), not(feature = "metal"))))]
#[inline(always)]
fn require_no_emulation() -> Result<()> {
    Ok(())
}

fn contiguous_range(layout: &Layout) -> Result<(usize, usize)> {
    // The offset of nothing may lie beyond the storage.
    if layout.shape().elem_count() == 0 {
        return Ok((0, 0));
    }
    match layout.contiguous_offsets() {
        Some(range) => Ok(range),
        None => bail!("metal-candle-kernels: expected a contiguous tensor, found {layout:?}"),
    }
}

fn storage_values<A: Real>(storage: &CpuStorage) -> Result<Values<'_, A>> {
    use candle_core::backend::BackendStorage;
    match A::stored_values(storage) {
        Some(values) => Ok(values),
        None => bail!(
            "metal-candle-kernels: a {:?} tensor cannot be combined with tensors computed in {:?}",
            storage.dtype(),
            A::DTYPE
        ),
    }
}

/// Rows, elements in a row and distance between rows of a layout whose last dimension is contiguous
/// and whose leading ones collapse into one: a contiguous tensor or a narrowed last dimension.
pub(crate) fn collapsed_rows(layout: &Layout) -> Option<(usize, usize, usize)> {
    let (columns, leading) = layout.dims().split_last()?;
    let (last_stride, strides) = layout.stride().split_last()?;
    if *last_stride != 1 && *columns > 1 {
        return None;
    }
    let mut rows = 1;
    let mut row_stride = None;
    for (size, stride) in leading.iter().zip(strides).rev() {
        if *size != 1 {
            let first = *row_stride.get_or_insert(*stride);
            if *stride != first * rows {
                return None;
            }
        }
        rows *= size;
    }
    Some((rows, *columns, row_stride.unwrap_or(*columns)))
}

/// Rows at one distance from each other inside a storage.
#[derive(Clone, Copy)]
pub(crate) struct StridedRows<'a, T> {
    storage: &'a [T],
    start: usize,
    pub(crate) columns: usize,
    stride: usize,
}

impl<'a, T: Element> StridedRows<'a, T> {
    /// The numbers of row `index`: see [`read_row`].
    #[inline(always)]
    pub(crate) fn row<'b>(&self, index: usize, scratch: &'b mut Vec<T::Acc>) -> &'b [T::Acc]
    where
        'a: 'b,
    {
        read_row(&self.storage[self.start + index * self.stride..][..self.columns], scratch)
    }
}

/// The numbers of a row: borrowed when they are stored as they are computed with, else converted into
/// `scratch`.
#[inline(always)]
pub(crate) fn read_row<'a, T: Element>(row: &'a [T], scratch: &'a mut Vec<T::Acc>) -> &'a [T::Acc] {
    match T::native(row) {
        Some(row) => row,
        None => {
            scratch.resize(row.len(), T::Acc::ZERO);
            T::widen(row, scratch);
            scratch
        }
    }
}

/// Lets `compute` fill `out`: in place when it is stored as it is computed, else through `scratch`.
#[inline(always)]
pub(crate) fn write_through<T: Element>(
    out: &mut [T],
    scratch: &mut Vec<T::Acc>,
    compute: impl FnOnce(&mut [T::Acc]),
) {
    match T::native_mut(out) {
        Some(out) => compute(out),
        None => {
            scratch.resize(out.len(), T::Acc::ZERO);
            compute(scratch);
            T::narrow(scratch, out);
        }
    }
}

/// Lets `change` work on the numbers of a contiguous tensor in place.
pub(crate) fn change_in_place<A: Real>(
    operation: &'static str,
    tensor: &Tensor,
    change: impl FnOnce(&mut [A]) -> Result<()>,
) -> Result<()> {
    require_no_emulation()?;
    struct Change<A, F> {
        operation: &'static str,
        change: Cell<Option<F>>,
        element: PhantomData<A>,
    }
    impl<A: Real, F: FnOnce(&mut [A]) -> Result<()>> InplaceOp1 for Change<A, F> {
        fn name(&self) -> &'static str {
            self.operation
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let (start, end) = contiguous_range(layout)?;
            match (A::storage_mut(storage), self.change.take()) {
                (Some(values), Some(change)) => change(&mut values[start..end]),
                _ => bail!(
                    "metal-candle-kernels: {}: expected {:?} numbers to change in place",
                    self.operation,
                    A::DTYPE
                ),
            }
        }
    }
    tensor.inplace_op1(&Change {
        operation,
        change: Cell::new(Some(change)),
        element: PhantomData::<A>,
    })
}

/// As [`change_in_place`], on the bytes of a u8 tensor.
pub(crate) fn change_bytes_in_place(
    operation: &'static str,
    tensor: &Tensor,
    change: impl FnOnce(&mut [u8]) -> Result<()>,
) -> Result<()> {
    require_no_emulation()?;
    struct Change<F> {
        operation: &'static str,
        change: Cell<Option<F>>,
    }
    impl<F: FnOnce(&mut [u8]) -> Result<()>> InplaceOp1 for Change<F> {
        fn name(&self) -> &'static str {
            self.operation
        }
        fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
            let (start, end) = contiguous_range(layout)?;
            match (storage, self.change.take()) {
                (CpuStorage::U8(bytes), Some(change)) => change(&mut bytes[start..end]),
                _ => bail!(
                    "metal-candle-kernels: {}: expected bytes to change in place",
                    self.operation
                ),
            }
        }
    }
    tensor.inplace_op1(&Change { operation, change: Cell::new(Some(change)) })
}

/// As [`change_in_place`], on several tensors at once, whose storages are their own: see
/// [`require_separate`].
pub(crate) fn change_all_in_place<A: Real, const COUNT: usize>(
    operation: &'static str,
    tensors: [&Tensor; COUNT],
    change: impl FnOnce([&mut [A]; COUNT]) -> Result<()>,
) -> Result<()> {
    type Change<'a, A> = &'a mut dyn FnMut(Vec<&mut [A]>) -> Result<()>;
    fn next<A: Real>(
        operation: &'static str,
        tensors: &[&Tensor],
        slices: Vec<&mut [A]>,
        change: Change<A>,
    ) -> Result<()> {
        let Some((first, rest)) = tensors.split_first() else { return change(slices) };
        change_in_place::<A>(operation, first, |slice| {
            let slices = slices.into_iter().chain([slice]).collect();
            next(operation, rest, slices, change)
        })
    }
    let mut change = Some(change);
    next::<A>(operation, &tensors, Vec::with_capacity(COUNT), &mut |slices| match (
        <[&mut [A]; COUNT]>::try_from(slices),
        change.take(),
    ) {
        (Ok(slices), Some(change)) => change(slices),
        _ => bail!("metal-candle-kernels: {operation}: expected {COUNT} tensors to change"),
    })
}

/// Changes nothing, on any device.
struct Nothing(&'static str);

impl InplaceOp2 for Nothing {
    fn name(&self) -> &'static str {
        self.0
    }
    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<()> {
        Ok(())
    }
    fn cuda_fwd(&self, _: &mut CudaStorage, _: &Layout, _: &CudaStorage, _: &Layout) -> Result<()> {
        Ok(())
    }
    fn metal_fwd(
        &self,
        _: &mut MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<()> {
        Ok(())
    }
}

/// An error when two tensors share storage: locking both for change would never return.
pub(crate) fn require_separate(
    operation: &'static str,
    names: &str,
    a: &Tensor,
    b: &Tensor,
) -> Result<()> {
    // Candle keeps the identity of a storage to itself, but refuses such pairs before it locks them.
    if let Err(error) = a.inplace_op2(b, &Nothing(operation)) {
        bail!(
            "metal-candle-kernels: {operation}: {names} must be tensors of their own, with every element stored once ({error})"
        )
    }
    Ok(())
}

/// Rows of one task that keeps sums over its rows: at most 64 tasks, so that their sums stay small
/// beside the rows.
pub(crate) fn rows_per_sum(rows: usize, columns: usize) -> usize {
    rows_per_task(columns).max(rows.div_ceil(64))
}

/// Adds up the tasks' sums `(tasks, columns)` in order.
pub(crate) fn add_sums<A: Real>(sums: &[A], columns: usize) -> Vec<A> {
    let mut total = zeros(columns);
    vectorize(
        #[inline(always)]
        || {
            for sums in sums.chunks_exact(columns.max(1)) {
                for (total, sum) in total.iter_mut().zip(sums) {
                    *total += *sum;
                }
            }
        },
    );
    total
}

/// Lets `map` write every row of `y` from that row of `x`, both `(rows, size)`.
#[inline(always)]
pub(crate) fn map_rows<T: Element>(
    size: usize,
    x: &[T],
    y: &mut [T],
    map: impl Fn(&[T::Acc], &mut [T::Acc]) + Sync,
) {
    let size = size.max(1);
    let block = rows_per_task(size) * size;
    for_each_chunk(
        y,
        block,
        #[inline(always)]
        |index, y| {
            let (mut x_scratch, mut y_scratch) = (Vec::new(), Vec::new());
            let x = &x[index * block..][..y.len()];
            for (x, y) in x.chunks_exact(size).zip(y.chunks_exact_mut(size)) {
                let x = read_row(x, &mut x_scratch);
                write_through(
                    y,
                    &mut y_scratch,
                    #[inline(always)]
                    |y| map(x, y),
                );
            }
        },
    );
}

/// Rows that are added to one sum before that is added to the sum of all.
const ROWS_OF_PART: usize = 256;

/// Adds the rows of `(rows, columns)`: one task a block of columns. Sums of some rows are added to a sum, as one of
/// very many rows would lose the last places of each.
pub(crate) fn sum_rows<A: Real>(
    rows: usize,
    columns: usize,
    out: &mut [A],
    read_row: impl Fn(usize, Range<usize>, &mut [A]) + Sync,
) {
    let block = if rows * columns <= PARALLEL_CHUNK { columns } else { 128 };
    for_each_chunk(
        out,
        block,
        #[inline(always)]
        |index, out| {
            let [mut scratch, mut part] = [(); 2].map(|()| vec![A::ZERO; out.len()]);
            let add = |sums: &mut [A], values: &[A]| {
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += *value);
            };
            let start = index * block;
            for first in (0..rows).step_by(ROWS_OF_PART) {
                part.fill(A::ZERO);
                for row in first..rows.min(first + ROWS_OF_PART) {
                    read_row(row, start..start + out.len(), &mut scratch);
                    add(&mut part, &scratch);
                }
                add(out, &part);
            }
        },
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::Device;

    /// Where there is no such device, its storage is a type without contents.
    #[test]
    fn tensors_are_told_apart_on_devices_of_all_kinds() {
        let (nothing, layout) = (&Nothing("test"), &Layout::contiguous(1));
        #[cfg(not(feature = "cuda"))]
        nothing.cuda_fwd(&mut CudaStorage, layout, &CudaStorage, layout).unwrap();
        #[cfg(not(feature = "metal"))]
        nothing.metal_fwd(&mut MetalStorage, layout, &MetalStorage, layout).unwrap();
    }

    #[test]
    fn tensors_that_share_storage_are_told() {
        let [a, b] = [(); 2].map(|()| Tensor::zeros(4, DType::F32, &Device::Cpu).unwrap());
        require_separate("test", "a and b", &a, &b).unwrap();
        let part = a.narrow(0, 1, 2).unwrap();
        let told = require_separate("test", "a and its part", &a, &part).unwrap_err().to_string();
        assert!(told.contains("test: a and its part must be tensors of their own"), "{told}");
    }
}
