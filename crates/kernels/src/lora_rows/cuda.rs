//! Low-rank adapters of rows on CUDA, see `kernel.cu`.

use super::{Adapters, Factors, OPERATION, RANKS, Rows, Target};
use crate::backend::cpu::collapsed_rows;
use crate::backend::cuda::{Array, Cuda, Module, by_dtype, is_recording, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Device, Error, Result, Tensor, bail};
use std::sync::Arc;

static MODULE: Module = module!("lora_rows");

/// The depth of a part of x·A.
const SPLIT: usize = 1024;
/// Columns that a block has at a time.
const UP_COLUMNS: usize = 256;
/// Blocks that keep a GPU busy; where there would be more, they have columns in turns.
const UP_BLOCKS: usize = 1200;
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
#[derive(Clone, Copy, Default)]
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
    turns: i32,
    unused: i32,
    layers: [RowLayer; MOST_LAYERS],
}

// SAFETY: plain numbers, laid out as in C.
unsafe impl DeviceRepr for LoraRows {}

/// What the blocks of a launch are of: where such items are among the numbers, and which of the counts that
/// `Rows::numbers` begin with is theirs.
#[derive(Clone, Copy)]
struct Blocks {
    start: usize,
    count: usize,
}

const ITEMS: usize = 0;
const LARGE_ITEMS: usize = 1;
/// Single rows that have an adapter.
const PLACES: usize = 2;

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
        let most_rank = targets.iter().map(|target| target.sizes.most_rank).max().unwrap_or(0);
        let pitch = most_rank.next_multiple_of(RANKS);
        let splits = inner.div_ceil(SPLIT);
        let parts = cuda.empty((splits, targets.len(), plan.places, pitch), DType::F32)?;
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
        let columns = widest.div_ceil(UP_COLUMNS);
        let blocks = plan.items.room * columns * targets.len();
        let turns = (blocks / UP_BLOCKS).clamp(1, MOST_TURNS);
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
            items: 0,
            count: 0,
            layer_count: number(targets.len())?,
            turns: number(turns)?,
            unused: 0,
            layers,
        };
        if !in_tiles {
            let (of, threads) = (Blocks { start: 0, count: PLACES }, PLAIN_THREADS as u32);
            let columns = widest.div_ceil(PLAIN_THREADS);
            self.launch(&all, by_dtype!("plain_down", dtype)?, [plan.places, splits], threads, of)?;
            return self.launch(
                &all,
                by_dtype!("plain_up", dtype)?,
                [plan.places, columns],
                threads,
                of,
            );
        }
        let [down, down_large, up, up_large] = match dtype {
            DType::BF16 => [
                "lora_rows_down_bf16",
                "lora_rows_down_large_bf16",
                "lora_rows_up_bf16",
                "lora_rows_up_large_bf16",
            ],
            _ => [
                "lora_rows_down_f16",
                "lora_rows_down_large_f16",
                "lora_rows_up_f16",
                "lora_rows_up_large_f16",
            ],
        };
        let columns = widest.div_ceil(UP_COLUMNS * turns);
        let (items, large) = (plan.items, plan.large_items);
        let of_items = Blocks { start: items.start, count: ITEMS };
        let of_large = Blocks { start: large.start, count: LARGE_ITEMS };
        self.launch(&all, down, [items.room, splits], 256, of_items)?;
        self.launch(&all, down_large, [large.room, splits], 256, of_large)?;
        self.launch(&all, up, [items.room, columns], 128, of_items)?;
        self.launch(&all, up_large, [large.room, columns], 256, of_large)
    }

    /// A kernel of items or rows, by parts or columns.
    fn launch(
        &self,
        all: &LoraRows,
        name: &'static str,
        [x, y]: [usize; 2],
        threads: u32,
        of: Blocks,
    ) -> Result<()> {
        let given = LoraRows { items: number(of.start)?, count: of.count as i32, ..*all };
        let grid = (number(x)? as u32, number(y)? as u32, self.targets.len() as u32);
        let launch = MODULE.launch(self.cuda, name, grid, threads, 0)?.overlapping();
        // SAFETY: as the kernel declares it; the caller holds what the addresses are of, and the adapters hold the
        // factors.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&given);
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
