//! Every family against fixtures made with transformers and PEFT: logits, cached decoding,
//! greedy continuations, adapters, gradients and training, on the device that tests are told.

use crate::common::device;
use candle_core::{DType, Device, Tensor};
use metal_candle::adapter::{
    self, Adapter, AdapterFormat, LoraConfig, Merged, Parameters, Targets, TokenIndices,
};
use metal_candle::autograd::{ParameterId, Tape};
use metal_candle::data::{Batch, Batcher, Dataset, IGNORED};
use metal_candle::engine::{Answers, Handle, Ticket};
use metal_candle::generate::Session;
use metal_candle::model::{Config, Model};
use metal_candle::pass::Input;
use metal_candle::random::SplitMix64;
use metal_candle::text::Tokenizer;
use metal_candle::train::{Gradients, Trainer};
use metal_candle::turns::Turns;
use metal_candle_kernels::{adamw, flat, sampling};
use serde_json::Value;
use std::collections::HashMap;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub const FAMILIES: &[&str] = &[
    "gemma2",
    "gemma3-text",
    "gpt-oss",
    "granite",
    "llama",
    "llama-dynamic",
    "llama-f16",
    "llama-linear-rope",
    "llama-odd",
    "llama-sharded",
    "llama-yarn",
    "llama3",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "phi3-longrope",
    "phi4-mini",
    "qwen2",
    "qwen3",
    "qwen3-moe",
    "smollm3",
];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures")
}

pub fn folder(name: &str) -> PathBuf {
    let place = if QUANTIZED.contains(&name) { "bases" } else { "models" };
    fixtures().join(place).join(name)
}

pub fn load(name: &str) -> Arc<Model> {
    Arc::new(Model::load(folder(name), DType::F32, &device()).unwrap())
}

fn load_adapter(model: &Model, folder: impl AsRef<Path>) -> Arc<Adapter> {
    Arc::new(Adapter::load(model, folder).unwrap())
}

fn new_adapter(model: &Model, config: &LoraConfig, seed: u64) -> Arc<Adapter> {
    Arc::new(Adapter::new(model, config, seed).unwrap())
}

fn tensors(path: impl AsRef<Path>) -> HashMap<String, Tensor> {
    candle_core::safetensors::load(path, &Device::Cpu).unwrap()
}

pub fn json(path: impl AsRef<Path>) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect()
}

pub fn tokens(value: &Value) -> Vec<u32> {
    numbers(value).into_iter().map(|number| number as u32).collect()
}

fn rows(ids: &Tensor) -> Vec<Vec<u32>> {
    let ids = ids.to_dtype(DType::I64).unwrap().to_vec2::<i64>().unwrap();
    ids.iter().map(|row| row.iter().map(|&id| id as u32).collect()).collect()
}

/// A batch of rows of one length. `targets` are already shifted, negative where they don't count.
fn batch(ids: &[Vec<u32>], targets: &[Vec<i64>]) -> Batch {
    let (count, length) = (ids.len(), ids[0].len());
    let targets: Vec<u32> =
        targets.iter().flatten().map(|&target| u32::try_from(target).unwrap_or(IGNORED)).collect();
    Batch {
        rows: count,
        length,
        input_ids: ids.concat(),
        target_tokens: targets.iter().filter(|&&target| target != IGNORED).count(),
        targets,
        positions: (0..count).flat_map(|_| 0..length as u32).collect(),
        first_key: vec![0; count * length],
        tokens: count * length,
        ..Batch::default()
    }
}

/// Every token predicts the next one in its row.
fn next_token_batch(ids: &[Vec<u32>]) -> Batch {
    let targets: Vec<Vec<i64>> = ids
        .iter()
        .map(|row| row[1..].iter().map(|&id| i64::from(id)).chain([-100]).collect())
        .collect();
    batch(ids, &targets)
}

fn input(model: &Model, ids: &[Vec<u32>]) -> Input {
    Input::batch(&next_token_batch(ids), model.device()).unwrap()
}

fn logits_of(model: &Model, input: &Input) -> Tensor {
    let hidden = model.forward(&Tape::inference(), input).unwrap();
    model.logits(hidden.tensor(), input).unwrap()
}

fn logits(model: &Model, ids: &[Vec<u32>]) -> Tensor {
    logits_of(model, &input(model, ids))
}

fn adapted_logits(model: &Model, adapter: &Arc<Adapter>, ids: &[Vec<u32>]) -> Tensor {
    logits_of(model, &input(model, ids).with_adapter(Some(adapter)))
}

/// The logits after the last of `ids`, by a forward pass over all of them.
fn logits_after(model: &Model, adapter: Option<&Arc<Adapter>>, ids: &[u32]) -> Tensor {
    let all = logits_of(model, &input(model, &[ids.to_vec()]).with_adapter(adapter));
    all.narrow(1, ids.len() - 1, 1).unwrap().flatten_all().unwrap()
}

fn largest_difference(a: &Tensor, b: &Tensor) -> f64 {
    assert_eq!(a.dims(), b.dims());
    let exact = |x: &Tensor| x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F64).unwrap();
    let difference = (exact(a) - exact(b)).unwrap();
    let values = difference.flatten_all().unwrap().to_vec1::<f64>().unwrap();
    // `max` would pass over a NaN.
    values.iter().map(|value| value.abs()).fold(0.0, |a, b| if b.is_nan() || b > a { b } else { a })
}

fn assert_close(name: &str, a: &Tensor, b: &Tensor, tolerance: f64) {
    let difference = largest_difference(a, b);
    assert!(difference <= tolerance, "{name}: differs by {difference:e}, allowed {tolerance:e}");
}

#[test]
fn logits_equal_those_of_transformers() {
    for name in FAMILIES {
        let model = load(name);
        let expected = tensors(folder(name).join("expected.safetensors"));
        let found = logits(&model, &rows(&expected["input_ids"]));
        assert_close(name, &found, &expected["logits"], 1e-4);
        if let Some(short) = expected.get("input_ids_short") {
            let found = logits(&model, &rows(short));
            assert_close(name, &found, &expected["logits_short"], 1e-4);
        }
    }
}

#[test]
fn half_precision_stays_near_the_f32_logits() {
    for (dtype, tolerance) in [(DType::BF16, 0.15), (DType::F16, 0.02)] {
        for name in ["llama", "gemma2", "qwen3", "phi3"] {
            let model = Arc::new(Model::load(folder(name), dtype, &device()).unwrap());
            let expected = tensors(folder(name).join("expected.safetensors"));
            let found = logits(&model, &rows(&expected["input_ids"]));
            assert_close(name, &found, &expected["logits"], tolerance * 4.0);
        }
    }
}

#[test]
fn both_formats_of_config_json_give_the_same_shape() {
    for name in FAMILIES {
        let new = Config::load(folder(name)).unwrap();
        let text = std::fs::read_to_string(folder(name).join("config_v4.json")).unwrap();
        let mut old = Config::from_json(&text).unwrap();
        old.raw = new.raw.clone();
        assert_eq!(new, old, "{name}");
    }
}

#[test]
fn greedy_continuation_equals_that_of_transformers() {
    for name in FAMILIES {
        let model = load(name);
        let expected = &json(folder(name).join("expected.json"))["greedy"];
        let (prompt, continuation) = (tokens(&expected["prompt"]), tokens(&expected["tokens"]));
        let mut session = Session::new(&model, None).unwrap();
        let mut logits = session.read(&prompt).unwrap();
        let mut found = Vec::new();
        for _ in 0..continuation.len() {
            let best = sampling::greedy(&logits).unwrap().to_scalar().unwrap();
            found.push(best);
            logits = session.read(&[best]).unwrap();
        }
        assert_eq!(found, continuation, "{name}");
    }
}

#[test]
fn cached_decoding_equals_a_full_forward() {
    for name in FAMILIES {
        let model = load(name);
        let expected = tensors(folder(name).join("expected.safetensors"));
        let ids = &rows(&expected["input_ids"])[0];
        let mut session = Session::new(&model, None).unwrap();
        // In uneven pieces: a prompt, single tokens, of which a device may record the reading, and several
        // at once.
        let mut start = 0;
        for size in [8, 1, 1, 1, 1, 3, 1, 1, 6, 2, 1, 1, 1, 4] {
            let end = (start + size).min(ids.len());
            let found = session.read(&ids[start..end]).unwrap();
            let full = logits_after(&model, None, &ids[..end]);
            assert_close(&format!("{name} after {end}"), &found, &full, 1e-4);
            start = end;
        }
        assert_eq!(start, ids.len());
    }
}

