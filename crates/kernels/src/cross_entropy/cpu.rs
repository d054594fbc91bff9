//! The fused head and cross entropy on the CPU. The rows of a chunk are gathered, their logits become
//! their gradients in place, and losses are added up in f64 in the order of the rows.

use super::Options;
use crate::device::cpu::scratch::Scratch;
use crate::device::cpu::{Element, Real, Values, buffer, for_each_chunk2, max, sum};
use crate::matmul::cpu::{Layer, add_weight_gradient, forward, input_gradient, kind_of};
use candle_core::WithDType;

pub(super) struct Problem<'a, T: Element> {
    pub d: usize,
    pub v: usize,
    /// `(n, d)`
    pub hidden: &'a [T],
    pub weight: Values<'a, T::Acc>,
    /// Row and target of every row that counts.
    pub counted: &'a [(usize, u32)],
    pub options: &'a Options,
}

impl<T: Element> Problem<'_, T> {
    /// The summed loss; gradients are written to (`dhidden`) and added to (`dweight`) zeroed buffers.
    pub(super) fn run(
        &self,
        mut dhidden: Option<&mut [T]>,
        mut dweight: Option<&mut [T::Acc]>,
    ) -> f64 {
        let (d, v) = (self.d, self.v);
        let need_gradient = dhidden.is_some() || dweight.is_some();
        let rows = self.options.chunk.min(self.counted.len());
        let mut hidden = buffer::<T>(rows * d);
        let mut gradient = buffer::<T>(if dhidden.is_some() { rows * d } else { 0 });
        let mut logits = Scratch::new(rows * v);
        let mut losses = vec![0f64; rows];
        let mut loss = 0.0;
        for counted in self.counted.chunks(self.options.chunk) {
            let rows = counted.len();
            let hidden = &mut hidden[..rows * d];
            for (hidden, (row, _)) in hidden.chunks_exact_mut(d.max(1)).zip(counted) {
                hidden.copy_from_slice(&self.hidden[row * d..][..d]);
            }
            let hidden = T::values(hidden);
            let kind = kind_of(hidden, self.weight);
            let head = Layer { weight: self.weight, outer: v, bias: None, adapter: None };
            let logits = &mut logits[..rows * v];
            forward(rows, d, hidden, &[head], &mut [logits], &mut [Vec::new()]);
            let losses = &mut losses[..rows];
            for_each_chunk2(
                losses,
                1,
                logits,
                v,
                #[inline(always)]
                |index, loss, logits| {
                    loss[0] = self.row(logits, counted[index].1 as usize, need_gradient);
                },
            );
            loss += losses.iter().sum::<f64>();
            let logits = Values::Native(logits);
            if let Some(dhidden) = dhidden.as_deref_mut() {
                let gradient = &mut gradient[..rows * d];
                input_gradient(kind, rows, (v, d), logits, self.weight, gradient);
                for (gradient, (row, _)) in gradient.chunks_exact(d.max(1)).zip(counted) {
                    dhidden[row * d..][..d].copy_from_slice(gradient);
                }
            }
            if let Some(dweight) = dweight.as_deref_mut() {
                add_weight_gradient(kind, rows, v, d, logits, hidden, dweight);
            }
        }
        loss
    }

    /// The loss of one row; its products become the gradient with respect to them when needed.
    ///
    /// The first pass leaves `e^{z - largest}`, times the slope of the softcap, with the largest of
    /// the blocks so far; the second brings all blocks to one scale. So every exponential is taken
    /// once, and a block is read and written while it is in the nearest cache.
    #[inline(always)]
    fn row(&self, logits: &mut [T::Acc], target: usize, need_gradient: bool) -> f64 {
        const BLOCK: usize = 2048;
        let scale = T::Acc::from_f64(self.options.logit_scale);
        let cap =
            self.options.softcap.map(|cap| (T::Acc::from_f64(cap), T::Acc::from_f64(1.0 / cap)));
        let raw_target = logits[target];
        // Finite, so that a block of negative infinities adds nothing.
        let mut largest = T::Acc::from_f64(f32::MIN as f64);
        let mut total = T::Acc::ZERO;
        let mut maxima = vec![T::Acc::ZERO; logits.len().div_ceil(BLOCK)];
        for (logits, maximum) in logits.chunks_mut(BLOCK).zip(&mut maxima) {
            if let Some((cap, inverse)) = cap {
                for logit in logits.iter_mut() {
                    *logit = cap * (*logit * scale * inverse).tanh();
                }
            } else if self.options.logit_scale != 1.0 {
                for logit in logits.iter_mut() {
                    *logit *= scale;
                }
            }
            let before = largest;
            let of_block = max(logits);
            largest = if of_block > largest { of_block } else { largest };
            *maximum = largest;
            let added = match cap {
                Some((_, inverse)) if need_gradient => exponentials(
                    logits,
                    #[inline(always)]
                    |logit| {
                        let probability = (logit - largest).exp_nonpositive();
                        (probability, probability * slope(logit, inverse))
                    },
                ),
                _ => exponentials(
                    logits,
                    #[inline(always)]
                    |logit| {
                        let probability = (logit - largest).exp_nonpositive();
                        (probability, probability)
                    },
                ),
            };
            total = total * (before - largest).exp_nonpositive() + added;
        }
        let log_sum_exp = largest + total.ln();
        let (target_logit, target_slope) = match cap {
            Some((cap, inverse)) => {
                let logit = cap * (raw_target * scale * inverse).tanh();
                (logit, slope(logit, inverse))
            }
            None => (raw_target * scale, T::Acc::ONE),
        };
        if need_gradient {
            for (logits, maximum) in logits.chunks_mut(BLOCK).zip(maxima) {
                let factor = (maximum - log_sum_exp).exp() * scale;
                for logit in logits.iter_mut() {
                    *logit *= factor;
                }
            }
            // Exactly p - 1 rather than p minus a rounded product.
            let probability = (target_logit - log_sum_exp).exp();
            logits[target] = (probability - T::Acc::ONE) * target_slope * scale;
        }
        (log_sum_exp - target_logit).to_f64()
    }
}

/// The derivative of `c·tanh(x / c)` where its value is `capped`.
#[inline(always)]
fn slope<A: Real>(capped: A, inverse_cap: A) -> A {
    let ratio = capped * inverse_cap;
    A::ONE - ratio * ratio
}

/// Replaces every value by the second of its terms and adds up the first.
#[inline(always)]
fn exponentials<A: Real>(values: &mut [A], terms: impl Fn(A) -> (A, A)) -> A {
    let mut total = A::ZERO;
    let mut block = [A::ZERO; 256];
    for values in values.chunks_mut(256) {
        let block = &mut block[..values.len()];
        for (value, added) in values.iter_mut().zip(block.iter_mut()) {
            (*added, *value) = terms(*value);
        }
        total += sum(block);
    }
    total
}
