//! Records to tokens and loss masks.
//!
//! A token is trainable when any byte of it lies in a span that is to be learned (see
//! [`crate::text::ChatTemplate::render_with_spans`]); the first token of a row never is, since nothing predicts it.

use std::fmt;
use std::ops::Range;

use chrono::NaiveDateTime;
use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::record::{Body, Record};
use crate::hash::Fnv;
use crate::text::{Message, RenderOptions, Tokenizer};
use crate::{Error, Result};

/// Which tokens the loss counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossOn {
    /// Every token.
    All,
    /// What follows the prompt; in a conversation, the last turn of the assistant.
    Completion,
    /// Every turn of the assistant; in a prompt with its completion, the completion.
    Assistant,
}

/// How records become examples.
#[derive(Debug, Clone, PartialEq)]
pub struct DataOptions {
    /// An example keeps its first `max_seq_length` tokens; at least 2.
    pub max_seq_length: usize,
    /// Which tokens the loss counts. `None` goes by the record: conversations [`LossOn::Assistant`], prompts with a
    /// completion [`LossOn::Completion`], texts [`LossOn::All`].
    pub loss_on: Option<LossOn>,
    /// More variables for the chat template.
    pub variables: Map<String, Value>,
    /// The time that the chat template's `strftime_now` says; `None` is the time at the start of the build. A template
    /// that prints the date makes other tokens the next day, so a run that must repeat gives one.
    pub now: Option<NaiveDateTime>,
}

impl Default for DataOptions {
    fn default() -> Self {
        Self { max_seq_length: 2048, loss_on: None, variables: Map::new(), now: None }
    }
}

/// One record's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// The token ids, at least 2.
    pub ids: Vec<u32>,
    /// Whether the loss counts the prediction of the token at the same index; false at index 0.
    pub trainable: Vec<bool>,
}

/// What became of the records.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Records given.
    pub records: usize,
    /// Examples made of them.
    pub examples: usize,
    /// Records cut to the longest sequence allowed, also those that were then dropped.
    pub truncated: usize,
    /// Records left out because no token of theirs is trainable.
    pub dropped_untrainable: usize,
    /// Tokens of all examples.
    pub tokens: usize,
    /// Trainable tokens of all examples.
    pub trainable_tokens: usize,
    /// Tokens of the longest example.
    pub longest: usize,
    /// Tokens of the average example.
    pub mean_length: f64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} examples of {} records, {} tokens ({} trainable), {:.1} tokens on average, {} at most",
            self.examples,
            self.records,
            self.tokens,
            self.trainable_tokens,
            self.mean_length,
            self.longest
        )?;
        if self.truncated > 0 {
            write!(f, "; {} truncated", self.truncated)?;
        }
        if self.dropped_untrainable > 0 {
            write!(
                f,
                "; {} dropped because nothing in them is trainable",
                self.dropped_untrainable
            )?;
        }
        Ok(())
    }
}

/// Examples to learn from or to measure with.
#[derive(Debug, Clone, PartialEq)]
pub struct Dataset {
    /// The examples, in the order of their records.
    pub examples: Vec<Example>,
    /// What became of the records.
    pub report: Report,
}

