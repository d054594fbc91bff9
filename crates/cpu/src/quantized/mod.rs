//! Matrices in 2 to 8 bits a number, as `metal_candle_kernels::quantized` defines them: their numbers one after the other, and
//! products of a few rows with lines of them, for which x86-64's registers are used where there are such.

#[cfg(target_arch = "x86_64")]
pub mod digits;
#[cfg(target_arch = "x86_64")]
mod in_order;
#[cfg(target_arch = "x86_64")]
mod integer_lines;
#[cfg(target_arch = "x86_64")]
pub mod lines;
#[cfg(target_arch = "x86_64")]
mod numbers;
#[cfg(target_arch = "x86_64")]
mod pairs;
mod power_of_two;
#[cfg(target_arch = "x86_64")]
pub mod registers;
#[cfg(target_arch = "x86_64")]
mod scaling;
#[cfg(target_arch = "x86_64")]
pub mod x86;

#[cfg(target_arch = "x86_64")]
pub use integer_lines::IntegerLines;
pub use power_of_two::PowerOfTwo;

use crate::floats::{bf16_to_f32, f16_to_f32};
use crate::simd::{prefetch_bytes, vectorize};
use half::{bf16, f16};
use std::ops::Range;

/// What the codes of a matrix stand for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Levels {
    /// `code - zero`.
    Integers {
        /// 2, 3, 4, 5, 6 or 8.
        bits: usize,
        /// The code of 0.
        zero: u8,
    },
    /// A number for each code of 4 bits, such as NF4.
    Table(&'static [f32; 16]),
    /// The 8-bit floats of OCP's e4m3, which have NaN (0x7f and 0xff) but no infinity.
    E4m3,
}

impl Levels {
    /// Bits of a code.
    pub fn bits(self) -> usize {
        match self {
            Self::Integers { bits, .. } => bits,
            Self::Table(_) => 4,
            Self::E4m3 => 8,
        }
    }

    /// What codes stand for that have 4 bits.
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn of_four_bits(self) -> Option<[f32; 16]> {
        match self {
            Self::Table(levels) => Some(*levels),
            Self::Integers { bits: 4, zero } => {
                let mut levels = [0.0; 16];
                for (code, level) in levels.iter_mut().enumerate() {
                    *level = code as f32 - f32::from(zero);
                }
                Some(levels)
            }
            _ => None,
        }
    }
}

/// Groups that share one scale of [`ScalesView::Nested`].
pub const NESTED: usize = 256;

/// Elements that share one scale of [`ScalesView::Blocks`].
pub const BLOCK: usize = 256;

/// The numbers of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    pub len: usize,
    pub codes: &'a [u8],
    pub levels: Levels,
    pub group: usize,
    pub scales: ScalesView<'a>,
    /// Whether products are those of `Int8Rows`.
    pub multiplies_integers: bool,
}

/// The scales of groups, as `metal_candle_kernels::quantized::Scales`; there are no offsets where their slice is empty.
#[derive(Clone, Copy, Debug)]
pub enum ScalesView<'a> {
    F32(&'a [f32], &'a [f32]),
    F16(&'a [f16], &'a [f16]),
    Bf16(&'a [bf16], &'a [bf16]),
    E8m0(&'a [u8]),
    E4m3(&'a [u8], f32),
    Nested {
        codes: &'a [u8],
        table: &'a [f32],
        scales: &'a [f32],
        offset: f32,
    },
    Blocks {
        scales: &'a [u8],
        signed: bool,
        large: &'a [f16],
        offsets: &'a [u8],
        large_offsets: &'a [f16],
    },
}

/// A matrix `(outer, inner)` of bytes with a scale a row: `(code - 128)·scale`.
#[derive(Clone, Copy)]
pub struct ByteRows<'a> {
    /// `(outer, inner)`
    pub codes: &'a [u8],
    /// `(outer)`
    pub scales: &'a [f32],
    /// Codes of a row.
    pub inner: usize,
}

/// Some neighbouring numbers of a matrix.
#[derive(Clone, Copy, Debug)]
pub struct Elements<'a> {
    view: &'a View<'a>,
    start: usize,
    len: usize,
}

impl<'a> Elements<'a> {
    /// How many they are.
    pub fn count(self) -> usize {
        self.len
    }

    #[inline(always)]
    pub fn slice(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len);
        Self { view: self.view, start: self.start + range.start, len: range.len() }
    }

    /// The bytes and scales of whole rows that are multiplied as integers.
    pub fn byte_rows(self) -> Option<ByteRows<'a>> {
        let ScalesView::F32(scales, _) = self.view.scales else { return None };
        let inner = self.view.group;
        if !self.view.multiplies_integers || !self.start.is_multiple_of(inner) {
            return None;
        }
        let codes = self.view.codes.get(self.start..self.start + self.len)?;
        let scales = scales.get(self.start / inner..(self.start + self.len).div_ceil(inner))?;
        Some(ByteRows { codes, scales, inner })
    }

    /// Writes the numbers from the one at `start` on.
    #[inline(always)]
    pub fn read(self, start: usize, target: &mut [f32]) {
        self.view.read(self.start + start, target);
    }

    /// Writes the numbers from the one at `start` on, rounded to bf16, if there are instructions for it.
    #[inline(always)]
    pub fn read_bf16(self, start: usize, target: &mut [bf16]) -> bool {
        #[cfg(target_arch = "x86_64")]
        return x86::read_bf16(self.view, self.start + start, target);
        #[cfg(not(target_arch = "x86_64"))]
        {
            let _ = (start, target);
            false
        }
    }

    /// Asks for the codes of a range, which may be beyond the end, ahead of their use.
    #[inline(always)]
    pub fn prefetch(self, start: usize, count: usize) {
        let bits = self.view.levels.bits();
        let first = self.view.codes.as_ptr().wrapping_add((self.start + start) * bits / 8);
        prefetch_bytes(first, count * bits / 8);
    }
}

