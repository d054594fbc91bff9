//! Records: what one line of a data file says.
//!
//! ```json
//! {"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}], "tools": [...]}
//! {"prompt": "...", "completion": "..."}
//! {"prompt": [{"role": "user", ...}], "completion": [{"role": "assistant", ...}]}
//! {"text": "..."}
//! ```
//! A record with keys of several shapes is taken as the first of them in this order; other keys are passed over.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Map, Value};

use crate::text::{Message, is_model_role};
use crate::{Error, Result};

use crate::text::{key_list, kind};

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

/// What a record says.
#[derive(Debug, Clone, PartialEq)]
pub enum Body {
    /// A conversation.
    Messages {
        /// The messages, at least one.
        messages: Vec<Message>,
        /// The tools the model may call, as JSON schemas.
        tools: Option<Vec<Value>>,
    },
    /// A prompt and what should follow it, as plain text.
    PromptCompletion {
        /// What is given.
        prompt: String,
        /// What is to be learned.
        completion: String,
    },
    /// A conversation and how it should go on.
    ChatCompletion {
        /// The messages that are given, at least one.
        prompt: Vec<Message>,
        /// The messages to learn, at least one of them the model's.
        completion: Vec<Message>,
        /// The tools the model may call, as JSON schemas.
        tools: Option<Vec<Value>>,
    },
    /// Text to go on learning the language from.
    Text {
        /// The text, not empty.
        text: String,
    },
}

impl From<Body> for Record {
    fn from(body: Body) -> Self {
        Self { body, origin: None }
    }
}

impl Record {
    /// An error about this record, naming its file and line if it has them.
    pub(super) fn error(&self, index: usize, message: impl Into<String>) -> Error {
        match &self.origin {
            Some(origin) => Error::Record {
                path: origin.path.as_ref().clone(),
                line: origin.line,
                message: message.into(),
            },
            None => Error::option(format!("record {}", index + 1), message),
        }
    }
}

/// Reads a file of records: JSON lines, or one JSON array.
///
/// Blank lines and a byte-order mark are passed over.
///
/// # Errors
/// [`Error::Io`] when the file cannot be read; [`Error::Record`] with the line of the first record that is malformed
/// JSON, has none of the known shapes, an unknown role, or no messages; [`Error::File`] when there is no record.
pub fn read_records(path: &Path) -> Result<Vec<Record>> {
    let bytes = std::fs::read(path).map_err(Error::io(path))?;
    let bytes = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    let shared = Arc::new(path.to_path_buf());
    let at =
        |line: usize, message: String| Error::Record { path: path.to_path_buf(), line, message };
    let mut records = Vec::new();
    let mut add = |line: usize, value: Value| -> Result<()> {
        let body = body(value).map_err(|message| at(line, message))?;
        records.push(Record { body, origin: Some(Origin { path: shared.clone(), line }) });
        Ok(())
    };
    if bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'[') {
        let values: Vec<Value> = serde_json::from_slice(bytes)
            .map_err(|error| at(error.line().max(1), format!("malformed JSON array: {error}")))?;
        for (line, value) in lines_of_items(bytes).into_iter().zip(values) {
            add(line, value)?;
        }
    } else {
        for (index, line) in bytes.split(|byte| *byte == b'\n').enumerate() {
            if line.trim_ascii().is_empty() {
                continue;
            }
            let value = serde_json::from_slice(line).map_err(|error| {
                let whole = error.to_string();
                let words = whole.split(" at line ").next().unwrap_or(&whole);
                at(
                    index + 1,
                    format!(
                        "malformed JSON at column {}: {words}; each line holds one whole record",
                        error.column()
                    ),
                )
            })?;
            add(index + 1, value)?;
        }
    }
    if records.is_empty() {
        return Err(Error::file(path, "no records: the file is empty"));
    }
    Ok(records)
}

