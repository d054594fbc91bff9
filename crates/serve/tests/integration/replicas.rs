//! One base with several engines behind one address.

use crate::asking::begin;
use crate::jobs::client::{Client, demo, lines, model, serve_model, serve_replicas, serve_with};
use candle_core::Tensor;
use metal_candle::adapter::{Adapter, LoraConfig};
use metal_candle::parallel::tensor;
use metal_candle::random::SplitMix64;
use metal_candle::{DType, Device};
use metal_candle_serve::Options;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::thread;

const ENGINES: usize = 3;

/// A folder of adapters with one in it that changes what the model writes.
fn adapters(place: &Path) {
    let model = Arc::new(model());
    let adapter = Adapter::new(&model, &LoraConfig::default(), 1).unwrap();
    let values = adapter.parameters().values();
    let mut random = SplitMix64::stream(1, 0);
    let other: Vec<f32> = (0..values.elem_count()).map(|_| random.uniform() as f32 - 0.5).collect();
    let other = Tensor::from_vec(other, values.shape(), values.device()).unwrap();
    let folder = place.join("other");
    fs::create_dir(&folder).unwrap();
    adapter.files(&model, "demo", None).unwrap().write(folder, &other).unwrap();
}

fn text(client: &Client, model: &str, prompt: &str) -> Value {
    let request = json!({"model": model, "prompt": prompt, "max_tokens": 20, "temperature": 0});
    let (status, answer) = client.post("/v1/completions", &request);
    assert_eq!(status, 200, "{answer}");
    answer["choices"][0]["text"].clone()
}

