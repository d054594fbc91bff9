//! Attention on CUDA: which kernel a call goes to, and how its work is split; see kernel.cu.

use super::paged::{PAGED_SPLIT, SEGMENT};
use super::{Options, Sizes};
use crate::backend::cuda::{Array, Cuda, Launch, Module, TmaDescriptor, by_dtype, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor, bail};
use std::f64::consts::LOG2_E;

static MODULE: Module = module!("attention");

/// What every kernel is given: `Parameters` in tiles.cuh, field by field.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Parameters {
    pub q: u64,
    pub k: u64,
    pub v: u64,
    pub o: u64,
    pub d_o: u64,
    pub dq: u64,
    pub dk: u64,
    pub dv: u64,
    pub first_key: u64,
    pub log_sum_exp: u64,
    pub scaled_sums: u64,
    pub corrections: u64,
    pub lowest: u64,
    pub tile_lowest: u64,
    pub turns: u64,
    pub dq_sums: u64,
    pub partial_o: u64,
    pub partial_sums: u64,
    pub partial_keys: u64,
    pub sinks: u64,
    pub q_strides: [i64; 3],
    pub k_strides: [i64; 3],
    pub v_strides: [i64; 3],
    pub batch: i32,
    pub queries: i32,
    pub keys: i32,
    pub heads: i32,
    pub kv_heads: i32,
    pub head_dim: i32,
    pub window: i32,
    pub ragged: i32,
    pub mode: i32,
    pub factor: f32,
    pub inner: f32,
    pub scale: f32,
    pub split_start: i32,
    pub split_keys: i32,
    pub part_keys: i32,
    pub parts: i32,
    pub tiles: i32,
    pub stages: i32,
    pub head_splits: i32,
}

// SAFETY: plain numbers, laid out as in C.
unsafe impl DeviceRepr for Parameters {}

/// `TmaDescriptors` in hopper.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct TmaDescriptors {
    q: TmaDescriptor,
    k: TmaDescriptor,
    v: TmaDescriptor,
    d_o: TmaDescriptor,
}

// SAFETY: plain numbers, laid out as in C.
unsafe impl DeviceRepr for TmaDescriptors {}

/// How scores are made: `Scores` in tiles.cuh.
const AS_IS: i32 = 0;
const CAPPED: i32 = 1;
const SCALED: i32 = 2;

/// The kernels of an element type and a head dimension.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kernels {
    /// On tensor cores, with the head's dimension padded to this.
    Tiles(usize),
    /// Without, for all else.
    Plain,
}

impl Kernels {
    pub(super) fn of(dtype: DType, head_dim: usize) -> Kernels {
        match head_dim {
            8..=256 if matches!(dtype, DType::BF16 | DType::F16) && head_dim.is_multiple_of(8) => {
                let sizes = [64, 96, 128, 256];
                Kernels::Tiles(sizes.into_iter().find(|size| head_dim <= *size).unwrap_or(256))
            }
            _ => Kernels::Plain,
        }
    }

    /// Keys of a part, of which one begins at every multiple of this.
    pub(super) fn part_keys(self) -> usize {
        match self {
            Kernels::Tiles(_) => SEGMENT,
            Kernels::Plain => PAGED_SPLIT,
        }
    }

    /// Keys that a block has of a row for few queries, where there are so many blocks for a range, and up to `keys` in a
    /// row: few blocks share the keys of a row, and many have all of them, so that no parts are left to be joined. On an
    /// H200, 8 key heads of 128, in us with 64, 128, 256 and all: 7.6, 8.4, 11.1 and 13.3 for one text of 500 keys, 26, 22,
    /// 19 and 32 for 8 of 1000 to 1300, 71, 58, 56 and 46 for 32, 178, 135, 119 and 93 for 256 of 256 to 384.
    pub(super) fn block_keys(self, multiprocessors: usize, blocks: usize, keys: usize) -> usize {
        let are_many = 2 * blocks >= 3 * multiprocessors && keys <= MOST_ALONE;
        if blocks == 0 || are_many || keys <= PAGED_SPLIT {
            return i32::MAX as usize;
        }
        let segments = blocks * keys.div_ceil(SEGMENT);
        let wanted = segments.div_ceil(2 * multiprocessors).next_power_of_two() * SEGMENT;
        wanted.clamp(self.part_keys(), PAGED_SPLIT)
    }
}

/// Keys of a row that one block has all of, at most: others would be done long before it.
const MOST_ALONE: usize = 8192;

