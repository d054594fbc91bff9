//! Linear layers on CUDA: own kernels for a few rows, cuBLAS for more.

use super::with_last_dimension;
use crate::backend::cuda::{Array, Cuda, Matrix, Module, by_dtype, module, require_floats};
use crate::quantized::{Quantized, cuda as packed};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{D, DType, Result, Tensor, bail};

static MODULE: Module = module!("matmul");

/// Threads of a block of every kernel here.
const THREADS: usize = 256;
const WARPS: usize = THREADS / 32;
/// Blocks that a multiprocessor has at once.
const BLOCKS_AT_ONCE: usize = 2;

/// Up to here the own kernels are for: with 8 rows, a step of an 8B model in bf16 takes 5.3 ms by cuBLAS on an H200,
/// and 8.3 by them.
const FEW_ROWS: usize = 4;

/// Projections of one launch.
const MOST: usize = 4;

/// Blocks that compute x·A together.
const CLUSTER: usize = 4;

/// The largest rank of an adapter that the kernels for a few rows take.
const MOST_RANKS: usize = THREADS;

/// Shared memory that x·A takes at most, and what the kernel in clusters takes with room to add it up, of which
/// an A100 and an H100 have twice as much for the two blocks of a multiprocessor.
const SHARED: usize = 48 << 10;
const CLUSTERED_SHARED: usize = 80 << 10;

/// Bytes of A that all clusters together may read before x·A is worth a launch of its own, which takes
/// about as long as reading them from the GPU's shared cache.
const READ_TWICE: usize = 12 << 20;

/// A linear layer with or without an adapter.
pub(crate) struct Layer {
    /// `(outer, inner)` in the dtype of x.
    pub(crate) weight: Matrix,
    pub(crate) outer: usize,
    /// `(outer)`, contiguous, in the dtype of x.
    pub(crate) bias: Option<u64>,
    pub(crate) adapter: Option<Adapter>,
}

/// A low-rank adapter, contiguous and in f32.
pub(crate) struct Adapter {
    /// `(inner, rank)`
    pub(crate) a: u64,
    /// `(rank, outer)`
    pub(crate) b: u64,
    pub(crate) rank: usize,
    pub(crate) scale: f64,
}

/// As the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Projection {
    weight: u64,
    bias: u64,
    a: u64,
    b: u64,
    y: u64,
    stride: i64,
    outer: i32,
    rank: i32,
    first_task: i32,
    column: i32,
    scale: f32,
    unused: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Projections {
    at: [Projection; MOST],
    count: i32,
    ranks: i32,
    tasks: i32,
    aligned: i32,
}

// SAFETY: it is plain numbers, laid out as the kernels declare them.
unsafe impl DeviceRepr for Projections {}

/// Whether the kernels for a few rows take so many, and adapters of these ranks.
pub(crate) fn takes_few_rows(
    rows: usize,
    inner: usize,
    ranks: impl Iterator<Item = usize>,
) -> bool {
    (1..=FEW_ROWS).contains(&rows) && takes_ranks(rows, inner, ranks)
}

/// Whether adapters of these ranks fit beside so many rows.
pub(crate) fn takes_ranks(rows: usize, inner: usize, ranks: impl Iterator<Item = usize>) -> bool {
    let mut total = 0;
    let mut largest = 0;
    for rank in ranks {
        total += rank;
        largest = largest.max(rank);
    }
    let shared = rows.next_power_of_two() * total * size_of::<f32>();
    inner > 0 && largest <= MOST_RANKS && shared <= SHARED
}

/// `(y, x·A)` of some layers for `x` `(.., inner)` of up to [`FEW_ROWS`] rows that lie as `matrix` says;
/// without the second unless `keeps_xa`.
pub(crate) fn few_rows(
    cuda: &Cuda,
    x: &Tensor,
    matrix: Matrix,
    (rows, inner): (usize, usize),
    layers: &[Layer],
    keeps_xa: bool,
) -> Result<Vec<(Tensor, Option<Tensor>)>> {
    let mut outputs = Vec::with_capacity(layers.len());
    for layers in layers.chunks(MOST) {
        few_rows_at_once(cuda, x, matrix, (rows, inner), layers, keeps_xa, &mut outputs)?;
    }
    Ok(outputs)
}

