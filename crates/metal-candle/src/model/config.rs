//! A model's `config.json`, brought to one form for all supported families.
//!
//! The decoder reads only [`Config`], so what distinguishes a family (where its norms stand, which
//! layers see a window, how its positions are turned, which multipliers it has) is a value here
//! and not a case there. Keys that are missing get the defaults of the family's configuration
//! class in `transformers`. Both spellings of positions and dtypes are read: version 5's
//! `rope_parameters` and `dtype`, and version 4's `rope_theta`, `rope_scaling` and `torch_dtype`.
//!
//! A key that asks for something this library does not compute is an error naming the key and its
//! value: a model is never run as something it is not. Dropout rates are read by no one, because
//! they act only in a kind of training that this library does not do.

use std::path::Path;

use candle_core::DType;
use serde_json::{Map, Value};

use super::rope::{RopeConfig, RopeScaling};
pub use metal_candle_kernels::glu::Activation;

use crate::files::{cut, short};
use crate::text::kind;
use crate::{Error, Result, files};

/// A family of models that the decoder can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    /// Llama 2 to 3.3, and what shares its shape (SmolLM, SmolLM2, TinyLlama).
    Llama,
    /// Mistral: Llama with a sliding window.
    Mistral,
    /// Qwen 2 and 2.5: Llama with biases on query, key and value.
    Qwen2,
    /// Qwen 3: normalised queries and keys.
    Qwen3,
    /// Gemma 2: four norms a layer, capped logits, every second layer local.
    Gemma2,
    /// Gemma 3, text only: normalised queries and keys, one layer in six global.
    Gemma3,
    /// Phi 3 and 4: query, key and value in one weight, gate and up in another.
    Phi3,
    /// SmolLM 3: every fourth layer without positions.
    SmolLM3,
    /// OLMo 2: norms after the attention and the MLP instead of before.
    Olmo2,
    /// Granite 3: multipliers on embeddings, residuals, attention and logits.
    Granite,
}

impl Architecture {
    /// Every supported family.
    pub const ALL: [Self; 10] = [
        Self::Llama,
        Self::Mistral,
        Self::Qwen2,
        Self::Qwen3,
        Self::Gemma2,
        Self::Gemma3,
        Self::Phi3,
        Self::SmolLM3,
        Self::Olmo2,
        Self::Granite,
    ];

    /// The `model_type` in `config.json`.
    pub fn model_type(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Mistral => "mistral",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma2 => "gemma2",
            Self::Gemma3 => "gemma3_text",
            Self::Phi3 => "phi3",
            Self::SmolLM3 => "smollm3",
            Self::Olmo2 => "olmo2",
            Self::Granite => "granite",
        }
    }

    /// The entry of `architectures` in `config.json`.
    pub fn class_name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Mistral => "MistralForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Gemma2 => "Gemma2ForCausalLM",
            Self::Gemma3 => "Gemma3ForCausalLM",
            Self::Phi3 => "Phi3ForCausalLM",
            Self::SmolLM3 => "SmolLM3ForCausalLM",
            Self::Olmo2 => "Olmo2ForCausalLM",
            Self::Granite => "GraniteForCausalLM",
        }
    }
}

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

/// Whether queries and keys are normalised before they are turned.
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
    /// The index in [`Config::ropes`] of how this layer turns queries and keys; `None` if it does
    /// not.
    pub rope: Option<usize>,
}

/// The shape of a decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// The family.
    pub architecture: Architecture,
    /// Rows of the embedding, and logits a position.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
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
}

impl Config {
    /// Reads `config.json` in a model's folder.
    ///
    /// # Errors
    /// [`Error::File`] when it is missing, is not JSON, or has an impossible value;
    /// [`Error::Unsupported`] for a family, a kind of attention, positions, activation or
    /// quantisation that this library does not have. Both name the key and what was found.
    pub fn load(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
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
        Self::from_value(files::read_json(&path)?, &path)
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
        let mut config = read(Keys { path, place: "", map })?;
        config.raw = raw;
        Ok(config)
    }
}

// Sizes beyond these are mistakes or attacks. They also keep every product of two or three of
// them far from overflow.
const MAX_VOCABULARY: usize = 1 << 24;
const MAX_WIDTH: usize = 1 << 20;
const MAX_LAYERS: usize = 1 << 12;
const MAX_HEADS: usize = 1 << 14;
const MAX_HEAD_DIM: usize = 1 << 14;
const MAX_POSITIONS: usize = 1 << 31;

/// The defaults of a family's configuration class for keys that are missing.
struct Defaults {
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    layers: usize,
    heads: usize,
    /// `None`: as many as `heads`.
    kv_heads: Option<usize>,
    /// `None`: `hidden_size / heads`.
    head_dim: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    rope_theta: f64,
    sliding_window: Option<usize>,
    tie_word_embeddings: bool,
}

fn defaults(architecture: Architecture) -> Defaults {
    let llama = Defaults {
        vocab_size: 32000,
        hidden_size: 4096,
        intermediate_size: 11008,
        layers: 32,
        heads: 32,
        kv_heads: None,
        head_dim: None,
        max_position_embeddings: 2048,
        rms_norm_eps: 1e-6,
        rope_theta: 1e4,
        sliding_window: None,
        tie_word_embeddings: false,
    };
    let qwen2 = Defaults {
        vocab_size: 151_936,
        intermediate_size: 22016,
        kv_heads: Some(32),
        max_position_embeddings: 32768,
        sliding_window: Some(4096),
        ..llama
    };
    let gemma2 = Defaults {
        vocab_size: 256_000,
        hidden_size: 2304,
        intermediate_size: 9216,
        layers: 26,
        heads: 8,
        kv_heads: Some(4),
        head_dim: Some(256),
        max_position_embeddings: 8192,
        sliding_window: Some(4096),
        tie_word_embeddings: true,
        ..llama
    };
    match architecture {
        Architecture::Llama | Architecture::Granite => llama,
        Architecture::Mistral => Defaults {
            intermediate_size: 14336,
            kv_heads: Some(8),
            max_position_embeddings: 131_072,
            sliding_window: Some(4096),
            ..llama
        },
        Architecture::Qwen2 => qwen2,
        Architecture::Qwen3 => Defaults { head_dim: Some(128), ..qwen2 },
        Architecture::Gemma2 => gemma2,
        Architecture::Gemma3 => Defaults {
            vocab_size: 262_208,
            max_position_embeddings: 131_072,
            rope_theta: 1e6,
            ..gemma2
        },
        Architecture::Phi3 => Defaults {
            vocab_size: 32064,
            hidden_size: 3072,
            intermediate_size: 8192,
            max_position_embeddings: 4096,
            rms_norm_eps: 1e-5,
            ..llama
        },
        Architecture::SmolLM3 => Defaults {
            vocab_size: 128_256,
            hidden_size: 2048,
            layers: 36,
            heads: 16,
            kv_heads: Some(4),
            max_position_embeddings: 32768,
            rope_theta: 2e6,
            tie_word_embeddings: true,
            ..llama
        },
        Architecture::Olmo2 => Defaults { vocab_size: 50304, rms_norm_eps: 1e-5, ..llama },
    }
}

