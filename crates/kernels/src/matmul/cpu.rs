//! Products with a weight on the CPU. Operands that are stored as they are computed with go to one
//! `gemm` call; half-precision ones are converted tile by tile, so that no whole weight is ever
//! held in f32. A few rows (decoding) are dot products: one pass over the weight, bound by memory.

use crate::device::cpu::{
    Disjoint, Element, Matrix, MatrixMut, Real, Threads, Values, for_each_chunk, for_each_index,
    multiply, rows_per_task,
};

/// Rows of `x` that are converted at a time.
const ROW_BLOCK: usize = 256;
/// Outputs of one task: as many weight rows (or columns) are converted at a time.
const TILE: usize = 128;
/// Inputs of a tile that are converted at a time, so that they stay in the cache.
const INNER_BLOCK: usize = 1024;
/// Up to this many rows, dot products beat packing the weight for `gemm`.
const FEW_ROWS: usize = 4;
/// Multiplications below which threads cost more than they bring.
const PARALLEL_MULTIPLICATIONS: usize = 64 * 1024;

/// How the weight is stored.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Orientation {
    /// `(outer, inner)`: the forward pass of a linear layer.
    OutputMajor,
    /// `(inner, outer)`: its backward pass.
    InputMajor,
}

/// A dropout mask: `mask(index of the first element, elements)` changes them in place.
pub(crate) type Mask<'a, A> = dyn Fn(usize, &mut [A]) + Sync + 'a;

/// `scale·left·right`, to be added to a product. `left` is `(rows, rank)`; `right` is
/// `(rank, outer)`, or `(outer, rank)` when `transposed`.
pub(crate) struct LowRank<'a, A> {
    pub left: &'a [A],
    pub right: &'a [A],
    pub transposed: bool,
    pub rank: usize,
    pub scale: A,
    /// Applied to the rows of the low-rank part.
    pub mask: Option<&'a Mask<'a, A>>,
}

impl<A: Real> LowRank<'_, A> {
    /// Adds this to rows `first_row..` and columns `first_column..` of a result `outer` wide.
    #[allow(clippy::too_many_arguments)]
    fn add(
        &self,
        out: &mut [A],
        rows: usize,
        columns: usize,
        first_row: usize,
        first_column: usize,
        outer: usize,
        threads: Threads,
    ) {
        if rows == 0 || columns == 0 || self.rank == 0 {
            return;
        }
        let left = &self.left[first_row * self.rank..(first_row + rows) * self.rank];
        let left = Matrix::new(left, rows, self.rank, self.rank);
        let right = if self.transposed {
            let right = &self.right[first_column * self.rank..];
            Matrix::new(right, columns, self.rank, self.rank).transpose()
        } else {
            Matrix::new(&self.right[first_column..], self.rank, columns, outer)
        };
        match self.mask {
            None => {
                let target = MatrixMut::new(out, rows, columns, columns);
                multiply(target, true, left, right, self.scale, threads);
            }
            Some(mask) => {
                let mut part = vec![A::ZERO; rows * columns];
                let target = MatrixMut::new(&mut part, rows, columns, columns);
                multiply(target, false, left, right, self.scale, threads);
                for row in 0..rows {
                    let part = &mut part[row * columns..][..columns];
                    mask((first_row + row) * outer + first_column, part);
                    for (out, part) in out[row * columns..].iter_mut().zip(part) {
                        *out += *part;
                    }
                }
            }
        }
    }
}

/// `x·R + low rank part + bias`, where `R` is the weight or its transpose: `x` `(rows, inner)`,
/// result `(rows, outer)`.
pub(crate) struct Product<'a, A> {
    pub x: Values<'a, A>,
    pub weight: Values<'a, A>,
    pub orientation: Orientation,
    pub rows: usize,
    pub inner: usize,
    pub outer: usize,
    pub bias: Option<&'a [A]>,
    pub low_rank: Option<LowRank<'a, A>>,
}

