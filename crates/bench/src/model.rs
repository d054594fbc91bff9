//! metal-candle's side of the rows on a whole model: a LoRA training step, prefill, decode, many requests,
//! and the wait for a first token.

use crate::operations::Optimiser;
use crate::rows::{LORA_SCALE, Precision, Work, lengths, random_ids, rank_of, requests_at_once};
use crate::{Workload, shapes};
use candle_core::{DType, Device, Tensor};
use metal_candle::adapter::{Adapter, LoraConfig, Targets};
use metal_candle::autograd::{ParameterId, Tape};
use metal_candle::data::Batch;
use metal_candle::engine::{CacheDtype, Engine, EngineOptions, Event, Order, Request, RequestId};
use metal_candle::generate::{GenerateOptions, Piece, Session};
use metal_candle::model::{Model, Quantization};
use metal_candle::random::SplitMix64;
use metal_candle::train::Gradients;
use metal_candle::{Error, Result};
use metal_candle_kernels::offload::Offload;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A model of that shape with random weights.
///
/// # Errors
/// For a name that [`shapes`] doesn't know, or a model that doesn't fit into memory.
pub fn random(
    shape: &str,
    dtype: Precision,
    device: &Device,
    quantization: Option<Quantization>,
    seed: u64,
) -> Result<Model> {
    let (config, dtype) = (shapes::config(shape)?, dtype.dtype());
    // A GPU draws them itself, much faster.
    if !device.is_cpu() {
        device.set_seed(seed)?;
    }
    let mut count = 0;
    let weight = |name: &str, shape: &[usize]| {
        if name.ends_with("norm.weight") {
            return Ok(Tensor::ones(shape, dtype, device)?);
        }
        if !device.is_cpu() {
            return Ok(Tensor::randn(0f32, 0.02, shape, device)?);
        }
        count += 1;
        let mut random = SplitMix64::stream(seed, count);
        let numbers = (0..shape.iter().product()).map(|_| (random.normal() * 0.02) as f32);
        Ok(Tensor::from_iter(numbers, device)?.reshape(shape)?)
    };
    Model::from_fn_with(config, dtype, device, quantization, weight)
}

/// The adapter of a training row: on every linear layer of the decoder.
pub fn adapter(rank: usize, dora: bool) -> LoraConfig {
    LoraConfig {
        rank,
        dora,
        alpha: LORA_SCALE * rank as f64,
        targets: Targets::all_linear(),
        ..LoraConfig::default()
    }
}

/// An adapter of [`rank_of`] this index on the layers of these names, or without one on all, whose B isn't zero as that
/// of a new one is.
fn random_adapter(model: &Model, index: usize, layers: &[String]) -> Result<Arc<Adapter>> {
    let mut config = adapter(rank_of(index), false);
    if !layers.is_empty() {
        config.targets = Targets::Names(layers.to_vec());
    }
    let adapter = Adapter::new(model, &config, index as u64)?;
    let parameters = adapter.parameters();
    for (index, entry) in parameters.entries().iter().enumerate() {
        if entry.name.ends_with("lora_B") {
            let b = Tensor::randn(0f32, 0.02, &entry.shape, model.device())?;
            parameters.set(ParameterId(index), &b)?;
        }
    }
    Ok(Arc::new(adapter))
}

/// How many token ids the work reads.
pub fn id_count(work: &Work) -> usize {
    match work {
        // One more in each row: the inputs are all but the last, the targets all but the first.
        Work::Train { batch, seq, .. } => batch * (seq + 1),
        Work::Prefill { tokens, .. } => *tokens,
        Work::Decode { prompt, .. } => *prompt,
        &Work::Serve { requests, prompt, tokens, mixed, .. } => {
            lengths(requests, [prompt, tokens], mixed).iter().map(|[prompt, _]| prompt).sum()
        }
        Work::FirstToken { busy, prompt, .. } => busy + prompt,
        _ => 0,
    }
}

