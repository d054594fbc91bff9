//! The numbers of codes one after the other, in registers of several.

use super::registers::{Avx2, Avx512, MOST_LANES, Registers};
use super::scaling::fill;
use super::{Levels, View};
use crate::floats::f32_to_bf16;
use half::bf16;
use std::arch::x86_64::*;

/// Bytes that the codes of a register are read with, of which they have `LANES·BITS / 8`.
const BYTES: usize = 16;

/// Groups whose scales are made ready at a time.
const READY: usize = 4 * MOST_LANES;

/// What numbers are written as.
pub(super) trait Number<R: Registers>: Sized {
    fn narrow(wide: &[f32], to: &mut [Self]);
    /// # Safety
    /// The machine needs the instructions, and there has to be room for as many numbers as lanes.
    unsafe fn store(floats: R::Floats, to: *mut Self);
    /// Two registers, one behind the other.
    ///
    /// # Safety
    /// As of [`Self::store`], with room for both.
    unsafe fn store_two(floats: [R::Floats; 2], to: *mut Self);
}

impl<R: Registers> Number<R> for f32 {
    fn narrow(wide: &[f32], to: &mut [f32]) {
        to.copy_from_slice(wide);
    }
    #[inline(always)]
    unsafe fn store(floats: R::Floats, to: *mut f32) {
        // SAFETY: as promised by the caller.
        unsafe { R::store(floats, to) }
    }
    #[inline(always)]
    unsafe fn store_two([first, second]: [R::Floats; 2], to: *mut f32) {
        // SAFETY: as promised by the caller.
        unsafe {
            R::store(first, to);
            R::store(second, to.add(R::LANES));
        }
    }
}

impl Number<Avx512> for bf16 {
    fn narrow(wide: &[f32], to: &mut [bf16]) {
        to.iter_mut().zip(wide).for_each(|(to, wide)| *to = f32_to_bf16(*wide));
    }
    #[inline(always)]
    unsafe fn store(floats: __m512, to: *mut bf16) {
        // SAFETY: as promised by the caller.
        unsafe {
            let numbers = std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(floats));
            _mm256_storeu_si256(to.cast(), numbers);
        }
    }
    #[inline(always)]
    unsafe fn store_two([first, second]: [__m512; 2], to: *mut bf16) {
        // SAFETY: as promised by the caller.
        unsafe {
            let numbers = _mm512_cvtne2ps_pbh(second, first);
            _mm512_storeu_si512(to.cast(), std::mem::transmute::<__m512bh, __m512i>(numbers));
        }
    }
}

/// The nearest integers.
impl Number<Avx512> for i16 {
    fn narrow(wide: &[f32], to: &mut [i16]) {
        round(wide, to);
    }
    #[inline(always)]
    unsafe fn store(floats: __m512, to: *mut i16) {
        // SAFETY: as promised by the caller.
        unsafe {
            let integers = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(floats));
            _mm256_storeu_si256(to.cast(), integers);
        }
    }
    #[inline(always)]
    unsafe fn store_two([first, second]: [__m512; 2], to: *mut i16) {
        // SAFETY: as promised by the caller.
        unsafe {
            <Self as Number<Avx512>>::store(first, to);
            <Self as Number<Avx512>>::store(second, to.add(Avx512::LANES));
        }
    }
}

/// The nearest integers.
impl Number<Avx2> for i16 {
    fn narrow(wide: &[f32], to: &mut [i16]) {
        round(wide, to);
    }
    #[inline(always)]
    unsafe fn store(floats: __m256, to: *mut i16) {
        // SAFETY: as promised by the caller.
        unsafe {
            let words = _mm256_cvtps_epi32(floats);
            let (low, high) = (_mm256_castsi256_si128(words), _mm256_extracti128_si256::<1>(words));
            _mm_storeu_si128(to.cast(), _mm_packs_epi32(low, high));
        }
    }
    #[inline(always)]
    unsafe fn store_two([first, second]: [__m256; 2], to: *mut i16) {
        // SAFETY: as promised by the caller.
        unsafe {
            let (first, second) = (_mm256_cvtps_epi32(first), _mm256_cvtps_epi32(second));
            // Halves of both in turns.
            let packed = _mm256_packs_epi32(first, second);
            _mm256_storeu_si256(to.cast(), _mm256_permute4x64_epi64::<0b11_01_10_00>(packed));
        }
    }
}

fn round(wide: &[f32], to: &mut [i16]) {
    for (to, wide) in to.iter_mut().zip(wide) {
        *to = wide.round_ties_even() as i16;
    }
}

/// Integers of a register.
pub(super) const INTEGERS: usize = 32;

/// Writes as many of the integers that codes of 4 or 8 bits from element `start` on are read as, those of 4 bits by a table that
/// has them twice, as fill registers, and says how many these are.
///
/// # Safety
/// The machine needs AVX-512 F and BW.
#[inline(always)]
pub(super) unsafe fn read_integers(
    view: &View,
    table: &[i16; INTEGERS],
    start: usize,
    out: &mut [i16],
) -> usize {
    let bits = view.levels.bits();
    let bytes = INTEGERS * bits / 8;
    if !(start * bits).is_multiple_of(8) {
        return 0;
    }
    let codes = &view.codes[start * bits / 8..];
    let count = (out.len() / INTEGERS).min(codes.len() / bytes);
    let (from, to) = (codes.as_ptr(), out.as_mut_ptr());
    // SAFETY: as promised by the caller, and as many bytes and integers are there.
    unsafe {
        match (bits, view.levels) {
            (8, Levels::Integers { zero, .. }) => {
                let zero = _mm512_set1_epi16(i16::from(zero));
                for index in 0..count {
                    let codes = _mm256_loadu_si256(from.add(index * bytes).cast());
                    let integers = _mm512_sub_epi16(_mm512_cvtepu8_epi16(codes), zero);
                    _mm512_storeu_si512(to.add(index * INTEGERS).cast(), integers);
                }
            }
            (4, _) => {
                let table = _mm512_loadu_si512(table.as_ptr().cast());
                for index in 0..count {
                    let codes =
                        _mm512_cvtepu8_epi32(_mm_loadu_si128(from.add(index * bytes).cast()));
                    // The second code of a byte in the upper half of its lane. Of what is above a code one bit is read, for which
                    // the table has its integers twice.
                    let places = _mm512_or_si512(codes, _mm512_slli_epi32::<12>(codes));
                    let integers = _mm512_permutexvar_epi16(places, table);
                    _mm512_storeu_si512(to.add(index * INTEGERS).cast(), integers);
                }
            }
            _ => return 0,
        }
    }
    count * INTEGERS
}

