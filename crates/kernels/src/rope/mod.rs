//! Rotary position embedding (Su et al. 2021, <https://arxiv.org/abs/2104.09864>), with the halves
//! paired as Llama's checkpoints on the hub expect: element `i` goes with `i + rot/2`.
//!
//! ```text
//! y[i]         = x[i]·cos[i] - x[i + rot/2]·sin[i]
//! y[i + rot/2] = x[i + rot/2]·cos[i] + x[i]·sin[i]        0 <= i < rot/2
//! y[j]         = x[j]                                     j >= rot
//! ```
//!
//! The gradient is rotated back: the same with `-sin`.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, dispatch, unwritten};
use crate::backend::{record1, require_rank, require_shape, require_together};
use candle_core::{Device, Result, Tensor, bail};

const OPERATION: &str = "rope";

/// Rotates `x` `(batch, seq, heads, head_dim)` by the angles whose cosines and sines are `cos` and `sin`
/// `(batch, seq, rot / 2)`, f32 (or f64 for f64); `rot <= head_dim`, the rest passes through. The
/// result is like `x`.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, or the tensors aren't on one device.
pub fn forward(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    rotate(x, cos, sin, false)
}

/// [`forward`] of queries and keys, `(batch, seq, heads, head_dim)` and `(batch, seq, kv_heads, head_dim)`,
/// which CUDA rotates at once.
///
/// # Errors
/// Like [`forward`].
pub fn forward_both(
    queries: &Tensor,
    keys: &Tensor,
    cos: &Tensor,
    sin: &Tensor,
) -> Result<(Tensor, Tensor)> {
    #[cfg(feature = "cuda")]
    if queries.device().is_cuda()
        && queries.dtype() == keys.dtype()
        && queries.dims().last() == keys.dims().last()
    {
        check(queries, cos, sin)?;
        check(keys, cos, sin)?;
        let mut rotated = cuda::rotate(&[queries, keys], cos, sin, false)?;
        if let (Some(keys), Some(queries)) = (rotated.pop(), rotated.pop()) {
            return Ok((queries, keys));
        }
    }
    Ok((forward(queries, cos, sin)?, forward(keys, cos, sin)?))
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

/// `(heads, head_dim, half)`.
pub(crate) fn check(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<(usize, usize, usize)> {
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
    Ok((heads, head_dim, half))
}

/// `inverse` rotates the other way.
fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor, inverse: bool) -> Result<Tensor> {
    let (heads, head_dim, half) = check(x, cos, sin)?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return match cuda::rotate(&[x], cos, sin, inverse)?.pop() {
            Some(y) => Ok(y),
            None => bail!("metal-candle-kernels: {OPERATION} gave nothing"),
        };
    }
    #[cfg(any(feature = "metal", feature = "metal-emulation", test))]
    if crate::backend::metal::computes(x) {
        return metal::rotate(x, cos, sin, inverse);
    }
    let (shape, count) = (x.dims(), x.elem_count());
    let (x, cos, sin) = (Input::contiguous(x)?, Input::contiguous(cos)?, Input::contiguous(sin)?);
    let (x, cos, sin) = (x.read(), cos.read(), sin.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let mut y = unwritten::<T>(count);
        let sizes = cpu::Sizes { heads, head_dim, half };
        cpu::rotate(sizes, x.slice::<T>()?, cos.values()?, sin.values()?, inverse, &mut y);
        Tensor::from_vec(y, shape, &Device::Cpu)
    })
}
