//! Phi 3 and 4: query, key and value in one weight, gate and up in another.

use serde_json::Map;

use super::{Architecture, llama};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::ropes::{RopeKind, RopeRules, RopeShape, dictionary, rope};
use crate::model::config::{Config, Defaults, Window};
use crate::model::rope::RopeConfig;

pub(super) static FAMILY: Architecture = Architecture {
    name: "Phi 3",
    model_type: "phi3",
    class_name: "Phi3ForCausalLM",
    with_images: None,
    read,
};

fn read(keys: Keys) -> Result<Config> {
    let defaults = Defaults {
        vocab_size: 32064,
        hidden_size: 3072,
        intermediate_size: 8192,
        max_position_embeddings: 4096,
        rms_norm_eps: 1e-5,
        ropes,
        ..llama::DEFAULTS
    };
    let mut config = Config::common(keys, &FAMILY, &defaults)?;
    config.set_window(keys, Window::read(keys, None)?.size)?;
    config.fused_projections = true;
    Ok(config)
}

fn ropes(keys: Keys, shape: RopeShape) -> Result<Vec<RopeConfig>> {
    let rules = RopeRules {
        kinds: &[RopeKind::Default, RopeKind::LongRope],
        // The longrope of early checkpoints.
        aliases: &[("su", RopeKind::LongRope), ("yarn", RopeKind::LongRope)],
        partial: true,
        original: Some(4096),
        keys: &[],
    };
    let empty = Map::new();
    let dictionary = dictionary(keys)?.unwrap_or_else(|| keys.of("rope_parameters.", &empty));
    Ok(vec![rope(dictionary, keys, shape, &rules)?])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        Expected, LLAMA, assert_defaults, assert_invalid, assert_unsupported, fixture, parse_with,
        windows_of,
    };
    use crate::model::rope::{RopeConfig, RopeScaling};

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let expected = Expected {
            vocab_size: 32064,
            hidden_size: 3072,
            intermediate_size: 8192,
            head_dim: 96,
            max_position_embeddings: 4096,
            rms_norm_eps: 1e-5,
            ..LLAMA
        };
        assert_defaults("phi3", expected);
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("phi3");
        assert!(config.fused_projections);
        assert_eq!((config.ropes[0].rotary_dim, config.head_dim), (6, 8));
        assert_eq!(windows_of(&config), [Some(10); 3]);
        let longrope = fixture("phi3-longrope");
        let RopeScaling::LongRope { long_factor, attention_factor, .. } =
            &longrope.ropes[0].scaling
        else {
            panic!("{:?}", longrope.ropes);
        };
        assert_eq!(long_factor[7], 9.0);
        // sqrt(1 + ln(64 / 16) / ln(16))
        assert!((attention_factor - 1.5f64.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn the_longrope_of_phi_3_mini_128k_is_read_by_each_of_its_names() {
        let phi = |kind: &str| {
            let extra = json!({ "max_position_embeddings": 131072,
                "original_max_position_embeddings": 4096,
                "rope_scaling": { "type": kind, "short_factor": vec![1.0; 48],
                    "long_factor": vec![2.0; 48] } });
            parse_with("phi3", extra).unwrap()
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
    }

    #[test]
    fn phi_4_is_read() {
        let extra = json!({ "architectures": ["Phi3ForCausalLM"], "attention_bias": false,
            "attention_dropout": 0.0, "bos_token_id": 100257, "embd_pdrop": 0.0,
            "eos_token_id": 100265, "hidden_act": "silu", "hidden_size": 5120,
            "intermediate_size": 17920, "max_position_embeddings": 16384,
            "num_attention_heads": 40, "num_hidden_layers": 40, "num_key_value_heads": 10,
            "original_max_position_embeddings": 16384, "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_scaling": null, "rope_theta": 250000, "sliding_window": null,
            "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 100352 });
        let config = parse_with("phi3", extra).unwrap();
        let rope = RopeConfig {
            theta: 250_000.0,
            rotary_dim: 128,
            scaling: RopeScaling::Default,
            query_scaling: None,
        };
        assert_eq!(config.ropes, [rope]);
        assert_eq!((config.kv_heads, config.layers.len()), (10, 40));
        assert_eq!(windows_of(&config), [None; 40]);
    }

    #[test]
    fn phi_4_mini_is_read() {
        let extra = json!({ "architectures": ["Phi3ForCausalLM"], "attention_bias": false,
            "attention_dropout": 0.0, "bos_token_id": 199999, "embd_pdrop": 0.0,
            "eos_token_id": 199999, "full_attn_mod": 1, "hidden_act": "silu", "hidden_size": 3072,
            "interpolate_factor": 1, "intermediate_size": 8192, "lm_head_bias": false,
            "max_position_embeddings": 131072, "mlp_bias": false, "num_attention_heads": 24,
            "num_hidden_layers": 32, "num_key_value_heads": 8,
            "original_max_position_embeddings": 4096, "partial_rotary_factor": 0.75,
            "resid_pdrop": 0.0, "rms_norm_eps": 1e-05,
            "rope_scaling": { "long_factor": vec![2.0; 48], "short_factor": vec![1.0; 48],
                "type": "longrope" },
            "rope_theta": 10000.0, "sliding_window": 262144, "tie_word_embeddings": true,
            "torch_dtype": "bfloat16", "vocab_size": 200064 });
        let config = parse_with("phi3", extra).unwrap();
        assert_eq!((config.head_dim, config.ropes[0].rotary_dim), (128, 96));
        assert!(matches!(
            config.ropes[0].scaling,
            RopeScaling::LongRope { original_max_position_embeddings: 4096, .. }
        ));
        assert!(config.tie_word_embeddings);
        assert_eq!(windows_of(&config), [Some(262_144); 32]);
        let tiny = fixture("phi4-mini");
        assert_eq!((tiny.head_dim, tiny.ropes[0].rotary_dim), (8, 6));
    }

    #[test]
    fn the_window_can_be_none() {
        let none = json!({ "num_hidden_layers": 2, "sliding_window": null });
        assert_eq!(windows_of(&parse_with("phi3", none).unwrap()), [None; 2]);
    }

    #[test]
    fn what_is_wrong_with_a_rope_is_told() {
        let linear = json!({ "rope_scaling": { "type": "linear" } });
        let wide = json!({ "partial_rotary_factor": 1.5 });
        let extras = [
            (linear, "rope_scaling.type = \"linear\"; default and longrope are supported"),
            (wide, "partial_rotary_factor = 1.5"),
        ];
        assert_unsupported("phi3", extras);
        let short = json!({ "rope_scaling":
            { "type": "longrope", "short_factor": [1], "long_factor": [1] } });
        let extras = [
            (short, "has 1 entries"),
            (json!({ "partial_rotary_factor": 0.01 }), "partial_rotary_factor"),
        ];
        assert_invalid("phi3", extras);
    }
}
