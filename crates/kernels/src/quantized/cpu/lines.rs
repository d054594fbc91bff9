//! Dot products of a few rows with lines of codes, in registers of several numbers.
//!
//! Lines are read in pieces of four codes for each lane of a register (`pairs.rs` and `digits.rs` have eight, too): lane `l`
//! of field `k` is element `4·l + k` of its piece, so that a register of codes, shifted, has all fields in turn. [`Ordered`]
//! has the rows in the same order. Groups of 16 elements or more are whole lanes, so one multiplication scales a piece:
//!
//! ```text
//! total[l] += scale[group of l] · Σ_k level(code[4·l + k]) · x[4·l + k]
//! ```
//!
//! What groups' offsets add is `Σ offset · Σ x`, with the second sum computed once for all lines.

use super::digits::{By, OrderedDigits};
use super::pairs::{self, OrderedPairs};
use super::{Elements, ScalesView, View, e4m3, e8m0};
use crate::backend::cpu::scratch::Scratch;
use crate::backend::cpu::simd::prefetch;
use crate::matmul::few_rows::{FEW_ROWS, sum_lanes};
use crate::quantized::{BLOCK, Levels, NESTED};
use half::{bf16, f16};
use std::ops::Range;

/// Codes of a lane.
const FIELDS: usize = 4;

/// Lanes of a register at most.
pub(super) const MOST_LANES: usize = 16;

/// Bytes of a piece of codes at most.
const MOST_BYTES: usize = 4 * MOST_LANES;

/// Bytes ahead that codes are asked for: what memory takes longer for than the processor looks ahead.
const AHEAD: usize = 8192;

/// Scales and as many offsets that are made ready at a time, or those of a line where it has more.
const READY: usize = 2048;

/// Registers whose lanes are summed together.
pub(super) const SUMMED: usize = 4;

/// Pieces whose scales are read together: those of a register, where a lane has a quarter of a group.
const TOGETHER: usize = 4;

/// What the codes are, as a constant for the compiler.
const INTEGERS: u8 = 0;
const TABLE: u8 = 1;
const E4M3: u8 = 2;

/// Registers of 32-bit lanes.
///
/// # Safety
/// The machine needs the instructions; pointers need as many numbers behind them as are read or written.
pub(super) trait Registers {
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

/// How the lines of a matrix lie.
#[derive(Clone, Copy)]
pub(super) struct Lines<'a> {
    view: &'a View<'a>,
    /// The element that the first one starts with.
    start: usize,
    depth: usize,
    /// Groups of a line.
    groups: usize,
    /// `log2` of the elements that a scale is for.
    shift: u32,
}

impl<'a> Lines<'a> {
    /// Of a matrix `depth` wide. `None` where a line isn't some whole groups and bytes, or a group isn't some whole
    /// lanes.
    pub(super) fn of(matrix: Elements<'a>, depth: usize) -> Option<Self> {
        let Elements { view, start, .. } = matrix;
        let group = view.group;
        let whole = depth > 0
            && depth.is_multiple_of(group)
            && start.is_multiple_of(group)
            && (depth * view.levels.bits()).is_multiple_of(8)
            && (start * view.levels.bits()).is_multiple_of(8);
        // A single group of a line may have any size.
        let shift = match depth == group {
            true => usize::BITS - 1,
            false => group.trailing_zeros(),
        };
        let even = depth == group || group.is_power_of_two() && group >= 16;
        let groups = depth / group.max(1);
        (whole && even && view.blocks_fill_registers()).then_some(Lines {
            view,
            start,
            depth,
            groups,
            shift,
        })
    }

    pub(super) fn levels(&self) -> Levels {
        self.view.levels
    }

    /// Elements of a line.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// The first group of a line.
    #[inline(always)]
    fn group(&self, line: usize) -> usize {
        self.start / self.view.group + line * self.groups
    }

    /// Whether the pieces of [`TOGETHER`] have no more groups than a register has lanes, if a lane has so many codes.
    pub(super) fn fits_fields(&self, fields: usize) -> bool {
        (TOGETHER * fields) >> self.shift <= 1
    }

