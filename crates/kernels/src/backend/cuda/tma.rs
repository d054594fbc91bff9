//! Descriptors of tensors for Hopper's tensor memory accelerator (TMA); see tma.cuh.

use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUtensorMap, CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave,
    CUtensorMapL2promotion, CUtensorMapSwizzle, cuTensorMapEncodeTiled,
};
use candle_core::{DType, Result, bail};
use std::ffi::c_void;

/// A TMA descriptor (`CUtensorMap`) of a tensor of elements of 1 or 2 bytes: where it lies, and the box of it that one copy
/// moves.
#[repr(C, align(128))]
#[derive(Clone, Copy, Default)]
pub(crate) struct TmaDescriptor {
    words: [u64; 16],
}

impl TmaDescriptor {
    /// The elements from `pointer` on, of `sizes`, the last dimension contiguous and the others
    /// `strides` elements apart, in boxes of `of_box`, whose lines are of 128 bytes at most. A tensor
    /// without elements has none.
    pub(crate) fn new<const N: usize>(
        dtype: DType,
        pointer: u64,
        sizes: [usize; N],
        strides: [usize; N],
        of_box: [u32; N],
    ) -> Result<TmaDescriptor> {
        if sizes.contains(&0) {
            return Ok(TmaDescriptor::default());
        }
        let element = match dtype {
            DType::U8 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            DType::BF16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            DType::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            _ => bail!(
                "metal-candle-kernels: a TMA descriptor of {dtype:?} elements on CUDA, expected U8, BF16 or F16"
            ),
        };
        let outer = 0..N.saturating_sub(1);
        // The distance of what there is one of means nothing.
        let size = dtype.size_in_bytes();
        let apart = |i: usize| if sizes[i] == 1 { 16 } else { strides[i] * size };
        let aligned =
            pointer.is_multiple_of(16) && outer.clone().all(|i| apart(i).is_multiple_of(16));
        if !aligned || strides[N - 1] != 1 {
            bail!(
                "metal-candle-kernels: a TMA descriptor of elements with strides {strides:?} on CUDA, expected rows that begin at 16 bytes"
            )
        }
        let mut descriptor = CUtensorMap { opaque: [0; 16] };
        // The driver counts dimensions from the last one, and distances in bytes.
        let counts: [u64; N] = std::array::from_fn(|i| sizes[N - 1 - i] as u64);
        let bytes: Vec<u64> = outer.rev().map(|i| apart(i) as u64).collect();
        let boxes: [u32; N] = std::array::from_fn(|i| of_box[N - 1 - i]);
        let steps = [1u32; N];
        // SAFETY: it reads the arrays, which are of the numbers of dimensions it is told, and writes the
        // descriptor.
        unsafe {
            cuTensorMapEncodeTiled(
                &raw mut descriptor,
                element,
                N as u32,
                pointer as *mut c_void,
                counts.as_ptr(),
                bytes.as_ptr(),
                boxes.as_ptr(),
                steps.as_ptr(),
                CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
                CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
                CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        }
        .result()
        .w()?;
        Ok(TmaDescriptor { words: descriptor.opaque })
    }
}
