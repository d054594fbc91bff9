//! Sums and multiples of tensors, for residual connections and for gradients that meet, and capped logits.
//!
//! ```text
//! add: z = x + y, dx = dy = dz        scale: z = f·x, dx = f·dz        softcap: z = c·tanh(x / c)
//! scale_rows: z[n] = f[n]·x[n]
//! ```

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, Sum, dispatch, unwritten};
use crate::backend::{
    dtype_of_sums, on_gpu, require_dtype, require_rank, require_shape, require_together,
};
use candle_core::{DType, Device, Result, Tensor, bail};

/// `x + y`, of one shape and dtype.
///
/// # Errors
/// When shapes or dtypes differ, a dtype isn't a float, or the tensors aren't on one device.
pub fn add(x: &Tensor, y: &Tensor) -> Result<Tensor> {
    const OPERATION: &str = "add";
    require_together(OPERATION, &[x, y])?;
    require_shape(OPERATION, "y", y, x.dims())?;
    require_dtype(OPERATION, "y", y, x.dtype())?;
    on_gpu!(x, gpu => gpu::add(x, y));
    let shape = x.dims();
    let (x, y) = (Input::contiguous(x)?, Input::contiguous(y)?);
    let (x, y) = (x.read(), y.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let (x, y) = (x.slice::<T>()?, y.slice::<T>()?);
        let mut out = unwritten::<T>(x.len());
        cpu::add(x, y, &mut out);
        Tensor::from_vec(out, shape, &Device::Cpu)
    })
}

/// `factor·x`, in the shape and dtype of `x`.
///
/// # Errors
/// When `x` isn't a float, or on a device that this build has no kernels for.
pub fn scale(x: &Tensor, factor: f64) -> Result<Tensor> {
    const OPERATION: &str = "scale";
    require_together(OPERATION, &[x])?;
    on_gpu!(x, gpu => gpu::scale(x, factor));
    changed(OPERATION, x, cpu::Change::Scale(factor))
}

/// `cap·tanh(x / cap)`, in the shape and dtype of `x`, as Gemma 2 caps its logits. There is no backward:
/// attention and the loss cap by themselves.
///
/// # Errors
/// When `x` isn't a float, `cap` isn't positive, or `x` is on a device that this build has no kernels for.
pub fn softcap(x: &Tensor, cap: f64) -> Result<Tensor> {
    const OPERATION: &str = "softcap";
    require_together(OPERATION, &[x])?;
    if !(cap > 0.0 && cap.is_finite()) {
        bail!("metal-candle-kernels: {OPERATION}: the cap is {cap}, expected a positive number")
    }
    on_gpu!(x, gpu => gpu::softcap(x, cap));
    changed(OPERATION, x, cpu::Change::Softcap(cap))
}

/// `factor·x`, in the shape and dtype of `x`, with a `factor` of one element in f32 (f64 for f64) that is
/// on the device of `x`, and stays there.
///
/// # Errors
/// Like [`scale`], and when `factor` has more elements or another dtype.
pub fn scale_by(x: &Tensor, factor: &Tensor) -> Result<Tensor> {
    const OPERATION: &str = "scale_by";
    require_together(OPERATION, &[x, factor])?;
    if factor.elem_count() != 1 {
        bail!(
            "metal-candle-kernels: {OPERATION}: the factor has shape {:?}, expected one element",
            factor.dims()
        )
    }
    let expected = dtype_of_sums(x.dtype());
    require_dtype(OPERATION, "factor", factor, expected)?;
    on_gpu!(x, gpu => gpu::scale_by(x, factor));
    let factor = factor.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?;
    scale(x, factor[0])
}

/// The rows of `x (n, d)` times `factors (n)`, in the shape and dtype of `x`. The factors are in f32 (f64 for f64). A
/// gradient whose rows depend on nothing but a factor each is brought to scale by it.
///
/// # Errors
/// When shapes or dtypes don't fit, or the tensors aren't on one device.
pub fn scale_rows(x: &Tensor, factors: &Tensor) -> Result<Tensor> {
    const OPERATION: &str = "scale_rows";
    require_together(OPERATION, &[x, factors])?;
    require_rank(OPERATION, "x", x, 2, "(n, d)")?;
    let (n, d) = x.dims2()?;
    require_shape(OPERATION, "factors", factors, &[n])?;
    let expected = dtype_of_sums(x.dtype());
    require_dtype(OPERATION, "factors", factors, expected)?;
    if x.elem_count() == 0 {
        return Ok(x.clone());
    }
    on_gpu!(x, gpu => gpu::scale_rows(x, factors));
    let (x, factors) = (Input::contiguous(x)?, Input::contiguous(factors)?);
    let (x, factors) = (x.read(), factors.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let (x, factors) = (x.slice::<T>()?, factors.slice::<Sum<T>>()?);
        let mut out = unwritten::<T>(x.len());
        cpu::scale_rows(x, factors, d, &mut out);
        Tensor::from_vec(out, (n, d), &Device::Cpu)
    })
}

/// Every element of `x` changed, by the CPU.
fn changed(operation: &str, x: &Tensor, change: cpu::Change) -> Result<Tensor> {
    let shape = x.dims();
    let x = Input::contiguous(x)?;
    let x = x.read();
    dispatch!(operation, x.dtype(), T => {
        let x = x.slice::<T>()?;
        let mut out = unwritten::<T>(x.len());
        cpu::change(x, change, &mut out);
        Tensor::from_vec(out, shape, &Device::Cpu)
    })
}
