//! The fused head and cross entropy on the CPU. The rows of a chunk are gathered, their logits become
//! their gradients in place, and losses are added up in f64 in the order of the rows.

use super::Options;
use crate::device::cpu::{Element, Real, Values, buffer, for_each_chunk2, sum};
use crate::matmul::cpu::{Layer, add_weight_gradient, forward, input_gradient, kind_of};
use candle_core::WithDType;

pub(super) struct Problem<'a, T: Element> {
    pub d: usize,
    pub v: usize,
    /// `(n, d)`
    pub hidden: &'a [T],
    pub weight: Values<'a, T::Acc>,
    /// Row and target of every row that counts.
    pub counted: &'a [(usize, usize)],
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
        let mut logits = [buffer::<T::Acc>(rows * v)];
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
            forward(rows, d, hidden, &[head], &mut logits, &mut [Vec::new()]);
            let logits = &mut logits[0][..rows * v];
            let losses = &mut losses[..rows];
            for_each_chunk2(
                losses,
                1,
                logits,
                v,
                #[inline(always)]
                |index, loss, logits| {
                    loss[0] = self.row(logits, counted[index].1, need_gradient);
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
    fn row(&self, logits: &mut [T::Acc], target: usize, need_gradient: bool) -> f64 {
        let scale = T::Acc::from_f64(self.options.logit_scale);
        let softcap = self.options.softcap.map(T::Acc::from_f64);
        for logit in logits.iter_mut() {
            *logit *= scale;
        }
        if let Some(cap) = softcap {
            for logit in logits.iter_mut() {
                *logit = cap * (*logit / cap).tanh();
            }
        }
        let mut max = T::Acc::NEG_INFINITY;
        for logit in logits.iter() {
            max = if *logit > max { *logit } else { max };
        }
        let log_sum_exp = max + sum_of_exponentials(logits, max).ln();
        let loss = log_sum_exp - logits[target];
        if need_gradient {
            let target_logit = logits[target];
            for logit in logits.iter_mut() {
                let probability = (*logit - log_sum_exp).exp();
                *logit = match softcap {
                    Some(cap) => probability * slope(*logit, cap) * scale,
                    None => probability * scale,
                };
            }
            // Exactly p - 1 rather than p minus a rounded product.
            let probability = (target_logit - log_sum_exp).exp();
            let slope = softcap.map_or(T::Acc::ONE, |cap| slope(target_logit, cap));
            logits[target] = (probability - T::Acc::ONE) * slope * scale;
        }
        loss.to_f64()
    }
}

/// The derivative of `c·tanh(x / c)` where its value is `capped`.
fn slope<A: Real>(capped: A, cap: A) -> A {
    let ratio = capped / cap;
    A::ONE - ratio * ratio
}

/// `Σ e^{x - max}`, in blocks so that the exponentials vectorise and the order is fixed.
fn sum_of_exponentials<A: Real>(values: &[A], max: A) -> A {
    let mut total = A::ZERO;
    let mut block = [A::ZERO; 256];
    for values in values.chunks(256) {
        let block = &mut block[..values.len()];
        for (target, value) in block.iter_mut().zip(values) {
            *target = (*value - max).exp();
        }
        total += sum(block);
    }
    total
}
