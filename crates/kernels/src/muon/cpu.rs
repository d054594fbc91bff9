//! The passes of Muon on the CPU.

use super::Options;
use crate::backend::cpu::{PARALLEL_CHUNK, Real, for_each_chunk};
use crate::flat::cpu::Rule;

/// What is the same for all elements of one step.
pub(super) struct Update {
    decay: f64,
    momentum: f64,
    nesterov: bool,
}

impl Update {
    pub(super) fn new(options: &Options) -> Self {
        let Options { learning_rate, momentum, nesterov, weight_decay } = *options;
        Update { decay: 1.0 - learning_rate * weight_decay, momentum, nesterov }
    }

    /// In the order of the kernels' struct.
    #[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
    pub(super) fn constants(&self) -> [f32; 4] {
        let Update { decay, momentum, nesterov } = *self;
        let nesterov = if nesterov { 1.0 } else { 0.0 };
        [decay, momentum, 1.0 - momentum, nesterov].map(|number| number as f32)
    }
}

impl<A: Real> Rule<A, 2> for Update {
    #[inline(always)]
    fn step(
        &self,
        params: &mut [A],
        grads: &[A],
        [m, update]: [&mut [A]; 2],
        grad_scale: A,
        decays: bool,
    ) {
        let decay = if decays { A::from_f64(self.decay) } else { A::ONE };
        let (momentum, nesterov) = (A::from_f64(self.momentum), self.nesterov);
        let one_minus_momentum = A::from_f64(1.0 - self.momentum);
        for (((p, g), m), update) in params.iter_mut().zip(grads).zip(m).zip(update) {
            let g = *g * grad_scale;
            *m += (g - *m) * one_minus_momentum;
            *update = if nesterov { g + (*m - g) * momentum } else { *m };
            *p *= decay;
        }
    }
}

pub(super) fn divide<A: Real>(x: &mut [A], divisor: f64) {
    let divisor = A::from_f64(divisor);
    for_each_chunk(
        x,
        PARALLEL_CHUNK,
        #[inline(always)]
        |_, x| x.iter_mut().for_each(|x| *x /= divisor),
    );
}
