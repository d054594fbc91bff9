//! Products of a few rows with a matrix in fewer bits, whose codes are read once.

use super::Elements;
use crate::backend::cpu::Real;
#[cfg(target_arch = "x86_64")]
use crate::backend::cpu::simd::{Level, level};
use crate::matmul::few_rows::sum_lanes;
#[cfg(target_arch = "x86_64")]
use candle_core::DType;
use std::ops::Range;

/// Numbers that are unpacked at a time.
const PIECE: usize = 64;

/// Partial sums of a dot product.
const LANES: usize = 16;

/// `out[row][line] = Σ_k x[row][k]·matrix[line][k]` for some lines of a matrix whose lines start `stride` apart:
/// `x` `(rows, depth)`, `out` `(rows, lines.len())`.
#[inline(always)]
pub(crate) fn dots<A: Real>(
    rows: usize,
    depth: usize,
    x: &[A],
    matrix: Elements,
    stride: usize,
    lines: Range<usize>,
    out: &mut [A],
) {
    #[cfg(target_arch = "x86_64")]
    if A::DTYPE == DType::F32
        && level() >= Level::Avx512
        && let Some(matrix) = super::x86::Lines::of(matrix, depth, stride)
    {
        // SAFETY: the sums are in f32, so these are; both have as many numbers as before.
        let (x, out) = unsafe { (as_f32(x), as_f32_mut(out)) };
        // SAFETY: the level says that the machine has the instructions.
        return unsafe { super::x86::dots(rows, depth, x, matrix, lines, out) };
    }
    for (index, line) in lines.clone().enumerate() {
        for row in 0..rows {
            let x = &x[row * depth..][..depth];
            out[row * lines.len() + index] = dot(x, matrix, line * stride);
        }
    }
}

/// The dot product of `x` with the numbers from `start` on.
#[inline(always)]
fn dot<A: Real>(x: &[A], matrix: Elements, start: usize) -> A {
    let mut sums = [A::ZERO; LANES];
    let mut numbers = [A::ZERO; PIECE];
    for (index, x) in x.chunks(PIECE).enumerate() {
        let numbers = &mut numbers[..x.len()];
        matrix.read(start + index * PIECE, numbers);
        for (x, numbers) in x.chunks(LANES).zip(numbers.chunks(LANES)) {
            for ((sum, x), number) in sums.iter_mut().zip(x).zip(numbers) {
                *sum += *x * *number;
            }
        }
    }
    sum_lanes(sums)
}

/// `out[row][column] += Σ_k x[row][k]·matrix[k][column]` for some columns of a matrix `width` wide: the rows of
/// `x` `(rows, depth)` start `x_stride` apart; `out` is `(rows, columns.len())`.
#[inline(always)]
pub(crate) fn add_combinations<A: Real>(
    x: &[A],
    x_stride: usize,
    depth: usize,
    matrix: Elements,
    width: usize,
    columns: Range<usize>,
    out: &mut [A],
) {
    let mut numbers = [A::ZERO; PIECE];
    for k in 0..depth {
        for first in (0..columns.len()).step_by(PIECE) {
            let numbers = &mut numbers[..PIECE.min(columns.len() - first)];
            matrix.read(k * width + columns.start + first, numbers);
            for (row, out) in out.chunks_exact_mut(columns.len()).enumerate() {
                let x = x[row * x_stride + k];
                for (out, number) in out[first..].iter_mut().zip(&*numbers) {
                    *out += x * *number;
                }
            }
        }
    }
}

/// # Safety
/// `A` must be f32.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn as_f32<A: Real>(numbers: &[A]) -> &[f32] {
    // SAFETY: as promised by the caller.
    unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), numbers.len()) }
}

/// # Safety
/// `A` must be f32.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn as_f32_mut<A: Real>(numbers: &mut [A]) -> &mut [f32] {
    // SAFETY: as promised by the caller.
    unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast(), numbers.len()) }
}
