//! What a server refuses, and gives up.

use crate::asking::{Running, ask, begin, refused, send_to};
use serde_json::{Map, Value, json};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

const KEY: &str = "a-key-of-sixteen-letters";
const SITE: &str = "https://example.org";

static STRICT: LazyLock<Running> = LazyLock::new(|| {
    Running::start_with(None, &[], |options| {
        options.timeout = Duration::from_secs(1);
        options.api_keys = vec![KEY.into()];
        options.cors_origins = vec![SITE.into()];
    })
});

/// The head and the body of the strict server's answer.
fn answer(method: &str, path: &str, headers: &str, body: &str) -> (String, String) {
    let mut stream = TcpStream::connect(STRICT.address()).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n{headers}\
         content-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head.to_lowercase(), body.into())
}

#[test]
fn an_answer_that_takes_too_long_is_given_up() {
    // Minutes of work, if nobody stopped it.
    let request = json!({"model": "demo", "prompt": "Once", "max_tokens": 2000, "n": 128, "ignore_eos": true});
    let key = format!("authorization: Bearer {KEY}\r\n");
    let begun = Instant::now();
    let (head, body) = answer("POST", "/v1/completions", &key, &request.to_string());
    assert!(head.starts_with("http/1.1 504 "), "{head}");
    let error: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(error["error"]["code"], "timeout");
    let is_over = || {
        let (_, figures) = answer("GET", "/metrics", &key, "");
        let running = "vllm:num_requests_running{model_name=\"demo\"} 0";
        figures.lines().any(|line| line == running)
    };
    while !is_over() {
        assert!(begun.elapsed() < Duration::from_secs(60), "it is still written");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn embeddings_that_take_too_long_are_given_up() {
    let texts = vec![vec![5; 2000]; 512];
    let request = json!({"model": "demo", "input": texts});
    let key = format!("authorization: Bearer {KEY}\r\n");
    let (head, body) = answer("POST", "/v1/embeddings", &key, &request.to_string());
    assert!(head.starts_with("http/1.1 504 "), "{head}");
    let error: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(error["error"]["code"], "timeout");
}

#[test]
fn pages_of_other_sites_may_not_ask_a_server_without_keys() {
    let server = Running::start_with(None, &[], |options| options.cors_origins = vec![SITE.into()]);
    let status = |path: &str, headers: &str| {
        let head = "HTTP/1.1\r\nhost: localhost\r\nconnection: close";
        send_to(server.address(), &format!("GET {path} {head}\r\n{headers}\r\n")).0
    };
    for site in ["cross-site", "same-site"] {
        let header = format!("sec-fetch-site: {site}\r\n");
        assert_eq!(status("/v1/models", &header), 403);
        assert_eq!(status("/v1/models", &format!("{header}origin: {SITE}\r\n")), 200);
        // A link leads to the page.
        assert_eq!(status("/", &header), 200);
    }
    for site in ["same-origin", "none"] {
        assert_eq!(status("/v1/models", &format!("sec-fetch-site: {site}\r\n")), 200);
    }
}

#[test]
fn refusals_have_the_form_of_their_protocol() {
    for (path, is_anthropic) in [("/v1/messages", true), ("/v1/chat/completions", false)] {
        let (head, body) = answer("POST", path, "", "{}");
        assert!(head.starts_with("http/1.1 401 "), "{head}");
        assert!(head.contains("\r\nx-request-id: req_"), "{head}");
        let error: Value = serde_json::from_str(&body).unwrap();
        assert_eq!(error["type"] == "error", is_anthropic, "{error}");
        assert_eq!(error["error"]["type"], "authentication_error");
    }
}

#[test]
fn pages_that_may_ask_may_send_what_clients_send() {
    let headers = format!(
        "origin: {SITE}\r\naccess-control-request-method: POST\r\n\
         access-control-request-headers: authorization,x-api-key,x-stainless-os\r\n"
    );
    let (head, _) = answer("OPTIONS", "/v1/chat/completions", &headers, "");
    let allowed = head.lines().find(|line| line.starts_with("access-control-allow-headers:"));
    assert!(allowed.unwrap().contains("x-stainless-os"), "{head}");
}

#[test]
fn the_version_is_told_to_who_has_a_key() {
    let (head, _) = answer("GET", "/version", "", "");
    assert!(head.starts_with("http/1.1 401 "), "{head}");
    let (_, body) = answer("GET", "/version", &format!("authorization: Bearer {KEY}\r\n"), "");
    let version: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(version, json!({"version": env!("CARGO_PKG_VERSION")}));
}

#[test]
fn names_that_are_no_text_are_refused_as_json() {
    let (head, body) =
        answer("GET", "/v1/models/%ff", &format!("authorization: Bearer {KEY}\r\n"), "");
    assert!(head.starts_with("http/1.1 400 "), "{head}");
    assert!(serde_json::from_str::<Value>(&body).unwrap()["error"]["message"].is_string());
}

#[test]
fn grammars_and_texts_that_are_too_large_harm_nobody() {
    let rules: String = (0..3000).map(|n| format!("a{n}: a{}\n", n + 1)).collect();
    let grammar = format!("start: a0\n{rules}a3000: \"x\"");
    let request =
        json!({"model": "demo", "prompt": "a", "max_tokens": 3, "guided_grammar": grammar});
    assert_eq!(ask("/v1/completions", &request).0, 200);
    let patterns: Vec<Value> =
        (0..30).map(|n| json!({"type": "string", "pattern": format!(".*{n}.*")})).collect();
    let request = json!({"model": "demo", "prompt": "a", "guided_json": {"allOf": patterns}});
    assert_eq!(refused("/v1/completions", &request), "guided_json");
    let long = "hello world ".repeat(1_200_000);
    let message = json!({"role": "user", "content": long});
    let request = json!({"model": "demo", "messages": [message]});
    assert_eq!(refused("/v1/chat/completions", &request), "messages");
}

#[test]
fn choices_have_few_copies_of_their_prompt_and_options() {
    let prompts = vec![vec![5; 2000]; 32];
    let request = json!({"model": "demo", "prompt": prompts, "n": 128, "max_tokens": 1});
    assert_eq!(refused("/v1/completions", &request), "prompt");
    let biases: Map<String, Value> = (0..300).map(|token| (token.to_string(), json!(1))).collect();
    let request = json!({"model": "demo", "prompt": vec!["a"; 32], "n": 128, "logit_bias": biases});
    assert_eq!(refused("/v1/completions", &request), "logit_bias");
}

/// A stream that lasts for as long as somebody listens.
fn long() -> Value {
    json!({"model": "demo", "prompt": "Once", "max_tokens": 2000, "n": 8, "ignore_eos": true,
        "temperature": 1, "stream": true})
}

#[test]
fn a_request_that_was_taken_has_all_its_texts_written_whoever_waits() {
    let narrow = Running::start_with(None, &[], |options| {
        options.engine.max_sequences = 1;
        options.engine.max_waiting = 1;
    });
    let path = "/v1/completions";
    let few = json!({"model": "demo", "prompt": vec!["Once"; 6], "max_tokens": 4});
    assert_eq!(narrow.good(path, &few)["choices"].as_array().unwrap().len(), 6);
    // The queue is still full for requests that come then.
    let _held = begin(narrow.address(), path, &long());
    assert_eq!(narrow.ask(path, &few).0, 429);
}

#[test]
fn a_server_that_answers_all_it_may_says_that_it_lives() {
    let busy = Running::start_with(None, &[], |options| options.max_requests = 1);
    let path = "/v1/completions";
    let _held = begin(busy.address(), path, &long());
    assert_eq!(busy.ask(path, &json!({"model": "demo", "prompt": "Once"})).0, 429);
    for path in ["/health", "/ping", "/metrics"] {
        assert_eq!(busy.get(path).0, 200, "{path}");
    }
    assert_eq!(busy.get("/v1/models").0, 429);
}

#[test]
fn what_the_cache_has_no_room_for_is_refused_by_its_field() {
    let small = Running::start_with(None, &[], |options| options.engine.cache_tokens = Some(256));
    for (more, field) in [
        (json!({"input": "word ".repeat(400)}), "input"),
        (json!({"input": "a", "max_output_tokens": 256}), "max_output_tokens"),
    ] {
        let mut request = json!({"model": "demo"});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (status, answer) = small.ask("/v1/responses", &request);
        let error = &serde_json::from_str::<Value>(&answer).unwrap()["error"];
        assert_eq!((status, &error["param"]), (400, &json!(field)), "{error}");
        assert_eq!(error["code"], "context_length_exceeded");
        assert!(error["message"].as_str().unwrap().contains("cache has room for 256"), "{error}");
    }
}
