//! Models for commands: where they lie, their dtype and device, and the flags that say so.

use crate::bounds;
use crate::engine::Writing;
use crate::errors::usage;
use crate::output::{BARS, Terminal, bytes};
use crate::processes::Gpus;
use crate::run_folder::unfinished;
use crate::settings::{BaseCompute, BasePlacement, Matmul, Precision, Processor, cut};
use crate::template::TemplateFlags;
use crate::visible::visible;
use anyhow::Context;
use candle_core::{DType, Device};
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use indicatif::{ProgressBar, ProgressStyle};
use metal_candle::adapter::{self, Adapter};
use metal_candle::devices::{self, MetalMatmul};
use metal_candle::gguf::is_gguf;
use metal_candle::hub::{self, Download, HubOptions};
use metal_candle::model::{Holding, Model, Placement, Quantization};
use metal_candle::parallel::launcher::Launched;
use metal_candle::parallel::tensor;
use metal_candle::text::Tokenizer;
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// How a model computes.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub struct Runtime {
    /// The dtype of weights and activations
    #[arg(long, value_enum, default_value_t)]
    pub dtype: Precision,
    /// Hold the weights of a dense model in fewer bits: bitsandbytes' nf4 and fp4, MLX's, GGUF's q4_0 to q8_0, ...
    #[arg(long, value_name = "FORMAT", value_parser = quantizations())]
    pub quantize: Option<Quantization>,
    /// What the frozen linear layers of a dense model are multiplied in
    #[arg(long, value_enum, default_value_t)]
    pub base_compute: BaseCompute,
    /// The device that computes
    #[arg(long, value_enum, default_value_t)]
    pub device: Processor,
    /// Who makes the large products of linear layers on Metal [default: fused]
    #[arg(long, value_enum)]
    pub matmul: Option<Matmul>,
    /// Threads that compute [default: one a core]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

/// Where a model's weights lie.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Device")]
pub struct Placed {
    /// Where the weights lie between their uses: `host` runs a model larger than the GPU's memory, slowly
    #[arg(
        long,
        value_enum,
        default_value_t,
        hide_possible_values = true,
        value_name = "device|host"
    )]
    base_placement: BasePlacement,
}

impl Placed {
    fn on(&self, device: &Device) -> anyhow::Result<Placement> {
        match self.base_placement {
            BasePlacement::Device => Ok(Placement::Device),
            BasePlacement::Host => host(device),
            BasePlacement::Sharded => Err(usage(
                "base_placement: is sharded, which is for train; expected device or host",
            )),
        }
    }
}

/// How many devices have a part of a model each, where an engine computes all that is asked for.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Device")]
pub struct Ranks {
    /// Compute on so many NVIDIA GPUs of this machine together, each with a part of every layer: a model that is too large
    /// for one, or texts sooner
    #[arg(long, value_name = "N", default_value_t = 1, alias = "tensor-parallel-size")]
    tensor_parallel: usize,
}

impl Ranks {
    const FLAG: &str = "--tensor-parallel";

    /// How many there are, which write in this way.
    pub fn count(&self, writing: &Writing) -> anyhow::Result<usize> {
        let of_one = |flag: &str| {
            Err(usage(format!(
                "{}: is for several GPUs, and {flag} for one; leave one out",
                Self::FLAG
            )))
        };
        match self.tensor_parallel {
            0 => Err(usage(format!("{}: is 0, expected at least 1", Self::FLAG))),
            2.. if writing.batch_invariant => of_one("--batch-invariant"),
            2.. if writing.draft_model.is_some() => of_one("--draft-model"),
            count => Ok(count),
        }
    }

    /// Their devices, or the only one.
    pub fn devices(&self, processor: Processor, writing: &Writing) -> anyhow::Result<Vec<Device>> {
        match self.count(writing)? {
            1 => Ok(vec![device(processor)?]),
            count => Gpus::Count(count).devices(processor, Self::FLAG),
        }
    }
}

/// The model in a folder on a device, or in parts on several.
pub fn load_on(
    devices: &[Device],
    folder: &Path,
    dtype: DType,
    holding: Holding,
) -> anyhow::Result<Arc<Model>> {
    let model = match (devices, &holding.placement) {
        ([device], _) => Model::load_with(folder, dtype, device, holding)?,
        (devices, Placement::Device) => tensor::load(folder, dtype, devices, holding.quantization)?,
        _ => {
            return Err(usage(
                "--tensor-parallel: keeps the weights on its GPUs, and --base-placement says otherwise; leave one out",
            ));
        }
    };
    Ok(Arc::new(model))
}

