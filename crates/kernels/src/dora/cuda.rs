//! DoRA on CUDA, see `kernel.cu`.

use super::{Gradients, weight_times_a};
use crate::backend::cuda::{
    ANY_THREADS, Array, Cuda, Matrix, Module, Parameter, Rows, a_block_a_row, any_groups, by_dtype,
    module, require_floats,
};
use candle_core::{DType, Result, Tensor};

static MODULE: Module = module!("dora");

pub(super) fn squared_norms(operation: &str, weight: &Tensor) -> Result<Tensor> {
    require_floats(operation, &[weight])?;
    let cuda = Cuda::of(weight)?;
    let (outer, inner) = weight.dims2()?;
    let rows = cuda.rows(weight)?;
    let weight = rows.matrix;
    let squares = cuda.empty(outer, DType::F32)?;
    let name = by_dtype!("dora_squared_norms", weight.dtype)?;
    let launch = MODULE.launch(&cuda, name, a_block_a_row(outer)?, ANY_THREADS, 0)?.overlapping();
    let (columns, stride) = (inner as i64, weight.stride as i64);
    // SAFETY: the weight has (outer, inner) elements, in rows at this distance, and the result (outer).
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&weight.pointer).arg(&squares.pointer).arg(&columns).arg(&stride);
        })?;
    }
    Ok(squares.tensor)
}

/// `a`, `b` and `gram_b` are in f32, and the rank isn't 0.
pub(super) fn merged_norms(
    weight: &Tensor,
    base_squares: &Tensor,
    a: &Tensor,
    b: &Tensor,
    gram_b: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    let cuda = Cuda::of(weight)?;
    let (rank, outer) = b.dims2()?;
    let (products, parts) = match weight.dtype() {
        DType::BF16 => (split_products(&cuda, weight, a)?, 2),
        _ => (cuda.contiguous(&weight_times_a(weight, a)?)?, 1),
    };
    let (base, b, gram_b) =
        (cuda.contiguous(base_squares)?, cuda.contiguous(b)?, cuda.contiguous(gram_b)?);
    let norms = cuda.empty(outer, DType::F32)?;
    let launch = MODULE.launch(&cuda, "dora_merged_norms", blocks(outer), ANY_THREADS, 0)?;
    let launch = launch.overlapping();
    let (columns, rank, parts, scale) = (outer as i64, rank as i32, parts, scale as f32);
    // SAFETY: base and norms have (outer) elements, b and gram_b (rank, outer), the products that `parts` times.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&base.pointer).arg(&products.pointer).arg(&gram_b.pointer);
            arguments.arg(&b.pointer).arg(&norms.pointer).arg(&columns).arg(&rank).arg(&parts);
            arguments.arg(&scale);
        })?;
    }
    Ok(norms.tensor)
}

/// `(W·A)ᵀ` for a weight of bf16, in two parts to be added up, `(2·rank, outer)` in f32: products with A's
/// nearest bf16 numbers, and with the nearest to what those leave. A weight converted to f32 would be three
/// times as much memory to read and write.
fn split_products(cuda: &Cuda, weight: &Tensor, a: &Tensor) -> Result<Array> {
    let (outer, inner) = weight.dims2()?;
    let (a, rank) = (cuda.contiguous(a)?, a.dim(1)?);
    let split = cuda.empty((inner, 2 * rank), DType::BF16)?;
    let count = inner * rank;
    let launch = MODULE.launch(cuda, "dora_split", blocks(count), ANY_THREADS, 0)?.overlapping();
    let (elements, columns) = (count as i64, rank as i32);
    // SAFETY: a has so many elements, and the result twice as many.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&a.pointer).arg(&split.pointer).arg(&elements).arg(&columns);
        })?;
    }
    let weight = cuda.rows(weight)?;
    let products = cuda.empty((2 * rank, outer), DType::F32)?;
    let factors = (Matrix::of(&split, 2 * rank).t(), weight.matrix.t());
    cuda.gemm([2 * rank, outer, inner], 1.0, factors, 0.0, Matrix::of(&products, outer))?;
    Ok(products)
}

/// Blocks that have a thread for each of so many elements.
fn blocks(count: usize) -> (u32, u32, u32) {
    (count.div_ceil(ANY_THREADS as usize) as u32, 1, 1)
}

