//! Softmax over the last dimension.
//!
//! ```text
//! y  = e^{x - max x} / Σ e^{x - max x}
//! dx = y·(dy - Σ dy·y)
//! ```
//!
//! A row that holds NaN or positive infinity, or nothing above negative infinity, gives NaN.

mod cpu;
#[cfg(test)]
mod tests;

use crate::device::cpu::{buffer, contiguous_slice, dispatch};
use crate::device::{require_cpu, require_dtype, require_shape, rows_and_columns};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CustomOp1, CustomOp2, Layout, Result, Shape, Tensor, WithDType};

const OPERATION: &str = "softmax";

/// The softmax of every row of `x` `(.., size)`; result like `x`.
///
/// # Errors
/// When `x` is a scalar or no float, or isn't on the CPU.
pub fn forward(x: &Tensor) -> Result<Tensor> {
    check(x)?;
    x.detach().contiguous()?.apply_op1_no_bwd(&Softmax)
}

/// Like [`forward`], recorded in Candle's autograd.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(x: &Tensor) -> Result<Tensor> {
    check(x)?;
    x.contiguous()?.apply_op1(Softmax)
}

/// The gradient of [`forward`]'s `x`, from its result `y` and from `dy`, both `(.., size)` of one
/// dtype; result like `y`.
///
/// # Errors
/// When shapes or dtypes don't fit, or a tensor isn't on the CPU.
pub fn backward(y: &Tensor, dy: &Tensor) -> Result<Tensor> {
    check(y)?;
    require_cpu(OPERATION, &[dy])?;
    require_shape(OPERATION, "dy", dy, y.dims())?;
    require_dtype(OPERATION, "dy", dy, y.dtype())?;
    y.detach().contiguous()?.apply_op2_no_bwd(&dy.detach().contiguous()?, &SoftmaxBackward)
}

fn check(x: &Tensor) -> Result<()> {
    require_cpu(OPERATION, &[x])?;
    rows_and_columns(OPERATION, "x", x)?;
    Ok(())
}

fn row_size(layout: &Layout) -> usize {
    layout.dims().last().copied().unwrap_or(1)
}

struct Softmax;

impl CustomOp1 for Softmax {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        dispatch!(OPERATION, x.dtype(), T => {
            let x = contiguous_slice::<T>(x, layout)?;
            let mut y = buffer::<T>(x.len());
            cpu::forward(row_size(layout), x, &mut y);
            Ok((T::to_cpu_storage_owned(y), layout.shape().clone()))
        })
    }

    fn bwd(&self, _x: &Tensor, y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(backward(y, dy)?))
    }
}

/// `(y, dy) -> dx`
struct SoftmaxBackward;

impl CustomOp2 for SoftmaxBackward {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn cpu_fwd(
        &self,
        y: &CpuStorage,
        y_layout: &Layout,
        dy: &CpuStorage,
        dy_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        dispatch!(OPERATION, y.dtype(), T => {
            let y = contiguous_slice::<T>(y, y_layout)?;
            let dy = contiguous_slice::<T>(dy, dy_layout)?;
            let mut dx = buffer::<T>(y.len());
            cpu::backward(row_size(y_layout), y, dy, &mut dx);
            Ok((T::to_cpu_storage_owned(dx), y_layout.shape().clone()))
        })
    }
}
