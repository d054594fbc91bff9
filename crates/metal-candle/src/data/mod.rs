//! Data to learn from: records, their tokens and loss masks, and batches.
//!
//! The way is [`read_records`] (or [`DataFolder`]) → [`Dataset::build`] → [`Batcher`] → [`Batch`].

mod batch;
mod dataset;
mod folder;
mod record;

pub use batch::{Batch, BatchOptions, BatchPlan, Batcher, IGNORED};
pub use dataset::{DataOptions, Dataset, Example, LossOn, Report};
pub use folder::{DataFolder, HeldOut};
pub use record::{Body, KNOWN_ROLES, Origin, Record, read_records};
