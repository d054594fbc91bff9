//! Attention of a batch of sequences of any lengths, whose keys and values lie in blocks of a pool
//! (PagedAttention, Kwon et al. 2023, <https://arxiv.org/abs/2309.06180>). The formulas are those of
//! [`attention`](super): query `i` of `t` of a sequence of `s` keys stands at position `s - t + i`.
//!
//! The keys of a sequence are taken in chunks that begin at fixed positions, each chunk by itself, and what
//! the chunks give is joined in their order:
//!
//! ```text
//! top_c = max_j z_j      total_c = Σ_j e^{z_j - top_c}      part_c = Σ_j e^{z_j - top_c}·v_j
//! o = Σ_c e^{top_c - top}·part_c / Σ_c e^{top_c - top}·total_c      top = max_c top_c
//! ```
//!
//! So what a query gives follows from the query, and the keys and values it sees, alone, but on Metal for whether its sequence
//! has few queries at once or many.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(target_arch = "x86_64")]
mod few_rows;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
mod new_tokens;
mod rounded;
#[cfg(test)]
mod tests;

pub use new_tokens::{NewTokens, forward_paged_new};
pub use rounded::RoundedPool;

use super::{Options, check_heads, check_options, sink_numbers};
use crate::backend::cpu::{Input, Sum, dispatch, unwritten};
use crate::backend::{
    on_gpu, require_dtype, require_numbers, require_rank, require_shape, require_together,
};
use crate::batch_invariance;
#[cfg(feature = "cuda")]
use crate::embedding;
use crate::host;
use candle_core::{DType, Device, Result, Tensor, WithDType, bail};
use std::cmp::Reverse;

/// The keys, or the values, of many tokens in blocks.
#[derive(Clone, Copy, Debug)]
pub enum Pool<'a> {
    /// `(blocks, block, kv_heads, head_dim)`, contiguous, of the dtype of the queries.
    Dense(&'a Tensor),
    /// Rounded to 8 bits.
    Rounded(&'a RoundedPool),
}

impl<'a> From<&'a Tensor> for Pool<'a> {
    fn from(tensor: &'a Tensor) -> Self {
        Self::Dense(tensor)
    }
}

impl<'a> From<&'a RoundedPool> for Pool<'a> {
    fn from(rounded: &'a RoundedPool) -> Self {
        Self::Rounded(rounded)
    }
}

impl<'a> Pool<'a> {
    /// Its numbers, or their codes: `(blocks, block, kv_heads, head_dim)`.
    fn elements(self) -> &'a Tensor {
        match self {
            Self::Dense(tensor) => tensor,
            Self::Rounded(rounded) => rounded.codes(),
        }
    }

    /// The scales of codes.
    fn scales(self) -> Option<&'a Tensor> {
        match self {
            Self::Dense(_) => None,
            Self::Rounded(rounded) => Some(rounded.scales()),
        }
    }
}

/// Stands in a table for a block that is not there any more.
pub const HOLE: u32 = u32::MAX;

/// A sequence of a batch.
#[derive(Clone, Copy, Debug)]
pub struct Sequence<'a> {
    /// Tokens at its end whose queries are computed; there may be none.
    pub queries: usize,
    /// Tokens whose keys and values are in the pools, with those of the queries.
    pub keys: usize,
    /// Entry `i` is the block of the pools that holds the tokens from `i·block` up to `(i + 1)·block`, or
    /// [`HOLE`] where no query sees any of them. Sequences may share blocks. Further entries aren't read.
    pub table: &'a [u32],
}

/// What is known of a sequence on the host.
#[derive(Clone, Copy)]
struct Span {
    /// Its first query in the batch.
    first: usize,
    queries: usize,
    keys: usize,
}

/// Numbers of a sequence among those of a batch: its [`Span`], and where the parts of its results begin, of
/// which each query has room for one for every [`SEGMENT`] of the ranges of keys.
const SPAN_NUMBERS: usize = 4;
/// Keys of an item of a sequence of up to [`FEW_QUERIES`]: what a block of a GPU has, but on CUDA, where a block may have
/// several, or a part of one.
pub(super) const PAGED_SPLIT: usize = 256;
/// Keys of a part of what a query gives, on CUDA's tensor cores; elsewhere a part is of an item.
pub(super) const SEGMENT: usize = 64;
/// Queries of a sequence whose keys a GPU's blocks share, at most.
pub const FEW_QUERIES: usize = 16;
/// Queries of an item of a sequence with more.
const PAGED_QUERIES: usize = 128;

