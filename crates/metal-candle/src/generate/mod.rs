//! Generation: prefill and decode over a KV cache, sampling, stop strings, streaming.

mod generator;
pub mod sampler;
pub mod stop;

pub use generator::{FinishReason, GenerateOptions, Generation, Piece, Session, generate};
pub use sampler::{Sampled, Sampler, SamplingOptions};
pub use stop::{StopResult, StopStrings};
