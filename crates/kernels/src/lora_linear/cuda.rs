//! LoRA layers on CUDA. The adapters of all projections of an input stand side by side in the dtype of
//! the activations, so that one product makes all x·A. An output is one sum of the large product and
//! `xa·(s·B)` where the GPU has kernels for it, and so is the gradient of x; elsewhere it is first
//! `s·xa·B`, to which the large product adds. Products with the rank as a side, and layers of a few rows,
//! have kernels of their own. Weights whose products round rows to e4m3 are multiplied as codes in such sums,
//! for dx transposed into memory that is given back at once.

use super::skinny::Skinny;
use super::{
    DenseProjection, Dropout, GatedGradients, Lora, Output, Projection, SharedGradients, of_any,
};
use crate::backend::cuda::{
    Array, CodesTerm, Cuda, MOST_SUMS, Matrix, Module, Rows, Sum, Term, ThinProduct, by_dtype,
    module, require_floats,
};
use crate::backend::rows_and_columns;
use crate::batch_invariance;
use crate::glu::Activation;
use crate::glu::cuda::backward_again;
use crate::matmul::cuda::{Adapter, Layer, bias_as, few_rows, takes_few_rows, write_bias};
use crate::matmul::with_last_dimension;
use crate::quantized::fp8::cuda::{Codes, MOST_PARTS, codes_of, round_to_codes, transposed};
use crate::quantized::{Quantized, Weight, cuda as packed};
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{D, DType, Result, Tensor, bail};

static MODULE: Module = module!("lora_linear");

const THREADS: usize = 256;

/// Matrices that a launch copies.
const MOST: usize = 8;

/// Columns of an adapter begin at a multiple of this, so that they do at 16 bytes.
const ALIGNMENT: usize = 8;

/// A matrix to be copied and converted, as the kernel takes it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Segment {
    from: u64,
    to: u64,
    from_row: i64,
    from_column: i64,
    to_row: i64,
    rows: i32,
    columns: i32,
    height: i32,
    single: i32,
    scale: f32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Segments {
    at: [Segment; MOST],
}

// SAFETY: it is plain numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for Segments {}

impl Segment {
    /// A copy of `rows` by `columns`, with rows of zeros below to `height`.
    fn new(from: Matrix, to: Matrix, [rows, columns, height]: [usize; 3]) -> Result<Self> {
        let (Ok(rows), Ok(columns), Ok(height), Ok(_)) = (
            i32::try_from(rows),
            i32::try_from(columns),
            i32::try_from(height),
            // A thread's last index goes beyond by no more than this.
            i32::try_from(height.saturating_mul(columns).saturating_add(1 << 24)),
        ) else {
            bail!(
                "metal-candle-kernels: an adapter on CUDA has a ({rows}, {columns}) matrix, expected fewer than 2^31 elements"
            )
        };
        let (from_row, from_column) = from.distances();
        Ok(Segment {
            from: from.pointer,
            to: to.pointer,
            from_row: from_row as i64,
            from_column: from_column as i64,
            to_row: to.stride as i64,
            rows,
            columns,
            height,
            single: i32::from(from.dtype == DType::F32),
            scale: 1.0,
        })
    }

    /// The same, multiplied on the way.
    fn scaled(self, scale: f64) -> Self {
        Segment { scale: scale as f32, ..self }
    }
}

/// Copies gradients of A out of `from` `(inner, columns)`, where they stand side by side.
pub(super) fn copy_gradients(
    cuda: &Cuda,
    from: Matrix,
    inner: usize,
    parts: &[(usize, usize, &Array)],
) -> Result<()> {
    let segments = parts.iter().map(|(column, rank, to)| {
        Segment::new(from.at_column(*column), Matrix::of(to, *rank), [inner, *rank, inner])
    });
    copy(cuda, DType::F32, &segments.collect::<Result<Vec<_>>>()?)
}

/// Copies matrices to such of `dtype`.
fn copy(cuda: &Cuda, dtype: DType, segments: &[Segment]) -> Result<()> {
    let name = by_dtype!("pack", dtype)?;
    for segments in segments.chunks(MOST) {
        let mut all = Segments::default();
        all.at[..segments.len()].copy_from_slice(segments);
        let largest = segments.iter().map(|segment| segment.height * segment.columns).max();
        let largest = largest.unwrap_or(0).max(0) as usize;
        let blocks = largest.div_ceil(4 * THREADS).min(4 * cuda.multiprocessors()?);
        let grid = (blocks as u32, segments.len() as u32, 1);
        let launch = MODULE.launch(cuda, name, grid, THREADS as u32, 0)?.overlapping();
        // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&all);
            })?;
        }
    }
    Ok(())
}

/// A frozen weight, ready for products.
enum Frozen<'a> {
    /// In the dtype of the activations.
    Rows(Rows),
    /// Multiplied as codes.
    Codes(&'a Quantized),
}

impl Frozen<'_> {
    fn matrix(&self) -> Result<Matrix> {
        match self {
            Self::Rows(rows) => Ok(rows.matrix),
            Self::Codes(_) => bail!(
                "metal-candle-kernels: lora_linear on CUDA: a weight in e4m3 stands in a product of numbers"
            ),
        }
    }
}

/// One projection, ready for products in the dtype of the activations.
struct Ready<'a> {
    weight: Frozen<'a>,
    outer: usize,
    bias: Option<Array>,
    factors: Option<Factors>,
}

/// An adapter's place and factors.
struct Factors {
    /// Where its columns begin among those of all adapters.
    column: usize,
    rank: usize,
    scale: f64,
    dropout: Option<Dropout>,
    /// Aᵀ, `(rank, inner)`
    a: Matrix,
    /// `(rank, outer)`; multiplied by the scale, and transposed, for sums of products.
    b: Matrix,
}

