//! Softmax on Metal, see `kernel.metal`.

use super::OPERATION;
use crate::backend::metal::{Argument, Metal, by_dtype, size};
use candle_core::{Result, Tensor};

pub(super) fn forward(rows: usize, columns: usize, x: &Tensor) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    let x = metal.contiguous(x)?;
    let name = by_dtype!("softmax_forward", x.dtype)?;
    let y = metal.empty(x.tensor.shape(), x.dtype)?;
    if rows * columns == 0 {
        return Ok(y.tensor);
    }
    let arguments =
        [Argument::Input(&x), Argument::Output(&y), Argument::U32(size(OPERATION, columns)?)];
    metal.run(&[metal.by_row(name, rows, columns, &arguments)?])?;
    Ok(y.tensor)
}

pub(super) fn backward(rows: usize, columns: usize, y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let metal = Metal::of(y)?;
    let (y, dy) = (metal.contiguous(y)?, metal.contiguous(dy)?);
    let name = by_dtype!("softmax_backward", y.dtype)?;
    let dx = metal.empty(y.tensor.shape(), y.dtype)?;
    if rows * columns == 0 {
        return Ok(dx.tensor);
    }
    let arguments = [
        Argument::Input(&y),
        Argument::Input(&dy),
        Argument::Output(&dx),
        Argument::U32(size(OPERATION, columns)?),
    ];
    metal.run(&[metal.by_row(name, rows, columns, &arguments)?])?;
    Ok(dx.tensor)
}
