//! Objectives that compare answers, against TRL, and distillation, against PyTorch: losses, gradients, the steps that
//! follow; that how batches are laid out, put together and interrupted changes nothing; and what a model writes as a
//! teacher.

use crate::common::device;
use candle_core::{DType, Device, Tensor};
use metal_candle::adapter::Adapter;
use metal_candle::autograd::ParameterId;
use metal_candle::data::{
    BatchOptions, Batcher, DataOptions, DataSource, Dataset, Example, Record, Role, Sample,
    SampleKind, Teacher, read_records, tokenize,
};
use metal_candle::model::Model;
use metal_candle::text::Tokenizer;
use metal_candle::train::objectives::{
    DistillOptions, DpoLoss, DpoOptions, KtoOptions, OrpoOptions, SimPoOptions,
};
use metal_candle::train::{
    ActivationPlacement, AdamWOptions, LearningRate, Metric, Objective, Optimizer, Outcome,
    SgdOptions, TrainOptions, Trainer, evaluate, latest_checkpoint, write_teacher,
};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn folder() -> PathBuf {
    fixtures().join("models/llama")
}

pub fn expected() -> Value {
    let bytes = std::fs::read(folder().join("preferences.json")).unwrap();
    serde_json::from_slice(&bytes).unwrap()
}

