//! The files of adapters. PEFT's and mlx-lm's folders both hold [`ADAPTER_CONFIG`] and a file of weights; what they
//! call the tensors, and how these lie, is all that reading has to know of either.

pub(super) mod mlx;
pub(super) mod peft;

use super::{LoraConfig, Parameters, Part, PartKind};
use crate::files;
use crate::files::{cut, short};
use crate::model::weight::Storage;
use crate::model::{Model, Weights};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::{copy, host};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::Path;

/// The name of the configuration in an adapter folder.
pub const ADAPTER_CONFIG: &str = "adapter_config.json";

/// Whose files are in an adapter's folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AdapterFormat {
    /// PEFT's.
    Peft,
    /// mlx-lm's.
    Mlx,
}

impl AdapterFormat {
    /// Finds it in the configuration of a folder.
    ///
    /// # Errors
    /// When that is missing or is of neither.
    pub fn of(folder: &Path) -> Result<Self> {
        Ok(read_json(folder)?.0)
    }

    /// What it is called.
    pub fn name(self) -> &'static str {
        match self {
            Self::Peft => "PEFT",
            Self::Mlx => "mlx-lm",
        }
    }

    /// The name of the weights in the folder.
    pub fn weights(self) -> &'static str {
        match self {
            Self::Peft => peft::ADAPTER_WEIGHTS,
            Self::Mlx => mlx::MLX_WEIGHTS,
        }
    }

    /// The key of the configuration that names the base model.
    pub fn base_key(self) -> &'static str {
        match self {
            Self::Peft => peft::BASE_KEY,
            Self::Mlx => mlx::BASE_KEY,
        }
    }

    /// The path of the linear layer whose A a tensor of the weights is.
    pub fn layer_of(self, tensor: &str) -> Option<&str> {
        match self {
            Self::Peft => peft::layer_of(tensor),
            Self::Mlx => mlx::layer_of(tensor),
        }
    }

    /// A part's name in the file.
    fn tensor_name(self, part: &Part) -> String {
        match self {
            Self::Peft => peft::name(part),
            Self::Mlx => mlx::name(part),
        }
    }

    /// Whether the file has the other orientation.
    fn is_transposed(self, part: &Part) -> bool {
        match self {
            Self::Peft => peft::is_transposed(part),
            Self::Mlx => false,
        }
    }

    /// A part's shape in the file.
    fn shape(self, part: &Part, with_start: bool) -> Vec<usize> {
        let mut shape = part.entry.shape.dims().to_vec();
        if with_start {
            shape[rank_dimension(part)] *= 2;
        }
        if self.is_transposed(part) {
            shape.reverse();
        }
        shape
    }
}

/// Which dimension of A or B is the rank.
fn rank_dimension(part: &Part) -> usize {
    usize::from(part.kind == PartKind::A)
}

/// The configuration in a folder, and whose it is.
fn read_json(folder: &Path) -> Result<(AdapterFormat, Map<String, Value>)> {
    let path = folder.join(ADAPTER_CONFIG);
    let json: Map<String, Value> = files::read_json(&path)?;
    let format = if json.contains_key("peft_type") {
        AdapterFormat::Peft
    } else if json.contains_key("fine_tune_type") || json.contains_key("lora_parameters") {
        AdapterFormat::Mlx
    } else {
        return Err(Error::file(
            path,
            "has neither peft_type nor fine_tune_type; expected an adapter of PEFT or of mlx-lm",
        ));
    };
    Ok((format, json))
}

/// Whose files a folder has, its configuration, and the base model that it names.
pub(super) fn read(folder: &Path) -> Result<(AdapterFormat, LoraConfig, Option<String>)> {
    let (format, json) = read_json(folder)?;
    let parsed = match format {
        AdapterFormat::Peft => peft::parse_config(&json),
        AdapterFormat::Mlx => mlx::parse_config(&json),
    };
    let (config, base) =
        parsed.map_err(|message| Error::file(folder.join(ADAPTER_CONFIG), message))?;
    Ok((format, config, base))
}

/// Reads an adapter's configuration and the base model it names, from a folder of PEFT's or mlx-lm's. Anything it
/// asks for that is not supported is an error that names the key.
pub fn read_config(folder: &Path) -> Result<(LoraConfig, Option<String>)> {
    let (_, config, base) = read(folder)?;
    Ok((config, base))
}

/// Reads the values of an adapter's parts. A tensor that is missing, of another shape, or left over is an
/// error. `base` is the model whose embedding and head PEFT may have written beside them; without one, the file has what
/// A and B started from, as [`write_weights`] puts it there.
pub(super) fn read_weights(
    folder: &Path,
    format: AdapterFormat,
    parts: &[Part],
    parameters: &Parameters,
    base: Option<&Model>,
) -> Result<()> {
    let path = folder.join(format.weights());
    let weights = Weights::from_files([&path])?;
    let device = parameters.values().device();
    for part in parts {
        let start = part.start.as_ref().filter(|_| base.is_none());
        let (name, shape) = (format.tensor_name(part), format.shape(part, start.is_some()));
        match weights.shape(&name) {
            Some(found) if found == shape => {}
            Some(found) => {
                return Err(Error::file(
                    &path,
                    format!(
                        "`{name}` has shape {found:?}, but this base model and {ADAPTER_CONFIG} ask \
                         for {shape:?}; is this an adapter for another base model?"
                    ),
                ));
            }
            None => {
                return Err(Error::file(
                    &path,
                    format!(
                        "has no tensor `{name}`, which {ADAPTER_CONFIG} asks for on this base model; is \
                         this an adapter for another base model?"
                    ),
                ));
            }
        }
        let value = weights.tensor(&name, &shape, DType::F32, device)?;
        let value = if format.is_transposed(part) { value.t()? } else { value };
        let Some(start) = start else {
            parameters.set(part.id, &value)?;
            continue;
        };
        let (dimension, rank) = (rank_dimension(part), value.dim(rank_dimension(part))? / 2);
        parameters.set(part.id, &value.narrow(dimension, 0, rank)?)?;
        copy::write(start, &value.narrow(dimension, rank, rank)?.contiguous()?, 0, 0)?;
    }
    if let Some(base) = base {
        check_tables(&path, &weights, base)?;
    }
    if let Some(name) = weights.unread().first() {
        return Err(Error::file(
            &path,
            format!(
                "`{name}` belongs to no layer that {ADAPTER_CONFIG} names in this base model; is this \
             an adapter for another base model?"
            ),
        ));
    }
    Ok(())
}

