//! Layer norm on Metal, see `kernel.metal`.

use super::{Gradients, Needs, OPERATION};
use crate::backend::metal::{Argument, Groups, Metal, by_dtype, parameter_code, size};
use candle_core::{DType, Result, Tensor};

pub(super) fn forward(
    rows: usize,
    columns: usize,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    let (x, weight) = (metal.contiguous(x)?, metal.contiguous(weight)?);
    let bias = bias.map(|bias| metal.contiguous(bias)).transpose()?;
    let name = by_dtype!("layer_norm_forward", x.dtype)?;
    let y = metal.empty(x.tensor.shape(), x.dtype)?;
    if rows * columns == 0 {
        return Ok(y.tensor);
    }
    // Without a bias something has to be there, too.
    let any_bias = bias.as_ref().unwrap_or(&weight);
    let arguments = [
        Argument::Input(&x),
        Argument::Input(&weight),
        Argument::Input(any_bias),
        Argument::Output(&y),
        parameter_code(OPERATION, &weight)?,
        parameter_code(OPERATION, any_bias)?,
        Argument::U32(bias.is_some().into()),
        Argument::U32(size(OPERATION, columns)?),
        Argument::F32(eps as f32),
    ];
    metal.run(&[metal.by_row(name, rows, columns, &arguments)?])?;
    Ok(y.tensor)
}

pub(super) fn backward(
    rows: usize,
    columns: usize,
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    dy: &Tensor,
    needs: Needs,
) -> Result<Gradients> {
    let metal = Metal::of(x)?;
    let (x, weight, dy) = (metal.contiguous(x)?, metal.contiguous(weight)?, metal.contiguous(dy)?);
    let name = by_dtype!("layer_norm_backward", x.dtype)?;
    let dtype = parameter_code(OPERATION, &weight)?;
    let dx = needs.dx.then(|| metal.empty(x.tensor.shape(), x.dtype)).transpose()?;
    let need_sums = needs.dweight || needs.dbias;
    let sums = if rows * columns == 0 {
        need_sums.then(|| metal.zeros((2, columns))).transpose()?
    } else {
        let statistics = need_sums.then(|| metal.empty((rows, 2), DType::F32)).transpose()?;
        // What isn't needed isn't touched, but something has to be there.
        let unused = Argument::Input(&x);
        let columns_argument = Argument::U32(size(OPERATION, columns)?);
        let arguments = [
            Argument::Input(&x),
            Argument::Input(&weight),
            Argument::Input(&dy),
            dx.as_ref().map_or(unused, Argument::Output),
            statistics.as_ref().map_or(unused, Argument::Output),
            dtype,
            columns_argument,
            Argument::F32(eps as f32),
            Argument::U32(needs.dx.into()),
            Argument::U32(need_sums.into()),
        ];
        let rows_pass = metal.by_row(name, rows, columns, &arguments)?;
        match &statistics {
            Some(statistics) => {
                let groups = Groups::of(rows);
                let partial = metal.empty((2, groups.count, columns), DType::F32)?;
                let arguments = [
                    Argument::Input(&x),
                    Argument::Input(&dy),
                    Argument::Input(statistics),
                    Argument::Output(&partial),
                    Argument::U32(size(OPERATION, rows)?),
                    columns_argument,
                    Argument::U32(size(OPERATION, groups.rows)?),
                    Argument::U32(size(OPERATION, groups.count)?),
                ];
                let name = by_dtype!("layer_norm_parameters", x.dtype)?;
                let columns_pass = metal.by_thread(name, columns, groups.count, &arguments)?;
                let sizes = [2, groups.count, columns];
                Some(metal.run_and_sum([rows_pass, columns_pass], &partial, sizes)?)
            }
            None if needs.dx => {
                metal.run(&[rows_pass])?;
                None
            }
            None => None,
        }
    };
    let parameter = |needed: bool, index| {
        sums.as_ref().filter(|_| needed).map(|sums| sums.tensor.get(index)).transpose()
    };
    Ok(Gradients {
        dx: dx.map(|dx| dx.tensor),
        dweight: parameter(needs.dweight, 0)?,
        dbias: parameter(needs.dbias, 1)?,
    })
}
