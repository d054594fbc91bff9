//! Qwen 3: normalised queries and keys.

use super::{Architecture, qwen2};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::{Config, Defaults, QueryKeyNorm};

pub(super) static FAMILY: Architecture = Architecture {
    name: "Qwen 3",
    model_type: "qwen3",
    class_name: "Qwen3ForCausalLM",
    with_images: None,
    read,
};

fn read(keys: Keys) -> Result<Config> {
    let defaults = Defaults { head_dim: Some(128), ..qwen2::DEFAULTS };
    let mut config = Config::common(keys, &FAMILY, &defaults)?;
    qwen2::set_windows(&mut config, keys)?;
    config.query_key_norm = QueryKeyNorm::PerHead;
    config.read_attention_bias(keys)?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Expected, LLAMA, assert_defaults, fixture};
    use crate::model::config::QueryKeyNorm;

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        let expected = Expected {
            vocab_size: 151_936,
            intermediate_size: 22016,
            max_position_embeddings: 32768,
            ..LLAMA
        };
        assert_defaults("qwen3", expected);
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("qwen3");
        assert_eq!((config.query_key_norm, config.head_dim), (QueryKeyNorm::PerHead, 12));
    }
}
