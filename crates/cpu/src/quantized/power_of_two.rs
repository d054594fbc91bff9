//! Numbers as integers times a power of two.

/// What neighbouring numbers are multiples of.
#[derive(Clone, Copy)]
pub struct PowerOfTwo {
    /// NaN where the numbers aren't all finite.
    pub power: f32,
    inverse: f32,
}

impl PowerOfTwo {
    /// Of numbers of which the largest has these bits, but for its sign, as integers of so many bits and a sign.
    #[inline(always)]
    pub fn of(size: u32, bits: u32) -> Self {
        const EXPONENT: u32 = 0xff << 23;
        // The largest number is below twice the power of its exponent.
        let exponent = (size & EXPONENT).max(bits << 23) - ((bits - 1) << 23);
        let power = match size < EXPONENT {
            true => f32::from_bits(exponent),
            false => f32::NAN,
        };
        PowerOfTwo { power, inverse: f32::from_bits((254 << 23) - exponent) }
    }

    /// The nearest integer. It has no meaning where the numbers aren't all finite.
    #[inline(always)]
    pub fn integer(self, number: f32) -> i32 {
        // 1.5·2^23, which leaves no room for what is behind the point.
        let round = f32::from_bits(150 << 23 | 1 << 22);
        let rounded = (number * self.inverse + round).to_bits() as i32;
        rounded.wrapping_sub(round.to_bits() as i32)
    }
}
