//! Choices on Metal, see `kernel.metal`.

use super::gpu::{Readout, adjustment_words, fixed_point};
use super::{Adjustment, Choice, OPERATION, Options};
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

pub(super) fn choose(
    logits: &Tensor,
    adjustments: &[Adjustment],
    options: &Options,
    uniform: f64,
) -> Result<Choice> {
    let metal = Metal::of(logits)?;
    let device = logits.device();
    let count = logits.elem_count();
    let logits = metal.contiguous(logits)?;
    let words = adjustment_words(adjustments);
    let adjusted = match words.len() {
        // A kernel has to be given something.
        0 => metal.empty(4, DType::U32)?,
        count => metal.strided(&Tensor::from_vec(words, count, device)?)?,
    };
    let keys = metal.empty(count, DType::U32)?;
    let result = metal.empty(Readout::WORDS, DType::U32)?;
    let (uniform, unit) = fixed_point(uniform, count);
    // Within what f32 divides by, where it isn't greedy.
    let temperature = match options.temperature as f32 {
        _ if options.temperature == 0.0 => 0.0,
        temperature => temperature.clamp(f32::MIN_POSITIVE, f32::MAX),
    };
    let top_p = if options.top_p < 1.0 { fixed_point(options.top_p, count).0.max(1) } else { 0 };
    let numbers = [temperature, options.min_p.ln() as f32, unit as f32];
    let sixty_fourths = [top_p, uniform];
    let arguments = [
        Argument::Input(&logits),
        Argument::Input(&adjusted),
        Argument::Output(&keys),
        Argument::Output(&result),
        Argument::U32(size(OPERATION, count)?),
        Argument::U32(size(OPERATION, adjustments.len())?),
        Argument::U32(size(OPERATION, options.bound(count))?),
        Argument::F32s(&numbers),
        Argument::U64s(&sixty_fourths),
    ];
    let name = by_dtype!("sampling_choose", logits.dtype)?;
    metal.run(&[metal.by_row(name, 1, count, &arguments)?])?;
    Ok(Readout::of(&result.tensor)?.choice(unit as f64))
}
