//! The passes over flat gradients on Metal, and a clipped step, see `kernel.metal`. Norms are added up in f32.

use super::{Clip, Step};
use crate::backend::metal::{Argument, Array, Dispatch, Metal, by_dtype, size};
use candle_core::{DType, Result, Tensor};

/// Threadgroups that add up squares, at most: as many pairs of numbers are added up afterwards.
const PARTS: usize = 1024;
/// Elements that a threadgroup adds up at least.
const SHARE: usize = 4096;

/// A step of all elements by a `kernel` with these constants, which are in the order of its struct. The norm
/// of the gradients as a scalar f32; all buffers are contiguous.
pub(crate) fn clipped_step<const STATES: usize>(
    kernel: &'static str,
    step: &Step<STATES>,
    clip: Clip,
    constants: &[f32],
) -> Result<Tensor> {
    let metal = Metal::of(step.params)?;
    let (params, grads) = (metal.strided(step.params)?, metal.strided(step.grads)?);
    let states = step.states.iter().map(|(_, state)| metal.strided(state));
    let states = states.collect::<Result<Vec<Array>>>()?;
    let count = step.params.elem_count();
    let clipped = metal.strided(step.clipped(clip))?;
    with_norm(&metal, &clipped, |[squares, sum], norm| {
        let mut arguments = vec![Argument::Output(&params), Argument::Output(&grads)];
        arguments.extend(states.iter().map(Argument::Output));
        arguments.extend([
            Argument::F32s(constants),
            Argument::U64(step.decayed as u64),
            Argument::U64(count as u64),
            Argument::Input(norm),
            max_norm_argument(clip.max_norm),
        ]);
        metal.run(&[squares, sum, metal.by_elements(kernel, count, 1, &arguments)?])
    })
}

/// What a kernel clips the norm to.
pub(crate) fn max_norm_argument(max_norm: Option<f64>) -> Argument<'static> {
    Argument::F32(max_norm.map_or(f32::INFINITY, |max_norm| max_norm as f32))
}

pub(super) fn norm(grads: &Tensor) -> Result<f64> {
    let metal = Metal::of(grads)?;
    let grads = metal.contiguous(grads)?;
    let norm = with_norm(&metal, &grads, |dispatches, _| metal.run(&dispatches))?;
    Ok(norm.to_scalar::<f32>()?.into())
}

/// The norm of contiguous gradients as a scalar f32, once `run` has encoded the kernels that find it.
pub(crate) fn with_norm(
    metal: &Metal,
    grads: &Array,
    run: impl FnOnce([Dispatch; 2], &Array) -> Result<()>,
) -> Result<Tensor> {
    let count = grads.tensor.elem_count();
    // By the number of elements alone.
    let parts = count.div_ceil(SHARE).clamp(1, PARTS);
    let partial = metal.empty(2 * parts, DType::F32)?;
    let norm = metal.empty((), DType::F32)?;
    let parts_argument = Argument::U32(size("flat::norm", parts)?);
    let arguments = [
        Argument::Input(grads),
        Argument::Output(&partial),
        Argument::U64(count as u64),
        parts_argument,
    ];
    let name = by_dtype!("flat_squares", grads.dtype)?;
    let squares = metal.by_row(name, parts, SHARE / 2, &arguments)?;
    let arguments = [Argument::Input(&partial), Argument::Output(&norm), parts_argument];
    let sum = metal.by_row("flat_norm", 1, 2 * parts, &arguments)?;
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
    let name = by_dtype!("flat_accumulate", src.dtype)?;
    metal.run(&[metal.by_elements(name, count, 1, &arguments)?])
}

/// `dst` is f32 and contiguous.
pub(super) fn fill_zero(dst: &Tensor) -> Result<()> {
    let metal = Metal::of(dst)?;
    metal.clear(&metal.strided(dst)?)
}
