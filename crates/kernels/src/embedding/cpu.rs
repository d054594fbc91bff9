//! Embedding on the CPU. In the backward pass the positions of one token belong to one task, which
//! adds them in order.

use crate::backend::cpu::{
    Disjoint, Element, PARALLEL_CHUNK, Real, Values, for_each_chunk, for_each_index, rows_per_task,
};

pub(super) fn forward<T: Element>(d: usize, table: &[T], ids: &[u32], out: &mut [T]) {
    let block = rows_per_task(d);
    for_each_chunk(
        out,
        block * d,
        #[inline(always)]
        |index, out| {
            for (out, id) in out.chunks_exact_mut(d).zip(&ids[index * block..]) {
                out.copy_from_slice(&table[*id as usize * d..][..d]);
            }
        },
    );
}

pub(super) fn accumulate<A: Real>(d: usize, dy: Values<A>, ids: &[u32], out: &mut [A]) {
    let mut order: Vec<(u32, usize)> =
        ids.iter().enumerate().map(|(position, id)| (*id, position)).collect();
    order.sort_unstable();
    let tokens: Vec<&[(u32, usize)]> = order.chunk_by(|a, b| a.0 == b.0).collect();
    let parallel = ids.len() * d > PARALLEL_CHUNK;
    let out = Disjoint::new(out);
    for_each_index(
        tokens.len(),
        parallel,
        #[inline(always)]
        |index| {
            let (mut scratch, mut sum) = (Vec::new(), vec![A::ZERO; d]);
            for (_, position) in tokens[index] {
                let row = dy.block(position * d..(position + 1) * d, &mut scratch);
                for (sum, row) in sum.iter_mut().zip(row) {
                    *sum += *row;
                }
            }
            let start = tokens[index][0].0 as usize * d;
            // SAFETY: every token has one task, and writes its own row.
            let out = unsafe { out.slice(start..start + d) };
            for (out, sum) in out.iter_mut().zip(sum) {
                *out += sum;
            }
        },
    );
}
