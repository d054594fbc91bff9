use super::*;
use crate::testing::*;
use candle_core::DType;

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

#[test]
fn sums_and_multiples_are_candles_rounded_once() {
    for dtype in DTYPES {
        for shape in [vec![], vec![0, 3], vec![5, 7], vec![3, 20_000]] {
            let x = random(&shape, 1).to_dtype(dtype).unwrap();
            let y = random(&shape, 2).to_dtype(dtype).unwrap();
            let wide = |tensor: &Tensor| tensor.to_dtype(DType::F64).unwrap();
            let sum = (wide(&x) + wide(&y)).unwrap();
            let limit = match dtype {
                DType::F64 => 0.0,
                DType::F32 => 6e-8,
                DType::F16 => 5e-4,
                _ => 4e-3,
            };
            assert_close(&add(&x, &y).unwrap(), &sum, limit);
            let multiple = (wide(&x) * 0.37).unwrap();
            assert_close(&scale(&x, 0.37).unwrap(), &multiple, limit);
            let capped = ((wide(&x) / 0.7).unwrap().tanh().unwrap() * 0.7).unwrap();
            assert_close(&softcap(&x, 0.7).unwrap(), &capped, limit.max(1e-12) * 3.0);
            let factor = Tensor::new(&[0.375], &Device::Cpu).unwrap();
            let factor =
                if dtype == DType::F64 { factor } else { factor.to_dtype(DType::F32).unwrap() };
            let multiple = scale(&x, 0.375).unwrap();
            assert_identical(&scale_by(&x, &factor).unwrap(), &multiple);
            assert_eq!(add(&x, &y).unwrap().dtype(), dtype);
        }
    }
}

#[test]
fn rows_are_multiplied_by_their_factors() {
    for dtype in DTYPES {
        for (n, d) in [(0, 3), (3, 0), (1, 1), (5, 7), (3, 1000)] {
            let x = random(&[n, d], 1).to_dtype(dtype).unwrap();
            let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
            let factors = random(&[n], 2).to_dtype(wide).unwrap();
            let found = scale_rows(&x, &factors).unwrap();
            let column = factors.reshape((n, 1)).unwrap();
            let expected = x.to_dtype(wide).unwrap().broadcast_mul(&column).unwrap();
            assert_identical(&found, &expected.to_dtype(dtype).unwrap());
            assert_identical(&scale_rows(&strided(&x), &strided(&factors)).unwrap(), &found);
        }
    }
    let x = random(&[2, 3], 1);
    let wrong = message(scale_rows(&x, &random(&[3], 1)));
    assert!(wrong.contains("factors has shape [3], expected [2]"), "{wrong}");
    let single = random(&[2], 1).to_dtype(DType::F32).unwrap();
    assert!(message(scale_rows(&x, &single)).contains("factors is F32, expected F64"));
}

#[test]
fn threads_and_strides_do_not_change_bits() {
    for dtype in DTYPES {
        let x = random(&[40, 1000], 1).to_dtype(dtype).unwrap();
        let y = random(&[40, 1000], 2).to_dtype(dtype).unwrap();
        let expected = add(&x, &y).unwrap();
        assert_identical(&add(&strided(&x), &strided(&y)).unwrap(), &expected);
        assert_identical(&scale(&strided(&x), 0.3).unwrap(), &scale(&x, 0.3).unwrap());
        assert_identical(&softcap(&strided(&x), 0.3).unwrap(), &softcap(&x, 0.3).unwrap());
        assert_independent_of_threads(|| {
            vec![add(&x, &y).unwrap(), scale(&x, 0.3).unwrap(), softcap(&x, 0.3).unwrap()]
        });
    }
}

#[test]
fn wrong_arguments_are_errors() {
    let x = random(&[2, 3], 1);
    assert!(message(add(&x, &random(&[3, 2], 1))).contains("y has shape [3, 2], expected [2, 3]"));
    assert!(message(add(&x, &x.to_dtype(DType::F32).unwrap())).contains("y is F32, expected F64"));
    let integers = Tensor::zeros((2, 3), DType::U32, &Device::Cpu).unwrap();
    assert!(message(softcap(&x, 0.0)).contains("the cap is 0, expected a positive number"));
    assert!(message(scale(&integers, 2.0)).contains("does not support U32"));
    assert!(
        message(scale_by(&x, &x)).contains("the factor has shape [2, 3], expected one element")
    );
    let single = Tensor::new(2f32, &Device::Cpu).unwrap();
    assert!(message(scale_by(&x, &single)).contains("factor is F32, expected F64"));
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_gives_the_bits_of_the_cpu() {
    use candle_core::Device;
    let device = crate::testing::cuda();
    let back = |tensor: &Tensor| tensor.to_device(&Device::Cpu).unwrap();
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        for shape in [vec![], vec![1], vec![5, 7], vec![8, 64], vec![3, 20_001]] {
            let x = random(&shape, 1).to_dtype(dtype).unwrap();
            let y = random(&shape, 2).to_dtype(dtype).unwrap();
            let (sum, multiple) = (add(&x, &y).unwrap(), scale(&x, 0.37).unwrap());
            let capped = softcap(&x, 0.7).unwrap();
            let (x, y) = (x.to_device(&device).unwrap(), y.to_device(&device).unwrap());
            let near = if dtype == DType::F32 { 1e-6 } else { 1e-2 };
            assert_close(&back(&softcap(&x, 0.7).unwrap()), &capped, near);
            assert_identical(&back(&add(&x, &y).unwrap()), &sum);
            assert_identical(&back(&scale(&x, 0.37).unwrap()), &multiple);
            if let Ok((n, _)) = x.dims2() {
                let factors = random(&[n], 3).to_dtype(DType::F32).unwrap();
                let expected = scale_rows(&back(&x), &factors).unwrap();
                let found = scale_rows(&x, &factors.to_device(&device).unwrap()).unwrap();
                assert_identical(&back(&found), &expected);
            }
            let factor = Tensor::new(0.37f32, &device).unwrap();
            assert_identical(&back(&scale_by(&x, &factor).unwrap()), &multiple);
            if shape.len() == 2 {
                let other = add(&strided(&x), &strided(&y)).unwrap();
                assert_identical(&back(&other), &sum);
                // A start where no pack can be loaded.
                let (rows, columns) = x.dims2().unwrap();
                let (x, y) = (x.flatten_all().unwrap(), y.flatten_all().unwrap());
                let count = rows * columns - 3;
                let part = |tensor: &Tensor| tensor.narrow(0, 3, count).unwrap();
                let expected = part(&sum.flatten_all().unwrap());
                assert_identical(&back(&add(&part(&x), &part(&y)).unwrap()), &expected);
                let expected = part(&multiple.flatten_all().unwrap());
                assert_identical(&back(&scale(&part(&x), 0.37).unwrap()), &expected);
            }
        }
        let nothing = empty([0, 3], dtype, &device);
        assert_eq!(add(&nothing, &nothing).unwrap().dims(), &[0, 3]);
        assert_eq!(scale(&nothing, 2.0).unwrap().dims(), &[0, 3]);
    }
}
