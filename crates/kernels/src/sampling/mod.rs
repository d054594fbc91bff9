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
//! Nguyen et al. 2024 (<https://arxiv.org/abs/2407.01082>). The vocabulary is never sorted. On the CPU
//! sums are in f64, and the largest of each block of logits show how small a token can be that still
//! counts; what is above goes on. On a GPU sums are whole numbers of some fraction of the largest `w`, and
//! the bounds of top-k and top-p are searched for bin by bin. Many rows are drawn from at once, each in its own
//! way; what one gives doesn't depend on the others.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
mod gpu;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
pub(crate) mod tests;

use crate::backend::cpu::{Input, Sum, dispatch, for_each_chunk};
use crate::backend::{on_gpu, require_rank, require_together, rows_and_columns};
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
use crate::host::Download;
use crate::host::Downloads;
use candle_core::{Device, Result, Tensor, bail};
use std::cell::RefCell;

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
#[derive(Default)]
struct Workspace {
    logits: Vec<f64>,
    scores: Vec<f64>,
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
    fn draw(&mut self, logits: &[f64], options: &Options, uniform: f64) -> u32 {
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

/// What changes the logit of one token before the choice, in this order.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adjustment {
    /// The token.
    pub id: u32,
    /// Added to the logit; 0 is off.
    pub bias: f64,
    /// Divides the logit, or multiplies it when it is below 0; above 0, 1 is off.
    pub penalty: f64,
    /// Taken from the logit; 0 is off.
    pub subtracted: f64,
}

impl Adjustment {
    /// One that changes nothing yet.
    pub fn of(id: u32) -> Adjustment {
        Adjustment { id, bias: 0.0, penalty: 1.0, subtracted: 0.0 }
    }

    /// The logit afterwards.
    pub fn apply(&self, logit: f64) -> f64 {
        let logit = logit + self.bias;
        let logit = if logit < 0.0 { logit * self.penalty } else { logit / self.penalty };
        logit - self.subtracted
    }
}

/// What [`choose`] finds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// A token.
    Token {
        /// Its number.
        id: u32,
        /// Its natural log probability by the logits as they are: before adjustments, temperature
        /// and truncation. GPUs make its exponentials in f32.
        logprob: f64,
    },
    /// No distribution, as there is a logit that is NaN or positive infinity.
    Broken {
        /// The first of them.
        id: u32,
        /// NaN or infinity.
        logit: f32,
    },
    /// No distribution, as no logit is above negative infinity.
    Nothing,
}

/// How the token of one row is chosen.
#[derive(Clone, Debug, PartialEq)]
pub struct Draw {
    /// What changes the logits first; ids ascend.
    pub adjustments: Vec<Adjustment>,
    /// What is drawn from.
    pub options: Options,
    /// What chooses, in `[0, 1)`.
    pub uniform: f64,
}

/// The token of each row of `logits` `(rows, v)` that a draw chooses: what the number `uniform` says of the
/// logits after the adjustments. The logits stay as they are.
///
/// A GPU chooses where the logits are, for all rows at once, and only what is found comes to the host. There
/// adjusted logits are rounded to f32, what is kept follows from the logits instead of `w`, and `w` is rounded
/// to a fraction of the largest, so that the same logits always give the same token.
///
/// # Errors
/// When `logits` isn't a matrix of floats with a row for each draw, an option is out of its range, an adjustment
/// is for no token or isn't finite, or this build doesn't compute on its device.
pub fn choose(logits: &Tensor, draws: &[Draw]) -> Result<Vec<Choice>> {
    begin(logits, draws, None)?.wait()
}

/// Tokens that are being chosen.
#[derive(Debug)]
pub struct Choices(State);

#[derive(Debug)]
enum State {
    Known(Vec<Choice>),
    #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
    Launched(gpu::Launched, Option<Download>),
}

impl Choices {
    /// The tokens `(rows)` u32, where they are made; 0 in a row without a choice.
    ///
    /// # Errors
    /// When the device fails.
    pub fn ids(&self) -> Result<Tensor> {
        match &self.0 {
            State::Known(choices) => {
                let id = |choice: &Choice| match choice {
                    Choice::Token { id, .. } => *id,
                    Choice::Broken { .. } | Choice::Nothing => 0,
                };
                Tensor::from_iter(choices.iter().map(id), &Device::Cpu)
            }
            #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
            State::Launched(launched, _) => launched.ids(),
        }
    }

