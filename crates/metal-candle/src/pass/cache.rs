//! The KV cache: the keys and values of the tokens a model has read.

use crate::{Error, Result};
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

    /// How many tokens the buffers have room for.
    pub(crate) fn room(&self) -> usize {
        self.layers.iter().map(LayerCache::room).min().unwrap_or(0)
    }

    /// Makes room for `tokens` tokens, in buffers that hold some already.
    pub(crate) fn reserve(&mut self, tokens: usize) -> Result<()> {
        for layer in &mut self.layers {
            for full in [&mut layer.keys, &mut layer.values].into_iter().flatten() {
                *full = with_room(full, layer.length, tokens)?;
            }
        }
        Ok(())
    }

    /// Counts tokens that [`LayerCache::write_at`] has written.
    pub(crate) fn advance(&mut self, tokens: usize) {
        for layer in &mut self.layers {
            layer.length += tokens;
        }
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

    /// Writes the keys and values of new tokens behind those of `before` `(1)` tokens, without counting
    /// them, and returns the whole buffers.
    pub fn write_at(
        &self,
        keys: &Tensor,
        values: &Tensor,
        before: &Tensor,
    ) -> Result<(Tensor, Tensor)> {
        let (Some(all_keys), Some(all_values)) = (&self.keys, &self.values) else {
            return Err(Error::option("cache", "is empty; expected one with room"));
        };
        copy::write_both_at([all_keys, all_values], [keys, values], 1, before)?;
        Ok((all_keys.clone(), all_values.clone()))
    }

    fn room(&self) -> usize {
        let room = |buffer: &Option<Tensor>| buffer.as_ref().map_or(0, |full| full.dims()[1]);
        room(&self.keys).min(room(&self.values))
    }
}

/// The buffer, with room for the new tokens after `length`.
fn grow(buffer: &mut Option<Tensor>, new: &Tensor, length: usize) -> Result<Tensor> {
    let needed = length + new.dim(1)?;
    let full = match buffer {
        Some(full) => with_room(full, length, needed)?,
        None => empty(new, needed)?,
    };
    // Until here the old buffer stays, as there may be no memory for another.
    *buffer = Some(full.clone());
    Ok(full)
}

/// A buffer with room for `needed` tokens and the first `length` tokens of `full`, which is that buffer if
/// it has room.
fn with_room(full: &Tensor, length: usize, needed: usize) -> Result<Tensor> {
    if full.dim(1)? >= needed {
        return Ok(full.clone());
    }
    let larger = empty(full, needed)?;
    if length > 0 {
        copy::write(&larger, &full.narrow(1, 0, length)?, 1, 0)?;
    }
    Ok(larger)
}

/// A buffer for at least `needed` tokens like those of `tokens`.
fn empty(tokens: &Tensor, needed: usize) -> Result<Tensor> {
    let (batch, _, heads, width) = tokens.dims4()?;
    let capacity = needed.next_power_of_two().max(64);
    Ok(Tensor::zeros((batch, capacity, heads, width), tokens.dtype(), tokens.device())?)
}
