//! Linear layers on Metal: products, see `backend/metal/product.rs`.

use super::with_last_dimension;
use crate::backend::metal::product::{FewRows, FewWeight, Matrix, Term, takes_few_rows};
use crate::backend::metal::{Argument, Groups, Metal, by_dtype, size};
use crate::quantized::Quantized;
use crate::quantized::metal::Packed;
use candle_core::{DType, Result, Tensor};

pub(super) fn linear(
    operation: &str,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    [rows, outer, inner]: [usize; 3],
) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    let y = metal.empty(with_last_dimension(x, outer), x.dtype())?;
    let (x, weight) = (metal.collapsed_rows(x)?, metal.collapsed_rows(weight)?);
    let bias = bias.map(|bias| metal.contiguous(bias)).transpose()?;
    let large = vec![Term::new(Matrix::rows(&x)?, Matrix::rows(&weight)?.t(), inner)];
    metal.layer(operation, rows, outer, (large, Vec::new()), bias.as_ref(), &y)?;
    Ok(y.tensor)
}

/// `linear` with a weight in fewer bits, where a few rows are multiplied by it as it is.
pub(super) fn packed_linear(
    operation: &str,
    x: &Tensor,
    weight: &Quantized,
    bias: Option<&Tensor>,
    rows: usize,
) -> Result<Option<Tensor>> {
    let (outer, inner) = weight.shape();
    if !takes_few_rows(rows, inner, 0) || outer == 0 {
        return Ok(None);
    }
    let metal = Metal::of(x)?;
    let y = metal.empty(with_last_dimension(x, outer), x.dtype())?;
    let (x, weight) = (metal.collapsed_rows(x)?, Packed::new(operation, &metal, weight)?);
    let bias = bias.map(|bias| metal.contiguous(bias)).transpose()?;
    let layer = FewRows {
        x: Matrix::rows(&x)?,
        weight: FewWeight::Packed(&weight),
        bias: bias.as_ref(),
        adapter: None,
        y: Matrix::of(&y, outer),
        factor: 1.0,
        add: false,
    };
    metal.few_rows(operation, rows, outer, inner, &layer)?;
    Ok(Some(y.tensor))
}

pub(super) fn backward_input(
    operation: &str,
    dy: &Tensor,
    weight: &Tensor,
    [rows, outer, inner]: [usize; 3],
) -> Result<Tensor> {
    let metal = Metal::of(dy)?;
    let dx = metal.empty(with_last_dimension(dy, inner), dy.dtype())?;
    let (dy, weight) = (metal.collapsed_rows(dy)?, metal.collapsed_rows(weight)?);
    let large = vec![Term::new(Matrix::rows(&dy)?, Matrix::rows(&weight)?, outer)];
    metal.layer(operation, rows, inner, (large, Vec::new()), None, &dx)?;
    Ok(dx.tensor)
}

pub(super) fn backward_weight(
    operation: &str,
    x: &Tensor,
    dy: &Tensor,
    [rows, outer, inner]: [usize; 3],
) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    let (x, dy) = (metal.collapsed_rows(x)?, metal.collapsed_rows(dy)?);
    let dweight = metal.empty((outer, inner), DType::F32)?;
    let terms = [Term::new(Matrix::rows(&dy)?.t(), Matrix::rows(&x)?, rows)];
    metal.product(operation, outer, inner, &terms, Matrix::of(&dweight, inner))?;
    Ok(dweight.tensor)
}

pub(super) fn backward_bias(
    operation: &str,
    dy: &Tensor,
    rows: usize,
    outer: usize,
) -> Result<Tensor> {
    let metal = Metal::of(dy)?;
    let dy = metal.collapsed_rows(dy)?;
    let name = by_dtype!("column_sums", dy.dtype)?;
    if rows * outer == 0 {
        return Ok(metal.zeros(outer)?.tensor);
    }
    let stride = Matrix::rows(&dy)?.stride() as u64;
    let groups = Groups::of(rows);
    let partial = metal.empty((groups.count, outer), DType::F32)?;
    let arguments = [
        Argument::Input(&dy),
        Argument::Output(&partial),
        Argument::U32(size(operation, rows)?),
        Argument::U32(size(operation, outer)?),
        Argument::U32(size(operation, groups.rows)?),
        Argument::U64(stride),
    ];
    let pass = metal.by_thread(name, outer, groups.count, &arguments)?;
    let sums = metal.run_and_sum([pass], &partial, [1, groups.count, outer])?;
    sums.tensor.reshape(outer)
}
