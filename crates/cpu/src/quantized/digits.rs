//! Dot products of a few rows with codes that stand for integers, by instructions for products of bytes: AVX-512's and
//! AVX's (VNNI), and those of AVX2, which take three for one.
//!
//! The numbers of a row that a lane has, 4 or 8 neighbours, are integers times one power of two, and the integers have
//! three digits of 8 bits: `x = (65536·d2 + 256·d1 + d0)·2^e`, each from -128 to 127. Products of digits with codes are added
//! up without rounding, so what is lost is what is below 2^-22 of the lane's largest number (2^-21 for codes of 8 bits): as
//! much as sums in f32 lose.

use super::Levels;
use super::PowerOfTwo;
use super::integer_lines::unit;
use super::lines::{Lines, Ordered, Piece, dots_by};
use super::registers::{Avx2, Avx512, MOST_LANES, Registers, call_with};
use crate::scratch::Scratch;
use crate::simd::{has_byte_dots, has_narrow_byte_dots};
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

const DIGITS: usize = 3;

/// Codes of a lane that one instruction multiplies.
const BYTES: usize = 4;

/// Registers of a piece's bytes at most.
const MOST_REGISTERS: usize = 2;

/// Numbers of a piece at most.
const MOST_NUMBERS: usize = MOST_REGISTERS * BYTES * MOST_LANES;

/// The instructions by which digits are multiplied.
#[derive(Clone, Copy, Debug)]
pub enum By {
    /// AVX2's sums of two products in 16 bits, for codes of 4 bits.
    Avx2,
    /// Registers of 256 bits, for codes of 4 and 8 bits.
    AvxVnni,
    /// Registers of 512 bits.
    Avx512Vnni,
}

impl By {
    /// Those that the machine has for registers of so many lanes.
    pub(super) fn best(lanes: usize) -> Option<Self> {
        match lanes {
            MOST_LANES => has_byte_dots().then_some(Self::Avx512Vnni),
            _ if has_narrow_byte_dots() => Some(Self::AvxVnni),
            _ => Some(Self::Avx2),
        }
    }

    fn takes(self, integers: Integers, bits: usize, fields: usize) -> bool {
        // Two products of a code of 4 bits fit into 16 bits, and bytes of a table don't.
        match self {
            Self::Avx2 => fields == 8 && integers.table.is_none(),
            Self::AvxVnni => fields == 8 || bits == 8,
            Self::Avx512Vnni => true,
        }
    }
}

/// What codes stand for: `(byte - zero)·unit`, where the byte is the code or what a table has for it.
#[derive(Clone, Copy)]
struct Integers {
    table: Option<[u8; 16]>,
    zero: u8,
    unit: f32,
    /// The largest `|byte - zero|`.
    largest: u8,
}

impl Integers {
    fn of(levels: Levels) -> Option<Self> {
        let unit = unit(levels)?;
        match levels {
            Levels::Integers { bits, zero } => {
                let largest = zero.max(((1u32 << bits) - 1) as u8);
                Some(Integers { table: None, zero, unit, largest })
            }
            Levels::Table(numbers) => {
                let mut integers = Integers { table: None, zero: 128, unit, largest: 0 };
                let mut table = [0; 16];
                for (byte, number) in table.iter_mut().zip(numbers) {
                    let integer = number / unit;
                    *byte = (integer + 128.0) as u8;
                    integers.largest = integers.largest.max(integer.abs() as u8);
                }
                Some(Integers { table: Some(table), ..integers })
            }
            Levels::E4m3 => None,
        }
    }
}

/// Rows in digits for the products with matrices of these levels, and as many codes a lane.
pub(super) struct OrderedDigits {
    by: By,
    lanes: usize,
    levels: Levels,
    integers: Integers,
    /// Codes of a lane.
    fields: usize,
    /// Of a row.
    pieces: usize,
    /// `(rows, pieces, DIGITS, fields / BYTES, lanes, BYTES)`: the lowest first, and of 8 codes a lane the even ones.
    digits: Scratch<i8>,
    /// `(rows, pieces, lanes)`, the powers of two.
    scales: Scratch<f32>,
    /// `(rows, pieces, lanes)`, what the sum of a lane's integers by codes begins with, so that the code of 0 counts nothing.
    starts: Scratch<i32>,
}

/// Codes of a lane: 8 of 4 bits where groups are large enough, or 4.
fn codes_of_lane(matrix: Lines) -> usize {
    if matrix.levels().bits() == 4 && matrix.fits_fields(8) { 8 } else { 4 }
}

