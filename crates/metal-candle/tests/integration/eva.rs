//! EVA's start, against PEFT: ranks, directions and scales; and the runs that begin there.

use crate::common::device;
use candle_core::{DType, Device, Tensor};
use metal_candle::adapter::{Adapter, EvaConfig, LoraConfig, StartFrom, Targets};
use metal_candle::autograd::Tape;
use metal_candle::data::{BatchOptions, Batcher, Dataset, Example, Sample};
use metal_candle::model::Model;
use metal_candle::pass::Input;
use metal_candle::random::SplitMix64;
use metal_candle::train::{
    LearningRate, Metric, Outcome, TrainOptions, Trainer, eva, latest_checkpoint, layer_ranks,
};
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Targets among the first tokens of each row of the fixtures that don't count.
const IGNORED_TOKENS: usize = 5;

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

fn folder(base: &str) -> PathBuf {
    fixtures().join("models").join(base)
}

fn load(base: &str) -> Arc<Model> {
    Arc::new(Model::load(folder(base), DType::F32, &device()).unwrap())
}

fn config() -> LoraConfig {
    LoraConfig { rank: 4, alpha: 12.0, start: StartFrom::Eva, ..LoraConfig::default() }
}

/// What a case of the fixtures tells PEFT.
fn told(case: &Value) -> LoraConfig {
    let told = &case["told"];
    let patterns = |key: &str| told[key].as_object().cloned().unwrap_or_default().into_iter();
    let mut eva = EvaConfig::default();
    for (key, value) in told["eva"].as_object().into_iter().flatten() {
        match key.as_str() {
            "rho" => eva.rho = value.as_f64().unwrap(),
            "whiten" => eva.whiten = value.as_bool().unwrap(),
            "adjust_scaling_factors" => eva.adjust_scaling_factors = value.as_bool().unwrap(),
            other => panic!("{other}"),
        }
    }
    LoraConfig {
        rank: told["r"].as_u64().unwrap() as usize,
        rslora: told["use_rslora"].as_bool().unwrap_or(false),
        targets: match told.get("target_modules") {
            Some(names) => serde_json::from_value(names.clone()).unwrap(),
            None => Targets::all_linear(),
        },
        rank_pattern: patterns("rank_pattern")
            .map(|(key, rank)| (key, rank.as_u64().unwrap() as usize))
            .collect(),
        alpha_pattern: patterns("alpha_pattern")
            .map(|(key, alpha)| (key, alpha.as_f64().unwrap()))
            .collect(),
        eva,
        ..config()
    }
}

fn examples(rows: &[Vec<i64>], ignored: usize) -> Vec<Example> {
    let example = |row: &Vec<i64>| Example {
        ids: row.iter().map(|id| *id as u32).collect(),
        trainable: (0..row.len()).map(|index| index >= ignored).collect(),
    };
    rows.iter().map(example).collect()
}

fn in_order(batch_size: usize) -> BatchOptions {
    BatchOptions { batch_size, max_seq_length: 64, shuffle: false, ..BatchOptions::default() }
}

/// The batches that PEFT has read.
fn batches_of_fixture(tensors: &HashMap<String, Tensor>) -> Batcher {
    let batches = &tensors["batches"];
    let (count, size, length) = batches.dims3().unwrap();
    let rows = batches.reshape((count * size, length)).unwrap().to_vec2::<i64>().unwrap();
    let dataset = Dataset::from_examples(&examples(&rows, IGNORED_TOKENS)).unwrap();
    Batcher::new(Arc::new(dataset), in_order(size)).unwrap()
}

/// Rows that count upwards, of different lengths.
fn texts(count: usize) -> Vec<Example> {
    let mut random = SplitMix64::new(5);
    let row = |_| {
        let (length, first) = (8 + random.below(14), random.below(90));
        (0..length).map(|index| ((first + 3 * index) % 97) as i64 + 3).collect()
    };
    examples(&(0..count).map(row).collect::<Vec<_>>(), 2)
}

fn batcher(examples: &[Example], batch_size: usize) -> Batcher {
    let options = BatchOptions { shuffle: true, seed: 7, ..in_order(batch_size) };
    Batcher::new(Arc::new(Dataset::from_examples(examples).unwrap()), options).unwrap()
}

fn start(model: &Model, config: &LoraConfig, batches: &Batcher) -> (Arc<Adapter>, eva::Found) {
    let rows = batches.options().batch_size;
    let (adapter, found) = eva::start(model, config, 5, batches, rows, &mut |_| ()).unwrap();
    (Arc::new(adapter), found)
}

fn values(adapter: &Adapter) -> Vec<f32> {
    adapter.parameters().values().to_device(&Device::Cpu).unwrap().to_vec1().unwrap()
}

