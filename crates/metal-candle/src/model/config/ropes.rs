//! Reading how a family rotates queries and keys.
//!
//! Version 5 of `transformers` has one dictionary `rope_parameters`; before it, the base and the rotated part
//! of a head stood outside of `rope_scaling`.

use serde_json::{Map, Value};

use super::MAX_POSITIONS;
use super::keys::Keys;
use crate::Result;
use crate::files::{cut, short};
use crate::model::rope::{RopeConfig, RopeScaling};

/// What a model's ropes depend on beside their own keys.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeShape {
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    /// The base where the file has none.
    pub theta: f64,
}

/// A kind of rope, by its name in `rope_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RopeKind {
    Default,
    Linear,
    Dynamic,
    Yarn,
    Llama3,
    LongRope,
}

impl RopeKind {
    const ALL: &[Self] =
        &[Self::Default, Self::Linear, Self::Dynamic, Self::Yarn, Self::Llama3, Self::LongRope];

    fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Linear => "linear",
            Self::Dynamic => "dynamic",
            Self::Yarn => "yarn",
            Self::Llama3 => "llama3",
            Self::LongRope => "longrope",
        }
    }
}

/// What a family lets its ropes be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeRules {
    pub kinds: &'static [RopeKind],
    /// Names beside [`RopeKind::name`].
    pub aliases: &'static [(&'static str, RopeKind)],
    /// Whether a part of a head may stay as it is.
    pub partial: bool,
    /// What the outer `original_max_position_embeddings` is where the file lacks it; with `None`, the
    /// dictionary's counts, or else the length of the model.
    pub original: Option<usize>,
    /// Keys of the dictionary that the family reads itself.
    pub keys: &'static [&'static str],
}

impl RopeRules {
    /// Those of most families.
    pub const COMMON: Self =
        Self { kinds: RopeKind::ALL, aliases: &[], partial: false, original: None, keys: &[] };
}

/// Keys that a dictionary of rope parameters may have. An unknown one may change the computation.
const ROPE_KEYS: [&str; 16] = [
    "rope_type",
    "type",
    "rope_theta",
    "factor",
    "partial_rotary_factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "short_factor",
    "long_factor",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
];

/// Keys of published files that transformers doesn't read, and so don't count here, either: what the factor of YaRN's cosines
/// and sines is multiplied by in other programs, and whether a model was trained with its rope.
const IGNORED_KEYS: [&str; 2] = [ATTN_FACTOR, "finetuned"];
const ATTN_FACTOR: &str = "attn_factor";

/// The one rope of most families.
pub(crate) fn one_rope(keys: Keys, shape: RopeShape) -> Result<Vec<RopeConfig>> {
    let empty = Map::new();
    let dictionary = dictionary(keys)?.unwrap_or_else(|| keys.of("rope_parameters.", &empty));
    Ok(vec![rope(dictionary, keys, shape, &RopeRules::COMMON)?])
}

/// The dictionary of a rope that all layers share, if there is one.
pub(crate) fn dictionary(keys: Keys) -> Result<Option<Keys>> {
    // transformers 5 lets the old key win as well.
    if let Some(map) = keys.object("rope_scaling")?.filter(|map| !map.is_empty()) {
        return Ok(Some(keys.of("rope_scaling.", map)));
    }
    Ok(keys.object("rope_parameters")?.map(|map| keys.of("rope_parameters.", map)))
}

/// The rope of `dictionary`, with what stands outside of it in `keys`.
pub(crate) fn rope(
    dictionary: Keys,
    keys: Keys,
    shape: RopeShape,
    rules: &RopeRules,
) -> Result<RopeConfig> {
    let place = |key| if dictionary.get(key).is_some() { dictionary } else { keys };
    let theta = place("rope_theta").positive("rope_theta", shape.theta)?;
    let rotary_dim = rotary_dim(place("partial_rotary_factor"), shape, rules)?;
    let original = original_length(dictionary, keys, shape, rules)?;
    let scaling = scaling(dictionary, rules, (theta, rotary_dim), shape, original)?;
    Ok(RopeConfig { theta, rotary_dim, scaling, query_scaling: None })
}

