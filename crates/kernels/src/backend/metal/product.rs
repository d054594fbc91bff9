//! Matrix products on Metal, with f32 sums: what linear layers, adapters, attention's and the loss's
//! products are made of.
//!
//! ```text
//! C = (+=) (..(L₀·R₀·f₀ + L₁·R₁)·f₁ + ..) + bias
//! ```
//!
//! A matrix is a [`Matrix`] of an [`Array`]: `Matrix::of(&array, stride)`, read transposed with `.t()` where the
//! array holds the transposed matrix, so that nothing is copied:
//!
//! ```text
//! let terms = [Term::new(Matrix::rows(&x)?, Matrix::rows(&weight)?.t(), inner)];
//! metal.product("linear", rows, outer, &terms, Matrix::of(&y, outer))?;
//! ```
//!
//! Operands may each be of f32, f16 or bf16; they are multiplied in the dtype of the first left one. The
//! result may be of any of the three as well. Up to [`MOST_ROWS`] rows of dot products have a kernel that
//! reads the right matrix once for all of them, as fast as memory gives it; everything else is made of tiles.
//!
//! The large products of linear layers go by [`Metal::layer`], for which a user may choose Candle's or
//! Apple's own product instead, see [`crate::devices::MetalMatmul`].

use super::{Argument, Array, Constant, Kernel, Metal, by_dtype, dtype_code, size};
use crate::backend::cpu::collapsed_rows;
use crate::devices::MetalMatmul;
use crate::quantized::metal::{DENSE, Packed};
use candle_core::{DType, Result, bail};

/// Threads of a threadgroup of tiles, as in `product.metal`.
const TILE_THREADS: usize = 128;
/// Terms of one launch, as `product.metal` has buffers for.
const MOST_TERMS: usize = 6;
/// Numbers that a kernel is given for a term.
const TERM_NUMBERS: usize = 5;
/// Rows that the kernels for few rows take.
pub(crate) const MOST_ROWS: usize = 8;
/// Columns that a simdgroup of such a kernel has, as in `product.metal`.
const FEW_COLUMNS: usize = 4;
/// Ranks of an adapter that such a kernel takes, as in `product.metal`.
pub(crate) const MOST_RANKS: usize = 256;
/// Threads of a threadgroup of such a kernel.
const FEW_THREADS: usize = 256;

/// Indices of function constants in `product.metal`.
const RESULT_DTYPE: usize = 10;
const BIAS_DTYPE: usize = 11;
const ADDED: usize = 12;
const THINNED: usize = 13;
const TERMS: usize = 20;
const ALL_FLAGS: usize = 21;
const ANY_FLAGS: usize = 22;
const SLICED: usize = 23;
const WHOLE_ROWS: usize = 24;
const WHOLE_COLUMNS: usize = 25;
const RANK: usize = 30;
const WEIGHT_DTYPE: usize = 31;
const FOURS: usize = 32;
const GATHERED: usize = 33;
/// The weight's code where it is in fewer bits.
const PACKED: u16 = 3;

/// A step of the inner dimension in tiles of every dtype.
const STEP: usize = 32;

/// The elements of a matrix: rows at one distance from each other in an array.
#[derive(Clone, Copy)]
pub(crate) struct Matrix<'a> {
    array: &'a Array,
    /// Elements from a stored row to the next.
    stride: usize,
    /// Whether the stored rows are the matrix's columns.
    transposed: bool,
}

impl<'a> Matrix<'a> {
    /// The rows that an array holds, `stride` elements apart.
    pub(crate) fn of(array: &'a Array, stride: usize) -> Self {
        Matrix { array, stride, transposed: false }
    }

    /// All but the last dimension of an array of [`Metal::collapsed_rows`] as rows.
    pub(crate) fn rows(array: &'a Array) -> Result<Self> {
        match collapsed_rows(array.tensor.layout()) {
            Some((_, _, stride)) => Ok(Matrix::of(array, stride)),
            None => bail!(
                "metal-candle-kernels: a matrix on Metal has strides {:?}, expected rows at one distance",
                array.tensor.stride()
            ),
        }
    }

    /// The transposed matrix.
    pub(crate) fn t(self) -> Self {
        Matrix { transposed: !self.transposed, ..self }
    }

