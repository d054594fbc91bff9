//! Sums of matrix products in one launch, where the GPU has what `kernel.cu` takes.

use super::{Cuda, Matrix, Module, TmaDescriptor, by_dtype, module};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, bail};

static MODULE: Module = module!("product");

/// Of one launch.
const MOST_TERMS: usize = 8;
pub(crate) const MOST_OUTPUTS: usize = 4;

const THREADS: u32 = 384;

/// Rows of a tile of a cluster of two blocks, and its columns at most.
pub(crate) const TILE: usize = 256;

/// Columns of a tile where B lies along the depth, and across it.
const WIDTHS_ALONG: [usize; 4] = [256, 224, 192, 128];
const WIDTHS_ACROSS: [usize; 3] = [256, 192, 128];

/// Columns that a tile could have in the time that it takes for its rows of A, and for beginning and ending: tiles of 128
/// columns take 0.51 to 0.61 of the time of those of 256 (`cuda_speed_of_tilings`, H200).
const OVERHEAD: usize = 24;

/// What cuBLAS takes for products one after the other, measured there too: it computes so many percent of the elements that
/// would be possible, but no product takes less than so many percent of a round of tiles, and adding to what is there takes
/// so many.
const OF_POSSIBLE: usize = 85;
const LEAST_OF_ROUND: usize = 27;
const ADDING: usize = 12;

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

/// How outputs are cut into tiles.
struct Tiling {
    /// Columns of a tile.
    width: usize,
    /// What the GPU could compute of outputs meanwhile at best, in elements.
    there: usize,
}

impl Tiling {
    /// The soonest of these widths, for tiles of which so many are computed at once.
    fn of(
        rows: usize,
        columns: impl Iterator<Item = usize> + Clone,
        widths: &[usize],
        at_once: usize,
    ) -> Self {
        let time = |width: usize| {
            let across: usize = columns.clone().map(|columns| columns.div_ceil(width)).sum();
            (rows.div_ceil(TILE) * across).div_ceil(at_once) * (width + OVERHEAD)
        };
        let width = widths.iter().copied().min_by_key(|width| time(*width)).unwrap_or(TILE);
        let there = time(width) * at_once * TILE * TILE / (TILE + OVERHEAD);
        Self { width, there }
    }
}

/// What the GPU could compute of outputs at best, in elements, in the time in which cuBLAS gives outputs of so many terms each.
fn one_after_the_other(
    rows: usize,
    columns: impl ExactSizeIterator<Item = usize>,
    terms: usize,
    at_once: usize,
) -> usize {
    let round = at_once * TILE * TILE;
    let added = columns.len() * terms.saturating_sub(1) * round * ADDING / 100;
    let least = round * LEAST_OF_ROUND / 100;
    columns.map(|columns| (rows * columns * 100 / OF_POSSIBLE).max(least)).sum::<usize>() + added
}

/// Of a block, as the kernel lays it out: stages, what is written, scales of columns, barriers, and what it takes to begin
/// at a multiple of 1024 bytes.
fn shared_memory(width: usize) -> u32 {
    let stages = if width > 128 { 4 } else { 6 };
    let of_stage = (128 + width) * 64 * 2;
    (stages * of_stage + (32 << 10) + 1024 + 16 * stages + 16 + 1024) as u32
}

