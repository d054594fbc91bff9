//! Rotary embedding on the CPU: a task is a block of tokens.

use crate::backend::cpu::{
    Element, Real, Values, for_each_chunk, read_row, rows_per_task, write_through,
};

#[derive(Clone, Copy)]
pub(super) struct Sizes {
    pub heads: usize,
    pub head_dim: usize,
    /// Angles of one token.
    pub half: usize,
}

pub(super) fn rotate<T: Element>(
    sizes: Sizes,
    x: &[T],
    cos: Values<T::Acc>,
    sin: Values<T::Acc>,
    inverse: bool,
    y: &mut [T],
) {
    let Sizes { heads, head_dim, half } = sizes;
    let token = heads * head_dim;
    let tokens = rows_per_task(token);
    for_each_chunk(
        y,
        tokens * token,
        #[inline(always)]
        |index, y| {
            let x = &x[index * tokens * token..][..y.len()];
            let (mut c_scratch, mut s_scratch) = (Vec::new(), Vec::new());
            let (mut x_scratch, mut y_scratch) = (Vec::new(), Vec::new());
            for (offset, (x, y)) in x.chunks_exact(token).zip(y.chunks_exact_mut(token)).enumerate()
            {
                let angles = (index * tokens + offset) * half..(index * tokens + offset + 1) * half;
                let c = cos.block(angles.clone(), &mut c_scratch);
                s_scratch.resize(half, T::Acc::ZERO);
                sin.read(angles.start, &mut s_scratch);
                if inverse {
                    s_scratch.iter_mut().for_each(|s| *s = -*s);
                }
                for (x, y) in x.chunks_exact(head_dim).zip(y.chunks_exact_mut(head_dim)) {
                    let x = read_row(x, &mut x_scratch);
                    write_through(
                        y,
                        &mut y_scratch,
                        #[inline(always)]
                        |y| {
                            let (rotated, rest) = x.split_at(2 * half);
                            let (x1, x2) = rotated.split_at(half);
                            let (y_rotated, y_rest) = y.split_at_mut(2 * half);
                            let (y1, y2) = y_rotated.split_at_mut(half);
                            let angles = c.iter().zip(&s_scratch);
                            let (inputs, outputs) = (x1.iter().zip(x2), y1.iter_mut().zip(y2));
                            for (((x1, x2), (y1, y2)), (c, s)) in inputs.zip(outputs).zip(angles) {
                                *y1 = *x1 * *c - *x2 * *s;
                                *y2 = *x2 * *c + *x1 * *s;
                            }
                            y_rest.copy_from_slice(rest);
                        },
                    );
                }
            }
        },
    );
}
