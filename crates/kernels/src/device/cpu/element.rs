//! Element types, the types their sums are kept in, and numbers read as another type than they are
//! stored in.

use super::parallel::{PARALLEL_CHUNK, for_each_chunk};
use candle_core::{CpuStorage, DType, WithDType};
use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use std::borrow::Cow;
use std::ops::{Neg, Range};

/// A floating-point type that tensors are stored in.
pub(crate) trait Element: WithDType {
    /// The type that sums over such elements are kept in.
    type Acc: Real;
    /// Converts for arithmetic.
    fn widen(source: &[Self], target: &mut [Self::Acc]);
    /// Converts for storage, rounding to the nearest.
    fn narrow(source: &[Self::Acc], target: &mut [Self]);
    /// The mutable slice as it is, when storage and arithmetic use the same type.
    fn native_mut(slice: &mut [Self]) -> Option<&mut [Self::Acc]>;
    /// The slice, to be read as the type that sums are kept in.
    fn values(slice: &[Self]) -> Values<'_, Self::Acc>;
}

/// The type that sums over `T`s are kept in.
pub(crate) type Sum<T> = <T as Element>::Acc;

/// A buffer for a result that is added up in place.
pub(crate) fn zeros<T: WithDType>(count: usize) -> Vec<T> {
    vec![T::from_f64(0.0); count]
}

/// A buffer for a result, with whatever is in memory: the operation writes every element before any
/// is read. Clearing it first would be a pass of its own over memory.
#[allow(clippy::uninit_vec)]
pub(crate) fn buffer<T: Element>(count: usize) -> Vec<T> {
    let mut buffer = Vec::with_capacity(count);
    // SAFETY: the capacity is there, and elements are plain numbers, for which all bits are valid.
    unsafe { buffer.set_len(count) };
    buffer
}

/// A type that arithmetic is done in: f32, and f64 for references and checks.
pub(crate) trait Real: Element<Acc = Self> + Neg<Output = Self> {
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    fn exp(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
    fn erf(self) -> Self;
    fn sqrt(self) -> Self;
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
    fn from_bf16(value: bf16) -> Self;
    fn from_f16(value: f16) -> Self;
    /// The number itself: what the other conversions are for numbers that need none.
    fn itself(value: Self) -> Self;
    /// The numbers of a storage of this type, to be changed.
    fn storage_mut(storage: &mut CpuStorage) -> Option<&mut [Self]>;
    /// Reads a storage of any float type that is not wider than this one.
    fn stored_values(storage: &CpuStorage) -> Option<Values<'_, Self>>;
}

impl Element for f32 {
    type Acc = f32;
    #[inline(always)]
    fn widen(source: &[f32], target: &mut [f32]) {
        target.copy_from_slice(source)
    }
    #[inline(always)]
    fn narrow(source: &[f32], target: &mut [f32]) {
        target.copy_from_slice(source)
    }
    #[inline(always)]
    fn native_mut(slice: &mut [f32]) -> Option<&mut [f32]> {
        Some(slice)
    }
    #[inline(always)]
    fn values(slice: &[f32]) -> Values<'_, f32> {
        Values::Native(slice)
    }
}

impl Element for f64 {
    type Acc = f64;
    #[inline(always)]
    fn widen(source: &[f64], target: &mut [f64]) {
        target.copy_from_slice(source)
    }
    #[inline(always)]
    fn narrow(source: &[f64], target: &mut [f64]) {
        target.copy_from_slice(source)
    }
    #[inline(always)]
    fn native_mut(slice: &mut [f64]) -> Option<&mut [f64]> {
        Some(slice)
    }
    #[inline(always)]
    fn values(slice: &[f64]) -> Values<'_, f64> {
        Values::Native(slice)
    }
}

