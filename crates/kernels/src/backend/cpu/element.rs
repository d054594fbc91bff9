//! Element types, the types their sums are kept in, and numbers read as another type than they are
//! stored in.

use super::parallel::{PARALLEL_CHUNK, for_each_chunk};
use candle_core::{CpuStorage, DType, WithDType};
use half::{bf16, f16};
use metal_candle_cpu::floats::{bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
use metal_candle_cpu::quantized::{ByteRows, Elements};
use metal_candle_cpu::simd::prefetch_bytes;
use metal_candle_cpu::unwritten::Plain;
use std::borrow::Cow;
use std::hint::black_box;
use std::ops::{Neg, Range};

/// A floating-point type that tensors are stored in.
pub(crate) trait Element: WithDType + Plain {
    /// The type that sums over such elements are kept in.
    type Acc: Real;
    /// Converts for arithmetic.
    fn widen(source: &[Self], target: &mut [Self::Acc]);
    /// Converts for storage, rounding to the nearest.
    fn narrow(source: &[Self::Acc], target: &mut [Self]);
    /// The slice as it is, when storage and arithmetic use the same type.
    fn native(slice: &[Self]) -> Option<&[Self::Acc]>;
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

/// A type that arithmetic is done in: f32, and f64 for references and checks.
pub(crate) trait Real: Element<Acc = Self> + Neg<Output = Self> + Default {
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;
    fn exp(self) -> Self;
    /// `e^x` for `x <= 0`, as exact as if `x` had been rounded to its type once more.
    fn exp_nonpositive(self) -> Self;
    fn ln(self) -> Self;
    fn tanh(self) -> Self;
    /// The normal distribution at `x`: `Φ(x)` and the density `φ(x)`.
    fn normal(self) -> (Self, Self);
    fn sqrt(self) -> Self;
    fn to_f32(self) -> f32;
    fn from_f32(value: f32) -> Self;
    /// Rounded to the nearest, of two to the even one.
    fn from_i32(value: i32) -> Self;
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
    fn native(slice: &[f32]) -> Option<&[f32]> {
        Some(slice)
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
    fn native(slice: &[f64]) -> Option<&[f64]> {
        Some(slice)
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
            *target = f32_to_bf16(*source);
        }
    }
    #[inline(always)]
    fn native(_: &[bf16]) -> Option<&[f32]> {
        None
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
        for (target, source) in target.iter_mut().zip(source) {
            *target = f16_to_f32(*source);
        }
    }
    #[inline(always)]
    fn narrow(source: &[f32], target: &mut [f16]) {
        for (target, source) in target.iter_mut().zip(source) {
            *target = f32_to_f16(*source);
        }
    }
    #[inline(always)]
    fn native(_: &[f16]) -> Option<&[f32]> {
        None
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

impl Real for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;
    #[inline(always)]
    fn exp(self) -> f32 {
        exp_f32(self)
    }
    #[inline(always)]
    fn exp_nonpositive(self) -> f32 {
        exp_nonpositive_f32(self)
    }
    fn ln(self) -> f32 {
        f32::ln(self)
    }
    #[inline(always)]
    fn tanh(self) -> f32 {
        tanh_f32(self)
    }
    #[inline(always)]
    fn normal(self) -> (f32, f32) {
        normal_f32(self)
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
    fn from_i32(value: i32) -> f32 {
        value as f32
    }
    #[inline(always)]
    fn from_bf16(value: bf16) -> f32 {
        bf16_to_f32(value)
    }
    #[inline(always)]
    fn from_f16(value: f16) -> f32 {
        f16_to_f32(value)
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
    #[inline(always)]
    fn exp_nonpositive(self) -> f64 {
        exp_nonpositive_f64(self)
    }
    fn ln(self) -> f64 {
        f64::ln(self)
    }
    fn tanh(self) -> f64 {
        f64::tanh(self)
    }
    fn normal(self) -> (f64, f64) {
        let scaled = self * std::f64::consts::FRAC_1_SQRT_2;
        let cumulative = 0.5 * (1.0 + candle_core::cpu::erf::erf_f64(scaled));
        (cumulative, INVERSE_SQRT_TAU * (-scaled * scaled).exp())
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
    fn from_i32(value: i32) -> f64 {
        f64::from(value)
    }
    #[inline(always)]
    fn from_bf16(value: bf16) -> f64 {
        f64::from(bf16_to_f32(value))
    }
    #[inline(always)]
    fn from_f16(value: f16) -> f64 {
        f64::from(f16_to_f32(value))
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

/// `1 / √(2π)`
const INVERSE_SQRT_TAU: f64 = 0.398_942_280_401_432_7;

/// Adding it rounds an f32 to an integer and leaves that in the lowest bits.
const ROUND: f32 = 12_582_912.0;

/// `e^x` within 2 units in the last place, without branches or calls so that loops vectorise.
/// Below -86 (4.5e-38) the result is 0.
///
/// `x = n·ln 2 + r` with `|r| <= ln 2 / 2`, so `e^x = 2^n·e^r`; the polynomial is the best one of
/// its degree for `(e^r - 1 - r) / r²`.
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn exp_f32(x: f32) -> f32 {
    const LOW: f32 = -86.0;
    const HIGH: f32 = 88.8;
    // The exponent's bias less one comes with the rounding: 2^128 has no f32, but twice 2^127
    // overflows to infinity as it should.
    const ROUND_BIASED: f32 = ROUND + 126.0;
    let clamped = if x < LOW { LOW } else { x };
    let clamped = if clamped > HIGH { HIGH } else { clamped };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND_BIASED;
    let n = shifted - ROUND_BIASED;
    let r = clamped - n * 0.693_359_375 + n * 2.121_944_4e-4;
    let mut p = 1.392_620_3e-3;
    p = p * r + 8.363_195e-3;
    p = p * r + 4.166_655_4e-2;
    p = p * r + 1.666_657_7e-1;
    p = p * r + 0.5;
    let fraction = p * (r * r) + r + 1.0;
    let half = f32::from_bits(shifted.to_bits() << 23);
    // Products rather than sums of exponents: they keep NaN.
    let result = fraction * half * 2.0;
    if x < LOW { 0.0 } else { result }
}

/// `e^x` for `x <= 0`, without branches or calls so that loops vectorise, with a relative error of
/// at most `(4 + 1.25·|x|)·2^-24`: what matters is the error relative to `e^0`, and that is below two
/// units in the last place everywhere. Below -87.7 (8e-39) the result is 0.
///
/// `x·log2 e = n + f` with `|f| <= 1/2`, so `e^x = 2^n·2^f`; the polynomial is the best one of its
/// degree for `2^f` that is 1 at 0.
#[inline(always)]
#[allow(clippy::excessive_precision, clippy::approx_constant)]
fn exp_nonpositive_f32(x: f32) -> f32 {
    // The exponent's bias comes with the rounding, so the bits of 2^-127 are those of 0.
    const LOW: f32 = -127.0;
    const ROUND_BIASED: f32 = ROUND + 127.0;
    let scaled = x * std::f32::consts::LOG2_E;
    let scaled = if scaled < LOW { LOW } else { scaled };
    let shifted = scaled + ROUND_BIASED;
    let f = scaled - (shifted - ROUND_BIASED);
    let mut p = 1.326_472_3e-3;
    p = p * f + 9.671_513e-3;
    p = p * f + 5.550_733_8e-2;
    p = p * f + 2.402_224_2e-1;
    p = p * f + 6.931_47e-1;
    p = p * f + 1.0;
    p * f32::from_bits(shifted.to_bits() << 23)
}

/// `e^x` for `x <= 0` within 2 units in the last place, without branches or calls so that loops
/// vectorise. Below -708.8 (1.4e-308) the result is 0.
///
/// `x = n·ln 2 + r` with `|r| <= ln 2 / 2`, so `e^x = 2^n·e^r`, and Taylor's polynomial for that.
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn exp_nonpositive_f64(x: f64) -> f64 {
    // -1023·ln 2: the exponent's bias comes with the rounding, so the bits of 2^-1023 are those of 0.
    const LOW: f64 = -709.089_565_712_824_1;
    const ROUND_BIASED: f64 = 6_755_399_441_055_744.0 + 1023.0;
    const LN_2_HIGH: f64 = 6.931_471_803_691_238_16e-1;
    const LN_2_LOW: f64 = 1.908_214_929_270_587_7e-10;
    let x = if x < LOW { LOW } else { x };
    let shifted = x * std::f64::consts::LOG2_E + ROUND_BIASED;
    let n = shifted - ROUND_BIASED;
    let r = x - n * LN_2_HIGH - n * LN_2_LOW;
    let mut p = 1.0 / 6_227_020_800.0;
    p = p * r + 1.0 / 479_001_600.0;
    p = p * r + 1.0 / 39_916_800.0;
    p = p * r + 1.0 / 3_628_800.0;
    p = p * r + 1.0 / 362_880.0;
    p = p * r + 1.0 / 40_320.0;
    p = p * r + 1.0 / 5_040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    let fraction = p * (r * r) + r + 1.0;
    fraction * f64::from_bits(shifted.to_bits() << 52)
}

/// `tanh x` within 4 units in the last place, without branches or calls so that loops vectorise:
/// `1 - 2 / (e^{2x} + 1)`, and an odd polynomial where that cancels.
#[inline(always)]
fn tanh_f32(x: f32) -> f32 {
    const SMALL: f32 = 0.625;
    let magnitude = x.abs();
    let large = 1.0 - 2.0 / (exp_f32(magnitude * 2.0) + 1.0);
    let z = x * x;
    let mut p = -6.096_714e-3;
    p = p * z + 2.099_718e-2;
    p = p * z - 5.385_091e-2;
    p = p * z + 1.333_277e-1;
    p = p * z - 3.333_333e-1;
    let small = x + x * (z * p);
    if magnitude < SMALL { small } else { large.copysign(x) }
}

/// `Φ(x)` and `φ(x)`, with a relative error of at most 1e-6 for `|x| <= 4` and more where they
/// vanish; without branches or calls so that loops vectorise.
///
/// `Φ(-|x|) = t·P(t)·e^{-x²/2} / 2` with `t = 1 / (1 + |x| / √8)`, where `t·P(t)` stands for
/// `e^{u²}·erfc u` at `u = |x| / √2 <= 10`; the polynomial is the best one of its degree.
#[inline(always)]
#[allow(clippy::excessive_precision)]
fn normal_f32(x: f32) -> (f32, f32) {
    const INVERSE_SQRT_8: f32 = 0.353_553_4;
    let magnitude = x.abs();
    let exponential = exp_f32(x * x * -0.5);
    let t = 1.0 / (1.0 + magnitude * INVERSE_SQRT_8);
    let mut p = 3.239_865e-2;
    p = p * t - 1.716_289e-1;
    p = p * t + 3.325_686_6e-1;
    p = p * t - 2.189_932_8e-1;
    p = p * t - 8.664_944e-2;
    p = p * t + 7.456_795e-2;
    p = p * t + 3.905_751_8e-2;
    p = p * t + 1.897_954_7e-1;
    p = p * t + 2.444_791_1e-1;
    p = p * t + 2.823_184_2e-1;
    p = p * t + 2.820_858_5e-1;
    let tail = 0.5 * (t * p) * exponential;
    let cumulative = if x < 0.0 { tail } else { 1.0 - tail };
    (cumulative, exponential * INVERSE_SQRT_TAU as f32)
}

/// Stored numbers that are read as `A`, whatever their storage type.
#[derive(Clone, Copy)]
pub(crate) enum Values<'a, A> {
    Native(&'a [A]),
    F32(&'a [f32]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
    Quantized(Elements<'a>),
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
            Values::Quantized(values) => Values::Quantized(values.slice(range)),
        }
    }

    pub(crate) fn len(self) -> usize {
        match self {
            Values::Native(values) => values.len(),
            Values::F32(values) => values.len(),
            Values::Bf16(values) => values.len(),
            Values::F16(values) => values.len(),
            Values::Quantized(values) => values.count(),
        }
    }

    /// The bytes and scales of a matrix whose products are those of
    /// [`Arithmetic::Int8Rows`](crate::quantized::Arithmetic::Int8Rows).
    pub(crate) fn byte_rows(self) -> Option<ByteRows<'a>> {
        match self {
            Values::Quantized(elements) => elements.byte_rows(),
            _ => None,
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
            Values::Quantized(values) => by_f32(
                target,
                #[inline(always)]
                |from, target| values.read(start + from, target),
            ),
        }
    }

    /// Asks for the numbers of a range, which may be beyond the end, ahead of their use.
    #[inline(always)]
    pub(crate) fn prefetch(self, start: usize, count: usize) {
        let (base, size) = match self {
            Values::Native(values) => (values.as_ptr().cast::<u8>(), size_of::<A>()),
            Values::F32(values) => (values.as_ptr().cast(), 4),
            Values::Bf16(values) => (values.as_ptr().cast(), 2),
            Values::F16(values) => (values.as_ptr().cast(), 2),
            Values::Quantized(values) => return values.prefetch(start, count),
        };
        let first = base.wrapping_add(start * size);
        prefetch_bytes(first, count * size);
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
}

/// Converts half-precision numbers to f32, or by way of f32 to f64.
#[inline(always)]
fn widen_half<H: Element<Acc = f32>, A: Real>(source: &[H], target: &mut [A]) {
    by_f32(
        target,
        #[inline(always)]
        |start, target| H::widen(&source[start..][..target.len()], target),
    );
}

/// Lets `write(start, part)` write numbers of f32, which become those of `target` from `start` on.
#[inline(always)]
fn by_f32<A: Real>(target: &mut [A], write: impl Fn(usize, &mut [f32])) {
    if let Some(target) = as_f32_mut(target) {
        return write(0, target);
    }
    let mut wide = [0f32; 64];
    for (index, target) in target.chunks_mut(64).enumerate() {
        let wide = &mut wide[..target.len()];
        write(index * 64, wide);
        for (target, value) in target.iter_mut().zip(wide) {
            *target = A::from_f32(*value);
        }
    }
}

#[inline(always)]
pub(crate) fn as_f32<A: Real>(slice: &[A]) -> Option<&[f32]> {
    if A::DTYPE == DType::F32 {
        // SAFETY: f32 is the only type with this DTYPE constant that implements `Real`.
        Some(unsafe { std::slice::from_raw_parts(slice.as_ptr().cast(), slice.len()) })
    } else {
        None
    }
}

#[inline(always)]
pub(crate) fn as_f32_mut<A: Real>(slice: &mut [A]) -> Option<&mut [f32]> {
    if A::DTYPE == DType::F32 {
        // SAFETY: f32 is the only type with this DTYPE constant that implements `Real`.
        Some(unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr().cast(), slice.len()) })
    } else {
        None
    }
}

/// Numbers that sums take side by side, so that they vectorise, in an order given by the length alone.
const LANES: usize = 32;

/// `Σ terms(a, b, ..)` over slices of one length: several sums in one pass.
#[inline(always)]
pub(crate) fn sums<A: Real, const INPUTS: usize, const SUMS: usize>(
    inputs: [&[A]; INPUTS],
    terms: impl Fn([A; INPUTS]) -> [A; SUMS],
) -> [A; SUMS] {
    let len = inputs.first().map_or(0, |input| input.len());
    let inputs = inputs.map(
        #[inline(always)]
        |input| &input[..len],
    );
    let mut lanes = [[A::ZERO; LANES]; SUMS];
    let whole = len / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        let blocks = inputs.map(
            #[inline(always)]
            |input| &input[start..start + LANES],
        );
        for lane in 0..LANES {
            let terms = terms(blocks.map(
                #[inline(always)]
                |block| block[lane],
            ));
            for (lanes, term) in lanes.iter_mut().zip(terms) {
                lanes[lane] += term;
            }
        }
    }
    let mut tail = [A::ZERO; SUMS];
    for index in whole..len {
        let terms = terms(inputs.map(
            #[inline(always)]
            |input| input[index],
        ));
        for (tail, term) in tail.iter_mut().zip(terms) {
            *tail += term;
        }
    }
    for (tail, lanes) in tail.iter_mut().zip(lanes) {
        *tail += sum_lanes(lanes);
    }
    tail
}

/// The dot product, in an order given by the length alone.
#[inline(always)]
pub(crate) fn dot<A: Real>(a: &[A], b: &[A]) -> A {
    let [sum] = sums(
        [a, b],
        #[inline(always)]
        |[a, b]| [a * b],
    );
    sum
}

/// The sum, in an order given by the length alone.
#[inline(always)]
pub(crate) fn sum<A: Real>(values: &[A]) -> A {
    let [sum] = sums(
        [values],
        #[inline(always)]
        |[value]| [value],
    );
    sum
}

/// The largest of the values; NaN is none of them. Negative infinity when there is none.
#[inline(always)]
pub(crate) fn max<A: Real>(values: &[A]) -> A {
    #[inline(always)]
    fn larger<A: Real>(a: A, b: A) -> A {
        if a > b { a } else { b }
    }
    let mut lanes = [A::NEG_INFINITY; LANES];
    let chunks = values.chunks_exact(LANES);
    let mut largest = A::NEG_INFINITY;
    for value in chunks.remainder() {
        largest = larger(*value, largest);
    }
    for chunk in chunks {
        for lane in 0..LANES {
            lanes[lane] = larger(chunk[lane], lanes[lane]);
        }
    }
    fold_lanes(lanes, larger, largest)
}

/// Writes `map(x)` for every `x` and returns their sum, in an order given by the length alone.
#[inline(always)]
pub(crate) fn map_and_sum<A: Real>(x: &[A], y: &mut [A], map: impl Fn(A) -> A) -> A {
    let mut lanes = [A::ZERO; LANES];
    let mut tail = A::ZERO;
    let (mut x_chunks, mut y_chunks) = (x.chunks_exact(LANES), y.chunks_exact_mut(LANES));
    for (x, y) in (&mut x_chunks).zip(&mut y_chunks) {
        for lane in 0..LANES {
            let value = map(x[lane]);
            y[lane] = value;
            lanes[lane] += value;
        }
    }
    for (x, y) in x_chunks.remainder().iter().zip(y_chunks.into_remainder()) {
        *y = map(*x);
        tail += *y;
    }
    sum_lanes(lanes) + tail
}

#[inline(always)]
fn sum_lanes<A: Real>(lanes: [A; LANES]) -> A {
    fold_lanes(
        lanes,
        #[inline(always)]
        |a, b| a + b,
        A::ZERO,
    )
}

/// Halves the lanes until one is left.
///
/// They go through memory on the way: else the compiler would conclude from here to keep pairs of
/// lanes rather than whole registers in the loop before.
#[inline(always)]
fn fold_lanes<A: Real>(lanes: [A; LANES], fold: impl Fn(A, A) -> A, first: A) -> A {
    let lanes = black_box(lanes);
    let eight: [A; 8] = std::array::from_fn(
        #[inline(always)]
        |lane| {
            let pair = fold(lanes[lane], lanes[lane + 16]);
            fold(pair, fold(lanes[lane + 8], lanes[lane + 24]))
        },
    );
    let [a, b, c, d, e, f, g, h] = black_box(eight);
    let four = fold(fold(fold(a, e), fold(c, g)), fold(fold(b, f), fold(d, h)));
    fold(first, four)
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
    fn exp_of_what_is_not_positive_is_as_exact_as_its_argument() {
        let mut x = -86.5f32;
        while x <= 0.0 {
            let exact = (x as f64).exp();
            let error = ((exp_nonpositive_f32(x) as f64 - exact) / exact).abs();
            let limit = (4.0 - 1.25 * x as f64) * 2f64.powi(-24);
            assert!(error < limit, "exp({x}) is off by {error:e}");
            x += 0.0013;
        }
        assert_eq!(exp_nonpositive_f32(0.0), 1.0);
        assert_eq!(exp_nonpositive_f32(-0.0), 1.0);
        assert_eq!(exp_nonpositive_f32(f32::NEG_INFINITY), 0.0);
        assert_eq!(exp_nonpositive_f32(f32::MIN), 0.0);
        assert_eq!(exp_nonpositive_f32(-1e-30), 1.0);
        assert!(exp_nonpositive_f32(f32::NAN).is_nan());
        let mut x = -708.0f64;
        while x <= 0.0 {
            let error = (exp_nonpositive_f64(x) / x.exp() - 1.0).abs();
            assert!(error < 4.5e-16, "exp({x}) is off by {error:e}");
            x += 0.0137;
        }
        assert_eq!(exp_nonpositive_f64(0.0), 1.0);
        assert_eq!(exp_nonpositive_f64(f64::NEG_INFINITY), 0.0);
        assert_eq!(exp_nonpositive_f64(f64::MIN), 0.0);
        assert!(exp_nonpositive_f64(f64::NAN).is_nan());
    }

    #[test]
    fn tanh_is_within_four_units_in_the_last_place() {
        let mut magnitude = 1e-30f32;
        while magnitude < 100.0 {
            for x in [magnitude, -magnitude] {
                let exact = (x as f64).tanh();
                let error = ((tanh_f32(x) as f64 - exact) / exact).abs();
                assert!(error < 2.4e-7, "tanh({x}) is off by {error:e}");
            }
            magnitude *= 1.00037;
        }
        assert_eq!(tanh_f32(0.0), 0.0);
        assert_eq!(tanh_f32(f32::INFINITY), 1.0);
        assert_eq!(tanh_f32(f32::NEG_INFINITY), -1.0);
        assert!(tanh_f32(f32::NAN).is_nan());
    }

    /// `Φ(x)` for `x <= 0` by the continued fraction of Laplace, or the series around 0.
    fn lower_tail(x: f64) -> f64 {
        let density = INVERSE_SQRT_TAU * (-0.5 * x * x).exp();
        if x < -3.0 {
            let fraction = (1..=200).rev().fold(-x, |rest, k| -x + k as f64 / rest);
            return density / fraction;
        }
        let (mut term, mut sum) = (x, x);
        for k in 1..200 {
            term *= x * x / (2 * k + 1) as f64;
            sum += term;
        }
        0.5 + density * sum
    }

    #[test]
    fn the_normal_distribution_is_within_a_few_units_in_the_last_place() {
        let mut magnitude = 1e-6f32;
        while magnitude < 20.0 {
            for x in [magnitude, -magnitude] {
                let below = lower_tail(-magnitude as f64);
                let exact = if x < 0.0 { below } else { 1.0 - below };
                let density = INVERSE_SQRT_TAU * (-0.5 * x as f64 * x as f64).exp();
                let (cumulative, slope) = normal_f32(x);
                for (found, exact) in [(cumulative, exact), (slope, density)] {
                    let error = (found as f64 - exact).abs();
                    let limit = if (-4.0..=4.0).contains(&x) { 1e-6 * exact } else { 1e-10 };
                    let limit = if exact > 0.5 { 2e-7 } else { limit };
                    assert!(error < limit, "{found} is not {exact} at {x}, off by {error:e}");
                }
            }
            magnitude *= 1.0007;
        }
        assert_eq!(normal_f32(0.0).0, 0.5);
        assert_eq!(normal_f32(f32::INFINITY), (1.0, 0.0));
        assert_eq!(normal_f32(f32::NEG_INFINITY), (0.0, 0.0));
        assert!(normal_f32(f32::NAN).0.is_nan());
    }

    #[test]
    fn f16_converts_as_half_does() {
        for bits in 0..=u16::MAX {
            let value = f16::from_bits(bits);
            let ours = f16_to_f32(value);
            assert!(
                ours.to_bits() == value.to_f32().to_bits() || ours.is_nan() && value.is_nan(),
                "{bits:#x}: {ours} is not {value}"
            );
        }
        let check = |value: f32| {
            let (ours, theirs) = (f32_to_f16(value), f16::from_f32(value));
            assert!(
                ours.to_bits() == theirs.to_bits() || ours.is_nan() && theirs.is_nan(),
                "{value}: {ours} is not {theirs}"
            );
        };
        let mut bits = 1u32;
        for _ in 0..200_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            check(f32::from_bits(bits));
            // And where f16 has numbers: exponents from -30 to 17.
            let exponent = 97 + (bits >> 7) % 48;
            check(f32::from_bits(bits & 0x807f_ffff | exponent << 23));
        }
        // Halfway between two numbers, and around.
        for low in 0..2048u32 {
            for exponent in [97, 101, 102, 103, 104, 112, 113, 126, 141, 142, 143] {
                for rest in [0, 1, 0xfff, 0x1000, 0x1001] {
                    check(f32::from_bits(exponent << 23 | (low << 12 & 0x7f_ffff) | rest));
                }
            }
        }
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
            let [once, twice] = sums([&a, &a], |[a, b]| [a, a + b]);
            assert_eq!((once, twice), (sum(&a), 2.0 * sum(&a)));
            let mut twice = vec![0.0; len];
            assert_eq!(map_and_sum(&a, &mut twice, |a| 2.0 * a), 2.0 * sum(&a));
            assert!(twice.iter().zip(&a).all(|(twice, a)| *twice == 2.0 * a));
            assert_eq!(max(&a), a.iter().copied().fold(f64::NEG_INFINITY, f64::max));
            let negated: Vec<f64> = a.iter().map(|a| -a).collect();
            assert_eq!(max(&negated), if len == 0 { f64::NEG_INFINITY } else { 0.0 });
        }
    }
}
