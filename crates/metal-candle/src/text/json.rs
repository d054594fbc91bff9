//! JSON for templates: values going in, and the `tojson` filter as `transformers` defines it.
//!
//! `transformers` replaces Jinja's `tojson` by Python's `json.dumps(x, ensure_ascii=False, indent=None,
//! separators=None, sort_keys=False)`: no HTML escapes, keys in their order, `", "` and `": "` between things.

use minijinja::value::{Kwargs, Rest, ValueKind};
use minijinja::{Error, ErrorKind, State, Value};

use super::guard;
use super::python::python_float;

/// A template's view of a JSON value.
pub(super) fn to_template_value(value: &serde_json::Value) -> Value {
    match value {
        serde_json::Value::Null => Value::from(()),
        serde_json::Value::Bool(flag) => Value::from(*flag),
        serde_json::Value::Number(number) => {
            match (number.as_i64(), number.as_u64(), number.as_f64()) {
                (Some(integer), _, _) => Value::from(integer),
                (None, Some(integer), _) => Value::from(integer),
                (None, None, Some(float)) => Value::from(float),
                (None, None, None) => Value::from(number.to_string()),
            }
        }
        serde_json::Value::String(text) => Value::from(text.as_str()),
        serde_json::Value::Array(items) => {
            Value::from(items.iter().map(to_template_value).collect::<Vec<_>>())
        }
        serde_json::Value::Object(fields) => Value::from_pairs(
            fields.iter().map(|(key, value)| (key.as_str(), to_template_value(value))),
        ),
    }
}

/// The filter: `value|tojson(ensure_ascii, indent, separators, sort_keys)`, all optional, by position or name.
pub(super) fn tojson(
    state: &mut State,
    value: &Value,
    positional: Rest<Value>,
    named: Kwargs,
) -> Result<Value, Error> {
    let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let by_name = named.get::<Option<Value>>(name)?;
        Ok(positional.get(index).cloned().or(by_name).filter(|value| !value.is_none()))
    };
    let ensure_ascii = argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true());
    let indent = match argument(1, "indent")? {
        None => None,
        Some(value) => match (value.as_str(), value.as_i64()) {
            (Some(text), _) => Some(text.to_string()),
            // Python takes a negative indent as 0; what is wider than any terminal is a mistake in the template.
            (None, Some(width)) if width <= 256 => {
                Some(" ".repeat(usize::try_from(width).unwrap_or(0)))
            }
            _ => {
                return Err(invalid(format!(
                    "tojson: indent is {value}, expected up to 256 spaces or a string"
                )));
            }
        },
    };
    let separators = match argument(2, "separators")? {
        None if indent.is_some() => (",".to_string(), ": ".to_string()),
        None => (", ".to_string(), ": ".to_string()),
        Some(value) => {
            let parts = value.try_iter()?.collect::<Vec<_>>();
            match parts.as_slice() {
                [item, key] => match (item.as_str(), key.as_str()) {
                    (Some(item), Some(key)) => (item.to_string(), key.to_string()),
                    _ => return Err(invalid("tojson: separators must be two strings".into())),
                },
                _ => return Err(invalid("tojson: separators must be two strings".into())),
            }
        }
    };
    let sort_keys = argument(3, "sort_keys")?.is_some_and(|value| value.is_true());
    named.assert_all_used()?;
    if positional.len() > 4 {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let longest = guard::longest(state);
    let out = String::new();
    let mut writer = Writer { out, longest, ensure_ascii, indent, separators, sort_keys };
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

fn invalid(message: String) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Nesting past this is refused rather than risk the stack.
const DEEPEST: usize = 200;

struct Writer {
    out: String,
    /// What `out` may have, in bytes.
    longest: usize,
    ensure_ascii: bool,
    indent: Option<String>,
    separators: (String, String),
    sort_keys: bool,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEEPEST {
            return Err(invalid(format!("tojson: the value is nested more than {DEEPEST} deep")));
        }
        if self.out.len() > self.longest {
            return Err(invalid(format!("tojson: writes more than {} bytes", self.longest)));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.out.push_str(&value.to_string()),
            ValueKind::Number => self.out.push_str(&float_text(f64::try_from(value.clone())?)),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.collect::<Vec<_>>();
                self.out.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.begin(index, depth);
                    self.value(item, depth + 1)?;
                }
                self.end(']', items.is_empty(), depth);
            }
            ValueKind::Map => {
                let mut fields = Vec::new();
                for key in value.try_iter()? {
                    let field = value.get_item(&key)?;
                    fields.push((key_text(&key)?, field));
                }
                if self.sort_keys {
                    fields.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.out.push('{');
                for (index, (key, field)) in fields.iter().enumerate() {
                    self.begin(index, depth);
                    self.string(key);
                    self.out.push_str(&self.separators.1.clone());
                    self.value(field, depth + 1)?;
                }
                self.end('}', fields.is_empty(), depth);
            }
            other => return Err(invalid(format!("tojson: {other} cannot be written as JSON"))),
        }
        Ok(())
    }

    fn begin(&mut self, index: usize, depth: usize) {
        if index > 0 {
            self.out.push_str(&self.separators.0);
        }
        self.new_line(depth + 1);
    }

    fn end(&mut self, close: char, empty: bool, depth: usize) {
        if !empty {
            self.new_line(depth);
        }
        self.out.push(close);
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            for _ in 0..depth {
                self.out.push_str(indent);
            }
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for character in text.chars() {
            match character {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                control if control < ' ' => {
                    self.out.push_str(&format!("\\u{:04x}", u32::from(control)))
                }
                other if self.ensure_ascii && !other.is_ascii() => {
                    for unit in other.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                other => self.out.push(other),
            }
        }
        self.out.push('"');
    }
}

