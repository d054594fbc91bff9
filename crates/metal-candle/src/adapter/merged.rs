//! A model with an adapter in its weights, as the files of a model and one weight after the other: what merging a whole
//! model gives, without a second model in memory.

use super::{Adapter, LowRank};
use crate::model::formats::experts::{Together, together};
use crate::model::weight::WeightId;
use crate::model::{Model, export};
use crate::turns::Turns;
use crate::{Error, Result, files};
use candle_core::{DType, Tensor};
use metal_candle_kernels::{copy, devices, host};
use serde_json::Value;
use std::collections::HashMap;
use std::io::{self, Cursor, Read};
use std::path::Path;
use std::sync::Arc;

/// What becomes of each weight of a model.
pub(super) struct Merging<'a> {
    adapter: &'a Adapter,
    /// By [`WeightId::index`].
    updates: HashMap<usize, &'a LowRank>,
    embedding: WeightId,
    head: Option<WeightId>,
}

impl<'a> Merging<'a> {
    pub fn new(adapter: &'a Adapter, model: &Model) -> Self {
        let updates = model
            .linears()
            .filter_map(|linear| Some((linear.weight.index(), adapter.update(linear)?)))
            .collect();
        Self { adapter, updates, embedding: model.embedding, head: model.head }
    }

    /// A weight with what was trained of it, in its dtype.
    pub fn weight(&self, id: WeightId, weight: Tensor) -> Result<Tensor> {
        let Self { adapter, updates, embedding, head } = self;
        if let Some(parameter) = adapter.replacement(id) {
            return Ok(copy::cast(parameter.tensor(), weight.dtype())?);
        }
        if id == *embedding
            && let Some(update) = &adapter.embedding
        {
            return update.merged(&weight);
        }
        if Some(id) == *head {
            return self.head(&weight);
        }
        match updates.get(&id.index()) {
            Some(update) => update.merged(&weight, adapter.parameters.generation()),
            None => Ok(weight),
        }
    }

    fn head(&self, table: &Tensor) -> Result<Tensor> {
        match &self.adapter.head_update {
            Some(update) => update.merged(table),
            None => Ok(table.clone()),
        }
    }

    /// Whether the head was the embedding, and both were trained apart.
    pub fn has_own_head(&self, model: &Model) -> bool {
        let adapter = self.adapter;
        let together = match (&adapter.embedding, &adapter.head_update) {
            (None, None) => adapter.head.is_none() && adapter.replacement(self.embedding).is_none(),
            (Some(embedding), Some(head)) => Arc::ptr_eq(embedding, head),
            _ => false,
        };
        model.head.is_none() && !adapter.is_full() && !together
    }

    /// The head of a model that had none of its own and has one now.
    pub fn own_head(&self, model: &Model) -> Result<Option<Tensor>> {
        if !self.has_own_head(model) {
            return Ok(None);
        }
        Ok(Some(match &self.adapter.head {
            Some(head) => copy::cast(head.tensor(), model.dtype())?,
            None => self.head(&*model.dense(self.embedding)?)?,
        }))
    }
}

/// Where a weight comes from.
#[derive(Debug, Clone, Copy)]
enum Source {
    Weight(WeightId),
    OwnHead,
}

/// A model with an adapter in its weights, as files that are made while they are read: the same bytes that
/// [`Adapter::merge`] and [`Model::save`] give.
#[derive(Debug)]
pub struct Merged {
    model: Arc<Model>,
    adapter: Arc<Adapter>,
    dtype: DType,
    turns: Option<Arc<Turns>>,
    /// By name, which is their order in the file.
    tensors: Vec<Together<Source>>,
    header: Vec<u8>,
    length: u64,
}

impl Merged {
    /// The name of the file of [`Self::weights`].
    pub const WEIGHTS: &str = export::WEIGHTS;
    /// The name of the file of [`Self::config`].
    pub const CONFIG: &str = export::CONFIG;

