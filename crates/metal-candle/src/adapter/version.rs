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

    /// The adapter, if it is still there, as it was.
    pub fn current(&self) -> Option<Arc<Adapter>> {
        self.adapter.upgrade().filter(|adapter| Self::of(adapter) == *self)
    }

    /// Whether it is still there, as it was.
    pub fn is_current(&self) -> bool {
        self.current().is_some()
    }
}

impl PartialEq for AdapterVersion {
    fn eq(&self, other: &Self) -> bool {
        self.adapter.ptr_eq(&other.adapter) && self.generation == other.generation
    }
}
