//! The families under llama.cpp's names: `general.architecture`, what its code for an architecture can compute, and
//! the names of tensors.
//!
//! | ours, within `model.layers.N.` | GGUF, within `blk.N.` |
//! |---|---|
//! | `self_attn.q_proj`, `k_proj`, `v_proj`, `o_proj` | `attn_q`, `attn_k`, `attn_v`, `attn_output` |
//! | `self_attn.qkv_proj`, `mlp.gate_up_proj` | `attn_qkv`, `ffn_up` |
//! | `self_attn.q_norm`, `k_norm` | `attn_q_norm`, `attn_k_norm` |
//! | `mlp.gate_proj`, `up_proj`, `down_proj` | `ffn_gate`, `ffn_up`, `ffn_down` |
//! | the router, an expert's projections | `ffn_gate_inp`, one of `ffn_gate_exps`, `ffn_up_exps`, `ffn_down_exps` |
//! | `self_attn.sinks` | `attn_sinks.weight` |
//! | `input_layernorm` | `attn_norm` |
//! | the norm before the MLP, whatever its name | `ffn_norm`, of gpt-oss `post_attention_norm` |
//! | the norms after attention and MLP | `post_attention_norm`, `post_ffw_norm` |
//!
//! `model.embed_tokens`, `model.norm` and `lm_head` are `token_embd`, `output_norm` and `output`.

use crate::model::Config;
use crate::model::config::{Activation, Architecture, NormPlacement};
use crate::{Error, Result};

pub(super) const MISTRAL3: &str = "mistral3";
pub(super) const GPT_OSS: &str = "gpt-oss";

/// Whether a file of an architecture has `output.weight`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Head {
    /// Where it isn't the embedding.
    Own,
    /// Always.
    Required,
    /// Never: it is the embedding.
    Tied,
}

/// An architecture of llama.cpp.
#[derive(Debug)]
pub(super) struct Target {
    /// `general.architecture`.
    pub name: &'static str,
    /// The `model_type` of its configuration here.
    pub model_type: &'static str,
    /// Whether rows of queries and keys lie in the order of a rope of neighbours, `(2i, 2i + 1)`, rather than of halves,
    /// `(i, i + d/2)`.
    pub interleaved: bool,
    /// Whether 1 is added to the weights of norms, which we add when they are used.
    pub shifted_norms: bool,
    /// Whether the heads together are as wide as the residual stream.
    pub square: bool,
    /// Whether the attention's output may have a bias.
    pub output_bias: bool,
    /// Whether the MLP may have biases.
    pub mlp_bias: bool,
    pub head: Head,
    /// Whether layers may have experts in the place of an MLP.
    pub experts: bool,
    /// Of the MLP's, or the experts' gates.
    pub activation: Activation,
    /// Whether each head has a sink, and the router and experts biases.
    pub sinks: bool,
    /// Which layers are local where the file doesn't say: all but each so-many-th. `None`: no layer has a window there.
    pub window_period: Option<usize>,
}

const PLAIN: Target = Target {
    name: "",
    model_type: "",
    interleaved: false,
    shifted_norms: false,
    square: false,
    output_bias: false,
    mlp_bias: false,
    head: Head::Own,
    experts: false,
    activation: Activation::Silu,
    sinks: false,
    window_period: None,
};

