//! Messages of blocks as chat templates know messages: a call is a field of its message, a result a message.

use crate::conversation::MOST_MESSAGES;
use crate::error::{ApiError, Result};
use metal_candle::text::{ChatTemplate, Message};
use serde_json::{Map, Value, json};

/// The messages of a conversation, with several blocks of text as a list where the template writes such itself.
///
/// # Errors
/// A 400 that names the field that is wrong.
pub fn read(
    system: Option<Value>,
    messages: Vec<Map<String, Value>>,
    template: &ChatTemplate,
) -> Result<Vec<Message>> {
    if !(1..=MOST_MESSAGES).contains(&messages.len()) {
        let what = format!("has {} messages, expected 1 to {MOST_MESSAGES}", messages.len());
        return Err(ApiError::field("messages", what));
    }
    let mut read = Vec::new();
    if let Some(system) = system {
        read.push(says("system", texts(blocks("system", system)?)?));
    }
    let last = messages.len() - 1;
    for (index, mut fields) in messages.into_iter().enumerate() {
        let place = format!("messages[{index}]");
        let wrong = |name: &str, what: &str| ApiError::field(format!("{place}.{name}"), what);
        let role = fields.remove("role");
        let content = fields.remove("content");
        if let Some(key) = fields.keys().next() {
            return Err(wrong(&metal_candle::readable(key), "is not a field of a message"));
        }
        let Some(content) = content else { return Err(wrong("content", "is missing")) };
        let content = blocks(&format!("{place}.content"), content)?;
        match role.as_ref().and_then(Value::as_str) {
            Some("user") => user(content, &mut read)?,
            // Where it stands is for the chat template to take or to refuse.
            Some("system") => read.push(says("system", texts(content)?)),
            Some("assistant") if index < last => read.push(assistant(content)?),
            Some("assistant") => {
                let instead = "the last message has to be the user's, as answers are written from their beginning";
                return Err(ApiError::unsupported(place, instead));
            }
            _ => return Err(wrong("role", "expected \"user\", \"assistant\" or \"system\"")),
        }
    }
    Ok(template.fitted(&read).into_owned())
}

/// What somebody says in these texts.
fn says(role: &str, mut texts: Vec<String>) -> Message {
    if texts.len() < 2 {
        return Message::new(role, texts.pop().unwrap_or_default());
    }
    let parts = texts.into_iter().map(|text| json!({"type": "text", "text": text}));
    Message::new(role, "").with("content", parts.collect())
}

/// A block and where it stands.
struct Block {
    place: String,
    kind: String,
    fields: Map<String, Value>,
}

impl Block {
    fn take(&mut self, name: &str) -> Option<Value> {
        self.fields.remove(name).filter(|value| !value.is_null())
    }

    fn string(&mut self, name: &str) -> Result<String> {
        match self.take(name) {
            Some(Value::String(text)) => Ok(text),
            _ => Err(ApiError::field(format!("{}.{name}", self.place), "expected a string")),
        }
    }

    /// That nothing is left that nobody has looked at.
    fn end(mut self) -> Result<()> {
        // Prompts are cached in any case.
        self.fields.remove("cache_control");
        self.fields.retain(|_, value| !value.is_null());
        match self.fields.keys().next() {
            None => Ok(()),
            Some(key) => {
                let key = format!("{}.{}", self.place, metal_candle::readable(key));
                Err(ApiError::field(key, format!("is not a field of a block {:?}", self.kind)))
            }
        }
    }

    fn unexpected(&self, expected: &str) -> ApiError {
        let found = metal_candle::readable(&self.kind);
        let what = format!("is {found:?}, expected {expected}");
        ApiError::field(format!("{}.type", self.place), what)
    }
}

fn blocks(place: &str, content: Value) -> Result<Vec<Block>> {
    let parts = match content {
        Value::String(text) => vec![json!({"type": "text", "text": text})],
        Value::Array(parts) => parts,
        _ => return Err(ApiError::field(place, "expected a string or a list of blocks")),
    };
    let block = |(index, part): (usize, Value)| {
        let place = format!("{place}[{index}]");
        let Value::Object(mut fields) = part else {
            return Err(ApiError::field(place, "expected an object with \"type\""));
        };
        let Some(Value::String(kind)) = fields.remove("type") else {
            return Err(ApiError::field(format!("{place}.type"), "expected a string"));
        };
        Ok(Block { place, kind, fields })
    };
    parts.into_iter().enumerate().map(block).collect()
}

/// The texts of blocks that are nothing else.
fn texts(blocks: Vec<Block>) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for mut block in blocks {
        if block.kind != "text" {
            return Err(block.unexpected("\"text\", which is all that this model reads"));
        }
        texts.push(block.string("text")?);
        block.end()?;
    }
    Ok(texts)
}

/// What the user says, and before it the results of calls.
fn user(content: Vec<Block>, messages: &mut Vec<Message>) -> Result<()> {
    let mut said = Vec::new();
    for mut block in content {
        match block.kind.as_str() {
            "text" => said.push(block.string("text")?),
            "tool_result" => {
                let id = block.string("tool_use_id")?;
                let place = format!("{}.content", block.place);
                let content = block.take("content").map(|content| texts(blocks(&place, content)?));
                let mut content = content.transpose()?.unwrap_or_default();
                match block.take("is_error") {
                    None | Some(Value::Bool(false)) => {}
                    Some(Value::Bool(true)) => match content.first_mut() {
                        Some(first) => first.insert_str(0, "Error: "),
                        None => content.push("Error: ".into()),
                    },
                    Some(_) => {
                        let place = format!("{}.is_error", block.place);
                        return Err(ApiError::field(place, "expected true or false"));
                    }
                }
                let message = says("tool", content);
                messages.push(message.with("tool_call_id", Value::from(id)));
            }
            _ => return Err(block.unexpected("\"text\" or \"tool_result\"")),
        }
        block.end()?;
    }
    if !said.is_empty() {
        messages.push(says("user", said));
    }
    Ok(())
}

