//! Layer norm (Ba, Kiros and Hinton 2016, <https://arxiv.org/abs/1607.06450>) over the last dimension.
//!
//! ```text
//! r  = 1 / √(mean((x - mean x)²) + eps)        n = (x - mean x)·r
//! y  = n·w + b
//! g  = dy·w
//! dx = r·(g - mean(g) - n·mean(g·n))
//! dw = Σ_rows dy·n        db = Σ_rows dy
//! ```

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, Sum, add_sums, dispatch, rows_per_sum, unwritten};
use crate::backend::{
    on_gpu, record2, record3, require_dtype, require_shape, require_together, rows_and_columns,
};
use candle_core::{Device, Result, Tensor};

const OPERATION: &str = "layer_norm";

/// `(x - mean) / √(variance + eps)·weight + bias`: `x` `(.., hidden)`, `weight` and `bias`
/// `(hidden)`, result like `x`.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, or the tensors aren't on one device.
pub fn forward(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let (rows, hidden) = check(x, weight, bias)?;
    on_gpu!(x, gpu => gpu::forward(rows, hidden, x, weight, bias, eps));
    let shape = x.dims();
    let (x, weight) = (Input::contiguous(x)?, Input::contiguous(weight)?);
    let bias = bias.map(Input::contiguous).transpose()?;
    let (x, weight) = (x.read(), weight.read());
    let bias = bias.as_ref().map(Input::read);
    dispatch!(OPERATION, x.dtype(), T => {
        let (mut weight_scratch, mut bias_scratch) = (Vec::new(), Vec::new());
        let weight = weight.values()?;
        let weight = weight.block(0..hidden, &mut weight_scratch);
        let bias = bias.as_ref().map(|bias| bias.values()).transpose()?;
        let bias = bias.as_ref().map(|bias| bias.block(0..hidden, &mut bias_scratch));
        let mut y = unwritten::<T>(rows * hidden);
        cpu::forward(hidden, x.slice::<T>()?, weight, bias, eps, &mut y);
        Tensor::from_vec(y, shape, &Device::Cpu)
    })
}

/// Like [`forward`], recorded in Candle's autograd.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<Tensor> {
    let y = forward(x, weight, bias, eps)?;
    match bias {
        Some(bias) => record3(OPERATION, [x, weight, bias], y, move |[x, weight, bias], _, dy| {
            let Gradients { dx, dweight, dbias } = tracked(x, weight, Some(bias), eps, dy)?;
            Ok([dx, dweight, dbias])
        }),
        None => record2(OPERATION, [x, weight], y, move |[x, weight], _, dy| {
            let Gradients { dx, dweight, .. } = tracked(x, weight, None, eps, dy)?;
            Ok([dx, dweight])
        }),
    }
}

/// The gradients that Candle's autograd asks for, in the dtypes that it expects.
fn tracked(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
    dy: &Tensor,
) -> Result<Gradients> {
    let needs = Needs {
        dx: x.track_op(),
        dweight: weight.track_op(),
        dbias: bias.is_some_and(Tensor::track_op),
    };
    let Gradients { dx, dweight, dbias } = backward(x, weight, eps, dy, needs)?;
    let dweight = dweight.map(|dweight| dweight.to_dtype(weight.dtype())).transpose()?;
    let dtype = bias.map_or(x.dtype(), Tensor::dtype);
    let dbias = dbias.map(|dbias| dbias.to_dtype(dtype)).transpose()?;
    Ok(Gradients { dx, dweight, dbias })
}

/// Which gradients [`backward`] computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Needs {
    /// That of `x`.
    pub dx: bool,
    /// That of the weight.
    pub dweight: bool,
    /// That of the bias.
    pub dbias: bool,
}

/// What [`backward`] returns: what was needed.
#[derive(Debug)]
pub struct Gradients {
    /// `(.., hidden)` in the dtype of `x`.
    pub dx: Option<Tensor>,
    /// `(hidden)`, f32 (f64 for f64).
    pub dweight: Option<Tensor>,
    /// `(hidden)`, f32 (f64 for f64).
    pub dbias: Option<Tensor>,
}

/// The gradients, in one pass: `x` and `dy` `(.., hidden)` of one dtype, `weight` `(hidden)`. What
/// isn't needed isn't computed.
///
/// # Errors
/// When shapes or dtypes don't fit, or the tensors aren't on one device.
pub fn backward(
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    dy: &Tensor,
    needs: Needs,
) -> Result<Gradients> {
    let (rows, hidden) = check(x, weight, None)?;
    require_together(OPERATION, &[x, dy])?;
    require_shape(OPERATION, "dy", dy, x.dims())?;
    require_dtype(OPERATION, "dy", dy, x.dtype())?;
    on_gpu!(x, gpu => gpu::backward(rows, hidden, x, weight, eps, dy, needs));
    let shape = x.dims();
    let (x, weight, dy) =
        (Input::contiguous(x)?, Input::contiguous(weight)?, Input::contiguous(dy)?);
    let (x, weight, dy) = (x.read(), weight.read(), dy.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let sums = rows.div_ceil(rows_per_sum(rows, hidden)) * hidden;
        let sums_if = |needed| unwritten::<Sum<T>>(if needed { sums } else { 0 });
        let mut dx = unwritten::<T>(if needs.dx { rows * hidden } else { 0 });
        let (mut dweight, mut dbias) = (sums_if(needs.dweight), sums_if(needs.dbias));
        let mut scratch = Vec::new();
        let problem = cpu::Backward {
            rows,
            hidden,
            x: x.slice::<T>()?,
            weight: weight.values()?.block(0..hidden, &mut scratch),
            eps,
            dy: dy.slice::<T>()?,
        };
        problem.run(needs, &mut dx, &mut dweight, &mut dbias);
        let parameter = |needed: bool, sums: &[Sum<T>]| {
            let total = needed.then(|| add_sums(sums, hidden));
            total.map(|total| Tensor::from_vec(total, hidden, &Device::Cpu)).transpose()
        };
        let dx = needs.dx.then(|| Tensor::from_vec(dx, shape, &Device::Cpu)).transpose()?;
        let dweight = parameter(needs.dweight, &dweight)?;
        Ok(Gradients { dx, dweight, dbias: parameter(needs.dbias, &dbias)? })
    })
}

fn check(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<(usize, usize)> {
    require_together(OPERATION, &[x, weight])?;
    let (rows, hidden) = rows_and_columns(OPERATION, "x", x)?;
    require_shape(OPERATION, "weight", weight, &[hidden])?;
    if let Some(bias) = bias {
        require_together(OPERATION, &[x, bias])?;
        require_shape(OPERATION, "bias", bias, &[hidden])?;
    }
    Ok((rows, hidden))
}
