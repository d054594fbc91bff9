//! `jobs create`: data, a job on them, and its end.

use super::{Job, watch};
use crate::bounds;
use crate::errors::{SUCCESS, usage};
use crate::output::{self, Terminal};
use crate::remote::Client;
use anyhow::Context;
use clap::{Args, ValueEnum};
use serde_json::{Map, Value, json};
use std::path::Path;

/// What the command is told. What can't be is the server's to say.
#[derive(Debug, Args)]
pub struct Create {
    /// Examples to learn from: a file, which is uploaded, or the id of one that the server has
    #[arg(long, value_name = "FILE|ID", alias = "data", help_heading = "Data")]
    training_file: String,
    /// Examples to measure by, likewise
    #[arg(long, value_name = "FILE|ID", help_heading = "Data")]
    validation_file: Option<String>,
    /// What to begin with: the server's base, or a model that was fine-tuned there [default: the base]
    #[arg(short, long, value_name = "NAME", help_heading = "Job")]
    model: Option<String>,
    /// How it is learned
    #[arg(long, value_enum, default_value_t, help_heading = "Job")]
    method: Method,
    /// A word for the name of the model that is made
    #[arg(long, value_name = "TEXT", help_heading = "Job")]
    suffix: Option<String>,
    /// What random draws follow from: the same seed gives the same model [default: drawn]
    #[arg(long, value_name = "N", help_heading = "Job")]
    seed: Option<i64>,
    /// Kept with the job; may be given several times
    #[arg(long, value_name = "NAME=TEXT", value_parser = pair, help_heading = "Job")]
    metadata: Vec<(String, String)>,
    /// How often the examples are learned [default: as many as suit them]
    #[arg(long, value_name = "N", alias = "n-epochs", help_heading = "Hyperparameters")]
    epochs: Option<u32>,
    /// Examples of a step [default: as many as suit them]
    #[arg(long, value_name = "N", help_heading = "Hyperparameters")]
    batch_size: Option<u32>,
    /// Times the server's own learning rate [default: 1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Hyperparameters")]
    learning_rate_multiplier: Option<f64>,
    /// How closely the model stays to what it was, for dpo [default: 0.1]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Hyperparameters")]
    beta: Option<f64>,
    /// End once the job is there, and print its id
    #[arg(long)]
    detach: bool,
}

#[derive(Debug, Clone, Copy, Default, ValueEnum)]
enum Method {
    /// From answers
    #[default]
    Supervised,
    /// From pairs of answers, of which one is the better
    Dpo,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Supervised => "supervised",
            Self::Dpo => "dpo",
        }
    }
}

fn pair(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or_else(|| format!("`{text}` is not NAME=TEXT"))?;
    Ok((name.into(), value.into()))
}

/// Starts a job, and follows it.
pub fn run(client: &Client, create: &Create, terminal: Terminal) -> anyhow::Result<u8> {
    let method = create.method()?;
    let training = File::of("training_file", &create.training_file)?;
    let validation = create.validation_file.as_deref();
    let validation = validation.map(|given| File::of("validation_file", given)).transpose()?;
    let model = match &create.model {
        Some(model) => model.clone(),
        None => client.models().context("which models there are (--model names one)")?.remove(0),
    };
    let mut uploaded = Vec::new();
    let result: anyhow::Result<Value> = (|| {
        let mut request = json!({"model": model, "method": method});
        request["training_file"] = training.take(client, &mut uploaded, terminal)?.into();
        if let Some(file) = &validation {
            request["validation_file"] = file.take(client, &mut uploaded, terminal)?.into();
        }
        create.add_to(&mut request);
        Ok(client.post("/v1/fine_tuning/jobs", &request)?)
    })();
    let value = result.inspect_err(|_| {
        // Nobody has asked for files without a job.
        for id in &uploaded {
            let became = match client.delete(&format!("/v1/files/{id}")) {
                Ok(_) => "is removed again".to_string(),
                Err(failure) => format!("cannot be removed again: {failure}"),
            };
            terminal.note(format!("{id} {became}"));
        }
    })?;
    let job: Job = client.read(&value)?;
    terminal.note(format!("{} is {}", job.id, job.status()));
    match (create.detach, terminal.json) {
        (false, _) => return watch::run(client, &job.id, terminal),
        (true, true) => output::json(&value)?,
        (true, false) => output::line(&job.id)?,
    }
    Ok(SUCCESS)
}

impl Create {
    /// The job's method with what is given of its hyperparameters. What no server takes is refused before anything is
    /// uploaded; how much is too much is the server's to say.
    fn method(&self) -> anyhow::Result<Value> {
        let name = self.method.name();
        let mut given = Map::new();
        if let (Some(_), Method::Supervised) = (self.beta, self.method) {
            return Err(usage(
                "beta: is a hyperparameter of dpo alone; add --method dpo, or leave it out",
            ));
        }
        let whole = [("n_epochs", self.epochs), ("batch_size", self.batch_size)];
        for (key, value) in whole {
            bounds::check(key, value.unwrap_or(1), &(1..=u32::MAX))?;
            given.extend(value.map(|value| (key.to_string(), json!(value))));
        }
        let numbers =
            [("learning_rate_multiplier", self.learning_rate_multiplier), ("beta", self.beta)];
        for (key, value) in numbers {
            if let Some(value) = value.filter(|value| !(value.is_finite() && *value > 0.0)) {
                return Err(usage(format!("{key}: is {value}, expected a number above 0")));
            }
            given.extend(value.map(|value| (key.to_string(), json!(value))));
        }
        Ok(json!({"type": name, name: {"hyperparameters": given}}))
    }

    fn add_to(&self, request: &mut Value) {
        if let Some(suffix) = &self.suffix {
            request["suffix"] = suffix.clone().into();
        }
        if let Some(seed) = self.seed {
            request["seed"] = seed.into();
        }
        if !self.metadata.is_empty() {
            let pairs =
                self.metadata.iter().map(|(name, value)| (name.clone(), value.clone().into()));
            request["metadata"] = Value::Object(pairs.collect());
        }
    }
}

/// A file here, or one that the server has.
enum File<'a> {
    Here(&'a Path),
    There(&'a str),
}

impl<'a> File<'a> {
    fn of(key: &str, given: &'a str) -> anyhow::Result<Self> {
        let path = Path::new(given);
        if path.exists() {
            Ok(Self::Here(path))
        } else if given.starts_with("file-") {
            Ok(Self::There(given))
        } else {
            let shown = crate::settings::cut(given);
            Err(usage(format!("{key}: there is no file {shown}, and it is no id such as file-abc")))
        }
    }

    /// Its id on the server.
    fn take(
        &self,
        client: &Client,
        uploaded: &mut Vec<String>,
        terminal: Terminal,
    ) -> anyhow::Result<String> {
        match self {
            Self::There(id) => Ok(id.to_string()),
            Self::Here(path) => {
                let file = client.upload(path, terminal)?;
                let id: String = client.read(file.get("id").unwrap_or(&Value::Null))?;
                terminal.note(format!("{} is uploaded as {id}", path.display()));
                // It stands in a path if it is to be removed.
                uploaded.push(super::id(&id).map_err(anyhow::Error::msg)?);
                Ok(id)
            }
        }
    }
}