fn read(keys: Keys) -> Result<Config> {
    let architecture = architecture(keys)?;
    refuse_unsupported(keys, architecture)?;
    let default = defaults(architecture);
    let is_gemma = matches!(architecture, Architecture::Gemma2 | Architecture::Gemma3);

    let hidden_size = keys.size("hidden_size", default.hidden_size, MAX_WIDTH)?;
    let layer_count = keys.size("num_hidden_layers", default.layers, MAX_LAYERS)?;
    let heads = keys.size("num_attention_heads", default.heads, MAX_HEADS)?;
    let kv_heads =
        keys.optional_size("num_key_value_heads", default.kv_heads, MAX_HEADS)?.unwrap_or(heads);
    if heads % kv_heads != 0 {
        return Err(keys.invalid(
            "num_key_value_heads",
            format!("found {kv_heads}, which does not divide num_attention_heads = {heads}"),
        ));
    }
    let head_dim = match keys.optional_size("head_dim", default.head_dim, MAX_HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None if hidden_size % heads == 0 => hidden_size / heads,
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
            format!("found {head_dim}; expected an even number up to {MAX_HEAD_DIM}, because position embeddings turn pairs"),
        ));
    }
    let max_position_embeddings =
        keys.size("max_position_embeddings", default.max_position_embeddings, MAX_POSITIONS)?;
    let rms_norm_eps = keys.number("rms_norm_eps", default.rms_norm_eps)?;
    if !(0.0..1.0).contains(&rms_norm_eps) {
        return Err(keys.invalid("rms_norm_eps", format!("found {rms_norm_eps}; expected 0 to 1")));
    }

    let ropes = if architecture == Architecture::Gemma3 {
        gemma3_ropes(keys, head_dim, max_position_embeddings, default.rope_theta)?
    } else {
        vec![single_rope(
            keys,
            architecture,
            head_dim,
            max_position_embeddings,
            default.rope_theta,
        )?]
    };
    let windows = windows(keys, architecture, layer_count, default.sliding_window)?;
    let turned = turned_layers(keys, architecture, layer_count)?;
    let layers = windows
        .into_iter()
        .zip(turned)
        .map(|(window, turned)| {
            // Gemma 3 turns its local layers, and only those, by the second rope.
            let local = architecture == Architecture::Gemma3 && window.is_some();
            LayerConfig { window, rope: turned.then_some(usize::from(local)) }
        })
        .collect();

    let has_bias_key = matches!(
        architecture,
        Architecture::Llama
            | Architecture::Qwen3
            | Architecture::Gemma2
            | Architecture::Gemma3
            | Architecture::SmolLM3
            | Architecture::Olmo2
            | Architecture::Granite
    );
    let attention_output_bias = has_bias_key && keys.flag("attention_bias", false)?;
    let has_mlp_bias_key =
        matches!(architecture, Architecture::Llama | Architecture::SmolLM3 | Architecture::Granite);
    let granite = |key| {
        if architecture == Architecture::Granite { keys.positive(key, 1.0) } else { Ok(1.0) }
    };
    let softcap =
        |key, default| if is_gemma { keys.optional_positive(key, default) } else { Ok(None) };
    let gemma2_softcap = |cap| (architecture == Architecture::Gemma2).then_some(cap);

    Ok(Config {
        architecture,
        vocab_size: keys.size("vocab_size", default.vocab_size, MAX_VOCABULARY)?,
        hidden_size,
        intermediate_size: keys.size("intermediate_size", default.intermediate_size, MAX_WIDTH)?,
        layers,
        ropes,
        heads,
        kv_heads,
        head_dim,
        max_position_embeddings,
        rms_norm_eps,
        norm_weight_offset: if is_gemma { 1.0 } else { 0.0 },
        norm_placement: match architecture {
            _ if is_gemma => NormPlacement::Sandwich,
            Architecture::Olmo2 => NormPlacement::Post,
            _ => NormPlacement::Pre,
        },
        query_key_norm: match architecture {
            Architecture::Qwen3 | Architecture::Gemma3 => QueryKeyNorm::PerHead,
            Architecture::Olmo2 => QueryKeyNorm::FullWidth,
            _ => QueryKeyNorm::None,
        },
        attention_bias: attention_output_bias || architecture == Architecture::Qwen2,
        attention_output_bias,
        mlp_bias: has_mlp_bias_key && keys.flag("mlp_bias", false)?,
        fused_projections: architecture == Architecture::Phi3,
        activation: activation(keys, is_gemma)?,
        attention_scale: match architecture {
            Architecture::Granite => granite("attention_multiplier")?,
            _ if is_gemma => keys.positive("query_pre_attn_scalar", 256.0)?.powf(-0.5),
            _ => (head_dim as f64).powf(-0.5),
        },
        attention_softcap: softcap("attn_logit_softcapping", gemma2_softcap(50.0))?,
        final_softcap: softcap("final_logit_softcapping", gemma2_softcap(30.0))?,
        embedding_scale: if is_gemma {
            (hidden_size as f64).sqrt()
        } else {
            granite("embedding_multiplier")?
        },
        residual_multiplier: granite("residual_multiplier")?,
        logits_scale: 1.0 / granite("logits_scaling")?,
        tie_word_embeddings: keys.flag("tie_word_embeddings", default.tie_word_embeddings)?,
        dtype: dtype(keys)?,
        raw: Value::Null,
    })
}

