//! The chat template: which one, and what it is told.

use crate::errors::usage;
use clap::Args;
use metal_candle::text::Tokenizer;
use metal_candle::{Error, files};
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::Path;

/// The largest file of a template, in bytes.
const LIMIT: u64 = 1 << 20;

/// Which chat template is used.
#[derive(Debug, Clone, Default, Args, Serialize)]
pub struct TemplateFlags {
    /// A chat template in place of the model's own: a file of Jinja, or its text
    #[arg(long, value_name = "FILE|TEXT", help_heading = "Chat template")]
    pub chat_template: Option<String>,
    /// Variables for the chat template, as '{"enable_thinking": false}'
    #[arg(long, value_name = "JSON", value_parser = object, help_heading = "Chat template")]
    pub chat_template_kwargs: Option<Map<String, Value>>,
}

fn object(text: &str) -> Result<Map<String, Value>, String> {
    match serde_json::from_str(text) {
        Ok(Value::Object(map)) => Ok(map),
        // What was expected is said for every flag of this kind.
        Ok(_) => Err("it is no object".into()),
        Err(error) => Err(error.to_string()),
    }
}

impl TemplateFlags {
    /// The variables.
    pub fn variables(&self) -> Map<String, Value> {
        self.chat_template_kwargs.clone().unwrap_or_default()
    }

    /// Gives the tokenizer the template, and checks what it is told.
    pub fn apply(&self, tokenizer: &mut Tokenizer) -> anyhow::Result<()> {
        if let Some(given) = &self.chat_template {
            set(tokenizer, &source(given)?)?;
        }
        check_variables(tokenizer, &self.variables())
    }
}

/// The source of a template that is given as a file or as its text.
pub fn source(given: &str) -> anyhow::Result<String> {
    let is_template = given.contains("{{") || given.contains("{%");
    if is_template && !Path::new(given).is_file() {
        return Ok(given.to_string());
    }
    let bytes = match files::read_limited_or_piped(given, LIMIT) {
        Err(Error::Io { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => {
            return Err(usage(format!(
                "chat_template: there is no file {}, and it is no template itself, which has {{{{ or {{% in it",
                crate::settings::cut(given)
            )));
        }
        read => read.map_err(|error| usage(format!("chat_template: {error}")))?,
    };
    String::from_utf8(bytes)
        .map_err(|_| usage(format!("chat_template: {given} is no text in UTF-8")))
}

/// Takes a template in place of the model's own.
pub fn set(tokenizer: &mut Tokenizer, source: &str) -> anyhow::Result<()> {
    tokenizer.set_chat_template(source).map_err(|error| {
        let text = error.to_string();
        usage(format!("chat_template: {}", text.replace("chat template: ", "")))
    })
}

/// That the template knows every variable, and none is one of those that it always has.
pub fn check_variables(
    tokenizer: &Tokenizer,
    variables: &Map<String, Value>,
) -> anyhow::Result<()> {
    let wrong = |message: String| Err(usage(format!("chat_template_kwargs: {message}")));
    for name in variables.keys() {
        let shown = crate::settings::cut(name);
        if ["messages", "tools", "add_generation_prompt"].contains(&name.as_str()) {
            return wrong(format!("{shown} is set by this program; leave it out"));
        }
        match tokenizer.chat_template() {
            None => {
                return wrong("the model has no chat template; --chat-template gives one".into());
            }
            Some(template) if !template.mentions(name) => {
                return wrong(format!(
                    "the chat template has no {shown}; is it another word there?"
                ));
            }
            Some(_) => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_template_is_a_file_or_a_text() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.jinja").display().to_string();
        std::fs::write(&path, "{{ messages }}\n").unwrap();
        assert_eq!(source(&path).unwrap(), "{{ messages }}\n");
        assert_eq!(source("{% for m in messages %}").unwrap(), "{% for m in messages %}");
        let error = source("chatml").unwrap_err().to_string();
        assert!(error.starts_with("chat_template: there is no file chatml, and"), "{error}");
        let error = source(&folder.path().display().to_string()).unwrap_err().to_string();
        assert!(error.contains("is a folder"), "{error}");
    }
}
