//! Copies of tensors that aren't contiguous, and conversions between dtypes.

use super::{Argument, Array, Metal, size};
use candle_core::{DType, Result, Tensor, bail};

impl Metal {
    /// A contiguous copy.
    pub(super) fn copy(&self, tensor: &Tensor) -> Result<Array> {
        const OPERATION: &str = "a copy";
        let source = self.strided(tensor)?;
        let out = self.empty(tensor.shape(), source.dtype)?;
        let count = tensor.elem_count();
        let name = match source.dtype.size_in_bytes() {
            1 => "copy_strided_1",
            2 => "copy_strided_2",
            4 => "copy_strided_4",
            8 => "copy_strided_8",
            _ => bail!(
                "metal-candle-kernels: a {:?} tensor cannot be made contiguous on Metal",
                source.dtype
            ),
        };
        // The last dimension first.
        let sizes = tensor.dims().iter().rev().map(|dimension| size(OPERATION, *dimension));
        let sizes = sizes.collect::<Result<Vec<u32>>>()?;
        let strides: Vec<u64> = tensor.stride().iter().rev().map(|stride| *stride as u64).collect();
        let arguments = [
            Argument::Input(&source),
            Argument::Output(&out),
            Argument::U32s(&sizes),
            Argument::U64s(&strides),
            Argument::U32(size(OPERATION, sizes.len())?),
            Argument::U32(size(OPERATION, count)?),
        ];
        self.run(&[self.by_thread(name, count, 1, &arguments)?])?;
        Ok(out)
    }

    /// Contiguous elements in another dtype: f32, bf16 or f16.
    pub(crate) fn cast(&self, array: &Array, dtype: DType) -> Result<Array> {
        let array = self.contiguous(&array.tensor)?;
        if array.dtype == dtype {
            return Ok(array);
        }
        let name = match (array.dtype, dtype) {
            (DType::F32, DType::BF16) => "cast_f32_bf16",
            (DType::F32, DType::F16) => "cast_f32_f16",
            (DType::BF16, DType::F32) => "cast_bf16_f32",
            (DType::BF16, DType::F16) => "cast_bf16_f16",
            (DType::F16, DType::F32) => "cast_f16_f32",
            (DType::F16, DType::BF16) => "cast_f16_bf16",
            (from, to) => bail!(
                "metal-candle-kernels: a {from:?} tensor cannot be converted to {to:?} on Metal, expected F32, BF16 or F16"
            ),
        };
        let out = self.empty(array.tensor.shape(), dtype)?;
        let count = array.tensor.elem_count();
        let arguments =
            [Argument::Input(&array), Argument::Output(&out), Argument::U64(count as u64)];
        self.run(&[self.by_elements(name, count, 1, &arguments)?])?;
        Ok(out)
    }
}
