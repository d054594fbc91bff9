//! Registers of 32-bit lanes: AVX-512's and AVX2's.

use half::f16;
use std::arch::x86_64::*;

/// Lanes of a register at most.
pub const MOST_LANES: usize = 16;

/// Registers whose lanes are summed together.
pub const SUMMED: usize = 4;

/// Registers of 32-bit lanes.
///
/// # Safety
/// The machine needs the instructions; pointers need as many numbers behind them as are read or written.
// What is said above holds for all of its functions.
#[allow(clippy::missing_safety_doc)]
pub trait Registers {
    const LANES: usize;
    type Floats: Copy;
    type Words: Copy;
    /// Sixteen numbers.
    type Table: Copy;
    /// Whether they are looked up by one instruction, which is fewer than it takes to make floats of codes.
    const LOOKS_UP_AT_ONCE: bool;

    /// Calls what is compiled for these registers, as a function of its own.
    unsafe fn call(f: impl FnOnce());
    unsafe fn zeros() -> Self::Floats;
    unsafe fn floats(number: f32) -> Self::Floats;
    unsafe fn load(from: *const f32) -> Self::Floats;
    unsafe fn store(floats: Self::Floats, to: *mut f32);
    unsafe fn zero_words() -> Self::Words;
    unsafe fn load_words(from: *const u32) -> Self::Words;
    unsafe fn load_table(from: &[f32; 16]) -> Self::Table;
    /// Each `number·scale + offset`, rounded twice.
    unsafe fn scale_table(table: Self::Table, scale: f32, offset: f32) -> Self::Table;
    /// `a·b + c`
    unsafe fn multiply_add(a: Self::Floats, b: Self::Floats, c: Self::Floats) -> Self::Floats;
    unsafe fn multiply(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    unsafe fn add(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    unsafe fn subtract(a: Self::Floats, b: Self::Floats) -> Self::Floats;
    /// The sum of each one's lanes.
    unsafe fn sums(floats: &[Self::Floats; SUMMED]) -> [f32; SUMMED];
    unsafe fn shift_left(words: Self::Words, bits: u32) -> Self::Words;
    unsafe fn shift_right(words: Self::Words, bits: u32) -> Self::Words;
    /// With copies of the sign.
    unsafe fn shift_right_signed(words: Self::Words, bits: u32) -> Self::Words;
    /// `words & mask | with`
    unsafe fn mask(words: Self::Words, mask: u32, with: u32) -> Self::Floats;
    /// The numbers of a table for the lowest four bits of every lane.
    unsafe fn look_up(table: Self::Table, indices: Self::Words) -> Self::Floats;
    /// Zeros but in the first lanes.
    unsafe fn first(floats: Self::Floats, count: usize) -> Self::Floats;
    /// Lane `indices[l]` in lane `l`.
    unsafe fn permute(floats: Self::Floats, indices: Self::Words) -> Self::Floats;
    /// Codes of `BITS` bits, one a lane, of 16 bytes that can be read.
    unsafe fn codes_in_order<const BITS: usize>(from: *const u8) -> Self::Words;
    /// The numbers that the words are, below 2^31.
    unsafe fn converted(words: Self::Words) -> Self::Floats;
    /// Codes of `BITS` bits, four in the lowest bits of every lane; what is above them is of no account.
    unsafe fn codes<const BITS: usize>(from: *const u8) -> Self::Words;
    unsafe fn halves(from: *const f16) -> Self::Floats;
    unsafe fn bytes(from: *const u8, signed: bool) -> Self::Floats;
}

/// `call` of [`Registers`] and [`Piece`] for these instructions.
macro_rules! call_with {
    ($features:literal) => {
        #[inline(always)]
        unsafe fn call(f: impl FnOnce()) {
            #[inline(never)]
            #[target_feature(enable = $features)]
            fn call(f: impl FnOnce()) {
                f();
            }
            // SAFETY: as promised by the caller.
            unsafe { call(f) }
        }
    };
}
pub(super) use call_with;

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

pub struct Avx512;

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
    unsafe fn zero_words() -> __m512i {
        unsafe { _mm512_setzero_si512() }
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

pub struct Avx2;

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
    unsafe fn zero_words() -> __m256i {
        unsafe { _mm256_setzero_si256() }
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
