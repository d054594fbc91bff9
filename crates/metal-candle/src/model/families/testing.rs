//! What the tests of families share.

use std::path::Path;

use serde_json::{Value, json};

use crate::model::Config;
use crate::model::config::LayerConfig;
use crate::{Error, Result};

/// Every model of the fixtures: its name, and its configuration in both formats.
pub fn fixtures() -> Vec<(String, [Config; 2])> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models");
    let names = std::fs::read_dir(folder).unwrap();
    names
        .map(|entry| {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let configs = ["config.json", "config_v4.json"].map(|file| read(&name, file));
            (name, configs)
        })
        .collect()
}

/// The configuration of a fixture.
pub fn fixture(name: &str) -> Config {
    read(name, "config.json")
}

fn read(name: &str, file: &str) -> Config {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/models").join(name);
    let text = std::fs::read_to_string(folder.join(file)).unwrap();
    let config = Config::from_json(&text).unwrap_or_else(|e| panic!("{name}/{file}: {e}"));
    assert_eq!(config.raw, serde_json::from_str::<Value>(&text).unwrap());
    config
}

pub fn parse(value: Value) -> Result<Config> {
    Config::from_json(&value.to_string())
}

/// `extra` in a file of `model_type` that has nothing else.
pub fn parse_with(model_type: &str, extra: Value) -> Result<Config> {
    let mut value = json!({ "model_type": model_type });
    value.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    parse(value)
}

/// Asserts that each of `extras` asks for what is not supported, in words that hold its second part.
pub fn assert_unsupported<const N: usize>(model_type: &str, extras: [(Value, &str); N]) {
    for (extra, expected) in extras {
        let error = parse_with(model_type, extra).unwrap_err();
        assert!(matches!(error, Error::Unsupported(_)), "{error}");
        assert!(error.to_string().contains(expected), "{error} lacks {expected}");
    }
}

/// Asserts that each of `extras` is a mistake in the file, which is told in words that hold its second part.
pub fn assert_invalid<const N: usize>(model_type: &str, extras: [(Value, &str); N]) {
    for (extra, expected) in extras {
        let error = parse_with(model_type, extra).unwrap_err();
        assert!(matches!(error, Error::File { .. }), "{error}");
        let text = error.to_string();
        assert!(text.starts_with("config.json: "), "{text}");
        assert!(text.contains(expected), "{text} lacks {expected}");
    }
}

pub fn windows_of(config: &Config) -> Vec<Option<usize>> {
    config.layers.iter().map(|layer| layer.window).collect()
}

pub fn ropes_of(config: &Config) -> Vec<Option<usize>> {
    config.layers.iter().map(|layer| layer.rope).collect()
}

/// What a configuration class of transformers 5.23 holds when it is made without arguments.
#[derive(Clone, Copy)]
pub struct Expected {
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub intermediate_size: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub max_position_embeddings: usize,
    pub rms_norm_eps: f64,
    pub thetas: &'static [f64],
    /// Layers with a window of 4096.
    pub windowed: usize,
    /// Layers that do not rotate.
    pub unrotated: usize,
    pub tied: bool,
    /// Biases on query, key and value.
    pub biases: bool,
}

/// Those of `LlamaConfig`.
pub const LLAMA: Expected = Expected {
    vocab_size: 32000,
    hidden_size: 4096,
    intermediate_size: 11008,
    layers: 32,
    heads: 32,
    kv_heads: 32,
    head_dim: 128,
    max_position_embeddings: 2048,
    rms_norm_eps: 1e-6,
    thetas: &[1e4],
    windowed: 0,
    unrotated: 0,
    tied: false,
    biases: false,
};

/// Asserts the defaults of a family, and returns its configuration made of them alone.
pub fn assert_defaults(model_type: &str, expected: Expected) -> Config {
    let config = parse(json!({ "model_type": model_type })).unwrap();
    assert_eq!(config.vocab_size, expected.vocab_size);
    assert_eq!(config.hidden_size, expected.hidden_size);
    assert_eq!(config.intermediate_size, expected.intermediate_size);
    assert_eq!(config.layers.len(), expected.layers);
    assert_eq!(config.heads, expected.heads);
    assert_eq!(config.kv_heads, expected.kv_heads);
    assert_eq!(config.head_dim, expected.head_dim);
    assert_eq!(config.max_position_embeddings, expected.max_position_embeddings);
    assert_eq!(config.rms_norm_eps, expected.rms_norm_eps);
    assert_eq!(config.tie_word_embeddings, expected.tied);
    let thetas: Vec<f64> = config.ropes.iter().map(|rope| rope.theta).collect();
    assert_eq!(thetas, expected.thetas);
    let windowed = config.layers.iter().filter_map(|layer| layer.window);
    assert!(windowed.clone().all(|window| window == 4096));
    assert_eq!(windowed.count(), expected.windowed);
    let unrotated = |layer: &&LayerConfig| layer.rope.is_none();
    assert_eq!(config.layers.iter().filter(unrotated).count(), expected.unrotated);
    assert_eq!(config.attention_bias, expected.biases);
    assert!(!config.attention_output_bias && !config.mlp_bias);
    assert_eq!(config.dtype, None);
    config
}