/// The line, counted from 1, on which each item of a well-formed JSON array starts.
fn lines_of_items(bytes: &[u8]) -> Vec<usize> {
    let (mut lines, mut line, mut depth) = (Vec::new(), 1, 0_usize);
    let (mut in_string, mut escaped, mut expecting) = (false, false, false);
    for byte in bytes {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        if expecting && depth == 1 && !byte.is_ascii_whitespace() && *byte != b']' {
            lines.push(line);
            expecting = false;
        }
        match byte {
            b'\n' => line += 1,
            b'"' => in_string = true,
            b'[' | b'{' => {
                expecting = depth == 0;
                depth += 1;
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            b',' if depth == 1 => expecting = true,
            _ => {}
        }
    }
    lines
}

const SHAPES: &str =
    "expected {\"messages\": [...]}, {\"prompt\": ..., \"completion\": ...} or {\"text\": \"...\"}";

fn body(value: Value) -> std::result::Result<Body, String> {
    let Value::Object(mut fields) = value else {
        return Err(format!("the record is {}; {SHAPES}", kind(&value)));
    };
    if let Some(messages) = present(&mut fields, "messages") {
        return Ok(Body::Messages {
            messages: conversation("messages", messages)?,
            tools: tools(&mut fields)?,
        });
    }
    if fields.contains_key("prompt") && fields.contains_key("completion") {
        let prompt = fields.remove("prompt").unwrap_or_default();
        let completion = fields.remove("completion").unwrap_or_default();
        return match (prompt, completion) {
            (Value::String(_), Value::String(completion)) if completion.is_empty() => {
                Err("\"completion\" is empty: there is nothing to learn".into())
            }
            (Value::String(prompt), Value::String(completion)) => {
                Ok(Body::PromptCompletion { prompt, completion })
            }
            (prompt @ Value::Array(_), completion @ Value::Array(_)) => {
                let prompt = conversation("prompt", prompt)?;
                let completion = conversation("completion", completion)?;
                if !completion.iter().any(Message::is_from_model) {
                    return Err("\"completion\" has no message with the role \"assistant\"".into());
                }
                Ok(Body::ChatCompletion { prompt, completion, tools: tools(&mut fields)? })
            }
            (prompt, completion) => Err(format!(
                "\"prompt\" is {} and \"completion\" is {}, expected two strings or two lists of messages",
                kind(&prompt),
                kind(&completion)
            )),
        };
    }
    if let Some(text) = present(&mut fields, "text") {
        return match text {
            Value::String(text) if text.is_empty() => Err("\"text\" is empty".into()),
            Value::String(text) => Ok(Body::Text { text }),
            other => Err(format!("\"text\" is {}, expected a string", kind(&other))),
        };
    }
    Err(format!("the record has {}; {SHAPES}", key_list(&fields)))
}

/// Files made from tables have every column in every record, null where it is not used.
fn present(fields: &mut Map<String, Value>, key: &str) -> Option<Value> {
    fields.remove(key).filter(|value| !value.is_null())
}

fn tools(fields: &mut Map<String, Value>) -> std::result::Result<Option<Vec<Value>>, String> {
    match present(fields, "tools") {
        None => Ok(None),
        Some(Value::Array(tools)) => match tools.iter().find(|tool| !tool.is_object()) {
            Some(other) => Err(format!("\"tools\" holds {}, expected JSON schemas", kind(other))),
            // An empty list is no tools: templates would else write an empty section about them.
            None => Ok(Some(tools).filter(|tools| !tools.is_empty())),
        },
        Some(other) => {
            Err(format!("\"tools\" is {}, expected a list of JSON schemas", kind(&other)))
        }
    }
}

fn conversation(key: &str, value: Value) -> std::result::Result<Vec<Message>, String> {
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
    let Value::Object(fields) = value else {
        return Err(format!("{}, expected an object with \"role\" and \"content\"", kind(&value)));
    };
    let message = Message::from_fields(fields)?;
    message.check_text()?;
    let role = message.role();
    if !KNOWN_ROLES.contains(&role) {
        return Err(format!("unknown role {role:?}; known are {}", KNOWN_ROLES.join(", ")));
    }
    // The model may only call a tool; everybody else says something.
    let speechless = is_model_role(role)
        && ["tool_calls", "function_call", "reasoning_content", "thinking", "reasoning"]
            .iter()
            .any(|key| message.get(key).is_some_and(|value| !value.is_null()));
    if message.text().is_none() && !speechless {
        return Err(format!(
            "a message of role {role:?} with {} and no \"content\"",
            key_list(message.fields())
        ));
    }
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
                ":3: the record has the keys \"instruction\", \"output\"; expected",
            ),
            ("{}", ":3: the record has no keys"),
            ("{\"text\": 3}", ":3: \"text\" is a number"),
            ("{\"text\": \"\"}", ":3: \"text\" is empty"),
            ("{\"prompt\": \"a\"}", ":3: the record has the keys \"prompt\""),
            (
                "{\"prompt\": \"a\", \"completion\": []}",
                ":3: \"prompt\" is a string and \"completion\" is a list",
            ),
            ("{\"prompt\": \"a\", \"completion\": \"\"}", ":3: \"completion\" is empty"),
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
