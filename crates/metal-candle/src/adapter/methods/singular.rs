//! The largest singular values of a matrix and their vectors, by block subspace iteration with the Rayleigh and Ritz
//! step (Halko et al., 2011, arXiv:0909.4061). The device makes the products with the matrix, in f32; what is small is
//! in f64. Of a small matrix the whole space is taken, so its are exact.

use crate::Result;
use crate::random::SplitMix64;
use candle_core::{Device, Tensor};
use metal_candle_cpu::vectors::{Rows, combine, eigenvectors, gram, orthonormalize};
use metal_candle_kernels::matmul;

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
