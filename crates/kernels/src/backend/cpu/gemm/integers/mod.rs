//! Products of rows rounded to integers of 8 bits with matrices of bytes that have a scale a row, see
//! [`quantized::int8`](crate::quantized::int8).
//!
//! ```text
//! y  (rows, outer) = (q·Cᵀ)·scale·c        dx (rows, inner) = (q·C)·scale        C = codes - 128
//! ```
//!
//! with `q` and `scale` those of the rows of x, or of dy·c for the second, where c are the matrix's scales. A result is
//! `(sum·scale[n])·c[o]`, in the type that sums are kept in. The sums are exact integers, and are the same from all
//! kernels.

mod kernels;
mod pack;

use super::kernels::{PANEL, Panel, SPARE_ROWS, STRIDE};
use super::pack::Blocks;
use crate::backend::cpu::element::{Real, Values, as_f32};
use crate::backend::cpu::parallel::{Disjoint, run};
use crate::quantized::int8::round_row;
use metal_candle_cpu::quantized::ByteRows;
use metal_candle_cpu::scratch::Scratch;
use metal_candle_cpu::simd::vectorize;
use std::ops::Range;

pub(crate) use kernels::Kind;

/// How a matrix of bytes takes part in a product.
#[derive(Clone, Copy)]
pub(crate) enum Side {
    /// Its rows are the columns of the right side: `x·Wᵀ`.
    Lines,
    /// Its columns are: `dy·W`.
    Columns,
}

/// A product of integers, as a term of a sum.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub lhs: &'a Rounded,
    pub rhs: ByteRows<'a>,
    pub side: Side,
}

/// A left side of rows rounded to integers, packed.
pub(crate) struct Rounded {
    kind: Kind,
    rows: usize,
    depth: usize,
    blocks: Blocks,
    /// For every block its rows, [`STRIDE`] words apart.
    words: Scratch<u32>,
    /// `(rows)`
    scales: Scratch<f32>,
    /// What is missing in the sums of each row, `(rows)`: kernels of bytes multiply by `C + 128`.
    missing: Scratch<i32>,
}

impl Rounded {
    /// Rounds `x` `(rows, depth)`, with its columns multiplied by `factors` `(depth)` if there are any.
    pub(crate) fn pack<A: Real>(
        rows: usize,
        depth: usize,
        x: Values<A>,
        factors: Option<&[f32]>,
    ) -> Self {
        Self::pack_for(Kind::fastest(), rows, depth, x, factors)
    }

    fn pack_for<A: Real>(
        kind: Kind,
        rows: usize,
        depth: usize,
        x: Values<A>,
        factors: Option<&[f32]>,
    ) -> Self {
        /// Rows of a task.
        const ROWS: usize = 16;
        assert!(factors.is_none_or(|factors| factors.len() == depth));
        let words = depth.div_ceil(kind.per_word()).next_multiple_of(16);
        let blocks = Blocks::of_words(depth, words, kernels::BLOCK);
        let padded = rows + SPARE_ROWS;
        let mut rounded = Rounded {
            kind,
            rows,
            depth,
            blocks,
            words: Scratch::new(blocks.count() * padded * STRIDE),
            scales: Scratch::new(rows),
            missing: Scratch::new(rows),
        };
        let words = Disjoint::new(&mut rounded.words);
        let scales = Disjoint::new(&mut rounded.scales);
        let missing = Disjoint::new(&mut rounded.missing);
        run(
            rows.div_ceil(ROWS),
            #[inline(always)]
            |task| {
                let mut stored = Scratch::<A>::new(depth);
                let mut numbers = Scratch::<f32>::new(depth);
                let mut integers = Scratch::<i8>::new(depth);
                for row in task * ROWS..(task * ROWS + ROWS).min(rows) {
                    x.read(row * depth, &mut stored);
                    let scale = {
                        let numbers = in_f32(&stored, &mut numbers);
                        match factors {
                            None => round_row(numbers, &mut integers),
                            Some(factors) => {
                                multiply(numbers, factors);
                                round_row(numbers, &mut integers)
                            }
                        }
                    };
                    let sum: i32 = integers.iter().map(|integer| i32::from(*integer)).sum();
                    // SAFETY: every row is that of one task.
                    unsafe {
                        scales.slice(row..row + 1)[0] = scale;
                        missing.slice(row..row + 1)[0] = kind.missing(sum);
                    }
                    for block in 0..blocks.count() {
                        let part = blocks.words(block);
                        let start = (block * padded + row) * STRIDE;
                        // SAFETY: as above.
                        let target = unsafe { words.slice(start..start + part.len()) };
                        pack::pack_row(kind, &integers, part, target);
                    }
                }
            },
        );
        rounded
    }

