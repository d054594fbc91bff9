//! The messages of a conversation, checked field by field.

use crate::conversation::MOST_MESSAGES;
use crate::error::{ApiError, Result};
use metal_candle::text::{ChatTemplate, Message};
use serde_json::{Map, Value, json};

/// The messages of a request, which `field` has, as chat templates know them: contents are strings, or lists of texts
/// where the template writes such itself, and the arguments of calls are texts.
///
/// # Errors
/// A 400 that names the field that is wrong.
pub fn read(
    field: &str,
    messages: Vec<Map<String, Value>>,
    template: &ChatTemplate,
) -> Result<Vec<Message>> {
    match messages.len() {
        0 => return Err(ApiError::field(field, "is empty, expected at least one message")),
        count if count > MOST_MESSAGES => {
            let what = format!("has {count} messages, expected at most {MOST_MESSAGES}");
            return Err(ApiError::field(field, what));
        }
        _ => {}
    }
    let messages = messages.into_iter().enumerate();
    let messages = messages.map(|(index, fields)| one(&format!("{field}[{index}]"), fields));
    let messages = messages.collect::<Result<Vec<_>>>()?;
    Ok(template.fitted(&messages).into_owned())
}

/// Who of several in a role speaks.
const NAME: &str = "name";

fn one(place: &str, mut fields: Map<String, Value>) -> Result<Message> {
    let place = |name: &str| format!("{place}.{name}");
    let wrong = |name: &str, what: &str| ApiError::field(place(name), what);
    fields.retain(|_, value| !value.is_null());
    let Some(Value::String(role)) = fields.remove("role") else {
        return Err(wrong("role", "expected a string"));
    };
    let content = fields.remove("content");
    let content = content.map(|content| checked(&place("content"), content)).transpose()?;
    let says = |role: &str, content| Message::new(role, "").with("content", content);
    let mut message = match (role.as_str(), content) {
        ("system" | "developer" | "user" | "tool", Some(content)) => says(&role, content),
        ("assistant", content) => assistant(&place(""), content, &mut fields)?,
        ("system" | "developer" | "user" | "tool", None) => {
            return Err(wrong("content", "is missing, expected a string or a list of texts"));
        }
        ("function", _) => {
            return Err(ApiError::unsupported(
                place("role"),
                "results of tools have the role \"tool\"",
            ));
        }
        _ => {
            let found = metal_candle::readable(&role);
            let what = format!(
                "is {found:?}, expected \"system\", \"developer\", \"user\", \"assistant\" or \"tool\""
            );
            return Err(wrong("role", &what));
        }
    };
    if role == "tool" {
        let Some(Value::String(id)) = fields.remove("tool_call_id") else {
            return Err(wrong("tool_call_id", "expected the identifier of a call"));
        };
        message = message.with("tool_call_id", Value::from(id));
    }
    match fields.remove(NAME) {
        Some(name @ Value::String(_)) => message = message.with(NAME, name),
        Some(_) => return Err(wrong(NAME, "expected a string")),
        None => {}
    }
    match fields.keys().next() {
        None => Ok(message),
        Some(key) => {
            let key = metal_candle::readable(key);
            Err(wrong(&key, &format!("is not a field of messages with the role {role:?}")))
        }
    }
}

/// A message that a model has written.
fn assistant(
    place: &str,
    content: Option<Value>,
    fields: &mut Map<String, Value>,
) -> Result<Message> {
    let field = |name: &str| format!("{place}{name}");
    for (name, instead) in
        [("function_call", "calls are given as \"tool_calls\""), ("audio", "there are texts alone")]
    {
        if fields.contains_key(name) {
            return Err(ApiError::unsupported(field(name), instead));
        }
    }
    // Messages are given back as they were answered, with lists that are empty.
    for name in ["annotations", "tool_calls"] {
        if fields.get(name).and_then(Value::as_array).is_some_and(Vec::is_empty) {
            fields.remove(name);
        }
    }
    let mut string = |name: &str| match fields.remove(name) {
        None => Ok(None),
        Some(Value::String(text)) => Ok(Some(text)),
        Some(_) => Err(ApiError::field(field(name), "expected a string")),
    };
    let refusal = string("refusal")?;
    let (reasoning_content, reasoning) = (string("reasoning_content")?, string("reasoning")?);
    let calls = fields.remove("tool_calls").map(|calls| tool_calls(&field("tool_calls"), calls));
    let calls = calls.transpose()?;
    let without = || calls.as_ref().map(|_| Value::from(""));
    let Some(content) = content.or(refusal.map(Value::from)).or_else(without) else {
        let what = "is missing, expected a string or a list of texts";
        return Err(ApiError::field(field("content"), what));
    };
    let mut message = Message::new("assistant", "").with("content", content);
    if let Some(reasoning) = reasoning_content.or(reasoning) {
        message = message.with("reasoning_content", Value::from(reasoning));
    }
    Ok(match calls {
        Some(calls) => message.with("tool_calls", calls),
        None => message,
    })
}

