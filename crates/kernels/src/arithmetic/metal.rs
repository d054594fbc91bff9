//! Sums, multiples and caps on Metal, see `kernel.metal`.

use crate::backend::metal::{Argument, Metal, by_dtype, size};
use candle_core::{Result, Tensor};

pub(super) fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    let y = metal.contiguous(y)?;
    map(&metal, by_dtype!("arithmetic_add", x.dtype())?, x, Argument::Input(&y))
}

pub(super) fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    map(&metal, by_dtype!("arithmetic_scale", x.dtype())?, x, Argument::F32(factor as f32))
}

pub(super) fn softcap(x: &Tensor, cap: f64) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    map(&metal, by_dtype!("arithmetic_softcap", x.dtype())?, x, Argument::F32(cap as f32))
}

pub(super) fn scale_by(x: &Tensor, factor: &Tensor) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    let factor = metal.strided(factor)?;
    map(&metal, by_dtype!("arithmetic_scale_by", x.dtype())?, x, Argument::Input(&factor))
}

pub(super) fn scale_rows(x: &Tensor, factors: &Tensor) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    let (n, d) = x.dims2()?;
    let (x, factors) = (metal.contiguous(x)?, metal.contiguous(factors)?);
    let out = metal.empty(x.tensor.shape(), x.dtype)?;
    let arguments = [
        Argument::Input(&x),
        Argument::Input(&factors),
        Argument::Output(&out),
        Argument::U32(size("scale_rows", d)?),
    ];
    let name = by_dtype!("arithmetic_scale_rows", x.dtype)?;
    metal.run(&[metal.by_elements(name, d, n, &arguments)?])?;
    Ok(out.tensor)
}

fn map(metal: &Metal, name: &'static str, x: &Tensor, other: Argument) -> Result<Tensor> {
    let x = metal.contiguous(x)?;
    let out = metal.empty(x.tensor.shape(), x.dtype)?;
    let count = x.tensor.elem_count();
    let arguments =
        [Argument::Input(&x), other, Argument::Output(&out), Argument::U64(count as u64)];
    metal.run(&[metal.by_elements(name, count, 1, &arguments)?])?;
    Ok(out.tensor)
}