fn figure(client: &Client, name: &str) -> f64 {
    let (status, figures) = client.bytes("/metrics");
    assert_eq!(status, 200);
    let figures = String::from_utf8(figures).unwrap();
    let line = figures.lines().find(|line| line.starts_with(name));
    let line = line.unwrap_or_else(|| panic!("no {name} in {figures}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn requests_at_once_are_written_by_all_engines_with_the_same_texts() {
    let place = tempfile::tempdir().unwrap();
    adapters(place.path());
    let change = |options: &mut Options| {
        options.adapters = Some(place.path().into());
        options.engine.cache_tokens = Some(8192);
    };
    let data: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    let one = serve_with(data[0].path(), change);
    let several = serve_replicas(data[1].path(), ENGINES, change);
    let (one, many) = (Client::of(&one), Client::of(&several));

    let prompts = ["Once", "The number of legs of a", "Please name the opposite of"];
    let asked = || ["demo", "other"].into_iter().flat_map(|model| prompts.map(|it| (model, it)));
    let expected: Vec<Value> = asked().map(|(model, it)| text(&one, model, it)).collect();
    assert_ne!(expected[..prompts.len()], expected[prompts.len()..]);

    // Each of these is under way until it is left, so each has an engine of its own.
    let held: Vec<_> = (0..ENGINES)
        .map(|_| {
            let request = json!({"model": "other", "prompt": "Once", "max_tokens": 100,
                "n": 128, "ignore_eos": true, "temperature": 1, "stream": true});
            begin(several.address(), "/v1/completions", &request)
        })
        .collect();
    assert_eq!(figure(&many, "adapters_loaded"), ENGINES as f64);
    let blocks = figure(&many, "vllm:kv_cache_usage_perc");
    assert!(blocks > 0.0 && blocks <= 1.0, "{blocks}");
    drop(held);

    thread::scope(|scope| {
        for _ in 0..2 * ENGINES {
            scope.spawn(|| {
                for ((model, prompt), expected) in asked().zip(&expected) {
                    assert_eq!(text(&many, model, prompt), *expected);
                }
            });
        }
    });
    // One that is unloaded, is so everywhere; and what changes is read again everywhere.
    let loaded = json!({"lora_name": "named", "lora_path": place.path().join("other")});
    assert_eq!(many.status("/v1/load_lora_adapter", &loaded), 200);
    assert_eq!(many.status("/v1/unload_lora_adapter", &json!({"lora_name": "named"})), 200);
    assert_eq!(figure(&many, "adapters_loaded"), 0.0);
}

#[test]
fn an_adapter_whose_files_change_is_read_again() {
    let place = tempfile::tempdir().unwrap();
    adapters(place.path());
    let data = tempfile::tempdir().unwrap();
    let server = serve_with(data.path(), |options| options.adapters = Some(place.path().into()));
    let client = Client::of(&server);
    let before = text(&client, "other", "Once");
    let path = place.path().join("other/adapter_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["lora_alpha"] = json!(config["lora_alpha"].as_f64().unwrap() * 4.0);
    fs::write(&path, config.to_string()).unwrap();
    assert_ne!(text(&client, "other", "Once"), before);

    fs::write(&path, "{").unwrap();
    let request = json!({"model": "other", "prompt": "Once"});
    let (status, answer) = client.post("/v1/completions", &request);
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("model")), "{answer}");
    let told = answer.to_string();
    assert!(told.contains("adapter_config.json"), "{told}");
    assert!(!told.contains(&place.path().display().to_string()), "{told}");
}

#[test]
fn an_adapter_that_took_its_start_from_the_base_is_read_or_refused_by_its_file() {
    let place = tempfile::tempdir().unwrap();
    adapters(place.path());
    let folder = place.path().join("other");
    let path = folder.join("adapter_config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    config["init_lora_weights"] = json!("olora");
    fs::write(&path, config.to_string()).unwrap();
    let data = tempfile::tempdir().unwrap();
    let server = serve_with(data.path(), |options| options.adapters = Some(place.path().into()));
    let client = Client::of(&server);
    assert!(text(&client, "other", "Once").is_string());

    config["r"] = json!(config["r"].as_u64().unwrap() / 2);
    fs::write(&path, config.to_string()).unwrap();
    let request = json!({"model": "other", "prompt": "Once"});
    let (status, answer) = client.post("/v1/completions", &request);
    let told = answer.to_string();
    assert!(status == 400 && told.contains("adapter_model.safetensors"), "{status} {told}");
    assert!(told.contains("another base model"), "{told}");
}

#[test]
fn jobs_train_beside_several_engines() {
    let data = tempfile::tempdir().unwrap();
    let server = serve_replicas(data.path(), ENGINES, |_| {});
    let client = Client::of(&server);
    let file = client.upload(&lines(12));
    let job = client.job(&json!({"model": "demo", "training_file": file}));
    let done = client.succeeded(&job);
    let name = done["fine_tuned_model"].as_str().unwrap();
    let texts: Vec<Value> = thread::scope(|scope| {
        let asking: Vec<_> =
            (0..2 * ENGINES).map(|_| scope.spawn(|| text(&client, name, "Once"))).collect();
        asking.into_iter().map(|it| it.join().unwrap()).collect()
    });
    assert!(texts.iter().all(|text| text == &texts[0]));
    let (status, _) = client.bytes(&format!("/v1/fine_tuning/jobs/{job}/merged"));
    assert_eq!(status, 200);
}

#[test]
fn embeddings_with_an_adapter_are_those_of_one_engine() {
    let place = tempfile::tempdir().unwrap();
    adapters(place.path());
    let change = |options: &mut Options| options.adapters = Some(place.path().into());
    let data: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    let one = serve_with(data[0].path(), change);
    let several = serve_replicas(data[1].path(), ENGINES, change);
    let clients = [Client::of(&one), Client::of(&several)];
    let embedding = |client: &Client, model: &str| {
        let request = json!({"model": model, "input": "Once"});
        let (status, answer) = client.post("/v1/embeddings", &request);
        assert_eq!(status, 200, "{answer}");
        answer["data"][0]["embedding"].clone()
    };
    let [base, other] = ["demo", "other"].map(|model| {
        let [one, several] = clients.each_ref().map(|client| embedding(client, model));
        assert_eq!(one, several);
        one
    });
    assert_ne!(base, other);
    assert_eq!(figure(&clients[1], "adapters_loaded"), 1.0);
}

#[test]
fn a_model_in_parts_writes_the_same_texts_and_says_what_needs_it_whole() {
    let place = tempfile::tempdir().unwrap();
    adapters(place.path());
    let whole = Arc::new(model());
    let dora = LoraConfig { dora: true, ..LoraConfig::default() };
    let dora = Adapter::new(&whole, &dora, 1).unwrap();
    let folder = place.path().join("dora");
    fs::create_dir(&folder).unwrap();
    dora.save(&folder, "demo").unwrap();
    let change = |options: &mut Options| options.adapters = Some(place.path().into());
    let data: Vec<_> = (0..2).map(|_| tempfile::tempdir().unwrap()).collect();
    let one = serve_with(data[0].path(), change);
    let split = tensor::load(demo("base"), DType::F32, &[Device::Cpu, Device::Cpu], None);
    let several = serve_model(data[1].path(), Arc::new(split.unwrap()), change);
    let (one, several) = (Client::of(&one), Client::of(&several));
    for model in ["demo", "other"] {
        for prompt in ["Once", "The number of legs of a"] {
            assert_eq!(text(&several, model, prompt), text(&one, model, prompt));
        }
    }
    let refused = |path: &str, body: Value, expected: &str| {
        let (status, answer) = several.post(path, &body);
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains(expected), "{status} {answer}");
    };
    let whole = "needs the model on one device";
    refused("/v1/embeddings", json!({"model": "demo", "input": "Once"}), whole);
    let file = several.upload(&lines(12));
    refused("/v1/fine_tuning/jobs", json!({"model": "demo", "training_file": file}), whole);
    let (status, answer) =
        several.post("/v1/completions", &json!({"model": "dora", "prompt": "x"}));
    assert!(status >= 400 && answer.to_string().contains("DoRA"), "{status} {answer}");
}
