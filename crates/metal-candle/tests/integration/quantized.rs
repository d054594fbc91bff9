//! Dense bases that are brought into fewer bits while they are loaded, on the device that tests are told.

use crate::common::device;
use candle_core::{DType, Device, Tensor};
use metal_candle::adapter::{Adapter, LoraConfig, Merged};
use metal_candle::autograd::Tape;
use metal_candle::data::{Batch, IGNORED};
use metal_candle::generate::Session;
use metal_candle::model::{Config, Model, ModelFormat, Quantization};
use metal_candle::pass::Input;
use metal_candle::train::Gradients;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;

/// Rows of whole blocks of 256.
pub fn config(changes: Value) -> Config {
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64,
        "initializer_range": 0.05,
    });
    for (key, value) in changes.as_object().unwrap() {
        config[key] = value.clone();
    }
    Config::from_json(&config.to_string()).unwrap()
}

/// What makes experts of the MLPs, under Qwen's names.
pub fn with_experts() -> Value {
    json!({
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "head_dim": 64,
        "moe_intermediate_size": 256,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "norm_topk_prob": true,
    })
}

/// The same under Mixtral's.
fn as_mixtral() -> Value {
    json!({
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 256,
    })
}

/// And as gpt-oss has them.
fn as_gpt_oss() -> Value {
    json!({
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "head_dim": 64,
        "sliding_window": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 256,
        "tie_word_embeddings": false,
    })
}

/// A model with random weights in a folder.
pub fn saved(changes: Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let model = Model::random(config(changes), DType::F32, &device(), 7).unwrap();
    model.save(folder.path(), DType::F32, None).unwrap();
    folder
}

fn quantized(folder: &Path, word: &str) -> metal_candle::Result<Model> {
    Model::load_with(folder, DType::F32, &device(), word.parse::<Quantization>().unwrap())
}

pub const IDS: [u32; 12] = [5, 93, 17, 2, 44, 81, 0, 9, 33, 61, 28, 70];

pub fn logits(model: &Model, adapter: Option<&Arc<Adapter>>) -> Vec<f32> {
    let tape = Tape::inference();
    let input = Input::sequence(&IDS, model.device()).unwrap().with_adapter(adapter);
    let hidden = model.forward(&tape, &input).unwrap();
    let logits = model.logits(hidden.tensor(), &input).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

pub fn gradients(model: &Model, adapter: &Arc<Adapter>, checkpointing: bool) -> Vec<f32> {
    let mut targets = IDS[1..].to_vec();
    targets.push(IGNORED);
    let batch = Batch {
        rows: 1,
        length: IDS.len(),
        input_ids: IDS.to_vec(),
        positions: (0..IDS.len() as u32).collect(),
        first_key: vec![0; IDS.len()],
        tokens: IDS.len(),
        targets,
        target_tokens: IDS.len() - 1,
        ..Batch::default()
    };
    let gradients = Gradients::new(adapter.parameters()).unwrap();
    gradients.clear().unwrap();
    let tape = Tape::training().with_checkpointing(checkpointing);
    let loss = model.loss(&tape, &batch, Some(adapter)).unwrap();
    tape.backward(&loss.sum, 1.0, &mut &gradients).unwrap();
    gradients.buffer().to_vec1().unwrap()
}

#[track_caller]
fn assert_close(name: &str, found: &[f32], expected: &[f32]) {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0f32, |largest, number| largest.max(number.abs()));
    assert!(largest > 0.0, "{name}: nothing to compare");
    for (found, expected) in found.iter().zip(expected) {
        let error = (found - expected).abs();
        assert!(error <= 1e-4 * largest, "{name}: {found}, expected {expected}");
    }
}

#[test]
fn an_adapter_is_not_merged_a_weight_at_a_time_into_a_model_in_fewer_bits() {
    let folder = saved(json!({}));
    let model = Arc::new(quantized(folder.path(), "nf4").unwrap());
    let adapter = Arc::new(Adapter::new(&model, &LoraConfig::default(), 1).unwrap());
    let error = Merged::new(&model, &adapter, DType::F32).unwrap_err().to_string();
    assert!(error.contains("fewer bits") && error.contains("metal-candle fuse"), "{error}");
}

