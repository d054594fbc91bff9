//! Products by AMX's tiles: registers of 16 rows of 64 bytes. Their instructions have no stable intrinsics.

use super::kernels::{Lines, PANEL, Panel, STRIDE};
use super::pack::{SQUARE, transpose_square};
use half::bf16;
use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

/// bf16 numbers of a tile's row, and bytes.
const NUMBERS: usize = 32;
const BYTES: usize = 64;
/// Words of a tile.
const SQUARE_WORDS: usize = SQUARE * SQUARE;

/// The shapes of the tile registers: 16 rows of 64 bytes each.
#[repr(C, align(64))]
struct TileConfig {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_in_row: [u16; 16],
    rows: [u8; 16],
}

impl TileConfig {
    /// Of whole tiles, but for those whose rows are `above` and `below` lines: the sums of the two halves of a block, and
    /// the lines.
    const fn new(above: u8, below: u8) -> Self {
        TileConfig {
            palette: 1,
            start_row: 0,
            reserved: [0; 14],
            bytes_in_row: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
            rows: [above, above, below, below, above, below, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
        }
    }

    /// # Safety
    /// The machine must have tiles that this process may use.
    unsafe fn load(&self) {
        // SAFETY: the tile registers belong to this thread alone.
        unsafe { asm!("ldtilecfg [{}]", in(reg) self, options(nostack, readonly)) };
    }
}

static WHOLE: TileConfig = TileConfig::new(16, 16);

/// A thread whose tile registers have their shapes, for as long as this lives.
pub(super) struct Configured(());

impl Configured {
    /// # Safety
    /// As [`TileConfig::load`].
    pub(super) unsafe fn new() -> Self {
        // SAFETY: as promised by the caller.
        unsafe { WHOLE.load() };
        Configured(())
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        // SAFETY: as in `new`; the tile registers belong to this thread alone.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Sets the four tiles of sums to zero.
///
/// # Safety
/// The thread's tile registers must have their shapes.
#[inline(always)]
unsafe fn zero_sums() {
    // SAFETY: as promised by the caller.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack, nomem)
        );
    }
}

/// Blocks of 32 by 32 in four tiles, by an instruction that multiplies words of a left side with those of a right
/// one.
macro_rules! by_tiles {
    ($name:ident, $number:ty, $multiply:literal) => {
        /// # Safety
        /// As [`Panel::multiply`].
        pub(super) unsafe fn $name(panel: Panel<$number>) {
            let Panel { words, rows, lhs, rhs, sums, stride, first } = panel;
            // SAFETY: the tile registers belong to this thread alone; the caller promised the memory.
            unsafe {
                for row in (0..rows).step_by(32) {
                    let (lhs, sums) = (lhs.add(row * STRIDE), sums.add(row * stride));
                    let sums_below = sums.add(16 * stride);
                    if first {
                        zero_sums();
                    } else {
                        asm!(
                            "tileloadd tmm0, [{top} + {stride}*1]",
                            "tileloadd tmm1, [{top} + {stride}*1 + 64]",
                            "tileloadd tmm2, [{below} + {stride}*1]",
                            "tileloadd tmm3, [{below} + {stride}*1 + 64]",
                            top = in(reg) sums,
                            below = in(reg) sums_below,
                            stride = in(reg) stride * 4,
                            options(nostack, readonly)
                        );
                    }
                    asm!(
                        "2:",
                        "tileloadd tmm6, [{rhs} + {rhs_stride}*1]",
                        "tileloadd tmm4, [{top} + {lhs_stride}*1]",
                        "tileloadd tmm7, [{rhs} + {rhs_stride}*1 + 64]",
                        "tileloadd tmm5, [{below} + {lhs_stride}*1]",
                        concat!($multiply, " tmm0, tmm4, tmm6"),
                        concat!($multiply, " tmm1, tmm4, tmm7"),
                        concat!($multiply, " tmm2, tmm5, tmm6"),
                        concat!($multiply, " tmm3, tmm5, tmm7"),
                        "add {top}, 64",
                        "add {below}, 64",
                        "add {rhs}, 2048",
                        "dec {steps}",
                        "jnz 2b",
                        top = inout(reg) lhs => _,
                        below = inout(reg) lhs.add(16 * STRIDE) => _,
                        rhs = inout(reg) rhs => _,
                        steps = inout(reg) words / 16 => _,
                        lhs_stride = in(reg) STRIDE * 4,
                        rhs_stride = in(reg) PANEL * 4,
                        options(nostack, readonly)
                    );
                    asm!(
                        "tilestored [{top} + {stride}*1], tmm0",
                        "tilestored [{top} + {stride}*1 + 64], tmm1",
                        "tilestored [{below} + {stride}*1], tmm2",
                        "tilestored [{below} + {stride}*1 + 64], tmm3",
                        top = in(reg) sums,
                        below = in(reg) sums_below,
                        stride = in(reg) stride * 4,
                        options(nostack)
                    );
                }
            }
        }
    };
}

by_tiles!(numbers, f32, "tdpbf16ps");
// Bytes with a sign on the left, without one on the right, and sums of 32 bits.
by_tiles!(bytes, i32, "tdpbsud");

/// Lines as they are stored, in two tiles, by one or two squares.
///
/// # Safety
/// As [`Lines::multiply`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) unsafe fn lines(all: Lines) {
    const BOTH: usize = 2 * SQUARE;
    // SAFETY: as promised by the caller.
    unsafe {
        let _configured = Configured::new();
        for column in (0..all.columns).step_by(BOTH) {
            let count = (all.columns - column).min(BOTH);
            // Where the second tile has no lines, it has those of the first once more.
            let above = count.min(SQUARE);
            let (second, below) =
                if count > SQUARE { (SQUARE, count - SQUARE) } else { (0, above) };
            if count < BOTH {
                TileConfig::new(above as u8, below as u8).load();
            }
            if all.rows <= SQUARE {
                block_of_lines::<false>(all, [column, column + second], [above, below]);
            } else {
                block_of_lines::<true>(all, [column, column + second], [above, below]);
            }
        }
    }
}