    /// Of how many of some lines, from the first on, scales and offsets can be read as they lie, a register at a time.
    fn with_scales_in_place(&self, lines: &Range<usize>) -> usize {
        // The last group at which a register can be read.
        let last = match self.view.scales {
            ScalesView::F16(scales, _) => scales.len().checked_sub(MOST_LANES),
            ScalesView::Blocks { scales, large, .. } => {
                let of_block = groups_of_block(self.view.group);
                let whole =
                    self.groups.is_multiple_of(of_block) && self.group(0).is_multiple_of(of_block);
                let of_large = large.len().checked_sub(MOST_LANES).map(|last| last * of_block);
                let last = scales.len().checked_sub(MOST_LANES);
                last.zip(of_large).filter(|_| whole).map(|(last, of_large)| last.min(of_large))
            }
            _ => None,
        };
        let fitting = last.map_or(0, |last| (last + 1).saturating_sub(self.group(lines.start)));
        (fitting / self.groups).min(lines.len())
    }

    /// Elements of a group, if something is added to them.
    pub(super) fn group_of_offsets(&self) -> Option<usize> {
        self.view.has_offsets().then_some(self.view.group)
    }
}

/// The registers that rows are ordered for.
#[derive(Clone, Copy, Debug)]
pub(super) struct Way {
    pub lanes: usize,
    /// By what codes that are integers are multiplied, if not as numbers.
    pub digits: Option<By>,
}

/// Rows in the order in which codes are unpacked.
pub(super) struct Ordered {
    rows: usize,
    depth: usize,
    lanes: usize,
    /// `(rows, stride)`, whole pieces with zeros at the end; nothing where all matrices are multiplied by pairs or digits.
    x: Scratch<f32>,
    stride: usize,
    pairs: Option<OrderedPairs>,
    digits: Vec<OrderedDigits>,
    /// For sizes of groups, the sums of every row's groups, padded with zeros to whole registers.
    sums: Vec<(usize, Scratch<f32>)>,
}

impl Ordered {
    /// `x` `(rows, depth)`, also in bf16 where that is what is stored, for products with these matrices.
    #[inline(always)]
    pub(super) fn new<'m>(
        rows: usize,
        depth: usize,
        (x, stored): (&[f32], Option<&[bf16]>),
        Way { lanes, digits: by }: Way,
        matrices: impl Iterator<Item = Lines<'m>> + Clone,
    ) -> Self {
        assert!(rows <= FEW_ROWS && x.len() == rows * depth);
        assert!(stored.is_none_or(|stored| stored.len() == x.len()));
        let takes_pairs = |matrix: &Lines| stored.is_some() && pairs::takes_pairs(*matrix);
        let mut paired = matrices.clone().filter(takes_pairs).peekable();
        let stored = stored.filter(|_| paired.peek().is_some());
        let pairs = stored.map(|stored| OrderedPairs::new(depth, stored, paired));
        let piece = FIELDS * lanes;
        let stride = depth.next_multiple_of(piece);
        let mut digits: Vec<OrderedDigits> = Vec::new();
        let mut read = 0;
        for matrix in matrices.clone().filter(|matrix| !takes_pairs(matrix)) {
            if digits.iter().any(|known| known.are_for(matrix)) {
                continue;
            }
            // No closure, which would not be compiled for the machine's registers.
            let ordered = match by {
                Some(by) => OrderedDigits::new(depth, x, lanes, by, matrix),
                None => None,
            };
            match ordered {
                Some(ordered) => digits.push(ordered),
                None => read = rows,
            }
        }
        let mut ordered = Scratch::zeros(read * stride);
        for row in 0..read {
            let ordered = &mut ordered[row * stride..][..stride];
            let pieces = x[row * depth..][..depth].chunks(piece);
            for (x, ordered) in pieces.zip(ordered.chunks_exact_mut(piece)) {
                for (lane, x) in x.chunks(FIELDS).enumerate() {
                    for (field, x) in x.iter().enumerate() {
                        ordered[field * lanes + lane] = *x;
                    }
                }
            }
        }
        let mut sums: Vec<(usize, Scratch<f32>)> = Vec::new();
        for group in matrices.filter_map(|matrix| matrix.group_of_offsets()) {
            if sums.iter().any(|(known, _)| *known == group) {
                continue;
            }
            let padded = (depth / group).next_multiple_of(MOST_LANES);
            let mut of_groups = Scratch::zeros(rows * padded);
            for row in 0..rows {
                let x = x[row * depth..][..depth].chunks_exact(group);
                for (sum, x) in of_groups[row * padded..].iter_mut().zip(x) {
                    let mut parts = [0f32; MOST_LANES];
                    for x in x.chunks(MOST_LANES) {
                        parts.iter_mut().zip(x).for_each(|(part, x)| *part += *x);
                    }
                    *sum = sum_lanes(parts);
                }
            }
            sums.push((group, of_groups));
        }
        Ordered { rows, depth, lanes, x: ordered, stride, pairs, digits, sums }
    }

    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }

    /// What the matrix is multiplied by, if that is by pairs.
    pub(super) fn pairs_for(&self, matrix: Lines) -> Option<&OrderedPairs> {
        self.pairs.as_ref().filter(|_| pairs::takes_pairs(matrix))
    }

    /// What the matrix is multiplied by, if that is by digits.
    pub(super) fn digits_for(&self, matrix: Lines) -> Option<&OrderedDigits> {
        self.digits.iter().find(|digits| digits.are_for(matrix))
    }

    /// The sums over the groups of a matrix that has offsets.
    pub(super) fn sums(&self, matrix: Lines) -> &[f32] {
        let Some(group) = matrix.group_of_offsets() else { return &[] };
        let found = self.sums.iter().find(|(known, _)| *known == group);
        found.map_or_else(|| unreachable!("summed for groups of {group}"), |(_, sums)| sums)
    }
}

