//! Sums of matrix products in one launch, where the GPU has what `kernel.cu` takes.

use super::{Cuda, Matrix, Module, TmaDescriptor, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, bail};

static MODULE: Module = module!("product");

/// Of one launch.
const MOST_TERMS: usize = 8;
pub(crate) const MOST_OUTPUTS: usize = 4;

const THREADS: u32 = 384;

/// A tile of a cluster of two blocks.
pub(crate) const TILE: usize = 256;

/// Shared memory of a block, as the kernel lays it out: four stages, what is written, scales of columns, barriers, and
/// what it takes to begin at a multiple of 1024 bytes.
const SHARED: u32 = 4 * (48 << 10) + (32 << 10) + 1024 + 80 + 1024;

/// The part of the GPU's time that has to go into elements of the outputs, in percent.
const WORTHWHILE: usize = 75;
/// The same where a term is of codes: nothing else multiplies these, and unpacking them costs far more.
const WORTHWHILE_FOR_CODES: usize = 15;

/// `a·b`: `a` `(rows, depth)` in rows, `b` `(depth, columns)`.
#[derive(Clone, Copy)]
pub(crate) struct Term {
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    pub(crate) depth: usize,
}

/// A product of e4m3 codes (u8): `a` `(rows, depth)` and `b` `(columns, depth)`, which stand for multiples of a scale a
/// row.
#[derive(Clone, Copy)]
pub(crate) struct CodesTerm {
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    pub(crate) depth: usize,
    /// The addresses of f32 scales: of `a` for the rows of whole tiles, as [`TILE`] has them; of `b` at 16 bytes, or 0
    /// for 1.
    pub(crate) scales: (u64, u64),
}

/// A sum of products: `to` `(rows, columns)`.
pub(crate) struct Sum {
    pub(crate) to: Matrix,
    pub(crate) columns: usize,
    /// `(columns)`, contiguous, in the dtype of the others.
    pub(crate) bias: Option<u64>,
    /// Of all sums of a launch, or of none.
    pub(crate) codes: Option<CodesTerm>,
    pub(crate) terms: Vec<Term>,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct TermDescriptors {
    a: TmaDescriptor,
    b: TmaDescriptor,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Output {
    bias: u64,
    row_scales: u64,
    column_scales: u64,
    first_term: i32,
    terms: i32,
    first_tile: i32,
    columns: i32,
}

/// As the kernel takes it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Products {
    terms: [TermDescriptors; MOST_TERMS],
    c: [TmaDescriptor; MOST_OUTPUTS],
    outputs: [Output; MOST_OUTPUTS],
    depths: [i32; MOST_TERMS],
    count: i32,
    tiles_down: i32,
    tiles_across: i32,
    unused: i32,
}

// SAFETY: it is plain numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for Products {}

impl Cuda<'_> {
    /// Whether [`Cuda::sums_of_products`] has kernels for sums of these numbers of columns, of so many
    /// terms each, that of codes included where there `are_codes`, that keep the GPU busy.
    pub(crate) fn takes_sums_of_products(
        &self,
        dtype: DType,
        rows: usize,
        columns: impl ExactSizeIterator<Item = usize> + Clone,
        terms: usize,
        are_codes: bool,
    ) -> Result<bool> {
        let tiles =
            rows.div_ceil(TILE) * columns.clone().map(|it| it.div_ceil(TILE)).sum::<usize>();
        let at_once = (self.multiprocessors()? / 2).max(1);
        let there = tiles.div_ceil(at_once) * at_once * TILE * TILE;
        let used = rows * columns.clone().sum::<usize>();
        let worthwhile = if are_codes { WORTHWHILE_FOR_CODES } else { WORTHWHILE };
        let fits = [DType::BF16, DType::F16].contains(&dtype)
            && rows > 0
            && terms > 0
            && columns.len() <= MOST_OUTPUTS
            && columns.len() * terms <= MOST_TERMS
            && columns.into_iter().all(|columns| columns > 0 && columns.is_multiple_of(8))
            && 100 * used >= worthwhile * there
            && i32::try_from(there).is_ok();
        Ok(fits && self.has_warpgroups()?)
    }

