//! Paged attention on CUDA: which kernels the items of a batch go to; see kernel.cu.

use super::{FEW, MANY, PAGED_QUERIES, Pool, SINGLE, SPLIT, Sequences, Sizes};
use crate::attention::Options;
use crate::attention::cuda::{
    FewShape, Kernels, Parameters, combine_shared, forward_shape, score_numbers, strided,
    tile_kernel,
};
use crate::backend::cuda::{Array, Cuda, Module, by_dtype, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor, bail};

static MODULE: Module = module!("paged");

/// The longest head that there is a kernel for.
pub(super) const MOST_HEAD_DIM: usize = 256;

/// What every kernel is given beside `Parameters`: `PagedBatch` in kernel.cu, field by field.
#[repr(C)]
#[derive(Clone, Copy)]
struct PagedBatch {
    numbers: u64,
    k_scales: u64,
    v_scales: u64,
    spans: i32,
    tables: i32,
    items: i32,
    count: i32,
    width: i32,
    block: i32,
    blocks: i32,
    item_blocks: i32,
}

// SAFETY: plain numbers, laid out as in C.
unsafe impl DeviceRepr for PagedBatch {}

/// A launch: the kernel, its threads and bytes of shared memory, and how many blocks an item has.
struct Kernel {
    name: &'static str,
    threads: usize,
    shared: usize,
    item_blocks: usize,
}

struct Call<'a> {
    operation: &'static str,
    cuda: Cuda<'a>,
    sequences: &'a Sequences,
    parameters: Parameters,
    batch: PagedBatch,
}

impl Call<'_> {
    /// Has a kernel do the items of a kind.
    fn run(&self, kernel: Kernel, kind: usize) -> Result<()> {
        let Kernel { name, threads, shared, item_blocks } = kernel;
        let items = self.sequences.plan.items[kind];
        let blocks = items.room * item_blocks;
        if blocks == 0 {
            return Ok(());
        }
        let Ok(grid) = i32::try_from(blocks) else {
            bail!("metal-candle-kernels: {}: {blocks} blocks are too many on CUDA", self.operation)
        };
        let batch = PagedBatch {
            items: items.start as i32,
            count: kind as i32,
            item_blocks: item_blocks as i32,
            ..self.batch
        };
        let grid = (grid as u32, 1, 1);
        let launch = MODULE.launch(&self.cuda, name, grid, threads as u32, shared as u32)?;
        // SAFETY: the kernel takes these, which describe arrays that the caller holds.
        unsafe {
            launch.overlapping().with(|arguments| {
                arguments.arg(&self.parameters).arg(&batch);
            })
        }
    }
}

