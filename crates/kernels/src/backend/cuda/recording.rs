//! Graphs: the launches of an operation's host side, captured while it goes through its work a second time.
//!
//! A graph repeats its kernels with the same addresses. So the first time, when the work runs as usual, the
//! tensors that it makes are kept, and the second time, when its launches are captured, they are given out
//! again in their order: nothing is allocated in the graph. It is captured on a stream of its own, so that
//! other threads may use the device meanwhile, and is launched on the device's.

use super::{Array, Cuda};
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::sys::{
    CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, result};
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use std::cell::RefCell;
use std::collections::HashSet;
use std::sync::Arc;

/// Whether work of the device can be recorded. With events for every tensor, as Candle's own devices have
/// them, a capture would wait for what came before it.
pub(crate) fn can_record(device: &Device) -> bool {
    match device {
        Device::Cuda(device) => !device.cuda_stream().context().is_event_tracking(),
        _ => false,
    }
}

/// What becomes of this thread's operations while work is recorded.
enum Phase {
    /// The work runs: what it makes is kept, and what it is given.
    Run { made: Vec<Tensor>, given: Vec<Tensor> },
    /// The work is captured: what it made is given out again.
    Capture {
        made: std::vec::IntoIter<Tensor>,
        /// The addresses of all that is kept.
        known: HashSet<u64>,
        stream: Arc<CudaStream>,
    },
}

thread_local! {
    static PHASE: RefCell<Option<Phase>> = const { RefCell::new(None) };
}

/// Ends a phase, also when the work panics.
struct InPhase;

impl InPhase {
    fn enter(phase: Phase) -> Result<InPhase> {
        PHASE.with_borrow_mut(|current| match current {
            Some(_) => bail!("metal-candle-kernels: recording: work is recorded within work"),
            None => {
                *current = Some(phase);
                Ok(InPhase)
            }
        })
    }

    fn leave(self) -> Option<Phase> {
        PHASE.take()
    }
}

impl Drop for InPhase {
    fn drop(&mut self) {
        PHASE.set(None);
    }
}

/// Keeps a tensor that an operation was given.
pub(super) fn note_given(tensor: &Tensor, pointer: u64) -> Result<()> {
    PHASE.with_borrow_mut(|phase| match phase {
        None => Ok(()),
        Some(Phase::Run { given, .. }) => {
            given.push(tensor.clone());
            Ok(())
        }
        Some(Phase::Capture { known, .. }) if known.contains(&pointer) => Ok(()),
        Some(Phase::Capture { .. }) => bail!(
            "metal-candle-kernels: recording: a tensor of shape {:?} was made by none of this crate's operations in the work, which cannot be repeated",
            tensor.dims()
        ),
    })
}

/// The stream that this thread's launches go to, if it isn't the device's.
pub(super) fn stream() -> Option<Arc<CudaStream>> {
    PHASE.with_borrow(|phase| match phase {
        Some(Phase::Capture { stream, .. }) => Some(stream.clone()),
        _ => None,
    })
}

/// An error while work is captured, in which `what` cannot be done.
pub(crate) fn refuse_in_recording(what: &str) -> Result<()> {
    if stream().is_some() {
        bail!("metal-candle-kernels: recording: {what} cannot be recorded")
    }
    Ok(())
}

/// Keeps a tensor that an operation makes.
pub(super) fn note_made(tensor: &Tensor) {
    PHASE.with_borrow_mut(|phase| {
        if let Some(Phase::Run { made, .. }) = phase {
            made.push(tensor.clone());
        }
    });
}

/// The tensor to give out instead of a new one.
pub(super) fn made_before(shape: &Shape, dtype: DType) -> Result<Option<Tensor>> {
    PHASE.with_borrow_mut(|phase| {
        let Some(Phase::Capture { made, .. }) = phase else { return Ok(None) };
        match made.next() {
            Some(tensor) if tensor.shape() == shape && tensor.dtype() == dtype => Ok(Some(tensor)),
            found => bail!(
                "metal-candle-kernels: recording: the work made {:?} the first time and {:?} the second, expected the same",
                found.map(|tensor| tensor.shape().clone()),
                shape
            ),
        }
    })
}

