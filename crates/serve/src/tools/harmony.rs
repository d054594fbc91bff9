//! Harmony, the format of gpt-oss: a text is one or more messages, each with a header that says to which channel it belongs
//! and who gets it.
//!
//! ```text
//! <|channel|>analysis<|message|>thoughts<|end|>
//! <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>
//! <|start|>assistant<|channel|>final<|message|>the answer<|return|>
//! ```
//!
//! A prompt ends with `<|start|>assistant`, so a text begins within a header. The recipient may stand before the channel, and
//! the type of the content may be missing. What goes to a function is a call, what else is of the channel `analysis` are
//! thoughts, and all else is for the user. Of a header nothing is ever told.
//!
//! Held back are headers, calls until they are whole, and markers until what follows shows that a message ends there: a
//! text, or arguments, may have a marker's name in them.

use super::calls::{Stop, object_alone};
use super::formats::Thinking;
use super::parser::{Part, Tellable};

const START: &str = "<|start|>";
const END: &str = "<|end|>";
const MESSAGE: &str = "<|message|>";
const CHANNEL: &str = "<|channel|>";
const CONSTRAIN: &str = "<|constrain|>";
const RETURN: &str = "<|return|>";
const CALL: &str = "<|call|>";

/// All that may be special tokens.
pub const MARKERS: [&str; 7] = [START, END, MESSAGE, CHANNEL, CONSTRAIN, RETURN, CALL];
/// What ends a message. The last two end the text.
const ENDS: [&str; 3] = [END, CALL, RETURN];
const CHANNELS: [&str; 3] = ["analysis", "commentary", "final"];
const ROLE: &str = "assistant";
/// What stands before a recipient.
const TO: &str = "to=";
/// What stands before the name of a request's tool.
const FUNCTIONS: &str = "functions.";
/// Bytes of a header, at most.
const LONGEST_HEADER: usize = 512;
/// What stands between the texts of two messages, which are one text for who asked.
const BETWEEN: &str = "\n\n";

/// What thoughts begin and end with.
pub static THINKING: Thinking = Thinking { open: "<|channel|>analysis<|message|>", close: END };
/// What stands between thoughts and the header of what follows them.
pub const NEXT: &str = "<|start|>assistant";
/// The header of an answer.
pub const ANSWER: &str = "<|channel|>final<|message|>";

/// The header of a call of this tool.
pub fn call_header(name: &str) -> String {
    format!("{CHANNEL}commentary {TO}{FUNCTIONS}{name} {CONSTRAIN}json{MESSAGE}")
}

/// The markers and the texts between them that a text consists of.
pub fn pieces(text: &str) -> Vec<&str> {
    let mut pieces = Vec::new();
    let mut rest = text;
    while !rest.is_empty() {
        let marker = MARKERS.iter().find(|marker| rest.starts_with(**marker));
        let next = MARKERS.iter().filter_map(|marker| rest.find(marker)).min();
        let length = marker.map_or(next.unwrap_or(rest.len()), |marker| marker.len());
        let (piece, behind) = rest.split_at(length);
        pieces.push(piece);
        rest = behind;
    }
    pieces
}

/// Where in a text the parser is.
#[derive(Debug, Clone, PartialEq)]
enum State {
    /// Before the first letter, where a header may go on or a text without one may begin.
    Start,
    Header,
    Body(Kind),
}

/// What a message is.
#[derive(Debug, Clone, PartialEq)]
enum Kind {
    Thoughts,
    Text,
    /// A call of this tool, which there is.
    Call(String),
}

/// Takes a text of messages apart.
#[derive(Debug, Clone)]
pub struct Messages {
    tellable: Tellable,
    state: State,
    /// What has come and is not told yet.
    held: String,
    /// Bytes of `held` in which no end of a call is.
    searched: usize,
    /// Whether nothing of this message is told yet.
    is_new: bool,
    /// Whether thoughts were told, and whether text was.
    thought: bool,
    said: bool,
}

impl Messages {
    /// For a text with these calls. `reasoning` says that the prompt ends in thoughts.
    pub fn new(tellable: Tellable, reasoning: bool) -> Self {
        let state = if reasoning { State::Body(Kind::Thoughts) } else { State::Start };
        let (held, searched) = (String::new(), 0);
        Self { tellable, state, held, searched, is_new: true, thought: false, said: false }
    }

