//! `inspect`: what a model, an adapter or a checkpoint is.

use crate::errors::{SUCCESS, usage};
use crate::models;
use crate::output::{self, Terminal, bytes, grouped, table};
use crate::settings::cut;
use candle_core::{DType, Device};
use clap::Args;
use metal_candle::adapter::{self, AdapterFormat, Biases, Targets, TokenIndices};
use metal_candle::files;
use metal_candle::gguf::is_gguf;
use metal_candle::model::config::ExpertsConfig;
use metal_candle::model::rope::RopeScaling;
use metal_candle::model::{Model, Weights, stored_bytes};
use metal_candle::text::{CHAT_TEMPLATE, Tokenizer};
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

const STATE: &str = "trainer_state.json";
const EXAMPLES: &str = "\
Examples:
  metal-candle inspect model/
  metal-candle inspect HuggingFaceTB/SmolLM2-135M-Instruct
  metal-candle inspect adapters/checkpoints/step-00000100 --json";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// A model's folder, .gguf file or id on the hub, an adapter's folder, or a checkpoint's
    #[arg(value_name = "DIR|ID")]
    target: String,
    /// The branch, tag or commit of a model on the hub [default: main]
    #[arg(long, value_name = "REVISION")]
    revision: Option<String>,
    /// Report as one JSON object on stdout
    #[arg(long)]
    json: bool,
}

/// What is shown: rows for a person, an object for a program.
struct Report {
    rows: Vec<(&'static str, String)>,
    object: Map<String, Value>,
}

impl Report {
    fn new(kind: &str) -> Self {
        let object = Map::from_iter([("kind".to_string(), kind.into())]);
        Self { rows: Vec::new(), object }
    }

    fn row(&mut self, name: &'static str, text: impl ToString) {
        self.rows.push((name, text.to_string()));
    }

    fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.object.insert(key.into(), value.into());
    }
}

/// Shows.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let terminal = terminal(arguments.json);
    let path = Path::new(&arguments.target);
    let is_checkpoint = path.join(STATE).is_file();
    let is_adapter =
        path.join(adapter::ADAPTER_CONFIG).is_file() && !path.join("config.json").is_file();
    if let (true, Some(revision)) = (is_checkpoint || is_adapter, &arguments.revision) {
        return Err(usage(format!(
            "revision: is {}, but {} is a folder here; leave it out, as only models of the hub have revisions",
            cut(revision),
            path.display()
        )));
    }
    let report = if is_checkpoint {
        checkpoint(path)?
    } else if is_adapter {
        let mut report = Report::new("adapter");
        describe_adapter(&mut report, path)?;
        report
    } else {
        let revision = arguments.revision.as_deref();
        let folder = models::resolve(&arguments.target, revision, terminal)?;
        let mut report = Report::new("model");
        describe_model(&mut report, &folder)?;
        report
    };
    if terminal.json {
        output::json(&report.object)?;
    } else {
        output::prose(&table(&report.rows))?;
    }
    Ok(SUCCESS)
}

fn checkpoint(folder: &Path) -> anyhow::Result<Report> {
    let mut report = Report::new("checkpoint");
    let state: Map<String, Value> = files::read_json(folder.join(STATE))?;
    let text = |key: &str| state.get(key).map_or("unknown".into(), Value::to_string);
    let of = state
        .get("fingerprint")
        .and_then(|fingerprint| fingerprint.get("total_steps"))
        .map_or("unknown".into(), Value::to_string);
    report.row("Checkpoint", folder.display());
    report.row("Step", format!("{} of {of}", text("step")));
    report.row("Position", format!("epoch {}, batch {}", text("epoch"), text("batch")));
    report.row("Trained tokens", text("trained_tokens"));
    report.row("Skipped steps", text("skipped"));
    if let (Some(loss), Some(step)) = (
        state.get("best_loss").and_then(Value::as_f64),
        state.get("best_step").and_then(Value::as_u64),
    ) {
        report.row("Best evaluation", format!("loss {loss:.4} at step {step}"));
    }
    report.set("state", state);
    if folder.join(adapter::ADAPTER_CONFIG).is_file() {
        describe_adapter(&mut report, folder)?;
    } else {
        describe_model(&mut report, folder)?;
    }
    Ok(report)
}

