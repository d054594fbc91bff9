//! Rotary embedding on CUDA: a block has a token, see `kernel.cu`.

use crate::device::cuda::{Cuda, Module, by_dtype, module};
use candle_core::{DType, Result, Tensor};

static MODULE: Module = module!("rope");

const THREADS: usize = 256;

pub(super) fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor, inverse: bool) -> Result<Tensor> {
    let cuda = Cuda::of(x)?;
    let (batch, seq, heads, head_dim) = x.dims4()?;
    let half = cos.dim(2)?;
    let x = cuda.strided_rows(x)?;
    let (any, packed) = (by_dtype!("rope_any", x.dtype)?, by_dtype!("rope", x.dtype)?);
    let y = cuda.empty(x.tensor.shape(), x.dtype)?;
    if x.tensor.elem_count() == 0 {
        return Ok(y.tensor);
    }
    let (cos, sin) = (cuda.contiguous_as(cos, DType::F32)?, cuda.contiguous_as(sin, DType::F32)?);
    let strides = [x.stride(0), x.stride(1), x.stride(2)];
    let pack = 16 / x.dtype.size_in_bytes();
    let fits = half.is_multiple_of(pack)
        && head_dim.is_multiple_of(pack)
        && strides.iter().all(|stride| stride % pack as i64 == 0)
        && [x.pointer, cos.pointer, sin.pointer].iter().all(|address| address % 16 == 0);
    let vector = if fits { pack } else { 1 };
    let units = half / vector + (head_dim - 2 * half) / vector;
    // Threads that have a head, and heads that a block has at a time: half of them, so that a thread
    // uses its cosines and sines twice.
    let lanes = units.min(THREADS);
    let at_once = heads.div_ceil(2).min(THREADS / lanes).max(1);
    let name = if fits { packed } else { any };
    let grid = ((batch * seq) as u32, 1, 1);
    let launch = MODULE.launch(&cuda, name, grid, (lanes * at_once) as u32, 0)?;
    let sizes = [seq, heads, head_dim, half].map(|size| size as i32);
    let (lanes, sign) = (lanes as i32, if inverse { -1.0f32 } else { 1.0 });
    // SAFETY: x has these sizes and strides, y is contiguous, and the angles are (batch, seq, half).
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&cos.pointer).arg(&sin.pointer).arg(&y.pointer);
            sizes.iter().for_each(|size| {
                arguments.arg(size);
            });
            strides.iter().for_each(|stride| {
                arguments.arg(stride);
            });
            arguments.arg(&lanes).arg(&sign);
        })?;
    }
    Ok(y.tensor)
}
