//! What templates call that is Python's rather than the engine's: methods, filters as Jinja2 defines them, and the text of
//! a value.

use std::fmt::Write as _;
use std::sync::LazyLock;

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value, filters};
use regex::Regex;

use super::template::is_mark;

/// Python's methods of strings, lists and dicts, beyond those of `minijinja_contrib::pycompat`.
pub(super) fn python_method(
    state: &mut State,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    if method == "copy" && matches!(value.kind(), ValueKind::Map | ValueKind::Seq) {
        let () = from_args(arguments)?;
        // No value changes, so a copy need not be another one.
        return Ok(value.clone());
    }
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(
            state, value, method, arguments,
        );
    };
    match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_prefix(prefix).unwrap_or(text)))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(arguments)?;
            Ok(Value::from(text.strip_suffix(suffix).unwrap_or(text)))
        }
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(arguments)?;
            if separator.is_empty() {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("{method}: empty separator"),
                ));
            }
            let found = if method == "partition" {
                text.split_once(separator)
            } else {
                text.rsplit_once(separator)
            };
            let parts = match found {
                Some((before, after)) => [before, separator, after],
                None if method == "partition" => [text, "", ""],
                None => ["", "", text],
            };
            Ok(parts.into_iter().map(Value::from).collect())
        }
        "format" if has_only_plain_fields(text) => {
            let arguments = arguments.iter().map(with_text).collect::<Vec<_>>();
            minijinja_contrib::pycompat::unknown_method_callback(state, value, method, &arguments)
        }
        "center" | "ljust" | "rjust" | "zfill" => padded(text, method, arguments),
        "index" | "rindex" => {
            let find = if method == "index" { "find" } else { "rfind" };
            let place = minijinja_contrib::pycompat::unknown_method_callback(
                state, value, find, arguments,
            )?;
            match place.as_i64() {
                Some(-1) => Err(Error::new(
                    ErrorKind::InvalidOperation,
                    format!("{method}: the text is not found"),
                )),
                _ => Ok(place),
            }
        }
        "swapcase" => {
            let () = from_args(arguments)?;
            let mut swapped = String::with_capacity(text.len());
            for character in text.chars() {
                match character.is_uppercase() {
                    true => swapped.extend(character.to_lowercase()),
                    false => swapped.extend(character.to_uppercase()),
                }
            }
            Ok(Value::from(swapped))
        }
        "rsplit" => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(arguments)?;
            let Some(separator) = separator else { return Ok(words_from_the_right(text, most)) };
            if separator.is_empty() {
                return Err(Error::new(ErrorKind::InvalidOperation, "rsplit: empty separator"));
            }
            let mut parts: Vec<&str> = match most.and_then(|most| usize::try_from(most).ok()) {
                Some(most) => text.rsplitn(most.saturating_add(1), separator).collect(),
                None => text.rsplit(separator).collect(),
            };
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

/// The words of a text, of which only so many at its end are split off.
fn words_from_the_right(text: &str, most: Option<i64>) -> Value {
    let mut most = most.and_then(|most| usize::try_from(most).ok()).unwrap_or(usize::MAX);
    let mut words = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() {
        let cut = rest.rfind(char::is_whitespace).filter(|_| most > 0);
        let (before, word) = match cut {
            Some(place) => {
                let behind = rest.get(place..).unwrap_or_default();
                (rest.get(..place).unwrap_or_default(), behind.trim_start())
            }
            None => ("", rest),
        };
        words.push(word);
        rest = before.trim_end();
        most = most.saturating_sub(1);
    }
    words.into_iter().rev().map(Value::from).collect()
}

/// The filter: a text in the middle of a line of so many characters.
pub(super) fn center(value: String, width: Option<i64>, named: Kwargs) -> Result<Value, Error> {
    let width = width.or(named.get("width")?).unwrap_or(80);
    named.assert_all_used()?;
    padded(&value, "center", &[Value::from(width)])
}

/// How many runs of letters, digits and underscores a text has.
pub(super) fn wordcount(value: String) -> usize {
    static WORD: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"[\p{L}\p{N}_]+").expect("the expression is a constant"));
    WORD.find_iter(&value).count()
}

/// A text as a part of a path in an address; a dict, or a list of pairs, as its query.
pub(super) fn urlencode(value: &Value) -> Result<String, Error> {
    let of = |value: &Value| text(value).unwrap_or_else(|| value.to_string());
    let pair = |key: &Value, value: &Value| {
        format!("{}={}", encoded(&of(key), true), encoded(&of(value), true))
    };
    let mut pairs = Vec::new();
    match value.kind() {
        ValueKind::Map => {
            for key in value.try_iter()? {
                pairs.push(pair(&key, &value.get_item(&key)?));
            }
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                pairs
                    .push(pair(&item.get_item(&Value::from(0))?, &item.get_item(&Value::from(1))?));
            }
        }
        _ => return Ok(encoded(&of(value), false)),
    }
    Ok(pairs.join("&"))
}

