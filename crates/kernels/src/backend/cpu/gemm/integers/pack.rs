//! Rounded rows and matrices of bytes laid out for the innermost products. What is beyond the inner dimension is zero on
//! the left, so that it is of no account what it is on the right.

use super::super::kernels::PANEL;
use super::super::pack::SQUARE;
#[cfg(target_arch = "x86_64")]
use super::super::pack::transpose_square;
use super::{Kind, Side};
use crate::quantized::int8::ZERO;
use metal_candle_cpu::quantized::ByteRows;
#[cfg(target_arch = "x86_64")]
use metal_candle_cpu::simd::prefetch;
use metal_candle_cpu::simd::{prefetch_bytes, vectorize};
use std::ops::Range;

/// Rows ahead that short pieces of far apart rows are asked for: as long as memory takes.
const AHEAD: usize = 24;

/// The words of a row, with zeros beyond its integers.
#[inline(always)]
pub(super) fn pack_row(kind: Kind, integers: &[i8], words: Range<usize>, target: &mut [u32]) {
    let first = (words.start * kind.per_word()).min(integers.len());
    let last = (words.end * kind.per_word()).min(integers.len());
    let (whole, rest) = (&integers[first..last], target);
    match kind {
        #[cfg(target_arch = "x86_64")]
        Kind::Bytes | Kind::Tiles => {
            let mut groups = whole.chunks_exact(4);
            let (filled, beyond) = rest.split_at_mut(groups.len());
            for (word, group) in filled.iter_mut().zip(&mut groups) {
                *word = u32::from_le_bytes([0, 1, 2, 3].map(|index| group[index] as u8));
            }
            beyond.fill(0);
            if let Some(word) = beyond.first_mut() {
                for (index, integer) in groups.remainder().iter().enumerate() {
                    *word |= u32::from(*integer as u8) << (8 * index);
                }
            }
        }
        Kind::Pairs => {
            let mut pairs = whole.chunks_exact(2);
            let (filled, beyond) = rest.split_at_mut(pairs.len());
            for (word, two) in filled.iter_mut().zip(&mut pairs) {
                *word = pair(i16::from(two[0]), i16::from(two[1]));
            }
            beyond.fill(0);
            if let (Some(word), [last]) = (beyond.first_mut(), pairs.remainder()) {
                *word = pair(i16::from(*last), 0);
            }
        }
    }
}

#[inline(always)]
fn pair(low: i16, high: i16) -> u32 {
    u32::from(low as u16) | u32::from(high as u16) << 16
}

/// The integer that a code stands for.
#[inline(always)]
fn level(code: u8) -> i16 {
    i16::from(code) - i16::from(ZERO)
}

/// Packs a block of a right side as panels `(words, PANEL)`: some columns of it, and words along a depth of `depth`.
pub(super) fn pack_panels(
    kind: Kind,
    matrix: ByteRows,
    side: Side,
    depth: usize,
    columns: Range<usize>,
    words: Range<usize>,
    target: &mut [u32],
) {
    vectorize(
        #[inline(always)]
        || match side {
            Side::Lines => {
                let firsts = columns.clone().step_by(PANEL);
                for (first, target) in firsts.zip(target.chunks_exact_mut(words.len() * PANEL)) {
                    let lines = first..(first + PANEL).min(columns.end);
                    pack_lines(kind, matrix, lines, words.clone(), target);
                }
            }
            Side::Columns => pack_columns(kind, matrix, depth, columns, words, target),
        },
    );
}

/// A panel whose columns are rows of the matrix.
#[inline(always)]
fn pack_lines(
    kind: Kind,
    matrix: ByteRows,
    lines: Range<usize>,
    words: Range<usize>,
    target: &mut [u32],
) {
    let per_word = kind.per_word();
    for first_line in (0..PANEL).step_by(SQUARE) {
        let count = lines.len().saturating_sub(first_line).min(SQUARE);
        for first_word in words.clone().step_by(SQUARE) {
            let part = first_word..(first_word + SQUARE).min(words.end);
            let place = (first_word - words.start) * PANEL + first_line;
            // Straight from the matrix where it has whole words and lines.
            #[cfg(target_arch = "x86_64")]
            if kind.is_bytes()
                && count == SQUARE
                && part.len() == SQUARE
                && part.end * per_word <= matrix.inner
            {
                let start = (lines.start + first_line) * matrix.inner + first_word * per_word;
                let last = start + (SQUARE - 1) * matrix.inner + SQUARE * per_word;
                let source = matrix.codes[start..last].as_ptr();
                let target = &mut target[place..];
                assert!(target.len() >= (SQUARE - 1) * PANEL + SQUARE);
                for line in 0..SQUARE {
                    prefetch(source.wrapping_add((SQUARE + line) * matrix.inner));
                }
                // SAFETY: as sliced and asserted.
                unsafe { transpose_square(source, matrix.inner, target.as_mut_ptr(), PANEL) };
                continue;
            }
            let mut square = [0u32; SQUARE * SQUARE];
            for (line, square) in square.chunks_exact_mut(SQUARE).take(count).enumerate() {
                let row = &matrix.codes[(lines.start + first_line + line) * matrix.inner..];
                let row = &row[..matrix.inner];
                let codes = &row[(part.start * per_word).min(row.len())..];
                read_words(kind, codes, &mut square[..part.len()]);
            }
            for (word, target) in target[place..].chunks_mut(PANEL).take(part.len()).enumerate() {
                for (line, target) in target.iter_mut().take(SQUARE).enumerate() {
                    *target = square[line * SQUARE + word];
                }
            }
        }
    }
}

