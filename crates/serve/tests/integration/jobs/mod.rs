//! Files and fine-tuning jobs.

mod client;
mod models;
mod requests;
mod runs;
