//! Products of a few rows in one launch, or the gated unit of two, each element one sum along the depth; see `kernel.cu`.

use super::product::{descriptor, size};
use super::{Cuda, Matrix, Module, TmaDescriptor, module};
use crate::glu::Activation;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, bail};

static MODULE: Module = module!("thin_product");

/// Of one launch.
const MOST_OUTPUTS: usize = 4;
/// Rows of a launch.
const MOST_ROWS: usize = 256;
/// Columns of a weight's smallest tile, and what tiles have in depth.
const COLUMNS: usize = 64;
const DEPTH: usize = 64;
/// Blocks that share rows.
const CLUSTER: usize = 4;

/// One of several products of the same rows.
pub(crate) struct ThinProduct {
    /// `(columns, depth)`
    pub(crate) weight: Matrix,
    pub(crate) columns: usize,
    /// `(columns)`, contiguous, in the dtype of the others.
    pub(crate) bias: Option<u64>,
    /// `(rows, columns)`, contiguous.
    pub(crate) y: u64,
}

/// A kernel, by its names in bf16 and f16: groups of 64 rows, columns and stages of a block.
struct Kernel {
    names: [&'static str; 2],
    groups: usize,
    columns: usize,
    stages: usize,
}

macro_rules! kernel {
    ($groups:literal, $columns:literal, $stages:literal) => {
        Kernel {
            names: [
                concat!("thin_products_", $groups, "_", $columns, "_", $stages, "_bf16"),
                concat!("thin_products_", $groups, "_", $columns, "_", $stages, "_f16"),
            ],
            groups: $groups,
            columns: $columns,
            stages: $stages,
        }
    };
}

/// Those that have a multiprocessor by themselves, by the groups.
static LONE: [Kernel; 3] = [kernel!(1, 64, 13), kernel!(2, 64, 9), kernel!(4, 64, 5)];
/// Of two blocks for each, with 64 and 128 columns.
static PAIRED: [[Kernel; 2]; 2] =
    [[kernel!(1, 64, 6), kernel!(1, 128, 4)], [kernel!(2, 64, 4), kernel!(2, 128, 3)]];

impl Kernel {
    /// The one for so many rows, and for outputs that are `tiles` tiles of [`COLUMNS`]. On an H200, of 128 rows, 4096 deep:
    /// 6144 columns take 24 us by a block for each multiprocessor and 33 by two, and 28672 columns 95, 77 with 64 columns and
    /// 70 with 128.
    fn of(rows: usize, tiles: usize, multiprocessors: usize) -> &'static Kernel {
        let index = rows.div_ceil(64).next_power_of_two().trailing_zeros() as usize;
        let Some([narrow, wide]) = PAIRED.get(index).filter(|_| tiles > multiprocessors) else {
            return &LONE[index.min(LONE.len() - 1)];
        };
        // Wide ones where they don't leave more of the GPU idle at the end.
        let turns = |tiles: usize| tiles.div_ceil(2 * multiprocessors);
        if 2 * turns(tiles.div_ceil(2)) <= turns(tiles) { wide } else { narrow }
    }

    fn shared(&self) -> usize {
        self.stages * (self.groups * 64 + self.columns) * DEPTH * 2 + 16 * self.stages + 1024
    }
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Output {
    bias: u64,
    y: u64,
    columns: i32,
    first_tile: i32,
}

/// As the kernel takes it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Products {
    x: TmaDescriptor,
    weights: [TmaDescriptor; MOST_OUTPUTS],
    outputs: [Output; MOST_OUTPUTS],
    count: i32,
    rows: i32,
    depth: i32,
    gate: i32,
}

// SAFETY: it is plain numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for Products {}

