//! A step of Adafactor on the CPU: the means, the sizes of update and parameter, and the update.

use super::Update;
use crate::backend::cpu::{
    Real, for_each_chunk, for_each_chunk2, rows_per_task, sum, sum_rows, sums,
};

pub(super) fn step<A: Real>(
    [params, grads, row_means, column_means]: [&mut [A]; 4],
    [rows, columns]: [usize; 2],
    update: &Update,
) {
    let number = A::from_f64;
    let scale = number(update.grad_scale);
    let block = rows_per_task(columns);
    // (1 - β)·(sum / count + ε) beside β of what was.
    let mean = |before: A, sum: A, count: usize| {
        let mean = sum * number(1.0 / count as f64) + number(update.epsilon);
        number(update.beta) * before + number(1.0 - update.beta) * mean
    };
    let all: &[A] = grads;
    for_each_chunk(
        row_means,
        block,
        #[inline(always)]
        |index, row_means| {
            let rows = all[index * block * columns..].chunks_exact(columns);
            for (row_mean, row) in row_means.iter_mut().zip(rows) {
                let [squares] = sums(
                    [row],
                    #[inline(always)]
                    |[g]| [g * scale * (g * scale)],
                );
                *row_mean = mean(*row_mean, squares, columns);
            }
        },
    );
    let mut squares = vec![A::ZERO; columns];
    sum_rows(rows, columns, &mut squares, |row, range, target| {
        for (target, g) in target.iter_mut().zip(&all[row * columns..][range]) {
            let g = *g * scale;
            *target = g * g;
        }
    });
    for (column_mean, sum) in column_means.iter_mut().zip(&squares) {
        *column_mean = mean(*column_mean, *sum, rows);
    }

    // Of u_ij = g_ij·left_i·right_j.
    let total = sum(row_means) * number(1.0 / rows as f64);
    let left: Vec<A> = row_means.iter().map(|mean| A::ONE / (*mean / total).sqrt()).collect();
    let right: Vec<A> = column_means.iter().map(|mean| A::ONE / mean.sqrt()).collect();
    let [mut updates, mut sizes] = [(); 2].map(|()| vec![A::ZERO; rows]);
    let values: &[A] = params;
    for_each_chunk2(
        &mut updates,
        block,
        &mut sizes,
        block,
        #[inline(always)]
        |index, updates, sizes| {
            for (offset, (update, size)) in updates.iter_mut().zip(sizes).enumerate() {
                let row = index * block + offset;
                let of_row = row * columns..(row + 1) * columns;
                let left = left[row];
                [*update, *size] = sums(
                    [&all[of_row.clone()], &values[of_row], &right],
                    #[inline(always)]
                    |[g, p, right]| {
                        let u = g * scale * left * right;
                        [u * u, p * p]
                    },
                );
            }
        },
    );
    let root = |squares: &[A]| (sum(squares) * number(1.0 / (rows * columns) as f64)).sqrt();
    let larger = |a: A, b: A| if a > b { a } else { b };
    let mut rate = number(update.learning_rate);
    if update.scale_epsilon >= 0.0 {
        rate *= larger(root(&sizes), number(update.scale_epsilon));
    }
    let decay = A::ONE - rate * number(update.weight_decay);
    let factor = rate / larger(root(&updates) / number(update.clip_threshold), A::ONE);
    for_each_chunk2(
        params,
        block * columns,
        grads,
        block * columns,
        #[inline(always)]
        |index, params, grads| {
            let rows = params.chunks_exact_mut(columns).zip(grads.chunks_exact_mut(columns));
            for (offset, (params, grads)) in rows.enumerate() {
                let left = left[index * block + offset];
                for ((p, g), right) in params.iter_mut().zip(grads.iter()).zip(&right) {
                    let u = *g * scale * left * *right;
                    *p = *p * decay - factor * u;
                }
                grads.fill(A::ZERO);
            }
        },
    );
}
