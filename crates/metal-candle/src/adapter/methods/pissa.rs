//! PiSSA: A and B start from the weight's largest singular values, `A₀ = √(σ/s)·v`, `B₀ = √(σ/s)·u` with the
//! adapter's scale s (Meng et al., 2024, arXiv:2404.02948).

use super::lora::Start;
use super::singular::{self, Search, Singular};
use crate::Result;
use candle_core::{DType, Device, Tensor};
use metal_candle_cpu::vectors::Rows;
use metal_candle_kernels::copy;

/// Vectors beyond the rank that speed convergence up.
const OVERSAMPLING: usize = 16;
/// A vector v has converged when `‖WᵀW·v - σ²·v‖` is less than this part of the largest σ².
const TOLERANCE: f64 = 1e-6;

/// The start for a frozen weight `(out, in)`, and whether its vectors have converged within `iterations`.
pub fn start(weight: &Tensor, rank: usize, scale: f64, iterations: usize) -> Result<(Start, bool)> {
    let (out, input) = weight.dims2()?;
    let weight = copy::cast(weight, DType::F32)?;
    let search = Search {
        wanted: rank,
        vectors: rank + OVERSAMPLING,
        iterations,
        tolerance: Some(TOLERANCE),
    };
    let Singular { right, left, squares, converged } =
        singular::largest(&weight, Rows::new(), &search)?;
    let mut a = vec![0f32; input * rank];
    let mut minus_b = vec![0f32; rank * out];
    for index in 0..rank.min(squares.len()) {
        let sigma = squares[index].max(0.0).sqrt();
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

#[cfg(test)]
mod tests {
    use super::super::singular::rows;
    use super::*;
    use crate::random::SplitMix64;
    use metal_candle_cpu::vectors::{eigenvectors, gram, orthonormalize};

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
