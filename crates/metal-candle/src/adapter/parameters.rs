//! The parameters of an adapter: every trainable tensor as a view of one flat f32 buffer.

use crate::autograd::ParameterId;
use crate::hash::Hash;
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use metal_candle_kernels::copy;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

/// One trainable tensor.
#[derive(Clone, Debug)]
pub struct Entry {
    /// Its name in the model, such as `model.layers.0.self_attn.q_proj.lora_A`.
    pub name: String,
    /// Its shape.
    pub shape: Shape,
    /// Where it starts in the flat buffer, in elements.
    pub offset: usize,
}

impl Entry {
    /// Its part of a flat buffer `(len)` in this layout, as a view.
    pub fn of(&self, buffer: &Tensor) -> Result<Tensor> {
        let flat = buffer.narrow(0, self.offset, self.shape.elem_count())?;
        Ok(flat.reshape(self.shape.clone())?)
    }
}

/// The values of all trainable tensors, a flat f32 buffer with named views, so that the optimiser, the
/// norm and the clipping are one pass each.
///
/// Tensors with two or more dimensions come first: weight decay applies to them and not to biases
/// and norms.
#[derive(Debug)]
pub struct Parameters {
    values: Tensor,
    entries: Vec<Entry>,
    decayed: usize,
    generation: AtomicU64,
}

impl Parameters {
    /// Lays out zeroed parameters of the given names and shapes and returns the id of each, in
    /// the order given.
    pub fn new(
        parameters: &[(String, Shape)],
        device: &Device,
    ) -> Result<(Self, Vec<ParameterId>)> {
        let mut names = BTreeMap::new();
        for (index, (name, _)) in parameters.iter().enumerate() {
            if names.insert(name, index).is_some() {
                return Err(Error::option("parameters", format!("`{name}` is named twice")));
            }
        }
        let (entries, ids) = Self::layout(parameters);
        let count = |entry: &Entry| entry.shape.elem_count();
        let len = entries.iter().map(count).sum::<usize>();
        let decayed = entries.iter().filter(|entry| entry.shape.rank() >= 2).map(count).sum();
        let values = Tensor::zeros(len, DType::F32, device)?;
        let generation = AtomicU64::new(0);
        Ok((Self { values, entries, decayed, generation }, ids))
    }

    /// How parameters of these names and shapes are laid out, and the id of each, in the order given.
    pub fn layout(parameters: &[(String, Shape)]) -> (Vec<Entry>, Vec<ParameterId>) {
        let mut order: Vec<usize> = (0..parameters.len()).collect();
        order.sort_by_key(|&index| parameters[index].1.rank() < 2);
        let mut ids = vec![ParameterId(0); parameters.len()];
        let mut entries = Vec::with_capacity(parameters.len());
        let mut offset = 0;
        for index in order {
            let (name, shape) = &parameters[index];
            ids[index] = ParameterId(entries.len());
            entries.push(Entry { name: name.clone(), shape: shape.clone(), offset });
            offset += shape.elem_count();
        }
        (entries, ids)
    }

    /// How many numbers are trained.
    pub fn len(&self) -> usize {
        self.values.elem_count()
    }

    /// Whether nothing is trained.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All parameters, `(len)` in f32.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// A hash of all values as they are now (XXH3).
    pub fn fingerprint(&self) -> Result<u64> {
        let mut hash = Hash::new();
        let values = self.values.to_device(&Device::Cpu)?.to_vec1::<f32>()?;
        values.iter().for_each(|value| hash.add(&value.to_le_bytes()));
        Ok(hash.finish())
    }

    /// A number that is another one after every change of the values, by which what follows from them is known
    /// to be out of date.
    pub(crate) fn generation(&self) -> u64 {
        self.generation.load(Ordering::Relaxed)
    }

    /// To be called by whoever changes [`Self::values`] otherwise than by [`Self::set`].
    pub fn changed(&self) {
        self.generation.fetch_add(1, Ordering::Relaxed);
    }

    /// How many of the leading elements weight decay applies to.
    pub fn decayed(&self) -> usize {
        self.decayed
    }

    /// The layout, in the order of the buffer.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The parameter `id` as a view: it shares the buffer and sees every later update.
    pub fn view(&self, id: ParameterId) -> Result<Tensor> {
        self.entry(id)?.of(&self.values)
    }

    /// Overwrites the parameter `id` with `value` of the same shape, in any float dtype.
    pub fn set(&self, id: ParameterId, value: &Tensor) -> Result<()> {
        let entry = self.entry(id)?;
        if value.shape() != &entry.shape {
            return Err(Error::option(
                &entry.name,
                format!("has shape {:?}, expected {:?}", value.dims(), entry.shape.dims()),
            ));
        }
        let flat = copy::cast(value, DType::F32)?.contiguous()?.flatten_all()?;
        copy::write(&self.values, &flat, 0, entry.offset)?;
        self.changed();
        Ok(())
    }

    /// Where the parameter `id` lies.
    pub fn entry(&self, id: ParameterId) -> Result<&Entry> {
        self.entries.get(id.0).ok_or_else(|| {
            Error::option("parameter", format!("{} of {} does not exist", id.0, self.entries.len()))
        })
    }
}