fn encoded(text: &str, in_query: bool) -> String {
    let mut written = String::with_capacity(text.len());
    for byte in text.bytes() {
        let _ = match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                write!(written, "{}", char::from(byte))
            }
            b'/' if !in_query => write!(written, "/"),
            b' ' if in_query => write!(written, "+"),
            _ => write!(written, "%{byte:02X}"),
        };
    }
    written
}

/// A text with as many characters more as make it `width` long; `zfill` keeps a sign in front.
fn padded(text: &str, method: &str, arguments: &[Value]) -> Result<Value, Error> {
    let (width, fill) = match method {
        "zfill" => (from_args::<(i64,)>(arguments)?.0, "0"),
        _ => {
            let (width, fill): (i64, Option<&str>) = from_args(arguments)?;
            (width, fill.unwrap_or(" "))
        }
    };
    if fill.chars().count() != 1 {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("{method}: is to fill with {fill:?}, expected one character"),
        ));
    }
    let width = usize::try_from(width).unwrap_or(0);
    let missing = width.saturating_sub(text.chars().count());
    let (sign, text) = match text.chars().next() {
        Some('+' | '-') if method == "zfill" => text.split_at(1),
        _ => ("", text),
    };
    let left = match method {
        "ljust" => 0,
        // Where the sides differ, Python gives the one more to the left of a text in an odd width.
        "center" => missing / 2 + (missing & width & 1),
        _ => missing,
    };
    Ok(Value::from(format!("{sign}{}{text}{}", fill.repeat(left), fill.repeat(missing - left))))
}

/// A whole number, also of a text with white space around it or underscores between its digits; the default, which is 0, of
/// what is none.
pub(super) fn int(
    state: &State,
    value: &Value,
    default: Option<Value>,
    base: Option<u32>,
    named: Kwargs,
) -> Result<Value, Error> {
    let default = match default {
        Some(default) => default,
        None => named.get::<Option<Value>>("default")?.unwrap_or_else(|| Value::from(0)),
    };
    let value = match value.as_str().map(str::trim) {
        Some(text) => Value::from(without_underscores(text)),
        None => value.clone(),
    };
    let as_float = match value.as_str() {
        Some(text) => text.parse().ok(),
        None => f64::try_from(value.clone()).ok(),
    };
    if as_float.is_some_and(|number: f64| !number.is_finite()) {
        named.get::<Option<Value>>("base")?;
        named.assert_all_used()?;
        return Ok(default);
    }
    filters::int(state, &value, Some(default), base, named)
}

/// A number's text without the underscores that stand between its digits.
fn without_underscores(text: &str) -> String {
    let parts: Vec<&str> = text.split('_').collect();
    let is_digit = |digit: Option<char>| digit.is_some_and(|it| it.is_ascii_alphanumeric());
    let stand_between = parts
        .windows(2)
        .all(|pair| is_digit(pair[0].chars().next_back()) && is_digit(pair[1].chars().next()));
    if stand_between { parts.concat() } else { text.to_string() }
}

/// A text cut to a length, between words unless `killwords`; one that is longer by no more than `leeway` stays.
pub(super) fn truncate(
    text: &str,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<String, Error> {
    type Arguments<'a> = (Option<usize>, Option<bool>, Option<&'a str>, Option<usize>);
    let (length, killwords, end, leeway): Arguments = from_args(&positional)?;
    let length = length.or(named.get("length")?).unwrap_or(255);
    let killwords = killwords.or(named.get("killwords")?).unwrap_or(false);
    let end = end.or(named.get("end")?).unwrap_or("...");
    let leeway = leeway.or(named.get("leeway")?).unwrap_or(5);
    named.assert_all_used()?;
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("truncate: the length is {length}, expected at least that of {end:?}"),
        ));
    };
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_string());
    }
    let cut = text.char_indices().nth(kept).and_then(|(place, _)| text.get(..place));
    let cut = cut.unwrap_or(text);
    let words = cut.rsplit_once(' ').filter(|_| !killwords).map_or(cut, |(words, _)| words);
    Ok(format!("{words}{end}"))
}

/// A value as Python's `str` writes it, where that isn't what the engine writes: a float, or a list or dict with what is in
/// it. Such a value must have an end, so [`super::guard`] measures it before.
pub(super) fn text(value: &Value) -> Option<String> {
    match value.kind() {
        ValueKind::Number if !value.is_integer() => {
            f64::try_from(value.clone()).ok().map(python_float)
        }
        ValueKind::Seq | ValueKind::Iterable | ValueKind::Map if !writes_itself(value) => {
            let mut written = String::new();
            write_repr(value, &mut written);
            Some(written)
        }
        _ => None,
    }
}

