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
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod fp8;
mod fused;
mod invariant;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(feature = "cuda")]
mod skinny;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, Read, Real, Sum, dispatch, unwritten};
use crate::backend::{
    on_gpu, record3, require_dtype, require_shape, require_together, rows_and_columns,
};
use crate::batch_invariance;
use crate::glu;
use crate::matmul::cpu as matmul;
use crate::matmul::{check_bias, numbers, output_size, with_last_dimension};
use crate::quantized::{Weight, WeightInput, WeightNumbers, WeightRead};
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
use candle_core::DType;
use candle_core::{Device, Result, Tensor, WithDType, bail};
use cpu::{Adapter, Dropped, Incoming, Layer};
pub use fused::{Norm, forward_normed, forward_normed_unit};
use std::borrow::Cow;

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

#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
impl Lora<'_> {
    /// Whether any element of its input is dropped.
    fn drops(&self) -> bool {
        self.dropout.is_some_and(|dropout| dropout.probability > 0.0)
    }
}

/// Inverted dropout whose mask follows from a seed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dropout {
    /// The probability of an element to be dropped, `0 <= p < 1`.
    pub probability: f32,
    /// Give every layer and step its own.
    pub seed: u64,
}

impl Dropout {
    /// A random 32-bit number below this one drops its element.
    fn threshold(self) -> u64 {
        (f64::from(self.probability) * 2f64.powi(32)) as u64
    }

    /// What the elements that are kept are multiplied by.
    fn kept(self) -> f64 {
        1.0 / (1.0 - f64::from(self.probability))
    }
}

/// One of several layers that read the same input: a frozen weight and bias, with or without an
/// adapter.
#[derive(Clone, Copy, Debug)]
pub struct Projection<'a> {
    /// `(out, in)`
    pub weight: Weight<'a>,
    /// `(out)`
    pub bias: Option<&'a Tensor>,
    /// The adapter.
    pub lora: Option<Lora<'a>>,
}

/// A [`Projection`] whose weight is dense.
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
#[derive(Clone, Copy)]
struct DenseProjection<'a> {
    weight: &'a Tensor,
    bias: Option<&'a Tensor>,
    lora: Option<Lora<'a>>,
}

/// What `f` makes of projections whose weights it can only read dense. Those in fewer bits are unpacked for it.
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
fn with_dense<R>(
    dtype: DType,
    projections: &[Projection],
    f: impl FnOnce(&[DenseProjection]) -> Result<R>,
) -> Result<R> {
    let weights = projections.iter().map(|projection| projection.weight);
    let weights = Weight::all_to_dense(weights, dtype)?;
    let projections = projections.iter().zip(&weights);
    let projections = projections.map(|(Projection { bias, lora, .. }, weight)| DenseProjection {
        weight,
        bias: *bias,
        lora: *lora,
    });
    f(&projections.collect::<Vec<_>>())
}

/// The same as projections of any weight.
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
fn of_any<'a>(projections: &[DenseProjection<'a>]) -> Vec<Projection<'a>> {
    let any = |DenseProjection { weight, bias, lora }: &DenseProjection<'a>| Projection {
        weight: Weight::Dense(weight),
        bias: *bias,
        lora: *lora,
    };
    projections.iter().map(any).collect()
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

/// What [`forward_shared`] returns for one projection.
#[derive(Clone, Debug)]
pub struct Output {
    /// `(.., out)` in the dtype of `x`.
    pub y: Tensor,
    /// `dropout(x)·A`, `(.., rank)` in f32 (f64 for f64) on the CPU and the dtype of `x` on GPUs, which
    /// [`backward_shared`] wants back; `None` without an adapter.
    pub xa: Option<Tensor>,
}

/// What [`backward_shared`] returns.
#[derive(Debug)]
pub struct SharedGradients {
    /// The sum over the projections, `(.., in)` in the dtype of `dy`; `None` unless asked for.
    pub dx: Option<Tensor>,
    /// For every projection with an adapter the gradients of A `(in, rank)` and B `(rank, out)`, f32
    /// (f64 for f64).
    pub adapters: Vec<Option<(Tensor, Tensor)>>,
}