#[test]
fn every_format_computes_with_the_numbers_it_holds() {
    for changes in [json!({}), with_experts(), as_gpt_oss()] {
        computes_with_the_numbers_it_holds(changes);
    }
}

fn computes_with_the_numbers_it_holds(changes: Value) {
    let folder = saved(changes.clone());
    let whole = logits(&Model::load(folder.path(), DType::F32, &device()).unwrap(), None);
    for word in Quantization::names() {
        if word.ends_with("-experts") && changes.get("model_type").is_none() {
            let error = quantized(folder.path(), word).unwrap_err().to_string();
            assert!(
                error.contains("quantize: is mxfp4-experts, and a llama model has no"),
                "{error}"
            );
            continue;
        }
        let model = Arc::new(quantized(folder.path(), word).unwrap());
        let dense = Arc::new(quantized(folder.path(), word).unwrap().dequantize().unwrap());
        assert!(model.size_in_bytes() < dense.size_in_bytes(), "{word}");
        let found = logits(&model, None);
        assert_close(word, &found, &logits(&dense, None));
        // Some of the model is left after rounding, and something is rounded.
        let (mut difference, mut size) = (0f32, 0f32);
        for (found, whole) in found.iter().zip(&whole) {
            difference += (found - whole).powi(2);
            size += whole.powi(2);
        }
        let difference = (difference / size).sqrt();
        let most = match word {
            "mlx2" => 2.0,
            "mlx3" => 1.0,
            "fp4" | "mxfp4" | "mxfp4-experts" | "nvfp4" => 0.8,
            "mlx8" | "q8_0" | "int8" => 0.05,
            "mlx6" | "q6_k" | "mlx5" | "q5_k" | "fp8" | "mxfp8" => 0.25,
            _ => 0.5,
        };
        // Other experts are chosen sooner than elsewhere.
        let most = if changes["model_type"] == "gpt_oss" { 2.0 * most } else { most };
        assert!(difference > 1e-4 && difference < most, "{word}: off by {difference}");
        let lora = LoraConfig { rank: 4, ..LoraConfig::default() };
        let adapters = [&model, &dense].map(|model| {
            let adapter = Adapter::new(model, &lora, 3).unwrap();
            let count = adapter.parameters().len();
            let numbers = (0..count).map(|index| ((index * 37 % 101) as f32 - 50.0) * 1e-3);
            let numbers = Tensor::from_iter(numbers, &device()).unwrap();
            adapter.parameters().values().slice_set(&numbers, 0, 0).unwrap();
            adapter.parameters().changed();
            Arc::new(adapter)
        });
        let [adapter, other] = &adapters;
        assert_close(word, &logits(&model, Some(adapter)), &logits(&dense, Some(other)));
        let expected = gradients(&dense, other, false);
        for checkpointing in [false, true] {
            assert_close(word, &gradients(&model, adapter, checkpointing), &expected);
        }
        // One token after the other.
        let mut session = Session::new(&model, Some(adapter)).unwrap();
        let last = session.read(&IDS).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap();
        let mut stepwise = Session::new(&model, Some(adapter)).unwrap();
        let mut found = Vec::new();
        for end in 1..=IDS.len() {
            let read = stepwise.continue_with(&IDS[..end]).unwrap();
            found = read.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        }
        assert_close(word, &found, &last);
    }
}

