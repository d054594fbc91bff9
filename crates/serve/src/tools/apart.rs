//! A model's text outside of the server, with its thoughts apart from its answer.

use super::formats::Thinking;
use super::markers::{Markers, find_markers};
use super::parser::{Parser, Part};
use metal_candle::Result;
use metal_candle::generate::Piece;
use metal_candle::text::Tokenizer;
use std::sync::Arc;

/// Takes a text apart that consists of messages with headers, as gpt-oss writes it: decoded, its headers run into its
/// thoughts and its answer.
#[derive(Debug)]
pub struct Apart<'t> {
    markers: Markers<&'t Tokenizer>,
    parser: Parser,
}

/// What a text says.
#[derive(Debug, Clone, PartialEq)]
pub enum Said {
    /// Of what the model thinks.
    Thought(String),
    /// Of its answer.
    Answer(String),
}

impl<'t> Apart<'t> {
    /// For a text of a model with this tokenizer; `None` if its chat template shows that texts have no such messages.
    /// `holds_back` says whether there are stop strings.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn of(tokenizer: &'t Tokenizer, holds_back: bool) -> Result<Option<Self>> {
        let thinking = tokenizer.chat_template().and_then(Thinking::of);
        let Some(thinking) = thinking.filter(|it| it.is_in_messages()) else { return Ok(None) };
        let markers = find_markers(tokenizer, thinking.markers().into_iter())?;
        let markers = Markers::new(tokenizer, markers, holds_back);
        let parser = Parser::new(None, Some(thinking), false, Arc::default(), false);
        Ok(Some(Self { markers, parser }))
    }

    /// What a piece of the text adds.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn push(&mut self, piece: Piece) -> Result<Vec<Said>> {
        Ok(said(self.parser.push(&self.markers.restore(piece)?)))
    }

    /// What was held back, at the end of the text.
    pub fn finish(&mut self) -> Vec<Said> {
        said(self.parser.finish())
    }
}

fn said(parts: Vec<Part>) -> Vec<Said> {
    let said = parts.into_iter().map(|part| match part {
        Part::Reasoning(text) => Said::Thought(text),
        Part::Text(text) => Said::Answer(text),
        // There are no tools.
        Part::Call(call) => Said::Answer(call.arguments),
    });
    said.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::example;
    use crate::tools::harmony::MARKERS;

    #[test]
    fn thoughts_and_answers_of_special_tokens_are_told_apart() {
        let mut tokenizer = example::tokenizer(&MARKERS);
        assert!(Apart::of(&tokenizer, false).unwrap().is_none());
        tokenizer.set_chat_template("{{ '<|channel|>final<|message|>' }}").unwrap();
        let mut apart = Apart::of(&tokenizer, false).unwrap().unwrap();
        let mut stream = tokenizer.decode_stream();
        let (mut thoughts, mut answer) = (String::new(), String::new());
        let text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes, é.<|return|>";
        let mut said = Vec::new();
        for token in tokenizer.encode(text, false).unwrap() {
            let text = stream.push(token).unwrap().unwrap_or_default();
            let piece = Piece { text, token: Some(token), logprob: 0.0, likeliest: Vec::new() };
            said.extend(apart.push(piece).unwrap());
        }
        said.extend(apart.finish());
        for said in said {
            match said {
                Said::Thought(text) => thoughts += &text,
                Said::Answer(text) => answer += &text,
            }
        }
        assert_eq!((thoughts.as_str(), answer.as_str()), ("hm", "Yes, é."));
    }
}
