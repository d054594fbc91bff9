use super::*;
use crate::testing::*;
use candle_core::{DType, Var};

const EPS: f64 = 1e-3;

fn reference(x: &Tensor, weight: &Tensor, offset: f64) -> Tensor {
    let hidden = weight.elem_count();
    let weight = values(weight);
    let mut out = Vec::new();
    for row in values(x).chunks(hidden) {
        let mean = row.iter().map(|x| x * x).sum::<f64>() / hidden as f64;
        let rms = (mean + EPS).sqrt();
        out.extend(row.iter().zip(&weight).map(|(x, w)| x / rms * (offset + w)));
    }
    Tensor::from_vec(out, x.dims(), &Device::Cpu).unwrap()
}

#[test]
fn forward_matches_reference_in_every_dtype() {
    for (rows, hidden) in [(1, 1), (5, 7), (3, 33), (40, 1000)] {
        for offset in [0.0, 1.0] {
            let (x, weight) = (random(&[1, rows, hidden], 1), random(&[hidden], 2));
            let exact = reference(&x, &weight, offset);
            assert_close(&forward(&x, &weight, EPS, offset).unwrap(), &exact, 1e-14);
            for (dtype, tolerance) in PRECISIONS {
                let (x, weight) = (rounded(&x, dtype), rounded(&weight, dtype));
                let exact = reference(&x, &weight, offset);
                let x = x.to_dtype(dtype).unwrap();
                let y = forward(&x, &weight.to_dtype(dtype).unwrap(), EPS, offset).unwrap();
                assert_eq!(y.dtype(), dtype);
                assert_close(&y, &exact, tolerance);
                // Weights that are being trained are f32.
                let y = forward(&x, &weight.to_dtype(DType::F32).unwrap(), EPS, offset).unwrap();
                assert_close(&y, &exact, tolerance);
            }
        }
    }
}

#[test]
fn backward_matches_finite_differences() {
    for (rows, hidden, offset) in [(5, 7, 0.0), (2, 33, 1.0), (1, 1, 0.0)] {
        let (x, weight) = (random(&[rows, hidden], 1), random(&[hidden], 2));
        let dy = random(&[rows, hidden], 3);
        let loss = |x: &Tensor, w: &Tensor| inner_product(&forward(x, w, EPS, offset)?, &dy);
        let (dx, dweight) = backward(&x, &weight, EPS, offset, &dy, true, true).unwrap();
        assert_gradient(&x, &dx.unwrap(), |x| loss(x, &weight));
        assert_gradient(&weight, &dweight.unwrap(), |weight| loss(&x, weight));
    }
}

#[test]
fn other_precisions_match_f64() {
    let (x, weight, dy) = (random(&[50, 300], 1), random(&[300], 2), random(&[50, 300], 3));
    for (dtype, tolerance) in PRECISIONS {
        let (x, weight, dy) = (rounded(&x, dtype), rounded(&weight, dtype), rounded(&dy, dtype));
        let (dx, dw) = backward(&x, &weight, EPS, 0.0, &dy, true, true).unwrap();
        let low = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
        let (low_dx, low_dw) =
            backward(&low(&x), &low(&weight), EPS, 0.0, &low(&dy), true, true).unwrap();
        assert_close(&low_dx.unwrap(), &dx.unwrap(), tolerance);
        let low_dw = low_dw.unwrap();
        assert_eq!(low_dw.dtype(), DType::F32);
        assert_close(&low_dw, &dw.unwrap(), 3e-6);
    }
}

#[test]
fn residual_forward_is_the_sum_and_its_norm() {
    for (rows, hidden) in [(1, 1), (5, 7), (40, 1000)] {
        for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
            let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
            let (x, residual) = (low(&[rows, hidden], 1), low(&[rows, hidden], 2));
            let weight = low(&[hidden], 3);
            let (sum, y) = forward_residual(&x, &residual, &weight, EPS, 1.0).unwrap();
            assert_identical(&sum, &(&x + &residual).unwrap());
            assert_identical(&y, &forward(&sum, &weight, EPS, 1.0).unwrap());
            let views = (strided(&x), strided(&residual));
            let other = forward_residual(&views.0, &views.1, &weight, EPS, 1.0).unwrap();
            assert_identical(&other.0, &sum);
            assert_identical(&other.1, &y);
        }
    }
}

