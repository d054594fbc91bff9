//! A frozen linear layer with a low-rank adapter (LoRA, Hu et al. 2021, <https://arxiv.org/abs/2106.09685>)
//! as one operation.
//!
//! ```text
//! x̃  = dropout(x)            xa = x̃·A
//! y  = x·Wᵀ + bias + s·xa·B
//!
//! g  = s·dy·Bᵀ
//! dA = x̃ᵀ·g      dB = s·xaᵀ·dy      dx = dy·W + dropout'(g·Aᵀ)
//! ```
//!
//! `W` and the bias are frozen: no gradient of theirs is computed or allocated. The dropout is
//! inverted (kept elements are divided by `1 - p`); its mask is a hash of the seed and the element's
//! index, so the backward pass and a recomputed forward pass see the same one without storing it.

mod cpu;
#[cfg(test)]
mod tests;

use crate::device::cpu::{Input, Real, Sum, Values, dispatch, record3, zeros};
use crate::device::{require_cpu, require_dtype, require_shape, rows_and_columns};
use crate::matmul::cpu::{LowRank, Mask, Orientation, Product, narrow_product, outer_products};
use crate::matmul::{output_size, read_bias, with_last_dimension};
use candle_core::{Device, Result, Tensor, WithDType, bail};

/// A low-rank adapter in the orientation that the forward pass reads.
#[derive(Clone, Copy, Debug)]
pub struct Lora<'a> {
    /// A, `(in, rank)`, in f32 or the dtype of the activations.
    pub a: &'a Tensor,
    /// B, `(rank, out)`, in f32 or the dtype of the activations.
    pub b: &'a Tensor,
    /// What the adapter's output is multiplied by: alpha / rank, or alpha / √rank for rsLoRA.
    pub scale: f64,
    /// Dropout of the adapter's input while training.
    pub dropout: Option<Dropout>,
}

/// Inverted dropout whose mask follows from a seed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The probability of an element to be dropped, `0 <= p < 1`.
    pub probability: f32,
    /// Give every layer and step its own.
    pub seed: u64,
}

/// What [`backward`] returns.
#[derive(Debug)]
pub struct Gradients {
    /// `(.., in)` in the dtype of `dy`; `None` unless asked for.
    pub dx: Option<Tensor>,
    /// The gradient of A, `(in, rank)`, f32 (f64 for f64).
    pub da: Tensor,
    /// The gradient of B, `(rank, out)`, f32 (f64 for f64).
    pub db: Tensor,
}

/// `(y, xa)`: `x` `(.., in)`, `weight` `(out, in)`, `bias` `(out)`; `y` `(.., out)` in the dtype of
/// `x`, and `xa = dropout(x)·A` `(.., rank)` in f32 (f64 for f64), which [`backward`] wants back.
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, the dropout probability isn't in `0..1`, or a
/// tensor isn't on the CPU.
pub fn forward(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    lora: &Lora,
) -> Result<(Tensor, Tensor)> {
    const OPERATION: &str = "lora_linear::forward";
    require_cpu(OPERATION, &[x, weight, lora.a, lora.b])?;
    let (rows, inner) = rows_and_columns(OPERATION, "x", x)?;
    let outer = output_size(OPERATION, weight, inner)?;
    let rank = lora_rank(OPERATION, lora, inner, outer)?;
    check_dropout(OPERATION, lora.dropout)?;
    let (y_shape, xa_shape) = (with_last_dimension(x, outer), with_last_dimension(x, rank));
    let (x, weight) = (Input::contiguous(x)?, Input::contiguous(weight)?);
    let (x, weight) = (x.read(), weight.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let bias = read_bias::<T>(OPERATION, bias, outer)?;
        let a = Input::contiguous(lora.a)?.read().values::<Sum<T>>()?.to_vec();
        let b = Input::contiguous(lora.b)?.read().values::<Sum<T>>()?.to_vec();
        let mut xa = zeros::<Sum<T>>(rows * rank);
        let mask = lora.dropout.and_then(cpu::mask::<Sum<T>>);
        let one = Sum::<T>::ONE;
        let mask = mask.as_ref().map(|mask| mask as _);
        narrow_product(rows, inner, rank, x.values()?, &a, false, one, mask, &mut xa);
        let mut y = zeros::<T>(rows * outer);
        let low_rank = LowRank {
            left: &xa,
            right: &b,
            transposed: false,
            rank,
            scale: Sum::<T>::from_f64(lora.scale),
            mask: None,
        };
        let product = Product {
            x: x.values()?,
            weight: weight.values()?,
            orientation: Orientation::OutputMajor,
            rows,
            inner,
            outer,
            bias: bias.as_deref(),
            low_rank: Some(low_rank),
        };
        product.run(&mut y);
        Ok((
            Tensor::from_vec(y, y_shape, &Device::Cpu)?,
            Tensor::from_vec(xa, xa_shape, &Device::Cpu)?,
        ))
    })
}

/// `y` like [`forward`], recorded in Candle's autograd for `x`, A and B; `weight` and `bias` are frozen.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
    lora: &Lora,
) -> Result<Tensor> {
    let (y, xa) = forward(x, weight, bias, lora)?;
    let (weight, scale, dropout) = (weight.detach(), lora.scale, lora.dropout);
    record3("lora_linear", [x, lora.a, lora.b], y, move |[x, a, b], _, dy| {
        let lora = Lora { a, b, scale, dropout };
        let Gradients { dx, da, db } = backward(x, &weight, &xa, &lora, dy, x.track_op())?;
        Ok([dx, Some(da.to_dtype(a.dtype())?), Some(db.to_dtype(b.dtype())?)])
    })
}

