//! Causal attention with grouped key and value heads, in tiles: the scores of a whole sequence never
//! exist (FlashAttention-2, Dao 2023, <https://arxiv.org/abs/2307.08691>).
//!
//! ```text
//! raw = scale·q·kᵀ         z = raw, or c·tanh(raw / c) with soft-capping at c (Gemma 2)
//! lse = ln Σ_j e^{z_j}     p = e^{z - lse}           o = p·v
//!
//! D  = Σ do·o      dp = do·vᵀ      dz = p·(dp - D)      draw = dz·(1 - (z/c)²)
//! dq = scale·draw·k        dk = scale·drawᵀ·q           dv = pᵀ·do
//! ```
//!
//! A head's sink is a score that no key has (gpt-oss; Xiao et al. 2023, <https://arxiv.org/abs/2309.17453>):
//!
//! ```text
//! lse = ln(e^{sink} + Σ_j e^{z_j})          dsink = -Σ e^{sink - lse}·D over the head's queries
//! ```
//!
//! Query `i` of `t` stands at key position `pos = s - t + i` of `s` and sees the keys `j` with
//! `first_key <= j <= pos`, and `pos - j < window` with a sliding window. A query that sees no key
//! gives zeros.
//!
//! [`forward_paged`] is the forward pass for many sequences at once, of any lengths, whose keys and values
//! lie in blocks of a pool.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
mod paged;
#[cfg(test)]
mod tests;

pub use paged::{
    FEW_QUERIES, HOLE, NewTokens, Pool, RoundedPool, Sequence, Sequences, forward_paged,
    forward_paged_new,
};

use crate::backend::cpu::{Input, Real, Sum, dispatch, unwritten};
use crate::backend::{
    dtype_of_sums, on_gpu, record3, require_dtype, require_rank, require_shape, require_together,
};
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
use crate::batch_invariance;
use candle_core::{DType, Device, Result, Tensor, WithDType, bail};

/// How scores are made and which keys are seen.
#[derive(Clone, Debug)]
pub struct Options {
    /// What `q·k` is multiplied by, usually `1 / √head_dim`.
    pub scale: f64,
    /// Scores `z` become `c·tanh(z / c)` (Gemma 2).
    pub softcap: Option<f64>,
    /// A query sees this many keys at most: its own and the ones just before it.
    pub window: Option<usize>,
    /// `(heads)`, of the dtype of the queries: a score of each head that no key has, so that shares of keys add up to less
    /// than 1.
    pub sinks: Option<Tensor>,
}

impl Options {
    /// The same with these sinks, or none.
    pub fn with_sinks(&self, sinks: Option<&Tensor>) -> Options {
        Options { sinks: sinks.cloned(), ..*self }
    }
}

const LAYOUT: &str = "(batch, seq, heads, head_dim)";

