//! Which adapter something was made with, as its parameters were then.

use super::Adapter;
use std::sync::{Arc, Weak};

/// An adapter with the parameters of some time. It isn't kept in memory by this.
#[derive(Clone, Debug)]
pub(crate) struct AdapterVersion {
    adapter: Weak<Adapter>,
    generation: u64,
}

impl AdapterVersion {
    /// As it is now.
    pub fn of(adapter: &Arc<Adapter>) -> Self {
        let generation = adapter.parameters().generation();
        Self { adapter: Arc::downgrade(adapter), generation }
    }

    /// Whether the adapter is still there.
    pub fn is_live(&self) -> bool {
        self.adapter.strong_count() > 0
    }

    /// Whether it is still there, as it was.
    pub fn is_current(&self) -> bool {
        self.adapter.upgrade().is_some_and(|adapter| Self::of(&adapter) == *self)
    }
}

impl PartialEq for AdapterVersion {
    fn eq(&self, other: &Self) -> bool {
        self.adapter.ptr_eq(&other.adapter) && self.generation == other.generation
    }
}
