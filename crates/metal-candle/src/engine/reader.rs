//! What reads the tokens that a step of the engine asks for.

use crate::Result;
use crate::adapter::Adapter;
use crate::pass::{ModelReader, Stretch};
use candle_core::Tensor;
use metal_candle_kernels::host::Downloads;

/// Reads stretches of many texts at once.
pub(super) trait Reader: Send {
    /// The logits `(wanted, vocabulary)` of what follows the tokens of which they are wanted, in their order.
    /// `total` is the longest text's length, whose ropes are the same for all of them. The next call may overwrite
    /// them.
    fn read(&mut self, stretches: &[Stretch], total: usize) -> Result<Tensor>;

    /// What brings the tokens to the host that [`Self::read_ahead`] reads; `None` where it does nothing.
    fn downloads(&self) -> Option<Downloads> {
        None
    }

    /// Launches what [`Self::read`] would for stretches of one token each, which are `tokens (n)` u32 where the device
    /// will have them, if it can; what is wrong, [`Self::read`] tells. What their `tokens` say is of no account.
    fn read_ahead(&mut self, _: &[Stretch], _total: usize, _tokens: &Tensor) -> Option<Tensor> {
        None
    }

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

    fn downloads(&self) -> Option<Downloads> {
        self.downloads()
    }

    fn read_ahead(
        &mut self,
        stretches: &[Stretch],
        total: usize,
        tokens: &Tensor,
    ) -> Option<Tensor> {
        self.read_ahead(stretches, total, tokens)
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