fn few_rows_at_once(
    cuda: &Cuda,
    x: &Tensor,
    matrix: Matrix,
    (rows, inner): (usize, usize),
    layers: &[Layer],
    keeps_xa: bool,
    outputs: &mut Vec<(Tensor, Option<Tensor>)>,
) -> Result<()> {
    let dtype = matrix.dtype;
    // Rows that a kernel is made for, and the outputs that one of its tasks computes.
    let padded = rows.next_power_of_two();
    let task = if padded >= 4 { padded / 2 } else { 1 };
    let aligned = |matrix: Matrix| {
        let size = dtype.size_in_bytes();
        matrix.pointer.is_multiple_of(16) && (matrix.stride * size).is_multiple_of(16)
    };
    let whole = (inner * dtype.size_in_bytes()).is_multiple_of(16);
    let mut all = Projections { count: size(layers.len())?, ..Default::default() };
    all.aligned =
        i32::from(whole && aligned(matrix) && layers.iter().all(|layer| aligned(layer.weight)));
    let (mut tasks, mut ranks) = (0, 0);
    let mut ys = Vec::with_capacity(layers.len());
    for (layer, place) in layers.iter().zip(&mut all.at) {
        let y = cuda.empty(with_last_dimension(x, layer.outer), dtype)?;
        *place = Projection {
            weight: layer.weight.pointer,
            bias: layer.bias.unwrap_or(0),
            y: y.pointer,
            stride: layer.weight.stride as i64,
            outer: size(layer.outer)?,
            first_task: size(tasks)?,
            column: size(ranks)?,
            ..Default::default()
        };
        if let Some(adapter) = &layer.adapter {
            place.a = adapter.a;
            place.b = adapter.b;
            place.rank = size(adapter.rank)?;
            place.scale = adapter.scale as f32;
            ranks += adapter.rank;
        }
        tasks += layer.outer.div_ceil(task);
        ys.push(y);
    }
    (all.tasks, all.ranks) = (size(tasks)?, size(ranks)?);
    let kept = keeps_xa && ranks > 0;
    let xa = kept.then(|| cuda.empty(with_last_dimension(x, ranks), dtype)).transpose()?;
    launch_few_rows(cuda, matrix, (rows, inner), &all, xa.as_ref())?;
    let mut column = 0;
    for (layer, y) in layers.iter().zip(ys) {
        let xa = match (layer.adapter.as_ref().filter(|_| keeps_xa), &xa) {
            (Some(Adapter { rank, .. }), Some(xa)) => {
                column += rank;
                Some(xa.tensor.narrow(D::Minus1, column - rank, *rank)?)
            }
            (Some(_), None) => Some(cuda.empty(with_last_dimension(x, 0), dtype)?.tensor),
            (None, _) => None,
        };
        outputs.push((y.tensor, xa));
    }
    Ok(())
}

