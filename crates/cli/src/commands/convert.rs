//! `convert`: the files of an adapter as another program has them; `convert --check`: an export beside its source.

use crate::check::{CheckFlags, Checked, is_adapter};
use crate::errors::{SUCCESS, usage};
use crate::interrupt;
use crate::models::{Source, base_name, check_adapter};
use crate::output::{self, Terminal, grouped, shell_word};
use crate::run_folder;
use candle_core::{DType, Device, Tensor};
use clap::{Args, ValueEnum};
use metal_candle::adapter::{Adapter, AdapterFormat, read_config};
use metal_candle::files;
use metal_candle::gguf::{self, is_gguf};
use metal_candle::model::{Config, Model};
use metal_candle::text::{CHAT_TEMPLATE, chat_template_in};
use serde::Serialize;
use std::path::{Path, PathBuf};

const EXAMPLES: &str = "\
Examples:
  metal-candle convert --adapter adapters --to mlx --output adapters-mlx
  metal-candle convert --adapter adapters-mlx --to peft --output adapters-peft --model model/
  metal-candle convert --adapter adapters --to gguf --output adapter.gguf
  metal-candle convert --adapter adapter.gguf --to peft --output adapters --model model/
  metal-candle convert --check model/ model-q4_k_m.gguf
  metal-candle convert --check model/ fused/ --adapter adapters

The numbers stay the same bits, but for GGUF's where layers have scales of their own. `fuse --to` converts models. Of the \
base model only config.json is read: that which the adapter names, or --model, which is then what the files written name. \
A chat template beside the adapter is kept.

--check SOURCE EXPORTED writes nothing. Both are models or adapters in any format that is read here; --adapter is what was \
merged into SOURCE. Token ids and rendered conversations have to be the same; a row of a weight and probabilities may be as \
far off as the bits of the format make them. What another program does with the same files isn't seen.";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// With --check, what to compare instead of converting: a model's folder, .gguf file or id on the hub, or an
    /// adapter, and what was made of it
    #[arg(value_names = ["SOURCE", "EXPORTED"], num_args = 2, requires = "check", conflicts_with_all = ["to", "output"])]
    compared: Vec<PathBuf>,
    #[command(flatten)]
    source: Source,
    /// Whose files to write
    #[arg(long, value_enum, required_unless_present = "compared")]
    to: Option<Format>,
    /// The folder to write, or the .gguf file; it must not exist, or be an empty folder
    #[arg(
        short,
        long,
        value_name = "PATH",
        alias = "save-path",
        required_unless_present = "compared"
    )]
    output: Option<PathBuf>,
    /// Report as one JSON object on stdout
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    check: CheckFlags,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    /// PEFT's, which transformers and most servers read
    Peft,
    /// mlx-lm's
    #[value(alias = "mlx-lm")]
    Mlx,
    /// llama.cpp's
    Gguf,
}

impl Format {
    fn name(self) -> &'static str {
        match self {
            Self::Peft => AdapterFormat::Peft.name(),
            Self::Mlx => AdapterFormat::Mlx.name(),
            Self::Gguf => "llama.cpp",
        }
    }
}

#[derive(Serialize)]
struct Report {
    output: String,
    format: &'static str,
    base_model: String,
    parameters: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    check: Option<Checked>,
}

/// Compares `exported` with `given`, a model or an adapter.
fn check(
    arguments: &Arguments,
    given: &Path,
    exported: &Path,
    terminal: Terminal,
) -> anyhow::Result<u8> {
    let mut source = arguments.source.clone();
    if given.exists() && is_adapter(given)? {
        if let Some(other) = source.adapter.replace(given.to_path_buf()) {
            let (given, other) = (given.display(), other.display());
            return Err(usage(format!(
                "adapter: is {other}, but {given} is an adapter, too; give one"
            )));
        }
    } else if let Some(other) = source.model.replace(given.display().to_string()) {
        return Err(usage(format!(
            "model: is {other}, but {} is a model, too; give one",
            given.display()
        )));
    }
    interrupt::install()?;
    if let Some(adapter) = source.adapter.as_deref().filter(|path| !is_gguf(path)) {
        check_adapter(adapter)?;
    }
    if !exported.exists() {
        return Err(usage(format!("there is no {} to check", exported.display())));
    }
    let Some(samples) = arguments.check.samples()? else {
        return Err(usage("SOURCE and EXPORTED are compared; give --check with them"));
    };
    let base = source.folder(terminal)?;
    let checked = arguments.check.compare(&samples, &base, source.adapter.as_deref(), exported)?;
    if terminal.json {
        output::json(&checked)?;
    } else {
        checked.tell(terminal)?;
    }
    checked.require()?;
    Ok(SUCCESS)
}

