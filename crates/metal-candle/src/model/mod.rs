//! Model.

pub mod config;
pub mod rope;
pub mod weights;

pub use config::Config;
pub use weights::Weights;
