//! Tensors that wait in pinned memory of the host, see [`crate::offload`].

use super::lane::Event;
use super::{Cuda, Lane, host};
use crate::host::HostBuffers;
use candle_core::cuda_backend::WrapErr;
use candle_core::cuda_backend::cudarc::driver::{CudaStream, sys};
use candle_core::{DType, Device, Result, Shape, Tensor, bail};
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Groups whose tensors are held while they are copied: a pass goes on meanwhile, and waits for the one before these.
const LEAVING: usize = 2;

/// Groups that are on their way back before they are asked for.
const COMING: usize = 2;

/// Where a tensor begins in the memory of the host: at a multiple of so many bytes.
const ALIGNMENT: usize = 256;

/// Bytes of the host that are pinned at once: as many as there are, within these.
const LEAST: usize = 32 << 20;
const MOST: usize = 512 << 20;

#[derive(Debug)]
pub(crate) struct Offload(Arc<Shared>);

/// A group of tensors that wait.
#[derive(Debug)]
pub(crate) struct Ticket {
    shared: Arc<Shared>,
    group: usize,
    waits: bool,
}

#[derive(Debug)]
struct Shared {
    device: Device,
    /// To the host, and back.
    out: Lane,
    back: Lane,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    memory: Memory,
    /// In the order in which they were put away, since the last time that nothing waited.
    groups: Vec<Group>,
    /// How many of them wait.
    waiting: usize,
    /// Those that are still held on the device.
    leaving: VecDeque<Leaving>,
}

/// A group that is copied to the host.
#[derive(Debug)]
struct Leaving {
    group: usize,
    tensors: Vec<Tensor>,
    arrived: Arc<Event>,
}

#[derive(Debug)]
enum Group {
    /// With what tells when it has arrived on the host.
    Away(Vec<Place>, Arc<Event>),
    /// With what tells when nobody copies to it or from it any more.
    Coming(Vec<Tensor>, Arc<Event>),
    Gone,
}

/// Pinned memory in pieces, of which the first are taken.
#[derive(Debug, Default)]
struct Memory {
    pieces: Vec<HostBuffers>,
    /// The piece that is taken from, and the bytes that are taken of it.
    piece: usize,
    taken: usize,
}

/// Where a tensor waits.
#[derive(Debug)]
struct Place {
    stretches: Vec<Stretch>,
    shape: Shape,
    dtype: DType,
}

/// A part of a tensor, in one piece.
#[derive(Debug)]
struct Stretch {
    piece: usize,
    start: usize,
    bytes: usize,
}

impl Memory {
    fn take(&mut self, tensor: &Tensor, device: &Device) -> Result<Place> {
        let mut bytes = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let mut stretches = Vec::new();
        while bytes > 0 {
            if self.piece == self.pieces.len() {
                let all = (0..self.pieces.len()).map(|piece| self.size(piece)).sum::<usize>();
                self.pieces.push(pinned(all.clamp(LEAST, MOST), device)?);
            }
            let taken = bytes.min(self.size(self.piece) - self.taken);
            stretches.push(Stretch { piece: self.piece, start: self.taken, bytes: taken });
            bytes -= taken;
            self.taken = (self.taken + taken).next_multiple_of(ALIGNMENT);
            if self.taken >= self.size(self.piece) {
                (self.piece, self.taken) = (self.piece + 1, 0);
            }
        }
        Ok(Place { stretches, shape: tensor.shape().clone(), dtype: tensor.dtype() })
    }

    fn size(&self, piece: usize) -> usize {
        self.pieces[piece].tensors().iter().map(Tensor::elem_count).sum()
    }

    /// The addresses of what a tensor at `device` waits in, and those of its parts there, with the bytes of each.
    fn stretches(&self, place: &Place, device: u64) -> Result<Vec<(usize, u64, usize)>> {
        let mut at = device;
        let found = place.stretches.iter().map(|Stretch { piece, start, bytes }| {
            let address = match self.pieces.get(*piece).map(HostBuffers::tensors) {
                Some([piece]) => host::memory(piece)?.0 + start,
                _ => bail!("metal-candle-kernels: offload: there is no memory {piece}"),
            };
            let part = (address, at, *bytes);
            at += *bytes as u64;
            Ok(part)
        });
        found.collect()
    }
}

fn pinned(bytes: usize, device: &Device) -> Result<HostBuffers> {
    HostBuffers::new(&[(vec![bytes], DType::U8)], device).map_err(|error| {
        candle_core::Error::Msg(format!(
            "metal-candle-kernels: offload: {} MiB of the machine's memory cannot be pinned for activations: {error}",
            bytes >> 20
        ))
    })
}

