//! Reading how a family rotates queries and keys.
//!
//! Version 5 of `transformers` has one dictionary `rope_parameters`; before it, the base and the rotated part
//! of a head stood outside of `rope_scaling`.

use serde_json::Map;

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
    Llama3,
    LongRope,
}

impl RopeKind {
    const ALL: &[Self] = &[Self::Default, Self::Linear, Self::Llama3, Self::LongRope];

    fn name(self) -> &'static str {
        match self {
            Self::Default => "default",
            Self::Linear => "linear",
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
const ROPE_KEYS: [&str; 11] = [
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
];

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
    let key = "original_max_position_embeddings";
    // The outer key wins over the one in the dictionary.
    let original = match keys.optional_size(key, rules.original, MAX_POSITIONS)?.or(rules.original)
    {
        Some(original) => original,
        None => dictionary.size(key, shape.max_position_embeddings, MAX_POSITIONS)?,
    };
    let scaling = scaling(dictionary, rules, rotary_dim, shape, original)?;
    Ok(RopeConfig { theta, rotary_dim, scaling, query_scaling: None })
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
    rotary_dim: usize,
    shape: RopeShape,
    original_max_position_embeddings: usize,
) -> Result<RopeScaling> {
    let max_position_embeddings = shape.max_position_embeddings;
    let known = |key: &str| ROPE_KEYS.iter().chain(rules.keys).any(|known| *known == key);
    if let Some((key, value)) = rope.map.iter().find(|(key, value)| !known(key) && !value.is_null())
    {
        let keys: Vec<&str> = ROPE_KEYS.iter().chain(rules.keys).copied().collect();
        return Err(rope.unsupported(
            key,
            format!("{}; the supported keys are {}", short(value), keys.join(", ")),
        ));
    }
    match kind(rope, rules)? {
        RopeKind::Default => Ok(RopeScaling::Default),
        RopeKind::Linear => Ok(RopeScaling::Linear { factor: rope.required("factor")? }),
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
