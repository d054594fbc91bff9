//! Text from a model: prefill the prompt, then decode a token at a time.

use super::answer::{Answer, FinishReason, GenerateOptions, Piece};
use crate::adapter::Adapter;
use crate::autograd::Tape;
use crate::model::Model;
use crate::pass::{Input, KvCache};
use crate::text::Tokenizer;
use crate::{Error, Result};
use candle_core::{IndexOp, Tensor};
use metal_candle_kernels::devices;
use metal_candle_kernels::recording::Recording;
use std::sync::Arc;

/// Tokens of the prompt that go through the model at a time, which bounds the memory it takes.
const PREFILL: usize = 512;

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
        if self.model.ropes_change(self.cache.len(), self.tokens.len()) {
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
            && !self.model.is_away()
            && self.cache.room() > 0
            && !self.model.ropes_change(length, self.cache.room().max(length.next_power_of_two()))
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
        if self.model.ropes_change(start + 1, total) { total } else { PREFILL }
    }

    /// Keeps only the first `length` tokens that it shares with `tokens` and reads the rest, so
    /// that the next turn of a conversation pays only for what is new.
    pub fn continue_with(&mut self, tokens: &[u32]) -> Result<Tensor> {
        let shared = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let mut shared = shared.min(tokens.len().saturating_sub(1)).min(self.cache.len());
        if self.model.ropes_change(self.cache.len(), tokens.len()) {
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
    answer: Answer<'a>,
    logits: Tensor,
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
        let answer = Answer::new(Some(tokenizer), options)?;
        let logits = session.continue_with(prompt)?;
        Ok(Self { session, answer, logits, failed: false })
    }

    /// Why the text ended, once it has.
    pub fn finish_reason(&self) -> Option<FinishReason> {
        self.answer.finish_reason()
    }

    /// The tokens written so far, without the end-of-sequence token.
    pub fn tokens(&self) -> &[u32] {
        self.answer.tokens()
    }

    fn step(&mut self) -> Result<Piece> {
        let sampled = self.answer.row(self.session.tokens(), 0).sample(&self.logits)?;
        let piece = self.answer.take(sampled)?;
        if self.answer.finish_reason().is_none()
            && let Some(token) = piece.token
        {
            self.logits = self.session.read(&[token])?;
        }
        Ok(piece)
    }
}

impl Iterator for Generation<'_, '_> {
    type Item = Result<Piece>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finish_reason().is_some() || self.failed {
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
