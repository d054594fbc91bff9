//! Tools: what a model may call, and how the families write calls and what they think before an answer.
//!
//! `formats.rs` is a table of the families' formats, found by what a chat template has in it. `parser.rs` takes a text
//! apart as it comes, `harmony.rs` one that consists of messages, `calls.rs` reads the calls in it, `parameters.rs` those
//! whose arguments stand between tags, `grammar.rs` says how a call has to be written where one is asked for,
//! `history.rs` writes calls and their results into conversations for templates that know of none, and `markers.rs` puts
//! the special tokens into a text that it has been decoded without. `apart.rs` is for texts that no request asked for.

mod apart;
mod calls;
mod formats;
mod grammar;
mod harmony;
mod history;
mod markers;
mod parameters;
mod parser;

pub use apart::{Apart, Said};
pub use formats::{Format, Thinking};
pub use grammar::{Forced, constrain};
pub use history::rendered;
pub use markers::{Markers, find_markers};
pub use parser::{Call, Parser, Part};

use crate::constraint::LARGEST;
use crate::error::{ApiError, Result};
use serde::Deserialize;
use serde_json::{Map, Value, json};

/// Tools of a request, at most.
const MOST_TOOLS: usize = 128;
/// The characters of a tool's name, at most.
const LONGEST_NAME: usize = 64;

/// A tool as a request has it.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolField {
    #[serde(rename = "type")]
    kind: String,
    function: Option<FunctionField>,
    /// Refused: tools that take a text.
    custom: Option<Value>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct FunctionField {
    name: String,
    description: Option<String>,
    parameters: Option<Map<String, Value>>,
    /// Calls that must be made follow the schema in any case.
    #[serde(rename = "strict")]
    _strict: Option<bool>,
}

/// A tool that a model may call.
#[derive(Debug, Clone, PartialEq)]
pub struct Tool {
    /// Its name: letters, digits, underscores, dashes and dots.
    pub name: String,
    /// What it does.
    pub description: Option<String>,
    /// The JSON schema of its arguments.
    pub parameters: Value,
}

impl Tool {
    /// A tool.
    ///
    /// # Errors
    /// A 400 that names what is wrong under `field`.
    pub fn new(
        field: &str,
        name: String,
        description: Option<String>,
        parameters: Option<Map<String, Value>>,
    ) -> Result<Self> {
        let of_name = |it: char| it.is_ascii_alphanumeric() || matches!(it, '_' | '-' | '.');
        if !(1..=LONGEST_NAME).contains(&name.len()) || !name.chars().all(of_name) {
            let found = metal_candle::readable(&name);
            let what = format!(
                "is {found:?}, expected 1 to {LONGEST_NAME} letters, digits, underscores, dashes and dots"
            );
            return Err(ApiError::field(format!("{field}.name"), what));
        }
        let nothing = || json!({"type": "object", "properties": {}});
        let parameters = parameters.map_or_else(nothing, Value::Object);
        Ok(Self { name, description, parameters })
    }

    /// As chat templates know tools.
    pub fn for_template(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".into(), self.name.as_str().into());
        if let Some(description) = &self.description {
            function.insert("description".into(), description.as_str().into());
        }
        function.insert("parameters".into(), self.parameters.clone());
        json!({"type": "function", "function": function})
    }
}

/// The tools of a request.
///
/// # Errors
/// A 400 that names what is wrong.
pub fn read(fields: Option<Vec<ToolField>>) -> Result<Vec<Tool>> {
    let read = |(index, field): (usize, ToolField)| {
        let name = format!("tools[{index}]");
        if field.custom.is_some() || field.kind != "function" {
            let found = metal_candle::readable(&field.kind);
            let what = format!("is {found:?}; there are tools of type \"function\" alone");
            return Err(ApiError::field(format!("{name}.type"), what));
        }
        let function = format!("{name}.function");
        let Some(given) = field.function else {
            return Err(ApiError::field(function, "is missing"));
        };
        Tool::new(&function, given.name, given.description, given.parameters)
    };
    let tools = fields.into_iter().flatten().enumerate().map(read).collect::<Result<Vec<_>>>()?;
    check(&tools)?;
    Ok(tools)
}

