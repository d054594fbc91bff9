//! What reads the tokens that a step of the engine asks for: a model over its paged cache.

use crate::Result;
use crate::adapter::Adapter;
use crate::model::Model;
use crate::pass::{PagedCache, Ragged, Stretch};
use candle_core::Tensor;
use metal_candle_kernels::devices;
use std::sync::Arc;

/// Reads stretches of many texts at once.
pub(super) trait Reader: Send {
    /// The logits `(stretches that want them, vocabulary)` of what follows each, in the order of the stretches.
    /// `total` is the longest text's length, whose ropes are the same for all of them.
    fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor>;

    /// Whether keys that were computed for a text of `a` tokens are others than for one of `b`.
    fn ropes_change(&self, a: usize, b: usize) -> bool;

    /// That an adapter can be used.
    fn check(&self, adapter: &Adapter) -> Result<()>;

    /// How many tokens there are.
    fn vocabulary(&self) -> usize;
}

/// A model and the cache that it fills.
pub(super) struct ModelReader {
    pub model: Arc<Model>,
    pub cache: PagedCache,
}

impl Reader for ModelReader {
    fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor> {
        devices::step(self.model.device(), || {
            let ragged = Ragged::new(stretches, total, &self.cache, self.model.device())?;
            self.model.next_logits(&ragged, &self.cache)
        })
    }

    fn ropes_change(&self, a: usize, b: usize) -> bool {
        self.model.ropes_change(a, b)
    }

    fn check(&self, adapter: &Adapter) -> Result<()> {
        adapter.check(&self.model)
    }

    fn vocabulary(&self) -> usize {
        self.model.config().vocab_size
    }
}
