//! Rows rounded to integers of 8 bits, for [`Arithmetic::Int8`](crate::quantized::Arithmetic::Int8).

/// Neighbours that are multiples of one scale.
pub(super) const ROUNDED: usize = 32;

/// Rows as integers of -127 to 127, and a scale for 32 neighbours.
pub(super) struct Rounded {
    pub rows: usize,
    pub depth: usize,
    /// `(rows, depth)`
    integers: Vec<i8>,
    /// `(rows, ⌈depth / 32⌉)`; NaN where a number isn't finite.
    scales: Vec<f32>,
}

impl Rounded {
    /// Of `x` `(rows, depth)`.
    pub(super) fn new(rows: usize, depth: usize, x: &[f32]) -> Self {
        let (mut integers, mut scales) = (vec![0; rows * depth], Vec::new());
        let x = x.chunks(depth.max(1)).zip(integers.chunks_mut(depth.max(1)));
        for (x, integers) in x {
            for (x, integers) in x.chunks(ROUNDED).zip(integers.chunks_mut(ROUNDED)) {
                let largest = x.iter().fold(0f32, |largest, x| largest.max(x.abs()));
                let finite = x.iter().all(|x| x.is_finite());
                let scale = largest / 127.0;
                // Too small numbers have no inverse.
                let inverse = if scale > f32::MIN_POSITIVE { 1.0 / scale } else { 0.0 };
                for (integer, x) in integers.iter_mut().zip(x) {
                    *integer = (x * inverse).round_ties_even() as i32 as i8;
                }
                scales.push(if finite { scale } else { f32::NAN });
            }
        }
        Rounded { rows, depth, integers, scales }
    }

    pub(super) fn integers(&self, row: usize) -> &[i8] {
        &self.integers[row * self.depth..][..self.depth]
    }

    pub(super) fn scales(&self, row: usize) -> &[f32] {
        let count = self.depth.div_ceil(ROUNDED);
        &self.scales[row * count..][..count]
    }

    /// The numbers that the integers stand for, `(rows, depth)`.
    pub(super) fn numbers(&self) -> Vec<f32> {
        let mut numbers = Vec::with_capacity(self.integers.len());
        for row in 0..self.rows {
            for (integers, scale) in self.integers(row).chunks(ROUNDED).zip(self.scales(row)) {
                numbers.extend(integers.iter().map(|integer| f32::from(*integer) * scale));
            }
        }
        numbers
    }
}
