use super::*;
use crate::testing::*;
use candle_core::DType;

#[derive(Clone)]
struct Case {
    hidden: Tensor,
    weight: Tensor,
    targets: Vec<u32>,
    shares: Option<Vec<f32>>,
    weights: Option<Vec<f32>>,
    options: Options,
}

impl Case {
    /// Every third row is ignored.
    fn new(n: usize, d: usize, v: usize, chunk: usize) -> Case {
        let targets: Vec<u32> =
            (0..n).map(|row| if row % 3 == 1 { IGNORE } else { (row * 7 % v) as u32 }).collect();
        Case {
            hidden: random(&[n, d], 1),
            weight: random(&[v, d], 2),
            targets,
            shares: None,
            weights: None,
            options: Options { softcap: None, logit_scale: 1.0, chunk, statistics: true },
        }
    }

    /// With a weight for each row, of both signs and zero.
    fn weighted(mut self) -> Case {
        let weight = |row: usize| (row % 5) as f32 * 0.75 - 1.5;
        self.weights = Some((0..self.hidden.dim(0).unwrap()).map(weight).collect());
        self
    }

    /// With `width` targets for each row, whose shares differ and whose sums do; some rows have fewer.
    fn distributed(mut self, width: usize) -> Case {
        let v = self.weight.dim(0).unwrap() as u32;
        let target = |row: usize, first: u32, index: usize| match index {
            _ if first == IGNORE => IGNORE,
            0 => first,
            _ if (row + index) % 4 == 3 => IGNORE,
            _ => (first + 5 * index as u32) % v,
        };
        let rows = self.targets.iter().enumerate();
        self.targets = rows
            .flat_map(|(row, &first)| (0..width).map(move |index| target(row, first, index)))
            .collect();
        let share = |place: usize| (place * 37 % 11) as f32 / 16.0;
        self.shares = Some((0..self.targets.len()).map(share).collect());
        self
    }

    fn targets(&self) -> Targets<'_> {
        Targets {
            tokens: &self.targets,
            shares: self.shares.as_deref(),
            weights: self.weights.as_deref(),
        }
    }

    /// The targets of a row with their shares; none where it doesn't count.
    fn of_row(&self, row: usize) -> Vec<(usize, f64)> {
        let width = self.targets.len() / self.hidden.dim(0).unwrap();
        let share = |place: usize| self.shares.as_ref().map_or(1.0, |shares| shares[place].into());
        (row * width..(row + 1) * width)
            .filter(|place| self.targets[*place] != IGNORE)
            .map(|place| (self.targets[place] as usize, share(place)))
            .collect()
    }

    fn options(mut self, softcap: Option<f64>, logit_scale: f64) -> Case {
        self.options = Options { softcap, logit_scale, ..self.options };
        self
    }

    fn to_dtype(&self, dtype: DType) -> Case {
        Case {
            hidden: self.hidden.to_dtype(dtype).unwrap(),
            weight: self.weight.to_dtype(dtype).unwrap(),
            ..self.clone()
        }
    }

    fn run(&self) -> Output {
        self.run_with(&self.hidden, &self.weight).unwrap()
    }

    fn run_with(&self, hidden: &Tensor, weight: &Tensor) -> Result<Output> {
        forward(hidden, weight, &self.targets(), &self.options, true, weight.dim(1)?)
    }

    fn loss(&self, hidden: &Tensor, weight: &Tensor) -> Result<f64> {
        let options = Options { statistics: false, ..self.options };
        let output = forward(hidden, weight, &self.targets(), &options, false, 0)?;
        assert!(output.dhidden.is_none() && output.dweight.is_none());
        assert!(output.statistics.is_none());
        Ok(values(&output.loss)[0])
    }

    fn reference(&self) -> f64 {
        let weight = |row: usize| self.weights.as_ref().map_or(1.0, |weights| weights[row].into());
        self.rows().into_iter().enumerate().map(|(row, [loss, ..])| weight(row) * loss).sum()
    }

    /// Loss, entropy and hit of each row.
    fn rows(&self) -> Vec<[f64; 3]> {
        let (n, d) = self.hidden.dims2().unwrap();
        let v = self.weight.dim(0).unwrap();
        let (hidden, weight) = (values(&self.hidden), values(&self.weight));
        let of_row = |row: usize| {
            let targets = self.of_row(row);
            let Some((first, _)) = targets.first() else { return [0.0; 3] };
            let logit = |token: usize| {
                let product: f64 =
                    (0..d).map(|i| hidden[row * d + i] * weight[token * d + i]).sum();
                let raw = product * self.options.logit_scale;
                self.options.softcap.map_or(raw, |c| c * (raw / c).tanh())
            };
            let logits: Vec<f64> = (0..v).map(logit).collect();
            let total: f64 = logits.iter().map(|logit| logit.exp()).sum();
            let loss = targets.iter().map(|(target, share)| share * (total.ln() - logits[*target]));
            let entropy: f64 = logits
                .iter()
                .map(|logit| {
                    let log_probability = logit - total.ln();
                    -log_probability.exp() * log_probability
                })
                .sum();
            let (before, rest) = logits.split_at(*first);
            let hit = before.iter().all(|logit| *logit < rest[0])
                && rest.iter().all(|logit| *logit <= rest[0]);
            [loss.sum(), entropy, f64::from(u8::from(hit))]
        };
        (0..n).map(of_row).collect()
    }

    /// Compares what `output` says of each row with f64.
    fn assert_rows(&self, output: &Output, tolerance: f64) {
        let statistics = output.statistics.as_ref().unwrap();
        let found = [&output.losses, &statistics.entropies, &statistics.hits].map(values);
        let rows = self.rows();
        for found in &found {
            assert_eq!(found.len(), rows.len());
        }
        for (row, expected) in rows.iter().enumerate() {
            for (found, expected) in found.iter().zip(expected) {
                let error = (found[row] - expected).abs();
                assert!(
                    error <= tolerance * (1.0 + expected.abs()),
                    "row {row}: {found:?} {expected}"
                );
            }
        }
    }
}

