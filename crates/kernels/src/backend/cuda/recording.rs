//! Graphs: the launches of an operation's host side, captured while it goes through its work a second time.
//!
//! A graph repeats its kernels with the same addresses. So the first time, when the work runs as usual, the
//! tensors that it makes are kept, and the second time, when its launches are captured, they are given out
//! again in their order: nothing is allocated in the graph. Work that tells its parts has the memory of two of them,
//! in turns. Graphs that never run at once may have the same memory. It is captured on a stream of its own, so that other threads may use the device meanwhile, and is
//! launched on the device's.

use super::{Array, Cuda, copy_from_host};
use candle_core::cuda_backend::cudarc::cublas::{CudaBlas, sys as cublas};
use candle_core::cuda_backend::cudarc::driver::sys::{
    self, CUgraphInstantiate_flags, CUstreamCaptureMode,
};
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, result};
use candle_core::cuda_backend::{CudaStorage, WrapErr};
use candle_core::{DType, Device, Layout, Result, Shape, Tensor, bail};
use std::cell::RefCell;
use std::collections::{BTreeMap, HashSet};
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

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
    Run {
        made: Vec<Tensor>,
        given: Vec<Tensor>,
        /// How much was made when each part began.
        parts: Vec<usize>,
        /// Memory that other work has for itself, in which this one's tensors may lie, each of it once.
        memory: Vec<Tensor>,
        /// Where cuBLAS has a part in it.
        products: Option<Products>,
    },
    /// The work is captured: what it made is given out again.
    Capture {
        made: std::vec::IntoIter<Tensor>,
        /// The addresses of all that is kept.
        known: HashSet<u64>,
        stream: Arc<CudaStream>,
        products: Option<Products>,
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

/// Whether this thread records work, so that an operation has to be given all that it reads by addresses, too.
pub(crate) fn is_recording() -> bool {
    PHASE.with_borrow(Option::is_some)
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

/// The handle for a product by cuBLAS, if it isn't the device's. Work has the same for both phases, so that what is
/// captured is what ran, and has been loaded.
pub(super) fn product_handle(cuda: &Cuda) -> Result<Option<cublas::cublasHandle_t>> {
    let known = PHASE.with_borrow(|phase| match phase {
        None => Ok(Some(None)),
        Some(Phase::Run { products: None, .. }) => Ok(None),
        Some(
            Phase::Run { products: Some(products), .. }
            | Phase::Capture { products: Some(products), .. },
        ) => Ok(Some(Some(*products.blas.handle()))),
        Some(Phase::Capture { products: None, .. }) => bail!(
            "metal-candle-kernels: recording: the work had a product by cuBLAS the second time alone, expected the same"
        ),
    })?;
    if let Some(known) = known {
        return Ok(known);
    }
    let made = Products::new(cuda)?;
    let handle = *made.blas.handle();
    PHASE.with_borrow_mut(|phase| {
        if let Some(Phase::Run { products, .. }) = phase {
            *products = Some(made);
        }
    });
    Ok(Some(handle))
}

/// A handle of cuBLAS, and the memory that it computes in, as much as it takes by itself: where it allocated that in
/// a capture, the graph would, too.
struct Products {
    blas: CudaBlas,
    memory: CudaStorage,
    bytes: usize,
}

impl Products {
    fn new(cuda: &Cuda) -> Result<Products> {
        let (major, _) = cuda.stream.context().compute_capability().w()?;
        let bytes: usize = if major >= 9 { 32 << 20 } else { 8519680 };
        let memory = cuda.storage(bytes, DType::U8)?;
        let products = Products { blas: CudaBlas::new(cuda.stream.clone()).w()?, memory, bytes };
        products.compute_on(cuda, &cuda.stream)?;
        Ok(products)
    }

    /// Sends what follows to this stream.
    fn compute_on(&self, cuda: &Cuda, stream: &CudaStream) -> Result<()> {
        let handle = *self.blas.handle();
        let pointer = cuda.address(&self.memory, &Layout::contiguous(self.bytes))?;
        // SAFETY: the stream outlives what is sent to it, and the memory is kept beside what computes in it. The
        // handle forgets its memory with its stream.
        unsafe {
            cublas::cublasSetStream_v2(handle, stream.cu_stream() as cublas::cudaStream_t)
                .result()
                .w()?;
            cublas::cublasSetWorkspace_v2(handle, pointer as *mut c_void, self.bytes).result().w()
        }
    }
}

/// Begins a part of the work, which reads nothing that the part before the last has made.
pub(crate) fn next_part() {
    PHASE.with_borrow_mut(|phase| {
        if let Some(Phase::Run { made, parts, .. }) = phase {
            parts.push(made.len());
        }
    });
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
    PHASE.with_borrow_mut(|phase| match phase {
        None => Ok(None),
        Some(Phase::Run { made, memory, parts, .. }) => {
            let count = shape.elem_count();
            let fits = |other: &Tensor| other.dtype() == dtype && other.elem_count() >= count;
            // What was made at the same place of the part before the last.
            let done = match parts[..] {
                [.., first, last, current] => made[first..last].get(made.len() - current),
                _ => None,
            };
            let other = match done.filter(|other| fits(other)) {
                Some(other) => other.clone(),
                None => {
                    let free = memory.iter().enumerate().filter(|(_, other)| fits(other));
                    let Some((place, _)) = free.min_by_key(|(_, other)| other.elem_count()) else {
                        return Ok(None);
                    };
                    memory.swap_remove(place)
                }
            };
            let tensor = other.flatten_all()?.narrow(0, 0, count)?.reshape(shape)?;
            made.push(tensor.clone());
            Ok(Some(tensor))
        }
        Some(Phase::Capture { made, .. }) => match made.next() {
            Some(tensor) if tensor.shape() == shape && tensor.dtype() == dtype => Ok(Some(tensor)),
            found => bail!(
                "metal-candle-kernels: recording: the work made {:?} the first time and {:?} the second, expected the same",
                found.map(|tensor| tensor.shape().clone()),
                shape
            ),
        },
    })
}

/// A graph and the memory it works on.
pub(crate) struct Recorded {
    graph: CudaGraph,
    stream: Arc<CudaStream>,
    inputs: Array,
    made: Vec<Tensor>,
    _given: Vec<Tensor>,
    /// What cuBLAS computes in.
    _workspace: Option<CudaStorage>,
}

// SAFETY: a graph belongs to no thread, and it is only touched with `&mut`.
unsafe impl Send for Recorded {}
// SAFETY: as above.
unsafe impl Sync for Recorded {}

impl Recorded {
    pub(crate) fn new<E: From<candle_core::Error>>(
        device: &Device,
        inputs: &[u32],
        memory: Option<&Recorded>,
        mut work: impl FnMut(&Tensor) -> std::result::Result<Tensor, E>,
    ) -> std::result::Result<(Recorded, Tensor), E> {
        let tensor = Tensor::new(inputs, device)?;
        let cuda = Cuda::of(&tensor)?;
        let inputs = cuda.strided(&tensor)?;
        let device_stream = cuda.stream.clone();
        let memory = memory.map(Recorded::memory).transpose()?.unwrap_or_default();
        let (made, given, parts) = (Vec::new(), Vec::new(), Vec::new());
        let phase = InPhase::enter(Phase::Run { made, given, parts, memory, products: None })?;
        let output = work(&inputs.tensor)?;
        let address = cuda.strided(&output)?.pointer;
        let Some(Phase::Run { made, given, products, .. }) = phase.leave() else {
            return Err(lost().into());
        };
        let mut known = HashSet::new();
        for tensor in made.iter().chain(&given).chain([&inputs.tensor]) {
            known.insert(cuda.strided(tensor)?.pointer);
        }
        let stream = cuda.stream.context().new_stream().w()?;
        if let Some(products) = &products {
            products.compute_on(&cuda, &stream)?;
        }
        let again = made.clone().into_iter();
        let capture = Phase::Capture { made: again, known, stream: stream.clone(), products };
        let phase = InPhase::enter(capture)?;
        let capture = Capture::begin(&stream)?;
        let again = work(&inputs.tensor).and_then(|output| Ok(cuda.strided(&output)?.pointer));
        let graph = capture.end();
        let Some(Phase::Capture { made: mut left, products, .. }) = phase.leave() else {
            return Err(lost().into());
        };
        if again? != address || left.next().is_some() {
            let message = "metal-candle-kernels: recording: the work made something else the second time, expected the same";
            return Err(candle_core::Error::msg(message).into());
        }
        let graph = graph?;
        graph.upload().w()?;
        let stream = device_stream;
        let workspace = products.map(|products| products.memory);
        let recorded =
            Recorded { graph, stream, inputs, made, _given: given, _workspace: workspace };
        Ok((recorded, output))
    }

    /// What it has made, of tensors that begin at the same address the largest.
    pub(crate) fn memory(&self) -> Result<Vec<Tensor>> {
        let mut largest: BTreeMap<u64, &Tensor> = BTreeMap::new();
        for tensor in &self.made {
            let known = largest.entry(Cuda::of(tensor)?.strided(tensor)?.pointer).or_insert(tensor);
            if tensor.elem_count() > known.elem_count() {
                *known = tensor;
            }
        }
        Ok(largest.into_values().cloned().collect())
    }

    /// `first` are what the first inputs are instead, on the device.
    pub(crate) fn run(&mut self, inputs: &[u32], first: Option<&Tensor>) -> Result<()> {
        let count = self.inputs.tensor.elem_count();
        if inputs.len() != count {
            bail!("metal-candle-kernels: recording: {} inputs, expected {count}", inputs.len())
        }
        copy_from_host(&self.stream, self.inputs.pointer, inputs)?;
        if let Some(first) = first {
            self.replace(first)?;
        }
        // SAFETY: the graph lives as long as this, and what it touches is kept beside it.
        unsafe { result::graph::launch(self.graph.cu_graph_exec(), self.stream.cu_stream()) }.w()
    }

    /// Puts `first (n)`, which may be strided, in the place of the first inputs.
    fn replace(&self, first: &Tensor) -> Result<()> {
        let (count, room) = (first.elem_count(), self.inputs.tensor.elem_count());
        let is_here = first.device().same_device(self.inputs.tensor.device());
        if first.rank() != 1 || first.dtype() != DType::U32 || count > room || !is_here {
            bail!(
                "metal-candle-kernels: recording: the first inputs are {:?} of {:?}, expected up to {room} U32 in a row, on the recording's device",
                first.dims(),
                first.dtype()
            )
        }
        let size = DType::U32.size_in_bytes();
        let first_inputs = Cuda::of(first)?.strided(first)?;
        let copy = sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcHost: std::ptr::null(),
            srcArray: std::ptr::null_mut(),
            srcMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            srcDevice: first_inputs.pointer,
            srcPitch: first.stride()[0] * size,
            dstXInBytes: 0,
            dstY: 0,
            dstHost: std::ptr::null_mut(),
            dstArray: std::ptr::null_mut(),
            dstMemoryType: sys::CUmemorytype::CU_MEMORYTYPE_DEVICE,
            dstDevice: self.inputs.pointer,
            dstPitch: size,
            WidthInBytes: size,
            Height: count,
        };
        // SAFETY: both have so many numbers, as far from each other; what is freed later is freed behind this.
        unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.stream.cu_stream()) }.result().w()
    }
}

