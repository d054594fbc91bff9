//! The innermost products: some rows in block floating point by one panel of integers.

use super::super::kernels::{PANEL, STRIDE};
use super::GROUP;
use metal_candle_cpu::quantized::registers::{Avx2, Avx512, Registers};
use metal_candle_cpu::simd::{has_narrow_byte_dots, has_vnni};
use std::arch::x86_64::*;

/// The instructions by which pairs of 16 bits are multiplied, which come with those for bytes.
#[derive(Clone, Copy, Debug)]
pub(super) enum By {
    /// Registers of 512 bits.
    Avx512Vnni,
    /// Registers of 256 bits.
    AvxVnni,
}

impl By {
    /// Those that this machine has, the fastest first.
    pub(super) fn of_machine() -> impl Iterator<Item = By> {
        let ways = [(By::Avx512Vnni, has_vnni()), (By::AvxVnni, has_narrow_byte_dots())];
        ways.into_iter().filter_map(|(by, is_there)| is_there.then_some(by))
    }
}

/// One product: `rows` of the left side, from `lhs` on and [`STRIDE`] words apart, by a panel `(words, PANEL)`. Sums have
/// `stride` numbers to a row and are added to, or set when `first`.
#[derive(Clone, Copy)]
pub(super) struct Panel {
    pub words: usize,
    pub rows: usize,
    pub lhs: *const u32,
    /// The power of two of each row's groups, and the sum of their numbers; those of a row are `groups` after those of the
    /// row before.
    pub powers: *const f32,
    pub of_groups: *const f32,
    pub groups: usize,
    pub rhs: *const u32,
    /// `(numbers / scaled, PANEL)`
    pub scales: *const f32,
    /// `(numbers / GROUP, PANEL)`, if there are any.
    pub offsets: Option<*const f32>,
    pub sums: *mut f32,
    pub stride: usize,
    pub first: bool,
}

impl Panel {
    /// # Safety
    /// There must be such sums.
    #[inline(always)]
    unsafe fn sums_at(&self, row: usize, column: usize) -> *mut f32 {
        // SAFETY: as promised by the caller.
        unsafe { self.sums.add(row * self.stride + column) }
    }

    /// With a scale for each `scaled` numbers, a group of a row or half of one.
    ///
    /// # Safety
    /// The machine must have the instructions. The words must be those of whole groups; the left side must have `rows +
    /// SPARE_ROWS` rows of them and of powers and sums, the right side [`PANEL`] times as many, and the sums `rows +
    /// SPARE_ROWS` rows that no one else touches. Sums of the products of a group's integers may not overflow, nor may a matrix
    /// with offsets have more than one scale a group.
    pub(super) unsafe fn multiply(self, by: By, scaled: usize) {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
        unsafe fn wide(panel: Panel, scaled: usize) {
            // SAFETY: as promised by the caller.
            unsafe { for_scales::<Avx512, 12, 2>(panel, scaled) }
        }
        #[target_feature(enable = "avxvnni,avx2,fma")]
        unsafe fn narrow(panel: Panel, scaled: usize) {
            // SAFETY: as promised by the caller.
            unsafe { for_scales::<Avx2, 6, 2>(panel, scaled) }
        }
        // SAFETY: as promised by the caller.
        unsafe {
            match by {
                By::Avx512Vnni => wide(self, scaled),
                By::AvxVnni => narrow(self, scaled),
            }
        }
    }
}

/// # Safety
/// As [`Panel::multiply`].
#[inline(always)]
unsafe fn for_scales<R: PairRegisters, const M: usize, const N: usize>(
    panel: Panel,
    scaled: usize,
) {
    const HALF: usize = GROUP / 2;
    // SAFETY: as promised by the caller.
    unsafe {
        match scaled {
            HALF => by_registers::<R, M, N, HALF>(panel),
            _ => by_registers::<R, M, N, GROUP>(panel),
        }
    }
}

