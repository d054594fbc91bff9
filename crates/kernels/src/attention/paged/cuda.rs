//! Paged attention on CUDA: which kernels the items of a batch go to; see kernel.cu.

use super::{
    FEW, MANY, NewTokens, PAGED_QUERIES, PAGED_SPLIT, Pool, SINGLE, SPLIT, Sequences, Sizes,
};
use crate::attention::Options;
use crate::attention::cuda::{
    FEW_THREADS, FewShape, Kernels, Parameters, SHARING_BLOCKS, are_shared_in_clusters,
    cluster_shared, combine_shared, contiguous, forward_shape, score_numbers, strided, tile_kernel,
};
use crate::backend::cuda::{Array, Cuda, Module, by_dtype, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Error, Result, Tensor, bail};

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
    single_keys: i32,
    few_keys: i32,
    is_beside: i32,
}

// SAFETY: plain numbers, laid out as in C.
unsafe impl DeviceRepr for PagedBatch {}

/// New tokens as their kernel takes them: `NewRows` in kernel.cu, field by field.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct NewRows {
    k: u64,
    v: u64,
    cosines: u64,
    sines: u64,
    places: u64,
    k_strides: [i64; 2],
    v_strides: [i64; 2],
    half: i32,
    unused: i32,
}

// SAFETY: plain numbers, laid out as in C.
unsafe impl DeviceRepr for NewRows {}

/// The same, with what they point into.
struct Unwritten {
    rows: NewRows,
    _arrays: [Array; 5],
}

impl Unwritten {
    fn new(cuda: &Cuda, tokens: &NewTokens) -> Result<Self> {
        // Rows are found by strides of tokens and heads.
        let rows = |x: &Tensor| strided(cuda, &x.transpose(0, 1)?, true);
        let (k, v) = (rows(tokens.k)?, rows(tokens.v)?);
        let angles = |x: &Tensor| contiguous(cuda, &cuda.contiguous_as(x, DType::F32)?.tensor);
        let (cos, sin) = (angles(tokens.cos)?, angles(tokens.sin)?);
        let places = cuda.contiguous(tokens.places)?;
        let rows = NewRows {
            k: k.pointer,
            v: v.pointer,
            cosines: cos.pointer,
            sines: sin.pointer,
            places: places.pointer,
            k_strides: [1, 2].map(|index| k.stride(index)),
            v_strides: [1, 2].map(|index| v.stride(index)),
            half: tokens.cos.dim(2)? as i32,
            unused: 0,
        };
        Ok(Self { rows, _arrays: [k, v, cos, sin, places] })
    }
}

/// A launch: the kernel, its threads and bytes of shared memory, how many blocks an item has, and how many of the first items
/// have them, if not all.
struct Kernel {
    name: &'static str,
    threads: usize,
    shared: usize,
    item_blocks: usize,
    most_items: Option<usize>,
}

struct Call<'a> {
    operation: &'static str,
    cuda: Cuda<'a>,
    sequences: &'a Sequences,
    parameters: Parameters,
    batch: PagedBatch,
}

impl Call<'_> {
    /// Has a kernel do the items of a kind, beside those of the kinds before; one for new tokens is given these, too.
    fn run(&mut self, kernel: Kernel, kind: usize, new: Option<&Unwritten>) -> Result<()> {
        let Kernel { name, threads, shared, item_blocks, most_items } = kernel;
        let items = self.sequences.plan.items[kind];
        let blocks = most_items.unwrap_or(items.room) * item_blocks;
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
                if let Some(new) = new {
                    arguments.arg(&new.rows);
                }
            })
        }?;
        self.batch.is_beside = 1;
        Ok(())
    }
}

