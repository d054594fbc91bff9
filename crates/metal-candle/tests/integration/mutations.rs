//! Good files after small changes: whatever they say now, reading and using them ends, in a result or in an error that
//! can be read. The changes follow from their number, so a case that fails can be made again.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::common::isolated::isolated;
use metal_candle::adapter::{Adapter, LoraConfig};
use metal_candle::data::{BatchOptions, Batcher, Dataset, Example, read_records};
use metal_candle::generate::Session;
use metal_candle::gguf::GgufFile;
use metal_candle::model::Model;
use metal_candle::random::SplitMix64;
use metal_candle::text::{ChatTemplate, Message, RenderOptions, Tokenizer};
use metal_candle::train::{LearningRate, Metric, TrainOptions, Trainer};
use metal_candle::{DType, Device, Result};
use serde_json::Value;

fn fixture(name: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures")).join(name)
}

/// Changes what it is given, a little.
struct Mutator(SplitMix64);

impl Mutator {
    fn new(case: u64) -> Self {
        Self(SplitMix64::stream(19, case))
    }

    fn below(&mut self, bound: usize) -> usize {
        self.0.below(bound.max(1) as u64) as usize
    }

    fn one_of<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        let index = self.below(items.len());
        &items[index]
    }

    /// Up to three changes of bytes: some turned, left out, doubled, moved or put in.
    fn bytes(&mut self, data: &mut Vec<u8>) {
        const PUT_IN: [&[u8]; 12] = [
            b"\0",
            b"\xff\xfe",
            b"\xef\xbb\xbf",
            b"\x1b[31m",
            b"{",
            b"]",
            b"\"",
            b"-1",
            b"99999999999999999999",
            b"\n",
            b"null",
            b"\xed\xa0\x80",
        ];
        for _ in 0..=self.below(3) {
            let at = self.below(data.len());
            let end = (at + 1 + self.below(16)).min(data.len());
            match self.below(6) {
                0 if !data.is_empty() => data[at] ^= 1 << self.below(8),
                1 => data.truncate(at),
                2 => drop(data.drain(at..end)),
                3 => {
                    let part = data[at..end].to_vec();
                    let to = self.below(data.len());
                    data.splice(to..to, part);
                }
                _ => {
                    let part = *self.one_of(&PUT_IN);
                    data.splice(at..at, part.iter().copied());
                }
            }
        }
    }

    /// Other numbers in one to four places of the beginning of a file.
    fn numbers(&mut self, data: &mut [u8]) {
        let others = [0, 1, 2, 7, 255, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 60, u64::MAX];
        for _ in 0..=self.below(3) {
            let bytes = self.one_of(&others).to_le_bytes();
            let length = *self.one_of(&[1, 4, 8]);
            // Most of what follows are values of weights.
            let beginning = *self.one_of(&[64, 1200, 12_000]);
            let at = self.below(data.len().min(beginning) - length);
            data[at..at + length].copy_from_slice(&bytes[..length]);
        }
    }

    /// JSON with up to two values that are another, gone, doubled or under another key.
    fn json(&mut self, mut value: Value) -> String {
        const MARK: &str = "\u{1}other value\u{1}";
        let nested = |open: &str, close: &str| open.repeat(3000) + &close.repeat(3000);
        let others: Vec<String> = [
            "null",
            "true",
            "false",
            "0",
            "1",
            "-1",
            "2",
            "3",
            "7",
            "0.5",
            "-0.0",
            "1e400",
            "1e-400",
            "4294967296",
            "9223372036854775807",
            "18446744073709551616",
            "1000000000",
            "\"\"",
            "\"\\u0000\"",
            "\"\\ud800\"",
            "\"\\u001b[2J\"",
            "\"../../etc/passwd\"",
            "\"none\"",
            "[]",
            "{}",
            "[null]",
            "[[1], [2]]",
            "{\"type\": \"a\"}",
            "NaN",
        ]
        .map(str::to_string)
        .into_iter()
        .chain([nested("[", "]"), nested("{\"a\":[", "]}"), format!("\"{}\"", "a".repeat(200_000))])
        .collect();
        let mut put_in = Vec::new();
        for _ in 0..=self.below(2) {
            let places = places(&value);
            let index = self.below(places.len());
            let what = self.below(8);
            let Some((parent, key)) = places.get(index) else { continue };
            let at = |key: &str| key.parse::<usize>().unwrap();
            match (value.pointer_mut(parent).unwrap(), what) {
                (Value::Object(map), 0) => drop(map.shift_remove(key)),
                (Value::Array(list), 0) => drop(list.remove(at(key))),
                (Value::Array(list), 1) => list.push(list[at(key)].clone()),
                (Value::Object(map), 1) => {
                    let value = map.shift_remove(key).unwrap();
                    map.insert(format!("{key}\u{1b}"), value);
                }
                (parent, _) => {
                    let place = match parent {
                        Value::Object(map) => &mut map[key],
                        other => &mut other[at(key)],
                    };
                    *place = Value::String(format!("{MARK}{}", put_in.len()));
                    put_in.push(self.one_of(&others).clone());
                }
            }
        }
        let mut text = value.to_string();
        for (index, other) in put_in.iter().enumerate() {
            let mark = Value::String(format!("{MARK}{index}")).to_string();
            text = text.replace(&mark, other);
        }
        text
    }

    /// Changes a file: mostly what it says as JSON, if it is, and else its bytes.
    fn file(&mut self, path: &Path) {
        let mut data = std::fs::read(path).unwrap();
        match serde_json::from_slice(&data) {
            Ok(value) if self.below(4) > 0 => data = self.json(value).into_bytes(),
            _ if path.extension().is_some_and(|end| end == "safetensors") && self.below(4) > 0 => {
                let length = u64::from_le_bytes(data[..8].try_into().unwrap()) as usize;
                let header = serde_json::from_slice(&data[8..8 + length]).unwrap();
                let header = self.json(header);
                data.splice(..8 + length, header.bytes());
                data.splice(..0, (header.len() as u64).to_le_bytes());
            }
            _ if path.extension().is_some_and(|end| end == "gguf") && self.below(4) > 0 => {
                self.numbers(&mut data);
            }
            _ => self.bytes(&mut data),
        }
        std::fs::write(path, data).unwrap();
    }
}

