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

const MESSAGES: [&str; 7] = [
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|channel|>",
    "<|constrain|>",
    "<|return|>",
    "<|call|>",
];

/// A server with gpt-oss's kind of template and special tokens.
fn server_of_messages() -> Running {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/templates/harmony.jinja");
    Running::start(Some(&std::fs::read_to_string(path).unwrap()), &MESSAGES)
}

#[test]
fn messages_of_a_text_are_told_apart() {
    let server = server_of_messages();
    let thoughts = r#"<|channel|> "analysis" <|message|> /[a-z]{5,9}/"#;
    let preamble = r#"<|channel|> "commentary" <|message|> "I say:""#;
    let answer = r#"<|channel|> "final" <|message|> "Yes. ""#;
    let next = r#"<|end|> <|start|> "assistant""#;
    let grammar = format!("start: {thoughts} {next} {preamble} {next} {answer}");
    let request = chat(json!({"guided_grammar": grammar, "reasoning_effort": "low"}));
    let whole = server.good(CHAT, &request);
    let message = &whole["choices"][0]["message"];
    let thoughts = message["reasoning_content"].as_str().unwrap();
    assert!((5..=9).contains(&thoughts.len()), "{message}");
    assert_eq!(message["content"], "I say:\n\nYes. ");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let count = |usage: &Value| usage["completion_tokens_details"]["reasoning_tokens"].as_u64();
    let (thought, all) = (count(&whole["usage"]).unwrap(), &whole["usage"]["completion_tokens"]);
    // The tokens of the thoughts, and those that are around them.
    assert!((2..=11).contains(&thought) && thought < all.as_u64().unwrap(), "{whole}");
    let said = ("I say:\n\nYes. ".into(), thoughts.into(), Vec::new());
    assert_eq!(streamed(&server, &request), said);
    // As the template writes it, which is told how hard to think.
    let tokens = server.good(
        "/tokenize",
        &json!({"messages": [request["messages"][0], message,
        {"role": "user", "content": "And?"}], "chat_template_kwargs": {"reasoning_effort": "low"}}),
    );
    let prompt = server.good("/detokenize", &json!({"tokens": tokens["tokens"]}));
    let prompt = prompt["prompt"].as_str().unwrap();
    assert!(prompt.starts_with("<|start|>system<|message|>Reasoning: low<|end|>"), "{prompt}");
    let end = "<|channel|>final<|message|>I say:\n\nYes. <|end|><|start|>user<|message|>And?<|end|><|start|>assistant";
    assert!(prompt.ends_with(end), "{prompt}");
}

#[test]
fn calls_and_answers_are_asked_of_a_text_of_messages() {
    let server = server_of_messages();
    let parameters = json!({"type": "object", "required": ["n"], "additionalProperties": false,
        "properties": {"n": {"enum": [1, 2, 3]}}});
    let tool = json!({"type": "function", "function": {"name": "f", "parameters": parameters}});
    // Where it thinks, it ends its thoughts soon.
    let end = server.good("/tokenize", &json!({"prompt": "<|end|>", "add_special_tokens": false}));
    let bias = json!({end["tokens"][0].to_string(): 100});
    for seed in 0..4 {
        let request = chat(
            json!({"tools": [tool], "tool_choice": "required", "seed": seed, "logit_bias": bias}),
        );
        let whole = server.good(CHAT, &request);
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        assert_eq!(choice["message"]["content"], Value::Null, "{choice}");
        let function = &choice["message"]["tool_calls"][0]["function"];
        assert_eq!(function["name"], "f");
        let arguments: Value =
            serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
        assert!((1..=3).contains(&arguments["n"].as_i64().unwrap()), "{arguments}");
        assert_eq!(streamed(&server, &request).2, std::slice::from_ref(function));

        let schema =
            json!({"type": "json_schema", "json_schema": {"name": "n", "schema": parameters}});
        let request = chat(json!({"response_format": schema, "seed": seed, "logit_bias": bias}));
        let whole = server.good(CHAT, &request);
        let content = whole["choices"][0]["message"]["content"].as_str().unwrap();
        let answer: Value = serde_json::from_str(content).unwrap();
        assert!((1..=3).contains(&answer["n"].as_i64().unwrap()), "{answer}");
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
