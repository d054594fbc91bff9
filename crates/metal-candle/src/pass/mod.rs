//! The forward pass: tokens and adapters in, hidden states, logits or a loss out; for training, evaluation and
//! generation alike.

mod adapters;
mod decoder;
mod linear;
mod paged;
mod reader;
mod recorded;

pub use crate::autograd::Loss;
pub(crate) use adapters::Updates;
pub use paged::CacheDtype;
pub(crate) use paged::{Layers, Next, PagedCache, Ragged, Stretch};
pub(crate) use reader::{ModelReader, check_prompt};

use crate::adapter::{Adapter, UnitName, Whole};
use crate::autograd::{HeadValues, Matrix, Parameter, Tape, Value};
use crate::data::Batch;
use crate::model::layer::{Layer, Linear};
use crate::model::rope::Rotation;
use crate::model::weight::{FrozenWeights, Storage, WeightId};
use crate::model::{Model, TensorRank};
use crate::{Error, Result, bounds};
use adapters::{KnownUpdates, RowAdapters, RowUpdates};
use candle_core::{DType, Device, Tensor};
use decoder::Caches;
use metal_candle_kernels::{arithmetic, copy, cross_entropy, matmul};
use paged::Paging;
use std::sync::Arc;

/// Rows whose loss is computed at a time in training.
const LOSS_CHUNK: usize = 512;

/// What is the same for all layers in one forward pass.
#[derive(Clone, Debug)]
struct Pass {
    weights: Arc<FrozenWeights>,
    adapters: RowAdapters,
    /// What is added to the results of linear layers where adapters differ from row to row.
    updates: Option<Arc<RowUpdates>>,
    /// The angles of each of the configuration's ropes.
    ropes: Vec<Rotation>,
    /// `(batch, seq)`: the first key each query may see; `None` is 0 for all.
    first_key: Option<Tensor>,
    /// Where attention reads other rows than those that the batch has.
    spread: Option<Spread>,
    observer: Option<Arc<dyn Observer>>,
    /// The first layer that the backward pass comes to, where weights come for it.
    lowest: usize,
    /// Where other ranks have the rest of every layer.
    rank: Option<TensorRank>,
    /// The parameters of the layer, where several processes have a part of them each.
    whole: Option<Arc<Whole>>,
}

/// The tokens of a pass whose hidden states are wanted, where not those of all are. Of the others, the last layer computes
/// keys and values alone.
struct Wanted {
    /// `(wanted, 1)` u32.
    places: Tensor,
    adapters: RowAdapters,
    updates: Option<Arc<RowUpdates>>,
}

impl Wanted {
    /// The pass over them alone.
    fn pass(&self, pass: &Pass) -> Pass {
        Pass { adapters: self.adapters.clone(), updates: self.updates.clone(), ..pass.clone() }
    }

    /// Their rows `(wanted, 1, width)` of `x (tokens, 1, width)`.
    fn rows(&self, tape: &Tape, x: &Value) -> Result<Value> {
        let (tokens, _, width) = x.tensor().dims3()?;
        tape.rows(&tape.reshape(x, (tokens, width))?, &self.places)
    }
}

/// Sees what linear layers read.
pub(crate) trait Observer: std::fmt::Debug + Send + Sync {
    /// These layers are about to read `x (batch, seq, in)`.
    fn see(&self, layers: &[&Linear], x: &Tensor) -> Result<()>;
}

/// How attention sees a batch whose sequences share beginnings: each with a beginning of its own.
#[derive(Debug, Clone)]
struct Spread {
    /// `(rows, places of a row there)`: the place of the batch that each place there is.
    source: Tensor,
    /// `(rows · the batch's length)`: where the result of each place of the batch is read.
    result: Tensor,
}

