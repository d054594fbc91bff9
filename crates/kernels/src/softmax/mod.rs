//! Softmax over the last dimension.
//!
//! ```text
//! y  = e^{x - max x} / Σ e^{x - max x}
//! dx = y·(dy - Σ dy·y)
//! ```
//!
//! A row that holds NaN or positive infinity, or nothing above negative infinity, gives NaN.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, dispatch, unwritten};
use crate::backend::{
    on_gpu, record1, require_dtype, require_shape, require_together, rows_and_columns,
};
use candle_core::{Device, Result, Tensor};

const OPERATION: &str = "softmax";

/// The softmax of every row of `x` `(.., size)`; result like `x`.
///
/// # Errors
/// When `x` is a scalar or no float, or on a device that this build has no kernels for.
pub fn forward(x: &Tensor) -> Result<Tensor> {
    require_together(OPERATION, &[x])?;
    let (rows, size) = rows_and_columns(OPERATION, "x", x)?;
    on_gpu!(x, gpu => gpu::forward(rows, size, x));
    let shape = x.dims();
    let x = Input::contiguous(x)?;
    let x = x.read();
    dispatch!(OPERATION, x.dtype(), T => {
        let mut y = unwritten::<T>(rows * size);
        cpu::forward(size, x.slice::<T>()?, &mut y);
        Tensor::from_vec(y, shape, &Device::Cpu)
    })
}

/// Like [`forward`], recorded in Candle's autograd.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(x: &Tensor) -> Result<Tensor> {
    record1(OPERATION, x, forward(x)?, |_, y, dy| Ok(Some(backward(y, dy)?)))
}

/// The gradient of [`forward`]'s `x`, from its result `y` and from `dy`, both `(.., size)` of one
/// dtype; result like `y`.
///
/// # Errors
/// When shapes or dtypes don't fit, or the tensors aren't on one device.
pub fn backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    require_together(OPERATION, &[y, dy])?;
    let (rows, size) = rows_and_columns(OPERATION, "y", y)?;
    require_shape(OPERATION, "dy", dy, y.dims())?;
    require_dtype(OPERATION, "dy", dy, y.dtype())?;
    on_gpu!(y, gpu => gpu::backward(rows, size, y, dy));
    let shape = y.dims();
    let (y, dy) = (Input::contiguous(y)?, Input::contiguous(dy)?);
    let (y, dy) = (y.read(), dy.read());
    dispatch!(OPERATION, y.dtype(), T => {
        let mut dx = unwritten::<T>(rows * size);
        cpu::backward(size, y.slice::<T>()?, dy.slice::<T>()?, &mut dx);
        Tensor::from_vec(dx, shape, &Device::Cpu)
    })
}