/// Which model, and which adapter on it.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Model")]
pub struct Source {
    /// A model's folder, or its id on the Hugging Face hub; without it, the one that the adapter names
    #[arg(short, long, value_name = "DIR|ID")]
    pub model: Option<String>,
    /// The branch, tag or commit of a model on the hub [default: main]
    #[arg(long, value_name = "REVISION")]
    pub revision: Option<String>,
    /// A LoRA adapter to put on the model: a folder as `train`, PEFT or mlx-lm writes it
    #[arg(short, long, value_name = "DIR", visible_alias = "adapter-path")]
    pub adapter: Option<PathBuf>,
}

/// A model that is ready to run.
pub struct Loaded {
    pub model: Arc<Model>,
    pub adapter: Option<Arc<Adapter>>,
    pub tokenizer: Tokenizer,
    /// What the chat template is told.
    pub variables: Map<String, Value>,
    /// Where the model's files are.
    pub folder: PathBuf,
}

impl Runtime {
    /// What a dense model is brought into while it is loaded.
    pub fn quantization(&self) -> anyhow::Result<Option<Quantization>> {
        self.base_compute.quantization(self.quantize)
    }
}

/// The host's memory as the place of weights, where that isn't the device's.
pub fn host(device: &Device) -> anyhow::Result<Placement> {
    check_host("base_placement", device)?;
    Ok(Placement::Host)
}

/// An error about the setting that names the host's memory, unless the device has one of its own.
pub fn check_host(key: &str, device: &Device) -> anyhow::Result<()> {
    match device.is_cuda() {
        true => Ok(()),
        false => Err(usage(format!(
            "{key}: is host, which is for NVIDIA GPUs; this device computes in that memory anyway"
        ))),
    }
}

impl Source {
    /// The folder of the model.
    pub fn folder(&self, terminal: Terminal) -> anyhow::Result<PathBuf> {
        self.folder_by(|model, revision| resolve(model, revision, terminal))
    }

    /// The folder of the model, of which `config.json` alone is needed.
    pub fn config_folder(&self, terminal: Terminal) -> anyhow::Result<PathBuf> {
        self.folder_by(|model, revision| {
            let options = HubOptions::from_env()?;
            let folder = with_progress(terminal, |progress| {
                hub::resolve_config_with(model, revision, &options, progress)
            });
            of_the_hub(model, folder)
        })
    }

    fn folder_by(
        &self,
        resolve: impl Fn(&str, Option<&str>) -> anyhow::Result<PathBuf>,
    ) -> anyhow::Result<PathBuf> {
        let named = match (&self.model, &self.adapter) {
            (Some(model), _) => model.clone(),
            (None, Some(file)) if is_gguf(file) => {
                return Err(usage(format!(
                    "no model: {} is a GGUF adapter, which names no base model; give --model",
                    file.display()
                )));
            }
            (None, Some(folder)) => {
                check_adapter(folder)?;
                let (_, base) = adapter::read_config(folder)?;
                base.filter(|base| !base.is_empty()).ok_or_else(|| {
                    usage(format!(
                        "no model: {} names no base model; give --model",
                        folder.join(adapter::ADAPTER_CONFIG).display()
                    ))
                })?
            }
            (None, None) => {
                return Err(usage(
                    "no model: give --model a model's folder or an id on the hub, or --adapter an adapter that names one",
                ));
            }
        };
        if let Some(what) = self.model.as_ref().and_then(|_| unfinished_model(Path::new(&named))) {
            anyhow::bail!("{named}: not a model: {what}");
        }
        let folder = resolve(&named, self.revision.as_deref());
        match (&self.model, &self.adapter) {
            (None, Some(adapter)) => folder.with_context(|| {
                format!(
                    "the base model that {} names; --model gives another place",
                    adapter.display()
                )
            }),
            _ => folder,
        }
    }

