use super::*;
use crate::testing::*;
use candle_core::Device;

fn zeros(n: usize, dtype: DType) -> Tensor {
    Tensor::zeros(n, dtype, &Device::Cpu).unwrap()
}

/// A tensor with a storage of its own.
fn own(tensor: &Tensor, dtype: DType) -> Tensor {
    tensor.to_dtype(dtype).unwrap().copy().unwrap()
}

/// An optimiser that changes every element by itself, for [`assert_steps`].
pub(crate) struct Case<'a> {
    /// Buffers that it keeps.
    pub(crate) states: usize,
    /// Of so many in a million elements rounding may decide the whole step, where it isn't the CPU's.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) undecided: usize,
    /// A clipped step of parameters, gradients and those buffers: its number, what it clips to, how many
    /// elements decay.
    #[allow(clippy::type_complexity)]
    pub(crate) step: &'a (dyn Fn(&[Tensor], usize, Clip, usize) -> Result<f64> + Sync),
    /// The step of one element with its clipped gradient, as the paper writes it: the parameter, what is kept
    /// of it, the step's number, and whether it decays.
    #[allow(clippy::type_complexity)]
    pub(crate) reference: &'a (dyn Fn(&mut f64, &mut [f64], f64, i32, bool) + Sync),
}

impl Case<'_> {
    /// Parameters, gradients and what is kept, which is zero.
    fn buffers(&self, n: usize, dtype: DType) -> Vec<Tensor> {
        let mut all = vec![own(&random(&[n], 1), dtype), own(&random(&[n], 2), dtype)];
        all.extend((0..self.states).map(|_| zeros(n, dtype)));
        all
    }

    /// Refills the gradients.
    fn put_gradients(&self, buffers: &[Tensor], number: usize) {
        let grads = random(&[buffers[1].elem_count()], 10 + number as u64);
        let grads = grads.to_dtype(buffers[1].dtype()).unwrap();
        crate::copy::write(&buffers[1], &grads.to_device(buffers[1].device()).unwrap(), 0, 0)
            .unwrap();
    }
}

/// What holds for every optimiser: its steps are those of the reference with clipped gradients, which are zero
/// afterwards; broken gradients change nothing else; only its buffers change; threads don't matter; what can't
/// be a step is an error.
#[track_caller]
pub(crate) fn assert_steps(case: &Case) {
    let (n, decayed) = (40_000, 20_011);
    for (dtype, tolerance) in [(DType::F64, 1e-13), (DType::F32, 2e-6)] {
        for max_norm in [None, Some(0.5), Some(1e6)] {
            let buffers = case.buffers(n, dtype);
            let mut params = values(&buffers[0]);
            let mut states = vec![vec![0.0; case.states]; n];
            for number in 1..=5 {
                case.put_gradients(&buffers, number);
                let grads = values(&buffers[1]);
                let norm = grads.iter().map(|g| g * g).sum::<f64>().sqrt();
                let found = (case.step)(&buffers, number, max_norm.into(), decayed).unwrap();
                assert!((found - norm).abs() < 1e-12 * norm, "{found} is not {norm}");
                assert_eq!(max_abs(&buffers[1]), 0.0);
                let scale = max_norm.map_or(1.0, |limit| (limit / (norm + 1e-6)).min(1.0));
                for (i, g) in grads.iter().enumerate() {
                    let g = g * f64::from(scale as f32);
                    (case.reference)(&mut params[i], &mut states[i], g, number as i32, i < decayed);
                }
            }
            let expected = Tensor::from_vec(params, n, &Device::Cpu).unwrap();
            assert_close(&buffers[0], &expected, tolerance);
            for (index, found) in buffers[2..].iter().enumerate() {
                let expected: Vec<f64> = states.iter().map(|state| state[index]).collect();
                let expected = Tensor::from_vec(expected, n, &Device::Cpu).unwrap();
                assert_close(found, &expected, tolerance);
            }
        }
    }
    broken_gradients_change_nothing(case, &Device::Cpu);
    views_change_and_nothing_else(case);
    assert_independent_of_threads(|| {
        let buffers = case.buffers(100_000, DType::F32);
        let norm = (case.step)(&buffers, 1, Some(1.0).into(), 33_333).unwrap();
        buffers.into_iter().chain([Tensor::new(norm, &Device::Cpu).unwrap()]).collect()
    });
    mistakes_are_errors(case);
    (case.step)(&case.buffers(0, DType::F32), 1, Some(1.0).into(), 0).unwrap();
}

