//! Scales and offsets of groups in registers: of lines that are multiplied by rows, and of numbers that are read.

use super::lines::filled_up;
use super::registers::{MOST_LANES, Registers};
use super::{BLOCK, NESTED, ScalesView, View, e4m3, e8m0};
use crate::floats::bf16_to_f32;
use crate::simd::prefetch;
use half::f16;

/// Scales and offsets of some lines' groups, which are counted from the first line's first on.
pub(super) trait Scaling<R: Registers>: Copy {
    /// Before those of a line of `groups` are read, of which this is the first.
    #[inline(always)]
    fn begin_line(&self, _first: usize, _groups: usize) {}

    /// The scales of as many groups as lanes from `group` on. What is beyond the last one has no meaning.
    ///
    /// # Safety
    /// As of [`Registers`], and there has to be such a group.
    unsafe fn scales(&self, group: usize) -> R::Floats;

    /// Their offsets, where the matrix has them.
    ///
    /// # Safety
    /// As of [`Self::scales`].
    unsafe fn offsets(&self, group: usize) -> R::Floats;
}

/// As [`fill`] made them, with room for a register behind them.
#[derive(Clone, Copy)]
pub(super) struct Ready<'a> {
    pub scales: &'a [f32],
    pub offsets: &'a [f32],
    pub view: &'a View<'a>,
    /// From which group on those are that will be made ready next.
    pub next: usize,
}

impl<R: Registers> Scaling<R> for Ready<'_> {
    #[inline(always)]
    fn begin_line(&self, first: usize, groups: usize) {
        self.view.prefetch_scales(self.next + first, groups);
    }

    #[inline(always)]
    unsafe fn scales(&self, group: usize) -> R::Floats {
        // SAFETY: as promised by the caller.
        unsafe { R::load(self.scales.as_ptr().add(group)) }
    }

    #[inline(always)]
    unsafe fn offsets(&self, group: usize) -> R::Floats {
        // SAFETY: as promised by the caller.
        unsafe { R::load(self.offsets.as_ptr().add(group)) }
    }
}

/// As they are stored in f16, of lines of which [`Lines::with_scales_in_place`] says that they can be read so.
#[derive(Clone, Copy)]
pub(super) struct Halves<'a> {
    pub scales: &'a [f16],
    pub offsets: &'a [f16],
    /// The first line's first group.
    pub first: usize,
    /// Of how many groups ahead they are asked for.
    pub ahead: usize,
}

impl Halves<'_> {
    /// # Safety
    /// As of [`Scaling::scales`].
    #[inline(always)]
    unsafe fn read<R: Registers>(&self, numbers: &[f16], group: usize) -> R::Floats {
        let group = self.first + group;
        debug_assert!(group + R::LANES <= numbers.len());
        let from = numbers.as_ptr().wrapping_add(group);
        prefetch(from.wrapping_add(self.ahead).cast::<u8>());
        // SAFETY: as promised by the caller.
        unsafe { R::halves(from) }
    }
}

impl<R: Registers> Scaling<R> for Halves<'_> {
    #[inline(always)]
    unsafe fn scales(&self, group: usize) -> R::Floats {
        // SAFETY: as promised by the caller.
        unsafe { self.read::<R>(self.scales, group) }
    }

    #[inline(always)]
    unsafe fn offsets(&self, group: usize) -> R::Floats {
        // SAFETY: as promised by the caller.
        unsafe { self.read::<R>(self.offsets, group) }
    }
}

/// As they are stored for blocks, of lines of which [`Lines::with_scales_in_place`] says that they can be read so.
pub(super) struct OfBlocks<'a, R: Registers> {
    scales: (&'a [u8], &'a [f16]),
    signed: bool,
    offsets: (&'a [u8], &'a [f16]),
    /// The first line's first group.
    first: usize,
    /// Of how many groups ahead they are asked for.
    ahead: usize,
    /// `log2` of the groups of a block.
    shift: u32,
    /// In which block each lane's group is, counted from the first lane's.
    blocks: R::Words,
}

// Not derived, for `R` needn't be.
impl<R: Registers> Copy for OfBlocks<'_, R> {}

