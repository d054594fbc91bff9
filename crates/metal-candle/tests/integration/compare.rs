//! Exports beside their sources: good ones agree, and whatever is changed in one is found.

use metal_candle::adapter::{Adapter, LoraConfig};
use metal_candle::compare::{
    Aspect, Comparison, Limits, Problem, Rounding, Samples, Side, WeightErrors, compare,
    compare_weights,
};
use metal_candle::model::{Companions, Config, Model, ModelFormat, Weights};
use metal_candle::text::Tokenizer;
use metal_candle::{DType, Device, Error};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A folder with a model of random weights in f32, whose rows are whole blocks of every format, and a tokenizer.
fn source() -> tempfile::TempDir {
    source_of(400)
}

/// As [`source`], of a model with this many tokens.
fn source_of(vocabulary: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let config = json!({
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": vocabulary,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 96,
        "initializer_range": 0.05,
    });
    let config = Config::from_json(&config.to_string()).unwrap();
    let model = Model::random(config, DType::F32, &Device::Cpu, 7).unwrap();
    let tokenizer = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tokenizer");
    model.save(folder.path(), DType::F32, Some(&tokenizer)).unwrap();
    folder
}

/// What is found of an export in `path`, as the command goes about it.
fn found(source: &Path, adapter: Option<&Path>, exported: &Path) -> (Comparison, WeightErrors) {
    let load = |path: &Path| Model::load(path, DType::F32, &Device::Cpu).unwrap();
    let (model, other) = (load(source), load(exported));
    let tokenizers = [source, exported].map(|path| Tokenizer::load(path).unwrap());
    let on_it = adapter.map(|folder| Arc::new(Adapter::load(&model, folder).unwrap()));
    let ours = Side { model: &model, adapter: on_it.as_ref(), tokenizer: &tokenizers[0] };
    let theirs = Side { model: &other, adapter: None, tokenizer: &tokenizers[1] };
    let comparison = compare(ours, theirs, &Samples::built_in()).unwrap();
    let rounding = Rounding::of(source, adapter.is_some(), exported).unwrap();
    let merged = match on_it {
        Some(adapter) => adapter.merge(model).unwrap(),
        None => model,
    };
    (comparison, compare_weights(&merged, &other, rounding).unwrap())
}

/// All that is wrong with it, and the aspects.
fn problems(source: &Path, adapter: Option<&Path>, exported: &Path) -> (Vec<Problem>, Vec<Aspect>) {
    let (comparison, weights) = found(source, adapter, exported);
    let rounding = Rounding::of(source, adapter.is_some(), exported).unwrap();
    let problems = all_problems(comparison, weights, rounding);
    let mut aspects: Vec<Aspect> = problems.iter().map(|problem| problem.aspect).collect();
    aspects.dedup();
    (problems, aspects)
}

fn all_problems(comparison: Comparison, weights: WeightErrors, rounding: Rounding) -> Vec<Problem> {
    let mut problems = comparison.problems;
    problems.extend(weights.problems);
    problems.extend(Limits::of(rounding).problems(&comparison.divergence));
    problems
}

/// Writes `model` in a format, with the files beside it of `companions`.
fn export(model: &Model, word: &str, companions: &Path, out: &Path) -> PathBuf {
    let format: ModelFormat = word.parse().unwrap();
    let path = match format.is_file() {
        true => out.join(format!("{word}.gguf")),
        false => out.join(word),
    };
    if !format.is_file() {
        std::fs::create_dir(&path).unwrap();
    }
    let companions = Companions { from: companions, chat_template: None };
    model.save_as(&path, format, Some(companions)).unwrap();
    path
}

