use super::*;
use crate::testing::*;
use candle_core::{DType, Device, Var};

fn reference(x: &Tensor) -> Tensor {
    let size = *x.dims().last().unwrap();
    let mut out = Vec::new();
    for row in values(x).chunks(size) {
        let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = row.iter().map(|x| (x - max).exp()).sum();
        out.extend(row.iter().map(|x| (x - max).exp() / total));
    }
    Tensor::from_vec(out, x.dims(), &Device::Cpu).unwrap()
}

fn wide(shape: &[usize], seed: u64) -> Tensor {
    (random(shape, seed) * 8.0).unwrap()
}

const SHAPES: [&[usize]; 5] = [&[1], &[7], &[2, 5, 33], &[40, 1000], &[3, 20_011]];

#[test]
fn forward_matches_reference_in_every_dtype() {
    for shape in SHAPES {
        let x = wide(shape, 1);
        assert_close(&forward(&x).unwrap(), &reference(&x), 1e-14);
        for (dtype, tolerance) in PRECISIONS {
            let x = rounded(&x, dtype);
            let y = forward(&x.to_dtype(dtype).unwrap()).unwrap();
            assert_eq!(y.dtype(), dtype);
            assert_close(&y, &reference(&x), tolerance);
        }
    }
}

#[test]
fn small_probabilities_are_relatively_exact() {
    let x = (random(&[5, 300], 1) * 40.0).unwrap();
    let exact = values(&reference(&rounded(&x, DType::F32)));
    let y = values(&forward(&x.to_dtype(DType::F32).unwrap()).unwrap());
    for (y, exact) in y.iter().zip(exact) {
        assert!((y - exact).abs() <= 1e-5 * exact, "{y} is not {exact}");
    }
}

#[test]
fn backward_matches_finite_differences() {
    for shape in [&[1][..], &[5, 7], &[2, 33]] {
        let (x, dy) = (random(shape, 1), random(shape, 2));
        let dx = backward(&forward(&x).unwrap(), &dy).unwrap();
        assert_gradient(&x, &dx, |x| inner_product(&forward(x)?, &dy));
    }
}

#[test]
fn backward_in_other_precisions_matches_f64() {
    for shape in SHAPES {
        let (y, dy) = (forward(&wide(shape, 1)).unwrap(), random(shape, 2));
        for (dtype, tolerance) in PRECISIONS {
            let exact = backward(&rounded(&y, dtype), &rounded(&dy, dtype)).unwrap();
            let low = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
            let dx = backward(&low(&y), &low(&dy)).unwrap();
            assert_eq!(dx.dtype(), dtype);
            assert_close(&dx, &exact, tolerance);
        }
    }
}

#[test]
fn threads_and_strides_do_not_change_bits() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        let low = |seed| wide(&[300, 203], seed).to_dtype(dtype).unwrap();
        let (x, dy) = (low(1), low(2));
        let run = |x: &Tensor, dy: &Tensor| {
            let y = forward(x).unwrap();
            let dx = backward(&y, dy).unwrap();
            vec![y, dx]
        };
        assert_independent_of_threads(|| run(&x, &dy));
        let strided_y = strided(&forward(&x).unwrap());
        let strided_dx = backward(&strided_y, &strided(&dy)).unwrap();
        let other = [forward(&strided(&x)).unwrap(), strided_dx];
        for (a, b) in run(&x, &dy).iter().zip(&other) {
            assert_identical(a, b);
        }
    }
}

