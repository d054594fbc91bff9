//! A step of AdamW on CUDA, see `kernel.cu`.

use super::cpu::Update;
use crate::backend::cuda::{Cuda, Module, module};
use crate::flat::cuda::{self as flat, Prepared, Rule, THREADS};
use crate::flat::{Clip, Step};
use candle_core::{Result, Tensor};

static MODULE: Module = module!("adamw");

pub(super) fn step(step: &Step<2>, grad_scale: f32, update: &Update) -> Result<()> {
    let cuda = Cuda::of(step.params)?;
    let prepared = Prepared::new(&cuda, step)?;
    if step.params.elem_count() == 0 {
        return Ok(());
    }
    let name = if prepared.packed { "adamw_step" } else { "adamw_step_any" };
    let launch = MODULE.launch(&cuda, name, prepared.grid, THREADS as u32, 0)?;
    let rule = Rule(update.constants());
    // SAFETY: all buffers are contiguous and have so many elements.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&prepared.buffers).arg(&grad_scale).arg(&rule);
        })
    }
}

pub(super) fn clipped_step(step: &Step<2>, clip: Clip, update: &Update) -> Result<Tensor> {
    let names = ["adamw_clipped_step", "adamw_clipped_step_any"];
    flat::clipped_step(&MODULE, names, step, clip, update.constants())
}
