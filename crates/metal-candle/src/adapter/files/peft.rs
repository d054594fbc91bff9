//! PEFT's folder: `adapter_config.json` and `adapter_model.safetensors`, whose tensors are
//! `base_model.model.<path>.lora_A.weight (r, in)` and `.lora_B.weight (out, r)`.

use crate::adapter::{LoraConfig, Parameters, Part, PartKind, StartFrom, Targets};
use crate::files::{cut, short};
use crate::model::Weights;
use crate::{Error, Result, files};
use candle_core::{DType, Tensor};
use metal_candle_kernels::copy;
use serde_json::{Map, Value, json};
use std::collections::BTreeMap;
use std::path::Path;

/// The name of the configuration in an adapter folder.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";
/// The name of the weights in an adapter folder.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";

const PREFIX: &str = "base_model.model.";

/// Keys that change nothing about what the adapter computes.
const IRRELEVANT: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "ensure_weight_tying",
    "inference_mode",
    "layers_pattern",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];

/// Reads an adapter's configuration and the base model it names. Anything it asks for that is
/// not supported is an error that names the key.
pub fn read_config(folder: &Path) -> Result<(LoraConfig, Option<String>)> {
    let path = folder.join(ADAPTER_CONFIG);
    let json: Map<String, Value> = files::read_json(&path)?;
    parse_config(&json).map_err(|message| Error::file(&path, message))
}

fn parse_config(json: &Map<String, Value>) -> Result<(LoraConfig, Option<String>), String> {
    match json.get("peft_type").and_then(Value::as_str) {
        Some("LORA") => {}
        Some(other) => {
            return Err(format!("peft_type is {:?}; only LORA adapters are supported", cut(other)));
        }
        None => {
            return Err(
                "has no peft_type; expected a PEFT LoRA adapter with \"peft_type\": \"LORA\""
                    .into(),
            );
        }
    }
    // PEFT's own defaults, for what its file leaves out.
    let mut config = LoraConfig { rank: 8, alpha: 8.0, ..LoraConfig::default() };
    let mut base = None;
    for (key, value) in json {
        let found = short(value);
        let wrong = |expected: &str| format!("{} is {found}, expected {expected}", cut(key));
        match key.as_str() {
            "peft_type" => {}
            "r" => config.rank = as_usize(value).ok_or_else(|| wrong("a whole number"))?,
            "lora_alpha" => config.alpha = value.as_f64().ok_or_else(|| wrong("a number"))?,
            "lora_dropout" => {
                config.dropout = value.as_f64().ok_or_else(|| wrong("a number"))? as f32;
            }
            "use_rslora" => {
                config.rslora = value.as_bool().ok_or_else(|| wrong("true or false"))?
            }
            "target_modules" => {
                config.targets = serde_json::from_value(value.clone()).map_err(|_| {
                    wrong("a list of names, a regular expression or \"all-linear\"")
                })?;
            }
            "exclude_modules" if !is_unset(value) => {
                config.exclude = Some(
                    serde_json::from_value(value.clone())
                        .map_err(|_| wrong("a list of names or a regular expression"))?,
                );
            }
            "layers_to_transform" if !is_unset(value) => {
                let layers = match value {
                    Value::Array(layers) => layers.iter().map(as_usize).collect(),
                    one => as_usize(one).map(|layer| vec![layer]),
                };
                config.layers = Some(layers.ok_or_else(|| wrong("a layer or a list of layers"))?);
            }
            "rank_pattern" if !is_unset(value) => {
                config.rank_pattern = serde_json::from_value(value.clone())
                    .map_err(|_| wrong("an object of ranks"))?;
            }
            "alpha_pattern" if !is_unset(value) => {
                config.alpha_pattern = serde_json::from_value(value.clone())
                    .map_err(|_| wrong("an object of numbers"))?;
            }
            "use_dora" => config.dora = value.as_bool().ok_or_else(|| wrong("true or false"))?,
            "bias" => {
                config.bias = serde_json::from_value(value.clone())
                    .map_err(|_| wrong("\"none\", \"all\" or \"lora_only\""))?;
            }
            "modules_to_save" if !is_unset(value) => {
                config.modules_to_save =
                    serde_json::from_value(value.clone()).map_err(|_| wrong("a list of names"))?;
            }
            "init_lora_weights" => {
                config.start = start(value).map_err(|expected| wrong(&expected))?
            }
            "task_type" if !matches!(value.as_str(), None | Some("CAUSAL_LM")) => {
                return Err(format!("task_type is {found}; only \"CAUSAL_LM\" is supported"));
            }
            "task_type" => {}
            "base_model_name_or_path" => base = value.as_str().map(String::from),
            key if IRRELEVANT.contains(&key) => {}
            _ if is_unset(value) => {}
            _ => {
                return Err(format!(
                    "{} is {found}, which is not supported; supported are r, lora_alpha, \
                     lora_dropout, use_rslora, use_dora, target_modules, exclude_modules, \
                     layers_to_transform, rank_pattern, alpha_pattern, bias, modules_to_save and \
                     init_lora_weights",
                    cut(key)
                ));
            }
        }
    }
    if !json.contains_key("target_modules") || json["target_modules"].is_null() {
        return Err("has no target_modules".into());
    }
    config.validate().map_err(|error| error.to_string())?;
    Ok((config, base))
}

