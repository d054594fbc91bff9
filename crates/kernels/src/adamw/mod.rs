//! AdamW (Loshchilov and Hutter 2017, <https://arxiv.org/abs/1711.05101>) in one pass over flat
//! parameters. Without weight decay it is Adam (Kingma and Ba 2014, <https://arxiv.org/abs/1412.6980>).
//!
//! ```text
//! g = grad_scale·grad         p ← p·(1 - lr·wd)        (the first `decayed` elements)
//! m ← m + (g - m)·(1 - β1)    v ← β2·v + (1 - β2)·g²
//! p ← p - lr/(1 - β1ᵗ) · m / (√v / √(1 - β2ᵗ) + ε)
//! ```
//!
//! in the order of operations of `torch.optim.AdamW`. Without bias correction, as MLX has it unless told,
//! the two terms `1 - βᵗ` are 1.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::on_gpu;
use crate::flat::{Clip, Step, require_step};
use candle_core::{Device, Result, Tensor};
use cpu::Update;

/// AdamW's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Of this step.
    pub learning_rate: f64,
    /// Decay of the mean of gradients.
    pub beta1: f64,
    /// Decay of the mean of squared gradients.
    pub beta2: f64,
    /// Added to the root of the mean of squares.
    pub epsilon: f64,
    /// Decoupled weight decay.
    pub weight_decay: f64,
    /// Whether the means are corrected for beginning at zero.
    pub bias_correction: bool,
}

/// One step, in place: `params`, `grads`, `m` and `v` are `(n)` of one dtype, f32 or f64; `m` and `v`
/// start as zeros. `step` counts from 1. Gradients are multiplied by `grad_scale` on the way (clipping,
/// averaging) and stay as they are. The first `decayed` elements get weight decay.
///
/// # Errors
/// When shapes or dtypes don't fit, `step` is 0, `decayed > n`, two of the tensors share storage,
/// `params`, `m` or `v` isn't contiguous, or the tensors aren't on one device; on CUDA `m` and `v` may be in
/// [pinned memory of the host](crate::flat). Nothing is changed then.
#[allow(clippy::too_many_arguments)]
pub fn step(
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    v: &Tensor,
    step: usize,
    grad_scale: f32,
    decayed: usize,
    options: &Options,
) -> Result<()> {
    const OPERATION: &str = "adamw::step";
    let states = [("m", m), ("v", v)];
    let buffers = Step { operation: OPERATION, params, grads, states, decayed };
    buffers.check()?;
    require_step(OPERATION, step)?;
    let update = Update::new(step, options);
    on_gpu!(params, gpu => gpu::step(&buffers, grad_scale, &update));
    buffers.on_cpu(grad_scale, &update)
}

/// [`norm`](crate::flat::norm) of the gradients, then one [`step`] with them scaled to the norm that `clip` says, as
/// `torch.nn.utils.clip_grad_norm_` does it. Afterwards the gradients are zero, which is
/// cheaper here than later. Returns the norm before clipping; when that isn't finite, no step is made. On a
/// GPU this waits for the device, and the norm is an f32: see [`clipped_step_deferred`].
///
/// # Errors
/// Like [`step`]; the gradients must be contiguous, too.
#[allow(clippy::too_many_arguments)]
pub fn clipped_step<'a>(
    params: &'a Tensor,
    grads: &'a Tensor,
    m: &'a Tensor,
    v: &'a Tensor,
    step: usize,
    clip: impl Into<Clip<'a>>,
    decayed: usize,
    options: &Options,
) -> Result<f64> {
    let (states, clip) = ([("m", m), ("v", v)], clip.into());
    let (buffers, update) = clipped([params, grads], states, step, clip, decayed, options)?;
    on_gpu!(params, gpu => {
        let norm = gpu::clipped_step(&buffers, clip, &update)?;
        Ok(f64::from(norm.to_scalar::<f32>()?))
    });
    buffers.clipped_on_cpu(clip, &update)
}

/// Like [`clipped_step`], with the norm as a scalar f32 tensor on the device of the parameters. On a
/// GPU nothing waits for the device until the norm is read.
///
/// # Errors
/// Like [`clipped_step`].
#[allow(clippy::too_many_arguments)]
pub fn clipped_step_deferred<'a>(
    params: &'a Tensor,
    grads: &'a Tensor,
    m: &'a Tensor,
    v: &'a Tensor,
    step: usize,
    clip: impl Into<Clip<'a>>,
    decayed: usize,
    options: &Options,
) -> Result<Tensor> {
    let clip = clip.into();
    on_gpu!(params, gpu => {
        let states = [("m", m), ("v", v)];
        let (buffers, update) = clipped([params, grads], states, step, clip, decayed, options)?;
        gpu::clipped_step(&buffers, clip, &update)
    });
    let norm = clipped_step(params, grads, m, v, step, clip, decayed, options)?;
    Tensor::new(norm as f32, &Device::Cpu)
}

/// The checked step.
fn clipped<'a>(
    [params, grads]: [&'a Tensor; 2],
    states: [(&'static str, &'a Tensor); 2],
    step: usize,
    clip: Clip,
    decayed: usize,
    options: &Options,
) -> Result<(Step<'a, 2>, Update)> {
    const OPERATION: &str = "adamw::clipped_step";
    let buffers = Step { operation: OPERATION, params, grads, states, decayed };
    buffers.check_clipped(clip)?;
    require_step(OPERATION, step)?;
    Ok((buffers, Update::new(step, options)))
}
