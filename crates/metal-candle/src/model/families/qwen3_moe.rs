//! Qwen 3 with experts: Qwen 3 whose layers have a mixture of experts in the place of an MLP, all or some of them.

use serde_json::Value;

use super::{Architecture, qwen2};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::{
    Config, Defaults, ExpertNames, ExpertsConfig, MAX_LAYERS, QueryKeyNorm, StackedExperts, Window,
};

pub(super) static FAMILY: Architecture = Architecture {
    name: "Qwen 3 MoE",
    model_type: "qwen3_moe",
    class_name: "Qwen3MoeForCausalLM",
    with_images: None,
    read,
};

static NAMES: ExpertNames = ExpertNames {
    module: "mlp",
    router: "gate",
    projections: ["gate_proj", "up_proj", "down_proj"],
    stacked: StackedExperts { mlx: "switch_mlp", interleaved: false },
};

fn read(keys: Keys) -> Result<Config> {
    let defaults = Defaults {
        hidden_size: 2048,
        intermediate_size: 6144,
        layers: 24,
        kv_heads: Some(4),
        rope_theta: 10_000.0,
        ..qwen2::DEFAULTS
    };
    let mut config = Config::common(keys, &FAMILY, &defaults)?;
    let window = Window::read_switched(keys, Some(4096))?;
    config.set_window(keys, window.size)?;
    config.query_key_norm = QueryKeyNorm::PerHead;
    config.read_attention_bias(keys)?;
    let width = ("moe_intermediate_size", 768);
    let mut experts = ExpertsConfig::read(keys, 128, 8, width, &NAMES)?;
    experts.normalized = keys.flag("norm_topk_prob", false)?;
    config.experts = Some(experts);
    let step = keys.size("decoder_sparse_step", 1, MAX_LAYERS)?;
    let dense = dense_layers(keys)?;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        layer.has_experts = (index + 1).is_multiple_of(step) && !dense.contains(&(index as u64));
    }
    Ok(config)
}

/// The layers with an MLP, by `mlp_only_layers`.
fn dense_layers(keys: Keys) -> Result<Vec<u64>> {
    const KEY: &str = "mlp_only_layers";
    let found = match keys.get(KEY) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(found) => found,
    };
    let numbers = found.as_array().and_then(|list| list.iter().map(Value::as_u64).collect());
    numbers.ok_or_else(|| keys.unexpected(KEY, "a list of layers' numbers", found))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{
        Expected, LLAMA, assert_defaults, assert_invalid, fixture, parse_with, windows_of,
    };
    use crate::model::config::QueryKeyNorm;

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let config = assert_defaults(
            "qwen3_moe",
            Expected {
                vocab_size: 151_936,
                hidden_size: 2048,
                intermediate_size: 6144,
                layers: 24,
                kv_heads: 4,
                head_dim: 64,
                max_position_embeddings: 32768,
                ..LLAMA
            },
        );
        let experts = config.experts.unwrap();
        assert_eq!((experts.count, experts.active, experts.width), (128, 8, 768));
        assert!(!experts.normalized);
        assert!(config.layers.iter().all(|layer| layer.has_experts));
        assert_eq!(config.mlp_columns(), 8 * 768);
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("qwen3-moe");
        assert_eq!((config.query_key_norm, config.head_dim), (QueryKeyNorm::PerHead, 12));
        let experts = config.experts.unwrap();
        assert_eq!((experts.count, experts.active, experts.width), (6, 2, 20));
        assert!(experts.normalized);
        let has_experts: Vec<bool> = config.layers.iter().map(|it| it.has_experts).collect();
        assert_eq!(has_experts, [true, false, true]);
        assert_eq!(config.mlp_columns(), 48);
    }

    #[test]
    fn which_layers_have_experts_and_windows_is_said() {
        let said = json!({ "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3, 9],
            "use_sliding_window": true, "max_window_layers": 3 });
        let config = parse_with("qwen3_moe", said).unwrap();
        let has_experts: Vec<bool> = config.layers.iter().map(|it| it.has_experts).collect();
        assert_eq!(has_experts, [false, true, false, false, false]);
        assert_eq!(windows_of(&config), [Some(4096); 5]);
        let both = json!({ "num_experts": 5, "num_local_experts": 9 });
        assert_eq!(parse_with("qwen3_moe", both).unwrap().experts.unwrap().count, 9);
        assert_invalid(
            "qwen3_moe",
            [
                (json!({ "num_experts": 4 }), "found 8, more than num_experts = 4"),
                (json!({ "num_local_experts": 4 }), "more than num_local_experts = 4"),
                (json!({ "num_experts_per_tok": 0 }), "num_experts_per_tok"),
                (json!({ "num_experts": 1u64 << 40 }), "num_experts"),
                (json!({ "decoder_sparse_step": 0 }), "decoder_sparse_step"),
                (json!({ "mlp_only_layers": ["0"] }), "mlp_only_layers: expected a list of"),
                (json!({ "norm_topk_prob": 1 }), "norm_topk_prob"),
            ],
        );
    }
}