/// The context length before a stretch. The outer key wins over the one in the dictionary.
pub(crate) fn original_length(
    dictionary: Keys,
    keys: Keys,
    shape: RopeShape,
    rules: &RopeRules,
) -> Result<usize> {
    let key = "original_max_position_embeddings";
    match keys.optional_size(key, None, MAX_POSITIONS)?.or(rules.original) {
        Some(original) => Ok(original),
        None => dictionary.size(key, shape.max_position_embeddings, MAX_POSITIONS),
    }
}

/// How much of a head is rotated, by `partial_rotary_factor` in `keys`.
pub(crate) fn rotary_dim(keys: Keys, shape: RopeShape, rules: &RopeRules) -> Result<usize> {
    let key = "partial_rotary_factor";
    let (head_dim, partial) = (shape.head_dim, keys.positive(key, 1.0)?);
    if partial > 1.0 {
        return Err(keys.unsupported(key, format!("{partial}; it is at most 1")));
    }
    if partial < 1.0 && !rules.partial {
        return Err(keys.unsupported(key, format!("{partial}; it is 1 for this family")));
    }
    let rotary_dim = (head_dim as f64 * partial) as usize;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        return Err(keys.invalid(
            key,
            format!("{partial} of head_dim {head_dim} is {rotary_dim}; expected an even number"),
        ));
    }
    Ok(rotary_dim)
}

/// What `dictionary` makes of the frequencies of a rope.
pub(crate) fn scaling(
    rope: Keys,
    rules: &RopeRules,
    (theta, rotary_dim): (f64, usize),
    shape: RopeShape,
    original_max_position_embeddings: usize,
) -> Result<RopeScaling> {
    let max_position_embeddings = shape.max_position_embeddings;
    let known = |key: &str| {
        ROPE_KEYS.iter().chain(rules.keys).chain(&IGNORED_KEYS).any(|known| *known == key)
    };
    if let Some((key, value)) = rope.map.iter().find(|(key, value)| !known(key) && !value.is_null())
    {
        let keys: Vec<&str> = ROPE_KEYS.iter().chain(rules.keys).copied().collect();
        return Err(rope.unsupported(
            key,
            format!("{}; the supported keys are {}", short(value), keys.join(", ")),
        ));
    }
    if let Some(value) = rope.map.get(ATTN_FACTOR).filter(|value| !value.is_null()) {
        tracing::warn!(
            "{}: {}{ATTN_FACTOR} = {} is left alone, as transformers does; what cosines and sines are multiplied by is \
             attention_factor",
            rope.path.display(),
            rope.place,
            short(value)
        );
    }
    match kind(rope, rules)? {
        RopeKind::Default => Ok(RopeScaling::Default),
        RopeKind::Linear => Ok(RopeScaling::Linear { factor: rope.required("factor")? }),
        RopeKind::Dynamic if rotary_dim < 4 => {
            let message = format!("found a rotated width of {rotary_dim}; expected at least 4");
            Err(rope.invalid("rope_type = \"dynamic\"", message))
        }
        RopeKind::Dynamic => {
            Ok(RopeScaling::Dynamic { factor: rope.required("factor")?, max_position_embeddings })
        }
        RopeKind::Yarn => yarn(rope, theta, shape, original_max_position_embeddings),
        RopeKind::Llama3 => {
            let low_freq_factor = rope.required("low_freq_factor")?;
            let high_freq_factor = rope.required("high_freq_factor")?;
            if high_freq_factor <= low_freq_factor {
                return Err(rope.invalid(
                    "high_freq_factor",
                    format!("found {high_freq_factor}; expected more than low_freq_factor = {low_freq_factor}"),
                ));
            }
            Ok(RopeScaling::Llama3 {
                factor: rope.required("factor")?,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            })
        }
        RopeKind::LongRope => {
            let original = original_max_position_embeddings as f64;
            let ratio = max_position_embeddings as f64 / original;
            let factor = rope.optional_positive("factor", None)?.unwrap_or(ratio);
            let stretched = (1.0 + factor.ln() / original.ln()).sqrt();
            let attention_factor = rope
                .optional_positive("attention_factor", None)?
                .unwrap_or(if factor <= 1.0 { 1.0 } else { stretched });
            if !attention_factor.is_finite() {
                return Err(rope.invalid(
                    "original_max_position_embeddings",
                    format!("found {original}; expected at least 2"),
                ));
            }
            Ok(RopeScaling::LongRope {
                short_factor: rope.positive_list("short_factor", rotary_dim / 2)?,
                long_factor: rope.positive_list("long_factor", rotary_dim / 2)?,
                original_max_position_embeddings,
                attention_factor,
            })
        }
    }
}