    /// What was chosen.
    ///
    /// # Errors
    /// When the device fails.
    pub fn wait(self) -> Result<Vec<Choice>> {
        match self.0 {
            State::Known(choices) => Ok(choices),
            #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
            State::Launched(launched, download) => {
                let words = match download {
                    Some(download) => download.wait()?,
                    None => launched.words.flatten_all()?.to_vec1()?,
                };
                launched.choices(&words)
            }
        }
    }
}

/// Begins what [`choose`] does. On CUDA, work that is launched before [`Choices::wait`] isn't waited for there with
/// `downloads` of the logits' device.
///
/// # Errors
/// As [`choose`].
pub fn begin(logits: &Tensor, draws: &[Draw], downloads: Option<&Downloads>) -> Result<Choices> {
    require_together(OPERATION, &[logits])?;
    require_rank(OPERATION, "logits", logits, 2, "(rows, v)")?;
    let (rows, vocabulary) = logits.dims2()?;
    if rows != draws.len() {
        let found = draws.len();
        bail!(
            "metal-candle-kernels: {OPERATION}: {found} draws, expected one for each of {rows} rows"
        )
    }
    for Draw { adjustments, options, uniform } in draws {
        check_options(options, *uniform)?;
        check(adjustments, vocabulary)?;
    }
    if vocabulary == 0 {
        return Ok(Choices(State::Known(vec![Choice::Nothing; rows])));
    }
    if rows == 0 {
        return Ok(Choices(State::Known(Vec::new())));
    }
    on_gpu!(logits, backend => {
        let launched = backend::choose(logits, draws)?;
        let download = downloads.map(|it| it.begin(&launched.words)).transpose()?;
        Ok(Choices(State::Launched(launched, download)))
    });
    // The CPU has no other work meanwhile.
    let _ = downloads;
    let logits = Input::contiguous(logits)?;
    let logits = logits.read();
    let logits = logits.values::<f64>()?;
    let mut choices = vec![Choice::Nothing; rows];
    for_each_chunk(&mut choices, 1, |row, choice| {
        thread_local! {
            static WORKSPACE: RefCell<Workspace> = RefCell::default();
        }
        WORKSPACE.with_borrow_mut(|workspace| {
            let mut scratch = std::mem::take(&mut workspace.logits);
            let range = row * vocabulary..(row + 1) * vocabulary;
            choice[0] = workspace.choose(logits.block(range, &mut scratch), &draws[row]);
            workspace.logits = scratch;
        });
    });
    Ok(Choices(State::Known(choices)))
}

impl Workspace {
    fn choose(&mut self, logits: &[f64], draw: &Draw) -> Choice {
        let log_sum = cpu::log_sum_exp(logits);
        if !log_sum.is_finite() {
            let broken = |logit: &f64| logit.is_nan() || *logit == f64::INFINITY;
            let offender = (0..).zip(logits).find(|(_, logit)| broken(logit));
            return match offender {
                Some((id, logit)) => Choice::Broken { id, logit: *logit as f32 },
                None => Choice::Nothing,
            };
        }
        let mut scores = std::mem::take(&mut self.scores);
        let adjusted = if draw.adjustments.is_empty() {
            logits
        } else {
            scores.clear();
            scores.extend_from_slice(logits);
            adjust(&mut scores, &draw.adjustments);
            &scores
        };
        let id = self.draw(adjusted, &draw.options, draw.uniform);
        self.scores = scores;
        Choice::Token { id, logprob: logits[id as usize] - log_sum }
    }
}

/// Applies adjustments to the logits of one position, which has them all.
fn adjust(logits: &mut [f64], adjustments: &[Adjustment]) {
    for adjustment in adjustments {
        let logit = &mut logits[adjustment.id as usize];
        *logit = adjustment.apply(*logit);
    }
}

fn check_options(options: &Options, uniform: f64) -> Result<()> {
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
    Ok(())
}

/// An error unless the adjustments are for tokens of the vocabulary, each for one, in their order.
fn check(adjustments: &[Adjustment], vocabulary: usize) -> Result<()> {
    let mut lowest = 0;
    for adjustment in adjustments {
        let &Adjustment { id, bias, penalty, subtracted } = adjustment;
        if (id as usize) < lowest || id as usize >= vocabulary {
            bail!(
                "metal-candle-kernels: {OPERATION}: an adjustment is for token {id}, expected ascending ids below {vocabulary}"
            )
        }
        lowest = id as usize + 1;
        let finite = bias.is_finite() && penalty.is_finite() && subtracted.is_finite();
        if !finite || penalty <= 0.0 {
            bail!(
                "metal-candle-kernels: {OPERATION}: {adjustment:?}, expected finite numbers and a penalty above 0"
            )
        }
    }
    Ok(())
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
