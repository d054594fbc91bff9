//! Dot products of rows of bf16 with codes of 4 or 6 bits that stand for numbers of bf16, by AVX-512's dot products of pairs:
//! the products are exact, and added up in f32. Numbers below 2^-126 count as zero there.
//!
//! Half a lane of a register, 16 bits, has two or four neighbouring codes, so that a register of codes, shifted, has
//! all of them in turn as indices of a table of two bytes a number. [`OrderedPairs`] has the rows in the same order.

use super::Levels;
use super::lines::{Lines, Ordered, Piece, dots_by};
use super::registers::{Avx512, MOST_LANES, call_with};
use crate::scratch::Scratch;
use crate::simd::{Level, as_pairs, level, vectorize};
use half::bf16;
use std::arch::x86_64::*;
use std::ops::Range;

/// Halves of a register's lanes.
const HALVES: usize = 2 * MOST_LANES;

/// Whether a matrix is multiplied by pairs, if the rows are of bf16.
pub(super) fn takes_pairs(matrix: Lines) -> bool {
    // Where tiles are, a dot product of pairs takes as long as four multiplications in f32.
    level() == Level::Avx512Bf16
        && match matrix.levels() {
            Levels::Table(table) => table.iter().all(|number| number.to_bits() & 0xffff == 0),
            Levels::Integers { bits, .. } => bits == 4 || bits == 6,
            Levels::E4m3 => false,
        }
}

/// The numbers that the lowest six bits of a code stand for, of which those of codes of 4 bits are the first, again and
/// again.
///
/// # Safety
/// The machine needs the instructions.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn tables(levels: Levels) -> [__m512i; 2] {
    // bf16 is the upper half of f32.
    let upper = |numbers| _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(numbers));
    let both = |low, high| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    match levels {
        Levels::Integers { bits, zero } => {
            let counted = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            let sixteen = |first: i32| {
                let codes = _mm512_add_epi32(counted, _mm512_set1_epi32(first));
                let codes = _mm512_and_si512(codes, _mm512_set1_epi32((1 << bits) - 1));
                let numbers = _mm512_sub_epi32(codes, _mm512_set1_epi32(i32::from(zero)));
                upper(_mm512_castps_si512(_mm512_cvtepi32_ps(numbers)))
            };
            [both(sixteen(0), sixteen(16)), both(sixteen(32), sixteen(48))]
        }
        Levels::Table(table) => {
            // SAFETY: there are sixteen.
            let sixteen = upper(unsafe { _mm512_loadu_si512(table.as_ptr().cast()) });
            [both(sixteen, sixteen); 2]
        }
        Levels::E4m3 => [_mm512_setzero_si512(); 2],
    }
}

/// Codes of half a lane: four of 4 bits where groups are large enough and lines are whole pieces, or two.
fn codes_of_half(matrix: Lines) -> usize {
    let fits = matrix.levels().bits() == 4 && matrix.fits_fields(8);
    if fits && matrix.depth().is_multiple_of(4 * HALVES) { 4 } else { 2 }
}

/// Rows of bf16 in the order in which codes are unpacked.
pub(super) struct OrderedPairs {
    /// Codes of half a lane: 2 or 4.
    half: usize,
    /// `(rows, stride)`, whole pieces with zeros at the end.
    x: Scratch<bf16>,
    stride: usize,
}

impl OrderedPairs {
    /// `x` `(rows, depth)`, for products with these matrices. All of them have it in one order, so that sums depend on
    /// which matrices are multiplied together.
    pub(super) fn new<'m>(
        depth: usize,
        x: &[bf16],
        matrices: impl Iterator<Item = Lines<'m>>,
    ) -> Self {
        let half = matrices.map(codes_of_half).min().unwrap_or(2);
        let stride = depth.next_multiple_of(half * HALVES);
        let mut ordered = Scratch::new(x.len() / depth * stride);
        vectorize(
            #[inline(always)]
            || {
                for (x, ordered) in x.chunks_exact(depth).zip(ordered.chunks_exact_mut(stride)) {
                    match half {
                        4 => in_order::<4>(x, ordered),
                        _ => in_order::<2>(x, ordered),
                    }
                }
            },
        );
        Self { half, x: ordered, stride }
    }
}

/// A row whose pieces are `(HALVES, HALF)` as pieces `(HALF, HALVES)`, with zeros behind it. There are a multiple of
/// `HALF`, as a line of codes ends with a byte.
#[inline(always)]
fn in_order<const HALF: usize>(x: &[bf16], ordered: &mut [bf16]) {
    let (of_halves, _) = x.as_chunks::<HALF>();
    let mut pieces = ordered.chunks_exact_mut(HALF * HALVES);
    let mut put = |of_halves: &[[bf16; HALF]]| {
        let Some(piece) = pieces.next() else { return };
        for (field, ordered) in piece.chunks_exact_mut(HALVES).enumerate() {
            let (now, beyond) = ordered.split_at_mut(of_halves.len());
            now.iter_mut().zip(of_halves).for_each(|(to, of_half)| *to = of_half[field]);
            beyond.fill(bf16::ZERO);
        }
    };
    let (whole, last) = of_halves.as_chunks::<HALVES>();
    whole.iter().for_each(|of_halves| put(of_halves));
    put(last);
}

