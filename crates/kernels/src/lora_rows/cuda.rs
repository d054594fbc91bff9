//! Low-rank adapters of rows on CUDA, see `kernel.cu`.

use super::{Adapters, Factors, ITEM_NUMBERS, OPERATION, RANKS, Rows, Target};
use crate::backend::cpu::collapsed_rows;
use crate::backend::cuda::{Array, Cuda, Module, by_dtype, is_recording, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use std::sync::Arc;

static MODULE: Module = module!("lora_rows");

/// The depth of a part of x·A is at most this, and a multiple of that.
const MOST_DEPTH: usize = 4096;
const DEPTH: usize = 256;
/// Ranks and warps of a block of the first product, and products that are copied ahead, of DOWN_RANKS / 8 + 2 times 16 bytes
/// for each thread.
const DOWN_RANKS: usize = 16;
const DOWN_WARPS: usize = 8;
const DOWN_STAGES: usize = 6;
/// Warps of a block of the second product, their columns, and products that are copied ahead, of UP_COLUMNS / 8 + 2 such.
const UP_WARPS: usize = 4;
const UP_COLUMNS: usize = 32;
const UP_STAGES: usize = 4;
/// Columns that such a block has at a time.
const UP_STRIDE: usize = UP_WARPS * UP_COLUMNS;
const WARP: usize = 32;
/// Blocks that a multiprocessor of Hopper holds of it, and how many turns they have at most.
const UP_BLOCKS: usize = 4;
const MOST_TURNS: usize = 8;
const PLAIN_THREADS: usize = 128;
/// Layers of a launch.
const MOST_LAYERS: usize = 4;
/// Numbers of 64 bits that the factors of an adapter for a layer take in the table.
const TABLE_NUMBERS: usize = 3;

/// As in `kernel.cu`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RowLayer {
    adapters: u64,
    y: u64,
    y_stride: i64,
    outer: i32,
    unused: i32,
}

/// As in `kernel.cu`.
#[repr(C)]
struct LoraRows {
    x: u64,
    numbers: u64,
    parts: u64,
    x_stride: i64,
    inner: i32,
    places: i32,
    pitch: i32,
    order: i32,
    adapters: i32,
    items: i32,
    count: i32,
    layer_count: i32,
    part_count: i32,
    split: i32,
    turns: i32,
    unused: i32,
    layers: [RowLayer; MOST_LAYERS],
}

// SAFETY: plain numbers, laid out as in C.
unsafe impl DeviceRepr for LoraRows {}

/// Which of the counts that `Rows::numbers` begin with is that of a launch's blocks.
const ITEMS: i32 = 0;
/// Single rows that have an adapter.
const PLACES: i32 = 1;

/// What `RowFactors` in `kernel.cu` says of every adapter for every layer.
pub(super) fn table(factors: &[Option<Arc<Factors>>], device: &Device) -> Result<Tensor> {
    let cuda = Cuda::on(device)?;
    let mut numbers = Vec::with_capacity(TABLE_NUMBERS * factors.len());
    for factors in factors {
        let Some(factors) = factors else {
            numbers.extend([0; TABLE_NUMBERS]);
            continue;
        };
        let address = |tensor| Ok::<_, candle_core::Error>(cuda.contiguous(tensor)?.pointer as i64);
        let scale = i64::from((factors.scale as f32).to_bits()) << 32;
        let rank = i64::from(number(factors.rank)?);
        numbers.extend([address(&factors.a)?, address(&factors.b)?, rank | scale]);
    }
    Tensor::from_slice(&numbers, numbers.len(), device)
}

pub(super) fn add_updates(
    x: &Tensor,
    inner: usize,
    targets: &[Target],
    adapters: &Adapters,
    rows: &Rows,
) -> Result<()> {
    let cuda = Cuda::of(x)?;
    let x = cuda.collapsed_rows(x)?;
    let Some(table) = &adapters.table else {
        bail!("metal-candle-kernels: {OPERATION}: adapters of another device than CUDA")
    };
    let (table, numbers) = (cuda.contiguous(table)?, cuda.contiguous(&rows.uploaded)?);
    if is_recording() {
        // The table has only their addresses.
        for target in targets {
            let of_layer = &adapters.factors[target.layer * adapters.count..][..adapters.count];
            for factors in of_layer.iter().flatten() {
                cuda.strided(&factors.a)?;
                cuda.strided(&factors.b)?;
            }
        }
    }
    // A layer by itself, as others may not change its bits.
    let x_fits = x.dtype != DType::F32 && is_aligned(&x, inner);
    let fits =
        |target: &Target| Ok::<_, Error>(is_aligned(&cuda.strided(target.y)?, target.sizes.outer));
    let (mut of_tiles, mut others) = (Vec::new(), Vec::new());
    for target in targets {
        let group = if x_fits && fits(target)? { &mut of_tiles } else { &mut others };
        group.push(*target);
    }
    for (targets, in_tiles) in [(of_tiles, true), (others, false)] {
        for targets in targets.chunks(MOST_LAYERS) {
            let call = Call { cuda: &cuda, x: &x, inner, targets, adapters, rows };
            call.run(&table, &numbers, in_tiles)?;
        }
    }
    Ok(())
}

/// Layers of a launch.
struct Call<'a> {
    cuda: &'a Cuda<'a>,
    x: &'a Array,
    inner: usize,
    targets: &'a [Target<'a>],
    adapters: &'a Adapters,
    rows: &'a Rows,
}

