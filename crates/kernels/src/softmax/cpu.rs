//! Softmax on the CPU: a task is a block of rows.

use crate::backend::cpu::{
    Element, Real, dot, for_each_chunk, map_and_sum, map_rows, max, read_row, rows_per_task,
    write_through,
};

pub(super) fn forward<T: Element>(size: usize, x: &[T], y: &mut [T]) {
    map_rows(
        size,
        x,
        y,
        #[inline(always)]
        |x, y| {
            let largest = max(x);
            let total = map_and_sum(
                x,
                y,
                #[inline(always)]
                |x| (x - largest).exp_nonpositive(),
            );
            let factor = T::Acc::ONE / total;
            for y in y {
                *y *= factor;
            }
        },
    );
}

pub(super) fn backward<T: Element>(size: usize, y: &[T], dy: &[T], dx: &mut [T]) {
    let size = size.max(1);
    let block = rows_per_task(size) * size;
    for_each_chunk(
        dx,
        block,
        #[inline(always)]
        |index, dx| {
            let mut scratch = [const { Vec::new() }; 3];
            let [y_scratch, dy_scratch, dx_scratch] = &mut scratch;
            let place = index * block..index * block + dx.len();
            let rows = y[place.clone()].chunks_exact(size).zip(dy[place].chunks_exact(size));
            for ((y, dy), dx) in rows.zip(dx.chunks_exact_mut(size)) {
                let (y, dy) = (read_row(y, y_scratch), read_row(dy, dy_scratch));
                write_through(
                    dx,
                    dx_scratch,
                    #[inline(always)]
                    |dx| {
                        let total = dot(y, dy);
                        for ((dx, y), dy) in dx.iter_mut().zip(y).zip(dy) {
                            *dx = *y * (*dy - total);
                        }
                    },
                );
            }
        },
    );
}