fn yarn(
    rope: Keys,
    theta: f64,
    shape: RopeShape,
    original_max_position_embeddings: usize,
) -> Result<RopeScaling> {
    if theta <= 1.0 {
        let message = format!("found {theta}; expected more than 1 for the rope type yarn");
        return Err(rope.invalid("rope_theta", message));
    }
    let ratio = shape.max_position_embeddings as f64 / original_max_position_embeddings as f64;
    let factor = match rope.get("factor") {
        Some(Value::Null) => ratio,
        _ => rope.required("factor")?,
    };
    let (fast, slow) = ("beta_fast", "beta_slow");
    let beta_fast = rope.optional_positive(fast, None)?.unwrap_or(32.0);
    let beta_slow = rope.optional_positive(slow, None)?.unwrap_or(1.0);
    if beta_fast < beta_slow {
        let message = format!("found {beta_fast}; expected at least {slow} = {beta_slow}");
        return Err(rope.invalid(fast, message));
    }
    let growth = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    // They count only where both are there, and 0 is not.
    let (mscale, all) = (rope.non_negative("mscale")?, rope.non_negative("mscale_all_dim")?);
    let default = match (mscale, all) {
        (Some(mscale), Some(all)) if mscale != 0.0 && all != 0.0 => growth(mscale) / growth(all),
        _ => growth(1.0),
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast,
        beta_slow,
        truncate: rope.flag("truncate", true)?,
        original_max_position_embeddings,
        attention_factor: rope.optional_positive("attention_factor", None)?.unwrap_or(default),
    })
}

