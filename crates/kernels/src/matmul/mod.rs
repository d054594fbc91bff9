//! Linear layers: `y = x·Wᵀ + b` with `W` stored `(out, in)`, as checkpoints hold it.
//!
//! With `dy = ∂loss/∂y`, rows `n` flattened over the leading dimensions:
//!
//! ```text
//! dx = dy·W        dW = dyᵀ·x = Σ_n dy_n ⊗ x_n        db = Σ_n dy_n
//! ```
//!
//! The functions are apart because a frozen weight needs `dx` only.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod few_rows;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, Read, Real, Sum, dispatch, unwritten, zeros};
use crate::backend::{
    on_gpu, record2, record3, require_dtype, require_shape, require_together, rows_and_columns,
};
use crate::batch_invariance;
use crate::lora_linear::fp8::linear_input_gradient;
use crate::lora_linear::{Projection, forward_only};
use crate::quantized::Weight;
use candle_core::{Device, Result, Tensor, bail};
use cpu::Layer;
use std::borrow::Cow;

/// `x` with its last dimension replaced.
pub(crate) fn with_last_dimension(tensor: &Tensor, last: usize) -> Vec<usize> {
    let mut dimensions = tensor.dims().to_vec();
    if let Some(dimension) = dimensions.last_mut() {
        *dimension = last;
    }
    dimensions
}

/// `x·Wᵀ + bias`: `x` `(.., in)`, `weight` `(out, in)`, `bias` `(out)`, result `(.., out)` in the
/// dtype of `x`.
///
/// The weight and the bias may have another dtype than `x` (f64 only goes with f64 `x`); on CUDA and, for
/// many rows, on Metal the weight is rounded to that of `x`.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, or the tensors aren't on one device.
pub fn linear<'w>(
    x: &Tensor,
    weight: impl Into<Weight<'w>>,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    const OPERATION: &str = "linear";
    let weight = weight.into();
    weight.require_beside(OPERATION, x)?;
    let (rows, inner) = rows_and_columns(OPERATION, "x", x)?;
    let outer = output_size(OPERATION, weight, inner)?;
    check_bias(OPERATION, x, bias, outer)?;
    if weight.rounds_rows() || batch_invariance::is_on() {
        let mut outputs = forward_only(x, &[Projection { weight, bias, lora: None }])?;
        return match outputs.pop() {
            Some(output) => Ok(output),
            None => bail!("metal-candle-kernels: {OPERATION}: a layer gave no output"),
        };
    }
    on_gpu!(x, gpu => {
        if let Weight::Quantized(weight) = weight
            && let Some(y) = gpu::packed_linear(OPERATION, x, weight, bias, rows)?
        {
            return Ok(y);
        }
        let weight = weight.to_dense(x.dtype())?;
        gpu::linear(OPERATION, x, &weight, bias, [rows, outer, inner])
    });
    let shape = with_last_dimension(x, outer);
    let (x, weight) = (Input::contiguous(x)?, weight.input()?);
    let bias = bias.map(Input::contiguous).transpose()?;
    let (x, weight, bias) = (x.read(), weight.read(), bias.as_ref().map(Input::read));
    dispatch!(OPERATION, x.dtype(), T => {
        let (weight, bias) = (weight.numbers()?, numbers::<Sum<T>>(&bias)?);
        let layer = Layer { weight: weight.values(), outer, bias: bias.as_deref() };
        let mut out = unwritten::<T>(rows * outer);
        cpu::forward(rows, inner, x.values()?, layer, &mut out);
        Tensor::from_vec(out, shape, &Device::Cpu)
    })
}

/// Like [`linear`], recorded in Candle's autograd. No gradient is computed for what is no variable and
/// doesn't follow from any, such as a frozen weight.
///
/// # Errors
/// Like [`linear`].
pub fn differentiable(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    fn gradients(x: &Tensor, weight: &Tensor, dy: &Tensor) -> Result<[Option<Tensor>; 2]> {
        let dx = x.track_op().then(|| linear_backward_input(dy, weight)).transpose()?;
        let dweight = weight.track_op().then(|| linear_backward_weight(x, dy)).transpose()?;
        Ok([dx, dweight.map(|dweight| dweight.to_dtype(weight.dtype())).transpose()?])
    }
    let y = linear(x, weight, bias)?;
    let Some(bias) = bias else {
        return record2("linear", [x, weight], y, |[x, weight], _, dy| gradients(x, weight, dy));
    };
    record3("linear", [x, weight, bias], y, |[x, weight, bias], _, dy| {
        let [dx, dweight] = gradients(x, weight, dy)?;
        let dbias = bias.track_op().then(|| linear_backward_bias(dy)).transpose()?;
        Ok([dx, dweight, dbias.map(|dbias| dbias.to_dtype(bias.dtype())).transpose()?])
    })
}

