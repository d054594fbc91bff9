//! How a text with calls has to be written, as a grammar in the form of `llguidance`'s Lark.
//!
//! ```text
//! start: thoughts? (calls | answer)      calls alone where one is asked for
//! calls: open call close ...             as the family's format has it
//! call:  {"name": "f", "arguments": ...  JSON of the tool's schema
//! ```

use super::formats::{Format, Shape, Thinking};
use super::markers::is_left_out;
use super::{Choice, Tool};
use crate::constraint::{Constraint, quoted};
use crate::error::Result;
use metal_candle::text::Tokenizer;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Calls of one text where one at least is asked for, at most.
const MOST_FORCED: usize = 8;

/// What a text has to have.
#[derive(Debug)]
pub struct Forced<'a> {
    /// How calls are written, and which there may be.
    pub format: &'static Format,
    /// The tools.
    pub tools: &'a [Tool],
    /// Which of them are called.
    pub choice: &'a Choice,
    /// Whether there may be several calls.
    pub parallel: bool,
    /// What the answer has to be where there is no call.
    pub answer: &'a Constraint,
    /// How the model thinks, if it does, and whether the prompt ends in thoughts.
    pub thinking: Option<(&'static Thinking, bool)>,
}

/// The grammar of a text, if it needs one that is more than the answer's.
///
/// # Errors
/// When the answer's grammar cannot be a part of another one.
pub fn constrain(tokenizer: &Tokenizer, forced: &Forced) -> Result<Option<String>> {
    let free = *forced.answer == Constraint::None;
    let (calls, answer) = match forced.choice {
        Choice::Required | Choice::Named(_) => (true, false),
        Choice::Auto => (!free, !free),
        Choice::None => (false, !free),
    };
    // A grammar has rules of its own, so a text of one is written without thoughts before it.
    let alone = matches!(forced.answer, Constraint::Lark(_));
    let thinks = forced.thinking.is_some_and(|(_, is_open)| is_open || !alone);
    if !(calls || answer && thinks) {
        return Ok(None);
    }
    let mut rules = Rules { tokenizer, source: String::new() };
    let body = match (calls, answer) {
        (true, true) => "calls | answer",
        (true, false) => "calls",
        (false, _) => "answer",
    };
    match forced.thinking {
        Some((_, true)) => rules.add("start", "thoughts body"),
        Some((_, false)) => rules.add("start", "(thought thoughts)? body"),
        None => rules.add("start", "body"),
    }
    rules.add("body", body);
    if let Some((thinking, _)) = forced.thinking {
        rules.thoughts(thinking)?;
    }
    if answer {
        rules.add("answer", &forced.answer.rule()?);
    }
    if calls {
        rules.calls(forced)?;
    }
    Ok(Some(rules.source))
}

struct Rules<'a> {
    tokenizer: &'a Tokenizer,
    source: String,
}

impl Rules<'_> {
    fn add(&mut self, name: &str, right: &str) {
        // Writing to a string fails never.
        let _ = writeln!(self.source, "{name}: {right}");
    }

    /// A marker: a special token, or its text.
    fn marker(&self, text: &str) -> Result<String> {
        Ok(match self.special(text)? {
            Some(token) => format!("<[{token}]>"),
            None => quoted(text),
        })
    }

    fn special(&self, text: &str) -> Result<Option<u32>> {
        let Some(token) = self.tokenizer.token_to_id(text) else { return Ok(None) };
        Ok(is_left_out(self.tokenizer, token)?.then_some(token))
    }

    fn thoughts(&mut self, thinking: &Thinking) -> Result<()> {
        let open = self.marker(thinking.open)?;
        self.add("thought", &open);
        let close = self.marker(thinking.close)?;
        match self.special(thinking.close)? {
            Some(_) => self.add("thoughts", &format!("/(.|\\n)*/ {close} /[ \\n]{{0,4}}/")),
            None => {
                self.add("thoughts", "thinking /[ \\n]{0,4}/");
                self.add("thinking[lazy]", &format!("/(.|\\n)*/ {close}"));
            }
        }
        Ok(())
    }

    fn calls(&mut self, forced: &Forced) -> Result<()> {
        let Forced { format, tools, choice, parallel, .. } = forced;
        let named = |tool: &&Tool| match choice {
            Choice::Named(name) => tool.name == *name,
            Choice::None | Choice::Auto | Choice::Required => true,
        };
        let many = *parallel && !matches!(choice, Choice::Named(_));
        let more = |next: &str| match many {
            true => format!(" ({next}){{0,{}}}", MOST_FORCED - 1),
            false => String::new(),
        };
        let open = match format.bare {
            true => "\"\"".to_string(),
            false => self.marker(format.open)?,
        };
        let close = format.close.map(|close| self.marker(close)).transpose()?.unwrap_or_default();
        match format.shape {
            Shape::Object(before, after) => {
                let between = if format.bare { quoted("; ") } else { quoted("\n") };
                self.add("calls", &format!("call{}", more(&format!("{between} call"))));
                let texts = |text: &str| if text.is_empty() { String::new() } else { quoted(text) };
                let (before, after) = (texts(before), texts(after));
                let open = if format.bare { "" } else { &open };
                self.add("call", &format!("{open} {before} one {after} {close}"));
            }
            Shape::List => {
                let more = more("\", \" one");
                self.add("calls", &format!("{open} \"[\" one{more} \"]\" {close}"));
            }
            Shape::Named(_) => {
                self.add("calls", &format!("call{}", more("call")));
                self.add("call", &format!("{open} one"));
            }
        }
        let mut ones = Vec::new();
        for (index, tool) in tools.iter().filter(named).enumerate() {
            let arguments = format!("arguments{index}");
            let one = match format.shape {
                Shape::Named(marker) => {
                    format!("{} {} {arguments}", quoted(&tool.name), self.marker(marker)?)
                }
                Shape::Object(..) | Shape::List => {
                    let key = format.arguments;
                    let before = format!("{{\"name\": {}, {}: ", quoted(&tool.name), quoted(key));
                    format!("{} {arguments} \"}}\"", quoted(&before))
                }
            };
            self.add(&arguments, &format!("%json {}", compact(&tool.parameters)));
            self.add(&format!("one{index}"), &one);
            ones.push(format!("one{index}"));
        }
        self.add("one", &ones.join(" | "));
        Ok(())
    }
}