/// `(o, log_sum_exp)`: `q` `(batch, t, heads, head_dim)`, `k` and `v` `(batch, s, kv_heads, head_dim)`
/// of the same dtype, `first_key` `(batch, t)` u32, the first key that each query may see (the start of
/// its record in a packed row). `o` is like `q`; `log_sum_exp` `(batch, heads, t)` is f32 (f64 for
/// f64), where no key is seen the sink or `-inf`; [`backward`] wants both back.
///
/// `k` and `v` may be views into a cache: they aren't copied when their last dimension is contiguous.
///
/// With [batch invariance](crate::batch_invariance) a query whose first key is 0 has the bits that [`forward_paged`]
/// gives it over dense pools; on a GPU that takes longer for many. For that, calls on the CPU have more than 4 queries; on
/// CUDA heads are of up to 256 elements, and blocks of a multiple of 16 tokens in 16 bits.
///
/// # Errors
/// When shapes don't fit, `heads` isn't a multiple of `kv_heads`, `s < t`, the window is 0, the
/// softcap isn't positive, dtypes differ, or the tensors aren't on one device; on Metal also when
/// `head_dim` is above 256.
pub fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    first_key: Option<&Tensor>,
    options: &Options,
) -> Result<(Tensor, Tensor)> {
    const OPERATION: &str = "attention::forward";
    let sizes = check(OPERATION, q, k, v, first_key, options)?;
    on_gpu!(q, gpu => {
        gpu::Call::new(OPERATION, sizes, q, k, v, first_key, options)?.forward()
    });
    let (k, v) = (Input::strided_rows(k)?, Input::strided_rows(v)?);
    let q = Input::contiguous(q)?;
    let (q, k, v) = (q.read(), k.read(), v.read());
    dispatch!(OPERATION, q.dtype(), T => {
        let problem = cpu::Problem {
            sizes,
            q: q.values()?,
            keys: cpu::Cache::new(k.storage_values()?, k.layout)?,
            values: cpu::Cache::new(v.storage_values()?, v.layout)?,
            ranges: visible_keys(&sizes, first_key, options)?,
            scale: Sum::<T>::from_f64(options.scale),
            softcap: options.softcap.map(Sum::<T>::from_f64),
            sinks: sink_numbers(options)?,
        };
        let mut o = unwritten::<T>(sizes.q_elements());
        let mut log_sum_exp = unwritten::<Sum<T>>(sizes.batch * sizes.heads * sizes.queries);
        problem.forward(&mut o, &mut log_sum_exp);
        Ok((
            Tensor::from_vec(o, &sizes.q_shape(), &Device::Cpu)?,
            Tensor::from_vec(log_sum_exp, &sizes.row_shape(), &Device::Cpu)?,
        ))
    })
}

/// `o` like [`forward`], recorded in Candle's autograd for `q`, `k` and `v`.
///
/// # Errors
/// Like [`forward`], and when sinks are to get a gradient, which isn't recorded: it is [`backward_sinks`].
pub fn differentiable(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    first_key: Option<&Tensor>,
    options: &Options,
) -> Result<Tensor> {
    if options.sinks.as_ref().is_some_and(Tensor::track_op) {
        bail!(
            "metal-candle-kernels: attention: the gradient of sinks isn't recorded in Candle's autograd, expected sinks that need none; backward_sinks gives it"
        )
    }
    let (o, log_sum_exp) = forward(q, k, v, first_key, options)?;
    let (first_key, options) = (first_key.map(Tensor::detach), options.clone());
    record3("attention", [q, k, v], o, move |[q, k, v], o, d_o| {
        let (dq, dk, dv) = backward(q, k, v, o, &log_sum_exp, first_key.as_ref(), &options, d_o)?;
        Ok([Some(dq), Some(dk), Some(dv)])
    })
}

