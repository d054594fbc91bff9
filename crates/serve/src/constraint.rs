//! What a text has to be, as a request says it: JSON, a schema's JSON, a regular expression, one of some texts, a grammar.

use crate::app::App;
use crate::error::{ApiError, Result};
use metal_candle::generate::{Grammar, Grammars};
use serde_json::{Value, json};

/// Bytes of a schema, an expression, a grammar or all choices, at most.
pub const LARGEST: usize = 256 << 10;
/// Between two parts of JSON: a space, or a new line and what it is indented by.
const WHITE_SPACE: &str = r"[ \t]|\r?\n[ \t]{0,32}";
/// The characters of a schema's name, at most.
const LONGEST_NAME: usize = 64;

/// What a text has to be.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Constraint {
    /// Anything.
    #[default]
    None,
    /// JSON of a schema, which a field of the request has.
    Schema(&'static str, Value),
    /// What an expression matches as a whole.
    Regex(String),
    /// One of these.
    Choice(Vec<String>),
    /// A text of a grammar in Lark's form.
    Lark(String),
}

impl Constraint {
    /// What one of vLLM's fields says.
    ///
    /// # Errors
    /// A 400 that names a field that is too large, or the second of two.
    pub fn guided(
        json: Option<Value>,
        regex: Option<String>,
        choice: Option<Vec<String>>,
        grammar: Option<String>,
    ) -> Result<Self> {
        let given = [
            json.map(schema_of).transpose()?.map(|schema| Self::Schema("guided_json", schema)),
            regex.map(Self::Regex),
            choice.map(Self::Choice),
            grammar.map(Self::Lark),
        ];
        let mut constraint = Self::None;
        for given in given.into_iter().flatten() {
            given.check_size()?;
            constraint = constraint.or(given)?;
        }
        Ok(constraint)
    }

    /// What a format of `/v1/chat/completions` says, which a field of the request has.
    ///
    /// # Errors
    /// A 400 that names what is wrong in it.
    pub fn of_format(field: &'static str, format: Option<Value>) -> Result<Self> {
        let Some(format) = format else { return Ok(Self::None) };
        let wrong = |name: &str, what: &str| ApiError::field(format!("{field}{name}"), what);
        let Value::Object(mut fields) = format else {
            return Err(wrong("", "expected an object with \"type\""));
        };
        let kind = fields.remove("type");
        let schema = match kind.as_ref().and_then(Value::as_str) {
            Some("text") => None,
            Some("json_object") => Some(json!({"type": "object"})),
            Some("json_schema") => match fields.remove("json_schema") {
                Some(given) => Some(named_schema(given, &format!("{field}.json_schema"))?),
                None => return Err(wrong(".json_schema", "is missing")),
            },
            _ => {
                let expected = "expected \"text\", \"json_object\" or \"json_schema\"";
                return Err(wrong(".type", expected));
            }
        };
        if let Some(key) = fields.keys().next() {
            let key = metal_candle::readable(key);
            return Err(wrong(&format!(".{key}"), "is not a field of a format of this type"));
        }
        schema.map_or(Ok(Self::None), |schema| Self::schema(field, schema))
    }

    /// JSON of a schema, which a field of the request has.
    ///
    /// # Errors
    /// A 400 that names the field, for one that is too large.
    pub fn schema(field: &'static str, schema: Value) -> Result<Self> {
        let constraint = Self::Schema(field, schema);
        constraint.check_size()?;
        Ok(constraint)
    }

    /// This or the other, of which one at most says anything.
    ///
    /// # Errors
    /// A 400 that names the second of two.
    pub fn or(self, other: Self) -> Result<Self> {
        match (self, other) {
            (one, Self::None) | (Self::None, one) => Ok(one),
            (one, other) => {
                let what = format!("cannot be given together with {}", one.field());
                Err(ApiError::field(other.field(), what))
            }
        }
    }

