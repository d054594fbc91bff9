//! Ranks with a GPU each: sums over NCCL, and all else over TCP.
//!
//! Within a machine a rank that is lost can't be noticed by NCCL, whose kernels wait for it. So whoever waits for a sum looks
//! at the connections meanwhile, and ends NCCL's work when one of them does. Over a network NCCL may notice it first, and
//! doesn't say whom it has lost: the ranks find that out by their connections.

use super::launcher::{Launched, ToStarter};
use super::meeting::meet;
use super::member::Part;
use super::tcp::Star;
use super::{Collectives, elsewhere};
use crate::model::Shards;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use metal_candle_kernels::nccl::{Communicator, ID_BYTES, Mark, unique_id};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// This process and its GPU among the ranks.
#[derive(Debug)]
pub(super) struct Gpus(Arc<Links>);

/// The ways to the others, which are used for one thing at a time.
#[derive(Debug)]
struct Links {
    rank: usize,
    size: usize,
    limit: Duration,
    messages: Mutex<Star>,
    /// What has started all ranks, if it waits for rank 0 as they do.
    starter: Option<ToStarter>,
    communicator: Mutex<Communicator>,
    /// Behind the parts that were begun with last, and behind the last sum of parts.
    gathered: Mutex<Option<Mark>>,
    summed: Mutex<Option<Mark>>,
}

/// What is done with parts of tensors, in messages.
const LAYER: &str = "putting a layer's weights together";
const GRADIENTS: &str = "adding up a layer's gradients";

impl Gpus {
    /// Joins the processes that were started with this one, with this GPU.
    pub fn join(launched: &Launched, device: &Device, limit: Duration) -> Result<Self> {
        const WHAT: &str = "the start of NCCL";
        let Some(meeting) = &launched.meeting else {
            return Err(Error::Unsupported("processes on GPUs without MASTER_ADDR".into()));
        };
        let messages = meet(meeting, launched.rank, launched.size, limit)?;
        let mine = match messages.rank() {
            // What is wrong with NCCL here is told by the others in the same words, or is a rank that is lost to them.
            0 => unique_id()?.to_vec(),
            _ => Vec::new(),
        };
        let ids = messages.gather(WHAT, &mine)?;
        let id: [u8; ID_BYTES] = ids
            .first()
            .and_then(|id| id.as_slice().try_into().ok())
            .ok_or_else(|| elsewhere(0, WHAT))?;
        let begun = Instant::now();
        let watch = || messages.watch(WHAT, begun);
        let communicator =
            Communicator::join::<Error>(device, id, messages.rank(), messages.size(), watch)?;
        let (rank, size) = (messages.rank(), messages.size());
        let (messages, communicator) = (Mutex::new(messages), Mutex::new(communicator));
        let (gathered, summed) = (Mutex::default(), Mutex::default());
        let starter = ToStarter::find(&|name| std::env::var(name).ok());
        Ok(Self(Arc::new(Links {
            rank,
            size,
            limit,
            messages,
            starter,
            communicator,
            gathered,
            summed,
        })))
    }

    fn messages(&self) -> MutexGuard<'_, Star> {
        locked(&self.0.messages)
    }
}

fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Links {
    /// Does something with NCCL while it looks whether the others live.
    fn watching<T>(
        &self,
        what: &'static str,
        work: impl FnOnce(&Communicator, &mut dyn FnMut() -> Result<()>) -> Result<T>,
    ) -> Result<T> {
        let (messages, communicator) = (locked(&self.messages), locked(&self.communicator));
        let begun = Instant::now();
        let done = work(&communicator, &mut || messages.watch(what, begun));
        match done {
            Err(error) if !matches!(error, Error::Rank { .. }) && communicator.take_cut() => {
                Err(messages.cut(&error.to_string()))
            }
            done => done,
        }
    }
}

impl Shards for Links {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn begin(&self, parts: &[Tensor]) -> Result<Vec<Tensor>> {
        self.watching(LAYER, |communicator, wait| {
            let wholes = communicator.begin_gather(parts, wait)?;
            *locked(&self.gathered) = communicator.mark()?;
            Ok(wholes)
        })
    }

    fn end(&self) -> Result<()> {
        let mark = locked(&self.gathered).take();
        self.watching(LAYER, |communicator, wait| communicator.until_mark(mark.as_ref(), wait))
    }

    fn begin_sum(&self, buffer: &Tensor) -> Result<()> {
        self.watching(GRADIENTS, |communicator, wait| {
            communicator.begin_sum_of_parts(buffer, wait)?;
            *locked(&self.summed) = communicator.mark()?;
            Ok(())
        })
    }

    fn end_sum(&self) -> Result<()> {
        let mark = locked(&self.summed).take();
        self.watching(GRADIENTS, |communicator, wait| communicator.until_mark(mark.as_ref(), wait))
    }
}

impl Part for Gpus {
    fn leave(&self) -> Result<()> {
        self.messages().gather("the end", &[]).map(drop)
    }

    fn outlast_root(&self, limit: Duration) {
        self.messages().outlast_root(limit);
    }

    /// The others see that this one's connection ends.
    fn abort(&self, _: u8) {}

    fn shards(&self) -> Option<Arc<dyn Shards>> {
        Some(self.0.clone())
    }
}

impl Collectives for Gpus {
    fn rank(&self) -> usize {
        self.0.rank
    }

    fn size(&self) -> usize {
        self.0.size
    }

    fn limit(&self) -> Duration {
        self.0.limit
    }

    fn gather(&self, what: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.messages().gather(what, mine)
    }

    fn tell_busy(&self) {
        self.messages().tell_busy();
        if let Some(starter) = self.0.starter.as_ref().filter(|_| self.0.rank == 0) {
            starter.tell_busy();
        }
    }

    fn sum(&self, what: &'static str, buffer: &Tensor) -> Result<()> {
        self.begin_sum(what, buffer)?;
        self.end_begun(what)
    }

    fn spread(&self, what: &'static str, buffer: &Tensor, parts: &[Range<usize>]) -> Result<()> {
        self.begin_spread(what, buffer, parts)?;
        self.end_begun(what)
    }

    fn sums_beside_work(&self) -> bool {
        true
    }

    fn begin_sum(&self, what: &'static str, buffer: &Tensor) -> Result<()> {
        self.0.watching(what, |communicator, wait| communicator.begin_sum(buffer, wait))
    }

    fn begin_spread(
        &self,
        what: &'static str,
        buffer: &Tensor,
        parts: &[Range<usize>],
    ) -> Result<()> {
        let parts = parts.iter().map(|part| buffer.narrow(0, part.start, part.len()));
        let parts = parts.collect::<candle_core::Result<Vec<_>>>()?;
        self.0.watching(what, |communicator, wait| communicator.begin_spread(&parts, wait))
    }

    fn end_begun(&self, what: &'static str) -> Result<()> {
        self.0.watching(what, |communicator, wait| communicator.end(wait))
    }

    fn takes(&self, device: &Device) -> bool {
        device.is_cuda()
    }
}
