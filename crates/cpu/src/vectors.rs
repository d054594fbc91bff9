//! Vectors in f64, of which the starts that adapters take from weights and data are made.

use rayon::prelude::*;

/// Rows of equal length.
pub type Rows = Vec<Vec<f64>>;

/// Sums that are made side by side.
const LANES: usize = 8;
/// Numbers of a row that a thread changes at a time.
const PIECE: usize = 1024;

/// The dot product of two vectors.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
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
pub fn orthonormalize(rows: &mut Rows) {
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

/// The products of rows with each other.
pub fn gram(rows: &Rows) -> Rows {
    rows.par_iter().map(|a| rows.iter().map(|b| dot(a, b)).collect()).collect()
}

/// `rotation · rows`.
pub fn combine(rotation: &Rows, rows: &Rows) -> Rows {
    let combine = |weights: &Vec<f64>| {
        let mut sum = vec![0.0; rows.first().map_or(0, Vec::len)];
        for (weight, row) in weights.iter().zip(rows) {
            sum.iter_mut().zip(row).for_each(|(sum, value)| *sum += weight * value);
        }
        sum
    };
    rotation.par_iter().map(combine).collect()
}

/// The eigenvalues of a symmetric matrix, the largest first, and their eigenvectors as rows: Jacobi's rotations
/// (Golub and Van Loan, Matrix Computations, 8.5).
pub fn eigenvectors(mut matrix: Rows) -> (Vec<f64>, Rows) {
    let size = matrix.len();
    let mut vectors: Rows =
        (0..size).map(|i| (0..size).map(|j| f64::from(u8::from(i == j))).collect()).collect();
    let total: f64 = matrix.iter().flatten().map(|value| value * value).sum();
    // It converges quadratically, in fewer than ten sweeps.
    for _ in 0..60 {
        let mut off = 0.0;
        for p in 0..size {
            for q in p + 1..size {
                let apq = matrix[p][q];
                off += apq * apq;
                if apq == 0.0 {
                    continue;
                }
                let theta = (matrix[q][q] - matrix[p][p]) / (2.0 * apq);
                let t = theta.signum() / (theta.abs() + (theta * theta + 1.0).sqrt());
                let (c, s) = ((t * t + 1.0).sqrt().recip(), t / (t * t + 1.0).sqrt());
                for row in &mut matrix {
                    let (x, y) = (row[p], row[q]);
                    (row[p], row[q]) = (c * x - s * y, s * x + c * y);
                }
                rotate_rows(&mut matrix, p, q, c, s);
                rotate_rows(&mut vectors, p, q, c, s);
            }
        }
        if off <= total * 1e-30 {
            break;
        }
    }
    let mut order: Vec<usize> = (0..size).collect();
    order.sort_by(|&i, &j| matrix[j][j].total_cmp(&matrix[i][i]));
    let values = order.iter().map(|&i| matrix[i][i]).collect();
    (values, order.into_iter().map(|i| std::mem::take(&mut vectors[i])).collect())
}

fn rotate_rows(matrix: &mut Rows, p: usize, q: usize, c: f64, s: f64) {
    let (first, second) = matrix.split_at_mut(q);
    for (x, y) in first[p].iter_mut().zip(&mut second[0]) {
        (*x, *y) = (c * *x - s * *y, s * *x + c * *y);
    }
}
