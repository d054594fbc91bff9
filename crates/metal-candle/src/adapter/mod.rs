//! Adapters: LoRA's configuration, the buffer its parameters live in, and PEFT's files.

mod config;
mod peft;
mod store;
#[cfg(test)]
mod tests;

pub use config::{LoraConfig, Resolved, Targets};
pub use peft::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_config, read_weights, write};
pub use store::{Entry, ParameterStore};