    /// The field of the request that says it.
    pub fn field(&self) -> &'static str {
        match self {
            Self::None | Self::Schema("response_format", _) => "response_format",
            Self::Schema(field, _) => field,
            Self::Regex(_) => "guided_regex",
            Self::Choice(_) => "guided_choice",
            Self::Lark(_) => "guided_grammar",
        }
    }

    fn check_size(&self) -> Result<()> {
        let size = match self {
            Self::None => 0,
            Self::Schema(_, schema) => schema.to_string().len(),
            Self::Regex(text) | Self::Lark(text) => text.len(),
            Self::Choice(choices) => choices.iter().map(|choice| choice.len() + 1).sum(),
        };
        match size <= LARGEST {
            true => Ok(()),
            false => {
                let what = format!("has {size} bytes, expected at most {LARGEST}");
                Err(ApiError::field(self.field(), what))
            }
        }
    }

    /// What the engine follows.
    ///
    /// # Errors
    /// A 400 that names the field, for what cannot be followed.
    pub fn compile(&self, app: &App) -> Result<Option<Grammar>> {
        let grammars = || grammars(app, self.field());
        let compiled = match self {
            Self::None => return Ok(None),
            Self::Schema(_, schema) => grammars()?.json_schema(&spaced(schema)),
            Self::Regex(pattern) => grammars()?.regex(pattern),
            Self::Choice(choices) => grammars()?.choice(choices),
            Self::Lark(source) => grammars()?.lark(source),
        };
        compiled.map(Some).map_err(|error| about(error, self.field()))
    }

    /// As the right side of a rule of a larger grammar, in Lark's form.
    ///
    /// # Errors
    /// A 400 for a grammar, which has rules of its own.
    pub fn rule(&self) -> Result<String> {
        match self {
            Self::None => Ok("/(?s:.*)/".into()),
            Self::Schema(_, schema) => Ok(format!("%json {}", spaced(schema))),
            Self::Regex(pattern) => Ok(format!("/{}/", escape_slashes(pattern))),
            Self::Choice(choices) if choices.is_empty() => {
                Err(ApiError::field(self.field(), "is empty, expected at least one text"))
            }
            Self::Choice(choices) => {
                let choices: Vec<String> = choices.iter().map(|choice| quoted(choice)).collect();
                Ok(choices.join(" | "))
            }
            Self::Lark(_) => {
                let what = "cannot be followed together with tools or after reasoning";
                Err(ApiError::field(self.field(), what))
            }
        }
    }
}

/// A schema, which vLLM takes as the text of its JSON, too.
fn schema_of(given: Value) -> Result<Value> {
    match given {
        Value::String(text) => serde_json::from_str(&text).map_err(|error| {
            ApiError::field("guided_json", format_args!("is a text that is no JSON: {error}"))
        }),
        schema => Ok(schema),
    }
}

/// The schema with the white space that may stand between two parts of its JSON, unless it says so itself: without a
/// bound a model may write nothing else.
fn spaced(schema: &Value) -> Value {
    let mut schema = schema.clone();
    if let Value::Object(fields) = &mut schema {
        let spaces = || json!({"whitespace_pattern": WHITE_SPACE});
        fields.entry("x-guidance").or_insert_with(spaces);
    }
    schema
}

/// A text as a literal of a grammar.
pub fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}

/// A pattern between slashes, within which a slash is escaped.
fn escape_slashes(pattern: &str) -> String {
    let mut escaped = String::with_capacity(pattern.len());
    let mut after_backslash = false;
    for character in pattern.chars() {
        if character == '/' && !after_backslash {
            escaped.push('\\');
        }
        after_backslash = character == '\\' && !after_backslash;
        match character {
            '\n' => escaped.push_str("\\n"),
            other => escaped.push(other),
        }
    }
    escaped
}

/// What compiles the grammar that a field asks for.
///
/// # Errors
/// A 400 that names the field, where the model's tokenizer allows for no grammars.
pub fn grammars<'a>(app: &'a App, field: &str) -> Result<&'a Grammars> {
    app.grammars.as_deref().ok_or_else(|| {
        ApiError::unsupported(field, "the bytes of this model's tokens are not known")
    })
}

/// A grammar's error, which is about this field of the request.
pub fn about(error: metal_candle::Error, field: &str) -> ApiError {
    match error {
        metal_candle::Error::Option { option, message } if option == Grammars::BUSY => {
            ApiError::busy(message)
        }
        metal_candle::Error::Option { message, .. } => ApiError::field(field, message),
        other => other.into(),
    }
}