/// `(dq, dk, dv)` in the shapes and dtype of `q`, `k` and `v`: `o` and `log_sum_exp` from [`forward`],
/// `d_o` like `o`. Probabilities are computed again from `log_sum_exp`.
///
/// # Errors
/// Like [`forward`].
#[allow(clippy::too_many_arguments)]
pub fn backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    o: &Tensor,
    log_sum_exp: &Tensor,
    first_key: Option<&Tensor>,
    options: &Options,
    d_o: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    const OPERATION: &str = "attention::backward";
    let sizes = check(OPERATION, q, k, v, first_key, options)?;
    require_together(OPERATION, &[q, o, log_sum_exp, d_o])?;
    for (name, tensor) in [("o", o), ("d_o", d_o)] {
        require_shape(OPERATION, name, tensor, &sizes.q_shape())?;
        require_dtype(OPERATION, name, tensor, q.dtype())?;
    }
    require_shape(OPERATION, "log_sum_exp", log_sum_exp, &sizes.row_shape())?;
    on_gpu!(q, gpu => {
        require_dtype(OPERATION, "log_sum_exp", log_sum_exp, DType::F32)?;
        gpu::Call::new(OPERATION, sizes, q, k, v, first_key, options)?.backward(o, log_sum_exp, d_o)
    });
    let (k, v) = (Input::strided_rows(k)?, Input::strided_rows(v)?);
    let (q, o, d_o) = (Input::contiguous(q)?, Input::contiguous(o)?, Input::contiguous(d_o)?);
    let log_sum_exp = Input::contiguous(log_sum_exp)?;
    let (q, k, v, o, d_o) = (q.read(), k.read(), v.read(), o.read(), d_o.read());
    let log_sum_exp = log_sum_exp.read();
    dispatch!(OPERATION, q.dtype(), T => {
        let problem = cpu::Problem {
            sizes,
            q: q.values()?,
            keys: cpu::Cache::new(k.storage_values()?, k.layout)?,
            values: cpu::Cache::new(v.storage_values()?, v.layout)?,
            ranges: visible_keys(&sizes, first_key, options)?,
            scale: Sum::<T>::from_f64(options.scale),
            softcap: options.softcap.map(Sum::<T>::from_f64),
            sinks: sink_numbers(options)?,
        };
        let (dq, dk, dv) =
            problem.backward::<T>(o.values()?, log_sum_exp.slice()?, d_o.values()?);
        Ok((
            Tensor::from_vec(dq, &sizes.q_shape(), &Device::Cpu)?,
            Tensor::from_vec(dk, &sizes.k_shape(), &Device::Cpu)?,
            Tensor::from_vec(dv, &sizes.k_shape(), &Device::Cpu)?,
        ))
    })
}

/// The gradient of the sinks of [`forward`], `(heads)` in f32 (f64 for f64): `o`, `log_sum_exp` and `d_o` as [`backward`] takes
/// them.
///
/// # Errors
/// When shapes don't fit, dtypes differ, or the tensors aren't on one device.
pub fn backward_sinks(
    sinks: &Tensor,
    o: &Tensor,
    log_sum_exp: &Tensor,
    d_o: &Tensor,
) -> Result<Tensor> {
    const OPERATION: &str = "attention::backward_sinks";
    require_together(OPERATION, &[sinks, o, log_sum_exp, d_o])?;
    require_rank(OPERATION, "o", o, 4, LAYOUT)?;
    let (batch, queries, heads, head_dim) = o.dims4()?;
    require_shape(OPERATION, "d_o", d_o, o.dims())?;
    require_shape(OPERATION, "log_sum_exp", log_sum_exp, &[batch, heads, queries])?;
    require_shape(OPERATION, "sinks", sinks, &[heads])?;
    require_dtype(OPERATION, "d_o", d_o, o.dtype())?;
    require_dtype(OPERATION, "sinks", sinks, o.dtype())?;
    require_dtype(OPERATION, "log_sum_exp", log_sum_exp, dtype_of_sums(o.dtype()))?;
    on_gpu!(o, gpu => gpu::backward_sinks(sinks, o, log_sum_exp, d_o));
    let [sinks, o, log_sum_exp, d_o] = [sinks, o, log_sum_exp, d_o].map(Input::contiguous);
    let (sinks, o, log_sum_exp, d_o) = (sinks?, o?, log_sum_exp?, d_o?);
    let (sinks, o, log_sum_exp, d_o) = (sinks.read(), o.read(), log_sum_exp.read(), d_o.read());
    dispatch!(OPERATION, o.dtype(), T => {
        let mut gradients = unwritten::<Sum<T>>(heads);
        cpu::backward_sinks(
            [batch, queries, head_dim],
            sinks.values()?,
            o.values()?,
            log_sum_exp.slice()?,
            d_o.values()?,
            &mut gradients,
        );
        Tensor::from_vec(gradients, heads, &Device::Cpu)
    })
}

/// The sinks of a call on the CPU, none where heads have none.
fn sink_numbers<A: Real>(options: &Options) -> Result<Vec<A>> {
    let Some(sinks) = &options.sinks else { return Ok(Vec::new()) };
    let mut numbers = vec![A::ZERO; sinks.elem_count()];
    Input::contiguous(sinks)?.read().values()?.read(0, &mut numbers);
    Ok(numbers)
}