impl Pass {
    /// This with the weights of a layer of so many, where they are elsewhere. Behind it comes the next one, or the one
    /// before it while segments are run again.
    fn of_layer(self: &Arc<Self>, layer: usize, count: usize, tape: &Tape) -> Result<Arc<Self>> {
        let next = match tape.is_replaying() {
            true => layer.checked_sub(1).filter(|next| *next >= self.lowest),
            false => Some(layer + 1).filter(|next| *next < count),
        };
        let unit = match (next, tape.is_replaying()) {
            (None, false) => Some(UnitName::Head),
            (next, _) => next.map(UnitName::Layer),
        };
        if let Some(whole) = self.adapters.bring(UnitName::Layer(layer), unit)? {
            return Ok(Arc::new(Self { whole: Some(whole), ..(**self).clone() }));
        }
        Ok(match self.weights.with_layer(layer, next)? {
            Some(weights) => Arc::new(Self { weights: Arc::new(weights), ..(**self).clone() }),
            None => self.clone(),
        })
    }

    /// What a layer adds to the residual stream: the sum of what ranks have computed, where they have a part of it each.
    fn whole(&self, tape: &Tape, x: Value) -> Result<Value> {
        match &self.rank {
            None => Ok(x),
            Some(rank) => Ok(tape.constant(rank.sums.sum(x.tensor())?)),
        }
    }

    /// A weight, or what the adapter has in its place.
    fn weight_of(&self, tape: &Tape, id: WeightId, adapter: Option<&Adapter>) -> Result<Value> {
        weight_of(tape, &self.weights, id, adapter, self.whole.as_deref())
    }

    /// As [`Self::weight_of`], of a matrix.
    fn matrix_of(&self, tape: &Tape, id: WeightId, adapter: Option<&Adapter>) -> Result<Matrix> {
        matrix_of(tape, &self.weights, id, adapter, self.whole.as_deref())
    }

    /// What `f` makes of `x (batch, ..)` with the adapters of its rows, which may replace the weight `id`.
    fn with_adapters(
        &self,
        tape: &Tape,
        id: WeightId,
        x: &Value,
        f: impl Fn(&Value, Option<&Adapter>) -> Result<Value>,
    ) -> Result<Value> {
        match self.adapters.in_common(|adapter| adapter.replacement(id).is_some()) {
            Ok(adapter) => f(x, adapter.map(|it| &**it)),
            Err(groups) => {
                let rows = groups.map([x.tensor()], |adapter, [x]| {
                    Ok(f(&tape.constant(x), adapter.map(|it| &**it))?.into_tensor())
                })?;
                Ok(tape.constant(rows))
            }
        }
    }
}

fn weight_of(
    tape: &Tape,
    weights: &FrozenWeights,
    id: WeightId,
    adapter: Option<&Adapter>,
    whole: Option<&Whole>,
) -> Result<Value> {
    Ok(match adapter.and_then(|adapter| adapter.replacement(id)) {
        Some(parameter) => parameter_of(tape, parameter, whole),
        None => tape.constant(weights.dense(id)?.into_owned()),
    })
}

/// A parameter, or what was put together in its place.
fn parameter_of(tape: &Tape, parameter: &Parameter, whole: Option<&Whole>) -> Value {
    match whole.and_then(|whole| whole.get(parameter.id())) {
        Some(whole) => tape.parameter(&whole),
        None => tape.parameter(parameter),
    }
}

/// A matrix, or what the adapter has in its place.
fn matrix_of(
    tape: &Tape,
    weights: &FrozenWeights,
    id: WeightId,
    adapter: Option<&Adapter>,
    whole: Option<&Whole>,
) -> Result<Matrix> {
    let replacement = adapter.and_then(|adapter| adapter.replacement(id));
    match (replacement, weights.storage(id)) {
        (None, Storage::Quantized(quantized)) => Ok(Matrix::Quantized(quantized.clone())),
        _ => Ok(Matrix::Dense(weight_of(tape, weights, id, adapter, whole)?)),
    }
}

/// Tokens for one forward pass, each `(batch, seq)`.
#[derive(Debug, Clone)]
pub struct Input {
    ids: Tensor,
    positions: Positions,
    first_key: Option<Tensor>,
    spread: Option<Spread>,
    adapters: RowAdapters,
    observer: Option<Arc<dyn Observer>>,
}

#[derive(Debug, Clone)]
enum Positions {
    /// `(batch, seq)`, of texts of at most `total` tokens.
    Known { positions: Vec<u32>, total: usize },
    /// `(batch, seq)` u32, all less than `below`.
    OnDevice { positions: Tensor, below: usize },
}

