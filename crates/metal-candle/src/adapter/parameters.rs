//! The parameters of an adapter: every trainable tensor as a view of one flat f32 buffer.

use super::partition::{Kept, Partition};
use crate::autograd::ParameterId;
use crate::hash::Hash;
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use metal_candle_kernels::{copy, host};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
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
    /// Where it lies in the flat buffer, in elements.
    pub fn range(&self) -> Range<usize> {
        self.offset..self.offset + self.shape.elem_count()
    }

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
///
/// Where several processes have a part of every matrix each (`Placement::Sharded` in full fine-tuning), the buffer has that,
/// and then all vectors; what is said of all parameters, their number and where they lie, is as without parts.
#[derive(Debug)]
pub struct Parameters {
    values: Tensor,
    entries: Vec<Entry>,
    len: usize,
    decayed: usize,
    partition: Option<Arc<Partition>>,
    generation: AtomicU64,
}

impl Parameters {
    /// Lays out zeroed parameters of the given names and shapes and returns the id of each, in
    /// the order given.
    pub fn new(
        parameters: &[(String, Shape)],
        device: &Device,
    ) -> Result<(Self, Vec<ParameterId>)> {
        Self::cut(parameters, device, |_| Ok(None))
    }

    /// [`Self::new`], cut as `partition` says for this layout.
    pub(super) fn cut(
        parameters: &[(String, Shape)],
        device: &Device,
        partition: impl FnOnce(&[Entry]) -> Result<Option<Partition>>,
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
        let matrices = entries.iter().filter(|entry| entry.shape.rank() >= 2).map(count).sum();
        let partition = partition(&entries)?.map(Arc::new);
        let (held, decayed) = match &partition {
            Some(partition) => (partition.len(), partition.matrices()),
            None => (len, matrices),
        };
        let values = copy::zeros(held, DType::F32, device)?;
        let generation = AtomicU64::new(0);
        Ok((Self { values, entries, len, decayed, partition, generation }, ids))
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
        self.len
    }

    /// Whether nothing is trained.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// All parameters that this process has, in f32: `(len)`, unless they are in parts.
    pub fn values(&self) -> &Tensor {
        &self.values
    }

    /// How they are cut, where several processes have a part each.
    pub(crate) fn partition(&self) -> Option<&Arc<Partition>> {
        self.partition.as_ref()
    }

    /// All parameters, `(len)` in f32, as a checkpoint has them.
    pub(crate) fn kept(&self) -> Kept {
        let pieces = self.partition.as_ref().map(|partition| partition.pieces());
        Kept::new("putting the parameters together", Some(self.values.clone()), pieces)
    }

    /// A hash of all values as they are now (XXH3), or of those that every process has and of the model they are of.
    pub fn fingerprint(&self) -> Result<u64> {
        /// Elements that are brought to the host at a time.
        const PIECE: usize = 16 << 20;
        let mut hash = Hash::new();
        let values = match &self.partition {
            Some(partition) => {
                hash.add(&partition.model.to_le_bytes());
                let vectors = partition.len() - partition.matrices();
                self.values.narrow(0, partition.matrices(), vectors)?
            }
            None => self.values.clone(),
        };
        let count = values.elem_count();
        for start in (0..count).step_by(PIECE) {
            let piece = host::on_the_host(&values.narrow(0, start, PIECE.min(count - start))?)?;
            piece.to_vec1::<f32>()?.iter().for_each(|value| hash.add(&value.to_le_bytes()));
        }
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

    /// How many of the leading elements of [`Self::values`] weight decay applies to.
    pub fn decayed(&self) -> usize {
        self.decayed
    }

    /// The layout, in the order of the buffer.
    pub fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The parameter `id` as a view: it shares the buffer and sees every later update.
    ///
    /// # Errors
    /// When there is no such parameter, and for a matrix in parts.
    pub fn view(&self, id: ParameterId) -> Result<Tensor> {
        of_held(self.entry(id)?, &self.values, self.partition.as_deref())
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
        match &self.partition {
            Some(partition) => {
                partition.write(&self.values, &entry.range(), &value.flatten_all()?)?;
            }
            None => {
                let flat = copy::cast(value, DType::F32)?.contiguous()?.flatten_all()?;
                copy::write(&self.values, &flat, 0, entry.offset)?;
            }
        }
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

/// A parameter's place in a buffer laid out as [`Parameters::values`], as a view.
///
/// # Errors
/// For a matrix in parts.
pub(crate) fn of_held(
    entry: &Entry,
    buffer: &Tensor,
    partition: Option<&Partition>,
) -> Result<Tensor> {
    let Some(partition) = partition else { return entry.of(buffer) };
    let place = partition.place(entry).ok_or_else(|| {
        Error::option(
            "base_placement",
            format!(
                "is sharded: this process has a part of `{}`, and this needs it whole",
                entry.name
            ),
        )
    })?;
    Ok(buffer.narrow(0, place.start, place.len())?.reshape(entry.shape.clone())?)
}
