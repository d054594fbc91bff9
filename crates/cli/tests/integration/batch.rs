//! Many prompts: each answered as it is by itself, a stopped run goes on, and what is wrong is said.

use crate::common::{Place, wait};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

fn to<'a>(output: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let run = ["generate", "-m", "base", "--dtype", "f32", "--prompts", "prompts.jsonl"];
    [&run[..], &["-o", output, "-t", "0"], more].concat()
}

fn lines(values: &[Value]) -> String {
    values.iter().map(|value| format!("{value}\n")).collect()
}

fn answers(place: &Place) -> Vec<Value> {
    let text = place.read("answers.jsonl");
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn each_prompt_is_answered_as_by_itself() {
    let place = Place::with_model();
    let train = ["train", "-m", "base", "-d", "data", "-o", "tuned", "--steps", "4", "-q"];
    place.ok(&[&train[..], &["--no-plot", "--learning-rate", "2e-2"]].concat());
    place.write(
        "prompts.jsonl",
        &lines(&[
            json!({ "prompt": "What is 1?", "id": 7 }),
            json!({ "messages": [{ "role": "user", "content": "What is 2?" }] }),
            json!({ "prompt": "What is 3?", "adapter": "tuned", "max_tokens": 3 }),
            json!({ "prompt": "What is 4?", "temperature": 1.5, "seed": 9, "metadata": { "a": [1] } }),
            json!({ "prompt": "What is 5?", "stop": "e" }),
        ]),
    );
    let report = place.json(&to(
        "answers.jsonl",
        &["-n", "6", "--json", "--max-sequences", "3", "--cache-tokens", "400"],
    ));
    assert_eq!((&report["answers"], &report["failed"]), (&json!(5), &json!(0)));
    let found = answers(&place);
    assert_eq!(found.len(), 5);
    assert!(!place.path("answers.jsonl.partial").exists());
    assert_eq!((&found[0]["index"], &found[0]["id"]), (&json!(0), &json!(7)));
    assert_eq!(found[3]["metadata"], json!({ "a": [1] }));
    let alone = |more: &[&str]| {
        let run = ["generate", "-m", "base", "--dtype", "f32", "--json"];
        place.json(&[&run[..], more].concat())["text"].clone()
    };
    let greedy = ["-n", "6", "-t", "0"];
    assert_eq!(found[0]["text"], alone(&[&greedy[..], &["-p", "What is 1?"]].concat()));
    assert_eq!(found[1]["text"], alone(&[&greedy[..], &["-p", "What is 2?"]].concat()));
    let tuned = ["-n", "3", "-t", "0", "-a", "tuned", "-p", "What is 3?"];
    assert_eq!(found[2]["text"], alone(&tuned));
    assert_eq!(found[2]["tokens"], json!(3));
    let drawn = ["-n", "6", "-t", "1.5", "--seed", "9", "-p", "What is 4?"];
    assert_eq!(found[3]["text"], alone(&drawn));
    let stopped = [&greedy[..], &["--stop", "e", "-p", "What is 5?"]].concat();
    assert_eq!(found[4]["text"], alone(&stopped));
    let stderr = place.fails(2, &to("answers.jsonl", &[]));
    assert!(stderr.contains("answers.jsonl exists already"), "{stderr}");
    // Guessed or not, they are the same.
    let guessed = ["-n", "6", "--draft-tokens", "3", "--draft-model", "base"];
    place.ok(&to("guessed.jsonl", &guessed));
    assert_eq!(place.read("guessed.jsonl"), place.read("answers.jsonl"));
    // The smaller model needs no tokenizer of its own.
    std::fs::create_dir(place.path("draft")).unwrap();
    for name in ["config.json", "model.safetensors"] {
        let [from, to] = ["base", "draft"].map(|folder| place.path(folder).join(name));
        std::fs::copy(from, to).unwrap();
    }
    let guessed = ["-n", "6", "--draft-tokens", "3", "--draft-model", "draft"];
    place.ok(&to("by-draft.jsonl", &guessed));
    assert_eq!(place.read("by-draft.jsonl"), place.read("answers.jsonl"));
    let stderr = place.fails(2, &to("wrong.jsonl", &["--draft-tokens", "64"]));
    assert!(stderr.contains("draft_tokens: is 64"), "{stderr}");
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/base");
    let other = ["--draft-tokens", "3", "--draft-model", demo];
    let stderr = place.fails(2, &to("wrong.jsonl", &other));
    assert!(stderr.contains("draft_model: has another vocabulary than the model"), "{stderr}");
    let stderr = place.fails(2, &to("wrong.jsonl", &["--draft-model", "base"]));
    assert!(stderr.contains("--draft-tokens"), "{stderr}");
}

#[test]
fn the_same_prompt_is_drawn_anew_unless_a_seed_says_otherwise() {
    let place = Place::with_model();
    let prompt = |seed: Option<u64>| match seed {
        None => json!({ "prompt": "What is 1?", "temperature": 2.0 }),
        Some(seed) => json!({ "prompt": "What is 1?", "temperature": 2.0, "seed": seed }),
    };
    let all = [prompt(None), prompt(None), prompt(Some(4)), prompt(Some(4))];
    place.write("prompts.jsonl", &lines(&all));
    place.ok(&to("answers.jsonl", &["-n", "6", "--ignore-eos"]));
    let found = answers(&place);
    assert_ne!(found[0]["text"], found[1]["text"]);
    assert_eq!(found[2]["text"], found[3]["text"]);
}

#[test]
fn raw_prompts_keep_the_space_that_their_text_begins_with() {
    let place = Place::new();
    let folder = |name: &str| Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
    fs::create_dir(place.path("base")).unwrap();
    // The demo's model with a decoder that takes a space off a text, as that of Llama 2 does.
    for (from, names) in [
        ("demo/base", &["config.json", "model.safetensors"][..]),
        (
            "../../fixtures/tokenizer-sp",
            &["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"],
        ),
    ] {
        for name in names {
            fs::copy(folder(from).join(name), place.path("base").join(name)).unwrap();
        }
    }
    let tokenizer: Value = serde_json::from_str(&place.read("base/tokenizer.json")).unwrap();
    let always = format!("{}=100", tokenizer["model"]["vocab"]["▁t"]);
    let flags = ["-n", "3", "--logit-bias", &always];
    let prompt = json!({ "prompt": "Once upon a" });
    let message = json!({ "messages": [{ "role": "user", "content": "Once upon a" }] });
    for (more, prompts, expected) in [
        (&["--raw"][..], &[prompt.clone()][..], &[" t t t"][..]),
        (&[], &[prompt, message], &["t t t", "t t t"]),
    ] {
        place.write("prompts.jsonl", &lines(prompts));
        place.ok(&to("answers.jsonl", &[&flags[..], more].concat()));
        let texts: Vec<Value> = answers(&place).iter().map(|it| it["text"].clone()).collect();
        assert_eq!(texts, expected, "{more:?}");
        fs::remove_file(place.path("answers.jsonl")).unwrap();
        let one = ["generate", "-m", "base", "-t", "0", "-p", "Once upon a", "--json"];
        let alone = place.json(&[&one[..], &flags, more].concat());
        assert_eq!(alone["text"], expected[0], "{more:?}");
    }
}

#[test]
fn tokens_are_those_of_the_answers() {
    let place = Place::with_model();
    // The token that ends a text is none of it.
    let ended = json!({ "prompt": "What is 1?", "logit_bias": { "362": 1000.0 } });
    let open = json!({ "prompt": "What is 2?", "ignore_eos": true });
    place.write("prompts.jsonl", &format!("\u{feff}{}", lines(&[ended, open])));
    let report = place.json(&to("answers.jsonl", &["-n", "6", "--json"]));
    let found = answers(&place);
    assert_eq!((&found[0]["tokens"], &found[1]["tokens"]), (&json!(0), &json!(6)));
    assert_eq!(report["tokens"], json!(6));
}

#[test]
fn a_line_that_contradicts_itself_or_the_command_is_refused() {
    let place = Place::with_model();
    let system = json!({ "role": "system", "content": "Be brief." });
    let user = json!({ "role": "user", "content": "What is 1?" });
    for (line, flags, expected) in [
        (json!({ "prompt": "a", "system": "b" }), &["--raw"][..], "system: is for the chat"),
        (json!({ "messages": [user] }), &["--raw"], "messages: are for the chat template, which"),
        (json!({ "messages": [system, user], "system": "b" }), &[], "has both system and a mess"),
    ] {
        place.write("prompts.jsonl", &lines(&[line]));
        let stderr = place.fails(2, &to("answers.jsonl", flags));
        assert!(stderr.contains("prompts.jsonl:1: ") && stderr.contains(expected), "{stderr}");
    }
    // What the command says is for lines that say nothing.
    place.write("prompts.jsonl", &lines(&[json!({ "messages": [system, user] })]));
    place.ok(&to("answers.jsonl", &["--system", "b", "-n", "2"]));
}

#[test]
fn a_killed_run_goes_on() {
    let place = Place::with_model();
    let prompts: Vec<Value> =
        (0..400).map(|number| json!({ "prompt": format!("What is {number}?") })).collect();
    place.write("prompts.jsonl", &lines(&prompts));
    let long = ["-n", "40", "--ignore-eos", "--max-sequences", "4"];
    place.ok(&to("whole.jsonl", &long));
    let mut child = place.start(&to("answers.jsonl", &long), &[]);
    wait("no answers were written", || {
        let written = fs::read_to_string(place.path("answers.jsonl.partial")).unwrap_or_default();
        written.lines().count() > 20
    });
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(!place.path("answers.jsonl").exists());
    // In the middle of a line.
    let partial = place.read("answers.jsonl.partial");
    fs::write(place.path("answers.jsonl.partial"), &partial[..partial.len() - 5]).unwrap();
    // Another run's answers are not taken over.
    for (flags, expected) in [
        (&["-n", "9"][..], "max_tokens was 40 and is now 9"),
        (&["--quantize", "int8"], "quantize was none and is now int8"),
        (&["--base-compute", "int8"], "base_compute was none and is now int8"),
        (&["--cache-dtype", "mxint8"], "cache_dtype was model and is now mxint8"),
        (&["--batch-invariant"], "batch_invariant was false and is now true"),
    ] {
        let long = if flags[0] == "-n" { &["--ignore-eos"][..] } else { &long };
        let stderr = place.fails(2, &to("answers.jsonl", &[long, flags].concat()));
        assert!(stderr.contains("answers of a run with other settings"), "{stderr}");
        assert!(stderr.contains(expected), "{expected}: {stderr}");
    }
    // What failed is tried again, as a larger cache may have room for it.
    let partial = place.read("answers.jsonl.partial");
    let kept: Vec<&str> = partial.lines().collect();
    let mut failed: Value = serde_json::from_str(kept[1]).unwrap();
    failed["answer"].as_object_mut().unwrap().remove("text");
    failed["answer"]["error"] = "no room".into();
    let cut = format!("{}\n{failed}\n{}", kept[0], kept[2..].join("\n"));
    fs::write(place.path("answers.jsonl.partial"), &cut).unwrap();
    let output = place.run(&to("answers.jsonl", &long));
    assert!(output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("there already"), "{stderr}");
    assert!(stderr.contains("1 answer is tried again"), "{stderr}");
    assert_eq!(place.read("answers.jsonl"), place.read("whole.jsonl"));

    // Killed when the output was there, before the file beside it was gone.
    let prompts = place.read("prompts.jsonl");
    let all = prompts.lines().zip(answers(&place)).map(|(line, answer)| {
        format!("{}\n", json!({ "line": line, "adapter": null, "answer": answer }))
    });
    let all: Vec<String> = std::iter::once(format!("{}\n", kept[0])).chain(all).collect();
    fs::write(place.path("answers.jsonl.partial"), all[..399].concat()).unwrap();
    let stderr = place.fails(2, &to("answers.jsonl", &long));
    assert!(stderr.contains("answers.jsonl exists already"), "{stderr}");
    fs::write(place.path("answers.jsonl.partial"), all.concat()).unwrap();
    place.ok(&to("answers.jsonl", &long));
    assert!(!place.path("answers.jsonl.partial").exists());
    assert!(!place.path(".answers.jsonl.metal-candle.lock").exists());
    assert_eq!(place.read("answers.jsonl"), place.read("whole.jsonl"));
}

#[test]
fn a_run_does_not_go_on_with_another_model_or_adapter_in_the_same_place() {
    let place = Place::with_model();
    let tuned = |seed: &str| {
        let train = ["train", "-m", "base", "-d", "data", "-o", "tuned", "--steps", "4", "-q"];
        let more = ["--no-plot", "--learning-rate", "2e-2", "--overwrite", "--seed", seed];
        place.ok(&[&train[..], &more].concat());
    };
    tuned("1");
    let prompts: Vec<Value> =
        (0..400).map(|number| json!({ "prompt": format!("What is {number}?") })).collect();
    place.write("prompts.jsonl", &lines(&prompts));
    let long = ["-a", "tuned", "-n", "40", "--ignore-eos"];
    let mut child = place.start(&to("answers.jsonl", &long), &[]);
    wait("no answers were written", || {
        let written = fs::read_to_string(place.path("answers.jsonl.partial")).unwrap_or_default();
        written.lines().count() > 2
    });
    child.kill().unwrap();
    child.wait().unwrap();
    tuned("2");
    let stderr = place.fails(2, &to("answers.jsonl", &long));
    assert!(
        stderr.contains("by another adapter: it was ") && stderr.contains("in tuned"),
        "{stderr}"
    );
    let again = ["train", "--from-config", "shape", "--fine-tune-type", "full", "--data", "data"];
    let more = ["--output", "base", "--steps", "1", "-q", "--overwrite", "--seed", "9"];
    place.ok(&[&again[..], &more].concat());
    let stderr = place.fails(2, &to("answers.jsonl", &long));
    assert!(stderr.contains("weights was "), "{stderr}");
}

#[test]
fn wrong_prompts_are_told_before_the_first_is_answered() {
    let place = Place::with_model();
    for (line, expected) in [
        ("{\"prompt\": \"x\", \"max_token\": 3}", "unknown key `max_token`"),
        ("{\"prompt\": 3}", "prompt: expected a text, found 3"),
        ("{\"prompt\": \"x\", \"max_tokens\": \"many\"}", "max_tokens: expected"),
        ("{\"prompt\": \"\"}", "prompt: is empty"),
        ("{}", "has neither prompt nor messages"),
        ("{\"prompt\": \"x\", \"messages\": []}", "has both prompt and messages"),
        ("{\"messages\": [{\"content\": \"x\"}]}", "messages[0]: no \"role\""),
        ("{\"prompt\": \"x\", \"adapter\": \"nowhere\"}", "nowhere: not an adapter"),
        ("{\"prompt\": \"x\", \"temperature\": -1}", "temperature: expected 0 (greedy) or more"),
        ("{\"prompt\": \"x\", \"stop\": [\"\"]}", "stop: an empty text"),
        ("{\"prompt\": \"x\"", ""),
    ] {
        place.write("prompts.jsonl", &format!("{{\"prompt\": \"fine\"}}\n\n{line}\n"));
        let stderr = place.fails(2, &to("answers.jsonl", &[]));
        assert!(stderr.contains("prompts.jsonl:3: ") && stderr.contains(expected), "{stderr}");
        assert!(!place.path("answers.jsonl.partial").exists());
    }
    place.write("prompts.jsonl", "\n");
    assert!(place.fails(2, &to("answers.jsonl", &[])).contains("has no prompts"));
    let stderr = place.fails(2, &["generate", "-m", "base", "--prompts", "prompts.jsonl"]);
    assert!(stderr.contains("--output"), "{stderr}");
    // What is too long for the cache is told in its place, and the others are answered.
    place.write("prompts.jsonl", "{\"prompt\": \"a\", \"max_tokens\": 500}\n{\"prompt\": \"b\"}\n");
    let few = ["-n", "3", "--cache-tokens", "128"];
    let stderr = place.fails(1, &to("answers.jsonl", &few));
    assert!(stderr.contains("1 answer is an error"), "{stderr}");
    let found = answers(&place);
    assert!(found[0]["error"].as_str().unwrap().contains("the cache has room for 128 tokens"));
    assert!(found[0].get("text").is_none() && found[1]["text"].is_string());
}

#[test]
fn what_is_for_many_prompts_is_refused_for_one() {
    let place = Place::new();
    let prompts = [["--prompt", "x"], ["--prompt-file", "x"]];
    for flags in [
        ["--output", "out.jsonl"],
        ["--max-sequences", "0"],
        ["--max-batch-tokens", "0"],
        ["--cache-tokens", "0"],
    ] {
        for prompt in prompts {
            let stderr = place.fails(2, &[&["generate", "-m", "m"], &prompt[..], &flags].concat());
            assert!(stderr.contains(flags[0]), "{flags:?}: {stderr}");
        }
    }
}

#[test]
fn one_text_at_once_ends_where_the_context_does() {
    let place = Place::with_model();
    place.write("prompts.jsonl", &lines(&[json!({ "prompt": "What is 1?", "ignore_eos": true })]));
    let more = ["--json", "--max-sequences", "1"];
    let report = place.json(&to("answers.jsonl", &more));
    assert_eq!(report["failed"], json!(0));
    let answer = &answers(&place)[0];
    let config: Value = serde_json::from_str(&place.read("base/config.json")).unwrap();
    let tokens = answer["prompt_tokens"].as_u64().unwrap() + answer["tokens"].as_u64().unwrap();
    assert_eq!(config["max_position_embeddings"], json!(tokens));
}
