//! What tokens are called in lists of log-probabilities.

use crate::app::App;
use metal_candle::generate::Grammars;
use metal_candle::text::Tokenizer;
use std::fmt::Write as _;
use std::sync::Arc;

/// What stands for no probability at all, which JSON has no number for; OpenAI's word.
const LEAST: f64 = -9999.0;

/// Tells tokens by their texts.
#[derive(Debug, Clone)]
pub struct Words {
    grammars: Option<Arc<Grammars>>,
    tokenizer: Arc<Tokenizer>,
}

/// A token in a list of log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct Word {
    /// Its text, or its bytes where these are a part of a character.
    pub text: String,
    /// Its bytes, where they are known.
    pub bytes: Option<Vec<u8>>,
}

impl Words {
    /// Those of the server's model.
    pub fn of(app: &App) -> Self {
        Self { grammars: app.grammars.clone(), tokenizer: app.tokenizer.clone() }
    }

    /// The token's.
    pub fn word(&self, token: u32) -> Word {
        let bytes = self.grammars.as_ref().map(|grammars| grammars.token_bytes(token));
        if let Some(bytes) = bytes.filter(|bytes| !bytes.is_empty()) {
            return Word::of_bytes(bytes);
        }
        // A token's text by itself may lack the space that it begins with, and be no whole character.
        let text = self.tokenizer.decode(&[token], false).unwrap_or_default();
        let text = if text.is_empty() { format!("token_id:{token}") } else { text };
        Word { text, bytes: None }
    }
}

impl Word {
    /// How many characters it adds to a text. One whose bytes are of several tokens comes with the first of them.
    pub fn characters(&self) -> usize {
        match &self.bytes {
            None => self.text.chars().count(),
            Some(bytes) => bytes.iter().filter(|byte| *byte & 0xc0 != 0x80).count(),
        }
    }

    fn of_bytes(bytes: &[u8]) -> Self {
        let text = match std::str::from_utf8(bytes) {
            Ok(text) => text.to_string(),
            Err(_) => bytes.iter().fold("bytes:".into(), |mut text: String, byte| {
                // Writing to a string fails never.
                let _ = write!(text, "\\x{byte:02x}");
                text
            }),
        };
        Self { text, bytes: Some(bytes.to_vec()) }
    }
}

/// A log-probability as JSON can have it.
pub fn finite(logprob: f64) -> f64 {
    // Also for NaN, which is no number either.
    if logprob > LEAST { logprob } else { LEAST }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_characters_are_told_as_bytes() {
        let word = Word::of_bytes("é".as_bytes());
        assert_eq!((word.text.as_str(), word.bytes), ("é", Some(vec![0xc3, 0xa9])));
        assert_eq!(Word::of_bytes(&[0xc3]).text, "bytes:\\xc3");
        let parts = [&[0xc3][..], &[0xa9], b"a\xf0\x9f", &[0x98], &[0x80, b'b']];
        assert_eq!(parts.map(|part| Word::of_bytes(part).characters()), [1, 0, 2, 0, 1]);
        assert_eq!(finite(f64::NEG_INFINITY), -9999.0);
        assert_eq!(finite(f64::NAN), -9999.0);
        assert_eq!(finite(-0.5), -0.5);
    }
}
