//! What reads the tokens that a step of the engine asks for.

use crate::Result;
use crate::adapter::Adapter;
use crate::pass::{ModelReader, Stretch};
use candle_core::Tensor;

/// Reads stretches of many texts at once.
pub(super) trait Reader: Send {
    /// The logits `(wanted, vocabulary)` of what follows the tokens of which they are wanted, in their order.
    /// `total` is the longest text's length, whose ropes are the same for all of them. The next call may overwrite
    /// them.
    fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor>;

    /// That what was read is right, once the device is done with it.
    fn confirm(&self) -> Result<()> {
        Ok(())
    }

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

impl Reader for ModelReader {
    fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor> {
        self.read(stretches, total)
    }

    fn ropes_change(&self, a: usize, b: usize) -> bool {
        self.model().ropes_change(a, b)
    }

    fn check(&self, adapter: &Adapter) -> Result<()> {
        adapter.check(self.model())
    }

    fn recorded(&self) -> u64 {
        self.recorded()
    }

    fn vocabulary(&self) -> usize {
        self.model().config().vocab_size
    }
}
