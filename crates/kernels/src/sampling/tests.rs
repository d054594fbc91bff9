use super::*;
use crate::testing::*;
use candle_core::DType;

pub(crate) const OFF: Options = Options { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

/// Logits with ties, of which some are forbidden.
pub(crate) fn logits(count: usize, seed: u64) -> Vec<f64> {
    let numbers = values(&random(&[2, count], seed));
    let (forbidden, values) = numbers.split_at(count);
    let value = |(forbidden, value): (&f64, &f64)| {
        if *forbidden < -0.9 { f64::NEG_INFINITY } else { (value * 20.0).round() / 4.0 }
    };
    let mut logits: Vec<f64> = forbidden.iter().zip(values).map(value).collect();
    logits[0] = 0.5;
    logits
}

/// Probabilities after top-k, top-p and min-p, as the logits processors of transformers define them:
/// each sets what it removes to negative infinity, on a full ascending sort.
fn reference(logits: &[f64], options: &Options) -> Vec<f64> {
    let mut scores: Vec<f64> = logits.iter().map(|logit| logit / options.temperature).collect();
    let softmax = |scores: &[f64]| -> Vec<f64> {
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|score| (score - largest).exp()).sum();
        scores.iter().map(|score| (score - largest).exp() / sum).collect()
    };
    if options.top_k > 0 {
        let mut sorted = scores.clone();
        sorted.sort_by(|a, b| b.total_cmp(a));
        let last = sorted[options.top_k.min(sorted.len()) - 1];
        scores.iter_mut().filter(|score| **score < last).for_each(|s| *s = f64::NEG_INFINITY);
    }
    if options.top_p < 1.0 {
        let probabilities = softmax(&scores);
        let mut ids: Vec<usize> = (0..scores.len()).collect();
        // Ascending; of equals the highest id goes first, so the lowest stays longest.
        ids.sort_by(|&a, &b| probabilities[a].total_cmp(&probabilities[b]).then(b.cmp(&a)));
        let mut cumulative = 0.0;
        for &id in &ids[..ids.len() - 1] {
            cumulative += probabilities[id];
            if cumulative <= 1.0 - options.top_p {
                scores[id] = f64::NEG_INFINITY;
            }
        }
    }
    if options.min_p > 0.0 {
        let probabilities = softmax(&scores);
        let largest = probabilities.iter().copied().fold(0.0, f64::max);
        for (score, probability) in scores.iter_mut().zip(probabilities) {
            if probability < options.min_p * largest {
                *score = f64::NEG_INFINITY;
            }
        }
    }
    softmax(&scores)
}

fn kept(workspace: &mut Workspace, logits: &[f64], options: &Options) -> Vec<f64> {
    workspace.weigh(logits, options.temperature);
    let mut weights = workspace.weights.clone();
    if workspace.truncate(options) {
        weights.fill(0.0);
        for candidate in &workspace.candidates {
            weights[candidate.id as usize] = candidate.weight;
        }
    }
    let mass: f64 = weights.iter().sum();
    weights.iter().map(|weight| weight / mass).collect()
}

#[test]
fn truncation_keeps_what_a_full_sort_keeps() {
    let mut workspace = Workspace::default();
    let uniform = values(&random(&[600, 4], 7));
    for (round, uniform) in uniform.chunks(4).enumerate() {
        let [a, b, c, d] = [0, 1, 2, 3].map(|index| 0.5 * (uniform[index] + 1.0));
        let count = [1, 2, 5, 40, 700, 3000, 20_000][round % 7];
        let logits = logits(count, round as u64);
        let options = Options {
            // Hot enough that the nucleus of the larger ones is longer than one head.
            temperature: 0.3 + a * 30.0,
            top_k: if round % 3 == 0 { 0 } else { 1 + (b * 60.0) as usize },
            top_p: if round % 2 == 0 { 1.0 } else { 0.01 + 0.98 * c },
            min_p: if round % 5 < 3 { 0.0 } else { d },
        };
        let expected = reference(&logits, &options);
        let found = kept(&mut workspace, &logits, &options);
        for (id, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let close = (found - expected).abs() <= 1e-12;
            assert!(close, "{options:?}, token {id} of {count}: {found} is not {expected}");
        }
    }
}

