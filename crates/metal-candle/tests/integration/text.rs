//! Tokenizers and chat templates against `transformers`, through the fixtures; spans; streaming.

use std::ops::Range;
use std::path::{Path, PathBuf};

use metal_candle::text::{ChatTemplate, Message, RenderOptions, Tokenizer};
use serde::Deserialize;
use serde_json::{Value, json};

fn fixtures() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures")).to_path_buf()
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::load(&fixtures().join(name)).unwrap()
}

fn read<T: for<'a> Deserialize<'a>>(path: &str) -> T {
    serde_json::from_slice(&std::fs::read(fixtures().join(path)).unwrap()).unwrap()
}

fn with_template(name: &str, template: &str) -> Tokenizer {
    let source =
        std::fs::read_to_string(fixtures().join(format!("templates/{template}.jinja"))).unwrap();
    let mut tokenizer = tokenizer(name);
    tokenizer.set_chat_template(&source).unwrap();
    tokenizer
}

fn messages(value: Value) -> Vec<Message> {
    serde_json::from_value(value).unwrap()
}

#[derive(Deserialize)]
struct Case {
    name: String,
    template: String,
    tokenizer: String,
    messages: Value,
    tools: Option<Vec<Value>>,
    add_generation_prompt: bool,
    expected: Option<String>,
    error: Option<String>,
    #[serde(default)]
    raised_by_template: bool,
    input_ids: Option<Vec<u32>>,
    assistant_mask: Option<Vec<u8>>,
}

#[test]
fn templates_render_as_transformers_renders_them() {
    let cases: Vec<Case> = read("templates/cases.json");
    assert!(cases.len() > 40);
    let now = chrono::NaiveDate::from_ymd_opt(2031, 5, 7).unwrap().and_hms_opt(8, 9, 10).unwrap();
    let mut wrong = Vec::new();
    for case in &cases {
        let tokenizer = with_template(&case.tokenizer, &case.template);
        let template = tokenizer.require_chat_template().unwrap();
        let options = RenderOptions {
            add_generation_prompt: case.add_generation_prompt,
            tools: case.tools.as_deref(),
            variables: None,
            now: Some(now),
        };
        let messages = messages(case.messages.clone());
        let label = format!("{}/{}", case.template, case.name);
        match (template.render(&messages, &options), &case.expected) {
            (Ok(text), Some(expected)) => {
                let expected: String = expected
                    .split('@')
                    .map(|part| {
                        if part.contains('%') {
                            now.format(part).to_string()
                        } else {
                            part.to_string()
                        }
                    })
                    .collect();
                if text != expected {
                    wrong.push(format!("{label}:\n{text:?}\n{expected:?}"));
                }
                let ids = tokenizer.encode(&text, false).unwrap();
                if case.input_ids.as_ref().is_some_and(|expected| *expected != ids) {
                    wrong.push(format!("{label}: token ids"));
                }
                if let (Some(expected), false) = (&case.assistant_mask, case.add_generation_prompt)
                {
                    let rendered = template.render_with_spans(&messages, &options).unwrap();
                    assert_eq!(rendered.text, text);
                    let (ids, offsets) = tokenizer.encode_with_offsets(&text, false).unwrap();
                    let mask: Vec<u8> = offsets
                        .iter()
                        .map(|(start, end)| {
                            u8::from(
                                rendered
                                    .assistant
                                    .iter()
                                    .any(|span| *start < span.end && span.start < *end),
                            )
                        })
                        .collect();
                    assert_eq!(ids, *case.input_ids.as_ref().unwrap());
                    if mask != *expected {
                        wrong.push(format!("{label}: mask\n{mask:?}\n{expected:?}"));
                    }
                }
            }
            (Err(error), None) => {
                let message = case.error.as_ref().unwrap();
                if case.raised_by_template && !error.to_string().contains(message) {
                    wrong.push(format!("{label}: {error}, expected {message}"));
                }
            }
            (Ok(text), None) => {
                wrong.push(format!("{label}: rendered {text:?}, expected {:?}", case.error))
            }
            (Err(error), Some(_)) => wrong.push(format!("{label}: {error}")),
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), cases.len(), wrong.join("\n"));
}

#[derive(Deserialize)]
struct Encoding {
    text: String,
    ids: Vec<u32>,
    ids_with_special_tokens: Vec<u32>,
    decoded: String,
    decoded_without_special_tokens: String,
}

#[test]
fn texts_are_encoded_and_decoded_as_transformers_does() {
    for name in ["tokenizer", "tokenizer-sp"] {
        let tokenizer = tokenizer(name);
        for case in read::<Vec<Encoding>>(&format!("{name}/encodings.json")) {
            let text = &case.text;
            assert_eq!(tokenizer.encode(text, false).unwrap(), case.ids, "{name} {text:?}");
            assert_eq!(
                tokenizer.encode(text, true).unwrap(),
                case.ids_with_special_tokens,
                "{name} {text:?}"
            );
            assert_eq!(
                tokenizer.decode(&case.ids, false).unwrap(),
                case.decoded,
                "{name} {text:?}"
            );
            assert_eq!(
                tokenizer.decode(&case.ids_with_special_tokens, true).unwrap(),
                case.decoded_without_special_tokens,
                "{name} {text:?}"
            );
        }
    }
}

