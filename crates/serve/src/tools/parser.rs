//! A text of a model, taken apart as it comes: thoughts, the answer, and calls of tools.
//!
//! Held back is what may still turn out to be a marker, white space that goes if a call follows, and a call until it is
//! whole. What begins as a call and isn't one (it is not JSON, or names a tool that there isn't) remains text. Texts of
//! messages with headers are taken apart by `harmony.rs`.

use super::Tool;
use super::calls::{MOST_CALLS, Read, Written, read};
use super::formats::{Format, Shape, Thinking};
use super::harmony::Messages;
use crate::app::new_id;
use std::sync::Arc;

/// A call of a tool.
#[derive(Debug, Clone, PartialEq)]
pub struct Call {
    /// What its result refers to.
    pub id: String,
    /// The tool's name.
    pub name: String,
    /// Its arguments: an object's JSON, as the model wrote it.
    pub arguments: String,
}

/// A part of a text.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// Of what the model thinks before its answer.
    Reasoning(String),
    /// Of the answer.
    Text(String),
    /// A whole call.
    Call(Call),
}

/// The calls that may be told of a text.
#[derive(Debug, Clone)]
pub struct Tellable {
    tools: Arc<[Tool]>,
    /// How many, at most, and how many were.
    most: usize,
    told: usize,
}

impl Tellable {
    /// Calls of these tools, several if `parallel`.
    fn new(tools: Arc<[Tool]>, parallel: bool) -> Self {
        Self { tools, most: if parallel { MOST_CALLS } else { 1 }, told: 0 }
    }

    /// Whether there is a tool of this name.
    pub fn has_tool(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.name == name)
    }

    /// Tells calls, as far as there may be more.
    pub fn tell(&mut self, calls: Vec<Written>, parts: &mut Vec<Part>) {
        for (name, arguments) in calls {
            if self.told < self.most {
                self.told += 1;
                parts.push(Part::Call(Call { id: new_id("call_"), name, arguments }));
            }
        }
    }
}

/// Takes a text apart.
#[derive(Debug, Clone)]
pub enum Parser {
    /// With markers around thoughts and calls.
    Marked(Marked),
    /// Of messages with headers.
    Messages(Messages),
}

impl Parser {
    /// For a text of a model that writes calls and thoughts so. `reasoning` says that the prompt ends in thoughts.
    pub fn new(
        format: Option<&'static Format>,
        thinking: Option<&'static Thinking>,
        reasoning: bool,
        tools: Arc<[Tool]>,
        parallel: bool,
    ) -> Self {
        let in_messages = format.is_some_and(|it| it.shape == Shape::Message)
            || thinking.is_some_and(Thinking::is_in_messages);
        // Without a format no calls are told, whatever the tools are.
        let tools = if format.is_some() { tools } else { Arc::default() };
        let tellable = Tellable::new(tools, parallel);
        match in_messages {
            true => Self::Messages(Messages::new(tellable, reasoning)),
            false => Self::Marked(Marked::new(format, thinking, reasoning, tellable)),
        }
    }

    /// Whether what comes next belongs to the thoughts, as far as is known.
    pub fn is_reasoning(&self) -> bool {
        match self {
            Self::Marked(marked) => marked.state == State::Reasoning,
            Self::Messages(messages) => messages.is_reasoning(),
        }
    }

    /// Takes the next piece of the text; gives the parts that are certain now.
    pub fn push(&mut self, text: &str) -> Vec<Part> {
        match self {
            Self::Marked(marked) => marked.push(text),
            Self::Messages(messages) => messages.push(text),
        }
    }

    /// The end of the text; gives what was held back.
    pub fn finish(&mut self) -> Vec<Part> {
        match self {
            Self::Marked(marked) => marked.finish(),
            Self::Messages(messages) => messages.finish(),
        }
    }
}

/// Where in a text the parser is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum State {
    /// Before the first letter, where thoughts may follow.
    Start,
    Reasoning,
    /// Before the first letter of the answer.
    Answer,
    Text,
    /// After the marker of calls, or in an object that stands in its place.
    Calls {
        bare: bool,
    },
}