#[test]
fn residual_backward_matches_finite_differences() {
    let (x, residual, weight) = (random(&[5, 7], 1), random(&[5, 7], 2), random(&[7], 3));
    let (dy, dsum) = (random(&[5, 7], 4), random(&[5, 7], 5));
    let loss = |x: &Tensor, weight: &Tensor, dsum: Option<&Tensor>| {
        let (sum, y) = forward_residual(x, &residual, weight, EPS, 1.0)?;
        let of_sum = dsum.map_or(Ok(0.0), |dsum| inner_product(&sum, dsum))?;
        Ok(inner_product(&y, &dy)? + of_sum)
    };
    let (sum, _) = forward_residual(&x, &residual, &weight, EPS, 1.0).unwrap();
    for dsum in [None, Some(&dsum)] {
        let (dx, dw) = backward_residual(&sum, &weight, EPS, 1.0, &dy, dsum, true).unwrap();
        assert_gradient(&x, &dx, |x| loss(x, &weight, dsum));
        assert_gradient(&weight, &dw.unwrap(), |weight| loss(&x, weight, dsum));
        let (other, none) = backward_residual(&sum, &weight, EPS, 1.0, &dy, dsum, false).unwrap();
        assert_identical(&other, &dx);
        assert!(none.is_none());
    }
}

#[test]
fn residual_backward_in_other_precisions_matches_f64() {
    let tensors = [random(&[50, 300], 1), random(&[50, 300], 2), random(&[50, 300], 3)];
    let weight = random(&[300], 4);
    for (dtype, tolerance) in PRECISIONS {
        let run = |convert: &dyn Fn(&Tensor) -> Tensor| {
            let [sum, dy, dsum] = tensors.each_ref().map(convert);
            backward_residual(&sum, &convert(&weight), EPS, 0.0, &dy, Some(&dsum), true).unwrap()
        };
        let (dx, dw) = run(&|tensor| rounded(tensor, dtype));
        let (low_dx, low_dw) = run(&|tensor| tensor.to_dtype(dtype).unwrap());
        assert_eq!(low_dx.dtype(), dtype);
        assert_close(&low_dx, &dx, tolerance);
        assert_close(&low_dw.unwrap(), &dw.unwrap(), 3e-6);
    }
}

#[test]
fn threads_and_strides_do_not_change_bits_with_a_residual() {
    for dtype in [DType::F32, DType::BF16] {
        let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
        let shape = [2000, 33];
        let (x, residual, weight) = (low(&shape, 1), low(&shape, 2), low(&[33], 3));
        let (dy, dsum) = (low(&shape, 4), low(&shape, 5));
        let run = |view: &dyn Fn(&Tensor) -> Tensor| {
            let (x, residual, weight) = (view(&x), view(&residual), view(&weight));
            let (sum, y) = forward_residual(&x, &residual, &weight, EPS, 0.0).unwrap();
            let (dy, dsum, sum) = (view(&dy), view(&dsum), view(&sum));
            let (dx, dw) =
                backward_residual(&sum, &weight, EPS, 0.0, &dy, Some(&dsum), true).unwrap();
            vec![sum.contiguous().unwrap(), y, dx, dw.unwrap()]
        };
        assert_independent_of_threads(|| run(&|tensor| tensor.clone()));
        for (a, b) in run(&|tensor| tensor.clone()).iter().zip(&run(&strided)) {
            assert_identical(a, b);
        }
    }
}

#[test]
fn only_what_is_needed_is_computed() {
    let (x, weight) = (random(&[5, 7], 1), random(&[7], 2));
    let (dx, dw) = backward(&x, &weight, EPS, 0.0, &x, true, false).unwrap();
    assert!(dx.is_some() && dw.is_none());
    let (dx, dw) = backward(&x, &weight, EPS, 0.0, &x, false, true).unwrap();
    assert!(dx.is_none() && dw.is_some());
}