/// The pieces of a stream over some ids, what each gave, and the last one.
fn stream(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<Option<String>> {
    let mut stream = tokenizer.decode_stream();
    let mut pieces: Vec<_> = ids.iter().map(|id| stream.push(*id).unwrap()).collect();
    pieces.push(stream.finish().unwrap());
    pieces
}

const MIXED: &str = "  Hello, wörld! 東京タワー 👩‍👩‍👧 🙂🙂 안녕 ﷽ e\u{301} <tag>\n\n\tend  ";

#[test]
fn streamed_pieces_add_up_and_never_split_a_character() {
    for name in ["tokenizer", "tokenizer-sp"] {
        let tokenizer = tokenizer(name);
        let cases = read::<Vec<Encoding>>(&format!("{name}/encodings.json"));
        let texts =
            cases.into_iter().map(|case| case.text).chain([MIXED.to_string(), MIXED.repeat(20)]);
        for text in texts {
            let ids = tokenizer.encode(&text, true).unwrap();
            let pieces = stream(&tokenizer, &ids);
            let whole = tokenizer.decode(&ids, true).unwrap();
            assert_eq!(
                pieces.iter().flatten().map(String::as_str).collect::<String>(),
                whole,
                "{name} {text:?}"
            );
            if !text.contains(char::REPLACEMENT_CHARACTER) {
                assert!(
                    pieces
                        .iter()
                        .flatten()
                        .all(|piece| !piece.contains(char::REPLACEMENT_CHARACTER)),
                    "{name}"
                );
                // Nothing is held back longer than the character that needs it.
                assert_eq!(pieces.last(), Some(&None), "{name} {text:?}");
            }
        }
        let ids = tokenizer.encode("a 東🙂", false).unwrap();
        let pieces = stream(&tokenizer, &ids);
        assert!(pieces.iter().filter(|piece| piece.is_some()).count() >= 3, "{name}: {pieces:?}");
        assert!(
            pieces.iter().any(Option::is_none),
            "{name}: no token of part of a character in {pieces:?}"
        );
    }
}

#[test]
fn a_stream_after_a_prompt_gives_what_its_tokens_add() {
    for name in ["tokenizer", "tokenizer-sp"] {
        let tokenizer = tokenizer(name);
        let cases = read::<Vec<Encoding>>(&format!("{name}/encodings.json"));
        for text in cases.into_iter().map(|case| case.text).chain([MIXED.to_string()]) {
            let ids = tokenizer.encode(&text, true).unwrap();
            let whole = tokenizer.decode(&ids, true).unwrap();
            for length in 0..=ids.len() {
                let (prompt, written) = ids.split_at(length);
                let before = tokenizer.decode(prompt, true).unwrap();
                if before.ends_with(char::REPLACEMENT_CHARACTER) {
                    // It ends within a character.
                    continue;
                }
                let mut stream = tokenizer.decode_stream_after(prompt).unwrap();
                let pieces = written.iter().filter_map(|id| stream.push(*id).unwrap());
                let mut added: String = pieces.collect();
                added.extend(stream.finish().unwrap());
                assert_eq!(
                    Some(added.as_str()),
                    whole.strip_prefix(&before),
                    "{name} {text:?} {length}"
                );
            }
        }
    }
}

#[test]
fn a_stream_of_random_tokens_adds_up_in_a_byte_level_tokenizer() {
    let tokenizer = tokenizer("tokenizer");
    let mut random = metal_candle::random::SplitMix64::new(11);
    for _ in 0..200 {
        let ids: Vec<u32> =
            (0..40).map(|_| random.below(tokenizer.vocab_size() as u64) as u32).collect();
        let pieces = stream(&tokenizer, &ids);
        assert_eq!(
            pieces.into_iter().flatten().collect::<String>(),
            tokenizer.decode(&ids, true).unwrap(),
            "{ids:?}"
        );
    }
}

#[test]
fn a_bad_byte_after_a_good_character_does_not_stop_a_stream() {
    let tokenizer = tokenizer("tokenizer-sp");
    let byte = |byte: u8| tokenizer.token_to_id(&format!("<0x{byte:02X}>")).unwrap();
    let word = tokenizer.encode("end", false).unwrap();
    let ids = [&[byte(0xe4), byte(0xb8), byte(0xad), byte(0xff)], word.as_slice()].concat();
    let text: String = stream(&tokenizer, &ids).into_iter().flatten().collect();
    assert!(text.starts_with("中\u{fffd}") && text.ends_with("end"), "{text:?}");
    let cut = stream(&tokenizer, &[byte(0xe4), byte(0xb8)]);
    assert_eq!(cut, [None, None, Some("\u{fffd}\u{fffd}".to_string())]);
}

#[test]
fn offsets_give_back_every_byte_of_the_text() {
    for name in ["tokenizer", "tokenizer-sp"] {
        let tokenizer = tokenizer(name);
        let (ids, offsets) = tokenizer.encode_with_offsets(MIXED, false).unwrap();
        assert_eq!(ids, tokenizer.encode(MIXED, false).unwrap());
        let mut covered = vec![false; MIXED.len()];
        for (start, end) in offsets {
            assert!(MIXED.is_char_boundary(start) && MIXED.is_char_boundary(end), "{name}");
            covered[start..end].fill(true);
        }
        assert!(covered.into_iter().all(|byte| byte), "{name}");
    }
}

#[test]
fn spaces_stay_in_offsets_though_the_file_trims_them() {
    let folder = copy_of("tokenizer");
    let path = folder.path().join("tokenizer.json");
    let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    file["post_processor"] = json!({"type": "Sequence", "processors": [
        {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}]});
    std::fs::write(&path, file.to_string()).unwrap();
    let tokenizer = Tokenizer::load(folder.path()).unwrap();
    let (_, offsets) = tokenizer.encode_with_offsets("a    b", false).unwrap();
    assert_eq!(offsets.iter().map(|(start, end)| end - start).sum::<usize>(), 6, "{offsets:?}");
}

fn copy_of(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(fixtures().join(name)).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), folder.path().join(entry.file_name())).unwrap();
    }
    folder
}

#[test]
fn special_tokens_come_from_the_files_in_their_order() {
    let folder = copy_of("tokenizer");
    let write = |name: &str, value: Value| {
        std::fs::write(folder.path().join(name), value.to_string()).unwrap()
    };
    let load = || Tokenizer::load(folder.path());
    let end = tokenizer("tokenizer").token_to_id("<|im_end|>").unwrap();
    assert_eq!(load().unwrap().eos_ids(), [end]);
    assert_eq!(load().unwrap().bos_id(), None);
    write("config.json", json!({"eos_token_id": 7, "bos_token_id": 5}));
    assert_eq!((load().unwrap().eos_ids(), load().unwrap().eos_id()), ([7].as_slice(), Some(end)));
    assert_eq!(load().unwrap().bos_id(), Some(5));
    write(
        "generation_config.json",
        json!({"eos_token_id": [3, 4], "bos_token_id": null, "pad_token_id": -1}),
    );
    assert_eq!(load().unwrap().eos_ids(), [3, 4]);
    assert_eq!(load().unwrap().bos_id(), Some(5));
    assert_eq!(load().unwrap().pad_id(), load().unwrap().token_to_id("<|endoftext|>"));
    write("generation_config.json", json!({"eos_token_id": ["x"]}));
    let message = load().unwrap_err().to_string();
    assert!(message.contains("generation_config.json: \"eos_token_id\" holds \"x\""), "{message}");
    write("generation_config.json", json!([]));
    assert!(load().unwrap_err().to_string().contains("expected a JSON object, found a list"));
}

