//! Models from files: a folder with `config.json` and safetensors, or a GGUF file, dense or quantised.

use super::config::ExpertsConfig;
use super::export::is_finite;
use super::formats::checkpoint::Checkpoint;
use super::formats::experts::{self, Interleaved};
use super::formats::gguf_blocks::{BlockKind, read_blocks};
use super::layer::{Kind, Source};
use super::tensor_parallel::Cut;
use super::weight::Storage;
use super::{Config, Holding, Model, Quantization, Weights};
use crate::gguf::{GgmlType, GgufFile, is_gguf};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;

impl Model {
    /// Reads a model from a folder with `config.json` and safetensors, or from a GGUF file, as `dtype` on
    /// `device`. Matrices that are stored in fewer bits are held as they are, and `dtype` is what they are computed
    /// in.
    ///
    /// # Errors
    /// For a file that is missing or malformed, a tensor of another shape than the configuration
    /// asks for or with a NaN in it, and an architecture or a quantisation that is not supported.
    pub fn load(path: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        Self::load_with(path, dtype, device, Holding::default())
    }

    /// As [`Self::load`], with the weights held as said: dense ones brought into fewer bits, one after the other, or kept
    /// elsewhere than on the device.
    ///
    /// # Errors
    /// As [`Self::load`], and when a weight has a size that the format can't hold, or is quantised already.
    pub fn load_with(
        path: impl AsRef<Path>,
        dtype: DType,
        device: &Device,
        holding: impl Into<Holding>,
    ) -> Result<Self> {
        Files::open(path.as_ref(), dtype, device, holding.into())?.build()
    }

    /// The model of a folder or file, dense or as [`Self::load_with`] gives it, without its weights, which are zero
    /// and take no memory: for counting what it has, and for checking that its files fit its configuration.
    ///
    /// # Errors
    /// As [`Self::load`] and [`Self::load_with`], but for those of the weights' values.
    pub fn outline(
        path: impl AsRef<Path>,
        dtype: DType,
        device: &Device,
        quantization: Option<Quantization>,
    ) -> Result<Self> {
        let mut files = Files::open(path.as_ref(), dtype, device, quantization.into())?;
        files.outlined = Some(0);
        files.build()
    }
}

/// The dtype of a model's files: what its configuration says, or else what its first tensor has; f32 of a GGUF file, whose
/// tensors have several.
///
/// # Errors
/// When the files are missing or malformed.
pub fn stored_dtype(path: impl AsRef<Path>) -> Result<DType> {
    let path = path.as_ref();
    if is_gguf(path) {
        return Ok(DType::F32);
    }
    if let Some(dtype) = Config::load(path)?.dtype {
        return Ok(dtype);
    }
    let weights = Weights::open(path)?;
    match weights.names().next() {
        Some(name) => weights.dtype(name),
        None => Ok(DType::F32),
    }
}

/// How many bytes of a model's folder or GGUF file are of each type, such as `bf16` or `Q4_K`.
///
/// # Errors
/// When the files are missing or malformed.
pub fn stored_bytes(path: impl AsRef<Path>) -> Result<BTreeMap<String, u64>> {
    let path = path.as_ref();
    let mut bytes = BTreeMap::new();
    let mut add = |kind: String, count: usize| *bytes.entry(kind).or_default() += count as u64;
    if is_gguf(path) {
        let file = GgufFile::open(path)?;
        for (kind, shape) in file.names().filter_map(|name| file.describe(name)) {
            add(kind.name().to_string(), kind.tensor_bytes(&shape).unwrap_or_default());
        }
    } else {
        let weights = Weights::open(path)?;
        for name in weights.names() {
            let stored = weights.stored(name)?;
            add(stored.dtype.to_lowercase(), stored.bytes.len());
        }
    }
    Ok(bytes)
}

/// A model's files.
struct Files<'f> {
    path: &'f Path,
    config: Config,
    /// Whether the weights have a head of their own, although the configuration's file says that it is the embedding.
    is_untied: bool,
    weights: Stored,
    holding: Holding,
    dtype: DType,
    device: Device,
    /// Bytes of the weights so far, where they are only outlined.
    outlined: Option<usize>,
}

/// Where a model's weights are.
enum Stored {
    Folder {
        weights: Weights,
        /// How they store matrices.
        checkpoint: Checkpoint,
        /// Of the configuration.
        experts: Option<ExpertsConfig>,
    },
    Gguf {
        file: Box<GgufFile>,
        /// What was asked for.
        read: BTreeSet<String>,
    },
}

