//! Models from files: a folder with `config.json` and safetensors, dense or quantised.

use super::formats::checkpoint::Checkpoint;
use super::layer::{Kind, Source};
use super::weight::Storage;
use super::{Config, Model, Quantization, Weights};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use std::path::Path;
use std::sync::Arc;

impl Model {
    /// Reads a model from a folder with `config.json` and safetensors, as `dtype` on `device`. Matrices that are
    /// stored in fewer bits are held as they are, and `dtype` is what they are computed in.
    ///
    /// # Errors
    /// For a file that is missing or malformed, a tensor of another shape than the configuration
    /// asks for or with a NaN in it, and an architecture or a quantisation that is not supported.
    pub fn load(folder: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        Files::open(folder.as_ref(), dtype, device, None)?.build()
    }

    /// As [`Self::load`], with dense weights brought into fewer bits, one after the other.
    ///
    /// # Errors
    /// As [`Self::load`], and when a weight has a size that the format can't hold, or is quantised already.
    pub fn load_quantized(
        folder: impl AsRef<Path>,
        dtype: DType,
        device: &Device,
        quantization: Quantization,
    ) -> Result<Self> {
        Files::open(folder.as_ref(), dtype, device, Some(quantization))?.build()
    }

    /// The model of a folder, dense or as [`Self::load_quantized`] gives it, without its weights, which are zero
    /// and take no memory: for counting what it has, and for checking that its files fit its configuration.
    ///
    /// # Errors
    /// As [`Self::load`] and [`Self::load_quantized`], but for those of the weights' values.
    pub fn outline(
        folder: impl AsRef<Path>,
        dtype: DType,
        device: &Device,
        quantization: Option<Quantization>,
    ) -> Result<Self> {
        let mut files = Files::open(folder.as_ref(), dtype, device, quantization)?;
        files.outlined = Some(0);
        files.build()
    }
}

/// A model's files.
struct Files<'f> {
    folder: &'f Path,
    config: Config,
    weights: Weights,
    /// How they store matrices.
    checkpoint: Checkpoint,
    /// What dense ones are brought into.
    quantization: Option<Quantization>,
    dtype: DType,
    device: Device,
    /// Bytes of the weights so far, where they are only outlined.
    outlined: Option<usize>,
}

impl<'f> Files<'f> {
    fn open(
        folder: &'f Path,
        dtype: DType,
        device: &Device,
        quantization: Option<Quantization>,
    ) -> Result<Self> {
        let config = Config::load(folder)?;
        let checkpoint = Checkpoint::of(&config.raw)
            .map_err(|problem| Error::file(folder.join("config.json"), problem))?;
        if let (Some(quantization), true) = (quantization, checkpoint != Checkpoint::Dense) {
            let folder = folder.display();
            return Err(Error::option(
                "quantize",
                format!("is {quantization}, but the weights of {folder} are quantised already"),
            ));
        }
        let weights = Weights::open(folder)?.check_finite(true);
        let device = device.clone();
        Ok(Self {
            folder,
            config,
            weights,
            checkpoint,
            quantization,
            dtype,
            device,
            outlined: None,
        })
    }

    fn build(mut self) -> Result<Model> {
        let (config, dtype, device) = (self.config.clone(), self.dtype, self.device.clone());
        let quantization = self.quantization.filter(|_| self.outlined.is_none());
        let mut model = Model::build(config, dtype, &device, quantization, &mut self)?;
        model.files = self.weights.files().map(Path::to_path_buf).collect();
        model.outlined = self.outlined;
        let unread: Vec<&str> = self
            .weights
            .unread()
            .into_iter()
            // Written by some tools although they can be derived or, with tied embeddings, are
            // the embedding again.
            .filter(|name| {
                !name.ends_with("rotary_emb.inv_freq")
                    && !["weight", "scales", "biases"].iter().any(|part| {
                        name.strip_suffix(part).is_some_and(|it| it.ends_with("lm_head."))
                    })
            })
            .collect();
        if let Some(first) = unread.first() {
            return Err(Error::file(
                self.folder,
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

    /// In the place of a weight zeros that take no memory, and how many bytes it would take.
    fn outline(&self, name: &str, shape: &[usize], kind: Kind) -> Result<(Storage, usize)> {
        let zeros = Tensor::zeros((), self.dtype, &self.device)?.broadcast_as(shape)?;
        let size = match self.checkpoint.size_in_bytes(&self.weights, name) {
            Some(size) => size,
            None => {
                self.weights.outline(name, shape)?;
                let elements = shape.iter().product::<usize>();
                let quantized = self.quantization.and_then(|it| it.size_in_bytes(kind, elements));
                quantized.unwrap_or(elements * self.dtype.size_in_bytes())
            }
        };
        Ok((Storage::Dense(zeros), size))
    }

    fn read(&self, name: &str, shape: &[usize], device: &Device) -> Result<Storage> {
        if let [outer, inner] = *shape
            && let Some(matrix) = self.checkpoint.matrix(&self.weights, name, (outer, inner))?
        {
            return Ok(Storage::Quantized(Arc::new(matrix.to_device(device)?)));
        }
        Ok(Storage::Dense(self.weights.tensor(name, shape, self.dtype, device)?))
    }
}

impl Source for Files<'_> {
    fn weight(
        &mut self,
        name: &str,
        shape: &[usize],
        kind: Kind,
        device: &Device,
    ) -> Result<Storage> {
        // A checkpoint of the decoder without its head has no `model.` before its names.
        let bare = name.strip_prefix("model.").filter(|bare| {
            !self.checkpoint.has(&self.weights, name) && self.checkpoint.has(&self.weights, bare)
        });
        let name = bare.unwrap_or(name);
        match self.outlined {
            None => self.read(name, shape, device),
            Some(before) => {
                let (storage, size) = self.outline(name, shape, kind)?;
                self.outlined = Some(before + size);
                Ok(storage)
            }
        }
    }
}
