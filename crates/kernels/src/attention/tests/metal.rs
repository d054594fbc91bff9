//! The Metal kernels as the host starts them, in the emulator: against the CPU in f64, compiled for speed,
//! for bounds and for races, with several orders and numbers of threads.

use super::*;
use crate::attention::metal;
use crate::backend::metal::{Emulator, emulate};
use crate::batch_invariance::within;
use metal_emulator::{Mode, SEEDS};

/// What a case gives.
const NAMES: [&str; 6] = ["o", "log_sum_exp", "dq", "dk", "dv", "dsinks"];

impl Case {
    /// `[o, log_sum_exp]`.
    fn run_forward(&self) -> Vec<Tensor> {
        let (o, lse) = self.forward();
        vec![o, lse]
    }

    /// `[o, log_sum_exp, dq, dk, dv]`, and the gradient of sinks, if there are any.
    fn run(&self) -> Vec<Tensor> {
        let ((o, lse), (dq, dk, dv)) = (self.forward(), self.backward());
        let dsinks = self.options.sinks.as_ref().map(|_| self.backward_sinks());
        [o, lse, dq, dk, dv].into_iter().chain(dsinks).collect()
    }
}

/// With batch invariance, as a whole and in pieces of 7 queries, of which the bits are the same.
fn run_invariant(case: &Case) -> Vec<Tensor> {
    within(true, || {
        let Case { q, k, v, first_key, options, .. } = case;
        let first_key = first_key.as_ref();
        let sizes = check("test", q, k, v, first_key, options).unwrap();
        let (o, lse) = case.forward();
        if q.dtype() != DType::F64 {
            let call = metal::Call::new("test", sizes, q, k, v, first_key, options).unwrap();
            let pieces = call.forward_in_pieces(7).unwrap();
            assert_identical(&pieces.0, &o);
            assert_identical(&pieces.1, &lse);
        }
        vec![o, lse]
    })
}

/// Asserts that what `run` gives is right in every mode and several orders of threads, and that the order
/// doesn't change a bit; with one, two or all simdgroups. Dtypes take turns.
fn assert_right_everywhere(cases: &[Case], run: fn(&Case) -> Vec<Tensor>) {
    for mode in Mode::ALL {
        let emulator = Emulator::open(mode);
        for (index, case) in cases.iter().enumerate() {
            for (seed, most_threads) in SEEDS.into_iter().zip([33, 1024, 90]) {
                let emulator = Emulator { seed, most_threads, ..emulator.clone() };
                let (dtype, tolerance) = PRECISIONS[(index + seed as usize) % PRECISIONS.len()];
                let case = case.to_dtype(dtype);
                let exact = run(&case.to_dtype(DType::F64));
                let found = emulate(emulator.clone(), || run(&case));
                let what = format!("{mode} {dtype:?} {:?} {:?}", case.q.dims(), case.k.dims());
                assert_eq!((found[0].dtype(), found[1].dtype()), (dtype, DType::F32), "{what}");
                for (name, (found, exact)) in NAMES.into_iter().zip(found.iter().zip(&exact)) {
                    // The output enters the gradients rounded.
                    let tolerance = match name {
                        "o" => tolerance,
                        "log_sum_exp" => 5e-6,
                        _ => 2.0 * tolerance,
                    };
                    let limit = tolerance * (1.0 + max_abs(exact));
                    let off = (found.to_dtype(DType::F64).unwrap() - exact).unwrap();
                    let off = max_abs(&off);
                    assert!(off <= limit, "{what}: {name} is off by {off:e}");
                }
                if mode == Mode::Plain && seed == 1 {
                    let again = emulate(Emulator { seed: 3, ..emulator }, || run(&case));
                    for (again, found) in again.iter().zip(&found) {
                        assert_identical(again, found);
                    }
                }
            }
        }
    }
}

#[test]
#[ignore = "needs clang"]
fn metal_tiles_are_right_in_every_mode_and_order() {
    let cases = [
        Case::new(2, 33, 37, 4, 2, 64).packed(13).scale(0.2).sinks(),
        Case::new(1, 70, 70, 1, 1, 40).window(20).softcap(2.0),
        Case::new(1, 20, 33, 2, 2, 33).scale(-0.3).sinks(),
        Case::new(1, 33, 50, 3, 1, 80).packed(10).window(9),
    ];
    assert_right_everywhere(&cases, Case::run);
}

