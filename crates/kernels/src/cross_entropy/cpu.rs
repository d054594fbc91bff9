//! The fused head and cross entropy on the CPU, block by block of the vocabulary, so that a block of logits
//! is read and written while it is in a cache, and its part of the weight comes there once for both products.
//! For the weight's own gradient the logits are made a second time.
//!
//! The gradient of a hidden row is `Σ_j p_j·w_j - w_target`: attention of the row over the vocabulary, with
//! the weight as keys and values. So it is summed as attention is: with the largest logit so far, by which
//! what has been summed is brought to scale when a block has a larger one. The targets' terms are left out of
//! the blocks and added at the end, as exactly `p - 1` rather than `p` minus a rounded product.

use super::{AllCounted, Counted, IGNORE, Options};
use crate::backend::cpu::{
    Disjoint, Element, Real, Values, for_each_chunk, for_each_chunk2, max, sum, unwritten,
};
use crate::matmul::cpu::{Layer, add_input_gradient, add_weight_gradient, forward, kind_of};
use candle_core::WithDType;
use metal_candle_cpu::scratch::Scratch;

/// Logits of a block; few in tests, so that these have several blocks.
const LOGITS: usize = if cfg!(test) { 1 << 10 } else { 1 << 20 };

pub(super) struct Problem<'a, T: Element> {
    pub d: usize,
    pub v: usize,
    /// `(n, d)`
    pub hidden: &'a [T],
    pub weight: Values<'a, T::Acc>,
    pub counted: &'a AllCounted,
    pub options: &'a Options,
}

/// What was found of the rows that count, in their order.
pub(super) struct Found<A> {
    /// The weighted sum of the losses.
    pub loss: f64,
    pub losses: Vec<A>,
    /// Where they are asked for.
    pub entropies: Vec<A>,
    pub hits: Vec<A>,
}

impl<A: Real> Found<A> {
    fn add(&mut self, rows: &[Row<A>], statistics: bool) {
        for row in rows {
            let loss = row.loss();
            self.loss += row.weight.to_f64() * loss.to_f64();
            self.losses.push(loss);
            if statistics {
                self.entropies.push(row.entropy());
                self.hits.push(row.hit());
            }
        }
    }
}

/// A target of a row.
#[derive(Clone, Copy)]
struct Target<A> {
    token: usize,
    share: A,
    /// Its logit, and the derivative of that by the product.
    logit: A,
    slope: A,
}

/// What is known of a row's logits so far.
struct Row<A> {
    /// At least one.
    targets: Vec<Target<A>>,
    /// The sum of their shares.
    share: A,
    largest: A,
    /// The first token that has it, where statistics are asked for.
    likeliest: usize,
    /// Σ e^{logit - largest}.
    total: A,
    /// Σ e^{logit - largest}·(logit - largest), where the entropy is asked for.
    spread: A,
    /// What the row's loss is multiplied by.
    weight: A,
    /// What the sums before the latest block are multiplied by.
    rescale: A,
}

impl<A: Real> Row<A> {
    fn new(counted: &Counted, tokens: &[u32], shares: &[f32]) -> Self {
        let number = |number: f32| A::from_f64(f64::from(number));
        let targets = tokens.iter().zip(shares).filter(|(token, _)| **token != IGNORE);
        let target = |(token, share): (&u32, &f32)| Target {
            token: *token as usize,
            share: number(*share),
            logit: A::ZERO,
            slope: A::ONE,
        };
        Row {
            targets: targets.map(target).collect(),
            share: number(counted.share),
            weight: number(counted.weight),
            // Finite, so that a block of negative infinities adds nothing.
            largest: A::from_f64(f32::MIN as f64),
            likeliest: usize::MAX,
            total: A::ZERO,
            spread: A::ZERO,
            rescale: A::ZERO,
        }
    }

    fn log_sum_exp(&self) -> A {
        self.largest + self.total.ln()
    }

    fn loss(&self) -> A {
        let mut of_targets = A::ZERO;
        for target in &self.targets {
            of_targets += target.share * target.logit;
        }
        self.share * self.log_sum_exp() - of_targets
    }

    /// The gradient with respect to a target's product.
    fn of_target(&self, target: &Target<A>, scale: A) -> A {
        let probability = (target.logit - self.log_sum_exp()).exp();
        (self.share * probability - target.share) * target.slope * scale * self.weight
    }

    fn entropy(&self) -> A {
        self.total.ln() - self.spread / self.total
    }

    /// 1 where the first target is the likeliest token, which of several that are alike is the first, as for PyTorch's argmax.
    fn hit(&self) -> A {
        if self.targets[0].token == self.likeliest { A::ONE } else { A::ZERO }
    }
}

/// What products become.
#[derive(Clone, Copy)]
struct Shape<A> {
    scale: A,
    /// The softcap and its inverse.
    cap: Option<(A, A)>,
}

