//! Calls and thoughts of models whose markers are special tokens, which texts are decoded without.

use crate::asking::Running;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const DEMO: &str = include_str!("../../../cli/demo/base/tokenizer_config.json");

/// A server whose template has this in it, and whose tokenizer has these special tokens.
fn server(sign: &str, special: &[&str]) -> Running {
    let settings: Value = serde_json::from_str(DEMO).unwrap();
    let template = settings["chat_template"].as_str().unwrap();
    Running::start(Some(&format!("{{# {sign} #}}{template}")), special)
}

fn chat(more: Value) -> Value {
    let mut request = json!({"model": "demo", "seed": 3, "temperature": 1, "max_tokens": 100,
        "messages": [{"role": "user", "content": "What is your name?"}]});
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}

/// What the deltas of a stream add up to: the content, the thoughts, and the calls' functions.
fn streamed(server: &Running, request: &Value) -> (String, String, Vec<Value>) {
    let chunks = server.events(CHAT, request);
    let deltas: Vec<&Value> = chunks.iter().map(|it| &it["choices"][0]["delta"]).collect();
    let text = |key: &str| deltas.iter().filter_map(|it| it[key].as_str()).collect::<String>();
    let calls = deltas.iter().filter_map(|it| it["tool_calls"].as_array()).flatten();
    let calls = calls.enumerate().map(|(index, call)| {
        assert_eq!(call["index"], index);
        call["function"].clone()
    });
    (text("content"), text("reasoning_content"), calls.collect())
}

#[test]
fn calls_are_told_in_every_format() {
    let parameters = json!({"type": "object", "required": ["n"], "additionalProperties": false,
        "properties": {"n": {"enum": [1, 2, 3]}}});
    let tool = |name: &str| json!({"type": "function", "function": {"name": name, "parameters": parameters}});
    for (sign, special) in [
        ("", &["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"][..]),
        ("", &["[TOOL_CALLS]"]),
        ("", &["<|/tool|>", "<|tool_call|>", "<|/tool_call|>"]),
        ("", &["<|tool_call|>"]),
        ("", &["<tool_call>", "</tool_call>"]),
        ("<tool_call>\n<function=", &["<tool_call>", "</tool_call>"]),
        ("", &["<|python_tag|>"]),
    ] {
        let server = server(&format!("{sign} {}", special.concat()), special);
        for parallel in [false, true] {
            let request = chat(json!({"tools": [tool("f"), tool("g")], "tool_choice": "required",
                "parallel_tool_calls": parallel, "max_tokens": 400}));
            let whole = server.good(CHAT, &request);
            let choice = &whole["choices"][0];
            assert_eq!(choice["finish_reason"], "tool_calls", "{special:?}: {choice}");
            assert_eq!(choice["message"]["content"], Value::Null, "{special:?}: {choice}");
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            assert!(parallel || calls.len() == 1, "{special:?}: {choice}");
            let functions: Vec<Value> = calls.iter().map(|it| it["function"].clone()).collect();
            for function in &functions {
                assert!(["f", "g"].contains(&function["name"].as_str().unwrap()));
                let arguments = function["arguments"].as_str().unwrap();
                let arguments: Value = serde_json::from_str(arguments).unwrap();
                assert!((1..=3).contains(&arguments["n"].as_i64().unwrap()), "{arguments}");
            }
            let told = streamed(&server, &request);
            assert_eq!(told, (String::new(), String::new(), functions), "{special:?}");
        }
    }
}

#[test]
fn thoughts_are_told_apart() {
    let server = server("<think>", &["<think>", "</think>"]);
    let grammar = r#"start: <think> "\n" /[a-z]{5,9}/ "\n" </think> "\n\nYes. ""#;
    let request = chat(json!({"guided_grammar": grammar}));
    let whole = server.good(CHAT, &request);
    let message = &whole["choices"][0]["message"];
    let thoughts = message["reasoning_content"].as_str().unwrap();
    assert!((5..=9).contains(&thoughts.len()), "{message}");
    assert_eq!(message["content"], "Yes. ");
    assert_eq!(streamed(&server, &request), ("Yes. ".into(), thoughts.into(), Vec::new()));
}
