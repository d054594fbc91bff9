//! The frozen matrix of a linear layer, dense or in fewer bits.

use super::Quantized;
use super::cpu::{Inputs, Reads};
use crate::backend::cpu::{Input, Read, Real, Values};
use crate::backend::{require_rank, require_together};
use crate::devices::computes_on_gpu;
use candle_core::{DType, Result, Tensor, bail};
use metal_candle_cpu::quantized::View;
use std::borrow::Cow;

/// A frozen matrix `(out, in)` of a linear layer.
#[derive(Clone, Copy, Debug)]
pub enum Weight<'a> {
    /// f32, bf16, f16, or f64 where `x` is.
    Dense(&'a Tensor),
    /// In fewer bits.
    Quantized(&'a Quantized),
}

impl<'a> From<&'a Tensor> for Weight<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Dense(tensor)
    }
}

impl<'a> From<&'a Quantized> for Weight<'a> {
    fn from(quantized: &'a Quantized) -> Self {
        Self::Quantized(quantized)
    }
}

impl<'a> Weight<'a> {
    /// `(out, in)`
    ///
    /// # Errors
    /// When it isn't a matrix.
    pub fn shape(self) -> Result<(usize, usize)> {
        match self {
            Self::Dense(tensor) => tensor.dims2(),
            Self::Quantized(quantized) => Ok(quantized.shape()),
        }
    }

    /// The numbers: as they are, or in `dtype` where they are in fewer bits.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn to_dense(self, dtype: DType) -> Result<Cow<'a, Tensor>> {
        match self {
            Self::Dense(tensor) => Ok(Cow::Borrowed(tensor)),
            Self::Quantized(quantized) => Ok(Cow::Owned(quantized.dequantize(dtype)?)),
        }
    }

    /// [`Self::to_dense`] of several, up to four on CUDA in one launch.
    ///
    /// # Errors
    /// Like [`Self::to_dense`].
    #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
    pub(crate) fn all_to_dense(
        weights: impl Iterator<Item = Weight<'a>>,
        dtype: DType,
    ) -> Result<Vec<Cow<'a, Tensor>>> {
        #[cfg(feature = "cuda")]
        {
            let on_cuda = |weight: &Weight<'a>| match weight {
                Self::Quantized(packed) if packed.device().is_cuda() => Some(*packed),
                _ => None,
            };
            let weights: Vec<_> = weights.collect();
            let packed: Vec<_> = weights.iter().filter_map(on_cuda).collect();
            let mut unpacked = super::cuda::dequantize_all(&packed, dtype)?.into_iter();
            let dense = weights.into_iter().map(|weight| {
                match on_cuda(&weight).and_then(|_| unpacked.next()) {
                    Some(dense) => Ok(Cow::Owned(dense)),
                    None => weight.to_dense(dtype),
                }
            });
            dense.collect()
        }
        #[cfg(not(feature = "cuda"))]
        weights.map(|weight| weight.to_dense(dtype)).collect()
    }

    /// Whether rows that are multiplied by it are rounded to e4m3.
    pub(crate) fn rounds_rows(self) -> bool {
        matches!(self, Self::Quantized(weight) if weight.fp8_scales().is_some())
    }

    /// An error unless it is a matrix and where `x` is.
    pub(crate) fn require_beside(self, operation: &str, x: &Tensor) -> Result<()> {
        match self {
            Self::Dense(tensor) => {
                require_together(operation, &[x, tensor])?;
                require_rank(operation, "weight", tensor, 2, "(out, in)")
            }
            Self::Quantized(quantized) => {
                require_together(operation, &[x, quantized.codes()])?;
                if computes_on_gpu(x) && quantized.multiplies_integers() {
                    bail!(
                        "metal-candle-kernels: {operation}: rows are to be rounded to integers of 8 bits (Arithmetic::Int8Rows) on a GPU, expected them on the CPU"
                    )
                }
                Ok(())
            }
        }
    }

    pub(crate) fn input(self) -> Result<WeightInput<'a>> {
        Ok(match self {
            Self::Dense(tensor) => WeightInput::Dense(Input::contiguous(tensor)?),
            Self::Quantized(quantized) => WeightInput::Quantized(Inputs::new(quantized)?),
        })
    }
}

/// A weight on the CPU, made ready to be read.
pub(crate) enum WeightInput<'a> {
    Dense(Input),
    Quantized(Inputs<'a>),
}

impl WeightInput<'_> {
    pub(crate) fn read(&self) -> WeightRead<'_> {
        match self {
            Self::Dense(input) => WeightRead::Dense(input.read()),
            Self::Quantized(inputs) => WeightRead::Quantized(inputs.read()),
        }
    }
}

/// A weight on the CPU, locked for reading.
pub(crate) enum WeightRead<'a> {
    Dense(Read<'a>),
    Quantized(Reads<'a>),
}

impl WeightRead<'_> {
    pub(crate) fn numbers<A: Real>(&self) -> Result<WeightNumbers<'_, A>> {
        Ok(match self {
            Self::Dense(read) => WeightNumbers::Dense(read.values()?),
            Self::Quantized(reads) => WeightNumbers::Quantized(reads.view()?),
        })
    }
}

/// The numbers of a weight, whatever they are stored as.
pub(crate) enum WeightNumbers<'a, A> {
    Dense(Values<'a, A>),
    Quantized(View<'a>),
}

impl<'a, A: Real> WeightNumbers<'a, A> {
    pub(crate) fn values(&'a self) -> Values<'a, A> {
        match self {
            Self::Dense(values) => *values,
            Self::Quantized(view) => Values::Quantized(view.elements()),
        }
    }
}