#[test]
fn single_tokens_read_beyond_the_room_of_the_cache_equal_a_full_forward() {
    for (dtype, tolerance) in [(DType::F32, 1e-4), (DType::BF16, 0.6)] {
        for name in ["llama", "gemma2", "mistral"] {
            let model = Arc::new(Model::load(folder(name), dtype, &device()).unwrap());
            let ids: Vec<u32> = (0..70).map(|index| (index * 7 + 3) % 90).collect();
            let mut session = Session::new(&model, None).unwrap();
            session.read(&ids[..58]).unwrap();
            for end in 59..=ids.len() {
                let found = session.read(&ids[end - 1..end]).unwrap();
                let full = logits_after(&model, None, &ids[..end]);
                assert_close(&format!("{name} {dtype:?} after {end}"), &found, &full, tolerance);
            }
            // Again from the middle, with what was recorded before.
            let again = session.continue_with(&ids[..63]).unwrap();
            let full = logits_after(&model, None, &ids[..63]);
            assert_close(&format!("{name} {dtype:?} again"), &again, &full, tolerance);
        }
    }
}

#[test]
fn what_a_device_cannot_record_is_read_all_the_same() {
    let text = std::fs::read_to_string(folder("llama").join("config.json")).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    let sizes = [
        ("hidden_size", 320),
        ("intermediate_size", 320),
        ("num_attention_heads", 2),
        ("num_key_value_heads", 1),
    ];
    for (name, size) in sizes {
        config[name] = size.into();
    }
    for (head_dim, rank) in [(64, 300), (264, 0)] {
        config["head_dim"] = head_dim.into();
        let config = Config::from_json(&config.to_string()).unwrap();
        let model = Arc::new(Model::random(config, DType::F32, &device(), 3).unwrap());
        let config = LoraConfig { rank, alpha: 16.0, ..LoraConfig::default() };
        let adapter = (rank > 0).then(|| new_adapter(&model, &config, 4));
        let ids: Vec<u32> = (0..12).map(|index| (index * 7 + 3) % 90).collect();
        let mut session = Session::new(&model, adapter.as_ref()).unwrap();
        session.read(&ids[..5]).unwrap();
        for end in 6..=ids.len() {
            let found = session.read(&ids[end - 1..end]).unwrap();
            let full = logits_after(&model, adapter.as_ref(), &ids[..end]);
            assert_close(&format!("{head_dim} {rank} after {end}"), &found, &full, 1e-4);
        }
    }
}

#[test]
fn a_session_keeps_what_a_new_prompt_shares_with_the_old() {
    for name in ["phi3-longrope", "llama-dynamic"] {
        let model = load(name);
        let ids: Vec<u32> = (0..30).map(|index| (index * 7 + 3) % 90).collect();
        let mut session = Session::new(&model, None).unwrap();
        session.continue_with(&ids).unwrap();
        // Beyond 16 tokens the ropes are others, the dynamic one for every length, and nothing cached fits.
        for length in [9, 14, 12, 25, 27] {
            let mut prompt = ids[..length].to_vec();
            prompt[length - 1] = 5;
            let found = session.continue_with(&prompt).unwrap();
            let fresh = Session::new(&model, None).unwrap().read(&prompt).unwrap();
            assert_close(name, &found, &fresh, 1e-4);
        }
    }
}

#[test]
fn a_session_is_as_before_when_a_prompt_is_refused() {
    let model = load("llama");
    let mut session = Session::new(&model, None).unwrap();
    session.read(&[1, 2, 3]).unwrap();
    for wrong in [&[9999][..], &[1, 2, 9999], &[]] {
        let error = session.continue_with(wrong).unwrap_err().to_string();
        assert!(error.starts_with("prompt: "), "{error}");
        assert_eq!(session.tokens(), [1, 2, 3]);
    }
    let next = session.read(&[4]).unwrap();
    assert_close("llama", &next, &logits_after(&model, None, &[1, 2, 3, 4]), 1e-4);
}

/// Checkpoints that other programs quantised.
const QUANTIZED: &[&str] =
    &["gpt-oss-mxfp4", "llama-mlx-mxfp4", "llama-mlx4", "llama-nf4", "qwen2-fp4"];

#[test]
fn quantised_checkpoints_give_the_logits_of_the_programs_that_wrote_them() {
    for name in QUANTIZED {
        let expected = tensors(folder(name).join("expected.safetensors"));
        let ids = rows(&expected["input_ids"]);
        let model = load(name);
        assert_close(name, &logits(&model, &ids), &expected["logits"], 1e-4);
        // One token after the other, by other kernels.
        let mut session = Session::new(&model, None).unwrap();
        for end in 1..=ids[0].len() {
            let found = session.continue_with(&ids[0][..end]).unwrap();
            let wanted = expected["logits"].get(0).unwrap().get(end - 1).unwrap();
            assert_close(name, &found.flatten_all().unwrap(), &wanted, 1e-4);
        }
        // Written out, it is dense, and no configuration says otherwise.
        let written = tempfile::tempdir().unwrap();
        model.save(written.path(), DType::F32, None).unwrap();
        let dense = Model::load(written.path(), DType::F32, &device()).unwrap();
        assert_close(name, &logits(&dense, &ids), &expected["logits"], 1e-4);
    }
}

/// The gradients of a batch's mean loss, by the name of the tensor in PEFT's file.
fn gradients(
    (model, adapter): (&Model, &Arc<Adapter>),
    batch: &Batch,
    checkpointing: bool,
    gradients: &Gradients,
) -> (f64, HashMap<String, Tensor>) {
    gradients.clear().unwrap();
    let tape = Tape::training().with_checkpointing(checkpointing);
    let loss = model.loss(&tape, batch, Some(adapter)).unwrap();
    assert_eq!(loss.tokens, batch.target_tokens);
    let sum = f64::from(loss.sum.tensor().to_scalar::<f32>().unwrap());
    tape.backward(&loss.sum, 1.0 / loss.tokens as f64, &mut &*gradients).unwrap();
    let named = adapter
        .parameters()
        .entries()
        .iter()
        .enumerate()
        .map(|(index, entry)| {
            let gradient = gradients.view(ParameterId(index)).unwrap().copy().unwrap();
            let gradient = gradient.to_device(&Device::Cpu).unwrap();
            (entry.name.clone(), gradient)
        })
        .collect();
    (sum / loss.tokens as f64, named)
}

fn lora_batch(expected: &HashMap<String, Tensor>) -> Batch {
    let labels = expected["labels"].to_dtype(DType::I64).unwrap().to_vec2::<i64>().unwrap();
    batch(&rows(&expected["input_ids"]), &labels)
}

/// Compares every gradient of `lora_expected.safetensors` and returns how many there were.
fn compare_gradients(
    name: &str,
    expected: &HashMap<String, Tensor>,
    found: &HashMap<String, Tensor>,
) -> usize {
    let mut compared = 0;
    for (key, tensor) in expected {
        let Some(path) = key.strip_prefix("grad.base_model.model.") else { continue };
        let path = path.replace(".base_layer.bias", ".bias");
        let gradient = match path.strip_suffix(".weight") {
            Some(path) if path.ends_with(".lora_A") || path.ends_with(".lora_B") => {
                found[path].t().unwrap().contiguous().unwrap()
            }
            None if path.contains(".lora_embedding_") => {
                found[&path].t().unwrap().contiguous().unwrap()
            }
            _ => found[&path].clone(),
        };
        let size = tensor.abs().unwrap().flatten_all().unwrap().max(0).unwrap();
        let size = f64::from(size.to_scalar::<f32>().unwrap());
        assert!(size > 0.0, "{name} {path}: the fixture's gradient is zero");
        assert_close(&format!("{name} {path}"), &gradient, tensor, 1e-4 * size);
        compared += 1;
    }
    compared
}

const METHODS: &[(&str, &str)] = &[
    ("gemma2", "embedding"),
    ("gemma2", "tokens"),
    ("llama", "dora"),
    ("llama", "embedding"),
    ("llama", "eva"),
    ("llama", "modules"),
    ("llama", "modules-norm"),
    ("llama", "olora"),
    ("llama", "pissa"),
    ("llama-nf4", "lora"),
    ("llama", "tokens"),
    ("qwen2", "bias-all"),
    ("qwen2", "bias-lora"),
    ("qwen2", "dora"),
    ("qwen2", "embedding"),
    ("qwen2", "head"),
    ("qwen2", "modules-embedding"),
    ("qwen2", "modules-head"),
    ("qwen2", "pissa"),
    ("qwen2-fp4", "lora"),
    ("qwen2", "tokens"),
];

/// Where something was taken from the weights, two programs' f32 factors of them differ by rounding.
fn tolerance(name: &str) -> f64 {
    if ["pissa", "olora"].contains(&name) { 1e-4 } else { 1e-5 }
}

fn method(base: &str, name: &str) -> (PathBuf, HashMap<String, Tensor>) {
    let path = folder(base).join(format!("method-{name}"));
    let expected = tensors(path.join("lora_expected.safetensors"));
    (path, expected)
}

