//! A model's `config.json`, brought to one form for all supported families.
//!
//! The decoder reads only [`Config`], so what distinguishes a family (where its norms stand, which
//! layers see a window, how its positions are rotated, which multipliers it has) is a value here
//! and not a case there. What all families have is read here; what a family's file means beyond
//! that stands in `families/`. Keys that are missing get the defaults of the family's
//! configuration class in `transformers`. Both spellings of positions and dtypes are read: version 5's
//! `rope_parameters` and `dtype`, and version 4's `rope_theta`, `rope_scaling` and `torch_dtype`.
//!
//! A key that asks for something this library does not compute is an error naming the key and its
//! value: a model is never run as something it is not. Dropout rates are read by no one, because
//! they act only in a kind of training that this library does not do.

pub(super) mod keys;
pub(super) mod ropes;

use std::path::Path;

use candle_core::DType;
use serde_json::Value;

pub use super::families::Architecture;
use super::rope::{RopeConfig, RopeScaling};
use keys::Keys;
pub use metal_candle_kernels::glu::Activation;
use ropes::RopeShape;

use crate::files::{cut, short};
use crate::gguf::{GgufFile, is_gguf};
use crate::text::kind;
use crate::{Error, Result, files};

/// Where a layer's RMS norms stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormPlacement {
    /// `x + attention(norm(x))`, then `x + mlp(norm(x))`: `input_layernorm` and
    /// `post_attention_layernorm`, which, despite its name, is the MLP's input norm.
    Pre,
    /// `x + norm(attention(norm(x)))`, then `x + norm(mlp(norm(x)))`: `input_layernorm`,
    /// `post_attention_layernorm`, `pre_feedforward_layernorm`, `post_feedforward_layernorm`.
    Sandwich,
    /// `x + norm(attention(x))`, then `x + norm(mlp(x))`: `post_attention_layernorm` and
    /// `post_feedforward_layernorm`.
    Post,
}

/// Whether queries and keys are normalised before they are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorm {
    /// They are not.
    None,
    /// Each head on its own; weights of `(head_dim,)`.
    PerHead,
    /// All heads together; weights of `(heads * head_dim,)` and `(kv_heads * head_dim,)`.
    FullWidth,
}

/// What distinguishes one layer from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerConfig {
    /// With `Some(n)`, position `i` sees the positions `j` with `i - n < j <= i`: itself and the
    /// `n - 1` before it. With `None` it sees every position up to itself.
    pub window: Option<usize>,
    /// The index in [`Config::ropes`] of how this layer rotates queries and keys; `None` if it does
    /// not.
    pub rope: Option<usize>,
    /// Whether it has [`Config::experts`] in the place of an MLP.
    pub has_experts: bool,
}

/// A mixture of experts: several MLPs, of which each token is read by some.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertsConfig {
    /// How many a layer has.
    pub count: usize,
    /// How many read a token.
    pub active: usize,
    /// Width inside each.
    pub width: usize,
    /// Whether the weights of those that read a token add up to 1; else they are the probabilities of all.
    pub normalized: bool,
    /// Whether the router and the projections of each have a bias.
    pub has_biases: bool,
    /// What a checkpoint calls them.
    pub(crate) names: &'static ExpertNames,
}

/// The names of a layer's experts, within the layer.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ExpertNames {
    /// Of the router, and of `MODULE.experts.N`.
    pub module: &'static str,
    /// Of the router within the module.
    pub router: &'static str,
    /// Of an expert's projections into its gate and value, and back.
    pub projections: [&'static str; 3],
    /// Where files have one tensor for all experts.
    pub stacked: StackedExperts,
}

/// What files call the tensors that all experts of a layer have together.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct StackedExperts {
    /// mlx-lm's word for the module that has them.
    pub mlx: &'static str,
    /// Whether those of transformers are `experts.gate_up_proj`, of whose rows each second one is of the gates, and
    /// `experts.down_proj`.
    pub interleaved: bool,
}

