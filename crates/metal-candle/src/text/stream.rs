//! Decoding tokens one at a time without ever splitting a character.
//!
//! A token can hold part of a UTF-8 character, and how a token decodes can depend on its neighbours (a leading space
//! that only the first token drops). So each step decodes a short window that begins with the tokens of the previous
//! piece, and gives what is new in it, up to an unfinished character at its end.

use super::Tokenizer;
use crate::Result;

/// Tokens of a window, at most, and how many of so long a one are kept: enough for a character that is unfinished.
const LONGEST_WINDOW: usize = 32;
const KEPT_TOKENS: usize = 16;

/// Text pieces of a growing sequence of tokens; see [`Tokenizer::decode_stream`].
///
/// The pieces, with the one from [`DecodeStream::finish`], add up to the decoding of all the tokens at once. The one
/// exception is a tokenizer with byte tokens given bytes that are not UTF-8: decoding all at once replaces the whole
/// run of bytes, also the good characters that the stream has already given.
#[derive(Debug)]
pub struct DecodeStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// The tokens of the previous piece, then those that are not fully given yet.
    window: Vec<u32>,
    /// How many tokens of the window are fully given.
    given_tokens: usize,
    /// What the window's decoding begins with and was given already.
    given: String,
    /// How much of `given` came from the tokens after `given_tokens`.
    partly_given: usize,
}

impl<'a> DecodeStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        Self {
            tokenizer,
            skip_special,
            window: Vec::new(),
            given_tokens: 0,
            given: String::new(),
            partly_given: 0,
        }
    }

    /// Of tokens that follow `prompt`: the window begins with so many of its last tokens that there is text before theirs.
    pub(super) fn after(
        tokenizer: &'a Tokenizer,
        skip_special: bool,
        prompt: &[u32],
    ) -> Result<Self> {
        let mut stream = Self::new(tokenizer, skip_special);
        let last = prompt.iter().rev().filter(|id| !tokenizer.leaves_out(**id, skip_special));
        for &id in last.take(KEPT_TOKENS) {
            stream.window.insert(0, id);
            stream.given = tokenizer.decode(&stream.window, skip_special)?;
            // A part of a character at the beginning could make bytes after it unreadable.
            if stream.given.starts_with(|first| first != char::REPLACEMENT_CHARACTER) {
                break;
            }
        }
        stream.given_tokens = stream.window.len();
        Ok(stream)
    }

    /// Adds a token; gives the text that is certain now, or `None` while there is none.
    ///
    /// # Errors
    /// The tokenizer cannot decode the token.
    pub fn push(&mut self, id: u32) -> Result<Option<String>> {
        // It would stay in the window, as no text comes of it that could end that.
        if self.tokenizer.leaves_out(id, self.skip_special) {
            return Ok(None);
        }
        self.window.push(id);
        self.advance(false)
    }

    /// Ends the sequence; gives what was held back, an unfinished character as U+FFFD.
    ///
    /// # Errors
    /// The tokenizer cannot decode the tokens.
    pub fn finish(mut self) -> Result<Option<String>> {
        self.advance(true)
    }

    fn advance(&mut self, last: bool) -> Result<Option<String>> {
        let mut text = self.tokenizer.decode(&self.window, self.skip_special)?;
        if !text.starts_with(&self.given) {
            // A bad byte changed how the good ones before it decode. They are given; go on with the tokens after them.
            let given_since = self.given.split_off(self.given.len() - self.partly_given);
            self.window.drain(..self.given_tokens.min(self.window.len()));
            self.given_tokens = 0;
            text = self.tokenizer.decode(&self.window, self.skip_special)?;
            self.given = if text.starts_with(&given_since) { given_since } else { String::new() };
            self.partly_given = self.given.len();
        }
        // U+FFFD at the end may be a character whose other bytes are still to come.
        let certain =
            if last { text.as_str() } else { text.trim_end_matches(char::REPLACEMENT_CHARACTER) };
        let mut piece = certain.get(self.given.len()..).unwrap_or_default().to_string();
        if !piece.is_empty() && certain.len() == text.len() {
            self.window.drain(..self.given_tokens.min(self.window.len()));
            self.given_tokens = self.window.len();
            self.given = self.tokenizer.decode(&self.window, self.skip_special)?;
            self.partly_given = 0;
        } else {
            self.given.push_str(&piece);
            self.partly_given += piece.len();
            if self.window.len() >= LONGEST_WINDOW {
                piece.push_str(&self.shorten(&text)?);
            }
        }
        Ok((!piece.is_empty()).then_some(piece))
    }

    /// Forgets all but the last tokens of a window that decodes to `text`, so that a run of tokens which end no character
    /// doesn't make each of them dearer than the one before. Gives what was held back of those that are forgotten.
    fn shorten(&mut self, text: &str) -> Result<String> {
        self.window.drain(..self.window.len().saturating_sub(KEPT_TOKENS));
        let kept = self.tokenizer.decode(&self.window, self.skip_special)?;
        let certain = kept.trim_end_matches(char::REPLACEMENT_CHARACTER);
        let end = text.len().saturating_sub(kept.len() - certain.len());
        let freed = text.get(self.given.len()..end).unwrap_or_default().to_string();
        self.given_tokens = 0;
        self.partly_given = certain.len();
        self.given = certain.to_string();
        Ok(freed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn tokenizer(name: &str) -> Tokenizer {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
        Tokenizer::load(&fixtures.join(name)).unwrap()
    }

    #[test]
    fn no_run_of_tokens_makes_the_next_dearer() {
        let (bytes, pieces) = (tokenizer("tokenizer"), tokenizer("tokenizer-sp"));
        let id = |tokenizer: &Tokenizer, token: &str| tokenizer.token_to_id(token).unwrap();
        for (tokenizer, first, repeated) in [
            // A special token, an id without a token, and a byte that begins no character.
            (&pieces, Vec::new(), id(&pieces, "</s>")),
            (&pieces, Vec::new(), 1_000_000),
            (&bytes, Vec::new(), 1_000_000),
            (&pieces, Vec::new(), id(&pieces, "<0xFF>")),
            // Tokens that end a character and begin the next: bytes D0, then B8 D0 for ever.
            (&bytes, vec![id(&bytes, "ĠÐ")], id(&bytes, "¸Ð")),
        ] {
            let end = tokenizer.encode("end", false).unwrap();
            let ids = [first, vec![repeated; 1000], end].concat();
            let mut stream = tokenizer.decode_stream();
            let mut text = String::new();
            for id in &ids {
                text.extend(stream.push(*id).unwrap());
                assert!(stream.window.len() <= LONGEST_WINDOW, "{repeated}: {text:?}");
            }
            text.extend(stream.finish().unwrap());
            assert_eq!(text, tokenizer.decode(&ids, true).unwrap(), "{repeated}");
        }
    }
}
