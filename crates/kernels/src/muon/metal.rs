//! The passes of Muon on Metal, see `kernel.metal`.

use super::EPSILON;
use super::cpu::Update;
use crate::backend::metal::{Argument, Metal};
use crate::flat::Step;
use crate::flat::metal::with_norm;
use candle_core::{Result, Tensor};

pub(super) fn step(step: &Step<2>, grad_scale: f32, update: &Update) -> Result<()> {
    let metal = Metal::of(step.params)?;
    let (params, grads) = (metal.strided(step.params)?, metal.strided(step.grads)?);
    let [(_, m), (_, direction)] = step.states;
    let (m, direction) = (metal.strided(m)?, metal.strided(direction)?);
    let (constants, count) = (update.constants(), step.params.elem_count());
    let arguments = [
        Argument::Output(&params),
        Argument::Output(&grads),
        Argument::Output(&m),
        Argument::Output(&direction),
        Argument::F32s(&constants),
        Argument::U64(step.decayed as u64),
        Argument::U64(count as u64),
        Argument::F32(grad_scale),
    ];
    metal.run(&[metal.by_elements("muon_step", count, 1, &arguments)?])
}

/// `x` is contiguous.
pub(super) fn normalize(x: &Tensor) -> Result<()> {
    let metal = Metal::of(x)?;
    let x = metal.strided(x)?;
    let count = x.tensor.elem_count();
    with_norm(&metal, &x, |[squares, sum], norm| {
        let arguments = [
            Argument::Output(&x),
            Argument::Input(norm),
            Argument::F32(EPSILON as f32),
            Argument::U64(count as u64),
        ];
        metal.run(&[squares, sum, metal.by_elements("muon_normalize", count, 1, &arguments)?])
    })?;
    Ok(())
}