impl<A: Real> Shape<A> {
    #[inline(always)]
    fn apply(self, products: &mut [A]) {
        if let Some((cap, inverse)) = self.cap {
            for product in products.iter_mut() {
                *product = cap * (*product * self.scale * inverse).tanh();
            }
        } else if self.scale != A::ONE {
            for product in products.iter_mut() {
                *product *= self.scale;
            }
        }
    }
}

impl<T: Element> Problem<'_, T> {
    /// The loss of each row and their weighted sum; gradients are written to (`dhidden`) and added to (`dweight`, of so
    /// many columns) zeroed buffers.
    pub(super) fn run(
        &self,
        mut dhidden: Option<&mut [T]>,
        mut dweight: Option<(&mut [T::Acc], usize)>,
    ) -> Found<T::Acc> {
        let (d, v) = (self.d, self.v);
        let most_rows = self.options.chunk.min(self.counted.rows.len());
        let width = (LOGITS / most_rows.max(1)).max(1).next_multiple_of(64).min(v);
        let mut hidden = unwritten::<T>(most_rows * d);
        let mut logits = Scratch::new(most_rows * width);
        let mut sums = Scratch::new(if dhidden.is_some() { most_rows * d } else { 0 });
        let (losses, entropies, hits) = Default::default();
        let mut found = Found { loss: 0.0, losses, entropies, hits };
        let of_chunk = self.options.chunk.saturating_mul(self.counted.width);
        let targets =
            self.counted.tokens.chunks(of_chunk).zip(self.counted.shares.chunks(of_chunk));
        for (counted, (tokens, shares)) in self.counted.rows.chunks(self.options.chunk).zip(targets)
        {
            let count = counted.len();
            let hidden = &mut hidden[..count * d];
            for (hidden, counted) in hidden.chunks_exact_mut(d.max(1)).zip(counted) {
                hidden.copy_from_slice(&self.hidden[counted.row * d..][..d]);
            }
            let hidden = T::values(hidden);
            let of_row = self.counted.width;
            let targets = tokens.chunks_exact(of_row).zip(shares.chunks_exact(of_row));
            let mut rows: Vec<Row<T::Acc>> = counted
                .iter()
                .zip(targets)
                .map(|(counted, (tokens, shares))| Row::new(counted, tokens, shares))
                .collect();
            let sums = &mut sums[..if dhidden.is_some() { count * d } else { 0 }];
            for start in (0..v).step_by(width.max(1)) {
                let (weight, logits) = self.block(hidden, count, start, width, &mut logits);
                let of_block = width.min(v - start);
                for_each_chunk2(
                    &mut rows,
                    1,
                    logits,
                    of_block,
                    #[inline(always)]
                    |_, row, logits| self.add_block(&mut row[0], logits, start, dhidden.is_some()),
                );
                if dhidden.is_some() {
                    let (kind, dy) = (kind_of(hidden, weight), Values::Native(&*logits));
                    let rescale = |row: usize| rows[row].rescale;
                    let before: Option<&(dyn Fn(usize) -> T::Acc + Sync)> =
                        if start == 0 { None } else { Some(&rescale) };
                    add_input_gradient(kind, count, (of_block, d), dy, weight, before, sums);
                }
            }
            found.add(&rows, self.options.statistics);
            if let Some(dhidden) = dhidden.as_deref_mut() {
                self.finish(counted, &rows, sums, dhidden);
            }
            if let Some((dweight, columns)) = &mut dweight {
                let columns = *columns;
                for start in (0..v).step_by(width.max(1)) {
                    let (weight, logits) = self.block(hidden, count, start, width, &mut logits);
                    let of_block = width.min(v - start);
                    for_each_chunk(
                        logits,
                        of_block,
                        #[inline(always)]
                        |row, logits| self.gradients(&rows[row], logits, start),
                    );
                    let (kind, dy) = (kind_of(hidden, weight), Values::Native(&*logits));
                    let dweight = &mut dweight[start * columns..(start + of_block) * columns];
                    let sizes = (columns, d);
                    add_weight_gradient(kind, count, of_block, sizes, dy, hidden, dweight);
                }
            }
        }
        found
    }

    /// The part of the weight from row `start` on, and the products with it.
    fn block<'l>(
        &self,
        hidden: Values<T::Acc>,
        rows: usize,
        start: usize,
        width: usize,
        logits: &'l mut [T::Acc],
    ) -> (Values<'_, T::Acc>, &'l mut [T::Acc]) {
        let (d, width) = (self.d, width.min(self.v - start));
        let weight = self.weight.slice(start * d..(start + width) * d);
        let logits = &mut logits[..rows * width];
        let head = Layer { weight, outer: width, bias: None };
        forward(rows, d, hidden, head, logits);
        (weight, logits)
    }

    fn shape(&self) -> Shape<T::Acc> {
        let cap = self.options.softcap;
        Shape {
            scale: T::Acc::from_f64(self.options.logit_scale),
            cap: cap.map(|cap| (T::Acc::from_f64(cap), T::Acc::from_f64(1.0 / cap))),
        }
    }

    /// Adds a block of products to what is known of the row. They become `e^{logit - largest}` times
    /// the slope of the softcap, the targets' zero.
    #[inline(always)]
    fn add_block(
        &self,
        row: &mut Row<T::Acc>,
        products: &mut [T::Acc],
        start: usize,
        need_gradient: bool,
    ) {
        let shape = self.shape();
        shape.apply(products);
        for target in &mut row.targets {
            if let Some(&logit) = products.get(target.token.wrapping_sub(start)) {
                target.logit = logit;
                if let Some((_, inverse)) = shape.cap {
                    target.slope = slope(logit, inverse);
                }
            }
        }
        let before = row.largest;
        let of_block = max(products);
        let largest = if of_block > before { of_block } else { before };
        let rescale = (before - largest).exp_nonpositive();
        if self.options.statistics {
            if of_block > before
                && let Some(place) = products.iter().position(|logit| *logit == of_block)
            {
                row.likeliest = start + place;
            }
            // A sum so far is one of no terms before the first block, when the largest is no logit.
            let moved = if row.total == T::Acc::ZERO {
                T::Acc::ZERO
            } else {
                (row.spread + (before - largest) * row.total) * rescale
            };
            row.spread = moved + spread(products, largest);
        }
        let added = match shape.cap {
            Some((_, inverse)) if need_gradient => exponentials(
                products,
                #[inline(always)]
                |logit| {
                    let probability = (logit - largest).exp_nonpositive();
                    (probability, probability * slope(logit, inverse))
                },
            ),
            _ => exponentials(
                products,
                #[inline(always)]
                |logit| {
                    let probability = (logit - largest).exp_nonpositive();
                    (probability, probability)
                },
            ),
        };
        row.largest = largest;
        row.rescale = rescale;
        row.total = row.total * row.rescale + added;
        for target in &row.targets {
            if let Some(product) = products.get_mut(target.token.wrapping_sub(start)) {
                *product = T::Acc::ZERO;
            }
        }
    }

    /// A block of products becomes the gradient with respect to them.
    #[inline(always)]
    fn gradients(&self, row: &Row<T::Acc>, products: &mut [T::Acc], start: usize) {
        let shape = self.shape();
        shape.apply(products);
        let log_sum_exp = row.log_sum_exp();
        let factor = shape.scale * row.weight * row.share;
        for product in products.iter_mut() {
            let logit = *product;
            let slope = shape.cap.map_or(T::Acc::ONE, |(_, inverse)| slope(logit, inverse));
            *product = (logit - log_sum_exp).exp() * slope * factor;
        }
        for target in &row.targets {
            if let Some(product) = products.get_mut(target.token.wrapping_sub(start)) {
                *product = row.of_target(target, shape.scale);
            }
        }
    }

    /// The gradients of hidden rows from their sums over the blocks.
    fn finish(
        &self,
        counted: &[Counted],
        rows: &[Row<T::Acc>],
        sums: &mut [T::Acc],
        dhidden: &mut [T],
    ) {
        let d = self.d;
        let scale = self.shape().scale;
        let dhidden = Disjoint::new(dhidden);
        for_each_chunk(
            sums,
            d,
            #[inline(always)]
            |index, sums| {
                let row = &rows[index];
                let largest = (row.largest - row.log_sum_exp()).exp();
                let mut factor = largest * scale * row.weight * row.share;
                let mut weight = vec![T::Acc::ZERO; d];
                for target in &row.targets {
                    let of_target = row.of_target(target, scale);
                    self.weight.read(target.token * d, &mut weight);
                    for (sum, weight) in sums.iter_mut().zip(&weight) {
                        *sum = *sum * factor + of_target * *weight;
                    }
                    factor = T::Acc::ONE;
                }
                let start = counted[index].row * d;
                // SAFETY: every row is counted once.
                let out = unsafe { dhidden.slice(start..start + d) };
                T::narrow(sums, out);
            },
        );
    }
}

/// The derivative of `c·tanh(x / c)` where its value is `capped`.
#[inline(always)]
fn slope<A: Real>(capped: A, inverse_cap: A) -> A {
    let ratio = capped * inverse_cap;
    A::ONE - ratio * ratio
}

/// Σ e^{logit - largest}·(logit - largest), where a logit of negative infinity adds nothing.
#[inline(always)]
fn spread<A: Real>(logits: &[A], largest: A) -> A {
    let mut total = A::ZERO;
    let mut block = [A::ZERO; 256];
    let least = A::from_f64(f64::from(f32::MIN));
    for logits in logits.chunks(256) {
        let block = &mut block[..logits.len()];
        for (logit, term) in logits.iter().zip(block.iter_mut()) {
            let below = *logit - largest;
            let below = if below < least { least } else { below };
            *term = below.exp_nonpositive() * below;
        }
        total += sum(block);
    }
    total
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
