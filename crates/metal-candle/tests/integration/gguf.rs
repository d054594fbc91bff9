//! GGUF files: those of the package `gguf` against what it and llama.cpp say of them, and ours read back.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use metal_candle::adapter::{Adapter, LoraConfig};
use metal_candle::generate::Session;
use metal_candle::gguf::{self, Export, ExportTensor, GgmlType, GgufFile, UnknownTokenizer};
use metal_candle::model::{Config, Model, Weights};
use metal_candle::text::{Message, RenderOptions, Tokenizer, TokenizerFiles};
use metal_candle::{DType, Device, Error};
use serde_json::Value;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures")).join(name)
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Texts of the fixtures.
fn texts() -> Vec<String> {
    let cases = json(&fixture("tokenizer/encodings.json"));
    let cases = cases.as_array().cloned().unwrap();
    cases.iter().map(|case| case["text"].as_str().unwrap().to_string()).collect()
}

#[test]
fn tokens_are_those_of_llama_cpp() {
    let expected = json(&fixture("gguf/encodings.json"));
    for name in ["byte-level", "sentence-piece"] {
        let file = GgufFile::open(fixture("gguf").join(format!("{name}.gguf"))).unwrap();
        let tokenizer = file.tokenizer().unwrap();
        let cases = expected[name].as_array().unwrap();
        assert!(cases.len() > 20);
        for case in cases {
            let text = case["text"].as_str().unwrap();
            for (special, key) in [(false, "ids"), (true, "ids_with_special_tokens")] {
                let found = tokenizer.encode(text, special).unwrap();
                assert_eq!(found, ids(&case[key]), "{name}: {text:?}");
            }
        }
    }
}

#[test]
fn what_a_file_says_beside_its_weights_is_read() {
    let file = GgufFile::open(fixture("gguf/byte-level.gguf")).unwrap();
    let config = file.config();
    assert_eq!(config.architecture.model_type(), "llama");
    assert_eq!((config.hidden_size, config.heads, config.kv_heads, config.head_dim), (32, 4, 2, 8));
    assert_eq!((config.vocab_size, config.intermediate_size), (384, 64));
    assert_eq!((config.rms_norm_eps, config.max_position_embeddings), (1e-5, 64));
    assert!(config.tie_word_embeddings);
    let tokenizer = file.tokenizer().unwrap();
    let id = |token: &str| tokenizer.token_to_id(token).unwrap();
    assert_eq!(tokenizer.bos_id(), Some(id("<|begin_of_text|>")));
    assert_eq!(tokenizer.eos_id(), Some(id("<|im_end|>")));
    assert_eq!(tokenizer.pad_id(), Some(id("<|endoftext|>")));
    // The file names one; the others are known by their texts.
    assert_eq!(tokenizer.eos_ids()[0], id("<|im_end|>"));
    assert!(tokenizer.eos_ids().contains(&id("<|eot_id|>")));
    assert!(!tokenizer.eos_ids().contains(&id("<pad>")));
    let template = tokenizer.chat_template().unwrap();
    let rendered =
        template.render(&[Message::new("user", "hi")], &RenderOptions::default()).unwrap();
    assert_eq!(rendered, "<|im_start|>user\nhi<|im_end|>\n");
    let decoded = tokenizer.decode(&[id("<think>"), id("<|im_end|>")], true).unwrap();
    assert_eq!(decoded, "<think>");
    assert_eq!(tokenizer.id_to_token(380), None, "is unused");
}

#[test]
fn blocks_are_those_of_the_package_in_a_checkpoints_order() {
    let file = GgufFile::open(fixture("gguf/byte-level.gguf")).unwrap();
    let bytes = std::fs::read(fixture("gguf/expected.safetensors")).unwrap();
    let expected = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut kinds = BTreeMap::new();
    for (name, view) in expected.tensors() {
        let name = name.strip_prefix("blocks.").unwrap();
        let found = file.tensor(name).unwrap();
        assert_eq!(&*found.bytes, view.data(), "{name}");
        assert_eq!(found.dense().is_some(), found.kind.is_dense());
        kinds.insert(found.kind, name.to_string());
        let described = file.describe(name).unwrap();
        assert_eq!(described, (found.kind, found.shape));
    }
    assert_eq!(kinds.len(), 6);
    assert_eq!(file.names().count(), expected.len());
    let error = file.tensor("lm_head.weight").unwrap_err().to_string();
    assert!(error.contains("\"output.weight\") is missing"), "{error}");
    let (kind, shape) = file.describe("model.layers.0.mlp.down_proj.weight").unwrap();
    assert_eq!((kind.name(), shape), ("Q5_1", vec![32, 64]));
}

