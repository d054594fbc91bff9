//! The engine with models: what a request gives in company is what it gives alone.

use crate::models::{FAMILIES, folder, json, load, random_adapter, tokens};
use metal_candle::adapter::{Adapter, LoraConfig};
use metal_candle::autograd::ParameterId;
use metal_candle::engine::{
    CacheDtype, Engine, EngineOptions, Event, Finished, Handle, Request, RequestId, Statistics,
};
use metal_candle::generate::{FinishReason, GenerateOptions, Generation, SamplingOptions, Session};
use metal_candle::model::{Config, Model};
use metal_candle::random::SplitMix64;
use metal_candle::text::Tokenizer;
use metal_candle::{DType, Device};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

const BLOCK: usize = 4;

pub fn tokenizer() -> Tokenizer {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/tokenizer");
    Tokenizer::load(&folder).unwrap()
}

pub fn options(blocks: usize) -> EngineOptions {
    EngineOptions {
        max_sequences: 7,
        max_batch_tokens: 12,
        cache_tokens: Some(blocks * BLOCK),
        block_size: BLOCK,
        ..EngineOptions::default()
    }
}

pub fn request(prompt: &[u32], max_tokens: usize) -> Request {
    let options = GenerateOptions { max_tokens, ignore_eos: true, ..GenerateOptions::default() };
    Request { prompt: prompt.to_vec(), options, ..Request::default() }
}

/// What a session with nothing beside it writes.
fn alone(model: &Arc<Model>, tokenizer: &Tokenizer, request: &Request) -> Vec<u32> {
    let mut session = Session::new(model, request.adapter.as_ref()).unwrap();
    let options = request.options.clone();
    let mut generation =
        Generation::new(&mut session, tokenizer, &request.prompt, options).unwrap();
    for piece in &mut generation {
        piece.unwrap();
    }
    generation.tokens().to_vec()
}

/// The tokens of all requests, in their order, and what was found in the cache.
pub fn together(engine: &mut Engine, requests: &[Request]) -> (Vec<Vec<u32>>, usize) {
    let ids: Vec<RequestId> =
        requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let mut texts: HashMap<RequestId, Vec<u32>> = HashMap::new();
    let mut found = 0;
    while !engine.is_idle() {
        for (id, event) in engine.step() {
            match event {
                Event::Prompt(_) => {}
                Event::Piece(piece) => texts.entry(id).or_default().extend(piece.token),
                Event::Finished(Finished { cached_tokens, .. }) => found += cached_tokens,
                Event::Failed(error) => panic!("{error}"),
            }
        }
    }
    let Statistics { blocks, available_blocks, .. } = engine.statistics();
    assert_eq!(blocks, available_blocks, "blocks were lost");
    (ids.iter().map(|id| texts.remove(id).unwrap()).collect(), found)
}

/// Ragged requests, of which some begin alike.
pub fn requests(vocabulary: usize) -> Vec<Request> {
    let mut random = SplitMix64::new(5);
    let mut token = || random.below(vocabulary as u64) as u32;
    let beginning: Vec<u32> = (0..14).map(|_| token()).collect();
    (0..17)
        .map(|index| {
            let mut prompt = beginning[..[0, 14, 9, 0, 14][index % 5]].to_vec();
            prompt.extend((0..1 + index % 7).map(|_| token()));
            request(&prompt, 3 + index % 8)
        })
        .collect()
}

#[test]
fn every_family_writes_in_company_what_it_writes_alone() {
    let tokenizer = tokenizer();
    for name in FAMILIES {
        let model = load(name);
        let requests = requests(model.config().vocab_size);
        let expected: Vec<Vec<u32>> =
            requests.iter().map(|request| alone(&model, &tokenizer, request)).collect();
        for (blocks, prefix_cache) in [(200, true), (200, false), (12, true)] {
            let options = EngineOptions { prefix_cache, ..options(blocks) };
            let mut engine = Engine::new(&model, Some(&tokenizer), options).unwrap();
            let (texts, found) = together(&mut engine, &requests);
            assert_eq!(texts, expected, "{name} with {blocks} blocks, sharing: {prefix_cache}");
            assert_eq!(engine.statistics().preemptions > 0, blocks == 12, "{name}");
            assert!(if prefix_cache { found > 0 } else { found == 0 }, "{name}: {found}");
        }
    }
}

