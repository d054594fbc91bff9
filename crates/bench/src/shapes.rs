//! Models by name, as their published `config.json` describes them, and of files of that name. Weights are random:
//! what a step costs does not depend on them.

use metal_candle::model::Config;
use metal_candle::{Error, Result};
use serde_json::{Value, json};
use std::path::Path;

/// The names that [`config`] knows.
pub const NAMES: [&str; 6] =
    ["smollm2-135m", "llama-3.2-1b", "llama-3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "tiny"];

/// The `config.json` of a shape. `tiny` is made up, for trying things out.
///
/// # Errors
/// For a name that is not one of [`NAMES`].
pub fn config_json(name: &str) -> Result<Value> {
    let llama3_rope = json!({
        "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    });
    let shape = match name {
        "smollm2-135m" => json!({
            "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
            "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536,
            "vocab_size": 49152, "tie_word_embeddings": true, "rope_theta": 100000.0,
            "max_position_embeddings": 8192,
        }),
        "llama-3.2-1b" => json!({
            "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192,
            "vocab_size": 128256, "tie_word_embeddings": true, "rope_theta": 500000.0,
            "rope_scaling": llama3_rope, "max_position_embeddings": 131072,
        }),
        "llama-3-8b" => json!({
            "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 14336,
            "vocab_size": 128256, "tie_word_embeddings": false, "rope_theta": 500000.0,
            "max_position_embeddings": 8192,
        }),
        "qwen3-30b-a3b" => json!({
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
            "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
            "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
            "norm_topk_prob": true, "vocab_size": 151936, "tie_word_embeddings": false,
            "rope_theta": 1000000.0, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        }),
        "gpt-oss-20b" => json!({
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
            "hidden_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
            "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2880,
            "num_local_experts": 32, "num_experts_per_tok": 4, "vocab_size": 201088,
            "tie_word_embeddings": false, "attention_bias": true, "sliding_window": 128,
            "max_position_embeddings": 131072, "rope_theta": 150000.0,
        }),
        "tiny" => json!({
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
            "vocab_size": 128, "tie_word_embeddings": true, "rope_theta": 10000.0,
            "max_position_embeddings": 512,
        }),
        other => {
            return Err(Error::option(
                "shape",
                format!("is {other}, expected one of {}", NAMES.join(", ")),
            ));
        }
    };
    let mut config = json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "attention_bias": false, "mlp_bias": false, "bos_token_id": 1,
        "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "bfloat16",
    });
    if let (Some(config), Value::Object(shape)) = (config.as_object_mut(), shape) {
        config.extend(shape);
    }
    Ok(config)
}

/// The configuration of a name, or of a model's folder, its `config.json` or its GGUF file.
///
/// # Errors
/// For a name that is neither one of [`NAMES`] nor there, and like [`Config::load`].
pub fn config(shape: &str) -> Result<Config> {
    let path = Path::new(shape);
    if NAMES.contains(&shape) {
        return Config::from_json(&config_json(shape)?.to_string());
    }
    if !path.exists() {
        return Err(Error::option(
            "shape",
            format!(
                "is {shape}, expected one of {}, a model's folder, its config.json or a GGUF file",
                NAMES.join(", ")
            ),
        ));
    }
    let is_json = path.is_file() && path.extension().is_some_and(|it| it == "json");
    if is_json { Config::from_file(path) } else { Config::load(path) }
}

/// How rows name a shape: by its name, or by that of the model's folder or file.
pub(crate) fn label(shape: &str) -> String {
    let path = Path::new(shape);
    let is_config = path.file_name().is_some_and(|it| it == "config.json");
    let folder = path.parent().filter(|_| is_config).and_then(Path::file_name);
    let is_file = is_config || path.is_file();
    let name = folder.or_else(|| if is_file { path.file_stem() } else { path.file_name() });
    name.map_or_else(|| shape.to_string(), |name| name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_named_by_their_model() {
        for (shape, name) in [
            ("tiny", "tiny"),
            ("models/Qwen3-8B", "Qwen3-8B"),
            ("models/gemma-2.5/", "gemma-2.5"),
            ("models/phi/config.json", "phi"),
            ("config.json", "config"),
        ] {
            assert_eq!(label(shape), name, "{shape}");
        }
    }

    #[test]
    fn every_shape_is_a_configuration_and_others_are_named() {
        for name in NAMES {
            config(name).unwrap();
        }
        let error = config("gpt-5").unwrap_err().to_string();
        assert!(error.contains("gpt-5") && error.contains("smollm2-135m"), "{error}");
    }
}
