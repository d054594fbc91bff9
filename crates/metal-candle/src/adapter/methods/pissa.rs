//! PiSSA: A and B start from the weight's largest singular values, `A₀ = √(σ/s)·v`, `B₀ = √(σ/s)·u` with the
//! adapter's scale s (Meng et al., 2024, arXiv:2404.02948).
//!
//! The singular vectors are found by block subspace iteration with the Rayleigh and Ritz step (Halko et al.,
//! 2011, arXiv:0909.4061), whose products the device makes; of a small matrix the whole space is taken, so its
//! are exact.

use super::lora::Start;
use super::vectors::{Rows, dot, orthonormalize};
use crate::Result;
use crate::random::SplitMix64;
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::{copy, matmul};

/// Vectors beyond the rank that speed convergence up.
const OVERSAMPLING: usize = 16;
/// Up to this size the subspace is the whole space.
const SMALL: usize = 160;
/// A vector v has converged when `‖WᵀW·v - σ²·v‖` is less than this part of the largest σ².
const TOLERANCE: f64 = 1e-6;

/// The start for a frozen weight `(out, in)`, and whether its vectors have converged within `iterations`.
pub fn start(weight: &Tensor, rank: usize, scale: f64, iterations: usize) -> Result<(Start, bool)> {
    let (out, input) = weight.dims2()?;
    let smaller = out.min(input);
    let count = if smaller <= SMALL { smaller } else { (rank + OVERSAMPLING).min(smaller) };
    let weight = copy::cast(weight, DType::F32)?;
    let mut random = SplitMix64::new(0);
    let mut right: Rows =
        (0..count).map(|_| (0..input).map(|_| random.normal()).collect()).collect();
    orthonormalize(&mut right);
    let mut iteration = 0;
    let (right, left, values, converged) = loop {
        // W·v of every vector, turned so that they are orthogonal to each other.
        let mut left = rows(&matmul::linear(&tensor(&right, weight.device())?, &weight, None)?)?;
        let (values, rotation) = eigenvectors(gram(&left));
        left = combine(&rotation, &left);
        right = combine(&rotation, &right);
        let back =
            rows(&matmul::linear_backward_input(&tensor(&left, weight.device())?, &weight)?)?;
        let largest = values.first().copied().unwrap_or_default().max(f64::MIN_POSITIVE);
        let residual = |index: usize| {
            let difference = back[index].iter().zip(&right[index]);
            difference.map(|(b, v)| (b - values[index] * v).powi(2)).sum::<f64>().sqrt() / largest
        };
        let converged = (0..rank.min(count)).all(|index| residual(index) <= TOLERANCE);
        iteration += 1;
        // One product leads into the whole space that W reaches.
        let exact = count == smaller && iteration == 2;
        if converged || exact || iteration >= iterations {
            break (right, left, values, converged || exact);
        }
        right = back;
        orthonormalize(&mut right);
    };
    let mut a = vec![0f32; input * rank];
    let mut minus_b = vec![0f32; rank * out];
    for index in 0..rank.min(count) {
        let sigma = values[index].max(0.0).sqrt();
        let size = (sigma / scale).sqrt();
        for (place, value) in right[index].iter().enumerate() {
            a[place * rank + index] = (size * value) as f32;
        }
        let along = if sigma > 0.0 { size / sigma } else { 0.0 };
        for (place, value) in minus_b[index * out..].iter_mut().zip(&left[index]) {
            *place = -(along * value) as f32;
        }
    }
    let a = Tensor::from_vec(a, (input, rank), &Device::Cpu)?;
    let minus_b = Tensor::from_vec(minus_b, (rank, out), &Device::Cpu)?;
    Ok((Start { a, minus_b }, converged))
}

fn rows(tensor: &Tensor) -> Result<Rows> {
    let rows = tensor.to_device(&Device::Cpu)?.to_vec2::<f32>()?;
    Ok(rows.into_iter().map(|row| row.into_iter().map(f64::from).collect()).collect())
}

fn tensor(rows: &Rows, device: &Device) -> Result<Tensor> {
    let (count, length) = (rows.len(), rows.first().map_or(0, Vec::len));
    let values: Vec<f32> = rows.iter().flatten().map(|&value| value as f32).collect();
    Ok(Tensor::from_vec(values, (count, length), device)?)
}

fn gram(rows: &Rows) -> Rows {
    rows.iter().map(|a| rows.iter().map(|b| dot(a, b)).collect()).collect()
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
    rotation.iter().map(combine).collect()
}

/// The eigenvalues of a symmetric matrix, the largest first, and their eigenvectors as rows: Jacobi's rotations
/// (Golub and Van Loan, Matrix Computations, 8.5).
fn eigenvectors(mut matrix: Rows) -> (Vec<f64>, Rows) {
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

#[cfg(test)]
mod tests {
    use super::*;

    /// A matrix with known singular values.
    fn matrix(out: usize, input: usize, values: &[f64]) -> Tensor {
        let mut random = SplitMix64::new(3);
        let mut draw = |length| -> Rows {
            let mut rows: Rows =
                values.iter().map(|_| (0..length).map(|_| random.normal()).collect()).collect();
            orthonormalize(&mut rows);
            rows
        };
        let (left, right) = (draw(out), draw(input));
        let mut sum = vec![0f32; out * input];
        for ((value, u), v) in values.iter().zip(&left).zip(&right) {
            for (row, u) in u.iter().enumerate() {
                for (column, v) in v.iter().enumerate() {
                    sum[row * input + column] += (value * u * v) as f32;
                }
            }
        }
        Tensor::from_vec(sum, (out, input), &Device::Cpu).unwrap()
    }

    fn largest(tensor: &Tensor) -> f32 {
        tensor.abs().unwrap().flatten_all().unwrap().max(0).unwrap().to_scalar().unwrap()
    }

    #[test]
    fn what_is_left_of_the_weight_has_the_other_singular_values() {
        // Small ones, and ones for which the subspace has to be found.
        for (out, input) in [(20, 31), (31, 20), (200, 331)] {
            let values: Vec<f64> = (0..18).map(|index| 8.0 * 0.7f64.powi(index)).collect();
            let weight = matrix(out, input, &values);
            for scale in [1.0, 2.5] {
                let (Start { a, minus_b }, converged) = start(&weight, 3, scale, 100).unwrap();
                let b = minus_b.neg().unwrap();
                assert!(converged);
                let product = (b.t().unwrap().matmul(&a.t().unwrap()).unwrap() * scale).unwrap();
                let rest = (&weight - &product).unwrap();
                let squares = gram(&rows(&rest).unwrap());
                let (found, _) = eigenvectors(squares);
                for (index, wanted) in values[3..].iter().enumerate() {
                    let found = found[index].max(0.0).sqrt();
                    assert!((found - wanted).abs() < 1e-4, "{index}: {found}, expected {wanted}");
                }
                // Both factors have the same size.
                let (a, b) = (
                    largest(&a.sqr().unwrap().sum(0).unwrap()),
                    largest(&b.sqr().unwrap().sum(1).unwrap()),
                );
                assert!(
                    (a - b).abs() < 1e-4 * a && (f64::from(a) - 8.0 / scale).abs() < 1e-3,
                    "{a} {b}"
                );
            }
        }
    }

    #[test]
    fn too_few_iterations_are_told() {
        let weight = matrix(
            200,
            331,
            &(0..180).map(|index| 1.0 - 0.001 * f64::from(index)).collect::<Vec<_>>(),
        );
        assert!(!start(&weight, 3, 1.0, 2).unwrap().1);
    }
}
