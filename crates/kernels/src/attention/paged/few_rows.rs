//! Products of a few bf16 rows with keys and values where they lie in a pool, by the dot product of pairs (AVX-512 BF16).
//! Keys are pairs along a head as they are; of values, those of two neighbours are made pairs in a register. A row's sums
//! don't depend on the other rows.

use crate::backend::cpu::gemm::sum_registers;
use half::bf16;
use metal_candle_cpu::simd::{Level, as_pairs, level, prefetch_bytes};
use std::arch::x86_64::*;
use std::ops::Range;

/// Rows, and keys, whose sums are in registers at a time.
const TILE: usize = 4;
/// bf16 numbers of a register, and f32.
const NUMBERS: usize = 32;
const WORDS: usize = 16;

/// Whether the machine has the instructions.
pub(super) fn is_there() -> bool {
    level() >= Level::Avx512Bf16
}

/// Rows of a pool: a key's, or value's, of one head.
#[derive(Clone, Copy)]
pub(super) struct Lines<'a> {
    pool: &'a [bf16],
    /// Where each begins.
    starts: &'a [usize],
    head_dim: usize,
}

impl<'a> Lines<'a> {
    pub(super) fn new(pool: &'a [bf16], starts: &'a [usize], head_dim: usize) -> Self {
        assert!(starts.iter().all(|start| start + head_dim <= pool.len()));
        Lines { pool, starts, head_dim }
    }

    /// None of them.
    pub(super) fn none(self) -> Self {
        Lines { starts: &[], ..self }
    }

    /// The products of rows `q` `(rows, head_dim)` with every line: `scores` `(rows, stride)`, of which numbers beyond the
    /// lines are overwritten up to a multiple of four. Asks for the lines `next` on the way.
    pub(super) fn scores(self, q: &[bf16], scores: &mut [f32], stride: usize, next: Self) {
        let all = self.starts.len().next_multiple_of(TILE);
        let rows = scores.len() / stride;
        assert!(is_there() && all <= stride && q.len() == rows * self.head_dim);
        let tiles = q.chunks(TILE * self.head_dim).zip(scores.chunks_mut(TILE * stride));
        for (index, (q, scores)) in tiles.enumerate() {
            let next = if index == 0 { next } else { next.none() };
            // SAFETY: the machine has the instructions, and the lines lie in the pool, as asserted.
            unsafe {
                match scores.len() / stride {
                    1 => self.scores_of::<1>(q, scores, stride, next),
                    2 => self.scores_of::<2>(q, scores, stride, next),
                    3 => self.scores_of::<3>(q, scores, stride, next),
                    _ => self.scores_of::<TILE>(q, scores, stride, next),
                }
            }
        }
    }

    /// The sums of all lines, each times its weight in `weights` `(rows, stride)`, where a 0 follows an odd number of them:
    /// `sums` `(rows, width)`, of which numbers beyond `head_dim` are left alone. Asks for the lines `next` on the way.
    pub(super) fn sums(
        self,
        weights: &[bf16],
        stride: usize,
        sums: &mut [f32],
        width: usize,
        next: Self,
    ) {
        let rows = sums.len() / width;
        assert!(is_there() && self.head_dim <= width && weights.len() == rows * stride);
        assert!(self.starts.len() <= stride && stride.is_multiple_of(2));
        let tiles = weights.chunks(TILE * stride).zip(sums.chunks_mut(TILE * width));
        for (index, (weights, sums)) in tiles.enumerate() {
            let next = if index == 0 { next } else { next.none() };
            // SAFETY: as in `scores`.
            unsafe {
                match sums.len() / width {
                    1 => self.sums_of::<1>(weights, stride, sums, width, next),
                    2 => self.sums_of::<2>(weights, stride, sums, width, next),
                    3 => self.sums_of::<3>(weights, stride, sums, width, next),
                    _ => self.sums_of::<TILE>(weights, stride, sums, width, next),
                }
            }
        }
    }

    /// Asks for some lines, of those there are.
    #[inline(always)]
    fn prefetch(&self, lines: Range<usize>) {
        for start in
            &self.starts[lines.start.min(self.starts.len())..lines.end.min(self.starts.len())]
        {
            let line = self.pool.as_ptr().wrapping_add(*start).cast();
            prefetch_bytes(line, self.head_dim * size_of::<bf16>());
        }
    }

