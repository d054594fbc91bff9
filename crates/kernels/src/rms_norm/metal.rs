//! RMS norm on Metal, see `kernel.metal`.

use super::OPERATION;
use crate::backend::metal::{Argument, Groups, Metal, by_dtype, parameter_code, size};
use candle_core::{DType, Result, Tensor};

pub(super) fn forward(
    rows: usize,
    columns: usize,
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    weight_offset: f64,
) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    let (x, weight) = (metal.contiguous(x)?, metal.contiguous(weight)?);
    let name = by_dtype!("rms_norm_forward", x.dtype)?;
    let y = metal.empty(x.tensor.shape(), x.dtype)?;
    if rows * columns == 0 {
        return Ok(y.tensor);
    }
    let arguments = [
        Argument::Input(&x),
        Argument::Input(&weight),
        Argument::Output(&y),
        parameter_code(OPERATION, &weight)?,
        Argument::U32(size(OPERATION, columns)?),
        Argument::F32(eps as f32),
        Argument::F32(weight_offset as f32),
    ];
    metal.run(&[metal.by_row(name, rows, columns, &arguments)?])?;
    Ok(y.tensor)
}

pub(super) fn forward_residual(
    rows: usize,
    columns: usize,
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f64,
    weight_offset: f64,
) -> Result<(Tensor, Tensor)> {
    let metal = Metal::of(x)?;
    let (x, residual) = (metal.contiguous(x)?, metal.contiguous(residual)?);
    let weight = metal.contiguous(weight)?;
    let name = by_dtype!("rms_norm_forward_residual", x.dtype)?;
    let sum = metal.empty(x.tensor.shape(), x.dtype)?;
    let y = metal.empty(x.tensor.shape(), x.dtype)?;
    if rows * columns > 0 {
        let arguments = [
            Argument::Input(&x),
            Argument::Input(&residual),
            Argument::Input(&weight),
            Argument::Output(&sum),
            Argument::Output(&y),
            parameter_code(OPERATION, &weight)?,
            Argument::U32(size(OPERATION, columns)?),
            Argument::F32(eps as f32),
            Argument::F32(weight_offset as f32),
        ];
        metal.run(&[metal.by_row(name, rows, columns, &arguments)?])?;
    }
    Ok((sum.tensor, y.tensor))
}

/// The backward pass of both.
pub(super) struct Backward<'a> {
    pub(super) rows: usize,
    pub(super) columns: usize,
    pub(super) x: &'a Tensor,
    pub(super) weight: &'a Tensor,
    pub(super) eps: f64,
    pub(super) weight_offset: f64,
    pub(super) dy: &'a Tensor,
    pub(super) dsum: Option<&'a Tensor>,
}

impl Backward<'_> {
    pub(super) fn run(
        self,
        need_dx: bool,
        need_dweight: bool,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Backward { rows, columns, x, weight, eps, weight_offset, dy, dsum } = self;
        let metal = Metal::of(x)?;
        let (x, weight, dy) =
            (metal.contiguous(x)?, metal.contiguous(weight)?, metal.contiguous(dy)?);
        let dsum = dsum.map(|dsum| metal.contiguous(dsum)).transpose()?;
        let name = by_dtype!("rms_norm_backward", x.dtype)?;
        let dtype = parameter_code(OPERATION, &weight)?;
        let dx = need_dx.then(|| metal.empty(x.tensor.shape(), x.dtype)).transpose()?;
        if rows * columns == 0 {
            let dweight = need_dweight.then(|| metal.zeros(columns)).transpose()?;
            return Ok((dx.map(|dx| dx.tensor), dweight.map(|dweight| dweight.tensor)));
        }
        let inverse = need_dweight.then(|| metal.empty(rows, DType::F32)).transpose()?;
        // What isn't needed isn't touched, but something has to be there.
        let unused = Argument::Input(&x);
        let columns_argument = Argument::U32(size(OPERATION, columns)?);
        let arguments = [
            Argument::Input(&x),
            Argument::Input(&weight),
            Argument::Input(&dy),
            dsum.as_ref().map_or(unused, Argument::Input),
            dx.as_ref().map_or(unused, Argument::Output),
            inverse.as_ref().map_or(unused, Argument::Output),
            dtype,
            columns_argument,
            Argument::F32(eps as f32),
            Argument::F32(weight_offset as f32),
            Argument::U32(dsum.is_some().into()),
            Argument::U32(need_dx.into()),
            Argument::U32(need_dweight.into()),
        ];
        let rows_pass = metal.by_row(name, rows, columns, &arguments)?;
        let dweight = match &inverse {
            Some(inverse) => {
                let groups = Groups::of(rows);
                let partial = metal.empty((groups.count, columns), DType::F32)?;
                let arguments = [
                    Argument::Input(&x),
                    Argument::Input(&dy),
                    Argument::Input(inverse),
                    Argument::Output(&partial),
                    Argument::U32(size(OPERATION, rows)?),
                    columns_argument,
                    Argument::U32(size(OPERATION, groups.rows)?),
                ];
                let name = by_dtype!("rms_norm_weight", x.dtype)?;
                let weight_pass = metal.by_thread(name, columns, groups.count, &arguments)?;
                let sizes = [1, groups.count, columns];
                let sums = metal.run_and_sum([rows_pass, weight_pass], &partial, sizes)?;
                Some(sums.tensor.reshape(columns)?)
            }
            None if need_dx => {
                metal.run(&[rows_pass])?;
                None
            }
            None => None,
        };
        Ok((dx.map(|dx| dx.tensor), dweight))
    }
}
