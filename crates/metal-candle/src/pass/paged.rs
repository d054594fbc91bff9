//! Many texts in one pass, over a paged KV cache: keys and values lie in blocks of a pool, and a text has a table of
//! its blocks (PagedAttention, Kwon et al. 2023, <https://arxiv.org/abs/2309.06180>).

use super::adapters::{KnownUpdates, RowAdapters, RowUpdates, Updates};
use super::{Input, Positions};
use crate::adapter::Adapter;
use crate::autograd::Tape;
use crate::model::layer::{Attention, Layer};
use crate::model::{Model, TensorRank};
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::attention::{
    self, FEW_QUERIES, HOLE, NewTokens, RoundedPool, Sequence, Sequences,
};
use metal_candle_kernels::copy::{self, NOWHERE};
use metal_candle_kernels::{batch_invariance, rope};
use std::cmp::Reverse;
use std::fmt;
use std::ops::Range;
use std::str::FromStr;
use std::sync::Arc;

/// How the keys and values of texts are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheDtype {
    /// As the model computes them.
    #[default]
    Model,
    /// Rounded to 8 bits: 32 neighbours of a head share a power of two as their scale (MXINT8; see [`RoundedPool`]).
    /// That is 33 bytes for 32 numbers.
    MxInt8,
}

impl CacheDtype {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::Model, Self::MxInt8];

    /// Its name in settings.
    pub fn name(self) -> &'static str {
        match self {
            Self::Model => "model",
            Self::MxInt8 => "mxint8",
        }
    }

    /// What a head of a token takes in a model of this dtype, in bytes.
    fn bytes_of_head(self, head_dim: usize, dtype: DType) -> usize {
        match self {
            Self::Model => head_dim * dtype.size_in_bytes(),
            Self::MxInt8 => RoundedPool::bytes_of_head(head_dim),
        }
    }
}

impl fmt::Display for CacheDtype {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CacheDtype {
    type Err = String;

    fn from_str(name: &str) -> std::result::Result<Self, String> {
        Self::ALL.into_iter().find(|dtype| dtype.name() == name).ok_or_else(|| {
            let names = Self::ALL.map(Self::name).join(", ");
            format!("is {name:?}, expected one of {names}")
        })
    }
}

/// The layers whose queries see as many keys, and how many blocks they have for them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layers {
    pub window: Option<usize>,
    pub blocks: u32,
}

/// The keys and values of every layer, in blocks that texts share.
#[derive(Debug)]
pub(crate) struct PagedCache {
    /// With the kind that each layer is of.
    pub(super) layers: Vec<(usize, Pools)>,
    kinds: Vec<Layers>,
    block: usize,
    /// Whether passes give a text the same bits whatever other texts there are, and in whatever pieces it is read.
    pub batch_invariant: bool,
    /// Of the adapters that texts were read with.
    pub updates: KnownUpdates,
}

/// The keys and values of a layer.
#[derive(Debug)]
pub(super) enum Pools {
    /// Each `(blocks, block, kv_heads, head_dim)`.
    Dense([Tensor; 2]),
    Rounded([RoundedPool; 2]),
}

impl Pools {
    fn new(
        shape: (usize, usize, usize, usize),
        cache_dtype: CacheDtype,
        dtype: DType,
        device: &Device,
    ) -> Result<Self> {
        let dense = || copy::zeros(shape, dtype, device);
        let rounded = || RoundedPool::new(shape, device);
        Ok(match cache_dtype {
            CacheDtype::Model => Self::Dense([dense()?, dense()?]),
            CacheDtype::MxInt8 => Self::Rounded([rounded()?, rounded()?]),
        })
    }

    /// Pools of numbers as they are.
    fn dense(&self) -> Result<&[Tensor; 2]> {
        match self {
            Self::Dense(pools) => Ok(pools),
            Self::Rounded(_) => {
                Err(Error::option("cache", "is rounded, and such a cache does not grow"))
            }
        }
    }

    /// The first blocks of these pools.
    fn first(&self, blocks: u32) -> Result<Self> {
        let [keys, values] = self.dense()?;
        let first = |pool: &Tensor| pool.narrow(0, 0, blocks as usize);
        Ok(Self::Dense([first(keys)?, first(values)?]))
    }

