//! The passes over flat gradients and parameters on the CPU, in chunks of a fixed size.

use crate::backend::cpu::{
    Disjoint, PARALLEL_CHUNK, Real, Values, dot, for_each_chunk, for_each_index,
};

/// How an optimiser changes parameters, element by element. `STATES` are the numbers that it keeps of each.
pub(crate) trait Rule<A: Real, const STATES: usize>: Sync {
    /// One step of neighbouring elements, with gradients that are to be multiplied by `grad_scale`.
    /// `decays` says whether weight decay applies to them.
    fn step(
        &self,
        params: &mut [A],
        grads: &[A],
        states: [&mut [A]; STATES],
        grad_scale: A,
        decays: bool,
    );
}

/// The gradients of a step.
pub(crate) enum Gradients<'a, A> {
    /// They stay as they are.
    Kept(&'a [A]),
    /// They are zero afterwards.
    Cleared(&'a mut [A]),
}

pub(crate) fn step<A: Real, const STATES: usize>(
    rule: &impl Rule<A, STATES>,
    params: &mut [A],
    grads: Gradients<A>,
    states: [&mut [A]; STATES],
    grad_scale: A,
    decayed: usize,
) {
    let count = params.len();
    let (params, states) = (Disjoint::new(params), states.map(Disjoint::new));
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
            let boundary = decayed.clamp(start, end);
            for (range, decays) in [(start..boundary, true), (boundary..end, false)] {
                // SAFETY: chunks don't overlap.
                let params = unsafe { params.slice(range.clone()) };
                // SAFETY: as above.
                let states = states.each_ref().map(|state| unsafe { state.slice(range.clone()) });
                match &cleared {
                    None => rule.step(params, &kept[range], states, grad_scale, decays),
                    Some(grads) => {
                        // SAFETY: as above.
                        let grads = unsafe { grads.slice(range) };
                        rule.step(params, grads, states, grad_scale, decays);
                        // While they are in the cache.
                        grads.fill(A::ZERO);
                    }
                }
            }
        },
    );
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