/// What a thread has of the columns: a pack of them where all rows begin at 16 bytes, else one.
fn vectors(columns: usize, inputs: &[&Rows]) -> (bool, usize) {
    let pack = 16 / inputs[0].matrix.dtype.size_in_bytes();
    let packed =
        columns.is_multiple_of(pack) && inputs.iter().all(|input| input.matrix.has_aligned_rows());
    (packed, if packed { columns / pack } else { columns })
}

pub(super) fn scale_columns(
    operation: &str,
    y: &Tensor,
    factor: &Tensor,
    bias: Option<&Tensor>,
    rows: usize,
    columns: usize,
) -> Result<Tensor> {
    const ROWS_OF_GROUP: usize = 8;
    const GROUPS: usize = 65_535;
    require_floats(operation, &[y])?;
    let cuda = Cuda::of(y)?;
    let z = cuda.empty(y.shape(), y.dtype())?;
    let (y, factor) = (cuda.rows(y)?, cuda.contiguous(factor)?);
    let bias = bias.map(|bias| cuda.contiguous(bias)).transpose()?;
    let shift = match &bias {
        Some(bias) => Parameter::new(operation, bias)?,
        None => Parameter::none(),
    };
    let (packed, vectors) = vectors(columns, &[&y]);
    let name = match packed {
        true => by_dtype!("dora_scale_columns", z.dtype)?,
        false => by_dtype!("dora_scale_columns_any", z.dtype)?,
    };
    let rows_of_group = rows.div_ceil(GROUPS).max(ROWS_OF_GROUP);
    let (across, ..) = blocks(vectors);
    let grid = (across, rows.div_ceil(rows_of_group) as u32, 1);
    let launch = MODULE.launch(&cuda, name, grid, ANY_THREADS, 0)?.overlapping();
    let (y, stride) = (y.matrix.pointer, y.matrix.stride as i64);
    let (rows, columns, rows_of_group) = (rows as i64, columns as i64, rows_of_group as i64);
    // SAFETY: y has (rows, columns) elements, in rows at this distance, like z; factor and bias have (columns).
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&y).arg(&factor.pointer).arg(&shift).arg(&z.pointer).arg(&rows);
            arguments.arg(&columns).arg(&stride).arg(&rows_of_group);
        })?;
    }
    Ok(z.tensor)
}

pub(super) fn backward(
    operation: &str,
    y: &Tensor,
    factor: &Tensor,
    dz: &Tensor,
    need_dbias: bool,
    rows: usize,
    columns: usize,
) -> Result<Gradients> {
    require_floats(operation, &[y])?;
    let cuda = Cuda::of(y)?;
    let dy = cuda.empty(y.shape(), y.dtype())?;
    let sets = if need_dbias { 2 } else { 1 };
    let sums = if rows * columns == 0 {
        cuda.zeros((sets, columns), DType::F32)?
    } else {
        let (y, dz, factor) = (cuda.rows(y)?, cuda.rows(dz)?, cuda.contiguous(factor)?);
        let (packed, vectors) = vectors(columns, &[&y, &dz]);
        let name = match packed {
            true => by_dtype!("dora_backward", dy.dtype)?,
            false => by_dtype!("dora_backward_any", dy.dtype)?,
        };
        let (grid, groups, rows_of_group) = any_groups(rows, vectors);
        let partial = cuda.empty((sets, groups, columns), DType::F32)?;
        let launch = MODULE.launch(&cuda, name, grid, ANY_THREADS, 0)?.overlapping();
        let (y_stride, dz_stride) = (y.matrix.stride as i64, dz.matrix.stride as i64);
        let (row_count, column_count) = (rows as i64, columns as i64);
        let (rows_of_group, need_dbias) = (rows_of_group as i64, i32::from(need_dbias));
        // SAFETY: y and dz have (rows, columns) elements, in rows at these distances, like dy; factor has
        // (columns), and the partial sums a row for each group of rows and set.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&y.matrix.pointer).arg(&factor.pointer).arg(&dz.matrix.pointer);
                arguments.arg(&dy.pointer).arg(&partial.pointer).arg(&row_count);
                arguments.arg(&column_count).arg(&y_stride).arg(&dz_stride).arg(&rows_of_group);
                arguments.arg(&need_dbias);
            })?;
        }
        cuda.sum_groups(&partial, sets, groups, columns)?
    };
    Ok(Gradients {
        dy: dy.tensor,
        dfactor: sums.tensor.get(0)?,
        dbias: need_dbias.then(|| sums.tensor.get(1)).transpose()?,
    })
}
