//! A step of AdamW with moments of 8 bits on CUDA, see `kernel.cu`.

use super::{BLOCK, Buffers, LEVELS, Moments, TABLES};
use crate::adamw::cpu::Update;
use crate::backend::cuda::{Cuda, Module, module};
use crate::flat::cuda::{Rule, THREADS};
use candle_core::Result;

static MODULE: Module = module!("adamw8bit");

/// Blocks of threads at most: what the multiprocessors of an H200 hold at once.
const GRID: usize = 132 * 8;

pub(super) fn step(buffers: &Buffers, grad_scale: f32, update: &Update) -> Result<()> {
    let &Buffers { params, grads, moments } = buffers;
    let Moments { m_codes, m_scales, v_codes, v_scales } = moments;
    let cuda = Cuda::of(params)?;
    let count = params.elem_count();
    if count == 0 {
        return Ok(());
    }
    let arrays = [params, grads, m_codes, v_codes, m_scales, v_scales];
    let arrays =
        arrays.into_iter().map(|tensor| cuda.within_reach(tensor)).collect::<Result<Vec<_>>>()?;
    let grid = count.div_ceil(BLOCK).min(GRID) as u32;
    let launch = MODULE.launch(&cuda, "adamw8bit_step", (grid, 1, 1), THREADS as u32, 0)?;
    let (count, rule) = (count as i64, Rule(update.constants()));
    let mut levels = Rule([0.0; 2 * LEVELS]);
    levels.0[..LEVELS].copy_from_slice(&TABLES.signed);
    levels.0[LEVELS..].copy_from_slice(&TABLES.unsigned);
    // SAFETY: all are contiguous and have so many elements, or so many blocks.
    unsafe {
        launch.with(|arguments| {
            arrays.iter().for_each(|array| {
                arguments.arg(&array.pointer);
            });
            arguments.arg(&count).arg(&grad_scale).arg(&rule).arg(&levels);
        })
    }
}
