//! OLoRA: A and B start from the QR factors of the weight, `B₀ = Q[:, :r]`, `A₀ = R[:r]` (Büyükakyüz, 2024,
//! arXiv:2406.01775).

use super::lora::Start;
use crate::Result;
use candle_core::{DType, Device, Tensor};
use metal_candle_cpu::vectors::{Rows, orthonormalize};

/// The start for a frozen weight `(out, in)`: its first `rank` columns, made orthonormal, are Q and give, with
/// the other columns, the first `rank` rows of R. Sums are in f64.
pub fn start(weight: &Tensor, rank: usize) -> Result<Start> {
    let (out, input) = weight.dims2()?;
    let rank = rank.min(out).min(input);
    let rows = weight.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.to_vec2::<f32>()?;
    // A column that depends on those before it is replaced by zero, and so is its row of R.
    let mut q: Rows =
        (0..rank).map(|column| rows.iter().map(|row| f64::from(row[column])).collect()).collect();
    orthonormalize(&mut q);
    // R = Qᵀ·W, and the A of this library is its transpose.
    let mut a = vec![0f64; input * rank];
    for (row, weights) in rows.iter().enumerate() {
        for (column, &value) in weights.iter().enumerate() {
            let place = &mut a[column * rank..(column + 1) * rank];
            place.iter_mut().zip(&q).for_each(|(sum, q)| *sum += q[row] * f64::from(value));
        }
    }
    let a: Vec<f32> = a.into_iter().map(|value| value as f32).collect();
    let minus_b: Vec<f32> = q.iter().flatten().map(|&value| -value as f32).collect();
    Ok(Start {
        a: Tensor::from_vec(a, (input, rank), &Device::Cpu)?,
        minus_b: Tensor::from_vec(minus_b, (rank, out), &Device::Cpu)?,
    })
}
