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
//!    earlier turns): marks around the message's content that, taken out again, must leave the same text. The end is
//!    extended over the token that ends the turn.

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
        Ok(Rendered { text: whole.text, assistant })
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
        let mut start = self.prefix(index, true);
        let mut end = self.prefix(index + 1, false);
        // A prefix that has more than the whole has of this turn is no place in this turn.
        if let (Some(from), Some(to)) = (start, end)
            && from > to
        {
            start = None;
        }
        if start.is_none() || end.is_none() {
            let marks = self.content(index, message);
            let from = start.or(marks.as_ref().map(|content| content.start))?;
            start = Some(from);
            if end.is_none() {
                let calls = matches!(message.get("tool_calls"), Some(Value::Array(calls)) if !calls.is_empty());
                end = if calls {
                    self.end_after_calls(index, from)
                } else {
                    marks.map(|content| self.over_end(content.end))
                };
            }
        }
        let (start, end) = (start?, end?);
        (start <= end).then(|| start..self.without_space_after_end(start, end))
    }

    /// Where the content of a message stands in the whole, by rendering with marks around it.
    fn content(&self, index: usize, message: &Message) -> Option<Range<usize>> {
        let first = match message.get("content")? {
            Value::String(text) => text.as_str(),
            Value::Array(parts) => parts.first()?.get("text")?.as_str()?,
            _ => return None,
        };
        // Inside the outer white space, so that a template's trim still does what it did. After the reasoning too,
        // since templates cut it away.
        let after_space = |from: usize| {
            first.get(from..).map(|rest| from + (rest.len() - rest.trim_start().len()))
        };
        let after_reasoning = first.rfind("</think>").map(|place| place + "</think>".len());
        let candidates = [after_space(0), after_reasoning.and_then(after_space)];
        candidates
            .into_iter()
            .flatten()
            .find_map(|place| self.content_marked_at(index, message, place))
    }

    fn content_marked_at(
        &self,
        index: usize,
        message: &Message,
        place: usize,
    ) -> Option<Range<usize>> {
        let with_start = |text: &str| {
            Some(format!("{}{CONTENT_START}{}", text.get(..place)?, text.get(place..)?))
        };
        let with_end = |text: &str| {
            let kept = text.trim_end();
            // The content may be white space only; then the end goes behind all of it.
            let at = if kept.ends_with(CONTENT_START) { text.len() } else { kept.len() };
            Some(format!("{}{CONTENT_END}{}", text.get(..at)?, text.get(at..)?))
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

    /// The end of a turn with tool calls, which stand after the content: the first place behind `start` of the special
    /// token that ends the conversation up to this turn.
    fn end_after_calls(&self, index: usize, start: usize) -> Option<usize> {
        let rendered =
            self.template.render_marked(self.messages.get(..=index)?, &self.options).ok()?.text;
        let kept = rendered.trim_end();
        let token =
            self.template.special_tokens.iter().find(|token| kept.ends_with(token.as_str()))?;
        Some(start + self.text.get(start..)?.find(token.as_str())? + token.len())
    }

    fn without_space_after_end(&self, start: usize, end: usize) -> usize {
        let kept = self.text.get(start..end).unwrap_or_default().trim_end();
        let ends = self.template.special_tokens.iter().any(|token| kept.ends_with(token.as_str()));
        if ends { start + kept.len() } else { end }
    }
}
