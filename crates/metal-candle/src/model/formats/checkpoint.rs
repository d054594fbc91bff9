//! Which format the linear layers of a checkpoint have, by its `config.json`.

use super::{Parsed, awq, bitsandbytes, fp8, gptq, mlx};
use crate::files::cut;
use crate::model::weights::Weights;
use crate::{Error, Result};
use metal_candle_kernels::quantized::Quantized;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The keys of `config.json` that say so, in which MLX's comes before what it took the place of.
pub(crate) const KEYS: [&str; 3] = ["quantization", "quantization_config", "compression_config"];

/// How the matrices of a checkpoint are stored. In each some may be dense.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Checkpoint {
    Dense,
    Bitsandbytes,
    /// Of all layers, and of some by their paths.
    Mlx {
        mode: mlx::Mode,
        layers: BTreeMap<String, mlx::Mode>,
    },
    /// e4m3 or integers, with scales for blocks of rows and columns, for rows, or for all.
    Bytes {
        block: Option<(usize, usize)>,
    },
    Gptq(gptq::Config),
    /// The elements of a group, or a row.
    Awq(Option<usize>),
    /// Of experts alone, as gpt-oss has them: see [`experts`](super::experts).
    Mxfp4,
}

/// What MLX says of all layers or one.
#[derive(Deserialize)]
struct MlxMode {
    group_size: Option<usize>,
    bits: Option<usize>,
    #[serde(default)]
    mode: Option<String>,
}

impl MlxMode {
    fn mode(self) -> Parsed<mlx::Mode> {
        match self.mode.as_deref().unwrap_or("affine") {
            "affine" => Ok(mlx::Mode::Affine {
                bits: self.bits.unwrap_or(4),
                group: self.group_size.unwrap_or(64),
            }),
            "mxfp4" => Ok(mlx::Mode::Mxfp4),
            "mxfp8" => Ok(mlx::Mode::Mxfp8),
            "nvfp4" => Ok(mlx::Mode::Nvfp4),
            other => Err(format!(
                "mode is {:?}; affine, mxfp4, mxfp8 and nvfp4 are supported",
                cut(other)
            )),
        }
    }
}

#[derive(Deserialize)]
struct Int4 {
    bits: usize,
    group_size: i64,
    #[serde(default)]
    checkpoint_format: Option<String>,
    /// What newer programs call it.
    #[serde(default)]
    format: Option<String>,
    #[serde(default)]
    version: Option<String>,
}

impl Int4 {
    /// Of GPTQ, whether zero points are stored less 1.
    fn zeros_less_one(&self) -> Parsed<bool> {
        match self.checkpoint_format.as_ref().or(self.format.as_ref()).map(String::as_str) {
            None | Some("gptq") => Ok(true),
            Some("gptq_v2") => Ok(false),
            Some(other) => {
                Err(format!("format is {:?}; gptq and gptq_v2 are supported", cut(other)))
            }
        }
    }

    fn group(&self) -> Parsed<Option<usize>> {
        match self.group_size {
            -1 => Ok(None),
            size => match usize::try_from(size) {
                Ok(size) if size > 0 => Ok(Some(size)),
                _ => Err(format!("group_size is {size}, expected -1 or a number from 1")),
            },
        }
    }
}

