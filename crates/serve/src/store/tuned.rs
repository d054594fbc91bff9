//! The models that jobs have made.

use super::{Store, events, jobs};
use metal_candle::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS};
use metal_candle::{Error, Result, files};
use rusqlite::Connection;
use std::path::{Path, PathBuf};

/// A model that a job has made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tuned {
    /// `ft:BASE:ORGANIZATION:SUFFIX:ID`, of a checkpoint with `:ckpt-step-N` after it.
    pub name: String,
    /// The model that it adapts.
    pub base: String,
    /// Its folder, as [`Adapter::load`](metal_candle::adapter::Adapter::load) reads it.
    pub folder: PathBuf,
    /// When it was made, in seconds since 1970.
    pub created: i64,
    /// The job that made it.
    pub job: String,
}

/// A model and, of a checkpoint, its step.
struct Found {
    tuned: Tuned,
    step: Option<i64>,
}

/// Models, those of jobs and those of checkpoints.
const MODELS: &str = "
    SELECT id, base, suffix, finished_at AS created, NULL AS step, number, 0 AS place FROM jobs
        WHERE status = 'succeeded' AND NOT model_removed
    UNION ALL
    SELECT jobs.id, jobs.base, jobs.suffix, checkpoints.created_at, checkpoints.step, jobs.number, checkpoints.number
        FROM checkpoints JOIN jobs ON jobs.id = checkpoints.job WHERE NOT checkpoints.removed
";

impl Store {
    /// All models, in the order of their jobs.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn tuned(&self) -> Result<Vec<Tuned>> {
        let found = self.read(|connection| self.models(connection, None))?;
        Ok(found.into_iter().map(|found| found.tuned).collect())
    }

    /// The model of this name.
    ///
    /// # Errors
    /// When the database cannot be read.
    pub fn tuned_by_name(&self, name: &str) -> Result<Option<Tuned>> {
        Ok(self.model(name)?.map(|found| found.tuned))
    }

    /// Removes a model with its files; false where there is none.
    ///
    /// # Errors
    /// [`Error::Option`] while a job needs it; when the database or the files cannot be changed.
    pub fn remove_tuned(&self, name: &str) -> Result<bool> {
        let Some(Found { tuned, step }) = self.model(name)? else { return Ok(false) };
        let removed = self.change(|transaction| {
            if let Some(user) = jobs::user_of_model(transaction, name)? {
                return Ok(Err(user));
            }
            let Some(step) = step else {
                return transaction
                    .execute("UPDATE jobs SET model_removed = 1 WHERE id = ?1", [&tuned.job])
                    .map(Ok);
            };
            match events::job_with(transaction, &tuned.job, step)? {
                None => Ok(Ok(0)),
                // Its run may go on from here.
                Some(job) if !job.status.has_ended() => Ok(Err(job.id)),
                Some(job) => events::remove(transaction, &job.id, step).map(Ok),
            }
        })?;
        match removed {
            Err(job) => Err(Error::option(
                "model",
                format!("is needed by the job {job}; wait for its end, or cancel it"),
            )),
            Ok(0) => Ok(false),
            Ok(_) => {
                match step {
                    Some(_) => files::remove_folder_atomic(&tuned.folder)?,
                    None => remove_adapter(&tuned.folder)?,
                }
                Ok(true)
            }
        }
    }

    fn model(&self, name: &str) -> Result<Option<Found>> {
        // The identifier in the name is the start of one job's, or of a few.
        let letters = name.split(":ckpt-step-").next().and_then(|name| name.rsplit(':').next());
        let letters = letters.filter(|letters| {
            !letters.is_empty() && letters.bytes().all(|byte| byte.is_ascii_alphanumeric())
        });
        let Some(letters) = letters else { return Ok(None) };
        let found = self.read(|connection| self.models(connection, Some(letters)))?;
        Ok(found.into_iter().find(|found| found.tuned.name == name))
    }

    /// Models of jobs whose identifier begins with these letters.
    fn models(
        &self,
        connection: &Connection,
        letters: Option<&str>,
    ) -> rusqlite::Result<Vec<Found>> {
        let sql = format!(
            "SELECT id, base, suffix, created, step FROM ({MODELS}) WHERE id LIKE ?1 ORDER BY number, place"
        );
        let mut statement = connection.prepare(&sql)?;
        let like = format!("{}{}%", jobs::ID, letters.unwrap_or_default());
        let found = statement.query_map([like], |row| {
            let (job, base, suffix): (String, String, Option<String>) =
                (row.get(0)?, row.get(1)?, row.get(2)?);
            let step: Option<i64> = row.get(4)?;
            let mut name = jobs::tuned_name(&job, &base, suffix.as_deref());
            let mut folder = self.runs().join(&job);
            if let Some(step) = step {
                name.push_str(&format!(":ckpt-step-{step}"));
                folder = checkpoint_folder(&folder, step);
            }
            let created = row.get(3)?;
            Ok(Found { tuned: Tuned { name, base, folder, created, job }, step })
        })?;
        found.collect()
    }
}

/// The folder of a checkpoint of a run.
pub(crate) fn checkpoint_folder(run: &Path, step: i64) -> PathBuf {
    run.join("checkpoints").join(format!("step-{step:08}"))
}

/// Removes an adapter's files from a run's folder, whose checkpoints stay. The configuration goes first: without it
/// there is no adapter.
fn remove_adapter(folder: &Path) -> Result<()> {
    for name in [ADAPTER_CONFIG, ADAPTER_WEIGHTS, metal_candle::text::CHAT_TEMPLATE] {
        let path = folder.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(&path)(error));
            }
            _ => {}
        }
    }
    Ok(())
}
