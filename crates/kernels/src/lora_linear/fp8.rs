//! Layers whose weights round what is multiplied by them to e4m3
//! ([`Arithmetic::Fp8`](crate::quantized::Arithmetic::Fp8)), out of the operations that there are: for every device
//! and size that has no kernel for products of codes.

use super::{Lora, Output, Projection, SharedGradients, backward_shared, dropout};
use crate::arithmetic::{add, scale};
use crate::backend::dtype_of_sums;
use crate::copy::cast;
use crate::matmul::{linear, linear_backward_input};
use crate::quantized::fp8::round;
use crate::quantized::{Arithmetic, Quantized, Weight};
use candle_core::{D, DType, Result, Tensor};

/// Whether one of the weights rounds rows.
pub(super) fn is_one_of(projections: &[Projection]) -> bool {
    projections.iter().any(|projection| projection.weight.rounds_rows())
}

/// A weight that rounds rows, with the scales of its own rows.
fn of(weight: Weight<'_>) -> Option<(&Quantized, &Tensor)> {
    match weight {
        Weight::Quantized(weight) => Some((weight, weight.fp8_scales()?)),
        Weight::Dense(_) => None,
    }
}

/// The dtype that the parts of a sum have: f32 on the CPU, where a sum is rounded once, and that of `x` on GPUs.
fn dtype_of_parts(x: &Tensor) -> DType {
    match x.dtype() {
        DType::F64 => DType::F64,
        dtype if x.device().is_cuda() => dtype,
        _ => DType::F32,
    }
}

/// As [`forward_shared`](super::forward_shared).
pub(super) fn forward(x: &Tensor, projections: &[Projection]) -> Result<Vec<Output>> {
    let wide = cast(x, dtype_of_parts(x))?;
    let rounded = round(&[(&wide, None)], wide.dtype())?.reshape(x.dims())?;
    let outputs = projections.iter().map(|Projection { weight, bias, lora }| {
        let mut y = match of(*weight) {
            Some((weight, _)) => {
                let weight = weight.clone().with_arithmetic(Arithmetic::Float);
                linear(&rounded, &weight, *bias)?
            }
            None => linear(&wide, *weight, *bias)?,
        };
        let mut xa = None;
        if let Some(lora) = lora {
            let down = match lora.a.dim(1)? {
                0 => wide.narrow(D::Minus1, 0, 0)?,
                _ => {
                    let down = linear(&dropped(&wide, lora)?, &lora.a.t()?, None)?;
                    y = add(&y, &scale(&linear(&down, &lora.b.t()?, None)?, lora.scale)?)?;
                    down
                }
            };
            xa = Some(down);
        }
        Ok(Output { y: cast(&y, x.dtype())?, xa })
    });
    outputs.collect()
}

/// As [`backward_shared`].
pub(super) fn backward(
    x: &Tensor,
    projections: &[Projection],
    xas: &[Option<&Tensor>],
    dys: &[&Tensor],
    need_dx: bool,
) -> Result<SharedGradients> {
    // The adapters' gradients know nothing of the weights.
    let plain: Vec<Option<Quantized>> = projections
        .iter()
        .map(|projection| {
            let (weight, _) = of(projection.weight)?;
            Some(weight.clone().with_arithmetic(Arithmetic::Float))
        })
        .collect();
    let of_adapters: Vec<_> = projections
        .iter()
        .zip(&plain)
        .map(|(projection, plain)| Projection {
            weight: plain.as_ref().map_or(projection.weight, Weight::Quantized),
            ..*projection
        })
        .collect();
    let mut gradients = backward_shared(x, &of_adapters, xas, dys, false)?;
    if need_dx {
        gradients.dx = Some(input_gradient(x.dims(), projections, dys)?);
    }
    Ok(gradients)
}

/// The gradient of an input of such dimensions.
pub(super) fn input_gradient(
    dims: &[usize],
    projections: &[Projection],
    dys: &[&Tensor],
) -> Result<Tensor> {
    let Some(dtype) = dys.first().map(|dy| dy.dtype()) else {
        candle_core::bail!("metal-candle-kernels: lora_linear: no gradients came, expected some")
    };
    let of_parts = dtype_of_sums(dtype);
    let (mut parts, mut levels) = (Vec::new(), Vec::new());
    let mut dx: Option<Tensor> = None;
    let mut gather = |part: Tensor| -> Result<()> {
        let part = part.reshape(dims)?;
        dx = Some(match dx.take() {
            Some(dx) => add(&dx, &part)?,
            None => part,
        });
        Ok(())
    };
    for (Projection { weight, lora, .. }, dy) in projections.iter().zip(dys) {
        let wide = cast(dy, of_parts)?;
        match of(*weight) {
            Some((weight, scales)) => {
                parts.push((*dy, Some(scales)));
                levels.push(weight.levels_alone()?);
            }
            None => gather(linear_backward_input(&wide, *weight)?)?,
        }
        if let Some(lora) = lora
            && lora.a.dim(1)? > 0
        {
            let g = scale(&linear(&wide, lora.b, None)?, lora.scale)?;
            gather(dropped(&linear(&g, lora.a, None)?, lora)?)?;
        }
    }
    if !parts.is_empty() {
        let rounded = round(&parts, of_parts)?;
        let mut first = 0;
        for levels in &levels {
            let (outer, _) = levels.shape();
            let part = rounded.narrow(1, first, outer)?;
            gather(linear_backward_input(&part, levels)?)?;
            first += outer;
        }
    }
    match dx {
        Some(dx) => cast(&dx, dtype),
        None => candle_core::bail!("metal-candle-kernels: lora_linear: a gradient is missing"),
    }
}

/// What an adapter is given of its layer's input; its own backward pass.
fn dropped(x: &Tensor, lora: &Lora) -> Result<Tensor> {
    match lora.dropout {
        Some(drops) if drops.probability > 0.0 => dropout(x, drops),
        _ => Ok(x.clone()),
    }
}

/// As [`linear_backward_input`](crate::matmul::linear_backward_input), of a weight that rounds rows.
pub(crate) fn linear_input_gradient(dy: &Tensor, weight: &Quantized) -> Result<Tensor> {
    let projection = Projection { weight: Weight::Quantized(weight), bias: None, lora: None };
    let (_, inner) = weight.shape();
    #[cfg(feature = "cuda")]
    if dy.device().is_cuda() {
        const OPERATION: &str = "linear_backward_input";
        let (rows, _) = crate::backend::rows_and_columns(OPERATION, "dy", dy)?;
        if super::cuda::takes_codes(dy, (rows, inner), &[projection], true)? {
            return super::cuda::input_gradient_codes(OPERATION, dy, (rows, inner), projection);
        }
    }
    let dims = crate::matmul::with_last_dimension(dy, inner);
    input_gradient(&dims, &[projection], &[dy])
}