#[test]
fn greedy_continuations_are_those_of_transformers() {
    let tokenizer = tokenizer();
    for name in FAMILIES {
        let model = load(name);
        let expected = &json(folder(name).join("expected.json"))["greedy"];
        let (prompt, continuation) = (tokens(&expected["prompt"]), tokens(&expected["tokens"]));
        let mut engine = Engine::new(&model, Some(&tokenizer), options(50)).unwrap();
        let requests = [request(&prompt, continuation.len()), request(&prompt[1..], 9)];
        assert_eq!(together(&mut engine, &requests).0[0], continuation, "{name}");
    }
}

#[test]
fn each_text_has_its_own_adapter() {
    let tokenizer = tokenizer();
    let model = load("llama");
    let mut adapters: Vec<Option<Arc<Adapter>>> = [1, 4, 16]
        .into_iter()
        .map(|rank| {
            let config = LoraConfig { rank, ..LoraConfig::default() };
            Some(random_adapter(&model, &config, rank as u64))
        })
        .collect();
    adapters.push(None);
    // The same beginnings, whose keys differ by adapter.
    let prompt: Vec<u32> = (0..13).map(|i| i * 7 % 50).collect();
    let requests: Vec<Request> = (0..12)
        .map(|index| Request {
            adapter: adapters[index % 4].clone(),
            ..request(&prompt[..9 + index / 4 * 2], 16)
        })
        .collect();
    let expected: Vec<Vec<u32>> =
        requests.iter().map(|request| alone(&model, &tokenizer, request)).collect();
    assert_ne!(expected[0], expected[1]);
    for blocks in [200, 11] {
        let mut engine = Engine::new(&model, Some(&tokenizer), options(blocks)).unwrap();
        let (texts, found) = together(&mut engine, &requests);
        assert_eq!(texts, expected);
        assert!(found > 0 || blocks == 11);
        let Statistics { recorded, read_ahead, .. } = engine.statistics();
        assert_eq!(recorded > 0, model.device().is_cuda());
        assert_eq!(read_ahead > 0, model.device().is_cuda());
    }
    let other = load("qwen2");
    let mut engine = Engine::new(&other, Some(&tokenizer), options(20)).unwrap();
    let error = engine.submit(requests[0].clone()).unwrap_err().to_string();
    assert!(error.contains("was made for another model"), "{error}");
}

/// A text that is much longer than the others has a pass that isn't worth recording.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn cuda_passes_that_are_not_recorded_are_launched_ahead_too() {
    let tokenizer = tokenizer();
    let config = Config::from_json(
        r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 50,
            "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16384,
            "rms_norm_eps": 1e-5, "initializer_range": 0.3}"#,
    );
    let device = metal_candle::devices::cuda(0).unwrap();
    let model = Arc::new(Model::random(config.unwrap(), DType::F32, &device, 1).unwrap());
    let prompt =
        |length: usize| -> Vec<u32> { (0..length as u32).map(|i| (i * i + i / 7) % 50).collect() };
    let requests: Vec<Request> = (0..21)
        .map(|index| {
            let length = if index == 0 { 8200 } else { index };
            request(&prompt(length), if index % 8 == 7 { 3 } else { 10 })
        })
        .collect();
    let expected: Vec<Vec<u32>> =
        requests.iter().map(|request| alone(&model, &tokenizer, request)).collect();
    let options = EngineOptions {
        max_sequences: 21,
        max_batch_tokens: 10_000,
        cache_tokens: Some(16_000),
        // No prompt waits for another that begins alike.
        prefix_cache: false,
        ..EngineOptions::default()
    };
    let mut engine = Engine::new(&model, Some(&tokenizer), options).unwrap();
    assert_eq!(together(&mut engine, &requests).0, expected);
    let Statistics { recorded, read_ahead, .. } = engine.statistics();
    assert_eq!(recorded, 0);
    // Also of those that go on where others end; the first is read with the prompts.
    assert_eq!(read_ahead, 9);
}

