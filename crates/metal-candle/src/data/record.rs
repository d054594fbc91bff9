//! Records: what one row of a data file says.
//!
//! ```json
//! {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}
//! {"prompt": "...", "completion": "..."}
//! {"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}
//! {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}], "system": "..."}
//! {"instruction": "...", "input": "...", "output": "..."}
//! {"text": "..."}
//! {"prompt": "...", "chosen": "...", "rejected": "..."}
//! {"prompt": "...", "completion": "...", "label": true}
//! {"input": {"messages": [...]}, "preferred_output": [...], "non_preferred_output": [...]}
//! ```
//! A record with keys of several shapes is taken as the first of them in this order, or first as what is wanted of it
//! ([`SampleKind`]), as data sets of preferences have the better answer as a conversation beside the pair; other keys are
//! passed over. [`Columns`] name the keys where they are others. Preferences are as TRL or OpenAI writes them: prompt and
//! answers are texts or lists of messages, and without a prompt it is what both answers begin with.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use super::body::Body;
use super::columns::{Columns, Source, is_there, label, lookup};
use super::dataset::SampleKind;
use super::rows::{Row, RowContent, Rows};
use crate::text::{Message, is_model_role, key_list, kind};
use crate::{Error, Result};

/// The roles a message may have.
pub const KNOWN_ROLES: [&str; 8] =
    ["system", "developer", "user", "assistant", "tool", "function", "model", "ipython"];

/// Where a record stands in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Origin {
    /// The file.
    pub path: Arc<PathBuf>,
    /// The line it starts on, counted from 1.
    pub line: usize,
}

/// A record and where it came from.
#[derive(Debug, Clone, PartialEq)]
pub struct Record {
    /// What it says.
    pub body: Body,
    /// Its file and line; `None` for one made in memory.
    pub origin: Option<Origin>,
}

impl From<Body> for Record {
    fn from(body: Body) -> Self {
        Self { body, origin: None }
    }
}

impl Record {
    /// About how many bytes of text it holds.
    pub(super) fn size(&self) -> usize {
        self.body.texts().map(str::len).sum()
    }

    /// An error about this record, naming its file and line if it has them, and else its number.
    fn error(&self, index: usize, message: String) -> Error {
        match &self.origin {
            Some(origin) => {
                Error::Record { path: origin.path.as_ref().clone(), line: origin.line, message }
            }
            None => Error::option(format!("record {}", index + 1), message),
        }
    }

    /// What a template, a tokenizer or an option says about this record, with its place.
    pub(super) fn named(&self, index: usize, error: Error) -> Error {
        match error {
            Error::Template(message) => self.error(index, format!("chat template: {message}")),
            Error::Tokenizer(message) => self.error(index, format!("tokenizer: {message}")),
            Error::Option { option, message } => self.error(index, format!("{option}: {message}")),
            other => other,
        }
    }
}

/// Reads a file of records into memory: JSON Lines, JSON, CSV, TSV, Parquet or text, also compressed by gzip or zstd.
///
/// Blank lines and a byte-order mark are passed over. [`super::tokenize`] reads files that need not fit.
///
/// # Errors
/// [`Error::Io`] when the file cannot be read; [`Error::Record`] with the line of the first record that is malformed,
/// has none of the known shapes, an unknown role, or no messages; [`Error::File`] when there is no record, or when the
/// file is something else.
pub fn read_records(path: &Path) -> Result<Vec<Record>> {
    let (columns, wanted) = (Columns::default(), SampleKind::default());
    let records = Records::open(path, &columns, wanted)?.collect::<Result<Vec<_>>>()?;
    if records.is_empty() {
        return Err(Error::file(path, "no records: the file is empty"));
    }
    Ok(records)
}

/// As [`read_records`], of the first records alone, at most `count`; none of an empty file.
///
/// # Errors
/// Those of [`read_records`] about these records.
pub fn read_first_records(path: &Path, count: usize) -> Result<Vec<Record>> {
    Records::open(path, &Columns::default(), SampleKind::default())?.take(count).collect()
}

/// The records of a file, one after the other.
pub(super) struct Records<'a> {
    rows: Rows,
    columns: &'a Columns,
    wanted: SampleKind,
    path: Arc<PathBuf>,
}

impl<'a> Records<'a> {
    pub fn open(path: &Path, columns: &'a Columns, wanted: SampleKind) -> Result<Self> {
        Ok(Self { rows: Rows::open(path)?, columns, wanted, path: Arc::new(path.to_path_buf()) })
    }

    /// Passes over a record without looking at it; `None` at the end.
    pub fn pass_over(&mut self) -> Option<Result<()>> {
        self.rows.next().map(|row| row.map(|_| ()))
    }

    fn record(&self, row: Row) -> Result<Record> {
        let body = match row.content {
            RowContent::Text { text, last } => Body::Document { text, last },
            RowContent::Value(value) => {
                body(value, self.columns, self.wanted).map_err(|message| Error::Record {
                    path: self.path.as_ref().clone(),
                    line: row.line,
                    message,
                })?
            }
        };
        Ok(Record { body, origin: Some(Origin { path: self.path.clone(), line: row.line }) })
    }
}

impl Iterator for Records<'_> {
    type Item = Result<Record>;

    fn next(&mut self) -> Option<Self::Item> {
        let row = self.rows.next()?;
        Some(row.and_then(|row| self.record(row)))
    }
}

/// What keys a record has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Shape {
    /// `messages`, as OpenAI has them.
    Messages,
    /// `prompt` and `completion`.
    PromptCompletion,
    /// `conversations`, as ShareGPT has them.
    Conversations,
    /// `instruction` and `output`, as Alpaca has them, or Dolly's `response`.
    Instruction,
    /// `text`.
    Text,
    /// `chosen` and `rejected`, as TRL has them.
    Pair,
    /// `preferred_output` and `non_preferred_output`, as OpenAI has them.
    PreferredOutput,
    /// A completion with a `label`, as TRL has it.
    Labelled,
}

