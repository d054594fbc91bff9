//! What reads the tokens that a step of the engine asks for: a model over its paged cache.

use super::recorded::Recordings;
use crate::Result;
use crate::adapter::Adapter;
use crate::model::Model;
use crate::pass::{PagedCache, Ragged, Stretch};
use candle_core::Tensor;
use metal_candle_kernels::{batch_invariance, devices};
use std::sync::Arc;

/// Reads stretches of many texts at once.
pub(super) trait Reader: Send {
    /// The logits `(wanted, vocabulary)` of what follows the tokens of which they are wanted, in their order.
    /// `total` is the longest text's length, whose ropes are the same for all of them. The next call may overwrite
    /// them.
    fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor>;

    /// Whether keys that were computed for a text of `a` tokens are others than for one of `b`.
    fn ropes_change(&self, a: usize, b: usize) -> bool;

    /// That an adapter can be used.
    fn check(&self, adapter: &Adapter) -> Result<()>;

    /// How many passes were repeated from a recording.
    fn recorded(&self) -> u64 {
        0
    }

    /// How many tokens there are.
    fn vocabulary(&self) -> usize;
}

/// A model and the cache that it fills.
pub(super) struct ModelReader {
    model: Arc<Model>,
    cache: PagedCache,
    recordings: Recordings,
}

impl ModelReader {
    pub fn new(model: &Arc<Model>, cache: PagedCache) -> Self {
        Self { model: model.clone(), cache, recordings: Recordings::default() }
    }
}

impl Reader for ModelReader {
    fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor> {
        let Self { model, cache, recordings } = self;
        let read = || {
            if let Some(logits) = recordings.read(stretches, total, model, cache)? {
                return Ok(logits);
            }
            let ragged = Ragged::new(stretches, total, cache, model.device())?;
            model.next_logits(&ragged, cache)
        };
        let invariant = cache.batch_invariant;
        devices::step(model.device(), || batch_invariance::within(invariant, read))
    }

    fn ropes_change(&self, a: usize, b: usize) -> bool {
        self.model.ropes_change(a, b)
    }

    fn check(&self, adapter: &Adapter) -> Result<()> {
        adapter.check(&self.model)
    }

    fn recorded(&self) -> u64 {
        self.recordings.runs()
    }

    fn vocabulary(&self) -> usize {
        self.model.config().vocab_size
    }
}