#[test]
fn every_method_gives_the_logits_and_gradients_of_peft_and_follows_its_steps() {
    for (base, name) in METHODS {
        let (path, expected) = method(base, name);
        let model = load(base);
        let adapter = load_adapter(&model, &path);
        let found = adapted_logits(&model, &adapter, &rows(&expected["input_ids"]));
        assert_close(name, &found, &expected["logits"], tolerance(name));
        let name = format!("{base} {name}");
        let buffer = Gradients::new(adapter.parameters()).unwrap();
        for checkpointing in [false, true] {
            let batch = lora_batch(&expected);
            let (_, gradients) = gradients((&model, &adapter), &batch, checkpointing, &buffer);
            let compared = compare_gradients(&name, &expected, &gradients);
            assert_eq!(compared, adapter.parameters().entries().len(), "{name}");
        }
        let training = json(path.join("training.json"));
        assert_eq!(numbers(&training["losses"]).len(), 20);
        follow(&model, &adapter, &training, &expected["batches"], None, 0.01);
    }
}

/// What is made of a model and its adapter a weight at a time is what was written of the merged model.
fn assert_same_files(written: &Path, (model, adapter): &(Arc<Model>, Arc<Adapter>), dtype: DType) {
    let read = |name: &str| std::fs::read(written.join(name)).unwrap();
    let merged = Merged::new(model, adapter, dtype).unwrap();
    assert_eq!(merged.config().unwrap(), read(Merged::CONFIG));
    let length = merged.length();
    let mut bytes = Vec::new();
    merged.weights().read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes.len() as u64, length);
    assert!(bytes == read(Merged::WEIGHTS), "the weights differ");
}

#[test]
fn every_method_survives_being_written_read_and_merged() {
    for (base, name) in METHODS {
        let (path, expected) = method(base, name);
        let ids = rows(&expected["input_ids"]);
        let model = load(base);
        let adapter = load_adapter(&model, &path);
        let logits_before = adapted_logits(&model, &adapter, &ids);
        let written = tempfile::tempdir().unwrap();
        adapter.save(written.path(), base).unwrap();
        let again = load_adapter(&model, written.path());
        // What was taken from the weights is written into the file, as PEFT does when it is told the start.
        assert_close(name, &adapted_logits(&model, &again, &ids), &logits_before, 1e-5);
        if path.join("plain").is_dir() {
            let plain = load_adapter(&model, path.join("plain"));
            let found = adapted_logits(&model, &plain, &ids);
            assert_close(name, &found, &logits_before, tolerance(name));
            assert_eq!(again.config().unwrap().rank, 8);
            assert_eq!(again.parameters().len(), plain.parameters().len(), "{name}");
        } else {
            let weights = adapter::ADAPTER_WEIGHTS;
            assert_same_tensors(name, &path.join(weights), &written.path().join(weights));
            let config = |folder: &Path| json(folder.join(adapter::ADAPTER_CONFIG));
            let (theirs, ours) = (config(&path), config(written.path()));
            let key = TokenIndices::KEY;
            assert_eq!(theirs[key], ours[key], "{base} {name}");
        }
        let unmerged = (model, adapter);
        let model = Model::load(folder(base), DType::F32, &device()).unwrap();
        let adapter = load_adapter(&model, &path);
        let was_tied = model.config().tie_word_embeddings;
        let merged = adapter.merge(model).unwrap();
        assert_close(name, &logits(&merged, &ids), &logits_before, 2e-4);
        merged.save(written.path(), DType::F32, None).unwrap();
        if !unmerged.0.is_quantized() {
            assert_same_files(written.path(), &unmerged, DType::F32);
        }
        let again = Model::load(written.path(), DType::F32, &device()).unwrap();
        assert_close(name, &logits(&again, &ids), &logits(&merged, &ids), 0.0);
        let apart = ["modules-embedding", "modules-head", "embedding", "head"].contains(name);
        assert_eq!(again.config().tie_word_embeddings, was_tied && !apart, "{base} {name}");
    }
}

#[test]
fn every_method_starts_from_the_model_as_it_is() {
    use metal_candle::adapter::{Biases, StartFrom};
    let modules = |names: &[&str]| names.iter().map(|name| name.to_string()).collect();
    let config = LoraConfig::default;
    for (base, config) in [
        ("llama", LoraConfig { dora: true, ..config() }),
        ("qwen2", LoraConfig { dora: true, rslora: true, ..config() }),
        ("llama", LoraConfig { start: StartFrom::Gaussian, ..config() }),
        ("llama", LoraConfig { start: StartFrom::Pissa, ..config() }),
        ("qwen2", LoraConfig { start: StartFrom::PissaIterations(4), dora: true, ..config() }),
        ("qwen2", LoraConfig { start: StartFrom::Olora, rank: 3, ..config() }),
        ("qwen2", LoraConfig { bias: Biases::All, ..config() }),
        ("qwen2", LoraConfig { modules_to_save: modules(&["lm_head", "norm"]), ..config() }),
        (
            "qwen2",
            LoraConfig { modules_to_save: modules(&["norm", "input_layernorm"]), ..config() },
        ),
        (
            "llama",
            LoraConfig {
                targets: Targets::Names(modules(&["q_proj"])),
                modules_to_save: modules(&["embed_tokens", "down_proj"]),
                ..config()
            },
        ),
        (
            "qwen2",
            LoraConfig {
                targets: Targets::Names(modules(&["embed_tokens", "lm_head"])),
                rank: 3,
                ..config()
            },
        ),
        (
            "llama",
            LoraConfig {
                targets: Targets::Names(modules(&["o_proj", "lm_head"])),
                start: StartFrom::Gaussian,
                trainable_token_indices: Some(TokenIndices::Embedding(vec![5, 13])),
                ..config()
            },
        ),
    ] {
        let model = load(base);
        let adapter = new_adapter(&model, &config, 3);
        let ids = rows(&tensors(folder(base).join("expected.safetensors"))["input_ids"]);
        let (plain, adapted) = (logits(&model, &ids), adapted_logits(&model, &adapter, &ids));
        assert_close(&format!("{config:?}"), &adapted, &plain, 2e-5);
        // And everything that is trained learns: after two steps, as B's gradient is zero while A's isn't.
        let buffer = Gradients::new(adapter.parameters()).unwrap();
        let zeros =
            || Tensor::zeros(adapter.parameters().len(), DType::F32, model.device()).unwrap();
        let moments = (zeros(), zeros());
        let before = adapter.parameters().values().copy().unwrap();
        for step in 1..=2 {
            gradients((&model, &adapter), &next_token_batch(&ids), step == 2, &buffer);
            let options = adamw::Options {
                learning_rate: 1e-3,
                beta1: 0.9,
                beta2: 0.999,
                epsilon: 1e-12,
                weight_decay: 0.0,
                bias_correction: true,
            };
            adamw_step((adapter.parameters(), &buffer), &moments, step, 1.0, &options);
        }
        for entry in adapter.parameters().entries() {
            let moved = largest_difference(
                &entry.of(&before).unwrap(),
                &entry.of(adapter.parameters().values()).unwrap(),
            );
            assert!(moved > 1e-4, "{config:?}: {} moved by {moved}", entry.name);
        }
    }
}

#[test]
fn lora_logits_loss_and_gradients_equal_those_of_peft() {
    for name in FAMILIES {
        let model = load(name);
        let adapter = load_adapter(&model, folder(name).join("adapter"));
        let buffer = Gradients::new(adapter.parameters()).unwrap();
        let expected = tensors(folder(name).join("lora_expected.safetensors"));
        let found = adapted_logits(&model, &adapter, &rows(&expected["input_ids"]));
        assert_close(name, &found, &expected["logits"], 1e-4);
        for checkpoint in [false, true] {
            let (loss, gradients) =
                gradients((&model, &adapter), &lora_batch(&expected), checkpoint, &buffer);
            let wanted = f64::from(
                expected["loss"].flatten_all().unwrap().get(0).unwrap().to_scalar::<f32>().unwrap(),
            );
            assert!((loss - wanted).abs() < 1e-4, "{name}: loss {loss}, expected {wanted}");
            let compared = compare_gradients(name, &expected, &gradients);
            assert_eq!(compared, adapter.parameters().entries().len(), "{name}");
        }
    }
}

#[test]
fn every_way_of_choosing_layers_equals_peft() {
    for variant in ["adapter-rslora", "adapter-patterns", "adapter-layers", "adapter-regex"] {
        let model = load("llama");
        let path = folder("llama").join(variant);
        let adapter = load_adapter(&model, &path);
        let buffer = Gradients::new(adapter.parameters()).unwrap();
        let expected = tensors(path.join("lora_expected.safetensors"));
        let found = adapted_logits(&model, &adapter, &rows(&expected["input_ids"]));
        assert_close(variant, &found, &expected["logits"], 1e-4);
        let (_, gradients) = gradients((&model, &adapter), &lora_batch(&expected), false, &buffer);
        let compared = compare_gradients(variant, &expected, &gradients);
        assert_eq!(compared, adapter.parameters().entries().len(), "{variant}");
    }
}

#[test]
fn what_peft_can_ask_for_and_is_not_supported_is_named() {
    let folder = fixtures().join("peft-unsupported");
    let index = json(folder.join("index.json"));
    for (file, reason) in index.as_object().unwrap() {
        let temporary = tempfile::tempdir().unwrap();
        std::fs::copy(folder.join(file), temporary.path().join(adapter::ADAPTER_CONFIG)).unwrap();
        let message = adapter::read_config(temporary.path()).unwrap_err().to_string();
        let key = reason["key"].as_str().unwrap();
        assert!(message.contains(key), "{file}: `{message}` does not name {key}");
    }
}

