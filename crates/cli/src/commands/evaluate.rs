//! `evaluate`: loss and perplexity of a model on data.

use crate::bounds;
use crate::errors::{SUCCESS, usage};
use crate::interrupt;
use crate::models::{Runtime, Source, set_threads};
use crate::output::{self, Terminal, grouped};
use crate::settings::{Loss, limit};
use anyhow::Context;
use clap::{Args, ValueEnum};
use metal_candle::data::{
    self, BatchOptions, Batcher, Columns, DataFiles, DataOptions, DataSource, Report as DataReport,
    tokenize,
};
use metal_candle::train::{Evaluation, evaluate};
use serde::Serialize;
use std::path::PathBuf;
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  metal-candle evaluate --model model/ --data data/test.jsonl
  metal-candle evaluate --adapter adapters --data data/ --split valid --json";

/// A file of a data folder.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Split {
    Train,
    Valid,
    Test,
}

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    source: Source,
    /// A file of data, or a folder with files of the splits
    #[arg(short, long, value_name = "PATH", help_heading = "Data")]
    data: PathBuf,
    /// Which file of a folder [default: test if there is one, else valid]
    #[arg(long, value_enum, help_heading = "Data")]
    split: Option<Split>,
    /// Tokens of an example at most; what is longer is cut, and counted
    #[arg(long, value_name = "N", default_value_t = 2048, help_heading = "Data")]
    max_seq_length: usize,
    /// The tokens that the loss counts
    #[arg(long, value_enum, default_value_t, help_heading = "Data")]
    loss_on: Loss,
    /// Rows of a batch
    #[arg(short, long, value_name = "N", default_value_t = 4, help_heading = "Data")]
    batch_size: usize,
    /// Batches to read; -1 is all
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true, help_heading = "Data")]
    batches: i64,
    #[command(flatten)]
    runtime: Runtime,
    /// Report as one JSON object on stdout
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    evaluation: Evaluation,
    data: DataReport,
}

/// Evaluates.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let terminal = terminal(arguments.json);
    bounds::check("batch_size", arguments.batch_size, &bounds::BATCH_SIZE)?;
    bounds::check("max_seq_length", arguments.max_seq_length, &bounds::TOKENS)?;
    if arguments.batches != -1 && arguments.batches < 1 {
        return Err(usage(format!(
            "batches: is {}, expected at least 1, or -1 for all",
            arguments.batches
        )));
    }
    set_threads(arguments.runtime.threads)?;
    interrupt::install()?;
    let files = DataFiles::find(&arguments.data)?;
    let split = match arguments.split {
        Some(_) if !arguments.data.is_dir() => {
            return Err(usage(format!(
                "split: {} is one file; a folder has splits",
                arguments.data.display()
            )));
        }
        Some(Split::Train) => data::Split::Train,
        Some(Split::Valid) => data::Split::Valid,
        Some(Split::Test) => data::Split::Test,
        None if !arguments.data.is_dir() => data::Split::Train,
        None if files.test.is_empty() => data::Split::Valid,
        None => data::Split::Test,
    };
    let chosen = files.require(split).context("--split names another")?.to_vec();
    files.check(&Columns::default())?;
    let loaded = arguments.source.load(&arguments.runtime, terminal)?;
    let options = DataOptions {
        max_seq_length: arguments.max_seq_length,
        loss_on: arguments.loss_on.for_data(),
        ..DataOptions::default()
    };
    let source = DataSource { files: chosen, weight: None };
    let dataset = tokenize(&[source], &loaded.tokenizer, &options)?.into_dataset()?;
    dataset.check_vocabulary(loaded.model.config().vocab_size)?;
    let data = dataset.report.clone();
    let options = BatchOptions {
        batch_size: arguments.batch_size,
        max_seq_length: arguments.max_seq_length,
        packing: false,
        seed: 0,
        shuffle: false,
    };
    let batches = Batcher::new(Arc::new(dataset), options)?;
    terminal.note(format!("{data}"));
    let evaluation = evaluate(&loaded.model, &batches, limit(arguments.batches))?;
    if terminal.json {
        output::json(&Report { evaluation, data })?;
    } else {
        output::line(format!(
            "loss {:.4}, perplexity {:.4}, on {} tokens in {:.1} s",
            evaluation.loss,
            evaluation.perplexity,
            grouped(evaluation.tokens),
            evaluation.seconds
        ))?;
    }
    Ok(SUCCESS)
}
