//! `/v1/messages` and `/v1/responses`.

use crate::asking::{ask, ask_thinker, good, refused};
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";
const RESPONSES: &str = "/v1/responses";

/// The events of a stream, each of which says its name twice.
fn named_events(path: &str, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let (status, answer) = ask(path, &body);
    assert_eq!(status, 200, "{answer}");
    let blocks = answer.split("\n\n").filter(|block| !block.is_empty());
    blocks
        .filter_map(|block| block.strip_prefix("event: ")?.split_once("\ndata: "))
        .map(|(name, data)| {
            let data: Value = serde_json::from_str(data).unwrap();
            assert_eq!(data["type"], name);
            data
        })
        .collect()
}

fn with(mut request: Value, more: Value) -> Value {
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

#[test]
fn messages_are_answered_the_same_at_once_and_in_events() {
    let request = json!({"model": "demo", "max_tokens": 12, "temperature": 0, "system": "Be brief.",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "What is your name?"}]}]});
    let whole = good(MESSAGES, &request);
    assert_eq!((&whole["type"], &whole["role"]), (&json!("message"), &json!("assistant")));
    let events = named_events(MESSAGES, &request);
    let names: Vec<&str> = events.iter().map(|it| it["type"].as_str().unwrap()).collect();
    assert_eq!(names[..2], ["message_start", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let text: String = events.iter().filter_map(|it| it["delta"]["text"].as_str()).collect();
    // Without citations: Vercel's client takes no null for them.
    assert_eq!(whole["content"], json!([{"type": "text", "text": text}]));
    assert_eq!(events[1]["content_block"], json!({"type": "text", "text": ""}));
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"]["stop_reason"], whole["stop_reason"]);
    assert_eq!(end["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
    let mut counted = request.clone();
    counted.as_object_mut().unwrap().remove("max_tokens");
    let usage = &whole["usage"];
    let read = usage["input_tokens"].as_u64().unwrap()
        + usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(good("/v1/messages/count_tokens", &counted)["input_tokens"], read);

    let stopped = with(request.clone(), json!({"stop_sequences": ["a", "e", "i", "o"]}));
    let stopped = good(MESSAGES, &stopped);
    assert_eq!(stopped["stop_reason"], "stop_sequence");
    let vowels = text.find(['a', 'e', 'i', 'o']).unwrap();
    assert_eq!(stopped["stop_sequence"], text[vowels..=vowels], "{text}");

    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
        "additionalProperties": false});
    let tools = json!({"tools": [{"name": "f", "input_schema": schema}], "max_tokens": 60,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": true}});
    let request = with(request, tools);
    let whole = good(MESSAGES, &request);
    assert_eq!(whole["stop_reason"], "tool_use");
    assert!(whole["content"][0]["input"]["n"].is_u64(), "{whole}");
    let events = named_events(MESSAGES, &request);
    let parts = events.iter().filter_map(|it| it["delta"]["partial_json"].as_str());
    let input: Value = serde_json::from_str(&parts.collect::<String>()).unwrap();
    assert_eq!(input, whole["content"][0]["input"]);
}

#[test]
fn what_agents_send_beside_messages_is_taken() {
    let schema = json!({"type": "object"});
    let tool =
        json!({"name": "f", "input_schema": schema, "strict": true, "eager_input_streaming": true});
    let edit = json!({"type": "clear_thinking_20251015", "keep": "all"});
    let request = json!({"model": "demo", "max_tokens": 4, "temperature": 0, "tools": [tool],
        "cache_control": {"type": "ephemeral"}, "thinking": {"type": "adaptive", "display": "summarized"},
        "context_management": {"edits": [edit]}, "output_config": {"effort": "high"},
        "messages": [{"role": "user", "content": "a"}, {"role": "system", "content": "Be brief."}]});
    good(MESSAGES, &request);
    // The template says what becomes of a message of the system.
    let count = |request: &Value| {
        let mut counted = request.clone();
        counted.as_object_mut().unwrap().remove("max_tokens");
        good("/v1/messages/count_tokens", &counted)["input_tokens"].as_u64().unwrap()
    };
    let without = with(request.clone(), json!({"messages": [{"role": "user", "content": "a"}]}));
    assert!(count(&request) > count(&without));

    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "schema": schema});
    let more = json!({"output_config": {"format": format}, "max_tokens": 150, "tools": null});
    let told = good(MESSAGES, &with(request.clone(), more));
    let text = told["content"][0]["text"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(text).unwrap()["n"].is_u64(), "{text}");

    let forgets =
        json!({"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}});
    for (more, field) in [
        (json!({"context_management": {"edits": [edit, forgets]}}), "context_management.edits[1]"),
        (json!({"context_management": {"edits": [{"type": "compact_20260112"}]}}), "edits[0]"),
        (json!({"output_config": {"task_budget": {}}}), "task_budget"),
        (json!({"output_config": {"format": {"type": "text"}}}), "output_config.format"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 1024}}), "thinking.type"),
    ] {
        let (status, answer) = ask(MESSAGES, &with(request.clone(), more));
        assert!(status == 400 && answer.contains(field), "{field}: {answer}");
    }
}

