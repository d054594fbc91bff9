//! Models of which several ranks have a part each: on as many GPUs where there are, or else threads.

use crate::common::device;
use crate::engine::{options, request, requests, together, tokenizer};
use crate::models::{FAMILIES, folder, load, random_adapter};
use crate::quantized::{IDS, config, saved, with_experts};
use metal_candle::adapter::{Adapter, Biases, LoraConfig, StartFrom, Targets};
use metal_candle::autograd::Tape;
use metal_candle::devices;
use metal_candle::engine::{Engine, EngineOptions, Event, Request};
use metal_candle::generate::{GenerateOptions, Session};
use metal_candle::model::{Holding, Model, Placement};
use metal_candle::parallel::tensor;
use metal_candle::pass::Input;
use metal_candle::random::SplitMix64;
use metal_candle::{DType, Device};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;

/// Where so many ranks are.
fn places(count: usize) -> Vec<Device> {
    match device().is_cuda() && devices::cuda_count() >= count {
        true => (0..count).map(|number| devices::cuda(number).unwrap()).collect(),
        false => vec![Device::Cpu; count],
    }
}

fn split(folder: &Path, count: usize, word: Option<&str>) -> metal_candle::Result<Arc<Model>> {
    let quantization = word.map(|word| word.parse().unwrap());
    Ok(Arc::new(tensor::load(folder, DType::F32, &places(count), quantization)?))
}

fn whole(folder: &Path, word: Option<&str>) -> Arc<Model> {
    let quantization = word.map(|word| word.parse().unwrap());
    let holding = Holding { quantization, placement: Placement::Device };
    Arc::new(Model::load_with(folder, DType::F32, &places(1)[0], holding).unwrap())
}

/// How likely a text's tokens are with an adapter or without.
fn scored(model: &Arc<Model>, adapter: Option<&Arc<Adapter>>) -> Vec<f64> {
    let mut engine = Engine::new(model, None, options(20)).unwrap();
    let options = GenerateOptions { max_tokens: 1, ..GenerateOptions::default() };
    let (prompt, adapter) = (IDS.to_vec(), adapter.cloned());
    engine
        .submit(Request { prompt, options, adapter, score_prompt: true, ..Request::default() })
        .unwrap();
    let mut scores = Vec::new();
    while !engine.is_idle() {
        for (_, event) in engine.step() {
            match event {
                Event::Prompt(scored) => scores.extend(scored.iter().filter_map(|it| it.logprob)),
                Event::Failed(error) => panic!("{error}"),
                Event::Piece(_) | Event::Finished(_) => {}
            }
        }
    }
    assert_eq!(scores.len(), IDS.len() - 1);
    scores
}

/// Why a text can't be written, if it can't.
fn failure(engine: &mut Engine, request: Request) -> Option<String> {
    engine.submit(request).unwrap();
    let mut failed = None;
    while !engine.is_idle() {
        for (_, event) in engine.step() {
            if let Event::Failed(error) = event {
                failed = Some(error.to_string());
            }
        }
    }
    failed
}

fn assert_near(a: &[f64], b: &[f64], what: &str) {
    let near = |(a, b): (&f64, &f64)| (a - b).abs() < 2e-5 * b.abs().max(1.0);
    assert!(a.len() == b.len() && a.iter().zip(b).all(near), "{what}: {a:?} and {b:?}");
}

#[test]
fn ranks_write_what_one_device_writes() {
    let tokenizer = tokenizer();
    let mut written = 0;
    for name in FAMILIES {
        let model = load(name);
        let (heads, keys) = (model.config().heads, model.config().kv_heads);
        for count in [1, 2, 4] {
            let split = split(&folder(name), count, None);
            let expected = match (*name, count) {
                ("olmo2", _) => Some("norms see the queries of all heads at once"),
                _ if heads % count > 0 => Some("attention heads"),
                _ if keys % count > 0 => Some("key-value heads"),
                _ => None,
            };
            if let Some(expected) = expected {
                let wrong = split.unwrap_err().to_string();
                assert!(wrong.contains(expected), "{name}: {wrong}");
                continue;
            }
            let split = split.unwrap();
            let requests = requests(model.config().vocab_size);
            for (blocks, prefix_cache) in [(200, true), (12, false)] {
                let write = |model: &Arc<Model>| {
                    let options = EngineOptions { prefix_cache, ..options(blocks) };
                    let mut engine = Engine::new(model, Some(&tokenizer), options).unwrap();
                    let texts = together(&mut engine, &requests);
                    assert_eq!(engine.statistics().preemptions > 0, blocks == 12, "{name}");
                    texts
                };
                assert_eq!(write(&split), write(&model), "{name} of {count} ranks");
            }
            written += 1;
        }
    }
    assert!(written > 30, "{written}");
}

