//! LoRA layers of a few rows: a pass over each matrix as it lies.

use super::{Adapter, AdapterGradients, Incoming, Layer, frozen};
use crate::backend::cpu::{
    Disjoint, Element, Real, Values, for_each_chunk, for_each_index, rows_per_task, unwritten,
};
use crate::matmul::cpu::{OUTPUTS, PARALLEL_MULTIPLICATIONS, add, combine, forward_few, widened};
use crate::matmul::few_rows::{FEW_ROWS, add_combinations, dots};
use metal_candle_cpu::scratch::Scratch;
use std::ops::Range;

/// As [`super::forward`].
pub(super) fn forward<T: Element>(
    rows: usize,
    inner: usize,
    x: Values<T::Acc>,
    layers: &[Layer<T::Acc>],
    ys: &mut [&mut [T]],
    xas: &mut [Vec<T::Acc>],
) {
    let mut scratch = Scratch::new(rows * inner);
    let stored = x;
    let x = widened(stored, &mut scratch);
    for (layer, xa) in layers.iter().zip(xas.iter_mut()) {
        let Some(adapter) = &layer.adapter else { continue };
        let a = Values::Native(adapter.a);
        match &adapter.dropout {
            None => combine(rows, inner, x, a, adapter.rank, xa),
            Some(dropout) => {
                let mut dropped = Scratch::new(x.len());
                dropped.copy_from_slice(x);
                (dropout.mask)(0, &mut dropped);
                combine(rows, inner, &dropped, a, adapter.rank, xa);
                xa.iter_mut().for_each(|xa| *xa *= dropout.kept);
            }
        }
    }
    forward_few(
        rows,
        inner,
        (stored, x),
        &frozen(layers),
        ys,
        #[inline(always)]
        |index, outputs, sums| {
            let layer = &layers[index];
            if let Some(adapter) = &layer.adapter {
                add_low_rank((rows, layer.frozen.outer), adapter, &xas[index], outputs, sums);
            }
        },
    );
}

/// Adds `scale·xa·b` for some outputs of every row: `xa` `(rows, rank)`, `sums` `(rows, outputs)`.
#[inline(always)]
fn add_low_rank<A: Real>(
    (rows, outer): (usize, usize),
    adapter: &Adapter<A>,
    xa: &[A],
    outputs: Range<usize>,
    sums: &mut [A],
) {
    let mut left = [A::ZERO; 64];
    for row in 0..rows {
        let sums = &mut sums[row * outputs.len()..][..outputs.len()];
        for first in (0..adapter.rank).step_by(left.len()) {
            let last = (first + left.len()).min(adapter.rank);
            let left = &mut left[..last - first];
            let xa = &xa[row * adapter.rank + first..];
            for (left, xa) in left.iter_mut().zip(xa) {
                *left = *xa * adapter.scale;
            }
            let b = Values::Native(&adapter.b[first * outer..]);
            let depth = left.len();
            add_combinations(1, depth, depth, left, b, outer, outputs.clone(), sums);
        }
    }
}

/// As [`super::backward`].
pub(super) fn backward<T: Element>(
    rows: usize,
    inner: usize,
    x: Values<T::Acc>,
    layers: &[Layer<T::Acc>],
    incoming: &[Incoming<T::Acc>],
    dx: Option<&mut [T]>,
) -> Vec<Option<AdapterGradients<T::Acc>>> {
    let mut scratch = Scratch::new(rows * inner);
    let x = widened(x, &mut scratch);
    let mut total = dx.as_ref().map(|_| Scratch::<T::Acc>::zeros(rows * inner));
    let mut gradients = Vec::new();
    for (layer, from) in layers.iter().zip(incoming) {
        let outer = layer.frozen.outer;
        let mut scratch = Scratch::new(rows * outer);
        let dy = widened(from.dy, &mut scratch);
        let mut g = Vec::new();
        gradients.push(layer.adapter.as_ref().map(|adapter| {
            let rank = adapter.rank;
            g = vec![T::Acc::ZERO; rows * rank];
            dots_of_lines(rows, outer, dy, adapter.b, rank, &mut g);
            g.iter_mut().for_each(|g| *g *= adapter.scale);
            let mut dropped = Scratch::new(x.len());
            let x = match &adapter.dropout {
                None => x,
                Some(dropout) => {
                    dropped.copy_from_slice(x);
                    (dropout.mask)(0, &mut dropped);
                    dropped.iter_mut().for_each(|x| *x *= dropout.kept);
                    &dropped
                }
            };
            let mut da = unwritten(inner * rank);
            outer_products(rows, inner, rank, x, &g, T::Acc::ONE, &mut da);
            let mut db = unwritten(rank * outer);
            outer_products(rows, rank, outer, from.xa, dy, adapter.scale, &mut db);
            AdapterGradients { da, db }
        }));
        let Some(total) = &mut total else { continue };
        let mut part = Scratch::new(rows * inner);
        combine(rows, outer, dy, layer.frozen.weight, inner, &mut part);
        add(total, &part);
        if let Some(adapter) = &layer.adapter {
            dots_of_lines(rows, adapter.rank, &g, adapter.a, inner, &mut part);
            if let Some(dropout) = &adapter.dropout {
                (dropout.mask)(0, &mut part);
                part.iter_mut().for_each(|part| *part *= dropout.kept);
            }
            add(total, &part);
        }
    }
    if let Some((dx, total)) = dx.zip(total) {
        T::narrow(&total, dx);
    }
    gradients
}

/// `out = x·linesᵀ` for a few rows: `x` `(rows, depth)`, `matrix` `(lines, depth)`.
fn dots_of_lines<A: Real>(
    rows: usize,
    depth: usize,
    x: &[A],
    matrix: &[A],
    lines: usize,
    out: &mut [A],
) {
    let out = Disjoint::new(out);
    let task = OUTPUTS.min(lines.div_ceil(8).max(1));
    let parallel = rows * depth * lines > PARALLEL_MULTIPLICATIONS;
    for_each_index(
        lines.div_ceil(task),
        parallel,
        #[inline(always)]
        |index| {
            let part = index * task..(index * task + task).min(lines);
            let count = part.len();
            let mut sums = [A::ZERO; FEW_ROWS * OUTPUTS];
            let sums = &mut sums[..rows * count];
            dots(rows, depth, x, Values::Native(matrix), depth, part.clone(), sums);
            for row in 0..rows {
                let start = row * lines + part.start;
                // SAFETY: every task writes its own columns of each row.
                let out = unsafe { out.slice(start..start + count) };
                out.copy_from_slice(&sums[row * count..][..count]);
            }
        },
    );
}

/// `out = scale·leftᵀ·right` for a few rows: `left` `(rows, a)`, `right` `(rows, b)`, `out` `(a, b)`.
fn outer_products<A: Real>(
    rows: usize,
    a: usize,
    b: usize,
    left: &[A],
    right: &[A],
    scale: A,
    out: &mut [A],
) {
    if rows == 0 {
        return out.fill(A::ZERO);
    }
    let block = rows_per_task(b);
    for_each_chunk(
        out,
        block * b,
        #[inline(always)]
        |index, out| {
            for (offset, out) in out.chunks_exact_mut(b).enumerate() {
                let left = |row: usize| left[row * a + index * block + offset] * scale;
                let first = left(0);
                for (out, right) in out.iter_mut().zip(right) {
                    *out = first * *right;
                }
                for row in 1..rows {
                    let left = left(row);
                    for (out, right) in out.iter_mut().zip(&right[row * b..][..b]) {
                        *out += left * *right;
                    }
                }
            }
        },
    );
}
