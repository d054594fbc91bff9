//! Products of rows of bf16 numbers with codes that are read as integers, by instructions for pairs of 16 bits, which do
//! twice the work of those for f32.
//!
//! ```text
//! y[n][o] = Σ_g (Σ_k∈g q[n][k]·c[o][k])·p[n][g]·scale[o][g] + (Σ_k∈g q[n][k])·p[n][g]·offset[o][g]
//! ```
//!
//! The numbers of a row are block floating point: integers `q` of 16 bits and one power of two `p` for each [`GROUP`]
//! neighbours. A bf16 number has 8 bits, so it is exact beside others that are up to 2^7 times as large, and what is lost
//! of smaller ones is below 2^-15 of the largest. Sums of integers are exact; those over groups are in f32.

mod kernels;
#[cfg(test)]
mod tests;

use super::kernels::{PANEL, SPARE_ROWS, STRIDE};
use super::pack::{Blocks, SQUARE, transpose_square};
use crate::backend::cpu::element::{Real, Values, as_f32_mut};
use crate::backend::cpu::parallel::{Disjoint, run};
use candle_core::DType;
use half::bf16;
use kernels::{By, Panel};
use metal_candle_cpu::quantized::{IntegerLines, PowerOfTwo};
use metal_candle_cpu::scratch::Scratch;
use metal_candle_cpu::simd::{prefers_bf16, vectorize};
use metal_candle_cpu::unwritten::Plain;
use std::ops::Range;

/// Neighbours of a row that have a power of two in common.
const GROUP: usize = 32;

/// Words of two numbers that are multiplied at a time at most.
const BLOCK: usize = 320;

/// Bits of an integer but for its sign.
const BITS: u32 = 15;

/// What the largest bf16 number, which has 8 bits, may be as an integer.
const LARGEST: i32 = 0xff << (BITS - 8);

/// Sums of a group have room for any products.
const _: () = assert!((GROUP as i32 * LARGEST).checked_mul(IntegerLines::LARGEST).is_some());

/// A matrix as rows are multiplied by it so, where that is the fastest way of this machine.
pub(crate) fn right_side<'a, A: Real>(
    x: Values<A>,
    weight: Values<'a, A>,
    depth: usize,
) -> Option<IntegerLines<'a>> {
    let (Values::Bf16(_), Values::Quantized(weight)) = (x, weight) else { return None };
    if prefers_bf16() || A::DTYPE != DType::F32 {
        return None;
    }
    By::of_machine().next()?;
    IntegerLines::of(weight, depth).filter(|lines| fits(lines, depth))
}

/// Whether groups of the matrix are some whole ones of the rows, or halves of them.
fn fits(lines: &IntegerLines, depth: usize) -> bool {
    // Offsets are multiplied by the sums of the rows' groups.
    let halves = lines.group() == GROUP / 2 && !lines.has_offsets();
    depth.is_multiple_of(GROUP) && (lines.group().is_multiple_of(GROUP) || halves)
}

/// A left side in block floating point, packed.
pub(crate) struct BlockFloats {
    rows: usize,
    depth: usize,
    blocks: Blocks,
    /// For every block its rows, [`STRIDE`] words apart.
    words: Scratch<u32>,
    /// `(rows, groups)`, with spare rows.
    powers: Scratch<f32>,
    /// Those of the numbers of each group, `(rows, groups)`, with spare rows.
    sums: Scratch<f32>,
}