#[test]
fn weights_in_fewer_bits_are_those_of_the_whole() {
    let folder = saved(json!({
        "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4,
        "head_dim": 128, "attention_bias": true, "mlp_bias": true,
    }));
    for word in [
        None,
        Some("nf4"),
        Some("mlx4"),
        Some("mxfp4"),
        Some("q8_0"),
        Some("q6_k"),
        Some("fp8"),
        Some("int8"),
    ] {
        let expected = scored(&whole(folder.path(), word), None);
        for count in [2, 4] {
            let split = split(folder.path(), count, word).unwrap();
            assert_near(&scored(&split, None), &expected, &format!("{word:?} of {count} ranks"));
        }
    }
    let mut mixture = with_experts();
    (mixture["moe_intermediate_size"], mixture["head_dim"]) = (json!(512), json!(128));
    let folder = saved(mixture);
    for word in [None, Some("nf4"), Some("q4_k")] {
        let expected = scored(&whole(folder.path(), word), None);
        let split = split(folder.path(), 2, word).unwrap();
        assert_near(&scored(&split, None), &expected, &format!("{word:?} of experts"));
    }
    // Blocks of 256 of 128 inputs each.
    let small = saved(json!({ "hidden_size": 256, "intermediate_size": 256, "head_dim": 64 }));
    let wrong = split(small.path(), 2, Some("q4_k")).unwrap_err().to_string();
    assert!(wrong.contains("can't be cut") && wrong.contains("within a block of 256"), "{wrong}");
}

#[test]
fn a_bias_is_added_once() {
    let config =
        config(json!({ "attention_bias": true, "mlp_bias": true, "num_key_value_heads": 4 }));
    let make = |device: &Device, placement: Placement| {
        let holding = Holding { quantization: None, placement };
        Model::from_fn_with(config.clone(), DType::F32, device, holding, |name, shape| {
            let mut random = SplitMix64::new(name.bytes().map(u64::from).sum());
            let numbers = (0..shape.iter().product()).map(|_| 0.1 * random.normal() as f32);
            Ok(candle_core::Tensor::from_iter(numbers, &Device::Cpu)?.reshape(shape)?)
        })
    };
    let whole = Arc::new(make(&places(1)[0], Placement::Device).unwrap());
    let expected = scored(&whole, None);
    for count in [2, 4] {
        let split = Arc::new(tensor::build(&places(count), make).unwrap());
        assert_near(&scored(&split, None), &expected, &format!("{count} ranks"));
    }
}

#[test]
fn each_text_has_its_own_adapter_on_all_ranks() {
    for name in ["llama3", "phi3", "qwen2"] {
        let (model, split) = (load(name), split(&folder(name), 2, None).unwrap());
        let config = |rank, targets| LoraConfig { rank, targets, ..LoraConfig::default() };
        let of = |model: &Arc<Model>| -> Vec<Option<Arc<Adapter>>> {
            let mut adapters = vec![None];
            for rank in [1, 4, 16] {
                let config = config(rank, Targets::all_linear());
                adapters.push(Some(random_adapter(model, &config, rank as u64)));
            }
            adapters
        };
        let (ours, theirs) = (of(&split), of(&model));
        let prompt: Vec<u32> = (0..13).map(|i| i * 7 % 50).collect();
        let write = |model: &Arc<Model>, adapters: &[Option<Arc<Adapter>>]| {
            let requests: Vec<Request> = (0..12)
                .map(|index| Request {
                    adapter: adapters[index % 4].clone(),
                    ..request(&prompt[..9 + index / 4 * 2], 16)
                })
                .collect();
            let mut engine = Engine::new(model, None, options(100)).unwrap();
            let mixed = together(&mut engine, &requests).0;
            // And with one adapter alone.
            (mixed, together(&mut engine, &requests[1..2]).0)
        };
        assert_eq!(write(&split, &ours), write(&model, &theirs), "{name}");
        for (mine, other) in ours.iter().zip(&theirs) {
            let expected = scored(&model, other.as_ref());
            assert_near(&scored(&split, mine.as_ref()), &expected, name);
        }
    }
}