/// Steps of parts, each clipped by the norm of all gradients, are a step of the whole, wherever `place` puts what is
/// kept.
#[track_caller]
fn parts_are_the_whole(case: &Case, place: impl Fn(&Tensor, bool) -> Tensor) {
    let (n, decayed, boundary) = (100_003, 33_333, 40_064);
    let on_device = |buffers: Vec<Tensor>| -> Vec<Tensor> {
        buffers.iter().map(|buffer| place(buffer, false)).collect()
    };
    let whole = on_device(case.buffers(n, DType::F32));
    let parts: Vec<Tensor> = case
        .buffers(n, DType::F32)
        .iter()
        .enumerate()
        .map(|(index, buffer)| place(buffer, index >= 2))
        .collect();
    for number in 1..=3 {
        case.put_gradients(&whole, number);
        case.put_gradients(&parts, number);
        let norm = (case.step)(&whole, number, Some(0.5).into(), decayed).unwrap();
        let all = parts[1].copy().unwrap();
        for range in [0..boundary, boundary..n] {
            let part: Vec<Tensor> = parts
                .iter()
                .map(|buffer| buffer.narrow(0, range.start, range.len()).unwrap())
                .collect();
            let clip = Clip { max_norm: Some(0.5), norm_of: Some(&all) };
            let decayed = decayed.clamp(range.start, range.end) - range.start;
            assert_eq!((case.step)(&part, number, clip, decayed).unwrap(), norm);
        }
        for (whole, part) in whole.iter().zip(&parts) {
            assert_identical(&here(whole), &here(part));
        }
    }
}

/// [`parts_are_the_whole`] on the CPU, and what isn't a norm's is an error.
#[track_caller]
pub(crate) fn assert_parts(case: &Case) {
    parts_are_the_whole(case, |buffer, _| buffer.clone());
    let buffers = case.buffers(4, DType::F32);
    for (norm_of, expected) in [
        (Tensor::ones(4, DType::F64, &Device::Cpu), "norm_of is F64, expected F32"),
        (Tensor::ones((4, 2), DType::F32, &Device::Cpu).unwrap().narrow(1, 0, 1), "contiguous"),
    ] {
        let clip = Clip { max_norm: None, norm_of: Some(&norm_of.unwrap()) };
        let wrong = message((case.step)(&buffers, 1, clip, 0));
        assert!(wrong.contains(expected), "{wrong}");
    }
}

/// The same on a GPU, with what is kept on it and in memory of the host.
#[cfg(feature = "cuda")]
#[track_caller]
pub(crate) fn assert_cuda_parts(case: &Case) {
    let device = &cuda();
    parts_are_the_whole(case, |buffer, _| put(buffer, 0, device));
    let pinned = std::cell::RefCell::new(Vec::new());
    parts_are_the_whole(case, |buffer, kept| match kept {
        false => put(buffer, 0, device),
        true => {
            let like = [(buffer.dims().to_vec(), buffer.dtype())];
            let buffers = crate::host::HostBuffers::new(&like, device).unwrap();
            pinned.borrow_mut().push(buffers);
            pinned.borrow().last().unwrap().tensors()[0].clone()
        }
    });
    drop(pinned);
    if case.states > 0 {
        let mut loose = case.buffers(4, DType::F32);
        for buffer in &mut loose[..2] {
            *buffer = put(buffer, 0, device);
        }
        let wrong = message((case.step)(&loose, 1, None.into(), 0));
        assert!(wrong.contains("isn't pinned"), "{wrong}");
    }
}

