//! Copies on Metal, see `kernel.metal`. `backend/metal/copy.rs` makes tensors contiguous, too.

use crate::backend::metal::{Argument, Metal};
use candle_core::{DType, Result, Tensor, bail};

pub(super) fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    Ok(metal.cast(&metal.strided(x)?, dtype)?.tensor)
}

pub(super) fn write(whole: &Tensor, part: &Tensor, dim: usize, start: usize) -> Result<()> {
    let metal = Metal::of(whole)?;
    let (to, from) = (metal.strided(whole)?, metal.contiguous(part)?);
    let bytes = from.dtype.size_in_bytes();
    let name = match bytes {
        1 => "copy_rows_1",
        2 => "copy_rows_2",
        4 => "copy_rows_4",
        8 => "copy_rows_8",
        _ => bail!("metal-candle-kernels: write on Metal does not support {:?}", from.dtype),
    };
    let inner: usize = whole.dims()[dim + 1..].iter().product();
    let width = inner * part.dim(dim)?;
    let rows: usize = whole.dims()[..dim].iter().product();
    let to = to.at(inner * start * bytes);
    let arguments = [
        Argument::Input(&from),
        Argument::Output(&to),
        Argument::U64(width as u64),
        Argument::U64((inner * whole.dim(dim)?) as u64),
    ];
    metal.run(&[metal.by_elements(name, width, rows, &arguments)?])
}
