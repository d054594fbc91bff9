//! Ministral 3, text only: YaRN, and queries that are scaled by their position.

use serde_json::json;

use super::{Architecture, llama};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::ropes::{RopeRules, RopeShape, dictionary, original_length, rope};
use crate::model::config::{Config, Defaults, MAX_POSITIONS, Window};
use crate::model::rope::{QueryScaling, RopeConfig};

pub(super) static FAMILY: Architecture = Architecture {
    name: "Ministral 3",
    model_type: "ministral3",
    class_name: "Ministral3ForCausalLM",
    with_images: Some(("mistral3", "Mistral3ForConditionalGeneration")),
    read,
};

/// What scales the queries.
const BETA: &str = "llama_4_scaling_beta";
/// `transformers` writes the length of the model there too, and reads it nowhere.
const LENGTH: &str = "max_position_embeddings";

fn read(keys: Keys) -> Result<Config> {
    let defaults = Defaults {
        vocab_size: 131_072,
        intermediate_size: 14336,
        layers: 34,
        kv_heads: Some(8),
        head_dim: Some(128),
        max_position_embeddings: 262_144,
        rms_norm_eps: 1e-5,
        ropes,
        ..llama::DEFAULTS
    };
    let mut config = Config::common(keys, &FAMILY, &defaults)?;
    config.set_window(keys, Window::read(keys, None)?.size)?;
    Ok(config)
}

fn ropes(keys: Keys, shape: RopeShape) -> Result<Vec<RopeConfig>> {
    let default = [
        ("rope_type", json!("yarn")),
        ("rope_theta", json!(1e6)),
        ("factor", json!(16.0)),
        ("original_max_position_embeddings", json!(16384)),
        ("beta_fast", json!(32.0)),
        ("beta_slow", json!(1.0)),
        ("mscale_all_dim", json!(1.0)),
        ("mscale", json!(1.0)),
        (BETA, json!(0.1)),
    ];
    let default = default.into_iter().map(|(key, value)| (key.to_string(), value)).collect();
    let dictionary = dictionary(keys)?.unwrap_or_else(|| keys.of("rope_parameters.", &default));
    let rules = RopeRules { keys: &[BETA, LENGTH], ..RopeRules::COMMON };
    let rope = rope(dictionary, keys, shape, &rules)?;
    dictionary.size(LENGTH, shape.max_position_embeddings, MAX_POSITIONS)?;
    let Some(beta) = dictionary.non_negative(BETA)? else {
        return Err(dictionary.invalid(BETA, "missing; the queries of ministral3 are scaled by it"));
    };
    let original_max_position_embeddings = original_length(dictionary, keys, shape, &rules)?;
    let query_scaling = Some(QueryScaling { beta, original_max_position_embeddings });
    Ok(vec![RopeConfig { query_scaling, ..rope }])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        Expected, LLAMA, assert_defaults, assert_invalid, assert_unsupported, fixture, parse_with,
    };
    use crate::model::rope::{QueryScaling, RopeConfig, RopeScaling};

    /// The rope of Ministral 3 8B.
    fn of_8b() -> RopeConfig {
        RopeConfig {
            theta: 1e6,
            rotary_dim: 128,
            scaling: RopeScaling::Yarn {
                factor: 16.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate: true,
                original_max_position_embeddings: 16384,
                attention_factor: 1.0,
            },
            query_scaling: Some(QueryScaling {
                beta: 0.1,
                original_max_position_embeddings: 16384,
            }),
        }
    }

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let expected = Expected {
            vocab_size: 131_072,
            intermediate_size: 14336,
            layers: 34,
            kv_heads: 8,
            max_position_embeddings: 262_144,
            rms_norm_eps: 1e-5,
            thetas: &[1e6],
            ..LLAMA
        };
        let config = assert_defaults("ministral3", expected);
        assert_eq!(config.ropes, [of_8b()]);
    }

    #[test]
    fn the_text_part_of_ministral_3_8b_is_read() {
        let extra = json!({ "architectures": ["Ministral3ForCausalLM"], "attention_dropout": 0.0,
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02,
            "intermediate_size": 14336, "max_position_embeddings": 262144, "num_attention_heads": 32,
            "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_parameters": { "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0,
                "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                "rope_type": "yarn", "type": "yarn" },
            "sliding_window": null, "tie_word_embeddings": false, "use_cache": true,
            "vocab_size": 131072 });
        let config = parse_with("ministral3", extra).unwrap();
        assert_eq!(config.ropes, [of_8b()]);
        assert_eq!((config.attention_scale, config.attention_bias), (128f64.powf(-0.5), false));
        assert!(config.layers.iter().all(|layer| layer.window.is_none()));
    }

    #[test]
    fn the_scaling_of_queries_is_read() {
        let rope = &fixture("ministral3").ropes[0];
        let scaling = QueryScaling { beta: 0.5, original_max_position_embeddings: 8 };
        assert_eq!(rope.query_scaling, Some(scaling));
        let rope = |extra| json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e4, "llama_4_scaling_beta": extra } });
        let extras = [
            (json!({ "rope_parameters": {} }), "rope_parameters.llama_4_scaling_beta: missing"),
            (rope(json!(-0.1)), "llama_4_scaling_beta: expected a number from 0, found -0.1"),
            (rope(json!("0.1")), "llama_4_scaling_beta: expected a number"),
        ];
        assert_invalid("ministral3", extras);
        let other =
            json!({ "rope_parameters": { "llama_4_scaling_beta": 0.1, "llama_4_scaling": 1 } });
        assert_unsupported("ministral3", [(other, "rope_parameters.llama_4_scaling = 1")]);
        // Of no other family.
        let llama = json!({ "rope_scaling": { "type": "default", "llama_4_scaling_beta": 0.1 } });
        assert_unsupported("llama", [(llama, "rope_scaling.llama_4_scaling_beta = 0.1")]);
    }
}