/// Where there are values in a value: the JSON pointer to what holds each, and its key or index there.
fn places(value: &Value) -> Vec<(String, String)> {
    let inner: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(list) => {
            list.iter().enumerate().map(|(index, value)| (index.to_string(), value)).collect()
        }
        _ => Vec::new(),
    };
    let mut found = Vec::new();
    for (key, value) in inner {
        let step = key.replace('~', "~0").replace('/', "~1");
        found.push((String::new(), key));
        let below = places(value).into_iter();
        found.extend(below.map(|(parent, key)| (format!("/{step}{parent}"), key)));
    }
    found
}

/// Changes one of `files` of the folder `good`, `cases` times, and calls `use_it`. Some cases must be refused, and some
/// not: else nothing would be tried.
fn mutate(good: &Path, files: &[&str], cases: u64, use_it: impl Fn(&Path) -> Result<()>) {
    let copied = || {
        let folder = tempfile::tempdir().unwrap();
        copy(good, folder.path());
        folder
    };
    use_it(copied().path()).unwrap();
    let mut refused = 0;
    for case in 0..cases {
        let mut mutator = Mutator::new(case);
        let folder = copied();
        let file = *mutator.one_of(files);
        eprintln!("case {case}, {file}");
        mutator.file(&folder.path().join(file));
        if let Err(error) = use_it(folder.path()) {
            refused += 1;
            let error = error.to_string();
            assert!(error.len() < 2500, "{error}");
            for word in ["Some(", "untagged", "expected u", "Error {", "panicked"] {
                assert!(!error.contains(word), "{error}");
            }
        }
    }
    eprintln!("{refused} of {cases} refused");
    assert!((cases / 10..cases).contains(&refused), "{refused} of {cases} refused");
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.path().is_dir() {
            std::fs::create_dir(&to).unwrap();
            copy(&entry.path(), &to);
        } else {
            std::fs::copy(entry.path(), to).unwrap();
        }
    }
}

