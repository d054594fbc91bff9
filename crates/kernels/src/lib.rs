//! Fused operations with backward passes for fine-tuning language models on Candle.
//!
//! One folder an operation. Each is a pair of plain functions on Candle tensors, forward and
//! backward, that Candle's own autograd never records; storage is f32, bf16, f16 or f64, and sums
//! are made in f32 (in f64 for f64).

mod device;

pub mod adamw;
pub mod attention;
pub mod cross_entropy;
pub mod embedding;
pub mod glu;
pub mod lora_linear;
pub mod matmul;
pub mod rms_norm;
pub mod rope;