fn launch_few_rows(
    cuda: &Cuda,
    x: Matrix,
    (rows, inner): (usize, usize),
    all: &Projections,
    xa: Option<&Array>,
) -> Result<()> {
    let padded = rows.next_power_of_two();
    let (tasks, ranks) = (all.tasks as usize, all.ranks as usize);
    // Not without a block: the first one writes x·A.
    let blocks = tasks.div_ceil(WARPS).clamp(1, BLOCKS_AT_ONCE * cuda.multiprocessors()?);
    let (stride, rows, inner_size) = (x.stride as i64, rows as i32, size(inner)?);
    let xa = xa.map_or(0, |xa| xa.pointer);
    let places = padded * ranks * size_of::<f32>();
    let scratch = padded * 4 * THREADS * size_of::<f32>();
    let clusters = blocks.div_ceil(CLUSTER);
    let read = clusters * inner * ranks * size_of::<f32>();
    if ranks > 0 && read <= READ_TWICE && scratch + CLUSTER * places <= CLUSTERED_SHARED {
        let name = match padded {
            1 => by_dtype!("few_rows_clustered_1", x.dtype)?,
            2 => by_dtype!("few_rows_clustered_2", x.dtype)?,
            _ => by_dtype!("few_rows_clustered_4", x.dtype)?,
        };
        let grid = ((clusters * CLUSTER) as u32, 1, 1);
        let shared = (scratch + CLUSTER * places) as u32;
        let launch = MODULE.launch(cuda, name, grid, THREADS as u32, shared)?;
        let launch = launch.overlapping().preferring_cache(cuda, BLOCKS_AT_ONCE)?;
        let (parts, slices) = (0u64, 0i32);
        // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
        return unsafe {
            launch.with(|arguments| {
                arguments.arg(all).arg(&x.pointer).arg(&stride).arg(&rows).arg(&inner_size);
                arguments.arg(&xa).arg(&parts).arg(&slices);
            })
        };
    }
    let parts = match ranks {
        0 => None,
        _ => Some(adapter_slices(cuda, (x, None), (rows as usize, inner), all)?),
    };
    let name = match padded {
        1 => by_dtype!("few_rows_1", x.dtype)?,
        2 => by_dtype!("few_rows_2", x.dtype)?,
        _ => by_dtype!("few_rows_4", x.dtype)?,
    };
    let grid = (blocks as u32, 1, 1);
    let launch = MODULE.launch(cuda, name, grid, THREADS as u32, places as u32)?;
    let launch = launch.overlapping().preferring_cache(cuda, BLOCKS_AT_ONCE)?;
    let slices = parts.as_ref().map_or(0, |(_, slices)| *slices);
    let parts = parts.as_ref().map_or(0, |(parts, _)| parts.pointer);
    // SAFETY: as the kernel declares them; the caller holds what the pointers point into, and the sums
    // are given back in the order of the stream.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(all).arg(&x.pointer).arg(&stride).arg(&rows).arg(&inner_size);
            arguments.arg(&xa).arg(&parts).arg(&slices);
        })
    }
}

/// What the RMS norm of x with a residual is made of beside x, in its dtype: the rows of the residual, from the first
/// element of one to the next, and the norm's weight with what is added to it.
#[derive(Clone, Copy)]
pub(crate) struct Undivided {
    pub(crate) residual: u64,
    pub(crate) residual_stride: i64,
    pub(crate) weight: u64,
    pub(crate) offset: f32,
}

/// x·A of some adapters side by side, summed over slices of the inner indices, and the number of these:
/// `(slices, rows, ranks)` with the rows padded to a power of two. With `normed`, which up to 4 rows of f16 or bf16 may
/// have, of their norm before it is divided by the root of the mean square.
pub(crate) fn sliced_adapters<'a>(
    cuda: &Cuda,
    (x, normed): (Matrix, Option<Undivided>),
    (rows, inner): (usize, usize),
    adapters: impl Iterator<Item = Option<&'a Adapter>>,
) -> Result<(Array, i32)> {
    let mut all = Projections::default();
    let (mut count, mut ranks) = (0, 0);
    for (adapter, place) in adapters.zip(&mut all.at) {
        if let Some(adapter) = adapter {
            (place.a, place.rank, place.column) = (adapter.a, size(adapter.rank)?, size(ranks)?);
            ranks += adapter.rank;
        }
        count += 1;
    }
    (all.count, all.ranks) = (count, size(ranks)?);
    adapter_slices(cuda, (x, normed), (rows, inner), &all)
}

