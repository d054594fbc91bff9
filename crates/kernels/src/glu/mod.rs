//! Gated linear units.
use crate::device::cpu::*;
use candle_core::{Result, Tensor};
use num_traits::{Float, One};
/// The gate's activation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x·sigmoid(x)
    Silu,
    /// tanh form
    GeluTanh,
    /// erf form
    Gelu,
}
fn act<A: Accumulator>(a: Activation, x: A) -> (A, A) {
    let one = A::one();
    match a {
        Activation::Silu => {
            let s = one / (one + (-x).exp());
            (x * s, s * (one + x * (one - s)))
        }
        Activation::GeluTanh => {
            let (k, c): (A, A) = (constant(0.797_884_560_802_865_4), constant(0.044715));
            let t = (k * (x + c * x * x * x)).tanh();
            let h: A = constant(0.5);
            (
                h * x * (one + t),
                h * (one + t) + h * x * (one - t * t) * k * (one + constant::<A>(3.0) * c * x * x),
            )
        }
        Activation::Gelu => {
            let xf: f64 = num_traits::ToPrimitive::to_f64(&x).unwrap_or(f64::NAN);
            let phi = 0.5 * (1.0 + libm_erf(xf / std::f64::consts::SQRT_2));
            let pdf = (-0.5 * xf * xf).exp() / (2.0 * std::f64::consts::PI).sqrt();
            (constant(xf * phi), constant(phi + xf * pdf))
        }
    }
}
fn libm_erf(x: f64) -> f64 {
    libm::erf(x)
}
/// act(gate)·up
pub fn forward(gate: &Tensor, up: &Tensor, a: Activation) -> Result<Tensor> {
    dispatch!(gate.dtype(), "glu", T => {
        let dims = gate.dims().to_vec();
        read!(g: T = gate);
        read!(u: T = up);
        let mut y = g.to_vec();
        for_each_row(&mut y, 256, |r, y| for (y, u) in y.iter_mut().zip(&u[r * 256..]) { *y = T::down(act(a, y.up()).0 * u.up()); });
        tensor(y, &dims)
    })
}
/// dgate, dup
pub fn backward(
    gate: &Tensor,
    up: &Tensor,
    a: Activation,
    dy: &Tensor,
) -> Result<(Tensor, Tensor)> {
    dispatch!(gate.dtype(), "glu", T => {
        let dims = gate.dims().to_vec();
        read!(g: T = gate);
        read!(u: T = up);
        read!(dy: T = dy);
        let mut dg = g.to_vec();
        let mut du = u.to_vec();
        for_each_row2((&mut dg, 256), (&mut du, 256), |r, dg, du| {
            for ((dg, du), dy) in dg.iter_mut().zip(du).zip(&dy[r * 256..]) {
                let (y, d) = act(a, dg.up());
                let u = du.up();
                *dg = T::down(dy.up() * u * d);
                *du = T::down(dy.up() * y);
            }
        });
        Ok((tensor(dg, &dims)?, tensor(du, &dims)?))
    })
}