#[test]
fn threads_and_strides_do_not_change_bits() {
    let (x, weight, dy) = (random(&[300, 200], 1), random(&[200], 2), random(&[300, 200], 3));
    let single = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap();
    let (x, weight, dy) = (single(&x), single(&weight), single(&dy));
    let run = |x: &Tensor, weight: &Tensor, dy: &Tensor| {
        let (dx, dw) = backward(x, weight, EPS, 0.0, dy, true, true).unwrap();
        vec![forward(x, weight, EPS, 0.0).unwrap(), dx.unwrap(), dw.unwrap()]
    };
    assert_independent_of_threads(|| run(&x, &weight, &dy));
    let other = run(&strided(&x), &strided(&weight), &strided(&dy));
    for (a, b) in run(&x, &weight, &dy).iter().zip(&other) {
        assert_identical(a, b);
    }
}

#[test]
fn candles_autograd_gets_the_same_gradients() {
    let x = Var::from_tensor(&random(&[2, 5, 7], 1)).unwrap();
    let weight = Var::from_tensor(&random(&[7], 2)).unwrap();
    let dy = random(&[2, 5, 7], 3);
    let loss = |y: &Tensor| (y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
    let ours = loss(&differentiable(&x, &weight, EPS, 1.0).unwrap());
    let mean = x.sqr().unwrap().mean_keepdim(2).unwrap();
    let normed = x.broadcast_div(&(mean + EPS).unwrap().sqrt().unwrap()).unwrap();
    let theirs = loss(&normed.broadcast_mul(&(weight.as_tensor() + 1.0).unwrap()).unwrap());
    for variable in [&x, &weight] {
        assert_close(ours.get(variable).unwrap(), theirs.get(variable).unwrap(), 1e-12);
    }
    assert!(!forward(&x, &weight, EPS, 1.0).unwrap().track_op());
}

#[test]
fn training_in_candle_learns_the_weight() {
    let x = random(&[16, 7], 1).to_dtype(DType::F32).unwrap();
    let target = forward(&x, &random(&[7], 2).to_dtype(DType::F32).unwrap(), EPS, 0.0).unwrap();
    let weight = Var::zeros(7, DType::F32, &Device::Cpu).unwrap();
    let mut losses = Vec::new();
    for _ in 0..100 {
        let y = differentiable(&x, &weight, EPS, 0.0).unwrap();
        let loss = (y - &target).unwrap().sqr().unwrap().mean_all().unwrap();
        losses.push(loss.to_scalar::<f32>().unwrap());
        let gradients = loss.backward().unwrap();
        let step = (gradients.get(&weight).unwrap() * 2.0).unwrap();
        weight.set(&(weight.as_tensor() - step).unwrap()).unwrap();
    }
    assert!(losses[99] < 1e-6 * losses[0], "{} -> {}", losses[0], losses[99]);
}

#[test]
fn empty_and_wrong_shapes_are_handled() {
    let empty = random(&[0, 7], 1);
    assert_eq!(forward(&empty, &random(&[7], 1), EPS, 0.0).unwrap().dims(), &[0, 7]);
    let (dx, dw) = backward(&empty, &random(&[7], 1), EPS, 0.0, &empty, true, true).unwrap();
    assert_eq!(dx.unwrap().dims(), &[0, 7]);
    assert_eq!(max_abs(&dw.unwrap()), 0.0);
    let narrow = random(&[5, 0], 1);
    assert_eq!(forward(&narrow, &random(&[0], 1), EPS, 0.0).unwrap().dims(), &[5, 0]);
    let wrong = message(forward(&random(&[5, 7], 1), &random(&[6], 1), EPS, 0.0));
    assert!(wrong.contains("weight has shape [6], expected [7]"), "{wrong}");
    let x = random(&[5, 7], 1);
    let single = x.to_dtype(DType::F32).unwrap();
    let wrong = message(backward(&x, &random(&[7], 1), EPS, 0.0, &single, true, true));
    assert!(wrong.contains("dy is F32, expected F64"), "{wrong}");
    let weight = random(&[7], 1);
    let wrong = message(forward_residual(&x, &single, &weight, EPS, 0.0));
    assert!(wrong.contains("residual is F32, expected F64"), "{wrong}");
    let wrong = message(backward_residual(&x, &weight, EPS, 0.0, &x, Some(&empty), true));
    assert!(wrong.contains("dsum has shape [0, 7], expected [5, 7]"), "{wrong}");
    let (sum, y) = forward_residual(&empty, &empty, &weight, EPS, 0.0).unwrap();
    assert_eq!((sum.dims(), y.dims()), (&[0, 7][..], &[0, 7][..]));
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    /// Rows that are kept in registers, by a warp and by a block, and others; more rows than blocks.
    const SHAPES: [(usize, usize); 10] = [
        (1, 1),
        (5, 8),
        (3001, 24),
        (64, 1024),
        (40, 1000),
        (700, 2056),
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
                for (weight_dtype, offset) in [(dtype, 0.0), (DType::F32, 1.0), (DType::F16, 0.0)] {
                    let x = rounded(&random(&[rows, hidden], 1), dtype);
                    let weight = rounded(&random(&[hidden], 2), weight_dtype);
                    let exact = forward(&x, &weight, EPS, offset).unwrap();
                    let x = x.to_dtype(dtype).unwrap().to_device(&device).unwrap();
                    let weight = weight.to_dtype(weight_dtype).unwrap();
                    let weight = weight.to_device(&device).unwrap();
                    let y = forward(&x, &weight, EPS, offset).unwrap();
                    assert_eq!(y.dtype(), dtype);
                    assert_close(&back(&y), &exact, tolerance);
                    let again = forward(&x, &weight, EPS, offset).unwrap();
                    assert_identical(&back(&again), &back(&y));
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_residual_forward_is_the_sum_and_its_norm() {
        let device = crate::testing::cuda();
        for (rows, hidden) in SHAPES {
            for (dtype, _) in PRECISIONS {
                let low = |shape: &[usize], seed| random(shape, seed).to_dtype(dtype).unwrap();
                let (x, residual) = (low(&[rows, hidden], 1), low(&[rows, hidden], 2));
                let put = |tensor: &Tensor| tensor.to_device(&device).unwrap();
                let weight = put(&low(&[hidden], 3));
                let (x, residual) = (put(&x), put(&residual));
                let (sum, y) = forward_residual(&x, &residual, &weight, EPS, 1.0).unwrap();
                assert_identical(&back(&sum), &(&back(&x) + &back(&residual)).unwrap());
                let norm = forward(&sum, &weight, EPS, 1.0).unwrap();
                assert_identical(&back(&y), &back(&norm));
                let views = (strided(&x), strided(&residual));
                let other = forward_residual(&views.0, &views.1, &weight, EPS, 1.0).unwrap();
                assert_identical(&back(&other.0), &back(&sum));
                assert_identical(&back(&other.1), &back(&y));
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
                let (x, dy, dsum) = (made(1), made(2), made(3));
                let weight = rounded(&random(&[hidden], 4), dtype);
                let put =
                    |tensor: &Tensor| tensor.to_dtype(dtype).unwrap().to_device(&device).unwrap();
                let (low_x, low_dy, low_dsum) = (put(&x), put(&dy), put(&dsum));
                let low_weight = put(&weight);
                for dsum in [None, Some((&dsum, &low_dsum))] {
                    let run = |need_dweight| {
                        let dsum = dsum.map(|(_, low)| low);
                        backward_residual(
                            &low_x,
                            &low_weight,
                            EPS,
                            1.0,
                            &low_dy,
                            dsum,
                            need_dweight,
                        )
                        .unwrap()
                    };
                    let exact = dsum.map(|(exact, _)| exact);
                    let (dx, dw) =
                        backward_residual(&x, &weight, EPS, 1.0, &dy, exact, true).unwrap();
                    let (low_dx, low_dw) = run(true);
                    assert_eq!(low_dx.dtype(), dtype);
                    assert_close(&back(&low_dx), &dx, tolerance);
                    let low_dw = back(&low_dw.unwrap());
                    assert_eq!(low_dw.dtype(), DType::F32);
                    assert_close(&low_dw, &dw.unwrap(), 4e-6);
                    let (again, again_dw) = run(true);
                    assert_identical(&back(&again), &back(&low_dx));
                    assert_identical(&back(&again_dw.unwrap()), &low_dw);
                    let (other, none) = run(false);
                    assert!(none.is_none());
                    assert_close(&back(&other), &dx, tolerance);
                }
                let (none, low_dw) =
                    backward(&low_x, &low_weight, EPS, 1.0, &low_dy, false, true).unwrap();
                assert!(none.is_none());
                let (_, dw) = backward(&x, &weight, EPS, 1.0, &dy, false, true).unwrap();
                assert_close(&back(&low_dw.unwrap()), &dw.unwrap(), 4e-6);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_reads_rows_that_start_anywhere() {
        let device = crate::testing::cuda();
        let x = random(&[2000], 1).to_dtype(DType::BF16).unwrap();
        let weight = random(&[200], 2).to_dtype(DType::BF16).unwrap();
        let odd = |start| x.narrow(0, start, 1000).unwrap().reshape((5, 200)).unwrap();
        let put = |start| {
            let x = x.to_device(&device).unwrap();
            x.narrow(0, start, 1000).unwrap().reshape((5, 200)).unwrap()
        };
        let low_weight = weight.to_device(&device).unwrap();
        let y = forward(&put(3), &low_weight, EPS, 0.0).unwrap();
        assert_close(&back(&y), &forward(&odd(3), &weight, EPS, 0.0).unwrap(), 1e-2);
        let (dx, dw) = backward(&put(3), &low_weight, EPS, 0.0, &put(8), true, true).unwrap();
        let exact = backward(&odd(3), &weight, EPS, 0.0, &odd(8), true, true).unwrap();
        assert_close(&back(&dx.unwrap()), &exact.0.unwrap(), 1e-2);
        assert_close(&back(&dw.unwrap()), &exact.1.unwrap(), 4e-6);
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_handles_nothing_and_trains_in_candle() {
        let device = crate::testing::cuda();
        let weight = Tensor::ones(7, DType::F32, &device).unwrap();
        let empty = empty([0, 7], DType::F32, &device);
        assert_eq!(forward(&empty, &weight, EPS, 0.0).unwrap().dims(), &[0, 7]);
        let (dx, dw) = backward(&empty, &weight, EPS, 0.0, &empty, true, true).unwrap();
        assert_eq!(dx.unwrap().dims(), &[0, 7]);
        assert_eq!(max_abs(&back(&dw.unwrap())), 0.0);
        let (sum, y) = forward_residual(&empty, &empty, &weight, EPS, 0.0).unwrap();
        assert_eq!((sum.dims(), y.dims()), (&[0, 7][..], &[0, 7][..]));
        let x = Var::from_tensor(&random(&[2, 5, 7], 1).to_dtype(DType::F32).unwrap()).unwrap();
        let low_x = Var::from_tensor(&x.to_device(&device).unwrap()).unwrap();
        let weight = Var::from_tensor(&random(&[7], 2).to_dtype(DType::F32).unwrap()).unwrap();
        let low_weight = Var::from_tensor(&weight.to_device(&device).unwrap()).unwrap();
        let loss = |x: &Tensor, weight: &Tensor| {
            let y = differentiable(x, weight, EPS, 1.0).unwrap();
            y.sqr().unwrap().sum_all().unwrap().backward().unwrap()
        };
        let (exact, found) = (loss(&x, &weight), loss(&low_x, &low_weight));
        for (exact_of, found_of) in [(&x, &low_x), (&weight, &low_weight)] {
            let (exact, found) = (exact.get(exact_of).unwrap(), found.get(found_of).unwrap());
            assert_close(&back(found), exact, 1e-5);
        }
    }
}
