//! Copies: in another dtype, of views, into a part of another tensor, one behind the other, and into rows of one.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::{on_gpu, require_dtype, require_rank, require_shape, require_together};
use candle_core::{DType, Device, Result, Shape, Tensor, bail};

/// The numbers of `x` in `dtype`, in its shape; `x` itself when it has that dtype already.
///
/// # Errors
/// When a dtype isn't a float, or the device is none that this build has kernels for.
pub fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    const OPERATION: &str = "cast";
    require_together(OPERATION, &[x])?;
    if x.dtype() == dtype {
        return Ok(x.detach());
    }
    if !x.dtype().is_float() || !dtype.is_float() {
        bail!(
            "metal-candle-kernels: {OPERATION}: found {:?} to {dtype:?}, expected floats",
            x.dtype()
        )
    }
    on_gpu!(x, gpu => gpu::cast(x, dtype));
    x.detach().to_dtype(dtype)
}

/// A contiguous copy of `x` in its shape; `x` itself when it is contiguous already.
///
/// # Errors
/// When the device is none that this build has kernels for, or has no room.
pub fn contiguous(x: &Tensor) -> Result<Tensor> {
    require_together("contiguous", &[x])?;
    if x.is_contiguous() {
        return Ok(x.detach());
    }
    on_gpu!(x, gpu => gpu::contiguous(x));
    x.detach().contiguous()
}

/// `parts` `(.., k, ..)` one behind the other along dimension `dim`, in which alone they may differ; contiguous.
///
/// # Errors
/// When there are none, shapes or dtypes don't fit, or they aren't on one device.
pub fn join(parts: &[&Tensor], dim: usize) -> Result<Tensor> {
    const OPERATION: &str = "join";
    let [first, ..] = parts else {
        bail!("metal-candle-kernels: {OPERATION}: found no parts, expected at least one")
    };
    require_together(OPERATION, parts)?;
    let sizes = parts.iter().map(|part| part.dim(dim)).collect::<Result<Vec<_>>>()?;
    let mut shape = first.dims().to_vec();
    shape[dim] = sizes.iter().sum();
    for (part, size) in parts.iter().zip(&sizes) {
        require_dtype(OPERATION, "a part", part, first.dtype())?;
        let expected: Vec<usize> = shape
            .iter()
            .enumerate()
            .map(|(at, all)| if at == dim { *size } else { *all })
            .collect();
        require_shape(OPERATION, "a part", part, &expected)?;
    }
    let whole = empty(first, &shape)?;
    let mut start = 0;
    for (part, size) in parts.iter().zip(&sizes) {
        write(&whole, part, dim, start)?;
        start += size;
    }
    Ok(whole)
}

/// Zeros for what is large and stays. On Metal they take little more memory than they need, where those of Candle take up
/// to twice as much.
///
/// # Errors
/// When the device has no room.
pub fn zeros(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    match device {
        #[cfg(feature = "metal")]
        Device::Metal(metal) => crate::backend::metal::zeros(metal, shape.into(), dtype),
        _ => Tensor::zeros(shape, dtype, device),
    }
}

/// A tensor of that shape beside `x`, to be written.
fn empty(x: &Tensor, shape: &[usize]) -> Result<Tensor> {
    on_gpu!(x, gpu => gpu::empty(x, shape));
    Tensor::zeros(shape, x.dtype(), x.device())
}

/// Overwrites `whole` `(.., n, ..)` with `part` `(.., k, ..)` in place, from index `start` of dimension
/// `dim` on, in which alone they differ.
///
/// # Errors
/// When shapes or dtypes don't fit, `start + k > n`, `whole` isn't contiguous, or they aren't on one
/// device.
pub fn write(whole: &Tensor, part: &Tensor, dim: usize, start: usize) -> Result<()> {
    check(whole, part, dim, start)?;
    if part.elem_count() == 0 {
        return Ok(());
    }
    on_gpu!(whole, gpu => gpu::write(whole, part, dim, start));
    whole.slice_set(&part.detach().contiguous()?, dim, start)
}

