//! AdamW (Loshchilov and Hutter 2017, <https://arxiv.org/abs/1711.05101>) in one pass over flat
//! parameters, and the other passes over a flat gradient: its norm, adding to it, clearing it.
//!
//! ```text
//! g = grad_scale·grad         p ← p·(1 - lr·wd)        (the first `decayed` elements)
//! m ← m + (g - m)·(1 - β1)    v ← β2·v + (1 - β2)·g²
//! p ← p - lr/(1 - β1ᵗ) · m / (√v / √(1 - β2ᵗ) + ε)
//! ```
//!
//! in the order of operations of `torch.optim.AdamW`.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::device::cpu::{Input, Real, change_in_place, require_separate};
use crate::device::{on_gpu, require_dtype, require_rank, require_shape, require_together};
use candle_core::{DType, Device, Result, Tensor, bail};

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
}

/// One step, in place: `params`, `grads`, `m` and `v` are `(n)` of one dtype, f32 or f64; `m` and `v`
/// start as zeros. `step` counts from 1. Gradients are multiplied by `grad_scale` on the way (clipping,
/// averaging) and stay as they are. The first `decayed` elements get weight decay.
///
/// # Errors
/// When shapes or dtypes don't fit, `step` is 0, `decayed > n`, two of the tensors share storage,
/// `params`, `m` or `v` isn't contiguous, or the tensors aren't on one device. Nothing is changed then.
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
    check(OPERATION, [params, grads, m, v], step, decayed)?;
    let update = cpu::Update::new(step, grad_scale, decayed, options);
    on_gpu!(params, gpu => gpu::step(params, grads, m, v, &update));
    match params.dtype() {
        DType::F64 => step_in::<f64>(OPERATION, params, grads, m, v, &update),
        _ => step_in::<f32>(OPERATION, params, grads, m, v, &update),
    }
}

/// [`norm`] of the gradients, then one [`step`] with them scaled to a norm of at most `max_norm`, as
/// `torch.nn.utils.clip_grad_norm_` does it. Afterwards the gradients are zero, which is cheaper here
/// than later. Returns the norm before clipping; when that isn't finite, no step is made. On a GPU this
/// waits for the device, and the norm is an f32: see [`clipped_step_deferred`].
///
/// # Errors
/// Like [`step`]; the gradients must be contiguous, too.
#[allow(clippy::too_many_arguments)]
pub fn clipped_step(
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    v: &Tensor,
    step: usize,
    max_norm: Option<f64>,
    decayed: usize,
    options: &Options,
) -> Result<f64> {
    let mut update = clipped_update([params, grads, m, v], step, decayed, options)?;
    on_gpu!(params, gpu => {
        let norm = gpu::clipped_step(params, grads, m, v, max_norm, &update)?;
        Ok(f64::from(norm.to_scalar::<f32>()?))
    });
    let norm = norm(grads)?;
    if !norm.is_finite() {
        fill_zero(grads)?;
        return Ok(norm);
    }
    let scale = max_norm.map_or(1.0, |max_norm| (max_norm / (norm + CLIP_EPSILON)).min(1.0));
    update.grad_scale = f64::from(scale as f32);
    match params.dtype() {
        DType::F64 => step_and_clear::<f64>(CLIPPED_STEP, params, grads, m, v, &update)?,
        _ => step_and_clear::<f32>(CLIPPED_STEP, params, grads, m, v, &update)?,
    }
    Ok(norm)
}

/// Like [`clipped_step`], with the norm as a scalar f32 tensor on the device of the parameters. On a
/// GPU nothing waits for the device until the norm is read.
///
/// # Errors
/// Like [`clipped_step`].
#[allow(clippy::too_many_arguments)]
pub fn clipped_step_deferred(
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    v: &Tensor,
    step: usize,
    max_norm: Option<f64>,
    decayed: usize,
    options: &Options,
) -> Result<Tensor> {
    on_gpu!(params, gpu => {
        let update = clipped_update([params, grads, m, v], step, decayed, options)?;
        gpu::clipped_step(params, grads, m, v, max_norm, &update)
    });
    let norm = clipped_step(params, grads, m, v, step, max_norm, decayed, options)?;
    Tensor::new(norm as f32, &Device::Cpu)
}

const CLIPPED_STEP: &str = "adamw::clipped_step";

/// The checked step, before the gradients' scale is known.
fn clipped_update(
    tensors: [&Tensor; 4],
    step: usize,
    decayed: usize,
    options: &Options,
) -> Result<cpu::Update> {
    check(CLIPPED_STEP, tensors, step, decayed)?;
    require_contiguous(CLIPPED_STEP, "grads", tensors[1])?;
    Ok(cpu::Update::new(step, 1.0, decayed, options))
}

/// Keeps the norm's reciprocal finite.
const CLIP_EPSILON: f64 = 1e-6;