/// `(y, xa)`: `x` `(.., in)`, `weight` `(out, in)`, `bias` `(out)`; `y` `(.., out)` in the dtype of
/// `x`, and `xa = dropout(x)·A` `(.., rank)`, which [`backward`] wants back, as [`Output::xa`].
///
/// # Errors
/// When shapes don't fit, a dtype isn't a float, the dropout probability isn't in `0..1`, or the
/// tensors aren't on one device.
pub fn forward<'w>(
    x: &Tensor,
    weight: impl Into<Weight<'w>>,
    bias: Option<&Tensor>,
    lora: &Lora,
) -> Result<(Tensor, Tensor)> {
    let projection = Projection { weight: weight.into(), bias, lora: Some(*lora) };
    match forward_shared(x, &[projection])?.pop() {
        Some(Output { y, xa: Some(xa) }) => Ok((y, xa)),
        _ => bail!("metal-candle-kernels: lora_linear: a projection gave no output"),
    }
}

/// Several projections of the same `x` `(.., in)`, which is read and laid out once for all.
///
/// # Errors
/// Like [`forward`].
pub fn forward_shared(x: &Tensor, projections: &[Projection]) -> Result<Vec<Output>> {
    const OPERATION: &str = "lora_linear::forward";
    if batch_invariance::is_on() {
        return invariant::forward(x, projections, true);
    }
    let sizes = rows_and_columns(OPERATION, "x", x)?;
    check(OPERATION, x, sizes.1, projections)?;
    if fp8::is_one_of(projections) {
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() && cuda::takes_codes(x, sizes, projections, false)? {
            return cuda::forward_codes(OPERATION, x, sizes, projections);
        }
        return fp8::forward(x, projections);
    }
    on_gpu!(x, gpu => match gpu::takes_packed(x, sizes, projections) {
        true => gpu::forward_packed(OPERATION, x, sizes, projections, true),
        false => with_dense(x.dtype(), projections, |projections| {
            gpu::forward(OPERATION, x, sizes, projections)
        }),
    });
    on_cpu(OPERATION, x, sizes, projections, true)
}

/// [`forward_shared`] on the CPU; `few` says whether the kernels for a few rows may be used.
fn on_cpu(
    operation: &str,
    x: &Tensor,
    sizes: (usize, usize),
    projections: &[Projection],
    few: bool,
) -> Result<Vec<Output>> {
    let (rows, _) = sizes;
    let inputs = Inputs::new(projections)?;
    let (x_input, reads) = (Input::contiguous(x)?, inputs.read());
    let x_read = x_input.read();
    dispatch!(operation, x.dtype(), T => {
        let numbers = reads.iter().map(Reads::numbers::<Sum<T>>).collect::<Result<Vec<_>>>()?;
        let layers = inputs.layers(&numbers)?;
        let mut ys: Vec<_> =
            layers.iter().map(|layer| unwritten::<T>(rows * layer.frozen.outer)).collect();
        let mut xas: Vec<_> = layers
            .iter()
            .map(|layer| {
                let rank = layer.adapter.as_ref().map_or(0, |adapter| adapter.rank);
                unwritten::<Sum<T>>(rows * rank)
            })
            .collect();
        let mut targets: Vec<_> = ys.iter_mut().map(|y| &mut y[..]).collect();
        cpu::forward(sizes, x_read.values()?, &layers, few, &mut targets, &mut xas);
        layers
            .iter()
            .zip(ys.into_iter().zip(xas))
            .map(|(layer, (y, xa))| {
                let shape = with_last_dimension(x, layer.frozen.outer);
                let y = Tensor::from_vec(y, shape, &Device::Cpu)?;
                let xa = layer.adapter.as_ref().map(|adapter| {
                    Tensor::from_vec(xa, with_last_dimension(x, adapter.rank), &Device::Cpu)
                });
                Ok(Output { y, xa: xa.transpose()? })
            })
            .collect()
    })
}