    /// Where the words of a block start in row `row`.
    fn place(&self, block: usize, row: usize) -> usize {
        (block * (self.rows + SPARE_ROWS) + row) * STRIDE
    }
}

/// Numbers as f32, rounded if they are wider.
#[inline(always)]
fn in_f32<'a, A: Real>(stored: &'a [A], numbers: &'a mut [f32]) -> &'a mut [f32] {
    match as_f32(stored) {
        Some(stored) => numbers.copy_from_slice(stored),
        None => {
            for (number, stored) in numbers.iter_mut().zip(stored) {
                *number = stored.to_f32();
            }
        }
    }
    numbers
}

#[inline(always)]
fn multiply(numbers: &mut [f32], factors: &[f32]) {
    for (number, factor) in numbers.iter_mut().zip(factors) {
        *number *= *factor;
    }
}

impl Product<'_> {
    /// Sets a part of `sums` to the product, or adds it when `accumulate`, on this thread. `sums` has `stride` numbers to
    /// a row.
    pub(super) fn add<A: Real>(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        sums: &mut [A],
        stride: usize,
        accumulate: bool,
    ) {
        let lhs = self.lhs;
        assert!(rows.end <= lhs.rows);
        // The sums of a panel's columns, kept for all panels where there is another block to be added.
        let of_panel = (rows.len() + SPARE_ROWS) * PANEL;
        let (blocks, panels) = (lhs.blocks.count(), columns.len().div_ceil(PANEL));
        let kept = if blocks == 1 { 1 } else { panels };
        let mut integers = Scratch::<i32>::new(kept * of_panel);
        if blocks == 0 {
            integers.fill(0);
        }
        let scale = |panel: usize, integers: &[i32], sums: &mut [A]| {
            let first = columns.start + panel * PANEL;
            let part = first..(first + PANEL).min(columns.end);
            self.scale(
                rows.clone(),
                part,
                integers,
                &mut sums[panel * PANEL..],
                stride,
                accumulate,
            );
        };
        for block in 0..blocks {
            let words = lhs.blocks.words(block);
            let mut right = Scratch::<u32>::new(panels * PANEL * words.len());
            let (columns, part) = (columns.clone(), words.clone());
            pack::pack_panels(lhs.kind, self.rhs, self.side, lhs.depth, columns, part, &mut right);
            let _configured = lhs.kind.prepare();
            for (index, right) in right.chunks_exact(words.len() * PANEL).enumerate() {
                let integers = &mut integers[index.min(kept - 1) * of_panel..][..of_panel];
                let panel = Panel {
                    words: words.len(),
                    rows: rows.len(),
                    lhs: lhs.words[lhs.place(block, rows.start)..].as_ptr().cast(),
                    rhs: right.as_ptr().cast(),
                    sums: integers.as_mut_ptr(),
                    stride: PANEL,
                    first: block == 0,
                };
                // SAFETY: both sides were packed for this kind, which this machine has and the thread is prepared for, the left
                // one with spare rows, and the sums have spare rows.
                unsafe { kernels::multiply(panel, lhs.kind) };
                if blocks == 1 {
                    scale(index, integers, sums);
                }
            }
        }
        if blocks != 1 {
            for (index, integers) in integers.chunks_exact(of_panel).enumerate() {
                scale(index, integers, sums);
            }
        }
    }

    /// Sets some rows and a panel's columns of a result to the multiples of their sums `(rows, PANEL)`, or adds them.
    fn scale<A: Real>(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        integers: &[i32],
        sums: &mut [A],
        stride: usize,
        accumulate: bool,
    ) {
        let mut of_columns = [A::ONE; PANEL];
        if let Side::Lines = self.side {
            for (to, scale) in of_columns.iter_mut().zip(&self.rhs.scales[columns.clone()]) {
                *to = A::from_f32(*scale);
            }
        }
        vectorize(
            #[inline(always)]
            || {
                let lines = sums.chunks_mut(stride).zip(integers.chunks_exact(PANEL));
                let scales = self.lhs.scales[rows.clone()].iter().zip(&self.lhs.missing[rows]);
                for ((sums, integers), (scale, missing)) in lines.zip(scales) {
                    let scale = A::from_f32(*scale);
                    let sums = &mut sums[..columns.len()];
                    for ((sum, integer), of_column) in
                        sums.iter_mut().zip(integers).zip(&of_columns)
                    {
                        let integer = integer.wrapping_add(*missing);
                        let product = A::from_i32(integer) * scale * *of_column;
                        *sum = if accumulate { *sum + product } else { product };
                    }
                }
            },
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::gemm::{Block, Job, Term, products};
    use std::sync::Mutex;

    /// Any of the kinds that this machine has, of which products take but the fastest.
    #[test]
    fn every_kind_and_side_gives_the_exact_product() {
        let kinds: Vec<Kind> = Kind::of_machine().collect();
        for (rows, outer, inner) in [(1, 1, 1), (13, 33, 31), (40, 97, 70), (26, 700, 1500)] {
            let number = |index: usize| ((index * 7919 + 13) % 255) as i32 - 127;
            let codes: Vec<u8> = (0..outer * inner).map(|i| (number(i + 5) + 128) as u8).collect();
            let ones = vec![1.0; outer];
            let rhs = ByteRows { codes: &codes, scales: &ones, inner };
            for (side, depth, columns) in
                [(Side::Lines, inner, outer), (Side::Columns, outer, inner)]
            {
                // With 127 in each row, integers are what they are rounded to.
                let left =
                    |row: usize, k: usize| if k == 0 { 127 } else { number(row * depth + k) };
                let x: Vec<f64> =
                    (0..rows * depth).map(|i| f64::from(left(i / depth, i % depth))).collect();
                let mut exact = vec![0.0; rows * columns];
                for (place, exact) in exact.iter_mut().enumerate() {
                    let (row, column) = (place / columns, place % columns);
                    let code = |k: usize| match side {
                        Side::Lines => codes[column * inner + k],
                        Side::Columns => codes[k * inner + column],
                    };
                    let products = (0..depth).map(|k| left(row, k) * (i32::from(code(k)) - 128));
                    *exact = f64::from(products.sum::<i32>());
                }
                for kind in &kinds {
                    let lhs = Rounded::pack_for(*kind, rows, depth, Values::Native(&x), None);
                    let found = Mutex::new(vec![f64::NAN; rows * columns]);
                    let finish = |mut block: Block<f64>| {
                        let mut found = found.lock().unwrap();
                        let first = block.columns.start;
                        for (row, sums) in block.rows_mut() {
                            found[row * columns + first..][..sums.len()].copy_from_slice(sums);
                        }
                    };
                    let terms = [Term::Integers(Product { lhs: &lhs, rhs, side })];
                    products(&[Job { rows, columns, terms: &terms, finish: &finish }]);
                    let found = found.into_inner().unwrap();
                    assert_eq!(found, exact, "{kind:?} {rows} {outer} {inner}");
                }
            }
        }
    }
}