const ALL: [Target; 12] = [
    Target {
        name: "llama",
        model_type: "llama",
        interleaved: true,
        output_bias: true,
        mlp_bias: true,
        experts: true,
        ..PLAIN
    },
    Target {
        name: MISTRAL3,
        model_type: "ministral3",
        interleaved: true,
        output_bias: true,
        mlp_bias: true,
        ..PLAIN
    },
    Target { name: "qwen2", model_type: "qwen2", square: true, ..PLAIN },
    Target { name: "qwen3", model_type: "qwen3", ..PLAIN },
    Target { name: "qwen3moe", model_type: "qwen3_moe", experts: true, ..PLAIN },
    Target {
        name: "gemma2",
        model_type: "gemma2",
        shifted_norms: true,
        head: Head::Tied,
        activation: Activation::GeluTanh,
        window_period: Some(2),
        ..PLAIN
    },
    Target {
        name: "gemma3",
        model_type: "gemma3_text",
        shifted_norms: true,
        activation: Activation::GeluTanh,
        window_period: Some(6),
        ..PLAIN
    },
    Target { name: "phi3", model_type: "phi3", square: true, ..PLAIN },
    Target { name: "smollm3", model_type: "smollm3", interleaved: true, ..PLAIN },
    Target { name: "olmo2", model_type: "olmo2", square: true, head: Head::Required, ..PLAIN },
    Target {
        name: "granite",
        model_type: "granite",
        interleaved: true,
        output_bias: true,
        mlp_bias: true,
        ..PLAIN
    },
    Target {
        name: GPT_OSS,
        model_type: "gpt_oss",
        output_bias: true,
        head: Head::Required,
        experts: true,
        activation: Activation::Clamped,
        sinks: true,
        window_period: Some(2),
        ..PLAIN
    },
];

impl Target {
    /// The architecture with this `general.architecture`.
    pub fn named(name: &str) -> Option<&'static Self> {
        ALL.iter().find(|target| target.name == name)
    }

    /// That of a model. Mistral and Ministral are llama there, whose layers have no windows, unless a Mistral was read from a
    /// file that says otherwise.
    pub fn of(config: &Config) -> Result<&'static Self> {
        let model_type = match config.architecture.model_type() {
            "mistral" if config.gguf_architecture == Some(MISTRAL3) => "ministral3",
            "mistral" | "ministral" | "mixtral" => "llama",
            other => other,
        };
        ALL.iter().find(|target| target.model_type == model_type).ok_or_else(|| {
            Error::Unsupported(format!(
                "a GGUF file of a {model_type} model; llama.cpp's names are known for {}",
                Architecture::ALL.map(Architecture::model_type).join(", ")
            ))
        })
    }

    /// Whether an adapter for an architecture of this name is one for the model, too. Mistral's was llama before it was
    /// mistral3, with the same names and rows.
    pub fn takes_adapter_for(&self, name: &str, config: &Config) -> bool {
        let is_mistral = config.architecture.model_type() == "mistral";
        name == self.name || (is_mistral && ["llama", MISTRAL3].contains(&name))
    }

    /// The names of all.
    pub fn names() -> String {
        ALL.each_ref().map(|target| target.name).join(", ")
    }
}

/// The names within a layer: ours and llama.cpp's, but for the norms beside the MLP.
const IN_LAYER: [(&str, &str); 9] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.down_proj", "ffn_down"),
    ("input_layernorm", "attn_norm"),
];

const OUTSIDE: [(&str, &str); 3] =
    [("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output")];

/// The names that depend on the family.
fn varying(config: &Config) -> [(&'static str, &'static str); 4] {
    let up = if config.fused_projections { "mlp.gate_up_proj" } else { "mlp.up_proj" };
    let norms = match config.norm_placement {
        // gpt-oss'.
        NormPlacement::Pre if config.attention_sinks => {
            [("post_attention_layernorm", "post_attention_norm"), ("", ""), ("", "")]
        }
        NormPlacement::Pre => [("post_attention_layernorm", "ffn_norm"), ("", ""), ("", "")],
        NormPlacement::Sandwich => [
            ("post_attention_layernorm", "post_attention_norm"),
            ("pre_feedforward_layernorm", "ffn_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
        ],
        NormPlacement::Post => [
            ("post_attention_layernorm", "post_attention_norm"),
            ("post_feedforward_layernorm", "post_ffw_norm"),
            ("", ""),
        ],
    };
    let [a, b, c] = norms;
    [(up, "ffn_up"), a, b, c]
}

/// Where the sinks of a layer are, ours and llama.cpp's.
const SINKS: [&str; 2] = ["self_attn.sinks", "attn_sinks.weight"];

/// A name as that of a layer's part, within `layers` and a dot.
fn of_layer<'n>(name: &'n str, layers: &str) -> Option<(&'n str, &'n str)> {
    name.strip_prefix(layers)?.strip_prefix('.')?.split_once('.')
}