/// The work on a model and tokens made up from a seed.
///
/// # Errors
/// Like [`random`], and for work that isn't on a model.
pub fn prepare_random(work: &Work, device: &Device, seed: u64) -> Result<Box<dyn Workload>> {
    let (Work::Train { shape, dtype, quantization, .. }
    | Work::Prefill { shape, dtype, quantization, .. }
    | Work::Decode { shape, dtype, quantization, .. }
    | Work::Serve { shape, dtype, quantization, .. }
    | Work::FirstToken { shape, dtype, quantization, .. }) = work
    else {
        return Err(not_on_a_model());
    };
    let model = random(shape, *dtype, device, *quantization, seed)?;
    let adapter = match work {
        Work::Train { rank, dora, .. } => Some(Adapter::new(&model, &adapter(*rank, *dora), seed)?),
        _ => None,
    };
    let ids = random_ids(id_count(work), model.config().vocab_size, seed);
    prepare(work, model, adapter, &ids)
}

/// The work on this model, training with this adapter, and these tokens ([`id_count`] of them).
///
/// # Errors
/// For work that isn't on a model, another number of tokens, and training without an adapter.
pub fn prepare(
    work: &Work,
    model: Model,
    adapter: Option<Adapter>,
    ids: &[u32],
) -> Result<Box<dyn Workload>> {
    if ids.len() != id_count(work) || ids.is_empty() {
        return Err(Error::option(
            "ids",
            format!("are {}, expected {} and at least 1", ids.len(), id_count(work)),
        ));
    }
    match *work {
        Work::Train { batch, seq, checkpointing, offload, .. } => {
            let adapter = adapter
                .ok_or_else(|| Error::option("adapter", "is missing, expected one to train"))?;
            let optimiser = Optimiser::new(adapter.parameters().values())?;
            let gradients = Gradients::new(adapter.parameters())?;
            let batch = batch_of(ids, batch, seq);
            let adapter = Arc::new(adapter);
            let offload = offload.then(|| Offload::new(model.device())).transpose()?;
            Ok(Box::new(TrainingStep {
                model,
                adapter,
                gradients,
                batch,
                checkpointing,
                offload,
                optimiser,
            }))
        }
        Work::Prefill { .. } => {
            let (model, ids) = (Arc::new(model), ids.to_vec());
            Ok(Box::new(move || Ok(vec![Session::new(&model, None)?.read(&ids)?])))
        }
        Work::Decode { tokens, .. } => {
            let usual = EngineOptions::default();
            let room = (ids.len() + 2 + tokens).next_multiple_of(usual.block_size);
            let options = EngineOptions {
                max_sequences: 1,
                cache_tokens: Some(room),
                prefix_cache: false,
                ..usual
            };
            let engine = Engine::new(&Arc::new(model), None, options)?;
            Ok(Box::new(Decode { engine, prompt: ids.to_vec(), tokens, last: None }))
        }
        Work::Serve {
            requests,
            prompt,
            tokens,
            mixed,
            adapters,
            ref adapted,
            rounded_cache,
            batch_invariant,
            max_sequences,
            max_batch_tokens,
            longest_first,
            ..
        } => {
            let lengths = lengths(requests, [prompt, tokens], mixed);
            let usual = EngineOptions::default();
            let block = usual.block_size;
            let room: usize =
                lengths.iter().map(|of| of.iter().sum::<usize>().next_multiple_of(block)).sum();
            let options = EngineOptions {
                max_sequences: requests_at_once(requests, mixed, max_sequences).max(1),
                max_batch_tokens: max_batch_tokens.unwrap_or(usual.max_batch_tokens),
                cache_tokens: (!mixed).then_some(room),
                cache_dtype: if rounded_cache { CacheDtype::MxInt8 } else { CacheDtype::Model },
                batch_invariant,
                order: if longest_first { Order::Longest } else { Order::Arrival },
                prefix_cache: false,
                ..usual
            };
            let adapters = (0..adapters).map(|index| random_adapter(&model, index, adapted));
            let adapters = adapters.collect::<Result<_>>()?;
            let engine = Engine::new(&Arc::new(model), None, options)?;
            let mut rest = ids;
            let requests = lengths.into_iter().map(|[prompt, tokens]| {
                let (own, after) = rest.split_at(prompt);
                rest = after;
                (own.to_vec(), tokens)
            });
            let requests = requests.collect();
            Ok(Box::new(Serve { engine, requests, adapters }))
        }
        Work::FirstToken { busy, prompt, seen, .. } => {
            let usual = EngineOptions::default();
            let of_text = |tokens: usize| tokens.next_multiple_of(usual.block_size);
            let room = busy * of_text(1 + BUSY_TOKENS) + 2 * of_text(prompt + 1);
            let options = EngineOptions {
                max_sequences: (busy + 1).max(usual.max_sequences),
                cache_tokens: Some(room),
                ..usual
            };
            let engine = Engine::new(&Arc::new(model), None, options)?;
            let (others, prompt) = ids.split_at(busy);
            let (others, prompt) = (others.to_vec(), prompt.to_vec());
            Ok(Box::new(FirstToken { engine, others, prompt, seen, count: 0 }))
        }
        _ => Err(not_on_a_model()),
    }
}

