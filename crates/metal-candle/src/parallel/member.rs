//! This process as a member of the group that a launcher has started.

use super::Group;
use super::launcher::launched;
use crate::Result;
use std::time::Duration;

/// This process's part in a group. It is joined once, by the thread that trains, and lasts as long as the process.
#[derive(Debug, Default)]
pub struct Member {
    #[cfg(feature = "mpi")]
    mpi: Option<super::mpi::Mpi>,
}

impl Member {
    /// Joins the group that a launcher has started, or is alone where there is none. No rank waits longer than `limit`
    /// for another.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) when the launcher's processes can't train together in this build.
    pub fn join(limit: Duration) -> Result<Self> {
        let Some(launched) = launched() else { return Ok(Self::default()) };
        launched.check()?;
        #[cfg(feature = "mpi")]
        return Ok(Self { mpi: Some(super::mpi::Mpi::join(&launched, limit)?) });
        #[cfg(not(feature = "mpi"))]
        {
            let _ = limit;
            Ok(Self::default())
        }
    }

    /// The group.
    pub fn group(&self) -> Group<'_> {
        #[cfg(feature = "mpi")]
        if let Some(mpi) = &self.mpi {
            return Group::new(mpi);
        }
        Group::default()
    }

    /// Leaves the group, once all others leave it.
    ///
    /// # Errors
    /// [`Error::Rank`](crate::Error::Rank) naming a rank that is lost.
    pub fn leave(&self) -> Result<()> {
        #[cfg(feature = "mpi")]
        if let Some(mpi) = &self.mpi {
            return mpi.leave();
        }
        Ok(())
    }

    /// Ends all processes of the group with this exit code, where there are others.
    pub fn abort(&self, code: u8) {
        #[cfg(feature = "mpi")]
        if let Some(mpi) = &self.mpi {
            mpi.abort(code);
        }
        #[cfg(not(feature = "mpi"))]
        let _ = code;
    }
}
