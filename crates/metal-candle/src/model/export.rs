//! What a model leaves in a folder: an adapter as PEFT writes it, or the whole model.

use super::Model;
use crate::adapter::{self, Entry, LoraConfig};
use crate::autograd::Weight;
use crate::text::CHAT_TEMPLATE;
use crate::{Error, Result, files};
use candle_core::{DType, Tensor};
use metal_candle_kernels::copy;
use serde_json::Value;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// The files beside the weights that a copy of a model needs.
const COMPANIONS: &[&str] = &[
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    CHAT_TEMPLATE,
    "tokenizer.model",
];

/// The largest of them that is copied, in bytes.
const MAX_COMPANION_BYTES: u64 = 1 << 30;

/// How the trained parameters of a model are written into a folder, without their values: an adapter
/// as PEFT writes it or, where every weight is trained, the model in f32. Another thread can write
/// them from a copy of the values.
#[derive(Debug, Clone)]
pub struct TrainedFiles {
    kind: Kind,
    chat_template: Option<String>,
}

#[derive(Debug, Clone)]
enum Kind {
    Adapter {
        config: Box<LoraConfig>,
        layer_count: usize,
        base_model: String,
        /// The path, A `(in, r)` and B `(r, out)` of each adapted layer.
        pairs: Vec<(String, Entry, Entry)>,
    },
    Model {
        config: Value,
        weights: Vec<(String, Place)>,
        companions: Option<PathBuf>,
    },
}

/// Where the values of a weight are.
#[derive(Debug, Clone)]
enum Place {
    Parameter(Entry),
    Frozen(Tensor),
}

impl TrainedFiles {
    /// Writes this chat template beside the weights, as transformers and TRL do.
    #[must_use]
    pub fn with_chat_template(mut self, source: Option<String>) -> Self {
        self.chat_template = source;
        self
    }

    /// Writes the files into the existing `folder`, each whole or not at all. `values` are those of
    /// [`ParameterStore::values`](crate::adapter::ParameterStore::values), on any device.
    ///
    /// # Errors
    /// When `values` are of another length, or a file cannot be written.
    pub fn write(&self, folder: impl AsRef<Path>, values: &Tensor) -> Result<()> {
        let folder = folder.as_ref();
        let write_template = || match &self.chat_template {
            Some(source) => files::write_bytes_atomic(folder.join(CHAT_TEMPLATE), source),
            None => Ok(()),
        };
        match &self.kind {
            Kind::Adapter { config, layer_count, base_model, pairs } => {
                // An adapter that is there has its template.
                write_template()?;
                let pairs: Vec<(String, Tensor, Tensor)> = pairs
                    .iter()
                    .map(|(path, a, b)| Ok((path.clone(), a.of(values)?, b.of(values)?)))
                    .collect::<Result<_>>()?;
                adapter::write(folder, config, *layer_count, base_model, &pairs)
            }
            Kind::Model { config, weights, companions } => {
                let tensors: Vec<(String, Tensor)> = weights
                    .iter()
                    .map(|(name, place)| {
                        let tensor = match place {
                            Place::Parameter(entry) => entry.of(values)?,
                            Place::Frozen(tensor) => copy::cast(tensor, DType::F32)?,
                        };
                        Ok((name.clone(), tensor))
                    })
                    .collect::<Result<_>>()?;
                write_model(folder, config, DType::F32, &tensors, companions.as_deref())?;
                // Over the companions' own.
                write_template()
            }
        }
    }
}

