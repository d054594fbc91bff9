//! Text from a model: prefill the prompt, then decode a token at a time.

use super::sampler::{Sampler, SamplingOptions};
use super::stop::StopStrings;
use crate::adapter::Adapter;
use crate::autograd::Tape;
use crate::model::Model;
use crate::pass::{Input, KvCache};
use crate::text::{DecodeStream, Tokenizer};
use crate::{Error, Result, bounds};
use candle_core::{IndexOp, Tensor};
use metal_candle_kernels::devices;
use metal_candle_kernels::recording::Recording;
use serde::Serialize;
use std::sync::Arc;

/// Tokens of the prompt that go through the model at a time, which bounds the memory it takes.
const PREFILL: usize = 512;

/// When and how a text is continued.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerateOptions {
    /// Tokens at most.
    pub max_tokens: usize,
    /// How tokens are drawn.
    pub sampling: SamplingOptions,
    /// The text ends before the first of these.
    pub stop: Vec<String>,
    /// Go on after an end-of-sequence token.
    pub ignore_eos: bool,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_tokens: 256,
            sampling: SamplingOptions::default(),
            stop: Vec::new(),
            ignore_eos: false,
        }
    }
}

impl GenerateOptions {
    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::Option`] about the first that cannot work.
    pub fn validate(&self) -> Result<()> {
        bounds::check("max_tokens", self.max_tokens, &bounds::TOKENS)?;
        self.sampling.validate()?;
        StopStrings::new(self.stop.iter().map(String::as_str)).map(drop)
    }
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model wrote an end-of-sequence token.
    EndOfSequence,
    /// It wrote a stop string.
    Stop,
    /// It wrote as many tokens as were allowed.
    Length,
}

/// What one step of decoding gives.
#[derive(Debug, Clone, PartialEq)]
pub struct Piece {
    /// Text that is complete: never a part of a character, never a part of a stop string. Often
    /// empty.
    pub text: String,
    /// The token drawn; `None` for text that was held back and came free at the end.
    pub token: Option<u32>,
    /// The token's log-probability, in nats.
    pub logprob: f64,
}

/// The logits `(vocabulary)` after the last of some tokens, f32.
fn last_logits(model: &Model, input: &Input, cache: &mut KvCache) -> Result<Tensor> {
    let tape = Tape::inference();
    let hidden = model.forward(&tape, input, Some(cache))?;
    let last = hidden.tensor().dim(1)? - 1;
    let logits = model.logits(&hidden.tensor().narrow(1, last, 1)?.contiguous()?, input)?;
    Ok(logits.i((0, 0))?)
}

/// A conversation with a model, token by token: the tokens it has read and its KV cache.
pub struct Session {
    model: Arc<Model>,
    adapter: Option<Arc<Adapter>>,
    cache: KvCache,
    tokens: Vec<u32>,
    /// How many times in a row a single token was read.
    singles: usize,
    /// The reading of a token, recorded on the device, with the cache's buffers as they are.
    repeated: Option<Recording>,
    /// Whether it could not be recorded.
    refused: bool,
}

impl Session {
    /// Nothing read yet.
    pub fn new(model: &Arc<Model>, adapter: Option<&Arc<Adapter>>) -> Self {
        Self {
            model: model.clone(),
            adapter: adapter.cloned(),
            cache: model.new_cache(),
            tokens: Vec::new(),
            singles: 0,
            repeated: None,
            refused: false,
        }
    }

    /// The tokens read so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Reads tokens and returns the logits `(vocabulary)` of what comes next, in f32 on the model's device.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Tensor> {
        if tokens.is_empty() {
            return Err(Error::option("prompt", "is empty; expected at least one token"));
        }
        let vocabulary = self.model.config().vocab_size;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= vocabulary) {
            return Err(Error::option(
                "prompt",
                format!(
                    "has token {token}, but the model's vocabulary has {vocabulary}; the tokenizer is \
                 not this model's"
                ),
            ));
        }
        let before = self.tokens.len();
        self.tokens.extend(tokens);
        let device = self.model.device().clone();
        let result = devices::step(&device, || self.advance());
        if result.is_err() {
            // Layers may hold different numbers of tokens now; only whole ones are kept.
            self.tokens.truncate(before);
            self.cache.truncate(self.cache.len().min(before));
            // Some of the buffers that it writes to may have been replaced.
            self.repeated = None;
        }
        result
    }

    /// Reads those of `tokens` that the cache does not hold.
    fn advance(&mut self) -> Result<Tensor> {
        // LongRoPE rotates every key differently once the text is long, dynamic rope from then on with every
        // token.
        if self.ropes_change(self.cache.len(), self.tokens.len()) {
            self.cache.truncate(0);
        }
        let total = self.tokens.len();
        if total > self.cache.room() {
            // It would keep the buffers that larger ones are about to replace.
            self.repeated = None;
        }
        if let [token] = self.tokens[self.cache.len()..] {
            self.singles += 1;
            if self.singles > 1
                && self.can_repeat()
                && let Some(logits) = self.repeat(token)?
            {
                return Ok(logits);
            }
        } else {
            self.singles = 0;
        }
        loop {
            let start = self.cache.len();
            let end = total.min(start + self.chunk(start, total));
            let input = Input::sequence(&self.tokens[start..end], start, self.model.device())?
                .with_adapter(self.adapter.as_ref());
            if end == total {
                return last_logits(&self.model, &input, &mut self.cache);
            }
            let tape = Tape::inference();
            self.model.forward(&tape, &input, Some(&mut self.cache))?;
        }
    }

    /// Whether the reading of one more token can be recorded.
    fn can_repeat(&self) -> bool {
        let length = self.cache.len() + 1;
        // Weights that are trained are converted whenever they are read, a model's size of memory.
        !self.adapter.as_ref().is_some_and(|adapter| adapter.is_full())
            && !self.refused
            && Recording::is_supported(self.model.device())
            && self.cache.room() > 0
            && !self.ropes_change(length, self.cache.room().max(length.next_power_of_two()))
    }

    /// Reads a token by what was recorded of reading one; `None` if that can't be recorded, as with heads or
    /// adapters whose operations the host has a part in.
    fn repeat(&mut self, token: u32) -> Result<Option<Tensor>> {
        let before = self.cache.len();
        self.cache.reserve(before + 1)?;
        let position = u32::try_from(before).map_err(candle_core::Error::wrap)?;
        let inputs = [token, position];
        let recording = match self.repeated.take() {
            Some(mut recording) => {
                recording.run(&inputs)?;
                recording
            }
            None => {
                let (model, cache, adapter) =
                    (&*self.model, &mut self.cache, self.adapter.as_ref());
                let room = cache.room();
                let recording = Recording::new(model.device(), &inputs, |inputs| {
                    let input = Input::on_device(inputs, room)?.with_adapter(adapter);
                    last_logits(model, &input, cache)
                });
                match recording {
                    Ok(recording) => recording,
                    Err(_) => {
                        self.refused = true;
                        return Ok(None);
                    }
                }
            }
        };
        let logits = recording.output().copy()?;
        self.repeated = Some(recording);
        self.cache.advance(1);
        Ok(Some(logits))
    }

    /// How many tokens to read at once; all, where the positions depend on the text's length.
    fn chunk(&self, start: usize, total: usize) -> usize {
        if self.ropes_change(start + 1, total) { total } else { PREFILL }
    }

    fn ropes_change(&self, from: usize, to: usize) -> bool {
        self.model.config().ropes.iter().any(|rope| rope.changes_between(from, to))
    }

    /// Keeps only the first `length` tokens that it shares with `tokens` and reads the rest, so
    /// that the next turn of a conversation pays only for what is new.
    pub fn continue_with(&mut self, tokens: &[u32]) -> Result<Tensor> {
        let shared = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let mut shared = shared.min(tokens.len().saturating_sub(1)).min(self.cache.len());
        if self.ropes_change(self.cache.len(), tokens.len()) {
            shared = 0;
        }
        self.cache.truncate(shared);
        self.tokens.truncate(shared);
        self.read(&tokens[shared..])
    }
}

/// An iterator over the pieces of a text that a model writes.
pub struct Generation<'s, 'a> {
    session: &'s mut Session,
    options: GenerateOptions,
    eos: Vec<u32>,
    sampler: Sampler,
    stops: StopStrings,
    stream: Option<DecodeStream<'a>>,
    logits: Tensor,
    generated: Vec<u32>,
    finished: Option<FinishReason>,
    failed: bool,
}

impl<'s, 'a> Generation<'s, 'a> {
    /// Continues `prompt`, the whole text so far. What the session has read of it already is not
    /// read again.
    pub fn new(
        session: &'s mut Session,
        tokenizer: &'a Tokenizer,
        prompt: &[u32],
        options: GenerateOptions,
    ) -> Result<Self> {
        options.validate()?;
        let sampler = Sampler::new(options.sampling.clone())?;
        let stops = StopStrings::new(options.stop.iter().map(String::as_str))?;
        let eos = if options.ignore_eos { Vec::new() } else { tokenizer.eos_ids().to_vec() };
        let logits = session.continue_with(prompt)?;
        Ok(Self {
            session,
            options,
            eos,
            sampler,
            stops,
            stream: Some(tokenizer.decode_stream()),
            logits,
            generated: Vec::new(),
            finished: None,
            failed: false,
        })
    }

    /// Why the text ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.finished
    }

    /// The tokens written so far, without the end-of-sequence token.
    pub fn tokens(&self) -> &[u32] {
        &self.generated
    }

    fn step(&mut self) -> Result<Piece> {
        let sampled =
            self.sampler.sample_tensor(&self.logits, self.session.tokens(), &self.generated)?;
        if self.eos.contains(&sampled.id) {
            self.finished = Some(FinishReason::EndOfSequence);
            let text = self.flush()?;
            return Ok(Piece { text, token: Some(sampled.id), logprob: sampled.logprob });
        }
        self.generated.push(sampled.id);
        let decoded = match &mut self.stream {
            Some(stream) => stream.push(sampled.id)?.unwrap_or_default(),
            None => String::new(),
        };
        let mut result = self.stops.push(&decoded);
        if result.stopped {
            self.finished = Some(FinishReason::Stop);
        } else if self.generated.len() >= self.options.max_tokens {
            self.finished = Some(FinishReason::Length);
            result.emit.push_str(&self.flush()?);
        } else {
            self.logits = self.session.read(&[sampled.id])?;
        }
        Ok(Piece { text: result.emit, token: Some(sampled.id), logprob: sampled.logprob })
    }

    /// What was held back, at the end of the text.
    fn flush(&mut self) -> Result<String> {
        let rest = match self.stream.take() {
            Some(stream) => stream.finish()?.unwrap_or_default(),
            None => String::new(),
        };
        let result = self.stops.push(&rest);
        let mut text = result.emit;
        if result.stopped {
            self.finished = Some(FinishReason::Stop);
        } else {
            text.push_str(&self.stops.finish());
        }
        Ok(text)
    }
}

impl Iterator for Generation<'_, '_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finished.is_some() || self.failed {
            return None;
        }
        let piece = self.step();
        self.failed = piece.is_err();
        Some(piece)
    }
}

/// Continues `prompt` and returns the whole text.
pub fn generate(
    model: &Arc<Model>,
    adapter: Option<&Arc<Adapter>>,
    tokenizer: &Tokenizer,
    prompt: &[u32],
    options: GenerateOptions,
) -> Result<(String, FinishReason)> {
    let mut session = Session::new(model, adapter);
    let mut generation = Generation::new(&mut session, tokenizer, prompt, options)?;
    let mut text = String::new();
    for piece in &mut generation {
        text.push_str(&piece?.text);
    }
    Ok((text, generation.finish_reason().unwrap_or(FinishReason::Length)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_may_move_to_another_thread() {
        fn moves<T: Send + Sync>() {}
        moves::<Session>();
    }
}
