use super::*;
use crate::flat::tests::{Case, assert_parts, assert_steps};
use crate::testing::*;
use candle_core::{DType, Device};

const OPTIONS: Options = Options {
    learning_rate: 1e-2,
    momentum: 0.9,
    dampening: 0.0,
    nesterov: false,
    weight_decay: 0.1,
};

/// The algorithm in the documentation of `torch.optim.SGD`, one element.
fn reference(options: &Options, p: &mut f64, state: &mut [f64], g: f64, step: i32, decays: bool) {
    let Options { learning_rate, momentum, dampening, nesterov, weight_decay } = *options;
    let mut g = if decays { g + weight_decay * *p } else { g };
    if let [b] = state {
        *b = if step > 1 { momentum * *b + (1.0 - dampening) * g } else { g };
        g = if nesterov { g + momentum * *b } else { *b };
    }
    *p -= learning_rate * g;
}

fn in_every_case(check: impl Fn(&Case)) {
    for options in [
        OPTIONS,
        Options { nesterov: true, ..OPTIONS },
        Options { dampening: 0.3, weight_decay: 0.0, ..OPTIONS },
        Options { momentum: 0.0, dampening: 0.3, ..OPTIONS },
    ] {
        check(&Case {
            states: usize::from(options.momentum != 0.0),
            undecided: 0,
            step: &|buffers, number, clip, decayed| {
                let (params, grads, v) = (&buffers[0], &buffers[1], buffers.get(2));
                clipped_step(params, grads, v, number, clip, decayed, &options)
            },
            reference: &|p, state, g, step, decays| reference(&options, p, state, g, step, decays),
        });
    }
}

#[test]
fn steps_are_those_of_the_definition() {
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
fn momentum_is_kept_when_there_is_some() {
    let ones = || Tensor::ones(4, DType::F32, &Device::Cpu).unwrap();
    let step = |v: Option<&Tensor>, number, options: &Options| {
        message(clipped_step(&ones(), &ones(), v, number, None, 0, options))
    };
    let wrong = step(None, 1, &OPTIONS);
    assert!(wrong.contains("v isn't given with a momentum of 0.9"), "{wrong}");
    let wrong = step(Some(&ones()), 1, &Options { momentum: 0.0, ..OPTIONS });
    assert!(wrong.contains("v is given with a momentum of 0"), "{wrong}");
    assert!(step(Some(&ones()), 0, &OPTIONS).contains("the step is 0"));
}