/// Blocks of a cluster that share the keys of a row, and segments of these at most: `SHARING_BLOCKS` and `SHARED_SEGMENTS` in
/// few_queries.cuh.
pub(super) const SHARING_BLOCKS: usize = 8;
const SHARED_SEGMENTS: usize = 24;

/// Whether clusters share the keys of rows for single queries, where there are so many blocks for a range, and up to `keys`
/// that a query sees: while all of these run at once, it is sooner than leaving parts in memory. On an H200, 8 key heads of
/// 128, in us so and by [`Kernels::block_keys`]: 4.4 and 5.3 for one text of 120 keys, 4.4 and 6.8 of 500, 6.7 and 7.6 of
/// 1000, 9.6 and 9.0 of 2000; 5.4 and 7.7 for two of 500; 11.4 and 10.3 for four.
pub(super) fn are_shared_in_clusters(multiprocessors: usize, blocks: usize, keys: usize) -> bool {
    // A window may begin within a segment.
    let segments = 1 + keys.div_ceil(SEGMENT);
    segments <= SHARED_SEGMENTS && keys > SEGMENT && blocks * SHARING_BLOCKS <= multiprocessors
}

/// Bytes of shared memory of a block of such a cluster, as `PartsInCluster` in few_queries.cuh has them behind those of
/// [`FewShape`].
pub(super) fn cluster_shared(size: usize) -> usize {
    let sixteens = (size / 16).div_ceil(SHARING_BLOCKS);
    SHARED_SEGMENTS * 16 * (sixteens * 16 * 4 + 8)
}

/// How scores are made: the mode and the numbers of `Parameters`.
pub(super) fn score_numbers(options: &Options) -> (i32, f32, f32) {
    let (mode, factor, inner) = match options.softcap {
        Some(softcap) => (CAPPED, softcap * LOG2_E, options.scale / softcap),
        None if options.scale > 0.0 => (AS_IS, options.scale * LOG2_E, 1.0),
        None => (SCALED, 1.0, options.scale * LOG2_E),
    };
    (mode, factor as f32, inner as f32)
}

/// Rows and bytes of shared memory of a block for few queries.
#[derive(Clone, Copy)]
pub(super) struct FewShape {
    pub rows: usize,
    pub shared: usize,
}

/// Threads of such a block.
pub(super) const FEW_THREADS: usize = 128;

impl FewShape {
    /// `few_block` in few_queries.cuh, or the plain one.
    pub(super) fn of(kernels: Kernels) -> FewShape {
        match kernels {
            Kernels::Tiles(size) => {
                let stages = if size <= 128 { 2 } else { 1 };
                let shared = tile_bytes(16, size) + 2 * stages * tile_bytes(SEGMENT, size);
                FewShape { rows: 16, shared }
            }
            Kernels::Plain => {
                let shared = 4 * (4 * 256 + 4 * 4 * 32 + 4 * 4 * 256 + 2 * 4 * 4);
                FewShape { rows: 4, shared }
            }
        }
    }
}

/// Bytes of shared memory to combine parts, as `combine_query` in few_queries.cuh has them.
pub(super) fn combine_shared(head_dim: usize) -> usize {
    const COMBINED_AT_ONCE: usize = 64;
    COMBINED_AT_ONCE * 4 * (3 + head_dim)
}

/// Rows and bytes of shared memory of a block of 128 threads for many queries on tensor cores.
pub(super) fn forward_shape(size: usize) -> (usize, usize) {
    let rows = if size <= 128 { 128 } else { 64 };
    (rows, tile_bytes(rows, size) + 2 * tile_bytes(64, size) + 4 * (rows + 8))
}

/// The tensor core kernel `$name` for elements `$dtype` and heads padded to `$size`.
macro_rules! tile_kernel {
    ($name:literal, $dtype:expr, $size:expr) => {
        match ($dtype == DType::BF16, $size) {
            (true, 64) => concat!("attention_", $name, "_bf16_64"),
            (true, 96) => concat!("attention_", $name, "_bf16_96"),
            (true, 128) => concat!("attention_", $name, "_bf16_128"),
            (true, _) => concat!("attention_", $name, "_bf16_256"),
            (false, 64) => concat!("attention_", $name, "_f16_64"),
            (false, 96) => concat!("attention_", $name, "_f16_96"),
            (false, 128) => concat!("attention_", $name, "_f16_128"),
            (false, _) => concat!("attention_", $name, "_f16_256"),
        }
    };
}
pub(super) use tile_kernel;