impl ExpertsConfig {
    const COUNT: &str = "num_local_experts";

    /// Reads how many there are and how many read a token, with these defaults; `width` is a key and its default.
    pub(super) fn read(
        keys: Keys,
        count: usize,
        active: usize,
        (width_key, width): (&'static str, usize),
        names: &'static ExpertNames,
    ) -> Result<Self> {
        const ACTIVE: &str = "num_experts_per_tok";
        // Files of transformers 5 have the one name, and those of version 4 of Qwen's the other.
        let count_key = match keys.get(Self::COUNT) {
            None => "num_experts",
            Some(_) => Self::COUNT,
        };
        let count = keys.size(count_key, count, MAX_EXPERTS)?;
        let active = keys.size(ACTIVE, active, MAX_EXPERTS)?;
        if active > count {
            let message = format!("found {active}, more than {count_key} = {count}");
            return Err(keys.invalid(ACTIVE, message));
        }
        let width = keys.size(width_key, width, MAX_WIDTH)?;
        Ok(Self { count, active, width, normalized: true, has_biases: false, names })
    }

    /// The router's name within the layer.
    pub(crate) fn router(&self) -> String {
        format!("{}.{}", self.names.module, self.names.router)
    }

    /// Of a name that goes through an expert's projection: what stands before the experts' module, which projection it is, and
    /// what follows it.
    pub(crate) fn split<'n>(&self, name: &'n str) -> Option<(&'n str, usize, &'n str)> {
        let (layer, rest) = name.split_once(&format!(".{}.experts.", self.names.module))?;
        let (_, rest) = rest.split_once('.')?;
        let (projection, part) = rest.split_once('.')?;
        let place = self.names.projections.iter().position(|it| *it == projection)?;
        Some((layer, place, part))
    }

    /// The names of an expert's projections within the layer: into its gate and value, and back.
    pub(crate) fn projections(&self, expert: usize) -> [String; 3] {
        let module = self.names.module;
        self.names.projections.map(|name| format!("{module}.experts.{expert}.{name}"))
    }
}

/// The shape of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The family.
    pub architecture: &'static Architecture,
    /// Rows of the embedding, and logits a position.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// What some layers have in the place of an MLP.
    pub experts: Option<ExpertsConfig>,
    /// One entry a layer.
    pub layers: Vec<LayerConfig>,
    /// The position embeddings that layers refer to.
    pub ropes: Vec<RopeConfig>,
    /// Query heads.
    pub heads: usize,
    /// Key and value heads; divides `heads`.
    pub kv_heads: usize,
    /// Width of a head; `heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// The longest text the model was made for, in tokens.
    pub max_position_embeddings: usize,
    /// Added to the mean square under the root of every RMS norm.
    pub rms_norm_eps: f64,
    /// Added to every norm's weight, those of queries and keys too: 1 for Gemma, 0 for others.
    pub norm_weight_offset: f64,
    /// Where the norms stand.
    pub norm_placement: NormPlacement,
    /// Whether queries and keys are normalised.
    pub query_key_norm: QueryKeyNorm,
    /// Whether the query, key and value projections have a bias.
    pub attention_bias: bool,
    /// Whether the attention's output projection has a bias.
    pub attention_output_bias: bool,
    /// Whether the MLP's projections have a bias.
    pub mlp_bias: bool,
    /// Whether query, key and value are the rows of one weight `qkv_proj`, and gate and up those
    /// of `gate_up_proj`, in that order.
    pub fused_projections: bool,
    /// The activation of the MLP's gate.
    pub activation: Activation,
    /// What `query · key` is multiplied with.
    pub attention_scale: f64,
    /// Whether each head has a sink: a score that no key has.
    pub attention_sinks: bool,
    /// With `Some(c)`, scaled scores `s` become `c * tanh(s / c)` before the mask.
    pub attention_softcap: Option<f64>,
    /// With `Some(c)`, logits `l` become `c * tanh(l / c)`.
    pub final_softcap: Option<f64>,
    /// What embeddings are multiplied with. `transformers` rounds Gemma's `sqrt(hidden_size)` to
    /// the weights' dtype first: of 59.87 for a width of 3584, bf16 makes 59.75.
    pub embedding_scale: f64,
    /// What the attention's and the MLP's outputs are multiplied with before they are added.
    pub residual_multiplier: f64,
    /// What logits are multiplied with.
    pub logits_scale: f64,
    /// Whether the head is the embedding's weight.
    pub tie_word_embeddings: bool,
    /// The dtype that the weights were saved in, where the file says so.
    pub dtype: Option<DType>,
    /// The whole of `config.json`, for writing it back.
    pub raw: Value,
    /// `general.architecture` of the GGUF file that it was read from. A Mistral's is llama or mistral3.
    pub gguf_architecture: Option<&'static str>,
}