impl Checkpoint {
    /// What a `config.json` says.
    ///
    /// # Errors
    /// The key and what is wrong with it, for what is malformed or not supported.
    pub(crate) fn of(config: &Value) -> Parsed<Self> {
        let said = |key| config.get(key).filter(|settings| !settings.is_null());
        let Some((key, settings)) = KEYS.iter().find_map(|key| Some((key, said(key)?))) else {
            return Ok(Self::Dense);
        };
        let Value::Object(map) = settings else {
            return Err(format!("{key}: expected an object, found {}", cut(&settings.to_string())));
        };
        let method = map.get("quant_method").and_then(Value::as_str);
        let checkpoint = match method {
            None => Self::mlx(map),
            Some("bitsandbytes") => match flag(map, "load_in_8bit") {
                true => Err("load_in_8bit; of bitsandbytes 4 bits are supported".into()),
                false => Ok(Self::Bitsandbytes),
            },
            Some("fp8" | "compressed-tensors") => Self::bytes(map),
            Some("gptq") => parse(settings).and_then(|it: Int4| {
                Ok(Self::Gptq(gptq::Config {
                    bits: it.bits,
                    group: it.group()?,
                    zeros_less_one: it.zeros_less_one()?,
                }))
            }),
            Some("awq") => parse(settings).and_then(|it: Int4| {
                if it.bits != 4 {
                    return Err(format!("bits is {}, expected 4", it.bits));
                }
                match it.version.as_deref().unwrap_or("gemm").to_lowercase().as_str() {
                    "gemm" => Ok(Self::Awq(it.group()?)),
                    other => Err(format!("version is {:?}; gemm is supported", cut(other))),
                }
            }),
            Some("mxfp4") => Ok(Self::Mxfp4),
            Some(other) => Err(format!(
                "quant_method is {:?}; bitsandbytes (4 bits), MLX's, fp8, compressed-tensors (8 bits), gptq, awq \
                 and mxfp4 are supported",
                cut(other)
            )),
        };
        checkpoint.map_err(|problem| format!("{key}: {problem}"))
    }

    fn mlx(map: &Map<String, Value>) -> Parsed<Self> {
        let mode = parse::<MlxMode>(&Value::Object(map.clone()))?.mode()?;
        let mut layers = BTreeMap::new();
        for (path, value) in map {
            if let Value::Object(_) = value {
                let mode = parse::<MlxMode>(value).and_then(MlxMode::mode);
                let mode = mode.map_err(|problem| format!("{}: {problem}", cut(path)))?;
                layers.insert(path.clone(), mode);
            }
        }
        Ok(Self::Mlx { mode, layers })
    }

    fn bytes(map: &Map<String, Value>) -> Parsed<Self> {
        let formats = ["float-quantized", "int-quantized", "naive-quantized"];
        if let Some(format) = map.get("format").and_then(Value::as_str)
            && !formats.contains(&format)
        {
            return Err(format!(
                "format is {:?}; {} are supported",
                cut(format),
                formats.join(", ")
            ));
        }
        let block = match map.get("weight_block_size") {
            None | Some(Value::Null) => Self::block_of_groups(map)?,
            Some(value) => Some(parse::<(usize, usize)>(value)?),
        };
        Ok(Self::Bytes { block })
    }

    /// The rows and columns that share a scale, by compressed-tensors' groups of layers.
    fn block_of_groups(map: &Map<String, Value>) -> Parsed<Option<(usize, usize)>> {
        let groups = map.get("config_groups").and_then(Value::as_object);
        let mut blocks = groups.into_iter().flatten().map(|(name, group)| {
            let weights = group.get("weights").unwrap_or(&Value::Null);
            let key = |key: &str| weights.get(key).unwrap_or(&Value::Null);
            let block = match key("strategy").as_str() {
                None | Some("tensor" | "channel") => Ok(None),
                Some("group") => parse(key("group_size")).map(|columns| Some((1, columns))),
                Some("block") => parse(key("block_structure")).map(Some),
                Some(other) => Err(format!(
                    "strategy is {:?}; tensor, channel, group and block are supported",
                    cut(other)
                )),
            };
            block.map_err(|problem| format!("config_groups: {}: {problem}", cut(name)))
        });
        let first = blocks.next().transpose()?.flatten();
        for block in blocks {
            if block? != first {
                return Err("config_groups: layers differ in what shares a scale; one way for all is supported".into());
            }
        }
        Ok(first)
    }

    /// Whether the weights have a matrix of this name, in whatever parts.
    pub(crate) fn has(&self, weights: &Weights, name: &str) -> bool {
        let packed = || Some(format!("{}.qweight", name.strip_suffix(".weight")?));
        weights.contains(name) || packed().is_some_and(|name| weights.contains(&name))
    }

