//! Which bytes of a rendered conversation the model wrote.
//!
//! What is inside the span of a turn: everything the template writes for the turn after the header that
//! `add_generation_prompt` writes, up to and with the token that ends the turn. White space after that token (the
//! newline of ChatML) is outside, because generation stops before it.
//!
//! Three ways, in this order:
//! 1. The template's `{% generation %}` blocks, as they are.
//! 2. Prefixes: the turn starts where the conversation before it, rendered with the generation prompt, ends, and ends
//!    where the conversation up to it ends. Each holds only if that rendering is a prefix of the whole.
//! 3. Marks, for a start or an end that (2) cannot give because the template rewrites history (drops the reasoning of
//!    earlier turns, or moves the system message to the last one): a mark in a message that, taken out again, must leave
//!    the same text. The turn starts, or ends, as far behind the mark as in the shorter conversation; or else at the
//!    marks around its content.
//!
//! An end is extended over the token that ends the turn where that comes with the next turn only; and where a template
//! always writes the header of one more turn, that header is no part of the turn before it.

use std::ops::Range;

use serde_json::Value;

use super::message::Message;
use super::template::{CONTENT_END, CONTENT_START, ChatTemplate, RenderOptions};
use crate::{Error, Result};

/// A conversation as text, and what of it the model wrote.
#[derive(Debug, Clone, PartialEq)]
pub struct Rendered {
    /// The whole conversation.
    pub text: String,
    /// The byte ranges of `text` that the model wrote, in order, not overlapping.
    pub assistant: Vec<Range<usize>>,
    /// Whether the last message is the model's and its span ends without a special token, so that nothing in it says
    /// that the turn is over.
    pub unended: bool,
}

impl ChatTemplate {
    /// Renders a conversation and finds what the model wrote in it. `add_generation_prompt` is taken as false.
    ///
    /// A span holds everything the template writes for an assistant's turn after the generation prompt, with the token
    /// that ends the turn and without the white space after it; or exactly the template's `{% generation %}` blocks
    /// if it has them.
    ///
    /// # Errors
    /// [`Error::Template`]: the conversation does not render, or there is a turn whose place cannot be told.
    pub fn render_with_spans(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<Rendered> {
        self.render_with_spans_from(messages, options, 0)
    }

    /// As [`ChatTemplate::render_with_spans`], with the spans of only those turns whose message's index is at least
    /// `first`.
    ///
    /// # Errors
    /// Those of [`ChatTemplate::render_with_spans`].
    pub fn render_with_spans_from(
        &self,
        messages: &[Message],
        options: &RenderOptions,
        first: usize,
    ) -> Result<Rendered> {
        self.check_marks(messages, options)?;
        // One time for all renderings: two that differ by a tick of the clock would not be prefixes.
        let now = Some(options.now.unwrap_or_else(|| chrono::Local::now().naive_local()));
        let options = RenderOptions { add_generation_prompt: false, now, ..*options };
        let whole = self.render_marked(messages, &options)?;
        let turns = Turns { template: self, messages, options, text: &whole.text };
        let mut assistant = Vec::new();
        if self.has_generation_blocks(&options)? {
            let from = if first == 0 { 0 } else { turns.blocks_from(first, &whole.blocks)? };
            assistant.extend(
                whole
                    .blocks
                    .iter()
                    .filter(|block| block.start >= from && !block.is_empty())
                    .cloned(),
            );
        } else {
            for (index, message) in messages
                .iter()
                .enumerate()
                .skip(first)
                .filter(|(_, message)| message.is_from_model())
            {
                let span = turns.span(index, message).ok_or_else(|| {
                    Error::Template(format!(
                        "cannot tell which part of the rendered conversation message {} ({}) wrote, because the template \
                         writes it differently in a longer conversation; put {{% generation %}} and \
                         {{% endgeneration %}} around it in the template, or train on all tokens",
                        index + 1,
                        message.role()
                    ))
                })?;
                assistant.push(span);
            }
            if assistant.windows(2).any(|pair| matches!(pair, [a, b] if a.end > b.start)) {
                return Err(Error::Template(
                    "the turns of the rendered conversation are not in their order".into(),
                ));
            }
        }
        let last = messages.last().filter(|message| message.is_from_model());
        let unended = last.is_some()
            && assistant.last().is_some_and(|span| !turns.ends_with_token(span.start, span.end));
        Ok(Rendered { text: whole.text, assistant, unended })
    }
}

struct Turns<'a> {
    template: &'a ChatTemplate,
    messages: &'a [Message],
    options: RenderOptions<'a>,
    text: &'a str,
}

