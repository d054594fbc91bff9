//! The language model head and the cross entropy as one operation, a chunk of rows at a time, so that
//! the logits of a whole batch never exist.
//!
//! ```text
//! raw  = scale·h·Wᵀ           z = raw, or c·tanh(raw / c) with soft-capping at c
//! loss = Σ_rows w·Σ_t a·(lse(z) - z[t])
//! draw = w·(Σ_t a·softmax(z) - Σ_t a·onehot(t))·(1 - (z/c)²)
//! dh   = scale·draw·W         dW = scale·drawᵀ·h
//! ```
//!
//! A row has one target `t` whose share `a` is 1, or several, as a teacher's likeliest tokens with their probabilities.
//! Rows whose first target is [`IGNORE`] cost nothing and have a zero gradient. [`Targets`] come from the host, which
//! knows them, so that nothing has to be read back to find those rows. With one target each row's loss is its negative
//! log-probability; where a loss of these decides about the weights, they are 1 first, and the rows of `dh` are
//! multiplied afterwards ([`crate::arithmetic::scale_rows`]).

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
pub(crate) mod metal;
#[cfg(test)]
mod tests;

use crate::arithmetic;
use crate::backend::cpu::{Input, Sum, dispatch, zeros};
use crate::backend::{on_gpu, record2, require_rank, require_together};
use crate::matmul::output_size;
use candle_core::{Device, Result, Tensor, WithDType, bail};

/// The first target of a row that doesn't count, and what stands in a row with fewer targets than others.
pub const IGNORE: u32 = u32::MAX;

/// What the `n` rows are to predict.
#[derive(Clone, Copy, Debug)]
pub struct Targets<'a> {
    /// `(n, k)`, row-major: `k` tokens below `v` a row, or [`IGNORE`]; those of a row differ.
    pub tokens: &'a [u32],
    /// `(n, k)`: the share of each, finite and not negative; 1 for all without.
    pub shares: Option<&'a [f32]>,
    /// `(n)`: what the row's loss is multiplied by; 1 for all without.
    pub weights: Option<&'a [f32]>,
}

impl<'a> Targets<'a> {
    /// One target a row.
    pub fn new(tokens: &'a [u32]) -> Self {
        Self { tokens, shares: None, weights: None }
    }
}

/// How logits are made and how many exist at a time.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Logits `z` become `c·tanh(z / c)` (Gemma 2).
    pub softcap: Option<f64>,
    /// Logits are this times `h·Wᵀ`, before the softcap (Granite divides them); usually 1.
    pub logit_scale: f64,
    /// Rows that share the reading of the weight, a block of whose logits exists at a time; on a GPU as many
    /// as fit half a GiB (CUDA) or 128 MiB (Metal) instead.
    pub chunk: usize,
    /// Whether [`Statistics`] of the rows are wanted.
    pub statistics: bool,
}

/// A row that counts.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    pub row: usize,
    pub weight: f32,
    /// The sum of its targets' shares.
    pub share: f32,
}

/// The rows that count.
#[derive(Clone, Debug, Default)]
pub(crate) struct AllCounted {
    pub rows: Vec<Counted>,
    /// Of each, as many as the next number says: its targets and their shares.
    pub tokens: Vec<u32>,
    pub shares: Vec<f32>,
    pub width: usize,
}