/// The gradients of A and B, and of `x` when `need_dx`: `x` `(.., in)`, `weight` `(out, in)`, `xa`
/// from [`forward`], `dy` `(.., out)` in the dtype of `x`.
///
/// # Errors
/// Like [`forward`].
pub fn backward(
    x: &Tensor,
    weight: &Tensor,
    xa: &Tensor,
    lora: &Lora,
    dy: &Tensor,
    need_dx: bool,
) -> Result<Gradients> {
    const OPERATION: &str = "lora_linear::backward";
    require_cpu(OPERATION, &[x, weight, xa, lora.a, lora.b, dy])?;
    let (rows, inner) = rows_and_columns(OPERATION, "x", x)?;
    let outer = output_size(OPERATION, weight, inner)?;
    let rank = lora_rank(OPERATION, lora, inner, outer)?;
    check_dropout(OPERATION, lora.dropout)?;
    require_shape(OPERATION, "dy", dy, &with_last_dimension(x, outer))?;
    require_shape(OPERATION, "xa", xa, &with_last_dimension(x, rank))?;
    require_dtype(OPERATION, "dy", dy, x.dtype())?;
    let shape = x.dims();
    let (x, weight, dy) =
        (Input::contiguous(x)?, Input::contiguous(weight)?, Input::contiguous(dy)?);
    let xa = Input::contiguous(xa)?;
    let (x, weight, dy, xa) = (x.read(), weight.read(), dy.read(), xa.read());
    dispatch!(OPERATION, x.dtype(), T => {
        let xa = xa.slice::<Sum<T>>()?;
        let a = Input::contiguous(lora.a)?.read().values::<Sum<T>>()?.to_vec();
        let b = Input::contiguous(lora.b)?.read().values::<Sum<T>>()?.to_vec();
        let scale = Sum::<T>::from_f64(lora.scale);
        let mask = lora.dropout.and_then(cpu::mask::<Sum<T>>);
        let mask = mask.as_ref().map(|mask| mask as &Mask<Sum<T>>);

        let mut g = zeros::<Sum<T>>(rows * rank);
        narrow_product(rows, outer, rank, dy.values()?, &b, true, scale, None, &mut g);
        let mut da = zeros::<Sum<T>>(inner * rank);
        cpu::gradient_of_a(rows, inner, rank, x.values()?, &g, mask, &mut da);
        let mut db = zeros::<Sum<T>>(rank * outer);
        outer_products(rows, rank, outer, Values::Native(xa), dy.values()?, lora.scale, &mut db);
        let dx = if need_dx {
            let mut dx = zeros::<T>(rows * inner);
            let low_rank = LowRank {
                left: &g,
                right: &a,
                transposed: true,
                rank,
                scale: Sum::<T>::ONE,
                mask,
            };
            let product = Product {
                x: dy.values()?,
                weight: weight.values()?,
                orientation: Orientation::InputMajor,
                rows,
                inner: outer,
                outer: inner,
                bias: None,
                low_rank: Some(low_rank),
            };
            product.run(&mut dx);
            Some(Tensor::from_vec(dx, shape, &Device::Cpu)?)
        } else {
            None
        };
        Ok(Gradients {
            dx,
            da: Tensor::from_vec(da, (inner, rank), &Device::Cpu)?,
            db: Tensor::from_vec(db, (rank, outer), &Device::Cpu)?,
        })
    })
}

/// Inverted dropout: `x` of any shape, result of the same shape and dtype. It is its own backward
/// pass: apply it to the gradient.
///
/// # Errors
/// When the probability isn't in `0..1`, `x` isn't a float, or isn't on the CPU.
pub fn dropout(x: &Tensor, dropout: Dropout) -> Result<Tensor> {
    const OPERATION: &str = "dropout";
    require_cpu(OPERATION, &[x])?;
    check_dropout(OPERATION, Some(dropout))?;
    let shape = x.dims();
    let x = Input::contiguous(x)?;
    let x = x.read();
    dispatch!(OPERATION, x.dtype(), T => {
        let mut out = x.slice::<T>()?.to_vec();
        if let Some(mask) = cpu::mask::<Sum<T>>(dropout) {
            cpu::apply_mask(&mut out, &mask);
        }
        Tensor::from_vec(out, shape, &Device::Cpu)
    })
}

fn lora_rank(operation: &str, lora: &Lora, inner: usize, outer: usize) -> Result<usize> {
    match (lora.a.dims(), lora.b.dims()) {
        ([inputs, rank], [rank_of_b, outputs])
            if *inputs == inner && *outputs == outer && rank == rank_of_b =>
        {
            Ok(*rank)
        }
        (a, b) => bail!(
            "metal-candle-kernels: {operation}: A has shape {a:?} and B {b:?}, expected ({inner}, rank) and (rank, {outer})"
        ),
    }
}

fn check_dropout(operation: &str, dropout: Option<Dropout>) -> Result<()> {
    if let Some(Dropout { probability, .. }) = dropout
        && !(0.0..1.0).contains(&probability)
    {
        bail!(
            "metal-candle-kernels: {operation}: the dropout probability is {probability}, expected at least 0 and less than 1"
        )
    }
    Ok(())
}