/// Some projections of one input.
struct All<'a> {
    projections: Vec<Ready<'a>>,
    /// The Aᵀ of all adapters, `(columns, inner)`, with zeros where one doesn't fill its place.
    a: Option<Matrix>,
    /// Of x·A.
    columns: usize,
    /// Whether there are such zeros.
    padded: bool,
    /// Whether an adapter has dropout.
    dropout: bool,
    /// Whether the outputs are made by sums of products.
    summed: bool,
    /// What the matrices point into.
    _memory: Vec<Tensor>,
}

impl<'a> All<'a> {
    fn new(
        operation: &str,
        cuda: &Cuda,
        dtype: DType,
        inner: usize,
        projections: &[Projection<'a>],
        outputs_of: Option<(&Rows, usize)>,
    ) -> Result<Self> {
        let mut memory = Vec::new();
        let (mut weights, mut outers) = (Vec::new(), Vec::new());
        for Projection { weight, .. } in projections {
            outers.push(weight.shape()?.0);
            weights.push(match weight {
                Weight::Dense(weight) => {
                    require_floats(operation, &[*weight])?;
                    Frozen::Rows(cuda.rows_as(weight, dtype)?)
                }
                Weight::Quantized(weight) => Frozen::Codes(weight),
            });
        }
        let summed = match outputs_of {
            Some((x, rows)) => {
                let aligned = |weight: &Frozen| match weight {
                    Frozen::Rows(rows) => {
                        rows.matrix.has_aligned_rows() && x.matrix.has_aligned_rows()
                    }
                    Frozen::Codes(_) => true,
                };
                let are_codes = weights.iter().any(|it| matches!(it, Frozen::Codes(_)));
                let columns = outers.iter().copied();
                let has_adapters = projections.iter().any(|projection| projection.lora.is_some());
                let terms = if has_adapters { 2 } else { 1 };
                inner > 0
                    && weights.iter().all(aligned)
                    && cuda.takes_sums_of_products(dtype, rows, columns, terms, are_codes)?
            }
            None => false,
        };
        let adapters = || projections.iter().filter_map(|projection| projection.lora);
        for Lora { a, b, .. } in adapters() {
            require_floats(operation, &[a, b])?;
        }
        // A single A in f32 is read where it is.
        let mut lone = adapters();
        let lone = match (lone.next(), lone.next()) {
            (Some(lora), None) if [lora.a.dtype(), dtype] == [DType::F32; 2] => Some(lora.a),
            _ => None,
        };
        let place = |rank: usize| {
            if lone.is_some() { rank } else { rank.next_multiple_of(ALIGNMENT) }
        };
        let (mut columns, mut padded, mut converted) = (0, false, 0);
        for Lora { a, b, .. } in adapters() {
            let rank = a.dim(1)?;
            columns += place(rank);
            padded |= place(rank) != rank;
            if summed {
                converted += place(rank) * b.dim(1)?;
            } else if b.dtype() != dtype {
                converted += b.elem_count().next_multiple_of(ALIGNMENT);
            }
        }
        let side_by_side = if lone.is_some() { 0 } else { inner * columns };
        let of_all_a = side_by_side.next_multiple_of(ALIGNMENT);
        let packed = match of_all_a + converted {
            0 => None,
            count => Some(cuda.empty(count, dtype)?),
        };
        let mut next = packed.as_ref().map_or(0, |packed| packed.pointer);
        let mut take = |count: usize, stride: usize| {
            let count = count.next_multiple_of(ALIGNMENT);
            let matrix = Matrix::new(next, dtype, stride);
            next += (count * dtype.size_in_bytes()) as u64;
            matrix
        };
        let all_a = match lone {
            Some(a) => {
                let a = cuda.contiguous(a)?;
                let matrix = Matrix::of(&a, columns).t();
                memory.push(a.tensor);
                Some(matrix)
            }
            None if columns > 0 => Some(take(side_by_side, inner)),
            None => None,
        };
        let mut segments = Vec::new();
        let mut column = 0;
        let mut ready = Vec::with_capacity(projections.len());
        let projections = projections.iter().zip(weights).zip(outers);
        for ((Projection { bias, lora, .. }, weight), outer) in projections {
            let mut factors = None;
            if let (Some(lora), Some(all_a)) = (lora, all_a) {
                let rank = lora.a.dim(1)?;
                let a = all_a.at_row(column);
                if lone.is_none() {
                    let source = source(cuda, lora.a, dtype)?;
                    let sizes = [rank, inner, place(rank)];
                    segments.push(Segment::new(Matrix::of(&source, rank).t(), a, sizes)?);
                    memory.push(source.tensor);
                }
                let source = source(cuda, lora.b, dtype)?;
                let mut b = Matrix::of(&source, outer);
                if summed {
                    let columns = place(rank);
                    let place = take(outer * columns, columns);
                    let segment = Segment::new(b.t(), place, [outer, rank, outer])?;
                    segments.push(segment.scaled(lora.scale));
                    b = place.t();
                } else if lora.b.dtype() != dtype {
                    let place = take(rank * outer, outer);
                    // What was converted on the way already is only copied.
                    segments.push(Segment::new(b, place, [rank, outer, rank])?);
                    b = place;
                }
                memory.push(source.tensor);
                let dropout = lora.dropout.filter(|dropout| dropout.probability > 0.0);
                factors = Some(Factors { column, rank, scale: lora.scale, dropout, a, b });
                column += place(rank);
            }
            let bias = bias.map(|bias| bias_as(operation, cuda, bias, dtype)).transpose()?;
            ready.push(Ready { weight, outer, bias, factors });
        }
        copy(cuda, dtype, &segments)?;
        memory.extend(packed.map(|packed| packed.tensor));
        let dropout = ready.iter().filter_map(|ready| ready.factors.as_ref());
        let dropout = dropout.into_iter().any(|factors| factors.dropout.is_some());
        Ok(All { projections: ready, a: all_a, columns, padded, dropout, summed, _memory: memory })
    }

    fn factors(&self) -> impl Iterator<Item = &Factors> {
        self.projections.iter().filter_map(|projection| projection.factors.as_ref())
    }
}

/// A factor as the kernel that converts it takes it: in f32 or the dtype of the activations.
fn source(cuda: &Cuda, factor: &Tensor, dtype: DType) -> Result<Array> {
    match factor.dtype() {
        DType::F32 => cuda.contiguous(factor),
        _ => cuda.contiguous_as(factor, dtype),
    }
}

pub(super) fn forward(
    operation: &str,
    x: &Tensor,
    sizes: (usize, usize),
    projections: &[DenseProjection],
) -> Result<Vec<Output>> {
    outputs(operation, x, sizes, projections, true)
}

/// [`forward`], where `keeps_xa` says whether x·A is wanted too.
pub(super) fn outputs(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[DenseProjection],
    keeps_xa: bool,
) -> Result<Vec<Output>> {
    require_floats(operation, &[x])?;
    let cuda = Cuda::of(x)?;
    let dtype = x.dtype();
    if few(rows, inner, projections) {
        return forward_few_rows(operation, &cuda, x, (rows, inner), projections, keeps_xa);
    }
    if are_sooner_together(operation, x, (rows, inner), projections)? {
        let ys = in_one_order(operation, x, (rows, inner), projections)?;
        return Ok(ys.into_iter().map(|y| Output { y, xa: None }).collect());
    }
    let x_rows = cuda.rows(x)?;
    let projections = of_any(projections);
    let all = All::new(operation, &cuda, dtype, inner, &projections, Some((&x_rows, rows)))?;
    let mut skinny = Skinny::new(&cuda, dtype, rows)?;
    let xa = all.low_rank(&cuda, x, &x_rows, &mut skinny)?;
    let all_xa = Matrix::of(&xa, all.columns);
    if all.summed {
        return all.outputs(&cuda, x, (x_rows.matrix, [rows, inner]), None, &xa);
    }
    let mut outputs = Vec::with_capacity(projections.len());
    for ready in &all.projections {
        let Ready { weight, outer, bias, factors } = ready;
        let outer = *outer;
        let y = cuda.empty(with_last_dimension(x, outer), dtype)?;
        let to = Matrix::of(&y, outer);
        let mut beta = 0.0;
        if let Some(Factors { column, rank, scale, b, .. }) = factors {
            let left = all_xa.at_column(*column);
            skinny.up(left, (*b, *rank), bias.as_ref(), *scale, (&y, [rows, outer]))?;
            beta = 1.0;
        } else if let Some(bias) = bias {
            write_bias(&cuda, bias, &y, rows, outer)?;
            beta = 1.0;
        }
        let product = (x_rows.matrix, weight.matrix()?.t());
        cuda.gemm([rows, outer, inner], 1.0, product, beta, to)?;
        outputs.push(Output { y: y.tensor, xa: ready.part_of(&xa)? });
    }
    Ok(outputs)
}

/// Whether layers of few rows are computed sooner in one launch of [`Cuda::thin_products`] than by cuBLAS one after the
/// other: on an H200, 4096 deep, of 4096 and twice 1024 columns in 24 us instead of 29 for 128 rows, and of twice 14336 with the
/// gated unit in 68 instead of 75.
fn are_sooner_together(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[DenseProjection],
) -> Result<bool> {
    let has_adapters = || projections.iter().any(|projection| projection.lora.is_some());
    Ok(projections.len() > 1
        && are_thin(rows)
        && !has_adapters()
        && has_one_order(operation, x, inner, projections)?.iter().all(|has| *has))
}

/// Whether products of so many rows are sooner by [`Cuda::thin_products`] than by [`Cuda::sums_of_products`]: on an H200
/// those of 4096 columns, 4096 deep, take 23 us by either for 128 rows, and 27 and 23 for 256.
fn are_thin(rows: usize) -> bool {
    const FEW: usize = 128;
    rows <= FEW
}

/// Of which layers [`in_one_order`] gives the outputs.
pub(super) fn has_one_order(
    operation: &str,
    x: &Tensor,
    inner: usize,
    projections: &[DenseProjection],
) -> Result<Vec<bool>> {
    require_floats(operation, &[x])?;
    let fits = |size: usize| size > 0 && size.is_multiple_of(8);
    let is_for_x = [DType::BF16, DType::F16].contains(&x.dtype())
        && fits(inner)
        && Cuda::of(x)?.has_warpgroups()?;
    let has = |projection: &DenseProjection| Ok(is_for_x && fits(projection.weight.dim(0)?));
    projections.iter().map(has).collect()
}

/// The outputs of layers without adapters for `x` of any number of rows, by kernels whose sums have one order for all of
/// them.
pub(super) fn in_one_order(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[DenseProjection],
) -> Result<Vec<Tensor>> {
    let cuda = Cuda::of(x)?;
    let dtype = x.dtype();
    let is_thin = are_thin(rows);
    let x_rows = aligned(&cuda, x, dtype)?;
    let (mut thin, mut sums, mut memory, mut ys) = (vec![], vec![], vec![], vec![]);
    for projection in projections {
        let (weight, bias) = aligned_layer(operation, &cuda, projection, dtype)?;
        let columns = projection.weight.dim(0)?;
        let y = cuda.empty(with_last_dimension(x, columns), dtype)?;
        let (matrix, of_bias) = (weight.matrix, bias.as_ref().map(|bias| bias.pointer));
        if is_thin {
            thin.push(ThinProduct { weight: matrix, columns, bias: of_bias, y: y.pointer });
        } else {
            let terms = vec![Term { a: x_rows.matrix, b: matrix.t(), depth: inner }];
            let to = Matrix::of(&y, columns);
            sums.push(Sum { to, columns, bias: of_bias, codes: None, terms });
        }
        memory.push((weight, bias));
        ys.push(y.tensor);
    }
    if is_thin && rows > 0 {
        cuda.thin_products(x_rows.matrix, [rows, inner], &thin)?;
    }
    for sums in sums.chunks(MOST_SUMS) {
        cuda.sums_of_products(dtype, rows, sums)?;
    }
    Ok(ys)
}

/// Rows that begin where the tensor memory accelerator finds them. Which kernel computes with them may not depend on how a
/// tensor lies.
fn aligned(cuda: &Cuda, tensor: &Tensor, dtype: DType) -> Result<Rows> {
    match cuda.rows_as(tensor, dtype)? {
        rows if rows.matrix.has_aligned_rows() => Ok(rows),
        _ => cuda.rows(&cuda.copy(tensor)?.tensor),
    }
}

/// The weight and the bias of a layer.
fn aligned_layer(
    operation: &str,
    cuda: &Cuda,
    DenseProjection { weight, bias, .. }: &DenseProjection,
    dtype: DType,
) -> Result<(Rows, Option<Array>)> {
    require_floats(operation, &[*weight])?;
    let bias = bias.map(|bias| bias_as(operation, cuda, bias, dtype)).transpose()?;
    Ok((aligned(cuda, weight, dtype)?, bias))
}

/// The layers, if their weights are dense.
pub(super) fn both_dense<'a>(both: &[Projection<'a>; 2]) -> Option<[DenseProjection<'a>; 2]> {
    let [gate, up] = both;
    let dense = |of: &Projection<'a>| match of.weight {
        Weight::Dense(weight) => Some(DenseProjection { weight, bias: of.bias, lora: of.lora }),
        Weight::Quantized(_) => None,
    };
    Some([dense(gate)?, dense(up)?])
}

