//! Choices on CUDA, see `kernel.cu`.

use super::gpu::{DRAW_WORDS, Launched, READOUT_WORDS, draw_words, fixed_point, halves};
use super::{Draw, OPERATION};
use crate::backend::cuda::{Cuda, Module, by_dtype, module, require_floats};
use candle_core::{DType, Result, Tensor, bail};

static MODULE: Module = module!("sampling");

/// Of greedy choices.
const THREADS: u32 = 1024;
/// `CHOICE_THREADS` in `kernel.cu`, and the most blocks that a row has.
const CHOICE_THREADS: usize = 512;
/// Logits that a block has at least, but for small vocabularies.
const LEAST_OF_BLOCK: usize = 1024;
/// Keys that a block keeps in shared memory, 48 KiB.
const MOST_INSIDE: usize = 12 * 1024;
/// Rows of a launch.
const MOST_ROWS: usize = 65_535;
/// Bytes of `Exchange` in `kernel.cu`: for each block extremes and three sums, and of five levels of 2048
/// bins masses and counts.
const EXCHANGE: usize = CHOICE_THREADS * (24 + 3 * 8) + 5 * 2048 * (8 + 4);
/// Logits of one row, so that places fit 32 bits.
const MOST: usize = 1 << 30;

pub(super) fn greedy(logits: &Tensor, (rows, columns): (usize, usize)) -> Result<Tensor> {
    require_floats(OPERATION, &[logits])?;
    let (Ok(blocks), Ok(size)) = (i32::try_from(rows), i32::try_from(columns)) else {
        bail!(
            "metal-candle-kernels: {OPERATION}: logits on CUDA have {rows} rows of {columns}, expected fewer than 2^31 of each"
        )
    };
    let cuda = Cuda::of(logits)?;
    let x = cuda.rows(logits)?;
    let ids = cuda.empty(&logits.dims()[..logits.rank() - 1], DType::U32)?;
    let name = by_dtype!("greedy", logits.dtype())?;
    let launch = MODULE.launch(&cuda, name, (blocks as u32, 1, 1), THREADS, 0)?;
    let (pointer, stride) = (x.matrix.pointer, x.matrix.stride as i64);
    let whole = (x.matrix.stride * logits.dtype().size_in_bytes()).is_multiple_of(16);
    let aligned = i32::from(pointer.is_multiple_of(16) && (whole || rows == 1));
    // SAFETY: as the kernel declares them; `x` and `ids` hold what the pointers point into.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&pointer).arg(&stride).arg(&ids.pointer).arg(&size).arg(&aligned);
        })?;
    }
    Ok(ids.tensor)
}

pub(super) fn choose(logits: &Tensor, draws: &[Draw]) -> Result<Launched> {
    require_floats(OPERATION, &[logits])?;
    let (rows, count) = logits.dims2()?;
    if rows > MOST_ROWS || count > MOST {
        bail!(
            "metal-candle-kernels: {OPERATION}: {rows} rows of {count} logits on CUDA, expected at most {MOST_ROWS} of {MOST}"
        )
    }
    let cuda = Cuda::of(logits)?;
    let logits = cuda.contiguous(logits)?;
    // Blocks of a row wait for each other, so all of them have to run side by side, unless each has a row.
    let side_by_side = (cuda.multiprocessors()? / rows).clamp(1, CHOICE_THREADS);
    let blocks = count.div_ceil(LEAST_OF_BLOCK).min(side_by_side);
    // Whole packs, so that blocks begin where they can be read.
    let chunk = count.div_ceil(blocks).next_multiple_of(8);
    let (_, unit) = fixed_point(0.0, count);
    let unit = unit as f64;
    let words = draw_words(draws, count, |draw| {
        // Finite, so that a difference of zero stays zero; infinity is greedy.
        let sharpness = match draw.options.temperature {
            0.0 => f64::INFINITY,
            temperature => 1.0 / temperature.max(1e-300),
        };
        let (uniform, _) = fixed_point(draw.uniform, count);
        let [a, b] = halves(sharpness.to_bits());
        let [c, d] = halves(draw.options.top_p.to_bits());
        let [e, f] = halves(draw.options.min_p.ln().to_bits());
        let [g, h] = halves(uniform);
        [a, b, c, d, e, f, g, h]
    })?;
    let words = cuda.upload(&words, words.len())?;
    let adjustments = words.pointer + (4 * DRAW_WORDS * rows) as u64;
    let needs_keys = |draw: &Draw| draw.options.temperature != 0.0 || !draw.adjustments.is_empty();
    let outside = (chunk > MOST_INSIDE && draws.iter().any(needs_keys))
        .then(|| cuda.empty((rows, blocks * chunk), DType::U32))
        .transpose()?;
    let exchange = cuda.empty((rows, EXCHANGE / 4), DType::U32)?;
    let result = cuda.empty((rows, READOUT_WORDS), DType::U32)?;
    let name = by_dtype!("choose", logits.dtype)?;
    // Asked for whether or not keys are there, as the first launch decides what later ones may have.
    let inside = chunk.min(MOST_INSIDE) as u32 * 4;
    let grid = (blocks as u32, rows as u32, 1);
    let launch = MODULE.launch(&cuda, name, grid, CHOICE_THREADS as u32, inside)?;
    let launch = if blocks > 1 { launch.cooperative() } else { launch };
    let outside_pointer = outside.as_ref().map_or(0, |array| array.pointer);
    let (vocabulary, chunk) = (count as i32, chunk as i32);
    // SAFETY: as the kernel declares them; the arrays hold what the pointers point into, and no more blocks
    // are launched than the device runs side by side where they wait.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&logits.pointer).arg(&vocabulary).arg(&chunk);
            arguments.arg(&words.pointer).arg(&adjustments).arg(&outside_pointer);
            arguments.arg(&exchange.pointer).arg(&result.pointer).arg(&unit);
        })?;
    }
    Ok(Launched { words: result.tensor, unit })
}
