//! The dropout mask, and the products that need it, on the CPU.

use super::Dropout;
use crate::device::cpu::{Element, PARALLEL_CHUNK, Real, Values, for_each_chunk};
use crate::matmul::cpu::{Mask, outer_products};

/// Rows of x that are converted and masked at a time.
const ROW_BLOCK: usize = 256;

/// A function `mask(index of the first element, elements)` that drops and rescales elements in
/// place; `None` when nothing is ever dropped.
pub(super) fn mask<A: Real>(dropout: Dropout) -> Option<impl Fn(usize, &mut [A]) + Sync> {
    if dropout.probability == 0.0 {
        return None;
    }
    let probability = dropout.probability as f64;
    // A random 32-bit number below this one drops its element.
    let threshold = (probability * 2f64.powi(32)) as u64;
    let scale = A::from_f64(1.0 / (1.0 - probability));
    Some(move |first: usize, values: &mut [A]| {
        for (offset, value) in values.iter_mut().enumerate() {
            let random = hash(dropout.seed, (first + offset) as u64) >> 32;
            *value = if random < threshold { A::ZERO } else { *value * scale };
        }
    })
}

/// The `index`-th number of the SplitMix64 generator (Steele, Lea and Flood 2014).
fn hash(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

pub(super) fn apply_mask<T: Element>(out: &mut [T], mask: &(impl Fn(usize, &mut [T::Acc]) + Sync)) {
    for_each_chunk(
        out,
        PARALLEL_CHUNK,
        #[inline(always)]
        |index, out| {
            let mut scratch = vec![T::Acc::ZERO; out.len()];
            T::widen(out, &mut scratch);
            mask(index * PARALLEL_CHUNK, &mut scratch);
            T::narrow(&scratch, out);
        },
    );
}

/// `da += dropout(x)ᵀ·g`: `x` `(rows, inner)`, `g` `(rows, rank)`, `da` `(inner, rank)`.
pub(super) fn gradient_of_a<A: Real>(
    rows: usize,
    inner: usize,
    rank: usize,
    x: Values<A>,
    g: &[A],
    mask: Option<&Mask<A>>,
    da: &mut [A],
) {
    let Some(mask) = mask else {
        outer_products(rows, inner, rank, x, Values::Native(g), 1.0, da);
        return;
    };
    for first in (0..rows).step_by(ROW_BLOCK) {
        let rows = ROW_BLOCK.min(rows - first);
        let mut dropped = vec![A::ZERO; rows * inner];
        for_each_chunk(
            &mut dropped,
            PARALLEL_CHUNK,
            #[inline(always)]
            |index, chunk| {
                let start = first * inner + index * PARALLEL_CHUNK;
                x.read(start, chunk);
                mask(start, chunk);
            },
        );
        let g = &g[first * rank..(first + rows) * rank];
        outer_products(rows, inner, rank, Values::Native(&dropped), Values::Native(g), 1.0, da);
    }
}