/// The sizes of a call, checked.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

impl Sizes {
    fn q_shape(&self) -> [usize; 4] {
        [self.batch, self.queries, self.heads, self.head_dim]
    }

    fn k_shape(&self) -> [usize; 4] {
        [self.batch, self.keys, self.kv_heads, self.head_dim]
    }

    fn row_shape(&self) -> [usize; 3] {
        [self.batch, self.heads, self.queries]
    }

    fn q_elements(&self) -> usize {
        self.q_shape().iter().product()
    }

    /// Whether a GPU gives the bits that it gives over pools.
    #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
    fn are_bits_fixed(&self) -> bool {
        batch_invariance::is_on() && self.head_dim <= 256
    }
}

fn check(
    operation: &str,
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    first_key: Option<&Tensor>,
    options: &Options,
) -> Result<Sizes> {
    require_together(operation, &[q, k, v])?;
    for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
        require_rank(operation, name, tensor, 4, LAYOUT)?;
        require_dtype(operation, name, tensor, q.dtype())?;
    }
    let (batch, queries, heads, head_dim) = q.dims4()?;
    let (_, keys, kv_heads, _) = k.dims4()?;
    require_shape(operation, "k", k, &[batch, keys, kv_heads, head_dim])?;
    require_shape(operation, "v", v, &[batch, keys, kv_heads, head_dim])?;
    check_heads(operation, heads, kv_heads)?;
    if keys < queries {
        bail!(
            "metal-candle-kernels: {operation}: {queries} queries but only {keys} keys, expected at least as many keys"
        )
    }
    if let Some(first_key) = first_key {
        require_together(operation, &[q, first_key])?;
        require_shape(operation, "first_key", first_key, &[batch, queries])?;
        require_dtype(operation, "first_key", first_key, DType::U32)?;
    }
    check_options(operation, q, heads, options)?;
    Ok(Sizes { batch, queries, keys, heads, kv_heads, head_dim })
}

fn check_heads(operation: &str, heads: usize, kv_heads: usize) -> Result<()> {
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        bail!(
            "metal-candle-kernels: {operation}: q has {heads} heads and k has {kv_heads}, expected a multiple"
        )
    }
    Ok(())
}

fn check_options(operation: &str, q: &Tensor, heads: usize, options: &Options) -> Result<()> {
    if let Some(sinks) = &options.sinks {
        require_together(operation, &[q, sinks])?;
        require_shape(operation, "sinks", sinks, &[heads])?;
        require_dtype(operation, "sinks", sinks, q.dtype())?;
    }
    if options.window == Some(0) {
        bail!("metal-candle-kernels: {operation}: the window is 0, expected at least 1 key")
    }
    if let Some(softcap) = options.softcap
        && !(softcap > 0.0 && softcap.is_finite())
    {
        bail!(
            "metal-candle-kernels: {operation}: the softcap is {softcap}, expected a positive number"
        )
    }
    Ok(())
}

/// For every query of every row, `[first, last)` of the keys it sees.
fn visible_keys(
    sizes: &Sizes,
    first_key: Option<&Tensor>,
    options: &Options,
) -> Result<Vec<(usize, usize)>> {
    let first_key = first_key.map(Input::contiguous).transpose()?;
    let first_key = first_key.as_ref().map(Input::read);
    let first_key = first_key.as_ref().map(|read| read.slice::<u32>()).transpose()?;
    let ranges = (0..sizes.batch * sizes.queries).map(|row| {
        let end = sizes.keys - sizes.queries + row % sizes.queries + 1;
        let start = first_key.and_then(|first| first.get(row)).map_or(0, |first| *first as usize);
        let window = options.window.map_or(0, |window| end.saturating_sub(window));
        (start.max(window).min(end), end)
    });
    Ok(ranges.collect())
}
