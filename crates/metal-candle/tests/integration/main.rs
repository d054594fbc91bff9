//! The library as a program uses it, in one program of tests; `frozen_base.rs`, which counts what its process
//! allocates, is another.

mod batch_invariance;
mod candle_autograd;
mod common;
mod compare;
mod data;
mod engine;
mod eva;
mod gguf;
mod grammar;
mod models;
mod mutations;
mod objectives;
mod placement;
mod quantized;
mod tensor_parallel;
mod text;
mod training;
mod untrusted;