impl Stored {
    fn has(&self, name: &str) -> bool {
        match self {
            Self::Folder { weights, checkpoint, .. } => {
                checkpoint.has(weights, name) || self.interleaved(name).is_some()
            }
            Self::Gguf { file, .. } => file.describe(name).is_some(),
        }
    }

    /// Where a weight is one of all experts.
    fn interleaved(&self, name: &str) -> Option<Interleaved> {
        match self {
            Self::Folder { weights, experts: Some(experts), .. } => {
                Interleaved::find(experts, weights, name)
            }
            _ => None,
        }
    }

    /// Whether matrices are in fewer bits.
    fn is_quantized(&self) -> bool {
        match self {
            Self::Folder { checkpoint, .. } => *checkpoint != Checkpoint::Dense,
            Self::Gguf { file, .. } => {
                let kinds = file.names().filter_map(|name| Some(file.describe(name)?.0));
                kinds.into_iter().any(|kind| !kind.is_dense())
            }
        }
    }

    fn read(
        &mut self,
        name: &str,
        shape: &[usize],
        dtype: DType,
        device: &Device,
    ) -> Result<Storage> {
        let interleaved = self.interleaved(name);
        match self {
            Self::Folder { weights, checkpoint, .. } => {
                if let Some(interleaved) = interleaved {
                    return interleaved.read(weights, shape, dtype, device);
                }
                if let [outer, inner] = *shape
                    && let Some(matrix) = checkpoint.matrix(weights, name, (outer, inner))?
                {
                    return Ok(Storage::Quantized(Arc::new(matrix.to_device(device)?)));
                }
                Ok(Storage::Dense(weights.tensor(name, shape, dtype, device)?))
            }
            Self::Gguf { file, read } => {
                read.insert(name.to_string());
                let storage = read_gguf(file, name, shape, dtype, device)?;
                file.release(name);
                Ok(storage)
            }
        }
    }

    /// What of a matrix is cut out, on the CPU.
    fn part(&mut self, name: &str, shape: [usize; 2], cut: &Cut, dtype: DType) -> Result<Storage> {
        if let (Self::Folder { weights, checkpoint, .. }, None) = (&*self, self.interleaved(name)) {
            return match checkpoint.matrix(weights, name, shape.into())? {
                Some(matrix) => cut.weight(name, Storage::Quantized(Arc::new(matrix))),
                None => Ok(Storage::Dense(weights.part(name, shape, cut.of_weight(), dtype)?)),
            };
        }
        cut.weight(name, self.read(name, &shape, dtype, &Device::Cpu)?)
    }

    /// The bytes that a weight in fewer bits takes, of which only the shape is looked at; `None` for a dense one.
    fn outline(&mut self, name: &str, shape: &[usize]) -> Result<Option<usize>> {
        let interleaved = self.interleaved(name);
        match self {
            Self::Folder { weights, checkpoint, .. } => {
                if let Some(interleaved) = interleaved {
                    return interleaved.outline(weights, shape);
                }
                let size = checkpoint.size_in_bytes(weights, name);
                if size.is_none() {
                    weights.outline(name, shape)?;
                }
                Ok(size)
            }
            Self::Gguf { file, read } => {
                read.insert(name.to_string());
                let kind = gguf_kind(file, name, shape)?;
                Ok((!kind.is_dense()).then(|| kind.tensor_bytes(shape)).flatten())
            }
        }
    }

    /// What was not asked for.
    fn unread(&self) -> Vec<&str> {
        match self {
            Self::Folder { weights, .. } => weights.unread(),
            Self::Gguf { file, read } => {
                file.names().filter(|name| !read.contains(*name)).collect()
            }
        }
    }

    /// Whether a tensor has nothing but zeros.
    fn is_zero(&self, name: &str) -> bool {
        let Self::Folder { weights, .. } = self else { return false };
        let Some(shape) = weights.shape(name) else { return false };
        let largest = weights
            .tensor(name, shape, DType::F32, &Device::Cpu)
            .and_then(|numbers| Ok(numbers.abs()?.max_all()?.to_scalar::<f32>()?));
        largest.is_ok_and(|largest| largest == 0.0)
    }

