//! LoRA linear on the CPU.
use super::{Dropout, Gradients, Lora};
use crate::device::cpu::{Element, constant, for_each_row, read, tensor, up};
use crate::matmul::{Matrix, finish, gemm, multiply};
use candle_core::{Result, Tensor};
use num_traits::{One, Zero};

fn hash(seed: u64, index: u64) -> u64 {
    let mut bits = seed ^ index.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
fn factor(d: &Dropout, index: usize) -> f64 {
    let u = (hash(d.seed, index as u64) >> 40) as f64 / (1u64 << 24) as f64;
    if u < f64::from(d.probability) { 0.0 } else { 1.0 / (1.0 - f64::from(d.probability)) }
}
fn drop<T: Element>(x: &mut [T::Acc], d: Option<Dropout>) {
    if let Some(d) = d {
        for_each_row(x, 256, |row, chunk| {
            for (i, x) in chunk.iter_mut().enumerate() {
                *x = *x * constant(factor(&d, row * 256 + i));
            }
        });
    }
}
pub(super) fn forward<T: Element>(
    x: &Tensor,
    base: Tensor,
    lora: &Lora<'_>,
    rows: usize,
) -> Result<(Tensor, Tensor)> {
    let (input, rank) = lora.a.dims2()?;
    let (_, output) = lora.b.dims2()?;
    let shape = base.dims().to_vec();
    read!(x: T = x);
    let a = lora.a.to_dtype(<T::Acc as candle_core::WithDType>::DTYPE)?;
    let b = lora.b.to_dtype(<T::Acc as candle_core::WithDType>::DTYPE)?;
    read!(a: T::Acc = a);
    read!(b: T::Acc = b);
    let mut dropped = up(x);
    drop::<T>(&mut dropped, lora.dropout);
    let mut xa = vec![T::Acc::zero(); rows * rank];
    gemm(
        &mut xa,
        rank,
        Matrix::new(&dropped, rows, input),
        Matrix::new(a, input, rank),
        T::Acc::one(),
        false,
    );
    read!(base: T = base);
    let mut y = up(base);
    gemm(
        &mut y,
        output,
        Matrix::new(&xa, rows, rank),
        Matrix::new(b, rank, output),
        constant(lora.scale),
        true,
    );
    Ok((finish::<T>(y, &shape)?, tensor(xa, &[rows, rank])?))
}
pub(super) fn backward<T: Element>(
    x: &Tensor,
    weight: &Tensor,
    xa: &Tensor,
    lora: &Lora<'_>,
    dy: &Tensor,
    need_dx: bool,
    rows: usize,
) -> Result<Gradients> {
    let (input, rank) = lora.a.dims2()?;
    let (_, output) = lora.b.dims2()?;
    let shape = x.dims().to_vec();
    read!(x: T = x);
    read!(dy: T = dy);
    read!(w: T = weight);
    let a = lora.a.to_dtype(<T::Acc as candle_core::WithDType>::DTYPE)?;
    let b = lora.b.to_dtype(<T::Acc as candle_core::WithDType>::DTYPE)?;
    read!(a: T::Acc = a);
    read!(b: T::Acc = b);
    read!(xa: T::Acc = xa);
    let (one, scale) = (T::Acc::one(), constant::<T::Acc>(lora.scale));
    let mut dropped = up(x);
    drop::<T>(&mut dropped, lora.dropout);
    let dy = up(dy);
    let dy_m = Matrix::new(&dy, rows, output);
    let mut db = vec![T::Acc::zero(); rank * output];
    gemm(&mut db, output, Matrix::new(xa, rows, rank).t(), dy_m, scale, false);
    let mut dxa = vec![T::Acc::zero(); rows * rank];
    gemm(&mut dxa, rank, dy_m, Matrix::new(b, rank, output).t(), scale, false);
    let mut da = vec![T::Acc::zero(); input * rank];
    gemm(
        &mut da,
        rank,
        Matrix::new(&dropped, rows, input).t(),
        Matrix::new(&dxa, rows, rank),
        one,
        false,
    );
    let dx = if need_dx {
        let mut path = vec![T::Acc::zero(); rows * input];
        gemm(
            &mut path,
            input,
            Matrix::new(&dxa, rows, rank),
            Matrix::new(a, input, rank).t(),
            one,
            false,
        );
        drop::<T>(&mut path, lora.dropout);
        let mut dx = vec![T::Acc::zero(); rows * input];
        multiply(&mut dx, &dy, rows, w, (output, input));
        for (dx, p) in dx.iter_mut().zip(&path) {
            *dx += *p;
        }
        Some(finish::<T>(dx, &shape)?)
    } else {
        None
    };
    Ok(Gradients { dx, da: tensor(da, &[input, rank])?, db: tensor(db, &[rank, output])? })
}