/// Pairs of numbers that say what blocks of a GPU do: a sequence, and which part of its work.
#[derive(Clone, Copy, Default)]
struct Items {
    /// Where they are among the numbers.
    start: usize,
    /// How many there is room for.
    room: usize,
}

/// The kinds of items. The number of this place says how many there are.
const KINDS: usize = 4;
/// Ranges of keys, of sequences with one query, and with a few.
const SINGLE: usize = 0;
const FEW: usize = 1;
/// Tiles of queries, of sequences with many.
const MANY: usize = 2;
/// Queries that may have several parts.
const SPLIT: usize = 3;

/// Which items there are.
#[derive(Clone, Copy, Default)]
struct Plan {
    /// Where sequences and tables are among the numbers.
    spans: usize,
    tables: usize,
    items: [Items; KINDS],
    /// Queries of a sequence with a few at most, keys at most of a sequence with a few or one, and parts of results.
    most_few: usize,
    most_keys: usize,
    parts: usize,
    /// Sequences with one query, and with a few.
    singles: usize,
    fews: usize,
}

/// The sequences of a batch: made once a pass, for all layers. Those that are made with
/// [batch invariance](crate::batch_invariance) give a query the same bits in whatever pieces its sequence is computed, as all do
/// on CUDA; few bf16 queries on a CPU take longer then, and many on Metal, which also takes memory for what each range of 256
/// keys gives each.
pub struct Sequences {
    spans: Vec<Span>,
    /// What a GPU reads: counts, spans, tables `(sequences, width)`, filled up with [`HOLE`]s, and items.
    numbers: Vec<u32>,
    plan: Plan,
    /// The same on the device.
    uploaded: Tensor,
    /// Entries of a table.
    width: usize,
    /// Tokens of a block, and blocks of a pool.
    block: usize,
    blocks: usize,
    /// Queries of all sequences.
    tokens: usize,
    /// The longest window in which no query sees a hole, and the sequence that says so.
    longest_window: Option<(usize, usize)>,
    #[cfg(target_arch = "x86_64")]
    is_invariant: bool,
}

impl Sequences {
    /// The sequences of a batch, in the order of their queries, for pools of `blocks` blocks of `block` tokens
    /// on `device`.
    ///
    /// # Errors
    /// When a block has no tokens, a sequence has more queries than keys, its table is shorter than its keys
    /// need, or an entry that they need is neither a block of the pools nor [`HOLE`]. A hole among the keys
    /// that a query sees is an error of [`forward_paged`], as that depends on the window.
    pub fn new(
        sequences: &[Sequence],
        block: usize,
        blocks: usize,
        device: &Device,
    ) -> Result<Sequences> {
        Self::with_room(sequences, 0, block, blocks, device)
    }

    /// The same with room for `room` keys in each sequence. The numbers of batches with one room, and as many
    /// queries in each of their sequences, may take each other's place: see [`Sequences::numbers`].
    ///
    /// # Errors
    /// Like [`Sequences::new`].
    pub fn with_room(
        sequences: &[Sequence],
        room: usize,
        block: usize,
        blocks: usize,
        device: &Device,
    ) -> Result<Sequences> {
        const OPERATION: &str = "attention::Sequences";
        if block == 0 {
            bail!("metal-candle-kernels: {OPERATION}: a block has 0 tokens, expected at least 1")
        }
        let needed = |sequence: &Sequence| sequence.keys.div_ceil(block);
        let width = sequences.iter().map(needed).max().unwrap_or(0).max(room.div_ceil(block));
        let mut tables = Vec::with_capacity(sequences.len() * width);
        let mut spans = Vec::with_capacity(sequences.len());
        let mut longest_window: Option<(usize, usize)> = None;
        let mut tokens = 0;
        for (index, sequence) in sequences.iter().enumerate() {
            let Sequence { queries, keys, table } = *sequence;
            if queries > keys {
                bail!(
                    "metal-candle-kernels: {OPERATION}: sequence {index} has {queries} queries but only {keys} keys, expected at least as many keys"
                )
            }
            let needed = needed(sequence);
            let Some(table) = table.get(..needed) else {
                bail!(
                    "metal-candle-kernels: {OPERATION}: the table of sequence {index} has {} entries, expected {needed} for {keys} keys in blocks of {block}",
                    table.len()
                )
            };
            let wrong = |entry: &&u32| **entry != HOLE && **entry as usize >= blocks;
            if let Some(entry) = table.iter().find(wrong) {
                bail!(
                    "metal-candle-kernels: {OPERATION}: the table of sequence {index} names block {entry}, expected less than {blocks}, or HOLE"
                )
            }
            let hole = table.iter().rposition(|entry| *entry == HOLE);
            if let (Some(hole), true) = (hole, queries > 0) {
                // What the first query may see is behind the hole; not even itself where that is 0.
                let window = (keys - queries + 1).saturating_sub((hole + 1) * block);
                if longest_window.is_none_or(|(longest, _)| window < longest) {
                    longest_window = Some((window, index));
                }
            }
            tables.extend_from_slice(table);
            tables.resize(tables.len() + width - needed, HOLE);
            spans.push(Span { first: tokens, queries, keys });
            tokens += queries;
        }
        let (numbers, plan) = plan(&spans, &tables, room, device)?;
        let uploaded = host::numbers_on(device, &numbers)?;
        Ok(Sequences {
            spans,
            numbers,
            plan,
            uploaded,
            width,
            block,
            blocks,
            tokens,
            longest_window,
            #[cfg(target_arch = "x86_64")]
            is_invariant: batch_invariance::is_on(),
        })
    }