/// Writes a model's folder as GGUF, with its matrices in `kind`.
fn export(folder: &Path, path: &Path, kind: GgmlType, tokenizer: Option<&TokenizerFiles>) {
    let config = Config::load(folder).unwrap();
    let weights = Weights::open(folder).unwrap();
    let tensors: Vec<ExportTensor> = weights
        .names()
        .map(|name| {
            let shape = weights.shape(name).unwrap().to_vec();
            let kind = gguf::storage(&shape, kind);
            ExportTensor { name: name.into(), shape, kind }
        })
        .collect();
    let export = Export {
        config: &config,
        tokenizer,
        unknown_tokenizer: UnknownTokenizer::KeepWhole,
        name: Some("a model"),
    };
    gguf::write(path, &export, &tensors, |tensor| {
        let dtype = weights.dtype(&tensor.name)?;
        let value = weights.tensor(&tensor.name, &tensor.shape, dtype, &Device::Cpu)?;
        gguf::dense_bytes(&value, tensor.kind)
    })
    .unwrap();
}

/// The model in a file, in f32.
fn model(file: &GgufFile) -> Model {
    Model::from_fn(file.config().clone(), DType::F32, &Device::Cpu, |name, _| {
        file.tensor(name)?.dense().unwrap()
    })
    .unwrap()
}

#[test]
fn the_demo_model_is_the_same_after_it_was_a_gguf_file() {
    let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../cli/demo/base"));
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("demo.gguf");
    let files = TokenizerFiles::read(folder).unwrap();
    export(folder, &path, GgmlType::F32, Some(&files));
    let file = GgufFile::open(&path).unwrap();

    let weights = Weights::open(folder).unwrap();
    assert_eq!(file.names().collect::<Vec<_>>(), weights.names().collect::<Vec<_>>());
    for name in weights.names() {
        let shape = weights.shape(name).unwrap();
        let expected = weights.tensor(name, shape, DType::F32, &Device::Cpu).unwrap();
        let found = file.tensor(name).unwrap().dense().unwrap().unwrap();
        assert_eq!(found.dims(), shape);
        let bits = |tensor: &candle_core::Tensor| -> Vec<u32> {
            let values = tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
            values.into_iter().map(f32::to_bits).collect()
        };
        assert_eq!(bits(&found), bits(&expected), "{name}");
    }

    let (ours, theirs) = (Tokenizer::load(folder).unwrap(), file.tokenizer().unwrap());
    assert_eq!((ours.eos_ids(), ours.eos_id()), (theirs.eos_ids(), theirs.eos_id()));
    assert_eq!((ours.bos_id(), ours.pad_id()), (theirs.bos_id(), theirs.pad_id()));
    let mut all = texts();
    let data = std::fs::read_to_string(folder.join("../instructions/train.jsonl")).unwrap();
    all.extend(data.lines().take(200).map(String::from));
    assert!(all.len() > 200);
    for text in &all {
        assert_eq!(ours.encode(text, true).unwrap(), theirs.encode(text, true).unwrap(), "{text}");
    }
    let messages = [Message::new("user", "a\nb"), Message::new("assistant", "c")];
    let options = RenderOptions { add_generation_prompt: true, ..RenderOptions::default() };
    let render = |tokenizer: &Tokenizer| {
        tokenizer.chat_template().unwrap().render(&messages, &options).unwrap()
    };
    assert_eq!(render(&ours), render(&theirs));

    // Of this one, llama.cpp would make other tokens.
    let config = Config::load(folder).unwrap();
    let export = Export {
        config: &config,
        tokenizer: Some(&files),
        unknown_tokenizer: UnknownTokenizer::Refuse,
        name: None,
    };
    let error = gguf::write(out.path().join("no.gguf"), &export, &[], |_| Ok(vec![])).unwrap_err();
    assert!(matches!(error, Error::Unsupported(_)), "{error}");
    assert!(error.to_string().contains("ignore_merges is true"), "{error}");
    assert!(!out.path().join("no.gguf").exists());
}

