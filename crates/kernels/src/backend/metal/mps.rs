//! Products by `MPSMatrixMultiplication` of Apple's Metal Performance Shaders.
//!
//! Candle shows nobody its command buffers, which such a product has to be encoded into. So it gets one of
//! its own, on another queue: what Candle has encoded is committed and waited for, and so is the product.
//! The GPU idles twice for each, which takes about as long as launching some hundred kernels.

use super::Array;
use candle_core::metal_backend::{DeviceId, MetalDevice};
use candle_core::{DType, Result, bail};
use candle_metal_kernels::metal::CommandQueue;
use objc2::AnyThread;
use objc2::rc::{Retained, autoreleasepool};
use objc2_metal::{MTLCommandBuffer, MTLCommandBufferStatus, MTLCommandQueue};
use objc2_metal_performance_shaders::{
    MPSDataType, MPSMatrix, MPSMatrixDescriptor, MPSMatrixMultiplication, MPSSupportsMTLDevice,
};
use std::sync::Mutex;

static QUEUES: Mutex<Vec<(DeviceId, CommandQueue)>> = Mutex::new(Vec::new());

/// Writes the product `(rows, columns)` of contiguous matrices into `to`; what is transposed is stored
/// transposed. All are of one dtype, f32 or f16.
pub(super) fn multiply(
    device: &MetalDevice,
    [rows, columns, inner]: [usize; 3],
    [(left, left_transposed), (right, right_transposed)]: [(&Array, bool); 2],
    to: &Array,
) -> Result<()> {
    let queue = queue(device)?;
    let left_sizes = if left_transposed { [inner, rows] } else { [rows, inner] };
    let right_sizes = if right_transposed { [columns, inner] } else { [inner, columns] };
    // Before anything that Candle has encoded may write to these matrices or read them.
    device.flush_and_wait_current()?;
    autoreleasepool(|_| {
        let (left, right) = (matrix(left, left_sizes)?, matrix(right, right_sizes)?);
        let result = matrix(to, [rows, columns])?;
        let Some(commands) = queue.commandBuffer() else {
            bail!("metal-candle-kernels: Metal gave no command buffer for a product of its own")
        };
        // SAFETY: the matrices are as large as is said here, and nothing else uses their buffers until
        // the product is done.
        unsafe {
            let product = MPSMatrixMultiplication::initWithDevice_transposeLeft_transposeRight_resultRows_resultColumns_interiorColumns_alpha_beta(
                MPSMatrixMultiplication::alloc(),
                device.metal_device().as_ref(),
                left_transposed,
                right_transposed,
                rows,
                columns,
                inner,
                1.0,
                0.0,
            );
            product.encodeToCommandBuffer_leftMatrix_rightMatrix_resultMatrix(
                &commands, &left, &right, &result,
            );
        }
        commands.commit();
        commands.waitUntilCompleted();
        match commands.status() {
            MTLCommandBufferStatus::Completed => Ok(()),
            status => bail!(
                "metal-candle-kernels: a product of Metal Performance Shaders ended with status {status:?}"
            ),
        }
    })
}

/// A queue beside Candle's.
fn queue(device: &MetalDevice) -> Result<CommandQueue> {
    let Ok(mut queues) = QUEUES.lock() else {
        bail!("metal-candle-kernels: another thread failed while it opened a command queue")
    };
    let id = device.id();
    if let Some((_, queue)) = queues.iter().find(|(known, _)| *known == id) {
        return Ok(queue.clone());
    }
    // SAFETY: the device is one that Metal gave.
    if !unsafe { MPSSupportsMTLDevice(Some(device.metal_device().as_ref())) } {
        bail!(
            "metal-candle-kernels: Metal Performance Shaders don't support this device; choose another matmul"
        )
    }
    let queue = device.metal_device().new_command_queue().map_err(super::encode::metal_error)?;
    queues.push((id, queue.clone()));
    Ok(queue)
}

/// A contiguous matrix, as it is stored.
fn matrix(array: &Array, [rows, columns]: [usize; 2]) -> Result<Retained<MPSMatrix>> {
    let dtype = match array.dtype {
        DType::F32 => MPSDataType::Float32,
        DType::F16 => MPSDataType::Float16,
        other => bail!(
            "metal-candle-kernels: Metal Performance Shaders multiply no {other:?} matrices, expected F32 or F16; choose another matmul"
        ),
    };
    let row_bytes = columns * array.dtype.size_in_bytes();
    // SAFETY: the array has so many elements from its offset on.
    unsafe {
        let descriptor = MPSMatrixDescriptor::matrixDescriptorWithRows_columns_rowBytes_dataType(
            rows, columns, row_bytes, dtype,
        );
        Ok(MPSMatrix::initWithBuffer_offset_descriptor(
            MPSMatrix::alloc(),
            array.buffer.as_ref(),
            array.offset,
            &descriptor,
        ))
    }
}
