//! The end of a training step, and the choice of a token.

use super::{assert_same, input};
use crate::adamw::{self, Options};
use crate::sampling;
use crate::testing::*;
use candle_core::{DType, Tensor};

const OPTIONS: Options =
    Options { learning_rate: 1e-2, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1 };

/// Parameters, gradients, m and v: parts of larger buffers of their own, with what lies around them.
fn state(count: usize) -> [(Tensor, Tensor); 4] {
    [1, 2, 3, 4].map(|seed| {
        let whole = random(&[count + 5], seed).to_dtype(DType::F32).unwrap();
        let whole = if seed == 4 { whole.abs().unwrap() } else { whole };
        let part = whole.narrow(0, 3, count).unwrap();
        (whole, part)
    })
}

#[test]
fn metal_host_of_adamw_agrees_with_the_kernels() {
    for count in [1, 39, 5001] {
        assert_same(|dtype| {
            let mut results = Vec::new();
            let [params, grads, m, v] = state(count);
            let spread = strided(&grads.1);
            adamw::step(&params.1, &spread, &m.1, &v.1, 3, 0.5, count / 3, &OPTIONS).unwrap();
            results.extend([params.0, m.0, v.0]);
            for max_norm in [None, Some(0.25)] {
                let [params, grads, m, v] = state(count);
                let norm = adamw::clipped_step(
                    &params.1,
                    &grads.1,
                    &m.1,
                    &v.1,
                    3,
                    max_norm,
                    count / 3,
                    &OPTIONS,
                );
                results.push(Tensor::new(norm.unwrap() as f32, params.1.device()).unwrap());
                results.extend([params.0, grads.0, m.0, v.0]);
            }
            let gradient = input(&[3, count], 5, dtype);
            let norm = adamw::norm(&gradient).unwrap();
            results.push(Tensor::new(norm as f32, gradient.device()).unwrap());
            let (whole, part) = random_sum(3 * count);
            adamw::accumulate(&part.reshape((3, count)).unwrap(), &gradient, 0.3).unwrap();
            results.push(whole);
            let (whole, part) = random_sum(count);
            adamw::fill_zero(&part).unwrap();
            results.push(whole);
            results
        });
    }
}

/// A contiguous part of a larger f32 buffer, which comes first.
fn random_sum(count: usize) -> (Tensor, Tensor) {
    let whole = random(&[count + 3], 6).to_dtype(DType::F32).unwrap();
    let part = whole.narrow(0, 2, count).unwrap();
    (whole, part)
}

#[test]
fn metal_host_makes_no_step_of_broken_gradients() {
    assert_same(|_| {
        let [params, grads, m, v] = state(37).map(|(_, part)| part);
        let broken = Tensor::new(&[f32::INFINITY], grads.device()).unwrap();
        crate::copy::write(&grads, &broken, 0, 30).unwrap();
        let norm =
            adamw::clipped_step_deferred(&params, &grads, &m, &v, 3, Some(1.0), 37, &OPTIONS);
        assert!(!norm.unwrap().to_scalar::<f32>().unwrap().is_finite());
        vec![params, grads, m, v]
    });
}

#[test]
fn metal_host_of_greedy_choices_agrees_with_the_kernels() {
    assert_same(|dtype| {
        let logits = random(&[2, 3, 401], 1).to_dtype(dtype).unwrap();
        let greedy = |logits: &Tensor| sampling::greedy(logits).unwrap();
        let last = logits.narrow(1, 2, 1).unwrap();
        [&logits, &strided(&logits), &last]
            .map(|logits| greedy(logits).to_dtype(DType::F32).unwrap())
            .to_vec()
    });
}