#[test]
fn a_model_that_may_think_is_left_to_decide() {
    let count = |thinking: Value| {
        let request = json!({"model": "demo", "thinking": thinking,
            "messages": [{"role": "user", "content": "a"}]});
        let (status, answer) = ask_thinker("/v1/messages/count_tokens", &request);
        assert_eq!(status, 200, "{answer}");
        serde_json::from_str::<Value>(&answer).unwrap()["input_tokens"].as_u64().unwrap()
    };
    assert_eq!(count(json!({"type": "adaptive"})), count(Value::Null));
    assert!(count(json!({"type": "disabled"})) > count(Value::Null));
}

#[test]
fn errors_of_messages_are_anthropics() {
    let request = json!({"model": "demo", "messages": [{"role": "user", "content": "a"}]});
    // By these words clients know that they have to shorten something.
    for (words, more) in [
        (
            "prompt is too long: ",
            json!({"messages": [{"role": "user", "content": "word ".repeat(3000)}]}),
        ),
        ("prompt is too long: at least ", json!({"system": "word ".repeat(1 << 20)})),
        ("input length and `max_tokens` exceed context limit: ", json!({"max_tokens": 100_000})),
    ] {
        let (status, answer) =
            ask(MESSAGES, &with(with(request.clone(), json!({"max_tokens": 1})), more));
        let answer: Value = serde_json::from_str(&answer).unwrap();
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == 400 && message.starts_with(words), "{message}");
        assert!(message.contains(" > 204"), "{message}");
    }
    for (body, status, kind) in [
        (request.clone(), 400, "invalid_request_error"),
        (
            with(request.clone(), json!({"max_tokens": 1, "temperature": 1.5})),
            400,
            "invalid_request_error",
        ),
        (
            with(request.clone(), json!({"max_tokens": 1, "mcp_servers": []})),
            400,
            "invalid_request_error",
        ),
        (with(request, json!({"max_tokens": 1, "model": "other"})), 404, "not_found_error"),
        (json!({}), 400, "invalid_request_error"),
    ] {
        let (found, answer) = ask(MESSAGES, &body);
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(
            (found, &answer["type"], &answer["error"]["type"]),
            (status, &json!("error"), &json!(kind))
        );
    }
}

#[test]
fn responses_are_answered_the_same_at_once_and_in_events() {
    let request = json!({"model": "demo", "input": "What is your name?", "instructions": "Be brief.",
        "max_output_tokens": 12, "temperature": 0});
    let whole = good(RESPONSES, &request);
    let counted = good("/v1/responses/input_tokens", &request);
    let expected =
        json!({"object": "response.input_tokens", "input_tokens": whole["usage"]["input_tokens"]});
    assert_eq!(counted, expected);
    let events = named_events(RESPONSES, &request);
    for (number, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], number);
    }
    let text: String = events.iter().filter_map(|it| it["delta"].as_str()).collect();
    assert_eq!(whole["output"][0]["content"][0]["text"], text);
    let last = &events.last().unwrap()["response"];
    for key in ["status", "usage", "incomplete_details", "tools", "temperature"] {
        assert_eq!(last[key], whole[key], "{key}");
    }
    let names: Vec<&str> = events.iter().map(|it| it["type"].as_str().unwrap()).collect();
    assert_eq!(
        names[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );

    let schema = json!({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"],
        "additionalProperties": false});
    let format = json!({"type": "json_schema", "name": "s", "schema": schema, "strict": true});
    let formatted =
        with(request.clone(), json!({"text": {"format": format}, "max_output_tokens": 150}));
    let told = good(RESPONSES, &formatted);
    let text = told["output"][0]["content"][0]["text"].as_str().unwrap();
    assert!(serde_json::from_str::<Value>(text).unwrap()["n"].is_u64(), "{text}");
    assert_eq!(told["status"], "completed");

    let tools = json!({"tools": [{"type": "function", "name": "f", "parameters": schema}],
        "tool_choice": {"type": "function", "name": "f"}, "max_output_tokens": 150});
    let called = with(request.clone(), tools);
    let told = good(RESPONSES, &called);
    let call = &told["output"][0];
    assert_eq!((&call["type"], &call["name"]), (&json!("function_call"), &json!("f")));
    let events = named_events(RESPONSES, &called);
    let done = events.iter().find(|it| it["type"] == "response.function_call_arguments.done");
    assert_eq!(done.unwrap()["arguments"], call["arguments"]);
    let output = json!({"type": "function_call_output", "call_id": call["call_id"], "output": "2"});
    let items = json!([{"role": "user", "content": "Call f."}, call, output]);
    good(RESPONSES, &with(request.clone(), json!({"input": items})));
    let encrypted = json!({"include": ["reasoning.encrypted_content"], "store": false});
    good(RESPONSES, &with(request.clone(), encrypted));

    for (more, field) in [
        (json!({"store": true}), "store"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"text": {"format": {"type": "x"}}}), "text.format.type"),
        (json!({"include": ["message.output_text.logprobs"]}), "include"),
        (json!({"input": []}), "input"),
        (json!({"input": "word ".repeat(3000)}), "input"),
        (json!({"input": "word ".repeat(1 << 20)}), "input"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"max_output_tokens": 100_000}), "max_output_tokens"),
    ] {
        assert_eq!(refused(RESPONSES, &with(request.clone(), more)), field);
    }
}
