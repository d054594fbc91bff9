//! Operands laid out for the innermost products.
//!
//! The inner dimension is cut into blocks of words. A left side holds, for every block, its rows
//! [`STRIDE`] words apart. A right side is laid out for one block and some columns at a time, as
//! panels `(words, PANEL)`. What is beyond the inner dimension or the columns is zero.

use super::kernels::{Kind, PANEL, SPARE_ROWS, STRIDE};
use crate::backend::cpu::element::{Element, Real, Values};
use crate::backend::cpu::parallel::{Disjoint, run};
#[cfg(target_arch = "x86_64")]
use candle_core::DType;
use half::bf16;
use metal_candle_cpu::scratch::Scratch;
#[cfg(target_arch = "x86_64")]
use metal_candle_cpu::simd::{Level, level};
use metal_candle_cpu::simd::{prefetch, vectorize};
use metal_candle_cpu::unwritten::Plain;
use std::ops::Range;

/// A matrix to be packed: lines are the rows of a left side and the columns of a right side.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a, A> {
    pub values: Values<'a, A>,
    /// Where the element at line 0 and depth 0 is.
    pub start: usize,
    /// From one line to the next, or from one depth to the next.
    pub stride: usize,
    /// Whether neighbours in memory are neighbours along the inner dimension.
    pub along_depth: bool,
}

impl<'a, A: Real> Operand<'a, A> {
    /// A contiguous matrix with a line in each of its rows, `depth` wide.
    pub(crate) fn lines(values: Values<'a, A>, depth: usize) -> Self {
        Operand { values, start: 0, stride: depth, along_depth: true }
    }

    /// A contiguous matrix with a line in each of its columns, `lines` wide.
    pub(crate) fn columns(values: Values<'a, A>, lines: usize) -> Self {
        Operand { values, start: 0, stride: lines, along_depth: false }
    }
}

/// How the inner dimension is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Blocks {
    depth: usize,
    words: usize,
    block: usize,
}

impl Blocks {
    pub(super) fn new(kind: Kind, depth: usize) -> Self {
        let words = if kind.is_bf16() { depth.div_ceil(2).next_multiple_of(16) } else { depth };
        Self::of_words(depth, words, kind.block())
    }

    /// Of so many words, of which a block has so many at most.
    pub(super) fn of_words(depth: usize, words: usize, most: usize) -> Self {
        let count = words.div_ceil(most).max(1);
        Blocks { depth, words, block: words.div_ceil(count).next_multiple_of(16) }
    }

    pub(super) fn count(self) -> usize {
        self.words.div_ceil(self.block.max(1))
    }

    pub(super) fn words(self, block: usize) -> Range<usize> {
        block * self.block..((block + 1) * self.block).min(self.words)
    }
}

/// A packed left side.
pub(crate) struct Lhs<A> {
    pub(super) data: Scratch<A>,
    pub(super) kind: Kind,
    pub(super) rows: usize,
    pub(super) depth: usize,
    pub(super) blocks: Blocks,
    /// So few rows once more, as tiles of lines are multiplied by them.
    #[cfg(target_arch = "x86_64")]
    pub(super) squares: Option<Scratch<A>>,
}

/// What is made of the elements of a line: `change(index of the first element, elements)`.
pub(crate) type Change<'a, A> = dyn Fn(usize, &mut [A]) + Sync + 'a;

impl<A: Real> Lhs<A> {
    /// Packs `(rows, depth)`, changed by `change`.
    pub(crate) fn pack(
        kind: Kind,
        rows: usize,
        depth: usize,
        operand: Operand<A>,
        change: Option<&Change<A>>,
    ) -> Self {
        /// Rows of a task.
        const ROWS: usize = 16;
        let mut lhs = Self::empty(kind, rows, depth);
        let (blocks, padded) = (lhs.blocks, rows + SPARE_ROWS);
        let target = Disjoint::new(&mut lhs.data);
        run(rows.div_ceil(ROWS), |task| {
            let rows = task * ROWS..(task * ROWS + ROWS).min(rows);
            for block in 0..blocks.count() {
                let start = (block * padded + rows.start) * STRIDE;
                // SAFETY: every task writes its own rows of each block.
                let target = unsafe { target.slice(start..start + rows.len() * STRIDE) };
                pack_rows(kind, operand, depth, rows.clone(), blocks.words(block), change, target);
            }
        });
        lhs.add_squares();
        lhs
    }

