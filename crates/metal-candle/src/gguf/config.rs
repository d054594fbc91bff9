//! The shape of a model: metadata as a `config.json`, and back.
//!
//! Numbers under `<architecture>.`; those of ropes that no number says stand in tensors (`rope_freqs`,
//! `rope_factors_short`, `rope_factors_long`), which are divisors of the frequencies. What an architecture of llama.cpp
//! doesn't compute is refused when a file is written, and what this library doesn't when one is read.

use serde_json::{Map, Value, json};

use super::about;
use super::architecture::{GPT_OSS, Head, MISTRAL3, Target};
use super::container::{Container, shortest};
use super::types::GgmlType;
use super::writer::Metadata;
use crate::model::Config;
use crate::model::config::{Architecture, LayerConfig};
use crate::model::rope::{RopeConfig, RopeScaling};
use crate::{Error, Result};

pub(super) const ARCHITECTURE: &str = "general.architecture";
const ROPE_FREQS: &str = "rope_freqs.weight";
const ROPE_SHORT: &str = "rope_factors_short.weight";
const ROPE_LONG: &str = "rope_factors_long.weight";
/// Tensors that belong to the configuration.
pub(super) const ROPE_TENSORS: [&str; 3] = [ROPE_FREQS, ROPE_SHORT, ROPE_LONG];
/// Which layers have the window of `attention.sliding_window`.
const PATTERN: &str = "attention.sliding_window_pattern";
/// More entries than that has no rope.
const MOST_PAIRS: usize = 1 << 13;

/// Keys after `<architecture>.` that ask for another computation unless they are 0 or false.
const REFUSED: [&str; 12] = [
    "expert_shared_count",
    "nextn_predict_layers",
    "pooling_type",
    "use_parallel_residual",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.shared_kv_layers",
    "attention.key_length_swa",
    "attention.value_length_swa",
    "rope.dimension_count_swa",
    "rope.dimension_sections",
    "rope.scaling.alpha",
];

/// How many experts a layer has, and how many read a token.
const EXPERTS: [&str; 2] = ["expert_count", "expert_used_count"];
const EXPERT_WIDTH: &str = "expert_feed_forward_length";

/// The architecture of a file of a model.
///
/// # Errors
/// [`Error::File`] when the file is of something else, such as an adapter; [`Error::Unsupported`] when its architecture
/// is not known here.
pub(super) fn target_of(file: &Container) -> Result<&'static Target> {
    match file.text("general.type")? {
        None | Some("model") => {}
        Some("adapter") => {
            return Err(file.invalid("general.type", "is an adapter; a model was expected"));
        }
        Some(other) => {
            return Err(file.invalid("general.type", format!("is {other:?}; expected \"model\"")));
        }
    }
    let Some(name) = file.text(ARCHITECTURE)? else {
        return Err(file.invalid(ARCHITECTURE, "missing; it names the family of a model"));
    };
    Target::named(name).ok_or_else(|| {
        Error::Unsupported(format!(
            "{}: {ARCHITECTURE} = {:?}; the supported architectures are {}",
            file.path().display(),
            crate::files::cut(name),
            Target::names()
        ))
    })
}

/// Reads the keys of an architecture.
struct Keys<'a> {
    file: &'a Container,
    target: &'static Target,
}

impl Keys<'_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.target.name)
    }

    /// A whole number; a list that has one for each layer must have the same for all.
    fn count(&self, name: &str) -> Result<Option<usize>> {
        let key = self.key(name);
        if !self.file.is_list(&key) {
            return self.file.count(&key);
        }
        let numbers = self.file.whole_numbers(&key)?.unwrap_or_default();
        match numbers.split_first() {
            Some((first, rest)) if rest.iter().all(|number| number == first) => {
                usize::try_from(*first).map(Some).map_err(|_| {
                    self.file.invalid(&key, format!("expected whole numbers from 0, found {first}"))
                })
            }
            _ => {
                Err(self
                    .unsupported(name, "a list of different numbers; all layers are alike here"))
            }
        }
    }

    fn required(&self, name: &str) -> Result<usize> {
        self.count(name)?.ok_or_else(|| self.missing(name))
    }

    fn missing(&self, name: &str) -> Error {
        self.file.invalid(&self.key(name), "missing; a model of this architecture needs it")
    }

    fn float(&self, name: &str) -> Result<Option<f64>> {
        self.file.float(&self.key(name))
    }

    fn unsupported(&self, name: &str, message: &str) -> Error {
        let path = self.file.path().display();
        Error::Unsupported(format!("{path}: {}: {message}", self.key(name)))
    }

    /// The divisors of frequencies in a tensor.
    fn divisors(&self, name: &str) -> Result<Option<Vec<f64>>> {
        let Some(info) = self.file.tensor(name) else { return Ok(None) };
        if info.kind != GgmlType::F32 || info.shape.len() != 1 || info.shape[0] > MOST_PAIRS {
            return Err(self.file.invalid(
                name,
                format!("is {} of shape {:?}; expected one row of F32", info.kind, info.shape),
            ));
        }
        let (values, _) = self.file.data(info).as_chunks::<4>();
        Ok(Some(values.iter().map(|value| shortest(f32::from_le_bytes(*value))).collect()))
    }
}

/// The shape of the model in a file.
///
/// # Errors
/// [`Error::File`] for a key that is missing or of another type; [`Error::Unsupported`] for what this library doesn't
/// compute.
pub(super) fn read(file: &Container) -> Result<Config> {
    let target = target_of(file)?;
    let mut config = Config::from_json(&content(file, target)?.to_string())
        .map_err(|error| about(file.path(), error))?;
    config.gguf_architecture = Some(target.name);
    Ok(config)
}

