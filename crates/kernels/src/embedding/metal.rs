//! Embedding on Metal, see `kernel.metal`.

use super::OPERATION;
use crate::backend::metal::{Argument, Metal, by_dtype, size};
use candle_core::{Result, Tensor};

pub(super) fn forward(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let metal = Metal::of(table)?;
    let (vocabulary, columns) = table.dims2()?;
    let (batch, seq) = ids.dims2()?;
    let (table, ids) = (metal.contiguous(table)?, metal.contiguous(ids)?);
    let name = by_dtype!("embedding_forward", table.dtype)?;
    let out = metal.empty((batch, seq, columns), table.dtype)?;
    let arguments = [
        Argument::Input(&table),
        Argument::Input(&ids),
        Argument::Output(&out),
        Argument::U32(size(OPERATION, columns)?),
        Argument::U32(size(OPERATION, vocabulary)?),
    ];
    metal.run(&[metal.by_elements(name, columns, batch * seq, &arguments)?])?;
    Ok(out.tensor)
}

pub(super) fn backward(dy: &Tensor, ids: &Tensor, vocabulary: usize) -> Result<Tensor> {
    let gradient = Metal::of(dy)?.zeros((vocabulary, dy.dim(2)?))?.tensor;
    accumulate(&gradient, dy, ids)?;
    Ok(gradient)
}

/// `gradient` is contiguous.
pub(super) fn accumulate(gradient: &Tensor, dy: &Tensor, ids: &Tensor) -> Result<()> {
    let metal = Metal::of(dy)?;
    let (vocabulary, columns) = gradient.dims2()?;
    let (dy, ids) = (metal.contiguous(dy)?, metal.contiguous(ids)?);
    let name = by_dtype!("embedding_backward", dy.dtype)?;
    let gradient = metal.strided(gradient)?;
    let positions = ids.tensor.elem_count();
    let arguments = [
        Argument::Input(&dy),
        Argument::Input(&ids),
        Argument::Output(&gradient),
        Argument::U32(size(OPERATION, positions)?),
        Argument::U32(size(OPERATION, columns)?),
        Argument::U32(size(OPERATION, vocabulary)?),
    ];
    metal.run(&[metal.by_thread(name, columns, positions, &arguments)?])
}