/// Converts.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let terminal = terminal(arguments.json);
    let (to, output) = match (&arguments.compared[..], arguments.to, &arguments.output) {
        ([given, exported], ..) => return check(&arguments, given, exported, terminal),
        (_, Some(to), Some(output)) => (to, output),
        _ => {
            return Err(usage("nothing to do: give --to and --output, or --check SOURCE EXPORTED"));
        }
    };
    let source = &arguments.source;
    let Some(folder) = &source.adapter else {
        return Err(usage("no adapter: give --adapter the folder of the adapter to convert"));
    };
    let samples = arguments.check.samples()?;
    interrupt::install()?;
    let from_gguf = is_gguf(folder);
    let found = match from_gguf {
        true => Format::Gguf.name(),
        false => {
            check_adapter(folder)?;
            AdapterFormat::of(folder)?.name()
        }
    };
    if found == to.name() {
        return Err(usage(format!("to: {} has {found}'s files already", folder.display())));
    }
    if matches!(to, Format::Gguf) != is_gguf(output) {
        let expected = if is_gguf(output) { "a folder" } else { "a file named .gguf" };
        return Err(usage(format!("output: is {}, expected {expected}", output.display())));
    }
    let base = source.config_folder(terminal)?;
    let given = folder;
    let _lock = run_folder::take_new(output, &[("model", &base), ("adapter", folder)])?;
    let base_config = Config::load(&base)?;
    // What a GGUF file has is put into PEFT's words first.
    let staged = from_gguf.then(tempfile::tempdir).transpose()?;
    let folder = match &staged {
        Some(staged) => {
            let layers = gguf::read_adapter(folder, &base_config)?;
            let place = staged.path().join("adapter");
            gguf::save_as_peft(&place, &layers, "")?;
            place
        }
        None => folder.clone(),
    };
    let (config, named) = read_config(&folder)?;
    let base_model = match (&source.model, named.filter(|_| !from_gguf)) {
        (None, Some(named)) => named,
        (given, _) => base_name(given.as_deref(), &base),
    };
    let model = if config.start.takes_from_weight() {
        // What was taken from the weights is found in them again.
        Model::load(source.folder(terminal)?, DType::F32, &Device::Cpu)?
    } else {
        // Where its layers are and how large, without their weights.
        Model::from_fn(base_config, DType::F32, &Device::Cpu, |_, shape| {
            Ok(Tensor::zeros((), DType::F32, &Device::Cpu)?.broadcast_as(shape)?)
        })?
    };
    let adapter = Adapter::load(&model, &folder)?;
    let template = chat_template_in(&folder)?;
    let write = |format| {
        files::write_folder_atomic(output, |staging| {
            adapter.save_as(staging, &base_model, format)?;
            match &template {
                Some(source) => files::write_bytes_atomic(staging.join(CHAT_TEMPLATE), source),
                None => Ok(()),
            }
        })
    };
    match to {
        Format::Peft => write(AdapterFormat::Peft)?,
        Format::Mlx => write(AdapterFormat::Mlx)?,
        Format::Gguf => {
            let layers = gguf::adapter_layers(&model, &adapter)?;
            gguf::write_adapter(output, model.config(), &layers)?;
        }
    }
    let check = match samples {
        // With the weights that no conversion needs.
        Some(samples) => {
            let base = source.folder(terminal)?;
            Some(arguments.check.compare(&samples, &base, Some(given), output)?)
        }
        None => None,
    };
    let report = Report {
        output: output::path(output),
        format: to.name(),
        base_model,
        parameters: adapter.parameters().len(),
        check,
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
        if let Some(check) = &report.check {
            check.tell(terminal)?;
        }
        if !is_gguf(output) && report.check.as_ref().is_none_or(Checked::agrees) {
            let output = shell_word(&output.display().to_string());
            terminal.note(format!("Next: metal-candle chat --adapter {output}"));
        }
    }
    report.check.as_ref().map_or(Ok(()), Checked::require)?;
    Ok(SUCCESS)
}
