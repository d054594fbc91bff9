//! What the host passes to the kernels, tried in the emulator: the public operations, computed by Metal's
//! side of them on tensors of the CPU, against the CPU's own.

mod linear;
mod product;

use super::encode::{Emulator, emulate};
use super::source::source;
use crate::devices::MetalMatmul;
use crate::glu::{self, Activation};
use crate::layer_norm::{self, Needs};
use crate::testing::*;
use crate::{arithmetic, copy, embedding, rms_norm, rope, softmax};
use candle_core::{DType, Device, Tensor};
use metal_emulator::{Mode, Source};
use std::sync::{Arc, OnceLock};

/// The kernels as a mode compiles them; `None` where there is no emulator.
fn emulator(mode: Mode) -> Option<Emulator> {
    static EMULATORS: [OnceLock<Option<Emulator>>; 3] = [const { OnceLock::new() }; 3];
    let open = || {
        metal_emulator::available().then(|| {
            let name = format!("metal-candle-{}-{mode:?}.metal", std::process::id());
            let path = std::env::temp_dir().join(name);
            std::fs::write(&path, source()).unwrap();
            let library = Arc::new(Source::file(&path).compile(mode).unwrap());
            std::fs::remove_file(path).unwrap();
            Emulator { library, seed: 2, most_threads: 1024, matmul: MetalMatmul::Fused }
        })
    };
    EMULATORS[mode as usize].get_or_init(open).clone()
}

/// What a test is run with: a mode, an order of the threads, and how many a threadgroup may have.
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

/// Calls `task` with the kernels once for each run, unless there is no emulator.
fn in_every(runs: &[Run], task: impl Fn()) {
    for &(mode, seed, most_threads) in runs {
        let Some(emulator) = emulator(mode) else { return };
        emulate(Emulator { seed, most_threads, ..emulator }, &task);
    }
}

/// Asserts that `task` gives the same by the kernels as by the CPU, within the precision of each dtype it
/// is called with.
fn assert_same_in(runs: &[Run], task: impl Fn(DType) -> Vec<Tensor>) {
    for (dtype, tolerance) in PRECISIONS {
        let expected = task(dtype);
        in_every(runs, || {
            let found = task(dtype);
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!(found.dtype(), expected.dtype());
                assert_close(found, expected, tolerance);
            }
        });
    }
}

fn assert_same(task: impl Fn(DType) -> Vec<Tensor>) {
    assert_same_in(QUICK, task);
}

/// Not contiguous.
fn input(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    strided(&random(shape, seed).to_dtype(dtype).unwrap())
}

#[test]
fn metal_host_of_norms_and_softmax_agrees_with_the_kernels() {
    for shape in [[2, 3, 37], [1, 70, 45]] {
        assert_same(|dtype| {
            let [x, dy, other] = [1, 2, 3].map(|seed| input(&shape, seed, dtype));
            let size = shape[2];
            let weight = random(&[size], 4).to_dtype(DType::BF16).unwrap();
            let bias = random(&[size], 5).to_dtype(DType::F16).unwrap();
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
fn metal_host_of_gates_rope_and_tokens_agrees_with_the_kernels() {
    assert_same(|dtype| {
        let mut results = Vec::new();
        let wide = input(&[3, 4, 90], 1, dtype).contiguous().unwrap();
        let (gate, up) = (wide.narrow(2, 0, 41).unwrap(), wide.narrow(2, 45, 41).unwrap());
        let d_out = input(&[3, 4, 41], 2, dtype);
        for activation in [Activation::Silu, Activation::GeluTanh, Activation::Gelu] {
            results.push(glu::forward(&gate, &up, activation).unwrap());
            for (dgate, dup) in [(true, true), (true, false), (false, true)] {
                let (dgate, dup) =
                    glu::backward(&gate, &up, activation, &d_out, dgate, dup).unwrap();
                results.extend(dgate.into_iter().chain(dup));
            }
        }
        let x = random(&[2, 3, 5, 12], 3).to_dtype(dtype).unwrap().transpose(1, 2).unwrap();
        let [cos, sin] = [4, 5].map(|seed| random(&[2, 5, 4], seed).to_dtype(DType::F32).unwrap());
        results.push(rope::forward(&x, &cos, &sin).unwrap());
        results.push(rope::backward(&x, &cos, &sin).unwrap());
        let ids = Tensor::new(&[[3u32, 1, 3, 0, 3], [6, 1, 3, 5, 0]], &Device::Cpu).unwrap();
        let table = input(&[7, 21], 6, dtype);
        results.push(embedding::forward(&table, &ids).unwrap());
        results.push(embedding::backward(&input(&[2, 5, 21], 7, dtype), &ids, 7).unwrap());
        results
    });
}

#[test]
fn metal_host_of_arithmetic_and_copies_agrees_with_the_kernels() {
    assert_same(|dtype| {
        let [x, y] = [1, 2].map(|seed| input(&[3, 5, 70], seed, dtype));
        let factor = Tensor::new(&[0.5f32, 3.0], &Device::Cpu).unwrap().narrow(0, 1, 1).unwrap();
        let mut results = vec![
            arithmetic::add(&x, &y).unwrap(),
            arithmetic::scale(&x, 0.7).unwrap(),
            arithmetic::scale_by(&x, &factor).unwrap(),
        ];
        results.extend([DType::F32, DType::F16, DType::BF16].map(|to| copy::cast(&x, to).unwrap()));
        for dim in 0..3 {
            let mut shape = [3, 5, 70];
            shape[dim] += 4;
            let whole = random(&shape, 3).to_dtype(dtype).unwrap();
            copy::write(&whole, &x, dim, 3).unwrap();
            results.push(whole);
        }
        results
    });
}
