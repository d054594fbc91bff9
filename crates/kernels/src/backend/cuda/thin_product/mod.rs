//! Products of a few rows in one launch, each element one sum along the depth; see `kernel.cu`.

use super::product::{descriptor, size};
use super::{Cuda, Matrix, Module, TmaDescriptor, by_dtype, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, bail};

static MODULE: Module = module!("thin_product");

/// Of one launch.
const MOST_OUTPUTS: usize = 4;
/// Rows of a launch.
const MOST_ROWS: usize = 256;
/// A tile, as the kernel has it.
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
    unused: i32,
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
        [rows, depth]: [usize; 2],
        products: &[ThinProduct],
    ) -> Result<()> {
        let groups = rows.div_ceil(64).next_power_of_two();
        // As many stages as kernel.cu has.
        let (name, stages) = match groups {
            1 => (by_dtype!("thin_products_1", x.dtype)?, 6),
            2 => (by_dtype!("thin_products_2", x.dtype)?, 4),
            _ => (by_dtype!("thin_products_4", x.dtype)?, 5),
        };
        let odd = products.iter().find(|product| !product.columns.is_multiple_of(8));
        if !(1..=MOST_ROWS).contains(&rows) || depth == 0 || odd.is_some() {
            bail!(
                "metal-candle-kernels: thin products on CUDA of {rows} rows, {depth} deep, expected 1 to {MOST_ROWS}, and columns that are multiples of 8"
            )
        }
        for products in products.chunks(MOST_OUTPUTS) {
            let mut all = Products {
                x: descriptor(
                    x,
                    x.dtype,
                    [rows, depth],
                    [(64 * groups / CLUSTER) as u32, DEPTH as u32],
                )?,
                count: products.len() as i32,
                rows: rows as i32,
                depth: size(depth)?,
                ..Default::default()
            };
            let mut tiles = 0;
            for (index, ThinProduct { weight, columns, bias, y }) in products.iter().enumerate() {
                if weight.dtype != x.dtype || !matches!(x.dtype, DType::BF16 | DType::F16) {
                    bail!(
                        "metal-candle-kernels: a thin product of {:?} with {:?} on CUDA, expected BF16 or F16",
                        x.dtype,
                        weight.dtype
                    )
                }
                let of_box = [COLUMNS as u32, DEPTH as u32];
                all.weights[index] = descriptor(*weight, x.dtype, [*columns, depth], of_box)?;
                all.outputs[index] = Output {
                    bias: bias.unwrap_or(0),
                    y: *y,
                    columns: size(*columns)?,
                    first_tile: size(tiles)?,
                };
                // A cluster has tiles of one product.
                tiles += columns.div_ceil(COLUMNS).next_multiple_of(CLUSTER);
            }
            let shared = stages * (groups * 64 + COLUMNS) * DEPTH * 2 + 16 * stages + 1024;
            let (grid, threads) = ((size(tiles)? as u32, 1, 1), 128 * groups as u32 + 32);
            let launch = MODULE.launch(self, name, grid, threads, shared as u32)?.overlapping();
            // SAFETY: as the kernel declares it; the caller holds what the pointers point into.
            unsafe {
                launch.with(|arguments| {
                    arguments.arg(&all);
                })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
