use super::*;
use crate::testing::*;
use candle_core::DType;

const OFF: Options = Options { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0 };

/// Logits with ties, of which some are forbidden.
fn logits(count: usize, seed: u64) -> Vec<f64> {
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
        let options = Options { temperature: 0.0, ..OFF };
        assert_eq!(sample(&logits.get(1).unwrap(), &options, 0.9).unwrap(), 1);
    }
    let large = random(&[3, 20_011], 1);
    let expected = large.argmax(1).unwrap().to_vec1::<u32>().unwrap();
    assert_eq!(greedy(&large).unwrap().to_vec1::<u32>().unwrap(), expected);
}

#[test]
fn log_sum_exp_matches_its_definition() {
    for count in [1, 7, 300, 40_000] {
        let logits: Vec<f32> =
            values(&random(&[count], 1)).iter().map(|value| *value as f32 * 30.0).collect();
        let sum: f64 = logits.iter().map(|logit| f64::from(*logit).exp()).sum();
        assert!((log_sum_exp(&logits) - sum.ln()).abs() < 1e-13 * (1.0 + sum.ln().abs()));
    }
    for broken in [&[][..], &[f32::NEG_INFINITY; 3], &[0.0, f32::NAN], &[f32::INFINITY, 0.0]] {
        assert!(!log_sum_exp(broken).is_finite());
    }
}

#[test]
fn threads_do_not_change_the_choice() {
    let logits = logits(150_000, 5);
    let single: Vec<f32> = logits.iter().map(|logit| *logit as f32).collect();
    assert_independent_of_threads(|| {
        let mut workspace = Workspace::default();
        let ids = [OFF, Options { top_k: 50, top_p: 0.9, ..OFF }, Options { top_p: 0.9, ..OFF }]
            .map(|options| f64::from(workspace.draw(&logits, &options, 0.37)));
        let sums = [log_sum_exp(&single)];
        vec![
            Tensor::new(&ids, &Device::Cpu).unwrap(),
            Tensor::new(&workspace.weights[..], &Device::Cpu).unwrap(),
            Tensor::new(&sums, &Device::Cpu).unwrap(),
        ]
    });
}

#[test]
fn wrong_arguments_are_errors() {
    let logits = random(&[5], 1);
    for (options, uniform, text) in [
        (Options { temperature: -1.0, ..OFF }, 0.5, "temperature is -1, expected 0 or more"),
        (Options { top_p: 0.0, ..OFF }, 0.5, "top_p is 0, expected more than 0"),
        (Options { min_p: f64::NAN, ..OFF }, 0.5, "min_p is NaN, expected 0 to 1"),
        (OFF, 1.0, "uniform is 1, expected at least 0 and less than 1"),
    ] {
        let wrong = message(sample(&logits, &options, uniform));
        assert!(wrong.contains(text), "{wrong}");
    }
    let wrong = message(sample(&random(&[5, 2], 1), &OFF, 0.5));
    assert!(wrong.contains("logits has shape [5, 2]"), "{wrong}");
    let wrong = message(greedy(&random(&[5, 0], 1)));
    assert!(wrong.contains("no columns"), "{wrong}");
}

#[cfg(feature = "cuda")]
#[test]
fn cuda_chooses_what_the_cpu_does() {
    let Some(device) = cuda() else { return };
    let no = f32::NEG_INFINITY;
    let rows = [[1.0, 3.0, 3.0, 2.0], [no, -5.0, f32::NAN, no], [-0.0, 0.0, no, no], [no; 4]];
    let small = Tensor::new(&rows, &device).unwrap();
    let ties =
        [150_001, 4096, 4100, 1].map(|count| Tensor::new(&logits(count, 3)[..], &Device::Cpu));
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
        for ties in &ties {
            let ties = ties.as_ref().unwrap().to_dtype(dtype).unwrap();
            let there = ties.to_device(&device).unwrap();
            for temperature in [0.0, 0.8] {
                let options = Options { temperature, top_k: 50, top_p: 0.9, min_p: 0.0 };
                let found = sample(&there, &options, 0.37).unwrap();
                assert_eq!(found, sample(&ties, &options, 0.37).unwrap());
            }
        }
    }
    assert_eq!(greedy(&small.narrow(0, 0, 0).unwrap()).unwrap().dims(), &[0]);
}
