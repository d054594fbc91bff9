//! Products of a few rows with a matrix in fewer bits, whose codes are read once.

use super::Elements;
use super::integers::IntegerRows;
#[cfg(target_arch = "x86_64")]
use super::lines::{Lines, Ordered};
use super::rounded::Rounded;
#[cfg(target_arch = "x86_64")]
use super::vnni::Bytes;
#[cfg(target_arch = "x86_64")]
use crate::backend::cpu::simd::has_vnni;
use crate::backend::cpu::simd::vectorize;
use crate::backend::cpu::{Real, as_f32, as_f32_mut};
use crate::matmul::few_rows::sum_lanes;
use candle_core::DType;
use std::ops::{Deref, Range};

/// Numbers that are unpacked at a time.
const PIECE: usize = 64;

/// Partial sums of a dot product.
const LANES: usize = 16;

/// Rows to be multiplied by matrices in fewer bits.
pub(crate) struct Rows<'a, A> {
    exact: Plain<&'a [A]>,
    /// As matrices of [`Arithmetic::Int8`](crate::quantized::Arithmetic::Int8) read them.
    rounded: Option<RoundedRows>,
    /// As those of [`Arithmetic::Int8Rows`](crate::quantized::Arithmetic::Int8Rows) do.
    integers: Option<IntegerRows>,
}

/// Rows in f32 or f64, `(rows, depth)`.
struct Plain<X> {
    rows: usize,
    depth: usize,
    x: X,
    #[cfg(target_arch = "x86_64")]
    ordered: Option<Ordered>,
}

struct RoundedRows {
    /// What the integers stand for.
    numbers: Plain<Vec<f32>>,
    #[cfg(target_arch = "x86_64")]
    bytes: Vec<Bytes>,
}

impl<'a, A: Real> Rows<'a, A> {
    /// `x` `(rows, depth)`, for products with these matrices.
    pub(crate) fn new<'m>(
        rows: usize,
        depth: usize,
        x: &'a [A],
        matrices: impl Iterator<Item = Elements<'m>> + Clone,
    ) -> Self {
        let mut rounding_rows = matrices.clone().filter_map(Elements::byte_rows);
        let integers = rounding_rows.next().map(|_| IntegerRows::new(rows, depth, x));
        let rounds = |matrix: &Elements| A::DTYPE == DType::F32 && matrix.view.rounds_rows();
        let exact = |matrix: &Elements| !rounds(matrix) && matrix.byte_rows().is_none();
        let exact = matrices.clone().filter(exact);
        let exact = Plain::new(rows, depth, x, exact);
        let rounding = matrices.filter(rounds);
        let rounded = as_f32(x).filter(|_| rounding.clone().next().is_some());
        let rounded = rounded.map(|x| RoundedRows::new(rows, depth, x, rounding));
        Rows { exact, rounded, integers }
    }

    /// `out[row][line] = Σ_k x[row][k]·matrix[line][k]` for some lines: `out` `(rows, lines.len())`.
    #[inline(always)]
    pub(crate) fn dots(&self, matrix: Elements, lines: Range<usize>, out: &mut [A]) {
        if let Some(integers) = &self.integers
            && let Some(matrix) = matrix.byte_rows()
        {
            return integers.dots(matrix, lines, out);
        }
        if let Some(rounded) = &self.rounded
            && matrix.view.rounds_rows()
            && let Some(out) = as_f32_mut(out)
        {
            return rounded.dots(matrix, lines, out);
        }
        self.exact.dots(matrix, lines, out);
    }
}

impl<A: Real, X: Deref<Target = [A]>> Plain<X> {
    fn new<'m>(
        rows: usize,
        depth: usize,
        x: X,
        matrices: impl Iterator<Item = Elements<'m>>,
    ) -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let mut groups = matrices
                .filter_map(|matrix| Some(Lines::of(matrix, depth)?.group_of_offsets()))
                .peekable();
            let lanes = groups.peek().and_then(|_| super::x86::lanes());
            let ordered = as_f32(&x).zip(lanes).map(|(x, lanes)| {
                vectorize(
                    #[inline(always)]
                    || Ordered::new(rows, depth, x, lanes, groups.flatten()),
                )
            });
            Plain { rows, depth, x, ordered }
        }
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = matrices;
            Plain { rows, depth, x }
        }
    }

    #[inline(always)]
    fn dots(&self, matrix: Elements, lines: Range<usize>, out: &mut [A]) {
        #[cfg(target_arch = "x86_64")]
        if let Some(ordered) = &self.ordered
            && let Some(matrix) = Lines::of(matrix, self.depth)
            && let Some(out) = as_f32_mut(out)
        {
            // SAFETY: they are ordered for registers that the machine has.
            return unsafe { super::x86::dots(ordered, matrix, lines, out) };
        }
        for (index, line) in lines.clone().enumerate() {
            for row in 0..self.rows {
                let x = &self.x[row * self.depth..][..self.depth];
                out[row * lines.len() + index] = dot(x, matrix, line * self.depth);
            }
        }
    }
}

impl RoundedRows {
    fn new<'m>(
        rows: usize,
        depth: usize,
        x: &[f32],
        matrices: impl Iterator<Item = Elements<'m>> + Clone,
    ) -> Self {
        let rounded = vectorize(
            #[inline(always)]
            || Rounded::new(rows, depth, x),
        );
        #[cfg(target_arch = "x86_64")]
        let bytes = {
            let mut bytes: Vec<Bytes> = Vec::new();
            let integers = matrices
                .clone()
                .filter(|_| has_vnni())
                .filter_map(|matrix| Lines::of(matrix, depth)?.takes_integers());
            for (bits, zero) in integers {
                if !bytes.iter().any(|bytes| bytes.is_for(bits, zero)) {
                    bytes.push(Bytes::new(&rounded, bits, zero));
                }
            }
            bytes
        };
        RoundedRows {
            numbers: Plain::new(rows, depth, rounded.numbers(), matrices),
            #[cfg(target_arch = "x86_64")]
            bytes,
        }
    }

    #[inline(always)]
    fn dots(&self, matrix: Elements, lines: Range<usize>, out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if let Some(found) = Lines::of(matrix, self.numbers.depth)
            && let Some((bits, zero)) = found.takes_integers()
            && let Some(bytes) = self.bytes.iter().find(|bytes| bytes.is_for(bits, zero))
            && let Some(ordered) = &self.numbers.ordered
        {
            // SAFETY: without the instructions there are no bytes.
            return unsafe { super::vnni::dots(bytes, ordered.sums(found), found, lines, out) };
        }
        self.numbers.dots(matrix, lines, out);
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