impl Model {
    /// How the trained parameters are written. `base_model` is what an adapter names as the model it
    /// belongs to; from `companions` the tokenizer's files are copied beside a whole model.
    ///
    /// # Errors
    /// When nothing is trained.
    pub fn trained_files(
        &self,
        base_model: &str,
        companions: Option<&Path>,
    ) -> Result<TrainedFiles> {
        let store = self
            .parameters()
            .ok_or_else(|| Error::option("model", "has no trainable parameters to write"))?;
        let kind = match self.adapter() {
            Some(config) => {
                let mut pairs = Vec::new();
                for linear in self.linears() {
                    let Some(lora) = &linear.lora else { continue };
                    let entry = |weight: &Weight| match weight.parameter() {
                        Some(id) => Ok(store.entry(id)?.clone()),
                        None => {
                            Err(Error::option(&linear.path, "has an adapter that isn't trained"))
                        }
                    };
                    pairs.push((linear.path.clone(), entry(&lora.a)?, entry(&lora.b)?));
                }
                Kind::Adapter {
                    config: Box::new(config.clone()),
                    layer_count: self.layers.len(),
                    base_model: base_model.into(),
                    pairs,
                }
            }
            None => {
                let weights = self
                    .named_weights()
                    .map(|(name, weight)| {
                        let place = match weight.parameter() {
                            Some(id) => Place::Parameter(store.entry(id)?.clone()),
                            None => Place::Frozen(weight.tensor().clone()),
                        };
                        Ok((name, place))
                    })
                    .collect::<Result<_>>()?;
                Kind::Model {
                    config: self.config.raw.clone(),
                    weights,
                    companions: companions.map(Path::to_path_buf),
                }
            }
        };
        Ok(TrainedFiles { kind, chat_template: None })
    }

    /// Writes the adapter as a PEFT folder. `base_model` is what it names as its base.
    pub fn save_adapter(&self, folder: impl AsRef<Path>, base_model: &str) -> Result<()> {
        match (self.adapter(), self.parameters()) {
            (Some(_), Some(store)) => {
                self.trained_files(base_model, None)?.write(folder, store.values())
            }
            _ => Err(Error::option("adapter", "the model has none to save")),
        }
    }

    /// Writes `config.json` and `model.safetensors` in `dtype` into `folder`, and copies the
    /// tokenizer's files from `companions`.
    pub fn save(
        &self,
        folder: impl AsRef<Path>,
        dtype: DType,
        companions: Option<&Path>,
    ) -> Result<()> {
        if self.adapter().is_some() {
            return Err(Error::option("adapter", "merge it before the model is saved"));
        }
        dtype_name(dtype)?;
        let mut tensors = Vec::new();
        for (name, weight) in self.named_weights() {
            let tensor = copy::cast(weight.tensor(), dtype)?.contiguous()?;
            if dtype == DType::F16 && !is_finite(&tensor)? {
                return Err(Error::option(
                    "dtype",
                    format!("f16 cannot hold the values of `{name}`; use bf16 or f32"),
                ));
            }
            tensors.push((name, tensor));
        }
        write_model(folder.as_ref(), &self.config.raw, dtype, &tensors, companions)
    }
}

/// Writes a model whose weights are in `dtype`.
fn write_model(
    folder: &Path,
    config: &Value,
    dtype: DType,
    tensors: &[(String, Tensor)],
    companions: Option<&Path>,
) -> Result<()> {
    let name = dtype_name(dtype)?;
    let mut config = config.clone();
    let Some(map) = config.as_object_mut() else {
        return Err(Error::option("config", "has no JSON object to write as config.json"));
    };
    let key = if map.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    map.insert(key.into(), name.into());
    if map.contains_key("torch_dtype") {
        map.insert("torch_dtype".into(), name.into());
    }
    let index = folder.join("model.safetensors.index.json");
    if index.exists() {
        return Err(Error::file(
            index,
            "belongs to another model in this folder; give another one",
        ));
    }
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    files::write_safetensors(folder.join("model.safetensors"), tensors, Some(metadata))?;
    let path = folder.join("config.json");
    let bytes = serde_json::to_vec_pretty(&config)
        .map_err(|error| Error::file(&path, error.to_string()))?;
    files::write_bytes_atomic(&path, &bytes)?;
    for name in companions.into_iter().flat_map(|_| COMPANIONS) {
        let Some(from) = companions.map(|folder| folder.join(name)).filter(|path| path.is_file())
        else {
            continue;
        };
        let bytes = files::read_limited(&from, MAX_COMPANION_BYTES)?;
        files::write_bytes_atomic(folder.join(name), &bytes)?;
    }
    Ok(())
}

/// The word for a dtype in `config.json`.
fn dtype_name(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("float32"),
        DType::F16 => Ok("float16"),
        DType::BF16 => Ok("bfloat16"),
        other => Err(Error::Unsupported(format!("weights in {other:?}; f32, f16 and bf16 are"))),
    }
}

fn is_finite(tensor: &Tensor) -> Result<bool> {
    let largest = tensor.to_dtype(DType::F32)?.abs()?.flatten_all()?.max(0)?;
    Ok(largest.to_scalar::<f32>()?.is_finite())
}