/// A product of a few rows and some lines.
struct Task<'a> {
    rows: usize,
    /// The rows' sums over groups; empty where nothing is added to them.
    sums: &'a [f32],
    matrix: Lines<'a>,
    /// How many lines there are.
    count: usize,
}

/// Scales and offsets of some lines' groups, which are counted from the first line's first on.
trait Scaling<R: Registers> {
    /// Before those of a line of `groups` are read, of which this is the first.
    #[inline(always)]
    fn begin_line(&self, _first: usize, _groups: usize) {}

    /// The scales of as many groups as lanes from `group` on. What is beyond the last one has no meaning.
    ///
    /// # Safety
    /// As of [`dots`], and there has to be such a group.
    unsafe fn scales(&self, group: usize) -> R::Floats;

    /// Their offsets, where the matrix has them.
    ///
    /// # Safety
    /// As of [`Self::scales`].
    unsafe fn offsets(&self, group: usize) -> R::Floats;
}

/// As [`fill`] made them, with room for a register behind them.
struct Ready<'a> {
    scales: &'a [f32],
    offsets: &'a [f32],
    view: &'a View<'a>,
    /// From which group on those are that will be made ready next.
    next: usize,
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
struct Halves<'a> {
    scales: &'a [f16],
    offsets: &'a [f16],
    /// The first line's first group.
    first: usize,
    /// Of how many groups ahead they are asked for.
    ahead: usize,
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
struct OfBlocks<'a, R: Registers> {
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

impl<R: Registers> OfBlocks<'_, R> {
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
/// As of [`dots`], with as many codes and scales of blocks as lanes.
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

/// Makes the products of a piece of codes.
pub(super) trait Piece<R: Registers> {
    /// Codes of a lane.
    const FIELDS: usize;
    /// Whether all codes stand for finite numbers, so that any may stand behind a line, where rows have zeros.
    const FINITE: bool;

    /// Bits of a code.
    fn bits(&self) -> usize;

    /// Calls what is compiled for the instructions that this takes, as a function of its own.
    ///
    /// # Safety
    /// The machine needs them.
    unsafe fn call(f: impl FnOnce());

