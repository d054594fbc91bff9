//! Rows rounded to integers of 8 bits, of [`Arithmetic::Int8Rows`](super::Arithmetic::Int8Rows).
//!
//! The scale of a row is a 127th of its largest magnitude, and its numbers become the nearest multiples, of two the
//! even one. All steps are in f32, rounded each:
//!
//! ```text
//! scale[n] = (max_m |x[n, m]|) / 127        q[n, m] = nearest(x[n, m] · (1 / scale[n]))
//! ```
//!
//! A scale below the least normal number has no inverse: such a row becomes zeros. A row of which something isn't finite
//! becomes NaN. Sums of products of integers are exact in 32 bits, so that the bits of a result depend neither on the
//! processor nor on the number of rows.

#[cfg(test)]
mod tests;

use super::{Arithmetic, Levels, Quantized, Scales};
use candle_core::{DType, Tensor};

/// Products of a sum at most: 127·128 times as much is the largest that 32 bits with a sign hold.
const MOST: usize = 1 << 17;

/// The code of 0.
pub(crate) const ZERO: u8 = 128;

impl Quantized {
    /// The scales of the matrix's rows, if products with it are those of [`Arithmetic::Int8Rows`].
    pub(crate) fn int8_scales(&self) -> Option<&Tensor> {
        let fits = self.shape.0.max(self.shape.1) <= MOST;
        match &self.scales {
            Scales::Plain { scales, offsets: None }
                if self.arithmetic == Arithmetic::Int8Rows
                    && self.levels == (Levels::Integers { bits: 8, zero: ZERO })
                    && self.group == self.shape.1
                    && scales.dtype() == DType::F32
                    && fits =>
            {
                Some(scales)
            }
            _ => None,
        }
    }
}

/// Rounds a row to integers of -127 to 127, and gives its scale: NaN where something isn't finite.
#[inline(always)]
pub(crate) fn round_row(x: &[f32], integers: &mut [i8]) -> f32 {
    /// Adding it rounds an f32 to an integer and leaves that in the lowest bits.
    const ROUND: f32 = 12_582_912.0;
    // Magnitudes have the order of their bits, and what isn't finite is above all others.
    let largest = x.iter().fold(0, |largest, x| (x.to_bits() & 0x7fff_ffff).max(largest));
    let scale = f32::from_bits(largest) / 127.0;
    if !scale.is_finite() {
        integers.fill(0);
        return f32::NAN;
    }
    let inverse = if scale < f32::MIN_POSITIVE { 0.0 } else { 1.0 / scale };
    for (integer, x) in integers.iter_mut().zip(x) {
        *integer = (*x * inverse + ROUND).to_bits() as i8;
    }
    scale
}
