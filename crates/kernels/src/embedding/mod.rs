//! Token embedding: rows of a table.
//!
//! ```text
//! y[b, t] = table[ids[b, t]]        dtable[i] = Σ_{ids[b, t] = i} dy[b, t]
//! ```

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, Sum, change_in_place, dispatch, require_separate, unwritten};
use crate::backend::{
    dtype_of_sums, on_gpu, record1, require_dtype, require_rank, require_shape, require_together,
};
use crate::flat::require_contiguous;
use candle_core::{DType, Device, Result, Tensor, bail};

const OPERATION: &str = "embedding";

/// `table` `(v, d)`, `ids` `(batch, seq)` u32 below `v`, result `(batch, seq, d)` in the table's dtype.
///
/// On a GPU the ids aren't looked at from the host: one that isn't below `v` gives a row of NaN.
///
/// # Errors
/// When an id isn't below `v` (on the CPU), shapes or dtypes don't fit, or the tensors aren't on one
/// device.
pub fn forward(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    require_together(OPERATION, &[table, ids])?;
    require_rank(OPERATION, "table", table, 2, "(v, d)")?;
    let (v, d) = table.dims2()?;
    let (batch, seq) = check_ids(ids)?;
    on_gpu!(table, gpu => gpu::forward(table, ids));
    let (table, ids) = (Input::contiguous(table)?, Input::contiguous(ids)?);
    let (table, ids) = (table.read(), ids.read());
    let ids = ids.slice::<u32>()?;
    check_range(ids, v)?;
    dispatch!(OPERATION, table.dtype(), T => {
        let mut out = unwritten::<T>(ids.len() * d);
        cpu::forward(d, table.slice::<T>()?, ids, &mut out);
        Tensor::from_vec(out, (batch, seq, d), &Device::Cpu)
    })
}

/// Like [`forward`], recorded in Candle's autograd.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(table: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let (y, ids) = (forward(table, ids)?, ids.detach());
    record1(OPERATION, table, y, move |table, _, dy| {
        let dtable = backward(dy, &ids, table.dim(0)?)?;
        Ok(Some(dtable.to_dtype(table.dtype())?))
    })
}

/// The gradient of the table: `dy` `(batch, seq, d)`, `ids` `(batch, seq)` u32 below
/// `vocabulary_size`, result `(vocabulary_size, d)` in f32 (f64 for f64). On a GPU other ids add nothing.
///
/// # Errors
/// Like [`forward`].
pub fn backward(dy: &Tensor, ids: &Tensor, vocabulary_size: usize) -> Result<Tensor> {
    let d = check_rows(dy, ids)?;
    on_gpu!(dy, gpu => gpu::backward(dy, ids, vocabulary_size));
    let gradient = Tensor::zeros((vocabulary_size, d), dtype_of_sums(dy.dtype()), &Device::Cpu)?;
    accumulate_on_cpu(&gradient, dy, ids)?;
    Ok(gradient)
}

/// Adds what [`backward`] gives to `gradient` `(v, d)` in place, which is contiguous (a view of a flat buffer will do), in
/// f32 (f64 for f64), and shares no storage with the others.
///
/// # Errors
/// Like [`forward`].
pub fn accumulate(gradient: &Tensor, dy: &Tensor, ids: &Tensor) -> Result<()> {
    require_together(OPERATION, &[gradient, dy, ids])?;
    let d = check_rows(dy, ids)?;
    require_rank(OPERATION, "the gradient", gradient, 2, "(v, d)")?;
    require_shape(OPERATION, "the gradient", gradient, &[gradient.dim(0)?, d])?;
    require_dtype(OPERATION, "the gradient", gradient, dtype_of_sums(dy.dtype()))?;
    require_contiguous(OPERATION, "the gradient", gradient)?;
    require_separate(OPERATION, "the gradient and dy", gradient, dy)?;
    on_gpu!(dy, gpu => gpu::accumulate(gradient, dy, ids));
    accumulate_on_cpu(gradient, dy, ids)
}

fn accumulate_on_cpu(gradient: &Tensor, dy: &Tensor, ids: &Tensor) -> Result<()> {
    let (v, d) = gradient.dims2()?;
    let (dy, ids) = (Input::contiguous(dy)?, Input::contiguous(ids)?);
    let (dy, ids) = (dy.read(), ids.read());
    let ids = ids.slice::<u32>()?;
    check_range(ids, v)?;
    dispatch!(OPERATION, dy.dtype(), T => {
        let dy = dy.values::<Sum<T>>()?;
        change_in_place(OPERATION, gradient, |gradient| {
            cpu::accumulate(d, dy, ids, gradient);
            Ok(())
        })
    })
}

/// How long a row is; an error unless the gradients are those of the ids' rows.
fn check_rows(dy: &Tensor, ids: &Tensor) -> Result<usize> {
    require_together(OPERATION, &[dy, ids])?;
    require_rank(OPERATION, "dy", dy, 3, "(batch, seq, d)")?;
    let (batch, seq) = check_ids(ids)?;
    let d = dy.dim(2)?;
    require_shape(OPERATION, "dy", dy, &[batch, seq, d])?;
    Ok(d)
}

fn check_ids(ids: &Tensor) -> Result<(usize, usize)> {
    require_rank(OPERATION, "ids", ids, 2, "(batch, seq)")?;
    require_dtype(OPERATION, "ids", ids, DType::U32)?;
    ids.dims2()
}

pub(crate) fn check_range(ids: &[u32], v: usize) -> Result<()> {
    if let Some(position) = ids.iter().position(|id| *id as usize >= v) {
        bail!(
            "metal-candle-kernels: {OPERATION}: token id {} at position {position} is outside the table, expected less than {v}",
            ids[position]
        )
    }
    Ok(())
}
