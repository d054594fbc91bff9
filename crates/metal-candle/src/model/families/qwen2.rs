//! Qwen 2 and 2.5: Llama with biases on query, key and value.

use super::{Architecture, llama};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::{Config, Defaults, Window};

pub(super) static FAMILY: Architecture = Architecture {
    name: "Qwen 2",
    model_type: "qwen2",
    class_name: "Qwen2ForCausalLM",
    with_images: None,
    read,
};

/// Those of `Qwen2Config`.
pub(super) const DEFAULTS: Defaults = Defaults {
    vocab_size: 151_936,
    intermediate_size: 22016,
    kv_heads: Some(32),
    max_position_embeddings: 32768,
    ..llama::DEFAULTS
};

fn read(keys: Keys) -> Result<Config> {
    let mut config = Config::common(keys, &FAMILY, &DEFAULTS)?;
    set_windows(&mut config, keys)?;
    config.attention_bias = true;
    Ok(config)
}

/// The layers from `max_window_layers` on have a window where `use_sliding_window` is true.
pub(super) fn set_windows(config: &mut Config, keys: Keys) -> Result<()> {
    let window = Window::read_switched(keys, Some(4096))?;
    let first = keys.count("max_window_layers", 28)?;
    config.set_windows(keys, window, |layer| window.size.is_some() && layer >= first)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        Expected, LLAMA, assert_defaults, assert_invalid, assert_unsupported, fixture, parse_with,
        windows_of,
    };

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let expected = Expected {
            vocab_size: 151_936,
            intermediate_size: 22016,
            max_position_embeddings: 32768,
            biases: true,
            ..LLAMA
        };
        assert_defaults("qwen2", expected);
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("qwen2");
        assert!(config.attention_bias && !config.attention_output_bias);
        assert_eq!(windows_of(&config), [None; 3]);
    }

    #[test]
    fn the_last_layers_have_a_window_where_it_is_switched_on() {
        let some = Some(16);
        let switched = |on: bool| {
            json!({ "num_hidden_layers": 4, "use_sliding_window": on, "sliding_window": 16,
                    "max_window_layers": 3 })
        };
        for model_type in ["qwen2", "qwen3"] {
            let windows = |extra| windows_of(&parse_with(model_type, extra).unwrap());
            assert_eq!(windows(switched(true)), [None, None, None, some]);
            assert_eq!(windows(switched(false)), [None; 4]);
            let kinds =
                ["sliding_attention", "full_attention", "sliding_attention", "full_attention"];
            let mut listed = switched(true);
            listed["layer_types"] = json!(kinds);
            assert_eq!(windows(listed), [some, None, some, None]);
            let mut off = switched(false);
            off["layer_types"] = json!(kinds);
            assert_invalid(
                model_type,
                [(off, "layer 0 has sliding_attention, but use_sliding_window is false")],
            );
        }
        assert_invalid("qwen2", [(json!({ "layer_types": [] }), "layer_types: has 0 entries")]);
        let other = json!({ "num_hidden_layers": 1, "layer_types": ["linear_attention"] });
        assert_unsupported("qwen2", [(other, "linear_attention")]);
    }
}
