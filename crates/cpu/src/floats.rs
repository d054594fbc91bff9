//! Conversions of numbers of 16 bits, without branches so that loops vectorise.

use half::{bf16, f16};

/// Exact.
#[inline(always)]
pub fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits((value.to_bits() as u32) << 16)
}

/// Exact.
#[inline(always)]
pub fn f16_to_f32(value: f16) -> f32 {
    let bits = value.to_bits() as u32;
    let magnitude = (bits & 0x7fff) << 13;
    let normal = magnitude + (112 << 23);
    // Below the normal numbers the value is that many 2^-24: add 2^-14 to align, and take it off.
    let subnormal = f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23);
    let finite = if magnitude < (1 << 23) { subnormal.to_bits() } else { normal };
    let special = magnitude | 0x7f80_0000;
    let unsigned = if magnitude < (0x1f << 23) { finite } else { special };
    f32::from_bits(unsigned | (bits & 0x8000) << 16)
}

/// Rounds to the nearest, of two to the even one.
#[inline(always)]
pub fn f32_to_f16(value: f32) -> f16 {
    // One unit of this number is 2^-24, the unit of f16's subnormal numbers.
    const ALIGN: u32 = (127 - 15 + 23 - 10 + 1) << 23;
    let bits = value.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let odd = (magnitude >> 13) & 1;
    let normal = magnitude.wrapping_sub(112 << 23).wrapping_add(0xfff + odd) >> 13;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(ALIGN)).to_bits();
    let finite = if magnitude < (113 << 23) { subnormal.wrapping_sub(ALIGN) } else { normal };
    let special = if magnitude > 0x7f80_0000 { 0x7e00 } else { 0x7c00 };
    let unsigned = if magnitude < (143 << 23) { finite } else { special };
    f16::from_bits((unsigned | (bits >> 16) & 0x8000) as u16)
}

/// Rounds to the nearest, of two to the even one.
#[inline(always)]
pub fn f32_to_bf16(value: f32) -> bf16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
    let quiet_nan = (bits >> 16) | 0x40;
    let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
    bf16::from_bits(if is_nan { quiet_nan } else { rounded } as u16)
}
