//! An OpenAI endpoint for chat and for fine-tuning, on one's own machine: one process that writes texts by
//! [`metal_candle::engine`] and trains adapters of the same frozen base between its steps.
//!
//! `app.rs` is what all requests share, `api/` the routes, `adapters.rs` the adapters by name, `hub.rs` those
//! of the Hugging Face hub, `store/` the database
//! and the files, `jobs/` fine-tuning, `tools/` the families' formats of tool calls, `web/` the page.

mod adapters;
mod api;
mod app;
mod body;
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
