//! Mistral: Llama with a sliding window, in all layers unless `layer_types` says otherwise, as transformers reads it
//! for Ministral.

use super::{Architecture, llama};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::{Config, Defaults, Window};

pub(super) static FAMILY: Architecture = Architecture {
    name: "Mistral",
    model_type: "mistral",
    class_name: "MistralForCausalLM",
    with_images: None,
    read,
};

/// Those of `MistralConfig`.
pub(super) const DEFAULTS: Defaults = Defaults {
    intermediate_size: 14336,
    kv_heads: Some(8),
    max_position_embeddings: 131_072,
    ..llama::DEFAULTS
};

fn read(keys: Keys) -> Result<Config> {
    let mut config = Config::common(keys, &FAMILY, &DEFAULTS)?;
    let window = Window::read(keys, Some(4096))?;
    config.set_windows(keys, window, |_| window.size.is_some())?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        Expected, LLAMA, assert_defaults, fixture, parse_with, windows_of,
    };

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let expected = Expected {
            intermediate_size: 14336,
            kv_heads: 8,
            max_position_embeddings: 131_072,
            windowed: 32,
            ..LLAMA
        };
        assert_defaults("mistral", expected);
    }

    #[test]
    fn every_layer_has_the_window_unless_it_is_said_which() {
        let config = fixture("mistral");
        assert_eq!(windows_of(&config), [Some(8); 3]);
        assert!(!config.attention_bias);
        let none = json!({ "num_hidden_layers": 2, "sliding_window": null });
        assert_eq!(windows_of(&parse_with("mistral", none).unwrap()), [None; 2]);
        let mixture = json!({ "num_hidden_layers": 2,
            "layer_types": ["full_attention", "sliding_attention"] });
        assert_eq!(windows_of(&parse_with("mistral", mixture).unwrap()), [None, Some(4096)]);
    }
}
