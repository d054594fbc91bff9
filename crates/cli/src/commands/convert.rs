//! `convert`: the files of an adapter as another program has them.

use crate::errors::{SUCCESS, usage};
use crate::interrupt;
use crate::models::{Source, base_name, check_adapter};
use crate::output::{self, Terminal, grouped, shell_word};
use crate::run_folder;
use candle_core::{DType, Device, Tensor};
use clap::{Args, ValueEnum};
use metal_candle::adapter::{Adapter, AdapterFormat, read_config};
use metal_candle::files;
use metal_candle::model::{Config, Model};
use metal_candle::text::{CHAT_TEMPLATE, chat_template_in};
use serde::Serialize;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  metal-candle convert --adapter adapters --to mlx --output adapters-mlx
  metal-candle convert --adapter adapters-mlx --to peft --output adapters-peft --model model/

The numbers stay the same bits. Of the base model only config.json is read: that which the adapter names, or \
--model, which is then what the files written name. A chat template beside the adapter is kept.";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    source: Source,
    /// Whose files to write
    #[arg(long, value_enum)]
    to: Format,
    /// The folder to write; it must not exist, or be empty
    #[arg(short, long, value_name = "DIR", alias = "save-path")]
    output: PathBuf,
    /// Report as one JSON object on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    /// PEFT's, which transformers and most servers read
    Peft,
    /// mlx-lm's
    #[value(alias = "mlx-lm")]
    Mlx,
}

#[derive(Serialize)]
struct Report {
    output: PathBuf,
    format: &'static str,
    base_model: String,
    parameters: usize,
}

/// Converts.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let terminal = terminal(arguments.json);
    let source = &arguments.source;
    let Some(folder) = &source.adapter else {
        return Err(usage("no adapter: give --adapter the folder of the adapter to convert"));
    };
    interrupt::install()?;
    check_adapter(folder)?;
    let format = match arguments.to {
        Format::Peft => AdapterFormat::Peft,
        Format::Mlx => AdapterFormat::Mlx,
    };
    if AdapterFormat::of(folder)? == format {
        return Err(usage(format!(
            "to: {} has {}'s files already",
            folder.display(),
            format.name()
        )));
    }
    let base = source.config_folder(terminal)?;
    let output = &arguments.output;
    let _lock = run_folder::take_new(output, &[("model", &base), ("adapter", folder)])?;
    let (config, named) = read_config(folder)?;
    let base_model = match (&source.model, named) {
        (None, Some(named)) => named,
        (given, _) => base_name(given.as_deref(), &base),
    };
    let model = if config.start.takes_from_weight() {
        // What was taken from the weights is found in them again.
        Model::load(source.folder(terminal)?, DType::F32, &Device::Cpu)?
    } else {
        // Where its layers are and how large, without their weights.
        Model::from_fn(Config::load(&base)?, DType::F32, &Device::Cpu, |_, shape| {
            Ok(Tensor::zeros((), DType::F32, &Device::Cpu)?.broadcast_as(shape)?)
        })?
    };
    let adapter = Adapter::load(&model, folder)?;
    let template = chat_template_in(folder)?;
    files::write_folder_atomic(output, |staging| {
        adapter.save_as(staging, &base_model, format)?;
        match &template {
            Some(source) => files::write_bytes_atomic(staging.join(CHAT_TEMPLATE), source),
            None => Ok(()),
        }
    })?;
    let report = Report {
        output: output.clone(),
        format: format.name(),
        base_model,
        parameters: adapter.parameters().len(),
    };
    if terminal.json {
        output::json(&report)?;
    } else {
        output::line(format!(
            "Wrote {} ({}'s files, {} parameters)",
            output.display(),
            report.format,
            grouped(report.parameters as u64)
        ))?;
        let output = shell_word(&output.display().to_string());
        terminal.note(format!("Next: metal-candle chat --adapter {output}"));
    }
    Ok(SUCCESS)
}