/// That tools are few and small, and have names of their own.
///
/// # Errors
/// A 400 that names what is wrong.
pub fn check(tools: &[Tool]) -> Result<()> {
    if tools.len() > MOST_TOOLS {
        let what = format!("has {} tools, expected at most {MOST_TOOLS}", tools.len());
        return Err(ApiError::field("tools", what));
    }
    for (index, tool) in tools.iter().enumerate() {
        if tools.iter().take(index).any(|other| other.name == tool.name) {
            let what = format!("{:?} is the name of another tool, too", tool.name);
            return Err(ApiError::field(format!("tools[{index}].function.name"), what));
        }
    }
    let size: usize = tools.iter().map(|tool| tool.for_template().to_string().len()).sum();
    if size > LARGEST {
        let what = format!("have {size} bytes of JSON, expected at most {LARGEST}");
        return Err(ApiError::field("tools", what));
    }
    Ok(())
}

/// Which of the tools are called.
#[derive(Debug, Clone, PartialEq)]
pub enum Choice {
    /// None, and the model doesn't learn of them.
    None,
    /// What the model likes.
    Auto,
    /// One at least.
    Required,
    /// This one.
    Named(String),
}

impl Choice {
    /// What `tool_choice` says about `tools`.
    ///
    /// # Errors
    /// A 400 that names what is wrong.
    pub fn read(choice: Option<&Value>, tools: &[Tool]) -> Result<Self> {
        const FIELD: &str = "tool_choice";
        let expected = "expected \"none\", \"auto\", \"required\" or \
                        {\"type\": \"function\", \"function\": {\"name\": ...}}";
        let choice = match choice {
            None if tools.is_empty() => Self::None,
            None => Self::Auto,
            Some(Value::String(word)) => match word.as_str() {
                "none" => Self::None,
                "auto" => Self::Auto,
                "required" => Self::Required,
                _ => return Err(ApiError::field(FIELD, expected)),
            },
            Some(Value::Object(fields)) => {
                let kind = fields.get("type").and_then(Value::as_str);
                let function = fields.get("function").and_then(Value::as_object);
                let name = function.and_then(|it| it.get("name")).and_then(Value::as_str);
                match (kind, name) {
                    (Some("function"), Some(name)) if fields.len() == 2 => Self::Named(name.into()),
                    (Some(kind @ ("allowed_tools" | "custom")), _) => {
                        let instead = "name a function, or give only the tools that are allowed";
                        return Err(ApiError::unsupported(format!("{FIELD}.{kind}"), instead));
                    }
                    _ => return Err(ApiError::field(FIELD, expected)),
                }
            }
            Some(_) => return Err(ApiError::field(FIELD, expected)),
        };
        choice.check(tools)?;
        Ok(choice)
    }