    /// Elements from a stored row to the next.
    pub(crate) fn stride(&self) -> usize {
        self.stride
    }

    /// Whether every stored row begins at a multiple of `bytes`.
    fn aligned(&self, bytes: usize) -> bool {
        let size = self.array.dtype.size_in_bytes();
        self.array.offset.is_multiple_of(bytes) && (self.stride * size).is_multiple_of(bytes)
    }
}

/// A mask of inverted dropout.
#[derive(Clone, Copy)]
pub(crate) struct Mask {
    pub(crate) seed: u64,
    /// The probability times 2³².
    pub(crate) threshold: u32,
}

/// Products that are summed up.
pub(crate) struct Term<'a> {
    left: Matrix<'a>,
    right: Matrix<'a>,
    inner: usize,
    factor: f64,
    mask: Option<Mask>,
}

impl<'a> Term<'a> {
    /// `left` `(rows, inner)` times `right` `(inner, columns)`.
    pub(crate) fn new(left: Matrix<'a>, right: Matrix<'a>, inner: usize) -> Self {
        Term { left, right, inner, factor: 1.0, mask: None }
    }

    /// Multiplies this product, and those of the terms before it, by a factor.
    pub(crate) fn times(self, factor: f64) -> Self {
        Term { factor, ..self }
    }

    /// Takes elements of the left matrix as zero that are dropped there, by their index in the matrix as it
    /// is stored. Those that are kept aren't multiplied by anything.
    pub(crate) fn masked(self, mask: Option<Mask>) -> Self {
        Term { mask, ..self }
    }

    /// As the kernels take it, and its flags.
    fn numbers(&self, operation: &str, dtype: DType) -> Result<([u64; TERM_NUMBERS], u16)> {
        let Term { left, right, inner, factor, mask } = self;
        // What a copy of 16 bytes of the tile's dtype reads.
        let aligned = |matrix: &Matrix| {
            matrix.aligned(if matrix.array.dtype == dtype {
                16
            } else {
                4 * matrix.array.dtype.size_in_bytes()
            })
        };
        let flags = u16::from(left.transposed)
            | u16::from(right.transposed) << 1
            | u16::from(aligned(left)) << 2
            | u16::from(aligned(right)) << 3
            | dtype_code(operation, left.array.dtype)? << 4
            | dtype_code(operation, right.array.dtype)? << 6
            | u16::from(mask.is_some()) << 8
            | u16::from(inner.is_multiple_of(STEP)) << 9;
        let Mask { seed, threshold } = mask.unwrap_or(Mask { seed: 0, threshold: 0 });
        let numbers = [
            left.stride as u64,
            right.stride as u64,
            seed,
            pair(length(operation, *inner)?, flags.into()),
            pair((*factor as f32).to_bits(), threshold),
        ];
        Ok((numbers, flags))
    }
}

/// A product and what is done to it: everything beside its terms and its place.
#[derive(Clone, Copy, Default)]
pub(crate) struct Finish<'a> {
    /// A bias for each column, contiguous, added after all else but what is there.
    pub(crate) bias: Option<&'a Array>,
    /// Whether the result is added to what is there.
    pub(crate) add: bool,
    /// Dropout of the result, before the bias, and what the kept elements are multiplied by.
    pub(crate) mask: Option<(Mask, f64)>,
}

/// The function constants of tiles; flags are those that all terms have, and those that any has.
fn tiles_made_for(
    [dtype, bias, added, thinned]: [(usize, Constant); 4],
    terms: u16,
    (all_flags, any_flags): (u16, u16),
    sliced: bool,
    [whole_rows, whole_columns]: [bool; 2],
) -> [(usize, Constant); 10] {
    [
        dtype,
        bias,
        added,
        thinned,
        (TERMS, Constant::U16(terms)),
        (ALL_FLAGS, Constant::U16(all_flags)),
        (ANY_FLAGS, Constant::U16(any_flags)),
        (SLICED, Constant::Bool(sliced)),
        (WHOLE_ROWS, Constant::Bool(whole_rows)),
        (WHOLE_COLUMNS, Constant::Bool(whole_columns)),
    ]
}

