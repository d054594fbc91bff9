//! Rotary embedding on the CPU: a task is a block of tokens.

use crate::device::cpu::{Element, Real, Values, for_each_chunk, rows_per_task, write_through};

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
            let mut row = vec![T::Acc::ZERO; head_dim];
            let (mut c, mut s) = (vec![T::Acc::ZERO; half], vec![T::Acc::ZERO; half]);
            let mut scratch = Vec::new();
            for (offset, (x, y)) in x.chunks_exact(token).zip(y.chunks_exact_mut(token)).enumerate()
            {
                let start = (index * tokens + offset) * half;
                cos.read(start, &mut c);
                sin.read(start, &mut s);
                if inverse {
                    s.iter_mut().for_each(|s| *s = -*s);
                }
                for (x, y) in x.chunks_exact(head_dim).zip(y.chunks_exact_mut(head_dim)) {
                    T::widen(x, &mut row);
                    write_through(y, &mut scratch, |y| {
                        y[2 * half..].copy_from_slice(&row[2 * half..]);
                        let (x1, x2) = (&row[..half], &row[half..2 * half]);
                        let (y1, y2) = y[..2 * half].split_at_mut(half);
                        for i in 0..half {
                            y1[i] = x1[i] * c[i] - x2[i] * s[i];
                            y2[i] = x2[i] * c[i] + x1[i] * s[i];
                        }
                    });
                }
            }
        },
    );
}