impl Offload {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self(Arc::new(Shared {
            out: Lane::new(device)?,
            back: Lane::new(device)?,
            device: device.clone(),
            state: Mutex::default(),
        })))
    }

    /// Begins to copy contiguous tensors of the device, which may be dropped.
    pub(crate) fn put(&self, tensors: &[Tensor]) -> Result<Ticket> {
        let shared = &self.0;
        let cuda = Cuda::on(&shared.device)?;
        let mut guard = shared.state();
        let state = &mut *guard;
        if state.waiting == 0 {
            state.groups.clear();
            (state.memory.piece, state.memory.taken) = (0, 0);
            // What comes from there, though nobody asked for it in the end, has come.
            shared.out.wait_for(&shared.back.mark()?)?;
        }
        let mut places = Vec::with_capacity(tensors.len());
        for tensor in tensors {
            places.push(state.memory.take(tensor, &shared.device)?);
        }
        shared.out.follow()?;
        let launch = || -> Result<Event> {
            for (tensor, place) in tensors.iter().zip(&places) {
                let pointer = cuda.strided(tensor)?.pointer;
                for (to, from, bytes) in state.memory.stretches(place, pointer)? {
                    let (to, stream) = (to as *mut c_void, shared.out.stream());
                    // SAFETY: both have so many bytes; the tensor is held until the copy is done, and the memory of the
                    // host until both lanes are.
                    unsafe { sys::cuMemcpyDtoHAsync_v2(to, from, bytes, stream) }.result().w()?;
                }
            }
            shared.out.mark()
        };
        let arrived = match launch() {
            Ok(arrived) => Arc::new(arrived),
            Err(error) => {
                // The tensors may be given back now.
                shared.out.wait()?;
                return Err(error);
            }
        };
        let group = state.groups.len();
        state.groups.push(Group::Away(places, arrived.clone()));
        state.waiting += 1;
        let ticket = Ticket { shared: shared.clone(), group, waits: true };
        state.leaving.push_back(Leaving { group, tensors: tensors.to_vec(), arrived });
        let mut held = Ok(());
        while held.is_ok()
            && state.leaving.len() > LEAVING
            && let Some(Leaving { tensors, arrived, .. }) = state.leaving.pop_front()
        {
            // Their memory is given back behind this.
            held = hold_up(&cuda.stream, &arrived, &tensors);
        }
        // The ticket would wait for it.
        drop(guard);
        held.map(|()| ticket)
    }
}

/// Lets what comes next on the device's stream begin when the copies of `tensors` are done.
fn hold_up(stream: &CudaStream, done: &Event, tensors: &[Tensor]) -> Result<()> {
    done.hold_up(stream).inspect_err(|_| {
        // Nobody knows when they may be given back.
        std::mem::forget(tensors.to_vec());
    })
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is held on the device needn't come back.
    fn keep_held(state: &mut State) {
        for Leaving { group, tensors, arrived } in state.leaving.drain(..) {
            if let Some(group @ Group::Away(..)) = state.groups.get_mut(group) {
                *group = Group::Coming(tensors, arrived);
            }
        }
    }

    /// Begins to bring a group back, if it is away.
    fn begin(&self, state: &mut State, group: usize) -> Result<()> {
        let State { memory, groups, .. } = state;
        let Some(Group::Away(places, arrived)) = groups.get(group) else { return Ok(()) };
        let cuda = Cuda::on(&self.device)?;
        let new = places.iter().map(|place| cuda.empty(&place.shape, place.dtype));
        let new = new.collect::<Result<Vec<_>>>()?;
        self.back.follow()?;
        self.back.wait_for(arrived)?;
        let launch = || -> Result<Event> {
            for (array, place) in new.iter().zip(places) {
                for (from, to, bytes) in memory.stretches(place, array.pointer)? {
                    let (from, stream) = (from as *const c_void, self.back.stream());
                    // SAFETY: both have so many bytes; the tensor is dropped behind the copy, and the memory of the host
                    // is written to again, or given back, once the lane is done.
                    unsafe { sys::cuMemcpyHtoDAsync_v2(to, from, bytes, stream) }.result().w()?;
                }
            }
            self.back.mark()
        };
        match launch() {
            Ok(come) => {
                let tensors = new.into_iter().map(|array| array.tensor).collect();
                groups[group] = Group::Coming(tensors, Arc::new(come));
                Ok(())
            }
            Err(error) => {
                self.back.wait()?;
                Err(error)
            }
        }
    }

    /// Takes a group out, with its tensors as the device's stream may use them; none where it is away.
    fn leave(&self, state: &mut State, group: usize) -> Result<Option<Vec<Tensor>>> {
        let stream = Cuda::on(&self.device)?.stream;
        let taken = state.groups.get_mut(group).map(|it| std::mem::replace(it, Group::Gone));
        state.waiting -= 1;
        match taken {
            Some(Group::Coming(tensors, come)) => {
                hold_up(&stream, &come, &tensors)?;
                Ok(Some(tensors))
            }
            _ => Ok(None),
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let done = self.out.wait().and_then(|()| self.back.wait());
        if done.is_err() {
            // What fails here has nobody to tell, and may still be copied to and from.
            std::mem::forget(std::mem::take(&mut *self.state()));
        }
    }
}

impl Ticket {
    pub(crate) fn redeem(mut self) -> Result<Vec<Tensor>> {
        let mut state = self.shared.state();
        Shared::keep_held(&mut state);
        self.shared.begin(&mut state, self.group)?;
        let below = (0..self.group).rev();
        let wait = |group: &usize| !matches!(state.groups.get(*group), Some(Group::Gone) | None);
        for group in below.filter(wait).take(COMING).collect::<Vec<_>>() {
            // Where there is no room yet, it comes when it is asked for.
            if self.shared.begin(&mut state, group).is_err() {
                break;
            }
        }
        let found = self.shared.leave(&mut state, self.group);
        drop(state);
        self.waits = false;
        let missing = "metal-candle-kernels: offload: what was put away isn't there";
        found?.ok_or_else(|| candle_core::Error::msg(missing))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        if self.waits {
            let mut state = self.shared.state();
            Shared::keep_held(&mut state);
            // What fails here has nobody to tell.
            let _ = self.shared.leave(&mut state, self.group);
        }
    }
}
