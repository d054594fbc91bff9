//! Linear layers of rows that lie expert by expert: a grouped product.
//!
//! ```text
//! y = x·W_eᵀ + b_e      dx = dy·W_e          for the rows of each expert e
//! ```

#[cfg(feature = "cuda")]
use super::cuda::grouped as cuda;
use crate::backend::cpu::{Input, Sum, dispatch, unwritten};
use crate::backend::{require_rank, require_shape, require_together};
use crate::devices::computes_on_gpu;
use crate::lora_linear::{Projection, forward_only};
use crate::matmul::cpu::{self, Group, forward_groups};
use crate::matmul::{check_bias, numbers};
use crate::quantized::Weight;
use crate::{arithmetic, batch_invariance, copy, matmul};
use candle_core::{Device, Result, Tensor, bail};

pub(super) const OPERATION: &str = "experts::grouped";

/// An expert: how many rows it has, and the layers that read them.
#[derive(Clone, Debug)]
pub struct Expert<'a> {
    /// How many rows it has.
    pub rows: usize,
    /// As many for all experts, of the same shapes.
    pub layers: Vec<Layer<'a>>,
}

/// A linear layer of an expert.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
    /// `(out, in)`
    pub weight: Weight<'a>,
    /// `(out)`
    pub bias: Option<&'a Tensor>,
}

impl<'a, W: Into<Weight<'a>>> From<W> for Layer<'a> {
    fn from(weight: W) -> Self {
        Self { weight: weight.into(), bias: None }
    }
}

/// `x` `(rows, in)`, whose rows are those of the experts in their order; a result `(rows, out)` like `x` for each layer of
/// an expert.
///
/// # Errors
/// When there are no experts, shapes don't fit, a dtype isn't a float, or the tensors aren't on one device.
pub fn forward(x: &Tensor, experts: &[Expert]) -> Result<Vec<Tensor>> {
    require_rank(OPERATION, "x", x, 2, "(rows, in)")?;
    let inner = x.dim(1)?;
    let shapes = check(x, experts, |(_, inputs)| inputs == inner, "in")?;
    #[cfg(feature = "cuda")]
    if x.device().is_cuda()
        && !batch_invariance::is_on()
        && cuda::takes(x, experts, &shapes)
        && let Some(outputs) = cuda::forward(x, experts, &shapes)?
    {
        return Ok(outputs);
    }
    let rounds_rows =
        || experts.iter().flat_map(|expert| &expert.layers).any(|layer| layer.weight.rounds_rows());
    if computes_on_gpu(x) || batch_invariance::is_on() || rounds_rows() {
        return one_by_one(x, experts, shapes.len());
    }
    on_cpu(x, experts, &shapes)
}

/// The gradient of [`forward`]'s `x` `(rows, in)`, where `dys` are those of its results; `None` for one that is zero.
///
/// # Errors
/// Like [`forward`], and when all of them are zero.
pub fn backward_input(dys: &[Option<&Tensor>], experts: &[Expert]) -> Result<Tensor> {
    let Some(any) = dys.iter().flatten().next() else {
        bail!("metal-candle-kernels: {OPERATION}: no gradient, expected one")
    };
    require_rank(OPERATION, "dy", any, 2, "(rows, out)")?;
    let shapes = check(any, experts, |_| true, "out")?;
    let rows = any.dim(0)?;
    if shapes.len() != dys.len() {
        bail!(
            "metal-candle-kernels: {OPERATION}: {} gradients, expected those of {} weights",
            dys.len(),
            shapes.len()
        )
    }
    for (dy, (outer, _)) in dys.iter().zip(&shapes) {
        let Some(dy) = dy else { continue };
        require_together(OPERATION, &[any, dy])?;
        require_shape(OPERATION, "dy", dy, &[rows, *outer])?;
    }
    #[cfg(feature = "cuda")]
    if any.device().is_cuda()
        && cuda::takes(any, experts, &shapes)
        && let Some(dx) = cuda::backward_input(dys, experts, &shapes)?
    {
        return Ok(dx);
    }
    let mut start = 0;
    let mut parts = Vec::with_capacity(experts.len());
    for Expert { rows, layers } in experts {
        let mut sum: Option<Tensor> = None;
        for (dy, layer) in dys.iter().zip(layers) {
            let Some(dy) = dy else { continue };
            let dx = matmul::linear_backward_input(&dy.narrow(0, start, *rows)?, layer.weight)?;
            sum = Some(match sum {
                Some(sum) => arithmetic::add(&sum, &dx)?,
                None => dx,
            });
        }
        start += rows;
        parts.extend(sum);
    }
    joined(&parts)
}

