//! Files: uploads, lists, what is in them, and what they are to learn from.

use super::query::{Id, NoBody, Paging, Pairs, unknown};
use super::stream::download;
use crate::app::{App, Shared};
use crate::body;
use crate::error::{ApiError, Result};
use crate::jobs::{Method, check, data_options};
use crate::store::{NewFile, Purpose, Removal, StoredFile};
use axum::body::{Body, Bytes};
use axum::extract::multipart::{Field, MultipartError};
use axum::extract::{DefaultBodyLimit, FromRequest, Multipart, Request, State};
use axum::http::StatusCode;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::StreamExt;
use futures_util::stream::poll_fn;
use serde_json::{Value, json};
use std::error::Error;
use std::fs::File;
use std::io::Read;
use std::iter::successors;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Poll, ready};

/// Files of a list, at most.
const MOST: usize = 10_000;
/// Bytes of a field of a form that isn't the file.
const FIELD: usize = 4096;
/// Fields of a form.
const FIELDS: usize = 16;
/// Characters of a file's name.
const NAME: usize = 512;
/// Bytes of a form that aren't its fields', in a row.
const UNREAD: usize = 512 << 10;
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
    let (mut form, unread) = read_form(request).await?;
    let mut purpose: Option<String> = None;
    let mut file: Option<(String, NewFile)> = None;
    for _ in 0..FIELDS {
        let next = form.next_field().await.map_err(unreadable)?;
        unread.none();
        let Some(field) = next else {
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
            "file" => file = Some(take_file(&app, field, &unread).await?),
            "purpose" => {
                let found = text(field, &unread).await?;
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

/// Bytes of a form that have come and that its reader holds back, as they are what isn't told of it: all before its first
/// field, and the head of each.
#[derive(Clone, Default)]
struct Unread(Arc<AtomicUsize>);

impl Unread {
    /// What has come was told.
    fn none(&self) {
        self.0.store(0, Ordering::Relaxed);
    }

    fn add(&self, piece: Bytes) -> Result<Bytes, axum::Error> {
        let before = self.0.fetch_add(piece.len(), Ordering::Relaxed);
        match before + piece.len() <= UNREAD {
            true => Ok(piece),
            false => Err(axum::Error::new(format!(
                "more than {UNREAD} bytes stand before a field of the form"
            ))),
        }
    }
}

/// A form whose reader holds back no more than it may.
async fn read_form(request: Request) -> Result<(Multipart, Unread)> {
    let unread = Unread::default();
    let (parts, body) = request.into_parts();
    let counted = unread.clone();
    let mut pieces = body.into_data_stream();
    let pieces = poll_fn(move |context| {
        let piece = ready!(pieces.poll_next_unpin(context));
        Poll::Ready(piece.map(|piece| counted.add(piece?)))
    });
    let request = Request::from_parts(parts, Body::from_stream(pieces));
    let form = Multipart::from_request(request, &()).await;
    Ok((form.map_err(|error| ApiError::invalid(error.body_text()))?, unread))
}

/// Writes a file's bytes; gives its name with it. What is given up leaves nothing.
async fn take_file(
    app: &Shared,
    mut field: Field<'_>,
    unread: &Unread,
) -> Result<(String, NewFile)> {
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
        unread.none();
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
async fn text(mut field: Field<'_>, unread: &Unread) -> Result<String> {
    let name = field.name().unwrap_or_default().to_string();
    let mut bytes = Vec::new();
    while let Some(piece) = field.chunk().await.map_err(unreadable)? {
        unread.none();
        bytes.extend_from_slice(&piece);
        if bytes.len() > FIELD {
            return Err(ApiError::field(name, format_args!("is longer than {FIELD} bytes")));
        }
    }
    String::from_utf8(bytes).map_err(|_| ApiError::field(name, "is not UTF-8"))
}

/// That a form is malformed, or that its sender has left or stands still.
fn unreadable(error: MultipartError) -> ApiError {
    let reason = successors(error.source(), |&cause| cause.source()).last();
    let reason = reason.map_or_else(|| error.body_text(), ToString::to_string);
    ApiError::invalid(format!("the form cannot be read: {}", metal_candle::readable(&reason)))
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

/// What a file is to a model and a method: its records, their tokens and which of them are learned, and what is wrong by
/// lines.
async fn look(
    State(app): State<Shared>,
    Id(id): Id,
    body::Asked(pairs): body::Asked<Pairs>,
    _: NoBody,
) -> Result<Json<Value>> {
    let mut model = app.options.model_name.clone();
    let mut method = Method::Supervised;
    for (name, value) in pairs {
        match name.as_str() {
            "model" => model = value,
            "method" => {
                method = Method::named(&value).ok_or_else(|| {
                    let found = metal_candle::readable(&value);
                    ApiError::field(
                        "method",
                        format_args!("is {found:?}, expected \"supervised\" or \"dpo\""),
                    )
                })?;
            }
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
        let options = data_options(app, method);
        let report = check(&path, &chosen.tokenizer, &options, &is_given_up)?;
        serde_json::to_value(report).map(Json).map_err(ApiError::internal)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a form of these bytes, which come a kilobyte at a time, is read to the content of its first field.
    fn is_read(form: Vec<u8>) -> bool {
        let pieces: Vec<_> = form
            .chunks(1024)
            .map(|piece| Ok::<_, axum::Error>(Bytes::copy_from_slice(piece)))
            .collect();
        let body = Body::from_stream(futures_util::stream::iter(pieces));
        let request = Request::post("/").header("content-type", "multipart/form-data; boundary=b");
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let (mut form, unread) = read_form(request.body(body).unwrap()).await.ok().unwrap();
            let field = form.next_field().await;
            unread.none();
            match field.map_err(unreadable) {
                Ok(Some(field)) => field.bytes().await.is_ok(),
                Ok(None) => false,
                Err(error) => {
                    assert!(error.message.contains("stand before a field"), "{}", error.message);
                    false
                }
            }
        })
    }

    #[test]
    fn what_is_no_field_of_a_form_is_bounded() {
        let form = |before: usize, head: usize| {
            let (before, head) = ("x".repeat(before), "x".repeat(head));
            let disposition = "content-disposition: form-data; name=\"a\"";
            format!("{before}\r\n--b\r\n{disposition}\r\nx: {head}\r\n\r\ncontent\r\n--b--\r\n")
                .into_bytes()
        };
        assert!(is_read(form(0, 0)) && is_read(form(1000, 1000)));
        assert!(!is_read(form(4 << 20, 0)) && !is_read(form(0, 4 << 20)));
    }
}
