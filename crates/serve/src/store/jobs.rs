//! Jobs: what was asked for, how far each is, and every change of its status with the events that tell of it.
//!
//! The status in the database is what holds. Those who ask change it at once, and the thread that works on the job looks
//! at it again when it has stopped.

use super::events::{self, Level, NewEvent};
use super::files::{self, NewFile, Purpose};
use super::{JOBS, Page, Store};
use crate::app::{new_id, now};
use crate::jobs::{Hyperparameters, Plan};
use metal_candle::Result;
use rusqlite::types::Type;
use rusqlite::{Connection, OptionalExtension, Row, Transaction, params};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// How identifiers of jobs begin.
pub(super) const ID: &str = "ftjob-";
/// Letters of a job's identifier in the name of its model.
const LETTERS: usize = 8;
/// How often a server may die over a job before its next checkpoint. More are no accidents: there is too little memory.
const MOST_DEATHS: i64 = 20;
/// Who trains, in the names of models.
pub(crate) const ORGANIZATION: &str = "metal-candle";
const COLUMNS: &str = "number, id, created_at, finished_at, status, base, model, suffix, training_file, validation_file, \
                       seed, metadata, hyperparameters, plan, trained_tokens, estimated_finish, error, result_file";

/// How far a job is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Status {
    /// Its data are to be looked at.
    ValidatingFiles,
    /// It waits for its turn.
    Queued,
    /// It is trained.
    Running,
    /// It waits until somebody resumes it.
    Paused,
    /// There is a model.
    Succeeded,
    /// There is an error.
    Failed,
    /// Somebody has cancelled it.
    Cancelled,
}

impl Status {
    const ALL: [Self; 7] = [
        Self::ValidatingFiles,
        Self::Queued,
        Self::Running,
        Self::Paused,
        Self::Succeeded,
        Self::Failed,
        Self::Cancelled,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::ValidatingFiles => "validating_files",
            Self::Queued => "queued",
            Self::Running => "running",
            Self::Paused => "paused",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }

    fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.name() == name)
    }

    /// Whether nothing follows.
    pub fn has_ended(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

/// Why a job has failed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct JobError {
    /// A word for programs.
    pub code: String,
    /// What was found and what was expected.
    pub message: String,
    /// The field of the request that was wrong.
    pub param: Option<String>,
}

/// A job that is asked for.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct NewJob {
    /// The server's base.
    pub base: String,
    /// What is trained: the base, or a fine-tuned model of it.
    pub model: String,
    pub suffix: Option<String>,
    pub training_file: String,
    pub validation_file: Option<String>,
    pub seed: i64,
    pub metadata: Option<BTreeMap<String, String>>,
    pub hyperparameters: Hyperparameters,
}

/// A job.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Job {
    number: i64,
    pub id: String,
    pub created: i64,
    pub finished: Option<i64>,
    pub status: Status,
    pub asked: NewJob,
    /// What its data have decided.
    pub plan: Option<Plan>,
    pub trained_tokens: Option<i64>,
    pub estimated_finish: Option<i64>,
    pub error: Option<JobError>,
    pub result_file: Option<String>,
}

impl Job {
    fn read(row: &Row) -> rusqlite::Result<Self> {
        let status: String = row.get(4)?;
        let asked = NewJob {
            base: row.get(5)?,
            model: row.get(6)?,
            suffix: row.get(7)?,
            training_file: row.get(8)?,
            validation_file: row.get(9)?,
            seed: row.get(10)?,
            metadata: json(row, 11)?,
            hyperparameters: json(row, 12)?.ok_or_else(|| files::unknown(12, "null"))?,
        };
        Ok(Self {
            number: row.get(0)?,
            id: row.get(1)?,
            created: row.get(2)?,
            finished: row.get(3)?,
            status: Status::named(&status).ok_or_else(|| files::unknown(4, &status))?,
            asked,
            plan: json(row, 13)?,
            trained_tokens: row.get(14)?,
            estimated_finish: row.get(15)?,
            error: json(row, 16)?,
            result_file: row.get(17)?,
        })
    }

    /// The name that its model has or will have: `ft:BASE:ORGANIZATION:SUFFIX:ID`.
    pub fn tuned_name(&self) -> String {
        tuned_name(&self.id, &self.asked.base, self.asked.suffix.as_deref())
    }

    /// The name of the model of a checkpoint.
    pub fn checkpoint_name(&self, step: i64) -> String {
        format!("{}:ckpt-step-{step}", self.tuned_name())
    }
}

