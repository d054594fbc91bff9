//! RMS norm on the CPU: a task is a block of rows. In the backward pass each keeps its own sum for
//! the weight's gradient; they are added up in order at the end.

use crate::backend::cpu::{
    Disjoint, Element, Real, Values, dot, for_each_chunk2, for_each_index, map_rows, read_row,
    rows_per_sum, rows_per_task, sums, write_through,
};
use candle_core::WithDType;

/// `offset + weight`.
pub(super) fn scale<'a, A: Real>(
    weight: Values<'a, A>,
    offset: f64,
    scratch: &'a mut Vec<A>,
) -> &'a [A] {
    if offset == 0.0 {
        return weight.block(0..weight.len(), scratch);
    }
    *scratch = weight.to_vec();
    for scale in &mut *scratch {
        *scale += A::from_f64(offset);
    }
    scratch
}

#[inline(always)]
fn inverse_rms<A: Real>(squares: A, count: usize, eps: f64) -> A {
    A::ONE / (squares / A::from_f64(count as f64) + A::from_f64(eps)).sqrt()
}

#[inline(always)]
fn row<A: Real>(x: &[A], scale: &[A], eps: f64, y: &mut [A]) {
    let r = inverse_rms(dot(x, x), x.len(), eps);
    for ((y, x), scale) in y.iter_mut().zip(x).zip(scale) {
        *y = *x * r * *scale;
    }
}

pub(super) fn forward<T: Element>(hidden: usize, x: &[T], scale: &[T::Acc], eps: f64, y: &mut [T]) {
    map_rows(
        hidden,
        x,
        y,
        #[inline(always)]
        |x, y| row(x, scale, eps, y),
    );
}

pub(super) fn forward_residual<T: Element>(
    hidden: usize,
    (x, residual): (&[T], &[T]),
    scale: &[T::Acc],
    eps: f64,
    sum: &mut [T],
    y: &mut [T],
) {
    let hidden = hidden.max(1);
    let block = rows_per_task(hidden) * hidden;
    for_each_chunk2(
        sum,
        block,
        y,
        block,
        #[inline(always)]
        |index, sum, y| {
            let mut scratch = [const { Vec::new() }; 3];
            let [x_scratch, residual_scratch, y_scratch] = &mut scratch;
            let place = index * block..index * block + y.len();
            let inputs = x[place.clone()].chunks_exact(hidden).zip(residual[place].chunks(hidden));
            let outputs = sum.chunks_exact_mut(hidden).zip(y.chunks_exact_mut(hidden));
            for ((x, residual), (sum, y)) in inputs.zip(outputs) {
                let (x, residual) = (read_row(x, x_scratch), read_row(residual, residual_scratch));
                write_through(
                    sum,
                    y_scratch,
                    #[inline(always)]
                    |sum| {
                        for ((sum, x), residual) in sum.iter_mut().zip(x).zip(residual) {
                            *sum = *x + *residual;
                        }
                    },
                );
                // The norm is that of the sum as it is stored.
                let sum = read_row(sum, x_scratch);
                write_through(
                    y,
                    y_scratch,
                    #[inline(always)]
                    |y| row(sum, scale, eps, y),
                );
            }
        },
    );
}

pub(super) struct Backward<'a, T: Element> {
    pub rows: usize,
    pub hidden: usize,
    pub x: &'a [T],
    pub scale: &'a [T::Acc],
    pub eps: f64,
    pub dy: &'a [T],
    /// Another gradient of `x`, to be added.
    pub dsum: Option<&'a [T]>,
}

impl<T: Element> Backward<'_, T> {
    /// Writes `dx` and the sums of every task over its rows `(tasks, hidden)`, where there are any.
    pub(super) fn run(&self, dx: Option<&mut [T]>, dweight: Option<&mut [T::Acc]>) {
        let Self { rows, hidden, x, scale, eps, dy, dsum } = *self;
        if hidden == 0 {
            return;
        }
        let block = rows_per_sum(rows, hidden);
        let dx = dx.map(Disjoint::new);
        let dweight = dweight.map(Disjoint::new);
        for_each_index(
            rows.div_ceil(block),
            true,
            #[inline(always)]
            |index| {
                let mut scratch = [const { Vec::new() }; 4];
                let [x_scratch, dy_scratch, dsum_scratch, dx_scratch] = &mut scratch;
                let sums_of_task = index * hidden..(index + 1) * hidden;
                // SAFETY: every task has sums of its own.
                let mut dweight = dweight.as_ref().map(|all| unsafe { all.slice(sums_of_task) });
                if let Some(dweight) = &mut dweight {
                    dweight.fill(T::Acc::ZERO);
                }
                for row in index * block..rows.min((index + 1) * block) {
                    let place = row * hidden..(row + 1) * hidden;
                    let x = read_row(&x[place.clone()], x_scratch);
                    let dy = read_row(&dy[place.clone()], dy_scratch);
                    let [squares, product] = sums(
                        [x, scale, dy],
                        #[inline(always)]
                        |[x, scale, dy]| [x * x, dy * scale * x],
                    );
                    let r = inverse_rms(squares, hidden, eps);
                    if let Some(dweight) = &mut dweight {
                        for ((dweight, dy), x) in dweight.iter_mut().zip(dy).zip(x) {
                            *dweight += *dy * (*x * r);
                        }
                    }
                    let Some(dx) = &dx else { continue };
                    let mean = product / T::Acc::from_f64(hidden as f64);
                    let correction = r * r * r * mean;
                    let dsum = dsum.map(|dsum| read_row(&dsum[place.clone()], dsum_scratch));
                    // SAFETY: every task has rows of its own.
                    let dx = unsafe { dx.slice(place) };
                    write_through(
                        dx,
                        dx_scratch,
                        #[inline(always)]
                        |dx| {
                            let gradient = dx.iter_mut().zip(x).zip(dy).zip(scale);
                            match dsum {
                                Some(dsum) => {
                                    for ((((dx, x), dy), scale), dsum) in gradient.zip(dsum) {
                                        *dx = r * (*dy * *scale) - *x * correction + *dsum;
                                    }
                                }
                                None => {
                                    for (((dx, x), dy), scale) in gradient {
                                        *dx = r * (*dy * *scale) - *x * correction;
                                    }
                                }
                            }
                        },
                    );
                }
            },
        );
    }
}
