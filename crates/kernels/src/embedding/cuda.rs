//! Embedding on CUDA, see `kernel.cu`.

use super::OPERATION;
use crate::backend::cuda::{Cuda, Module, by_dtype, module};
use candle_core::{DType, Result, Tensor, bail};

static MODULE: Module = module!("embedding");

const THREADS: usize = 256;
/// Columns of a block in the backward pass, as in `kernel.cu`.
const COLUMNS: usize = 1024;

pub(super) fn forward(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let cuda = Cuda::of(table)?;
    let (vocabulary, columns) = table.dims2()?;
    let (batch, seq) = ids.dims2()?;
    let (table, ids) = (cuda.contiguous(table)?, cuda.contiguous(ids)?);
    by_dtype!("embedding", table.dtype)?;
    let out = cuda.empty((batch, seq, columns), table.dtype)?;
    if out.tensor.elem_count() == 0 {
        return Ok(out.tensor);
    }
    // A row is copied by the widest numbers that fit.
    let bytes = columns * table.dtype.size_in_bytes();
    let fits =
        |width: usize| bytes.is_multiple_of(width) && table.pointer.is_multiple_of(width as u64);
    let (name, width) = if fits(16) {
        ("embedding_forward_16", bytes / 16)
    } else if fits(4) {
        ("embedding_forward_4", bytes / 4)
    } else {
        ("embedding_forward_2", bytes / 2)
    };
    let block = width.next_multiple_of(32).min(THREADS) as u32;
    let launch = MODULE.launch(&cuda, name, ((batch * seq) as u32, 1, 1), block, 0)?;
    let (width, vocabulary) = (width as i64, vocabulary as i64);
    // SAFETY: the table has (vocabulary, columns) elements and the result (batch·seq, columns); ids
    // beyond the table aren't looked up.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&table.pointer).arg(&ids.pointer).arg(&out.pointer).arg(&width);
            arguments.arg(&vocabulary);
        })?;
    }
    Ok(out.tensor)
}

pub(super) fn backward(dy: &Tensor, ids: &Tensor, vocabulary: usize) -> Result<Tensor> {
    let gradient = Cuda::of(dy)?.zeros((vocabulary, dy.dim(2)?), DType::F32)?.tensor;
    accumulate(&gradient, dy, ids)?;
    Ok(gradient)
}

/// `gradient` is contiguous.
pub(super) fn accumulate(gradient: &Tensor, dy: &Tensor, ids: &Tensor) -> Result<()> {
    let cuda = Cuda::of(dy)?;
    let (vocabulary, columns) = gradient.dims2()?;
    let (dy, ids) = (cuda.contiguous(dy)?, cuda.contiguous(ids)?);
    let (any, packed) = (
        by_dtype!("embedding_backward_any", dy.dtype)?,
        by_dtype!("embedding_backward", dy.dtype)?,
    );
    if dy.tensor.elem_count() == 0 || vocabulary == 0 {
        return Ok(());
    }
    let gradient = cuda.strided(gradient)?;
    let count = ids.tensor.elem_count();
    let (Ok(positions), chunks) = (i32::try_from(count), columns.div_ceil(COLUMNS)) else {
        bail!("metal-candle-kernels: {OPERATION}: {count} ids are too many for one launch")
    };
    let (positions, vocabulary) = (positions as u32, vocabulary as i64);
    let found = cuda.zeros((2, vocabulary as usize), DType::U32)?;
    let grid = (positions.div_ceil(THREADS as u32), 1, 1);
    let launch = MODULE.launch(&cuda, "embedding_count", grid, THREADS as u32, 0)?;
    // SAFETY: there are so many ids, and two numbers for every one below `vocabulary`.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&ids.pointer).arg(&positions).arg(&vocabulary).arg(&found.pointer);
        })?;
    }
    let vectors = columns.is_multiple_of(4)
        && gradient.pointer.is_multiple_of(16)
        && dy.pointer.is_multiple_of(4 * dy.dtype.size_in_bytes() as u64);
    let name = if vectors { packed } else { any };
    let grid = (positions, chunks as u32, 1);
    let launch = MODULE.launch(&cuda, name, grid, THREADS as u32, 0)?;
    let columns = columns as i64;
    // SAFETY: dy has (positions, columns) elements and the gradient (vocabulary, columns).
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&dy.pointer).arg(&ids.pointer).arg(&found.pointer);
            arguments.arg(&gradient.pointer).arg(&positions).arg(&columns).arg(&vocabulary);
        })
    }
}