    /// Pools of so many blocks, no fewer, that begin with what these hold.
    fn grown(&self, blocks: u32) -> Result<Self> {
        let grown = |pool: &Tensor| -> Result<Tensor> {
            let (_, block, heads, width) = pool.dims4()?;
            let shape = (blocks as usize, block, heads, width);
            let larger = copy::zeros(shape, pool.dtype(), pool.device())?;
            copy::write(&larger, pool, 0, 0)?;
            Ok(larger)
        };
        let [keys, values] = self.dense()?;
        Ok(Self::Dense([grown(keys)?, grown(values)?]))
    }

    /// Rotates the queries `(tokens, 1, heads, head_dim)` and keys of a pass's tokens by the angles, puts keys and values
    /// `(tokens, 1, kv_heads, head_dim)` to their places, and gives what the queries see, `(tokens, heads, head_dim)`.
    pub fn rotate_and_attend(
        &self,
        q: &Tensor,
        [k, v]: [&Tensor; 2],
        [cos, sin]: [&Tensor; 2],
        paging: &Paging,
        options: &attention::Options,
    ) -> Result<Tensor> {
        if let (Self::Dense([keys, values]), Paging { places, sequences, alone: None }) =
            (self, paging)
        {
            let tokens = NewTokens { q, k, v, cos, sin, places };
            return Ok(attention::forward_paged_new(&tokens, [keys, values], sequences, options)?);
        }
        let (q, k) = rope::forward_both(q, k, cos, sin)?;
        self.attend(&q.squeeze(1)?, [&k.squeeze(1)?, &v.squeeze(1)?], paging, options)
    }

    /// Puts the keys and values of a pass's tokens, `(tokens, kv_heads, head_dim)`, to their places, and gives what the
    /// queries `(tokens, heads, head_dim)` see.
    pub fn attend(
        &self,
        q: &Tensor,
        [k, v]: [&Tensor; 2],
        Paging { places, sequences, alone }: &Paging,
        options: &attention::Options,
    ) -> Result<Tensor> {
        Ok(match self {
            Self::Dense([keys, values]) => {
                copy::write_rows_both([keys, values], [k, v], places)?;
                match alone {
                    Some(slots) => {
                        let of_text = |pool: &Tensor| -> Result<Tensor> {
                            let (blocks, block, heads, width) = pool.dims4()?;
                            let rows = pool.reshape((1, blocks * block, heads, width))?;
                            Ok(rows.narrow(1, slots.start, slots.len())?)
                        };
                        let (keys, values) = (of_text(keys)?, of_text(values)?);
                        let q = q.unsqueeze(0)?;
                        attention::forward(&q, &keys, &values, None, options)?.0.squeeze(0)?
                    }
                    None => attention::forward_paged(q, keys, values, sequences, options)?,
                }
            }
            Self::Rounded([keys, values]) => {
                RoundedPool::write_both([keys, values], [k, v], places)?;
                attention::forward_paged(q, keys, values, sequences, options)?
            }
        })
    }
}

/// The next tokens of a text.
#[derive(Debug)]
pub(crate) struct Stretch<'a> {
    pub tokens: &'a [u32],
    /// How many tokens come before them, whose keys and values are in the blocks.
    pub start: usize,
    /// The blocks of the text for each kind of layers, these tokens' included.
    pub tables: &'a [Vec<u32>],
    pub adapter: Option<&'a Arc<Adapter>>,
    /// Of how many of its last tokens the logits of what follows are wanted.
    pub logits: usize,
}

impl<'a> Stretch<'a> {
    /// The token after the `start` that a text has, which the device alone will know when it is read.
    pub fn ahead(start: usize, tables: &'a [Vec<u32>], adapter: Option<&'a Arc<Adapter>>) -> Self {
        Self { tokens: &[0], start, tables, adapter, logits: 1 }
    }
}

/// The tokens of a pass, one text after the other: `(tokens, 1)`.
pub(crate) struct Ragged {
    input: Input,
    /// For each kind of layers.
    paging: Vec<Paging>,
    /// The places of those whose logits are wanted, `(wanted)` u32; `None` where none are, as there are no buffers of no
    /// bytes on Metal.
    last: Option<Tensor>,
    last_adapters: RowAdapters,
}

