//! How a text with calls has to be written, as a grammar in the form of `llguidance`'s Lark.
//!
//! ```text
//! start: thoughts? (calls | answer)      calls alone where one is asked for
//! calls: open call close ...             as the family's format has it
//! call:  {"name": "f", "arguments": ...  JSON of the tool's schema, or its properties one by one between tags
//! answer: content                        with a header before it where texts consist of messages
//! ```

use super::formats::{Format, Shape, Thinking};
use super::harmony::{self, pieces};
use super::markers::is_left_out;
use super::parameters::{self, END_FUNCTION, END_PARAMETER, FUNCTION, Kind, PARAMETER};
use super::{Choice, Tool};
use crate::constraint::{Constraint, LARGEST, quoted};
use crate::error::{ApiError, Result};
use metal_candle::text::Tokenizer;
use serde_json::{Value, json};
use std::fmt::Write as _;

/// Calls of one text where one at least is asked for, at most.
const MOST_FORCED: usize = 8;
/// The bytes of a grammar in which definitions are repeated, at most.
const LARGEST_GRAMMAR: usize = 4 * LARGEST;

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
        let rule = forced.answer.rule()?;
        match forced.format.shape {
            Shape::Message => {
                let header = rules.written(harmony::ANSWER)?;
                rules.add("answer", &format!("{header} content"));
                rules.add("content", &rule);
            }
            _ => rules.add("answer", &rule),
        }
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

    /// A text that has harmony's markers in it.
    fn written(&self, text: &str) -> Result<String> {
        let pieces = pieces(text).into_iter().map(|piece| self.marker(piece));
        Ok(pieces.collect::<Result<Vec<_>>>()?.join(" "))
    }

    fn special(&self, text: &str) -> Result<Option<u32>> {
        let Some(token) = self.tokenizer.token_to_id(text) else { return Ok(None) };
        Ok(is_left_out(self.tokenizer, token)?.then_some(token))
    }

    fn thoughts(&mut self, thinking: &Thinking) -> Result<()> {
        let (open, behind) = match thinking.is_in_messages() {
            true => (self.written(thinking.open)?, self.written(harmony::NEXT)?),
            false => (self.marker(thinking.open)?, "/[ \\n]{0,4}/".into()),
        };
        self.add("thought", &open);
        let close = self.marker(thinking.close)?;
        match self.special(thinking.close)? {
            Some(_) => self.add("thoughts", &format!("/(.|\\n)*/ {close} {behind}")),
            None => {
                self.add("thoughts", &format!("thinking {behind}"));
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
            Shape::Parameters => {
                let newline = quoted("\n");
                self.add("calls", &format!("call{}", more(&format!("{newline} call"))));
                self.add("call", &format!("{open} {newline} one {newline} {close}"));
                let end = quoted(&format!("\n{END_PARAMETER}\n"));
                self.add("text[lazy]", &format!("/(.|\\n)*/ {end}"));
            }
            // A call ends the text.
            Shape::Message => self.add("calls", "one"),
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
                Shape::Parameters => {
                    let before = format!("{FUNCTION}{}", tool.name);
                    format!("{} {arguments} {}", quoted(&before), quoted(END_FUNCTION))
                }
                Shape::Message => {
                    format!("{} {arguments}", self.written(&harmony::call_header(&tool.name))?)
                }
            };
            match format.shape {
                Shape::Parameters => self.parameters(&arguments, &tool.parameters)?,
                _ => self.add(&arguments, &format!("%json {}", compact(&tool.parameters))),
            }
            self.add(&format!("one{index}"), &one);
            ones.push(format!("one{index}"));
        }
        self.add("one", &ones.join(" | "));
        Ok(())
    }

    /// The rule of arguments between tags, from the end of the function's own on, in the order of the schema's
    /// properties. Texts are free but for the tag that ends them, or one of those that the schema lists; other values
    /// are JSON of their schema.
    fn parameters(&mut self, name: &str, schema: &Value) -> Result<()> {
        let Some(properties) = schema.get("properties").and_then(Value::as_object) else {
            let begin = quoted(PARAMETER);
            let end = quoted(">\n");
            self.add(name, &format!("{end} ({begin} /[^<>\\n]+/ {end} text)*"));
            return Ok(());
        };
        let required = schema.get("required").and_then(Value::as_array);
        let mut all = vec![quoted(">\n")];
        for (index, (key, property)) in properties.iter().enumerate() {
            let end = quoted(&format!("\n{END_PARAMETER}\n"));
            let listed = property.get("enum").and_then(Value::as_array);
            let listed: Option<Vec<&str>> =
                listed.and_then(|values| values.iter().map(Value::as_str).collect());
            let value = match (parameters::kind(property, schema), listed) {
                (Kind::Text, Some(texts)) if !texts.is_empty() => {
                    let texts: Vec<String> = texts.into_iter().map(quoted).collect();
                    format!("({}) {end}", texts.join(" | "))
                }
                (Kind::Any | Kind::Text, _) => "text".into(),
                (Kind::Json, _) => {
                    let value = format!("{name}_{index}");
                    self.add(&value, &format!("%json {}", part(property, schema)));
                    if self.source.len() > LARGEST_GRAMMAR {
                        let what =
                            "refer to large definitions too often for calls that have to be made";
                        return Err(ApiError::field("tools", what));
                    }
                    format!("{value} {end}")
                }
            };
            let is_required = required.is_some_and(|it| it.iter().any(|it| it == key.as_str()));
            let begin = quoted(&format!("{PARAMETER}{key}>\n"));
            all.push(format!("({begin} {value}){}", if is_required { "" } else { "?" }));
        }
        self.add(name, &all.join(" "));
        Ok(())
    }
}