/// The same of a kernel for Hopper.
macro_rules! hopper_kernel {
    ($name:literal, $dtype:expr, $size:expr) => {
        match ($dtype == DType::BF16, $size) {
            (true, 64) => concat!("attention_hopper_", $name, "_bf16_64"),
            (true, 128) => concat!("attention_hopper_", $name, "_bf16_128"),
            (true, _) => concat!("attention_hopper_", $name, "_bf16_256"),
            (false, 64) => concat!("attention_hopper_", $name, "_f16_64"),
            (false, 128) => concat!("attention_hopper_", $name, "_f16_128"),
            (false, _) => concat!("attention_hopper_", $name, "_f16_256"),
        }
    };
}

/// Queries up to which the keys are split, for the two kinds of kernels.
const FEW_QUERIES: usize = 16;
const PLAIN_FEW_QUERIES: usize = 4;

/// The bytes of a tile in shared memory: `tile_bytes` in tiles.cuh.
const fn tile_bytes(rows: usize, size: usize) -> usize {
    size.div_ceil(64) * rows * 128
}

/// The sizes of hopper.cuh.
const HOPPER_ROWS: usize = 128;
const HOPPER_THREADS: u32 = 384;
const HOPPER_STAGES: usize = 3;
const HOPPER_COLUMNS: usize = 64;

#[cfg(test)]
thread_local! {
    /// For tests: whether a Hopper device is used as an Ampere one.
    pub(super) static AMPERE_ONLY: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    /// For tests: whether all heads of a group are together, however few blocks there are.
    pub(super) static WHOLE_GROUPS: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
}

/// The sizes of plain.cuh.
const PLAIN_TILE: usize = 64;
const PLAIN_THREADS: u32 = 256;
const PLAIN_SHARED: u32 = 4 * (2 * 32 + 64) * (64 + 4);

pub(super) struct Call<'a> {
    cuda: Cuda<'a>,
    sizes: Sizes,
    dtype: DType,
    kernels: Kernels,
    parameters: Parameters,
    /// q, k, v, the first keys and the sinks: copies and views that the parameters point into.
    inputs: [Option<Array>; 5],
}

impl<'a> Call<'a> {
    pub(super) fn new(
        operation: &str,
        sizes: Sizes,
        q: &'a Tensor,
        k: &Tensor,
        v: &Tensor,
        first_key: Option<&Tensor>,
        options: &Options,
    ) -> Result<Self> {
        let cuda = Cuda::of(q)?;
        let dtype = q.dtype();
        by_dtype!("attention", dtype)?;
        let number = |name: &str, value: usize| match i32::try_from(value) {
            Ok(value) => Ok(value),
            Err(_) => {
                bail!("metal-candle-kernels: {operation}: {value} {name} are too many on CUDA")
            }
        };
        let Sizes { batch, queries, keys, heads, kv_heads, head_dim } = sizes;
        number("heads of all rows", batch * heads)?;
        let kernels = Kernels::of(dtype, head_dim);
        let aligned = matches!(kernels, Kernels::Tiles(_));
        let [q, k, v] =
            [strided(&cuda, q, aligned)?, strided(&cuda, k, aligned)?, strided(&cuda, v, aligned)?];
        let first_key = first_key.map(|first_key| cuda.contiguous(first_key)).transpose()?;
        let sinks = options.sinks.as_ref().map(|sinks| cuda.contiguous(sinks)).transpose()?;
        let strides = |array: &Array| [array.stride(0), array.stride(1), array.stride(2)];
        let (mode, factor, inner) = score_numbers(options);
        let parameters = Parameters {
            q: q.pointer,
            k: k.pointer,
            v: v.pointer,
            first_key: first_key.as_ref().map_or(0, |first_key| first_key.pointer),
            sinks: sinks.as_ref().map_or(0, |sinks| sinks.pointer),
            q_strides: strides(&q),
            k_strides: strides(&k),
            v_strides: strides(&v),
            batch: number("rows", batch)?,
            queries: number("queries", queries)?,
            keys: number("keys", keys)?,
            heads: number("heads", heads)?,
            kv_heads: number("heads", kv_heads)?,
            head_dim: number("elements of a head", head_dim)?,
            window: options
                .window
                .map_or(i32::MAX, |window| i32::try_from(window).unwrap_or(i32::MAX)),
            ragged: i32::from(first_key.is_some() || options.window.is_some()),
            mode,
            factor,
            inner,
            scale: options.scale as f32,
            split_keys: i32::MAX,
            part_keys: kernels.part_keys() as i32,
            parts: 1,
            ..Parameters::default()
        };
        let inputs = [Some(q), Some(k), Some(v), first_key, sinks];
        Ok(Call { cuda, sizes, dtype, kernels, parameters, inputs })
    }

