//! How large numbers may be: the library's bounds, and those of what only the command is told.

use crate::errors::usage;
pub use metal_candle::bounds::{BATCH_SIZE, RANK, TOKENS};
use std::fmt::Display;
use std::ops::RangeInclusive;

/// More than any machine has processors.
pub const THREADS: RangeInclusive<usize> = 1..=1024;
/// Timed calls of a benchmark.
pub const CALLS: RangeInclusive<usize> = 1..=1_000_000;

/// That a number is within its bounds.
pub fn check<T: PartialOrd + Display>(
    key: &str,
    value: T,
    bounds: &RangeInclusive<T>,
) -> anyhow::Result<()> {
    metal_candle::bounds::check(key, value, bounds).map_err(usage)
}