/// The model of a folder with other values of some weights.
fn changed(folder: &Path, change: impl Fn(&str, Vec<f32>) -> Vec<f32>) -> Model {
    let weights = Weights::open(folder).unwrap();
    let config = Config::load(folder).unwrap();
    Model::from_fn(config, DType::F32, &Device::Cpu, |name, shape| {
        let tensor = weights.tensor(name, shape, DType::F32, &Device::Cpu)?;
        let values = change(name, tensor.flatten_all()?.to_vec1()?);
        Ok(candle_core::Tensor::from_vec(values, shape, &Device::Cpu)?)
    })
    .unwrap()
}

#[test]
fn exports_of_every_format_agree_with_their_source() {
    let (source, out) = (source(), tempfile::tempdir().unwrap());
    let model = Model::load(source.path(), DType::F32, &Device::Cpu).unwrap();
    // But those of experts.
    let is_for_all = |word: &&str| !["mxfp4-experts", "gguf-mxfp4"].contains(word);
    for word in ModelFormat::names().into_iter().filter(is_for_all) {
        let path = export(&model, word, source.path(), out.path());
        let (comparison, weights) = found(source.path(), None, &path);
        assert!(comparison.texts > 15 && comparison.renderings > 6, "{comparison:?}");
        assert_eq!(weights.weights, 21, "{word}");
        let divergence = comparison.divergence;
        assert!(divergence.tokens > 500);
        let kl = divergence.mean_kl;
        match word {
            "f32" | "gguf-f32" => assert!(kl < 1e-12, "{word}: {kl}"),
            "f16" | "gguf-f16" => assert!(kl > 1e-12 && kl < 1e-6, "{word}: {kl}"),
            "bf16" | "gguf-bf16" => assert!(kl > 1e-8 && kl < 1e-4, "{word}: {kl}"),
            "mlx2" | "mlx3" | "fp4" | "mxfp4" | "nvfp4" => assert!(kl > 1e-3, "{word}: {kl}"),
            _ => assert!(kl > 1e-7 && kl < 0.1, "{word}: {kl}"),
        }
        // A model of random weights in 2 or 3 bits is another one.
        if !["mlx2", "mlx3"].contains(&word) {
            let rounding = Rounding::of(source.path(), false, &path).unwrap();
            let problems = all_problems(comparison, weights, rounding);
            assert!(problems.is_empty(), "{word}: {problems:?}");
        }
    }
}

#[test]
fn a_padding_token_beyond_the_models_vocabulary_is_no_difference() {
    // The tokenizer has as many tokens as the model, and one more for padding, which GGUF files are written without.
    let (source, out) = (source_of(378), tempfile::tempdir().unwrap());
    let edit = |file: &str, edit: &dyn Fn(&mut Value)| {
        let path = source.path().join(file);
        let mut content = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        edit(&mut content);
        std::fs::write(&path, content.to_string()).unwrap();
    };
    edit("tokenizer.json", &|content| {
        let mut token = content["added_tokens"][0].clone();
        (token["id"], token["content"]) = (378.into(), "<more>".into());
        content["added_tokens"].as_array_mut().unwrap().push(token);
    });
    edit("tokenizer_config.json", &|content| content["pad_token"] = "<more>".into());
    assert_eq!(Tokenizer::load(source.path()).unwrap().pad_id(), Some(378));
    let model = Model::load(source.path(), DType::F32, &Device::Cpu).unwrap();
    let path = export(&model, "gguf-f32", source.path(), out.path());
    assert_eq!(Tokenizer::load(&path).unwrap().token_to_id("<more>"), None);
    let (found, _) = problems(source.path(), None, &path);
    assert!(found.is_empty(), "{found:?}");
}

#[test]
fn a_gguf_file_without_its_tokenizer_is_not_written() {
    let (source, out) = (source(), tempfile::tempdir().unwrap());
    let model = Model::load(source.path(), DType::F32, &Device::Cpu).unwrap();
    std::fs::remove_file(source.path().join("tokenizer.json")).unwrap();
    let path = out.path().join("a.gguf");
    let write = || {
        let companions = Companions { from: source.path(), chat_template: None };
        model.save_as(&path, "gguf-f32".parse().unwrap(), Some(companions)).unwrap_err().to_string()
    };
    let error = write();
    assert!(error.contains("tokenizer.json: no such file"), "{error}");
    std::fs::write(source.path().join("tokenizer.model"), "x").unwrap();
    let error = write();
    assert!(error.contains("save the tokenizer as tokenizer.json"), "{error}");
    assert!(!path.exists());
}

