//! Adafactor (Shazeer and Stern 2018, <https://arxiv.org/abs/1804.04235>): of the mean of squared gradients
//! of a matrix only the means of its rows and of its columns are kept.
//!
//! ```text
//! g = grad_scale·grad         β = 1 - t^decay_rate
//! r_i ← β·r_i + (1 - β)·mean_j(g_ij² + ε)        c_j ← β·c_j + (1 - β)·mean_i(g_ij² + ε)
//! u_ij = g_ij / (√(r_i / mean(r))·√c_j)          u ← u / max(1, RMS(u) / d)
//! ρ = lr                                          or, relative, min(1e-2, 1/√t), with warm-up min(1e-6·t, 1/√t)
//! ρ ← ρ·max(ε', RMS(p))                           if steps are scaled by the parameter
//! p ← p·(1 - ρ·wd) - ρ·u
//! ```
//!
//! as transformers and MLX do it. A vector is a matrix of one row, whose `c` is the mean of its squares.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{
    FULL_PRECISION, Real, change_all_in_place, dispatch_full, is_full_precision, require_separate,
};
use crate::backend::{on_gpu, require_dtype, require_rank, require_shape, require_together};
use crate::flat::{require_contiguous, require_step};
use candle_core::{Result, Tensor, bail};

/// Adafactor's settings.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Options {
    /// Of this step, unless it is relative.
    pub learning_rate: f64,
    /// Added to squared gradients, `ε`.
    pub epsilon: f64,
    /// The smallest size of a parameter that scales a step, `ε'`.
    pub scale_epsilon: f64,
    /// The largest root of the mean of squares of an update before the learning rate, `d`.
    pub clip_threshold: f64,
    /// The exponent of the step in the decay of means, negative.
    pub decay_rate: f64,
    /// Whether a step is scaled by the size of the parameter.
    pub scale_parameter: bool,
    /// Whether the learning rate follows from the number of the step.
    pub relative_step: bool,
    /// Whether a relative learning rate begins with a warm-up.
    pub warmup_init: bool,
    /// Decoupled weight decay.
    pub weight_decay: f64,
}

/// One step, in place, of a parameter `(rows, columns)` with its gradient of that shape and the means of
/// squares `row_means` `(rows)` and `column_means` `(columns)`, which start as zeros. All are f32, or on the
/// CPU f64. `step` counts from 1. The gradient is multiplied by `grad_scale` on the way and is zero
/// afterwards.
///
/// # Errors
/// When shapes or dtypes don't fit, `step` is 0, two of the tensors share storage, one isn't contiguous, or
/// they aren't on one device. Nothing is changed then.
pub fn step(
    params: &Tensor,
    grads: &Tensor,
    row_means: &Tensor,
    column_means: &Tensor,
    step: usize,
    grad_scale: f32,
    options: &Options,
) -> Result<()> {
    const OPERATION: &str = "adafactor::step";
    let all = [
        ("params", params),
        ("grads", grads),
        ("row_means", row_means),
        ("column_means", column_means),
    ];
    require_together(OPERATION, &all.map(|(_, tensor)| tensor))?;
    require_rank(OPERATION, "params", params, 2, "(rows, columns)")?;
    let (rows, columns) = params.dims2()?;
    let shapes: [&[usize]; 4] = [&[rows, columns], &[rows, columns], &[rows], &[columns]];
    for ((name, tensor), shape) in all.into_iter().zip(shapes) {
        require_shape(OPERATION, name, tensor, shape)?;
        require_dtype(OPERATION, name, tensor, params.dtype())?;
        require_contiguous(OPERATION, name, tensor)?;
    }
    if !is_full_precision(params.dtype()) {
        bail!(
            "metal-candle-kernels: {OPERATION}: params are {:?}, expected {FULL_PRECISION}: keep trainable parameters in full precision",
            params.dtype()
        )
    }
    require_step(OPERATION, step)?;
    for (index, (a, first)) in all.iter().enumerate() {
        for (b, second) in &all[..index] {
            require_separate(OPERATION, &format!("{b} and {a}"), first, second)?;
        }
    }
    if rows * columns == 0 {
        return Ok(());
    }
    let update = Update::new(step, grad_scale, options);
    let buffers = Buffers { params, grads, row_means, column_means, rows, columns };
    on_gpu!(params, gpu => gpu::step(&buffers, &update));
    dispatch_full!(params.dtype(), A => on_cpu::<A>(OPERATION, &buffers, &update))
}

fn on_cpu<A: Real>(operation: &'static str, buffers: &Buffers, update: &Update) -> Result<()> {
    let Buffers { params, grads, row_means, column_means, rows, columns } = *buffers;
    change_all_in_place::<A, 4>(operation, [params, grads, row_means, column_means], |slices| {
        cpu::step(slices, [rows, columns], update);
        Ok(())
    })
}

/// Checked tensors of a step.
struct Buffers<'a> {
    params: &'a Tensor,
    grads: &'a Tensor,
    row_means: &'a Tensor,
    column_means: &'a Tensor,
    rows: usize,
    columns: usize,
}

/// What is the same for all elements of one step.
struct Update {
    grad_scale: f64,
    beta: f64,
    epsilon: f64,
    clip_threshold: f64,
    learning_rate: f64,
    /// 0 or more if steps are scaled by the parameter, and else negative.
    scale_epsilon: f64,
    weight_decay: f64,
}

impl Update {
    fn new(step: usize, grad_scale: f32, options: &Options) -> Self {
        let number = step as f64;
        let learning_rate = if options.relative_step {
            let most = if options.warmup_init { 1e-6 * number } else { 1e-2 };
            most.min(number.sqrt().recip())
        } else {
            options.learning_rate
        };
        Update {
            grad_scale: grad_scale.into(),
            beta: 1.0 - number.powf(options.decay_rate),
            epsilon: options.epsilon,
            clip_threshold: options.clip_threshold,
            learning_rate,
            scale_epsilon: if options.scale_parameter { options.scale_epsilon } else { -1.0 },
            weight_decay: options.weight_decay,
        }
    }

    /// In the order of the kernels' struct.
    #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
    fn constants(&self) -> [f32; 8] {
        [
            self.grad_scale,
            self.beta,
            1.0 - self.beta,
            self.epsilon,
            self.clip_threshold,
            self.learning_rate,
            self.scale_epsilon,
            self.weight_decay,
        ]
        .map(|number| number as f32)
    }
}