#[test]
fn vocabularies_differ_where_an_ordinary_token_does() {
    let own = tokenizer("tokenizer");
    assert_eq!(own.first_difference(&own), None);
    let first = own.first_difference(&tokenizer("tokenizer-sp")).unwrap();
    assert_eq!(first, 3, "the first three are added tokens of the other");
    let folder = copy_of("tokenizer");
    let path = folder.path().join("tokenizer.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text.replace("<tool_call>", "<call>")).unwrap();
    let renamed = Tokenizer::load(folder.path()).unwrap();
    assert_eq!(own.first_difference(&renamed), None);
}

#[test]
fn a_broken_tokenizer_is_an_error_that_names_its_file() {
    let folder = copy_of("tokenizer");
    for (content, expected) in [
        ("{", "the file ends within an object"),
        ("{\"model\": {\"type\": \"X\"}}", "not a tokenizer"),
    ] {
        std::fs::write(folder.path().join("tokenizer.json"), content).unwrap();
        let message = Tokenizer::load(folder.path()).unwrap_err().to_string();
        assert!(message.contains("tokenizer.json: ") && message.contains(expected), "{message}");
    }
    std::fs::remove_file(folder.path().join("tokenizer.json")).unwrap();
    assert!(
        Tokenizer::load(folder.path())
            .unwrap_err()
            .to_string()
            .contains("tokenizer.json: no such file")
    );
    std::fs::write(folder.path().join("tokenizer.model"), "").unwrap();
    assert!(
        Tokenizer::load(folder.path())
            .unwrap_err()
            .to_string()
            .contains("SentencePiece tokenizer.model")
    );
}

#[test]
fn templates_are_found_where_folders_keep_them() {
    let hello = [Message::new("user", "hi")];
    let render = |tokenizer: &Tokenizer, tools: Option<&[Value]>| {
        let options = RenderOptions { tools, ..RenderOptions::default() };
        tokenizer.require_chat_template().and_then(|template| template.render(&hello, &options))
    };
    let folder = copy_of("tokenizer");
    let path = |name: &str| folder.path().join(name);
    let load = || Tokenizer::load(folder.path()).unwrap();
    assert!(render(&load(), None).unwrap().starts_with("<|im_start|>system"));

    std::fs::copy(path("tokenizer_config_named_templates.json"), path("tokenizer_config.json"))
        .unwrap();
    let tools = [json!({"name": "t"})];
    assert!(render(&load(), None).unwrap().contains("You are a helpful assistant."));
    assert!(render(&load(), Some(&tools)).unwrap().contains("# Tools"));

    std::fs::write(path("chat_template.jinja"), "single {{ messages|length }}\r\n").unwrap();
    assert_eq!(render(&load(), Some(&tools)).unwrap(), "single 1");
    std::fs::create_dir(path("additional_chat_templates")).unwrap();
    std::fs::write(path("additional_chat_templates/tool_use.jinja"), "tools {{ tools|tojson }}")
        .unwrap();
    assert_eq!(render(&load(), Some(&tools)).unwrap(), "tools [{\"name\": \"t\"}]");
    std::fs::write(path("chat_template.jinja"), "\n{% if %}").unwrap();
    let message = render(&load(), None).unwrap_err().to_string();
    assert!(message.contains("chat_template.jinja: line 2"), "{message}");

    std::fs::remove_file(path("chat_template.jinja")).unwrap();
    assert!(render(&load(), None).unwrap_err().to_string().contains("none is named \"default\""));
    std::fs::remove_dir_all(path("additional_chat_templates")).unwrap();
    std::fs::write(path("tokenizer_config.json"), "{}").unwrap();
    let message = render(&load(), None).unwrap_err().to_string();
    assert!(message.contains("has no chat template") && message.contains("\"text\""), "{message}");
    std::fs::write(path("chat_template.json"), "{\"chat_template\": \"processor\"}").unwrap();
    assert_eq!(render(&load(), None).unwrap(), "processor");
    std::fs::write(path("chat_template.json"), "{\"chat_template\": 3}").unwrap();
    assert!(
        Tokenizer::load(folder.path())
            .unwrap_err()
            .to_string()
            .contains("\"chat_template\" is a number")
    );
}

/// What each span says, rendered without generation blocks.
fn spans(tokenizer: &Tokenizer, conversation: &Value, tools: Option<&[Value]>) -> Vec<String> {
    let options = RenderOptions { tools, ..RenderOptions::default() };
    let template = tokenizer.require_chat_template().unwrap();
    let rendered = template.render_with_spans(&messages(conversation.clone()), &options).unwrap();
    rendered
        .assistant
        .iter()
        .map(|span: &Range<usize>| rendered.text[span.clone()].to_string())
        .collect()
}

fn conversation() -> Value {
    json!([
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": " 1 東京 "},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2\n"},
    ])
}

#[test]
fn spans_hold_each_turn_and_its_end_token() {
    for (name, template, expected) in [
        ("tokenizer", "chatml", [" 1 東京 <|im_end|>", "2\n<|im_end|>"]),
        ("tokenizer", "chatml-generation", [" 1 東京 <|im_end|>", "2\n<|im_end|>"]),
        ("tokenizer", "think-generation", [" 1 東京 <|im_end|>\n", "2\n<|im_end|>\n"]),
        ("tokenizer", "llama3", ["1 東京<|eot_id|>", "2<|eot_id|>"]),
        ("tokenizer", "gemma", ["1 東京<end_of_turn>", "2<end_of_turn>"]),
        ("tokenizer-sp", "llama2", [" 1 東京 </s>", " 2 </s>"]),
        ("tokenizer-sp", "mistral", [" 1 東京</s>", " 2</s>"]),
    ] {
        assert_eq!(
            spans(&with_template(name, template), &conversation(), None),
            expected,
            "{template}"
        );
    }
}

