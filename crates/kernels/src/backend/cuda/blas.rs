//! Matrix products on the GPU, by cuBLAS, for row-major matrices.
//!
//! Sums are in f32 whatever the elements are, also where cuBLAS splits them, and f32 is multiplied as
//! f32. One stream and one handle a device make the same products the same bits; work that is recorded has
//! a handle of its own.

use super::{Array, Cuda, recording};
use crate::backend::cpu::collapsed_rows;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::cublas::{result, sys};
use candle_core::cuda_backend::cudarc::driver::sys::cuMemsetD2D8Async;
use candle_core::{DType, Result, Tensor, bail};
use std::ffi::c_void;

/// Where a row-major matrix lies.
#[derive(Clone, Copy)]
pub(crate) struct Matrix {
    /// The address of the first element.
    pub(crate) pointer: u64,
    pub(crate) dtype: DType,
    /// Elements between the starts of two rows.
    pub(crate) stride: usize,
    transposed: bool,
}

impl Matrix {
    pub(crate) fn new(pointer: u64, dtype: DType, stride: usize) -> Self {
        Matrix { pointer, dtype, stride, transposed: false }
    }

    /// The whole of a contiguous tensor, in rows of `columns`.
    pub(crate) fn of(array: &Array, columns: usize) -> Self {
        Matrix::new(array.pointer, array.dtype, columns)
    }

    /// The same matrix, to be read as its transpose.
    pub(crate) fn t(self) -> Self {
        Matrix { transposed: !self.transposed, ..self }
    }

    /// The part from column `column` on.
    pub(crate) fn at_column(self, column: usize) -> Self {
        self.skip(if self.transposed { column * self.stride } else { column })
    }

    /// The part from row `row` on.
    pub(crate) fn at_row(self, row: usize) -> Self {
        self.skip(if self.transposed { row } else { row * self.stride })
    }

    /// Elements from one row to the next, and from one column to the next.
    pub(crate) fn distances(self) -> (usize, usize) {
        if self.transposed { (1, self.stride) } else { (self.stride, 1) }
    }

    /// Whether it is read as the transpose of how it lies.
    pub(crate) fn is_transposed(self) -> bool {
        self.transposed
    }

    /// Whether its rows lie as they are, and begin at 16 bytes.
    pub(crate) fn has_aligned_rows(self) -> bool {
        let row = self.stride * self.dtype.size_in_bytes();
        !self.transposed && self.pointer.is_multiple_of(16) && row.is_multiple_of(16)
    }

    fn skip(self, elements: usize) -> Self {
        let bytes = elements * self.dtype.size_in_bytes();
        Matrix { pointer: self.pointer + bytes as u64, ..self }
    }
}

/// A tensor as a matrix of the rows of its last dimension, kept alive.
pub(crate) struct Rows {
    pub(crate) matrix: Matrix,
    /// What the matrix points into.
    _tensor: Tensor,
}

