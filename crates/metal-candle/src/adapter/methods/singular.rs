//! The largest singular values of a matrix and their vectors, by block subspace iteration with the Rayleigh and Ritz
//! step (Halko et al., 2011, arXiv:0909.4061). The device makes the products with the matrix, in f32; what is small is
//! in f64. Of a small matrix the whole space is taken, so its are exact.

use super::vectors::{Rows, dot, orthonormalize};
use crate::Result;
use crate::random::SplitMix64;
use candle_core::{Device, Tensor};
use metal_candle_kernels::matmul;
use rayon::prelude::*;

/// Up to this size the subspace is the whole space.
const SMALL: usize = 160;

/// What is looked for, and for how long.
pub(super) struct Search {
    /// How many of the vectors are asked for.
    pub wanted: usize,
    /// How many there are; those beyond speed convergence up.
    pub vectors: usize,
    /// At most so many iterations.
    pub iterations: usize,
    /// It ends before when each wanted vector v has converged: when `‖MᵀM·v - σ²·v‖` is at most this part of the largest
    /// σ².
    pub tolerance: Option<f64>,
}

/// Singular values and vectors, the largest first.
pub(super) struct Singular {
    /// v, of length 1.
    pub right: Rows,
    /// `M·v = σ·u`
    pub left: Rows,
    /// σ²
    pub squares: Vec<f64>,
    /// Whether those that were wanted have converged.
    pub converged: bool,
}

/// Those of `matrix` `(m, n)` in f32. The search begins with `near`, which are rows of length n.
pub(super) fn largest(matrix: &Tensor, near: Rows, search: &Search) -> Result<Singular> {
    let (height, width) = matrix.dims2()?;
    let smaller = height.min(width);
    let count = if smaller <= SMALL { smaller } else { search.vectors.min(smaller) };
    let mut random = SplitMix64::new(0);
    let mut right = near;
    right.resize_with(count, || (0..width).map(|_| random.normal()).collect());
    orthonormalize(&mut right);
    let mut iteration = 0;
    loop {
        // M·v of every vector, turned so that they are orthogonal to each other.
        let left = rows(&matmul::linear(&tensor(&right, matrix.device())?, matrix, None)?)?;
        let (squares, rotation) = eigenvectors(gram(&left));
        let left = combine(&rotation, &left);
        iteration += 1;
        // One product leads into the whole space that M reaches.
        let exact = count == smaller && iteration == 2;
        let last = exact || iteration >= search.iterations;
        if last && search.tolerance.is_none() {
            let right = combine(&rotation, &right);
            return Ok(Singular { right, left, squares, converged: exact });
        }
        let back = rows(&matmul::linear_backward_input(&tensor(&left, matrix.device())?, matrix)?)?;
        if let Some(tolerance) = search.tolerance {
            right = combine(&rotation, &right);
            let largest = squares.first().copied().unwrap_or_default().max(f64::MIN_POSITIVE);
            let residual = |index: usize| {
                let difference = back[index].iter().zip(&right[index]);
                let squared = difference.map(|(b, v)| (b - squares[index] * v).powi(2));
                squared.sum::<f64>().sqrt() / largest
            };
            let converged =
                exact || (0..search.wanted.min(count)).all(|index| residual(index) <= tolerance);
            if converged || last {
                return Ok(Singular { right, left, squares, converged });
            }
        }
        right = back;
        orthonormalize(&mut right);
    }
}

/// The rows of a matrix in f32.
pub(super) fn rows(tensor: &Tensor) -> Result<Rows> {
    let rows = tensor.to_device(&Device::Cpu)?.to_vec2::<f32>()?;
    Ok(rows.into_iter().map(|row| row.into_iter().map(f64::from).collect()).collect())
}

/// Rows as a matrix in f32.
pub(super) fn tensor(rows: &Rows, device: &Device) -> Result<Tensor> {
    let (count, length) = (rows.len(), rows.first().map_or(0, Vec::len));
    let values: Vec<f32> = rows.iter().flatten().map(|&value| value as f32).collect();
    Ok(Tensor::from_vec(values, (count, length), device)?)
}

/// The products of rows with each other.
pub(super) fn gram(rows: &Rows) -> Rows {
    rows.par_iter().map(|a| rows.iter().map(|b| dot(a, b)).collect()).collect()
}

/// `rotation · rows`.
fn combine(rotation: &Rows, rows: &Rows) -> Rows {
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
pub(super) fn eigenvectors(mut matrix: Rows) -> (Vec<f64>, Rows) {
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
