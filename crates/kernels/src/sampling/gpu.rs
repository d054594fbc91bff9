//! What the GPUs' choices share: the numbers that their kernels are given, and those that come back.

use super::{Adjustment, Choice, OPERATION, Options};
use candle_core::{Result, Tensor, bail};

/// The adjustments as the kernels of GPUs read them: id, bias, penalty and what is subtracted, the latter
/// as the bits of f32.
pub(super) fn adjustment_words(adjustments: &[Adjustment]) -> Vec<u32> {
    let words = |adjustment: &Adjustment| {
        let &Adjustment { id, bias, penalty, subtracted } = adjustment;
        // A penalty that f32 can't hold would divide by zero or infinity.
        let penalty = (penalty as f32).clamp(f32::MIN_POSITIVE, f32::MAX);
        let [bias, subtracted] = [bias, subtracted].map(|value| clamped(value).to_bits());
        [id, bias, penalty.to_bits(), subtracted]
    };
    adjustments.iter().flat_map(words).collect()
}

/// The nearest finite f32.
fn clamped(value: f64) -> f32 {
    (value as f32).clamp(f32::MIN, f32::MAX)
}

/// The number in `[0, 1)` as a whole number of 2^-64, and the weight of the likeliest of `count` tokens: a
/// power of two with which the sum of all weights has fewer than 64 bits.
pub(super) fn fixed_point(uniform: f64, count: usize) -> (u64, u64) {
    const MOST_BITS: u32 = 48;
    let bits = MOST_BITS.min(63 - count.next_power_of_two().ilog2());
    ((uniform * 2f64.powi(64)) as u64, 1 << bits)
}

impl Options {
    /// Top-k for so many tokens; 0 when it leaves out none.
    pub(super) fn bound(&self, count: usize) -> usize {
        if self.top_k < count { self.top_k } else { 0 }
    }
}

/// What the kernels of GPUs tell of a choice.
pub(super) struct Readout {
    id: u32,
    logit: f32,
    largest: f32,
    /// The first logit that is NaN or positive infinity, `u32::MAX` when there is none.
    offender: u32,
    offending: f32,
    /// `Σ e^{l - largest}` in units of `fixed_point`.
    sum: u64,
}

impl Readout {
    pub(super) const WORDS: usize = 8;

    pub(super) fn of(words: &Tensor) -> Result<Readout> {
        let words = words.to_vec1::<u32>()?;
        let &[id, logit, largest, offender, offending, _, low, high] = &words[..] else {
            bail!("metal-candle-kernels: {OPERATION}: a result of {} words", words.len())
        };
        let [logit, largest, offending] = [logit, largest, offending].map(f32::from_bits);
        let sum = u64::from(high) << 32 | u64::from(low);
        Ok(Readout { id, logit, largest, offender, offending, sum })
    }

    pub(super) fn choice(&self, unit: f64) -> Choice {
        let Readout { id, logit, largest, offender, offending, sum } = *self;
        if offender != u32::MAX {
            Choice::Broken { id: offender, logit: offending }
        } else if largest == f32::NEG_INFINITY {
            Choice::Nothing
        } else {
            let log_sum = (sum as f64 / unit).ln();
            Choice::Token { id, logprob: f64::from(logit) - f64::from(largest) - log_sum }
        }
    }
}