    /// Whether what comes next belongs to the thoughts, as far as is known.
    pub fn is_reasoning(&self) -> bool {
        self.state == State::Body(Kind::Thoughts)
    }

    /// Takes the next piece of the text; gives the parts that are certain now.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    /// The end of the text; gives what was held back.
    pub fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        while let Some(rest) = self.end(&mut parts) {
            self.held = rest;
            self.state = State::Header;
            while self.advance(&mut parts) {}
        }
        parts
    }

    /// Tells what is held at the end of the text; gives what is behind a message that ended before that, if one did.
    fn end(&mut self, parts: &mut Vec<Part>) -> Option<String> {
        let mut held = std::mem::take(&mut self.held);
        let begins_with_marker = |text: &str| MARKERS.iter().any(|it| text.starts_with(it));
        match self.state.clone() {
            State::Start => self.tell_text(&held, parts),
            State::Header => {
                // Without a marker it may as well be a text.
                let recipient = held.trim_start().strip_prefix(TO);
                let is_text = |it: &str| !it.starts_with(FUNCTIONS) && !FUNCTIONS.starts_with(it);
                if recipient.is_some_and(is_text) && pieces(&held).len() == 1 {
                    self.tell_text(&held, parts);
                }
            }
            State::Body(kind) => {
                if let Next::Perhaps(place) = next_message(&held, self.searched)
                    && begins_with_marker(held.get(place..).unwrap_or_default())
                {
                    held.truncate(place);
                }
                // What was taken for arguments with a marker in them, and isn't an object, ended at the marker.
                if matches!(kind, Kind::Call(_))
                    && object_alone(&held).is_err()
                    && let Next::Header { end, header } = next_message(&held, 0)
                {
                    let rest = held.split_off(header);
                    held.truncate(end);
                    self.tell_text(&held, parts);
                    return Some(rest);
                }
                self.tell(&kind, &held, parts);
            }
        }
        None
    }

    /// Goes as far as the state stays; says whether there is more to do.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        match &self.state {
            State::Start => self.at_start(),
            State::Header => self.in_header(),
            State::Body(kind) => self.in_body(&kind.clone(), parts),
        }
    }

    fn at_start(&mut self) -> bool {
        let begun = self.held.trim_start();
        let begins = [CHANNEL, MESSAGE, CONSTRAIN, START, TO];
        if begins.iter().any(|it| begun.starts_with(it)) {
            self.state = State::Header;
            return true;
        }
        if begins.iter().any(|it| it.starts_with(begun)) {
            return false;
        }
        self.begin(Kind::Text)
    }

    fn in_header(&mut self) -> bool {
        let end = self.held.find(MESSAGE).filter(|end| *end <= LONGEST_HEADER);
        if let Some(end) = end {
            let body = self.held.split_off(end + MESSAGE.len());
            let header = std::mem::replace(&mut self.held, body);
            let kind = self.kind(header.strip_suffix(MESSAGE).unwrap_or(&header));
            return self.begin(kind);
        }
        if self.held.len() < LONGEST_HEADER + MESSAGE.len() {
            return false;
        }
        // No header is so long, so it is a text.
        let rest = self.held.split_off(self.held.floor_char_boundary(LONGEST_HEADER));
        let header = std::mem::replace(&mut self.held, rest);
        let texts = pieces(&header).into_iter().filter(|piece| !MARKERS.contains(piece));
        self.held.insert_str(0, &texts.collect::<String>());
        self.begin(Kind::Text)
    }

    fn begin(&mut self, kind: Kind) -> bool {
        self.state = State::Body(kind);
        self.searched = 0;
        self.is_new = true;
        true
    }

    /// What a message with this header is.
    fn kind(&self, header: &str) -> Kind {
        // A message without a body may have come before.
        let header = header.rsplit(START).next().unwrap_or(header);
        let (mut channel, mut recipient) = (None, None);
        let mut names_channel = false;
        for piece in pieces(header) {
            let mut words = piece.split_whitespace();
            if std::mem::replace(&mut names_channel, piece == CHANNEL) {
                channel = channel.or(words.clone().next());
            }
            recipient = recipient.or(words.find_map(|word| word.strip_prefix(TO)));
        }
        match (recipient, channel) {
            (Some(recipient), _) => match recipient.strip_prefix(FUNCTIONS) {
                Some(name) if self.tellable.has_tool(name) => Kind::Call(name.into()),
                _ => Kind::Text,
            },
            (None, Some("analysis")) => Kind::Thoughts,
            (None, _) => Kind::Text,
        }
    }

    fn in_body(&mut self, kind: &Kind, parts: &mut Vec<Part>) -> bool {
        match next_message(&self.held, self.searched) {
            Next::Header { mut end, mut header } => {
                if matches!(kind, Kind::Call(_)) {
                    let body = self.held.get(..end).unwrap_or_default();
                    match object_alone(body) {
                        // The markers stand in a text of the arguments.
                        Err(Stop::Unfinished) if !body.trim().is_empty() => {
                            self.searched = end + 1;
                            return true;
                        }
                        Err(_) => {
                            if let Next::Header { end: first, header: next } =
                                next_message(&self.held, 0)
                            {
                                (end, header) = (first, next);
                            }
                        }
                        Ok(_) => {}
                    }
                }
                let rest = self.held.split_off(header);
                let mut body = std::mem::replace(&mut self.held, rest);
                body.truncate(end);
                self.tell(kind, &body, parts);
                self.state = State::Header;
                true
            }
            Next::Perhaps(place) if matches!(kind, Kind::Call(_)) => {
                self.searched = place;
                false
            }
            Next::Perhaps(place) => {
                let rest = self.held.split_off(place);
                let told = std::mem::replace(&mut self.held, rest);
                self.tell(kind, &told, parts);
                false
            }
        }
    }

    /// Tells a part of a body, or all that a call is.
    fn tell(&mut self, kind: &Kind, body: &str, parts: &mut Vec<Part>) {
        match kind {
            Kind::Text => self.tell_text(body, parts),
            Kind::Call(name) => match object_alone(body) {
                Ok(arguments) => {
                    self.tellable.tell(vec![(name.clone(), arguments.into())], parts);
                }
                Err(_) => self.tell_text(body, parts),
            },
            Kind::Thoughts if body.is_empty() => {}
            Kind::Thoughts => {
                let between = if self.is_new && self.thought { BETWEEN } else { "" };
                (self.is_new, self.thought) = (false, true);
                parts.push(Part::Reasoning(format!("{between}{body}")));
            }
        }
    }

    fn tell_text(&mut self, text: &str, parts: &mut Vec<Part>) {
        if text.is_empty() {
            return;
        }
        let between = if self.is_new && self.said { BETWEEN } else { "" };
        (self.is_new, self.said) = (false, true);
        parts.push(Part::Text(format!("{between}{text}")));
    }
}

