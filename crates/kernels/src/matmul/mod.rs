//! The linear layer: `y = x · Wᵀ + b`, with `W (out, in)` as checkpoints store it.
//!
//! Backward: `dx = dy · W`, `dW = dyᵀ · x`, `db = Σ dy`. The sums are f32 (f64 for f64).

mod cpu;

use crate::device::cpu::{check_device, check_dtype, check_shape, dispatch, rows_and_width};
use candle_core::{Result, Tensor};

pub(crate) use cpu::{Matrix, finish, gemm, multiply, multiply_transposed};

const NAME: &str = "linear";

/// `x (.., in) · weight (out, in)ᵀ + bias (out)`, all of one dtype: `(.., out)`.
///
/// # Errors
/// For shapes or dtypes that don't fit together.
pub fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (output, input) = weight.dims2()?;
    let (rows, width) = rows_and_width(NAME, "x", x)?;
    check_device(NAME, &[x, weight])?;
    check_dtype(NAME, "x", x, weight.dtype())?;
    if width != input {
        candle_core::bail!("{NAME}: x has {width} features, the weight reads {input}");
    }
    if let Some(bias) = bias {
        check_dtype(NAME, "bias", bias, weight.dtype())?;
        check_shape(NAME, "bias", bias, &[output])?;
    }
    let shape = with_last(x, output);
    dispatch!(weight.dtype(), "linear", T => cpu::linear::<T>(x, weight, bias, rows, &shape))
}

/// The gradient of [`linear`]'s input: `dy (.., out) · weight (out, in)`, `(.., in)`.
///
/// # Errors
/// For shapes or dtypes that don't fit together.
pub fn linear_backward_input(dy: &Tensor, weight: &Tensor) -> Result<Tensor> {
    let (output, input) = weight.dims2()?;
    let (rows, width) = rows_and_width(NAME, "dy", dy)?;
    check_device(NAME, &[dy, weight])?;
    check_dtype(NAME, "dy", dy, weight.dtype())?;
    if width != output {
        candle_core::bail!("{NAME}: dy has {width} features, the weight gives {output}");
    }
    let shape = with_last(dy, input);
    dispatch!(weight.dtype(), "linear", T => cpu::backward_input::<T>(dy, weight, rows, &shape))
}

/// The gradient of [`linear`]'s weight: `dyᵀ · x`, `(out, in)` in f32 (f64 for f64).
///
/// # Errors
/// For shapes or dtypes that don't fit together.
pub fn linear_backward_weight(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    let (rows, input) = rows_and_width(NAME, "x", x)?;
    let (dy_rows, output) = rows_and_width(NAME, "dy", dy)?;
    check_device(NAME, &[x, dy])?;
    check_dtype(NAME, "dy", dy, x.dtype())?;
    if rows != dy_rows {
        candle_core::bail!("{NAME}: x has {rows} rows, dy has {dy_rows}");
    }
    dispatch!(x.dtype(), "linear", T => cpu::backward_weight::<T>(x, dy, rows, input, output))
}

/// The gradient of [`linear`]'s bias: `dy` summed over its rows, `(out)` in f32 (f64 for f64).
///
/// # Errors
/// For a dtype that isn't supported.
pub fn linear_backward_bias(dy: &Tensor) -> Result<Tensor> {
    let (rows, output) = rows_and_width(NAME, "dy", dy)?;
    check_device(NAME, &[dy])?;
    dispatch!(dy.dtype(), "linear", T => cpu::backward_bias::<T>(dy, rows, output))
}

/// The dimensions of `tensor` with another last one.
pub(crate) fn with_last(tensor: &Tensor, last: usize) -> Vec<usize> {
    let mut dims = tensor.dims().to_vec();
    if let Some(dim) = dims.last_mut() {
        *dim = last;
    }
    dims
}