#[test]
fn adapters_that_have_changed_are_read_as_they_are() {
    let tokenizer = tokenizer();
    let model = load("llama");
    let adapter = |rank, seed| {
        let config = LoraConfig { rank, ..LoraConfig::default() };
        random_adapter(&model, &config, seed)
    };
    let adapters = [adapter(3, 1), adapter(8, 2)];
    let prompt: Vec<u32> = (0..11).map(|i| i * 7 % 50).collect();
    let of = |adapter: Option<&Arc<Adapter>>| Request {
        adapter: adapter.cloned(),
        ..request(&prompt, 6)
    };
    let requests = [of(Some(&adapters[0])), of(None), of(Some(&adapters[1]))];
    let expected = |requests: &[Request]| -> Vec<Vec<u32>> {
        requests.iter().map(|request| alone(&model, &tokenizer, request)).collect()
    };
    // Keys that were computed before an adapter changed aren't found.
    let options = options(200);
    let mut engine = Engine::new(&model, Some(&tokenizer), options).unwrap();
    let before = expected(&requests);
    assert_eq!(together(&mut engine, &requests).0, before);
    let (changed, other) = (adapters[0].parameters(), adapter(3, 5));
    for (index, entry) in changed.entries().iter().enumerate() {
        let value = entry.of(other.parameters().values()).unwrap();
        changed.set(ParameterId(index), &value).unwrap();
    }
    let after = expected(&requests);
    assert_ne!(after[0], before[0]);
    assert_eq!(together(&mut engine, &requests).0, after);
    // Others among those that the last pass knew, and without one of them.
    let requests = [of(Some(&adapters[1])), of(Some(&other)), of(None)];
    assert_eq!(together(&mut engine, &requests).0, expected(&requests));
}

#[test]
fn an_adapter_that_changes_within_a_text_is_read_as_it_is_then() {
    let tokenizer = tokenizer();
    let model = load("llama");
    let adapter = |seed| {
        let config = LoraConfig { rank: 3, ..LoraConfig::default() };
        random_adapter(&model, &config, seed)
    };
    let other = adapter(5);
    // Where the likeliest tokens are told, no pass is launched before its tokens are known.
    let texts = [0, 1].map(|top_logprobs| {
        let adapter = adapter(1);
        let mut request =
            Request { adapter: Some(adapter.clone()), ..request(&[3, 1, 4, 1, 5], 24) };
        request.options.top_logprobs = top_logprobs;
        let mut engine = Engine::new(&model, Some(&tokenizer), options(50)).unwrap();
        engine.submit(request).unwrap();
        let mut pieces = Vec::new();
        while !engine.is_idle() {
            for (_, event) in engine.step() {
                if let Event::Piece(piece) = event {
                    pieces.push((piece.token, piece.logprob));
                }
            }
            if pieces.len() == 12 {
                let changed = adapter.parameters();
                for (index, entry) in changed.entries().iter().enumerate() {
                    let value = entry.of(other.parameters().values()).unwrap();
                    changed.set(ParameterId(index), &value).unwrap();
                }
            }
        }
        let ahead = engine.statistics().read_ahead;
        assert_eq!(ahead > 0, top_logprobs == 0 && model.device().is_cuda());
        pieces
    });
    assert_eq!(texts[0].len(), 24);
    assert_eq!(texts[0], texts[1]);
}

#[test]
fn drawn_texts_follow_from_their_seeds() {
    let tokenizer = tokenizer();
    let model = load("llama");
    let requests: Vec<Request> = (0..9)
        .map(|seed| {
            let mut request = request(&[3, 1, 4, 1, 5], 12);
            request.options.sampling = SamplingOptions {
                temperature: 1.5,
                repetition_penalty: 1.2,
                presence_penalty: 0.3,
                seed: seed / 2,
                ..SamplingOptions::default()
            };
            request
        })
        .collect();
    let mut engine = Engine::new(&model, Some(&tokenizer), options(30)).unwrap();
    let (texts, _) = together(&mut engine, &requests);
    for (text, request) in texts.iter().zip(&requests) {
        assert_eq!(*text, alone(&model, &tokenizer, request));
    }
    assert_eq!(texts[0], texts[1]);
    assert_ne!(texts[0], texts[2]);
}