/// Whether a kernel rotates new tokens and puts them into dense pools.
pub(super) fn takes_new(
    sizes: Sizes,
    tokens: &NewTokens,
    pools: [&Tensor; 2],
    sequences: &Sequences,
) -> Result<bool> {
    let items = &sequences.plan.items;
    let head_dim = sizes.head_dim;
    let fits = head_dim <= MOST_HEAD_DIM && tokens.cos.dim(2)? % 8 == 0;
    if items[FEW].room + items[MANY].room > 0 || !fits {
        return Ok(false);
    }
    let cuda = Cuda::of(tokens.q)?;
    let [k, v] = pools.map(|pool| cuda.strided(pool));
    let kernels = kernels_of([&k?, &v?], tokens.q.dtype(), sizes, sequences);
    let is_aligned = |rows: &Tensor| {
        let stride = |index: usize| rows.stride().get(index).copied().unwrap_or(1);
        let begins = cuda.strided(rows)?.pointer % 16 == 0;
        Ok::<_, Error>(begins && stride(0) % 8 == 0 && stride(2) % 8 == 0 && stride(3) == 1)
    };
    let fits = kernels != Kernels::Plain && head_dim.is_multiple_of(8);
    Ok(fits && is_aligned(tokens.k)? && is_aligned(tokens.v)?)
}

/// The kernels for pools, whose rows those with tiles read by sixteens.
fn kernels_of(
    [k, v]: [&Array; 2],
    dtype: DType,
    Sizes { head_dim, .. }: Sizes,
    sequences: &Sequences,
) -> Kernels {
    let in_tiles = sequences.block.is_multiple_of(16) && (k.pointer | v.pointer) % 16 == 0;
    if in_tiles { Kernels::of(dtype, head_dim) } else { Kernels::Plain }
}

pub(super) fn forward(
    operation: &'static str,
    sizes: Sizes,
    q: &Tensor,
    pools: [Pool; 2],
    sequences: &Sequences,
    options: &Options,
) -> Result<Tensor> {
    attend(operation, sizes, q, pools, sequences, options, None)
}

/// [`forward`] of new tokens, whose queries without their second dimension are `q`, if [`takes_new`] says yes to them.
pub(super) fn forward_new(
    operation: &'static str,
    sizes: Sizes,
    (tokens, q): (&NewTokens, &Tensor),
    pools: [&Tensor; 2],
    sequences: &Sequences,
    options: &Options,
) -> Result<Option<Tensor>> {
    if !takes_new(sizes, tokens, pools, sequences)? {
        return Ok(None);
    }
    let pools = pools.map(Pool::Dense);
    attend(operation, sizes, q, pools, sequences, options, Some(tokens)).map(Some)
}