/// Takes a text apart that has markers around thoughts and calls.
#[derive(Debug, Clone)]
pub struct Marked {
    format: Option<&'static Format>,
    thinking: Option<&'static Thinking>,
    tellable: Tellable,
    state: State,
    /// What has come and is not told yet.
    held: String,
    /// Bytes of `held` in which no end of a call is.
    searched: usize,
    /// Whether a part of the thoughts was told.
    thought: bool,
    /// Whether white space at the beginning of what comes goes.
    trims: bool,
}

impl Marked {
    fn new(
        format: Option<&'static Format>,
        thinking: Option<&'static Thinking>,
        reasoning: bool,
        tellable: Tellable,
    ) -> Self {
        let state = match (thinking, reasoning) {
            (Some(_), true) => State::Reasoning,
            (Some(_), false) => State::Start,
            (None, _) => State::Answer,
        };
        let (held, searched) = (String::new(), 0);
        let (thought, trims) = (false, false);
        Self { format, thinking, tellable, state, held, searched, thought, trims }
    }

    fn push(&mut self, text: &str) -> Vec<Part> {
        self.held.push_str(text);
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        parts
    }

    fn finish(&mut self) -> Vec<Part> {
        let mut parts = Vec::new();
        while self.advance(&mut parts) {}
        let held = std::mem::take(&mut self.held);
        match self.state {
            State::Start | State::Answer | State::Text => self.tell_text(held, &mut parts),
            State::Reasoning => self.tell_reasoning(held.trim_end(), &mut parts),
            State::Calls { bare } => self.end_calls(&held, bare, &mut parts),
        }
        parts
    }

    /// Goes as far as the state stays; says whether there is more to do.
    fn advance(&mut self, parts: &mut Vec<Part>) -> bool {
        match self.state {
            State::Start => self.at_start(),
            State::Reasoning => self.in_reasoning(parts),
            State::Answer => self.at_answer(),
            State::Text => self.in_text(parts),
            State::Calls { bare } => !bare && self.in_calls(parts),
        }
    }

    fn at_start(&mut self) -> bool {
        let begun = self.held.trim_start();
        let open = self.thinking.map_or("", |thinking| thinking.open);
        if begun.is_empty() || (open.starts_with(begun) && begun.len() < open.len()) {
            return false;
        }
        self.state = match begun.strip_prefix(open) {
            Some(after) => {
                self.held = after.to_string();
                State::Reasoning
            }
            None => State::Answer,
        };
        true
    }

    fn in_reasoning(&mut self, parts: &mut Vec<Part>) -> bool {
        let close = self.thinking.map_or("", |thinking| thinking.close);
        let Some(end) = self.held.find(close) else {
            let keep = keep_from(&self.held, close);
            let rest = self.held.split_off(keep);
            let thoughts = std::mem::replace(&mut self.held, rest);
            self.tell_reasoning(&thoughts, parts);
            return false;
        };
        let rest = self.held.split_off(end + close.len());
        let thoughts = std::mem::replace(&mut self.held, rest);
        let thoughts = thoughts.strip_suffix(close).unwrap_or(&thoughts).trim_end();
        self.tell_reasoning(thoughts, parts);
        self.trims = true;
        self.state = State::Answer;
        true
    }

    fn at_answer(&mut self) -> bool {
        let begun = self.held.trim_start();
        if self.trims {
            self.held = begun.to_string();
        }
        let begun = self.held.trim_start();
        let bare = self.format.is_some_and(|format| format.bare);
        if begun.is_empty() && (self.trims || bare) {
            return false;
        }
        self.trims = false;
        self.state = match bare && begun.starts_with('{') {
            true => State::Calls { bare: true },
            false => State::Text,
        };
        true
    }

    fn in_text(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some(format) = self.format else {
            let text = std::mem::take(&mut self.held);
            self.tell_text(text, parts);
            return false;
        };
        if let Some(start) = self.held.find(format.open) {
            let rest = self.held.split_off(start + format.open.len());
            let mut text = std::mem::replace(&mut self.held, rest);
            text.truncate(text[..start].trim_end().len());
            self.tell_text(text, parts);
            self.searched = 0;
            self.state = State::Calls { bare: false };
            return true;
        }
        let keep = keep_from(&self.held, format.open);
        let rest = self.held.split_off(keep);
        let text = std::mem::replace(&mut self.held, rest);
        self.tell_text(text, parts);
        false
    }

