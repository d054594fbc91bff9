//! An adapter's narrow matrices as they take part in products.
//!
//! Where bf16 is multiplied as such, f32 matrices take part as sums of two bf16 numbers (`high + low`, 16 bits of
//! precision), so that nothing of them is lost beside the rounding of the result.

use crate::backend::cpu::gemm::{Block, Change, Kind, Lhs, Operand};
use crate::backend::cpu::{Disjoint, Element, Real, Values, for_each_chunk, rows_per_task};
use half::bf16;
use std::ops::Range;

/// Splits numbers into the nearest bf16 and the nearest bf16 to what that leaves.
#[inline(always)]
fn split<A: Real>(value: A) -> (bf16, bf16) {
    let mut high = [bf16::ZERO];
    bf16::narrow(&[value.to_f32()], &mut high);
    let mut wide = [0f32];
    bf16::widen(&high, &mut wide);
    let mut low = [bf16::ZERO];
    bf16::narrow(&[value.to_f32() - wide[0]], &mut low);
    (high[0], low[0])
}

/// Which part of its numbers a bf16 copy of a matrix holds.
#[derive(Clone, Copy)]
pub(super) enum Part {
    High,
    Low,
}

/// A narrow matrix `(lines, width)` as it takes part in products: itself, or bf16 copies beside each
/// other in every line, `(lines, parts · width)`.
pub(super) enum Factor<'a, A> {
    Plain(&'a [A]),
    Split(Vec<bf16>),
}

impl<'a, A: Real> Factor<'a, A> {
    pub(super) fn new(kind: Kind, matrix: &'a [A], width: usize, scale: A, parts: &[Part]) -> Self {
        if !kind.is_bf16() {
            return Factor::Plain(matrix);
        }
        let lines = matrix.len() / width.max(1);
        let mut copies = vec![bf16::ZERO; lines * parts.len() * width];
        let line = (parts.len() * width).max(1);
        let block = rows_per_task(line);
        for_each_chunk(
            &mut copies,
            block * line,
            #[inline(always)]
            |index, copies| {
                let matrix = matrix[index * block * width..].chunks_exact(width.max(1));
                for (copies, numbers) in copies.chunks_exact_mut(line).zip(matrix) {
                    for (part, copy) in parts.iter().zip(copies.chunks_exact_mut(width)) {
                        for (copy, number) in copy.iter_mut().zip(numbers) {
                            let (high, low) = split(*number * scale);
                            *copy = match part {
                                Part::High => high,
                                Part::Low => low,
                            };
                        }
                    }
                }
            },
        );
        Factor::Split(copies)
    }

    pub(super) fn values(&self) -> Values<'_, A> {
        match self {
            Factor::Plain(matrix) => Values::Native(matrix),
            Factor::Split(copies) => Values::Bf16(copies),
        }
    }
}

pub(super) const BOTH: &[Part] = &[Part::High, Part::Low];
/// With [`LEFT`] beside it: `high·high + low·high + high·low`.
pub(super) const RIGHT: &[Part] = &[Part::High, Part::High, Part::Low];
pub(super) const LEFT: &[Part] = &[Part::High, Part::Low, Part::High];

/// A product with a narrow matrix of an adapter, `rank` wide, whose two bf16 halves are columns (or
/// rows) beside each other in one result, `2·rank` wide, or terms of a sum when that is too wide for
/// one task.
#[derive(Clone, Copy)]
pub(super) struct Halves {
    pub(super) rank: usize,
    /// Widths that follow one another in the result.
    beside: usize,
    pub(super) terms: usize,
}

impl Halves {
    pub(super) fn new(kind: Kind, rank: usize) -> Self {
        match kind.is_bf16() {
            false => Halves { rank, beside: 1, terms: 1 },
            true if 2 * rank <= 32 => Halves { rank, beside: 2, terms: 1 },
            true => Halves { rank, beside: 1, terms: 2 },
        }
    }

    pub(super) fn width(self) -> usize {
        self.rank * self.beside
    }

    /// The operand of term `term` in a matrix whose lines lie `along_depth` and hold both halves.
    pub(super) fn columns<A: Real>(self, values: Values<'_, A>, term: usize) -> Operand<'_, A> {
        Operand {
            values,
            start: term * self.rank,
            stride: self.rank * self.beside.max(self.terms),
            along_depth: false,
        }
    }

    /// Adds the halves of a row up.
    #[inline(always)]
    fn sum<A: Real>(self, sums: &[A], column: usize) -> A {
        match self.beside {
            1 => sums[column],
            _ => sums[column] + sums[self.rank + column],
        }
    }
}

/// The left side of the low-rank term, `(rows, rank)` times `scale`.
pub(super) fn low_rank_left<A: Real>(
    kind: Kind,
    rows: usize,
    left: &[A],
    rank: usize,
    scale: A,
) -> Lhs<A> {
    let factor = Factor::new(kind, left, rank, scale, LEFT);
    let depth = if kind.is_bf16() { LEFT.len() * rank } else { rank };
    let multiply = |_: usize, row: &mut [A]| row.iter_mut().for_each(|left| *left *= scale);
    let change = (!kind.is_bf16()).then_some(&multiply as &Change<A>);
    Lhs::pack(kind, rows, depth, Operand::lines(factor.values(), depth), change)
}

/// Writes a narrow result `(rows, rank)` times `factor`.
pub(super) fn store_halves<'a, A: Real>(
    halves: Halves,
    factor: A,
    target: &'a Disjoint<'a, A>,
) -> impl Fn(Block<A>) + Sync + 'a {
    move |mut block| {
        let first = block.columns.start;
        let count = block.columns.len() / halves.beside;
        for (row, sums) in block.rows_mut() {
            let start = row * halves.rank + first;
            // SAFETY: every block is a part of the result of its own.
            let out = unsafe { target.slice(start..start + count) };
            for (column, out) in out.iter_mut().enumerate() {
                *out = factor * halves.sum(sums, column);
            }
        }
    }
}

/// Calls `take(row, columns, sums)` for the rows of a result whose halves are below each other.
pub(super) fn add_rows_of_halves<A: Real>(
    mut block: Block<A>,
    halves: Halves,
    take: impl Fn(usize, Range<usize>, &[A]),
) {
    let columns = block.columns.clone();
    let stride = block.stride;
    if halves.beside == 2 {
        // Both halves are in this block: it is at most 32 rows high.
        let (high, low) = block.sums.split_at_mut(halves.rank * stride);
        for (high, low) in high.iter_mut().zip(low) {
            *high += *low;
        }
        block.rows.end = block.rows.start + halves.rank;
    }
    for (row, sums) in block.rows_mut() {
        take(row, columns.clone(), sums);
    }
}
