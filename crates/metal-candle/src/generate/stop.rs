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
    // Which of `stops` has ended the text.
    found: Option<usize>,
}

impl StopStrings {
    /// Stops at any of `stops`; with none, all text passes.
    ///
    /// # Errors
    /// [`Error::Option`] for an empty stop string, which would end every text before it begins.
    pub fn new(stops: impl IntoIterator<Item = impl Into<String>>) -> Result<Self> {
        let stops: Vec<String> = stops.into_iter().map(Into::into).collect();
        if stops.iter().any(String::is_empty) {
            return Err(Error::option(
                "stop",
                "an empty text would end every text before it begins",
            ));
        }
        Ok(Self { stops, held: String::new(), found: None })
    }

    /// Takes the next piece of text and gives what can be shown now. After a stop nothing comes.
    pub fn push(&mut self, piece: &str) -> StopResult {
        if self.stopped() {
            return StopResult { emit: String::new(), stopped: true };
        }
        let seen = self.held.len();
        self.held.push_str(piece);
        if let Some((start, stop)) = self.first_stop(seen) {
            self.held.truncate(start);
            self.found = Some(stop);
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
        self.found.is_some()
    }

    /// Which of the stop strings has been found, by its place among them.
    pub fn found(&self) -> Option<usize> {
        self.found
    }

    /// Where the stop string begins that is complete first, looking at ends after byte `seen`, and which it is.
    fn first_stop(&self, seen: usize) -> Option<(usize, usize)> {
        let text = self.held.as_bytes();
        (seen + 1..=text.len()).find_map(|end| {
            let ended = |(_, stop): &(usize, &String)| text[..end].ends_with(stop.as_bytes());
            let ended = self.stops.iter().enumerate().filter(ended);
            ended.map(|(index, stop)| (end - stop.len(), index)).min()
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

#[cfg(test)]
mod tests {
    use super::*;

    /// What was shown of all `pieces`, and whether it stopped.
    fn run(stops: &[&str], pieces: &[&str]) -> (String, bool) {
        let mut stream = StopStrings::new(stops.iter().copied()).expect("valid");
        let mut shown = String::new();
        for piece in pieces {
            let result = stream.push(piece);
            shown.push_str(&result.emit);
            assert_eq!(result.stopped, stream.stopped());
        }
        let stopped = stream.stopped();
        shown.push_str(&stream.finish());
        (shown, stopped)
    }

    #[test]
    fn text_ends_before_the_stop_that_is_complete_first() {
        for (stops, pieces, shown, stopped) in [
            (&["</s>"][..], &["a</", "s", ">b"][..], "a", true),
            (&["</s>"], &["a</", "s"], "a</s", false),
            (&["\n\n"], &["a\n", "b\n", "\nc"], "a\nb", true),
            (&["aab"], &["a", "a", "a", "b"], "a", true),
            (&["abab", "x"], &["ab", "ax"], "aba", true),
            (&["abcd", "bc"], &["abcd"], "a", true),
            (&["bc", "abc"], &["zabcd"], "z", true),
            (&["END", "E"], &["the END"], "the ", true),
            (&["é\u{1f600}"], &["caf", "é", "\u{1f600}!"], "caf", true),
            (&["é\u{1f600}"], &["caf", "é", "\u{1f601}"], "café\u{1f601}", false),
            (&["stop"], &["stop"], "", true),
            (&[], &["any", "thing"], "anything", false),
        ] {
            assert_eq!(run(stops, pieces), (shown.to_owned(), stopped), "{stops:?} {pieces:?}");
        }
    }

    #[test]
    fn the_stop_that_ended_the_text_is_told() {
        for (stops, text, found) in [
            (&["x", "</s>"][..], "a</s>x", Some(1)),
            (&["bc", "abc"], "zabcd", Some(1)),
            (&["abcd", "bc"], "abcd", Some(1)),
            (&["E", "E"], "the END", Some(0)),
            (&["y", "z"], "abc", None),
        ] {
            let mut stream = StopStrings::new(stops.iter().copied()).expect("valid");
            for letter in text.chars() {
                stream.push(&letter.to_string());
            }
            assert_eq!(stream.found(), found, "{stops:?} {text}");
        }
    }

    #[test]
    fn nothing_comes_after_the_stop() {
        let mut stream = StopStrings::new(["."]).expect("valid");
        assert_eq!(stream.push("a.b"), StopResult { emit: "a".into(), stopped: true });
        assert_eq!(stream.push("c."), StopResult { emit: String::new(), stopped: true });
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn an_empty_stop_string_is_an_error() {
        let error = StopStrings::new(["a", ""]).expect_err("empty").to_string();
        assert!(error.starts_with("stop: "), "{error}");
    }

    /// A stop ends at the earliest byte; of those that end there, the longest counts.
    fn naive(stops: &[String], text: &str) -> Option<usize> {
        let mut found: Vec<(usize, usize)> = Vec::new();
        for stop in stops {
            for (start, _) in text.char_indices() {
                if text[start..].starts_with(stop.as_str()) {
                    found.push((start + stop.len(), start));
                }
            }
        }
        found.into_iter().min().map(|(_, start)| start)
    }

    #[test]
    fn any_split_gives_what_a_search_of_the_whole_text_gives() {
        let mut state = 1u64;
        let mut below = |n: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        // é and è share their first byte, so a search by bytes alone would be caught.
        let letters = ["a", "b", "é", "è", "\u{1f600}"];
        let (mut stops_found, mut held_back) = (0, 0);
        for _ in 0..20_000 {
            let mut word = |least: usize, most: usize| -> String {
                let length = least + below(most - least + 1);
                (0..length).map(|_| letters[below(letters.len())]).collect()
            };
            let text = word(0, 16);
            let stops: Vec<String> =
                (0..text.len() % 4).map(|_| word(1, 4)).filter(|stop| !stop.is_empty()).collect();
            let mut stream = StopStrings::new(stops.clone()).expect("valid");
            let mut shown = String::new();
            let mut rest = text.as_str();
            while !rest.is_empty() && !stream.stopped() {
                let count = 1 + below(4);
                let cut = rest.char_indices().nth(count).map_or(rest.len(), |(index, _)| index);
                let (piece, after) = rest.split_at(cut);
                rest = after;
                shown.push_str(&stream.push(piece).emit);
                if !stream.stopped() {
                    // What is held back is the beginning of a stop string, and nothing else is.
                    let held = &text[shown.len()..text.len() - rest.len()];
                    assert_eq!(held, stream.held);
                    let begins = |stop: &String| stop.len() > held.len() && stop.starts_with(held);
                    assert!(held.is_empty() || stops.iter().any(begins), "{stops:?} {held}");
                    held_back += usize::from(!held.is_empty());
                }
            }
            let expected = naive(&stops, &text);
            assert_eq!(stream.stopped(), expected.is_some(), "{stops:?} {text}");
            shown.push_str(&stream.finish());
            assert_eq!(shown, text[..expected.unwrap_or(text.len())], "{stops:?} {text}");
            stops_found += usize::from(expected.is_some());
        }
        assert!(stops_found > 2000 && held_back > 2000, "{stops_found} {held_back}");
    }
}