/// Checks that the embedding and the head beside an adapter, which PEFT reads in the place of the model's, are the model's.
fn check_tables(path: &Path, weights: &Weights, base: &Model) -> Result<()> {
    let head = base.head.unwrap_or(base.embedding);
    for (of, id) in [(Model::EMBEDDING, base.embedding), (Model::HEAD, head)] {
        for own in ["base_layer.weight", "weight"] {
            let name = format!("{}{of}.{own}", peft::PREFIX);
            if !weights.unread().contains(&name.as_str()) {
                continue;
            }
            let shape = base.frozen().shape(id);
            let found = weights.tensor(&name, shape.dims(), DType::F32, &Device::Cpu)?;
            if base.is_outline() {
                continue;
            }
            let bits = match base.frozen().storage(id) {
                Storage::Quantized(table) => Some(8 * table.size_in_bytes() / shape.elem_count()),
                _ => None,
            };
            let table = base.dense(id)?;
            if !is_the_same(&found, &table, bits)? {
                return Err(Error::file(
                    path,
                    format!(
                        "`{name}` isn't the weight of this base model; is this an adapter for another \
                         one, or one that was made with more tokens?"
                    ),
                ));
            }
        }
    }
    Ok(())
}

/// Whether a table, in f32 and on the host, is the model's, but for what two roundings to bf16 change, or for what the
/// model's lost when it was quantised to so many bits.
fn is_the_same(found: &Tensor, table: &Tensor, bits: Option<usize>) -> Result<bool> {
    // Of a large table a part at a time.
    const ROWS: usize = 4096;
    let sum = |tensor: &Tensor| tensor.sqr()?.sum_all()?.to_scalar::<f32>();
    let (mut lost, mut whole) = (0.0, 0.0);
    let rows = found.dim(0)?;
    for start in (0..rows).step_by(ROWS) {
        let part = |tensor: &Tensor| tensor.narrow(0, start, ROWS.min(rows - start));
        let table = copy::cast(&host::on_the_host(&part(table)?)?, DType::F32)?;
        let difference = (part(found)? - &table)?;
        if bits.is_some() {
            lost += f64::from(sum(&difference)?);
            whole += f64::from(sum(&table)?);
            continue;
        }
        let beyond = (difference.abs()? - (table.abs()? * 2f64.powi(-7))?)?;
        // Below this, f16 has fewer digits.
        if beyond.flatten_all()?.max(0)?.to_scalar::<f32>()? > 1e-7 {
            return Ok(false);
        }
    }
    // Numbers of 8 bits may have no more than four binary digits.
    Ok(bits.is_none_or(|bits| lost <= whole * 4f64.powi(2 - bits as i32).max(4e-3)))
}

/// The value of a part and what acts beside it: a plain LoRA adapter of twice the rank, whose layers are the frozen
/// ones at the start.
fn with_start(part: &Part, value: Tensor) -> Result<Tensor> {
    let Some(start) = &part.start else { return Ok(value) };
    let start = start.to_device(value.device())?;
    Ok(Tensor::cat(&[&value, &start], rank_dimension(part))?)
}

/// Writes the parts as the file of weights, whole or not at all. `values` are those of [`Parameters::values`].
fn write_weights(
    folder: &Path,
    format: AdapterFormat,
    parts: &[Part],
    values: &Tensor,
) -> Result<()> {
    let mut tensors = BTreeMap::new();
    for part in parts {
        let value = with_start(part, part.entry.of(values)?)?;
        let value = if format.is_transposed(part) { value.t()?.contiguous()? } else { value };
        tensors.insert(format.tensor_name(part), value);
    }
    let tensors: Vec<(String, Tensor)> = tensors.into_iter().collect();
    // The libraries' word for whose tensors these are.
    let owner = match format {
        AdapterFormat::Peft => "pt",
        AdapterFormat::Mlx => "mlx",
    };
    let metadata = [("format".to_string(), owner.to_string())].into_iter().collect();
    files::write_safetensors(folder.join(format.weights()), &tensors, Some(metadata))
}

/// Writes the configuration, whole or not at all.
fn write_config(folder: &Path, json: &Value) -> Result<()> {
    let path = folder.join(ADAPTER_CONFIG);
    let bytes =
        serde_json::to_vec_pretty(json).map_err(|error| Error::file(&path, error.to_string()))?;
    files::write_bytes_atomic(path, &bytes)
}

/// That a key's value is another than expected.
fn wrong(key: &str, value: &Value, expected: &str) -> String {
    format!("{} is {}, expected {expected}", cut(key), short(value))
}

fn as_usize(value: &Value) -> Option<usize> {
    value.as_u64().and_then(|number| usize::try_from(number).ok())
}