    /// Whether Hopper's kernels are to be taken.
    fn hopper(&self) -> Result<bool> {
        #[cfg(test)]
        if AMPERE_ONLY.get() {
            return Ok(false);
        }
        self.cuda.has_warpgroups()
    }

    fn prepare(
        &self,
        name: &'static str,
        grid: (usize, usize, usize),
        block: u32,
        shared: u32,
    ) -> Result<Launch> {
        let (x, y, z) = grid;
        if u32::try_from(x).is_err() || y > 65535 || z > 65535 {
            bail!(
                "metal-candle-kernels: attention on CUDA: a grid of {x} x {y} x {z} blocks is too large"
            )
        }
        let grid = (x as u32, y as u32, z as u32);
        Ok(MODULE.launch(&self.cuda, name, grid, block, shared)?.overlapping())
    }

    fn run(
        &self,
        name: &'static str,
        grid: (usize, usize, usize),
        block: u32,
        shared: usize,
    ) -> Result<()> {
        let launch = self.prepare(name, grid, block, shared as u32)?;
        // SAFETY: the kernel takes the parameters, which describe arrays that this call holds.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.parameters);
            })
        }
    }

    /// Copies what is expanded, which TMA descriptors can't say.
    fn make_describable(&mut self) -> Result<()> {
        let Parameters { q, k, v, q_strides, k_strides, v_strides, .. } = &mut self.parameters;
        let places = [(q, q_strides), (k, k_strides), (v, v_strides)];
        for (input, (pointer, strides)) in self.inputs.iter_mut().flatten().zip(places) {
            let mut rows = input.tensor.dims().iter().zip(input.tensor.stride()).take(3);
            if rows.any(|(size, stride)| *size > 1 && *stride == 0) {
                *input = self.cuda.strided(&input.tensor.force_contiguous()?)?;
                (*pointer, *strides) = (input.pointer, [0, 1, 2].map(|index| input.stride(index)));
            }
        }
        Ok(())
    }

    /// Runs one of Hopper's kernels, which takes tiles of so many queries and keys.
    fn run_hopper(
        &self,
        name: &'static str,
        grid: (usize, usize, usize),
        shared: usize,
        [of_queries, of_keys]: [usize; 2],
    ) -> Result<()> {
        let Sizes { batch, queries, keys, heads, kv_heads, head_dim } = self.sizes;
        let descriptor = |pointer, rows, heads, strides: [i64; 3], of_tile: usize| {
            let [of_batch, of_row, of_head] = strides.map(|stride| stride as usize);
            let (sizes, strides) = ([batch, heads, rows, head_dim], [of_batch, of_head, of_row, 1]);
            TmaDescriptor::new(self.dtype, pointer, sizes, strides, [1, 1, of_tile as u32, 64])
        };
        let Parameters { q, k, v, d_o, q_strides, k_strides, v_strides, .. } = self.parameters;
        let descriptor_of_queries =
            |pointer, strides| descriptor(pointer, queries, heads, strides, of_queries);
        let mut descriptors = TmaDescriptors {
            q: descriptor_of_queries(q, q_strides)?,
            k: descriptor(k, keys, kv_heads, k_strides, of_keys)?,
            v: descriptor(v, keys, kv_heads, v_strides, of_keys)?,
            d_o: TmaDescriptor::default(),
        };
        if d_o != 0 {
            let row = (heads * head_dim) as i64;
            descriptors.d_o =
                descriptor_of_queries(d_o, [queries as i64 * row, row, head_dim as i64])?;
        }
        let launch = self.prepare(name, grid, HOPPER_THREADS, shared as u32)?;
        // SAFETY: the kernel takes the parameters, which describe arrays that this call holds, and the descriptors
        // of the same.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.parameters).arg(&descriptors);
            })
        }
    }

    /// Blocks that give the columns of a head, and how many columns each, in plain kernels.
    fn plain_columns(&self) -> (usize, bool) {
        let head_dim = self.sizes.head_dim;
        (head_dim.div_ceil(128).max(1), head_dim > 64)
    }

    /// Whether the keys may be split.
    fn few(&self) -> bool {
        match self.kernels {
            Kernels::Tiles(_) => self.sizes.queries <= FEW_QUERIES,
            Kernels::Plain => self.sizes.queries <= PLAIN_FEW_QUERIES && self.sizes.head_dim <= 256,
        }
    }

    pub(super) fn forward(mut self) -> Result<(Tensor, Tensor)> {
        let Sizes { batch, queries, heads, .. } = self.sizes;
        let o = self.cuda.empty(&self.sizes.q_shape(), self.dtype)?;
        let log_sum_exp = self.cuda.empty(&self.sizes.row_shape(), DType::F32)?;
        self.parameters.o = o.pointer;
        self.parameters.log_sum_exp = log_sum_exp.pointer;
        match self.kernels {
            _ if self.few() => self.forward_few()?,
            // With the bits that attention over pools gives.
            Kernels::Plain if self.sizes.are_bits_fixed() => self.run_few()?,
            Kernels::Tiles(size) if !self.sizes.are_bits_fixed() && self.hopper()? => {
                self.make_describable()?;
                let size = if size == 96 { 128 } else { size };
                let columns = if size <= 128 { 128 } else { 64 };
                let shared = tile_bytes(HOPPER_ROWS, size)
                    + 4 * tile_bytes(columns, size)
                    + 8 * 8
                    + 4 * (HOPPER_ROWS + 2 * HOPPER_THREADS as usize / 32);
                let name = hopper_kernel!("forward", self.dtype, size);
                let grid = (batch * heads, queries.div_ceil(HOPPER_ROWS), 1);
                self.run_hopper(name, grid, shared, [HOPPER_ROWS, columns])?;
            }
            Kernels::Tiles(size) => {
                let (rows, shared) = forward_shape(size);
                let name = tile_kernel!("forward", self.dtype, size);
                self.run(name, (batch * heads, queries.div_ceil(rows), 1), 128, shared)?;
            }
            Kernels::Plain => {
                let (blocks, wide) = self.plain_columns();
                let name = if wide {
                    by_dtype!("plain_forward_128", self.dtype)?
                } else {
                    by_dtype!("plain_forward_64", self.dtype)?
                };
                let grid = (batch * heads, queries.div_ceil(PLAIN_TILE), blocks);
                self.run(name, grid, PLAIN_THREADS, PLAIN_SHARED as usize)?;
            }
        }
        Ok((o.tensor, log_sum_exp.tensor))
    }

    fn forward_few(&mut self) -> Result<()> {
        let Sizes { queries, keys, .. } = self.sizes;
        // Keys before the first query's window are seen by none.
        let span = keys.min(self.parameters.window as usize + queries.max(1) - 1);
        let part_keys = self.kernels.part_keys();
        let start = (keys - span) / part_keys * part_keys;
        let multiprocessors = self.cuda.multiprocessors()?;
        let split_keys = self.kernels.block_keys(multiprocessors, self.few_blocks(), keys - start);
        self.parameters.split_start = start as i32;
        self.parameters.split_keys = split_keys as i32;
        if split_keys < keys - start {
            self.parameters.parts = (keys - start).div_ceil(part_keys) as i32;
        }
        self.run_few()
    }

    /// Blocks for a range of keys.
    fn few_blocks(&self) -> usize {
        let Sizes { batch, queries, heads, kv_heads, .. } = self.sizes;
        let rows = FewShape::of(self.kernels).rows;
        batch * kv_heads * (queries * (heads / kv_heads)).div_ceil(rows)
    }

    /// Runs the kernel for few queries over the ranges of keys that the parameters have, and joins the parts that it leaves.
    fn run_few(&mut self) -> Result<()> {
        let Sizes { batch, queries, keys, heads, head_dim, .. } = self.sizes;
        let shared = FewShape::of(self.kernels).shared;
        let name = match self.kernels {
            Kernels::Tiles(size) => tile_kernel!("few", self.dtype, size),
            Kernels::Plain => by_dtype!("plain_few", self.dtype)?,
        };
        let Parameters { split_start, split_keys, parts, .. } = self.parameters;
        let ranges = (keys - split_start as usize).div_ceil(split_keys as usize).max(1);
        let (grid, threads) = ((self.few_blocks(), ranges, 1), FEW_THREADS as u32);
        if parts == 1 {
            return self.run(name, grid, threads, shared);
        }
        let parts = parts as usize;
        let partial_o = self.cuda.empty((batch, queries, heads, parts, head_dim), DType::F32)?;
        let partial_sums = self.cuda.empty((batch, queries, heads, parts, 2), DType::F32)?;
        self.parameters.partial_o = partial_o.pointer;
        self.parameters.partial_sums = partial_sums.pointer;
        self.run(name, grid, threads, shared)?;
        let combine = by_dtype!("combine_parts", self.dtype)?;
        self.run(combine, (batch * queries * heads, 1, 1), 128, combine_shared(head_dim))
    }

    pub(super) fn backward(
        mut self,
        o: &Tensor,
        log_sum_exp: &Tensor,
        d_o: &Tensor,
    ) -> Result<(Tensor, Tensor, Tensor)> {
        let Sizes { batch, queries, keys, heads, kv_heads, head_dim } = self.sizes;
        let (o, d_o) = (contiguous(&self.cuda, o)?, contiguous(&self.cuda, d_o)?);
        let log_sum_exp = self.cuda.contiguous(log_sum_exp)?;
        let dq = self.cuda.empty(&self.sizes.q_shape(), self.dtype)?;
        let dk = self.cuda.empty(&self.sizes.k_shape(), self.dtype)?;
        let dv = self.cuda.empty(&self.sizes.k_shape(), self.dtype)?;
        let rows = batch * heads * queries;
        let sums = self.cuda.empty((2, batch, heads, queries), DType::F32)?;
        let parameters = &mut self.parameters;
        parameters.o = o.pointer;
        parameters.d_o = d_o.pointer;
        parameters.log_sum_exp = log_sum_exp.pointer;
        parameters.dq = dq.pointer;
        parameters.dk = dk.pointer;
        parameters.dv = dv.pointer;
        parameters.scaled_sums = sums.pointer;
        parameters.corrections = sums.pointer + 4 * rows as u64;
        let at_once = matches!(self.kernels, Kernels::Tiles(96 | 128))
            && self.parameters.mode != CAPPED
            && self.hopper()?;
        let warps = batch * heads * queries.div_ceil(32);
        // The kernel sets it to zero, where it has anything to do; tiles are no more than warps.
        let turns = at_once.then(|| self.cuda.empty(1 + warps, DType::U32)).transpose()?;
        if let (Some(turns), 0) = (&turns, warps) {
            self.cuda.clear(turns)?;
        }
        self.parameters.turns = turns.as_ref().map_or(0, |turns| turns.pointer);
        let name = by_dtype!("backward_rows_sums", self.dtype)?;
        self.run(name, (warps.div_ceil(8), 1, 1), 256, 0)?;
        match self.kernels {
            Kernels::Tiles(_) if at_once => {
                self.make_describable()?;
                let lowest = self.tile_ranges(HOPPER_COLUMNS)?;
                let tiles = batch * heads * queries.div_ceil(HOPPER_COLUMNS);
                let sums = self.cuda.empty(tiles * HOPPER_COLUMNS * 128, DType::F32)?;
                self.parameters.dq_sums = sums.pointer;
                // Twice the gradients of a tile's scores, its part of dq, seven barriers and a number.
                let more = 2 * tile_bytes(HOPPER_ROWS, HOPPER_COLUMNS)
                    + 4 * HOPPER_COLUMNS * 128
                    + 7 * 8
                    + 4;
                let tiles_of_keys = keys.div_ceil(HOPPER_ROWS);
                let splits = self.head_splits(batch * kv_heads * tiles_of_keys)?;
                self.parameters.head_splits = splits as i32;
                let shape = (splits, 2, batch * keys * kv_heads, head_dim);
                let parts = (splits > 1).then(|| self.cuda.empty(shape, DType::F32)).transpose()?;
                self.parameters.partial_keys = parts.as_ref().map_or(0, |parts| parts.pointer);
                let name = by_dtype!("attention_hopper_backward_at_once", self.dtype)?;
                let grid = (splits * batch * kv_heads, tiles_of_keys, 1);
                let shared = hopper_shared(128) + more;
                self.run_hopper(name, grid, shared, [HOPPER_COLUMNS, HOPPER_ROWS])?;
                if parts.is_some() {
                    let name = by_dtype!("attention_backward_add_parts", self.dtype)?;
                    let packs = 2 * dk.tensor.elem_count() / 4;
                    self.run(name, (packs.div_ceil(256), 1, 1), 256, 0)?;
                }
                drop((lowest, sums, parts));
            }
            Kernels::Tiles(size) if size <= 128 && self.hopper()? => {
                self.make_describable()?;
                let size = if size == 96 { 128 } else { size };
                let lowest = self.tile_ranges(HOPPER_COLUMNS)?;
                let name = hopper_kernel!("backward_queries", self.dtype, size);
                let grid = (batch * heads, queries.div_ceil(HOPPER_ROWS), 1);
                let shared = hopper_shared(size);
                self.run_hopper(name, grid, shared, [HOPPER_ROWS, HOPPER_COLUMNS])?;
                let name = hopper_kernel!("backward_keys", self.dtype, size);
                let grid = (batch * kv_heads, keys.div_ceil(HOPPER_ROWS), 1);
                self.run_hopper(name, grid, shared, [HOPPER_COLUMNS, HOPPER_ROWS])?;
                drop(lowest);
            }
            Kernels::Tiles(size @ 256) if self.hopper()? => {
                self.make_describable()?;
                let lowest = self.tile_ranges(HOPPER_COLUMNS)?;
                let tiles = [HOPPER_COLUMNS; 2];
                let name = hopper_kernel!("backward_queries", self.dtype, size);
                let grid = (batch * heads, queries.div_ceil(HOPPER_COLUMNS), 1);
                self.run_hopper(name, grid, HOPPER_WIDE_SHARED, tiles)?;
                let name = hopper_kernel!("backward_keys", self.dtype, size);
                let grid = (batch * kv_heads, keys.div_ceil(HOPPER_COLUMNS), 1);
                self.run_hopper(name, grid, HOPPER_WIDE_SHARED, tiles)?;
                drop(lowest);
            }
            Kernels::Tiles(size) => {
                let (rows, columns) = if size <= 128 { (128, 64) } else { (64, 32) };
                let lowest = self.tile_ranges(columns)?;
                let most = self.cuda.most_shared_memory()?;
                let shared = |stages| {
                    2 * tile_bytes(rows, size)
                        + stages * (2 * tile_bytes(columns, size) + 3 * 4 * columns)
                };
                let stages = if shared(2) <= most { 2 } else { 1 };
                self.parameters.stages = stages as i32;
                let (threads, shared) = (2 * rows as u32, shared(stages));
                let name = tile_kernel!("backward_queries", self.dtype, size);
                self.run(name, (batch * heads, queries.div_ceil(rows), 1), threads, shared)?;
                let name = tile_kernel!("backward_keys", self.dtype, size);
                let passes = if size <= 128 { 1 } else { 2 };
                self.run(name, (batch * kv_heads, keys.div_ceil(rows), passes), threads, shared)?;
                drop(lowest);
            }
            Kernels::Plain => {
                let (blocks, wide) = self.plain_columns();
                let (of_queries, of_keys) = if wide {
                    (
                        by_dtype!("plain_backward_queries_128", self.dtype)?,
                        by_dtype!("plain_backward_keys_128", self.dtype)?,
                    )
                } else {
                    (
                        by_dtype!("plain_backward_queries_64", self.dtype)?,
                        by_dtype!("plain_backward_keys_64", self.dtype)?,
                    )
                };
                let shared = PLAIN_SHARED as usize;
                let grid = (batch * heads, queries.div_ceil(PLAIN_TILE), blocks);
                self.run(of_queries, grid, PLAIN_THREADS, shared)?;
                let grid = (batch * kv_heads, keys.div_ceil(PLAIN_TILE), blocks);
                self.run(of_keys, grid, PLAIN_THREADS, shared)?;
            }
        }
        Ok((dq.tensor, dk.tensor, dv.tensor))
    }

    /// Into how many parts the heads of a group are split, where there are `blocks` for tiles of keys: the most whose
    /// blocks all have room on the GPU.
    fn head_splits(&self, blocks: usize) -> Result<usize> {
        #[cfg(test)]
        if WHOLE_GROUPS.get() {
            return Ok(1);
        }
        let Sizes { heads, kv_heads, .. } = self.sizes;
        let (group, room) = (heads / kv_heads, self.cuda.multiprocessors()?);
        let fits = |splits: &usize| group.is_multiple_of(*splits) && splits * blocks <= room;
        Ok((1..=group).rev().find(fits).unwrap_or(1))
    }

    /// The lowest keys that queries and tiles of `size` of them see, which are written when asked for.
    fn tile_ranges(&mut self, size: usize) -> Result<Option<Array>> {
        let Sizes { batch, queries, .. } = self.sizes;
        let tiles = queries.div_ceil(size);
        self.parameters.tiles = tiles as i32;
        if self.parameters.ragged == 0 {
            return Ok(None);
        }
        // The pairs of the tiles first, for their alignment.
        let lowest = self.cuda.empty(batch * (2 * tiles + queries), DType::U32)?;
        self.parameters.tile_lowest = lowest.pointer;
        self.parameters.lowest = lowest.pointer + 8 * (batch * tiles) as u64;
        let grid = ((batch * tiles).div_ceil(8), 1, 1);
        let launch = self.prepare("attention_backward_tile_ranges", grid, 256, 0)?;
        let size = size as i32;
        // SAFETY: the kernel takes the parameters and the size.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&self.parameters).arg(&size);
            })
        }?;
        Ok(Some(lowest))
    }
}

