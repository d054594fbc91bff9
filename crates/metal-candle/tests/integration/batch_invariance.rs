//! An engine with batch invariance gives a text the same bits in any company and in any pieces.

use crate::common::device;
use crate::models::{FAMILIES, folder, random_adapter};
use metal_candle::adapter::{Adapter, LoraConfig};
use metal_candle::autograd::Tape;
use metal_candle::engine::{
    CacheDtype, Engine, EngineOptions, Event, Request, RequestId, Scored, Statistics,
};
use metal_candle::generate::{GenerateOptions, SamplingOptions};
use metal_candle::model::Model;
use metal_candle::pass::Input;
use metal_candle::random::SplitMix64;
use metal_candle::{DType, Device};
use metal_candle_kernels::batch_invariance::within;
use std::collections::HashMap;
use std::sync::Arc;

const BLOCK: usize = 4;

/// What was told of a request: its tokens with the bits of their log-probabilities, and those of its prompt.
#[derive(Debug, Default, PartialEq)]
struct Text {
    written: Vec<(Option<u32>, u64)>,
    prompt: Vec<Scored>,
}

fn options(blocks: usize) -> EngineOptions {
    EngineOptions {
        max_sequences: 7,
        max_batch_tokens: 12,
        cache_tokens: Some(blocks * BLOCK),
        block_size: BLOCK,
        batch_invariant: true,
        ..EngineOptions::default()
    }
}

/// One text after the other, each prompt in one piece.
fn one_at_a_time(cache_dtype: CacheDtype) -> EngineOptions {
    EngineOptions {
        max_sequences: 1,
        max_batch_tokens: 2048,
        prefix_cache: false,
        cache_dtype,
        ..options(200)
    }
}

fn run(
    model: &Arc<Model>,
    options: EngineOptions,
    requests: &[Request],
) -> (Vec<Text>, Statistics) {
    let mut engine = Engine::new(model, None, options).unwrap();
    let ids: Vec<RequestId> =
        requests.iter().map(|request| engine.submit(request.clone()).unwrap()).collect();
    let mut texts: HashMap<RequestId, Text> = HashMap::new();
    while !engine.is_idle() {
        for (id, event) in engine.step() {
            let text = texts.entry(id).or_default();
            match event {
                Event::Prompt(scored) => text.prompt = scored,
                Event::Piece(piece) => text.written.push((piece.token, piece.logprob.to_bits())),
                Event::Finished(_) => {}
                Event::Failed(error) => panic!("{error}"),
            }
        }
    }
    (ids.iter().map(|id| texts.remove(id).unwrap()).collect(), engine.statistics())
}

/// Ragged requests, of which some begin alike, some draw, and some have adapters.
fn requests(vocabulary: usize, adapters: &[Option<Arc<Adapter>>]) -> Vec<Request> {
    let mut random = SplitMix64::new(5);
    let mut token = || random.below(vocabulary as u64) as u32;
    let beginning: Vec<u32> = (0..14).map(|_| token()).collect();
    (0..15)
        .map(|index| {
            let mut prompt = beginning[..[0, 14, 9, 0, 14][index % 5]].to_vec();
            prompt.extend((0..1 + index % 7).map(|_| token()));
            let temperature = if index % 2 == 0 { 0.0 } else { 1.0 };
            let sampling =
                SamplingOptions { temperature, seed: index as u64, ..SamplingOptions::default() };
            let options = GenerateOptions {
                max_tokens: 3 + index % 8,
                ignore_eos: true,
                sampling,
                ..GenerateOptions::default()
            };
            let adapter = adapters[index / 2 % adapters.len()].clone();
            Request { prompt, options, adapter, ..Request::default() }
        })
        .collect()
}

/// With different ranks, one that is more than an update, and none.
fn adapters(model: &Model) -> Vec<Option<Arc<Adapter>>> {
    let adapter = |rank, dora| {
        let config = LoraConfig { rank, dora, ..LoraConfig::default() };
        Some(random_adapter(model, &config, rank as u64))
    };
    vec![adapter(4, false), None, adapter(9, false), adapter(2, true)]
}

fn load(name: &str, dtype: DType, device: &Device) -> Arc<Model> {
    Arc::new(Model::load(folder(name), dtype, device).unwrap())
}