impl Call<'_> {
    /// On tensor cores where `in_tiles`.
    fn run(&self, table: &Array, numbers: &Array, in_tiles: bool) -> Result<()> {
        let Call { cuda, x, inner, targets, adapters, rows } = *self;
        let dtype = x.dtype;
        let plan = &rows.plan;
        // There is room for so many.
        let items = (rows.numbers.len() - plan.items) / ITEM_NUMBERS;
        let most_rank = targets.iter().map(|target| target.sizes.most_rank).max().unwrap_or(0);
        let pitch = most_rank.next_multiple_of(RANKS);
        // They follow from the depth alone, so a row has the same sums in any company.
        let part_count = inner.div_ceil(MOST_DEPTH).max(1);
        let split = inner.div_ceil(part_count).next_multiple_of(DEPTH);
        let parts = cuda.empty((part_count, targets.len(), plan.places, pitch), DType::F32)?;
        let mut layers = [RowLayer::default(); MOST_LAYERS];
        let mut ys = Vec::with_capacity(targets.len());
        for (layer, target) in layers.iter_mut().zip(targets) {
            let outer = target.sizes.outer;
            let y = cuda.strided(target.y)?;
            let place = target.layer * adapters.count * TABLE_NUMBERS * size_of::<i64>();
            *layer = RowLayer {
                adapters: table.pointer + place as u64,
                y: y.pointer,
                y_stride: stride(&y, outer) as i64,
                outer: number(outer)?,
                unused: 0,
            };
            ys.push(y);
        }
        let widest = targets.iter().map(|target| target.sizes.outer).max().unwrap_or(0);
        let columns: usize =
            targets.iter().map(|target| target.sizes.outer.div_ceil(UP_STRIDE)).sum();
        // Where there are more than a GPU holds at once.
        let turns = (items * columns).div_ceil(UP_BLOCKS * cuda.multiprocessors()?);
        let turns = turns.next_power_of_two().min(MOST_TURNS);
        let all = LoraRows {
            x: x.pointer,
            numbers: numbers.pointer,
            parts: parts.pointer,
            x_stride: stride(x, inner) as i64,
            inner: number(inner)?,
            places: number(plan.places)?,
            pitch: number(pitch)?,
            order: number(plan.order)?,
            adapters: number(plan.adapters)?,
            items: number(plan.items)?,
            count: if in_tiles { ITEMS } else { PLACES },
            layer_count: number(targets.len())?,
            part_count: number(part_count)?,
            split: number(split)?,
            turns: number(turns)?,
            unused: 0,
            layers,
        };
        if !in_tiles {
            let threads = PLAIN_THREADS as u32;
            let columns = widest.div_ceil(PLAIN_THREADS);
            let down = by_dtype!("plain_down", dtype)?;
            self.launch(&all, down, [plan.places, part_count], threads, 0)?;
            return self.launch(
                &all,
                by_dtype!("plain_up", dtype)?,
                [plan.places, columns],
                threads,
                0,
            );
        }
        let [down, up] = match dtype {
            DType::BF16 => ["lora_rows_down_bf16", "lora_rows_up_bf16"],
            _ => ["lora_rows_down_f16", "lora_rows_up_f16"],
        };
        let of_down = [items, part_count * most_rank.div_ceil(DOWN_RANKS)];
        let of_up = [items, widest.div_ceil(UP_STRIDE * turns)];
        let operands = |stages, packs, warps| (16 * stages * packs * warps * WARP) as u32;
        let for_down = operands(DOWN_STAGES, DOWN_RANKS / 8 + 2, DOWN_WARPS);
        let for_up = operands(UP_STAGES, UP_COLUMNS / 8 + 2, UP_WARPS);
        self.launch(&all, down, of_down, (WARP * DOWN_WARPS) as u32, for_down)?;
        self.launch(&all, up, of_up, (WARP * UP_WARPS) as u32, for_up)
    }

    /// A kernel of items or rows, by parts or columns.
    fn launch(
        &self,
        all: &LoraRows,
        name: &'static str,
        [x, y]: [usize; 2],
        threads: u32,
        shared: u32,
    ) -> Result<()> {
        let grid = (number(x)? as u32, number(y)? as u32, self.targets.len() as u32);
        let launch = MODULE.launch(self.cuda, name, grid, threads, shared)?.overlapping();
        // SAFETY: as the kernel declares it; the caller holds what the addresses are of, and the adapters hold the
        // factors.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(all);
            })
        }
    }
}

/// Elements from one row to the next.
fn stride(array: &Array, columns: usize) -> usize {
    collapsed_rows(array.tensor.layout()).map_or(columns, |(_, _, stride)| stride)
}

/// Whether rows are whole packs of 16 bytes, at multiples of that.
fn is_aligned(array: &Array, columns: usize) -> bool {
    array.pointer.is_multiple_of(16)
        && columns.is_multiple_of(8)
        && stride(array, columns).is_multiple_of(8)
}

fn number(number: usize) -> Result<i32> {
    match i32::try_from(number) {
        Ok(number) => Ok(number),
        Err(_) => bail!(
            "metal-candle-kernels: {OPERATION}: {number} of something are too many on CUDA, expected less than 2^31"
        ),
    }
}