impl<A: Real> Product<'_, A> {
    pub(crate) fn run<T: Element<Acc = A>>(&self, out: &mut [T]) {
        let few_rows = self.rows <= FEW_ROWS && self.orientation == Orientation::OutputMajor;
        if !few_rows
            && let (Values::Native(x), Values::Native(weight)) = (self.x, self.weight)
            && let Some(out) = T::native_mut(out)
        {
            self.run_whole(x, weight, out);
        } else {
            self.run_tiled(out);
        }
    }

    /// The right-hand side `(inner, columns)` from a `(columns, inner)` or `(inner, columns)` block.
    fn right<'a>(
        &self,
        block: &'a [A],
        inner: usize,
        columns: usize,
        stride: usize,
    ) -> Matrix<'a, A> {
        match self.orientation {
            Orientation::OutputMajor => Matrix::new(block, columns, inner, stride).transpose(),
            Orientation::InputMajor => Matrix::new(block, inner, columns, stride),
        }
    }

    fn run_whole(&self, x: &[A], weight: &[A], out: &mut [A]) {
        let (rows, inner, outer) = (self.rows, self.inner, self.outer);
        let stride = match self.orientation {
            Orientation::OutputMajor => inner,
            Orientation::InputMajor => outer,
        };
        multiply(
            MatrixMut::new(out, rows, outer, outer),
            false,
            Matrix::new(x, rows, inner, inner),
            self.right(weight, inner, outer, stride),
            A::ONE,
            Threads::All,
        );
        if let Some(low_rank) = &self.low_rank {
            if low_rank.mask.is_none() {
                low_rank.add(out, rows, outer, 0, 0, outer, Threads::All);
            } else {
                // Row blocks bound the scratch that the mask needs.
                let block = rows_per_task(outer).min(ROW_BLOCK);
                for_each_chunk(
                    out,
                    block * outer,
                    #[inline(always)]
                    |index, out| {
                        let rows = out.len() / outer.max(1);
                        low_rank.add(out, rows, outer, index * block, 0, outer, Threads::One);
                    },
                );
            }
        }
        if let Some(bias) = self.bias {
            for_each_chunk(
                out,
                rows_per_task(outer) * outer,
                #[inline(always)]
                |_, out| {
                    for out in out.chunks_mut(outer.max(1)) {
                        add(out, bias);
                    }
                },
            );
        }
    }

    fn run_tiled<T: Element<Acc = A>>(&self, out: &mut [T]) {
        let (inner, outer) = (self.inner, self.outer);
        let few_rows = self.rows <= FEW_ROWS && self.orientation == Orientation::OutputMajor;
        let parallel = self.rows * inner * outer > PARALLEL_MULTIPLICATIONS;
        let out = Disjoint::new(out);
        let mut x_scratch = Vec::new();
        for first_row in (0..self.rows).step_by(ROW_BLOCK) {
            let rows = ROW_BLOCK.min(self.rows - first_row);
            let x = self.x.block(first_row * inner..(first_row + rows) * inner, &mut x_scratch);
            for_each_index(
                outer.div_ceil(TILE),
                parallel,
                #[inline(always)]
                |tile| {
                    let first_column = tile * TILE;
                    let columns = TILE.min(outer - first_column);
                    let mut result = vec![A::ZERO; rows * columns];
                    if few_rows {
                        let mut scratch = Vec::new();
                        for column in 0..columns {
                            let start = (first_column + column) * inner;
                            for row in 0..rows {
                                let x = &x[row * inner..][..inner];
                                result[row * columns + column] =
                                    self.weight.dot(start, x, &mut scratch);
                            }
                        }
                    } else {
                        self.multiply_tile(x, rows, first_column, columns, &mut result);
                    }
                    if let Some(low_rank) = &self.low_rank {
                        let threads = Threads::One;
                        low_rank.add(
                            &mut result,
                            rows,
                            columns,
                            first_row,
                            first_column,
                            outer,
                            threads,
                        );
                    }
                    for row in 0..rows {
                        let result = &mut result[row * columns..][..columns];
                        if let Some(bias) = self.bias {
                            add(result, &bias[first_column..][..columns]);
                        }
                        let start = (first_row + row) * outer + first_column;
                        // SAFETY: every task writes its own columns of each row.
                        T::narrow(result, unsafe { out.slice(start..start + columns) });
                    }
                },
            );
        }
    }

    fn multiply_tile(
        &self,
        x: &[A],
        rows: usize,
        first_column: usize,
        columns: usize,
        result: &mut [A],
    ) {
        let (inner, outer) = (self.inner, self.outer);
        let output_major = self.orientation == Orientation::OutputMajor;
        if let Values::Native(weight) = self.weight {
            let (start, stride) =
                if output_major { (first_column * inner, inner) } else { (first_column, outer) };
            // With no inner dimension the weight is empty, and there is nothing to start at.
            let weight = weight.get(start..).unwrap_or_default();
            let right = self.right(weight, inner, columns, stride);
            let x = Matrix::new(x, rows, inner, inner);
            let target = MatrixMut::new(result, rows, columns, columns);
            multiply(target, false, x, right, A::ONE, Threads::One);
            return;
        }
        let mut scratch = vec![A::ZERO; INNER_BLOCK.min(inner) * columns];
        for first in (0..inner).step_by(INNER_BLOCK) {
            let depth = INNER_BLOCK.min(inner - first);
            let scratch = &mut scratch[..depth * columns];
            let stride = if output_major { depth } else { columns };
            for (line, target) in scratch.chunks_exact_mut(stride).enumerate() {
                let start = if output_major {
                    (first_column + line) * inner + first
                } else {
                    (first + line) * outer + first_column
                };
                self.weight.read(start, target);
            }
            let right = self.right(scratch, depth, columns, stride);
            let x = Matrix::new(&x[first..], rows, depth, inner);
            let target = MatrixMut::new(&mut *result, rows, columns, columns);
            multiply(target, true, x, right, A::ONE, Threads::One);
        }
    }
}