/// A parameter of the adapter on the CPU.
fn parameter(adapter: &Adapter, name: &str) -> Tensor {
    let entries = adapter.parameters().entries();
    let entry = entries.iter().find(|entry| entry.name == name).unwrap();
    entry.of(adapter.parameters().values()).unwrap().to_device(&Device::Cpu).unwrap()
}

fn hidden(model: &Model, adapter: Option<&Arc<Adapter>>) -> Vec<f32> {
    let input = Input::sequence(&[5, 9, 42, 17, 3, 88], model.device()).unwrap();
    let input = input.with_adapter(adapter);
    let hidden = model.forward(&Tape::inference(), &input).unwrap();
    let logits = model.logits(hidden.tensor(), &input).unwrap();
    logits.flatten_all().unwrap().to_device(&Device::Cpu).unwrap().to_vec1().unwrap()
}

#[test]
fn ranks_directions_and_scales_equal_those_of_peft() {
    for base in ["llama", "qwen2"] {
        let model = load(base);
        let cases: Value =
            serde_json::from_slice(&std::fs::read(folder(base).join("eva.json")).unwrap()).unwrap();
        let tensors =
            candle_core::safetensors::load(folder(base).join("eva.safetensors"), &Device::Cpu);
        let tensors = tensors.unwrap();
        let batches = batches_of_fixture(&tensors);
        for (name, case) in cases.as_object().unwrap() {
            let config = told(case);
            let (adapter, found) = start(&model, &config, &batches);
            assert_eq!(found.batches as u64, case["batches"].as_u64().unwrap(), "{base} {name}");
            let expected = case["ranks"].as_object().unwrap();
            let mut ranks = found.ranks.clone();
            ranks.retain(|_, rank| *rank > 0);
            assert_eq!(ranks.len(), expected.len(), "{base} {name}");
            for (path, rank) in ranks {
                let name = format!("{base} {name} {path}");
                assert_eq!(rank as u64, expected[&path].as_u64().unwrap(), "{name}");
                let ours = parameter(&adapter, &format!("{path}.lora_A")).t().unwrap();
                let theirs = &tensors[&format!("{}.{path}", name.split(' ').nth(1).unwrap())];
                let [ours, theirs] = [&ours, theirs].map(|a| a.to_vec2::<f32>().unwrap());
                assert_eq!(ours.len(), theirs.len(), "{name}");
                for (ours, theirs) in ours.iter().zip(&theirs) {
                    let dot = |a: &[f32], b: &[f32]| -> f64 {
                        a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
                    };
                    let (size, their_size) = (dot(ours, ours).sqrt(), dot(theirs, theirs).sqrt());
                    let cosine = dot(ours, theirs) / (size * their_size);
                    assert!(cosine.abs() > 0.999, "{name}: a cosine of {cosine}");
                    assert!((size / their_size - 1.0).abs() < 1e-3, "{name}: {size}, {their_size}");
                }
                let b = parameter(&adapter, &format!("{path}.lora_B"));
                assert_eq!(b.abs().unwrap().max_all().unwrap().to_scalar::<f32>().unwrap(), 0.0);
            }
            let paths = model.target_paths();
            let resolved = adapter.config().unwrap().resolve(&paths, 3).unwrap();
            assert_eq!(resolved.len(), expected.len(), "{base} {name}");
            for layer in resolved {
                let scale = case["scales"][&layer.path].as_f64().unwrap();
                assert!((layer.scale - scale).abs() < 1e-9, "{base} {name}: {layer:?}, {scale}");
            }
            assert_eq!(hidden(&model, Some(&adapter)), hidden(&model, None), "{base} {name}");
        }
    }
}

