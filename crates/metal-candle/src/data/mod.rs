//! Data to learn from: records, their tokens and loss masks, and batches.
//!
//! The way is [`DataFiles`] → [`tokenize`] → [`Tokenized`] → [`Dataset`] → [`Batcher`] → [`Batch`], or for records in
//! memory [`read_records`] → [`Dataset::build`].

mod batch;
mod columns;
mod dataset;
mod files;
mod format;
mod record;
mod rows;
mod store;
mod tokenize;

pub use batch::{Batch, BatchOptions, BatchPlan, Batcher, IGNORED};
pub use columns::{Columns, Source, Template};
pub use dataset::{DataOptions, Dataset, Example, LossOn, Report, Tokenized};
pub use files::{DataFiles, HeldOut, Split};
pub use record::{Body, KNOWN_ROLES, Origin, Record, Shape, read_records};
pub use tokenize::{DataSource, tokenize};
