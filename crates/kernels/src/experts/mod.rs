//! A mixture of experts: which of them a token has, and the sum of what they give (Shazeer et al. 2017,
//! <https://arxiv.org/abs/1701.06538>).
//!
//! ```text
//! p = softmax(logits)      S: the k largest, the first of equals
//! w_j = p_j / Σ_{i ∈ S} p_i  (normalized),  or p_j           j ∈ S
//!
//! out[t] = Σ_j w[t, j]·y[places[t, j]]
//! dy[places[t, j]] = w[t, j]·dout[t]      dw[t, j] = dout[t]·y[places[t, j]]
//! ```
//!
//! [`Routes`] are the host's choice, which knows how many rows each expert has. Where no gradient is wanted, a CUDA device
//! does all of it by itself, of experts that [`routed`] is for.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
pub mod grouped;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
// Only CUDA makes layers of them.
#[cfg_attr(not(feature = "cuda"), allow(dead_code))]
pub mod routed;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{Input, Sum, dispatch, unwritten};
use crate::backend::{
    dtype_of_sums, on_gpu, require_dtype, require_rank, require_shape, require_together,
};
use crate::copy;
use candle_core::{DType, Device, Result, Tensor, bail};

const COMBINE: &str = "experts::combine";

/// Which experts the tokens of a batch have.
#[derive(Clone, Debug)]
pub struct Routes {
    /// How many experts there are.
    count: usize,
    /// Those that a token has.
    active: usize,
    /// `(tokens · active)`, those of a token with the largest weight first.
    chosen: Vec<usize>,
    /// Of the chosen ones.
    weights: Vec<f64>,
    /// `softmax(logits)` of all, where the weights aren't normalised.
    probabilities: Option<Vec<f64>>,
}

/// The rows of all experts, one expert's after the other's, each in the order of tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dispatch {
    /// `(rows)`: the token that each row is of.
    pub tokens: Vec<u32>,
    /// `(tokens · active)`: the row of each token's choice.
    pub places: Vec<u32>,
    /// The experts that have rows, in their order, and how many.
    pub experts: Vec<(usize, usize)>,
}

impl Routes {
    /// The choice of `active` experts for each token by `logits` `(tokens, experts)` of floats.
    ///
    /// # Errors
    /// When `logits` isn't such a matrix, has fewer columns than `active`, or can't be read.
    pub fn new(logits: &Tensor, active: usize, normalized: bool) -> Result<Self> {
        const OPERATION: &str = "experts::route";
        require_rank(OPERATION, "logits", logits, 2, "(tokens, experts)")?;
        let (tokens, count) = logits.dims2()?;
        if active == 0 || active > count {
            bail!(
                "metal-candle-kernels: {OPERATION}: a token has {active} experts, expected 1 to {count}"
            )
        }
        let logits = numbers(logits)?;
        let mut chosen = Vec::with_capacity(tokens * active);
        let mut weights = Vec::with_capacity(tokens * active);
        let mut probabilities = (!normalized).then(|| Vec::with_capacity(tokens * count));
        let mut order: Vec<usize> = Vec::with_capacity(count);
        for logits in logits.chunks_exact(count) {
            order.clear();
            order.extend(0..count);
            let larger_first =
                |a: &usize, b: &usize| logits[*b].total_cmp(&logits[*a]).then(a.cmp(b));
            if active < count {
                order.select_nth_unstable_by(active, larger_first);
                order.truncate(active);
            }
            order.sort_unstable_by(larger_first);
            let largest = logits[order[0]];
            let weight = |expert: &usize| (logits[*expert] - largest).exp();
            let sum: f64 = match &mut probabilities {
                None => order.iter().map(weight).sum(),
                Some(all) => {
                    let sum = (0..count).map(|expert| weight(&expert)).sum();
                    all.extend((0..count).map(|expert| weight(&expert) / sum));
                    sum
                }
            };
            weights.extend(order.iter().map(|expert| weight(expert) / sum));
            chosen.extend(&order);
        }
        Ok(Self { count, active, chosen, weights, probabilities })
    }