impl Config {
    /// Reads `config.json` in a model's folder, or what the metadata of a GGUF file say in its place.
    ///
    /// # Errors
    /// [`Error::File`] when it is missing, is not JSON, or has an impossible value;
    /// [`Error::Unsupported`] for a family, a kind of attention, positions, activation or
    /// quantisation that this library does not have. Both name the key and what was found.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        if is_gguf(folder) {
            return Ok(GgufFile::open(folder)?.config().clone());
        }
        let path = folder.join("config.json");
        if !path.exists() {
            let found = if folder.join("adapter_config.json").exists() {
                "this is an adapter, not a model; give the folder of its base model"
            } else if folder.is_dir() {
                "a model's folder holds config.json, tokenizer.json and *.safetensors"
            } else {
                "there is no such folder"
            };
            return Err(Error::file(folder, format!("no config.json here: {found}")));
        }
        Self::from_file(path)
    }

    /// Reads a file with the content of a `config.json`, whatever its name.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Self> {
        Self::from_value(files::read_json(path.as_ref())?, path.as_ref())
    }

    /// How many tokens a text may have: `max_position_embeddings`, or what the rope of all layers, linear or YaRN's, stretches
    /// the context to, as files of such models often have the length before. Some with a linear rope have that after it, which
    /// nothing tells; they, too, are allowed the longer one.
    pub fn context(&self) -> usize {
        let longest = self.max_position_embeddings;
        let stretched = match self.ropes.as_slice() {
            [RopeConfig { scaling: RopeScaling::Linear { factor }, .. }] => longest as f64 * factor,
            [
                RopeConfig {
                    scaling: RopeScaling::Yarn { factor, original_max_position_embeddings, .. },
                    ..
                },
            ] => *original_max_position_embeddings as f64 * factor,
            _ => return longest,
        };
        longest.max((stretched as usize).min(MAX_POSITIONS))
    }

    /// Reads the content of a `config.json`.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn from_json(text: &str) -> Result<Self> {
        let path = Path::new("config.json");
        let value =
            files::parse_json(text.as_bytes()).map_err(|message| Error::file(path, message))?;
        Self::from_value(value, path)
    }

    fn from_value(raw: Value, path: &Path) -> Result<Self> {
        let Value::Object(map) = &raw else {
            return Err(Error::file(path, format!("expected an object, found {}", kind(&raw))));
        };
        let keys = Keys { path, place: "", map };
        let mut config = Architecture::find(keys)?.read(keys)?;
        config.raw = raw;
        Ok(config)
    }

    /// Reads what all families have. Every layer sees everything, is rotated by the first rope and has its
    /// norms before attention and MLP; nothing has a bias.
    pub(super) fn common(
        keys: Keys,
        architecture: &'static Architecture,
        defaults: &Defaults,
    ) -> Result<Self> {
        refuse_unsupported(keys)?;
        let hidden_size = keys.size("hidden_size", defaults.hidden_size, MAX_WIDTH)?;
        let layers = keys.size("num_hidden_layers", defaults.layers, MAX_LAYERS)?;
        let heads = keys.size("num_attention_heads", defaults.heads, MAX_HEADS)?;
        let kv_heads = keys
            .optional_size("num_key_value_heads", defaults.kv_heads, MAX_HEADS)?
            .unwrap_or(heads);
        if heads % kv_heads != 0 {
            return Err(keys.invalid(
                "num_key_value_heads",
                format!("found {kv_heads}, which does not divide num_attention_heads = {heads}"),
            ));
        }
        let head_dim = head_dim(keys, defaults.head_dim, hidden_size, heads)?;
        let max_position_embeddings =
            keys.size("max_position_embeddings", defaults.max_position_embeddings, MAX_POSITIONS)?;
        let rms_norm_eps = keys.number("rms_norm_eps", defaults.rms_norm_eps)?;
        if !(0.0..1.0).contains(&rms_norm_eps) {
            let message = format!("found {rms_norm_eps}; expected 0 to 1");
            return Err(keys.invalid("rms_norm_eps", message));
        }
        let theta = defaults.rope_theta;
        Ok(Self {
            architecture,
            vocab_size: keys.size("vocab_size", defaults.vocab_size, MAX_VOCABULARY)?,
            hidden_size,
            intermediate_size: keys.size(
                "intermediate_size",
                defaults.intermediate_size,
                MAX_WIDTH,
            )?,
            experts: None,
            layers: vec![LayerConfig { window: None, rope: Some(0), has_experts: false }; layers],
            ropes: (defaults.ropes)(keys, RopeShape { head_dim, max_position_embeddings, theta })?,
            heads,
            kv_heads,
            head_dim,
            max_position_embeddings,
            rms_norm_eps,
            norm_weight_offset: 0.0,
            norm_placement: NormPlacement::Pre,
            query_key_norm: QueryKeyNorm::None,
            attention_bias: false,
            attention_output_bias: false,
            mlp_bias: false,
            fused_projections: false,
            activation: activation(keys, defaults.activation)?,
            attention_scale: (head_dim as f64).powf(-0.5),
            attention_sinks: false,
            attention_softcap: None,
            final_softcap: None,
            embedding_scale: 1.0,
            residual_multiplier: 1.0,
            logits_scale: 1.0,
            tie_word_embeddings: keys.flag("tie_word_embeddings", defaults.tie_word_embeddings)?,
            dtype: dtype(keys)?,
            raw: Value::Null,
            gguf_architecture: None,
        })
    }

    /// How many columns of gates and values a token has in a layer at most.
    pub fn mlp_columns(&self) -> usize {
        let of_experts = self.experts.map_or(0, |experts| experts.active * experts.width);
        let has_mlp = self.layers.iter().any(|layer| !layer.has_experts);
        of_experts.max(if has_mlp { self.intermediate_size } else { 0 })
    }

    /// Says that the head isn't the embedding.
    pub(super) fn untie(&mut self) {
        self.tie_word_embeddings = false;
        if let Some(raw) = self.raw.as_object_mut() {
            raw.insert("tie_word_embeddings".into(), false.into());
        }
    }

    /// Reads whether all of the attention's projections have a bias.
    pub(super) fn read_attention_bias(&mut self, keys: Keys) -> Result<()> {
        self.attention_bias = keys.flag("attention_bias", false)?;
        self.attention_output_bias = self.attention_bias;
        Ok(())
    }

    /// Gives every layer `window`, where `layer_types` can only say the same.
    pub(super) fn set_window(&mut self, keys: Keys, window: Option<usize>) -> Result<()> {
        let local = window.is_some();
        if let Some(kinds) = layer_types(keys, self.layers.len())?
            && kinds.contains(&!local)
        {
            let kind = if local { "sliding" } else { "full" };
            return Err(keys.unsupported(
                "layer_types",
                format!(
                    "a mixture for model_type {:?}; with sliding_window {window:?} all its layers have {kind}_attention",
                    self.architecture.model_type()
                ),
            ));
        }
        for layer in &mut self.layers {
            layer.window = window;
        }
        Ok(())
    }

    /// Gives `window` to the layers that `layer_types` names, or else to those that `local` names by their
    /// index.
    pub(super) fn set_windows(
        &mut self,
        keys: Keys,
        window: Window,
        local: impl Fn(usize) -> bool,
    ) -> Result<()> {
        let local = match layer_types(keys, self.layers.len())? {
            Some(kinds) => kinds,
            None => (0..self.layers.len()).map(local).collect(),
        };
        if window.size.is_none()
            && let Some(layer) = local.iter().position(|local| *local)
        {
            let message = format!("layer {layer} has sliding_attention, but {}", window.none);
            return Err(keys.invalid("layer_types", message));
        }
        for (layer, local) in self.layers.iter_mut().zip(local) {
            layer.window = window.size.filter(|_| local);
        }
        Ok(())
    }
}