impl BlockFloats {
    /// Of `x`, which begins with `(rows, depth)`, a row of whole groups.
    pub(crate) fn pack(rows: usize, depth: usize, x: &[bf16]) -> Self {
        /// Rows of a task.
        const ROWS: usize = 16;
        assert!(depth.is_multiple_of(GROUP) && x.len() >= rows * depth);
        let blocks = Blocks::of_words(depth, depth / 2, BLOCK);
        let (padded, groups) = (rows + SPARE_ROWS, depth / GROUP);
        let mut packed = BlockFloats {
            rows,
            depth,
            blocks,
            words: Scratch::new(blocks.count() * padded * STRIDE),
            powers: Scratch::new(padded * groups),
            sums: Scratch::new(padded * groups),
        };
        let words = Disjoint::new(&mut packed.words);
        let powers = Disjoint::new(&mut packed.powers);
        let sums = Disjoint::new(&mut packed.sums);
        run(rows.div_ceil(ROWS), |task| {
            vectorize(
                #[inline(always)]
                || {
                    for row in task * ROWS..(task * ROWS + ROWS).min(rows) {
                        let x = &x[row * depth..][..depth];
                        for block in 0..blocks.count() {
                            let part = blocks.words(block);
                            let start = (block * padded + row) * STRIDE;
                            let of_part = row * groups + 2 * part.start / GROUP
                                ..row * groups + 2 * part.end / GROUP;
                            // SAFETY: every row is that of one task.
                            let (words, powers, sums) = unsafe {
                                (
                                    words.slice(start..start + part.len()),
                                    powers.slice(of_part.clone()),
                                    sums.slice(of_part),
                                )
                            };
                            put(&x[2 * part.start..2 * part.end], words, powers, sums);
                        }
                    }
                },
            );
        });
        packed
    }

    /// Where the words of a block start in row `row`.
    fn place(&self, block: usize, row: usize) -> usize {
        (block * (self.rows + SPARE_ROWS) + row) * STRIDE
    }
}

/// Puts whole groups of a row into words of two integers.
#[inline(always)]
fn put(x: &[bf16], words: &mut [u32], powers: &mut [f32], sums: &mut [f32]) {
    let groups = x.as_chunks::<GROUP>().0.iter().zip(words.as_chunks_mut::<{ GROUP / 2 }>().0);
    for ((x, words), (power, of_group)) in groups.zip(powers.iter_mut().zip(sums)) {
        let mut size = 0;
        for number in x {
            size = size.max(number.to_bits() & 0x7fff);
        }
        let scaled = PowerOfTwo::of(u32::from(size) << 16, BITS);
        let mut integers = [0i32; GROUP];
        let mut sum = 0i32;
        for (integer, number) in integers.iter_mut().zip(x) {
            *integer = scaled.integer(f32::from_bits(u32::from(number.to_bits()) << 16));
            sum = sum.wrapping_add(*integer);
        }
        for (word, [low, high]) in words.iter_mut().zip(integers.as_chunks::<2>().0) {
            *word = *low as u32 & 0xffff | (*high as u32) << 16;
        }
        *power = scaled.power;
        *of_group = sum as f32 * scaled.power;
    }
}

/// A product with the lines of a matrix, as a term of a sum.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub lhs: &'a BlockFloats,
    pub rhs: IntegerLines<'a>,
}

impl Product<'_> {
    /// Sets a part of `sums` to the product, or adds it when `accumulate`, on this thread. `sums` has `stride` numbers to
    /// a row, and spare rows.
    pub(super) fn add<A: Real>(
        &self,
        rows: Range<usize>,
        columns: Range<usize>,
        sums: &mut [A],
        stride: usize,
        accumulate: bool,
    ) {
        match (By::of_machine().next(), as_f32_mut(sums)) {
            (Some(by), Some(sums)) => self.add_by(by, rows, columns, sums, stride, accumulate),
            _ => unreachable!("sums are in f32, and the machine has the instructions"),
        }
    }

    fn add_by(
        &self,
        by: By,
        rows: Range<usize>,
        columns: Range<usize>,
        sums: &mut [f32],
        stride: usize,
        accumulate: bool,
    ) {
        let (lhs, rhs) = (self.lhs, self.rhs);
        let groups = lhs.depth / GROUP;
        // Numbers of a row and of a line whose sum of products is multiplied at once.
        let scaled = rhs.group().min(GROUP);
        assert!(fits(&rhs, lhs.depth) && rows.end <= lhs.rows);
        for block in 0..lhs.blocks.count() {
            let words = lhs.blocks.words(block);
            let numbers = 2 * words.start..2 * words.end;
            let of_panel = numbers.len() / scaled * PANEL;
            let mut right = Scratch::new(words.len() * PANEL);
            let mut scales = Scratch::new(of_panel);
            let mut offsets = Scratch::new(if rhs.has_offsets() { of_panel } else { 0 });
            for (index, first) in columns.clone().step_by(PANEL).enumerate() {
                let lines = first..(first + PANEL).min(columns.end);
                pack_lines(rhs, lines.clone(), numbers.clone(), &mut right);
                pack_scales(rhs, lines, numbers.clone(), scaled, &mut scales, &mut offsets);
                let group = rows.start * groups + numbers.start / GROUP;
                let panel = Panel {
                    words: words.len(),
                    rows: rows.len(),
                    lhs: lhs.words[lhs.place(block, rows.start)..].as_ptr(),
                    powers: lhs.powers[group..].as_ptr(),
                    of_groups: lhs.sums[group..].as_ptr(),
                    groups,
                    rhs: right.as_ptr(),
                    scales: scales.as_ptr(),
                    offsets: rhs.has_offsets().then_some(offsets.as_ptr()),
                    sums: sums[index * PANEL..].as_mut_ptr(),
                    stride,
                    first: block == 0 && !accumulate,
                };
                // SAFETY: the machine has the instructions, both sides were packed with spare rows and whole panels, and so
                // were the sums, as the caller says.
                unsafe { panel.multiply(by, scaled) };
            }
        }
    }
}

