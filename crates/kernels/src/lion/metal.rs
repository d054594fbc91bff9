//! A step of Lion on Metal, see `kernel.metal`.

use super::cpu::Update;
use crate::flat::metal as flat;
use crate::flat::{Clip, Step};
use candle_core::{Result, Tensor};

pub(super) fn clipped_step(step: &Step<1>, clip: Clip, update: &Update) -> Result<Tensor> {
    flat::clipped_step("lion_clipped_step", step, clip, &update.constants())
}
