//! Matrices in fewer bits on the CPU: their numbers one after the other.

#[cfg(target_arch = "x86_64")]
mod digits;
mod few_rows;
#[cfg(target_arch = "x86_64")]
mod in_order;
#[cfg(target_arch = "x86_64")]
mod integer_lines;
mod integers;
#[cfg(target_arch = "x86_64")]
mod lines;
#[cfg(target_arch = "x86_64")]
mod numbers;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
pub(crate) mod registers;
#[cfg(target_arch = "x86_64")]
mod scaling;
#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

pub(crate) use few_rows::{Rows, add_combinations};
#[cfg(target_arch = "x86_64")]
pub(crate) use integer_lines::IntegerLines;

use super::int8::ByteRows;
use super::{BLOCK, Levels, NESTED, OPERATION, Quantized, Scales};
#[cfg(target_arch = "x86_64")]
use crate::backend::cpu::as_f32_mut;
use crate::backend::cpu::simd::{prefetch_bytes, vectorize};
use crate::backend::cpu::{
    Element, Input, PARALLEL_CHUNK, Read, Real, dispatch, for_each_chunk, unwritten,
};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::{bf16, f16};
use std::ops::Range;

/// The tensors of a matrix, made ready to be read.
pub(crate) struct Inputs<'q> {
    matrix: &'q Quantized,
    codes: Input,
    /// As [`Scales::tensors`] names them.
    scales: Vec<Input>,
}

/// The tensors of a matrix, locked for reading.
pub(crate) struct Reads<'a> {
    matrix: &'a Quantized,
    codes: Read<'a>,
    scales: Vec<Read<'a>>,
}

impl<'q> Inputs<'q> {
    pub(crate) fn new(matrix: &'q Quantized) -> Result<Self> {
        let scales = matrix.parts().into_iter().map(Input::contiguous).collect::<Result<_>>()?;
        Ok(Self { matrix, codes: Input::contiguous(&matrix.codes)?, scales })
    }

    pub(crate) fn read(&self) -> Reads<'_> {
        let scales = self.scales.iter().map(Input::read).collect();
        Reads { matrix: self.matrix, codes: self.codes.read(), scales }
    }
}

impl Reads<'_> {
    pub(crate) fn view(&self) -> Result<View<'_>> {
        let mut parts = self.scales.iter();
        let mut next = || match parts.next() {
            Some(part) => Ok(part),
            None => bail!("metal-candle-kernels: {OPERATION}: a part of the scales is missing"),
        };
        let scales = match &self.matrix.scales {
            Scales::Plain { scales, offsets } => {
                let (dtype, scales) = (scales.dtype(), next()?);
                let offsets = offsets.as_ref().map(|_| next()).transpose()?;
                match dtype {
                    DType::F32 => ScalesView::F32(
                        scales.slice()?,
                        offsets.map(Read::slice).transpose()?.unwrap_or(&[]),
                    ),
                    DType::F16 => ScalesView::F16(
                        scales.slice()?,
                        offsets.map(Read::slice).transpose()?.unwrap_or(&[]),
                    ),
                    _ => ScalesView::Bf16(
                        scales.slice()?,
                        offsets.map(Read::slice).transpose()?.unwrap_or(&[]),
                    ),
                }
            }
            Scales::E8m0(_) => ScalesView::E8m0(next()?.slice()?),
            Scales::E4m3 { overall, .. } => ScalesView::E4m3(next()?.slice()?, *overall),
            Scales::Nested { offset, .. } => ScalesView::Nested {
                codes: next()?.slice()?,
                table: next()?.slice()?,
                scales: next()?.slice()?,
                offset: *offset,
            },
            Scales::Blocks { signed, offsets, .. } => {
                let (scales, large) = (next()?.slice()?, next()?.slice()?);
                let (offsets, large_offsets): (&[u8], &[f16]) = match offsets {
                    Some(_) => (next()?.slice()?, next()?.slice()?),
                    None => (&[], &[]),
                };
                ScalesView::Blocks { scales, signed: *signed, large, offsets, large_offsets }
            }
        };
        Ok(View {
            len: self.matrix.shape.0 * self.matrix.shape.1,
            codes: self.codes.slice()?,
            levels: self.matrix.levels,
            group: self.matrix.group,
            scales,
            multiplies_integers: self.matrix.multiplies_integers(),
        })
    }
}

/// The numbers of a matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct View<'a> {
    len: usize,
    codes: &'a [u8],
    levels: Levels,
    group: usize,
    scales: ScalesView<'a>,
    /// Whether products are those of [`Arithmetic::Int8Rows`](crate::quantized::Arithmetic::Int8Rows).
    multiplies_integers: bool,
}

/// As [`Scales`]; there are no offsets where their slice is empty.
#[derive(Clone, Copy, Debug)]
enum ScalesView<'a> {
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

/// Some neighbouring numbers of a matrix.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Elements<'a> {
    view: &'a View<'a>,
    start: usize,
    len: usize,
}

impl<'a> Elements<'a> {
    pub(crate) fn len(self) -> usize {
        self.len
    }