#[test]
fn spans_of_a_template_that_rewrites_history_are_exact() {
    let qwen = with_template("tokenizer", "qwen-tools");
    let conversation = json!([
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "<think>\neasy\n</think>\n\n 1. "},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": [{"type": "text", "text": "passed over"}]},
        {"role": "user", "content": "Three?"},
        {"role": "assistant", "content": "three", "reasoning_content": "hm"},
        {"role": "user", "content": "Four?"},
        {"role": "assistant", "content": "<think>\nhard\n</think>\n\n4"},
    ]);
    let expected = [" 1. <|im_end|>", "three<|im_end|>", "<think>\nhard\n</think>\n\n4<|im_end|>"];
    let mut without_parts = conversation.clone();
    without_parts.as_array_mut().unwrap().drain(2..4);
    assert_eq!(spans(&qwen, &without_parts, None), expected);
    // A message whose content the template leaves out has no place that could be told.
    let template = qwen.require_chat_template().unwrap();
    let message = template
        .render_with_spans(&messages(conversation), &RenderOptions::default())
        .unwrap_err()
        .to_string();
    assert!(
        message.contains("message 4 (assistant)") && message.contains("generation"),
        "{message}"
    );
}

#[test]
fn spans_hold_tool_calls() {
    let tools = [json!({"type": "function", "function": {"name": "add"}})];
    let call = json!([{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]);
    let qwen = with_template("tokenizer", "qwen-tools");
    for (content, expected) in
        [(json!(""), ""), (Value::Null, ""), (json!("Let me see."), "Let me see.\n")]
    {
        let conversation = json!([
            {"role": "user", "content": "Add."},
            {"role": "assistant", "content": content, "tool_calls": call},
            {"role": "tool", "content": "1"},
            {"role": "assistant", "content": "It is 1."},
        ]);
        assert_eq!(
            spans(&qwen, &conversation, Some(&tools)),
            [
                format!(
                    "{expected}<tool_call>\n{{\"name\": \"add\", \"arguments\": {{\"a\": 1}}}}\n</tool_call><|im_end|>"
                ),
                "<think>\n\n</think>\n\nIt is 1.<|im_end|>".to_string()
            ]
        );
    }
}

#[test]
fn prefixes_and_marks_give_the_same_spans() {
    // The count of messages in the head breaks every prefix but the last, so that all other turns go by marks.
    for (name, template) in [
        ("tokenizer", "chatml"),
        ("tokenizer", "gemma"),
        ("tokenizer-sp", "llama2"),
        ("tokenizer-sp", "mistral"),
    ] {
        let by_prefix = with_template(name, template);
        let mut by_marks = tokenizer(name);
        let source =
            std::fs::read_to_string(fixtures().join(format!("templates/{template}.jinja")))
                .unwrap();
        by_marks.set_chat_template(&format!("{{{{ messages|length }}}}{source}")).unwrap();
        let trimmed = |spans: Vec<String>| {
            spans.iter().map(|span| span.trim().to_string()).collect::<Vec<_>>()
        };
        assert_eq!(
            trimmed(spans(&by_prefix, &conversation(), None)),
            trimmed(spans(&by_marks, &conversation(), None)),
            "{template}"
        );
    }
}

/// The spans of a conversation under a template of one's own, and whether it ends without a token that ends the turn.
fn spans_of(source: &str, conversation: Value) -> (Vec<String>, bool) {
    let mut tokenizer = tokenizer("tokenizer");
    tokenizer.set_chat_template(source).unwrap();
    let template = tokenizer.require_chat_template().unwrap();
    let rendered =
        template.render_with_spans(&messages(conversation), &RenderOptions::default()).unwrap();
    let text = |span: &Range<usize>| rendered.text[span.clone()].to_string();
    (rendered.assistant.iter().map(text).collect(), rendered.unended)
}

/// A question, a call, its result, and an answer, twice.
fn calls() -> Value {
    let call = |name: &str| json!([{"type": "function", "function": {"name": name, "arguments": {"a": 1}}}]);
    json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Add."},
        {"role": "assistant", "content": "", "tool_calls": call("add")},
        {"role": "tool", "content": "one"},
        {"role": "assistant", "content": "It is one."},
        {"role": "user", "content": "Now?"},
        {"role": "assistant", "tool_calls": call("now")},
        {"role": "tool", "content": "two"},
        {"role": "assistant", "content": "Two."},
    ])
}

const CALL: &str = "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments|tojson }}]{% endfor %}";

const CALLS: [&str; 4] = [
    "[add {\"a\": 1}]<|im_end|>",
    "It is one.<|im_end|>",
    "[now {\"a\": 1}]<|im_end|>",
    "Two.<|im_end|>",
];

