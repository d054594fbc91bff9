//! Generation: prefill and decode over a KV cache, sampling, stop strings, streaming.

mod answer;
mod generator;
mod grammar;
mod penalties;
pub mod sampler;
pub mod stop;

pub(crate) use answer::Answer;
pub use answer::{FinishReason, GenerateOptions, Piece};
pub use generator::{Generation, Session, generate};
pub use grammar::{Grammar, Grammars};
pub(crate) use sampler::{Meanwhile, likeliest_of, log_sum_exp, sample_rows};
pub use sampler::{Sampled, Sampler, SamplingOptions};
pub use stop::{StopResult, StopStrings};
