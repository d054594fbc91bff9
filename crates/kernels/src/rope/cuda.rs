//! Rotary embedding on CUDA: a block has a token, see `kernel.cu`.

use crate::backend::cuda::{Cuda, Module, by_dtype, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor};

static MODULE: Module = module!("rope");

const THREADS: usize = 256;

/// A tensor as `kernel.cu` takes it.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Rotated {
    x: u64,
    y: u64,
    strides: [i64; 3],
    heads: i64,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Both {
    at: [Rotated; 2],
}

// SAFETY: it has the layout of the kernels' struct of that name.
unsafe impl DeviceRepr for Both {}

/// One or two tensors that differ in their heads alone.
pub(super) fn rotate(
    xs: &[&Tensor],
    cos: &Tensor,
    sin: &Tensor,
    inverse: bool,
) -> Result<Vec<Tensor>> {
    let [first, ..] = xs else { return Ok(Vec::new()) };
    let (cuda, dtype) = (Cuda::of(first)?, first.dtype());
    let (batch, seq, _, head_dim) = first.dims4()?;
    let half = cos.dim(2)?;
    let (any, packed) = (by_dtype!("rope_any", dtype)?, by_dtype!("rope", dtype)?);
    let (cos, sin) = (cuda.contiguous_as(cos, DType::F32)?, cuda.contiguous_as(sin, DType::F32)?);
    let pack = 16 / dtype.size_in_bytes();
    let mut fits = half.is_multiple_of(pack)
        && head_dim.is_multiple_of(pack)
        && [cos.pointer, sin.pointer].iter().all(|address| address % 16 == 0);
    let (mut both, mut most_heads) = (Both::default(), 0);
    let (mut inputs, mut outputs) = (Vec::with_capacity(2), Vec::with_capacity(2));
    for (x, rotated) in xs.iter().zip(&mut both.at) {
        let x = cuda.strided_rows(x)?;
        let y = cuda.empty(x.tensor.shape(), dtype)?;
        let heads = x.tensor.dim(2)?;
        let strides = [x.stride(0), x.stride(1), x.stride(2)];
        fits =
            fits && x.pointer % 16 == 0 && strides.iter().all(|stride| stride % pack as i64 == 0);
        *rotated = Rotated { x: x.pointer, y: y.pointer, strides, heads: heads as i64 };
        most_heads = most_heads.max(heads);
        inputs.push(x);
        outputs.push(y.tensor);
    }
    if batch * seq * head_dim * most_heads == 0 {
        return Ok(outputs);
    }
    let vector = if fits { pack } else { 1 };
    let units = half / vector + (head_dim - 2 * half) / vector;
    // Threads that have a head, and heads that a block has at a time: half of them, so that a thread
    // uses its cosines and sines twice.
    let lanes = units.min(THREADS);
    let at_once = most_heads.div_ceil(2).min(THREADS / lanes).max(1);
    let name = if fits { packed } else { any };
    let grid = ((batch * seq) as u32, inputs.len() as u32, 1);
    let launch = MODULE.launch(&cuda, name, grid, (lanes * at_once) as u32, 0)?.overlapping();
    let [seq, head_dim, half, lanes] = [seq, head_dim, half, lanes].map(|size| size as i32);
    let sign = if inverse { -1.0f32 } else { 1.0 };
    // SAFETY: every x has these sizes and strides, every y is contiguous, and the angles are
    // (batch, seq, half).
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&both).arg(&cos.pointer).arg(&sin.pointer).arg(&seq).arg(&head_dim);
            arguments.arg(&half).arg(&lanes).arg(&sign);
        })?;
    }
    Ok(outputs)
}