impl<R: Registers> Clone for OfBlocks<'_, R> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<'a, R: Registers> OfBlocks<'a, R> {
    /// From group `first` on, where `group` elements have a scale.
    ///
    /// # Safety
    /// As of [`Registers`].
    #[inline(always)]
    pub(super) unsafe fn new(
        (scales, signed): ((&'a [u8], &'a [f16]), bool),
        offsets: (&'a [u8], &'a [f16]),
        (first, ahead): (usize, usize),
        group: usize,
    ) -> Self {
        let shift = groups_of_block(group).trailing_zeros();
        // SAFETY: as promised by the caller; there is a number for every lane.
        let blocks = unsafe { R::shift_right(R::load_words(COUNTED.as_ptr()), shift) };
        OfBlocks { scales, signed, offsets, first, ahead, shift, blocks }
    }

    /// # Safety
    /// As of [`Scaling::scales`].
    #[inline(always)]
    unsafe fn read(
        &self,
        (codes, large): (&[u8], &[f16]),
        signed: bool,
        group: usize,
    ) -> R::Floats {
        let group = self.first + group;
        let block = group >> self.shift;
        debug_assert!(group + R::LANES <= codes.len() && block + R::LANES <= large.len());
        let (codes, large) =
            (codes.as_ptr().wrapping_add(group), large.as_ptr().wrapping_add(block));
        prefetch(codes.wrapping_add(self.ahead));
        prefetch(large.wrapping_add(self.ahead >> self.shift).cast::<u8>());
        // SAFETY: as promised by the caller.
        unsafe { of_blocks::<R>(codes, signed, large, self.blocks) }
    }
}

/// `large[block]·code` for the block of each lane.
///
/// # Safety
/// As of [`Registers`], with as many codes and scales of blocks as lanes.
#[inline(always)]
unsafe fn of_blocks<R: Registers>(
    codes: *const u8,
    signed: bool,
    large: *const f16,
    blocks: R::Words,
) -> R::Floats {
    // SAFETY: as promised by the caller.
    unsafe { R::multiply(R::permute(R::halves(large), blocks), R::bytes(codes, signed)) }
}

impl<R: Registers> Scaling<R> for OfBlocks<'_, R> {
    #[inline(always)]
    unsafe fn scales(&self, group: usize) -> R::Floats {
        // SAFETY: as promised by the caller.
        unsafe { self.read(self.scales, self.signed, group) }
    }

    #[inline(always)]
    unsafe fn offsets(&self, group: usize) -> R::Floats {
        // SAFETY: as promised by the caller.
        unsafe { R::multiply(self.read(self.offsets, false, group), R::floats(-1.0)) }
    }
}

/// As [`fill`], by a function of its own.
///
/// # Safety
/// As of [`fill`].
pub(super) unsafe fn fill_apart<R: Registers>(
    view: &View,
    first: usize,
    scales: &mut [f32],
    offsets: &mut [f32],
) {
    // SAFETY: as promised by the caller.
    unsafe {
        R::call(
            #[inline(always)]
            || fill::<R>(view, first, scales, offsets),
        );
    }
}

/// Scales and, where the matrix has them and they are asked for, offsets from group `first` on, in whole registers:
/// what is beyond the last group is zero or has no meaning.
///
/// # Safety
/// As of [`Registers`].
#[inline(always)]
pub(super) unsafe fn fill<R: Registers>(
    view: &View,
    first: usize,
    scales: &mut [f32],
    offsets: &mut [f32],
) {
    match view.scales {
        ScalesView::F32(from, added) => {
            convert(
                &from[first..],
                scales,
                #[inline(always)]
                |it| it,
            );
            if !offsets.is_empty() {
                convert(
                    &added[first..],
                    offsets,
                    #[inline(always)]
                    |it| it,
                );
            }
        }
        ScalesView::F16(from, added) => {
            // SAFETY: as promised by the caller.
            unsafe { convert_halves::<R>(&from[first..], scales) };
            if !offsets.is_empty() {
                // SAFETY: as above.
                unsafe { convert_halves::<R>(&added[first..], offsets) };
            }
        }
        ScalesView::Bf16(from, added) => {
            convert(&from[first..], scales, bf16_to_f32);
            if !offsets.is_empty() {
                convert(&added[first..], offsets, bf16_to_f32);
            }
        }
        ScalesView::E8m0(from) => convert(&from[first..], scales, e8m0),
        ScalesView::E4m3(from, overall) => {
            convert(
                &from[first..],
                scales,
                #[inline(always)]
                |it| e4m3(it) * overall,
            );
        }
        ScalesView::Nested { codes, table, scales: outer, offset } => {
            let codes = &codes[first..];
            let mut done = 0;
            while done < codes.len().min(scales.len()) {
                let group = first + done;
                let count = (NESTED - group % NESTED).min(scales.len() - done);
                let outer = outer[group / NESTED];
                convert(
                    &codes[done..],
                    &mut scales[done..done + count],
                    #[inline(always)]
                    |code| table[usize::from(code)] * outer + offset,
                );
                done += count;
            }
        }
        ScalesView::Blocks { scales: codes, signed, large, offsets: added, large_offsets } => {
            // SAFETY: as promised by the caller.
            unsafe { fill_blocks::<R>(view.group, first, codes, signed, large, 1.0, scales) };
            if !offsets.is_empty() {
                let large = large_offsets;
                // SAFETY: as above.
                unsafe { fill_blocks::<R>(view.group, first, added, false, large, -1.0, offsets) };
            }
        }
    }
}

