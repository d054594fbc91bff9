//! Layer norm on the CPU: a task is a block of rows. In the backward pass each keeps its own sums for
//! the gradients of the parameters, which are added up in order at the end.

use super::Needs;
use crate::backend::cpu::{
    Disjoint, Element, Real, for_each_index, map_rows, read_row, rows_per_sum, sum, sums,
    write_through,
};

/// `(mean, 1 / √(variance + eps))` of a row.
#[inline(always)]
fn statistics<A: Real>(x: &[A], eps: f64) -> (A, A) {
    let count = A::from_f64(x.len() as f64);
    let mean = sum(x) / count;
    let [squares] = sums(
        [x],
        #[inline(always)]
        |[x]| [(x - mean) * (x - mean)],
    );
    (mean, A::ONE / (squares / count + A::from_f64(eps)).sqrt())
}

pub(super) fn forward<T: Element>(
    hidden: usize,
    x: &[T],
    weight: &[T::Acc],
    bias: Option<&[T::Acc]>,
    eps: f64,
    y: &mut [T],
) {
    map_rows(
        hidden,
        x,
        y,
        #[inline(always)]
        |x, y| {
            let (mean, r) = statistics(x, eps);
            match bias {
                Some(bias) => {
                    for (((y, x), w), b) in y.iter_mut().zip(x).zip(weight).zip(bias) {
                        *y = (*x - mean) * r * *w + *b;
                    }
                }
                None => {
                    for ((y, x), w) in y.iter_mut().zip(x).zip(weight) {
                        *y = (*x - mean) * r * *w;
                    }
                }
            }
        },
    );
}

pub(super) struct Backward<'a, T: Element> {
    pub rows: usize,
    pub hidden: usize,
    pub x: &'a [T],
    pub weight: &'a [T::Acc],
    pub eps: f64,
    pub dy: &'a [T],
}

impl<T: Element> Backward<'_, T> {
    /// Writes `dx`, and the sums of every task over its rows `(tasks, hidden)`. What isn't needed is
    /// left alone.
    pub(super) fn run(
        &self,
        needs: Needs,
        dx: &mut [T],
        dweight: &mut [T::Acc],
        dbias: &mut [T::Acc],
    ) {
        let Self { rows, hidden, x, weight, eps, dy } = *self;
        if hidden == 0 {
            return;
        }
        let block = rows_per_sum(rows, hidden);
        let (dx, dweight, dbias) =
            (Disjoint::new(dx), Disjoint::new(dweight), Disjoint::new(dbias));
        for_each_index(
            rows.div_ceil(block),
            true,
            #[inline(always)]
            |index| {
                let mut scratch = [const { Vec::new() }; 3];
                let [x_scratch, dy_scratch, dx_scratch] = &mut scratch;
                let sums =
                    |needed| if needed { index * hidden..(index + 1) * hidden } else { 0..0 };
                // SAFETY: every task has sums and rows of its own.
                let (dweight, dbias) =
                    unsafe { (dweight.slice(sums(needs.dweight)), dbias.slice(sums(needs.dbias))) };
                dweight.fill(T::Acc::ZERO);
                dbias.fill(T::Acc::ZERO);
                for row in index * block..rows.min((index + 1) * block) {
                    let place = row * hidden..(row + 1) * hidden;
                    let dy = read_row(&dy[place.clone()], dy_scratch);
                    for (dbias, dy) in dbias.iter_mut().zip(dy) {
                        *dbias += *dy;
                    }
                    if !needs.dx && !needs.dweight {
                        continue;
                    }
                    let x = read_row(&x[place.clone()], x_scratch);
                    let (mean, r) = statistics(x, eps);
                    for ((dweight, dy), x) in dweight.iter_mut().zip(dy).zip(x) {
                        *dweight += *dy * ((*x - mean) * r);
                    }
                    if needs.dx {
                        // SAFETY: as above.
                        let dx = unsafe { dx.slice(place) };
                        write_through(
                            dx,
                            dx_scratch,
                            #[inline(always)]
                            |dx| {
                                row_gradient(x, weight, dy, mean, r, dx);
                            },
                        );
                    }
                }
            },
        );
    }
}

#[inline(always)]
fn row_gradient<A: Real>(x: &[A], weight: &[A], dy: &[A], mean: A, r: A, dx: &mut [A]) {
    let count = A::from_f64(x.len() as f64);
    let [g, gn] = sums(
        [x, weight, dy],
        #[inline(always)]
        |[x, w, dy]| [dy * w, dy * w * ((x - mean) * r)],
    );
    let (g, gn) = (g / count, gn / count);
    for (((dx, x), w), dy) in dx.iter_mut().zip(x).zip(weight).zip(dy) {
        *dx = r * (*dy * *w - g - (*x - mean) * r * gn);
    }
}