    /// The tokenizer of the model in `folder`, with the chat template that is asked for, or that of the adapter.
    pub fn tokenizer(&self, folder: &Path, template: &TemplateFlags) -> anyhow::Result<Tokenizer> {
        let mut tokenizer = Tokenizer::load(folder)?;
        if let Some(adapter) = &self.adapter {
            tokenizer.take_chat_template(adapter)?;
        }
        template.apply(&mut tokenizer)?;
        Ok(tokenizer)
    }

    /// The model with its adapter, and its tokenizer.
    pub fn load(
        &self,
        runtime: &Runtime,
        placed: &Placed,
        template: &TemplateFlags,
        terminal: Terminal,
    ) -> anyhow::Result<Loaded> {
        self.load_on(&[device(runtime.device)?], runtime, placed, template, terminal)
    }

    /// As [`Self::load`], on this device, or in parts on several.
    pub fn load_on(
        &self,
        devices: &[Device],
        runtime: &Runtime,
        placed: &Placed,
        template: &TemplateFlags,
        terminal: Terminal,
    ) -> anyhow::Result<Loaded> {
        check_matmul(runtime.matmul, runtime.dtype, runtime.device, "--dtype f16 or --dtype f32")?;
        let device = devices.first().context("no device")?;
        let holding =
            Holding { quantization: runtime.quantization()?, placement: placed.on(device)? };
        set_matmul(runtime.matmul, device)?;
        if let Some(folder) = &self.adapter {
            check_adapter(folder)?;
        }
        let folder = self.folder(terminal)?;
        let tokenizer = self.tokenizer(&folder, template)?;
        let model = load_on(devices, &folder, dtype(runtime.dtype), holding)?;
        let adapter = match &self.adapter {
            Some(folder) => {
                let started = Instant::now();
                let adapter = Adapter::load(&model, folder)?;
                device.synchronize()?;
                let milliseconds = 1e3 * started.elapsed().as_secs_f64();
                tracing::info!("loaded the adapter in {milliseconds:.1} ms");
                Some(Arc::new(adapter))
            }
            None => None,
        };
        Ok(Loaded { model, adapter, tokenizer, variables: template.variables(), folder })
    }
}

/// That a token of one model is none, or another one, of the model beside it; each with what it is called.
pub fn another_vocabulary(key: &str, id: u32, both: [(&str, &Tokenizer); 2]) -> anyhow::Error {
    let [(name, token), (other_name, other)] = both.map(|(name, tokenizer)| {
        (name, tokenizer.id_to_token(id).map_or("nothing".into(), |token| cut(&token)))
    });
    usage(format!(
        "{key}: has another vocabulary than the {other_name}: token {id} is {token} of the {name} and {other} of the \
         {other_name}; expected models with the same tokenizer"
    ))
}

/// What `--quantize` takes.
pub fn quantizations() -> impl TypedValueParser<Value = Quantization> {
    PossibleValuesParser::new(Quantization::names()).try_map(|word| word.parse::<Quantization>())
}

/// What an adapter's files name as its model, given as `model`: a hub id as it is, a folder or a GGUF file by its full
/// path, so that the adapter can be used from anywhere.
pub fn base_name(model: Option<&str>, folder: &Path) -> String {
    match model {
        Some(model)
            if !Path::new(model).exists()
                && model.split('/').count() == 2
                && !model.starts_with(['.', '~', '/']) =>
        {
            model.to_string()
        }
        _ => folder.canonicalize().unwrap_or_else(|_| folder.to_path_buf()).display().to_string(),
    }
}

/// Whether two paths are one folder.
pub fn same_folder(a: &Path, b: &Path) -> bool {
    matches!((a.canonicalize(), b.canonicalize()), (Ok(a), Ok(b)) if a == b)
}

/// What to say of a folder that holds the checkpoints of a run, and no model.
fn unfinished_model(folder: &Path) -> Option<String> {
    (folder.is_dir() && !folder.join("config.json").exists()).then(|| unfinished(folder)).flatten()
}

/// That a folder looks like an adapter, before a model is loaded for it.
pub fn check_adapter(folder: &Path) -> anyhow::Result<()> {
    if !folder.join(adapter::ADAPTER_CONFIG).is_file() {
        let found = if folder.is_file() {
            "this is a file; expected a folder with adapter_config.json and its weights".into()
        } else if !folder.is_dir() {
            "there is no such folder".into()
        } else if folder.join("config.json").is_file() {
            "this is a whole model; give it as --model".into()
        } else {
            unfinished(folder).unwrap_or_else(|| "there is no adapter_config.json in it".into())
        };
        anyhow::bail!("{}: not an adapter: {found}", folder.display());
    }
    adapter::read_config(folder)?;
    Ok(())
}