/// What the model said, thought and called.
fn assistant(blocks: Vec<Block>) -> Result<Message> {
    let (mut said, mut thought, mut calls) = (Vec::new(), String::new(), Vec::new());
    for mut block in blocks {
        match block.kind.as_str() {
            "text" => {
                said.push(block.string("text")?);
                // What it refers to, which templates know nothing of.
                block.take("citations");
            }
            "thinking" => {
                thought.push_str(&block.string("thinking")?);
                block.take("signature");
            }
            "tool_use" => {
                let (id, name) = (block.string("id")?, block.string("name")?);
                if block.take("caller").is_some_and(|caller| caller != json!({"type": "direct"})) {
                    let place = format!("{}.caller", block.place);
                    return Err(ApiError::unsupported(place, "the model itself calls tools"));
                }
                let Some(input @ Value::Object(_)) = block.take("input") else {
                    let place = format!("{}.input", block.place);
                    return Err(ApiError::field(place, "expected an object"));
                };
                let function = json!({"name": name, "arguments": input});
                calls.push(json!({"id": id, "type": "function", "function": function}));
            }
            _ => return Err(block.unexpected("\"text\", \"thinking\" or \"tool_use\"")),
        }
        block.end()?;
    }
    let mut message = says("assistant", said);
    if !thought.is_empty() {
        message = message.with("reasoning_content", Value::from(thought));
    }
    if !calls.is_empty() {
        message = message.with("tool_calls", Value::Array(calls));
    }
    Ok(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn messages(value: Value) -> Result<Vec<Message>> {
        messages_for("{{ messages }}", value)
    }

    fn messages_for(template: &str, value: Value) -> Result<Vec<Message>> {
        let template = ChatTemplate::new(template, vec![], vec![], vec![]).unwrap();
        let system = Some(json!([{"type": "text", "text": "Be brief."}]));
        read(system, serde_json::from_value(value).unwrap(), &template)
    }

    #[test]
    fn texts_stay_apart_for_templates_that_write_parts() {
        let parts = "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}\
            {% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}";
        let text = |text: &str| json!({"type": "text", "text": text});
        let result = json!({"type": "tool_result", "tool_use_id": "toolu_1", "is_error": true,
            "content": [text("no"), text(" way")]});
        let conversation = json!([{"role": "user", "content": [result, text("a "), text(" b")]}]);
        let read = messages_for(parts, conversation.clone()).unwrap();
        let contents: Vec<&Value> = read.iter().map(|it| it.get("content").unwrap()).collect();
        let (error, said) =
            (json!([text("Error: no"), text(" way")]), json!([text("a "), text(" b")]));
        assert_eq!(contents, [&json!("Be brief."), &error, &said]);
        let read = messages(conversation).unwrap();
        assert_eq!(read[1].get("content"), Some(&json!("Error: no way")));
        assert_eq!(read[2].get("content"), Some(&json!("a  b")));
    }

    #[test]
    fn blocks_become_messages() {
        let cached = json!({"type": "ephemeral"});
        let read = messages(json!([
            {"role": "user", "content": [{"type": "text", "text": "Do", "cache_control": cached},
                {"type": "text", "text": " it."}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""},
                {"type": "text", "text": "I do."},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": 1},
                    "caller": {"type": "direct"}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no", "is_error": true},
                {"type": "text", "text": "And?"}]},
            {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
            {"role": "user", "content": "Well?"}
        ]))
        .unwrap();
        let roles: Vec<&str> = read.iter().map(Message::role).collect();
        assert_eq!(roles, ["system", "user", "assistant", "tool", "user", "system", "user"]);
        assert_eq!(read[1].text().unwrap(), "Do it.");
        assert_eq!(read[2].get("tool_calls").unwrap()[0]["function"]["arguments"]["a"], 1);
        assert_eq!(read[2].get("reasoning_content"), Some(&json!("hm")));
        assert_eq!(read[3].text().unwrap(), "Error: no");
        assert_eq!(read[5].text().unwrap(), "Be kind.");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (message, field) in [
            (json!({"role": "robot", "content": "a"}), "role"),
            (json!({"role": "system", "content": [{"type": "image"}]}), "content[0].type"),
            (json!({"role": "user"}), "content"),
            (
                json!({"role": "user", "content": [{"type": "image", "source": {}}]}),
                "content[0].type",
            ),
            (json!({"role": "user", "content": [{"type": "text"}]}), "content[0].text"),
            (
                json!({"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}),
                "content[0].b",
            ),
            (
                json!({"role": "user", "content": [{"type": "tool_result"}]}),
                "content[0].tool_use_id",
            ),
            (json!({"role": "user", "content": "a", "name": "b"}), "name"),
        ] {
            let error = messages(json!([message])).unwrap_err();
            assert_eq!(error.param.unwrap(), format!("messages[0].{field}"));
        }
        let prefilled =
            json!([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]);
        assert_eq!(messages(prefilled).unwrap_err().param.as_deref(), Some("messages[1]"));
        assert_eq!(messages(json!([])).unwrap_err().param.as_deref(), Some("messages"));
    }
}
