//! SmolLM 3: every fourth layer without positions.

use serde_json::Value;

use super::{Architecture, llama};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::{Config, Defaults, MAX_LAYERS, Window};

pub(super) static FAMILY: Architecture = Architecture {
    name: "SmolLM 3",
    model_type: "smollm3",
    class_name: "SmolLM3ForCausalLM",
    with_images: None,
    read,
};

fn read(keys: Keys) -> Result<Config> {
    let defaults = Defaults {
        vocab_size: 128_256,
        hidden_size: 2048,
        layers: 36,
        heads: 16,
        kv_heads: Some(4),
        max_position_embeddings: 32768,
        rope_theta: 2e6,
        tie_word_embeddings: true,
        ..llama::DEFAULTS
    };
    let mut config = Config::common(keys, &FAMILY, &defaults)?;
    let rotated = rotated_layers(keys, config.layers.len())?;
    for (layer, rotated) in config.layers.iter_mut().zip(&rotated) {
        layer.rope = rotated.then_some(0);
    }
    let window = Window::read_switched(keys, None)?;
    config.set_windows(keys, window, |layer| window.size.is_some() && !rotated[layer])?;
    config.read_attention_bias(keys)?;
    config.mlp_bias = keys.flag("mlp_bias", false)?;
    Ok(config)
}

/// Which layers rotate their queries and keys.
fn rotated_layers(keys: Keys, layers: usize) -> Result<Vec<bool>> {
    match keys.get("no_rope_layers") {
        None | Some(Value::Null) => {
            let interval = keys.size("no_rope_layer_interval", 4, MAX_LAYERS)?;
            Ok((0..layers).map(|layer| !(layer + 1).is_multiple_of(interval)).collect())
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

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        Expected, LLAMA, assert_defaults, assert_invalid, fixture, parse_with, ropes_of, windows_of,
    };

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let expected = Expected {
            vocab_size: 128_256,
            hidden_size: 2048,
            layers: 36,
            heads: 16,
            kv_heads: 4,
            max_position_embeddings: 32768,
            thetas: &[2e6],
            unrotated: 9,
            tied: true,
            ..LLAMA
        };
        assert_defaults("smollm3", expected);
    }

    #[test]
    fn layers_without_positions_are_read() {
        assert_eq!(ropes_of(&fixture("smollm3")), [Some(0), Some(0), None, Some(0)]);
        let extras = [
            (json!({ "no_rope_layers": [1, 0] }), "no_rope_layers: has 2 entries"),
            (json!({ "no_rope_layer_interval": 0 }), "no_rope_layer_interval"),
        ];
        assert_invalid("smollm3", extras);
    }

    #[test]
    fn layers_without_positions_have_the_window() {
        let extra = json!({ "num_hidden_layers": 4, "use_sliding_window": true,
            "sliding_window": 16, "no_rope_layer_interval": 2 });
        let windows = windows_of(&parse_with("smollm3", extra).unwrap());
        assert_eq!(windows, [None, Some(16), None, Some(16)]);
    }
}
