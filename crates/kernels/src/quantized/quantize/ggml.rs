//! ggml's blocks as its `quantize_row_*_ref` functions make them, without an importance matrix, in the same order of
//! operations.

use super::super::{BLOCK, Levels, Quantized, Scales};
use super::{Source, bytes_tensor, largest};
use candle_core::{Device, Result, Tensor};
use half::f16;

/// A group whose largest magnitude is below it is all zeros.
const NOTHING: f32 = 1e-15;

pub(super) fn q4_0(source: &Source) -> Result<Quantized> {
    signed(source, 4, "Q4_0")
}

pub(super) fn q5_0(source: &Source) -> Result<Quantized> {
    signed(source, 5, "Q5_0")
}

/// The number of the largest magnitude has the lowest code.
fn signed(source: &Source, bits: usize, name: &str) -> Result<Quantized> {
    source.require_groups(32, name)?;
    let (zero, most) = (1i8 << (bits - 1), (1i8 << bits) - 1);
    let (codes, scales) = source.units(
        32,
        bits,
        #[inline(always)]
        |_, numbers, codes| {
            let scale = first_largest(numbers) / -f32::from(zero);
            let reciprocal = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            for (number, code) in numbers.iter().zip(codes) {
                let level = number * reciprocal + (f32::from(zero) + 0.5);
                *code = (truncate(level).min(most) & most) as u8;
            }
            f16::from_f32(scale)
        },
    )?;
    let levels = Levels::Integers { bits, zero: zero as u8 };
    let scales = Scales::Plain { scales: f16_tensor(scales)?, offsets: None };
    Quantized::new(source.shape, levels, 32, codes, scales)
}

pub(super) fn q4_1(source: &Source) -> Result<Quantized> {
    unsigned(source, 4, "Q4_1")
}

pub(super) fn q5_1(source: &Source) -> Result<Quantized> {
    unsigned(source, 5, "Q5_1")
}

/// Codes count from the smallest number.
fn unsigned(source: &Source, bits: usize, name: &str) -> Result<Quantized> {
    source.require_groups(32, name)?;
    let most = (1i8 << bits) - 1;
    let (codes, kept) = source.units(
        32,
        bits,
        #[inline(always)]
        |_, numbers, codes| {
            let low = numbers.iter().fold(f32::MAX, |low, x| if *x < low { *x } else { low });
            let high = numbers.iter().fold(f32::MIN, |high, x| if *x > high { *x } else { high });
            let scale = (high - low) / f32::from(most);
            let reciprocal = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            for (number, code) in numbers.iter().zip(codes) {
                let level = (number - low) * reciprocal + 0.5;
                *code = (truncate(level).min(most) & most) as u8;
            }
            (f16::from_f32(scale), f16::from_f32(low))
        },
    )?;
    let (scales, offsets): (Vec<f16>, Vec<f16>) = kept.into_iter().unzip();
    let levels = Levels::Integers { bits, zero: 0 };
    let scales = Scales::Plain { scales: f16_tensor(scales)?, offsets: Some(f16_tensor(offsets)?) };
    Quantized::new(source.shape, levels, 32, codes, scales)
}

pub(super) fn q8_0(source: &Source) -> Result<Quantized> {
    source.require_groups(32, "Q8_0")?;
    let (codes, scales) = source.units(
        32,
        8,
        #[inline(always)]
        |_, numbers, codes| {
            let scale = largest(numbers) / 127.0;
            let reciprocal = if scale == 0.0 { 0.0 } else { 1.0 / scale };
            for (number, code) in numbers.iter().zip(codes) {
                *code = truncate((number * reciprocal).round()) as u8 ^ 0x80;
            }
            f16::from_f32(scale)
        },
    )?;
    let levels = Levels::Integers { bits: 8, zero: 128 };
    let scales = Scales::Plain { scales: f16_tensor(scales)?, offsets: None };
    Quantized::new(source.shape, levels, 32, codes, scales)
}

/// What is kept of 256 numbers in Q4_K and Q5_K.
#[derive(Clone, Copy, Default)]
struct Offset {
    scales: [u8; 8],
    offsets: [u8; 8],
    large: f16,
    large_offset: f16,
}

/// What is kept of 256 numbers in Q6_K.
#[derive(Clone, Copy, Default)]
struct Signed {
    scales: [u8; 16],
    large: f16,
}

pub(super) fn q4_k(source: &Source) -> Result<Quantized> {
    with_offsets(source, 4, "Q4_K", Search { first: -1.0, steps: 20 })
}

pub(super) fn q5_k(source: &Source) -> Result<Quantized> {
    with_offsets(source, 5, "Q5_K", Search { first: -0.5, steps: 15 })
}