/// The name of a job's model.
pub(super) fn tuned_name(id: &str, base: &str, suffix: Option<&str>) -> String {
    let letters: String = id.chars().skip(ID.len()).take(LETTERS).collect();
    format!("ft:{base}:{ORGANIZATION}:{}:{letters}", suffix.unwrap_or_default())
}

/// The value of a column that holds JSON.
pub(super) fn json<T: DeserializeOwned>(row: &Row, column: usize) -> rusqlite::Result<Option<T>> {
    let text: Option<String> = row.get(column)?;
    let read = text.map(|text| serde_json::from_str(&text)).transpose();
    read.map_err(|error| {
        rusqlite::Error::FromSqlConversionFailure(column, Type::Text, Box::new(error))
    })
}

/// The JSON of a value for a column.
pub(super) fn to_json(value: &impl Serialize) -> rusqlite::Result<String> {
    serde_json::to_string(value)
        .map_err(|error| rusqlite::Error::ToSqlConversionFailure(Box::new(error)))
}

/// Why a job is not what was asked of it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// There is none.
    Missing,
    /// It is in no state for it.
    Is(Status),
}

/// Whether the thread that trains may begin a job.
#[derive(Debug, PartialEq)]
pub(crate) enum Started {
    Yes,
    /// Somebody has paused or cancelled it.
    No,
    /// Servers die over it. How often.
    Deadly(i64),
}

