//! Vectors in f64, of which the starts that are taken from weights and data are made.

use rayon::prelude::*;

/// Rows of equal length.
pub(super) type Rows = Vec<Vec<f64>>;

/// Sums that are made side by side.
const LANES: usize = 8;
/// Numbers of a row that a thread changes at a time.
const PIECE: usize = 1024;

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    let ((a, rest_of_a), (b, rest_of_b)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut sums = [0.0; LANES];
    for (a, b) in a.iter().zip(b) {
        for ((sum, a), b) in sums.iter_mut().zip(a).zip(b) {
            *sum += a * b;
        }
    }
    let rest: f64 = rest_of_a.iter().zip(rest_of_b).map(|(a, b)| a * b).sum();
    sums.iter().sum::<f64>() + rest
}

/// Gram and Schmidt, twice, which is orthogonal to rounding (Giraud et al., 2005); a row that depends on those before it
/// becomes zero.
pub(super) fn orthonormalize(rows: &mut Rows) {
    for index in 0..rows.len() {
        let (done, rest) = rows.split_at_mut(index);
        let row = &mut rest[0];
        let before = dot(row, row).sqrt();
        for _ in 0..2 {
            let along: Vec<f64> = done.par_iter().map(|other| dot(row, other)).collect();
            row.par_chunks_mut(PIECE).enumerate().for_each(|(piece, values)| {
                for (other, along) in done.iter().zip(&along) {
                    let other = &other[piece * PIECE..];
                    values.iter_mut().zip(other).for_each(|(value, other)| *value -= along * other);
                }
            });
        }
        let length = dot(row, row).sqrt();
        let scale = if length > before * 1e-12 { length.recip() } else { 0.0 };
        row.iter_mut().for_each(|value| *value *= scale);
    }
}