fn not_on_a_model() -> Error {
    Error::option("row", "is a single operation, expected work on a model")
}

/// Rows of `seq + 1` ids as a batch in which every token but the first is a target.
fn batch_of(ids: &[u32], rows: usize, seq: usize) -> Batch {
    let pick = |skip: usize| {
        ids.chunks(seq + 1).flat_map(|row| row.iter().skip(skip).take(seq)).copied().collect()
    };
    Batch {
        rows,
        length: seq,
        input_ids: pick(0),
        targets: pick(1),
        positions: (0..rows).flat_map(|_| 0..seq as u32).collect(),
        first_key: vec![0; rows * seq],
        tokens: rows * seq,
        target_tokens: rows * seq,
        ..Batch::default()
    }
}

/// What the trainer does at every step, without its files and reports.
struct TrainingStep {
    model: Model,
    adapter: Arc<Adapter>,
    gradients: Gradients,
    batch: Batch,
    checkpointing: bool,
    offload: Option<Arc<Offload>>,
    optimiser: Optimiser,
}

impl Workload for TrainingStep {
    fn call(&mut self) -> Result<Vec<Tensor>> {
        let tape = Tape::training()
            .with_dropout(0)
            .with_checkpointing(self.checkpointing)
            .with_offload(self.offload.clone());
        let loss = self.model.loss(&tape, &self.batch, Some(&self.adapter))?;
        tape.backward(&loss.sum, 1.0 / loss.tokens as f64, &mut &self.gradients)?;
        let sum = loss.sum.into_tensor().to_dtype(DType::F32)?.to_scalar::<f32>()?;
        let mean = f64::from(sum) / loss.tokens as f64;
        let parameters = self.adapter.parameters();
        let norm = self.optimiser.step_and_clear(
            parameters.values(),
            self.gradients.buffer(),
            parameters.decayed(),
        )?;
        parameters.changed();
        Ok(vec![Tensor::new(&[mean], &Device::Cpu)?, Tensor::new(&[norm], &Device::Cpu)?])
    }
}

/// One stream of greedy tokens.
struct Decode {
    engine: Engine<'static>,
    prompt: Vec<u32>,
    tokens: usize,
    last: Option<RequestId>,
}

impl Workload for Decode {
    fn reset(&mut self) -> Result<()> {
        if let Some(last) = self.last.take() {
            self.engine.cancel(last);
        }
        // One more than is timed: a pass may be under way when the time begins, and is then when it ends.
        let id = self.engine.submit(request(&self.prompt, 2 + self.tokens))?;
        self.last = Some(id);
        first_token(&mut self.engine, id).map(drop)
    }