fn broken_gradients_change_nothing(case: &Case, device: &Device) {
    for bad in [f32::NAN, f32::INFINITY] {
        let ones = || Tensor::ones(3, DType::F32, device).unwrap();
        let mut buffers: Vec<Tensor> = (0..2 + case.states).map(|_| ones()).collect();
        buffers[1] = Tensor::new(&[1.0, bad, 2.0], device).unwrap();
        assert!(!(case.step)(&buffers, 1, Some(1.0).into(), 3).unwrap().is_finite());
        for (index, buffer) in buffers.iter().enumerate() {
            let expected = if index == 1 { 0.0 } else { 1.0 };
            assert_eq!(values(&here(buffer)), [expected; 3], "buffer {index}");
        }
    }
}

fn views_change_and_nothing_else(case: &Case) {
    let whole: Vec<Tensor> =
        (0..2 + case.states).map(|_| Tensor::ones(10, DType::F32, &Device::Cpu).unwrap()).collect();
    let views: Vec<Tensor> = whole.iter().map(|buffer| buffer.narrow(0, 3, 4).unwrap()).collect();
    (case.step)(&views, 2, Some(1.0).into(), 0).unwrap();
    for buffer in &whole {
        let changed: Vec<bool> = values(buffer).iter().map(|value| *value != 1.0).collect();
        assert_eq!(changed, [0, 0, 0, 1, 1, 1, 1, 0, 0, 0].map(|bit| bit == 1));
    }
}

fn mistakes_are_errors(case: &Case) {
    let ones = |n| Tensor::ones(n, DType::F32, &Device::Cpu).unwrap();
    let all = || -> Vec<Tensor> { (0..2 + case.states).map(|_| ones(4)).collect() };
    for index in 1..2 + case.states {
        let mut short = all();
        short[index] = ones(5);
        let wrong = message((case.step)(&short, 1, None.into(), 0));
        assert!(wrong.contains("has shape [5], expected [4]"), "{wrong}");
        let spread = Tensor::ones((4, 2), DType::F32, &Device::Cpu).unwrap();
        let mut strided = all();
        strided[index] = spread.narrow(1, 0, 1).unwrap().squeeze(1).unwrap();
        let wrong = message((case.step)(&strided, 1, None.into(), 0));
        assert!(wrong.contains("is not contiguous"), "{wrong}");
        // Both would be locked for ever.
        let buffer = ones(8);
        let mut shared = all();
        shared[index] = buffer.narrow(0, 0, 4).unwrap();
        shared[index - 1] = buffer.narrow(0, 4, 4).unwrap();
        let wrong = message((case.step)(&shared, 1, None.into(), 0));
        assert!(wrong.contains("must be tensors of their own"), "{wrong}");
    }
    let half: Vec<Tensor> =
        all().iter().map(|buffer| buffer.to_dtype(DType::BF16).unwrap()).collect();
    assert!(message((case.step)(&half, 1, None.into(), 0)).contains("params are BF16"));
    assert!(message((case.step)(&all(), 1, None.into(), 5)).contains("at most 4"));
}

/// Buffers of their own on the device, from element `start` on, so that packs fit or don't.
#[cfg(feature = "cuda")]
fn put(tensor: &Tensor, start: usize, device: &Device) -> Tensor {
    let n = tensor.elem_count();
    let padded = tensor.pad_with_zeros(0, start, 1).unwrap().to_device(device).unwrap();
    padded.narrow(0, start, n).unwrap()
}

/// What holds for every optimiser on a GPU: its steps are those of the CPU, the same bits each time, and broken
/// gradients change nothing else.
#[cfg(feature = "cuda")]
#[track_caller]
pub(crate) fn assert_cuda_steps(case: &Case) {
    let device = &cuda();
    broken_gradients_change_nothing(case, device);
    for (n, start) in [(1, 0), (7, 4), (40_001, 0), (40_001, 3), (3_000_003, 0)] {
        for max_norm in [None, Some(0.5)] {
            let exact = case.buffers(n, DType::F32);
            let low = |buffers: &[Tensor]| -> Vec<Tensor> {
                buffers.iter().map(|buffer| put(buffer, start, device)).collect()
            };
            let (first, second) = (low(&exact), low(&exact));
            for number in 1..=3 {
                let run = |buffers: &[Tensor]| {
                    case.put_gradients(buffers, number);
                    (case.step)(buffers, number, max_norm.into(), n / 3).unwrap()
                };
                let (norm, found) = (run(&exact), run(&first));
                assert!((found - norm).abs() <= 1e-6 * norm, "{found} is not {norm}");
                assert_eq!(run(&second), found);
            }
            for ((first, second), exact) in first.iter().zip(&second).zip(&exact) {
                let found = here(first);
                let limit = 1e-6 * (1.0 + max_abs(exact));
                let pairs = values(&found).into_iter().zip(values(exact));
                let off = pairs.filter(|(found, exact)| (found - exact).abs() > limit).count();
                assert!(off * 1_000_000 <= case.undecided * n, "{off} of {n} are off");
                assert_identical(&here(second), &found);
            }
        }
    }
}