impl Shape {
    /// What people call records of this shape.
    pub fn name(self) -> &'static str {
        match self {
            Self::Messages => "conversations (messages with role and content)",
            Self::PromptCompletion => "prompts with completions",
            Self::Conversations => "ShareGPT conversations (messages with from and value)",
            Self::Instruction => "Alpaca instructions (instruction, input, output)",
            Self::Text => "texts",
            Self::Pair => "preference pairs (chosen and rejected)",
            Self::PreferredOutput => "preference pairs (preferred_output and non_preferred_output)",
            Self::Labelled => "labelled answers (completion and label)",
        }
    }

    /// The keys that a record of this shape is taken from.
    pub(super) fn keys(self) -> &'static [&'static str] {
        match self {
            Self::Messages => &["messages", "tools", "functions"],
            Self::PromptCompletion => &["prompt", "completion", "tools", "functions"],
            Self::Conversations => {
                &["conversations", "conversation", "system", "tools", "functions"]
            }
            Self::Instruction => {
                &["instruction", "input", "context", "output", "response", "system", "history"]
            }
            Self::Text => &["text"],
            Self::Pair => &["prompt", "chosen", "rejected", "tools", "functions"],
            Self::PreferredOutput => &["input", "preferred_output", "non_preferred_output"],
            Self::Labelled => &["prompt", "completion", "label", "tools", "functions"],
        }
    }

    /// The shape of a record by its keys, if it is a known one. What they say several times is taken as what is wanted,
    /// where that is a preference.
    pub(super) fn of(fields: &Map<String, Value>, wanted: SampleKind) -> Option<Self> {
        let there = |key: &str| is_there(fields, key);
        let is_pair = there("chosen") && there("rejected");
        let has_completion = there("prompt") && there("completion");
        let is_labelled = has_completion && label(fields).is_some();
        match wanted {
            SampleKind::Labelled if is_labelled => return Some(Self::Labelled),
            SampleKind::Pair | SampleKind::Labelled if is_pair => return Some(Self::Pair),
            _ => {}
        }
        if there("messages") {
            Some(Self::Messages)
        } else if is_labelled {
            Some(Self::Labelled)
        } else if has_completion {
            Some(Self::PromptCompletion)
        } else if there("conversations") || there("conversation") {
            Some(Self::Conversations)
        } else if there("instruction") && (there("output") || there("response")) {
            Some(Self::Instruction)
        } else if there("text") {
            Some(Self::Text)
        } else if is_pair {
            Some(Self::Pair)
        } else if there("preferred_output") && there("non_preferred_output") {
            Some(Self::PreferredOutput)
        } else if there("instruction")
            && (fields.contains_key("output") || fields.contains_key("response"))
        {
            // Nothing else fits, so it is an instruction without an answer.
            Some(Self::Instruction)
        } else if fields.contains_key("prompt") && fields.contains_key("completion") {
            // Here, too, and what is said about it is which of them is null.
            Some(Self::PromptCompletion)
        } else {
            None
        }
    }
}

const SHAPES: &str = "expected {\"messages\": [...]}, {\"prompt\": ..., \"completion\": ...}, \
                      {\"conversations\": [...]}, {\"instruction\": ..., \"output\": ...}, {\"text\": \"...\"} or, \
                      for preferences, {\"prompt\": ..., \"chosen\": ..., \"rejected\": ...}";

type Parsed<T> = std::result::Result<T, String>;

fn body(value: Value, columns: &Columns, wanted: SampleKind) -> Parsed<Body> {
    let Value::Object(mut fields) = value else {
        return Err(format!("the record is {}; {SHAPES}", kind(&value)));
    };
    if !columns.is_empty() {
        return mapped(fields, columns, wanted);
    }
    match Shape::of(&fields, wanted) {
        Some(Shape::Messages) => {
            let messages = fields.remove("messages").unwrap_or_default();
            Ok(Body::Messages {
                messages: conversation("messages", messages)?,
                tools: tools(&mut fields)?,
            })
        }
        Some(Shape::PromptCompletion) => completed(&mut fields),
        Some(Shape::Conversations) => {
            let is_plural = is_there(&fields, "conversations");
            let key = if is_plural { "conversations" } else { "conversation" };
            let value = fields.remove(key).unwrap_or_default();
            let mut messages = system(&mut fields)?;
            messages.extend(conversation(key, value)?);
            Ok(Body::Messages { messages, tools: tools(&mut fields)? })
        }
        Some(Shape::Instruction) => instruction(fields),
        Some(Shape::Text) => text("text", fields.remove("text").unwrap_or_default()),
        Some(Shape::Pair) => {
            let prompt = fields.remove("prompt");
            preference(fields, prompt, None)
        }
        Some(Shape::PreferredOutput) => preferred_output(fields),
        Some(Shape::Labelled) => {
            let desirable = label(&fields).ok_or("\"label\" is not true or false")?;
            Ok(Body::Labelled { answer: completed(&mut fields)?.into(), desirable })
        }
        None => Err(match fields.iter().find(|(key, value)| value.is_null() && is_usual(key)) {
            Some((key, _)) => format!("{key:?} is null; {SHAPES}"),
            None => format!(
                "the record has {}; {SHAPES}{}",
                key_list(&fields),
                columns_that_fit(&fields)
            ),
        }),
    }
}

/// A prompt and its completion under their usual keys.
fn completed(fields: &mut Map<String, Value>) -> Parsed<Body> {
    let both = ["prompt", "completion"].map(|key| fields.remove(key).unwrap_or_default());
    let [prompt, completion] = unpacked_together(both);
    pair(("prompt", prompt), ("completion", completion), fields)
}

/// Whether a key alone tells a record's shape.
fn is_usual(key: &str) -> bool {
    ["messages", "conversations", "conversation", "instruction", "text", "chosen", "rejected"]
        .contains(&key)
}