// Sizes beyond these are mistakes or attacks. They also keep every product of two or three of
// them far from overflow.
const MAX_VOCABULARY: usize = 1 << 24;
const MAX_WIDTH: usize = 1 << 20;
pub(super) const MAX_LAYERS: usize = 1 << 12;
const MAX_HEADS: usize = 1 << 14;
const MAX_EXPERTS: usize = 1 << 12;
const MAX_HEAD_DIM: usize = 1 << 14;
pub(super) const MAX_POSITIONS: usize = 1 << 31;

/// What a family's configuration class has for keys that are missing, and how it reads those that all
/// families have in some form.
pub(super) struct Defaults {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    /// `None`: as many as `heads`.
    pub kv_heads: Option<usize>,
    /// `None`: `hidden_size / heads`.
    pub head_dim: Option<usize>,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    /// The key of the MLP's activation, and its default.
    pub activation: (&'static str, &'static str),
    /// Reads [`Config::ropes`].
    pub ropes: fn(Keys, RopeShape) -> Result<Vec<RopeConfig>>,
}

/// The window that some layers have.
#[derive(Clone, Copy)]
pub(super) struct Window {
    pub size: Option<usize>,
    /// Why there is none.
    none: &'static str,
}

impl Window {
    /// `sliding_window`, or `default` where the file lacks it.
    pub fn read(keys: Keys, default: Option<usize>) -> Result<Self> {
        let size = keys.optional_size("sliding_window", default, MAX_POSITIONS)?;
        Ok(Self { size, none: "sliding_window is null" })
    }