#[test]
#[ignore = "needs clang"]
fn metal_tiles_of_long_heads_are_right_in_every_mode_and_order() {
    let cases = [
        Case::new(1, 35, 35, 2, 1, 128).scale(0.1),
        Case::new(1, 18, 33, 2, 1, 104).packed(17).scale(0.1).sinks(),
        Case::new(1, 18, 20, 2, 1, 256).softcap(1.5).scale(0.1).sinks(),
        Case::new(1, 9, 20, 1, 1, 130).window(7).scale(0.1),
    ];
    assert_right_everywhere(&cases, Case::run);
}

#[test]
#[ignore = "needs clang"]
fn metal_few_queries_are_right_in_every_mode_and_order() {
    let cases = [
        Case::new(1, 1, 1, 4, 2, 64),
        Case::new(2, 1, 600, 6, 2, 16).sinks(),
        Case::new(1, 7, 300, 2, 1, 88).packed(100).scale(0.1),
        Case::new(1, 8, 20, 9, 1, 72).scale(-0.1).sinks(),
        Case::new(1, 2, 400, 2, 1, 200).window(270).softcap(2.0).scale(0.1),
        Case::new(1, 3, 520, 5, 1, 33).scale(0.2).sinks(),
    ];
    assert_right_everywhere(&cases, Case::run_forward);
}

#[test]
#[ignore = "needs clang"]
fn metal_ranges_at_fixed_places_are_right_in_every_mode_and_order() {
    assert_right_everywhere(
        &[
            Case::new(2, 20, 20, 4, 2, 16).scale(0.3).packed(6).sinks(),
            Case::new(1, 17, 300, 2, 1, 64).scale(0.1).window(200).softcap(1.5),
            Case::new(1, 9, 530, 3, 3, 33).scale(-0.2).sinks(),
        ],
        run_invariant,
    );
}

#[test]
#[ignore = "needs clang"]
fn metal_reads_views_as_it_reads_copies() {
    let emulator = Emulator::open(Mode::Asan);
    for (dtype, _) in PRECISIONS {
        for (queries, d) in [(12, 16), (12, 9), (2, 16), (2, 9)] {
            let case = Case::new(2, queries, 20, 4, 2, d).to_dtype(dtype);
            let room = random(&[2, 7, 2, d], 8).to_dtype(dtype).unwrap();
            let in_cache = |tensor: &Tensor| {
                Tensor::cat(&[tensor, &room], 1).unwrap().narrow(1, 0, 20).unwrap()
            };
            let heads_first = |tensor: &Tensor| {
                let cache = Tensor::cat(&[tensor, &room], 1).unwrap();
                let cache = cache.transpose(1, 2).unwrap().contiguous().unwrap();
                cache.narrow(2, 0, 20).unwrap().transpose(1, 2).unwrap()
            };
            // Rows that don't start at multiples of four elements.
            let unaligned = |tensor: &Tensor| {
                let wide = Tensor::cat(&[&tensor.narrow(3, 0, 1).unwrap(), tensor], 3);
                wide.unwrap().narrow(3, 1, d).unwrap()
            };
            emulate(emulator.clone(), || {
                let expected = case.run();
                let views: [&dyn Fn(&Tensor) -> Tensor; 4] =
                    [&in_cache, &heads_first, &strided, &unaligned];
                for view in views {
                    let other = Case { k: view(&case.k), v: view(&case.v), ..case.clone() };
                    for (found, expected) in other.run().iter().zip(&expected) {
                        assert_identical(found, expected);
                    }
                }
                for view in [&strided as &dyn Fn(&Tensor) -> Tensor, &unaligned] {
                    let other = Case { q: view(&case.q), ..case.clone() };
                    for (found, expected) in other.run().iter().zip(&expected) {
                        assert_identical(found, expected);
                    }
                }
            });
        }
    }
}