impl Turns<'_> {
    /// Where the first `count` messages end in the whole, if they render as a prefix of it.
    fn prefix(&self, count: usize, add_generation_prompt: bool) -> Option<usize> {
        if count == self.messages.len() && !add_generation_prompt {
            return Some(self.text.len());
        }
        let options = RenderOptions { add_generation_prompt, ..self.options };
        // A template may refuse a conversation that ends here; then this way does not give the place.
        let rendered = self.template.render_marked(self.messages.get(..count)?, &options).ok()?;
        self.text.starts_with(&rendered.text).then_some(rendered.text.len())
    }

    /// The place from which generation blocks belong to messages from `first` on.
    fn blocks_from(&self, first: usize, blocks: &[Range<usize>]) -> Result<usize> {
        if let Some(place) = self.prefix(first, false) {
            return Ok(place);
        }
        // With one block a turn, counting them is as good.
        let turns = |messages: &[Message]| {
            messages.iter().filter(|message| message.is_from_model()).count()
        };
        if blocks.len() == turns(self.messages)
            && let Some(earlier) = self.messages.get(..first)
        {
            // Where the model has no turn from there on, no block is of one.
            return Ok(blocks.get(turns(earlier)).map_or(self.text.len(), |block| block.start));
        }
        Err(Error::Template(format!(
            "cannot tell which generation blocks belong to message {} and those after it, because the template writes \
             the messages before it differently in a longer conversation; train on every assistant turn instead",
            first + 1
        )))
    }

    fn span(&self, index: usize, message: &Message) -> Option<Range<usize>> {
        let mut end = self.end_by_prefix(index).or_else(|| self.end_by_mark(index));
        // What has more than the whole has of this turn gives no place in this turn.
        let fits = |start: &usize| end.is_none_or(|end| *start <= end);
        let mut start = self.prefix(index, true).filter(fits);
        start = start.or_else(|| self.start_by_mark(index, true).filter(fits));
        // Before the content's own place, as calls and white space may stand before it; not where a reasoning that is
        // written otherwise than the header begins it does.
        let without_reasoning = |start: &usize| {
            let rest = self.text.get(*start..).unwrap_or_default().trim_start();
            !["<think>", "</think>"].iter().any(|mark| rest.starts_with(mark))
        };
        let by_mark = || self.start_by_mark(index, false).filter(fits);
        start = start.or_else(|| by_mark().filter(without_reasoning));
        if start.is_none() || end.is_none() {
            let content = self.content(index, message);
            let shows_calls = self.shows_calls(index, message);
            // A turn doesn't start behind its calls, which some templates write before the content.
            let before_calls = |start: &usize| {
                let call = || self.place(index, &marked_call(message)?);
                !shows_calls || call().is_some_and(|(call, _)| *start <= call)
            };
            let content_start = content.as_ref().map(|content| content.start);
            start = start.or_else(|| content_start.filter(before_calls)).or_else(by_mark);
            // Calls stand behind the content, and how far they go is not known then.
            if end.is_none() && !shows_calls {
                end = content.map(|content| self.over_end(content.end));
            }
        }
        let (start, end) = (start?, end?);
        let end = self.over_late_end(index, start, end);
        (start <= end).then(|| start..self.without_space_after_end(start, end))
    }

    /// Where the conversation up to this turn ends in the whole, if it renders as a prefix of it but for the header of
    /// a turn that comes after it.
    fn end_by_prefix(&self, index: usize) -> Option<usize> {
        let next = self.messages.get(index + 1);
        let mut text = match next {
            Some(_) => {
                self.template.render_marked(self.messages.get(..=index)?, &self.options).ok()?.text
            }
            None => self.text.to_string(),
        };
        // What another's turn begins behind isn't the header of the model's.
        if next.is_some_and(|next| !next.is_from_model()) && self.text.starts_with(&text) {
            return Some(text.len());
        }
        text.truncate(text.len() - self.header_behind(index, &text));
        self.text.starts_with(&text).then_some(text.len())
    }

    /// Where the turn starts, by how far that is behind a mark in the message before it; `whole_header` says whether
    /// that is behind all of the header, which may begin the model's reasoning where earlier turns are written without any.
    fn start_by_mark(&self, index: usize, whole_header: bool) -> Option<usize> {
        let before = index.checked_sub(1)?;
        let options = RenderOptions { add_generation_prompt: true, ..self.options };
        marked(self.messages.get(before)?).iter().find_map(|message| {
            let (place, rest) = self.place(before, message)?;
            let behind = self.behind_mark(before, message, index, &options)?;
            let header = match whole_header {
                true => behind.as_str(),
                false => behind.rsplit_once("<think>")?.0,
            };
            if !whole_header && self.messages.get(before)?.is_from_model() {
                // The reasoning may be that of the message before.
                let without = self.behind_mark(before, message, index, &self.options)?;
                if !header.starts_with(without.as_str()) {
                    return None;
                }
            }
            rest.starts_with(header).then_some(place + header.len())
        })
    }

    /// Where the turn ends, by how far that is behind a mark in its own message. Where the shorter conversation ends
    /// otherwise, as with one more token, the turn ends at the last end token that both have, or behind calls at the
    /// first one before the next message.
    fn end_by_mark(&self, index: usize) -> Option<usize> {
        let message = self.messages.get(index)?;
        let shows_calls = self.shows_calls(index, message);
        marked(message).iter().find_map(|marked| {
            let (place, rest) = self.place(index, marked)?;
            let behind = self.behind_mark(index, marked, index + 1, &self.options)?;
            let behind = behind.get(..behind.len() - self.header_behind(index, &behind))?;
            if rest.starts_with(behind) {
                return Some(place + behind.len());
            }
            if shows_calls {
                // Calls hold anything; the content stands before them, or behind them.
                let in_call = marked.get("tool_calls") != message.get("tool_calls");
                let content = || self.place(index, &marked_content(message)?);
                let place = content().map_or(place, |(content, _)| place.max(content));
                return in_call.then(|| self.end_before_next(index, place))?;
            }
            let both = common_start(rest, behind);
            let tokens = self.template.end_tokens.iter();
            let ends = tokens.filter_map(|token| Some(both.rfind(token.as_str())? + token.len()));
            ends.max().map(|end| place + end)
        })
    }

    /// The first end of an end token behind a place, which the messages after this one must follow.
    fn end_before_next(&self, index: usize, place: usize) -> Option<usize> {
        let rest = self.text.get(place..)?;
        let tokens = self.template.end_tokens.iter();
        let end = place
            + tokens.filter_map(|token| Some(rest.find(token.as_str())? + token.len())).min()?;
        if index + 1 == self.messages.len() {
            return Some(end);
        }
        // Few, as each is a rendering of all.
        const LOOKED_AT: usize = 3;
        let mut later = self.messages.iter().enumerate().skip(index + 1).take(LOOKED_AT);
        let next = later.find_map(|(index, message)| {
            marked(message).iter().find_map(|marked| Some(self.place(index, marked)?.0))
        })?;
        (end <= next).then_some(end)
    }

    /// Where the mark of a message stands in the whole, and what follows there.
    fn place(&self, index: usize, message: &Message) -> Option<(usize, &str)> {
        let (before, behind) =
            self.around_mark(index, message, self.messages.len(), &self.options)?;
        let rest = self.text.strip_prefix(before.as_str())?;
        (rest == behind).then_some((before.len(), rest))
    }

    /// What the first `count` messages have behind the mark of one of them.
    fn behind_mark(
        &self,
        index: usize,
        message: &Message,
        count: usize,
        options: &RenderOptions,
    ) -> Option<String> {
        Some(self.around_mark(index, message, count, options)?.1)
    }

    /// What the first `count` messages have before the mark of one of them, and behind it.
    fn around_mark(
        &self,
        index: usize,
        message: &Message,
        count: usize,
        options: &RenderOptions,
    ) -> Option<(String, String)> {
        let rendered = self.with_message(index, message, count, options)?;
        let (before, behind) = rendered.split_once(CONTENT_END)?;
        Some((before.to_string(), behind.replace(CONTENT_END, "")))
    }

    /// Whether the calls of a message are in the text; some templates leave them out.
    fn shows_calls(&self, index: usize, message: &Message) -> bool {
        let Some(marked) = marked_call(message) else { return has_calls(message) };
        self.with_message(index, &marked, self.messages.len(), &self.options)
            .is_none_or(|rendered| rendered.contains(CONTENT_END))
    }

    /// The first `count` messages with another one in place of one of them.
    fn with_message(
        &self,
        index: usize,
        message: &Message,
        count: usize,
        options: &RenderOptions,
    ) -> Option<String> {
        let mut messages = self.messages.get(..count)?.to_vec();
        *messages.get_mut(index)? = message.clone();
        Some(self.template.render_marked(&messages, options).ok()?.text)
    }

    /// The bytes at the end of a rendering up to a turn that are the header of one more turn, which some templates
    /// write whether they are asked for it or not. The conversation before the turn ends with the same, then.
    fn header_behind(&self, index: usize, rendered: &str) -> usize {
        // Most templates end a turn by its end token.
        if self
            .template
            .end_tokens
            .iter()
            .any(|token| rendered.trim_end().ends_with(token.as_str()))
        {
            return 0;
        }
        let header = || {
            let messages = self.messages.get(..index)?;
            let before = self.template.render_marked(messages, &self.options).ok()?.text;
            let asked = RenderOptions { add_generation_prompt: true, ..self.options };
            if self.template.render_marked(messages, &asked).ok()?.text != before {
                return None;
            }
            // The turn itself may end as the message before it does, but not what stands behind a mark in it.
            let behind = marked(self.messages.get(index)?)
                .iter()
                .find_map(|message| self.behind_mark(index, message, index + 1, &self.options))?;
            let mut both = common_end(rendered, common_end(&before, &behind));
            // A header is written before any turn, too; the end of turns isn't.
            let empty = self.template.render_marked(&[], &self.options).ok();
            if let Some(empty) = &empty {
                both = common_end(both, &empty.text);
            }
            let tokens = |tokens: &[String], last: bool| {
                let places = tokens.iter().filter_map(|token| match last {
                    true => both.rfind(token.as_str()).map(|place| place + token.len()),
                    false => both.find(token.as_str()),
                });
                if last { places.max() } else { places.min() }
            };
            let from = tokens(&self.template.end_tokens, true)
                .or_else(|| tokens(&self.template.special_tokens, false))?;
            Some(both.len() - from)
        };
        header().unwrap_or(0)
    }

    /// Where the content of a message stands in the whole, by rendering with marks around it.
    fn content(&self, index: usize, message: &Message) -> Option<Range<usize>> {
        let first = match message.get("content")? {
            Value::String(text) => text.as_str(),
            Value::Array(parts) => parts.first()?.get("text")?.as_str()?,
            _ => return None,
        };
        // Around the outer white space; or else inside it, so that a template's trim still does what it did. After the
        // reasoning too, since templates cut it away.
        let after_space = |from: usize| {
            first.get(from..).map(|rest| from + (rest.len() - rest.trim_start().len()))
        };
        let after_reasoning = first.rfind("</think>").map(|place| place + "</think>".len());
        let mut starts = vec![0];
        starts.extend(after_space(0));
        starts.extend(after_reasoning.and_then(after_space));
        starts.dedup();
        let mark = |start| {
            [with_end_behind, with_end]
                .iter()
                .find_map(|with_end| self.content_marked_at(index, message, start, with_end))
        };
        starts.into_iter().find_map(mark)
    }

    fn content_marked_at(
        &self,
        index: usize,
        message: &Message,
        place: usize,
        with_end: impl Fn(&str) -> Option<String>,
    ) -> Option<Range<usize>> {
        let with_start = |text: &str| {
            Some(format!("{}{CONTENT_START}{}", text.get(..place)?, text.get(place..)?))
        };
        let content = match message.get("content")? {
            Value::String(text) => Value::String(with_end(&with_start(text)?)?),
            Value::Array(parts) => {
                let mut parts = parts.clone();
                let text = with_start(parts.first()?.get("text")?.as_str()?)?;
                parts.first_mut()?.as_object_mut()?.insert("text".into(), Value::String(text));
                let text = with_end(parts.last()?.get("text")?.as_str()?)?;
                parts.last_mut()?.as_object_mut()?.insert("text".into(), Value::String(text));
                Value::Array(parts)
            }
            _ => return None,
        };
        let mut messages = self.messages.to_vec();
        messages.get_mut(index)?.set_content(content);
        let rendered = self.template.render_marked(&messages, &self.options).ok()?.text;
        let (before, rest) = rendered.split_once(CONTENT_START)?;
        let (content, after) = rest.split_once(CONTENT_END)?;
        let same = self.text.strip_prefix(before)?.strip_prefix(content)? == after;
        same.then(|| before.len()..before.len() + content.len())
    }

    /// Extends an end over the special token directly after it, or over an end-of-generation token after white space.
    fn over_end(&self, end: usize) -> usize {
        let rest = self.text.get(end..).unwrap_or_default();
        let directly =
            self.template.special_tokens.iter().find(|token| rest.starts_with(token.as_str()));
        if let Some(token) = directly {
            return end + token.len();
        }
        let after_space = rest.trim_start();
        match self.template.end_tokens.iter().find(|token| after_space.starts_with(token.as_str()))
        {
            Some(token) => end + (rest.len() - after_space.len()) + token.len(),
            None => end,
        }
    }

    /// Extends an end that has no special token over the one directly behind it, which a template may write only where
    /// another turn follows. It ends this turn if nothing or another special token follows it; one that begins a turn is
    /// followed by a text, or by the content of the next message, or this turn itself begins by it.
    fn over_late_end(&self, index: usize, start: usize, end: usize) -> usize {
        if self.ends_with_token(start, end) {
            return end;
        }
        let rest = self.text.get(end..).unwrap_or_default();
        let space = rest.len() - rest.trim_start().len();
        let ends =
            |token: &&String| rest.get(space..).is_some_and(|it| it.starts_with(token.as_str()));
        if let Some(token) = self.template.end_tokens.iter().find(ends) {
            return end + space + token.len();
        }
        let header = self.text.get(..start).unwrap_or_default().trim_end();
        let is_end = |token: &&String| {
            let token = token.as_str();
            let Some(next) = rest.strip_prefix(token) else { return false };
            if self.template.is_bos(token) || header.ends_with(token) {
                return false;
            }
            let (space, next) = (next.len() - next.trim_start().len(), next.trim_start());
            let follows =
                self.template.special_tokens.iter().any(|it| next.starts_with(it.as_str()));
            let is_content = || {
                let message = self.messages.get(index + 1);
                let content = message.and_then(|message| self.content(index + 1, message));
                content.is_some_and(|content| content.start <= end + token.len() + space)
            };
            next.is_empty() || follows && !is_content()
        };
        let mut tokens = self.template.special_tokens.iter();
        tokens.find(is_end).map_or(end, |token| end + token.len())
    }

    /// Whether this part of the text has a special token at its end, white space aside.
    fn ends_with_token(&self, start: usize, end: usize) -> bool {
        let kept = self.text.get(start..end).unwrap_or_default().trim_end();
        let tokens = self.template.special_tokens.iter().chain(&self.template.end_tokens);
        tokens.into_iter().any(|token| kept.ends_with(token.as_str()))
    }

    fn without_space_after_end(&self, start: usize, end: usize) -> usize {
        match self.ends_with_token(start, end) {
            true => start + self.text.get(start..end).unwrap_or_default().trim_end().len(),
            false => end,
        }
    }
}