/// A folder with some files of the fixtures' folders.
fn folder_of(parts: &[(&str, &[&str])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (from, names) in parts {
        for name in *names {
            std::fs::copy(fixture(from).join(name), folder.path().join(name)).unwrap();
        }
    }
    folder
}

/// Loads a model, with its adapter where there is one, and reads some tokens.
fn use_model(folder: &Path) -> Result<()> {
    let model = Arc::new(Model::load(folder, DType::F32, &Device::Cpu)?);
    let adapter = match folder.join("adapter_config.json").exists() {
        true => Some(Arc::new(Adapter::load(&model, folder)?)),
        false => None,
    };
    Session::new(&model, adapter.as_ref())?.read(&[1, 2, 3, 0]).map(drop)
}

const MODEL: &[&str] = &["config.json", "model.safetensors"];

#[test]
fn changed_models_are_used_or_refused() {
    isolated("mutations::changed_models_are_used_or_refused", || {
        for family in
            ["gemma3-text", "llama-dynamic", "llama3", "ministral3", "phi3-longrope", "qwen3"]
        {
            eprintln!("{family}");
            let good = folder_of(&[(&format!("models/{family}"), MODEL)]);
            let files = ["config.json", "config.json", "model.safetensors"];
            mutate(good.path(), &files, 600, use_model);
        }
    });
}

#[test]
fn changed_shards_are_used_or_refused() {
    isolated("mutations::changed_shards_are_used_or_refused", || {
        let shards = [1, 2, 3].map(|shard| format!("model-0000{shard}-of-00003.safetensors"));
        let index = "model.safetensors.index.json";
        let names = [&shards[0], &shards[1], &shards[2], index, "config.json"];
        let good = folder_of(&[("models/llama-sharded", &names)]);
        mutate(good.path(), &[index, index, &shards[1]], 400, use_model);
    });
}

#[test]
fn changed_adapters_are_used_or_refused() {
    isolated("mutations::changed_adapters_are_used_or_refused", || {
        let files = ["adapter_config.json", "adapter_model.safetensors"];
        let good = folder_of(&[("models/llama", MODEL), ("models/llama/adapter", &files)]);
        mutate(good.path(), &files, 800, use_model);
        let files = ["adapter_config.json", "adapters.safetensors"];
        let good = folder_of(&[("models/llama", MODEL), ("models/llama/adapter-mlx-keys", &files)]);
        mutate(good.path(), &files, 800, use_model);
    });
}

#[test]
fn changed_tokenizers_are_used_or_refused() {
    isolated("mutations::changed_tokenizers_are_used_or_refused", || {
        let files = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"];
        for name in ["tokenizer", "tokenizer-sp"] {
            eprintln!("{name}");
            let good = folder_of(&[(name, &files)]);
            mutate(good.path(), &files, 600, |folder| {
                let tokenizer = Tokenizer::load(folder)?;
                for text in ["", "A text, of \u{1f600} ÄÖ\n\n<|im_end|>", "aaaaaaaaaaaaaaaaa 12345"]
                {
                    let (ids, _) = tokenizer.encode_with_offsets(text, true)?;
                    tokenizer.decode(&ids, false)?;
                    let mut stream = tokenizer.decode_stream();
                    for id in ids {
                        stream.push(id)?;
                    }
                }
                if let Some(template) = tokenizer.chat_template() {
                    template.render(&conversation(), &RenderOptions::default())?;
                }
                Ok(())
            });
        }
    });
}

fn conversation() -> [Message; 3] {
    [("system", "Be brief."), ("user", "What is\nthere?"), ("assistant", "Nothing.")]
        .map(|(role, text)| Message::new(role, text))
}

#[test]
fn changed_gguf_files_are_used_or_refused() {
    isolated("mutations::changed_gguf_files_are_used_or_refused", || {
        for name in ["byte-level.gguf", "sentence-piece.gguf"] {
            eprintln!("{name}");
            let good = folder_of(&[("gguf", &[name])]);
            mutate(good.path(), &[name], 1500, |folder| {
                let file = GgufFile::open(folder.join(name))?;
                let names: Vec<String> = file.names().map(str::to_string).collect();
                for name in names {
                    file.tensor(&name)?.dense().transpose()?;
                }
                let tokenizer = file.tokenizer()?;
                for text in ["", "A text, of \u{1f600} ÄÖ\n\n<|im_end|>", "aaaaaaaaaaaaa 12345"] {
                    let (ids, _) = tokenizer.encode_with_offsets(text, true)?;
                    tokenizer.decode(&ids, false)?;
                }
                if let Some(template) = tokenizer.chat_template() {
                    template.render(&conversation(), &RenderOptions::default())?;
                }
                Ok(())
            });
        }
        let good = folder_of(&[("gguf", &["adapter.gguf", "byte-level.gguf"])]);
        mutate(good.path(), &["adapter.gguf"], 800, |folder| {
            let base = GgufFile::open(folder.join("byte-level.gguf"))?;
            let layers =
                metal_candle::gguf::read_adapter(folder.join("adapter.gguf"), base.config())?;
            metal_candle::gguf::save_as_peft(folder.join("peft"), &layers, "base")
        });
    });
}

#[test]
fn changed_templates_are_used_or_refused() {
    isolated("mutations::changed_templates_are_used_or_refused", || {
        for name in ["llama3.jinja", "qwen-tools.jinja", "gemma.jinja", "methods.jinja"] {
            eprintln!("{name}");
            let good = folder_of(&[("templates", &[name])]);
            mutate(good.path(), &[name], 800, |folder| {
                let source = String::from_utf8_lossy(&std::fs::read(folder.join(name)).unwrap())
                    .into_owned();
                let template = ChatTemplate::new(&source, Vec::new(), Vec::new(), Vec::new())?;
                let messages = &conversation()[1..];
                template.render(messages, &RenderOptions::default()).map(drop)
            });
        }
    });
}

#[test]
fn changed_data_are_read_or_refused() {
    isolated("mutations::changed_data_are_read_or_refused", || {
        let folder = tempfile::tempdir().unwrap();
        let write =
            |name: &str, text: &str| std::fs::write(folder.path().join(name), text).unwrap();
        write(
            "chat.jsonl",
            concat!(
                r#"{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}"#,
                "\n",
                r#"{"messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}]}"#,
            ),
        );
        write(
            "pairs.json",
            r#"[{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]"#,
        );
        write("alpaca.csv", "instruction,input,output\n\"a, b\",c,d\n\"e\ne\",\"\"\"f\",g\n");
        write("pairs.tsv", "prompt\tcompletion\na\tb\nc\td\n");
        for name in ["pairs-zstd.parquet", "pairs-snappy.parquet", "pairs-lz4.parquet"] {
            std::fs::copy(fixture("data").join(name), folder.path().join(name)).unwrap();
        }
        for entry in std::fs::read_dir(folder.path()).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            mutate(folder.path(), &[&name], 400, |folder| {
                read_records(&folder.join(&name)).map(drop)
            });
        }
    });
}

