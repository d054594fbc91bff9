//! An OpenAI endpoint for chat and for fine-tuning, on one's own machine: one process that writes texts by
//! [`metal_candle::engine`] and trains adapters of the same frozen base between its steps.
//!
//! - `server.rs` takes connections (`connection.rs`, `tls.rs`) within limits (`options.rs`, `descriptors.rs`) and asks who may come
//!   in (`keys.rs`); `app.rs` is what all requests share, `metrics.rs` what is counted.
//! - `api/` are the routes; `body.rs`, `error.rs` and `words.rs` are what comes in and goes out.
//! - `writing.rs` goes from requests to the engine's texts; `conversation.rs`, `context.rs`, `sampling.rs` and
//!   `constraint.rs` say what of a request means which text, `tools/` how the families write calls and thoughts.
//! - `adapters.rs` are the adapters by name, `hub.rs` those of the Hugging Face hub.
//! - `store/` is the database with the files beside it, `jobs/` fine-tuning.
//! - `web/` is the page.

mod adapters;
mod api;
mod app;
mod body;
mod connection;
mod constraint;
mod context;
mod conversation;
mod descriptors;
mod error;
mod hub;
mod jobs;
pub mod keys;
mod metrics;
mod options;
mod replicas;
mod sampling;
mod server;
mod store;
mod tls;
mod tools;
mod web;
mod words;
mod writing;

pub use hub::HubAdapters;
pub use options::Options;
pub use server::{Base, Server};
pub use tls::Tls;
pub use tools::{Apart, Said};
