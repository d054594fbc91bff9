//! Sampling on the CPU: weights in parallel chunks, truncation among the few that can remain.

use super::{Candidate, Options, Workspace};
use crate::backend::cpu::{
    PARALLEL_CHUNK, Real, Values, for_each_chunk, for_each_chunk2, map_and_sum, max, sum, unwritten,
};
use std::cmp::Ordering;

/// Weights whose largest is looked up together.
const BLOCK: usize = 256;

impl Workspace {
    /// `e^{(l - max l) / temperature}` of every logit, and the largest of each block.
    pub(super) fn weigh(&mut self, logits: &[f64], temperature: f64) {
        let largest = largest(logits);
        self.weights.resize(logits.len(), 0.0);
        self.maxima.resize(logits.len().div_ceil(BLOCK), 0.0);
        for_each_chunk2(
            &mut self.weights,
            PARALLEL_CHUNK,
            &mut self.maxima,
            PARALLEL_CHUNK / BLOCK,
            #[inline(always)]
            |index, weights, maxima| {
                let logits = &logits[index * PARALLEL_CHUNK..][..weights.len()];
                for (weight, logit) in weights.iter_mut().zip(logits) {
                    let value = ((*logit - largest) / temperature).exp_nonpositive();
                    // NaN cannot be drawn.
                    *weight = if value > 0.0 { value } else { 0.0 };
                }
                for (weights, maximum) in weights.chunks(BLOCK).zip(maxima) {
                    *maximum = max(weights);
                }
            },
        );
    }

    /// Leaves in the candidates what top-k, top-p and min-p keep, in the order of ids. False when they
    /// keep all.
    pub(super) fn truncate(&mut self, options: &Options) -> bool {
        let Options { top_k, top_p, min_p, .. } = *options;
        if top_k > 0 && top_k < self.weights.len() {
            self.gather(top_k, 0.0);
            let candidates = &mut self.candidates;
            if top_k < candidates.len() {
                let (_, last, _) = candidates.select_nth_unstable_by(top_k - 1, likelier);
                let threshold = last.weight;
                candidates.retain(|candidate| candidate.weight >= threshold);
            }
            if top_p < 1.0 {
                candidates.sort_unstable_by(likelier);
                let mass = candidates.iter().map(|candidate| candidate.weight).sum::<f64>();
                let kept = nucleus(candidates, top_p * mass);
                candidates.truncate(kept);
            }
        } else if top_p < 1.0 {
            let target = top_p * self.weights.chunks(BLOCK).map(sum).sum::<f64>();
            // Ever larger heads of the vocabulary, until one holds the mass.
            let mut head = 64;
            loop {
                self.gather(head, 0.0);
                self.candidates.sort_unstable_by(likelier);
                let kept = nucleus(&self.candidates, target);
                if kept < self.candidates.len() || head >= self.weights.len() {
                    self.candidates.truncate(kept);
                    break;
                }
                head *= 8;
            }
        } else if min_p > 0.0 {
            self.gather(self.weights.len(), min_p);
        } else {
            return false;
        }
        // The likeliest has weight 1.
        self.candidates.retain(|candidate| candidate.weight >= min_p);
        // One order is needed for the draw to mean the same everywhere.
        self.candidates.sort_unstable_by_key(|candidate| candidate.id);
        true
    }

    /// Takes as candidates all weights from some bound on that is at least `lowest`: the `count`
    /// largest among them, as far as they reach it, and hardly more than need be.
    fn gather(&mut self, count: usize, lowest: f64) {
        // That many blocks have a weight that is as large.
        let mut bound = lowest;
        if count > 0 && count <= self.maxima.len() {
            self.ordered.clone_from(&self.maxima);
            let (_, last, _) =
                self.ordered.select_nth_unstable_by(count - 1, |a, b| b.total_cmp(a));
            bound = bound.max(*last);
        }
        self.candidates.clear();
        let blocks = (0u32..).step_by(BLOCK).zip(self.weights.chunks(BLOCK)).zip(&self.maxima);
        for ((start, weights), maximum) in blocks {
            if *maximum < bound {
                continue;
            }
            for (id, &weight) in (start..).zip(weights) {
                if weight >= bound && weight > 0.0 {
                    self.candidates.push(Candidate { id, weight });
                }
            }
        }
    }