fn tokens(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// A prompt and an answer, which is learned.
fn sequence(prompt: &Value, answer: &Value) -> Example {
    let (prompt, answer) = (tokens(prompt), tokens(answer));
    let trainable = (0..prompt.len() + answer.len()).map(|index| index >= prompt.len()).collect();
    Example { ids: [prompt, answer].concat(), trainable }
}

pub fn pairs(document: &Value) -> Vec<Sample> {
    let pair = |row: &Value| Sample::Pair {
        chosen: sequence(&row["prompt_ids"], &row["chosen_ids"]),
        rejected: sequence(&row["prompt_ids"], &row["rejected_ids"]),
    };
    document["pairs"].as_array().unwrap().iter().map(pair).collect()
}

fn labelled(document: &Value) -> Vec<Sample> {
    let answer = |row: &Value| Sample::Labelled {
        answer: sequence(&row["prompt_ids"], &row["completion_ids"]),
        desirable: row["label"].as_bool().unwrap(),
    };
    document["labelled"].as_array().unwrap().iter().map(answer).collect()
}

fn samples(document: &Value, objective: &Objective) -> Vec<Sample> {
    match objective.samples() {
        SampleKind::Labelled => labelled(document),
        _ => pairs(document),
    }
}

fn objective(variant: &Value) -> Objective {
    let number = |key: &str| variant[key].as_f64().unwrap_or(0.0);
    let beta = number("beta");
    match variant["objective"].as_str().unwrap() {
        "dpo" => Objective::Dpo(DpoOptions {
            beta,
            loss: serde_json::from_value(variant["loss_type"].clone()).unwrap(),
            label_smoothing: number("label_smoothing"),
        }),
        "simpo" => Objective::SimPo(SimPoOptions {
            beta,
            simpo_gamma: number("simpo_gamma"),
            label_smoothing: number("label_smoothing"),
        }),
        "orpo" => Objective::Orpo(OrpoOptions { beta }),
        "kto" => Objective::Kto(KtoOptions {
            beta,
            desirable_weight: number("desirable_weight"),
            undesirable_weight: number("undesirable_weight"),
        }),
        other => panic!("{other}"),
    }
}

fn model() -> Arc<Model> {
    Arc::new(Model::load(folder(), DType::F32, &device()).unwrap())
}

fn adapter(model: &Model) -> Arc<Adapter> {
    Arc::new(Adapter::load(model, folder().join("adapter")).unwrap())
}

fn batcher(samples: &[Sample], options: BatchOptions) -> Batcher {
    let options = BatchOptions { max_seq_length: 64, shuffle: false, ..options };
    Batcher::new(Arc::new(Dataset::from_samples(samples).unwrap()), options).unwrap()
}

/// All at once in so many examples.
fn of_size(batch_size: usize) -> BatchOptions {
    BatchOptions { batch_size, ..BatchOptions::default() }
}

fn options(objective: Objective, steps: u64, rate: f64, optimizer: Optimizer) -> TrainOptions {
    TrainOptions {
        objective,
        optimizer,
        clip_norm: None,
        report_every: 1,
        ..TrainOptions::new(steps, LearningRate::constant(rate).unwrap())
    }
}

/// The reports of a run.
fn run(
    adapter: &Arc<Adapter>,
    model: &Arc<Model>,
    batches: &Batcher,
    options: TrainOptions,
) -> Vec<Metric> {
    let output = tempfile::tempdir().unwrap();
    let mut trainer =
        Trainer::new(model, adapter, batches, options, output.path(), "llama").unwrap();
    let mut reports = Vec::new();
    let outcome = trainer
        .run(&mut |metric: &Metric| {
            if matches!(metric, Metric::Train { .. }) {
                reports.push(metric.clone());
            }
            Ok(())
        })
        .unwrap();
    assert_eq!(outcome.outcome, Outcome::Finished);
    reports
}

fn losses(reports: &[Metric]) -> Vec<f64> {
    let loss = |metric: &Metric| match metric {
        Metric::Train { loss, .. } => *loss,
        _ => f64::NAN,
    };
    reports.iter().map(loss).collect()
}

/// What a step of plain descent changed, by the names of PEFT's file.
fn gradients(batches: &Batcher, options: TrainOptions) -> (f64, HashMap<String, Tensor>) {
    const RATE: f64 = 100.0;
    let model = model();
    let adapter = adapter(&model);
    let before = adapter.parameters().values().to_device(&Device::Cpu).unwrap();
    let before = before.copy().unwrap();
    let optimizer = Optimizer::Sgd(SgdOptions { weight_decay: 0.0, ..SgdOptions::default() });
    let rate = LearningRate::constant(RATE).unwrap();
    let options = TrainOptions { learning_rate: rate, optimizer, steps: 1, ..options };
    let reports = run(&adapter, &model, batches, options);
    let after = adapter.parameters().values().to_device(&Device::Cpu).unwrap();
    let change = ((before - after).unwrap() / RATE).unwrap();
    let mut found = HashMap::new();
    for entry in adapter.parameters().entries() {
        // PEFT's orientation is the other one.
        let gradient = entry.of(&change).unwrap().t().unwrap().contiguous().unwrap();
        found.insert(format!("base_model.model.{}.weight", entry.name), gradient);
    }
    (losses(&reports)[0], found)
}

fn assert_near(found: &Tensor, expected: &Tensor, tolerance: f64, what: &str) {
    let of = |tensor: &Tensor| {
        let flat = tensor.flatten_all().unwrap().to_dtype(DType::F64).unwrap();
        flat.to_vec1::<f64>().unwrap()
    };
    let (found, expected) = (of(found), of(expected));
    let largest = expected.iter().fold(0f64, |most, value| most.max(value.abs()));
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(&expected) {
        let error = (found - expected).abs();
        assert!(error <= tolerance * largest, "{what}: {found} is not {expected} of {largest}");
    }
}

#[test]
fn losses_gradients_and_steps_are_those_of_trl() {
    let document = expected();
    let gradients_of_trl =
        candle_core::safetensors::load(folder().join("preferences.safetensors"), &Device::Cpu)
            .unwrap();
    let adamw = Optimizer::AdamW(AdamWOptions { weight_decay: 0.01, ..AdamWOptions::default() });
    for (name, variant) in document["variants"].as_object().unwrap() {
        let objective = objective(variant);
        let samples = samples(&document, &objective);
        let batches = batcher(&samples, of_size(samples.len() / 2));
        let losses_of_trl: Vec<f64> = variant["losses"]
            .as_array()
            .unwrap()
            .iter()
            .map(|loss| loss.as_f64().unwrap())
            .collect();

        let options = |steps| options(objective, steps, learning_rate(&document), adamw);
        let of_trl = (name.as_str(), losses_of_trl.as_slice(), &gradients_of_trl);
        assert_learns_the_same(&batches, options, of_trl);
    }
}

/// The first loss and gradients, and the losses of the steps that follow, are those of a fixture.
fn assert_learns_the_same(
    batches: &Batcher,
    options: impl Fn(u64) -> TrainOptions,
    (name, expected, expected_gradients): (&str, &[f64], &HashMap<String, Tensor>),
) {
    let (loss, found) = gradients(batches, options(1));
    let first = expected[0];
    assert!((loss - first).abs() <= 1e-5 * (1.0 + first.abs()), "{name}: {loss} is not {first}");
    let mut compared = 0;
    for (key, gradient) in expected_gradients {
        let Some(tensor) = key.strip_prefix(&format!("{name}.")) else { continue };
        assert_near(&found[tensor], gradient, 1e-4, key);
        compared += 1;
    }
    assert_eq!(compared, found.len(), "{name}");

    let model = model();
    let reports = run(&adapter(&model), &model, batches, options(expected.len() as u64));
    for (step, (loss, expected)) in losses(&reports).iter().zip(expected).enumerate() {
        let error = (loss - expected).abs();
        assert!(error <= 1e-3 * (1.0 + expected.abs()), "{name}, step {step}: {loss} {expected}");
    }
}

fn learning_rate(document: &Value) -> f64 {
    document["learning_rate"].as_f64().unwrap()
}

fn some_objectives() -> Vec<Objective> {
    vec![
        Objective::Dpo(DpoOptions { beta: 0.3, ..DpoOptions::default() }),
        Objective::Dpo(DpoOptions { loss: DpoLoss::Ipo, ..DpoOptions::default() }),
        Objective::Orpo(OrpoOptions::default()),
        Objective::Kto(KtoOptions::default()),
    ]
}

/// A pair's prompt once for both answers, pairs side by side in a row, and a step in several batches.
#[test]
fn the_layout_of_batches_changes_nothing() {
    let document = expected();
    for objective in some_objectives() {
        let samples = samples(&document, &objective);
        let options = options(objective, 1, 1.0, Optimizer::default());
        let apart = BatchOptions { share_prompts: false, ..of_size(samples.len()) };
        let (expected_loss, expected) = gradients(&batcher(&samples, apart), options.clone());
        let whole = of_size(samples.len());
        let packed = BatchOptions { packing: true, ..whole };
        let packed_apart = BatchOptions { packing: true, ..apart };
        let accumulated = TrainOptions { grad_accumulation: samples.len(), ..options.clone() };
        for (what, batching, options) in [
            ("shared", whole, options.clone()),
            ("packed", packed, options.clone()),
            ("packed apart", packed_apart, options.clone()),
            ("accumulated", of_size(1), accumulated.clone()),
            (
                "accumulated, checkpointed, offloaded",
                of_size(2),
                TrainOptions {
                    grad_checkpoint: true,
                    activation_placement: ActivationPlacement::Host,
                    ..accumulated
                },
            ),
        ] {
            // The estimate of KTO's divergence follows the order of answers, which packing changes.
            if batching.packing && objective.estimates_kl() {
                continue;
            }
            let (loss, found) = gradients(&batcher(&samples, batching), options);
            let error = (loss - expected_loss).abs();
            assert!(
                error <= 1e-5 * (1.0 + loss.abs()),
                "{objective:?} {what}: {loss} {expected_loss}"
            );
            for (key, gradient) in &expected {
                assert_near(&found[key], gradient, 2e-5, &format!("{objective:?} {what} {key}"));
            }
        }
    }
}

#[test]
fn shared_beginnings_are_read_once() {
    let document = expected();
    let samples = pairs(&document);
    let apart = BatchOptions { share_prompts: false, ..of_size(6) };
    let (shared, apart) = (batcher(&samples, of_size(6)), batcher(&samples, apart));
    let of = |batcher: &Batcher| batcher.batch(&batcher.epoch(0)[0]).unwrap();
    let (shared, apart) = (of(&shared), of(&apart));
    // Prompts of 1, 3, 4, 6, 9 and 12 tokens: the last of each is read with each answer.
    assert_eq!(apart.tokens - shared.tokens, 2 + 3 + 5 + 8 + 11);
    assert_eq!(apart.target_tokens, shared.target_tokens);
    assert!(apart.shared.is_none());
    let beginnings = shared.shared.as_ref().unwrap();
    assert_eq!(beginnings.source.len(), shared.rows * beginnings.length);
    // What is read of each place is what was computed of it.
    for place in shared.answers.iter().flat_map(|answer| &answer.places) {
        let result = beginnings.result[*place as usize] as usize;
        assert_eq!(beginnings.source[result], *place);
    }
    let roles: Vec<Role> = shared.answers.iter().map(|answer| answer.role).collect();
    assert_eq!(roles, [Role::Chosen, Role::Rejected].repeat(6));
    for (with, without) in shared.answers.iter().zip(&apart.answers) {
        let targets = |batch: &metal_candle::data::Batch, places: &[u32]| {
            places.iter().map(|place| batch.targets[*place as usize]).collect::<Vec<_>>()
        };
        assert_eq!(targets(&shared, &with.places), targets(&apart, &without.places));
        let positions = |batch: &metal_candle::data::Batch, places: &[u32]| {
            places.iter().map(|place| batch.positions[*place as usize]).collect::<Vec<_>>()
        };
        assert_eq!(positions(&shared, &with.places), positions(&apart, &without.places));
    }
}

/// The adapter's bytes and the log of a run that is stopped after some of its steps and goes on.
fn resumed(
    output: &Path,
    stops: &[u64],
    precompute: bool,
    objective: Objective,
) -> (Vec<u8>, String) {
    let document = expected();
    let samples = samples(&document, &objective);
    let batches = BatchOptions { shuffle: true, max_seq_length: 64, seed: 3, ..of_size(2) };
    let dataset = Arc::new(Dataset::from_samples(&samples).unwrap());
    let batches = Batcher::new(dataset.clone(), batches).unwrap();
    let validation =
        Batcher::new(dataset, BatchOptions { max_seq_length: 64, ..of_size(4) }).unwrap();
    let options = TrainOptions {
        precompute_ref_log_probs: precompute,
        report_every: 3,
        eval_every: 4,
        save_every: 1,
        ..options(objective, 10, 2e-3, Optimizer::default())
    };
    let mut log = String::new();
    for stop_at in stops.iter().chain([&u64::MAX]) {
        let model = model();
        let adapter = adapter(&model);
        let stop = Arc::new(AtomicBool::new(false));
        let mut trainer =
            Trainer::new(&model, &adapter, &batches, options.clone(), output, "llama")
                .unwrap()
                .with_validation(&validation)
                .with_stop(stop.clone());
        let resumed = match log.is_empty() {
            true => None,
            false => trainer.resume_newest(output).unwrap(),
        };
        assert_eq!(resumed.is_some(), !log.is_empty());
        let outcome = trainer
            .run(&mut |metric: &Metric| {
                let kept = match metric {
                    Metric::Train { step, loss, metrics, gradient_norm, .. } => {
                        Some(format!("{step} {loss:?} {metrics:?} {gradient_norm:?}\n"))
                    }
                    Metric::Evaluation { step, loss, metrics, perplexity, .. } => {
                        assert!(perplexity.is_none());
                        Some(format!("{step} evaluation {loss:?} {metrics:?}\n"))
                    }
                    _ => None,
                };
                log.extend(kept);
                log.push_str(if log.is_empty() { "\n" } else { "" });
                if let Metric::Checkpoint { step, .. } = metric
                    && step >= stop_at
                {
                    stop.store(true, Ordering::Relaxed);
                }
                Ok(())
            })
            .unwrap();
        if *stop_at == u64::MAX {
            assert_eq!(outcome.outcome, Outcome::Finished);
        }
    }
    (std::fs::read(output.join("adapter_model.safetensors")).unwrap(), log.replace("\n\n", "\n"))
}

#[test]
fn a_stopped_run_of_dpo_goes_on_bit_for_bit() {
    let dpo = Objective::Dpo(DpoOptions::default());
    for (objective, precompute) in
        [(dpo, true), (dpo, false), (Objective::Kto(KtoOptions::default()), false)]
    {
        let whole = tempfile::tempdir().unwrap();
        let parts = tempfile::tempdir().unwrap();
        let (expected, log) = resumed(whole.path(), &[], precompute, objective);
        let (found, parted) = resumed(parts.path(), &[2, 5, 7], precompute, objective);
        assert!(expected == found, "{objective:?} {precompute}");
        let lines = |text: &str| {
            let mut lines: Vec<String> = text.trim().lines().map(String::from).collect();
            lines.dedup();
            lines
        };
        assert_eq!(lines(&log), lines(&parted));
        assert_eq!(
            whole.path().join("checkpoints/reference_logps.safetensors").is_file(),
            precompute
        );
    }
}

/// Slopes are multiplied for the backward pass, and gradients divided by as much; by less once one was infinite, which is no
/// divergence.
#[test]
fn preferences_are_learned_in_f16_as_in_f32() {
    let batches = batcher(&pairs(&expected()), of_size(2));
    let learn = |dtype, beta, steps| {
        let model = Arc::new(Model::load(folder(), dtype, &device()).unwrap());
        let adapter = adapter(&model);
        let objective = Objective::Dpo(DpoOptions { beta, ..DpoOptions::default() });
        let output = tempfile::tempdir().unwrap();
        let told = options(objective, steps, 1e-6, Optimizer::default());
        let told = TrainOptions { skip_limit: 1, ..told };
        let (mut norms, mut skipped) = (Vec::new(), 0);
        Trainer::new(&model, &adapter, &batches, told, output.path(), "llama")
            .unwrap()
            .run(&mut |metric: &Metric| {
                match metric {
                    Metric::Train { gradient_norm, .. } => norms.push(*gradient_norm),
                    Metric::Skipped { .. } => skipped += 1,
                    _ => {}
                }
                Ok(())
            })
            .unwrap();
        (norms, skipped)
    };
    let ((expected, _), (found, skipped)) = (learn(DType::F32, 0.1, 2), learn(DType::F16, 0.1, 2));
    assert_eq!(skipped, 0);
    for (found, expected) in found.iter().zip(&expected) {
        assert!((found / expected - 1.0).abs() < 0.02, "{found}, expected {expected}");
    }
    let (_, skipped) = learn(DType::F16, 1000.0, 12);
    assert!((1..4).contains(&skipped), "{skipped} skipped");
}

/// What is computed beforehand is what is computed in each step.
#[test]
fn references_can_be_computed_once() {
    let document = expected();
    let dpo = Objective::Dpo(DpoOptions::default());
    let samples = pairs(&document);
    let batches = batcher(&samples, of_size(3));
    let each = options(dpo, 6, 2e-3, Optimizer::default());
    let once = TrainOptions { precompute_ref_log_probs: true, ..each.clone() };
    let model = model();
    let [each, once] =
        [each, once].map(|options| losses(&run(&adapter(&model), &model, &batches, options)));
    for (each, once) in each.iter().zip(&once) {
        assert!((each - once).abs() < 1e-6, "{each} {once}");
    }
}

/// The reference of a run that goes on from an adapter is that adapter: its first loss is that of no difference.
#[test]
fn an_adapter_can_be_the_reference() {
    let document = expected();
    let model = model();
    let (policy, reference) = (adapter(&model), adapter(&model));
    let batches = batcher(&pairs(&document), of_size(3));
    let dpo = Objective::Dpo(DpoOptions::default());
    let output = tempfile::tempdir().unwrap();
    let options = options(dpo, 4, 2e-3, Optimizer::default());
    let trainer = Trainer::new(&model, &policy, &batches, options, output.path(), "llama").unwrap();
    let mut trainer = trainer.with_reference(reference.clone()).unwrap();
    let before = reference.parameters().fingerprint().unwrap();
    let mut found = Vec::new();
    trainer
        .run(&mut |metric: &Metric| {
            if let Metric::Train { loss, .. } = metric {
                found.push(*loss);
            }
            Ok(())
        })
        .unwrap();
    assert!((found[0] - 2f64.ln()).abs() < 1e-6, "{found:?}");
    assert!(found[3] < 0.6, "{found:?}");
    assert_eq!(reference.parameters().fingerprint().unwrap(), before);
}

/// Full fine-tuning keeps no second model: what the reference says is computed before the first step.
#[test]
fn every_weight_can_learn_preferences() {
    let document = expected();
    let model = Model::load(folder(), DType::F32, &device()).unwrap();
    let full = Arc::new(Adapter::full(&model).unwrap());
    let model = Arc::new(model.without_weights());
    let batches = batcher(&pairs(&document), of_size(3));
    let dpo = Objective::Dpo(DpoOptions::default());
    let mut told = options(dpo, 4, 1e-3, Optimizer::default());
    let output = tempfile::tempdir().unwrap();
    let refused = Trainer::new(&model, &full, &batches, told.clone(), output.path(), "llama")
        .unwrap()
        .run(&mut |_: &Metric| Ok(()))
        .unwrap_err()
        .to_string();
    assert!(refused.contains("precompute_ref_log_probs"), "{refused}");
    told.precompute_ref_log_probs = true;
    let found = losses(&run(&full, &model, &batches, told));
    assert!((found[0] - 2f64.ln()).abs() < 1e-6 && found[3] < found[0], "{found:?}");
}

/// A run of full fine-tuning from the newest checkpoint of the run in `from`, over a base that was `changed` or not.
fn every_weight(
    output: &Path,
    from: Option<&Path>,
    changed: bool,
    steps: u64,
) -> metal_candle::Result<Vec<u8>> {
    let model = Model::load(folder(), DType::F32, &device())?;
    let full = Arc::new(Adapter::full(&model)?);
    let model = Arc::new(model.without_weights());
    if changed {
        let weight = full.parameters().view(ParameterId(0))?.affine(2.0, 0.0)?;
        full.parameters().set(ParameterId(0), &weight)?;
    }
    let batches = batcher(&pairs(&expected()), of_size(3));
    let dpo = Objective::Dpo(DpoOptions::default());
    let mut told = TrainOptions {
        precompute_ref_log_probs: true,
        save_every: 1,
        ..options(dpo, 4, 1e-3, Optimizer::default())
    };
    let stop = Arc::new(AtomicBool::new(false));
    told.report_every = 1;
    let mut trainer =
        Trainer::new(&model, &full, &batches, told, output, "llama")?.with_stop(stop.clone());
    if let Some(run) = from {
        trainer.resume_newest(run)?;
    }
    trainer.run(&mut |metric: &Metric| {
        if matches!(metric, Metric::Train { step, .. } if *step == steps) {
            stop.store(true, Ordering::Relaxed);
        }
        Ok(())
    })?;
    Ok(std::fs::read(output.join("model.safetensors")).unwrap_or_default())
}

/// Otherwise the rest of an epoch would be of other batches.
#[test]
fn a_run_goes_on_with_prompts_that_are_shared_as_they_were() {
    let model = model();
    let adapter = adapter(&model);
    let output = tempfile::tempdir().unwrap();
    let told = options(Objective::Dpo(DpoOptions::default()), 2, 1e-3, Optimizer::default());
    let batches =
        |share_prompts| batcher(&pairs(&expected()), BatchOptions { share_prompts, ..of_size(2) });
    let (shared, apart) = (batches(true), batches(false));
    let trainer = |batches| {
        Trainer::new(&model, &adapter, batches, told.clone(), output.path(), "llama").unwrap()
    };
    trainer(&shared).run(&mut |_: &Metric| Ok(())).unwrap();
    let error = trainer(&apart).resume_newest(output.path()).unwrap_err().to_string();
    assert!(error.contains("share_prompts was true and is now false"), "{error}");
    assert!(trainer(&shared).resume_newest(output.path()).unwrap().is_some());

    // A checkpoint from before says nothing of it.
    let folder = latest_checkpoint(output.path()).unwrap().unwrap();
    let path = folder.join("trainer_state.json");
    let mut state: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    state["fingerprint"].as_object_mut().unwrap().remove("share_prompts").unwrap();
    std::fs::write(&path, state.to_string()).unwrap();
    assert!(trainer(&apart).resume_newest(output.path()).unwrap().is_some());
}

/// What was kept of the reference can be lost, as long as the base is there.
#[test]
fn what_the_reference_says_is_computed_again_in_full_fine_tuning() {
    const FILE: &str = "checkpoints/reference_logps.safetensors";
    let whole = tempfile::tempdir().unwrap();
    let expected = every_weight(whole.path(), None, false, u64::MAX).unwrap();
    let kept = std::fs::read(whole.path().join(FILE)).unwrap();
    let flipped = [&kept[..kept.len() - 1], &[kept[kept.len() - 1] ^ 1]].concat();
    for content in [None, Some(&kept[..kept.len() - 8]), Some(&flipped[..])] {
        let output = tempfile::tempdir().unwrap();
        every_weight(output.path(), None, false, 2).unwrap();
        let file = output.path().join(FILE);
        match content {
            Some(content) => std::fs::write(&file, content).unwrap(),
            None => std::fs::remove_file(&file).unwrap(),
        }
        // Not from another base, and then nothing is removed.
        let error = every_weight(output.path(), Some(output.path()), true, 4).unwrap_err();
        assert!(error.to_string().contains("what it was when the run began"), "{error}");
        let found = every_weight(output.path(), Some(output.path()), false, u64::MAX).unwrap();
        assert!(found == expected);
        assert!(std::fs::read(&file).unwrap() == kept);
    }
    // In another folder what lies beside the checkpoint is taken, whatever the base is now.
    let (first, second) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    every_weight(first.path(), None, false, 2).unwrap();
    let found = every_weight(second.path(), Some(first.path()), true, u64::MAX).unwrap();
    assert!(found == expected);
    assert!(std::fs::read(second.path().join(FILE)).unwrap() == kept);
}

#[test]
fn data_that_dont_fit_are_named() {
    let document = expected();
    let model = model();
    let adapter = adapter(&model);
    let output = tempfile::tempdir().unwrap();
    let kto = Objective::Kto(KtoOptions::default());
    let refuse = |samples: &[Sample], batching: BatchOptions, objective: Objective| {
        let batches = batcher(samples, batching);
        let told = options(objective, 1, 1e-3, Optimizer::default());
        let trainer = Trainer::new(&model, &adapter, &batches, told, output.path(), "llama");
        let refused = trainer.and_then(|mut trainer| trainer.run(&mut |_: &Metric| Ok(())));
        refused.unwrap_err().to_string()
    };
    let message = refuse(&pairs(&document), of_size(2), Objective::Sft);
    assert!(message.contains("preference pairs") && message.contains("dpo"), "{message}");
    let message = refuse(&pairs(&document), of_size(2), kto);
    assert!(message.contains("labelled answers"), "{message}");
    let message = refuse(&labelled(&document), of_size(1), kto);
    assert!(message.contains("batch_size"), "{message}");
    let mixed = [pairs(&document), labelled(&document)].concat();
    let message = Dataset::from_samples(&mixed).unwrap_err().to_string();
    assert!(message.contains("a run takes one kind"), "{message}");
    let Sample::Pair { chosen, .. } = &pairs(&document)[0] else { panic!() };
    let same = Sample::Pair { chosen: chosen.clone(), rejected: chosen.clone() };
    let message = Dataset::from_samples(&[same]).unwrap_err().to_string();
    assert!(message.contains("the same answer twice"), "{message}");
}

fn read(lines: &str) -> Vec<Record> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("data.jsonl");
    std::fs::write(&path, lines).unwrap();
    read_records(&path).unwrap()
}