/// `to = number(from)`, and zeros where there are no more.
#[inline(always)]
fn convert<T: Copy>(from: &[T], to: &mut [f32], number: impl Fn(T) -> f32) {
    let (to, beyond) = to.split_at_mut(to.len().min(from.len()));
    for (to, from) in to.iter_mut().zip(from) {
        *to = number(*from);
    }
    beyond.fill(0.0);
}

/// # Safety
/// As of [`Registers`].
#[inline(always)]
unsafe fn convert_halves<R: Registers>(from: &[f16], to: &mut [f32]) {
    for (index, to) in to.chunks_exact_mut(R::LANES).enumerate() {
        let mut room = None;
        let from = register_of(from, index * R::LANES, &mut room);
        // SAFETY: there are as many numbers as lanes.
        unsafe { R::store(R::halves(from.as_ptr()), to.as_mut_ptr()) };
    }
}

/// The numbers from 0 on.
const COUNTED: [u32; 2 * MOST_LANES] = {
    let mut counted = [0; 2 * MOST_LANES];
    let mut lane = 0;
    while lane < counted.len() {
        counted[lane] = lane as u32;
        lane += 1;
    }
    counted
};

/// Groups that share a scale of [`ScalesView::Blocks`].
pub(super) fn groups_of_block(group: usize) -> usize {
    BLOCK / group
}

/// `to = sign·(large[block]·code)` from group `first` on.
///
/// # Safety
/// As of [`Registers`].
#[inline(always)]
unsafe fn fill_blocks<R: Registers>(
    group: usize,
    first: usize,
    codes: &[u8],
    signed: bool,
    large: &[f16],
    sign: f32,
    to: &mut [f32],
) {
    // At most as many groups as lanes, each of which belongs to one of as many blocks.
    let groups = groups_of_block(group);
    let shift = groups.trailing_zeros();
    for (index, to) in to.chunks_exact_mut(R::LANES).enumerate() {
        let first = first + index * R::LANES;
        let (mut room, mut large_room) = (None, None);
        let codes = register_of(codes, first, &mut room);
        let large = register_of(large, first >> shift, &mut large_room);
        let counted = &COUNTED[first & (groups - 1)..][..MOST_LANES];
        // SAFETY: there are as many numbers as lanes.
        unsafe {
            let blocks = R::shift_right(R::load_words(counted.as_ptr()), shift);
            let scale = of_blocks::<R>(codes.as_ptr(), signed, large.as_ptr(), blocks);
            R::store(R::multiply(scale, R::floats(sign)), to.as_mut_ptr());
        }
    }
}

/// The numbers of a register from `start` on; by way of `room`, with zeros at the end, where there aren't so many.
#[inline(always)]
fn register_of<'a, T: Copy + Default>(
    from: &'a [T],
    start: usize,
    room: &'a mut Option<[T; MOST_LANES]>,
) -> &'a [T; MOST_LANES] {
    let from = from.get(start..).unwrap_or(&[]);
    match from.first_chunk() {
        Some(whole) => whole,
        None => room.insert(filled_up(from)),
    }
}