#[test]
fn an_adapter_survives_being_written_and_read() {
    for (name, variant) in [
        ("llama", "adapter"),
        ("llama", "adapter-rslora"),
        ("llama", "adapter-patterns"),
        ("llama", "adapter-layers"),
        ("llama", "adapter-regex"),
        ("phi3", "adapter"),
    ] {
        let model = load(name);
        let adapter = load_adapter(&model, folder(name).join(variant));
        let written = tempfile::tempdir().unwrap();
        adapter.save(written.path(), name).unwrap();
        let again = load_adapter(&model, written.path());
        let ids = rows(&tensors(folder(name).join("expected.safetensors"))["input_ids"]);
        let [first, second] =
            [&adapter, &again].map(|adapter| adapted_logits(&model, adapter, &ids));
        assert_close(variant, &first, &second, 0.0);
    }
}

#[test]
fn a_written_adapter_is_the_one_that_peft_wrote() {
    for name in FAMILIES {
        let original = folder(name).join("adapter");
        let adapter = load_adapter(&load(name), &original);
        let written = tempfile::tempdir().unwrap();
        adapter.save(written.path(), name).unwrap();
        let (theirs, ours) = (
            tensors(original.join(adapter::ADAPTER_WEIGHTS)),
            tensors(written.path().join(adapter::ADAPTER_WEIGHTS)),
        );
        assert_eq!(theirs.len(), ours.len(), "{name}");
        for (key, tensor) in &theirs {
            assert_close(&format!("{name} {key}"), tensor, &ours[key], 0.0);
        }
        let (theirs, ours) = (
            json(original.join(adapter::ADAPTER_CONFIG)),
            json(written.path().join(adapter::ADAPTER_CONFIG)),
        );
        for (key, value) in ours.as_object().unwrap() {
            let sorted = |value: &Value| {
                let mut names: Vec<String> =
                    value.as_array().unwrap().iter().map(Value::to_string).collect();
                names.sort();
                names
            };
            if key == "target_modules" {
                assert_eq!(sorted(value), sorted(&theirs[key]), "{name}");
            } else if value.is_number() {
                assert_eq!(value.as_f64(), theirs[key].as_f64(), "{name} {key}");
            } else {
                assert_eq!(value, &theirs[key], "{name} {key}");
            }
        }
    }
}

#[test]
fn adapters_of_mlx_lm_give_its_logits() {
    for (base, variant, tensors_read) in [
        ("llama", "adapter-mlx", 2 * 21),
        ("llama", "adapter-mlx-keys", 2 * 4),
        ("llama", "adapter-mlx-dora", 3 * 21),
        ("llama-odd", "adapter-mlx-dora-bias", 3 * 14),
    ] {
        let model = load(base);
        let path = folder(base).join(variant);
        let adapter = load_adapter(&model, &path);
        assert_eq!(adapter.parameters().entries().len(), tensors_read, "{variant}");
        let expected = tensors(path.join("expected.safetensors"));
        let found = adapted_logits(&model, &adapter, &rows(&expected["input_ids"]));
        assert_close(variant, &found, &expected["logits"], 1e-4);
    }
}

fn save_as(adapter: &Adapter, format: AdapterFormat) -> tempfile::TempDir {
    let written = tempfile::tempdir().unwrap();
    adapter.save_as(written.path(), "base", format).unwrap();
    assert_eq!(AdapterFormat::of(written.path()).unwrap(), format);
    let (_, base) = adapter::read_config(written.path()).unwrap();
    assert_eq!(base.as_deref(), Some("base"));
    written
}

fn assert_same_tensors(name: &str, expected: &Path, found: &Path) {
    let (expected, found) = (tensors(expected), tensors(found));
    assert_eq!(expected.len(), found.len(), "{name}");
    for (key, tensor) in &expected {
        assert_close(&format!("{name} {key}"), tensor, &found[key], 0.0);
    }
}

#[test]
fn an_adapter_keeps_its_bits_between_the_formats() {
    use AdapterFormat::{Mlx, Peft};
    for (name, variant, format) in [
        ("llama", "adapter", Peft),
        ("llama", "adapter-rslora", Peft),
        ("llama", "adapter-layers", Peft),
        ("llama", "adapter-regex", Peft),
        ("llama-odd", "adapter", Peft),
        ("gemma3-text", "adapter", Peft),
        ("phi3", "adapter", Peft),
        ("llama", "adapter-mlx", Mlx),
        ("llama", "adapter-mlx-keys", Mlx),
        ("llama", "adapter-mlx-dora", Mlx),
        ("llama", "method-dora", Peft),
    ] {
        let other = if format == Peft { Mlx } else { Peft };
        let original = folder(name).join(variant);
        let model = load(name);
        let adapter = load_adapter(&model, &original);
        let there = save_as(&adapter, other);
        let converted = load_adapter(&model, there.path());
        let back = save_as(&converted, format);
        let weights = format.weights();
        assert_same_tensors(variant, &original.join(weights), &back.path().join(weights));
        let ids = rows(&tensors(folder(name).join("expected.safetensors"))["input_ids"]);
        let again = load_adapter(&model, back.path());
        let [first, second, third] =
            [&adapter, &converted, &again].map(|adapter| adapted_logits(&model, adapter, &ids));
        assert_close(variant, &first, &second, 0.0);
        assert_close(variant, &first, &third, 0.0);
    }
}

#[test]
fn layers_are_told_to_mlx_lm_by_names_or_by_paths() {
    let model = load("llama");
    let config = |variant: &str| {
        let adapter = load_adapter(&model, folder("llama").join(variant));
        json(save_as(&adapter, AdapterFormat::Mlx).path().join(adapter::ADAPTER_CONFIG))
    };
    let all = config("adapter");
    assert_eq!((&all["num_layers"], &all["fine_tune_type"]), (&3.into(), &"lora".into()));
    let parameters = &all["lora_parameters"];
    assert_eq!(parameters["keys"].as_array().unwrap().len(), 7);
    assert_eq!((&parameters["rank"], &parameters["scale"]), (&4.into(), &3.0.into()));
    let last = config("adapter-mlx-keys");
    assert_eq!(last["num_layers"], 2);
    assert_eq!(
        last["lora_parameters"]["keys"],
        serde_json::json!(["self_attn.q_proj", "mlp.down_proj"])
    );
    // The layer in the middle.
    let middle = config("adapter-layers");
    assert_eq!(middle["num_layers"], 3);
    assert_eq!(middle["lora_parameters"]["keys"][0], "model.layers.1.self_attn.q_proj");
}

#[test]
fn what_mlx_lm_cannot_hold_is_refused_before_anything_is_written() {
    let model = load("llama");
    let written = tempfile::tempdir().unwrap();
    let refused = |adapter: &Adapter| {
        let error = adapter.save_as(written.path(), "base", AdapterFormat::Mlx).unwrap_err();
        assert!(std::fs::read_dir(written.path()).unwrap().next().is_none());
        error.to_string()
    };
    let patterns = load_adapter(&model, folder("llama").join("adapter-patterns"));
    let error = refused(&patterns);
    assert!(error.contains("one rank for all layers") && error.contains("_proj` is 2"), "{error}");
    let alphas = LoraConfig {
        rank: 8,
        alpha_pattern: [("q_proj".into(), 4.0)].into(),
        ..LoraConfig::default()
    };
    let error = refused(&new_adapter(&model, &alphas, 1));
    assert!(error.contains("one scale for all layers") && error.contains("is 0.5"), "{error}");
    let whole = load_adapter(&model, folder("llama").join("method-modules"));
    assert!(refused(&whole).contains("embed_tokens"));
    let full = Adapter::full(&model).unwrap();
    assert!(refused(&full).contains("every weight"));
}

