//! The gated unit on Metal, see `kernel.metal`.

use super::{Activation, places};
use crate::backend::metal::{Argument, Metal, by_dtype};
use candle_core::{Result, Tensor};

pub(super) fn forward(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    let metal = Metal::of(gate)?;
    let (gate, up) = (metal.collapsed_rows(gate)?, metal.collapsed_rows(up)?);
    let name = by_dtype!("glu_forward", gate.dtype)?;
    let out = metal.empty(gate.tensor.shape(), gate.dtype)?;
    if gate.tensor.elem_count() == 0 {
        return Ok(out.tensor);
    }
    let (rows, columns, strides) = places([&gate.tensor, &up.tensor])?;
    let arguments = [
        Argument::Input(&gate),
        Argument::Input(&up),
        Argument::Output(&out),
        Argument::U64(columns as u64),
        Argument::U64(strides[0] as u64),
        Argument::U64(strides[1] as u64),
        Argument::U32(activation.code()),
    ];
    metal.run(&[metal.by_elements(name, columns, rows, &arguments)?])?;
    Ok(out.tensor)
}

pub(super) fn backward(
    gate: &Tensor,
    up: &Tensor,
    activation: Activation,
    d_out: &Tensor,
    need_dgate: bool,
    need_dup: bool,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let metal = Metal::of(gate)?;
    let (gate, up) = (metal.collapsed_rows(gate)?, metal.collapsed_rows(up)?);
    let d_out = metal.collapsed_rows(d_out)?;
    let name = by_dtype!("glu_backward", gate.dtype)?;
    let gradient =
        |needed: bool| needed.then(|| metal.empty(gate.tensor.shape(), gate.dtype)).transpose();
    let (dgate, dup) = (gradient(need_dgate)?, gradient(need_dup)?);
    if gate.tensor.elem_count() > 0 && (need_dgate || need_dup) {
        let (rows, columns, strides) = places([&gate.tensor, &up.tensor, &d_out.tensor])?;
        // A gradient that isn't needed isn't touched, but something has to be there.
        let unused = Argument::Input(&gate);
        let arguments = [
            Argument::Input(&gate),
            Argument::Input(&up),
            Argument::Input(&d_out),
            dgate.as_ref().map_or(unused, Argument::Output),
            dup.as_ref().map_or(unused, Argument::Output),
            Argument::U64(columns as u64),
            Argument::U64(strides[0] as u64),
            Argument::U64(strides[1] as u64),
            Argument::U64(strides[2] as u64),
            Argument::U32(activation.code()),
            Argument::U32(need_dgate.into()),
            Argument::U32(need_dup.into()),
        ];
        metal.run(&[metal.by_elements(name, columns, rows, &arguments)?])?;
    }
    Ok((dgate.map(|dgate| dgate.tensor), dup.map(|dup| dup.tensor)))
}
