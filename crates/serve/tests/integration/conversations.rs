//! `/v1/chat/completions`.

use crate::asking::{ask, events, good, refused};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn chat(more: Value) -> Value {
    let mut request = json!({"model": "demo", "seed": 7, "max_tokens": 12,
        "messages": [{"role": "user", "content": "What is your name?"}]});
    for (key, value) in more.as_object().unwrap() {
        request[key] = value.clone();
    }
    request
}

#[test]
fn a_chat_is_answered_the_same_at_once_and_in_chunks() {
    for more in [json!({}), json!({"n": 3, "temperature": 1.0}), json!({"stop": ["e"]})] {
        let request = chat(more);
        let whole = good(CHAT, &request);
        assert_eq!(whole["object"], "chat.completion");
        let mut streamed = request.clone();
        streamed["stream_options"] = json!({"include_usage": true});
        let chunks = events(CHAT, &streamed);
        let last = chunks.last().unwrap();
        assert_eq!(last["choices"], json!([]));
        for key in ["prompt_tokens", "completion_tokens", "total_tokens"] {
            assert_eq!(last["usage"][key], whole["usage"][key], "{key}");
        }
        let choices = whole["choices"].as_array().unwrap();
        for (index, choice) in choices.iter().enumerate() {
            let of_choice = |chunk: &&Value| chunk["choices"][0]["index"] == index;
            let mine: Vec<&Value> = chunks.iter().filter(of_choice).collect();
            assert_eq!(mine[0]["choices"][0]["delta"]["role"], "assistant");
            let content =
                mine.iter().filter_map(|it| it["choices"][0]["delta"]["content"].as_str());
            assert_eq!(choice["message"]["content"], content.collect::<String>());
            let end = &mine.last().unwrap()["choices"][0];
            assert_eq!(end["finish_reason"], choice["finish_reason"]);
        }
        let again = good(CHAT, &request);
        assert_eq!(again["choices"], whole["choices"], "the same seed, the same texts");
    }
}

#[test]
fn every_chunk_tells_what_was_used_if_that_is_asked_for() {
    let text = json!({"model": "demo", "prompt": "Once", "seed": 7, "max_tokens": 12, "n": 2});
    for (path, mut request) in [(CHAT, chat(json!({"n": 2}))), ("/v1/completions", text)] {
        request["stream_options"] = json!({"include_usage": true, "continuous_usage_stats": true});
        let mut chunks = events(path, &request);
        let end = chunks.pop().unwrap();
        assert_eq!(end["choices"], json!([]));
        let mut so_far = [0; 2];
        for chunk in &chunks {
            let number = |name: &str| chunk["usage"][name].as_u64().unwrap();
            let index = chunk["choices"][0]["index"].as_u64().unwrap() as usize;
            assert!(number("completion_tokens") >= so_far[index], "{chunks:?}");
            so_far[index] = number("completion_tokens");
            assert_eq!(number("prompt_tokens"), end["usage"]["prompt_tokens"].as_u64().unwrap());
            assert_eq!(number("total_tokens"), number("prompt_tokens") + so_far[index]);
        }
        assert_eq!(so_far.iter().sum::<u64>(), end["usage"]["completion_tokens"]);
    }
}

#[test]
fn logprobs_are_told_of_every_token() {
    let request = chat(json!({"logprobs": true, "top_logprobs": 3, "temperature": 0}));
    let whole = good(CHAT, &request);
    let choice = &whole["choices"][0];
    let content = choice["logprobs"]["content"].as_array().unwrap();
    assert_eq!(content.len() as u64, whole["usage"]["completion_tokens"]);
    let text: String = content.iter().map(|it| it["token"].as_str().unwrap()).collect();
    assert_eq!(choice["message"]["content"], text);
    for token in content {
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 3);
        assert_eq!(token["top_logprobs"][0]["logprob"], token["logprob"]);
        assert_eq!(token["top_logprobs"][0]["bytes"], token["bytes"]);
    }
    let chunks = events(CHAT, &request);
    let told = chunks.iter().filter_map(|it| it["choices"][0]["logprobs"]["content"].as_array());
    let tokens: Vec<&Value> = told.flatten().map(|it| &it["token"]).collect();
    assert_eq!(tokens, content.iter().map(|it| &it["token"]).collect::<Vec<_>>());
}

