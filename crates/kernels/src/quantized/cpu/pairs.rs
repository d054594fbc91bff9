//! Dot products of rows of bf16 with codes of 4 or 6 bits that stand for numbers of bf16, by AVX-512's dot products of pairs:
//! the products are exact, and added up in f32. Numbers below 2^-126 count as zero there.
//!
//! Half a lane of a register has [`half`](OrderedPairs::half) neighbouring codes, so that a register of codes, shifted, has
//! all of them in turn as indices of a table of two bytes a number. [`OrderedPairs`] has the rows in the same order.

use super::lines::{Lines, MOST_LANES, Ordered, Piece, dots_by};
use super::x86::Avx512;
use crate::backend::cpu::scratch::Scratch;
use crate::backend::cpu::simd::{Level, as_pairs, level, vectorize};
use crate::quantized::Levels;
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
    let halves = |numbers| _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(numbers));
    let both = |low, high| _mm512_inserti64x4::<1>(_mm512_castsi256_si512(low), high);
    match levels {
        Levels::Integers { bits, zero } => {
            let counted = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
            let sixteen = |first: i32| {
                let codes = _mm512_add_epi32(counted, _mm512_set1_epi32(first));
                let codes = _mm512_and_si512(codes, _mm512_set1_epi32((1 << bits) - 1));
                let numbers = _mm512_sub_epi32(codes, _mm512_set1_epi32(i32::from(zero)));
                halves(_mm512_castps_si512(_mm512_cvtepi32_ps(numbers)))
            };
            [both(sixteen(0), sixteen(16)), both(sixteen(32), sixteen(48))]
        }
        Levels::Table(table) => {
            // SAFETY: there are sixteen.
            let sixteen = halves(unsafe { _mm512_loadu_si512(table.as_ptr().cast()) });
            [both(sixteen, sixteen); 2]
        }
        Levels::E4m3 => [_mm512_setzero_si512(); 2],
    }
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
    /// `x` `(rows, depth)`, for products with these matrices.
    pub(super) fn new<'m>(
        depth: usize,
        x: &[bf16],
        mut matrices: impl Iterator<Item = Lines<'m>>,
    ) -> Self {
        let is_wide = |matrix: Lines| {
            let is_narrow = matrix.levels().bits() == 4 && matrix.fits_fields(8);
            is_narrow && depth.is_multiple_of(4 * HALVES)
        };
        let half = if matrices.all(is_wide) { 4 } else { 2 };
        let piece = half * HALVES;
        let stride = depth.next_multiple_of(piece);
        let rows = x.len() / depth.max(1);
        let mut ordered = Scratch::new(rows * stride);
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

/// A row whose pieces are `(HALVES, HALF)` as pieces `(HALF, HALVES)`, with zeros behind it.
#[inline(always)]
fn in_order<const HALF: usize>(x: &[bf16], ordered: &mut [bf16]) {
    let (halves, rest) = x.as_chunks::<HALF>();
    let mut pieces = ordered.chunks_exact_mut(HALF * HALVES);
    let mut put = |halves: &[[bf16; HALF]]| {
        let Some(piece) = pieces.next() else { return };
        for (field, ordered) in piece.chunks_exact_mut(HALVES).enumerate() {
            let (now, beyond) = ordered.split_at_mut(halves.len());
            now.iter_mut().zip(halves).for_each(|(to, half)| *to = half[field]);
            beyond.fill(bf16::ZERO);
        }
    };
    let (whole, last) = halves.as_chunks::<HALVES>();
    whole.iter().for_each(|halves| put(halves));
    let mut some = [[bf16::ZERO; HALF]; HALVES];
    some[..last.len()].copy_from_slice(last);
    let mut count = last.len();
    if !rest.is_empty() {
        some[count][..rest.len()].copy_from_slice(rest);
        count += 1;
    }
    put(&some[..count]);
}

/// What codes of `BITS` bits stand for, and what they are multiplied by, of which there are `HALF` to half a lane.
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
                    let quarters = _mm512_loadu_si512((&raw const SIX_BITS.quarters).cast());
                    let bytes = _mm512_loadu_si512((&raw const SIX_BITS.bytes).cast());
                    let codes = _mm512_maskz_loadu_epi32((1 << 12) - 1, from.cast());
                    let codes = _mm512_permutexvar_epi16(quarters, codes);
                    let codes = _mm512_shuffle_epi8(codes, bytes);
                    _mm512_srlv_epi16(codes, _mm512_set1_epi32(4 << 16))
                }
            }
        }
    }
}

/// Where two codes of 6 bits for each half of a lane are.
struct SixBits {
    /// The pairs of bytes of each quarter of a register.
    quarters: [u16; HALVES],
    /// The bytes of each half in its quarter, where every second one begins 4 bits too high.
    bytes: [u8; 2 * HALVES],
}

const SIX_BITS: &SixBits = &{
    let mut places = SixBits { quarters: [0; HALVES], bytes: [0; 2 * HALVES] };
    let mut half = 0;
    while half < HALVES {
        places.quarters[half] = (half / 8 * 6 + half % 8) as u16 % 32;
        let first = half % 8 * 3 / 2;
        places.bytes[2 * half] = first as u8;
        places.bytes[2 * half + 1] = first as u8 + 1;
        half += 1;
    }
    places
};

impl<const BITS: usize, const HALF: usize> Piece<Avx512> for Pairs<'_, BITS, HALF> {
    const BITS: usize = BITS;
    const FIELDS: usize = 2 * HALF;

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

/// As [`lines::dots`](super::lines::dots), by pairs.
///
/// # Safety
/// [`takes_pairs`] has to be true of the matrix.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn dots(
    ordered: &Ordered,
    pairs: &OrderedPairs,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    // SAFETY: the machine has the instructions.
    unsafe {
        let (x, tables) = (pairs, tables(matrix.levels()));
        match (matrix.levels().bits(), pairs.half) {
            (6, _) => dots_by(ordered, &Pairs::<6, 2> { x, tables }, matrix, lines, out),
            (_, 4) => dots_by(ordered, &Pairs::<4, 4> { x, tables }, matrix, lines, out),
            _ => dots_by(ordered, &Pairs::<4, 2> { x, tables }, matrix, lines, out),
        }
    }
}
