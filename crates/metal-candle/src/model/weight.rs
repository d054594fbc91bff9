//! The frozen weights of a model, apart from the structure that uses them.

use super::layer::Kind;
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor};
use metal_candle_kernels::quantized::{Quantized, Weight};
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
    /// Not at all: they were moved into an adapter that trains every weight.
    Moved(Shape),
}

impl Storage {
    fn shape(&self) -> Shape {
        match self {
            Self::Dense(tensor) => tensor.shape().clone(),
            Self::Quantized(quantized) => quantized.shape().into(),
            Self::Moved(shape) => shape.clone(),
        }
    }

    /// The values, unless they were moved into an adapter.
    pub fn held(&self) -> Option<Weight<'_>> {
        match self {
            Self::Dense(tensor) => Some(Weight::Dense(tensor)),
            Self::Quantized(quantized) => Some(Weight::Quantized(quantized)),
            Self::Moved(_) => None,
        }
    }
}

/// A weight.
#[derive(Clone, Debug)]
struct Named {
    /// In a checkpoint.
    name: String,
    kind: Kind,
    storage: Storage,
}

/// All weights of a model, in the order in which it was built.
#[derive(Clone, Debug)]
pub(crate) struct FrozenWeights {
    weights: Vec<Named>,
    /// What those in fewer bits are computed with.
    dtype: DType,
}

impl FrozenWeights {
    /// None yet, of a model in `dtype`.
    pub fn new(dtype: DType) -> Self {
        Self { weights: Vec::new(), dtype }
    }

    /// Adds a weight under its name in a checkpoint.
    pub fn push(&mut self, name: String, kind: Kind, storage: Storage) -> WeightId {
        self.weights.push(Named { name, kind, storage });
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
    /// When they were moved into an adapter.
    pub fn get(&self, id: WeightId) -> Result<Weight<'_>> {
        self.storage(id).held().ok_or_else(|| {
            let name = self.name(id);
            Error::option(
                "adapter",
                format!("is missing: the values of `{name}` were moved into an adapter"),
            )
        })
    }

    /// Its values as they are, or in the model's dtype where they are held in fewer bits.
    ///
    /// # Errors
    /// As [`Self::get`], and when there is no memory.
    pub fn dense(&self, id: WeightId) -> Result<Cow<'_, Tensor>> {
        Ok(self.get(id)?.to_dense(self.dtype)?)
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

    /// Frees all values.
    pub fn clear(&mut self) {
        for Named { storage, .. } in &mut self.weights {
            *storage = Storage::Moved(storage.shape());
        }
    }
}
