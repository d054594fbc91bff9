//! What Serde says about a file, in words that need no Rust.

use std::borrow::Cow;

/// The longest text of a file that a message quotes, in characters.
const QUOTED: usize = 80;

/// A text cut to what a message quotes of it.
pub(crate) fn cut(text: &str) -> String {
    cut_to(text, QUOTED)
}

/// A text cut to so many characters.
pub(crate) fn cut_to(text: &str, characters: usize) -> String {
    match text.char_indices().nth(characters) {
        Some((end, _)) => format!("{}...", text.get(..end).unwrap_or_default()),
        None => text.to_string(),
    }
}

/// A text cut to about so many characters: its beginning and its end, where a message says what was expected.
pub(crate) fn cut_middle(text: &str, characters: usize) -> Cow<'_, str> {
    let (head, tail) = (characters * 2 / 3, characters / 3);
    let nth = |n: usize| text.char_indices().nth(n).map(|(place, _)| place);
    let from_end = |n: usize| text.char_indices().rev().nth(n).map(|(place, _)| place);
    match (nth(characters).and(nth(head)), from_end(tail)) {
        (Some(end), Some(start)) => {
            let part = |range: Option<&str>| range.unwrap_or_default().to_string();
            format!("{}...{}", part(text.get(..end)), part(text.get(start..))).into()
        }
        _ => text.into(),
    }
}

/// A value as it stands in the file, cut where it is long.
pub(crate) fn short(value: &serde_json::Value) -> String {
    match value {
        // The quotes stay whole.
        serde_json::Value::String(text) => format!("{:?}", cut(text)),
        other => cut(&other.to_string()),
    }
}

/// The message of a Serde error, of JSON or YAML, in plain words: what was found and what was expected, without the
/// names of Rust's types. A place (` at line 1 column 2`) at its end is left out, and long values are cut.
pub fn plain(message: &str) -> String {
    let message = match message.rfind(" at line ") {
        Some(end) => message.get(..end).unwrap_or(message),
        None => message,
    };
    for mistake in ["invalid type: ", "invalid value: "] {
        if let Some((found, expected)) =
            message.strip_prefix(mistake).and_then(|rest| rest.rsplit_once(", expected "))
        {
            return format!("expected {}, found {}", expected_words(expected), found_words(found));
        }
    }
    if let Some((length, expected)) =
        message.strip_prefix("invalid length ").and_then(|rest| rest.rsplit_once(", expected "))
    {
        return format!("expected {}, found {length} of them", expected_words(expected));
    }
    if let Some(key) = message.strip_prefix("missing field ") {
        return format!("the key {key} is missing");
    }
    if let Some(key) = message.strip_prefix("duplicate field ") {
        return format!("the key {key} comes twice");
    }
    if let Some((key, expected)) =
        message.strip_prefix("unknown field ").and_then(|rest| rest.split_once(", "))
    {
        return format!("unknown key {}; {expected}", cut(key));
    }
    if let Some((value, expected)) =
        message.strip_prefix("unknown variant ").and_then(|rest| rest.split_once(", "))
    {
        return format!("{expected}, found {}", cut(value));
    }
    if message.starts_with("data did not match any variant") {
        return "found a value of none of the forms that are known here".into();
    }
    if let Some(inside) = message.strip_prefix("EOF while parsing ") {
        return format!("the file ends within {inside}");
    }
    if message == "recursion limit exceeded" {
        return "lists and objects are nested too deep".into();
    }
    message.to_string()
}

fn expected_words(expected: &str) -> String {
    let words = match expected {
        "u8" | "u16" | "u32" | "u64" | "u128" | "usize" => "a whole number from 0",
        "i8" | "i16" | "i32" | "i64" | "i128" | "isize" => "a whole number",
        "f32" | "f64" => "a number",
        "a boolean" | "bool" => "true or false",
        "a string" | "a borrowed string" | "string" | "str" => "a text",
        "a sequence" => "a list",
        "a map" => "an object",
        "unit" => "nothing",
        "any valid JSON value" => "a value",
        _ if expected.starts_with("struct ") && !expected.contains(" with ") => "an object",
        _ if expected.starts_with("enum ") || expected.contains(" enum ") => "one of its names",
        _ => {
            return match expected.strip_prefix("a tuple of size ") {
                Some(size) => format!("a list of {size} values"),
                None => expected.to_string(),
            };
        }
    };
    words.into()
}

