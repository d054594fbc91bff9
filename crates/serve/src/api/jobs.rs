//! Fine-tuning jobs.

use super::merged;
use super::query::{Id, NoBody, Paging, Pairs, unknown};
use super::stream::{Entry, archive, download};
use crate::app::{App, Shared};
use crate::body::{self, Body};
use crate::error::{ApiError, Result};
use crate::jobs::{CreateJob, PAIRS, tidy};
use crate::store::{Event, Job, NewJob, ORGANIZATION, Page, Purpose, Refusal, Status, Tuned};
use axum::extract::State;
use axum::response::Response;
use axum::routing::{get, post};
use axum::{Json, Router};
use metal_candle::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use metal_candle::text::CHAT_TEMPLATE;
use serde_json::{Value, json};
use std::fs::File;
use std::io;
use std::ops::RangeInclusive;

/// The type of an archive.
pub(super) const TAR: &str = "application/x-tar";
/// Items of a page, as OpenAI has them, and at most.
const JOBS: usize = 20;
const EVENTS: usize = 20;
const CHECKPOINTS: usize = 10;
const RANGE: RangeInclusive<usize> = 1..=1000;

/// The routes.
pub fn routes() -> Router<Shared> {
    Router::new()
        .route("/v1/fine_tuning/jobs", post(create).get(list))
        .route("/v1/fine_tuning/jobs/{id}", get(retrieve))
        .route("/v1/fine_tuning/jobs/{id}/cancel", post(cancel))
        .route("/v1/fine_tuning/jobs/{id}/pause", post(pause))
        .route("/v1/fine_tuning/jobs/{id}/resume", post(resume))
        .route("/v1/fine_tuning/jobs/{id}/events", get(events))
        .route("/v1/fine_tuning/jobs/{id}/checkpoints", get(checkpoints))
        .route("/v1/fine_tuning/jobs/{id}/adapter", get(adapter))
        .route("/v1/fine_tuning/jobs/{id}/merged", get(merged::download_merged))
}

/// OpenAI's object. Its clients know no status `paused`, so a job that is paused is `queued` to them, and the field
/// `paused` says which it is.
fn object(job: &Job) -> Value {
    let asked = &job.asked;
    let is_paused = job.status == Status::Paused;
    let status = if is_paused { Status::Queued } else { job.status };
    let model = (job.status == Status::Succeeded).then(|| job.tuned_name());
    json!({
        "object": "fine_tuning.job",
        "id": job.id,
        "model": asked.model,
        "created_at": job.created,
        "finished_at": job.finished,
        "fine_tuned_model": model,
        "organization_id": ORGANIZATION,
        "result_files": job.result_file.iter().collect::<Vec<_>>(),
        "status": status.name(),
        "paused": is_paused,
        "user_provided_suffix": asked.suffix,
        "validation_file": asked.validation_file,
        "training_file": asked.training_file,
        "hyperparameters": asked.hyperparameters.object(),
        "method": asked.hyperparameters.method_object(),
        "trained_tokens": job.trained_tokens,
        "error": job.error,
        "integrations": [],
        "seed": asked.seed,
        "estimated_finish": job.estimated_finish,
        "metadata": asked.metadata,
    })
}

async fn create(State(app): State<Shared>, Body(request): Body<CreateJob>) -> Result<Json<Value>> {
    app.require_whole("fine-tuning")?;
    app.blocking(move |app| {
        request.check_integrations()?;
        let new = NewJob {
            base: app.options.model_name.clone(),
            model: model(app, &request.model)?,
            suffix: request.suffix()?,
            training_file: file(app, "training_file", &request.training_file)?,
            validation_file: match &request.validation_file {
                Some(id) => Some(file(app, "validation_file", id)?),
                None => None,
            },
            seed: request.seed()?,
            metadata: request.metadata()?,
            hyperparameters: request.hyperparameters()?,
        };
        match app.store.add_job(&new)? {
            Ok(job) => Ok(Json(object(&job))),
            Err(param) => Err(no_file(param)),
        }
    })
    .await
}

/// The model that a job begins with: the base, or one that was made of it here.
fn model(app: &App, name: &str) -> Result<String> {
    let base = &app.options.model_name;
    if app.is_base(name) {
        return Ok(base.clone());
    }
    match app.store.tuned_by_name(name)? {
        Some(tuned) if tuned.base != *base => Err(ApiError::field(
            "model",
            format_args!("is a model of {}, and this server has {base}", tuned.base),
        )),
        Some(tuned) => Ok(tuned.name),
        None if app.folder_of(name)?.is_some() => Err(ApiError::field(
            "model",
            format_args!(
                "{} is an adapter that was not fine-tuned here; jobs go on from {base} or a fine-tuned model",
                metal_candle::readable(name)
            ),
        )),
        None => Err(ApiError::no_model(name)),
    }
}

