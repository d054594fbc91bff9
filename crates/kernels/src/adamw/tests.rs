use super::*;
use crate::flat::norm;
use crate::flat::tests::{Case, assert_parts, assert_steps};
use crate::testing::*;
use candle_core::{DType, Device};

const OPTIONS: Options = Options {
    learning_rate: 1e-2,
    beta1: 0.9,
    beta2: 0.99,
    epsilon: 1e-8,
    weight_decay: 0.1,
    bias_correction: true,
};

/// The algorithm as its paper writes it, one element.
fn reference(p: &mut f64, m: &mut f64, v: &mut f64, g: f64, step: i32, decays: bool) {
    let Options { learning_rate, beta1, beta2, epsilon, weight_decay, .. } = OPTIONS;
    if decays {
        *p -= learning_rate * weight_decay * *p;
    }
    *m = beta1 * *m + (1.0 - beta1) * g;
    *v = beta2 * *v + (1.0 - beta2) * g * g;
    let m_hat = *m / (1.0 - beta1.powi(step));
    let v_hat = *v / (1.0 - beta2.powi(step));
    *p -= learning_rate * m_hat / (v_hat.sqrt() + epsilon);
}

fn zeros(n: usize, dtype: DType) -> Tensor {
    Tensor::zeros(n, dtype, &Device::Cpu).unwrap()
}

/// A tensor with a storage of its own.
fn own(tensor: &Tensor, dtype: DType) -> Tensor {
    tensor.to_dtype(dtype).unwrap().copy().unwrap()
}

fn in_general(check: impl Fn(&Case)) {
    check(&Case {
        states: 2,
        undecided: 0,
        step: &|buffers, number, clip, decayed| match buffers {
            [params, grads, m, v] => {
                clipped_step(params, grads, m, v, number, clip, decayed, &OPTIONS)
            }
            _ => unreachable!(),
        },
        reference: &|p, state, g, step, decays| {
            let [m, v] = state else { unreachable!() };
            reference(p, m, v, g, step, decays);
        },
    });
}

#[test]
fn clipped_steps_are_the_papers() {
    in_general(assert_steps);
    in_general(assert_parts);
}

#[test]
fn steps_match_reference_and_decay_only_what_they_should() {
    let (n, decayed, grad_scale) = (40_000, 20_011, 0.5f32);
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 1e-6)] {
        let params = own(&random(&[n], 1), dtype);
        let (m, v) = (zeros(n, dtype), zeros(n, dtype));
        let (mut p_exact, mut m_exact, mut v_exact) = (values(&params), vec![0.0; n], vec![0.0; n]);
        for number in 1..=20 {
            let grads = own(&random(&[n], 10 + number as u64), dtype);
            step(&params, &grads, &m, &v, number, grad_scale, decayed, &OPTIONS).unwrap();
            for (i, g) in values(&grads).iter().enumerate() {
                let (p, m, v) = (&mut p_exact[i], &mut m_exact[i], &mut v_exact[i]);
                reference(p, m, v, g * grad_scale as f64, number as i32, i < decayed);
            }
        }
        for (actual, expected) in [(&params, p_exact), (&m, m_exact), (&v, v_exact)] {
            let expected = Tensor::from_vec(expected, n, &Device::Cpu).unwrap();
            assert_close(actual, &expected, tolerance);
        }
    }
}

#[test]
fn without_bias_correction_the_means_are_taken_as_they_are() {
    let options = Options { bias_correction: false, ..OPTIONS };
    let [p, g, m, v] = [1.0f64, 0.5, 0.0, 0.0].map(|x| Tensor::full(x, 1, &Device::Cpu).unwrap());
    step(&p, &g, &m, &v, 1, 1.0, 0, &options).unwrap();
    let expected = 1.0 - 1e-2 * (0.1 * 0.5) / ((0.01f64 * 0.25).sqrt() + 1e-8);
    assert!((values(&p)[0] - expected).abs() < 1e-15, "{p}");
}

#[test]
fn views_of_larger_buffers_change_in_place_and_nothing_else_does() {
    let buffers: Vec<Tensor> = (0..3).map(|_| zeros(10, DType::F32)).collect();
    let views: Vec<Tensor> = buffers.iter().map(|b| b.narrow(0, 3, 4).unwrap()).collect();
    let grads = strided(&Tensor::ones(4, DType::F32, &Device::Cpu).unwrap());
    step(&views[0], &grads, &views[1], &views[2], 1, 1.0, 0, &OPTIONS).unwrap();
    for buffer in &buffers {
        let changed: Vec<bool> = values(buffer).iter().map(|value| *value != 0.0).collect();
        assert_eq!(changed, [0, 0, 0, 1, 1, 1, 1, 0, 0, 0].map(|bit| bit == 1));
    }
    assert_eq!(values(&grads), [1.0; 4]);
}

