//! Rounding to 8 bits and reading it on the CPU.

use super::{GROUP, RoundedPool};
use crate::backend::cpu::{Element, Real, for_each_chunk2, rows_per_task};
use crate::copy;
use candle_core::{DType, Device, Result, Tensor};
use metal_candle_cpu::simd::vectorize;

/// The byte of the least scale.
const LEAST: u32 = 7;
/// That of NaN.
const NOT_FINITE: u8 = u8::MAX;

pub(super) fn write_both(
    operation: &'static str,
    pools: [&RoundedPool; 2],
    rows: [&Tensor; 2],
    places: &Tensor,
) -> Result<()> {
    let [first, second] = rows.map(round_rows);
    let ([first_codes, first_scales], [second_codes, second_scales]) = (first?, second?);
    let codes = pools.map(|pool| &pool.codes);
    copy::cpu::write_rows_both(operation, codes, [&first_codes, &second_codes], places)?;
    let scales = pools.map(|pool| &pool.scales);
    copy::cpu::write_rows_both(operation, scales, [&first_scales, &second_scales], places)
}

/// Codes `(tokens, heads, head_dim)` and scales `(tokens, heads, groups)` of rows `(tokens, heads, head_dim)`.
fn round_rows(rows: &Tensor) -> Result<[Tensor; 2]> {
    let (tokens, heads, head_dim) = rows.dims3()?;
    let numbers = rows.detach().to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
    let groups = head_dim.div_ceil(GROUP);
    let (mut codes, mut scales) = (vec![0u8; numbers.len()], vec![0u8; tokens * heads * groups]);
    let rows_of_task = rows_per_task(head_dim);
    let sizes = (rows_of_task * head_dim, rows_of_task * groups);
    for_each_chunk2(&mut codes, sizes.0, &mut scales, sizes.1, |index, codes, scales| {
        let numbers = &numbers[index * sizes.0..][..codes.len()];
        vectorize(
            #[inline(always)]
            || {
                let heads = numbers.chunks(head_dim).zip(codes.chunks_mut(head_dim));
                for ((numbers, codes), scales) in heads.zip(scales.chunks_mut(groups)) {
                    let groups = numbers.chunks(GROUP).zip(codes.chunks_mut(GROUP));
                    for ((numbers, codes), scale) in groups.zip(scales) {
                        *scale = round(numbers, codes);
                    }
                }
            },
        );
    });
    Ok([
        Tensor::from_vec(codes, (tokens, heads, head_dim), &Device::Cpu)?,
        Tensor::from_vec(scales, (tokens, heads, groups), &Device::Cpu)?,
    ])
}

/// Writes the codes of a group, and returns the byte of its scale.
#[inline(always)]
fn round(numbers: &[f32], codes: &mut [u8]) -> u8 {
    // As integers, NaN is beyond infinity, and that beyond all numbers.
    let largest = numbers.iter().fold(0, |most: u32, x| most.max(x.to_bits() & 0x7fff_ffff));
    let scale = (largest >> 23).max(LEAST);
    // 64 / scale
    let factor = f32::from_bits((260 - scale) << 23);
    for (code, x) in codes.iter_mut().zip(numbers) {
        *code = (x * factor).round_ties_even().clamp(-127.0, 127.0) as i8 as u8;
    }
    scale as u8
}

/// A pool's bytes.
#[derive(Clone, Copy)]
pub(in crate::attention::paged) struct View<'a> {
    pub codes: &'a [u8],
    pub scales: &'a [u8],
}

impl View<'_> {
    /// What row `row` of the pool's heads, counted over all, stands for.
    #[inline(always)]
    pub fn read<T: Element>(&self, row: usize, target: &mut [T]) {
        let head_dim = target.len();
        let codes = &self.codes[row * head_dim..][..head_dim];
        let scales = &self.scales[row * head_dim.div_ceil(GROUP)..];
        let mut wide = [T::Acc::ZERO; GROUP];
        for ((codes, scale), target) in
            codes.chunks(GROUP).zip(scales).zip(target.chunks_mut(GROUP))
        {
            let step = match *scale {
                NOT_FINITE => f32::NAN,
                scale => f32::from_bits(u32::from(scale).saturating_sub(6) << 23),
            };
            for (wide, code) in wide.iter_mut().zip(codes) {
                *wide = T::Acc::from_f32(f32::from(*code as i8) * step);
            }
            T::narrow(&wide[..codes.len()], target);
        }
    }
}