#[test]
#[ignore = "needs clang"]
fn metal_queries_without_keys_give_zeros() {
    let emulator = Emulator::open(Mode::Asan);
    for queries in [3, 20] {
        let mut case = Case::new(1, queries, queries, 2, 1, 16);
        let mut first = vec![0u32; queries];
        first[1] = u32::MAX;
        case.first_key = Some(Tensor::from_vec(first, (1, queries), &Device::Cpu).unwrap());
        for (dtype, _) in PRECISIONS {
            let case = case.to_dtype(dtype);
            let found = emulate(emulator.clone(), || case.run());
            for like_q in [&found[0], &found[2]] {
                assert_eq!(max_abs(&like_q.narrow(1, 1, 1).unwrap()), 0.0);
            }
            assert!(values(&found[1])[1] == f64::NEG_INFINITY);
            assert!(found[2..].iter().flat_map(values).all(|value| value.is_finite()));
        }
    }
}

#[test]
#[ignore = "needs clang"]
fn metal_large_scores_do_not_overflow_and_nan_is_not_hidden() {
    let emulator = Emulator::open(Mode::Asan);
    for (dtype, _) in PRECISIONS {
        for queries in [5, 20] {
            let case = Case::new(1, queries, 20, 2, 1, 16).scale(1000.0).to_dtype(dtype);
            let found = emulate(emulator.clone(), || case.run());
            assert!(found.iter().flat_map(values).all(|value| value.is_finite()));
            let nan = (&case.q * f64::NAN).unwrap();
            let case = Case { q: nan, ..case };
            let found = emulate(emulator.clone(), || case.run());
            assert!(found[0..2].iter().flat_map(values).all(f64::is_nan));
        }
    }
}

#[test]
#[ignore = "needs clang"]
fn metal_handles_empty_sizes() {
    let emulator = Emulator::open(Mode::Asan);
    for d in [0, 3, 64] {
        for (batch, queries, keys) in [(0, 2, 3), (1, 0, 3), (1, 0, 0), (1, 20, 30)] {
            // An empty tensor on a device is a part of one that isn't.
            let whole = Case::new(1, queries.max(1), keys.max(1), 2, 1, d.max(1)).window(2);
            let whole = whole.to_dtype(DType::F32);
            let part = |tensor: &Tensor, tokens| {
                let part = tensor.narrow(0, 0, batch).unwrap();
                part.narrow(1, 0, tokens).unwrap().narrow(3, 0, d).unwrap()
            };
            let case = Case {
                q: part(&whole.q, queries),
                k: part(&whole.k, keys),
                v: part(&whole.v, keys),
                d_o: part(&whole.d_o, queries),
                ..whole
            };
            let expected = case.run();
            let found = emulate(emulator.clone(), || case.run());
            for (found, expected) in found.iter().zip(&expected) {
                assert_close(found, expected, 2e-6);
            }
        }
    }
}

#[test]
#[ignore = "needs clang"]
fn metal_refuses_what_it_cannot_compute() {
    let emulator = Emulator::open(Mode::Asan);
    let run = |case: Case, most_threads| {
        let forward = || forward(&case.q, &case.k, &case.v, case.first_key.as_ref(), &case.options);
        message(emulate(Emulator { most_threads, ..emulator.clone() }, forward))
    };
    let case = Case::new(1, 2, 3, 2, 2, 8);
    assert!(run(case.clone(), 1024).contains("does not support F64"));
    let long = Case::new(1, 2, 3, 2, 2, 257).to_dtype(DType::F32);
    assert!(run(long, 1024).contains("heads of 257 elements are too long for Metal, expected 256"));
    let case = case.to_dtype(DType::BF16);
    assert!(run(case.clone(), 31).contains("has 31 threads on this device, expected 32"));
    let (o, lse) = case.forward();
    let lse = lse.to_dtype(DType::BF16).unwrap();
    let (q, k, v, options) = (&case.q, &case.k, &case.v, &case.options);
    let backward = || backward(q, k, v, &o, &lse, None, options, &case.d_o);
    let wrong = message(emulate(emulator.clone(), backward));
    assert!(wrong.contains("log_sum_exp is BF16, expected F32"), "{wrong}");
}
