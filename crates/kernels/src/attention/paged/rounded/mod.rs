//! Pools of keys or values in 8 bits: MXINT8 of the OCP Microscaling Formats specification (version 1.0, 2023,
//! <https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf>).
//!
//! [`GROUP`] neighbours of a head share a scale, the power of two that their largest magnitude has as its exponent:
//!
//! ```text
//! scale = 2^⌊log2 max |x|⌋        code = round(64·x / scale), of two the even one, from -127 to 127
//! x̂ = code·scale / 64
//! ```
//!
//! A scale's byte is its exponent and 127, and 255 is NaN, which all numbers of a group become of which one isn't
//! finite. As no scale is below 2^-120, x̂ is exact in f32 and bf16, and in f16 where it is a number of that. So
//! attention over such a pool has the bits of attention over one that has all x̂.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

pub(super) use cpu::View;

use crate::backend::{on_gpu, require_dtype, require_shape, require_together};
use crate::copy;
use candle_core::{DType, Device, Result, Tensor, bail};

/// Neighbours that share a scale; the last ones of a head may be fewer.
const GROUP: usize = 32;

/// The keys, or the values, of many tokens in blocks, rounded to 8 bits.
#[derive(Clone, Debug)]
pub struct RoundedPool {
    /// `(blocks, block, kv_heads, head_dim)` u8
    codes: Tensor,
    /// `(blocks, block, kv_heads, groups)` u8
    scales: Tensor,
}

impl RoundedPool {
    /// Room for so many blocks of so many tokens: `(blocks, block, kv_heads, head_dim)`.
    ///
    /// # Errors
    /// When there is no memory for it.
    pub fn new(shape: (usize, usize, usize, usize), device: &Device) -> Result<Self> {
        let (blocks, block, kv_heads, head_dim) = shape;
        let groups = (blocks, block, kv_heads, head_dim.div_ceil(GROUP));
        let zeros = |shape| copy::zeros(shape, DType::U8, device);
        Ok(Self { codes: zeros(shape)?, scales: zeros(groups)? })
    }

    /// What a head of a token takes, in bytes.
    pub fn bytes_of_head(head_dim: usize) -> usize {
        head_dim + head_dim.div_ceil(GROUP)
    }

    /// Rounds rows, such as those of keys and values, and overwrites those of two pools with them, in place: row `n` of
    /// `rows` `(tokens, heads, head_dim)` becomes row `places[n]`, as
    /// [`copy::write_rows_both`](crate::copy::write_rows_both) has it.
    ///
    /// # Errors
    /// When shapes don't fit, dtypes aren't floats or differ, or tensors aren't on one device; on the CPU also when a
    /// place is beyond the pool, and then nothing is written.
    pub fn write_both(pools: [&Self; 2], rows: [&Tensor; 2], places: &Tensor) -> Result<()> {
        const OPERATION: &str = "RoundedPool::write_both";
        let [first, second] = pools;
        require_together(OPERATION, &[&first.codes, &second.codes, rows[0], rows[1], places])?;
        let (_, _, heads, head_dim) = first.codes.dims4()?;
        let dtype = rows[0].dtype();
        if !dtype.is_float() {
            bail!("metal-candle-kernels: {OPERATION}: found {dtype:?} rows, expected floats")
        }
        let tokens = rows[0].dims().first().copied().unwrap_or_default();
        for rows in rows {
            require_shape(OPERATION, "rows", rows, &[tokens, heads, head_dim])?;
            require_dtype(OPERATION, "rows", rows, dtype)?;
        }
        require_shape(OPERATION, "a pool", &second.codes, first.codes.dims())?;
        require_shape(OPERATION, "places", places, &[tokens])?;
        require_dtype(OPERATION, "places", places, DType::U32)?;
        if rows[0].elem_count() == 0 {
            return Ok(());
        }
        on_gpu!(rows[0], gpu => gpu::write_both(OPERATION, pools, rows, places));
        cpu::write_both(OPERATION, pools, rows, places)
    }

    /// `(blocks, block, kv_heads, head_dim)` u8
    pub(super) fn codes(&self) -> &Tensor {
        &self.codes
    }

    /// `(blocks, block, kv_heads, groups)` u8
    pub(super) fn scales(&self) -> &Tensor {
        &self.scales
    }
}
