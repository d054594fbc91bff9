//! The gated unit on Metal, see `kernel.metal`.

use super::{Activation, OPERATION};
use crate::device::cpu::collapsed_rows;
use crate::device::metal::{Argument, Array, Metal, by_dtype};
use candle_core::{Result, Tensor, bail};

fn code(activation: Activation) -> Argument<'static> {
    Argument::U32(match activation {
        Activation::Silu => 0,
        Activation::GeluTanh => 1,
        Activation::Gelu => 2,
    })
}

/// A tensor whose rows lie at one distance from each other, copied only if they don't.
fn collapsed(metal: &Metal, tensor: &Tensor) -> Result<Array> {
    match collapsed_rows(tensor.layout()) {
        Some(_) => metal.strided(tensor),
        None => metal.contiguous(tensor),
    }
}

/// `(rows, columns)` of the inputs, which have one shape, and the distances of their rows.
fn places<const N: usize>(inputs: [&Array; N]) -> Result<(usize, usize, [u64; N])> {
    let mut sizes = (0, 0);
    let mut strides = [0; N];
    for (stride, input) in strides.iter_mut().zip(inputs) {
        let Some((rows, columns, distance)) = collapsed_rows(input.tensor.layout()) else {
            bail!("metal-candle-kernels: {OPERATION}: expected rows at one distance")
        };
        sizes = (rows, columns);
        *stride = distance as u64;
    }
    let (rows, columns) = sizes;
    if strides.iter().all(|stride| *stride == columns as u64) {
        // One long row.
        return Ok((1, rows * columns, strides));
    }
    Ok((rows, columns, strides))
}

pub(super) fn forward(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    let metal = Metal::of(gate)?;
    let (gate, up) = (collapsed(&metal, gate)?, collapsed(&metal, up)?);
    let name = by_dtype!("glu_forward", gate.dtype)?;
    let out = metal.empty(gate.tensor.shape(), gate.dtype)?;
    if gate.tensor.elem_count() == 0 {
        return Ok(out.tensor);
    }
    let (rows, columns, strides) = places([&gate, &up])?;
    let arguments = [
        Argument::Input(&gate),
        Argument::Input(&up),
        Argument::Output(&out),
        Argument::U64(columns as u64),
        Argument::U64(strides[0]),
        Argument::U64(strides[1]),
        code(activation),
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
    let (gate, up) = (collapsed(&metal, gate)?, collapsed(&metal, up)?);
    let d_out = collapsed(&metal, d_out)?;
    let name = by_dtype!("glu_backward", gate.dtype)?;
    let gradient =
        |needed: bool| needed.then(|| metal.empty(gate.tensor.shape(), gate.dtype)).transpose();
    let (dgate, dup) = (gradient(need_dgate)?, gradient(need_dup)?);
    if gate.tensor.elem_count() > 0 && (need_dgate || need_dup) {
        let (rows, columns, strides) = places([&gate, &up, &d_out])?;
        // A gradient that isn't needed isn't touched, but something has to be there.
        let unused = Argument::Input(&gate);
        let arguments = [
            Argument::Input(&gate),
            Argument::Input(&up),
            Argument::Input(&d_out),
            dgate.as_ref().map_or(unused, Argument::Output),
            dup.as_ref().map_or(unused, Argument::Output),
            Argument::U64(columns as u64),
            Argument::U64(strides[0]),
            Argument::U64(strides[1]),
            Argument::U64(strides[2]),
            code(activation),
            Argument::U32(need_dgate.into()),
            Argument::U32(need_dup.into()),
        ];
        metal.run(&[metal.by_elements(name, columns, rows, &arguments)?])?;
    }
    Ok((dgate.map(|dgate| dgate.tensor), dup.map(|dup| dup.tensor)))
}
