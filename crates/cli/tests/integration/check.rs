//! `--check`: what is exported, beside what it was made of.

use crate::common::{Place, text};

const TRAIN: [&str; 10] =
    ["train", "--model", "base", "--data", "data", "--steps", "5", "--learning-rate", "1e-2", "-q"];

#[test]
fn a_fused_model_is_checked_when_it_is_written_and_later() {
    let place = Place::with_model();
    place.ok(&TRAIN);
    let fuse = ["fuse", "-a", "adapters", "--to", "gguf-f32", "-o", "fused.gguf", "--check"];
    let report = place.json(&[&fuse[..], &["--json"]].concat());
    let check = &report["check"];
    assert_eq!((&check["agrees"], &check["rounding"]), (&true.into(), &"none".into()));
    assert!(check["divergence"]["mean_kl"].as_f64().unwrap() < 1e-8, "{check}");
    assert!(check["weights"]["weights"].as_u64().unwrap() > 20, "{check}");
    assert!(check["problems"].as_array().unwrap().is_empty());

    let compare = ["convert", "--check", "base", "fused.gguf"];
    let with_adapter = [&compare[..], &["--adapter", "adapters"]].concat();
    let said = place.run(&with_adapter);
    let (stdout, stderr) = (text(&said.stdout), text(&said.stderr));
    assert!(said.status.success() && stdout.contains("They agree."), "{stdout} {stderr}");
    for row in ["token ids", "chat template", "end tokens", "weights", "perplexity", "KL"] {
        assert!(stdout.contains(row), "{row}: {stdout}");
    }
    assert!(stderr.contains("fused.gguf beside base with adapters"), "{stderr}");
    // The adapter is in it, so the base alone is another model.
    let stderr = place.fails(1, &compare);
    for words in
        ["fused.gguf is not what its source is: weights: row", "probabilities: the mean KL"]
    {
        assert!(stderr.contains(words), "{words}: {stderr}");
    }
    let output = place.run(&[&compare[..], &["--json"]].concat());
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((output.status.code(), &report["agrees"]), (Some(1), &false.into()));
    assert!(report["divergence"]["mean_kl"].as_f64().unwrap() > 1e-6, "{report}");

    // A template that the file doesn't have.
    place.write("adapters/chat_template.jinja", "{{ messages[0].content }}");
    let stderr = place.fails(1, &with_adapter);
    assert!(stderr.contains("chat template: a conversation is rendered otherwise"), "{stderr}");
    std::fs::remove_file(place.path("adapters/chat_template.jinja")).unwrap();

    // f16 rounds, which a limit of one's own may be too narrow for.
    let half = ["fuse", "-a", "adapters", "--to", "f16", "-o", "half", "--check", "--json"];
    assert_eq!(place.json(&half)["check"]["rounding"], "f16");
    let compare =
        ["convert", "--check", "base", "half", "-a", "adapters", "--texts", "data/test.jsonl"];
    let stdout = place.ok(&compare);
    assert!(stdout.contains("They agree, but for rounding."), "{stdout}");
    let stderr = place.fails(1, &[&compare[..], &["--max-kl", "0"]].concat());
    assert!(stderr.contains("at most 0.0e0 was expected"), "{stderr}");
}

#[test]
fn a_converted_adapter_is_checked_over_its_base() {
    let place = Place::with_model();
    place.ok(&TRAIN);
    place.ok(&[&TRAIN[..], &["-o", "other", "--seed", "5"]].concat());
    let convert =
        ["convert", "-a", "adapters", "--to", "gguf", "-o", "a.gguf", "--check", "--json"];
    let report = place.json(&convert);
    assert_eq!(report["check"]["agrees"], true, "{report}");
    assert!(report["check"].get("weights").is_none());
    place.ok(&["convert", "-a", "adapters", "--to", "mlx", "-o", "mlx", "--check"]);
    for exported in ["a.gguf", "mlx"] {
        // The adapter names its base.
        let stdout = place.ok(&["convert", "--check", "adapters", exported]);
        assert!(stdout.contains("They agree."), "{stdout}");
        place.ok(&["convert", "--check", "base", exported, "--adapter", "adapters"]);
        let stderr = place.fails(1, &["convert", "--check", "other", exported]);
        assert!(stderr.contains("probabilities: the mean KL is"), "{stderr}");
    }
    place.ok(&["convert", "--check", "a.gguf", "adapters", "--model", "base"]);

    // llama.cpp takes the base's template, as a GGUF adapter has none.
    place.write("adapters/chat_template.jinja", "{{ messages[0].content }}");
    let convert = ["convert", "-a", "adapters", "--to", "gguf", "-o", "b.gguf", "--check"];
    let stderr = place.fails(1, &convert);
    assert!(stderr.contains("b.gguf is not what its source is: chat template"), "{stderr}");
    assert!(!stderr.contains("Next:") && place.path("b.gguf").exists(), "{stderr}");
}

#[test]
fn what_cannot_be_checked_is_told() {
    let place = Place::with_model();
    place.ok(&TRAIN);
    place.ok(&["convert", "-a", "adapters", "--to", "gguf", "-o", "a.gguf", "-q"]);
    for (arguments, expected) in [
        (&["convert", "base", "a.gguf"][..], "--check"),
        (&["convert", "--check", "base"], "2 values"),
        (&["convert", "--check", "base", "a.gguf", "--to", "mlx"], "cannot be used with"),
        (&["convert", "--check", "base", "missing.gguf"], "there is no missing.gguf to check"),
        (&["convert", "--check", "base", "a.gguf"], "adapter: is missing; a.gguf is an adapter"),
        (&["convert", "--check", "adapters", "a.gguf", "-a", "x"], "adapter: is x, but adapters"),
        (&["convert", "--check", "base", "a.gguf", "-m", "x"], "model: is x, but base"),
        (&["convert", "--check", "base", "a.gguf", "--max-kl", "-1"], "no number of at least 0"),
        (&["convert", "--check", "a.gguf", "adapters"], "a.gguf is a GGUF adapter, which names no"),
        (&["convert", "-a", "a.gguf", "--to", "peft", "-o", "x"], "base model; give --model"),
        (&["convert", "--adapter", "adapters", "--check"], "--output"),
        (&["fuse", "-a", "adapters", "-o", "x", "--texts", "data/test.jsonl"], "--check"),
    ] {
        let stderr = place.fails(2, arguments);
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
    }
    // What is asked for is read before anything is written.
    let fuse = ["fuse", "-a", "adapters", "-o", "x", "--check", "--texts", "missing.jsonl"];
    assert!(place.fails(1, &fuse).contains("missing.jsonl"));
    assert!(!place.path("x").exists());
    place.ok(&["fuse", "-a", "adapters", "-o", "fused", "-q"]);
    std::fs::remove_file(place.path("fused/tokenizer.json")).unwrap();
    let stderr = place.fails(1, &["convert", "--check", "base", "fused"]);
    assert!(stderr.contains("the export fused cannot be read"), "{stderr}");
}