/// Where an adapter of this `init_lora_weights` has started, so far as its files leave that open.
fn start(value: &Value) -> Result<StartFrom, String> {
    const EXPECTED: &str = "true, false, \"gaussian\", \"pissa\" or \"olora\"";
    match value {
        // Only a start that was taken from the weights matters to a finished adapter.
        Value::Null | Value::Bool(_) => Ok(StartFrom::Kaiming),
        Value::String(word) => match StartFrom::parse(word) {
            Some(StartFrom::PissaIterations(_)) => Err(format!(
                "{EXPECTED}; what it took from the weights was drawn at random and isn't in the file, but PEFT's \
                 save_pretrained with path_initial_model_for_weight_conversion writes it"
            )),
            Some(start) => Ok(start),
            None => Err(EXPECTED.into()),
        },
        _ => Err(EXPECTED.into()),
    }
}

/// A value by which PEFT says that a feature is off.
fn is_unset(value: &Value) -> bool {
    match value {
        Value::Null | Value::Bool(false) => true,
        Value::String(text) => text.is_empty(),
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    }
}

fn as_usize(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|number| usize::try_from(number).ok())
}

/// Reads the values of an adapter's parts. A tensor that is missing, of another shape, or left over is an
/// error. `with_start` says that the file has what A and B started from too, as [`write`] puts it there.
pub(in crate::adapter) fn read_weights(
    folder: &Path,
    parts: &[Part],
    parameters: &Parameters,
    with_start: bool,
) -> Result<()> {
    let path = folder.join(ADAPTER_WEIGHTS);
    let weights = Weights::from_files([&path])?;
    let device = parameters.values().device();
    for part in parts {
        let start = part.start.as_ref().filter(|_| with_start);
        let (name, shape) = (name(part), shape(part, start.is_some()));
        match weights.shape(&name) {
            Some(found) if found == shape => {}
            Some(found) => {
                return Err(Error::file(
                    &path,
                    format!(
                        "`{name}` has shape {found:?}, but this base model and {ADAPTER_CONFIG} ask \
                         for {shape:?}; is this an adapter for another base model?"
                    ),
                ));
            }
            None => {
                return Err(Error::file(
                    &path,
                    format!(
                        "has no tensor `{name}`, which {ADAPTER_CONFIG} asks for on this base model; is \
                         this an adapter for another base model?"
                    ),
                ));
            }
        }
        let value = weights.tensor(&name, &shape, DType::F32, device)?;
        let value = if is_transposed(part) { value.t()? } else { value };
        let Some(start) = start else {
            parameters.set(part.id, &value)?;
            continue;
        };
        let (dimension, rank) = (rank_dimension(part), value.dim(rank_dimension(part))? / 2);
        parameters.set(part.id, &value.narrow(dimension, 0, rank)?)?;
        let old = value.narrow(dimension, rank, rank)?.contiguous()?;
        let old = if part.kind == PartKind::B { old.neg()? } else { old };
        copy::write(start, &old, 0, 0)?;
    }
    if let Some(name) = weights.unread().first() {
        return Err(Error::file(
            &path,
            format!(
                "`{name}` belongs to no layer that {ADAPTER_CONFIG} names in this base model; is this \
             an adapter for another base model?"
            ),
        ));
    }
    Ok(())
}

/// A part's name in the file.
fn name(part: &Part) -> String {
    let of = &part.of;
    match part.kind {
        PartKind::A => format!("{PREFIX}{of}.lora_A.weight"),
        PartKind::B => format!("{PREFIX}{of}.lora_B.weight"),
        PartKind::Magnitude => format!("{PREFIX}{of}.lora_magnitude_vector"),
        PartKind::Bias => format!("{PREFIX}{of}.base_layer.bias"),
        PartKind::Weight => format!("{PREFIX}{of}"),
    }
}

/// Whether the file has the other orientation.
fn is_transposed(part: &Part) -> bool {
    matches!(part.kind, PartKind::A | PartKind::B)
}

/// Which dimension of A or B is the rank.
fn rank_dimension(part: &Part) -> usize {
    usize::from(part.kind == PartKind::A)
}