/// The `y` of [`forward_shared`] alone, with the same bits, where no backward pass follows. On CUDA a few rows
/// cost less so.
///
/// # Errors
/// Like [`forward`].
pub fn forward_only(x: &Tensor, projections: &[Projection]) -> Result<Vec<Tensor>> {
    let ys = |outputs: Vec<Output>| outputs.into_iter().map(|output| output.y).collect();
    if batch_invariance::is_on() {
        return invariant::forward(x, projections, false).map(ys);
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && !fp8::is_one_of(projections) {
        const OPERATION: &str = "lora_linear::forward";
        let (rows, inner) = rows_and_columns(OPERATION, "x", x)?;
        check(OPERATION, x, inner, projections)?;
        if cuda::takes_packed(x, (rows, inner), projections) {
            return cuda::forward_packed(OPERATION, x, (rows, inner), projections, false).map(ys);
        }
        return with_dense(x.dtype(), projections, |projections| {
            cuda::outputs(OPERATION, x, (rows, inner), projections, false).map(ys)
        });
    }
    forward_shared(x, projections).map(ys)
}

/// The `xa` of [`forward_shared`] alone, with the same bits, for a forward pass that is run again and whose
/// `y` nothing reads. On the CPU it is found along with `y`, and takes as long.
///
/// # Errors
/// Like [`forward`].
pub fn forward_again(x: &Tensor, projections: &[Projection]) -> Result<Vec<Option<Tensor>>> {
    if batch_invariance::is_on() {
        return batch_invariance::within(false, || forward_again(x, projections));
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() && fp8::is_one_of(projections) {
        const OPERATION: &str = "lora_linear::forward_again";
        let (rows, inner) = rows_and_columns(OPERATION, "x", x)?;
        check(OPERATION, x, inner, projections)?;
        if cuda::takes_codes(x, (rows, inner), projections, false)? {
            return cuda::low_rank_codes(OPERATION, x, (rows, inner), projections);
        }
        let outputs = fp8::forward(x, projections)?;
        return Ok(outputs.into_iter().map(|output| output.xa).collect());
    }
    on_gpu!(x, gpu => {
        const OPERATION: &str = "lora_linear::forward_again";
        let (rows, inner) = rows_and_columns(OPERATION, "x", x)?;
        check(OPERATION, x, inner, projections)?;
        with_dense(x.dtype(), projections, |projections| {
            gpu::low_rank(OPERATION, x, (rows, inner), projections)
        })
    });
    Ok(forward_shared(x, projections)?.into_iter().map(|output| output.xa).collect())
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
pub fn backward<'w>(
    x: &Tensor,
    weight: impl Into<Weight<'w>>,
    xa: &Tensor,
    lora: &Lora,
    dy: &Tensor,
    need_dx: bool,
) -> Result<Gradients> {
    let projection = Projection { weight: weight.into(), bias: None, lora: Some(*lora) };
    let SharedGradients { dx, mut adapters } =
        backward_shared(x, &[projection], &[Some(xa)], &[dy], need_dx)?;
    match adapters.pop() {
        Some(Some((da, db))) => Ok(Gradients { dx, da, db }),
        _ => bail!("metal-candle-kernels: lora_linear: a projection gave no gradients"),
    }
}

/// What [`backward_gated`] returns.
#[derive(Debug)]
pub struct GatedGradients {
    /// Like `gate`.
    pub dgate: Tensor,
    /// Like `up`.
    pub dup: Tensor,
    /// The gradient of A, `(in, rank)`, f32 (f64 for f64).
    pub da: Tensor,
    /// The gradient of B, `(rank, out)`, f32 (f64 for f64).
    pub db: Tensor,
}

/// [`backward`] of a layer of the gated unit `x = activation(gate)·up`, which isn't kept, and that of the
/// unit. On CUDA `x` is made in the unit's own backward pass, and the gradient of A after it.
///
/// # Errors
/// Like [`backward`] and [`glu::backward`].
pub fn backward_gated<'w>(
    gate: &Tensor,
    up: &Tensor,
    activation: glu::Activation,
    weight: impl Into<Weight<'w>>,
    xa: &Tensor,
    lora: &Lora,
    dy: &Tensor,
) -> Result<GatedGradients> {
    let weight = weight.into();
    #[cfg(feature = "cuda")]
    if gate.device().is_cuda() && lora.dropout.is_none() {
        const OPERATION: &str = "lora_linear::backward_gated";
        glu::check(gate, up)?;
        let (rows, inner) = rows_and_columns(OPERATION, "gate", gate)?;
        let projection = Projection { weight, bias: None, lora: Some(*lora) };
        check(OPERATION, gate, inner, &[projection])?;
        check_incoming(OPERATION, gate, &[projection], &[Some(xa)], &[dy])?;
        let (unit, sizes) = (cuda::Unit { gate, up, activation }, (rows, inner));
        if !fp8::is_one_of(&[projection]) {
            return with_dense(gate.dtype(), &[projection], |projections| {
                let projection = of_any(projections)[0];
                cuda::backward_gated(OPERATION, unit, sizes, projection, xa, dy)
            });
        }
        if cuda::takes_codes(gate, sizes, &[projection], true)? {
            return cuda::backward_gated(OPERATION, unit, sizes, projection, xa, dy);
        }
    }
    let x = glu::forward(gate, up, activation)?;
    let Gradients { dx: Some(dx), da, db } = backward(&x, weight, xa, lora, dy, true)? else {
        bail!("metal-candle-kernels: lora_linear: dx, which is needed, is missing")
    };
    match glu::backward(gate, up, activation, &dx, true, true)? {
        (Some(dgate), Some(dup)) => Ok(GatedGradients { dgate, dup, da, db }),
        _ => bail!("metal-candle-kernels: glu: a gradient that is needed is missing"),
    }
}

/// The gradients of the adapters of several projections of `x` `(.., in)`, and of `x` when
/// `need_dx`: `xas` as [`forward_shared`] gave them, `dys` `(.., out)` in the dtype of `x`.
///
/// # Errors
/// Like [`forward`], and when there aren't as many `xas` and `dys` as projections.
pub fn backward_shared(
    x: &Tensor,
    projections: &[Projection],
    xas: &[Option<&Tensor>],
    dys: &[&Tensor],
    need_dx: bool,
) -> Result<SharedGradients> {
    const OPERATION: &str = "lora_linear::backward";
    let (rows, inner) = rows_and_columns(OPERATION, "x", x)?;
    check(OPERATION, x, inner, projections)?;
    check_incoming(OPERATION, x, projections, xas, dys)?;
    if fp8::is_one_of(projections) {
        #[cfg(feature = "cuda")]
        if x.device().is_cuda() && cuda::takes_codes(x, (rows, inner), projections, true)? {
            return cuda::backward(OPERATION, x, (rows, inner), projections, xas, dys, need_dx);
        }
        return fp8::backward(x, projections, xas, dys, need_dx);
    }
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return with_dense(x.dtype(), projections, |projections| {
            let projections = of_any(projections);
            cuda::backward(OPERATION, x, (rows, inner), &projections, xas, dys, need_dx)
        });
    }
    #[cfg(any(feature = "metal", feature = "metal-emulation", test))]
    if crate::backend::metal::computes(x) {
        return with_dense(x.dtype(), projections, |projections| {
            metal::backward(OPERATION, x, (rows, inner), projections, xas, dys, need_dx)
        });
    }
    let inputs = Inputs::new(projections)?;
    let incoming = projections.iter().zip(xas).zip(dys).map(|((projection, xa), dy)| {
        let xa = xa.filter(|_| projection.lora.is_some());
        Ok((Input::contiguous(dy)?, xa.map(Input::contiguous).transpose()?))
    });
    let incoming = incoming.collect::<Result<Vec<_>>>()?;
    let (x_input, reads) = (Input::contiguous(x)?, inputs.read());
    let x_read = x_input.read();
    let incoming: Vec<_> =
        incoming.iter().map(|(dy, xa)| (dy.read(), xa.as_ref().map(Input::read))).collect();
    dispatch!(OPERATION, x.dtype(), T => {
        let numbers = reads.iter().map(Reads::numbers::<Sum<T>>).collect::<Result<Vec<_>>>()?;
        let layers = inputs.layers(&numbers)?;
        let incoming = incoming
            .iter()
            .map(|(dy, xa)| {
                let xa = xa.as_ref().map_or(Ok(&[][..]), |xa| xa.slice::<Sum<T>>())?;
                Ok(Incoming { dy: dy.values()?, xa })
            })
            .collect::<Result<Vec<_>>>()?;
        let mut dx = need_dx.then(|| unwritten::<T>(rows * inner));
        let x_values = x_read.values()?;
        let gradients =
            cpu::backward(rows, inner, x_values, &layers, &incoming, dx.as_deref_mut());
        let adapters = layers
            .iter()
            .zip(gradients)
            .map(|(layer, gradients)| {
                let Some((adapter, gradients)) = layer.adapter.as_ref().zip(gradients) else {
                    return Ok(None);
                };
                let (rank, outer) = (adapter.rank, layer.frozen.outer);
                Ok(Some((
                    Tensor::from_vec(gradients.da, (inner, rank), &Device::Cpu)?,
                    Tensor::from_vec(gradients.db, (rank, outer), &Device::Cpu)?,
                )))
            })
            .collect::<Result<Vec<_>>>()?;
        let dx = dx.map(|dx| Tensor::from_vec(dx, x.dims(), &Device::Cpu)).transpose()?;
        Ok(SharedGradients { dx, adapters })
    })
}