/// What `auto` stands for on this machine: a GPU where there is one that all kernels are made for.
fn choose(processor: Processor) -> Processor {
    match processor {
        Processor::Auto if devices::cuda_count() > 0 => Processor::Cuda,
        Processor::Auto if devices::metal_is_suitable(0) => Processor::Metal,
        Processor::Auto => Processor::Cpu,
        given => given,
    }
}

/// The device, if this build has it.
pub fn device(processor: Processor) -> anyhow::Result<Device> {
    device_of(processor, None)
}

/// The device of this process, which may be one of several with a GPU each.
pub fn device_of(processor: Processor, launched: Option<&Launched>) -> anyhow::Result<Device> {
    devices::check_cpu_instructions()
        .map_err(|error| usage(metal_candle::tensor_message(&error)))?;
    match choose(processor) {
        Processor::Auto | Processor::Cpu => Ok(Device::Cpu),
        Processor::Cuda if !cfg!(feature = "cuda") => {
            Err(usage("device: this build has no CUDA; use --device cpu"))
        }
        Processor::Cuda => {
            let number = launched.map_or(Ok(0), |launched| launched.gpu(devices::cuda_count()));
            Ok(devices::cuda(number.map_err(usage)?)?)
        }
        Processor::Metal if !cfg!(feature = "metal") => {
            Err(usage("device: this build has no Metal; use --device cpu"))
        }
        Processor::Metal => Ok(devices::metal(0)?),
    }
}

/// That the dtype is one of those that the products' maker takes; `others` are the flags for them.
pub fn check_matmul(
    matmul: Option<Matmul>,
    precision: Precision,
    processor: Processor,
    others: &str,
) -> anyhow::Result<()> {
    if matmul == Some(Matmul::Mps)
        && matches!(precision, Precision::Auto | Precision::Bf16)
        && choose(processor) == Processor::Metal
    {
        return Err(usage(format!(
            "matmul: mps multiplies no bf16, which is the dtype here; add {others}"
        )));
    }
    Ok(())
}

/// Chooses who makes the large products of linear layers, which only Metal leaves open.
pub fn set_matmul(matmul: Option<Matmul>, device: &Device) -> anyhow::Result<()> {
    let Some(matmul) = matmul else { return Ok(()) };
    if !device.is_metal() {
        return Err(usage(
            "matmul: is only for Metal; use it with --device metal, or leave it out",
        ));
    }
    devices::set_metal_matmul(match matmul {
        Matmul::Fused => MetalMatmul::Fused,
        Matmul::Candle => MetalMatmul::Candle,
        Matmul::Mps => MetalMatmul::Mps,
    });
    Ok(())
}

/// The dtype that is meant: `auto` is bf16 on every device. It takes half the memory of f32, and the time of a step is about
/// the same where a processor has no arithmetic in it.
pub fn dtype(precision: Precision) -> DType {
    match precision {
        Precision::Auto | Precision::Bf16 => DType::BF16,
        Precision::F32 => DType::F32,
        Precision::F16 => DType::F16,
    }
}

/// What computes, and in which dtype, as a person reads it.
pub fn describe_compute(precision: Precision, base: BaseCompute, device: &Device) -> String {
    let place = match device {
        Device::Cpu => "the processor",
        Device::Cuda(_) => "an NVIDIA GPU",
        Device::Metal(_) => "the Mac's GPU",
    };
    let dtype = dtype(precision).as_str();
    let default = match precision {
        Precision::Auto => " (half the memory of f32; --dtype chooses)",
        _ => "",
    };
    let base = base.described().map_or(String::new(), |(_, _, numbers)| {
        format!("; frozen linear layers are held and multiplied in {numbers}")
    });
    format!("{place}, in {dtype}{default}{base}")
}

