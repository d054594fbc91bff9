//! What the host passes to the kernels: the public operations, computed by Metal's side of them, against the
//! CPU's own. With the feature `metal` by a Mac's GPU, without it by the emulator, on tensors of the CPU.

#[cfg(not(feature = "metal"))]
mod emulator;
mod linear;
// Parts of the products, which only the emulator can be asked for one by one.
#[cfg(not(feature = "metal"))]
mod product;
mod sampling;
mod step;

use crate::glu::{self, Activation};
use crate::layer_norm::{self, Needs};
use crate::testing::*;
use crate::{arithmetic, attention, copy, dora, embedding, rms_norm, rope, softmax};
use candle_core::{DType, Device, Tensor};
use metal_emulator::Mode;

/// What a test is run with in the emulator: a mode, an order of the threads, and how many a threadgroup may
/// have.
type Run = (Mode, u64, usize);

/// For tests of what the host passes, whose kernels have tests of their own.
const QUICK: &[Run] = &[(Mode::Asan, 2, 33), (Mode::Asan, 2, 1024)];
/// For tests of kernels.
const THOROUGH: &[Run] = &[
    (Mode::Plain, 0, 1024),
    (Mode::Plain, 1, 33),
    (Mode::Asan, 2, 1024),
    (Mode::Asan, 3, 33),
    (Mode::Race, 0, 1024),
    (Mode::Race, 1, 1024),
    (Mode::Race, 3, 33),
];

/// Asserts that `task` gives the same by the kernels as by the CPU, within the precision of each dtype. It
/// is called with the dtype, and with the device that its inputs have to be on.
fn assert_same(task: impl Fn(DType, &Device) -> Vec<Tensor>) {
    assert_same_in(QUICK, task);
}

/// As [`assert_same`], in these runs of the emulator.
fn assert_same_in(runs: &[Run], task: impl Fn(DType, &Device) -> Vec<Tensor>) {
    for (dtype, tolerance) in PRECISIONS {
        let found = by_kernels(runs, |device| task(dtype, device));
        let expected = task(dtype, &Device::Cpu);
        for found in found {
            assert_all_close(&found, &expected, tolerance);
        }
    }
}

#[track_caller]
fn assert_all_close(found: &[Tensor], expected: &[Tensor], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.dtype(), expected.dtype());
        assert_close(found, expected, tolerance);
    }
}

/// What `task` gives on the GPU, which has to be the same bits each time.
#[cfg(feature = "metal")]
fn by_kernels(_: &[Run], task: impl Fn(&Device) -> Vec<Tensor>) -> Vec<Vec<Tensor>> {
    let device = metal();
    let run = || -> Vec<Tensor> { task(&device).iter().map(here).collect() };
    let (found, again) = (run(), run());
    for (found, again) in found.iter().zip(&again) {
        assert_identical(found, again);
    }
    vec![found]
}

/// What `task` gives in each run.
#[cfg(not(feature = "metal"))]
fn by_kernels(runs: &[Run], task: impl Fn(&Device) -> Vec<Tensor>) -> Vec<Vec<Tensor>> {
    let mut found = Vec::new();
    in_every(runs, || found.push(task(&Device::Cpu)));
    found
}

/// Calls `task` with the kernels once for each run.
#[cfg(not(feature = "metal"))]
fn in_every(runs: &[Run], mut task: impl FnMut()) {
    use super::encode::{Emulator, emulate};
    for &(mode, seed, most_threads) in runs {
        let emulator = Emulator::open(mode);
        emulate(Emulator { seed, most_threads, ..emulator }, &mut task);
    }
}

/// Not contiguous.
fn input(shape: &[usize], seed: u64, dtype: DType, device: &Device) -> Tensor {
    there(&strided(&random(shape, seed).to_dtype(dtype).unwrap()), device)
}

