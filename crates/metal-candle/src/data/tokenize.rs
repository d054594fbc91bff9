//! Records to tokens and loss masks.
//!
//! A token is trainable when any byte of it lies in a span that is to be learned (see
//! [`crate::text::ChatTemplate::render_with_spans`]); the first token of a row never is, since nothing predicts it.
//! Files are read in parts and tokenized in parallel, so their records are never all in memory.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use chrono::NaiveDateTime;
use rayon::prelude::*;
use serde_json::Value;

use super::body::Body;
use super::dataset::{Collector, DataOptions, Dataset, Example, LossOn, Sample, Tokenized};
use super::record::Record;
use super::source::DataSource;
use crate::text::{Encoded, Message, RenderOptions, Rendered, Tokenizer};
use crate::{Error, Result};

/// Tokenizes the records of files, in parallel and in a stable order.
///
/// What becomes of a record is said at [`Dataset::build`]. A plain text file becomes examples of `max_seq_length`
/// tokens, each of which begins where the one before ends.
///
/// # Errors
/// [`Error::Io`], [`Error::File`] and [`Error::Record`] about a file or a record that cannot be read, and those of
/// [`Dataset::build`].
pub fn tokenize(
    sources: &[DataSource],
    tokenizer: &Tokenizer,
    options: &DataOptions,
) -> Result<Tokenized> {
    let builder = Builder::new(tokenizer, options);
    let mut collector = Collector::new(options)?;
    for source in sources {
        source.in_parts(options.samples, |records| builder.collect(&records, &mut collector))?;
        collector.end_source(source.weight);
    }
    collector.finish()
}

impl Dataset {
    /// Tokenizes records, in parallel and in a stable order.
    ///
    /// Conversations go through the tokenizer's chat template. A prompt and completion of plain text do too, as a
    /// user's and an assistant's message, when there is a template; otherwise they are put together as they are, and
    /// an instruction as Alpaca writes it. After such a pair and after a text comes the EOS token, when the tokenizer
    /// has one and did not add it. A message of the model with `"weight": 0` is not learned.
    ///
    /// # Errors
    /// [`Error::Record`] (or [`Error::Option`] for a record made in memory) for the first record that does not go
    /// through the template or the tokenizer; [`Error::File`] when conversations need a template and there is none;
    /// [`Error::Option`] when `max_seq_length` is below 2, when `loss_on` asks for turns that the records don't have,
    /// or when no example is left.
    pub fn build(records: &[Record], tokenizer: &Tokenizer, options: &DataOptions) -> Result<Self> {
        let mut collector = Collector::new(options)?;
        Builder::new(tokenizer, options).collect(records, &mut collector)?;
        collector.end_source(None);
        collector.finish()?.into_dataset()
    }
}

/// What a record becomes.
enum Built {
    Empty,
    /// One for each record, and for a text file any number.
    Samples(Vec<Sample>),
}

/// A record's text as the model reads it.
pub(super) struct Written {
    pub text: String,
    /// The bytes that are to be learned, in order; `None` for all of it.
    learned: Option<Vec<Range<usize>>>,
    /// Whether it is no conversation, so that the tokenizer puts around it what it puts around a text.
    is_plain: bool,
}

/// Makes examples of records.
pub(super) struct Builder<'a> {
    pub tokenizer: &'a Tokenizer,
    pub options: &'a DataOptions,
    now: NaiveDateTime,
    /// Whether it was said that answers end without a token that ends them.
    warned_of_end: AtomicBool,
    /// Whether it was said that the template leaves calls out.
    warned_of_calls: AtomicBool,
}

impl<'a> Builder<'a> {
    pub fn new(tokenizer: &'a Tokenizer, options: &'a DataOptions) -> Self {
        let now = options.now.unwrap_or_else(|| chrono::Local::now().naive_local());
        let warned_of_end = AtomicBool::new(false);
        let warned_of_calls = AtomicBool::new(false);
        Self { tokenizer, options, now, warned_of_end, warned_of_calls }
    }

