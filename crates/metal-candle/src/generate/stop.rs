//! Stop strings over text that arrives in pieces.
//!
//! The stream ends where the first stop string is complete, and the text is what stands before it;
//! when several end at the same place, the longest counts. This does not depend on how the text was
//! cut into pieces. Held back is only the longest end of the text that may still become a stop
//! string, so everything else can be shown at once.

use crate::{Error, Result};

/// What to show after a piece of text.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopResult {
    /// Text that is certain not to belong to a stop string.
    pub emit: String,
    /// Whether a stop string is complete, now or earlier.
    pub stopped: bool,
}

/// Looks for stop strings in a stream of text.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<String>,
    // The end of the text so far that may be the beginning of a stop string.
    held: String,
    stopped: bool,
}

impl StopStrings {
    /// Stops at any of `stops`; with none, all text passes.
    ///
    /// # Errors
    /// [`Error::Option`] for an empty stop string, which would end every text before it begins.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> Result<Self> {
        let stops: Vec<String> = stops.into_iter().map(Into::into).collect();
        if stops.iter().any(String::is_empty) {
            return Err(Error::option("stop", "an empty string cannot be a stop string"));
        }
        Ok(Self { stops, held: String::new(), stopped: false })
    }

    /// Takes the next piece of text and gives what can be shown now. After a stop nothing comes.
    pub fn push(&mut self, piece: &str) -> StopResult {
        if self.stopped {
            return StopResult { emit: String::new(), stopped: true };
        }
        let seen = self.held.len();
        self.held.push_str(piece);
        if let Some(start) = self.first_stop(seen) {
            self.held.truncate(start);
            self.stopped = true;
            return StopResult { emit: std::mem::take(&mut self.held), stopped: true };
        }
        let keep = self.held.split_off(self.held.len() - self.possible_start());
        StopResult { emit: std::mem::replace(&mut self.held, keep), stopped: false }
    }

    /// The end of the stream: gives what was held back, since no stop string can follow.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Whether a stop string has been found.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Where the stop string begins that is complete first, looking at ends after byte `seen`.
    fn first_stop(&self, seen: usize) -> Option<usize> {
        let text = self.held.as_bytes();
        (seen + 1..=text.len()).find_map(|end| {
            let ended = self.stops.iter().filter(|stop| text[..end].ends_with(stop.as_bytes()));
            ended.map(|stop| end - stop.len()).min()
        })
    }

    /// The length in bytes of the longest end of the text that begins a stop string. Both are
    /// UTF-8, so it cannot begin or end inside a character.
    fn possible_start(&self) -> usize {
        let text = self.held.as_bytes();
        let longest = |stop: &String| {
            let stop = stop.as_bytes();
            (1..stop.len().min(text.len() + 1)).rev().find(|&n| text.ends_with(&stop[..n]))
        };
        self.stops.iter().filter_map(longest).max().unwrap_or(0)
    }
}
