//! Greedy choices on Metal, see `kernel.metal`.

use super::OPERATION;
use crate::device::metal::{Argument, Metal, by_dtype, size};
use candle_core::{DType, Result, Tensor};

pub(super) fn greedy(logits: &Tensor, (rows, columns): (usize, usize)) -> Result<Tensor> {
    let metal = Metal::of(logits)?;
    let logits = metal.contiguous(logits)?;
    let dims = logits.tensor.dims();
    let ids = metal.empty(&dims[..dims.len() - 1], DType::U32)?;
    let arguments = [
        Argument::Input(&logits),
        Argument::Output(&ids),
        Argument::U32(size(OPERATION, columns)?),
    ];
    let name = by_dtype!("sampling_greedy", logits.dtype)?;
    metal.run(&[metal.by_row(name, rows, columns, &arguments)?])?;
    Ok(ids.tensor)
}
