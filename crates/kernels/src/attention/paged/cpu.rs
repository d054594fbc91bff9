//! Paged attention on the CPU. A task has some queries of a sequence for all heads that share keys, which it
//! gathers a chunk at a time. Where there are few tasks, each has a part of the chunks, and the results of
//! chunks are joined afterwards, in the same way and order as a task of all chunks joins them.
//!
//! Few bf16 rows of a sequence, as of one query, are multiplied by keys and values where they lie (`few_rows`): packing these costs
//! more than it brings. The sums have another order then, so it isn't done where batches are to be invariant.

#[cfg(target_arch = "x86_64")]
use super::few_rows::{self, Lines};
use super::rounded::View;
use super::{Sequences, Sizes, Span};
use crate::attention::cpu::{COLUMNS as CHUNK, end_row, join, soften};
#[cfg(target_arch = "x86_64")]
use crate::backend::cpu::as_f32_mut;
use crate::backend::cpu::gemm::{Kind, Lhs, Operand, Panels, multiply, sum_count, sum_stride};
use crate::backend::cpu::{
    Disjoint, Element, Read, Real, Values, for_each_index, threads, unwritten,
};
use candle_core::{DType, Layout, Result, bail};
#[cfg(target_arch = "x86_64")]
use half::bf16;
use metal_candle_cpu::scratch::Scratch;
use metal_candle_cpu::simd::vectorize;
#[cfg(target_arch = "x86_64")]
use std::array;
use std::ops::Range;

/// Rows of a task, queries times heads, but for a single query of more heads.
const ROWS: usize = 128;
/// Tasks that keep all threads busy, so many for each and so many at most; where there are fewer, they are cut into parts of
/// the chunks, which changes no bits.
const TASKS_OF_A_THREAD: usize = 4;
const ENOUGH_TASKS: usize = 64;
/// Chunks of such a part at least.
const CHUNKS: usize = 2;
/// Rows of a sequence for a key head up to which keys and values are multiplied where they lie.
#[cfg(target_arch = "x86_64")]
const FEW_ROWS: usize = 16;
/// Scores below which threads cost more than they bring.
const PARALLEL_SCORES: usize = 2 * 1024;

/// Queries `(tokens, heads, head_dim)`, read through their strides; the last dimension is contiguous.
pub(super) struct Queries<'a, T> {
    storage: &'a [T],
    start: usize,
    strides: [usize; 2],
}

impl<'a, T> Queries<'a, T> {
    pub(super) fn new(storage: &'a [T], layout: &Layout) -> Result<Self> {
        match layout.stride() {
            [token, head, _] => {
                Ok(Queries { storage, start: layout.start_offset(), strides: [*token, *head] })
            }
            other => {
                bail!("metal-candle-kernels: attention: found strides {other:?}, expected three")
            }
        }
    }
}

/// The rows of a pool's heads.
pub(super) enum Rows<'a, T> {
    Dense(&'a [T]),
    Rounded(View<'a>),
}

impl<'a, T: Element> Rows<'a, T> {
    pub(super) fn new(elements: &'a Read, scales: Option<&'a Read>) -> Result<Self> {
        Ok(match scales {
            None => Rows::Dense(elements.slice()?),
            Some(scales) => {
                Rows::Rounded(View { codes: elements.slice()?, scales: scales.slice()? })
            }
        })
    }

    /// Rows `step` apart from row `first` on.
    #[inline(always)]
    fn read(&self, first: usize, step: usize, head_dim: usize, target: &mut [T]) {
        match self {
            Rows::Dense(rows) => {
                let lines = rows[first * head_dim..].chunks(step * head_dim);
                for (row, line) in target.chunks_exact_mut(head_dim).zip(lines) {
                    row.copy_from_slice(&line[..head_dim]);
                }
            }
            Rows::Rounded(rows) => vectorize(
                #[inline(always)]
                || {
                    for (index, row) in target.chunks_exact_mut(head_dim).enumerate() {
                        rows.read(first + index * step, row);
                    }
                },
            ),
        }
    }
}

pub(super) struct Problem<'a, T: Element> {
    pub sizes: Sizes,
    pub sequences: &'a Sequences,
    pub q: Queries<'a, T>,
    /// Pools.
    pub keys: Rows<'a, T>,
    pub values: Rows<'a, T>,
    pub scale: T::Acc,
    pub softcap: Option<T::Acc>,
    /// Of each head, if there are any.
    pub sinks: Vec<T::Acc>,
    /// Keys that a query sees at most.
    pub window: usize,
}

