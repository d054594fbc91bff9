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
#[cfg(test)]
mod tests;

use crate::device::cpu::{
    Input, Sum, add_sums, buffer, contiguous_slice, contiguous_values, dispatch, rows_per_sum,
};
use crate::device::{require_cpu, require_dtype, require_shape, rows_and_columns};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp2, CustomOp3, Device, Layout, Result, Shape, Tensor, WithDType, bail,
};

const OPERATION: &str = "layer_norm";

/// `(x - mean) / √(variance + eps)·weight + bias`: `x` `(.., hidden)`, `weight` and `bias`
/// `(hidden)`, result like `x`.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, or a tensor isn't on the CPU.
pub fn forward(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    check(x, weight, bias)?;
    let (x, weight) = (x.detach().contiguous()?, weight.detach().contiguous()?);
    let operation = LayerNorm { eps };
    match bias {
        Some(bias) => x.apply_op3_no_bwd(&weight, &bias.detach().contiguous()?, &operation),
        None => x.apply_op2_no_bwd(&weight, &operation),
    }
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
    check(x, weight, bias)?;
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    match bias {
        Some(bias) => x.apply_op3(&weight, &bias.contiguous()?, LayerNorm { eps }),
        None => x.apply_op2(&weight, LayerNorm { eps }),
    }
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
/// When shapes or dtypes don't fit, or a tensor isn't on the CPU.
pub fn backward(
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    dy: &Tensor,
    needs: Needs,
) -> Result<Gradients> {
    let (rows, hidden) = check(x, weight, None)?;
    require_cpu(OPERATION, &[dy])?;
    require_shape(OPERATION, "dy", dy, x.dims())?;
    require_dtype(OPERATION, "dy", dy, x.dtype())?;
    let shape = x.dims();
    let (x, weight, dy) =
        (Input::contiguous(x)?, Input::contiguous(weight)?, Input::contiguous(dy)?);
    let (x, weight, dy) = (x.read(), weight.read(), dy.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let sums = rows.div_ceil(rows_per_sum(rows, hidden)) * hidden;
        let sums_if = |needed| buffer::<Sum<T>>(if needed { sums } else { 0 });
        let mut dx = buffer::<T>(if needs.dx { rows * hidden } else { 0 });
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
    require_cpu(OPERATION, &[x, weight])?;
    let (rows, hidden) = rows_and_columns(OPERATION, "x", x)?;
    require_shape(OPERATION, "weight", weight, &[hidden])?;
    if let Some(bias) = bias {
        require_cpu(OPERATION, &[bias])?;
        require_shape(OPERATION, "bias", bias, &[hidden])?;
    }
    Ok((rows, hidden))
}

/// The operation for Candle's `apply_op2(x, weight)` and `apply_op3(x, weight, bias)`, on contiguous
/// tensors; [`differentiable`] checks and prepares its inputs.
#[derive(Clone, Copy, Debug)]
pub struct LayerNorm {
    /// Added to the variance.
    pub eps: f64,
}

impl LayerNorm {
    fn run(
        &self,
        (x, x_layout): (&CpuStorage, &Layout),
        (weight, weight_layout): (&CpuStorage, &Layout),
        bias: Option<(&CpuStorage, &Layout)>,
    ) -> Result<(CpuStorage, Shape)> {
        let shape = x_layout.shape();
        let hidden = weight_layout.shape().elem_count();
        let bias_size = bias.map_or(hidden, |(_, layout)| layout.shape().elem_count());
        if shape.dims().last() != Some(&hidden) || bias_size != hidden {
            bail!(
                "metal-candle-kernels: {OPERATION}: x has shape {shape:?}, the weight {hidden} and the bias {bias_size} elements, expected as many as x's last dimension"
            )
        }
        dispatch!(OPERATION, x.dtype(), T => {
            let x = contiguous_slice::<T>(x, x_layout)?;
            let (mut weight_scratch, mut bias_scratch) = (Vec::new(), Vec::new());
            let weight = contiguous_values(weight, weight_layout)?;
            let weight = weight.block(0..hidden, &mut weight_scratch);
            let bias = match bias {
                Some((bias, layout)) => {
                    Some(contiguous_values(bias, layout)?.block(0..hidden, &mut bias_scratch))
                }
                None => None,
            };
            let mut y = buffer::<T>(x.len());
            cpu::forward(hidden, x, weight, bias, self.eps, &mut y);
            Ok((T::to_cpu_storage_owned(y), shape.clone()))
        })
    }

    fn gradients(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: Option<&Tensor>,
        dy: &Tensor,
    ) -> Result<Gradients> {
        let needs = Needs {
            dx: x.track_op(),
            dweight: weight.track_op(),
            dbias: bias.is_some_and(Tensor::track_op),
        };
        let Gradients { dx, dweight, dbias } = backward(x, weight, self.eps, dy, needs)?;
        let dweight = dweight.map(|dweight| dweight.to_dtype(weight.dtype())).transpose()?;
        let dtype = bias.map_or(x.dtype(), Tensor::dtype);
        let dbias = dbias.map(|dbias| dbias.to_dtype(dtype)).transpose()?;
        Ok(Gradients { dx, dweight, dbias })
    }
}

impl CustomOp2 for LayerNorm {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.run((x, x_layout), (weight, weight_layout), None)
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let Gradients { dx, dweight, .. } = self.gradients(x, weight, None, dy)?;
        Ok((dx, dweight))
    }
}

impl CustomOp3 for LayerNorm {
    fn name(&self) -> &'static str {
        OPERATION
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        x_layout: &Layout,
        weight: &CpuStorage,
        weight_layout: &Layout,
        bias: &CpuStorage,
        bias_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.run((x, x_layout), (weight, weight_layout), Some((bias, bias_layout)))
    }

    fn bwd(
        &self,
        x: &Tensor,
        weight: &Tensor,
        bias: &Tensor,
        _y: &Tensor,
        dy: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        let Gradients { dx, dweight, dbias } = self.gradients(x, weight, Some(bias), dy)?;
        Ok((dx, dweight, dbias))
    }
}