    /// Packs `(rows, depth)` on this thread.
    pub(crate) fn pack_here(kind: Kind, rows: usize, depth: usize, operand: Operand<A>) -> Self {
        let mut lhs = Self::empty(kind, rows, depth);
        for block in 0..lhs.blocks.count() {
            let start = lhs.place(block, 0);
            let target = &mut lhs.data[start..start + rows * STRIDE];
            pack_rows(kind, operand, depth, 0..rows, lhs.blocks.words(block), None, target);
        }
        lhs.add_squares();
        lhs
    }

    fn empty(kind: Kind, rows: usize, depth: usize) -> Self {
        let blocks = Blocks::new(kind, depth);
        let data = Scratch::new(blocks.count() * (rows + SPARE_ROWS) * STRIDE);
        Lhs {
            data,
            kind,
            rows,
            depth,
            blocks,
            #[cfg(target_arch = "x86_64")]
            squares: None,
        }
    }

    /// Turns rows for tiles of lines, where products are by those.
    fn add_squares(&mut self) {
        #[cfg(target_arch = "x86_64")]
        if self.kind == Kind::Tiles && self.kind.takes_lines(self.rows) {
            const WORDS: usize = SQUARE * SQUARE;
            let across = self.rows.div_ceil(SQUARE);
            let mut squares = Scratch::new(across * SQUARE * self.blocks.words);
            for (index, square) in squares.chunks_exact_mut(WORDS).enumerate() {
                let (word, row) = (index / across * SQUARE, index % across * SQUARE);
                let block = word / self.blocks.block;
                let place = self.place(block, row) + word - self.blocks.words(block).start;
                let source = &self.data[place..place + (SQUARE - 1) * STRIDE + SQUARE];
                // SAFETY: rows as long as words are in the slice, and the square is one.
                unsafe {
                    let source = source.as_ptr().cast();
                    transpose_square(source, 4 * STRIDE, square.as_mut_ptr(), SQUARE);
                }
            }
            self.squares = Some(squares);
        }
    }

    /// Where the words of a block start in row `row`.
    pub(super) fn place(&self, block: usize, row: usize) -> usize {
        (block * (self.rows + SPARE_ROWS) + row) * STRIDE
    }
}

/// Packs the words of a block of some rows.
fn pack_rows<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    rows: Range<usize>,
    words: Range<usize>,
    change: Option<&Change<A>>,
    target: &mut [A],
) {
    vectorize(
        #[inline(always)]
        || {
            if !operand.along_depth {
                return transpose(kind, operand, depth, rows, words, target, STRIDE);
            }
            for (row, target) in rows.zip(target.chunks_mut(STRIDE)) {
                let target = &mut target[..words.len()];
                let words = words.clone();
                match change {
                    None => read_line(kind, operand, depth, row, words, target),
                    Some(change) => changed_line(kind, operand, depth, row, words, change, target),
                }
            }
        },
    );
}

/// A right side that is packed whole, for use by several products.
pub(crate) struct Panels<A> {
    pub(super) data: Scratch<A>,
    pub(super) kind: Kind,
    pub(super) lines: usize,
    pub(super) blocks: Blocks,
}

impl<A: Real> Panels<A> {
    /// Packs `(depth, lines)` on this thread.
    pub(crate) fn pack(kind: Kind, lines: usize, depth: usize, operand: Operand<A>) -> Self {
        let mut panels = Self::empty(kind, lines, depth);
        panels.fill(operand);
        panels
    }

    /// Room for `(depth, lines)`.
    pub(crate) fn empty(kind: Kind, lines: usize, depth: usize) -> Self {
        let blocks = Blocks::new(kind, depth);
        let data = Scratch::new(lines.next_multiple_of(PANEL) * blocks.words);
        Panels { data, kind, lines, blocks }
    }