#[test]
fn company_and_pieces_do_not_change_bits() {
    let mut differs = false;
    for name in FAMILIES {
        for dtype in [DType::F32, DType::BF16] {
            let model = load(name, dtype, &device());
            let adapters = adapters(&model);
            for adapters in [&adapters[..], &[None]] {
                let requests = requests(model.config().vocab_size, adapters);
                let (expected, _) = run(&model, one_at_a_time(CacheDtype::Model), &requests);
                let in_few_blocks = EngineOptions { prefix_cache: false, ..options(12) };
                let guessing = EngineOptions { draft_tokens: 3, ..options(200) };
                for options in [options(200), in_few_blocks, guessing] {
                    let few = options.cache_tokens == Some(12 * BLOCK);
                    let (found, statistics) = run(&model, options, &requests);
                    assert!(found == expected, "{name} {dtype:?}: {found:#?} {expected:#?}");
                    assert_eq!(statistics.preemptions > 0, few, "{name}");
                }
                let plain = EngineOptions { batch_invariant: false, ..options(200) };
                differs |= run(&model, plain, &requests).0 != expected;
            }
        }
    }
    assert!(differs, "the option changes nothing");
}

#[test]
fn training_computes_what_the_engine_does() {
    for name in FAMILIES {
        for dtype in [DType::F32, DType::BF16] {
            let model = load(name, dtype, &device());
            let mut requests = requests(model.config().vocab_size, &adapters(&model));
            for request in &mut requests {
                request.prompt.extend((1..40).map(|token| token % 7));
                (request.options.max_tokens, request.score_prompt) = (1, true);
            }
            // A GPU has kernels of their own for blocks of other sizes.
            let options = EngineOptions { block_size: 16, ..options(200) };
            let (texts, _) = run(&model, options, &requests);
            for (request, text) in requests.iter().zip(texts) {
                let found = within(true, || {
                    let input = Input::sequence(&request.prompt, model.device()).unwrap();
                    let input = input.with_adapter(request.adapter.as_ref());
                    let hidden = model.forward(&Tape::training(), &input).unwrap();
                    let logits = model.logits(hidden.tensor(), &input).unwrap().squeeze(0);
                    logits.unwrap().to_vec2::<f32>().unwrap()
                });
                for (logits, scored) in found.iter().zip(&text.prompt[1..]) {
                    let expected = scored.logprob.unwrap();
                    let found = f64::from(logits[scored.token as usize]) - log_sum_exp(logits);
                    let rank = request.adapter.as_ref().map(|it| it.config().unwrap().rank);
                    assert!(
                        (found - expected).abs() <= 1e-12,
                        "{name} {dtype:?} {rank:?}: {found} {expected}"
                    );
                }
            }
        }
    }
}

/// As the engine has it.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|logit| f64::from(logit - largest).exp()).sum();
    f64::from(largest) + sum.ln()
}

#[test]
fn a_cache_in_8_bits_and_scores_keep_the_bits() {
    let model = load("llama", DType::BF16, &device());
    let adapters = adapters(&model);
    for cache_dtype in [CacheDtype::Model, CacheDtype::MxInt8] {
        let mut requests = requests(model.config().vocab_size, &adapters);
        let with = |blocks| EngineOptions { cache_dtype, ..options(blocks) };
        let (texts, _) = run(&model, with(200), &requests);
        assert_eq!(run(&model, one_at_a_time(cache_dtype), &requests).0, texts);
        // What was written is read again at once.
        for (request, text) in requests.iter_mut().zip(&texts) {
            request.prompt.extend(text.written.iter().filter_map(|(token, _)| *token));
            (request.options.max_tokens, request.score_prompt) = (1, true);
        }
        let (scored, _) = run(&model, one_at_a_time(cache_dtype), &requests);
        assert_eq!(run(&model, with(200), &requests).0, scored);
        for (scored, text) in scored.iter().zip(&texts) {
            let last = &scored.prompt[scored.prompt.len() - text.written.len()..];
            for (scored, (token, logprob)) in last.iter().zip(&text.written) {
                assert_eq!(Some(scored.token), *token);
                let (scored, written) = (scored.logprob.unwrap(), f64::from_bits(*logprob));
                // The same logits; what a token is drawn by is added up otherwise, in f32 on a GPU.
                let tolerance = if model.device().is_cpu() { 1e-12 } else { 1e-6 };
                assert!((scored - written).abs() <= tolerance, "{scored} {written}");
            }
        }
    }
}