/// The lines from two columns on, in tiles 4 and 5, by the squares in tiles 6 and, where there are `TWO`, 7.
#[inline(always)]
unsafe fn block_of_lines<const TWO: bool>(all: Lines, columns: [usize; 2], counts: [usize; 2]) {
    let squares = if TWO { 2 } else { 1 };
    let whole = all.numbers / NUMBERS;
    let mut turned = Turned([0.0; SQUARE_WORDS]);
    let turned = turned.0.as_mut_ptr();
    // SAFETY: as promised by the caller of `Lines::multiply`; sums have spare rows and whole panels.
    unsafe {
        let sums =
            |half: usize, square: usize| all.sums.add(square * SQUARE * all.stride + columns[half]);
        zero_sums();
        if !all.first {
            macro_rules! load {
                ($tile:literal, $half:literal, $square:literal) => {
                    let source = sums($half, $square).cast();
                    transpose_square(source, 4 * all.stride, turned, SQUARE);
                    asm!(
                        concat!("tileloadd tmm", $tile, ", [{0} + {1}*1]"),
                        in(reg) turned,
                        in(reg) BYTES,
                        options(nostack, readonly)
                    );
                };
            }
            load!(0, 0, 0);
            load!(2, 1, 0);
            if TWO {
                load!(1, 0, 1);
                load!(3, 1, 1);
            }
        }
        let lines = columns.map(|column| all.rhs.add(column * all.line));
        let mut ahead = lines[0].wrapping_add(2 * SQUARE * all.line).cast::<i8>();
        for step in 0..whole {
            // What the next block reads comes beside the work of this one, in the order in which it lies.
            for line in 0..2 * SQUARE {
                _mm_prefetch::<_MM_HINT_T1>(ahead.wrapping_add(line * BYTES));
            }
            ahead = ahead.wrapping_add(2 * SQUARE * BYTES);
            let parts = lines.map(|line| line.add(step * NUMBERS));
            add_tiles::<TWO>(parts, 2 * all.line, all.lhs.add(step * squares * SQUARE_WORDS));
        }
        let rest = all.numbers % NUMBERS;
        if rest > 0 {
            let mut padded = [Padded([bf16::ZERO; SQUARE * NUMBERS]); 2];
            for ((padded, line), count) in padded.iter_mut().zip(lines).zip(counts) {
                for (index, to) in padded.0.chunks_exact_mut(NUMBERS).take(count).enumerate() {
                    let from = line.add(index * all.line + whole * NUMBERS);
                    to[..rest].copy_from_slice(std::slice::from_raw_parts(from, rest));
                }
            }
            let [first, second] = &padded;
            let lhs = all.lhs.add(whole * squares * SQUARE_WORDS);
            add_tiles::<TWO>([first.0.as_ptr(), second.0.as_ptr()], BYTES, lhs);
        }
        macro_rules! store {
            ($tile:literal, $half:literal, $square:literal) => {
                asm!(
                    concat!("tilestored [{0} + {1}*1], tmm", $tile),
                    in(reg) turned,
                    in(reg) BYTES,
                    options(nostack)
                );
                transpose_square(turned.cast(), BYTES, sums($half, $square), all.stride);
            };
        }
        store!(0, 0, 0);
        store!(2, 1, 0);
        if TWO {
            store!(1, 0, 1);
            store!(3, 1, 1);
        }
    }
}

/// Sums of lines and rows, before they are those of rows and lines.
#[repr(align(64))]
struct Turned([f32; SQUARE_WORDS]);

/// The ends of lines, with zeros beyond them.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Padded([bf16; SQUARE * NUMBERS]);

/// Adds the products of two tiles of lines, so many bytes apart, and one or two squares.
#[inline(always)]
unsafe fn add_tiles<const TWO: bool>(lines: [*const bf16; 2], line: usize, squares: *const f32) {
    // SAFETY: as promised by the caller of `block_of_lines`.
    unsafe {
        asm!(
            "tileloadd tmm6, [{squares} + {bytes}*1]",
            "tileloadd tmm4, [{above} + {line}*1]",
            "tileloadd tmm5, [{below} + {line}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm2, tmm5, tmm6",
            squares = in(reg) squares,
            bytes = in(reg) BYTES,
            above = in(reg) lines[0],
            below = in(reg) lines[1],
            line = in(reg) line,
            options(nostack, readonly)
        );
        if TWO {
            asm!(
                "tileloadd tmm7, [{square} + {bytes}*1]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm3, tmm5, tmm7",
                square = in(reg) squares.add(SQUARE_WORDS),
                bytes = in(reg) BYTES,
                options(nostack, readonly)
            );
        }
    }
}