fn check(
    operation: &'static str,
    [params, grads, m, v]: [&Tensor; 4],
    step: usize,
    decayed: usize,
) -> Result<()> {
    require_together(operation, &[params, grads, m, v])?;
    require_rank(operation, "params", params, 1, "(n)")?;
    let n = params.elem_count();
    for (name, tensor) in [("params", params), ("grads", grads), ("m", m), ("v", v)] {
        require_shape(operation, name, tensor, &[n])?;
        require_dtype(operation, name, tensor, params.dtype())?;
        // Gradients that are only read are copied if need be.
        if name != "grads" {
            require_contiguous(operation, name, tensor)?;
        }
    }
    if !matches!(params.dtype(), DType::F32 | DType::F64) {
        bail!(
            "metal-candle-kernels: {operation}: params are {:?}, expected F32 or F64: keep trainable parameters in full precision",
            params.dtype()
        )
    }
    if step == 0 {
        bail!("metal-candle-kernels: {operation}: the step is 0, expected 1 for the first")
    }
    if decayed > n {
        bail!(
            "metal-candle-kernels: {operation}: {decayed} elements are to decay, expected at most {n}"
        )
    }
    const ALL: &str = "params, grads, m and v";
    for (a, b) in [(params, m), (params, v), (params, grads), (m, v), (m, grads), (v, grads)] {
        require_separate(operation, ALL, a, b)?;
    }
    Ok(())
}

fn require_contiguous(operation: &str, name: &str, tensor: &Tensor) -> Result<()> {
    if !tensor.is_contiguous() {
        bail!("metal-candle-kernels: {operation}: {name} is not contiguous, expected it to be")
    }
    Ok(())
}

fn step_in<A: Real>(
    operation: &'static str,
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    v: &Tensor,
    update: &cpu::Update,
) -> Result<()> {
    let grads = Input::contiguous(grads)?;
    let grads = grads.read();
    let grads = grads.slice::<A>()?;
    change_in_place::<A>(operation, params, |params| {
        change_in_place::<A>(operation, m, |m| {
            change_in_place::<A>(operation, v, |v| {
                cpu::step(update, params, cpu::Gradients::Kept(grads), m, v);
                Ok(())
            })
        })
    })
}

fn step_and_clear<A: Real>(
    operation: &'static str,
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    v: &Tensor,
    update: &cpu::Update,
) -> Result<()> {
    change_in_place::<A>(operation, params, |params| {
        change_in_place::<A>(operation, grads, |grads| {
            change_in_place::<A>(operation, m, |m| {
                change_in_place::<A>(operation, v, |v| {
                    cpu::step(update, params, cpu::Gradients::Cleared(grads), m, v);
                    Ok(())
                })
            })
        })
    })
}

/// The Euclidean norm of a tensor of any shape, added up in f64, on Metal in f32. A NaN or infinite
/// element gives a result that isn't finite. On a GPU this waits for the device.
///
/// # Errors
/// When the tensor isn't a float, or on a device that this build has no kernels for.
pub fn norm(grads: &Tensor) -> Result<f64> {
    require_together("adamw::norm", &[grads])?;
    on_gpu!(grads, gpu => gpu::norm(grads));
    let grads = Input::contiguous(grads)?;
    let grads = grads.read();
    Ok(cpu::norm(grads.values()?))
}

/// `dst += scale·src` in place: `dst` f32 or f64 and contiguous (a view of a flat buffer will do), `src`
/// a float tensor of its shape that shares no storage with it.
///
/// # Errors
/// When shapes or dtypes don't fit, `dst` isn't contiguous, storage is shared, or the tensors aren't
/// on one device.
pub fn accumulate(dst: &Tensor, src: &Tensor, scale: f64) -> Result<()> {
    const OPERATION: &str = "adamw::accumulate";
    require_together(OPERATION, &[dst, src])?;
    require_shape(OPERATION, "src", src, dst.dims())?;
    require_contiguous(OPERATION, "dst", dst)?;
    require_separate(OPERATION, "dst and src", dst, src)?;
    match dst.dtype() {
        #[cfg(feature = "cuda")]
        DType::F32 if dst.device().is_cuda() => cuda::accumulate(dst, src, scale),
        #[cfg(any(feature = "metal", feature = "metal-emulation", test))]
        DType::F32 if crate::device::metal::computes(dst) => metal::accumulate(dst, src, scale),
        DType::F32 => accumulate_in::<f32>(OPERATION, dst, src, scale),
        DType::F64 => accumulate_in::<f64>(OPERATION, dst, src, scale),
        other => bail!("metal-candle-kernels: {OPERATION}: dst is {other:?}, expected F32 or F64"),
    }
}

fn accumulate_in<A: Real>(
    operation: &'static str,
    dst: &Tensor,
    src: &Tensor,
    scale: f64,
) -> Result<()> {
    let src = Input::contiguous(src)?;
    let src = src.read();
    let src = src.values::<A>()?;
    change_in_place::<A>(operation, dst, |dst| {
        cpu::accumulate(dst, src, A::from_f64(scale));
        Ok(())
    })
}

/// Sets every element to zero, in place.
///
/// # Errors
/// When the tensor is on a device that this build has no kernels for.
pub fn fill_zero(dst: &Tensor) -> Result<()> {
    const OPERATION: &str = "adamw::fill_zero";
    require_together(OPERATION, &[dst])?;
    #[cfg(feature = "cuda")]
    if dst.device().is_cuda() && dst.is_contiguous() {
        return cuda::fill_zero(dst);
    }
    #[cfg(any(feature = "metal", feature = "metal-emulation", test))]
    if crate::device::metal::computes(dst) && dst.dtype() == DType::F32 && dst.is_contiguous() {
        return metal::fill_zero(dst);
    }
    match dst.dtype() {
        DType::F32 if dst.is_contiguous() => change_in_place::<f32>(OPERATION, dst, |dst| {
            cpu::fill_zero(dst);
            Ok(())
        }),
        _ => dst.zero_set(),
    }
}
