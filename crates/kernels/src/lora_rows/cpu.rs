//! Low-rank adapters of rows on the CPU. Some rows of an adapter are gathered and multiplied by A, and then by some
//! columns of B; one row and many take the same way.

use super::{Adapters, Factors, OPERATION, Rows, Segment, Target};
use crate::backend::cpu::gemm::{Kind, Lhs, Operand, Panels, multiply, sum_count, sum_stride};
use crate::backend::cpu::{
    Disjoint, Element, Input, Real, Values, collapsed_rows, for_each_index, unwritten,
};
use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, WithDType, bail};
use metal_candle_cpu::scratch::Scratch;
use metal_candle_cpu::simd::vectorize;
use std::any::Any;
use std::ops::Range;

/// Rows of a task at most, so that A and B are packed once for as many.
const ROWS: usize = 64;
/// Columns of y of a task at most.
const COLUMNS: usize = 512;
/// Multiplications below which threads cost more than they bring.
const PARALLEL_MULTIPLICATIONS: usize = 32 * 1024;

/// Some rows of an adapter for a layer.
struct Task<'a> {
    target: usize,
    factors: &'a Factors,
    /// Where they are in the order of rows by adapter.
    places: Range<usize>,
    /// Where their `s·x·A` are, `(places, rank)`.
    start: usize,
}

pub(super) fn add_updates<T: Element + WithDType>(
    x: &Tensor,
    inner: usize,
    targets: &[Target],
    adapters: &Adapters,
    rows: &Rows,
) -> Result<()> {
    let (tasks, count) = tasks(targets, adapters, &rows.segments);
    let mut xa = unwritten::<T::Acc>(count);
    {
        let x = Input::collapsed_rows(x)?;
        let x = x.read();
        let x = x.rows::<T>()?;
        let out = Disjoint::new(&mut xa);
        let factors = tasks
            .iter()
            .map(|task| Input::contiguous(&task.factors.a))
            .collect::<Result<Vec<_>>>()?;
        let reads: Vec<_> = factors.iter().map(Input::read).collect();
        let a = reads.iter().map(|read| read.slice()).collect::<Result<Vec<&[T::Acc]>>>()?;
        for_each_index(tasks.len(), count * inner > PARALLEL_MULTIPLICATIONS, |index| {
            let Task { factors, places, start, .. } = &tasks[index];
            let mut gathered = Scratch::<T::Acc>::new(places.len() * inner);
            let mut scratch = Vec::new();
            for (place, line) in places.clone().zip(gathered.chunks_exact_mut(inner.max(1))) {
                line.copy_from_slice(x.row(rows.order[place] as usize, &mut scratch));
            }
            let rank = factors.rank;
            let left = Operand::lines(Values::Native(&gathered), inner);
            let right = Operand::columns(Values::Native(a[index]), rank);
            let scale = T::Acc::from_f64(factors.scale);
            product([places.len(), inner, rank], left, right, |row, sums| {
                let start = start + row * rank;
                // SAFETY: every task has rows of its own.
                let out = unsafe { out.slice(start..start + rank) };
                for (out, sum) in out.iter_mut().zip(sums) {
                    *out = scale * *sum;
                }
            });
        });
    }
    for (index, target) in targets.iter().enumerate() {
        let tasks: Vec<_> = tasks.iter().filter(|task| task.target == index).collect();
        let factors = tasks
            .iter()
            .map(|task| Input::contiguous(&task.factors.b))
            .collect::<Result<Vec<_>>>()?;
        let reads: Vec<_> = factors.iter().map(Input::read).collect();
        let b = reads.iter().map(|read| read.slice()).collect::<Result<Vec<&[T::Acc]>>>()?;
        let change = |y: &mut [T], stride: usize| {
            add::<T>(y, (target.sizes.outer, stride), &tasks, &b, &xa, &rows.order);
        };
        target.y.inplace_op1(&Change::<T, _> { change, element: std::marker::PhantomData })?;
    }
    Ok(())
}