#[test]
fn what_is_saved_is_a_plain_adapter_with_its_ranks() {
    let model = load("llama");
    let batches = batcher(&texts(40), 4);
    for (rank, rho, rslora, dora) in
        [(4, 2.0, false, false), (1, 4.0, true, false), (2, 2.0, false, true)]
    {
        let config = LoraConfig {
            rank,
            rslora,
            dora,
            eva: EvaConfig { rho, ..EvaConfig::default() },
            ..config()
        };
        let (adapter, found) = start(&model, &config, &batches);
        assert!(found.ranks.values().any(|found| *found != rank), "{:?}", found.ranks);
        if rank == 1 {
            assert!(found.ranks.values().any(|found| *found == 0), "{:?}", found.ranks);
        }
        // Away from the start, at which the scale shows nowhere.
        let numbers =
            (0..adapter.parameters().len()).map(|index| ((index * 37 % 101) as f32 - 50.0) * 1e-2);
        let numbers = Tensor::from_iter(numbers, &device()).unwrap();
        let sum = (adapter.parameters().values() + numbers).unwrap();
        adapter.parameters().values().slice_set(&sum, 0, 0).unwrap();
        adapter.parameters().changed();
        let written = tempfile::tempdir().unwrap();
        adapter.save(written.path(), "llama").unwrap();
        let again = Arc::new(Adapter::load(&model, written.path()).unwrap());
        assert_eq!(values(&again), values(&adapter));
        assert_eq!(hidden(&model, Some(&again)), hidden(&model, Some(&adapter)));
        assert_ne!(hidden(&model, Some(&again)), hidden(&model, None));
        let json = std::fs::read(written.path().join("adapter_config.json")).unwrap();
        let json: Value = serde_json::from_slice(&json).unwrap();
        assert_eq!(json["init_lora_weights"], "eva");
        assert_eq!(json["eva_config"]["rho"], rho);
        for (path, found) in &found.ranks {
            let pattern = json["rank_pattern"].get(path).and_then(Value::as_u64);
            let expected = (*found != rank && *found > 0).then_some(*found as u64);
            assert_eq!(pattern, expected, "{path}");
        }
    }
}

/// A run of 8 steps from EVA's start, or from that of the run's newest checkpoint.
fn train(output: &Path, stop_after: Option<u64>) -> (Vec<f32>, Outcome, Vec<String>) {
    let model = load("llama");
    let batches = batcher(&texts(40), 4);
    let known = layer_ranks(output).unwrap();
    let adapter = match latest_checkpoint(output).unwrap() {
        None => start(&model, &config(), &batches).0,
        Some(_) => {
            let config = LoraConfig { layer_ranks: known, ..config() };
            Arc::new(Adapter::new(&model, &config, 5).unwrap())
        }
    };
    let options = TrainOptions {
        report_every: 1,
        eval_every: 0,
        ..TrainOptions::new(8, LearningRate::constant(1e-2).unwrap())
    };
    let stop = Arc::new(AtomicBool::new(false));
    let mut trainer = Trainer::new(&model, &adapter, &batches, options, output, "llama")
        .unwrap()
        .with_stop(stop.clone());
    trainer.resume_newest(output).unwrap();
    let mut losses = Vec::new();
    let summary = trainer
        .run(&mut |metric: &Metric| -> metal_candle::Result<()> {
            if let Metric::Train { step, loss, gradient_norm, .. } = metric {
                losses.push(format!("{step} {loss:?} {gradient_norm:?}"));
                stop.fetch_or(stop_after == Some(*step), Ordering::Relaxed);
            }
            Ok(())
        })
        .unwrap();
    (values(&adapter), summary.outcome, losses)
}

#[test]
fn a_resumed_run_has_the_ranks_and_the_bits_of_one_that_never_stopped() {
    let (whole, parts) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (expected, outcome, losses) = train(whole.path(), None);
    assert_eq!(outcome, Outcome::Finished);
    let (_, outcome, first) = train(parts.path(), Some(3));
    assert_eq!(outcome, Outcome::Interrupted);
    let ranks = layer_ranks(parts.path()).unwrap().unwrap();
    assert!(ranks.values().any(|rank| *rank != 4), "{ranks:?}");
    let (found, outcome, second) = train(parts.path(), None);
    assert_eq!(outcome, Outcome::Finished);
    assert!(found == expected);
    assert_eq!([first, second].concat(), losses);
    let model = load("llama");
    let adapter = Adapter::load(&model, parts.path()).unwrap();
    assert!(values(&adapter).len() == expected.len());

    // Other options than those that the ranks were found with are those of another run.
    let batches = batcher(&texts(40), 4);
    let other = EvaConfig { rho: 1.5, ..EvaConfig::default() };
    let config = LoraConfig { eva: other, layer_ranks: Some(ranks), ..config() };
    let adapter = Arc::new(Adapter::new(&model, &config, 5).unwrap());
    let rate = LearningRate::constant(1e-2).unwrap();
    let options = TrainOptions { report_every: 1, eval_every: 0, ..TrainOptions::new(8, rate) };
    let mut trainer =
        Trainer::new(&model, &adapter, &batches, options, parts.path(), "llama").unwrap();
    let error = trainer.resume_newest(parts.path()).unwrap_err().to_string();
    assert!(error.contains("adapter.eva.rho was 2.0 and is now 1.5"), "{error}");
}