    /// The weights `(tokens, active)` on a device, in f32, or in f64 where `dtype` is.
    ///
    /// # Errors
    /// When the device has no memory.
    pub fn weights(&self, dtype: DType, device: &Device) -> Result<Tensor> {
        let shape = (self.tokens(), self.active);
        on_device(self.weights.clone(), shape, dtype_of_sums(dtype), device)
    }

    /// How many tokens there are.
    pub fn tokens(&self) -> usize {
        self.chosen.len() / self.active
    }

    /// Where the rows of the experts are.
    pub fn dispatch(&self) -> Dispatch {
        let mut starts = vec![0usize; self.count + 1];
        for expert in &self.chosen {
            starts[expert + 1] += 1;
        }
        let counts = starts[1..].iter().copied().enumerate();
        let experts = counts.filter(|(_, rows)| *rows > 0).collect();
        for expert in 0..self.count {
            starts[expert + 1] += starts[expert];
        }
        let mut tokens = vec![0; self.chosen.len()];
        let mut places = Vec::with_capacity(self.chosen.len());
        for (choice, expert) in self.chosen.iter().enumerate() {
            let place = starts[*expert];
            starts[*expert] += 1;
            tokens[place] = (choice / self.active) as u32;
            places.push(place as u32);
        }
        Dispatch { tokens, places, experts }
    }

    /// The gradient of the logits `(tokens, experts)` in the dtype of `dweights` `(tokens, active)`, that of
    /// [`Self::weights`].
    ///
    /// # Errors
    /// When the shape is another one, or the device fails.
    pub fn backward(&self, dweights: &Tensor) -> Result<Tensor> {
        const OPERATION: &str = "experts::route_backward";
        let Self { count, active, .. } = *self;
        require_shape(OPERATION, "dweights", dweights, &[self.tokens(), active])?;
        let dw = numbers(dweights)?;
        let mut gradient = vec![0.0; self.tokens() * count];
        let choices = self.chosen.chunks_exact(active).zip(self.weights.chunks_exact(active));
        let rows = gradient.chunks_exact_mut(count).zip(choices).zip(dw.chunks_exact(active));
        for (token, ((row, (chosen, weights)), dw)) in rows.enumerate() {
            let mean: f64 = weights.iter().zip(dw).map(|(w, dw)| w * dw).sum();
            if let Some(probabilities) = &self.probabilities {
                let of_token = &probabilities[token * count..][..count];
                for (gradient, p) in row.iter_mut().zip(of_token) {
                    *gradient = -p * mean;
                }
                for ((expert, w), dw) in chosen.iter().zip(weights).zip(dw) {
                    row[*expert] += w * dw;
                }
            } else {
                for ((expert, w), dw) in chosen.iter().zip(weights).zip(dw) {
                    row[*expert] = w * (dw - mean);
                }
            }
        }
        on_device(gradient, (self.tokens(), count), dweights.dtype(), dweights.device())
    }
}

fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    let on_host = copy::contiguous(tensor)?.to_device(&Device::Cpu)?;
    on_host.to_dtype(DType::F64)?.flatten_all()?.to_vec1()
}