impl Cuda<'_> {
    /// The products of `x` `(rows, depth)`, of up to [`MOST_ROWS`] rows and at least one, in bf16 or f16, on Hopper.
    /// Rows of all matrices begin at 16 bytes, and columns are multiples of 8. Each element is summed up in the order of
    /// [`Cuda::sums_of_products`].
    pub(crate) fn thin_products(
        &self,
        x: Matrix,
        sizes: [usize; 2],
        products: &[ThinProduct],
    ) -> Result<()> {
        products.chunks(MOST_OUTPUTS).try_for_each(|some| self.thin_launch(x, sizes, some, None))
    }

    /// The gated unit of two such products of as many columns, gate and up, with the bits that it has by itself. It goes to
    /// where the first one would.
    pub(crate) fn thin_unit(
        &self,
        x: Matrix,
        sizes: [usize; 2],
        both: &[ThinProduct; 2],
        activation: Activation,
    ) -> Result<()> {
        let [gate, up] = both;
        if gate.columns != up.columns {
            bail!(
                "metal-candle-kernels: a thin unit on CUDA of {} and {} columns, expected as many",
                gate.columns,
                up.columns
            )
        }
        self.thin_launch(x, sizes, both, Some(activation))
    }

    fn thin_launch(
        &self,
        x: Matrix,
        [rows, depth]: [usize; 2],
        products: &[ThinProduct],
        unit: Option<Activation>,
    ) -> Result<()> {
        let odd = products.iter().find(|product| !product.columns.is_multiple_of(8));
        if !(1..=MOST_ROWS).contains(&rows) || depth == 0 || odd.is_some() {
            bail!(
                "metal-candle-kernels: thin products on CUDA of {rows} rows, {depth} deep, expected 1 to {MOST_ROWS}, and columns that are multiples of 8"
            )
        }
        let tiles =
            |product: &ThinProduct| product.columns.div_ceil(COLUMNS).next_multiple_of(CLUSTER);
        let tiles = products.iter().map(tiles).sum();
        let kernel = Kernel::of(rows, tiles, self.multiprocessors()?);
        let [in_bf16, in_f16] = kernel.names;
        let name = if x.dtype == DType::BF16 { in_bf16 } else { in_f16 };
        let of_box = [(64 * kernel.groups / CLUSTER) as u32, DEPTH as u32];
        let mut all = Products {
            x: descriptor(x, x.dtype, [rows, depth], of_box)?,
            count: products.len() as i32,
            rows: rows as i32,
            depth: size(depth)?,
            gate: unit.map_or(0, |activation| 1 + activation.code() as i32),
            ..Default::default()
        };
        // A unit's tiles have as many columns of gate as of up.
        let half = kernel.columns / 2;
        let width = if unit.is_some() { half } else { kernel.columns };
        let mut tiles = 0;
        for (index, ThinProduct { weight, columns, bias, y }) in products.iter().enumerate() {
            if weight.dtype != x.dtype || !matches!(x.dtype, DType::BF16 | DType::F16) {
                bail!(
                    "metal-candle-kernels: a thin product of {:?} with {:?} on CUDA, expected BF16 or F16",
                    x.dtype,
                    weight.dtype
                )
            }
            let of_box = [half as u32, DEPTH as u32];
            all.weights[index] = descriptor(*weight, x.dtype, [*columns, depth], of_box)?;
            all.outputs[index] = Output {
                bias: bias.unwrap_or(0),
                y: *y,
                columns: size(*columns)?,
                first_tile: size(tiles)?,
            };
            // A cluster has tiles of one product. A unit has its own once.
            if unit.is_none() || index == 0 {
                tiles += columns.div_ceil(width).next_multiple_of(CLUSTER);
            }
        }
        let (grid, threads) = ((size(tiles)? as u32, 1, 1), 128 * kernel.groups as u32 + 32);
        let shared = kernel.shared() as u32;
        let launch = MODULE.launch(self, name, grid, threads, shared)?.overlapping();
        // SAFETY: as the kernel declares it; the caller holds what the pointers point into.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&all);
            })
        }
    }
}

#[cfg(test)]
mod tests;
