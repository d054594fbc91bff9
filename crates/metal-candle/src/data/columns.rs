//! Which keys of a record hold what, where they are not the usual ones.

use serde_json::{Map, Value};

use super::dataset::SampleKind;
use crate::text::key_list;
use crate::{Error, Result};

/// The keys, or a table's columns, to take a record from. Where none is given, the shape of a record is recognised by
/// its keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Columns {
    /// What is given; a string or a list of messages. Without a completion it may be that of `chosen` and `rejected`.
    pub prompt: Option<Source>,
    /// What is to be learned; a string or a list of messages.
    pub completion: Option<Source>,
    /// Text to go on learning the language from.
    pub text: Option<Source>,
    /// A conversation: a list of messages.
    pub messages: Option<String>,
}

/// Where a value comes from: see [`Source::parse`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The value under a key.
    Key(String),
    /// A text with values in it.
    Template(Template),
}

/// A text with `{key}` where a value goes.
///
/// `{answers.text.0}` looks into objects and lists, `{{` and `}}` are braces, and `\n`, `\t` and `\\` are a line feed, a
/// tab and a backslash. Null is nothing, and what is no string is written as JSON.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Text(String),
    Key(String),
}

impl Template {
    /// A template from its text; `option` is what messages call it.
    ///
    /// # Errors
    /// [`Error::Option`] for a brace without its partner, and for a template that names no key.
    pub fn parse(option: &str, source: &str) -> Result<Self> {
        let wrong = |message: &str| {
            let written: String = source.chars().take(80).collect();
            Error::option(
                option,
                format!("{message} in `{written}`; {{{{ and }}}} are braces themselves"),
            )
        };
        let mut parts = Vec::new();
        let mut text = String::new();
        let mut characters = source.chars().peekable();
        while let Some(character) = characters.next() {
            match character {
                '{' if characters.next_if_eq(&'{').is_some() => text.push('{'),
                '}' if characters.next_if_eq(&'}').is_some() => text.push('}'),
                '{' => {
                    let mut key = String::new();
                    loop {
                        match characters.next() {
                            Some('}') => break,
                            Some('{') | None => return Err(wrong("a { has no }")),
                            Some(other) => key.push(other),
                        }
                    }
                    if key.trim().is_empty() {
                        return Err(wrong("nothing is named between { and }"));
                    }
                    parts.push(Part::Text(std::mem::take(&mut text)));
                    parts.push(Part::Key(key.trim().to_string()));
                }
                '}' => return Err(wrong("a } has no {")),
                '\\' => match characters.peek() {
                    Some('n') => {
                        characters.next();
                        text.push('\n');
                    }
                    Some('t') => {
                        characters.next();
                        text.push('\t');
                    }
                    Some('\\') => {
                        characters.next();
                        text.push('\\');
                    }
                    _ => text.push('\\'),
                },
                other => text.push(other),
            }
        }
        parts.push(Part::Text(text));
        if !parts.iter().any(|part| matches!(part, Part::Key(_))) {
            return Err(wrong("no column is named"));
        }
        Ok(Self(parts))
    }

    fn fill(&self, fields: &Map<String, Value>) -> std::result::Result<String, String> {
        let mut filled = String::new();
        for part in &self.0 {
            match part {
                Part::Text(text) => filled.push_str(text),
                Part::Key(key) => match lookup(fields, key)? {
                    Value::Null => {}
                    Value::String(text) => filled.push_str(text),
                    other => filled.push_str(&other.to_string()),
                },
            }
        }
        Ok(filled)
    }
}

impl Source {
    /// A source as a person writes it: the name of a key or, with braces in it, a [`Template`]. `option` is what
    /// messages call it.
    ///
    /// # Errors
    /// [`Error::Option`] when it is empty, and those of [`Template::parse`].
    pub fn parse(option: &str, text: &str) -> Result<Self> {
        if text.trim().is_empty() {
            Err(Error::option(
                option,
                "is empty, expected a column, or a text with columns in it such as {question}",
            ))
        } else if text.contains(['{', '}']) {
            Template::parse(option, text).map(Self::Template)
        } else {
            Ok(Self::Key(text.to_string()))
        }
    }

    /// The keys that it takes values from.
    pub(super) fn keys(&self) -> Vec<&str> {
        match self {
            Self::Key(key) => vec![key],
            Self::Template(Template(parts)) => parts
                .iter()
                .filter_map(|part| match part {
                    Part::Key(key) => Some(key.as_str()),
                    Part::Text(_) => None,
                })
                .collect(),
        }
    }

    /// What messages call it.
    pub(super) fn name<'a>(&'a self, usual: &'a str) -> &'a str {
        match self {
            Self::Key(key) => key,
            Self::Template(_) => usual,
        }
    }

    /// Whether it makes a text of what a record has.
    pub(super) fn is_template(&self) -> bool {
        matches!(self, Self::Template(_))
    }

    /// The value for a record.
    pub(super) fn value(&self, fields: &Map<String, Value>) -> std::result::Result<Value, String> {
        match self {
            Self::Key(key) => lookup(fields, key).cloned(),
            Self::Template(template) => template.fill(fields).map(Value::from),
        }
    }
}