/// Sets how many threads compute. Nothing may run in another thread yet.
pub fn set_threads(threads: Option<usize>) -> anyhow::Result<()> {
    match threads {
        None => Ok(()),
        Some(threads) => {
            bounds::check("threads", threads, &bounds::THREADS)?;
            // SAFETY: the commands call this before they start a thread, so nobody reads the
            // environment meanwhile. Both rayon and candle take the number from here.
            unsafe { std::env::set_var("RAYON_NUM_THREADS", threads.to_string()) };
            Ok(())
        }
    }
}

/// The folder of a model, downloaded with progress if needed.
pub fn resolve(model: &str, revision: Option<&str>, terminal: Terminal) -> anyhow::Result<PathBuf> {
    let options = HubOptions::from_env()?;
    let folder =
        with_progress(terminal, |progress| hub::resolve_with(model, revision, &options, progress));
    of_the_hub(model, folder)
}

/// The folder of a model, or why there is none: one that is looked for on the hub may have been meant as a path.
fn of_the_hub(model: &str, folder: metal_candle::Result<PathBuf>) -> anyhow::Result<PathBuf> {
    if Path::new(model).exists() || model.split('/').count() != 2 {
        return Ok(folder?);
    }
    folder.with_context(|| {
        format!("there is no file or folder {model} here, so it is a model of the hub")
    })
}

/// Does what may download, and shows how far it is.
pub fn with_progress<T>(terminal: Terminal, work: impl FnOnce(&mut dyn FnMut(Download)) -> T) -> T {
    let mut current: Option<(String, ProgressBar)> = None;
    let done = work(&mut |download| {
        let is_new = current.as_ref().is_none_or(|(file, _)| file != download.file);
        if is_new {
            if let Some((_, bar)) = current.take() {
                bar.finish_and_clear();
            }
            let bar = if terminal.draws_bars() {
                BARS.add(ProgressBar::new(download.total).with_style(style()))
            } else {
                terminal.note(format!(
                    "downloading {} ({} of {}, {})",
                    download.file,
                    download.index + 1,
                    download.files,
                    bytes(download.total)
                ));
                ProgressBar::hidden()
            };
            bar.set_message(visible(download.file).into_owned());
            current = Some((download.file.to_string(), bar));
        }
        if let Some((_, bar)) = &current {
            bar.set_length(download.total);
            bar.set_position(download.bytes);
        }
    });
    if let Some((_, bar)) = current {
        bar.finish_and_clear();
    }
    done
}

fn style() -> ProgressStyle {
    let template =
        "{msg}  [{bar:30}] {binary_bytes}/{binary_total_bytes}  {binary_bytes_per_sec}  {eta} left";
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_of_the_hub_may_have_been_meant_as_a_path() {
        let failed = || Err(metal_candle::Error::option("x", "cannot reach the hub"));
        let error = of_the_hub("no/such.gguf", failed()).unwrap_err();
        let told = crate::errors::describe(&error);
        let expected =
            "there is no file or folder no/such.gguf here, so it is a model of the hub: ";
        assert!(told.starts_with(expected) && told.contains("cannot reach"), "{told}");
        let error = of_the_hub("./no/such/model", failed()).unwrap_err().to_string();
        assert!(!error.contains("of the hub"), "{error}");
    }

    #[test]
    fn a_base_that_lies_here_is_named_by_its_full_path() {
        // Tests run in the crate's folder. Each of these could be an id, too.
        for path in ["src/main.rs", "demo/base"] {
            let full = Path::new(path).canonicalize().unwrap().display().to_string();
            assert_eq!(base_name(Some(path), Path::new(path)), full);
        }
        assert_eq!(base_name(Some("owner/name"), Path::new("/cache/x")), "owner/name");
    }

    #[test]
    fn mps_is_refused_for_bf16_on_metal_only() {
        let check = |matmul, precision, processor| {
            check_matmul(Some(matmul), precision, processor, "--dtype f32")
        };
        for precision in [Precision::Auto, Precision::Bf16] {
            let error = check(Matmul::Mps, precision, Processor::Metal).unwrap_err();
            assert!(error.to_string().contains("no bf16"), "{error}");
            assert!(check(Matmul::Candle, precision, Processor::Metal).is_ok());
            assert!(check(Matmul::Mps, precision, Processor::Cpu).is_ok());
        }
        assert!(check(Matmul::Mps, Precision::F16, Processor::Metal).is_ok());
        assert!(check(Matmul::Mps, Precision::F32, Processor::Metal).is_ok());
    }
}