/// The words of neighbouring codes, with zeros beyond them.
#[inline(always)]
fn read_words(kind: Kind, codes: &[u8], words: &mut [u32]) {
    for (word, codes) in words.iter_mut().zip(codes.chunks(kind.per_word())) {
        *word = match kind {
            #[cfg(target_arch = "x86_64")]
            Kind::Bytes | Kind::Tiles => (0..)
                .zip(codes)
                .fold(0, |word, (index, code)| word | u32::from(*code) << (8 * index)),
            Kind::Pairs => pair(level(codes[0]), codes.get(1).map_or(0, |code| level(*code))),
        };
    }
}

/// Panels whose columns are columns of the matrix. What is neighbouring in memory goes to all panels before the next
/// word.
#[inline(always)]
fn pack_columns(
    kind: Kind,
    matrix: ByteRows,
    depth: usize,
    columns: Range<usize>,
    words: Range<usize>,
    target: &mut [u32],
) {
    const NONE: [u8; PANEL] = [ZERO; PANEL];
    let per_word = kind.per_word();
    let panel_len = words.len() * PANEL;
    for (index, word) in words.clone().enumerate() {
        for row in word * per_word..(word + 1) * per_word {
            let ahead = (row + AHEAD) * matrix.inner + columns.start;
            prefetch_bytes(matrix.codes.as_ptr().wrapping_add(ahead), columns.len());
        }
        for (panel, first) in columns.clone().step_by(PANEL).enumerate() {
            let count = PANEL.min(columns.end - first);
            let target = &mut target[panel * panel_len + index * PANEL..][..PANEL];
            // Rows beyond the last, and the columns of a part of a panel, are made up.
            let mut parts = [NONE; 4];
            let mut rows = [&NONE; 4];
            for (offset, (row, part)) in rows.iter_mut().zip(&mut parts).enumerate().take(per_word)
            {
                let place = word * per_word + offset;
                if place >= depth {
                    continue;
                }
                let codes = &matrix.codes[place * matrix.inner + first..][..count];
                *row = match codes.first_chunk::<PANEL>() {
                    Some(codes) => codes,
                    None => {
                        part[..count].copy_from_slice(codes);
                        part
                    }
                };
            }
            interleave(kind, rows, target);
        }
    }
}

/// Words of the codes of as many rows as a word has.
#[inline(always)]
fn interleave(kind: Kind, rows: [&[u8; PANEL]; 4], target: &mut [u32]) {
    match kind {
        #[cfg(target_arch = "x86_64")]
        Kind::Bytes | Kind::Tiles => {
            assert!(target.len() == PANEL);
            // SAFETY: machines with products of bytes have AVX2; there are as many words.
            unsafe { x86::interleave(rows, target.as_mut_ptr()) };
        }
        Kind::Pairs => {
            let [even, odd, ..] = rows;
            for ((word, even), odd) in target.iter_mut().zip(even).zip(odd) {
                *word = pair(level(*even), level(*odd));
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::PANEL;
    use std::arch::x86_64::*;

    /// Words of the bytes of four rows, the first in the lowest byte.
    ///
    /// # Safety
    /// There must be room for [`PANEL`] words.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) unsafe fn interleave(rows: [&[u8; PANEL]; 4], target: *mut u32) {
        const { assert!(PANEL == 32) };
        // SAFETY: as promised by the caller.
        unsafe {
            let [a, b, c, d] = rows.map(|row| _mm256_loadu_si256(row.as_ptr().cast()));
            // Pairs of bytes, then words, of the first and the second half of each 16 columns.
            let (low_ab, high_ab) = (_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b));
            let (low_cd, high_cd) = (_mm256_unpacklo_epi8(c, d), _mm256_unpackhi_epi8(c, d));
            let words = [
                _mm256_unpacklo_epi16(low_ab, low_cd),
                _mm256_unpackhi_epi16(low_ab, low_cd),
                _mm256_unpacklo_epi16(high_ab, high_cd),
                _mm256_unpackhi_epi16(high_ab, high_cd),
            ];
            let store = |place: usize, words| _mm256_storeu_si256(target.add(place).cast(), words);
            store(0, _mm256_permute2x128_si256::<0x20>(words[0], words[1]));
            store(8, _mm256_permute2x128_si256::<0x20>(words[2], words[3]));
            store(16, _mm256_permute2x128_si256::<0x31>(words[0], words[1]));
            store(24, _mm256_permute2x128_si256::<0x31>(words[2], words[3]));
        }
    }
}
