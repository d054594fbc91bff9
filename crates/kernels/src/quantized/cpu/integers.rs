//! Dot products of a few rows rounded to integers of 8 bits with rows of bytes, for
//! [`Arithmetic::Int8Rows`](crate::quantized::Arithmetic::Int8Rows): one pass over the bytes as they lie.

use crate::backend::cpu::Real;
use crate::quantized::int8::{ZERO, round_row};
use metal_candle_cpu::quantized::ByteRows;
use metal_candle_cpu::scratch::Scratch;
#[cfg(target_arch = "x86_64")]
use metal_candle_cpu::simd::has_vnni;
use metal_candle_cpu::simd::vectorize;
use std::ops::Range;

/// Rows rounded to integers.
pub(super) struct IntegerRows {
    rows: usize,
    depth: usize,
    /// `(rows, depth)`
    integers: Scratch<i8>,
    /// Each row's scale and the sum of its integers.
    scales: Vec<(f32, i32)>,
}

impl IntegerRows {
    /// Of `x` `(rows, depth)`.
    pub(super) fn new<A: Real>(rows: usize, depth: usize, x: &[A]) -> Self {
        let mut integers = Scratch::<i8>::new(rows * depth);
        let mut scales = vec![(0.0, 0); rows];
        let mut numbers = Scratch::<f32>::new(depth);
        vectorize(
            #[inline(always)]
            || {
                for (row, (scale, sum)) in scales.iter_mut().enumerate() {
                    for (number, x) in numbers.iter_mut().zip(&x[row * depth..]) {
                        *number = x.to_f32();
                    }
                    let integers = &mut integers[row * depth..][..depth];
                    *scale = round_row(&numbers, integers);
                    *sum = integers.iter().map(|integer| i32::from(*integer)).sum();
                }
            },
        );
        IntegerRows { rows, depth, integers, scales }
    }

    /// The dot products of all rows with some rows of the matrix: `out` `(rows, lines.len())`.
    #[inline(always)]
    pub(super) fn dots<A: Real>(&self, matrix: ByteRows, lines: Range<usize>, out: &mut [A]) {
        assert!(matrix.inner == self.depth);
        for (index, line) in lines.clone().enumerate() {
            let codes = &matrix.codes[line * self.depth..][..self.depth];
            let of_line = A::from_f32(matrix.scales[line]);
            for (row, (scale, sum)) in self.scales.iter().enumerate() {
                let integers = &self.integers[row * self.depth..][..self.depth];
                let sum = A::from_i32(dot(integers, *sum, codes));
                out[row * lines.len() + index] = sum * A::from_f32(*scale) * of_line;
            }
        }
        debug_assert!(out.len() == self.rows * lines.len());
    }
}

/// `Σ integer·(code - 128)`, where the integers have this sum.
#[inline(always)]
fn dot(integers: &[i8], sum: i32, codes: &[u8]) -> i32 {
    #[cfg(target_arch = "x86_64")]
    if has_vnni() {
        // SAFETY: the machine has the instructions.
        let product = unsafe { x86::dot(integers, codes) };
        return product.wrapping_sub(i32::from(ZERO) * sum);
    }
    let _ = sum;
    let pairs = integers.iter().zip(codes);
    pairs.map(|(integer, code)| i32::from(*integer) * (i32::from(*code) - i32::from(ZERO))).sum()
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    /// Bytes of a register.
    const BYTES: usize = 64;

    /// `Σ integer·code`, modulo 2^32.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    pub(super) fn dot(integers: &[i8], codes: &[u8]) -> i32 {
        let mut sums = [_mm512_setzero_si512(); 2];
        let count = integers.len().min(codes.len());
        let mut place = 0;
        while place < count {
            for sum in &mut sums {
                let lanes = match count.saturating_sub(place) {
                    0 => 0,
                    left => u64::MAX >> BYTES.saturating_sub(left),
                };
                let (integers, codes) =
                    (integers.as_ptr().wrapping_add(place), codes.as_ptr().wrapping_add(place));
                // SAFETY: only lanes inside both slices are read.
                let (integers, codes) = unsafe {
                    (
                        _mm512_maskz_loadu_epi8(lanes, integers),
                        _mm512_maskz_loadu_epi8(lanes, codes.cast()),
                    )
                };
                *sum = _mm512_dpbusd_epi32(*sum, codes, integers);
                place += BYTES;
            }
        }
        _mm512_reduce_add_epi32(_mm512_add_epi32(sums[0], sums[1]))
    }
}
