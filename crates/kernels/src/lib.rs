//! Fused operations with backward passes for fine-tuning language models on Candle.
//!
//! Every operation is a plain function on [`candle_core::Tensor`]s with its backward beside it.
//! Nothing is recorded in Candle's autograd, except by the functions named `differentiable`.
//! Shapes are written as `(batch, seq, hidden)`. Activations are f32, bf16 or f16; sums are kept in f32.
//! Gradients of activations have the dtype of the activation, gradients of parameters are f32. With the
//! feature `f64`, which is for checking, all of it may be f64 on the CPU.
//!
//! The tensors of a call are on one device, which computes: the CPU, an NVIDIA GPU with the feature
//! `cuda`, or the GPU of a Mac with the feature `metal`.
//!
//! | Module | Operation |
//! |---|---|
//! | [`matmul`] | linear layers |
//! | [`quantized`] | frozen matrices in 2 to 8 bits a number |
//! | [`lora_linear`] | frozen linear layers with a low-rank adapter, and dropout |
//! | [`lora_rows`] | low-rank adapters of rows that have different ones |
//! | [`dora`] | weight-decomposed adapters: norms of merged rows, columns multiplied |
//! | [`rms_norm`] | RMS norm, also of a residual sum |
//! | [`layer_norm`] | layer norm |
//! | [`softmax`] | softmax over the last dimension |
//! | [`rope`] | rotary position embedding |
//! | [`attention`] | causal attention with grouped heads, windows, packed rows and paged caches |
//! | [`glu`] | gated units: SiLU, GELU |
//! | [`experts`] | which experts a token has, and the sum of what they give |
//! | [`embedding`] | rows of a table |
//! | [`arithmetic`] | sums and multiples of tensors |
//! | [`copy`] | copies in another dtype, into a part of a tensor and into its rows |
//! | [`cross_entropy`] | the head and its loss, in chunks |
//! | [`flat`] | what all optimisers share: the norm of flat gradients, adding to them, clearing them |
//! | [`adamw`] | AdamW and Adam |
//! | [`sgd`] | stochastic gradient descent, with momentum |
//! | [`lion`] | Lion |
//! | [`muon`] | Muon: momentum made orthogonal |
//! | [`adafactor`] | Adafactor |
//! | [`adamw8bit`] | AdamW with moments of 8 bits |
//! | [`sampling`] | from logits to a token |
//! | [`recording`] | work that a GPU repeats without the host |
//! | [`batch_invariance`] | rows whose bits don't depend on others |
//! | [`devices`] | opening devices, a step of a loop on one, its memory |
//! | [`host`] | copies on the host, made beside other work |
//! | `nccl` | with the feature `cuda`: sums over the GPUs of several processes |
//!
//! Same inputs, same build, same machine: the same bits, whatever the number of threads.

pub mod adafactor;
pub mod adamw;
pub mod adamw8bit;
pub mod arithmetic;
pub mod attention;
mod backend;
pub mod batch_invariance;
pub mod copy;
pub mod cross_entropy;
pub mod devices;
pub mod dora;
pub mod embedding;
#[cfg(all(feature = "metal-emulation", not(feature = "metal")))]
pub mod emulation;
pub mod experts;
pub mod flat;
pub mod glu;
pub mod host;
pub mod layer_norm;
pub mod lion;
pub mod lora_linear;
pub mod lora_rows;
pub mod matmul;
pub mod muon;
#[cfg(feature = "cuda")]
pub mod nccl;
pub mod offload;
pub mod quantized;
pub mod recording;
pub mod rms_norm;
pub mod rope;
pub mod sampling;
pub mod sgd;
pub mod softmax;
#[cfg(test)]
mod testing;
