//! What the tests of all operations share: made-up inputs, comparisons, finite differences.

use candle_core::{DType, Device, Result, Tensor};

/// Numbers in `(-1, 1)` that follow from the shape and the seed alone.
pub fn random(shape: &[usize], seed: u64) -> Tensor {
    let count = shape.iter().product();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(1);
    let values: Vec<f64> = (0..count)
        .map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 11) as f64 / (1u64 << 52) as f64 - 1.0
        })
        .collect();
    Tensor::from_vec(values, shape, &Device::Cpu).unwrap()
}

/// The same numbers and shape as a view that is not contiguous: twice as wide, and transposed storage.
pub fn strided(tensor: &Tensor) -> Tensor {
    let last = tensor.rank() - 1;
    let wide = Tensor::cat(&[tensor, tensor], last).unwrap();
    let view = if tensor.rank() >= 2 {
        wide.transpose(0, 1).unwrap().contiguous().unwrap().transpose(0, 1).unwrap()
    } else {
        wide
    };
    let size = tensor.dim(last).unwrap();
    view.narrow(last, size, size).unwrap()
}

pub fn values(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

pub fn max_abs(tensor: &Tensor) -> f64 {
    values(tensor).iter().fold(0.0, |max, value| value.abs().max(max))
}

/// Asserts equal shapes and `|actual - expected| <= tolerance·(1 + max |expected|)`.
#[track_caller]
pub fn assert_close(actual: &Tensor, expected: &Tensor, tolerance: f64) {
    assert_eq!(actual.dims(), expected.dims());
    let limit = tolerance * (1.0 + max_abs(expected));
    for (index, (actual, expected)) in values(actual).iter().zip(values(expected)).enumerate() {
        let error = (actual - expected).abs();
        assert!(error <= limit, "element {index}: {actual} is not {expected}, off by {error:e}");
    }
}

/// Asserts that two tensors hold the same bits.
#[track_caller]
pub fn assert_identical(a: &Tensor, b: &Tensor) {
    assert_eq!(a.dims(), b.dims());
    assert_eq!(a.dtype(), b.dtype());
    let (a, b) = (values(a), values(b));
    assert!(a.iter().zip(&b).all(|(a, b)| a.to_bits() == b.to_bits()), "bits differ");
}

/// Asserts that `gradient` is that of `loss` at `x` (f64), by central differences.
#[track_caller]
pub fn assert_gradient(x: &Tensor, gradient: &Tensor, loss: impl Fn(&Tensor) -> Result<f64>) {
    const STEP: f64 = 1e-5;
    assert_eq!(x.dims(), gradient.dims());
    let numbers = values(x);
    let at = |index: usize, step: f64| {
        let mut moved = numbers.clone();
        moved[index] += step;
        loss(&Tensor::from_vec(moved, x.dims(), &Device::Cpu).unwrap()).unwrap()
    };
    for (index, gradient) in values(gradient).iter().enumerate() {
        let expected = (at(index, STEP) - at(index, -STEP)) / (2.0 * STEP);
        let error = (gradient - expected).abs();
        assert!(
            error <= 2e-8 * (1.0 + expected.abs()),
            "element {index}: gradient {gradient}, differences say {expected}"
        );
    }
}

/// `Σ a·b` over all elements: a loss whose gradient with respect to `a` is `b`.
pub fn inner_product(a: &Tensor, b: &Tensor) -> Result<f64> {
    assert_eq!(a.dims(), b.dims());
    Ok(values(a).iter().zip(values(b)).map(|(a, b)| a * b).sum())
}

/// Runs `task` with 1, 2 and 5 threads and asserts that the tensors hold the same bits.
#[track_caller]
pub fn assert_independent_of_threads(task: impl Fn() -> Vec<Tensor> + Sync) {
    let run = |threads| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(&task)
    };
    let single = run(1);
    for threads in [2, 5] {
        for (a, b) in single.iter().zip(run(threads)) {
            assert_identical(a, &b);
        }
    }
}

/// The half-precision and single-precision dtypes with the error they are allowed.
pub const PRECISIONS: [(DType, f64); 3] =
    [(DType::F32, 2e-6), (DType::F16, 2e-3), (DType::BF16, 1.6e-2)];

/// Rounds to `dtype`, so that a reference starts from the same numbers.
pub fn rounded(tensor: &Tensor, dtype: DType) -> Tensor {
    tensor.to_dtype(dtype).unwrap().to_dtype(DType::F64).unwrap()
}

/// The text of an error that must be one.
#[track_caller]
pub fn message<T>(result: Result<T>) -> String {
    match result {
        Ok(_) => panic!("expected an error"),
        Err(error) => error.to_string(),
    }
}

/// The first CUDA device, for tests that compare it with the CPU. They are ignored unless asked for, and fail
/// where there is none.
#[cfg(feature = "cuda")]
#[track_caller]
pub fn cuda() -> Device {
    use std::sync::OnceLock;
    static DEVICE: OnceLock<Device> = OnceLock::new();
    assert!(crate::devices::cuda_count() > 0, "this test needs an NVIDIA GPU, and none was found");
    DEVICE.get_or_init(|| crate::devices::cuda(0).unwrap()).clone()
}

/// The first Metal device, for tests that compare it with the CPU. They are ignored unless asked for, and fail
/// where there is none.
#[cfg(feature = "metal")]
#[track_caller]
pub fn metal() -> Device {
    use std::sync::OnceLock;
    static DEVICE: OnceLock<Device> = OnceLock::new();
    assert!(crate::devices::metal_count() > 0, "this test needs a Mac's GPU, and none was found");
    DEVICE.get_or_init(|| crate::devices::metal(0).unwrap()).clone()
}

/// A tensor of the CPU on another device, which has no memory of no bytes: nothing is a part of something.
pub fn there(tensor: &Tensor, device: &Device) -> Tensor {
    if tensor.elem_count() > 0 {
        return tensor.to_device(device).unwrap();
    }
    let dims: Vec<usize> = tensor.dims().iter().map(|size| (*size).max(1)).collect();
    let zeros = Tensor::zeros(dims, tensor.dtype(), &Device::Cpu).unwrap();
    let mut part = zeros.to_device(device).unwrap();
    for (dimension, size) in tensor.dims().iter().enumerate() {
        part = part.narrow(dimension, 0, *size).unwrap();
    }
    part
}

/// A tensor of another device on the CPU.
pub fn here(tensor: &Tensor) -> Tensor {
    if tensor.elem_count() == 0 {
        return Tensor::zeros(tensor.shape(), tensor.dtype(), &Device::Cpu).unwrap();
    }
    tensor.to_device(&Device::Cpu).unwrap()
}

/// The least time that a round of work on the device takes, of so many, in seconds.
#[cfg(feature = "cuda")]
pub fn least_seconds(device: &Device, rounds: usize, work: impl Fn()) -> f64 {
    let round = |_| {
        device.synchronize().unwrap();
        let start = std::time::Instant::now();
        work();
        device.synchronize().unwrap();
        start.elapsed().as_secs_f64()
    };
    (0..rounds).map(round).fold(f64::INFINITY, f64::min)
}

/// A tensor of this shape, which has no element: a view, as Candle has no CUDA storage of nothing.
#[cfg(feature = "cuda")]
pub fn empty(shape: [usize; 2], dtype: DType, device: &Device) -> Tensor {
    let wide = Tensor::zeros((shape[0].max(1), shape[1].max(1)), dtype, device).unwrap();
    wide.narrow(0, 0, shape[0]).unwrap().narrow(1, 0, shape[1]).unwrap()
}
