//! Llama 2 to 3.3, and what shares its shape (SmolLM, SmolLM2, TinyLlama).

use super::Architecture;
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::ropes::one_rope;
use crate::model::config::{Config, Defaults};

pub(super) static FAMILY: Architecture = Architecture {
    name: "Llama",
    model_type: "llama",
    class_name: "LlamaForCausalLM",
    with_images: None,
    read,
};

/// Those of `LlamaConfig`.
pub(super) const DEFAULTS: Defaults = Defaults {
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
    tie_word_embeddings: false,
    activation: ("hidden_act", "silu"),
    ropes: one_rope,
};

fn read(keys: Keys) -> Result<Config> {
    let mut config = Config::common(keys, &FAMILY, &DEFAULTS)?;
    config.set_window(keys, None)?;
    config.read_attention_bias(keys)?;
    config.mlp_bias = keys.flag("mlp_bias", false)?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use candle_core::DType;
    use serde_json::json;

    use super::super::testing::{LLAMA, assert_defaults, assert_unsupported, fixture, parse_with};
    use crate::model::config::{Activation, NormPlacement};
    use crate::model::rope::{RopeConfig, RopeScaling};

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        assert_defaults("llama", LLAMA);
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("llama-odd");
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
        assert_eq!(fixture("llama-f16").dtype, Some(DType::F16));

        let llama3 = fixture("llama3");
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
                query_scaling: None,
            }]
        );
        assert!(llama3.tie_word_embeddings);
        let linear = fixture("llama-linear-rope");
        assert_eq!(linear.ropes[0].scaling, RopeScaling::Linear { factor: 4.0 });
    }

    #[test]
    fn the_rope_of_llama_3_2_is_read() {
        let extra = json!({ "hidden_size": 2048, "head_dim": 64,
            "max_position_embeddings": 131072, "rope_theta": 500000.0,
            "rope_scaling": { "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3" } });
        let rope = &parse_with("llama", extra).unwrap().ropes[0];
        assert_eq!(rope.theta, 500_000.0);
        assert!(matches!(
            rope.scaling,
            RopeScaling::Llama3 { original_max_position_embeddings: 8192, .. }
        ));
    }

    #[test]
    fn windows_are_not_supported() {
        let extra = json!({ "num_hidden_layers": 1, "layer_types": ["sliding_attention"] });
        assert_unsupported("llama", [(extra, "layer_types")]);
    }
}
