//! A model that reads texts into a paged cache, by recordings where those are faster.

use super::recorded::Recordings;
use super::{PagedCache, Ragged, Stretch};
use crate::model::Model;
use crate::{Error, Result};
use candle_core::Tensor;
use metal_candle_kernels::host::Downloads;
use metal_candle_kernels::recording::Recording;
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

/// Whether passes over the cache give texts the same bits in any company.
fn is_invariant(cache: &PagedCache) -> bool {
    cache.batch_invariant || batch_invariance::is_on()
}

/// A model and the cache that it fills.
pub(crate) struct ModelReader {
    model: Arc<Model>,
    cache: PagedCache,
    recordings: Recordings,
    downloads: Option<Downloads>,
}

impl ModelReader {
    pub fn new(model: &Arc<Model>, cache: PagedCache) -> Result<Self> {
        let device = model.device();
        let records = Recording::is_supported(device);
        let downloads = records.then(|| Downloads::new(device)).transpose()?;
        Ok(Self { model: model.clone(), cache, recordings: Recordings::default(), downloads })
    }

    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The logits `(wanted, vocabulary)` of what follows the tokens of which they are wanted, in their order, in f32 or the
    /// model's dtype. `total` is the longest text's length, whose ropes are the same for all of them. The next call may overwrite
    /// them.
    pub fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor> {
        let Self { model, cache, recordings, .. } = self;
        let read = || {
            if let Some(logits) = recordings.read(stretches, total, model, cache)? {
                return Ok(logits);
            }
            let ragged = Ragged::new(stretches, total, cache, model.device())?;
            model.next_logits(&ragged, cache)
        };
        devices::step(model.device(), || batch_invariance::within(is_invariant(cache), read))
    }

    /// What brings the tokens to the host that passes of [`Self::read_ahead`] read; `None` where there are none.
    pub fn downloads(&self) -> Option<Downloads> {
        self.downloads.clone()
    }

    /// Launches the pass over stretches of one token each, which are `tokens (n)` u32 where the device will have them,
    /// if the host has no part in it and it isn't one to be recorded yet. For the rest as [`Self::read`], which also tells
    /// what is wrong if it can't be done.
    pub fn read_ahead(
        &mut self,
        stretches: &[Stretch],
        total: usize,
        tokens: &Tensor,
    ) -> Option<Tensor> {
        let Self { model, cache, recordings, downloads } = self;
        let read = batch_invariance::within(is_invariant(cache), || {
            recordings.read_ahead(stretches, total, tokens, model, cache)
        });
        read.unwrap_or_else(|error| {
            tracing::debug!("passes are not read ahead any more: {error}");
            *downloads = None;
            None
        })
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