/// The schema of `{"name", "schema", "strict", "description"}`.
fn named_schema(given: Value, field: &str) -> Result<Value> {
    let wrong = |name: &str, what: &str| ApiError::field(format!("{field}{name}"), what);
    let Value::Object(mut fields) = given else {
        return Err(wrong("", "expected an object with \"name\" and \"schema\""));
    };
    let is_name = |name: &str| {
        let of_name = |it: char| it.is_ascii_alphanumeric() || matches!(it, '_' | '-');
        (1..=LONGEST_NAME).contains(&name.len()) && name.chars().all(of_name)
    };
    if !fields.remove("name").as_ref().and_then(Value::as_str).is_some_and(is_name) {
        let expected = "expected 1 to 64 letters, digits, underscores and dashes";
        return Err(wrong(".name", expected));
    }
    let schema = fields.remove("schema").unwrap_or_else(|| json!({"type": "object"}));
    if !schema.is_object() {
        return Err(wrong(".schema", "expected an object"));
    }
    for (key, value) in fields {
        match key.as_str() {
            "strict" if value.is_null() || value.is_boolean() => {}
            "description" if value.is_null() || value.is_string() => {}
            "strict" => return Err(wrong(".strict", "expected true or false")),
            "description" => return Err(wrong(".description", "expected a string")),
            _ => {
                let key = metal_candle::readable(&key);
                return Err(wrong(&format!(".{key}"), "is not a field of a schema's format"));
            }
        }
    }
    Ok(schema)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn formats_are_read_and_what_is_wrong_is_named() {
        let read = |format: Value| Constraint::of_format("response_format", Some(format));
        assert_eq!(read(json!({"type": "text"})).unwrap(), Constraint::None);
        let object = read(json!({"type": "json_object"})).unwrap();
        assert_eq!(object, Constraint::Schema("response_format", json!({"type": "object"})));
        let schema = json!({"type": "integer"});
        let named = json!({"name": "n", "schema": schema, "strict": true, "description": "d"});
        let format = json!({"type": "json_schema", "json_schema": named});
        assert_eq!(read(format).unwrap(), Constraint::Schema("response_format", schema));
        let field = |format: Value| read(format).unwrap_err().param.unwrap();
        assert_eq!(field(json!([])), "response_format");
        assert_eq!(field(json!({"type": "yaml"})), "response_format.type");
        assert_eq!(field(json!({"type": "text", "x": 1})), "response_format.x");
        assert_eq!(field(json!({"type": "json_schema"})), "response_format.json_schema");
        let wrong = |named: Value| field(json!({"type": "json_schema", "json_schema": named}));
        assert_eq!(wrong(json!({"name": "a b"})), "response_format.json_schema.name");
        assert_eq!(wrong(json!({"name": "a", "schema": 1})), "response_format.json_schema.schema");
        assert_eq!(wrong(json!({"name": "a", "strict": 1})), "response_format.json_schema.strict");
        let large = json!({"name": "a", "schema": {"enum": ["x".repeat(LARGEST)]}});
        assert_eq!(wrong(large), "response_format");
    }

    #[test]
    fn one_constraint_is_enough() {
        let both = Constraint::guided(Some(json!({})), Some("a".into()), None, None);
        assert_eq!(both.unwrap_err().param.as_deref(), Some("guided_regex"));
        let one = Constraint::guided(None, None, Some(vec!["a".into()]), None).unwrap();
        assert_eq!(one, Constraint::Choice(vec!["a".into()]));
        let schema = |given: Value| Constraint::guided(Some(given), None, None, None);
        assert_eq!(schema(json!({"a": 1})).unwrap(), schema(json!("{\"a\": 1}")).unwrap());
        assert_eq!(schema(json!("{")).unwrap_err().param.as_deref(), Some("guided_json"));
        let format =
            Constraint::of_format("response_format", Some(json!({"type": "json_object"}))).unwrap();
        assert_eq!(format.or(one).unwrap_err().param.as_deref(), Some("guided_choice"));
    }

    #[test]
    fn rules_are_escaped() {
        let rule = |pattern: &str| Constraint::Regex(pattern.into()).rule().unwrap();
        assert_eq!(rule("a/b"), r"/a\/b/");
        assert_eq!(rule(r"a\/b\\/"), r"/a\/b\\\//");
        let choice = Constraint::Choice(vec!["a\"".into(), "b".into()]);
        assert_eq!(choice.rule().unwrap(), r#""a\"" | "b""#);
    }
}
