//! The end of a training step, and the choice of a token.

use super::{assert_same, contiguous, input};
use crate::adamw::{self, Options};
use crate::cross_entropy::metal::Problem;
use crate::cross_entropy::{self, IGNORE};
use crate::device::metal::computes;
use crate::sampling;
use crate::testing::*;
use candle_core::{DType, Device, Tensor};

const OPTIONS: Options =
    Options { learning_rate: 1e-2, beta1: 0.9, beta2: 0.99, epsilon: 1e-8, weight_decay: 0.1 };

/// Parameters, gradients, m and v: parts of larger buffers of their own, with what lies around them.
fn state(count: usize, device: &Device) -> [(Tensor, Tensor); 4] {
    [1, 2, 3, 4].map(|seed| {
        let whole = contiguous(&[count + 5], seed, DType::F32, device);
        let whole = if seed == 4 { whole.abs().unwrap() } else { whole };
        let part = whole.narrow(0, 3, count).unwrap();
        (whole, part)
    })
}

#[test]
fn metal_host_of_adamw_agrees_with_the_kernels() {
    for count in [1, 39, 5001] {
        assert_same(|dtype, device| {
            let mut results = Vec::new();
            let [params, grads, m, v] = state(count, device);
            let spread = strided(&grads.1);
            adamw::step(&params.1, &spread, &m.1, &v.1, 3, 0.5, count / 3, &OPTIONS).unwrap();
            results.extend([params.0, m.0, v.0]);
            for max_norm in [None, Some(0.25)] {
                let [params, grads, m, v] = state(count, device);
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
                results.push(Tensor::new(norm.unwrap() as f32, device).unwrap());
                results.extend([params.0, grads.0, m.0, v.0]);
            }
            let gradient = input(&[3, count], 5, dtype, device);
            let norm = adamw::norm(&gradient).unwrap();
            results.push(Tensor::new(norm as f32, device).unwrap());
            let (whole, part) = random_sum(3 * count, device);
            adamw::accumulate(&part.reshape((3, count)).unwrap(), &gradient, 0.3).unwrap();
            results.push(whole);
            let (whole, part) = random_sum(count, device);
            adamw::fill_zero(&part).unwrap();
            results.push(whole);
            results
        });
    }
}

/// A contiguous part of a larger f32 buffer, which comes first.
fn random_sum(count: usize, device: &Device) -> (Tensor, Tensor) {
    let whole = contiguous(&[count + 3], 6, DType::F32, device);
    let part = whole.narrow(0, 2, count).unwrap();
    (whole, part)
}

#[test]
fn metal_host_makes_no_step_of_broken_gradients() {
    assert_same(|_, device| {
        let [params, grads, m, v] = state(37, device).map(|(_, part)| part);
        let broken = Tensor::new(&[f32::INFINITY], device).unwrap();
        crate::copy::write(&grads, &broken, 0, 30).unwrap();
        let norm =
            adamw::clipped_step_deferred(&params, &grads, &m, &v, 3, Some(1.0), 37, &OPTIONS);
        assert!(!norm.unwrap().to_scalar::<f32>().unwrap().is_finite());
        vec![params, grads, m, v]
    });
}

#[test]
fn metal_host_of_greedy_choices_agrees_with_the_kernels() {
    assert_same(|dtype, device| {
        let logits = contiguous(&[2, 3, 401], 1, dtype, device);
        let greedy = |logits: &Tensor| sampling::greedy(logits).unwrap();
        let last = logits.narrow(1, 2, 1).unwrap();
        [&logits, &input(&[2, 3, 401], 1, dtype, device), &last]
            .map(|logits| greedy(logits).to_dtype(DType::F32).unwrap())
            .to_vec()
    });
}

/// Some rows that don't count, in several chunks, with what each dtype's products and gradients round.
#[test]
fn metal_host_of_cross_entropy_agrees_with_the_kernels() {
    let (n, d, v) = (150, 12, 45);
    let some: Vec<u32> =
        (0..n).map(|row| if row % 3 == 1 { IGNORE } else { row * 7 % v }).collect();
    let all: Vec<u32> = (0..n).map(|row| row * 7 % v).collect();
    let none = vec![IGNORE; n as usize];
    let options = |softcap, logit_scale| cross_entropy::Options { softcap, logit_scale, chunk: 64 };
    for (targets, options, needs) in [
        (&some, options(None, 1.0), (true, true)),
        (&some, options(Some(1.5), 0.5), (true, false)),
        (&all, options(None, 1.0), (true, true)),
        (&all, options(Some(0.8), 1.0), (false, true)),
        (&all, options(None, 1.0), (false, false)),
        (&none, options(None, 1.0), (true, true)),
    ] {
        assert_same(|dtype, device| {
            let hidden = strided_rows(&[n as usize, d], 1, dtype, device);
            let weight = input(&[v as usize, d], 2, dtype, device);
            let (need_dhidden, need_dweight) = needs;
            let found = if computes(&hidden) {
                // In chunks of fewer rows than a device would take.
                let counted = targets.iter().copied().enumerate();
                let counted: Vec<_> = counted.filter(|(_, target)| *target != IGNORE).collect();
                let (hidden, weight, counted) = (&hidden, &weight, &counted);
                let options = &options;
                Problem { hidden, weight, counted, options, need_dhidden, need_dweight }
                    .run("cross_entropy", 64)
            } else {
                cross_entropy::forward(
                    &hidden,
                    &weight,
                    targets,
                    &options,
                    need_dhidden,
                    need_dweight,
                )
            };
            let found = found.unwrap();
            assert_eq!(found.count, targets.iter().filter(|target| **target != IGNORE).count());
            assert_eq!((found.dhidden.is_some(), found.dweight.is_some()), needs);
            [Some(found.loss), found.dhidden, found.dweight].into_iter().flatten().collect()
        });
    }
}

/// Rows at a distance from each other.
fn strided_rows(shape: &[usize; 2], seed: u64, dtype: DType, device: &Device) -> Tensor {
    let wide = contiguous(&[shape[0], shape[1] + 3], seed, dtype, device);
    wide.narrow(1, 2, shape[1]).unwrap()
}

/// The public function takes the same way, in one chunk.
#[test]
fn metal_takes_the_loss_of_public_calls() {
    assert_same(|dtype, device| {
        let (hidden, weight) =
            (input(&[5, 8], 1, dtype, device), input(&[11, 8], 2, dtype, device));
        let options = cross_entropy::Options { softcap: None, logit_scale: 1.0, chunk: 2 };
        let targets = [3, IGNORE, 10, 0, 3];
        let found = cross_entropy::forward(&hidden, &weight, &targets, &options, true, true);
        let found = found.unwrap();
        [Some(found.loss), found.dhidden, found.dweight].into_iter().flatten().collect()
    });
}