impl AllCounted {
    /// Those of `n` rows.
    pub fn find(operation: &str, targets: &Targets, n: usize, v: usize) -> Result<Self> {
        let Targets { tokens, shares, weights } = *targets;
        let width = tokens.len().checked_div(n).unwrap_or(1);
        if tokens.len() != n * width || (width == 0 && n > 0) {
            bail!(
                "metal-candle-kernels: {operation}: found {} targets, expected one for each of {n} rows of hidden, or as \
                 many for each",
                tokens.len()
            )
        }
        if let Some(shares) = shares
            && shares.len() != tokens.len()
        {
            bail!(
                "metal-candle-kernels: {operation}: found {} shares, expected one for each of {} targets",
                shares.len(),
                tokens.len()
            )
        }
        if let Some(weights) = weights
            && weights.len() != n
        {
            bail!(
                "metal-candle-kernels: {operation}: found {} weights, expected one for each of {n} rows of hidden",
                weights.len()
            )
        }
        let mut counted = Self { width, ..Self::default() };
        let mut sorted = Vec::with_capacity(width);
        for (row, of_row) in tokens.chunks_exact(width).enumerate() {
            if of_row[0] == IGNORE {
                continue;
            }
            sorted.clear();
            sorted.extend(of_row.iter().copied().filter(|token| *token != IGNORE));
            sorted.sort_unstable();
            if let Some(token) = sorted.last().filter(|token| **token as usize >= v) {
                bail!(
                    "metal-candle-kernels: {operation}: target {token} of row {row} is outside the vocabulary, expected less than {v}"
                )
            }
            if let Some(twice) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
                bail!(
                    "metal-candle-kernels: {operation}: target {} stands twice in row {row}",
                    twice[0]
                )
            }
            let first = counted.shares.len();
            for (index, token) in of_row.iter().enumerate() {
                let share = shares.map_or(1.0, |shares| shares[row * width + index]);
                if !(share >= 0.0 && share.is_finite()) {
                    bail!(
                        "metal-candle-kernels: {operation}: the share of target {token} of row {row} is {share}, \
                         expected a number that isn't negative"
                    )
                }
                counted.shares.push(if *token == IGNORE { 0.0 } else { share });
            }
            counted.tokens.extend_from_slice(of_row);
            let share = counted.shares[first..].iter().map(|share| f64::from(*share)).sum::<f64>();
            let weight = weights.map_or(1.0, |weights| weights[row]);
            counted.rows.push(Counted { row, weight, share: share as f32 });
        }
        Ok(counted)
    }
}

/// What the distributions of the rows are like, in f32 (f64 for f64), with 0 for rows that don't count.
#[derive(Debug)]
pub struct Statistics {
    /// The entropy of each row's distribution, in nats, `(n)`.
    pub entropies: Tensor,
    /// 1 where the first target is the likeliest token, or the first of those, else 0, `(n)`.
    pub hits: Tensor,
}

/// What [`forward`] returns.
#[derive(Debug)]
pub struct Output {
    /// A scalar: the weighted sum over the counted rows, in nats; f32 (f64 for f64).
    pub loss: Tensor,
    /// The loss of each row without its weight, 0 where it doesn't count, `(n)`; f32 (f64 for f64).
    pub losses: Tensor,
    /// Where [`Options::statistics`] asks for it.
    pub statistics: Option<Statistics>,
    /// The number of counted rows.
    pub count: usize,
    /// The gradient of the sum with respect to hidden, `(n, d)` in its dtype.
    pub dhidden: Option<Tensor>,
    /// The gradient of the sum with respect to the weight's leading columns that need it, `(v, trained)`, f32 (f64
    /// for f64).
    pub dweight: Option<Tensor>,
}

