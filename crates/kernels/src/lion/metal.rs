//! A step of Lion on Metal, see `kernel.metal`.

use super::cpu::Update;
use crate::flat::Step;
use crate::flat::metal as flat;
use candle_core::{Result, Tensor};

pub(super) fn clipped_step(
    step: &Step<1>,
    max_norm: Option<f64>,
    update: &Update,
) -> Result<Tensor> {
    flat::clipped_step("lion_clipped_step", step, max_norm, &update.constants())
}