/// A record whose keys are named. Those of preferences have their usual names beside a prompt of another.
fn mapped(mut fields: Map<String, Value>, columns: &Columns, wanted: SampleKind) -> Parsed<Body> {
    if let Some(key) = &columns.messages {
        let value = lookup(&fields, key)?.clone();
        let mut messages = system(&mut fields)?;
        messages.extend(conversation(key, value)?);
        return Ok(Body::Messages { messages, tools: tools(&mut fields)? });
    }
    if let Some(source) = &columns.text {
        return text(source.name("text"), source.value(&fields)?);
    }
    let value = |source: &Option<Source>, usual: &str| match source {
        Some(source) => source.value(&fields),
        None => lookup(&fields, usual).cloned(),
    };
    let prompt = value(&columns.prompt, "prompt")?;
    if columns.have_pair(&fields, wanted) {
        return preference(fields, Some(prompt), columns.prompt.as_ref());
    }
    let completion = value(&columns.completion, "completion")?;
    let desirable = label(&fields).filter(|_| wanted == SampleKind::Labelled);
    // What a template makes is a text, whatever it looks like.
    let are_texts =
        [&columns.prompt, &columns.completion].into_iter().flatten().any(Source::is_template);
    let [prompt, completion] = match are_texts {
        true => [prompt, completion],
        false => unpacked_together([prompt, completion]),
    };
    let name = |source: &Option<Source>, usual: &str| {
        source.as_ref().map_or(usual, |source| source.name(usual)).to_string()
    };
    let (prompt_name, completion_name) =
        (name(&columns.prompt, "prompt"), name(&columns.completion, "completion"));
    let answer = pair((&prompt_name, prompt), (&completion_name, completion), &mut fields)?;
    Ok(match desirable {
        Some(desirable) => Body::Labelled { answer: answer.into(), desirable },
        None => answer,
    })
}

/// Which keys of a record without a known shape could be named, by the names that settings have for them.
fn columns_that_fit(fields: &Map<String, Value>) -> String {
    const PROMPTS: [&str; 7] =
        ["prompt", "question", "query", "instruction", "input", "source", "user"];
    const COMPLETIONS: [&str; 7] =
        ["completion", "answer", "response", "output", "target", "assistant", "chosen"];
    const TEXTS: [&str; 5] = ["content", "document", "article", "body", "story"];
    let there = |name: &&&str| fields.contains_key(**name);
    let prompt = PROMPTS.iter().find(there);
    let completion = COMPLETIONS.iter().find(there);
    match (prompt, completion, TEXTS.iter().find(there)) {
        (Some(prompt), Some(completion), _) => {
            format!(
                "; or name the columns, as prompt_column: {prompt} and completion_column: {completion}"
            )
        }
        (_, _, Some(text)) => format!("; or name the column, as text_column: {text}"),
        _ => "; or name others by prompt_column and completion_column, text_column or messages_column"
            .into(),
    }
}

fn text(key: &str, value: Value) -> Parsed<Body> {
    match value {
        Value::String(text) => Ok(Body::Text { text }),
        other => Err(format!("{key:?} is {}, expected a string", kind(&other))),
    }
}

/// A prompt and its completion, both strings or both lists of messages.
fn pair(
    (prompt_key, prompt): (&str, Value),
    (completion_key, completion): (&str, Value),
    fields: &mut Map<String, Value>,
) -> Parsed<Body> {
    match (prompt, completion) {
        (Value::String(prompt), Value::String(completion)) => {
            Ok(Body::PromptCompletion { prompt, completion })
        }
        (prompt @ Value::Array(_), completion @ Value::Array(_)) => {
            let prompt = conversation(prompt_key, prompt)?;
            let completion = answer(completion_key, completion)?;
            Ok(Body::ChatCompletion { prompt, completion, tools: tools(fields)? })
        }
        (prompt, completion) => Err(format!(
            "{prompt_key:?} is {} and {completion_key:?} is {}, expected two strings or two lists of messages; \
             a text with the column in it, as {{{prompt_key}}}, makes a string of anything",
            kind(&prompt),
            kind(&completion)
        )),
    }
}

/// A pair as TRL has it. Without a prompt it is what both answers have in common at their beginning. `source` is where the
/// prompt comes from, if that is named.
fn preference(
    mut fields: Map<String, Value>,
    prompt: Option<Value>,
    source: Option<&Source>,
) -> Parsed<Body> {
    // Each on its own: lists of messages beside texts are refused, as one of them would be learned as JSON otherwise.
    let messages_or_value = |value: Value| messages_in_text(&value).unwrap_or(value);
    let [chosen, rejected] =
        ["chosen", "rejected"].map(|key| messages_or_value(fields.remove(key).unwrap_or_default()));
    let is_made = source.is_some_and(Source::is_template);
    let prompt_key = source.map_or("prompt", |source| source.name("prompt"));
    let prompt = prompt.filter(|prompt| !prompt.is_null()).map(|prompt| match is_made {
        true => prompt,
        false => messages_or_value(prompt),
    });
    // As in UltraFeedback, whose prompt says once more what a message says that both answers begin with.
    let is_said_again = match (&prompt, &chosen, &rejected) {
        (Some(Value::String(text)), Value::Array(chosen), Value::Array(rejected)) => {
            !is_made && beginning(chosen, rejected).iter().any(|message| says(message, text))
        }
        _ => false,
    };
    let (prompt, chosen, rejected) = match prompt.filter(|_| !is_said_again) {
        Some(prompt) => (prompt, chosen, rejected),
        None => without_prompt(chosen, rejected)?,
    };
    let tools = tools(&mut fields)?;
    let of = |key: &str, answer: Value| {
        let mut fields = Map::new();
        if let Some(tools) = &tools {
            fields.insert("tools".into(), Value::from(tools.clone()));
        }
        // TRL's older data sets repeat the prompt in both answers.
        let answer = match (&prompt, answer) {
            (Value::Array(prompt), Value::Array(answer)) if answer.starts_with(prompt) => {
                Value::from(answer[prompt.len()..].to_vec())
            }
            (_, answer) => answer,
        };
        pair((prompt_key, prompt.clone()), (key, answer), &mut fields).map(Box::new)
    };
    Ok(Body::Pair { chosen: of("chosen", chosen)?, rejected: of("rejected", rejected)? })
}

