//! RMS norm on the CPU: a task is a block of rows; for the weight's gradient, a block of columns.

use crate::device::cpu::{
    Element, Real, Values, dot, for_each_chunk, rows_per_task, sum_rows, write_through,
};
use candle_core::WithDType;

/// `offset + weight`.
pub(super) fn scale<A: Real>(weight: Values<A>, offset: f64) -> Vec<A> {
    let mut scale = weight.to_vec();
    for scale in &mut scale {
        *scale += A::from_f64(offset);
    }
    scale
}

fn row_inverse_rms<A: Real>(x: &[A], eps: f64) -> A {
    let mean = dot(x, x) / A::from_f64(x.len() as f64);
    A::ONE / (mean + A::from_f64(eps)).sqrt()
}

pub(super) fn forward<T: Element>(hidden: usize, x: &[T], scale: &[T::Acc], eps: f64, y: &mut [T]) {
    let block = rows_per_task(hidden) * hidden;
    for_each_chunk(
        y,
        block,
        #[inline(always)]
        |index, y| {
            let mut row = vec![T::Acc::ZERO; hidden];
            let mut scratch = Vec::new();
            let x = &x[index * block..][..y.len()];
            for (x, y) in x.chunks_exact(hidden).zip(y.chunks_exact_mut(hidden)) {
                T::widen(x, &mut row);
                let r = row_inverse_rms(&row, eps);
                write_through(y, &mut scratch, |y| {
                    for ((y, x), scale) in y.iter_mut().zip(&row).zip(scale) {
                        *y = *x * r * *scale;
                    }
                });
            }
        },
    );
}

/// `1 / rms` of every row.
pub(super) fn inverse_rms<A: Real>(rows: usize, hidden: usize, x: Values<A>, eps: f64) -> Vec<A> {
    let mut out = vec![A::ZERO; rows];
    let block = rows_per_task(hidden);
    for_each_chunk(
        &mut out,
        block,
        #[inline(always)]
        |index, out| {
            let mut row = vec![A::ZERO; hidden];
            for (offset, out) in out.iter_mut().enumerate() {
                x.read((index * block + offset) * hidden, &mut row);
                *out = row_inverse_rms(&row, eps);
            }
        },
    );
    out
}

pub(super) fn backward_input<T: Element>(
    hidden: usize,
    x: Values<T::Acc>,
    scale: &[T::Acc],
    inverse_rms: &[T::Acc],
    dy: Values<T::Acc>,
    dx: &mut [T],
) {
    let rows_in_block = rows_per_task(hidden);
    for_each_chunk(
        dx,
        rows_in_block * hidden,
        #[inline(always)]
        |index, dx| {
            let mut row = vec![T::Acc::ZERO; hidden];
            let mut g = vec![T::Acc::ZERO; hidden];
            let mut scratch = Vec::new();
            for (offset, dx) in dx.chunks_exact_mut(hidden).enumerate() {
                let number = index * rows_in_block + offset;
                let r = inverse_rms[number];
                x.read(number * hidden, &mut row);
                dy.read(number * hidden, &mut g);
                for (g, scale) in g.iter_mut().zip(scale) {
                    *g *= *scale;
                }
                let mean = dot(&g, &row) / T::Acc::from_f64(hidden as f64);
                let correction = r * r * r * mean;
                write_through(dx, &mut scratch, |dx| {
                    for ((dx, g), x) in dx.iter_mut().zip(&g).zip(&row) {
                        *dx = r * *g - *x * correction;
                    }
                });
            }
        },
    );
}

pub(super) fn backward_weight<A: Real>(
    rows: usize,
    hidden: usize,
    x: Values<A>,
    inverse_rms: &[A],
    dy: Values<A>,
    dweight: &mut [A],
) {
    sum_rows(
        rows,
        hidden,
        dweight,
        #[inline(always)]
        |row, columns, target| {
            let mut xs = [A::ZERO; 128];
            let r = inverse_rms[row];
            let start = row * hidden + columns.start;
            for (block, target) in target.chunks_mut(128).enumerate() {
                let xs = &mut xs[..target.len()];
                x.read(start + block * 128, xs);
                dy.read(start + block * 128, target);
                for (target, x) in target.iter_mut().zip(xs) {
                    *target *= *x * r;
                }
            }
        },
    );
}
