use super::*;
use crate::testing::*;
use candle_core::{D, DType, Var};

const EPS: f64 = 1e-3;
const ALL: Needs = Needs { dx: true, dweight: true, dbias: true };

fn reference(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let hidden = weight.elem_count();
    let weight = values(weight);
    let bias = bias.map_or(vec![0.0; hidden], values);
    let mut out = Vec::new();
    for row in values(x).chunks(hidden) {
        let mean = row.iter().sum::<f64>() / hidden as f64;
        let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / hidden as f64;
        let deviation = (variance + EPS).sqrt();
        let parameters = weight.iter().zip(&bias);
        out.extend(row.iter().zip(parameters).map(|(x, (w, b))| (x - mean) / deviation * w + b));
    }
    Tensor::from_vec(out, x.dims(), &Device::Cpu).unwrap()
}

#[test]
fn forward_matches_reference_in_every_dtype() {
    for (rows, hidden) in [(1, 1), (5, 7), (3, 33), (40, 1000), (2, 20_011)] {
        let (x, weight) = (random(&[1, rows, hidden], 1), random(&[hidden], 2));
        for bias in [None, Some(random(&[hidden], 3))] {
            let bias = bias.as_ref();
            let exact = reference(&x, &weight, bias);
            assert_close(&forward(&x, &weight, bias, EPS).unwrap(), &exact, 1e-13);
            for (dtype, tolerance) in PRECISIONS {
                let (x, weight) = (rounded(&x, dtype), rounded(&weight, dtype));
                let bias = bias.map(|bias| rounded(bias, dtype));
                let exact = reference(&x, &weight, bias.as_ref());
                let x = x.to_dtype(dtype).unwrap();
                // Parameters that are being trained are f32.
                for dtype in [dtype, DType::F32] {
                    let bias = bias.as_ref().map(|bias| bias.to_dtype(dtype).unwrap());
                    let weight = weight.to_dtype(dtype).unwrap();
                    let y = forward(&x, &weight, bias.as_ref(), EPS).unwrap();
                    assert_eq!(y.dtype(), x.dtype());
                    assert_close(&y, &exact, tolerance);
                }
            }
        }
    }
}

#[test]
fn a_large_mean_costs_no_digits_of_the_variance() {
    let x = (random(&[5, 300], 1) + 1000.0).unwrap();
    let (weight, dy) = (random(&[300], 2), random(&[5, 300], 3));
    let single = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap();
    let x = rounded(&x, DType::F32);
    let y = forward(&single(&x), &single(&weight), None, EPS).unwrap();
    assert_close(&y, &reference(&x, &weight, None), 2e-4);
    let exact = backward(&x, &weight, EPS, &dy, ALL).unwrap();
    let found = backward(&single(&x), &single(&weight), EPS, &single(&dy), ALL).unwrap();
    assert_close(&found.dx.unwrap(), &exact.dx.unwrap(), 1e-3);
}

#[test]
fn backward_matches_finite_differences() {
    for (rows, hidden) in [(5, 7), (2, 33), (1, 2)] {
        let (x, weight) = (random(&[rows, hidden], 1), random(&[hidden], 2));
        let (bias, dy) = (random(&[hidden], 3), random(&[rows, hidden], 4));
        let loss = |x: &Tensor, weight: &Tensor, bias: &Tensor| {
            inner_product(&forward(x, weight, Some(bias), EPS)?, &dy)
        };
        let Gradients { dx, dweight, dbias } = backward(&x, &weight, EPS, &dy, ALL).unwrap();
        assert_gradient(&x, &dx.unwrap(), |x| loss(x, &weight, &bias));
        assert_gradient(&weight, &dweight.unwrap(), |weight| loss(&x, weight, &bias));
        assert_gradient(&bias, &dbias.unwrap(), |bias| loss(&x, &weight, bias));
    }
}