impl<'a> Finish<'a> {
    fn bias(&self) -> Argument<'a> {
        self.bias.map_or(Argument::Absent, Argument::Input)
    }

    /// The function constants of what is done to a result of this dtype.
    fn made_for(&self, operation: &str, dtype: DType) -> Result<[(usize, Constant); 4]> {
        let bias = self.bias.map(|bias| dtype_code(operation, bias.dtype)).transpose()?;
        Ok([
            (RESULT_DTYPE, Constant::U16(dtype_code(operation, dtype)?)),
            (BIAS_DTYPE, Constant::U16(bias.map_or(0, |code| code + 1))),
            (ADDED, Constant::Bool(self.add)),
            (THINNED, Constant::Bool(self.mask.is_some())),
        ])
    }
}

/// The product's place and size.
struct Target<'a> {
    matrix: Matrix<'a>,
    rows: usize,
    columns: usize,
}

impl Metal {
    /// Writes the sum of some products, `(rows, columns)`, into `to`.
    pub(crate) fn product(
        &self,
        operation: &str,
        rows: usize,
        columns: usize,
        terms: &[Term],
        to: Matrix,
    ) -> Result<()> {
        self.product_with(operation, rows, columns, terms, Finish::default(), to)
    }

    /// Writes the sum of the large products of linear layers, and of small ones beside them, into `to`,
    /// which is contiguous and a buffer's beginning. Unless the choice is [`MetalMatmul::Fused`], the large
    /// ones are made one after another by somebody else's kernels, and the small ones are added to that.
    pub(crate) fn layer(
        &self,
        operation: &str,
        rows: usize,
        columns: usize,
        (large, small): (Vec<Term>, Vec<Term>),
        bias: Option<&Array>,
        to: &Array,
    ) -> Result<()> {
        let matrix = Matrix::of(to, columns);
        if self.is_fused() || large.is_empty() {
            let terms: Vec<_> = small.into_iter().chain(large).collect();
            let finish = Finish { bias, ..Finish::default() };
            return self.product_with(operation, rows, columns, &terms, finish, matrix);
        }
        for (index, term) in large.iter().enumerate() {
            if index == 0 {
                self.foreign(term, rows, columns, to)?;
                continue;
            }
            let part = self.empty((rows, columns), to.dtype)?;
            self.foreign(term, rows, columns, &part)?;
            let name = by_dtype!("product_accumulate", to.dtype)?;
            let count = rows * columns;
            let arguments =
                [Argument::Input(&part), Argument::Output(to), Argument::U64(count as u64)];
            self.run(&[self.by_elements(name, count, 1, &arguments)?])?;
        }
        if small.is_empty() && bias.is_none() {
            return Ok(());
        }
        let finish = Finish { bias, add: true, mask: None };
        self.product_with(operation, rows, columns, &small, finish, matrix)
    }

    /// Whether this crate makes the large products of linear layers as well.
    pub(crate) fn is_fused(&self) -> bool {
        self.matmul() == MetalMatmul::Fused
    }

    /// A product that somebody else's kernel writes into `to`, of contiguous matrices of its dtype.
    fn foreign(&self, term: &Term, rows: usize, columns: usize, to: &Array) -> Result<()> {
        let Term { left, right, inner, .. } = *term;
        if rows * columns == 0 {
            return Ok(());
        }
        if inner == 0 {
            return self.product("a product", rows, columns, &[], Matrix::of(to, columns));
        }
        let (left_array, right_array) =
            (self.cast(left.array, to.dtype)?, self.cast(right.array, to.dtype)?);
        let sizes = [rows, columns, inner];
        let operands = [(&left_array, left.transposed), (&right_array, right.transposed)];
        self.multiply(sizes, operands, to)
    }

