//! Tokens and embeddings.

use crate::asking::{CONTEXT, good, refused, send};
use serde_json::{Value, json};

#[test]
fn tokens_come_back_as_text() {
    let text = "Grass is green.";
    let told = good("/tokenize", &json!({"prompt": text, "return_token_strs": true}));
    assert_eq!(told["count"], told["token_strs"].as_array().unwrap().len());
    assert_eq!(told["max_model_len"], CONTEXT);
    let back = good("/detokenize", &json!({"model": "demo", "tokens": told["tokens"]}));
    assert_eq!(back["prompt"], text);
    let messages = json!([{"role": "user", "content": text}]);
    let conversation = good("/tokenize", &json!({"messages": messages}));
    let back = good("/detokenize", &json!({"tokens": conversation["tokens"]}));
    assert!(back["prompt"].as_str().unwrap().ends_with("<|im_start|>assistant\n"));
    assert_eq!(refused("/tokenize", &json!({"prompt": "a", "messages": []})), "messages");
    assert_eq!(refused("/tokenize", &json!({})), "prompt");
    assert_eq!(refused("/detokenize", &json!({"tokens": [5, 99999]})), "tokens[1]");
    let (status, info) =
        send("GET /tokenizer_info HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    let info: Value = serde_json::from_str(&info).unwrap();
    assert_eq!((status, &info["tokenizer_class"]), (200, &json!("PreTrainedTokenizerFast")));
    assert!(info["chat_template"].as_str().unwrap().contains("im_start"));
}

#[test]
fn embeddings_have_length_1_in_both_encodings() {
    let request = json!({"model": "demo", "input": ["Grass is green.", "Two"]});
    let told = good("/v1/embeddings", &request);
    let vector = |value: &Value| -> Vec<f64> {
        value["embedding"].as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
    };
    let first = vector(&told["data"][0]);
    assert_eq!(first.len(), 128);
    let length: f64 = first.iter().map(|it| it * it).sum();
    assert!((length - 1.0).abs() < 1e-5);
    assert_ne!(first, vector(&told["data"][1]));
    let mut base64 = request.clone();
    base64["encoding_format"] = json!("base64");
    let told = good("/v1/embeddings", &base64);
    // 128 numbers of 4 bytes.
    assert_eq!(told["data"][0]["embedding"].as_str().unwrap().len(), 684);
    let short = json!({"model": "demo", "input": "Two", "dimensions": 16});
    assert_eq!(vector(&good("/v1/embeddings", &short)["data"][0]).len(), 16);
    for (more, name) in [
        (json!({"dimensions": 129}), "dimensions"),
        (json!({"input": []}), "input"),
        (json!({"input": ["a", ""]}), "input[1]"),
        (json!({"encoding_format": "int8"}), "encoding_format"),
    ] {
        let mut wrong = request.clone();
        wrong.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        assert_eq!(refused("/v1/embeddings", &wrong), name);
    }
}
