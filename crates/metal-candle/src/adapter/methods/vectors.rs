//! Vectors in f64, of which the starts that are taken from weights are made.

/// Rows of equal length.
pub(super) type Rows = Vec<Vec<f64>>;

pub(super) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Gram and Schmidt, twice, which is orthogonal to rounding; a row that depends on those before it becomes zero.
pub(super) fn orthonormalize(rows: &mut Rows) {
    for index in 0..rows.len() {
        let (done, rest) = rows.split_at_mut(index);
        let row = &mut rest[0];
        let before = dot(row, row).sqrt();
        for _ in 0..2 {
            for other in done.iter() {
                let along = dot(row, other);
                row.iter_mut().zip(other).for_each(|(value, other)| *value -= along * other);
            }
        }
        let length = dot(row, row).sqrt();
        let scale = if length > before * 1e-12 { length.recip() } else { 0.0 };
        row.iter_mut().for_each(|value| *value *= scale);
    }
}
