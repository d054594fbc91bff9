//! `evaluate`: loss and perplexity of a model on data.

use crate::bounds;
use crate::datasets::{self, Wanted};
use crate::errors::{SUCCESS, usage};
use crate::interrupt;
use crate::models::{Runtime, Source, set_threads};
use crate::output::{self, Terminal, are, grouped};
use crate::settings::{Data, DataFlags, Loss, limit};
use crate::template::TemplateFlags;
use clap::{Args, ValueEnum};
use metal_candle::data::{
    self, BatchOptions, Batcher, DataOptions, DataSource, Report as DataReport, tokenize,
};
use metal_candle::train::{Evaluation, evaluate};
use serde::Serialize;
use std::sync::Arc;

const EXAMPLES: &str = "\
Examples:
  metal-candle evaluate --model model/ --data data/test.jsonl
  metal-candle evaluate --adapter adapters --data data/ --split valid --json
  metal-candle evaluate -m model/ -d owner/name --prompt-column question --completion-column answer";

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
    /// A file of data, a folder with files of the splits, or the id of a data set on the hub; may be given several times
    #[arg(short, long, value_name = "PATH|ID", required = true, help_heading = "Data")]
    data: Vec<String>,
    /// Which split of a folder or of a data set on the hub [default: test if there is one, else valid]
    #[arg(long, value_enum, conflicts_with = "data_split", help_heading = "Data")]
    split: Option<Split>,
    #[command(flatten)]
    sources: DataFlags,
    /// Tokens of an example at most; what is longer is cut, and counted
    #[arg(long, value_name = "N", default_value_t = DataOptions::default().max_seq_length, help_heading = "Data")]
    max_seq_length: usize,
    /// The tokens that the loss counts
    #[arg(long, value_enum, default_value_t, help_heading = "Data")]
    loss_on: Loss,
    /// Rows of a batch
    #[arg(short, long, value_name = "N", default_value_t = BatchOptions::default().batch_size, help_heading = "Data")]
    batch_size: usize,
    /// Batches to read; -1 is all
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true, help_heading = "Data")]
    batches: i64,
    #[command(flatten)]
    template: TemplateFlags,
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
    let split = arguments.split.map(|split| match split {
        Split::Train => data::Split::Train,
        Split::Valid => data::Split::Valid,
        Split::Test => data::Split::Test,
    });
    let data = Data::of(&arguments.data).without_weights()?;
    let found = datasets::find(&data, &arguments.sources, Wanted::Measuring(split), terminal)?;
    let sources: Vec<DataSource> = found.into_iter().map(|found| found.source).collect();
    let loaded = arguments.source.load(&arguments.runtime, &arguments.template, terminal)?;
    let options = DataOptions {
        max_seq_length: arguments.max_seq_length,
        loss_on: arguments.loss_on.for_data(),
        variables: loaded.variables.clone(),
        ..DataOptions::default()
    };
    let dataset = tokenize(&sources, &loaded.tokenizer, &options)?.into_dataset()?;
    let config = loaded.model.config();
    dataset.check_vocabulary(config.vocab_size)?;
    let context = config.max_position_embeddings;
    let longer = dataset.longer_than(context);
    if longer > 0 {
        terminal.note(format!(
            "warning: {} longer than the {context} tokens that this model was made for; --max-seq-length {context} cuts \
             them there",
            are(longer as u64, "example"),
        ));
    }
    let data = dataset.report.clone();
    let options = BatchOptions {
        batch_size: arguments.batch_size,
        max_seq_length: arguments.max_seq_length,
        packing: false,
        seed: 0,
        shuffle: false,
        ..BatchOptions::default()
    };
    let batches = Batcher::new(Arc::new(dataset), options)?;
    terminal.note(format!("{data}"));
    let evaluation = {
        let limit = limit(arguments.batches);
        evaluate(&loaded.model, loaded.adapter.as_ref(), &batches, limit)?
    };
    if terminal.json {
        output::json(&Report { evaluation, data })?;
    } else {
        output::line(format!(
            "loss {:.4}, perplexity {:.4}, on {} tokens in {:.1} s",
            evaluation.loss,
            evaluation.perplexity.unwrap_or(f64::NAN),
            grouped(evaluation.tokens),
            evaluation.seconds
        ))?;
    }
    Ok(SUCCESS)
}
