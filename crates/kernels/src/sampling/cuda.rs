//! Greedy choices on CUDA.

use super::OPERATION;
use crate::device::cuda::{Cuda, Module, by_dtype, module, require_floats};
use candle_core::{DType, Result, Tensor, bail};

static MODULE: Module = module!("sampling");

const THREADS: u32 = 1024;

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