    /// The token where the number falls among all weights.
    pub(super) fn pick_any(&self, uniform: f64) -> Option<u32> {
        let total: f64 = self.weights.chunks(BLOCK).map(sum).sum();
        let mut left = uniform * total;
        for (start, weights) in (0u32..).step_by(BLOCK).zip(self.weights.chunks(BLOCK)) {
            let of_block = sum(weights);
            if left >= of_block {
                left -= of_block;
                continue;
            }
            for (id, weight) in (start..).zip(weights) {
                left -= weight;
                if left < 0.0 {
                    return Some(id);
                }
            }
        }
        None
    }
}

/// How many of the most likely, which come first, it takes to reach the mass.
fn nucleus(candidates: &[Candidate], mass: f64) -> usize {
    let mut before = 0.0;
    let kept = candidates.iter().take_while(|candidate| {
        let keep = before < mass;
        before += candidate.weight;
        keep
    });
    kept.count()
}

/// The most likely first, of equals the lowest id.
fn likelier(a: &Candidate, b: &Candidate) -> Ordering {
    b.weight.total_cmp(&a.weight).then(a.id.cmp(&b.id))
}

/// The largest number of each chunk.
fn largest_of_chunks<A: Real>(values: &[A]) -> Vec<A> {
    let mut parts = unwritten::<A>(values.len().div_ceil(PARALLEL_CHUNK));
    for_each_chunk(
        &mut parts,
        1,
        #[inline(always)]
        |index, part| {
            let end = values.len().min((index + 1) * PARALLEL_CHUNK);
            part[0] = max(&values[index * PARALLEL_CHUNK..end]);
        },
    );
    parts
}

fn largest<A: Real>(values: &[A]) -> A {
    max(&largest_of_chunks(values))
}

/// Where a number stands first. A search that may end at any place is slow, so it ends after blocks.
#[inline(always)]
fn first_of<A: Real>(values: &[A], number: A) -> Option<usize> {
    let has_it = |block: &[A]| block.iter().fold(false, |any, value| any | (*value == number));
    let block = values.chunks(BLOCK).position(has_it)?;
    let start = block * BLOCK;
    let place = values[start..].iter().position(|value| *value == number)?;
    Some(start + place)
}

/// The index of the largest number, the first of equals; 0 when none is above negative infinity.
pub(super) fn argmax(values: &[f64]) -> u32 {
    let parts = largest_of_chunks(values);
    let largest = max(&parts);
    let chunk = parts.iter().position(|part| *part == largest);
    let chunk = chunk.filter(|_| largest > f64::NEG_INFINITY);
    let found = chunk.and_then(|chunk| {
        let start = chunk * PARALLEL_CHUNK;
        Some(start + first_of(&values[start..], largest)?)
    });
    found.unwrap_or(0) as u32
}

pub(super) fn greedy<A: Real>(rows: usize, columns: usize, logits: Values<A>) -> Vec<u32> {
    let mut ids = vec![0u32; rows];
    for_each_chunk(
        &mut ids,
        1,
        #[inline(always)]
        |row, id| {
            let mut scratch = Vec::new();
            let logits = logits.block(row * columns..(row + 1) * columns, &mut scratch);
            let largest = max(logits);
            let found = first_of(logits, largest);
            id[0] = found.filter(|_| largest > A::NEG_INFINITY).unwrap_or(0) as u32;
        },
    );
    ids
}

/// `ln Σ e^{logits}`; not finite when a logit is NaN or positive infinity, or none is above negative
/// infinity.
pub(super) fn log_sum_exp(logits: &[f64]) -> f64 {
    let largest = largest(logits);
    let mut parts = unwritten::<f64>(logits.len().div_ceil(PARALLEL_CHUNK));
    for_each_chunk(
        &mut parts,
        1,
        #[inline(always)]
        |index, part| {
            let end = logits.len().min((index + 1) * PARALLEL_CHUNK);
            let mut exponentials = [0f64; BLOCK];
            part[0] = 0.0;
            for logits in logits[index * PARALLEL_CHUNK..end].chunks(BLOCK) {
                part[0] += map_and_sum(
                    logits,
                    &mut exponentials[..logits.len()],
                    #[inline(always)]
                    |value| (value - largest).exp_nonpositive(),
                );
            }
        },
    );
    largest + parts.iter().sum::<f64>().ln()
}