    /// The sums, in one launch. All `b` of terms are transposed, or none; all matrices have rows or, if transposed,
    /// columns that begin at 16 bytes.
    pub(crate) fn sums_of_products(&self, dtype: DType, rows: usize, sums: &[Sum]) -> Result<()> {
        let mut all = Products { count: size(sums.len())?, ..Default::default() };
        let along = sums.iter().flat_map(|sum| &sum.terms).all(|term| term.b.is_transposed());
        let (mut terms, mut tiles) = (0, 0);
        let of_codes = sums.iter().filter(|sum| sum.codes.is_some()).count();
        if of_codes != 0 && of_codes != sums.len() {
            bail!(
                "metal-candle-kernels: {of_codes} of {} sums of products in one launch on CUDA have a term of codes, expected all or none",
                sums.len()
            )
        }
        let terms_of = |sum: &Sum| sum.terms.len() + usize::from(sum.codes.is_some());
        if sums.len() > MOST_OUTPUTS || sums.iter().map(terms_of).sum::<usize>() > MOST_TERMS {
            bail!(
                "metal-candle-kernels: {} sums of products in one launch on CUDA, expected {MOST_OUTPUTS} of {MOST_TERMS} terms at most",
                sums.len()
            )
        }
        for (index, sum) in sums.iter().enumerate() {
            all.outputs[index] = Output {
                bias: sum.bias.unwrap_or(0),
                row_scales: sum.codes.map_or(0, |codes| codes.scales.0),
                column_scales: sum.codes.map_or(0, |codes| codes.scales.1),
                first_term: size(terms)?,
                terms: size(terms_of(sum))?,
                first_tile: size(tiles)?,
                columns: size(sum.columns)?,
            };
            all.c[index] = descriptor(sum.to, dtype, [rows, sum.columns], [64, 64])?;
            if let Some(CodesTerm { a, b, depth, .. }) = sum.codes {
                all.terms[terms].a = descriptor(a, DType::U8, [rows, depth], [128, 128])?;
                all.terms[terms].b = descriptor(b, DType::U8, [sum.columns, depth], [128, 128])?;
                all.depths[terms] = size(depth)?;
                terms += 1;
            }
            for Term { a, b, depth } in &sum.terms {
                all.terms[terms].a = descriptor(*a, dtype, [rows, *depth], [128, 64])?;
                all.terms[terms].b = match along {
                    true => descriptor(b.t(), dtype, [sum.columns, *depth], [128, 64])?,
                    false => descriptor(*b, dtype, [*depth, sum.columns], [64, 64])?,
                };
                all.depths[terms] = size(*depth)?;
                terms += 1;
            }
            tiles += sum.columns.div_ceil(TILE);
        }
        let down = rows.div_ceil(TILE);
        (all.tiles_down, all.tiles_across) = (size(down)?, size(tiles)?);
        let name = match (of_codes > 0, along, dtype) {
            (false, true, DType::BF16) => "products_along_bf16",
            (false, false, DType::BF16) => "products_across_bf16",
            (false, true, _) => "products_along_f16",
            (false, false, _) => "products_across_f16",
            (true, true, DType::BF16) => "products_of_codes_along_bf16",
            (true, false, DType::BF16) => "products_of_codes_across_bf16",
            (true, true, _) => "products_of_codes_along_f16",
            (true, false, _) => "products_of_codes_across_f16",
        };
        let clusters = (down * tiles).min(self.multiprocessors()? / 2).max(1);
        let grid = (2 * clusters as u32, 1, 1);
        let launch = MODULE.launch(self, name, grid, THREADS, SHARED)?.overlapping();
        // SAFETY: as the kernel declares it; the caller holds what the pointers point into.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&all);
            })
        }
    }
}

/// The TMA descriptor of a matrix of `rows` by `columns`, moved in such boxes.
pub(super) fn descriptor(
    matrix: Matrix,
    dtype: DType,
    [rows, columns]: [usize; 2],
    of_box: [u32; 2],
) -> Result<TmaDescriptor> {
    if matrix.dtype != dtype || !matrix.has_aligned_rows() {
        bail!(
            "metal-candle-kernels: a sum of products on CUDA has a {:?} matrix with rows {} elements apart, expected {dtype:?} and rows that begin at 16 bytes",
            matrix.dtype,
            matrix.stride
        )
    }
    TmaDescriptor::new(dtype, matrix.pointer, [rows, columns], [matrix.stride, 1], of_box)
}

/// A size as the kernel takes it.
pub(super) fn size(size: usize) -> Result<i32> {
    match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!(
            "metal-candle-kernels: a sum of products on CUDA has a size of {size}, expected less than 2^31"
        ),
    }
}

#[cfg(test)]
mod tests;
