//! What the GPUs' choices share: the numbers that their kernels are given, and those that come back.

use super::{Choice, Draw, OPERATION, Options};
use candle_core::{Result, Tensor, bail};

/// Numbers that a kernel is given for a row, before those of the adjustments.
pub(super) const DRAW_WORDS: usize = 12;

/// The draws as the kernels of GPUs read them: for each row four numbers - 0, top-k, and where its adjustments
/// begin and how many there are - and what `numbers` says; then all adjustments: id, bias, penalty and what is
/// subtracted, the latter as the bits of f32.
pub(super) fn draw_words(
    draws: &[Draw],
    vocabulary: usize,
    numbers: impl Fn(&Draw) -> [u32; DRAW_WORDS - 4],
) -> Result<Vec<u32>> {
    let all: usize = draws.iter().map(|draw| draw.adjustments.len()).sum();
    if u32::try_from(all).is_err() {
        bail!(
            "metal-candle-kernels: {OPERATION}: {all} adjustments on a GPU, expected fewer than 2^32"
        )
    }
    let mut words = Vec::with_capacity(DRAW_WORDS * draws.len() + 4 * all);
    let mut first = 0;
    for draw in draws {
        let count = draw.adjustments.len();
        words.extend([0, draw.options.bound(vocabulary) as u32, first as u32, count as u32]);
        words.extend(numbers(draw));
        first += count;
    }
    for adjustment in draws.iter().flat_map(|draw| &draw.adjustments) {
        // A penalty that f32 can't hold would divide by zero or infinity.
        let penalty = (adjustment.penalty as f32).clamp(f32::MIN_POSITIVE, f32::MAX);
        let [bias, subtracted] =
            [adjustment.bias, adjustment.subtracted].map(|value| clamped(value).to_bits());
        words.extend([adjustment.id, bias, penalty.to_bits(), subtracted]);
    }
    Ok(words)
}

/// The lower and the upper half.
pub(super) fn halves(number: u64) -> [u32; 2] {
    [number as u32, (number >> 32) as u32]
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

/// A choice of tokens that was launched.
#[derive(Debug)]
pub(super) struct Launched {
    /// `(rows, READOUT_WORDS)`: a [`Readout`] a row.
    pub words: Tensor,
    /// The weight of the likeliest.
    pub unit: f64,
}

impl Launched {
    /// The tokens `(rows)`; 0 where there is none to choose.
    pub fn ids(&self) -> Result<Tensor> {
        self.words.narrow(1, 0, 1)?.squeeze(1)
    }

    /// What the words say, once they are on the host.
    pub fn choices(&self, words: &[u32]) -> Result<Vec<Choice>> {
        Ok(Readout::of(words)?.iter().map(|readout| readout.choice(self.unit)).collect())
    }
}

/// What the kernels of GPUs tell of a choice.
struct Readout {
    id: u32,
    logit: f32,
    largest: f32,
    /// The first logit that is NaN or positive infinity, `u32::MAX` when there is none.
    offender: u32,
    offending: f32,
    /// `Σ e^{l - largest}` in units of `fixed_point`.
    sum: u64,
}

/// Words of a [`Readout`].
pub(super) const READOUT_WORDS: usize = 8;

impl Readout {
    /// Those of all rows.
    fn of(words: &[u32]) -> Result<Vec<Readout>> {
        let rows = words.chunks(READOUT_WORDS).map(|words| {
            let &[id, logit, largest, offender, offending, _, low, high] = words else {
                bail!("metal-candle-kernels: {OPERATION}: a result of {} words", words.len())
            };
            let [logit, largest, offending] = [logit, largest, offending].map(f32::from_bits);
            let sum = u64::from(high) << 32 | u64::from(low);
            Ok(Readout { id, logit, largest, offender, offending, sum })
        });
        rows.collect()
    }

    fn choice(&self, unit: f64) -> Choice {
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
