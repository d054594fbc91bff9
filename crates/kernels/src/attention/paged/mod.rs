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
//! So what a query gives follows from the query, and the keys and values it sees, alone.

mod cpu;
#[cfg(test)]
mod tests;

use super::{Options, check_heads, check_options};
use crate::backend::cpu::{Input, Sum, dispatch, unwritten};
use crate::backend::{require_dtype, require_rank, require_shape, require_together};
use candle_core::{Device, Result, Tensor, WithDType, bail};

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

/// The sequences of a batch: made once a pass, for all layers.
pub struct Sequences {
    spans: Vec<Span>,
    /// `(sequences, width)`, filled up with [`HOLE`]s.
    tables: Vec<u32>,
    /// Entries of a table.
    width: usize,
    /// Tokens of a block, and blocks of a pool.
    block: usize,
    blocks: usize,
    /// Queries of all sequences.
    tokens: usize,
    /// The longest window in which no query sees a hole, and the sequence that says so.
    longest_window: Option<(usize, usize)>,
    device: Device,
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
        const OPERATION: &str = "attention::Sequences";
        if block == 0 {
            bail!("metal-candle-kernels: {OPERATION}: a block has 0 tokens, expected at least 1")
        }
        let needed = |sequence: &Sequence| sequence.keys.div_ceil(block);
        let width = sequences.iter().map(needed).max().unwrap_or(0);
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
        let device = device.clone();
        Ok(Sequences { spans, tables, width, block, blocks, tokens, longest_window, device })
    }

    /// Queries of all sequences: the rows of `q`.
    pub fn tokens(&self) -> usize {
        self.tokens
    }

    /// The blocks of a sequence.
    fn table(&self, sequence: usize) -> &[u32] {
        &self.tables[sequence * self.width..][..self.width]
    }
}

/// `o` `(tokens, heads, head_dim)`, contiguous, of the queries `q` of that shape of all sequences, one
/// sequence after the other. The pools `k` and `v` `(blocks, block, kv_heads, head_dim)` hold the keys and
/// values of all tokens already, those of the queries too; what is in them beyond the tokens of the sequences
/// doesn't matter. `q` may have any strides. Sums are made in f32 (f64 for f64).
///
/// On the CPU, any size of blocks will do, and what a query gives has the same bits whatever other sequences
/// there are, in which pieces the tokens of its sequence are computed, one by one or all at once, in which
/// blocks their keys lie, and how many threads there are.
///
/// # Errors
/// When shapes don't fit the sequences, `heads` isn't a multiple of `kv_heads`, the pools aren't contiguous,
/// a query would see a [`HOLE`], the window is 0, the softcap isn't positive, dtypes differ, or the tensors
/// and the sequences aren't on one device.
pub fn forward_paged(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    sequences: &Sequences,
    options: &Options,
) -> Result<Tensor> {
    const OPERATION: &str = "attention::forward_paged";
    let sizes = check(OPERATION, q, k, v, sequences, options)?;
    let q = Input::strided_rows(q)?;
    let (k, v) = (Input::contiguous(k)?, Input::contiguous(v)?);
    let (q, k, v) = (q.read(), k.read(), v.read());
    dispatch!(OPERATION, q.dtype(), T => {
        let problem = cpu::Problem {
            sizes,
            sequences,
            q: cpu::Queries::new(q.storage_slice::<T>()?, q.layout)?,
            keys: k.slice()?,
            values: v.slice()?,
            scale: Sum::<T>::from_f64(options.scale),
            softcap: options.softcap.map(Sum::<T>::from_f64),
            window: options.window.unwrap_or(usize::MAX),
        };
        let mut o = unwritten::<T>(sequences.tokens * sizes.heads * sizes.head_dim);
        problem.forward(&mut o);
        let shape = (sequences.tokens, sizes.heads, sizes.head_dim);
        Tensor::from_vec(o, shape, &Device::Cpu)
    })
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
    k: &Tensor,
    v: &Tensor,
    sequences: &Sequences,
    options: &Options,
) -> Result<Sizes> {
    require_together(operation, &[q, k, v])?;
    let (here, there) = (q.device().location(), sequences.device.location());
    if here != there {
        bail!(
            "metal-candle-kernels: {operation}: q is on {here:?} and the sequences are on {there:?}, expected one device"
        )
    }
    require_rank(operation, "q", q, 3, "(tokens, heads, head_dim)")?;
    require_rank(operation, "k", k, 4, "(blocks, block, kv_heads, head_dim)")?;
    let (_, heads, head_dim) = q.dims3()?;
    let (_, _, kv_heads, _) = k.dims4()?;
    require_shape(operation, "q", q, &[sequences.tokens, heads, head_dim])?;
    let pool = [sequences.blocks, sequences.block, kv_heads, head_dim];
    for (name, pool_of) in [("k", k), ("v", v)] {
        require_shape(operation, name, pool_of, &pool)?;
        require_dtype(operation, name, pool_of, q.dtype())?;
        if !pool_of.is_contiguous() {
            bail!("metal-candle-kernels: {operation}: {name} is not contiguous, expected it to be")
        }
    }
    check_heads(operation, heads, kv_heads)?;
    check_options(operation, options)?;
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
