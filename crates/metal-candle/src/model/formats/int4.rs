//! What GPTQ and AWQ have in common: integers of 4 or 8 bits with a scale and a zero point a group of a row,
//! `(q - zero) · scale`, all of them stored with the rows of the matrix as columns.

use super::{Parsed, assembled, bytes_tensor, f32_tensor};
use candle_core::{DType, Tensor};
use metal_candle_kernels::quantized::{Levels, Quantized, Scales};
use rayon::prelude::*;

/// Elements of a row that share a scale, and how many such groups a row has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Groups {
    pub(super) size: usize,
    pub(super) count: usize,
}

impl Groups {
    /// Of rows of `inner` elements; `None` is one group a row.
    pub(super) fn new(size: Option<usize>, inner: usize) -> Parsed<Self> {
        match size {
            Some(0) => Err("groups of 0 elements, expected at least 1".to_string()),
            Some(size) if !inner.is_multiple_of(size) => {
                Err(format!("rows have {inner} elements, expected whole groups of {size}"))
            }
            Some(size) => Ok(Self { size, count: inner / size }),
            None => Ok(Self { size: inner, count: 1 }),
        }
    }
}

/// A matrix `(out, in)` of the codes `code(row, column)` of `bits` bits, zero points `zero(group, row)` and
/// scales `(groups, out)`.
///
/// Where all zero points are the same they are the levels' zero, and scales stay as they are. Elsewhere scale and
/// offset `-zero · scale` are f32, in which both steps of `q · scale + offset` are exact for scales of f16 or bf16.
pub(super) fn matrix(
    shape: (usize, usize),
    bits: usize,
    groups: Groups,
    code: impl Fn(usize, usize) -> u8 + Sync,
    zero: impl Fn(usize, usize) -> u8,
    scales: &Tensor,
) -> Parsed<Quantized> {
    let (outer, inner) = shape;
    let message = |error: candle_core::Error| crate::error::tensor_message(&error);
    let per_byte = 8 / bits;
    if !inner.is_multiple_of(per_byte) {
        return Err(format!("rows have {inner} elements, expected a multiple of {per_byte}"));
    }
    let mut codes = vec![0u8; outer * inner / per_byte];
    codes.par_chunks_mut(inner / per_byte).enumerate().for_each(|(row, packed)| {
        for (index, byte) in packed.iter_mut().enumerate() {
            for part in 0..per_byte {
                *byte |= code(row, index * per_byte + part) << (part * bits);
            }
        }
    });
    let zeros: Vec<u8> = (0..outer)
        .flat_map(|row| (0..groups.count).map(move |group| (group, row)))
        .map(|(group, row)| zero(group, row))
        .collect();
    let by_rows = |scales: &Tensor| -> candle_core::Result<Tensor> {
        scales.reshape((groups.count, outer))?.t()?.contiguous()?.flatten_all()
    };
    let scales = by_rows(scales).map_err(message)?;
    let first = zeros.first().copied().unwrap_or_default();
    let (zero, scales) = if zeros.iter().all(|zero| *zero == first) {
        (first, Scales::Plain { scales, offsets: None })
    } else {
        let scales = scales.to_dtype(DType::F32).map_err(message)?;
        let numbers = scales.to_vec1::<f32>().map_err(message)?;
        let offsets =
            numbers.iter().zip(&zeros).map(|(scale, zero)| -f32::from(*zero) * scale).collect();
        (0, Scales::Plain { scales, offsets: Some(f32_tensor(offsets)?) })
    };
    let levels = Levels::Integers { bits, zero };
    assembled(Quantized::new(shape, levels, groups.size, bytes_tensor(codes)?, scales))
}