/// Where the keys and values of a pass's tokens go, and which each token sees.
pub(super) struct Paging {
    /// The slot of each token: `block · size + place in the block`.
    pub places: Tensor,
    pub sequences: Sequences,
    /// The slots of a prompt that is read by itself, if they lie one behind the other: CUDA has a faster kernel for keys
    /// that do, whose roundings are others.
    pub alone: Option<Range<usize>>,
}

/// One more token of each text, as numbers that a recording of the pass reads: those of any texts that have as
/// much room.
pub(crate) struct Next {
    rows: usize,
    room: usize,
    /// For each kind of layers.
    sequences: Vec<Sequences>,
    /// The same for all, which the numbers don't tell, or updates of rows, which they do.
    adapters: RowAdapters,
    inputs: Vec<u32>,
}

impl PagedCache {
    /// Room for blocks of `block` tokens, as many as each kind of layers has.
    pub fn new(model: &Model, kinds: &[Layers], block: usize, dtype: CacheDtype) -> Result<Self> {
        let layers = model.layers.iter().map(|layer| {
            let Attention { kv_heads, head_dim, .. } = layer.attention;
            let (kind, blocks) = kind_of(layer, kinds);
            let shape = (blocks, block, kv_heads, head_dim);
            Ok((kind, Pools::new(shape, dtype, model.dtype(), model.device())?))
        });
        let (layers, updates) = (layers.collect::<Result<_>>()?, KnownUpdates::default());
        Ok(Self { layers, kinds: kinds.to_vec(), block, batch_invariant: false, updates })
    }

    /// Makes room for `blocks` blocks for each kind of layers; what the first ones hold stays, also when there is no
    /// memory for others.
    pub fn grow(&mut self, blocks: u32) -> Result<()> {
        // One layer after the other, so that there are both of one alone.
        for index in 0..self.layers.len() {
            let (kind, pools) = &self.layers[index];
            match pools.grown(blocks) {
                Ok(grown) => self.layers[index] = (*kind, grown),
                Err(error) => {
                    for (kind, pools) in &mut self.layers[..index] {
                        *pools = pools.first(self.kinds[*kind].blocks)?;
                    }
                    return Err(error);
                }
            }
        }
        for kind in &mut self.kinds {
            kind.blocks = blocks;
        }
        Ok(())
    }

    /// The bytes that this takes.
    pub fn bytes(model: &Model, kinds: &[Layers], block: usize, dtype: CacheDtype) -> usize {
        let of_layer = |layer: &Arc<Layer>| {
            let Attention { kv_heads, head_dim, .. } = layer.attention;
            let (_, blocks) = kind_of(layer, kinds);
            2 * blocks * block * kv_heads * dtype.bytes_of_head(head_dim, model.dtype())
        };
        model.layers.iter().map(of_layer).sum()
    }

    /// The kinds of layers that a model has, those that see the most first.
    pub fn windows(model: &Model) -> Vec<Option<usize>> {
        let mut windows: Vec<_> =
            model.layers.iter().map(|layer| layer.attention.options.window).collect();
        windows.sort_by_key(|window| Reverse(window.unwrap_or(usize::MAX)));
        windows.dedup();
        windows
    }

    /// The slot of a text's token, by one of its tables.
    fn place(&self, table: &[u32], position: usize) -> Result<u32> {
        let block = table.get(position / self.block).copied().filter(|block| *block != HOLE);
        let block = block.ok_or_else(|| {
            let blocks = table.len();
            let problem = format!("has {blocks} blocks, of which none is that of token {position}");
            Error::option("table", problem)
        })?;
        u32_of(block as usize * self.block + position % self.block)
    }
}

/// Which kind a layer is of, the one that has its window or else the first, and how many blocks that has.
fn kind_of(layer: &Layer, kinds: &[Layers]) -> (usize, usize) {
    let window = layer.attention.options.window;
    let kind = kinds.iter().position(|kind| kind.window == window).unwrap_or(0);
    (kind, kinds.get(kind).map_or(0, |kind| kind.blocks as usize))
}