fn describe_adapter(report: &mut Report, folder: &Path) -> anyhow::Result<()> {
    let (config, base) = adapter::read_config(folder)?;
    let format = AdapterFormat::of(folder)?;
    let weights = Weights::from_files([folder.join(format.weights())])?;
    let (parameters, dtypes) = count(&weights)?;
    let modules = linear_layers(weights.names().filter_map(|name| format.layer_of(name)));
    let adapted: usize = modules.values().sum();
    let targets = |targets: &Targets| match targets {
        Targets::Names(names) => names.join(", "),
        Targets::Pattern(pattern) => pattern.clone(),
    };
    report.row("Adapter", folder.display());
    report.row("Format", format.name());
    report.row("Base model", base.as_deref().unwrap_or("not named"));
    report.row("Rank", config.rank);
    let stabilised = if config.rslora { ", rank-stabilised" } else { "" };
    report.row("Alpha", format!("{}{stabilised}", config.alpha));
    report.row("Dropout", config.dropout);
    if config.dora {
        report.row("Method", "DoRA");
    }
    if config.start.takes_from_weight() {
        report.row("Started as", config.start);
    }
    if config.bias != Biases::None {
        report.row("Biases", serde_json::to_value(config.bias)?.as_str().unwrap_or_default());
    }
    if !config.modules_to_save.is_empty() {
        report.row("Trained whole", config.modules_to_save.join(", "));
    }
    if let Some(tokens) = &config.trainable_token_indices {
        report.row("Trained rows", tokens);
    }
    report.row("Targets", targets(&config.targets));
    if let Some(exclude) = &config.exclude {
        report.row("Excluded", targets(exclude));
    }
    if let Some(layers) = &config.layers {
        let layers: Vec<String> = layers.iter().map(usize::to_string).collect();
        report.row("Layers", layers.join(", "));
    }
    if let Some(layers) = config.last_layers {
        report.row("Layers", format!("the last {layers}"));
    }
    let template = folder.join(CHAT_TEMPLATE).is_file();
    if template {
        report.row("Chat template", "its own");
    }
    report.set("chat_template", template);
    for (name, patterns) in [
        ("Other ranks", serde_json::to_string(&config.rank_pattern)?),
        ("Other alphas", serde_json::to_string(&config.alpha_pattern)?),
    ] {
        if patterns != "{}" {
            report.row(name, patterns);
        }
    }
    report.row("Adapted", format!("{adapted} linear layers: {}", listed(&modules)));
    report.row("Parameters", format!("{} in {}", grouped(parameters), names(&dtypes)));
    report.set("format", format.name());
    report.set("base_model", base);
    report.set("rank", config.rank);
    report.set("alpha", config.alpha);
    report.set("dropout", config.dropout);
    report.set("rslora", config.rslora);
    report.set("dora", config.dora);
    report.set("init_lora_weights", serde_json::to_value(config.start)?);
    report.set("bias", serde_json::to_value(config.bias)?);
    report.set("modules_to_save", serde_json::to_value(&config.modules_to_save)?);
    report.set(TokenIndices::KEY, serde_json::to_value(&config.trainable_token_indices)?);
    report.set("target_modules", serde_json::to_value(&config.targets)?);
    report.set("exclude_modules", serde_json::to_value(&config.exclude)?);
    report.set("layers", config.layers);
    report.set("last_layers", config.last_layers);
    report.set("rank_pattern", serde_json::to_value(&config.rank_pattern)?);
    report.set("alpha_pattern", serde_json::to_value(&config.alpha_pattern)?);
    report.set("linear_layers", serde_json::to_value(&modules)?);
    report.set("trainable_parameters", parameters);
    Ok(())
}

