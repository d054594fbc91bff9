//! Sums, multiples and caps on CUDA: a thread has two packs of elements.

use crate::backend::cuda::{Array, Cuda, Module, by_dtype, module};
use candle_core::{Result, Tensor, bail};

static MODULE: Module = module!("arithmetic");

const THREADS: usize = 256;
/// Vectors of a thread, as in `kernel.cu`.
const AHEAD: usize = 2;

/// Whether the elements can be read as packs, and how many blocks have them all.
fn plan(inputs: &[&Array]) -> Result<(bool, u32)> {
    let count = inputs[0].tensor.elem_count();
    let pack = 16 / inputs[0].dtype.size_in_bytes();
    let packed = inputs.iter().all(|input| input.pointer % 16 == 0);
    let vectors = count / if packed { pack } else { 1 };
    // The first block has what is left over, too.
    let blocks = vectors.div_ceil(AHEAD * THREADS).max(count.min(1));
    match i32::try_from(blocks) {
        Ok(blocks) => Ok((packed, blocks as u32)),
        Err(_) => bail!("metal-candle-kernels: {count} elements are too many for one launch"),
    }
}

pub(super) fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let cuda = Cuda::of(x)?;
    let (x, y) = (cuda.contiguous(x)?, cuda.contiguous(y)?);
    let (packed, grid) = plan(&[&x, &y])?;
    let name = if packed { by_dtype!("add", x.dtype)? } else { by_dtype!("add_any", x.dtype)? };
    let out = cuda.empty(x.tensor.shape(), x.dtype)?;
    let count = x.tensor.elem_count() as i64;
    let launch = MODULE.launch(&cuda, name, (grid, 1, 1), THREADS as u32, 0)?;
    // SAFETY: all three have so many elements.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&y.pointer).arg(&out.pointer).arg(&count);
        })?;
    }
    Ok(out.tensor)
}

pub(super) fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    let (packed, any) = (by_dtype!("scale", x.dtype())?, by_dtype!("scale_any", x.dtype())?);
    with_number(x, (packed, any), factor)
}

pub(super) fn softcap(x: &Tensor, cap: f64) -> Result<Tensor> {
    let (packed, any) = (by_dtype!("softcap", x.dtype())?, by_dtype!("softcap_any", x.dtype())?);
    with_number(x, (packed, any), cap)
}

/// What a kernel, for packs or for any elements, makes of `x` and a number.
fn with_number(
    x: &Tensor,
    (packed_name, any_name): (&'static str, &'static str),
    number: f64,
) -> Result<Tensor> {
    let cuda = Cuda::of(x)?;
    let x = cuda.contiguous(x)?;
    let (packed, grid) = plan(&[&x])?;
    let name = if packed { packed_name } else { any_name };
    let out = cuda.empty(x.tensor.shape(), x.dtype)?;
    let (count, number) = (x.tensor.elem_count() as i64, number as f32);
    let launch = MODULE.launch(&cuda, name, (grid, 1, 1), THREADS as u32, 0)?;
    // SAFETY: both have so many elements.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&number).arg(&out.pointer).arg(&count);
        })?;
    }
    Ok(out.tensor)
}

pub(super) fn scale_by(x: &Tensor, factor: &Tensor) -> Result<Tensor> {
    let cuda = Cuda::of(x)?;
    let (x, factor) = (cuda.contiguous(x)?, cuda.strided(factor)?);
    let (packed, grid) = plan(&[&x])?;
    let name =
        if packed { by_dtype!("scale_by", x.dtype)? } else { by_dtype!("scale_by_any", x.dtype)? };
    let out = cuda.empty(x.tensor.shape(), x.dtype)?;
    let count = x.tensor.elem_count() as i64;
    let launch = MODULE.launch(&cuda, name, (grid, 1, 1), THREADS as u32, 0)?;
    // SAFETY: x and the result have so many elements, and the factor has one.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&factor.pointer).arg(&out.pointer).arg(&count);
        })?;
    }
    Ok(out.tensor)
}

/// Rows of one launch.
const ROWS: usize = 65_535;

pub(super) fn scale_rows(x: &Tensor, factors: &Tensor) -> Result<Tensor> {
    let cuda = Cuda::of(x)?;
    let (n, d) = x.dims2()?;
    let (x, factors) = (cuda.contiguous(x)?, cuda.contiguous(factors)?);
    let out = cuda.empty(x.tensor.shape(), x.dtype)?;
    let Ok(blocks) = u32::try_from(d.div_ceil(AHEAD * THREADS)) else {
        bail!("metal-candle-kernels: {d} columns are too many for one launch")
    };
    let (columns, name) = (d as i64, by_dtype!("scale_rows", x.dtype)?);
    for start in (0..n).step_by(ROWS) {
        let rows = ROWS.min(n - start) as u32;
        let launch = MODULE.launch(&cuda, name, (blocks, rows, 1), THREADS as u32, 0)?;
        let of_row = (start * d * x.dtype.size_in_bytes()) as u64;
        let of_factor = (start * size_of::<f32>()) as u64;
        let (from, to) = (x.pointer + of_row, out.pointer + of_row);
        let factor = factors.pointer + of_factor;
        // SAFETY: x and the result have `n` rows of so many elements, and there are as many factors as rows.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&from).arg(&factor).arg(&to).arg(&columns);
            })?;
        }
    }
    Ok(out.tensor)
}
