//! Gemma 3, text only: normalised queries and keys, one layer in six global, a rope for either kind.

use serde_json::{Map, Value};

use super::{Architecture, gemma2};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::ropes::{RopeRules, RopeShape, rotary_dim, scaling};
use crate::model::config::{Config, Defaults, MAX_LAYERS, MAX_POSITIONS, QueryKeyNorm, Window};
use crate::model::rope::RopeConfig;

pub(super) static FAMILY: Architecture = Architecture {
    name: "Gemma 3",
    model_type: "gemma3_text",
    class_name: "Gemma3ForCausalLM",
    with_images: Some(("gemma3", "Gemma3ForConditionalGeneration")),
    read,
};

fn read(keys: Keys) -> Result<Config> {
    let defaults = Defaults {
        vocab_size: 262_208,
        max_position_embeddings: 131_072,
        rope_theta: 1e6,
        ropes,
        ..gemma2::DEFAULTS
    };
    keys.refuse("attn_logit_softcapping", "Gemma 3's attention has no soft cap")?;
    let mut config = gemma2::read_gemma(keys, &FAMILY, &defaults)?;
    config.query_key_norm = QueryKeyNorm::PerHead;
    config.final_softcap = keys.optional_positive("final_logit_softcapping", None)?;
    let pattern = keys.size("sliding_window_pattern", 6, MAX_LAYERS)?;
    let window = Window::read(keys, Some(4096))?;
    config.set_windows(keys, window, |layer| !(layer + 1).is_multiple_of(pattern))?;
    for layer in &mut config.layers {
        layer.rope = Some(usize::from(layer.window.is_some()));
    }
    Ok(config)
}

/// The ropes of the global and of the local layers, in this order.
fn ropes(keys: Keys, shape: RopeShape) -> Result<Vec<RopeConfig>> {
    let empty = Map::new();
    let nested = keys.object("rope_parameters")?.unwrap_or(&empty);
    let nested = keys.of("rope_parameters.", nested);
    if let Some(key) = nested
        .map
        .keys()
        .find(|key| !["full_attention", "sliding_attention"].contains(&key.as_str()))
    {
        return Err(nested.invalid(
            key,
            "unexpected; for gemma3_text, full_attention and sliding_attention were expected",
        ));
    }
    let global = [
        ("rope_scaling.", keys.object("rope_scaling")?),
        ("rope_parameters.full_attention.", nested.object("full_attention")?),
    ];
    let local = [("rope_parameters.sliding_attention.", nested.object("sliding_attention")?)];
    Ok(vec![
        rope(keys, &global, ("rope_theta", shape.theta), shape)?,
        rope(keys, &local, ("rope_local_base_freq", 1e4), shape)?,
    ])
}

/// A rope whose dictionary is the first of `sources`, over the others key by key, as in transformers 5.
fn rope(
    keys: Keys,
    sources: &[(&str, Option<&Map<String, Value>>)],
    (old_key, theta): (&str, f64),
    shape: RopeShape,
) -> Result<RopeConfig> {
    let mut map = Map::new();
    for source in sources.iter().rev().filter_map(|(_, source)| *source) {
        map.extend(source.iter().map(|(key, value)| (key.clone(), value.clone())));
    }
    let place = sources.iter().find(|(_, source)| source.is_some());
    let place = place.or(sources.last()).map_or("", |(place, _)| place);
    let dictionary = keys.of(place, &map);
    let theta = match dictionary.get("rope_theta") {
        Some(_) => dictionary.positive("rope_theta", theta)?,
        None => keys.positive(old_key, theta)?,
    };
    let rules = &RopeRules::COMMON;
    let rotary_dim = rotary_dim(dictionary, shape, rules)?;
    let original = "original_max_position_embeddings";
    let original = dictionary.size(original, shape.max_position_embeddings, MAX_POSITIONS)?;
    let scaling = scaling(dictionary, rules, (theta, rotary_dim), shape, original)?;
    Ok(RopeConfig { theta, rotary_dim, scaling, query_scaling: None })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        Expected, LLAMA, assert_defaults, assert_invalid, assert_unsupported, fixture, parse_with,
        ropes_of, windows_of,
    };
    use crate::model::config::QueryKeyNorm;
    use crate::model::rope::{RopeConfig, RopeScaling};

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let expected = Expected {
            vocab_size: 262_208,
            hidden_size: 2304,
            intermediate_size: 9216,
            layers: 26,
            heads: 8,
            kv_heads: 4,
            head_dim: 256,
            max_position_embeddings: 131_072,
            thetas: &[1e6, 1e4],
            windowed: 22,
            tied: true,
            ..LLAMA
        };
        assert_defaults("gemma3_text", expected);
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("gemma3-text");
        assert_eq!(windows_of(&config), [Some(6), Some(6), None, Some(6)]);
        assert_eq!(ropes_of(&config), [Some(1), Some(1), Some(0), Some(1)]);
        let rope =
            |theta, scaling| RopeConfig { theta, rotary_dim: 12, scaling, query_scaling: None };
        assert_eq!(
            config.ropes,
            [rope(1e6, RopeScaling::Linear { factor: 8.0 }), rope(1e3, RopeScaling::Default)]
        );
        assert_eq!(
            (config.query_key_norm, config.attention_softcap),
            (QueryKeyNorm::PerHead, None)
        );
    }

    #[test]
    fn one_layer_in_six_is_global() {
        let extra = json!({ "num_hidden_layers": 7, "sliding_window": 16 });
        let some = Some(16);
        let windows = windows_of(&parse_with("gemma3_text", extra).unwrap());
        assert_eq!(windows, [some, some, some, some, some, None, some]);
    }

    #[test]
    fn only_the_global_rope_is_scaled_by_the_old_key() {
        // Gemma 3 4B's text part as the hub has it.
        let extra = json!({ "rope_scaling": { "factor": 8.0, "rope_type": "linear" } });
        let ropes = parse_with("gemma3_text", extra).unwrap().ropes;
        assert_eq!(ropes[0].scaling, RopeScaling::Linear { factor: 8.0 });
        assert_eq!(ropes[1].scaling, RopeScaling::Default);
        let flat = json!({ "rope_parameters": { "rope_theta": 1e4 } });
        assert_invalid("gemma3_text", [(flat, "rope_theta: unexpected")]);
    }

    #[test]
    fn what_is_not_supported_is_named_with_its_value() {
        let extras = [
            (json!({ "use_bidirectional_attention": true }), "use_bidirectional_attention = true"),
            (json!({ "attn_logit_softcapping": 50.0 }), "attn_logit_softcapping = 50.0"),
            (
                json!({ "rope_parameters": { "full_attention": { "partial_rotary_factor": 0.5 } } }),
                "rope_parameters.full_attention.partial_rotary_factor = 0.5",
            ),
        ];
        assert_unsupported("gemma3_text", extras);
    }
}