/// What codes of `BITS` bits stand for, and what they are multiplied by, of which there are `HALF` to half a lane.
#[derive(Clone, Copy)]
struct Pairs<'a, const BITS: usize, const HALF: usize> {
    x: &'a OrderedPairs,
    /// As [`tables`] makes them, the first of which is enough for codes of 4 bits.
    tables: [__m512i; 2],
}

impl<const BITS: usize, const HALF: usize> Pairs<'_, BITS, HALF> {
    /// The codes of every half of a lane, the first in its lowest bits; what is above them is of no account.
    ///
    /// # Safety
    /// There have to be those of a piece, and the machine needs the instructions.
    #[inline(always)]
    unsafe fn codes(from: *const u8) -> __m512i {
        // SAFETY: as promised by the caller.
        unsafe {
            match (BITS, HALF) {
                (4, 4) => _mm512_loadu_si512(from.cast()),
                (4, _) => _mm512_cvtepu8_epi16(_mm256_loadu_si256(from.cast())),
                _ => {
                    let quarters = const { &Avx512::pairs_of_quarters(6) };
                    let quarters = _mm512_loadu_si512(quarters.as_ptr().cast());
                    let bytes = const { &BYTES_OF_SIX_BITS };
                    let bytes = _mm512_loadu_si512(bytes.as_ptr().cast());
                    let codes = _mm512_maskz_loadu_epi32((1 << 12) - 1, from.cast());
                    let codes = _mm512_permutexvar_epi16(quarters, codes);
                    let codes = _mm512_shuffle_epi8(codes, bytes);
                    _mm512_srlv_epi16(codes, _mm512_set1_epi32(4 << 16))
                }
            }
        }
    }
}

/// Where the two bytes with the two codes of 6 bits of each half of a lane are in its quarter of a register. The codes of
/// every second half begin 4 bits too high there.
const BYTES_OF_SIX_BITS: [u8; 2 * HALVES] = {
    let mut places = [0; 2 * HALVES];
    let mut half = 0;
    while half < HALVES {
        let first = half % 8 * 3 / 2;
        places[2 * half] = first as u8;
        places[2 * half + 1] = first as u8 + 1;
        half += 1;
    }
    places
};

impl<const BITS: usize, const HALF: usize> Piece<Avx512> for Pairs<'_, BITS, HALF> {
    const FIELDS: usize = 2 * HALF;
    const FINITE: bool = false;

    #[inline(always)]
    fn bits(&self) -> usize {
        BITS
    }

    call_with!("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c");

    #[inline(always)]
    unsafe fn add<const ROWS: usize>(
        &self,
        place: usize,
        codes: *const u8,
        scale: __m512,
        totals: &mut [__m512; ROWS],
    ) {
        // SAFETY: as promised by the caller.
        unsafe {
            let mut fields = [Self::codes(codes); HALF];
            for (field, words) in fields.iter_mut().enumerate() {
                let shift = _mm512_set1_epi16((BITS * field) as i16);
                let indices = _mm512_srlv_epi16(*words, shift);
                let [first, second] = self.tables;
                *words = match BITS {
                    4 => _mm512_permutexvar_epi16(indices, first),
                    _ => _mm512_permutex2var_epi16(first, indices, second),
                };
            }
            for (row, total) in totals.iter_mut().enumerate() {
                let x = self.x.x.as_ptr().add(row * self.x.stride + place * HALF * HALVES);
                let mut dot = _mm512_setzero_ps();
                for (field, numbers) in fields.iter().enumerate() {
                    let x = _mm512_loadu_si512(x.add(field * HALVES).cast());
                    dot = _mm512_dpbf16_ps(dot, as_pairs(*numbers), as_pairs(x));
                }
                *total = _mm512_fmadd_ps(dot, scale, *total);
            }
        }
    }
}

/// As [`x86::dots`](super::x86::dots), by pairs.
///
/// # Safety
/// [`takes_pairs`] has to be true of the matrix, which is one of those that `ordered` and its `pairs` were made for.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn dots(
    ordered: &Ordered,
    pairs: &OrderedPairs,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    assert!(pairs.half <= codes_of_half(matrix));
    // SAFETY: the machine has the instructions.
    unsafe {
        let (x, tables) = (pairs, tables(matrix.levels()));
        match (matrix.levels().bits(), pairs.half) {
            (6, 2) => dots_by(ordered, &Pairs::<6, 2> { x, tables }, matrix, lines, out),
            (_, 4) => dots_by(ordered, &Pairs::<4, 4> { x, tables }, matrix, lines, out),
            _ => dots_by(ordered, &Pairs::<4, 2> { x, tables }, matrix, lines, out),
        }
    }
}