    /// As [`Self::read`] where `use_sliding_window` is true.
    pub fn read_switched(keys: Keys, default: Option<usize>) -> Result<Self> {
        if keys.flag("use_sliding_window", false)? {
            return Self::read(keys, default);
        }
        Ok(Self { size: None, none: "use_sliding_window is false" })
    }
}

fn head_dim(keys: Keys, default: Option<usize>, hidden_size: usize, heads: usize) -> Result<usize> {
    let head_dim = match keys.optional_size("head_dim", default, MAX_HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None if hidden_size.is_multiple_of(heads) => hidden_size / heads,
        None => {
            return Err(keys.invalid(
                "num_attention_heads",
                format!("found {heads}, which does not divide hidden_size = {hidden_size}, and there is no head_dim"),
            ));
        }
    };
    if head_dim % 2 != 0 || head_dim > MAX_HEAD_DIM {
        return Err(keys.invalid(
            "head_dim",
            format!("found {head_dim}; expected an even number up to {MAX_HEAD_DIM}, because position embeddings rotate pairs"),
        ));
    }
    Ok(head_dim)
}

/// Refuses what would change the computation and is not computed here.
fn refuse_unsupported(keys: Keys) -> Result<()> {
    keys.refuse("add_cross_attention", "attention is to the text itself")?;
    keys.refuse("use_bidirectional_attention", "attention is causal")?;
    keys.refuse("lm_head_bias", "the head has no bias")?;
    keys.refuse("clip_qkv", "queries, keys and values are not clipped")?;
    keys.refuse("per_layer_config", "the layers have one shape")
}

