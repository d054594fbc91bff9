//! A step of Lion on CUDA, see `kernel.cu`.

use super::cpu::Update;
use crate::backend::cuda::{Module, module};
use crate::flat::cuda as flat;
use crate::flat::{Clip, Step};
use candle_core::{Result, Tensor};

static MODULE: Module = module!("lion");

pub(super) fn clipped_step(step: &Step<1>, clip: Clip, update: &Update) -> Result<Tensor> {
    let names = ["lion_clipped_step", "lion_clipped_step_any"];
    flat::clipped_step(&MODULE, names, step, clip, update.constants())
}
