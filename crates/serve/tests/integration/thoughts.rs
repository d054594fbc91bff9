//! Thoughts and calls, by a template that knows of both.

use crate::asking::ask_thinker;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn chat(more: Value) -> Value {
    let mut request = json!({"model": "demo", "seed": 7, "max_tokens": 100, "temperature": 1,
        "messages": [{"role": "user", "content": "What is your name?"}]});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

fn good(path: &str, body: &Value) -> Value {
    let (status, answer) = ask_thinker(path, body);
    assert_eq!(status, 200, "{answer}");
    serde_json::from_str(&answer).unwrap()
}

/// What the deltas of a stream say under this name.
fn streamed(body: &Value, name: &str) -> String {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let (status, answer) = ask_thinker(CHAT, &body);
    assert_eq!(status, 200, "{answer}");
    let data = answer.split("\n\n").filter_map(|it| it.strip_prefix("data: {"));
    let chunks = data.map(|it| serde_json::from_str::<Value>(&format!("{{{it}")).unwrap());
    let texts = chunks.map(|it| it["choices"][0]["delta"][name].as_str().unwrap_or("").to_string());
    texts.collect()
}

#[test]
fn thoughts_are_told_apart_from_the_answer() {
    let grammar = r#"start: "<think>\n" /[a-z]{5,9}/ "\n</think>\n\nYes, <b>. ""#;
    let request = chat(json!({"guided_grammar": grammar}));
    let whole = good(CHAT, &request);
    let message = &whole["choices"][0]["message"];
    let thoughts = message["reasoning_content"].as_str().unwrap();
    assert!((5..=9).contains(&thoughts.len()), "{message}");
    assert_eq!(message["content"], "Yes, <b>. ");
    let details = &whole["usage"]["completion_tokens_details"];
    assert!(details["reasoning_tokens"].as_u64().unwrap() > 0, "{details}");
    assert_eq!(streamed(&request, "reasoning_content"), thoughts);
    assert_eq!(streamed(&request, "content"), "Yes, <b>. ");
    // Given back, they are what the template makes of them.
    let mut next = request.clone();
    next["messages"] =
        json!([request["messages"][0], message, {"role": "user", "content": "And?"}]);
    good(CHAT, &next);
}

#[test]
fn the_template_writes_tools_and_its_variables_are_told() {
    let parameters = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
        "additionalProperties": false});
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": parameters}}]);
    let prompt = |more: Value| {
        let mut request = json!({"messages": [{"role": "user", "content": "Hi."}]});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let tokens = good("/tokenize", &request)["tokens"].clone();
        good("/detokenize", &json!({"tokens": tokens}))["prompt"].as_str().unwrap().to_string()
    };
    assert!(prompt(json!({"tools": tools})).contains("<tools>\n{\"type\": \"function\""));
    let quiet = json!({"chat_template_kwargs": {"enable_thinking": false}});
    assert!(prompt(quiet.clone()).ends_with("<think>\n\n</think>\n\n"));
    assert!(prompt(json!({})).ends_with("assistant\n"));

    let mut request = chat(quiet);
    for (key, value) in [("tools", tools), ("tool_choice", json!("required"))] {
        request[key] = value;
    }
    let whole = good(CHAT, &request);
    let message = &whole["choices"][0]["message"];
    let calls = message["tool_calls"].as_array().unwrap();
    let result = |call: &Value| json!({"role": "tool", "tool_call_id": call["id"], "content": "2"});
    let mut messages = vec![request["messages"][0].clone(), message.clone()];
    messages.extend(calls.iter().map(result));
    let rendered = prompt(json!({"messages": messages}));
    assert!(
        rendered.contains("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": "),
        "{rendered}"
    );
    assert!(rendered.contains("<tool_response>\n2\n</tool_response>"), "{rendered}");
}
