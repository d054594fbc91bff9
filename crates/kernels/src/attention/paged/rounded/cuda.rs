//! Rounding to 8 bits on CUDA; see kernel.cu.

use super::{GROUP, RoundedPool};
use crate::backend::cuda::{Cuda, Module, by_dtype, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{Result, Tensor, bail};

static MODULE: Module = module!("rounded");

const THREADS: usize = 256;
const MOST_BLOCKS: usize = 4096;

/// `Rounding` in kernel.cu, field by field.
#[repr(C)]
#[derive(Clone, Copy)]
struct Rounding {
    rows: [u64; 2],
    codes: [u64; 2],
    scales: [u64; 2],
    token_strides: [i64; 2],
    head_strides: [i64; 2],
    places: u64,
    tokens: i64,
    room: i64,
    heads: i32,
    head_dim: i32,
}

// SAFETY: plain numbers, laid out as in C.
unsafe impl DeviceRepr for Rounding {}

pub(super) fn write_both(
    operation: &str,
    pools: [&RoundedPool; 2],
    rows: [&Tensor; 2],
    places: &Tensor,
) -> Result<()> {
    let cuda = Cuda::of(rows[0])?;
    let (tokens, heads, head_dim) = rows[0].dims3()?;
    let name = by_dtype!("round_rows", rows[0].dtype())?;
    let [first, second] = rows.map(|rows| cuda.strided_rows(rows));
    let rows = [first?, second?];
    let [first, second] = pools.map(|pool| cuda.strided(&pool.codes));
    let codes = [first?, second?];
    let [first, second] = pools.map(|pool| cuda.strided(&pool.scales));
    let scales = [first?, second?];
    let places = cuda.contiguous(places)?;
    let (blocks, block, ..) = codes[0].tensor.dims4()?;
    let number = |value: usize| match i32::try_from(value) {
        Ok(value) => Ok(value),
        Err(_) => {
            bail!("metal-candle-kernels: {operation}: {value} of something are too many on CUDA")
        }
    };
    let rounding = Rounding {
        rows: rows.each_ref().map(|rows| rows.pointer),
        codes: codes.each_ref().map(|codes| codes.pointer),
        scales: scales.each_ref().map(|scales| scales.pointer),
        token_strides: rows.each_ref().map(|rows| rows.stride(0)),
        head_strides: rows.each_ref().map(|rows| rows.stride(1)),
        places: places.pointer,
        tokens: tokens as i64,
        room: (blocks * block) as i64,
        heads: number(heads)?,
        head_dim: number(head_dim)?,
    };
    let groups = tokens * heads * head_dim.div_ceil(GROUP);
    let grid = (groups.div_ceil(THREADS / 32).min(MOST_BLOCKS) as u32, 2, 1);
    let launch = MODULE.launch(&cuda, name, grid, THREADS as u32, 0)?.overlapping();
    // SAFETY: the rows and pools are found by the shapes and strides of their tensors, and the kernel leaves out what
    // has no room.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&rounding);
        })
    }
}