impl OrderedDigits {
    /// `x` `(rows, depth)`, for products with this matrix in registers of `lanes`: `None` where its codes don't stand for
    /// integers that can be multiplied so.
    #[inline(always)]
    pub(super) fn new(
        depth: usize,
        x: &[f32],
        lanes: usize,
        by: By,
        matrix: Lines,
    ) -> Option<Self> {
        let (levels, fields) = (matrix.levels(), codes_of_lane(matrix));
        let takes = |integers: &Integers| by.takes(*integers, levels.bits(), fields);
        let integers = Integers::of(levels).filter(takes)?;
        let pieces = depth.div_ceil(fields * lanes);
        let all = x.len() / depth * pieces * lanes;
        let mut ordered = OrderedDigits {
            by,
            lanes,
            levels,
            integers,
            fields,
            pieces,
            digits: Scratch::new(all * DIGITS * fields),
            scales: Scratch::new(all),
            starts: Scratch::new(all),
        };
        for (row, x) in x.chunks_exact(depth).enumerate() {
            match fields {
                8 => ordered.put::<8>(row, x),
                _ => ordered.put::<4>(row, x),
            }
        }
        Some(ordered)
    }

    pub(super) fn are_for(&self, matrix: Lines) -> bool {
        self.levels == matrix.levels() && self.fields == codes_of_lane(matrix)
    }

    /// Puts a row into digits.
    #[inline(always)]
    fn put<const FIELDS: usize>(&mut self, row: usize, x: &[f32]) {
        let Integers { zero, unit, largest, .. } = self.integers;
        // The sum of a lane's products is below 2^31, and an integer has its digits.
        let bits_of_largest = (usize::from(largest).max(1) * FIELDS).ilog2() + 1;
        let bits = (31 - bits_of_largest).min(8 * DIGITS as u32 - 2);
        let count = FIELDS * self.lanes;
        for piece in 0..self.pieces {
            let place = row * self.pieces + piece;
            let scales = &mut self.scales[place * self.lanes..][..self.lanes];
            let starts = &mut self.starts[place * self.lanes..][..self.lanes];
            let x = &x[piece * count..];
            let x = &x[..x.len().min(count)];
            let mut numbers = [0f32; MOST_NUMBERS];
            for (number, x) in numbers.iter_mut().zip(x) {
                *number = *x;
            }
            let mut integers = [0i32; MOST_NUMBERS];
            let lanes = numbers.as_chunks::<FIELDS>().0.iter();
            let lanes = lanes.zip(integers.as_chunks_mut::<FIELDS>().0);
            for ((numbers, integers), (scale, start)) in lanes.zip(scales.iter_mut().zip(starts)) {
                let mut size = 0;
                for number in numbers {
                    size = size.max(number.to_bits() & !(1 << 31));
                }
                let scaled = PowerOfTwo::of(size, bits);
                let mut sum = 0i32;
                for (integer, number) in integers.iter_mut().zip(numbers) {
                    *integer = scaled.integer(*number);
                    sum = sum.wrapping_add(*integer);
                }
                *scale = scaled.power * unit;
                *start = sum.wrapping_mul(-i32::from(zero));
            }
            let digits = &mut self.digits[place * DIGITS * count..][..DIGITS * count];
            for digits in digits.chunks_exact_mut(count) {
                if FIELDS == 8 {
                    let (evens, odds) = digits.split_at_mut(count / 2);
                    let pairs = integers.as_chunks_mut::<2>().0;
                    for ((even, odd), [first, second]) in evens.iter_mut().zip(odds).zip(pairs) {
                        (*even, *odd) = (*first as i8, *second as i8);
                    }
                } else {
                    for (digit, integer) in digits.iter_mut().zip(&integers) {
                        *digit = *integer as i8;
                    }
                }
                for integer in &mut integers {
                    *integer = integer.wrapping_add(128) >> 8;
                }
            }
        }
    }
}

/// Registers whose lanes are four bytes.
///
/// # Safety
/// As of [`Registers`].
trait ByteRegisters: Registers {
    unsafe fn add_words(a: Self::Words, b: Self::Words) -> Self::Words;
    /// The lowest four bits of every byte.
    unsafe fn nibbles(words: Self::Words) -> Self::Words;
    /// Sixteen bytes, as often as a register has them.
    unsafe fn load_bytes(from: &[u8; 16]) -> Self::Words;
    /// The bytes of such a table for bytes below 16.
    unsafe fn look_up_bytes(table: Self::Words, indices: Self::Words) -> Self::Words;
}