    fn call(&mut self) -> Result<Vec<Tensor>> {
        let mut decoded = Vec::with_capacity(self.tokens);
        while decoded.len() < self.tokens {
            for (_, event) in self.engine.step() {
                match event {
                    Event::Piece(piece) => decoded.extend(piece.token),
                    Event::Prompt(_) | Event::Finished(_) => {}
                    Event::Failed(error) => return Err(error),
                }
            }
        }
        Ok(vec![Tensor::new(decoded, &Device::Cpu)?])
    }
}

/// Steps until a request has a token.
fn first_token(engine: &mut Engine, of: RequestId) -> Result<u32> {
    loop {
        for (id, event) in engine.step() {
            match event {
                Event::Piece(Piece { token: Some(token), .. }) if id == of => return Ok(token),
                Event::Failed(error) => return Err(error),
                _ => {}
            }
        }
    }
}

/// Greedy texts of many requests.
struct Serve {
    engine: Engine<'static>,
    /// Prompts, and how many tokens follow each.
    requests: Vec<(Vec<u32>, usize)>,
    /// Of the requests in turn; there may be none.
    adapters: Vec<Arc<Adapter>>,
}

impl Workload for Serve {
    fn call(&mut self) -> Result<Vec<Tensor>> {
        let mut texts = BTreeMap::new();
        for (index, (prompt, tokens)) in self.requests.iter().enumerate() {
            let adapter = self.adapters.get(index % self.adapters.len().max(1)).cloned();
            let request = Request { adapter, ..request(prompt, *tokens) };
            texts.insert(self.engine.submit(request)?, Vec::with_capacity(*tokens));
        }
        while !self.engine.is_idle() {
            for (id, event) in self.engine.step() {
                match event {
                    Event::Piece(piece) => texts.entry(id).or_default().extend(piece.token),
                    Event::Prompt(_) | Event::Finished(_) => {}
                    Event::Failed(error) => return Err(error),
                }
            }
        }
        let tokens = texts.into_values().flatten();
        Ok(vec![Tensor::from_iter(tokens, &Device::Cpu)?])
    }
}

fn request(prompt: &[u32], max_tokens: usize) -> Request {
    let options = GenerateOptions { max_tokens, ..GenerateOptions::default() };
    Request { prompt: prompt.to_vec(), options, ..Request::default() }
}

/// Tokens of the texts that are written while another waits for its first.
const BUSY_TOKENS: usize = 1024;

/// The first token of a request among others.
struct FirstToken {
    engine: Engine<'static>,
    /// The first tokens of the others.
    others: Vec<u32>,
    prompt: Vec<u32>,
    seen: bool,
    count: u32,
}

impl Workload for FirstToken {
    fn reset(&mut self) -> Result<()> {
        if self.seen && self.count == 0 {
            let id = self.engine.submit(request(&self.prompt, 1))?;
            first_token(&mut self.engine, id)?;
        }
        self.count += 1;
        if !self.seen {
            // A prompt that nobody has read.
            self.prompt.rotate_left(1);
            self.prompt[0] = (self.prompt[0] + self.count)
                % self.prompt.iter().max().map_or(1, |most| *most).max(1);
        }
        while self.engine.statistics().running < self.others.len() {
            for token in self.others.clone().iter().skip(self.engine.statistics().running) {
                self.engine.submit(request(&[*token], BUSY_TOKENS))?;
            }
            self.engine.step();
        }
        // Their passes are recorded by then.
        (0..4).for_each(|_| drop(self.engine.step()));
        Ok(())
    }

    fn call(&mut self) -> Result<Vec<Tensor>> {
        let id = self.engine.submit(request(&self.prompt, 1))?;
        let token = first_token(&mut self.engine, id)?;
        Ok(vec![Tensor::new(&[token], &Device::Cpu)?])
    }
}