/// A key as `json.dumps` writes it: strings as they are, numbers, booleans and None as their JSON text.
fn key_text(key: &Value) -> Result<String, Error> {
    Ok(match key.kind() {
        ValueKind::String => key.as_str().unwrap_or_default().to_string(),
        ValueKind::None => "null".into(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
        ValueKind::Number if key.is_integer() => key.to_string(),
        ValueKind::Number => float_text(f64::try_from(key.clone())?),
        other => return Err(invalid(format!("tojson: {other} cannot be a key"))),
    })
}

/// A float as `json.dumps` writes it.
fn float_text(value: f64) -> String {
    match value {
        value if value.is_nan() => "NaN".into(),
        f64::INFINITY => "Infinity".into(),
        f64::NEG_INFINITY => "-Infinity".into(),
        value => python_float(value),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dump(value: serde_json::Value, arguments: &str) -> String {
        let mut environment = minijinja::Environment::new();
        environment.add_filter("tojson", tojson);
        let context = Value::from_pairs([("x", to_template_value(&value))]);
        environment.render_str(&format!("{{{{ x|tojson{arguments} }}}}"), context).unwrap()
    }

    #[test]
    fn tojson_writes_what_json_dumps_writes() {
        let value = serde_json::json!({"b": [1, 2.5, true, null], "a": "é<&>'\"\\\n\u{1}\u{7f}", "e": {}, "l": []});
        assert_eq!(
            dump(value.clone(), ""),
            "{\"b\": [1, 2.5, true, null], \"a\": \"é<&>'\\\"\\\\\\n\\u0001\u{7f}\", \"e\": {}, \"l\": []}"
        );
        assert_eq!(
            dump(value.clone(), "(indent=2)"),
            "{\n  \"b\": [\n    1,\n    2.5,\n    true,\n    null\n  ],\n  \"a\": \"é<&>'\\\"\\\\\\n\\u0001\u{7f}\",\n  \"e\": {},\n  \"l\": []\n}"
        );
        assert_eq!(
            dump(value, "(separators=(',', ':'), sort_keys=true, ensure_ascii=true)"),
            "{\"a\":\"\\u00e9<&>'\\\"\\\\\\n\\u0001\u{7f}\",\"b\":[1,2.5,true,null],\"e\":{},\"l\":[]}"
        );
    }

    #[test]
    fn floats_read_as_python_prints_them() {
        for (value, expected) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e16, "1e+16"),
            (123456789012345680.0, "1.2345678901234568e+17"),
            (9999999999999998.0, "9999999999999998.0"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.5e-7, "-1.5e-07"),
            (1e300, "1e+300"),
        ] {
            assert_eq!(python_float(value), expected);
        }
    }
}
