//! The routes, a file for each kind of them.

pub mod anthropic;
pub mod chat;
mod completion;
pub mod completions;
pub mod embeddings;
pub mod files;
pub mod health;
pub mod jobs;
mod merged;
pub mod models;
mod query;
pub mod responses;
mod stream;
pub mod tokens;

use crate::app::Shared;
use crate::error::ApiError;
use axum::Router;
use axum::response::{IntoResponse, Response};
pub use embeddings::AT_ONCE as EMBEDDED_AT_ONCE;
pub use merged::AT_ONCE as MERGED_AT_ONCE;

/// Every route.
pub fn routes() -> Router<Shared> {
    Router::new()
        .merge(anthropic::routes())
        .merge(chat::routes())
        .merge(completions::routes())
        .merge(embeddings::routes())
        .merge(files::routes())
        .merge(health::routes())
        .merge(jobs::routes())
        .merge(models::routes())
        .merge(responses::routes())
        .merge(tokens::routes())
}

/// An error as the clients of this path know them.
pub fn refusal(path: &str, error: ApiError) -> Response {
    match anthropic::has(path) {
        true => anthropic::Failure::from(error).into_response(),
        false => error.into_response(),
    }
}
