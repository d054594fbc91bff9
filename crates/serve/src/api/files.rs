//! Files: uploads, lists, what is in them, and what they are to learn from.

use super::query::{Id, NoBody, Paging, Pairs, unknown};
use super::stream::download;
use crate::app::{App, Shared};
use crate::body;
use crate::error::{ApiError, Result};
use crate::jobs::{check, data_options};
use crate::store::{NewFile, Purpose, Removal, StoredFile};
use axum::extract::multipart::{Field, MultipartError};
use axum::extract::{DefaultBodyLimit, FromRequest, Multipart, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use std::fs::File;
use std::io::Read;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Files of a list, at most.
const MOST: usize = 10_000;
/// Bytes of a field of a form that isn't the file.
const FIELD: usize = 4096;
/// Fields of a form.
const FIELDS: usize = 16;
/// Characters of a file's name.
const NAME: usize = 512;
/// Bytes of an upload that are written at once. Between two such pieces no thread waits for the one who sends it.
const PIECE: usize = 1 << 20;

/// The routes.
pub fn routes() -> Router<Shared> {
    Router::new()
        // An upload has its own limit, and is never in memory as a whole.
        .route("/v1/files", post(upload).layer(DefaultBodyLimit::disable()).get(list))
        .route("/v1/files/{id}", get(retrieve).delete(remove))
        .route("/v1/files/{id}/content", get(content))
        .route("/v1/files/{id}/check", post(look))
}

async fn upload(State(app): State<Shared>, request: Request) -> Result<Json<Value>> {
    let mut form = Multipart::from_request(request, &app)
        .await
        .map_err(|error| ApiError::invalid(error.body_text()))?;
    let mut purpose: Option<String> = None;
    let mut file: Option<(String, NewFile)> = None;
    for _ in 0..FIELDS {
        let Some(field) = form.next_field().await.map_err(unreadable)? else {
            check_purpose(purpose.as_deref())?;
            let (name, new) = file.ok_or_else(|| {
                let expected = "expected a form with the fields file and purpose";
                ApiError::field("file", format_args!("is missing; {expected}"))
            })?;
            let finish =
                move |app: &App| Ok(app.store.finish_file(new, &name, Purpose::FineTune)?.object());
            return app.blocking(finish).await.map(Json);
        };
        match field.name().unwrap_or_default() {
            "file" if file.is_some() => {
                return Err(ApiError::field("file", "is there twice; one upload is one file"));
            }
            "file" => file = Some(take_file(&app, field).await?),
            "purpose" => {
                let found = text(field).await?;
                check_purpose(Some(&found))?;
                purpose = Some(found);
            }
            name if name.starts_with("expires_after") => {
                return Err(ApiError::unsupported(
                    "expires_after",
                    "files stay until they are deleted",
                ));
            }
            name => return Err(unknown(name)),
        }
    }
    Err(ApiError::invalid(format!("the form has more than {FIELDS} fields")))
}

/// Writes a file's bytes; gives its name with it. What is given up leaves nothing.
async fn take_file(app: &Shared, mut field: Field<'_>) -> Result<(String, NewFile)> {
    let name = field.file_name().unwrap_or_default().to_string();
    let length = name.chars().count();
    if !(1..=NAME).contains(&length) {
        return Err(ApiError::field(
            "file",
            format_args!("has a name of {length} characters, expected 1 to {NAME}"),
        ));
    }
    let most = app.options.max_file;
    let mut new = app.blocking(|app| Ok(app.store.begin_file()?)).await?;
    let mut piece = Vec::new();
    loop {
        let read = field.chunk().await.map_err(unreadable)?;
        let is_last = read.is_none();
        piece.extend_from_slice(&read.unwrap_or_default());
        if new.len() + piece.len() as u64 > most {
            let message = format!("file: is larger than {most} bytes, the most that is taken");
            let kind = "invalid_request_error";
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, kind, message).about("file"));
        }
        if is_last || piece.len() >= PIECE {
            let bytes = std::mem::take(&mut piece);
            let write = move |_: &App| {
                new.write(&bytes)?;
                Ok(new)
            };
            new = app.blocking(write).await?;
        }
        if is_last {
            return match new.len() {
                0 => Err(ApiError::field("file", "is empty")),
                _ => Ok((name, new)),
            };
        }
    }
}

/// A short field.
async fn text(mut field: Field<'_>) -> Result<String> {
    let name = field.name().unwrap_or_default().to_string();
    let mut bytes = Vec::new();
    while let Some(piece) = field.chunk().await.map_err(unreadable)? {
        bytes.extend_from_slice(&piece);
        if bytes.len() > FIELD {
            return Err(ApiError::field(name, format_args!("is longer than {FIELD} bytes")));
        }
    }
    String::from_utf8(bytes).map_err(|_| ApiError::field(name, "is not UTF-8"))
}