    #[inline(always)]
    fn line(&self, index: usize) -> *const bf16 {
        self.pool.as_ptr().wrapping_add(self.starts[index])
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn scores_of<const M: usize>(
        self,
        q: &[bf16],
        scores: &mut [f32],
        stride: usize,
        next: Self,
    ) {
        let lines = self.starts.len();
        for first in (0..lines).step_by(TILE) {
            next.prefetch(first..first + TILE);
            // The last stands for those beyond it.
            let mut keys = [self.pool.as_ptr(); TILE];
            for (n, key) in keys.iter_mut().enumerate() {
                *key = self.line((first + n).min(lines - 1));
            }
            let mut sums = [[_mm512_setzero_ps(); TILE]; TILE];
            for start in (0..self.head_dim).step_by(NUMBERS) {
                let mask = first_of(self.head_dim - start);
                let mut numbers = [_mm512_setzero_si512(); TILE];
                for (numbers, key) in numbers.iter_mut().zip(keys) {
                    // SAFETY: a mask keeps reads inside a row.
                    *numbers = unsafe { load(key.wrapping_add(start), mask) };
                }
                for (row, sums) in sums.iter_mut().enumerate().take(M) {
                    let q = q.as_ptr().wrapping_add(row * self.head_dim + start);
                    // SAFETY: as above.
                    let q = as_pairs(unsafe { load(q, mask) });
                    for (sum, numbers) in sums.iter_mut().zip(numbers) {
                        *sum = _mm512_dpbf16_ps(*sum, q, as_pairs(numbers));
                    }
                }
            }
            // SAFETY: the machine has the instructions.
            let rows = unsafe { sum_registers(&sums) };
            for (row, sums) in rows.into_iter().enumerate().take(M) {
                let target = &mut scores[row * stride + first..][..TILE];
                // SAFETY: four numbers.
                unsafe { _mm_storeu_ps(target.as_mut_ptr(), sums) };
            }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    unsafe fn sums_of<const M: usize>(
        self,
        weights: &[bf16],
        stride: usize,
        all_sums: &mut [f32],
        width: usize,
        next: Self,
    ) {
        let lines = self.starts.len();
        // Two registers of a line at a time, so that there are sums enough to hide how long each takes.
        for start in (0..self.head_dim).step_by(2 * NUMBERS) {
            let left = self.head_dim - start;
            let masks = [first_of(left), first_of(left.saturating_sub(NUMBERS))];
            let mut sums = [[_mm512_setzero_ps(); 4]; M];
            for first in (0..lines).step_by(2) {
                if start == 0 {
                    next.prefetch(first..first + 2);
                }
                let one = self.line(first).wrapping_add(start);
                let other = self.line((first + 1).min(lines - 1)).wrapping_add(start);
                let are_two = if first + 1 < lines { u32::MAX } else { 0 };
                let mut pairs = [_mm512_setzero_si512(); 4];
                for part in 0..2 {
                    let place = part * NUMBERS;
                    // SAFETY: masks keep reads inside a row.
                    let (one, other) = unsafe {
                        let one = load(one.wrapping_add(place), masks[part]);
                        (one, load(other.wrapping_add(place), masks[part] & are_two))
                    };
                    pairs[2 * part] = _mm512_unpacklo_epi16(one, other);
                    pairs[2 * part + 1] = _mm512_unpackhi_epi16(one, other);
                }
                for (row, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: both weights lie in the row of an even number of them.
                    let weights = unsafe {
                        let two = weights.as_ptr().add(row * stride + first);
                        _mm512_set1_epi32(two.cast::<i32>().read_unaligned())
                    };
                    for (sum, pairs) in sums.iter_mut().zip(pairs) {
                        *sum = _mm512_dpbf16_ps(*sum, as_pairs(weights), as_pairs(pairs));
                    }
                }
            }
            for (row, sums) in sums.iter().enumerate() {
                for (part, [low, high]) in sums.as_chunks::<2>().0.iter().enumerate() {
                    for (half, places) in HALVES.iter().enumerate() {
                        let place = part * NUMBERS + half * WORDS;
                        let count = left.saturating_sub(place).min(WORDS);
                        // SAFETY: the machine has the instructions, and the places are 16 numbers.
                        unsafe {
                            let places = _mm512_loadu_si512(places.as_ptr().cast());
                            let numbers = _mm512_permutex2var_ps(*low, places, *high);
                            let target = &mut all_sums[row * width..][..width];
                            let target = target.as_mut_ptr().wrapping_add(start + place);
                            let mask = first_of(count) as u16;
                            _mm512_mask_storeu_ps(target, mask, numbers);
                        }
                    }
                }
            }
        }
    }
}

/// Where the numbers of each half of a register's pairs are after unpacking: in every quarter of the first register four, and
/// the next four in that of the second.
const HALVES: [[i32; WORDS]; 2] = [
    [0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23],
    [8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31],
];

/// A mask of the first numbers of a register.
#[inline(always)]
fn first_of(count: usize) -> u32 {
    if count >= NUMBERS { u32::MAX } else { (1 << count) - 1 }
}

/// The numbers that a mask has; others are 0.
///
/// # Safety
/// Those have to be there.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn load(numbers: *const bf16, mask: u32) -> __m512i {
    // SAFETY: as promised by the caller.
    unsafe { _mm512_maskz_loadu_epi16(mask, numbers.cast()) }
}
