//! Whole models as files: safetensors, dense or in bitsandbytes' or MLX's formats, and GGUF.

use super::formats::gguf_blocks::{BlockKind, write_blocks};
use super::formats::{Part, bitsandbytes, checkpoint, experts, mlx};
use super::layer::Kind;
use super::weight::WeightId;
use super::{Model, Quantization};
use crate::files::companions::{copy_companions, set_chat_template};
use crate::gguf::{self, Export, ExportTensor, GgmlType, UnknownTokenizer, dense_bytes};
use crate::text::TokenizerFiles;
use crate::{Error, Result, files};
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::copy;
use metal_candle_kernels::quantized::{Format, quantize};
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::path::Path;
use std::str::FromStr;

/// The files of a model's folder.
pub(crate) const WEIGHTS: &str = "model.safetensors";
pub(crate) const CONFIG: &str = "config.json";

/// The files that a model is written as.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum ModelFormat {
    /// A folder with safetensors in f32, bf16 or f16.
    Dense(DType),
    /// A folder with safetensors as bitsandbytes or mlx-lm has them.
    Quantized(Quantization),
    /// A GGUF file.
    Gguf(GgufFormat),
}

/// The types of the matrices in a GGUF file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgufFormat {
    name: &'static str,
    /// Of most matrices.
    most: GgmlType,
    /// Of those that llama.cpp gives more bits.
    some: GgmlType,
    /// Of experts, where that is another.
    experts: Option<GgmlType>,
}

/// The types of most matrices, and of some.
const GGUF_NAMES: [(&str, &str, &str); 9] = [
    ("gguf-f32", "F32", "F32"),
    ("gguf-bf16", "BF16", "BF16"),
    ("gguf-f16", "F16", "F16"),
    ("gguf-q8_0", "Q8_0", "Q8_0"),
    ("gguf-q6_k", "Q6_K", "Q6_K"),
    ("gguf-q5_k_m", "Q5_K", "Q6_K"),
    ("gguf-q4_k_m", "Q4_K", "Q6_K"),
    ("gguf-q4_0", "Q4_0", "Q6_K"),
    (OF_EXPERTS, "Q8_0", "Q8_0"),
];

/// MXFP4 of experts, as gpt-oss has them, and eight bits besides.
const OF_EXPERTS: &str = "gguf-mxfp4";

const DENSE: [(&str, DType); 3] = [("f32", DType::F32), ("bf16", DType::BF16), ("f16", DType::F16)];

impl ModelFormat {
    /// The words for all of them.
    pub fn names() -> Vec<&'static str> {
        let dense = DENSE.iter().map(|(name, _)| *name);
        let quantized = Quantization::names().filter(|name| name.parse().is_ok_and(has_files));
        dense.chain(quantized).chain(GGUF_NAMES.iter().map(|(name, ..)| *name)).collect()
    }

    /// Whether it is one file and not a folder.
    pub fn is_file(self) -> bool {
        matches!(self, Self::Gguf(_))
    }
}

impl fmt::Display for ModelFormat {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Dense(dtype) => f.write_str(dtype.as_str()),
            Self::Quantized(quantization) => quantization.fmt(f),
            Self::Gguf(format) => f.write_str(format.name),
        }
    }
}

impl FromStr for ModelFormat {
    type Err = String;

    fn from_str(word: &str) -> std::result::Result<Self, String> {
        let unknown = || format!("is {word:?}, expected one of {}", Self::names().join(", "));
        if let Some((_, dtype)) = DENSE.iter().find(|(name, _)| *name == word) {
            return Ok(Self::Dense(*dtype));
        }
        if let Some((name, most, some)) = GGUF_NAMES.iter().find(|(name, ..)| *name == word) {
            let types = GgmlType::from_name(most).zip(GgmlType::from_name(some));
            let (most, some) = types.ok_or_else(unknown)?;
            let experts = GgmlType::from_name("MXFP4").filter(|_| *name == OF_EXPERTS);
            return Ok(Self::Gguf(GgufFormat { name, most, some, experts }));
        }
        let quantization: Quantization = word.parse().map_err(|_| unknown())?;
        match has_files(quantization) {
            true => Ok(Self::Quantized(quantization)),
            false => Err(format!("is {word:?}, which is not written; {}", unknown())),
        }
    }
}

