//! The passes of Muon on CUDA, see `kernel.cu`.

use super::EPSILON;
use super::cpu::Update;
use crate::backend::cuda::{Cuda, Module, module};
use crate::flat::Step;
use crate::flat::cuda::{Prepared, Rule, THREADS, squares};
use candle_core::{Result, Tensor};

static MODULE: Module = module!("muon");

pub(super) fn step(step: &Step<2>, grad_scale: f32, update: &Update) -> Result<()> {
    let cuda = Cuda::of(step.params)?;
    let prepared = Prepared::new(&cuda, step)?;
    if step.params.elem_count() == 0 {
        return Ok(());
    }
    let name = if prepared.packed { "muon_step" } else { "muon_step_any" };
    let launch = MODULE.launch(&cuda, name, prepared.grid, THREADS as u32, 0)?;
    let rule = Rule(update.constants());
    // SAFETY: all buffers are contiguous and have so many elements.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&prepared.buffers).arg(&grad_scale).arg(&rule);
        })
    }
}

/// `x` is contiguous.
pub(super) fn normalize(x: &Tensor) -> Result<()> {
    /// Blocks at most: each adds up the parts of the norm.
    const BLOCKS: usize = 132 * 8;
    let cuda = Cuda::of(x)?;
    let x = cuda.strided(x)?;
    let (partial, parts) = squares(&cuda, &x)?;
    let count = x.tensor.elem_count();
    let blocks = count.div_ceil(4 * THREADS).clamp(1, BLOCKS) as u32;
    let launch = MODULE.launch(&cuda, "muon_normalize", (blocks, 1, 1), THREADS as u32, 0)?;
    let (count, epsilon) = (count as i64, EPSILON as f32);
    // SAFETY: there are so many elements and so many partial sums.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&count).arg(&partial.pointer).arg(&parts).arg(&epsilon);
        })
    }
}