    fn files(&self) -> Vec<PathBuf> {
        match self {
            Self::Folder { weights, .. } => weights.files().map(Path::to_path_buf).collect(),
            Self::Gguf { file, .. } => vec![file.path().to_path_buf()],
        }
    }
}

/// Whether a tensor is the scale of a KV cache in 8 bits.
fn is_of_cache(name: &&str) -> bool {
    ["k_scale", "v_scale", "q_scale", "kv_scale"]
        .iter()
        .any(|scale| name.strip_suffix(scale).is_some_and(|path| path.ends_with('.')))
}

/// How a GGUF file stores a tensor of this shape.
fn gguf_kind(file: &GgufFile, name: &str, shape: &[usize]) -> Result<GgmlType> {
    match file.describe(name) {
        Some((kind, found)) if found == shape => Ok(kind),
        Some((_, found)) => Err(Error::file(
            file.path(),
            format!("tensor {name:?} has shape {found:?}; the metadata ask for {shape:?}"),
        )),
        // With an error that says what it is called there.
        None => Ok(file.tensor(name)?.kind),
    }
}

fn read_gguf(
    file: &GgufFile,
    name: &str,
    shape: &[usize],
    dtype: DType,
    device: &Device,
) -> Result<Storage> {
    let kind = gguf_kind(file, name, shape)?;
    let tensor = file.tensor(name)?;
    let fault = |problem: &str| Error::file(file.path(), format!("tensor {name:?} {problem}"));
    if let Some(dense) = tensor.dense() {
        let dense = dense?.to_dtype(dtype)?;
        if !is_finite(&dense)? {
            return Err(fault("has numbers that are NaN or infinite"));
        }
        return Ok(Storage::Dense(dense.to_device(device)?));
    }
    let blocks = BlockKind::from_name(kind.name()).ok_or_else(|| {
        Error::Unsupported(format!(
            "{}: tensor {name:?} is {kind}; F32, F16, BF16, {} are supported",
            file.path().display(),
            BlockKind::names().join(", ")
        ))
    })?;
    let [outer, inner] = *shape else {
        return Err(fault(&format!("is {kind} of shape {shape:?}, expected a matrix")));
    };
    let matrix = read_blocks(blocks, (outer, inner), &tensor.bytes).map_err(|it| fault(&it))?;
    if !matrix.is_finite()? {
        return Err(fault("has scales that are NaN or infinite"));
    }
    Ok(Storage::Quantized(Arc::new(matrix.to_device(device)?)))
}

impl<'f> Files<'f> {
    fn open(path: &'f Path, dtype: DType, device: &Device, holding: Holding) -> Result<Self> {
        let quantization = holding.quantization;
        let (config, weights) = if is_gguf(path) {
            let file = Box::new(GgufFile::open(path)?);
            (file.config().clone(), Stored::Gguf { file, read: BTreeSet::new() })
        } else {
            let config = Config::load(path)?;
            let mut checkpoint = Checkpoint::of(&config.raw)
                .map_err(|problem| Error::file(path.join("config.json"), problem))?;
            let mut weights = Weights::open(path)?.check_finite(true);
            if let Some(experts) = &config.experts {
                experts::unstack(experts, &mut weights, &mut checkpoint)?;
            }
            let experts = config.experts;
            let has_files = experts.is_some_and(|experts| experts.names.stacked.interleaved);
            if checkpoint == Checkpoint::Mxfp4 && !has_files {
                let problem = format!(
                    "quantization_config: quant_method is \"mxfp4\", which is read of gpt-oss alone; model_type is {:?}",
                    config.architecture.model_type()
                );
                return Err(Error::file(path.join("config.json"), problem));
            }
            (config, Stored::Folder { weights, checkpoint, experts })
        };
        if let (Some(quantization), true) = (quantization, weights.is_quantized()) {
            let path = path.display();
            return Err(
                quantization.error(format!("but the weights of {path} are quantised already"))
            );
        }
        if let Some(quantization) = quantization {
            quantization.check_device(device)?;
        }
        let device = device.clone();
        let (is_untied, outlined) = (false, None);
        let mut files = Self { path, config, is_untied, weights, holding, dtype, device, outlined };
        if files.config.tie_word_embeddings && files.has_own_head()? {
            files.is_untied = true;
            files.config.untie();
        }
        Ok(files)
    }