    fn in_calls(&mut self, parts: &mut Vec<Part>) -> bool {
        let Some((format, close)) = self.format.and_then(|it| Some((it, it.close?))) else {
            return false;
        };
        while let Some(found) = self.held.get(self.searched..).and_then(|it| it.find(close)) {
            let end = self.searched + found;
            match read(format, &self.held[..end], &self.tellable.tools) {
                // The marker stands in a text of the arguments.
                Read::Unfinished => self.searched = end + close.len(),
                Read::Calls(calls, rest) if rest.is_empty() && self.are_tools(&calls) => {
                    self.held.drain(..end + close.len());
                    self.tellable.tell(calls, parts);
                    self.trims = true;
                    self.state = State::Text;
                    return true;
                }
                Read::Calls(..) | Read::Wrong => {
                    let rest = self.held.split_off(end + close.len());
                    let text = std::mem::replace(&mut self.held, rest);
                    self.tell_text(format!("{}{text}", format.open), parts);
                    self.state = State::Text;
                    return true;
                }
            }
        }
        // What has come may end in the beginning of the marker.
        let sure = (self.held.len() + 1).saturating_sub(close.len());
        self.searched = self.searched.max(self.held.floor_char_boundary(sure));
        false
    }

    /// The text ends among calls.
    fn end_calls(&mut self, body: &str, bare: bool, parts: &mut Vec<Part>) {
        let read = self.format.map(|format| (format, read(format, body, &self.tellable.tools)));
        match read {
            Some((_, Read::Calls(calls, rest)))
                if self.are_tools(&calls) && (!bare || rest.is_empty()) =>
            {
                self.tellable.tell(calls, parts);
                self.trims = true;
                self.tell_text(rest, parts);
            }
            Some((format, _)) if !bare => {
                self.tell_text(format!("{}{body}", format.open), parts);
            }
            _ => self.tell_text(body.to_string(), parts),
        }
    }

    fn are_tools(&self, calls: &[Written]) -> bool {
        calls.iter().all(|(name, _)| self.tellable.has_tool(name))
    }

    fn tell_text(&mut self, text: String, parts: &mut Vec<Part>) {
        let text = if self.trims { text.trim_start().to_string() } else { text };
        if !text.is_empty() {
            self.trims = false;
            parts.push(Part::Text(text));
        }
    }

    fn tell_reasoning(&mut self, thoughts: &str, parts: &mut Vec<Part>) {
        let thoughts = if self.thought { thoughts } else { thoughts.trim_start() };
        if !thoughts.is_empty() {
            self.thought = true;
            parts.push(Part::Reasoning(thoughts.to_string()));
        }
    }
}

