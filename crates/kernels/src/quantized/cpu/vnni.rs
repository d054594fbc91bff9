//! Dot products of rows rounded to 8 bits with lines of integers, in integers: the VNNI of AVX-512.

use super::lines::{Lines, Piece, by_lines, in_batches};
use super::rounded::{ROUNDED, Rounded};
use super::x86::Avx512;
use std::arch::x86_64::*;
use std::ops::Range;

/// Lanes of a register.
const LANES: usize = 16;

/// What a register of codes is multiplied by.
#[derive(Clone)]
#[repr(C, align(64))]
struct Factors {
    /// Integers in the order of codes of 8 bits; of codes of 4 bits, those at even places and those at odd ones.
    integers: [[i8; 4 * LANES]; 2],
    /// `-zero·Σ integers` of every lane.
    start: [i32; LANES],
    /// What a lane's integers are multiples of.
    scales: [f32; LANES],
}

/// Rounded rows in the order of codes.
pub(super) struct Bytes {
    bits: usize,
    zero: u8,
    rows: usize,
    depth: usize,
    /// Pieces of a row.
    pieces: usize,
    /// `(rows, pieces)`
    factors: Vec<Factors>,
}

impl Bytes {
    /// For codes of 4 or 8 bits.
    pub(super) fn new(x: &Rounded, bits: usize, zero: u8) -> Self {
        let of_lane = 32 / bits;
        let piece = LANES * of_lane;
        let pieces = x.depth.div_ceil(piece);
        let none = Factors { integers: [[0; 64]; 2], start: [0; LANES], scales: [0.0; LANES] };
        let mut factors = vec![none; x.rows * pieces];
        for row in 0..x.rows {
            let factors = &mut factors[row * pieces..][..pieces];
            for (factors, piece_integers) in factors.iter_mut().zip(x.integers(row).chunks(piece)) {
                let sides = 8 / bits;
                for (place, integer) in piece_integers.iter().enumerate() {
                    factors.integers[place % sides][place / sides] = *integer;
                    factors.start[place / of_lane] -= i32::from(zero) * i32::from(*integer);
                }
            }
            for (index, factors) in factors.iter_mut().enumerate() {
                for (lane, scale) in factors.scales.iter_mut().enumerate() {
                    let group = (index * piece + lane * of_lane) / ROUNDED;
                    *scale = x.scales(row).get(group).copied().unwrap_or(0.0);
                }
            }
        }
        Bytes { bits, zero, rows: x.rows, depth: x.depth, pieces, factors }
    }

    /// Whether they are for such codes.
    pub(super) fn is_for(&self, bits: usize, zero: u8) -> bool {
        (self.bits, self.zero) == (bits, zero)
    }
}

/// The factors of codes of `BITS` bits.
struct Product<'a, const BITS: usize>(&'a Bytes);

impl<const BITS: usize> Piece<Avx512> for Product<'_, BITS> {
    const BITS: usize = BITS;
    const LANE: usize = 32 / BITS;

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
            let codes = _mm512_loadu_si512(codes.cast());
            let nibble = _mm512_set1_epi8(0x0f);
            for (row, total) in totals.iter_mut().enumerate() {
                let factors = self.0.factors.as_ptr().add(row * self.0.pieces + place);
                let first = _mm512_load_si512((&raw const (*factors).integers[0]).cast());
                let second = _mm512_load_si512((&raw const (*factors).integers[1]).cast());
                let start = _mm512_load_si512((&raw const (*factors).start).cast());
                let dot = match BITS {
                    8 => _mm512_dpbusd_epi32(start, codes, first),
                    _ => {
                        let low = _mm512_and_si512(codes, nibble);
                        let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), nibble);
                        let dot = _mm512_dpbusd_epi32(start, low, first);
                        _mm512_dpbusd_epi32(dot, high, second)
                    }
                };
                let scale =
                    _mm512_mul_ps(scale, _mm512_load_ps((&raw const (*factors).scales).cast()));
                *total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), scale, *total);
            }
        }
    }
}

/// The dot products of all rows with some lines: `out` `(rows, lines.len())`. `sums` are of the rounded rows, see
/// [`in_batches`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
pub(super) fn dots(x: &Bytes, sums: &[f32], matrix: Lines, lines: Range<usize>, out: &mut [f32]) {
    assert!(out.len() == x.rows * lines.len());
    assert!(matrix.takes_integers() == Some((x.bits, x.zero)) && matrix.depth() == x.depth);
    macro_rules! by_lines {
        ($bits:literal, $rows:literal, $task:expr, $some:expr) => {
            by_lines::<Avx512, _, $rows>($task, &Product::<$bits>(x), $some, out)
        };
    }
    // SAFETY: the caller has the instructions.
    unsafe {
        in_batches::<Avx512>(
            matrix,
            sums,
            lines,
            #[inline(always)]
            |task, some| match (x.bits, x.rows) {
                (8, 1) => by_lines!(8, 1, task, some),
                (8, 2) => by_lines!(8, 2, task, some),
                (8, 3) => by_lines!(8, 3, task, some),
                (8, _) => by_lines!(8, 4, task, some),
                (_, 1) => by_lines!(4, 1, task, some),
                (_, 2) => by_lines!(4, 2, task, some),
                (_, 3) => by_lines!(4, 3, task, some),
                _ => by_lines!(4, 4, task, some),
            },
        );
    }
}
