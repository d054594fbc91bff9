//! Distillation: what a teacher finds likeliest is written, learned from and resumed with, and what can't be is said.

use crate::common::Place;
use std::fs;

const TRAIN: [&str; 14] = [
    "train",
    "-m",
    "base",
    "-d",
    "data",
    "--objective",
    "distill",
    "--rank",
    "8",
    "--report-every",
    "1",
    "--no-plot",
    "--learning-rate",
    "2e-2",
];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&TRAIN[..], &["--teacher", "teacher.safetensors"], more].concat()
}

/// A model, data, and what a tuned adapter finds likeliest of all of them.
fn place() -> Place {
    let place = Place::with_model();
    let run = ["-m", "base", "-d", "data", "-o", "tuned", "--steps", "20", "--rank", "8", "-q"];
    place.ok(&[&["train", "--learning-rate", "2e-2", "--no-plot"], &run[..]].concat());
    let output = ["--top-k", "400", "-o", "teacher.safetensors"];
    place.ok(&[&["logprobs", "-a", "tuned", "-b", "2", "-d", "data"], &output[..]].concat());
    place
}

#[test]
fn a_model_learns_what_another_finds_likeliest() {
    let place = place();
    let summary = place.json(&with(&["--steps", "40", "--eval-every", "20", "--json", "--test"]));
    let loss = |part: &str| summary[part]["loss"].as_f64().unwrap();
    let log = place.read("adapters/metrics.jsonl");
    let first: serde_json::Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    let (before, after) = (first["loss"].as_f64().unwrap(), loss("validation"));
    assert!(before > 0.0 && after < 0.5 * before, "{before} {after}");
    assert!(loss("test") < 0.5 * before && summary["test"]["perplexity"].is_null(), "{summary}");
    assert!(summary["validation"]["metrics"]["mean_token_accuracy"].as_f64().unwrap() > 0.0);
    assert!(summary["validation"]["metrics"]["entropy"].as_f64().unwrap() > 0.0);
    let settings = place.read("adapters/train_config.yaml");
    assert!(settings.contains("teacher: teacher.safetensors"), "{settings}");
    let plan = place.ok(&with(&["--dry-run", "-o", "other", "--kd-alpha", "0.5"]));
    assert!(plan.contains("distill kd alpha 0.5"), "{plan}");
    let said = place.ok(&["evaluate", "-m", "base", "-d", "data", "--split", "train"]);
    assert!(said.contains("% of tokens the likeliest"), "{said}");
}

#[test]
fn a_run_goes_on_with_its_own_teacher_alone() {
    let place = place();
    place.ok(&with(&["--steps", "6", "--save-every", "3", "-o", "whole", "-q"]));
    place.ok(&with(&["--steps", "6", "--save-every", "3", "-o", "parts", "-q"]));
    fs::remove_dir_all(place.path("parts/checkpoints/step-00000006")).unwrap();
    place.ok(&["train", "--resume", "-o", "parts", "-q"]);
    let bytes = |run: &str| fs::read(place.path(run).join("adapter_model.safetensors")).unwrap();
    assert!(bytes("whole") == bytes("parts"));

    fs::remove_dir_all(place.path("parts/checkpoints/step-00000006")).unwrap();
    fs::remove_file(place.path("teacher.safetensors")).unwrap();
    let data = ["-d", "data/train.jsonl", "-d", "data/valid.jsonl"];
    let output = ["--top-k", "8", "-o", "teacher.safetensors", "-q"];
    place.ok(&[&["logprobs", "-m", "base"], &data[..], &output].concat());
    let stderr = place.fails(1, &["train", "--resume", "-o", "parts"]);
    assert!(stderr.contains("data"), "{stderr}");
}

#[test]
fn what_cannot_be_distilled_so_is_said() {
    let place = place();
    let logprobs = ["logprobs", "-m", "base", "-d", "data/train.jsonl", "-o"];
    let train = ["train", "-m", "base", "-d", "data", "-o", "other"];
    for (arguments, code, expected) in [
        ([&logprobs[..], &["teacher.safetensors"]].concat(), 2, "exists already; choose another"),
        ([&logprobs[..], &["missing/new"]].concat(), 2, "output: there is no folder missing"),
        ([&logprobs[..], &["new", "--top-k", "0"]].concat(), 2, "top_k: is 0, expected at least 1"),
        (
            [&logprobs[..], &["new", "--top-k", "2000"]].concat(),
            2,
            "top_k: is 2000, expected at most",
        ),
        (
            [&train[..], &["--objective", "distill"]].concat(),
            2,
            "teacher: is missing, which the objective distill learns from; `logprobs` writes one",
        ),
        (
            [&train[..], &["--teacher", "teacher.safetensors"]].concat(),
            2,
            "teacher: is an option of distill, and the objective is sft",
        ),
        (with(&["-o", "other", "--kd-alpha", "2"]), 2, "kd_alpha: is 2, expected above 0"),
        (with(&["-o", "other", "--loss-on", "all"]), 1, "says nothing of token 1 of example"),
        (
            [&TRAIN[..], &["-o", "other", "--teacher", "data/train.jsonl"]].concat(),
            1,
            "isn't a safetensors file that is whole",
        ),
    ] {
        let stderr = place.fails(code, &arguments);
        assert!(stderr.contains(expected), "{arguments:?}: {stderr}");
        assert!(!place.path("new").exists() && !place.path("other").exists());
    }
    let output = ["--split", "train", "--top-k", "8", "-o", "short.safetensors", "-q"];
    place.ok(&[&["logprobs", "-m", "base", "-d", "data"], &output[..]].concat());
    let short = ["-o", "other", "--teacher", "short.safetensors"];
    let stderr = place.fails(1, &[&TRAIN[..], &short].concat());
    assert!(stderr.contains("valid data of data: "), "{stderr}");
}

#[test]
fn a_student_of_another_vocabulary_is_refused() {
    let place = Place::with_model();
    let logprobs = |student: &str| {
        let run = ["logprobs", "-m", "base", "-d", "data/train.jsonl", "-o", "new"];
        let stderr = place.fails(2, &[&run[..], &["--student", student]].concat());
        assert!(stderr.contains("student: has another vocabulary than the teacher"), "{stderr}");
        assert!(!place.path("new").exists());
        stderr
    };
    let demo = concat!(env!("CARGO_MANIFEST_DIR"), "/demo/base");
    let stderr = logprobs(demo);
    assert!(stderr.contains("token 3 is ! of the student and $ of the teacher"), "{stderr}");
    // The same but for a token of the chat template, which the data have.
    for name in ["config.json", "tokenizer.json", "tokenizer_config.json"] {
        let text = place.read(&format!("base/{name}"));
        place.write(&format!("renamed/{name}"), &text.replace("<|im_start|>", "<|im_begin|>"));
    }
    let stderr = logprobs("renamed");
    assert!(stderr.contains("token 361 is <|im_begin|> of the student"), "{stderr}");
}