// SAFETY of all: as the callers of a method promise.
impl ByteRegisters for Avx512 {
    #[inline(always)]
    unsafe fn add_words(a: __m512i, b: __m512i) -> __m512i {
        unsafe { _mm512_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn nibbles(words: __m512i) -> __m512i {
        unsafe { _mm512_and_si512(words, _mm512_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: &[u8; 16]) -> __m512i {
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(from.as_ptr().cast())) }
    }
    #[inline(always)]
    unsafe fn look_up_bytes(table: __m512i, indices: __m512i) -> __m512i {
        unsafe { _mm512_shuffle_epi8(table, indices) }
    }
}

// SAFETY of all: as the callers of a method promise.
impl ByteRegisters for Avx2 {
    #[inline(always)]
    unsafe fn add_words(a: __m256i, b: __m256i) -> __m256i {
        unsafe { _mm256_add_epi32(a, b) }
    }
    #[inline(always)]
    unsafe fn nibbles(words: __m256i) -> __m256i {
        unsafe { _mm256_and_si256(words, _mm256_set1_epi8(15)) }
    }
    #[inline(always)]
    unsafe fn load_bytes(from: &[u8; 16]) -> __m256i {
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(from.as_ptr().cast())) }
    }
    #[inline(always)]
    unsafe fn look_up_bytes(table: __m256i, indices: __m256i) -> __m256i {
        unsafe { _mm256_shuffle_epi8(table, indices) }
    }
}

/// Products of bytes.
///
/// # Safety
/// As of [`Registers`].
trait ByteDots<R: Registers> {
    /// As [`Piece::call`].
    unsafe fn call(f: impl FnOnce());
    /// `sum + Σ byte·digit` over the `COUNT` registers of each lane's bytes, modulo 2^32.
    unsafe fn add<const COUNT: usize>(
        sum: R::Words,
        bytes: &[R::Words; COUNT],
        digits: *const i8,
    ) -> R::Words;
}

struct Vnni512;
struct Vnni256;
struct Pairs256;

// SAFETY of all: as the callers of a method promise.
impl ByteDots<Avx512> for Vnni512 {
    call_with!("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c");
    #[inline(always)]
    unsafe fn add<const COUNT: usize>(
        mut sum: __m512i,
        bytes: &[__m512i; COUNT],
        digits: *const i8,
    ) -> __m512i {
        unsafe {
            for (register, bytes) in bytes.iter().enumerate() {
                let digits = _mm512_loadu_si512(digits.add(register * size_of::<__m512i>()).cast());
                sum = _mm512_dpbusd_epi32(sum, *bytes, digits);
            }
            sum
        }
    }
}

impl ByteDots<Avx2> for Vnni256 {
    call_with!("avxvnni,avx2,fma,f16c");
    #[inline(always)]
    unsafe fn add<const COUNT: usize>(
        mut sum: __m256i,
        bytes: &[__m256i; COUNT],
        digits: *const i8,
    ) -> __m256i {
        unsafe {
            for (register, bytes) in bytes.iter().enumerate() {
                let digits = digits.add(register * size_of::<__m256i>());
                sum = _mm256_dpbusd_avx_epi32(sum, *bytes, _mm256_loadu_si256(digits.cast()));
            }
            sum
        }
    }
}

impl ByteDots<Avx2> for Pairs256 {
    call_with!("avx2,fma,f16c");
    #[inline(always)]
    unsafe fn add<const COUNT: usize>(
        sum: __m256i,
        bytes: &[__m256i; COUNT],
        digits: *const i8,
    ) -> __m256i {
        unsafe {
            let mut pairs = _mm256_setzero_si256();
            for (register, bytes) in bytes.iter().enumerate() {
                let digits = digits.add(register * size_of::<__m256i>());
                let digits = _mm256_loadu_si256(digits.cast());
                pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(*bytes, digits));
            }
            _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)))
        }
    }
}

/// Makes bytes of codes, in the order of the digits.
///
/// # Safety
/// As of [`Registers`].
trait Unpack<R: Registers, const COUNT: usize> {
    fn bits(&self) -> usize;
    /// Of a piece's codes, which are followed by others up to a whole register.
    unsafe fn bytes(&self, from: *const u8) -> [R::Words; COUNT];
}

/// Two codes of each byte.
#[derive(Clone, Copy)]
struct Nibbles;

impl<R: ByteRegisters> Unpack<R, 2> for Nibbles {
    #[inline(always)]
    fn bits(&self) -> usize {
        4
    }
    #[inline(always)]
    unsafe fn bytes(&self, from: *const u8) -> [R::Words; 2] {
        // SAFETY: as promised by the caller.
        unsafe {
            let codes = R::load_words(from.cast());
            [R::nibbles(codes), R::nibbles(R::shift_right(codes, 4))]
        }
    }
}