/// Some queries of a sequence for the heads of a key head, and chunks of the keys that they see.
#[derive(Clone)]
struct Task {
    sequence: usize,
    kv_head: usize,
    queries: Range<usize>,
    chunks: Range<usize>,
    /// Where the result of its first chunk goes, counted in numbers; `None` if the task joins them.
    place: Option<usize>,
}

/// What a chunk gives some rows, or the chunks so far: `(rows, width)`, not yet divided by the sums of weights.
struct Part<'a, A> {
    /// The largest score of every row, and its sum of weights.
    top: &'a mut [A],
    total: &'a mut [A],
    values: &'a mut [A],
}

impl<T: Element> Problem<'_, T> {
    fn group(&self) -> usize {
        self.sizes.heads / self.sizes.kv_heads
    }

    fn kind(&self) -> Kind {
        if T::DTYPE == DType::BF16 { Kind::for_bf16() } else { Kind::Plain }
    }

    /// Numbers from one row of a part to the next.
    fn width(&self) -> usize {
        sum_stride(self.sizes.head_dim)
    }

    /// Numbers of a part of so many rows, with the spare rows of a product.
    fn part_size(&self, rows: usize) -> usize {
        2 * rows + sum_count(rows, self.width())
    }

    fn part<'a>(&self, rows: usize, numbers: &'a mut [T::Acc]) -> Part<'a, T::Acc> {
        let (top, rest) = numbers.split_at_mut(rows);
        let (total, values) = rest.split_at_mut(rows);
        Part { top, total, values }
    }

    /// The keys that query `query` of a sequence sees.
    #[inline(always)]
    fn seen(&self, span: &Span, query: usize) -> Range<usize> {
        let end = span.keys - span.queries + query + 1;
        end.saturating_sub(self.window)..end
    }

    /// The keys that any of some queries sees.
    fn seen_by_any(&self, span: &Span, queries: &Range<usize>) -> Range<usize> {
        self.seen(span, queries.start).start..self.seen(span, queries.end - 1).end
    }

    /// Of all sequences, with all chunks.
    fn tasks(&self) -> Vec<Task> {
        let step = (ROWS / self.group().max(1)).max(1);
        let mut tasks = Vec::new();
        for (sequence, span) in self.sequences.spans.iter().enumerate() {
            for first in (0..span.queries).step_by(step) {
                let queries = first..(first + step).min(span.queries);
                let seen = self.seen_by_any(span, &queries);
                let chunks = seen.start / CHUNK..seen.end.div_ceil(CHUNK);
                for kv_head in 0..self.sizes.kv_heads {
                    let (queries, chunks) = (queries.clone(), chunks.clone());
                    tasks.push(Task { sequence, kv_head, queries, chunks, place: None });
                }
            }
        }
        tasks
    }

    pub(super) fn forward(&self, o: &mut [T]) {
        if o.is_empty() {
            return;
        }
        let whole = self.tasks();
        let scores: usize = whole.iter().map(|task| task.queries.len() * task.chunks.len()).sum();
        let parallel = scores * CHUNK * self.group() > PARALLEL_SCORES;
        let o = Disjoint::new(o);
        let all_chunks: usize = whole.iter().map(|task| task.chunks.len()).sum();
        // As many chunks to each task, of short sequences and of long ones.
        let enough = ENOUGH_TASKS.min(TASKS_OF_A_THREAD * threads());
        let most = all_chunks.div_ceil(enough).max(CHUNKS);
        if whole.len() >= enough || whole.iter().all(|task| task.chunks.len() <= most) {
            for_each_index(whole.len(), parallel, |index| {
                let rows = whole[index].queries.len() * self.group();
                let mut numbers = Scratch::new(self.part_size(rows));
                let mut sums = self.part(rows, &mut numbers);
                self.run(&whole[index], |chunk, part| {
                    self.join_all(&whole[index], chunk, &mut sums, part);
                });
                self.write(&whole[index], &mut sums, &o);
            });
            return;
        }
        let (mut parts, mut places, mut size) = (Vec::new(), Vec::new(), 0);
        for task in &whole {
            places.push(size);
            for start in task.chunks.clone().step_by(most) {
                let chunks = start..(start + most).min(task.chunks.end);
                let place = Some(size + (start - task.chunks.start) * self.task_size(task));
                parts.push(Task { chunks, place, ..task.clone() });
            }
            size += task.chunks.len() * self.task_size(task);
        }
        let mut numbers = Scratch::new(size);
        {
            let numbers = Disjoint::new(&mut numbers);
            for_each_index(parts.len(), parallel, |index| {
                let task = &parts[index];
                let mut place = task.place.unwrap_or_default();
                let size = self.task_size(task);
                self.run(task, |_, part| {
                    // SAFETY: every chunk of a task has its own place.
                    let target = unsafe { numbers.slice(place..place + size) };
                    let rows = task.queries.len() * self.group();
                    let target = self.part(rows, target);
                    target.top.copy_from_slice(part.top);
                    target.total.copy_from_slice(part.total);
                    target.values.copy_from_slice(part.values);
                    place += size;
                });
            });
        }
        let numbers = Disjoint::new(&mut numbers);
        for_each_index(whole.len(), parallel, |index| {
            let (task, size) = (&whole[index], self.task_size(&whole[index]));
            let rows = task.queries.len() * self.group();
            let mut sums = Scratch::new(size);
            let mut sums = self.part(rows, &mut sums);
            for (order, chunk) in task.chunks.clone().enumerate() {
                let place = places[index] + order * size;
                // SAFETY: every task reads its own parts.
                let mut part = self.part(rows, unsafe { numbers.slice(place..place + size) });
                self.join_all(task, chunk, &mut sums, &mut part);
            }
            self.write(task, &mut sums, &o);
        });
    }

    /// Numbers of a part of a task.
    fn task_size(&self, task: &Task) -> usize {
        self.part_size(task.queries.len() * self.group())
    }

    /// Calls `take` with what each chunk gives.
    fn run(&self, task: &Task, take: impl FnMut(usize, &mut Part<T::Acc>)) {
        #[cfg(target_arch = "x86_64")]
        if T::DTYPE == DType::BF16
            && self.sequences.spans[task.sequence].queries * self.group() <= FEW_ROWS
            && !self.sequences.is_invariant
            && few_rows::is_there()
        {
            return self.run_in_place(task, take);
        }
        self.run_packed(task, take);
    }

    /// As [`Self::run`], of keys and values where they lie, in bf16.
    #[cfg(target_arch = "x86_64")]
    fn run_in_place(&self, task: &Task, mut take: impl FnMut(usize, &mut Part<T::Acc>)) {
        let head_dim = self.sizes.head_dim;
        let width = self.width();
        let span = &self.sequences.spans[task.sequence];
        let rows = task.queries.len() * self.group();
        let seen_by_any = self.seen_by_any(span, &task.queries);
        let mut q = unwritten::<T>(rows * head_dim);
        self.gather_queries(task, span, &mut q);
        let mut weights = unwritten::<bf16>(rows * CHUNK);
        let mut scores = Scratch::new(rows * CHUNK);
        let mut numbers = Scratch::new(self.part_size(rows));
        let mut part = self.part(rows, &mut numbers);
        let mut copies = [Vec::new(), Vec::new()];
        let in_copies = array::from_fn(|key| key * head_dim);
        let mut next = self.places(task, task.chunks.start, &seen_by_any);
        for chunk in task.chunks.clone() {
            let here = next;
            next = match chunk + 1 {
                end if end == task.chunks.end => Places { starts: here.starts, count: 0 },
                chunk => self.places(task, chunk, &seen_by_any),
            };
            let keys = chunk * CHUNK..chunk * CHUNK + here.count;
            let [of_keys, of_values] = &mut copies;
            let values = self.lines(&self.values, &here, &in_copies, of_values);
            let lines = self.lines(&self.keys, &here, &in_copies, of_keys);
            lines.scores(bf16s(&q), f32s(&mut scores), CHUNK, values);
            self.soften_all(task, span, keys, &mut scores, &mut part);
            vectorize(
                #[inline(always)]
                || bf16::narrow(f32s(&mut scores), &mut weights),
            );
            for weights in weights.chunks_exact_mut(CHUNK) {
                weights[here.count..].fill(bf16::ZERO);
            }
            let next = match &self.keys {
                Rows::Dense(rows) => Lines::new(bf16s(rows), &next.starts[..next.count], head_dim),
                Rows::Rounded(_) => lines.none(),
            };
            values.sums(&weights, CHUNK, &mut f32s(part.values)[..rows * width], width, next);
            take(chunk, &mut part);
        }
    }

    /// The rows of a pool at these places, copied to others if the pool has codes.
    #[cfg(target_arch = "x86_64")]
    fn lines<'a>(
        &self,
        pool: &'a Rows<T>,
        places: &'a Places,
        in_copy: &'a [usize; CHUNK],
        copy: &'a mut Vec<T>,
    ) -> Lines<'a> {
        let head_dim = self.sizes.head_dim;
        let starts = &places.starts[..places.count];
        match pool {
            Rows::Dense(rows) => Lines::new(bf16s(rows), starts, head_dim),
            Rows::Rounded(rows) => {
                copy.resize(CHUNK * head_dim, T::from_f64(0.0));
                vectorize(
                    #[inline(always)]
                    || {
                        for (start, row) in starts.iter().zip(copy.chunks_exact_mut(head_dim)) {
                            rows.read(start / head_dim, row);
                        }
                    },
                );
                Lines::new(bf16s(copy), &in_copy[..places.count], head_dim)
            }
        }
    }

    /// Where a chunk's keys are in the pools. Any stands for those that no query sees, whose weights are 0.
    #[cfg(target_arch = "x86_64")]
    fn places(&self, task: &Task, chunk: usize, seen_by_any: &Range<usize>) -> Places {
        let start = chunk * CHUNK;
        let seen = seen_by_any.start.max(start)..seen_by_any.end.min(start + CHUNK);
        let mut places = Places { starts: [0; CHUNK], count: seen.end - start };
        for (run, first) in self.runs(task, seen.clone()) {
            let starts = &mut places.starts[run.start - start..run.end - start];
            for (order, place) in starts.iter_mut().enumerate() {
                *place = (first + order * self.sizes.kv_heads) * self.sizes.head_dim;
            }
        }
        let any = places.starts[seen.start - start];
        places.starts[..seen.start - start].fill(any);
        places
    }

    /// The keys of a task in this range, those of a block together, with the row of the first in the pools. The others follow
    /// `kv_heads` rows apart.
    #[inline(always)]
    fn runs(&self, task: &Task, keys: Range<usize>) -> impl Iterator<Item = (Range<usize>, usize)> {
        let block = self.sequences.block;
        let table = self.sequences.table(task.sequence);
        (keys.start / block..keys.end.div_ceil(block)).map(move |index| {
            let run = keys.start.max(index * block)..keys.end.min((index + 1) * block);
            let first = table[index] as usize * block + run.start % block;
            (run, first * self.sizes.kv_heads + task.kv_head)
        })
    }

    /// As [`Self::run`], of keys and values that are gathered and packed.
    fn run_packed(&self, task: &Task, mut take: impl FnMut(usize, &mut Part<T::Acc>)) {
        let Sizes { head_dim, .. } = self.sizes;
        let span = &self.sequences.spans[task.sequence];
        let (kind, group) = (self.kind(), self.group());
        let rows = task.queries.len() * group;
        let seen_by_any = self.seen_by_any(span, &task.queries);
        // Queries, then keys and values of a chunk.
        let mut gathered = unwritten::<T>(rows.max(CHUNK) * head_dim);
        self.gather_queries(task, span, &mut gathered[..rows * head_dim]);
        let q =
            Lhs::pack_here(kind, rows, head_dim, Operand::lines(T::values(&gathered), head_dim));
        let mut scores = Scratch::new(sum_count(rows, CHUNK));
        let mut numbers = Scratch::new(self.part_size(rows));
        let mut part = self.part(rows, &mut numbers);
        for chunk in task.chunks.clone() {
            let start = chunk * CHUNK;
            let columns = CHUNK.min(seen_by_any.end - start);
            let seen = seen_by_any.start.max(start)..start + columns;
            let gathered = &mut gathered[..columns * head_dim];
            self.gather(&self.keys, task, start, seen.clone(), gathered);
            let lines = Operand::lines(T::values(gathered), head_dim);
            let keys = Panels::pack(kind, columns, head_dim, lines);
            multiply(&q, 0..rows, &keys, 0..columns, &mut scores, CHUNK, false);
            self.soften_all(task, span, start..start + columns, &mut scores, &mut part);
            self.gather(&self.values, task, start, seen, gathered);
            let across = Operand::columns(T::values(gathered), head_dim);
            let values = Panels::pack(kind, head_dim, columns, across);
            let weights = Operand::lines(Values::Native(&scores), CHUNK);
            let weights = Lhs::pack_here(kind, rows, columns, weights);
            multiply(&weights, 0..rows, &values, 0..head_dim, part.values, self.width(), false);
            take(chunk, &mut part);
        }
    }

    /// The rows of a task: those of one query lie together.
    fn gather_queries(&self, task: &Task, span: &Span, target: &mut [T]) {
        let head_dim = self.sizes.head_dim;
        let [of_token, of_head] = self.q.strides;
        let first_head = task.kv_head * self.group();
        for (row, target) in target.chunks_exact_mut(head_dim).enumerate() {
            let token = span.first + task.queries.start + row / self.group();
            let head = first_head + row % self.group();
            let from = self.q.start + token * of_token + head * of_head;
            target.copy_from_slice(&self.q.storage[from..from + head_dim]);
        }
    }

    /// The rows of a pool for the keys from `start` on, of which those `seen` are read and others are zeros.
    fn gather(
        &self,
        pool: &Rows<T>,
        task: &Task,
        start: usize,
        seen: Range<usize>,
        target: &mut [T],
    ) {
        let Sizes { kv_heads, head_dim, .. } = self.sizes;
        let (hidden, mut target) = target.split_at_mut((seen.start - start) * head_dim);
        hidden.fill(T::from_f64(0.0));
        for (run, first) in self.runs(task, seen) {
            let (rows, rest) = target.split_at_mut(run.len() * head_dim);
            pool.read(first, kv_heads, head_dim, rows);
            target = rest;
        }
    }

    /// Products become weights relative to the largest score of their row, zeros for keys that a row doesn't
    /// see.
    fn soften_all(
        &self,
        task: &Task,
        span: &Span,
        keys: Range<usize>,
        scores: &mut [T::Acc],
        part: &mut Part<T::Acc>,
    ) {
        let rows = task.queries.len() * self.group();
        vectorize(
            #[inline(always)]
            || {
                for (row, scores) in scores.chunks_exact_mut(CHUNK).take(rows).enumerate() {
                    let seen = self.seen(span, task.queries.start + row / self.group());
                    let seen = clip(seen, &keys);
                    scores[..seen.start].fill(T::Acc::ZERO);
                    scores[seen.end..keys.len()].fill(T::Acc::ZERO);
                    (part.top[row], part.total[row]) =
                        soften(&mut scores[seen], self.scale, self.softcap);
                }
            },
        );
    }

    /// Adds what a chunk gives to what the chunks before it gave.
    fn join_all(
        &self,
        task: &Task,
        chunk: usize,
        sums: &mut Part<T::Acc>,
        part: &mut Part<T::Acc>,
    ) {
        let Sizes { head_dim, .. } = self.sizes;
        let span = &self.sequences.spans[task.sequence];
        let keys = chunk * CHUNK..(chunk + 1) * CHUNK;
        vectorize(
            #[inline(always)]
            || {
                let rows = task.queries.len() * self.group();
                for row in 0..rows {
                    let seen = self.seen(span, task.queries.start + row / self.group());
                    if clip(seen.clone(), &keys).is_empty() {
                        continue;
                    }
                    let place = row * self.width()..row * self.width() + head_dim;
                    let before = (sums.top[row], sums.total[row]);
                    let of_chunk = (part.top[row], part.total[row]);
                    let part = (of_chunk, &part.values[place.clone()]);
                    let values = &mut sums.values[place];
                    (sums.top[row], sums.total[row]) =
                        join(keys.contains(&seen.start), before, values, part);
                }
            },
        );
    }

    /// Writes the rows of a task.
    fn write(&self, task: &Task, sums: &mut Part<T::Acc>, o: &Disjoint<T>) {
        let Sizes { heads, head_dim, .. } = self.sizes;
        let span = &self.sequences.spans[task.sequence];
        vectorize(
            #[inline(always)]
            || {
                let rows = task.queries.len() * self.group();
                for row in 0..rows {
                    let values = &mut sums.values[row * self.width()..][..head_dim];
                    let token = span.first + task.queries.start + row / self.group();
                    let head = task.kv_head * self.group() + row % self.group();
                    let end = end_row((sums.top[row], sums.total[row]), self.sinks.get(head));
                    values.iter_mut().for_each(|value| *value *= end.factor);
                    let start = (token * heads + head) * head_dim;
                    // SAFETY: every row belongs to one task.
                    T::narrow(values, unsafe { o.slice(start..start + head_dim) });
                }
            },
        );
    }
}

/// Where rows of a chunk begin in a pool.
#[cfg(target_arch = "x86_64")]
struct Places {
    starts: [usize; CHUNK],
    count: usize,
}

/// bf16 numbers as such.
#[cfg(target_arch = "x86_64")]
fn bf16s<T: Element>(numbers: &[T]) -> &[bf16] {
    match T::values(numbers) {
        Values::Bf16(numbers) => numbers,
        _ => &[],
    }
}

/// Sums of bf16 numbers as such.
#[cfg(target_arch = "x86_64")]
fn f32s<A: Real>(sums: &mut [A]) -> &mut [f32] {
    as_f32_mut(sums).unwrap_or_default()
}

/// The part of `seen` that lies in `keys`, counted from their start.
#[inline(always)]
fn clip(seen: Range<usize>, keys: &Range<usize>) -> Range<usize> {
    let begin = seen.start.clamp(keys.start, keys.end) - keys.start;
    let end = seen.end.clamp(keys.start, keys.end) - keys.start;
    begin..end.max(begin)
}