fn cases() -> Vec<Case> {
    vec![
        Case::new(5, 7, 33, 2),
        Case::new(5, 7, 33, 100).options(None, 0.25),
        Case::new(8, 3, 11, 3).options(Some(0.8), 1.0),
        Case::new(8, 3, 11, 1).options(Some(1.5), 3.0),
        Case::new(9, 7, 33, 2).weighted(),
        Case::new(8, 3, 11, 3).options(Some(0.8), 2.0).weighted(),
        Case::new(9, 7, 33, 2).distributed(5),
        Case::new(8, 3, 41, 3).options(Some(0.8), 2.0).weighted().distributed(7),
    ]
}

#[test]
fn loss_matches_reference() {
    let larger = [
        Case::new(100, 33, 1000, 32),
        Case::new(100, 33, 1000, 32).options(Some(5.0), 4.0),
        // More rows than a block has logits.
        Case::new(1100, 3, 70, 2000),
    ];
    for case in cases().into_iter().chain(larger) {
        let output = case.run();
        let expected = case.reference();
        assert!((values(&output.loss)[0] - expected).abs() < 1e-12 * expected.abs());
        case.assert_rows(&output, 1e-12);
        let n = case.hidden.dim(0).unwrap();
        assert_eq!(output.count, (0..n).filter(|row| !case.of_row(*row).is_empty()).count());
        assert_eq!(case.loss(&case.hidden, &case.weight).unwrap(), values(&output.loss)[0]);
    }
}

#[test]
fn rows_of_many_blocks_match_f64() {
    for (softcap, logit_scale) in [(None, 1.0), (Some(5.0), 2.0)] {
        let mut case = Case::new(5, 3, 7001, 2).options(softcap, logit_scale);
        // Logits that grow and fall along the row, so that the largest moves from block to block.
        let slopes: Vec<f64> = (0..7001).map(|i| 9.0 * (i as f64 / 1500.0).sin()).collect();
        let slopes = Tensor::from_vec(slopes, (7001, 1), &Device::Cpu).unwrap();
        case.weight = case.weight.broadcast_mul(&slopes).unwrap();
        let single = case.to_dtype(DType::F32);
        let case = single.to_dtype(DType::F64);
        let (exact, found) = (case.run(), single.run());
        let expected = case.reference();
        assert!((values(&exact.loss)[0] - expected).abs() < 1e-12 * expected);
        assert!((values(&found.loss)[0] - expected).abs() < 1e-5 * expected);
        case.assert_rows(&exact, 1e-11);
        case.assert_rows(&found, 1e-5);
        assert_close(&found.dhidden.unwrap(), &exact.dhidden.unwrap(), 1e-5);
        let dweight = exact.dweight.unwrap();
        assert_close(&found.dweight.unwrap(), &dweight, 1e-5);
        // Finite differences of single elements in several blocks.
        for index in [0, 3 * 2047, 3 * 2048 + 1, 3 * 5000, 3 * 7000 + 2] {
            let moved = |step: f64| {
                let mut weight = values(&case.weight);
                weight[index] += step;
                let weight = Tensor::from_vec(weight, (7001, 3), &Device::Cpu).unwrap();
                case.loss(&case.hidden, &weight).unwrap()
            };
            let slope = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            let gradient = values(&dweight)[index];
            assert!((gradient - slope).abs() < 2e-8 * (1.0 + slope.abs()), "{gradient} {slope}");
        }
    }
}