impl Next {
    /// The stretches, of one token each, followed by as many as make `rows` that nobody reads, for texts of up to
    /// `room` tokens. Their adapters are among those of the updates, or the same for all.
    pub fn new(
        stretches: &[Stretch],
        [rows, room]: [usize; 2],
        updates: Option<&Arc<Updates>>,
        cache: &PagedCache,
        device: &Device,
    ) -> Result<Self> {
        let mut inputs = vec![0; 2 * rows];
        let (ids, positions) = inputs.split_at_mut(rows);
        for (row, Stretch { tokens, start, .. }) in stretches.iter().enumerate() {
            let ([token], true) = (tokens, row < rows) else {
                let (count, rows) = (tokens.len(), stretches.len());
                let problem = format!("are {rows} with {count} tokens, expected one each");
                return Err(Error::option("stretches", problem));
            };
            (ids[row], positions[row]) = (*token, u32_of(*start)?);
        }
        let mut of_kinds = Vec::with_capacity(cache.kinds.len());
        for (kind, Layers { blocks, .. }) in cache.kinds.iter().enumerate() {
            let mut sequences = Vec::with_capacity(rows);
            for Stretch { start, tables, .. } in stretches {
                let table = tables.get(kind).map_or(&[][..], Vec::as_slice);
                inputs.push(cache.place(table, *start)?);
                sequences.push(Sequence { queries: 1, keys: start + 1, table });
            }
            inputs.resize(inputs.len() + rows - stretches.len(), NOWHERE);
            sequences.resize(rows, Sequence { queries: 1, keys: 1, table: &[0] });
            let (block, blocks) = (cache.block, *blocks as usize);
            let sequences = Sequences::with_room(&sequences, room, block, blocks, device)?;
            inputs.extend(sequences.numbers());
            of_kinds.push(sequences);
        }
        let adapters = match updates {
            None => RowAdapters::Same(stretches.first().and_then(|it| it.adapter.cloned())),
            Some(updates) => {
                let mut adapters: Vec<_> = stretches.iter().map(|it| it.adapter).collect();
                adapters.resize(rows, None);
                let updates = RowUpdates::with_room(updates, &adapters, device)?;
                inputs.extend(updates.numbers());
                RowAdapters::Updated(Arc::new(updates))
            }
        };
        Ok(Self { rows, room, sequences: of_kinds, adapters, inputs })
    }

    /// What a recording of the pass reads.
    pub fn inputs(&self) -> &[u32] {
        &self.inputs
    }
}

impl Ragged {
    /// `total` is the length of the longest of the texts, which says what their ropes are.
    pub fn new(
        stretches: &[Stretch],
        total: usize,
        cache: &PagedCache,
        device: &Device,
    ) -> Result<Self> {
        let (mut ids, mut positions) = (Vec::new(), Vec::new());
        let (mut last, mut adapters, mut last_adapters) = (Vec::new(), Vec::new(), Vec::new());
        for Stretch { tokens, start, adapter, logits, .. } in stretches {
            for position in *start..start + tokens.len() {
                positions.push(u32_of(position)?);
            }
            ids.extend_from_slice(tokens);
            adapters.extend(std::iter::repeat_n(adapter.cloned(), tokens.len()));
            for place in ids.len() - logits.min(&tokens.len())..ids.len() {
                last.push(u32_of(place)?);
                last_adapters.push(adapter.cloned());
            }
        }
        let paging = (0..cache.kinds.len())
            .map(|kind| Paging::new(stretches, kind, cache, device))
            .collect::<Result<_>>()?;
        let count = ids.len();
        let ids = Tensor::from_vec(ids, (count, 1), device)?;
        let of_rows =
            |adapters: &[_]| RowAdapters::of_rows(adapters, cache.batch_invariant, device);
        let input = Input::new(ids, Positions::Known { positions, total }, None);
        Ok(Self {
            input: Input { adapters: of_rows(&adapters)?, ..input },
            paging,
            last: (!last.is_empty()).then(|| Tensor::new(last, device)).transpose()?,
            last_adapters: of_rows(&last_adapters)?,
        })
    }

    /// The same with other tokens `(tokens)` u32, which the device will know.
    pub fn reading(mut self, tokens: &Tensor) -> Result<Self> {
        self.input.ids = tokens.contiguous()?.reshape(self.input.ids.shape())?;
        Ok(self)
    }
}

