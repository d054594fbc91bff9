//! Rounding to 8 bits on Metal; see kernel.metal.

use super::{GROUP, RoundedPool};
use crate::backend::metal::{Argument, Metal, by_dtype, size};
use candle_core::{Result, Tensor};

pub(super) fn write_both(
    operation: &str,
    pools: [&RoundedPool; 2],
    rows: [&Tensor; 2],
    places: &Tensor,
) -> Result<()> {
    let metal = Metal::of(rows[0])?;
    let (tokens, heads, head_dim) = rows[0].dims3()?;
    let name = by_dtype!("round_rows", rows[0].dtype())?;
    let (blocks, block, ..) = pools[0].codes.dims4()?;
    let places = metal.contiguous(places)?;
    for (pool, rows) in pools.into_iter().zip(rows) {
        let rows = metal.strided_rows(rows)?;
        let (codes, scales) = (metal.strided(&pool.codes)?, metal.strided(&pool.scales)?);
        let strides = [0, 1].map(|index| rows.tensor.stride()[index] as u64);
        let arguments = [
            Argument::Input(&rows),
            Argument::Input(&places),
            Argument::Output(&codes),
            Argument::Output(&scales),
            Argument::U64s(&strides),
            Argument::U32(size(operation, heads)?),
            Argument::U32(size(operation, head_dim)?),
            Argument::U32(size(operation, blocks * block)?),
        ];
        let groups = heads * head_dim.div_ceil(GROUP);
        metal.run(&[metal.by_thread(name, groups, tokens, &arguments)?])?;
    }
    Ok(())
}