/// Serde puts a number in backquotes behind its type, and a text in quotes.
fn found_words(found: &str) -> String {
    match found {
        "sequence" => return "a list".into(),
        "map" => return "an object".into(),
        "unit value" | "null" | "Option value" => return "nothing".into(),
        _ => {}
    }
    if let Some(text) = found.strip_prefix("string ") {
        // The inner text may hold escapes, which a cut may split: the end says that it was cut.
        return cut(text);
    }
    match found.split_once('`').and_then(|(_, rest)| rest.strip_suffix('`')) {
        Some(value) => cut(value),
        None => cut(found),
    }
}

#[cfg(test)]
mod tests {
    use super::plain;
    use serde::Deserialize;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Inner {
        pair: (u64, u64),
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Choice {
        Left,
        Right,
    }

    #[derive(Debug, Deserialize)]
    #[serde(untagged)]
    #[allow(dead_code)]
    enum Either {
        Names(Vec<String>),
        Name(String),
    }

    #[derive(Debug, Default, Deserialize)]
    #[serde(default)]
    #[allow(dead_code)]
    struct All {
        count: u64,
        signed: i32,
        rate: f64,
        flag: bool,
        text: String,
        list: Vec<u8>,
        inner: Option<Inner>,
        choice: Option<Choice>,
        either: Option<Either>,
    }

    #[test]
    fn no_message_names_a_type_of_rust() {
        for (json, expected) in [
            (r#"{"count": "four"}"#, "expected a whole number from 0, found \"four\""),
            (r#"{"count": -1}"#, "expected a whole number from 0, found -1"),
            (r#"{"count": 1.5}"#, "expected a whole number from 0, found 1.5"),
            (r#"{"count": null}"#, "expected a whole number from 0, found nothing"),
            (r#"{"count": [1]}"#, "expected a whole number from 0, found a list"),
            (r#"{"signed": 99999999999}"#, "expected a whole number, found 99999999999"),
            (r#"{"rate": {}}"#, "expected a number, found an object"),
            (r#"{"flag": "true"}"#, "expected true or false, found \"true\""),
            (r#"{"text": true}"#, "expected a text, found true"),
            (r#"{"list": 3}"#, "expected a list, found 3"),
            (r#"{"list": [256]}"#, "expected a whole number from 0, found 256"),
            (r#"{"inner": 3}"#, "expected an object, found 3"),
            (r#"{"inner": {}}"#, "the key `pair` is missing"),
            (r#"{"inner": {"pair": [1]}}"#, "expected a list of 2 values, found 1 of them"),
            (r#"{"inner": {"paar": 1}}"#, "unknown key `paar`; expected `pair`"),
            (r#"{"choice": "up"}"#, "expected `left` or `right`, found `up`"),
            (r#"{"either": 3}"#, "found a value of none of the forms that are known here"),
            (r#"{"count": 1"#, "the file ends within an object"),
            (r#"3"#, "expected an object, found 3"),
        ] {
            let error = serde_json::from_str::<All>(json).unwrap_err().to_string();
            assert_eq!(plain(&error), expected, "{error}");
        }
        let long = format!("{{\"count\": \"{}\"}}", "x".repeat(10_000));
        let error = serde_json::from_str::<All>(&long).unwrap_err().to_string();
        assert!(plain(&error).len() < 200, "{error}");
        let deep = "[".repeat(200);
        let error = serde_json::from_str::<serde_json::Value>(&deep).unwrap_err().to_string();
        assert_eq!(plain(&error), "lists and objects are nested too deep");
    }
}
