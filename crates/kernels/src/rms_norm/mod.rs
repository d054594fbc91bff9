//! RMS norm (Zhang and Sennrich 2019, <https://arxiv.org/abs/1910.07467>) over the last dimension.
//!
//! ```text
//! r  = 1 / √(mean(x²) + eps)         u = offset + w
//! y  = x·r·u
//! dx = r·(dy·u) - x·r³·mean(dy·u·x)
//! dw = Σ_rows dy·x·r
//! ```
//!
//! With a residual, `x = a + b` is an output as well, whose own gradient is added to `dx`; `a` and `b`
//! have the same gradient.
//!
//! The offset is 0 for Llama and its kin, and 1 for Gemma, which stores `w - 1`.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, Sum, add_sums, dispatch, rows_per_sum, unwritten};
use crate::backend::{
    on_gpu, record2, require_dtype, require_shape, require_together, rows_and_columns,
};
use candle_core::{Device, Result, Tensor, bail};

const OPERATION: &str = "rms_norm";

/// `x / rms(x) · (weight_offset + weight)`: `x` `(.., hidden)`, `weight` `(hidden)`, result like `x`.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, or the tensors aren't on one device.
pub fn forward(x: &Tensor, weight: &Tensor, eps: f64, weight_offset: f64) -> Result<Tensor> {
    let (rows, hidden) = check(x, weight)?;
    on_gpu!(x, gpu => gpu::forward(rows, hidden, x, weight, eps, weight_offset));
    let shape = x.dims();
    let (x, weight) = (Input::contiguous(x)?, Input::contiguous(weight)?);
    let (x, weight) = (x.read(), weight.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let mut y = unwritten::<T>(rows * hidden);
        let mut scratch = Vec::new();
        let scale = cpu::scale(weight.values()?, weight_offset, &mut scratch);
        cpu::forward(hidden, x.slice::<T>()?, scale, eps, &mut y);
        Tensor::from_vec(y, shape, &Device::Cpu)
    })
}

/// Like [`forward`], recorded in Candle's autograd.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(x: &Tensor, weight: &Tensor, eps: f64, weight_offset: f64) -> Result<Tensor> {
    let y = forward(x, weight, eps, weight_offset)?;
    record2(OPERATION, [x, weight], y, move |[x, weight], _, dy| {
        let (need_dx, need_dweight) = (x.track_op(), weight.track_op());
        let (dx, dweight) = backward(x, weight, eps, weight_offset, dy, need_dx, need_dweight)?;
        Ok([dx, dweight.map(|dweight| dweight.to_dtype(weight.dtype())).transpose()?])
    })
}

/// `(sum, y)` with `sum = x + residual` and `y` its RMS norm as [`forward`] makes it, in one pass: `x`
/// and `residual` `(.., hidden)` of one dtype, `weight` `(hidden)`; both results like `x`.
///
/// # Errors
/// When shapes or dtypes don't fit, or the tensors aren't on one device.
pub fn forward_residual(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f64,
    weight_offset: f64,
) -> Result<(Tensor, Tensor)> {
    let (rows, hidden) = check_residual(x, residual, weight)?;
    on_gpu!(x, gpu => gpu::forward_residual(rows, hidden, x, residual, weight, eps, weight_offset));
    let shape = x.dims();
    let (x, residual) = (Input::contiguous(x)?, Input::contiguous(residual)?);
    let weight = Input::contiguous(weight)?;
    let (x, residual, weight) = (x.read(), residual.read(), weight.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let (mut sum, mut y) = (unwritten::<T>(rows * hidden), unwritten::<T>(rows * hidden));
        let inputs = (x.slice::<T>()?, residual.slice::<T>()?);
        let mut scratch = Vec::new();
        let scale = cpu::scale(weight.values()?, weight_offset, &mut scratch);
        cpu::forward_residual(hidden, inputs, scale, eps, &mut sum, &mut y);
        Ok((
            Tensor::from_vec(sum, shape, &Device::Cpu)?,
            Tensor::from_vec(y, shape, &Device::Cpu)?,
        ))
    })
}

