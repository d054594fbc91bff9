//! Attention on the CPU. Keys and values are laid out once for all heads that share them; a task of
//! the forward pass is a block of queries of one head, a task of the backward pass half of one head,
//! whose key and value gradients are then added up over the group in order. A few queries (decoding) are
//! passes over the keys and values as they are stored.
//!
//! Forward, each tile of keys is softened by itself, and joined with those before it: as paged/cpu.rs does, so
//! that more than [`FEW_ROWS`] queries give the same bits in both, but for few bf16 rows there.

use super::Sizes;
use crate::backend::cpu::gemm::{Kind, Lhs, Operand, Panels, multiply, sum_count, sum_stride};
use crate::backend::cpu::{
    Disjoint, Element, Real, Values, dot, for_each_chunk2, for_each_index, max as largest_of,
    rows_per_task, sum, unwritten,
};
use crate::matmul::few_rows::{FEW_ROWS, add_combinations, dots};
use candle_core::{Layout, Result};
use metal_candle_cpu::scratch::Scratch;
use metal_candle_cpu::simd::vectorize;
use std::ops::Range;

/// Queries of a tile.
const ROWS: usize = 128;
/// Keys of a tile.
pub(super) const COLUMNS: usize = 128;
/// Parts that the queries of a head are cut into in the backward pass at most.
const PARTS: usize = 2;
/// Score elements below which threads cost more than they bring.
const PARALLEL_SCORES: usize = 2 * 1024;

/// Keys or values `(batch, seq, kv_heads, head_dim)`, read through their strides.
pub(super) struct Cache<'a, A> {
    storage: Values<'a, A>,
    start: usize,
    /// Of batch, seq and heads; the last dimension is contiguous.
    strides: [usize; 3],
}

impl<'a, A: Real> Cache<'a, A> {
    pub(super) fn new(storage: Values<'a, A>, layout: &Layout) -> Result<Self> {
        let strides = match layout.stride() {
            [batch, seq, head, _] => [*batch, *seq, *head],
            other => candle_core::bail!(
                "metal-candle-kernels: attention: found strides {other:?}, expected four"
            ),
        };
        Ok(Cache { storage, start: layout.start_offset(), strides })
    }

    /// Where the element of a key begins.
    fn place(&self, batch: usize, head: usize, key: usize) -> usize {
        let [batch_stride, seq_stride, head_stride] = self.strides;
        self.start + batch * batch_stride + head * head_stride + key * seq_stride
    }

    /// The keys from `key` on: lines of a product over the head's dimension, or its inner
    /// dimension.
    fn operand(&self, batch: usize, head: usize, key: usize, along_depth: bool) -> Operand<'a, A> {
        let start = self.place(batch, head, key);
        Operand { values: self.storage, start, stride: self.strides[1], along_depth }
    }
}

/// The keys or values of one head, laid out for products.
struct Side<A> {
    /// Lines are keys.
    by_key: Option<Panels<A>>,
    /// For every tile of keys, those are the inner dimension.
    across: Vec<Panels<A>>,
}

pub(super) struct Problem<'a, A> {
    pub sizes: Sizes,
    /// Contiguous.
    pub q: Values<'a, A>,
    pub keys: Cache<'a, A>,
    pub values: Cache<'a, A>,
    /// `[first, last)` of the keys that each query of each row sees.
    pub ranges: Vec<(usize, usize)>,
    pub scale: A,
    pub softcap: Option<A>,
    /// Of each head, if there are any.
    pub sinks: Vec<A>,
}