    /// Bytes of the parts of a layer's matrix, which are read; `None` where it is stored dense.
    pub(crate) fn size_in_bytes(&self, weights: &Weights, name: &str) -> Option<usize> {
        let path = name.strip_suffix(".weight").filter(|_| *self != Self::Dense)?;
        let scales = ["scales", "weight_scale", "weight_scale_inv", "weight.absmax"];
        if !scales.iter().any(|part| weights.contains(&format!("{path}.{part}"))) {
            return None;
        }
        let (start, bias) = (format!("{path}."), format!("{path}.bias"));
        let parts = weights.names().filter(|name| name.starts_with(&start) && *name != bias);
        Some(parts.filter_map(|name| Some(weights.stored(name).ok()?.bytes.len())).sum())
    }

    /// The matrix of a layer; `None` where it is stored dense.
    ///
    /// # Errors
    /// [`Error::File`] when its parts don't fit together, it has another shape, or numbers that aren't finite.
    pub(crate) fn matrix(
        &self,
        weights: &Weights,
        name: &str,
        shape: (usize, usize),
    ) -> Result<Option<Quantized>> {
        let Some(path) = name.strip_suffix(".weight") else { return Ok(None) };
        let full = |part: &str| format!("{path}.{part}");
        let has = |part: &str| weights.contains(&full(part));
        let part = |part: &str| has(part).then(|| weights.stored(&full(part)).ok()).flatten();
        let matrix = match self {
            Self::Bitsandbytes if bitsandbytes::is_one(has) => bitsandbytes::read(part),
            Self::Mlx { mode, layers } if has("scales") => {
                mlx::read(*layers.get(path).unwrap_or(mode), part)
            }
            Self::Bytes { block } if has("weight_scale") || has("weight_scale_inv") => {
                // What activations are multiplied by where a program quantises them, too: compressed-tensors' name, and
                // transformers'.
                for scale in ["input_scale", "activation_scale"] {
                    let _ = part(scale);
                }
                fp8::read(*block, part)
            }
            Self::Gptq(config) if has("qweight") => gptq::read(*config, part),
            Self::Awq(group) if has("qweight") => awq::read(*group, part),
            _ => return Ok(None),
        };
        let fault = |problem: String| {
            Error::file(weights.place_of(&full("weight")), format!("layer {path:?}: {problem}"))
        };
        let matrix = matrix.map_err(fault)?;
        if matrix.shape() != shape {
            return Err(fault(format!(
                "has a matrix of {:?}; config.json asks for {shape:?}",
                matrix.shape()
            )));
        }
        if !matrix.is_finite()? {
            return Err(fault("has scales or codes that are NaN or infinite".into()));
        }
        weights.release_all_of(&full(""));
        Ok(Some(matrix))
    }
}

fn parse<T: for<'de> Deserialize<'de>>(value: &Value) -> Parsed<T> {
    T::deserialize(value).map_err(|error| error.to_string())
}