/// The content of a `config.json` for it.
fn content(file: &Container, target: &'static Target) -> Result<Value> {
    let keys = Keys { file, target };
    let not_here = EXPERTS.iter().filter(|_| !target.experts);
    for name in REFUSED.iter().chain(not_here) {
        let key = keys.key(name);
        let refused = match file.is_list(&key) {
            true => true,
            false if !file.has(&key) => false,
            false => match file.flag(&key) {
                Ok(flag) => flag == Some(true),
                Err(_) => file.float(&key)? != Some(0.0),
            },
        };
        if refused {
            return Err(keys.unsupported(name, "asks for what this library doesn't compute"));
        }
    }
    if file.has(&keys.key("attention.causal"))
        && !file.flag(&keys.key("attention.causal"))?.unwrap_or(true)
    {
        return Err(keys.unsupported("attention.causal", "false; a decoder was expected"));
    }

    let hidden = keys.required("embedding_length")?;
    let layers = keys.required("block_count")?;
    let heads = keys.required("attention.head_count")?;
    let kv_heads = keys.count("attention.head_count_kv")?.unwrap_or(heads);
    let head_dim = match keys.count("attention.key_length")? {
        Some(length) => length,
        None => hidden.checked_div(heads).unwrap_or(0),
    };
    if keys.count("attention.value_length")?.is_some_and(|length| length != head_dim) {
        return Err(keys.unsupported("attention.value_length", "values and keys differ in width"));
    }
    let rotated = keys.count("rope.dimension_count")?.unwrap_or(head_dim);
    let context = keys.required("context_length")?;
    let vocabulary = match file.tensor("token_embd.weight").map(|info| info.shape.as_slice()) {
        Some([rows, _]) => *rows,
        _ => keys.required("vocab_size")?,
    };
    let epsilon = keys
        .float("attention.layer_norm_rms_epsilon")?
        .ok_or_else(|| keys.missing("attention.layer_norm_rms_epsilon"))?;

    let mut config = Map::new();
    let mut set = |key: &str, value: Value| drop(config.insert(key.to_string(), value));
    set("vocab_size", json!(vocabulary));
    set("hidden_size", json!(hidden));
    set("intermediate_size", json!(keys.required("feed_forward_length")?));
    set("num_hidden_layers", json!(layers));
    set("num_attention_heads", json!(heads));
    set("num_key_value_heads", json!(kv_heads));
    set("head_dim", json!(head_dim));
    set("max_position_embeddings", json!(context));
    set("rms_norm_eps", json!(epsilon));
    set("tie_word_embeddings", json!(file.tensor("output.weight").is_none()));
    // Which of them there are decides; the weights are looked for by name later.
    set("attention_bias", json!(file.tensor("blk.0.attn_output.bias").is_some()));
    set("mlp_bias", json!(file.tensor("blk.0.ffn_down.bias").is_some()));
    let experts = match keys.count(EXPERTS[0])? {
        None | Some(0) => None,
        Some(count) => Some((count, keys.required(EXPERTS[1])?)),
    };
    if let Some(name) = dtype(file) {
        set("dtype", json!(name));
    }
    if rotated != head_dim {
        set("partial_rotary_factor", json!(part(rotated, head_dim)));
    }
    let theta = keys.float("rope.freq_base")?.unwrap_or(1e4);
    set("rope_theta", json!(theta));
    let scaling = rope_scaling(&keys, theta, rotated, context)?;
    let window = keys.count("attention.sliding_window")?.filter(|window| *window > 0);

    let mut model_type = target.model_type;
    match target.name {
        "llama" if experts.is_some() => {
            model_type = "mixtral";
            set("sliding_window", json!(window));
        }
        "llama" if window.is_some() => {
            // Mistral's window, which llama.cpp doesn't heed.
            model_type = "mistral";
            set("sliding_window", json!(window));
        }
        MISTRAL3 => {
            match keys.float("attention.temperature_scale")?.filter(|beta| *beta != 0.0) {
                Some(beta) => {
                    let Some(mut rope) = scaling.clone() else {
                        return Err(keys.missing("rope.scaling.type"));
                    };
                    rope.insert("llama_4_scaling_beta".into(), json!(beta));
                    rope.insert("rope_theta".into(), json!(theta));
                    set("rope_parameters", Value::Object(rope));
                    set("sliding_window", Value::Null);
                }
                // The text part of Mistral Small 3.
                None => {
                    model_type = "mistral";
                    set("sliding_window", Value::Null);
                }
            }
        }
        "qwen2" | "qwen3" | "qwen3moe" if window.is_some() => {
            return Err(keys.unsupported("attention.sliding_window", "is not known for it"));
        }
        "olmo2" if window.is_some() => {
            return Err(
                keys.unsupported("attention.sliding_window", "this is OLMo 3; OLMo 2 is supported")
            );
        }
        "qwen2" | "qwen3" | "qwen3moe" => set("use_sliding_window", json!(false)),
        "phi3" => set("sliding_window", json!(window)),
        GPT_OSS => {
            set("sliding_window", json!(window));
            set("layer_types", layer_types(&keys, layers, window)?);
            if let Some(width) = keys.count(EXPERT_WIDTH)? {
                set("intermediate_size", json!(width));
            }
            if scaling.is_none() {
                set("rope_scaling", json!({ "rope_type": "default" }));
            }
        }
        "gemma2" | "gemma3" => {
            set("hidden_activation", json!("gelu_pytorch_tanh"));
            let window = match (target.name, window) {
                ("gemma2", None) => Some(4096),
                (_, window) => window,
            };
            set("sliding_window", json!(window));
            set("layer_types", layer_types(&keys, layers, window)?);
            let scale = query_scale(target.name, layers, hidden, heads, head_dim);
            set("query_pre_attn_scalar", json!(scale));
            let cap = |name: &str, default: Option<f64>| -> Result<Value> {
                let cap = keys.float(name)?.or(default).filter(|cap| *cap != 0.0);
                Ok(json!(cap))
            };
            let (attention, last) = match target.name {
                "gemma2" => (Some(50.0), Some(30.0)),
                _ => (None, None),
            };
            set("attn_logit_softcapping", cap("attn_logit_softcapping", attention)?);
            set("final_logit_softcapping", cap("final_logit_softcapping", last)?);
            if target.name == "gemma3" {
                set(
                    "rope_local_base_freq",
                    json!(keys.float("rope.freq_base_swa")?.unwrap_or(1e4)),
                );
            }
        }
        "granite" => {
            let finetuned = keys.key("rope.scaling.finetuned");
            if file.has(&finetuned) && file.flag(&finetuned)? == Some(false) {
                return Err(
                    keys.unsupported("rope.scaling.finetuned", "false; layers without rope")
                );
            }
            let scale = |name: &str, otherwise: f64| -> Result<Value> {
                Ok(json!(keys.float(name)?.filter(|scale| *scale != 0.0).unwrap_or(otherwise)))
            };
            set("attention_multiplier", scale("attention.scale", (head_dim as f64).powf(-0.5))?);
            set("embedding_multiplier", scale("embedding_scale", 1.0)?);
            set("residual_multiplier", scale("residual_scale", 1.0)?);
            set("logits_scaling", scale("logit_scale", 1.0)?);
        }
        // llama.cpp knows no other interval.
        "smollm3" => set("no_rope_layer_interval", json!(4)),
        _ => {}
    }
    match (target.name, experts) {
        ("qwen3moe", Some((count, used))) => {
            set("num_experts", json!(count));
            set("num_experts_per_tok", json!(used));
            let width = match keys.count(EXPERT_WIDTH)? {
                Some(width) => width,
                None => keys.required("feed_forward_length")?.checked_div(used).unwrap_or(0),
            };
            set("moe_intermediate_size", json!(width));
            set("norm_topk_prob", json!(true));
        }
        ("qwen3moe" | GPT_OSS, None) => return Err(keys.missing(EXPERTS[0])),
        (_, Some((count, used))) => {
            set("num_local_experts", json!(count));
            set("num_experts_per_tok", json!(used));
        }
        (_, None) => {}
    }
    if let Some(mut scaling) = scaling.filter(|_| model_type != "ministral3") {
        // The families look for it in different places; the outer one wins everywhere.
        if let Some(original) = scaling.get("original_max_position_embeddings").cloned()
            && model_type != "gemma3_text"
        {
            set("original_max_position_embeddings", original);
            scaling.remove("original_max_position_embeddings");
        }
        set("rope_scaling", Value::Object(scaling));
    }
    let class = Architecture::ALL.iter().find(|family| family.model_type() == model_type);
    set("architectures", json!(class.map(|family| family.class_name()).as_slice()));
    set("model_type", json!(model_type));
    Ok(Value::Object(config))
}

