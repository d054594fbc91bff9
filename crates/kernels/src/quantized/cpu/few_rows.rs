//! Products of a few rows with a matrix in fewer bits, whose codes are read once.

use super::integers::IntegerRows;
use crate::backend::cpu::{Real, Values};
#[cfg(target_arch = "x86_64")]
use crate::backend::cpu::{as_f32, as_f32_mut};
use metal_candle_cpu::few_rows::sum_lanes;
use metal_candle_cpu::quantized::Elements;
#[cfg(target_arch = "x86_64")]
use metal_candle_cpu::quantized::{
    lines::{Lines, Ordered},
    x86,
};
#[cfg(target_arch = "x86_64")]
use metal_candle_cpu::simd::vectorize;
use std::ops::Range;

/// Numbers that are unpacked at a time.
const PIECE: usize = 64;

/// Partial sums of a dot product.
const LANES: usize = 16;

/// Rows in f32 or f64, `(rows, depth)`, to be multiplied by matrices in fewer bits.
pub(crate) struct Rows<'a, A> {
    rows: usize,
    depth: usize,
    x: &'a [A],
    #[cfg(target_arch = "x86_64")]
    ordered: Option<Ordered>,
    /// As matrices of [`Arithmetic::Int8Rows`](crate::quantized::Arithmetic::Int8Rows) read them.
    integers: Option<IntegerRows>,
}

impl<'a, A: Real> Rows<'a, A> {
    /// `x` `(rows, depth)`, as it is stored and as it is computed with, for products with these matrices.
    pub(crate) fn new<'m>(
        rows: usize,
        depth: usize,
        (stored, x): (Values<A>, &'a [A]),
        matrices: impl Iterator<Item = Elements<'m>> + Clone,
    ) -> Self {
        #[cfg(not(target_arch = "x86_64"))]
        let _ = stored;
        let mut of_integers = matrices.clone().filter_map(Elements::byte_rows);
        let integers = of_integers.next().map(|_| IntegerRows::new(rows, depth, x));
        #[cfg(target_arch = "x86_64")]
        let ordered = {
            let lines = matrices
                .filter(|matrix| matrix.byte_rows().is_none())
                .filter_map(|matrix| Lines::of(matrix, depth));
            let way = lines.clone().next().and_then(|_| x86::way());
            let stored = match stored {
                Values::Bf16(stored) => Some(stored),
                _ => None,
            };
            as_f32(x).zip(way).map(|(x, way)| {
                vectorize(
                    #[inline(always)]
                    || Ordered::new(rows, depth, (x, stored), way, lines),
                )
            })
        };
        Rows {
            rows,
            depth,
            x,
            #[cfg(target_arch = "x86_64")]
            ordered,
            integers,
        }
    }

    /// `out[row][line] = Σ_k x[row][k]·matrix[line][k]` for some lines: `out` `(rows, lines.len())`.
    #[inline(always)]
    pub(crate) fn dots(&self, matrix: Elements, lines: Range<usize>, out: &mut [A]) {
        if self.rows == 0 {
            return;
        }
        if let Some(integers) = &self.integers
            && let Some(matrix) = matrix.byte_rows()
        {
            return integers.dots(matrix, lines, out);
        }
        #[cfg(target_arch = "x86_64")]
        if let Some(ordered) = &self.ordered
            && let Some(matrix) = Lines::of(matrix, self.depth)
            && let Some(out) = as_f32_mut(out)
        {
            // SAFETY: they are ordered for registers that the machine has.
            return unsafe { x86::dots(ordered, matrix, lines, out) };
        }
        for (index, line) in lines.clone().enumerate() {
            for row in 0..self.rows {
                let x = &self.x[row * self.depth..][..self.depth];
                out[row * lines.len() + index] = dot(x, matrix, line * self.depth);
            }
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
        Values::Quantized(matrix).read(start + index * PIECE, numbers);
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
            Values::Quantized(matrix).read(k * width + columns.start + first, numbers);
            for (row, out) in out.chunks_exact_mut(columns.len()).enumerate() {
                let x = x[row * x_stride + k];
                for (out, number) in out[first..].iter_mut().zip(&*numbers) {
                    *out += x * *number;
                }
            }
        }
    }
}