fn with_offsets(source: &Source, bits: usize, name: &str, search: Search) -> Result<Quantized> {
    source.require_groups(BLOCK, name)?;
    let most = (1 << bits) - 1;
    let (codes, kept) = source.units(
        BLOCK,
        bits,
        #[inline(always)]
        |_, numbers, codes| offset_block(numbers, codes, most, search),
    )?;
    let scales = Scales::Blocks {
        scales: bytes_tensor(kept.iter().flat_map(|kept| kept.scales).collect())?,
        signed: false,
        large: f16_tensor(kept.iter().map(|kept| kept.large).collect())?,
        offsets: Some((
            bytes_tensor(kept.iter().flat_map(|kept| kept.offsets).collect())?,
            f16_tensor(kept.iter().map(|kept| kept.large_offset).collect())?,
        )),
    };
    let levels = Levels::Integers { bits, zero: 0 };
    Quantized::new(source.shape, levels, 32, codes, scales)
}

fn offset_block(numbers: &[f32], codes: &mut [u8], most: i32, search: Search) -> Offset {
    let (mut scales, mut offsets) = ([0f32; 8], [0f32; 8]);
    let groups = numbers.chunks(32).zip(codes.chunks_mut(32));
    for ((numbers, codes), (scale, offset)) in groups.zip(scales.iter_mut().zip(&mut offsets)) {
        let squares = numbers.iter().fold(0.0, |sum, x| sum + x * x);
        let typical = (squares / 32.0).sqrt();
        let mut weights = [0f32; 32];
        for (weight, number) in weights.iter_mut().zip(numbers) {
            *weight = typical + number.abs();
        }
        (*scale, *offset) = fit_with_offset(numbers, &weights, codes, most, search);
    }
    let highest = |all: &[f32]| all.iter().fold(0f32, |most, x| if *x > most { *x } else { most });
    let (largest_scale, largest_offset) = (highest(&scales), highest(&offsets));
    let reciprocal = |most: f32| if most > 0.0 { 63.0 / most } else { 0.0 };
    let (per_scale, per_offset) = (reciprocal(largest_scale), reciprocal(largest_offset));
    let code = |x: f32| (nearest(x) as u8).min(63);
    let kept = Offset {
        scales: scales.map(|scale| code(per_scale * scale)),
        offsets: offsets.map(|offset| code(per_offset * offset)),
        large: f16::from_f32(largest_scale / 63.0),
        large_offset: f16::from_f32(largest_offset / 63.0),
    };
    let groups = numbers.chunks(32).zip(codes.chunks_mut(32));
    for ((numbers, codes), (scale, offset)) in groups.zip(kept.scales.iter().zip(kept.offsets)) {
        let scale = kept.large.to_f32() * f32::from(*scale);
        if scale == 0.0 {
            continue;
        }
        let offset = kept.large_offset.to_f32() * f32::from(offset);
        for (number, code) in numbers.iter().zip(codes) {
            *code = nearest((number + offset) / scale).clamp(0, most) as u8;
        }
    }
    kept
}

pub(super) fn q6_k(source: &Source) -> Result<Quantized> {
    source.require_groups(BLOCK, "Q6_K")?;
    let (codes, kept) = source.units(
        BLOCK,
        6,
        #[inline(always)]
        |_, numbers, codes| signed_block(numbers, codes),
    )?;
    let scales = Scales::Blocks {
        scales: bytes_tensor(kept.iter().flat_map(|kept| kept.scales).collect())?,
        signed: true,
        large: f16_tensor(kept.iter().map(|kept| kept.large).collect())?,
        offsets: None,
    };
    let levels = Levels::Integers { bits: 6, zero: 32 };
    Quantized::new(source.shape, levels, 16, codes, scales)
}

fn signed_block(numbers: &[f32], codes: &mut [u8]) -> Signed {
    let mut scales = [0f32; 16];
    for ((numbers, codes), scale) in numbers.chunks(16).zip(codes.chunks_mut(16)).zip(&mut scales) {
        *scale = fit(numbers, codes);
    }
    let largest = first_largest(&scales);
    if largest.abs() < NOTHING {
        codes.fill(0);
        return Signed::default();
    }
    let reciprocal = -128.0 / largest;
    let kept = Signed {
        scales: scales.map(|scale| nearest(reciprocal * scale).min(127) as u8),
        large: f16::from_f32(1.0 / reciprocal),
    };
    for ((numbers, codes), scale) in numbers.chunks(16).zip(codes.chunks_mut(16)).zip(kept.scales) {
        let scale = kept.large.to_f32() * f32::from(scale as i8);
        if scale == 0.0 {
            continue;
        }
        for (number, code) in numbers.iter().zip(codes) {
            *code = (nearest(number / scale).clamp(-32, 31) + 32) as u8;
        }
    }
    kept
}