/// Whether [`unit`] is sooner than two layers and an operation of their outputs, for `x` of so many rows and inner indices.
pub(super) fn makes_unit(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    both: &[DenseProjection; 2],
) -> Result<bool> {
    let [gate, up] = both.each_ref().map(|of| of.weight.dim(0));
    // With batch invariance few rows have no kernel of their own.
    let has_another = !batch_invariance::is_on() && few(rows, inner, both);
    Ok(rows > 0
        && !has_another
        && gate? == up?
        && are_sooner_together(operation, x, (rows, inner), both)?)
}

/// The gated unit of what two layers that [`makes_unit`] says yes to give, by one launch, with the bits of [`in_one_order`].
pub(super) fn unit(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    both: &[DenseProjection; 2],
    activation: Activation,
) -> Result<Tensor> {
    let (cuda, dtype) = (Cuda::of(x)?, x.dtype());
    let x_rows = aligned(&cuda, x, dtype)?;
    let columns = both[0].weight.dim(0)?;
    let unit = cuda.empty(with_last_dimension(x, columns), dtype)?;
    let [gate, up] = both.each_ref().map(|of| aligned_layer(operation, &cuda, of, dtype));
    let memory = [gate?, up?];
    let both = memory.each_ref().map(|(weight, bias)| ThinProduct {
        weight: weight.matrix,
        columns,
        bias: bias.as_ref().map(|bias| bias.pointer),
        y: unit.pointer,
    });
    cuda.thin_unit(x_rows.matrix, [rows, inner], &both, activation)?;
    Ok(unit.tensor)
}

