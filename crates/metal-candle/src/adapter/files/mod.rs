//! The files of adapters. PEFT's and mlx-lm's folders both hold [`ADAPTER_CONFIG`] and a file of weights; what they
//! call the tensors, and how these lie, is all that reading has to know of either.

pub(super) mod mlx;
pub(super) mod peft;

use super::plan::Outline;
use super::{LoraConfig, Parameters, Part, PartKind};
use crate::files;
use crate::files::{cut, short};
use crate::model::weight::Storage;
use crate::model::{Model, Weights};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::{copy, host};
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

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
    fn tensor_name(self, kind: PartKind, of: &str) -> String {
        match self {
            Self::Peft => peft::name(kind, of),
            Self::Mlx => mlx::name(kind, of),
        }
    }

    /// Whether the file has the other orientation.
    fn is_transposed(self, kind: PartKind) -> bool {
        match self {
            Self::Peft => peft::is_transposed(kind),
            Self::Mlx => false,
        }
    }

    /// A part's name and shape in the file.
    fn described(self, part: &Outline) -> (String, Vec<usize>) {
        let mut shape = part.dims.to_vec();
        if part.has_start {
            shape[rank_dimension(part.kind)] *= 2;
        }
        if self.is_transposed(part.kind) {
            shape.reverse();
        }
        (self.tensor_name(part.kind, part.of), shape)
    }
}

/// Which dimension of A or B is the rank.
fn rank_dimension(kind: PartKind) -> usize {
    usize::from(kind == PartKind::A)
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

/// The weights of an adapter's folder, of which nothing but the header is read when it is opened.
pub(super) struct AdapterFile {
    path: PathBuf,
    format: AdapterFormat,
    weights: Weights,
}

impl AdapterFile {
    pub fn open(folder: &Path, format: AdapterFormat) -> Result<Self> {
        let path = folder.join(format.weights());
        let weights = Weights::from_files([&path])?;
        Ok(Self { path, format, weights })
    }

    /// Has the configuration beside it choose of a model's layers, given by path, what the program chooses whose files
    /// these are.
    pub fn fit(&self, config: &mut LoraConfig, paths: &[String], layer_count: usize) -> Result<()> {
        match self.format {
            AdapterFormat::Peft => peft::fit(config, &self.path, paths, layer_count),
            AdapterFormat::Mlx => {
                let halves = [".lora_a", ".lora_b"];
                let layer = |name| halves.iter().find_map(|half| str::strip_suffix(name, half));
                let in_file = self.weights.names().filter_map(layer).collect();
                mlx::fit(config, &self.path, &in_file, paths, layer_count)
            }
        }
    }

    /// Checks that it has these parts in their shapes and nothing else, but for the embedding and the head that PEFT may
    /// have written `with_tables`.
    pub fn check<'p>(
        &self,
        parts: impl Iterator<Item = Outline<'p>>,
        with_tables: bool,
    ) -> Result<()> {
        let wrong = |message: String| {
            let question = "is this an adapter for another base model?";
            Err(Error::file(&self.path, format!("{message}; {question}")))
        };
        let mut expected: HashSet<String> = HashSet::new();
        if with_tables {
            expected.extend(tables().map(|(_, name)| name));
        }
        for part in parts {
            let (name, shape) = self.format.described(&part);
            match self.weights.shape(&name) {
                Some(found) if found == shape => {}
                Some(found) => {
                    return wrong(format!(
                        "`{name}` has shape {found:?}, but this base model and {ADAPTER_CONFIG} ask for {shape:?}"
                    ));
                }
                None => {
                    return wrong(format!(
                        "has no tensor `{name}`, which {ADAPTER_CONFIG} asks for on this base model"
                    ));
                }
            }
            self.weights.dtype(&name)?;
            expected.insert(name);
        }
        match self.weights.names().find(|name| !expected.contains(*name)) {
            Some(name) => wrong(format!(
                "`{name}` belongs to no layer that {ADAPTER_CONFIG} names in this base model"
            )),
            None => Ok(()),
        }
    }

    /// Reads the values of the parts that were checked. `base` is the model whose embedding and head PEFT may have written
    /// beside them; without one, the file has what A and B started from, as [`write_weights`] puts it there.
    pub fn read(
        &self,
        parts: &[Part],
        parameters: &Parameters,
        base: Option<&Model>,
    ) -> Result<()> {
        let device = parameters.values().device();
        for part in parts {
            let start = part.start.as_ref().filter(|_| base.is_none());
            let outline = Outline { has_start: start.is_some(), ..part.outline() };
            let (name, shape) = self.format.described(&outline);
            let value = self.weights.tensor(&name, &shape, DType::F32, device)?;
            let value = if self.format.is_transposed(part.kind) { value.t()? } else { value };
            let Some(start) = start else {
                parameters.set(part.id, &value)?;
                continue;
            };
            let dimension = rank_dimension(part.kind);
            let rank = value.dim(dimension)? / 2;
            parameters.set(part.id, &value.narrow(dimension, 0, rank)?)?;
            copy::write(start, &value.narrow(dimension, rank, rank)?.contiguous()?, 0, 0)?;
        }
        base.map_or(Ok(()), |base| check_tables(&self.path, &self.weights, base))
    }
}

/// The paths of the embedding and the head, and the names that PEFT gives them beside an adapter.
fn tables() -> impl Iterator<Item = (&'static str, String)> {
    let names =
        |of| ["base_layer.weight", "weight"].map(|own| (of, format!("{}{of}.{own}", peft::PREFIX)));
    [Model::EMBEDDING, Model::HEAD].into_iter().flat_map(names)
}

/// Checks that the embedding and the head beside an adapter, which PEFT reads in the place of the model's, are the model's.
fn check_tables(path: &Path, weights: &Weights, base: &Model) -> Result<()> {
    for (of, name) in tables() {
        if !weights.unread().contains(&name.as_str()) {
            continue;
        }
        let id = base.head.filter(|_| of == Model::HEAD).unwrap_or(base.embedding);
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
    Ok(Tensor::cat(&[&value, &start], rank_dimension(part.kind))?)
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
        let value = if format.is_transposed(part.kind) { value.t()?.contiguous()? } else { value };
        tensors.insert(format.tensor_name(part.kind, &part.of), value);
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