    /// That there are the tools it asks for.
    ///
    /// # Errors
    /// A 400 about `tool_choice`.
    pub fn check(&self, tools: &[Tool]) -> Result<()> {
        match self {
            Self::None => Ok(()),
            Self::Named(name) if !tools.iter().any(|tool| tool.name == *name) => {
                let name = metal_candle::readable(name);
                Err(ApiError::field(
                    "tool_choice",
                    format!("there is no tool {name:?} in \"tools\""),
                ))
            }
            _ if tools.is_empty() => {
                Err(ApiError::field("tool_choice", "needs \"tools\", and there are none"))
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(value: Value) -> Result<Vec<Tool>> {
        read(serde_json::from_value(value).unwrap())
    }

    #[test]
    fn tools_are_read_and_what_is_wrong_is_named() {
        let read = tools(json!([{"type": "function", "function": {"name": "f"}}])).unwrap();
        let shown = json!({"type": "function", "function":
            {"name": "f", "parameters": {"type": "object", "properties": {}}}});
        assert_eq!(read[0].for_template(), shown);
        let field = |value| tools(value).unwrap_err().param.unwrap();
        assert_eq!(field(json!([{"type": "x"}])), "tools[0].type");
        assert_eq!(field(json!([{"type": "custom", "custom": {}}])), "tools[0].type");
        assert_eq!(field(json!([{"type": "function"}])), "tools[0].function");
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        assert_eq!(field(json!([named("f"), named("a b")])), "tools[1].function.name");
        assert_eq!(field(json!([named("f"), named("f")])), "tools[1].function.name");
        assert_eq!(field(Value::from(vec![named("f"); 129])), "tools");
    }

    #[test]
    fn choices_name_tools_that_there_are() {
        let tools = tools(json!([{"type": "function", "function": {"name": "f"}}])).unwrap();
        let read = |choice: Value| Choice::read(Some(&choice), &tools);
        assert_eq!(Choice::read(None, &tools).unwrap(), Choice::Auto);
        assert_eq!(Choice::read(None, &[]).unwrap(), Choice::None);
        assert_eq!(read(json!("required")).unwrap(), Choice::Required);
        let named = |name: &str| json!({"type": "function", "function": {"name": name}});
        assert_eq!(read(named("f")).unwrap(), Choice::Named("f".into()));
        for wrong in [named("g"), json!("any"), json!(1), json!({"type": "function"})] {
            assert_eq!(read(wrong).unwrap_err().param.as_deref(), Some("tool_choice"));
        }
        assert!(read(json!({"type": "allowed_tools"})).is_err());
        assert!(Choice::read(Some(&json!("required")), &[]).is_err());
    }
}

/// Tokenizers, tools and texts for tests.
#[cfg(test)]
mod example {
    use super::{Parser, Part, Tool};
    use metal_candle::text::{Tokenizer, TokenizerFiles};
    use serde_json::{Value, json};
    use std::path::Path;
    use std::sync::Arc;

    /// Tools of these names, of whose arguments nothing is known.
    pub fn tools(names: &[&str]) -> Arc<[Tool]> {
        let tool = |name: &&str| Tool::new("tools", (*name).into(), None, None).unwrap();
        names.iter().map(tool).collect()
    }

    /// The parts joined: thoughts in brackets, calls as `name(arguments)`.
    pub fn joined(parts: Vec<Part>) -> String {
        let (mut thoughts, mut text, mut calls) = (String::new(), String::new(), String::new());
        for part in parts {
            match part {
                Part::Reasoning(more) => thoughts += &more,
                Part::Text(more) => text += &more,
                Part::Call(call) => {
                    assert!(call.id.starts_with("call_"));
                    calls += &format!("{}({})", call.name, call.arguments);
                }
            }
        }
        format!("[{thoughts}]{text}|{calls}")
    }

    /// What comes of a text at once, in two pieces split at every byte, and byte by byte, which has to be the same.
    pub fn parsed(parser: &Parser, text: &str) -> String {
        let run = |pieces: &[&str]| {
            let mut parser = parser.clone();
            let mut parts: Vec<Part> = pieces.iter().flat_map(|it| parser.push(it)).collect();
            parts.extend(parser.finish());
            joined(parts)
        };
        let whole = run(&[text]);
        let places: Vec<usize> = text.char_indices().map(|(place, _)| place).collect();
        for place in &places {
            let (before, after) = text.split_at(*place);
            assert_eq!(run(&[before, after]), whole, "split at {place}");
        }
        let characters: Vec<String> = text.chars().map(String::from).collect();
        let characters: Vec<&str> = characters.iter().map(String::as_str).collect();
        assert_eq!(run(&characters), whole, "by characters");
        whole
    }

    /// The demo's tokenizer, to which these special tokens are added.
    pub fn tokenizer(special: &[&str]) -> Tokenizer {
        let folder = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../cli/demo/base"));
        let mut files = TokenizerFiles::read(folder).unwrap();
        let mut tokenizer: Value = serde_json::from_slice(&files.tokenizer).unwrap();
        let first = tokenizer["model"]["vocab"].as_object().unwrap().len();
        let added = tokenizer["added_tokens"].as_array_mut().unwrap();
        let first = first
            .max(added.iter().map(|it| it["id"].as_u64().unwrap() as usize + 1).max().unwrap());
        for (index, text) in special.iter().enumerate() {
            added.push(json!({"id": first + index, "content": text, "special": true,
                "single_word": false, "lstrip": false, "rstrip": false, "normalized": false}));
        }
        files.tokenizer = tokenizer.to_string().into_bytes();
        Tokenizer::from_files(folder, &files).unwrap()
    }
}