impl Cuda<'_> {
    /// A tile takes a cluster of two blocks, each of which has a multiprocessor.
    fn tiles_at_once(&self) -> Result<usize> {
        Ok((self.multiprocessors()? / 2).max(1))
    }

    /// Whether [`Cuda::sums_of_products`] has kernels for sums of these numbers of columns, of so many
    /// terms each, that of codes included where there `are_codes`, that are sooner than products one after the other.
    pub(crate) fn takes_sums_of_products(
        &self,
        dtype: DType,
        rows: usize,
        columns: impl ExactSizeIterator<Item = usize> + Clone,
        terms: usize,
        are_codes: bool,
    ) -> Result<bool> {
        let at_once = self.tiles_at_once()?;
        // A width that only one of both ways has is taken for little sooner.
        let widths = if are_codes { &[TILE][..] } else { &WIDTHS_ACROSS };
        let there = Tiling::of(rows, columns.clone(), widths, at_once).there;
        // Nothing else multiplies codes, and unpacking them takes longer than tiles that are nearly empty.
        let is_sooner =
            are_codes || there <= one_after_the_other(rows, columns.clone(), terms, at_once);
        let fits = [DType::BF16, DType::F16].contains(&dtype)
            && rows > 0
            && terms > 0
            && columns.len() <= MOST_OUTPUTS
            && columns.len() * terms <= MOST_TERMS
            && columns.into_iter().all(|columns| columns > 0 && columns.is_multiple_of(8))
            && is_sooner
            && i32::try_from(there).is_ok();
        Ok(fits && self.has_warpgroups()?)
    }

    /// The sums, in one launch. All `b` of terms are transposed, or none; all matrices have rows or, if transposed,
    /// columns that begin at 16 bytes.
    pub(crate) fn sums_of_products(&self, dtype: DType, rows: usize, sums: &[Sum]) -> Result<()> {
        self.sums_in_tiles(dtype, rows, sums, None)
    }

    /// [`Self::sums_of_products`], in tiles of so many columns if they are given, which changes no bit.
    fn sums_in_tiles(
        &self,
        dtype: DType,
        rows: usize,
        sums: &[Sum],
        width: Option<usize>,
    ) -> Result<()> {
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
        let at_once = self.tiles_at_once()?;
        let widths = match (of_codes > 0, along) {
            (true, _) => &[TILE][..],
            (false, true) => &WIDTHS_ALONG,
            (false, false) => &WIDTHS_ACROSS,
        };
        let columns = sums.iter().map(|sum| sum.columns);
        let width = width.unwrap_or_else(|| Tiling::of(rows, columns, widths, at_once).width);
        // A block brings half of what lies along the depth, and panels of 64 columns of what lies across it.
        let half = (width / 2) as u32;
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
                    true => descriptor(b.t(), dtype, [sum.columns, *depth], [half, 64])?,
                    false => descriptor(*b, dtype, [*depth, sum.columns], [64, 64])?,
                };
                all.depths[terms] = size(*depth)?;
                terms += 1;
            }
            tiles += sum.columns.div_ceil(width);
        }
        let down = rows.div_ceil(TILE);
        (all.tiles_down, all.tiles_across) = (size(down)?, size(tiles)?);
        let clusters = (down * tiles).min(at_once).max(1);
        let grid = (2 * clusters as u32, 1, 1);
        let name = kernel(of_codes > 0, along, width, dtype)?;
        let launch = MODULE.launch(self, name, grid, THREADS, shared_memory(width))?.overlapping();
        // SAFETY: as the kernel declares it; the caller holds what the pointers point into.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&all);
            })
        }
    }
}

/// The kernel for tiles of so many columns.
fn kernel(of_codes: bool, along: bool, width: usize, dtype: DType) -> Result<&'static str> {
    Ok(match (of_codes, along, width) {
        (false, true, 256) => by_dtype!("products_along_256", dtype)?,
        (false, true, 224) => by_dtype!("products_along_224", dtype)?,
        (false, true, 192) => by_dtype!("products_along_192", dtype)?,
        (false, true, 128) => by_dtype!("products_along_128", dtype)?,
        (false, false, 256) => by_dtype!("products_across_256", dtype)?,
        (false, false, 192) => by_dtype!("products_across_192", dtype)?,
        (false, false, 128) => by_dtype!("products_across_128", dtype)?,
        (true, true, 256) => by_dtype!("products_of_codes_along_256", dtype)?,
        (true, false, 256) => by_dtype!("products_of_codes_across_256", dtype)?,
        _ => {
            bail!("metal-candle-kernels: a sum of products on CUDA has no tiles of {width} columns")
        }
    })
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
