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
#[cfg(test)]
mod tests;

use crate::device::cpu::{Input, buffer, contiguous_slice, dispatch};
use crate::device::{require_cpu, require_rank, require_shape};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor, WithDType, bail};

const OPERATION: &str = "rope";

/// Turns `x` `(batch, seq, heads, head_dim)` by the angles whose cosines and sines are `cos` and `sin`
/// `(batch, seq, rot / 2)`, f32 (or f64 for f64); `rot <= head_dim`, the rest passes through. The
/// result is like `x`.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, or a tensor isn't on the CPU.
pub fn forward(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let rope = Rope::new(x, cos, sin, false)?;
    x.detach().contiguous()?.apply_op1_no_bwd(&rope)
}

/// The gradient of [`forward`]'s `x`, from `dy` of its shape.
///
/// # Errors
/// Like [`forward`].
pub fn backward(dy: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let rope = Rope::new(dy, cos, sin, true)?;
    dy.detach().contiguous()?.apply_op1_no_bwd(&rope)
}

/// Like [`forward`], recorded in Candle's autograd. `cos` and `sin` are constants.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    let rope = Rope::new(x, cos, sin, false)?;
    x.contiguous()?.apply_op1(rope)
}

struct Rope {
    cos: Tensor,
    sin: Tensor,
    /// Turn the other way: the backward pass.
    inverse: bool,
}

impl Rope {
    fn new(x: &Tensor, cos: &Tensor, sin: &Tensor, inverse: bool) -> Result<Rope> {
        require_cpu(OPERATION, &[x, cos, sin])?;
        require_rank(OPERATION, "x", x, 4, "(batch, seq, heads, head_dim)")?;
        require_rank(OPERATION, "cos", cos, 3, "(batch, seq, rot / 2)")?;
        let (batch, seq, _, head_dim) = x.dims4()?;
        let half = cos.dim(2)?;
        require_shape(OPERATION, "cos", cos, &[batch, seq, half])?;
        require_shape(OPERATION, "sin", sin, &[batch, seq, half])?;
        if 2 * half > head_dim {
            bail!(
                "metal-candle-kernels: {OPERATION}: cos has {half} angles, expected at most {} for a head_dim of {head_dim}",
                head_dim / 2
            )
        }
        Ok(Rope { cos: cos.detach(), sin: sin.detach(), inverse })
    }
}

impl CustomOp1 for Rope {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (_, _, heads, head_dim) = layout.shape().dims4()?;
        let half = self.cos.dim(2)?;
        let (cos, sin) = (Input::contiguous(&self.cos)?, Input::contiguous(&self.sin)?);
        let (cos, sin) = (cos.read(), sin.read());
        dispatch!(OPERATION, x.dtype(), T => {
            let x = contiguous_slice::<T>(x, layout)?;
            let (cos, sin) = (cos.values()?, sin.values()?);
            let mut y = buffer::<T>(x.len());
            let sizes = cpu::Sizes { heads, head_dim, half };
            cpu::rotate(sizes, x, cos, sin, self.inverse, &mut y);
            Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    fn bwd(&self, _x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let turned = if self.inverse {
            forward(dy, &self.cos, &self.sin)?
        } else {
            backward(dy, &self.cos, &self.sin)?
        };
        Ok(Some(turned))
    }
}
