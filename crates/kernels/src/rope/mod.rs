//! Rotary position embedding (Su et al., 2021, arXiv:2104.09864), halves rotated.
use crate::device::cpu::*;
use candle_core::{Result, Tensor};
/// Rotates `x (b, t, h, d)`.
pub fn forward(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    dispatch!(x.dtype(), "rope", T => run::<T>(x, cos, sin, 1.0))
}
/// Rotates back.
pub fn backward(dy: &Tensor, cos: &Tensor, sin: &Tensor) -> Result<Tensor> {
    dispatch!(dy.dtype(), "rope", T => run::<T>(dy, cos, sin, -1.0))
}
fn run<T: Element>(x: &Tensor, cos: &Tensor, sin: &Tensor, sign: f64) -> Result<Tensor> {
    let (b, t, h, d) = x.dims4()?;
    let half = cos.dim(2)?;
    check_shape("rope", "cos", cos, &[b, t, half])?;
    check_shape("rope", "sin", sin, &[b, t, half])?;
    let dims = x.dims().to_vec();
    read!(x: T = x);
    read!(cos: f32 = cos);
    read!(sin: f32 = sin);
    let mut y = x.to_vec();
    for_each_row(&mut y, h * d, |r, y| {
        let (c, s) = (&cos[r * half..(r + 1) * half], &sin[r * half..(r + 1) * half]);
        for y in y.chunks_mut(d) {
            for i in 0..half {
                let (p, q) = (y[i].up(), y[i + half].up());
                let (c, s): (T::Acc, T::Acc) =
                    (constant(f64::from(c[i])), constant(sign * f64::from(s[i])));
                y[i] = T::down(p * c - q * s);
                y[i + half] = T::down(q * c + p * s);
            }
        }
    });
    tensor(y, &dims)
}
