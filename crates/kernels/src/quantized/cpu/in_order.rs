//! The numbers of codes one after the other, in registers of several.

use super::View;
use super::lines::Registers;
use crate::quantized::Levels;

/// Bytes that the codes of a register are read with, of which they have `LANES·BITS / 8`.
const BYTES: usize = 16;

/// Writes the numbers from element `start` on.
///
/// # Safety
/// The machine needs the registers' instructions.
#[inline(always)]
pub(super) unsafe fn read<R: Registers>(view: &View, start: usize, out: &mut [f32]) {
    view.for_each_group(
        start,
        out,
        #[inline(always)]
        |element, scaling, piece| {
            // SAFETY: as promised by the caller.
            let done = unsafe { by_levels::<R>(view, element, scaling, piece) };
            if done < piece.len() {
                view.read_group(element + done, scaling, &mut piece[done..]);
            }
        },
    );
}

/// Writes as many of one group's numbers as fill registers, and says how many these are.
///
/// # Safety
/// As of [`read`].
#[inline(always)]
unsafe fn by_levels<R: Registers>(
    view: &View,
    element: usize,
    scaling: (f32, f32),
    out: &mut [f32],
) -> usize {
    macro_rules! by_registers {
        ($bits:literal, $codes:ident => $level:expr) => {
            by_registers::<R, $bits>(
                view.codes,
                element,
                scaling,
                #[inline(always)]
                |$codes| $level,
                out,
            )
        };
    }
    // SAFETY: as promised by the caller.
    unsafe {
        match view.levels {
            Levels::Table(table) => {
                let table = R::load_table(table);
                by_registers!(4, codes => R::look_up(table, codes))
            }
            Levels::E4m3 => 0,
            Levels::Integers { bits, zero } => {
                let zero = R::floats(f32::from(zero));
                macro_rules! integers {
                    ($bits:literal) => {
                        by_registers!($bits, codes => R::subtract(R::converted(codes), zero))
                    };
                }
                match bits {
                    2 => integers!(2),
                    3 => integers!(3),
                    4 => integers!(4),
                    5 => integers!(5),
                    6 => integers!(6),
                    _ => integers!(8),
                }
            }
        }
    }
}

/// As [`by_levels`], of codes of `BITS` bits that stand for `level(code)`.
///
/// # Safety
/// As of [`read`].
#[inline(always)]
unsafe fn by_registers<R: Registers, const BITS: usize>(
    codes: &[u8],
    element: usize,
    (scale, offset): (f32, f32),
    level: impl Fn(R::Words) -> R::Floats,
    out: &mut [f32],
) -> usize {
    if !(element * BITS).is_multiple_of(8) {
        return 0;
    }
    let each = R::LANES * BITS / 8;
    let bytes = &codes[element * BITS / 8..];
    let readable = match bytes.len().checked_sub(BYTES) {
        Some(last) => last / each + 1,
        None => 0,
    };
    let count = readable.min(out.len() / R::LANES);
    // SAFETY: as promised by the caller, and as many bytes and numbers are there.
    unsafe {
        let (scale, offset) = (R::floats(scale), R::floats(offset));
        for (index, out) in out.chunks_exact_mut(R::LANES).take(count).enumerate() {
            let codes = R::codes_in_order::<BITS>(bytes.as_ptr().add(index * each));
            R::store(R::add(R::multiply(level(codes), scale), offset), out.as_mut_ptr());
        }
    }
    count * R::LANES
}