#[test]
fn mistakes_in_an_adapter_of_mlx_lm_are_named() {
    let model = load("llama");
    let good = folder("llama").join("adapter-mlx-keys");
    let with = |config: &dyn Fn(&mut Value), weights: &dyn Fn(&mut HashMap<String, Tensor>)| {
        let changed = tempfile::tempdir().unwrap();
        let mut json = json(good.join(adapter::ADAPTER_CONFIG));
        config(&mut json);
        let path = changed.path().join(adapter::ADAPTER_CONFIG);
        std::fs::write(path, json.to_string()).unwrap();
        let mut values = tensors(good.join(adapter::MLX_WEIGHTS));
        weights(&mut values);
        let path = changed.path().join(adapter::MLX_WEIGHTS);
        candle_core::safetensors::save(&values, path).unwrap();
        // An older state that training has left.
        std::fs::write(changed.path().join("0000100_adapters.safetensors"), "x").unwrap();
        Adapter::load(&model, changed.path()).map(|_| ()).map_err(|error| error.to_string())
    };
    assert_eq!(with(&|_| (), &|_| ()), Ok(()));
    let a = "model.layers.2.self_attn.q_proj.lora_a";
    let error = with(&|_| (), &|weights| drop(weights.remove(a))).unwrap_err();
    assert!(error.contains("adapters.safetensors") && error.contains(a), "{error}");
    let error = with(&|_| (), &|weights| {
        let turned = weights[a].t().unwrap().contiguous().unwrap();
        weights.insert(a.into(), turned);
    })
    .unwrap_err();
    assert!(error.contains("[4, 32]") && error.contains("[32, 4]"), "{error}");
    // Of a layer that is none of the last two, of an embedding and of experts.
    for other in [
        "model.layers.0.self_attn.q_proj.lora_a",
        "model.embed_tokens.lora_a",
        "model.layers.2.mlp.switch_mlp.up_proj.lora_a",
    ] {
        let error = with(&|_| (), &|weights| {
            weights.insert(other.into(), weights[a].clone());
        })
        .unwrap_err();
        assert!(error.contains(&format!("`{other}` belongs to no layer")), "{error}");
    }
    let keys = |json: &mut Value| json["lora_parameters"]["keys"] = "embed_tokens".into();
    let error = with(&keys, &|_| ()).unwrap_err();
    assert!(error.contains("adapter_config.json: lora_parameters.keys is"), "{error}");
    let keys =
        |json: &mut Value| json["lora_parameters"]["keys"][0] = "mlp.switch_mlp.up_proj".into();
    let error = with(&keys, &|_| ()).unwrap_err();
    assert!(error.contains("`mlp.switch_mlp.up_proj` is not a linear layer"), "{error}");
    let error = with(&|json| json["fine_tune_type"] = "full".into(), &|_| ()).unwrap_err();
    assert!(error.contains("holds weights of the model"), "{error}");
    let error = Adapter::load(&load("llama-odd"), &good).unwrap_err().to_string();
    assert!(error.contains("another base model"), "{error}");
}

/// An adapter's folder after a change of its configuration and its weights.
fn changed_adapter(
    original: &Path,
    config: impl FnOnce(&mut Value),
    weights: impl FnOnce(&mut HashMap<String, Tensor>),
) -> tempfile::TempDir {
    let changed = tempfile::tempdir().unwrap();
    let mut json = json(original.join(adapter::ADAPTER_CONFIG));
    config(&mut json);
    std::fs::write(changed.path().join(adapter::ADAPTER_CONFIG), json.to_string()).unwrap();
    let name = AdapterFormat::of(original).unwrap().weights();
    let mut values = tensors(original.join(name));
    weights(&mut values);
    candle_core::safetensors::save(&values, changed.path().join(name)).unwrap();
    changed
}

fn parameter_names(adapter: &Adapter) -> Vec<&str> {
    adapter.parameters().entries().iter().map(|entry| entry.name.as_str()).collect()
}

#[test]
fn layers_that_mlx_lm_chose_before_it_wrote_keys_are_those_in_the_file() {
    let model = load("llama");
    let original = folder("llama").join("adapter-mlx");
    let is_chosen =
        |name: &str| name.contains("self_attn.q_proj") || name.contains("self_attn.v_proj");
    let few =
        changed_adapter(&original, |_| (), |weights| weights.retain(|name, _| is_chosen(name)));
    let adapter = load_adapter(&model, few.path());
    assert_eq!(adapter.parameters().entries().len(), 2 * 2 * 3);
    let others_are_zero = changed_adapter(
        &original,
        |_| (),
        |weights| {
            let others =
                weights.iter_mut().filter(|(name, _)| name.ends_with("lora_b") && !is_chosen(name));
            others.for_each(|(_, b)| *b = b.zeros_like().unwrap());
        },
    );
    let whole = load_adapter(&model, others_are_zero.path());
    let ids = rows(&tensors(original.join("expected.safetensors"))["input_ids"]);
    let [found, expected] = [&adapter, &whole].map(|adapter| adapted_logits(&model, adapter, &ids));
    assert_close("few layers", &found, &expected, 1e-5);
    // Written again, it has the same layers.
    for format in [AdapterFormat::Peft, AdapterFormat::Mlx] {
        let again = load_adapter(&model, save_as(&adapter, format).path());
        assert_eq!(parameter_names(&again), parameter_names(&adapter));
    }
    let b = "model.layers.1.self_attn.v_proj.lora_b";
    let half = changed_adapter(&original, |_| (), |weights| drop(weights.remove(b)));
    let error = Adapter::load(&model, half.path()).unwrap_err().to_string();
    assert!(error.contains(&format!("has no tensor `{b}`")), "{error}");
    // An adapter for a model of two layers is none for one of three.
    let is_deeper = |name: &str| name.starts_with("model.layers.2.");
    for shallow in [
        changed_adapter(&original, |_| (), |weights| weights.retain(|name, _| !is_deeper(name))),
        changed_adapter(
            &original,
            |_| (),
            |weights| weights.retain(|name, _| is_chosen(name) && !is_deeper(name)),
        ),
    ] {
        let error = Adapter::load(&model, shallow.path()).unwrap_err().to_string();
        assert!(error.contains("has no tensor") && error.contains("another base model"), "{error}");
    }
}

#[test]
fn targets_that_a_base_lacks_matter_to_a_new_adapter_alone() {
    let model = load("llama");
    let original = folder("llama").join("adapter");
    let with = |change: &dyn Fn(&mut Vec<Value>)| {
        let config = |json: &mut Value| change(json["target_modules"].as_array_mut().unwrap());
        let changed = changed_adapter(&original, config, |_| ());
        Adapter::load(&model, changed.path())
    };
    let more =
        with(&|targets| targets.extend(["W_pack".into(), "query_key_value".into()])).unwrap();
    let plain = load_adapter(&model, &original);
    let values = |adapter: &Adapter| adapter.parameters().values().to_vec1::<f32>().unwrap();
    assert_eq!(values(&more), values(&plain));
    // What it does is said again when it is written.
    let written = tempfile::tempdir().unwrap();
    more.save(written.path(), "llama").unwrap();
    assert_eq!(
        json(written.path().join(adapter::ADAPTER_CONFIG))["target_modules"],
        json(original.join(adapter::ADAPTER_CONFIG))["target_modules"]
    );
    let error = with(&|targets| *targets = vec!["W_pack".into()]).unwrap_err().to_string();
    assert!(error.contains("adapter_config.json") && error.contains("`W_pack` is not"), "{error}");
    let names = Targets::Names(vec!["q_proj".into(), "W_pack".into()]);
    let config = LoraConfig { targets: names, ..LoraConfig::default() };
    let error = Adapter::new(&model, &config, 1).unwrap_err().to_string();
    assert!(error.contains("`W_pack` is not a linear layer"), "{error}");
}

#[test]
fn modules_that_peft_saves_whole_get_no_update() {
    for (method_name, also) in [("modules", "lm_head"), ("modules-norm", "o_proj")] {
        let model = load("llama");
        let (path, expected) = method("llama", method_name);
        let both = |json: &mut Value| {
            json["target_modules"].as_array_mut().unwrap().push(also.into());
        };
        let changed = changed_adapter(&path, both, |_| ());
        let adapter = load_adapter(&model, changed.path());
        let found = adapted_logits(&model, &adapter, &rows(&expected["input_ids"]));
        assert_close(method_name, &found, &expected["logits"], 1e-5);
        let written = tempfile::tempdir().unwrap();
        adapter.save(written.path(), "llama").unwrap();
        let again = load_adapter(&model, written.path());
        assert_eq!(parameter_names(&again), parameter_names(&adapter));
    }
}

#[test]
fn starts_that_take_nothing_from_the_base_leave_a_finished_adapter_as_it_is() {
    let model = load("llama");
    let (path, expected) = method("llama", "dora");
    for start in ["orthogonal", "mica", "eva", "gaussian"] {
        let config = |json: &mut Value| json["init_lora_weights"] = start.into();
        let changed = changed_adapter(&path, config, |_| ());
        let adapter = load_adapter(&model, changed.path());
        let found = adapted_logits(&model, &adapter, &rows(&expected["input_ids"]));
        assert_close(start, &found, &expected["logits"], tolerance("dora"));
    }
}

#[test]
fn a_file_is_compared_with_its_configuration_before_anything_is_computed() {
    // Whatever a weight is asked for is an error of this model.
    let model = Model::load(folder("llama"), DType::F32, &device()).unwrap().without_weights();
    for (name, start) in
        [("method-pissa", "pissa"), ("method-olora", "olora"), ("method-dora", "true")]
    {
        let original = folder("llama").join(name);
        let config = |json: &mut Value| json["init_lora_weights"] = start.into();
        let empty = changed_adapter(&original, config, HashMap::clear);
        let error = Adapter::load(&model, empty.path()).unwrap_err().to_string();
        assert!(error.contains("has no tensor `base_model.model."), "{error}");
        let config = |json: &mut Value| json["r"] = 8.into();
        let other = changed_adapter(&original, config, |_| ());
        let error = Adapter::load(&model, other.path()).unwrap_err().to_string();
        assert!(error.contains("has shape [4, 32]") && error.contains("[8, 32]"), "{error}");
    }
}

