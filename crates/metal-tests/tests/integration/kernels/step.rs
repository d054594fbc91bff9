//! The kernels of a training step's end, and the greedy choice of a token.

use super::*;

/// The norm of `grads` by both of its kernels, with `parts` threadgroups.
fn norm<T: Number>(
    library: &Library,
    seed: u64,
    grads: &[T],
    parts: u32,
    threads: u32,
) -> Result<f32, Error> {
    let found = start::<T>(library, "flat_squares", seed)?
        .buffer(0, grads)
        .output::<f32>(1, 2 * parts as usize)
        .value(2, grads.len() as u64)
        .value(3, parts)
        .threadgroups([parts, 1, 1], [threads, 1, 1])?;
    let found = library
        .kernel("flat_norm")?
        .dispatch()
        .seed(seed)
        .buffer(0, &found.read::<f32>(1)?)
        .output::<f32>(1, 1)
        .value(2, parts)
        .threadgroups([1, 1, 1], [threads, 1, 1])?;
    Ok(found.read::<f32>(1)?[0])
}

fn norms<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    for ((count, parts), threads) in [(1003, 3), (37, 40), (1, 1)].into_iter().zip(THREADS) {
        let grads = random::<T>(count, 1);
        let expected = grads.iter().map(|g| g.to() * g.to()).sum::<f64>().sqrt();
        let found = f64::from(norm(library, seed, &grads, parts, threads)?);
        assert!((found - expected).abs() <= 1e-6 * expected, "{found} is not {expected}");
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn norms_are_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| {
        for_every_dtype!(norms, library, seed)?;
        // The squares of these numbers have no f32.
        for (grads, expected) in [
            ([3e30f32, 0.0, 4e30, 1.0], 5e30f32),
            ([3e12, 0.0, 4e11, 3e11], 3.041381e12),
            ([0.0; 4], 0.0),
        ] {
            let found = norm(library, seed, &grads, 2, 33)?;
            assert!((found - expected).abs() <= 1e-6 * expected, "{found} is not {expected}");
        }
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX] {
            for other in [1.0, 2e15, odd] {
                let found = norm(library, seed, &[1.0, odd, 0.5, 2.0, other], 2, 33)?;
                assert_eq!(found.is_finite(), odd == f32::MAX && other != odd, "{odd}: {found}");
            }
        }
        Ok(())
    })
}

/// `decay, 1 - β1, β2, 1 - β2, ε, step size, correction`
const UPDATE: [f32; 7] = [0.9, 0.1, 0.99, 0.01, 1e-3, 0.02, 0.5];

/// Parameters, gradients, m and v, which isn't negative.
fn state(count: usize) -> [Vec<f32>; 4] {
    let [params, grads, m, v] = [1, 2, 3, 4].map(|seed| random::<f32>(count, seed));
    [params, grads, m, v.into_iter().map(f32::abs).collect()]
}

/// What one step makes of parameters, m and v, in f64.
fn stepped([params, grads, m, v]: &[Vec<f32>; 4], scale: f64, decayed: usize) -> [Vec<f64>; 3] {
    let [decay, one_minus_beta1, beta2, one_minus_beta2, epsilon, step_size, correction] =
        UPDATE.map(f64::from);
    let mut after = [(); 3].map(|()| Vec::new());
    for (i, (((p, g), m), v)) in params.iter().zip(grads).zip(m).zip(v).enumerate() {
        let [p, g, m, v] = [p, g, m, v].map(|number| f64::from(*number));
        let g = g * scale;
        let m = m + (g - m) * one_minus_beta1;
        let v = v * beta2 + one_minus_beta2 * g * g;
        let decay = if i < decayed { decay } else { 1.0 };
        let p = p * decay - step_size * (m / (v.sqrt() / correction + epsilon));
        for (after, number) in after.iter_mut().zip([p, m, v]) {
            after.push(number);
        }
    }
    after
}

/// A step on part of larger buffers, from element `FIRST` on.
const FIRST: usize = 3;

#[track_caller]
fn assert_stepped(found: &Buffers, before: &[Vec<f32>; 4], expected: &[Vec<f64>; 3]) {
    for ((index, before), expected) in
        [(0, 0), (2, 2), (3, 3)].map(|(index, of)| (index, &before[of])).into_iter().zip(expected)
    {
        let found: Vec<f32> = found.read(index).unwrap();
        let count = before.len();
        // What is read back may start at the beginning of the buffer, or where the kernel found it.
        let found = &found[found.len() - (count - FIRST)..];
        for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
            let error = (f64::from(*found) - expected).abs();
            assert!(error <= 1e-6 * (1.0 + expected.abs()), "{index}: {i}: {found}, {expected}");
        }
        let behind = &before[FIRST + expected.len()..];
        assert_eq!(&found[expected.len()..], behind, "what lies behind is changed");
    }
}

