//! The innermost products: some rows of a packed left side by one panel of a packed right side, in integers.
//!
//! Words are four bytes of both sides: integers on the left, codes on the right, which are `C + 128` and have no sign; or
//! two numbers of 16 bits, `C` on the right, for processors without products of bytes.

use super::super::kernels::{Configured, PANEL, Panel, STRIDE};
#[cfg(target_arch = "x86_64")]
use super::super::tiles;
use crate::quantized::int8::ZERO;
#[cfg(target_arch = "x86_64")]
use metal_candle_cpu::simd::{Level, has_byte_tiles, has_vnni, level};

/// Words that are multiplied at a time at most.
pub(super) const BLOCK: usize = 320;

/// How integers are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// As four bytes with AVX-512's dot product.
    #[cfg(target_arch = "x86_64")]
    Bytes,
    /// As tiles of four bytes.
    #[cfg(target_arch = "x86_64")]
    Tiles,
    /// As pairs of 16 bits.
    Pairs,
}

impl Kind {
    /// The fastest of this machine.
    pub(super) fn fastest() -> Kind {
        Self::of_machine().last().unwrap_or(Kind::Pairs)
    }

    /// Those that this machine has, the fastest last.
    pub(super) fn of_machine() -> impl Iterator<Item = Kind> {
        let kinds = [
            (Kind::Pairs, true),
            #[cfg(target_arch = "x86_64")]
            (Kind::Bytes, has_vnni()),
            #[cfg(target_arch = "x86_64")]
            (Kind::Tiles, has_byte_tiles()),
        ];
        kinds.into_iter().filter_map(|(kind, is_there)| is_there.then_some(kind))
    }

    /// Whether words are four bytes.
    pub(super) fn is_bytes(self) -> bool {
        self != Kind::Pairs
    }

    /// Integers of a word.
    pub(super) fn per_word(self) -> usize {
        if self.is_bytes() { 4 } else { 2 }
    }

    /// What is missing in the sums of a row whose integers have this sum.
    pub(super) fn missing(self, sum: i32) -> i32 {
        let zero = if self.is_bytes() { i32::from(ZERO) } else { 0 };
        -zero * sum
    }

    /// Makes this thread ready to multiply, for as long as the result lives.
    pub(super) fn prepare(self) -> Option<Configured> {
        match self {
            // SAFETY: the kind is chosen on machines that have it.
            #[cfg(target_arch = "x86_64")]
            Kind::Tiles => Some(unsafe { Configured::new() }),
            _ => None,
        }
    }
}

/// One product, whose words are those of the kind.
///
/// # Safety
/// As of [`Panel::multiply`], with the kind of integers in the place of that of numbers.
#[inline(always)]
pub(super) unsafe fn multiply(panel: Panel<i32>, kind: Kind) {
    // SAFETY: as promised by the caller; the level says which instructions there are.
    unsafe {
        match kind {
            #[cfg(target_arch = "x86_64")]
            Kind::Bytes => x86::bytes(panel),
            #[cfg(target_arch = "x86_64")]
            Kind::Tiles => tiles::bytes(panel),
            Kind::Pairs => {
                #[cfg(target_arch = "x86_64")]
                match level() {
                    Level::Baseline => portable(panel),
                    Level::Avx2 => x86::narrow_pairs(panel),
                    _ => x86::wide_pairs(panel),
                }
                #[cfg(not(target_arch = "x86_64"))]
                portable(panel);
            }
        }
    }
}

/// The two numbers of a word.
#[inline(always)]
fn pair(word: i32) -> [i32; 2] {
    [i32::from(word as i16), word >> 16]
}

