//! DoRA on the CPU: a task is a block of rows, or of norms. In the backward pass each task keeps its own sums
//! over its rows, which are added up in order at the end.

use crate::backend::cpu::{
    Disjoint, Element, Real, StridedRows, dot, for_each_chunk, for_each_index, rows_per_sum,
    rows_per_task, write_through,
};

/// The squares of the norms of a weight's rows.
pub(super) fn squared_norms<T: Element>(weight: StridedRows<T>, squares: &mut [T::Acc]) {
    let block = rows_per_task(weight.columns);
    for_each_chunk(
        squares,
        block,
        #[inline(always)]
        |index, squares| {
            let mut scratch = Vec::new();
            for (offset, square) in squares.iter_mut().enumerate() {
                let row = weight.row(index * block + offset, &mut scratch);
                *square = dot(row, row);
            }
        },
    );
}

/// What the norms of a merged weight's rows follow from.
pub(super) struct Merged<'a, A> {
    /// `(out)`
    pub base: &'a [A],
    /// `(W·A)ᵀ` `(rank, out)`
    pub products: &'a [A],
    /// `AᵀA·B` `(rank, out)`
    pub gram_b: &'a [A],
    /// `(rank, out)`
    pub b: &'a [A],
    pub scale: f64,
}

impl<A: Real> Merged<'_, A> {
    pub(super) fn norms(&self, norms: &mut [A]) {
        let Self { base, products, gram_b, b, scale } = *self;
        let outer = norms.len().max(1);
        let (twice, square) = (A::from_f64(2.0 * scale), A::from_f64(scale * scale));
        let least = A::from_f64(f32::EPSILON.into());
        let block = rows_per_task(3 * b.len() / outer);
        for_each_chunk(
            norms,
            block,
            #[inline(always)]
            |index, norms| {
                let place = index * block..index * block + norms.len();
                norms.fill(A::ZERO);
                let rows = b.chunks_exact(outer).zip(products.chunks_exact(outer));
                for ((b, products), gram_b) in rows.zip(gram_b.chunks_exact(outer)) {
                    let inputs = b[place.clone()].iter().zip(&products[place.clone()]);
                    let inputs = inputs.zip(&gram_b[place.clone()]);
                    for (sum, ((b, product), gram_b)) in norms.iter_mut().zip(inputs) {
                        *sum += *b * (twice * *product + square * *gram_b);
                    }
                }
                for (norm, base) in norms.iter_mut().zip(&base[place]) {
                    let (sum, least) = (*base + *norm, *base * least);
                    *norm = if sum < least { least } else { sum }.sqrt();
                }
            },
        );
    }
}

pub(super) fn scale_columns<T: Element>(
    y: StridedRows<T>,
    factor: &[T::Acc],
    bias: Option<&[T::Acc]>,
    out: &mut [T],
) {
    let columns = y.columns.max(1);
    let block = rows_per_task(columns);
    for_each_chunk(
        out,
        block * columns,
        #[inline(always)]
        |index, out| {
            let (mut y_scratch, mut out_scratch) = (Vec::new(), Vec::new());
            for (offset, out) in out.chunks_exact_mut(columns).enumerate() {
                let y = y.row(index * block + offset, &mut y_scratch);
                write_through(
                    out,
                    &mut out_scratch,
                    #[inline(always)]
                    |out| match bias {
                        Some(bias) => {
                            for (((out, y), f), b) in out.iter_mut().zip(y).zip(factor).zip(bias) {
                                *out = *y * *f + *b;
                            }
                        }
                        None => {
                            for ((out, y), f) in out.iter_mut().zip(y).zip(factor) {
                                *out = *y * *f;
                            }
                        }
                    },
                );
            }
        },
    );
}

pub(super) struct Backward<'a, T: Element> {
    pub rows: usize,
    pub y: StridedRows<'a, T>,
    pub factor: &'a [T::Acc],
    pub dz: StridedRows<'a, T>,
}

impl<T: Element> Backward<'_, T> {
    /// Writes `dy`, and the sums of every task over its rows `(tasks, columns)`.
    pub(super) fn run(&self, dy: &mut [T], dfactor: &mut [T::Acc], dbias: Option<&mut [T::Acc]>) {
        let Self { rows, y, factor, dz } = *self;
        let columns = y.columns;
        if columns == 0 {
            return;
        }
        let block = rows_per_sum(rows, columns);
        let (dy, dfactor) = (Disjoint::new(dy), Disjoint::new(dfactor));
        let dbias = dbias.map(Disjoint::new);
        for_each_index(
            rows.div_ceil(block),
            true,
            #[inline(always)]
            |index| {
                let mut scratch = [const { Vec::new() }; 3];
                let [y_scratch, dz_scratch, dy_scratch] = &mut scratch;
                let sums = index * columns..(index + 1) * columns;
                // SAFETY: every task has sums and rows of its own.
                let dfactor = unsafe { dfactor.slice(sums.clone()) };
                dfactor.fill(T::Acc::ZERO);
                // SAFETY: as above.
                let mut dbias = dbias.as_ref().map(|all| unsafe { all.slice(sums) });
                if let Some(dbias) = &mut dbias {
                    dbias.fill(T::Acc::ZERO);
                }
                for row in index * block..rows.min((index + 1) * block) {
                    let y = y.row(row, y_scratch);
                    let dz = dz.row(row, dz_scratch);
                    for ((dfactor, dz), y) in dfactor.iter_mut().zip(dz).zip(y) {
                        *dfactor += *dz * *y;
                    }
                    if let Some(dbias) = &mut dbias {
                        for (dbias, dz) in dbias.iter_mut().zip(dz) {
                            *dbias += *dz;
                        }
                    }
                    // SAFETY: as above.
                    let dy = unsafe { dy.slice(row * columns..(row + 1) * columns) };
                    write_through(
                        dy,
                        dy_scratch,
                        #[inline(always)]
                        |dy| {
                            for ((dy, dz), factor) in dy.iter_mut().zip(dz).zip(factor) {
                                *dy = *dz * *factor;
                            }
                        },
                    );
                }
            },
        );
    }
}