    /// What a GPU reads of the batch.
    ///
    /// They may be the inputs of a [`Recording`](crate::recording::Recording), whose work makes the same
    /// sequences read them there with [`Sequences::reading`], and which then runs on the numbers of other
    /// batches that have the same room, and as many queries in each of their sequences.
    pub fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    /// The same sequences, of which a GPU reads the numbers `(count)` u32 that are given here, contiguous, and written by
    /// the host, or by other work than what comes just before attention. On the CPU they stay what they are.
    ///
    /// # Errors
    /// When there are more or fewer, they are no u32, not contiguous, or on another device.
    pub fn reading(&self, numbers: &Tensor) -> Result<Sequences> {
        const OPERATION: &str = "attention::Sequences::reading";
        require_numbers(OPERATION, &self.uploaded, numbers)?;
        Ok(Sequences {
            spans: self.spans.clone(),
            numbers: self.numbers.clone(),
            uploaded: numbers.clone(),
            ..*self
        })
    }

    /// Queries of all sequences: the rows of `q`.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The blocks of a sequence.
    fn table(&self, sequence: usize) -> &[u32] {
        &self.numbers[self.plan.tables + sequence * self.width..][..self.width]
    }
}

/// What a GPU reads of a batch, and where it finds it.
fn plan(spans: &[Span], tables: &[u32], room: usize, device: &Device) -> Result<(Vec<u32>, Plan)> {
    let ranges_of = |keys: usize| keys.div_ceil(PAGED_SPLIT);
    // As many on every device, so that a recording takes the numbers that are made on the host.
    let parts_of =
        |keys: usize| if keys > SEGMENT { ranges_of(keys) * (PAGED_SPLIT / SEGMENT) } else { 1 };
    // Elsewhere many queries have other bits.
    let takes_many = device.is_cuda() || !batch_invariance::is_on();
    let mut plan = Plan { spans: KINDS, ..Plan::default() };
    plan.tables = plan.spans + spans.len() * SPAN_NUMBERS;
    let (mut numbers, mut parts) = (vec![0usize; plan.spans], 0);
    let (mut items, mut rooms) = ([const { Vec::new() }; KINDS], [0; KINDS]);
    let mut by_keys = [const { Vec::new() }; KINDS];
    for (index, span) in spans.iter().enumerate() {
        let Span { first, queries, keys } = *span;
        numbers.extend([first, queries, keys, parts]);
        let most = keys.max(room);
        if queries == 0 {
            continue;
        }
        if queries > FEW_QUERIES && takes_many {
            let tiles = queries.div_ceil(PAGED_QUERIES);
            items[MANY].extend((0..tiles).map(|tile| (index, tile)));
            rooms[MANY] += tiles;
            continue;
        }
        let kind = if queries == 1 { SINGLE } else { FEW };
        by_keys[kind].push((index, ranges_of(keys)));
        rooms[kind] += ranges_of(most);
        if parts_of(keys) > 1 {
            items[SPLIT].extend((0..queries).map(|query| (index, query)));
        }
        if parts_of(most) > 1 {
            rooms[SPLIT] += queries;
            parts += queries * parts_of(most);
        }
        if kind == SINGLE {
            plan.singles += 1;
        } else {
            plan.fews += 1;
            plan.most_few = plan.most_few.max(queries);
        }
        plan.most_keys = plan.most_keys.max(most);
    }
    plan.parts = parts;
    // Those that see the most keys first.
    items[MANY].sort_by_key(|(index, tile)| {
        let Span { queries, keys, .. } = spans[*index];
        Reverse(keys - queries + queries.min((tile + 1) * PAGED_QUERIES))
    });
    // Those with the most keys first, as a block may have all of them, and the first ranges, whose blocks have these.
    for (items, by_keys) in items.iter_mut().zip(&mut by_keys) {
        by_keys.sort_by_key(|(_, ranges)| Reverse(*ranges));
        let most = by_keys.first().map_or(0, |(_, ranges)| *ranges);
        for range in 0..most {
            let has_it = |(_, ranges): &&(usize, usize)| range < *ranges;
            items.extend(by_keys.iter().take_while(has_it).map(|(index, _)| (*index, range)));
        }
    }
    let mut start = plan.tables + tables.len();
    for (kind, items) in items.iter().enumerate() {
        plan.items[kind] = Items { start, room: rooms[kind] };
        numbers[kind] = items.len();
        start += 2 * rooms[kind];
    }
    let small = |number: usize| match u32::try_from(number) {
        Ok(number) if number <= i32::MAX as u32 => Ok(number),
        _ => bail!(
            "metal-candle-kernels: attention::Sequences: a batch with {number} of something is too large"
        ),
    };
    let mut all = numbers.into_iter().map(small).collect::<Result<Vec<_>>>()?;
    all.extend_from_slice(tables);
    for (items, place) in items.into_iter().zip(&plan.items) {
        for (sequence, part) in items {
            all.extend([small(sequence)?, small(part)?]);
        }
        all.resize(small(place.start + 2 * place.room)? as usize, 0);
    }
    Ok((all, plan))
}

