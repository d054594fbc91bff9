use super::*;
use crate::backend::cpu::collapsed_rows;
use crate::testing::*;
use candle_core::{DType, Device, Var};

const ACTIVATIONS: [Activation; 4] =
    [Activation::Silu, Activation::GeluTanh, Activation::Gelu, Activation::Clamped];

fn reference(gate: &Tensor, up: &Tensor, activation: Activation) -> Tensor {
    let gate_values = values(gate);
    let out: Vec<f64> = gate_values
        .iter()
        .zip(values(up))
        .map(|(x, up)| {
            let (x, mut up) = (*x, up);
            let value = match activation {
                Activation::Silu => x / (1.0 + (-x).exp()),
                Activation::GeluTanh => {
                    let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
                    0.5 * x * (1.0 + u.tanh())
                }
                Activation::Gelu => x * normal_distribution(x),
                Activation::Clamped => {
                    up = up.clamp(-7.0, 7.0) + 1.0;
                    x.min(7.0) / (1.0 + (-1.702 * x.min(7.0)).exp())
                }
            };
            value * up
        })
        .collect();
    Tensor::from_vec(out, gate.dims(), &Device::Cpu).unwrap()
}

/// Φ(x) by Simpson's rule.
fn normal_distribution(x: f64) -> f64 {
    let density = |x: f64| (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let steps = 2000;
    let h = x / steps as f64;
    let inner: f64 =
        (1..steps).map(|i| if i % 2 == 1 { 4.0 } else { 2.0 } * density(i as f64 * h)).sum();
    0.5 + h / 3.0 * (density(0.0) + inner + density(x))
}

fn wide(shape: &[usize], seed: u64) -> Tensor {
    (random(shape, seed) * 9.0).unwrap()
}

fn both(gate: &Tensor, up: &Tensor, activation: Activation, d_out: &Tensor) -> (Tensor, Tensor) {
    let (dgate, dup) = backward(gate, up, activation, d_out, true, true).unwrap();
    (dgate.unwrap(), dup.unwrap())
}

#[test]
fn only_what_is_needed_is_computed() {
    for (activation, dtype) in ACTIVATIONS.into_iter().zip([DType::F32, DType::BF16, DType::F64]) {
        let low = |seed| wide(&[40, 700], seed).to_dtype(dtype).unwrap();
        let (gate, up, d_out) = (low(1), low(2), low(3));
        let (dgate, dup) = both(&gate, &up, activation, &d_out);
        let run = |need_dgate, need_dup| {
            backward(&gate, &up, activation, &d_out, need_dgate, need_dup).unwrap()
        };
        let (found, none) = run(true, false);
        assert_identical(&found.unwrap(), &dgate);
        assert!(none.is_none());
        let (none, found) = run(false, true);
        assert_identical(&found.unwrap(), &dup);
        assert!(none.is_none());
        assert!(matches!(run(false, false), (None, None)));
    }
}

#[test]
fn forward_matches_reference_in_every_dtype() {
    for activation in ACTIVATIONS {
        for shape in [vec![7], vec![2, 5, 33], vec![40, 1000]] {
            let (gate, up) = (wide(&shape, 1), wide(&shape, 2));
            let y = forward(&gate, &up, activation).unwrap();
            assert_close(&y, &reference(&gate, &up, activation), 1e-12);
            for (dtype, tolerance) in PRECISIONS {
                let (gate, up) = (rounded(&gate, dtype), rounded(&up, dtype));
                let low = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
                let y = forward(&low(&gate), &low(&up), activation).unwrap();
                assert_eq!(y.dtype(), dtype);
                assert_close(&y, &reference(&gate, &up, activation), tolerance);
            }
        }
    }
}

#[test]
fn backward_matches_finite_differences() {
    for activation in ACTIVATIONS {
        let (gate, up, d_out) = (wide(&[5, 7], 1), wide(&[5, 7], 2), random(&[5, 7], 3));
        let (dgate, dup) = both(&gate, &up, activation, &d_out);
        let loss =
            |gate: &Tensor, up: &Tensor| inner_product(&forward(gate, up, activation)?, &d_out);
        assert_gradient(&gate, &dgate, |gate| loss(gate, &up));
        assert_gradient(&up, &dup, |up| loss(&gate, up));
    }
}

#[test]
fn backward_in_other_precisions_matches_f64() {
    for activation in ACTIVATIONS {
        let (gate, up, d_out) = (wide(&[9, 33], 1), wide(&[9, 33], 2), random(&[9, 33], 3));
        for (dtype, tolerance) in PRECISIONS {
            let low = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
            let (a, b) = both(&low(&gate), &low(&up), activation, &low(&d_out));
            let round = |tensor: &Tensor| rounded(tensor, dtype);
            let (exact_a, exact_b) = both(&round(&gate), &round(&up), activation, &round(&d_out));
            assert_eq!((a.dtype(), b.dtype()), (dtype, dtype));
            assert_close(&a, &exact_a, tolerance);
            assert_close(&b, &exact_b, tolerance);
        }
    }
}

#[test]
fn halves_of_a_fused_projection_give_what_copies_give() {
    for dtype in [DType::F32, DType::BF16] {
        let fused = random(&[2, 5, 14], 1).to_dtype(dtype).unwrap();
        let d_out = random(&[2, 5, 7], 2).to_dtype(dtype).unwrap();
        let (gate, up) = (fused.narrow(2, 0, 7).unwrap(), fused.narrow(2, 7, 7).unwrap());
        assert!(collapsed_rows(gate.layout()) == Some((10, 7, 14)));
        let copies = (gate.contiguous().unwrap(), up.contiguous().unwrap());
        let silu = Activation::Silu;
        let expected = forward(&copies.0, &copies.1, silu).unwrap();
        assert_identical(&forward(&gate, &up, silu).unwrap(), &expected);
        let (dgate, dup) = both(&copies.0, &copies.1, silu, &d_out);
        let (other_dgate, other_dup) = both(&gate, &up, silu, &strided(&d_out));
        assert_identical(&other_dgate, &dgate);
        assert_identical(&other_dup, &dup);
        // Rows that don't lie at one distance are copied.
        assert!(collapsed_rows(strided(&gate).layout()).is_none());
        assert_identical(&forward(&strided(&gate), &strided(&up), silu).unwrap(), &expected);
    }
}

#[test]
fn candles_autograd_gets_the_same_gradients() {
    for activation in ACTIVATIONS {
        let gate = Var::from_tensor(&wide(&[5, 7], 1)).unwrap();
        let up = Var::from_tensor(&wide(&[5, 7], 2)).unwrap();
        let d_out = random(&[5, 7], 3);
        let gradients = |y: Tensor| (y * &d_out).unwrap().sum_all().unwrap().backward().unwrap();
        let ours = gradients(differentiable(&gate, &up, activation).unwrap());
        let clamped = || {
            let cut = gate.minimum(7.0)?;
            let value = (up.clamp(-7.0, 7.0)? + 1.0)?;
            Ok::<_, candle_core::Error>((cut.clone() / ((cut * -1.702)?.exp()? + 1.0)?, value))
        };
        let (activated, value) = match activation {
            Activation::Silu => (gate.silu(), up.as_tensor().clone()),
            Activation::GeluTanh => (gate.gelu(), up.as_tensor().clone()),
            Activation::Gelu => (gate.gelu_erf(), up.as_tensor().clone()),
            Activation::Clamped => clamped().unwrap(),
        };
        let theirs = gradients((activated.unwrap() * value).unwrap());
        // Candle writes the constants of GELU's derivatives with six digits.
        let tolerance = match activation {
            Activation::Silu | Activation::Clamped => 1e-12,
            _ => 2e-6,
        };
        for variable in [&gate, &up] {
            assert_close(ours.get(variable).unwrap(), theirs.get(variable).unwrap(), tolerance);
        }
        assert!(!forward(&gate, &up, activation).unwrap().track_op());
    }
}

/// The unit of a gate of 10 000 and a value of 1, and its slope.
fn at_most(activation: Activation) -> (f64, f64) {
    match activation {
        // σ(1.702·7) of 14, rounded to f32.
        Activation::Clamped => ((14.0 / (1.0 + (-11.914f64).exp())) as f32 as f64, 0.0),
        _ => (1e4, 1.0),
    }
}

#[test]
fn extreme_gates_stay_finite() {
    for activation in ACTIVATIONS {
        let gate =
            Tensor::new(&[-1e4f32, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4], &Device::Cpu).unwrap();
        let one = gate.ones_like().unwrap();
        let y = values(&forward(&gate, &one, activation).unwrap());
        let (largest, slope) = at_most(activation);
        assert!(y[0] == 0.0 && (y[6] - largest).abs() < 2e-6, "{y:?}");
        let (dgate, _) = both(&gate, &one, activation, &one);
        let dgate = values(&dgate);
        assert!(dgate[0].abs() < 1e-6 && (dgate[6] - slope).abs() < 1e-6, "{dgate:?}");
    }
}

#[test]
fn threads_do_not_change_bits() {
    let single = |seed| random(&[300, 200], seed).to_dtype(DType::F32).unwrap();
    let (gate, up, d_out) = (single(1), single(2), single(3));
    assert_independent_of_threads(|| {
        let (dgate, dup) = both(&gate, &up, Activation::Silu, &d_out);
        vec![forward(&gate, &up, Activation::Silu).unwrap(), dgate, dup]
    });
}

#[test]
fn empty_and_wrong_shapes_are_handled() {
    for shape in [[0, 7], [5, 0]] {
        let empty = random(&shape, 1);
        assert_eq!(forward(&empty, &empty, Activation::Silu).unwrap().dims(), &shape);
        let (dgate, dup) = both(&empty, &empty, Activation::Silu, &empty);
        assert_eq!((dgate.dims(), dup.dims()), (&shape[..], &shape[..]));
    }
    let wrong = message(forward(&random(&[5, 7], 1), &random(&[5, 6], 1), Activation::Silu));
    assert!(wrong.contains("up has shape [5, 6], expected [5, 7]"), "{wrong}");
    let single = random(&[5, 7], 1).to_dtype(DType::F32).unwrap();
    let wrong = message(forward(&random(&[5, 7], 1), &single, Activation::Silu));
    assert!(wrong.contains("up is F32, expected F64"), "{wrong}");
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    fn back(tensor: &Tensor) -> Tensor {
        tensor.to_device(&Device::Cpu).unwrap()
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_matches_the_cpu() {
        let device = crate::testing::cuda();
        for activation in ACTIVATIONS {
            for shape in [&[7][..], &[2, 5, 33], &[40, 1000], &[3, 20_016], &[70, 8]] {
                for (dtype, tolerance) in PRECISIONS {
                    let made = |seed| rounded(&wide(shape, seed), dtype);
                    let [gate, up, d_out] = [made(1), made(2), made(3)];
                    let put = |tensor: &Tensor| {
                        tensor.to_dtype(dtype).unwrap().to_device(&device).unwrap()
                    };
                    let [low_gate, low_up, low_d] = [&gate, &up, &d_out].map(put);
                    let out = forward(&low_gate, &low_up, activation).unwrap();
                    assert_eq!(out.dtype(), dtype);
                    let exact = forward(&gate, &up, activation).unwrap();
                    assert_close(&back(&out), &exact, tolerance);
                    let (dgate, dup) = both(&low_gate, &low_up, activation, &low_d);
                    let (exact_dgate, exact_dup) = both(&gate, &up, activation, &d_out);
                    assert_close(&back(&dgate), &exact_dgate, tolerance);
                    assert_close(&back(&dup), &exact_dup, tolerance);
                    let run = |need_dgate, need_dup| {
                        let inputs = (&low_gate, &low_up);
                        backward(inputs.0, inputs.1, activation, &low_d, need_dgate, need_dup)
                            .unwrap()
                    };
                    let (found, none) = run(true, false);
                    assert_identical(&back(&found.unwrap()), &back(&dgate));
                    assert!(none.is_none());
                    let (none, found) = run(false, true);
                    assert_identical(&back(&found.unwrap()), &back(&dup));
                    assert!(none.is_none());
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_halves_of_a_fused_projection_give_what_copies_give() {
        let device = crate::testing::cuda();
        // Halves that start where packs can be loaded, and where they can't.
        for half in [7, 64, 4096] {
            for dtype in [DType::F32, DType::BF16] {
                let put = |shape: &[usize], seed| {
                    let tensor = random(shape, seed).to_dtype(dtype).unwrap();
                    tensor.to_device(&device).unwrap()
                };
                let (fused, d_out) = (put(&[2, 5, 2 * half], 1), put(&[2, 5, half], 2));
                let gate = fused.narrow(2, 0, half).unwrap();
                let up = fused.narrow(2, half, half).unwrap();
                let copies = (gate.contiguous().unwrap(), up.contiguous().unwrap());
                let silu = Activation::Silu;
                let expected = back(&forward(&copies.0, &copies.1, silu).unwrap());
                assert_identical(&back(&forward(&gate, &up, silu).unwrap()), &expected);
                let (dgate, dup) = both(&copies.0, &copies.1, silu, &d_out);
                let (other_dgate, other_dup) = both(&gate, &up, silu, &strided(&d_out));
                assert_identical(&back(&other_dgate), &back(&dgate));
                assert_identical(&back(&other_dup), &back(&dup));
                let other = forward(&strided(&gate), &strided(&up), silu).unwrap();
                assert_identical(&back(&other), &expected);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_extreme_gates_stay_finite_and_nothing_is_nothing() {
        let device = crate::testing::cuda();
        for activation in ACTIVATIONS {
            let gate = [-1e4f32, -200.0, -88.0, 0.0, 88.0, 200.0, 1e4];
            let gate = Tensor::new(&gate, &device).unwrap();
            let one = Tensor::new(&[1f32; 7], &device).unwrap();
            let y = values(&back(&forward(&gate, &one, activation).unwrap()));
            let (largest, slope) = at_most(activation);
            assert!(y[0] == 0.0 && (y[6] - largest).abs() < 2e-6, "{y:?}");
            let (dgate, _) = both(&gate, &one, activation, &one);
            let dgate = values(&back(&dgate));
            assert!(dgate[0].abs() < 1e-6 && (dgate[6] - slope).abs() < 1e-6, "{dgate:?}");
        }
        for shape in [[0, 7], [5, 0]] {
            let empty = empty(shape, DType::F16, &device);
            assert_eq!(forward(&empty, &empty, Activation::Silu).unwrap().dims(), &shape);
            let (dgate, dup) = both(&empty, &empty, Activation::Silu, &empty);
            assert_eq!((dgate.dims(), dup.dims()), (&shape[..], &shape[..]));
        }
    }
}