/// As [`input`], contiguous.
fn contiguous(shape: &[usize], seed: u64, dtype: DType, device: &Device) -> Tensor {
    there(&random(shape, seed).to_dtype(dtype).unwrap(), device)
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_norms_and_softmax_agrees_with_the_kernels() {
    for shape in [[2, 3, 37], [1, 70, 45]] {
        assert_same(|dtype, device| {
            let [x, dy, other] = [1, 2, 3].map(|seed| input(&shape, seed, dtype, device));
            let size = shape[2];
            let weight = contiguous(&[size], 4, DType::BF16, device);
            let bias = contiguous(&[size], 5, DType::F16, device);
            let y = softmax::forward(&x).unwrap();
            let mut results = vec![softmax::backward(&y, &dy).unwrap(), y];
            results.push(rms_norm::forward(&x, &weight, 0.01, 1.0).unwrap());
            let (sum, y) = rms_norm::forward_residual(&x, &other, &weight, 0.01, 0.0).unwrap();
            let (dx, dweight) =
                rms_norm::backward_residual(&sum, &weight, 0.01, 0.0, &dy, Some(&other), true)
                    .unwrap();
            results.extend([sum, y, dx, dweight.unwrap()]);
            for (need_dx, need_dweight) in [(true, false), (false, true)] {
                let (dx, dweight) =
                    rms_norm::backward(&x, &weight, 0.01, 1.0, &dy, need_dx, need_dweight).unwrap();
                results.extend(dx.into_iter().chain(dweight));
            }
            for bias in [Some(&bias), None] {
                results.push(layer_norm::forward(&x, &weight, bias, 0.01).unwrap());
            }
            for (dx, dweight, dbias) in
                [(true, true, true), (true, false, false), (false, false, true)]
            {
                let needs = Needs { dx, dweight, dbias };
                let found = layer_norm::backward(&x, &weight, 0.01, &dy, needs).unwrap();
                results.extend([found.dx, found.dweight, found.dbias].into_iter().flatten());
            }
            results
        });
    }
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_gates_rope_and_tokens_agrees_with_the_kernels() {
    assert_same(|dtype, device| {
        let mut results = Vec::new();
        let wide = contiguous(&[3, 4, 90], 1, dtype, device);
        let (gate, up) = (wide.narrow(2, 0, 41).unwrap(), wide.narrow(2, 45, 41).unwrap());
        let d_out = input(&[3, 4, 41], 2, dtype, device);
        for activation in
            [Activation::Silu, Activation::GeluTanh, Activation::Gelu, Activation::Clamped]
        {
            results.push(glu::forward(&gate, &up, activation).unwrap());
            for (dgate, dup) in [(true, true), (true, false), (false, true)] {
                let (dgate, dup) =
                    glu::backward(&gate, &up, activation, &d_out, dgate, dup).unwrap();
                results.extend(dgate.into_iter().chain(dup));
            }
        }
        let x = contiguous(&[2, 3, 5, 12], 3, dtype, device).transpose(1, 2).unwrap();
        let [cos, sin] = [4, 5].map(|seed| contiguous(&[2, 5, 4], seed, DType::F32, device));
        results.push(rope::forward(&x, &cos, &sin).unwrap());
        results.push(rope::backward(&x, &cos, &sin).unwrap());
        let ids = Tensor::new(&[[3u32, 1, 3, 0, 3], [6, 1, 3, 5, 0]], device).unwrap();
        let table = input(&[7, 21], 6, dtype, device);
        results.push(embedding::forward(&table, &ids).unwrap());
        results.push(embedding::backward(&input(&[2, 5, 21], 7, dtype, device), &ids, 7).unwrap());
        results
    });
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_dora_agrees_with_the_kernels() {
    for (shape, rank) in [([2, 3, 37], 3), ([1, 70, 45], 12)] {
        assert_same(|dtype, device| {
            let size = shape[2];
            let (y, dz) = (input(&shape, 1, dtype, device), input(&shape, 2, dtype, device));
            let factor = contiguous(&[size], 3, DType::F32, device);
            let bias = contiguous(&[size], 4, DType::BF16, device);
            let mut results = vec![
                dora::scale_columns(&y, &factor, Some(&bias)).unwrap(),
                dora::scale_columns(&y, &factor, None).unwrap(),
            ];
            for need_dbias in [true, false] {
                let found = dora::scale_columns_backward(&y, &factor, &dz, need_dbias).unwrap();
                results.extend(
                    [Some(found.dy), Some(found.dfactor), found.dbias].into_iter().flatten(),
                );
            }
            let weight = input(&[size, 29], 5, dtype, device);
            let a = contiguous(&[29, rank], 6, DType::F32, device);
            let b = input(&[rank, size], 7, DType::F32, device);
            let squares = dora::squared_norms(&weight).unwrap();
            results.push(dora::merged_norms(&weight, &squares, &a, &b, 0.7).unwrap());
            results.push(squares);
            results
        });
    }
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_arithmetic_and_copies_agrees_with_the_kernels() {
    assert_same(|dtype, device| {
        let [x, y] = [1, 2].map(|seed| input(&[3, 5, 70], seed, dtype, device));
        let factor = Tensor::new(&[0.5f32, 3.0], device).unwrap().narrow(0, 1, 1).unwrap();
        let factors = contiguous(&[15], 3, DType::F32, device);
        let mut results = vec![
            arithmetic::add(&x, &y).unwrap(),
            arithmetic::scale(&x, 0.7).unwrap(),
            arithmetic::scale_by(&x, &factor).unwrap(),
            arithmetic::softcap(&x, 0.8).unwrap(),
            arithmetic::scale_rows(&x.reshape((15, 70)).unwrap(), &factors).unwrap(),
        ];
        results.extend([DType::F32, DType::F16, DType::BF16].map(|to| copy::cast(&x, to).unwrap()));
        for dim in 0..3 {
            let mut shape = [3, 5, 70];
            shape[dim] += 4;
            let whole = contiguous(&shape, 3, dtype, device);
            copy::write(&whole, &x, dim, 3).unwrap();
            results.extend([whole, copy::join(&[&x, &y], dim).unwrap()]);
        }
        results.push(copy::contiguous(&x).unwrap());
        results
    });
}

#[test]
#[ignore = "needs clang, or a Mac with the feature metal"]
fn metal_host_of_attention_agrees_with_the_kernels() {
    // As few queries, and as tiles; the elements of a head are copied together.
    for queries in [2, 11] {
        assert_same(|dtype, device| {
            let transposed = |heads, tokens, seed| {
                contiguous(&[1, 12, heads, tokens], seed, dtype, device).transpose(1, 3).unwrap()
            };
            let (q, d_o) = (transposed(4, queries, 1), transposed(4, queries, 2));
            let (k, v) = (transposed(2, 13, 3), transposed(2, 13, 4));
            let first_key = Tensor::full(2u32, (queries, 1), device).unwrap();
            let first_key = first_key.t().unwrap();
            let options =
                attention::Options { scale: 0.3, softcap: Some(2.0), window: Some(7), sinks: None };
            let (o, log_sum_exp) =
                attention::forward(&q, &k, &v, Some(&first_key), &options).unwrap();
            let (dq, dk, dv) =
                attention::backward(&q, &k, &v, &o, &log_sum_exp, Some(&first_key), &options, &d_o)
                    .unwrap();
            vec![o, log_sum_exp, dq, dk, dv]
        });
    }
}