/// The `xa` of [`forward`].
pub(super) fn low_rank(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[DenseProjection],
) -> Result<Vec<Option<Tensor>>> {
    require_floats(operation, &[x])?;
    let cuda = Cuda::of(x)?;
    if few(rows, inner, projections) {
        let outputs = forward_few_rows(operation, &cuda, x, (rows, inner), projections, true)?;
        return Ok(outputs.into_iter().map(|output| output.xa).collect());
    }
    let projections = of_any(projections);
    let all = All::new(operation, &cuda, x.dtype(), inner, &projections, None)?;
    let mut skinny = Skinny::new(&cuda, x.dtype(), rows)?;
    let xa = all.low_rank(&cuda, x, &cuda.rows(x)?, &mut skinny)?;
    all.projections.iter().map(|ready| ready.part_of(&xa)).collect()
}

/// Whether the kernels for a few rows take these layers.
fn few(rows: usize, inner: usize, projections: &[DenseProjection]) -> bool {
    let adapters = || projections.iter().filter_map(|projection| projection.lora);
    let drops = adapters().any(|lora| lora.drops());
    let ranks = adapters().map(|lora| lora.a.dims().last().copied().unwrap_or(0));
    !drops && takes_few_rows(rows, inner, ranks)
}

impl Ready<'_> {
    /// The columns of this projection's adapter.
    fn part_of(&self, xa: &Array) -> Result<Option<Tensor>> {
        let narrow = |factors: &Factors| xa.tensor.narrow(D::Minus1, factors.column, factors.rank);
        self.factors.as_ref().map(narrow).transpose()
    }
}

