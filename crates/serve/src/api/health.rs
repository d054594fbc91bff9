//! `/health`, `/version` and `/metrics`.

use crate::app::Shared;
use crate::error::{ApiError, Result};
use axum::extract::State;
use axum::http::header;
use axum::response::IntoResponse;
use axum::routing::get;
use axum::{Json, Router};
use serde_json::{Value, json};

pub fn routes() -> Router<Shared> {
    Router::new()
        .route("/health", get(health))
        .route("/ping", get(health))
        .route("/version", get(version))
        .route("/metrics", get(metrics))
}

/// That all engines' threads live; they may be busy with a step.
async fn health(State(app): State<Shared>) -> Result<()> {
    app.blocking(|app| app.replicas.statistics().map(drop).map_err(ApiError::internal)).await
}

async fn version() -> Json<Value> {
    Json(json!({"version": env!("CARGO_PKG_VERSION")}))
}

async fn metrics(State(app): State<Shared>) -> Result<impl IntoResponse> {
    let text = app
        .blocking(|app| {
            let statistics = app.replicas.statistics().map_err(ApiError::internal)?;
            Ok(app.metrics.text(&statistics, app.adapters.count()))
        })
        .await?;
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    Ok(([(header::CONTENT_TYPE, kind)], text))
}