#[test]
fn other_precisions_match_f64() {
    for shape in [&[50, 300][..], &[2000, 33], &[3, 20_011]] {
        let (x, weight, dy) = (random(shape, 1), random(&shape[1..], 2), random(shape, 3));
        for (dtype, tolerance) in PRECISIONS {
            let (x, weight) = (rounded(&x, dtype), rounded(&weight, dtype));
            let dy = rounded(&dy, dtype);
            let exact = backward(&x, &weight, EPS, &dy, ALL).unwrap();
            let low = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
            let found = backward(&low(&x), &low(&weight), EPS, &low(&dy), ALL).unwrap();
            assert_close(&found.dx.unwrap(), &exact.dx.unwrap(), tolerance);
            let parameters = [(found.dweight, exact.dweight), (found.dbias, exact.dbias)];
            for (found, exact) in parameters {
                let found = found.unwrap();
                assert_eq!(found.dtype(), DType::F32);
                assert_close(&found, &exact.unwrap(), 3e-6);
            }
        }
    }
}

#[test]
fn only_what_is_needed_is_computed() {
    let (x, weight) = (random(&[40, 700], 1), random(&[700], 2));
    let all = backward(&x, &weight, EPS, &x, ALL).unwrap();
    let all = [all.dx.unwrap(), all.dweight.unwrap(), all.dbias.unwrap()];
    for bits in 0..8 {
        let [dx, dweight, dbias] = [1, 2, 4].map(|bit| bits & bit != 0);
        let found = backward(&x, &weight, EPS, &x, Needs { dx, dweight, dbias }).unwrap();
        let needed = [dx, dweight, dbias];
        let found = [found.dx, found.dweight, found.dbias];
        for ((needed, found), all) in needed.into_iter().zip(found).zip(&all) {
            assert_eq!(needed, found.is_some());
            if let Some(found) = found {
                assert_identical(&found, all);
            }
        }
    }
}

#[test]
fn threads_and_strides_do_not_change_bits() {
    for dtype in [DType::F32, DType::BF16] {
        let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
        let (x, dy) = (low(&[300, 200], 1), low(&[300, 200], 2));
        let (weight, bias) = (low(&[200], 3), low(&[200], 4));
        let run = |x: &Tensor, weight: &Tensor, bias: &Tensor, dy: &Tensor| {
            let found = backward(x, weight, EPS, dy, ALL).unwrap();
            vec![
                forward(x, weight, Some(bias), EPS).unwrap(),
                forward(x, weight, None, EPS).unwrap(),
                found.dx.unwrap(),
                found.dweight.unwrap(),
                found.dbias.unwrap(),
            ]
        };
        assert_independent_of_threads(|| run(&x, &weight, &bias, &dy));
        let other = run(&strided(&x), &strided(&weight), &strided(&bias), &strided(&dy));
        for (a, b) in run(&x, &weight, &bias, &dy).iter().zip(&other) {
            assert_identical(a, b);
        }
    }
}