#[test]
fn an_adapter_is_read_in_turns_of_which_none_is_in_another() {
    let model = load("llama");
    for (name, weights) in [("pissa", 21), ("olora", 9), ("dora", 0)] {
        let (path, expected) = method("llama", name);
        let (device_turn, turns) = (std::sync::Mutex::new(()), std::cell::Cell::new(0));
        let turn = || {
            turns.set(turns.get() + 1);
            device_turn.try_lock().unwrap()
        };
        let adapter = Arc::new(Adapter::load_in_turns(&model, &path, turn).unwrap());
        let found = adapted_logits(&model, &adapter, &rows(&expected["input_ids"]));
        assert_close(name, &found, &expected["logits"], tolerance(name));
        // One for each weight that something is taken from.
        assert_eq!(turns.get(), weights + 1, "{name}");
    }
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "vocab_size": 32,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32,
    });
    let config = Config::from_json(&config.to_string()).unwrap();
    let model = Model::random(config, DType::F32, &device(), 7).unwrap();
    let targets = Targets::Names(vec!["q_proj".into()]);
    let large = LoraConfig { rank: 129, targets, ..LoraConfig::default() };
    let written = tempfile::tempdir().unwrap();
    new_adapter(&model, &large, 1).save(written.path(), "base").unwrap();
    Adapter::load_in_turns(&model, written.path(), || ()).unwrap();
    let config = |json: &mut Value| json["init_lora_weights"] = "pissa".into();
    let open = changed_adapter(written.path(), config, |_| ());
    let error = Adapter::load_in_turns(&model, open.path(), || ()).unwrap_err().to_string();
    assert!(error.contains("adapter_config.json") && error.contains("a rank of 128"), "{error}");
}

#[test]
fn every_choice_of_layers_can_be_read_again() {
    let pattern = Targets::Pattern(r".*layers\.0\..*q_proj|.*layers\.1\..*up_proj".into());
    let names = Targets::Names(vec!["k_proj".into(), "down_proj".into()]);
    for (targets, layers, last_layers, adapted) in [
        (Targets::all_linear(), None, None, 21),
        (Targets::all_linear(), None, Some(1), 7),
        (pattern.clone(), Some(vec![0, 1]), None, 2),
        (pattern, None, None, 2),
        (names, Some(vec![1]), None, 2),
    ] {
        let config = LoraConfig {
            rank: 2,
            alpha: 16.0,
            targets,
            layers,
            last_layers,
            ..LoraConfig::default()
        };
        let model = load("llama");
        let adapter = new_adapter(&model, &config, 3);
        assert_eq!(adapter.parameters().entries().len(), 2 * adapted, "{config:?}");
        let written = tempfile::tempdir().unwrap();
        adapter.save(written.path(), "llama").unwrap();
        let again = load_adapter(&model, written.path());
        let values = |adapter: &Adapter| adapter.parameters().values().to_vec1::<f32>().unwrap();
        assert_eq!(values(&adapter), values(&again), "{config:?}");
        // Readers other than PEFT know lists of names only, and whole alphas.
        let json = json(written.path().join(adapter::ADAPTER_CONFIG));
        assert_eq!(json["lora_alpha"], 16);
        assert!(json["target_modules"].is_array() || json["layers_to_transform"].is_null());
    }
}

#[test]
fn merging_keeps_the_logits_and_the_merged_model_can_be_read_again() {
    for name in FAMILIES {
        let model = Model::load(folder(name), DType::F32, &device()).unwrap();
        let adapter = load_adapter(&model, folder(name).join("adapter"));
        let expected = tensors(folder(name).join("lora_expected.safetensors"));
        let ids = rows(&expected["input_ids"]);
        let model = adapter.merge(model).unwrap();
        assert_close(name, &logits(&model, &ids), &expected["logits"], 2e-4);
        let unmerged = load(name);
        let unmerged = (unmerged.clone(), load_adapter(&unmerged, folder(name).join("adapter")));
        let halves = tempfile::tempdir().unwrap();
        model.save(halves.path(), DType::BF16, None).unwrap();
        assert_same_files(halves.path(), &unmerged, DType::BF16);
        let written = tempfile::tempdir().unwrap();
        model.save(written.path(), DType::F32, Some(&folder(name))).unwrap();
        let again = Model::load(written.path(), DType::F32, &device()).unwrap();
        assert_close(name, &logits(&model, &ids), &logits(&again, &ids), 0.0);
    }
}

#[test]
fn an_adapter_for_another_base_is_an_error_that_says_so() {
    let model = load("llama-odd");
    let error = Adapter::load(&model, folder("llama").join("adapter")).unwrap_err().to_string();
    assert!(error.contains("another base model"), "{error}");
    // Nor is one used that was made for another model of the same shape.
    let adapter = load_adapter(&load("llama"), folder("llama").join("adapter"));
    let model = load("llama");
    let input = input(&model, &[vec![1, 2]]).with_adapter(Some(&adapter));
    let error = model.forward(&Tape::inference(), &input).unwrap_err().to_string();
    assert!(error.contains("another model"), "{error}");
    // Nor merged with that, but with its own once nobody else has it.
    let own = load("llama");
    let adapter = load_adapter(&own, folder("llama").join("adapter"));
    let again = Model::load(folder("llama"), DType::F32, &device()).unwrap();
    let error = adapter.merge(again).unwrap_err().to_string();
    assert!(error.contains("loaded again; Adapter::load"), "{error}");
    adapter.merge(Arc::try_unwrap(own).unwrap()).unwrap();
}

#[test]
fn a_position_that_no_text_has_is_an_error_and_leaves_the_model_as_it_was() {
    let model = load("llama");
    let ids = [vec![1, 2, 3]];
    let before = logits(&model, &ids);
    for position in [u32::MAX, 1 << 24] {
        let mut batch = next_token_batch(&ids);
        batch.positions[0] = position;
        let error = model.loss(&Tape::training(), &batch, None).unwrap_err().to_string();
        assert_eq!(error, format!("positions: is {position}, expected at most 16777215"));
    }
    assert_close("llama", &logits(&model, &ids), &before, 0.0);
}

/// A new adapter whose B isn't zero either.
pub fn random_adapter(model: &Model, config: &LoraConfig, seed: u64) -> Arc<Adapter> {
    let adapter = new_adapter(model, config, seed);
    let mut random = SplitMix64::new(seed);
    let parameters = adapter.parameters();
    for (index, entry) in parameters.entries().iter().enumerate() {
        let values: Vec<f32> =
            (0..entry.shape.elem_count()).map(|_| 0.2 * random.normal() as f32).collect();
        let values = Tensor::from_vec(values, entry.shape.clone(), model.device()).unwrap();
        parameters.set(ParameterId(index), &values).unwrap();
    }
    adapter
}

#[test]
fn rows_with_different_adapters_give_what_each_gives_alone() {
    for name in ["llama", "gemma2", "qwen2", "phi3", "olmo2"] {
        let model = load(name);
        let names =
            |names: &[&str]| Targets::Names(names.iter().map(|it| it.to_string()).collect());
        let last = |name| names(&[name]);
        let all = Targets::all_linear;
        let configs = [
            (2, all(), None),
            (8, last("o_proj"), None),
            (1, all(), Some(1)),
            (16, last("down_proj"), None),
            (3, all(), None),
            (4, names(&["o_proj", "down_proj"]), Some(1)),
            (5, all(), None),
            (7, last("down_proj"), Some(1)),
        ];
        let mut adapters: Vec<Option<Arc<Adapter>>> = configs
            .into_iter()
            .enumerate()
            .map(|(seed, (rank, targets, last_layers))| {
                let config =
                    LoraConfig { rank, alpha: 16.0, targets, last_layers, ..LoraConfig::default() };
                Some(random_adapter(&model, &config, seed as u64))
            })
            .collect();
        // One that replaces embedding, norms, biases and head, rows without any, and rows that share one.
        let full = Adapter::full(&model).unwrap();
        for (index, entry) in full.parameters().entries().iter().enumerate() {
            let view = full.parameters().view(ParameterId(index)).unwrap();
            let change = 1.0 + 0.05 * (index % 3 + 1) as f64;
            full.parameters().set(ParameterId(index), &(view * change).unwrap()).unwrap();
            assert!(entry.shape.elem_count() > 0);
        }
        let of_tables = [
            LoraConfig {
                targets: names(&["embed_tokens", "lm_head"]),
                rank: 6,
                ..LoraConfig::default()
            },
            LoraConfig {
                targets: last("o_proj"),
                trainable_token_indices: Some(TokenIndices::Embedding(vec![3, 16, 10])),
                ..LoraConfig::default()
            },
        ];
        adapters.extend(of_tables.iter().map(|it| Some(random_adapter(&model, it, 9))));
        adapters.insert(3, None);
        adapters.push(Some(Arc::new(full)));
        adapters.push(None);
        adapters.push(adapters[0].clone());
        let ids: Vec<Vec<u32>> = (0..adapters.len() as u32)
            .map(|row| (0..9).map(|place| (row * 13 + place * 7 + 3) % 90).collect())
            .collect();
        let input = input(&model, &ids).with_row_adapters(&adapters).unwrap();
        let together = logits_of(&model, &input);
        let plain = logits(&model, &ids);
        for (row, adapter) in adapters.iter().enumerate() {
            let row_of = |logits: &Tensor, row| logits.narrow(0, row, 1).unwrap();
            let alone = self::input(&model, &ids[row..=row]).with_adapter(adapter.as_ref());
            let (found, expected) = (row_of(&together, row), logits_of(&model, &alone));
            assert_close(&format!("{name}, row {row}"), &found, &expected, 1e-4);
            let moved = largest_difference(&row_of(&plain, row), &expected);
            assert_eq!(adapter.is_some(), moved > 1e-2, "{name}, row {row}: moved by {moved}");
        }
        let error = model.forward(&Tape::training(), &input).unwrap_err().to_string();
        assert!(error.contains("inference only"), "{error}");
        let too_few = self::input(&model, &ids).with_row_adapters(&adapters[1..]);
        assert!(too_few.unwrap_err().to_string().contains("one a row"));
        // Updates of the tables alone, none of which replaces a weight.
        for config in &of_tables {
            let adapter = random_adapter(&model, config, 10);
            let two = [None, Some(adapter.clone())];
            let input = self::input(&model, &ids[..2]).with_row_adapters(&two).unwrap();
            let found = logits_of(&model, &input).narrow(0, 1, 1).unwrap();
            let alone = self::input(&model, &ids[1..2]).with_adapter(Some(&adapter));
            assert_close(&format!("{name}, tables"), &found, &logits_of(&model, &alone), 1e-4);
        }
    }
}

