//! Head + cross entropy.
use crate::device::cpu::*;
use crate::matmul::{Matrix, finish, gemm, multiply, multiply_transposed};
use candle_core::{Result, Tensor, bail};
use num_traits::{Float, One, Zero};
/// Not counted.
pub const IGNORE: u32 = u32::MAX;
/// Options.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// cap
    pub softcap: Option<f64>,
    /// scale
    pub logit_scale: f64,
    /// rows at a time
    pub chunk: usize,
}
/// Output.
#[derive(Debug)]
pub struct Output {
    /// sum
    pub loss: Tensor,
    /// rows
    pub count: usize,
    /// gradient
    pub dhidden: Option<Tensor>,
    /// gradient
    pub dweight: Option<Tensor>,
}
/// Forward with gradients.
pub fn forward(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    o: &Options,
    need_dh: bool,
    need_dw: bool,
) -> Result<Output> {
    dispatch!(hidden.dtype(), "cross_entropy", T => run::<T>(hidden, weight, targets, o, need_dh, need_dw))
}
fn run<T: Element>(
    hidden: &Tensor,
    weight: &Tensor,
    targets: &Tensor,
    o: &Options,
    need_dh: bool,
    need_dw: bool,
) -> Result<Output> {
    let (n, d) = hidden.dims2()?;
    let (v, _) = weight.dims2()?;
    read!(h: T = hidden);
    read!(w: T = weight);
    read!(t: u32 = targets);
    let rows: Vec<usize> = (0..n).filter(|&i| t[i] != IGNORE).collect();
    if let Some(&r) = rows.iter().find(|&&r| t[r] as usize >= v) {
        bail!("cross_entropy: target {} is not below {v}", t[r])
    }
    let zero = T::Acc::zero();
    let scale: T::Acc = constant(o.logit_scale);
    let mut dh = need_dh.then(|| vec![zero; n * d]);
    let mut dw = need_dw.then(|| vec![zero; v * d]);
    let mut loss = 0.0f64;
    for rows in rows.chunks(o.chunk.max(1)) {
        let k = rows.len();
        let mut x = Vec::with_capacity(k * d);
        for &r in rows {
            x.extend(h[r * d..(r + 1) * d].iter().map(|h| h.up()));
        }
        let mut logits = vec![zero; k * v];
        multiply_transposed(&mut logits, &x, k, w, (v, d));
        let mut losses = vec![zero; k];
        for_each_row2((&mut logits, v), (&mut losses, 1), |i, z, l| {
            let target = t[rows[i]] as usize;
            let mut caps = Vec::new();
            for z in z.iter_mut() {
                *z = *z * scale;
            }
            if let Some(c) = o.softcap {
                let c: T::Acc = constant(c);
                caps = z.iter().map(|z| (*z / c).tanh()).collect();
                for (z, t) in z.iter_mut().zip(&caps) {
                    *z = c * *t;
                }
            }
            let m = z.iter().copied().fold(T::Acc::neg_infinity(), T::Acc::max);
            let own = z[target];
            let mut s = zero;
            for z in z.iter_mut() {
                *z = (*z - m).exp();
                s += *z;
            }
            l[0] = m + s.ln() - own;
            for z in z.iter_mut() {
                *z = *z / s;
            }
            z[target] = z[target] - T::Acc::one();
            for (z, t) in z.iter_mut().zip(&caps) {
                *z = *z * (T::Acc::one() - *t * *t);
            }
            for z in z.iter_mut() {
                *z = *z * scale;
            }
        });
        loss += losses
            .iter()
            .map(|l| num_traits::ToPrimitive::to_f64(l).unwrap_or(f64::NAN))
            .sum::<f64>();
        if let Some(dh) = &mut dh {
            let mut g = vec![zero; k * d];
            multiply(&mut g, &logits, k, w, (v, d));
            for (i, &r) in rows.iter().enumerate() {
                dh[r * d..(r + 1) * d].copy_from_slice(&g[i * d..(i + 1) * d]);
            }
        }
        if let Some(dw) = &mut dw {
            gemm(dw, d, Matrix::new(&logits, k, v).t(), Matrix::new(&x, k, d), T::Acc::one(), true);
        }
    }
    Ok(Output {
        loss: Tensor::new(loss as f32, hidden.device())?,
        count: rows.len(),
        dhidden: dh.map(|g| finish::<T>(g, &[n, d])).transpose()?,
        dweight: dw.map(|g| tensor(g, &[v, d])).transpose()?,
    })
}