/// A content: a string, or a list of parts of the type `text`.
fn checked(place: &str, content: Value) -> Result<Value> {
    let parts = match content {
        Value::String(_) => return Ok(content),
        Value::Array(parts) if !parts.is_empty() => parts,
        _ => {
            let what = "expected a string or a list of parts of the type \"text\"";
            return Err(ApiError::field(place, what));
        }
    };
    let mut texts = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        let place = format!("{place}[{index}]");
        let Some(part) = part.as_object() else {
            return Err(ApiError::field(place, "expected an object with \"type\" and \"text\""));
        };
        let key = match part.get("type").and_then(Value::as_str) {
            Some(kind @ ("text" | "refusal")) => kind,
            Some(kind) => {
                let kind = metal_candle::readable(kind);
                let what =
                    format!("is {kind:?}, and this model reads parts of the type \"text\" alone");
                return Err(ApiError::field(format!("{place}.type"), what));
            }
            None => return Err(ApiError::field(format!("{place}.type"), "expected \"text\"")),
        };
        match part.get(key) {
            Some(Value::String(text)) if part.len() == 2 => {
                texts.push(json!({"type": "text", "text": text}));
            }
            Some(Value::String(_)) => {
                let what = format!("expected the fields \"type\" and {key:?} alone");
                return Err(ApiError::field(place, what));
            }
            _ => return Err(ApiError::field(format!("{place}.{key}"), "expected a string")),
        }
    }
    Ok(Value::from(texts))
}

/// Calls with their arguments as the client wrote them, which are the JSON of an object. What form of them the template
/// is shown is decided when it is rendered.
fn tool_calls(place: &str, calls: Value) -> Result<Value> {
    let Value::Array(calls) = calls else {
        return Err(ApiError::field(place, "expected a list of calls"));
    };
    let one = |(index, call): (usize, Value)| {
        let wrong =
            |name: &str, what: &str| ApiError::field(format!("{place}[{index}]{name}"), what);
        let kind = call.get("type").and_then(Value::as_str);
        if kind.is_some_and(|kind| kind != "function") {
            return Err(wrong(".type", "expected \"function\""));
        }
        let Some(id) = call.get("id").and_then(Value::as_str) else {
            return Err(wrong(".id", "expected a string"));
        };
        let function = call.get("function");
        let given = |key: &str| function.and_then(|it| it.get(key)).and_then(Value::as_str);
        let Some(name) = given("name") else {
            return Err(wrong(".function.name", "expected a string"));
        };
        let arguments = given("arguments").map(|arguments| match arguments.trim() {
            "" => "{}",
            _ => arguments,
        });
        let is_object = |text: &&str| serde_json::from_str::<Map<String, Value>>(text).is_ok();
        let Some(arguments) = arguments.filter(is_object) else {
            return Err(wrong(
                ".function.arguments",
                "expected a string with the JSON of an object",
            ));
        };
        let function = json!({"name": name, "arguments": arguments});
        Ok(json!({"id": id, "type": "function", "function": function}))
    };
    let calls = calls.into_iter().enumerate().map(one).collect::<Result<Vec<Value>>>()?;
    Ok(Value::Array(calls))
}

#[cfg(test)]
mod tests {
    use super::*;
    use metal_candle::text::RenderOptions;

    fn messages(value: Value) -> Result<Vec<Message>> {
        let template = ChatTemplate::new("{{ messages }}", vec![], vec![], vec![]).unwrap();
        read("messages", serde_json::from_value(value).unwrap(), &template)
    }

    #[test]
    fn every_role_is_read() {
        let call = |arguments: &str| {
            let function = json!({"name": "f", "arguments": arguments});
            json!([{"id": "call_1", "type": "function", "function": function}])
        };
        let read = messages(json!([
            {"role": "developer", "content": "Be brief.", "name": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": null, "tool_calls": call("{\"a\": 1}"), "refusal": null,
             "annotations": [], "audio": null, "function_call": null},
            {"role": "tool", "content": "2", "tool_call_id": "call_1"},
            {"role": "assistant", "content": "c", "reasoning_content": "hm", "tool_calls": []},
        ]))
        .unwrap();
        assert_eq!(read[0], Message::new("system", "Be brief.").with("name", json!("d")));
        assert_eq!(read[1], Message::new("user", "ab"));
        let arguments = &read[2].get("tool_calls").unwrap()[0]["function"]["arguments"];
        assert_eq!((arguments, read[2].text().unwrap().as_str()), (&json!("{\"a\": 1}"), ""));
        assert_eq!(read[3].get("tool_call_id"), Some(&json!("call_1")));
        assert_eq!(read[4].get("reasoning_content"), Some(&json!("hm")));
        let knows =
            ChatTemplate::new("{% if role == 'developer' %}x{% endif %}", vec![], vec![], vec![]);
        let message = json!([{"role": "developer", "content": "a"}]);
        let read =
            super::read("messages", serde_json::from_value(message).unwrap(), &knows.unwrap())
                .unwrap();
        assert_eq!(read[0].role(), "developer");
    }

