//! The experts of a few tokens, see `kernel.cu`.

use super::MODULE;
use crate::backend::cuda::{Cuda, by_dtype, is_recording};
use crate::experts::few::{Layer, Options};
use candle_core::{DType, Result, Tensor};

const WARP: u32 = 32;
/// Threads of a block of products, and columns that it has, as in `kernel.cu`.
const THREADS: u32 = 256;
const COLUMNS: usize = 16;

pub(crate) fn layer(weights: &[[&Tensor; 3]], hidden: usize) -> Result<Option<Layer>> {
    let Some([first, ..]) = weights.first() else { return Ok(None) };
    let cuda = Cuda::of(first)?;
    let mut addresses = Vec::with_capacity(3 * weights.len());
    for weight in weights.iter().flatten() {
        let pointer = cuda.strided(weight)?.pointer;
        if !weight.is_contiguous() || !pointer.is_multiple_of(16) {
            return Ok(None);
        }
        addresses.push(pointer as i64);
    }
    let table = Tensor::from_slice(&addresses, addresses.len(), first.device())?;
    let weights = weights.iter().map(|expert| expert.map(Clone::clone)).collect();
    Ok(Some(Layer { weights, hidden, table }))
}

pub(crate) fn forward(
    layer: &Layer,
    x: &Tensor,
    logits: &Tensor,
    options: Options,
) -> Result<Tensor> {
    let Layer { weights, hidden, table } = layer;
    let Options { active, normalized, activation } = options;
    let cuda = Cuda::of(x)?;
    let (tokens, dtype) = (x.dim(0)?, x.dtype());
    let width = weights.first().map_or(Ok(0), |[gate, ..]| gate.dim(0))?;
    let (x, logits, table) =
        (cuda.contiguous(x)?, cuda.contiguous(logits)?, cuda.contiguous(table)?);
    // The table has only their addresses.
    if is_recording() {
        for weight in weights.iter().flatten() {
            cuda.strided(weight)?;
        }
    }
    let choices = tokens * active;
    if choices == 0 {
        return Ok(cuda.zeros((tokens, *hidden), dtype)?.tensor);
    }
    let chosen = cuda.empty((2, choices), DType::U32)?;
    let shares = cuda.empty((tokens, active), DType::F32)?;
    let name = by_dtype!("experts_route", logits.dtype)?;
    let launch = MODULE.launch(&cuda, name, (tokens as u32, 1, 1), WARP, 0)?.overlapping();
    let (count, active, normalized) = (weights.len() as i32, active as i32, i32::from(normalized));
    // SAFETY: there are (tokens, count) logits, two numbers for each choice, and a share of each.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&logits.pointer).arg(&chosen.pointer).arg(&shares.pointer);
            arguments.arg(&count).arg(&active).arg(&normalized);
        })?;
    }
    let size = dtype.size_in_bytes();
    let grid = |columns: usize| (columns.div_ceil(COLUMNS) as u32, choices as u32, 1);
    let unit = cuda.empty((choices, width), dtype)?;
    let name = by_dtype!("experts_unit", dtype)?;
    let launch = MODULE.launch(&cuda, name, grid(width), THREADS, (hidden * size) as u32)?;
    let launch = launch.overlapping();
    let (inner, outer, code) = (*hidden as i32, width as i32, activation.code() as i32);
    // SAFETY: x has (tokens, hidden) elements, the unit (choices, width), and the table the addresses of weights for all experts
    // that were chosen.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&table.pointer).arg(&chosen.pointer);
            arguments.arg(&unit.pointer).arg(&inner).arg(&outer).arg(&active).arg(&code);
        })?;
    }
    let y = cuda.empty((choices, *hidden), dtype)?;
    let name = by_dtype!("experts_down", dtype)?;
    let launch = MODULE.launch(&cuda, name, grid(*hidden), THREADS, (width * size) as u32)?;
    let launch = launch.overlapping();
    // SAFETY: as above; y has (choices, hidden) elements.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&unit.pointer).arg(&table.pointer).arg(&chosen.pointer);
            arguments.arg(&y.pointer).arg(&outer).arg(&inner);
        })?;
    }
    let places = chosen.tensor.get(1)?.reshape((tokens, options.active))?;
    super::combine(&y.tensor, &shares.tensor, &places)
}
