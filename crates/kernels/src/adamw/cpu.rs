//! A step of AdamW on the CPU.

use super::Options;
use crate::backend::cpu::Real;
use crate::flat::cpu::Rule;

/// What is the same for all elements of one step.
pub(crate) struct Update {
    decay: f64,
    beta1: f64,
    beta2: f64,
    epsilon: f64,
    step_size: f64,
    correction: f64,
}

impl Update {
    pub(crate) fn new(step: usize, options: &Options) -> Self {
        let step = step as f64;
        let corrected =
            |beta: f64| if options.bias_correction { 1.0 - beta.powf(step) } else { 1.0 };
        Update {
            decay: 1.0 - options.learning_rate * options.weight_decay,
            beta1: options.beta1,
            beta2: options.beta2,
            epsilon: options.epsilon,
            step_size: options.learning_rate / corrected(options.beta1),
            correction: corrected(options.beta2).sqrt(),
        }
    }

    /// In the order of the kernels' struct.
    #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
    pub(crate) fn constants(&self) -> [f32; 7] {
        let Update { decay, beta1, beta2, epsilon, step_size, correction } = *self;
        [decay, 1.0 - beta1, beta2, 1.0 - beta2, epsilon, step_size, correction]
            .map(|number| number as f32)
    }
}

impl<A: Real> Rule<A, 2> for Update {
    #[inline(always)]
    fn step(
        &self,
        params: &mut [A],
        grads: &[A],
        [m, v]: [&mut [A]; 2],
        grad_scale: A,
        decays: bool,
    ) {
        let number = A::from_f64;
        let decay = if decays { number(self.decay) } else { A::ONE };
        let one_minus_beta1 = number(1.0 - self.beta1);
        let (beta2, one_minus_beta2) = (number(self.beta2), number(1.0 - self.beta2));
        let (epsilon, step_size) = (number(self.epsilon), number(self.step_size));
        let correction = number(self.correction);
        for (((p, g), m), v) in params.iter_mut().zip(grads).zip(m).zip(v) {
            let g = *g * grad_scale;
            *m += (g - *m) * one_minus_beta1;
            *v = *v * beta2 + one_minus_beta2 * g * g;
            let denominator = v.sqrt() / correction + epsilon;
            *p = *p * decay - step_size * (*m / denominator);
        }
    }
}