#[test]
fn guessed_tokens_leave_every_text_as_it_is() {
    let tokenizer = tokenizer();
    for (name, other) in [("llama", "llama"), ("gemma2", "gemma2"), ("qwen3", "qwen3")] {
        let (model, small) = (load(name), load(other));
        let mut requests = requests(model.config().vocab_size);
        for (index, request) in requests.iter_mut().enumerate() {
            request.options.max_tokens = 24;
            if index % 3 == 0 {
                let sampling = SamplingOptions {
                    temperature: 0.8,
                    frequency_penalty: 0.4,
                    repetition_penalty: 1.2,
                    repetition_context: Some(6),
                    seed: index as u64,
                    ..SamplingOptions::default()
                };
                request.options.sampling = sampling;
            }
        }
        let expected: Vec<Vec<u32>> =
            requests.iter().map(|request| alone(&model, &tokenizer, request)).collect();
        for (blocks, draft_model) in [(200, None), (200, Some(small.clone())), (14, Some(small))] {
            let draft_tokens = 3;
            let options = EngineOptions { draft_tokens, draft_model, ..options(blocks) };
            let mut engine = Engine::new(&model, Some(&tokenizer), options).unwrap();
            let (texts, _) = together(&mut engine, &requests);
            assert_eq!(texts, expected, "{name}");
            let Statistics { drafted, accepted, .. } = engine.statistics();
            assert!(accepted > 0 && accepted < drafted, "{name}: {accepted} of {drafted}");
        }
    }
    let with = |draft_tokens, draft: &str| {
        let draft_model = Some(load(draft));
        let options = EngineOptions { draft_tokens, draft_model, ..options(20) };
        let engine = Engine::new(&load("llama"), Some(&tokenizer), options);
        engine.err().expect("refused").to_string()
    };
    let error = with(2, "llama-odd");
    assert!(error.contains("a vocabulary of 97 tokens, and the model one of 128"), "{error}");
    let error = with(0, "llama");
    assert!(error.contains("draft_model: is given, but draft_tokens is 0"), "{error}");
}

#[test]
fn memory_never_exceeds_the_pool() {
    let tokenizer = tokenizer();
    let model = load("llama");
    let mut engine = Engine::new(&model, Some(&tokenizer), options(9)).unwrap();
    assert_eq!(engine.statistics().blocks, 9);
    let (texts, _) = together(&mut engine, &requests(100));
    assert_eq!(texts.len(), 17);
    // Without an option it follows from the memory that is free, and from what can be of use.
    let usual = EngineOptions { cache_tokens: None, max_sequences: 3, ..options(1) };
    let engine = Engine::new(&model, Some(&tokenizer), usual).unwrap();
    let context = model.config().context();
    assert_eq!(engine.statistics().blocks, 3 * context.div_ceil(BLOCK));
}

#[test]
fn layers_with_a_window_keep_only_that() {
    let tokenizer = tokenizer();
    for (name, layers, windowed) in [("gemma3-text", 4, 3), ("gemma2", 3, 2), ("llama", 3, 0)] {
        let model = load(name);
        let config = model.config();
        assert_eq!(config.layers.len(), layers, "{name}");
        let of_token = 2 * 4 * config.kv_heads * config.head_dim;
        for (blocks, max_sequences, cache_dtype) in
            [(500, 3, CacheDtype::Model), (500, 3, CacheDtype::MxInt8), (10, 3, CacheDtype::Model)]
        {
            let options = EngineOptions { max_sequences, cache_dtype, ..options(blocks) };
            let mut engine = Engine::new(&model, Some(&tokenizer), options).unwrap();
            // A window of 6 tokens lies in 2 blocks and parts of others, and a step reads 12 tokens.
            let of_window = blocks.min(max_sequences * (2 + 3) + 3);
            let kept = ((layers - windowed) * blocks + windowed * of_window) * BLOCK;
            let exact = kept * of_token;
            let found = engine.statistics().cache_bytes;
            match cache_dtype {
                CacheDtype::Model => assert_eq!(found, exact, "{name}"),
                // A byte instead of four, and the scales.
                CacheDtype::MxInt8 => assert!(found > exact / 4 && found <= exact / 2, "{name}"),
            }
            let long: Vec<u32> = (0..60).map(|index| index * 7 % 97).collect();
            let lengths = if blocks == 500 { vec![60, 57, 50, 60, 3] } else { vec![30, 27, 31] };
            let requests: Vec<_> =
                lengths.iter().map(|&length| request(&long[..length], 8)).collect();
            let (texts, _) = together(&mut engine, &requests);
            if cache_dtype == CacheDtype::Model {
                let expected: Vec<_> =
                    requests.iter().map(|request| alone(&model, &tokenizer, request)).collect();
                assert_eq!(texts, expected, "{name} with {blocks} blocks");
            }
            assert_eq!(engine.statistics().preemptions > 0, blocks == 10, "{name}");
        }
    }
}

