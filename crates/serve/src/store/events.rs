//! What happened to jobs, and their checkpoints.
//!
//! What a training run tells has a place in it: its step, and what of the step it is. A run that goes on from a
//! checkpoint tells again what came after, so that is removed first, and the events are those of a run that never
//! stopped.

use super::jobs::{self, Job, json, to_json};
use super::{Page, Store};
use crate::app::{new_id, now};
use metal_candle::Result;
use metal_candle::train::{Phase, Position};
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use serde_json::{Map, Value};
use std::borrow::Cow;
use std::collections::BTreeSet;

const EVENT: &str = "ftevent-";
const CHECKPOINT: &str = "ftckpt-";

/// How much an event matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Level {
    Info,
    Warn,
    Error,
}

impl Level {
    fn name(self) -> &'static str {
        match self {
            Self::Info => "info",
            Self::Warn => "warn",
            Self::Error => "error",
        }
    }
}

/// What of a step an event tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Skipped,
    Trained,
    Evaluated,
    /// The sample of this number.
    Sampled(usize),
    Saved,
}

/// What the names of samples' places begin with.
const SAMPLED: &str = "sampled-";

impl Place {
    fn name(self) -> Cow<'static, str> {
        Cow::Borrowed(match self {
            Self::Skipped => "skipped",
            Self::Trained => "trained",
            Self::Evaluated => "evaluated",
            Self::Sampled(number) => return Cow::Owned(format!("{SAMPLED}{number}")),
            Self::Saved => "saved",
        })
    }
}

/// An event that is to be told.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NewEvent {
    /// How grave it is.
    pub(crate) level: Level,
    /// What it says.
    pub(crate) message: String,
    /// Figures, if it has any.
    pub(crate) data: Option<Map<String, Value>>,
    /// Its step, and what of it.
    pub(crate) place: Option<(i64, Place)>,
}

impl NewEvent {
    /// A message.
    pub fn of(level: Level, message: impl Into<String>) -> Self {
        Self { level, message: message.into(), data: None, place: None }
    }

    /// A message that nobody has to worry about.
    pub fn told(message: impl Into<String>) -> Self {
        Self::of(Level::Info, message)
    }

    /// The same, as what a run tells of a step.
    pub fn at(mut self, step: i64, place: Place) -> Self {
        self.place = Some((step, place));
        self
    }

    /// The same, with figures.
    pub fn with(mut self, data: Map<String, Value>) -> Self {
        self.data = Some(data);
        self
    }
}

/// An event.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Event {
    pub id: String,
    pub created: i64,
    pub level: String,
    pub message: String,
    pub data: Option<Map<String, Value>>,
    /// Its step, and what of it.
    pub place: Option<(i64, String)>,
}

impl Event {
    const COLUMNS: &str = "id, created_at, level, message, data, step, place";

    fn read(row: &Row) -> rusqlite::Result<Self> {
        let (step, place): (Option<i64>, Option<String>) = (row.get(5)?, row.get(6)?);
        Ok(Self {
            id: row.get(0)?,
            created: row.get(1)?,
            level: row.get(2)?,
            message: row.get(3)?,
            data: json(row, 4)?,
            place: step.zip(place),
        })
    }

    /// Whether it tells of a text and not of figures.
    pub fn is_sample(&self) -> bool {
        self.place.as_ref().is_some_and(|(_, place)| place.starts_with(SAMPLED))
    }

    /// OpenAI's object.
    pub fn object(&self) -> Value {
        let has_figures = self.data.is_some() && !self.is_sample();
        serde_json::json!({
            "object": "fine_tuning.job.event",
            "id": self.id,
            "created_at": self.created,
            "level": self.level,
            "message": self.message,
            "type": if has_figures { "metrics" } else { "message" },
            "data": self.data.clone().unwrap_or_default(),
        })
    }
}

/// A checkpoint that can be used.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Checkpoint {
    pub id: String,
    pub created: i64,
    pub step: i64,
    pub metrics: Map<String, Value>,
}

