//! Copies on Metal, see `kernel.metal`. `backend/metal/copy.rs` makes tensors contiguous, too.

use crate::backend::metal::{Argument, Metal, size};
use candle_core::{DType, Result, Tensor, bail};

pub(super) fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let metal = Metal::of(x)?;
    Ok(metal.cast(&metal.strided(x)?, dtype)?.tensor)
}

pub(super) fn contiguous(x: &Tensor) -> Result<Tensor> {
    Ok(Metal::of(x)?.contiguous(x)?.tensor)
}

pub(super) fn empty(x: &Tensor, shape: &[usize]) -> Result<Tensor> {
    Ok(Metal::of(x)?.empty(shape, x.dtype())?.tensor)
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

pub(super) fn write_rows_both(
    pools: [&Tensor; 2],
    rows: [&Tensor; 2],
    places: &Tensor,
) -> Result<()> {
    const OPERATION: &str = "write_rows_both";
    let metal = Metal::of(pools[0])?;
    let (tokens, heads, head_dim) = rows[0].dims3()?;
    let name = match pools[0].dtype().size_in_bytes() {
        2 => "write_rows_2",
        4 => "write_rows_4",
        _ => bail!(
            "metal-candle-kernels: {OPERATION} on Metal does not support {:?}",
            pools[0].dtype()
        ),
    };
    let (room, places) = (pools[0].dim(0)? * pools[0].dim(1)?, metal.contiguous(places)?);
    let width = heads * head_dim;
    for (pool, rows) in pools.into_iter().zip(rows) {
        let (pool, rows) = (metal.strided(pool)?, metal.strided_rows(rows)?);
        let strides = [0, 1].map(|index| rows.tensor.stride()[index] as u64);
        let arguments = [
            Argument::Input(&rows),
            Argument::Input(&places),
            Argument::Output(&pool),
            Argument::U64s(&strides),
            Argument::U32(size(OPERATION, head_dim)?),
            Argument::U32(size(OPERATION, width)?),
            Argument::U32(size(OPERATION, room)?),
        ];
        metal.run(&[metal.by_elements(name, width, tokens, &arguments)?])?;
    }
    Ok(())
}