impl Store {
    /// Adds a job; or names the parameter whose file is not there.
    pub(crate) fn add_job(&self, new: &NewJob) -> Result<std::result::Result<Job, &'static str>> {
        let id = new_id(ID);
        let added = self.change(|transaction| {
            for (param, file) in [
                ("training_file", Some(&new.training_file)),
                ("validation_file", new.validation_file.as_ref()),
            ] {
                let Some(file) = file else { continue };
                let known = transaction
                    .query_row("SELECT 1 FROM files WHERE id = ?1", [file], |_| Ok(()))
                    .optional()?;
                if known.is_none() {
                    return Ok(Err(param));
                }
            }
            transaction.execute(
                "INSERT INTO jobs (id, created_at, status, base, model, suffix, training_file, validation_file, seed, \
                 metadata, hyperparameters) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11)",
                params![
                    id,
                    now(),
                    Status::ValidatingFiles.name(),
                    new.base,
                    new.model,
                    new.suffix,
                    new.training_file,
                    new.validation_file,
                    new.seed,
                    new.metadata.as_ref().map(to_json).transpose()?,
                    to_json(&new.hyperparameters)?,
                ],
            )?;
            let mut events = vec![NewEvent::told(format!("Created fine-tuning job: {id}"))];
            events.push(NewEvent::told(format!("Validating training file: {}", new.training_file)));
            if let Some(file) = &new.validation_file {
                events.push(NewEvent::told(format!("Validating validation file: {file}")));
            }
            events::insert(transaction, &id, &events)?;
            find(transaction, &id).map(|job| job.ok_or("training_file"))
        })?;
        self.signals.wake();
        Ok(added)
    }

    /// The job of this identifier.
    pub(crate) fn job(&self, id: &str) -> Result<Option<Job>> {
        self.read(|connection| find(connection, id))
    }

    /// Jobs, the newest first; `None` where there is no job `after`. `metadata` are pairs that a job has, or `None` for
    /// jobs without any.
    pub(crate) fn list_jobs(
        &self,
        after: Option<&str>,
        limit: usize,
        metadata: Option<&[(String, String)]>,
    ) -> Result<Option<Page<Job>>> {
        self.read(|connection| {
            let start = match after {
                None => None,
                Some(id) => match find(connection, id)? {
                    Some(job) => Some(job.number),
                    None => return Ok(None),
                },
            };
            let wanted = to_json(&metadata.unwrap_or_default())?;
            let sql = format!(
                "SELECT {COLUMNS} FROM jobs WHERE (?1 IS NULL OR number < ?1) AND (?2 OR metadata IS NULL) \
                 AND NOT EXISTS (SELECT 1 FROM json_each(?3) AS wanted WHERE NOT EXISTS (\
                 SELECT 1 FROM json_each(jobs.metadata) AS pair WHERE pair.key = wanted.value ->> 0 \
                 AND pair.value = wanted.value ->> 1)) ORDER BY number DESC LIMIT ?4"
            );
            let mut statement = connection.prepare(&sql)?;
            let values = params![start, metadata.is_some(), wanted, limit as i64 + 1];
            let found = statement.query_map(values, Job::read)?;
            Ok(Some(Page::new(found.collect::<rusqlite::Result<_>>()?, limit)))
        })
    }

    /// The oldest job of this base that has one of these statuses.
    pub(crate) fn next_job(&self, base: &str, statuses: [Status; 2]) -> Result<Option<Job>> {
        self.read(|connection| {
            let sql = format!(
                "SELECT {COLUMNS} FROM jobs WHERE base = ?1 AND status IN (?2, ?3) ORDER BY number LIMIT 1"
            );
            let [first, second] = statuses.map(Status::name);
            connection.query_row(&sql, [base, first, second], Job::read).optional()
        })
    }

    /// Ends a job on somebody's wish.
    pub(crate) fn cancel_job(&self, id: &str) -> Result<std::result::Result<Job, Refusal>> {
        self.turn(id, |job| match job.status {
            status if status.has_ended() => Err(Refusal::Is(status)),
            _ => Ok((Status::Cancelled, "Fine-tuning job cancelled")),
        })
    }

    /// Lets a job wait until it is resumed.
    pub(crate) fn pause_job(&self, id: &str) -> Result<std::result::Result<Job, Refusal>> {
        self.turn(id, |job| match job.status {
            Status::ValidatingFiles | Status::Queued | Status::Running => {
                Ok((Status::Paused, "Fine-tuning job paused"))
            }
            status => Err(Refusal::Is(status)),
        })
    }

    /// Lets a paused job go on when it is its turn.
    pub(crate) fn resume_job(&self, id: &str) -> Result<std::result::Result<Job, Refusal>> {
        self.turn(id, |job| match (job.status, &job.plan) {
            (Status::Paused, None) => Ok((Status::ValidatingFiles, "Fine-tuning job resumed")),
            (Status::Paused, Some(_)) => Ok((Status::Queued, "Fine-tuning job resumed")),
            (status, _) => Err(Refusal::Is(status)),
        })
    }

    /// Gives a job the status that `decide` says, with an event.
    fn turn(
        &self,
        id: &str,
        decide: impl FnOnce(&Job) -> std::result::Result<(Status, &'static str), Refusal>,
    ) -> Result<std::result::Result<Job, Refusal>> {
        let turned = self.change(|transaction| {
            let Some(job) = find(transaction, id)? else { return Ok(Err(Refusal::Missing)) };
            let (status, message) = match decide(&job) {
                Ok(decided) => decided,
                Err(refusal) => return Ok(Err(refusal)),
            };
            transaction.execute(
                "UPDATE jobs SET status = ?2, finished_at = ?3, estimated_finish = NULL WHERE id = ?1",
                params![id, status.name(), status.has_ended().then(now)],
            )?;
            events::insert(transaction, id, &[NewEvent::told(message)])?;
            Ok(find(transaction, id)?.ok_or(Refusal::Missing))
        })?;
        self.signals.stop_job(id);
        self.signals.wake();
        Ok(turned)
    }

    /// Puts a job whose data are good into the queue, unless somebody has turned it meanwhile.
    pub(crate) fn queue_job(
        &self,
        id: &str,
        hyperparameters: &Hyperparameters,
        plan: &Plan,
        warnings: &[String],
    ) -> Result<()> {
        self.change(|transaction| {
            let queued = transaction.execute(
                "UPDATE jobs SET status = 'queued', hyperparameters = ?2, plan = ?3 \
                 WHERE id = ?1 AND status = 'validating_files'",
                params![id, to_json(hyperparameters)?, to_json(plan)?],
            )?;
            if queued == 0 {
                return Ok(());
            }
            let mut events: Vec<_> =
                warnings.iter().map(|warning| NewEvent::of(Level::Warn, warning)).collect();
            events.push(NewEvent::told("Files validated, moving job to queued state"));
            events::insert(transaction, id, &events)
        })?;
        self.signals.wake();
        Ok(())
    }

    /// Begins to train a job, or goes on with one over which a server has died.
    pub(crate) fn start_job(&self, id: &str) -> Result<Started> {
        self.change(|transaction| {
            let before: Option<String> = transaction
                .query_row("SELECT status FROM jobs WHERE id = ?1", [id], |row| row.get(0))
                .optional()?;
            match before.as_deref().and_then(Status::named) {
                Some(Status::Running) => {
                    let deaths: i64 = transaction.query_row(
                        "UPDATE jobs SET deaths = deaths + 1 WHERE id = ?1 RETURNING deaths",
                        [id],
                        |row| row.get(0),
                    )?;
                    return Ok(match deaths > MOST_DEATHS {
                        true => Started::Deadly(deaths),
                        false => Started::Yes,
                    });
                }
                Some(Status::Queued) => {}
                _ => return Ok(Started::No),
            }
            transaction.execute("UPDATE jobs SET status = 'running' WHERE id = ?1", [id])?;
            events::insert_once(transaction, id, "started", "Fine-tuning job started")?;
            Ok(Started::Yes)
        })
    }

    /// Lets a job that is trained wait until it is resumed, and says why; unless somebody has turned it meanwhile.
    pub(crate) fn set_aside(&self, id: &str, reason: &str) -> Result<()> {
        self.change(|transaction| {
            let paused = transaction.execute(
                "UPDATE jobs SET status = 'paused', deaths = 0, estimated_finish = NULL \
                 WHERE id = ?1 AND status = 'running'",
                [id],
            )?;
            match paused {
                0 => Ok(()),
                _ => events::insert(transaction, id, &[NewEvent::of(Level::Warn, reason)]),
            }
        })
    }

    /// All jobs that have ended.
    pub(crate) fn ended_jobs(&self) -> Result<Vec<Job>> {
        self.read(|connection| {
            let sql = format!(
                "SELECT {COLUMNS} FROM jobs WHERE status IN ('succeeded', 'failed', 'cancelled') ORDER BY number"
            );
            let mut statement = connection.prepare(&sql)?;
            statement.query_map([], Job::read)?.collect()
        })
    }

    /// Puts a job back whose training stopped as the server ends.
    pub(crate) fn put_back(&self, id: &str) -> Result<()> {
        self.change(|transaction| {
            let sql = "UPDATE jobs SET status = 'queued', deaths = 0 WHERE id = ?1 AND status = 'running'";
            transaction.execute(sql, [id]).map(|_| ())
        })
    }

    /// Ends a job with an error, unless it has ended or was paused meanwhile.
    pub(crate) fn fail_job(&self, id: &str, error: &JobError) -> Result<()> {
        self.change(|transaction| {
            let failed = transaction.execute(
                "UPDATE jobs SET status = 'failed', finished_at = ?2, estimated_finish = NULL, error = ?3 \
                 WHERE id = ?1 AND status IN ('validating_files', 'queued', 'running')",
                params![id, now(), to_json(error)?],
            )?;
            if failed == 0 {
                return Ok(());
            }
            let message = format!("The job failed: {}", error.message);
            events::insert(transaction, id, &[NewEvent::of(Level::Error, message)])
        })
    }

    /// Ends a job that has its model, with its results; false when somebody has turned it meanwhile.
    pub(crate) fn finish_job(
        &self,
        job: &Job,
        trained_tokens: i64,
        results: NewFile,
        results_name: &str,
    ) -> Result<bool> {
        let file = self.place(results, results_name, Purpose::FineTuneResults)?;
        let path = self.file_path(&file);
        let finished = self.change(|transaction| {
            let finished = transaction.execute(
                "UPDATE jobs SET status = 'succeeded', finished_at = ?2, estimated_finish = NULL, trained_tokens = ?3, \
                 result_file = ?4 WHERE id = ?1 AND status = 'running'",
                params![job.id, now(), trained_tokens, file.id],
            )?;
            if finished == 0 {
                return Ok(false);
            }
            files::insert(transaction, &file)?;
            let created = format!("New fine-tuned model created: {}", job.tuned_name());
            let events = [created, "The job has successfully completed".into()];
            events::insert(transaction, &job.id, &events.map(NewEvent::told))?;
            Ok(true)
        })?;
        if !finished {
            std::fs::remove_file(&path).map_err(metal_candle::Error::io(&path))?;
        }
        Ok(finished)
    }

    /// Where the runs of jobs are.
    pub(super) fn runs(&self) -> std::path::PathBuf {
        self.folder.join(JOBS)
    }
}

pub(super) fn find(connection: &Connection, id: &str) -> rusqlite::Result<Option<Job>> {
    let sql = format!("SELECT {COLUMNS} FROM jobs WHERE id = ?1");
    connection.query_row(&sql, [id], Job::read).optional()
}

/// The number of jobs that have not ended and go on from a model.
pub(super) fn user_of_model(
    transaction: &Transaction,
    name: &str,
) -> rusqlite::Result<Option<String>> {
    transaction
        .query_row(
            "SELECT id FROM jobs WHERE model = ?1 \
             AND status IN ('validating_files', 'queued', 'running', 'paused')",
            [name],
            |row| row.get(0),
        )
        .optional()
}