fn attend(
    operation: &'static str,
    sizes: Sizes,
    q: &Tensor,
    pools: [Pool; 2],
    sequences: &Sequences,
    options: &Options,
    new: Option<&NewTokens>,
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
    let kernels = match is_rounded && !head_dim.is_multiple_of(16) {
        true => Kernels::Plain,
        false => kernels_of([&k, &v], dtype, sizes, sequences),
    };
    let q = q.unsqueeze(0)?;
    let q = strided(&cuda, &q, kernels != Kernels::Plain)?;
    let numbers = cuda.contiguous(&sequences.uploaded)?;
    let new = new.map(|tokens| Unwritten::new(&cuda, tokens)).transpose()?;
    let plan = &sequences.plan;
    let group = heads / kv_heads;
    let multiprocessors = cuda.multiprocessors()?;
    let few = FewShape::of(kernels);
    let blocks_of = |queries: usize| kv_heads * (queries * group).div_ceil(few.rows);
    let seen = options.window.unwrap_or(usize::MAX).min(plan.most_keys);
    let in_clusters = new.is_some()
        && cuda.has_warpgroups()?
        && are_shared_in_clusters(multiprocessors, plan.singles * blocks_of(1), seen);
    let [mut single_keys, few_keys] =
        [(plan.singles, 1), (plan.fews, plan.most_few)].map(|(count, queries)| {
            kernels.block_keys(multiprocessors, count * blocks_of(queries), plan.most_keys)
        });
    if in_clusters {
        single_keys = i32::MAX as usize;
    }
    // Parts of results and their sums.
    let has_parts = plan.parts > 0 && single_keys.min(few_keys) < plan.most_keys;
    let parts = has_parts.then(|| {
        Ok::<_, Error>([
            cuda.empty((plan.parts, heads, head_dim), DType::F32)?,
            cuda.empty((plan.parts, heads, 2), DType::F32)?,
        ])
    });
    let parts = parts.transpose()?;
    let (partial_o, partial_sums) =
        parts.as_ref().map_or((0, 0), |[values, sums]| (values.pointer, sums.pointer));
    let (mode, factor, inner) = score_numbers(options);
    let sinks = options.sinks.as_ref().map(|sinks| cuda.contiguous(sinks)).transpose()?;
    let pool_strides = [0, (kv_heads * head_dim) as i64, head_dim as i64];
    let parameters = Parameters {
        q: q.pointer,
        k: k.pointer,
        v: v.pointer,
        o: o.pointer,
        partial_o,
        partial_sums,
        sinks: sinks.as_ref().map_or(0, |sinks| sinks.pointer),
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
        part_keys: number(kernels.part_keys())?,
        ..Parameters::default()
    };
    let batch = PagedBatch {
        numbers: numbers.pointer,
        k_scales: scales.as_ref().map_or(0, |(scales, _)| scales.pointer),
        v_scales: scales.as_ref().map_or(0, |(_, scales)| scales.pointer),
        spans: number(plan.spans)?,
        tables: number(plan.tables)?,
        items: 0,
        count: 0,
        width: number(sequences.width)?,
        block: number(sequences.block)?,
        blocks: number(sequences.blocks)?,
        item_blocks: 0,
        single_keys: number(single_keys)?,
        few_keys: number(few_keys)?,
        is_beside: 0,
    };
    let mut call = Call { operation, cuda, sequences, parameters, batch };
    let of_many = match kernels {
        Kernels::Tiles(size) => {
            let name = if is_rounded {
                tile_kernel!("rounded_forward", dtype, size)
            } else {
                tile_kernel!("paged_forward", dtype, size)
            };
            let (rows, shared) = forward_shape(size);
            let item_blocks = heads * (PAGED_QUERIES / rows);
            Kernel { name, threads: 128, shared, item_blocks, most_items: None }
        }
        Kernels::Plain => {
            let name = if is_rounded {
                by_dtype!("rounded_plain", dtype)?
            } else {
                by_dtype!("paged_plain", dtype)?
            };
            let item_blocks = blocks_of(PAGED_QUERIES);
            Kernel { name, threads: FEW_THREADS, shared: few.shared, item_blocks, most_items: None }
        }
    };
    let of_few = |queries, keys: usize, has_new: bool| -> Result<Kernel> {
        if let (Kernels::Tiles(size), true) = (kernels, has_new && in_clusters) {
            let name = tile_kernel!("paged_shared", dtype, size);
            let shared = few.shared + cluster_shared(size);
            let item_blocks = blocks_of(1) * SHARING_BLOCKS;
            // The first items are the first ranges of all sequences.
            let most_items = Some(plan.singles);
            return Ok(Kernel { name, threads: FEW_THREADS, shared, item_blocks, most_items });
        }
        let name = match (kernels, is_rounded) {
            (Kernels::Tiles(size), false) if has_new => tile_kernel!("paged_new", dtype, size),
            _ if has_new => bail!(
                "metal-candle-kernels: {operation}: no kernel on CUDA puts these new tokens into the pools"
            ),
            (Kernels::Tiles(size), false) => tile_kernel!("paged_few", dtype, size),
            (Kernels::Tiles(size), true) => tile_kernel!("rounded_few", dtype, size),
            (Kernels::Plain, false) => by_dtype!("paged_plain_few", dtype)?,
            (Kernels::Plain, true) => by_dtype!("rounded_plain_few", dtype)?,
        };
        let item_blocks = blocks_of(queries) * (PAGED_SPLIT / keys).max(1);
        Ok(Kernel { name, threads: FEW_THREADS, shared: few.shared, item_blocks, most_items: None })
    };
    let combine = Kernel {
        name: by_dtype!("paged_combine", dtype)?,
        threads: 128,
        shared: combine_shared(head_dim),
        item_blocks: heads,
        most_items: None,
    };
    call.run(of_many, MANY, None)?;
    call.run(of_few(plan.most_few, few_keys, false)?, FEW, None)?;
    call.run(of_few(1, single_keys, new.is_some())?, SINGLE, new.as_ref())?;
    if has_parts {
        call.batch.is_beside = 0;
        call.run(combine, SPLIT, None)?;
    }
    Ok(o.tensor)
}