    /// Like [`Metal::product`], with a bias, added to what is there, or with elements dropped.
    pub(crate) fn product_with(
        &self,
        operation: &str,
        rows: usize,
        columns: usize,
        terms: &[Term],
        finish: Finish,
        to: Matrix,
    ) -> Result<()> {
        if to.transposed {
            bail!(
                "metal-candle-kernels: {operation} on Metal: a product's result cannot be transposed"
            )
        }
        if rows * columns == 0 {
            return Ok(());
        }
        if let [term] = terms
            && finish.mask.is_none()
            && term.mask.is_none()
            && !term.left.transposed
            && term.right.transposed
            && takes_few_rows(rows, term.inner, 0)
        {
            let layer = FewRows {
                x: term.left,
                weight: FewWeight::Dense(term.right.t()),
                bias: finish.bias,
                adapter: None,
                y: to,
                factor: term.factor,
                add: finish.add,
            };
            return self.few_rows(operation, rows, columns, term.inner, &layer);
        }
        let target = Target { matrix: to, rows, columns };
        if terms.len() <= MOST_TERMS {
            return self.tiles(operation, terms, finish, &target);
        }
        // Factors reach back over what was summed before: only such of 1 can be taken apart.
        if finish.mask.is_some() || terms.iter().skip(MOST_TERMS).any(|term| term.factor != 1.0) {
            bail!(
                "metal-candle-kernels: {operation} on Metal: {} products with factors are to be summed, expected up to {MOST_TERMS}",
                terms.len()
            )
        }
        let mut finish = finish;
        for terms in terms.chunks(MOST_TERMS) {
            self.tiles(operation, terms, finish, &target)?;
            finish = Finish { bias: None, add: true, mask: None };
        }
        Ok(())
    }

    fn tiles(
        &self,
        operation: &str,
        terms: &[Term],
        finish: Finish,
        target: &Target,
    ) -> Result<()> {
        let Target { matrix: to, rows, columns } = *target;
        let dtype = terms.first().map_or(to.array.dtype, |term| term.left.array.dtype);
        let mut numbers = Vec::with_capacity(terms.len() * TERM_NUMBERS);
        let (mut all, mut any) = (u16::MAX, 0);
        for term in terms {
            let (of_term, flags) = term.numbers(operation, dtype)?;
            numbers.extend(of_term);
            (all, any) = (all & flags, any | flags);
        }
        let tiles = |side: usize| rows.div_ceil(side) * columns.div_ceil(side);
        // Small tiles where large ones would leave most of a GPU without work, or be mostly empty.
        const ENOUGH: usize = 64;
        let side = if rows > 32 && columns > 32 && tiles(64) >= ENOUGH { 64 } else { 32 };
        let tiles = tiles(side);
        let name = match side {
            64 => by_dtype!("product_tiles_64", dtype)?,
            _ => by_dtype!("product_tiles_32", dtype)?,
        };
        // A long inner dimension is cut where the tiles are few.
        const DEPTH: usize = 512;
        let inner = terms.iter().map(|term| term.inner).max().unwrap_or(0);
        let slices = match terms {
            [_] => (ENOUGH / tiles).clamp(1, inner.div_ceil(DEPTH).max(1)),
            _ => 1,
        };
        // In whole steps of a tile, whatever the dtype.
        let depth = inner.div_ceil(slices).max(1).next_multiple_of(STEP);
        let slices = inner.div_ceil(depth).max(1);
        let result = self.result(operation, target, finish, depth)?;
        let partial = match slices {
            1 => None,
            _ => Some(self.empty((slices, rows, columns), DType::F32)?),
        };
        // What slices are finished with, their sum is.
        let (array, finish_now) = match &partial {
            Some(partial) => (partial, Finish::default()),
            None => (to.array, finish),
        };
        let mut arguments = [Argument::Absent; 2 * MOST_TERMS + 4];
        for (pair, term) in arguments.chunks_exact_mut(2).zip(terms) {
            pair.copy_from_slice(&[term.left.array, term.right.array].map(Argument::Input));
        }
        arguments[2 * MOST_TERMS] = finish_now.bias();
        arguments[2 * MOST_TERMS + 1] = Argument::Output(array);
        if !terms.is_empty() {
            arguments[2 * MOST_TERMS + 2] = Argument::U64s(&numbers);
        }
        arguments[2 * MOST_TERMS + 3] = Argument::U64s(&result);
        let constants = tiles_made_for(
            finish_now.made_for(operation, array.dtype)?,
            terms.len() as u16,
            (if terms.is_empty() { 0 } else { all }, any),
            slices > 1,
            [rows, columns].map(|size| size.is_multiple_of(side)),
        );
        let kernel = Kernel { name, constants: &constants };
        let product = self.exactly(kernel, TILE_THREADS, [tiles, slices, 1], &arguments)?;
        let Some(partial) = &partial else { return self.run(&[product]) };
        let arguments = [
            Argument::Input(partial),
            finish.bias(),
            Argument::Output(to.array),
            Argument::U32(size(operation, slices)?),
            Argument::U64s(&result),
        ];
        let constants = finish.made_for(operation, to.array.dtype)?;
        let kernel = Kernel { name: "product_slices", constants: &constants };
        let sum = self.by_thread(kernel, columns, rows, &arguments)?;
        self.run(&[product, sum])
    }

