//! The linear layer on the CPU: `gemm` for many rows, dot products for one. Half-precision weights
//! are widened a tile of rows at a time.

use crate::device::cpu::{
    Accumulator, Element, dot_mixed, down_into, for_each_row, read, sum_rows, tensor, up,
};
use candle_core::{Result, Tensor};

/// Rows of a half-precision weight that are widened at a time.
const TILE: usize = 128;

/// A matrix in memory that `gemm` reads.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a, A> {
    pub data: &'a [A],
    pub rows: usize,
    pub columns: usize,
    pub row_stride: usize,
    pub column_stride: usize,
}

impl<'a, A> Matrix<'a, A> {
    pub fn new(data: &'a [A], rows: usize, columns: usize) -> Self {
        Self { data, rows, columns, row_stride: columns, column_stride: 1 }
    }

    pub fn t(self) -> Self {
        Self {
            data: self.data,
            rows: self.columns,
            columns: self.rows,
            row_stride: self.column_stride,
            column_stride: self.row_stride,
        }
    }

    fn fits(&self) -> bool {
        self.rows == 0
            || self.columns == 0
            || (self.rows - 1) * self.row_stride + (self.columns - 1) * self.column_stride
                < self.data.len()
    }
}

/// `out = alpha · left · right + (add ? out : 0)`; `out` is row-major with rows `row_stride` apart.
pub(crate) fn gemm<A: Accumulator>(
    out: &mut [A],
    row_stride: usize,
    left: Matrix<'_, A>,
    right: Matrix<'_, A>,
    alpha: A,
    add: bool,
) {
    let (m, n, k) = (left.rows, right.columns, left.columns);
    if m == 0 || n == 0 {
        return;
    }
    assert_eq!(k, right.rows, "gemm: inner dimensions differ");
    assert!(left.fits() && right.fits() && (m - 1) * row_stride + n <= out.len());
    let parallelism = if m * n * k < 1 << 16 || rayon::current_num_threads() == 1 {
        gemm::Parallelism::None
    } else {
        gemm::Parallelism::Rayon(rayon::current_num_threads())
    };
    // SAFETY: the assertions above keep every access inside the slices; `out` is borrowed
    // mutably, so it overlaps neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            row_stride as isize,
            add,
            left.data.as_ptr(),
            left.column_stride as isize,
            left.row_stride as isize,
            right.data.as_ptr(),
            right.column_stride as isize,
            right.row_stride as isize,
            if add { A::one() } else { A::zero() },
            alpha,
            false,
            false,
            false,
            parallelism,
        );
    }
}

/// The elements as accumulators: themselves if they are, else a widened copy in `buffer`.
pub(crate) fn widen<'a, T: Element>(
    elements: &'a [T],
    buffer: &'a mut Vec<T::Acc>,
) -> &'a [T::Acc] {
    match same(elements) {
        Some(elements) => elements,
        None => {
            *buffer = up(elements);
            buffer
        }
    }
}

/// The elements as accumulators where the two are the same type.
pub(crate) fn same<T: Element>(elements: &[T]) -> Option<&[T::Acc]> {
    (T::DTYPE == <T::Acc as candle_core::WithDType>::DTYPE).then(|| {
        // SAFETY: equal dtypes mean that `T` and `T::Acc` are the same type.
        unsafe { std::slice::from_raw_parts(elements.as_ptr().cast(), elements.len()) }
    })
}

pub(super) fn linear<T: Element>(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    rows: usize,
    shape: &[usize],
) -> Result<Tensor> {
    let (output, input) = weight.dims2()?;
    read!(x: T = x);
    read!(w: T = weight);
    let mut buffer = Vec::new();
    let x = widen(x, &mut buffer);
    let mut y = vec![<T::Acc as num_traits::Zero>::zero(); rows * output];
    if rows == 1 {
        for_each_row(&mut y, 1, |row, y| y[0] = dot_mixed(x, &w[row * input..(row + 1) * input]));
    } else {
        multiply_transposed(&mut y, x, rows, w, (output, input));
    }
    if let Some(bias) = bias {
        read!(bias: T = bias);
        for_each_row(&mut y, output, |_, y| {
            for (y, &bias) in y.iter_mut().zip(bias) {
                *y += bias.up();
            }
        });
    }
    finish::<T>(y, shape)
}

