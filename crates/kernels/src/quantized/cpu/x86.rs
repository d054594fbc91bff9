//! Dot products with codes by AVX-512: what sixteen or more of them stand for is multiplied and added up in
//! registers, and scaled a group at a time.

use super::{Elements, View};
use crate::backend::cpu::scratch::Scratch;
use crate::backend::cpu::simd::prefetch;
use crate::quantized::Levels;
use std::arch::x86_64::*;
use std::ops::Range;

/// Numbers of a register.
const LANES: usize = 16;

/// Bytes ahead that codes are asked for.
const AHEAD: usize = 512;

/// A matrix whose lines are whole groups.
#[derive(Clone, Copy)]
pub(super) struct Lines<'a> {
    view: &'a View<'a>,
    /// Where the first line starts, and how far lines are apart.
    start: usize,
    stride: usize,
    /// Where the numbers end.
    end: usize,
}

impl<'a> Lines<'a> {
    /// `None` where groups aren't whole registers or don't end with a line.
    #[inline(always)]
    pub(super) fn of(matrix: Elements<'a>, depth: usize, stride: usize) -> Option<Self> {
        let Elements { view, start, len } = matrix;
        let whole = [depth, stride, start].iter().all(|count| count.is_multiple_of(view.group));
        // Codes of 4 bits come 32 at a time.
        let unit = if view.levels.bits() == 4 { 2 * LANES } else { LANES };
        (whole && view.group.is_multiple_of(unit)).then_some(Lines {
            view,
            start,
            stride,
            end: start + len,
        })
    }
}

/// As [`dots`](super::dots).
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
pub(super) fn dots(
    rows: usize,
    depth: usize,
    x: &[f32],
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    let x = &x[..rows * depth];
    let mut sorted = Scratch::new(if matrix.view.levels.bits() == 4 { x.len() } else { 0 });
    // Numbers in the order in which codes are unpacked: of 32, those at even places first.
    for (x, sorted) in x.chunks_exact(2 * LANES).zip(sorted.chunks_exact_mut(2 * LANES)) {
        let (even, odd) = sorted.split_at_mut(LANES);
        for ((x, even), odd) in x.chunks_exact(2).zip(even).zip(odd) {
            (*even, *odd) = (x[0], x[1]);
        }
    }
    // What each group's offset is multiplied by.
    let group = matrix.view.group;
    let mut sums = Scratch::new(if matrix.view.has_offsets() { x.len() / group } else { 0 });
    for (sum, x) in sums.iter_mut().zip(x.chunks_exact(group)) {
        *sum = x.iter().sum();
    }
    let x = if sorted.is_empty() { x } else { &sorted };
    let mut first = 0;
    // As many rows at a time as there are registers for.
    while first < rows {
        let count = (rows - first).min(4);
        let x = &x[first * depth..(first + count) * depth];
        let sums = match sums.len() {
            0 => &[][..],
            _ => &sums[first * depth / group..(first + count) * depth / group],
        };
        let out = &mut out[first * lines.len()..(first + count) * lines.len()];
        match count {
            1 => by_levels::<1>(depth, x, sums, matrix, lines.clone(), out),
            2 => by_levels::<2>(depth, x, sums, matrix, lines.clone(), out),
            3 => by_levels::<3>(depth, x, sums, matrix, lines.clone(), out),
            _ => by_levels::<4>(depth, x, sums, matrix, lines.clone(), out),
        }
        first += count;
    }
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
fn by_levels<const ROWS: usize>(
    depth: usize,
    x: &[f32],
    sums: &[f32],
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    let (bytes, group) = (matrix.view.codes, matrix.view.group);
    let table = match matrix.view.levels {
        Levels::Table(table) => Some(*table),
        Levels::Integers { bits: 4, zero } => {
            Some(std::array::from_fn(|code| code as f32 - f32::from(zero)))
        }
        _ => None,
    };
    if let Some(table) = table {
        // SAFETY: there are sixteen numbers.
        let table = unsafe { _mm512_loadu_ps(table.as_ptr()) };
        let dot = |element: usize, x: [&[f32]; ROWS]| {
            nibbles(&bytes[element / 2..][..group / 2], table, x)
        };
        return by_lines(depth, x, sums, matrix, lines, out, dot);
    }
    macro_rules! by_code {
        ($bits:literal, $number:expr) => {
            by_lines(depth, x, sums, matrix, lines, out, |element, x| {
                sixteens::<ROWS, $bits>(&bytes[element / 8 * $bits..], group, $number, x)
            })
        };
    }
    match matrix.view.levels {
        Levels::Integers { bits, zero } => {
            let zero = _mm512_set1_epi32(i32::from(zero));
            let number = |codes: __m128i| {
                _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_cvtepu8_epi32(codes), zero))
            };
            match bits {
                2 => by_code!(2, number),
                3 => by_code!(3, number),
                5 => by_code!(5, number),
                6 => by_code!(6, number),
                _ => by_code!(8, number),
            }
        }
        _ => by_code!(8, |codes| e4m3(codes)),
    }
}

