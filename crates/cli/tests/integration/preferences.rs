//! Training on preferences: what it leaves and says, that a killed run goes on bit for bit, and what is refused.

#![cfg(unix)]

use crate::common::Place;

const RUN: [&str; 14] = [
    "train",
    "--model",
    "base",
    "--data",
    "pairs",
    "--objective",
    "dpo",
    "--learning-rate",
    "1e-2",
    "--batch-size",
    "2",
    "--rank",
    "2",
    "--precompute-ref-log-probs",
];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&RUN[..], more].concat()
}

fn place() -> Place {
    let place = Place::with_model();
    let lines = |numbers: std::ops::Range<usize>| -> String {
        let line = |n| {
            format!(
                "{{\"prompt\": \"What is {n}?\", \"chosen\": \"A number.\", \"rejected\": \"No idea!\"}}\n"
            )
        };
        numbers.map(line).collect()
    };
    place.write("pairs/train.jsonl", &lines(0..12));
    place.write("pairs/valid.jsonl", &lines(20..23));
    place.write("pairs/test.jsonl", &lines(30..33));
    let label = |n| {
        format!(
            "{{\"prompt\": \"What is {n}?\", \"completion\": \"{n}.\", \"label\": {}}}\n",
            n % 2 == 0
        )
    };
    place.write("labelled.jsonl", &(0..8).map(label).collect::<String>());
    place
}

#[test]
fn a_run_on_pairs_says_and_leaves_what_it_learned() {
    let place = place();
    let flags = ["--steps", "8", "--report-every", "1", "--eval-every", "4", "--test", "--json"];
    let summary =
        place.json(&with(&[&flags[..], &["--keep-best", "--best-by", "margin"]].concat()));
    for part in ["validation", "test"] {
        let found = &summary[part];
        assert!(found["perplexity"].is_null(), "{summary}");
        assert!(found["metrics"]["rewards/margins"].as_f64().unwrap() > 1e-3, "{summary}");
        assert_eq!(found["metrics"]["rewards/accuracies"], 1.0, "{summary}");
    }
    let log = place.read("adapters/metrics.jsonl");
    let first: serde_json::Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    // Nothing is learned yet.
    assert!((first["loss"].as_f64().unwrap() - 2f64.ln()).abs() < 1e-3, "{first}");
    for name in ["rewards/chosen", "rewards/rejected", "logps/chosen", "logps/rejected"] {
        assert!(first["metrics"][name].is_f64(), "{first}");
    }
    let settings = place.read("adapters/train_config.yaml");
    assert!(
        settings.contains("objective: dpo") && settings.contains("best_by: margin"),
        "{settings}"
    );
    let plan = place.ok(&with(&["--dry-run", "-o", "other", "--beta", "0.2"]));
    assert!(plan.contains("dpo beta 0.2, loss sigmoid"), "{plan}");

    let data = place.ok(&["data", "pairs/train.jsonl", "--model", "base"]);
    assert!(data.contains("12 preference pairs") && data.contains("[rejected]"), "{data}");
    // Going on from it, the adapter is the reference.
    let summary = place.json(&[
        "train",
        "--model",
        "base",
        "--data",
        "pairs",
        "--objective",
        "dpo",
        "--init-adapter",
        "adapters",
        "-o",
        "second",
        "--steps",
        "1",
        "--json",
    ]);
    assert!((summary["train_loss"].as_f64().unwrap() - 2f64.ln()).abs() < 1e-3, "{summary}");
}

#[test]
fn a_killed_run_on_pairs_goes_on_bit_for_bit() {
    let place = place();
    let flags = ["--steps", "60", "--report-every", "1", "--save-every", "2", "--no-plot"];
    place.ok(&with(&[&flags[..], &["-o", "whole", "-q"]].concat()));
    for steps in [3, 17] {
        let mut child =
            place.start(&with(&[&flags[..], &["-o", "parts", "--resume=auto"]].concat()), &[]);
        place.wait_for_steps("parts", steps);
        child.kill().unwrap();
        child.wait().unwrap();
    }
    place.ok(&["train", "--resume", "-o", "parts", "-q"]);
    let bytes =
        |run: &str| std::fs::read(place.path(run).join("adapter_model.safetensors")).unwrap();
    assert!(bytes("whole") == bytes("parts"));
}

#[test]
fn what_preferences_cannot_be_learned_so_is_said() {
    let place = place();
    for (arguments, expected) in [
        (&["--data", "pairs"][..], "the data are preference pairs: dpo, simpo and orpo learn"),
        (&["--data", "data", "--objective", "dpo"], "the data are sequences: sft and distill"),
        (&["--data", "labelled.jsonl", "--objective", "orpo"], "kto learns from these"),
        (
            &["--data", "pairs", "--objective", "dpo", "--simpo-gamma", "1"],
            "simpo_gamma: is an option of simpo, and the objective is dpo",
        ),
        (
            &["--data", "pairs", "--objective", "dpo", "--beta=-1"],
            "beta: is -1, expected a positive number",
        ),
        (
            &["--data", "pairs", "--objective", "dpo", "--label-smoothing", "0.1"],
            "is for the loss robust",
        ),
        (
            &["--data", "pairs", "--objective", "dpo", "--loss-on", "all"],
            "loss_on: is for supervised",
        ),
        (
            &["--data", "labelled.jsonl", "--objective", "kto", "--batch-size", "1"],
            "take 2 or more",
        ),
        (
            &["--data", "pairs", "--objective", "dpo", "--fine-tune-type", "full"],
            "precompute_ref_log_probs: has to be set",
        ),
        (&["--data", "data", "--best-by", "margin"], "best_by: is for pairs"),
        (&["--data", "pairs", "--rl", "ppo"], "expected sft, dpo, ipo, simpo, orpo or kto"),
    ] {
        let flags = [&["train", "--model", "base", "--steps", "1", "-o", "refused"], arguments];
        let output = place.run(&flags.concat());
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains(expected), "{arguments:?}: {said}");
    }
    // The answers of pairs are taken one by one.
    place.ok(&[
        "train",
        "--model",
        "base",
        "--data",
        "pairs",
        "--objective",
        "kto",
        "--steps",
        "1",
        "-o",
        "single",
        "-q",
    ]);
    let summary = place.json(&[
        "train",
        "--model",
        "base",
        "--data",
        "labelled.jsonl",
        "--stage",
        "kto",
        "--steps",
        "2",
        "--report-every",
        "1",
        "--json",
    ]);
    assert_eq!(summary["outcome"], "finished");
    assert!(place.read("adapters/metrics.jsonl").contains("\"kl\":"));
}
