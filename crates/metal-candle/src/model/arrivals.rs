//! What comes to the device a piece at a time: one is here, and the next comes while it is used.

use crate::Result;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How pieces come.
pub(crate) trait Transfers {
    /// Which piece.
    type Piece: Copy + PartialEq;
    /// What is still written to.
    type Coming;
    /// What it becomes.
    type Here;

    /// Begins to bring a piece.
    fn begin(&self, piece: Self::Piece) -> Result<Self::Coming>;

    /// Waits for it.
    fn end(&self) -> Result<()>;

    /// What has come.
    fn unpack(&self, piece: Self::Piece, came: Self::Coming) -> Result<Self::Here>;
}

/// The pieces of one source.
pub(crate) struct Arrivals<T: Transfers> {
    pub transfers: T,
    visit: Mutex<Visit<T>>,
}

/// What is on the device, and what is on its way there.
struct Visit<T: Transfers> {
    here: Option<(T::Piece, Arc<T::Here>)>,
    coming: Option<(T::Piece, T::Coming)>,
}

impl<T: Transfers> Arrivals<T> {
    pub fn new(transfers: T) -> Self {
        Self { transfers, visit: Mutex::new(Visit { here: None, coming: None }) }
    }

    /// A piece, on the device; `next` begins to come.
    pub fn bring(&self, piece: T::Piece, next: Option<T::Piece>) -> Result<Arc<T::Here>> {
        let mut visit = self.visit();
        let here = match &visit.here {
            Some((found, here)) if *found == piece => here.clone(),
            _ => {
                // It makes room.
                visit.here = None;
                self.send_for(&mut visit, piece)?;
                let came = self.settle(&mut visit)?;
                let missing = || candle_core::Error::msg("what was sent for didn't come");
                let here = Arc::new(self.transfers.unpack(piece, came.ok_or_else(missing)?)?);
                visit.here = Some((piece, here.clone()));
                here
            }
        };
        if let Some(next) = next {
            self.send_for(&mut visit, next)?;
        }
        Ok(here)
    }

    fn visit(&self) -> MutexGuard<'_, Visit<T>> {
        self.visit.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins to bring a piece, unless it is on its way.
    fn send_for(&self, visit: &mut Visit<T>, piece: T::Piece) -> Result<()> {
        if visit.coming.as_ref().is_none_or(|(coming, _)| *coming != piece) {
            self.settle(visit)?;
            visit.coming = Some((piece, self.transfers.begin(piece)?));
        }
        Ok(())
    }

    /// Waits for what is on its way.
    fn settle(&self, visit: &mut Visit<T>) -> Result<Option<T::Coming>> {
        // What is still written to stays where it is if this fails.
        if visit.coming.is_some() {
            self.transfers.end()?;
        }
        Ok(visit.coming.take().map(|(_, came)| came))
    }
}

impl<T: Transfers> Drop for Arrivals<T> {
    fn drop(&mut self) {
        let mut visit = self.visit();
        if self.settle(&mut visit).is_err() {
            // Somebody may still write there.
            std::mem::forget(visit.coming.take());
        }
    }
}

impl<T: Transfers + fmt::Debug> fmt::Debug for Arrivals<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter
            .debug_struct("Arrivals")
            .field("transfers", &self.transfers)
            .finish_non_exhaustive()
    }
}