/// Turns a square of words of four bytes, whose lines are `stride` numbers apart, into a part of a panel.
#[inline(always)]
fn turn_square<S: Plain, W: Plain>(source: &[S], stride: usize, target: &mut [W]) {
    const { assert!(size_of::<W>() == 4) };
    let stride = stride * size_of::<S>();
    assert!(size_of_val(source) >= (SQUARE - 1) * stride + SQUARE * size_of::<W>());
    assert!(target.len() >= (SQUARE - 1) * PANEL + SQUARE);
    // SAFETY: as asserted.
    unsafe { transpose_square(source.as_ptr().cast(), stride, target.as_mut_ptr(), PANEL) };
}

/// Packs words of some lines as a panel `(words, PANEL)`. What is beyond the lines has no meaning.
fn pack_lines(rhs: IntegerLines, lines: Range<usize>, numbers: Range<usize>, target: &mut [u32]) {
    let count = numbers.len();
    let mut integers = Scratch::<i16>::new(SQUARE * count);
    vectorize(
        #[inline(always)]
        || {
            for (half, first) in lines.clone().step_by(SQUARE).enumerate() {
                let some = first..(first + SQUARE).min(lines.end);
                for (line, integers) in some.zip(integers.chunks_exact_mut(count)) {
                    rhs.read(line, numbers.clone(), integers);
                }
                for word in (0..count / 2).step_by(SQUARE) {
                    let target = &mut target[word * PANEL + half * SQUARE..];
                    turn_square(&integers[2 * word..], count, target);
                }
            }
        },
    );
}

/// Packs the scales, and the offsets if there are any, of some lines' numbers, as `(numbers / scaled, PANEL)`.
fn pack_scales(
    rhs: IntegerLines,
    lines: Range<usize>,
    numbers: Range<usize>,
    scaled: usize,
    scales: &mut [f32],
    offsets: &mut [f32],
) {
    let groups = numbers.start / rhs.group()..numbers.end.div_ceil(rhs.group());
    // Whole squares of lines and groups, which are turned, and whole registers.
    const { assert!(SQUARE.is_multiple_of(IntegerLines::LANES)) };
    let room = groups.len().next_multiple_of(SQUARE);
    let mut by_line = [Scratch::new(PANEL * room), Scratch::new(PANEL * room)];
    let [from, added] = &mut by_line;
    let each = from.chunks_exact_mut(room).zip(added.chunks_exact_mut(room));
    for (line, (from, added)) in lines.zip(each) {
        let added = if rhs.has_offsets() { added } else { &mut [] };
        rhs.read_scales(line, groups.start, from, added);
    }
    let mut by_group = Scratch::new(room * PANEL);
    for (by_line, target) in by_line.iter().zip([scales, offsets]) {
        if target.is_empty() {
            continue;
        }
        for (line, group) in (0..PANEL)
            .step_by(SQUARE)
            .flat_map(|line| (0..room).step_by(SQUARE).map(move |group| (line, group)))
        {
            let target = &mut by_group[group * PANEL + line..];
            turn_square(&by_line[line * room + group..], room, target);
        }
        for (index, target) in target.chunks_exact_mut(PANEL).enumerate() {
            let group = (numbers.start + index * scaled) / rhs.group() - groups.start;
            target.copy_from_slice(&by_group[group * PANEL..][..PANEL]);
        }
    }
}