#[test]
fn pairs_and_small_batches_are_read_too() {
    let model = load("llama");
    let examples = texts(24);
    let pairs: Vec<Sample> = examples
        .iter()
        .map(|example| {
            let mut rejected = example.clone();
            let last = rejected.ids.len() - 1;
            rejected.ids[last - 1..].fill(7);
            Sample::Pair { chosen: example.clone(), rejected }
        })
        .collect();
    let of_pairs = |share_prompts| {
        let options = BatchOptions { share_prompts, ..in_order(4) };
        let dataset = Arc::new(Dataset::from_samples(&pairs).unwrap());
        start(&model, &config(), &Batcher::new(dataset, options).unwrap())
    };
    let ((shared, found), (apart, other)) = (of_pairs(true), of_pairs(false));
    assert_eq!(found, other);
    let answers = examples.iter().flat_map(|example| &example.trainable);
    let epochs = found.batches.div_ceil(6);
    assert!(found.tokens <= 2 * epochs * answers.filter(|counts| **counts).count());
    for (shared, apart) in values(&shared).into_iter().zip(values(&apart)) {
        assert!((shared - apart).abs() < 1e-3, "{shared} {apart}");
    }
    assert_eq!(found.ranks.values().sum::<usize>(), 4 * 21);

    // One row a batch has fewer tokens than directions are looked for, and still each counts.
    let wide = LoraConfig { rank: 12, ..config() };
    let (_, found) = start(&model, &wide, &batcher(&examples, 1));
    assert_eq!(found.ranks.values().sum::<usize>(), 12 * 21);
}

#[test]
fn a_base_in_fewer_bits_or_in_bf16_starts_so_too() {
    let batches = batcher(&texts(40), 8);
    let quantized = fixtures().join("bases/llama-nf4");
    for (folder, dtype) in [(quantized, DType::F32), (folder("llama"), DType::BF16)] {
        let model = Model::load(&folder, dtype, &device()).unwrap();
        let (_, found) = start(&model, &config(), &batches);
        let rank = found.ranks.values().max().unwrap();
        assert!((5..=8).contains(rank), "{:?}", found.ranks);
    }
}

#[test]
fn batches_of_several_processes_are_read_as_those_of_one() {
    let model = load("llama");
    let texts = texts(40);
    let dataset = || Arc::new(Dataset::from_examples(&texts).unwrap());
    let started = |batch_size| {
        let batches = Batcher::new(dataset(), in_order(batch_size)).unwrap();
        let mut passes = 0;
        let (adapter, found) =
            eva::start(&model, &config(), 5, &batches, 4, &mut |_| passes += 1).unwrap();
        (values(&adapter), found, passes)
    };
    let of_one = started(4);
    for processes in [2, 5] {
        assert!(started(4 * processes) == of_one, "{processes} processes");
    }
    let batches = Batcher::new(dataset(), in_order(4)).unwrap();
    let error = eva::start(&model, &config(), 5, &batches, 0, &mut |_| ()).unwrap_err();
    assert_eq!(error.to_string(), "batch_size: is 0, expected at least 1");
}

#[test]
fn progress_ends_where_all_inputs_are_known() {
    let mut seen = Vec::new();
    let model = load("llama");
    let batches = batcher(&texts(40), 8);
    let (_, found) =
        eva::start(&model, &config(), 5, &batches, 8, &mut |progress| seen.push(progress)).unwrap();
    let last = *seen.last().unwrap();
    // Queries, keys and values share theirs, as gates and the up projections do.
    assert_eq!((last.batches, last.settled, last.inputs), (found.batches, 12, 12));
    assert!(seen[..seen.len() - 1].iter().all(|it| it.settled < 12), "{seen:?}");
}

#[test]
fn what_eva_cannot_start_is_refused_with_the_reason() {
    let model = load("llama");
    let refused = |config: LoraConfig, batches: &Batcher| {
        eva::start(&model, &config, 5, batches, 4, &mut |_| ()).unwrap_err().to_string()
    };
    let few = batcher(&texts(1), 4);
    let tokens: usize = texts(1)[0].trainable.iter().filter(|counts| **counts).count();
    let enough = batcher(&texts(20), 4);
    let targets = |names: &[&str]| Targets::Names(names.iter().map(ToString::to_string).collect());
    for (error, expected) in [
        (
            refused(LoraConfig { rank: 16, ..config() }, &few),
            format!(
                "needs as many tokens that the loss counts, but the training data have {tokens}"
            ),
        ),
        (refused(LoraConfig { rank: 33, ..config() }, &enough), "reads 32 numbers".into()),
        (
            refused(LoraConfig { start: StartFrom::Kaiming, ..config() }, &enough),
            "init_lora_weights: is kaiming, expected eva".into(),
        ),
        (
            refused(LoraConfig { targets: targets(&["embed_tokens"]), ..config() }, &enough),
            "`embed_tokens` is none".into(),
        ),
        (
            Adapter::new(&model, &config(), 5).unwrap_err().to_string(),
            "is eva, which needs training data".into(),
        ),
    ] {
        assert!(error.contains(&expected), "{error}, expected {expected}");
    }
}