fn on_device(
    numbers: Vec<f64>,
    shape: (usize, usize),
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    Tensor::from_vec(numbers, shape, &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
}

/// The weighted sums of the rows of `y` `(rows, d)` for each token, `(tokens, d)` in the dtype of `y`: `weights`
/// `(tokens, k)` in f32 (f64 for f64), `places` `(tokens, k)` u32 less than `rows`.
///
/// On a GPU the places aren't looked at from the host: one that isn't less than `rows` gives NaN.
///
/// # Errors
/// When shapes or dtypes don't fit, a place is none (on the CPU), or the tensors aren't on one device.
pub fn combine(y: &Tensor, weights: &Tensor, places: &Tensor) -> Result<Tensor> {
    let Sizes { rows, columns, tokens, active } = check(COMBINE, y, weights, places)?;
    on_gpu!(y, gpu => gpu::combine(y, weights, places));
    let [y, weights, places] = [y, weights, places].map(Input::contiguous);
    let (y, weights, places) = (y?, weights?, places?);
    let (y, weights, places) = (y.read(), weights.read(), places.read());
    let places = places.slice::<u32>()?;
    check_places(COMBINE, places, rows)?;
    dispatch!(COMBINE, y.dtype(), T => {
        let mut out = unwritten::<T>(tokens * columns);
        let rows = cpu::Choices { columns, active, weights: weights.slice::<Sum<T>>()?, places };
        rows.combine(y.slice::<T>()?, &mut out);
        Tensor::from_vec(out, (tokens, columns), &Device::Cpu)
    })
}

/// What [`combine_backward`] returns.
#[derive(Debug)]
pub struct Gradients {
    /// `(rows, d)` in the dtype of `y`.
    pub dy: Tensor,
    /// `(tokens, k)`, f32 (f64 for f64).
    pub dweights: Tensor,
}

/// The gradients of [`combine`]: its arguments, in which each row is exactly one token's choice, and `dout` `(tokens, d)`
/// like its result.
///
/// # Errors
/// Like [`combine`], and when there are more or fewer rows than choices.
pub fn combine_backward(
    y: &Tensor,
    weights: &Tensor,
    places: &Tensor,
    dout: &Tensor,
) -> Result<Gradients> {
    const OPERATION: &str = "experts::combine_backward";
    let Sizes { rows, columns, tokens, active } = check(OPERATION, y, weights, places)?;
    require_together(OPERATION, &[y, dout])?;
    require_shape(OPERATION, "dout", dout, &[tokens, columns])?;
    require_dtype(OPERATION, "dout", dout, y.dtype())?;
    if rows != tokens * active {
        bail!(
            "metal-candle-kernels: {OPERATION}: y has {rows} rows, expected those of {tokens} tokens with {active} each"
        )
    }
    on_gpu!(y, gpu => gpu::combine_backward(y, weights, places, dout));
    let [y, weights, places, dout] = [y, weights, places, dout].map(Input::contiguous);
    let (y, weights, places, dout) = (y?, weights?, places?, dout?);
    let (y, weights, places, dout) = (y.read(), weights.read(), places.read(), dout.read());
    let places = places.slice::<u32>()?;
    check_places(OPERATION, places, rows)?;
    check_each_once(OPERATION, places)?;
    dispatch!(OPERATION, y.dtype(), T => {
        let (mut dy, mut dw) = (unwritten::<T>(rows * columns), unwritten::<Sum<T>>(rows));
        let choices = cpu::Choices { columns, active, weights: weights.slice::<Sum<T>>()?, places };
        choices.backward(y.slice::<T>()?, dout.slice::<T>()?, &mut dy, &mut dw);
        Ok(Gradients {
            dy: Tensor::from_vec(dy, (rows, columns), &Device::Cpu)?,
            dweights: Tensor::from_vec(dw, (tokens, active), &Device::Cpu)?,
        })
    })
}

struct Sizes {
    rows: usize,
    columns: usize,
    tokens: usize,
    active: usize,
}

fn check(operation: &str, y: &Tensor, weights: &Tensor, places: &Tensor) -> Result<Sizes> {
    require_together(operation, &[y, weights, places])?;
    require_rank(operation, "y", y, 2, "(rows, d)")?;
    require_rank(operation, "weights", weights, 2, "(tokens, k)")?;
    let ((rows, columns), (tokens, active)) = (y.dims2()?, weights.dims2()?);
    require_dtype(operation, "weights", weights, dtype_of_sums(y.dtype()))?;
    require_shape(operation, "places", places, &[tokens, active])?;
    require_dtype(operation, "places", places, DType::U32)?;
    Ok(Sizes { rows, columns, tokens, active })
}

fn check_places(operation: &str, places: &[u32], rows: usize) -> Result<()> {
    match places.iter().find(|place| **place as usize >= rows) {
        None => Ok(()),
        Some(place) => bail!(
            "metal-candle-kernels: {operation}: place {place} is outside of y, expected less than {rows}"
        ),
    }
}

/// An error unless each of as many rows as there are places is one of them.
fn check_each_once(operation: &str, places: &[u32]) -> Result<()> {
    let mut seen = vec![false; places.len()];
    for place in places {
        if std::mem::replace(&mut seen[*place as usize], true) {
            bail!(
                "metal-candle-kernels: {operation}: row {place} is the choice of two tokens, expected one"
            )
        }
    }
    Ok(())
}