/// The tasks, and how many numbers all their `s·x·A` have.
fn tasks<'a>(
    targets: &[Target],
    adapters: &'a Adapters,
    segments: &[Segment],
) -> (Vec<Task<'a>>, usize) {
    let (mut tasks, mut start) = (Vec::new(), 0);
    for (target, Target { layer, .. }) in targets.iter().enumerate() {
        for Segment { adapter, places } in segments {
            let Some(factors) = adapters.of(*layer, *adapter) else { continue };
            for first in places.clone().step_by(ROWS) {
                let places = first..places.end.min(first + ROWS);
                let count = places.len() * factors.rank;
                tasks.push(Task { target, factors, places, start });
                start += count;
            }
        }
    }
    (tasks, start)
}

/// Adds `xa·B` to rows of y, which are `stride` elements apart.
fn add<T: Element>(
    y: &mut [T],
    (outer, stride): (usize, usize),
    tasks: &[&Task],
    b: &[&[T::Acc]],
    xa: &[T::Acc],
    order: &[u32],
) {
    let blocks = outer.div_ceil(COLUMNS);
    let of_task = |task: &&Task| task.places.len() * task.factors.rank;
    let multiplications = tasks.iter().map(of_task).sum::<usize>() * outer;
    let y = Disjoint::new(y);
    for_each_index(tasks.len() * blocks, multiplications > PARALLEL_MULTIPLICATIONS, |index| {
        let (task, b) = (tasks[index / blocks], b[index / blocks]);
        let first = index % blocks * COLUMNS;
        let columns = COLUMNS.min(outer - first);
        let (rows, rank) = (task.places.len(), task.factors.rank);
        let left = Operand::lines(Values::Native(&xa[task.start..][..rows * rank]), rank);
        let right = Operand { start: first, ..Operand::columns(Values::Native(b), outer) };
        let mut wide = Scratch::<T::Acc>::new(columns);
        product([rows, rank, columns], left, right, |row, sums| {
            let start = order[task.places.start + row] as usize * stride + first;
            // SAFETY: every task has columns of rows of its own.
            let y = unsafe { y.slice(start..start + columns) };
            T::widen(y, &mut wide);
            for (wide, sum) in wide.iter_mut().zip(sums) {
                *wide += *sum;
            }
            T::narrow(&wide, y);
        });
    });
}

/// Calls `take` with every row of `left·right`, `(rows, depth)` by `(depth, columns)`, on this thread.
#[inline(always)]
fn product<A: Real>(
    [rows, depth, columns]: [usize; 3],
    left: Operand<A>,
    right: Operand<A>,
    mut take: impl FnMut(usize, &[A]),
) {
    let left = Lhs::pack_here(Kind::Plain, rows, depth, left);
    let right = Panels::pack(Kind::Plain, columns, depth, right);
    let stride = sum_stride(columns);
    let mut sums = Scratch::new(sum_count(rows, stride));
    multiply(&left, 0..rows, &right, 0..columns, &mut sums, stride, false);
    vectorize(
        #[inline(always)]
        || {
            for row in 0..rows {
                take(row, &sums[row * stride..][..columns]);
            }
        },
    );
}

/// Lets `change` work on a tensor's rows, from its first element on, with the distance between them.
struct Change<T, F> {
    change: F,
    element: std::marker::PhantomData<T>,
}

impl<T: Element, F: Fn(&mut [T], usize)> InplaceOp1 for Change<T, F> {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let elements: &mut dyn Any = match storage {
            CpuStorage::F32(elements) => elements,
            CpuStorage::BF16(elements) => elements,
            CpuStorage::F16(elements) => elements,
            CpuStorage::F64(elements) => elements,
            _ => bail!("metal-candle-kernels: {OPERATION}: y is of no float dtype"),
        };
        match (elements.downcast_mut::<Vec<T>>(), collapsed_rows(layout)) {
            (Some(elements), Some((_, _, stride))) => {
                (self.change)(&mut elements[layout.start_offset()..], stride);
                Ok(())
            }
            _ => bail!("metal-candle-kernels: {OPERATION}: y is of another dtype than x"),
        }
    }
}
