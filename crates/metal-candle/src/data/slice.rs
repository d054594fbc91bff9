//! A part of a split's records, as Hugging Face's `datasets` writes it.

use std::fmt;
use std::ops::Range;

use crate::{Error, Result};

/// Records from one to another: `[:1000]`, `[500:]`, `[-100:]`, `[10%:20%]`. A negative number counts from the end.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Slice {
    from: Option<Bound>,
    to: Option<Bound>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Bound {
    number: i64,
    percent: bool,
}

impl Slice {
    /// The name of a split and the part of it that `text` asks for: `train`, or `train[:80%]`. `option` is what
    /// messages call it.
    ///
    /// # Errors
    /// [`Error::Option`] for brackets that hold something else.
    pub fn parse<'a>(option: &str, text: &'a str) -> Result<(&'a str, Option<Self>)> {
        let wrong = |expected: &str| {
            let written: String = text.chars().take(80).collect();
            Error::option(option, format!("is {written}, expected {expected}"))
        };
        if text.contains('+') {
            return Err(wrong("one split; several in one are not supported"));
        }
        let Some((name, rest)) = text.split_once('[') else { return Ok((text, None)) };
        let bounds = rest.strip_suffix(']').and_then(|rest| rest.split_once(':'));
        let (Some((from, to)), false) = (bounds, name.is_empty()) else {
            return Err(wrong("a split and a part of it, as in train[:1000] or train[-10%:]"));
        };
        let bound = |text: &str| match text {
            "" => Ok(None),
            _ => Bound::parse(text).map(Some).ok_or_else(|| {
                wrong("records, or whole percents of them up to 100, around the colon")
            }),
        };
        Ok((name, Some(Self { from: bound(from)?, to: bound(to)? })))
    }

    /// Whether the number of records decides which ones it holds.
    pub(super) fn needs_count(self) -> bool {
        [self.from, self.to].into_iter().flatten().any(|bound| bound.percent || bound.number < 0)
    }

    /// Which of `count` records.
    pub(super) fn range(self, count: usize) -> Range<usize> {
        let from = self.from.map_or(0, |bound| bound.of(count));
        let to = self.to.map_or(count, |bound| bound.of(count));
        from..to.max(from)
    }
}

impl Bound {
    fn parse(text: &str) -> Option<Self> {
        let (number, percent) = match text.strip_suffix('%') {
            Some(number) => (number, true),
            None => (text, false),
        };
        // `datasets` allows `_` between digits.
        let number: i64 = number.replace('_', "").parse().ok()?;
        (!percent || number.abs() <= 100).then_some(Self { number, percent })
    }

    fn of(self, count: usize) -> usize {
        let number = match self.percent {
            // As Python rounds, which `datasets` does here.
            true => (self.number as f64 * count as f64 / 100.0).round_ties_even() as i64,
            false => self.number,
        };
        let place = usize::try_from(number.unsigned_abs()).unwrap_or(usize::MAX);
        if number < 0 { count.saturating_sub(place) } else { place.min(count) }
    }
}

impl fmt::Display for Slice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bound = |bound: Option<Bound>| match bound {
            None => String::new(),
            Some(Bound { number, percent }) => {
                format!("{number}{}", if percent { "%" } else { "" })
            }
        };
        write!(f, "[{}:{}]", bound(self.from), bound(self.to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_those_of_datasets() {
        let range = |text: &str, count| {
            let (name, slice) = Slice::parse("split", text).unwrap();
            assert_eq!(name, "train");
            slice.unwrap().range(count)
        };
        for (text, count, expected) in [
            ("train[:1000]", 3000, 0..1000),
            ("train[:1_000]", 300, 0..300),
            ("train[-100:]", 3000, 2900..3000),
            ("train[-100:]", 30, 0..30),
            ("train[:80%]", 15, 0..12),
            ("train[-10%:]", 15, 13..15),
            ("train[10:20]", 15, 10..15),
            ("train[20:10]", 30, 20..20),
            ("train[25%:75%]", 10, 2..8),
            ("train[:]", 7, 0..7),
        ] {
            assert_eq!(range(text, count), expected, "{text} of {count}");
        }
        assert_eq!(Slice::parse("split", "train_sft").unwrap(), ("train_sft", None));
        assert!(!Slice::parse("split", "train[5:9]").unwrap().1.unwrap().needs_count());
        for text in ["train[-5:]", "train[:5%]"] {
            let slice = Slice::parse("split", text).unwrap().1.unwrap();
            assert!(slice.needs_count());
            assert_eq!(format!("train{slice}"), text);
        }
        for text in
            ["train[", "train[5]", "train[a:]", "[:5]", "train[:101%]", "train+test", "train[:5]x"]
        {
            let message = Slice::parse("split", text).unwrap_err().to_string();
            assert!(message.starts_with(&format!("split: is {text}, expected")), "{message}");
        }
    }
}