impl Paging {
    /// Of all tokens of the stretches, for a kind of layers.
    fn new(
        stretches: &[Stretch],
        kind: usize,
        cache: &PagedCache,
        device: &Device,
    ) -> Result<Self> {
        let mut places = Vec::new();
        let mut sequences = Vec::with_capacity(stretches.len());
        for Stretch { tokens, start, tables, .. } in stretches {
            let table = tables.get(kind).map_or(&[][..], Vec::as_slice);
            let keys = start + tokens.len();
            for position in *start..keys {
                places.push(cache.place(table, position)?);
            }
            sequences.push(Sequence { queries: tokens.len(), keys, table });
        }
        let blocks = cache.kinds.get(kind).map_or(0, |kind| kind.blocks as usize);
        let alone = match sequences[..] {
            [Sequence { queries, keys, table }]
                if queries > FEW_QUERIES && device.is_cuda() && !batch_invariance::is_on() =>
            {
                slots_in_a_row(table, keys, cache.block)
            }
            _ => None,
        };
        let sequences = Sequences::new(&sequences, cache.block, blocks, device)?;
        let count = places.len();
        Ok(Self { places: Tensor::from_vec(places, count, device)?, sequences, alone })
    }
}

/// The slots of so many keys, if the blocks of the table that hold them lie one behind the other.
fn slots_in_a_row(table: &[u32], keys: usize, block: usize) -> Option<Range<usize>> {
    let table = table.get(..keys.div_ceil(block))?;
    let follows = |pair: &[u32]| pair[0] != HOLE && pair[0] + 1 == pair[1];
    let first = table.first().filter(|_| table.windows(2).all(follows))?;
    let start = *first as usize * block;
    Some(start..start + keys)
}

fn u32_of(number: usize) -> Result<u32> {
    Ok(u32::try_from(number).map_err(candle_core::Error::wrap)?)
}

impl Model {
    /// Reads the tokens, whose keys and values go into the cache, and gives the logits `(wanted, vocabulary)` of what
    /// follows those of which they are wanted, in f32 or as the head gives them. Of tensor-parallel ranks the first gives
    /// them, and others none.
    pub(crate) fn next_logits(&self, ragged: &Ragged, cache: &PagedCache) -> Result<Tensor> {
        let tape = Tape::inference();
        let Ragged { input, paging, last, last_adapters } = ragged;
        let places = match last {
            Some(last) if last.elem_count() == input.ids.elem_count() => None,
            Some(last) => Some(last.unsqueeze(1)?),
            // One that nobody reads.
            None => Some(Tensor::new(&[[0u32]], self.device())?),
        };
        let wanted = places.map(|places| (places, last_adapters));
        let hidden = self.forward_paged(&tape, input, cache, paging, wanted)?;
        let Some(last) = last.as_ref().filter(|_| self.has_head()) else {
            let shape = (0, self.config().vocab_size);
            return Ok(Tensor::zeros(shape, DType::F32, self.device())?);
        };
        let logits = self.logits_by(hidden.tensor(), last_adapters)?;
        Ok(logits.reshape((last.elem_count(), ()))?)
    }

    /// The logits `(rows, vocabulary)` of what follows the tokens of texts like those of `next`, which the device
    /// finds in `inputs`, as [`Self::next_logits`]. Of tensor-parallel ranks the first gives them, and others what nobody
    /// reads.
    pub(crate) fn next_logits_of(
        &self,
        inputs: &Tensor,
        next: &Next,
        cache: &PagedCache,
    ) -> Result<Tensor> {
        let tape = Tape::inference();
        let rows = next.rows;
        let mut read = 0;
        let mut take = |count: usize| {
            let taken = inputs.narrow(0, read, count);
            read += count;
            taken
        };
        let (ids, positions) = (take(rows)?.unsqueeze(1)?, take(rows)?.unsqueeze(1)?);
        let positions = Positions::OnDevice { positions, below: next.room };
        let mut paging = Vec::with_capacity(next.sequences.len());
        for sequences in &next.sequences {
            let places = take(rows)?;
            let numbers = take(sequences.numbers().len())?;
            let sequences = sequences.reading(&numbers)?;
            paging.push(Paging { places, sequences, alone: None });
        }
        let adapters = match &next.adapters {
            RowAdapters::Updated(updates) => {
                let numbers = take(updates.numbers().len())?;
                RowAdapters::Updated(Arc::new(updates.reading(&numbers)?))
            }
            same => same.clone(),
        };
        let input = Input::new(ids, positions, None);
        let input = Input { adapters, ..input };
        let hidden = self.forward_paged(&tape, &input, cache, &paging, None)?;
        let logits = match self.has_head() {
            true => self.logits_by(hidden.tensor(), &input.adapters)?,
            false => hidden.into_tensor(),
        };
        Ok(logits.reshape((rows, ()))?)
    }