#[test]
fn the_draw_inverts_the_cumulative_distribution() {
    let mut workspace = Workspace::default();
    let numbers = values(&random(&[300], 3));
    for options in [
        OFF,
        Options { temperature: 3.0, ..OFF },
        Options { temperature: 5.0, top_k: 40, ..OFF },
        Options { temperature: 9.0, top_p: 0.7, ..OFF },
        Options { temperature: 4.0, min_p: 0.2, ..OFF },
    ] {
        let logits = logits(5000, 11);
        let probabilities = reference(&logits, &options);
        for number in &numbers {
            let uniform = 0.5 * (number + 1.0);
            let id = workspace.draw(&logits, &options, uniform) as usize;
            let before: f64 = probabilities[..id].iter().sum();
            let after = before + probabilities[id];
            let holds = before - 1e-12 <= uniform && uniform <= after + 1e-12;
            assert!(holds && probabilities[id] > 0.0, "{options:?}: {id} for {uniform}");
        }
    }
}

#[test]
fn the_most_likely_token_always_remains() {
    let options = Options { top_k: 1, top_p: 1e-300, min_p: 1.0, ..OFF };
    let logits = [-3e38, 1.0, 2.0, f64::NEG_INFINITY, 3e38, 0.0, f64::NAN];
    for temperature in [0.0, f64::MIN_POSITIVE, 1e-3, 1.0, 1e30] {
        for uniform in [0.0, 0.5, 1.0 - 1e-16] {
            let options = Options { temperature, ..options };
            assert_eq!(Workspace::default().draw(&logits, &options, uniform), 4);
        }
    }
    assert_eq!(Workspace::default().draw(&[f64::NAN; 3], &OFF, 0.5), 0);
    assert_eq!(Workspace::default().draw(&[], &OFF, 0.5), 0);
}

#[test]
fn greedy_takes_the_first_largest_of_every_row_in_every_dtype() {
    let no = f32::NEG_INFINITY;
    let rows = [[1.0, 3.0, 3.0, 2.0], [no, -5.0, f32::NAN, no], [-0.0, 0.0, no, no], [no; 4]];
    let logits = Tensor::new(&rows, &Device::Cpu).unwrap();
    for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
        let logits = logits.to_dtype(dtype).unwrap();
        for logits in [logits.clone(), strided(&logits)] {
            assert_eq!(greedy(&logits).unwrap().to_vec1::<u32>().unwrap(), [1, 1, 0, 0]);
        }
        let row = logits.get(0).unwrap();
        let options = Options { temperature: 0.0, ..OFF };
        assert_eq!(id(choose_one(&row, &[], &options, 0.9)), 1);
    }
    let large = random(&[3, 20_011], 1);
    let expected = large.argmax(1).unwrap().to_vec1::<u32>().unwrap();
    assert_eq!(greedy(&large).unwrap().to_vec1::<u32>().unwrap(), expected);
}

#[test]
fn log_sum_exp_matches_its_definition() {
    for count in [1, 7, 300, 40_000] {
        let logits: Vec<f64> =
            values(&random(&[count], 1)).iter().map(|value| value * 30.0).collect();
        let sum: f64 = logits.iter().map(|logit| logit.exp()).sum();
        assert!((cpu::log_sum_exp(&logits) - sum.ln()).abs() < 1e-13 * (1.0 + sum.ln().abs()));
    }
    for broken in [&[][..], &[f64::NEG_INFINITY; 3], &[0.0, f64::NAN], &[f64::INFINITY, 0.0]] {
        assert!(!cpu::log_sum_exp(broken).is_finite());
    }
}

#[test]
fn threads_do_not_change_the_choice() {
    let logits = Tensor::from_vec(logits(300_000, 5), (2, 150_000), &Device::Cpu).unwrap();
    for options in [OFF, Options { top_k: 50, top_p: 0.9, ..OFF }, Options { top_p: 0.9, ..OFF }] {
        assert_independent_of_threads(|| {
            let draw = Draw { adjustments: Vec::new(), options, uniform: 0.37 };
            let found = choose(&logits, &[draw.clone(), Draw { uniform: 0.81, ..draw }]).unwrap();
            let numbers = found.into_iter().flat_map(|choice| match choice {
                Choice::Token { id, logprob } => [f64::from(id), logprob],
                other => panic!("{other:?}"),
            });
            vec![Tensor::from_iter(numbers, &Device::Cpu).unwrap()]
        });
    }
}