impl Cuda<'_> {
    /// The rows of `tensor` `(.., columns)`, copied only when they don't lie at one distance from each
    /// other.
    pub(crate) fn rows(&self, tensor: &Tensor) -> Result<Rows> {
        let (array, stride) = match collapsed_rows(tensor.layout()) {
            Some((_, columns, stride)) if stride >= columns => (self.strided(tensor)?, stride),
            _ => (self.contiguous(tensor)?, tensor.dims().last().copied().unwrap_or(1)),
        };
        let matrix = Matrix::new(array.pointer, array.dtype, stride);
        Ok(Rows { matrix, _tensor: array.tensor })
    }

    /// Like [`Cuda::rows`], converted to `dtype` if need be.
    pub(crate) fn rows_as(&self, tensor: &Tensor, dtype: DType) -> Result<Rows> {
        if tensor.dtype() == dtype {
            return self.rows(tensor);
        }
        self.rows(&self.contiguous_as(tensor, dtype)?.tensor)
    }

    /// `c = alpha·a·b + beta·c`: `a` `(m, k)`, `b` `(k, n)` of one dtype, `c` `(m, n)` of theirs or f32.
    /// Without `beta`, `c` need not hold numbers yet.
    pub(crate) fn gemm(
        &self,
        [m, n, k]: [usize; 3],
        alpha: f64,
        (a, b): (Matrix, Matrix),
        beta: f64,
        c: Matrix,
    ) -> Result<()> {
        if m == 0 || n == 0 {
            return Ok(());
        }
        if k == 0 {
            return if beta == 0.0 { self.clear_matrix(m, n, c) } else { Ok(()) };
        }
        let fits = a.dtype == b.dtype && (c.dtype == a.dtype || c.dtype == DType::F32);
        let types = (element_type(a.dtype), element_type(c.dtype));
        let (true, false, (Some(input), Some(output))) = (fits, c.transposed, types) else {
            bail!(
                "metal-candle-kernels: no product of {:?} with {:?} to {:?} on CUDA",
                a.dtype,
                b.dtype,
                c.dtype
            )
        };
        let size = |size: usize| match i32::try_from(size) {
            Ok(size) => Ok(size),
            Err(_) => bail!(
                "metal-candle-kernels: a matrix product ({m}, {k}) x ({k}, {n}) on CUDA has rows {size} elements apart, expected less than 2^31"
            ),
        };
        // The distance means nothing where there is one row, and cuBLAS wants it to be no less than a
        // row.
        let leading = |matrix: Matrix, rows: usize, columns: usize| {
            let (rows, columns) = if matrix.transposed { (columns, rows) } else { (rows, columns) };
            size(if rows <= 1 { columns } else { matrix.stride.max(columns) })
        };
        let operation = |matrix: Matrix| {
            if matrix.transposed {
                sys::cublasOperation_t::CUBLAS_OP_T
            } else {
                sys::cublasOperation_t::CUBLAS_OP_N
            }
        };
        let (rows, columns, inner) = (size(m)?, size(n)?, size(k)?);
        let (lda, ldb, ldc) = (leading(a, m, k)?, leading(b, k, n)?, leading(c, m, n)?);
        let (alpha, beta) = (alpha as f32, beta as f32);
        let blas = self.device.cublas_handle();
        let handle = recording::product_handle(self)?.unwrap_or(*blas.handle());
        self.stream.context().bind_to_thread().w()?;
        // SAFETY: the handle lives as long as the device. Parts of a sum are to be added in f32, instead
        // of in the output's dtype.
        unsafe {
            sys::cublasSetMathMode(
                handle,
                sys::cublasMath_t::CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION,
            )
        }
        .result()
        .w()?;
        // cuBLAS sees the transpose of a row-major matrix, and cᵀ = bᵀ·aᵀ.
        // SAFETY: the pointers are to matrices of these sizes, as the caller made them.
        let done = unsafe {
            result::gemm_ex(
                handle,
                operation(b),
                operation(a),
                columns,
                rows,
                inner,
                (&raw const alpha).cast(),
                b.pointer as *const c_void,
                input,
                ldb,
                a.pointer as *const c_void,
                input,
                lda,
                (&raw const beta).cast(),
                c.pointer as *mut c_void,
                output,
                ldc,
                sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
                sys::cublasGemmAlgo_t::CUBLAS_GEMM_DEFAULT,
            )
        };
        match done {
            Ok(()) => Ok(()),
            Err(error) => bail!(
                "metal-candle-kernels: cuBLAS cannot multiply ({m}, {k}) x ({k}, {n}) of {:?} to {:?}: {error}",
                a.dtype,
                c.dtype
            ),
        }
    }

    /// Sets the elements of a matrix to zero.
    fn clear_matrix(&self, rows: usize, columns: usize, matrix: Matrix) -> Result<()> {
        let size = matrix.dtype.size_in_bytes();
        self.stream.context().bind_to_thread().w()?;
        // SAFETY: the pointer is to a matrix of this size, as the caller made it.
        unsafe {
            cuMemsetD2D8Async(
                matrix.pointer,
                matrix.stride.max(columns) * size,
                0,
                columns * size,
                rows,
                self.stream.cu_stream(),
            )
        }
        .result()
        .w()
    }
}

fn element_type(dtype: DType) -> Option<sys::cudaDataType> {
    match dtype {
        DType::F32 => Some(sys::cudaDataType::CUDA_R_32F),
        DType::BF16 => Some(sys::cudaDataType::CUDA_R_16BF),
        DType::F16 => Some(sys::cudaDataType::CUDA_R_16F),
        _ => None,
    }
}

/// An error unless all tensors have a dtype that the kernels compute with.
pub(crate) fn require_floats(operation: &str, tensors: &[&Tensor]) -> Result<()> {
    for tensor in tensors {
        if element_type(tensor.dtype()).is_none() {
            bail!(
                "metal-candle-kernels: {operation} on CUDA does not support {:?} tensors, expected F32, BF16 or F16",
                tensor.dtype()
            )
        }
    }
    Ok(())
}
