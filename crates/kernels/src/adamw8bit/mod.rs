//! AdamW with moments of 8 bits (Dettmers et al. 2021, <https://arxiv.org/abs/2110.02861>), as bitsandbytes
//! keeps them: in blocks of 256 neighbouring elements, each a code of the block's largest.
//!
//! ```text
//! m = signed[m_code]·m_scale     v = unsigned[v_code]·v_scale      then AdamW's step in f32
//! scale ← max |·| of the block   code ← the level nearest to m / m_scale, v / v_scale
//! ```
//!
//! The levels are those of the dynamic data type: seven decades below 1, of which a larger one has more
//! levels, and 0 and 1. Parameters change by the moments before they are rounded. Without any moment the
//! code is that of 0.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::adamw::Options;
use crate::adamw::cpu::Update;
use crate::backend::cpu::require_separate;
use crate::backend::{on_gpu, require_dtype, require_shape, require_together};
use crate::flat::{require_contiguous, require_step, require_within_reach};
use candle_core::{DType, Result, Tensor};
use std::sync::LazyLock;

/// Elements of a block, which share a scale.
pub const BLOCK: usize = 256;
/// Levels of a code.
const LEVELS: usize = 256;

/// What is kept of `(n)` parameters: codes `(n)` u8 and scales `(⌈n / 256⌉)` f32 of both moments. Zeros are a
/// beginning.
#[derive(Clone, Copy, Debug)]
pub struct Moments<'a> {
    /// Of the mean of gradients.
    pub m_codes: &'a Tensor,
    /// Of the mean of gradients.
    pub m_scales: &'a Tensor,
    /// Of the mean of squared gradients.
    pub v_codes: &'a Tensor,
    /// Of the mean of squared gradients.
    pub v_scales: &'a Tensor,
}

/// One step, in place: `params` and `grads` are `(n)` in f32. `step` counts from 1. Gradients are multiplied
/// by `grad_scale` on the way and are zero afterwards. Weight decay applies to all parameters, if `options`
/// has some.
///
/// # Errors
/// When shapes or dtypes don't fit, `step` is 0, two of the tensors share storage, one isn't contiguous, or
/// they aren't on one device. Nothing is changed then.
pub fn step(
    params: &Tensor,
    grads: &Tensor,
    moments: Moments,
    step: usize,
    grad_scale: f32,
    options: &Options,
) -> Result<()> {
    const OPERATION: &str = "adamw8bit::step";
    let Moments { m_codes, m_scales, v_codes, v_scales } = moments;
    let n = params.elem_count();
    let blocks = n.div_ceil(BLOCK);
    let all = [
        ("params", params, n, DType::F32),
        ("grads", grads, n, DType::F32),
        ("m_codes", m_codes, n, DType::U8),
        ("v_codes", v_codes, n, DType::U8),
        ("m_scales", m_scales, blocks, DType::F32),
        ("v_scales", v_scales, blocks, DType::F32),
    ];
    require_together(OPERATION, &[params, grads])?;
    for (_, state, ..) in &all[2..] {
        require_within_reach(OPERATION, params, state)?;
    }
    for (name, tensor, count, dtype) in all {
        require_shape(OPERATION, name, tensor, &[count])?;
        require_dtype(OPERATION, name, tensor, dtype)?;
        require_contiguous(OPERATION, name, tensor)?;
    }
    require_step(OPERATION, step)?;
    for (index, (a, first, ..)) in all.iter().enumerate() {
        for (b, second, ..) in &all[..index] {
            if first.device().same_device(second.device()) {
                require_separate(OPERATION, &format!("{b} and {a}"), first, second)?;
            }
        }
    }
    let update = Update::new(step, options);
    let buffers = Buffers { params, grads, moments };
    on_gpu!(params, gpu => gpu::step(&buffers, grad_scale, &update));
    cpu::step(OPERATION, &buffers, grad_scale, &update)
}

/// Checked tensors of a step.
struct Buffers<'a> {
    params: &'a Tensor,
    grads: &'a Tensor,
    moments: Moments<'a>,
}

/// The levels of signed codes and of unsigned ones, each in ascending order.
struct Levels {
    signed: [f32; LEVELS],
    unsigned: [f32; LEVELS],
}

static TABLES: LazyLock<Levels> =
    LazyLock::new(|| Levels { signed: levels(true), unsigned: levels(false) });

/// `create_dynamic_map` of bitsandbytes: decade `10^(i-6)` has `2^i` levels, or twice as many without a sign,
/// which are the middles of so many equal parts of 0.1 to 1.
fn levels(signed: bool) -> [f32; LEVELS] {
    const DECADES: i32 = 7;
    let mut all = vec![0.0f32, 1.0];
    for decade in 0..DECADES {
        let parts = if signed { 1 << decade } else { 2 << decade };
        let width = 0.9 / f64::from(parts);
        for part in 0..parts {
            let middle = 0.1 + (f64::from(part) + 0.5) * width;
            let level = (middle * 10f64.powi(decade + 1 - DECADES)) as f32;
            all.push(level);
            if signed {
                all.push(-level);
            }
        }
    }
    all.sort_by(f32::total_cmp);
    let mut levels = [0.0; LEVELS];
    for (level, value) in levels.iter_mut().zip(all) {
        *level = value;
    }
    levels
}