impl All<'_> {
    /// `g = s·dy·Bᵀ` of all adapters side by side, `(rows, columns)`, and the gradients of B.
    fn incoming(
        &self,
        cuda: &Cuda,
        skinny: &mut Skinny,
        (rows, dtype): (usize, DType),
        dys: &[Rows],
        xas: &[Option<&Tensor>],
    ) -> Result<(Array, Vec<Option<Tensor>>)> {
        let g = cuda.empty((rows, self.columns), dtype)?;
        if self.padded {
            cuda.clear(&g)?;
        }
        let all_g = Matrix::of(&g, self.columns);
        let mut dbs = Vec::with_capacity(dys.len());
        let mut xa_rows = Vec::with_capacity(dys.len());
        for ((Ready { outer, factors, .. }, dy), xa) in self.projections.iter().zip(dys).zip(xas) {
            let Some((Factors { column, rank, scale, b, .. }, xa)) = factors.as_ref().zip(*xa)
            else {
                dbs.push(None);
                continue;
            };
            let xa = cuda.rows_as(xa, dtype)?;
            let db = cuda.empty((*rank, *outer), DType::F32)?;
            let (to, left) = (all_g.at_column(*column), xa.matrix);
            skinny.both(dy.matrix, [rows, *outer], (*b, *rank), left, *scale, (to, &db))?;
            xa_rows.push(xa);
            dbs.push(Some(db.tensor));
        }
        skinny.finish()?;
        Ok((g, dbs))
    }

    /// All outputs, each a sum of the large product, of `codes` of x where weights are multiplied as such, and
    /// `xa·(s·B)`.
    fn outputs(
        &self,
        cuda: &Cuda,
        x: &Tensor,
        (x_rows, [rows, inner]): (Matrix, [usize; 2]),
        codes: Option<&Codes>,
        xa: &Array,
    ) -> Result<Vec<Output>> {
        let dtype = x.dtype();
        let all_xa = Matrix::of(xa, self.columns);
        let mut memory = Vec::new();
        let mut sums = Vec::with_capacity(self.projections.len());
        let mut outputs = Vec::with_capacity(self.projections.len());
        for ready in &self.projections {
            let y = cuda.empty(with_last_dimension(x, ready.outer), dtype)?;
            let mut terms = Vec::with_capacity(2);
            let mut of_codes = None;
            match (&ready.weight, codes) {
                (Frozen::Codes(weight), Some(x)) => {
                    let weight = codes_of(cuda, weight)?;
                    let scales = (x.scales, weight.scales);
                    let (a, b) = (x.matrix, weight.matrix);
                    of_codes = Some(CodesTerm { a, b, depth: inner, scales });
                    memory.push(weight);
                }
                (weight, _) => {
                    terms.push(Term { a: x_rows, b: weight.matrix()?.t(), depth: inner });
                }
            }
            if let Some(Factors { column, rank: rank @ 1.., b, .. }) = ready.factors {
                terms.push(Term { a: all_xa.at_column(column), b, depth: rank });
            }
            let (to, columns) = (Matrix::of(&y, ready.outer), ready.outer);
            let bias = ready.bias.as_ref().map(|bias| bias.pointer);
            sums.push(Sum { to, columns, bias, codes: of_codes, terms });
            outputs.push(Output { y: y.tensor, xa: ready.part_of(xa)? });
        }
        cuda.sums_of_products(dtype, rows, &sums)?;
        Ok(outputs)
    }

    /// Writes the gradient of x, without the adapters' part when these have dropout, into `to`
    /// `(rows, inner)` as one sum; false where there is no kernel for it.
    fn sum_gradient(
        &self,
        cuda: &Cuda,
        [rows, inner]: [usize; 2],
        dys: &[Rows],
        g: Matrix,
        to: &Array,
    ) -> Result<bool> {
        let mut terms = Vec::with_capacity(dys.len() + 1);
        let (mut quantized, mut incoming) = (Vec::new(), Vec::new());
        for (Ready { weight, outer, .. }, dy) in self.projections.iter().zip(dys) {
            match weight {
                Frozen::Rows(rows) => {
                    terms.push(Term { a: dy.matrix, b: rows.matrix, depth: *outer });
                }
                Frozen::Codes(weight) => {
                    quantized.push(*weight);
                    incoming.push((dy.matrix, *outer, codes_of(cuda, weight)?));
                }
            }
        }
        if let (Some(a), false) = (self.a, self.dropout) {
            terms.push(Term { a: g, b: a, depth: self.columns });
        }
        let lies = |Term { a, b, depth }: &Term| {
            *depth > 0 && a.has_aligned_rows() && b.has_aligned_rows()
        };
        let columns = std::iter::once(inner);
        let are_codes = !quantized.is_empty();
        let count = terms.len() + usize::from(are_codes);
        let takes = terms.iter().all(lies)
            && cuda.takes_sums_of_products(to.dtype, rows, columns, count, are_codes)?;
        if !takes {
            return Ok(false);
        }
        let (of_weights, of_rows);
        let mut codes = None;
        if !quantized.is_empty() {
            let parts = incoming.iter().map(|(dy, outer, weight)| (*dy, *outer, weight.scales));
            of_rows = round_to_codes(cuda, rows, &parts.collect::<Vec<_>>())?;
            of_weights = transposed(cuda, &quantized)?;
            codes = Some(CodesTerm {
                a: of_rows.matrix,
                b: of_weights.matrix,
                depth: of_rows.columns,
                scales: (of_rows.scales, 0),
            });
        }
        let sum = Sum { to: Matrix::of(to, inner), columns: inner, bias: None, codes, terms };
        cuda.sums_of_products(to.dtype, rows, &[sum])?;
        Ok(true)
    }

    /// x·A of all adapters side by side, `(.., columns)`.
    fn low_rank(
        &self,
        cuda: &Cuda,
        x: &Tensor,
        x_rows: &Rows,
        skinny: &mut Skinny,
    ) -> Result<Array> {
        let (rows, inner) = rows_and_columns("lora_linear", "x", x)?;
        let xa = cuda.empty(with_last_dimension(x, self.columns), x.dtype())?;
        let all_xa = Matrix::of(&xa, self.columns);
        if self.dropout {
            for factors in self.factors() {
                let (masked, kept) = masked(cuda, x, factors.dropout)?;
                let source =
                    masked.as_ref().map_or(x_rows.matrix, |masked| Matrix::of(masked, inner));
                let to = all_xa.at_column(factors.column);
                skinny.down(source, [rows, inner], (factors.a, factors.rank), kept, to)?;
            }
        } else if let Some(a) = self.a {
            skinny.down(x_rows.matrix, [rows, inner], (a, self.columns), 1.0, all_xa)?;
        }
        skinny.finish()?;
        Ok(xa)
    }
}