fn architecture(keys: Keys) -> Result<Architecture> {
    let model_type = keys.text("model_type")?;
    let classes = match keys.get("architectures") {
        None | Some(Value::Null) => Vec::new(),
        Some(Value::Array(classes)) => classes.iter().filter_map(Value::as_str).collect(),
        Some(other) => return Err(keys.unexpected("architectures", "a list of names", other)),
    };
    let known = |by: fn(Architecture) -> &'static str| Architecture::ALL.map(by).join(", ");
    let unknown = |key: &str, found: String| {
        let hint = if found.contains("gemma3\"") || found.contains("Gemma3ForConditional") {
            " (of Gemma 3, the text-only checkpoints can be used, not those with images)"
        } else {
            ""
        };
        keys.unsupported(
            key,
            format!(
                "{found}{hint}; the supported families are {}, as {}",
                known(Architecture::model_type),
                known(Architecture::class_name)
            ),
        )
    };
    match model_type {
        Some(model_type) => {
            let Some(architecture) =
                Architecture::ALL.into_iter().find(|a| a.model_type() == model_type)
            else {
                return Err(unknown("model_type", format!("{:?}", cut(model_type))));
            };
            if !classes.is_empty() && !classes.contains(&architecture.class_name()) {
                return Err(keys.unsupported(
                    "architectures",
                    format!(
                        "{} of model_type {model_type:?}; of this family, {} is supported",
                        cut(&format!("{classes:?}")),
                        architecture.class_name()
                    ),
                ));
            }
            Ok(architecture)
        }
        None if classes.is_empty() => Err(keys.invalid(
            "model_type",
            format!("missing; expected one of {}", known(Architecture::model_type)),
        )),
        None => Architecture::ALL
            .into_iter()
            .find(|a| classes.contains(&a.class_name()))
            .ok_or_else(|| unknown("architectures", cut(&format!("{classes:?}")))),
    }
}

/// Refuses what would change the computation and is not computed here.
fn refuse_unsupported(keys: Keys, architecture: Architecture) -> Result<()> {
    for key in ["quantization_config", "quantization", "compression_config"] {
        if let Some(Value::Object(settings)) = keys.get(key) {
            let method = ["quant_method", "mode", "bits"]
                .iter()
                .find_map(|name| Some(format!("{name} = {}", short(settings.get(*name)?))))
                .unwrap_or_else(|| "a quantised checkpoint".into());
            return Err(keys.unsupported(
                key,
                format!("{method}; use the checkpoint whose weights are in f32, f16 or bf16"),
            ));
        }
    }
    let absent = |value: &Value| matches!(value, Value::Null | Value::Bool(false));
    let mut refused = vec![
        ("add_cross_attention", "attention is to the text itself"),
        ("use_bidirectional_attention", "attention is causal"),
        ("lm_head_bias", "the head has no bias"),
        ("clip_qkv", "queries, keys and values are not clipped"),
        ("per_layer_config", "the layers have one shape"),
    ];
    if architecture == Architecture::Gemma3 {
        refused.push(("attn_logit_softcapping", "Gemma 3's attention has no soft cap"));
    }
    for (key, instead) in refused {
        if let Some(value) = keys.get(key)
            && !absent(value)
        {
            return Err(keys.unsupported(key, format!("{}; {instead}", short(value))));
        }
    }
    Ok(())
}

