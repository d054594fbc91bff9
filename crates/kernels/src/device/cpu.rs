//! The CPU: tensors as slices, element types, and parallel loops whose results do not depend on
//! how many threads run them.

use candle_core::{
    CpuStorage, DType, Device, InplaceOp1, InplaceOp2, Layout, Result, Storage, Tensor, WithDType,
    bail,
};
use half::{bf16, f16};
use rayon::prelude::*;

/// Loops over fewer elements than this stay on one thread.
const PARALLEL: usize = 8 * 1024;

/// Rows that are summed in one go. Fixed, so that sums don't depend on the number of threads.
const SUM_ROWS: usize = 32;

/// What sums are made in.
pub(crate) trait Accumulator:
    Element<Acc = Self> + num_traits::Float + std::ops::AddAssign + std::iter::Sum
{
}
impl Accumulator for f32 {}
impl Accumulator for f64 {}

/// A dtype that operations read and write: f32, f16 and bf16, summed in f32, and f64.
pub(crate) trait Element: WithDType + Copy + Send + Sync + 'static {
    /// What sums are made in.
    type Acc: Accumulator;
    fn up(self) -> Self::Acc;
    fn down(value: Self::Acc) -> Self;
}

macro_rules! element {
    ($type:ty, $acc:ty, $x:ident => $up:expr, $y:ident => $down:expr) => {
        impl Element for $type {
            type Acc = $acc;
            #[inline(always)]
            fn up(self) -> $acc {
                let $x = self;
                $up
            }
            #[inline(always)]
            fn down($y: $acc) -> Self {
                $down
            }
        }
    };
}
element!(f32, f32, x => x, y => y);
element!(f64, f64, x => x, y => y);
element!(bf16, f32, x => x.to_f32(), y => bf16::from_f32(y));
element!(f16, f32, x => x.to_f32(), y => f16::from_f32(y));

/// A constant in the accumulator's type.
#[inline(always)]
pub(crate) fn constant<A: Accumulator>(value: f64) -> A {
    <A as num_traits::NumCast>::from(value).unwrap_or_else(A::nan)
}

/// Runs a block with `$t` as the element type of a dtype.
macro_rules! dispatch {
    ($dtype:expr, $operation:literal, $t:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $t = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $t = f64;
                $body
            }
            candle_core::DType::BF16 => {
                type $t = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $t = half::f16;
                $body
            }
            other => candle_core::bail!(
                "{}: dtype {other:?} is not supported; f32, bf16, f16 and f64 are",
                $operation
            ),
        }
    };
}
pub(crate) use dispatch;

/// Binds a name to the elements of a tensor in row-major order; a strided one is copied first.
macro_rules! read {
    ($name:ident: $t:ty = $tensor:expr) => {
        let $name = $tensor.contiguous()?;
        let guard = $name.storage_and_layout();
        let $name: &[$t] = $crate::device::cpu::slice::<$t>(&guard.0, guard.1)?;
    };
}
pub(crate) use read;

/// The elements of a contiguous tensor in the CPU's memory.
pub(crate) fn slice<'a, T: WithDType>(storage: &'a Storage, layout: &Layout) -> Result<&'a [T]> {
    let Storage::Cpu(storage) = storage else {
        bail!("this build has no kernel for that device; move the tensors to the CPU")
    };
    slice_of(storage, layout)
}

fn slice_of<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
    match (T::cpu_storage_as_slice(storage)?, layout.contiguous_offsets()) {
        (all, Some((start, end))) => match all.get(start..end) {
            Some(elements) => Ok(elements),
            None => bail!("a layout of {start}..{end} in a storage of {} elements", all.len()),
        },
        _ => bail!("a contiguous tensor was expected"),
    }
}

/// Checks that all tensors are on the CPU, where this build's kernels are.
pub(crate) fn check_device(operation: &str, tensors: &[&Tensor]) -> Result<()> {
    for tensor in tensors {
        if !matches!(tensor.device(), Device::Cpu) {
            bail!(
                "metal-candle-kernels: {operation} has no kernel for {:?} in this build; move the \
                 tensors to the CPU",
                tensor.device().location()
            );
        }
    }
    Ok(())
}