impl Checkpoint {
    fn read(row: &Row) -> rusqlite::Result<Self> {
        let metrics: Option<Map<String, Value>> = json(row, 3)?;
        Ok(Self {
            id: row.get(0)?,
            created: row.get(1)?,
            step: row.get(2)?,
            metrics: metrics.unwrap_or_default(),
        })
    }

    /// OpenAI's object.
    pub fn object(&self, job: &Job) -> Value {
        serde_json::json!({
            "object": "fine_tuning.job.checkpoint",
            "id": self.id,
            "created_at": self.created,
            "fine_tuning_job_id": job.id,
            "fine_tuned_model_checkpoint": job.checkpoint_name(self.step),
            "step_number": self.step,
            "metrics": self.metrics,
        })
    }
}

impl Store {
    /// The events of a job, the newest first; `None` where it has no event `after`.
    pub(crate) fn events(
        &self,
        job: &Job,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Option<Page<Event>>> {
        let sql = format!("SELECT {} FROM events WHERE job = ?1", Event::COLUMNS);
        self.read(|connection| list(connection, "events", &sql, job, after, limit, Event::read))
    }

    /// The checkpoints of a job, the newest first; `None` where it has no checkpoint `after`.
    pub(crate) fn checkpoints(
        &self,
        job: &Job,
        after: Option<&str>,
        limit: usize,
    ) -> Result<Option<Page<Checkpoint>>> {
        let sql =
            "SELECT id, created_at, step, metrics FROM checkpoints WHERE job = ?1 AND NOT removed";
        self.read(|connection| {
            list(connection, "checkpoints", sql, job, after, limit, Checkpoint::read)
        })
    }

    /// What a job's run has told, in its order.
    pub(crate) fn run_events(&self, job: &Job) -> Result<Vec<Event>> {
        self.read(|connection| {
            let sql = format!(
                "SELECT {} FROM events WHERE job = ?1 AND step IS NOT NULL ORDER BY step, number",
                Event::COLUMNS
            );
            let mut statement = connection.prepare(&sql)?;
            statement.query_map([&job.id], Event::read)?.collect()
        })
    }

    /// Tells an event of a job's run, and when that may be at its end.
    pub(crate) fn tell(&self, job: &Job, event: NewEvent, finish: Option<i64>) -> Result<()> {
        self.change(|transaction| {
            insert(transaction, &job.id, &[event])?;
            if finish.is_some() {
                transaction.execute(
                    "UPDATE jobs SET estimated_finish = ?2 WHERE id = ?1 AND status = 'running'",
                    params![job.id, finish],
                )?;
            }
            Ok(())
        })
    }

    /// Tells of a checkpoint, and forgets those whose step is none of `there`. One that was saved before its evaluation is
    /// told of again after it, with more figures.
    pub(crate) fn add_checkpoint(
        &self,
        job: &Job,
        step: i64,
        metrics: &Map<String, Value>,
        there: &BTreeSet<i64>,
    ) -> Result<()> {
        self.change(|transaction| {
            transaction.execute(
                "INSERT INTO checkpoints (id, job, created_at, step, metrics) VALUES (?1, ?2, ?3, ?4, ?5) \
                 ON CONFLICT (job, step) DO UPDATE SET metrics = excluded.metrics, removed = 0",
                params![new_id(CHECKPOINT), job.id, now(), step, to_json(metrics)?],
            )?;
            let event = NewEvent::told(format!("Checkpoint created at step {step}"));
            insert(transaction, &job.id, &[event.at(step, Place::Saved)])?;
            transaction.execute("UPDATE jobs SET deaths = 0 WHERE id = ?1", [&job.id])?;
            for known in steps(transaction, &job.id)? {
                if !there.contains(&known) {
                    remove(transaction, &job.id, known)?;
                }
            }
            Ok(())
        })
    }

    /// The steps of the checkpoints that are told of.
    pub(crate) fn checkpoint_steps(&self, job: &Job) -> Result<BTreeSet<i64>> {
        self.read(|connection| steps(connection, &job.id))
    }

    /// Forgets what a job's run has told after a position, from which it goes on.
    pub(crate) fn rewind(&self, job: &Job, position: Position) -> Result<()> {
        let step = i64::try_from(position.step).unwrap_or(i64::MAX);
        self.change(|transaction| {
            transaction.execute(
                "DELETE FROM events WHERE job = ?1 AND (step > ?2 OR (step = ?2 AND \
                 ((place = ?3 AND ?4) OR (place LIKE ?5 AND ?6))))",
                params![
                    job.id,
                    step,
                    Place::Evaluated.name(),
                    position.phase < Phase::Evaluated,
                    format!("{SAMPLED}%"),
                    position.phase < Phase::Sampled,
                ],
            )?;
            transaction.execute(
                "DELETE FROM checkpoints WHERE job = ?1 AND step > ?2",
                params![job.id, step],
            )?;
            Ok(())
        })
    }
}

/// What of one job comes before the row `after`, the newest first.
fn list<T>(
    connection: &Connection,
    table: &str,
    select: &str,
    job: &Job,
    after: Option<&str>,
    limit: usize,
    read: fn(&Row) -> rusqlite::Result<T>,
) -> rusqlite::Result<Option<Page<T>>> {
    let start: Option<i64> = match after {
        None => None,
        Some(id) => {
            let sql = format!("SELECT number FROM {table} WHERE job = ?1 AND id = ?2");
            let found = connection.query_row(&sql, [&job.id, id], |row| row.get(0)).optional()?;
            if found.is_none() {
                return Ok(None);
            }
            found
        }
    };
    let sql = format!("{select} AND (?2 IS NULL OR number < ?2) ORDER BY number DESC LIMIT ?3");
    let mut statement = connection.prepare(&sql)?;
    let found = statement.query_map(params![job.id, start, limit as i64 + 1], read)?;
    Ok(Some(Page::new(found.collect::<rusqlite::Result<_>>()?, limit)))
}

/// Adds events; those of a place that is taken were told before.
pub(super) fn insert(
    transaction: &Transaction,
    job: &str,
    events: &[NewEvent],
) -> rusqlite::Result<()> {
    for NewEvent { level, message, data, place } in events {
        transaction.execute(
            "INSERT OR IGNORE INTO events (id, job, created_at, level, message, data, step, place) \
             VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)",
            params![
                new_id(EVENT),
                job,
                now(),
                level.name(),
                message,
                data.as_ref().map(to_json).transpose()?,
                place.map(|(step, _)| step),
                place.map(|(_, place)| place.name()),
            ],
        )?;
    }
    Ok(())
}

/// Adds a message unless the job has one of this name.
pub(super) fn insert_once(
    transaction: &Transaction,
    job: &str,
    name: &str,
    message: &str,
) -> rusqlite::Result<()> {
    transaction.execute(
        "INSERT INTO events (id, job, created_at, level, message, place) SELECT ?1, ?2, ?3, ?4, ?5, ?6 \
         WHERE NOT EXISTS (SELECT 1 FROM events WHERE job = ?2 AND place = ?6)",
        params![new_id(EVENT), job, now(), Level::Info.name(), message, name],
    )?;
    Ok(())
}

fn steps(connection: &Connection, job: &str) -> rusqlite::Result<BTreeSet<i64>> {
    let mut statement =
        connection.prepare("SELECT step FROM checkpoints WHERE job = ?1 AND NOT removed")?;
    statement.query_map([job], |row| row.get(0))?.collect()
}

/// Forgets a checkpoint, which stays known as one that was there.
pub(super) fn remove(transaction: &Transaction, job: &str, step: i64) -> rusqlite::Result<usize> {
    transaction.execute(
        "UPDATE checkpoints SET removed = 1 WHERE job = ?1 AND step = ?2 AND NOT removed",
        params![job, step],
    )
}

/// The job of a checkpoint that is there.
pub(super) fn job_with(
    transaction: &Transaction,
    id: &str,
    step: i64,
) -> rusqlite::Result<Option<Job>> {
    match steps(transaction, id)?.contains(&step) {
        true => jobs::find(transaction, id),
        false => Ok(None),
    }
}
