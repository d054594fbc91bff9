//! AdamW.
use crate::device::cpu::*;
use candle_core::{DType, Result, Tensor};
/// Hyper-parameters.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// rate
    pub learning_rate: f64,
    /// first moment
    pub beta1: f64,
    /// second moment
    pub beta2: f64,
    /// epsilon
    pub epsilon: f64,
    /// decay
    pub weight_decay: f64,
}
/// One step.
#[allow(clippy::too_many_arguments)]
pub fn step(
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    v: &Tensor,
    step: usize,
    grad_scale: f32,
    decayed: usize,
    o: &Options,
) -> Result<()> {
    let (c1, c2) = (1.0 - o.beta1.powi(step as i32), 1.0 - o.beta2.powi(step as i32));
    let (b1, b2) = (o.beta1 as f32, o.beta2 as f32);
    mutate_with("adamw", m, grads, |m, g| {
        for (m, g) in m.iter_mut().zip(g) {
            *m = b1 * *m + (1.0 - o.beta1) as f32 * (g * grad_scale);
        }
        Ok(())
    })?;
    mutate_with("adamw", v, grads, |v, g| {
        for (v, g) in v.iter_mut().zip(g) {
            let g = g * grad_scale;
            *v = b2 * *v + (1.0 - o.beta2) as f32 * g * g;
        }
        Ok(())
    })?;
    let lr = o.learning_rate;
    let keep = (1.0 - lr * o.weight_decay) as f32;
    read!(m: f32 = m);
    read!(v: f32 = v);
    mutate("adamw", params, |p| {
        for (i, p) in p.iter_mut().enumerate() {
            if i < decayed {
                *p *= keep;
            }
            *p -= (lr / c1) as f32 * m[i] / (v[i].sqrt() / c2.sqrt() as f32 + o.epsilon as f32);
        }
        Ok(())
    })
}
/// L2 norm.
pub fn norm(g: &Tensor) -> Result<f64> {
    read!(g: f32 = g);
    Ok(g.iter().map(|g| f64::from(*g) * f64::from(*g)).sum::<f64>().sqrt())
}
/// dst += scale·src
pub fn accumulate(dst: &Tensor, src: &Tensor, scale: f64) -> Result<()> {
    let src = src.to_dtype(DType::F32)?.contiguous()?;
    mutate_with("accumulate", dst, &src, |d, s| {
        add_scaled(d, scale as f32, s);
        Ok(())
    })
}
/// dst = 0
pub fn fill_zero(dst: &Tensor) -> Result<()> {
    mutate("zero", dst, |d| {
        d.fill(0.0);
        Ok(())
    })
}
