//! The registers of AVX2 and AVX-512.

use super::lines::{Lines, MOST_LANES, Ordered, Registers, SUMMED, Way, call_with};
use super::numbers::{self, OrderedNumbers};
use super::scaling::fill_apart;
use super::{ScalesView, View, digits, in_order, pairs};
use crate::backend::cpu::simd::{Level, level};
use half::{bf16, f16};
use std::arch::x86_64::*;
use std::ops::Range;

/// Lanes of the registers that this machine has the instructions for.
pub(super) fn lanes() -> Option<usize> {
    match level() {
        Level::Baseline => None,
        Level::Avx2 => Some(Avx2::LANES),
        Level::Avx512 | Level::Avx512Bf16 | Level::Amx => Some(Avx512::LANES),
    }
}

/// How rows are multiplied, where there are registers for it.
pub(super) fn way() -> Option<Way> {
    lanes().map(|lanes| Way { lanes, digits: digits::By::best(lanes) })
}

/// The dot products of all rows with some lines: `out` `(rows, lines.len())`.
///
/// # Safety
/// The machine needs the instructions of the [`Way`] that the rows are ordered for.
#[inline(always)]
pub(super) unsafe fn dots(x: &Ordered, matrix: Lines, lines: Range<usize>, out: &mut [f32]) {
    // SAFETY: as promised by the caller.
    unsafe {
        match (x.pairs_for(matrix), x.digits_for(matrix), x.numbers()) {
            (Some(of_pairs), ..) => pairs::dots(x, of_pairs, matrix, lines, out),
            (_, Some(of_digits), _) => digits::dots(x, of_digits, matrix, lines, out),
            (.., Some(of_numbers)) if x.lanes() == Avx2::LANES => {
                avx2(x, of_numbers, matrix, lines, out)
            }
            (.., Some(of_numbers)) => avx512(x, of_numbers, matrix, lines, out),
            _ => unreachable!("ordered for other matrices"),
        }
    }
}

/// As [`View::read`], if there are registers for it.
#[inline(always)]
pub(super) fn read(view: &View, start: usize, out: &mut [f32]) -> bool {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    fn avx512(view: &View, start: usize, out: &mut [f32]) {
        // SAFETY: the caller has the instructions.
        unsafe { in_order::read::<Avx512, f32>(view, start, out) }
    }
    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2(view: &View, start: usize, out: &mut [f32]) {
        // SAFETY: the caller has the instructions.
        unsafe { in_order::read::<Avx2, f32>(view, start, out) }
    }
    // SAFETY of both: the machine has these lanes.
    match view.registers() {
        Some(Avx512::LANES) => unsafe { avx512(view, start, out) },
        Some(_) => unsafe { avx2(view, start, out) },
        None => return false,
    }
    true
}

/// As [`Elements::read_bf16`](super::Elements::read_bf16).
#[inline(always)]
pub(super) fn read_bf16(view: &View, start: usize, out: &mut [bf16]) -> bool {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    fn avx512(view: &View, start: usize, out: &mut [bf16]) {
        // SAFETY: the caller has the instructions.
        unsafe { in_order::read::<Avx512, bf16>(view, start, out) }
    }
    let takes = level() >= Level::Avx512Bf16 && view.registers().is_some();
    if takes {
        // SAFETY: the level says that the machine has the instructions.
        unsafe { avx512(view, start, out) }
    }
    takes
}

/// Writes the integers nearest to what codes from element `start` on stand for in multiples of `unit`.
#[inline(always)]
pub(super) fn read_integers(view: &View, unit: f32, start: usize, out: &mut [i16]) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    fn avx512(view: &View, start: usize, out: &mut [i16]) {
        // SAFETY: the caller has the instructions.
        unsafe { in_order::read::<Avx512, i16>(view, start, out) }
    }
    #[target_feature(enable = "avx2,fma,f16c")]
    fn avx2(view: &View, start: usize, out: &mut [i16]) {
        // SAFETY: the caller has the instructions.
        unsafe { in_order::read::<Avx2, i16>(view, start, out) }
    }
    // One group, whose scale takes the unit away.
    let scale = [unit.recip()];
    let integers = View { group: view.len, scales: ScalesView::F32(&scale, &[]), ..*view };
    // SAFETY of both: the machine has these lanes.
    match lanes() {
        Some(Avx512::LANES) => unsafe { avx512(&integers, start, out) },
        Some(_) => unsafe { avx2(&integers, start, out) },
        None => unreachable!("read without registers"),
    }
}

