//! A step of AdamW with moments of 8 bits on Metal, see `kernel.metal`.

use super::{BLOCK, Buffers, Moments, TABLES};
use crate::adamw::cpu::Update;
use crate::backend::metal::{Argument, Metal};
use candle_core::Result;

pub(super) fn step(buffers: &Buffers, grad_scale: f32, update: &Update) -> Result<()> {
    let &Buffers { params, grads, moments } = buffers;
    let Moments { m_codes, m_scales, v_codes, v_scales } = moments;
    let metal = Metal::of(params)?;
    let count = params.elem_count();
    let arrays = [params, grads, m_codes, v_codes, m_scales, v_scales];
    let arrays =
        arrays.into_iter().map(|tensor| metal.strided(tensor)).collect::<Result<Vec<_>>>()?;
    let levels = [TABLES.signed, TABLES.unsigned].concat();
    let constants = update.constants();
    let mut arguments: Vec<Argument> = arrays.iter().map(Argument::Output).collect();
    arguments.extend([
        Argument::F32s(&constants),
        Argument::F32s(&levels),
        Argument::U64(count as u64),
        Argument::F32(grad_scale),
    ]);
    // A thread has some elements of its block.
    metal.run(&[metal.by_row("adamw8bit_step", count.div_ceil(BLOCK), 8 * BLOCK, &arguments)?])
}
