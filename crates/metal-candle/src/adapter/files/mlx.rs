//! mlx-lm's folder: `adapter_config.json`, which holds all that its training was told, and `adapters.safetensors`,
//! whose tensors are `<path>.lora_a (in, r)` and `.lora_b (r, out)`. The update is multiplied by `scale` itself,
//! which is no alpha. Beside them its training leaves older values in files with a number before their names.

use super::{ADAPTER_CONFIG, AdapterFormat, as_usize, wrong};
use crate::adapter::{LoraConfig, Part, PartKind, Resolved, Targets};
use crate::files::short;
use crate::{Error, Result};
use candle_core::Tensor;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashSet};
use std::path::Path;

/// The name of the weights in a folder of mlx-lm's.
pub const MLX_WEIGHTS: &str = "adapters.safetensors";
pub(super) const BASE_KEY: &str = "model";

/// What stands before the number of a decoder layer in a path.
const LAYERS: &str = "model.layers.";

pub(super) fn parse_config(
    json: &Map<String, Value>,
) -> Result<(LoraConfig, Option<String>), String> {
    let dora = match json.get("fine_tune_type") {
        None => false,
        Some(Value::String(kind)) if kind == "lora" => false,
        Some(Value::String(kind)) if kind == "dora" => true,
        Some(Value::String(kind)) if kind == "full" => {
            return Err(format!(
                "fine_tune_type is \"full\", so {MLX_WEIGHTS} holds weights of the model and no adapter; mlx_lm.fuse \
                 makes a model of them, which is given as one"
            ));
        }
        Some(other) => {
            return Err(format!(
                "fine_tune_type is {}; \"lora\" and \"dora\" are supported",
                short(other)
            ));
        }
    };
    let missing = |key: &str| format!("has no {key}, which mlx-lm needs");
    let parameters = match json.get("lora_parameters") {
        Some(Value::Object(parameters)) => parameters,
        Some(other) => return Err(wrong("lora_parameters", other, "an object")),
        None => return Err(missing("lora_parameters")),
    };
    let parameter = |key: &'static str| {
        parameters.get(key).ok_or_else(|| missing(&format!("lora_parameters.{key}")))
    };
    let number = |key: &'static str, value: &Value| {
        value.as_f64().ok_or_else(|| wrong(&format!("lora_parameters.{key}"), value, "a number"))
    };
    let rank = parameter("rank")?;
    let rank =
        as_usize(rank).ok_or_else(|| wrong("lora_parameters.rank", rank, "a whole number"))?;
    let scale = number("scale", parameter("scale")?)?;
    if !scale.is_finite() || scale <= 0.0 {
        return Err(format!("lora_parameters.scale is {scale}, expected a positive number"));
    }
    let dropout = match parameters.get("dropout") {
        Some(value) => number("dropout", value)? as f32,
        None => 0.0,
    };
    let keys: Option<Vec<String>> = match parameters.get("keys") {
        None | Some(Value::Null) => None,
        Some(value) => Some(
            serde_json::from_value(value.clone())
                .map_err(|_| wrong("lora_parameters.keys", value, "a list of names"))?,
        ),
    };
    let layers = json.get("num_layers").ok_or_else(|| missing("num_layers"))?;
    let layers = layers.as_i64().ok_or_else(|| wrong("num_layers", layers, "a whole number"))?;
    // Zero and less are all layers.
    let mut last_layers = usize::try_from(layers).ok().filter(|&layers| layers > 0);
    let targets = match keys {
        None => Targets::all_linear(),
        Some(keys) => {
            // A path from the model on names a layer wherever it is, any other name one of the last n layers.
            let paths = keys.iter().filter(|key| layer_and_key(key).is_some()).count();
            if paths == keys.len() {
                last_layers = None;
            } else if paths > 0 && last_layers.is_some() {
                return Err(format!(
                    "lora_parameters.keys has names in each of the last {layers} layers and paths such as \
                     {LAYERS}0.self_attn.q_proj; expected one kind of them"
                ));
            }
            Targets::Names(keys)
        }
    };
    let config = LoraConfig {
        rank,
        alpha: alpha(scale, rank),
        dropout,
        targets,
        last_layers,
        dora,
        ..LoraConfig::default()
    };
    config.validate().map_err(|error| error.to_string())?;
    let base = json.get(BASE_KEY).and_then(Value::as_str).map(String::from);
    Ok((config, base))
}

