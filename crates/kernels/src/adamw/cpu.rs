//! The passes over flat parameters on the CPU, in chunks of a fixed size.

use super::Options;
use crate::device::cpu::{
    Disjoint, PARALLEL_CHUNK, Real, Values, dot, for_each_chunk, for_each_index,
};

/// What is the same for all elements of one step.
pub(super) struct Update {
    pub(super) decay: f64,
    pub(super) beta1: f64,
    pub(super) beta2: f64,
    pub(super) epsilon: f64,
    pub(super) step_size: f64,
    pub(super) correction: f64,
    pub(super) grad_scale: f64,
    pub(super) decayed: usize,
}

impl Update {
    pub(super) fn new(step: usize, grad_scale: f32, decayed: usize, options: &Options) -> Self {
        let step = step as f64;
        Update {
            decay: 1.0 - options.learning_rate * options.weight_decay,
            beta1: options.beta1,
            beta2: options.beta2,
            epsilon: options.epsilon,
            step_size: options.learning_rate / (1.0 - options.beta1.powf(step)),
            correction: (1.0 - options.beta2.powf(step)).sqrt(),
            grad_scale: grad_scale as f64,
            decayed,
        }
    }
}

/// The gradients of a step.
pub(super) enum Gradients<'a, A> {
    /// They stay as they are.
    Kept(&'a [A]),
    /// They are zero afterwards.
    Cleared(&'a mut [A]),
}

pub(super) fn step<A: Real>(
    update: &Update,
    params: &mut [A],
    grads: Gradients<A>,
    m: &mut [A],
    v: &mut [A],
) {
    let count = params.len();
    let (params, m, v) = (Disjoint::new(params), Disjoint::new(m), Disjoint::new(v));
    let (kept, cleared) = match grads {
        Gradients::Kept(grads) => (grads, None),
        Gradients::Cleared(grads) => (&[][..], Some(Disjoint::new(grads))),
    };
    for_each_index(
        count.div_ceil(PARALLEL_CHUNK),
        true,
        #[inline(always)]
        |index| {
            let start = index * PARALLEL_CHUNK;
            let end = (start + PARALLEL_CHUNK).min(count);
            let boundary = update.decayed.clamp(start, end);
            for (range, decay) in [(start..boundary, update.decay), (boundary..end, 1.0)] {
                // SAFETY: chunks don't overlap.
                let (params, m, v) = unsafe {
                    (params.slice(range.clone()), m.slice(range.clone()), v.slice(range.clone()))
                };
                let decay = A::from_f64(decay);
                match &cleared {
                    None => step_chunk(update, decay, params, &kept[range], m, v),
                    Some(grads) => {
                        // SAFETY: as above.
                        let grads = unsafe { grads.slice(range) };
                        step_chunk(update, decay, params, grads, m, v);
                        // While they are in the cache.
                        grads.fill(A::ZERO);
                    }
                }
            }
        },
    );
}

#[inline(always)]
fn step_chunk<A: Real>(
    update: &Update,
    decay: A,
    params: &mut [A],
    grads: &[A],
    m: &mut [A],
    v: &mut [A],
) {
    let number = A::from_f64;
    let one_minus_beta1 = number(1.0 - update.beta1);
    let (beta2, one_minus_beta2) = (number(update.beta2), number(1.0 - update.beta2));
    let (epsilon, step_size) = (number(update.epsilon), number(update.step_size));
    let (correction, grad_scale) = (number(update.correction), number(update.grad_scale));
    for (((p, g), m), v) in params.iter_mut().zip(grads).zip(m).zip(v) {
        let g = *g * grad_scale;
        *m += (g - *m) * one_minus_beta1;
        *v = *v * beta2 + one_minus_beta2 * g * g;
        let denominator = v.sqrt() / correction + epsilon;
        *p = *p * decay - step_size * (*m / denominator);
    }
}

pub(super) fn norm(grads: Values<f64>) -> f64 {
    let mut parts = vec![0f64; grads.len().div_ceil(PARALLEL_CHUNK)];
    for_each_chunk(
        &mut parts,
        1,
        #[inline(always)]
        |index, part| {
            let end = ((index + 1) * PARALLEL_CHUNK).min(grads.len());
            let mut block = [0f64; 512];
            part[0] = 0.0;
            for start in (index * PARALLEL_CHUNK..end).step_by(block.len()) {
                let count = (end - start).min(block.len());
                let block = &mut block[..count];
                grads.read(start, block);
                part[0] += dot(block, block);
            }
        },
    );
    parts.iter().sum::<f64>().sqrt()
}

pub(super) fn accumulate<A: Real>(dst: &mut [A], src: Values<A>, scale: A) {
    for_each_chunk(
        dst,
        PARALLEL_CHUNK,
        #[inline(always)]
        |index, dst| {
            let start = index * PARALLEL_CHUNK;
            let mut scratch = Vec::new();
            let src = src.block(start..start + dst.len(), &mut scratch);
            for (dst, src) in dst.iter_mut().zip(src) {
                *dst += scale * *src;
            }
        },
    );
}

pub(super) fn fill_zero<A: Real>(dst: &mut [A]) {
    for_each_chunk(
        dst,
        PARALLEL_CHUNK,
        #[inline(always)]
        |_, dst| dst.fill(A::ZERO),
    );
}