/// Whether all weights are multiplied as codes, by so many rows in `dtype`, and not as numbers by the kernels for a few
/// rows; `backward` for the gradient of the rows.
pub(super) fn takes_codes(
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[Projection],
    backward: bool,
) -> Result<bool> {
    if projections.len() > MOST_PARTS {
        return Ok(false);
    }
    let mut outers = Vec::with_capacity(projections.len());
    for Projection { weight, .. } in projections {
        match weight {
            Weight::Quantized(weight) if weight.fp8_scales().is_some() => {
                let weights = std::iter::once(*weight);
                if !backward && packed::takes(rows, inner, weights, std::iter::empty()) {
                    return Ok(false);
                }
                outers.push(weight.shape().0);
            }
            _ => return Ok(false),
        }
    }
    // Rows of codes begin at 16 bytes; and four codes are transposed at once.
    if !inner.is_multiple_of(16) || outers.iter().any(|outer| *outer % 8 != 0 || *outer == 0) {
        return Ok(false);
    }
    // Of a product of the adapters' part, and of codes.
    let columns = if backward { vec![inner] } else { outers };
    Cuda::of(x)?.takes_sums_of_products(x.dtype(), rows, columns.into_iter(), 2, true)
}

/// [`forward`] of layers that [`takes_codes`] said yes to.
pub(super) fn forward_codes(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[Projection],
) -> Result<Vec<Output>> {
    let cuda = Cuda::of(x)?;
    let x_rows = cuda.rows(x)?;
    let outputs_of = Some((&x_rows, rows));
    let all = All::new(operation, &cuda, x.dtype(), inner, projections, outputs_of)?;
    let mut skinny = Skinny::new(&cuda, x.dtype(), rows)?;
    let xa = all.low_rank(&cuda, x, &x_rows, &mut skinny)?;
    let codes = round_to_codes(&cuda, rows, &[(x_rows.matrix, inner, 0)])?;
    all.outputs(&cuda, x, (x_rows.matrix, [rows, inner]), Some(&codes), &xa)
}

/// The `xa` of [`forward_codes`].
pub(super) fn low_rank_codes(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[Projection],
) -> Result<Vec<Option<Tensor>>> {
    let cuda = Cuda::of(x)?;
    let all = All::new(operation, &cuda, x.dtype(), inner, projections, None)?;
    let mut skinny = Skinny::new(&cuda, x.dtype(), rows)?;
    let xa = all.low_rank(&cuda, x, &cuda.rows(x)?, &mut skinny)?;
    all.projections.iter().map(|ready| ready.part_of(&xa)).collect()
}

/// The gradient `(.., in)` of the input of layers without adapters that [`takes_codes`] said yes to.
pub(super) fn input_gradient_codes(
    operation: &str,
    dy: &Tensor,
    (rows, inner): (usize, usize),
    projection: Projection,
) -> Result<Tensor> {
    let cuda = Cuda::of(dy)?;
    let all = All::new(operation, &cuda, dy.dtype(), inner, &[projection], None)?;
    let dx = cuda.empty(with_last_dimension(dy, inner), dy.dtype())?;
    let none = Matrix::of(&dx, 0);
    if !all.sum_gradient(&cuda, [rows, inner], &[cuda.rows(dy)?], none, &dx)? {
        bail!("metal-candle-kernels: {operation} on CUDA: a product of codes has no kernel")
    }
    Ok(dx.tensor)
}

/// As `outputs`.
fn forward_few_rows(
    operation: &str,
    cuda: &Cuda,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[DenseProjection],
    keeps_xa: bool,
) -> Result<Vec<Output>> {
    let dtype = x.dtype();
    let x_rows = cuda.rows(x)?;
    // What the layers point into.
    let (mut weights, mut arrays) = (Vec::new(), Vec::new());
    let mut layers = Vec::with_capacity(projections.len());
    for DenseProjection { weight, bias, lora } in projections {
        require_floats(operation, &[*weight])?;
        let outer = weight.dim(0)?;
        let weight = cuda.rows_as(weight, dtype)?;
        let (bias, adapter) = bias_and_adapter(operation, cuda, dtype, *bias, *lora, &mut arrays)?;
        layers.push(Layer { weight: weight.matrix, outer, bias, adapter });
        weights.push(weight);
    }
    let outputs = few_rows(cuda, x, x_rows.matrix, (rows, inner), &layers, keeps_xa)?;
    Ok(outputs.into_iter().map(|(y, xa)| Output { y, xa }).collect())
}

/// Whether a launch for a few rows takes these layers, of which some are in fewer bits.
pub(super) fn takes_packed(
    _: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[Projection],
) -> bool {
    let adapters = || projections.iter().filter_map(|projection| projection.lora);
    let drops = adapters().any(|lora| lora.drops());
    let ranks = || adapters().map(|lora| lora.a.dims().last().copied().unwrap_or(0));
    let weights = || {
        projections.iter().filter_map(|projection| match projection.weight {
            Weight::Quantized(weight) => Some(weight),
            Weight::Dense(_) => None,
        })
    };
    let dense = weights().count() < projections.len();
    !drops
        && weights().next().is_some()
        && (!dense || takes_few_rows(rows, inner, ranks()))
        && packed::takes(rows, inner, weights(), ranks())
}

/// [`forward`] of layers that [`takes_packed`] said yes to. Those that are dense are computed beside the others.
pub(super) fn forward_packed(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[Projection],
    keeps_xa: bool,
) -> Result<Vec<Output>> {
    require_floats(operation, &[x])?;
    let cuda = Cuda::of(x)?;
    // What the layers point into.
    let mut arrays = Vec::new();
    let (mut dense, mut layers) = (Vec::new(), Vec::with_capacity(projections.len()));
    for Projection { weight, bias, lora } in projections {
        match weight {
            Weight::Dense(weight) => {
                dense.push(DenseProjection { weight, bias: *bias, lora: *lora });
            }
            Weight::Quantized(weight) => {
                let (bias, adapter) =
                    bias_and_adapter(operation, &cuda, x.dtype(), *bias, *lora, &mut arrays)?;
                layers.push(packed::Layer { weight, bias, adapter });
            }
        }
    }
    let mut dense = match dense.as_slice() {
        [] => Vec::new(),
        dense => forward_few_rows(operation, &cuda, x, (rows, inner), dense, keeps_xa)?,
    }
    .into_iter();
    let packed = packed::few_rows(&cuda, x, (rows, inner), &layers, keeps_xa)?;
    let mut packed = packed.into_iter().map(|(y, xa)| Output { y, xa });
    let outputs = projections.iter().filter_map(|projection| match projection.weight {
        Weight::Dense(_) => dense.next(),
        Weight::Quantized(_) => packed.next(),
    });
    Ok(outputs.collect())
}