/// Checks that `tensor` has dtype `dtype`.
pub(crate) fn check_dtype(
    operation: &str,
    name: &str,
    tensor: &Tensor,
    dtype: DType,
) -> Result<()> {
    if tensor.dtype() != dtype {
        bail!("{operation}: {name} is {:?}, expected {dtype:?}", tensor.dtype());
    }
    Ok(())
}

/// Checks that `tensor` has the dimensions `dims`.
pub(crate) fn check_shape(
    operation: &str,
    name: &str,
    tensor: &Tensor,
    dims: &[usize],
) -> Result<()> {
    if tensor.dims() != dims {
        bail!("{operation}: {name} has shape {:?}, expected {dims:?}", tensor.dims());
    }
    Ok(())
}

/// All dimensions but the last, multiplied, and the last.
pub(crate) fn rows_and_width(
    operation: &str,
    name: &str,
    tensor: &Tensor,
) -> Result<(usize, usize)> {
    match tensor.dims().split_last() {
        Some((&width, rows)) => Ok((rows.iter().product(), width)),
        None => bail!("{operation}: {name} is a scalar, expected at least one dimension"),
    }
}

/// Runs `work(index, chunk)` for each chunk of `width` elements, on all threads if it is worth it.
pub(crate) fn for_each_row<T: Send>(
    out: &mut [T],
    width: usize,
    work: impl Fn(usize, &mut [T]) + Sync + Send,
) {
    if width == 0 {
        return;
    }
    if out.len() < PARALLEL {
        out.chunks_mut(width).enumerate().for_each(|(index, row)| work(index, row));
    } else {
        // Several rows a task, because a row can be tiny.
        let rows = (PARALLEL / 4 / width).max(1);
        out.par_chunks_mut(width * rows).enumerate().for_each(|(task, chunk)| {
            for (offset, row) in chunk.chunks_mut(width).enumerate() {
                work(task * rows + offset, row);
            }
        });
    }
}

/// [`for_each_row`] over two outputs of the same number of rows.
pub(crate) fn for_each_row2<T: Send, U: Send>(
    (first, first_width): (&mut [T], usize),
    (second, second_width): (&mut [U], usize),
    work: impl Fn(usize, &mut [T], &mut [U]) + Sync + Send,
) {
    if first_width == 0 || second_width == 0 {
        return;
    }
    if first.len() < PARALLEL {
        first
            .chunks_mut(first_width)
            .zip(second.chunks_mut(second_width))
            .enumerate()
            .for_each(|(index, (a, b))| work(index, a, b));
    } else {
        let rows = (PARALLEL / 4 / first_width).max(1);
        first
            .par_chunks_mut(first_width * rows)
            .zip(second.par_chunks_mut(second_width * rows))
            .enumerate()
            .for_each(|(task, (a, b))| {
                for (offset, (a, b)) in
                    a.chunks_mut(first_width).zip(b.chunks_mut(second_width)).enumerate()
                {
                    work(task * rows + offset, a, b);
                }
            });
    }
}

/// Sums `width` numbers over `rows` rows: `add(row, sums)` adds one row. The order of the sums is
/// the same for any number of threads.
pub(crate) fn sum_rows<A: Accumulator>(
    rows: usize,
    width: usize,
    add: impl Fn(usize, &mut [A]) + Sync,
) -> Vec<A> {
    let tasks: Vec<usize> = (0..rows.div_ceil(SUM_ROWS)).collect();
    let part = |&task: &usize| {
        let mut sums = vec![A::zero(); width];
        for row in task * SUM_ROWS..rows.min((task + 1) * SUM_ROWS) {
            add(row, &mut sums);
        }
        sums
    };
    let parts: Vec<Vec<A>> = if rows * width < PARALLEL {
        tasks.iter().map(part).collect()
    } else {
        tasks.par_iter().map(part).collect()
    };
    let mut total = vec![A::zero(); width];
    for part in parts {
        for (total, part) in total.iter_mut().zip(part) {
            *total += part;
        }
    }
    total
}