const NO_PROMPT: &str = "\"chosen\" and \"rejected\" begin differently, so a \"prompt\" has to say what they answer: a list of \
                         messages where they are lists, a string where they are strings; one of another name is given by \
                         prompt_column";

/// The messages that both answers begin with. Where even the last message of one is the same, it is the answer
/// nevertheless.
fn beginning<'a>(chosen: &'a [Value], rejected: &[Value]) -> &'a [Value] {
    let most = chosen.len().min(rejected.len()).saturating_sub(1);
    let same = chosen.iter().zip(rejected).take_while(|(a, b)| a == b).count();
    chosen.get(..same.min(most)).unwrap_or_default()
}

/// Whether a message has this content, but for spaces around it, and nothing else.
fn says(value: &Value, text: &str) -> bool {
    let said = |message: Message| message.text().is_some_and(|said| said.trim() == text.trim());
    message(value.clone()).is_ok_and(said)
}

/// The prompt and the answers of two texts, or two conversations, that begin with the prompt.
fn without_prompt(chosen: Value, rejected: Value) -> Parsed<(Value, Value, Value)> {
    match (chosen, rejected) {
        (Value::Array(chosen), Value::Array(rejected)) => {
            let (prompt, chosen_answer) = chosen.split_at(beginning(&chosen, &rejected).len());
            if prompt.is_empty() {
                return Err(NO_PROMPT.into());
            }
            let rejected_answer = rejected[prompt.len()..].to_vec();
            Ok((prompt.to_vec().into(), chosen_answer.to_vec().into(), rejected_answer.into()))
        }
        (Value::String(chosen), Value::String(rejected)) => {
            let pairs = chosen.char_indices().zip(rejected.chars());
            let same = pairs.take_while(|((_, a), b)| a == b).last();
            let mut end = same.map_or(0, |((start, found), _)| start + found.len_utf8());
            // The space before a word is a part of it.
            if chosen[..end].ends_with(' ') {
                end -= 1;
            }
            let (prompt, chosen_answer) = chosen.split_at(end);
            if prompt.is_empty() {
                return Err(NO_PROMPT.into());
            }
            Ok((prompt.into(), chosen_answer.into(), rejected[end..].into()))
        }
        (chosen, rejected) => Err(format!(
            "\"chosen\" is {} and \"rejected\" is {}, expected two strings or two lists of messages",
            kind(&chosen),
            kind(&rejected)
        )),
    }
}

/// A pair as OpenAI has it: <https://platform.openai.com/docs/guides/direct-preference-optimization>.
fn preferred_output(mut fields: Map<String, Value>) -> Parsed<Body> {
    let mut input = match fields.remove("input") {
        Some(Value::Object(input)) => input,
        Some(other) => return Err(format!("\"input\" is {}, expected an object", kind(&other))),
        None => return Err("there is no \"input\", which has the messages of the prompt".into()),
    };
    let prompt = conversation("input.messages", input.remove("messages").unwrap_or_default())?;
    let tools = tools(&mut input)?;
    let mut of = |key: &str| {
        let completion = answer(key, fields.remove(key).unwrap_or_default())?;
        let (prompt, tools) = (prompt.clone(), tools.clone());
        Ok::<_, String>(Box::new(Body::ChatCompletion { prompt, completion, tools }))
    };
    Ok(Body::Pair { chosen: of("preferred_output")?, rejected: of("non_preferred_output")? })
}

/// The messages of an answer, at least one of them the model's.
fn answer(key: &str, value: Value) -> Parsed<Vec<Message>> {
    let messages = conversation(key, value)?;
    match messages.iter().any(Message::is_from_model) {
        true => Ok(messages),
        false => Err(format!("{key:?} has no message with the role \"assistant\"")),
    }
}

/// Alpaca's record, or Dolly's, where the input is called context and the output response.
fn instruction(mut fields: Map<String, Value>) -> Parsed<Body> {
    let mut string = |keys: [&str; 2]| -> Parsed<String> {
        for key in keys {
            match fields.remove(key) {
                None | Some(Value::Null) => {}
                Some(Value::String(text)) => return Ok(text),
                Some(other) => {
                    return Err(format!("{key:?} is {}, expected a string", kind(&other)));
                }
            }
        }
        Ok(String::new())
    };
    let instruction = string(["instruction", "instruction"])?;
    let input = string(["input", "context"])?;
    let output = string(["output", "response"])?;
    let mut before = system(&mut fields)?;
    match present(&mut fields, "history") {
        None => {}
        Some(Value::Array(turns)) => {
            for turn in turns {
                match turn.as_array().map(Vec::as_slice) {
                    Some([Value::String(question), Value::String(answer)]) => {
                        before.push(Message::new("user", question));
                        before.push(Message::new("assistant", answer));
                    }
                    _ => return Err("\"history\" is not a list of pairs of strings".into()),
                }
            }
        }
        Some(other) => {
            return Err(format!(
                "\"history\" is {}, expected a list of pairs of strings",
                kind(&other)
            ));
        }
    }
    Ok(Body::Instruction { before, instruction, input, output })
}

/// A system message that stands beside the conversation; none where it is empty.
fn system(fields: &mut Map<String, Value>) -> Parsed<Vec<Message>> {
    match present(fields, "system") {
        None => Ok(Vec::new()),
        Some(Value::String(text)) if text.is_empty() => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![Message::new("system", text)]),
        Some(other) => Err(format!("\"system\" is {}, expected a string", kind(&other))),
    }
}

