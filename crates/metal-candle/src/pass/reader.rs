//! A model that reads texts into a paged cache, by recordings where those are faster.

use super::recorded::Recordings;
use super::{PagedCache, Ragged, Stretch};
use crate::model::Model;
use crate::{Error, Result};
use candle_core::Tensor;
use metal_candle_kernels::{batch_invariance, devices};
use std::sync::Arc;

/// That there are tokens, which are of a vocabulary of so many.
pub(crate) fn check_prompt(tokens: &[u32], vocabulary: usize) -> Result<()> {
    if tokens.is_empty() {
        return Err(Error::option("prompt", "is empty; expected at least one token"));
    }
    match tokens.iter().find(|token| **token as usize >= vocabulary) {
        None => Ok(()),
        Some(token) => Err(Error::option(
            "prompt",
            format!(
                "has token {token}, but the model's vocabulary has {vocabulary}; the tokenizer is not this model's"
            ),
        )),
    }
}

/// A model and the cache that it fills.
pub(crate) struct ModelReader {
    model: Arc<Model>,
    cache: PagedCache,
    recordings: Recordings,
}

impl ModelReader {
    pub fn new(model: &Arc<Model>, cache: PagedCache) -> Self {
        Self { model: model.clone(), cache, recordings: Recordings::default() }
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The logits `(wanted, vocabulary)` of what follows the tokens of which they are wanted, in their order, in f32.
    /// `total` is the longest text's length, whose ropes are the same for all of them. The next call may overwrite
    /// them.
    pub fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor> {
        let Self { model, cache, recordings } = self;
        let read = || {
            if let Some(logits) = recordings.read(stretches, total, model, cache)? {
                return Ok(logits);
            }
            let ragged = Ragged::new(stretches, total, cache, model.device())?;
            model.next_logits(&ragged, cache)
        };
        let invariant = cache.batch_invariant || batch_invariance::is_on();
        devices::step(model.device(), || batch_invariance::within(invariant, read))
    }

    /// How many passes were repeated from a recording.
    pub fn recorded(&self) -> u64 {
        self.recordings.runs()
    }

    /// Forgets the passes that were recorded, and records none any more.
    pub fn stop_recording(&mut self) {
        self.recordings.stop();
    }

    /// Makes room for `blocks` blocks for each kind of layers; what the first ones hold stays.
    pub fn grow(&mut self, blocks: u32) -> Result<()> {
        self.cache.grow(blocks)?;
        // They read the memory that the cache had.
        self.recordings = Recordings::default();
        Ok(())
    }
}
