//! What `mlx.core.quantize` 0.32 makes on the CPU: integers with a scale and an offset (`affine`), and the
//! microscaling formats, whose arithmetic is in the dtype of the numbers.

use super::super::{E2M1, Levels, OPERATION, Quantized, Scales};
use super::{Source, bytes_tensor, f32_tensor, largest, to_e4m3};
use candle_core::{DType, Result, bail};
use half::{bf16, f16};
use metal_candle_cpu::quantized::e4m3;

/// Scales and offsets have the dtype of the numbers.
pub(super) fn affine(source: &Source, bits: usize, group: usize) -> Result<Quantized> {
    if !matches!(bits, 2..=6 | 8) || !matches!(group, 32 | 64 | 128) {
        bail!(
            "metal-candle-kernels: {OPERATION}: {bits} bits in groups of {group}, expected 2, 3, 4, 5, 6 or 8 in groups of 32, 64 or 128"
        )
    }
    source.require_groups(group, "MLX's affine")?;
    let most = ((1 << bits) - 1) as f32;
    let (codes, kept) = source.units(
        group,
        bits,
        #[inline(always)]
        |_, numbers, codes| {
            let largest = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let smallest = numbers.iter().copied().fold(f32::INFINITY, f32::min);
            let downwards = smallest.abs() > largest.abs();
            let scale = ((largest - smallest) / most).max(1e-7);
            let scale = if downwards { scale } else { -scale };
            let edge = if downwards { smallest } else { largest };
            // The edge is a whole number of scales, so that 0 has a code.
            let steps = (edge / scale).round_ties_even();
            let (scale, offset) = if steps == 0.0 { (scale, 0.0) } else { (edge / steps, edge) };
            for (number, code) in numbers.iter().zip(codes) {
                *code = ((number - offset) / scale).round_ties_even().clamp(0.0, most) as u8;
            }
            (scale, offset)
        },
    )?;
    let (scales, offsets): (Vec<f32>, Vec<f32>) = kept.into_iter().unzip();
    let scales = f32_tensor(scales)?.to_dtype(source.dtype)?;
    let offsets = Some(f32_tensor(offsets)?.to_dtype(source.dtype)?);
    let levels = Levels::Integers { bits, zero: 0 };
    Quantized::new(source.shape, levels, group, codes, Scales::Plain { scales, offsets })
}

pub(super) fn mxfp4(source: &Source) -> Result<Quantized> {
    source.require_groups(32, "mxfp4")?;
    let round = rounding(source.dtype);
    let (codes, scales) = source.units(
        32,
        4,
        #[inline(always)]
        |_, numbers, codes| {
            let (scale, power) = exponent(numbers, E2M1[7], round);
            for (number, code) in numbers.iter().zip(codes) {
                *code = to_e2m1(round(number / power));
            }
            scale
        },
    )?;
    let scales = Scales::E8m0(bytes_tensor(scales)?);
    Quantized::new(source.shape, Levels::Table(&E2M1), 32, codes, scales)
}

pub(super) fn mxfp8(source: &Source) -> Result<Quantized> {
    source.require_groups(32, "mxfp8")?;
    let round = rounding(source.dtype);
    let (codes, scales) = source.units(
        32,
        8,
        #[inline(always)]
        |_, numbers, codes| {
            let (scale, power) = exponent(numbers, 448.0, round);
            for (number, code) in numbers.iter().zip(codes) {
                *code = to_e4m3(round(number / power));
            }
            scale
        },
    )?;
    let scales = Scales::E8m0(bytes_tensor(scales)?);
    Quantized::new(source.shape, Levels::E4m3, 32, codes, scales)
}

pub(super) fn nvfp4(source: &Source) -> Result<Quantized> {
    source.require_groups(16, "nvfp4")?;
    let round = rounding(source.dtype);
    let (codes, scales) = source.units(
        16,
        4,
        #[inline(always)]
        |_, numbers, codes| {
            let code = to_e4m3(round(largest(numbers) / E2M1[7]));
            let scale = e4m3(code);
            for (number, code) in numbers.iter().zip(codes) {
                *code = to_e2m1(round(number / scale));
            }
            code
        },
    )?;
    let scales = Scales::E4m3 { scales: bytes_tensor(scales)?, overall: 1.0 };
    Quantized::new(source.shape, Levels::Table(&E2M1), 16, codes, scales)
}

/// The code and the value of a group's power of two, the least that isn't below its largest magnitude divided by the
/// largest level. Codes begin at 2^-127, where MLX's begin again at 2^128.
#[inline(always)]
fn exponent(numbers: &[f32], most: f32, round: fn(f32) -> f32) -> (u8, f32) {
    let ratio = f64::from(round(largest(numbers) / most));
    if ratio == 0.0 {
        return (127, 1.0);
    }
    // Every f32 is a normal f64.
    let (biased, fraction) = (ratio.to_bits() >> 52, ratio.to_bits() & ((1 << 52) - 1));
    let log = (biased as i32 - 1023 + i32::from(fraction > 0)).max(-127);
    ((log + 127) as u8, 2f32.powi(log))
}

/// The nearest code of e2m1, of two the smaller magnitude. 0 is never negative, and infinite and no numbers, which
/// come of a group's scale of 0, become 0.
#[inline(always)]
fn to_e2m1(x: f32) -> u8 {
    const BOUNDS: [f32; 7] = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0];
    let magnitude = x.abs();
    let code: u8 = BOUNDS.iter().map(|bound| u8::from(magnitude > *bound)).sum();
    let sign = u8::from(x < 0.0 && code > 0) << 3;
    if magnitude.is_finite() { code | sign } else { 0 }
}

/// Rounds to a dtype.
fn rounding(dtype: DType) -> fn(f32) -> f32 {
    match dtype {
        DType::BF16 => |x| bf16::from_f32(x).to_f32(),
        DType::F16 => |x| f16::from_f32(x).to_f32(),
        _ => |x| x,
    }
}
