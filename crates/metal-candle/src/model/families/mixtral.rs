//! Mixtral: Mistral whose layers have a mixture of experts in the place of an MLP.

use super::{Architecture, mistral};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::{Config, Defaults, ExpertNames, ExpertsConfig, StackedExperts, Window};

pub(super) static FAMILY: Architecture = Architecture {
    name: "Mixtral",
    model_type: "mixtral",
    class_name: "MixtralForCausalLM",
    with_images: None,
    read,
};

static NAMES: ExpertNames = ExpertNames {
    module: "block_sparse_moe",
    router: "gate",
    projections: ["w1", "w3", "w2"],
    stacked: StackedExperts { mlx: "switch_mlp", interleaved: false },
};

fn read(keys: Keys) -> Result<Config> {
    let defaults = Defaults { rms_norm_eps: 1e-5, rope_theta: 1e6, ..mistral::DEFAULTS };
    let mut config = Config::common(keys, &FAMILY, &defaults)?;
    let window = Window::read(keys, None)?;
    config.set_window(keys, window.size)?;
    let width = ("intermediate_size", config.intermediate_size);
    let experts = ExpertsConfig::read(keys, 8, 2, width, &NAMES)?;
    config.experts = Some(experts);
    for layer in &mut config.layers {
        layer.has_experts = true;
    }
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
        let config = assert_defaults(
            "mixtral",
            Expected {
                intermediate_size: 14336,
                kv_heads: 8,
                max_position_embeddings: 131_072,
                rms_norm_eps: 1e-5,
                thetas: &[1e6],
                ..LLAMA
            },
        );
        let experts = config.experts.unwrap();
        assert_eq!((experts.count, experts.active, experts.width), (8, 2, 14336));
        assert!(experts.normalized);
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("mixtral");
        let experts = config.experts.unwrap();
        assert_eq!((experts.count, experts.active, experts.width), (4, 2, 48));
        assert!(config.layers.iter().all(|layer| layer.has_experts));
    }

    #[test]
    fn all_layers_have_the_window() {
        let windowed = json!({ "num_hidden_layers": 2, "sliding_window": 16 });
        assert_eq!(windows_of(&parse_with("mixtral", windowed).unwrap()), [Some(16); 2]);
        assert_invalid("mixtral", [(json!({ "num_local_experts": 1 }), "found 2, more than")]);
    }
}