#[test]
fn gradients_match_finite_differences() {
    for case in cases() {
        let output = case.run();
        let dhidden = output.dhidden.unwrap();
        assert_gradient(&case.hidden, &dhidden, |hidden| case.loss(hidden, &case.weight));
        let dweight = output.dweight.unwrap();
        assert_gradient(&case.weight, &dweight, |weight| case.loss(&case.hidden, weight));
    }
}

#[test]
fn other_precisions_match_f64() {
    let larger = Case::new(100, 33, 1000, 32);
    for case in cases().into_iter().chain([larger]) {
        for (dtype, tolerance) in PRECISIONS {
            let low = case.to_dtype(dtype);
            let exact = low.to_dtype(DType::F64).run();
            let low = low.run();
            assert_eq!(low.loss.dtype(), DType::F32);
            assert_close(&low.loss, &exact.loss, 2e-6);
            let of = |output: &Output| output.statistics.as_ref().unwrap().entropies.clone();
            assert_eq!((low.losses.dtype(), of(&low).dtype()), (DType::F32, DType::F32));
            assert_close(&low.losses, &exact.losses, 2e-6);
            assert_close(&of(&low), &of(&exact), 4e-6);
            let (dhidden, dweight) = (low.dhidden.unwrap(), low.dweight.unwrap());
            assert_eq!((dhidden.dtype(), dweight.dtype()), (dtype, DType::F32));
            assert_close(&dhidden, &exact.dhidden.unwrap(), tolerance);
            // Where bf16 is multiplied as such, the gradients of the logits are rounded to it.
            let tolerance = if dtype == DType::BF16 { 4e-3 } else { 2e-6 };
            assert_close(&dweight, &exact.dweight.unwrap(), tolerance);
        }
    }
}

#[test]
fn ignored_rows_do_not_matter_at_all() {
    let mut case = Case::new(6, 7, 33, 2);
    let expected = case.run();
    // Row 1 is ignored, so not even a NaN in it is seen.
    let mut hidden = values(&case.hidden);
    hidden[7..14].fill(f64::NAN);
    case.hidden = Tensor::from_vec(hidden, (6, 7), &Device::Cpu).unwrap();
    let actual = case.run();
    assert_identical(&actual.loss, &expected.loss);
    assert_identical(actual.dhidden.as_ref().unwrap(), &expected.dhidden.unwrap());
    assert_identical(&actual.dweight.unwrap(), &expected.dweight.unwrap());
    assert_eq!(max_abs(&actual.dhidden.unwrap().narrow(0, 1, 1).unwrap()), 0.0);
}

#[test]
fn nothing_counted_is_a_zero_loss() {
    let mut case = Case::new(4, 7, 33, 2);
    case.targets = vec![IGNORE; 4];
    let output = case.run();
    assert_eq!((output.count, values(&output.loss)[0]), (0, 0.0));
    assert_eq!(max_abs(&output.dhidden.unwrap()), 0.0);
    assert_eq!(max_abs(&output.dweight.unwrap()), 0.0);
    let empty = Case::new(0, 7, 33, 2).run();
    assert_eq!((empty.count, values(&empty.loss)[0]), (0, 0.0));
}

/// What a loss of the rows' log-probabilities needs: rows whose gradients are brought to scale afterwards are those of
/// rows with weights.
#[test]
fn gradients_of_rows_can_be_weighted_afterwards() {
    for case in cases() {
        let n = case.hidden.dim(0).unwrap();
        let weighted = case.clone().weighted();
        let factors = weighted.weights.clone().unwrap();
        let factors = Tensor::from_vec(factors, n, &Device::Cpu).unwrap();
        let factors = factors.to_dtype(DType::F64).unwrap();
        let plain = Case { weights: None, ..case }.run();
        let later = arithmetic::scale_rows(&plain.dhidden.unwrap(), &factors).unwrap();
        let at_once = weighted.run();
        assert_close(&later, &at_once.dhidden.unwrap(), 1e-14);
        assert_identical(&plain.losses, &at_once.losses);
    }
}

