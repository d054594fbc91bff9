//! Rotary embedding on Metal, see `kernel.metal`.

use super::OPERATION;
use crate::backend::metal::{Argument, Array, Metal, by_dtype, size};
use candle_core::{DType, Result, Tensor};

pub(super) fn rotate(x: &Tensor, cos: &Tensor, sin: &Tensor, inverse: bool) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    let (batch, seq, heads, head_dim) = x.dims4()?;
    let half = cos.dim(2)?;
    let x = metal.strided_rows(x)?;
    let name = by_dtype!("rope_rotate", x.dtype)?;
    let y = metal.empty(x.tensor.shape(), x.dtype)?;
    if x.tensor.elem_count() == 0 {
        return Ok(y.tensor);
    }
    let (cos, sin) = (single(&metal, cos)?, single(&metal, sin)?);
    let strides: Vec<u64> = x.tensor.stride().iter().map(|stride| *stride as u64).collect();
    // A thread a pair, or an element that passes through.
    let units = heads * (head_dim - half);
    size(OPERATION, units)?;
    let arguments = [
        Argument::Input(&x),
        Argument::Input(&cos),
        Argument::Input(&sin),
        Argument::Output(&y),
        Argument::U64s(&strides),
        Argument::U32(size(OPERATION, seq)?),
        Argument::U32(size(OPERATION, heads)?),
        Argument::U32(size(OPERATION, head_dim)?),
        Argument::U32(size(OPERATION, half)?),
        Argument::F32(if inverse { -1.0 } else { 1.0 }),
    ];
    metal.run(&[metal.by_thread(name, units, batch * seq, &arguments)?])?;
    Ok(y.tensor)
}

/// Contiguous, in f32.
fn single(metal: &Metal, tensor: &Tensor) -> Result<Array> {
    metal.cast(&metal.strided(tensor)?, DType::F32)
}
