//! A step of Lion on the CPU.

use super::Options;
use crate::backend::cpu::Real;
use crate::flat::cpu::Rule;

/// What is the same for all elements of one step.
pub(super) struct Update {
    learning_rate: f64,
    decay: f64,
    beta1: f64,
    beta2: f64,
}

impl Update {
    pub(super) fn new(options: &Options) -> Self {
        let Options { learning_rate, beta1, beta2, weight_decay } = *options;
        Update { learning_rate, decay: 1.0 - learning_rate * weight_decay, beta1, beta2 }
    }

    /// In the order of the kernels' struct.
    #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
    pub(super) fn constants(&self) -> [f32; 6] {
        let Update { learning_rate, decay, beta1, beta2 } = *self;
        [learning_rate, decay, beta1, 1.0 - beta1, beta2, 1.0 - beta2].map(|number| number as f32)
    }
}

impl<A: Real> Rule<A, 1> for Update {
    #[inline(always)]
    fn step(&self, params: &mut [A], grads: &[A], [m]: [&mut [A]; 1], grad_scale: A, decays: bool) {
        let number = A::from_f64;
        let decay = if decays { number(self.decay) } else { A::ONE };
        let learning_rate = number(self.learning_rate);
        let (beta1, one_minus_beta1) = (number(self.beta1), number(1.0 - self.beta1));
        let (beta2, one_minus_beta2) = (number(self.beta2), number(1.0 - self.beta2));
        for ((p, g), m) in params.iter_mut().zip(grads).zip(m) {
            let g = *g * grad_scale;
            let c = beta1 * *m + one_minus_beta1 * g;
            *m = beta2 * *m + one_minus_beta2 * g;
            let sign = if c > A::ZERO {
                A::ONE
            } else if c < A::ZERO {
                -A::ONE
            } else {
                A::ZERO
            };
            *p = *p * decay - learning_rate * sign;
        }
    }
}