/// Splits `.weight` or `.bias` off.
fn split_kind(name: &str) -> Option<(&str, &str)> {
    let (path, kind) = name.rsplit_once('.')?;
    matches!(kind, "weight" | "bias").then_some((path, kind))
}

fn pairs(config: &Config) -> impl Iterator<Item = (&'static str, &'static str)> {
    let fused = config.fused_projections.then_some(("self_attn.qkv_proj", "attn_qkv"));
    let pairs = IN_LAYER.into_iter().chain(varying(config)).chain(fused);
    pairs.filter(|(ours, _)| !ours.is_empty())
}

/// The projections of a layer's experts, in the order of [`ExpertNames`](crate::model::config::ExpertNames).
const EXPERTS: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];
const ROUTER: &str = "ffn_gate_inp";

/// Our name of a checkpoint's tensor as llama.cpp's. All experts of a layer have one.
pub(super) fn to_gguf(config: &Config, name: &str) -> Option<String> {
    if let Some((layer, part)) = of_layer(name, "model.layers")
        && part == SINKS[0]
    {
        return Some(format!("blk.{layer}.{}", SINKS[1]));
    }
    let (path, kind) = split_kind(name)?;
    if let Some(rest) = path.strip_prefix("model.layers.") {
        let (layer, part) = rest.split_once('.')?;
        if let Some(experts) = &config.experts {
            if part == experts.router() {
                return Some(format!("blk.{layer}.{ROUTER}.{kind}"));
            }
            if let Some((_, place, _)) = experts.split(name) {
                return Some(format!("blk.{layer}.{}.{kind}", EXPERTS[place]));
            }
        }
        let (_, theirs) = pairs(config).find(|(ours, _)| *ours == part)?;
        return Some(format!("blk.{layer}.{theirs}.{kind}"));
    }
    let (_, theirs) = OUTSIDE.into_iter().find(|(ours, _)| *ours == path)?;
    Some(format!("{theirs}.{kind}"))
}

/// llama.cpp's name of a tensor as ours.
pub(super) fn from_gguf(config: &Config, name: &str) -> Option<String> {
    if let Some((layer, part)) = of_layer(name, "blk").filter(|_| config.attention_sinks)
        && part == SINKS[1]
    {
        return Some(format!("model.layers.{layer}.{}", SINKS[0]));
    }
    let (path, kind) = split_kind(name)?;
    if let Some(rest) = path.strip_prefix("blk.") {
        let (layer, part) = rest.split_once('.')?;
        if let Some(experts) = config.experts.filter(|_| part == ROUTER) {
            return Some(format!("model.layers.{layer}.{}.{kind}", experts.router()));
        }
        if let Some(ours) = single_expert(config, part) {
            return Some(format!("model.layers.{layer}.{ours}.{kind}"));
        }
        let (ours, _) = pairs(config).find(|(_, theirs)| *theirs == part)?;
        return Some(format!("model.layers.{layer}.{ours}.{kind}"));
    }
    let (ours, _) = OUTSIDE.into_iter().find(|(_, theirs)| *theirs == path)?;
    Some(format!("{ours}.{kind}"))
}

/// Our name of an expert's projection within a layer, where a tensor has that expert alone, as in the first files of
/// Mixtral.
fn single_expert(config: &Config, part: &str) -> Option<String> {
    let experts = config.experts?;
    let (projection, expert) = part.split_once('.')?;
    let all = format!("{projection}_exps");
    let place = EXPERTS.iter().position(|theirs| *theirs == all)?;
    let expert = expert.parse().ok().filter(|expert| *expert < experts.count)?;
    Some(experts.projections(expert)[place].clone())
}

/// Whether a tensor has the weights of all experts of a layer.
pub(super) fn holds_experts(config: &Config, name: &str) -> bool {
    config.experts.is_some() && stack(name).is_some()
}

/// Of such a name the layer, which projection it is, and weight or bias.
fn stack(name: &str) -> Option<(&str, usize, &str)> {
    let (path, kind) = split_kind(name)?;
    let (layer, part) = path.strip_prefix("blk.")?.split_once('.')?;
    let place = EXPERTS.iter().position(|theirs| *theirs == part)?;
    Some((layer, place, kind))
}