/// Entropies and hits of rows whose logits are all alike, of a certain token, and of one that is forbidden by a logit of
/// negative infinity.
fn of_extreme_rows(device: &Device, targets: &[u32; 3]) -> [Vec<f64>; 2] {
    let weight: Vec<f32> = (0..70).map(|i| if i == 9 { 1e4 } else { 0.0 }).collect();
    let weight = Tensor::from_vec(weight, (70, 1), device).unwrap();
    let hidden = Tensor::from_vec(vec![0f32, 1.0, -1e35], (3, 1), device).unwrap();
    let options = Options { softcap: None, logit_scale: 1.0, chunk: 8, statistics: true };
    let output = forward(&hidden, &weight, &Targets::new(targets), &options, true, 1).unwrap();
    let statistics = output.statistics.unwrap();
    [&statistics.entropies, &statistics.hits].map(values)
}

fn assert_extreme_rows(device: &Device) {
    // Of tokens that are alike the first is the likeliest.
    for (targets, expected) in [([0, 9, 0], [1.0, 1.0, 1.0]), ([9, 3, 5], [0.0, 0.0, 0.0])] {
        let [entropies, hits] = of_extreme_rows(device, &targets);
        for (found, expected) in entropies.iter().zip([70f64.ln(), 0.0, 69f64.ln()]) {
            assert!((found - expected).abs() < 1e-5, "{found} {expected}");
        }
        assert_eq!(hits, expected);
    }
}

#[test]
fn entropies_and_hits_of_extreme_distributions_are_right() {
    assert_extreme_rows(&Device::Cpu);
}

#[test]
fn large_logits_do_not_overflow() {
    let case = Case::new(5, 7, 33, 2).options(None, 1e4).to_dtype(DType::F32);
    let output = case.run();
    for tensor in [output.loss, output.dhidden.unwrap(), output.dweight.unwrap()] {
        assert!(values(&tensor).iter().all(|value| value.is_finite()));
    }
}

#[test]
fn a_nan_is_not_hidden() {
    let case = Case::new(5, 7, 33, 2).to_dtype(DType::F32);
    let hidden = (&case.hidden * f64::NAN).unwrap();
    let output = case.run_with(&hidden, &case.weight).unwrap();
    assert!(values(&output.loss)[0].is_nan());
    assert!(values(&output.dweight.unwrap()).iter().all(|gradient| gradient.is_nan()));
    let gradients = values(&output.dhidden.unwrap());
    for (target, gradient) in case.targets.iter().zip(gradients.chunks(7)) {
        assert!(gradient.iter().all(|number| number.is_nan() == (*target != IGNORE)));
    }
}

#[test]
fn a_gradient_is_the_same_without_the_other() {
    for case in cases() {
        let both = case.run();
        let Case { hidden, weight, options, .. } = &case;
        let targets = &case.targets();
        let d = weight.dim(1).unwrap();
        for (need_dhidden, trained) in [(true, 0), (false, d), (true, d.div_ceil(2)), (false, 1)] {
            let one = forward(hidden, weight, targets, options, need_dhidden, trained);
            let one = one.unwrap();
            assert_identical(&one.loss, &both.loss);
            assert_eq!((one.dhidden.is_some(), one.dweight.is_some()), (need_dhidden, trained > 0));
            if let (Some(one), Some(both)) = (one.dhidden, &both.dhidden) {
                assert_identical(&one, both);
            }
            if let (Some(one), Some(both)) = (one.dweight, &both.dweight) {
                let both = both.narrow(1, 0, trained).unwrap();
                assert_close(&one, &both, 1e-12);
            }
        }
        assert!(forward(hidden, weight, targets, options, true, d + 1).is_err());
    }
}

