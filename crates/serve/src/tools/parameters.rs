//! Calls whose arguments stand between tags, as Qwen3-Coder writes them, and their values as JSON.
//!
//! ```text
//! <function=NAME>
//! <parameter=KEY>
//! a text as it is, or other values as JSON
//! </parameter>
//! </function>
//! ```

use super::Tool;
use super::calls::{Stop, Written};
use serde_json::Value;

/// What a call begins with, before its name and `>`.
pub const FUNCTION: &str = "<function=";
/// What a call ends with.
pub const END_FUNCTION: &str = "</function>";
/// What an argument begins with, before its name and `>`.
pub const PARAMETER: &str = "<parameter=";
/// What an argument ends with.
pub const END_PARAMETER: &str = "</parameter>";

/// Schemas that are looked at to learn the types of one, at most, as they may refer to themselves.
const MOST_SCHEMAS: usize = 64;

/// The call that a text begins with, and what follows it.
pub fn read<'a>(text: &'a str, tools: &[Tool]) -> Result<(Written, &'a str), Stop> {
    let (name, mut rest) = name(after(text, FUNCTION)?)?;
    let schema = tools.iter().find(|tool| tool.name == name).map(|tool| &tool.parameters);
    let mut arguments = Vec::new();
    loop {
        rest = rest.trim_start();
        match after(rest, END_FUNCTION) {
            Ok(rest) => {
                return Ok(((name.to_string(), format!("{{{}}}", arguments.join(", "))), rest));
            }
            Err(Stop::Unfinished) => return Err(Stop::Unfinished),
            Err(Stop::Wrong) => {}
        }
        let (key, begun) = self::name(after(rest, PARAMETER)?)?;
        let (value, following) = value(begun)?;
        arguments.push(format!("{}: {}", Value::from(key), json(value, key, schema)));
        rest = following;
    }
}

/// What follows a tag that the text begins with.
fn after<'a>(text: &'a str, tag: &str) -> Result<&'a str, Stop> {
    text.strip_prefix(tag).ok_or(match tag.starts_with(text) {
        true => Stop::Unfinished,
        false => Stop::Wrong,
    })
}

/// A name up to `>`, and what follows it.
fn name(text: &str) -> Result<(&str, &str), Stop> {
    let (name, rest) = match text.split_once('>') {
        Some((name, rest)) => (name, Ok(rest)),
        None => (text, Err(Stop::Unfinished)),
    };
    match name.contains(['<', '\n']) {
        true => Err(Stop::Wrong),
        false => Ok((name.trim(), rest?)),
    }
}

/// An argument's value, and what follows its end. A text may have the tag of the end in it, where nothing follows that
/// could follow the end.
fn value(text: &str) -> Result<(&str, &str), Stop> {
    for (end, _) in text.match_indices(END_PARAMETER) {
        let (value, rest) = text.split_at(end);
        let rest = rest.strip_prefix(END_PARAMETER).unwrap_or(rest);
        let next = rest.trim_start();
        if [PARAMETER, END_FUNCTION].iter().any(|tag| after(next, tag) != Err(Stop::Wrong)) {
            let value = value.strip_prefix('\n').unwrap_or(value);
            return Ok((value.strip_suffix('\n').unwrap_or(value), rest));
        }
    }
    Err(Stop::Unfinished)
}

/// What the value of an argument may be.
#[derive(Debug, PartialEq)]
pub enum Kind {
    /// Nothing is said about it.
    Any,
    /// A text, or perhaps another value.
    Text,
    /// JSON that is no text.
    Json,
}

/// What an argument's schema, which stands in `root`, lets its value be.
pub fn kind(schema: &Value, root: &Value) -> Kind {
    let types = types(schema, root);
    match types.as_slice() {
        [] => Kind::Any,
        types if types.contains(&"string") => Kind::Text,
        _ => Kind::Json,
    }
}

/// The types of a schema's values, as far as it says.
fn types<'a>(schema: &'a Value, root: &'a Value) -> Vec<&'a str> {
    let mut types = Vec::new();
    let mut next = vec![schema];
    for _ in 0..MOST_SCHEMAS {
        let Some(schema) = next.pop() else { break };
        add_types(schema, root, &mut types, &mut next);
    }
    types
}