/// See [`super::backward_sinks`].
pub(super) fn backward_sinks(
    sinks: &Tensor,
    o: &Tensor,
    log_sum_exp: &Tensor,
    d_o: &Tensor,
) -> Result<Tensor> {
    const THREADS: u32 = 256;
    let cuda = Cuda::of(o)?;
    let (batch, queries, heads, head_dim) = o.dims4()?;
    let gradients = cuda.empty(heads, DType::F32)?;
    let name = by_dtype!("attention_backward_sinks", o.dtype())?;
    let [sinks, o, log_sum_exp, d_o] = [sinks, o, log_sum_exp, d_o].map(|it| cuda.contiguous(it));
    let (sinks, o, log_sum_exp, d_o) = (sinks?, o?, log_sum_exp?, d_o?);
    let parameters = Parameters {
        o: o.pointer,
        d_o: d_o.pointer,
        log_sum_exp: log_sum_exp.pointer,
        corrections: gradients.pointer,
        sinks: sinks.pointer,
        batch: batch as i32,
        queries: queries as i32,
        heads: heads as i32,
        head_dim: head_dim as i32,
        ..Parameters::default()
    };
    if heads > 0 {
        let launch = MODULE.launch(&cuda, name, (heads as u32, 1, 1), THREADS, 0)?.overlapping();
        // SAFETY: the parameters describe arrays that are held here; a block has a head.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&parameters);
            })
        }?;
    }
    Ok(gradients.tensor)
}