/// What `rope_type`, or `type` in older files, names.
fn kind(rope: Keys, rules: &RopeRules) -> Result<RopeKind> {
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let name = rope.text(key)?.unwrap_or("default");
    let alias = rules.aliases.iter().find(|(alias, _)| *alias == name).map(|(_, kind)| *kind);
    let kind = alias.or_else(|| rules.kinds.iter().copied().find(|kind| kind.name() == name));
    kind.ok_or_else(|| {
        let names: Vec<&str> = rules.kinds.iter().map(|kind| kind.name()).collect();
        let (last, others) = names.split_last().unwrap_or((&"none", &[]));
        let names = format!("{} and {last}", others.join(", "));
        rope.unsupported(key, format!("{:?}; {names} are supported", cut(name)))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use crate::model::families::testing::{assert_invalid, assert_unsupported, parse_with};
    use crate::model::rope::{RopeConfig, RopeScaling};

    fn rope(model_type: &str, extra: Value) -> RopeConfig {
        parse_with(model_type, extra).unwrap().ropes.remove(0)
    }

    /// In a dictionary of a model whose length is 64 times 512.
    fn yarn(changes: Value) -> Value {
        let mut map = json!({ "rope_type": "yarn", "factor": 4.0,
            "original_max_position_embeddings": 512 });
        map.as_object_mut().unwrap().extend(changes.as_object().unwrap().clone());
        json!({ "max_position_embeddings": 32768, "rope_parameters": map })
    }

    #[test]
    fn a_stretched_rope_makes_the_context_longer() {
        let context =
            |model_type: &str, extra: Value| parse_with(model_type, extra).unwrap().context();
        let length = |length: usize, scaling: Value| json!({ "max_position_embeddings": length, "rope_scaling": scaling });
        let linear = json!({ "type": "linear", "factor": 4.0 });
        assert_eq!(context("llama", length(4096, linear.clone())), 16384);
        let yarn =
            json!({ "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768 });
        for given in [32768, 131072] {
            assert_eq!(context("qwen2", length(given, yarn.clone())), 131072);
        }
        // What Gemma 3's files have is the length after it.
        assert_eq!(context("gemma3_text", length(131072, linear)), 131072);
        let dynamic = json!({ "type": "dynamic", "factor": 4.0 });
        assert_eq!(context("llama", length(4096, dynamic)), 4096);
    }

    #[test]
    fn what_transformers_leaves_alone_in_a_rope_is_left_alone() {
        let plain = rope("qwen3", yarn(json!({})));
        let more = json!({ "attn_factor": 0.878, "finetuned": true });
        assert_eq!(rope("qwen3", yarn(more)), plain);
    }

    fn attention_factor(rope: &RopeConfig) -> f64 {
        match rope.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor,
            _ => panic!("{rope:?}"),
        }
    }

    #[test]
    fn the_yarn_of_qwen_2_5_is_read() {
        // What the card of Qwen2.5-7B-Instruct says to add to its config.json.
        let extra = json!({ "hidden_size": 3584, "num_attention_heads": 28, "num_key_value_heads": 4,
            "max_position_embeddings": 32768, "rope_theta": 1000000.0,
            "rope_scaling": { "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn" } });
        let expected = RopeConfig {
            theta: 1e6,
            rotary_dim: 128,
            scaling: RopeScaling::Yarn {
                factor: 4.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate: true,
                original_max_position_embeddings: 32768,
                // 0.1 ln 4 + 1
                attention_factor: 1.138629436111989,
            },
            query_scaling: None,
        };
        assert_eq!(rope("qwen2", extra), expected);
    }

    #[test]
    fn every_key_of_yarn_is_read() {
        let extra = yarn(json!({ "beta_fast": 16, "beta_slow": 2, "truncate": false,
            "attention_factor": 0.7, "mscale": 2.0, "mscale_all_dim": 1.0, "rope_theta": 1e5 }));
        let expected = RopeScaling::Yarn {
            factor: 4.0,
            beta_fast: 16.0,
            beta_slow: 2.0,
            truncate: false,
            original_max_position_embeddings: 512,
            attention_factor: 0.7,
        };
        let found = rope("llama", extra);
        assert_eq!((found.scaling, found.theta), (expected, 1e5));
        // As a file has it whose writer left the defaults.
        let nulls = json!({ "beta_fast": null, "beta_slow": null, "attention_factor": null,
            "mscale": null, "mscale_all_dim": null });
        assert_eq!(rope("llama", yarn(nulls)), rope("llama", yarn(json!({}))));
        // The length of the model over the original one.
        let RopeScaling::Yarn { factor, .. } =
            rope("llama", yarn(json!({ "factor": null }))).scaling
        else {
            panic!("not yarn")
        };
        assert_eq!(factor, 64.0);
        let without = json!({ "max_position_embeddings": 1024,
            "rope_scaling": { "type": "yarn", "factor": 2.0 } });
        assert!(matches!(
            rope("llama", without).scaling,
            RopeScaling::Yarn { original_max_position_embeddings: 1024, .. }
        ));
    }

    #[test]
    fn mscale_counts_with_mscale_all_dim_alone() {
        let found = |changes| attention_factor(&rope("llama", yarn(changes)));
        let growth = |mscale: f64| 0.1 * mscale * 4f64.ln() + 1.0;
        assert_eq!(found(json!({ "mscale": 0.707, "mscale_all_dim": 0.707 })), 1.0);
        assert_eq!(
            found(json!({ "mscale": 2.0, "mscale_all_dim": 0.5 })),
            growth(2.0) / growth(0.5)
        );
        for lone in [json!({ "mscale": 2.0 }), json!({ "mscale": 2.0, "mscale_all_dim": 0 })] {
            assert_eq!(found(lone), growth(1.0));
        }
        assert_eq!(found(json!({ "factor": 0.5 })), 1.0);
    }

    #[test]
    fn dynamic_rope_grows_beyond_the_models_length() {
        let extra = json!({ "max_position_embeddings": 4096,
            "original_max_position_embeddings": 512,
            "rope_scaling": { "type": "dynamic", "factor": 2.0 } });
        let expected = RopeScaling::Dynamic { factor: 2.0, max_position_embeddings: 4096 };
        assert_eq!(rope("llama", extra).scaling, expected);
    }

    #[test]
    fn every_family_but_phi3_has_every_kind() {
        for model_type in ["llama", "mistral", "qwen2", "qwen3", "gemma2", "smollm3", "olmo2"] {
            let extra = |kind| json!({ "rope_scaling": { "type": kind, "factor": 2.0 } });
            let scaling = |kind| rope(model_type, extra(kind)).scaling;
            assert!(matches!(scaling("dynamic"), RopeScaling::Dynamic { .. }), "{model_type}");
            assert!(matches!(scaling("yarn"), RopeScaling::Yarn { .. }), "{model_type}");
        }
        let nested = json!({ "rope_parameters": {
            "full_attention": { "rope_type": "yarn", "factor": 8.0, "rope_theta": 1e6 },
            "sliding_attention": { "rope_type": "default", "rope_theta": 1e4 } } });
        assert!(matches!(rope("gemma3_text", nested).scaling, RopeScaling::Yarn { .. }));
    }

    #[test]
    fn what_is_not_supported_is_named_with_its_value() {
        let extras = [
            (
                json!({ "rope_scaling": { "type": "proportional" } }),
                "rope_scaling.type = \"proportional\"; default, linear, dynamic, yarn, llama3 and longrope are supported",
            ),
            (
                json!({ "rope_scaling": { "type": "default", "mrope_section": [1] } }),
                "rope_scaling.mrope_section = [1]; the supported keys are rope_type",
            ),
            (
                json!({ "rope_scaling": { "type": "dynamic", "factor": 2.0, "alpha": 1000.0 } }),
                "rope_scaling.alpha = 1000.0",
            ),
            (json!({ "partial_rotary_factor": 0.5 }), "config.json: partial_rotary_factor = 0.5"),
            (
                json!({ "rope_parameters": { "partial_rotary_factor": 0.5 } }),
                "rope_parameters.partial_rotary_factor = 0.5",
            ),
        ];
        assert_unsupported("llama", extras);
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        let extras = [
            (json!({ "rope_theta": 0 }), "rope_theta"),
            (json!({ "rope_scaling": "linear" }), "rope_scaling: expected an object"),
            (json!({ "rope_scaling": { "type": "linear" } }), "rope_scaling.factor: missing"),
            (json!({ "rope_scaling": { "type": "linear", "factor": 0 } }), "rope_scaling.factor"),
            (
                json!({ "rope_scaling": { "type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4 } }),
                "high_freq_factor",
            ),
            (json!({ "rope_scaling": { "type": "dynamic" } }), "rope_scaling.factor: missing"),
            (
                json!({ "head_dim": 2, "rope_scaling": { "type": "dynamic", "factor": 2 } }),
                "expected at least 4",
            ),
            (json!({ "rope_scaling": { "type": "yarn" } }), "rope_scaling.factor: missing"),
            (yarn(json!({ "factor": -4 })), "rope_parameters.factor: expected a positive number"),
            (yarn(json!({ "factor": "4" })), "rope_parameters.factor: expected a number"),
            (yarn(json!({ "beta_fast": 0 })), "rope_parameters.beta_fast"),
            (yarn(json!({ "beta_slow": -1 })), "rope_parameters.beta_slow"),
            (
                yarn(json!({ "beta_fast": 1, "beta_slow": 2 })),
                "beta_fast: found 1; expected at least beta_slow = 2",
            ),
            (yarn(json!({ "mscale": -1 })), "mscale: expected a number from 0, found -1"),
            (yarn(json!({ "mscale_all_dim": true })), "mscale_all_dim"),
            (yarn(json!({ "truncate": 1 })), "truncate: expected true or false, found 1"),
            (yarn(json!({ "attention_factor": 0 })), "attention_factor"),
            (yarn(json!({ "original_max_position_embeddings": 0 })), "original_max_position"),
            (yarn(json!({ "rope_theta": 1 })), "rope_theta: found 1; expected more than 1"),
        ];
        assert_invalid("llama", extras);
    }
}