#[test]
fn tokenizers_are_the_same_after_they_were_metadata() {
    let folder = fixture("tokenizer");
    let mut files = TokenizerFiles::read(&folder).unwrap();
    files.chat_templates.push(("tool_use".into(), "{{ tools }}".into()));
    let out = tempfile::tempdir().unwrap();
    let path = out.path().join("a.gguf");
    // With room for its 378 tokens.
    export(&model_of(&out, 400), &path, GgmlType::BF16, Some(&files));
    let file = GgufFile::open(&path).unwrap();
    let (ours, theirs) = (Tokenizer::load(&folder).unwrap(), file.tokenizer().unwrap());
    for text in texts() {
        for special in [true, false] {
            let found = theirs.encode(&text, special).unwrap();
            assert_eq!(found, ours.encode(&text, special).unwrap(), "{text:?}");
            assert_eq!(
                theirs.decode(&found, special).unwrap(),
                ours.decode(&found, special).unwrap()
            );
        }
    }
    assert_eq!((ours.eos_ids(), ours.pad_id()), (theirs.eos_ids(), theirs.pad_id()));
    let read = file.tokenizer_files().unwrap();
    assert_eq!(read.chat_templates.len(), 2);
    assert_eq!(read.chat_templates[1], files.chat_templates[1]);

    // A vocabulary of SentencePiece, with and without a space before texts.
    let file = GgufFile::open(fixture("gguf/sentence-piece.gguf")).unwrap();
    let mut files = file.tokenizer_files().unwrap();
    let mut description: Value = serde_json::from_slice(&files.tokenizer).unwrap();
    for prefix in [true, false] {
        if !prefix {
            description["normalizer"] = description["normalizer"]["normalizers"][1].clone();
            files.tokenizer = description.to_string().into_bytes();
        }
        export(&model_of(&out, 428), &path, GgmlType::F16, Some(&files));
        let read = GgufFile::open(&path).unwrap();
        let ours = Tokenizer::from_files(&path, &files).unwrap();
        let theirs = read.tokenizer().unwrap();
        for text in texts() {
            let found = theirs.encode(&text, true).unwrap();
            assert_eq!(found, ours.encode(&text, true).unwrap(), "{prefix} {text:?}");
        }
        let with = |tokenizer: &Tokenizer| tokenizer.encode("a", false).unwrap();
        assert_eq!(with(&theirs), with(&ours));
    }
}

/// A folder of a random model with a vocabulary of this size.
fn model_of(out: &tempfile::TempDir, vocabulary: usize) -> PathBuf {
    let folder = out.path().join(format!("model-{vocabulary}"));
    std::fs::create_dir_all(&folder).unwrap();
    let mut config = json(&fixture("models/llama/config.json"));
    config["vocab_size"] = vocabulary.into();
    let config = Config::from_json(&config.to_string()).unwrap();
    let model = Model::random(config, DType::F32, &Device::Cpu, 1).unwrap();
    model.save(&folder, DType::F32, None).unwrap();
    folder
}