    fn has_head(&self) -> bool {
        self.rank.as_ref().is_none_or(TensorRank::has_head)
    }

    /// Whether keys of a text of `a` tokens are rotated otherwise than of one of `b`.
    pub(crate) fn ropes_change(&self, a: usize, b: usize) -> bool {
        self.config().ropes.iter().any(|rope| rope.changes_between(a, b))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autograd::ParameterId;
    use crate::model::Config;

    const VOCABULARY: u32 = 24;

    fn model() -> Model {
        let config = Config::from_json(
            r#"{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 24,
                "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2,
                "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
                "rms_norm_eps": 1e-5, "initializer_range": 0.2}"#,
        );
        Model::random(config.unwrap(), DType::F32, &Device::Cpu, 1).unwrap()
    }

    fn cache(model: &Model) -> PagedCache {
        let layers = [Layers { window: None, blocks: 4 }];
        PagedCache::new(model, &layers, 8, CacheDtype::Model).unwrap()
    }

    fn are_close(found: &[f32], expected: &[f32]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-4, "{found}, expected {expected}");
        }
    }

    #[test]
    fn the_beginning_of_a_prompt_has_no_places_of_logits_and_its_end_has() {
        let model = model();
        let tokens: Vec<u32> = (0..20).map(|index| (7 * index + 3) % VOCABULARY).collect();
        let tables = [vec![0, 1, 2, 3]];
        let read = |cache: &PagedCache, range: Range<usize>, logits: usize| {
            let (start, end) = (range.start, range.end);
            let tokens = &tokens[range];
            let stretch = Stretch { tokens, start, tables: &tables, adapter: None, logits };
            let ragged = Ragged::new(&[stretch], end, cache, model.device()).unwrap();
            let places = ragged.last.as_ref().map(|last| last.to_vec1::<u32>().unwrap());
            let expected = (tokens.len() - logits..tokens.len()).map(|place| place as u32);
            assert_eq!(places, (logits > 0).then(|| expected.collect()));
            let found = model.next_logits(&ragged, cache).unwrap();
            assert_eq!(found.dims(), [logits, VOCABULARY as usize]);
            found.to_vec2::<f32>().unwrap()
        };
        let expected = read(&cache(&model), 0..20, 2).concat();
        let in_parts = cache(&model);
        read(&in_parts, 0..9, 0);
        are_close(&read(&in_parts, 9..20, 2).concat(), &expected);
        let mut of_all = read(&cache(&model), 0..20, 20);
        are_close(&of_all.split_off(18).concat(), &expected);
    }

    /// Of the last layer's end, the last norm and the head, whose rows are others than those before.
    #[test]
    fn wanted_tokens_of_different_adapters_have_the_weights_of_theirs() {
        let model = model();
        let full = |change: f64| {
            let full = Adapter::full(&model).unwrap();
            for index in 0..full.parameters().entries().len() {
                let id = ParameterId(index);
                let changed = (full.parameters().view(id).unwrap() * (1.0 + change)).unwrap();
                full.parameters().set(id, &changed).unwrap();
            }
            Arc::new(full)
        };
        let adapters = [Some(full(0.1)), None, Some(full(-0.2))];
        let tokens: Vec<u32> = (0..6).map(|index| (7 * index + 3) % VOCABULARY).collect();
        let tables = [[vec![0]], [vec![1]], [vec![2]]];
        let read = |texts: Range<usize>| {
            let stretches: Vec<_> = texts
                .map(|text| Stretch {
                    tokens: &tokens[text..],
                    start: 0,
                    tables: &tables[text],
                    adapter: adapters[text].as_ref(),
                    logits: 1,
                })
                .collect();
            let cache = cache(&model);
            let ragged = Ragged::new(&stretches, tokens.len(), &cache, model.device()).unwrap();
            model.next_logits(&ragged, &cache).unwrap().to_vec2::<f32>().unwrap()
        };
        let together = read(0..3);
        for (text, found) in together.iter().enumerate() {
            are_close(found, &read(text..text + 1).concat());
        }
    }
}
