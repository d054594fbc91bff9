//! Files and fine-tuning jobs.

pub mod client;
mod models;
mod requests;
mod runs;