#[test]
fn answers_follow_what_they_have_to_be() {
    let answer = |more: Value| {
        let mut request = chat(json!({"temperature": 1.0, "max_tokens": 150}));
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let whole = good(CHAT, &request);
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], "stop", "{choice}");
        choice["message"]["content"].as_str().unwrap().to_string()
    };
    let schema = json!({"type": "object", "additionalProperties": false, "required": ["a", "b"],
        "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}}});
    let named = json!({"name": "s", "schema": schema, "strict": true});
    let format = json!({"response_format": {"type": "json_schema", "json_schema": named}});
    let object: Value = serde_json::from_str(&answer(format)).unwrap();
    assert!(object["a"].is_boolean() && ["x", "y"].contains(&object["b"].as_str().unwrap()));
    assert_eq!(answer(json!({"guided_choice": ["yes"]})), "yes");
    let digits = answer(json!({"guided_regex": "[0-9]{3}/[0-9]"}));
    assert!(digits.len() == 5 && digits.as_bytes()[3] == b'/', "{digits}");
    assert_eq!(answer(json!({"guided_grammar": "start: \"a\" \"b\""})), "ab");
}

fn tools() -> Value {
    let parameters = json!({"type": "object", "required": ["n"], "additionalProperties": false,
        "properties": {"n": {"enum": [1, 2, 3]}}});
    let tool = |name: &str| {
        json!({"type": "function", "function":
        {"name": name, "parameters": parameters}})
    };
    json!([tool("f"), tool("g")])
}

#[test]
fn tools_that_have_to_be_called_are() {
    let named = json!({"type": "function", "function": {"name": "g"}});
    for (choice, names) in [(json!("required"), ["f", "g"]), (named, ["g", "g"])] {
        let more = json!({"tools": tools(), "tool_choice": choice, "parallel_tool_calls": false,
            "temperature": 1.0, "max_tokens": 60});
        let request = chat(more);
        let whole = good(CHAT, &request);
        let choice = &whole["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        assert_eq!(choice["message"]["content"], Value::Null);
        let call = &choice["message"]["tool_calls"][0];
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        assert!(names.contains(&call["function"]["name"].as_str().unwrap()));
        let arguments = call["function"]["arguments"].as_str().unwrap();
        let arguments: Value = serde_json::from_str(arguments).unwrap();
        assert!((1..=3).contains(&arguments["n"].as_i64().unwrap()));
        let chunks = events(CHAT, &request);
        let calls =
            chunks.iter().filter_map(|it| it["choices"][0]["delta"]["tool_calls"].as_array());
        let calls: Vec<&Value> = calls.flatten().collect();
        assert_eq!(calls.len(), 1);
        assert_eq!((&calls[0]["index"], &calls[0]["function"]), (&json!(0), &call["function"]));

        let mut next = chat(json!({"tools": tools(), "max_tokens": 4}));
        let result = json!({"role": "tool", "tool_call_id": call["id"], "content": "2"});
        next["messages"] = json!([request["messages"][0], choice["message"], result]);
        good(CHAT, &next);
    }
}

#[test]
fn what_is_wrong_with_a_chat_is_named() {
    let field = |more: Value| refused(CHAT, &chat(more));
    for (more, name) in [
        (json!({"messages": []}), "messages"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0].type",
        ),
        (json!({"temperature": 3}), "temperature"),
        (json!({"temperature": "hot"}), "temperature"),
        (json!({"n": 0}), "n"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"logit_bias": {"99999": 1}}), "logit_bias"),
        (json!({"tool_choice": "required"}), "tool_choice"),
        (json!({"functions": []}), "functions"),
        (json!({"reasoning_effort": "low"}), "reasoning_effort"),
        (
            json!({"chat_template_kwargs": {"enable_thinking": false}}),
            "chat_template_kwargs.enable_thinking",
        ),
        (json!({"response_format": {"type": "x"}}), "response_format.type"),
        (json!({"guided_regex": "("}), "guided_regex"),
        (json!({"stream_options": {}}), "stream_options"),
        (json!({"max_tokens": 100_000}), "max_tokens"),
        (json!({"max_tokens": 0}), "max_tokens"),
    ] {
        assert_eq!(field(more.clone()), name, "{more}");
    }
    let long = json!({"messages": [{"role": "user", "content": "word ".repeat(3000)}]});
    let (status, answer) = ask(CHAT, &chat(long));
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("context_length_exceeded")));
    // By these words clients know that another model has to read it.
    let message = answer["error"]["message"].as_str().unwrap();
    assert!(
        message.starts_with("This model's maximum context length is 2048 tokens, "),
        "{message}"
    );
    let (status, _) = ask(CHAT, &chat(json!({"model": "other"})));
    assert_eq!(status, 404);
}