/// `o` `(tokens, heads, head_dim)`, contiguous, of the queries `q` of that shape of all sequences, one
/// sequence after the other. The pools `k` and `v` `(blocks, block, kv_heads, head_dim)` hold the keys and
/// values of all tokens already, those of the queries too; what is in them beyond the tokens of the sequences
/// doesn't matter. `q` may have any strides. Sums are made in f32 (f64 for f64).
///
/// What a query gives has the same bits whatever other sequences there are, and in which blocks its keys lie.
/// On CUDA it has the same bits in whatever pieces the tokens of its sequence are computed, one by one or all at once, too. On
/// the CPU as well, and those that [`forward`](super::forward) gives for more than 4 queries of the sequence by itself; where
/// the machine multiplies pairs of bf16 numbers, up to 16 such queries times heads of a key head only if the sequences are made
/// with batch invariance. On Metal only those have the same bits in pieces of any size, others in pieces that all have up to 16
/// queries, or all more. Over pools that are rounded to 8 bits it has the bits of pools of what their codes stand for; on CUDA
/// where `head_dim` is a multiple of 16.
///
/// Blocks may have any size. On CUDA, tensor cores are used for f16 and bf16 where it is a multiple of 16 and
/// `head_dim` is one of 8. Whatever numbers a recording is given, a GPU reads nothing beyond the pools.
///
/// # Errors
/// When shapes don't fit the sequences, `heads` isn't a multiple of `kv_heads`, the pools aren't contiguous,
/// a query would see a [`HOLE`], the window is 0, the softcap isn't positive, dtypes differ, one pool alone is
/// rounded, or the tensors and the sequences aren't on one device; when `head_dim` is above 256, on Metal, and on CUDA
/// over rounded pools and in a recording: dense ones are read sequence by sequence then.
pub fn forward_paged<'a>(
    q: &Tensor,
    k: impl Into<Pool<'a>>,
    v: impl Into<Pool<'a>>,
    sequences: &Sequences,
    options: &Options,
) -> Result<Tensor> {
    const OPERATION: &str = "attention::forward_paged";
    let pools = [k.into(), v.into()];
    let sizes = check(OPERATION, q, pools, sequences, options)?;
    #[cfg(feature = "cuda")]
    if q.device().is_cuda()
        && sizes.head_dim > cuda::MOST_HEAD_DIM
        && let [Pool::Dense(k), Pool::Dense(v)] = pools
    {
        crate::backend::cuda::refuse_in_recording("attention over pools with heads above 256")?;
        return one_by_one(q, [k, v], sequences, options);
    }
    on_gpu!(q, gpu => gpu::forward(OPERATION, sizes, q, pools, sequences, options));
    let q = Input::strided_rows(q)?;
    let [k, v] = pools.map(|pool| Input::contiguous(pool.elements()));
    let [k_scales, v_scales] = pools.map(|pool| pool.scales().map(Input::contiguous).transpose());
    let (k, v, k_scales, v_scales) = (k?, v?, k_scales?, v_scales?);
    let (q, k, v) = (q.read(), k.read(), v.read());
    let k_scales = k_scales.as_ref().map(Input::read);
    let v_scales = v_scales.as_ref().map(Input::read);
    dispatch!(OPERATION, q.dtype(), T => {
        let problem = cpu::Problem {
            sizes,
            sequences,
            q: cpu::Queries::new(q.storage_slice::<T>()?, q.layout)?,
            keys: cpu::Rows::new(&k, k_scales.as_ref())?,
            values: cpu::Rows::new(&v, v_scales.as_ref())?,
            scale: Sum::<T>::from_f64(options.scale),
            softcap: options.softcap.map(Sum::<T>::from_f64),
            sinks: sink_numbers(options)?,
            window: options.window.unwrap_or(usize::MAX),
        };
        let mut o = unwritten::<T>(sequences.tokens * sizes.heads * sizes.head_dim);
        problem.forward(&mut o);
        let shape = (sequences.tokens, sizes.heads, sizes.head_dim);
        Tensor::from_vec(o, shape, &Device::Cpu)
    })
}

