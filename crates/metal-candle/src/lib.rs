//! Fine-tune language models with LoRA and run them, on Candle.
//!
//! The way of a training run is [`data`] → [`model`] with an [`adapter`] → [`pass`] → [`train`], that of a
//! text [`text`] → [`model`] → [`pass`] → [`generate`]. Models come from a folder or, through [`hub`], by name.

pub mod adapter;
pub mod autograd;
pub mod bounds;
pub mod compare;
pub mod data;
pub mod engine;
mod error;
pub mod files;
mod foreign;
pub mod generate;
pub mod gguf;
mod hash;
pub mod hub;
pub mod memory;
pub mod model;
pub mod parallel;
pub mod pass;
pub mod random;
pub mod text;
pub mod train;
pub mod turns;

pub use candle_core::{DType, Device};
pub use error::{Error, HubFault, Result, readable, tensor_message};
pub use metal_candle_kernels::{batch_invariance, devices};

/// The README's example, compiled.
#[cfg(doctest)]
#[doc = include_str!("../../../README.md")]
pub struct Readme;