fn tokenizer() -> Tokenizer {
    let mut tokenizer = Tokenizer::load(&fixtures().join("tokenizer")).unwrap();
    let template = std::fs::read_to_string(fixtures().join("templates/chatml-generation.jinja"));
    tokenizer.set_chat_template(&template.unwrap()).unwrap();
    tokenizer
}

/// What is learned of both sequences of a pair, and what stands before it.
fn written(record: &Record) -> [(String, String); 2] {
    let tokenizer = tokenizer();
    let options = DataOptions::default();
    let dataset = Dataset::build(std::slice::from_ref(record), &tokenizer, &options).unwrap();
    let Some(Sample::Pair { chosen, rejected }) = dataset.sample(0) else { panic!() };
    [chosen, rejected].map(|Example { ids, trainable }| {
        let first = trainable.iter().position(|it| *it).unwrap();
        let learned: Vec<u32> =
            ids.iter().zip(&trainable).filter(|(_, it)| **it).map(|(id, _)| *id).collect();
        let decode = |ids: &[u32]| tokenizer.decode(ids, false).unwrap();
        (decode(&ids[..first]), decode(&learned))
    })
}

#[test]
fn pairs_are_read_as_trl_and_openai_write_them() {
    let user = r#"{"role": "user", "content": "Hi?"}"#;
    let says = |text: &str| format!(r#"{{"role": "assistant", "content": "{text}"}}"#);
    let (good, bad) = (says("Good."), says("Bad!"));
    let shapes = [
        r#"{"prompt": "Hi?", "chosen": "Good.", "rejected": "Bad!"}"#.to_string(),
        format!(r#"{{"prompt": [{user}], "chosen": [{good}], "rejected": [{bad}]}}"#),
        // Without a prompt, and with one that both repeat.
        format!(r#"{{"chosen": [{user}, {good}], "rejected": [{user}, {bad}]}}"#),
        format!(
            r#"{{"prompt": [{user}], "chosen": [{user}, {good}], "rejected": [{user}, {bad}]}}"#
        ),
        // As UltraFeedback has it: a text that says the prompt once more.
        format!(r#"{{"prompt": "Hi?", "chosen": [{user}, {good}], "rejected": [{user}, {bad}]}}"#),
        format!(
            r#"{{"input": {{"messages": [{user}]}}, "preferred_output": [{good}], "non_preferred_output": [{bad}]}}"#
        ),
    ];
    let expected = written(&read(&shapes[0])[0]);
    assert!(expected[0].0.contains("Hi?") && expected[0].0 == expected[1].0, "{expected:?}");
    assert!(
        expected[0].1.starts_with("Good.") && expected[1].1.starts_with("Bad!"),
        "{expected:?}"
    );
    for shape in &shapes {
        assert_eq!(written(&read(shape)[0]), expected, "{shape}");
    }
    let implicit = r#"{"chosen": "Q: Hi? A: Good.", "rejected": "Q: Hi? A: Bad!"}"#;
    let [(prompt, chosen), (_, rejected)] = written(&read(implicit)[0]);
    assert!(prompt.contains("Q: Hi? A:"), "{prompt:?}");
    assert!(chosen.trim().starts_with("Good.") && rejected.trim().starts_with("Bad!"));

    // A conversation beside the pair is for who wants no preferences.
    let file = tempfile::NamedTempFile::with_suffix(".jsonl").unwrap();
    let both = format!(
        r#"{{"messages": [{user}, {good}], "chosen": [{user}, {good}], "rejected": [{user}, {bad}]}}"#
    );
    std::fs::write(file.path(), both).unwrap();
    for samples in [SampleKind::Plain, SampleKind::Pair] {
        let options = DataOptions { samples, ..DataOptions::default() };
        let sources = [DataSource::new([file.path().to_path_buf()])];
        let dataset = tokenize(&sources, &tokenizer(), &options).unwrap().into_dataset().unwrap();
        assert_eq!(dataset.kind(), samples);
    }

    // KTO takes a pair's answers one by one.
    let dataset = Dataset::build(&read(&shapes[0]), &tokenizer(), &DataOptions::default()).unwrap();
    let Some(Sample::Pair { chosen, rejected }) = dataset.sample(0) else { panic!() };
    let single = dataset.unpaired();
    assert_eq!((single.len(), single.report.examples), (2, 2));
    assert_eq!(single.sample(0), Some(Sample::Labelled { answer: chosen, desirable: true }));
    assert_eq!(single.sample(1), Some(Sample::Labelled { answer: rejected, desirable: false }));

    let labelled = r#"{"prompt": "Hi?", "completion": "Bad!", "label": false}"#;
    let dataset = Dataset::build(&read(labelled), &tokenizer(), &DataOptions::default()).unwrap();
    assert!(matches!(dataset.sample(0), Some(Sample::Labelled { desirable: false, .. })));
}

#[test]
fn pairs_that_cannot_be_compared_are_counted() {
    let lines = [
        r#"{"prompt": "Hi?", "chosen": "Good.", "rejected": "Bad!"}"#,
        r#"{"prompt": "Hi?", "chosen": "Good.", "rejected": "Good."}"#,
        r#"{"prompt": "Hi?", "chosen": "", "rejected": "Bad!"}"#,
        r#"{"prompt": "Hi? Hi? Hi? Hi? Hi? Hi? Hi? Hi? Hi? Hi? Hi? Hi? Hi? Hi? Hi? Hi?", "chosen": "Good.", "rejected": "Bad!"}"#,
    ];
    let options = DataOptions { max_seq_length: 40, ..DataOptions::default() };
    let dataset = Dataset::build(&read(&lines.join("\n")), &tokenizer(), &options).unwrap();
    let report = &dataset.report;
    let found = [
        report.records,
        report.examples,
        report.dropped_equal,
        report.dropped_empty,
        report.dropped_untrainable,
        report.truncated,
    ];
    assert_eq!((found, dataset.kind()), ([4, 1, 1, 1, 1, 1], SampleKind::Pair), "{report}");
    let text = report.to_string();
    assert!(text.contains("1 dropped because both answers are the same"), "{text}");
    let message = Dataset::build(&read(lines[1]), &tokenizer(), &options).unwrap_err().to_string();
    assert!(message.contains("1 have the same answer twice"), "{message}");
}

/// What is distilled in the fixture: its document, and the data without what the teacher says.
fn distilled() -> (Value, Dataset) {
    let bytes = std::fs::read(folder().join("distillation.json")).unwrap();
    let document: Value = serde_json::from_slice(&bytes).unwrap();
    let example = |row: &Value| sequence(&row["prompt_ids"], &row["completion_ids"]);
    let examples: Vec<_> = document["examples"].as_array().unwrap().iter().map(example).collect();
    let dataset = Dataset::from_examples(&examples).unwrap();
    (document, dataset)
}

fn teacher(path: &Path) -> Arc<Teacher> {
    Arc::new(Teacher::read(path).unwrap())
}

fn in_batches(dataset: Dataset, options: BatchOptions) -> Batcher {
    let options = BatchOptions { max_seq_length: 64, shuffle: false, ..options };
    Batcher::new(Arc::new(dataset), options).unwrap()
}

/// Also with the examples packed, and in several batches.
#[test]
fn distillation_is_that_of_pytorch() {
    let (document, dataset) = distilled();
    let teacher = teacher(&folder().join("teacher.safetensors"));
    let dataset = dataset.with_teacher(&teacher).unwrap();
    let gradients_of_torch =
        candle_core::safetensors::load(folder().join("distillation.safetensors"), &Device::Cpu)
            .unwrap();
    let adamw = Optimizer::AdamW(AdamWOptions { weight_decay: 0.01, ..AdamWOptions::default() });
    for (name, variant) in document["variants"].as_object().unwrap() {
        let kd_alpha = variant["kd_alpha"].as_f64().unwrap();
        let objective = Objective::Distill(DistillOptions { kd_alpha });
        let expected: Vec<f64> =
            variant["losses"].as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect();
        let of_torch = (name.as_str(), expected.as_slice(), &gradients_of_torch);
        for (batching, grad_accumulation) in
            [(of_size(4), 1), (BatchOptions { packing: true, ..of_size(4) }, 1), (of_size(1), 4)]
        {
            let batches = in_batches(dataset.clone(), batching);
            let options = |steps| TrainOptions {
                grad_accumulation,
                ..options(objective, steps, learning_rate(&document), adamw)
            };
            assert_learns_the_same(&batches, options, of_torch);
        }
    }
}

/// What the model itself writes is what PyTorch found, and of all tokens it is the model's own distribution, from which it
/// doesn't differ.
#[test]
fn a_model_writes_what_it_finds_likeliest() {
    let folder_of = tempfile::tempdir().unwrap();
    let path = |name: &str| folder_of.path().join(name);
    let (_, dataset) = distilled();
    let model = model();
    let batches = in_batches(dataset.clone(), of_size(3));
    let mut told = Vec::new();
    let mut write = |name: &str, top_k| {
        let progress = &mut |done| {
            told.push(done);
            true
        };
        assert!(
            write_teacher(
                &model,
                None,
                &batches,
                (top_k, Some("2025-01-31T12:00:00")),
                path(name),
                progress
            )
            .unwrap()
        );
    };
    write("some", 7);
    let vocabulary = model.config().vocab_size;
    write("all", vocabulary.min(1024));
    assert_eq!(told, [3, 4, 3, 4]);
    let of = |path: &Path| candle_core::safetensors::load(path, &Device::Cpu).unwrap();
    let (found, expected) = (of(&path("some")), of(&folder().join("teacher.safetensors")));
    // Examples are written by length, here as they are in the fixture but for the last two.
    let rows = |file: &HashMap<String, Tensor>| -> Vec<(Vec<u32>, Vec<f64>)> {
        let ids = file["top_ids"].to_vec2::<i32>().unwrap();
        let logprobs = file["top_logprobs"].to_dtype(DType::F64).unwrap().to_vec2::<f64>().unwrap();
        ids.into_iter()
            .zip(logprobs)
            .map(|(ids, logprobs)| (ids.iter().map(|id| *id as u32).collect(), logprobs))
            .collect()
    };
    let (found, expected) = (rows(&found), rows(&expected));
    assert_eq!(found.len(), expected.len());
    let mut matched = 0;
    for (ids, logprobs) in &expected {
        let named = ids.iter().filter(|id| **id != u32::MAX).count();
        let same = found.iter().find(|(others, _)| others[..named] == ids[..named]);
        let (_, others) = same.unwrap_or_else(|| panic!("{ids:?} isn't found"));
        for (found, expected) in others.iter().zip(&logprobs[..named]) {
            assert!((found - expected).abs() < 1e-4, "{found} is not {expected}");
        }
        matched += 1;
    }
    assert_eq!(matched, 29);

    // A model doesn't differ from itself: the loss is 0, and of the adapter's it is not.
    let dataset = dataset.with_teacher(&teacher(&path("all"))).unwrap();
    let objective = &Objective::Distill(DistillOptions::default());
    let batches = in_batches(dataset, of_size(2));
    let adapter = adapter(&model);
    let loss = |adapter| {
        let task = metal_candle::train::Task {
            model: &model,
            adapter,
            objective,
            reference: None,
            turns: None,
        };
        task.evaluate(&batches, None).unwrap().loss
    };
    let itself = loss(None);
    assert!(itself.abs() < 1e-5, "{itself}");
    assert!(loss(Some(&adapter)) > 0.1);

    // Given up, nothing is written.
    let given_up = write_teacher(&model, None, &batches, (2, None), path("none"), &mut |_| false);
    assert!(!given_up.unwrap() && !path("none").exists());
}

/// Entropies and hits of an evaluation, against the logits.
#[test]
fn an_evaluation_says_how_sure_a_model_is() {
    let (_, dataset) = distilled();
    let model = model();
    let found = evaluate(&model, None, &in_batches(dataset.clone(), of_size(3)), None).unwrap();
    let (mut entropy, mut hits, mut count) = (0.0, 0.0, 0.0);
    for example in dataset.iter() {
        let ids = &example.ids;
        let input = metal_candle::pass::Input::sequence(ids, model.device()).unwrap();
        let hidden = model.forward(&metal_candle::autograd::Tape::inference(), &input).unwrap();
        let logits = model.logits(hidden.tensor(), &input).unwrap().squeeze(0).unwrap();
        let rows: Vec<Vec<f32>> = logits.to_vec2().unwrap();
        for (place, row) in rows.iter().enumerate() {
            if !example.trainable.get(place + 1).copied().unwrap_or(false) {
                continue;
            }
            let total: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
            let p = |logit: &f32| f64::from(*logit).exp() / total;
            entropy -= row.iter().map(|logit| p(logit) * p(logit).ln()).sum::<f64>();
            let target = row[ids[place + 1] as usize];
            hits += f64::from(u8::from(row.iter().all(|logit| *logit <= target)));
            count += 1.0;
        }
    }
    assert_eq!(found.tokens as f64, count);
    assert!((found.metrics["entropy"] - entropy / count).abs() < 1e-4);
    assert!((found.metrics["mean_token_accuracy"] - hits / count).abs() < 1e-6);
}

/// What is changed of a good file.
type Change = Box<dyn Fn(&mut HashMap<String, Tensor>)>;

#[test]
fn what_a_teacher_cannot_say_is_refused() {
    let folder_of = tempfile::tempdir().unwrap();
    let good = candle_core::safetensors::load(folder().join("teacher.safetensors"), &Device::Cpu);
    let good = good.unwrap();
    let (document, dataset) = distilled();
    let write = |change: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let mut tensors = good.clone();
        change(&mut tensors);
        let path = folder_of.path().join("teacher.safetensors");
        candle_core::safetensors::save(&tensors, &path).unwrap();
        Teacher::read(&path).map_err(|error| error.to_string())
    };
    let numbers = |name: &str| good[name].flatten_all().unwrap().to_vec1::<i32>().unwrap();
    let with = |name: &'static str, index: usize, value: i32| {
        let mut changed = numbers(name);
        changed[index] = value;
        let changed = Tensor::from_vec(changed, good[name].shape(), &Device::Cpu).unwrap();
        move |tensors: &mut HashMap<String, Tensor>| {
            tensors.insert(name.into(), changed.clone());
        }
    };
    let logprob = |value: f32| {
        let mut logprobs = good["top_logprobs"].flatten_all().unwrap().to_vec1::<f32>().unwrap();
        logprobs[15] = value;
        let changed =
            Tensor::from_vec(logprobs, good["top_logprobs"].shape(), &Device::Cpu).unwrap();
        move |tensors: &mut HashMap<String, Tensor>| {
            tensors.insert("top_logprobs".into(), changed.clone());
        }
    };
    let missing = |tensors: &mut HashMap<String, Tensor>| {
        tensors.remove("positions");
    };
    let wide = |tensors: &mut HashMap<String, Tensor>| {
        let one = tensors["top_ids"].narrow(1, 0, 6).unwrap().contiguous().unwrap();
        tensors.insert("top_ids".into(), one);
    };
    let cases: Vec<(Change, &str)> = vec![
        (Box::new(missing), "has no tensor \"positions\""),
        (Box::new(wide), "top_logprobs has shape [29, 7], expected [29, 6]"),
        (Box::new(with("lengths", 0, 7)), "lengths: found 43 in all"),
        (Box::new(with("rows", 1, 4)), "rows: found 30 in all"),
        (Box::new(with("lengths", 0, -7)), "lengths has -7 at 0, expected at least 2"),
        (Box::new(with("positions", 0, 9)), "positions of example 0 aren't in order"),
        (Box::new(with("positions", 4, 6)), "positions of example 0 aren't in order, or not below"),
        (Box::new(with("top_ids", 7, -1)), "row 1 of top_ids and top_logprobs has no first token"),
        (
            Box::new(with("top_ids", 8, numbers("top_ids")[7])),
            "row 1 of top_ids and top_logprobs have token",
        ),
        (Box::new(logprob(f32::NAN)), "NaN, which is no log-probability"),
        (Box::new(logprob(0.5)), "0.5, which is no log-probability"),
        (Box::new(logprob(0.0)), "give probabilities that add up to 1."),
    ];
    for (change, expected) in &cases {
        let message = write(change).unwrap_err();
        assert!(message.contains(expected) && message.contains("teacher.safetensors"), "{message}");
    }

    // Of other data, of other tokens than those to learn, and of another vocabulary.
    let refused = |teacher: Teacher, dataset: &Dataset| {
        dataset.clone().with_teacher(&Arc::new(teacher)).unwrap_err().to_string()
    };
    let message = refused(write(&with("input_ids", 0, 5)).unwrap(), &dataset);
    assert!(message.contains("says nothing of example 0 of the data"), "{message}");
    let all: Vec<Example> = dataset
        .iter()
        .map(|example| Example { trainable: vec![true; example.ids.len()], ..example })
        .collect();
    let all = Dataset::from_examples(&all).unwrap();
    let message = refused(write(&|_| ()).unwrap(), &all);
    assert!(message.contains("says nothing of token 1 of example 1"), "{message}");
    let pairs = Dataset::from_samples(&pairs(&expected())).unwrap();
    let message = refused(write(&|_| ()).unwrap(), &pairs);
    assert!(message.contains("is about sequences, but the data are preference pairs"), "{message}");
    let foreign = write(&with("top_ids", 3, 1_000_000)).unwrap();
    let taught = dataset.clone().with_teacher(&Arc::new(foreign)).unwrap();
    let message = taught.check_vocabulary(256).unwrap_err().to_string();
    assert!(message.contains("names token 1000000"), "{message}");
    assert_ne!(taught.fingerprint(), dataset.fingerprint());

    // Without a teacher nothing is distilled, and a share has to be one.
    let model = model();
    let adamw = Optimizer::AdamW(AdamWOptions::default());
    let rate = learning_rate(&document);
    let refused = |kd_alpha: f64| {
        let objective = Objective::Distill(DistillOptions { kd_alpha });
        let batches = in_batches(dataset.clone(), of_size(4));
        let options = options(objective, 1, rate, adamw);
        let trainer = Trainer::new(&model, &adapter(&model), &batches, options, "output", "llama")
            .map(|_| ());
        trainer.unwrap_err().to_string()
    };
    assert!(refused(1.0).contains("there is no teacher"));
    for share in [0.0, 1.5, f64::NAN] {
        assert!(refused(share).contains("kd_alpha: is"), "{}", refused(share));
    }
}

#[test]
fn what_orpo_reports_adds_up_to_its_loss() {
    let document = expected();
    let model = model();
    let batches = batcher(&pairs(&document), of_size(6));
    let objective = Objective::Orpo(OrpoOptions { beta: 0.3 });
    let options = options(objective, 1, 1e-3, Optimizer::default());
    for report in run(&adapter(&model), &model, &batches, options) {
        let Metric::Train { loss, metrics, .. } = report else { unreachable!() };
        let sum = metrics["nll_loss"] - 0.3 * metrics["log_odds_ratio"];
        assert!((loss - sum).abs() < 1e-9 * loss, "{loss} is not {sum}");
    }
}
