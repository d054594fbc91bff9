//! The calls in what stands between a format's markers, with arguments exactly as the model wrote them.

use super::formats::{CALL_ID, Format, Shape};
use super::{Tool, parameters};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Deserializer, Value};

/// Calls of one text, at most.
pub const MOST_CALLS: usize = 128;

/// A call: the tool's name and its arguments, which are an object in JSON.
pub type Written = (String, String);

/// What a body is.
#[derive(Debug, PartialEq)]
pub enum Read {
    /// These calls, and what follows them.
    Calls(Vec<Written>, String),
    /// The beginning of calls.
    Unfinished,
    /// Something else.
    Wrong,
}

/// Reads the calls in a body: objects or lists of them, one after the other, or names with arguments. Of `tools` are the
/// schemas of arguments that aren't written as JSON.
pub fn read(format: &Format, body: &str, tools: &[Tool]) -> Read {
    let mut calls = Vec::new();
    let mut rest = body.trim_start();
    loop {
        let read = match (rest.chars().next(), format.shape) {
            (Some('{' | '['), _) => value(rest).and_then(|(value, rest)| {
                objects(value, &mut calls)?;
                Ok(rest)
            }),
            (Some(_), Shape::Named(marker)) => named(rest, marker, &mut calls),
            (Some(_), Shape::Parameters) => parameters::read(rest, tools).map(|(call, rest)| {
                calls.push(call);
                rest
            }),
            (Some(_), _) => Err(Stop::Wrong),
            (None, _) => Err(Stop::Unfinished),
        };
        match read {
            Ok(after) => rest = after.trim_start(),
            Err(Stop::Unfinished) => return Read::Unfinished,
            Err(Stop::Wrong) => return Read::Wrong,
        }
        if calls.len() > MOST_CALLS {
            return Read::Wrong;
        }
        // Between calls: a semicolon (Llama), or the marker again.
        let next = rest.strip_prefix(';').or_else(|| rest.strip_prefix(format.open));
        let next = next.map(str::trim_start);
        match next.or(Some(rest).filter(|rest| rest.starts_with('{'))) {
            Some(next) if !next.is_empty() => rest = next,
            _ => return Read::Calls(calls, rest.to_string()),
        }
    }
}

/// The JSON of an object that a text is, white space aside.
pub fn object_alone(text: &str) -> Result<&str, Stop> {
    let (object, rest) = value(text)?;
    match object.starts_with('{') && rest.trim().is_empty() {
        true => Ok(object),
        false => Err(Stop::Wrong),
    }
}

/// Why reading ended.
#[derive(Debug, PartialEq)]
pub enum Stop {
    /// The text is the beginning of what was to be read.
    Unfinished,
    /// It is something else.
    Wrong,
}

/// The JSON that a text begins with, and what follows it.
fn value(text: &str) -> Result<(&str, &str), Stop> {
    first::<IgnoredAny>(text).map(|(_, value, rest)| (value, rest))
}

/// The value that a text begins with, its JSON, and what follows it.
fn first<T: DeserializeOwned>(text: &str) -> Result<(T, &str, &str), Stop> {
    let text = text.trim_start();
    let mut values = Deserializer::from_str(text).into_iter::<T>();
    match values.next() {
        Some(Ok(read)) => {
            let (value, rest) = text.split_at_checked(values.byte_offset()).ok_or(Stop::Wrong)?;
            Ok((read, value.trim_end(), rest))
        }
        Some(Err(error)) if !error.is_eof() => Err(Stop::Wrong),
        Some(Err(_)) | None => Err(Stop::Unfinished),
    }
}

/// The calls that an object or a list of objects is.
fn objects(value: &str, calls: &mut Vec<Written>) -> Result<(), Stop> {
    if value.starts_with('{') {
        calls.push(object(value)?);
        return Ok(());
    }
    let mut rest = value.strip_prefix('[').ok_or(Stop::Wrong)?.trim_start();
    while rest.starts_with('{') {
        let (one, after) = self::value(rest)?;
        calls.push(object(one)?);
        let after = after.trim_start();
        rest = after.strip_prefix(',').unwrap_or(after).trim_start();
    }
    match rest == "]" && !calls.is_empty() {
        true => Ok(()),
        false => Err(Stop::Wrong),
    }
}