#[test]
fn a_model_whose_weights_were_moved_is_no_good_without_its_adapter() {
    let model = Model::load(folder("llama"), DType::F32, &device()).unwrap();
    let ids = [vec![1, 2, 3]];
    let whole = logits(&model, &ids);
    let adapter = Arc::new(Adapter::full(&model).unwrap());
    let model = model.without_weights();
    assert_close("full", &adapted_logits(&model, &adapter, &ids), &whole, 0.0);
    let error = model.forward(&Tape::inference(), &input(&model, &ids)).unwrap_err();
    assert!(error.to_string().contains("moved into an adapter"), "{error}");
}

#[test]
fn models_and_adapters_are_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Model>();
    shared::<Adapter>();
    shared::<Tokenizer>();
    shared::<Dataset>();
    shared::<Batcher>();
    shared::<Handle>();
    shared::<Turns>();
}

#[test]
fn what_works_by_itself_may_move_to_another_thread() {
    fn moves<T: Send>() {}
    moves::<Trainer>();
    moves::<Session>();
    moves::<Ticket>();
    moves::<Answers>();
}

fn adamw_step(
    (parameters, gradients): (&Parameters, &Gradients),
    moments: &(Tensor, Tensor),
    step: usize,
    scale: f32,
    options: &adamw::Options,
) {
    adamw::step(
        parameters.values(),
        gradients.buffer(),
        &moments.0,
        &moments.1,
        step,
        scale,
        parameters.decayed(),
        options,
    )
    .unwrap();
    parameters.changed();
}

fn follow(
    model: &Model,
    adapter: &Arc<Adapter>,
    run: &Value,
    batches: &Tensor,
    clip: Option<f64>,
    weight_decay: f64,
) {
    let parameters = adapter.parameters();
    let (count, buffer) = (parameters.len(), Gradients::new(parameters).unwrap());
    let zeros = || Tensor::zeros(count, DType::F32, model.device()).unwrap();
    let moments = (zeros(), zeros());
    let losses = numbers(&run["losses"]);
    let norms = run.get("gradient_norms").map(numbers);
    let rates = run.get("learning_rates").map(numbers);
    for (index, wanted) in losses.iter().enumerate() {
        let ids = rows(&batches.get(index).unwrap());
        let (loss, _) = gradients((model, adapter), &next_token_batch(&ids), false, &buffer);
        assert!((loss - wanted).abs() <= 1e-3 * wanted, "step {index}: {loss}, expected {wanted}");
        let norm = flat::norm(buffer.buffer()).unwrap();
        if let Some(norms) = &norms {
            let wanted = norms[index];
            assert!((norm - wanted).abs() <= 5e-3 * wanted, "step {index}: norm {norm}, {wanted}");
        }
        let scale = clip.map_or(1.0, |clip| (clip / (norm + 1e-6)).min(1.0)) as f32;
        let learning_rate = rates.as_ref().map_or(5e-3, |rates| rates[index]);
        let options = adamw::Options {
            learning_rate,
            beta1: 0.9,
            beta2: 0.999,
            epsilon: 1e-8,
            weight_decay,
            bias_correction: true,
        };
        adamw_step((parameters, &buffer), &moments, index + 1, scale, &options);
    }
}

#[test]
fn twenty_adamw_steps_follow_peft() {
    for name in ["llama", "gemma2", "phi3"] {
        let training = json(folder(name).join("training.json"));
        let batches = &tensors(folder(name).join("training.safetensors"))["input_ids"];
        for run in ["constant", "clipped_cosine"] {
            let model = load(name);
            let adapter = load_adapter(&model, folder(name).join("adapter-init"));
            let clip = training[run]["clip_norm"].as_f64();
            assert_eq!(clip.is_some(), run == "clipped_cosine");
            assert_eq!(numbers(&training[run]["losses"]).len(), 20);
            follow(&model, &adapter, &training[run], batches, clip, 0.01);
        }
    }
}

#[test]
fn full_fine_tuning_follows_transformers() {
    for name in ["gpt-oss", "llama", "llama3", "qwen3-moe"] {
        let training = json(folder(name).join("training_full.json"));
        let batches = &tensors(folder(name).join("training_full.safetensors"))["input_ids"];
        let model = Model::load(folder(name), DType::F32, &device()).unwrap();
        let adapter = Arc::new(Adapter::full(&model).unwrap());
        let model = model.without_weights();
        follow(&model, &adapter, &training["constant"], batches, None, 0.0);
    }
}

#[test]
fn only_the_adapter_gets_gradients_and_only_its_path_has_nodes() {
    let model = load("llama");
    let config = LoraConfig { last_layers: Some(1), rank: 2, alpha: 16.0, ..LoraConfig::default() };
    let adapter = new_adapter(&model, &config, 1);
    let ids = rows(&tensors(folder("llama").join("expected.safetensors"))["input_ids"]);
    let batch = next_token_batch(&ids);
    let tape = Tape::training();
    model.loss(&tape, &batch, Some(&adapter)).unwrap();
    let last_layer = tape.len();
    let adapter =
        new_adapter(&model, &LoraConfig { rank: 2, alpha: 16.0, ..LoraConfig::default() }, 1);
    let tape = Tape::training();
    model.loss(&tape, &batch, Some(&adapter)).unwrap();
    let layers = model.config().layers.len();
    // Nothing before the first adapter has a node.
    assert!(last_layer * layers <= tape.len() + layers * 2, "{last_layer} of {}", tape.len());
    let tape = Tape::inference();
    model.loss(&tape, &batch, Some(&adapter)).unwrap();
    assert!(tape.is_empty());
}

#[test]
fn a_table_that_peft_writes_beside_its_update_has_to_be_the_models() {
    let model = load("llama");
    let outline = Model::outline(folder("llama"), DType::F32, &device(), None).unwrap();
    let original = folder("llama").join("method-embedding");
    let written = tempfile::tempdir().unwrap();
    let (weights, config) = (adapter::ADAPTER_WEIGHTS, adapter::ADAPTER_CONFIG);
    std::fs::copy(original.join(config), written.path().join(config)).unwrap();
    let mut all = tensors(original.join(weights));
    let tables = tensors(folder("llama").join("model.safetensors"));
    let (of_file, of_model) =
        ("base_model.model.lm_head.base_layer.weight", tables["lm_head.weight"].clone());
    let rounded = of_model.to_dtype(DType::BF16).unwrap();
    for (table, is_read) in
        [(of_model.clone(), true), (rounded, true), ((of_model * 1.5).unwrap(), false)]
    {
        all.insert(of_file.into(), table);
        candle_core::safetensors::save(&all, written.path().join(weights)).unwrap();
        Adapter::load(&outline, written.path()).unwrap();
        match Adapter::load(&model, written.path()) {
            Ok(_) => assert!(is_read),
            Err(error) => assert!(!is_read && error.to_string().contains(of_file), "{error}"),
        }
    }
}

