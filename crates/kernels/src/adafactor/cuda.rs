//! A step of Adafactor on CUDA, see `kernel.cu`.

use super::{Buffers, Update};
use crate::backend::cuda::{Cuda, Module, module};
use crate::flat::cuda::Rule;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, bail};

static MODULE: Module = module!("adafactor");

/// As in `kernel.cu`.
const THREADS: usize = 256;
const WARPS: usize = THREADS / 32;
const WIDTH: usize = 32;
const HEIGHT: usize = 32;
/// Blocks that go over all elements at most: as many pairs of sums are added up by each.
const PARTS: usize = 132 * 2;

/// The buffers, as in `kernel.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Pointers {
    params: u64,
    grads: u64,
    row_means: u64,
    column_means: u64,
    mean: u64,
    partial: u64,
    rows: i64,
    columns: i64,
}

// SAFETY: it has the layout of the kernels' struct of that name.
unsafe impl DeviceRepr for Pointers {}

pub(super) fn step(buffers: &Buffers, update: &Update) -> Result<()> {
    let Buffers { params, grads, row_means, column_means, rows, columns } = *buffers;
    let cuda = Cuda::of(params)?;
    let (params, grads) = (cuda.strided(params)?, cuda.strided(grads)?);
    let (row_means, column_means) = (cuda.strided(row_means)?, cuda.strided(column_means)?);
    let parts = (rows * columns).div_ceil(8 * THREADS).min(PARTS);
    let (mean, partial) = (cuda.empty(1, DType::F32)?, cuda.empty(2 * parts, DType::F32)?);
    let pointers = Pointers {
        params: params.pointer,
        grads: grads.pointer,
        row_means: row_means.pointer,
        column_means: column_means.pointer,
        mean: mean.pointer,
        partial: partial.pointer,
        rows: rows as i64,
        columns: columns as i64,
    };
    let constants = Rule(update.constants());
    for (name, blocks, threads) in [
        ("adafactor_rows", rows.div_ceil(WARPS), THREADS),
        ("adafactor_columns", columns.div_ceil(WIDTH) + 1, WIDTH * HEIGHT),
        ("adafactor_measure", parts, THREADS),
        ("adafactor_update", parts, THREADS),
    ] {
        let Ok(blocks) = i32::try_from(blocks) else {
            bail!("metal-candle-kernels: adafactor::step: {rows} rows of {columns} are too many")
        };
        let launch = MODULE.launch(&cuda, name, (blocks as u32, 1, 1), threads as u32, 0)?;
        // SAFETY: all are contiguous and have so many rows and columns, and there is a pair for every part.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&pointers).arg(&constants);
            })?;
        }
    }
    Ok(())
}