/// What is written beside a model's weights.
#[derive(Clone, Copy, Debug)]
pub struct Companions<'a> {
    /// A model's folder or GGUF file, whose tokenizer and other files are taken.
    pub from: &'a Path,
    /// A chat template in place of its own.
    pub chat_template: Option<&'a str>,
}

impl Companions<'_> {
    /// The files of the tokenizer.
    ///
    /// # Errors
    /// When there is none, or a file cannot be read.
    fn tokenizer(&self) -> Result<TokenizerFiles> {
        let mut files = TokenizerFiles::read(self.from)?;
        if let Some(template) = self.chat_template {
            files.chat_templates = vec![("default".to_string(), template.to_string())];
        }
        Ok(files)
    }

    /// Copies the files into a folder.
    ///
    /// # Errors
    /// When a file cannot be read or written.
    pub fn copy(&self, folder: &Path) -> Result<()> {
        copy_companions(self.from, folder)?;
        match self.chat_template {
            Some(template) => set_chat_template(folder, template),
            None => Ok(()),
        }
    }
}

/// Whose files a format's are.
enum FilesOf {
    Bitsandbytes { kind: &'static str, nested: bool },
    Mlx(mlx::Mode),
}

/// Whether there are files in it: those of gpt-oss, or a program's.
fn has_files(quantization: Quantization) -> bool {
    quantization.is_of_experts() || files_of(quantization).is_some()
}

fn files_of(quantization: Quantization) -> Option<FilesOf> {
    Some(match quantization.format() {
        Format::Nf4 { nested, .. } => FilesOf::Bitsandbytes { kind: "nf4", nested },
        Format::Fp4 { nested, .. } => FilesOf::Bitsandbytes { kind: "fp4", nested },
        Format::Affine { bits, group } => FilesOf::Mlx(mlx::Mode::Affine { bits, group }),
        Format::Mxfp4 => FilesOf::Mlx(mlx::Mode::Mxfp4),
        Format::Mxfp8 => FilesOf::Mlx(mlx::Mode::Mxfp8),
        Format::Nvfp4 => FilesOf::Mlx(mlx::Mode::Nvfp4),
        _ => return None,
    })
}

impl Model {
    /// Writes `config.json` and `model.safetensors` in `dtype` into `folder`, and copies the
    /// tokenizer's files from `companions`, a model's folder or GGUF file.
    ///
    /// # Errors
    /// When a weight can't be held in `dtype`, or a file cannot be read or written.
    pub fn save(
        &self,
        folder: impl AsRef<Path>,
        dtype: DType,
        companions: Option<&Path>,
    ) -> Result<()> {
        let companions = companions.map(|from| Companions { from, chat_template: None });
        self.save_as(folder, ModelFormat::Dense(dtype), companions)
    }

    /// Writes the model in a format: into the existing folder `path`, or as this file. What is held in fewer bits is
    /// unpacked first. A GGUF file has a tokenizer unless there are no `companions`.
    ///
    /// # Errors
    /// When a weight can't be held in the format, the model or its tokenizer can't be written as such a file, the
    /// companions of a GGUF file have no tokenizer, or a file cannot be read or written.
    pub fn save_as(
        &self,
        path: impl AsRef<Path>,
        format: ModelFormat,
        companions: Option<Companions>,
    ) -> Result<()> {
        let path = path.as_ref();
        match format {
            ModelFormat::Dense(dtype) => self.save_dense(path, dtype, companions),
            ModelFormat::Quantized(quantization) => {
                self.save_quantized(path, quantization, companions)
            }
            ModelFormat::Gguf(format) => self.save_gguf(path, format, companions),
        }
    }

    fn save_dense(
        &self,
        folder: &Path,
        dtype: DType,
        companions: Option<Companions>,
    ) -> Result<()> {
        let mut tensors = Vec::new();
        for tensor in self.tensors() {
            tensors.push((tensor.name.clone(), tensor.join(&self.parts_as(&tensor, dtype)?)?));
        }
        write(folder, &self.config.raw, dtype, None, &tensors, companions)
    }