fn add<A: Real>(out: &mut [A], addend: &[A]) {
    for (out, addend) in out.iter_mut().zip(addend) {
        *out += *addend;
    }
}

/// `out += scale·leftᵀ·right` with `left` `(rows, a)`, `right` `(rows, b)` and `out` `(a, b)`:
/// the gradient of a weight. Rows are added in blocks of a fixed size.
pub(crate) fn outer_products<A: Real>(
    rows: usize,
    a: usize,
    b: usize,
    left: Values<A>,
    right: Values<A>,
    scale: f64,
    out: &mut [A],
) {
    let scale = A::from_f64(scale);
    let native = matches!((left, right), (Values::Native(_), Values::Native(_)));
    let block = if native { rows.max(1) } else { ROW_BLOCK };
    let (mut left_scratch, mut right_scratch) = (Vec::new(), Vec::new());
    for first in (0..rows).step_by(block) {
        let rows = block.min(rows - first);
        let left = left.block(first * a..(first + rows) * a, &mut left_scratch);
        let right = right.block(first * b..(first + rows) * b, &mut right_scratch);
        multiply(
            MatrixMut::new(out, a, b, b),
            true,
            Matrix::new(left, rows, a, a).transpose(),
            Matrix::new(right, rows, b, b),
            scale,
            Threads::All,
        );
    }
}

/// `out = scale·x·right` for a narrow `right` `(inner, columns)` given whole, or `(columns, inner)`
/// when `transposed`: the products with the matrices of a LoRA adapter. `x` is `(rows, inner)`.
#[allow(clippy::too_many_arguments)]
pub(crate) fn narrow_product<A: Real>(
    rows: usize,
    inner: usize,
    columns: usize,
    x: Values<A>,
    right: &[A],
    transposed: bool,
    scale: A,
    mask: Option<&Mask<A>>,
    out: &mut [A],
) {
    let right = if transposed {
        Matrix::new(right, columns, inner, inner).transpose()
    } else {
        Matrix::new(right, inner, columns, columns)
    };
    if let (Values::Native(x), None) = (x, mask) {
        let x = Matrix::new(x, rows, inner, inner);
        multiply(MatrixMut::new(out, rows, columns, columns), false, x, right, scale, Threads::All);
        return;
    }
    // Enough rows for `gemm` to be worth its call, few enough for all threads to have some.
    let block = rows_per_task(inner).clamp(16, ROW_BLOCK);
    for_each_chunk(
        out,
        block * columns,
        #[inline(always)]
        |index, out| {
            let rows = out.len() / columns.max(1);
            let first = index * block;
            let mut scratch = vec![A::ZERO; rows * inner];
            x.read(first * inner, &mut scratch);
            if let Some(mask) = mask {
                mask(first * inner, &mut scratch);
            }
            let x = Matrix::new(&scratch, rows, inner, inner);
            multiply(
                MatrixMut::new(out, rows, columns, columns),
                false,
                x,
                right,
                scale,
                Threads::One,
            );
        },
    );
}
