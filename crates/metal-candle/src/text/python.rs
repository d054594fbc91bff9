//! What templates call that is Python's rather than the engine's: methods, and filters as Jinja2 defines them.

use minijinja::value::{Kwargs, Rest, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value, filters};

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
        "center" | "ljust" | "rjust" | "zfill" => padded(text, method, arguments),
        "rsplit" => {
            let (separator, most): (&str, Option<i64>) = from_args(arguments)?;
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