#[test]
#[ignore = "needs clang"]
fn steps_are_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| {
        for ((count, decayed), threads) in [(39, 6), (401, 401), (1, 0)].into_iter().zip(THREADS) {
            let before = state(FIRST + count + 2);
            let of_step = before.clone().map(|buffer| buffer[FIRST..FIRST + count].to_vec());
            let norm = of_step[1].iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
            let start = |name: &str| -> Result<Dispatch, Error> {
                Ok(library
                    .kernel(name)?
                    .dispatch()
                    .seed(seed)
                    .buffer_at(0, &before[0], FIRST)
                    .buffer_at(1, &before[1], FIRST)
                    .buffer_at(2, &before[2], FIRST)
                    .buffer_at(3, &before[3], FIRST)
                    .buffer(4, &UPDATE)
                    .value(5, decayed as u64)
                    .value(6, count as u64))
            };
            let grid = stretches(count, 1, threads);
            let found =
                start("adamw_step")?.value(7, 0.75f32).threadgroups(grid, [threads, 1, 1])?;
            assert_stepped(&found, &before, &stepped(&of_step, 0.75, decayed));

            for max_norm in [f32::INFINITY, 0.5] {
                let found = start("adamw_clipped_step")?
                    .buffer(7, &[norm as f32])
                    .value(8, max_norm)
                    .threadgroups(grid, [threads, 1, 1])?;
                let scale = (f64::from(max_norm) / (norm + 1e-6)).min(1.0);
                assert_stepped(&found, &before, &stepped(&of_step, scale, decayed));
                assert_cleared(&found, &before[1], count);
            }
            for odd in [f32::NAN, f32::INFINITY] {
                let found = start("adamw_clipped_step")?
                    .buffer(7, &[odd])
                    .value(8, 0.5f32)
                    .threadgroups(grid, [threads, 1, 1])?;
                let [params, _, m, v] = of_step.clone();
                let as_before =
                    [params, m, v].map(|buffer| buffer.into_iter().map(f64::from).collect());
                assert_stepped(&found, &before, &as_before);
                assert_cleared(&found, &before[1], count);
            }
        }
        Ok(())
    })
}

#[track_caller]
fn assert_cleared(found: &Buffers, before: &[f32], count: usize) {
    let found: Vec<f32> = found.read(1).unwrap();
    let found = &found[found.len() - (before.len() - FIRST)..];
    assert!(found[..count].iter().all(|gradient| *gradient == 0.0));
    assert_eq!(&found[count..], &before[FIRST + count..]);
}

fn accumulates<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    for (count, threads) in [39, 401, 1].into_iter().zip(THREADS) {
        let (to, from) = (random::<f32>(count, 1), random::<T>(count, 2));
        let found = start::<T>(library, "flat_accumulate", seed)?
            .buffer(0, &to)
            .buffer(1, &from)
            .value(2, 0.75f32)
            .value(3, count as u64)
            .threadgroups(stretches(count, 1, threads), [threads, 1, 1])?;
        let expected = tensor(&to, &[count]) + (tensor(&from, &[count]) * 0.75).unwrap();
        assert_near::<f32>(&found, 0, &expected.unwrap(), "accumulate");
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn gradients_are_added_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(accumulates, library, seed))
}

/// Rows with ties, NaN, infinities and nothing to choose.
fn greedy<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    for columns in [1, 31, 37, 401] {
        let mut rows = vec![random::<T>(columns, 1), random::<T>(columns, 2)];
        for row in &mut rows {
            // Few different numbers.
            row.iter_mut().for_each(|logit| *logit = T::of(logit.to().round()));
        }
        rows.push(vec![T::of(-7.5); columns]);
        for odd in [f64::NAN, f64::NEG_INFINITY, f64::INFINITY] {
            rows.push(vec![T::of(odd); columns]);
            let mut row = random::<T>(columns, 3);
            row.iter_mut().step_by(2).for_each(|logit| *logit = T::of(odd));
            rows.push(row);
        }
        let logits: Vec<T> = rows.concat();
        let expected = sampling::greedy(&tensor(&logits, &[rows.len(), columns])).unwrap();
        let expected: Vec<u32> = expected.to_vec1().unwrap();
        for threads in THREADS {
            let found = start::<T>(library, "sampling_greedy", seed)?
                .buffer(0, &logits)
                .output::<u32>(1, rows.len())
                .value(2, columns as u32)
                .threadgroups([rows.len() as u32, 1, 1], [threads, 1, 1])?;
            assert_eq!(found.read::<u32>(1)?, expected, "{}: {columns}, {threads}", T::NAME);
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn greedy_choices_are_the_cpus_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(greedy, library, seed))
}