/// The value of a key that has one.
fn present(fields: &mut Map<String, Value>, key: &str) -> Option<Value> {
    fields.remove(key).filter(|value| !value.is_null())
}

/// A list that a table holds as JSON in one field.
fn unpacked(value: Value) -> Value {
    match &value {
        Value::String(text) if text.trim_start().starts_with('[') => {
            serde_json::from_str(text).unwrap_or(value)
        }
        _ => value,
    }
}

/// Values of which a table holds each list of messages as JSON in one field. Where one of them is none, all stay as they
/// are: a prompt or an answer may be a text about messages, beside one that isn't.
fn unpacked_together<const N: usize>(values: [Value; N]) -> [Value; N] {
    let lists = values.each_ref().map(messages_in_text);
    let are_lists = |(value, list): (&Value, &Option<Value>)| value.is_array() || list.is_some();
    if !values.iter().zip(&lists).all(are_lists) {
        return values;
    }
    let mut lists = lists.into_iter();
    values.map(|value| lists.next().flatten().unwrap_or(value))
}

/// What a message of the model may have instead of content.
const SPEECHLESS: &[&str] =
    &["tool_calls", "function_call", "reasoning_content", "thinking", "reasoning"];

/// The list of messages that a text holds as JSON. Every item has to say who speaks and what is said, as JSON of anything
/// else is a text: that of flights has a `from`, too.
fn messages_in_text(value: &Value) -> Option<Value> {
    let text = value.as_str()?;
    if !text.trim_start().starts_with('[') {
        return None;
    }
    let list: Value = serde_json::from_str(text).ok()?;
    let has_speaker = |item: &Value| match item.get("role") {
        Some(role) => role.as_str().is_some_and(|role| KNOWN_ROLES.contains(&role)),
        None => item.get("from").and_then(Value::as_str).and_then(role_of_speaker).is_some(),
    };
    let is_message = |item: &Value| {
        let mut says = ["content", "value"].iter().chain(SPEECHLESS);
        has_speaker(item) && says.any(|key| item.get(key).is_some())
    };
    list.as_array().is_some_and(|it| !it.is_empty() && it.iter().all(is_message)).then_some(list)
}

fn tools(fields: &mut Map<String, Value>) -> Parsed<Option<Vec<Value>>> {
    let functions = |functions: Vec<Value>| {
        functions
            .into_iter()
            .map(|function| serde_json::json!({"type": "function", "function": function}))
            .collect()
    };
    let (key, value) = match (present(fields, "tools"), present(fields, "functions")) {
        (Some(tools), _) => ("tools", unpacked(tools)),
        // As OpenAI called them before.
        (None, Some(old)) => ("functions", unpacked(old)),
        (None, None) => return Ok(None),
    };
    match value {
        Value::Array(tools) => match tools.iter().find(|tool| !tool.is_object()) {
            Some(other) => Err(format!("{key:?} holds {}, expected JSON schemas", kind(other))),
            // An empty list is no tools: templates would else write an empty section about them.
            None if tools.is_empty() => Ok(None),
            None if key == "functions" => Ok(Some(functions(tools))),
            None => Ok(Some(tools)),
        },
        Value::String(text) if text.trim().is_empty() => Ok(None),
        other => Err(format!("{key:?} is {}, expected a list of JSON schemas", kind(&other))),
    }
}

fn conversation(key: &str, value: Value) -> std::result::Result<Vec<Message>, String> {
    let value = unpacked(value);
    let Value::Array(items) = value else {
        return Err(format!("{key:?} is {}, expected a list of messages", kind(&value)));
    };
    if items.is_empty() {
        return Err(format!("{key:?} is empty, expected at least one message"));
    }
    items
        .into_iter()
        .enumerate()
        .map(|(index, item)| message(item).map_err(|problem| format!("{key}[{index}]: {problem}")))
        .collect()
}

fn message(value: Value) -> std::result::Result<Message, String> {
    let Value::Object(mut fields) = value else {
        return Err(format!("{}, expected an object with \"role\" and \"content\"", kind(&value)));
    };
    if !fields.contains_key("role") && fields.contains_key("from") {
        fields = from_share_gpt(fields)?;
    }
    let message = Message::from_fields(fields)?;
    message.check_text()?;
    let role = message.role();
    if !KNOWN_ROLES.contains(&role) {
        return Err(format!("unknown role {role:?}; known are {}", KNOWN_ROLES.join(", ")));
    }
    // The model may only call a tool; everybody else says something.
    let speechless = is_model_role(role)
        && SPEECHLESS.iter().any(|key| message.get(key).is_some_and(|value| !value.is_null()));
    if message.text().is_none() && !speechless {
        return Err(format!(
            "a message of role {role:?} with {} and no \"content\"",
            key_list(message.fields())
        ));
    }
    Ok(message)
}

/// The role of whom ShareGPT calls so.
fn role_of_speaker(word: &str) -> Option<&'static str> {
    match word {
        "human" | "user" => Some("user"),
        "gpt" | "assistant" | "model" | "chatgpt" | "bing" | "bard" => Some("assistant"),
        "system" => Some("system"),
        "tool" | "function" | "function_response" | "observation" => Some("tool"),
        _ => None,
    }
}

