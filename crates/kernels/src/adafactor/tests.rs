use super::*;
use crate::testing::*;
use candle_core::{DType, Device};

const OPTIONS: Options = Options {
    learning_rate: 1e-2,
    epsilon: 1e-30,
    scale_epsilon: 1e-3,
    clip_threshold: 0.7,
    decay_rate: -0.8,
    scale_parameter: false,
    relative_step: false,
    warmup_init: false,
    weight_decay: 0.1,
};

fn own(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    random(shape, seed).to_dtype(dtype).unwrap().copy().unwrap()
}

/// Parameters and both means, which are zero.
fn state(shape: &[usize; 2], dtype: DType) -> [Tensor; 3] {
    let zeros = |n: usize| Tensor::zeros(n, dtype, &Device::Cpu).unwrap();
    [own(shape, 1, dtype), zeros(shape[0]), zeros(shape[1])]
}

/// Algorithms 4 and 5 of the paper, in f64, on parameters and both means.
fn reference([p, r, c]: &mut [Vec<f64>; 3], g: &[f64], step: usize, options: &Options) {
    let columns = c.len();
    let t = step as f64;
    let beta = 1.0 - t.powf(options.decay_rate);
    let mean = |values: &mut dyn Iterator<Item = f64>| {
        let values: Vec<f64> = values.collect();
        values.iter().sum::<f64>() / values.len() as f64
    };
    let square = |g: &f64| g * g + options.epsilon;
    for (r, row) in r.iter_mut().zip(g.chunks(columns)) {
        *r = beta * *r + (1.0 - beta) * mean(&mut row.iter().map(square));
    }
    for (j, c) in c.iter_mut().enumerate() {
        let column = &mut g.iter().skip(j).step_by(columns).map(square);
        *c = beta * *c + (1.0 - beta) * mean(column);
    }
    let all = mean(&mut r.iter().copied());
    let v = |i: usize| r[i / columns] * c[i % columns] / all;
    let mut u: Vec<f64> = g.iter().enumerate().map(|(i, g)| g / v(i).sqrt()).collect();
    let rms = |x: &[f64]| mean(&mut x.iter().map(|x| x * x)).sqrt();
    let clip = (rms(&u) / options.clip_threshold).max(1.0);
    u.iter_mut().for_each(|u| *u /= clip);
    let mut rate = options.learning_rate;
    if options.relative_step {
        rate = (if options.warmup_init { 1e-6 * t } else { 1e-2 }).min(1.0 / t.sqrt());
    }
    if options.scale_parameter {
        rate *= rms(p).max(options.scale_epsilon);
    }
    for (p, u) in p.iter_mut().zip(u) {
        *p -= rate * options.weight_decay * *p + rate * u;
    }
}

const SHAPES: [[usize; 2]; 5] = [[40, 300], [1, 17], [65, 4], [1, 1], [700, 33]];

#[test]
fn steps_are_the_papers() {
    let relative = Options { relative_step: true, scale_parameter: true, ..OPTIONS };
    for options in [
        OPTIONS,
        relative,
        Options { warmup_init: true, clip_threshold: 1e6, weight_decay: 0.0, ..relative },
        Options { scale_parameter: true, scale_epsilon: 5.0, decay_rate: -0.5, ..OPTIONS },
    ] {
        for shape in SHAPES {
            for (dtype, tolerance) in [(DType::F64, 1e-12), (DType::F32, 2e-6)] {
                let found = state(&shape, dtype);
                let mut exact = found.each_ref().map(values);
                for number in 1..=4 {
                    let grads = own(&shape, 10 + number as u64, dtype);
                    let g: Vec<f64> = values(&grads).iter().map(|g| g * 0.5).collect();
                    let [params, rows, columns] = &found;
                    step(params, &grads, rows, columns, number, 0.5, &options).unwrap();
                    assert_eq!(max_abs(&grads), 0.0);
                    reference(&mut exact, &g, number, &options);
                }
                for (found, exact) in found.iter().zip(exact) {
                    let exact = Tensor::from_vec(exact, found.dims(), &Device::Cpu).unwrap();
                    assert_close(found, &exact, tolerance);
                }
            }
        }
    }
}