/// The choice of one position, whose logits are `(v)`.
pub(crate) fn choose_one(
    logits: &Tensor,
    adjustments: &[Adjustment],
    options: &Options,
    uniform: f64,
) -> Choice {
    let draw = Draw { adjustments: adjustments.to_vec(), options: *options, uniform };
    let mut found = choose(&logits.unsqueeze(0).unwrap(), &[draw]).unwrap();
    assert_eq!(found.len(), 1);
    found.remove(0)
}

/// Asserts that many rows, each drawn from in its own way, give what each gives alone, on this device.
pub(crate) fn assert_rows(device: &Device, rows: usize, count: usize, dtype: DType) {
    let mut numbers: Vec<f64> = (0..rows).flat_map(|row| logits(count, 40 + row as u64)).collect();
    // One row without a distribution among the others, and one that has a wrong number.
    numbers[count..2 * count].fill(f64::NEG_INFINITY);
    numbers[3 * count - 1] = f64::NAN;
    let all = Tensor::from_vec(numbers, (rows, count), &Device::Cpu).unwrap();
    let all = there(&all.to_dtype(dtype).unwrap(), device);
    let options = many_options();
    let draws: Vec<Draw> = (0..rows)
        .map(|row| Draw {
            adjustments: if row % 3 == 0 { adjustments(count) } else { Vec::new() },
            options: options[(row * 7 + 40) % options.len()],
            uniform: (0.618 * row as f64).fract(),
        })
        .collect();
    let found = choose(&all, &draws).unwrap();
    assert_eq!(found.len(), rows);
    assert_eq!(found[1], Choice::Nothing);
    assert!(
        matches!(found[2], Choice::Broken { id, logit } if id as usize == count - 1 && logit.is_nan())
    );
    for (row, found) in found.into_iter().enumerate().filter(|(row, _)| *row != 2) {
        let Draw { adjustments, options, uniform } = &draws[row];
        let alone = choose_one(&all.get(row).unwrap(), adjustments, options, *uniform);
        assert_eq!(found, alone, "row {row} of {rows} x {count}: {options:?}");
    }
}

#[test]
fn rows_give_what_they_give_alone() {
    assert_rows(&Device::Cpu, 37, 301, DType::F32);
    assert_rows(&Device::Cpu, 5, 20_011, DType::BF16);
    let nothing = Tensor::zeros((0, 7), DType::F32, &Device::Cpu).unwrap();
    assert_eq!(choose(&nothing, &[]).unwrap(), []);
}

#[test]
fn wrong_arguments_are_errors() {
    let logits = random(&[1, 5], 1);
    let one = || Draw { adjustments: Vec::new(), options: OFF, uniform: 0.5 };
    for (options, uniform, text) in [
        (Options { temperature: -1.0, ..OFF }, 0.5, "temperature is -1, expected 0 or more"),
        (Options { top_p: 0.0, ..OFF }, 0.5, "top_p is 0, expected more than 0"),
        (Options { min_p: f64::NAN, ..OFF }, 0.5, "min_p is NaN, expected 0 to 1"),
        (OFF, 1.0, "uniform is 1, expected at least 0 and less than 1"),
    ] {
        let wrong = message(choose(&logits, &[Draw { options, uniform, ..one() }]));
        assert!(wrong.contains(text), "{wrong}");
    }
    let wrong = message(choose(&random(&[5], 1), &[one()]));
    assert!(wrong.contains("logits has shape [5]"), "{wrong}");
    let wrong = message(choose(&random(&[5, 2], 1), &[one()]));
    assert!(wrong.contains("1 draws, expected one for each of 5 rows"), "{wrong}");
    let wrong = message(greedy(&random(&[5, 0], 1)));
    assert!(wrong.contains("no columns"), "{wrong}");
    for (adjustments, text) in [
        (vec![Adjustment::of(5)], "for token 5, expected ascending ids below 5"),
        (vec![Adjustment::of(2), Adjustment::of(2)], "for token 2, expected ascending ids"),
        (vec![Adjustment { penalty: 0.0, ..Adjustment::of(1) }], "a penalty above 0"),
        (vec![Adjustment { bias: f64::NAN, ..Adjustment::of(1) }], "finite numbers"),
    ] {
        let wrong = message(choose(&logits, &[Draw { adjustments, ..one() }]));
        assert!(wrong.contains(text), "{wrong}");
    }
}