/// The schema with the white space that models write calls with. Where a schema allows any value, an object is meant.
fn compact(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(fields) = &mut schema {
        let spaces =
            json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        fields.insert("x-guidance".into(), spaces);
        if !["type", "$ref", "anyOf", "oneOf", "allOf"].iter().any(|key| fields.contains_key(*key))
        {
            fields.insert("type".into(), "object".into());
        }
    }
    schema
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::example;
    use metal_candle::generate::Grammars;
    use serde_json::Map;

    const FORMATS: [&str; 7] =
        ["mistral-named", "mistral", "phi4-mini", "granite", "hermes", "llama3", "told"];

    fn tools() -> Vec<Tool> {
        let schema: Map<String, Value> = serde_json::from_value(json!({"type": "object",
            "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "integer"}}}))
        .unwrap();
        let tool = |name: &str, schema| Tool::new("tools", name.into(), None, schema).unwrap();
        vec![tool("f", Some(schema)), tool("g-1", None), tool("h", Some(Map::new()))]
    }

    #[test]
    fn every_formats_grammar_compiles_with_special_tokens_and_without() {
        let markers =
            ["[TOOL_CALLS]", "[ARGS]", "<|tool_call|>", "<|/tool_call|>", "<think>", "</think>"];
        let thinking = Thinking { open: "<think>", close: "</think>" };
        let thinking: &'static Thinking = Box::leak(Box::new(thinking));
        let schema = Constraint::Schema("response_format", json!({"type": "integer"}));
        let tools = tools();
        for special in [&[][..], &markers[..]] {
            let tokenizer = example::tokenizer(special);
            let grammars = Grammars::new(&tokenizer, tokenizer.vocab_size() + 1).unwrap();
            for format in FORMATS.map(Format::named) {
                for (choice, answer) in [
                    (Choice::Required, &Constraint::None),
                    (Choice::Named("g-1".into()), &Constraint::None),
                    (Choice::Auto, &schema),
                ] {
                    for thinking in [None, Some((thinking, true)), Some((thinking, false))] {
                        for parallel in [true, false] {
                            let choice = &choice;
                            let forced = Forced {
                                format,
                                tools: &tools,
                                choice,
                                parallel,
                                answer,
                                thinking,
                            };
                            let source = constrain(&tokenizer, &forced).unwrap().unwrap();
                            let compiled = grammars.lark(&source);
                            assert!(compiled.is_ok(), "{}: {compiled:?}\n{source}", format.name);
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_may_be_anything_has_no_grammar() {
        let tokenizer = example::tokenizer(&[]);
        let (format, tools) = (Format::named("hermes"), tools());
        let constrain = |choice: &Choice, answer: &Constraint| {
            let (tools, parallel, thinking) = (tools.as_slice(), true, None);
            let forced = Forced { format, tools, choice, parallel, answer, thinking };
            super::constrain(&tokenizer, &forced)
        };
        let schema = Constraint::Schema("response_format", json!({"type": "integer"}));
        for (choice, answer) in [(Choice::Auto, &Constraint::None), (Choice::None, &schema)] {
            assert_eq!(constrain(&choice, answer).unwrap(), None);
        }
        let lark = Constraint::Lark("start: \"a\"".into());
        assert!(constrain(&Choice::Auto, &lark).is_err());
    }
}
