//! What the operations share: a folder for each backend, the choice among them by where a tensor lies, and
//! checks of shapes and dtypes. [`crate::devices`] is what callers see of them.

#[cfg(test)]
mod agreement;
pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
pub(crate) mod metal;
mod record;

pub(crate) use record::{record1, record2, record3};

use candle_core::{DType, DeviceLocation, Result, Tensor, bail};

/// The kernel `$name` for elements of dtype `$dtype` on `$device`.
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
macro_rules! kernel_name {
    ($device:literal, $name:literal, $dtype:expr) => {
        match $dtype {
            candle_core::DType::F32 => Ok(concat!($name, "_f32")),
            candle_core::DType::BF16 => Ok(concat!($name, "_bf16")),
            candle_core::DType::F16 => Ok(concat!($name, "_f16")),
            other => Err(candle_core::Error::Msg(format!(
                "metal-candle-kernels: {} on {} does not support {other:?} tensors, expected F32, BF16 or F16",
                $name, $device
            ))),
        }
    };
}
#[cfg(any(feature = "cuda", feature = "metal", feature = "metal-emulation", test))]
pub(crate) use kernel_name;

/// Returns what `$call` gives when `$tensor` is on a GPU that this build has kernels for. In `$call`, `$gpu`
/// stands for the module `cuda` or `metal` beside it.
macro_rules! on_gpu {
    ($tensor:expr, $gpu:ident => $call:expr) => {
        #[cfg(feature = "cuda")]
        if $tensor.device().is_cuda() {
            use self::cuda as $gpu;
            return $call;
        }
        #[cfg(any(feature = "metal", feature = "metal-emulation", test))]
        if $crate::backend::metal::computes($tensor) {
            use self::metal as $gpu;
            return $call;
        }
    };
}
pub(crate) use on_gpu;

/// The dtype of sums over elements of one.
pub(crate) fn dtype_of_sums(dtype: DType) -> DType {
    if dtype == DType::F64 { DType::F64 } else { DType::F32 }
}

/// Zeros where `x` is and of its dtype.
pub(crate) fn zeros_beside(x: &Tensor, shape: (usize, usize)) -> Result<Tensor> {
    #[cfg(feature = "cuda")]
    if x.device().is_cuda() {
        return Ok(cuda::Cuda::of(x)?.zeros(shape, x.dtype())?.tensor);
    }
    Tensor::zeros(shape, x.dtype(), x.device())
}

/// An error unless all tensors are on one device, and this build has kernels for it.
pub(crate) fn require_together(operation: &str, tensors: &[&Tensor]) -> Result<()> {
    let mut first: Option<DeviceLocation> = None;
    for tensor in tensors {
        let here = tensor.device().location();
        let gpu = match here {
            DeviceLocation::Cpu => None,
            DeviceLocation::Cuda { .. } => Some(("CUDA", cfg!(feature = "cuda"))),
            DeviceLocation::Metal { .. } => Some(("Metal", cfg!(feature = "metal"))),
        };
        match gpu {
            Some((device, false)) => bail!(
                "metal-candle-kernels: {operation} has no {device} kernel in this build; move the tensors to the CPU"
            ),
            Some((device, true)) if tensor.dtype() == DType::F64 => bail!(
                "metal-candle-kernels: {operation} on {device} does not support F64 tensors, expected F32, BF16 or F16; F64 is computed on the CPU"
            ),
            _ => {}
        }
        let first = *first.get_or_insert(here);
        if first != here {
            bail!(
                "metal-candle-kernels: {operation}: a tensor is on {first:?} and another on {here:?}, expected all on one device"
            )
        }
    }
    Ok(())
}

/// An error unless `tensor` has exactly these dimensions.
pub(crate) fn require_shape(
    operation: &str,
    name: &str,
    tensor: &Tensor,
    expected: &[usize],
) -> Result<()> {
    if tensor.dims() != expected {
        bail!(
            "metal-candle-kernels: {operation}: {name} has shape {:?}, expected {expected:?}",
            tensor.dims()
        )
    }
    Ok(())
}

/// An error unless `tensor` has this dtype.
pub(crate) fn require_dtype(
    operation: &str,
    name: &str,
    tensor: &Tensor,
    expected: DType,
) -> Result<()> {
    if tensor.dtype() != expected {
        bail!(
            "metal-candle-kernels: {operation}: {name} is {:?}, expected {expected:?}",
            tensor.dtype()
        )
    }
    Ok(())
}

/// An error unless `tensor` has as many dimensions as `layout`, such as `(batch, seq, hidden)`, names.
pub(crate) fn require_rank(
    operation: &str,
    name: &str,
    tensor: &Tensor,
    rank: usize,
    layout: &str,
) -> Result<()> {
    if tensor.rank() != rank {
        bail!(
            "metal-candle-kernels: {operation}: {name} has shape {:?}, expected {rank} dimensions {layout}",
            tensor.dims()
        )
    }
    Ok(())
}

/// An error unless `numbers` can take the place of those `uploaded (count)` u32, as kernels read them where they lie, and may
/// do so before what comes just before them has ended.
pub(crate) fn require_numbers(operation: &str, uploaded: &Tensor, numbers: &Tensor) -> Result<()> {
    require_together(operation, &[uploaded, numbers])?;
    require_shape(operation, "numbers", numbers, uploaded.dims())?;
    require_dtype(operation, "numbers", numbers, DType::U32)?;
    if !numbers.is_contiguous() {
        bail!("metal-candle-kernels: {operation}: the numbers aren't contiguous")
    }
    Ok(())
}

/// `(product of the leading dimensions, last dimension)`; an error for a scalar.
pub(crate) fn rows_and_columns(
    operation: &str,
    name: &str,
    tensor: &Tensor,
) -> Result<(usize, usize)> {
    match tensor.dims().split_last() {
        Some((columns, leading)) => Ok((leading.iter().product(), *columns)),
        None => bail!(
            "metal-candle-kernels: {operation}: {name} is a scalar, expected at least one dimension"
        ),
    }
}