/// The panel in tiles of `M` rows and `N` registers, whose sums stay in registers for `SCALED` numbers. The order of a sum
/// is the same for all tiles.
///
/// # Safety
/// As [`Panel::multiply`].
#[inline(always)]
unsafe fn by_registers<R: PairRegisters, const M: usize, const N: usize, const SCALED: usize>(
    panel: Panel,
) {
    let words = SCALED / 2;
    // SAFETY: offsets stay inside what the caller promised.
    unsafe {
        for row in (0..panel.rows).step_by(M) {
            let lhs = panel.lhs.add(row * STRIDE);
            for column in (0..PANEL).step_by(N * R::LANES) {
                let mut first = panel.first;
                if let Some(offsets) = panel.offsets {
                    add_offsets::<R, M, N>(panel, offsets, row, column);
                    first = false;
                }
                for part in 0..panel.words / words {
                    let mut integers = [[R::zero_words(); N]; M];
                    for word in part * words..(part + 1) * words {
                        let mut right = [R::zero_words(); N];
                        for (n, right) in right.iter_mut().enumerate() {
                            *right =
                                R::load_words(panel.rhs.add(word * PANEL + column + n * R::LANES));
                        }
                        for (m, integers) in integers.iter_mut().enumerate() {
                            let left = R::words(*lhs.add(m * STRIDE + word));
                            for (sum, right) in integers.iter_mut().zip(right) {
                                *sum = R::add_pairs(*sum, left, right);
                            }
                        }
                    }
                    let mut scales = [R::zeros(); N];
                    for (n, scale) in scales.iter_mut().enumerate() {
                        let place = part * PANEL + column + n * R::LANES;
                        *scale = R::load(panel.scales.add(place));
                    }
                    let group = part * SCALED / GROUP;
                    for (m, integers) in integers.iter().enumerate() {
                        let power = panel.powers.add((row + m) * panel.groups + group);
                        let power = R::floats(*power);
                        for (n, integers) in integers.iter().enumerate() {
                            let target = panel.sums_at(row + m, column + n * R::LANES);
                            let sum = if first { R::zeros() } else { R::load(target) };
                            // First by the scale, as powers may be large.
                            let scaled = R::multiply(R::converted(*integers), scales[n]);
                            R::store(R::multiply_add(scaled, power, sum), target);
                        }
                    }
                    first = false;
                }
            }
        }
    }
}

/// Adds what a tile's offsets bring to its sums, or sets them.
///
/// # Safety
/// As [`Panel::multiply`].
#[inline(always)]
unsafe fn add_offsets<R: PairRegisters, const M: usize, const N: usize>(
    panel: Panel,
    offsets: *const f32,
    row: usize,
    column: usize,
) {
    // SAFETY: offsets stay inside what the caller promised.
    unsafe {
        let mut sums = [[R::zeros(); N]; M];
        for group in 0..2 * panel.words / GROUP {
            let mut right = [R::zeros(); N];
            for (n, right) in right.iter_mut().enumerate() {
                *right = R::load(offsets.add(group * PANEL + column + n * R::LANES));
            }
            for (m, sums) in sums.iter_mut().enumerate() {
                let left = R::floats(*panel.of_groups.add((row + m) * panel.groups + group));
                for (sum, right) in sums.iter_mut().zip(right) {
                    *sum = R::multiply_add(left, right, *sum);
                }
            }
        }
        for (m, sums) in sums.iter().enumerate() {
            for (n, sum) in sums.iter().enumerate() {
                let target = panel.sums_at(row + m, column + n * R::LANES);
                let before = if panel.first { R::zeros() } else { R::load(target) };
                R::store(R::add(before, *sum), target);
            }
        }
    }
}

/// Registers whose lanes are two integers of 16 bits.
///
/// # Safety
/// As of [`Registers`].
trait PairRegisters: Registers {
    unsafe fn words(word: u32) -> Self::Words;
    /// `sum + a0·b0 + a1·b1`, lane by lane.
    unsafe fn add_pairs(sum: Self::Words, a: Self::Words, b: Self::Words) -> Self::Words;
}

// SAFETY of all: as the callers of a method promise.
impl PairRegisters for Avx512 {
    #[inline(always)]
    unsafe fn words(word: u32) -> __m512i {
        unsafe { _mm512_set1_epi32(word as i32) }
    }
    #[inline(always)]
    unsafe fn add_pairs(sum: __m512i, a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_dpwssd_epi32(sum, a, b) }
    }
}

// SAFETY of all: as the callers of a method promise.
impl PairRegisters for Avx2 {
    #[inline(always)]
    unsafe fn words(word: u32) -> __m256i {
        unsafe { _mm256_set1_epi32(word as i32) }
    }
    #[inline(always)]
    unsafe fn add_pairs(sum: __m256i, a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_dpwssd_avx_epi32(sum, a, b) }
    }
}