/// A property's schema by itself, with what it refers to, if it does.
fn part(property: &Value, root: &Value) -> Value {
    let refers = property.to_string().contains("\"$ref\"");
    let mut schema = property.clone();
    if let (true, Value::Object(fields), Value::Object(root)) = (refers, &mut schema, root) {
        for key in ["$defs", "definitions"] {
            if let Some(definitions) = root.get(key) {
                fields.entry(key).or_insert_with(|| definitions.clone());
            }
        }
    }
    with_spaces(&mut schema);
    schema
}

/// The schema with the white space that models write calls with. Where a schema allows any value, an object is meant.
fn compact(schema: &Value) -> Value {
    let mut schema = schema.clone();
    with_spaces(&mut schema);
    if let Value::Object(fields) = &mut schema
        && !["type", "$ref", "anyOf", "oneOf", "allOf"].iter().any(|key| fields.contains_key(*key))
    {
        fields.insert("type".into(), "object".into());
    }
    schema
}

fn with_spaces(schema: &mut Value) {
    if let Value::Object(fields) = schema {
        let spaces =
            json!({"whitespace_flexible": false, "item_separator": ", ", "key_separator": ": "});
        fields.insert("x-guidance".into(), spaces);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::example;
    use metal_candle::generate::Grammars;
    use serde_json::Map;

    const FORMATS: [&str; 9] = [
        "harmony",
        "mistral-named",
        "mistral",
        "phi4-mini",
        "granite",
        "qwen3-coder",
        "hermes",
        "llama3",
        "told",
    ];

    fn tools() -> Vec<Tool> {
        let schema: Map<String, Value> = serde_json::from_value(json!({"type": "object",
            "properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"type": "integer"}}}))
        .unwrap();
        let tool = |name: &str, schema| Tool::new("tools", name.into(), None, schema).unwrap();
        let values: Map<String, Value> = serde_json::from_value(json!({"type": "object", "properties": {
            "s": {"type": "string"}, "e": {"type": "string", "enum": ["a", "\"b\""]}, "n": {"enum": [1, 2]},
            "l": {"type": "array"}, "m": {"type": ["string", "null"]}, "x": {}}, "required": ["s", "n"]}))
        .unwrap();
        let tools =
            [("f", Some(schema)), ("g-1", None), ("h", Some(Map::new())), ("i", Some(values))];
        tools.into_iter().map(|(name, schema)| tool(name, schema)).collect()
    }

    /// The grammar of calls of these tools, one at least, between tags.
    fn tagged(tools: &[Tool]) -> Result<String> {
        let forced = Forced {
            format: Format::named("qwen3-coder"),
            tools,
            choice: &Choice::Required,
            parallel: false,
            answer: &Constraint::None,
            thinking: None,
        };
        Ok(constrain(&example::tokenizer(&[]), &forced)?.unwrap())
    }

    #[test]
    fn arguments_between_tags_follow_their_schemas() {
        let source = tagged(&tools()).unwrap();
        for line in [
            r#"call: "<tool_call>" "\n" one "\n" "</tool_call>""#,
            r#"one1: "<function=g-1" arguments1 "</function>""#,
            r#"arguments0: ">\n" ("<parameter=a>\n" arguments0_0 "\n</parameter>\n")?"#,
            r#"arguments1: ">\n""#,
            r#"arguments2: ">\n" ("<parameter=" /[^<>\n]+/ ">\n" text)*"#,
            concat!(
                r#"arguments3: ">\n" ("<parameter=s>\n" text) "#,
                r#"("<parameter=e>\n" ("a" | "\"b\"") "\n</parameter>\n")? "#,
                r#"("<parameter=n>\n" arguments3_2 "\n</parameter>\n") "#,
                r#"("<parameter=l>\n" arguments3_3 "\n</parameter>\n")? "#,
                r#"("<parameter=m>\n" text)? ("<parameter=x>\n" text)?"#
            ),
        ] {
            assert!(source.lines().any(|it| it == line), "{line}\n{source}");
        }
        // No object where the schema lists numbers, and what is referred to is there.
        assert!(source.contains("arguments3_2: %json {\"enum\":[1,2],\"x-guidance\""), "{source}");
        assert!(source.contains("\"$defs\":{\"a\":{\"type\":\"integer\"}}"), "{source}");
    }

    #[test]
    fn definitions_are_not_repeated_without_end() {
        let properties: Map<String, Value> =
            (0..500).map(|n| (format!("p{n}"), json!({"$ref": "#/$defs/a"}))).collect();
        let definition = json!({"type": "integer", "description": "x".repeat(100_000)});
        let schema = json!({"properties": properties, "$defs": {"a": definition}});
        let Value::Object(schema) = schema else { unreachable!() };
        let tool = Tool::new("tools", "f".into(), None, Some(schema)).unwrap();
        assert_eq!(tagged(&[tool]).unwrap_err().param.as_deref(), Some("tools"));
    }

    #[test]
    fn every_formats_grammar_compiles_with_special_tokens_and_without() {
        let mut markers = vec![
            "[TOOL_CALLS]",
            "[ARGS]",
            "<|tool_call|>",
            "<|/tool_call|>",
            "<think>",
            "</think>",
        ];
        markers.extend(harmony::MARKERS);
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
                    let thinking = match format.shape {
                        Shape::Message => &harmony::THINKING,
                        _ => thinking,
                    };
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
    fn messages_have_their_headers() {
        let tools = example::tools(&["f"]);
        let answer = Constraint::Choice(vec!["a".into(), "b".into()]);
        let source = |special: &[&str], is_open| {
            let forced = Forced {
                format: Format::named("harmony"),
                tools: &tools,
                choice: &Choice::Auto,
                parallel: true,
                answer: &answer,
                thinking: Some((&harmony::THINKING, is_open)),
            };
            constrain(&example::tokenizer(special), &forced).unwrap().unwrap()
        };
        let literal = source(&[], false);
        for line in [
            r#"start: (thought thoughts)? body"#,
            r#"body: calls | answer"#,
            r#"thought: "<|channel|>" "analysis" "<|message|>""#,
            r#"thoughts: thinking "<|start|>" "assistant""#,
            r#"thinking[lazy]: /(.|\n)*/ "<|end|>""#,
            r#"answer: "<|channel|>" "final" "<|message|>" content"#,
            r#"content: "a" | "b""#,
            r#"calls: one"#,
            r#"one0: "<|channel|>" "commentary to=functions.f " "<|constrain|>" "json" "<|message|>" arguments0"#,
        ] {
            assert!(literal.lines().any(|it| it == line), "{line}\n{literal}");
        }
        let tokenizer = example::tokenizer(&harmony::MARKERS);
        let token = |text: &str| format!("<[{}]>", tokenizer.token_to_id(text).unwrap());
        let special = source(&harmony::MARKERS, true);
        let (end, start) = (token("<|end|>"), token("<|start|>"));
        let line = format!(r#"thoughts: /(.|\n)*/ {end} {start} "assistant""#);
        assert!(special.lines().any(|it| it == line), "{line}\n{special}");
        assert!(special.starts_with("start: thoughts body\n"), "{special}");
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
