//! Dot products of rows of bf16 with codes of 4 bits that stand for numbers of bf16, by AVX-512's dot products of pairs:
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

/// The numbers that codes of 4 bits stand for, where all are numbers of bf16.
fn numbers(levels: Levels) -> Option<[bf16; 16]> {
    let numbers = match levels {
        Levels::Table(table) => *table,
        Levels::Integers { bits: 4, zero } => {
            std::array::from_fn(|code| code as f32 - f32::from(zero))
        }
        _ => return None,
    };
    let bits = numbers.map(f32::to_bits);
    let are_halves = bits.iter().all(|bits| bits & 0xffff == 0);
    are_halves.then(|| bits.map(|bits| bf16::from_bits((bits >> 16) as u16)))
}

/// Whether a matrix is multiplied by pairs, if the rows are of bf16.
pub(super) fn takes_pairs(matrix: Lines) -> bool {
    // Where tiles are, a dot product of pairs takes as long as four multiplications in f32.
    level() == Level::Avx512Bf16 && numbers(matrix.levels()).is_some()
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
        let is_wide = |matrix: Lines| depth.is_multiple_of(4 * HALVES) && matrix.fits_fields(8);
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

/// What codes stand for, and what they are multiplied by, of which there are `HALF` to half a lane.
struct Pairs<'a, const HALF: usize> {
    x: &'a OrderedPairs,
    /// Twice the 16 numbers: of a code in 16 bits, five are looked at.
    table: __m512i,
}

impl<const HALF: usize> Piece<Avx512> for Pairs<'_, HALF> {
    const BITS: usize = 4;
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
            let words = match HALF {
                4 => _mm512_loadu_si512(codes.cast()),
                _ => _mm512_cvtepu8_epi16(_mm256_loadu_si256(codes.cast())),
            };
            let mut fields = [words; HALF];
            for (field, words) in fields.iter_mut().enumerate() {
                let moved = _mm512_srlv_epi16(*words, _mm512_set1_epi16(4 * field as i16));
                *words = _mm512_permutexvar_epi16(moved, self.table);
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
    x: &Ordered,
    pairs: &OrderedPairs,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    let numbers = numbers(matrix.levels()).unwrap_or_default();
    let mut table = [bf16::ZERO; HALVES];
    table[..16].copy_from_slice(&numbers);
    table[16..].copy_from_slice(&numbers);
    // SAFETY: there are as many numbers, and the machine has the instructions.
    unsafe {
        let table = _mm512_loadu_si512(table.as_ptr().cast());
        match pairs.half {
            4 => dots_by::<Avx512>(x, &Pairs::<4> { x: pairs, table }, matrix, lines, out),
            _ => dots_by::<Avx512>(x, &Pairs::<2> { x: pairs, table }, matrix, lines, out),
        }
    }
}