/// What threads do on a GPU that can't be done at once: a new device waits for all that its GPU does, which ends every
/// capture there, and fails itself.
#[derive(Default)]
struct Threads {
    captures: usize,
    is_opening: bool,
}

/// By the GPU's number: a capture on one may have to go on for work on another to end.
static THREADS: Mutex<BTreeMap<usize, Threads>> = Mutex::new(BTreeMap::new());
static CHANGED: Condvar = Condvar::new();

/// Changes what is done on a GPU, once it `may`.
fn change(ordinal: usize, may: impl Fn(&Threads) -> bool, to: impl FnOnce(&mut Threads)) {
    // A panic leaves all as it was.
    let mut known = THREADS.lock().unwrap_or_else(PoisonError::into_inner);
    while !may(known.entry(ordinal).or_default()) {
        known = CHANGED.wait(known).unwrap_or_else(PoisonError::into_inner);
    }
    to(known.entry(ordinal).or_default());
    CHANGED.notify_all();
}

/// A device is opened, while which nothing is captured on its GPU.
pub(super) struct Opening(usize);

impl Opening {
    /// Waits for the captures that are under way. Others may begin meanwhile: those of several GPUs may need each other.
    pub(super) fn begin(ordinal: usize) -> Result<Opening> {
        refuse_in_recording("opening a device")?;
        let may = |threads: &Threads| threads.captures == 0 && !threads.is_opening;
        change(ordinal, may, |threads| threads.is_opening = true);
        Ok(Opening(ordinal))
    }
}

impl Drop for Opening {
    fn drop(&mut self) {
        change(self.0, |_| true, |threads| threads.is_opening = false);
    }
}

/// A capture is under way, while which no device is opened on its GPU.
struct Capturing(usize);

impl Capturing {
    fn begin(ordinal: usize) -> Capturing {
        change(ordinal, |threads| !threads.is_opening, |threads| threads.captures += 1);
        Capturing(ordinal)
    }
}

impl Drop for Capturing {
    fn drop(&mut self) {
        change(self.0, |_| true, |threads| threads.captures -= 1);
    }
}

/// A capture under way, which ends whatever happens.
struct Capture<'a> {
    stream: &'a Arc<CudaStream>,
    ended: bool,
    _capturing: Capturing,
}

impl<'a> Capture<'a> {
    fn begin(stream: &'a Arc<CudaStream>) -> Result<Capture<'a>> {
        let capturing = Capturing::begin(stream.context().ordinal());
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).w()?;
        Ok(Capture { stream, ended: false, _capturing: capturing })
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