pub(super) fn forward(
    operation: &'static str,
    sizes: Sizes,
    q: &Tensor,
    pools: [Pool; 2],
    sequences: &Sequences,
    options: &Options,
) -> Result<Tensor> {
    let cuda = Cuda::of(q)?;
    let dtype = q.dtype();
    by_dtype!("attention", dtype)?;
    let Sizes { heads, kv_heads, head_dim } = sizes;
    if head_dim > MOST_HEAD_DIM {
        bail!(
            "metal-candle-kernels: {operation}: heads of {head_dim} elements are too long for CUDA, expected {MOST_HEAD_DIM} at most"
        )
    }
    let o = cuda.empty((sequences.tokens, heads, head_dim), dtype)?;
    if sequences.tokens * heads * head_dim == 0 {
        return Ok(o.tensor);
    }
    let number = |value: usize| match i32::try_from(value) {
        Ok(value) => Ok(value),
        Err(_) => {
            bail!("metal-candle-kernels: {operation}: {value} of something are too many on CUDA")
        }
    };
    let [k, v] = pools.map(|pool| cuda.strided(pool.elements()));
    let (k, v) = (k?, v?);
    let [k_scales, v_scales] =
        pools.map(|pool| pool.scales().map(|scales| cuda.strided(scales)).transpose());
    let scales = k_scales?.zip(v_scales?);
    let is_rounded = scales.is_some();
    // Codes are read by sixteens.
    let in_tiles = sequences.block.is_multiple_of(16)
        && (k.pointer | v.pointer) % 16 == 0
        && (!is_rounded || head_dim.is_multiple_of(16));
    let kernels = if in_tiles { Kernels::of(dtype, head_dim) } else { Kernels::Plain };
    let q = q.unsqueeze(0)?;
    let q = strided(&cuda, &q, kernels != Kernels::Plain)?;
    let numbers = cuda.contiguous(&sequences.uploaded)?;
    // Parts of results and their sums.
    let parts: Option<[Array; 2]> = match sequences.plan.parts {
        0 => None,
        parts => Some([
            cuda.empty((parts, heads, head_dim), DType::F32)?,
            cuda.empty((parts, heads, 2), DType::F32)?,
        ]),
    };
    let (partial_o, partial_sums) =
        parts.as_ref().map_or((0, 0), |[values, sums]| (values.pointer, sums.pointer));
    let (mode, factor, inner) = score_numbers(options);
    let pool_strides = [0, (kv_heads * head_dim) as i64, head_dim as i64];
    let parameters = Parameters {
        q: q.pointer,
        k: k.pointer,
        v: v.pointer,
        o: o.pointer,
        partial_o,
        partial_sums,
        q_strides: [0, 1, 2].map(|index| q.stride(index)),
        k_strides: pool_strides,
        v_strides: pool_strides,
        batch: 1,
        heads: number(heads)?,
        kv_heads: number(kv_heads)?,
        head_dim: number(head_dim)?,
        window: options.window.map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX)),
        ragged: i32::from(options.window.is_some()),
        mode,
        factor,
        inner,
        scale: options.scale as f32,
        ..Parameters::default()
    };
    let batch = PagedBatch {
        numbers: numbers.pointer,
        k_scales: scales.as_ref().map_or(0, |(scales, _)| scales.pointer),
        v_scales: scales.as_ref().map_or(0, |(_, scales)| scales.pointer),
        spans: number(sequences.plan.spans)?,
        tables: number(sequences.plan.tables)?,
        items: 0,
        count: 0,
        width: number(sequences.width)?,
        block: number(sequences.block)?,
        blocks: number(sequences.blocks)?,
        item_blocks: 0,
    };
    let call = Call { operation, cuda, sequences, parameters, batch };
    let group = heads / kv_heads;
    let few = FewShape::of(kernels);
    let blocks_of =
        |shape: FewShape, queries: usize| kv_heads * (queries * group).div_ceil(shape.rows);
    let of_many = match kernels {
        Kernels::Tiles(size) => {
            let name = if is_rounded {
                tile_kernel!("rounded_forward", dtype, size)
            } else {
                tile_kernel!("paged_forward", dtype, size)
            };
            let (rows, shared) = forward_shape(size);
            Kernel { name, threads: 128, shared, item_blocks: heads * (PAGED_QUERIES / rows) }
        }
        Kernels::Plain => {
            let name = if is_rounded {
                by_dtype!("rounded_plain", dtype)?
            } else {
                by_dtype!("paged_plain", dtype)?
            };
            let FewShape { warps, shared, .. } = few;
            let item_blocks = blocks_of(few, PAGED_QUERIES);
            Kernel { name, threads: 32 * warps, shared, item_blocks }
        }
    };
    let of_few = |queries, kind: usize| -> Result<Kernel> {
        let ranges = sequences.plan.items[kind].room * kv_heads;
        let wide = FewShape::wide(&call.cuda, kernels, queries * group, ranges)?;
        let name = match (kernels, wide.is_some(), is_rounded) {
            (Kernels::Tiles(size), false, false) => tile_kernel!("paged_few", dtype, size),
            (Kernels::Tiles(size), false, true) => tile_kernel!("rounded_few", dtype, size),
            (Kernels::Tiles(size), true, false) => tile_kernel!("paged_few_wide", dtype, size),
            (Kernels::Tiles(size), true, true) => tile_kernel!("rounded_few_wide", dtype, size),
            (Kernels::Plain, _, false) => by_dtype!("paged_plain_few", dtype)?,
            (Kernels::Plain, _, true) => by_dtype!("rounded_plain_few", dtype)?,
        };
        let shape = wide.unwrap_or(few);
        let FewShape { warps, shared, .. } = shape;
        Ok(Kernel { name, threads: 32 * warps, shared, item_blocks: blocks_of(shape, queries) })
    };
    let name = by_dtype!("paged_combine", dtype)?;
    let shared = combine_shared(sequences.plan.most_ranges, head_dim);
    let combine = Kernel { name, threads: 128, shared, item_blocks: heads };
    call.run(of_many, MANY)?;
    call.run(of_few(sequences.plan.most_few, FEW)?, FEW)?;
    call.run(of_few(1, SINGLE)?, SINGLE)?;
    call.run(combine, SPLIT)?;
    Ok(o.tensor)
}
