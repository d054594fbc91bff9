//! `/v1/completions`.

use crate::asking::{events, good, refused};
use crate::jobs::client::{Client, demo, model};
use metal_candle::generate::GenerateOptions;
use metal_candle::text::Tokenizer;
use metal_candle_serve::{Base, Options, Server};
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

const TEXT: &str = "/v1/completions";

#[test]
fn prompts_are_told_with_their_logprobs() {
    let tokens = |text: &str| good("/tokenize", &json!({"prompt": text}))["tokens"].clone();
    let (one, two) = (tokens("The colour of grass is green."), tokens("Two and two"));
    let request = json!({"model": "demo", "prompt": [one, two], "echo": true, "logprobs": 1,
        "max_tokens": 1, "temperature": 0, "seed": 1234});
    let whole = good(TEXT, &request);
    for (index, prompt) in [&one, &two].into_iter().enumerate() {
        let choice = &whole["choices"][index];
        let lists = &choice["logprobs"];
        let count = prompt.as_array().unwrap().len();
        let list = |name: &str| lists[name].as_array().unwrap().clone();
        // Also of the token that ends the first text: lm-evaluation-harness leaves one from the end out.
        assert_eq!(list("tokens").len(), count + 1);
        for name in ["token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(list(name).len(), list("tokens").len());
        }
        assert_eq!(
            (&lists["token_logprobs"][0], &lists["top_logprobs"][0]),
            (&Value::Null, &Value::Null)
        );
        for (place, logprob) in list("token_logprobs").iter().enumerate().skip(1) {
            let top = lists["top_logprobs"][place].as_object().unwrap();
            let text = lists["tokens"][place].as_str().unwrap();
            assert!(top[text].as_f64().unwrap() >= logprob.as_f64().unwrap());
            assert!((1..=2).contains(&top.len()));
        }
        let text: String = list("tokens").iter().map(|it| it.as_str().unwrap()).collect();
        let said = text.strip_suffix("<|im_end|>").unwrap_or(&text);
        assert_eq!((&choice["text"], said.len() < text.len()), (&json!(said), index == 0));
    }
    let mut nothing = request.clone();
    nothing["max_tokens"] = json!(0);
    let scored = good(TEXT, &nothing);
    assert_eq!(scored["usage"]["completion_tokens"], 0);
    assert_eq!(scored["choices"][0]["text"], "The colour of grass is green.");
    let lists = &scored["choices"][0]["logprobs"];
    assert_eq!(lists["tokens"].as_array().unwrap().len(), one.as_array().unwrap().len());
}

#[test]
fn texts_are_continued_the_same_at_once_and_in_chunks() {
    for more in [
        json!({}),
        json!({"n": 2, "temperature": 1.0, "logprobs": 2}),
        json!({"prompt": ["One", "Two"], "echo": true, "logprobs": 0}),
    ] {
        let mut request = json!({"model": "demo", "prompt": "Once", "seed": 3, "max_tokens": 8});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let whole = good(TEXT, &request);
        let chunks = events(TEXT, &request);
        for choice in whole["choices"].as_array().unwrap() {
            let mine = chunks.iter().map(|it| &it["choices"][0]);
            let mine: Vec<&Value> = mine.filter(|it| it["index"] == choice["index"]).collect();
            let text: String = mine.iter().map(|it| it["text"].as_str().unwrap()).collect();
            assert_eq!(choice["text"], text);
            assert_eq!(mine.last().unwrap()["finish_reason"], choice["finish_reason"]);
            let list = |name: &str| {
                let parts = mine.iter().filter_map(|it| it["logprobs"][name].as_array());
                parts.flatten().cloned().collect::<Vec<Value>>()
            };
            if more.get("logprobs").is_some() {
                for name in ["tokens", "text_offset"] {
                    assert_eq!(choice["logprobs"][name], json!(list(name)), "{name}");
                }
                // What else is computed at the same time may change the last digits.
                for name in ["token_logprobs", "top_logprobs"] {
                    let whole = choice["logprobs"][name].as_array().unwrap();
                    assert_eq!(whole.len(), list(name).len(), "{name}");
                }
                let whole = choice["logprobs"]["token_logprobs"].as_array().unwrap();
                for (one, other) in whole.iter().zip(list("token_logprobs")) {
                    let number = |it: &Value| it.as_f64().unwrap_or(0.0);
                    assert!((number(one) - number(&other)).abs() < 1e-5);
                }
            } else {
                assert_eq!(choice["logprobs"], Value::Null);
            }
        }
    }
    let field = |more: Value| {
        let mut request = json!({"model": "demo", "prompt": "Once"});
        request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        refused(TEXT, &request)
    };
    assert_eq!(field(json!({"suffix": "x"})), "suffix");
    assert_eq!(field(json!({"best_of": 2})), "best_of");
    assert_eq!(field(json!({"prompt": []})), "prompt");
    assert_eq!(field(json!({"prompt": [99999]})), "prompt");
    assert_eq!(field(json!({"max_tokens": 0})), "max_tokens");
    assert_eq!(field(json!({"logprobs": 21})), "logprobs");
}

