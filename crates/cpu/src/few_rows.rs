//! What products of a few rows have in common.

use std::ops::AddAssign;

/// Up to this many rows a pass over the weight as it is stored beats packing it.
pub const FEW_ROWS: usize = 4;

/// The sum of partial sums, a power of two of them, added half to half.
#[inline(always)]
pub fn sum_lanes<A: Copy + AddAssign, const N: usize>(mut sums: [A; N]) -> A {
    let mut width = N / 2;
    while width > 0 {
        for lane in 0..width {
            let other = sums[lane + width];
            sums[lane] += other;
        }
        width /= 2;
    }
    sums[0]
}
