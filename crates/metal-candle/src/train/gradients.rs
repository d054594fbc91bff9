//! The gradients of an adapter's parameters, which whoever trains it owns.

use crate::Error;
use crate::Result;
use crate::adapter::{Entry, Parameters};
use crate::autograd::{GradientSink, ParameterId, TableGradient};
use candle_core::{DType, Tensor};
use metal_candle_kernels::{embedding, flat};

/// One flat f32 buffer in the layout of the [`Parameters`], to which a backward pass adds.
#[derive(Debug)]
pub struct Gradients {
    buffer: Tensor,
    entries: Vec<Entry>,
}

impl Gradients {
    /// Zeros for all of the parameters.
    pub fn new(parameters: &Parameters) -> Result<Self> {
        let buffer = Tensor::zeros(parameters.len(), DType::F32, parameters.values().device())?;
        Ok(Self { buffer, entries: parameters.entries().to_vec() })
    }

    /// All gradients, `(len)` in f32.
    pub fn buffer(&self) -> &Tensor {
        &self.buffer
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.buffer.elem_count()
    }

    /// What lies where in it.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The gradient of the parameter `id`, as a view.
    pub fn view(&self, id: ParameterId) -> Result<Tensor> {
        let entry = self.entries.get(id.0).ok_or_else(|| {
            Error::option("parameter", format!("{} of {} does not exist", id.0, self.entries.len()))
        })?;
        entry.of(&self.buffer)
    }

    /// Sets every gradient to zero.
    pub fn clear(&self) -> Result<()> {
        Ok(flat::fill_zero(&self.buffer)?)
    }
}

/// Adds each contribution to the buffer.
impl GradientSink for &Gradients {
    fn accept(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        Ok(flat::accumulate(&self.view(id)?, &gradient, 1.0)?)
    }

    fn accept_rows(&mut self, id: ParameterId, gradient: TableGradient) -> Result<()> {
        Ok(embedding::accumulate(&self.view(id)?, &gradient.rows, &gradient.ids)?)
    }
}