fn activation(keys: Keys, (key, default): (&'static str, &'static str)) -> Result<Activation> {
    match keys.text(key)?.unwrap_or(default) {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
        "gelu" => Ok(Activation::Gelu),
        other => Err(keys.unsupported(
            key,
            format!(
                "{:?}; silu, swish, gelu, gelu_new and gelu_pytorch_tanh are supported",
                cut(other)
            ),
        )),
    }
}

fn dtype(keys: Keys) -> Result<Option<DType>> {
    let key = if keys.text("dtype")?.is_some() { "dtype" } else { "torch_dtype" };
    Ok(match keys.text(key)? {
        None => None,
        Some("float32") => Some(DType::F32),
        Some("float16") => Some(DType::F16),
        Some("bfloat16") => Some(DType::BF16),
        Some(other) => {
            return Err(keys.unsupported(
                key,
                format!("{:?}; weights in float32, float16 and bfloat16 are supported", cut(other)),
            ));
        }
    })
}

/// Which layers `layer_types` lets see a window, if the file has it.
fn layer_types(keys: Keys, layers: usize) -> Result<Option<Vec<bool>>> {
    let kinds = match keys.get("layer_types") {
        None | Some(Value::Null) => return Ok(None),
        Some(Value::Array(kinds)) => kinds,
        Some(other) => return Err(keys.unexpected("layer_types", "a list of names", other)),
    };
    if kinds.len() != layers {
        let message = format!("has {} entries; num_hidden_layers is {layers}", kinds.len());
        return Err(keys.invalid("layer_types", message));
    }
    let kinds = kinds.iter().map(|kind| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => Err(keys.unsupported(
            "layer_types",
            format!("{}; full_attention and sliding_attention are supported", short(kind)),
        )),
    });
    kinds.collect::<Result<_>>().map(Some)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::families::testing::{assert_invalid, assert_unsupported};
    use super::*;

    #[test]
    fn what_is_not_supported_is_named_with_its_value() {
        let extras = [
            (json!({ "hidden_act": "relu2" }), "hidden_act = \"relu2\""),
            (json!({ "torch_dtype": "float8_e4m3fn" }), "torch_dtype"),
        ];
        assert_unsupported("llama", extras);
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        let extras = [
            (json!({ "hidden_size": 0 }), "hidden_size: expected a whole number from 1"),
            (json!({ "hidden_size": -64 }), "found -64"),
            (json!({ "hidden_size": 64.5 }), "found 64.5"),
            (json!({ "hidden_size": "64" }), "hidden_size"),
            (json!({ "hidden_size": null }), "found null"),
            (json!({ "hidden_size": u64::MAX }), "hidden_size"),
            (json!({ "vocab_size": 1u64 << 40 }), "vocab_size"),
            (json!({ "num_hidden_layers": 1_000_000_000 }), "num_hidden_layers"),
            (json!({ "num_key_value_heads": 5 }), "does not divide num_attention_heads = 32"),
            (json!({ "num_attention_heads": 24 }), "does not divide hidden_size"),
            (json!({ "head_dim": 7 }), "head_dim: found 7"),
            (json!({ "rms_norm_eps": -1.0 }), "rms_norm_eps"),
            (json!({ "tie_word_embeddings": "yes" }), "true or false"),
        ];
        assert_invalid("llama", extras);
        assert!(Config::from_json("[]").unwrap_err().to_string().contains("found a list"));
        assert!(Config::from_json("{").unwrap_err().to_string().contains("malformed"));
    }

    #[test]
    fn a_folder_without_a_config_says_what_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let message = |path: &Path| Config::load(path).unwrap_err().to_string();
        assert!(message(folder.path()).contains("no config.json here"));
        std::fs::write(folder.path().join("adapter_config.json"), "{}").unwrap();
        assert!(message(folder.path()).contains("an adapter"));
        assert!(message(&folder.path().join("no")).contains("no such folder"));
    }
}
