use super::*;
use crate::testing::*;

fn ids() -> Tensor {
    Tensor::new(&[[3u32, 0, 3, 8, 3], [0, 0, 1, 8, 2]], &Device::Cpu).unwrap()
}

#[test]
fn forward_copies_rows() {
    for dtype in [DType::F64, DType::F32, DType::F16, DType::BF16] {
        let table = random(&[9, 7], 1).to_dtype(dtype).unwrap();
        let expected = table.index_select(&ids().flatten_all().unwrap(), 0).unwrap();
        let expected = expected.reshape((2, 5, 7)).unwrap();
        assert_identical(&forward(&table, &ids()).unwrap(), &expected);
        assert_identical(&forward(&strided(&table), &strided(&ids())).unwrap(), &expected);
    }
}

#[test]
fn backward_matches_finite_differences() {
    let (table, dy) = (random(&[9, 7], 1), random(&[2, 5, 7], 2));
    let dtable = backward(&dy, &ids(), 9).unwrap();
    assert_gradient(&table, &dtable, |table| inner_product(&forward(table, &ids())?, &dy));
}

#[test]
fn other_precisions_match_f64() {
    let dy = random(&[2, 5, 7], 2);
    for (dtype, _) in PRECISIONS {
        let dtable = backward(&dy.to_dtype(dtype).unwrap(), &strided(&ids()), 9).unwrap();
        assert_eq!(dtable.dtype(), DType::F32);
        assert_close(&dtable, &backward(&rounded(&dy, dtype), &ids(), 9).unwrap(), 2e-6);
    }
}

#[test]
fn gradients_are_added_to_what_is_there() {
    for (dtype, sum) in
        [(DType::F64, DType::F64), (DType::F32, DType::F32), (DType::BF16, DType::F32)]
    {
        let dy = random(&[2, 5, 7], 2).to_dtype(dtype).unwrap();
        let buffer = random(&[100], 3).to_dtype(sum).unwrap();
        let before = buffer.copy().unwrap();
        let view = |buffer: &Tensor| buffer.narrow(0, 20, 63).unwrap().reshape((9, 7)).unwrap();
        accumulate(&view(&buffer), &strided(&dy), &strided(&ids())).unwrap();
        let expected = (view(&before) + backward(&dy, &ids(), 9).unwrap()).unwrap();
        assert_identical(&view(&buffer), &expected);
        for (start, length) in [(0, 20), (83, 17)] {
            let beside = |buffer: &Tensor| buffer.narrow(0, start, length).unwrap();
            assert_identical(&beside(&buffer), &beside(&before));
        }
    }
    let dy = random(&[2, 5, 7], 2).to_dtype(DType::F32).unwrap();
    let gradient = |shape: &[usize]| random(shape, 1).to_dtype(DType::F32).unwrap();
    let wrong = message(accumulate(&gradient(&[8, 7]), &dy, &ids()));
    assert!(wrong.contains("token id 8 at position 3"), "{wrong}");
    let wrong = message(accumulate(&gradient(&[9, 6]), &dy, &ids()));
    assert!(wrong.contains("the gradient has shape [9, 6], expected [9, 7]"), "{wrong}");
    let wrong = message(accumulate(&random(&[9, 7], 1), &dy, &ids()));
    assert!(wrong.contains("the gradient is F64, expected F32"), "{wrong}");
    let wrong = message(accumulate(&strided(&gradient(&[9, 7])), &dy, &ids()));
    assert!(wrong.contains("contiguous"), "{wrong}");
}

#[test]
fn threads_do_not_change_bits() {
    let ids: Vec<u32> = (0..2000u32).map(|i| i * i % 97).collect();
    let ids = Tensor::from_vec(ids, (2, 1000), &Device::Cpu).unwrap();
    let dy = random(&[2, 1000, 33], 1).to_dtype(DType::F32).unwrap();
    let table = random(&[97, 33], 1);
    assert_independent_of_threads(|| {
        vec![backward(&dy, &ids, 97).unwrap(), forward(&table, &ids).unwrap()]
    });
}

