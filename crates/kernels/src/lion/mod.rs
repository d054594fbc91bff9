//! Lion (Chen et al. 2023, <https://arxiv.org/abs/2302.06675>) in one pass over flat parameters.
//!
//! ```text
//! g = grad_scale·grad         p ← p·(1 - lr·wd)        (the first `decayed` elements)
//! p ← p - lr·sign(β1·m + (1 - β1)·g)
//! m ← β2·m + (1 - β2)·g
//! ```

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::on_gpu;
use crate::flat::{Clip, Step};
use candle_core::{Result, Tensor};
use cpu::Update;

/// Lion's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Of this step.
    pub learning_rate: f64,
    /// The share of the mean of gradients in the direction of a step.
    pub beta1: f64,
    /// Decay of the mean of gradients.
    pub beta2: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// One step, in place, with gradients clipped to the norm that `clip` says: `params`, `grads` and `m` are
/// `(n)` of one dtype, f32 or f64; `m` starts as zeros. The first `decayed` elements get weight decay.
/// Returns the norm before clipping; when that isn't finite, no step is made. Afterwards the gradients are
/// zero. On a GPU this waits for the device.
///
/// # Errors
/// When shapes or dtypes don't fit, `decayed > n`, two of the tensors share storage, one isn't contiguous,
/// or they aren't on one device. Nothing is changed then.
pub fn clipped_step<'a>(
    params: &'a Tensor,
    grads: &'a Tensor,
    m: &'a Tensor,
    clip: impl Into<Clip<'a>>,
    decayed: usize,
    options: &Options,
) -> Result<f64> {
    let step = Step { operation: "lion::clipped_step", params, grads, states: [("m", m)], decayed };
    let (update, clip) = (Update::new(options), clip.into());
    step.check_clipped(clip)?;
    on_gpu!(params, gpu => {
        Ok(f64::from(gpu::clipped_step(&step, clip, &update)?.to_scalar::<f32>()?))
    });
    step.clipped_on_cpu(clip, &update)
}
