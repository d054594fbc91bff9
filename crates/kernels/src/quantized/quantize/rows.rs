//! 8 bits with a scale a row, or for 128 x 128 elements: e4m3 as FP8 checkpoints have it, and integers.
//!
//! A scale is the largest magnitude divided by the largest code, and an element becomes the code next to `x / scale`.

use super::super::{Levels, OPERATION, Quantized, Scales};
use super::{Source, f32_tensor, largest, to_e4m3};
use crate::backend::cpu::for_each_chunk;
use candle_core::{Result, bail};

/// Rows and columns of a block.
const SIDE: usize = 128;

/// The largest number of e4m3.
const LARGEST: f32 = 448.0;

pub(super) fn fp8_rows(source: &Source) -> Result<Quantized> {
    let (codes, scales) = source.units(
        source.shape.1,
        8,
        #[inline(always)]
        |_, numbers, codes| {
            let scale = scale(largest(numbers), LARGEST);
            for (number, code) in numbers.iter().zip(codes) {
                *code = to_e4m3(number / scale);
            }
            scale
        },
    )?;
    let scales = Scales::Plain { scales: f32_tensor(scales)?, offsets: None };
    Quantized::new(source.shape, Levels::E4m3, source.shape.1, codes, scales)
}

pub(super) fn int8_rows(source: &Source) -> Result<Quantized> {
    let (codes, scales) = source.units(
        source.shape.1,
        8,
        #[inline(always)]
        |_, numbers, codes| {
            let scale = scale(largest(numbers), 127.0);
            for (number, code) in numbers.iter().zip(codes) {
                let level = (number / scale).round_ties_even().clamp(-127.0, 127.0);
                *code = (level + 128.0) as u8;
            }
            scale
        },
    )?;
    let levels = Levels::Integers { bits: 8, zero: 128 };
    let scales = Scales::Plain { scales: f32_tensor(scales)?, offsets: None };
    Quantized::new(source.shape, levels, source.shape.1, codes, scales)
}

/// A block's scale is written for each of its rows, and where rows aren't made of whole blocks, once for each group
/// that both a row and 128 elements are made of.
pub(super) fn fp8_blocks(source: &Source) -> Result<Quantized> {
    let (outer, inner) = source.shape;
    let across = inner.div_ceil(SIDE);
    let read = source.input.read();
    let values = read.values::<f32>()?;
    let mut blocks = vec![0f32; outer.div_ceil(SIDE) * across];
    for_each_chunk(
        &mut blocks,
        across,
        #[inline(always)]
        |band, most| {
            let mut row = vec![0f32; inner];
            for index in band * SIDE..((band + 1) * SIDE).min(outer) {
                values.read(index * inner, &mut row);
                for (most, numbers) in most.iter_mut().zip(row.chunks(SIDE)) {
                    *most = most.max(largest(numbers));
                }
            }
        },
    );
    let scales: Vec<f32> = blocks.into_iter().map(|most| scale(most, LARGEST)).collect();
    let (codes, _) = source.units(
        inner,
        8,
        #[inline(always)]
        |row, numbers, codes| {
            let scales = &scales[row / SIDE * across..][..across];
            let parts = numbers.chunks(SIDE).zip(codes.chunks_mut(SIDE)).zip(scales);
            for ((numbers, codes), scale) in parts {
                for (number, code) in numbers.iter().zip(codes) {
                    *code = to_e4m3(number / scale);
                }
            }
        },
    )?;
    let (group, scales) = spread_blocks(source.shape, (SIDE, SIDE), &scales)?;
    let scales = Scales::Plain { scales: f32_tensor(scales)?, offsets: None };
    Quantized::new(source.shape, Levels::E4m3, group, codes, scales)
}

/// Scales of blocks `(⌈out / rows⌉, ⌈in / columns⌉)`, written for each group of a matrix of `shape`, and the group's
/// size: the most elements that both a row and a block's row are made of.
///
/// # Errors
/// When blocks are empty or there is another number of scales.
pub fn spread_blocks(
    (outer, inner): (usize, usize),
    (rows, columns): (usize, usize),
    scales: &[f32],
) -> Result<(usize, Vec<f32>)> {
    if rows == 0 || columns == 0 || inner == 0 {
        bail!(
            "metal-candle-kernels: {OPERATION}: blocks of {rows} x {columns} of rows of {inner} elements, expected at least 1"
        )
    }
    let across = inner.div_ceil(columns);
    if outer.div_ceil(rows).checked_mul(across) != Some(scales.len()) {
        bail!(
            "metal-candle-kernels: {OPERATION}: {} scales, expected {} x {across}",
            scales.len(),
            outer.div_ceil(rows)
        )
    }
    let (mut group, mut rest) = (columns, inner);
    while rest > 0 {
        (group, rest) = (rest, group % rest);
    }
    let of_row = |row: usize| {
        (0..inner / group).map(move |index| scales[row / rows * across + index * group / columns])
    };
    Ok((group, (0..outer).flat_map(of_row).collect()))
}

/// The scale whose multiple `most` is the largest magnitude.
#[inline(always)]
fn scale(largest: f32, most: f32) -> f32 {
    (largest / most).max(f32::MIN_POSITIVE)
}