#[test]
fn a_header_that_is_always_written_is_in_no_span() {
    let source = format!(
        "{{% for m in messages %}}{{{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}}}{CALL}{{{{ '<|im_end|>\\n' }}}}{{% endfor %}}{{{{ '<|im_start|>assistant\\n' }}}}"
    );
    assert_eq!(spans_of(&source, calls()), (CALLS.map(String::from).to_vec(), false));
    let same = json!([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hi"}]);
    assert_eq!(spans_of(&source, same.clone()).0, ["Hi<|im_end|>"]);
    // Here the end of a turn isn't among the tokens that end a generation.
    let other = source.replace("<|im_end|>", "<|eot_id|>");
    assert_eq!(spans_of(&other, same).0, ["Hi<|eot_id|>"]);
    // Such an end is no header where the template asks for none.
    let ends = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|eot_id|>\n{% endfor %}";
    let both = json!([
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Again"}, {"role": "assistant", "content": "Hello"},
    ]);
    assert_eq!(spans_of(ends, both.clone()).0, ["assistant: Hello<|eot_id|>"; 2]);
    // A role that is one token, also before a text that begins with one.
    let roles = "{% for m in messages %}{{ '<|im_start|>' if m.role == 'assistant' else '<|eot_id|>' }}{{ m.content }}{% endfor %}<|im_start|>";
    assert_eq!(spans_of(roles, both.clone()).0, ["Hello"; 2]);
    let mut token = both;
    token[2]["content"] = "<|im_start|>x".into();
    assert_eq!(spans_of(roles, token).0, ["Hello"; 2]);
}

#[test]
fn an_end_token_that_comes_with_the_next_turn_is_learned() {
    let between = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% if not loop.last or add_generation_prompt %}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    // The last turn has no end, which is said.
    let expected = [" 1 東京 <|im_end|>", "2\n"].map(String::from).to_vec();
    assert_eq!(spans_of(between, conversation()), (expected, true));
    // Where turns have no end, the token that begins the next is none.
    let none = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let expected = [" 1 東京 ", "2\n"].map(String::from).to_vec();
    assert_eq!(spans_of(none, conversation()), (expected, true));
    let always = none.replace("{% endfor %}", "<|im_end|>\n{% endfor %}");
    assert!(!spans_of(&always, conversation()).1);
}

#[test]
fn spans_hold_calls_where_the_system_message_moves() {
    // The system message stands with the last question, so no shorter conversation is a prefix of a longer one.
    let source = format!(
        "{{% set asked = messages|selectattr('role', 'equalto', 'user')|list %}}{{% for m in messages[1:] %}}{{% if m.role == 'assistant' %}}{{{{ m.content or '' }}}}{CALL}<|im_end|>{{% else %}}[INST]{{% if m == asked[-1] %}}{{{{ messages[0].content }}}} {{% endif %}}{{{{ m.content }}}}[/INST]{{% endif %}}{{% endfor %}}"
    );
    assert_eq!(spans_of(&source, calls()).0, CALLS);
}

#[test]
fn spans_end_where_the_last_turn_is_written_otherwise() {
    let turns = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}";
    let end = "<|im_end|>{{ '\\n' }}{% endfor %}";
    // The number of a call is left out in the last turn.
    let numbered = format!(
        "{turns}{CALL}{{% if m.tool_calls and not loop.last %}}#1{{% endif %}}{end}{{{{ '<|im_start|>assistant\\n' if add_generation_prompt }}}}"
    );
    let expected = CALLS.map(|span| span.replace("]<", "]#1<"));
    assert_eq!(spans_of(&numbered, calls()).0, expected);
    // The header begins the reasoning, which calls don't have.
    let thinking = numbered.replace("assistant\\n' if", "assistant\\n<think>\\n' if");
    assert_eq!(spans_of(&thinking, calls()).0, expected);
    // Another token ends the text, and calls are left out.
    let ended = format!(
        "{turns}{end}{{{{ '<|im_start|>assistant\\n' if add_generation_prompt else '<|endoftext|>' }}}}"
    );
    let expected =
        ["<|im_end|>", "It is one.<|im_end|>", "<|im_end|>", "Two.<|im_end|>\n<|endoftext|>"];
    let mut calls = calls();
    calls[6]["content"] = json!("");
    assert_eq!(spans_of(&ended, calls).0, expected);
}

/// A template whose header begins the reasoning, which turns are written without, and that writes calls, behind what `open`
/// says, before the content.
fn calls_first(open: &str) -> String {
    let calls = format!("{{% if m.tool_calls %}}{open}{CALL}<|im_end|>{{% endif %}}");
    format!(
        "{{% for m in messages %}}{{% if m.role == 'assistant' %}}{calls}<|im_start|>{{{{ m.content or '' }}}}<|im_end|>{{% else %}}{{{{ m.role }}}}: {{{{ m.content }}}}{{% endif %}}{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|><think>\n{{% endif %}}"
    )
}

#[test]
fn spans_hold_calls_that_stand_before_the_content() {
    let empty = "<|im_start|><|im_end|>";
    let expected =
        [&format!("{}{empty}", CALLS[0]), CALLS[1], &format!("{}{empty}", CALLS[2]), CALLS[3]];
    assert_eq!(spans_of(&calls_first("<|im_start|>"), calls()).0, expected);
    let mut looking = calls();
    looking[2]["content"] = json!(" look");
    let span = format!("{}<|im_start|> look<|im_end|>", CALLS[0]);
    assert_eq!(spans_of(&calls_first("<|im_start|>"), looking).0[0], span);
    // Behind another header the turn has no place that could be told, and the content's isn't taken for it.
    let mut tokenizer = tokenizer("tokenizer");
    tokenizer.set_chat_template(&calls_first("<|eot_id|>")).unwrap();
    let template = tokenizer.require_chat_template().unwrap();
    let message = template
        .render_with_spans(&messages(calls()), &RenderOptions::default())
        .unwrap_err()
        .to_string();
    assert!(message.contains("message 3 (assistant)"), "{message}");
}