/// Where a message ends.
enum Next {
    /// It ends here, and the next one's header goes on there.
    Header { end: usize, header: usize },
    /// What comes may show that it ends here, which may be the text's end.
    Perhaps(usize),
}

/// Where in a text, from a place on, the first message ends.
fn next_message(text: &str, from: usize) -> Next {
    let mut from = from;
    while let Some((place, behind)) = text.get(from..).and_then(|rest| {
        let place = rest.find('<')?;
        Some((from + place, rest.get(place..)?))
    }) {
        match header_behind(behind) {
            Some(Some(length)) => return Next::Header { end: place, header: place + length },
            Some(None) => return Next::Perhaps(place),
            None => from = place + 1,
        }
    }
    Next::Perhaps(text.len())
}

/// How many bytes at a text's beginning part two messages, if these do: the marker that ends one, the one that starts
/// another, or both, or none if the header begins with its channel at once. `Some(None)` while that isn't known.
fn header_behind(text: &str) -> Option<Option<usize>> {
    let behind_end = ENDS.iter().find_map(|end| text.strip_prefix(end));
    let rest = behind_end.unwrap_or(text);
    let one_of = |begun: &str, texts: &[&str]| {
        if texts.iter().any(|it| begun.starts_with(it)) {
            return Some(true);
        }
        texts.iter().any(|it| it.starts_with(begun)).then_some(false)
    };
    let known = |is_whole: bool, behind: &str| is_whole.then(|| text.len() - behind.len());
    if let Some(behind) = rest.strip_prefix(START) {
        return match behind_end {
            Some(_) => Some(known(true, behind)),
            None => one_of(behind, &[ROLE]).map(|is_whole| known(is_whole, behind)),
        };
    }
    if let Some(behind) = rest.strip_prefix(CHANNEL) {
        return one_of(behind, &CHANNELS).map(|is_whole| known(is_whole, rest));
    }
    let markers: &[&str] = match behind_end {
        Some(_) => &[START, CHANNEL],
        None => &MARKERS,
    };
    markers.iter().any(|marker| marker.starts_with(rest)).then_some(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::example::{self, parsed};
    use crate::tools::{Format, Parser};
    use std::sync::Arc;

    const THOUGHTS: &str = "<|channel|>analysis<|message|>hm <|end|><|start|>assistant";

    fn parser() -> Parser {
        let tools = example::tools(&["f", "g.h"]);
        Parser::new(Some(Format::named("harmony")), Some(&THINKING), false, tools, true)
    }

    fn read(text: &str) -> String {
        parsed(&parser(), text)
    }

    #[test]
    fn channels_are_told_apart() {
        let answer = "<|channel|>final<|message|> Yes, é <b>.\n";
        for end in ["", "<|return|>", "<|end|>"] {
            assert_eq!(read(&format!("{answer}{end}")), "[] Yes, é <b>.\n|");
            assert_eq!(read(&format!("{THOUGHTS}{answer}{end}")), "[hm ] Yes, é <b>.\n|");
        }
        let twice = format!("{THOUGHTS}{THOUGHTS}{answer}");
        assert_eq!(read(&twice), "[hm \n\nhm ] Yes, é <b>.\n|");
        let preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant";
        assert_eq!(
            read(&format!("{preamble}{THOUGHTS}{answer}")),
            "[hm ]I look.\n\n Yes, é <b>.\n|"
        );
        // Without the end of one message, or the start of the next.
        assert_eq!(
            read("<|channel|>analysis<|message|>hm<|start|>assistant<|message|>a"),
            "[hm]a|"
        );
        assert_eq!(
            read("<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>a"),
            "[hm]a|"
        );
        assert_eq!(read("<|channel|>analysis<|message|>hm<|channel|>final<|message|>a"), "[hm]a|");
        // Without a body.
        assert_eq!(
            read("<|channel|>analysis<|end|><|start|>assistant<|channel|>final<|message|>a"),
            "[]a|"
        );
        assert_eq!(
            read(
                "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>"
            ),
            "[]|"
        );
    }

    #[test]
    fn calls_are_read_wherever_their_recipient_stands() {
        let arguments = r#"{"a": "é <|end|><|start|>user<|message|>", "b": [1, {}]}"#;
        for header in [
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.f<|constrain|>json<|message|>",
            "<|channel|>commentary to=functions.f json<|message|>",
            "<|channel|>commentary to=functions.f<|message|>",
            "<|channel|>analysis to=functions.f code<|message|>",
            " to=functions.f<|channel|>commentary json<|message|>",
            " to=functions.f<|channel|>commentary <|constrain|>json<|message|>",
            " to=functions.f<|message|>",
            "<|start|>assistant to=functions.f<|channel|>commentary<|message|>",
        ] {
            for end in ["", "<|call|>", "<|end|>"] {
                let call = format!("{header}{arguments}{end}");
                assert_eq!(read(&call), format!("[]|f({arguments})"), "{call}");
                let text = format!(
                    "{THOUGHTS}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{call}"
                );
                assert_eq!(read(&text), format!("[hm ]I look.|f({arguments})"), "{text}");
            }
        }
        let both = "<|channel|>commentary to=functions.f<|message|>{}<|call|><|start|>assistant to=functions.g.h<|channel|>commentary<|message|> {} <|call|>";
        assert_eq!(read(both), "[]|f({})g.h({})");
        let one = Parser::new(
            Some(Format::named("harmony")),
            Some(&THINKING),
            false,
            example::tools(&["f", "g.h"]),
            false,
        );
        assert_eq!(parsed(&one, both), "[]|f({})");
    }

    #[test]
    fn what_is_no_call_remains_text_without_its_header() {
        for (recipient, body) in [
            ("functions.h", "{}"),
            ("functions.", "{}"),
            ("functions.f", "f(1)"),
            ("functions.f", "[1]"),
            ("functions.f", "{\"a\": \"b"),
            ("f", "{}"),
            ("python", "print(1 < 2)"),
            ("browser.search", "{\"query\": \"a\"}"),
        ] {
            let text = format!(
                "<|channel|>commentary to={recipient} <|constrain|>json<|message|>{body}<|call|>"
            );
            assert_eq!(read(&text), format!("[]{body}|"), "{text}");
        }
        let broken =
            "<|channel|>commentary to=functions.f<|message|>{\"a\": \"b<|end|><|start|>assistant"
                .repeat(3);
        let answer = "<|channel|>final<|message|>Yes.";
        let text = "{\"a\": \"b\n\n".repeat(3);
        assert_eq!(read(&format!("{broken}{answer}")), format!("[]{text}Yes.|"));
        // Where nothing may be called.
        let none = Parser::new(None, Some(&THINKING), false, example::tools(&["f"]), true);
        let call = "<|channel|>commentary to=functions.f<|message|>{}<|call|>";
        assert_eq!(parsed(&none, call), "[]{}|");
    }

    #[test]
    fn texts_without_headers_are_texts() {
        for text in [
            "",
            " ",
            "Yes.",
            " a < b <| c <|end",
            "to be",
            "to=5 apples",
            "<|chan",
            "<|end|> is a marker",
        ] {
            assert_eq!(read(text), format!("[]{text}|"), "{text}");
        }
        assert_eq!(read("Yes.<|return|>"), "[]Yes.|");
        let marked = "<|channel|>final<|message|>After <|end|> stands <|start|> or <|channel|>.";
        assert_eq!(read(marked), "[]After <|end|> stands <|start|> or <|channel|>.|");
        // What is longer than a header is none.
        let long = "é".repeat(LONGEST_HEADER);
        assert_eq!(
            read(&format!("<|channel|>{long}<|message|>a")),
            format!("[]{long}<|message|>a|")
        );
        assert_eq!(read(&format!("to={long}")), format!("[]to={long}|"));
    }

    #[test]
    fn a_text_cut_off_anywhere_has_no_header_in_it() {
        let text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.\
            <|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{\"a\": 1}<|call|>";
        // As it is cut: between tokens, of which each marker is one.
        let tokens = pieces(text).into_iter().flat_map(|piece| match MARKERS.contains(&piece) {
            true => vec![piece.to_string()],
            false => piece.chars().map(String::from).collect(),
        });
        let whole = ["[hm]I look.|f({\"a\": 1})", "[hm]I look.\n\n{\"a\": 1|"];
        let mut cut = String::new();
        for token in tokens {
            cut += &token;
            let read = read(&cut);
            let known = read.trim_end_matches('|');
            assert!(
                whole.iter().any(|it| it.starts_with(known.trim_end_matches(']'))),
                "{cut}: {read}"
            );
        }
        assert_eq!(read(&cut), whole[0]);
        assert_eq!(read(" to=func"), "[]|");
    }

    #[test]
    fn thoughts_may_begin_in_the_prompt_and_are_known_while_they_are_written() {
        let mut open = Parser::new(None, Some(&THINKING), true, Arc::new([]), true);
        assert_eq!(
            parsed(&open, "hm<|end|><|start|>assistant<|channel|>final<|message|>a"),
            "[hm]a|"
        );
        let mut known = Vec::new();
        for piece in pieces("hm<|end|><|start|>assistant<|channel|>final<|message|>a") {
            open.push(piece);
            known.push(open.is_reasoning());
        }
        assert_eq!(known, [true, true, false, false, false, false, false, false]);
        let mut parser = parser();
        let mut told = Vec::new();
        for piece in ["<|channel|>", "analysis", "<|message|>", "h", "m <", "b", "<|end|>"] {
            told.push((parser.push(piece).len(), parser.is_reasoning()));
        }
        let expected =
            [(0, false), (0, false), (0, true), (1, true), (1, true), (1, true), (0, true)];
        assert_eq!(told, expected);
    }
}