/// The sum of x and the residual, and the outputs of layers of its norm, of so many rows and inner indices, or the gated
/// unit of two; nothing where the norm has to be made before.
pub(super) fn of_normed(
    operation: &str,
    normed: packed::Normed,
    sizes: (usize, usize),
    projections: &[Projection],
    gate: Option<Activation>,
) -> Result<Option<(Tensor, Vec<Tensor>)>> {
    let (cuda, dtype) = (Cuda::of(normed.x)?, normed.x.dtype());
    if !cuda.has_warpgroups()? {
        return Ok(None);
    }
    let mut arrays = Vec::new();
    let mut layers = Vec::with_capacity(projections.len());
    for Projection { weight, bias, lora } in projections {
        let Weight::Quantized(weight) = weight else { return Ok(None) };
        if lora.is_some_and(|lora| lora.drops()) {
            return Ok(None);
        }
        let (bias, adapter) = bias_and_adapter(operation, &cuda, dtype, *bias, *lora, &mut arrays)?;
        layers.push(packed::Layer { weight, bias, adapter });
    }
    packed::of_normed(&cuda, normed, sizes, &layers, gate)
}

/// A layer's bias in the dtype of the activations, and its adapter in f32, whose memory is added to `arrays`.
fn bias_and_adapter(
    operation: &str,
    cuda: &Cuda,
    dtype: DType,
    bias: Option<&Tensor>,
    lora: Option<Lora>,
    arrays: &mut Vec<Array>,
) -> Result<(Option<u64>, Option<Adapter>)> {
    let bias = bias.map(|bias| bias_as(operation, cuda, bias, dtype)).transpose()?;
    let pointer = bias.as_ref().map(|bias| bias.pointer);
    arrays.extend(bias);
    let Some(Lora { a, b, scale, .. }) = lora else { return Ok((pointer, None)) };
    require_floats(operation, &[a, b])?;
    let rank = a.dim(1)?;
    let (a, b) = (source(cuda, a, DType::F32)?, source(cuda, b, DType::F32)?);
    let adapter = Adapter { a: a.pointer, b: b.pointer, rank, scale };
    arrays.extend([a, b]);
    Ok((pointer, Some(adapter)))
}

/// Of dense weights, or of some that [`takes_codes`] said yes to.
pub(super) fn backward(
    operation: &str,
    x: &Tensor,
    (rows, inner): (usize, usize),
    projections: &[Projection],
    xas: &[Option<&Tensor>],
    dys: &[&Tensor],
    need_dx: bool,
) -> Result<SharedGradients> {
    require_floats(operation, &[x])?;
    let cuda = Cuda::of(x)?;
    let dtype = x.dtype();
    let all = All::new(operation, &cuda, dtype, inner, projections, None)?;
    let x_rows = cuda.rows(x)?;
    let dys = dys.iter().map(|dy| cuda.rows(dy)).collect::<Result<Vec<_>>>()?;
    let mut skinny = Skinny::new(&cuda, dtype, rows)?;
    let (g, dbs) = all.incoming(&cuda, &mut skinny, (rows, dtype), &dys, xas)?;
    let all_g = Matrix::of(&g, all.columns);

    let mut dx = match need_dx {
        true => Some(Gathered { to: cuda.empty(x.dims(), dtype)?, beta: 0.0 }),
        false => None,
    };
    let mut summed = false;
    if let Some(dx) = &mut dx
        && all.sum_gradient(&cuda, [rows, inner], &dys, all_g, &dx.to)?
    {
        dx.beta = 1.0;
        summed = true;
    }
    let mut das = Vec::with_capacity(projections.len());
    for Factors { rank, .. } in all.factors() {
        das.push(cuda.empty((inner, *rank), DType::F32)?);
    }
    if all.dropout {
        for (Factors { column, rank, dropout, a, .. }, da) in all.factors().zip(&das) {
            let (rank, g) = (*rank, all_g.at_column(*column));
            let (masked, kept) = masked(&cuda, x, *dropout)?;
            let source = masked.as_ref().map_or(x_rows.matrix, |masked| Matrix::of(masked, inner));
            skinny.gradient(source, [rows, inner], (g, rank), kept, &[(0, rank, da)])?;
            let Some(dx) = &mut dx else { continue };
            match dropout {
                Some(dropout) => {
                    let part = cuda.empty((rows, inner), dtype)?;
                    skinny.up(g, (*a, rank), None, 1.0, (&part, [rows, inner]))?;
                    dx.add_dropped(&cuda, &part, *dropout)?;
                }
                None => dx.add(&cuda, [rows, inner, rank], (g, *a))?,
            }
        }
    } else if let Some(a) = all.a {
        let parts: Vec<_> = all
            .factors()
            .zip(&das)
            .map(|(Factors { column, rank, .. }, da)| (*column, *rank, da))
            .collect();
        skinny.gradient(x_rows.matrix, [rows, inner], (all_g, all.columns), 1.0, &parts)?;
        if let (Some(dx), false) = (&mut dx, summed) {
            skinny.up(all_g, (a, all.columns), None, 1.0, (&dx.to, [rows, inner]))?;
            dx.beta = 1.0;
        }
    }
    skinny.finish()?;
    if let (Some(dx), false) = (&mut dx, summed) {
        for (Ready { weight, outer, .. }, dy) in all.projections.iter().zip(&dys) {
            dx.add(&cuda, [rows, inner, *outer], (dy.matrix, weight.matrix()?))?;
        }
        if dx.beta == 0.0 {
            cuda.clear(&dx.to)?;
        }
    }
    let mut das = das.into_iter().map(|da| da.tensor);
    let adapters = dbs.into_iter().map(|db| db.and_then(|db| Some((das.next()?, db)))).collect();
    Ok(SharedGradients { dx: dx.map(|dx| dx.to.tensor), adapters })
}

