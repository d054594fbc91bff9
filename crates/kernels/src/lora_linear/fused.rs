//! Layers as one operation with the norm that they read, and the gated unit of two, where no backward pass follows.

use super::{Projection, forward_only};
#[cfg(feature = "cuda")]
use super::{check, cuda, fp8};
#[cfg(feature = "cuda")]
use crate::backend::rows_and_columns;
#[cfg(feature = "cuda")]
use crate::batch_invariance;
use crate::glu::{self, Activation};
#[cfg(feature = "cuda")]
use crate::quantized::cuda::{MOST_STREAMED, Normed};
use crate::rms_norm;
use candle_core::{Error, Result, Tensor};

#[cfg(test)]
mod tests;

/// An RMS norm, as [`rms_norm::forward_residual`] has it.
#[derive(Clone, Copy, Debug)]
pub struct Norm<'a> {
    /// `(in)`
    pub weight: &'a Tensor,
    /// What is added to the mean of the squares.
    pub eps: f64,
    /// What is added to the weight.
    pub weight_offset: f64,
}

/// `(sum, ys)`: `sum = x + residual` `(.., in)`, and what [`forward_only`] gives for its RMS norm. On Hopper, layers in
/// fewer bits of up to 4 rows of f16 or bf16 make the norm themselves, while they bring their weights; its sum of squares
/// is made in another order than [`rms_norm`]'s then, and the A of adapters is multiplied by a norm that isn't rounded.
///
/// # Errors
/// Like [`rms_norm::forward_residual`] and [`forward`](super::forward).
pub fn forward_normed(
    x: &Tensor,
    residual: &Tensor,
    norm: &Norm,
    projections: &[Projection],
) -> Result<(Tensor, Vec<Tensor>)> {
    #[cfg(feature = "cuda")]
    if let Some(found) = at_once([x, residual], norm, projections, None)? {
        return Ok(found);
    }
    let Norm { weight, eps, weight_offset } = *norm;
    let (sum, normed) = rms_norm::forward_residual(x, residual, weight, eps, weight_offset)?;
    Ok((sum, forward_only(&normed, projections)?))
}

/// `(sum, unit)`: [`forward_normed`] of two layers, and the gated unit `activation(gate)·up` of what they give. Where layers
/// make the norm themselves, two of one kind make the unit, too, and so do, on Hopper, dense ones without adapters of sizes
/// that are multiples of 8 for 5 to 128 rows of f16 or bf16, with the same bits.
///
/// # Errors
/// Like [`forward_normed`] and [`glu::forward`].
pub fn forward_normed_unit(
    x: &Tensor,
    residual: &Tensor,
    norm: &Norm,
    [gate, up]: [Projection; 2],
    activation: Activation,
) -> Result<(Tensor, Tensor)> {
    let projections = [gate, up];
    #[cfg(feature = "cuda")]
    if gate.weight.shape()?.0 == up.weight.shape()?.0
        && let Some((sum, units)) = at_once([x, residual], norm, &projections, Some(activation))?
    {
        let [unit] = <[Tensor; 1]>::try_from(units).map_err(|units| wrong_count(units.len()))?;
        return Ok((sum, unit));
    }
    #[cfg(feature = "cuda")]
    if let Some(found) = unit_of_dense([x, residual], norm, &projections, activation)? {
        return Ok(found);
    }
    let (sum, ys) = forward_normed(x, residual, norm, &projections)?;
    let [gate, up] = <[Tensor; 2]>::try_from(ys).map_err(|ys| wrong_count(ys.len()))?;
    Ok((sum, glu::forward(&gate, &up, activation)?))
}

fn wrong_count(found: usize) -> Error {
    Error::msg(format!("metal-candle-kernels: lora_linear: two projections gave {found} outputs"))
}

/// The sum and the unit where two dense layers make this.
#[cfg(feature = "cuda")]
fn unit_of_dense(
    [x, residual]: [&Tensor; 2],
    norm: &Norm,
    both: &[Projection; 2],
    activation: Activation,
) -> Result<Option<(Tensor, Tensor)>> {
    const OPERATION: &str = "lora_linear::forward_normed_unit";
    let Some(dense) = cuda::both_dense(both).filter(|_| x.device().is_cuda()) else {
        return Ok(None);
    };
    let Norm { weight, eps, weight_offset } = *norm;
    let sizes = rms_norm::check_residual(x, residual, weight)?;
    check(OPERATION, x, sizes.1, both)?;
    if !cuda::makes_unit(OPERATION, x, sizes, &dense)? {
        return Ok(None);
    }
    let (sum, normed) = rms_norm::forward_residual(x, residual, weight, eps, weight_offset)?;
    Ok(Some((sum, cuda::unit(OPERATION, &normed, sizes, &dense, activation)?)))
}

/// The sum and the outputs, or the unit, where layers make what they read.
#[cfg(feature = "cuda")]
fn at_once(
    [x, residual]: [&Tensor; 2],
    norm: &Norm,
    projections: &[Projection],
    gate: Option<Activation>,
) -> Result<Option<(Tensor, Vec<Tensor>)>> {
    const OPERATION: &str = "lora_linear::forward_normed";
    // With batch invariance bits may not depend on how many rows there are.
    if !x.device().is_cuda() || batch_invariance::is_on() || fp8::is_one_of(projections) {
        return Ok(None);
    }
    // Prompts and large batches are checked by what computes them.
    if rows_and_columns(OPERATION, "x", x)?.0 > MOST_STREAMED {
        return Ok(None);
    }
    let Norm { weight, eps, weight_offset } = *norm;
    let sizes = rms_norm::check_residual(x, residual, weight)?;
    check(OPERATION, x, sizes.1, projections)?;
    let normed = Normed { x, residual, weight, eps, weight_offset };
    cuda::of_normed(OPERATION, normed, sizes, projections, gate)
}
