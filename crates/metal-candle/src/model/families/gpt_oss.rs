//! gpt-oss: a mixture of experts in every layer, with biases everywhere, every second layer local, and a sink in each head.

use serde_json::json;

use super::{Architecture, llama};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::ropes::{RopeRules, RopeShape, one_rope, rope};
use crate::model::config::{
    Activation, Config, Defaults, ExpertNames, ExpertsConfig, StackedExperts, Window,
};
use crate::model::rope::RopeConfig;

pub(super) static FAMILY: Architecture = Architecture {
    name: "gpt-oss",
    model_type: "gpt_oss",
    class_name: "GptOssForCausalLM",
    with_images: None,
    read,
};

static NAMES: ExpertNames = ExpertNames {
    module: "mlp",
    router: "router",
    projections: ["gate_proj", "up_proj", "down_proj"],
    stacked: StackedExperts { mlx: "experts", interleaved: true },
};

fn read(keys: Keys) -> Result<Config> {
    let defaults = Defaults {
        vocab_size: 201_088,
        hidden_size: 2880,
        intermediate_size: 2880,
        layers: 36,
        heads: 64,
        kv_heads: Some(8),
        head_dim: Some(64),
        max_position_embeddings: 131_072,
        rms_norm_eps: 1e-5,
        rope_theta: 150_000.0,
        ropes,
        ..llama::DEFAULTS
    };
    let mut config = Config::common(keys, &FAMILY, &defaults)?;
    let window = Window::read(keys, Some(128))?;
    config.set_windows(keys, window, |layer| layer.is_multiple_of(2))?;
    config.attention_bias = keys.flag("attention_bias", true)?;
    config.attention_output_bias = config.attention_bias;
    config.attention_sinks = true;
    // Whatever `hidden_act` says.
    config.activation = Activation::Clamped;
    for (key, supported) in [("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)] {
        let found = keys.number(key, supported)?;
        if found != supported {
            return Err(keys.unsupported(key, format!("{found}; {supported} is supported")));
        }
    }
    let width = ("intermediate_size", config.intermediate_size);
    let mut experts = ExpertsConfig::read(keys, 128, 4, width, &NAMES)?;
    experts.has_biases = true;
    config.experts = Some(experts);
    for layer in &mut config.layers {
        layer.has_experts = true;
    }
    Ok(config)
}

/// Where the file says nothing of them, positions are stretched from 4096, as published models have it.
fn ropes(keys: Keys, shape: RopeShape) -> Result<Vec<RopeConfig>> {
    let is_said = |key| Ok::<_, crate::Error>(keys.object(key)?.is_some_and(|map| !map.is_empty()));
    if is_said("rope_parameters")? || is_said("rope_scaling")? {
        return one_rope(keys, shape);
    }
    let stretched = json!({ "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": false, "original_max_position_embeddings": 4096 });
    let empty = serde_json::Map::new();
    let map = stretched.as_object().unwrap_or(&empty);
    Ok(vec![rope(keys.of("rope_parameters.", map), keys, shape, &RopeRules::COMMON)?])
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        assert_invalid, assert_unsupported, fixture, parse, parse_with, windows_of,
    };
    use crate::model::config::Activation;
    use crate::model::rope::RopeScaling;

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let config = parse(json!({ "model_type": "gpt_oss" })).unwrap();
        assert_eq!((config.vocab_size, config.hidden_size), (201_088, 2880));
        assert_eq!((config.layers.len(), config.heads, config.kv_heads), (36, 64, 8));
        assert_eq!((config.head_dim, config.max_position_embeddings), (64, 131_072));
        assert_eq!((config.rms_norm_eps, config.tie_word_embeddings), (1e-5, false));
        assert!(config.attention_bias && config.attention_output_bias && config.attention_sinks);
        assert_eq!(config.activation, Activation::Clamped);
        let experts = config.experts.unwrap();
        assert_eq!((experts.count, experts.active, experts.width), (128, 4, 2880));
        assert!(experts.normalized && experts.has_biases);
        assert!(config.layers.iter().all(|layer| layer.has_experts));
        let windows = windows_of(&config);
        assert_eq!((windows[0], windows[1], windows[34]), (Some(128), None, Some(128)));
        assert_eq!((config.ropes[0].theta, config.context()), (150_000.0, 131_072));
        let RopeScaling::Yarn { factor, truncate, original_max_position_embeddings, .. } =
            config.ropes[0].scaling
        else {
            panic!("{:?}", config.ropes)
        };
        assert_eq!((factor, truncate, original_max_position_embeddings), (32.0, false, 4096));
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("gpt-oss");
        assert_eq!(windows_of(&config), [Some(8), None, Some(8)]);
        let experts = config.experts.unwrap();
        assert_eq!((experts.count, experts.active, experts.width), (6, 2, 32));
    }

    #[test]
    fn other_units_are_not_supported() {
        let plain = json!({ "rope_parameters": { "rope_type": "default", "rope_theta": 1e4 } });
        let plain = parse_with("gpt_oss", plain).unwrap();
        assert_eq!(plain.ropes[0].scaling, RopeScaling::Default);
        assert_unsupported(
            "gpt_oss",
            [
                (json!({ "swiglu_limit": 6.0 }), "swiglu_limit = 6; 7 is supported"),
                (json!({ "swiglu_alpha": 1.0 }), "swiglu_alpha = 1; 1.702 is supported"),
            ],
        );
        assert_invalid("gpt_oss", [(json!({ "swiglu_limit": "7" }), "swiglu_limit")]);
    }
}