#[test]
fn an_adapter_that_was_merged_agrees_and_one_that_was_not_does_not() {
    let (source, out) = (source(), tempfile::tempdir().unwrap());
    let load = || Model::load(source.path(), DType::F32, &Device::Cpu).unwrap();
    let model = load();
    let lora = LoraConfig { rank: 4, ..LoraConfig::default() };
    let adapter = Adapter::new(&model, &lora, 3).unwrap();
    let count = adapter.parameters().len();
    let numbers = (0..count).map(|index| ((index * 37 % 101) as f32 - 50.0) * 1e-3);
    let numbers = candle_core::Tensor::from_iter(numbers, &Device::Cpu).unwrap();
    adapter.parameters().values().slice_set(&numbers, 0, 0).unwrap();
    adapter.parameters().changed();
    let folder = out.path().join("adapter");
    std::fs::create_dir(&folder).unwrap();
    adapter.save(&folder, "base").unwrap();
    let merged = adapter.merge(model).unwrap();
    for word in ["f32", "bf16", "gguf-f16", "gguf-q4_k_m", "nf4"] {
        let path = export(&merged, word, source.path(), out.path());
        let (found, _) = problems(source.path(), Some(&folder), &path);
        assert!(found.is_empty(), "{word}: {found:?}");
        let (_, aspects) = problems(source.path(), None, &path);
        // What NF4 may do to a row is more than this adapter does.
        let expected = [Aspect::Weights, Aspect::Probabilities];
        let expected = if word == "nf4" { &expected[1..] } else { &expected };
        assert_eq!(aspects, expected, "{word}");
    }
}

#[test]
fn changed_weights_are_found_by_name() {
    let (source, out) = (source(), tempfile::tempdir().unwrap());
    const NAME: &str = "model.layers.1.mlp.up_proj.weight";
    let scaled = changed(source.path(), |name, values| match name {
        NAME => values.into_iter().map(|value| 1.05 * value).collect(),
        _ => values,
    });
    for word in ["f32", "bf16", "gguf-f16", "gguf-q8_0", "mlx8"] {
        let path = export(&scaled, word, source.path(), out.path());
        let (found, aspects) = problems(source.path(), None, &path);
        assert_eq!(aspects[0], Aspect::Weights, "{word}: {found:?}");
        assert!(found[0].message.contains(NAME), "{word}: {found:?}");
        if ["f32", "gguf-f16"].contains(&word) {
            assert_eq!(aspects, [Aspect::Weights, Aspect::Probabilities], "{word}: {found:?}");
        }
    }
    // Rows 3 and 200 in each other's place, which four bits don't explain either.
    let swapped = changed(source.path(), |name, mut values| {
        if name == NAME {
            for column in 0..256 {
                values.swap(3 * 256 + column, 200 * 256 + column);
            }
        }
        values
    });
    let folder = tempfile::tempdir().unwrap();
    for word in ["gguf-q4_0", "gguf-q4_k_m", "mlx4", "mxfp4"] {
        let path = export(&swapped, word, source.path(), folder.path());
        let (found, aspects) = problems(source.path(), None, &path);
        assert_eq!(aspects[0], Aspect::Weights, "{word}: {found:?}");
        assert!(found[0].message.contains(&format!("of {NAME} is off by")), "{found:?}");
    }
}