    /// Packs what there is room for, on this thread.
    pub(crate) fn fill(&mut self, operand: Operand<A>) {
        let padded = self.lines.next_multiple_of(PANEL);
        for block in 0..self.blocks.count() {
            let words = self.blocks.words(block);
            let target = &mut self.data[padded * words.start..padded * words.end];
            pack_panels(self.kind, operand, self.blocks.depth, 0..self.lines, words, target);
        }
    }

    /// Where the panel of a block that begins at line `line` starts.
    pub(super) fn place(&self, block: usize, line: usize) -> usize {
        let words = self.blocks.words(block);
        self.lines.next_multiple_of(PANEL) * words.start + line * words.len()
    }
}

/// Rounds numbers to bf16 as far as there are instructions for it; returns how many.
#[inline(always)]
fn round_vectors<A: Real>(wide: &[A], target: &mut [bf16]) -> usize {
    #[cfg(target_arch = "x86_64")]
    if A::DTYPE == DType::F32 && level() >= Level::Avx512Bf16 {
        let whole = wide.len() / SQUARE * SQUARE;
        assert!(target.len() >= whole);
        // SAFETY: the level says that the machine has the instructions; both have as many numbers.
        unsafe { x86::round_vectors(wide.as_ptr().cast(), whole, target.as_mut_ptr()) };
        return whole;
    }
    let _ = (wide, target);
    0
}

/// Reads a square whose lines are neighbours in memory, as its words are packed, where there are
/// instructions for it: a word of every line in each of its rows.
#[inline(always)]
fn round_square<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    first_line: usize,
    words: Range<usize>,
    square: &mut [A; SQUARE * SQUARE],
) -> bool {
    #[cfg(target_arch = "x86_64")]
    if kind.is_bf16()
        && A::DTYPE == DType::F32
        && level() >= Level::Avx512Bf16
        && words.len() == SQUARE
        && 2 * words.end <= depth
        && let Values::Native(values) = operand.values
    {
        let first = operand.start + 2 * words.start * operand.stride + first_line;
        let last = first + (2 * SQUARE - 1) * operand.stride + SQUARE;
        let source = values[first..last].as_ptr().cast();
        // SAFETY: the level says that the machine has the instructions; the rows are in the slice.
        unsafe { x86::round_square(source, operand.stride, square.as_mut_ptr().cast()) };
        return true;
    }
    let _ = (kind, operand, depth, first_line, words, square);
    false
}

/// The nearest bf16 number, as [`bf16::narrow`] rounds.
#[inline(always)]
fn round_to_bf16(number: f32) -> bf16 {
    let mut out = [bf16::ZERO];
    bf16::narrow(&[number], &mut out);
    out[0]
}

/// Words ahead that short pieces of far apart rows are asked for: as long as memory takes.
const AHEAD: usize = 12;

/// Elements along the depth in one word.
fn per_word(kind: Kind) -> usize {
    if kind.is_bf16() { 2 } else { 1 }
}

/// The bf16 numbers that `target`'s words hold.
#[inline(always)]
fn as_bf16<A: Real>(target: &mut [A]) -> &mut [bf16] {
    assert!(size_of::<A>() == 4);
    // SAFETY: a word of four bytes holds two bf16 numbers, for which all bits are valid.
    unsafe { std::slice::from_raw_parts_mut(target.as_mut_ptr().cast(), 2 * target.len()) }
}

/// As [`as_bf16`], to be read.
pub(super) fn as_bf16_ref<A: Real>(words: &[A]) -> &[bf16] {
    assert!(size_of::<A>() == 4);
    // SAFETY: as there.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast(), 2 * words.len()) }
}

/// Words of four bytes as their bits.
#[inline(always)]
fn as_words<A: Real>(target: &mut [A]) -> &mut [u32] {
    assert!(size_of::<A>() == 4);
    // SAFETY: a word of four bytes is a u32 as well, and as strictly aligned.
    unsafe { std::slice::from_raw_parts_mut(target.as_mut_ptr().cast(), target.len()) }
}

