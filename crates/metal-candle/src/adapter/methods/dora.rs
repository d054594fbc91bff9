//! DoRA: the length of each row of the merged weight is trained apart from its direction (Liu et al., 2024,
//! arXiv:2402.09353): `m ⊙ (x·Vᵀ) / ‖V‖ + bias` with `V = W + scale · (A·B)ᵀ`.
//!
//! The norms are constants in the backward pass (section 4.3 of the paper). Dropout is of the low-rank path's
//! input alone, as in mlx-lm; PEFT drops inputs of the frozen product too.

use crate::Result;
use crate::autograd::Parameter;
use candle_core::Tensor;
use metal_candle_kernels::dora;
use std::sync::{Mutex, PoisonError};

/// The trained lengths of one layer's rows.
#[derive(Debug)]
pub(crate) struct Magnitude {
    /// m `(out)`
    pub parameter: Parameter,
    /// `‖W_o‖²` of the frozen weight, `(out)`.
    base_squares: Tensor,
    found: Mutex<Option<(u64, Lengths)>>,
}

/// What the rows' lengths are.
#[derive(Debug, Clone)]
pub(crate) struct Lengths {
    /// `‖V_o‖`, `(out)` in f32.
    pub norms: Tensor,
    /// `m / ‖V‖`, `(out)` in f32.
    pub factor: Tensor,
}

impl Magnitude {
    /// Of a layer with this frozen weight `(out, in)`.
    pub fn new(parameter: Parameter, weight: &Tensor) -> Result<Self> {
        let base_squares = dora::squared_norms(weight)?;
        Ok(Self { parameter, base_squares, found: Mutex::default() })
    }

    /// `‖W + scale · (A·B)ᵀ‖` of each row, `(out)` in f32.
    pub fn norms(&self, weight: &Tensor, a: &Tensor, b: &Tensor, scale: f64) -> Result<Tensor> {
        Ok(dora::merged_norms(weight, &self.base_squares, a, b, scale)?)
    }

    /// The lengths, which `compute` finds the norms for once for every `generation` of the parameters.
    pub fn lengths(
        &self,
        generation: u64,
        compute: impl FnOnce() -> Result<Tensor>,
    ) -> Result<Lengths> {
        let mut found = self.found.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((of, lengths)) = found.as_ref()
            && *of == generation
        {
            return Ok(lengths.clone());
        }
        let norms = compute()?;
        let factor = (self.parameter.tensor() / &norms)?;
        let lengths = Lengths { norms, factor };
        *found = Some((generation, lengths.clone()));
        Ok(lengths)
    }
}