    #[inline(always)]
    pub(crate) fn slice(self, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= self.len);
        Self { view: self.view, start: self.start + range.start, len: range.len() }
    }

    /// The bytes and scales of whole rows that are multiplied as integers.
    pub(crate) fn byte_rows(self) -> Option<ByteRows<'a>> {
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
    pub(crate) fn read<A: Real>(self, start: usize, target: &mut [A]) {
        self.view.read(self.start + start, target);
    }

    /// Writes the numbers from the one at `start` on, rounded to bf16, if there are instructions for it.
    #[inline(always)]
    pub(crate) fn read_bf16(self, start: usize, target: &mut [bf16]) -> bool {
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
    pub(crate) fn prefetch(self, start: usize, count: usize) {
        let bits = self.view.levels.bits();
        let first = self.view.codes.as_ptr().wrapping_add((self.start + start) * bits / 8);
        prefetch_bytes(first, count * bits / 8);
    }
}

impl<'a> View<'a> {
    /// All numbers.
    pub(crate) fn elements(&'a self) -> Elements<'a> {
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
    fn scale(&self, group: usize) -> (f32, f32) {
        match self.scales {
            ScalesView::F32(scales, offsets) => {
                (scales[group], offsets.get(group).copied().unwrap_or(-0.0))
            }
            ScalesView::F16(scales, offsets) => (
                f32::from_f16(scales[group]),
                offsets.get(group).map_or(-0.0, |it| f32::from_f16(*it)),
            ),
            ScalesView::Bf16(scales, offsets) => (
                f32::from_bf16(scales[group]),
                offsets.get(group).map_or(-0.0, |it| f32::from_bf16(*it)),
            ),
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
                    Some(code) => -(f32::from_f16(large_offsets[block]) * f32::from(*code)),
                    None => -0.0,
                };
                (f32::from_f16(large[block]) * code, offset)
            }
        }
    }

    /// Writes the numbers from element `start` on. Compiled once for all callers, for it is long.
    #[inline(never)]
    pub(crate) fn read<A: Real>(&self, start: usize, target: &mut [A]) {
        #[cfg(target_arch = "x86_64")]
        if let Some(target) = as_f32_mut(target)
            && x86::read(self, start, target)
        {
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
    fn for_each_group<A>(
        &self,
        start: usize,
        target: &mut [A],
        mut read: impl FnMut(usize, (f32, f32), &mut [A]),
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
    fn read_group<A: Real>(&self, element: usize, (scale, offset): (f32, f32), target: &mut [A]) {
        const PIECE: usize = 64;
        let mut levels = [0f32; PIECE];
        for (index, piece) in target.chunks_mut(PIECE).enumerate() {
            let levels = &mut levels[..piece.len()];
            self.read_levels(element + index * PIECE, levels);
            for (number, level) in piece.iter_mut().zip(levels) {
                *number = A::from_f32(*level * scale + offset);
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
pub(crate) fn e4m3(code: u8) -> f32 {
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

/// All numbers of a matrix.
pub(super) fn dequantize(matrix: &Quantized, dtype: DType) -> Result<Tensor> {
    let inputs = Inputs::new(matrix)?;
    let reads = inputs.read();
    let view = reads.view()?;
    let (outer, inner) = matrix.shape;
    require_float(dtype)?;
    dispatch!(OPERATION, dtype, T => {
        let mut out = unwritten::<T>(outer * inner);
        for_each_chunk(
            &mut out,
            PARALLEL_CHUNK,
            #[inline(always)]
            |index, out| read_as(&view, index * PARALLEL_CHUNK, out),
        );
        Tensor::from_vec(out, (outer, inner), &Device::Cpu)
    })
}

/// Whether all scales, and codes that are floats, are finite.
pub(super) fn is_finite(matrix: &Quantized) -> Result<bool> {
    let inputs = Inputs::new(matrix)?;
    let reads = inputs.read();
    let view = reads.view()?;
    let scales = (0..view.len.div_ceil(view.group)).all(|group| {
        let (scale, offset) = view.scale(group);
        scale.is_finite() && offset.is_finite()
    });
    let codes = view.levels != Levels::E4m3 || view.codes.iter().all(|code| code & 0x7f != 0x7f);
    Ok(scales && codes)
}

/// Some rows of a matrix.
pub(super) fn rows(matrix: &Quantized, ids: &Tensor, dtype: DType) -> Result<Tensor> {
    let inputs = Inputs::new(matrix)?;
    let reads = inputs.read();
    let view = reads.view()?;
    let (outer, inner) = matrix.shape;
    require_float(dtype)?;
    let shape = (ids.dim(0)?, ids.dim(1)?, inner);
    let ids = Input::contiguous(ids)?;
    let ids = ids.read();
    let ids = ids.slice::<u32>()?;
    crate::embedding::check_range(ids, outer)?;
    dispatch!(OPERATION, dtype, T => {
        let mut out = unwritten::<T>(ids.len() * inner);
        if inner > 0 {
            for_each_chunk(
                &mut out,
                inner,
                #[inline(always)]
                |row, out| read_as(&view, ids[row] as usize * inner, out),
            );
        }
        Tensor::from_vec(out, shape, &Device::Cpu)
    })
}

/// The numbers from element `start` on, rounded for storage.
#[inline(always)]
fn read_as<T: Element>(view: &View, start: usize, out: &mut [T]) {
    let mut wide = [T::Acc::ZERO; 64];
    for (index, out) in out.chunks_mut(wide.len()).enumerate() {
        let wide = &mut wide[..out.len()];
        view.read(start + index * 64, wide);
        T::narrow(wide, out);
    }
}

/// An error for a dtype that numbers of f32 aren't read as.
fn require_float(dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        other => bail!(
            "metal-candle-kernels: {OPERATION}: asked for {other:?}, expected F32, BF16 or F16"
        ),
    }
}