impl Dataset {
    /// A hash of every token and mask (FNV-1a), by which a resumed run knows its data.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Fnv::new();
        let mut add = |word: u32| hash.add(&word.to_le_bytes());
        for example in &self.examples {
            add(example.ids.len() as u32);
            for (&id, &trainable) in example.ids.iter().zip(&example.trainable) {
                add(id);
                add(u32::from(trainable));
            }
        }
        hash.finish()
    }

    /// That every token is a row of an embedding of `vocabulary` rows.
    ///
    /// # Errors
    /// [`Error::Option`] naming the first token that is not.
    pub fn check_vocabulary(&self, vocabulary: usize) -> Result<()> {
        let mut ids = self.examples.iter().flat_map(|example| &example.ids);
        match ids.find(|&&id| id as usize >= vocabulary) {
            Some(id) => Err(Error::option(
                "data",
                format!(
                    "has token {id}, but the model's vocabulary has {vocabulary}; the tokenizer is not this model's"
                ),
            )),
            None => Ok(()),
        }
    }

    /// Tokenizes records, in parallel and in a stable order.
    ///
    /// Conversations go through the tokenizer's chat template. A prompt and completion of plain text do too, as a
    /// user's and an assistant's message, when there is a template; otherwise they are put together as they are. After
    /// such a pair and after a text comes the EOS token, when the tokenizer has one and did not add it.
    ///
    /// # Errors
    /// [`Error::Record`] (or [`Error::Option`] for a record made in memory) for the first record that does not go
    /// through the template or the tokenizer; [`Error::File`] when conversations need a template and there is none;
    /// [`Error::Option`] when `max_seq_length` is below 2, when `loss_on` asks for turns that the records don't have,
    /// or when no example is left.
    pub fn build(records: &[Record], tokenizer: &Tokenizer, options: &DataOptions) -> Result<Self> {
        if options.max_seq_length < 2 {
            return Err(Error::option(
                "max_seq_length",
                format!("is {}, but a token and its prediction are 2", options.max_seq_length),
            ));
        }
        let builder = Builder {
            tokenizer,
            options,
            now: options.now.unwrap_or_else(|| chrono::Local::now().naive_local()),
        };
        let built: Vec<Result<Example>> = records
            .par_iter()
            .enumerate()
            .map(|(index, record)| builder.example(index, record))
            .collect();
        let mut report = Report { records: records.len(), ..Report::default() };
        let mut examples = Vec::with_capacity(records.len());
        for example in built {
            let mut example = example?;
            if example.ids.len() > options.max_seq_length {
                report.truncated += 1;
                example.ids.truncate(options.max_seq_length);
                example.trainable.truncate(options.max_seq_length);
            }
            if let Some(first) = example.trainable.first_mut() {
                *first = false;
            }
            let trainable = example.trainable.iter().filter(|flag| **flag).count();
            if trainable == 0 {
                report.dropped_untrainable += 1;
                continue;
            }
            report.tokens += example.ids.len();
            report.trainable_tokens += trainable;
            report.longest = report.longest.max(example.ids.len());
            examples.push(example);
        }
        report.examples = examples.len();
        if examples.is_empty() {
            let why = if records.is_empty() {
                "there are no records".to_string()
            } else {
                format!(
                    "none of the {} records has a trainable token: {} were cut at max_seq_length {}, and what is \
                     left holds nothing that loss_on asks for (is there an assistant's turn in it?)",
                    report.records, report.truncated, options.max_seq_length
                )
            };
            return Err(Error::option("data", why));
        }
        report.mean_length = report.tokens as f64 / report.examples as f64;
        Ok(Self { examples, report })
    }
}

struct Builder<'a> {
    tokenizer: &'a Tokenizer,
    options: &'a DataOptions,
    now: NaiveDateTime,
}

