use super::*;
use crate::testing::*;
use candle_core::Device;

const OPTIONS: Options =
    Options { learning_rate: 1e-2, momentum: 0.95, nesterov: true, weight_decay: 0.1 };

fn own(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    random(shape, seed).to_dtype(dtype).unwrap().copy().unwrap()
}

/// Newton and Schulz's iteration as the post writes it, on the smaller side's products, with Candle's.
fn reference(x: &Tensor, iterations: usize) -> Tensor {
    let [a, b, c] = COEFFICIENTS;
    let tall = x.dims()[0] > x.dims()[1];
    let x = if tall { x.t().unwrap() } else { x.clone() };
    let norm = values(&x).iter().map(|x| x * x).sum::<f64>().sqrt();
    let mut x = (x.contiguous().unwrap() / norm.max(EPSILON)).unwrap();
    for _ in 0..iterations {
        let gram = x.matmul(&x.t().unwrap()).unwrap();
        let both = ((&gram * b).unwrap() + (gram.matmul(&gram).unwrap() * c).unwrap()).unwrap();
        x = ((&x * a).unwrap() + both.matmul(&x).unwrap()).unwrap();
    }
    if tall { x.t().unwrap().contiguous().unwrap() } else { x }
}

const SHAPES: [[usize; 2]; 5] = [[24, 24], [8, 65], [130, 16], [1, 7], [9, 1]];

#[test]
fn directions_are_those_of_the_iteration_and_nearly_orthogonal() {
    for shape in SHAPES {
        for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 2e-5)] {
            let x = own(&shape, 1, dtype);
            let expected = reference(&x.to_dtype(DType::F64).unwrap(), 5);
            let found = orthogonalize(&x, 5).unwrap();
            assert_close(&found, &expected, tolerance);
            assert!(
                (crate::flat::norm(&x).unwrap() - 1.0).abs() < 1e-6,
                "x is divided by its norm"
            );
            // The sum of squared singular values, each within 0.6 and 1.3 here.
            let smaller = *shape.iter().min().unwrap() as f64;
            let mean = values(&found).iter().map(|x| x * x).sum::<f64>() / smaller;
            assert!((0.36..1.7).contains(&mean), "{shape:?}: {mean}");
        }
    }
    let nothing = Tensor::zeros((3, 5), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(max_abs(&orthogonalize(&nothing, 5).unwrap()), 0.0);
}

#[test]
fn momentum_and_decay_are_those_of_the_definition() {
    let n = 20_001;
    for (dtype, tolerance) in [(DType::F64, 1e-14), (DType::F32, 1e-6)] {
        for nesterov in [false, true] {
            let options = Options { nesterov, ..OPTIONS };
            let [params, m, update] = [1, 2, 3].map(|seed| own(&[n], seed, dtype));
            let (mut p_exact, mut m_exact) = (values(&params), values(&m));
            for number in 0..3 {
                let grads = own(&[n], 10 + number, dtype);
                let g_exact: Vec<f64> = values(&grads).iter().map(|g| g * 0.5).collect();
                step(&params, &grads, &m, &update, 0.5, &options).unwrap();
                assert_eq!(max_abs(&grads), 0.0);
                let mut u_exact = Vec::new();
                for ((p, m), g) in p_exact.iter_mut().zip(&mut m_exact).zip(&g_exact) {
                    *p *= 1.0 - 1e-3;
                    *m = 0.95 * *m + 0.05 * g;
                    u_exact.push(if nesterov { 0.05 * g + 0.95 * *m } else { *m });
                }
                for (found, exact) in [(&params, &p_exact), (&m, &m_exact), (&update, &u_exact)] {
                    let exact = Tensor::from_slice(exact, n, &Device::Cpu).unwrap();
                    assert_close(found, &exact, tolerance);
                }
            }
        }
    }
}

#[test]
fn mistakes_are_errors() {
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    let wrong = message(orthogonalize(&ones(&[4]), 5));
    assert!(wrong.contains("expected 2 dimensions (rows, columns)"), "{wrong}");
    let wrong = message(orthogonalize(&ones(&[4, 2]).t().unwrap(), 5));
    assert!(wrong.contains("x is not contiguous"), "{wrong}");
    let wrong = message(orthogonalize(&ones(&[4, 2]).to_dtype(DType::BF16).unwrap(), 5));
    assert!(wrong.contains("x is BF16, expected F32"), "{wrong}");
    let wrong = message(step(&ones(&[4]), &ones(&[5]), &ones(&[4]), &ones(&[4]), 1.0, &OPTIONS));
    assert!(wrong.contains("grads has shape [5], expected [4]"), "{wrong}");
}

#[test]
fn threads_do_not_change_bits() {
    assert_independent_of_threads(|| {
        vec![orthogonalize(&own(&[300, 40], 1, DType::F32), 5).unwrap()]
    });
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_directions_and_momentum_match_the_cpu() {
    let device = crate::testing::cuda();
    for shape in SHAPES.into_iter().chain([[1024, 16], [300, 2048]]) {
        let x = own(&shape, 1, DType::F32);
        let low = x.to_device(&device).unwrap();
        let again = low.copy().unwrap();
        let found = orthogonalize(&low, 5).unwrap();
        // Products of f32 may be made of shorter numbers, which the iteration blows up.
        assert_close(&here(&found), &orthogonalize(&x, 5).unwrap(), 2e-2);
        assert_identical(&here(&orthogonalize(&again, 5).unwrap()), &here(&found));
    }
    for (n, start) in [(1, 0), (40_001, 0), (40_001, 3)] {
        let exact = [1, 2, 3, 4].map(|seed| own(&[n], seed, DType::F32));
        let low = exact.clone().map(|tensor| {
            let padded = tensor.pad_with_zeros(0, start, 1).unwrap().to_device(&device).unwrap();
            padded.narrow(0, start, n).unwrap()
        });
        for [params, grads, m, update] in [&exact, &low] {
            step(params, grads, m, update, 0.5, &OPTIONS).unwrap();
        }
        for (low, exact) in low.iter().zip(&exact) {
            assert_close(&here(low), exact, 1e-6);
        }
    }
}
