//! From logits to a token: the largest, or a draw from what truncation leaves.
//!
//! ```text
//! w[i]   = e^{(l[i] - max l) / temperature}
//! top-k  keep w[i] >= the k-th largest
//! top-p  keep the most likely until their w reach p·Σ w
//! min-p  keep w[i] >= m
//! draw   the first i, in the order of ids, where the sum of the kept w exceeds uniform·Σ w
//! ```
//!
//! Top-p is nucleus sampling (Holtzman et al. 2020, <https://arxiv.org/abs/1904.09751>), min-p that of
//! Nguyen et al. 2024 (<https://arxiv.org/abs/2407.01082>). Sums are in f64. The vocabulary is never
//! sorted: the largest of each block of logits show how small a token can be that still counts, and
//! what is above goes on.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::device::cpu::{Input, Sum, dispatch};
use crate::device::{on_gpu, require_rank, require_together, rows_and_columns};
use candle_core::{Device, Result, Tensor, bail};

const OPERATION: &str = "sampling";

/// What is drawn from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Divides the logits, 0 or more: 0 takes the largest.
    pub temperature: f64,
    /// How many of the most likely remain; those as likely as the last of them remain too. 0 is off.
    pub top_k: usize,
    /// The most likely remain whose probabilities together reach this, above 0. 1 is off.
    pub top_p: f64,
    /// Those remain that are at least this share as likely as the likeliest, at most 1. 0 is off.
    pub min_p: f64,
}

/// Buffers of the vocabulary's size, kept from draw to draw.
#[derive(Clone, Debug, Default)]
pub struct Workspace {
    weights: Vec<f64>,
    maxima: Vec<f64>,
    ordered: Vec<f64>,
    candidates: Vec<Candidate>,
}

/// A token that may be drawn, and its probability up to a factor.
#[derive(Clone, Copy, Debug)]
struct Candidate {
    id: u32,
    weight: f64,
}

impl Workspace {
    /// The token that the number `uniform` in `[0, 1)` chooses from the logits of one position. The
    /// likeliest always remains. NaN and negative infinity are never chosen; 0 when nothing else is
    /// there.
    pub fn draw(&mut self, logits: &[f64], options: &Options, uniform: f64) -> u32 {
        if options.temperature == 0.0 {
            return cpu::argmax(logits);
        }
        self.weigh(logits, options.temperature);
        let chosen = if self.truncate(options) {
            pick(&self.candidates, uniform)
        } else {
            self.pick_any(uniform)
        };
        // Rounding can leave a rest of the mass after the last: the likeliest stands in for it.
        chosen.unwrap_or_else(|| cpu::argmax(logits))
    }
}

/// The index of the largest number of each row of `logits` `(.., v)`, the first of equals, as u32
/// `(..)`, where the logits are. NaN and negative infinity are never chosen; 0 when nothing else is there.
///
/// # Errors
/// When `logits` is a scalar or no float, or this build doesn't compute on its device.
pub fn greedy(logits: &Tensor) -> Result<Tensor> {
    require_together(OPERATION, &[logits])?;
    let (rows, columns) = rows_and_columns(OPERATION, "logits", logits)?;
    if columns == 0 {
        bail!("metal-candle-kernels: {OPERATION}: logits have no columns, expected at least 1")
    }
    on_gpu!(logits, gpu => gpu::greedy(logits, (rows, columns)));
    let shape = &logits.dims()[..logits.rank() - 1];
    let logits = Input::contiguous(logits)?;
    let logits = logits.read();
    let ids = dispatch!(OPERATION, logits.dtype(), T => {
        cpu::greedy(rows, columns, logits.values::<Sum<T>>()?)
    });
    Tensor::from_vec(ids, shape, &Device::Cpu)
}

/// The token that the number `uniform` in `[0, 1)` chooses from `logits` `(v)`; see
/// [`Workspace::draw`]. On a GPU only the greedy choice is made there; for a draw the logits come to
/// the host.
///
/// # Errors
/// When `logits` has other than one dimension or is no float, an option is out of its range, or this
/// build doesn't compute on its device.
pub fn sample(logits: &Tensor, options: &Options, uniform: f64) -> Result<u32> {
    require_together(OPERATION, &[logits])?;
    require_rank(OPERATION, "logits", logits, 1, "(v)")?;
    for (name, value, holds, expected) in [
        ("temperature", options.temperature, options.temperature >= 0.0, "0 or more"),
        ("top_p", options.top_p, options.top_p > 0.0, "more than 0"),
        ("min_p", options.min_p, (0.0..=1.0).contains(&options.min_p), "0 to 1"),
        ("uniform", uniform, (0.0..1.0).contains(&uniform), "at least 0 and less than 1"),
    ] {
        if !holds || value.is_nan() {
            bail!("metal-candle-kernels: {OPERATION}: {name} is {value}, expected {expected}")
        }
    }
    if !logits.device().is_cpu() {
        if options.temperature == 0.0 && logits.elem_count() > 0 {
            return greedy(logits)?.to_scalar();
        }
        return sample(&logits.to_device(&Device::Cpu)?, options, uniform);
    }
    let logits = Input::contiguous(logits)?;
    let scores = logits.read().values::<f64>()?.to_vec();
    Ok(Workspace::default().draw(&scores, options, uniform))
}

/// `ln Σ e^{logits}`; not finite when a logit is NaN or positive infinity, or none is above negative
/// infinity.
pub fn log_sum_exp(logits: &[f32]) -> f64 {
    cpu::log_sum_exp(logits)
}

/// Walks through what is kept, in the order of ids, to where the number falls.
fn pick(candidates: &[Candidate], uniform: f64) -> Option<u32> {
    let mass: f64 = candidates.iter().map(|candidate| candidate.weight).sum();
    let mut left = uniform * mass;
    let chosen = candidates.iter().find(|candidate| {
        left -= candidate.weight;
        left < 0.0
    });
    chosen.map(|candidate| candidate.id)
}
