//! The end of a training step, and the choice of a token.

use super::{assert_same, contiguous, input};
use crate::adamw::{self, Options};
use crate::backend::metal::computes;
use crate::cross_entropy::metal::Problem;
use crate::cross_entropy::{self, AllCounted, IGNORE, Statistics, Targets};
use crate::testing::*;
use crate::{adafactor, adamw8bit, flat, lion, muon, sampling, sgd};
use candle_core::{DType, Device, Tensor};

const OPTIONS: Options = Options {
    learning_rate: 1e-2,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-8,
    weight_decay: 0.1,
    bias_correction: true,
};

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
#[ignore = "needs clang, or a Mac with the feature metal"]
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
            let norm = flat::norm(&gradient).unwrap();
            results.push(Tensor::new(norm as f32, device).unwrap());
            let (whole, part) = random_sum(3 * count, device);
            flat::accumulate(&part.reshape((3, count)).unwrap(), &gradient, 0.3).unwrap();
            results.push(whole);
            let (whole, part) = random_sum(count, device);
            flat::fill_zero(&part).unwrap();
            results.push(whole);
            results
        });
    }
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_sgd_and_lion_agrees_with_the_kernels() {
    let momentum = sgd::Options {
        learning_rate: 1e-2,
        momentum: 0.9,
        dampening: 0.1,
        nesterov: false,
        weight_decay: 0.1,
    };
    let nesterov = sgd::Options { dampening: 0.0, nesterov: true, ..momentum };
    let plain = sgd::Options { momentum: 0.0, ..momentum };
    let options = lion::Options { learning_rate: 1e-2, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
    for count in [1, 39, 5001] {
        assert_same(|_, device| {
            let mut results = Vec::new();
            let mut keep = |norm: f64, [params, grads, kept, _]: [(Tensor, Tensor); 4]| {
                results.push(Tensor::new(norm as f32, device).unwrap());
                results.extend([params.0, grads.0, kept.0]);
            };
            for max_norm in [None, Some(0.25)] {
                for (options, number) in
                    [(&momentum, 1), (&momentum, 2), (&nesterov, 2), (&plain, 2)]
                {
                    let all = state(count, device);
                    let [params, grads, v] = [0, 1, 2].map(|index| &all[index].1);
                    let v = (options.momentum != 0.0).then_some(v);
                    let norm =
                        sgd::clipped_step(params, grads, v, number, max_norm, count / 3, options);
                    keep(norm.unwrap(), all);
                }
                let all = state(count, device);
                let [params, grads, m] = [0, 1, 2].map(|index| &all[index].1);
                let norm = lion::clipped_step(params, grads, m, max_norm, count / 3, &options);
                keep(norm.unwrap(), all);
            }
            results
        });
    }
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_muon_agrees_with_the_kernels() {
    let options =
        muon::Options { learning_rate: 1e-2, momentum: 0.9, nesterov: true, weight_decay: 0.1 };
    for nesterov in [true, false] {
        assert_same(|_, device| {
            let [params, grads, m, update] = state(39, device);
            let options = muon::Options { nesterov, ..options };
            muon::step(&params.1, &grads.1, &m.1, &update.1, 0.5, &options).unwrap();
            let shapes: [[usize; 2]; 3] =
                if nesterov { [[8, 21], [21, 8], [5, 5]] } else { [[1, 3]; 3] };
            let directions = shapes.map(|shape| {
                let x = contiguous(&shape, 7, DType::F32, device);
                muon::orthogonalize(&x, 2).unwrap()
            });
            [params, grads, m, update]
                .map(|(whole, _)| whole)
                .into_iter()
                .chain(directions)
                .collect()
        });
    }
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_adafactor_agrees_with_the_kernels() {
    let options = adafactor::Options {
        learning_rate: 1e-2,
        epsilon: 1e-30,
        scale_epsilon: 1e-3,
        clip_threshold: 0.7,
        decay_rate: -0.8,
        scale_parameter: false,
        relative_step: false,
        warmup_init: false,
        weight_decay: 0.1,
    };
    let scaled = adafactor::Options { scale_parameter: true, relative_step: true, ..options };
    for (shape, options) in [([3, 70], options), ([41, 4], scaled), ([1, 5001], scaled)] {
        assert_same(|_, device| {
            let [rows, columns] = shape;
            let [params, grads, ..] = state(rows * columns, device);
            let of =
                |count: usize, seed| contiguous(&[count], seed, DType::F32, device).abs().unwrap();
            let (row_means, column_means) = (of(rows, 7), of(columns, 8));
            let matrix = |tensor: &Tensor| tensor.reshape((rows, columns)).unwrap();
            let (p, g) = (matrix(&params.1), matrix(&grads.1));
            adafactor::step(&p, &g, &row_means, &column_means, 3, 0.5, &options).unwrap();
            vec![params.0, grads.0, row_means, column_means]
        });
    }
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_adamw8bit_agrees_with_the_kernels() {
    for count in [1, 39, 700] {
        assert_same(|_, device| {
            let [params, grads, ..] = state(count, device);
            let blocks = count.div_ceil(adamw8bit::BLOCK);
            let codes = || Tensor::zeros(count, DType::U8, device).unwrap();
            let scales = || Tensor::zeros(blocks, DType::F32, device).unwrap();
            let (m_codes, v_codes, m_scales, v_scales) = (codes(), codes(), scales(), scales());
            let moments = adamw8bit::Moments {
                m_codes: &m_codes,
                m_scales: &m_scales,
                v_codes: &v_codes,
                v_scales: &v_scales,
            };
            let mut results = Vec::new();
            for number in 1..=2 {
                let [_, again, ..] = state(count, device);
                flat::accumulate(&grads.1, &again.1, 0.5).unwrap();
                adamw8bit::step(&params.1, &grads.1, moments, number, 0.5, &OPTIONS).unwrap();
                // As they are now; on Metal Candle's `copy` would change with them.
                let copy = |tensor: &Tensor| tensor.force_contiguous().unwrap();
                results.extend([&params.0, &grads.0, &m_scales, &v_scales].map(copy));
            }
            results.extend([m_codes, v_codes].map(|codes| codes.to_dtype(DType::F32).unwrap()));
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
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_makes_no_step_of_broken_gradients() {
    assert_same(|_, device| {
        let [params, grads, m, v] = state(37, device).map(|(_, part)| part);
        let broken = Tensor::new(&[f32::INFINITY], device).unwrap();
        crate::copy::write(&grads, &broken, 0, 30).unwrap();
        let norm =
            adamw::clipped_step_deferred(&params, &grads, &m, &v, 3, Some(1.0), 37, &OPTIONS);
        assert!(!norm.unwrap().to_scalar::<f32>().unwrap().is_finite());
        crate::copy::write(&grads, &broken, 0, 30).unwrap();
        let options =
            lion::Options { learning_rate: 1e-2, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };
        assert!(!lion::clipped_step(&params, &grads, &m, None, 37, &options).unwrap().is_finite());
        vec![params, grads, m, v]
    });
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
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
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_cross_entropy_agrees_with_the_kernels() {
    let (n, d, v) = (150, 12, 45);
    let some: Vec<u32> =
        (0..n).map(|row| if row % 3 == 1 { IGNORE } else { row * 7 % v }).collect();
    let all: Vec<u32> = (0..n).map(|row| row * 7 % v).collect();
    let none = vec![IGNORE; n as usize];
    let options = |softcap, logit_scale| cross_entropy::Options {
        softcap,
        logit_scale,
        chunk: 64,
        statistics: softcap.is_none(),
    };
    let weights: Vec<f32> = (0..n).map(|row| (row % 5) as f32 * 0.5 - 0.75).collect();
    // Three targets a row, the last of which not all rows have.
    let several: Vec<u32> = (0..n)
        .flat_map(|row| {
            let last = if row % 4 == 0 { IGNORE } else { (row + 8) % v };
            if row % 5 == 2 { [IGNORE; 3] } else { [row % v, (row + 3) % v, last] }
        })
        .collect();
    let shares: Vec<f32> = (0..3 * n).map(|place| (place * 7 % 5) as f32 * 0.25).collect();
    for (targets, options, needs, columns) in [
        (&some, options(None, 1.0), (true, true), d),
        (&some, options(Some(1.5), 0.5), (true, false), d),
        (&all, options(None, 1.0), (true, true), d),
        (&all, options(None, 1.0), (true, true), 5),
        (&all, options(Some(0.8), 1.0), (false, true), d),
        (&some, options(Some(0.8), 1.0), (false, true), 3),
        (&all, options(None, 1.0), (false, false), d),
        (&none, options(None, 1.0), (true, true), 4),
        (&several, options(None, 1.0), (true, true), d),
        (&several, options(Some(0.8), 2.0), (true, true), 3),
    ] {
        let targets = Targets {
            tokens: targets,
            shares: (targets.len() > n as usize).then_some(&shares),
            weights: Some(&weights),
        };
        assert_same(|dtype, device| {
            let hidden = strided_rows(&[n as usize, d], 1, dtype, device);
            let weight = input(&[v as usize, d], 2, dtype, device);
            let (need_dhidden, trained) = (needs.0, if needs.1 { columns } else { 0 });
            let found = if computes(&hidden) {
                // In chunks of fewer rows than a device would take.
                let (hidden, weight, options) = (&hidden, &weight, &options);
                let counted =
                    &AllCounted::find("cross_entropy", &targets, n as usize, v as usize).unwrap();
                Problem { hidden, weight, counted, options, need_dhidden, trained }
                    .run("cross_entropy", 64)
            } else {
                cross_entropy::forward(&hidden, &weight, &targets, &options, need_dhidden, trained)
            };
            let found = found.unwrap();
            let first = targets.tokens.iter().step_by(targets.tokens.len() / n as usize);
            assert_eq!(found.count, first.filter(|target| **target != IGNORE).count());
            assert_eq!((found.dhidden.is_some(), found.dweight.is_some()), needs);
            assert_eq!(found.statistics.is_some(), options.statistics);
            let mut all = vec![found.loss, found.losses];
            all.extend([found.dhidden, found.dweight].into_iter().flatten());
            if let Some(Statistics { entropies, .. }) = found.statistics {
                all.push(entropies);
            }
            all
        });
    }
}

/// Rows at a distance from each other.
fn strided_rows(shape: &[usize; 2], seed: u64, dtype: DType, device: &Device) -> Tensor {
    let wide = contiguous(&[shape[0], shape[1] + 3], seed, dtype, device);
    wide.narrow(1, 2, shape[1]).unwrap()
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_finds_the_first_of_tokens_that_are_alike() {
    let options =
        cross_entropy::Options { softcap: None, logit_scale: 1.0, chunk: 2, statistics: true };
    let hits = |dtype, device: &Device| {
        let ones = |rows: usize| Tensor::ones((rows, 8), dtype, device).unwrap();
        let targets = Targets::new(&[0, 1, 299, 0]);
        let found = cross_entropy::forward(&ones(4), &ones(300), &targets, &options, false, 0);
        found.unwrap().statistics.unwrap().hits
    };
    let on_host = hits(DType::F32, &Device::Cpu).to_vec1::<f32>().unwrap();
    assert_eq!(on_host, [1.0, 0.0, 0.0, 1.0]);
    assert_same(|dtype, device| vec![hits(dtype, device)]);
}

/// The public function takes the same way, in one chunk.
#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_takes_the_loss_of_public_calls() {
    assert_same(|dtype, device| {
        let (hidden, weight) =
            (input(&[5, 8], 1, dtype, device), input(&[11, 8], 2, dtype, device));
        let options =
            cross_entropy::Options { softcap: None, logit_scale: 1.0, chunk: 2, statistics: false };
        let targets = Targets::new(&[3, IGNORE, 10, 0, 3]);
        let found = cross_entropy::forward(&hidden, &weight, &targets, &options, true, 8);
        let found = found.unwrap();
        [Some(found.loss), found.dhidden, found.dweight].into_iter().flatten().collect()
    });
}