/// The value, or its text where the engine would write another.
pub(super) fn with_text(value: &Value) -> Value {
    text(value).map_or_else(|| value.clone(), Value::from)
}

/// A value's items with their texts in place of those that the engine would write otherwise.
pub(super) fn with_item_texts(value: &Value) -> Value {
    match value.kind() {
        ValueKind::Seq | ValueKind::Iterable => match value.try_iter() {
            Ok(items) => items.map(|item| with_text(&item)).collect(),
            Err(_) => value.clone(),
        },
        _ => value.clone(),
    }
}

/// Whether this is a thing of the engine, such as a namespace, rather than a list or dict.
fn writes_itself(value: &Value) -> bool {
    let name = value.as_object().map_or("", |object| object.type_name());
    value.is_kwargs() || ["::Namespace", "::Loop"].iter().any(|thing| name.ends_with(thing))
}

fn write_repr(value: &Value, written: &mut String) {
    let items = |written: &mut String| {
        for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
            written.push_str(if index > 0 { ", " } else { "" });
            write_repr(&item, written);
            if value.kind() == ValueKind::Map {
                written.push_str(": ");
                write_repr(&value.get_item(&item).unwrap_or_default(), written);
            }
        }
    };
    let (open, close) = match value.kind() {
        ValueKind::Undefined => return written.push_str("Undefined"),
        ValueKind::String => return write_string(value.as_str().unwrap_or_default(), written),
        ValueKind::Seq if value.is_tuple() && value.len() == Some(1) => ("(", ",)"),
        ValueKind::Seq if value.is_tuple() => ("(", ")"),
        ValueKind::Seq | ValueKind::Iterable => ("[", "]"),
        ValueKind::Map if !writes_itself(value) => ("{", "}"),
        _ => {
            let _ = match text(value) {
                Some(text) => write!(written, "{text}"),
                None => write!(written, "{value:?}"),
            };
            return;
        }
    };
    written.push_str(open);
    items(written);
    written.push_str(close);
}

/// A string as Python's `repr` writes it: in single quotes unless only these are in it, and with escapes for what cannot
/// be printed. The marks of spans, which are no part of any conversation, stay to be found.
fn write_string(text: &str, written: &mut String) {
    static NOT_PRINTABLE: LazyLock<Regex> =
        LazyLock::new(|| Regex::new(r"[\p{C}\p{Z}]").expect("the expression is a constant"));
    let printable = |character: char| match character {
        ' '..='~' => true,
        _ => is_mark(character) || !NOT_PRINTABLE.is_match(character.encode_utf8(&mut [0; 4])),
    };
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    written.push(quote);
    for character in text.chars() {
        let code = u32::from(character);
        let _ = match character {
            '\n' => write!(written, "\\n"),
            '\r' => write!(written, "\\r"),
            '\t' => write!(written, "\\t"),
            '\\' => write!(written, "\\\\"),
            _ if character == quote => write!(written, "\\{quote}"),
            _ if printable(character) => write!(written, "{character}"),
            _ if code <= 0xff => write!(written, "\\x{code:02x}"),
            _ if code <= 0xffff => write!(written, "\\u{code:04x}"),
            _ => write!(written, "\\U{code:08x}"),
        };
    }
    written.push(quote);
}

/// A float as Python's `repr` writes it: the shortest digits that read back, with an exponent below 1e-4 and from 1e16.
pub(super) fn python_float(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    let magnitude = value.abs();
    if value == 0.0 || value.is_infinite() || (1e-4..1e16).contains(&magnitude) {
        return format!("{value:?}");
    }
    let scientific = format!("{value:e}");
    match scientific.split_once('e') {
        Some((digits, exponent)) => match exponent.strip_prefix('-') {
            Some(exponent) => format!("{digits}e-{exponent:0>2}"),
            None => format!("{digits}e+{exponent:0>2}"),
        },
        None => scientific,
    }
}

/// Whether `%` formats nothing but whole values as texts, which is `%s`.
pub(super) fn has_only_text_places(format: &str) -> bool {
    let mut parts = format.split('%').skip(1);
    while let Some(part) = parts.next() {
        // An empty part is the first half of `%%`.
        let escaped = part.is_empty() && parts.next().is_some();
        if !escaped && !part.starts_with('s') {
            return false;
        }
    }
    true
}

/// Whether `str.format` formats nothing but whole values as texts, which are `{}` and `{0}`.
fn has_only_plain_fields(format: &str) -> bool {
    let without_escapes = format.replace("{{", "");
    without_escapes
        .split('{')
        .skip(1)
        .all(|part| part.trim_start_matches(|it: char| it.is_ascii_digit()).starts_with('}'))
}
