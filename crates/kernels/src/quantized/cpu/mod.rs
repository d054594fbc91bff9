//! Matrices in fewer bits on the CPU: their numbers one after the other.

mod few_rows;
mod integers;
#[cfg(test)]
mod tests;

pub(crate) use few_rows::{Rows, add_combinations};

use super::{Levels, OPERATION, Quantized, Scales};
use crate::backend::cpu::{
    Element, Input, PARALLEL_CHUNK, Read, Real, Values, dispatch, for_each_chunk, unwritten,
};
use candle_core::{DType, Device, Result, Tensor, bail};
use half::f16;
use metal_candle_cpu::quantized::{ScalesView, View};

/// The tensors of a matrix, made ready to be read.
pub(crate) struct Inputs<'q> {
    matrix: &'q Quantized,
    codes: Input,
    /// As [`Scales::tensors`] names them.
    scales: Vec<Input>,
}

/// The tensors of a matrix, locked for reading.
pub(crate) struct Reads<'a> {
    matrix: &'a Quantized,
    codes: Read<'a>,
    scales: Vec<Read<'a>>,
}

impl<'q> Inputs<'q> {
    pub(crate) fn new(matrix: &'q Quantized) -> Result<Self> {
        let scales = matrix.parts().into_iter().map(Input::contiguous).collect::<Result<_>>()?;
        Ok(Self { matrix, codes: Input::contiguous(&matrix.codes)?, scales })
    }

    pub(crate) fn read(&self) -> Reads<'_> {
        let scales = self.scales.iter().map(Input::read).collect();
        Reads { matrix: self.matrix, codes: self.codes.read(), scales }
    }
}

impl Reads<'_> {
    pub(crate) fn view(&self) -> Result<View<'_>> {
        let mut parts = self.scales.iter();
        let mut next = || match parts.next() {
            Some(part) => Ok(part),
            None => bail!("metal-candle-kernels: {OPERATION}: a part of the scales is missing"),
        };
        let scales = match &self.matrix.scales {
            Scales::Plain { scales, offsets } => {
                let (dtype, scales) = (scales.dtype(), next()?);
                let offsets = offsets.as_ref().map(|_| next()).transpose()?;
                match dtype {
                    DType::F32 => ScalesView::F32(
                        scales.slice()?,
                        offsets.map(Read::slice).transpose()?.unwrap_or(&[]),
                    ),
                    DType::F16 => ScalesView::F16(
                        scales.slice()?,
                        offsets.map(Read::slice).transpose()?.unwrap_or(&[]),
                    ),
                    _ => ScalesView::Bf16(
                        scales.slice()?,
                        offsets.map(Read::slice).transpose()?.unwrap_or(&[]),
                    ),
                }
            }
            Scales::E8m0(_) => ScalesView::E8m0(next()?.slice()?),
            Scales::E4m3 { overall, .. } => ScalesView::E4m3(next()?.slice()?, *overall),
            Scales::Nested { offset, .. } => ScalesView::Nested {
                codes: next()?.slice()?,
                table: next()?.slice()?,
                scales: next()?.slice()?,
                offset: *offset,
            },
            Scales::Blocks { signed, offsets, .. } => {
                let (scales, large) = (next()?.slice()?, next()?.slice()?);
                let (offsets, large_offsets): (&[u8], &[f16]) = match offsets {
                    Some(_) => (next()?.slice()?, next()?.slice()?),
                    None => (&[], &[]),
                };
                ScalesView::Blocks { scales, signed: *signed, large, offsets, large_offsets }
            }
        };
        Ok(View {
            len: self.matrix.shape.0 * self.matrix.shape.1,
            codes: self.codes.slice()?,
            levels: self.matrix.levels,
            group: self.matrix.group,
            scales,
            multiplies_integers: self.matrix.multiplies_integers(),
        })
    }
}

/// All numbers of a matrix.
pub(super) fn dequantize(matrix: &Quantized, dtype: DType) -> Result<Tensor> {
    let inputs = Inputs::new(matrix)?;
    let reads = inputs.read();
    let view = reads.view()?;
    let (outer, inner) = matrix.shape;
    require_float(dtype)?;
    dispatch!(OPERATION, dtype, T => {
        let mut out = unwritten::<T>(outer * inner);
        for_each_chunk(
            &mut out,
            PARALLEL_CHUNK,
            #[inline(always)]
            |index, out| read_as(&view, index * PARALLEL_CHUNK, out),
        );
        Tensor::from_vec(out, (outer, inner), &Device::Cpu)
    })
}

/// Whether all scales, and codes that are floats, are finite.
pub(super) fn is_finite(matrix: &Quantized) -> Result<bool> {
    let inputs = Inputs::new(matrix)?;
    let reads = inputs.read();
    let view = reads.view()?;
    let scales = (0..view.len.div_ceil(view.group)).all(|group| {
        let (scale, offset) = view.scale(group);
        scale.is_finite() && offset.is_finite()
    });
    let codes = view.levels != Levels::E4m3 || view.codes.iter().all(|code| code & 0x7f != 0x7f);
    Ok(scales && codes)
}

/// Some rows of a matrix.
pub(super) fn rows(matrix: &Quantized, ids: &Tensor, dtype: DType) -> Result<Tensor> {
    let inputs = Inputs::new(matrix)?;
    let reads = inputs.read();
    let view = reads.view()?;
    let (outer, inner) = matrix.shape;
    require_float(dtype)?;
    let shape = (ids.dim(0)?, ids.dim(1)?, inner);
    let ids = Input::contiguous(ids)?;
    let ids = ids.read();
    let ids = ids.slice::<u32>()?;
    crate::embedding::check_range(ids, outer)?;
    dispatch!(OPERATION, dtype, T => {
        let mut out = unwritten::<T>(ids.len() * inner);
        if inner > 0 {
            for_each_chunk(
                &mut out,
                inner,
                #[inline(always)]
                |row, out| read_as(&view, ids[row] as usize * inner, out),
            );
        }
        Tensor::from_vec(out, shape, &Device::Cpu)
    })
}

/// The numbers from element `start` on, rounded for storage.
#[inline(always)]
fn read_as<T: Element>(view: &View, start: usize, out: &mut [T]) {
    let mut wide = [T::Acc::ZERO; 64];
    for (index, out) in out.chunks_mut(wide.len()).enumerate() {
        let wide = &mut wide[..out.len()];
        Values::Quantized(view.elements()).read(start + index * 64, wide);
        T::narrow(wide, out);
    }
}

/// An error for a dtype that numbers of f32 aren't read as.
fn require_float(dtype: DType) -> Result<()> {
    match dtype {
        DType::F32 | DType::F16 | DType::BF16 => Ok(()),
        other => bail!(
            "metal-candle-kernels: {OPERATION}: asked for {other:?}, expected F32, BF16 or F16"
        ),
    }
}