impl Positions {
    fn known(positions: Vec<u32>) -> Result<Self> {
        let total = match positions.iter().max() {
            None => 0,
            Some(&last) => {
                let most = bounds::TOKENS.end() - 1;
                bounds::check("positions", last as usize, &(0..=most))?;
                last as usize + 1
            }
        };
        Ok(Self::Known { positions, total })
    }
}

impl Input {
    /// One text by itself, from its first token on.
    ///
    /// # Errors
    /// [`Error::Option`] for more tokens than [`bounds::TOKENS`], and when the device has no memory.
    pub fn sequence(ids: &[u32], device: &Device) -> Result<Self> {
        let positions = (0..ids.len())
            .map(|position| u32::try_from(position).map_err(candle_core::Error::wrap))
            .collect::<candle_core::Result<_>>()?;
        let positions = Positions::known(positions)?;
        Ok(Self::new(Tensor::new(ids, device)?.unsqueeze(0)?, positions, None))
    }

    /// The rows of a batch, with attention kept inside each record.
    ///
    /// # Errors
    /// [`Error::Option`] for a position beyond [`bounds::TOKENS`]; also when a list of the batch has another length than
    /// its rows, or the device has no memory.
    pub fn batch(batch: &Batch, device: &Device) -> Result<Self> {
        let shape = (batch.rows, batch.length);
        let spread = match &batch.shared {
            None => None,
            Some(shared) => {
                let source = (batch.rows, shared.length);
                Some(Spread {
                    source: Tensor::from_slice(&shared.source, source, device)?,
                    result: Tensor::from_slice(&shared.result, shape, device)?,
                })
            }
        };
        let length = batch.shared.as_ref().map_or(batch.length, |shared| shared.length);
        let first_key = Tensor::from_slice(&batch.first_key, (batch.rows, length), device)?;
        let ids = Tensor::from_slice(&batch.input_ids, shape, device)?;
        let positions = Positions::known(batch.positions.clone())?;
        Ok(Self { spread, ..Self::new(ids, positions, Some(first_key)) })
    }

    fn new(ids: Tensor, positions: Positions, first_key: Option<Tensor>) -> Self {
        let (spread, adapters) = (None, RowAdapters::Same(None));
        Self { ids, positions, first_key, spread, adapters, observer: None }
    }

    /// The same tokens, with somebody who sees what the decoder's linear layers read of them.
    pub(crate) fn with_observer(mut self, observer: Arc<dyn Observer>) -> Self {
        self.observer = Some(observer);
        self
    }

    /// The same tokens, read with an adapter, or with none.
    #[must_use]
    pub fn with_adapter(mut self, adapter: Option<&Arc<Adapter>>) -> Self {
        self.adapters = RowAdapters::Same(adapter.cloned());
        self
    }

    /// The same tokens, each row read with an adapter of its own, or with none. The frozen weights are read
    /// once for all rows. Only for inference.
    ///
    /// # Errors
    /// When there isn't one entry for each row.
    pub fn with_row_adapters(mut self, adapters: &[Option<Arc<Adapter>>]) -> Result<Self> {
        let rows = self.ids.dim(0)?;
        if adapters.len() != rows {
            let found = adapters.len();
            return Err(Error::option(
                "adapters",
                format!("are {found}, expected one a row of {rows}"),
            ));
        }
        self.adapters = RowAdapters::of_rows(adapters, false, self.ids.device())?;
        Ok(self)
    }
}

/// The loss of each place of a batch.
#[derive(Debug)]
pub struct TokenLosses {
    /// The negative log-probability of each place's target in nats, 0 where it doesn't count: `(rows · length)`.
    pub losses: Value,
    /// Entropies and hits of the places, where they were asked for.
    pub statistics: Option<cross_entropy::Statistics>,
}

impl Model {
    /// The hidden states after the last norm, `(batch, seq, hidden)`.
    pub fn forward(&self, tape: &Tape, input: &Input) -> Result<Value> {
        self.run(tape, input, Caches::None, None, None)
    }

