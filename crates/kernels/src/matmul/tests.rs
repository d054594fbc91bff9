use super::*;
use crate::testing::*;
use candle_core::DType;

fn reference(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Tensor {
    let (rows, inner) = rows_and_columns("reference", "x", x).unwrap();
    let outer = weight.dim(0).unwrap();
    let (xs, ws) = (values(x), values(weight));
    let bs = bias.map(values);
    let mut out = Vec::with_capacity(rows * outer);
    for row in 0..rows {
        for output in 0..outer {
            let product: f64 =
                (0..inner).map(|i| xs[row * inner + i] * ws[output * inner + i]).sum();
            out.push(product + bs.as_ref().map_or(0.0, |bs| bs[output]));
        }
    }
    Tensor::from_vec(out, with_last_dimension(x, outer), &Device::Cpu).unwrap()
}

#[test]
fn forward_matches_reference_in_every_dtype() {
    for (rows, inner, outer) in [
        (1, 7, 5),
        (1, 257, 1000),
        (3, 33, 129),
        (5, 33, 9),
        (37, 64, 300),
        (300, 70, 140),
        (9, 2100, 130),
    ] {
        let x = random(&[1, rows, inner], 1);
        let weight = random(&[outer, inner], 2);
        let bias = random(&[outer], 3);
        let exact = reference(&x, &weight, Some(&bias));
        assert_close(&linear(&x, &weight, Some(&bias)).unwrap(), &exact, 1e-13);
        for (dtype, tolerance) in PRECISIONS {
            let (x, weight, bias) =
                (rounded(&x, dtype), rounded(&weight, dtype), rounded(&bias, dtype));
            let exact = reference(&x, &weight, Some(&bias));
            let y = linear(
                &x.to_dtype(dtype).unwrap(),
                &weight.to_dtype(dtype).unwrap(),
                Some(&bias.to_dtype(dtype).unwrap()),
            )
            .unwrap();
            assert_eq!(y.dtype(), dtype);
            assert_close(&y, &exact, tolerance);
        }
    }
}

#[test]
fn a_row_has_the_same_bits_beside_few_others_and_many() {
    let kind = crate::backend::cpu::gemm::Kind::for_bf16();
    // Where bf16 isn't multiplied by lines as they are stored, a few rows have sums of their own.
    let first = if kind.takes_lines(1) { 1 } else { few_rows::FEW_ROWS + 1 };
    let bf16 = |shape: &[usize], seed| random(shape, seed).to_dtype(DType::BF16).unwrap();
    let (x, weight, bias) = (bf16(&[40, 610], 1), bf16(&[203, 610], 2), bf16(&[203], 3));
    let all = values(&linear(&x, &weight, Some(&bias)).unwrap());
    for rows in (first..10).chain([17, 31]) {
        let y = linear(&x.narrow(0, 0, rows).unwrap(), &weight, Some(&bias)).unwrap();
        assert_eq!(values(&y), all[..rows * 203], "{rows}");
    }
}

#[test]
fn half_precision_sums_are_kept_in_f32() {
    // In bf16 1 + 1/256 is 1: a sum kept there would stay at its first few terms.
    let x = Tensor::ones((8, 4096), DType::BF16, &Device::Cpu).unwrap();
    let weight = Tensor::ones((3, 4096), DType::BF16, &Device::Cpu).unwrap();
    let y = linear(&x, &weight, None).unwrap();
    assert!(values(&y).iter().all(|y| *y == 4096.0));
    let dw =
        linear_backward_weight(&x.t().unwrap().contiguous().unwrap(), &x.t().unwrap()).unwrap();
    assert!(values(&dw).iter().all(|dw| *dw == 4096.0));
}

#[test]
fn backward_matches_finite_differences() {
    for rows in [1, 5] {
        let x = random(&[rows, 7], 1);
        let weight = random(&[6, 7], 2);
        let bias = random(&[6], 3);
        let dy = random(&[rows, 6], 4);
        let loss = |x: &Tensor, w: &Tensor, b: &Tensor| inner_product(&linear(x, w, Some(b))?, &dy);
        let dx = linear_backward_input(&dy, &weight).unwrap();
        assert_gradient(&x, &dx, |x| loss(x, &weight, &bias));
        let dweight = linear_backward_weight(&x, &dy).unwrap();
        assert_gradient(&weight, &dweight, |weight| loss(&x, weight, &bias));
        let dbias = linear_backward_bias(&dy).unwrap();
        assert_gradient(&bias, &dbias, |bias| loss(&x, &weight, bias));
    }
}

#[test]
fn backward_in_other_precisions_matches_f64() {
    let (rows, inner, outer) = (300, 70, 1140);
    let x = random(&[rows, inner], 1);
    let weight = random(&[outer, inner], 2);
    let dy = random(&[rows, outer], 4);
    for (dtype, tolerance) in PRECISIONS {
        let (x, weight, dy) = (rounded(&x, dtype), rounded(&weight, dtype), rounded(&dy, dtype));
        let low = |tensor: &Tensor| tensor.to_dtype(dtype).unwrap();
        let dx = linear_backward_input(&low(&dy), &low(&weight)).unwrap();
        assert_eq!(dx.dtype(), dtype);
        assert_close(&dx, &linear_backward_input(&dy, &weight).unwrap(), tolerance);
        // Parameters' gradients are f32, whatever the activations are.
        let dweight = linear_backward_weight(&low(&x), &low(&dy)).unwrap();
        assert_eq!(dweight.dtype(), DType::F32);
        assert_close(&dweight, &linear_backward_weight(&x, &dy).unwrap(), 2e-6);
        let dbias = linear_backward_bias(&low(&dy)).unwrap();
        assert_eq!(dbias.dtype(), DType::F32);
        assert_close(&dbias, &linear_backward_bias(&dy).unwrap(), 2e-6);
    }
}

#[test]
fn an_f32_weight_goes_with_bf16_activations() {
    let x = random(&[9, 33], 1).to_dtype(DType::BF16).unwrap();
    let weight = random(&[17, 33], 2).to_dtype(DType::F32).unwrap();
    let y = linear(&x, &weight, None).unwrap();
    assert_eq!(y.dtype(), DType::BF16);
    assert_close(&y, &reference(&x, &weight, None), 8e-3);
    let dx = linear_backward_input(&y, &weight).unwrap();
    assert_close(&dx, &reference(&y, &weight.t().unwrap(), None), 8e-3);
}

#[test]
fn strides_do_not_matter() {
    let (x, weight, dy) = (random(&[6, 33], 1), random(&[9, 33], 2), random(&[6, 9], 3));
    let (xs, weights, dys) = (strided(&x), strided(&weight), strided(&dy));
    assert_identical(&linear(&x, &weight, None).unwrap(), &linear(&xs, &weights, None).unwrap());
    assert_identical(
        &linear_backward_input(&dy, &weight).unwrap(),
        &linear_backward_input(&dys, &weights).unwrap(),
    );
    assert_identical(
        &linear_backward_weight(&x, &dy).unwrap(),
        &linear_backward_weight(&xs, &dys).unwrap(),
    );
    assert_identical(&linear_backward_bias(&dy).unwrap(), &linear_backward_bias(&dys).unwrap());
}

#[test]
fn threads_do_not_change_bits() {
    for dtype in [DType::F32, DType::BF16] {
        for rows in [1, 300] {
            let x = random(&[rows, 200], 1).to_dtype(dtype).unwrap();
            let weight = random(&[500, 200], 2).to_dtype(dtype).unwrap();
            let dy = random(&[rows, 500], 3).to_dtype(dtype).unwrap();
            assert_independent_of_threads(|| {
                vec![
                    linear(&x, &weight, None).unwrap(),
                    linear_backward_input(&dy, &weight).unwrap(),
                    linear_backward_weight(&x, &dy).unwrap(),
                    linear_backward_bias(&dy).unwrap(),
                ]
            });
        }
    }
}

#[test]
fn nothing_is_recorded() {
    let weight = candle_core::Var::from_tensor(&random(&[3, 4], 1)).unwrap();
    let y = linear(&random(&[2, 4], 2), weight.as_tensor(), None).unwrap();
    assert!(!y.track_op());
}

#[test]
fn empty_sizes_give_empty_or_zero_results() {
    for dtype in [DType::F32, DType::BF16] {
        for (rows, inner, outer) in [(0, 3, 4), (2, 0, 4), (9, 0, 4), (2, 3, 0), (9, 3, 0)] {
            let x = Tensor::ones((rows, inner), dtype, &Device::Cpu).unwrap();
            let weight = Tensor::ones((outer, inner), dtype, &Device::Cpu).unwrap();
            let y = linear(&x, &weight, None).unwrap();
            assert_eq!(y.dims(), &[rows, outer]);
            assert!(values(&y).iter().all(|y| *y == inner as f64));
            assert_eq!(linear_backward_input(&y, &weight).unwrap().dims(), &[rows, inner]);
            assert_eq!(linear_backward_weight(&x, &y).unwrap().dims(), &[outer, inner]);
            assert_eq!(linear_backward_bias(&y).unwrap().dims(), &[outer]);
        }
    }
}

#[test]
fn wrong_shapes_and_dtypes_are_errors() {
    let (x, weight) = (random(&[2, 3], 1), random(&[4, 3], 2));
    let wrong = message(linear(&x, &random(&[4, 5], 1), None));
    assert!(wrong.contains("weight has shape [4, 5], expected (out, 3)"), "{wrong}");
    let wrong = message(linear(&x, &weight, Some(&random(&[3], 1))));
    assert!(wrong.contains("bias has shape [3], expected [4]"), "{wrong}");
    assert!(message(linear_backward_input(&random(&[2, 3], 1), &weight)).contains("weight"));
    assert!(message(linear_backward_weight(&x, &random(&[3, 4], 1))).contains("dy has shape"));
    let scalar = Tensor::new(1f32, &Device::Cpu).unwrap();
    assert!(message(linear(&scalar, &weight, None)).contains("x is a scalar"));
    let integers = Tensor::zeros((2, 3), DType::U32, &Device::Cpu).unwrap();
    assert!(message(linear(&integers, &weight, None)).contains("does not support U32"));
    let single = x.to_dtype(DType::F32).unwrap();
    assert!(message(linear(&single, &weight, None)).contains("a F64 tensor cannot be combined"));
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    /// Sizes on both sides of where the kernels for a few rows end, with and without whole 16 bytes.
    const SHAPES: [(usize, usize, usize); 14] = [
        (1, 7, 5),
        (1, 264, 1000),
        (1, 4096, 520),
        (2, 512, 33),
        (3, 33, 129),
        (4, 640, 130),
        (5, 40, 9),
        (8, 1032, 70),
        (8, 33, 3),
        (9, 64, 64),
        (37, 64, 300),
        (300, 70, 140),
        (130, 129, 7),
        (64, 2100, 130),
    ];

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_matches_the_cpu_in_every_dtype() {
        let device = cuda();
        for (rows, inner, outer) in SHAPES {
            let x = random(&[1, rows, inner], 1);
            let weight = random(&[outer, inner], 2);
            let bias = random(&[outer], 3);
            let dy = random(&[1, rows, outer], 4);
            for (dtype, tolerance) in PRECISIONS {
                let [x, weight, bias, dy] =
                    [&x, &weight, &bias, &dy].map(|tensor| rounded(tensor, dtype));
                let there =
                    |tensor: &Tensor| tensor.to_dtype(dtype).unwrap().to_device(&device).unwrap();
                for bias in [None, Some(&bias)] {
                    let y = linear(&there(&x), &there(&weight), bias.map(there).as_ref()).unwrap();
                    assert_eq!(y.dtype(), dtype);
                    assert_close(&here(&y), &linear(&x, &weight, bias).unwrap(), tolerance);
                }
                let dx = linear_backward_input(&there(&dy), &there(&weight)).unwrap();
                assert_eq!(dx.dtype(), dtype);
                let expected = linear_backward_input(&dy, &weight).unwrap();
                assert_close(&here(&dx), &expected, tolerance);
                let dweight = linear_backward_weight(&there(&x), &there(&dy)).unwrap();
                assert_eq!(dweight.dtype(), DType::F32);
                let expected = linear_backward_weight(&x, &dy).unwrap();
                assert_close(&here(&dweight), &expected, 4e-6);
                let dbias = linear_backward_bias(&there(&dy)).unwrap();
                assert_eq!(dbias.dtype(), DType::F32);
                assert_close(&here(&dbias), &linear_backward_bias(&dy).unwrap(), 4e-6);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_sums_half_precision_in_f32() {
        let device = cuda();
        for rows in [1, 8, 64] {
            let x = Tensor::ones((rows, 4096), DType::BF16, &device).unwrap();
            let weight = Tensor::ones((3, 4096), DType::BF16, &device).unwrap();
            let y = linear(&x, &weight, None).unwrap();
            assert!(values(&here(&y)).iter().all(|y| *y == 4096.0));
        }
        let dy = Tensor::ones((5000, 3), DType::BF16, &device).unwrap();
        let dbias = linear_backward_bias(&dy).unwrap();
        assert!(values(&here(&dbias)).iter().all(|db| *db == 5000.0));
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_takes_views_and_other_dtypes_and_repeats_its_bits() {
        let device = cuda();
        for (rows, dtype) in
            [(3, DType::F32), (3, DType::BF16), (40, DType::F32), (40, DType::BF16)]
        {
            let there =
                |tensor: Tensor| tensor.to_dtype(dtype).unwrap().to_device(&device).unwrap();
            // cuBLAS may take another kernel for matrices that lie otherwise.
            let tolerance = if dtype == DType::F32 { 2e-6 } else { 8e-3 };
            let x = there(random(&[rows, 72], 1));
            let weight = there(random(&[40, 72], 2));
            let dy = there(random(&[rows, 40], 3));
            let (xs, weights, dys) = (strided(&x), strided(&weight), strided(&dy));
            // Narrowed, so that rows lie further apart than they are long.
            let wide = Tensor::cat(&[&x, &x], 1).unwrap();
            let narrow = wide.narrow(1, 72, 72).unwrap();
            let y = here(&linear(&x, &weight, None).unwrap());
            assert_identical(&y, &here(&linear(&x, &weight, None).unwrap()));
            assert_close(&here(&linear(&xs, &weights, None).unwrap()), &y, tolerance);
            assert_close(&here(&linear(&narrow, &weight, None).unwrap()), &y, tolerance);
            let dx = here(&linear_backward_input(&dy, &weight).unwrap());
            let views = linear_backward_input(&dys, &weights).unwrap();
            assert_close(&here(&views), &dx, tolerance);
            let dweight = here(&linear_backward_weight(&x, &dy).unwrap());
            assert_close(&here(&linear_backward_weight(&xs, &dys).unwrap()), &dweight, tolerance);
            let dbias = here(&linear_backward_bias(&dy).unwrap());
            assert_identical(&here(&linear_backward_bias(&dys).unwrap()), &dbias);

            let single = weight.to_dtype(DType::F32).unwrap();
            let mixed = linear(&x, &single, None).unwrap();
            assert_eq!(mixed.dtype(), dtype);
            assert_close(&here(&mixed), &y, tolerance);
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_gives_empty_or_zero_results_for_empty_sizes() {
        let device = cuda();
        for (rows, inner, outer) in [(0, 3, 4), (2, 0, 4), (9, 0, 4), (2, 3, 0), (9, 3, 0)] {
            let ones = |shape| Tensor::ones(shape, DType::BF16, &Device::Cpu).unwrap();
            let x = there(&ones((rows, inner)), &device);
            let weight = there(&ones((outer, inner)), &device);
            let y = linear(&x, &weight, None).unwrap();
            assert_eq!(y.dims(), &[rows, outer]);
            assert!(values(&here(&y)).iter().all(|y| *y == inner as f64));
            let dx = here(&linear_backward_input(&y, &weight).unwrap());
            assert_eq!(dx.dims(), &[rows, inner]);
            let dweight = here(&linear_backward_weight(&x, &y).unwrap());
            assert_eq!(dweight.dims(), &[outer, inner]);
            assert!(rows > 0 || max_abs(&dweight) == 0.0);
            assert_eq!(linear_backward_bias(&y).unwrap().dims(), &[outer]);
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_refuses_wrong_arguments() {
        let device = cuda();
        let there = |shape: &[usize], dtype| {
            random(shape, 1).to_dtype(dtype).unwrap().to_device(&device).unwrap()
        };
        let x = there(&[2, 3], DType::F32);
        let wrong = message(linear(&x, &random(&[4, 3], 1), None));
        assert!(wrong.contains("expected all on one device"), "{wrong}");
        let wrong = message(linear(&x, &there(&[4, 3], DType::U32), None));
        assert!(wrong.contains("does not support U32"), "{wrong}");
        let wrong = message(linear(&x, &there(&[4, 5], DType::F32), None));
        assert!(wrong.contains("expected (out, 3)"), "{wrong}");
    }
}