/// Adds the types that a schema says itself, or else the schemas that say them.
fn add_types<'a>(
    schema: &'a Value,
    root: &'a Value,
    types: &mut Vec<&'a str>,
    next: &mut Vec<&'a Value>,
) {
    let mut add = |name: &'a str| {
        if !types.contains(&name) {
            types.push(name);
        }
    };
    match schema.get("type") {
        Some(Value::String(name)) => return add(name),
        Some(Value::Array(names)) => return names.iter().filter_map(Value::as_str).for_each(add),
        _ => {}
    }
    let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten();
    for value in values.chain(schema.get("const")) {
        add(type_of(value));
    }
    let target = schema.get("$ref").and_then(Value::as_str);
    let target = target.and_then(|it| it.strip_prefix('#')).and_then(|path| root.pointer(path));
    let parts = ["anyOf", "oneOf", "allOf"].iter().filter_map(|key| schema.get(*key)?.as_array());
    next.extend(target.into_iter().chain(parts.flatten()).take(MOST_SCHEMAS));
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// An argument's value as JSON: what its schema lets be JSON and is, and else a text.
fn json(written: &str, key: &str, schema: Option<&Value>) -> String {
    let own = schema.and_then(|root| Some((root.get("properties")?.get(key)?, root)));
    let types = own.map(|(schema, root)| types(schema, root)).unwrap_or_default();
    // As templates write what Python calls its values.
    let given = match written.trim() {
        "True" => "true",
        "False" => "false",
        "None" => "null",
        other => other,
    };
    let is_meant = |value: &Value| {
        let found = type_of(value);
        let is_listed = types.contains(&found) || found == "number" && types.contains(&"integer");
        match types.as_slice() {
            [] => found != "string",
            types if types.contains(&"string") => found != "string" && is_listed,
            _ => true,
        }
    };
    match serde_json::from_str::<Value>(given) {
        Ok(value) if is_meant(&value) => given.to_string(),
        _ => Value::from(written).to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn tools() -> Vec<Tool> {
        let schema = json!({"type": "object", "properties": {
            "text": {"type": "string"}, "count": {"type": "integer"}, "sure": {"type": "boolean"},
            "list": {"type": "array"}, "maybe": {"type": ["string", "null"]},
            "either": {"anyOf": [{"type": "number"}, {"type": "string"}]},
            "far": {"$ref": "#/$defs/far"}, "one": {"enum": ["1", "2"]}, "any": {}
        }, "$defs": {"far": {"type": "object"}}});
        let Value::Object(schema) = schema else { unreachable!() };
        vec![Tool::new("tools", "f".into(), None, Some(schema)).unwrap()]
    }

    fn arguments(key: &str, value: &str) -> Value {
        let text = format!("<function=f>\n<parameter={key}>\n{value}\n</parameter>\n</function>");
        let ((name, arguments), rest) = read(&text, &tools()).unwrap();
        assert_eq!((name.as_str(), rest), ("f", ""));
        serde_json::from_str::<Value>(&arguments).unwrap()[key].clone()
    }

    #[test]
    fn values_are_what_their_schema_says() {
        for (key, written, value) in [
            ("text", "1", json!("1")),
            ("text", " a\n\"b\"\n", json!(" a\n\"b\"\n")),
            ("text", "", json!("")),
            ("text", "a </parameter> b", json!("a </parameter> b")),
            ("text", "</function>", json!("</function>")),
            ("count", "12", json!(12)),
            ("count", "a dozen", json!("a dozen")),
            ("sure", "True", json!(true)),
            ("list", "[1, {\"a\": \"</parameter>\"}]", json!([1, {"a": "</parameter>"}])),
            ("maybe", "null", json!(null)),
            ("maybe", "1", json!("1")),
            ("either", "1.5", json!(1.5)),
            ("either", "one", json!("one")),
            ("far", "{\"a\": 1}", json!({"a": 1})),
            ("one", "1", json!("1")),
            ("any", "1", json!(1)),
            ("any", "Rome", json!("Rome")),
            ("unknown", "\"a\"", json!("\"a\"")),
        ] {
            assert_eq!(arguments(key, written), value, "{key}: {written}");
        }
    }

    #[test]
    fn what_is_no_call_is_told_from_what_is_none_yet() {
        let whole = "<function=f>\n<parameter=text>\na\n</parameter>\n</function>";
        for (end, _) in whole.char_indices() {
            assert_eq!(read(&whole[..end], &tools()), Err(Stop::Unfinished), "{end}");
        }
        for wrong in
            ["f()", "<function f>", "<function=f\n>", "<function=f>\ntext", "<function=f><p>"]
        {
            assert_eq!(read(wrong, &tools()), Err(Stop::Wrong), "{wrong}");
        }
        let ((_, arguments), rest) = read("<function=f></function>\n", &tools()).unwrap();
        assert_eq!((arguments.as_str(), rest), ("{}", "\n"));
    }

    #[test]
    fn schemas_that_refer_to_themselves_end() {
        let root = json!({"$ref": "#", "anyOf": [{"$ref": "#"}]});
        assert_eq!(kind(&root, &root), Kind::Any);
    }
}