#[test]
fn norm_is_euclidean_and_shows_what_is_not_finite() {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let grads = random(&[300, 200], 1).to_dtype(dtype).unwrap();
        let expected = values(&grads).iter().map(|g| g * g).sum::<f64>().sqrt();
        assert!((norm(&grads).unwrap() - expected).abs() < 1e-12 * expected);
        assert!((norm(&strided(&grads)).unwrap() - expected).abs() < 1e-12 * expected);
    }
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let grads = Tensor::new(&[1.0, bad, 2.0], &Device::Cpu).unwrap();
        assert!(!norm(&grads).unwrap().is_finite());
    }
    // The square of this number has no f32.
    assert_eq!(norm(&Tensor::new(&[3e30f32, 4e30], &Device::Cpu).unwrap()).unwrap() as f32, 5e30);
    assert_eq!(norm(&zeros(0, DType::F32)).unwrap(), 0.0);
}

#[test]
fn accumulate_adds_into_a_view() {
    for dtype in [DType::F64, DType::F32, DType::BF16] {
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let buffer = zeros(50, wide);
        let dst = buffer.narrow(0, 7, 35).unwrap().reshape((5, 7)).unwrap();
        let src = random(&[5, 7], 1).to_dtype(dtype).unwrap();
        accumulate(&dst, &src, 2.0).unwrap();
        accumulate(&dst, &strided(&src), 0.5).unwrap();
        let expected = (src.to_dtype(wide).unwrap() * 2.5).unwrap();
        assert_close(&buffer.narrow(0, 7, 35).unwrap().reshape((5, 7)).unwrap(), &expected, 1e-6);
        assert_eq!(max_abs(&buffer.narrow(0, 0, 7).unwrap()), 0.0);
        assert_eq!(max_abs(&buffer.narrow(0, 42, 8).unwrap()), 0.0);
    }
}

/// More pairs of each dtype than a launch takes, some of which begin anywhere, and two of which overlap: the views of a
/// buffer and what is added to them.
fn additions(buffer: &Tensor) -> Vec<(Tensor, Tensor)> {
    let places = (0..120).map(|i| match i {
        20 => (20, 150, DType::BF16),
        21 => (24, 150, DType::BF16),
        i => {
            let start = i * 100 + usize::from(i % 40 > 36);
            (start, [1, 7, 64, 99][i % 4], [DType::BF16, DType::F16, DType::F32][i / 40])
        }
    });
    let pair = |(i, (start, count, dtype))| {
        let src = random(&[count, 1], i as u64).to_dtype(dtype).unwrap();
        let dst = buffer.narrow(0, start, count).unwrap().reshape((count, 1)).unwrap();
        (dst, src.to_device(buffer.device()).unwrap())
    };
    places.enumerate().map(pair).collect()
}

/// [`accumulate_all`] on this device gives what the CPU gives for one after the other.
fn assert_adds_all(device: &Device) {
    let [expected, found] =
        [&Device::Cpu, device].map(|device| Tensor::ones(12_100, DType::F32, device).unwrap());
    additions(&expected).iter().for_each(|(dst, src)| accumulate(dst, src, 0.5).unwrap());
    let pairs = additions(&found);
    let pairs: Vec<_> = pairs.iter().map(|(dst, src)| (dst, src)).collect();
    accumulate_all(&pairs, 0.5).unwrap();
    assert_eq!(values(&found.to_device(&Device::Cpu).unwrap()), values(&expected));
}

#[test]
fn many_are_accumulated_as_one_after_the_other() {
    assert_adds_all(&Device::Cpu);
    accumulate_all(&[], 1.0).unwrap();
}

