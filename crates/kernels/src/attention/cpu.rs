//! Attention on the CPU. A task of the forward pass is a block of queries of all heads that share a
//! key head, so that a key tile is read once for all of them; a task of the backward pass is one
//! head, whose key and value gradients are then added up over the group in order. Tiles are
//! products of `gemm` on one thread.

use super::Sizes;
use crate::device::cpu::{
    Disjoint, Element, Matrix, MatrixMut, Real, Threads, Values, dot, for_each_chunk2,
    for_each_index, multiply, rows_per_task, sum, zeros,
};
use candle_core::{Layout, Result};
use std::ops::Range;

/// Queries times heads of a tile.
const ROWS: usize = 64;
/// Keys of a tile.
const COLUMNS: usize = 128;
/// Score elements below which threads cost more than they bring.
const PARALLEL_SCORES: usize = 4 * 1024;

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

    /// Some keys of one head as a `(keys, head_dim)` matrix, converted into `scratch` if need be.
    fn tile<'b>(
        &'b self,
        batch: usize,
        head: usize,
        keys: Range<usize>,
        head_dim: usize,
        scratch: &'b mut Vec<A>,
    ) -> Matrix<'b, A> {
        let [batch_stride, seq_stride, head_stride] = self.strides;
        let start =
            self.start + batch * batch_stride + head * head_stride + keys.start * seq_stride;
        if let Values::Native(storage) = self.storage {
            return Matrix::new(&storage[start..], keys.len(), head_dim, seq_stride);
        }
        scratch.resize(keys.len() * head_dim, A::ZERO);
        for (key, target) in scratch.chunks_exact_mut(head_dim.max(1)).enumerate() {
            self.storage.read(start + key * seq_stride, target);
        }
        Matrix::new(scratch, keys.len(), head_dim, head_dim)
    }
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
}