#[test]
fn candles_autograd_gets_the_same_gradients() {
    let x = Var::from_tensor(&wide(&[2, 5, 7], 1)).unwrap();
    let dy = random(&[2, 5, 7], 2);
    let gradient = |y: Tensor| {
        let gradients = (y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
        gradients.get(&x).unwrap().clone()
    };
    let exponentials = x.exp().unwrap();
    let theirs =
        exponentials.broadcast_div(&exponentials.sum_keepdim(2).unwrap()).map(gradient).unwrap();
    assert_close(&gradient(differentiable(&x).unwrap()), &theirs, 1e-12);
    let transposed = x.transpose(0, 1).unwrap();
    let ours = gradient(differentiable(&transposed).unwrap().transpose(0, 1).unwrap());
    assert_close(&ours, &theirs, 1e-12);
    assert!(!forward(&x).unwrap().track_op());
}

#[test]
fn what_is_forbidden_gets_nothing_and_what_is_broken_shows() {
    let no = f32::NEG_INFINITY;
    let row = |values: [f32; 4]| {
        let x = Tensor::new(&values, &Device::Cpu).unwrap();
        forward(&x).unwrap().to_vec1::<f32>().unwrap()
    };
    assert_eq!(row([no, 3.0, no, 3.0]), [0.0, 0.5, 0.0, 0.5]);
    assert_eq!(row([0.0, 3e38, -3e38, 0.0]), [0.0, 1.0, 0.0, 0.0]);
    for broken in [[0.0, f32::NAN, 1.0, 2.0], [no; 4], [f32::INFINITY, 0.0, 0.0, 0.0]] {
        assert!(row(broken)[0].is_nan());
    }
}

#[test]
fn empty_and_wrong_shapes_are_handled() {
    for shape in [[0, 7], [5, 0]] {
        let empty = random(&shape, 1);
        assert_eq!(forward(&empty).unwrap().dims(), &shape);
        assert_eq!(backward(&empty, &empty).unwrap().dims(), &shape);
    }
    let wrong = message(forward(&Tensor::new(1.0, &Device::Cpu).unwrap()));
    assert!(wrong.contains("x is a scalar"), "{wrong}");
    let (y, single) = (random(&[5, 7], 1), random(&[5, 7], 1).to_dtype(DType::F32).unwrap());
    let wrong = message(backward(&y, &single));
    assert!(wrong.contains("dy is F32, expected F64"), "{wrong}");
    let wrong = message(backward(&y, &random(&[5, 6], 1)));
    assert!(wrong.contains("dy has shape [5, 6], expected [5, 7]"), "{wrong}");
    let wrong = message(forward(&Tensor::new(&[1u32], &Device::Cpu).unwrap()));
    assert!(wrong.contains("does not support U32"), "{wrong}");
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    /// Lengths that are kept in registers, by a warp and by a block, and others; many short rows.
    const SHAPES: [&[usize]; 12] = [
        &[1],
        &[64],
        &[2, 5, 33],
        &[5, 8],
        &[3001, 24],
        &[4, 16, 1024],
        &[3, 1000],
        &[7, 2056],
        &[2, 8192],
        &[2, 16384],
        &[3, 20_011],
        &[2, 100_000],
    ];

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_matches_the_cpu() {
        let device = crate::testing::cuda();
        for shape in SHAPES {
            for (dtype, tolerance) in PRECISIONS {
                let (x, dy) = (wide(shape, 1), random(shape, 2));
                let put =
                    |tensor: &Tensor| tensor.to_dtype(dtype).unwrap().to_device(&device).unwrap();
                let y = forward(&put(&x)).unwrap();
                assert_eq!(y.dtype(), dtype);
                let exact = forward(&rounded(&x, dtype)).unwrap();
                assert_close(&y.to_device(&Device::Cpu).unwrap(), &exact, tolerance);
                // The sums of long rows have many terms.
                let dx = backward(&put(&exact), &put(&dy)).unwrap();
                let exact = backward(&rounded(&exact, dtype), &rounded(&dy, dtype)).unwrap();
                assert_close(&dx.to_device(&Device::Cpu).unwrap(), &exact, tolerance);
                assert_identical(
                    &forward(&put(&x)).unwrap().to_device(&Device::Cpu).unwrap(),
                    &y.to_device(&Device::Cpu).unwrap(),
                );
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_reads_views() {
        let device = crate::testing::cuda();
        for dtype in [DType::F32, DType::BF16] {
            let low = |seed| wide(&[30, 200], seed).to_dtype(dtype).unwrap();
            let (x, dy) = (low(1), low(2));
            let put = |tensor: &Tensor| tensor.to_device(&device).unwrap();
            let (y, views) = (forward(&put(&x)).unwrap(), [strided(&put(&x)), strided(&put(&dy))]);
            let back = |tensor: &Tensor| tensor.to_device(&Device::Cpu).unwrap();
            assert_identical(&back(&forward(&views[0]).unwrap()), &back(&y));
            let dx = backward(&y, &put(&dy)).unwrap();
            assert_identical(&back(&backward(&strided(&y), &views[1]).unwrap()), &back(&dx));
            // Rows that start where no pack can be loaded.
            let odd =
                Tensor::cat(&[&x.flatten_all().unwrap(), &x.flatten_all().unwrap()], 0).unwrap();
            let odd = put(&odd).narrow(0, 1, 1000).unwrap().reshape((5, 200)).unwrap();
            assert!(odd.is_contiguous());
            let exact = forward(&back(&odd)).unwrap();
            assert_close(&back(&forward(&odd).unwrap()), &exact, 1e-2);
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_small_probabilities_are_relatively_exact() {
        let device = crate::testing::cuda();
        for columns in [300, 333] {
            let x = (random(&[5, columns], 1) * 40.0).unwrap();
            let exact = values(&reference(&rounded(&x, DType::F32)));
            let x = x.to_dtype(DType::F32).unwrap().to_device(&device).unwrap();
            let y = values(&forward(&x).unwrap().to_device(&Device::Cpu).unwrap());
            for (y, exact) in y.iter().zip(exact) {
                assert!((y - exact).abs() <= 1e-5 * exact, "{y} is not {exact}");
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_forbidden_gets_nothing_and_broken_shows() {
        let device = crate::testing::cuda();
        let no = f32::NEG_INFINITY;
        // With whole packs and without, in one warp and in several.
        for size in [4, 5, 400, 4000, 4001] {
            let row = |values: [f32; 4]| {
                let mut row = vec![no; size];
                for (index, value) in values.into_iter().enumerate() {
                    row[index * (size - 1) / 3] = value;
                }
                let y = forward(&Tensor::from_vec(row, size, &device).unwrap()).unwrap();
                let y = y.to_vec1::<f32>().unwrap();
                [0, 1, 2, 3].map(|index| y[index * (size - 1) / 3])
            };
            assert_eq!(row([no, 3.0, no, 3.0]), [0.0, 0.5, 0.0, 0.5]);
            assert_eq!(row([0.0, 3e38, -3e38, 0.0]), [0.0, 1.0, 0.0, 0.0]);
            for broken in [[0.0, f32::NAN, 1.0, 2.0], [no; 4], [f32::INFINITY, 0.0, 0.0, 0.0]] {
                assert!(row(broken).iter().all(|y| y.is_nan()), "{size}: {broken:?}");
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_handles_nothing_and_errors() {
        let device = crate::testing::cuda();
        for shape in [[0, 7], [5, 0]] {
            let empty = empty(shape, DType::BF16, &device);
            assert_eq!(forward(&empty).unwrap().dims(), &shape);
            assert_eq!(backward(&empty, &empty).unwrap().dims(), &shape);
        }
        let x = Tensor::zeros((2, 3), DType::F32, &device).unwrap();
        let wrong =
            message(backward(&x, &Tensor::zeros((2, 3), DType::F32, &Device::Cpu).unwrap()));
        assert!(wrong.contains("expected all on one device"), "{wrong}");
        let wrong = message(forward(&Tensor::zeros(3, DType::U32, &device).unwrap()));
        assert!(wrong.contains("does not support U32"), "{wrong}");
        let wrong = message(forward(&Tensor::zeros(3, DType::F64, &device).unwrap()));
        assert!(wrong.contains("does not support F64"), "{wrong}");
        let x = candle_core::Var::from_tensor(&Tensor::ones((2, 8), DType::F32, &device).unwrap());
        let x = x.unwrap();
        let y = differentiable(&x).unwrap();
        let gradients = (y * 3.0).unwrap().sum_all().unwrap().backward().unwrap();
        let dx = gradients.get(&x).unwrap().to_device(&Device::Cpu).unwrap();
        assert!(max_abs(&dx) < 1e-6);
    }
}
