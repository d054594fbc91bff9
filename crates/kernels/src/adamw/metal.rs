//! A step of AdamW on Metal, see `kernel.metal`.

use super::cpu::Update;
use crate::backend::metal::{Argument, Metal};
use crate::flat::metal as flat;
use crate::flat::{Clip, Step};
use candle_core::{Result, Tensor};

pub(super) fn step(step: &Step<2>, grad_scale: f32, update: &Update) -> Result<()> {
    let metal = Metal::of(step.params)?;
    let grads = metal.contiguous(step.grads)?;
    let [params, m, v] =
        [step.params, step.states[0].1, step.states[1].1].map(|t| metal.strided(t));
    let (params, m, v) = (params?, m?, v?);
    let (constants, count) = (update.constants(), step.params.elem_count());
    let arguments = [
        Argument::Output(&params),
        Argument::Input(&grads),
        Argument::Output(&m),
        Argument::Output(&v),
        Argument::F32s(&constants),
        Argument::U64(step.decayed as u64),
        Argument::U64(count as u64),
        Argument::F32(grad_scale),
    ];
    metal.run(&[metal.by_elements("adamw_step", count, 1, &arguments)?])
}

pub(super) fn clipped_step(step: &Step<2>, clip: Clip, update: &Update) -> Result<Tensor> {
    flat::clipped_step("adamw_clipped_step", step, clip, &update.constants())
}