/// Our names of the weights of all experts of a layer that are in one tensor, in their order.
pub(super) fn experts_from_gguf(config: &Config, name: &str) -> Option<Vec<String>> {
    let (layer, place, kind) = stack(name)?;
    let experts = config.experts?;
    let ours = |expert| {
        let projection = &experts.projections(expert)[place];
        format!("model.layers.{layer}.{projection}.{kind}")
    };
    Some((0..experts.count).map(ours).collect())
}

/// How many heads the rows of a weight or bias belong to, where they are queries or keys.
pub(super) fn rotated_heads(config: &Config, name: &str) -> Option<usize> {
    let (path, _) = split_kind(name)?;
    if path.ends_with(".self_attn.q_proj") {
        Some(config.heads)
    } else if path.ends_with(".self_attn.k_proj") {
        Some(config.kv_heads)
    } else {
        None
    }
}

/// Whether a tensor is the weight of a norm.
pub(super) fn is_norm(name: &str) -> bool {
    name.ends_with("norm.weight")
}

#[cfg(test)]
mod tests {
    use super::super::testing::{fixture, fixtures};
    use super::*;
    use crate::model::Model;
    use crate::{DType, Device};

    #[test]
    fn every_weight_of_every_family_has_a_name_and_is_found_by_it() {
        let mut seen = Vec::new();
        for (fixture, config) in fixtures() {
            let target = Target::of(&config).unwrap();
            seen.push(target.name);
            let model = Model::random(config.clone(), DType::F32, &Device::Cpu, 1).unwrap();
            let mut names = std::collections::BTreeSet::new();
            for (name, _) in model.named_weights() {
                let theirs = to_gguf(&config, name).unwrap_or_else(|| panic!("{fixture} {name}"));
                assert!(theirs.len() < 64, "{theirs}");
                if let Some(experts) = experts_from_gguf(&config, &theirs) {
                    assert_eq!(from_gguf(&config, &theirs), None, "{fixture}");
                    assert_eq!(experts.iter().filter(|ours| *ours == name).count(), 1, "{name}");
                    continue;
                }
                assert_eq!(from_gguf(&config, &theirs).as_deref(), Some(name), "{fixture}");
                assert!(names.insert(theirs), "{fixture} {name} has another's name");
            }
        }
        for target in &ALL {
            assert!(seen.contains(&target.name), "no fixture is a {}", target.name);
        }
    }

    #[test]
    fn norms_are_named_by_where_they_stand() {
        let of = |model: &str, name: &str| {
            let config = fixture(model);
            to_gguf(&config, &format!("model.layers.1.{name}.weight")).unwrap()
        };
        assert_eq!(of("llama", "post_attention_layernorm"), "blk.1.ffn_norm.weight");
        assert_eq!(of("gemma2", "post_attention_layernorm"), "blk.1.post_attention_norm.weight");
        assert_eq!(of("gemma2", "pre_feedforward_layernorm"), "blk.1.ffn_norm.weight");
        assert_eq!(of("olmo2", "post_feedforward_layernorm"), "blk.1.post_ffw_norm.weight");
        assert_eq!(of("phi3", "mlp.gate_up_proj"), "blk.1.ffn_up.weight");
        assert_eq!(of("phi3", "self_attn.qkv_proj"), "blk.1.attn_qkv.weight");
        let config = fixture("llama");
        let mixtral = fixture("mixtral");
        for (theirs, ours) in [
            ("blk.0.ffn_up.3.weight", Some("model.layers.0.block_sparse_moe.experts.3.w3.weight")),
            ("blk.0.ffn_up.4.weight", None),
            ("blk.0.ffn_inp.0.weight", None),
        ] {
            assert_eq!(from_gguf(&mixtral, theirs).as_deref(), ours);
        }
        for unknown in ["model.layers.1.self_attn.qkv_proj.weight", "lm_head", "a.weight", ""] {
            assert_eq!(to_gguf(&config, unknown), None);
        }
        assert_eq!(from_gguf(&config, "blk.0.ffn_gate_inp.weight"), None);
    }
}