    /// [`Self::forward`] of the tokens of many texts, `(tokens, 1)`; of those at the places `(wanted, 1)` alone, with their
    /// adapters, if any are given.
    fn forward_paged(
        &self,
        tape: &Tape,
        input: &Input,
        cache: &PagedCache,
        paging: &[Paging],
        wanted: Option<(Tensor, &RowAdapters)>,
    ) -> Result<Value> {
        let caches = Caches::Paged { layers: &cache.layers, paging };
        self.run(tape, input, caches, Some(&cache.updates), wanted)
    }

    /// `known` keeps what adapters that differ from row to row were laid out as for the next pass.
    fn run(
        &self,
        tape: &Tape,
        input: &Input,
        caches: Caches,
        known: Option<&KnownUpdates>,
        wanted: Option<(Tensor, &RowAdapters)>,
    ) -> Result<Value> {
        input.adapters.check(self)?;
        if tape.is_training() && !matches!(input.adapters, RowAdapters::Same(_)) {
            return Err(Error::option(
                "adapters",
                "differ from row to row, which is for inference only",
            ));
        }
        if self.is_tensor_parallel() || (tape.is_training() && self.rank.is_some()) {
            return Err(Error::Unsupported(
                "this with a model in parts on several devices (tensor parallelism); an engine writes texts with it".into(),
            ));
        }
        if tape.is_training() && self.is_away() && !tape.is_checkpointing() {
            return Err(Error::option(
                "grad_checkpoint",
                "is off, but weights that lie elsewhere are on the device for their layer alone; switch it on",
            ));
        }
        let (batch, seq) = input.ids.dims2()?;
        let (positions, total) = match &input.positions {
            Positions::Known { positions, total } => {
                (Tensor::from_slice(positions, (batch, seq), self.device())?, *total)
            }
            Positions::OnDevice { positions, below } => (positions.clone(), *below),
        };
        let ropes = self.config().ropes.iter().enumerate();
        let ropes = ropes
            .map(|(index, rope)| self.rope_tables.cos_sin(index, rope, &positions, total))
            .collect::<Result<_>>()?;
        let pass = Arc::new(Pass {
            ropes,
            first_key: input.first_key.clone(),
            spread: input.spread.clone(),
            weights: self.frozen().clone(),
            adapters: input.adapters.clone(),
            updates: input.adapters.updates(self, seq, known)?,
            observer: input.observer.clone(),
            rank: self.rank.clone(),
            whole: input.adapters.bring(UnitName::Embedding, Some(UnitName::Layer(0)))?,
            lowest: if self.is_away() { self.lowest_trained(&input.adapters) } else { 0 },
        });
        let wanted = wanted.map(|(places, adapters)| -> Result<_> {
            // Those of all tokens have been laid out.
            let updates = adapters.updates(self, 1, known)?;
            Ok(Wanted { places, adapters: adapters.clone(), updates })
        });
        let wanted = wanted.transpose()?;
        let x = self.embed(tape, &input.ids, &pass)?;
        let x = if self.config().embedding_scale == 1.0 {
            x
        } else {
            tape.scale(&x, self.config().embedding_scale)?
        };
        // Of the embedding, which is used.
        let pass = match &pass.whole {
            Some(_) => Arc::new(Pass { whole: None, ..(*pass).clone() }),
            None => pass,
        };
        let stream = decoder::run_layers(&self.layers, tape, x, &pass, caches, wanted.as_ref())?;
        let rows = wanted.map(|wanted| wanted.pass(&pass));
        Ok(stream.normed(tape, Some(&self.norm), rows.as_ref().unwrap_or(&pass))?.1)
    }

    /// The first layer of which an adapter trains something, or whose input it changes.
    fn lowest_trained(&self, adapters: &RowAdapters) -> usize {
        let RowAdapters::Same(Some(adapter)) = adapters else { return 0 };
        if adapter.embedding_update().is_some() || adapter.replacement(self.embedding).is_some() {
            return 0;
        }
        let is_trained = |layer: &Layer| {
            let replaced = |id| adapter.replacement(id).is_some();
            layer.others().any(replaced)
                || layer.matrices().iter().any(|linear| {
                    adapter.update(linear).is_some()
                        || replaced(linear.weight)
                        || linear.bias.is_some_and(replaced)
                })
        };
        self.layers.iter().position(|layer| is_trained(layer)).unwrap_or(0)
    }

