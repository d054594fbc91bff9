use super::*;
use crate::testing::*;
use candle_core::{DType, Device, Var};

fn reference(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let (_, _, heads, head_dim) = x.dims4().unwrap();
    let half = cos.dim(2).unwrap();
    let (cos, sin, mut out) = (values(cos), values(sin), values(x));
    for (row, y) in out.chunks_mut(head_dim).enumerate() {
        for i in 0..half {
            let (c, s) = (cos[row / heads * half + i], sin[row / heads * half + i]);
            let (x1, x2) = (y[i], y[i + half]);
            y[i] = x1 * c - x2 * s;
            y[i + half] = x2 * c + x1 * s;
        }
    }
    Tensor::from_vec(out, x.dims(), &Device::Cpu).unwrap()
}

fn angles(batch: usize, seq: usize, half: usize) -> (Tensor, Tensor) {
    let angles = (random(&[batch, seq, half], 9) * 3.0).unwrap();
    (angles.cos().unwrap(), angles.sin().unwrap())
}

#[test]
fn forward_matches_reference_in_every_dtype() {
    for (heads, head_dim, half) in [(1, 2, 1), (3, 7, 3), (3, 7, 2), (2, 64, 32), (2, 5, 0)] {
        let x = random(&[2, 5, heads, head_dim], 1);
        let (cos, sin) = angles(2, 5, half);
        let y = forward(&x, &cos, &sin).unwrap();
        assert_close(&y, &reference(&x, &cos, &sin), 1e-15);
        let (cos, sin) = (rounded(&cos, DType::F32), rounded(&sin, DType::F32));
        let single = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap();
        for (dtype, tolerance) in PRECISIONS {
            let x = rounded(&x, dtype);
            let y = forward(&x.to_dtype(dtype).unwrap(), &single(&cos), &single(&sin)).unwrap();
            assert_eq!(y.dtype(), dtype);
            assert_close(&y, &reference(&x, &cos, &sin), tolerance);
        }
    }
}

#[test]
fn backward_matches_finite_differences() {
    let (x, dy) = (random(&[2, 5, 3, 7], 1), random(&[2, 5, 3, 7], 2));
    let (cos, sin) = angles(2, 5, 3);
    let dx = backward(&dy, &cos, &sin).unwrap();
    assert_gradient(&x, &dx, |x| inner_product(&forward(x, &cos, &sin)?, &dy));
}

#[test]
fn candles_autograd_gets_the_same_gradient() {
    let x = Var::from_tensor(&random(&[2, 5, 3, 7], 1)).unwrap();
    let dy = random(&[2, 5, 3, 7], 2);
    let (cos, sin) = angles(2, 5, 3);
    let y = differentiable(&x, &cos, &sin).unwrap();
    let gradients = (y * &dy).unwrap().sum_all().unwrap().backward().unwrap();
    assert_identical(gradients.get(&x).unwrap(), &backward(&dy, &cos, &sin).unwrap());
    assert!(!forward(&x, &cos, &sin).unwrap().track_op());
}

#[test]
fn threads_and_strides_do_not_change_bits() {
    let x = random(&[2, 100, 4, 32], 1).to_dtype(DType::F32).unwrap();
    let (cos, sin) = angles(2, 100, 16);
    let (cos, sin) = (cos.to_dtype(DType::F32).unwrap(), sin.to_dtype(DType::F32).unwrap());
    assert_independent_of_threads(|| vec![forward(&x, &cos, &sin).unwrap()]);
    let other = forward(&strided(&x), &strided(&cos), &strided(&sin)).unwrap();
    assert_identical(&forward(&x, &cos, &sin).unwrap(), &other);
}

