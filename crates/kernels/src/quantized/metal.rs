//! Matrices in fewer bits on Metal, see `kernel.metal`; their products with a few rows are in
//! `backend/metal/product.rs`.

use super::{Levels, OPERATION, Quantized, Scales};
use crate::backend::metal::{Argument, Array, Constant, Kernel, Metal, by_dtype, size};
use candle_core::{DType, Result, Tensor};

/// Indices of function constants in `kernel.metal`.
const CODE_BITS: usize = 40;
const LEVEL_KIND: usize = 41;
const SCALE_KIND: usize = 42;
const HAS_OFFSETS: usize = 43;
const IN_EIGHTS: usize = 44;

/// Numbers that a thread has.
const OWN: usize = 8;

/// A matrix as kernels take it.
pub(crate) struct Packed {
    /// Codes, scales, and what else there is, in the kernels' order; else the scales once more.
    arrays: [Array; 6],
    numbers: [u32; 20],
    constants: [(usize, Constant); 5],
}

/// The function constants of kernels that are given a dense matrix.
pub(crate) const DENSE: [(usize, Constant); 5] = [
    (CODE_BITS, Constant::U16(8)),
    (LEVEL_KIND, Constant::U16(0)),
    (SCALE_KIND, Constant::U16(0)),
    (HAS_OFFSETS, Constant::Bool(false)),
    (IN_EIGHTS, Constant::Bool(false)),
];

impl Packed {
    pub(crate) fn new(operation: &str, metal: &Metal, matrix: &Quantized) -> Result<Self> {
        let (_, inner) = matrix.shape;
        let (mut numbers, mut zero, mut number) = ([0; 20], 0, 0.0);
        let level_kind = match matrix.levels {
            Levels::Integers { zero: of, .. } => {
                zero = of;
                0
            }
            Levels::Table(levels) => {
                for (to, level) in numbers.iter_mut().zip(levels) {
                    *to = level.to_bits();
                }
                1
            }
            Levels::E4m3 => 2,
        };
        let [mut offsets, mut large, mut large_offsets, mut table] = [None; 4];
        let (scale_kind, scales) = match &matrix.scales {
            Scales::Plain { scales, offsets: some } => {
                offsets = some.as_ref();
                let kind = match scales.dtype() {
                    DType::F32 => 0,
                    DType::F16 => 1,
                    _ => 2,
                };
                (kind, scales)
            }
            Scales::E8m0(scales) => (3, scales),
            Scales::E4m3 { scales, overall } => {
                number = *overall;
                (4, scales)
            }
            Scales::Nested { codes, table: of, scales, offset } => {
                (large, table, number) = (Some(scales), Some(of), *offset);
                (5, codes)
            }
            Scales::Blocks { scales, signed, large: of, offsets: some } => {
                large = Some(of);
                if let Some((codes, large)) = some {
                    (offsets, large_offsets) = (Some(codes), Some(large));
                }
                (if *signed { 7 } else { 6 }, scales)
            }
        };
        numbers[16] = number.to_bits();
        numbers[17] = zero.into();
        numbers[18] = size(operation, matrix.group.min(matrix.elements().max(1)))?;
        numbers[19] = size(operation, inner)?;
        let codes = metal.contiguous(&matrix.codes)?;
        let in_eights = codes.rows_start_at_multiples_of(8)
            && inner.is_multiple_of(OWN)
            && matrix.group.is_multiple_of(OWN);
        let or_scales = |tensor: Option<&Tensor>| metal.contiguous(tensor.unwrap_or(scales));
        let constants = [
            (CODE_BITS, Constant::U16(matrix.levels.bits() as u16)),
            (LEVEL_KIND, Constant::U16(level_kind)),
            (SCALE_KIND, Constant::U16(scale_kind)),
            (HAS_OFFSETS, Constant::Bool(offsets.is_some())),
            (IN_EIGHTS, Constant::Bool(in_eights)),
        ];
        let others = [offsets, large, large_offsets, table].map(or_scales);
        let [offsets, large, large_offsets, table] = others;
        let arrays = [codes, metal.contiguous(scales)?, offsets?, large?, large_offsets?, table?];
        Ok(Packed { arrays, numbers, constants })
    }

    /// The tensors and the numbers, in the kernels' order.
    pub(crate) fn arguments(&self) -> [Argument<'_>; 7] {
        let [codes, scales, offsets, large, large_offsets, table] = &self.arrays;
        let arrays = [codes, scales, offsets, large, large_offsets, table].map(Argument::Input);
        let [codes, scales, offsets, large, large_offsets, table] = arrays;
        [codes, scales, offsets, large, large_offsets, table, Argument::U32s(&self.numbers)]
    }

    pub(crate) fn constants(&self) -> [(usize, Constant); 5] {
        self.constants
    }
}

pub(super) fn dequantize(matrix: &Quantized, dtype: DType) -> Result<Tensor> {
    let metal = Metal::of(&matrix.codes)?;
    let name = by_dtype!("dequantize", dtype)?;
    let out = metal.empty(matrix.shape, dtype)?;
    let count = matrix.elements();
    if count == 0 {
        return Ok(out.tensor);
    }
    let packed = Packed::new(OPERATION, &metal, matrix)?;
    let mut arguments = packed.arguments().to_vec();
    arguments.extend([Argument::Output(&out), Argument::U64(count as u64)]);
    let kernel = Kernel { name, constants: &packed.constants };
    metal.run(&[metal.by_thread(kernel, count.div_ceil(OWN), 1, &arguments)?])?;
    Ok(out.tensor)
}

pub(super) fn rows(matrix: &Quantized, ids: &Tensor, dtype: DType) -> Result<Tensor> {
    let metal = Metal::of(&matrix.codes)?;
    let name = by_dtype!("quantized_rows", dtype)?;
    let (outer, inner) = matrix.shape;
    let (batch, seq) = ids.dims2()?;
    let out = metal.empty((batch, seq, inner), dtype)?;
    if out.tensor.elem_count() == 0 {
        return Ok(out.tensor);
    }
    let (packed, ids) = (Packed::new(OPERATION, &metal, matrix)?, metal.contiguous(ids)?);
    let mut arguments = packed.arguments().to_vec();
    arguments.extend([
        Argument::Output(&out),
        Argument::Input(&ids),
        Argument::U32(size(OPERATION, outer)?),
    ]);
    let kernel = Kernel { name, constants: &packed.constants };
    metal.run(&[metal.by_thread(kernel, inner.div_ceil(OWN), batch * seq, &arguments)?])?;
    Ok(out.tensor)
}