/// Scales and, where they are asked for, offsets from group `first` on, in whole registers of either size.
pub(super) fn read_scales(view: &View, first: usize, scales: &mut [f32], offsets: &mut [f32]) {
    // SAFETY of both: the machine has these lanes.
    match lanes() {
        Some(Avx512::LANES) => unsafe { fill_apart::<Avx512>(view, first, scales, offsets) },
        Some(_) => unsafe { fill_apart::<Avx2>(view, first, scales, offsets) },
        None => unreachable!("read without registers"),
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
fn avx512(
    ordered: &Ordered,
    x: &OrderedNumbers,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    // SAFETY: the caller has the instructions.
    unsafe { numbers::dots::<Avx512>(ordered, x, matrix, lines, out) }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn avx2(
    ordered: &Ordered,
    x: &OrderedNumbers,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    // SAFETY: the caller has the instructions.
    unsafe { numbers::dots::<Avx2>(ordered, x, matrix, lines, out) }
}

/// Where the bytes of a lane's codes are in the 16 bytes of its quarter of a register, which has four lanes from
/// byte `start` on.
const fn bytes_of_lanes(bits: usize, start: usize) -> [u8; 16] {
    let mut places = [0; 16];
    let mut byte = 0;
    while byte < 16 {
        places[byte] = (start + byte / 4 * bits / 2 + byte % 4) as u8;
        // Beyond the quarter, where no lane's codes are.
        if places[byte] > 15 {
            places[byte] = 0x80;
        }
        byte += 1;
    }
    places
}

/// Where the two bytes that begin with a lane's code are, of codes one after the other, and by how many bits it begins
/// too high.
const fn in_order(bits: usize) -> ([[u8; 4]; MOST_LANES], [u32; MOST_LANES]) {
    let (mut places, mut shifts) = ([[0x80; 4]; MOST_LANES], [0; MOST_LANES]);
    let mut lane = 0;
    while lane < MOST_LANES {
        let byte = lane * bits / 8;
        shifts[lane] = (lane * bits % 8) as u32;
        places[lane][0] = byte as u8;
        // A code that ends with its byte may be the last.
        if shifts[lane] as usize + bits > 8 {
            places[lane][1] = byte as u8 + 1;
        }
        lane += 1;
    }
    (places, shifts)
}

/// By how many bits a lane's codes then begin too high.
const fn bits_of_lanes(bits: usize) -> [u32; MOST_LANES] {
    let mut shifts = [0; MOST_LANES];
    let mut lane = 0;
    while lane < MOST_LANES {
        shifts[lane] = (lane * bits % 2 * 4) as u32;
        lane += 1;
    }
    shifts
}

pub(super) struct Avx512;

impl Avx512 {
    /// Pairs of bytes of each quarter's codes.
    pub(super) const fn pairs_of_quarters(bits: usize) -> [u16; 32] {
        let mut places = [0; 32];
        let mut pair = 0;
        while pair < 32 {
            places[pair] = (pair / 8 * bits + pair % 8) as u16 % 32;
            pair += 1;
        }
        places
    }
}

// SAFETY of all: as the callers of a method promise.
impl Registers for Avx512 {
    const LANES: usize = 16;
    type Floats = __m512;
    type Words = __m512i;
    type Table = __m512;
    const LOOKS_UP_AT_ONCE: bool = true;

    call_with!("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c");

    #[inline(always)]
    unsafe fn zeros() -> __m512 {
        unsafe { _mm512_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn floats(number: f32) -> __m512 {
        unsafe { _mm512_set1_ps(number) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(floats: __m512, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, floats) }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> __m512i {
        unsafe { _mm512_loadu_si512(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_table(from: &[f32; 16]) -> __m512 {
        unsafe { _mm512_loadu_ps(from.as_ptr()) }
    }
    #[inline(always)]
    unsafe fn scale_table(table: __m512, scale: f32, offset: f32) -> __m512 {
        unsafe { Self::add(Self::multiply(table, Self::floats(scale)), Self::floats(offset)) }
    }
    #[inline(always)]
    unsafe fn multiply_add(a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn multiply(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn subtract(a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sums(floats: &[__m512; SUMMED]) -> [f32; SUMMED] {
        unsafe {
            let [a, b, c, d] = *floats;
            // Of each quarter, two lanes of each, and then one of each.
            let (low, high) = (_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b));
            let ab = _mm512_add_ps(low, high);
            let (low, high) = (_mm512_shuffle_ps::<0x88>(c, d), _mm512_shuffle_ps::<0xdd>(c, d));
            let cd = _mm512_add_ps(low, high);
            let (low, high) =
                (_mm512_shuffle_ps::<0x88>(ab, cd), _mm512_shuffle_ps::<0xdd>(ab, cd));
            let sums = _mm512_add_ps(low, high);
            let high = _mm512_extractf32x8_ps::<1>(sums);
            sum_of_halves(_mm256_add_ps(_mm512_castps512_ps256(sums), high))
        }
    }
    #[inline(always)]
    unsafe fn shift_left(words: __m512i, bits: u32) -> __m512i {
        unsafe { _mm512_sllv_epi32(words, _mm512_set1_epi32(bits as i32)) }
    }
    #[inline(always)]
    unsafe fn shift_right(words: __m512i, bits: u32) -> __m512i {
        unsafe { _mm512_srlv_epi32(words, _mm512_set1_epi32(bits as i32)) }
    }
    #[inline(always)]
    unsafe fn shift_right_signed(words: __m512i, bits: u32) -> __m512i {
        unsafe { _mm512_srav_epi32(words, _mm512_set1_epi32(bits as i32)) }
    }
    #[inline(always)]
    unsafe fn mask(words: __m512i, mask: u32, with: u32) -> __m512 {
        unsafe {
            let (mask, with) = (_mm512_set1_epi32(mask as i32), _mm512_set1_epi32(with as i32));
            _mm512_castsi512_ps(_mm512_or_si512(_mm512_and_si512(words, mask), with))
        }
    }
    #[inline(always)]
    unsafe fn look_up(table: __m512, indices: __m512i) -> __m512 {
        unsafe { _mm512_permutexvar_ps(indices, table) }
    }
    #[inline(always)]
    unsafe fn first(floats: __m512, count: usize) -> __m512 {
        let lanes = u16::MAX >> Self::LANES.saturating_sub(count);
        unsafe { _mm512_maskz_mov_ps(lanes, floats) }
    }
    #[inline(always)]
    unsafe fn permute(floats: __m512, indices: __m512i) -> __m512 {
        unsafe { _mm512_permutexvar_ps(indices, floats) }
    }
    #[inline(always)]
    unsafe fn codes_in_order<const BITS: usize>(from: *const u8) -> __m512i {
        unsafe {
            let bytes = _mm_loadu_si128(from.cast());
            if BITS == 8 {
                return _mm512_cvtepu8_epi32(bytes);
            }
            let (places, shifts) = const { &in_order(BITS) };
            let places = _mm512_loadu_si512(places.as_ptr().cast());
            let codes = _mm512_shuffle_epi8(_mm512_broadcast_i32x4(bytes), places);
            let codes = _mm512_srlv_epi32(codes, Self::load_words(shifts.as_ptr()));
            _mm512_and_si512(codes, _mm512_set1_epi32((1 << BITS) - 1))
        }
    }
    #[inline(always)]
    unsafe fn converted(words: __m512i) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(words) }
    }
    #[inline(always)]
    unsafe fn codes<const BITS: usize>(from: *const u8) -> __m512i {
        unsafe {
            match BITS {
                8 => _mm512_loadu_si512(from.cast()),
                4 => _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())),
                2 => _mm512_cvtepu8_epi32(_mm_loadu_si128(from.cast())),
                _ => {
                    let (pairs, shifts) =
                        const { (&Self::pairs_of_quarters(BITS), &bits_of_lanes(BITS)) };
                    let bytes = const { &bytes_of_lanes(BITS, 0) };
                    let codes = _mm512_maskz_loadu_epi32((1 << (2 * BITS)) - 1, from.cast());
                    let pairs = _mm512_loadu_si512(pairs.as_ptr().cast());
                    let bytes = _mm512_broadcast_i32x4(_mm_loadu_si128(bytes.as_ptr().cast()));
                    let codes = _mm512_permutexvar_epi16(pairs, codes);
                    let codes = _mm512_shuffle_epi8(codes, bytes);
                    match BITS % 2 {
                        0 => codes,
                        _ => _mm512_srlv_epi32(codes, Self::load_words(shifts.as_ptr())),
                    }
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn halves(from: *const f16) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn bytes(from: *const u8, signed: bool) -> __m512 {
        unsafe {
            let bytes = _mm_loadu_si128(from.cast());
            _mm512_cvtepi32_ps(match signed {
                true => _mm512_cvtepi8_epi32(bytes),
                false => _mm512_cvtepu8_epi32(bytes),
            })
        }
    }
}

/// # Safety
/// The machine needs the instructions.
#[inline(always)]
unsafe fn sum_of_halves(floats: __m256) -> [f32; SUMMED] {
    // SAFETY: as promised by the caller; there is room for four.
    unsafe {
        let high = _mm256_extractf128_ps::<1>(floats);
        let mut sums = [0.0; SUMMED];
        _mm_storeu_ps(sums.as_mut_ptr(), _mm_add_ps(_mm256_castps256_ps128(floats), high));
        sums
    }
}

pub(super) struct Avx2;

// SAFETY of all: as the callers of a method promise.
impl Registers for Avx2 {
    const LANES: usize = 8;
    type Floats = __m256;
    type Words = __m256i;
    type Table = (__m256, __m256);
    const LOOKS_UP_AT_ONCE: bool = false;

    call_with!("avx2,fma,f16c");

    #[inline(always)]
    unsafe fn zeros() -> __m256 {
        unsafe { _mm256_setzero_ps() }
    }
    #[inline(always)]
    unsafe fn floats(number: f32) -> __m256 {
        unsafe { _mm256_set1_ps(number) }
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> __m256 {
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(floats: __m256, to: *mut f32) {
        unsafe { _mm256_storeu_ps(to, floats) }
    }
    #[inline(always)]
    unsafe fn load_words(from: *const u32) -> __m256i {
        unsafe { _mm256_loadu_si256(from.cast()) }
    }
    #[inline(always)]
    unsafe fn load_table(from: &[f32; 16]) -> (__m256, __m256) {
        unsafe { (_mm256_loadu_ps(from.as_ptr()), _mm256_loadu_ps(from[8..].as_ptr())) }
    }
    #[inline(always)]
    unsafe fn scale_table((low, high): Self::Table, scale: f32, offset: f32) -> Self::Table {
        unsafe {
            let (scale, offset) = (Self::floats(scale), Self::floats(offset));
            let low = Self::add(Self::multiply(low, scale), offset);
            (low, Self::add(Self::multiply(high, scale), offset))
        }
    }
    #[inline(always)]
    unsafe fn multiply_add(a: __m256, b: __m256, c: __m256) -> __m256 {
        unsafe { _mm256_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn multiply(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn add(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn subtract(a: __m256, b: __m256) -> __m256 {
        unsafe { _mm256_sub_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn sums(&[a, b, c, d]: &[__m256; SUMMED]) -> [f32; SUMMED] {
        unsafe {
            // Of each half, two lanes of each, and then one of each.
            let (ab, cd) = (_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
            sum_of_halves(_mm256_hadd_ps(ab, cd))
        }
    }
    #[inline(always)]
    unsafe fn shift_left(words: __m256i, bits: u32) -> __m256i {
        unsafe { _mm256_sllv_epi32(words, _mm256_set1_epi32(bits as i32)) }
    }
    #[inline(always)]
    unsafe fn shift_right(words: __m256i, bits: u32) -> __m256i {
        unsafe { _mm256_srlv_epi32(words, _mm256_set1_epi32(bits as i32)) }
    }
    #[inline(always)]
    unsafe fn shift_right_signed(words: __m256i, bits: u32) -> __m256i {
        unsafe { _mm256_srav_epi32(words, _mm256_set1_epi32(bits as i32)) }
    }
    #[inline(always)]
    unsafe fn mask(words: __m256i, mask: u32, with: u32) -> __m256 {
        unsafe {
            let (mask, with) = (_mm256_set1_epi32(mask as i32), _mm256_set1_epi32(with as i32));
            _mm256_castsi256_ps(_mm256_or_si256(_mm256_and_si256(words, mask), with))
        }
    }
    #[inline(always)]
    unsafe fn look_up((low, high): (__m256, __m256), indices: __m256i) -> __m256 {
        unsafe {
            // The fourth bit, which says which half of the table it is, where a sign would be.
            let half = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(indices));
            let (low, high) = (Self::permute(low, indices), Self::permute(high, indices));
            _mm256_blendv_ps(low, high, half)
        }
    }
    #[inline(always)]
    unsafe fn first(floats: __m256, count: usize) -> __m256 {
        const LANES: [u32; 16] = [!0, !0, !0, !0, !0, !0, !0, !0, 0, 0, 0, 0, 0, 0, 0, 0];
        let lanes = &LANES[Self::LANES.saturating_sub(count)..][..Self::LANES];
        unsafe { _mm256_and_ps(floats, _mm256_castsi256_ps(Self::load_words(lanes.as_ptr()))) }
    }
    #[inline(always)]
    unsafe fn permute(floats: __m256, indices: __m256i) -> __m256 {
        unsafe { _mm256_permutevar8x32_ps(floats, indices) }
    }
    #[inline(always)]
    unsafe fn codes_in_order<const BITS: usize>(from: *const u8) -> __m256i {
        unsafe {
            let bytes = _mm_loadu_si128(from.cast());
            if BITS == 8 {
                return _mm256_cvtepu8_epi32(bytes);
            }
            let (places, shifts) = const { &in_order(BITS) };
            let places = _mm256_loadu_si256(places.as_ptr().cast());
            let codes = _mm256_shuffle_epi8(_mm256_set_m128i(bytes, bytes), places);
            let codes = _mm256_srlv_epi32(codes, Self::load_words(shifts.as_ptr()));
            _mm256_and_si256(codes, _mm256_set1_epi32((1 << BITS) - 1))
        }
    }
    #[inline(always)]
    unsafe fn converted(words: __m256i) -> __m256 {
        unsafe { _mm256_cvtepi32_ps(words) }
    }
    #[inline(always)]
    unsafe fn codes<const BITS: usize>(from: *const u8) -> __m256i {
        unsafe {
            match BITS {
                8 => _mm256_loadu_si256(from.cast()),
                4 => _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast())),
                2 => _mm256_cvtepu8_epi32(_mm_loadl_epi64(from.cast())),
                _ => {
                    // The first and the last bytes of the piece.
                    let (low, high) = match BITS {
                        3 => (
                            _mm_loadl_epi64(from.cast()),
                            _mm_loadl_epi64(from.add(4 * BITS - 8).cast()),
                        ),
                        _ => (
                            _mm_loadu_si128(from.cast()),
                            _mm_loadu_si128(from.add(4 * BITS - 16).cast()),
                        ),
                    };
                    let places = const {
                        let loaded = if BITS == 3 { 8 } else { 16 };
                        &[bytes_of_lanes(BITS, 0), bytes_of_lanes(BITS, loaded - 2 * BITS)]
                    };
                    let shifts = const { &bits_of_lanes(BITS) };
                    let places = _mm256_loadu_si256(places.as_ptr().cast());
                    let codes = _mm256_shuffle_epi8(_mm256_set_m128i(high, low), places);
                    match BITS % 2 {
                        0 => codes,
                        _ => _mm256_srlv_epi32(codes, Self::load_words(shifts.as_ptr())),
                    }
                }
            }
        }
    }
    #[inline(always)]
    unsafe fn halves(from: *const f16) -> __m256 {
        unsafe { _mm256_cvtph_ps(_mm_loadu_si128(from.cast())) }
    }
    #[inline(always)]
    unsafe fn bytes(from: *const u8, signed: bool) -> __m256 {
        unsafe {
            let bytes = _mm_loadl_epi64(from.cast());
            _mm256_cvtepi32_ps(match signed {
                true => _mm256_cvtepi8_epi32(bytes),
                false => _mm256_cvtepu8_epi32(bytes),
            })
        }
    }
}
