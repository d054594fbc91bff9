//! Sums and multiples on the CPU: a task is a chunk of elements.

use crate::backend::cpu::{Element, PARALLEL_CHUNK, Real, for_each_chunk};
use candle_core::WithDType;

/// Elements that are converted at a time.
const BLOCK: usize = 256;

pub(super) fn add<T: Element>(x: &[T], y: &[T], out: &mut [T]) {
    for_each_chunk(
        out,
        PARALLEL_CHUNK,
        #[inline(always)]
        |index, out| {
            let start = index * PARALLEL_CHUNK;
            let (x, y) = (&x[start..start + out.len()], &y[start..start + out.len()]);
            let (mut wide_x, mut wide_y) = ([T::Acc::ZERO; BLOCK], [T::Acc::ZERO; BLOCK]);
            for ((x, y), out) in x.chunks(BLOCK).zip(y.chunks(BLOCK)).zip(out.chunks_mut(BLOCK)) {
                let (wide_x, wide_y) = (&mut wide_x[..x.len()], &mut wide_y[..x.len()]);
                T::widen(x, wide_x);
                T::widen(y, wide_y);
                for (x, y) in wide_x.iter_mut().zip(&*wide_y) {
                    *x += *y;
                }
                T::narrow(wide_x, out);
            }
        },
    );
}

/// Rows of `d` elements, each times its factor.
pub(super) fn scale_rows<T: Element>(x: &[T], factors: &[T::Acc], d: usize, out: &mut [T]) {
    for_each_chunk(
        out,
        d,
        #[inline(always)]
        |row, out| {
            let factor = factors[row];
            let mut wide = [T::Acc::ZERO; BLOCK];
            for (x, out) in x[row * d..][..d].chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
                let wide = &mut wide[..x.len()];
                T::widen(x, wide);
                wide.iter_mut().for_each(|x| *x *= factor);
                T::narrow(wide, out);
            }
        },
    );
}

/// What becomes of an element.
#[derive(Clone, Copy)]
pub(super) enum Change {
    /// Multiplied by this.
    Scale(f64),
    /// Capped at this.
    Softcap(f64),
}

pub(super) fn change<T: Element>(x: &[T], change: Change, out: &mut [T]) {
    match change {
        Change::Scale(factor) => {
            let factor = T::Acc::from_f64(factor);
            map(
                x,
                out,
                #[inline(always)]
                |x| x * factor,
            );
        }
        Change::Softcap(cap) => {
            let cap = T::Acc::from_f64(cap);
            map(
                x,
                out,
                #[inline(always)]
                |x| cap * (x / cap).tanh(),
            );
        }
    }
}

fn map<T: Element>(x: &[T], out: &mut [T], f: impl Fn(T::Acc) -> T::Acc + Sync) {
    for_each_chunk(
        out,
        PARALLEL_CHUNK,
        #[inline(always)]
        |index, out| {
            let x = &x[index * PARALLEL_CHUNK..][..out.len()];
            let mut wide = [T::Acc::ZERO; BLOCK];
            for (x, out) in x.chunks(BLOCK).zip(out.chunks_mut(BLOCK)) {
                let wide = &mut wide[..x.len()];
                T::widen(x, wide);
                wide.iter_mut().for_each(|x| *x = f(*x));
                T::narrow(wide, out);
            }
        },
    );
}