/// An error unless every projection of `x` has what comes back to it.
fn check_incoming(
    operation: &str,
    x: &Tensor,
    projections: &[Projection],
    xas: &[Option<&Tensor>],
    dys: &[&Tensor],
) -> Result<()> {
    if xas.len() != projections.len() || dys.len() != projections.len() {
        bail!(
            "metal-candle-kernels: {operation}: found {} xa and {} dy, expected one for each of {} projections",
            xas.len(),
            dys.len(),
            projections.len()
        )
    }
    for ((projection, xa), dy) in projections.iter().zip(xas).zip(dys) {
        require_together(operation, &[x, dy])?;
        require_shape(operation, "dy", dy, &with_last_dimension(x, projection.weight.shape()?.0))?;
        require_dtype(operation, "dy", dy, x.dtype())?;
        match (&projection.lora, xa) {
            (None, _) => {}
            (Some(lora), Some(xa)) => {
                require_together(operation, &[x, xa])?;
                require_shape(operation, "xa", xa, &with_last_dimension(x, lora.a.dim(1)?))?;
            }
            (Some(_), None) => {
                bail!("metal-candle-kernels: {operation}: a projection with an adapter has no xa")
            }
        }
    }
    Ok(())
}

/// An error unless the tensors of all projections fit `x` `(.., inner)` and are where it is.
fn check(operation: &str, x: &Tensor, inner: usize, projections: &[Projection]) -> Result<()> {
    require_together(operation, &[x])?;
    for Projection { weight, bias, lora } in projections {
        weight.require_beside(operation, x)?;
        let outer = output_size(operation, *weight, inner)?;
        check_bias(operation, x, *bias, outer)?;
        if let Some(lora) = lora {
            require_together(operation, &[x, lora.a, lora.b])?;
            check_rank(operation, lora, inner, outer)?;
            check_dropout(operation, lora.dropout)?;
        }
    }
    Ok(())
}

