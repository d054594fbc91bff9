//! PEFT's folder: `adapter_config.json` and `adapter_model.safetensors`, whose tensors are
//! `base_model.model.<path>.lora_A.weight (r, in)` and `.lora_B.weight (out, r)`.

use super::{ADAPTER_CONFIG, AdapterFormat, as_usize, wrong};
use crate::Result;
use crate::adapter::{EvaConfig, LoraConfig, Part, PartKind, StartFrom, Targets, TokenIndices};
use crate::files::{cut, short};
use candle_core::Tensor;
use indexmap::IndexSet;
use serde_json::{Map, Value, json};
use std::path::Path;

/// The name of the weights in an adapter folder.
pub const ADAPTER_WEIGHTS: &str = "adapter_model.safetensors";
pub(super) const BASE_KEY: &str = "base_model_name_or_path";

pub(super) const PREFIX: &str = "base_model.model.";

/// Keys that change nothing about what the adapter computes.
const IRRELEVANT: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "eva_config",
    "inference_mode",
    "layers_pattern",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
];

pub(super) fn parse_config(
    json: &Map<String, Value>,
) -> Result<(LoraConfig, Option<String>), String> {
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
    let mut config = LoraConfig { rank: 8, alpha: 8.0, ..LoraConfig::default() };
    let (mut base, mut ensure_tying) = (None, false);
    for (key, value) in json {
        let found = short(value);
        let wrong = |expected: &str| wrong(key, value, expected);
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
            TokenIndices::KEY if !is_unset(value) => {
                let tokens = serde_json::from_value(value.clone()).map_err(|_| {
                    wrong("a list of tokens, or an object with one of embed_tokens or lm_head")
                })?;
                config.trainable_token_indices = Some(tokens);
            }
            "ensure_weight_tying" => {
                ensure_tying = value.as_bool().ok_or_else(|| wrong("true or false"))?;
            }
            "init_lora_weights" => {
                config.start = start(value).map_err(|expected| wrong(&expected))?
            }
            "task_type" if !matches!(value.as_str(), None | Some("CAUSAL_LM")) => {
                return Err(format!("task_type is {found}; only \"CAUSAL_LM\" is supported"));
            }
            "task_type" => {}
            BASE_KEY => base = value.as_str().map(String::from),
            key if IRRELEVANT.contains(&key) => {}
            _ if is_unset(value) => {}
            _ => {
                return Err(format!(
                    "{} is {found}, which is not supported; supported are r, lora_alpha, \
                     lora_dropout, use_rslora, use_dora, target_modules, exclude_modules, \
                     layers_to_transform, rank_pattern, alpha_pattern, bias, modules_to_save, \
                     trainable_token_indices and init_lora_weights",
                    cut(key)
                ));
            }
        }
    }
    if !json.contains_key("target_modules") || json["target_modules"].is_null() {
        return Err("has no target_modules".into());
    }
    config.validate().map_err(|error| error.to_string())?;
    if ensure_tying && config.adapts_tables().map_err(|error| error.to_string())? {
        return Err("ensure_weight_tying is true, which is not supported where embed_tokens or lm_head is among \
                    target_modules or modules_to_save"
            .into());
    }
    Ok((config, base))
}

/// Has a configuration choose what PEFT chooses of a model's layers, given by path: what is saved whole gets no update,
/// and names that the model has no layer of don't count as long as it has one of another.
pub(super) fn fit(
    config: &mut LoraConfig,
    file: &Path,
    paths: &[String],
    layer_count: usize,
) -> Result<()> {
    let unknown: IndexSet<String> = config.unknown_targets(paths).map(String::from).collect();
    if let Targets::Names(names) = &mut config.targets
        && unknown.len() < names.len()
        && let Some(first) = unknown.first()
    {
        tracing::warn!(
            "{}: {} of the {} target_modules, such as {:?}, are no linear layers of this base model; the others are \
             adapted",
            file.with_file_name(ADAPTER_CONFIG).display(),
            unknown.len(),
            names.len(),
            cut(first)
        );
        names.retain(|name| !unknown.contains(name));
    }
    let saved: Vec<String> =
        config.modules_to_save.iter().map(|module| format!(".{module}.")).collect();
    let is_saved = |path: &str| {
        let path = format!(".{path}.");
        saved.iter().any(|module| path.contains(module.as_str()))
    };
    let chosen = config.resolve(paths, layer_count)?;
    let count = chosen.len();
    let updated: Vec<String> =
        chosen.into_iter().map(|layer| layer.path).filter(|path| !is_saved(path)).collect();
    if !updated.is_empty() && updated.len() < count {
        config.choose(updated);
    }
    Ok(())
}

