//! Choices on CUDA, see `kernel.cu`.

use super::gpu::{Readout, adjustment_words, fixed_point};
use super::{Adjustment, Choice, OPERATION, Options};
use crate::backend::cuda::{Array, Cuda, Module, by_dtype, module, require_floats};
use candle_core::{DType, Result, Tensor, bail};

static MODULE: Module = module!("sampling");

/// Of greedy choices.
const THREADS: u32 = 1024;
/// `CHOICE_THREADS` in `kernel.cu`, and the most blocks that a choice has.
const CHOICE_THREADS: usize = 512;
/// Logits that a block has at least, but for small vocabularies.
const LEAST_OF_BLOCK: usize = 1024;
/// Keys that a block keeps in shared memory, 48 KiB.
const MOST_INSIDE: usize = 12 * 1024;
/// Bytes of `Exchange` in `kernel.cu`: for each block extremes and three sums, and of five levels of 2048
/// bins masses and counts.
const EXCHANGE: usize = CHOICE_THREADS * (24 + 3 * 8) + 5 * 2048 * (8 + 4);
/// Logits of one choice, so that places fit 32 bits.
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

pub(super) fn choose(
    logits: &Tensor,
    adjustments: &[Adjustment],
    options: &Options,
    uniform: f64,
) -> Result<Choice> {
    require_floats(OPERATION, &[logits])?;
    let count = logits.elem_count();
    if count > MOST {
        bail!("metal-candle-kernels: {OPERATION}: {count} logits on CUDA, expected at most {MOST}")
    }
    let cuda = Cuda::of(logits)?;
    let logits = cuda.contiguous(logits)?;
    let blocks = count.div_ceil(LEAST_OF_BLOCK).min(cuda.multiprocessors()?).min(CHOICE_THREADS);
    let chunk = count.div_ceil(blocks);
    let words = adjustment_words(adjustments);
    let adjusted = (!words.is_empty()).then(|| cuda.upload(&words, words.len())).transpose()?;
    let outside =
        (chunk > MOST_INSIDE).then(|| cuda.empty(blocks * chunk, DType::U32)).transpose()?;
    let exchange = cuda.empty(EXCHANGE / 4, DType::U32)?;
    let result = cuda.empty(Readout::WORDS, DType::U32)?;
    let name = by_dtype!("choose", logits.dtype)?;
    // Asked for whether or not keys are there, as the first launch decides what later ones may have.
    let inside = chunk.min(MOST_INSIDE) as u32 * 4;
    let launch =
        MODULE.launch(&cuda, name, (blocks as u32, 1, 1), CHOICE_THREADS as u32, inside)?;
    let launch = launch.cooperative();
    let pointer = |array: &Option<Array>| array.as_ref().map_or(0, |array| array.pointer);
    let (adjusted_pointer, outside_pointer) = (pointer(&adjusted), pointer(&outside));
    let (vocabulary, chunk) = (count as i32, chunk as i32);
    let adjusted_count = adjustments.len() as i32;
    let top_k = options.bound(count) as u32;
    // Finite, so that a difference of zero stays zero; infinity is greedy.
    let sharpness = match options.temperature {
        0.0 => f64::INFINITY,
        temperature => 1.0 / temperature.max(1e-300),
    };
    let least = options.min_p.ln();
    let (uniform, unit) = fixed_point(uniform, count);
    let unit = unit as f64;
    // SAFETY: as the kernel declares them; the arrays hold what the pointers point into, and no more blocks
    // are launched than the device runs side by side.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&logits.pointer).arg(&vocabulary).arg(&chunk);
            arguments.arg(&adjusted_pointer).arg(&adjusted_count).arg(&outside_pointer);
            arguments.arg(&exchange.pointer).arg(&result.pointer);
            arguments.arg(&sharpness).arg(&top_k).arg(&options.top_p).arg(&least);
            arguments.arg(&uniform).arg(&unit);
        })?;
    }
    Ok(Readout::of(&result.tensor)?.choice(unit))
}
