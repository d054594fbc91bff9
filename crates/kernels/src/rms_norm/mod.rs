//! RMS norm (Zhang and Sennrich, 2019, arXiv:1910.07467): `y = x / sqrt(mean(x²) + ε) · (o + w)`.
use crate::device::cpu::*;
use candle_core::{Result, Tensor};
use num_traits::{Float, One, Zero};
/// `(.., d)` normalised.
pub fn forward(x: &Tensor, weight: &Tensor, eps: f64, offset: f64) -> Result<Tensor> {
    dispatch!(x.dtype(), "rms_norm", T => fwd::<T>(x, weight, eps, offset))
}
/// dx and dweight.
pub fn backward(
    x: &Tensor,
    weight: &Tensor,
    eps: f64,
    offset: f64,
    dy: &Tensor,
    need_dx: bool,
    need_dw: bool,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    dispatch!(x.dtype(), "rms_norm", T => bwd::<T>(x, weight, eps, offset, dy, need_dx, need_dw))
}
fn inv<T: Element>(x: &[T], eps: f64) -> T::Acc {
    let s: T::Acc = x.iter().map(|x| x.up() * x.up()).sum();
    T::Acc::one() / (s / constant(x.len() as f64) + constant(eps)).sqrt()
}
fn fwd<T: Element>(x: &Tensor, w: &Tensor, eps: f64, offset: f64) -> Result<Tensor> {
    let (_, d) = rows_and_width("rms_norm", "x", x)?;
    check_shape("rms_norm", "weight", w, &[d])?;
    let dims = x.dims().to_vec();
    read!(x: T = x);
    read!(w: T = w);
    let o: T::Acc = constant(offset);
    let mut y = vec![T::down(T::Acc::zero()); x.len()];
    for_each_row(&mut y, d, |r, y| {
        let x = &x[r * d..(r + 1) * d];
        let i = inv(x, eps);
        for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
            *y = T::down(x.up() * i * (o + w.up()));
        }
    });
    tensor(y, &dims)
}
fn bwd<T: Element>(
    x: &Tensor,
    w: &Tensor,
    eps: f64,
    offset: f64,
    dy: &Tensor,
    need_dx: bool,
    need_dw: bool,
) -> Result<(Option<Tensor>, Option<Tensor>)> {
    let (rows, d) = rows_and_width("rms_norm", "x", x)?;
    let dims = x.dims().to_vec();
    read!(x: T = x);
    read!(w: T = w);
    read!(dy: T = dy);
    let o: T::Acc = constant(offset);
    let dx = if need_dx {
        let mut dx = vec![T::down(T::Acc::zero()); x.len()];
        for_each_row(&mut dx, d, |r, dx| {
            let (x, dy) = (&x[r * d..(r + 1) * d], &dy[r * d..(r + 1) * d]);
            let i = inv(x, eps);
            let s: T::Acc =
                x.iter().zip(dy).zip(w).map(|((x, dy), w)| x.up() * dy.up() * (o + w.up())).sum();
            let c = s * i * i * i / constant(d as f64);
            for (((dx, x), dy), w) in dx.iter_mut().zip(x).zip(dy).zip(w) {
                *dx = T::down(dy.up() * (o + w.up()) * i - x.up() * c);
            }
        });
        Some(tensor(dx, &dims)?)
    } else {
        None
    };
    let dw = if need_dw {
        Some(tensor(
            sum_rows(rows, d, |r, s: &mut [T::Acc]| {
                let (x, dy) = (&x[r * d..(r + 1) * d], &dy[r * d..(r + 1) * d]);
                let i = inv(x, eps);
                for ((s, x), dy) in s.iter_mut().zip(x).zip(dy) {
                    *s += x.up() * i * dy.up();
                }
            }),
            &[d],
        )?)
    } else {
        None
    };
    Ok((dx, dw))
}