    /// Tokenizes records.
    fn collect(&self, records: &[Record], collector: &mut Collector) -> Result<()> {
        let built: Vec<Result<Built>> = records
            .par_iter()
            .enumerate()
            .map(|(index, record)| {
                self.build(&record.body).map_err(|error| record.named(index, error))
            })
            .collect();
        for built in built {
            match built? {
                Built::Empty => collector.push_empty(),
                Built::Samples(samples) => {
                    for sample in &samples {
                        collector.push(sample)?;
                    }
                }
            }
        }
        Ok(())
    }

    /// The record's tokens before truncation, or as many as show that it will be.
    fn build(&self, body: &Body) -> Result<Built> {
        if let Body::Document { text, last } = body
            && !text.is_empty()
        {
            let examples = self.windows(text, *last)?.into_iter();
            return Ok(Built::Samples(examples.map(Sample::Plain).collect()));
        }
        // One more token than an example keeps shows that it was cut.
        let most = self.options.max_seq_length.saturating_add(1);
        if let (Body::Pair { .. } | Body::Labelled { .. }, Some(LossOn::All | LossOn::Assistant)) =
            (body, self.options.loss_on)
        {
            return Err(Error::option(
                "loss_on",
                "is for supervised fine-tuning; of preferences the answers count: leave it out",
            ));
        }
        let mut examples = Vec::new();
        for part in body.parts() {
            match self.write(part)? {
                None => return Ok(Built::Empty),
                Some(written) => examples.push(self.encode(&written, most)?.0),
            }
        }
        let mut examples = examples.into_iter();
        let sample = match (body, examples.next(), examples.next()) {
            (Body::Labelled { desirable, .. }, Some(answer), _) => {
                Sample::Labelled { answer, desirable: *desirable }
            }
            (_, Some(chosen), Some(rejected)) => Sample::Pair { chosen, rejected },
            (_, Some(example), None) => Sample::Plain(example),
            (_, None, _) => return Ok(Built::Empty),
        };
        Ok(Built::Samples(vec![sample]))
    }

    /// The record's text; `None` when there is nothing to learn in it.
    pub fn write(&self, body: &Body) -> Result<Option<Written>> {
        if body.is_empty() {
            return Ok(None);
        }
        let loss_on = self.options.loss_on;
        Ok(Some(match body {
            Body::Pair { .. } | Body::Labelled { .. } => {
                return Err(Error::option("data", "of preferences are written answer by answer"));
            }
            Body::Messages { messages, tools } => {
                let first = match loss_on.unwrap_or(LossOn::Assistant) {
                    LossOn::All => None,
                    LossOn::Assistant => Some(0),
                    LossOn::Completion => Some(
                        messages.iter().rposition(Message::is_from_model).unwrap_or(messages.len()),
                    ),
                };
                self.chat(messages, tools.as_deref(), first)?
            }
            Body::ChatCompletion { prompt, completion, tools } => {
                let first = match loss_on.unwrap_or(LossOn::Completion) {
                    LossOn::All => None,
                    LossOn::Assistant => Some(0),
                    LossOn::Completion => Some(prompt.len()),
                };
                let messages = [prompt.as_slice(), completion.as_slice()].concat();
                self.chat(&messages, tools.as_deref(), first)?
            }
            Body::PromptCompletion { prompt, completion } => {
                self.pair(&[], prompt, prompt, completion)?
            }
            Body::Instruction { before, instruction, input, output } => {
                let question = if input.is_empty() {
                    instruction.clone()
                } else {
                    format!("{instruction}\n\n{input}")
                };
                self.pair(before, &question, &alpaca_prompt(instruction, input), output)?
            }
            Body::Text { text } | Body::Document { text, .. } => {
                self.no_turns()?;
                plain(text.clone(), 0)
            }
        }))
    }

    /// That `loss_on` asks for no turns, as a text has none.
    fn no_turns(&self) -> Result<()> {
        let name = match self.options.loss_on {
            None | Some(LossOn::All) => return Ok(()),
            Some(LossOn::Assistant) => "assistant",
            Some(LossOn::Completion) => "completion",
        };
        Err(Error::option(
            "loss_on",
            format!(
                "is {name:?}, but a \"text\" record has no turns: use \"all\", or leave it out"
            ),
        ))
    }

