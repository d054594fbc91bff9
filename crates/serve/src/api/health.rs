//! `/health`, `/version` and `/metrics`.

use crate::app::Shared;
use crate::error::{ApiError, Result};
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};
use std::time::Duration;

/// How long engines that are busy with a step are waited for.
const PATIENCE: Duration = Duration::from_secs(1);

/// The routes of whoever watches over the server. They are answered whatever else is under way, as a server that is busy
/// would be taken for a dead one.
pub const PROBES: [&str; 3] = ["/health", "/ping", "/metrics"];

pub fn routes() -> Router<Shared> {
    Router::new()
        .route("/health", get(health))
        .route("/ping", get(health))
        .route("/version", get(version))
        .route("/metrics", get(metrics))
}

/// That all engines' threads live; they may be busy with a step, which isn't waited for.
async fn health(State(app): State<Shared>) -> Result<()> {
    match app.replicas.are_alive() {
        true => Ok(()),
        false => Err(ApiError::internal("the thread of an engine has ended")),
    }
}

async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn metrics(State(app): State<Shared>) -> Result<impl IntoResponse> {
    let text = app
        .quick(|app| {
            let statistics = app.replicas.statistics(PATIENCE).map_err(ApiError::internal)?;
            Ok(app.metrics.text(&statistics, app.adapters.count()))
        })
        .await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text))
}
