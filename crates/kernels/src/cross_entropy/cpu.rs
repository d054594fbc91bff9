//! The fused head and cross entropy on the CPU. The rows of a chunk are gathered, their logits become
//! their gradients in place, and losses are added up in f64 in the order of the rows.

use super::Options;
use crate::device::cpu::{Element, Real, Values, for_each_chunk2, sum};
use crate::matmul::cpu::{Orientation, Product, outer_products};

pub(super) struct Problem<'a, A> {
    pub d: usize,
    pub v: usize,
    pub hidden: Values<'a, A>,
    pub weight: Values<'a, A>,
    /// Row and target of every row that counts.
    pub counted: &'a [(usize, usize)],
    pub options: &'a Options,
}

impl<A: Real> Problem<'_, A> {
    /// The summed loss; gradients are written to (`dhidden`) and added to (`dweight`) zeroed buffers.
    pub(super) fn run<T: Element<Acc = A>>(
        &self,
        mut dhidden: Option<&mut [T]>,
        mut dweight: Option<&mut [A]>,
    ) -> f64 {
        let (d, v) = (self.d, self.v);
        let need_gradient = dhidden.is_some() || dweight.is_some();
        let rows = self.options.chunk.min(self.counted.len());
        let mut hidden = vec![A::ZERO; rows * d];
        let mut gradient = vec![A::ZERO; if dhidden.is_some() { rows * d } else { 0 }];
        let mut logits = vec![A::ZERO; rows * v];
        let mut losses = vec![0f64; rows];
        let mut loss = 0.0;
        for counted in self.counted.chunks(self.options.chunk) {
            let rows = counted.len();
            let hidden = &mut hidden[..rows * d];
            for (index, (row, _)) in counted.iter().enumerate() {
                self.hidden.read(row * d, &mut hidden[index * d..][..d]);
            }
            let logits = &mut logits[..rows * v];
            let head = Product {
                x: Values::Native(hidden),
                weight: self.weight,
                orientation: Orientation::OutputMajor,
                rows,
                inner: d,
                outer: v,
                bias: None,
                low_rank: None,
            };
            head.run(logits);
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
            if let Some(dhidden) = dhidden.as_deref_mut() {
                let gradient = &mut gradient[..rows * d];
                let backward = Product {
                    x: Values::Native(logits),
                    orientation: Orientation::InputMajor,
                    inner: v,
                    outer: d,
                    ..head
                };
                backward.run(gradient);
                for (index, (row, _)) in counted.iter().enumerate() {
                    T::narrow(&gradient[index * d..][..d], &mut dhidden[row * d..][..d]);
                }
            }
            if let Some(dweight) = dweight.as_deref_mut() {
                let (logits, hidden) = (Values::Native(logits), Values::Native(hidden));
                outer_products(rows, v, d, logits, hidden, 1.0, dweight);
            }
        }
        loss
    }

    /// The loss of one row; its products become the gradient with respect to them when needed.
    fn row(&self, logits: &mut [A], target: usize, need_gradient: bool) -> f64 {
        let scale = A::from_f64(self.options.logit_scale);
        let softcap = self.options.softcap.map(A::from_f64);
        for logit in logits.iter_mut() {
            *logit *= scale;
        }
        if let Some(cap) = softcap {
            for logit in logits.iter_mut() {
                *logit = cap * (*logit / cap).tanh();
            }
        }
        let mut max = A::NEG_INFINITY;
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
            let slope = softcap.map_or(A::ONE, |cap| slope(target_logit, cap));
            logits[target] = (probability - A::ONE) * slope * scale;
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