#[test]
fn a_head_unlike_the_embedding_is_read_although_the_configuration_ties_them() {
    let written = tempfile::tempdir().unwrap();
    let mut config = json(folder("llama").join("config.json"));
    config["tie_word_embeddings"] = true.into();
    std::fs::write(written.path().join("config.json"), config.to_string()).unwrap();
    let mut weights = tensors(folder("llama").join("model.safetensors"));
    let mut read = || {
        candle_core::safetensors::save(&weights, written.path().join("model.safetensors")).unwrap();
        let model = Model::load(written.path(), DType::F32, &Device::Cpu).unwrap();
        weights.insert("lm_head.weight".into(), weights["model.embed_tokens.weight"].clone());
        model
    };
    let (own, same) = (read(), read());
    assert!(!own.config().tie_word_embeddings && same.config().tie_word_embeddings);
    let original = Model::load(folder("llama"), DType::F32, &Device::Cpu).unwrap();
    let logits =
        |model: &Model| logits(model, &[vec![1, 2, 3, 4]]).flatten_all().unwrap().to_vec1::<f32>();
    assert_eq!(logits(&own).unwrap(), logits(&original).unwrap());
    assert_ne!(logits(&same).unwrap(), logits(&original).unwrap());
}

#[test]
fn tensors_that_change_nothing_are_left_alone_and_others_are_refused() {
    let written = tempfile::tempdir().unwrap();
    std::fs::copy(folder("llama").join("config.json"), written.path().join("config.json")).unwrap();
    let own = tensors(folder("llama").join("model.safetensors"));
    let layer = "model.layers.0";
    let number = |number: f32| Tensor::full(number, 3, &Device::Cpu).unwrap();
    for (name, number, is_refused) in [
        (format!("{layer}.mlp.down_proj.bias"), number(0.0), false),
        (format!("{layer}.mlp.down_proj.bias"), number(0.5), true),
        (format!("{layer}.self_attn.k_scale"), number(0.5), false),
        (format!("{layer}.self_attn.v_proj.v_scale"), number(0.5), false),
        (format!("{layer}.self_attn.rank_scale"), number(0.0), true),
    ] {
        let mut weights = own.clone();
        weights.insert(name.clone(), number);
        candle_core::safetensors::save(&weights, written.path().join("model.safetensors")).unwrap();
        match Model::load(written.path(), DType::F32, &Device::Cpu) {
            Ok(_) => assert!(!is_refused, "{name}"),
            Err(error) => assert!(is_refused && error.to_string().contains(&name), "{error}"),
        }
    }
}

#[test]
fn what_cannot_be_trained_of_the_tables_is_refused_by_name() {
    use metal_candle::adapter::StartFrom;
    let names = |names: &[&str]| names.iter().map(|it| it.to_string()).collect::<Vec<_>>();
    let on = |targets: &[&str]| LoraConfig {
        targets: Targets::Names(names(targets)),
        ..LoraConfig::default()
    };
    let tokens = |tokens: &[u32]| Some(TokenIndices::Embedding(tokens.to_vec()));
    let of = |modules: &[(&str, &[u32])]| {
        let modules = modules.iter().map(|(name, tokens)| (name.to_string(), tokens.to_vec()));
        Some(TokenIndices::Modules(modules.collect()))
    };
    for (base, config, expected) in [
        ("llama", LoraConfig { dora: true, ..on(&["embed_tokens"]) }, "use_dora: "),
        (
            "llama",
            LoraConfig { start: StartFrom::Pissa, ..on(&["lm_head"]) },
            "init_lora_weights: ",
        ),
        (
            "qwen2",
            LoraConfig { modules_to_save: names(&["lm_head"]), ..on(&["lm_head"]) },
            "has `lm_head`, which gets an adapter",
        ),
        (
            "qwen2",
            LoraConfig {
                modules_to_save: names(&["lm_head"]),
                trainable_token_indices: tokens(&[1]),
                ..on(&["q_proj"])
            },
            "has `lm_head`, which gets an adapter",
        ),
        (
            "llama",
            LoraConfig { trainable_token_indices: tokens(&[1]), ..on(&["embed_tokens"]) },
            "`model.embed_tokens` among the target_modules",
        ),
        (
            "qwen2",
            LoraConfig { trainable_token_indices: tokens(&[1]), ..on(&["lm_head"]) },
            "`lm_head` among the target_modules",
        ),
        (
            "qwen2",
            LoraConfig {
                trainable_token_indices: of(&[("embed_tokens", &[1]), ("lm_head", &[2])]),
                ..on(&["q_proj"])
            },
            "has other tokens of lm_head",
        ),
        (
            "llama",
            LoraConfig { trainable_token_indices: tokens(&[128]), ..on(&["q_proj"]) },
            "has token 128, but the vocabulary of this model is 128",
        ),
        (
            "llama",
            LoraConfig { trainable_token_indices: tokens(&[2, 7, 2]), ..on(&["q_proj"]) },
            "names token 2 twice",
        ),
        (
            "llama",
            LoraConfig { trainable_token_indices: of(&[("norm", &[2])]), ..on(&["q_proj"]) },
            "has `norm`, expected embed_tokens or lm_head",
        ),
        (
            "llama",
            LoraConfig {
                trainable_token_indices: tokens(&(0..33).collect::<Vec<_>>()),
                ..on(&["q_proj"])
            },
            "more than the hidden size 32",
        ),
        (
            "llama",
            LoraConfig { trainable_token_indices: tokens(&[]), ..on(&["q_proj"]) },
            "no tokens",
        ),
    ] {
        let error = Adapter::new(&load(base), &config, 1).unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn what_is_trained_of_the_tables_is_trained_in_bf16_too() {
    for (base, name) in [("llama", "embedding"), ("gemma2", "embedding"), ("qwen2", "tokens")] {
        let (path, expected) = method(base, name);
        let run = |dtype| {
            let model = Arc::new(Model::load(folder(base), dtype, &device()).unwrap());
            let adapter = load_adapter(&model, &path);
            let buffer = Gradients::new(adapter.parameters()).unwrap();
            gradients((&model, &adapter), &lora_batch(&expected), true, &buffer)
        };
        let ((loss, exact), (rounded, found)) = (run(DType::F32), run(DType::BF16));
        assert!((loss - rounded).abs() < 0.05, "{base} {name}: {rounded}, expected {loss}");
        for (key, gradient) in &exact {
            let norm = |tensor: &Tensor| {
                tensor.sqr().unwrap().sum_all().unwrap().to_scalar::<f32>().unwrap().sqrt()
            };
            let error = norm(&(gradient - &found[key]).unwrap());
            assert!(error < 0.1 * norm(gradient), "{base} {name} {key}: off by {error}");
        }
    }
}

#[test]
fn inputs_of_the_heads_update_are_dropped_in_training() {
    for base in ["llama", "gemma2"] {
        let model = load(base);
        let config = LoraConfig {
            targets: Targets::Names(vec!["lm_head".into()]),
            dropout: 0.5,
            rank: 3,
            ..LoraConfig::default()
        };
        let adapter = random_adapter(&model, &config, 3);
        let parameters = adapter.parameters();
        let ids = rows(&tensors(folder(base).join("expected.safetensors"))["input_ids"]);
        let batch = next_token_batch(&ids);
        let tape = |seed| Tape::training().with_dropout(seed);
        let loss = |seed| {
            let loss = model.loss(&tape(seed), &batch, Some(&adapter)).unwrap();
            f64::from(loss.sum.tensor().to_scalar::<f32>().unwrap())
        };
        assert!(loss(1) == loss(1) && (loss(1) - loss(2)).abs() > 1e-2, "{base}");
        // The gradient is that of the elements that are kept.
        let gradients = Gradients::new(parameters).unwrap();
        let tape = tape(1);
        let sum = model.loss(&tape, &batch, Some(&adapter)).unwrap().sum;
        tape.backward(&sum, 1.0, &mut &gradients).unwrap();
        for (index, entry) in parameters.entries().iter().enumerate() {
            let id = ParameterId(index);
            let (value, gradient) =
                (parameters.view(id).unwrap().copy().unwrap(), gradients.view(id).unwrap());
            let squares = gradient.sqr().unwrap().sum_all().unwrap();
            let norm = f64::from(squares.to_scalar::<f32>().unwrap()).sqrt();
            let [above, below] = [1.0, -1.0].map(|sign| {
                let moved = (&value + (&gradient * (sign * 0.02 / norm)).unwrap()).unwrap();
                parameters.set(id, &moved).unwrap();
                loss(1)
            });
            parameters.set(id, &value).unwrap();
            let slope = (above - below) / 0.04;
            assert!((slope / norm - 1.0).abs() < 0.02, "{base} {}: {slope}, {norm}", entry.name);
        }
    }
}

#[test]
fn parts_of_experts_are_refused_as_targets() {
    for (name, targets) in [
        ("qwen3-moe", &["gate", "mlp.experts"][..]),
        ("mixtral", &["gate", "w1"]),
        ("gpt-oss", &["router", "gate_up_proj", "experts.down_proj_bias"]),
    ] {
        let model = Model::load(folder(name), DType::F32, &Device::Cpu).unwrap();
        for target in targets {
            let names = ["q_proj", target].map(String::from).to_vec();
            let config = LoraConfig { targets: Targets::Names(names), ..LoraConfig::default() };
            let error = Adapter::new(&model, &config, 1).unwrap_err().to_string();
            let expected = format!("`{target}` is a part of this model's experts");
            assert!(error.contains(&expected), "{error}");
            assert_eq!(config.refuse_experts(&model).unwrap_err().to_string(), error);
        }
    }
}
