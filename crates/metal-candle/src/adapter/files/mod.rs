//! The files of adapters.

pub(super) mod peft;