/// A call that is an object with a name and arguments.
fn object(value: &str) -> Result<Written, Stop> {
    let mut rest = value.strip_prefix('{').ok_or(Stop::Wrong)?;
    let (mut name, mut arguments) = (None, None);
    while rest.trim_start() != "}" {
        let (key, _, after) = first::<String>(rest)?;
        let after = after.trim_start().strip_prefix(':').ok_or(Stop::Wrong)?;
        let (value, after) = self::value(after)?;
        match key.as_str() {
            "name" => name = serde_json::from_str::<String>(value).ok(),
            "arguments" | "parameters" => arguments = Some(given(value)?),
            _ => {}
        }
        let after = after.trim_start();
        rest = after.strip_prefix(',').unwrap_or(after);
    }
    let name = name.ok_or(Stop::Wrong)?;
    Ok((name, arguments.unwrap_or_else(|| "{}".into())))
}

/// Arguments: an object, or a text that is one's JSON.
fn given(value: &str) -> Result<String, Stop> {
    if value.starts_with('{') {
        return Ok(value.to_string());
    }
    let text = serde_json::from_str::<String>(value).map_err(|_| Stop::Wrong)?;
    match serde_json::from_str::<Value>(&text) {
        Ok(Value::Object(_)) => Ok(text),
        _ => Err(Stop::Wrong),
    }
}

/// `name[ARGS]{...}`; gives what follows.
fn named<'a>(text: &'a str, marker: &str, calls: &mut Vec<Written>) -> Result<&'a str, Stop> {
    let Some((name, after)) = text.split_once(marker) else {
        // A name that is still written.
        let is_name = !text.contains(['{', '\n']);
        return Err(if is_name { Stop::Unfinished } else { Stop::Wrong });
    };
    // Some versions give the call's identifier after its name.
    let name = name.split_once(CALL_ID).map_or(name, |(name, _)| name).trim();
    let (arguments, rest) = value(after)?;
    if !arguments.starts_with('{') {
        return Err(Stop::Wrong);
    }
    calls.push((name.to_string(), arguments.to_string()));
    Ok(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(format: &str, body: &str) -> Vec<(String, String)> {
        match read(Format::named(format), body, &[]) {
            Read::Calls(calls, rest) if rest.is_empty() => calls,
            other => panic!("{body}: {other:?}"),
        }
    }

    fn call(name: &str, arguments: &str) -> (String, String) {
        (name.into(), arguments.into())
    }

    #[test]
    fn arguments_are_as_they_were_written() {
        let arguments = r#"{ "b":1.50,"a" : "\u00e9}" }"#;
        let body = format!("\n{{\"arguments\": {arguments} , \"name\": \"f\"}}\n");
        assert_eq!(calls("hermes", &body), [call("f", arguments)]);
        let text = r#"{"name": "f", "arguments": "{\"a\": 1}"}"#;
        assert_eq!(calls("hermes", text), [call("f", r#"{"a": 1}"#)]);
        assert_eq!(calls("hermes", r#"{"name": "f"}"#), [call("f", "{}")]);
    }

    #[test]
    fn lists_names_and_rows_of_objects_are_read() {
        let list = r#" [{"name": "f", "arguments": {}}, {"name": "g", "arguments": {"a": []}, "id": "x"}]"#;
        let both = [call("f", "{}"), call("g", r#"{"a": []}"#)];
        for format in ["mistral", "granite", "phi4-mini", "mistral-named"] {
            assert_eq!(calls(format, list), both);
        }
        let named = r#"f[ARGS]{}[TOOL_CALLS]g[CALL_ID]abc[ARGS]{"a": []}"#;
        assert_eq!(calls("mistral-named", named), both);
        let row = r#"{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": []}}"#;
        assert_eq!(calls("llama3", row), both);
    }

    #[test]
    fn what_is_no_call_is_told_from_what_is_none_yet() {
        let hermes = |body: &str| read(Format::named("hermes"), body, &[]);
        for body in ["", " {", r#"{"name": "f", "arguments": {"a": "</"#, "[", r#"[{"name": "f"}"#]
        {
            assert_eq!(hermes(body), Read::Unfinished, "{body}");
        }
        for body in [
            "f()",
            "{name}",
            r#"{"arguments": {}}"#,
            r#"{"name": 1}"#,
            r#"{"name": "f", "arguments": 1}"#,
            r#"{"name": "f", "arguments": "1"}"#,
            "[]",
            "[1]",
        ] {
            assert_eq!(hermes(body), Read::Wrong, "{body}");
        }
        let mistral = Format::named("mistral-named");
        assert_eq!(read(mistral, "f[AR", &[]), Read::Unfinished);
        assert_eq!(read(mistral, "f {", &[]), Read::Wrong);
        let deep = "[".repeat(1 << 16);
        assert_eq!(hermes(&deep), Read::Unfinished);
        let followed = read(mistral, r#"f[ARGS]{} and"#, &[]);
        assert_eq!(followed, Read::Calls(vec![call("f", "{}")], "and".into()));
    }
}
