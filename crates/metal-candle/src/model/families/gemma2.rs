//! Gemma 2: four norms a layer, capped logits, every second layer local.

use super::{Architecture, llama};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::{Config, Defaults, NormPlacement, Window};

pub(super) static FAMILY: Architecture = Architecture {
    name: "Gemma 2",
    model_type: "gemma2",
    class_name: "Gemma2ForCausalLM",
    with_images: None,
    read,
};

/// Those of `Gemma2Config`.
pub(super) const DEFAULTS: Defaults = Defaults {
    vocab_size: 256_000,
    hidden_size: 2304,
    intermediate_size: 9216,
    layers: 26,
    heads: 8,
    kv_heads: Some(4),
    head_dim: Some(256),
    max_position_embeddings: 8192,
    tie_word_embeddings: true,
    activation: ("hidden_activation", "gelu_pytorch_tanh"),
    ..llama::DEFAULTS
};

fn read(keys: Keys) -> Result<Config> {
    let mut config = read_gemma(keys, &FAMILY, &DEFAULTS)?;
    let window = Window::read(keys, Some(4096))?;
    config.set_windows(keys, window, |layer| layer.is_multiple_of(2))?;
    config.attention_softcap = keys.optional_positive("attn_logit_softcapping", Some(50.0))?;
    config.final_softcap = keys.optional_positive("final_logit_softcapping", Some(30.0))?;
    Ok(config)
}

/// What Gemma 2 and 3 share.
pub(super) fn read_gemma(
    keys: Keys,
    family: &'static Architecture,
    defaults: &Defaults,
) -> Result<Config> {
    let mut config = Config::common(keys, family, defaults)?;
    config.norm_weight_offset = 1.0;
    config.norm_placement = NormPlacement::Sandwich;
    config.attention_scale = keys.positive("query_pre_attn_scalar", 256.0)?.powf(-0.5);
    config.embedding_scale = (config.hidden_size as f64).sqrt();
    config.read_attention_bias(keys)?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        Expected, LLAMA, assert_defaults, assert_invalid, assert_unsupported, fixture, parse_with,
        windows_of,
    };
    use crate::model::config::{Activation, NormPlacement, QueryKeyNorm};

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let expected = Expected {
            vocab_size: 256_000,
            hidden_size: 2304,
            intermediate_size: 9216,
            layers: 26,
            heads: 8,
            kv_heads: 4,
            head_dim: 256,
            max_position_embeddings: 8192,
            windowed: 13,
            tied: true,
            ..LLAMA
        };
        let config = assert_defaults("gemma2", expected);
        assert_eq!((config.attention_softcap, config.final_softcap), (Some(50.0), Some(30.0)));
        assert_eq!(config.attention_scale, 1.0 / 16.0);
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("gemma2");
        assert_eq!(windows_of(&config), [Some(6), None, Some(6)]);
        assert_eq!((config.attention_softcap, config.final_softcap), (Some(0.8), Some(2.0)));
        assert_eq!(config.norm_placement, NormPlacement::Sandwich);
        assert_eq!((config.norm_weight_offset, config.query_key_norm), (1.0, QueryKeyNorm::None));
        assert_eq!(config.activation, Activation::GeluTanh);
        assert_eq!(config.attention_scale, 5f64.powf(-0.5));
        assert_eq!(config.embedding_scale, 32f64.sqrt());
    }

    #[test]
    fn soft_caps_can_be_off_but_the_window_cannot() {
        let off = json!({ "final_logit_softcapping": null, "attn_logit_softcapping": null });
        let off = parse_with("gemma2", off).unwrap();
        assert_eq!((off.attention_softcap, off.final_softcap), (None, None));
        let none = json!({ "sliding_window": null });
        assert_invalid("gemma2", [(none, "sliding_window is null")]);
        let relu = json!({ "hidden_activation": "relu" });
        assert_unsupported("gemma2", [(relu, "hidden_activation = \"relu\"")]);
    }
}
