//! Decoding tokens one at a time without ever splitting a character.
//!
//! A token can hold part of a UTF-8 character, and how a token decodes can depend on its neighbours (a leading space
//! that only the first token drops). So each step decodes a short window that begins with the tokens of the previous
//! piece, and gives what is new in it, up to an unfinished character at its end.

use super::Tokenizer;
use crate::Result;

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

    /// Adds a token; gives the text that is certain now, or `None` while there is none.
    ///
    /// # Errors
    /// The tokenizer cannot decode the token.
    pub fn push(&mut self, id: u32) -> Result<Option<String>> {
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
        let Some(piece) =
            certain.get(self.given.len()..).filter(|piece| !piece.is_empty()).map(str::to_string)
        else {
            return Ok(None);
        };
        if certain.len() == text.len() {
            self.window.drain(..self.given_tokens.min(self.window.len()));
            self.given_tokens = self.window.len();
            self.given = self.tokenizer.decode(&self.window, self.skip_special)?;
            self.partly_given = 0;
        } else {
            self.given.push_str(&piece);
            self.partly_given += piece.len();
        }
        Ok(Some(piece))
    }
}