/// # Safety
/// As [`multiply`], for [`Kind::Pairs`].
unsafe fn portable(panel: Panel<i32>) {
    const ROWS: usize = 4;
    for row in (0..panel.rows).step_by(ROWS) {
        let mut sums = [[0; PANEL]; ROWS];
        for word in 0..panel.words {
            // SAFETY: inside the right side, by the caller's promise.
            let right = unsafe { &*panel.rhs.add(word * PANEL).cast::<[i32; PANEL]>() };
            for (offset, sums) in sums.iter_mut().enumerate() {
                // SAFETY: inside the left side with its spare rows.
                let left = pair(unsafe { *panel.lhs.add((row + offset) * STRIDE + word) });
                for (sum, right) in sums.iter_mut().zip(right) {
                    let right = pair(*right);
                    *sum += left[0] * right[0] + left[1] * right[1];
                }
            }
        }
        for (offset, sums) in sums.iter().enumerate() {
            // SAFETY: inside the sums with their spare rows, which are this call's alone.
            let target = unsafe {
                &mut *panel.sums.add((row + offset) * panel.stride).cast::<[i32; PANEL]>()
            };
            for (target, sum) in target.iter_mut().zip(sums) {
                *target = if panel.first { *sum } else { target.wrapping_add(*sum) };
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::super::super::kernels::{Panel, Vector, by_registers};
    use std::arch::x86_64::*;

    #[derive(Clone, Copy)]
    struct Bytes(__m512i);

    impl Vector for Bytes {
        type Number = i32;
        const LANES: usize = 16;
        #[inline(always)]
        unsafe fn zero() -> Self {
            unsafe { Bytes(_mm512_setzero_si512()) }
        }
        #[inline(always)]
        unsafe fn splat(from: *const i32) -> Self {
            unsafe { Bytes(_mm512_set1_epi32(*from)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const i32) -> Self {
            unsafe { Bytes(_mm512_loadu_si512(from.cast())) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut i32) {
            unsafe { _mm512_storeu_si512(to.cast(), self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { Bytes(_mm512_add_epi32(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn multiply_add(a: Self, b: Self, sum: Self) -> Self {
            unsafe { Bytes(_mm512_dpbusd_epi32(sum.0, b.0, a.0)) }
        }
    }

    #[derive(Clone, Copy)]
    struct WidePairs(__m512i);

    impl Vector for WidePairs {
        type Number = i32;
        const LANES: usize = 16;
        #[inline(always)]
        unsafe fn zero() -> Self {
            unsafe { WidePairs(_mm512_setzero_si512()) }
        }
        #[inline(always)]
        unsafe fn splat(from: *const i32) -> Self {
            unsafe { WidePairs(_mm512_set1_epi32(*from)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const i32) -> Self {
            unsafe { WidePairs(_mm512_loadu_si512(from.cast())) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut i32) {
            unsafe { _mm512_storeu_si512(to.cast(), self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { WidePairs(_mm512_add_epi32(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn multiply_add(a: Self, b: Self, sum: Self) -> Self {
            unsafe { WidePairs(_mm512_add_epi32(sum.0, _mm512_madd_epi16(a.0, b.0))) }
        }
    }

    #[derive(Clone, Copy)]
    struct NarrowPairs(__m256i);

    impl Vector for NarrowPairs {
        type Number = i32;
        const LANES: usize = 8;
        #[inline(always)]
        unsafe fn zero() -> Self {
            unsafe { NarrowPairs(_mm256_setzero_si256()) }
        }
        #[inline(always)]
        unsafe fn splat(from: *const i32) -> Self {
            unsafe { NarrowPairs(_mm256_set1_epi32(*from)) }
        }
        #[inline(always)]
        unsafe fn load(from: *const i32) -> Self {
            unsafe { NarrowPairs(_mm256_loadu_si256(from.cast())) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut i32) {
            unsafe { _mm256_storeu_si256(to.cast(), self.0) }
        }
        #[inline(always)]
        unsafe fn add(self, other: Self) -> Self {
            unsafe { NarrowPairs(_mm256_add_epi32(self.0, other.0)) }
        }
        #[inline(always)]
        unsafe fn multiply_add(a: Self, b: Self, sum: Self) -> Self {
            unsafe { NarrowPairs(_mm256_add_epi32(sum.0, _mm256_madd_epi16(a.0, b.0))) }
        }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
    pub(super) unsafe fn bytes(panel: Panel<i32>) {
        // SAFETY: as promised by the caller.
        unsafe { by_registers::<Bytes, 12, 2>(panel) }
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn wide_pairs(panel: Panel<i32>) {
        // SAFETY: as promised by the caller.
        unsafe { by_registers::<WidePairs, 12, 2>(panel) }
    }

    #[target_feature(enable = "avx2,fma")]
    pub(super) unsafe fn narrow_pairs(panel: Panel<i32>) {
        // SAFETY: as promised by the caller.
        unsafe { by_registers::<NarrowPairs, 6, 2>(panel) }
    }
}
