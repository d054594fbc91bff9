//! Jobs, their events and their checkpoints, as a person reads them.

use super::{Job, Page, path};
use crate::output::{self, Terminal, grouped, table};
use crate::remote::Client;
use chrono::{DateTime, Local, Utc};
use serde::Deserialize;
use serde_json::{Map, Value};

/// A part of a list of the server's.
#[derive(Deserialize)]
struct List<T> {
    data: Vec<T>,
    #[serde(default)]
    has_more: bool,
}

#[derive(Deserialize)]
struct Event {
    created_at: i64,
    level: String,
    message: String,
}

#[derive(Deserialize)]
struct Checkpoint {
    id: String,
    step_number: i64,
    fine_tuned_model_checkpoint: String,
    metrics: Map<String, Value>,
}

/// A moment as a clock here shows it.
fn clock(seconds: i64) -> String {
    let time = DateTime::from_timestamp(seconds, 0);
    let shown =
        |time: DateTime<Utc>| time.with_timezone(&Local).format("%Y-%m-%d %H:%M").to_string();
    time.map_or_else(|| seconds.to_string(), shown)
}

/// That a list goes on, and how to see more of it.
fn note_more(has_more: bool, last: Option<&str>, terminal: Terminal) {
    if let (true, Some(last)) = (has_more, last) {
        terminal.note(format!("There are more: --after {last}, or a larger --limit"));
    }
}

/// A list of jobs.
pub fn list(client: &Client, page: &Page, terminal: Terminal) -> anyhow::Result<()> {
    let value = client.get(&format!("/v1/fine_tuning/jobs{}", page.query()))?;
    if terminal.json {
        return output::json(&value);
    }
    let List { data, has_more } = client.read::<List<Job>>(&value)?;
    if data.is_empty() {
        terminal.note("there are no jobs; `metal-candle jobs create` starts one");
    }
    let rows = data.iter().map(|job| {
        let model = job.fine_tuned_model.as_ref().unwrap_or(&job.model);
        let row = format!("{:<16}  {}  {model}", job.status(), clock(job.created_at));
        (job.id.as_str(), row)
    });
    output::prose(&table(&rows.collect::<Vec<_>>()))?;
    note_more(has_more, data.last().map(|job| job.id.as_str()), terminal);
    Ok(())
}

/// A job.
pub fn one(value: &Value, job: &Job, terminal: Terminal) -> anyhow::Result<()> {
    if terminal.json {
        return output::json(value);
    }
    output::prose(&table(&rows(job)))
}

fn rows(job: &Job) -> Vec<(&'static str, String)> {
    let method = job.method.as_ref().and_then(|method| {
        let kind = method.get("type")?.as_str()?;
        let options = method.get(kind).and_then(|own| own.get("hyperparameters"));
        let options = options.and_then(Value::as_object).map(pairs).unwrap_or_default();
        Some(format!("{kind}  {options}"))
    });
    let metadata = job.metadata.as_ref().filter(|metadata| !metadata.is_empty());
    let rows = [
        ("job", Some(job.id.clone())),
        ("status", Some(job.status().to_string())),
        ("error", job.failure()),
        ("base", Some(job.model.clone())),
        ("model", job.fine_tuned_model.clone()),
        ("method", method),
        ("training file", Some(job.training_file.clone())),
        ("validation file", job.validation_file.clone()),
        ("result files", (!job.result_files.is_empty()).then(|| job.result_files.join(", "))),
        ("seed", job.seed.map(|seed| seed.to_string())),
        ("trained tokens", job.trained_tokens.map(grouped)),
        ("metadata", metadata.map(pairs)),
        ("created", Some(clock(job.created_at))),
        ("finished", job.finished_at.map(clock)),
        ("ends about", job.estimated_finish.filter(|_| job.finished_at.is_none()).map(clock)),
    ];
    rows.into_iter().filter_map(|(name, value)| Some((name, value?))).collect()
}

/// `name value` for each, with commas between them.
fn pairs(map: &Map<String, Value>) -> String {
    let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_string);
    let pairs: Vec<String> =
        map.iter().map(|(name, value)| format!("{name} {}", word(value))).collect();
    pairs.join(", ")
}

/// What a job has told, in the order of time.
pub fn events(client: &Client, job: &str, page: &Page, terminal: Terminal) -> anyhow::Result<()> {
    let value = client.get(&format!("{}/events{}", path(job), page.query()))?;
    if terminal.json {
        return output::json(&value);
    }
    let List { data, has_more } = client.read::<List<Event>>(&value)?;
    for event in data.iter().rev() {
        let level =
            if event.level == "info" { String::new() } else { format!("{}: ", event.level) };
        output::line(format!("{}  {level}{}", clock(event.created_at), event.message))?;
    }
    if has_more {
        terminal.note("There are earlier ones: a larger --limit shows them");
    }
    Ok(())
}

/// A job's checkpoints.
pub fn checkpoints(
    client: &Client,
    job: &str,
    page: &Page,
    terminal: Terminal,
) -> anyhow::Result<()> {
    let value = client.get(&format!("{}/checkpoints{}", path(job), page.query()))?;
    if terminal.json {
        return output::json(&value);
    }
    let List { data, has_more } = client.read::<List<Checkpoint>>(&value)?;
    if data.is_empty() {
        terminal.note("there are no checkpoints");
    }
    for checkpoint in &data {
        let loss = |name: &str, key: &str| {
            let value = checkpoint.metrics.get(key).and_then(Value::as_f64);
            value.map(|value| format!("  {name} {value:.4}")).unwrap_or_default()
        };
        output::line(format!(
            "step {}{}{}  {}",
            checkpoint.step_number,
            loss("loss", "train_loss"),
            loss("validation loss", "full_valid_loss"),
            checkpoint.fine_tuned_model_checkpoint
        ))?;
    }
    note_more(has_more, data.last().map(|checkpoint| checkpoint.id.as_str()), terminal);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_jobs_rows_say_what_there_is_and_no_more() {
        let job = json!({
            "id": "ftjob-a", "status": "queued", "paused": true, "model": "demo", "created_at": 0,
            "finished_at": null, "estimated_finish": null, "fine_tuned_model": null, "training_file": "file-a",
            "validation_file": null, "seed": 3, "trained_tokens": null, "error": null, "metadata": null,
            "method": {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.1, "n_epochs": "auto"}}},
        });
        let job: Job = serde_json::from_value(job).unwrap();
        let rows = rows(&job);
        let names: Vec<&str> = rows.iter().map(|(name, _)| *name).collect();
        assert_eq!(names, ["job", "status", "base", "method", "training file", "seed", "created"]);
        assert_eq!(rows[1].1, "paused");
        assert_eq!(rows[3].1, "dpo  beta 0.1, n_epochs auto");
    }
}