impl<'a> View<'a> {
    /// All numbers.
    pub fn elements(&'a self) -> Elements<'a> {
        Elements { view: self, start: 0, len: self.len }
    }

    /// Asks for the scales and offsets of some groups, which may be beyond the end, ahead of their use.
    #[cfg(target_arch = "x86_64")]
    #[inline(never)]
    fn prefetch_scales(&self, first: usize, count: usize) {
        #[inline(always)]
        fn ask_for<S>(scales: &[S], first: usize, count: usize) {
            let start = scales.as_ptr().wrapping_add(first).cast();
            prefetch_bytes(start, count * size_of::<S>());
        }
        #[inline(always)]
        fn ask_for_both<S>(scales: &[S], offsets: &[S], first: usize, count: usize) {
            ask_for(scales, first, count);
            if !offsets.is_empty() {
                ask_for(offsets, first, count);
            }
        }
        match self.scales {
            ScalesView::F32(scales, offsets) => ask_for_both(scales, offsets, first, count),
            ScalesView::F16(scales, offsets) => ask_for_both(scales, offsets, first, count),
            ScalesView::Bf16(scales, offsets) => ask_for_both(scales, offsets, first, count),
            ScalesView::E8m0(scales) | ScalesView::E4m3(scales, _) => ask_for(scales, first, count),
            ScalesView::Nested { codes, .. } => ask_for(codes, first, count),
            ScalesView::Blocks { scales, offsets, large, large_offsets, .. } => {
                ask_for_both(scales, offsets, first, count);
                let of_block = BLOCK / self.group;
                ask_for_both(large, large_offsets, first / of_block, count / of_block);
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    fn has_offsets(&self) -> bool {
        match self.scales {
            ScalesView::F32(_, offsets) => !offsets.is_empty(),
            ScalesView::F16(_, offsets) => !offsets.is_empty(),
            ScalesView::Bf16(_, offsets) => !offsets.is_empty(),
            ScalesView::Blocks { offsets, .. } => !offsets.is_empty(),
            _ => false,
        }
    }

    /// The scale and the offset of a group: -0 where there is none, which changes nothing that it is added to, not
    /// even another -0.
    #[inline(always)]
    pub fn scale(&self, group: usize) -> (f32, f32) {
        match self.scales {
            ScalesView::F32(scales, offsets) => {
                (scales[group], offsets.get(group).copied().unwrap_or(-0.0))
            }
            ScalesView::F16(scales, offsets) => {
                (f16_to_f32(scales[group]), offsets.get(group).map_or(-0.0, |it| f16_to_f32(*it)))
            }
            ScalesView::Bf16(scales, offsets) => {
                (bf16_to_f32(scales[group]), offsets.get(group).map_or(-0.0, |it| bf16_to_f32(*it)))
            }
            ScalesView::E8m0(scales) => (e8m0(scales[group]), -0.0),
            ScalesView::E4m3(scales, overall) => (e4m3(scales[group]) * overall, -0.0),
            ScalesView::Nested { codes, table, scales, offset } => {
                (table[usize::from(codes[group])] * scales[group / NESTED] + offset, -0.0)
            }
            ScalesView::Blocks { scales, signed, large, offsets, large_offsets } => {
                let block = group * self.group / BLOCK;
                let code = match signed {
                    true => f32::from(scales[group] as i8),
                    false => f32::from(scales[group]),
                };
                let offset = match offsets.get(group) {
                    Some(code) => -(f16_to_f32(large_offsets[block]) * f32::from(*code)),
                    None => -0.0,
                };
                (f16_to_f32(large[block]) * code, offset)
            }
        }
    }

    /// Writes the numbers from element `start` on. Compiled once for all callers, for it is long.
    #[inline(never)]
    pub fn read(&self, start: usize, target: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        if x86::read(self, start, target) {
            return;
        }
        vectorize(
            #[inline(always)]
            || {
                self.for_each_group(
                    start,
                    target,
                    #[inline(always)]
                    |element, scaling, piece| self.read_group(element, scaling, piece),
                );
            },
        );
    }

    /// Whether scales of blocks, if there are such, can be made a register at a time.
    #[cfg(target_arch = "x86_64")]
    fn blocks_fill_registers(&self) -> bool {
        !matches!(self.scales, ScalesView::Blocks { .. }) || (16..=BLOCK).contains(&self.group)
    }

    /// Lanes of the registers that numbers are read with, if they are.
    #[cfg(target_arch = "x86_64")]
    fn registers(&self) -> Option<usize> {
        x86::lanes().filter(|_| self.blocks_fill_registers() && self.levels != Levels::E4m3)
    }

    /// Writes a few numbers of one group.
    #[cfg(target_arch = "x86_64")]
    #[cold]
    #[inline(never)]
    fn read_rest<T>(
        &self,
        element: usize,
        scaling: (f32, f32),
        target: &mut [T],
        narrow: impl Fn(&[f32], &mut [T]),
    ) {
        const PIECE: usize = 64;
        let mut wide = [0f32; PIECE];
        for (index, target) in target.chunks_mut(PIECE).enumerate() {
            let wide = &mut wide[..target.len()];
            self.read_group(element + index * PIECE, scaling, wide);
            narrow(wide, target);
        }
    }

    /// Calls `read(element, (scale, offset), piece)` for what each group has of the numbers from element `start` on.
    #[inline(always)]
    fn for_each_group(
        &self,
        start: usize,
        target: &mut [f32],
        mut read: impl FnMut(usize, (f32, f32), &mut [f32]),
    ) {
        let (mut element, mut rest) = (start, target);
        while !rest.is_empty() {
            let group = element / self.group;
            let count = ((group + 1) * self.group - element).min(rest.len());
            let (piece, after) = std::mem::take(&mut rest).split_at_mut(count);
            read(element, self.scale(group), piece);
            (element, rest) = (element + count, after);
        }
    }

    /// Writes numbers of one group.
    #[inline(always)]
    fn read_group(&self, element: usize, (scale, offset): (f32, f32), target: &mut [f32]) {
        const PIECE: usize = 64;
        let mut levels = [0f32; PIECE];
        for (index, piece) in target.chunks_mut(PIECE).enumerate() {
            let levels = &mut levels[..piece.len()];
            self.read_levels(element + index * PIECE, levels);
            for (number, level) in piece.iter_mut().zip(levels) {
                *number = *level * scale + offset;
            }
        }
    }

    /// What the codes from element `start` on stand for.
    #[inline(always)]
    fn read_levels(&self, start: usize, out: &mut [f32]) {
        match self.levels {
            Levels::Table(table) => {
                unpack::<4>(self.codes, start, out, |code| table[code as usize])
            }
            Levels::E4m3 => unpack::<8>(self.codes, start, out, |code| e4m3(code as u8)),
            Levels::Integers { bits, zero } => {
                let level = |code: u32| (code as i32 - i32::from(zero)) as f32;
                match bits {
                    2 => unpack::<2>(self.codes, start, out, level),
                    3 => unpack::<3>(self.codes, start, out, level),
                    4 => unpack::<4>(self.codes, start, out, level),
                    5 => unpack::<5>(self.codes, start, out, level),
                    6 => unpack::<6>(self.codes, start, out, level),
                    _ => unpack::<8>(self.codes, start, out, level),
                }
            }
        }
    }
}

/// What the codes of `BITS` bits from code `start` on stand for.
#[inline(always)]
fn unpack<const BITS: usize>(
    codes: &[u8],
    start: usize,
    out: &mut [f32],
    level: impl Fn(u32) -> f32,
) {
    let mask = (1 << BITS) - 1;
    let single = |code: usize| {
        let bit = code * BITS;
        let low = u32::from(codes[bit / 8]);
        let high = codes.get(bit / 8 + 1).copied().map_or(0, u32::from);
        level((low | high << 8) >> (bit % 8) & mask)
    };
    let head = (start.next_multiple_of(8) - start).min(out.len());
    let (first, whole) = out.split_at_mut(head);
    for (index, out) in first.iter_mut().enumerate() {
        *out = single(start + index);
    }
    let start = start + head;
    let mut eights = whole.chunks_exact_mut(8);
    let bytes = codes[start / 8 * BITS..].chunks_exact(BITS);
    let mut done = 0;
    for (out, bytes) in (&mut eights).zip(bytes) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        for (index, out) in out.iter_mut().enumerate() {
            *out = level((word >> (index * BITS)) as u32 & mask);
        }
        done += 8;
    }
    for (index, out) in eights.into_remainder().iter_mut().enumerate() {
        *out = single(start + done + index);
    }
}

/// The number of an 8-bit float with 4 bits of exponent and 3 of mantissa.
#[inline(always)]
pub fn e4m3(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7f);
    // The bits where an f32 has them, whose exponent counts from 127 and not from 7.
    let number = f32::from_bits(magnitude << 20) * 2f32.powi(120);
    let number = if magnitude == 0x7f { f32::NAN } else { number };
    f32::from_bits(number.to_bits() | u32::from(code & 0x80) << 24)
}

/// `2^(code - 127)`, NaN for 255.
#[inline(always)]
fn e8m0(code: u8) -> f32 {
    match code {
        0 => f32::from_bits(1 << 22),
        255 => f32::NAN,
        code => f32::from_bits(u32::from(code) << 23),
    }
}