fn has_calls(message: &Message) -> bool {
    matches!(message.get("tool_calls"), Some(Value::Array(calls)) if !calls.is_empty())
}

/// A message with a mark in it, in each place that may do: the name of its last call, the end of its content.
fn marked(message: &Message) -> Vec<Message> {
    marked_call(message).into_iter().chain(marked_content(message)).collect()
}

/// A message with a mark at the end of its content.
fn marked_content(message: &Message) -> Option<Message> {
    let mut content = message.get("content")?.clone();
    match &mut content {
        Value::String(text) => *text = with_end(text)?,
        Value::Array(parts) => {
            let text = parts.last_mut()?.get_mut("text")?;
            *text = Value::String(with_end(text.as_str()?)?);
        }
        _ => return None,
    }
    Some(message.clone().with("content", content))
}

/// A message with a mark in the name of its last call.
fn marked_call(message: &Message) -> Option<Message> {
    let mut calls = message.get("tool_calls")?.as_array()?.clone();
    let call = calls.last_mut()?.as_object_mut()?;
    let function = match call.contains_key("function") {
        true => call.get_mut("function")?.as_object_mut()?,
        false => call,
    };
    let name = format!("{CONTENT_END}{}", function.get("name")?.as_str()?);
    function.insert("name".into(), Value::String(name));
    Some(message.clone().with("tool_calls", Value::Array(calls)))
}