    /// A prompt and its completion: through the template as `question`, after the messages before, or without a
    /// template as the plain `prompt`.
    fn pair(
        &self,
        before: &[Message],
        question: &str,
        prompt: &str,
        completion: &str,
    ) -> Result<Written> {
        let on_all = self.options.loss_on == Some(LossOn::All);
        if self.tokenizer.chat_template().is_none() && before.is_empty() {
            let text = format!("{prompt}{completion}");
            return Ok(plain(text, if on_all { 0 } else { prompt.len() }));
        }
        let mut messages = before.to_vec();
        messages.push(Message::new("user", question));
        messages.push(Message::new("assistant", completion));
        let first = match self.options.loss_on {
            Some(LossOn::All) => None,
            Some(LossOn::Assistant) => Some(0),
            None | Some(LossOn::Completion) => Some(before.len()),
        };
        self.chat(&messages, None, first)
    }

    /// A conversation. What the model's messages from index `first` on write is learned; everything when `None`.
    fn chat(
        &self,
        messages: &[Message],
        tools: Option<&[Value]>,
        first: Option<usize>,
    ) -> Result<Written> {
        let template = self.tokenizer.require_chat_template()?;
        let messages = &*template.fitted(messages);
        let options = RenderOptions {
            add_generation_prompt: false,
            tools,
            variables: Some(&self.options.variables),
            now: Some(self.now),
        };
        let Some(first) = first else {
            let text = template.render(messages, &options)?;
            return Ok(Written { text, learned: None, is_plain: false });
        };
        let mut rendered = template.render_with_spans_from(messages, &options, first)?;
        if rendered.unended && !self.warned_of_end.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                "what is learned of the last answer of a conversation ends without a special token, so the model may not learn \
                 to stop: write the token that ends a turn (such as eos_token) after every answer in the chat template, and \
                 before {{% endgeneration %}} where it has that"
            );
        }
        if !self.warned_of_calls.load(Ordering::Relaxed)
            && !shows_calls(messages, first, &rendered)
            && !self.warned_of_calls.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                "the chat template leaves out \"tool_calls\" of an assistant's message, so they are not learned, and where \
                 its content is empty, an empty answer is: use a template that writes calls"
            );
        }
        leave_out_weightless(messages, first, &mut rendered.assistant)?;
        Ok(Written { text: rendered.text, learned: Some(rendered.assistant), is_plain: false })
    }

    /// The tokens of a record's text, at least the first `most` of them, and the bytes that each stands for. A plain
    /// text ends with the EOS token, which stands for none.
    pub fn encode(&self, written: &Written, most: usize) -> Result<(Example, Vec<(usize, usize)>)> {
        let Written { text, learned, is_plain } = written;
        let (mut ids, mut offsets): Encoded = self.tokenizer.encode_first(text, *is_plain, most)?;
        let mut trainable = match learned {
            None => vec![true; ids.len()],
            Some(spans) => mask(&offsets, spans),
        };
        if *is_plain {
            self.end(&mut ids, &mut trainable);
            offsets.resize(ids.len(), (text.len(), text.len()));
        }
        Ok((Example { ids, trainable }, offsets))
    }

    /// Ends a text by the EOS token, which is learned. Of a text that will be cut, the token is cut with the rest.
    fn end(&self, ids: &mut Vec<u32>, trainable: &mut Vec<bool>) {
        if let Some(eos) = self.tokenizer.eos_id() {
            if ids.last() != Some(&eos) {
                ids.push(eos);
                trainable.push(true);
            }
            if let Some(last) = trainable.last_mut() {
                *last = true;
            }
        }
    }

    /// A text as examples of at most `max_seq_length` tokens, each of which begins where the one before ends.
    pub fn windows(&self, text: &str, last: bool) -> Result<Vec<Example>> {
        self.no_turns()?;
        let most = self.options.max_seq_length;
        let mut examples = Vec::new();
        let mut rest = text;
        loop {
            let (mut ids, mut offsets) =
                self.tokenizer.encode_first(rest, true, most.saturating_add(1))?;
            let fits = ids.len() <= most;
            if !fits {
                ids.truncate(most);
                // A token that was added around the text stands nowhere in it.
                let next = offsets.get(most).filter(|(start, end)| start < end);
                let cut = next.map_or(rest.len(), |(start, _)| *start);
                offsets.truncate(most);
                // A character that is several tokens goes to the next example as a whole.
                while offsets.len() > 1 && offsets.last().is_some_and(|(_, end)| *end > cut) {
                    offsets.pop();
                    ids.pop();
                }
            }
            let end = offsets.iter().map(|(_, end)| *end).max().unwrap_or(0);
            let mut trainable = vec![true; ids.len()];
            if fits && last && ids.len() < most {
                self.end(&mut ids, &mut trainable);
            }
            examples.push(Example { ids, trainable });
            rest = match rest.get(end..) {
                Some(rest) if !fits && end > 0 && !rest.is_empty() => rest,
                _ => return Ok(examples),
            };
        }
    }
}

