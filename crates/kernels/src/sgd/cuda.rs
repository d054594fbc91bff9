//! A step of stochastic gradient descent on CUDA, see `kernel.cu`.

use super::cpu::Update;
use crate::backend::cuda::{Module, module};
use crate::flat::cuda as flat;
use crate::flat::{Clip, Step};
use candle_core::{Result, Tensor};

static MODULE: Module = module!("sgd");

pub(super) fn clipped_step<const STATES: usize>(
    step: &Step<STATES>,
    clip: Clip,
    update: &Update,
) -> Result<Tensor> {
    let names = match STATES {
        0 => ["sgd_plain_clipped_step", "sgd_plain_clipped_step_any"],
        _ => ["sgd_clipped_step", "sgd_clipped_step_any"],
    };
    flat::clipped_step(&MODULE, names, step, clip, update.constants())
}