fn adapter_slices(
    cuda: &Cuda,
    (x, normed): (Matrix, Option<Undivided>),
    (rows, inner): (usize, usize),
    all: &Projections,
) -> Result<(Array, i32)> {
    let padded = rows.next_power_of_two();
    let name = match (padded, normed.is_some()) {
        (1, false) => by_dtype!("adapter_slices_1", x.dtype)?,
        (2, false) => by_dtype!("adapter_slices_2", x.dtype)?,
        (4, false) => by_dtype!("adapter_slices_4", x.dtype)?,
        (_, false) => by_dtype!("adapter_slices_8", x.dtype)?,
        (1, true) => by_dtype!("normed_slices_1", x.dtype)?,
        (2, true) => by_dtype!("normed_slices_2", x.dtype)?,
        (_, true) => by_dtype!("normed_slices_4", x.dtype)?,
    };
    let slices = (inner / 256).clamp(1, 32);
    let sums = cuda.empty(slices * padded * all.ranks as usize, DType::F32)?;
    let scratch = padded * 4 * THREADS * size_of::<f32>();
    let grid = (slices as u32, all.count as u32, 1);
    let launch = MODULE.launch(cuda, name, grid, THREADS as u32, scratch as u32)?.overlapping();
    let (stride, rows, inner) = (x.stride as i64, rows as i32, size(inner)?);
    // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(all).arg(&x.pointer).arg(&stride);
            if let Some(normed) = &normed {
                arguments.arg(&normed.residual).arg(&normed.residual_stride);
                arguments.arg(&normed.weight).arg(&normed.offset);
            }
            arguments.arg(&rows).arg(&inner).arg(&sums.pointer);
        })?;
    }
    Ok((sums, slices as i32))
}

pub(super) fn linear(
    operation: &str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    [rows, outer, inner]: [usize; 3],
) -> Result<Tensor> {
    require_floats(operation, &[x, weight])?;
    let cuda = Cuda::of(x)?;
    let dtype = x.dtype();
    let (x_rows, weight) = (cuda.rows(x)?, cuda.rows_as(weight, dtype)?);
    let bias = bias.map(|bias| bias_as(operation, &cuda, bias, dtype)).transpose()?;
    let layer = Layer {
        weight: weight.matrix,
        outer,
        bias: bias.as_ref().map(|bias| bias.pointer),
        adapter: None,
    };
    if takes_few_rows(rows, inner, std::iter::empty()) {
        let mut outputs = few_rows(&cuda, x, x_rows.matrix, (rows, inner), &[layer], false)?;
        return match outputs.pop() {
            Some((y, _)) => Ok(y),
            None => bail!("metal-candle-kernels: {operation}: a layer gave no output"),
        };
    }
    let y = cuda.empty(with_last_dimension(x, outer), dtype)?;
    let beta = match &bias {
        Some(bias) => {
            write_bias(&cuda, bias, &y, rows, outer)?;
            1.0
        }
        None => 0.0,
    };
    let factors = (x_rows.matrix, weight.matrix.t());
    cuda.gemm([rows, outer, inner], 1.0, factors, beta, Matrix::of(&y, outer))?;
    Ok(y.tensor)
}

/// `linear` with a weight in fewer bits, where a few rows are multiplied by it as it is.
pub(super) fn packed_linear(
    operation: &str,
    x: &Tensor,
    weight: &Quantized,
    bias: Option<&Tensor>,
    rows: usize,
) -> Result<Option<Tensor>> {
    let (_, inner) = weight.shape();
    if !packed::takes(rows, inner, std::iter::once(weight), std::iter::empty()) {
        return Ok(None);
    }
    require_floats(operation, &[x])?;
    let cuda = Cuda::of(x)?;
    let bias = bias.map(|bias| bias_as(operation, &cuda, bias, x.dtype())).transpose()?;
    let bias = bias.as_ref().map(|bias| bias.pointer);
    let layer = packed::Layer { weight, bias, adapter: None };
    let mut outputs = packed::few_rows(&cuda, x, (rows, inner), &[layer], false)?;
    Ok(outputs.pop().map(|(y, _)| y))
}

pub(super) fn backward_input(
    operation: &str,
    dy: &Tensor,
    weight: &Tensor,
    [rows, outer, inner]: [usize; 3],
) -> Result<Tensor> {
    require_floats(operation, &[dy, weight])?;
    let cuda = Cuda::of(dy)?;
    let (dy_rows, weight) = (cuda.rows(dy)?, cuda.rows_as(weight, dy.dtype())?);
    let dx = cuda.empty(with_last_dimension(dy, inner), dy.dtype())?;
    let factors = (dy_rows.matrix, weight.matrix);
    cuda.gemm([rows, inner, outer], 1.0, factors, 0.0, Matrix::of(&dx, inner))?;
    Ok(dx.tensor)
}

