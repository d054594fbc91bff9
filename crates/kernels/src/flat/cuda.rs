//! The passes over flat gradients on CUDA, see `kernel.cu`, and the host's side of `flat.cuh`.

use super::{Clip as Clipped, Step};
use crate::backend::cuda::{Array, Cuda, Module, by_dtype, module};
use crate::backend::require_dtype;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor, bail};

static MODULE: Module = module!("flat");

/// As in `flat.cuh`.
pub(crate) const THREADS: usize = 256;
/// Vectors of a thread, as in `kernel.cu`.
const AHEAD: usize = 2;
/// Additions of a launch, as in `kernel.cu`.
const MOST_ADDITIONS: usize = 32;
/// Blocks that add up squares, at most: as many numbers are added up afterwards.
const PARTS: usize = 1024;
/// Blocks of a step, at most: what the multiprocessors of an H200 hold at once.
const STEP_BLOCKS: usize = 132 * 8;

/// The buffers of a step, as in `flat.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Buffers {
    params: u64,
    grads: u64,
    states: [u64; 2],
    count: i64,
    decayed: i64,
}

// SAFETY: it has the layout of the kernels' struct of that name.
unsafe impl DeviceRepr for Buffers {}

/// The norm, in parts, and what gradients are clipped to, as in `flat.cuh`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Clip {
    partial: u64,
    max_norm: f64,
    norm: u64,
    parts: i32,
}

// SAFETY: as above.
unsafe impl DeviceRepr for Clip {}

/// What is the same for all elements of a step, in the order of the kernel's struct.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct Rule<const COUNT: usize>(pub(crate) [f32; COUNT]);

// SAFETY: the kernels' structs have nothing but so many floats.
unsafe impl<const COUNT: usize> DeviceRepr for Rule<COUNT> {}

/// The buffers of a step, which live as long as this.
pub(crate) struct Prepared {
    /// Holds the memory.
    _arrays: Vec<Array>,
    pub(crate) buffers: Buffers,
    /// Whether vectors of 4 may be loaded.
    pub(crate) packed: bool,
    pub(crate) grid: (u32, u32, u32),
}

impl Prepared {
    pub(crate) fn new<const STATES: usize>(cuda: &Cuda, step: &Step<STATES>) -> Result<Prepared> {
        let (params, grads) = (cuda.strided(step.params)?, cuda.contiguous(step.grads)?);
        let mut states = [0; 2];
        let mut arrays = Vec::new();
        for (state, (_, tensor)) in states.iter_mut().zip(&step.states) {
            let array = cuda.within_reach(tensor)?;
            *state = array.pointer;
            arrays.push(array);
        }
        let count = step.params.elem_count();
        let buffers = Buffers {
            params: params.pointer,
            grads: grads.pointer,
            states,
            count: count as i64,
            decayed: step.decayed as i64,
        };
        arrays.extend([params, grads]);
        let packed = arrays.iter().all(|array| array.pointer.is_multiple_of(16));
        let vectors = count.div_ceil(if packed { 4 } else { 1 });
        let blocks = vectors.div_ceil(AHEAD * THREADS).clamp(1, STEP_BLOCKS);
        Ok(Prepared { _arrays: arrays, buffers, packed, grid: (blocks as u32, 1, 1) })
    }
}

/// The norm of gradients in parts, and where it is left.
pub(crate) struct Norm {
    /// Holds the memory.
    _partial: Array,
    norm: Array,
    pub(crate) clip: Clip,
}

impl Norm {
    /// `grads` are contiguous.
    pub(crate) fn new(cuda: &Cuda, grads: &Tensor, max_norm: Option<f64>) -> Result<Norm> {
        let (partial, parts) = squares(cuda, &cuda.strided(grads)?)?;
        let norm = cuda.empty((), DType::F32)?;
        let clip = Clip {
            partial: partial.pointer,
            max_norm: max_norm.unwrap_or(f64::INFINITY),
            norm: norm.pointer,
            parts,
        };
        Ok(Norm { _partial: partial, norm, clip })
    }

    /// The norm as a scalar f32, once a kernel has left it.
    pub(crate) fn into_tensor(self) -> Tensor {
        self.norm.tensor
    }
}