/// The scale of codes from -32 to 31, which are written with 32 added, that has the least squared error when each
/// number weighs its square: the best of 19 guesses (ggml's `make_qx_quants`).
#[inline(always)]
fn fit(numbers: &[f32], codes: &mut [u8]) -> f32 {
    const MOST: f32 = 32.0;
    let largest = first_largest(numbers);
    if largest.abs() < NOTHING {
        codes.fill(0);
        return 0.0;
    }
    let level = |reciprocal: f32, x: f32| nearest(reciprocal * x).clamp(-32, 31);
    let sums = |reciprocal: f32| {
        numbers.iter().fold((0f32, 0f32), |(products, squares), x| {
            let (level, weight) = (level(reciprocal, *x) as f32, x * x);
            (products + weight * x * level, squares + weight * level * level)
        })
    };
    let mut chosen = -MOST / largest;
    let (products, squares) = sums(chosen);
    let mut scale = if squares == 0.0 { 0.0 } else { products / squares };
    let mut best = scale * products;
    for step in (-9..=9).filter(|step| *step != 0) {
        let reciprocal = -(MOST + 0.1 * step as f32) / largest;
        let (products, squares) = sums(reciprocal);
        if squares > 0.0 && products * products > best * squares {
            (chosen, scale) = (reciprocal, products / squares);
            best = scale * products;
        }
    }
    for (number, code) in numbers.iter().zip(codes) {
        *code = (level(chosen, *number) + 32) as u8;
    }
    scale
}

/// How scales are guessed: `(most + first + 0.1·step) / (max - min)` for steps up to this one.
#[derive(Clone, Copy)]
struct Search {
    first: f32,
    steps: i32,
}

/// The scale and the offset, taken off, of codes from 0 to `most` with the least weighted squared error among a
/// few guesses (ggml's `make_qkx2_quants`).
#[inline(always)]
fn fit_with_offset(
    numbers: &[f32],
    weights: &[f32],
    codes: &mut [u8],
    most: i32,
    search: Search,
) -> (f32, f32) {
    let weighted = || numbers.iter().zip(weights);
    let (Some(first), Some(first_weight)) = (numbers.first(), weights.first()) else {
        return (0.0, 0.0);
    };
    let (mut min, mut max) = (*first, *first);
    let (mut all_weights, mut all) = (*first_weight, first_weight * first);
    for (x, weight) in weighted().skip(1) {
        min = if *x < min { *x } else { min };
        max = if *x > max { *x } else { max };
        all_weights += weight;
        all += weight * x;
    }
    min = if min > 0.0 { 0.0 } else { min };
    if max == min {
        codes.fill(0);
        return (0.0, -min);
    }
    let level = |reciprocal: f32, min: f32, x: f32| nearest(reciprocal * (x - min)).clamp(0, most);
    let error = |scale: f32, min: f32, codes: &[u8]| {
        weighted().zip(codes).fold(0f32, |sum, ((x, weight), code)| {
            let difference = scale * f32::from(*code) + min - x;
            sum + weight * (difference * difference)
        })
    };
    let reciprocal = most as f32 / (max - min);
    let mut scale = 1.0 / reciprocal;
    for (number, code) in numbers.iter().zip(codes.iter_mut()) {
        *code = level(reciprocal, min, *number) as u8;
    }
    let mut least = error(scale, min, codes);
    let mut guess = [0u8; 32];
    let guess = &mut guess[..codes.len().min(32)];
    for step in 0..=search.steps {
        let reciprocal = (search.first + 0.1 * step as f32 + most as f32) / (max - min);
        let (mut levels, mut squares, mut products) = (0f32, 0f32, 0f32);
        for ((x, weight), code) in weighted().zip(guess.iter_mut()) {
            let level = level(reciprocal, min, *x);
            *code = level as u8;
            let level = level as f32;
            levels += weight * level;
            squares += weight * level * level;
            products += weight * level * x;
        }
        let determinant = all_weights * squares - levels * levels;
        if determinant > 0.0 {
            let mut this_scale = (all_weights * products - all * levels) / determinant;
            let mut this_min = (squares * all - levels * products) / determinant;
            if this_min > 0.0 {
                this_min = 0.0;
                this_scale = products / squares;
            }
            let this_error = error(this_scale, this_min, guess);
            if this_error < least {
                codes.copy_from_slice(guess);
                (least, scale, min) = (this_error, this_scale, this_min);
            }
        }
    }
    (scale, -min)
}

/// The first of the numbers with the largest magnitude.
#[inline(always)]
fn first_largest(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |most: f32, x| if x.abs() > most.abs() { *x } else { most })
}

/// ggml's `nearest_int`, also beyond the 2^22 that it is made for.
#[inline(always)]
fn nearest(x: f32) -> i32 {
    let bits = (x + 12_582_912.0).to_bits();
    (bits & 0x007f_ffff) as i32 - 0x0040_0000
}

/// A C program's conversion to 8 bits on x86: 0 of what has no integer of 32 bits.
#[inline(always)]
fn truncate(x: f32) -> i8 {
    if x.abs() < 2_147_483_648.0 { x as i32 as i8 } else { 0 }
}

fn f16_tensor(numbers: Vec<f16>) -> Result<Tensor> {
    let count = numbers.len();
    Tensor::from_vec(numbers, count, &Device::Cpu)
}
