//! Copies on CUDA: its kernels are in `backend/cuda/copy`, which makes tensors contiguous, too.

use crate::backend::cuda::Cuda;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::result::memcpy_dtod_async;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUDA_MEMCPY2D, CUmemorytype, cuMemcpy2DAsync_v2,
};
use candle_core::{DType, Result, Tensor};

pub(super) fn cast(x: &Tensor, dtype: DType) -> Result<Tensor> {
    Ok(Cuda::of(x)?.contiguous_as(x, dtype)?.tensor)
}

pub(super) fn contiguous(x: &Tensor) -> Result<Tensor> {
    Ok(Cuda::of(x)?.contiguous(x)?.tensor)
}

pub(super) fn empty(x: &Tensor, shape: &[usize]) -> Result<Tensor> {
    Ok(Cuda::of(x)?.empty(shape, x.dtype())?.tensor)
}

pub(super) fn write_rows_both(
    pools: [&Tensor; 2],
    rows: [&Tensor; 2],
    places: &Tensor,
) -> Result<()> {
    let cuda = Cuda::of(pools[0])?;
    let room = pools[0].dim(0)? * pools[0].dim(1)?;
    let [first, second] = rows.map(|rows| cuda.strided_rows(rows));
    let [first_pool, second_pool] = pools.map(|pool| cuda.strided(pool));
    let places = cuda.contiguous(places)?;
    cuda.write_rows_both([&first?, &second?], [&first_pool?, &second_pool?], &places, room)
}

pub(super) fn write(whole: &Tensor, part: &Tensor, dim: usize, start: usize) -> Result<()> {
    let cuda = Cuda::of(whole)?;
    let (to, from) = (cuda.strided(whole)?, cuda.contiguous(part)?);
    let size = from.dtype.size_in_bytes();
    let inner = size * whole.dims()[dim + 1..].iter().product::<usize>();
    let width = inner * part.dim(dim)?;
    let height = whole.dims()[..dim].iter().product();
    let target = to.pointer + (inner * start) as u64;
    cuda.stream.context().bind_to_thread().w()?;
    // Rows of 2 GiB or more are beyond what has a pitch.
    if height == 1 {
        // SAFETY: the part has so many bytes, and fits into the whole, which both live on.
        return unsafe {
            memcpy_dtod_async(target, from.pointer, width, cuda.stream.cu_stream()).w()
        };
    }
    let device = CUmemorytype::CU_MEMORYTYPE_DEVICE;
    let copy = CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: device,
        srcHost: std::ptr::null(),
        srcDevice: from.pointer,
        srcArray: std::ptr::null_mut(),
        srcPitch: width,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: device,
        dstHost: std::ptr::null_mut(),
        dstDevice: target,
        dstArray: std::ptr::null_mut(),
        dstPitch: inner * whole.dim(dim)?,
        WidthInBytes: width,
        Height: height,
    };
    // SAFETY: the part has so many rows of `width` bytes, and fits into the whole, which both live on.
    unsafe { cuMemcpy2DAsync_v2(&copy, cuda.stream.cu_stream()) }.result().w()
}