    /// `model` with `adapter` in its weights, which are written in `dtype`: f32, bf16 or f16.
    ///
    /// # Errors
    /// When the adapter is another model's; [`Error::Unsupported`] for another dtype, and for a model that is held in
    /// fewer bits, whose weights before that are not known.
    pub fn new(model: &Arc<Model>, adapter: &Arc<Adapter>, dtype: DType) -> Result<Self> {
        adapter.check(model)?;
        adapter.require_whole("merging")?;
        if model.is_quantized() {
            return Err(Error::Unsupported(
                "merging an adapter into a model that is held in fewer bits; `metal-candle fuse` does it from the files"
                    .into(),
            ));
        }
        export::dtype_name(dtype)?;
        let own_head = Merging::new(adapter, model)
            .has_own_head(model)
            .then(|| (format!("{}.weight", Model::HEAD), Source::OwnHead));
        let weights = model.named_weights().map(|(name, id)| (name.into(), Source::Weight(id)));
        let tensors = together(model.config().experts.as_ref(), weights.chain(own_head));
        let shape = |tensor: &Together<Source>| {
            let part = match (tensor.parts.first(), &adapter.head) {
                (Some(Source::Weight(id)), _) => model.frozen().shape(*id),
                (_, Some(head)) => head.tensor().shape().clone(),
                (_, None) => model.frozen().shape(model.embedding),
            };
            tensor.shape(part.dims())
        };
        let shapes: Vec<Vec<usize>> = tensors.iter().map(shape).collect();
        let described =
            tensors.iter().zip(&shapes).map(|(it, shape)| (&*it.name, dtype, &shape[..]));
        let place = Path::new(export::WEIGHTS);
        let header = files::safetensors_header(place, described, Some(export::metadata()))?;
        let elements: usize = shapes.iter().map(|shape| shape.iter().product::<usize>()).sum();
        Ok(Self {
            model: model.clone(),
            adapter: adapter.clone(),
            dtype,
            turns: None,
            length: (header.len() + elements * dtype.size_in_bytes()) as u64,
            tensors,
            header,
        })
    }

    /// Shares the device: each weight is computed in a turn.
    #[must_use]
    pub fn with_turns(mut self, turns: Arc<Turns>) -> Self {
        self.turns = Some(turns);
        self
    }

    /// What `config.json` holds.
    ///
    /// # Errors
    /// When the model's configuration is no JSON object.
    pub fn config(&self) -> Result<Vec<u8>> {
        let mut raw = self.model.config().raw.clone();
        if Merging::new(&self.adapter, &self.model).has_own_head(&self.model)
            && let Some(raw) = raw.as_object_mut()
        {
            raw.insert("tie_word_embeddings".into(), Value::Bool(false));
        }
        export::config_bytes(&raw, self.dtype, None)
    }

    /// How many bytes `model.safetensors` has.
    pub fn length(&self) -> u64 {
        self.length
    }

    /// What `model.safetensors` holds. A weight is computed when the bytes before it have been read.
    pub fn weights(mut self) -> MergedWeights {
        let piece = Cursor::new(std::mem::take(&mut self.header));
        MergedWeights { merged: self, next: 0, piece }
    }

    /// The bytes of a tensor. Others have the device while it is written.
    fn bytes(&self, tensor: &Together<Source>) -> Result<Vec<u8>> {
        let weight = |source: &Source| {
            let _turn = self.turns.as_ref().map(|turns| turns.hold());
            devices::step(self.model.device(), || -> Result<_> {
                Ok(host::on_the_host(&self.weight(&tensor.name, *source)?)?)
            })
        };
        let weights = tensor.parts.iter().map(weight).collect::<Result<Vec<_>>>()?;
        files::tensor_bytes(&tensor.join(&weights)?)
    }

    fn weight(&self, name: &str, source: Source) -> Result<Tensor> {
        let merging = Merging::new(&self.adapter, &self.model);
        let weight = match source {
            Source::Weight(id) => merging.weight(id, self.model.dense(id)?.into_owned())?,
            Source::OwnHead => merging
                .own_head(&self.model)?
                .ok_or_else(|| Error::option("adapter", "has no head of its own any more"))?,
        };
        export::written_as(name, &weight, self.dtype)
    }
}

/// The bytes of a merged model's weights.
#[derive(Debug)]
pub struct MergedWeights {
    merged: Merged,
    /// The weight that is computed next.
    next: usize,
    /// What is read at the moment: the header, or a weight.
    piece: Cursor<Vec<u8>>,
}

impl Read for MergedWeights {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.piece.read(buffer)?;
            let Some(tensor) = self.merged.tensors.get(self.next) else { return Ok(count) };
            if count > 0 || buffer.is_empty() {
                return Ok(count);
            }
            // Not both at once.
            self.piece = Cursor::default();
            let bytes = self.merged.bytes(tensor).map_err(io::Error::other)?;
            self.piece = Cursor::new(bytes);
            self.next += 1;
        }
    }
}
