//! What is computed with the registers that this machine has.

use super::in_order::INTEGERS;
use super::lines::{Lines, Ordered, Way};
use super::numbers::{self, OrderedNumbers};
use super::registers::{Avx2, Avx512, Registers};
use super::scaling::fill_apart;
use super::{ScalesView, View, digits, in_order, pairs};
use crate::simd::{Level, level};
use half::bf16;
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
pub fn way() -> Option<Way> {
    lanes().map(|lanes| Way { lanes, digits: digits::By::best(lanes) })
}

/// The dot products of all rows with some lines: `out` `(rows, lines.len())`.
///
/// # Safety
/// The machine needs the instructions of the [`Way`] that the rows are ordered for.
#[inline(always)]
pub unsafe fn dots(x: &Ordered, matrix: Lines, lines: Range<usize>, out: &mut [f32]) {
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

/// Writes the integers nearest to what codes from element `start` on stand for in multiples of `unit`, which are those of the
/// table where codes have 4 bits.
#[inline(always)]
pub(super) fn read_integers(
    view: &View,
    unit: f32,
    table: &[i16; INTEGERS],
    start: usize,
    out: &mut [i16],
) {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
    fn avx512(view: &View, table: &[i16; INTEGERS], start: usize, out: &mut [i16]) {
        // SAFETY of both: the caller has the instructions.
        let done = unsafe { in_order::read_integers(view, table, start, out) };
        if done < out.len() {
            unsafe { in_order::read::<Avx512, i16>(view, start + done, &mut out[done..]) }
        }
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
        Some(Avx512::LANES) => unsafe { avx512(&integers, table, start, out) },
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