    /// The rows of the embedding for `ids (batch, seq)`, in the model's dtype: `(batch, seq, hidden)`.
    fn embed(&self, tape: &Tape, ids: &Tensor, pass: &Pass) -> Result<Value> {
        let embed = |adapter: Option<&Adapter>, ids: &Tensor| -> Result<Value> {
            let x = match pass.matrix_of(tape, self.embedding, adapter)? {
                Matrix::Dense(table) => tape.embedding(&table, ids)?,
                Matrix::Quantized(table) => tape.constant(table.rows(ids, self.dtype())?),
            };
            let Some(update) = adapter.and_then(Adapter::embedding_update) else {
                return tape.cast(&x, self.dtype());
            };
            let rows = tape.embedding(&update.left(tape)?, ids)?;
            let change = tape.linear(&rows, &tape.transpose(&update.right(tape)?)?, None)?;
            let change = tape.scale(&change, update.scale)?;
            tape.cast(&tape.add(&tape.cast(&x, DType::F32)?, &change)?, self.dtype())
        };
        let adapts = |adapter: &Adapter| {
            adapter.embedding_update().is_some() || adapter.replacement(self.embedding).is_some()
        };
        match pass.adapters.in_common(adapts) {
            Ok(adapter) => embed(adapter.map(|it| &**it), ids),
            Err(groups) => {
                let rows = groups.map([ids], |adapter, [ids]| {
                    Ok(embed(adapter.map(|it| &**it), &ids)?.into_tensor())
                })?;
                Ok(tape.constant(rows))
            }
        }
    }

    /// The logits `(batch, seq, vocabulary)` of hidden states `(batch, seq, hidden)` that [`Self::forward`] has
    /// given for `input`, or of some of their positions, in f32.
    pub fn logits(&self, hidden: &Tensor, input: &Input) -> Result<Tensor> {
        Ok(copy::cast(&self.logits_by(hidden, &input.adapters)?, DType::F32)?)
    }

    /// The logits of hidden states whose rows have these adapters: in f32 where something is done with what the head gives,
    /// and else in its dtype, of which they are the same numbers.
    fn logits_by(&self, hidden: &Tensor, adapters: &RowAdapters) -> Result<Tensor> {
        let tape = Tape::inference();
        let project = |adapter: Option<&Arc<Adapter>>, hidden: &Tensor| -> Result<Tensor> {
            let head = tape.cast_matrix(&self.head_of(&tape, adapter)?, hidden.dtype())?;
            let logits = matmul::linear(hidden, head.as_weight(), None)?;
            let Some(update) = adapter.and_then(|it| it.head_update()) else { return Ok(logits) };
            let logits = copy::cast(&logits, DType::F32)?;
            let (left, right) = (update.left(&tape)?, update.right(&tape)?);
            let hidden = copy::cast(hidden, DType::F32)?;
            let x = matmul::linear(&hidden, right.tensor(), None)?;
            let change = matmul::linear(&x, left.tensor(), None)?;
            Ok(arithmetic::add(&logits, &arithmetic::scale(&change, update.scale)?)?)
        };
        let logits = match adapters.in_common(|adapter| self.adapts_head(adapter)) {
            Ok(adapter) => project(adapter, hidden)?,
            Err(groups) => groups.map([hidden], |adapter, [hidden]| {
                Ok(copy::cast(&project(adapter, &hidden)?, DType::F32)?)
            })?,
        };
        let logits = match self.config().logits_scale {
            1.0 => logits,
            factor => arithmetic::scale(&copy::cast(&logits, DType::F32)?, factor)?,
        };
        Ok(match self.config().final_softcap {
            Some(cap) => arithmetic::softcap(&copy::cast(&logits, DType::F32)?, cap)?,
            None => logits,
        })
    }