    /// The tensors of a dense file, with the weights of each.
    pub(crate) fn tensors(&self) -> Vec<experts::Together<(&str, WeightId)>> {
        let weights = self.named_weights().map(|(name, id)| (name.to_string(), (name, id)));
        experts::together(self.config.experts.as_ref(), weights)
    }

    /// The weights of a tensor, in `dtype`.
    fn parts_as(
        &self,
        tensor: &experts::Together<(&str, WeightId)>,
        dtype: DType,
    ) -> Result<Vec<Tensor>> {
        tensor.parts.iter().map(|(name, id)| self.weight_as(name, *id, dtype)).collect()
    }

    /// A weight in `dtype`.
    fn weight_as(&self, name: &str, id: WeightId, dtype: DType) -> Result<Tensor> {
        written_as(name, &*self.dense(id)?, dtype)
    }

    fn save_quantized(
        &self,
        folder: &Path,
        quantization: Quantization,
        companions: Option<Companions>,
    ) -> Result<()> {
        if quantization.is_of_experts() {
            return self.save_gpt_oss(folder, quantization, companions);
        }
        let Some(files_of) = files_of(quantization) else {
            return Err(Error::Unsupported(format!("files in {quantization}")));
        };
        let mut tensors = Vec::new();
        // Those of experts, which mlx-lm has as one tensor a layer.
        let mut stacks: BTreeMap<String, Vec<Tensor>> = BTreeMap::new();
        if let (FilesOf::Bitsandbytes { .. }, Some(_)) = (&files_of, &self.config.experts) {
            return Err(Error::Unsupported(format!(
                "a model with experts in {quantization}: transformers holds those of a layer as one tensor, which \
                 bitsandbytes doesn't pack; mlx4 and gguf-q4_k_m, for example, are written"
            )));
        }
        let of_mlx = |name: &str| experts::stacked_by_mlx(self.config.experts.as_ref()?, name);
        let mut push = |name: String, tensor| match of_mlx(&name) {
            // They come in their order.
            Some(stacked) => stacks.entry(stacked).or_default().push(tensor),
            None => tensors.push((name, tensor)),
        };
        for (name, id) in self.named_weights() {
            let path = name.strip_suffix(".weight").unwrap_or(name);
            if !quantization.wants(self.weights.kind(id)) {
                push(name.to_string(), self.weight_as(name, id, self.dtype)?);
                continue;
            }
            let dense = self.weight_as(name, id, self.dtype)?.to_device(&Device::Cpu)?;
            let matrix = quantization.apply(name, &dense)?;
            let parts = match &files_of {
                FilesOf::Bitsandbytes { .. } => {
                    bitsandbytes::write(&matrix, dtype_name(self.dtype)?)
                }
                FilesOf::Mlx(mode) => mlx::write(*mode, &matrix),
            };
            for part in parts.map_err(|problem| Error::option(name, problem))? {
                push(format!("{path}.{}", part.name), tensor_of(&part)?);
            }
        }
        for (name, experts) in stacks {
            tensors.push((name, Tensor::stack(&experts, 0)?));
        }
        let mut config = self.config.raw.clone();
        let (key, said) = match files_of {
            FilesOf::Bitsandbytes { kind, nested } => {
                let said = json!({
                    "quant_method": "bitsandbytes",
                    "load_in_4bit": true,
                    "load_in_8bit": false,
                    "bnb_4bit_quant_type": kind,
                    "bnb_4bit_use_double_quant": nested,
                    "bnb_4bit_compute_dtype": dtype_name(self.dtype)?,
                    "bnb_4bit_quant_storage": "uint8",
                    "llm_int8_skip_modules": self.head.map(|_| [Self::HEAD]),
                });
                ("quantization_config", said)
            }
            FilesOf::Mlx(mode) => {
                if let Some(map) = config.as_object_mut() {
                    mlx::say_as_before(map);
                }
                ("quantization", mode.config())
            }
        };
        write(folder, &config, self.dtype, Some((key, said)), &tensors, companions)
    }