#[test]
fn threads_do_not_change_bits() {
    let n = 100_000;
    let grads = own(&random(&[n], 1), DType::F32);
    assert_independent_of_threads(|| {
        let (params, m, v) =
            (own(&random(&[n], 2), DType::F32), zeros(n, DType::F32), zeros(n, DType::F32));
        step(&params, &grads, &m, &v, 1, 1.0, n / 3, &OPTIONS).unwrap();
        vec![params, m, v]
    });
}

#[test]
fn nothing_to_train_is_fine() {
    let none = || zeros(0, DType::F32);
    step(&none(), &none(), &none(), &none(), 1, 1.0, 0, &OPTIONS).unwrap();
}

#[test]
fn shared_storage_is_an_error_and_no_deadlock() {
    let buffer = zeros(12, DType::F32);
    let part = |index: usize| buffer.narrow(0, 3 * index, 3).unwrap();
    let own = || zeros(3, DType::F32);
    for (params, grads, m, v) in [
        (part(0), part(1), own(), own()),
        (part(0), own(), part(2), own()),
        (part(0), own(), own(), part(3)),
        (own(), part(1), part(2), own()),
        (own(), part(1), own(), part(3)),
        (own(), own(), part(2), part(3)),
    ] {
        let wrong = message(step(&params, &grads, &m, &v, 1, 1.0, 0, &OPTIONS));
        assert!(wrong.contains("must be tensors of their own"), "{wrong}");
    }
}

#[test]
fn wrong_arguments_are_errors_and_change_nothing() {
    let own = |n| Tensor::ones(n, DType::F32, &Device::Cpu).unwrap();
    let (params, grads, m, v) = (own(4), own(4), own(4), own(4));
    assert!(message(step(&params, &grads, &m, &v, 0, 1.0, 0, &OPTIONS)).contains("step is 0"));
    assert!(message(step(&params, &grads, &m, &v, 1, 1.0, 5, &OPTIONS)).contains("at most 4"));
    let wrong = message(step(&params, &own(5), &m, &v, 1, 1.0, 0, &OPTIONS));
    assert!(wrong.contains("grads has shape [5], expected [4]"), "{wrong}");
    let half = |tensor: &Tensor| tensor.to_dtype(DType::BF16).unwrap();
    let wrong =
        message(step(&half(&params), &half(&grads), &half(&m), &half(&v), 1, 1.0, 0, &OPTIONS));
    assert!(wrong.contains("params are BF16"), "{wrong}");
    let spread = Tensor::ones((4, 2), DType::F32, &Device::Cpu).unwrap();
    let spread = spread.narrow(1, 0, 1).unwrap().squeeze(1).unwrap();
    let wrong = message(step(&params, &grads, &spread, &v, 1, 1.0, 0, &OPTIONS));
    assert!(wrong.contains("m is not contiguous"), "{wrong}");
    for tensor in [&params, &grads, &m, &v] {
        assert_eq!(values(tensor), [1.0; 4]);
    }
}

#[test]
fn a_clipped_step_is_a_norm_a_scaled_step_and_cleared_gradients() {
    for dtype in [DType::F32, DType::F64] {
        for max_norm in [None, Some(0.5), Some(1e6)] {
            let n = 40_000;
            let made = || [own(&random(&[n], 1), dtype), zeros(n, dtype), zeros(n, dtype)];
            let (grads, [params, m, v]) = (own(&random(&[n], 2), dtype), made());
            let expected = norm(&grads).unwrap();
            let scale = max_norm.map_or(1.0, |limit| (limit / (expected + 1e-6)).min(1.0));
            step(&params, &grads, &m, &v, 1, scale as f32, n / 3, &OPTIONS).unwrap();
            let [other_params, other_m, other_v] = made();
            let found = clipped_step(
                &other_params,
                &grads,
                &other_m,
                &other_v,
                1,
                max_norm,
                n / 3,
                &OPTIONS,
            );
            assert_eq!(found.unwrap(), expected);
            for (a, b) in [(&params, &other_params), (&m, &other_m), (&v, &other_v)] {
                assert_identical(a, b);
            }
            assert_eq!(max_abs(&grads), 0.0);
        }
    }
}

