//! Sums of what experts give on Metal, see `kernel.metal`.

use super::{COMBINE, Gradients};
use crate::backend::metal::{Argument, Metal, by_dtype, size};
use candle_core::{DType, Result, Tensor};

pub(super) fn combine(y: &Tensor, weights: &Tensor, places: &Tensor) -> Result<Tensor> {
    let metal = Metal::of(y)?;
    let ((rows, columns), (tokens, active)) = (y.dims2()?, weights.dims2()?);
    let name = by_dtype!("experts_combine", y.dtype())?;
    let out = metal.empty((tokens, columns), y.dtype())?;
    if tokens * columns == 0 {
        return Ok(out.tensor);
    }
    let (y, weights, places) =
        (metal.contiguous(y)?, metal.contiguous(weights)?, metal.contiguous(places)?);
    let arguments = [
        Argument::Input(&y),
        Argument::Input(&weights),
        Argument::Input(&places),
        Argument::Output(&out),
        Argument::U32(size(COMBINE, rows)?),
        Argument::U32(size(COMBINE, columns)?),
        Argument::U32(size(COMBINE, active)?),
    ];
    metal.run(&[metal.by_elements(name, columns, tokens, &arguments)?])?;
    Ok(out.tensor)
}

pub(super) fn combine_backward(
    y: &Tensor,
    weights: &Tensor,
    places: &Tensor,
    dout: &Tensor,
) -> Result<Gradients> {
    let metal = Metal::of(y)?;
    let ((rows, columns), active) = (y.dims2()?, weights.dim(1)?);
    let name = by_dtype!("experts_backward", y.dtype())?;
    let dy = metal.empty((rows, columns), y.dtype())?;
    let dweights = metal.empty(weights.shape(), DType::F32)?;
    if rows > 0 {
        let (weights, places) = (metal.contiguous(weights)?, metal.contiguous(places)?);
        let (y, dout) = (metal.contiguous(y)?, metal.contiguous(dout)?);
        let arguments = [
            Argument::Input(&y),
            Argument::Input(&weights),
            Argument::Input(&places),
            Argument::Input(&dout),
            Argument::Output(&dy),
            Argument::Output(&dweights),
            Argument::U32(size(COMBINE, rows)?),
            Argument::U32(size(COMBINE, columns)?),
            Argument::U32(size(COMBINE, active)?),
        ];
        metal.run(&[metal.by_row(name, rows, columns, &arguments)?])?;
    }
    Ok(Gradients { dy: dy.tensor, dweights: dweights.tensor })
}