fn id(choice: Choice) -> u32 {
    match choice {
        Choice::Token { id, .. } => id,
        other => panic!("{other:?}"),
    }
}

/// Some tokens with a bias, some that are repeated, and some with a penalty, in numbers that keep logits
/// exact in every dtype.
pub(crate) fn adjustments(count: usize) -> Vec<Adjustment> {
    let every = 1 + count / 50;
    let adjustment = |id: usize| Adjustment {
        bias: [0.0, 1.5, -40.0][id % 3],
        penalty: [1.0, 2.0][id % 2],
        subtracted: [0.5, 0.0, -0.25, 2.0][id % 4],
        ..Adjustment::of(id as u32)
    };
    (0..count).step_by(every).map(adjustment).collect()
}

/// What may be drawn from logits, by the CPU.
pub(crate) struct Expected {
    /// Below the largest.
    logits: Vec<f64>,
    log_sum: f64,
    /// Probabilities, 0 for what truncation leaves out, and their sums up to and with each token.
    probabilities: Vec<f64>,
    sums: Vec<f64>,
}

impl Expected {
    pub(crate) fn of(logits: &[f64], adjustments: &[Adjustment], options: &Options) -> Expected {
        let mut scores = logits.to_vec();
        adjust(&mut scores, adjustments);
        // As a GPU holds them.
        scores.iter_mut().for_each(|score| *score = f64::from(*score as f32));
        let probabilities = if options.temperature == 0.0 {
            let chosen = cpu::argmax(&scores) as usize;
            (0..scores.len()).map(|id| f64::from(u8::from(id == chosen))).collect()
        } else {
            kept(&mut Workspace::default(), &scores, options)
        };
        let mut sum = 0.0;
        let sums = probabilities.iter().map(|probability| {
            sum += probability;
            sum
        });
        let sums = sums.collect();
        let largest = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let logits: Vec<f64> = logits.iter().map(|logit| logit - largest).collect();
        let log_sum = cpu::log_sum_exp(&logits);
        Expected { logits, log_sum, probabilities, sums }
    }

    /// Asserts that the number chooses this token, up to a rounding of the sums, and that truncation keeps it. The other
    /// tolerance is that of its log probability.
    #[track_caller]
    pub(crate) fn assert(
        &self,
        choice: Choice,
        uniform: f64,
        [tolerance, of_logprob]: [f64; 2],
        what: &str,
    ) {
        let Choice::Token { id, logprob } = choice else { panic!("{what}: {choice:?}") };
        let id = id as usize;
        let (probability, after) = (self.probabilities[id], self.sums[id]);
        let before = after - probability;
        let holds = before - tolerance <= uniform && uniform <= after + tolerance;
        assert!(holds && probability > 0.0, "{what}: {id} for {uniform}: {before} to {after}");
        let expected = self.logits[id] - self.log_sum;
        let error = (logprob - expected).abs();
        assert!(
            error <= of_logprob * (1.0 + expected.abs()),
            "{what}: {logprob} is not {expected}"
        );
    }
}

/// Each truncation alone and with others, from cold to hot.
pub(crate) fn many_options() -> Vec<Options> {
    let mut all = Vec::new();
    for (index, temperature) in [0.1, 0.7, 1.0, 2.0, 5.0].into_iter().enumerate() {
        let hot = Options { temperature, ..OFF };
        let top_k = [1, 3, 50, 700, 20_000][index];
        let top_p = [0.01, 0.5, 0.9, 0.95, 0.999][index];
        let min_p = [1.0, 0.5, 0.05, 0.1, 1e-3][index];
        all.extend([
            hot,
            Options { top_k, ..hot },
            Options { top_p, ..hot },
            Options { min_p, ..hot },
            Options { top_k, top_p, ..hot },
            Options { top_k, top_p, min_p, ..hot },
            Options { top_k: 40, top_p: 0.8, ..hot },
            Options { top_p, min_p: 0.02, ..hot },
        ]);
    }
    all.push(Options { temperature: 0.0, ..OFF });
    all
}

