//! OLoRA: A and B start from the QR factors of the weight, `B₀ = Q[:, :r]`, `A₀ = R[:r]` (Büyükakyüz, 2024,
//! arXiv:2406.01775).

use super::lora::Start;
use crate::Result;
use candle_core::{DType, Device, Tensor};

/// The start for a frozen weight `(out, in)`: Householder's QR of its first `rank` columns gives Q and, with
/// the other columns, the first `rank` rows of R. Sums are in f64.
pub fn start(weight: &Tensor, rank: usize) -> Result<Start> {
    let (out, input) = weight.dims2()?;
    let rank = rank.min(out).min(input);
    let rows = weight.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    // Gram and Schmidt twice, which is orthogonal to rounding; a column that depends on those before it is
    // replaced by zero, and so is its row of R.
    let mut q: Vec<Vec<f64>> = Vec::with_capacity(rank);
    for column in 0..rank {
        let mut vector: Vec<f64> = rows.iter().map(|row| f64::from(row[column])).collect();
        let before = norm(&vector);
        for _ in 0..2 {
            for other in &q {
                let along = dot(&vector, other);
                vector.iter_mut().zip(other).for_each(|(v, o)| *v -= along * o);
            }
        }
        let length = norm(&vector);
        let scale = if length > before * 1e-12 { length.recip() } else { 0.0 };
        vector.iter_mut().for_each(|v| *v *= scale);
        q.push(vector);
    }
    // R = Qᵀ·W, and the A of this library is its transpose.
    let mut a = vec![0f64; input * rank];
    for (row, weights) in rows.iter().enumerate() {
        for (column, &value) in weights.iter().enumerate() {
            let place = &mut a[column * rank..(column + 1) * rank];
            place.iter_mut().zip(&q).for_each(|(sum, q)| *sum += q[row] * f64::from(value));
        }
    }
    let a: Vec<f32> = a.into_iter().map(|value| value as f32).collect();
    let b: Vec<f32> = q.iter().flatten().map(|&value| value as f32).collect();
    Ok(Start {
        a: Tensor::from_vec(a, (input, rank), &Device::Cpu)?,
        b: Tensor::from_vec(b, (rank, out), &Device::Cpu)?,
    })
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn norm(vector: &[f64]) -> f64 {
    dot(vector, vector).sqrt()
}
