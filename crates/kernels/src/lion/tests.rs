use super::*;
use crate::flat::tests::{Case, assert_parts, assert_steps};

const OPTIONS: Options =
    Options { learning_rate: 1e-2, beta1: 0.9, beta2: 0.99, weight_decay: 0.1 };

/// Algorithm 2 of the paper, one element.
fn reference(p: &mut f64, state: &mut [f64], g: f64, _: i32, decays: bool) {
    let Options { learning_rate, beta1, beta2, weight_decay } = OPTIONS;
    let update = (beta1 * state[0] + (1.0 - beta1) * g).signum();
    state[0] = beta2 * state[0] + (1.0 - beta2) * g;
    *p -= learning_rate * (update + if decays { weight_decay * *p } else { 0.0 });
}

fn in_every_case(check: impl Fn(&Case)) {
    check(&Case {
        states: 1,
        // A step is a sign.
        undecided: 2,
        step: &|buffers, _, clip, decayed| match buffers {
            [params, grads, m] => clipped_step(params, grads, m, clip, decayed, &OPTIONS),
            _ => unreachable!(),
        },
        reference: &reference,
    });
}

#[test]
fn steps_are_the_papers() {
    in_every_case(assert_steps);
    in_every_case(assert_parts);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_steps_match_the_cpu() {
    in_every_case(crate::flat::tests::assert_cuda_steps);
    in_every_case(crate::flat::tests::assert_cuda_parts);
}

#[test]
fn nothing_moves_what_has_no_gradient() {
    use candle_core::{DType, Device};
    let zeros = || Tensor::zeros(5, DType::F32, &Device::Cpu).unwrap();
    let params = Tensor::ones(5, DType::F32, &Device::Cpu).unwrap();
    clipped_step(&params, &zeros(), &zeros(), None, 0, &OPTIONS).unwrap();
    assert_eq!(params.to_vec1::<f32>().unwrap(), [1.0; 5]);
}