#[test]
fn choices_are_draws_from_adjusted_logits_with_the_probability_of_the_raw() {
    for count in [1, 2, 33, 1000] {
        let logits = logits(count, 4);
        let tensor = Tensor::new(&logits[..], &Device::Cpu).unwrap();
        for adjustments in [Vec::new(), adjustments(count)] {
            for options in many_options() {
                let expected = Expected::of(&logits, &adjustments, &options);
                for uniform in [0.0, 0.3, 0.999] {
                    let choice = choose_one(&tensor, &adjustments, &options, uniform);
                    expected.assert(choice, uniform, [1e-12; 2], &format!("{options:?}"));
                }
            }
        }
    }
}

#[test]
fn adjustments_follow_their_definition() {
    let all = Adjustment { id: 0, bias: 1.0, penalty: 2.0, subtracted: 0.5 };
    assert_eq!([3.0, -3.0, -1.0].map(|logit| all.apply(logit)), [1.5, -4.5, -0.5]);
    assert_eq!(Adjustment::of(3).apply(-7.25), -7.25);
    let adjustments = [Adjustment { bias: 9.0, ..Adjustment::of(0) }];
    let logits = Tensor::new(&[1.0, 2.0, 3.0], &Device::Cpu).unwrap();
    let options = Options { temperature: 0.0, ..OFF };
    let choice = choose_one(&logits, &adjustments, &options, 0.0);
    let Choice::Token { id, logprob } = choice else { panic!("{choice:?}") };
    let sum: f64 = [1.0, 2.0, 3.0].map(f64::exp).iter().sum();
    assert_eq!(id, 0);
    assert!((logprob - (1.0 - sum.ln())).abs() < 1e-12);
}

/// Asserts what is found of logits on this device that give no distribution.
pub(crate) fn assert_no_distribution(device: &Device) {
    let no = f32::NEG_INFINITY;
    for temperature in [0.0, 1.0] {
        let options = Options { temperature, top_p: 0.9, top_k: 2, ..OFF };
        let choice = |logits: &[f32], adjustments: &[Adjustment]| {
            let logits = there(&Tensor::new(logits, &Device::Cpu).unwrap(), device);
            choose_one(&logits, adjustments, &options, 0.5)
        };
        let bias = [Adjustment { bias: 3.0, ..Adjustment::of(0) }];
        let broken = |found, expected: u32, is: fn(f32) -> bool| match found {
            Choice::Broken { id, logit } => assert!(id == expected && is(logit), "{id}, {logit}"),
            other => panic!("{other:?}"),
        };
        broken(choice(&[1.0, f32::NAN, f32::INFINITY], &[]), 1, f32::is_nan);
        broken(choice(&[no, 0.0, f32::INFINITY, f32::NAN], &bias), 2, f32::is_infinite);
        let mut many = vec![0.0; 3000];
        many[2990] = f32::NAN;
        many[2070] = f32::INFINITY;
        broken(choice(&many, &bias), 2070, f32::is_infinite);
        assert_eq!(choice(&[no, no, no], &bias), Choice::Nothing);
        assert_eq!(choice(&[no; 2100], &[]), Choice::Nothing);
        assert_eq!(choice(&[], &[]), Choice::Nothing);
        // The largest differences that there are.
        let extreme = [no, f32::MIN, f32::MAX, -0.0];
        let pushed = [Adjustment { bias: 1e30, ..Adjustment::of(2) }];
        for adjustments in [&[][..], &pushed] {
            assert_eq!(choice(&extreme, adjustments), Choice::Token { id: 2, logprob: 0.0 });
        }
    }
}

