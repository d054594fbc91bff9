//! Items of an input as messages of a chat.

use crate::error::{ApiError, Result};
use metal_candle::text::Message;
use serde_json::{Map, Value, json};

/// The message of a chat that an item is.
///
/// # Errors
/// A 400 that names the field that is wrong.
pub fn message((index, mut item): (usize, Map<String, Value>)) -> Result<Map<String, Value>> {
    // What an answer says of its items, which are given back as they were.
    item.shift_remove("id");
    item.shift_remove("status");
    let place = |name: &str| format!("input[{index}].{name}");
    let kind = item.shift_remove("type");
    let message = match kind.as_ref().map_or(Some("message"), Value::as_str) {
        Some("message") => {
            if let Some(Value::Array(parts)) = item.get_mut("content") {
                parts.iter_mut().for_each(plain);
            }
            return Ok(item);
        }
        Some("function_call") => {
            let mut take = |name: &str| item.shift_remove(name).unwrap_or_default();
            let (id, name, arguments) = (take("call_id"), take("name"), take("arguments"));
            let function = json!({"name": name, "arguments": arguments});
            let call = json!({"id": id, "type": "function", "function": function});
            json!({"role": "assistant", "tool_calls": [call]})
        }
        Some("function_call_output") => {
            let id = item.shift_remove("call_id").unwrap_or_default();
            let mut output = item.shift_remove("output").unwrap_or_default();
            if let Value::Array(parts) = &mut output {
                parts.iter_mut().for_each(plain);
            }
            json!({"role": "tool", "tool_call_id": id, "content": output})
        }
        Some("reasoning") => {
            item.shift_remove("summary");
            item.shift_remove("encrypted_content");
            let parts = item.shift_remove("content");
            let parts = parts.as_ref().and_then(Value::as_array).into_iter().flatten();
            let texts = parts.filter_map(|part| part.get("text").and_then(Value::as_str));
            let thoughts: String = texts.collect();
            json!({"role": "assistant", "content": "", "reasoning_content": thoughts})
        }
        Some("item_reference") => {
            let instead =
                "nothing is kept, so give the item itself, as clients do with \"store\": false";
            return Err(ApiError::unsupported(place("type"), instead));
        }
        _ => {
            let what = "expected \"message\", \"function_call\", \"function_call_output\" or \"reasoning\"";
            return Err(ApiError::field(place("type"), what));
        }
    };
    match (item.iter().find(|(_, value)| !value.is_null()), message) {
        (None, Value::Object(message)) => Ok(message),
        (Some((key, _)), _) => {
            let key = place(&metal_candle::readable(key));
            Err(ApiError::field(key, "is not a field of an item of this type"))
        }
        (None, _) => Ok(Map::new()),
    }
}

/// A part of a text under the name that chats have for it.
fn plain(part: &mut Value) {
    let Value::Object(fields) = part else { return };
    let is_text = matches!(
        fields.get("type").and_then(Value::as_str),
        Some("input_text" | "output_text" | "text")
    );
    if is_text {
        fields.insert("type".into(), "text".into());
        // What an answer says of its text.
        fields.shift_remove("annotations");
        fields.shift_remove("logprobs");
    }
}

/// The messages with what the model thought, said and called in one turn as one of them.
pub fn joined(messages: &[Message]) -> Vec<Message> {
    let is_of_model = |message: &Message| message.role() == "assistant";
    messages.chunk_by(|one, next| is_of_model(one) && is_of_model(next)).filter_map(turn).collect()
}

/// The message that those of one turn are together.
fn turn(messages: &[Message]) -> Option<Message> {
    let [first, _, ..] = messages else { return messages.first().cloned() };
    let text: String = messages.iter().filter_map(Message::text).collect();
    let mut message = first.clone().with("content", Value::from(text));
    if let Some(thoughts) = messages.iter().rev().find_map(|it| it.get("reasoning_content")) {
        message = message.with("reasoning_content", thoughts.clone());
    }
    let calls = messages.iter().filter_map(|it| it.get("tool_calls").and_then(Value::as_array));
    let calls: Vec<Value> = calls.flatten().cloned().collect();
    if !calls.is_empty() {
        message = message.with("tool_calls", Value::Array(calls));
    }
    Some(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::chat::messages::read;
    use metal_candle::text::ChatTemplate;
    use std::time::{Duration, Instant};

    fn messages(items: Value) -> Result<Vec<Message>> {
        let items: Vec<Map<String, Value>> = serde_json::from_value(items).unwrap();
        let items = items.into_iter().enumerate().map(message).collect::<Result<Vec<_>>>()?;
        let template = ChatTemplate::new("{{ messages }}", vec![], vec![], vec![]).unwrap();
        Ok(joined(&read("input", items, &template)?))
    }

    #[test]
    fn items_become_messages_and_a_turn_is_one() {
        let said =
            json!([{"type": "output_text", "text": "I do.", "annotations": [], "logprobs": []}]);
        let read = messages(json!([
            {"role": "user", "content": [{"type": "input_text", "text": "Do it."}]},
            {"type": "reasoning", "id": "rs_1", "summary": [],
             "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": said},
            {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "call_2", "name": "g", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "call_1", "output": "done"},
        ]))
        .unwrap();
        let roles: Vec<&str> = read.iter().map(Message::role).collect();
        assert_eq!(roles, ["user", "assistant", "tool"]);
        assert_eq!(read[1].text().unwrap(), "I do.");
        assert_eq!(read[1].get("reasoning_content"), Some(&json!("hm")));
        assert_eq!(read[1].get("tool_calls").unwrap().as_array().unwrap().len(), 2);
        assert_eq!(read[2].get("tool_call_id"), Some(&json!("call_1")));
    }

    #[test]
    fn a_turn_of_many_items_takes_no_longer_for_each() {
        let arguments = json!({"a": vec![0; 200]}).to_string();
        let call = |n: usize| json!({"type": "function_call", "call_id": format!("c{n}"), "name": "f", "arguments": arguments});
        let begun = Instant::now();
        let read = messages((0..4000).map(call).collect()).unwrap();
        assert_eq!(read.len(), 1);
        assert_eq!(read[0].get("tool_calls").unwrap().as_array().unwrap().len(), 4000);
        // It was minutes, as each was joined with all before it.
        assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (item, field) in [
            (json!({"type": "web_search_call", "id": "x"}), "type"),
            (json!({"role": "user"}), "content"),
            (json!({"role": "user", "content": [{"type": "input_image"}]}), "content[0].type"),
            (json!({"type": "function_call", "name": "f"}), "tool_calls[0].id"),
            (json!({"type": "function_call_output", "call_id": "a", "x": 1}), "x"),
        ] {
            let error = messages(json!([item])).unwrap_err();
            assert_eq!(error.param.unwrap(), format!("input[0].{field}"));
        }
        let error = messages(json!([{"type": "item_reference", "id": "x"}])).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("input[0].type"));
        assert!(error.message.contains("nothing is kept"), "{}", error.message);
    }
}