impl<A: Real> Problem<'_, A> {
    /// Where the row of a query's head begins in `q` and in the tensors of its shape.
    fn row_start(&self, batch: usize, query: usize, head: usize) -> usize {
        ((batch * self.sizes.queries + query) * self.sizes.heads + head) * self.sizes.head_dim
    }

    /// The rows of a head from query `first` on in a tensor of the shape of `q`.
    fn rows<'b>(
        &self,
        values: Values<'b, A>,
        batch: usize,
        head: usize,
        first: usize,
        along_depth: bool,
    ) -> Operand<'b, A> {
        let start = self.row_start(batch, first, head);
        let stride = self.sizes.heads * self.sizes.head_dim;
        Operand { values, start, stride, along_depth }
    }

    fn kind(&self) -> Kind {
        match (self.q, self.keys.storage, self.values.storage) {
            (Values::Bf16(_), Values::Bf16(_), Values::Bf16(_)) => Kind::for_bf16(),
            _ => Kind::Plain,
        }
    }

    /// The tiles of keys that any query of a block sees.
    fn tiles(&self, ranges: &[(usize, usize)]) -> impl Iterator<Item = Range<usize>> + use<A> {
        let keys = self.sizes.keys;
        let seen = ranges.iter().filter(|(first, last)| first < last);
        let first = seen.clone().map(|(first, _)| *first).min().unwrap_or(0);
        let last = seen.map(|(_, last)| *last).max().unwrap_or(0);
        (first / COLUMNS * COLUMNS..last)
            .step_by(COLUMNS)
            .map(move |start| start..(start + COLUMNS).min(keys))
    }

    #[inline(always)]
    fn cap(&self, scores: &mut [A]) {
        if let Some(cap) = self.softcap {
            for score in scores {
                *score = cap * (*score / cap).tanh();
            }
        }
    }

    /// Lays out the keys or values of every head, for the products that are asked for.
    fn lay_out(&self, cache: &Cache<A>, by_key: bool, across: bool) -> Vec<Side<A>> {
        let Sizes { batch, keys, kv_heads, head_dim, .. } = self.sizes;
        let kind = self.kind();
        let tiles = || (0..if across { keys } else { 0 }).step_by(COLUMNS);
        // All of it is this thread's, to which it goes back.
        let mut sides: Vec<_> = (0..batch * kv_heads)
            .map(|_| Side {
                by_key: by_key.then(|| Panels::empty(kind, keys, head_dim)),
                across: tiles()
                    .map(|start| Panels::empty(kind, head_dim, COLUMNS.min(keys - start)))
                    .collect(),
            })
            .collect();
        let targets = Disjoint::new(&mut sides);
        for_each_index(
            batch * kv_heads,
            keys * head_dim > PARALLEL_SCORES,
            #[inline(always)]
            |index| {
                let (batch, head) = (index / kv_heads, index % kv_heads);
                // SAFETY: every task fills its own place.
                let side = unsafe { &mut targets.slice(index..index + 1)[0] };
                if let Some(by_key) = &mut side.by_key {
                    by_key.fill(cache.operand(batch, head, 0, true));
                }
                for (start, tile) in tiles().zip(&mut side.across) {
                    tile.fill(cache.operand(batch, head, start, false));
                }
            },
        );
        sides
    }

    pub(super) fn forward<T: Element<Acc = A>>(&self, o: &mut [T], log_sum_exp: &mut [A]) {
        let Sizes { batch, queries, keys, heads, .. } = self.sizes;
        let parallel = batch * heads * queries * keys > PARALLEL_SCORES;
        let (o, log_sum_exp) = (Disjoint::new(o), Disjoint::new(log_sum_exp));
        if queries <= FEW_ROWS {
            for_each_index(
                batch * heads * queries,
                parallel,
                #[inline(always)]
                |task| {
                    let (row, query) = (task / queries, task % queries);
                    self.forward_row(row / heads, row % heads, query, &o, &log_sum_exp);
                },
            );
            return;
        }
        let keys = self.lay_out(&self.keys, true, false);
        let values = self.lay_out(&self.values, false, true);
        let blocks = queries.div_ceil(ROWS);
        for_each_index(batch * heads * blocks, parallel, |task| {
            let (row, first) = (task / blocks, task % blocks * ROWS);
            let count = ROWS.min(queries - first);
            let (batch, head) = (row / heads, row % heads);
            let place = self.kv_place(batch, head);
            self.forward_block(
                batch,
                head,
                first,
                count,
                &keys[place],
                &values[place],
                &o,
                &log_sum_exp,
            );
        });
    }

    /// The key head of a head, counted over the batch.
    fn kv_place(&self, batch: usize, head: usize) -> usize {
        let Sizes { heads, kv_heads, .. } = self.sizes;
        batch * kv_heads + head / (heads / kv_heads)
    }

    /// One query of one head.
    #[inline(always)]
    fn forward_row<T: Element<Acc = A>>(
        &self,
        batch: usize,
        head: usize,
        query: usize,
        o: &Disjoint<T>,
        log_sum_exp: &Disjoint<A>,
    ) {
        let Sizes { queries, heads, kv_heads, head_dim, .. } = self.sizes;
        let kv_head = head / (heads / kv_heads);
        let (first, last) = self.ranges[batch * queries + query];
        let count = last - first;
        let start = self.row_start(batch, query, head);
        let mut row = Scratch::new(head_dim);
        self.q.read(start, &mut row);
        let mut scores = Scratch::new(count);
        let (keys, values) = (&self.keys, &self.values);
        let lines = keys.storage.from(keys.place(batch, kv_head, first));
        dots(1, head_dim, &row, lines, keys.strides[1], 0..count, &mut scores);
        scores.iter_mut().for_each(|score| *score *= self.scale);
        self.cap(&mut scores);
        let max = largest_of(&scores);
        for score in scores.iter_mut() {
            *score = (*score - max).exp_nonpositive();
        }
        let total = sum(&scores);
        row.fill(A::ZERO);
        let lines = values.storage.from(values.place(batch, kv_head, first));
        add_combinations(1, count, count, &scores, lines, values.strides[1], 0..head_dim, &mut row);
        let end = end_row((max, total), self.sinks.get(head));
        row.iter_mut().for_each(|value| *value *= end.factor);
        let index = (batch * heads + head) * queries + query;
        // SAFETY: every row of a head belongs to one task.
        unsafe {
            T::narrow(&row, o.slice(start..start + head_dim));
            log_sum_exp.slice(index..index + 1)[0] = end.log_sum_exp;
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn forward_block<T: Element<Acc = A>>(
        &self,
        batch: usize,
        head: usize,
        first: usize,
        rows: usize,
        keys: &Side<A>,
        values: &Side<A>,
        o: &Disjoint<T>,
        log_sum_exp: &Disjoint<A>,
    ) {
        let Sizes { queries, heads, head_dim, .. } = self.sizes;
        let Some(by_key) = &keys.by_key else { return };
        let kind = self.kind();
        let q = Lhs::pack_here(kind, rows, head_dim, self.rows(self.q, batch, head, first, true));
        let ranges = &self.ranges[batch * queries + first..][..rows];
        let mut sums = [(A::NEG_INFINITY, A::ZERO); ROWS];
        let mut of_tile = sums;
        let width = sum_stride(head_dim);
        let mut result = Scratch::zeros(sum_count(rows, width));
        let mut part = Scratch::new(sum_count(rows, width));
        let mut scores = Scratch::new(sum_count(rows, COLUMNS));
        for tile in self.tiles(ranges) {
            let columns = tile.len();
            multiply(&q, 0..rows, by_key, tile.clone(), &mut scores, COLUMNS, false);
            vectorize(
                #[inline(always)]
                || {
                    for (row, scores) in scores.chunks_exact_mut(COLUMNS).take(rows).enumerate() {
                        let seen = clip(ranges[row], tile.start, columns);
                        scores[..seen.start].fill(A::ZERO);
                        scores[seen.end..columns].fill(A::ZERO);
                        of_tile[row] = soften(&mut scores[seen], self.scale, self.softcap);
                    }
                },
            );
            let probabilities = Lhs::pack_here(kind, rows, columns, tile_lines(&scores));
            let values = &values.across[tile.start / COLUMNS];
            multiply(&probabilities, 0..rows, values, 0..head_dim, &mut part, width, false);
            vectorize(
                #[inline(always)]
                || {
                    for row in 0..rows {
                        if clip(ranges[row], tile.start, columns).is_empty() {
                            continue;
                        }
                        let is_first = ranges[row].0 >= tile.start;
                        let place = row * width..row * width + head_dim;
                        let part = (of_tile[row], &part[place.clone()]);
                        sums[row] = join(is_first, sums[row], &mut result[place], part);
                    }
                },
            );
        }
        vectorize(
            #[inline(always)]
            || {
                for row in 0..rows {
                    let result = &mut result[row * width..][..head_dim];
                    let end = end_row(sums[row], self.sinks.get(head));
                    result.iter_mut().for_each(|value| *value *= end.factor);
                    let start = self.row_start(batch, first + row, head);
                    let index = (batch * heads + head) * queries + first + row;
                    // SAFETY: every row of a head belongs to one task.
                    unsafe {
                        T::narrow(result, o.slice(start..start + head_dim));
                        log_sum_exp.slice(index..index + 1)[0] = end.log_sum_exp;
                    }
                }
            },
        );
    }

    pub(super) fn backward<T: Element<Acc = A>>(
        &self,
        o: Values<A>,
        log_sum_exp: &[A],
        d_o: Values<A>,
    ) -> (Vec<T>, Vec<T>, Vec<T>) {
        let Sizes { batch, queries, keys, heads, kv_heads, head_dim } = self.sizes;
        let group = heads / kv_heads;
        let mut dq = unwritten::<T>(self.sizes.q_elements());
        // Parts of a head, for an even load; what each adds to the gradients of keys and values, in
        // tiles with their spare rows.
        let blocks = queries.div_ceil(ROWS);
        let part = blocks.div_ceil(PARTS).max(1) * ROWS;
        let parts = queries.div_ceil(part);
        let width = sum_stride(head_dim);
        let tile_size = sum_count(COLUMNS, width);
        let part_size = keys.div_ceil(COLUMNS) * tile_size;
        let mut dk_parts = Scratch::new(batch * heads * parts * part_size);
        let mut dv_parts = Scratch::new(batch * heads * parts * part_size);
        if keys * head_dim > 0 {
            let (keys, values) =
                (self.lay_out(&self.keys, true, true), self.lay_out(&self.values, true, false));
            let dq = Disjoint::new(&mut dq);
            for_each_chunk2(
                &mut dk_parts,
                part_size,
                &mut dv_parts,
                part_size,
                #[inline(always)]
                |index, dk, dv| {
                    let (row, first) = (index / parts, index % parts * part);
                    let place = self.kv_place(row / heads, row % heads);
                    let sides = (&keys[place], &values[place]);
                    dk.fill(A::ZERO);
                    dv.fill(A::ZERO);
                    self.backward_part(
                        row / heads,
                        row % heads,
                        first..(first + part).min(queries),
                        sides,
                        o,
                        log_sum_exp,
                        d_o,
                        &dq,
                        dk,
                        dv,
                    );
                },
            );
        }
        let mut dk = unwritten::<T>(batch * keys * kv_heads * head_dim);
        let mut dv = unwritten::<T>(batch * keys * kv_heads * head_dim);
        let token = kv_heads * head_dim;
        let tokens = rows_per_task(token);
        for_each_chunk2(
            &mut dk,
            tokens * token,
            &mut dv,
            tokens * token,
            #[inline(always)]
            |index, dk, dv| {
                let mut total = Scratch::new(head_dim);
                let first_row = index * tokens * kv_heads;
                for (sums, out) in [(&dk_parts, dk), (&dv_parts, dv)] {
                    for (row, out) in out.chunks_exact_mut(head_dim).enumerate() {
                        let (token, kv_head) =
                            ((first_row + row) / kv_heads, (first_row + row) % kv_heads);
                        let (batch, key) = (token / keys, token % keys);
                        let place = key / COLUMNS * tile_size + key % COLUMNS * width;
                        let first = (batch * heads + kv_head * group) * parts;
                        total.fill(A::ZERO);
                        for part in first..first + group * parts {
                            let sums = &sums[part * part_size + place..];
                            for (total, sum) in total.iter_mut().zip(sums) {
                                *total += *sum;
                            }
                        }
                        T::narrow(&total, out);
                    }
                }
            },
        );
        (dq, dk, dv)
    }

    #[allow(clippy::too_many_arguments)]
    fn backward_part<T: Element<Acc = A>>(
        &self,
        batch: usize,
        head: usize,
        part: Range<usize>,
        (keys, values): (&Side<A>, &Side<A>),
        o: Values<A>,
        log_sum_exp: &[A],
        d_o: Values<A>,
        dq_out: &Disjoint<T>,
        dk: &mut [A],
        dv: &mut [A],
    ) {
        let Sizes { queries, heads, head_dim, .. } = self.sizes;
        let (Some(keys_by_key), Some(values_by_key)) = (&keys.by_key, &values.by_key) else {
            return;
        };
        let kind = self.kind();
        let log_sum_exp = &log_sum_exp[(batch * heads + head) * queries..][..queries];
        let width = sum_stride(head_dim);
        let mut rows_of = [Scratch::new(head_dim), Scratch::new(head_dim)];
        let mut correction = [A::ZERO; ROWS];
        let mut p = Scratch::new(sum_count(ROWS, COLUMNS));
        let mut dp = Scratch::new(sum_count(ROWS, COLUMNS));
        let mut dq = Scratch::new(sum_count(ROWS, width));
        for first in part.clone().step_by(ROWS) {
            let rows = ROWS.min(part.end - first);
            vectorize(
                #[inline(always)]
                || {
                    for (row, correction) in correction[..rows].iter_mut().enumerate() {
                        let start = self.row_start(batch, first + row, head);
                        let [grad, out] = &mut rows_of;
                        d_o.read(start, grad);
                        o.read(start, out);
                        *correction = dot(grad, out);
                    }
                },
            );
            let lines = |values| self.rows(values, batch, head, first, true);
            let across = |values| self.rows(values, batch, head, first, false);
            let q = Lhs::pack_here(kind, rows, head_dim, lines(self.q));
            let grad = Lhs::pack_here(kind, rows, head_dim, lines(d_o));
            let q_across = Panels::pack(kind, head_dim, rows, across(self.q));
            let grad_across = Panels::pack(kind, head_dim, rows, across(d_o));
            let ranges = &self.ranges[batch * queries + first..][..rows];
            dq.fill(A::ZERO);
            for tile in self.tiles(ranges) {
                let columns = tile.len();
                multiply(&q, 0..rows, keys_by_key, tile.clone(), &mut p, COLUMNS, false);
                multiply(&grad, 0..rows, values_by_key, tile.clone(), &mut dp, COLUMNS, false);
                // p becomes the probabilities and dp the gradient of the raw scores.
                vectorize(
                    #[inline(always)]
                    || {
                        let pairs = p.chunks_exact_mut(COLUMNS).zip(dp.chunks_exact_mut(COLUMNS));
                        for (row, (p, dp)) in pairs.take(rows).enumerate() {
                            let seen = clip(ranges[row], tile.start, columns);
                            for hidden in [0..seen.start, seen.end..columns] {
                                p[hidden.clone()].fill(A::ZERO);
                                dp[hidden].fill(A::ZERO);
                            }
                            let (p, dp) = (&mut p[seen.clone()], &mut dp[seen]);
                            let (total, correction) = (log_sum_exp[first + row], correction[row]);
                            p.iter_mut().for_each(|score| *score *= self.scale);
                            let Some(cap) = self.softcap else {
                                for (p, dp) in p.iter_mut().zip(dp) {
                                    *p = (*p - total).exp();
                                    *dp = *p * (*dp - correction) * self.scale;
                                }
                                continue;
                            };
                            self.cap(p);
                            for (p, dp) in p.iter_mut().zip(dp) {
                                let ratio = *p / cap;
                                *p = (*p - total).exp();
                                *dp = *p * (*dp - correction) * self.scale;
                                *dp *= A::ONE - ratio * ratio;
                            }
                        }
                    },
                );
                let place = tile.start / COLUMNS * sum_count(COLUMNS, width);
                for (scores, right, out) in
                    [(&p, &grad_across, &mut *dv), (&dp, &q_across, &mut *dk)]
                {
                    let transposed = Lhs::pack_here(kind, columns, rows, tile_columns(scores));
                    let out = &mut out[place..];
                    multiply(&transposed, 0..columns, right, 0..head_dim, out, width, true);
                }
                let scores = Lhs::pack_here(kind, rows, columns, tile_lines(&dp));
                let keys = &keys.across[tile.start / COLUMNS];
                multiply(&scores, 0..rows, keys, 0..head_dim, &mut dq, width, true);
            }
            for row in 0..rows {
                let start = self.row_start(batch, first + row, head);
                // SAFETY: every row of a head belongs to one task.
                let target = unsafe { dq_out.slice(start..start + head_dim) };
                T::narrow(&dq[row * width..][..head_dim], target);
            }
        }
    }
}

/// Products of a query with the keys of a tile become weights relative to the largest score. Gives that and
/// their sum.
#[inline(always)]
pub(super) fn soften<A: Real>(scores: &mut [A], scale: A, softcap: Option<A>) -> (A, A) {
    scores.iter_mut().for_each(|score| *score *= scale);
    if let Some(cap) = softcap {
        scores.iter_mut().for_each(|score| *score = cap * (*score / cap).tanh());
    }
    let top = largest_of(scores);
    for score in scores.iter_mut() {
        *score = (*score - top).exp_nonpositive();
    }
    (top, sum(scores))
}

/// Adds what a tile of keys gives a query, `part`, to what the tiles before it gave: the largest score, the sum
/// of weights, and the values by their weights. Gives the first two of the result.
#[inline(always)]
pub(super) fn join<A: Real>(
    is_first: bool,
    (top, total): (A, A),
    values: &mut [A],
    ((part_top, part_total), part): ((A, A), &[A]),
) -> (A, A) {
    if is_first {
        values.copy_from_slice(part);
        return (part_top, part_total);
    }
    if part_top > top {
        let shrink = (top - part_top).exp_nonpositive();
        for (value, part) in values.iter_mut().zip(part) {
            *value = *value * shrink + *part;
        }
        return (part_top, total * shrink + part_total);
    }
    let shrink = (part_top - top).exp_nonpositive();
    for (value, part) in values.iter_mut().zip(part) {
        *value += *part * shrink;
    }
    (top, total + part_total * shrink)
}

/// What a row's values are multiplied by, and its `log_sum_exp`.
pub(super) struct RowEnd<A> {
    pub factor: A,
    pub log_sum_exp: A,
}

/// The end of a row with this largest score and this sum of weights of all keys that it sees, and the sink of its head, if
/// it has one.
#[inline(always)]
pub(super) fn end_row<A: Real>((top, total): (A, A), sink: Option<&A>) -> RowEnd<A> {
    match sink {
        Some(sink) if *sink > top => {
            let shrink = (top - *sink).exp_nonpositive();
            let total = total * shrink + A::ONE;
            RowEnd { factor: shrink / total, log_sum_exp: *sink + total.ln() }
        }
        // No key is seen.
        _ if total == A::ZERO => RowEnd { factor: A::ZERO, log_sum_exp: A::NEG_INFINITY },
        _ => {
            let total = sink.map_or(total, |sink| total + (*sink - top).exp_nonpositive());
            RowEnd { factor: A::ONE / total, log_sum_exp: top + total.ln() }
        }
    }
}

/// See [`super::backward_sinks`]; sizes are rows, queries of a row, and elements of a head.
pub(super) fn backward_sinks<A: Real>(
    [batch, queries, head_dim]: [usize; 3],
    sinks: Values<A>,
    o: Values<A>,
    log_sum_exp: &[A],
    d_o: Values<A>,
    gradients: &mut [A],
) {
    let heads = gradients.len();
    let mut of_heads = vec![A::ZERO; heads];
    sinks.read(0, &mut of_heads);
    let gradients = Disjoint::new(gradients);
    for_each_index(
        heads,
        batch * queries * heads * head_dim > PARALLEL_SCORES,
        #[inline(always)]
        |head| {
            let (mut out, mut grad) = (Scratch::new(head_dim), Scratch::new(head_dim));
            let mut total = A::ZERO;
            for token in 0..batch * queries {
                let start = (token * heads + head) * head_dim;
                o.read(start, &mut out);
                d_o.read(start, &mut grad);
                let row = (token / queries * heads + head) * queries + token % queries;
                total += (of_heads[head] - log_sum_exp[row]).exp() * dot(&grad, &out);
            }
            // SAFETY: a head has one task.
            unsafe { gradients.slice(head..head + 1)[0] = -total };
        },
    );
}

/// The rows of a tile as lines of a left side.
fn tile_lines<A>(scores: &[A]) -> Operand<'_, A> {
    Operand { values: Values::Native(scores), start: 0, stride: COLUMNS, along_depth: true }
}

/// The columns of a tile as lines of a left side.
fn tile_columns<A>(scores: &[A]) -> Operand<'_, A> {
    Operand { values: Values::Native(scores), start: 0, stride: COLUMNS, along_depth: false }
}

/// The part of the visible keys that lies in the tile at `start`, counted from there.
#[inline(always)]
fn clip((first, last): (usize, usize), start: usize, columns: usize) -> Range<usize> {
    let begin = first.clamp(start, start + columns) - start;
    let end = last.clamp(start, start + columns) - start;
    begin..end.max(begin)
}
