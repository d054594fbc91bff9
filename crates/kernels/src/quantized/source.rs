//! What streaming kernels multiply, see source.cuh.

use crate::backend::cuda::{Array, Cuda, Matrix, Rows};
use crate::matmul::cuda::Undivided;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor};

/// What is multiplied, as kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Source {
    x: u64,
    residual: u64,
    weight: u64,
    sum: u64,
    x_stride: i64,
    residual_stride: i64,
    is_f16: i32,
    eps: f32,
    offset: f32,
    unused: i32,
}

// SAFETY: it is plain numbers, laid out as the kernels declare them.
unsafe impl DeviceRepr for Source {}

/// The longest row that is normed on the way.
const MOST_NORMED: usize = 8192;

impl Source {
    /// The rows of `x` themselves.
    pub(super) fn plain(x: Matrix) -> Self {
        let is_f16 = i32::from(x.dtype == DType::F16);
        Self { x: x.pointer, x_stride: x.stride as i64, is_f16, ..Self::default() }
    }

    /// What the norm that is multiplied is made of beside x, if it is one.
    pub(super) fn normed(&self) -> Option<Undivided> {
        let Self { residual, residual_stride, weight, offset, .. } = *self;
        (residual != 0).then_some(Undivided { residual, residual_stride, weight, offset })
    }
}

/// The RMS norm of `x + residual` `(.., inner)`, with a weight `(inner)`: products may make it, so that no kernel before
/// them has to, and they bring weights meanwhile.
#[derive(Clone, Copy)]
pub(crate) struct Normed<'a> {
    pub(crate) x: &'a Tensor,
    pub(crate) residual: &'a Tensor,
    pub(crate) weight: &'a Tensor,
    pub(crate) eps: f64,
    pub(crate) weight_offset: f64,
}

/// The same ready for launches, with what it points into.
pub(super) struct NormedRows {
    /// Of the shape and dtype of the norm.
    pub(super) shaped: Tensor,
    pub(super) x: Matrix,
    pub(super) sum: Array,
    source: Source,
    _rows: [Rows; 2],
    _weight: Array,
}

impl NormedRows {
    /// Of rows in f16 or bf16 that aren't too long and begin at 16 bytes.
    pub(super) fn new(cuda: &Cuda, normed: Normed) -> Result<Option<Self>> {
        let Normed { x, residual, weight, eps, weight_offset } = normed;
        let dtype = x.dtype();
        let is_short = x.dims().last().is_some_and(|inner| *inner <= MOST_NORMED);
        if !matches!(dtype, DType::BF16 | DType::F16) || weight.dtype() != dtype || !is_short {
            return Ok(None);
        }
        let rows = [cuda.rows(x)?, cuda.rows(residual)?];
        let weight = cuda.contiguous(weight)?;
        if !rows.iter().all(|rows| rows.matrix.has_aligned_rows())
            || !weight.pointer.is_multiple_of(16)
        {
            return Ok(None);
        }
        let [x_rows, residual] = rows.each_ref().map(|rows| rows.matrix);
        let sum = cuda.empty(x.shape(), dtype)?;
        let source = Source {
            residual: residual.pointer,
            residual_stride: residual.stride as i64,
            weight: weight.pointer,
            sum: sum.pointer,
            eps: eps as f32,
            offset: weight_offset as f32,
            ..Source::plain(x_rows)
        };
        let shaped = x.clone();
        Ok(Some(Self { shaped, x: x_rows, sum, source, _rows: rows, _weight: weight }))
    }

    /// What a launch is given. The first one stores the sum.
    pub(super) fn for_launch(&mut self) -> Source {
        let next = self.source;
        self.source.sum = 0;
        next
    }
}