/// Asserts that what is begun gives what is chosen at once, to the device and to the host, whatever follows.
fn assert_begun_is_chosen(device: &Device) {
    let (rows, count) = (5, 3001);
    let logits = random(&[rows, count], 11).to_dtype(DType::F32).unwrap();
    let draw = |row: usize| Draw {
        adjustments: Vec::new(),
        options: Options { temperature: row as f64, ..OFF },
        uniform: 0.2 * row as f64,
    };
    let draws: Vec<Draw> = (0..rows).map(draw).collect();
    // The second has none.
    let none = Tensor::full(f32::INFINITY, (1, count), &Device::Cpu).unwrap();
    let logits = logits.slice_assign(&[1..2, 0..count], &none).unwrap();
    let logits = there(&logits, device);
    let expected = choose(&logits, &draws).unwrap();
    let downloads = Downloads::new(device).unwrap();
    for _ in 0..3 {
        let choices = begin(&logits, &draws, Some(&downloads)).unwrap();
        let later = begin(&logits, &draws, Some(&downloads)).unwrap();
        let ids = choices.ids().unwrap();
        let square = Tensor::ones((1024, 1024), DType::F32, device).unwrap();
        let product = square.matmul(&square).unwrap();
        assert_eq!(choices.wait().unwrap(), expected);
        assert_eq!(later.wait().unwrap(), expected);
        let ids = ids.force_contiguous().unwrap().to_vec1::<u32>().unwrap();
        for (id, choice) in ids.iter().zip(&expected) {
            match choice {
                Choice::Token { id: chosen, .. } => assert_eq!(id, chosen),
                _ => assert_eq!(*id, 0),
            }
        }
        assert_eq!(product.get(1023).unwrap().to_vec1::<f32>().unwrap(), [1024.0; 1024]);
    }
    assert!(matches!(expected[1], Choice::Broken { id: 0, .. }));
    let wrong = downloads.begin(&logits).map(drop).unwrap_err().to_string();
    assert!(wrong.contains("expected contiguous U32"), "{wrong}");
}

#[test]
fn what_is_begun_is_chosen() {
    assert_begun_is_chosen(&Device::Cpu);
}

#[test]
fn logits_without_a_distribution_are_told_apart() {
    assert_no_distribution(&Device::Cpu);
}

#[cfg(feature = "cuda")]
mod cuda {
    use super::*;

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_chooses_greedily_what_the_cpu_does() {
        let device = cuda();
        let no = f32::NEG_INFINITY;
        let rows = [[1.0, 3.0, 3.0, 2.0], [no, -5.0, f32::NAN, no], [-0.0, 0.0, no, no], [no; 4]];
        let small = Tensor::new(&rows, &device).unwrap();
        for dtype in [DType::F32, DType::BF16, DType::F16] {
            let small = small.to_dtype(dtype).unwrap();
            for logits in [small.clone(), strided(&small)] {
                assert_eq!(greedy(&logits).unwrap().to_vec1::<u32>().unwrap(), [1, 1, 0, 0]);
            }
            let large = random(&[3, 2, 20_011], 1).to_dtype(dtype).unwrap();
            let found = greedy(&large.to_device(&device).unwrap()).unwrap();
            assert_eq!((found.dims(), found.dtype()), (&[3, 2][..], DType::U32));
            let found = found.flatten_all().unwrap().to_vec1::<u32>().unwrap();
            let expected = greedy(&large).unwrap().flatten_all().unwrap().to_vec1::<u32>().unwrap();
            assert_eq!(found, expected);
        }
        assert_eq!(greedy(&small.narrow(0, 0, 0).unwrap()).unwrap().dims(), &[0]);
    }

    /// Sums are of whole units, of which the largest weight has 2^46 or more here. Those for log probabilities are of
    /// exponentials in f32.
    const TOLERANCES: [f64; 2] = [4e-9, 1e-6];