/// `y (rows, out) = x (rows, in) · w (out, in)ᵀ`
pub(crate) fn multiply_transposed<T: Element>(
    y: &mut [T::Acc],
    x: &[T::Acc],
    rows: usize,
    w: &[T],
    (output, input): (usize, usize),
) {
    let one = <T::Acc as num_traits::One>::one();
    let left = Matrix::new(x, rows, input);
    match same(w) {
        Some(w) => gemm(y, output, left, Matrix::new(w, output, input).t(), one, false),
        None => {
            for start in (0..output).step_by(TILE) {
                let count = TILE.min(output - start);
                let tile = widen_parallel(&w[start * input..(start + count) * input]);
                let right = Matrix::new(&tile, count, input).t();
                gemm(&mut y[start..], output, left, right, one, false);
            }
        }
    }
}

/// `dx (rows, in) = dy (rows, out) · w (out, in)`
pub(crate) fn multiply<T: Element>(
    dx: &mut [T::Acc],
    dy: &[T::Acc],
    rows: usize,
    w: &[T],
    (output, input): (usize, usize),
) {
    let one = <T::Acc as num_traits::One>::one();
    match same(w) {
        Some(w) => gemm(
            dx,
            input,
            Matrix::new(dy, rows, output),
            Matrix::new(w, output, input),
            one,
            false,
        ),
        None => {
            for start in (0..output).step_by(TILE) {
                let count = TILE.min(output - start);
                let tile = widen_parallel(&w[start * input..(start + count) * input]);
                let left = Matrix {
                    data: &dy[start..],
                    rows,
                    columns: count,
                    row_stride: output,
                    column_stride: 1,
                };
                gemm(dx, input, left, Matrix::new(&tile, count, input), one, start > 0);
            }
        }
    }
}

fn widen_parallel<T: Element>(elements: &[T]) -> Vec<T::Acc> {
    let mut wide = vec![<T::Acc as num_traits::Zero>::zero(); elements.len()];
    const CHUNK: usize = 4096;
    for_each_row(&mut wide, CHUNK, |index, chunk| {
        for (wide, element) in chunk.iter_mut().zip(&elements[index * CHUNK..]) {
            *wide = element.up();
        }
    });
    wide
}

/// Accumulators as a tensor of elements.
pub(crate) fn finish<T: Element>(values: Vec<T::Acc>, shape: &[usize]) -> Result<Tensor> {
    if T::DTYPE == <T::Acc as candle_core::WithDType>::DTYPE {
        return tensor(values, shape);
    }
    const CHUNK: usize = 4096;
    let mut out = vec![T::down(<T::Acc as num_traits::Zero>::zero()); values.len()];
    for_each_row(&mut out, CHUNK, |index, chunk| down_into(chunk, &values[index * CHUNK..]));
    tensor(out, shape)
}

pub(super) fn backward_input<T: Element>(
    dy: &Tensor,
    weight: &Tensor,
    rows: usize,
    shape: &[usize],
) -> Result<Tensor> {
    let (output, input) = weight.dims2()?;
    read!(dy: T = dy);
    read!(w: T = weight);
    let mut buffer = Vec::new();
    let mut dx = vec![<T::Acc as num_traits::Zero>::zero(); rows * input];
    multiply(&mut dx, widen(dy, &mut buffer), rows, w, (output, input));
    finish::<T>(dx, shape)
}

pub(super) fn backward_weight<T: Element>(
    x: &Tensor,
    dy: &Tensor,
    rows: usize,
    input: usize,
    output: usize,
) -> Result<Tensor> {
    read!(x: T = x);
    read!(dy: T = dy);
    let (mut x_buffer, mut dy_buffer) = (Vec::new(), Vec::new());
    let (x, dy) = (widen(x, &mut x_buffer), widen(dy, &mut dy_buffer));
    let mut dw = vec![<T::Acc as num_traits::Zero>::zero(); output * input];
    let left = Matrix::new(dy, rows, output).t();
    gemm(
        &mut dw,
        input,
        left,
        Matrix::new(x, rows, input),
        <T::Acc as num_traits::One>::one(),
        false,
    );
    tensor(dw, &[output, input])
}

pub(super) fn backward_bias<T: Element>(dy: &Tensor, rows: usize, output: usize) -> Result<Tensor> {
    read!(dy: T = dy);
    let sums = sum_rows(rows, output, |row, sums: &mut [T::Acc]| {
        for (sum, dy) in sums.iter_mut().zip(&dy[row * output..]) {
            *sum += dy.up();
        }
    });
    tensor(sums, &[output])
}
