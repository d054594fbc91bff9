//! Sums of what experts give on CUDA, see `kernel.cu`.

use crate::backend::cuda::{ANY_THREADS, Cuda, Module, by_dtype, module, require_floats};
use crate::experts::{COMBINE, Gradients};
use candle_core::{DType, Result, Tensor};

pub(super) mod grouped;
pub(super) mod routed;

static MODULE: Module = module!("experts");

pub(super) fn combine(y: &Tensor, weights: &Tensor, places: &Tensor) -> Result<Tensor> {
    require_floats(COMBINE, &[y])?;
    let cuda = Cuda::of(y)?;
    let ((rows, columns), (tokens, active)) = (y.dims2()?, weights.dims2()?);
    let (weights, places) = (cuda.contiguous(weights)?, cuda.contiguous(places)?);
    let y = cuda.contiguous(y)?;
    if rows == 0 || active == 0 {
        return Ok(cuda.zeros((tokens, columns), y.dtype)?.tensor);
    }
    let out = cuda.empty((tokens, columns), y.dtype)?;
    if tokens * columns == 0 {
        return Ok(out.tensor);
    }
    let pack = 16 / y.dtype.size_in_bytes();
    let packed = columns.is_multiple_of(pack) && y.pointer.is_multiple_of(16);
    let (name, vectors) = match packed {
        true => (by_dtype!("experts_combine", y.dtype)?, columns / pack),
        false => (by_dtype!("experts_combine_any", y.dtype)?, columns),
    };
    let grid = (tokens as u32, vectors.div_ceil(ANY_THREADS as usize) as u32, 1);
    let launch = MODULE.launch(&cuda, name, grid, ANY_THREADS, 0)?.overlapping();
    let (rows, columns, active) = (rows as i64, columns as i64, active as i32);
    // SAFETY: y has (rows, columns) elements, weights and places (tokens, active), the result (tokens, columns); places
    // beyond the rows aren't looked up.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&y.pointer).arg(&weights.pointer).arg(&places.pointer);
            arguments.arg(&out.pointer).arg(&rows).arg(&columns).arg(&active);
        })?;
    }
    Ok(out.tensor)
}

pub(super) fn combine_backward(
    y: &Tensor,
    weights: &Tensor,
    places: &Tensor,
    dout: &Tensor,
) -> Result<Gradients> {
    require_floats(COMBINE, &[y])?;
    let cuda = Cuda::of(y)?;
    let ((rows, columns), active) = (y.dims2()?, weights.dim(1)?);
    let dy = cuda.empty((rows, columns), y.dtype())?;
    let dweights = cuda.empty(weights.shape(), DType::F32)?;
    if rows > 0 {
        let (weights, places) = (cuda.contiguous(weights)?, cuda.contiguous(places)?);
        let (y, dout) = (cuda.contiguous(y)?, cuda.contiguous(dout)?);
        let name = by_dtype!("experts_backward", y.dtype)?;
        let launch = MODULE.launch(&cuda, name, (rows as u32, 1, 1), ANY_THREADS, 0)?.overlapping();
        let (rows, columns, active) = (rows as i64, columns as i64, active as i32);
        // SAFETY: y and dy have (rows, columns) elements, weights, places and dweights one a row, and dout a row for each
        // `active` of them; places beyond the rows aren't looked up.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&y.pointer).arg(&weights.pointer).arg(&places.pointer);
                arguments.arg(&dout.pointer).arg(&dy.pointer).arg(&dweights.pointer);
                arguments.arg(&rows).arg(&columns).arg(&active);
            })?;
        }
    }
    Ok(Gradients { dy: dy.tensor, dweights: dweights.tensor })
}
