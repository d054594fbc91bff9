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
#[cfg(test)]
mod tests;

use crate::device::cpu::{Input, Real, change_in_place, require_separate};
use crate::device::{require_cpu, require_dtype, require_rank, require_shape};
use candle_core::{DType, Result, Tensor, bail};

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
/// `params`, `m` or `v` isn't contiguous, or a tensor isn't on the CPU. Nothing is changed then.
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
    require_cpu(OPERATION, &[params, grads, m, v])?;
    require_rank(OPERATION, "params", params, 1, "(n)")?;
    let n = params.elem_count();
    for (name, tensor) in [("params", params), ("grads", grads), ("m", m), ("v", v)] {
        require_shape(OPERATION, name, tensor, &[n])?;
        require_dtype(OPERATION, name, tensor, params.dtype())?;
        // Gradients are only read, and copied if need be.
        if name != "grads" && !tensor.is_contiguous() {
            bail!("metal-candle-kernels: {OPERATION}: {name} is not contiguous, expected it to be")
        }
    }
    if step == 0 {
        bail!("metal-candle-kernels: {OPERATION}: the step is 0, expected 1 for the first")
    }
    if decayed > n {
        bail!(
            "metal-candle-kernels: {OPERATION}: {decayed} elements are to decay, expected at most {n}"
        )
    }
    const ALL: &str = "params, grads, m and v";
    for (a, b) in [(params, m), (params, v), (params, grads), (m, v), (m, grads), (v, grads)] {
        require_separate(OPERATION, ALL, a, b)?;
    }
    let update = cpu::Update::new(step, grad_scale, decayed, options);
    match params.dtype() {
        DType::F32 => step_in::<f32>(OPERATION, params, grads, m, v, &update),
        DType::F64 => step_in::<f64>(OPERATION, params, grads, m, v, &update),
        other => bail!(
            "metal-candle-kernels: {OPERATION}: params are {other:?}, expected F32 or F64: keep trainable parameters in full precision"
        ),
    }
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
                cpu::step(update, params, grads, m, v);
                Ok(())
            })
        })
    })
}

/// The Euclidean norm of a tensor of any shape, added up in f64. A NaN or infinite element gives a
/// result that isn't finite.
///
/// # Errors
/// When the tensor isn't a float or isn't on the CPU.
pub fn norm(grads: &Tensor) -> Result<f64> {
    require_cpu("adamw::norm", &[grads])?;
    let grads = Input::contiguous(grads)?;
    let grads = grads.read();
    Ok(cpu::norm(grads.values()?))
}

/// `dst += scale·src` in place: `dst` f32 or f64 and contiguous (a view of a flat buffer will do), `src`
/// a float tensor of its shape that shares no storage with it.
///
/// # Errors
/// When shapes or dtypes don't fit, `dst` isn't contiguous, storage is shared, or a tensor isn't on the
/// CPU.
pub fn accumulate(dst: &Tensor, src: &Tensor, scale: f64) -> Result<()> {
    const OPERATION: &str = "adamw::accumulate";
    require_cpu(OPERATION, &[dst, src])?;
    require_shape(OPERATION, "src", src, dst.dims())?;
    require_separate(OPERATION, "dst and src", dst, src)?;
    match dst.dtype() {
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
/// When the tensor isn't on the CPU.
pub fn fill_zero(dst: &Tensor) -> Result<()> {
    require_cpu("adamw::fill_zero", &[dst])?;
    dst.zero_set()
}
