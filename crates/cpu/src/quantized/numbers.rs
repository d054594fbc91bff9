//! Dot products of a few rows with codes of any kind, which become numbers in f32.

use super::Levels;
use super::lines::{Lines, Ordered, Piece, dots_by};
use super::registers::Registers;
use crate::scratch::Scratch;
use std::ops::Range;

/// What the codes are, as a constant for the compiler.
const INTEGERS: u8 = 0;
const TABLE: u8 = 1;
const E4M3: u8 = 2;

/// Codes of a lane.
const FIELDS: usize = 4;

/// Rows in the order in which codes are unpacked.
pub(super) struct OrderedNumbers {
    /// `(rows, stride)`, whole pieces with zeros at the end.
    x: Scratch<f32>,
    stride: usize,
}

impl OrderedNumbers {
    /// `x` `(rows, depth)`, for registers of `lanes`.
    #[inline(always)]
    pub(super) fn new(depth: usize, x: &[f32], lanes: usize) -> Self {
        let piece = FIELDS * lanes;
        let stride = depth.next_multiple_of(piece);
        let mut ordered = Scratch::zeros(x.len() / depth * stride);
        for (x, ordered) in x.chunks_exact(depth).zip(ordered.chunks_exact_mut(stride)) {
            for (x, ordered) in x.chunks(piece).zip(ordered.chunks_exact_mut(piece)) {
                for (lane, x) in x.chunks(FIELDS).enumerate() {
                    for (field, x) in x.iter().enumerate() {
                        ordered[field * lanes + lane] = *x;
                    }
                }
            }
        }
        Self { x: ordered, stride }
    }
}

/// What codes of some bits stand for, by kind, in registers.
struct Numbers<'a, R: Registers, const BITS: usize, const KIND: u8> {
    x: &'a OrderedNumbers,
    table: R::Table,
    /// By which the fields of integers are too large.
    zeros: [R::Floats; FIELDS],
}

/// By how many bits a field's codes are shifted, and the bit that they then begin at, so that they fit into the 23 of a
/// float.
const fn place(bits: usize, field: usize) -> (u32, u32) {
    let together = if FIELDS * bits > 23 { FIELDS / 2 } else { FIELDS };
    ((field / together * together * bits) as u32, (field % together * bits) as u32)
}

// Not derived, for `R` needn't be.
impl<R: Registers, const BITS: usize, const KIND: u8> Copy for Numbers<'_, R, BITS, KIND> {}

impl<R: Registers, const BITS: usize, const KIND: u8> Clone for Numbers<'_, R, BITS, KIND> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<'a, R: Registers, const BITS: usize, const KIND: u8> Numbers<'a, R, BITS, KIND> {
    /// # Safety
    /// As of [`dots`].
    #[inline(always)]
    unsafe fn new(x: &'a OrderedNumbers, table: &[f32; 16], zero: u8) -> Self {
        let mut zeros = [0f32; FIELDS];
        for (field, number) in zeros.iter_mut().enumerate() {
            *number = (1u32 << (23 - place(BITS, field).1)) as f32 + f32::from(zero);
        }
        // SAFETY: as promised by the caller.
        unsafe {
            Numbers {
                x,
                table: R::load_table(table),
                zeros: [
                    R::floats(zeros[0]),
                    R::floats(zeros[1]),
                    R::floats(zeros[2]),
                    R::floats(zeros[3]),
                ],
            }
        }
    }

    /// # Safety
    /// As of [`dots`].
    #[inline(always)]
    unsafe fn field<const FIELD: usize>(&self, words: R::Words) -> R::Floats {
        // SAFETY: as promised by the caller.
        unsafe {
            match KIND {
                TABLE => {
                    let shift = const { (FIELD * BITS) as u32 };
                    R::look_up(self.table, R::shift_right(words, shift))
                }
                E4M3 => {
                    let shift = const { 24 - 8 * FIELD as u32 };
                    let moved = R::shift_right_signed(R::shift_left(words, shift), 4);
                    // The sign, and the rest where an f32 has it, whose exponent counts from 127 and not from 7.
                    let number = R::mask(moved, 0x87f0_0000, 0);
                    R::multiply(number, R::floats(const { f32::from_bits((127 + 120) << 23) }))
                }
                _ => {
                    // The low bits of a float whose lowest is worth 1 at the field's place.
                    let (shift, bit) = const { place(BITS, FIELD) };
                    let words = R::shift_right(words, shift);
                    let number = R::mask(words, ((1 << BITS) - 1) << bit, (127 + 23 - bit) << 23);
                    R::subtract(number, self.zeros[FIELD])
                }
            }
        }
    }
}

impl<R: Registers, const BITS: usize, const KIND: u8> Piece<R> for Numbers<'_, R, BITS, KIND> {
    const FIELDS: usize = FIELDS;
    const FINITE: bool = KIND == INTEGERS;

    #[inline(always)]
    fn bits(&self) -> usize {
        BITS
    }

    #[inline(always)]
    unsafe fn call(f: impl FnOnce()) {
        // SAFETY: as promised by the caller.
        unsafe { R::call(f) }
    }

    #[inline(always)]
    unsafe fn add<const ROWS: usize>(
        &self,
        place: usize,
        codes: *const u8,
        scale: R::Floats,
        totals: &mut [R::Floats; ROWS],
    ) {
        // SAFETY: as promised by the caller.
        unsafe {
            let words = R::codes::<BITS>(codes);
            let fields = [
                self.field::<0>(words),
                self.field::<1>(words),
                self.field::<2>(words),
                self.field::<3>(words),
            ];
            for (row, total) in totals.iter_mut().enumerate() {
                let x = self.x.x.as_ptr().add(row * self.x.stride + place * FIELDS * R::LANES);
                let mut dot = R::multiply(fields[0], R::load(x));
                for (field, numbers) in fields.iter().enumerate().skip(1) {
                    dot = R::multiply_add(*numbers, R::load(x.add(field * R::LANES)), dot);
                }
                *total = R::multiply_add(dot, scale, *total);
            }
        }
    }
}

/// The dot products of all rows with some lines: `out` `(rows, lines.len())`.
///
/// # Safety
/// The machine needs the registers' instructions.
#[inline(always)]
pub(super) unsafe fn dots<R: Registers>(
    ordered: &Ordered,
    x: &OrderedNumbers,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    macro_rules! dots_by {
        ($bits:literal, $kind:expr, $table:expr, $zero:expr) => {
            // SAFETY: as promised by the caller.
            unsafe {
                let numbers = Numbers::<R, $bits, $kind>::new(x, $table, $zero);
                dots_by(ordered, &numbers, matrix, lines, out)
            }
        };
    }
    let none = &[0.0; 16];
    match matrix.levels() {
        Levels::Table(table) => dots_by!(4, TABLE, table, 0),
        Levels::E4m3 => dots_by!(8, E4M3, none, 0),
        Levels::Integers { bits, zero } => match bits {
            2 => dots_by!(2, INTEGERS, none, zero),
            3 => dots_by!(3, INTEGERS, none, zero),
            4 if R::LOOKS_UP_AT_ONCE => {
                let table = std::array::from_fn(|code| code as f32 - f32::from(zero));
                dots_by!(4, TABLE, &table, 0)
            }
            4 => dots_by!(4, INTEGERS, none, zero),
            5 => dots_by!(5, INTEGERS, none, zero),
            6 => dots_by!(6, INTEGERS, none, zero),
            _ => dots_by!(8, INTEGERS, none, zero),
        },
    }
}