/// A text with a mark behind all of it, white space too.
fn with_end_behind(text: &str) -> Option<String> {
    Some(format!("{text}{CONTENT_END}"))
}

/// A text with a mark at its end, inside the outer white space, so that a template's trim still does what it did.
fn with_end(text: &str) -> Option<String> {
    let kept = text.trim_end();
    // The content may be white space only; then the end goes behind all of it.
    let at = if kept.is_empty() || kept.ends_with(CONTENT_START) { text.len() } else { kept.len() };
    Some(format!("{}{CONTENT_END}{}", text.get(..at)?, text.get(at..)?))
}

/// The longest start that both texts have.
fn common_start<'a>(text: &'a str, other: &str) -> &'a str {
    let same = text.chars().zip(other.chars()).take_while(|(a, b)| a == b);
    let length = same.map(|(character, _)| character.len_utf8()).sum::<usize>();
    text.get(..length).unwrap_or_default()
}

/// The longest end that both texts have.
fn common_end<'a>(text: &'a str, other: &str) -> &'a str {
    let same = text.chars().rev().zip(other.chars().rev()).take_while(|(a, b)| a == b);
    let length = same.map(|(character, _)| character.len_utf8()).sum::<usize>();
    text.get(text.len() - length..).unwrap_or_default()
}