/// A graph and the memory it works on.
pub(crate) struct Recorded {
    graph: CudaGraph,
    stream: Arc<CudaStream>,
    inputs: Array,
    _memory: [Vec<Tensor>; 2],
}

// SAFETY: a graph belongs to no thread, and it is only touched with `&mut`.
unsafe impl Send for Recorded {}
// SAFETY: as above.
unsafe impl Sync for Recorded {}

impl Recorded {
    pub(crate) fn new<E: From<candle_core::Error>>(
        device: &Device,
        inputs: &[u32],
        mut work: impl FnMut(&Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(Recorded, Tensor), E> {
        let tensor = Tensor::new(inputs, device)?;
        let cuda = Cuda::of(&tensor)?;
        let inputs = cuda.strided(&tensor)?;
        let device_stream = cuda.stream.clone();
        let phase = InPhase::enter(Phase::Run { made: Vec::new(), given: Vec::new() })?;
        let output = work(&inputs.tensor)?;
        let address = cuda.strided(&output)?.pointer;
        let Some(Phase::Run { made, given }) = phase.leave() else {
            return Err(lost().into());
        };
        let mut known = HashSet::new();
        for tensor in made.iter().chain(&given).chain([&inputs.tensor]) {
            known.insert(cuda.strided(tensor)?.pointer);
        }
        let stream = cuda.stream.context().new_stream().w()?;
        let again = made.clone().into_iter();
        let phase = InPhase::enter(Phase::Capture { made: again, known, stream: stream.clone() })?;
        let capture = Capture::begin(&stream)?;
        let again = work(&inputs.tensor).and_then(|output| Ok(cuda.strided(&output)?.pointer));
        let graph = capture.end();
        let Some(Phase::Capture { made: mut left, .. }) = phase.leave() else {
            return Err(lost().into());
        };
        if again? != address || left.next().is_some() {
            let message = "metal-candle-kernels: recording: the work made something else the second time, expected the same";
            return Err(candle_core::Error::msg(message).into());
        }
        let graph = graph?;
        graph.upload().w()?;
        Ok((Recorded { graph, stream: device_stream, inputs, _memory: [made, given] }, output))
    }

    pub(crate) fn run(&mut self, inputs: &[u32]) -> Result<()> {
        let count = self.inputs.tensor.elem_count();
        if inputs.len() != count {
            bail!("metal-candle-kernels: recording: {} inputs, expected {count}", inputs.len())
        }
        self.stream.context().bind_to_thread().w()?;
        let stream = self.stream.cu_stream();
        // SAFETY: the tensor has so many numbers; the driver is done with the host's when it returns.
        unsafe { result::memcpy_htod_async(self.inputs.pointer, inputs, stream) }.w()?;
        // SAFETY: the graph lives as long as this, and what it touches is kept beside it.
        unsafe { result::graph::launch(self.graph.cu_graph_exec(), stream) }.w()
    }
}

/// A capture under way, which ends whatever happens.
struct Capture<'a> {
    stream: &'a Arc<CudaStream>,
    ended: bool,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Arc<CudaStream>) -> Result<Capture<'a>> {
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        Ok(Capture { stream, ended: false })
    }

    fn end(mut self) -> Result<CudaGraph> {
        self.ended = true;
        match self.stream.end_capture(CUgraphInstantiate_flags(0)).w()? {
            Some(graph) => Ok(graph),
            None => bail!("metal-candle-kernels: recording: the device recorded nothing"),
        }
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if !self.ended {
            // What was captured until then is of no use, and neither is an error.
            let _ = self.stream.end_capture(CUgraphInstantiate_flags(0));
        }
    }
}

fn lost() -> candle_core::Error {
    candle_core::Error::msg("metal-candle-kernels: recording: the work was recorded within itself")
}