#[test]
fn threads_and_strides_do_not_change_bits() {
    for dtype in [DType::F32, DType::BF16] {
        let case = Case::new(100, 33, 1000, 32).to_dtype(dtype);
        let run = |case: &Case| {
            let output = case.run();
            vec![output.loss, output.dhidden.unwrap(), output.dweight.unwrap()]
        };
        assert_independent_of_threads(|| run(&case));
        let other =
            Case { hidden: strided(&case.hidden), weight: strided(&case.weight), ..case.clone() };
        for (a, b) in run(&case).iter().zip(run(&other)) {
            assert_identical(a, &b);
        }
    }
}

#[test]
fn wrong_arguments_are_errors() {
    let case = Case::new(3, 7, 33, 2);
    let run = |case: &Case| message(case.run_with(&case.hidden, &case.weight));
    let wrong = run(&Case { targets: vec![0, 33, 1], ..case.clone() });
    assert!(wrong.contains("target 33 of row 1") && wrong.contains("less than 33"), "{wrong}");
    let options = Options { chunk: 0, ..case.options };
    assert!(run(&Case { options, ..case.clone() }).contains("chunk is 0"));
    let options = Options { softcap: Some(-1.0), ..case.options };
    assert!(run(&Case { options, ..case.clone() }).contains("softcap is -1"));
    let wrong = run(&Case { targets: vec![0, 1], ..case.clone() });
    assert!(wrong.contains("found 2 targets, expected one for each of 3 rows"), "{wrong}");
    let weights = Some(vec![1.0; 4]);
    let wrong = run(&Case { weights, ..case.clone() });
    assert!(wrong.contains("found 4 weights, expected one for each of 3 rows"), "{wrong}");
    let shares = Some(vec![1.0; 4]);
    let wrong = run(&Case { shares, ..case.clone() });
    assert!(wrong.contains("found 4 shares, expected one for each of 3 targets"), "{wrong}");
    let shares = Some(vec![1.0, 1.0, f32::NAN]);
    let wrong = run(&Case { shares, ..case.clone() });
    assert!(wrong.contains("the share of target 14 of row 2 is NaN"), "{wrong}");
    let wrong = run(&Case { targets: vec![0, 1, 7, 7, 2, IGNORE], ..case.clone() });
    assert!(wrong.contains("target 7 stands twice in row 1"), "{wrong}");
    let weight = random(&[33, 8], 1);
    assert!(run(&Case { weight, ..case.clone() }).contains("weight has shape [33, 8]"));
}