#[test]
fn spans_hold_the_white_space_of_content() {
    let white = json!([
        {"role": "assistant", "content": "\n first \n"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": "  second \n"},
        {"role": "user", "content": "Go on."},
        {"role": "assistant", "content": " \n"},
    ]);
    let expected = ["\n first \n<|im_end|>", "  second \n<|im_end|>", " \n<|im_end|>"];
    assert_eq!(spans_of(&calls_first(""), white.clone()).0, expected);
    // What ends the last turn is another token, which alone ends a generation.
    let source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ '<|im_end|>' if loop.last else '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let expected = ["\n first \n<|eot_id|>", "  second \n<|eot_id|>", " \n<|im_end|>"];
    assert_eq!(spans_of(source, white.clone()).0, expected);
    // A trim of the template's still does what it did.
    let expected = ["first<|eot_id|>", "second<|eot_id|>", "<|im_end|>"];
    let trimmed = source.replace("m.content", "m.content|trim");
    assert_eq!(spans_of(&trimmed, white).0, expected);
}

#[test]
fn marks_of_spans_are_refused_in_a_conversation() {
    let tokenizer = tokenizer("tokenizer");
    let template = tokenizer.require_chat_template().unwrap();
    for text in ["a\u{fdd0}", "\u{fdd3}"] {
        let message =
            template.render(&[Message::new("user", text)], &RenderOptions::default()).unwrap_err();
        assert!(message.to_string().contains("U+FDD0"), "{message}");
    }
}

#[test]
fn generation_tags_keep_their_white_space_control() {
    let mut tokenizer = tokenizer("tokenizer");
    let render = |tokenizer: &mut Tokenizer, source: &str| {
        tokenizer.set_chat_template(source).unwrap();
        let template = tokenizer.require_chat_template().unwrap();
        let rendered = template
            .render_with_spans(&[Message::new("assistant", "x")], &RenderOptions::default())
            .unwrap();
        let spans = rendered
            .assistant
            .iter()
            .map(|span| rendered.text[span.clone()].to_string())
            .collect::<Vec<_>>();
        (rendered.text, spans)
    };
    for (source, text, span) in [
        ("a \n  {% generation %}\n b {% endgeneration %}\n c", "a \n b  c", " b "),
        ("a \n  {%- generation -%}\n b {%- endgeneration -%}\n c", "abc", "b"),
        ("a \n  {%+ generation +%}\n b {% endgeneration +%}\n c", "a \n  \n b \n c", "\n b "),
        (
            "{# {% generation %} #}a{% raw %}{% generation %}{% endraw %}{%generation%}b{%endgeneration%}",
            "a{% generation %}b",
            "b",
        ),
        (
            "{% for m in messages %}\n    {% generation %}\n    {%- if true -%}\n      {{ 'x' }}\n    {%- endif %}\n    {% endgeneration %}\n{% endfor %}\nend\n",
            "xend",
            "x",
        ),
    ] {
        assert_eq!(
            render(&mut tokenizer, source),
            (text.to_string(), vec![span.to_string()]),
            "{source:?}"
        );
    }
    assert!(tokenizer.set_chat_template("{% generation %}").is_err());
    assert!(tokenizer.set_chat_template("{% endgeneration %}").is_err());
}

/// Renders a template of one's own for one message.
fn rendered(source: &str) -> String {
    let mut tokenizer = tokenizer("tokenizer");
    tokenizer.set_chat_template(source).unwrap();
    let template = tokenizer.require_chat_template().unwrap();
    template.render(&[Message::new("user", "x")], &RenderOptions::default()).unwrap()
}

#[test]
fn values_are_what_jinja2_says_they_are() {
    for (source, expected) in [
        (
            "{{ none is iterable }}{{ 'a' is iterable }}{{ nothing is iterable }}{{ 1 is iterable }}",
            "FalseTrueTrueFalse",
        ),
        (
            "{{ 'a' is sequence }}{{ {} is sequence }}{{ [] is sequence }}{{ nothing is sequence }}",
            "TrueTrueTrueTrue",
        ),
        (
            "{{ none is sequence }}{{ 1 is sequence }}{{ namespace() is sequence }}",
            "FalseFalseFalse",
        ),
        ("{% if tools is iterable and tools|length > 0 %}tools{% endif %}none", "none"),
        ("{{ messages[0].missing|length }}{{ nothing|count }}{{ 'ab'|length }}", "002"),
    ] {
        assert_eq!(rendered(source), expected, "{source}");
    }
}

#[test]
fn values_are_written_as_python_writes_them() {
    for (source, expected) in [
        ("{{ '1e-5'|float }} {{ '1e16'|float }} {{ '1.5'|float }}", "1e-05 1e+16 1.5"),
        ("{{ '1e-5'|float|string }} {{ '1e16'|float ~ '' }}", "1e-05 1e+16"),
        ("{% set x %}{{ '1e-5'|float }}{% endset %}{{ x }}", "1e-05"),
        ("{{ [['1e-7'|float], '1e300'|float, -0.0] }}", "[[1e-07], 1e+300, -0.0]"),
        ("{{ {'a': '1e-7'|float, 1.5: none} }}", "{'a': 1e-07, 1.5: None}"),
        (
            "{{ [1e-7]|string }}{{ '' ~ messages ~ [1e-7, 'é'] }}",
            "[1e-07][{'role': 'user', 'content': 'x'}][1e-07, 'é']",
        ),
        ("{{ [1e-7, [1e-7]]|join(' ') }} {{ [1e-5]|map('string')|join }}", "1e-07 [1e-07] 1e-05"),
        ("{{ '%s %s'|format(1e-5, [1e-7]) }} {{ '%d|%s'|format(3, 'a') }}", "1e-05 [1e-07] 3|a"),
        ("{{ '{} {}'.format(1e-5, [1e-7]) }}", "1e-05 [1e-07]"),
        ("{{ [1e-7]|trim }}{{ '1e-5'|float|upper }}", "[1e-07]1E-05"),
        ("{{ [1, true, none, nothing, [], {}, 'a'] }}", "[1, True, None, Undefined, [], {}, 'a']"),
        ("{{ (1, 2) }}{{ (1e-7,) }}{{ () }}", "(1, 2)(1e-07,)()"),
        (
            r"{{ ['\u200b\u00a0\u3000\u00ad\ue000 \u00e9\u0301\u2028\x7f\x01'] }}",
            "['\\u200b\\xa0\\u3000\\xad\\ue000 é\u{301}\\u2028\\x7f\\x01']",
        ),
        (r"{{ ['\U000e0001\U0001F642'] }}", "['\\U000e0001\u{1f642}']"),
        (r#"{{ ["it's", '"', "'\"", '\n\t\r\\'] }}"#, r#"["it's", '"', '\'"', '\n\t\r\\']"#),
        ("{{ '1e400'|float(0) }} {{ [1e308 * ('10'|int)] }}", "inf [inf]"),
    ] {
        assert_eq!(rendered(source), expected, "{source}");
    }
}

#[test]
fn methods_and_filters_of_python_are_there() {
    for (source, expected) in [
        ("{{ 'x'|int }}{{ '7'|int }}{{ '7.9'|int }}{{ none|int }}{{ [1]|int }}", "07700"),
        ("{{ ' 7\n'|int }} {{ '1_000'|int }} {{ '1__0'|int }} {{ 'inf'|int }}", "7 1000 0 0"),
        ("{{ 'x'|int(3) }}{{ 'x'|int(default=5) }}{{ '1f'|int(0, 16) }}", "3531"),
        ("{{ 'a b c d e'|truncate(5) }}|{{ 'hello big world'|truncate(9) }}", "a b c d e|hello..."),
        (
            "{{ 'hello big world'|truncate(9, true) }}|{{ 'hello big world'|truncate(9, false, '..', leeway=0) }}",
            "hello ...|hello..",
        ),
        ("{{ 'ab'.zfill(5) }}{{ '-7'.zfill(4) }}{{ 'ab'.zfill(-1) }}", "000ab-007ab"),
        ("{{ 'ab'.center(5, '*') }} {{ 'abc'.center(6, '*') }}", "**ab* *abc**"),
        ("{{ 'ä'.ljust(3) }}|{{ 'ä'.rjust(3, '.') }}", "ä  |..ä"),
        (
            "[{{ 'ab'|center(7) }}] {{ 5|center(width=3) }} {{ 'a'|center|length }}",
            "[   ab  ]  5  80",
        ),
        ("{{ 'one two-three _x é1'|wordcount }}{{ 5|wordcount }}{{ ''|wordcount }}", "510"),
        ("{{ 'a /ü?~'|urlencode }} {{ [('a', '/')]|urlencode }}", "a%20/%C3%BC%3F~ a=%2F"),
        ("{{ {'a b': 'c/d', 'e': 1.5, 'n': none}|urlencode }}", "a+b=c%2Fd&e=1.5&n=None"),
        ("{{ 'héllo'.index('l') }}{{ 'abcabc'.rindex('c') }}", "25"),
        ("{{ 'aBßÄ1'.swapcase() }}", "AbSSä1"),
        (
            "{{ ' a b  c '.rsplit() }} {{ ' a b  c '.rsplit(none, 1) }}",
            "['a', 'b', 'c'] [' a b', 'c']",
        ),
        ("{{ ' a b '.rsplit(none, 0) }}{{ ' '.rsplit() }}", "[' a b'][]"),
        ("{{ 'a,b,c'.rsplit(',', 1) }}", "['a,b', 'c']"),
        ("{{ {'a': 1}.copy() }}{{ messages[0].copy().role }}", "{'a': 1}user"),
    ] {
        assert_eq!(rendered(source), expected, "{source}");
    }
}

#[test]
fn what_python_refuses_is_refused() {
    for source in [
        "{% for x in none %}{% endfor %}",
        "{% for x in [none] recursive %}{{ loop(x) }}{% endfor %}",
        "{{ none|list }}",
        "{{ none|join }}",
        "{{ 'a'.index('b') }}",
    ] {
        let mut tokenizer = tokenizer("tokenizer");
        tokenizer.set_chat_template(source).unwrap();
        let template = tokenizer.require_chat_template().unwrap();
        let outcome = template.render(&[Message::new("user", "x")], &RenderOptions::default());
        assert!(outcome.is_err(), "{source}");
    }
    let source = "{{ nothing|list }}{{ nothing|join }}{% for x in nothing %}{% endfor %}";
    assert_eq!(rendered(source), "[]");
}

#[test]
fn what_strings_are_looped_over_or_made_of_is_bounded() {
    let loops = "{% set x = 'x' * 4000 * (messages|length) * 2000 %}{% for a in range(90000) %}{% for c in x %}{% break %}{% endfor %}{% endfor %}";
    // More than there is memory, so that nothing but a look at the width before can refuse it.
    let paddings = ["center", "ljust", "rjust", "zfill"]
        .map(|pad| format!("{{{{ 'a'.{pad}(1000000000000000) }}}}"));
    for source in std::iter::once(loops).chain(paddings.iter().map(String::as_str)) {
        let mut tokenizer = tokenizer("tokenizer");
        tokenizer.set_chat_template(source).unwrap();
        let template = tokenizer.require_chat_template().unwrap();
        let outcome = template.render(&[Message::new("user", "x")], &RenderOptions::default());
        assert!(outcome.is_err(), "{source}");
    }
    // Whatever a source leaves open, rewriting its literals is done soon and doesn't panic.
    let mut tokenizer = tokenizer("tokenizer");
    for again in ["{% raw %}", "{#", "{{ '", "{{ '\\\n", "{{ (", "{% '\\U"] {
        let _ = tokenizer.set_chat_template(&again.repeat((256 << 10) / again.len()));
    }
}

#[test]
fn a_loop_over_a_string_knows_its_length() {
    for (source, expected) in [
        ("{% for c in 'äbc' %}{{ c }}{% if not loop.last %},{% endif %}{% endfor %}", "ä,b,c"),
        ("{% for c in 'äb' %}{{ loop.length }}{{ loop.revindex }}{% endfor %}", "2221"),
        ("{% for c in 'abc' if c != 'b' %}{{ c }}{{ loop.length }}{% endfor %}", "a2c2"),
        ("{% for c in '' %}{{ c }}{% else %}empty{% endfor %}", "empty"),
        (
            "{% for c in ['ab'] recursive %}{{ loop.length }}{% if c|length > 1 %}{{ loop(c) }}{% endif %}{% endfor %}",
            "122",
        ),
    ] {
        assert_eq!(rendered(source), expected, "{source}");
    }
}

#[test]
fn strings_have_the_escapes_of_python() {
    for (source, expected) in [
        ("{{ \"one \\\ntwo\" }}", "one two"),
        (r"{{ '\U0001F642\U00000027\U0000005C' }}", "\u{1f642}'\\"),
        (r"{{ '\a\v\x41\101\u00e9\t' }}", "\u{7}\u{b}AAé\t"),
        (r#"{{ '\/' }}{{ "\d\\/" }}"#, r"\/\d\/"),
        (r#"{{ '\'}}' }}{{ {'a': {'b': "\/"}}['a']['b'] }}"#, r"'}}\/"),
        // Only strings have escapes.
        (r#"{# '\/ #}don't "\/" {% raw %}{{ '\/' }}{% endraw %}"#, r#"don't "\/" {{ '\/' }}"#),
    ] {
        assert_eq!(rendered(source), expected, "{source}");
    }
    let mut tokenizer = tokenizer("tokenizer");
    let message = tokenizer.set_chat_template("{{ '\\\n' }}\n{{ 1 + }}").unwrap_err().to_string();
    assert!(message.contains("line 3"), "{message}");
    assert!(tokenizer.set_chat_template(r"{{ '\U0001' }}").is_err());
}

#[test]
fn a_newline_behind_raw_stays() {
    for (source, expected) in [
        ("a{% raw %}\nb{% endraw %}\nc", "a\nbc"),
        ("a{%- raw -%}\n b{% endraw %}", "ab"),
        ("{% raw %}\n\n{{ x }}{% endraw %}", "\n\n{{ x }}"),
    ] {
        assert_eq!(rendered(source), expected, "{source:?}");
    }
}

#[test]
fn templates_know_the_tokens_that_the_configuration_names() {
    let folder = copy_of("tokenizer");
    let path = folder.path().join("tokenizer_config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    config["extra_special_tokens"] =
        json!({"image_token": "<|im_start|>", "audio": {"content": "<a>"}});
    config["video_token"] = json!("<v>");
    config["add_bos_token"] = json!(false);
    std::fs::write(&path, config.to_string()).unwrap();
    std::fs::write(
        folder.path().join("chat_template.jinja"),
        "{{ image_token }}{{ audio }}{{ video_token }}{{ add_bos_token }}",
    )
    .unwrap();
    let render = || {
        let tokenizer = Tokenizer::load(folder.path())?;
        let template = tokenizer.require_chat_template()?;
        template.render(&[Message::new("user", "x")], &RenderOptions::default())
    };
    assert_eq!(render().unwrap(), "<|im_start|><a><v>");
    config["extra_special_tokens"] = json!(["<a>"]);
    std::fs::write(&path, config.to_string()).unwrap();
    assert_eq!(render().unwrap(), "<v>");
    config["extra_special_tokens"] = json!({"image_token": 3});
    std::fs::write(&path, config.to_string()).unwrap();
    let message = render().unwrap_err().to_string();
    assert!(message.contains("tokenizer_config.json: \"image_token\" is a number"), "{message}");
}

#[test]
fn variables_reasoning_and_nulls_reach_the_template() {
    let mut tokenizer = tokenizer("tokenizer-sp");
    let variables = json!({"bos_token": "B", "extra": [1]});
    let options = RenderOptions { variables: variables.as_object(), ..RenderOptions::default() };
    let mut render = |source: &str, message: Value| {
        tokenizer.set_chat_template(source).unwrap();
        tokenizer.require_chat_template().unwrap().render(&messages(json!([message])), &options)
    };
    let user = json!({"role": "user", "content": "x", "name": null, "reasoning": "r"});
    assert_eq!(
        render("{{ bos_token }}{{ eos_token }}{{ extra }}{{ pad_token }}", user.clone()).unwrap(),
        "B</s>[1]"
    );
    assert_eq!(
        render("{{ messages[0]|tojson }}", user.clone()).unwrap(),
        "{\"thinking\": \"r\", \"role\": \"user\", \"content\": \"x\", \"reasoning\": \"r\", \"reasoning_content\": \"r\"}"
    );
    assert_eq!(
        render(
            "{{ 'a-b-c'.rsplit('-', 1) }}{{ 'a-b-c'.partition('-')[2] }}{{ 'a-b-c'.rpartition('-')[0] }}{{ 'ab'.removeprefix('a') }}{{ 'ab'.removesuffix('b') }}",
            user.clone()
        )
        .unwrap(),
        "['a-b', 'c']b-ca-bba"
    );
    assert_eq!(
        render("{{ tools }}{{ documents }}{{ true }}{{ 1.5 }}", user.clone()).unwrap(),
        "NoneNoneTrue1.5"
    );
    for (source, expected) in [
        (
            "{{ [1, 'a', none, {'b': 1.0}] }}{{ {'a': 1}.items()|list }}{{ (1, 2) }}",
            "[1, 'a', None, {'b': 1.0}][('a', 1)](1, 2)",
        ),
        (
            "{{ '%s-%d'|format('x', 3) }}{{ 'a' 'b' }}{{ 'ab' * 2 }}{{ [1] + [2] }}",
            "x-3ababab[1, 2]",
        ),
        (
            "{{ messages[0].content[0] }}{{ 7 / 2 }}{{ messages[0].get('zz') }}{{ messages[0]['zz'] }}|",
            "x3.5None|",
        ),
        (
            "{{ 'a,b'.split(',') }}{{ 'x' if false }}{{ [3, 1]|sort }}{{ messages|length > 0 and 'y' }}",
            "['a', 'b'][1, 3]y",
        ),
    ] {
        assert_eq!(render(source, user.clone()).unwrap(), expected, "{source}");
    }
    let message =
        render("\n\n{{ messages[0].missing.key }}", user.clone()).unwrap_err().to_string();
    assert!(message.contains("line 3"), "{message}");
    assert!(
        render("{{ strftime_now('%Q') }}", user.clone()).unwrap_err().to_string().contains("%Q")
    );
    assert!(render("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", user).is_err());
}

#[test]
fn spans_hold_the_channels_of_a_turn() {
    let special = |texts: &[&str]| texts.iter().map(|it| (*it).to_string()).collect::<Vec<_>>();
    let names = ["start", "end", "message", "channel", "constrain", "return", "call"];
    let markers = names.map(|name| format!("<|{name}|>")).to_vec();
    let ends = special(&["<|return|>", "<|call|>"]);
    let source = std::fs::read_to_string(fixtures().join("templates/harmony.jinja")).unwrap();
    let template = ChatTemplate::new(&source, Vec::new(), markers, ends).unwrap();
    let spans = |conversation: Value| {
        let rendered =
            template.render_with_spans(&messages(conversation), &RenderOptions::default()).unwrap();
        assert!(!rendered.unended);
        let text = |span: &Range<usize>| rendered.text[span.clone()].to_string();
        rendered.assistant.iter().map(text).collect::<Vec<_>>()
    };
    // Thoughts are written of the last turn alone, and what ends a turn that isn't the last one is another token.
    let thought = json!([
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1", "thinking": "easy"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "2", "thinking": "hard"},
    ]);
    let last = "<|channel|>analysis<|message|>hard<|end|><|start|>assistant<|channel|>final<|message|>2<|return|>";
    assert_eq!(spans(thought), ["<|channel|>final<|message|>1<|end|>", last]);
    let call = json!([{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]);
    let called = json!([
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": call},
        {"role": "tool", "content": "1"},
        {"role": "assistant", "content": "It is 1."},
    ]);
    let call = " to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}<|call|>";
    assert_eq!(spans(called), [call, "<|channel|>final<|message|>It is 1.<|return|>"]);
}