impl Element for bf16 {
    type Acc = f32;
    #[inline(always)]
    fn widen(source: &[bf16], target: &mut [f32]) {
        for (target, source) in target.iter_mut().zip(source) {
            *target = bf16_to_f32(*source);
        }
    }
    #[inline(always)]
    fn narrow(source: &[f32], target: &mut [bf16]) {
        for (target, source) in target.iter_mut().zip(source) {
            // Round to nearest even without a branch, so that the loop vectorises.
            let bits = source.to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            let quiet_nan = (bits >> 16) | 0x40;
            let is_nan = bits & 0x7fff_ffff > 0x7f80_0000;
            *target = bf16::from_bits(if is_nan { quiet_nan } else { rounded } as u16);
        }
    }
    #[inline(always)]
    fn native_mut(_: &mut [bf16]) -> Option<&mut [f32]> {
        None
    }
    #[inline(always)]
    fn values(slice: &[bf16]) -> Values<'_, f32> {
        Values::Bf16(slice)
    }
}

impl Element for f16 {
    type Acc = f32;
    #[inline(always)]
    fn widen(source: &[f16], target: &mut [f32]) {
        source.convert_to_f32_slice(target)
    }
    #[inline(always)]
    fn narrow(source: &[f32], target: &mut [f16]) {
        target.convert_from_f32_slice(source)
    }
    #[inline(always)]
    fn native_mut(_: &mut [f16]) -> Option<&mut [f32]> {
        None
    }
    #[inline(always)]
    fn values(slice: &[f16]) -> Values<'_, f32> {
        Values::F16(slice)
    }
}

#[inline(always)]
fn bf16_to_f32(value: bf16) -> f32 {
    f32::from_bits((value.to_bits() as u32) << 16)
}

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;
    #[inline(always)]
    fn exp(self) -> f32 {
        exp_f32(self)
    }
    fn ln(self) -> f32 {
        f32::ln(self)
    }
    fn tanh(self) -> f32 {
        f32::tanh(self)
    }
    fn erf(self) -> f32 {
        candle_core::cpu::erf::erf_f32(self)
    }
    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self
    }
    #[inline(always)]
    fn from_f32(value: f32) -> f32 {
        value
    }
    #[inline(always)]
    fn from_bf16(value: bf16) -> f32 {
        bf16_to_f32(value)
    }
    #[inline(always)]
    fn from_f16(value: f16) -> f32 {
        value.to_f32()
    }
    #[inline(always)]
    fn itself(value: f32) -> f32 {
        value
    }
    fn storage_mut(storage: &mut CpuStorage) -> Option<&mut [f32]> {
        match storage {
            CpuStorage::F32(values) => Some(values),
            _ => None,
        }
    }
    fn stored_values(storage: &CpuStorage) -> Option<Values<'_, f32>> {
        match storage {
            CpuStorage::F32(values) => Some(Values::Native(values)),
            CpuStorage::BF16(values) => Some(Values::Bf16(values)),
            CpuStorage::F16(values) => Some(Values::F16(values)),
            _ => None,
        }
    }
}

impl Real for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;
    fn exp(self) -> f64 {
        f64::exp(self)
    }
    fn ln(self) -> f64 {
        f64::ln(self)
    }
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }
    fn erf(self) -> f64 {
        candle_core::cpu::erf::erf_f64(self)
    }
    #[inline(always)]
    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }
    #[inline(always)]
    fn to_f32(self) -> f32 {
        self as f32
    }
    #[inline(always)]
    fn from_f32(value: f32) -> f64 {
        f64::from(value)
    }
    #[inline(always)]
    fn from_bf16(value: bf16) -> f64 {
        f64::from(bf16_to_f32(value))
    }
    #[inline(always)]
    fn from_f16(value: f16) -> f64 {
        value.to_f64()
    }
    #[inline(always)]
    fn itself(value: f64) -> f64 {
        value
    }
    fn storage_mut(storage: &mut CpuStorage) -> Option<&mut [f64]> {
        match storage {
            CpuStorage::F64(values) => Some(values),
            _ => None,
        }
    }
    fn stored_values(storage: &CpuStorage) -> Option<Values<'_, f64>> {
        match storage {
            CpuStorage::F64(values) => Some(Values::Native(values)),
            CpuStorage::F32(values) => Some(Values::F32(values)),
            CpuStorage::BF16(values) => Some(Values::Bf16(values)),
            CpuStorage::F16(values) => Some(Values::F16(values)),
            _ => None,
        }
    }
}