/// And what a table has for them.
#[derive(Clone, Copy)]
struct NibblesOfTable<W>(W);

impl<R: ByteRegisters> Unpack<R, 2> for NibblesOfTable<R::Words> {
    #[inline(always)]
    fn bits(&self) -> usize {
        4
    }
    #[inline(always)]
    unsafe fn bytes(&self, from: *const u8) -> [R::Words; 2] {
        // SAFETY: as promised by the caller.
        unsafe {
            let [even, odd] = <Nibbles as Unpack<R, 2>>::bytes(&Nibbles, from);
            [R::look_up_bytes(self.0, even), R::look_up_bytes(self.0, odd)]
        }
    }
}

/// Codes that are bytes.
#[derive(Clone, Copy)]
struct WholeBytes;

impl<R: ByteRegisters> Unpack<R, 1> for WholeBytes {
    #[inline(always)]
    fn bits(&self) -> usize {
        8
    }
    #[inline(always)]
    unsafe fn bytes(&self, from: *const u8) -> [R::Words; 1] {
        // SAFETY: as promised by the caller.
        unsafe { [R::load_words(from.cast())] }
    }
}

/// Codes of up to 6 bits, eight of which are brought to each eight bytes.
#[derive(Clone, Copy)]
struct AnyBits<const TABLE: bool> {
    bits: usize,
    /// Their bytes, the bits that they begin at there, and those that they have.
    places: __m512i,
    shifts: __m512i,
    mask: __m512i,
    /// What they stand for, if there is a table, four times.
    table: __m512i,
}

impl<const TABLE: bool> AnyBits<TABLE> {
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    fn new(bits: usize, table: __m512i) -> Self {
        let (mut places, mut shifts) = ([0u8; 64], [0u8; 64]);
        for (byte, (place, shift)) in places.iter_mut().zip(&mut shifts).enumerate() {
            // What is beyond eight codes' bytes is of no account.
            *place = (byte / 8 * bits + byte % 8) as u8;
            *shift = (byte % 8 * bits) as u8;
        }
        // SAFETY: there are as many bytes as are read.
        unsafe {
            AnyBits {
                bits,
                places: _mm512_loadu_si512(places.as_ptr().cast()),
                shifts: _mm512_loadu_si512(shifts.as_ptr().cast()),
                mask: _mm512_set1_epi8((1 << bits) - 1),
                table,
            }
        }
    }
}

impl<const TABLE: bool> Unpack<Avx512, 1> for AnyBits<TABLE> {
    #[inline(always)]
    fn bits(&self) -> usize {
        self.bits
    }
    #[inline(always)]
    unsafe fn bytes(&self, from: *const u8) -> [__m512i; 1] {
        // SAFETY: as promised by the caller.
        unsafe {
            let codes = _mm512_permutexvar_epi8(self.places, _mm512_loadu_si512(from.cast()));
            let codes = _mm512_multishift_epi64_epi8(self.shifts, codes);
            let codes = _mm512_and_si512(codes, self.mask);
            [if TABLE { _mm512_shuffle_epi8(self.table, codes) } else { codes }]
        }
    }
}

/// Rows by codes that `codes` makes bytes of and `D` multiplies, `COUNT` registers of them a piece.
struct Digits<'a, C, D, const COUNT: usize> {
    pieces: usize,
    digits: &'a [i8],
    scales: &'a [f32],
    starts: &'a [i32],
    codes: C,
    dots: PhantomData<D>,
}

// Not derived, for `D` needn't be.
impl<C: Copy, D, const COUNT: usize> Copy for Digits<'_, C, D, COUNT> {}

impl<C: Copy, D, const COUNT: usize> Clone for Digits<'_, C, D, COUNT> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<'a, C, D, const COUNT: usize> Digits<'a, C, D, COUNT> {
    fn new(x: &'a OrderedDigits, codes: C) -> Self {
        assert!(x.fields == COUNT * BYTES);
        let OrderedDigits { pieces, digits, scales, starts, .. } = x;
        Self { pieces: *pieces, digits, scales, starts, codes, dots: PhantomData }
    }
}