impl Columns {
    /// Whether nothing is named, so that records are recognised by their keys.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Whether a record is a pair of answers under their usual keys, beside a prompt under another. With a completion, too,
    /// it is what is wanted of it.
    pub(super) fn have_pair(&self, fields: &Map<String, Value>, wanted: SampleKind) -> bool {
        let is_pair = is_there(fields, "chosen") && is_there(fields, "rejected");
        let is_prompt_alone = self.prompt.is_some() && self.completion.is_none();
        let is_completion = match wanted {
            SampleKind::Plain => true,
            SampleKind::Pair => false,
            SampleKind::Labelled => label(fields).is_some(),
        };
        let is_wanted = !(is_completion && is_there(fields, "completion"));
        is_prompt_alone && is_pair && is_wanted
    }

    /// The keys that a record is taken from.
    pub(super) fn keys(&self, fields: &Map<String, Value>) -> Vec<&str> {
        if let Some(key) = &self.messages {
            return vec![key, "system", "tools", "functions"];
        }
        if let Some(source) = &self.text {
            return source.keys();
        }
        let mut keys = vec!["tools", "functions"];
        if let Some(prompt) =
            self.prompt.as_ref().filter(|_| self.have_pair(fields, SampleKind::default()))
        {
            keys.extend(["chosen", "rejected"]);
            keys.extend(prompt.keys());
            return keys;
        }
        for (source, usual) in [(&self.prompt, "prompt"), (&self.completion, "completion")] {
            match source {
                Some(source) => keys.extend(source.keys()),
                None => keys.push(usual),
            }
        }
        keys
    }

    /// That what is named is one shape.
    ///
    /// # Errors
    /// [`Error::Option`] when columns of several shapes are named.
    pub fn check(&self) -> Result<()> {
        let pair = self.prompt.is_some() || self.completion.is_some();
        let shapes = [pair, self.text.is_some(), self.messages.is_some()];
        if shapes.iter().filter(|given| **given).count() > 1 {
            return Err(Error::option(
                "columns",
                "a record is taken from a prompt and a completion, from a text, or from messages; name the columns of \
                 one of these",
            ));
        }
        Ok(())
    }
}

/// Whether a key has a value. Files made from tables have every column in every record, null where it is not used.
pub(super) fn is_there(fields: &Map<String, Value>, key: &str) -> bool {
    fields.get(key).is_some_and(|value| !value.is_null())
}

/// Whether the label says that an answer is wanted, also in the words of tables. A number may be that of a class.
pub(super) fn label(fields: &Map<String, Value>) -> Option<bool> {
    match fields.get("label")? {
        Value::Bool(label) => Some(*label),
        Value::String(label) => match label.trim().to_lowercase().as_str() {
            "true" => Some(true),
            "false" => Some(false),
            _ => None,
        },
        _ => None,
    }
}

/// The value of a key, or of a path of keys and indices with dots between.
pub(super) fn lookup<'a>(
    fields: &'a Map<String, Value>,
    key: &str,
) -> std::result::Result<&'a Value, String> {
    if let Some(value) = fields.get(key) {
        return Ok(value);
    }
    let missing = || format!("there is no column {key:?}; the record has {}", key_list(fields));
    let mut steps = key.split('.');
    let mut value = steps.next().and_then(|first| fields.get(first)).ok_or_else(missing)?;
    for step in steps {
        value = match value {
            Value::Object(fields) => fields.get(step),
            Value::Array(items) => step.parse().ok().and_then(|index: usize| items.get(index)),
            _ => None,
        }
        .ok_or_else(missing)?;
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn fill(source: &str, fields: Value) -> std::result::Result<String, String> {
        let Value::Object(fields) = fields else { panic!("{fields}") };
        Template::parse("prompt_template", source).map_err(|error| error.to_string())?.fill(&fields)
    }

    #[test]
    fn templates_take_the_values_of_columns() {
        let fields = json!({"q": "Why?", "n": 3, "none": null, "a b": "x", "a": {"text": ["y"]}});
        let filled = fill(r"Question: {q}\nC:\\new {{{n}}} {a b}{none}{a.text.0}", fields.clone());
        assert_eq!(filled.unwrap(), "Question: Why?\nC:\\new {3} xy");
        for (source, expected) in [
            ("{q", "a { has no }"),
            ("q}", "a } has no {"),
            ("{}", "nothing is named"),
            ("q", "no column is named"),
            ("{r}", "there is no column \"r\"; the record has the keys \"q\""),
            ("{a.text.1}", "no column \"a.text.1\""),
        ] {
            let message = fill(source, fields.clone()).unwrap_err();
            assert!(message.contains(expected), "{source}: {message}");
        }
    }

    #[test]
    fn a_text_with_braces_is_a_template() {
        assert_eq!(Source::parse("x", "my text").unwrap(), Source::Key("my text".into()));
        let source = Source::parse("x", "{a}: {b.0}").unwrap();
        assert!(matches!(source, Source::Template(_)));
        assert_eq!(source.keys(), ["a", "b.0"]);
        for (text, expected) in [(" ", "x: is empty"), ("a}", "x: a } has no {")] {
            let message = Source::parse("x", text).unwrap_err().to_string();
            assert!(message.starts_with(expected), "{message}");
        }
    }

    #[test]
    fn columns_of_two_shapes_are_refused() {
        let key = |name: &str| Some(Source::Key(name.into()));
        assert!(Columns { prompt: key("q"), ..Columns::default() }.check().is_ok());
        assert!(
            Columns { prompt: key("q"), text: key("t"), ..Columns::default() }.check().is_err()
        );
    }
}
