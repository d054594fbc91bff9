//! Ranks with a GPU each: sums over NCCL, and all else over TCP.
//!
//! A rank that is lost can't be noticed within NCCL, whose kernels wait for it. So whoever waits for a sum looks at the
//! connections meanwhile, and ends NCCL's work when one of them does.

use super::launcher::Launched;
use super::meeting::meet;
use super::member::Part;
use super::tcp::Star;
use super::{Collectives, elsewhere};
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use metal_candle_kernels::nccl::{Communicator, ID_BYTES, unique_id};
use std::time::{Duration, Instant};

/// This process and its GPU among the ranks.
#[derive(Debug)]
pub(super) struct Gpus {
    messages: Star,
    communicator: Communicator,
}

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
        Ok(Self { messages, communicator })
    }
}

impl Part for Gpus {
    fn leave(&self) -> Result<()> {
        self.messages.gather("the end", &[]).map(drop)
    }

    fn outlast_root(&self, limit: Duration) {
        self.messages.outlast_root(limit);
    }

    /// The others see that this one's connection ends.
    fn abort(&self, _: u8) {}
}

impl Collectives for Gpus {
    fn rank(&self) -> usize {
        self.messages.rank()
    }

    fn size(&self) -> usize {
        self.messages.size()
    }

    fn gather(&self, what: &'static str, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.messages.gather(what, mine)
    }

    fn sum(&self, what: &'static str, buffer: &Tensor) -> Result<()> {
        let begun = Instant::now();
        self.communicator.sum(buffer, || self.messages.watch(what, begun))
    }

    fn takes(&self, device: &Device) -> bool {
        device.is_cuda()
    }
}
