//! The frozen weights of a model, apart from the structure that uses them.

use super::layer::Kind;
use super::placement::{Away, Shards};
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use metal_candle_kernels::copy;
use metal_candle_kernels::quantized::{Arithmetic, Quantized, Weight};
use std::borrow::Cow;
use std::sync::Arc;

/// Names one of a model's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WeightId(usize);

impl WeightId {
    /// Its place among the model's weights.
    pub fn index(self) -> usize {
        self.0
    }
}

/// How the values of a weight are held.
#[derive(Clone, Debug)]
pub(crate) enum Storage {
    /// As they are, in the model's dtype.
    Dense(Tensor),
    /// In fewer bits.
    Quantized(Arc<Quantized>),
    /// Elsewhere, but while their layer is computed.
    Absent(Arc<Absent>),
    /// Not at all: they were moved into an adapter that trains every weight.
    Moved(Shape),
    /// In parts, with tensor-parallel ranks.
    InParts(Shape),
}

/// A matrix that is elsewhere.
#[derive(Debug)]
pub(crate) struct Absent {
    /// Whose it is.
    pub layer: usize,
    pub shape: Shape,
    pub is_quantized: bool,
    /// What it takes.
    pub bytes: usize,
    /// What [`sample`] gives of it.
    pub sample: Vec<u8>,
}

/// What tells a weight from others, for the fingerprint of a model: the beginning of its values. It comes to the host by
/// itself, as all that a view is a view of would come from a Metal device.
pub(crate) fn sample(weight: &Weight<'_>) -> Result<Vec<u8>> {
    const SAMPLE: usize = 256;
    let mut bytes = Vec::new();
    match weight {
        Weight::Dense(tensor) => {
            let flat = tensor.flatten_all()?;
            let sample = flat.narrow(0, 0, SAMPLE.min(flat.elem_count()))?.force_contiguous()?;
            for value in copy::cast(&sample, DType::F32)?.to_vec1::<f32>()? {
                bytes.extend_from_slice(&value.to_le_bytes());
            }
        }
        Weight::Quantized(quantized) => {
            bytes.extend_from_slice(
                format!("{:?} {}", quantized.levels(), quantized.group()).as_bytes(),
            );
            if quantized.arithmetic() != Arithmetic::Float {
                bytes.extend_from_slice(format!("{:?}", quantized.arithmetic()).as_bytes());
            }
            let codes = quantized.codes();
            let sample = codes.narrow(0, 0, SAMPLE.min(codes.elem_count()))?.force_contiguous()?;
            bytes.extend_from_slice(&sample.to_vec1::<u8>()?);
        }
    }
    Ok(bytes)
}

impl Storage {
    fn shape(&self) -> Shape {
        match self {
            Self::Dense(tensor) => tensor.shape().clone(),
            Self::Quantized(quantized) => quantized.shape().into(),
            Self::Absent(absent) => absent.shape.clone(),
            Self::Moved(shape) | Self::InParts(shape) => shape.clone(),
        }
    }

    /// The values on this device.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        Ok(match self {
            Self::Dense(tensor) => Self::Dense(tensor.to_device(device)?),
            Self::Quantized(quantized) => Self::Quantized(Arc::new(quantized.to_device(device)?)),
            elsewhere => elsewhere.clone(),
        })
    }

    /// The values, unless they are elsewhere or were moved into an adapter.
    pub fn held(&self) -> Option<Weight<'_>> {
        match self {
            Self::Dense(tensor) => Some(Weight::Dense(tensor)),
            Self::Quantized(quantized) => Some(Weight::Quantized(quantized)),
            Self::Absent(_) | Self::Moved(_) | Self::InParts(_) => None,
        }
    }
}

/// A weight.
#[derive(Clone, Debug)]
struct Named {
    /// In a checkpoint.
    name: Arc<str>,
    kind: Kind,
    storage: Storage,
}

/// All weights of a model, in the order in which it was built.
#[derive(Clone, Debug)]
pub(crate) struct FrozenWeights {
    weights: Vec<Named>,
    /// What those in fewer bits are computed with.
    dtype: DType,
    /// Those that are elsewhere.
    away: Option<Arc<Away>>,
}

impl FrozenWeights {
    /// None yet, of a model in `dtype`.
    pub fn new(dtype: DType) -> Self {
        Self { weights: Vec::new(), dtype, away: None }
    }

