//! Writing checkpoints beside the steps that follow.
//!
//! What a checkpoint holds is copied to the host's memory behind the step that made it, and a thread
//! writes the files from the copy while training goes on. There is one copy and one writer: a checkpoint
//! that is due before the last one is complete waits for it. Where the host has too little memory for a
//! copy, training waits while the files are written from the device's tensors, one by one. What ranks have parts of is
//! put together in that copy, or, where there is none, in as much memory for as long as the files are written.

use super::checkpoint::Contents;
use crate::memory::available_bytes;
use crate::parallel::Group;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::host::{HostBuffers, HostCopy};
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Instant;

/// Is told of the staging folder of a checkpoint before and after each of its files.
pub(super) type SavingFn = Box<dyn FnMut(&Path) + Send>;

/// Tells nobody.
pub(super) fn untold() -> SavingFn {
    Box::new(|_| ())
}

/// The part of the available memory that a copy may take.
const SHARE: u64 = 2;
/// Where the system doesn't say how much is available, a copy may take so many bytes.
const UNKNOWN: u64 = 1 << 30;

/// A checkpoint that is complete on the disk.
#[derive(Debug)]
pub(super) struct Saved {
    pub step: u64,
    pub path: PathBuf,
    /// How long training waited for it, in seconds.
    pub waited: f64,
    /// From its beginning until it was complete, in seconds.
    pub seconds: f64,
}

/// Writes the checkpoints of a run.
pub(super) struct Saver {
    memory: Memory,
    writing: Option<Writing>,
    /// One that was complete at once.
    complete: Option<Saved>,
    saving: SavingFn,
}

/// The host's memory for the copy.
enum Memory {
    /// It is being touched and pinned, which takes a while for gigabytes.
    Preparing(JoinHandle<candle_core::Result<HostBuffers>>),
    Ready(HostBuffers),
    /// The host has too little.
    Lacking,
    /// A writer has it.
    InUse,
}

/// What a checkpoint holds.
pub(super) enum Held {
    /// Tensors that are trained on, to be copied.
    Live(Vec<Tensor>),
    /// What [`Saver::room`] gave, filled.
    Copied(HostBuffers),
}

struct Writing {
    step: u64,
    begun: Instant,
    waited: f64,
    thread: JoinHandle<(Result<PathBuf>, Option<HostBuffers>, SavingFn)>,
}

impl Saver {
    /// Prepares to copy tensors of these shapes and dtypes, on `device` or the host; `in_parts` says whether they are put
    /// together from parts of several ranks.
    pub fn new(
        like: Vec<(Vec<usize>, DType)>,
        device: &Device,
        in_parts: bool,
        saving: SavingFn,
    ) -> Self {
        let bytes: usize = like
            .iter()
            .map(|(shape, dtype)| shape.iter().product::<usize>() * dtype.size_in_bytes())
            .sum();
        let available = available_bytes();
        let memory = if bytes as u64 <= available.map_or(UNKNOWN, |bytes| bytes / SHARE) {
            let device = device.clone();
            Memory::Preparing(std::thread::spawn(move || HostBuffers::new(&like, &device)))
        } else if in_parts {
            let available = available.map_or("an unknown number".into(), |bytes| bytes.to_string());
            tracing::warn!(
                "training waits for each checkpoint, which is put together in {bytes} bytes of this machine's memory, of \
                 which {available} are free"
            );
            Memory::Lacking
        } else {
            tracing::info!(
                "training waits for each checkpoint: a copy of {bytes} bytes would take too much of this machine's memory"
            );
            Memory::Lacking
        };
        Self { memory, writing: None, complete: None, saving }
    }

    /// The memory for a copy, where the host has it: for [`Held::Copied`]. The checkpoint before must have been
    /// [taken](Self::wait).
    pub fn room(&mut self) -> Option<HostBuffers> {
        match std::mem::replace(&mut self.memory, Memory::InUse) {
            Memory::Preparing(thread) => match thread.join() {
                Ok(Ok(buffers)) => return Some(buffers),
                Ok(Err(error)) => tracing::warn!("training waits for each checkpoint: {error}"),
                Err(_) => {}
            },
            Memory::Ready(buffers) => return Some(buffers),
            Memory::Lacking | Memory::InUse => {}
        }
        self.memory = Memory::Lacking;
        None
    }

    /// Begins the checkpoint of a step, for which training has waited since `begun`: what is live may be changed when this
    /// returns. The one before must have been [taken](Self::wait). `group` is told that this rank is busy where it waits for
    /// the files.
    pub fn begin(
        &mut self,
        step: u64,
        contents: Contents,
        held: Held,
        begun: Instant,
        group: Group<'_>,
    ) -> Result<()> {
        let copy = match held {
            Held::Live(tensors) => {
                let Some(buffers) = self.room() else {
                    let saving = &mut *self.saving;
                    let path = group.busy_with(move || contents.write(&tensors, saving))?;
                    let seconds = begun.elapsed().as_secs_f64();
                    self.complete = Some(Saved { step, path, waited: seconds, seconds });
                    return Ok(());
                };
                buffers.copy(&tensors)?
            }
            Held::Copied(buffers) => HostCopy::from(buffers),
        };
        let mut saving = std::mem::replace(&mut self.saving, untold());
        let thread = std::thread::spawn(move || {
            let buffers = match copy.wait() {
                Ok(buffers) => buffers,
                Err(error) => return (Err(error.into()), None, saving),
            };
            let result = contents.write(buffers.tensors(), &mut *saving);
            (result, Some(buffers), saving)
        });
        let waited = begun.elapsed().as_secs_f64();
        self.writing = Some(Writing { step, begun, waited, thread });
        Ok(())
    }

    /// The checkpoint that has become complete since this was called last. Doesn't wait.
    pub fn poll(&mut self) -> Result<Option<Saved>> {
        if self.writing.as_ref().is_some_and(|writing| !writing.thread.is_finished()) {
            return Ok(None);
        }
        self.wait(Group::default())
    }

    /// Finishes the checkpoint under way, whatever ends the run, as [`Self::wait`] does.
    pub fn finish(&mut self, group: Group<'_>) {
        if let Err(error) = self.wait(group) {
            tracing::warn!("a checkpoint was not written: {error}");
        }
    }

    /// Waits for the checkpoint under way, and gives the one that has become complete. `group` is told meanwhile that this
    /// rank is busy.
    pub fn wait(&mut self, group: Group<'_>) -> Result<Option<Saved>> {
        let Some(writing) = self.writing.take() else { return Ok(self.complete.take()) };
        let Writing { step, begun, mut waited, thread } = writing;
        let from_here = Instant::now();
        group.busy_until(|| thread.is_finished());
        let (result, buffers, saving) = thread.join().map_err(|_| {
            Error::option(
                "checkpoint",
                format!("the thread that wrote that of step {step} panicked"),
            )
        })?;
        waited += from_here.elapsed().as_secs_f64();
        self.memory = buffers.map_or(Memory::Lacking, Memory::Ready);
        self.saving = saving;
        let seconds = begun.elapsed().as_secs_f64();
        Ok(Some(Saved { step, path: result?, waited, seconds }))
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        self.finish(Group::default());
    }
}