impl<R, C, D, const COUNT: usize> Piece<R> for Digits<'_, C, D, COUNT>
where
    R: ByteRegisters,
    C: Unpack<R, COUNT> + Copy,
    D: ByteDots<R>,
{
    const FIELDS: usize = BYTES * COUNT;
    const FINITE: bool = true;

    #[inline(always)]
    fn bits(&self) -> usize {
        self.codes.bits()
    }

    #[inline(always)]
    unsafe fn call(f: impl FnOnce()) {
        // SAFETY: as promised by the caller.
        unsafe { D::call(f) }
    }

    #[inline(always)]
    unsafe fn add<const ROWS: usize>(
        &self,
        place: usize,
        codes: *const u8,
        scale: R::Floats,
        totals: &mut [R::Floats; ROWS],
    ) {
        let of_digit = COUNT * BYTES * R::LANES;
        // SAFETY: as promised by the caller.
        unsafe {
            let bytes = self.codes.bytes(codes);
            for (row, total) in totals.iter_mut().enumerate() {
                let place = row * self.pieces + place;
                let digits = self.digits.as_ptr().add(place * DIGITS * of_digit);
                let mut high = D::add(R::zero_words(), &bytes, digits.add(2 * of_digit));
                high = D::add(R::shift_left(high, 8), &bytes, digits.add(of_digit));
                let start = self.starts.as_ptr().add(place * R::LANES);
                let low = D::add(R::load_words(start.cast()), &bytes, digits);
                let sum = R::add_words(R::shift_left(high, 8), low);
                let of_lanes = R::load(self.scales.as_ptr().add(place * R::LANES));
                let dot = R::multiply(R::converted(sum), of_lanes);
                *total = R::multiply_add(dot, scale, *total);
            }
        }
    }
}

/// As [`x86::dots`](super::x86::dots), by digits.
///
/// # Safety
/// The digits have to be those that `ordered` has for the matrix, and the machine needs their instructions.
#[inline(always)]
pub(super) unsafe fn dots(
    ordered: &Ordered,
    digits: &OrderedDigits,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    assert!(digits.are_for(matrix) && digits.lanes == ordered.lanes());
    // SAFETY: as promised by the caller.
    unsafe {
        match digits.by {
            By::Avx2 => avx2(ordered, digits, matrix, lines, out),
            By::AvxVnni => avx_vnni(ordered, digits, matrix, lines, out),
            By::Avx512Vnni => avx512_vnni(ordered, digits, matrix, lines, out),
        }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx512vbmi,avx2,fma,f16c")]
fn avx512_vnni(
    ordered: &Ordered,
    x: &OrderedDigits,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    // SAFETY: the caller has the instructions.
    unsafe {
        let table = Avx512::load_bytes(&x.integers.table.unwrap_or_default());
        match (x.fields, matrix.levels().bits(), x.integers.table) {
            (8, _, Some(_)) => {
                let codes = NibblesOfTable(table);
                dots_by(ordered, &Digits::<_, Vnni512, 2>::new(x, codes), matrix, lines, out)
            }
            (8, ..) => {
                dots_by(ordered, &Digits::<_, Vnni512, 2>::new(x, Nibbles), matrix, lines, out)
            }
            (_, 8, _) => {
                dots_by(ordered, &Digits::<_, Vnni512, 1>::new(x, WholeBytes), matrix, lines, out)
            }
            (_, bits, None) => {
                let codes = AnyBits::<false>::new(bits, table);
                dots_by(ordered, &Digits::<_, Vnni512, 1>::new(x, codes), matrix, lines, out)
            }
            (_, bits, Some(_)) => {
                let codes = AnyBits::<true>::new(bits, table);
                dots_by(ordered, &Digits::<_, Vnni512, 1>::new(x, codes), matrix, lines, out)
            }
        }
    }
}

#[target_feature(enable = "avxvnni,avx2,fma,f16c")]
fn avx_vnni(
    ordered: &Ordered,
    x: &OrderedDigits,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    // SAFETY: the caller has the instructions.
    unsafe {
        match (x.fields, x.integers.table) {
            (8, Some(table)) => {
                let codes = NibblesOfTable(Avx2::load_bytes(&table));
                dots_by(ordered, &Digits::<_, Vnni256, 2>::new(x, codes), matrix, lines, out)
            }
            (8, None) => {
                dots_by(ordered, &Digits::<_, Vnni256, 2>::new(x, Nibbles), matrix, lines, out)
            }
            _ => dots_by(ordered, &Digits::<_, Vnni256, 1>::new(x, WholeBytes), matrix, lines, out),
        }
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn avx2(ordered: &Ordered, x: &OrderedDigits, matrix: Lines, lines: Range<usize>, out: &mut [f32]) {
    // SAFETY: the caller has the instructions.
    unsafe { dots_by(ordered, &Digits::<_, Pairs256, 2>::new(x, Nibbles), matrix, lines, out) }
}
