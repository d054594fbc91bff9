//! Softmax on CUDA: a warp or a block has a row, see `kernel.cu`.

use crate::backend::cuda::{ANY_THREADS, Cuda, Module, RowPlan, a_block_a_row, by_dtype, module};
use candle_core::{Result, Tensor};

static MODULE: Module = module!("softmax");

/// Packs of 16 bytes that a thread keeps, as in `kernel.cu`.
const PACKS: usize = 4;

pub(super) fn forward(rows: usize, columns: usize, x: &Tensor) -> Result<Tensor> {
    let cuda = Cuda::of(x)?;
    let x = cuda.contiguous(x)?;
    let name = by_dtype!("softmax_forward", x.dtype)?;
    let y = cuda.empty(x.tensor.shape(), x.dtype)?;
    if rows * columns == 0 {
        return Ok(y.tensor);
    }
    match RowPlan::new(rows, columns, x.dtype, PACKS, &[x.pointer]) {
        Some(plan) => {
            let (rows, columns) = (rows as i64, columns as i32);
            let launch = MODULE.launch(&cuda, name, (plan.grid, 1, 1), plan.block, 0)?;
            // SAFETY: x and y have (rows, columns) elements, and every row has its threads.
            unsafe {
                launch.with(|arguments| {
                    arguments.arg(&x.pointer).arg(&y.pointer).arg(&rows).arg(&columns);
                    arguments.arg(&plan.row_threads);
                })?;
            }
        }
        None => {
            let name = by_dtype!("softmax_forward_any", x.dtype)?;
            let (grid, columns) = (a_block_a_row(rows)?, columns as i64);
            let launch = MODULE.launch(&cuda, name, grid, ANY_THREADS, 0)?;
            // SAFETY: as above, with a block a row.
            unsafe {
                launch.with(|arguments| {
                    arguments.arg(&x.pointer).arg(&y.pointer).arg(&columns);
                })?;
            }
        }
    }
    Ok(y.tensor)
}

pub(super) fn backward(rows: usize, columns: usize, y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let cuda = Cuda::of(y)?;
    let (y, dy) = (cuda.contiguous(y)?, cuda.contiguous(dy)?);
    let name = by_dtype!("softmax_backward", y.dtype)?;
    let dx = cuda.empty(y.tensor.shape(), y.dtype)?;
    if rows * columns == 0 {
        return Ok(dx.tensor);
    }
    match RowPlan::new(rows, columns, y.dtype, PACKS, &[y.pointer, dy.pointer]) {
        Some(plan) => {
            let (rows, columns) = (rows as i64, columns as i32);
            let launch = MODULE.launch(&cuda, name, (plan.grid, 1, 1), plan.block, 0)?;
            // SAFETY: y, dy and dx have (rows, columns) elements, and every row has its threads.
            unsafe {
                launch.with(|arguments| {
                    arguments.arg(&y.pointer).arg(&dy.pointer).arg(&dx.pointer).arg(&rows);
                    arguments.arg(&columns).arg(&plan.row_threads);
                })?;
            }
        }
        None => {
            let name = by_dtype!("softmax_backward_any", y.dtype)?;
            let (grid, columns) = (a_block_a_row(rows)?, columns as i64);
            let launch = MODULE.launch(&cuda, name, grid, ANY_THREADS, 0)?;
            // SAFETY: as above, with a block a row.
            unsafe {
                launch.with(|arguments| {
                    arguments.arg(&y.pointer).arg(&dy.pointer).arg(&dx.pointer).arg(&columns);
                })?;
            }
        }
    }
    Ok(dx.tensor)
}