    /// As gpt-oss is published: experts in MXFP4, of whose matrices each layer has one tensor.
    fn save_gpt_oss(
        &self,
        folder: &Path,
        quantization: Quantization,
        companions: Option<Companions>,
    ) -> Result<()> {
        let family = self.config.architecture.model_type();
        if !self.config.experts.is_some_and(|experts| experts.names.stacked.interleaved) {
            return Err(Error::Unsupported(format!(
                "a {family} model in {quantization}: transformers has such files of gpt_oss alone; mxfp4, for example, \
                 is written for mlx-lm"
            )));
        }
        let mut tensors = Vec::new();
        for tensor in self.tensors() {
            let weights = self.parts_as(&tensor, self.dtype)?;
            if !tensor.parts.iter().all(|(_, id)| self.weights.kind(*id) == Kind::Expert) {
                tensors.push((tensor.name.clone(), tensor.join(&weights)?));
                continue;
            }
            let packed = weights
                .iter()
                .map(|weight| quantization.apply(&tensor.name, &weight.to_device(&Device::Cpu)?));
            tensors.extend(tensor.packed(&packed.collect::<Result<Vec<_>>>()?)?);
        }
        let said = json!({
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
            ],
        });
        let said = Some(("quantization_config", said));
        write(folder, &self.config.raw, self.dtype, said, &tensors, companions)
    }

    fn save_gguf(
        &self,
        path: &Path,
        format: GgufFormat,
        companions: Option<Companions>,
    ) -> Result<()> {
        if let (Some(kind), None) = (format.experts, &self.config.experts) {
            return Err(Error::Unsupported(format!(
                "{}, whose {kind} is that of experts, of a {} model, which has none",
                format.name,
                self.config.architecture.model_type()
            )));
        }
        let layers = self.config.layers.len();
        let weights: Vec<(&str, WeightId)> = self.named_weights().collect();
        let describe = |(name, id): &(&str, WeightId)| {
            let shape = self.weights.shape(*id).dims().to_vec();
            let is_head = *id == self.head.unwrap_or(self.embedding);
            let purpose = self.weights.kind(*id);
            let wanted = match (format.experts, purpose) {
                (Some(kind), Kind::Expert) => kind,
                _ if is_head || gets_more_bits(name, layers) => format.some,
                _ => format.most,
            };
            let kind = match purpose {
                Kind::Router => gguf::storage(&shape[..1], wanted),
                _ => stored_as(&shape, wanted),
            };
            ExportTensor { name: (*name).to_string(), shape, kind }
        };
        let tensors: Vec<ExportTensor> = weights.iter().map(describe).collect();
        let ids: HashMap<&str, WeightId> = weights.into_iter().collect();
        let tokenizer = companions.map(|it| it.tokenizer()).transpose()?;
        let export = Export {
            config: &self.config,
            tokenizer: tokenizer.as_ref(),
            unknown_tokenizer: UnknownTokenizer::Refuse,
            name: None,
        };
        gguf::write(path, &export, &tensors, |tensor| {
            let Some(id) = ids.get(tensor.name.as_str()) else {
                return Err(Error::option(&tensor.name, "is no weight of this model"));
            };
            let dense = self.dense(*id)?.to_device(&Device::Cpu)?;
            if tensor.kind.is_dense() {
                return dense_bytes(&dense, tensor.kind);
            }
            let fault = |problem: String| Error::option(&tensor.name, problem);
            let (format, blocks) = quantizer(tensor.kind)
                .ok_or_else(|| fault(format!("cannot be written as {}", tensor.kind)))?;
            let matrix = quantize(&dense, format)?;
            write_blocks(blocks, &matrix).map_err(fault)
        })
    }
}

