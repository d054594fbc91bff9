//! What a model thinks before its answer, in a text that is shown or kept.

use metal_candle::Result;
use metal_candle::generate::{GenerateOptions, Piece};
use metal_candle::text::Tokenizer;
use metal_candle_serve::{Apart, Said};

/// Puts thoughts between tags, as most models write theirs.
#[derive(Debug, Default)]
pub struct Tags {
    /// Whether what came last is thoughts, whose end isn't written yet.
    thinks: bool,
    has_answer: bool,
}

impl Tags {
    /// What is written of a piece.
    pub fn around(&mut self, said: &Said) -> String {
        match said {
            Said::Thought(text) | Said::Answer(text) if text.is_empty() => String::new(),
            Said::Thought(text) if self.thinks => text.clone(),
            Said::Thought(text) => {
                self.thinks = true;
                let before = if self.has_answer { "\n\n" } else { "" };
                format!("{before}<think>\n{text}")
            }
            Said::Answer(text) => {
                self.has_answer = true;
                let before = if std::mem::take(&mut self.thinks) { "\n</think>\n\n" } else { "" };
                format!("{before}{text}")
            }
        }
    }
}

/// A text on its way: as it is decoded, or of a model whose texts are messages (gpt-oss) without their headers, with thoughts
/// between tags.
#[derive(Debug)]
pub struct Text<'t> {
    apart: Option<Apart<'t>>,
    tags: Tags,
}

impl<'t> Text<'t> {
    /// One that is written with these options; what continues its prompt is left as it is.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn new(tokenizer: &'t Tokenizer, options: &GenerateOptions) -> Result<Self> {
        let apart = match options.continues_prompt {
            true => None,
            false => Apart::of(tokenizer, !options.stop.is_empty())?,
        };
        Ok(Self { apart, tags: Tags::default() })
    }

    /// What is written of an answer's tokens.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn of_tokens(tokenizer: &Tokenizer, tokens: &[u32]) -> Result<String> {
        let mut text = Text::new(tokenizer, &GenerateOptions::default())?;
        if text.apart.is_none() {
            return tokenizer.decode(tokens, true);
        }
        let mut stream = tokenizer.decode_stream();
        let mut written = String::new();
        let mut push = |token: Option<u32>, more: Option<String>| -> Result<()> {
            let text_of_piece = more.unwrap_or_default();
            let piece = Piece { text: text_of_piece, token, logprob: 0.0, likeliest: Vec::new() };
            written += &text.push(piece)?;
            Ok(())
        };
        for token in tokens {
            push(Some(*token), stream.push(*token)?)?;
        }
        push(None, stream.finish()?)?;
        Ok(written + &text.finish())
    }

    /// What is written of a piece.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn push(&mut self, piece: Piece) -> Result<String> {
        let Some(apart) = &mut self.apart else { return Ok(piece.text) };
        let said = apart.push(piece)?;
        Ok(said.iter().map(|said| self.tags.around(said)).collect())
    }

    /// What was held back, at the end.
    pub fn finish(&mut self) -> String {
        let said = self.apart.as_mut().map(Apart::finish).unwrap_or_default();
        said.iter().map(|said| self.tags.around(said)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use metal_candle::text::TokenizerFiles;
    use std::path::Path;

    #[test]
    fn thoughts_stand_between_tags() {
        let mut tags = Tags::default();
        let said = [
            Said::Thought("h".into()),
            Said::Answer(String::new()),
            Said::Thought("m".into()),
            Said::Answer("Yes".into()),
            Said::Answer(".".into()),
            Said::Thought("so".into()),
            Said::Answer("No.".into()),
        ];
        let written: String = said.iter().map(|said| tags.around(said)).collect();
        let expected = "<think>\nhm\n</think>\n\nYes.\n\n<think>\nso\n</think>\n\nNo.";
        assert_eq!(written, expected);
    }

    #[test]
    fn headers_of_messages_are_left_out_of_answers_alone() {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/demo/base"));
        let files = TokenizerFiles::read(folder).unwrap();
        let mut tokenizer = Tokenizer::from_files(folder, &files).unwrap();
        tokenizer.set_chat_template("{{ '<|channel|>final<|message|>' }}").unwrap();
        let source = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.";
        let written = |mut text: Text| {
            let pieces = source.split_inclusive('>').map(|text| Piece {
                text: text.into(),
                token: None,
                logprob: 0.0,
                likeliest: Vec::new(),
            });
            let mut written: String = pieces.map(|piece| text.push(piece).unwrap()).collect();
            written += &text.finish();
            written
        };
        let text = |continues_prompt| {
            let options = GenerateOptions { continues_prompt, ..GenerateOptions::default() };
            Text::new(&tokenizer, &options).unwrap()
        };
        assert_eq!(written(text(false)), "<think>\nhm\n</think>\n\nYes.");
        assert_eq!(written(text(true)), source);
    }
}