    /// Adds a weight under its name in a checkpoint.
    pub fn push(&mut self, name: String, kind: Kind, storage: Storage) -> WeightId {
        self.weights.push(Named { name: name.into(), kind, storage });
        WeightId(self.weights.len() - 1)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.weights.len()
    }

    /// Its name in a checkpoint.
    pub fn name(&self, id: WeightId) -> &str {
        &self.weights[id.0].name
    }

    /// What it is for.
    pub fn kind(&self, id: WeightId) -> Kind {
        self.weights[id.0].kind
    }

    /// Its shape.
    pub fn shape(&self, id: WeightId) -> Shape {
        self.weights[id.0].storage.shape()
    }

    /// How its values are held.
    pub fn storage(&self, id: WeightId) -> &Storage {
        &self.weights[id.0].storage
    }

    /// Its values.
    ///
    /// # Errors
    /// When they are elsewhere, in parts, or were moved into an adapter.
    pub fn get(&self, id: WeightId) -> Result<Weight<'_>> {
        let storage = self.storage(id);
        storage.held().ok_or_else(|| {
            let name = self.name(id);
            match storage {
                Storage::Absent(_) => Error::option(
                    "base_placement",
                    format!(
                        "keeps `{name}` elsewhere, and this needs all of the model on its device"
                    ),
                ),
                Storage::InParts(_) => Error::option(
                    "tensor_parallel",
                    format!("has `{name}` in parts on several devices, and this needs it whole"),
                ),
                _ => Error::option(
                    "adapter",
                    format!("is missing: the values of `{name}` were moved into an adapter"),
                ),
            }
        })
    }

    /// Its values as they are, or in the model's dtype where they are held in fewer bits. Those that are elsewhere are
    /// brought, for which all processes that have parts of them call this.
    ///
    /// # Errors
    /// When they were moved into an adapter, and when there is no memory.
    pub fn dense(&self, id: WeightId) -> Result<Cow<'_, Tensor>> {
        if let (Storage::Absent(absent), Some(away)) = (self.storage(id), &self.away) {
            let brought = away.bring(absent.layer, None)?;
            let found = brought.iter().find(|(other, _)| *other == id);
            if let Some(weight) = found.and_then(|(_, storage)| storage.held()) {
                return Ok(Cow::Owned(weight.to_dense(self.dtype)?.into_owned()));
            }
        }
        Ok(self.get(id)?.to_dense(self.dtype)?)
    }

    /// That matrices are kept there from now on.
    pub fn keep_away(&mut self, away: Away) {
        self.away = Some(Arc::new(away));
    }

    /// Whether matrices are elsewhere.
    pub fn are_away(&self) -> bool {
        self.away.is_some()
    }

    /// The processes that have parts of them, where they do.
    pub fn shards(&self) -> Option<&Arc<dyn Shards>> {
        self.away.as_ref()?.shards()
    }

    /// These with the matrices of a layer, where they are elsewhere; `next` is the layer that will follow.
    pub fn with_layer(&self, layer: usize, next: Option<usize>) -> Result<Option<Self>> {
        let Some(away) = &self.away else { return Ok(None) };
        let mut weights = self.clone();
        for (id, storage) in away.bring(layer, next)?.iter() {
            weights.set(*id, storage.clone());
        }
        Ok(Some(weights))
    }

    /// Takes its values out as [`Self::dense`] gives them, until [`Self::set`] gives it others.
    ///
    /// # Errors
    /// As [`Self::dense`].
    pub fn take(&mut self, id: WeightId) -> Result<Tensor> {
        let tensor = self.dense(id)?.into_owned();
        self.weights[id.0].storage = Storage::Moved(tensor.shape().clone());
        Ok(tensor)
    }

    /// Gives a weight other values.
    pub fn set(&mut self, id: WeightId, storage: Storage) {
        self.weights[id.0].storage = storage;
    }

    /// That all values are here from now on, or in an adapter.
    pub fn keep_here(&mut self) {
        self.away = None;
    }

    /// Frees all values.
    pub fn clear(&mut self) {
        self.keep_here();
        for Named { storage, .. } in &mut self.weights {
            *storage = Storage::Moved(storage.shape());
        }
    }
}
