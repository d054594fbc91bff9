//! Where special tokens stood in a text that was decoded without them.
//!
//! The engine leaves special tokens out of the text, and families mark calls and thoughts with them. A token is told as
//! soon as it is drawn, its text perhaps later (a stop string may hold it back), so a marker's place is counted in bytes
//! of the text that was decoded before it.

use metal_candle::Result;
use metal_candle::generate::Piece;
use metal_candle::text::Tokenizer;
use std::collections::VecDeque;
use std::ops::Deref;
use std::sync::Arc;

/// Markers of one text that are put into it, at most; finding a place may take as long as decoding the text.
const MOST_PLACES: usize = 512;

/// Puts markers back into a text.
#[derive(Debug)]
pub struct Markers<T> {
    tokenizer: T,
    markers: Arc<[(u32, &'static str)]>,
    /// Whether text may be told later than its token.
    holds_back: bool,
    tokens: Vec<u32>,
    /// Bytes of the text that were told.
    told: usize,
    places: VecDeque<(usize, &'static str)>,
    found: usize,
}

/// Whether texts are decoded without this token.
///
/// # Errors
/// When the tokenizer fails.
pub fn is_left_out(tokenizer: &Tokenizer, token: u32) -> Result<bool> {
    Ok(tokenizer.decode(&[token], true)?.is_empty()
        && !tokenizer.decode(&[token], false)?.is_empty())
}

/// Those of `texts` that are special tokens.
///
/// # Errors
/// When the tokenizer fails.
pub fn find_markers(
    tokenizer: &Tokenizer,
    texts: impl Iterator<Item = &'static str>,
) -> Result<Arc<[(u32, &'static str)]>> {
    let mut markers = Vec::new();
    for text in texts {
        if let Some(token) = tokenizer.token_to_id(text)
            && is_left_out(tokenizer, token)?
        {
            markers.push((token, text));
        }
    }
    Ok(markers.into())
}

impl<T: Deref<Target = Tokenizer>> Markers<T> {
    /// For a text; `holds_back` says whether it has stop strings.
    pub fn new(tokenizer: T, markers: Arc<[(u32, &'static str)]>, holds_back: bool) -> Self {
        let (tokens, places) = (Vec::new(), VecDeque::new());
        Self { tokenizer, markers, holds_back, tokens, told: 0, places, found: 0 }
    }

    /// The text of a piece with the markers in it.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn restore(&mut self, piece: Piece) -> Result<String> {
        if self.markers.is_empty() {
            return Ok(piece.text);
        }
        if let Some(token) = piece.token {
            self.tokens.push(token);
            let marker = self.markers.iter().find(|(id, _)| *id == token);
            if let Some((_, marker)) = marker
                && self.found < MOST_PLACES
            {
                self.found += 1;
                let place = match self.holds_back {
                    true => self.tokenizer.decode(&self.tokens, true)?.len(),
                    false => self.told + piece.text.len(),
                };
                self.places.push_back((place, *marker));
            }
        }
        let mut text = String::with_capacity(piece.text.len());
        let mut rest = piece.text.as_str();
        while let Some((place, marker)) = self.places.front().copied() {
            let ahead = place.saturating_sub(self.told);
            if ahead > rest.len() {
                break;
            }
            let (before, after) = rest.split_at(rest.floor_char_boundary(ahead));
            text.push_str(before);
            text.push_str(marker);
            self.told += before.len();
            rest = after;
            self.places.pop_front();
        }
        self.told += rest.len();
        text.push_str(rest);
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::harmony::{MARKERS, THINKING};
    use crate::tools::{Format, Parser, Part, Thinking, example};
    use metal_candle::generate::StopStrings;

    /// The pieces that the engine tells of a text, held back for these stop strings.
    fn pieces(tokenizer: &Tokenizer, text: &str, stops: &[&str]) -> Vec<Piece> {
        let mut stops = StopStrings::new(stops.iter().copied()).unwrap();
        let mut stream = tokenizer.decode_stream();
        let piece =
            |text: String, token| Piece { text, token, logprob: 0.0, likeliest: Vec::new() };
        let mut pieces = Vec::new();
        for token in tokenizer.encode(text, false).unwrap() {
            let decoded = stream.push(token).unwrap().unwrap_or_default();
            pieces.push(piece(stops.push(&decoded).emit, Some(token)));
        }
        let rest = stream.finish().unwrap().unwrap_or_default();
        let rest = stops.push(&rest).emit + &stops.finish();
        pieces.push(piece(rest, None));
        pieces
    }

    /// What the families have tokens for.
    const SPECIAL: [&str; 10] = [
        "<tool_call>",
        "</tool_call>",
        "<|tool_call|>",
        "<|/tool_call|>",
        "<|python_tag|>",
        "[TOOL_CALLS]",
        "[CALL_ID]",
        "[ARGS]",
        "<think>",
        "</think>",
    ];

    /// What is made of a text as it comes, token by token: the thoughts, the answer and the calls.
    fn read(format: &'static Format, text: &str, stops: &[&str]) -> (String, String, Vec<String>) {
        static TAGS: Thinking = Thinking { open: "<think>", close: "</think>" };
        let tokenizer = Arc::new(example::tokenizer(&SPECIAL));
        let texts = format.markers().chain(TAGS.markers());
        let markers = find_markers(&tokenizer, texts).unwrap();
        let pieces = pieces(&tokenizer, text, stops);
        let decoded: String = pieces.iter().map(|piece| piece.text.as_str()).collect();
        assert!(SPECIAL.iter().all(|marker| !decoded.contains(marker)), "{decoded}");
        let tools = example::tools(&["f", "g"]);
        let mut parser = Parser::new(Some(format), Some(&TAGS), false, tools, true);
        let mut markers = Markers::new(tokenizer, markers, !stops.is_empty());
        let mut parts = Vec::new();
        for piece in pieces {
            parts.extend(parser.push(&markers.restore(piece).unwrap()));
        }
        parts.extend(parser.finish());
        let (mut thoughts, mut answer, mut calls) = (String::new(), String::new(), Vec::new());
        for part in parts {
            match part {
                Part::Reasoning(text) => thoughts += &text,
                Part::Text(text) => answer += &text,
                Part::Call(call) => calls.push(format!("{}({})", call.name, call.arguments)),
            }
        }
        (thoughts, answer, calls)
    }

    #[test]
    fn calls_between_special_tokens_are_read_in_every_format() {
        let arguments = r#"{"a": "é [b] <c", "d": [1, {}]}"#;
        let one = |key: &str| format!(r#"{{"name": "f", "{key}": {arguments}}}"#);
        let (f, g) = (one("arguments"), r#"{"name": "g", "arguments": {}}"#);
        for (format, text) in [
            ("hermes", format!("<tool_call>\n{f}\n</tool_call>\n<tool_call>\n{g}\n</tool_call>")),
            (
                "qwen3-coder",
                "<tool_call>\n<function=f>\n<parameter=a>\né [b] <c\n</parameter>\n<parameter=d>\n[1, {}]\n</parameter>\n\
                 </function>\n</tool_call>\n<tool_call>\n<function=g>\n</function>\n</tool_call>"
                    .into(),
            ),
            ("told", format!("<tool_call>{f}</tool_call><tool_call>{g}</tool_call>")),
            ("granite", format!("<|tool_call|>[{f}, {g}]")),
            ("phi4-mini", format!("<|tool_call|>[{f},{g}]<|/tool_call|>")),
            ("mistral", format!("[TOOL_CALLS] [{f}, {g}]")),
            ("mistral-named", format!("[TOOL_CALLS]f[ARGS]{arguments}[TOOL_CALLS]g[ARGS]{{}}")),
            (
                "mistral-named",
                format!("[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{arguments}[TOOL_CALLS]g[ARGS]{{}}"),
            ),
            ("llama3", format!("<|python_tag|>{}; {g}", one("parameters"))),
        ] {
            for stops in [&[][..], &["the end of all"][..]] {
                let text = format!("<think>hm</think>\n\nI look.\n\n{text}");
                let (thoughts, answer, calls) = read(Format::named(format), &text, stops);
                assert_eq!((thoughts.as_str(), answer.as_str()), ("hm", "I look."), "{text}");
                assert_eq!(calls, [format!("f({arguments})"), "g({})".into()], "{text}");
            }
        }
    }

    #[test]
    fn messages_between_special_tokens_are_read() {
        let tokenizer = Arc::new(example::tokenizer(&MARKERS));
        let markers = find_markers(&tokenizer, THINKING.markers().into_iter()).unwrap();
        assert_eq!(markers.len(), MARKERS.len());
        let text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.\
            <|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"a\": \"é\"}<|call|>";
        for stops in [&[][..], &["the end of all", "I look, too"][..]] {
            let tools = example::tools(&["f"]);
            let format = Format::named("harmony");
            let mut parser = Parser::new(Some(format), Some(&THINKING), false, tools, true);
            let mut restored = Markers::new(tokenizer.clone(), markers.clone(), !stops.is_empty());
            let mut parts = Vec::new();
            for piece in pieces(&tokenizer, text, stops) {
                assert!(!piece.text.contains("<|"));
                parts.extend(parser.push(&restored.restore(piece).unwrap()));
            }
            parts.extend(parser.finish());
            assert_eq!(example::joined(parts), "[hm]I look.|f({\"a\": \"é\"})", "{stops:?}");
        }
    }

    #[test]
    fn special_tokens_stand_where_they_stood() {
        let special = ["<think>", "</think>", "[TOOL_CALLS]"];
        let tokenizer = Arc::new(example::tokenizer(&special));
        let markers = find_markers(&tokenizer, special.into_iter().chain(["<tool_call>"])).unwrap();
        assert_eq!(markers.len(), 3);
        for text in [
            "<think>hm</think>Yes, é[TOOL_CALLS][]",
            "[TOOL_CALLS][TOOL_CALLS]",
            "no markers at all",
            "at the end</think>",
        ] {
            for stops in [&[][..], &["Yes, it is", "the end of all"][..]] {
                let mut restored =
                    Markers::new(tokenizer.clone(), markers.clone(), !stops.is_empty());
                let pieces = pieces(&tokenizer, text, stops).into_iter();
                let told: String = pieces.map(|piece| restored.restore(piece).unwrap()).collect();
                assert_eq!(told, text, "{stops:?}");
            }
        }
    }
}
