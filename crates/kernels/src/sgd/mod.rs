//! Stochastic gradient descent with momentum in one pass over flat parameters.
//!
//! ```text
//! g = grad_scale·grad + wd·p          (wd for the first `decayed` elements)
//! v ← μ·v + (1 - τ)·g                 (v ← g in the first step)
//! p ← p - lr·v                        or, Nesterov's, p ← p - lr·(g + μ·v)
//! ```
//!
//! as `torch.optim.SGD` does it. Without momentum there is no `v`, and `p ← p - lr·g`.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::on_gpu;
use crate::flat::{Clip, Step, require_step};
use candle_core::{Result, Tensor, bail};
use cpu::Update;

/// The settings of stochastic gradient descent.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Of this step.
    pub learning_rate: f64,
    /// Decay of the momentum, `μ`.
    pub momentum: f64,
    /// The share of a gradient that the momentum leaves out, `τ`.
    pub dampening: f64,
    /// Whether a step looks ahead, as Nesterov's does.
    pub nesterov: bool,
    /// Added to gradients times the parameters, as the gradient of a penalty.
    pub weight_decay: f64,
}

/// One step, in place, with gradients clipped to the norm that `clip` says: `params`, `grads` and the
/// momentum `v` are `(n)` of one dtype, f32 or f64; `v` starts as zeros and is left out without momentum.
/// `step` counts from 1. The first `decayed` elements get weight decay. Returns the norm before clipping;
/// when that isn't finite, no step is made. Afterwards the gradients are zero. On a GPU this waits for the
/// device.
///
/// # Errors
/// When `v` is given without momentum or missing with it, shapes or dtypes don't fit, `step` is 0, `decayed > n`, two of the tensors share storage, one isn't
/// contiguous, or they aren't on one device. Nothing is changed then.
pub fn clipped_step<'a>(
    params: &'a Tensor,
    grads: &'a Tensor,
    v: Option<&'a Tensor>,
    step: usize,
    clip: impl Into<Clip<'a>>,
    decayed: usize,
    options: &Options,
) -> Result<f64> {
    const OPERATION: &str = "sgd::clipped_step";
    require_step(OPERATION, step)?;
    if v.is_some() != (options.momentum != 0.0) {
        let v = if v.is_some() { "is" } else { "isn't" };
        bail!(
            "metal-candle-kernels: {OPERATION}: v {v} given with a momentum of {}, expected it for any but 0",
            options.momentum
        )
    }
    let (update, clip) = (Update::new(step, options), clip.into());
    match v {
        None => {
            let step = Step { operation: OPERATION, params, grads, states: [], decayed };
            step.check_clipped(clip)?;
            on_gpu!(params, gpu => {
                Ok(f64::from(gpu::clipped_step(&step, clip, &update)?.to_scalar::<f32>()?))
            });
            step.clipped_on_cpu(clip, &update)
        }
        Some(v) => {
            let step = Step { operation: OPERATION, params, grads, states: [("v", v)], decayed };
            step.check_clipped(clip)?;
            on_gpu!(params, gpu => {
                Ok(f64::from(gpu::clipped_step(&step, clip, &update)?.to_scalar::<f32>()?))
            });
            step.clipped_on_cpu(clip, &update)
        }
    }
}