#[test]
fn what_is_written_is_read_as_it_was_and_says_the_same() {
    let narrow = json!({ "hidden_size": 96, "tie_word_embeddings": true });
    for changes in [json!({}), narrow, with_experts(), as_mixtral(), as_gpt_oss()] {
        let folder = saved(changes.clone());
        let dense = Model::load(folder.path(), DType::F32, &device()).unwrap();
        let whole = logits(&dense, None);
        for word in ModelFormat::names() {
            let format: ModelFormat = word.parse().unwrap();
            let written = tempfile::tempdir().unwrap();
            let path = match format.is_file() {
                true => written.path().join("model.gguf"),
                false => written.path().to_path_buf(),
            };
            if changes.get("hidden_size").is_some()
                && ["mlx", "nf4", "fp4"].iter().any(|it| word.starts_with(it))
            {
                // Rows of 96 aren't whole groups of 64, which MLX refuses and bitsandbytes doesn't mind.
                let result = dense.save_as(&path, format, None);
                assert_eq!(result.is_err(), word.starts_with("mlx"), "{word}");
                continue;
            }
            let of_experts = match (word, changes["model_type"].as_str()) {
                ("mxfp4-experts", Some("gpt_oss")) | ("gguf-mxfp4", Some(_)) => None,
                ("mxfp4-experts", _) => Some("transformers has such files of gpt_oss alone"),
                ("gguf-mxfp4", None) => Some("of a llama model, which has none"),
                _ => None,
            };
            if let Some(expected) = of_experts {
                let error = dense.save_as(&path, format, None).unwrap_err().to_string();
                assert!(error.contains(expected), "{error}");
                continue;
            }
            if changes.get("num_experts_per_tok").is_some() && ["nf4", "fp4"].contains(&word) {
                let error = dense.save_as(&path, format, None).unwrap_err().to_string();
                assert!(error.contains("a model with experts in"), "{error}");
                continue;
            }
            dense.save_as(&path, format, None).unwrap();
            let read = Model::load(&path, DType::F32, &device()).unwrap();
            let found = logits(&read, None);
            match format {
                ModelFormat::Dense(DType::F32) => assert_eq!(found, whole),
                ModelFormat::Quantized(_) => {
                    let model = quantized(folder.path(), word).unwrap();
                    assert_eq!(found, logits(&model, None), "{word}");
                }
                _ if word == "gguf-f32" => assert_eq!(found, whole),
                _ => {
                    let size: f32 = whole.iter().map(|number| number * number).sum();
                    let difference: f32 =
                        whole.iter().zip(&found).map(|(a, b)| (a - b) * (a - b)).sum();
                    assert!(difference < 0.2 * size, "{word}: {difference} of {size}");
                }
            }
            // Written dense from there, it is the same.
            let again = tempfile::tempdir().unwrap();
            read.save(again.path(), DType::F32, None).unwrap();
            let again = Model::load(again.path(), DType::F32, &device()).unwrap();
            assert_close(word, &logits(&again, None), &found);
        }
    }
}

#[test]
fn what_a_format_cannot_hold_is_refused_by_name() {
    let folder = saved(json!({ "hidden_size": 64, "intermediate_size": 96 }));
    let error = quantized(folder.path(), "q4_k").unwrap_err().to_string();
    assert!(error.contains("quantize: is q4_k") && error.contains("embed_tokens"), "{error}");
    assert!(error.contains("256"), "{error}");
    quantized(folder.path(), "q8_0").unwrap();
    let error = "nf5".parse::<Quantization>().unwrap_err();
    assert!(error.contains("is \"nf5\", expected one of nf4, fp4"), "{error}");
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/bases/llama-nf4");
    let error = quantized(&fixtures, "nf4").unwrap_err().to_string();
    assert!(error.contains("are quantised already"), "{error}");
}

#[test]
fn products_in_8_bit_floats_are_refused_elsewhere_than_on_hopper() {
    let folder = saved(json!({}));
    let open = Model::load_with(folder.path(), DType::F32, &Device::Cpu, Quantization::FP8_COMPUTE);
    let error = open.unwrap_err().to_string();
    assert!(error.contains("base_compute") && error.contains("the processor"), "{error}");
}

/// Limits to how far a model that multiplies rounded rows is from one that holds the same weights.
struct Limits {
    logits: f64,
    gradients: f64,
    /// Of the last logits, read token by token, from those of the whole text.
    stepwise: f64,
}