/// Where an adapter of this `init_lora_weights` has started, so far as its files leave that open.
fn start(value: &Value) -> Result<StartFrom, String> {
    const EXPECTED: &str = "true, false, \"gaussian\", \"pissa\", \"olora\" or \"eva\"";
    match value {
        // Only a start that was taken from the weights matters to a finished adapter.
        Value::Null | Value::Bool(_) => Ok(StartFrom::Kaiming),
        Value::String(word) if matches!(word.as_str(), "orthogonal" | "mica") => {
            Ok(StartFrom::Kaiming)
        }
        Value::String(word) => match StartFrom::parse(word) {
            Some(StartFrom::PissaIterations(_)) => Err(format!(
                "{EXPECTED}; what it took from the weights was drawn at random and isn't in the file, but PEFT's \
                 save_pretrained with path_initial_model_for_weight_conversion writes it"
            )),
            // What EVA has found stands in the patterns and in A.
            Some(StartFrom::Eva) => Ok(StartFrom::Kaiming),
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

/// A part's name in the file.
pub(super) fn name(kind: PartKind, of: &str) -> String {
    match kind {
        PartKind::A => format!("{PREFIX}{of}.lora_A.weight"),
        PartKind::B => format!("{PREFIX}{of}.lora_B.weight"),
        PartKind::Magnitude => format!("{PREFIX}{of}.lora_magnitude_vector"),
        PartKind::Bias => format!("{PREFIX}{of}.base_layer.bias"),
        PartKind::EmbeddingA => format!("{PREFIX}{of}.lora_embedding_A"),
        PartKind::EmbeddingB => format!("{PREFIX}{of}.lora_embedding_B"),
        PartKind::Rows => format!("{PREFIX}{of}.token_adapter.trainable_tokens_delta"),
        PartKind::Weight => format!("{PREFIX}{of}"),
    }
}

/// Whether the file has the other orientation.
pub(super) fn is_transposed(kind: PartKind) -> bool {
    use PartKind::{A, B, EmbeddingA, EmbeddingB};
    matches!(kind, A | B | EmbeddingA | EmbeddingB)
}

pub(super) fn layer_of(tensor: &str) -> Option<&str> {
    tensor.strip_prefix(PREFIX)?.strip_suffix(".lora_A.weight")
}

/// The configuration of what is written of the parts, with what A and B started from.
fn as_plain(config: &LoraConfig, parts: &[Part]) -> Result<LoraConfig> {
    let mut plain = config.with_found_as_patterns(updated(parts))?;
    if config.start.takes_from_weight() {
        // The scale stays: alpha / rank, or alpha / √rank.
        let factor = if config.rslora { 2f64.sqrt() } else { 2.0 };
        plain.start = StartFrom::Kaiming;
        plain.rank *= 2;
        plain.alpha *= factor;
        plain.rank_pattern.values_mut().for_each(|rank| *rank *= 2);
        plain.alpha_pattern.values_mut().for_each(|alpha| *alpha *= factor);
    }
    Ok(plain)
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
    let config = &as_plain(config, parts)?;
    super::write_weights(folder, AdapterFormat::Peft, parts, values)?;

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
    let EvaConfig { rho, tau, whiten, adjust_scaling_factors } = config.eva;
    let eva = json!({
        "rho": rho,
        "tau": tau,
        "use_label_mask": true,
        "label_mask_value": -100,
        "whiten": whiten,
        "adjust_scaling_factors": adjust_scaling_factors,
    });
    let json = json!({
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        BASE_KEY: base_model,
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
        "eva_config": if config.start == StartFrom::Eva { eva } else { Value::Null },
        "inference_mode": true,
        "modules_to_save": match config.modules_to_save.as_slice() {
            [] => Value::Null,
            modules => json!(modules),
        },
        "revision": null,
        TokenIndices::KEY: config.trainable_token_indices,
    });
    super::write_config(folder, &json)
}

/// The paths of the layers with an update.
fn updated(parts: &[Part]) -> impl Iterator<Item = &str> {
    use PartKind::{A, EmbeddingA};
    parts.iter().filter(|part| matches!(part.kind, A | EmbeddingA)).map(|part| part.of.as_str())
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