    #[test]
    fn parts_go_to_templates_that_write_all_of_them() {
        let conversation = |message: &Value| {
            let user = json!({"role": "user", "content": "a"});
            let call = json!({"id": "abcdefgh1", "type": "function", "function": {"name": "f", "arguments": "{}"}});
            let called = json!({"role": "assistant", "content": null, "tool_calls": [call]});
            match message["role"].as_str().unwrap() {
                "system" => vec![message.clone(), user],
                "tool" => vec![user, called, message.clone()],
                _ => vec![message.clone()],
            }
        };
        let rendered = |source: &str, role: &str| {
            let template = ChatTemplate::new(source, vec![], vec![], vec![]).unwrap();
            let parts = json!([{"type": "text", "text": "one "}, {"type": "text", "text": " two"}]);
            let mut message = json!({"role": role, "content": parts});
            if role == "tool" {
                message["tool_call_id"] = json!("abcdefgh1");
            }
            let messages = serde_json::from_value(conversation(&message).into()).unwrap();
            let messages = super::read("messages", messages, &template).unwrap();
            template.render(&messages, &RenderOptions::default()).unwrap()
        };
        // As Gemma 3 writes them: its system takes the first part alone.
        let gemma = "{% for message in messages %}<{{ message.role }}>\
            {% if message.content is string %}{{ message.content | trim }}\
            {% elif message.role == 'system' %}{{ message.content[0].text | trim }}\
            {% else %}{% for item in message.content %}{{ item.text | trim }}{% endfor %}{% endif %}{% endfor %}";
        assert_eq!(rendered(gemma, "user"), "<user>onetwo");
        assert_eq!(rendered(gemma, "system"), "<system>one  two<user>a");
        assert_eq!(rendered(gemma, "tool"), "<user>a<assistant><tool>onetwo");
        for plain in [
            "{% for message in messages %}{{ message.content }}{% endfor %}",
            "{% for message in messages %}{{ message.content | tojson if message.content is not string else message.content }}{% endfor %}",
            "{% for message in messages %}{{ '' + message.content }}{% endfor %}",
            "{% for message in messages %}{{ message.content if message.content is string else '' }}{% endfor %}",
        ] {
            assert_eq!(rendered(plain, "user"), "one  two", "{plain}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let field = |message: Value| {
            let conversation = json!([{"role": "user", "content": "a"}, message]);
            messages(conversation).unwrap_err().param.unwrap()
        };
        let image = json!([{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "x"}}]);
        let called = |call: Value| json!({"role": "assistant", "tool_calls": [call]});
        for (message, name) in [
            (json!({"content": "a"}), "role"),
            (json!({"role": "robot", "content": "a"}), "role"),
            (json!({"role": "function", "content": "a"}), "role"),
            (json!({"role": "user"}), "content"),
            (json!({"role": "user", "content": 1}), "content"),
            (json!({"role": "user", "content": []}), "content"),
            (json!({"role": "user", "content": image}), "content[1].type"),
            (json!({"role": "user", "content": [{"type": "text"}]}), "content[0].text"),
            (json!({"role": "user", "content": "a", "mood": "good"}), "mood"),
            (json!({"role": "user", "content": "a", "tool_calls": []}), "tool_calls"),
            (json!({"role": "tool", "content": "a"}), "tool_call_id"),
            (json!({"role": "assistant"}), "content"),
            (json!({"role": "assistant", "function_call": {}}), "function_call"),
            (called(json!({})), "tool_calls[0].id"),
            (called(json!({"id": "a"})), "tool_calls[0].function.name"),
            (
                called(json!({"id": "a", "function": {"name": "f", "arguments": "1"}})),
                "tool_calls[0].function.arguments",
            ),
        ] {
            assert_eq!(field(message), format!("messages[1].{name}"));
        }
        assert_eq!(messages(json!([])).unwrap_err().param.as_deref(), Some("messages"));
    }
}