/// The loss and, when needed, its gradients: `hidden` `(n, d)`, `weight` `(v, d)` of which the first `trained`
/// columns need a gradient.
///
/// # Errors
/// When shapes or dtypes don't fit, `trained` is more than `d`, `targets` aren't what they have to be, the chunk is 0, the
/// softcap isn't positive, or the tensors aren't on one device.
pub fn forward(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Targets,
    options: &Options,
    need_dhidden: bool,
    trained: usize,
) -> Result<Output> {
    const OPERATION: &str = "cross_entropy";
    require_together(OPERATION, &[hidden, weight])?;
    require_rank(OPERATION, "hidden", hidden, 2, "(n, d)")?;
    let (n, d) = hidden.dims2()?;
    let v = output_size(OPERATION, weight.into(), d)?;
    if trained > d {
        bail!(
            "metal-candle-kernels: {OPERATION}: {trained} columns of the weight are trained, expected at most {d}"
        )
    }
    if options.chunk == 0 {
        bail!("metal-candle-kernels: {OPERATION}: the chunk is 0, expected at least 1 row")
    }
    if let Some(softcap) = options.softcap
        && !(softcap > 0.0 && softcap.is_finite())
    {
        bail!(
            "metal-candle-kernels: {OPERATION}: the softcap is {softcap}, expected a positive number"
        )
    }
    let counted = AllCounted::find(OPERATION, targets, n, v)?;
    on_gpu!(hidden, gpu => {
        let counted = &counted;
        let chunk = rows_of_chunk(counted.rows.len(), v, gpu::MEMORY);
        gpu::Problem { hidden, weight, counted, options, need_dhidden, trained }
            .run(OPERATION, chunk)
    });
    let (hidden, weight) = (Input::contiguous(hidden)?, Input::contiguous(weight)?);
    let (hidden, weight) = (hidden.read(), weight.read());
    dispatch!(OPERATION, hidden.dtype(), T => {
        let problem = cpu::Problem {
            d,
            v,
            hidden: hidden.slice::<T>()?,
            weight: weight.values()?,
            counted: &counted,
            options,
        };
        let mut dhidden = need_dhidden.then(|| zeros::<T>(n * d));
        let mut dweight = (trained > 0).then(|| zeros::<Sum<T>>(v * trained));
        let columns = dweight.as_deref_mut().map(|dweight| (dweight, trained));
        let found = problem.run(dhidden.as_deref_mut(), columns);
        let loss = Tensor::from_vec(vec![Sum::<T>::from_f64(found.loss)], (), &Device::Cpu)?;
        let of_rows = |of_counted: Vec<Sum<T>>| {
            let mut rows = zeros::<Sum<T>>(n);
            for (counted, value) in counted.rows.iter().zip(of_counted) {
                rows[counted.row] = value;
            }
            Tensor::from_vec(rows, n, &Device::Cpu)
        };
        let statistics = match options.statistics {
            true => Some(Statistics {
                entropies: of_rows(found.entropies)?,
                hits: of_rows(found.hits)?,
            }),
            false => None,
        };
        let dhidden = dhidden.map(|dhidden| Tensor::from_vec(dhidden, (n, d), &Device::Cpu));
        let dweight = dweight.map(|dweight| Tensor::from_vec(dweight, (v, trained), &Device::Cpu));
        Ok(Output {
            loss,
            losses: of_rows(found.losses)?,
            statistics,
            count: counted.rows.len(),
            dhidden: dhidden.transpose()?,
            dweight: dweight.transpose()?,
        })
    })
}

/// On a GPU, rows of logits begin at a multiple of this many elements.
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
const ALIGNMENT: usize = 8;

/// How many rows there are in a chunk on a GPU: as many as fit so many bytes, about as many in each
/// chunk, and a multiple of what matrix products are made of.
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
fn rows_of_chunk(counted: usize, v: usize, memory: usize) -> usize {
    const ROWS: usize = 128;
    let of_row = v.next_multiple_of(ALIGNMENT).max(1) * size_of::<f32>();
    let most = (memory / of_row / ROWS).max(1) * ROWS;
    let chunks = counted.div_ceil(most).max(1);
    counted.div_ceil(chunks).next_multiple_of(ROWS)
}

/// The loss and the number of counted rows like [`forward`], recorded in Candle's autograd for `hidden`
/// and `weight`. Their gradients are made here already, as far as they are variables or follow from
/// some.
///
/// # Errors
/// Like [`forward`].
pub fn differentiable(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &[u32],
    options: &Options,
) -> Result<(Tensor, usize)> {
    let trained = if weight.track_op() { weight.dim(1)? } else { 0 };
    let needs = (hidden.track_op(), trained);
    let output = forward(hidden, weight, &Targets::new(targets), options, needs.0, needs.1)?;
    let Output { loss, count, dhidden, dweight, .. } = output;
    let loss = record2("cross_entropy", [hidden, weight], loss, move |[_, weight], _, dy| {
        let scaled = |gradient: &Tensor| arithmetic::scale_by(gradient, dy);
        let dweight = dweight.as_ref().map(|dweight| scaled(dweight)?.to_dtype(weight.dtype()));
        Ok([dhidden.as_ref().map(scaled).transpose()?, dweight.transpose()?])
    })?;
    Ok((loss, count))
}
