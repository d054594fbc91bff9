//! Data to learn from: records, their tokens and loss masks, and batches.
//!
//! The way is [`DataFiles`] → [`DataSource`] → [`tokenize`] → [`Tokenized`] → [`Dataset`] → [`Batcher`] → [`Batch`], or
//! for records in memory [`read_records`] → [`Dataset::build`]. [`survey`] says what data are without learning from
//! them.

mod batch;
mod body;
mod columns;
mod dataset;
mod files;
mod format;
mod record;
mod rows;
mod slice;
mod source;
mod store;
mod survey;
mod teacher;
mod tokenize;

pub(crate) use batch::Asked;
pub use batch::{
    Answer, Batch, BatchOptions, BatchPlan, Batcher, Distributions, IGNORED, Role, SharedBeginnings,
};
pub use body::Body;
pub use columns::{Columns, Source, Template};
pub use dataset::{DataOptions, Dataset, Example, LossOn, Report, Sample, SampleKind, Tokenized};
pub use files::{DataFiles, HeldOut, Split};
pub use record::{KNOWN_ROLES, Origin, Record, Shape, read_first_records, read_records};
pub use slice::Slice;
pub use source::DataSource;
pub use survey::{
    Described, Lengths, Piece, Reading, Shown, Survey, TokenCounts, describe, survey,
};
pub(crate) use teacher::TeacherWriter;
pub use teacher::{TOP_K, Teacher};
pub use tokenize::tokenize;
