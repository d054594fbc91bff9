//! Generate.

pub mod sampler;
pub mod stop;

pub use sampler::{Sampled, Sampler, SamplingOptions};
pub use stop::{StopResult, StopStrings};
