//! DoRA on Metal, see `kernel.metal`.

use super::{Gradients, weight_times_a};
use crate::backend::metal::product::Matrix;
use crate::backend::metal::{Argument, Groups, Metal, by_dtype, parameter_code, size};
use candle_core::{DType, Result, Tensor};

pub(super) fn squared_norms(operation: &str, weight: &Tensor) -> Result<Tensor> {
    let metal = Metal::of(weight)?;
    let (outer, inner) = weight.dims2()?;
    let weight = metal.collapsed_rows(weight)?;
    let name = by_dtype!("dora_squared_norms", weight.dtype)?;
    if outer * inner == 0 {
        return Ok(metal.zeros(outer)?.tensor);
    }
    let squares = metal.empty(outer, DType::F32)?;
    let arguments = [
        Argument::Input(&weight),
        Argument::Output(&squares),
        Argument::U32(size(operation, inner)?),
        Argument::U64(Matrix::rows(&weight)?.stride() as u64),
    ];
    metal.run(&[metal.by_row(name, outer, inner, &arguments)?])?;
    Ok(squares.tensor)
}

/// `a`, `b` and `gram_b` are in f32, and neither the rank nor the number of rows is 0.
pub(super) fn merged_norms(
    weight: &Tensor,
    base_squares: &Tensor,
    a: &Tensor,
    b: &Tensor,
    gram_b: &Tensor,
    scale: f64,
) -> Result<Tensor> {
    const OPERATION: &str = "dora::merged_norms";
    let metal = Metal::of(weight)?;
    let (rank, outer) = b.dims2()?;
    let products = metal.contiguous(&weight_times_a(weight, a)?)?;
    let (base, b, gram_b) =
        (metal.contiguous(base_squares)?, metal.contiguous(b)?, metal.contiguous(gram_b)?);
    let norms = metal.empty(outer, DType::F32)?;
    let arguments = [
        Argument::Input(&base),
        Argument::Input(&products),
        Argument::Input(&gram_b),
        Argument::Input(&b),
        Argument::Output(&norms),
        Argument::U32(size(OPERATION, outer)?),
        Argument::U32(size(OPERATION, rank)?),
        Argument::F32(scale as f32),
    ];
    metal.run(&[metal.by_thread("dora_merged_norms", outer, 1, &arguments)?])?;
    Ok(norms.tensor)
}

pub(super) fn scale_columns(
    operation: &str,
    y: &Tensor,
    factor: &Tensor,
    bias: Option<&Tensor>,
    rows: usize,
    columns: usize,
) -> Result<Tensor> {
    let metal = Metal::of(y)?;
    let (y, factor) = (metal.collapsed_rows(y)?, metal.contiguous(factor)?);
    let bias = bias.map(|bias| metal.contiguous(bias)).transpose()?;
    let name = by_dtype!("dora_scale_columns", y.dtype)?;
    let z = metal.empty(y.tensor.shape(), y.dtype)?;
    if rows * columns == 0 {
        return Ok(z.tensor);
    }
    let (shift, code) = match &bias {
        Some(bias) => (Argument::Input(bias), parameter_code(operation, bias)?),
        // It isn't touched, but something has to be there.
        None => (Argument::Input(&factor), Argument::U32(0)),
    };
    let arguments = [
        Argument::Input(&y),
        Argument::Input(&factor),
        shift,
        Argument::Output(&z),
        Argument::U32(size(operation, columns)?),
        Argument::U64(Matrix::rows(&y)?.stride() as u64),
        code,
        Argument::U32(bias.is_some().into()),
    ];
    metal.run(&[metal.by_elements(name, columns, rows, &arguments)?])?;
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
    let metal = Metal::of(y)?;
    let (y, dz) = (metal.collapsed_rows(y)?, metal.collapsed_rows(dz)?);
    let factor = metal.contiguous(factor)?;
    let name = by_dtype!("dora_backward", y.dtype)?;
    let dy = metal.empty(y.tensor.shape(), y.dtype)?;
    let sets = if need_dbias { 2 } else { 1 };
    let sums = if rows * columns == 0 {
        metal.zeros((sets, columns))?
    } else {
        let groups = Groups::of(rows);
        let partial = metal.empty((sets, groups.count, columns), DType::F32)?;
        let arguments = [
            Argument::Input(&y),
            Argument::Input(&factor),
            Argument::Input(&dz),
            Argument::Output(&dy),
            Argument::Output(&partial),
            Argument::U32(size(operation, rows)?),
            Argument::U32(size(operation, columns)?),
            Argument::U64(Matrix::rows(&y)?.stride() as u64),
            Argument::U64(Matrix::rows(&dz)?.stride() as u64),
            Argument::U32(size(operation, groups.rows)?),
            Argument::U32(size(operation, groups.count)?),
            Argument::U32(need_dbias.into()),
        ];
        let pass = metal.by_thread(name, columns, groups.count, &arguments)?;
        metal.run_and_sum([pass], &partial, [sets, groups.count, columns])?
    };
    Ok(Gradients {
        dy: dy.tensor,
        dfactor: sums.tensor.get(0)?,
        dbias: need_dbias.then(|| sums.tensor.get(1)).transpose()?,
    })
}