/// From where on a text is kept: its end may be the beginning of `marker`, with white space before that.
fn keep_from(text: &str, marker: &str) -> usize {
    let could_begin =
        |start: &usize| text.is_char_boundary(*start) && marker.starts_with(&text[*start..]);
    let shortest = text.len().saturating_sub(marker.len());
    let start = (shortest..text.len()).find(could_begin).unwrap_or(text.len());
    text[..start].trim_end().len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::example::{self, parsed};

    fn parser(format: &str) -> Parser {
        let tools = example::tools(&["f", "g"]);
        let thinking = Thinking { open: "<think>", close: "</think>" };
        let thinking: &'static Thinking = Box::leak(Box::new(thinking));
        Parser::new(Some(Format::named(format)), Some(thinking), false, tools, true)
    }

    #[test]
    fn every_format_is_read_in_one_piece_and_in_any_two() {
        let arguments = r#"{"a": "é </tool", "b": [1, {}]}"#;
        let call = format!(r#"{{"name": "f", "arguments": {arguments}}}"#);
        let both = format!("f({arguments})g({{}})");
        let other = r#"{"name": "g", "arguments": {}}"#;
        let tags = "<function=f>\n<parameter=a>\né </tool\n</parameter>\n<parameter=b>\n[1, {}]\n</parameter>\n</function>";
        let tagged = |call: &str| format!("<tool_call>\n{call}\n</tool_call>");
        for (format, text) in [
            (
                "hermes",
                format!("<tool_call>\n{call}\n</tool_call>\n<tool_call>\n{other}\n</tool_call>"),
            ),
            ("qwen3-coder", format!("{}\n{}", tagged(tags), tagged("<function=g>\n</function>"))),
            ("told", format!("<tool_call>{call}</tool_call><tool_call>{other}</tool_call>\n")),
            ("granite", format!("<|tool_call|>[{call}, {other}]")),
            ("phi4-mini", format!("<|tool_call|>[{call},{other}]<|/tool_call|>")),
            ("mistral", format!("[TOOL_CALLS] [{call}, {other}]")),
            ("mistral-named", format!("[TOOL_CALLS]f[ARGS]{arguments}[TOOL_CALLS]g[ARGS]{{}}")),
            ("llama3", format!("<|python_tag|>{call}; {other}")),
            ("llama3", format!("{call}\n{other}")),
        ] {
            assert_eq!(parsed(&parser(format), &text), format!("[]|{both}"), "{text}");
            let thinking = format!("<think>\nhm <\n</think>\n\n{text}");
            assert_eq!(parsed(&parser(format), &thinking), format!("[hm <]|{both}"), "{thinking}");
        }
    }

    #[test]
    fn text_around_calls_stays_and_white_space_beside_them_goes() {
        let text =
            "I look.\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\nDone. ";
        assert_eq!(parsed(&parser("hermes"), text), "[]I look.Done. |f({})");
        let text = "So: [TOOL_CALLS]f[ARGS]{} and so";
        assert_eq!(parsed(&parser("mistral-named"), text), "[]So:and so|f({})");
    }

    #[test]
    fn what_is_no_call_remains_text() {
        for (format, text) in [
            ("hermes", "a < b <tool b\n\n"),
            ("hermes", "<tool_call>\nf(1)\n</tool_call> x"),
            ("hermes", "<tool_call>\n{\"name\": \"h\", \"arguments\": {}}\n</tool_call>"),
            ("hermes", "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"b"),
            ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\nb\n</tool_call>"),
            ("qwen3-coder", "<tool_call>\n<function=h>\n</function>\n</tool_call>"),
            ("qwen3-coder", "<tool_call>\nf(1)\n</tool_call> x"),
            ("mistral", "[TOOL_CALLS] [{\"name\""),
            ("llama3", "{\"a\": 1}"),
            ("llama3", "  {\"name\": \"f\", \"parameters\": {}} is a call"),
            ("llama3", "<|python_tag|>print(1)"),
        ] {
            assert_eq!(parsed(&parser(format), text), format!("[]{text}|"), "{text}");
        }
    }

    #[test]
    fn a_marker_within_arguments_is_text_of_theirs() {
        let call = r#"<tool_call>{"name": "f", "arguments": {"a": "</tool_call>"}}</tool_call>"#;
        let expected = r#"[]|f({"a": "</tool_call>"})"#;
        assert_eq!(parsed(&parser("hermes"), call), expected);
        let call = "<tool_call>\n<function=f>\n<parameter=a>\n</tool_call>\n</parameter>\n</function>\n</tool_call>";
        assert_eq!(parsed(&parser("qwen3-coder"), call), expected);
    }

    #[test]
    fn thoughts_may_begin_in_the_prompt_or_never_end() {
        static THINKING: Thinking = Thinking { open: "<think>", close: "</think>" };
        let thinking = Some(&THINKING);
        let open = Parser::new(None, thinking, true, Arc::new([]), true);
        assert_eq!(parsed(&open, "\nhm\n</think>\n\nYes. "), "[hm]Yes. |");
        assert_eq!(parsed(&open, "hm, <thi"), "[hm, <thi]|");
        let none = Parser::new(None, thinking, false, Arc::new([]), true);
        assert_eq!(parsed(&none, " <b>"), "[] <b>|");
        assert_eq!(parsed(&none, "<think></think>"), "[]|");
        assert_eq!(parsed(&none, "\n<think>a\nb</think>c"), "[a\nb]c|");
        let plain = Parser::new(None, None, false, Arc::new([]), true);
        assert_eq!(parsed(&plain, " <think>a</think> "), "[] <think>a</think> |");
    }

    #[test]
    fn one_call_is_told_where_one_is_wanted() {
        let call = r#"<tool_call>{"name": "f", "arguments": {}}</tool_call>"#;
        let one =
            Parser::new(Some(Format::named("hermes")), None, false, example::tools(&["f"]), false);
        assert_eq!(parsed(&one, &call.repeat(3)), "[]|f({})");
    }
}