/// Every line's groups, whose dot products `dot(first element, rows of x)` gives unscaled.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
fn by_lines<const ROWS: usize>(
    depth: usize,
    x: &[f32],
    sums: &[f32],
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
    dot: impl Fn(usize, [&[f32]; ROWS]) -> [__m512; ROWS],
) {
    let group = matrix.view.group;
    let groups = depth / group;
    for (index, line) in lines.clone().enumerate() {
        let first = matrix.start + line * matrix.stride;
        assert!(first + depth <= matrix.end);
        let mut total = [_mm512_setzero_ps(); ROWS];
        let mut added = [0f32; ROWS];
        for place in 0..groups {
            let x = std::array::from_fn(|row| &x[row * depth + place * group..][..group]);
            let dots = dot(first + place * group, x);
            let (scale, offset) = matrix.view.scale(first / group + place);
            let scale = _mm512_set1_ps(scale);
            for (total, dot) in total.iter_mut().zip(dots) {
                *total = _mm512_fmadd_ps(dot, scale, *total);
            }
            if !sums.is_empty() {
                for (row, added) in added.iter_mut().enumerate() {
                    *added += sums[row * groups + place] * offset;
                }
            }
        }
        for (row, (total, added)) in total.into_iter().zip(added).enumerate() {
            out[row * lines.len() + index] = _mm512_reduce_add_ps(total) + added;
        }
    }
}

/// The dot products of rows with a group of codes of 4 bits: those at even places, and those at odd ones.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
fn nibbles<const ROWS: usize>(bytes: &[u8], table: __m512, x: [&[f32]; ROWS]) -> [__m512; ROWS] {
    let mut dots = [_mm512_setzero_ps(); ROWS];
    for (step, bytes) in bytes.chunks_exact(LANES).enumerate() {
        prefetch(bytes.as_ptr().wrapping_add(AHEAD));
        // SAFETY: there are sixteen bytes.
        let codes = unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) };
        let codes = _mm512_cvtepu8_epi32(codes);
        // Only the lowest four bits of an index count.
        let even = _mm512_permutexvar_ps(codes, table);
        let odd = _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(codes), table);
        for (dot, x) in dots.iter_mut().zip(x) {
            let x = &x[2 * LANES * step..][..2 * LANES];
            *dot = _mm512_fmadd_ps(odd, load(&x[LANES..]), _mm512_fmadd_ps(even, load(x), *dot));
        }
    }
    dots
}

/// The dot products of rows with a group of codes of `BITS` bits, sixteen at a time.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
fn sixteens<const ROWS: usize, const BITS: usize>(
    bytes: &[u8],
    group: usize,
    number: impl Fn(__m128i) -> __m512,
    x: [&[f32]; ROWS],
) -> [__m512; ROWS] {
    let mut dots = [_mm512_setzero_ps(); ROWS];
    for step in 0..group / LANES {
        let bytes = &bytes[2 * BITS * step..];
        prefetch(bytes.as_ptr().wrapping_add(AHEAD));
        let codes = match BITS {
            8 => {
                let bytes = &bytes[..LANES];
                // SAFETY: there are sixteen bytes.
                unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) }
            }
            _ => {
                let [low, high] = [&bytes[..BITS], &bytes[BITS..2 * BITS]].map(|bytes| {
                    let mut word = [0; 8];
                    word[..BITS].copy_from_slice(bytes);
                    let mask = u64::from_le_bytes([(1 << BITS) - 1; 8]);
                    _pdep_u64(u64::from_le_bytes(word), mask) as i64
                });
                _mm_set_epi64x(high, low)
            }
        };
        let numbers = number(codes);
        for (dot, x) in dots.iter_mut().zip(x) {
            *dot = _mm512_fmadd_ps(numbers, load(&x[LANES * step..]), *dot);
        }
    }
    dots
}

/// 8-bit floats with 4 bits of exponent and 3 of mantissa, which aren't NaN.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
fn e4m3(codes: __m128i) -> __m512 {
    let codes = _mm256_cvtepu8_epi16(codes);
    let sign = _mm256_slli_epi16::<8>(_mm256_and_si256(codes, _mm256_set1_epi16(0x80)));
    // The bits where an f16 has them, whose exponent counts from 15 and not from 7.
    let rest = _mm256_slli_epi16::<7>(_mm256_and_si256(codes, _mm256_set1_epi16(0x7f)));
    _mm512_mul_ps(_mm512_cvtph_ps(_mm256_or_si256(sign, rest)), _mm512_set1_ps(256.0))
}

#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2")]
fn load(x: &[f32]) -> __m512 {
    let x = &x[..LANES];
    // SAFETY: there are sixteen numbers.
    unsafe { _mm512_loadu_ps(x.as_ptr()) }
}