/// Copies elements as bf16 numbers.
#[inline(always)]
fn read_bf16<A: Real>(values: Values<A>, start: usize, target: &mut [bf16]) {
    if let Values::Bf16(values) = values {
        target.copy_from_slice(&values[start..start + target.len()]);
        return;
    }
    if let Values::Native(values) = values {
        return narrow_to_bf16(&values[start..start + target.len()], target);
    }
    match values {
        // So many that a call for them costs little beside what it does.
        Values::Quantized(numbers) => {
            if !numbers.read_bf16(start, target) {
                read_rounded::<A, 256>(values, start, target);
            }
        }
        _ => read_rounded::<A, 64>(values, start, target),
    }
}

/// [`read_bf16`] by way of so many numbers as they are computed with.
#[inline(always)]
fn read_rounded<A: Real, const AT_ONCE: usize>(
    values: Values<A>,
    start: usize,
    target: &mut [bf16],
) {
    let mut wide = [A::ZERO; AT_ONCE];
    for (index, target) in target.chunks_mut(AT_ONCE).enumerate() {
        let wide = &mut wide[..target.len()];
        values.read(start + index * AT_ONCE, wide);
        narrow_to_bf16(wide, target);
    }
}

#[inline(always)]
fn narrow_to_bf16<A: Real>(wide: &[A], target: &mut [bf16]) {
    let done = round_vectors(wide, target);
    for (target, wide) in target.iter_mut().zip(wide).skip(done) {
        *target = round_to_bf16(wide.to_f32());
    }
}

/// Words of a line whose elements are neighbours.
#[inline(always)]
fn read_line<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    line: usize,
    words: Range<usize>,
    target: &mut [A],
) {
    let first = words.start * per_word(kind);
    let count = (words.end * per_word(kind)).min(depth).saturating_sub(first);
    let start = operand.start + line * operand.stride + first;
    if kind.is_bf16() {
        let (numbers, rest) = as_bf16(target).split_at_mut(count);
        read_bf16(operand.values, start, numbers);
        rest.fill(bf16::ZERO);
    } else {
        let (numbers, rest) = target.split_at_mut(count);
        operand.values.read(start, numbers);
        rest.fill(A::ZERO);
    }
}

/// Like [`read_line`], with elements that `change` has changed.
fn changed_line<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    line: usize,
    words: Range<usize>,
    change: &Change<A>,
    target: &mut [A],
) {
    let first = words.start * per_word(kind);
    let count = (words.end * per_word(kind)).min(depth).saturating_sub(first);
    let mut numbers = Scratch::new(count);
    operand.values.read(operand.start + line * operand.stride + first, &mut numbers);
    change(line * depth + first, &mut numbers);
    let changed = Operand::lines(Values::Native(&numbers), count);
    read_line(kind, changed, count, 0, 0..words.len(), target);
}

/// One word of each of some lines that are neighbours.
#[inline(always)]
fn read_across<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    lines: Range<usize>,
    word: usize,
    target: &mut [A],
) {
    let start = |depth: usize| operand.start + depth * operand.stride + lines.start;
    if !kind.is_bf16()
        && let Values::Native(values) = operand.values
        && let Some((values, _)) = values[start(word)..].split_first_chunk::<PANEL>()
        && let Some((target, _)) = target.split_first_chunk_mut::<PANEL>()
        && lines.len() == PANEL
    {
        // Of a size known here: no call for every copy.
        *target = *values;
        return;
    }
    let (target, rest) = target.split_at_mut(lines.len());
    rest.fill(A::ZERO);
    if !kind.is_bf16() {
        operand.values.read(start(word), target);
        return;
    }
    let (even, odd) = (2 * word, 2 * word + 1);
    let words = as_words(target);
    if even >= depth {
        words.fill(0);
        return;
    }
    let count = lines.len();
    match operand.values {
        Values::Bf16(values) => {
            let even = &values[start(even)..start(even) + count];
            if odd < depth {
                let odd = &values[start(odd)..start(odd) + count];
                for ((word, even), odd) in words.iter_mut().zip(even).zip(odd) {
                    *word = u32::from(even.to_bits()) | u32::from(odd.to_bits()) << 16;
                }
            } else {
                for (word, even) in words.iter_mut().zip(even) {
                    *word = u32::from(even.to_bits());
                }
            }
        }
        values => {
            let mut rows = [[bf16::ZERO; PANEL]; 2];
            for (first, words) in (0..count).step_by(PANEL).zip(words.chunks_mut(PANEL)) {
                let [low, high] = &mut rows;
                read_bf16(values, start(even) + first, &mut low[..words.len()]);
                if odd < depth {
                    read_bf16(values, start(odd) + first, &mut high[..words.len()]);
                }
                for ((word, even), odd) in words.iter_mut().zip(low).zip(high) {
                    *word = u32::from(even.to_bits()) | u32::from(odd.to_bits()) << 16;
                }
            }
        }
    }
}

