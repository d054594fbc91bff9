//! `fuse`: merge an adapter into its model.

use crate::errors::{SUCCESS, usage};
use crate::interrupt;
use crate::models::{Source, check_adapter, device, dtype, set_threads};
use crate::output::{self, Terminal, grouped, shell_word};
use crate::run_folder;
use crate::settings::{Precision, Processor};
use candle_core::DType;
use clap::Args;
use metal_candle::adapter::Adapter;
use metal_candle::files;
use metal_candle::model::{Config, Model, Weights};
use metal_candle::text::Tokenizer;
use serde::Serialize;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Example:
  metal-candle fuse --model model/ --adapter adapters --output fused/

The output is a whole model: config.json, model.safetensors, the tokenizer's files and the adapter's chat \
template if it has one, for this program, transformers, and whatever reads those.";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    source: Source,
    /// The folder to write; it must not exist, or be empty
    #[arg(short, long, value_name = "DIR", alias = "save-path")]
    output: PathBuf,
    /// The dtype to write; auto is that of the model
    #[arg(long, value_enum, default_value_t)]
    dtype: Precision,
    /// Threads that compute [default: one a core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Report as one JSON object on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    output: PathBuf,
    parameters: u64,
    dtype: &'static str,
}

/// Merges.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let terminal = terminal(arguments.json);
    let Some(adapter) = &arguments.source.adapter else {
        return Err(usage("no adapter: give --adapter the folder of the adapter to merge"));
    };
    set_threads(arguments.threads)?;
    interrupt::install()?;
    let folder = arguments.source.folder(terminal)?;
    let output = &arguments.output;
    let _lock = run_folder::take_new(output, &[("model", &folder), ("adapter", adapter)])?;
    check_adapter(adapter)?;
    let stored = stored_dtype(&folder)?;
    let device = device(Processor::Cpu)?;
    let target =
        if arguments.dtype == Precision::Auto { stored } else { dtype(arguments.dtype, &device) };
    // The sum loses nothing that the file written could hold.
    let loaded = if stored == target { stored } else { DType::F32 };
    let model = Model::load(&folder, loaded, &device)?;
    let model = Adapter::load(&model, adapter)?.merge(model)?;
    let template = Tokenizer::load(&folder)?.take_chat_template(adapter)?;
    files::write_folder_atomic(output, |staging| {
        model.save(staging, target, Some(&folder))?;
        match &template {
            Some(source) => files::set_chat_template(staging, source),
            None => Ok(()),
        }
    })?;
    let report = Report {
        output: output.clone(),
        parameters: model.weight_count() as u64,
        dtype: target.as_str(),
    };
    if terminal.json {
        output::json(&report)?;
    } else {
        output::line(format!(
            "Wrote {} ({} parameters in {})",
            output.display(),
            grouped(report.parameters),
            report.dtype
        ))?;
        let output = shell_word(&output.display().to_string());
        terminal.note(format!("Next: metal-candle chat --model {output}"));
    }
    Ok(SUCCESS)
}

/// The dtype of a model's files: what its configuration says, or what its first tensor has.
fn stored_dtype(folder: &Path) -> anyhow::Result<DType> {
    if let Some(dtype) = Config::load(folder)?.dtype {
        return Ok(dtype);
    }
    let weights = Weights::open(folder)?;
    Ok(match weights.names().next() {
        Some(name) => weights.dtype(name)?,
        None => DType::F32,
    })
}