/// `e^x` within 2 units in the last place, without branches or calls so that loops vectorise.
/// Below -86 (4.5e-38) the result is 0.
///
/// `x = n·ln 2 + r` with `|r| <= ln 2 / 2`, so `e^x = 2^n·e^r`; the polynomial is that of the
/// Cephes library (Moshier).
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn exp_f32(x: f32) -> f32 {
    const LOW: f32 = -86.0;
    const HIGH: f32 = 88.8;
    // Adding 1.5·2^23 rounds to an integer and leaves it in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    let clamped = if x < LOW { LOW } else { x };
    let clamped = if clamped > HIGH { HIGH } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = clamped - n * 0.693_359_375 + n * 2.121_944_40e-4;
    let mut p = 1.987_569_150_0e-4;
    p = p * r + 1.398_199_950_7e-3;
    p = p * r + 8.333_451_907_3e-3;
    p = p * r + 4.166_579_589_4e-2;
    p = p * r + 1.666_666_545_9e-1;
    p = p * r + 5.000_000_120_1e-1;
    let fraction = p * (r * r) + r + 1.0;
    // 2^(n-1) first: 2^128 has no f32, twice 2^127 overflows to infinity as it should.
    let exponent = shifted.to_bits().wrapping_sub(ROUND.to_bits()).wrapping_sub(1) << 23;
    let scaled = f32::from_bits(fraction.to_bits().wrapping_add(exponent)) * 2.0;
    let scaled = if x < LOW { 0.0 } else { scaled };
    if x.is_nan() { x } else { scaled }
}

/// Stored numbers that are read as `A`, whatever their storage type.
#[derive(Clone, Copy)]
pub(crate) enum Values<'a, A> {
    Native(&'a [A]),
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a, A: Real> Values<'a, A> {
    /// The numbers from `start` on; none when there is nothing there.
    #[inline(always)]
    pub(crate) fn from(self, start: usize) -> Values<'a, A> {
        self.slice(start.min(self.len())..self.len())
    }

    #[inline(always)]
    pub(crate) fn slice(self, range: Range<usize>) -> Values<'a, A> {
        match self {
            Values::Native(values) => Values::Native(&values[range]),
            Values::F32(values) => Values::F32(&values[range]),
            Values::Bf16(values) => Values::Bf16(&values[range]),
            Values::F16(values) => Values::F16(&values[range]),
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Values::Native(values) => values.len(),
            Values::F32(values) => values.len(),
            Values::Bf16(values) => values.len(),
            Values::F16(values) => values.len(),
        }
    }

    /// Copies `target.len()` numbers from `start` on.
    #[inline(always)]
    pub(crate) fn read(self, start: usize, target: &mut [A]) {
        let range = start..start + target.len();
        match self {
            Values::Native(values) => target.copy_from_slice(&values[range]),
            Values::F32(values) => {
                for (target, value) in target.iter_mut().zip(&values[range]) {
                    *target = A::from_f64(*value as f64);
                }
            }
            Values::Bf16(values) => widen_half(&values[range], target),
            Values::F16(values) => widen_half(&values[range], target),
        }
    }

    /// The numbers of `range`: borrowed when they are stored as `A`, else converted into `scratch`.
    #[inline(always)]
    pub(crate) fn block<'b>(self, range: Range<usize>, scratch: &'b mut Vec<A>) -> &'b [A]
    where
        'a: 'b,
    {
        match self {
            Values::Native(values) => &values[range],
            _ => {
                scratch.resize(range.len(), A::ZERO);
                let start = range.start;
                for_each_chunk(scratch, PARALLEL_CHUNK, |index, chunk| {
                    self.read(start + index * PARALLEL_CHUNK, chunk)
                });
                scratch
            }
        }
    }

    /// All numbers: borrowed when they are stored as `A`, else converted.
    pub(crate) fn to_cow(self) -> Cow<'a, [A]> {
        match self {
            Values::Native(values) => Cow::Borrowed(values),
            _ => Cow::Owned(self.to_vec()),
        }
    }

    /// All numbers, converted.
    pub(crate) fn to_vec(self) -> Vec<A> {
        let mut target = vec![A::ZERO; self.len()];
        self.read(0, &mut target);
        target
    }

    /// The dot product of `x` with the numbers from `start` on, in a fixed order.
    #[inline(always)]
    pub(crate) fn dot(self, start: usize, x: &[A], scratch: &mut Vec<A>) -> A {
        let range = start..start + x.len();
        match self {
            Values::Native(values) => dot(&values[range], x),
            other => {
                scratch.resize(x.len(), A::ZERO);
                other.read(start, scratch);
                dot(scratch, x)
            }
        }
    }
}