/// Writes the numbers from element `start` on.
///
/// # Safety
/// The machine needs the instructions of the registers and of [`Number::store`].
#[inline(always)]
pub(super) unsafe fn read<R: Registers, T: Number<R>>(view: &View, start: usize, out: &mut [T]) {
    macro_rules! by_registers {
        ($bits:literal, $scaling:ident => $scaled:expr, ($with:ident, $codes:ident) => $number:expr) => {
            for_each_group::<R, T>(
                view,
                start,
                out,
                #[inline(always)]
                |element, $scaling, piece| {
                    let $with = $scaled;
                    by_registers::<R, T, $bits>(
                        view.codes,
                        element,
                        #[inline(always)]
                        |$codes| $number,
                        piece,
                    )
                },
            )
        };
    }
    // SAFETY: as promised by the caller.
    unsafe {
        macro_rules! integers {
            ($bits:literal, $zero:expr) => {{
                let zero = R::floats(f32::from($zero));
                by_registers!(
                    $bits,
                    scaling => (R::floats(scaling.0), R::floats(scaling.1)),
                    (scaling, codes) => {
                        let level = R::subtract(R::converted(codes), zero);
                        R::add(R::multiply(level, scaling.0), scaling.1)
                    }
                )
            }};
        }
        let levels = match (view.levels.of_four_bits(), view.levels) {
            (Some(levels), _) => levels,
            (None, Levels::Integers { bits, zero }) => {
                return match bits {
                    2 => integers!(2, zero),
                    3 => integers!(3, zero),
                    5 => integers!(5, zero),
                    6 => integers!(6, zero),
                    _ => integers!(8, zero),
                };
            }
            (None, _) => unreachable!("read without registers"),
        };
        let levels = R::load_table(&levels);
        by_registers!(
            4,
            scaling => R::scale_table(levels, scaling.0, scaling.1),
            (levels, codes) => R::look_up(levels, codes)
        );
    }
}

/// Calls `read(element, (scale, offset), piece)` for what each group has of the numbers from element `start` on. It says how
/// many numbers it has written; the rest are written one by one.
///
/// # Safety
/// As of [`read`].
#[inline(always)]
unsafe fn for_each_group<R: Registers, T: Number<R>>(
    view: &View,
    start: usize,
    out: &mut [T],
    mut read: impl FnMut(usize, (f32, f32), &mut [T]) -> usize,
) {
    let (mut scales, mut offsets) = ([0.0; READY], [-0.0; READY]);
    let (mut element, mut rest) = (start, out);
    while !rest.is_empty() {
        let first = element / view.group;
        let count = ((element + rest.len()).div_ceil(view.group) - first).min(READY);
        let filled = count.next_multiple_of(MOST_LANES);
        let with_offsets = if view.has_offsets() { filled } else { 0 };
        // SAFETY: as promised by the caller.
        unsafe {
            fill::<R>(view, first, &mut scales[..filled], &mut offsets[..with_offsets]);
        }
        let mut end = (first + 1) * view.group;
        for (scale, offset) in scales[..count].iter().zip(&offsets) {
            let in_group = (end - element).min(rest.len());
            let (piece, after) = std::mem::take(&mut rest).split_at_mut(in_group);
            let done = read(element, (*scale, *offset), piece);
            if done < piece.len() {
                view.read_rest(element + done, (*scale, *offset), &mut piece[done..], T::narrow);
            }
            (element, rest) = (end, after);
            end += view.group;
        }
    }
}

/// Writes as many of one group's numbers as fill registers, of codes of `BITS` bits that stand for `number(code)`, and says
/// how many these are.
///
/// # Safety
/// As of [`read`].
#[inline(always)]
unsafe fn by_registers<R: Registers, T: Number<R>, const BITS: usize>(
    codes: &[u8],
    element: usize,
    number: impl Fn(R::Words) -> R::Floats,
    out: &mut [T],
) -> usize {
    let each = R::LANES * BITS / 8;
    let first = element * BITS / 8;
    // As many as can be read so.
    let readable = match (element * BITS).is_multiple_of(8) {
        true => codes.len().saturating_sub(first + BYTES - each) / each,
        false => 0,
    };
    let count = readable.min(out.len() / R::LANES);
    // SAFETY: as promised by the caller, and as many bytes and numbers are there.
    unsafe {
        let from = codes.as_ptr().add(first);
        let numbers = |index: usize| number(R::codes_in_order::<BITS>(from.add(index * each)));
        let out = out.as_mut_ptr();
        let even = count / 2 * 2;
        for index in (0..even).step_by(2) {
            T::store_two([numbers(index), numbers(index + 1)], out.add(index * R::LANES));
        }
        if even < count {
            T::store(numbers(even), out.add(even * R::LANES));
        }
    }
    count * R::LANES
}
