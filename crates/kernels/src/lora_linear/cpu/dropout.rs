//! The dropout mask on the CPU.

use crate::backend::cpu::{Element, PARALLEL_CHUNK, Real, for_each_chunk};
use crate::lora_linear::Dropout;

/// A function `mask(index of the first element, elements)` that sets dropped elements to zero in
/// place; `None` when nothing is ever dropped.
pub(crate) fn mask<A: Real>(dropout: Dropout) -> Option<impl Fn(usize, &mut [A]) + Sync> {
    if dropout.probability == 0.0 {
        return None;
    }
    let threshold = dropout.threshold();
    Some(move |first: usize, values: &mut [A]| {
        for (offset, value) in values.iter_mut().enumerate() {
            let random = hash(dropout.seed, (first + offset) as u64) >> 32;
            *value = if random < threshold { A::ZERO } else { *value };
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

/// Drops elements and multiplies the others by `kept`.
pub(crate) fn apply<T: Element>(
    out: &mut [T],
    mask: &(impl Fn(usize, &mut [T::Acc]) + Sync),
    kept: T::Acc,
) {
    for_each_chunk(
        out,
        PARALLEL_CHUNK,
        #[inline(always)]
        |index, out| {
            let mut scratch = vec![T::Acc::ZERO; out.len()];
            T::widen(out, &mut scratch);
            mask(index * PARALLEL_CHUNK, &mut scratch);
            scratch.iter_mut().for_each(|value| *value *= kept);
            T::narrow(&scratch, out);
        },
    );
}
