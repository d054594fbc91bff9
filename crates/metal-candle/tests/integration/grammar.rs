//! Texts that follow a grammar, from a model that knows nothing of JSON.

use metal_candle::engine::{Engine, EngineOptions, Event, Request, RequestId};
use metal_candle::generate::{FinishReason, GenerateOptions, Grammar, Grammars, SamplingOptions};
use metal_candle::model::Model;
use metal_candle::random::SplitMix64;
use metal_candle::text::Tokenizer;
use metal_candle::{DType, Device};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

struct Demo {
    model: Arc<Model>,
    tokenizer: Tokenizer,
    grammars: Grammars,
}

fn demo() -> Demo {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cli/demo/base");
    let tokenizer = Tokenizer::load(&folder).unwrap();
    let model = Arc::new(Model::load(&folder, DType::F32, &Device::Cpu).unwrap());
    let grammars = Grammars::new(&tokenizer, model.config().vocab_size).unwrap();
    Demo { model, tokenizer, grammars }
}

/// Texts drawn by chance, each after a grammar, and why they ended.
fn write(demo: &Demo, grammars: &[Grammar], max_tokens: usize) -> Vec<(String, FinishReason)> {
    let options = EngineOptions { cache_tokens: Some(1 << 16), ..EngineOptions::default() };
    let mut engine = Engine::new(&demo.model, Some(&demo.tokenizer), options).unwrap();
    let prompt = demo.tokenizer.encode("The answer in JSON: ", false).unwrap();
    let ids: Vec<RequestId> = (0..)
        .zip(grammars)
        .map(|(seed, grammar)| {
            let sampling = SamplingOptions { temperature: 1.5, seed, ..SamplingOptions::default() };
            let options = GenerateOptions { max_tokens, sampling, ..GenerateOptions::default() };
            let grammar = Some(grammar.clone());
            let prompt = prompt.clone();
            engine.submit(Request { prompt, options, grammar, ..Request::default() }).unwrap()
        })
        .collect();
    let mut texts: HashMap<RequestId, (String, Option<FinishReason>)> = HashMap::new();
    while !engine.is_idle() {
        for (id, event) in engine.step() {
            let text = texts.entry(id).or_default();
            match event {
                Event::Piece(piece) => text.0.push_str(&piece.text),
                Event::Finished(finished) => text.1 = Some(finished.reason),
                Event::Prompt(_) => panic!("nobody asked for scores"),
                Event::Failed(error) => panic!("{error}"),
            }
        }
    }
    let statistics = engine.statistics();
    assert_eq!(statistics.blocks, statistics.available_blocks);
    let mut take = |id| texts.remove(&id).unwrap();
    ids.into_iter().map(&mut take).map(|(text, reason)| (text, reason.unwrap())).collect()
}

/// A schema whose values are bounded in size.
fn schema(random: &mut SplitMix64, depth: u64) -> Value {
    match random.below(if depth == 0 { 5 } else { 8 }) {
        0 => json!({"type": "boolean"}),
        1 => json!({"type": "null"}),
        2 => {
            let low = random.below(2000) as i64 - 1000;
            json!({"type": "integer", "minimum": low, "maximum": low + random.below(500) as i64})
        }
        3 => json!({"enum": ["red", "grün \"1\"", 7, null, [1, {"a": false}]]}),
        4 => {
            json!({"type": "string", "minLength": random.below(3), "maxLength": 3 + random.below(6)})
        }
        5 => {
            let least = random.below(3);
            let items = schema(random, depth - 1);
            json!({"type": "array", "items": items, "minItems": least, "maxItems": least + random.below(3)})
        }
        6 => json!({"anyOf": [schema(random, depth - 1), {"type": "string", "maxLength": 4}]}),
        _ => {
            let count = 1 + random.below(4);
            let properties: Map<String, Value> =
                (0..count).map(|i| (format!("key {i}"), schema(random, depth - 1))).collect();
            let required: Vec<String> =
                properties.keys().filter(|_| random.below(2) == 0).cloned().collect();
            json!({
                "type": "object", "properties": properties, "required": required,
                "additionalProperties": false,
            })
        }
    }
}

/// Whether a value is one of a schema that [`schema`] makes.
fn is_valid(schema: &Value, value: &Value) -> bool {
    let number = |key: &str| schema[key].as_i64();
    if let Some(choices) = schema["enum"].as_array() {
        return choices.contains(value);
    }
    if let Some(either) = schema["anyOf"].as_array() {
        return either.iter().any(|schema| is_valid(schema, value));
    }
    let within = |length: usize, least: &str, most: &str| {
        let length = length as i64;
        number(least).is_none_or(|least| length >= least)
            && number(most).is_none_or(|most| length <= most)
    };
    match (schema["type"].as_str(), value) {
        (Some("boolean"), Value::Bool(_)) | (Some("null"), Value::Null) => true,
        (Some("integer"), Value::Number(found)) => found
            .as_i64()
            .is_some_and(|it| it >= number("minimum").unwrap() && it <= number("maximum").unwrap()),
        (Some("string"), Value::String(text)) => {
            within(text.chars().count(), "minLength", "maxLength")
        }
        (Some("array"), Value::Array(items)) => {
            within(items.len(), "minItems", "maxItems")
                && items.iter().all(|item| is_valid(&schema["items"], item))
        }
        (Some("object"), Value::Object(fields)) => {
            let required = schema["required"].as_array().unwrap();
            required.iter().all(|key| fields.contains_key(key.as_str().unwrap()))
                && fields.iter().all(|(key, value)| {
                    schema["properties"].get(key).is_some_and(|schema| is_valid(schema, value))
                })
        }
        _ => false,
    }
}

