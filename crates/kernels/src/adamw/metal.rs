//! The passes over flat parameters on Metal, see `kernel.metal`. Norms are added up in f32.

use super::cpu;
use crate::device::metal::{Argument, Array, Dispatch, Metal, by_dtype, size};
use candle_core::{DType, Result, Tensor};

/// Threadgroups that add up squares, at most: as many pairs of numbers are added up afterwards.
const PARTS: usize = 1024;
/// Elements that a threadgroup adds up at least.
const SHARE: usize = 4096;

/// What is the same for all elements of one step, in the order of the kernels' struct.
fn constants(update: &cpu::Update) -> [f32; 7] {
    let cpu::Update { decay, beta1, beta2, epsilon, step_size, correction, .. } = *update;
    [decay, 1.0 - beta1, beta2, 1.0 - beta2, epsilon, step_size, correction]
        .map(|number| number as f32)
}

pub(super) fn step(
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    v: &Tensor,
    update: &cpu::Update,
) -> Result<()> {
    let metal = Metal::of(params)?;
    let grads = metal.contiguous(grads)?;
    let (params, m, v) = (metal.strided(params)?, metal.strided(m)?, metal.strided(v)?);
    let (constants, count) = (constants(update), params.tensor.elem_count());
    let arguments = [
        Argument::Output(&params),
        Argument::Input(&grads),
        Argument::Output(&m),
        Argument::Output(&v),
        Argument::F32s(&constants),
        Argument::U64(update.decayed as u64),
        Argument::U64(count as u64),
        Argument::F32(update.grad_scale as f32),
    ];
    metal.run(&[metal.by_elements("adamw_step", count, 1, &arguments)?])
}

/// The norm of the gradients as a scalar f32; all buffers are contiguous.
pub(super) fn clipped_step(
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    v: &Tensor,
    max_norm: Option<f64>,
    update: &cpu::Update,
) -> Result<Tensor> {
    let metal = Metal::of(params)?;
    let (params, grads) = (metal.strided(params)?, metal.strided(grads)?);
    let (m, v) = (metal.strided(m)?, metal.strided(v)?);
    let (constants, count) = (constants(update), params.tensor.elem_count());
    with_norm(&metal, &grads, |[squares, sum], norm| {
        let arguments = [
            Argument::Output(&params),
            Argument::Output(&grads),
            Argument::Output(&m),
            Argument::Output(&v),
            Argument::F32s(&constants),
            Argument::U64(update.decayed as u64),
            Argument::U64(count as u64),
            Argument::Input(norm),
            Argument::F32(max_norm.map_or(f32::INFINITY, |max_norm| max_norm as f32)),
        ];
        let step = metal.by_elements("adamw_clipped_step", count, 1, &arguments)?;
        metal.run(&[squares, sum, step])
    })
}

pub(super) fn norm(grads: &Tensor) -> Result<f64> {
    let metal = Metal::of(grads)?;
    let grads = metal.contiguous(grads)?;
    let norm = with_norm(&metal, &grads, |dispatches, _| metal.run(&dispatches))?;
    Ok(norm.to_scalar::<f32>()?.into())
}

/// The norm of contiguous gradients as a scalar f32, once `run` has encoded the kernels that find it.
fn with_norm(
    metal: &Metal,
    grads: &Array,
    run: impl FnOnce([Dispatch; 2], &Array) -> Result<()>,
) -> Result<Tensor> {
    let count = grads.tensor.elem_count();
    // By the number of elements alone.
    let parts = count.div_ceil(SHARE).clamp(1, PARTS);
    let partial = metal.empty(2 * parts, DType::F32)?;
    let norm = metal.empty((), DType::F32)?;
    let parts_argument = Argument::U32(size("adamw::norm", parts)?);
    let arguments = [
        Argument::Input(grads),
        Argument::Output(&partial),
        Argument::U64(count as u64),
        parts_argument,
    ];
    let name = by_dtype!("adamw_squares", grads.dtype)?;
    let squares = metal.by_row(name, parts, SHARE / 2, &arguments)?;
    let arguments = [Argument::Input(&partial), Argument::Output(&norm), parts_argument];
    let sum = metal.by_row("adamw_norm", 1, 2 * parts, &arguments)?;
    run([squares, sum], &norm)?;
    Ok(norm.tensor)
}

/// `dst` is contiguous.
pub(super) fn accumulate(dst: &Tensor, src: &Tensor, scale: f64) -> Result<()> {
    let metal = Metal::of(dst)?;
    let (dst, src) = (metal.strided(dst)?, metal.contiguous(src)?);
    let count = dst.tensor.elem_count();
    let arguments = [
        Argument::Output(&dst),
        Argument::Input(&src),
        Argument::F32(scale as f32),
        Argument::U64(count as u64),
    ];
    let name = by_dtype!("adamw_accumulate", src.dtype)?;
    metal.run(&[metal.by_elements(name, count, 1, &arguments)?])
}

/// `dst` is f32 and contiguous.
pub(super) fn fill_zero(dst: &Tensor) -> Result<()> {
    let metal = Metal::of(dst)?;
    metal.clear(&metal.strided(dst)?)
}