/// In the places of [`write_rows_both`], a row that is written nowhere.
pub const NOWHERE: u32 = u32::MAX;

/// Overwrites rows of two pools, such as those of keys and values, in place: row `n` of `rows`
/// `(tokens, heads, head_dim)` becomes row `places[n]` (`places` `(tokens)` u32) of the pool `(blocks, block, heads,
/// head_dim)`, seen as `(blocks·block, heads, head_dim)`. A row whose place is [`NOWHERE`] is left out. Places
/// are expected to be different ones: where they aren't, one of the rows is there afterwards.
///
/// Rows may have any strides. A GPU reads the places itself, so that a
/// [`Recording`](crate::recording::Recording) can be made of it on CUDA, and leaves out rows whose place is
/// beyond the pool.
///
/// # Errors
/// When shapes or dtypes don't fit, dtypes aren't floats, a pool isn't contiguous, or tensors aren't on one
/// device; on the CPU also when a place is beyond the pool, and then nothing is written.
pub fn write_rows_both(pools: [&Tensor; 2], rows: [&Tensor; 2], places: &Tensor) -> Result<()> {
    check_rows_both(pools, rows, places)?;
    if rows[0].elem_count() == 0 {
        return Ok(());
    }
    on_gpu!(pools[0], gpu => gpu::write_rows_both(pools, rows, places));
    cpu::write_rows_both(ROWS_BOTH, pools, rows, places)
}

const ROWS_BOTH: &str = "write_rows_both";

/// Whether these are what [`write_rows_both`] takes.
pub(crate) fn check_rows_both(
    pools: [&Tensor; 2],
    rows: [&Tensor; 2],
    places: &Tensor,
) -> Result<()> {
    const OPERATION: &str = ROWS_BOTH;
    require_together(OPERATION, &[pools[0], pools[1], rows[0], rows[1], places])?;
    require_rank(OPERATION, "rows", rows[0], 3, "(tokens, heads, head_dim)")?;
    require_rank(OPERATION, "a pool", pools[0], 4, "(blocks, block, heads, head_dim)")?;
    let (tokens, heads, head_dim) = rows[0].dims3()?;
    let (blocks, block, ..) = pools[0].dims4()?;
    require_shape(OPERATION, "places", places, &[tokens])?;
    require_dtype(OPERATION, "places", places, DType::U32)?;
    let dtype = pools[0].dtype();
    if !dtype.is_float() {
        bail!("metal-candle-kernels: {OPERATION}: found {dtype:?} pools, expected floats")
    }
    for (pool, rows) in pools.into_iter().zip(rows) {
        require_shape(OPERATION, "a pool", pool, &[blocks, block, heads, head_dim])?;
        require_shape(OPERATION, "rows", rows, &[tokens, heads, head_dim])?;
        require_dtype(OPERATION, "a pool", pool, dtype)?;
        require_dtype(OPERATION, "rows", rows, dtype)?;
        if !pool.is_contiguous() {
            bail!("metal-candle-kernels: {OPERATION}: a pool is not contiguous, expected it to be")
        }
    }
    Ok(())
}

fn check(whole: &Tensor, part: &Tensor, dim: usize, start: usize) -> Result<()> {
    const OPERATION: &str = "write";
    require_together(OPERATION, &[whole, part])?;
    require_dtype(OPERATION, "part", part, whole.dtype())?;
    require_rank(OPERATION, "part", part, whole.rank(), "as many as the whole has")?;
    let mut expected = whole.dims().to_vec();
    match expected.get_mut(dim) {
        Some(size) if start + part.dim(dim)? <= *size => *size = part.dim(dim)?,
        _ => bail!(
            "metal-candle-kernels: {OPERATION}: {:?} does not fit into {:?} at {start} of dimension {dim}",
            part.dims(),
            whole.dims()
        ),
    }
    require_shape(OPERATION, "part", part, &expected)?;
    if !whole.is_contiguous() {
        bail!("metal-candle-kernels: {OPERATION}: the whole is not contiguous, expected it to be")
    }
    Ok(())
}