/// The dtype of the matrices, where they have one.
fn dtype(file: &Container) -> Option<&'static str> {
    let mut kinds =
        file.tensors().filter(|(_, info)| info.shape.len() > 1).map(|(_, info)| info.kind);
    let first = kinds.next()?;
    kinds.all(|kind| kind == first).then_some(())?;
    match first {
        GgmlType::F32 => Some("float32"),
        GgmlType::F16 => Some("float16"),
        GgmlType::BF16 => Some("bfloat16"),
        _ => None,
    }
}

/// The factor that makes `rotated` of `head_dim`, which is rounded down.
fn part(rotated: usize, head_dim: usize) -> f64 {
    let part = rotated as f64 / head_dim as f64;
    match (head_dim as f64 * part) as usize == rotated {
        true => part,
        false => (rotated as f64 + 0.5) / head_dim as f64,
    }
}

/// What llama.cpp takes the scale of Gemma's queries from: the width of a head, or of the largest models the residual
/// stream's over the heads.
fn query_scale(name: &str, layers: usize, hidden: usize, heads: usize, head_dim: usize) -> usize {
    match (name, layers) {
        ("gemma2", 46) | ("gemma3", 62) => hidden.checked_div(heads).unwrap_or(head_dim),
        _ => head_dim,
    }
}

/// Which layers of a model have a window.
fn local_of(config: &Config) -> Vec<bool> {
    config.layers.iter().map(|layer| layer.window.is_some()).collect()
}

/// `layer_types` of a `config.json`.
fn layer_types(keys: &Keys, layers: usize, window: Option<usize>) -> Result<Value> {
    let local = local_layers(keys, layers, window.is_some())?;
    let kinds = local.iter().map(|local| match local {
        true => json!("sliding_attention"),
        false => json!("full_attention"),
    });
    Ok(kinds.collect())
}

/// Which layers have the window.
fn local_layers(keys: &Keys, layers: usize, windowed: bool) -> Result<Vec<bool>> {
    let key = keys.key(PATTERN);
    if !windowed || layers > 1 << 12 {
        // More layers than that are refused by who reads the configuration.
        return Ok(vec![false; layers.min(1 << 12)]);
    }
    let own = keys.target.window_period.unwrap_or(0);
    if keys.file.is_list(&key) {
        // llama.cpp has a number here, and its own period where it finds a list.
        let flags = keys.file.whole_numbers(&key)?.unwrap_or_default();
        if flags.len() < layers {
            let message = format!("has {} entries; block_count is {layers}", flags.len());
            return Err(keys.file.invalid(&key, message));
        }
        let listed: Vec<bool> = flags.iter().take(layers).map(|flag| *flag != 0).collect();
        if listed != periodic(layers, own) {
            let message = format!(
                "a list in which other layers have no window than each {own}th; llama.cpp reads no list here, and has \
                 windows in all but each {own}th"
            );
            return Err(keys.unsupported(PATTERN, &message));
        }
        return Ok(listed);
    }
    Ok(periodic(layers, keys.file.count(&key)?.unwrap_or(own)))
}

/// Which layers have the window by llama.cpp's rule: all but each so-many-th.
fn periodic(layers: usize, period: usize) -> Vec<bool> {
    (0..layers).map(|layer| period == 0 || layer % period < period - 1).collect()
}

/// The period by which these layers have the window, an architecture's own if that does.
fn period_of(local: &[bool], own: usize) -> Option<usize> {
    // One of more layers than there are is all of them.
    let mut periods = std::iter::once(own).chain(2..=local.len() + 1);
    periods.find(|period| periodic(local.len(), *period) == local)
}

