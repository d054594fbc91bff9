//! Products of matrices inside slices, with explicit strides.

use super::element::Real;

/// A matrix inside a slice, with strides in elements.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, A> {
    data: &'a [A],
    rows: usize,
    columns: usize,
    row_stride: usize,
    column_stride: usize,
}

impl<'a, A> Matrix<'a, A> {
    /// Rows that start `row_stride` apart, their elements next to each other.
    pub(crate) fn new(data: &'a [A], rows: usize, columns: usize, row_stride: usize) -> Self {
        check_bounds(data.len(), rows, columns, row_stride);
        Matrix { data, rows, columns, row_stride, column_stride: 1 }
    }

    pub(crate) fn transpose(self) -> Self {
        Matrix {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }
}

/// A matrix inside a mutable slice.
pub(crate) struct MatrixMut<'a, A> {
    data: &'a mut [A],
    rows: usize,
    columns: usize,
    row_stride: usize,
}

impl<'a, A> MatrixMut<'a, A> {
    pub(crate) fn new(data: &'a mut [A], rows: usize, columns: usize, row_stride: usize) -> Self {
        check_bounds(data.len(), rows, columns, row_stride);
        MatrixMut { data, rows, columns, row_stride }
    }
}

fn check_bounds(len: usize, rows: usize, columns: usize, row_stride: usize) {
    assert!(
        rows == 0 || columns == 0 || (rows - 1) * row_stride + columns <= len,
        "a {rows} x {columns} matrix with row stride {row_stride} does not fit in {len} elements"
    );
}

/// Whether a product is computed by the calling thread or by all.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Threads {
    One,
    All,
}

/// `out = scale·lhs·rhs`, added to `out` when `accumulate`.
pub(crate) fn multiply<A: Real>(
    out: MatrixMut<A>,
    accumulate: bool,
    lhs: Matrix<A>,
    rhs: Matrix<A>,
    scale: A,
    threads: Threads,
) {
    assert!(
        lhs.rows == out.rows && rhs.columns == out.columns && lhs.columns == rhs.rows,
        "a {} x {} by {} x {} product does not give {} x {}",
        lhs.rows,
        lhs.columns,
        rhs.rows,
        rhs.columns,
        out.rows,
        out.columns
    );
    let parallelism = match threads {
        Threads::One => gemm::Parallelism::None,
        Threads::All => match rayon::current_num_threads() {
            1 => gemm::Parallelism::None,
            count => gemm::Parallelism::Rayon(count),
        },
    };
    // SAFETY: the constructors checked that every element lies inside its slice, the output is
    // borrowed mutably so it overlaps no input, and the sizes match.
    unsafe {
        gemm::gemm(
            out.rows,
            out.columns,
            lhs.columns,
            out.data.as_mut_ptr(),
            1,
            out.row_stride as isize,
            accumulate,
            lhs.data.as_ptr(),
            lhs.column_stride as isize,
            lhs.row_stride as isize,
            rhs.data.as_ptr(),
            rhs.column_stride as isize,
            rhs.row_stride as isize,
            A::ONE,
            scale,
            false,
            false,
            false,
            parallelism,
        );
    }
}