/// That a form is malformed, or that its sender has left or stands still.
fn unreadable(error: MultipartError) -> ApiError {
    ApiError::invalid(format!("the form cannot be read: {}", error.body_text()))
}

fn check_purpose(purpose: Option<&str>) -> Result<()> {
    match purpose {
        Some("fine-tune") => Ok(()),
        None => Err(ApiError::field("purpose", "is missing, expected \"fine-tune\"")),
        Some(word @ ("batch" | "assistants" | "vision" | "user_data" | "evals")) => {
            Err(ApiError::unsupported(
                "purpose",
                format_args!("files are for \"fine-tune\" here, and this one is for {word:?}"),
            ))
        }
        Some(other) => {
            let found = metal_candle::readable(other);
            Err(ApiError::field("purpose", format_args!("is {found:?}, expected \"fine-tune\"")))
        }
    }
}

async fn list(
    State(app): State<Shared>,
    body::Asked(pairs): body::Asked<Pairs>,
) -> Result<Json<Value>> {
    let (paging, others) = Paging::read(pairs, MOST, 1..=MOST)?;
    let (mut descending, mut purpose) = (true, None);
    for (name, value) in others {
        match (name.as_str(), value.as_str()) {
            ("order", "asc") => descending = false,
            ("order", "desc") => descending = true,
            ("order", _) => {
                return Err(ApiError::field("order", "is neither \"asc\" nor \"desc\""));
            }
            ("purpose", _) => purpose = Some(value),
            _ => return Err(unknown(&name)),
        }
    }
    app.blocking(move |app| {
        let Paging { after, limit } = &paging;
        let page =
            app.store.list_files(after.as_deref(), *limit, descending, purpose.as_deref())?;
        let page = page.ok_or_else(|| paging.lost("file"))?;
        let id = |file: Option<&StoredFile>| file.map(|file| file.id.clone()).unwrap_or_default();
        Ok(Json(json!({
            "object": "list",
            "data": page.items.iter().map(StoredFile::object).collect::<Vec<_>>(),
            "first_id": id(page.items.first()),
            "last_id": id(page.items.last()),
            "has_more": page.has_more,
        })))
    })
    .await
}

/// The file of this identifier.
fn find(app: &App, id: &str) -> Result<StoredFile> {
    app.store.file(id)?.ok_or_else(|| missing(id))
}

fn missing(id: &str) -> ApiError {
    ApiError::not_found(format!("No such File object: {}", metal_candle::readable(id))).about("id")
}

async fn retrieve(State(app): State<Shared>, Id(id): Id) -> Result<Json<Value>> {
    app.blocking(move |app| Ok(Json(find(app, &id)?.object()))).await
}

async fn remove(State(app): State<Shared>, Id(id): Id) -> Result<Json<Value>> {
    app.blocking(move |app| match app.store.remove_file(&id)? {
        Removal::Done => Ok(Json(json!({"id": id, "object": "file", "deleted": true}))),
        Removal::Missing => Err(missing(&id)),
        Removal::UsedBy(job) => Err(ApiError::invalid(format!(
            "The file is needed by the job {job}; wait for its end, or cancel it"
        ))
        .about("id")),
    })
    .await
}

async fn content(State(app): State<Shared>, Id(id): Id) -> Result<Response> {
    let (file, opened) = app
        .blocking(move |app| {
            let file = find(app, &id)?;
            let opened = File::open(app.store.file_path(&file)).map_err(ApiError::internal)?;
            Ok((file, opened))
        })
        .await?;
    let length = file.bytes.unsigned_abs();
    Ok(download(&app, &file.name, "application/octet-stream", length, opened.take(length)))
}

/// Is true once nobody waits for an answer any more.
struct GivenUp(Arc<AtomicBool>);

impl Drop for GivenUp {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What a file is to a model: its records, their tokens and which of them are learned, and what is wrong by lines.
async fn look(
    State(app): State<Shared>,
    Id(id): Id,
    body::Asked(pairs): body::Asked<Pairs>,
    _: NoBody,
) -> Result<Json<Value>> {
    let mut model = app.options.model_name.clone();
    for (name, value) in pairs {
        match name.as_str() {
            "model" => model = value,
            _ => return Err(unknown(&name)),
        }
    }
    let chosen = app.choose(&model).await?;
    let permit = app.store.signals.checks.clone().try_acquire_owned();
    let permit = permit
        .map_err(|_| ApiError::busy("other files are being checked; ask again in a moment"))?;
    let given_up = GivenUp(Arc::default());
    let flag = given_up.0.clone();
    app.blocking(move |app| {
        let _permit = permit;
        let file = find(app, &id)?;
        let is_given_up = || flag.load(Ordering::Relaxed);
        let path = app.store.file_path(&file);
        let report = check(&path, &chosen.tokenizer, &data_options(app), &is_given_up)?;
        serde_json::to_value(report).map(Json).map_err(ApiError::internal)
    })
    .await
}