/// ShareGPT's message: who speaks under `from`, what under `value`.
fn from_share_gpt(mut fields: Map<String, Value>) -> Parsed<Map<String, Value>> {
    let word = fields.get("from").and_then(Value::as_str).ok_or("\"from\" is not a string")?;
    let role = role_of_speaker(word).ok_or_else(|| {
        format!(
            "\"from\" is {word:?}; known are human, user, gpt, assistant, model, chatgpt, bing, bard, system, tool, \
             function, function_response and observation"
        )
    })?;
    fields.shift_remove("from");
    let mut message = Map::from_iter([("role".to_string(), Value::from(role))]);
    message.insert("content".into(), fields.shift_remove("value").unwrap_or_default());
    message.extend(fields);
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(content: &str) -> Result<Vec<Record>> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        std::fs::write(&path, content).unwrap();
        read_records(&path)
    }

    fn error(content: &str) -> String {
        let message = read(content).unwrap_err().to_string();
        message.split_once("data.jsonl").unwrap().1.to_string()
    }

    /// The first record of a file, where records are wanted as samples of a kind.
    fn first(record: &str, columns: &Columns, wanted: SampleKind) -> Result<Body> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        std::fs::write(&path, record).unwrap();
        let record = Records::open(&path, columns, wanted)?.next().unwrap()?;
        Ok(record.body)
    }

    fn text_pair(prompt: &str, chosen: &str, rejected: &str) -> Body {
        let of = |completion: &str| {
            let (prompt, completion) = (prompt.into(), completion.into());
            Box::new(Body::PromptCompletion { prompt, completion })
        };
        Body::Pair { chosen: of(chosen), rejected: of(rejected) }
    }

    #[test]
    fn a_conversation_beside_a_pair_is_taken_where_no_preferences_are_wanted() {
        let says = |role: &str, text: &str| format!(r#"{{"role": "{role}", "content": "{text}"}}"#);
        let (user, good) = (says("user", "Hi?"), says("assistant", "Good."));
        let bad = says("assistant", "Bad!");
        // UltraFeedback's.
        let answers =
            format!(r#""prompt": "Hi?", "chosen": [{user}, {good}], "rejected": [{user}, {bad}]"#);
        let both = format!(r#"{{{answers}, "messages": [{user}, {good}], "score_chosen": 8.5}}"#);
        let read = |record: &str, wanted| first(record, &Columns::default(), wanted).unwrap();
        assert!(matches!(read(&both, SampleKind::Plain), Body::Messages { .. }));
        let of = |text: &str| Body::ChatCompletion {
            prompt: vec![Message::new("user", "Hi?")],
            completion: vec![Message::new("assistant", text)],
            tools: None,
        };
        let pair = Body::Pair { chosen: of("Good.").into(), rejected: of("Bad!").into() };
        for wanted in [SampleKind::Pair, SampleKind::Labelled] {
            assert_eq!(read(&both, wanted), pair);
        }
        // Without the conversation there is one way to take it.
        assert_eq!(read(&format!("{{{answers}}}"), SampleKind::Plain), pair);
        let labelled = format!(
            r#"{{"messages": [{user}, {good}], "prompt": "a", "completion": "b", "label": false}}"#
        );
        assert!(matches!(
            read(&labelled, SampleKind::Labelled),
            Body::Labelled { desirable: false, .. }
        ));
        let begin_differently = format!(r#"{{"chosen": [{good}], "rejected": [{bad}]}}"#);
        assert!(error(&begin_differently).contains("begin differently"));
    }

    #[test]
    fn a_text_prompt_is_left_out_only_where_conversations_begin_with_it() {
        let messages = |answer: &str| {
            serde_json::json!([
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "Hi?"},
                {"role": "assistant", "content": answer}
            ])
        };
        let lists = [messages("Good."), messages("Bad!")];
        // As a table has them.
        let texts = lists.each_ref().map(|list| Value::from(list.to_string()));
        let read = |question: &str, [chosen, rejected]: &[Value; 2], source: Option<&str>| {
            let prompt = source.map(|source| Source::parse("prompt_column", source).unwrap());
            let key = if source.is_some() { "question" } else { "prompt" };
            let record = serde_json::json!({key: question, "chosen": chosen, "rejected": rejected});
            first(&record.to_string(), &Columns { prompt, ..Columns::default() }, SampleKind::Plain)
        };
        for answers in [&lists, &texts] {
            for source in [None, Some("question")] {
                let Body::Pair { chosen, .. } = read("Hi?", answers, source).unwrap() else {
                    panic!("{answers:?}")
                };
                let Body::ChatCompletion { prompt, .. } = *chosen else { panic!("{chosen:?}") };
                assert_eq!(prompt.len(), 2);
                let name = source.unwrap_or("prompt");
                let expected = format!("{name:?} is a string and \"chosen\" is a list");
                for other in ["Hi", "Good.", "Be brief. Hi?", ""] {
                    let message = read(other, answers, source).unwrap_err().to_string();
                    assert!(message.contains(&expected), "{other}: {message}");
                }
            }
            // What a template makes is wanted, also where it says the same.
            for template in ["{question}", "Be brief. {question}"] {
                let message = read("Hi?", answers, Some(template)).unwrap_err().to_string();
                let expected = "\"prompt\" is a string and \"chosen\" is a list";
                assert!(message.contains(expected), "{message}");
            }
        }
        let question = lists[0].to_string();
        let answers = ["b", "c"].map(Value::from);
        let made = read(&question, &answers, Some("{question}")).unwrap();
        assert_eq!(made, text_pair(&question, "b", "c"));
    }

    #[test]
    fn messages_as_json_beside_texts_are_no_preference() {
        let user = r#"[{"role": "user", "content": "Hi?"}]"#;
        let model = r#"[{"role": "assistant", "content": "Good."}]"#;
        for (prompt, chosen, rejected, expected) in [
            (Some("Hi?"), model, "Bad!", "\"prompt\" is a string and \"chosen\" is a list"),
            (Some("Hi?"), "Bad!", model, "\"prompt\" is a string and \"rejected\" is a list"),
            (Some(user), model, "Bad!", "\"prompt\" is a list and \"rejected\" is a string"),
            (Some(user), "Good.", "Bad!", "\"prompt\" is a list and \"chosen\" is a string"),
            (None, model, "Bad!", "\"chosen\" is a list and \"rejected\" is a string"),
        ] {
            let record =
                serde_json::json!({"prompt": prompt, "chosen": chosen, "rejected": rejected});
            let message = error(&record.to_string());
            assert!(message.contains(expected), "{record}: {message}");
        }
    }

    #[test]
    fn a_prompt_of_another_name_goes_with_preferences() {
        let columns =
            Columns { prompt: Some(Source::Key("question".into())), ..Columns::default() };
        let read = |record: &str, wanted| first(record, &columns, wanted);
        let pair = r#"{"question": "a", "chosen": "b", "rejected": "c"}"#;
        for wanted in [SampleKind::Plain, SampleKind::Pair, SampleKind::Labelled] {
            assert_eq!(read(pair, wanted).unwrap(), text_pair("a", "b", "c"));
        }
        let labelled = r#"{"question": "a", "completion": "b", "label": true}"#;
        let answer = Body::PromptCompletion { prompt: "a".into(), completion: "b".into() };
        assert_eq!(read(labelled, SampleKind::Plain).unwrap(), answer);
        let expected = Body::Labelled { answer: answer.into(), desirable: true };
        assert_eq!(read(labelled, SampleKind::Labelled).unwrap(), expected);
        assert!(read(r#"{"question": "a", "chosen": "b"}"#, SampleKind::Pair).is_err());
        // With both, it is what is wanted, as under the usual names.
        let both = r#"{"question": "a", "completion": "b", "label": true, "chosen": "c", "rejected": "d"}"#;
        let usual = both.replace("question", "prompt");
        for wanted in [SampleKind::Pair, SampleKind::Labelled] {
            let read_usual = first(&usual, &Columns::default(), wanted).unwrap();
            assert_eq!(read(both, wanted).unwrap(), read_usual);
            assert_eq!(matches!(read_usual, Body::Labelled { .. }), wanted == SampleKind::Labelled);
        }
    }

    #[test]
    fn json_that_is_no_list_of_messages_is_a_text() {
        let body = |record: &str| read(record).unwrap().remove(0).body;
        for (prompt, chosen, rejected) in [
            ("Primes?", "[2, 3, 5, 7]", "2, 3, 5"),
            ("[3, 1, 2]", "[1, 2, 3]", "[]"),
            ("a", r#"[{"role": "user"}]"#, "b"),
        ] {
            let record =
                serde_json::json!({ "prompt": prompt, "chosen": chosen, "rejected": rejected });
            assert_eq!(body(&record.to_string()), text_pair(prompt, chosen, rejected));
        }
        let text = |prompt: &str, completion: &str| Body::PromptCompletion {
            prompt: prompt.into(),
            completion: completion.into(),
        };
        for (prompt, completion) in [
            (r#"[{"from": "Berlin", "to": "Paris"}]"#, r#"[{"from": "Berlin", "price": 3}]"#),
            (r#"[{"role": "admin", "content": "a"}]"#, r#"[{"role": 3, "content": "b"}]"#),
            (r#"[{"role": "user"}]"#, r#"[{"from": "gpt", "text": "b"}]"#),
            (r#"[{"role": "user", "content": "a"}, 3]"#, r#"[{"from": "Rome", "value": "b"}]"#),
        ] {
            let record = serde_json::json!({ "prompt": prompt, "completion": completion });
            assert_eq!(body(&record.to_string()), text(prompt, completion));
            let record =
                serde_json::json!({ "prompt": "a", "chosen": prompt, "rejected": completion });
            assert_eq!(body(&record.to_string()), text_pair("a", prompt, completion));
        }
        // What a table has instead of lists.
        let user = r#"[{"role": "user", "content": "Hi?"}]"#;
        let model = r#" [{"from": "gpt", "value": "Good."}]"#;
        let record = serde_json::json!({ "prompt": user, "completion": model });
        let Body::ChatCompletion { prompt, completion, .. } = body(&record.to_string()) else {
            panic!("{record}")
        };
        assert_eq!((prompt[0].role(), completion[0].role()), ("user", "assistant"));
        let call = r#"[{"role": "assistant", "tool_calls": [{}]}]"#;
        let older = r#"[{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]"#;
        for call in [call, older] {
            let record = serde_json::json!({ "prompt": user, "completion": call });
            assert!(matches!(body(&record.to_string()), Body::ChatCompletion { .. }));
        }
        let record = serde_json::json!({ "prompt": user, "chosen": model, "rejected": model });
        let Body::Pair { chosen, .. } = body(&record.to_string()) else { panic!("{record}") };
        assert!(matches!(*chosen, Body::ChatCompletion { .. }));
        // Beside a text, or made by a template, it is one.
        let record = serde_json::json!({ "prompt": "Write a message.", "completion": user });
        assert_eq!(body(&record.to_string()), text("Write a message.", user));
        let columns = Columns {
            prompt: Some(Source::parse("prompt_column", "{prompt}").unwrap()),
            ..Columns::default()
        };
        let record = serde_json::json!({ "prompt": user, "completion": model });
        let made = first(&record.to_string(), &columns, SampleKind::Plain).unwrap();
        assert_eq!(made, text(user, model));
    }

    #[test]
    fn keys_without_values_are_no_shape() {
        let body = |record: &str| read(record).unwrap().remove(0).body;
        assert_eq!(
            body(r#"{"prompt": null, "completion": null, "text": "a"}"#),
            Body::Text { text: "a".into() }
        );
        assert_eq!(
            body(r#"{"prompt": "a", "completion": null, "chosen": "b", "rejected": "c"}"#),
            text_pair("a", "b", "c")
        );
        let instruction = |output: &str| Body::Instruction {
            before: Vec::new(),
            instruction: "a".into(),
            input: String::new(),
            output: output.into(),
        };
        for key in ["output", "response"] {
            let beside =
                |more: &str| body(&format!(r#"{{"instruction": "a", "{key}": null{more}}}"#));
            assert_eq!(beside(r#", "text": "b""#), Body::Text { text: "b".into() });
            let answers = r#", "prompt": "b", "chosen": "c", "rejected": "d""#;
            assert_eq!(beside(answers), text_pair("b", "c", "d"));
            assert_eq!(beside(""), instruction(""));
        }
        assert_eq!(
            body(r#"{"instruction": "a", "output": null, "response": "b"}"#),
            instruction("b")
        );
        let alone = error(r#"{"prompt": "a", "completion": null, "label": true}"#);
        assert!(alone.contains("\"prompt\" is a string and \"completion\" is null"), "{alone}");
    }

    #[test]
    fn every_shape_is_read_past_blank_lines_and_a_byte_order_mark() {
        let records = read(concat!(
            "\u{feff}{\"text\": \"a\"}\r\n",
            "\n  \n",
            "{\"prompt\": \"p\", \"completion\": \"c\", \"messages\": null}\n",
            "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"text\", \"text\": \"hi\"}]}, {\"role\": \"assistant\", \"content\": null, \"tool_calls\": [{}]}], \"tools\": [{\"name\": \"t\"}]}\n",
            "{\"prompt\": [{\"role\": \"user\", \"content\": \"p\"}], \"completion\": [{\"role\": \"assistant\", \"content\": \"c\"}]}"
        ))
        .unwrap();
        assert_eq!(
            records.iter().map(|record| record.origin.as_ref().unwrap().line).collect::<Vec<_>>(),
            [1, 4, 5, 6]
        );
        assert_eq!(records[0].body, Body::Text { text: "a".into() });
        assert_eq!(
            records[1].body,
            Body::PromptCompletion { prompt: "p".into(), completion: "c".into() }
        );
        assert!(
            matches!(&records[2].body, Body::Messages { messages, tools: Some(_) } if messages.len() == 2)
        );
        assert!(matches!(&records[3].body, Body::ChatCompletion { .. }));
    }

    #[test]
    fn labels_are_true_or_false_in_the_words_of_tables_too() {
        for (label, expected) in [
            ("true", Some(true)),
            ("\"False\"", Some(false)),
            ("\" TRUE\"", Some(true)),
            ("1", None),
            ("\"good\"", None),
        ] {
            let record = format!(r#"{{"prompt": "a", "completion": "b", "label": {label}}}"#);
            let found = match read(&record).unwrap().remove(0).body {
                Body::Labelled { desirable, .. } => Some(desirable),
                _ => None,
            };
            assert_eq!(found, expected, "{label}");
        }
        assert!(error(r#"{"text": null}"#).contains("\"text\" is null"));
    }

    #[test]
    fn an_array_is_read_with_the_lines_of_its_items() {
        let records = read(
            "\n[\n {\"text\": \"a, [\\\" {\"}, {\"text\": \"b\"},\n\n {\n\"text\": \"c\"}\n]\n",
        )
        .unwrap();
        assert_eq!(
            records.iter().map(|record| record.origin.as_ref().unwrap().line).collect::<Vec<_>>(),
            [3, 3, 5]
        );
        assert!(
            error("[\n{\"text\": \"a\"},\n{\"txt\": 1}]")
                .starts_with(":3: the record has the keys \"txt\"")
        );
        assert!(
            error("[\n{\"text\": \"a\"},\n{\"text\" 1}]").starts_with(":3: malformed JSON array")
        );
    }

    #[test]
    fn bytes_that_are_not_utf_8_are_an_error_with_their_line() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("data.jsonl");
        std::fs::write(&path, b"{\"text\": \"a\"}\n{\"text\": \"\xff\"}\n").unwrap();
        let message = read_records(&path).unwrap_err().to_string();
        assert!(message.contains("data.jsonl:2: malformed JSON at column"), "{message}");
    }

    #[test]
    fn errors_name_the_line_and_the_problem() {
        let good = "{\"text\": \"a\"}\n\n";
        for (line, expected) in [
            ("{\"text\": ", ":3: malformed JSON at column"),
            ("3", ":3: the record is a number; expected {\"messages\""),
            (
                "{\"instruction\": 1, \"output\": 2}",
                ":3: \"instruction\" is a number, expected a string",
            ),
            (
                "{\"question\": 1, \"answer\": 2}",
                ":3: the record has the keys \"question\", \"answer\"; expected",
            ),
            ("{}", ":3: the record has no keys"),
            ("{\"text\": 3}", ":3: \"text\" is a number"),
            ("{\"prompt\": \"a\"}", ":3: the record has the keys \"prompt\""),
            (
                "{\"prompt\": \"a\", \"completion\": []}",
                ":3: \"prompt\" is a string and \"completion\" is a list",
            ),
            ("{\"messages\": []}", ":3: \"messages\" is empty"),
            ("{\"messages\": \"x\"}", ":3: \"messages\" is a string"),
            (
                "{\"messages\": [{\"role\": \"user\"}]}",
                ":3: messages[0]: a message of role \"user\" with the keys",
            ),
            ("{\"messages\": [{\"content\": \"\"}]}", ":3: messages[0]: no \"role\""),
            (
                "{\"messages\": [{\"role\": \"user\", \"content\": \"\"}, {\"role\": \"bot\", \"content\": \"\"}]}",
                ":3: messages[1]: unknown role \"bot\"; known are system, developer, user, assistant, tool",
            ),
            (
                "{\"messages\": [{\"role\": \"user\", \"content\": [{\"type\": \"image\"}]}]}",
                ":3: messages[0]: a content part has type \"image\"",
            ),
            (
                "{\"messages\": [{\"role\": \"user\", \"content\": 3}]}",
                ":3: messages[0]: \"content\" is a number",
            ),
            (
                "{\"messages\": [{\"role\": \"user\", \"content\": \"\"}], \"tools\": {}}",
                ":3: \"tools\" is an object",
            ),
        ] {
            let message = error(&format!("{good}{line}\n{good}"));
            assert!(message.starts_with(expected), "{line}: {message}");
        }
        assert_eq!(error("\n \n"), ": no records: the file is empty");
    }
}
