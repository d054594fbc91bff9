//! OLMo 2: norms after the attention and the MLP instead of before.

use super::{Architecture, llama};
use crate::Result;
use crate::model::config::keys::Keys;
use crate::model::config::{Config, Defaults, NormPlacement, QueryKeyNorm};

pub(super) static FAMILY: Architecture = Architecture {
    name: "OLMo 2",
    model_type: "olmo2",
    class_name: "Olmo2ForCausalLM",
    with_images: None,
    read,
};

fn read(keys: Keys) -> Result<Config> {
    let defaults = Defaults { vocab_size: 50304, rms_norm_eps: 1e-5, ..llama::DEFAULTS };
    let mut config = Config::common(keys, &FAMILY, &defaults)?;
    config.set_window(keys, None)?;
    config.norm_placement = NormPlacement::Post;
    config.query_key_norm = QueryKeyNorm::FullWidth;
    config.read_attention_bias(keys)?;
    Ok(config)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{Expected, LLAMA, assert_defaults, fixture};
    use crate::model::config::{NormPlacement, QueryKeyNorm};

    #[test]
    fn missing_keys_have_the_defaults_of_transformers() {
        assert_defaults("olmo2", Expected { vocab_size: 50304, rms_norm_eps: 1e-5, ..LLAMA });
    }

    #[test]
    fn what_fixtures_say_is_read() {
        let config = fixture("olmo2");
        assert_eq!(config.norm_placement, NormPlacement::Post);
        assert_eq!(config.query_key_norm, QueryKeyNorm::FullWidth);
    }
}