#[test]
fn a_handle_serves_many_threads() {
    let tokenizer = Arc::new(tokenizer());
    let model = load("llama");
    let handle = Handle::start(&model, Some(tokenizer.clone()), options(40)).unwrap();
    let requests = requests(100);
    let texts: Vec<Vec<u32>> = std::thread::scope(|scope| {
        let texts: Vec<_> = requests
            .iter()
            .map(|request| {
                let handle = handle.clone();
                scope.spawn(move || {
                    let mut answers = handle.submit(request.clone());
                    let tokens: Vec<u32> =
                        answers.by_ref().filter_map(|piece| piece.unwrap().token).collect();
                    let finished = answers.finished().unwrap();
                    assert_eq!(finished.reason, FinishReason::Length);
                    assert_eq!(finished.tokens, tokens.len());
                    tokens
                })
            })
            .collect();
        texts.into_iter().map(|text| text.join().unwrap()).collect()
    });
    for (text, request) in texts.iter().zip(&requests) {
        assert_eq!(*text, alone(&model, &tokenizer, request));
    }
    // One that is dropped gives its blocks back.
    let mut answers = handle.submit(request(&[1, 2, 3], 40));
    answers.next().unwrap().unwrap();
    drop(answers);
    let Statistics { running, waiting, blocks, available_blocks, .. } =
        handle.statistics().unwrap();
    assert_eq!((running, waiting, available_blocks), (0, 0, blocks));
    let mut refused = handle.submit(request(&[], 1));
    assert!(refused.next().unwrap().unwrap_err().to_string().contains("prompt: is empty"));
    assert!(refused.next().is_none());
}

#[test]
fn a_listener_that_panics_ends_its_own_request_alone() {
    let model = load("llama");
    let handle = Handle::start(&model, Some(Arc::new(tokenizer())), options(40)).unwrap();
    let listen = |request| {
        let (sender, told) = std::sync::mpsc::channel();
        let ticket = handle.submit_to(request, move |_| {
            sender.send(()).unwrap();
            panic!("a listener that panics");
        });
        (told, ticket)
    };
    // While its text is written, and when its request is refused.
    let (written, _first) = listen(request(&[1, 2, 3], 40));
    let (refused, _second) = listen(request(&[], 1));
    let mut answers = handle.submit(request(&[3, 2, 1], 5));
    assert_eq!(
        answers.by_ref().map(|piece| piece.unwrap()).filter(|it| it.token.is_some()).count(),
        5
    );
    assert_eq!((written.iter().count(), refused.iter().count()), (1, 1));
    let Statistics { running, waiting, blocks, available_blocks, .. } =
        handle.statistics().unwrap();
    assert_eq!((running, waiting, available_blocks), (0, 0, blocks));
}

