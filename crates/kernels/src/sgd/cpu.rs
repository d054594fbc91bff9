//! A step of stochastic gradient descent on the CPU.

use super::Options;
use crate::backend::cpu::Real;
use crate::flat::cpu::Rule;

/// What is the same for all elements of one step.
pub(super) struct Update {
    learning_rate: f64,
    weight_decay: f64,
    momentum: f64,
    /// The share of a gradient that the momentum takes up.
    share: f64,
    nesterov: bool,
}

impl Update {
    pub(super) fn new(step: usize, options: &Options) -> Self {
        let Options { learning_rate, momentum, dampening, nesterov, weight_decay } = *options;
        let share = if step == 1 { 1.0 } else { 1.0 - dampening };
        Update { learning_rate, weight_decay, momentum, share, nesterov }
    }

    /// In the order of the kernels' struct.
    #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
    pub(super) fn constants(&self) -> [f32; 5] {
        let Update { learning_rate, weight_decay, momentum, share, nesterov } = *self;
        let nesterov = if nesterov { 1.0 } else { 0.0 };
        [learning_rate, weight_decay, momentum, share, nesterov].map(|number| number as f32)
    }
}

/// Without momentum.
impl<A: Real> Rule<A, 0> for Update {
    #[inline(always)]
    fn step(&self, params: &mut [A], grads: &[A], []: [&mut [A]; 0], grad_scale: A, decays: bool) {
        let weight_decay = A::from_f64(if decays { self.weight_decay } else { 0.0 });
        let learning_rate = A::from_f64(self.learning_rate);
        for (p, g) in params.iter_mut().zip(grads) {
            let g = *g * grad_scale + weight_decay * *p;
            *p -= learning_rate * g;
        }
    }
}

impl<A: Real> Rule<A, 1> for Update {
    #[inline(always)]
    fn step(&self, params: &mut [A], grads: &[A], [v]: [&mut [A]; 1], grad_scale: A, decays: bool) {
        let weight_decay = A::from_f64(if decays { self.weight_decay } else { 0.0 });
        let (learning_rate, momentum) =
            (A::from_f64(self.learning_rate), A::from_f64(self.momentum));
        let (share, nesterov) = (A::from_f64(self.share), self.nesterov);
        for ((p, g), v) in params.iter_mut().zip(grads).zip(v) {
            let g = *g * grad_scale + weight_decay * *p;
            *v = momentum * *v + share * g;
            *p -= learning_rate * if nesterov { g + momentum * *v } else { *v };
        }
    }
}