#[test]
fn empty_and_wrong_shapes_are_handled() {
    let (cos, sin) = angles(2, 0, 3);
    assert_eq!(forward(&random(&[2, 0, 3, 7], 1), &cos, &sin).unwrap().dims(), &[2, 0, 3, 7]);
    let (cos, sin) = angles(2, 5, 4);
    let wrong = message(forward(&random(&[2, 5, 3, 7], 1), &cos, &sin));
    assert!(wrong.contains("cos has 4 angles, expected at most 3"), "{wrong}");
    let wrong = message(forward(&random(&[2, 6, 3, 8], 1), &cos, &sin));
    assert!(wrong.contains("cos has shape [2, 5, 4], expected [2, 6, 4]"), "{wrong}");
    assert!(message(forward(&random(&[2, 5, 8], 1), &cos, &sin)).contains("expected 4 dimensions"));
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_matches_the_cpu() {
    let device = crate::testing::cuda();
    let back = |tensor: &Tensor| tensor.to_device(&Device::Cpu).unwrap();
    // Heads that are rotated by packs, wholly and in part, and others.
    let sizes =
        [(1, 2, 1), (3, 7, 3), (3, 7, 2), (2, 64, 32), (5, 64, 16), (32, 128, 64), (2, 5, 1)];
    for (heads, head_dim, half) in sizes {
        let (cos, sin) = angles(2, 9, half);
        let (cos, sin) = (rounded(&cos, DType::F32), rounded(&sin, DType::F32));
        let single =
            |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().to_device(&device).unwrap();
        let (low_cos, low_sin) = (single(&cos), single(&sin));
        for (dtype, tolerance) in PRECISIONS {
            let x = rounded(&random(&[2, 9, heads, head_dim], 1), dtype);
            let low = x.to_dtype(dtype).unwrap().to_device(&device).unwrap();
            let y = forward(&low, &low_cos, &low_sin).unwrap();
            assert_eq!(y.dtype(), dtype);
            assert_close(&back(&y), &reference(&x, &cos, &sin), tolerance);
            let dx = backward(&low, &low_cos, &low_sin).unwrap();
            assert_close(&back(&dx), &backward(&x, &cos, &sin).unwrap(), tolerance);
            // Heads inside the rows of a larger projection, and other strides.
            let wide = Tensor::cat(&[&low, &low], 2).unwrap().narrow(2, heads, heads).unwrap();
            let views = [wide, strided(&low), low.transpose(1, 2).unwrap().contiguous().unwrap()];
            let [wide, strided_x, transposed] = &views;
            for view in [wide, strided_x, &transposed.transpose(1, 2).unwrap()] {
                let other = forward(view, &strided(&low_cos), &low_sin).unwrap();
                assert_identical(&back(&other), &back(&y));
            }
        }
    }
    let x = random(&[2, 5, 3, 8], 1).to_dtype(DType::F32).unwrap();
    let x = Var::from_tensor(&x.to_device(&device).unwrap()).unwrap();
    let (cos, sin) = angles(2, 5, 3);
    let single = |tensor: &Tensor| tensor.to_dtype(DType::F32).unwrap().to_device(&device).unwrap();
    let (cos, sin) = (single(&cos), single(&sin));
    let y = differentiable(&x, &cos, &sin).unwrap();
    let dy = y.ones_like().unwrap();
    let gradients = y.sum_all().unwrap().backward().unwrap();
    let expected = backward(&dy, &cos, &sin).unwrap();
    assert_identical(&back(gradients.get(&x).unwrap()), &back(&expected));
}

fn assert_queries_and_keys_turn_as_each_alone(device: &Device) {
    let (cos, sin) = angles(2, 5, 8);
    let [cos, sin] =
        [cos, sin].map(|angles| angles.to_dtype(DType::F32).unwrap().to_device(device).unwrap());
    for dtype in [DType::F32, DType::F16, DType::BF16] {
        let given = |heads, seed| {
            strided(&random(&[2, 5, heads, 21], seed).to_dtype(dtype).unwrap())
                .to_device(device)
                .unwrap()
        };
        let wide = |heads, seed| given(heads, seed).narrow(3, 0, 16).unwrap();
        for (queries, keys) in [(given(6, 1), given(2, 2)), (wide(1, 1), wide(3, 2))] {
            let (q, k) = forward_both(&queries, &keys, &cos, &sin).unwrap();
            assert_identical(&q, &forward(&queries, &cos, &sin).unwrap());
            assert_identical(&k, &forward(&keys, &cos, &sin).unwrap());
        }
        // Heads of two sizes.
        let (q, k) = forward_both(&wide(2, 1), &given(3, 2), &cos, &sin).unwrap();
        assert_identical(&q, &forward(&wide(2, 1), &cos, &sin).unwrap());
        assert_identical(&k, &forward(&given(3, 2), &cos, &sin).unwrap());
        let (q, k) = forward_both(&wide(0, 1), &wide(2, 2), &cos, &sin).unwrap();
        assert_eq!(q.dims(), [2, 5, 0, 16]);
        assert_identical(&k, &forward(&wide(2, 2), &cos, &sin).unwrap());
    }
}

#[test]
fn queries_and_keys_turn_as_each_alone() {
    assert_queries_and_keys_turn_as_each_alone(&Device::Cpu);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_queries_and_keys_turn_as_each_alone() {
    assert_queries_and_keys_turn_as_each_alone(&cuda());
}
