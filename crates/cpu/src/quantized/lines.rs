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
use super::numbers::OrderedNumbers;
use super::pairs::{self, OrderedPairs};
use super::registers::{MOST_LANES, Registers, SUMMED};
use super::scaling::{Halves, OfBlocks, Ready, Scaling, fill_apart, groups_of_block};
use super::{Elements, Levels, ScalesView, View};
use crate::few_rows::{FEW_ROWS, sum_lanes};
use crate::scratch::Scratch;
use crate::simd::prefetch;
use half::bf16;
use std::ops::Range;

/// Bytes of a piece of codes at most.
const MOST_BYTES: usize = 4 * MOST_LANES;

/// Bytes ahead that codes are asked for: what memory takes longer for than the processor looks ahead.
const AHEAD: usize = 8192;

/// Scales and as many offsets that are made ready at a time, or those of a line where it has more.
const READY: usize = 2048;

/// Pieces whose scales are read together: those of a register, where a lane has a quarter of a group.
const TOGETHER: usize = 4;

/// How the lines of a matrix lie.
#[derive(Clone, Copy)]
pub struct Lines<'a> {
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
    pub fn of(matrix: Elements<'a>, depth: usize) -> Option<Self> {
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

    pub(super) fn view(&self) -> &'a View<'a> {
        self.view
    }

    pub(super) fn levels(&self) -> Levels {
        self.view.levels
    }

    /// The first element of a line.
    #[inline(always)]
    pub(super) fn element(&self, line: usize) -> usize {
        self.start + line * self.depth
    }

    /// Elements of a line.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// The first group of a line.
    #[inline(always)]
    pub(super) fn group(&self, line: usize) -> usize {
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
pub struct Way {
    pub lanes: usize,
    /// By what codes that are integers are multiplied, if not as numbers.
    pub digits: Option<By>,
}

/// Rows in the order in which codes are unpacked.
pub struct Ordered {
    rows: usize,
    depth: usize,
    lanes: usize,
    /// If some matrices are multiplied in no other way.
    numbers: Option<OrderedNumbers>,
    pairs: Option<OrderedPairs>,
    digits: Vec<OrderedDigits>,
    /// For sizes of groups, the sums of every row's groups, padded with zeros to whole registers.
    sums: Vec<(usize, Scratch<f32>)>,
}

impl Ordered {
    /// `x` `(rows, depth)`, also in bf16 where that is what is stored, for products with these matrices.
    #[inline(always)]
    pub fn new<'m>(
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
        let mut digits: Vec<OrderedDigits> = Vec::new();
        let mut by_numbers = false;
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
                None => by_numbers = true,
            }
        }
        let numbers = match by_numbers {
            true => Some(OrderedNumbers::new(depth, x, lanes)),
            false => None,
        };
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
        Ordered { rows, depth, lanes, numbers, pairs, digits, sums }
    }

    pub(super) fn lanes(&self) -> usize {
        self.lanes
    }

    /// What the matrix is multiplied by, if that is by pairs.
    pub(super) fn pairs_for(&self, matrix: Lines) -> Option<&OrderedPairs> {
        self.pairs.as_ref().filter(|_| pairs::takes_pairs(matrix))
    }

    /// Whether the matrix is multiplied by pairs of bf16 numbers.
    pub fn is_by_pairs(&self, matrix: Lines) -> bool {
        self.pairs_for(matrix).is_some()
    }

    /// Whether it is multiplied by digits.
    pub fn is_by_digits(&self, matrix: Lines) -> bool {
        self.digits_for(matrix).is_some()
    }

    /// What all others are multiplied by.
    pub(super) fn numbers(&self) -> Option<&OrderedNumbers> {
        self.numbers.as_ref()
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

/// Makes the products of a piece of codes.
pub(super) trait Piece<R: Registers>: Copy {
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
    /// As of [`Registers`]; there are as many rows and pieces, and the codes of a piece, or [`MOST_BYTES`] where they are finite.
    unsafe fn add<const ROWS: usize>(
        &self,
        place: usize,
        codes: *const u8,
        scale: R::Floats,
        totals: &mut [R::Floats; ROWS],
    );
}

/// The dot products of all rows with some lines, `out` `(rows, lines.len())`, made of pieces in any way: first of the lines whose scales can be read as they lie, and then of
/// those whose scales are made ready, some at a time.
///
/// # Safety
/// As of [`Registers`], and of [`Piece::add`] for all pieces of a line.
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
        // SAFETY: as promised by the caller, and these are such lines.
        unsafe {
            match matrix.view.scales {
                ScalesView::F16(scales, offsets) => {
                    let scaling = Halves { scales, offsets, first, ahead };
                    any_rows(&task, pieces, &scaling, lines, out);
                }
                ScalesView::Blocks { scales, signed, large, offsets, large_offsets } => {
                    let (scales, offsets) = ((scales, large), (offsets, large_offsets));
                    let group = matrix.view.group;
                    let scaling =
                        OfBlocks::<R>::new((scales, signed), offsets, (first, ahead), group);
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
pub(super) fn filled_up<T: Copy + Default, const COUNT: usize>(from: &[T]) -> [T; COUNT] {
    let mut whole = [T::default(); COUNT];
    whole[..from.len()].copy_from_slice(from);
    whole
}

/// The dot products of `ROWS` rows with some lines of a task, whose codes are given, with [`MOST_BYTES`] behind them where all are
/// finite.
///
/// # Safety
/// As of [`Registers`], and of [`Piece::add`] and [`Scaling::scales`] for all pieces and groups of the lines.
#[inline(always)]
unsafe fn by_lines<R: Registers, P: Piece<R>, const ROWS: usize>(
    task: &Task,
    numbers: &P,
    scaling: &impl Scaling<R>,
    (lines, codes): (Range<usize>, &[u8]),
    out: &mut [f32],
) {
    // Copies, which what is written to `out` can't change.
    let (matrix, numbers, scaling) = (task.matrix, *numbers, *scaling);
    let Lines { depth, groups, shift, .. } = matrix;
    let piece = P::FIELDS * R::LANES;
    let bytes = piece * numbers.bits() / 8;
    debug_assert!(matrix.fits_fields(P::FIELDS));
    // Of each piece of some, the place of every lane's scale behind that of their first.
    // SAFETY: as promised by the caller; there is a number for every lane.
    let mut places = unsafe { [R::load_words([0; MOST_LANES].as_ptr()); TOGETHER] };
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
