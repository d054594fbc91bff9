//! Choices on Metal, see `kernel.metal`.

use super::gpu::{DRAW_WORDS, Launched, READOUT_WORDS, draw_words, fixed_point, halves};
use super::{Draw, OPERATION};
use crate::backend::metal::{Argument, Metal, by_dtype, size};
use candle_core::{DType, Result, Tensor};

pub(super) fn greedy(logits: &Tensor, (rows, columns): (usize, usize)) -> Result<Tensor> {
    let metal = Metal::of(logits)?;
    let logits = metal.contiguous(logits)?;
    let dims = logits.tensor.dims();
    let ids = metal.empty(&dims[..dims.len() - 1], DType::U32)?;
    let arguments = [
        Argument::Input(&logits),
        Argument::Output(&ids),
        Argument::U32(size(OPERATION, columns)?),
    ];
    let name = by_dtype!("sampling_greedy", logits.dtype)?;
    metal.run(&[metal.by_row(name, rows, columns, &arguments)?])?;
    Ok(ids.tensor)
}

pub(super) fn choose(logits: &Tensor, draws: &[Draw]) -> Result<Launched> {
    let metal = Metal::of(logits)?;
    let device = logits.device();
    let (rows, count) = logits.dims2()?;
    let logits = metal.contiguous(logits)?;
    let (_, unit) = fixed_point(0.0, count);
    let words = draw_words(draws, count, |draw| {
        // Within what f32 divides by, where it isn't greedy.
        let temperature = match draw.options.temperature {
            0.0 => 0.0,
            temperature => (temperature as f32).clamp(f32::MIN_POSITIVE, f32::MAX),
        };
        let top_p = draw.options.top_p;
        let top_p = if top_p < 1.0 { fixed_point(top_p, count).0.max(1) } else { 0 };
        let (uniform, _) = fixed_point(draw.uniform, count);
        let least = draw.options.min_p.ln() as f32;
        let ([a, b], [c, d]) = (halves(top_p), halves(uniform));
        [temperature.to_bits(), least.to_bits(), 0, 0, a, b, c, d]
    })?;
    let length = words.len();
    let words = metal.strided(&Tensor::from_vec(words, length, device)?)?;
    let keys = metal.empty((rows, count), DType::U32)?;
    let result = metal.empty((rows, READOUT_WORDS), DType::U32)?;
    let numbers = [unit as f32];
    let arguments = [
        Argument::Input(&logits),
        Argument::Input(&words),
        Argument::Output(&keys),
        Argument::Output(&result),
        Argument::U32(size(OPERATION, count)?),
        Argument::U32(size(OPERATION, DRAW_WORDS * rows)?),
        Argument::F32s(&numbers),
    ];
    let name = by_dtype!("sampling_choose", logits.dtype)?;
    metal.run(&[metal.by_row(name, rows, count, &arguments)?])?;
    Ok(Launched { words: result.tensor, unit: unit as f64 })
}
