//! RMS norm (Zhang and Sennrich 2019, <https://arxiv.org/abs/1910.07467>) over the last dimension.
//!
//! ```text
//! r  = 1 / √(mean(x²) + eps)         u = offset + w
//! y  = x·r·u
//! dx = r·(dy·u) - x·r³·mean(dy·u·x)
//! dw = Σ_rows dy·x·r
//! ```
//!
//! The offset is 0 for Llama and its kin, and 1 for Gemma, which stores `w - 1`.

mod cpu;
#[cfg(test)]
mod tests;

use crate::device::cpu::{Input, Sum, contiguous_slice, contiguous_values, dispatch, zeros};
use crate::device::{require_cpu, require_dtype, require_shape, rows_and_columns};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp2, Device, Layout, Result, Shape, Tensor, WithDType};

const OPERATION: &str = "rms_norm";

/// `x / rms(x) · (weight_offset + weight)`: `x` `(.., hidden)`, `weight` `(hidden)`, result like `x`.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, or a tensor isn't on the CPU.
pub fn forward(x: &Tensor, weight: &Tensor, eps: f64, weight_offset: f64) -> Result<Tensor> {
    check(x, weight)?;
    let operation = RmsNorm { eps, weight_offset };
    x.detach().contiguous()?.apply_op2_no_bwd(&weight.detach().contiguous()?, &operation)
}

/// Like [`forward`], recorded in Candle's autograd.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(x: &Tensor, weight: &Tensor, eps: f64, weight_offset: f64) -> Result<Tensor> {
    check(x, weight)?;
    x.contiguous()?.apply_op2(&weight.contiguous()?, RmsNorm { eps, weight_offset })
}

/// `(dx, dweight)`: `x` and `dy` `(.., hidden)`, `weight` `(hidden)`; `dx` in the dtype of `x`,
/// `dweight` `(hidden)` in f32 (f64 for f64). What isn't needed isn't computed.
///
/// # Errors
/// When shapes or dtypes don't fit, or a tensor isn't on the CPU.
pub fn backward(
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    weight_offset: f64,
    dy: &Tensor,
    need_dx: bool,
    need_dweight: bool,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let (rows, hidden) = check(x, weight)?;
    require_cpu(OPERATION, &[dy])?;
    require_shape(OPERATION, "dy", dy, x.dims())?;
    require_dtype(OPERATION, "dy", dy, x.dtype())?;
    let shape = x.dims();
    let (x, weight, dy) =
        (Input::contiguous(x)?, Input::contiguous(weight)?, Input::contiguous(dy)?);
    let (x, weight, dy) = (x.read(), weight.read(), dy.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let (x, dy) = (x.values::<Sum<T>>()?, dy.values()?);
        let inverse_rms = cpu::inverse_rms(rows, hidden, x, eps);
        let dx = if need_dx {
            let scale = cpu::scale(weight.values()?, weight_offset);
            let mut dx = zeros::<T>(rows * hidden);
            cpu::backward_input(hidden, x, &scale, &inverse_rms, dy, &mut dx);
            Some(Tensor::from_vec(dx, shape, &Device::Cpu)?)
        } else {
            None
        };
        let dweight = if need_dweight {
            let mut dweight = zeros::<Sum<T>>(hidden);
            cpu::backward_weight(rows, hidden, x, &inverse_rms, dy, &mut dweight);
            Some(Tensor::from_vec(dweight, hidden, &Device::Cpu)?)
        } else {
            None
        };
        Ok((dx, dweight))
    })
}

fn check(x: &Tensor, weight: &Tensor) -> Result<(usize, usize)> {
    require_cpu(OPERATION, &[x, weight])?;
    let (rows, hidden) = rows_and_columns(OPERATION, "x", x)?;
    require_shape(OPERATION, "weight", weight, &[hidden])?;
    Ok((rows, hidden))
}

/// The operation for Candle's `apply_op2(x, weight)`, on contiguous tensors; [`differentiable`]
/// checks and prepares its inputs.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    /// Added to the mean of squares.
    pub eps: f64,
    /// Added to the weight: 1 for Gemma, else 0.
    pub weight_offset: f64,
}

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let shape = x_layout.shape();
        let hidden = weight_layout.shape().elem_count();
        if shape.dims().last() != Some(&hidden) {
            candle_core::bail!(
                "metal-candle-kernels: {OPERATION}: x has shape {shape:?}, expected a last dimension of {hidden} to fit the weight"
            )
        }
        dispatch!(OPERATION, x.dtype(), T => {
            let x = contiguous_slice::<T>(x, x_layout)?;
            let weight = contiguous_values(weight, weight_layout)?;
            let mut y = zeros::<T>(x.len());
            cpu::forward(hidden, x, &cpu::scale(weight, self.weight_offset), self.eps, &mut y);
            Ok((T::to_cpu_storage_owned(y), shape.clone()))
        })
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let (need_dx, need_dweight) = (x.track_op(), weight.track_op());
        let (dx, dweight) =
            backward(x, weight, self.eps, self.weight_offset, dy, need_dx, need_dweight)?;
        let dweight = dweight.map(|dweight| dweight.to_dtype(weight.dtype())).transpose()?;
        Ok((dx, dweight))
    }
}