/// The identifier of a file to learn from.
fn file(app: &App, param: &'static str, id: &str) -> Result<String> {
    match app.store.file(id)? {
        Some(file) if file.purpose == Purpose::FineTune => Ok(file.id),
        Some(file) => Err(ApiError::field(
            param,
            format_args!("has the purpose {:?}, expected \"fine-tune\"", file.purpose.name()),
        )),
        None => Err(no_file(param)),
    }
}

fn no_file(param: &'static str) -> ApiError {
    ApiError::field(param, "is no file that was uploaded here; POST /v1/files gives one")
}

async fn list(
    State(app): State<Shared>,
    body::Asked(pairs): body::Asked<Pairs>,
) -> Result<Json<Value>> {
    let (paging, others) = Paging::read(pairs, JOBS, RANGE)?;
    let metadata = metadata_filter(others)?;
    app.blocking(move |app| {
        let Paging { after, limit } = &paging;
        let page = app.store.list_jobs(after.as_deref(), *limit, metadata.as_deref())?;
        let Page { items, has_more } = page.ok_or_else(|| paging.lost("job"))?;
        let data: Vec<Value> = items.iter().map(object).collect();
        Ok(Json(json!({"object": "list", "data": data, "has_more": has_more})))
    })
    .await
}

/// The pairs of `metadata[KEY]=VALUE`; `None` of `metadata=null`, which asks for jobs without any. A job has no more pairs than
/// are read, and each is looked for in every job.
fn metadata_filter(others: Pairs) -> Result<Option<Pairs>> {
    let mut wanted = Pairs::new();
    let mut is_null = false;
    for (name, value) in others {
        let key = name.strip_prefix("metadata[").and_then(|rest| rest.strip_suffix(']'));
        match (key, name.as_str(), value.as_str()) {
            (Some(_), ..) if wanted.len() == PAIRS => {
                let what = format!("has more than {PAIRS} pairs, expected at most so many");
                return Err(ApiError::field("metadata", what));
            }
            (Some(key), ..) if wanted.iter().any(|(other, _)| other == key) => {
                let shown = metal_candle::readable(key);
                let what = "is there twice, expected once";
                return Err(ApiError::field(format!("metadata[{shown}]"), what));
            }
            (Some(key), ..) => wanted.push((key.to_string(), value)),
            (None, "metadata", "null") => is_null = true,
            _ => return Err(unknown(&name)),
        }
    }
    match (is_null, wanted.is_empty()) {
        (true, false) => {
            Err(ApiError::field("metadata", "is null and has pairs; expected one of both"))
        }
        (true, true) => Ok(None),
        (false, _) => Ok(Some(wanted)),
    }
}

fn missing(id: &str) -> ApiError {
    let id = metal_candle::readable(id);
    ApiError::not_found(format!("Could not find fine tune: {id}"))
        .about("fine_tuning_job_id")
        .coded("fine_tune_not_found")
}

fn find(app: &App, id: &str) -> Result<Job> {
    app.store.job(id)?.ok_or_else(|| missing(id))
}

async fn retrieve(State(app): State<Shared>, Id(id): Id) -> Result<Json<Value>> {
    app.blocking(move |app| Ok(Json(object(&find(app, &id)?)))).await
}

/// The job that was turned. What it can't be turned to is a 400, as clients try a 409 again.
fn turned(id: &str, verb: &str, turned: std::result::Result<Job, Refusal>) -> Result<Json<Value>> {
    match turned {
        Ok(job) => Ok(Json(object(&job))),
        Err(Refusal::Missing) => Err(missing(id)),
        Err(Refusal::Is(status)) => Err(ApiError::invalid(format!(
            "The job {id} is {} and cannot be {verb}",
            status.name()
        ))
        .about("fine_tuning_job_id")),
    }
}

async fn cancel(State(app): State<Shared>, Id(id): Id, _: NoBody) -> Result<Json<Value>> {
    app.blocking(move |app| {
        let cancelled = app.store.cancel_job(&id)?;
        // One that is trained is tidied up when that has stopped.
        if let Ok(job) = &cancelled
            && !app.store.signals.is_training(&id)
        {
            tidy(&app.store, job)?;
        }
        turned(&id, "cancelled", cancelled)
    })
    .await
}

async fn pause(State(app): State<Shared>, Id(id): Id, _: NoBody) -> Result<Json<Value>> {
    app.blocking(move |app| turned(&id, "paused", app.store.pause_job(&id)?)).await
}

async fn resume(State(app): State<Shared>, Id(id): Id, _: NoBody) -> Result<Json<Value>> {
    app.blocking(move |app| turned(&id, "resumed", app.store.resume_job(&id)?)).await
}