    /// An error where the device doesn't take tiles, which need simdgroup matrices.
    #[cfg(feature = "metal")]
    pub(super) fn require_tiles(&self) -> Result<()> {
        let name = by_dtype!("product_tiles_32", DType::BF16)?;
        let finish = Finish::default().made_for("a product", DType::BF16)?;
        let constants = tiles_made_for(finish, 1, (0, 0), false, [false, false]);
        self.pipeline(Kernel { name, constants: &constants }).map(|_| ())
    }

    /// Where results go and what is done to them, as the kernels take it.
    fn result(
        &self,
        operation: &str,
        Target { matrix, rows, columns }: &Target,
        Finish { mask, .. }: Finish,
        depth: usize,
    ) -> Result<[u64; 5]> {
        let (Mask { seed, threshold }, kept) =
            mask.unwrap_or((Mask { seed: 0, threshold: 0 }, 1.0));
        Ok([
            matrix.stride as u64,
            seed,
            pair(length(operation, *rows)?, length(operation, *columns)?),
            pair((kept as f32).to_bits(), threshold),
            pair(length(operation, depth)?, 0),
        ])
    }

    /// A layer for up to [`MOST_ROWS`] rows, see [`takes_few_rows`].
    pub(crate) fn few_rows(
        &self,
        operation: &str,
        rows: usize,
        columns: usize,
        inner: usize,
        layer: &FewRows,
    ) -> Result<()> {
        let FewRows { x, weight, bias, adapter, y, factor, add } = layer;
        let padded = match rows {
            1 => 1,
            2..=4 => 4,
            _ => MOST_ROWS,
        };
        let dtype = x.array.dtype;
        let rank = adapter.as_ref().map_or(0, |adapter| adapter.rank);
        let groups = columns.div_ceil(FEW_COLUMNS * FEW_THREADS / super::SIMDGROUP);
        // Every threadgroup reads A, unless that takes longer than a launch that reads it once.
        const READ_TWICE: usize = 4 << 20;
        const DEPTH: usize = 128;
        let slices = match groups * inner * rank * size_of::<f32>() {
            0..=READ_TWICE => 0,
            _ => inner.div_ceil(DEPTH).min(32),
        };
        let whole = |matrix: &Matrix| matrix.aligned(4 * matrix.array.dtype.size_in_bytes());
        let (weight_stride, weight_code, fours, packed_constants) = match weight {
            FewWeight::Dense(weight) => {
                let code = dtype_code(operation, weight.array.dtype)?;
                (weight.stride, code, whole(x) && whole(weight), DENSE)
            }
            FewWeight::Packed(packed) => (inner, PACKED, false, packed.constants()),
        };
        let numbers = [
            x.stride as u64,
            weight_stride as u64,
            y.stride as u64,
            pair(length(operation, rows)?, length(operation, columns)?),
            pair(length(operation, inner)?, size(operation, slices)?),
            pair(
                (*factor as f32).to_bits(),
                (adapter.as_ref().map_or(0.0, |adapter| adapter.scale) as f32).to_bits(),
            ),
        ];
        let Ok(short_rank) = u16::try_from(rank) else {
            bail!("metal-candle-kernels: {operation} on Metal: a rank of {rank} is too large")
        };
        let finish = Finish { bias: *bias, add: *add, mask: None };
        let [y_dtype, bias_dtype, added, _] = finish.made_for(operation, y.array.dtype)?;
        let [bits, levels, scales, offsets, eights] = packed_constants;
        let constants = [
            y_dtype,
            bias_dtype,
            added,
            (RANK, Constant::U16(short_rank)),
            (WEIGHT_DTYPE, Constant::U16(weight_code)),
            (FOURS, Constant::Bool(fours)),
            (GATHERED, Constant::Bool(slices > 0)),
            bits,
            levels,
            scales,
            offsets,
            eights,
        ];
        let name = match padded {
            1 => by_dtype!("few_rows_1", dtype)?,
            4 => by_dtype!("few_rows_4", dtype)?,
            _ => by_dtype!("few_rows_8", dtype)?,
        };
        let partial = match slices {
            0 => None,
            _ => Some(self.empty((slices, padded, rank), DType::F32)?),
        };
        let (a, b, xa) = match adapter {
            Some(Adapter { a, b, xa, .. }) => {
                (Argument::Input(a), Argument::Input(b), Argument::Output(xa))
            }
            None => (Argument::Absent, Argument::Absent, Argument::Absent),
        };
        let [codes, of_weight @ ..] = match weight {
            FewWeight::Dense(weight) => {
                let absent = Argument::Absent;
                [Argument::Input(weight.array), absent, absent, absent, absent, absent, absent]
            }
            FewWeight::Packed(packed) => packed.arguments(),
        };
        let [scales, offsets, large, large_offsets, table, of_packed] = of_weight;
        let arguments = [
            Argument::Input(x.array),
            codes,
            a,
            b,
            finish.bias(),
            partial.as_ref().map_or(Argument::Absent, Argument::Input),
            Argument::Output(y.array),
            xa,
            Argument::U64s(&numbers),
            scales,
            offsets,
            large,
            large_offsets,
            table,
            of_packed,
        ];
        let columns_of = |threads: usize| FEW_COLUMNS * threads.div_ceil(super::SIMDGROUP);
        let groups = |threads: usize| [columns.div_ceil(columns_of(threads)), 1, 1];
        let kernel = Kernel { name, constants: &constants };
        let layer = self.dispatch(kernel, FEW_THREADS, groups, &arguments)?;
        let Some(partial) = &partial else { return self.run(&[layer]) };
        let name = match padded {
            1 => by_dtype!("few_rows_adapter_1", dtype)?,
            4 => by_dtype!("few_rows_adapter_4", dtype)?,
            _ => by_dtype!("few_rows_adapter_8", dtype)?,
        };
        let arguments =
            [Argument::Input(x.array), a, Argument::Output(partial), Argument::U64s(&numbers)];
        let kernel = Kernel { name, constants: &constants };
        let adapter = self.dispatch(kernel, FEW_THREADS, |_| [slices, 1, 1], &arguments)?;
        self.run(&[adapter, layer])
    }
}

