//! Rotary position embedding (Su et al. 2021, <https://arxiv.org/abs/2104.09864>), with the halves
//! paired as Llama's checkpoints on the hub expect: element `i` goes with `i + rot/2`.
//!
//! ```text
//! y[i]         = x[i]·cos[i] - x[i + rot/2]·sin[i]
//! y[i + rot/2] = x[i + rot/2]·cos[i] + x[i]·sin[i]        0 <= i < rot/2
//! y[j]         = x[j]                                     j >= rot
//! ```
//!
//! The gradient is turned back: the same with `-sin`.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::device::cpu::{Input, buffer, dispatch};
use crate::device::{record1, require_rank, require_shape, require_together};
use candle_core::{Device, Result, Tensor, bail};

const OPERATION: &str = "rope";

/// Turns `x` `(batch, seq, heads, head_dim)` by the angles whose cosines and sines are `cos` and `sin`
/// `(batch, seq, rot / 2)`, f32 (or f64 for f64); `rot <= head_dim`, the rest passes through. The
/// result is like `x`.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, or the tensors aren't on one device.
pub fn forward(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate(x, cos, sin, false)
}

/// The gradient of [`forward`]'s `x`, from `dy` of its shape.
///
/// # Errors
/// Like [`forward`].
pub fn backward(dy: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate(dy, cos, sin, true)
}

/// Like [`forward`], recorded in Candle's autograd. `cos` and `sin` are constants.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let y = forward(x, cos, sin)?;
    let (cos, sin) = (cos.detach(), sin.detach());
    record1(OPERATION, x, y, move |_, _, dy| Ok(Some(backward(dy, &cos, &sin)?)))
}

/// `inverse` turns the other way.
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor, inverse: bool) -> Result<Tensor> {
    require_together(OPERATION, &[x, cos, sin])?;
    require_rank(OPERATION, "x", x, 4, "(batch, seq, heads, head_dim)")?;
    require_rank(OPERATION, "cos", cos, 3, "(batch, seq, rot / 2)")?;
    let (batch, seq, heads, head_dim) = x.dims4()?;
    let half = cos.dim(2)?;
    require_shape(OPERATION, "cos", cos, &[batch, seq, half])?;
    require_shape(OPERATION, "sin", sin, &[batch, seq, half])?;
    if 2 * half > head_dim {
        bail!(
            "metal-candle-kernels: {OPERATION}: cos has {half} angles, expected at most {} for a head_dim of {head_dim}",
            head_dim / 2
        )
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::rotate(x, cos, sin, inverse);
    }
    #[cfg(any(feature = "metal", test))]
    if crate::device::metal::computes(x) {
        return metal::rotate(x, cos, sin, inverse);
    }
    let (shape, count) = (x.dims(), x.elem_count());
    let (x, cos, sin) = (Input::contiguous(x)?, Input::contiguous(cos)?, Input::contiguous(sin)?);
    let (x, cos, sin) = (x.read(), cos.read(), sin.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let mut y = buffer::<T>(count);
        let sizes = cpu::Sizes { heads, head_dim, half };
        cpu::rotate(sizes, x.slice::<T>()?, cos.values()?, sin.values()?, inverse, &mut y);
        Tensor::from_vec(y, shape, &Device::Cpu)
    })
}