/// Whether what the model's messages from index `first` on call is in what is learned.
fn shows_calls(messages: &[Message], first: usize, rendered: &Rendered) -> bool {
    let learned = |name: &str| {
        let mut spans = rendered.assistant.iter();
        spans.any(|span| rendered.text.get(span.clone()).is_some_and(|it| it.contains(name)))
    };
    let messages = messages.iter().skip(first).filter(|message| message.is_from_model());
    let calls = messages.filter_map(|message| message.get("tool_calls")?.as_array()).flatten();
    let mut names =
        calls.filter_map(|call| call.get("function").unwrap_or(call).get("name")?.as_str());
    names.all(learned)
}

/// A text outside of any conversation, learned from the byte `from` on.
fn plain(text: String, from: usize) -> Written {
    let learned = from..text.len();
    Written { text, learned: Some(vec![learned]), is_plain: true }
}

/// The prompt by which Alpaca was trained, for tokenizers without a chat template.
fn alpaca_prompt(instruction: &str, input: &str) -> String {
    if input.is_empty() {
        format!(
            "Below is an instruction that describes a task. Write a response that appropriately completes the \
             request.\n\n### Instruction:\n{instruction}\n\n### Response:\n"
        )
    } else {
        format!(
            "Below is an instruction that describes a task, paired with an input that provides further context. Write \
             a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### \
             Input:\n{input}\n\n### Response:\n"
        )
    }
}

/// Takes away the spans of messages with `"weight": 0`, as OpenAI has it.
fn leave_out_weightless(
    messages: &[Message],
    first: usize,
    spans: &mut Vec<Range<usize>>,
) -> Result<()> {
    let learned = messages
        .iter()
        .enumerate()
        .skip(first)
        .filter(|(_, message)| message.is_from_model())
        .map(|(index, message)| match message.get("weight") {
            None | Some(Value::Null) => Ok(true),
            Some(weight) => match weight.as_f64() {
                Some(0.0) => Ok(false),
                Some(1.0) => Ok(true),
                _ => Err(Error::option(
                    "weight",
                    format!("is {weight} in message {}, expected 0 or 1", index + 1),
                )),
            },
        })
        .collect::<Result<Vec<bool>>>()?;
    if learned.iter().all(|learned| *learned) {
        return Ok(());
    }
    if learned.len() != spans.len() {
        return Err(Error::Template(
            "cannot tell which part of the rendered conversation a message with \"weight\": 0 wrote, as the template \
             has other generation blocks than one a message; leave the weights out"
                .into(),
        ));
    }
    let mut learned = learned.into_iter();
    spans.retain(|_| learned.next().unwrap_or(true));
    Ok(())
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
    fn calls_that_a_template_leaves_out_are_found() {
        let call = serde_json::json!([{"function": {"name": "add", "arguments": {}}}]);
        let messages = [
            Message::new("user", "add"),
            Message::new("assistant", "").with("tool_calls", call),
            Message::new("assistant", "Done."),
        ];
        let rendered = |text: &str| Rendered {
            text: format!("add|{text}|Done."),
            assistant: std::iter::once(4..4 + text.len()).collect(),
            unended: false,
        };
        assert!(shows_calls(&messages, 0, &rendered("[add]")));
        assert!(!shows_calls(&messages, 0, &rendered("")));
        assert!(shows_calls(&messages, 2, &rendered("")));
    }

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