#[test]
fn broken_gradients_make_no_clipped_step() {
    let ones = || Tensor::ones(3, DType::F32, &Device::Cpu).unwrap();
    for bad in [f32::NAN, f32::INFINITY] {
        let (params, m, v) = (ones(), ones(), ones());
        let grads = Tensor::new(&[1.0, bad, 2.0], &Device::Cpu).unwrap();
        let norm = clipped_step(&params, &grads, &m, &v, 1, Some(1.0), 3, &OPTIONS).unwrap();
        assert!(!norm.is_finite());
        for tensor in [&params, &m, &v] {
            assert_eq!(values(tensor), [1.0; 3]);
        }
        assert_eq!(values(&grads), [0.0; 3]);
    }
    let spread = Tensor::ones((3, 2), DType::F32, &Device::Cpu).unwrap();
    let spread = spread.narrow(1, 0, 1).unwrap().squeeze(1).unwrap();
    let (params, m, v) = (ones(), ones(), ones());
    let wrong = message(clipped_step(&params, &spread, &m, &v, 1, None, 0, &OPTIONS));
    assert!(wrong.contains("grads is not contiguous"), "{wrong}");
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    fn back(tensor: &Tensor) -> Tensor {
        tensor.to_device(&Device::Cpu).unwrap()
    }

    /// Buffers of their own on the device, from element `start` on, so that packs fit or don't.
    fn put(tensor: &Tensor, start: usize, device: &Device) -> Tensor {
        let n = tensor.elem_count();
        let padded = tensor.pad_with_zeros(0, start, 1).unwrap().to_device(device).unwrap();
        padded.narrow(0, start, n).unwrap()
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_steps_match_the_cpu() {
        let device = crate::testing::cuda();
        for (n, start) in [(1, 0), (7, 4), (40_001, 0), (40_001, 3), (3_000_003, 0)] {
            let decayed = n / 3;
            let single = |seed| random(&[n], seed).to_dtype(DType::F32).unwrap();
            let params = own(&single(1), DType::F32);
            let [m, v] = [zeros(n, DType::F32), zeros(n, DType::F32)];
            let [low_params, low_m, low_v] = [&params, &m, &v].map(|t| put(t, start, &device));
            for number in 1..=3 {
                let grads = own(&single(10 + number as u64), DType::F32);
                let low_grads = put(&grads, start, &device);
                step(&params, &grads, &m, &v, number, 0.5, decayed, &OPTIONS).unwrap();
                step(&low_params, &low_grads, &low_m, &low_v, number, 0.5, decayed, &OPTIONS)
                    .unwrap();
                assert_identical(&back(&low_grads), &grads);
            }
            for (low, exact) in [(&low_params, &params), (&low_m, &m), (&low_v, &v)] {
                assert_close(&back(low), exact, 1e-6);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_parts_are_the_whole() {
        in_general(crate::flat::tests::assert_cuda_parts);
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_clipped_steps_match_the_cpu() {
        let device = crate::testing::cuda();
        for (n, start) in [(1, 0), (7, 4), (40_001, 0), (40_001, 3), (3_000_003, 0)] {
            for max_norm in [None, Some(0.5), Some(1e6)] {
                let single = |seed| own(&random(&[n], seed), DType::F32);
                let made = || [single(1), single(2), zeros(n, DType::F32), zeros(n, DType::F32)];
                let run = |[params, grads, m, v]: &[Tensor; 4]| {
                    clipped_step_deferred(params, grads, m, v, 1, max_norm, n / 3, &OPTIONS)
                        .unwrap()
                };
                let on_cpu = made();
                let all = |buffers: [Tensor; 4]| buffers.map(|t| put(&t, start, &device));
                let (first, second) = (all(made()), all(made()));
                let exact = run(&on_cpu).to_scalar::<f32>().unwrap();
                let norm = run(&first);
                assert_eq!((norm.dims(), norm.dtype()), (&[][..], DType::F32));
                let norm = norm.to_scalar::<f32>().unwrap();
                assert!((norm - exact).abs() <= 1e-6 * exact, "{norm} is not {exact}");
                assert_eq!(run(&second).to_scalar::<f32>().unwrap(), norm);
                for ((first, second), exact) in first.iter().zip(&second).zip(&on_cpu) {
                    assert_close(&back(first), exact, 1e-6);
                    assert_identical(&back(second), &back(first));
                }
                assert_eq!(max_abs(&back(&first[1])), 0.0);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_broken_gradients_make_no_clipped_step() {
        let device = crate::testing::cuda();
        let ones = || Tensor::ones(3, DType::F32, &device).unwrap();
        for bad in [f32::NAN, f32::INFINITY] {
            let (params, m, v) = (ones(), ones(), ones());
            let grads = Tensor::new(&[1.0, bad, 2.0], &device).unwrap();
            let norm = clipped_step(&params, &grads, &m, &v, 1, Some(1.0), 3, &OPTIONS).unwrap();
            assert!(!norm.is_finite());
            for tensor in [&params, &m, &v] {
                assert_eq!(values(&back(tensor)), [1.0; 3]);
            }
            assert_eq!(values(&back(&grads)), [0.0; 3]);
        }
        let wrong =
            message(step(&ones(), &ones(), &zeros(3, DType::F32), &ones(), 1, 1.0, 0, &OPTIONS));
        assert!(wrong.contains("isn't pinned"), "{wrong}");
        let wrong =
            message(step(&ones(), &zeros(3, DType::F32), &ones(), &ones(), 1, 1.0, 0, &OPTIONS));
        assert!(wrong.contains("on one device"), "{wrong}");
        let buffer = Tensor::ones(6, DType::F32, &device).unwrap();
        let part = |index: usize| buffer.narrow(0, 3 * index, 3).unwrap();
        let wrong = message(step(&part(0), &part(1), &ones(), &ones(), 1, 1.0, 0, &OPTIONS));
        assert!(wrong.contains("must be tensors of their own"), "{wrong}");
    }
}