/// Packs a block of the right side `(depth, lines)` as panels.
pub(super) fn pack_panels<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    lines: Range<usize>,
    words: Range<usize>,
    target: &mut [A],
) {
    if let Values::Quantized(_) = operand.values {
        let (unpacked, depths) = unpack(kind, operand, depth, lines.clone(), words.clone());
        let values = match kind.is_bf16() {
            true => Values::Bf16(&as_bf16_ref(&unpacked)[..lines.len() * depths.len()]),
            false => Values::Native(&unpacked),
        };
        let stride = if operand.along_depth { depths.len() } else { lines.len() };
        let operand = Operand { values, start: 0, stride, along_depth: operand.along_depth };
        return pack_panels(kind, operand, depths.len(), 0..lines.len(), 0..words.len(), target);
    }
    let panel_len = words.len() * PANEL;
    let panels = || (lines.start..lines.end).step_by(PANEL).enumerate();
    vectorize(
        #[inline(always)]
        || {
            if operand.along_depth {
                for (panel, first) in panels() {
                    let target = &mut target[panel * panel_len..][..panel_len];
                    let lines = first..(first + PANEL).min(lines.end);
                    transpose(kind, operand, depth, lines, words.clone(), target, PANEL);
                }
                return;
            }
            // What is neighbouring in memory goes to all panels before the next word.
            for (index, word) in words.clone().enumerate() {
                for row in 0..per_word(kind) {
                    let depth = (word + AHEAD) * per_word(kind) + row;
                    let start = operand.start + depth * operand.stride + lines.start;
                    operand.values.prefetch(start, lines.len());
                }
                let whole = interleave(kind, operand, depth, lines.clone(), word, |panel| {
                    target[panel * panel_len + index * PANEL..][..PANEL].as_mut_ptr()
                });
                for (panel, first) in panels().skip(whole) {
                    let target = &mut target[panel * panel_len + index * PANEL..][..PANEL];
                    let lines = first..(first + PANEL).min(lines.end);
                    read_across(kind, operand, depth, lines, word, target);
                }
            }
        },
    );
}

/// A block of a quantised right side, contiguous as it lies in the operand, in bf16 or as it is computed with;
/// and the depths that it covers.
fn unpack<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    lines: Range<usize>,
    words: Range<usize>,
) -> (Scratch<A>, Range<usize>) {
    let depths = words.start * per_word(kind)..(words.end * per_word(kind)).min(depth);
    let (rows, columns) = match operand.along_depth {
        true => (lines, depths.clone()),
        false => (depths.clone(), lines),
    };
    let count = rows.len() * columns.len();
    let mut unpacked = Scratch::new(count.div_ceil(per_word(kind)));
    let place = |row| operand.start + row * operand.stride + columns.start;
    vectorize(
        #[inline(always)]
        || {
            if !kind.is_bf16() {
                for (row, target) in rows.zip(unpacked.chunks_exact_mut(columns.len().max(1))) {
                    operand.values.read(place(row), target);
                }
                return;
            }
            let target = &mut as_bf16(&mut unpacked)[..count];
            for (row, target) in rows.zip(target.chunks_exact_mut(columns.len().max(1))) {
                read_bf16(operand.values, place(row), target);
            }
        },
    );
    (unpacked, depths)
}