    /// Asserts choices from these logits, each made twice.
    fn assert_choices(device: &Device, logits: &Tensor, all: &[Options], uniforms: &[f64]) {
        let numbers = values(logits);
        let there = logits.to_device(device).unwrap();
        let before = values(&there.to_device(&Device::Cpu).unwrap());
        for adjustments in [Vec::new(), adjustments(numbers.len())] {
            for options in all {
                let expected = Expected::of(&numbers, &adjustments, options);
                for &uniform in uniforms {
                    let choice = choose_one(&there, &adjustments, options, uniform);
                    let adjusted = adjustments.len();
                    let (dtype, count) = (logits.dtype(), numbers.len());
                    let what = format!("{count} {dtype:?}, {adjusted} adjusted, {options:?}");
                    expected.assert(choice, uniform, TOLERANCES, &what);
                    assert_eq!(choice, choose_one(&there, &adjustments, options, uniform));
                }
            }
        }
        let after = values(&there.to_device(&Device::Cpu).unwrap());
        assert!(before.iter().zip(&after).all(|(a, b)| a.to_bits() == b.to_bits()));
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_draws_what_the_cpu_does() {
        let device = cuda();
        let all = many_options();
        let numbers = values(&random(&[20], 9));
        for (round, count) in [1, 2, 33, 1000, 1025, 32_003, 128_256].into_iter().enumerate() {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                let uniforms = [
                    0.0,
                    1e-12,
                    0.5 * (numbers[round] + 1.0),
                    0.5 * (numbers[10 + round] + 1.0),
                    1.0 - f64::EPSILON / 2.0,
                ];
                // With ties and what is forbidden.
                let ties = Tensor::new(&logits(count, round as u64)[..], &Device::Cpu).unwrap();
                assert_choices(&device, &ties.to_dtype(dtype).unwrap(), &all, &uniforms);
                let scattered = (random(&[count], 3 + round as u64) * 12.0).unwrap();
                let scattered = scattered.to_dtype(dtype).unwrap();
                assert_choices(&device, &scattered, &all, &uniforms[2..3]);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_draws_from_equal_and_from_very_many_logits() {
        let device = cuda();
        let options = [
            OFF,
            Options { top_k: 7, ..OFF },
            Options { top_p: 0.3, ..OFF },
            Options { top_k: 100, top_p: 0.75, min_p: 0.9, ..OFF },
        ];
        for count in [5, 4096, 128_256] {
            for value in [0.0f32, -0.0, 3.25, -1e30] {
                let equal = Tensor::full(value, count, &Device::Cpu).unwrap();
                assert_choices(&device, &equal, &options, &[0.0, 0.421, 0.9999]);
            }
        }
        // More than the blocks keep beside them.
        let many = (random(&[2_000_003], 5) * 9.0).unwrap().to_dtype(DType::BF16).unwrap();
        assert_choices(&device, &many, &options, &[0.618]);
        let wide = strided(&random(&[3001], 5).to_dtype(DType::F32).unwrap());
        assert_choices(&device, &wide, &options, &[0.618]);
        let part = random(&[5000], 6).to_dtype(DType::F16).unwrap().narrow(0, 7, 4321).unwrap();
        assert_choices(&device, &part, &options, &[0.618]);
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_rounds_adjusted_logits_as_the_cpu_does() {
        let device = cuda();
        let logits = random(&[4099], 8).to_dtype(DType::F32).unwrap();
        let numbers = values(&logits);
        let single = |value: f64| f64::from(value as f32);
        let adjustment = |id: u32| Adjustment {
            id,
            bias: single(0.1 * f64::from(id % 7)),
            penalty: single(1.1 + 0.01 * f64::from(id % 5)),
            subtracted: single(0.3 - 0.07 * f64::from(id % 11)),
        };
        let adjustments: Vec<Adjustment> = (0..4000).map(adjustment).collect();
        for options in many_options() {
            let expected = Expected::of(&numbers, &adjustments, &options);
            let there = logits.to_device(&device).unwrap();
            for uniform in [0.1, 0.37, 0.77] {
                let choice = choose_one(&there, &adjustments, &options, uniform);
                expected.assert(choice, uniform, TOLERANCES, &format!("{options:?}"));
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_draws_from_rows_what_each_gives_alone() {
        let device = cuda();
        for (rows, count) in [(3, 1000), (40, 5003), (64, 128_256), (133, 33), (300, 32_003)] {
            for dtype in [DType::F32, DType::BF16, DType::F16] {
                assert_rows(&device, rows, count, dtype);
            }
        }
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_what_is_begun_is_chosen() {
        let device = cuda();
        assert_begun_is_chosen(&device);
    }

    #[test]
    #[ignore = "needs an NVIDIA GPU"]
    fn cuda_tells_apart_logits_without_a_distribution() {
        let device = cuda();
        assert_no_distribution(&device);
    }
}