/// Which of its matrices llama.cpp gives more bits in its mixtures: values and down projections of the first and the
/// last eighth of the layers, and of each third one between.
fn gets_more_bits(name: &str, layers: usize) -> bool {
    let layer = || name.strip_prefix("model.layers.")?.split('.').next()?.parse::<usize>().ok();
    // Mixtral's `w2` are down projections.
    let more = [".v_proj.weight", ".down_proj.weight", ".w2.weight"];
    let is_one = more.iter().any(|end| name.ends_with(end));
    let Some(layer) = layer().filter(|_| is_one) else { return false };
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// How a tensor is stored where matrices are to be `wanted`: where its rows aren't whole blocks of 256, as llama.cpp
/// has it then.
fn stored_as(shape: &[usize], wanted: GgmlType) -> GgmlType {
    let instead = match wanted.name() {
        "Q4_K" => "Q5_0",
        "Q5_K" => "Q5_1",
        _ => "Q8_0",
    };
    match (gguf::storage(shape, wanted), GgmlType::from_name(instead)) {
        (GgmlType::F16, Some(instead)) if !wanted.is_dense() => gguf::storage(shape, instead),
        (kind, _) => kind,
    }
}

/// What makes the blocks of a type.
fn quantizer(kind: GgmlType) -> Option<(Format, BlockKind)> {
    let format = match kind.name() {
        "Q4_0" => Format::Q4_0,
        "Q5_0" => Format::Q5_0,
        "Q5_1" => Format::Q5_1,
        "Q8_0" => Format::Q8_0,
        "Q4_K" => Format::Q4K,
        "Q5_K" => Format::Q5K,
        "Q6_K" => Format::Q6K,
        "MXFP4" => Format::Mxfp4,
        _ => return None,
    };
    Some((format, BlockKind::from_name(kind.name())?))
}

fn tensor_of(part: &Part) -> Result<Tensor> {
    let dtype = match part.dtype {
        "U8" => DType::U8,
        "U32" => DType::U32,
        "F32" => DType::F32,
        "F16" => DType::F16,
        "BF16" => DType::BF16,
        other => return Err(Error::Unsupported(format!("writing {other} tensors"))),
    };
    Ok(Tensor::from_raw_buffer(&part.bytes, dtype, &part.shape, &Device::Cpu)?)
}

/// The values of the weight `name` in the dtype that is written.
pub(crate) fn written_as(name: &str, weight: &Tensor, dtype: DType) -> Result<Tensor> {
    dtype_name(dtype)?;
    let tensor = copy::cast(weight, dtype)?.contiguous()?;
    if dtype == DType::F16 && !is_finite(&tensor)? {
        return Err(Error::option(
            "dtype",
            format!("f16 cannot hold the values of `{name}`; use bf16 or f32"),
        ));
    }
    Ok(tensor)
}

/// Writes a model whose weights are in `dtype`, or for the most part as `quantization`, a key of `config.json`, says.
pub(crate) fn write(
    folder: &Path,
    config: &Value,
    dtype: DType,
    quantization: Option<(&str, Value)>,
    tensors: &[(String, Tensor)],
    companions: Option<Companions>,
) -> Result<()> {
    let config = config_bytes(config, dtype, quantization)?;
    let index = folder.join("model.safetensors.index.json");
    if index.exists() {
        return Err(Error::file(
            index,
            "belongs to another model in this folder; give another one",
        ));
    }
    files::write_safetensors(folder.join(WEIGHTS), tensors, Some(metadata()))?;
    files::write_bytes_atomic(folder.join(CONFIG), &config)?;
    match companions {
        Some(companions) => companions.copy(folder),
        None => Ok(()),
    }
}

/// What a file of weights says of itself.
pub(crate) fn metadata() -> HashMap<String, String> {
    HashMap::from([("format".to_string(), "pt".to_string())])
}

/// The `config.json` of a model whose weights are in `dtype`, or for the most part as `quantization`, a key of it, says.
pub(crate) fn config_bytes(
    config: &Value,
    dtype: DType,
    quantization: Option<(&str, Value)>,
) -> Result<Vec<u8>> {
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
    for key in checkpoint::KEYS {
        map.remove(key);
    }
    if let Some((key, said)) = quantization {
        map.insert(key.into(), said);
    }
    serde_json::to_vec_pretty(&config)
        .map_err(|error| Error::option("config", format!("cannot be written: {error}")))
}

/// The word for a dtype in `config.json`.
pub(crate) fn dtype_name(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("float32"),
        DType::F16 => Ok("float16"),
        DType::BF16 => Ok("bfloat16"),
        other => Err(Error::Unsupported(format!("weights in {other:?}; f32, f16 and bf16 are"))),
    }
}

pub(super) fn is_finite(tensor: &Tensor) -> Result<bool> {
    let largest = tensor.to_dtype(DType::F32)?.abs()?.flatten_all()?.max(0)?;
    Ok(largest.to_scalar::<f32>()?.is_finite())
}