/// The dictionary `rope_scaling`, if there is anything to be said.
fn rope_scaling(
    keys: &Keys,
    theta: f64,
    rotated: usize,
    context: usize,
) -> Result<Option<Map<String, Value>>> {
    const TYPE: &str = "rope.scaling.type";
    let kind = keys.file.text(&keys.key(TYPE))?;
    let original = keys.count("rope.scaling.original_context_length")?;
    let factor = match keys.float("rope.scaling.factor")? {
        Some(factor) => Some(factor),
        // The key's older name.
        None => keys.float("rope.scale_linear")?,
    };
    let factor = factor.filter(|factor| *factor != 0.0);
    let attention = keys.float("rope.scaling.attn_factor")?;
    let dictionary = |value: Value| match value {
        Value::Object(map) => Ok(Some(map)),
        _ => Ok(None),
    };
    let long = match (keys.divisors(ROPE_SHORT)?, keys.divisors(ROPE_LONG)?) {
        (Some(short), Some(long)) => Some((short, long)),
        (None, None) => None,
        _ => {
            let message = format!("only one of it and {ROPE_LONG} is there");
            return Err(keys.file.invalid(ROPE_SHORT, message));
        }
    };
    // The factor holds for all frequencies, whatever divides each of them.
    let divided = |divisors: Vec<f64>| match (kind, factor) {
        (Some("yarn"), Some(_)) => Err(keys
            .unsupported(TYPE, "\"yarn\", beside a tensor of divisors; one of both is supported")),
        (Some("none"), _) | (_, None) => Ok(divisors),
        (_, Some(factor)) => Ok(divisors.iter().map(|divisor| divisor * factor).collect()),
    };
    if let Some((short, long)) = long {
        return dictionary(json!({
            "rope_type": "longrope", "short_factor": divided(short)?, "long_factor": divided(long)?,
            "attention_factor": attention.unwrap_or(1.0),
            "original_max_position_embeddings": original.unwrap_or(context),
        }));
    }
    // One list for short and long texts.
    let one_list = |divisors: Vec<f64>| {
        json!({
            "rope_type": "longrope", "short_factor": divisors, "long_factor": divisors,
            "attention_factor": attention.unwrap_or(1.0),
            "original_max_position_embeddings": context,
        })
    };
    let attention_is_scaled = attention.is_some_and(|attention| attention != 1.0);
    if let Some(divisors) = keys.divisors(ROPE_FREQS)? {
        let divisors = divided(divisors)?;
        let known = llama3(&divisors, theta, rotated).filter(|_| !attention_is_scaled);
        return dictionary(known.unwrap_or_else(|| one_list(divisors)));
    }
    match (kind, factor) {
        (None | Some("none" | "linear"), _) if attention_is_scaled => {
            dictionary(one_list(divided(vec![1.0; rotated / 2])?))
        }
        (None | Some("linear"), Some(factor)) => {
            dictionary(json!({ "rope_type": "linear", "factor": factor }))
        }
        (Some("yarn"), Some(factor)) => {
            let growth =
                |scale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 };
            // Converters write more of these keys than llama.cpp reads, `yarn_attn_factor` among them.
            let read = |name: &str| match reads_yarn(keys.target) {
                true => keys.float(name),
                false => Ok(None),
            };
            let whole = match read("rope.scaling.yarn_log_multiplier")? {
                Some(scale) if scale != 0.0 => growth(1.0) / growth(scale),
                _ => growth(1.0),
            };
            dictionary(json!({
                "rope_type": "yarn", "factor": factor,
                "attention_factor": attention.unwrap_or(1.0) * whole,
                "beta_fast": read("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                "beta_slow": read("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                "original_max_position_embeddings": original.unwrap_or(context),
                "truncate": keys.target.name != GPT_OSS,
            }))
        }
        (None | Some("none" | "linear" | "yarn"), _) => Ok(None),
        (Some("longrope"), _) => Err(keys.file.invalid(ROPE_SHORT, "missing; longrope needs it")),
        (Some(other), _) => Err(keys.unsupported(
            TYPE,
            &format!(
                "{:?}; none, linear, yarn and longrope are supported",
                crate::files::cut(other)
            ),
        )),
    }
}

/// Whether llama.cpp's code for an architecture reads `yarn_beta_fast`, `yarn_beta_slow` and `yarn_log_multiplier`.
fn reads_yarn(target: &Target) -> bool {
    target.name == MISTRAL3
}

/// The rule of Llama 3.1 that gives these divisors, if one does. Files have the divisors alone.
fn llama3(divisors: &[f64], theta: f64, rotated: usize) -> Option<Value> {
    let factor = divisors.iter().copied().fold(0.0, f64::max);
    let (low, high) = (1.0, 4.0);
    (4..=20).map(|power| 1usize << power).find_map(|original| {
        let scaling = RopeScaling::Llama3 {
            factor,
            low_freq_factor: low,
            high_freq_factor: high,
            original_max_position_embeddings: original,
        };
        let rope = RopeConfig { theta, rotary_dim: rotated, scaling, query_scaling: None };
        let same = divisors.len() == rotated / 2
            && divisors_of(&rope)
                .iter()
                .zip(divisors)
                .all(|(a, b)| (f64::from(*a) / b - 1.0).abs() < 1e-5);
        same.then(|| {
            json!({
                "rope_type": "llama3", "factor": factor, "low_freq_factor": low,
                "high_freq_factor": high, "original_max_position_embeddings": original,
            })
        })
    })
}

/// What a rope's frequencies are divided by.
fn divisors_of(rope: &RopeConfig) -> Vec<f32> {
    let plain = RopeConfig { scaling: RopeScaling::Default, ..rope.clone() };
    let (plain, _) = plain.inverse_frequencies(1);
    let (scaled, _) = rope.inverse_frequencies(1);
    plain.iter().zip(&scaled).map(|(plain, scaled)| plain / scaled).collect()
}

