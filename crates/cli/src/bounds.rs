//! How large numbers may be. What is beyond is a slip of the hand that would otherwise show in a machine
//! without memory, or in a run that never ends.

use crate::errors::usage;
use metal_candle::train::MAX_STEPS;
use std::fmt::Display;
use std::ops::RangeInclusive;

/// More than any machine has processors.
pub const THREADS: RangeInclusive<usize> = 1..=1024;
/// Rows of a batch.
pub const BATCH_SIZE: RangeInclusive<usize> = 1..=65_536;
/// Batches of a step.
pub const ACCUMULATION: RangeInclusive<usize> = 1..=1_000_000;
/// Tokens of a text; no model was made for more.
pub const TOKENS: RangeInclusive<usize> = 1..=16_777_216;
/// An adapter's rank; no layer has more features.
pub const RANK: RangeInclusive<usize> = 1..=1_048_576;
/// Checkpoints that are kept.
pub const KEPT: RangeInclusive<usize> = 1..=1_000_000;
/// Timed calls of a benchmark.
pub const CALLS: RangeInclusive<usize> = 1..=1_000_000;
/// Steps between two things, where 0 is never.
pub const EVERY: RangeInclusive<u64> = 0..=MAX_STEPS;
/// Numbers of steps.
pub const STEPS: RangeInclusive<u64> = 1..=MAX_STEPS;

/// That a number is within its bounds.
pub fn check<T: PartialOrd + Display>(
    key: &str,
    value: T,
    bounds: &RangeInclusive<T>,
) -> anyhow::Result<()> {
    if value < *bounds.start() {
        Err(usage(format!("{key}: is {value}, expected at least {}", bounds.start())))
    } else if value > *bounds.end() {
        Err(usage(format!("{key}: is {value}, expected at most {}", bounds.end())))
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounds_themselves_are_allowed() {
        for value in [1, 7, 1024] {
            check("threads", value, &THREADS).unwrap();
        }
        let error = |value| check("threads", value, &THREADS).unwrap_err().to_string();
        assert_eq!(error(0), "threads: is 0, expected at least 1");
        assert_eq!(error(1025), "threads: is 1025, expected at most 1024");
    }
}
