//! Sums of what experts give on the CPU. A task has some tokens; in the backward pass it writes the rows that are theirs,
//! which are no other's.

use crate::backend::cpu::{
    Disjoint, Element, Real, dot, for_each_chunk, for_each_index, rows_per_task, write_through,
};

/// The rows that tokens have chosen, and how much of each.
pub(super) struct Choices<'a, A> {
    pub columns: usize,
    /// Of a token.
    pub active: usize,
    /// `(tokens, active)`
    pub weights: &'a [A],
    /// `(tokens, active)`
    pub places: &'a [u32],
}

impl<A: Real> Choices<'_, A> {
    pub(super) fn combine<T: Element<Acc = A>>(&self, y: &[T], out: &mut [T]) {
        let Self { columns, active, weights, places } = *self;
        if columns == 0 {
            return;
        }
        let block = rows_per_task(columns * active.max(1));
        for_each_chunk(
            out,
            block * columns,
            #[inline(always)]
            |index, out| {
                let (mut scratch, mut read) = (Vec::new(), vec![A::ZERO; columns]);
                for (offset, out) in out.chunks_exact_mut(columns).enumerate() {
                    let choices = (index * block + offset) * active..;
                    let choices = weights[choices.clone()].iter().zip(&places[choices]);
                    write_through(
                        out,
                        &mut scratch,
                        #[inline(always)]
                        |out| {
                            out.fill(A::ZERO);
                            for (weight, place) in choices.take(active) {
                                T::widen(&y[*place as usize * columns..][..columns], &mut read);
                                for (sum, y) in out.iter_mut().zip(&read) {
                                    *sum += *weight * *y;
                                }
                            }
                        },
                    );
                }
            },
        );
    }

    pub(super) fn backward<T: Element<Acc = A>>(
        &self,
        y: &[T],
        dout: &[T],
        dy: &mut [T],
        dweights: &mut [A],
    ) {
        let Self { columns, active, weights, places } = *self;
        let block = rows_per_task(2 * columns * active.max(1));
        let tokens = places.len().checked_div(active).unwrap_or(0);
        let (dy, dweights) = (Disjoint::new(dy), Disjoint::new(dweights));
        for_each_index(
            tokens.div_ceil(block),
            tokens > block,
            #[inline(always)]
            |index| {
                let (mut of_y, mut scratch) = (vec![A::ZERO; columns], Vec::new());
                let mut of_out = vec![A::ZERO; columns];
                let first = index * block;
                let last = tokens.min(first + block);
                // SAFETY: the choices of these tokens have one task.
                let dweights = unsafe { dweights.slice(first * active..last * active) };
                for token in first..last {
                    T::widen(&dout[token * columns..][..columns], &mut of_out);
                    for choice in token * active..(token + 1) * active {
                        let place = places[choice] as usize;
                        let row = place * columns..(place + 1) * columns;
                        T::widen(&y[row.clone()], &mut of_y);
                        dweights[choice - first * active] = dot(&of_out, &of_y);
                        // SAFETY: a row is one token's choice, and so has one task.
                        let dy = unsafe { dy.slice(row) };
                        write_through(
                            dy,
                            &mut scratch,
                            #[inline(always)]
                            |dy| {
                                for (dy, dout) in dy.iter_mut().zip(&of_out) {
                                    *dy = weights[choice] * *dout;
                                }
                            },
                        );
                    }
                }
            },
        );
    }
}