/// Writes a model's shape as metadata, and gives the tensors that belong to it.
///
/// # Errors
/// [`Error::Unsupported`] for what llama.cpp's code for the architecture doesn't compute: a file that says
/// something else would be run as another model.
pub(super) fn write(config: &Config, metadata: &mut Metadata) -> Result<Vec<(String, Vec<f32>)>> {
    let target = Target::of(config)?;
    check(config, target)?;
    let key = |name: &str| format!("{}.{name}", target.name);
    metadata.text(ARCHITECTURE, target.name);
    let window = config.layers.iter().filter_map(|layer| layer.window).min();
    let context = match window {
        // No window is exact as long as texts aren't longer than it.
        Some(window)
            if target.window_period.is_none() && window < config.max_position_embeddings =>
        {
            tracing::warn!(
                "the GGUF file says that the context has {window} tokens instead of {}: llama.cpp has no sliding \
                 window for {}, and longer texts would be computed differently",
                config.max_position_embeddings,
                target.name
            );
            window
        }
        _ => config.max_position_embeddings,
    };
    for (name, value) in [
        ("vocab_size", config.vocab_size),
        ("context_length", context),
        ("embedding_length", config.hidden_size),
        ("block_count", config.layers.len()),
        ("feed_forward_length", config.intermediate_size),
        ("attention.head_count", config.heads),
        ("attention.head_count_kv", config.kv_heads),
        ("attention.key_length", config.head_dim),
        ("attention.value_length", config.head_dim),
    ] {
        metadata.count(&key(name), value)?;
    }
    if let Some(experts) = &config.experts {
        metadata.count(&key(EXPERTS[0]), experts.count)?;
        metadata.count(&key(EXPERTS[1]), experts.active)?;
        if target.name != "llama" {
            metadata.count(&key(EXPERT_WIDTH), experts.width)?;
        }
    }
    metadata.float(&key("attention.layer_norm_rms_epsilon"), config.rms_norm_eps);
    if let (Some(window), Some(own)) = (window, target.window_period) {
        metadata.count(&key("attention.sliding_window"), window)?;
        if let Some(period) = period_of(&local_of(config), own).filter(|period| *period != own) {
            tracing::warn!(
                "the GGUF file says that each {period}th layer has no sliding window instead of each {own}th: versions \
                 of llama.cpp that don't read {} would compute another model",
                key(PATTERN)
            );
            metadata.count(&key(PATTERN), period)?;
        }
    }
    if let Some(cap) = config.attention_softcap {
        metadata.float(&key("attn_logit_softcapping"), cap);
    }
    if let Some(cap) = config.final_softcap {
        metadata.float(&key("final_logit_softcapping"), cap);
    }
    if target.name == "granite" {
        metadata.float(&key("attention.scale"), config.attention_scale);
        metadata.float(&key("embedding_scale"), config.embedding_scale);
        metadata.float(&key("residual_scale"), config.residual_multiplier);
        metadata.float(&key("logit_scale"), 1.0 / config.logits_scale);
    }
    if let [_, local, ..] = config.ropes.as_slice() {
        metadata.float(&key("rope.freq_base_swa"), local.theta);
    }
    match config.ropes.first() {
        Some(rope) => write_rope(config, target, rope, metadata),
        None => Ok(Vec::new()),
    }
}

fn write_rope(
    config: &Config,
    target: &Target,
    rope: &RopeConfig,
    metadata: &mut Metadata,
) -> Result<Vec<(String, Vec<f32>)>> {
    let key = |name: &str| format!("{}.{name}", target.name);
    metadata.count(&key("rope.dimension_count"), rope.rotary_dim)?;
    metadata.float(&key("rope.freq_base"), rope.theta);
    if let Some(scaling) = rope.query_scaling {
        metadata.float(&key("attention.temperature_scale"), scaling.beta);
    }
    let refused = |what: String| {
        Err(Error::Unsupported(format!(
            "a GGUF file of {what}: llama.cpp doesn't compute it for {}",
            target.name
        )))
    };
    let single = |list: &[f64]| list.iter().map(|divisor| *divisor as f32).collect::<Vec<_>>();
    match &rope.scaling {
        RopeScaling::Default => {}
        RopeScaling::Linear { factor } => {
            metadata.text(&key("rope.scaling.type"), "linear");
            metadata.float(&key("rope.scaling.factor"), *factor);
        }
        RopeScaling::Dynamic { .. } => return refused("a model with dynamic rope".into()),
        RopeScaling::Yarn {
            factor,
            beta_fast,
            beta_slow,
            truncate,
            original_max_position_embeddings,
            attention_factor,
        } => {
            let reads_betas = reads_yarn(target);
            if !reads_betas && (*beta_fast, *beta_slow) != (32.0, 1.0) {
                return refused(format!(
                    "yarn with beta_fast {beta_fast} and beta_slow {beta_slow}"
                ));
            }
            if *truncate == (target.name == GPT_OSS) {
                return refused(format!("yarn with truncate = {truncate}"));
            }
            if !truncate {
                tracing::warn!(
                    "the GGUF file says nothing of truncate = false: llama.cpp rounds the bounds between which yarn \
                     stretches, which gpt-oss doesn't"
                );
            }
            metadata.text(&key("rope.scaling.type"), "yarn");
            metadata.float(&key("rope.scaling.factor"), *factor);
            let original = key("rope.scaling.original_context_length");
            metadata.count(&original, *original_max_position_embeddings)?;
            if reads_betas {
                metadata.float(&key("rope.scaling.yarn_beta_fast"), *beta_fast);
                metadata.float(&key("rope.scaling.yarn_beta_slow"), *beta_slow);
            }
            // What llama.cpp multiplies with by itself.
            let growth = if *factor <= 1.0 { 1.0 } else { 0.1 * factor.ln() + 1.0 };
            if reads_betas && *attention_factor == 1.0 {
                metadata.float(&key("rope.scaling.yarn_log_multiplier"), 1.0);
            } else if (attention_factor / growth - 1.0).abs() > 1e-6 {
                metadata.float(&key("rope.scaling.attn_factor"), attention_factor / growth);
            }
        }
        RopeScaling::Llama3 { .. } => {
            if !matches!(target.name, "llama" | MISTRAL3 | "granite") {
                return refused("a model with llama3's rope".into());
            }
            return Ok(vec![(ROPE_FREQS.into(), divisors_of(rope))]);
        }
        RopeScaling::LongRope {
            short_factor,
            long_factor,
            original_max_position_embeddings,
            attention_factor,
        } => {
            if !matches!(target.name, "llama" | MISTRAL3 | "granite" | "phi3") {
                return refused("a model with longrope".into());
            }
            metadata.text(&key("rope.scaling.type"), "longrope");
            let original = key("rope.scaling.original_context_length");
            metadata.count(&original, *original_max_position_embeddings)?;
            metadata.float(&key("rope.scaling.attn_factor"), *attention_factor);
            return Ok(vec![
                (ROPE_SHORT.into(), single(short_factor)),
                (ROPE_LONG.into(), single(long_factor)),
            ]);
        }
    }
    if target.name == "phi3" && config.ropes.iter().all(|rope| rope.scaling == RopeScaling::Default)
    {
        metadata
            .count(&key("rope.scaling.original_context_length"), config.max_position_embeddings)?;
    }
    Ok(Vec::new())
}