    /// The head, `(vocabulary, hidden)`: the embedding where the model has no other, as it is in the model unless
    /// the adapter has a head.
    fn head_of(&self, tape: &Tape, adapter: Option<&Arc<Adapter>>) -> Result<Matrix> {
        let adapter = adapter.map(|it| &**it);
        // The backward pass begins with the last layer, where that is computed again.
        let last = self.layers.len().checked_sub(1).filter(|_| tape.is_checkpointing());
        let bring = |adapter: &Adapter| adapter.bring(UnitName::Head, last.map(UnitName::Layer));
        let whole = adapter.map(bring).transpose()?.flatten();
        let whole = whole.as_deref();
        match (self.head, adapter.and_then(Adapter::tied_head)) {
            (Some(head), _) => matrix_of(tape, self.frozen(), head, adapter, whole),
            (None, Some(head)) => Ok(Matrix::Dense(parameter_of(tape, head, whole))),
            (None, None) => matrix_of(tape, self.frozen(), self.embedding, None, None),
        }
    }

    fn adapts_head(&self, adapter: &Adapter) -> bool {
        if adapter.head_update().is_some() {
            return true;
        }
        match self.head {
            Some(head) => adapter.replacement(head).is_some(),
            None => adapter.tied_head().is_some(),
        }
    }

    /// The cross entropy of a batch with an adapter or without, summed over its target tokens.
    pub fn loss(&self, tape: &Tape, batch: &Batch, adapter: Option<&Arc<Adapter>>) -> Result<Loss> {
        self.loss_with(tape, batch, adapter, false)
    }

    /// [`Self::loss`], with the statistics of its places where they are asked for.
    pub(crate) fn loss_with(
        &self,
        tape: &Tape,
        batch: &Batch,
        adapter: Option<&Arc<Adapter>>,
        statistics: bool,
    ) -> Result<Loss> {
        self.map_head(tape, batch, adapter, |head| {
            tape.cross_entropy(head, &batch.loss_targets(), &self.loss_options(statistics))
        })
    }

    /// The cross entropy of each place of a batch by itself.
    pub fn token_losses(
        &self,
        tape: &Tape,
        batch: &Batch,
        adapter: Option<&Arc<Adapter>>,
        statistics: bool,
    ) -> Result<TokenLosses> {
        let (losses, statistics) = self.map_head(tape, batch, adapter, |head| {
            tape.token_losses(head, &batch.targets, &self.loss_options(statistics))
        })?;
        Ok(TokenLosses { losses, statistics })
    }

    fn loss_options(&self, statistics: bool) -> cross_entropy::Options {
        cross_entropy::Options {
            softcap: self.config().final_softcap,
            logit_scale: self.config().logits_scale,
            chunk: LOSS_CHUNK,
            statistics,
        }
    }

    /// What `f` makes of what gives the logits of all places of a batch.
    fn map_head<T>(
        &self,
        tape: &Tape,
        batch: &Batch,
        adapter: Option<&Arc<Adapter>>,
        f: impl FnOnce(&HeadValues<'_>) -> Result<T>,
    ) -> Result<T> {
        let input = Input::batch(batch, self.device())?.with_adapter(adapter);
        let hidden = self.forward(tape, &input)?;
        let rows = batch.rows * batch.length;
        let hidden = &tape.reshape(&hidden, (rows, self.config().hidden_size))?;
        let weight = &match self.head_of(tape, adapter)? {
            Matrix::Dense(head) => tape.cast(&head, self.dtype())?,
            Matrix::Quantized(head) => tape.constant(head.dequantize(self.dtype())?),
        };
        let Some(update) = adapter.and_then(|it| it.head_update()) else {
            return f(&HeadValues { hidden, weight, update: None });
        };
        let x = match linear::dropout(tape, update.dropout, update.stream) {
            Some(dropout) => tape.dropout(hidden, dropout)?,
            None => hidden.clone(),
        };
        let x = tape.linear(&tape.cast(&x, DType::F32)?, &update.right(tape)?, None)?;
        let update = Some((&tape.scale(&x, update.scale)?, &update.left(tape)?));
        f(&HeadValues { hidden, weight, update })
    }
}
