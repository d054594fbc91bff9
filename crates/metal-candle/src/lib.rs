//! Fine-tune language models with LoRA and run them, on Candle.

pub mod adapter;
pub mod autograd;
pub mod data;
mod error;
pub mod files;
pub mod generate;
pub mod hub;
pub mod model;
pub mod random;
pub mod text;
pub mod train;

pub use error::{Error, Result};