/// The shapes `(out, in)` of an expert's weights; an error unless all experts have the same, which `fits`, and as many rows as
/// `x` has.
fn check(
    x: &Tensor,
    experts: &[Expert],
    fits: impl Fn((usize, usize)) -> bool,
    what: &str,
) -> Result<Vec<(usize, usize)>> {
    let Some(first) = experts.first() else {
        bail!("metal-candle-kernels: {OPERATION}: no experts, expected one at least")
    };
    let shapes_of = |expert: &Expert| {
        expert.layers.iter().map(|it| it.weight.shape()).collect::<Result<Vec<_>>>()
    };
    let shapes = shapes_of(first)?;
    for expert in experts {
        let found = shapes_of(expert)?;
        if found != shapes || found.is_empty() || !found.iter().all(|shape| fits(*shape)) {
            bail!(
                "metal-candle-kernels: {OPERATION}: an expert has weights {found:?} beside {shapes:?}, expected the same shapes of all, (out, in), to fit the last dimension ({what}) of {:?}",
                x.dims()
            )
        }
        for (layer, (outer, _)) in expert.layers.iter().zip(found) {
            layer.weight.require_beside(OPERATION, x)?;
            check_bias(OPERATION, x, layer.bias, outer)?;
        }
    }
    let rows: usize = experts.iter().map(|expert| expert.rows).sum();
    if rows != x.dim(0)? {
        bail!(
            "metal-candle-kernels: {OPERATION}: the experts have {rows} rows, expected those of {:?}",
            x.dims()
        )
    }
    Ok(shapes)
}

fn one_by_one(x: &Tensor, experts: &[Expert], count: usize) -> Result<Vec<Tensor>> {
    let mut start = 0;
    let mut outputs = vec![Vec::with_capacity(experts.len()); count];
    for Expert { rows, layers } in experts {
        let layers: Vec<_> = layers
            .iter()
            .map(|Layer { weight, bias }| Projection { weight: *weight, bias: *bias, lora: None })
            .collect();
        let found = forward_only(&x.narrow(0, start, *rows)?, &layers)?;
        for (outputs, found) in outputs.iter_mut().zip(found) {
            outputs.push(found);
        }
        start += rows;
    }
    outputs.iter().map(|parts| joined(parts)).collect()
}

fn joined(parts: &[Tensor]) -> Result<Tensor> {
    match parts {
        [part] => Ok(part.clone()),
        parts => copy::join(&parts.iter().collect::<Vec<_>>(), 0),
    }
}

fn on_cpu(x: &Tensor, experts: &[Expert], shapes: &[(usize, usize)]) -> Result<Vec<Tensor>> {
    let (rows, inner) = x.dims2()?;
    let x = Input::contiguous(x)?;
    let x = x.read();
    let layers: Vec<_> = experts.iter().flat_map(|expert| &expert.layers).collect();
    let inputs = layers.iter().map(|layer| layer.weight.input()).collect::<Result<Vec<_>>>()?;
    let reads: Vec<_> = inputs.iter().map(|input| input.read()).collect();
    let biases = layers.iter().map(|layer| layer.bias.map(Input::contiguous).transpose());
    let biases = biases.collect::<Result<Vec<_>>>()?;
    let read_biases: Vec<_> = biases.iter().map(|bias| bias.as_ref().map(Input::read)).collect();
    dispatch!(OPERATION, x.dtype(), T => {
        let weights = reads.iter().map(|it| it.numbers::<Sum<T>>()).collect::<Result<Vec<_>>>()?;
        let biases = read_biases.iter().map(numbers::<Sum<T>>).collect::<Result<Vec<_>>>()?;
        let numbers: Vec<_> = weights.iter().zip(&biases).collect();
        let values = x.values::<Sum<T>>()?;
        let mut outputs: Vec<_> =
            shapes.iter().map(|(outer, _)| unwritten::<T>(rows * outer)).collect();
        let mut rest: Vec<&mut [T]> = outputs.iter_mut().map(|output| &mut output[..]).collect();
        let (mut start, mut ys, mut groups) = (0, Vec::new(), Vec::new());
        for (expert, weights) in experts.iter().zip(numbers.chunks_exact(shapes.len())) {
            let layers = weights.iter().zip(shapes).map(|((weight, bias), (outer, _))| {
                cpu::Layer { weight: weight.values(), outer: *outer, bias: bias.as_deref() }
            });
            let x = values.slice(start * inner..(start + expert.rows) * inner);
            groups.push(Group { rows: expert.rows, x, layers: layers.collect() });
            for (rest, (outer, _)) in rest.iter_mut().zip(shapes) {
                let (y, after) = std::mem::take(rest).split_at_mut(expert.rows * outer);
                *rest = after;
                ys.push(y);
            }
            start += expert.rows;
        }
        forward_groups(inner, &groups, ys);
        let outputs = outputs.into_iter().zip(shapes);
        outputs.map(|(y, (outer, _))| Tensor::from_vec(y, (rows, *outer), &Device::Cpu)).collect()
    })
}