/// Whole lines of a quantised right side stored along the depth, in bf16 or as they are computed with.
#[cfg(target_arch = "x86_64")]
pub(super) fn unpack_lines<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    lines: Range<usize>,
) -> Scratch<A> {
    unpack(kind, operand, depth, lines, 0..depth.div_ceil(per_word(kind))).0
}

/// Packs a word of as many whole panels of lines as there are instructions for it; returns how many.
#[inline(always)]
fn interleave<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    lines: Range<usize>,
    word: usize,
    mut target: impl FnMut(usize) -> *mut A,
) -> usize {
    #[cfg(target_arch = "x86_64")]
    if kind.is_bf16()
        && 2 * word + 1 < depth
        && level() >= Level::Avx512
        && let Values::Bf16(values) = operand.values
    {
        let whole = lines.len() / PANEL;
        let row = |depth: usize| {
            let start = operand.start + depth * operand.stride + lines.start;
            &values[start..start + whole * PANEL]
        };
        let (even, odd) = (row(2 * word), row(2 * word + 1));
        for panel in 0..whole {
            let (even, odd) = (even[panel * PANEL..].as_ptr(), odd[panel * PANEL..].as_ptr());
            // SAFETY: the level says that the machine has the instructions; there are as many numbers
            // in both rows and in the target.
            unsafe { x86::interleave(even, odd, target(panel).cast()) };
        }
        return whole;
    }
    let _ = (kind, operand, depth, lines, word, &mut target);
    0
}

/// Words and lines of a block that is transposed at a time.
pub(super) const SQUARE: usize = 16;

/// Packs lines so that what is neighbouring in the operand is `stride` apart in `target`: columns
/// of a right side `(words, stride)` stored along the depth, or rows of a left side `(lines,
/// stride)` stored across it.
#[inline(always)]
fn transpose<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    lines: Range<usize>,
    words: Range<usize>,
    target: &mut [A],
    stride: usize,
) {
    let mut square = [A::ZERO; SQUARE * SQUARE];
    for first_line in lines.clone().step_by(SQUARE) {
        let count = SQUARE.min(lines.end - first_line);
        for first_word in words.clone().step_by(SQUARE) {
            let word_count = SQUARE.min(words.end - first_word);
            let part = first_word..first_word + word_count;
            // Straight from the operand where it has whole words and lines.
            if operand.along_depth
                && count == SQUARE
                && word_count == SQUARE
                && let Some((source, source_stride)) =
                    words_in_place(kind, operand, depth, first_line, part.clone())
            {
                let place = (first_word - words.start) * stride + first_line - lines.start;
                let target = &mut target[place..];
                assert!(target.len() >= (SQUARE - 1) * stride + SQUARE);
                // The next lines are neighbours in memory, but their pieces come from as many places:
                // nothing the processor foresees.
                for line in 0..SQUARE {
                    prefetch(source.wrapping_add((SQUARE + line) * source_stride));
                }
                // SAFETY: `words_in_place` vouches for the source; the target is long enough.
                unsafe { transpose_square(source, source_stride, target.as_mut_ptr(), stride) };
                continue;
            }
            let whole = count == SQUARE && word_count == SQUARE;
            if !whole {
                square.fill(A::ZERO);
            }
            if operand.along_depth {
                for (line, target) in
                    (first_line..).zip(square.chunks_exact_mut(SQUARE)).take(count)
                {
                    let target = &mut target[..word_count];
                    read_line(kind, operand, depth, line, part.clone(), target);
                }
            } else if !whole
                || !round_square(kind, operand, depth, first_line, part.clone(), &mut square)
            {
                for (word, target) in part.zip(square.chunks_exact_mut(SQUARE)) {
                    let lines = first_line..first_line + count;
                    read_across(kind, operand, depth, lines, word, &mut target[..count]);
                }
            }
            // A right side is filled with zeros beyond its lines, a left side ends there.
            let (rows, columns, place) = if operand.along_depth {
                (word_count, SQUARE, (first_word - words.start) * stride + first_line - lines.start)
            } else {
                (count, word_count, (first_line - lines.start) * stride + first_word - words.start)
            };
            let target = &mut target[place..];
            let source = square.as_ptr().cast();
            let source_stride = SQUARE * size_of::<A>();
            if whole {
                assert!(target.len() >= (SQUARE - 1) * stride + SQUARE);
                // SAFETY: the source is a whole square; the target is long enough.
                unsafe { transpose_square(source, source_stride, target.as_mut_ptr(), stride) };
                continue;
            }
            let mut transposed = [A::ZERO; SQUARE * SQUARE];
            // SAFETY: both are whole squares.
            unsafe { transpose_square(source, source_stride, transposed.as_mut_ptr(), SQUARE) };
            for (row, transposed) in transposed.chunks_exact(SQUARE).take(rows).enumerate() {
                target[row * stride..][..columns].copy_from_slice(&transposed[..columns]);
            }
        }
    }
    if operand.along_depth && lines.len() <= PANEL - SQUARE {
        for target in target.chunks_exact_mut(stride) {
            target[lines.len().next_multiple_of(SQUARE)..].fill(A::ZERO);
        }
    }
}

