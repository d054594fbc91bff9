//! Rows rounded to e4m3, of [`Arithmetic::Fp8`](super::Arithmetic::Fp8).
//!
//! The scale of a row is the least power of two, and 2^-110 at least, of which 448, the largest e4m3, are no less
//! than the row's largest magnitude. Its numbers become the nearest multiples by an e4m3, of two the even one:
//!
//! ```text
//! scale[n] = 2^⌈log2(max_m |x[n, m]| / 448)⌉        x̂[n, m] = e4m3(x[n, m] / scale[n]) · scale[n]
//! ```
//!
//! With a power of two nothing is rounded but to the 4 bits of e4m3, so x̂ is exact in the dtype of x, and is the same
//! whether it is multiplied as codes or as numbers; but for numbers of f16 above 63488, which are nearest to 65536. A row of which something isn't finite becomes NaN.

#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(test)]
mod tests;

use super::quantize::to_e4m3;
use super::{Arithmetic, Levels, OPERATION, Quantized, Scales};
use crate::backend::cpu::{for_each_chunk, rows_per_task};
use crate::backend::{require_together, rows_and_columns};
use candle_core::{DType, Device, Result, Tensor, bail};
use metal_candle_cpu::quantized::e4m3;

/// The least scale, with which no multiple by an e4m3 is subnormal.
const LEAST: f32 = f32::from_bits(17 << 23);

/// Neighbouring columns of rows that share their scales: `(.., columns)`, and what each column is multiplied by first,
/// `(columns)` f32.
pub(crate) type Part<'a> = (&'a Tensor, Option<&'a Tensor>);

/// The parts side by side and rounded, `(rows, columns of all)` in f32 or the dtype of the parts.
pub(crate) fn round(parts: &[Part], dtype: DType) -> Result<Tensor> {
    let Some((first, _)) = parts.first() else {
        bail!("metal-candle-kernels: {OPERATION}: no rows to be rounded, expected some")
    };
    #[cfg(feature = "cuda")]
    if first.device().is_cuda() {
        return cuda::round_to_numbers(parts, dtype);
    }
    if first.device().is_metal() {
        bail!("metal-candle-kernels: {OPERATION}: rows on Metal can't be rounded to e4m3")
    }
    let (rows, _) = rows_and_columns(OPERATION, "x", first)?;
    let mut all = Vec::with_capacity(parts.len());
    for (x, scales) in parts {
        require_together(OPERATION, &[first, x])?;
        let (_, columns) = rows_and_columns(OPERATION, "x", x)?;
        let x = x.to_dtype(DType::F32)?.reshape((rows, columns))?;
        all.push(match scales {
            Some(scales) => x.broadcast_mul(scales)?,
            None => x,
        });
    }
    let x = Tensor::cat(&all, 1)?;
    let columns = x.dim(1)?;
    let mut numbers = x.flatten_all()?.to_vec1::<f32>()?;
    if columns > 0 {
        for_each_chunk(&mut numbers, rows_per_task(columns) * columns, |_, rows| {
            rows.chunks_mut(columns).for_each(round_row);
        });
    }
    Tensor::from_vec(numbers, (rows, columns), &Device::Cpu)?.to_dtype(dtype)
}

fn round_row(row: &mut [f32]) {
    let largest = row.iter().fold(0f32, |largest, x| largest.max(x.abs()));
    if !row.iter().all(|x| x.is_finite()) {
        return row.fill(f32::NAN);
    }
    let scale = scale(largest);
    for x in row {
        *x = e4m3(to_e4m3(*x / scale)) * scale;
    }
}

fn scale(largest: f32) -> f32 {
    // 448 is 1.75·2^8: a mantissa beyond 1.75 carries into the exponent.
    let exponent = (largest.to_bits() + 0x1f_ffff) >> 23;
    f32::from_bits(exponent.saturating_sub(8) << 23).max(LEAST)
}

impl Quantized {
    /// The scales of the matrix's rows, if products with it are those of [`Arithmetic::Fp8`].
    pub(crate) fn fp8_scales(&self) -> Option<&Tensor> {
        match &self.scales {
            Scales::Plain { scales, offsets: None }
                if self.arithmetic == Arithmetic::Fp8
                    && self.levels == Levels::E4m3
                    && self.group == self.shape.1
                    && scales.dtype() == DType::F32 =>
            {
                Some(scales)
            }
            _ => None,
        }
    }

    /// The matrix of its codes' levels, without scales.
    pub(crate) fn levels_alone(&self) -> Result<Quantized> {
        let one = Tensor::ones(1, DType::F32, self.device())?;
        let scales = Scales::Plain { scales: one, offsets: None };
        let (codes, group) = (self.codes.clone(), self.elements().max(1));
        Quantized::new(self.shape, self.levels, group, codes, scales)
    }
}