/// A step of all elements by the kernel `names` (for vectors, and for any address) with these
/// constants. The norm
/// of the gradients as a scalar f32; all buffers are contiguous.
pub(crate) fn clipped_step<const STATES: usize, const COUNT: usize>(
    module: &Module,
    names: [&'static str; 2],
    step: &Step<STATES>,
    clip: Clipped,
    constants: [f32; COUNT],
) -> Result<Tensor> {
    let cuda = Cuda::of(step.params)?;
    let norm = Norm::new(&cuda, step.clipped(clip), clip.max_norm)?;
    let prepared = Prepared::new(&cuda, step)?;
    let [vectors, any] = names;
    let name = if prepared.packed { vectors } else { any };
    let launch = module.launch(&cuda, name, prepared.grid, THREADS as u32, 0)?;
    let rule = Rule(constants);
    // SAFETY: all buffers have so many elements, and there are so many partial sums.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&prepared.buffers).arg(&norm.clip).arg(&rule);
        })?;
    }
    Ok(norm.into_tensor())
}

pub(super) fn norm(grads: &Tensor) -> Result<f64> {
    let cuda = Cuda::of(grads)?;
    let grads = cuda.contiguous(grads)?;
    let (partial, parts) = squares(&cuda, &grads)?;
    let norm = cuda.empty((), DType::F64)?;
    let launch = MODULE.launch(&cuda, "flat_norm", (1, 1, 1), THREADS as u32, 0)?;
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
pub(crate) fn squares(cuda: &Cuda, grads: &Array) -> Result<(Array, i32)> {
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

/// Each `dst` is contiguous. What overlaps, and so has an order, isn't one launch.
pub(super) fn accumulate(operation: &str, pairs: &[(&Tensor, &Tensor)], scale: f64) -> Result<()> {
    let Some((first, _)) = pairs.first() else { return Ok(()) };
    let cuda = Cuda::of(first)?;
    let mut together = Additions::default();
    for (dst, src) in pairs {
        require_dtype(operation, "dst", dst, DType::F32)?;
        let count = dst.elem_count();
        let (dst, src) = (cuda.strided(dst)?, cuda.contiguous(src)?);
        let packed = dst.pointer.is_multiple_of(16)
            && src.pointer.is_multiple_of(4 * src.dtype.size_in_bytes() as u64);
        let name = if packed {
            by_dtype!("accumulate", src.dtype)?
        } else {
            by_dtype!("accumulate_any", src.dtype)?
        };
        let vectors = count.div_ceil(if packed { 4 } else { 1 });
        let one = Addition { destination: dst.pointer, source: src.pointer, count: count as i64 };
        if !together.takes(name, &one) {
            std::mem::take(&mut together).launch(&cuda, scale)?;
        }
        together.name = name;
        together.vectors = together.vectors.max(vectors);
        together.at[together.arrays.len()] = one;
        together.arrays.push([dst, src]);
    }
    together.launch(&cuda, scale)
}

/// A gradient and the part of a buffer that it is added to, as in `kernel.cu`.
#[derive(Clone, Copy, Default)]
#[repr(C)]
struct Addition {
    destination: u64,
    source: u64,
    count: i64,
}

impl Addition {
    fn overlaps(&self, other: &Self) -> bool {
        let end = |one: &Self| one.destination + one.count as u64 * size_of::<f32>() as u64;
        self.destination < end(other) && other.destination < end(self)
    }
}

// SAFETY: it has the layout of the kernels' struct of that name.
unsafe impl DeviceRepr for Addition {}

/// What one launch adds.
#[derive(Default)]
struct Additions {
    name: &'static str,
    at: [Addition; MOST_ADDITIONS],
    /// Vectors of the largest.
    vectors: usize,
    /// Holds the memory.
    arrays: Vec<[Array; 2]>,
}

impl Additions {
    fn takes(&self, name: &str, one: &Addition) -> bool {
        let there = &self.at[..self.arrays.len()];
        there.is_empty()
            || there.len() < MOST_ADDITIONS
                && self.name == name
                && !there.iter().any(|other| other.overlaps(one))
    }

    fn launch(self, cuda: &Cuda, scale: f64) -> Result<()> {
        if self.vectors == 0 {
            return Ok(());
        }
        let Ok(blocks) = i32::try_from(self.vectors.div_ceil(AHEAD * THREADS)) else {
            bail!("metal-candle-kernels: {} vectors are too many for one launch", self.vectors)
        };
        let grid = (blocks as u32, self.arrays.len() as u32, 1);
        let launch = MODULE.launch(cuda, self.name, grid, THREADS as u32, 0)?.overlapping();
        let scale = scale as f32;
        // SAFETY: all are contiguous and have so many elements.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.at).arg(&scale);
            })
        }
    }
}

/// `dst` is contiguous.
pub(super) fn fill_zero(dst: &Tensor) -> Result<()> {
    let cuda = Cuda::of(dst)?;
    cuda.clear(&cuda.strided(dst)?)
}