/// Checks what llama.cpp's code for an architecture has no key for.
fn check(config: &Config, target: &Target) -> Result<()> {
    let refuse = |what: String| {
        let name = target.name;
        Err(Error::Unsupported(format!(
            "a GGUF file of {what}: llama.cpp's code for {name} computes something else"
        )))
    };
    if config.activation != target.activation {
        return refuse(format!("a model with the activation {:?}", config.activation));
    }
    if config.attention_sinks != target.sinks {
        let has = if target.sinks { "without" } else { "with" };
        return refuse(format!("a model {has} sinks in its heads"));
    }
    if target.square && config.heads * config.head_dim != config.hidden_size {
        return refuse(format!(
            "a model with {} heads of {} in a width of {}",
            config.heads, config.head_dim, config.hidden_size
        ));
    }
    if target.sinks && !config.attention_output_bias {
        return refuse("a model without biases in its attention".into());
    }
    if config.attention_output_bias && !target.output_bias {
        return refuse("a model with a bias after its attention".into());
    }
    if config.mlp_bias && !target.mlp_bias {
        return refuse("a model with biases in its MLP".into());
    }
    if let Some(experts) = &config.experts {
        if !experts.normalized {
            return refuse("a model whose experts' weights don't add up to 1".into());
        }
        if experts.has_biases != target.sinks {
            let have = if target.sinks { "without" } else { "with" };
            return refuse(format!("a model {have} biases of its experts"));
        }
        if config.layers.iter().any(|layer| !layer.has_experts) {
            return refuse("a model in which some layers have experts and others an MLP".into());
        }
    }
    match (target.head, config.tie_word_embeddings) {
        (Head::Required, true) => return refuse("a model whose head is its embedding".into()),
        (Head::Tied, false) => return refuse("a model with a head of its own".into()),
        _ => {}
    }
    let heads = config.head_dim as f64;
    let scale = match target.name {
        "granite" => config.attention_scale,
        "gemma2" | "gemma3" => {
            let (layers, hidden) = (config.layers.len(), config.hidden_size);
            let scale = query_scale(target.name, layers, hidden, config.heads, config.head_dim);
            (scale as f64).powf(-0.5)
        }
        _ => heads.powf(-0.5),
    };
    if (config.attention_scale / scale - 1.0).abs() > 1e-6 {
        let found = config.attention_scale;
        return refuse(format!("a model whose attention is scaled by {found} rather than {scale}"));
    }
    if target.name == "gemma2"
        && (config.attention_softcap.is_none() || config.final_softcap.is_none())
    {
        return refuse("a Gemma 2 without soft caps".into());
    }
    let whole = config.ropes.iter().all(|rope| rope.rotary_dim == config.head_dim);
    if !whole && target.name != "phi3" {
        return refuse("a model that rotates a part of its heads".into());
    }
    let expected = |(index, layer): (usize, &LayerConfig)| match target.name {
        "gemma3" => layer.rope == Some(usize::from(layer.window.is_some())),
        "smollm3" => layer.rope == (!(index + 1).is_multiple_of(4)).then_some(0),
        _ => layer.rope == Some(0),
    };
    if !config.layers.iter().enumerate().all(expected) {
        return refuse("a model with this order of layers with and without positions".into());
    }
    if let [global, local, ..] = config.ropes.as_slice()
        && (local.scaling != RopeScaling::Default || global.query_scaling.is_some())
    {
        return refuse("a model whose local layers have a stretched rope".into());
    }
    if let Some(rope) = config.ropes.first()
        && let Some(scaling) = rope.query_scaling
        && !matches!(rope.scaling, RopeScaling::Yarn { original_max_position_embeddings, .. }
            if original_max_position_embeddings == scaling.original_max_position_embeddings)
    {
        return refuse("a model whose queries are scaled without yarn".into());
    }
    let windows = config.layers.iter().filter_map(|layer| layer.window);
    if windows.clone().min() != windows.clone().max() {
        return refuse("a model with windows of different sizes".into());
    }
    // Gemma 2 always has a window.
    let has_windows = target.name == "gemma2" || windows.max().is_some();
    if let Some(own) = target.window_period.filter(|_| has_windows)
        && period_of(&local_of(config), own).is_none()
    {
        return refuse("a model with this order of layers with and without a window".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::testing::{fixture, fixtures};
    use super::super::writer::write_container;
    use super::super::{AdapterLayer, read_adapter, write_adapter};
    use super::*;
    use crate::model::Model;
    use crate::model::config::Activation;
    use crate::{DType, Device};

    /// What is read of what is written of a model's shape.
    fn round_trip(config: &Config) -> Result<Config> {
        read_with(config, |_| {})
    }

    /// A configuration that was written, with more metadata, and read again.
    fn read_with(config: &Config, more: impl FnOnce(&mut Metadata)) -> Result<Config> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        let mut metadata = Metadata::default();
        let extra = write(config, &mut metadata)?;
        more(&mut metadata);
        let model = Model::random(config.clone(), DType::F32, &Device::Cpu, 1)?;
        let mut tensors: Vec<(String, Vec<usize>, GgmlType)> = model
            .named_weights()
            .map(|(name, id)| {
                let theirs = super::super::architecture::to_gguf(config, name).unwrap();
                (theirs, model.frozen().shape(id).dims().to_vec(), GgmlType::F32)
            })
            .collect();
        // All experts of a layer have one.
        let mut seen = std::collections::BTreeSet::new();
        tensors.retain(|(name, ..)| seen.insert(name.clone()));
        let plain = tensors.len();
        tensors.extend(
            extra.iter().map(|(name, values)| (name.clone(), vec![values.len()], GgmlType::F32)),
        );
        write_container(&path, &metadata, &tensors, |index| {
            Ok(match index.checked_sub(plain) {
                Some(extra_index) => {
                    extra[extra_index].1.iter().flat_map(|value| value.to_le_bytes()).collect()
                }
                None => vec![0; 4 * tensors[index].1.iter().product::<usize>()],
            })
        })?;
        read(&Container::open(&path)?)
    }

    /// Fixtures with what llama.cpp doesn't compute, and what is said of them.
    const REFUSED: [(&str, &str); 6] = [
        ("llama-yarn", "beta_fast 2 and beta_slow 0.5"),
        ("llama-dynamic", "dynamic rope"),
        ("gemma2", "attention is scaled by"),
        ("gemma3-text", "attention is scaled by"),
        ("smollm3", "with and without positions"),
        ("qwen3-moe", "some layers have experts and others an MLP"),
    ];

    /// A fixture without that, if there is a way.
    fn computable(name: &str, mut config: Config) -> Option<Config> {
        match name {
            "llama-dynamic" => return None,
            "gemma2" | "gemma3-text" => {
                config.attention_scale = (config.head_dim as f64).powf(-0.5);
            }
            "smollm3" => {
                for (index, layer) in config.layers.iter_mut().enumerate() {
                    layer.rope = (index != 3).then_some(0);
                }
            }
            "qwen3-moe" => config.layers.iter_mut().for_each(|layer| layer.has_experts = true),
            "llama-yarn" => {
                let RopeScaling::Yarn { truncate, beta_fast, beta_slow, .. } =
                    &mut config.ropes[0].scaling
                else {
                    panic!("not yarn")
                };
                (*truncate, *beta_fast, *beta_slow) = (true, 32.0, 1.0);
            }
            _ => {}
        }
        Some(config)
    }

    #[test]
    fn what_is_written_of_a_model_is_read_as_the_same_model() {
        for (name, config) in fixtures() {
            let Some(mut config) = computable(&name, config) else { continue };
            let mut found = round_trip(&config).unwrap_or_else(|error| panic!("{name}: {error}"));
            found.raw = Value::Null;
            found.gguf_architecture = None;
            found.dtype = None;
            config.raw = Value::Null;
            config.dtype = None;
            let windowless = !name.starts_with("gemma") && name != "gpt-oss";
            if let Some(window) = config.layers.iter().filter_map(|layer| layer.window).min()
                && windowless
            {
                // Without a window the context is cut to it.
                config.layers.iter_mut().for_each(|layer| layer.window = None);
                config.max_position_embeddings = config.max_position_embeddings.min(window);
            }
            if matches!(name.as_str(), "mistral" | "ministral") {
                config.architecture = found.architecture;
                assert_eq!(found.architecture.model_type(), "llama");
            }
            close(&mut found, &config);
            assert_eq!(found, config, "{name}");
        }
    }

    /// Takes over numbers that f32 rounded.
    fn close(found: &mut Config, expected: &Config) {
        fn near(found: &mut f64, expected: f64) {
            if (*found / expected - 1.0).abs() < 1e-6 {
                *found = expected;
            }
        }
        near(&mut found.attention_scale, expected.attention_scale);
        near(&mut found.logits_scale, expected.logits_scale);
        for (rope, other) in found.ropes.iter_mut().zip(&expected.ropes) {
            match (&mut rope.scaling, &other.scaling) {
                (
                    RopeScaling::LongRope {
                        short_factor: a,
                        long_factor: b,
                        attention_factor: c,
                        ..
                    },
                    RopeScaling::LongRope {
                        short_factor: x,
                        long_factor: y,
                        attention_factor: z,
                        ..
                    },
                ) => {
                    a.iter_mut().zip(x).chain(b.iter_mut().zip(y)).for_each(|(a, x)| near(a, *x));
                    near(c, *z);
                }
                (
                    RopeScaling::Yarn { attention_factor: a, .. },
                    RopeScaling::Yarn { attention_factor: b, .. },
                ) => near(a, *b),
                _ => {}
            }
        }
    }

    #[test]
    fn what_llama_cpp_computes_differently_is_refused() {
        for (name, expected) in REFUSED {
            let error = round_trip(&fixture(name)).unwrap_err();
            assert!(matches!(error, Error::Unsupported(_)), "{error}");
            assert!(error.to_string().contains(expected), "{name}: {error}");
        }
        let changed = |name: &str, change: fn(&mut Config)| {
            let mut config = computable(name, fixture(name)).unwrap();
            change(&mut config);
            write(&config, &mut Metadata::default()).unwrap_err().to_string()
        };
        for (error, expected) in [
            (changed("llama", |config| config.activation = Activation::GeluTanh), "GeluTanh"),
            (changed("qwen3", |config| config.attention_sinks = true), "with sinks in its heads"),
            (changed("gpt-oss", |config| config.attention_sinks = false), "without sinks"),
            (
                changed("gpt-oss", |config| {
                    config.experts.as_mut().unwrap().has_biases = false;
                }),
                "without biases of its experts",
            ),
            (
                changed("gpt-oss", |config| config.attention_output_bias = false),
                "without biases in",
            ),
            (changed("gpt-oss", |config| config.layers.swap(0, 1)), "without a window"),
            (changed("qwen2", |config| config.head_dim = 4), "heads of 4"),
            (changed("qwen3", |config| config.attention_output_bias = true), "after its attention"),
            (changed("qwen3", |config| config.mlp_bias = true), "in its MLP"),
            (changed("olmo2", |config| config.tie_word_embeddings = true), "is its embedding"),
            (changed("mistral", |config| config.ropes[0].rotary_dim = 2), "a part of its heads"),
            (
                changed("gemma3-text", |config| config.layers[0].window = Some(99)),
                "different sizes",
            ),
            (changed("gemma3-text", |config| config.layers[0].rope = Some(0)), "this order"),
            (changed("gemma2", |config| config.layers.swap(0, 1)), "without a window"),
            (
                changed("gemma2", |config| {
                    config.layers.iter_mut().for_each(|layer| layer.window = None);
                }),
                "without a window",
            ),
        ] {
            assert!(error.contains(expected), "{error} lacks {expected}");
        }
    }

    #[test]
    fn a_mistral_of_the_architecture_mistral3_stays_one() {
        let plain = fixture("mistral");
        assert_eq!(Target::of(&plain).unwrap().name, "llama");
        let mut config = plain.clone();
        config.gguf_architecture = Some(MISTRAL3);
        let read = round_trip(&config).unwrap();
        assert_eq!(read.architecture.model_type(), "mistral");
        assert_eq!(Target::of(&read).unwrap().name, "mistral3");
        // A base is the same whatever its file is called, so runs on it go on; and config.json doesn't say it.
        let mut without = read.clone();
        without.gguf_architecture = None;
        assert_eq!(Target::of(&without).unwrap().name, "llama");
        let fingerprint = |config: &Config| {
            let model = Model::random(config.clone(), DType::F32, &Device::Cpu, 1).unwrap();
            model.fingerprint().unwrap()
        };
        assert_eq!(fingerprint(&read), fingerprint(&without));
        assert!(!read.raw.to_string().contains("mistral3"), "{}", read.raw);

        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("adapter.gguf");
        let zeros = |rows, columns| {
            candle_core::Tensor::zeros((rows, columns), DType::F32, &Device::Cpu).unwrap()
        };
        let layer = AdapterLayer {
            path: "model.layers.0.self_attn.q_proj".into(),
            a: zeros(2, read.hidden_size),
            b: zeros(read.heads * read.head_dim, 2),
            scale: 1.0,
        };
        write_adapter(&path, &read, &[layer]).unwrap();
        assert_eq!(Container::open(&path).unwrap().text(ARCHITECTURE).unwrap(), Some("mistral3"));
        for base in [&read, &plain] {
            assert_eq!(read_adapter(&path, base).unwrap().len(), 1);
        }
        let error = read_adapter(&path, &fixture("llama")).unwrap_err().to_string();
        assert!(error.contains("is \"mistral3\"; expected \"llama\""), "{error}");
    }

    #[test]
    fn which_layers_have_a_window_is_said_by_a_number() {
        let gemma3 = computable("gemma3-text", fixture("gemma3-text")).unwrap();
        // Each third layer has none.
        assert_eq!(local_of(&gemma3), [true, true, false, true]);
        let pattern = "gemma3.attention.sliding_window_pattern";
        let mut metadata = Metadata::default();
        write(&gemma3, &mut metadata).unwrap();
        let written = format!("{metadata:?}");
        assert!(written.contains(&format!("({pattern:?}, U32, [3, 0, 0, 0])")), "{written}");

        let mut all_local = gemma3.clone();
        for layer in &mut all_local.layers {
            (layer.window, layer.rope) = (gemma3.layers[0].window, gemma3.layers[0].rope);
        }
        let local = |config: Result<Config>| local_of(&config.unwrap());
        assert_eq!(local(round_trip(&all_local)), [true; 4]);
        // llama.cpp takes each sixth where there is a list.
        let with_list =
            |flags: [bool; 4]| read_with(&all_local, |metadata| metadata.flags(pattern, &flags));
        assert_eq!(local(with_list([true; 4])), [true; 4]);
        let error = with_list([true, true, false, true]).unwrap_err().to_string();
        assert!(error.contains(pattern) && error.contains("no list"), "{error}");
    }

    #[test]
    fn a_factor_beside_divisors_holds_for_all_of_them() {
        let plain = computable("llama", fixture("llama")).unwrap();
        let with_divisors = computable("llama3", fixture("llama3")).unwrap();
        let read = |config: &Config, kind: &'static str, factor: f64, attention: Option<f64>| {
            read_with(config, |metadata| {
                metadata.text("llama.rope.scaling.type", kind);
                metadata.float("llama.rope.scaling.factor", factor);
                if let Some(attention) = attention {
                    metadata.float("llama.rope.scaling.attn_factor", attention);
                }
            })
        };
        let rope = |config: Config| config.ropes[0].inverse_frequencies(1);
        for (config, attention) in
            [(&with_divisors, None), (&with_divisors, Some(1.25)), (&plain, Some(1.25))]
        {
            let (before, _) = rope(config.clone());
            let (frequencies, scale) = rope(read(config, "linear", 4.0, attention).unwrap());
            assert_eq!(scale, attention.unwrap_or(1.0));
            for (before, now) in before.iter().zip(&frequencies) {
                assert!((before / now / 4.0 - 1.0).abs() < 1e-6, "{before} and {now}");
            }
            let (frequencies, _) = rope(read(config, "none", 4.0, attention).unwrap());
            assert!((frequencies[1] / before[1] - 1.0).abs() < 1e-6);
        }
        let error = read(&with_divisors, "yarn", 4.0, None).unwrap_err().to_string();
        assert!(error.contains("llama.rope.scaling.type") && error.contains("divisors"), "{error}");
    }

    #[test]
    fn keys_of_yarn_that_llama_cpp_does_not_read_change_nothing() {
        let yarn = |factor: Option<f64>| {
            let config = read_with(&fixture("qwen3"), |metadata| {
                metadata.text("qwen3.rope.scaling.type", "yarn");
                metadata.float("qwen3.rope.scaling.factor", 4.0);
                metadata.float("qwen3.rope.scaling.yarn_attn_factor", 0.878);
                metadata.float("qwen3.rope.scaling.yarn_beta_fast", 8.0);
                metadata.float("qwen3.rope.scaling.yarn_beta_slow", 2.0);
                metadata.float("qwen3.rope.scaling.yarn_log_multiplier", 1.0);
                if let Some(factor) = factor {
                    metadata.float("qwen3.rope.scaling.attn_factor", factor);
                }
            });
            match &config.unwrap().ropes[0].scaling {
                RopeScaling::Yarn { attention_factor, beta_fast, beta_slow, .. } => {
                    (*attention_factor, *beta_fast, *beta_slow)
                }
                other => panic!("{other:?}"),
            }
        };
        let growth = 0.1 * 4f64.ln() + 1.0;
        let (attention, fast, slow) = yarn(None);
        assert!((attention / growth - 1.0).abs() < 1e-6, "{attention}");
        assert_eq!((fast, slow), (32.0, 1.0));
        let (attention, ..) = yarn(Some(0.5));
        assert!((attention / growth - 0.5).abs() < 1e-6, "{attention}");
    }

    #[test]
    fn the_ropes_of_llama_3_and_of_no_known_rule_are_read() {
        let rope = &fixture("llama3").ropes[0];
        let divisors: Vec<f64> = divisors_of(rope).into_iter().map(f64::from).collect();
        let found = llama3(&divisors, rope.theta, rope.rotary_dim).unwrap();
        assert_eq!(found["original_max_position_embeddings"], 64);
        assert_eq!(found["factor"], 8.0);
        let mut other = divisors.clone();
        other[1] *= 1.01;
        assert_eq!(llama3(&other, rope.theta, rope.rotary_dim), None);
        assert_eq!(llama3(&divisors[1..], rope.theta, rope.rotary_dim), None);
    }
}
