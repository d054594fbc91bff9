//! One message of a conversation, kept as the JSON object it was read from.
//!
//! Templates look at keys this library knows nothing about (`tool_calls`, `reasoning_content`, `name`) and some print
//! the whole object, so every key stays, in its order.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Whether messages of this role are what the model writes: `assistant`, or `model` as Gemma's data calls it.
pub fn is_model_role(role: &str) -> bool {
    matches!(role, "assistant" | "model")
}

/// A message: a role, a content, and any other keys.
///
/// The content is a string, null or absent (an assistant that only calls tools), or a list of parts
/// `{"type": "text", "text": ...}`. In JSON a message is one flat object.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(transparent)]
pub struct Message {
    fields: Map<String, Value>,
}

impl Message {
    /// A message of plain text.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        let mut fields = Map::new();
        fields.insert("role".into(), Value::String(role.into()));
        fields.insert("content".into(), Value::String(content.into()));
        Self { fields }
    }

    /// A message from a JSON object with a role. What the content may be is up to the template; see
    /// [`Message::check_text`].
    ///
    /// # Errors
    /// What is wrong with the object, in words: no role, or one that is not a string.
    pub fn from_fields(fields: Map<String, Value>) -> Result<Self, String> {
        match fields.get("role") {
            Some(Value::String(_)) => {}
            Some(other) => return Err(format!("\"role\" is {}, expected a string", kind(other))),
            None => {
                return Err(format!(
                    "no \"role\" in a message with {}; expected \"role\" and \"content\"",
                    key_list(&fields)
                ));
            }
        }
        Ok(Self { fields })
    }

    /// Checks that the content is text, which is all that language models here read.
    ///
    /// # Errors
    /// What the content is instead, in words: a value that is not text, a part that is not text.
    pub fn check_text(&self) -> Result<(), String> {
        match self.fields.get("content") {
            None | Some(Value::Null | Value::String(_)) => {}
            Some(Value::Array(parts)) => {
                for part in parts {
                    let kind_of_part = part.get("type").and_then(Value::as_str);
                    match (kind_of_part, part.get("text")) {
                        (Some("text"), Some(Value::String(_))) => {}
                        (Some("text"), _) => {
                            return Err(
                                "a content part of type \"text\" has no string under \"text\""
                                    .into(),
                            );
                        }
                        (Some(other), _) => {
                            return Err(format!(
                                "a content part has type {other:?}; only parts of type \"text\" are supported"
                            ));
                        }
                        (None, _) => {
                            return Err(format!(
                                "a content part is {}, expected {{\"type\": \"text\", \"text\": ...}}",
                                kind(part)
                            ));
                        }
                    }
                }
            }
            Some(other) => {
                return Err(format!(
                    "\"content\" is {}, expected a string, null, or a list of {{\"type\": \"text\", \"text\": ...}}",
                    kind(other)
                ));
            }
        }
        Ok(())
    }

    /// The same message with another key set, for instance `tool_calls`.
    pub fn with(mut self, key: impl Into<String>, value: Value) -> Self {
        self.fields.insert(key.into(), value);
        self
    }

    /// Who speaks; empty if [`Message::with`] put something else than a string there.
    pub fn role(&self) -> &str {
        self.fields.get("role").and_then(Value::as_str).unwrap_or_default()
    }

    /// The content as one text, its parts joined; `None` when it is null or absent.
    pub fn text(&self) -> Option<String> {
        match self.fields.get("content") {
            Some(Value::String(_) | Value::Array(_)) => Some(self.texts().collect()),
            _ => None,
        }
    }

    /// The parts of the content that are text, in order.
    pub fn texts(&self) -> impl Iterator<Item = &str> {
        let (whole, parts) = match self.fields.get("content") {
            Some(Value::String(text)) => (Some(text.as_str()), None),
            Some(Value::Array(parts)) => (None, Some(parts)),
            _ => (None, None),
        };
        let parts = parts.into_iter().flatten();
        whole.into_iter().chain(parts.filter_map(|part| part.get("text").and_then(Value::as_str)))
    }

    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.fields.get(key)
    }

    /// Every key and value, in order.
    pub fn fields(&self) -> &Map<String, Value> {
        &self.fields
    }

    /// Whether the model is the one who speaks.
    pub fn is_from_model(&self) -> bool {
        is_model_role(self.role())
    }

    pub(super) fn set_content(&mut self, content: Value) {
        self.fields.insert("content".into(), content);
    }
}

impl<'de> Deserialize<'de> for Message {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let fields = Map::deserialize(deserializer)?;
        Self::from_fields(fields).map_err(serde::de::Error::custom)
    }
}

/// The JSON type of a value, in words for an error.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

/// The keys of an object, in words for an error.
pub(crate) fn key_list(fields: &Map<String, Value>) -> String {
    match fields.len() {
        0 => "no keys".into(),
        _ => format!(
            "the keys {}",
            fields.keys().map(|key| format!("{key:?}")).collect::<Vec<_>>().join(", ")
        ),
    }
}