/// The tensors of some projections, made ready to be read.
struct Inputs<'p> {
    projections: Vec<InputsOfOne<'p>>,
}

struct InputsOfOne<'p> {
    weight: WeightInput<'p>,
    outer: usize,
    bias: Option<Input>,
    lora: Option<LoraInputs>,
}

struct LoraInputs {
    a: Input,
    b: Input,
    rank: usize,
    scale: f64,
    dropout: Option<Dropout>,
}

/// What is locked for reading of one projection.
struct Reads<'a> {
    weight: WeightRead<'a>,
    bias: Option<Read<'a>>,
    a: Option<Read<'a>>,
    b: Option<Read<'a>>,
}

/// The numbers of one projection, as the type that sums are kept in.
struct Numbers<'a, A: Real> {
    weight: WeightNumbers<'a, A>,
    bias: Option<Cow<'a, [A]>>,
    a: Option<Cow<'a, [A]>>,
    b: Option<Cow<'a, [A]>>,
}

impl<'p> Inputs<'p> {
    /// Of projections that [`check`] found good.
    fn new(projections: &[Projection<'p>]) -> Result<Self> {
        let projections = projections.iter().map(|Projection { weight, bias, lora }| {
            let lora: Option<Result<_>> = lora.map(|Lora { a, b, scale, dropout }| {
                let rank = a.dim(1)?;
                let (a, b) = (Input::contiguous(a)?, Input::contiguous(b)?);
                Ok(LoraInputs { a, b, rank, scale, dropout })
            });
            Ok(InputsOfOne {
                weight: weight.input()?,
                outer: weight.shape()?.0,
                bias: bias.map(Input::contiguous).transpose()?,
                lora: lora.transpose()?,
            })
        });
        Ok(Inputs { projections: projections.collect::<Result<_>>()? })
    }

    fn read(&self) -> Vec<Reads<'_>> {
        self.projections
            .iter()
            .map(|projection| Reads {
                weight: projection.weight.read(),
                bias: projection.bias.as_ref().map(Input::read),
                a: projection.lora.as_ref().map(|lora| lora.a.read()),
                b: projection.lora.as_ref().map(|lora| lora.b.read()),
            })
            .collect()
    }

