//! The KV cache: the keys and values of the tokens a model has read.

use crate::Result;
use candle_core::Tensor;
use metal_candle_kernels::copy;

/// Keys and values of every layer, each `(batch, tokens, kv_heads, head_dim)`, in buffers that
/// double when they are full.
#[derive(Debug)]
pub struct KvCache {
    pub(crate) layers: Vec<LayerCache>,
}

#[derive(Debug, Default)]
pub(crate) struct LayerCache {
    keys: Option<Tensor>,
    values: Option<Tensor>,
    length: usize,
}

impl KvCache {
    /// An empty cache for a model of `layers` layers.
    pub fn new(layers: usize) -> Self {
        Self { layers: (0..layers).map(|_| LayerCache::default()).collect() }
    }

    /// How many tokens are held.
    pub fn len(&self) -> usize {
        // A forward pass that failed halfway leaves the later layers behind.
        self.layers.iter().map(|layer| layer.length).min().unwrap_or(0)
    }

    /// Whether nothing is held.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets every token after the first `length` and keeps the buffers.
    pub fn truncate(&mut self, length: usize) {
        for layer in &mut self.layers {
            layer.length = layer.length.min(length);
        }
    }
}

impl LayerCache {
    /// Adds the keys and values of new tokens and returns those of all tokens.
    pub fn append(&mut self, keys: &Tensor, values: &Tensor) -> Result<(Tensor, Tensor)> {
        let (start, length) = (self.length, self.length + keys.dim(1)?);
        let all_keys = grow(&mut self.keys, keys, start)?;
        let all_values = grow(&mut self.values, values, start)?;
        copy::write_both([&all_keys, &all_values], [keys, values], 1, start)?;
        self.length = length;
        Ok((all_keys.narrow(1, 0, length)?, all_values.narrow(1, 0, length)?))
    }
}

/// The buffer, with room for the new tokens after `length`.
fn grow(buffer: &mut Option<Tensor>, new: &Tensor, length: usize) -> Result<Tensor> {
    let (batch, added, heads, width) = new.dims4()?;
    let needed = length + added;
    let full = match buffer.take() {
        Some(full) if full.dim(1)? >= needed => full,
        old => {
            let capacity = needed.next_power_of_two().max(64);
            let larger = Tensor::zeros((batch, capacity, heads, width), new.dtype(), new.device())?;
            if let Some(old) = old.filter(|_| length > 0) {
                copy::write(&larger, &old.narrow(1, 0, length)?, 1, 0)?;
            }
            larger
        }
    };
    *buffer = Some(full.clone());
    Ok(full)
}