/// Rows of logits with their targets: loss and gradient apart from the products, and in their place.
fn losses<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    let problems =
        [(3usize, 37usize, 0.0f32, 1.0f32, 4usize), (2, 131, 1.5, 0.5, 40), (1, 1, 0.0, 2.0, 1)];
    for ((rows, columns, cap, scale, width), threads) in problems.into_iter().zip(THREADS) {
        let stride = columns.next_multiple_of(8);
        let products = random::<f32>(rows * stride, 1);
        // Targets that differ, the last of some rows none.
        let target = |row: usize, index: usize| match index {
            3 if row == 1 => cross_entropy::IGNORE,
            _ => ((row * 36 + index * 3) % columns) as u32,
        };
        let targets: Vec<u32> =
            (0..rows).flat_map(|row| (0..width).map(move |index| target(row, index))).collect();
        let shares: Vec<f32> =
            (0..targets.len()).map(|place| 1.0 - (place % 4) as f32 * 0.25).collect();
        let share = |place: usize| {
            if targets[place] == cross_entropy::IGNORE { 0.0 } else { shares[place] }
        };
        let share_sums: Vec<f32> =
            (0..rows).map(|row| (row * width..(row + 1) * width).map(share).sum()).collect();
        // With the identity as the head, the gradient of hidden is that of the products.
        let identity = Tensor::eye(columns, DType::F64, &Device::Cpu).unwrap();
        let softcap = (cap > 0.0).then_some(f64::from(cap));
        let options = cross_entropy::Options {
            softcap,
            logit_scale: scale.into(),
            chunk: 7,
            statistics: true,
        };
        let hidden = tensor(&products, &[rows, stride]).narrow(1, 0, columns).unwrap();
        let weights: Vec<f32> = (0..rows).map(|row| 1.5 - row as f32).collect();
        let expected = cross_entropy::forward(
            &hidden.contiguous().unwrap(),
            &identity,
            &cross_entropy::Targets {
                tokens: &targets,
                shares: Some(&shares),
                weights: Some(&weights),
            },
            &options,
            true,
            0,
        );
        let cross_entropy::Output { losses, dhidden, statistics, .. } = expected.unwrap();
        let (gradient, statistics) = (dhidden.unwrap(), statistics.unwrap());
        // Each row goes to another place.
        let places: Vec<u32> = (0..rows as u32).rev().collect();
        let placed = |of_rows: &Tensor| {
            let order = Tensor::new(places.as_slice(), &Device::Cpu).unwrap();
            of_rows.index_select(&order, 0).unwrap()
        };
        for place in 0..3u32 {
            if place == 2 && T::NAME != "f32" {
                continue;
            }
            let run = start::<T>(library, "cross_entropy_rows", seed)?
                .buffer(0, &products)
                .buffer(2, &targets)
                .output::<f32>(3, rows)
                .value(4, stride as u64)
                .value(5, columns as u32)
                .value(6, scale)
                .value(7, cap)
                .value(8, place)
                .buffer(9, &places)
                .buffer(10, &weights)
                .output::<f32>(11, rows)
                .output::<f32>(12, rows)
                .value(13, u32::from(place != 2))
                .buffer(14, &shares)
                .buffer(15, &share_sums)
                .output::<f32>(16, rows * width)
                .value(17, width as u32);
            let run = match place {
                1 => run.output::<T>(1, rows * stride),
                _ => run.buffer(1, &products),
            };
            let found = run.threadgroups([rows as u32, 1, 1], [threads, 1, 1])?;
            assert_near::<f32>(&found, 3, &placed(&losses), "cross_entropy's loss");
            if place != 2 {
                let entropies = placed(&statistics.entropies);
                assert_near::<f32>(&found, 11, &entropies, "cross_entropy's entropy");
                assert_near::<f32>(&found, 12, &placed(&statistics.hits), "cross_entropy's hits");
            }
            let after: Vec<f32> = found.read(0)?;
            let found: Vec<f64> = match place {
                0 => Vec::new(),
                1 => found.read::<T>(1)?.into_iter().map(Number::to).collect(),
                _ => after.iter().map(|number| f64::from(*number)).collect(),
            };
            if place != 2 {
                assert_eq!(after, products);
            }
            for (found, expected) in found.chunks(stride).zip(gradient.to_vec2::<f64>().unwrap()) {
                for (found, expected) in found.iter().zip(expected) {
                    let error = (found - expected).abs();
                    assert!(error <= T::TOLERANCE, "{}: {found} is not {expected}", T::NAME);
                }
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn losses_are_right_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| for_every_dtype!(losses, library, seed))
}

#[test]
#[ignore = "needs clang"]
fn large_logits_do_not_overflow_and_nan_shows() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| {
        for (odd, loss) in [
            (3e4f32, 3e4f32 - 1.0),
            (f32::NEG_INFINITY, 39f32.ln()),
            (f32::NAN, f32::NAN),
            (f32::INFINITY, f32::NAN),
        ] {
            let mut products = [1.0f32; 40];
            products[7] = odd;
            let found = library
                .kernel("cross_entropy_rows_f32")?
                .dispatch()
                .seed(seed)
                .buffer(0, &products)
                .output::<f32>(1, 40)
                .buffer(2, &[3u32])
                .output::<f32>(3, 1)
                .value(4, 40u64)
                .value(5, 40u32)
                .value(6, 1.0f32)
                .value(7, 0.0f32)
                .value(8, 1u32)
                .buffer(9, &[0u32])
                .buffer(10, &[1.0f32])
                .output::<f32>(11, 1)
                .output::<f32>(12, 1)
                .value(13, 0u32)
                .buffer(14, &[1.0f32])
                .buffer(15, &[1.0f32])
                .output::<f32>(16, 1)
                .value(17, 1u32)
                .threadgroups([1, 1, 1], [33, 1, 1])?;
            let found_loss = found.read::<f32>(3)?[0];
            let gradient: Vec<f32> = found.read(1)?;
            if loss.is_nan() {
                assert!(!found_loss.is_finite() && gradient.iter().any(|g| g.is_nan()), "{odd}");
            } else {
                assert!((found_loss - loss).abs() <= 1e-6 * loss, "{odd}: {found_loss}");
                assert!(gradient.iter().all(|g| g.is_finite()), "{odd}");
            }
        }
        Ok(())
    })
}

