//! Attention of the next token of each sequence, as one operation with what puts it into the pools.

#[cfg(feature = "cuda")]
use super::{Pool, cuda};
use super::{Sequences, forward_paged};
use crate::attention::Options;
use crate::{copy, rope};
use candle_core::{Result, Tensor};

#[cfg(test)]
mod tests;

/// Tokens of the sequences of a batch that aren't in its pools yet, with queries and keys as they are before a rotary
/// embedding.
#[derive(Clone, Copy, Debug)]
pub struct NewTokens<'a> {
    /// `(tokens, 1, heads, head_dim)`
    pub q: &'a Tensor,
    /// `(tokens, 1, kv_heads, head_dim)`
    pub k: &'a Tensor,
    /// Like k.
    pub v: &'a Tensor,
    /// The angles, `(tokens, 1, rotated / 2)` each, as [`rope::forward`] takes them.
    pub cos: &'a Tensor,
    /// Like cos.
    pub sin: &'a Tensor,
    /// Where keys and values go, `(tokens)` u32, as [`copy::write_rows_both`] takes it: where the table of a token's
    /// sequence has its last key, which no other sequence sees, or [`copy::NOWHERE`].
    pub places: &'a Tensor,
}

/// Rotates queries and keys ([`rope::forward_both`]), puts keys and values into the pools `(blocks, block, kv_heads,
/// head_dim)` of keys and of values ([`copy::write_rows_both`]), and gives what the queries see, `(tokens, heads,
/// head_dim)` ([`forward_paged`]), with the bits of these. On CUDA it is one kernel where each sequence has one query,
/// [`forward_paged`] uses tensor cores, there is a multiple of 8 angles, and rows begin at 16 bytes; and one more where blocks
/// share the keys of few long sequences, but that on Hopper a cluster of blocks has those of up to some 1400.
///
/// # Errors
/// Like those three.
pub fn forward_paged_new(
    tokens: &NewTokens,
    pools: [&Tensor; 2],
    sequences: &Sequences,
    options: &Options,
) -> Result<Tensor> {
    let NewTokens { q, k, v, cos, sin, places } = *tokens;
    #[cfg(feature = "cuda")]
    if q.device().is_cuda() {
        const OPERATION: &str = "attention::forward_paged_new";
        rope::check(q, cos, sin)?;
        rope::check(k, cos, sin)?;
        let q = q.squeeze(1)?;
        let sizes = super::check(OPERATION, &q, pools.map(Pool::Dense), sequences, options)?;
        copy::check_rows_both(pools, [&k.squeeze(1)?, &v.squeeze(1)?], places)?;
        let given = (tokens, &q);
        if let Some(o) = cuda::forward_new(OPERATION, sizes, given, pools, sequences, options)? {
            return Ok(o);
        }
    }
    let (q, k) = rope::forward_both(q, k, cos, sin)?;
    copy::write_rows_both(pools, [&k.squeeze(1)?, &v.squeeze(1)?], places)?;
    forward_paged(&q.squeeze(1)?, pools[0], pools[1], sequences, options)
}