    /// Whether there is a head that isn't the embedding once more, of which all parts would be the same.
    fn has_own_head(&self) -> Result<bool> {
        let Stored::Folder { weights, .. } = &self.weights else { return Ok(false) };
        let [head, embedding] = [Model::HEAD, Model::EMBEDDING].map(|it| format!("{it}.weight"));
        if !self.weights.has(&head) {
            return Ok(false);
        }
        let [head, embedding] =
            [&head, self.stored_name(&embedding)].map(|name| name.trim_end_matches("weight"));
        for name in weights.names() {
            let Some(part) = name.strip_prefix(head).filter(|part| *part != "bias") else {
                continue;
            };
            let embedding = format!("{embedding}{part}");
            if !weights.contains(&embedding) {
                return Ok(true);
            }
            let (head, embedding) = (weights.stored(name)?, weights.stored(&embedding)?);
            if (head.dtype, head.shape, head.bytes)
                != (embedding.dtype, embedding.shape, embedding.bytes)
            {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn build(mut self) -> Result<Model> {
        let (config, dtype, device) = (self.config.clone(), self.dtype, self.device.clone());
        let holding = match self.outlined {
            None => self.holding.clone(),
            Some(_) => Holding::default(),
        };
        if self.outlined.is_none() && self.is_untied {
            tracing::warn!(
                "{}: the weights have a head that differs from the embedding, although config.json has \
                 \"tie_word_embeddings\": true. The head is read, as transformers does",
                self.path.display()
            );
        }
        let mut model = Model::build(config, dtype, &device, holding, &mut self)?;
        model.files = self.weights.files();
        model.outlined = self.outlined;
        // Written by some tools although they can be derived or, with tied embeddings, are the embedding again.
        let is_again =
            |name: &&str| name.ends_with("rotary_emb.inv_freq") || name.contains(Model::HEAD);
        let mut unread: Vec<&str> =
            self.weights.unread().into_iter().filter(|name| !is_again(name)).collect();
        let all = unread.len();
        unread.retain(|name| !is_of_cache(name));
        if unread.len() < all {
            tracing::warn!(
                "{}: the scales of a KV cache in 8 bits are left alone: a cache has scales of its own here",
                self.path.display()
            );
        }
        // Programs for GPTQ gave each matrix one.
        unread.retain(|name| !(name.ends_with(".bias") && self.weights.is_zero(name)));
        if let Some(first) = unread.first() {
            return Err(Error::file(
                self.path,
                format!(
                    "{} tensors of the checkpoint, such as `{first}`, belong to no part of a {} \
                     model as its config.json describes it",
                    unread.len(),
                    model.config.architecture.model_type(),
                ),
            ));
        }
        Ok(model)
    }

    /// What a weight is called there: a checkpoint of the decoder without its head has no `model.` before its names.
    fn stored_name<'n>(&self, name: &'n str) -> &'n str {
        let bare = name.strip_prefix("model.");
        bare.filter(|bare| !self.weights.has(name) && self.weights.has(bare)).unwrap_or(name)
    }

    /// In the place of a weight zeros that take no memory, and how many bytes it would take.
    fn outline(&mut self, name: &str, shape: &[usize], kind: Kind) -> Result<(Storage, usize)> {
        let zeros = Tensor::zeros((), self.dtype, &self.device)?.broadcast_as(shape)?;
        let elements = shape.iter().product::<usize>();
        let quantized =
            || self.holding.quantization.and_then(|it| it.size_in_bytes(kind, elements));
        let size = match self.weights.outline(name, shape)? {
            Some(size) => size,
            None => quantized().unwrap_or(elements * self.dtype.size_in_bytes()),
        };
        Ok((Storage::Dense(zeros), size))
    }
}

impl Source for Files<'_> {
    fn part(&mut self, name: &str, shape: [usize; 2], cut: &Cut) -> Result<Storage> {
        let name = self.stored_name(name);
        self.weights.part(name, shape, cut, self.dtype)
    }

    fn weight(
        &mut self,
        name: &str,
        shape: &[usize],
        kind: Kind,
        device: &Device,
    ) -> Result<Storage> {
        let name = self.stored_name(name);
        match self.outlined {
            None => self.weights.read(name, shape, self.dtype, device),
            Some(before) => {
                let (storage, size) = self.outline(name, shape, kind)?;
                self.outlined = Some(before + size);
                Ok(storage)
            }
        }
    }
}