#[test]
fn candles_autograd_gets_the_same_gradients() {
    let variable = |shape: &[usize], seed| Var::from_tensor(&random(shape, seed)).unwrap();
    let (x, weight, bias) = (variable(&[2, 5, 7], 1), variable(&[7], 2), variable(&[7], 3));
    let dy = random(&[2, 5, 7], 4);
    let gradients = |y: Tensor| (y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
    let centred = x.broadcast_sub(&x.mean_keepdim(D::Minus1).unwrap()).unwrap();
    let variance = centred.sqr().unwrap().mean_keepdim(D::Minus1).unwrap();
    let normed = centred.broadcast_div(&(variance + EPS).unwrap().sqrt().unwrap()).unwrap();
    let scaled = normed.broadcast_mul(&weight).unwrap();
    let ours = gradients(differentiable(&x, &weight, None, EPS).unwrap());
    let theirs = gradients(scaled.clone());
    for variable in [&x, &weight] {
        assert_close(ours.get(variable).unwrap(), theirs.get(variable).unwrap(), 1e-12);
    }
    let ours = gradients(differentiable(&x, &weight, Some(&bias), EPS).unwrap());
    let theirs = gradients(scaled.broadcast_add(&bias).unwrap());
    for variable in [&x, &weight, &bias] {
        assert_close(ours.get(variable).unwrap(), theirs.get(variable).unwrap(), 1e-12);
    }
    assert!(!forward(&x, &weight, Some(&bias), EPS).unwrap().track_op());
}

#[test]
fn empty_and_wrong_shapes_are_handled() {
    let weight = random(&[7], 1);
    let empty = random(&[0, 7], 1);
    assert_eq!(forward(&empty, &weight, Some(&weight), EPS).unwrap().dims(), &[0, 7]);
    let found = backward(&empty, &weight, EPS, &empty, ALL).unwrap();
    assert_eq!(found.dx.unwrap().dims(), &[0, 7]);
    for sum in [found.dweight, found.dbias] {
        assert_eq!(values(&sum.unwrap()), [0.0; 7]);
    }
    let narrow = random(&[5, 0], 1);
    assert_eq!(forward(&narrow, &random(&[0], 1), None, EPS).unwrap().dims(), &[5, 0]);
    let found = backward(&narrow, &random(&[0], 1), EPS, &narrow, ALL).unwrap();
    assert_eq!(found.dweight.unwrap().dims(), &[0]);
    let x = random(&[5, 7], 1);
    let wrong = message(forward(&x, &random(&[6], 1), None, EPS));
    assert!(wrong.contains("weight has shape [6], expected [7]"), "{wrong}");
    let wrong = message(forward(&x, &weight, Some(&random(&[6], 1)), EPS));
    assert!(wrong.contains("bias has shape [6], expected [7]"), "{wrong}");
    let single = x.to_dtype(DType::F32).unwrap();
    let wrong = message(backward(&x, &weight, EPS, &single, ALL));
    assert!(wrong.contains("dy is F32, expected F64"), "{wrong}");
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    /// Rows that are kept in registers, by a warp and by a block, with as much for every thread and not,
    /// and others; more rows than blocks.
    const SHAPES: [(usize, usize); 11] = [
        (1, 1),
        (5, 8),
        (3001, 24),
        (64, 1024),
        (40, 1000),
        (700, 2056),
        (600, 4096),
        (9, 33),
        (3, 8192),
        (300, 203),
        (2, 20_011),
    ];

    fn back(tensor: &Tensor) -> Tensor {
        tensor.to_device(&Device::Cpu).unwrap()
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_forward_matches_the_cpu() {
        let device = crate::testing::cuda();
        for (rows, hidden) in SHAPES {
            for (dtype, tolerance) in PRECISIONS {
                for (parameter_dtype, with_bias) in
                    [(dtype, true), (DType::F32, true), (DType::BF16, false)]
                {
                    let x = rounded(&random(&[rows, hidden], 1), dtype);
                    let weight = rounded(&random(&[hidden], 2), parameter_dtype);
                    let bias = with_bias.then(|| rounded(&random(&[hidden], 3), parameter_dtype));
                    let exact = forward(&x, &weight, bias.as_ref(), EPS).unwrap();
                    let put = |tensor: &Tensor, dtype| {
                        tensor.to_dtype(dtype).unwrap().to_device(&device).unwrap()
                    };
                    let (x, weight) = (put(&x, dtype), put(&weight, parameter_dtype));
                    let bias = bias.map(|bias| put(&bias, parameter_dtype));
                    let y = forward(&x, &weight, bias.as_ref(), EPS).unwrap();
                    assert_eq!(y.dtype(), dtype);
                    assert_close(&back(&y), &exact, 2.0 * tolerance);
                    let again = forward(&strided(&x), &weight, bias.as_ref(), EPS).unwrap();
                    assert_identical(&back(&again), &back(&y));
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_backward_matches_the_cpu() {
        let device = crate::testing::cuda();
        for (rows, hidden) in SHAPES {
            for (dtype, tolerance) in PRECISIONS {
                let made = |seed| rounded(&random(&[rows, hidden], seed), dtype);
                let (x, dy) = (made(1), made(2));
                let weight = rounded(&random(&[hidden], 3), dtype);
                let exact = backward(&x, &weight, EPS, &dy, ALL).unwrap();
                let put =
                    |tensor: &Tensor| tensor.to_dtype(dtype).unwrap().to_device(&device).unwrap();
                let (low_x, low_dy, low_weight) = (put(&x), put(&dy), put(&weight));
                let run = |needs| backward(&low_x, &low_weight, EPS, &low_dy, needs).unwrap();
                let (found, again) = (run(ALL), run(ALL));
                let (exact_dx, dx) = (exact.dx.unwrap(), found.dx.unwrap());
                assert_eq!(dx.dtype(), dtype);
                assert_close(&back(&dx), &exact_dx, 2.0 * tolerance);
                assert_identical(&back(&again.dx.unwrap()), &back(&dx));
                for (found, again, exact) in [
                    (found.dweight, again.dweight, exact.dweight),
                    (found.dbias, again.dbias, exact.dbias),
                ] {
                    let found = back(&found.unwrap());
                    assert_eq!(found.dtype(), DType::F32);
                    assert_close(&found, &exact.unwrap(), 4e-6);
                    assert_identical(&back(&again.unwrap()), &found);
                }
                let only = run(Needs { dx: true, dweight: false, dbias: false });
                assert!(only.dweight.is_none() && only.dbias.is_none());
                assert_close(&back(&only.dx.unwrap()), &exact_dx, 2.0 * tolerance);
                let only = run(Needs { dx: false, dweight: false, dbias: true });
                assert!(only.dx.is_none() && only.dweight.is_none() && only.dbias.is_some());
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_large_means_cost_no_digits_of_the_variance() {
        let device = crate::testing::cuda();
        for hidden in [300, 303] {
            let x = rounded(&(random(&[5, hidden], 1) + 1000.0).unwrap(), DType::F32);
            let weight = rounded(&random(&[hidden], 2), DType::F32);
            let put =
                |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().to_device(&device).unwrap();
            let y = forward(&put(&x), &put(&weight), None, EPS).unwrap();
            assert_close(&back(&y), &reference(&x, &weight, None), 2e-4);
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_handles_nothing_and_trains_in_candle() {
        let device = crate::testing::cuda();
        let weight = Tensor::ones(7, DType::F32, &device).unwrap();
        let empty = empty([0, 7], DType::F32, &device);
        assert_eq!(forward(&empty, &weight, Some(&weight), EPS).unwrap().dims(), &[0, 7]);
        let found = backward(&empty, &weight, EPS, &empty, ALL).unwrap();
        assert_eq!(found.dx.unwrap().dims(), &[0, 7]);
        for sum in [found.dweight, found.dbias] {
            assert_eq!(values(&back(&sum.unwrap())), [0.0; 7]);
        }
        let variable = |shape: &[usize], seed| {
            Var::from_tensor(&random(shape, seed).to_dtype(DType::F32).unwrap()).unwrap()
        };
        let on_cpu = [variable(&[2, 5, 7], 1), variable(&[7], 2), variable(&[7], 3)];
        let on_cuda = on_cpu
            .each_ref()
            .map(|variable| Var::from_tensor(&variable.to_device(&device).unwrap()).unwrap());
        let gradients = |[x, weight, bias]: &[Var; 3]| {
            let y = differentiable(x, weight, Some(bias), EPS).unwrap();
            y.sqr().unwrap().sum_all().unwrap().backward().unwrap()
        };
        let (exact, found) = (gradients(&on_cpu), gradients(&on_cuda));
        for (exact_of, found_of) in on_cpu.iter().zip(&on_cuda) {
            let (exact, found) = (exact.get(exact_of).unwrap(), found.get(found_of).unwrap());
            assert_close(&back(found), exact, 1e-5);
        }
    }
}