#[test]
fn stop_strings_and_ends_are_those_of_a_session() {
    let tokenizer = tokenizer();
    let model = load("llama");
    let prompt = [3u32, 1, 4];
    let mut engine = Engine::new(&model, Some(&tokenizer), options(40)).unwrap();
    let written = alone(&model, &tokenizer, &request(&prompt, 20));
    let text = tokenizer.decode(&written, true).unwrap();
    let stop = text.chars().skip(6).take(3).collect::<String>();
    let mut stopped = request(&prompt, 20);
    stopped.options.stop = vec![stop.clone()];
    engine.submit(stopped).unwrap();
    let (mut found, mut reason) = (String::new(), None);
    while !engine.is_idle() {
        for (_, event) in engine.step() {
            match event {
                Event::Prompt(_) => {}
                Event::Piece(piece) => found.push_str(&piece.text),
                Event::Finished(finished) => reason = Some(finished.reason),
                Event::Failed(error) => panic!("{error}"),
            }
        }
    }
    assert_eq!(reason, Some(FinishReason::Stop));
    assert_eq!(found, text[..text.find(&stop).unwrap()]);
}

/// The mean log-probability of the tokens of some texts.
fn mean_logprob(engine: &mut Engine, texts: &[Vec<u32>]) -> f64 {
    for text in texts {
        engine.submit(Request { score_prompt: true, ..request(text, 1) }).unwrap();
    }
    let mut all = Vec::new();
    while !engine.is_idle() {
        for (_, event) in engine.step() {
            match event {
                Event::Prompt(scored) => all.extend(scored.iter().filter_map(|it| it.logprob)),
                Event::Failed(error) => panic!("{error}"),
                _ => {}
            }
        }
    }
    all.iter().sum::<f64>() / all.len() as f64
}

#[test]
fn a_cache_in_8_bits_gives_a_text_in_company_what_it_gives_alone() {
    let tokenizer = tokenizer();
    let cache_dtype = CacheDtype::MxInt8;
    for name in FAMILIES {
        let model = load(name);
        let requests = requests(model.config().vocab_size);
        let mut one = Engine::new(
            &model,
            Some(&tokenizer),
            EngineOptions { cache_dtype, max_sequences: 1, prefix_cache: false, ..options(200) },
        )
        .unwrap();
        let alone =
            |request: &Request| together(&mut one, std::slice::from_ref(request)).0.remove(0);
        let expected: Vec<Vec<u32>> = requests.iter().map(alone).collect();
        for (blocks, prefix_cache) in [(200, true), (12, true)] {
            let options = EngineOptions { cache_dtype, prefix_cache, ..options(blocks) };
            let mut engine = Engine::new(&model, Some(&tokenizer), options).unwrap();
            assert_eq!(together(&mut engine, &requests).0, expected, "{name}, {blocks} blocks");
        }
    }
}

/// Of the demo's model over texts that it has drawn itself, the only ones that so small a model knows.
#[test]
fn a_cache_in_8_bits_changes_perplexity_little() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo/base");
    let model = Arc::new(Model::load(&folder, DType::F32, &Device::Cpu).unwrap());
    let tokenizer = Tokenizer::load(&folder).unwrap();
    let engine = |cache_dtype| {
        let usual = EngineOptions::default();
        let options = EngineOptions { cache_dtype, cache_tokens: Some(1 << 14), ..usual };
        Engine::new(&model, Some(&tokenizer), options).unwrap()
    };
    let prompt = tokenizer.encode("It is well known that", false).unwrap();
    let drawn = (0..64).map(|seed| {
        let mut request = request(&prompt, 100);
        request.options.sampling =
            SamplingOptions { temperature: 1.0, seed, ..SamplingOptions::default() };
        request
    });
    let mut exact = engine(CacheDtype::Model);
    let (texts, _) = together(&mut exact, &drawn.collect::<Vec<_>>());
    let texts: Vec<Vec<u32>> =
        texts.into_iter().map(|text| [&prompt[..], &text].concat()).collect();
    let perplexity = |mut engine: Engine| (-mean_logprob(&mut engine, &texts)).exp();
    let (exact, rounded) = (perplexity(exact), perplexity(engine(CacheDtype::MxInt8)));
    println!("perplexity {exact:.5}, with a cache in 8 bits {rounded:.5}");
    assert_ne!(exact, rounded);
    assert!((rounded / exact - 1.0).abs() < 1e-3, "{exact} {rounded}");
}
