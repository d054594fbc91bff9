//! This process as a member of the group that a launcher has started.

use super::launcher::launched;
use super::{Collectives, Group};
use crate::Result;
use crate::model::Shards;
use candle_core::Device;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// How a process comes to the end of its part in a group.
pub(super) trait Part: Collectives {
    /// Leaves, once all others do.
    fn leave(&self) -> Result<()>;

    /// Waits until rank 0 has ended, or ended this process, but no longer than the limit after it has said that it is busy.
    fn outlast_root(&self, limit: Duration);

    /// Makes all others end, where they wouldn't see by themselves that this one does.
    fn abort(&self, code: u8);

    /// The ranks as holders of a part of the weights each, where they can be that.
    fn shards(&self) -> Option<Arc<dyn Shards>> {
        None
    }
}

/// This process's part in a group. It is joined once, by the thread that trains, and lasts as long as the process.
#[derive(Debug, Default)]
pub struct Member(Option<Box<dyn Part>>);

impl Member {
    /// Joins the group that a launcher has started, with the device that this process computes on, or is alone where
    /// there is none. No rank waits longer than `limit` for another that says nothing; for a rank 0 that says that it writes
    /// files all wait ten times as long.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) when the launcher's processes can't train together in this build
    /// or on this device, [`Error::Rank`](crate::Error::Rank) when they don't find each other.
    pub fn join(device: &Device, limit: Duration) -> Result<Self> {
        let Some(launched) = launched() else { return Ok(Self::default()) };
        launched.check(device)?;
        #[cfg(feature = "cuda")]
        if device.is_cuda() {
            return Ok(Self(Some(Box::new(super::nccl::Gpus::join(&launched, device, limit)?))));
        }
        #[cfg(feature = "mpi")]
        if device.is_cpu() {
            return Ok(Self(Some(Box::new(super::mpi::Mpi::join(&launched, limit)?))));
        }
        let _ = limit;
        Ok(Self::default())
    }

    /// The group.
    pub fn group(&self) -> Group<'_> {
        match &self.0 {
            Some(part) => Group::new(&**part),
            None => Group::default(),
        }
    }

    /// The ranks as holders of a part of a model's weights each; `None` where there is one only, or where they have no GPUs.
    pub fn shards(&self) -> Option<Arc<dyn Shards>> {
        self.0.as_ref().and_then(|part| part.shards())
    }

    /// Leaves the group, once all others leave it.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank) naming a rank that is lost.
    pub fn leave(&self) -> Result<()> {
        self.0.as_ref().map_or(Ok(()), |part| part.leave())
    }

    /// Waits until rank 0, which has work to finish, has ended, or has ended this process, but no longer than `limit` after
    /// rank 0 has said last that it is busy, or after now.
    pub fn outlast_root(&self, limit: Duration) {
        if let Some(part) = &self.0 {
            part.outlast_root(limit);
        }
    }

    /// Ends all processes of the group, with this exit code where it can be given, once this one ends.
    pub fn abort(&self, code: u8) {
        if let Some(part) = &self.0 {
            part.abort(code);
        }
    }
}
