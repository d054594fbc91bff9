//! The passes over flat parameters on CUDA, see `kernel.cu`.

use super::cpu;
use crate::device::cuda::{Array, Cuda, Module, by_dtype, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor, bail};

static MODULE: Module = module!("adamw");

const THREADS: usize = 256;
/// Vectors of a thread, as in `kernel.cu`.
const AHEAD: usize = 2;
/// Blocks that add up squares, at most: as many numbers are added up afterwards.
const PARTS: usize = 1024;
/// Blocks of a step, at most: what the multiprocessors of an H200 hold at once.
const STEP_BLOCKS: usize = 132 * 8;

/// What is the same for all elements of one step, as in `kernel.cu`.
#[derive(Clone, Copy)]
#[repr(C)]
struct Update {
    decay: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    epsilon: f32,
    step_size: f32,
    correction: f32,
    decayed: i64,
}

// SAFETY: it has the layout of the kernels' struct of that name.
unsafe impl DeviceRepr for Update {}

impl Update {
    fn new(update: &cpu::Update) -> Update {
        Update {
            decay: update.decay as f32,
            one_minus_beta1: (1.0 - update.beta1) as f32,
            beta2: update.beta2 as f32,
            one_minus_beta2: (1.0 - update.beta2) as f32,
            epsilon: update.epsilon as f32,
            step_size: update.step_size as f32,
            correction: update.correction as f32,
            decayed: update.decayed as i64,
        }
    }
}

/// `params`, `grads`, `m` and `v`, and how they are gone over.
struct Buffers {
    addresses: [u64; 4],
    count: i64,
    packed: bool,
    grid: (u32, u32, u32),
}

impl Buffers {
    fn new([params, grads, m, v]: [&Array; 4]) -> Buffers {
        let addresses = [params.pointer, grads.pointer, m.pointer, v.pointer];
        let count = params.tensor.elem_count();
        let packed = addresses.iter().all(|address| address % 16 == 0);
        let vectors = count.div_ceil(if packed { 4 } else { 1 });
        let blocks = vectors.div_ceil(AHEAD * THREADS).clamp(1, STEP_BLOCKS);
        Buffers { addresses, count: count as i64, packed, grid: (blocks as u32, 1, 1) }
    }
}

pub(super) fn step(
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    v: &Tensor,
    update: &cpu::Update,
) -> Result<()> {
    let cuda = Cuda::of(params)?;
    let (params, grads) = (cuda.strided(params)?, cuda.contiguous(grads)?);
    let (m, v) = (cuda.strided(m)?, cuda.strided(v)?);
    let buffers = Buffers::new([&params, &grads, &m, &v]);
    if buffers.count == 0 {
        return Ok(());
    }
    let name = if buffers.packed { "adamw_step" } else { "adamw_step_any" };
    let launch = MODULE.launch(&cuda, name, buffers.grid, THREADS as u32, 0)?;
    let (grad_scale, update) = (update.grad_scale as f32, Update::new(update));
    // SAFETY: all four are contiguous and have so many elements.
    unsafe {
        launch.with(|arguments| {
            buffers.addresses.iter().for_each(|address| {
                arguments.arg(address);
            });
            arguments.arg(&buffers.count).arg(&grad_scale).arg(&update);
        })
    }
}

/// The norm of the gradients as a scalar f32; all buffers are contiguous.
pub(super) fn clipped_step(
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    v: &Tensor,
    max_norm: Option<f64>,
    update: &cpu::Update,
) -> Result<Tensor> {
    let cuda = Cuda::of(params)?;
    let (params, grads) = (cuda.strided(params)?, cuda.strided(grads)?);
    let (m, v) = (cuda.strided(m)?, cuda.strided(v)?);
    let (partial, parts) = squares(&cuda, &grads)?;
    let norm = cuda.empty((), DType::F32)?;
    let buffers = Buffers::new([&params, &grads, &m, &v]);
    let name = if buffers.packed { "adamw_clipped_step" } else { "adamw_clipped_step_any" };
    let launch = MODULE.launch(&cuda, name, buffers.grid, THREADS as u32, 0)?;
    let (max_norm, update) = (max_norm.unwrap_or(f64::INFINITY), Update::new(update));
    // SAFETY: all four have so many elements, and there are so many partial sums.
    unsafe {
        launch.with(|arguments| {
            buffers.addresses.iter().for_each(|address| {
                arguments.arg(address);
            });
            arguments.arg(&buffers.count).arg(&partial.pointer).arg(&parts).arg(&max_norm);
            arguments.arg(&update).arg(&norm.pointer);
        })?;
    }
    Ok(norm.tensor)
}

pub(super) fn norm(grads: &Tensor) -> Result<f64> {
    let cuda = Cuda::of(grads)?;
    let grads = cuda.contiguous(grads)?;
    let (partial, parts) = squares(&cuda, &grads)?;
    let norm = cuda.empty((), DType::F64)?;
    let launch = MODULE.launch(&cuda, "adamw_norm", (1, 1, 1), THREADS as u32, 0)?;
    // SAFETY: there are so many partial sums, and the result is one number.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&partial.pointer).arg(&parts).arg(&norm.pointer);
        })?;
    }
    norm.tensor.to_scalar()
}

/// Sums of squares of parts of a contiguous tensor in f64, and their number, which depends on the number
/// of elements alone.
fn squares(cuda: &Cuda, grads: &Array) -> Result<(Array, i32)> {
    let count = grads.tensor.elem_count();
    let packed = grads.pointer.is_multiple_of(16);
    let name = if packed {
        by_dtype!("squares", grads.dtype)?
    } else {
        by_dtype!("squares_any", grads.dtype)?
    };
    let parts = count.div_ceil(16 * THREADS).clamp(1, PARTS);
    let partial = cuda.empty(parts, DType::F64)?;
    let launch = MODULE.launch(cuda, name, (parts as u32, 1, 1), THREADS as u32, 0)?;
    let count = count as i64;
    // SAFETY: there are so many gradients, and a partial sum for every block.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&grads.pointer).arg(&count).arg(&partial.pointer);
        })?;
    }
    Ok((partial, parts as i32))
}

/// `dst` is contiguous.
pub(super) fn accumulate(dst: &Tensor, src: &Tensor, scale: f64) -> Result<()> {
    let cuda = Cuda::of(dst)?;
    let (dst, src) = (cuda.strided(dst)?, cuda.contiguous(src)?);
    let packed = dst.pointer.is_multiple_of(16)
        && src.pointer.is_multiple_of(4 * src.dtype.size_in_bytes() as u64);
    let name = if packed {
        by_dtype!("accumulate", src.dtype)?
    } else {
        by_dtype!("accumulate_any", src.dtype)?
    };
    let count = dst.tensor.elem_count();
    let vectors = count / if packed { 4 } else { 1 };
    // The first block has what is left over, too.
    let blocks = vectors.div_ceil(AHEAD * THREADS).max(count.min(1));
    let Ok(blocks) = i32::try_from(blocks) else {
        bail!("metal-candle-kernels: {count} elements are too many for one launch")
    };
    let launch =
        MODULE.launch(&cuda, name, (blocks as u32, 1, 1), THREADS as u32, 0)?.overlapping();
    let (count, scale) = (count as i64, scale as f32);
    // SAFETY: both are contiguous and have so many elements.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&dst.pointer).arg(&src.pointer).arg(&scale).arg(&count);
        })
    }
}

/// `dst` is contiguous.
pub(super) fn fill_zero(dst: &Tensor) -> Result<()> {
    let cuda = Cuda::of(dst)?;
    cuda.clear(&cuda.strided(dst)?)
}