/// A gated unit that a layer is given, to be made again.
pub(super) struct Unit<'a> {
    pub(super) gate: &'a Tensor,
    pub(super) up: &'a Tensor,
    pub(super) activation: Activation,
}

/// Of one projection without dropout, as [`backward`] takes it: the unit is made while its own backward pass goes over what it is
/// made from, in the place of its gradient.
pub(super) fn backward_gated(
    operation: &str,
    Unit { gate, up, activation }: Unit,
    (rows, inner): (usize, usize),
    projection: Projection,
    xa: &Tensor,
    dy: &Tensor,
) -> Result<GatedGradients> {
    require_floats(operation, &[gate])?;
    let cuda = Cuda::of(gate)?;
    let dtype = gate.dtype();
    let all = All::new(operation, &cuda, dtype, inner, &[projection], None)?;
    let dys = [cuda.rows(dy)?];
    let mut skinny = Skinny::new(&cuda, dtype, rows)?;
    let (g, mut dbs) = all.incoming(&cuda, &mut skinny, (rows, dtype), &dys, &[Some(xa)])?;
    let all_g = Matrix::of(&g, all.columns);
    let (
        Some(a),
        [Ready { weight, outer, factors: Some(Factors { rank, .. }), .. }],
        Some(Some(db)),
    ) = (all.a, all.projections.as_slice(), dbs.pop())
    else {
        bail!("metal-candle-kernels: {operation}: the layer has no adapter, expected one")
    };
    let x = cuda.empty(gate.dims(), dtype)?;
    if !all.sum_gradient(&cuda, [rows, inner], &dys, all_g, &x)? {
        skinny.up(all_g, (a, all.columns), None, 1.0, (&x, [rows, inner]))?;
        let factors = (dys[0].matrix, weight.matrix()?);
        cuda.gemm([rows, inner, *outer], 1.0, factors, 1.0, Matrix::of(&x, inner))?;
    }
    let (dgate, dup) = backward_again(&cuda, (gate, up), activation, &x)?;
    let da = cuda.empty((inner, *rank), DType::F32)?;
    let source = Matrix::of(&x, inner);
    skinny.gradient(source, [rows, inner], (all_g, all.columns), 1.0, &[(0, *rank, &da)])?;
    skinny.finish()?;
    Ok(GatedGradients { dgate, dup, da: da.tensor, db })
}

/// A contiguous matrix that products are added to.
struct Gathered {
    to: Array,
    /// 0 while nothing was written.
    beta: f64,
}

impl Gathered {
    fn add(
        &mut self,
        cuda: &Cuda,
        [rows, columns, inner]: [usize; 3],
        factors: (Matrix, Matrix),
    ) -> Result<()> {
        let to = Matrix::of(&self.to, columns);
        cuda.gemm([rows, columns, inner], 1.0, factors, self.beta, to)?;
        self.beta = 1.0;
        Ok(())
    }

    /// Adds the backward pass of dropout of `part`.
    fn add_dropped(&mut self, cuda: &Cuda, part: &Array, dropout: Dropout) -> Result<()> {
        let name = by_dtype!("dropout_add", part.dtype)?;
        let count = part.tensor.elem_count();
        let launch =
            MODULE.launch(cuda, name, elements(cuda, count, part.dtype)?, THREADS as u32, 0)?;
        let Mask { seed, threshold, kept } = Mask::new(dropout);
        let (count, first) = (count as i64, i32::from(self.beta == 0.0));
        // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&part.pointer).arg(&self.to.pointer).arg(&count).arg(&seed);
                arguments.arg(&threshold).arg(&kept).arg(&first);
            })?;
        }
        self.beta = 1.0;
        Ok(())
    }
}

/// A mask as the kernels take it.
struct Mask {
    seed: u64,
    threshold: u32,
    kept: f32,
}

impl Mask {
    fn new(dropout: Dropout) -> Self {
        let (threshold, kept) = (dropout.threshold() as u32, dropout.kept() as f32);
        Mask { seed: dropout.seed, threshold, kept }
    }
}

/// The grid of a kernel that goes over elements, 16 bytes a thread.
fn elements(cuda: &Cuda, count: usize, dtype: DType) -> Result<(u32, u32, u32)> {
    let blocks = count.div_ceil(THREADS * 16 / dtype.size_in_bytes());
    Ok((blocks.min(16 * cuda.multiprocessors()?) as u32, 1, 1))
}

/// `x` with zeros where elements are dropped, and what the others are still to be multiplied by; no copy
/// without dropout.
fn masked(cuda: &Cuda, x: &Tensor, dropout: Option<Dropout>) -> Result<(Option<Array>, f64)> {
    let Some(dropout) = dropout else { return Ok((None, 1.0)) };
    let mask = Mask { kept: 1.0, ..Mask::new(dropout) };
    Ok((Some(drop_elements(cuda, x, &mask)?), dropout.kept()))
}

fn drop_elements(cuda: &Cuda, x: &Tensor, mask: &Mask) -> Result<Array> {
    let x = cuda.contiguous(x)?;
    let out = cuda.empty(x.tensor.dims(), x.dtype)?;
    let name = by_dtype!("dropout", x.dtype)?;
    let count = x.tensor.elem_count();
    let launch = MODULE.launch(cuda, name, elements(cuda, count, x.dtype)?, THREADS as u32, 0)?;
    let Mask { seed, threshold, kept } = mask;
    let count = count as i64;
    // SAFETY: as the kernel declares them; the caller holds what the pointers point into.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&out.pointer).arg(&count).arg(seed);
            arguments.arg(threshold).arg(kept);
        })?;
    }
    Ok(out)
}

pub(super) fn dropout(operation: &str, x: &Tensor, dropout: Dropout) -> Result<Tensor> {
    require_floats(operation, &[x])?;
    Ok(drop_elements(&Cuda::of(x)?, x, &Mask::new(dropout))?.tensor)
}
