//! `evaluate`: loss and perplexity of a model on data.

use crate::datasets::Wanted;
use crate::errors::{SUCCESS, usage};
use crate::interrupt;
use crate::measured::Measured;
use crate::models::{Placed, Runtime, Source, set_threads};
use crate::output::{self, Terminal, grouped};
use crate::settings::limit;
use crate::template::TemplateFlags;
use clap::Args;
use metal_candle::data::Report as DataReport;
use metal_candle::train::{Evaluation, TOKEN_ACCURACY, evaluate};
use serde::Serialize;

const EXAMPLES: &str = "\
Examples:
  metal-candle evaluate --model model/ --data data/test.jsonl
  metal-candle evaluate --adapter adapters --data data/ --split valid --json
  metal-candle evaluate -m model/ -d owner/name --prompt-column question --completion-column answer";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    data: Measured,
    /// Batches to read; -1 is all
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true, help_heading = "Data")]
    batches: i64,
    #[command(flatten)]
    template: TemplateFlags,
    #[command(flatten)]
    runtime: Runtime,
    #[command(flatten)]
    placed: Placed,
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
    if arguments.batches != -1 && arguments.batches < 1 {
        return Err(usage(format!(
            "batches: is {}, expected at least 1, or -1 for all",
            arguments.batches
        )));
    }
    set_threads(arguments.runtime.threads)?;
    interrupt::install()?;
    let sources = arguments.data.find(Wanted::Measuring(None), terminal)?;
    let loaded = arguments.source.load(
        &arguments.runtime,
        &arguments.placed,
        &arguments.template,
        terminal,
    )?;
    let reader = (&loaded.tokenizer, &loaded.variables, None);
    let batches = arguments.data.batches(&sources, reader, loaded.model.config(), terminal)?;
    let limit = limit(arguments.batches);
    let evaluation = evaluate(&loaded.model, loaded.adapter.as_ref(), &batches, limit)?;
    if terminal.json {
        let data = batches.dataset().report.clone();
        output::json(&Report { evaluation, data })?;
    } else {
        let accuracy = evaluation.metrics.get(TOKEN_ACCURACY).copied().unwrap_or(f64::NAN);
        output::line(format!(
            "loss {:.4}, perplexity {:.4}, {:.1} % of tokens the likeliest, on {} tokens in {:.1} s",
            evaluation.loss,
            evaluation.perplexity.unwrap_or(f64::NAN),
            100.0 * accuracy,
            grouped(evaluation.tokens),
            evaluation.seconds
        ))?;
    }
    Ok(SUCCESS)
}