/// Trains a model for four steps in the folder `run`, from its newest checkpoint if it has one.
fn train(run: &Path) -> Result<()> {
    let ids: Vec<u32> = (0..12).collect();
    let example = Example { trainable: vec![true; ids.len()], ids };
    let dataset = Arc::new(Dataset::from_examples(&vec![example; 6])?);
    let options = BatchOptions {
        batch_size: 2,
        max_seq_length: 16,
        packing: false,
        seed: 1,
        shuffle: true,
        ..BatchOptions::default()
    };
    let batches = Batcher::new(dataset, options)?;
    let model = Arc::new(Model::load(fixture("models/llama"), DType::F32, &Device::Cpu)?);
    let config = LoraConfig { rank: 2, alpha: 16.0, ..LoraConfig::default() };
    let adapter = Arc::new(Adapter::new(&model, &config, 3)?);
    let options =
        TrainOptions { save_every: 2, ..TrainOptions::new(4, LearningRate::constant(1e-3)?) };
    let mut trainer = Trainer::new(&model, &adapter, &batches, options, run, "llama")?;
    trainer.resume_newest(run)?;
    trainer.run(&mut |_: &Metric| -> Result<()> { Ok(()) }).map(drop)
}

#[test]
fn changed_checkpoints_are_resumed_or_refused() {
    isolated("mutations::changed_checkpoints_are_resumed_or_refused", || {
        let good = tempfile::tempdir().unwrap();
        train(good.path()).unwrap();
        let checkpoints = good.path().join("checkpoints");
        let all = std::fs::read_dir(&checkpoints).unwrap().map(|entry| entry.unwrap().path());
        let oldest = all.min().unwrap();
        let mut files = Vec::new();
        for entry in std::fs::read_dir(&oldest).unwrap() {
            let path = entry.unwrap().path();
            files.push(path.strip_prefix(good.path()).unwrap().to_str().unwrap().to_string());
        }
        files.sort();
        eprintln!("{files:?}");
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        // Only one is left that is not the last step: the run goes on from it.
        for entry in std::fs::read_dir(&checkpoints).unwrap() {
            let path = entry.unwrap().path();
            if path != oldest {
                std::fs::remove_dir_all(path).unwrap();
            }
        }
        // Without hashes of its files, by which a change would be refused before they are read.
        let path = oldest.join("trainer_state.json");
        let state = std::fs::read(&path).unwrap();
        let mut state: serde_json::Value = serde_json::from_slice(&state).unwrap();
        assert!(state.as_object_mut().unwrap().remove("files").is_some());
        std::fs::write(&path, serde_json::to_vec_pretty(&state).unwrap()).unwrap();
        mutate(good.path(), &files, 400, train);
    });
}