fn flag(map: &Map<String, Value>, key: &str) -> bool {
    map.get(key).and_then(Value::as_bool).unwrap_or(false)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_configuration_says_how_its_matrices_are_stored() {
        let affine = |bits, group| mlx::Mode::Affine { bits, group };
        let of = |value: Value| Checkpoint::of(&value).unwrap();
        assert_eq!(of(json!({})), Checkpoint::Dense);
        assert_eq!(of(json!({ "quantization_config": null })), Checkpoint::Dense);
        let bitsandbytes = json!({ "quant_method": "bitsandbytes", "load_in_4bit": true });
        assert_eq!(of(json!({ "quantization_config": bitsandbytes })), Checkpoint::Bitsandbytes);
        let mixed = json!({ "group_size": 64, "bits": 4, "model.layers.0.mlp.down_proj": { "group_size": 32, "bits": 6 }, "lm_head": false });
        let layers = BTreeMap::from([("model.layers.0.mlp.down_proj".to_string(), affine(6, 32))]);
        assert_eq!(
            of(json!({ "quantization": mixed })),
            Checkpoint::Mlx { mode: affine(4, 64), layers }
        );
        let blocks = json!({ "quant_method": "fp8", "weight_block_size": [128, 128] });
        assert_eq!(
            of(json!({ "quantization_config": blocks })),
            Checkpoint::Bytes { block: Some((128, 128)) }
        );
        for (strategy, block) in [
            (json!({ "strategy": "channel" }), None),
            (json!({ "strategy": "group", "group_size": 64 }), Some((1, 64))),
            (json!({ "strategy": "block", "block_structure": [128, 64] }), Some((128, 64))),
        ] {
            let groups = json!({ "group_0": { "targets": ["Linear"], "weights": strategy } });
            let settings = json!({ "quant_method": "compressed-tensors", "config_groups": groups });
            let expected = Checkpoint::Bytes { block };
            assert_eq!(of(json!({ "quantization_config": settings })), expected);
        }
        for (key, name, zeros_less_one) in [
            ("checkpoint_format", "gptq", true),
            ("checkpoint_format", "gptq_v2", false),
            ("format", "gptq_v2", false),
        ] {
            let gptq = json!({ "quant_method": "gptq", "bits": 4, "group_size": 64, key: name });
            let config = gptq::Config { bits: 4, group: Some(64), zeros_less_one };
            assert_eq!(of(json!({ "quantization_config": gptq })), Checkpoint::Gptq(config));
        }
        let both = json!({ "quantization_config": null, "quantization": { "bits": 8 } });
        assert_eq!(of(both), Checkpoint::Mlx { mode: affine(8, 64), layers: BTreeMap::new() });
        let awq = json!({ "quant_method": "awq", "bits": 4, "group_size": -1, "version": "GEMM" });
        assert_eq!(of(json!({ "quantization_config": awq })), Checkpoint::Awq(None));
    }

    #[test]
    fn the_scale_of_activations_is_part_of_a_matrix_whatever_its_name() {
        let folder = tempfile::tempdir().unwrap();
        for scale in ["input_scale", "activation_scale"] {
            let header = json!({
                "a.weight": { "dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4] },
                "a.weight_scale_inv": { "dtype": "F32", "shape": [], "data_offsets": [4, 8] },
                format!("a.{scale}"): { "dtype": "F32", "shape": [], "data_offsets": [8, 12] },
            });
            let header = header.to_string();
            let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
            bytes.extend(header.as_bytes());
            bytes.extend([0x38; 4]);
            bytes.extend([1f32, 0.5].map(f32::to_le_bytes).concat());
            let path = folder.path().join(scale);
            std::fs::write(&path, bytes).unwrap();
            let weights = Weights::from_files([&path]).unwrap();
            let matrix = Checkpoint::Bytes { block: None }.matrix(&weights, "a.weight", (2, 2));
            assert!(matrix.unwrap().is_some());
            assert!(weights.unread().is_empty(), "{:?}", weights.unread());
        }
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (settings, expected) in [
            (json!({ "quant_method": "quip" }), "quant_method is \"quip\""),
            (
                json!({ "quant_method": "awq", "bits": 3, "group_size": 64 }),
                "bits is 3, expected 4",
            ),
            (json!({ "quant_method": "awq", "bits": 4, "group_size": 0 }), "group_size is 0"),
            (json!({ "quant_method": "gptq", "bits": 4 }), "group_size"),
            (
                json!({ "quant_method": "gptq", "bits": 4, "group_size": 64, "format": "marlin" }),
                "format is \"marlin\"",
            ),
            (
                json!({
                    "quant_method": "compressed-tensors",
                    "config_groups": { "a": { "weights": { "strategy": "attn_head" } } },
                }),
                "config_groups: a: strategy is \"attn_head\"",
            ),
            (
                json!({
                    "quant_method": "compressed-tensors",
                    "config_groups": {
                        "a": { "weights": { "strategy": "channel" } },
                        "b": { "weights": { "strategy": "group", "group_size": 32 } },
                    },
                }),
                "layers differ",
            ),
            (json!({ "mode": "nf4" }), "mode is \"nf4\""),
            (json!({ "bits": "four" }), "invalid type"),
            (
                json!({ "quant_method": "compressed-tensors", "format": "pack-quantized" }),
                "pack-quantized",
            ),
            (json!({ "quant_method": "fp8", "weight_block_size": [128] }), "length"),
            (json!([4]), "expected an object"),
        ] {
            let error = Checkpoint::of(&json!({ "quantization_config": settings })).unwrap_err();
            assert!(error.starts_with("quantization_config: "), "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }
}