fn random_schemas_are_followed(count: usize) {
    let demo = demo();
    let mut random = SplitMix64::new(5);
    let schemas: Vec<Value> = (0..count).map(|_| schema(&mut random, 3)).collect();
    let grammars: Vec<Grammar> =
        schemas.iter().map(|schema| demo.grammars.json_schema(schema).unwrap()).collect();
    let mut whole = 0;
    for (schema, (text, reason)) in schemas.iter().zip(write(&demo, &grammars, 1500)) {
        if reason == FinishReason::Length {
            continue;
        }
        whole += 1;
        let value: Value = serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("{schema}: {text:?}: {error}"));
        assert!(is_valid(schema, &value), "{schema}: {text}");
    }
    assert!(whole * 100 >= count * 99, "{whole} of {count} are whole");
}

#[test]
fn what_is_drawn_is_json_of_the_schema() {
    random_schemas_are_followed(150);
}

#[test]
#[ignore = "takes a minute"]
fn ten_thousand_texts_are_json_of_their_schemas() {
    random_schemas_are_followed(10_000);
}

#[test]
fn texts_follow_choices_expressions_and_grammars() {
    let demo = demo();
    let choices = ["ja".to_string(), "nein \"wirklich\"".into(), "ja und nein".into()];
    let grammars = [
        demo.grammars.choice(&choices).unwrap(),
        demo.grammars.regex("[a-f]{3}-[0-9]{2}").unwrap(),
        demo.grammars.lark("start: \"x\" (\",\" \"x\")~3").unwrap(),
    ];
    let many: Vec<Grammar> = grammars.iter().cycle().take(60).cloned().collect();
    let mut seen = std::collections::BTreeSet::new();
    for (index, (text, reason)) in write(&demo, &many, 100).into_iter().enumerate() {
        assert_eq!(reason, FinishReason::EndOfSequence, "{text}");
        match index % 3 {
            0 => {
                assert!(choices.contains(&text), "{text}");
                seen.insert(text);
            }
            1 => {
                let bytes = text.as_bytes();
                assert!(bytes.len() == 6 && bytes[3] == b'-', "{text}");
                assert!(bytes[..3].iter().all(|byte| (b'a'..=b'f').contains(byte)), "{text}");
                assert!(bytes[4..].iter().all(u8::is_ascii_digit), "{text}");
            }
            _ => assert_eq!(text, "x,x,x,x"),
        }
    }
    assert!(seen.len() > 1, "{seen:?}");
}

#[test]
fn what_cannot_be_followed_is_an_error() {
    let demo = demo();
    let refused = |result: metal_candle::Result<Grammar>| result.unwrap_err().to_string();
    for error in [
        refused(demo.grammars.json_schema(&json!({"type": "frog"}))),
        refused(demo.grammars.json_schema(&json!({"$ref": "https://example.org/schema"}))),
        refused(demo.grammars.json_schema(&json!(3))),
        refused(demo.grammars.regex("(")),
        refused(demo.grammars.lark("nothing")),
        refused(demo.grammars.choice(&[])),
    ] {
        assert!(error.starts_with("grammar: "), "{error}");
        assert!(error.len() < 2000, "{error}");
    }
    // Deep and wide schemas end, in an error or not.
    let mut deep = json!({"type": "null"});
    for _ in 0..200 {
        deep = json!({"type": "array", "items": deep});
    }
    let _ = demo.grammars.json_schema(&deep);
    let alternatives: Vec<String> = (0..3000).map(|i| format!("choice {i} {}", i * i)).collect();
    let _ = demo.grammars.choice(&alternatives);
}

/// Rules, each of which is the next one.
fn chain(rules: usize) -> String {
    let rule = |n| format!("a{n}: a{}\n", n + 1);
    format!("start: a0\n{}a{rules}: \"x\"", (0..rules).map(rule).collect::<String>())
}

#[test]
fn long_chains_of_rules_and_references_are_compiled() {
    let Demo { grammars, .. } = demo();
    let rules = chain(5000);
    grammars.lark(&rules).unwrap();
    grammars.lark(&rules.to_uppercase().replace("START", "start")).unwrap();
    let definition =
        |n| (format!("a{n}"), json!({"allOf": [{"$ref": format!("#/$defs/a{}", n + 1)}]}));
    let mut definitions: Map<String, Value> = (0..2000).map(definition).collect();
    definitions.insert("a2000".into(), json!({"type": "string"}));
    grammars.json_schema(&json!({"$defs": definitions, "$ref": "#/$defs/a0"})).unwrap();
}

#[test]
fn grammars_that_would_take_forever_are_refused() {
    let Demo { grammars, .. } = demo();
    let patterns: Vec<Value> =
        (0..30).map(|n| json!({"type": "string", "pattern": format!(".*{n}.*")})).collect();
    let schema = json!({"allOf": patterns});
    // With the marker of a schema in one of its strings.
    let marked = json!({"description": "%json", "allOf": patterns});
    let intersection: Vec<String> = (0..30).map(|n| format!("/.*{n}.*/")).collect();
    for refused in [
        grammars.json_schema(&schema),
        grammars.lark(&format!("start: \"a\" %json {schema}")),
        grammars.lark(&format!("start: \"a\" %json {marked}")),
        grammars.lark(&format!("start: \"%json\" %json {schema}")),
        grammars.lark(&format!("start: A\nA: {}", intersection.join(" & "))),
        grammars.json_schema(&json!({"type": "integer", "multipleOf": 1_000_003})),
        grammars.regex(&"(a?)".repeat(30_000)),
        grammars.lark(&chain(100_000)),
    ] {
        let error = refused.unwrap_err().to_string();
        assert!(error.starts_with("grammar: "), "{error}");
        // Before that was tried, which would go on.
        assert!(!error.contains("takes more than") && !error.contains("ask again"), "{error}");
    }
}