/// What [`forward_paged`] gives, of each sequence by [`forward`](super::forward) over copies of its keys and values.
#[cfg(feature = "cuda")]
fn one_by_one(
    q: &Tensor,
    [k, v]: [&Tensor; 2],
    sequences: &Sequences,
    options: &Options,
) -> Result<Tensor> {
    let (blocks, block, kv_heads, head_dim) = k.dims4()?;
    let mut parts = Vec::with_capacity(sequences.spans.len());
    for (index, span) in sequences.spans.iter().enumerate() {
        let Span { first, queries, keys } = *span;
        if queries == 0 {
            continue;
        }
        let table = sequences.table(index);
        let slot = |key: usize| table[key / block] * block as u32 + (key % block) as u32;
        let place = |key: usize| match table[key / block] {
            // No query sees it, so it may be any that there is.
            HOLE => slot(keys - 1),
            _ => slot(key),
        };
        let places: Vec<_> = (0..keys).map(place).collect();
        let places = Tensor::from_vec(places, (1, keys), q.device())?;
        let of_sequence = |pool: &Tensor| {
            let rows = pool.reshape((blocks * block, kv_heads * head_dim))?;
            embedding::forward(&rows, &places)?.reshape((1, keys, kv_heads, head_dim))
        };
        let (k, v) = (of_sequence(k)?, of_sequence(v)?);
        let q = q.narrow(0, first, queries)?.unsqueeze(0)?;
        parts.push(super::forward(&q, &k, &v, None, options)?.0.squeeze(0)?);
    }
    match parts.is_empty() {
        true => Tensor::zeros(q.shape(), q.dtype(), q.device()),
        false => Tensor::cat(&parts, 0),
    }
}

/// The sizes of a call beside those of its sequences, checked.
#[derive(Clone, Copy)]
struct Sizes {
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
}

fn check(
    operation: &str,
    q: &Tensor,
    pools: [Pool; 2],
    sequences: &Sequences,
    options: &Options,
) -> Result<Sizes> {
    let [k, v] = pools.map(Pool::elements);
    require_together(operation, &[q, k, v, &sequences.uploaded])?;
    let dtype = match pools {
        [Pool::Dense(_), Pool::Dense(_)] => q.dtype(),
        [Pool::Rounded(_), Pool::Rounded(_)] => DType::U8,
        _ => bail!(
            "metal-candle-kernels: {operation}: one of the pools is rounded to 8 bits, expected both or none"
        ),
    };
    require_rank(operation, "q", q, 3, "(tokens, heads, head_dim)")?;
    require_rank(operation, "k", k, 4, "(blocks, block, kv_heads, head_dim)")?;
    let (_, heads, head_dim) = q.dims3()?;
    let (_, _, kv_heads, _) = k.dims4()?;
    require_shape(operation, "q", q, &[sequences.tokens, heads, head_dim])?;
    let pool = [sequences.blocks, sequences.block, kv_heads, head_dim];
    for (name, pool_of) in [("k", k), ("v", v)] {
        require_shape(operation, name, pool_of, &pool)?;
        require_dtype(operation, name, pool_of, dtype)?;
        if !pool_of.is_contiguous() {
            bail!("metal-candle-kernels: {operation}: {name} is not contiguous, expected it to be")
        }
    }
    check_heads(operation, heads, kv_heads)?;
    check_options(operation, q, heads, options)?;
    if let Some((longest, index)) = sequences.longest_window
        && options.window.is_none_or(|window| window > longest)
    {
        let window =
            options.window.map_or("no window".into(), |window| format!("a window of {window}"));
        bail!(
            "metal-candle-kernels: {operation}: with {window}, queries of sequence {index} see a block that its table has not, expected a window of {longest} keys at most"
        )
    }
    Ok(Sizes { heads, kv_heads, head_dim })
}
