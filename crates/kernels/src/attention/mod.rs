//! Causal attention.
use crate::device::cpu::*;
use candle_core::{Result, Tensor};
use num_traits::{Float, One, Zero};
use rayon::prelude::*;
/// Options.
#[derive(Clone, Debug)]
pub struct Options {
    /// scale
    pub scale: f64,
    /// cap
    pub softcap: Option<f64>,
    /// window
    pub window: Option<usize>,
}
/// o and log-sum-exp.
pub fn forward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    first: Option<&Tensor>,
    o: &Options,
) -> Result<(Tensor, Tensor)> {
    dispatch!(q.dtype(), "attention", T => fwd::<T>(q, k, v, first, o))
}
/// dq, dk, dv.
#[allow(clippy::too_many_arguments)]
pub fn backward(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    first: Option<&Tensor>,
    o: &Options,
    d_o: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    dispatch!(q.dtype(), "attention", T => bwd::<T>(q, k, v, out, lse, first, o, d_o))
}
fn head<T: Element>(
    x: &[T],
    b: usize,
    t: usize,
    h: usize,
    d: usize,
    bi: usize,
    hi: usize,
) -> Vec<T::Acc> {
    let mut out = Vec::with_capacity(t * d);
    for i in 0..t {
        let s = ((bi * t + i) * h + hi) * d;
        out.extend(x[s..s + d].iter().map(|x| x.up()));
    }
    let _ = b;
    out
}
fn from(first: Option<&[u32]>, row: usize, pos: usize, o: &Options) -> usize {
    let a = first.map_or(0, |f| f[row] as usize);
    let w = o.window.map_or(0, |w| (pos + 1).saturating_sub(w));
    a.max(w)
}
fn fwd<T: Element>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    first: Option<&Tensor>,
    o: &Options,
) -> Result<(Tensor, Tensor)> {
    let (b, t, h, d) = q.dims4()?;
    let (_, s, hk, _) = k.dims4()?;
    read!(q: T = q);
    read!(k: T = k);
    read!(v: T = v);
    let first: Option<Vec<u32>> = first.map(|f| f.flatten_all()?.to_vec1()).transpose()?;
    let first = first.as_deref();
    let scale: T::Acc = constant(o.scale);
    let parts: Vec<(Vec<T::Acc>, Vec<T::Acc>)> = (0..b * h)
        .into_par_iter()
        .map(|bh| {
            let (bi, hi) = (bh / h, bh % h);
            let (q, k, v) = (
                head(q, b, t, h, d, bi, hi),
                head(k, b, s, hk, d, bi, hi * hk / h),
                head(v, b, s, hk, d, bi, hi * hk / h),
            );
            let mut out = vec![T::Acc::zero(); t * d];
            let mut lse = vec![T::Acc::zero(); t];
            let mut z = vec![T::Acc::zero(); s];
            for i in 0..t {
                let pos = s - t + i;
                let a = from(first, bi * t + i, pos, o);
                let mut m = T::Acc::neg_infinity();
                for j in a..=pos {
                    let mut x = dot(&q[i * d..(i + 1) * d], &k[j * d..(j + 1) * d]) * scale;
                    if let Some(c) = o.softcap {
                        let c: T::Acc = constant(c);
                        x = (x / c).tanh() * c;
                    }
                    z[j] = x;
                    m = m.max(x);
                }
                let mut sum = T::Acc::zero();
                for z in &mut z[a..=pos] {
                    *z = (*z - m).exp();
                    sum += *z;
                }
                for j in a..=pos {
                    add_scaled(&mut out[i * d..(i + 1) * d], z[j] / sum, &v[j * d..(j + 1) * d]);
                }
                lse[i] = m + sum.ln();
            }
            (out, lse)
        })
        .collect();
    let mut out = vec![T::down(T::Acc::zero()); b * t * h * d];
    let mut lse = Vec::with_capacity(b * h * t);
    for (bh, (o, l)) in parts.into_iter().enumerate() {
        scatter::<T>(&mut out, &o, t, h, d, bh / h, bh % h);
        lse.extend(l);
    }
    Ok((tensor(out, &[b, t, h, d])?, tensor(lse, &[b, h, t])?))
}
fn scatter<T: Element>(
    out: &mut [T],
    x: &[T::Acc],
    t: usize,
    h: usize,
    d: usize,
    bi: usize,
    hi: usize,
) {
    for i in 0..t {
        let s = ((bi * t + i) * h + hi) * d;
        down_into(&mut out[s..s + d], &x[i * d..(i + 1) * d]);
    }
}
#[allow(clippy::too_many_arguments)]
fn bwd<T: Element>(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    out: &Tensor,
    lse: &Tensor,
    first: Option<&Tensor>,
    o: &Options,
    d_o: &Tensor,
) -> Result<(Tensor, Tensor, Tensor)> {
    let (b, t, h, d) = q.dims4()?;
    let (_, s, hk, _) = k.dims4()?;
    read!(q: T = q);
    read!(k: T = k);
    read!(v: T = v);
    read!(out: T = out);
    read!(d_o: T = d_o);
    read!(lse: T::Acc = lse);
    let first: Option<Vec<u32>> = first.map(|f| f.flatten_all()?.to_vec1()).transpose()?;
    let first = first.as_deref();
    let scale: T::Acc = constant(o.scale);
    let group = h / hk;
    let parts: Vec<(Vec<Vec<T::Acc>>, Vec<T::Acc>, Vec<T::Acc>)> = (0..b * hk)
        .into_par_iter()
        .map(|bk| {
            let (bi, ki) = (bk / hk, bk % hk);
            let (k, v) = (head(k, b, s, hk, d, bi, ki), head(v, b, s, hk, d, bi, ki));
            let mut dk = vec![T::Acc::zero(); s * d];
            let mut dv = vec![T::Acc::zero(); s * d];
            let mut dqs = Vec::new();
            for hi in ki * group..(ki + 1) * group {
                let (q, out, d_o) = (
                    head(q, b, t, h, d, bi, hi),
                    head(out, b, t, h, d, bi, hi),
                    head(d_o, b, t, h, d, bi, hi),
                );
                let mut dq = vec![T::Acc::zero(); t * d];
                for i in 0..t {
                    let pos = s - t + i;
                    let r = i * d..(i + 1) * d;
                    let delta = dot(&out[r.clone()], &d_o[r.clone()]);
                    let l = lse[(bi * h + hi) * t + i];
                    for j in from(first, bi * t + i, pos, o)..=pos {
                        let c = j * d..(j + 1) * d;
                        let mut x = dot(&q[r.clone()], &k[c.clone()]) * scale;
                        let mut g = scale;
                        if let Some(cap) = o.softcap {
                            let cap: T::Acc = constant(cap);
                            let th = (x / cap).tanh();
                            x = cap * th;
                            g = g * (T::Acc::one() - th * th);
                        }
                        let p = (x - l).exp();
                        add_scaled(&mut dv[c.clone()], p, &d_o[r.clone()]);
                        let ds = p * (dot(&d_o[r.clone()], &v[c.clone()]) - delta) * g;
                        add_scaled(&mut dq[r.clone()], ds, &k[c.clone()]);
                        add_scaled(&mut dk[c], ds, &q[r.clone()]);
                    }
                }
                dqs.push(dq);
            }
            (dqs, dk, dv)
        })
        .collect();
    let z = T::down(T::Acc::zero());
    let (mut dq, mut dk, mut dv) =
        (vec![z; b * t * h * d], vec![z; b * s * hk * d], vec![z; b * s * hk * d]);
    for (bk, (q, k, v)) in parts.into_iter().enumerate() {
        let (bi, ki) = (bk / hk, bk % hk);
        for (g, q) in q.iter().enumerate() {
            scatter::<T>(&mut dq, q, t, h, d, bi, ki * group + g);
        }
        scatter::<T>(&mut dk, &k, s, hk, d, bi, ki);
        scatter::<T>(&mut dv, &v, s, hk, d, bi, ki);
    }
    Ok((tensor(dq, &[b, t, h, d])?, tensor(dk, &[b, s, hk, d])?, tensor(dv, &[b, s, hk, d])?))
}