#[test]
fn chunks_of_a_gpu_fit_the_memory_and_are_alike() {
    for memory in [512 << 20, 128 << 20] {
        for (counted, v) in [(1, 128_256), (8192, 128_256), (5000, 49_152), (3, 5), (1 << 20, 32)] {
            let rows = rows_of_chunk(counted, v, memory);
            assert!(rows > 0 && rows.is_multiple_of(128));
            assert!(rows == 128 || rows * v * 4 <= memory);
            let last = counted % rows;
            assert!(counted <= rows || last == 0 || last + 128 * counted.div_ceil(rows) >= rows);
        }
    }
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    fn on(case: &Case, device: &Device) -> Case {
        Case {
            hidden: there(&case.hidden, device),
            weight: there(&case.weight, device),
            ..case.clone()
        }
    }

    fn results(output: Output) -> Vec<Tensor> {
        let Statistics { entropies, hits } = output.statistics.unwrap();
        let of_rows = [Some(output.losses), Some(entropies), Some(hits)];
        let rest = [Some(output.loss), output.dhidden, output.dweight];
        rest.iter().chain(&of_rows).flatten().map(here).collect()
    }

    fn in_chunks(case: &Case, chunk: usize) -> Output {
        let Case { hidden, weight, options, .. } = case;
        let (n, v) = (hidden.dim(0).unwrap(), weight.dim(0).unwrap());
        let counted = &AllCounted::find("cross_entropy", &case.targets(), n, v).unwrap();
        let (need_dhidden, trained) = (true, weight.dim(1).unwrap());
        let problem =
            super::super::cuda::Problem { hidden, weight, counted, options, need_dhidden, trained };
        problem.run("cross_entropy", chunk).unwrap()
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_matches_the_cpu_in_every_dtype() {
        let device = crate::testing::cuda();
        let mut all = cases();
        all.extend([
            Case::new(100, 33, 1000, 32),
            Case::new(100, 64, 7001, 32).options(Some(5.0), 4.0),
            Case::new(37, 40, 3003, 32).options(None, 0.25),
            Case::new(1, 8, 1, 1),
            Case::new(100, 64, 7001, 32).options(Some(5.0), 4.0).distributed(9),
            // More targets than a block has threads.
            Case::new(40, 64, 7001, 32).weighted().distributed(700),
        ]);
        // All rows count.
        let mut whole = Case::new(70, 40, 515, 32);
        whole.targets.iter_mut().for_each(|target| *target = (*target).min(514));
        all.push(whole);
        for case in all {
            for (dtype, tolerance) in PRECISIONS {
                let low = case.to_dtype(dtype);
                let exact = low.to_dtype(DType::F64).run();
                let moved = on(&low, &device);
                let found = moved.run();
                assert_eq!(found.count, exact.count);
                let loss = moved.loss(&moved.hidden, &moved.weight).unwrap();
                assert_eq!(loss, values(&here(&found.loss))[0]);
                for (output, tolerance) in [(found, tolerance), (in_chunks(&moved, 16), tolerance)]
                {
                    let output = results(output);
                    assert_eq!(output[0].dtype(), DType::F32);
                    assert_close(&output[0], &exact.loss, 4e-6);
                    assert_eq!((output[1].dtype(), output[2].dtype()), (dtype, DType::F32));
                    assert_close(&output[1], exact.dhidden.as_ref().unwrap(), 2.0 * tolerance);
                    // The gradients of the logits are rounded to the dtype.
                    let dweight = exact.dweight.as_ref().unwrap();
                    assert_close(&output[2], dweight, tolerance.max(4e-6));
                    let statistics = exact.statistics.as_ref().unwrap();
                    assert_close(&output[3], &exact.losses, 4e-6);
                    assert_close(&output[4], &statistics.entropies, 8e-6);
                    // Where two logits are nearly the same, rounding decides.
                    let differ = &output[5].to_dtype(DType::F64).unwrap() - &statistics.hits;
                    assert!(max_abs(&differ.unwrap()) == 0.0 || dtype != DType::F32);
                }
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_repeats_its_bits_and_takes_views() {
        let device = crate::testing::cuda();
        for dtype in [DType::F32, DType::BF16] {
            let case = on(&Case::new(100, 40, 1000, 32).to_dtype(dtype), &device);
            let found = results(case.run());
            for (a, b) in found.iter().zip(results(case.run())) {
                assert_identical(a, &b);
            }
            let views = Case {
                hidden: strided(&case.hidden),
                weight: strided(&case.weight),
                ..case.clone()
            };
            for (a, b) in found.iter().zip(results(views.run())) {
                assert_close(a, &b, if dtype == DType::F32 { 2e-6 } else { 8e-3 });
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_gives_ignored_rows_no_gradient() {
        let device = crate::testing::cuda();
        let mut case = Case::new(6, 7, 33, 2).to_dtype(DType::F32);
        let expected = results(on(&case, &device).run());
        let mut hidden = values(&case.hidden);
        hidden[7..14].fill(f64::NAN);
        let hidden = Tensor::from_vec(hidden, (6, 7), &Device::Cpu).unwrap();
        case.hidden = hidden.to_dtype(DType::F32).unwrap();
        for (a, b) in expected.iter().zip(results(on(&case, &device).run())) {
            assert_identical(a, &b);
        }
        assert_eq!(max_abs(&expected[1].narrow(0, 1, 1).unwrap()), 0.0);
        case.targets.fill(IGNORE);
        let nothing = on(&case, &device).run();
        assert_eq!(nothing.count, 0);
        assert!(results(nothing).iter().all(|tensor| max_abs(tensor) == 0.0));
        let empty = on(&Case::new(0, 7, 33, 2).to_dtype(DType::F32), &device).run();
        assert!(results(empty).iter().all(|tensor| max_abs(tensor) == 0.0));
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_entropies_and_hits_of_extreme_distributions_are_right() {
        assert_extreme_rows(&crate::testing::cuda());
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_neither_overflows_nor_hides_a_nan() {
        let device = crate::testing::cuda();
        let case = Case::new(5, 7, 33, 2).options(None, 1e4).to_dtype(DType::F32);
        for tensor in results(on(&case, &device).run()) {
            assert!(values(&tensor).iter().all(|value| value.is_finite()));
        }
        let broken = Case { hidden: (&case.hidden * f64::NAN).unwrap(), ..case };
        assert!(values(&results(on(&broken, &device).run())[0])[0].is_nan());
    }
}