pub(super) fn backward_weight(
    operation: &str,
    x: &Tensor,
    dy: &Tensor,
    [rows, outer, inner]: [usize; 3],
) -> Result<Tensor> {
    require_floats(operation, &[x, dy])?;
    let cuda = Cuda::of(x)?;
    let (x, dy) = (cuda.rows(x)?, cuda.rows(dy)?);
    let dweight = cuda.empty((outer, inner), DType::F32)?;
    let factors = (dy.matrix.t(), x.matrix);
    cuda.gemm([outer, inner, rows], 1.0, factors, 0.0, Matrix::of(&dweight, inner))?;
    Ok(dweight.tensor)
}

pub(super) fn backward_bias(
    operation: &str,
    dy: &Tensor,
    rows: usize,
    outer: usize,
) -> Result<Tensor> {
    require_floats(operation, &[dy])?;
    let cuda = Cuda::of(dy)?;
    let dy = cuda.rows(dy)?;
    let dbias = cuda.empty(outer, DType::F32)?;
    let blocks = outer.div_ceil(32);
    let most = (8 * cuda.multiprocessors()?).div_ceil(blocks.max(1));
    let slices = rows.div_ceil(64).min(most).max(1);
    if slices == 1 {
        column_sums(&cuda, dy.matrix, (rows, outer), 1, &dbias)?;
    } else {
        let parts = cuda.empty((slices, outer), DType::F32)?;
        column_sums(&cuda, dy.matrix, (rows, outer), slices, &parts)?;
        column_sums(&cuda, Matrix::of(&parts, outer), (slices, outer), 1, &dbias)?;
    }
    Ok(dbias.tensor)
}

/// Sums of the columns over each slice of the rows, `out` `(slices, columns)`.
fn column_sums(
    cuda: &Cuda,
    x: Matrix,
    (rows, columns): (usize, usize),
    slices: usize,
    out: &Array,
) -> Result<()> {
    let name = by_dtype!("column_sums", x.dtype)?;
    let grid = (columns.div_ceil(32) as u32, slices as u32, 1);
    let launch = MODULE.launch(cuda, name, grid, THREADS as u32, 0)?;
    let (stride, rows, columns) = (x.stride as i64, size(rows)?, size(columns)?);
    // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&stride).arg(&out.pointer).arg(&rows).arg(&columns);
        })
    }
}

/// Writes the bias into every row of `out` `(rows, columns)`.
pub(crate) fn write_bias(
    cuda: &Cuda,
    bias: &Array,
    out: &Array,
    rows: usize,
    columns: usize,
) -> Result<()> {
    let name = by_dtype!("bias_rows", out.dtype)?;
    let of_block = THREADS * 16 / out.dtype.size_in_bytes();
    let across = columns.div_ceil(of_block);
    let down = rows.min((8 * cuda.multiprocessors()?).div_ceil(across.max(1)));
    let launch = MODULE.launch(cuda, name, (across as u32, down as u32, 1), THREADS as u32, 0)?;
    let (rows, columns) = (size(rows)?, size(columns)?);
    // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&bias.pointer).arg(&out.pointer).arg(&rows).arg(&columns);
        })
    }
}

/// A bias ready for the kernels, in the dtype of the activations.
pub(crate) fn bias_as(operation: &str, cuda: &Cuda, bias: &Tensor, dtype: DType) -> Result<Array> {
    require_floats(operation, &[bias])?;
    cuda.contiguous_as(bias, dtype)
}

/// A size as the kernels take it.
fn size(size: usize) -> Result<i32> {
    match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!(
            "metal-candle-kernels: a linear layer on CUDA has a size of {size}, expected less than 2^31"
        ),
    }
}