#[test]
fn long_rows_and_columns_keep_their_precision() {
    for shape in [[1, 1_000_003], [1_000_003, 1], [300_000, 3]] {
        let found = state(&shape, DType::F32);
        let mut exact = found.each_ref().map(values);
        let grads = own(&shape, 11, DType::F32);
        let g = values(&grads);
        let [params, rows, columns] = &found;
        step(params, &grads, rows, columns, 1, 1.0, &OPTIONS).unwrap();
        reference(&mut exact, &g, 1, &OPTIONS);
        for (found, exact) in found.iter().zip(exact) {
            let exact = Tensor::from_vec(exact, found.dims(), &Device::Cpu).unwrap();
            assert_close(found, &exact, 1e-5);
        }
    }
}

#[test]
fn without_a_gradient_nothing_moves() {
    let [params, rows, columns] = state(&[4, 5], DType::F32);
    let grads = Tensor::zeros((4, 5), DType::F32, &Device::Cpu).unwrap();
    let before = values(&params);
    let options = Options { weight_decay: 0.0, ..OPTIONS };
    for number in 1..=3 {
        step(&params, &grads, &rows, &columns, number, 1.0, &options).unwrap();
        assert_eq!(values(&params), before);
    }
}

#[test]
fn threads_do_not_change_bits() {
    let grads = own(&[300, 700], 2, DType::F32);
    assert_independent_of_threads(|| {
        let [params, rows, columns] = state(&[300, 700], DType::F32);
        let grads = grads.copy().unwrap();
        step(&params, &grads, &rows, &columns, 1, 1.0, &OPTIONS).unwrap();
        vec![params, rows, columns]
    });
}

#[test]
fn mistakes_are_errors() {
    let ones = |shape: &[usize]| Tensor::ones(shape, DType::F32, &Device::Cpu).unwrap();
    let of = |params: &[usize], grads: &[usize], rows: usize, columns: usize, number| {
        let (rows, columns) = (ones(&[rows]), ones(&[columns]));
        message(step(&ones(params), &ones(grads), &rows, &columns, number, 1.0, &OPTIONS))
    };
    for (wrong, expected) in [
        (of(&[6], &[6], 1, 6, 1), "expected 2 dimensions (rows, columns)"),
        (of(&[2, 3], &[3, 2], 2, 3, 1), "grads has shape [3, 2], expected [2, 3]"),
        (of(&[2, 3], &[2, 3], 3, 3, 1), "row_means has shape [3], expected [2]"),
        (of(&[2, 3], &[2, 3], 2, 2, 1), "column_means has shape [2], expected [3]"),
        (of(&[2, 3], &[2, 3], 2, 3, 0), "the step is 0"),
    ] {
        assert!(wrong.contains(expected), "{wrong}");
    }
    let shared = ones(&[2]);
    let wrong = message(step(&ones(&[2, 2]), &ones(&[2, 2]), &shared, &shared, 1, 1.0, &OPTIONS));
    assert!(wrong.contains("must be tensors of their own"), "{wrong}");
    let none = || Tensor::zeros((0, 3), DType::F32, &Device::Cpu).unwrap();
    step(&none(), &none(), &ones(&[0]), &ones(&[3]), 1, 1.0, &OPTIONS).unwrap();
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_steps_match_the_cpu() {
    let device = crate::testing::cuda();
    let scaled = Options { relative_step: true, scale_parameter: true, ..OPTIONS };
    for shape in SHAPES.into_iter().chain([[4096, 16], [16, 5000], [1, 1_000_003]]) {
        for options in [OPTIONS, scaled] {
            let exact = state(&shape, DType::F32);
            let [low, again] =
                [(); 2].map(|()| exact.each_ref().map(|t| t.to_device(&device).unwrap()));
            for number in 1..=3 {
                let grads = own(&shape, 10 + number as u64, DType::F32);
                for [params, rows, columns] in [&low, &again] {
                    let grads = grads.to_device(&device).unwrap();
                    step(params, &grads, rows, columns, number, 0.5, &options).unwrap();
                    assert_eq!(max_abs(&here(&grads)), 0.0);
                }
                let [params, rows, columns] = &exact;
                step(params, &grads, rows, columns, number, 0.5, &options).unwrap();
            }
            for ((low, again), exact) in low.iter().zip(&again).zip(&exact) {
                assert_close(&here(low), exact, 1e-5);
                assert_identical(&here(again), &here(low));
            }
        }
    }
}
