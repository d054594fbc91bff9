//! How large options may be. What is beyond is a slip of the hand that would otherwise show in a machine without
//! memory, or in a run that never ends.

use crate::train::MAX_STEPS;
use crate::{Error, Result};
use std::fmt::Display;
use std::ops::RangeInclusive;

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
/// Numbers of batches.
pub const BATCHES: RangeInclusive<usize> = 1..=usize::MAX;
/// Steps between two things, where 0 is never.
pub const EVERY: RangeInclusive<u64> = 0..=MAX_STEPS;
/// Numbers of steps.
pub const STEPS: RangeInclusive<u64> = 1..=MAX_STEPS;

/// The most passes over the data.
pub(crate) const EPOCHS: f64 = 1e6;
/// The largest alpha.
pub(crate) const ALPHA: f64 = 1e9;
/// The largest learning rate, weight decay or epsilon.
pub(crate) const RATE: f64 = 1e3;
/// The largest norm that gradients are clipped to.
pub(crate) const NORM: f64 = 1e12;
/// The most of one learning rate beside another.
pub(crate) const RATIO: f64 = 1e6;

/// The most that an objective's numbers may be.
pub(crate) const BETA: f64 = 1e6;

/// That a number is within its bounds.
///
/// # Errors
/// [`Error::Option`] about `option`.
pub fn check<T: PartialOrd + Display>(
    option: &str,
    value: T,
    bounds: &RangeInclusive<T>,
) -> Result<()> {
    if value < *bounds.start() {
        Err(Error::option(option, format!("is {value}, expected at least {}", bounds.start())))
    } else if value > *bounds.end() {
        Err(Error::option(option, format!("is {value}, expected at most {}", bounds.end())))
    } else {
        Ok(())
    }
}

/// That a number is above 0, and no more than `most`.
pub(crate) fn positive(option: &str, value: f64, most: f64) -> Result<()> {
    if !(value.is_finite() && value > 0.0) {
        return Err(Error::option(option, format!("is {value}, expected a positive number")));
    }
    at_most(option, value, most)
}

/// That a number is 0 or above, and no more than `most`.
pub(crate) fn not_negative(option: &str, value: f64, most: f64) -> Result<()> {
    if !(value.is_finite() && value >= 0.0) {
        return Err(Error::option(option, format!("is {value}, expected a number of at least 0")));
    }
    at_most(option, value, most)
}

/// That a number is 0 or above, and below 1.
pub(crate) fn share<T>(option: &str, value: T) -> Result<()>
where
    T: PartialOrd + Display + From<u8>,
{
    if !(T::from(0)..T::from(1)).contains(&value) {
        return Err(Error::option(option, format!("is {value}, expected at least 0 and below 1")));
    }
    Ok(())
}

fn at_most(option: &str, value: f64, most: f64) -> Result<()> {
    if value > most {
        return Err(Error::option(option, format!("is {value}, expected at most {most}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bounds_themselves_are_allowed() {
        for value in [1, 7, 65_536] {
            check("batch_size", value, &BATCH_SIZE).unwrap();
        }
        let error = |value| check("batch_size", value, &BATCH_SIZE).unwrap_err().to_string();
        assert_eq!(error(0), "batch_size: is 0, expected at least 1");
        assert_eq!(error(65_537), "batch_size: is 65537, expected at most 65536");
        positive("alpha", 2.0, 2.0).unwrap();
        not_negative("weight_decay", 0.0, 2.0).unwrap();
        share("dropout", 0.0).unwrap();
        let told = |result: Result<()>| result.unwrap_err().to_string();
        assert_eq!(told(positive("alpha", 2.5, 2.0)), "alpha: is 2.5, expected at most 2");
        for wrong in [f64::NAN, f64::INFINITY, -1.0] {
            assert!(told(positive("alpha", wrong, 2.0)).ends_with("expected a positive number"));
            assert!(told(not_negative("alpha", wrong, 2.0)).contains("at least 0"));
            assert!(told(share("dropout", wrong)).ends_with("at least 0 and below 1"));
        }
        assert!(positive("alpha", 0.0, 2.0).is_err() && share("dropout", 1.0).is_err());
    }
}
