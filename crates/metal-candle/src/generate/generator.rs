//! Text from a model: prefill the prompt, then decode a token at a time.

use super::answer::{Answer, FinishReason, GenerateOptions, Piece};
use super::sampler::{Meanwhile, Sampled};
use crate::Result;
use crate::adapter::Adapter;
use crate::model::Model;
use crate::pass::{CacheDtype, Layers, ModelReader, PagedCache, Stretch, check_prompt};
use crate::text::Tokenizer;
use candle_core::{DType, IndexOp, Tensor};
use metal_candle_kernels::copy;
use metal_candle_kernels::recording::Recording;
use std::sync::Arc;

/// Tokens of the prompt that go through the model at a time, which bounds the memory it takes.
const PREFILL: usize = 2048;
/// Tokens of a block of the cache, and the blocks that it begins with.
const BLOCK: usize = 16;
const FIRST_BLOCKS: u32 = 4;

/// A conversation with a model, token by token: the tokens it has read and its KV cache, which grows.
pub struct Session {
    reader: ModelReader,
    adapter: Option<Arc<Adapter>>,
    /// All blocks of the cache in their order, as all layers' table.
    tables: [Vec<u32>; 1],
    tokens: Vec<u32>,
    /// How many tokens' keys and values the cache holds.
    cached: usize,
}

impl Session {
    /// Nothing read yet.
    ///
    /// # Errors
    /// When the device has no memory, or no stream for transfers.
    pub fn new(model: &Arc<Model>, adapter: Option<&Arc<Adapter>>) -> Result<Self> {
        let layers = [Layers { window: None, blocks: FIRST_BLOCKS }];
        let cache = PagedCache::new(model, &layers, BLOCK, CacheDtype::Model)?;
        Ok(Self {
            reader: ModelReader::new(model, cache)?,
            adapter: adapter.cloned(),
            tables: [(0..FIRST_BLOCKS).collect()],
            tokens: Vec::new(),
            cached: 0,
        })
    }

    /// The tokens read so far.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Reads tokens and returns the logits `(vocabulary)` of what comes next, in f32 on the model's device.
    ///
    /// # Errors
    /// When there are none, or the model doesn't know one of them, or the device fails; the session is then as before.
    pub fn read(&mut self, tokens: &[u32]) -> Result<Tensor> {
        check_prompt(tokens, self.reader.model().config().vocab_size)?;
        let before = self.tokens.len();
        self.tokens.extend(tokens);
        let result = self.advance();
        if result.is_err() {
            // Keys that were rotated for the longer text are of no use to this one.
            let rotated = self.reader.model().ropes_change(before, self.tokens.len());
            self.tokens.truncate(before);
            self.cached = if rotated { 0 } else { self.cached.min(before) };
        }
        result
    }

    /// Reads those tokens that the cache does not hold.
    fn advance(&mut self) -> Result<Tensor> {
        let total = self.tokens.len();
        // LongRoPE rotates every key differently once the text is long, dynamic rope from then on with every
        // token.
        if self.reader.model().ropes_change(self.cached, total) {
            self.cached = 0;
        }
        self.make_room(total)?;
        loop {
            let end = total.min(self.cached + PREFILL);
            let stretch = Stretch {
                tokens: &self.tokens[self.cached..end],
                start: self.cached,
                tables: &self.tables,
                adapter: self.adapter.as_ref(),
                logits: usize::from(end == total),
            };
            let logits = self.reader.read(&[stretch], total)?;
            self.cached = end;
            if end == total {
                return own_logits(&logits);
            }
        }
    }

    /// Takes a token that was read ahead: the logits of what follows it.
    fn take_ahead(&mut self, token: u32, logits: &Tensor) -> Result<Tensor> {
        let logits = own_logits(logits)?;
        self.tokens.push(token);
        self.cached = self.tokens.len();
        Ok(logits)
    }

    /// Makes room for so many tokens, for at least twice as many as there was.
    fn make_room(&mut self, tokens: usize) -> Result<()> {
        let [table] = &mut self.tables;
        let needed = tokens.div_ceil(BLOCK);
        if needed <= table.len() {
            return Ok(());
        }
        let blocks = u32::try_from(needed.next_power_of_two()).map_err(candle_core::Error::wrap)?;
        self.reader.grow(blocks)?;
        table.extend(table.len() as u32..blocks);
        Ok(())
    }

    /// Keeps only the first `length` tokens that it shares with `tokens` and reads the rest, so
    /// that the next turn of a conversation pays only for what is new.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn continue_with(&mut self, tokens: &[u32]) -> Result<Tensor> {
        check_prompt(tokens, self.reader.model().config().vocab_size)?;
        let shared = self.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        let mut shared = shared.min(tokens.len().saturating_sub(1)).min(self.cached);
        if self.reader.model().ropes_change(self.cached, tokens.len()) {
            shared = 0;
        }
        self.cached = shared;
        let replaced = self.tokens.split_off(shared);
        let result = self.read(&tokens[shared..]);
        if result.is_err() {
            // What the cache held of these is read again with the next tokens.
            self.tokens.extend(replaced);
        }
        result
    }
}

/// The one row of logits, in f32, which stay.
fn own_logits(logits: &Tensor) -> Result<Tensor> {
    let own = copy::cast(&logits.i(0)?, DType::F32)?;
    // The next recorded pass writes to the same place.
    let stays = logits.dtype() != DType::F32 || !Recording::is_supported(logits.device());
    Ok(if stays { own } else { own.copy()? })
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
        let answer = Answer::new(Some(tokenizer), options, prompt)?;
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
        let (sampled, ahead) = self.sample()?;
        let piece = self.answer.take(sampled)?;
        if self.answer.finish_reason().is_none()
            && let Some(token) = piece.token
        {
            self.logits = match ahead {
                Some(logits) => self.session.take_ahead(token, &logits)?,
                None => self.session.read(&[token])?,
            };
        }
        Ok(piece)
    }

    /// The next token, and the logits of what follows it, if the device goes on with it while the host doesn't know it yet.
    fn sample(&mut self) -> Result<(Sampled, Option<Tensor>)> {
        let length = self.session.tokens.len();
        let reader = &self.session.reader;
        // Where the cache has to grow, there is no block for the token yet.
        let [table] = &self.session.tables;
        let may = self.answer.left() > 1
            && length < table.len() * BLOCK
            && !reader.model().ropes_change(length, length + 1);
        let downloads = reader.downloads().filter(|_| may);
        let Session { reader, adapter, tables, .. } = &mut *self.session;
        let mut ahead = None;
        let mut launch = |token: &Tensor| {
            let next = Stretch::ahead(length, tables, adapter.as_ref());
            ahead = reader.read_ahead(&[next], length + 1, token);
        };
        let meanwhile =
            downloads.as_ref().map(|downloads| Meanwhile { downloads, launch: &mut launch });
        let sampled = self.answer.row(&[]).sample(&self.logits, meanwhile)?;
        Ok((sampled, ahead))
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
    let mut session = Session::new(model, adapter)?;
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