#[test]
fn the_same_prompt_several_times_gives_several_texts() {
    let request = json!({"model": "demo", "prompt": vec!["Once"; 4], "temperature": 2,
        "max_tokens": 12, "ignore_eos": true});
    let told = good(TEXT, &request);
    let texts = told["choices"].as_array().unwrap().iter().map(|it| it["text"].as_str().unwrap());
    assert_eq!(texts.collect::<BTreeSet<_>>().len(), 4, "{told}");
}

#[test]
fn a_text_begins_with_its_space_where_the_tokenizer_takes_one_off_texts() {
    let data = tempfile::tempdir().unwrap();
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures");
    // Llama 2's decoder, and fewer tokens than the demo's model has.
    let tokenizer = Tokenizer::load(&fixtures.join("tokenizer-sp")).unwrap();
    let token = tokenizer.token_to_id("▁t").unwrap();
    let base = Base {
        model: Arc::new(model()),
        replicas: Vec::new(),
        tokenizer,
        folder: demo("base"),
        variables: Map::new(),
        defaults: GenerateOptions::default(),
    };
    let mut options = Options::new("demo", data.path());
    options.address = "127.0.0.1:0".parse().unwrap();
    options.engine.cache_tokens = Some(8192);
    let server = Server::start(base, options).unwrap();
    let told = |echo: bool| {
        let request = json!({"model": "demo", "prompt": "Once upon a", "echo": echo, "logprobs": 0,
            "temperature": 0, "max_tokens": 3, "logit_bias": {token.to_string(): 100}});
        let (status, told) = Client::of(&server).post(TEXT, &request);
        assert_eq!(status, 200, "{told}");
        told["choices"][0].clone()
    };
    let choice = told(false);
    assert_eq!(choice["text"], " t t t");
    assert_eq!(choice["logprobs"]["tokens"], json!([" t", " t", " t"]));
    assert_eq!(choice["logprobs"]["text_offset"], json!([0, 2, 4]));

    let choice = told(true);
    let text = choice["text"].as_str().unwrap();
    assert_eq!(text, "Once upon a t t t");
    let tokens = choice["logprobs"]["tokens"].as_array().unwrap();
    let offsets = choice["logprobs"]["text_offset"].as_array().unwrap();
    // A BOS token and a space are added to the prompt, and are no part of its text.
    assert_eq!(
        (&tokens[..2], &offsets[..2]),
        (&[json!("<s>"), json!(" ")][..], &[json!(0), json!(0)][..])
    );
    for (token, offset) in tokens.iter().zip(offsets).skip(2) {
        let offset = usize::try_from(offset.as_u64().unwrap()).unwrap();
        assert!(text[offset..].starts_with(token.as_str().unwrap()), "{choice}");
    }
    assert_eq!(offsets.last().unwrap(), text.len() - 2);
}
