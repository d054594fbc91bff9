//! The choice of a token, by its kernel in every mode of the emulator.

use super::{THOROUGH, by_kernels, input};
use crate::sampling::tests::{
    Expected, OFF, adjustments, assert_no_distribution, assert_rows, choose_one, logits,
    many_options,
};
use crate::sampling::{Adjustment, Choice, Options};
use crate::testing::*;
use candle_core::{DType, Device, Tensor};

/// Exponentials are in f32 here.
const TOLERANCE: f64 = 2e-5;

/// A choice in the form of tensors; every run has to give the same.
fn words(choice: Choice) -> Vec<Tensor> {
    let Choice::Token { id, logprob } = choice else { panic!("{choice:?}") };
    vec![Tensor::new(&[f64::from(id), logprob], &Device::Cpu).unwrap()]
}

/// Asserts choices from these logits in some runs, which have to find the same; `round` says in which.
fn assert_choices(
    round: usize,
    logits: &Tensor,
    adjustments: &[Adjustment],
    options: &Options,
    uniforms: &[f64],
) {
    let expected = Expected::of(&values(logits), adjustments, options);
    // Looking for races takes long.
    let other = if round.is_multiple_of(8) { 4 + round / 8 % 3 } else { (round + 1) % 4 };
    let runs = [round % 4, other].map(|run| THOROUGH[run]);
    let found = by_kernels(&runs, |device| {
        let logits = there(logits, device);
        let choice = |uniform: &f64| {
            let choice = choose_one(&logits, adjustments, options, *uniform);
            let what = format!("{} of {options:?}", logits.elem_count());
            expected.assert(choice, *uniform, [TOLERANCE; 2], &what);
            words(choice)
        };
        uniforms.iter().flat_map(choice).collect()
    });
    for pair in found.windows(2) {
        for (one, other) in pair[0].iter().zip(&pair[1]) {
            assert_identical(one, other);
        }
    }
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_draws_what_the_cpu_does() {
    for (round, count) in [33usize, 1, 2, 401].into_iter().enumerate() {
        let adjusted = adjustments(count);
        let every = if count < 33 { 11 } else { 3 };
        for (index, options) in many_options().into_iter().enumerate().skip(round).step_by(every) {
            let dtype = [DType::F32, DType::F16, DType::BF16][(round + index) % 3];
            let logits = if index % 4 < 2 {
                Tensor::new(&logits(count, round as u64)[..], &Device::Cpu).unwrap()
            } else {
                (random(&[count], index as u64) * 9.0).unwrap()
            };
            let logits = logits.to_dtype(dtype).unwrap();
            let adjustments = if (round + index) % 2 == 0 { &adjusted[..] } else { &[] };
            let uniform = [0.0, 0.377, 1.0 - f64::EPSILON][index % 3];
            assert_choices(index, &logits, adjustments, &options, &[uniform]);
        }
    }
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_draws_from_equal_logits_and_larger_vocabularies() {
    let all = [
        Options { top_k: 7, ..OFF },
        Options { top_p: 0.3, ..OFF },
        Options { top_k: 100, top_p: 0.75, min_p: 0.9, ..OFF },
    ];
    for (round, options) in all.into_iter().enumerate() {
        for value in [-0.0f32, -1e30] {
            let equal = Tensor::full(value, 320, &Device::Cpu).unwrap();
            assert_choices(round, &equal, &[], &options, &[0.421]);
        }
        let scattered = (random(&[700], 5) * 9.0).unwrap().to_dtype(DType::F32).unwrap();
        assert_choices(2 * round, &scattered, &adjustments(700), &options, &[0.618]);
    }
    // Sums of weights that together outgrow 32 bits, and are far from the largest.
    let below = (random(&[601], 7) * 0.3).unwrap();
    let below = (below - 7.0).unwrap().to_dtype(DType::F32).unwrap();
    let above = Tensor::zeros(1, DType::F32, &Device::Cpu).unwrap();
    let skewed = Tensor::cat(&[above, below], 0).unwrap();
    assert_choices(1, &skewed, &[], &Options { top_p: 0.75, ..OFF }, &[0.97]);
    let wide = input(&[301], 5, DType::F16, &Device::Cpu);
    assert_choices(0, &wide, &[], &Options { top_k: 40, ..OFF }, &[0.618]);
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_draws_from_rows_what_each_gives_alone() {
    by_kernels(&THOROUGH[1..3], |device| {
        assert_rows(device, 5, 301, DType::F32);
        assert_rows(device, 4, 33, DType::BF16);
        Vec::new()
    });
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_tells_apart_logits_without_a_distribution() {
    by_kernels(&THOROUGH[2..4], |device| {
        assert_no_distribution(device);
        Vec::new()
    });
}