    /// Adds what every row has from piece `place`, whose codes are given.
    ///
    /// # Safety
    /// As of [`dots`]; there are as many rows and pieces, and the codes of a piece, or [`MOST_BYTES`] where they are finite.
    unsafe fn add<const ROWS: usize>(
        &self,
        place: usize,
        codes: *const u8,
        scale: R::Floats,
        totals: &mut [R::Floats; ROWS],
    );
}

/// The dot products of all rows with some lines: `out` `(rows, lines.len())`.
///
/// # Safety
/// The machine needs the registers' instructions.
#[inline(always)]
pub(super) unsafe fn dots<R: Registers>(
    x: &Ordered,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    assert!(x.x.len() == x.rows * x.stride);
    macro_rules! dots_by {
        ($bits:literal, $kind:expr, $table:expr, $zero:expr) => {
            // SAFETY: as promised by the caller.
            unsafe {
                let numbers = Numbers::<R, $bits, $kind>::new(x, $table, $zero);
                dots_by(x, &numbers, matrix, lines, out)
            }
        };
    }
    let none = &[0.0; 16];
    match matrix.view.levels {
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

/// As [`dots`], with products of pieces made in any way: first of the lines whose scales can be read as they lie, and then of
/// those whose scales are made ready, some at a time.
///
/// # Safety
/// As of [`dots`], and of [`Piece::add`] for all pieces of a line.
#[inline(always)]
pub(super) unsafe fn dots_by<R: Registers, P: Piece<R>>(
    x: &Ordered,
    pieces: &P,
    matrix: Lines,
    lines: Range<usize>,
    out: &mut [f32],
) {
    assert!(x.lanes == R::LANES && x.depth == matrix.depth);
    assert!((1..=FEW_ROWS).contains(&x.rows) && out.len() == x.rows * lines.len());
    let task = Task { rows: x.rows, sums: x.sums(matrix), matrix, count: lines.len() };
    let of_line = x.depth * pieces.bits() / 8;
    let codes = &matrix.view.codes[matrix.start * pieces.bits() / 8 + lines.start * of_line..];
    // Of how many lines the codes can be read where they are.
    let followed = match P::FINITE {
        true => codes.len().saturating_sub(MOST_BYTES) / of_line,
        false => lines.len(),
    };
    let in_place = matrix.with_scales_in_place(&lines).min(followed);
    if in_place > 0 {
        let (first, ahead) = (matrix.group(lines.start), lines.len() * matrix.groups);
        let lines = (0..in_place, codes);
        // SAFETY: as promised by the caller, and these are such lines; there is a number for every lane.
        unsafe {
            match matrix.view.scales {
                ScalesView::F16(scales, offsets) => {
                    let scaling = Halves { scales, offsets, first, ahead };
                    any_rows(&task, pieces, &scaling, lines, out);
                }
                ScalesView::Blocks { scales, signed, large, offsets, large_offsets } => {
                    let shift = groups_of_block(matrix.view.group).trailing_zeros();
                    let scaling = OfBlocks::<R> {
                        scales: (scales, large),
                        signed,
                        offsets: (offsets, large_offsets),
                        first,
                        ahead,
                        shift,
                        blocks: R::shift_right(R::load_words(COUNTED.as_ptr()), shift),
                    };
                    any_rows(&task, pieces, &scaling, lines, out);
                }
                _ => unreachable!("they are made ready"),
            }
        }
    }
    let rest = lines.len() - in_place;
    if rest == 0 {
        return;
    }
    let batch = (READY / matrix.groups).clamp(1, rest);
    let room = (batch * matrix.groups).next_multiple_of(MOST_LANES) + MOST_LANES;
    let mut scales = Scratch::new(room);
    let mut offsets = Scratch::new(if task.sums.is_empty() { 0 } else { room });
    for start in (in_place..lines.len()).step_by(batch) {
        let some = start..(start + batch).min(lines.len());
        let group = matrix.group(lines.start + start);
        let of_some = some.len() * matrix.groups;
        let filled = of_some.next_multiple_of(MOST_LANES);
        let offsets_filled = if task.sums.is_empty() { 0 } else { filled };
        let (now, added) = (&mut scales[..filled], &mut offsets[..offsets_filled]);
        let of_lines = &codes[start * of_line..];
        let copy: Vec<u8>;
        let some = match some.end > followed {
            true => {
                copy = lengthened(&of_lines[..some.len() * of_line]);
                (some, &copy[..])
            }
            false => (some, of_lines),
        };
        // SAFETY: as promised by the caller; what is made ready ends with a register.
        unsafe {
            fill_apart::<R>(matrix.view, group, now, added);
            let (view, next) = (matrix.view, group + of_some);
            let scaling = Ready { scales: &scales, offsets: &offsets, view, next };
            any_rows(&task, pieces, &scaling, some, out);
        }
    }
}

/// As [`by_lines`], each number of rows by a function of its own: one for all is so large that compilers take minutes.
///
/// # Safety
/// As of [`by_lines`].
#[inline(always)]
unsafe fn any_rows<R: Registers, P: Piece<R>>(
    task: &Task,
    numbers: &P,
    scaling: &impl Scaling<R>,
    lines: (Range<usize>, &[u8]),
    out: &mut [f32],
) {
    macro_rules! by_lines {
        ($rows:literal) => {
            // SAFETY: as promised by the caller.
            unsafe {
                P::call(
                    #[inline(always)]
                    || by_lines::<R, P, $rows>(task, numbers, scaling, lines, out),
                )
            }
        };
    }
    match task.rows {
        1 => by_lines!(1),
        2 => by_lines!(2),
        3 => by_lines!(3),
        FEW_ROWS => by_lines!(4),
        rows => unreachable!("{rows} rows"),
    }
}

/// As [`fill`], by a function of its own.
///
/// # Safety
/// As of [`fill`].
unsafe fn fill_apart<R: Registers>(
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
/// As of [`dots`].
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
            convert(&from[first..], scales, widened);
            if !offsets.is_empty() {
                convert(&added[first..], offsets, widened);
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

#[inline(always)]
fn widened(number: bf16) -> f32 {
    f32::from_bits(u32::from(number.to_bits()) << 16)
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
/// As of [`dots`].
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

/// Groups that share a scale of [`Scales::Blocks`](crate::quantized::Scales::Blocks).
fn groups_of_block(group: usize) -> usize {
    BLOCK / group
}

/// `to = sign·(large[block]·code)` from group `first` on.
///
/// # Safety
/// As of [`dots`].
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

/// With [`MOST_BYTES`] behind them.
#[cold]
#[inline(never)]
fn lengthened(codes: &[u8]) -> Vec<u8> {
    let mut longer = Vec::with_capacity(codes.len() + MOST_BYTES);
    longer.extend_from_slice(codes);
    longer.resize(codes.len() + MOST_BYTES, 0);
    longer
}

#[cold]
#[inline(never)]
fn filled_up<T: Copy + Default, const COUNT: usize>(from: &[T]) -> [T; COUNT] {
    let mut whole = [T::default(); COUNT];
    whole[..from.len()].copy_from_slice(from);
    whole
}

/// What codes of some bits stand for, by kind, in registers.
struct Numbers<'a, R: Registers, const BITS: usize, const KIND: u8> {
    x: &'a Ordered,
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

impl<'a, R: Registers, const BITS: usize, const KIND: u8> Numbers<'a, R, BITS, KIND> {
    /// # Safety
    /// As of [`dots`].
    #[inline(always)]
    unsafe fn new(x: &'a Ordered, table: &[f32; 16], zero: u8) -> Self {
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

/// The dot products of `ROWS` rows with some lines of a task, whose codes are given, with [`MOST_BYTES`] behind them where all are
/// finite.
///
/// # Safety
/// As of [`dots`], and of [`Piece::add`] and [`Scaling::scales`] for all pieces and groups of the lines.
#[inline(always)]
unsafe fn by_lines<R: Registers, P: Piece<R>, const ROWS: usize>(
    task: &Task,
    numbers: &P,
    scaling: &impl Scaling<R>,
    (lines, codes): (Range<usize>, &[u8]),
    out: &mut [f32],
) {
    let matrix = task.matrix;
    let Lines { depth, groups, shift, .. } = matrix;
    let piece = P::FIELDS * R::LANES;
    let bytes = piece * numbers.bits() / 8;
    debug_assert!(matrix.fits_fields(P::FIELDS));
    // Of each piece of some, the place of every lane's scale behind that of their first.
    // SAFETY: as promised by the caller; there is a number for every lane.
    let mut places = unsafe { [R::load_words(COUNTED.as_ptr()); TOGETHER] };
    for (place, of_lanes) in places.iter_mut().enumerate() {
        let mut lanes = [0u32; MOST_LANES];
        for (lane, of_lane) in lanes.iter_mut().enumerate() {
            *of_lane = ((place * piece + P::FIELDS * lane) >> shift) as u32;
        }
        // SAFETY: as above.
        *of_lanes = unsafe { R::load_words(lanes.as_ptr()) };
    }
    let of_line = depth * numbers.bits() / 8;
    let behind = if P::FINITE { MOST_BYTES } else { 0 };
    assert!(codes.len() >= lines.len() * of_line + behind);
    let together = of_line / (TOGETHER * bytes);
    let rest = (of_line - together * TOGETHER * bytes).div_ceil(bytes);
    let mut room = None;
    // SAFETY: as promised by the caller.
    let mut sums = unsafe { [[R::zeros(); SUMMED]; ROWS] };
    for (index, codes) in codes.chunks_exact(of_line).take(lines.len()).enumerate() {
        let first = index * groups;
        scaling.begin_line(first, groups);
        // SAFETY: as promised by the caller.
        let mut totals = unsafe { [R::zeros(); ROWS] };
        if !task.sums.is_empty() {
            let padded = task.sums.len() / ROWS;
            for group in (0..groups).step_by(R::LANES) {
                // SAFETY: as promised by the caller; there are sums for whole registers.
                unsafe {
                    let mut offsets = scaling.offsets(first + group);
                    if groups - group < R::LANES {
                        offsets = R::first(offsets, groups - group);
                    }
                    for (row, total) in totals.iter_mut().enumerate() {
                        let sums = &task.sums[row * padded + group..][..R::LANES];
                        *total = R::multiply_add(offsets, R::load(sums.as_ptr()), *total);
                    }
                }
            }
        }
        let mut from = codes.as_ptr();
        for some in 0..together {
            let place = some * TOGETHER;
            // SAFETY: as promised by the caller, with as many whole pieces.
            unsafe {
                let scales = scaling.scales(first + ((place * piece) >> shift));
                for (index, places) in places.iter().enumerate() {
                    let from = from.add(index * bytes);
                    prefetch(from.wrapping_add(AHEAD));
                    numbers.add(place + index, from, R::permute(scales, *places), &mut totals);
                }
                from = from.add(TOGETHER * bytes);
            }
        }
        if rest > 0 {
            let place = together * TOGETHER;
            let group = (place * piece) >> shift;
            // SAFETY: as promised by the caller; the last codes are brought to a whole piece, and the rows have zeros behind them.
            unsafe {
                let scales = R::first(scaling.scales(first + group), groups - group);
                for (index, places) in places.iter().enumerate().take(rest) {
                    prefetch(from.wrapping_add(AHEAD));
                    let mut piece = from;
                    let left = codes.len() - (place + index) * bytes;
                    if left < bytes && !P::FINITE {
                        let codes = std::slice::from_raw_parts(from, left);
                        piece = room.insert(filled_up::<_, MOST_BYTES>(codes)).as_ptr();
                    }
                    numbers.add(place + index, piece, R::permute(scales, *places), &mut totals);
                    from = from.wrapping_add(bytes);
                }
            }
        }
        let slot = index % SUMMED;
        for (sums, total) in sums.iter_mut().zip(totals) {
            sums[slot] = total;
        }
        if slot + 1 == SUMMED || index + 1 == lines.len() {
            let line = lines.start + index - slot;
            for (row, totals) in sums.iter().enumerate() {
                // SAFETY: as promised by the caller.
                let sums = unsafe { R::sums(totals) };
                let out = &mut out[row * task.count + line..][..slot + 1];
                out.iter_mut().zip(sums).for_each(|(out, sum)| *out = sum);
            }
        }
    }
}