    fn layers<'a, A: Real>(&self, numbers: &'a [Numbers<'a, A>]) -> Result<Vec<Layer<'a, A>>> {
        let parts = self.projections.iter().zip(numbers);
        parts
            .map(|(projection, numbers)| {
                let low_rank = numbers.a.as_deref().zip(numbers.b.as_deref());
                let adapter =
                    projection.lora.as_ref().zip(low_rank).map(|(lora, (a, b))| Adapter {
                        a,
                        b,
                        rank: lora.rank,
                        scale: A::from_f64(lora.scale),
                        dropout: lora.dropout.and_then(|dropout| {
                            let mask = Box::new(cpu::mask(dropout)?);
                            Some(Dropped { mask, kept: A::from_f64(dropout.kept()) })
                        }),
                    });
                let frozen = matmul::Layer {
                    weight: numbers.weight.values(),
                    outer: projection.outer,
                    bias: numbers.bias.as_deref(),
                };
                Ok(Layer { frozen, adapter })
            })
            .collect()
    }
}

impl Reads<'_> {
    fn numbers<A: Real>(&self) -> Result<Numbers<'_, A>> {
        Ok(Numbers {
            weight: self.weight.numbers()?,
            bias: numbers(&self.bias)?,
            a: numbers(&self.a)?,
            b: numbers(&self.b)?,
        })
    }
}

/// Inverted dropout: `x` of any shape, result of the same shape and dtype. It is its own backward
/// pass: apply it to the gradient.
///
/// # Errors
/// When the probability isn't in `0..1`, `x` isn't a float, or this build doesn't compute on its device.
pub fn dropout(x: &Tensor, dropout: Dropout) -> Result<Tensor> {
    const OPERATION: &str = "dropout";
    require_together(OPERATION, &[x])?;
    check_dropout(OPERATION, Some(dropout))?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return cuda::dropout(OPERATION, x, dropout);
    }
    #[cfg(any(feature = "metal", feature = "metal-emulation", test))]
    if crate::backend::metal::computes(x) {
        return metal::dropout(x, dropout);
    }
    let shape = x.dims();
    let x = Input::contiguous(x)?;
    let x = x.read();
    dispatch!(OPERATION, x.dtype(), T => {
        let mut out = x.slice::<T>()?.to_vec();
        if let Some(mask) = cpu::mask::<Sum<T>>(dropout) {
            cpu::apply(&mut out, &mask, Sum::<T>::from_f64(dropout.kept()));
        }
        Tensor::from_vec(out, shape, &Device::Cpu)
    })
}

fn check_rank(operation: &str, lora: &Lora, inner: usize, outer: usize) -> Result<()> {
    match (lora.a.dims(), lora.b.dims()) {
        ([inputs, rank], [rank_of_b, outputs])
            if *inputs == inner && *outputs == outer && rank == rank_of_b =>
        {
            Ok(())
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
