//! `fuse`: merge an adapter into its model, and write a model in another format.

use crate::check::{CheckFlags, Checked};
use crate::errors::{SUCCESS, usage};
use crate::interrupt;
use crate::models::{Source, check_adapter, device, dtype, set_threads};
use crate::output::{self, Terminal, grouped, shell_word};
use crate::run_folder;
use crate::settings::{Precision, Processor};
use candle_core::DType;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use metal_candle::adapter::Adapter;
use metal_candle::files;
use metal_candle::gguf::is_gguf;
use metal_candle::model::{Companions, Model, ModelFormat, stored_dtype};
use metal_candle::text::Tokenizer;
use serde::Serialize;
use std::path::PathBuf;

const EXAMPLES: &str = "\
Examples:
  metal-candle fuse --model model/ --adapter adapters --output fused/
  metal-candle fuse --model model/ --adapter adapters --to gguf-q4_k_m --output fused.gguf
  metal-candle fuse --model model/ --adapter adapters --to gguf-q4_k_m --output fused.gguf --check
  metal-candle fuse --model model/ --to mlx4 --output model-mlx4/

The output is a whole model: config.json, model.safetensors, the tokenizer's files and the adapter's chat \
template if it has one, for this program, transformers, and whatever reads those; or a GGUF file with all of it. \
A base in fewer bits is unpacked before the adapter is merged, and packed again only if --to says so.";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    source: Source,
    /// The folder to write, or the .gguf file; it must not exist, or be an empty folder
    #[arg(short, long, value_name = "PATH", aliases = ["save-path", "gguf-path"])]
    output: PathBuf,
    /// The dtype to write; auto is that of the model
    #[arg(
        long,
        value_enum,
        default_value_t,
        hide_possible_values = true,
        value_name = "auto|f32|bf16|f16"
    )]
    dtype: Precision,
    /// The format to write: safetensors in f32, bf16 or f16, as bitsandbytes (nf4, fp4) or MLX have them, or GGUF
    /// [default: safetensors in the dtype]
    #[arg(long, value_name = "FORMAT", value_parser = formats(), conflicts_with = "dtype")]
    to: Option<ModelFormat>,
    /// Threads that compute [default: one a core]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Report as one JSON object on stdout
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    check: CheckFlags,
}

fn formats() -> impl TypedValueParser<Value = ModelFormat> {
    PossibleValuesParser::new(ModelFormat::names()).try_map(|word| word.parse::<ModelFormat>())
}

#[derive(Serialize)]
struct Report {
    output: String,
    parameters: u64,
    format: String,
    /// Whether the base was in fewer bits, and was unpacked.
    dequantized: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<Checked>,
}

/// Merges.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let terminal = terminal(arguments.json);
    let adapter = arguments.source.adapter.as_deref();
    if adapter.is_none() && arguments.to.is_none() {
        return Err(usage(
            "nothing to do: give --adapter the folder of the adapter to merge, or --to the format to write",
        ));
    }
    set_threads(arguments.threads)?;
    let samples = arguments.check.samples()?;
    interrupt::install()?;
    let folder = arguments.source.folder(terminal)?;
    let output = &arguments.output;
    let others = [Some(("model", folder.as_path())), adapter.map(|adapter| ("adapter", adapter))];
    let _lock = run_folder::take_new(output, &others.into_iter().flatten().collect::<Vec<_>>())?;
    if let Some(adapter) = adapter {
        check_adapter(adapter)?;
    }
    let device = device(Processor::Cpu)?;
    let stored = stored_dtype(&folder)?;
    let format = match (arguments.to, arguments.dtype) {
        (Some(format), _) => format,
        (None, Precision::Auto) => ModelFormat::Dense(stored),
        (None, precision) => ModelFormat::Dense(dtype(precision)),
    };
    if format.is_file() != is_gguf(output) {
        let expected = if format.is_file() { "a file named .gguf" } else { "a folder" };
        return Err(usage(format!(
            "output: is {}, but {format} is written as {expected}",
            output.display()
        )));
    }
    // The sum loses nothing that the file written could hold.
    let loaded = match format {
        ModelFormat::Dense(target) if target != stored => DType::F32,
        ModelFormat::Gguf(_) => DType::F32,
        _ => stored,
    };
    let model = Model::load(&folder, loaded, &device)?;
    let dequantized = model.is_quantized();
    let (model, template) = match adapter {
        Some(adapter) => {
            let template = Tokenizer::load(&folder)?.take_chat_template(adapter)?;
            (Adapter::load(&model, adapter)?.merge(model)?, template)
        }
        None => (model, None),
    };
    let companions = Companions { from: &folder, chat_template: template.as_deref() };
    if format.is_file() {
        model.save_as(output, format, Some(companions))?;
    } else {
        files::write_folder_atomic(output, |staging| {
            model.save_as(staging, format, Some(companions))
        })?;
    }
    let parameters = model.weight_count() as u64;
    drop(model);
    let check = samples
        .map(|samples| arguments.check.compare(&samples, &folder, adapter, output))
        .transpose()?;
    let report = Report {
        output: output::path(output),
        parameters,
        format: format.to_string(),
        dequantized,
        check,
    };
    if terminal.json {
        output::json(&report)?;
    } else {
        output::line(format!(
            "Wrote {} ({} parameters in {})",
            output.display(),
            grouped(report.parameters),
            report.format
        ))?;
        if report.dequantized {
            terminal.note("The weights of the base were in fewer bits, and were unpacked first.");
        }
        if let Some(check) = &report.check {
            check.tell(terminal)?;
        }
        if report.check.as_ref().is_none_or(Checked::agrees) {
            let output = shell_word(&output.display().to_string());
            terminal.note(format!("Next: metal-candle chat --model {output}"));
        }
    }
    report.check.as_ref().map_or(Ok(()), Checked::require)?;
    Ok(SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auto_is_told_as_the_dtype_of_the_model() {
        let mut command = Arguments::augment_args(clap::Command::new("fuse"));
        let help = command.render_long_help().to_string();
        let dtype = help.split("--dtype").nth(1).unwrap().split("--to").next().unwrap();
        assert!(dtype.contains("auto is that of the model"), "{dtype}");
        assert!(!dtype.contains("GPU"), "{dtype}");
    }
}