impl Builder<'_> {
    /// The whole record's tokens, before truncation.
    fn example(&self, index: usize, record: &Record) -> Result<Example> {
        let example = match &record.body {
            Body::Messages { messages, tools } => {
                let first = match self.options.loss_on.unwrap_or(LossOn::Assistant) {
                    LossOn::All => None,
                    LossOn::Assistant => Some(0),
                    LossOn::Completion => Some(
                        messages.iter().rposition(Message::is_from_model).unwrap_or(messages.len()),
                    ),
                };
                self.chat(messages, tools.as_deref(), first)
            }
            Body::ChatCompletion { prompt, completion, tools } => {
                let first = match self.options.loss_on.unwrap_or(LossOn::Completion) {
                    LossOn::All => None,
                    LossOn::Assistant => Some(0),
                    LossOn::Completion => Some(prompt.len()),
                };
                let messages = [prompt.as_slice(), completion.as_slice()].concat();
                self.chat(&messages, tools.as_deref(), first)
            }
            Body::PromptCompletion { prompt, completion } => {
                let on_all = self.options.loss_on == Some(LossOn::All);
                if self.tokenizer.chat_template().is_some() {
                    let messages =
                        [Message::new("user", prompt), Message::new("assistant", completion)];
                    self.chat(&messages, None, (!on_all).then_some(0))
                } else {
                    let text = format!("{prompt}{completion}");
                    let from = if on_all { 0 } else { prompt.len() };
                    self.plain(&text, from)
                }
            }
            Body::Text { text } => match self.options.loss_on {
                None | Some(LossOn::All) => self.plain(text, 0),
                Some(other) => {
                    let name = if other == LossOn::Assistant { "assistant" } else { "completion" };
                    Err(Error::option(
                        "loss_on",
                        format!(
                            "is {name:?}, but a \"text\" record has no turns: use \"all\", or leave it out"
                        ),
                    ))
                }
            },
        };
        example.map_err(|error| match error {
            Error::Template(message) => record.error(index, format!("chat template: {message}")),
            Error::Tokenizer(message) => record.error(index, format!("tokenizer: {message}")),
            Error::Option { option, message } => {
                record.error(index, format!("{option}: {message}"))
            }
            other => other,
        })
    }

    /// A conversation's tokens. Those of the model's messages from index `first` on are trainable; all when `None`.
    fn chat(
        &self,
        messages: &[Message],
        tools: Option<&[Value]>,
        first: Option<usize>,
    ) -> Result<Example> {
        let template = self.tokenizer.require_chat_template()?;
        let options = RenderOptions {
            add_generation_prompt: false,
            tools,
            variables: Some(&self.options.variables),
            now: Some(self.now),
        };
        match first {
            None => {
                let ids = self.tokenizer.encode(&template.render(messages, &options)?, false)?;
                let trainable = vec![true; ids.len()];
                Ok(Example { ids, trainable })
            }
            Some(first) => {
                let rendered = template.render_with_spans_from(messages, &options, first)?;
                let (ids, offsets) = self.tokenizer.encode_with_offsets(&rendered.text, false)?;
                Ok(Example { ids, trainable: mask(&offsets, &rendered.assistant) })
            }
        }
    }

    /// A plain text's tokens, trainable from the byte `from` on, with the EOS token at the end.
    fn plain(&self, text: &str, from: usize) -> Result<Example> {
        let (mut ids, offsets) = self.tokenizer.encode_with_offsets(text, true)?;
        let mut trainable = mask(&offsets, std::slice::from_ref(&(from..text.len())));
        if let Some(eos) = self.tokenizer.eos_id() {
            if ids.last() != Some(&eos) {
                ids.push(eos);
                trainable.push(true);
            }
            if let Some(last) = trainable.last_mut() {
                *last = true;
            }
        }
        Ok(Example { ids, trainable })
    }
}

/// Which tokens touch one of the spans, which are in order and do not overlap.
fn mask(offsets: &[(usize, usize)], spans: &[Range<usize>]) -> Vec<bool> {
    offsets
        .iter()
        .map(|(start, end)| {
            let after = spans.partition_point(|span| span.end <= *start);
            spans.get(after).is_some_and(|span| span.start < (*end).max(start + 1))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_trainable_when_it_touches_a_span() {
        let spans = [2..4, 4..6, 9..9, 10..12];
        let offsets = [
            (0, 2),
            (0, 3),
            (2, 3),
            (3, 5),
            (5, 7),
            (6, 9),
            (6, 6),
            (5, 5),
            (9, 10),
            (9, 11),
            (12, 13),
        ];
        let expected = [false, true, true, true, true, false, false, true, false, true, false];
        assert_eq!(mask(&offsets, &spans), expected);
    }
}
