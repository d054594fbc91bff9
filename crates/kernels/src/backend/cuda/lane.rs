//! A stream beside the device's own, for transfers that run while the device computes.

use super::{Cuda, refuse_in_recording};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::{self, CUresult, CUstream};
use candle_core::cuda_backend::cudarc::driver::{CudaContext, CudaEvent, CudaStream, result};
use candle_core::{Device, Result, Tensor};
use std::sync::Arc;

/// The stream. Memory that transfers write to is taken from the device's stream, so a transfer begins behind all that
/// was launched there before ([`Self::follow`]); the device's stream may use what it wrote once the host has seen that
/// it is done ([`Self::is_done`]), or behind a place of it ([`Event::hold_up`]).
#[derive(Debug)]
pub(crate) struct Lane {
    stream: CUstream,
    device: Arc<CudaStream>,
    context: Arc<CudaContext>,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for Lane {}
// SAFETY: as above, and what is done with it here changes nothing of this.
unsafe impl Sync for Lane {}

impl Lane {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let device = Cuda::on(device)?.stream;
        let context = device.context().clone();
        context.bind_to_thread().w()?;
        let mut stream: CUstream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the place is one for a stream, of the context that is bound.
        unsafe { sys::cuStreamCreate(&mut stream, flags) }.result().w()?;
        Ok(Self { stream, device, context })
    }

    pub(crate) fn stream(&self) -> CUstream {
        self.stream
    }

    /// Lets what comes next here begin behind all that was launched on the device's stream.
    pub(crate) fn follow(&self) -> Result<()> {
        self.wait_for(&self.device_place()?)
    }

    /// The place behind all that was launched on the device's stream.
    pub(crate) fn device_place(&self) -> Result<Event> {
        refuse_in_recording("a transfer beside the work")?;
        Ok(Event(self.device.record_event(None).w()?))
    }

    /// Whether all that was launched here is done.
    pub(crate) fn is_done(&self) -> Result<bool> {
        self.context.bind_to_thread().w()?;
        // SAFETY: the stream lives.
        match unsafe { sys::cuStreamQuery(self.stream) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            code => code.result().w().map(|()| true),
        }
    }

    /// The place behind all that was launched here.
    pub(crate) fn mark(&self) -> Result<Event> {
        let event = self.context.new_event(None).w()?;
        // SAFETY: both live.
        unsafe { sys::cuEventRecord(event.cu_event(), self.stream) }.result().w()?;
        Ok(Event(event))
    }

    /// Lets what comes next here begin behind that place.
    pub(crate) fn wait_for(&self, place: &Event) -> Result<()> {
        self.context.bind_to_thread().w()?;
        // SAFETY: both live; an event may be dropped before what waits for it.
        unsafe { sys::cuStreamWaitEvent(self.stream, place.0.cu_event(), 0) }.result().w()
    }

    /// Contiguous u32 as they are behind all that this lane waits for.
    pub(crate) fn read(&self, numbers: &Tensor) -> Result<Vec<u32>> {
        let pointer = Cuda::of(numbers)?.strided(numbers)?.pointer;
        let mut read = vec![0u32; numbers.elem_count()];
        self.context.bind_to_thread().w()?;
        // SAFETY: both have so many numbers, and both live until the lane is done.
        let copied = unsafe { result::memcpy_dtoh_async(&mut read, pointer, self.stream) };
        self.wait()?;
        copied.w()?;
        Ok(read)
    }

    /// Waits until it is.
    pub(crate) fn wait(&self) -> Result<()> {
        self.context.bind_to_thread().w()?;
        // SAFETY: the stream lives.
        unsafe { sys::cuStreamSynchronize(self.stream) }.result().w()
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // What fails here has nobody to tell; the driver frees the stream once its work is done.
        let _ = self.context.bind_to_thread();
        // SAFETY: made by this, and nobody finds it any more.
        let _ = unsafe { sys::cuStreamDestroy_v2(self.stream) }.result();
    }
}

/// A place in the work of a device's stream or of a lane.
#[derive(Debug)]
pub(crate) struct Event(CudaEvent);

impl Event {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self(Cuda::on(device)?.stream.record_event(None).w()?))
    }

    /// Lets what comes next on a stream begin behind it.
    pub(crate) fn hold_up(&self, stream: &CudaStream) -> Result<()> {
        stream.wait(&self.0).w()
    }

    /// Whether the work before it is done; an error that the device had.
    pub(crate) fn is_done(&self) -> Result<bool> {
        self.0.try_is_complete().w()
    }
}
