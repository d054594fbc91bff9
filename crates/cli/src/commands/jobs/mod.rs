//! `jobs`: fine-tuning on a running server.

mod create;
mod download;
mod show;
mod watch;

use crate::errors::SUCCESS;
use crate::interrupt;
use crate::output::{self, Terminal};
use crate::remote::{Access, Client, Failure};
use clap::{Args, Subcommand};
use serde::Deserialize;
use serde_json::{Map, Value};

const EXAMPLES: &str = "\
Examples:
  metal-candle jobs create --training-file train.jsonl --validation-file valid.jsonl --suffix mine
  metal-candle jobs create --training-file pairs.jsonl --method dpo --beta 0.2 --detach
  metal-candle jobs list
  metal-candle jobs watch ftjob-abc
  metal-candle jobs download ftjob-abc --output my-adapter
  metal-candle jobs list --server https://models.example.org --json

They ask a server that `metal-candle serve` has started. METAL_CANDLE_SERVER and METAL_CANDLE_API_KEY name it and the key \
once for all. Ctrl-C ends create and watch, but never the job.";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Print the server's objects as they are, in JSON
    #[arg(long, global = true)]
    json: bool,
    /// The server's address [default: METAL_CANDLE_SERVER, or else http://127.0.0.1:8080]
    #[arg(long, global = true, value_name = "URL", help_heading = "Server")]
    server: Option<String>,
    #[command(flatten)]
    access: Access,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Upload data, start a job on them, and follow it to its end
    Create(create::Create),
    /// Show the jobs, the newest first
    List(Page),
    /// Show a job
    Show(Which),
    /// Follow a job to its end
    Watch(Which),
    /// Show what a job has told
    Events(PageOf),
    /// Show a job's checkpoints, each of which is a model
    Checkpoints(PageOf),
    /// Let a job wait: it stops after its step, with a checkpoint
    Pause(Which),
    /// Let a paused job go on
    Resume(Which),
    /// End a job for good; its checkpoints stay
    Cancel(Which),
    /// Fetch the adapter that a job has made, or that of one of its checkpoints
    Download(download::Download),
}

/// A job.
#[derive(Debug, Args)]
struct Which {
    /// The job's id
    #[arg(value_parser = id)]
    job: String,
}

/// A part of a list.
#[derive(Debug, Args)]
struct Page {
    /// How many, at most
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: u32,
    /// Those that follow this id in the list
    #[arg(long, value_name = "ID", value_parser = id)]
    after: Option<String>,
}

impl Page {
    fn query(&self) -> String {
        let after = self.after.iter().map(|after| format!("&after={after}"));
        format!("?limit={}{}", self.limit, after.collect::<String>())
    }
}

#[derive(Debug, Args)]
struct PageOf {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    page: Page,
}

/// An identifier, which is put into a path.
fn id(text: &str) -> Result<String, String> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    match !text.is_empty() && text.len() <= 128 && text.bytes().all(is_plain) {
        true => Ok(text.into()),
        false => Err(format!("`{text}` is no id such as ftjob-abc")),
    }
}

/// Where a job is on a server.
fn path(job: &str) -> String {
    format!("/v1/fine_tuning/jobs/{job}")
}

/// What is read of OpenAI's object.
#[derive(Debug, Deserialize)]
struct Job {
    id: String,
    status: String,
    /// This program's server calls such a job `queued`, as OpenAI has no word for it.
    #[serde(default)]
    paused: bool,
    model: String,
    created_at: i64,
    finished_at: Option<i64>,
    estimated_finish: Option<i64>,
    fine_tuned_model: Option<String>,
    training_file: String,
    validation_file: Option<String>,
    #[serde(default)]
    result_files: Vec<String>,
    seed: Option<i64>,
    trained_tokens: Option<u64>,
    method: Option<Map<String, Value>>,
    metadata: Option<Map<String, Value>>,
    error: Option<Value>,
}

impl Job {
    /// How it stands, in a word.
    fn status(&self) -> &str {
        if self.paused { "paused" } else { &self.status }
    }

    /// Why it failed.
    fn failure(&self) -> Option<String> {
        crate::remote::refusal(self.error.as_ref()?)
    }
}

/// A job as the server has it, and what is read of it.
fn find(client: &Client, id: &str) -> Result<(Value, Job), Failure> {
    let value = client.get(&path(id))?;
    let job = client.read(&value)?;
    Ok((value, job))
}

/// Asks a server.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let terminal = terminal(arguments.json);
    interrupt::install()?;
    let client = Client::new(arguments.server.as_deref(), &arguments.access)?;
    match arguments.command {
        Command::Create(create) => return create::run(&client, &create, terminal),
        Command::Watch(Which { job }) => return watch::run(&client, &job, terminal),
        Command::Download(download) => download::run(&client, &download, terminal)?,
        Command::List(page) => show::list(&client, &page, terminal)?,
        Command::Show(Which { job }) => {
            let (value, job) = find(&client, &job)?;
            show::one(&value, &job, terminal)?;
        }
        Command::Events(PageOf { which, page }) => {
            show::events(&client, &which.job, &page, terminal)?;
        }
        Command::Checkpoints(PageOf { which, page }) => {
            show::checkpoints(&client, &which.job, &page, terminal)?;
        }
        Command::Pause(Which { job }) => turn(&client, &job, "pause", terminal)?,
        Command::Resume(Which { job }) => turn(&client, &job, "resume", terminal)?,
        Command::Cancel(Which { job }) => turn(&client, &job, "cancel", terminal)?,
    }
    Ok(SUCCESS)
}

/// Pauses, resumes or cancels a job.
fn turn(client: &Client, job: &str, verb: &str, terminal: Terminal) -> anyhow::Result<()> {
    let value = client.order(&format!("{}/{verb}", path(job)))?;
    let job: Job = client.read(&value)?;
    match terminal.json {
        true => output::json(&value),
        false => output::line(format!("{} is {}", job.id, job.status())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identifiers_stay_within_a_paths_part() {
        assert_eq!(id("ftjob-a_1"), Ok("ftjob-a_1".into()));
        for wrong in ["", "a/b", "..", "a?b", "a b", "ä", "%2e", &"x".repeat(129)] {
            assert!(id(wrong).is_err(), "{wrong}");
        }
    }
}