/// The weight of a layer for few rows.
pub(crate) enum FewWeight<'a> {
    Dense(Matrix<'a>),
    /// In fewer bits.
    Packed(&'a Packed),
}

/// A layer with or without an adapter, for few rows.
pub(crate) struct FewRows<'a> {
    /// `(rows, inner)`
    pub(crate) x: Matrix<'a>,
    /// `(columns, inner)`
    pub(crate) weight: FewWeight<'a>,
    /// `(columns)`, contiguous.
    pub(crate) bias: Option<&'a Array>,
    pub(crate) adapter: Option<Adapter<'a>>,
    /// `(rows, columns)`
    pub(crate) y: Matrix<'a>,
    /// What the product with the weight is multiplied by.
    pub(crate) factor: f64,
    /// Whether the result is added to what is there.
    pub(crate) add: bool,
}

/// A low-rank adapter, contiguous and in f32.
pub(crate) struct Adapter<'a> {
    /// `(inner, rank)`
    pub(crate) a: &'a Array,
    /// `(rank, columns)`
    pub(crate) b: &'a Array,
    pub(crate) rank: usize,
    pub(crate) scale: f64,
    /// Where x·A goes, `(rows, rank)`, contiguous and in the dtype of x.
    pub(crate) xa: &'a Array,
}

/// Whether the kernels for few rows take layers of this size, with an adapter of this rank.
pub(crate) fn takes_few_rows(rows: usize, inner: usize, rank: usize) -> bool {
    (1..=MOST_ROWS).contains(&rows) && inner > 0 && rank <= MOST_RANKS
}

/// A size that may still be rounded up to whole tiles.
fn length(operation: &str, length: usize) -> Result<u32> {
    match u32::try_from(length) {
        Ok(length) if length <= u32::MAX - 1024 => Ok(length),
        _ => bail!(
            "metal-candle-kernels: {operation} on Metal: a size is {length}, expected less than 2^32 - 1024"
        ),
    }
}

/// Two numbers of 32 bits as they lie in memory one after the other.
fn pair(first: u32, second: u32) -> u64 {
    u64::from(first) | u64::from(second) << 32
}