/// `Σ x·y`, in lanes that a compiler can put into one register.
#[inline(always)]
pub(crate) fn dot<A: Accumulator>(x: &[A], y: &[A]) -> A {
    dot_mixed::<A>(x, y)
}

/// [`dot`] with `y` in the storage dtype.
#[inline(always)]
pub(crate) fn dot_mixed<T: Element>(x: &[T::Acc], y: &[T]) -> T::Acc {
    const LANES: usize = 16;
    let zero = <T::Acc as num_traits::Zero>::zero();
    let mut lanes = [zero; LANES];
    let (x_chunks, y_chunks) = (x.chunks_exact(LANES), y.chunks_exact(LANES));
    let mut sum = zero;
    for (x, y) in x_chunks.remainder().iter().zip(y_chunks.remainder()) {
        sum += *x * y.up();
    }
    for (x, y) in x_chunks.zip(y_chunks) {
        for lane in 0..LANES {
            lanes[lane] += x[lane] * y[lane].up();
        }
    }
    sum + lanes.iter().copied().sum::<T::Acc>()
}

/// `y += a·x`.
#[inline(always)]
pub(crate) fn add_scaled<A: Accumulator>(y: &mut [A], a: A, x: &[A]) {
    for (y, &x) in y.iter_mut().zip(x) {
        *y += a * x;
    }
}

/// The elements in the accumulator's type.
pub(crate) fn up<T: Element>(elements: &[T]) -> Vec<T::Acc> {
    elements.iter().map(|&x| x.up()).collect()
}

/// Writes the accumulators back as elements.
pub(crate) fn down_into<T: Element>(out: &mut [T], values: &[T::Acc]) {
    for (out, &value) in out.iter_mut().zip(values) {
        *out = T::down(value);
    }
}

/// A tensor on the CPU that owns `data`.
pub(crate) fn tensor<T: WithDType>(data: Vec<T>, dims: &[usize]) -> Result<Tensor> {
    Tensor::from_vec(data, dims, &Device::Cpu)
}

struct Mutate<F>(&'static str, F);

impl<F: Fn(&mut [f32]) -> Result<()>> InplaceOp1 for Mutate<F> {
    fn name(&self) -> &'static str {
        self.0
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        (self.1)(slice_mut(storage, layout)?)
    }
}

impl<F: Fn(&mut [f32], &[f32]) -> Result<()>> InplaceOp2 for Mutate<F> {
    fn name(&self) -> &'static str {
        self.0
    }

    fn cpu_fwd(
        &self,
        s1: &mut CpuStorage,
        l1: &Layout,
        s2: &CpuStorage,
        l2: &Layout,
    ) -> Result<()> {
        (self.1)(slice_mut(s1, l1)?, slice_of(s2, l2)?)
    }
}

fn slice_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout) -> Result<&'a mut [f32]> {
    match (storage, layout.contiguous_offsets()) {
        (CpuStorage::F32(all), Some((start, end))) if end <= all.len() => Ok(&mut all[start..end]),
        _ => bail!("a contiguous f32 tensor was expected"),
    }
}

/// Changes a contiguous f32 tensor in place.
pub(crate) fn mutate(
    name: &'static str,
    target: &Tensor,
    work: impl Fn(&mut [f32]) -> Result<()>,
) -> Result<()> {
    target.inplace_op1(&Mutate(name, work))
}

/// Changes a contiguous f32 tensor in place, reading another.
pub(crate) fn mutate_with(
    name: &'static str,
    target: &Tensor,
    source: &Tensor,
    work: impl Fn(&mut [f32], &[f32]) -> Result<()>,
) -> Result<()> {
    target.inplace_op2(source, &Mutate(name, work))
}