fn activation(keys: Keys, is_gemma: bool) -> Result<Activation> {
    let (key, default) =
        if is_gemma { ("hidden_activation", "gelu_pytorch_tanh") } else { ("hidden_act", "silu") };
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

/// The window of each layer.
fn windows(
    keys: Keys,
    architecture: Architecture,
    layers: usize,
    default: Option<usize>,
) -> Result<Vec<Option<usize>>> {
    let switch = match architecture {
        Architecture::Qwen2 | Architecture::Qwen3 | Architecture::SmolLM3 => {
            keys.flag("use_sliding_window", false)?
        }
        Architecture::Mistral
        | Architecture::Phi3
        | Architecture::Gemma2
        | Architecture::Gemma3 => true,
        Architecture::Llama | Architecture::Olmo2 | Architecture::Granite => false,
    };
    let window =
        if switch { keys.optional_size("sliding_window", default, MAX_POSITIONS)? } else { None };
    let by_default: Vec<bool> = match architecture {
        Architecture::Llama | Architecture::Olmo2 | Architecture::Granite => vec![false; layers],
        Architecture::Mistral | Architecture::Phi3 => vec![window.is_some(); layers],
        Architecture::Qwen2 | Architecture::Qwen3 => {
            let first = keys.count("max_window_layers", 28)?;
            (0..layers).map(|layer| window.is_some() && layer >= first).collect()
        }
        Architecture::Gemma2 => (0..layers).map(|layer| layer % 2 == 0).collect(),
        Architecture::Gemma3 => {
            let pattern = keys.size("sliding_window_pattern", 6, MAX_LAYERS)?;
            (0..layers).map(|layer| (layer + 1) % pattern != 0).collect()
        }
        Architecture::SmolLM3 => turned_layers(keys, architecture, layers)?
            .into_iter()
            .map(|turned| window.is_some() && !turned)
            .collect(),
    };
    let local = match keys.get("layer_types") {
        None | Some(Value::Null) => by_default,
        Some(Value::Array(kinds)) => {
            if kinds.len() != layers {
                return Err(keys.invalid(
                    "layer_types",
                    format!("has {} entries; num_hidden_layers is {layers}", kinds.len()),
                ));
            }
            let local = kinds
                .iter()
                .map(|kind| match kind.as_str() {
                    Some("full_attention") => Ok(false),
                    Some("sliding_attention") => Ok(true),
                    _ => Err(keys.unsupported(
                        "layer_types",
                        format!(
                            "{}; full_attention and sliding_attention are supported",
                            short(kind)
                        ),
                    )),
                })
                .collect::<Result<Vec<_>>>()?;
            let uniform = matches!(
                architecture,
                Architecture::Llama
                    | Architecture::Mistral
                    | Architecture::Phi3
                    | Architecture::Olmo2
                    | Architecture::Granite
            );
            if uniform && local != by_default {
                let kind = if window.is_some() { "sliding" } else { "full" };
                return Err(keys.unsupported(
                    "layer_types",
                    format!(
                        "a mixture for model_type {:?}; with sliding_window {window:?} all its layers have {kind}_attention",
                        architecture.model_type()
                    ),
                ));
            }
            local
        }
        Some(other) => return Err(keys.unexpected("layer_types", "a list of names", other)),
    };
    if window.is_none()
        && let Some(layer) = local.iter().position(|local| *local)
    {
        let reason = if switch { "sliding_window is null" } else { "use_sliding_window is false" };
        return Err(keys
            .invalid("layer_types", format!("layer {layer} has sliding_attention, but {reason}")));
    }
    Ok(local.into_iter().map(|local| window.filter(|_| local)).collect())
}

/// Which layers turn their queries and keys.
fn turned_layers(keys: Keys, architecture: Architecture, layers: usize) -> Result<Vec<bool>> {
    if architecture != Architecture::SmolLM3 {
        return Ok(vec![true; layers]);
    }
    match keys.get("no_rope_layers") {
        None | Some(Value::Null) => {
            let interval = keys.size("no_rope_layer_interval", 4, MAX_LAYERS)?;
            Ok((0..layers).map(|layer| (layer + 1) % interval != 0).collect())
        }
        Some(Value::Array(flags)) if flags.len() >= layers => flags
            .iter()
            .take(layers)
            .map(|flag| match flag.as_u64() {
                Some(0) => Ok(false),
                Some(1) => Ok(true),
                _ => Err(keys.unexpected("no_rope_layers", "a list of 0 and 1", flag)),
            })
            .collect(),
        Some(Value::Array(flags)) => Err(keys.invalid(
            "no_rope_layers",
            format!("has {} entries; num_hidden_layers is {layers}", flags.len()),
        )),
        Some(other) => Err(keys.unexpected("no_rope_layers", "a list of 0 and 1", other)),
    }
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

/// What the layers of every family but Gemma 3 share.
fn single_rope(
    keys: Keys,
    architecture: Architecture,
    head_dim: usize,
    max_position_embeddings: usize,
    default_theta: f64,
) -> Result<RopeConfig> {
    let empty = Map::new();
    let scaling = keys.object("rope_scaling")?.filter(|map| !map.is_empty());
    let (place, map) = match (scaling, keys.object("rope_parameters")?) {
        // transformers 5 lets the old key win as well.
        (Some(map), _) => ("rope_scaling.", map),
        (None, Some(map)) => ("rope_parameters.", map),
        (None, None) => ("rope_parameters.", &empty),
    };
    let rope = Keys { path: keys.path, place, map };
    // Before version 5, the base and the turned part of a head stood outside the dictionary.
    let either = |key, default| match rope.get(key) {
        Some(_) => rope.positive(key, default),
        None => keys.positive(key, default),
    };
    let theta = either("rope_theta", default_theta)?;
    let partial = either("partial_rotary_factor", 1.0)?;
    let is_phi3 = architecture == Architecture::Phi3;
    if partial > 1.0 || (partial < 1.0 && !is_phi3) {
        return Err(keys.unsupported(
            "partial_rotary_factor",
            format!("{partial}; it is 1 for every family but phi3, where it is at most 1"),
        ));
    }
    let rotary_dim = (head_dim as f64 * partial) as usize;
    if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
        return Err(keys.invalid(
            "partial_rotary_factor",
            format!("{partial} of head_dim {head_dim} is {rotary_dim}; expected an even number"),
        ));
    }
    // The outer key wins over the one in the dictionary, and Phi 3 has a default for it.
    let original = match keys.get("original_max_position_embeddings") {
        None | Some(Value::Null) if is_phi3 => 4096,
        None | Some(Value::Null) => {
            rope.size("original_max_position_embeddings", max_position_embeddings, MAX_POSITIONS)?
        }
        Some(_) => keys.size("original_max_position_embeddings", 4096, MAX_POSITIONS)?,
    };
    let scaling = rope_scaling(rope, is_phi3, rotary_dim, max_position_embeddings, original)?;
    Ok(RopeConfig { theta, rotary_dim, scaling })
}

/// The ropes of Gemma 3's global and local layers, in this order.
fn gemma3_ropes(
    keys: Keys,
    head_dim: usize,
    max_position_embeddings: usize,
    default_theta: f64,
) -> Result<Vec<RopeConfig>> {
    let empty = Map::new();
    let nested = keys.object("rope_parameters")?;
    let nested = Keys { path: keys.path, place: "rope_parameters.", map: nested.unwrap_or(&empty) };
    if let Some(key) = nested
        .map
        .keys()
        .find(|key| !["full_attention", "sliding_attention"].contains(&key.as_str()))
    {
        return Err(nested.invalid(
            key,
            "unexpected; for gemma3_text, full_attention and sliding_attention were expected",
        ));
    }
    let global = [
        ("rope_scaling.", keys.object("rope_scaling")?),
        ("rope_parameters.full_attention.", nested.object("full_attention")?),
    ];
    let local = [("rope_parameters.sliding_attention.", nested.object("sliding_attention")?)];
    let rope = |sources: &[(&'static str, Option<&Map<String, Value>>)], old_key, default| {
        // The old dictionary's values win over the new one's, key by key, as in transformers 5.
        let mut map = Map::new();
        for (_, source) in sources.iter().rev() {
            if let Some(source) = source {
                map.extend(source.iter().map(|(key, value)| (key.clone(), value.clone())));
            }
        }
        let place = sources.iter().find(|(_, source)| source.is_some());
        let place = place.or(sources.last()).map_or("", |(place, _)| place);
        let rope = Keys { path: keys.path, place, map: &map };
        let theta = match rope.get("rope_theta") {
            Some(_) => rope.positive("rope_theta", default)?,
            None => keys.positive(old_key, default)?,
        };
        let partial = rope.positive("partial_rotary_factor", 1.0)?;
        if partial != 1.0 {
            return Err(rope.unsupported(
                "partial_rotary_factor",
                format!("{partial}; it is 1 for every family but phi3"),
            ));
        }
        let original =
            rope.size("original_max_position_embeddings", max_position_embeddings, MAX_POSITIONS)?;
        let scaling = rope_scaling(rope, false, head_dim, max_position_embeddings, original)?;
        Ok(RopeConfig { theta, rotary_dim: head_dim, scaling })
    };
    Ok(vec![
        rope(&global, "rope_theta", default_theta)?,
        rope(&local, "rope_local_base_freq", 1e4)?,
    ])
}

fn rope_scaling(
    rope: Keys,
    is_phi3: bool,
    rotary_dim: usize,
    max_position_embeddings: usize,
    original_max_position_embeddings: usize,
) -> Result<RopeScaling> {
    if let Some((key, value)) =
        rope.map.iter().find(|(key, value)| !ROPE_KEYS.contains(&key.as_str()) && !value.is_null())
    {
        return Err(rope.unsupported(
            key,
            format!("{}; the supported keys are {}", short(value), ROPE_KEYS.join(", ")),
        ));
    }
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    match rope.text(key)?.unwrap_or("default") {
        "default" => Ok(RopeScaling::Default),
        "linear" if !is_phi3 => Ok(RopeScaling::Linear { factor: rope.required("factor")? }),
        "llama3" if !is_phi3 => {
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
        // Phi 3's early checkpoints call their longrope by these names.
        kind if kind == "longrope" || (is_phi3 && ["su", "yarn"].contains(&kind)) => {
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
        other => {
            let supported = if is_phi3 {
                "default and longrope"
            } else {
                "default, linear, llama3 and longrope"
            };
            Err(rope.unsupported(key, format!("{:?}; {supported} are supported", cut(other))))
        }
    }
}

/// An object of the file, whose values are read with errors that name the file and the key.
#[derive(Clone, Copy)]
struct Keys<'a> {
    path: &'a Path,
    /// What stands before a key's name in errors, with its dot.
    place: &'a str,
    map: &'a Map<String, Value>,
}

impl<'a> Keys<'a> {
    fn invalid(&self, key: &str, message: impl AsRef<str>) -> Error {
        Error::file(self.path, format!("{}{}: {}", self.place, cut(key), message.as_ref()))
    }

    fn unsupported(&self, key: &str, message: impl AsRef<str>) -> Error {
        let (path, place, key) = (self.path.display(), self.place, cut(key));
        Error::Unsupported(format!("{path}: {place}{key} = {}", message.as_ref()))
    }

    fn unexpected(&self, key: &str, expected: &str, found: &Value) -> Error {
        self.invalid(key, format!("expected {expected}, found {}", short(found)))
    }

    fn get(&self, key: &str) -> Option<&'a Value> {
        self.map.get(key)
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(self.unexpected(key, "a name", other)),
        }
    }

    fn object(&self, key: &str) -> Result<Option<&'a Map<String, Value>>> {
        match self.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map)),
            Some(other) => Err(self.unexpected(key, "an object", other)),
        }
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Bool(flag)) => Ok(*flag),
            Some(other) => Err(self.unexpected(key, "true or false", other)),
        }
    }

    /// A whole number from 0.
    fn count(&self, key: &str, default: usize) -> Result<usize> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value
                .as_u64()
                .and_then(|count| usize::try_from(count).ok())
                .ok_or_else(|| self.unexpected(key, "a whole number from 0", value)),
        }
    }

    /// A whole number from 1 to `max`.
    fn size(&self, key: &str, default: usize, max: usize) -> Result<usize> {
        let Some(value) = self.get(key) else { return Ok(default) };
        let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
        size.filter(|size| (1..=max).contains(size))
            .ok_or_else(|| self.unexpected(key, &format!("a whole number from 1 to {max}"), value))
    }

    /// As [`Self::size`], where null means none.
    fn optional_size(
        &self,
        key: &str,
        default: Option<usize>,
        max: usize,
    ) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => self.size(key, max, max).map(Some),
        }
    }

    fn number(&self, key: &str, default: f64) -> Result<f64> {
        let Some(value) = self.get(key) else { return Ok(default) };
        value
            .as_f64()
            .filter(|number| number.is_finite())
            .ok_or_else(|| self.unexpected(key, "a number", value))
    }

    fn positive(&self, key: &str, default: f64) -> Result<f64> {
        let number = self.number(key, default)?;
        // Some of these are divided by, and are rounded to f32 on the way.
        if number >= f64::from(f32::MIN_POSITIVE) && number <= f64::from(f32::MAX) {
            return Ok(number);
        }
        Err(self.invalid(key, format!("expected a positive number, found {number}")))
    }

    /// As [`Self::positive`], where null means none.
    fn optional_positive(&self, key: &str, default: Option<f64>) -> Result<Option<f64>> {
        match self.get(key) {
            None => Ok(default),
            Some(Value::Null) => Ok(None),
            Some(_) => self.positive(key, 1.0).map(Some),
        }
    }

    fn required(&self, key: &str) -> Result<f64> {
        if self.get(key).is_none() {
            return Err(self.invalid(key, "missing; this rope type needs it"));
        }
        self.positive(key, 1.0)
    }

    fn positive_list(&self, key: &str, length: usize) -> Result<Vec<f64>> {
        let expected = format!("a list of {length} positive numbers");
        let Some(value) = self.get(key) else {
            return Err(self.invalid(key, format!("missing; expected {expected}")));
        };
        let numbers = value
            .as_array()
            .ok_or_else(|| self.unexpected(key, &expected, value))?
            .iter()
            .map(|number| number.as_f64().filter(|x| *x as f32 > 0.0 && (*x as f32).is_finite()))
            .collect::<Option<Vec<_>>>()
            .ok_or_else(|| self.unexpected(key, &expected, value))?;
        if numbers.len() != length {
            return Err(
                self.invalid(key, format!("has {} entries; expected {expected}", numbers.len()))
            );
        }
        Ok(numbers)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use serde_json::json;

    fn fixture(name: &str, file: &str) -> Config {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name);
        let text = std::fs::read_to_string(folder.join(file)).unwrap();
        let config = Config::from_json(&text).unwrap_or_else(|e| panic!("{name}/{file}: {e}"));
        assert_eq!(config.raw, serde_json::from_str::<Value>(&text).unwrap());
        config
    }

    fn parse(value: Value) -> Result<Config> {
        Config::from_json(&value.to_string())
    }

    fn windows_of(config: &Config) -> Vec<Option<usize>> {
        config.layers.iter().map(|layer| layer.window).collect()
    }

    fn ropes_of(config: &Config) -> Vec<Option<usize>> {
        config.layers.iter().map(|layer| layer.rope).collect()
    }

    #[test]
    fn both_formats_of_every_family_mean_the_same() {
        let names = [
            ("llama", Architecture::Llama),
            ("llama-f16", Architecture::Llama),
            ("llama-linear-rope", Architecture::Llama),
            ("llama-odd", Architecture::Llama),
            ("llama-sharded", Architecture::Llama),
            ("llama3", Architecture::Llama),
            ("mistral", Architecture::Mistral),
            ("qwen2", Architecture::Qwen2),
            ("qwen3", Architecture::Qwen3),
            ("gemma2", Architecture::Gemma2),
            ("gemma3-text", Architecture::Gemma3),
            ("phi3", Architecture::Phi3),
            ("phi3-longrope", Architecture::Phi3),
            ("smollm3", Architecture::SmolLM3),
            ("olmo2", Architecture::Olmo2),
            ("granite", Architecture::Granite),
        ];
        for (name, architecture) in names {
            let mut new = fixture(name, "config.json");
            let mut old = fixture(name, "config_v4.json");
            assert_eq!(new.architecture, architecture);
            assert!(new.dtype.is_some());
            new.raw = Value::Null;
            old.raw = Value::Null;
            assert_eq!(new, old, "{name}");
        }
    }

    #[test]
    fn what_distinguishes_a_family_is_read() {
        let config = fixture("llama-odd", "config.json");
        assert_eq!(
            (config.hidden_size, config.heads, config.kv_heads, config.head_dim),
            (40, 5, 1, 10)
        );
        assert!(config.attention_bias && config.attention_output_bias && config.mlp_bias);
        assert_eq!(config.attention_scale, 10f64.powf(-0.5));
        assert_eq!(config.activation, Activation::Silu);
        assert_eq!(config.norm_placement, NormPlacement::Pre);
        assert_eq!((config.norm_weight_offset, config.embedding_scale), (0.0, 1.0));
        assert_eq!((config.residual_multiplier, config.logits_scale), (1.0, 1.0));
        assert_eq!(fixture("llama-f16", "config.json").dtype, Some(DType::F16));

        let llama3 = fixture("llama3", "config.json");
        assert_eq!(
            llama3.ropes,
            [RopeConfig {
                theta: 1e4,
                rotary_dim: 12,
                scaling: RopeScaling::Llama3 {
                    factor: 8.0,
                    low_freq_factor: 1.0,
                    high_freq_factor: 4.0,
                    original_max_position_embeddings: 64,
                },
            }]
        );
        assert!(llama3.tie_word_embeddings);
        let linear = fixture("llama-linear-rope", "config.json");
        assert_eq!(linear.ropes[0].scaling, RopeScaling::Linear { factor: 4.0 });

        let mistral = fixture("mistral", "config.json");
        assert_eq!(windows_of(&mistral), [Some(8); 3]);
        assert!(!mistral.attention_bias);

        let qwen2 = fixture("qwen2", "config.json");
        assert!(qwen2.attention_bias && !qwen2.attention_output_bias);
        assert_eq!(windows_of(&qwen2), [None; 3]);

        let qwen3 = fixture("qwen3", "config.json");
        assert_eq!((qwen3.query_key_norm, qwen3.head_dim), (QueryKeyNorm::PerHead, 12));

        let gemma2 = fixture("gemma2", "config.json");
        assert_eq!(windows_of(&gemma2), [Some(6), None, Some(6)]);
        assert_eq!((gemma2.attention_softcap, gemma2.final_softcap), (Some(0.8), Some(2.0)));
        assert_eq!(gemma2.norm_placement, NormPlacement::Sandwich);
        assert_eq!((gemma2.norm_weight_offset, gemma2.query_key_norm), (1.0, QueryKeyNorm::None));
        assert_eq!(gemma2.activation, Activation::GeluTanh);
        assert_eq!(gemma2.attention_scale, 5f64.powf(-0.5));
        assert_eq!(gemma2.embedding_scale, 32f64.sqrt());

        let gemma3 = fixture("gemma3-text", "config.json");
        assert_eq!(windows_of(&gemma3), [Some(6), Some(6), None, Some(6)]);
        assert_eq!(ropes_of(&gemma3), [Some(1), Some(1), Some(0), Some(1)]);
        let rope = |theta, scaling| RopeConfig { theta, rotary_dim: 12, scaling };
        assert_eq!(
            gemma3.ropes,
            [rope(1e6, RopeScaling::Linear { factor: 8.0 }), rope(1e3, RopeScaling::Default)]
        );
        assert_eq!(
            (gemma3.query_key_norm, gemma3.attention_softcap),
            (QueryKeyNorm::PerHead, None)
        );

        let phi3 = fixture("phi3", "config.json");
        assert!(phi3.fused_projections);
        assert_eq!((phi3.ropes[0].rotary_dim, phi3.head_dim), (6, 8));
        assert_eq!(windows_of(&phi3), [Some(10); 3]);
        let longrope = fixture("phi3-longrope", "config.json");
        let RopeScaling::LongRope { long_factor, attention_factor, .. } =
            &longrope.ropes[0].scaling
        else {
            panic!("{:?}", longrope.ropes);
        };
        assert_eq!(long_factor[7], 9.0);
        // sqrt(1 + ln(64 / 16) / ln(16))
        assert!((attention_factor - 1.5f64.sqrt()).abs() < 1e-12);

        let smollm3 = fixture("smollm3", "config.json");
        assert_eq!(ropes_of(&smollm3), [Some(0), Some(0), None, Some(0)]);

        let olmo2 = fixture("olmo2", "config.json");
        assert_eq!(olmo2.norm_placement, NormPlacement::Post);
        assert_eq!(olmo2.query_key_norm, QueryKeyNorm::FullWidth);

        let granite = fixture("granite", "config.json");
        assert_eq!((granite.attention_scale, granite.embedding_scale), (0.21, 2.5));
        assert_eq!((granite.residual_multiplier, granite.logits_scale), (0.7, 1.0 / 3.0));
    }

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        // What the configuration classes of transformers 5.23 hold when made without arguments:
        // model_type, vocabulary, hidden, intermediate, layers, heads, kv_heads, head_dim,
        // positions, eps, thetas, layers with a window, layers without positions, tied.
        type Row = (&'static str, [usize; 8], f64, &'static [f64], usize, usize, bool);
        let rows: [Row; 10] = [
            ("llama", [32000, 4096, 11008, 32, 32, 32, 128, 2048], 1e-6, &[1e4], 0, 0, false),
            ("mistral", [32000, 4096, 14336, 32, 32, 8, 128, 131072], 1e-6, &[1e4], 32, 0, false),
            ("qwen2", [151936, 4096, 22016, 32, 32, 32, 128, 32768], 1e-6, &[1e4], 0, 0, false),
            ("qwen3", [151936, 4096, 22016, 32, 32, 32, 128, 32768], 1e-6, &[1e4], 0, 0, false),
            ("gemma2", [256000, 2304, 9216, 26, 8, 4, 256, 8192], 1e-6, &[1e4], 13, 0, true),
            (
                "gemma3_text",
                [262208, 2304, 9216, 26, 8, 4, 256, 131072],
                1e-6,
                &[1e6, 1e4],
                22,
                0,
                true,
            ),
            ("phi3", [32064, 3072, 8192, 32, 32, 32, 96, 4096], 1e-5, &[1e4], 0, 0, false),
            ("smollm3", [128256, 2048, 11008, 36, 16, 4, 128, 32768], 1e-6, &[2e6], 0, 9, true),
            ("olmo2", [50304, 4096, 11008, 32, 32, 32, 128, 2048], 1e-5, &[1e4], 0, 0, false),
            ("granite", [32000, 4096, 11008, 32, 32, 32, 128, 2048], 1e-6, &[1e4], 0, 0, false),
        ];
        for (model_type, sizes, eps, thetas, windowed, unturned, tied) in rows {
            let config = parse(json!({ "model_type": model_type })).unwrap();
            let found = [
                config.vocab_size,
                config.hidden_size,
                config.intermediate_size,
                config.layers.len(),
                config.heads,
                config.kv_heads,
                config.head_dim,
                config.max_position_embeddings,
            ];
            assert_eq!(found, sizes, "{model_type}");
            assert_eq!((config.rms_norm_eps, config.tie_word_embeddings), (eps, tied));
            assert_eq!(config.ropes.iter().map(|rope| rope.theta).collect::<Vec<_>>(), thetas);
            let windows = windows_of(&config);
            assert_eq!(windows.iter().flatten().count(), windowed, "{model_type}");
            assert!(windows.iter().flatten().all(|window| *window == 4096));
            assert_eq!(ropes_of(&config).iter().filter(|rope| rope.is_none()).count(), unturned);
            assert!(!config.attention_output_bias && !config.mlp_bias);
            assert_eq!(config.attention_bias, model_type == "qwen2");
            assert_eq!(config.dtype, None);
        }
        let gemma2 = parse(json!({ "model_type": "gemma2" })).unwrap();
        assert_eq!((gemma2.attention_softcap, gemma2.final_softcap), (Some(50.0), Some(30.0)));
        assert_eq!(gemma2.attention_scale, 1.0 / 16.0);
        let off = json!({ "model_type": "gemma2", "final_logit_softcapping": null, "attn_logit_softcapping": null });
        let off = parse(off).unwrap();
        assert_eq!((off.attention_softcap, off.final_softcap), (None, None));
        let granite = parse(json!({ "model_type": "granite" })).unwrap();
        assert_eq!((granite.attention_scale, granite.embedding_scale), (1.0, 1.0));
    }

    #[test]
    fn windows_follow_each_familys_switches() {
        let windows = |value: Value| windows_of(&parse(value).unwrap());
        let some = Some(16);
        let qwen = |model_type: &str, on: bool| {
            json!({ "model_type": model_type, "num_hidden_layers": 4, "use_sliding_window": on,
                    "sliding_window": 16, "max_window_layers": 3 })
        };
        for model_type in ["qwen2", "qwen3"] {
            assert_eq!(windows(qwen(model_type, true)), [None, None, None, some]);
            assert_eq!(windows(qwen(model_type, false)), [None; 4]);
        }
        let mut listed = qwen("qwen2", true);
        listed["layer_types"] =
            json!(["sliding_attention", "full_attention", "sliding_attention", "full_attention"]);
        assert_eq!(windows(listed), [some, None, some, None]);
        for model_type in ["mistral", "phi3"] {
            let none =
                json!({ "model_type": model_type, "num_hidden_layers": 2, "sliding_window": null });
            assert_eq!(windows(none), [None; 2]);
        }
        let smollm3 = json!({ "model_type": "smollm3", "num_hidden_layers": 4,
            "use_sliding_window": true, "sliding_window": 16, "no_rope_layer_interval": 2 });
        assert_eq!(windows(smollm3), [None, some, None, some]);
        let gemma3 =
            json!({ "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 16 });
        assert_eq!(windows(gemma3), [some, some, some, some, some, None, some]);
    }

    #[test]
    fn the_ropes_of_known_checkpoints_are_read() {
        // Llama 3.2, Gemma 3 4B's text part, Phi 3 mini 128k and Phi 4 mini as the hub has them.
        let llama = parse(json!({ "model_type": "llama", "hidden_size": 2048, "head_dim": 64,
            "max_position_embeddings": 131072, "rope_theta": 500000.0,
            "rope_scaling": { "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3" } }))
        .unwrap();
        assert_eq!(llama.ropes[0].theta, 500_000.0);
        assert!(matches!(
            llama.ropes[0].scaling,
            RopeScaling::Llama3 { original_max_position_embeddings: 8192, .. }
        ));
        let gemma = parse(json!({ "model_type": "gemma3_text",
            "rope_scaling": { "factor": 8.0, "rope_type": "linear" } }))
        .unwrap();
        assert_eq!(gemma.ropes[0].scaling, RopeScaling::Linear { factor: 8.0 });
        assert_eq!(gemma.ropes[1].scaling, RopeScaling::Default);
        let phi = |kind: &str| {
            parse(json!({ "model_type": "phi3", "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": { "type": kind, "short_factor": vec![1.0; 48],
                    "long_factor": vec![2.0; 48] } }))
            .unwrap()
        };
        assert_eq!(phi("su").ropes, phi("longrope").ropes);
        assert_eq!(phi("yarn").ropes, phi("longrope").ropes);
        let RopeScaling::LongRope { attention_factor, original_max_position_embeddings, .. } =
            phi("longrope").ropes[0].scaling
        else {
            panic!("not a longrope");
        };
        assert_eq!(original_max_position_embeddings, 4096);
        assert_eq!(attention_factor, 1.1902380714238083);
        let phi4 = parse(json!({ "model_type": "phi3", "hidden_size": 3072,
            "num_attention_heads": 24, "num_key_value_heads": 8, "partial_rotary_factor": 0.75 }))
        .unwrap();
        assert_eq!((phi4.head_dim, phi4.ropes[0].rotary_dim), (128, 96));
    }

    #[test]
    fn an_architecture_is_found_by_type_or_class_and_others_are_refused_by_name() {
        let by_class = parse(json!({ "architectures": ["Gemma3ForCausalLM"] })).unwrap();
        assert_eq!(by_class.architecture, Architecture::Gemma3);
        for (value, expected) in [
            (json!({ "model_type": "gpt2" }), "\"gpt2\""),
            (json!({ "architectures": ["MambaForCausalLM"] }), "MambaForCausalLM"),
            (json!({ "model_type": "gemma3" }), "text-only"),
            (
                json!({ "model_type": "llama", "architectures": ["LlamaForSequenceClassification"] }),
                "LlamaForSequenceClassification",
            ),
        ] {
            let error = parse(value).unwrap_err();
            assert!(matches!(error, Error::Unsupported(_)));
            assert!(error.to_string().contains(expected), "{error}");
        }
        let error = parse(json!({ "model_type": "gpt2" })).unwrap_err().to_string();
        for architecture in Architecture::ALL {
            assert!(error.contains(architecture.model_type()), "{error}");
        }
        assert!(parse(json!({})).unwrap_err().to_string().contains("model_type: missing"));
    }

    #[test]
    fn what_is_not_supported_is_named_with_its_value() {
        for (model_type, extra, expected) in [
            (
                "llama",
                json!({ "rope_scaling": { "type": "dynamic", "factor": 2.0 } }),
                "rope_scaling.type = \"dynamic\"",
            ),
            (
                "qwen3",
                json!({ "rope_parameters": { "rope_type": "yarn" } }),
                "rope_parameters.rope_type = \"yarn\"",
            ),
            ("phi3", json!({ "rope_scaling": { "type": "linear" } }), "default and longrope"),
            (
                "llama",
                json!({ "rope_scaling": { "type": "default", "mrope_section": [1] } }),
                "mrope_section",
            ),
            ("llama", json!({ "partial_rotary_factor": 0.5 }), "partial_rotary_factor = 0.5"),
            (
                "llama",
                json!({ "quantization_config": { "quant_method": "gptq" } }),
                "quant_method = \"gptq\"",
            ),
            ("llama", json!({ "quantization": { "group_size": 64, "bits": 4 } }), "bits = 4"),
            ("llama", json!({ "hidden_act": "relu2" }), "hidden_act = \"relu2\""),
            ("gemma2", json!({ "hidden_activation": "relu" }), "hidden_activation = \"relu\""),
            (
                "gemma3_text",
                json!({ "use_bidirectional_attention": true }),
                "use_bidirectional_attention = true",
            ),
            ("gemma3_text", json!({ "attn_logit_softcapping": 50.0 }), "attn_logit_softcapping"),
            (
                "qwen2",
                json!({ "num_hidden_layers": 1, "layer_types": ["linear_attention"] }),
                "linear_attention",
            ),
            (
                "mistral",
                json!({ "num_hidden_layers": 2, "layer_types": ["full_attention", "sliding_attention"] }),
                "layer_types",
            ),
            ("llama", json!({ "torch_dtype": "float8_e4m3fn" }), "torch_dtype"),
        ] {
            let mut value = json!({ "model_type": model_type });
            value.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let error = parse(value).unwrap_err();
            assert!(matches!(error, Error::Unsupported(_)), "{error}");
            assert!(error.to_string().contains(expected), "{error} lacks {expected}");
        }
    }

    #[test]
    fn impossible_values_are_refused_by_key() {
        for (model_type, extra, expected) in [
            ("llama", json!({ "hidden_size": 0 }), "hidden_size: expected a whole number from 1"),
            ("llama", json!({ "hidden_size": -64 }), "found -64"),
            ("llama", json!({ "hidden_size": 64.5 }), "found 64.5"),
            ("llama", json!({ "hidden_size": "64" }), "hidden_size"),
            ("llama", json!({ "hidden_size": null }), "found null"),
            ("llama", json!({ "hidden_size": u64::MAX }), "hidden_size"),
            ("llama", json!({ "vocab_size": 1u64 << 40 }), "vocab_size"),
            ("llama", json!({ "num_hidden_layers": 1_000_000_000 }), "num_hidden_layers"),
            (
                "llama",
                json!({ "num_key_value_heads": 5 }),
                "does not divide num_attention_heads = 32",
            ),
            ("llama", json!({ "num_attention_heads": 24 }), "does not divide hidden_size"),
            ("llama", json!({ "head_dim": 7 }), "head_dim: found 7"),
            ("llama", json!({ "rms_norm_eps": -1.0 }), "rms_norm_eps"),
            ("llama", json!({ "rope_theta": 0 }), "rope_theta"),
            ("llama", json!({ "tie_word_embeddings": "yes" }), "true or false"),
            ("llama", json!({ "rope_scaling": "linear" }), "rope_scaling: expected an object"),
            (
                "llama",
                json!({ "rope_scaling": { "type": "linear" } }),
                "rope_scaling.factor: missing",
            ),
            (
                "llama",
                json!({ "rope_scaling": { "type": "linear", "factor": 0 } }),
                "rope_scaling.factor",
            ),
            (
                "llama",
                json!({ "rope_scaling": { "type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 4 } }),
                "high_freq_factor",
            ),
            (
                "phi3",
                json!({ "rope_scaling": { "type": "longrope", "short_factor": [1], "long_factor": [1] } }),
                "has 1 entries",
            ),
            ("phi3", json!({ "partial_rotary_factor": 0.01 }), "partial_rotary_factor"),
            ("granite", json!({ "logits_scaling": 0 }), "logits_scaling"),
            ("qwen2", json!({ "layer_types": [] }), "layer_types: has 0 entries"),
            ("gemma2", json!({ "sliding_window": null }), "sliding_window is null"),
            ("smollm3", json!({ "no_rope_layers": [1, 0] }), "no_rope_layers: has 2 entries"),
            ("smollm3", json!({ "no_rope_layer_interval": 0 }), "no_rope_layer_interval"),
            (
                "gemma3_text",
                json!({ "rope_parameters": { "rope_theta": 1e4 } }),
                "rope_theta: unexpected",
            ),
        ] {
            let mut value = json!({ "model_type": model_type });
            value.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
            let error = parse(value).unwrap_err();
            assert!(matches!(error, Error::File { .. }), "{error}");
            let text = error.to_string();
            assert!(
                text.starts_with("config.json: ") && text.contains(expected),
                "{text} lacks {expected}"
            );
        }
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