impl<A: Real> Problem<'_, A> {
    /// Where the row of a query's head begins in `q` and in the tensors of its shape.
    fn row_start(&self, batch: usize, query: usize, head: usize) -> usize {
        ((batch * self.sizes.queries + query) * self.sizes.heads + head) * self.sizes.head_dim
    }

    /// The first and last key that any query of a block sees; empty when none sees any.
    fn block_range(ranges: &[(usize, usize)]) -> Range<usize> {
        let seen = ranges.iter().filter(|(first, last)| first < last);
        let first = seen.clone().map(|(first, _)| *first).min().unwrap_or(0);
        let last = seen.map(|(_, last)| *last).max().unwrap_or(0);
        first..last
    }

    fn cap(&self, scores: &mut [A]) {
        if let Some(cap) = self.softcap {
            for score in scores {
                *score = cap * (*score / cap).tanh();
            }
        }
    }

    pub(super) fn forward<T: Element<Acc = A>>(&self, o: &mut [T], log_sum_exp: &mut [A]) {
        let Sizes { batch, queries, keys, heads, kv_heads, .. } = self.sizes;
        let group = heads / kv_heads;
        let block = (ROWS / group.max(1)).max(1);
        let blocks = queries.div_ceil(block);
        let parallel = batch * heads * queries * keys > PARALLEL_SCORES;
        let (o, log_sum_exp) = (Disjoint::new(o), Disjoint::new(log_sum_exp));
        for_each_index(
            batch * kv_heads * blocks,
            parallel,
            #[inline(always)]
            |task| {
                let (row, block_index) = (task / blocks, task % blocks);
                let first = block_index * block;
                let count = block.min(queries - first);
                self.forward_block(row / kv_heads, row % kv_heads, first, count, &o, &log_sum_exp);
            },
        );
    }

    /// Rows are `head in the group · count + query in the block`.
    fn forward_block<T: Element<Acc = A>>(
        &self,
        batch: usize,
        kv_head: usize,
        first: usize,
        count: usize,
        o: &Disjoint<T>,
        log_sum_exp: &Disjoint<A>,
    ) {
        let Sizes { queries, heads, kv_heads, head_dim, .. } = self.sizes;
        let group = heads / kv_heads;
        let rows = group * count;
        let place = |row: usize| (kv_head * group + row / count, first + row % count);
        let mut q = vec![A::ZERO; rows * head_dim];
        for row in 0..rows {
            let (head, query) = place(row);
            let q = &mut q[row * head_dim..][..head_dim];
            self.q.read(self.row_start(batch, query, head), q);
            q.iter_mut().for_each(|q| *q *= self.scale);
        }
        let ranges = &self.ranges[batch * queries + first..][..count];
        let mut max = vec![A::NEG_INFINITY; rows];
        let mut total = vec![A::ZERO; rows];
        let mut result = vec![A::ZERO; rows * head_dim];
        let (mut key_scratch, mut value_scratch) = (Vec::new(), Vec::new());
        let mut scores = vec![A::ZERO; rows * COLUMNS];
        let range = Self::block_range(ranges);
        for start in range.clone().step_by(COLUMNS) {
            let columns = COLUMNS.min(range.end - start);
            let tile = start..start + columns;
            let k = self.keys.tile(batch, kv_head, tile.clone(), head_dim, &mut key_scratch);
            let v = self.values.tile(batch, kv_head, tile, head_dim, &mut value_scratch);
            let queries = Matrix::new(&q, rows, head_dim, head_dim);
            let scores = &mut scores[..rows * columns];
            let target = MatrixMut::new(scores, rows, columns, columns);
            multiply(target, false, queries, k.transpose(), A::ONE, Threads::One);
            for (row, scores) in scores.chunks_exact_mut(columns).enumerate() {
                let (seen_first, seen_last) = ranges[row % count];
                let seen = clip(seen_first, seen_last, start, columns);
                scores[..seen.start].fill(A::ZERO);
                scores[seen.end..].fill(A::ZERO);
                if seen.is_empty() {
                    continue;
                }
                let scores = &mut scores[seen];
                self.cap(scores);
                let mut new_max = max[row];
                for score in scores.iter() {
                    new_max = if *score > new_max { *score } else { new_max };
                }
                for score in scores.iter_mut() {
                    *score = (*score - new_max).exp();
                }
                let shrink = (max[row] - new_max).exp();
                if total[row] != A::ZERO {
                    for value in &mut result[row * head_dim..][..head_dim] {
                        *value *= shrink;
                    }
                    total[row] *= shrink;
                }
                total[row] += sum(scores);
                max[row] = new_max;
            }
            let probabilities = Matrix::new(scores, rows, columns, columns);
            let target = MatrixMut::new(&mut result, rows, head_dim, head_dim);
            multiply(target, true, probabilities, v, A::ONE, Threads::One);
        }
        for row in 0..rows {
            let (head, query) = place(row);
            let result = &mut result[row * head_dim..][..head_dim];
            let (seen_first, seen_last) = ranges[row % count];
            let seen = seen_first < seen_last;
            if seen {
                let inverse = A::ONE / total[row];
                result.iter_mut().for_each(|value| *value *= inverse);
            }
            let start = self.row_start(batch, query, head);
            let index = (batch * heads + head) * queries + query;
            // SAFETY: every row of a head belongs to one task.
            unsafe {
                T::narrow(result, o.slice(start..start + head_dim));
                log_sum_exp.slice(index..index + 1)[0] =
                    if seen { max[row] + total[row].ln() } else { A::NEG_INFINITY };
            }
        }
    }

    pub(super) fn backward<T: Element<Acc = A>>(
        &self,
        o: Values<A>,
        log_sum_exp: &[A],
        d_o: Values<A>,
    ) -> (Vec<T>, Vec<T>, Vec<T>) {
        let Sizes { batch, queries, keys, heads, kv_heads, head_dim } = self.sizes;
        let group = heads / kv_heads;
        let mut dq = zeros::<T>(self.sizes.q_elements());
        // One (keys, head_dim) matrix for every head, before the groups are added up.
        let head_size = keys * head_dim;
        let mut dk_heads = vec![A::ZERO; batch * heads * head_size];
        let mut dv_heads = vec![A::ZERO; batch * heads * head_size];
        if head_size > 0 {
            let dq = Disjoint::new(&mut dq);
            let task = |index: usize, dk: &mut [A], dv: &mut [A]| {
                self.backward_head(index / heads, index % heads, o, log_sum_exp, d_o, &dq, dk, dv)
            };
            for_each_chunk2(&mut dk_heads, head_size, &mut dv_heads, head_size, task);
        }
        let mut dk = zeros::<T>(batch * keys * kv_heads * head_dim);
        let mut dv = zeros::<T>(batch * keys * kv_heads * head_dim);
        let token = kv_heads * head_dim;
        let tokens = rows_per_task(token);
        for_each_chunk2(
            &mut dk,
            tokens * token,
            &mut dv,
            tokens * token,
            #[inline(always)]
            |index, dk, dv| {
                let mut total = vec![A::ZERO; head_dim];
                let first_row = index * tokens * kv_heads;
                for (parts, out) in [(&dk_heads, dk), (&dv_heads, dv)] {
                    for (row, out) in out.chunks_exact_mut(head_dim).enumerate() {
                        let (token, kv_head) =
                            ((first_row + row) / kv_heads, (first_row + row) % kv_heads);
                        let (batch, key) = (token / keys, token % keys);
                        total.fill(A::ZERO);
                        for head in kv_head * group..(kv_head + 1) * group {
                            let start = ((batch * heads + head) * keys + key) * head_dim;
                            for (total, part) in total.iter_mut().zip(&parts[start..]) {
                                *total += *part;
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
    fn backward_head<T: Element<Acc = A>>(
        &self,
        batch: usize,
        head: usize,
        o: Values<A>,
        log_sum_exp: &[A],
        d_o: Values<A>,
        dq_out: &Disjoint<T>,
        dk: &mut [A],
        dv: &mut [A],
    ) {
        let Sizes { queries, heads, kv_heads, head_dim, .. } = self.sizes;
        let kv_head = head / (heads / kv_heads);
        let log_sum_exp = &log_sum_exp[(batch * heads + head) * queries..][..queries];
        let mut q = vec![A::ZERO; ROWS * head_dim];
        let mut grad = vec![A::ZERO; ROWS * head_dim];
        let mut dq = vec![A::ZERO; ROWS * head_dim];
        let mut row_o = vec![A::ZERO; head_dim];
        let mut correction = [A::ZERO; ROWS];
        let mut scores = zeros::<A>(2 * ROWS * COLUMNS);
        let (p, dp) = scores.split_at_mut(ROWS * COLUMNS);
        let (mut key_scratch, mut value_scratch) = (Vec::new(), Vec::new());
        for first in (0..queries).step_by(ROWS) {
            let rows = ROWS.min(queries - first);
            for (row, correction) in correction[..rows].iter_mut().enumerate() {
                let start = self.row_start(batch, first + row, head);
                let place = row * head_dim..(row + 1) * head_dim;
                self.q.read(start, &mut q[place.clone()]);
                q[place.clone()].iter_mut().for_each(|q| *q *= self.scale);
                d_o.read(start, &mut grad[place.clone()]);
                o.read(start, &mut row_o);
                *correction = dot(&grad[place], &row_o);
            }
            let ranges = &self.ranges[batch * queries + first..][..rows];
            let q = Matrix::new(&q, rows, head_dim, head_dim);
            let grad = Matrix::new(&grad, rows, head_dim, head_dim);
            dq.fill(A::ZERO);
            let range = Self::block_range(ranges);
            for start in range.clone().step_by(COLUMNS) {
                let columns = COLUMNS.min(range.end - start);
                let tile = start..start + columns;
                let k = self.keys.tile(batch, kv_head, tile.clone(), head_dim, &mut key_scratch);
                let v =
                    self.values.tile(batch, kv_head, tile.clone(), head_dim, &mut value_scratch);
                let (p, dp) = (&mut p[..rows * columns], &mut dp[..rows * columns]);
                let one = Threads::One;
                multiply(
                    MatrixMut::new(p, rows, columns, columns),
                    false,
                    q,
                    k.transpose(),
                    A::ONE,
                    one,
                );
                multiply(
                    MatrixMut::new(dp, rows, columns, columns),
                    false,
                    grad,
                    v.transpose(),
                    A::ONE,
                    one,
                );
                // p becomes the probabilities and dp the gradient of the raw scores.
                let pairs = p.chunks_exact_mut(columns).zip(dp.chunks_exact_mut(columns));
                for (row, (p, dp)) in pairs.enumerate() {
                    let (seen_first, seen_last) = ranges[row];
                    let seen = clip(seen_first, seen_last, start, columns);
                    for hidden in [0..seen.start, seen.end..columns] {
                        p[hidden.clone()].fill(A::ZERO);
                        dp[hidden].fill(A::ZERO);
                    }
                    let (p, dp) = (&mut p[seen.clone()], &mut dp[seen]);
                    self.cap(p);
                    let (total, correction) = (log_sum_exp[first + row], correction[row]);
                    for (p, dp) in p.iter_mut().zip(dp) {
                        let score = *p;
                        *p = (score - total).exp();
                        *dp = *p * (*dp - correction);
                        if let Some(cap) = self.softcap {
                            let ratio = score / cap;
                            *dp *= A::ONE - ratio * ratio;
                        }
                    }
                }
                let p = Matrix::new(p, rows, columns, columns);
                let dp = Matrix::new(dp, rows, columns, columns);
                let place = start * head_dim..(start + columns) * head_dim;
                let target = MatrixMut::new(&mut dv[place.clone()], columns, head_dim, head_dim);
                multiply(target, true, p.transpose(), grad, A::ONE, one);
                // q carries the scale already.
                let target = MatrixMut::new(&mut dk[place], columns, head_dim, head_dim);
                multiply(target, true, dp.transpose(), q, A::ONE, one);
                let target = MatrixMut::new(&mut dq, rows, head_dim, head_dim);
                multiply(target, true, dp, k, self.scale, one);
            }
            for row in 0..rows {
                let start = self.row_start(batch, first + row, head);
                // SAFETY: every head belongs to one task.
                let target = unsafe { dq_out.slice(start..start + head_dim) };
                T::narrow(&dq[row * head_dim..][..head_dim], target);
            }
        }
    }
}

/// The part of the keys `[first, last)` that lies in the tile at `start`, counted from there.
fn clip(first: usize, last: usize, start: usize, columns: usize) -> Range<usize> {
    let begin = first.clamp(start, start + columns) - start;
    let end = last.clamp(start, start + columns) - start;
    begin..end.max(begin)
}