#[test]
fn accumulating_what_does_not_fit_is_an_error() {
    let buffer = zeros(12, DType::F32);
    let part = |index: usize| buffer.narrow(0, 3 * index, 3).unwrap();
    assert!(message(accumulate(&part(0), &part(1), 1.0)).contains("tensors of their own"));
    let (three, four) = (zeros(3, DType::F32), zeros(4, DType::F32));
    assert!(message(accumulate(&four, &three, 1.0)).contains("src has shape [3]"));
    let half = four.to_dtype(DType::BF16).unwrap();
    assert!(message(accumulate(&half, &zeros(4, DType::F32), 1.0)).contains("dst is BF16"));
    accumulate(&zeros(0, DType::F32), &zeros(0, DType::F32), 1.0).unwrap();
}

#[test]
fn threads_do_not_change_sums() {
    let grads = own(&random(&[100_000], 1), DType::F32);
    assert_independent_of_threads(|| {
        let sum = own(&random(&[100_000], 2), DType::F32);
        accumulate(&sum, &grads, 0.3).unwrap();
        vec![sum, Tensor::new(norm(&grads).unwrap(), &Device::Cpu).unwrap()]
    });
}

#[test]
fn fill_zero_clears_a_view_only() {
    let buffer = Tensor::ones(10, DType::F32, &Device::Cpu).unwrap();
    fill_zero(&buffer.narrow(0, 2, 3).unwrap()).unwrap();
    assert_eq!(values(&buffer), [1., 1., 0., 0., 0., 1., 1., 1., 1., 1.]);
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    fn back(tensor: &Tensor) -> Tensor {
        tensor.to_device(&Device::Cpu).unwrap()
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_norms_are_added_up_in_f64() {
        let device = crate::testing::cuda();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for shape in [[1, 1], [300, 203], [1000, 5000]] {
                let grads = random(&shape, 1).to_dtype(dtype).unwrap();
                let expected = norm(&grads).unwrap();
                let low = grads.to_device(&device).unwrap();
                for low in [&low, &strided(&low)] {
                    let found = norm(low).unwrap();
                    assert!((found - expected).abs() < 1e-12 * expected, "{found}: {expected}");
                }
            }
        }
        let large = Tensor::new(&[3e30f32, 4e30], &device).unwrap();
        assert_eq!(norm(&large).unwrap() as f32, 5e30);
        assert_eq!(norm(&large.narrow(0, 0, 0).unwrap()).unwrap(), 0.0);
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_adds_many_as_one_after_the_other() {
        assert_adds_all(&crate::testing::cuda());
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_adds_into_views_and_clears_them() {
        let device = crate::testing::cuda();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            for (start, rows, columns) in [(7, 5, 7), (8, 40, 1000), (1, 3, 1024)] {
                let n = rows * columns;
                let buffer = Tensor::zeros(start + n + 8, DType::F32, &device).unwrap();
                let dst = buffer.narrow(0, start, n).unwrap().reshape((rows, columns)).unwrap();
                let src = random(&[rows, columns], 1).to_dtype(dtype).unwrap();
                let low = src.to_device(&device).unwrap();
                accumulate(&dst, &low, 2.0).unwrap();
                accumulate(&dst, &strided(&low), 0.5).unwrap();
                let expected = (src.to_dtype(DType::F32).unwrap() * 2.5).unwrap();
                assert_close(&back(&dst), &expected, 1e-6);
                let before = buffer.narrow(0, 0, start).unwrap();
                let after = buffer.narrow(0, start + n, 8).unwrap();
                assert_eq!(max_abs(&back(&before)), 0.0);
                assert_eq!(max_abs(&back(&after)), 0.0);
                fill_zero(&dst.narrow(0, 0, 1).unwrap()).unwrap();
                assert_eq!(max_abs(&back(&dst.narrow(0, 0, 1).unwrap())), 0.0);
                let (rest, expected) =
                    (dst.narrow(0, 1, rows - 1).unwrap(), expected.narrow(0, 1, rows - 1).unwrap());
                assert_close(&back(&rest), &expected, 1e-6);
            }
        }
    }
}