/// What Hopper's backward kernels hold of heads padded to `size`, and the barriers of their stages.
fn hopper_shared(size: usize) -> usize {
    let stage = 2 * tile_bytes(HOPPER_COLUMNS, size) + 3 * 4 * HOPPER_COLUMNS + 2 * 8;
    2 * tile_bytes(HOPPER_ROWS, size) + HOPPER_STAGES * stage
}

/// The same of heads padded to 256: tiles of 64 by 256, of rows two, of stages one and another, and twice and once scores of
/// such a tile.
const HOPPER_WIDE_SHARED: usize = (3 + HOPPER_STAGES) * tile_bytes(HOPPER_COLUMNS, 256)
    + 3 * tile_bytes(HOPPER_COLUMNS, HOPPER_COLUMNS)
    + HOPPER_STAGES * 3 * 4 * HOPPER_COLUMNS
    + (2 * HOPPER_STAGES + 2) * 8;

/// The elements by their strides; with `aligned`, rows start at multiples of 16 bytes.
pub(super) fn strided(cuda: &Cuda, tensor: &Tensor, aligned: bool) -> Result<Array> {
    let array = cuda.strided_rows(tensor)?;
    let rows = array.tensor.dims().iter().zip(array.tensor.stride()).take(3);
    let whole =
        rows.filter(|(size, _)| **size > 1).all(|(_, stride)| stride % 8 == 0 && *stride > 0);
    if !aligned || (whole && array.pointer % 16 == 0) || tensor.elem_count() == 0 {
        return Ok(array);
    }
    cuda.strided(&array.tensor.force_contiguous()?)
}

/// Contiguous elements, starting at a multiple of 16 bytes.
pub(super) fn contiguous(cuda: &Cuda, tensor: &Tensor) -> Result<Array> {
    let array = cuda.contiguous(tensor)?;
    if array.pointer % 16 == 0 || tensor.elem_count() == 0 {
        return Ok(array);
    }
    cuda.strided(&array.tensor.force_contiguous()?)
}