fn describe_model(report: &mut Report, folder: &Path) -> anyhow::Result<()> {
    let model = Model::outline(folder, DType::F32, &Device::Cpu, None)?;
    let config = model.config();
    let sizes = stored_bytes(folder)?;
    let parameters = model.weight_count() as u64;
    let paths = model.linear_paths();
    let linears = linear_layers(paths.iter().map(String::as_str));
    report.row("Model", folder.display());
    report.row(
        "Family",
        format!("{} ({})", config.architecture.class_name(), config.architecture.model_type()),
    );
    report.row("Parameters", grouped(parameters));
    report.row("Weights", format!("{}, {}", names(&sizes), bytes(sizes.values().sum())));
    let with_experts = config.layers.iter().filter(|layer| layer.has_experts).count();
    let mlp = match with_experts < config.layers.len() {
        true => format!(", MLP {}", config.intermediate_size),
        false => String::new(),
    };
    report.row("Layers", format!("{}, hidden {}{mlp}", config.layers.len(), config.hidden_size));
    if let Some(ExpertsConfig { count, active, width, .. }) = config.experts {
        let of = format!("{with_experts} of {} layers", config.layers.len());
        report.row("Experts", format!("{count} of width {width}, {active} a token, in {of}"));
    }
    report.row(
        "Attention",
        format!(
            "{} query heads, {} key and value heads, of {}",
            config.heads, config.kv_heads, config.head_dim
        ),
    );
    let windows: Vec<usize> = config.layers.iter().filter_map(|layer| layer.window).collect();
    if let Some(window) = windows.first() {
        let of = format!("{} of {} layers", windows.len(), config.layers.len());
        report.row("Window", format!("{window} tokens in {of}"));
    }
    for rope in &config.ropes {
        let scaling = match &rope.scaling {
            RopeScaling::Default => "no scaling".to_string(),
            RopeScaling::Linear { factor } => format!("linear scaling by {factor}"),
            RopeScaling::Llama3 { factor, .. } => format!("llama3 scaling by {factor}"),
            RopeScaling::Dynamic { factor, max_position_embeddings } => {
                format!("dynamic scaling by {factor} beyond {max_position_embeddings} tokens")
            }
            RopeScaling::Yarn { factor, original_max_position_embeddings, .. } => {
                format!("yarn scaling by {factor} of {original_max_position_embeddings} tokens")
            }
            RopeScaling::LongRope { original_max_position_embeddings, .. } => {
                format!("longrope beyond {original_max_position_embeddings} tokens")
            }
        };
        let queries = rope.query_scaling.map_or(String::new(), |scaling| {
            format!(", queries scaled from {} on", scaling.original_max_position_embeddings)
        });
        report.row(
            "RoPE",
            format!("theta {}, {} dimensions, {scaling}{queries}", rope.theta, rope.rotary_dim),
        );
    }
    report.row("Context", format!("{} tokens", grouped(config.context() as u64)));
    report.row(
        "Vocabulary",
        format!(
            "{}, {} head",
            grouped(config.vocab_size as u64),
            if config.tie_word_embeddings { "tied" } else { "own" }
        ),
    );
    report.row("Linear layers", listed(&linears));
    report.set("folder", folder.display().to_string());
    report.set("family", config.architecture.model_type());
    report.set("class", config.architecture.class_name());
    report.set("parameters", parameters);
    report.set("bytes_by_dtype", serde_json::to_value(&sizes)?);
    report.set("layers", config.layers.len());
    report.set("hidden_size", config.hidden_size);
    report.set("intermediate_size", config.intermediate_size);
    report.set(
        "experts",
        config.experts.map(|ExpertsConfig { count, active, width, .. }| {
            json!({ "count": count, "active": active, "width": width, "layers": with_experts })
        }),
    );
    report.set("heads", config.heads);
    report.set("kv_heads", config.kv_heads);
    report.set("head_dim", config.head_dim);
    report.set("context", config.context());
    report.set("vocabulary", config.vocab_size);
    report.set("tied_embeddings", config.tie_word_embeddings);
    report.set(
        "rope",
        config
            .ropes
            .iter()
            .map(|rope| {
                json!({
                    "theta": rope.theta,
                    "dimensions": rope.rotary_dim,
                    "scaling": rope.scaling,
                    "query_scaling": rope.query_scaling,
                })
            })
            .collect::<Vec<_>>(),
    );
    report.set("linear_layers", serde_json::to_value(&linears)?);
    if is_gguf(folder) || folder.join("tokenizer.json").is_file() {
        let tokenizer = Tokenizer::load(folder)?;
        let ends: Vec<String> = tokenizer
            .eos_ids()
            .iter()
            .map(|id| format!("{} ({id})", tokenizer.id_to_token(*id).unwrap_or_default()))
            .collect();
        let template = tokenizer.chat_template().is_some();
        report.row("Tokenizer", format!("{} tokens", grouped(tokenizer.vocab_size() as u64)));
        report.row("End of text", if ends.is_empty() { "none".into() } else { ends.join(", ") });
        report.row("Chat template", if template { "yes" } else { "no" });
        report.set("tokenizer_tokens", tokenizer.vocab_size());
        report.set("eos", tokenizer.eos_ids().to_vec());
        report.set("chat_template", template);
    } else {
        report.row("Tokenizer", "none");
        report.set("tokenizer_tokens", Value::Null);
    }
    Ok(())
}

/// The number of weights, and the bytes of each dtype.
fn count(weights: &Weights) -> anyhow::Result<(u64, BTreeMap<String, u64>)> {
    let mut parameters = 0;
    let mut dtypes = BTreeMap::new();
    for name in weights.names() {
        let count = weights.shape(name).map_or(0, |shape| shape.iter().product::<usize>()) as u64;
        let dtype = weights.dtype(name)?;
        parameters += count;
        *dtypes.entry(dtype.as_str().to_string()).or_default() +=
            count * dtype.size_in_bytes() as u64;
    }
    Ok((parameters, dtypes))
}

/// How many linear layers there are of each name.
fn linear_layers<'a>(paths: impl Iterator<Item = &'a str>) -> BTreeMap<String, usize> {
    let mut layers = BTreeMap::new();
    for path in paths {
        let name = path.rsplit('.').next().unwrap_or(path);
        *layers.entry(name.to_string()).or_default() += 1;
    }
    layers
}

fn listed(layers: &BTreeMap<String, usize>) -> String {
    let parts: Vec<String> =
        layers.iter().map(|(name, count)| format!("{name} x {count}")).collect();
    if parts.is_empty() { "none".into() } else { parts.join(", ") }
}

fn names(dtypes: &BTreeMap<String, u64>) -> String {
    dtypes.keys().map(String::as_str).collect::<Vec<_>>().join(", ")
}
