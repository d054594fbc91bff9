//! Muon (Jordan et al. 2024, <https://kellerjordan.github.io/posts/muon/>): momentum for matrices, whose
//! direction is made nearly orthogonal by Newton and Schulz's iteration.
//!
//! ```text
//! g = grad_scale·grad         m ← m + (g - m)·(1 - μ)
//! u = m                       or, Nesterov's, u = g + (m - g)·μ
//! p ← p·(1 - lr·wd)           and then p ← p - lr'·O(u)
//!
//! O(u): X = u / max(‖u‖, ε), and 5 times X ← a·X + (b·A + c·A²)·X with A = X·Xᵀ
//! ```
//!
//! as `torch.optim.Muon` does it, with products in f32 instead of bf16. For a matrix with more rows than
//! columns `A = Xᵀ·X` is multiplied from the right, which gives the same with smaller products.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{change_in_place, dispatch_full, is_full_precision};
use crate::backend::{on_gpu, require_dtype, require_rank, require_together};
use crate::flat::{Step, require_contiguous};
use crate::{arithmetic, matmul};
use candle_core::{DType, Result, Tensor};
use cpu::Update;

/// The coefficients of the iteration, steepest at zero.
const COEFFICIENTS: [f64; 3] = [3.4445, -4.7750, 2.0315];
/// Keeps the norm's reciprocal finite.
const EPSILON: f64 = 1e-7;

/// Muon's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Of this step.
    pub learning_rate: f64,
    /// Decay of the momentum, `μ`.
    pub momentum: f64,
    /// Whether a step looks ahead, as Nesterov's does.
    pub nesterov: bool,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// The first half of a step, in place: decays `params`, takes `grads` times `grad_scale` up into the momentum
/// `m`, writes to `update` what [`orthogonalize`] makes a direction of, matrix by matrix, and leaves the
/// gradients zero. All are `(n)` of one dtype, f32 or f64; `m` starts as zeros.
///
/// # Errors
/// When shapes or dtypes don't fit, two of the tensors share storage, one isn't contiguous, or they aren't
/// on one device. Nothing is changed then.
pub fn step(
    params: &Tensor,
    grads: &Tensor,
    m: &Tensor,
    update: &Tensor,
    grad_scale: f32,
    options: &Options,
) -> Result<()> {
    let step = Step {
        operation: "muon::step",
        params,
        grads,
        states: [("m", m), ("update", update)],
        decayed: params.elem_count(),
    };
    step.check_clipped(None.into())?;
    let rule = Update::new(options);
    on_gpu!(params, gpu => gpu::step(&step, grad_scale, &rule));
    step.cleared_on_cpu(grad_scale, &rule)
}

/// A nearly orthogonal matrix of the directions of `x` `(rows, columns)`, f32 or on the CPU f64, by
/// `iterations` steps of Newton and Schulz. All singular values of the result are near 1, but for those that
/// were next to nothing. `x` is divided by its norm in place.
///
/// # Errors
/// When `x` isn't a contiguous matrix of that dtype, or on a device that this build has no kernels for.
pub fn orthogonalize(x: &Tensor, iterations: usize) -> Result<Tensor> {
    const OPERATION: &str = "muon::orthogonalize";
    require_together(OPERATION, &[x])?;
    require_rank(OPERATION, "x", x, 2, "(rows, columns)")?;
    require_contiguous(OPERATION, "x", x)?;
    if !is_full_precision(x.dtype()) {
        require_dtype(OPERATION, "x", x, DType::F32)?;
    }
    normalize(OPERATION, x)?;
    let [a, b, c] = COEFFICIENTS;
    let (rows, columns) = x.dims2()?;
    let mut x = x.clone();
    for _ in 0..iterations {
        let gram = if rows > columns {
            matmul::linear_backward_weight(&x, &x)?
        } else {
            matmul::linear(&x, &x, None)?
        };
        // It is symmetric, and so is what follows from it.
        let square = matmul::linear(&gram, &gram, None)?;
        let both = arithmetic::add(&arithmetic::scale(&gram, b)?, &arithmetic::scale(&square, c)?)?;
        let product = if rows > columns {
            matmul::linear(&x, &both, None)?
        } else {
            matmul::linear_backward_input(&both, &x)?
        };
        x = arithmetic::add(&arithmetic::scale(&x, a)?, &product)?;
    }
    Ok(x)
}

/// `x ← x / max(‖x‖, ε)`
fn normalize(operation: &'static str, x: &Tensor) -> Result<()> {
    on_gpu!(x, gpu => gpu::normalize(x));
    let divisor = crate::flat::norm(x)?.max(EPSILON);
    dispatch_full!(x.dtype(), A => change_in_place::<A>(operation, x, |x| {
        cpu::divide(x, divisor);
        Ok(())
    }))
}