/// Has a configuration without `keys` choose those linear layers that the file has A or B of, where each of its decoder
/// layers has the same. To mlx-lm it means all linear layers, of which those without tensors stay as they are: until October
/// 2025 it meant a few of each family, such as `self_attn.q_proj` and `self_attn.v_proj`. What is missing otherwise, such as
/// the last layers, is of another base.
pub(super) fn fit(
    config: &mut LoraConfig,
    file: &Path,
    in_file: &HashSet<&str>,
    paths: &[String],
    layer_count: usize,
) -> Result<()> {
    if config.targets != Targets::all_linear() {
        return Ok(());
    }
    let all = config.resolve(paths, layer_count)?;
    let is_found = |path: &&str| in_file.contains(path);
    let mut keys: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    for path in all.iter().map(|layer| layer.path.as_str()) {
        let Some((layer, key)) = layer_and_key(path) else { continue };
        let keys = keys.entry(layer).or_default();
        if is_found(&path) {
            keys.push(key);
        }
    }
    let mut keys = keys.into_values();
    let first = keys.next().unwrap_or_default();
    if first.is_empty() || keys.any(|other| other != first) {
        return Ok(());
    }
    let found: Vec<String> =
        all.iter().map(|layer| layer.path.as_str()).filter(is_found).map(String::from).collect();
    if found.len() < all.len() {
        tracing::warn!(
            "{}: has tensors of {} alone, and no keys are in {ADAPTER_CONFIG}; the other linear layers stay as they are",
            file.display(),
            first.join(", ")
        );
        config.choose(found);
    }
    Ok(())
}

/// The alpha that gives this scale at this rank: the whole number, if one does.
fn alpha(scale: f64, rank: usize) -> f64 {
    let alpha = scale * rank as f64;
    let whole = alpha.round();
    if whole / rank as f64 == scale { whole } else { alpha }
}

/// The decoder layer of a path, and what comes after it.
fn layer_and_key(path: &str) -> Option<(usize, &str)> {
    let (layer, key) = path.strip_prefix(LAYERS)?.split_once('.')?;
    Some((layer.parse().ok()?, key))
}

/// A part's name in the file.
pub(super) fn name(kind: PartKind, of: &str) -> String {
    match kind {
        PartKind::A => format!("{of}.lora_a"),
        PartKind::B => format!("{of}.lora_b"),
        PartKind::Magnitude => format!("{of}.m"),
        PartKind::Bias => format!("{of}.bias"),
        PartKind::EmbeddingA | PartKind::EmbeddingB | PartKind::Rows | PartKind::Weight => {
            of.to_string()
        }
    }
}

pub(super) fn layer_of(tensor: &str) -> Option<&str> {
    tensor.strip_suffix(".lora_a")
}

/// Writes the adapter into the existing `folder`, each file whole or not at all. `layers` are those it updates,
/// of a model with `layer_count` of the decoder; `values` are those of
/// [`Parameters::values`](crate::adapter::Parameters::values).
///
/// # Errors
/// When the layers differ in rank or scale, of which mlx-lm's configuration holds one each, or something else
/// than them is trained; then nothing is written.
pub(in crate::adapter) fn write(
    folder: &Path,
    layers: &[Resolved],
    dropout: f32,
    layer_count: usize,
    base_model: &str,
    parts: &[Part],
    values: &Tensor,
) -> Result<()> {
    let Some(first) = layers.first() else {
        return Err(Error::option("format", "mlx-lm's files hold no adapter without layers"));
    };
    let is_of_layer = |part: &&Part| {
        use PartKind::{A, B, Magnitude};
        matches!(part.kind, A | B | Magnitude) && layer_and_key(&part.of).is_some()
    };
    if let Some(part) = parts.iter().find(|part| !is_of_layer(part)) {
        return Err(Error::option(
            "format",
            format!(
                "mlx-lm's files hold the updates of the decoder's linear layers, but this adapter has `{}` too; PEFT's \
                 hold both",
                name(part.kind, &part.of)
            ),
        ));
    }
    if let Some(other) = layers.iter().find(|layer| layer.rank != first.rank) {
        return Err(differing("rank", first, other, |layer| layer.rank.to_string()));
    }
    if let Some(other) = layers.iter().find(|layer| layer.scale != first.scale) {
        return Err(differing("scale", first, other, |layer| layer.scale.to_string()));
    }
    let paths: Vec<&str> = layers.iter().map(|layer| layer.path.as_str()).collect();
    let (keys, num_layers) = select(&paths, layer_count);
    let json = json!({
        "fine_tune_type": if parts.iter().any(|part| part.kind == PartKind::Magnitude) {
            "dora"
        } else {
            "lora"
        },
        "lora_parameters": {
            "dropout": dropout,
            "keys": keys,
            "rank": first.rank,
            "scale": first.scale,
        },
        BASE_KEY: base_model,
        "num_layers": num_layers,
    });
    super::write_weights(folder, AdapterFormat::Mlx, parts, values)?;
    super::write_config(folder, &json)
}

fn differing(
    what: &str,
    first: &Resolved,
    other: &Resolved,
    of: impl Fn(&Resolved) -> String,
) -> Error {
    Error::option(
        "format",
        format!(
            "mlx-lm's files hold one {what} for all layers, but that of `{}` is {} and that of `{}` is {}; PEFT's \
             hold both",
            first.path,
            of(first),
            other.path,
            of(other)
        ),
    )
}