#[test]
fn what_ranks_cannot_do_says_so() {
    let split = split(&folder("llama"), 2, None).unwrap();
    let model = load("llama");
    assert!(split.is_tensor_parallel() && !model.is_tensor_parallel());
    let size = model.size_in_bytes();
    assert!(split.size_in_bytes() > size && split.size_in_bytes() < 2 * size);
    let refused = |options: EngineOptions, expected: &str| {
        let wrong = Engine::new(&split, None, options).err().unwrap().to_string();
        assert!(wrong.contains(expected), "{wrong}");
    };
    let several = "is for a model on one device, and this one is in parts on several";
    let invariant = EngineOptions { batch_invariant: true, ..options(9) };
    refused(invariant, &format!("batch_invariant: {several}"));
    let draft = EngineOptions { draft_model: Some(model.clone()), draft_tokens: 1, ..options(9) };
    refused(draft, &format!("draft_model: {several}"));
    let input = Input::sequence(&IDS, split.device()).unwrap();
    let wrong = split.forward(&Tape::inference(), &input).unwrap_err().to_string();
    assert!(wrong.contains("tensor parallelism"), "{wrong}");
    let mut session = Session::new(&split, None).unwrap();
    assert!(session.read(&IDS).unwrap_err().to_string().contains("tensor parallelism"));
    let usual = LoraConfig::default;
    for (config, expected) in [
        (LoraConfig { dora: true, ..usual() }, "DoRA"),
        (LoraConfig { start: StartFrom::Pissa, ..usual() }, "PiSSA"),
        (LoraConfig { bias: Biases::All, ..usual() }, "biases"),
        (LoraConfig { modules_to_save: vec!["norm".into()], ..usual() }, "modules_to_save"),
        (LoraConfig { targets: Targets::Names(vec!["lm_head".into()]), ..usual() }, "the head"),
    ] {
        let wrong = Adapter::new(&split, &config, 1).unwrap_err().to_string();
        assert!(wrong.contains(expected) && wrong.contains("LoRA of linear layers is"), "{wrong}");
    }
    // An adapter for the whole model.
    let adapter = Some(random_adapter(&model, &usual(), 1));
    let mut engine = Engine::new(&split, None, options(9)).unwrap();
    refused(options(9), "is computed by another engine");
    let wrong = engine.submit(Request { adapter, ..request(&IDS, 1) }).unwrap_err().to_string();
    assert!(wrong.contains("another model"), "{wrong}");
}

#[test]
fn a_rank_that_fails_is_named_and_nobody_waits_for_it() {
    let split = tensor::build(&vec![Device::Cpu; 3], |device, placement| {
        let rank = match &placement {
            Placement::TensorParallel(rank) => rank.index(),
            _ => panic!("no rank"),
        };
        // It doesn't know as many tokens.
        let vocabulary = if rank == 1 { 50 } else { 100 };
        let config = config(json!({
            "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "intermediate_size": 96, "vocab_size": vocabulary
        }));
        let weight = |_: &str, shape: &[usize]| {
            Ok(candle_core::Tensor::ones(shape, DType::F32, &Device::Cpu)?)
        };
        let holding = Holding { quantization: None, placement };
        Model::from_fn_with(config, DType::F32, device, holding, weight)
    });
    let split = Arc::new(split.unwrap());
    let mut engine = Engine::new(&split, None, options(20)).unwrap();
    let tokens = [49, 50, 49];
    let failed = tokens.map(|token| failure(&mut engine, request(&[1, token], 1)));
    let failed: Vec<String> = failed.into_iter().flatten().collect();
    // The text after it is written.
    assert_eq!(failed.len(), 1, "{failed:?}");
    assert!(failed.iter().all(|it| it.starts_with("rank 1: ")), "{failed:?}");
    let statistics = engine.statistics();
    assert_eq!(statistics.blocks, statistics.available_blocks);
}

#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs two NVIDIA GPUs and NCCL"]
fn cuda_a_rank_without_memory_is_named_and_nobody_waits_for_it() {
    let places = [0, 1].map(|number| devices::cuda(number).unwrap());
    let folder = saved(json!({}));
    let split = Arc::new(tensor::load(folder.path(), DType::F32, &places, None).unwrap());
    let mut engine = Engine::new(&split, None, options(20)).unwrap();
    let write = |engine: &mut Engine| failure(engine, request(&IDS, 20));
    // Recordings are made, too.
    assert_eq!(write(&mut engine), None);
    assert_eq!(write(&mut engine), None);
    let mut taken = Vec::new();
    for size in [1 << 30, 1 << 24, 1 << 20, 1 << 16, 1 << 12, 1 << 8] {
        while let Ok(memory) = candle_core::Tensor::zeros(size, DType::U8, &places[1]) {
            taken.push(memory);
        }
    }
    let failed = write(&mut engine).unwrap();
    assert!(failed.starts_with("rank 1: "), "{failed}");
    // NCCL needs some, too, when it begins anew or with its first sum.
    let failed = write(&mut engine).unwrap();
    let again = failed.contains("can't begin anew after `rank 1: ");
    assert!(again || failed.starts_with("rank 1: "), "{failed}");
    // With room again, all go on.
    drop(taken);
    assert_eq!(write(&mut engine), None);
    assert_eq!(write(&mut engine), None);
}