/// Asserts that a model rounds rows, and gives nearly what one does that holds its weights as `held` does.
#[track_caller]
fn assert_rounds_rows(compute: Quantization, held: &str, device: &Device, limits: Limits) {
    let folder = saved(json!({}));
    let open = |quantization: Quantization, dtype| {
        let model = Model::load_with(folder.path(), dtype, device, quantization).unwrap();
        Arc::new(model)
    };
    let held = open(held.parse().unwrap(), DType::BF16);
    let model = open(compute, DType::BF16);
    assert_eq!(model.size_in_bytes(), held.size_in_bytes());
    assert_ne!(model.fingerprint().unwrap(), held.fingerprint().unwrap());
    let relative = |found: &[f32], expected: &[f32]| {
        assert_eq!(found.len(), expected.len());
        let norm = |numbers: &mut dyn Iterator<Item = f32>| {
            numbers.map(|number| f64::from(number).powi(2)).sum::<f64>().sqrt()
        };
        let pairs = found.iter().zip(expected);
        norm(&mut pairs.map(|(found, expected)| found - expected))
            / norm(&mut expected.iter().copied())
    };
    let lora = LoraConfig { rank: 4, ..LoraConfig::default() };
    let adapter_of = |model: &Model| {
        let adapter = Adapter::new(model, &lora, 3).unwrap();
        let count = adapter.parameters().len();
        let numbers = (0..count).map(|index| ((index * 37 % 101) as f32 - 50.0) * 1e-3);
        let numbers = Tensor::from_iter(numbers, device).unwrap();
        adapter.parameters().values().slice_set(&numbers, 0, 0).unwrap();
        adapter.parameters().changed();
        Arc::new(adapter)
    };
    let (adapter, other) = (&adapter_of(&model), &adapter_of(&held));
    let to_f32 = |model: &Model, adapter| {
        let tape = Tape::inference();
        let input = Input::sequence(&IDS, model.device()).unwrap().with_adapter(Some(adapter));
        let hidden = model.forward(&tape, &input).unwrap();
        let logits = model.logits(hidden.tensor(), &input).unwrap();
        logits.to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1::<f32>().unwrap()
    };
    // Rounded rows differ from rows, and not by much.
    let found = to_f32(&model, adapter);
    let difference = relative(&found, &to_f32(&held, other));
    assert!(difference > 1e-3 && difference < limits.logits, "logits are off by {difference}");
    let expected = gradients(&held, other, false);
    for checkpointing in [false, true] {
        let found = gradients(&model, adapter, checkpointing);
        let difference = relative(&found, &expected);
        let most = limits.gradients;
        assert!(difference > 1e-3 && difference < most, "gradients are off by {difference}");
    }
    // One token after the other is the same arithmetic; in f32, as in bf16 what attention rounds otherwise would be
    // rounded to other codes.
    let model = open(compute, DType::F32);
    let adapter = &adapter_of(&model);
    let found = to_f32(&model, adapter);
    let mut session = Session::new(&model, Some(adapter)).unwrap();
    let mut last = Vec::new();
    for end in 1..=IDS.len() {
        let read = session.continue_with(&IDS[..end]).unwrap();
        let read = read.to_dtype(DType::F32).unwrap().flatten_all().unwrap();
        last = read.to_vec1::<f32>().unwrap();
    }
    let whole = &found[found.len() - last.len()..];
    let difference = relative(&last, whole);
    assert!(difference < limits.stepwise, "token by token the logits are off by {difference}");
}

#[test]
fn models_multiply_in_8_bit_integers_on_the_processor() {
    let limits = Limits { logits: 0.05, gradients: 0.1, stepwise: 0.002 };
    assert_rounds_rows(Quantization::INT8_COMPUTE, "int8", &Device::Cpu, limits);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU of compute capability 9.0"]
fn cuda_models_multiply_in_8_bit_floats() {
    let device = metal_candle::devices::cuda(0).unwrap();
    let limits = Limits { logits: 0.15, gradients: 0.3, stepwise: 0.01 };
    assert_rounds_rows(Quantization::FP8_COMPUTE, "fp8", &device, limits);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_models_do_not_multiply_in_8_bit_integers() {
    let device = metal_candle::devices::cuda(0).unwrap();
    let folder = saved(json!({}));
    let open = Model::load_with(folder.path(), DType::BF16, &device, Quantization::INT8_COMPUTE);
    let error = open.unwrap_err().to_string();
    assert!(error.contains("base_compute: is int8") && error.contains("device: cpu"), "{error}");
}
