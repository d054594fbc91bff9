use super::*;

fn score(policy: f64, reference: f64, tokens: usize) -> Score {
    Score { policy, reference, tokens, prompt: -3.5, prompt_tokens: 4 }
}

fn objectives() -> Vec<Objective> {
    let dpo =
        |loss, label_smoothing| Objective::Dpo(DpoOptions { beta: 0.3, loss, label_smoothing });
    vec![
        dpo(DpoLoss::Sigmoid, 0.0),
        dpo(DpoLoss::Hinge, 0.0),
        dpo(DpoLoss::Ipo, 0.0),
        dpo(DpoLoss::Robust, 0.2),
        dpo(DpoLoss::SigmoidNorm, 0.0),
        Objective::SimPo(SimPoOptions { beta: 2.0, simpo_gamma: 0.5, label_smoothing: 0.1 }),
        Objective::Orpo(OrpoOptions { beta: 0.7 }),
        Objective::Kto(KtoOptions { beta: 0.3, desirable_weight: 1.5, undesirable_weight: 0.5 }),
    ]
}

fn answers(objective: &Objective) -> Vec<(Role, Score)> {
    let scores =
        [score(-3.0, -4.0, 5), score(-9.0, -7.5, 8), score(-2.5, -2.0, 3), score(-0.4, -0.9, 2)];
    let roles = match objective.samples() {
        SampleKind::Labelled => {
            [Role::Desirable, Role::Undesirable, Role::Undesirable, Role::Desirable]
        }
        _ => [Role::Chosen, Role::Rejected, Role::Chosen, Role::Rejected],
    };
    roles.into_iter().zip(scores).collect()
}

const TOTALS: Totals = Totals { samples: 3, learned_tokens: 20, kl: 0.25 };

#[test]
fn slopes_are_the_derivatives_of_losses() {
    for objective in objectives() {
        let answers = answers(&objective);
        let compared = objective.compare(&answers, &TOTALS).unwrap();
        assert_eq!(compared.slopes.len(), answers.len());
        let moved = |index: usize, prompt: bool, step: f64| {
            let mut answers = answers.clone();
            let score = &mut answers[index].1;
            *(if prompt { &mut score.prompt } else { &mut score.policy }) += step;
            objective.compare(&answers, &TOTALS).unwrap().loss
        };
        for (index, slopes) in compared.slopes.iter().enumerate() {
            for (prompt, slope) in [(false, slopes.answer), (true, slopes.prompt)] {
                let expected = (moved(index, prompt, 1e-5) - moved(index, prompt, -1e-5)) / 2e-5;
                let error = (slope - expected).abs();
                assert!(error < 1e-9, "{objective:?} {index}: {slope} is not {expected}");
            }
        }
    }
}

#[test]
fn extreme_scores_give_finite_losses() {
    let extremes = [0.0, -1e-30, -1e-9, -1e3, -1e6];
    for objective in objectives() {
        for chosen in extremes {
            for rejected in extremes {
                let mut answers = answers(&objective);
                (answers[0].1.policy, answers[1].1.policy) = (chosen, rejected);
                let compared = objective.compare(&answers, &TOTALS).unwrap();
                assert!(compared.loss.is_finite(), "{objective:?} {chosen} {rejected}");
                for slopes in &compared.slopes {
                    assert!(slopes.answer.is_finite() && slopes.prompt.is_finite());
                }
                assert!(compared.metrics.means().values().all(|mean| mean.is_finite()));
            }
        }
    }
}

#[test]
fn what_is_no_number_makes_the_loss_none() {
    for objective in objectives() {
        for index in 0..2 {
            let mut answers = answers(&objective);
            answers[index].1.policy = f64::NAN;
            let compared = objective.compare(&answers, &TOTALS).unwrap();
            assert!(compared.loss.is_nan(), "{objective:?} {index}");
        }
    }
    let kto = Objective::Kto(KtoOptions::default());
    let totals = Totals { kl: f64::NAN, ..TOTALS };
    assert!(kto.compare(&answers(&kto), &totals).unwrap().loss.is_nan());
}

#[test]
fn what_cannot_work_is_named() {
    let message = |objective: Objective| objective.validate().unwrap_err().to_string();
    let dpo = DpoOptions::default();
    for beta in [0.0, -1.0, f64::NAN] {
        assert!(message(Objective::Dpo(DpoOptions { beta, ..dpo })).contains("beta"));
    }
    let smoothed = DpoOptions { label_smoothing: 0.1, ..dpo };
    assert!(message(Objective::Dpo(smoothed)).contains("is for the loss robust"));
    let robust = DpoOptions { loss: DpoLoss::Robust, label_smoothing: 0.5, ..dpo };
    assert!(message(Objective::Dpo(robust)).contains("below 0.5"));
    for objective in objectives() {
        objective.validate().unwrap();
        let text = objective.check_samples(SampleKind::Plain).unwrap_err().to_string();
        assert!(
            text.contains(objective.name()) && text.contains("sft and distill learn"),
            "{text}"
        );
        objective.check_samples(objective.samples()).unwrap();
    }
    assert!(
        Objective::Sft.check_samples(SampleKind::Pair).unwrap_err().to_string().contains("dpo")
    );
    let dpo = Objective::Dpo(dpo);
    let alone = [(Role::Chosen, Score::default())];
    assert!(dpo.compare(&alone, &TOTALS).unwrap_err().to_string().contains("without its pair"));
}

#[test]
fn sums_of_metrics_pass_from_rank_to_rank() {
    let mut sums = MetricSums::default();
    assert_eq!(MetricSums::from_bytes(&sums.to_bytes()).unwrap(), sums);
    sums.add_sum("rewards/margins", 0.1 + 0.2, 7.0);
    sums.add("größe", -f64::INFINITY);
    let bytes = sums.to_bytes();
    assert_eq!(MetricSums::from_bytes(&bytes).unwrap(), sums);
    for length in 1..bytes.len() {
        let cut = MetricSums::from_bytes(&bytes[..length]);
        assert!(cut.is_none_or(|cut| cut != sums), "{length}");
    }
}