/// `(dx, dweight)`: `x` and `dy` `(.., hidden)`, `weight` `(hidden)`; `dx` in the dtype of `x`,
/// `dweight` `(hidden)` in f32 (f64 for f64). What isn't needed isn't computed.
///
/// # Errors
/// When shapes or dtypes don't fit, or the tensors aren't on one device.
pub fn backward(
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    weight_offset: f64,
    dy: &Tensor,
    need_dx: bool,
    need_dweight: bool,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    gradients(x, weight, eps, weight_offset, dy, None, need_dx, need_dweight)
}

/// `(dx, dweight)` of [`forward_residual`], in one pass: `sum` its first result, `dy` the gradient of
/// its second and `dsum`, if there is one, that of its first, all `(.., hidden)` of one dtype. `dx` is
/// the gradient of `x` and of the residual, in their dtype; `dweight` `(hidden)` in f32 (f64 for f64).
///
/// # Errors
/// Like [`backward`].
pub fn backward_residual(
    sum: &Tensor,
    weight: &Tensor,
    eps: f64,
    weight_offset: f64,
    dy: &Tensor,
    dsum: Option<&Tensor>,
    need_dweight: bool,
) -> Result<(Tensor, Option<Tensor>)> {
    match gradients(sum, weight, eps, weight_offset, dy, dsum, true, need_dweight)? {
        (Some(dx), dweight) => Ok((dx, dweight)),
        (None, _) => bail!("metal-candle-kernels: {OPERATION}: no gradient was computed"),
    }
}

#[allow(clippy::too_many_arguments)]
fn gradients(
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    weight_offset: f64,
    dy: &Tensor,
    dsum: Option<&Tensor>,
    need_dx: bool,
    need_dweight: bool,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let (rows, hidden) = check(x, weight)?;
    check_like_x("dy", dy, x)?;
    if let Some(dsum) = dsum {
        check_like_x("dsum", dsum, x)?;
    }
    on_gpu!(x, gpu => {
        let columns = hidden;
        gpu::Backward { rows, columns, x, weight, eps, weight_offset, dy, dsum }
            .run(need_dx, need_dweight)
    });
    let shape = x.dims();
    let (x, weight, dy) =
        (Input::contiguous(x)?, Input::contiguous(weight)?, Input::contiguous(dy)?);
    let dsum = dsum.map(Input::contiguous).transpose()?;
    let (x, weight, dy) = (x.read(), weight.read(), dy.read());
    let dsum = dsum.as_ref().map(Input::read);
    dispatch!(OPERATION, x.dtype(), T => {
        let tasks = rows.div_ceil(rows_per_sum(rows, hidden));
        let mut dx = need_dx.then(|| unwritten::<T>(rows * hidden));
        let mut sums = need_dweight.then(|| unwritten::<Sum<T>>(tasks * hidden));
        let mut scratch = Vec::new();
        let problem = cpu::Backward {
            rows,
            hidden,
            x: x.slice::<T>()?,
            scale: cpu::scale(weight.values()?, weight_offset, &mut scratch),
            eps,
            dy: dy.slice::<T>()?,
            dsum: dsum.as_ref().map(|dsum| dsum.slice::<T>()).transpose()?,
        };
        problem.run(dx.as_deref_mut(), sums.as_deref_mut());
        let dx = dx.map(|dx| Tensor::from_vec(dx, shape, &Device::Cpu)).transpose()?;
        let dweight = sums.map(|sums| add_sums(&sums, hidden));
        let dweight = dweight.map(|dweight| Tensor::from_vec(dweight, hidden, &Device::Cpu));
        Ok((dx, dweight.transpose()?))
    })
}

fn check(x: &Tensor, weight: &Tensor) -> Result<(usize, usize)> {
    require_together(OPERATION, &[x, weight])?;
    let (rows, hidden) = rows_and_columns(OPERATION, "x", x)?;
    require_shape(OPERATION, "weight", weight, &[hidden])?;
    Ok((rows, hidden))
}

/// Rows and columns of what [`forward_residual`] takes.
pub(crate) fn check_residual(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
) -> Result<(usize, usize)> {
    let sizes = check(x, weight)?;
    check_like_x("residual", residual, x)?;
    Ok(sizes)
}

fn check_like_x(name: &str, tensor: &Tensor, x: &Tensor) -> Result<()> {
    require_together(OPERATION, &[x, tensor])?;
    require_shape(OPERATION, name, tensor, x.dims())?;
    require_dtype(OPERATION, name, tensor, x.dtype())
}
