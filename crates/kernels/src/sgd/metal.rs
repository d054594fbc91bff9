//! A step of stochastic gradient descent on Metal, see `kernel.metal`.

use super::cpu::Update;
use crate::flat::metal as flat;
use crate::flat::{Clip, Step};
use candle_core::{Result, Tensor};

pub(super) fn clipped_step<const STATES: usize>(
    step: &Step<STATES>,
    clip: Clip,
    update: &Update,
) -> Result<Tensor> {
    let kernel = if STATES == 0 { "sgd_plain_clipped_step" } else { "sgd_clipped_step" };
    flat::clipped_step(kernel, step, clip, &update.constants())
}