/// A part's shape in the file.
fn shape(part: &Part, with_start: bool) -> Vec<usize> {
    let mut shape = part.entry.shape.dims().to_vec();
    if with_start {
        shape[rank_dimension(part)] *= 2;
    }
    if is_transposed(part) {
        shape.reverse();
    }
    shape
}

/// What of a part is in the file: its value, and beside it what A and B started from, the latter negated, so
/// that it is a plain LoRA adapter of twice the rank whose layers are the frozen ones at the start.
fn value(part: &Part, values: &Tensor) -> Result<Tensor> {
    let value = part.entry.of(values)?;
    let value = match &part.start {
        None => value,
        Some(start) => {
            let start = start.to_device(value.device())?;
            let start = if part.kind == PartKind::B { start.neg()? } else { start };
            Tensor::cat(&[&value, &start], rank_dimension(part))?
        }
    };
    Ok(if is_transposed(part) { value.t()?.contiguous()? } else { value })
}

/// The configuration of what [`value`] makes of the parts.
fn as_plain(config: &LoraConfig) -> LoraConfig {
    let mut plain = config.clone();
    if config.start.takes_from_weight() {
        // The scale stays: alpha / rank, or alpha / √rank.
        let factor = if config.rslora { 2f64.sqrt() } else { 2.0 };
        plain.start = StartFrom::Kaiming;
        plain.rank *= 2;
        plain.alpha *= factor;
        plain.rank_pattern.values_mut().for_each(|rank| *rank *= 2);
        plain.alpha_pattern.values_mut().for_each(|alpha| *alpha *= factor);
    }
    plain
}

/// Writes the adapter into the existing `folder`, each file whole or not at all. `values` are those of
/// [`Parameters::values`].
pub(in crate::adapter) fn write(
    folder: &Path,
    config: &LoraConfig,
    layer_count: usize,
    base_model: &str,
    parts: &[Part],
    values: &Tensor,
) -> Result<()> {
    let mut tensors = BTreeMap::new();
    for part in parts {
        tensors.insert(name(part), value(part, values)?);
    }
    let tensors: Vec<(String, Tensor)> = tensors.into_iter().collect();
    let metadata = [("format".to_string(), "pt".to_string())].into_iter().collect();
    files::write_safetensors(folder.join(ADAPTER_WEIGHTS), &tensors, Some(metadata))?;

    let config = &as_plain(config);
    let layers = config.selected_layers(layer_count)?;
    let (targets, layers) = match &config.targets {
        // As PEFT does, since other readers of its files know lists only.
        Targets::Pattern(pattern) if pattern == Targets::ALL_LINEAR => {
            (Targets::Names(distinct_names(parts)), layers)
        }
        // PEFT applies a list of layers only to targets given by name.
        Targets::Pattern(_) if layers.is_some() => {
            (Targets::Names(updated(parts).map(String::from).collect()), None)
        }
        targets => (targets.clone(), layers),
    };
    // PEFT's alpha is a whole number, though it takes others.
    let alpha = match config.alpha {
        whole if whole.fract() == 0.0 && whole < 1e15 => json!(whole as i64),
        other => json!(other),
    };
    let json = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_model,
        "r": config.rank,
        "lora_alpha": alpha,
        "lora_dropout": config.dropout,
        "use_rslora": config.rslora,
        "use_dora": config.dora,
        "target_modules": targets,
        "exclude_modules": config.exclude,
        "layers_to_transform": layers,
        "layers_pattern": layers.as_ref().map(|_| "layers"),
        "rank_pattern": config.rank_pattern,
        "alpha_pattern": config.alpha_pattern,
        "bias": config.bias,
        "fan_in_fan_out": false,
        "init_lora_weights": match config.start {
            StartFrom::Kaiming => json!(true),
            other => json!(other.to_string()),
        },
        "inference_mode": true,
        "modules_to_save": match config.modules_to_save.as_slice() {
            [] => Value::Null,
            modules => json!(modules),
        },
        "revision": null,
    });
    let bytes = serde_json::to_vec_pretty(&json)
        .map_err(|error| Error::file(folder.join(ADAPTER_CONFIG), error.to_string()))?;
    files::write_bytes_atomic(folder.join(ADAPTER_CONFIG), &bytes)
}

/// The paths of the layers with an update.
fn updated(parts: &[Part]) -> impl Iterator<Item = &str> {
    parts.iter().filter(|part| part.kind == PartKind::A).map(|part| part.of.as_str())
}

fn distinct_names(parts: &[Part]) -> Vec<String> {
    let mut names = Vec::new();
    for path in updated(parts) {
        let name = path.rsplit('.').next().unwrap_or(path).to_string();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}
