//! Granite 3: multipliers on embeddings, residuals, attention and logits.

use super::{Architecture, llama};
use crate::Result;
use crate::model::config::Config;
use crate::model::config::keys::Keys;

pub(super) static FAMILY: Architecture = Architecture {
    name: "Granite",
    model_type: "granite",
    class_name: "GraniteForCausalLM",
    with_images: None,
    read,
};

fn read(keys: Keys) -> Result<Config> {
    let mut config = Config::common(keys, &FAMILY, &llama::DEFAULTS)?;
    config.set_window(keys, None)?;
    config.read_attention_bias(keys)?;
    config.mlp_bias = keys.flag("mlp_bias", false)?;
    config.attention_scale = keys.positive("attention_multiplier", 1.0)?;
    config.embedding_scale = keys.positive("embedding_multiplier", 1.0)?;
    config.residual_multiplier = keys.positive("residual_multiplier", 1.0)?;
    config.logits_scale = 1.0 / keys.positive("logits_scaling", 1.0)?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::testing::{LLAMA, assert_defaults, assert_invalid, fixture};

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let config = assert_defaults("granite", LLAMA);
        assert_eq!((config.attention_scale, config.embedding_scale), (1.0, 1.0));
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("granite");
        assert_eq!((config.attention_scale, config.embedding_scale), (0.21, 2.5));
        assert_eq!((config.residual_multiplier, config.logits_scale), (0.7, 1.0 / 3.0));
        assert_invalid("granite", [(json!({ "logits_scaling": 0 }), "logits_scaling")]);
    }
}