/// Where a square of words lies in the operand and how many bytes its lines are apart, if the words
/// are stored as they are packed.
#[inline(always)]
fn words_in_place<A: Real>(
    kind: Kind,
    operand: Operand<A>,
    depth: usize,
    first_line: usize,
    words: Range<usize>,
) -> Option<(*const u8, usize)> {
    let first = operand.start + first_line * operand.stride + words.start * per_word(kind);
    let last = first + (SQUARE - 1) * operand.stride + SQUARE * per_word(kind);
    if words.end * per_word(kind) > depth {
        return None;
    }
    match operand.values {
        Values::Native(values) if !kind.is_bf16() => {
            Some((values[first..last].as_ptr().cast(), operand.stride * size_of::<A>()))
        }
        Values::Bf16(values) if kind.is_bf16() => {
            Some((values[first..last].as_ptr().cast(), operand.stride * size_of::<bf16>()))
        }
        _ => None,
    }
}

/// `target[i][j] = source[j][i]` for a square of words, unaligned in the source.
///
/// # Safety
/// The source must have [`SQUARE`] lines of as many words, `source_stride` bytes apart, and the target
/// rows `stride` words apart.
#[inline(always)]
pub(super) unsafe fn transpose_square<A: Plain>(
    source: *const u8,
    source_stride: usize,
    target: *mut A,
    stride: usize,
) {
    #[cfg(target_arch = "x86_64")]
    if size_of::<A>() == 4 && level() >= Level::Avx512 {
        // SAFETY: the level says that the machine has the instructions; the rest as promised.
        unsafe { x86::transpose_square(source, source_stride, target.cast(), stride) };
        return;
    }
    for line in 0..SQUARE {
        // SAFETY: inside both by the caller's promise.
        unsafe {
            let source = source.add(line * source_stride).cast::<A>();
            for word in 0..SQUARE {
                *target.add(word * stride + line) = source.add(word).read_unaligned();
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::{PANEL, SQUARE};
    use half::bf16;
    use std::arch::x86_64::*;

    /// Rounds `count` numbers, a multiple of 16.
    ///
    /// # Safety
    /// There must be as many numbers at both pointers.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) unsafe fn round_vectors(wide: *const f32, count: usize, target: *mut bf16) {
        for start in (0..count).step_by(SQUARE) {
            // SAFETY: as promised by the caller.
            unsafe {
                let rounded = _mm512_cvtneps_pbh(_mm512_loadu_ps(wide.add(start)));
                let bits = std::mem::transmute::<__m256bh, __m256i>(rounded);
                _mm256_storeu_si256(target.add(start).cast(), bits);
            }
        }
    }

    /// Words of the numbers of pairs of rows, [`SQUARE`] of each, rounded: the first in the low half.
    ///
    /// # Safety
    /// There must be two rows for every word of the square, `stride` numbers apart.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")]
    pub(super) unsafe fn round_square(source: *const f32, stride: usize, square: *mut u32) {
        // From halves of a register to halves of words.
        let mut places = [0u16; 2 * SQUARE];
        for (word, places) in places.chunks_exact_mut(2).enumerate() {
            places.copy_from_slice(&[word as u16, (SQUARE + word) as u16]);
        }
        // SAFETY: as promised by the caller.
        unsafe {
            let places = _mm512_loadu_si512(places.as_ptr().cast());
            for word in 0..SQUARE {
                let even = _mm512_loadu_ps(source.add(2 * word * stride));
                let odd = _mm512_loadu_ps(source.add((2 * word + 1) * stride));
                let halves = _mm512_cvtne2ps_pbh(odd, even);
                let halves = std::mem::transmute::<__m512bh, __m512i>(halves);
                let words = _mm512_permutexvar_epi16(places, halves);
                _mm512_storeu_si512(square.add(word * SQUARE).cast(), words);
            }
        }
    }

    /// Words of the numbers of two rows, [`PANEL`] of each: the first in the low half.
    ///
    /// # Safety
    /// There must be as many numbers in the rows, and words in the target.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn interleave(even: *const bf16, odd: *const bf16, target: *mut u32) {
        const { assert!(PANEL == 32) };
        // SAFETY: as promised by the caller.
        unsafe {
            let (even, odd) = (_mm512_loadu_si512(even.cast()), _mm512_loadu_si512(odd.cast()));
            // Words in the order of quarters of the registers, half of each quarter here and there.
            let (low, high) = (_mm512_unpacklo_epi16(even, odd), _mm512_unpackhi_epi16(even, odd));
            let first = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0);
            let second = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
            _mm512_storeu_si512(target.cast(), _mm512_permutex2var_epi64(low, first, high));
            let target = target.add(16);
            _mm512_storeu_si512(target.cast(), _mm512_permutex2var_epi64(low, second, high));
        }
    }

    /// # Safety
    /// As [`super::transpose_square`], with words of four bytes.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
    pub(super) unsafe fn transpose_square(
        source: *const u8,
        source_stride: usize,
        target: *mut f32,
        stride: usize,
    ) {
        // SAFETY: inside both by the caller's promise.
        unsafe {
            let mut rows = [_mm512_setzero_ps(); SQUARE];
            for (line, row) in rows.iter_mut().enumerate() {
                *row = _mm512_loadu_ps(source.add(line * source_stride).cast());
            }
            // Pairs of words, then of pairs, then of the quarters of a register.
            let mut pairs = rows;
            for i in 0..8 {
                pairs[2 * i] = _mm512_unpacklo_ps(rows[2 * i], rows[2 * i + 1]);
                pairs[2 * i + 1] = _mm512_unpackhi_ps(rows[2 * i], rows[2 * i + 1]);
            }
            let mut fours = rows;
            for i in 0..4 {
                let [a, b, c, d] =
                    [0, 1, 2, 3].map(|offset| _mm512_castps_pd(pairs[4 * i + offset]));
                fours[4 * i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
                fours[4 * i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
                fours[4 * i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
                fours[4 * i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
            }
            for i in 0..4 {
                let [a, b, c, d] = [fours[i], fours[4 + i], fours[8 + i], fours[12 + i]];
                let even_ab = _mm512_shuffle_f32x4::<0x88>(a, b);
                let odd_ab = _mm512_shuffle_f32x4::<0xdd>(a, b);
                let even_cd = _mm512_shuffle_f32x4::<0x88>(c, d);
                let odd_cd = _mm512_shuffle_f32x4::<0xdd>(c, d);
                let transposed = [
                    (i, _mm512_shuffle_f32x4::<0x88>(even_ab, even_cd)),
                    (4 + i, _mm512_shuffle_f32x4::<0x88>(odd_ab, odd_cd)),
                    (8 + i, _mm512_shuffle_f32x4::<0xdd>(even_ab, even_cd)),
                    (12 + i, _mm512_shuffle_f32x4::<0xdd>(odd_ab, odd_cd)),
                ];
                for (word, row) in transposed {
                    _mm512_storeu_ps(target.add(word * stride), row);
                }
            }
        }
    }
}
