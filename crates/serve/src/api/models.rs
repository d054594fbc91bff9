//! `/v1/models`, and vLLM's routes that load and unload adapters.

use super::query::Id;
use crate::adapters::Listed;
use crate::app::{App, Shared};
use crate::body::Body;
use crate::error::{ApiError, Result};
use axum::extract::State;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::path::PathBuf;

pub fn routes() -> Router<Shared> {
    Router::new()
        .route("/v1/models", get(list))
        .route("/v1/models/{*name}", get(one).delete(delete))
        .route("/v1/load_lora_adapter", post(load))
        .route("/v1/unload_lora_adapter", post(unload))
}

/// A model as OpenAI lists it, with what vLLM says besides.
#[derive(Debug, Serialize)]
struct Model {
    id: String,
    object: &'static str,
    created: i64,
    owned_by: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    parent: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    max_model_len: Option<usize>,
}

impl Model {
    fn base(app: &App) -> Self {
        Self {
            id: app.options.model_name.clone(),
            object: "model",
            created: app.started,
            owned_by: "metal-candle",
            parent: None,
            max_model_len: Some(app.model.config().context()),
        }
    }

    fn adapter(app: &App, listed: Listed) -> Self {
        Self {
            id: listed.name,
            object: "model",
            created: listed.created,
            owned_by: "metal-candle",
            parent: Some(app.options.model_name.clone()),
            max_model_len: None,
        }
    }
}

async fn list(State(app): State<Shared>) -> Result<Json<Value>> {
    let data = app
        .blocking(|app| {
            let adapters = app.listed()?.into_iter().map(|listed| Model::adapter(app, listed));
            Ok(std::iter::once(Model::base(app)).chain(adapters).collect::<Vec<_>>())
        })
        .await?;
    Ok(Json(json!({"object": "list", "data": data})))
}

async fn one(State(app): State<Shared>, Id(name): Id) -> Result<Json<Model>> {
    if app.is_base(&name) {
        return Ok(Json(Model { id: name, ..Model::base(&app) }));
    }
    app.blocking(move |app| {
        let listed = app.listed()?.into_iter().find(|listed| listed.name == name);
        let listed = listed.ok_or_else(|| ApiError::no_model(&name))?;
        Ok(Json(Model::adapter(app, listed)))
    })
    .await
}

/// Forgets a fine-tuned model, with its files.
async fn delete(State(app): State<Shared>, Id(name): Id) -> Result<Json<Value>> {
    app.blocking(move |app| {
        if app.store.remove_tuned(&name)? {
            return Ok(Json(json!({"id": name, "object": "model", "deleted": true})));
        }
        match app.is_base(&name) || app.folder_of(&name)?.is_some() {
            true => Err(ApiError::field(
                "model",
                format_args!("{name} was not fine-tuned here; only such models can be deleted"),
            )),
            false => Err(ApiError::no_model(&name)),
        }
    })
    .await
}

/// An adapter of the server's folders, and the name that it gets.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Load {
    lora_name: String,
    lora_path: PathBuf,
    /// Reads the files again if the name is taken.
    #[serde(default)]
    load_inplace: bool,
    /// vLLM's; an adapter here belongs to the one base.
    base_model_name: Option<String>,
}

async fn load(State(app): State<Shared>, Body(load): Body<Load>) -> Result<String> {
    if !app.options.load_adapters_by_path {
        return Err(ApiError::unsupported(
            "lora_path",
            "this server loads no adapters by path; put them into its folder of adapters",
        ));
    }
    if load.base_model_name.as_deref().is_some_and(|name| !app.is_base(name)) {
        return Err(ApiError::field(
            "base_model_name",
            format_args!("expected {}, which this server has", app.options.model_name),
        ));
    }
    let length = load.lora_name.chars().count();
    if length == 0 || length > 256 || load.lora_name.chars().any(char::is_control) {
        let what = "expected 1 to 256 characters that can be printed";
        return Err(ApiError::field("lora_name", what));
    }
    app.blocking(move |app| {
        app.name_adapter(&load.lora_name, &load.lora_path, load.load_inplace)?;
        Ok(format!("Success: LoRA adapter '{}' added successfully.", load.lora_name))
    })
    .await
}

/// A name that is to be forgotten.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Unload {
    lora_name: String,
    /// vLLM's number of it, which names nothing here.
    #[serde(default, rename = "lora_int_id")]
    _number: Option<u64>,
}

async fn unload(State(app): State<Shared>, Body(unload): Body<Unload>) -> Result<String> {
    match app.unname_adapter(&unload.lora_name) {
        true => Ok(format!("Success: LoRA adapter '{}' removed successfully.", unload.lora_name)),
        false => Err(ApiError::no_model(&unload.lora_name).about("lora_name")),
    }
}