async fn events(
    State(app): State<Shared>,
    Id(id): Id,
    body::Asked(pairs): body::Asked<Pairs>,
) -> Result<Json<Value>> {
    let paging = Paging::read_all(pairs, EVENTS, RANGE)?;
    app.blocking(move |app| {
        let job = find(app, &id)?;
        let page = app.store.events(&job, paging.after.as_deref(), paging.limit)?;
        let Page { items, has_more } = page.ok_or_else(|| paging.lost("event"))?;
        let data: Vec<Value> = items.iter().map(Event::object).collect();
        Ok(Json(json!({"object": "list", "data": data, "has_more": has_more})))
    })
    .await
}

async fn checkpoints(
    State(app): State<Shared>,
    Id(id): Id,
    body::Asked(pairs): body::Asked<Pairs>,
) -> Result<Json<Value>> {
    let paging = Paging::read_all(pairs, CHECKPOINTS, RANGE)?;
    app.blocking(move |app| {
        let job = find(app, &id)?;
        let page = app.store.checkpoints(&job, paging.after.as_deref(), paging.limit)?;
        let Page { items, has_more } = page.ok_or_else(|| paging.lost("checkpoint"))?;
        Ok(Json(json!({
            "object": "list",
            "data": items.iter().map(|checkpoint| checkpoint.object(&job)).collect::<Vec<_>>(),
            "first_id": items.first().map(|checkpoint| &checkpoint.id),
            "last_id": items.last().map(|checkpoint| &checkpoint.id),
            "has_more": has_more,
        })))
    })
    .await
}

/// What of a job is downloaded: the model that it has made, or that of the checkpoint of the query's `step`.
pub(super) fn step(pairs: Pairs) -> Result<Option<i64>> {
    let mut step = None;
    for (name, value) in pairs {
        match name.as_str() {
            "step" => {
                let parsed: Option<i64> = value.parse().ok();
                step = Some(parsed.ok_or_else(|| {
                    ApiError::field("step", "is not the number of a checkpoint's step")
                })?);
            }
            _ => return Err(unknown(&name)),
        }
    }
    Ok(step)
}

/// The model of a job or of its checkpoint, and what its archive's folder is called.
///
/// # Errors
/// A 404 when there is none.
pub(super) fn made(app: &App, id: &str, step: Option<i64>) -> Result<(Tuned, String)> {
    let job = find(app, id)?;
    let (name, folder) = match step {
        Some(step) => (job.checkpoint_name(step), format!("{}-step-{step}", job.id)),
        None => (job.tuned_name(), job.id.clone()),
    };
    let tuned = app.store.tuned_by_name(&name)?.ok_or_else(|| ApiError::no_model(&name))?;
    Ok((tuned, folder))
}

/// The adapter that a job has made, or that of a checkpoint, as a tar of its folder.
async fn adapter(
    State(app): State<Shared>,
    Id(id): Id,
    body::Asked(pairs): body::Asked<Pairs>,
) -> Result<Response> {
    let step = step(pairs)?;
    let (folder, files) = app
        .blocking(move |app| {
            let (tuned, folder) = made(app, &id, step)?;
            Ok((folder, open(&tuned)?))
        })
        .await?;
    let (length, reader) = archive(&folder, files)?;
    Ok(download(&app, &format!("{folder}.tar"), TAR, length, reader))
}

/// The files of an adapter that are there.
fn open(tuned: &Tuned) -> Result<Vec<Entry>> {
    let mut files = Vec::new();
    for name in [ADAPTER_CONFIG, ADAPTER_WEIGHTS, CHAT_TEMPLATE] {
        match File::open(tuned.folder.join(name)) {
            Ok(file) => files.push(Entry::of(name, file)?),
            // Only an adapter with a template of its own has that.
            Err(error) if error.kind() == io::ErrorKind::NotFound && name == CHAT_TEMPLATE => {}
            Err(error) => return Err(ApiError::internal(error)),
        }
    }
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_is_filtered_by_pairs_or_by_there_being_none() {
        let filter = |query: &[(&str, &str)]| {
            metadata_filter(query.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect())
        };
        assert_eq!(filter(&[]).unwrap(), Some(Vec::new()));
        assert_eq!(filter(&[("metadata[a]", "")]).unwrap(), Some(vec![("a".into(), "".into())]));
        assert_eq!(filter(&[("metadata", "null")]).unwrap(), None);
        for wrong in [
            &[("metadata", "null"), ("metadata[a]", "b")][..],
            &[("metadata", "x")],
            &[("status", "running")],
        ] {
            assert!(filter(wrong).is_err(), "{wrong:?}");
        }
        let of_keys = |count: usize| {
            let pair = |n| (format!("metadata[a{n}]"), "b".to_string());
            metadata_filter((0..count).map(pair).collect())
        };
        assert_eq!(of_keys(PAIRS).unwrap().unwrap().len(), PAIRS);
        assert_eq!(of_keys(PAIRS + 1).unwrap_err().param.as_deref(), Some("metadata"));
        let twice = filter(&[("metadata[a]", "b"), ("metadata[a]", "b")]).unwrap_err();
        assert_eq!(twice.param.as_deref(), Some("metadata[a]"));
    }
}