#[test]
fn another_tokenizer_template_or_end_is_found() {
    let (source, out) = (source(), tempfile::tempdir().unwrap());
    let model = Model::load(source.path(), DType::F32, &Device::Cpu).unwrap();
    let edited = |name: &str, file: &str, edit: &dyn Fn(&mut Value)| -> Vec<Problem> {
        let folder = out.path().join(name);
        std::fs::create_dir(&folder).unwrap();
        let path = export(&model, "f32", source.path(), &folder);
        let file = path.join(file);
        let read = std::fs::read(&file).ok();
        let mut content = read.map_or(json!({}), |bytes| serde_json::from_slice(&bytes).unwrap());
        edit(&mut content);
        std::fs::write(&file, content.to_string()).unwrap();
        problems(source.path(), None, &path).0
    };
    let only = |problems: &[Problem], aspect: Aspect, words: &[&str]| {
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert_eq!(problems[0].aspect, aspect, "{problems:?}");
        for word in words {
            assert!(problems[0].message.contains(word), "{problems:?}");
        }
    };
    assert!(edited("same", "tokenizer_config.json", &|_| {}).is_empty());

    // The tokens "a" and "b" in each other's place.
    let found = edited("ids", "tokenizer.json", &|content| {
        let vocabulary = content.pointer_mut("/model/vocab").unwrap();
        let (a, b) = (vocabulary["a"].clone(), vocabulary["b"].clone());
        (vocabulary["a"], vocabulary["b"]) = (b, a);
    });
    only(&found, Aspect::TokenIds, &["texts differ", "in the source and", "in the export"]);

    let template = |content: &mut Value| {
        let text = content["chat_template"].as_str().unwrap();
        assert!(text.contains("<|im_end|>"), "{text}");
        content["chat_template"] = text.replacen("<|im_end|>", "<|im_end|> ", 1).into();
    };
    let found = edited("template", "tokenizer_config.json", &template);
    only(&found, Aspect::ChatTemplate, &["rendered otherwise from character"]);
    let found = edited("no-template", "tokenizer_config.json", &|content| {
        content.as_object_mut().unwrap().remove("chat_template");
    });
    only(&found, Aspect::ChatTemplate, &["the export has no chat template"]);
    let found = edited("refusing", "tokenizer_config.json", &|content| {
        content["chat_template"] = "{{ raise_exception('not you') }}".into();
    });
    only(&found, Aspect::ChatTemplate, &["the export's fails", "not you"]);

    let found = edited("end", "generation_config.json", &|content| {
        content["eos_token_id"] = json!([5]);
    });
    only(&found, Aspect::EndTokens, &["ends the source's answers and not the export's, which [5"]);
}

#[test]
fn texts_come_from_a_file_and_have_to_hold_something() {
    let (source, out) = (source(), tempfile::tempdir().unwrap());
    let path = out.path().join("texts.jsonl");
    let lines = [
        r#"{"text": "one two"}"#,
        r#"{"prompt": "three ", "completion": "four"}"#,
        r#"{"messages": [{"role": "user", "content": "five"}, {"role": "assistant", "content": "six"}]}"#,
        r#"{"instruction": "seven", "input": "eight", "output": "nine"}"#,
    ];
    for line in lines {
        std::fs::write(&path, line).unwrap();
        let samples = Samples::read(&path).unwrap();
        assert_eq!(samples.texts.len() + samples.conversations.len(), 1, "{line}");
    }
    std::fs::write(&path, lines.join("\n")).unwrap();
    let samples = Samples::read(&path).unwrap();
    assert_eq!(samples.texts, ["one two", "three four", "seven\neight\nnine"]);
    assert_eq!(samples.conversations[0].messages.len(), 2);

    let model = Model::load(source.path(), DType::F32, &Device::Cpu).unwrap();
    let tokenizer = Tokenizer::load(source.path()).unwrap();
    let side = Side { model: &model, adapter: None, tokenizer: &tokenizer };
    assert!(compare(side, side, &samples).unwrap().problems.is_empty());
    let samples = Samples { texts: vec![String::new()], conversations: Vec::new() };
    let error = compare(side, side, &samples).unwrap_err();
    assert!(matches!(&error, Error::Option { option, .. } if option == "texts"), "{error}");
}