fn scattered<T: Number>(library: &Library, seed: u64) -> Result<(), Error> {
    let places = [1u32, u32::MAX, 0, u32::MAX, 2];
    for (columns, threads) in [7, 150, 1].into_iter().zip(THREADS) {
        let x = random::<T>(3 * columns, 1);
        let found = start::<T>(library, "cross_entropy_scatter", seed)?
            .buffer(0, &x)
            .buffer(1, &places)
            .output::<T>(2, 5 * columns)
            .value(3, columns as u32)
            .threadgroups(stretches(columns, 5, threads), [threads, 1, 1])?;
        let found: Vec<T> = found.read(2)?;
        for (row, place) in found.chunks(columns).zip(places) {
            for (i, found) in row.iter().enumerate() {
                let from = x.get(place as usize * columns + i).map_or(0.0, |from| from.to());
                assert_eq!(found.to(), from);
            }
        }
    }
    Ok(())
}

#[test]
#[ignore = "needs clang"]
fn rows_find_their_places_in_every_mode_and_order() -> Result<(), Error> {
    for_every_mode(library(), |library, seed| {
        for_every_dtype!(scattered, library, seed)?;
        for (count, threads) in [1003, 401, 1].into_iter().zip(THREADS) {
            let (losses, weights) = (random::<f32>(count, 1), random::<f32>(count, 2));
            let rows: Vec<u32> = (0..count as u32).rev().collect();
            let found = library
                .kernel("cross_entropy_sum")?
                .dispatch()
                .seed(seed)
                .buffer(0, &losses)
                .output::<f32>(1, 1)
                .value(2, count as u32)
                .buffer(3, &rows)
                .buffer(4, &weights)
                .threadgroups([1, 1, 1], [threads, 1, 1])?;
            let terms = losses.iter().rev().zip(&weights);
            let expected = terms.map(|(x, y)| f64::from(*x) * f64::from(*y)).sum::<f64>();
            let error = (f64::from(found.read::<f32>(1)?[0]) - expected).abs();
            assert!(error <= 1e-6 * (count as f64), "{error}");
        }
        Ok(())
    })
}