/// The logits behind the last of these tokens.
fn logits(model: Model, adapter: Option<&Path>, ids: &[u32]) -> Vec<f32> {
    let model = Arc::new(model);
    let adapter = adapter.map(|folder| Arc::new(Adapter::load(&model, folder).unwrap()));
    let logits = Session::new(&model, adapter.as_ref()).unwrap().read(ids).unwrap();
    logits.flatten_all().unwrap().to_vec1().unwrap()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

/// Keys of `config.json` and other values of theirs.
type Changes = &'static [(&'static str, &'static str)];

/// The models of the fixtures, with what a change of `config.json` makes of those that llama.cpp has otherwise, and
/// how many tokens fit into a window that it doesn't have.
const MODELS: [(&str, Changes, usize); 21] = [
    ("gemma2", &[("query_pre_attn_scalar", "12")], 12),
    ("gemma3-text", &[("query_pre_attn_scalar", "12")], 12),
    ("gpt-oss", &[], 12),
    ("granite", &[], 12),
    ("llama", &[], 12),
    ("llama-f16", &[], 12),
    ("llama-linear-rope", &[], 12),
    ("llama-odd", &[], 12),
    ("llama-sharded", &[], 12),
    ("llama3", &[], 12),
    ("ministral", &[], 6),
    ("ministral3", &[], 12),
    ("mistral", &[], 8),
    ("mixtral", &[], 12),
    ("olmo2", &[], 12),
    ("phi3", &[], 10),
    ("phi3-longrope", &[], 12),
    ("phi4-mini", &[], 12),
    ("qwen2", &[], 12),
    ("qwen3", &[], 12),
    ("smollm3", &[("no_rope_layers", "[1, 1, 1, 0]")], 12),
];

#[test]
fn models_compute_the_same_after_they_were_gguf_files() {
    let out = tempfile::tempdir().unwrap();
    for (name, changes, length) in MODELS {
        let folder = out.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        for entry in std::fs::read_dir(fixture("models").join(name)).unwrap() {
            let entry = entry.unwrap();
            if entry.path().is_file() {
                std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
            }
        }
        let mut config = json(&folder.join("config.json"));
        for (key, value) in changes {
            config[key] = serde_json::from_str(value).unwrap();
        }
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let path = out.path().join(format!("{name}.gguf"));
        match name {
            // Its files have one tensor for all experts.
            "gpt-oss" => {
                let model = Model::load(&folder, DType::F32, &Device::Cpu).unwrap();
                model.save_as(&path, "gguf-f32".parse().unwrap(), None).unwrap();
            }
            _ => export(&folder, &path, GgmlType::F32, None),
        }
        let file = GgufFile::open(&path).unwrap();
        let ids: Vec<u32> = (0..length as u32).map(|index| 5 + 7 * index % 90).collect();
        let expected = logits(Model::load(&folder, DType::F32, &Device::Cpu).unwrap(), None, &ids);
        let found = logits(model(&file), None, &ids);
        let difference = largest_difference(&found, &expected);
        assert!(difference < 2e-5, "{name}: {difference}");
        let error = file.tokenizer().unwrap_err().to_string();
        assert!(error.contains("has no tokenizer"), "{error}");
    }
}

#[test]
fn adapters_are_those_of_the_package_and_come_back() {
    let out = tempfile::tempdir().unwrap();
    let base = GgufFile::open(fixture("gguf/byte-level.gguf")).unwrap();
    let layers = gguf::read_adapter(fixture("gguf/adapter.gguf"), base.config()).unwrap();
    let expected =
        candle_core::safetensors::load(fixture("gguf/adapter-expected.safetensors"), &Device::Cpu)
            .unwrap();
    assert_eq!(2 * layers.len(), expected.len());
    let values =
        |tensor: &candle_core::Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for layer in &layers {
        assert_eq!(layer.scale, 2.0);
        for (which, found) in [("a", &layer.a), ("b", &layer.b)] {
            let expected = &expected[&format!("{which}.{}", layer.path)];
            assert_eq!((found.dims(), values(found)), (expected.dims(), values(expected)));
        }
    }
    let path = out.path().join("again.gguf");
    gguf::write_adapter(&path, base.config(), &layers).unwrap();
    let again = gguf::read_adapter(&path, base.config()).unwrap();
    for (a, b) in layers.iter().zip(&again) {
        assert_eq!((&a.path, a.scale, values(&a.a)), (&b.path, b.scale, values(&b.a)));
        assert_eq!(values(&a.b), values(&b.b));
    }

    // One made here, with ranks and scales of its own, by way of both kinds of files.
    let folder = fixture("models/llama");
    let load = || Model::load(&folder, DType::F32, &Device::Cpu).unwrap();
    for name in ["adapter", "adapter-patterns", "adapter-rslora", "method-pissa"] {
        let source = folder.join(name);
        let base = load();
        let adapter = Adapter::load(&base, &source).unwrap();
        let layers = gguf::adapter_layers(&base, &adapter).unwrap();
        gguf::write_adapter(&path, base.config(), &layers).unwrap();
        let read = gguf::read_adapter(&path, base.config()).unwrap();
        assert_eq!(read.len(), layers.len());
        let peft = out.path().join(name);
        gguf::save_as_peft(&peft, &read, "base").unwrap();
        let ids = [5, 17, 80, 33, 9];
        let expected = logits(load(), Some(&source), &ids);
        let found = logits(load(), Some(&peft), &ids);
        let plain = logits(load(), None, &ids);
        assert!(largest_difference(&plain, &expected) > 1e-3, "{name}");
        let difference = largest_difference(&found, &expected);
        assert!(difference < 2e-5, "{name}: {difference}");
    }

    // What GGUF has no tensors for.
    let base = load();
    let config = LoraConfig { rank: 2, dora: true, ..LoraConfig::default() };
    let dora = Adapter::new(&base, &config, 1).unwrap();
    let error = gguf::adapter_layers(&base, &dora).unwrap_err().to_string();
    assert!(error.contains("DoRA"), "{error}");
    let full = Adapter::full(&base).unwrap();
    assert!(gguf::adapter_layers(&base, &full).is_err());
    let other = Config::load(fixture("models/qwen3")).unwrap();
    let error = gguf::read_adapter(&path, &other).unwrap_err().to_string();
    assert!(error.contains("general.architecture: is \"llama\"; expected \"qwen3\""), "{error}");
    let error = GgufFile::open(&path).unwrap_err().to_string();
    assert!(error.contains("is an adapter; a model was expected"), "{error}");
}
