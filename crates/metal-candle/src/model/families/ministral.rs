//! Ministral: Mistral whose layers may differ in whether they have the window.

use super::{Architecture, mistral};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::{Config, Window};

pub(super) static FAMILY: Architecture = Architecture {
    name: "Ministral",
    model_type: "ministral",
    class_name: "MinistralForCausalLM",
    with_images: None,
    read,
};

fn read(keys: Keys) -> Result<Config> {
    let mut config = Config::common(keys, &FAMILY, &mistral::DEFAULTS)?;
    let window = Window::read(keys, Some(4096))?;
    config.set_windows(keys, window, |_| window.size.is_some())?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        Expected, LLAMA, assert_defaults, assert_invalid, fixture, parse_with, windows_of,
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
        assert_defaults("ministral", expected);
    }

    #[test]
    fn each_layer_has_the_window_or_not() {
        assert_eq!(windows_of(&fixture("ministral")), [None, Some(6), Some(6)]);
        let none = json!({ "num_hidden_layers": 2, "sliding_window": null });
        assert_eq!(windows_of(&parse_with("ministral", none).unwrap()), [None; 2]);
        let lacking = json!({ "num_hidden_layers": 2, "sliding_window": null,
            "layer_types": ["full_attention", "sliding_attention"] });
        let expected = "layer 1 has sliding_attention, but sliding_window is null";
        assert_invalid("ministral", [(lacking, expected)]);
    }
}