/// The gradient of [`linear`]'s `x`: `dy` `(.., out)`, `weight` `(out, in)`, result `(.., in)` in the
/// dtype of `dy`.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, or the tensors aren't on one device.
pub fn linear_backward_input<'w>(dy: &Tensor, weight: impl Into<Weight<'w>>) -> Result<Tensor> {
    const OPERATION: &str = "linear_backward_input";
    let weight = weight.into();
    weight.require_beside(OPERATION, dy)?;
    let (rows, outer) = rows_and_columns(OPERATION, "dy", dy)?;
    let (outputs, inner) = weight.shape()?;
    if outputs != outer {
        bail!(
            "metal-candle-kernels: {OPERATION}: weight has shape {:?}, expected ({outer}, in) to fit dy's last dimension",
            [outputs, inner]
        )
    }
    if let Weight::Quantized(weight) = weight
        && weight.fp8_scales().is_some()
    {
        return linear_input_gradient(dy, weight);
    }
    on_gpu!(dy, gpu => {
        let weight = weight.to_dense(dy.dtype())?;
        gpu::backward_input(OPERATION, dy, &weight, [rows, outer, inner])
    });
    let shape = with_last_dimension(dy, inner);
    let (dy, weight) = (Input::contiguous(dy)?, weight.input()?);
    let (dy, weight) = (dy.read(), weight.read());
    dispatch!(OPERATION, dy.dtype(), T => {
        let mut dx = unwritten::<T>(rows * inner);
        let (sizes, weight) = ((outer, inner), weight.numbers()?);
        cpu::backward_input(rows, sizes, dy.values()?, weight.values(), &mut dx);
        Tensor::from_vec(dx, shape, &Device::Cpu)
    })
}

/// The gradient of [`linear`]'s weight: `x` `(.., in)`, `dy` `(.., out)`, result `(out, in)` in f32
/// (f64 for f64).
///
/// # Errors
/// When shapes or dtypes don't fit, or the tensors aren't on one device.
pub fn linear_backward_weight(x: &Tensor, dy: &Tensor) -> Result<Tensor> {
    const OPERATION: &str = "linear_backward_weight";
    require_together(OPERATION, &[x, dy])?;
    let (rows, inner) = rows_and_columns(OPERATION, "x", x)?;
    let (_, outer) = rows_and_columns(OPERATION, "dy", dy)?;
    require_shape(OPERATION, "dy", dy, &with_last_dimension(x, outer))?;
    require_dtype(OPERATION, "dy", dy, x.dtype())?;
    on_gpu!(x, gpu => gpu::backward_weight(OPERATION, x, dy, [rows, outer, inner]));
    let (x, dy) = (Input::contiguous(x)?, Input::contiguous(dy)?);
    let (x, dy) = (x.read(), dy.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let mut out = zeros::<Sum<T>>(outer * inner);
        let (dy, x) = (dy.values::<Sum<T>>()?, x.values()?);
        let sizes = (inner, inner);
        cpu::add_weight_gradient(cpu::kind_of(dy, x), rows, outer, sizes, dy, x, &mut out);
        Tensor::from_vec(out, (outer, inner), &Device::Cpu)
    })
}

/// The gradient of [`linear`]'s bias: `dy` `(.., out)`, result `(out)` in f32 (f64 for f64).
///
/// # Errors
/// When `dy` is a scalar or no float, or this build doesn't compute on its device.
pub fn linear_backward_bias(dy: &Tensor) -> Result<Tensor> {
    const OPERATION: &str = "linear_backward_bias";
    require_together(OPERATION, &[dy])?;
    let (rows, outer) = rows_and_columns(OPERATION, "dy", dy)?;
    on_gpu!(dy, gpu => gpu::backward_bias(OPERATION, dy, rows, outer));
    let dy = Input::contiguous(dy)?;
    let dy = dy.read();
    dispatch!(OPERATION, dy.dtype(), T => {
        let dy = dy.values::<Sum<T>>()?;
        let mut out = zeros::<Sum<T>>(outer);
        crate::backend::cpu::sum_rows(rows, outer, &mut out, |row, columns, target| {
            dy.read(row * outer + columns.start, target)
        });
        Tensor::from_vec(out, outer, &Device::Cpu)
    })
}

/// The number of outputs of a weight `(out, in)`; an error when it doesn't take `inner` inputs.
pub(crate) fn output_size(operation: &str, weight: Weight<'_>, inner: usize) -> Result<usize> {
    match weight.shape()? {
        (outer, inputs) if inputs == inner => Ok(outer),
        (outer, inputs) => bail!(
            "metal-candle-kernels: {operation}: weight has shape [{outer}, {inputs}], expected (out, {inner}) to fit x's last dimension"
        ),
    }
}

/// An error unless the bias, if there is one, is `(outer)` and where `x` is.
pub(crate) fn check_bias(
    operation: &str,
    x: &Tensor,
    bias: Option<&Tensor>,
    outer: usize,
) -> Result<()> {
    let Some(bias) = bias else { return Ok(()) };
    require_together(operation, &[x, bias])?;
    require_shape(operation, "bias", bias, &[outer])
}

/// The numbers of a tensor that may not be there, as the type that sums are kept in.
pub(crate) fn numbers<'a, A: Real>(read: &'a Option<Read<'_>>) -> Result<Option<Cow<'a, [A]>>> {
    read.as_ref().map(|read| Ok(read.values()?.to_cow())).transpose()
}
