//! The frozen weights of a model, apart from the structure that uses them.

use crate::{Error, Result};
use candle_core::{Shape, Tensor};

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
    /// Not at all: they were moved into an adapter that trains every weight.
    Moved(Shape),
}

impl Storage {
    fn shape(&self) -> &Shape {
        match self {
            Self::Dense(tensor) => tensor.shape(),
            Self::Moved(shape) => shape,
        }
    }
}

/// All weights of a model, in the order in which it was built.
#[derive(Clone, Debug, Default)]
pub(crate) struct FrozenWeights {
    weights: Vec<(String, Storage)>,
}

impl FrozenWeights {
    /// Adds a weight under its name in a checkpoint.
    pub fn push(&mut self, name: String, tensor: Tensor) -> WeightId {
        self.weights.push((name, Storage::Dense(tensor)));
        WeightId(self.weights.len() - 1)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.weights.len()
    }

    /// Its name in a checkpoint.
    pub fn name(&self, id: WeightId) -> &str {
        &self.weights[id.0].0
    }

    /// Its shape.
    pub fn shape(&self, id: WeightId) -> &Shape {
        self.weights[id.0].1.shape()
    }

    /// Its values.
    ///
    /// # Errors
    /// When they were moved into an adapter.
    pub fn tensor(&self, id: WeightId) -> Result<&Tensor> {
        match &self.weights[id.0] {
            (_, Storage::Dense(tensor)) => Ok(tensor),
            (name, Storage::Moved(_)) => Err(Error::option(
                "adapter",
                format!("is missing: the values of `{name}` were moved into an adapter"),
            )),
        }
    }

    /// Its values, unless they were moved into an adapter.
    pub fn held(&self, id: WeightId) -> Option<&Tensor> {
        match &self.weights[id.0].1 {
            Storage::Dense(tensor) => Some(tensor),
            Storage::Moved(_) => None,
        }
    }

    /// Takes its values out, until [`Self::set`] gives it others.
    ///
    /// # Errors
    /// As [`Self::tensor`].
    pub fn take(&mut self, id: WeightId) -> Result<Tensor> {
        let tensor = self.tensor(id)?.clone();
        self.weights[id.0].1 = Storage::Moved(tensor.shape().clone());
        Ok(tensor)
    }

    /// Gives a weight other values.
    pub fn set(&mut self, id: WeightId, tensor: Tensor) {
        self.weights[id.0].1 = Storage::Dense(tensor);
    }

    /// Frees all values.
    pub fn clear(&mut self) {
        for (_, storage) in &mut self.weights {
            *storage = Storage::Moved(storage.shape().clone());
        }
    }
}