#[test]
fn empty_and_wrong_arguments_are_handled() {
    let table = random(&[9, 7], 1);
    let none = Tensor::zeros((2, 0), DType::U32, &Device::Cpu).unwrap();
    let y = forward(&table, &none).unwrap();
    assert_eq!(y.dims(), &[2, 0, 7]);
    assert_eq!(max_abs(&backward(&y, &none, 9).unwrap()), 0.0);
    assert_eq!(forward(&random(&[9, 0], 1), &ids()).unwrap().dims(), &[2, 5, 0]);
    let wrong = message(forward(&random(&[8, 7], 1), &ids()));
    assert!(wrong.contains("token id 8 at position 3") && wrong.contains("less than 8"), "{wrong}");
    let wrong = message(backward(&random(&[2, 4, 7], 1), &ids(), 9));
    assert!(wrong.contains("dy has shape [2, 4, 7], expected [2, 5, 7]"), "{wrong}");
    let signed = ids().to_dtype(DType::I64).unwrap();
    assert!(message(forward(&table, &signed)).contains("ids is I64, expected U32"));
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    fn back(tensor: &Tensor) -> Tensor {
        tensor.to_device(&Device::Cpu).unwrap()
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_gives_the_bits_of_the_cpu() {
        let device = crate::testing::cuda();
        // Few tokens that occur often, one of them very often, and many that occur once.
        let token = |i: u32| if i.is_multiple_of(3) { 5 } else { i * i % 997 };
        let many: Vec<u32> = (0..5000).map(token).collect();
        let many = Tensor::from_vec(many, (2, 2500), &Device::Cpu).unwrap();
        let one: Vec<u32> = vec![7; 3000];
        let one = Tensor::from_vec(one, (1, 3000), &Device::Cpu).unwrap();
        for (ids, v) in [(ids(), 9), (many, 1000), (one, 8)] {
            let (batch, seq) = ids.dims2().unwrap();
            let low_ids = ids.to_device(&device).unwrap();
            for dtype in [DType::F32, DType::F16, DType::BF16] {
                for d in [1, 7, 32, 1100] {
                    let table = random(&[v, d], 1).to_dtype(dtype).unwrap();
                    let low_table = table.to_device(&device).unwrap();
                    let y = forward(&low_table, &low_ids).unwrap();
                    assert_identical(&back(&y), &forward(&table, &ids).unwrap());
                    let dy = random(&[batch, seq, d], 2).to_dtype(dtype).unwrap();
                    let low_dy = dy.to_device(&device).unwrap();
                    let dtable = backward(&low_dy, &low_ids, v).unwrap();
                    assert_identical(&back(&dtable), &backward(&dy, &ids, v).unwrap());
                    // Where vectors fit, and where they don't.
                    for start in [0, 1] {
                        let buffer = random(&[v * d + 1], 3).to_dtype(DType::F32).unwrap();
                        let low = buffer.to_device(&device).unwrap();
                        let view = |buffer: &Tensor| {
                            buffer.narrow(0, start, v * d).unwrap().reshape((v, d)).unwrap()
                        };
                        accumulate(&view(&low), &low_dy, &low_ids).unwrap();
                        let sum = (view(&buffer) + backward(&dy, &ids, v).unwrap()).unwrap();
                        assert_identical(&back(&view(&low)), &sum);
                        let other = if start == 0 { v * d } else { 0 };
                        let other = |buffer: &Tensor| buffer.narrow(0, other, 1).unwrap();
                        assert_identical(&back(&other(&low)), &other(&buffer));
                    }
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_ids_outside_the_table_show() {
        let device = crate::testing::cuda();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for d in [7, 8, 10] {
                let table = random(&[8, d], 1).to_dtype(dtype).unwrap().to_device(&device).unwrap();
                let low_ids = ids().to_device(&device).unwrap();
                let y = values(&back(&forward(&table, &low_ids).unwrap()));
                for (row, id) in y.chunks(d).zip(values(&ids())) {
                    assert!(row.iter().all(|y| y.is_nan() == (id == 8.0)), "{id}: {row:?}");
                }
                let dy = random(&[2, 5, d], 2).to_dtype(dtype).unwrap().to_device(&device).unwrap();
                let dtable = back(&backward(&dy, &low_ids, 8).unwrap());
                let all = back(&backward(&dy, &low_ids, 9).unwrap());
                assert_identical(&dtable, &all.narrow(0, 0, 8).unwrap());
            }
        }
    }
}