/// `keys` and `num_layers` by which mlx-lm selects exactly these layers: the names that each of the last n layers
/// has an adapter on, or else whole paths.
fn select<'a>(paths: &[&'a str], layer_count: usize) -> (Vec<&'a str>, usize) {
    let found: Option<Vec<(usize, &str)>> = paths.iter().map(|path| layer_and_key(path)).collect();
    let Some(found) = found else { return (paths.to_vec(), layer_count) };
    let first = found.iter().map(|(layer, _)| *layer).min().unwrap_or(0);
    let last = layer_count.saturating_sub(first);
    let mut keys = Vec::new();
    for (_, key) in &found {
        if !keys.contains(key) {
            keys.push(*key);
        }
    }
    // The paths differ, so when there are this many each of these layers has each key.
    if keys.len() * last == found.len() { (keys, last) } else { (paths.to_vec(), layer_count) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(json: Value) -> Result<LoraConfig, String> {
        let Value::Object(json) = json else { panic!() };
        parse_config(&json).map(|(config, _)| config)
    }

    fn config(lora_parameters: Value, num_layers: i64) -> Value {
        json!({"fine_tune_type": "lora", "lora_parameters": lora_parameters, "num_layers": num_layers})
    }

    #[test]
    fn layers_are_selected_by_names_where_the_last_layers_have_the_same_ones() {
        let paths = |layers: &[usize], keys: &[&str]| -> Vec<String> {
            let path = |layer: &usize, key: &&str| format!("model.layers.{layer}.{key}");
            layers.iter().flat_map(|layer| keys.iter().map(move |key| path(layer, key))).collect()
        };
        let selected = |paths: &[String]| {
            let paths: Vec<&str> = paths.iter().map(String::as_str).collect();
            let (keys, layers) = select(&paths, 4);
            (keys.into_iter().map(String::from).collect::<Vec<_>>(), layers)
        };
        let keys = ["self_attn.q_proj", "mlp.up_proj"];
        assert_eq!(selected(&paths(&[0, 1, 2, 3], &keys)), (keys.map(String::from).to_vec(), 4));
        assert_eq!(selected(&paths(&[2, 3], &keys)), (keys.map(String::from).to_vec(), 2));
        // A layer in the middle, the last one missing, and a key of one layer alone.
        let uneven = [paths(&[2, 3], &keys[..1]), paths(&[3], &keys[1..])].concat();
        for others in [paths(&[1], &keys), paths(&[0, 1, 2], &keys), uneven] {
            assert_eq!(selected(&others), (others.clone(), 4));
        }
    }

    #[test]
    fn a_configuration_says_what_it_says_to_mlx_lm() {
        let all = parse(config(json!({"rank": 8, "scale": 20.0, "dropout": 0.1}), -1)).unwrap();
        assert_eq!((all.rank, all.alpha, all.dropout), (8, 160.0, 0.1));
        assert_eq!((all.targets, all.last_layers), (Targets::all_linear(), None));
        assert_eq!(
            parse(config(json!({"rank": 8, "scale": 2, "keys": null}), 3)).unwrap().last_layers,
            Some(3)
        );
        let keys = json!({"rank": 8, "scale": 2, "keys": ["model.layers.1.mlp.up_proj"]});
        assert_eq!(parse(config(keys, 3)).unwrap().last_layers, None);
        for (changed, expected) in [
            (json!({"fine_tune_type": "full"}), "weights of the model and no adapter"),
            (json!({"fine_tune_type": "x"}), "fine_tune_type is \"x\""),
            (json!({"fine_tune_type": "lora"}), "no lora_parameters"),
            (config(Value::Null, 1), "lora_parameters is null, expected an object"),
            (config(json!({"scale": 1}), 1), "no lora_parameters.rank"),
            (config(json!({"rank": 0, "scale": 1}), 1), "rank: is 0"),
            (config(json!({"rank": 4, "alpha": 8}), 1), "no lora_parameters.scale"),
            (config(json!({"rank": 4, "scale": "1"}), 1), "scale is \"1\", expected a number"),
            (config(json!({"rank": 4, "scale": -1}), 1), "expected a positive number"),
            (config(json!({"rank": 4, "scale": 1, "keys": "q_proj"}), 1), "a list of names"),
            (
                config(json!({"rank": 4, "scale": 1, "keys": ["model.layers.0.a", "a"]}), 1),
                "one kind of them",
            ),
            (json!({"lora_parameters": {"rank": 4, "scale": 1}}), "no num_layers"),
        ] {
            let error = parse(changed.clone()).unwrap_err();
            assert!(error.contains(expected), "{changed}: {error}");
        }
    }

    #[test]
    fn an_alpha_gives_its_scale_back() {
        for rank in 1..300 {
            for whole in 1..300 {
                let scale = f64::from(whole) / rank as f64;
                assert_eq!(alpha(scale, rank), f64::from(whole));
            }
        }
        assert_eq!(alpha(0.3, 8), 0.3 * 8.0);
    }
}