/// Converts half-precision numbers to f32, or by way of f32 to f64.
#[inline(always)]
fn widen_half<H: Element<Acc = f32>, A: Real>(source: &[H], target: &mut [A]) {
    if let Some(target) = as_f32_mut(target) {
        H::widen(source, target);
        return;
    }
    let mut buffer = [0f32; 64];
    for (target, source) in target.chunks_mut(64).zip(source.chunks(64)) {
        let buffer = &mut buffer[..source.len()];
        H::widen(source, buffer);
        for (target, value) in target.iter_mut().zip(buffer) {
            *target = A::from_f64(*value as f64);
        }
    }
}

#[inline(always)]
fn as_f32_mut<A: Real>(slice: &mut [A]) -> Option<&mut [f32]> {
    if A::DTYPE == DType::F32 {
        // SAFETY: f32 is the only type with this DTYPE constant that implements `Real`.
        Some(unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), slice.len()) })
    } else {
        None
    }
}

/// The dot product, summed over 32 lanes so that it vectorises, in an order given by the length alone.
#[inline(always)]
pub(crate) fn dot<A: Real>(a: &[A], b: &[A]) -> A {
    const LANES: usize = 32;
    let mut lanes = [A::ZERO; LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let mut tail = A::ZERO;
    for (a, b) in a_chunks.remainder().iter().zip(b_chunks.remainder()) {
        tail += *a * *b;
    }
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    sum_lanes(lanes) + tail
}

/// The sum, in an order given by the length alone.
#[inline(always)]
pub(crate) fn sum<A: Real>(values: &[A]) -> A {
    const LANES: usize = 32;
    let mut lanes = [A::ZERO; LANES];
    let chunks = values.chunks_exact(LANES);
    let mut tail = A::ZERO;
    for value in chunks.remainder() {
        tail += *value;
    }
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] += chunk[lane];
        }
    }
    sum_lanes(lanes) + tail
}

#[inline(always)]
fn sum_lanes<A: Real>(mut lanes: [A; 32]) -> A {
    let mut width = 16;
    while width > 0 {
        for lane in 0..width {
            let other = lanes[lane + width];
            lanes[lane] += other;
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_units_in_the_last_place() {
        let mut x = -86.0f32;
        while x < 88.7 {
            let exact = (x as f64).exp();
            let error = ((exp_f32(x) as f64 - exact) / exact).abs();
            assert!(error < 2.5e-7, "exp({x}) is off by {error:e}");
            x += 0.0137;
        }
        assert_eq!(exp_f32(0.0), 1.0);
        assert_eq!(exp_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_f32(-100.0), 0.0);
        assert_eq!(exp_f32(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp_f32(89.0), f32::INFINITY);
        assert!(exp_f32(f32::NAN).is_nan());
    }

    #[test]
    fn bf16_rounds_as_half_does() {
        let mut bits = 1u32;
        for _ in 0..100_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from_bits(bits);
            let mut ours = [bf16::ZERO];
            bf16::narrow(&[value], &mut ours);
            assert_eq!(ours[0].to_bits(), bf16::from_f32(value).to_bits(), "{value}");
        }
    }

    #[test]
    fn dot_and_sum_take_any_length() {
        for len in [0, 1, 31, 32, 33, 64, 100] {
            let a: Vec<f64> = (0..len).map(|i| i as f64).collect();
            let exact: f64 = a.iter().map(|a| a * a).sum();
            assert_eq!(dot(&a, &a), exact);
            assert_eq!(sum(&a), a.iter().sum::<f64>());
        }
    }
}
