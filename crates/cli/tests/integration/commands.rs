//! The commands, one after the other on a tiny model.

use crate::common::{Place, text};
use std::io::{Read, Write};
use std::process::Stdio;

const TRAIN: [&str; 9] =
    ["train", "--model", "base", "--data", "data", "--steps", "5", "--learning-rate", "1e-2"];

fn with<'a>(more: &[&'a str]) -> Vec<&'a str> {
    [&TRAIN[..], more].concat()
}

#[test]
fn a_trained_adapter_generates_fuses_and_evaluates() {
    let place = Place::with_model();
    let summary =
        place.json(&with(&["--report-every", "1", "--save-every", "2", "--test", "--json"]));
    assert_eq!(summary["outcome"], "finished");
    assert_eq!(summary["step"], 5);
    assert!(summary["validation"]["loss"].as_f64().unwrap() > 0.0);
    assert!(summary["test"]["loss"].as_f64().unwrap() > 0.0);
    for name in [
        "adapter_config.json",
        "adapter_model.safetensors",
        "metrics.jsonl",
        "tensorboard",
        "loss.svg",
        "loss.png",
        "train_config.yaml",
        "checkpoints/step-00000004",
    ] {
        assert!(place.path("adapters").join(name).exists(), "{name}");
    }
    let metrics = place.read("adapters/metrics.jsonl");
    assert_eq!(metrics.lines().filter(|line| line.contains("\"event\":\"train\"")).count(), 5);

    // The adapter names its base by a full path, so it works from anywhere without --model.
    let generated = place.json(&[
        "generate",
        "--adapter",
        "adapters",
        "--prompt",
        "What is 3?",
        "-t",
        "0",
        "-n",
        "8",
        "--json",
    ]);
    let tokens = generated["tokens"].as_array().unwrap().len();
    assert!((1..=8).contains(&tokens), "{generated}");
    let again = place.ok(&[
        "generate",
        "-m",
        "base",
        "-a",
        "adapters",
        "-p",
        "What is 3?",
        "-t",
        "0",
        "-n",
        "8",
    ]);
    assert_eq!(again, format!("{}\n", generated["text"].as_str().unwrap()));

    // In f32, as a merged weight in bf16 is rounded otherwise than the base and the adapter are.
    let evaluate = |arguments: &[&str]| {
        place.json(&[&["evaluate", "--dtype", "f32", "--json"], arguments].concat())
    };
    let base = evaluate(&["-m", "base", "-d", "data", "--split", "train"]);
    let tuned = evaluate(&["-a", "adapters", "-d", "data", "--split", "train"]);
    let loss = |report: &serde_json::Value| report["loss"].as_f64().unwrap();
    assert!(loss(&tuned) < loss(&base), "{tuned} {base}");

    let fused = place.json(&["fuse", "-m", "base", "-a", "adapters", "-o", "fused", "--json"]);
    assert_eq!(fused["format"], "f32");
    let merged = evaluate(&["-m", "fused", "-d", "data/train.jsonl"]);
    assert!((loss(&merged) - loss(&tuned)).abs() < 1e-5, "{merged} {tuned}");

    let model = place.json(&["inspect", "fused", "--json"]);
    assert_eq!((&model["kind"], &model["family"]), (&"model".into(), &"llama".into()));
    assert_eq!(model["chat_template"], true);
    assert_eq!(model["linear_layers"]["q_proj"], 3);
    let adapter = place.json(&["inspect", "adapters", "--json"]);
    assert_eq!((&adapter["kind"], &adapter["rank"]), (&"adapter".into(), &16.into()));
    let stderr = place.fails(2, &["inspect", "adapters", "--revision", "v1"]);
    assert!(stderr.contains("revision: is v1, but adapters is a folder"), "{stderr}");
    let checkpoint = place.json(&["inspect", "adapters/checkpoints/step-00000004", "--json"]);
    assert_eq!(
        (&checkpoint["kind"], &checkpoint["state"]["step"]),
        (&"checkpoint".into(), &4.into())
    );
    assert!(place.ok(&["inspect", "base"]).contains("LlamaForCausalLM"));
}

#[test]
fn an_adapter_is_converted_to_mlx_lm_and_back() {
    let place = Place::with_model();
    place.ok(&with(&["-q", "--rank", "4", "--num-layers", "2"]));
    let bytes = |name: &str| std::fs::read(place.path(name)).unwrap();
    place.write("adapters/chat_template.jinja", "{{ messages }}");
    let report =
        place.json(&["convert", "-a", "adapters", "--to", "mlx", "-o", "of-mlx", "--json"]);
    assert_eq!(report["format"], "mlx-lm");
    for folder in ["adapters", "of-mlx"] {
        let template = format!("{folder}/chat_template.jinja");
        assert_eq!(place.read(&template), "{{ messages }}");
        std::fs::remove_file(place.path(&template)).unwrap();
    }

    // Whatever takes an adapter takes it.
    let shown = place.json(&["inspect", "of-mlx", "--json"]);
    assert_eq!((&shown["format"], &shown["last_layers"]), (&"mlx-lm".into(), &2.into()));
    assert_eq!((&shown["rank"], &shown["alpha"]), (&4.into(), &8.0.into()));
    assert_eq!(shown["linear_layers"]["q_proj"], 2);
    assert_eq!(shown["base_model"], report["base_model"]);
    let evaluate = |adapter| {
        let told = ["evaluate", "-a", adapter, "-d", "data", "--split", "train", "--json"];
        place.json(&told)["loss"].as_f64().unwrap()
    };
    assert_eq!(evaluate("adapters"), evaluate("of-mlx"));
    place.ok(&["fuse", "-a", "of-mlx", "-o", "fused", "-q"]);
    place.ok(&["generate", "-a", "of-mlx", "-p", "What is 3?", "-n", "2"]);
    place.ok(&with(&["--init-adapter", "of-mlx", "-o", "more", "-q"]));
    place.ok(&with(&["--init-adapter", "of-mlx/adapters.safetensors", "-o", "again", "-q"]));
    let stderr =
        place.fails(2, &with(&["--init-adapter", "of-mlx", "-o", "x", "--num-layers", "1"]));
    assert!(stderr.contains("num_layers: is not that of the adapter"), "{stderr}");

    let back = ["convert", "-a", "of-mlx", "--to", "peft", "-o", "back", "-m", "base"];
    let said = place.run(&back);
    assert!(text(&said.stdout).contains("PEFT's files"), "{}", text(&said.stderr));
    assert!(text(&said.stderr).contains("Next: metal-candle chat --adapter back"));
    let weights = "adapter_model.safetensors";
    assert_eq!(bytes(&format!("back/{weights}")), bytes(&format!("adapters/{weights}")));

    // Nothing is written over.
    place.write("there.gguf", "");
    for (output, to, expected) in [
        ("back", "mlx", "exists and is not empty"),
        ("data/train.jsonl", "mlx", "data/train.jsonl exists already; choose another"),
        ("there.gguf", "gguf", "there.gguf exists already; choose another"),
        ("base", "mlx", "model's own folder"),
        ("adapters", "mlx", "adapter's own folder"),
        ("new", "peft", "PEFT's files already"),
    ] {
        let stderr = place.fails(2, &["convert", "-a", "adapters", "--to", to, "-o", output]);
        assert!(stderr.contains(expected), "{stderr}");
    }
    let stderr = place.fails(2, &with(&["-q", "-o", "of-mlx"]));
    assert!(stderr.contains("--overwrite"), "{stderr}");
    // Two ranks are more than mlx-lm's files hold.
    let ranks = with(&["-q", "--rank", "4", "--rank-pattern", "q_proj=2", "-o", "ranks"]);
    place.ok(&ranks);
    let stderr = place.fails(1, &["convert", "-a", "ranks", "--to", "mlx", "-o", "new"]);
    assert!(stderr.contains("one rank for all layers"), "{stderr}");
    assert!(!place.path("new").exists());
}

#[test]
fn the_settings_a_run_leaves_make_the_same_run() {
    let place = Place::with_model();
    place.ok(&with(&["-q", "--rank", "4", "--layers", "0,2", "--no-plot", "--no-tensorboard"]));
    assert!(!place.path("adapters/loss.svg").exists());
    assert!(!place.path("adapters/tensorboard").exists());
    place.ok(&["train", "-c", "adapters/train_config.yaml", "--output", "second", "-q"]);
    let bytes =
        |run: &str| std::fs::read(place.path(run).join("adapter_model.safetensors")).unwrap();
    assert!(bytes("adapters") == bytes("second"));
}

#[test]
fn a_folder_with_a_run_is_not_overwritten_by_accident() {
    let place = Place::with_model();
    place.ok(&with(&["-q"]));
    let before = place.read("adapters/metrics.jsonl");
    let stderr = place.fails(2, &with(&["-q"]));
    assert!(stderr.contains("--resume") && stderr.contains("--overwrite"), "{stderr}");
    assert_eq!(place.read("adapters/metrics.jsonl"), before);
    // An adapter alone, as other tools leave it, is as precious.
    std::fs::create_dir(place.path("peft")).unwrap();
    for name in ["adapter_config.json", "adapter_model.safetensors"] {
        std::fs::copy(place.path(&format!("adapters/{name}")), place.path(&format!("peft/{name}")))
            .unwrap();
    }
    let stderr = place.fails(2, &with(&["-q", "-o", "peft"]));
    assert!(stderr.contains("--overwrite"), "{stderr}");
    let stderr = place.fails(2, &with(&["-q", "-o", "base", "--overwrite"]));
    assert!(stderr.contains("model's own folder"), "{stderr}");
    // The demo replaces what a demo left, and no run of anybody's.
    let mine = ("mine/adapter/adapter_model.safetensors", "mine");
    place.write(mine.0, mine.1);
    let stderr = place.fails(2, &["demo", "-q", "--json", "--output", "mine"]);
    assert!(stderr.contains("output: mine is not empty"), "{stderr}");
    assert_eq!((place.read(mine.0).as_str(), place.path("mine/base").exists()), (mine.1, false));
    place.ok(&with(&["-q", "--overwrite", "--seed", "3"]));
    let stderr = place.fails(1, &["train", "--resume", "-q", "--seed", "4"]);
    assert!(stderr.contains("seed was 3 and is now 4"), "{stderr}");
}

#[test]
fn a_finished_run_can_be_taken_up_as_a_new_one() {
    let place = Place::with_model();
    place.ok(&with(&["-q", "--rank", "4"]));
    let more = ["--init-adapter", "adapters", "--output", "more", "-q", "--json"];
    let summary = place.json(&with(&more));
    assert_eq!(summary["step"], 5);
    let stderr =
        place.fails(2, &with(&["--init-adapter", "adapters", "--output", "x", "--rank", "8"]));
    assert!(stderr.contains("rank: is not that of the adapter"), "{stderr}");
}

#[test]
fn samples_are_shown_while_it_trains() {
    let place = Place::with_model();
    let output = place.run(&with(&[
        "--sample-every",
        "2",
        "--sample-prompt",
        "What is 1?",
        "--sample-tokens",
        "4",
    ]));
    assert!(output.status.success());
    let stderr = text(&output.stderr);
    assert_eq!(stderr.matches("What is 1? →").count(), 2, "{stderr}");
    assert!(stderr.contains("step 5/5") && stderr.contains("tokens/s"), "{stderr}");
    assert!(stderr.contains("validation loss") && stderr.contains("12 examples"), "{stderr}");
}

#[test]
fn bad_input_is_named() {
    let place = Place::with_model();
    let stderr = place.fails(1, &["train", "-m", "none/model/here", "-d", "data"]);
    assert!(stderr.contains("none/model/here"), "{stderr}");
    let stderr = place.fails(1, &["train", "-m", "base", "-d", "nothing", "-o", "a"]);
    assert!(stderr.contains("nothing"), "{stderr}");
    place.write("bad.jsonl", "{\"text\": \"one\"}\n{\"text\": \n");
    let stderr = place.fails(1, &["train", "-m", "base", "-d", "bad.jsonl", "-o", "b"]);
    assert!(stderr.contains("bad.jsonl:2:"), "{stderr}");
    place.write("empty.jsonl", "");
    let stderr = place.fails(1, &["train", "-m", "base", "-d", "empty.jsonl", "-o", "c"]);
    assert!(stderr.contains("empty.jsonl"), "{stderr}");
    place.write("file", "");
    let stderr = place.fails(1, &["train", "-m", "none/model", "-d", "data", "-o", "file/run"]);
    assert!(stderr.contains("output folder"), "{stderr}");
    let stderr = place.fails(1, &with(&["--target-modules", "w_proj", "-o", "d"]));
    assert!(stderr.contains("`w_proj` is not a linear layer"), "{stderr}");
    let stderr = place.fails(1, &["generate", "-m", "base", "-a", "data", "-p", "x"]);
    assert!(stderr.contains("not an adapter"), "{stderr}");
    let stderr = place.fails(2, &["fuse", "-m", "base", "-a", "base", "-o", "base"]);
    assert!(stderr.contains("own folder"), "{stderr}");
    let stderr = place.fails(1, &["train", "--resume", "-o", "data"]);
    assert!(stderr.contains("has no checkpoint"), "{stderr}");
    place.write("shape/config.json", &place.read("shape/config.json").replace("400", "100"));
    let full =
        ["train", "--from-config", "shape", "--fine-tune-type", "full", "-d", "data", "-o", "e"];
    let stderr = place.fails(1, &full);
    assert!(stderr.contains("vocabulary has 100"), "{stderr}");
}

#[test]
fn stdin_is_a_prompt_and_a_conversation() {
    let place = Place::with_model();
    let run = |arguments: &[&str], input: &str| {
        let mut child = place.command(arguments).stdin(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        text(&output.stdout)
    };
    let generate = ["generate", "-m", "base", "-t", "0", "-n", "4"];
    let piped = run(&generate, "What is 1?\n");
    assert_eq!(piped, place.ok(&[&generate[..], &["-p", "What is 1?"]].concat()));
    let raw = run(&[&generate[..], &["--raw"]].concat(), "What is 1?\n");
    assert!(!raw.is_empty());
    // So is a file, as editors write it.
    let tokens = |prompt: [&str; 2]| {
        place.json(&[&generate[..], &prompt, &["--json"]].concat())["prompt_tokens"].clone()
    };
    for text in ["What is 1?\n", "\u{feff}What is 1?\r\n"] {
        place.write("question.txt", text);
        assert_eq!(tokens(["--prompt-file", "question.txt"]), tokens(["-p", "What is 1?"]));
    }
    let chat = ["chat", "-m", "base", "-t", "0", "-n", "4", "--ignore-eos"];
    let answers =
        run(&chat, "What is 1?\n/reset\nWhat is 1?\n/system Be brief.\nWhat is 1?\n/exit\nno\n");
    let one = place.ok(&[&generate[..], &["--ignore-eos", "-p", "What is 1?"]].concat());
    assert!(answers.starts_with(&one.repeat(2)), "{answers:?} {one:?}");

    // A conversation that outgrows the room of its first turns, and one with guesses.
    let questions = "What is 1?\nWhat is 2?\nWhat is 3?\nWhat is 4?\n";
    let conversation = run(&chat, questions);
    assert!(conversation.starts_with(&one), "{conversation:?} {one:?}");
    let guessed = ["--draft-tokens", "3", "--draft-model", "base"];
    assert_eq!(run(&[&chat[..], &guessed].concat(), questions), conversation);
}

#[test]
fn answers_are_compared_with_those_of_the_data() {
    let place = Place::with_model();
    let teach = ["train", "--from-config", "shape", "--fine-tune-type", "full", "-d", "data"];
    let long_enough = ["--steps", "60", "--learning-rate", "1e-2", "-o", "taught", "-q"];
    place.ok(&[&teach[..], &long_enough].concat());
    let evaluate = |model: [&str; 2], more: &[&str]| {
        let run = ["evaluate", "-d", "data/test.jsonl", "--generate", "-n", "9", "--json"];
        place.json(&[&run[..], &model, more].concat())
    };
    // All answers of the data are the same, so the model knows that of questions it never saw.
    let taught = evaluate(["-m", "taught"], &["--answers", "new/answers.jsonl"]);
    let answers = &taught["answers"];
    assert_eq!((&answers["count"], &answers["left_out"]), (&3.into(), &0.into()));
    assert_eq!(answers["failed"], 0);
    assert_eq!((&answers["exact"], &answers["containing"]), (&1.0.into(), &1.0.into()), "{taught}");
    let lines = place.read("new/answers.jsonl");
    let line: serde_json::Value = serde_json::from_str(lines.lines().nth(1).unwrap()).unwrap();
    assert!(line["prompt"].as_str().unwrap().contains("What is 31?"), "{line}");
    assert_eq!((&line["expected"], &line["answer"]), (&"A number.".into(), &"A number.".into()));
    assert_eq!((&line["exact"], &line["finish_reason"]), (&true.into(), &"end_of_sequence".into()));
    let one_by_one = evaluate(["-m", "taught"], &["--max-sequences", "1", "--draft-tokens", "3"]);
    assert_eq!(one_by_one["answers"]["tokens"], answers["tokens"]);
    let some = evaluate(["-m", "taught"], &["--batches", "2", "-b", "1"]);
    assert_eq!(some["answers"]["count"], 2);
    let cut = evaluate(["-m", "taught"], &["--max-seq-length", "58"]);
    assert_eq!((&cut["answers"]["count"], &cut["answers"]["left_out"]), (&0.into(), &3.into()));
    let small = evaluate(["-m", "taught"], &["--cache-tokens", "32"]);
    assert_eq!((&small["answers"]["failed"], &small["answers"]["exact"]), (&3.into(), &0.0.into()));
    let untaught = evaluate(["-m", "base"], &[]);
    assert_eq!(untaught["answers"]["exact"], 0.0, "{untaught}");

    let wrong = ["evaluate", "-m", "base", "-d"];
    let fails = |more: &[&str]| place.fails(2, &[&wrong[..], more].concat());
    let stderr = fails(&["data/test.jsonl", "--generate", "--answers", "new/answers.jsonl"]);
    assert!(stderr.contains("answers.jsonl exists already"), "{stderr}");
    let stderr = fails(&["data/test.jsonl", "--max-seq-length", "1"]);
    assert!(stderr.contains("max_seq_length: is 1"), "{stderr}");
    let stderr = fails(&["data/test.jsonl", "--answers", "more.jsonl"]);
    assert!(stderr.contains("--generate"), "{stderr}");
    let stderr = fails(&["data/test.jsonl", "--batch-invariant"]);
    assert!(stderr.contains("--generate"), "{stderr}");
    place.write("texts.jsonl", "{\"text\": \"A number is a number.\"}\n");
    let stderr = fails(&["texts.jsonl", "--generate"]);
    assert!(stderr.contains("an example without a prompt"), "{stderr}");
}

#[test]
fn a_file_of_answers_that_cannot_be_written_is_told_before_the_model_is_read() {
    let place = Place::new();
    place.write("file", "");
    let run = ["evaluate", "-m", "none", "-d", "none", "--generate", "--answers", "file/a.jsonl"];
    let stderr = place.fails(1, &run);
    assert!(stderr.contains("file: is a file; a folder is to be written here"), "{stderr}");
    place.fails(1, &[&run[..7], &["new/a.jsonl"]].concat());
    assert!(!place.path("new").exists());
}

/// Elsewhere such a name may not be given to a file.
#[cfg(target_os = "linux")]
#[test]
fn a_path_that_is_no_text_is_written_to_and_told_or_refused() {
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    let place = Place::with_model();
    place.ok(&with(&["-q"]));
    place.write("prompts.jsonl", "{\"prompt\": \"a\"}\n");
    let path = |name: &[u8]| OsStr::from_bytes(&[b"nu\xff/", name].concat()).to_os_string();
    let convert = ["convert", "-a", "adapters", "--to", "mlx", "--json"];
    let fuse = ["fuse", "-a", "adapters", "--json"];
    let generate = ["generate", "-m", "base", "--prompts", "prompts.jsonl", "-n", "2", "--json"];
    for (arguments, name) in
        [(&convert[..], "mlx"), (&fuse[..], "fused"), (&generate[..], "a.jsonl")]
    {
        let mut command = place.command(arguments);
        command.arg("-o").arg(path(name.as_bytes()));
        if arguments[0] == "generate" {
            command.arg("-a").arg(path(b"mlx"));
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{name}: {}", text(&output.stderr));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(report["output"], format!("nu\u{fffd}/{name}"));
    }
    for arguments in [&TRAIN[..], &["demo"]] {
        let output = place.command(arguments).arg("-o").arg(path(b"run")).output().unwrap();
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains("output: is nu\u{fffd}/run, which is no UTF-8"), "{stderr}");
        assert!(!place.path("").join(path(b"run")).exists());
    }
}

#[cfg(target_os = "linux")]
#[test]
fn help_that_cannot_be_written_is_a_failure() {
    let place = Place::new();
    for arguments in [&["help"][..], &["train", "--help"], &["--version"]] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let output = place.command(arguments).stdout(full).output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(text(&output.stderr).contains("cannot write to stdout"), "{arguments:?}");
    }
}

#[test]
fn a_closed_pipe_is_no_failure() {
    let place = Place::with_model();
    let mut child = place
        .command(&["generate", "-m", "base", "-p", "x", "-n", "200", "--ignore-eos", "--raw"])
        .spawn()
        .unwrap();
    let mut first = [0];
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut first).unwrap();
    drop(stdout);
    let output = child.wait_with_output().unwrap();
    assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()));
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_leaves_a_checkpoint_and_can_be_resumed() {
    let place = Place::with_model();
    let arguments = [
        "train",
        "--model",
        "base",
        "--data",
        "data",
        "--steps",
        "400",
        "--report-every",
        "1",
        "--save-every",
        "0",
        "--eval-every",
        "0",
    ];
    let child = place.start(&arguments, &[]);
    place.wait_for_steps("adapters", 3);
    crate::common::send(&child, libc::SIGINT);
    let output = child.wait_with_output().unwrap();
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(130), "{stderr}");
    assert!(stderr.contains("metal-candle train --resume --output adapters"), "{stderr}");
    assert!(!place.path("adapters/adapter_model.safetensors").exists());

    let checkpoints: Vec<_> =
        std::fs::read_dir(place.path("adapters/checkpoints")).unwrap().collect();
    assert_eq!(checkpoints.len(), 1);
    // Whoever wants to use it already is told what there is.
    let stderr = place.fails(1, &["chat", "-m", "base", "--adapter", "adapters"]);
    assert!(stderr.contains("--adapter adapters/checkpoints/step-0"), "{stderr}");
    let stderr = place.fails(1, &["fuse", "-m", "base", "-a", "adapters", "-o", "fused"]);
    assert!(stderr.contains("--adapter adapters/checkpoints/step-0"), "{stderr}");
    let stderr = place.fails(1, &["generate", "-m", "adapters", "-p", "x"]);
    assert!(stderr.contains("not a model: the run in it has not ended"), "{stderr}");
    let summary = place.json(&["train", "--resume", "--json", "-q"]);
    assert_eq!((&summary["outcome"], &summary["step"]), (&"finished".into(), &400.into()));
    let steps: Vec<u64> = place
        .read("adapters/metrics.jsonl")
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap())
        .filter(|event| event["event"] == "train")
        .map(|event| event["step"].as_u64().unwrap())
        .collect();
    assert_eq!(steps, (1..=400).collect::<Vec<_>>());
}

#[cfg(unix)]
#[test]
fn a_folder_that_cannot_be_written_is_found_before_the_model_is_read() {
    use std::os::unix::fs::PermissionsExt;
    let place = Place::with_model();
    std::fs::create_dir(place.path("locked")).unwrap();
    let permissions = |mode| std::fs::Permissions::from_mode(mode);
    std::fs::set_permissions(place.path("locked"), permissions(0o555)).unwrap();
    // An administrator can write anywhere.
    let refused = std::fs::write(place.path("locked/probe"), "").is_err();
    if refused {
        let stderr = place.fails(1, &["train", "-m", "none/model", "-d", "data", "-o", "locked"]);
        assert!(stderr.contains("locked") && stderr.contains("cannot be written"), "{stderr}");
    }
    std::fs::set_permissions(place.path("locked"), permissions(0o755)).unwrap();
}

#[test]
fn a_data_set_of_the_hub_is_trained_on_by_its_name() {
    let place = Place::with_model();
    let card = "---\nconfigs:\n- config_name: one\n  data_files:\n  - {split: train_sft, path: a/train*}\n  \
                - {split: train_gen, path: a/valid*}\n  - {split: validation, path: a/valid*}\n\
                - config_name: two\n  data_files: none\n---\n";
    let address = crate::common::hub(vec![
        ("README.md".into(), card.into()),
        ("a/train.jsonl".into(), place.read("data/train.jsonl")),
        ("a/valid.jsonl".into(), place.read("data/valid.jsonl")),
    ]);
    let train = |more: &[&str]| {
        let arguments =
            ["train", "--model", "base", "--data", "owner/name", "--steps", "2", "--json"];
        let mut command = place.command(&[&arguments[..], more].concat());
        command.env("HF_HUB_OFFLINE", "0").env("HF_ENDPOINT", &address);
        let output = command.output().unwrap();
        (output.status.code(), text(&output.stdout), text(&output.stderr))
    };
    let (_, _, said) = train(&[]);
    assert!(said.contains("choose one of its configurations: one, two"), "{said}");
    let (_, _, said) = train(&["--data-config", "one"]);
    assert!(said.contains("--data-split; there is train_gen, train_sft, validation"), "{said}");
    let chosen = ["--data-config", "one", "--data-split", "train_sft"];
    let (code, summary, said) = train(&chosen);
    assert_eq!(code, Some(0), "{said}");
    let summary: serde_json::Value = serde_json::from_str(&summary).unwrap();
    assert!(summary["validation"]["loss"].as_f64().is_some(), "{summary}");
    // From the cache alone, as it is on the way to a resumed run.
    let offline = [
        "train",
        "--model",
        "base",
        "--data",
        "owner/name",
        "--steps",
        "2",
        "-q",
        "--output",
        "other",
    ];
    place.ok(&[&offline[..], &chosen[..]].concat());
    let output = place.run(&with(&["--data-split", "train", "--output", "third"]));
    assert_eq!(output.status.code(), Some(2), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("data_split: is for a data set of the hub"));
}

#[test]
fn what_a_killed_fuse_or_convert_left_goes_with_the_next_one_of_its_output() {
    let place = Place::with_model();
    place.ok(&with(&["--no-plot", "-q"]));
    for (command, output) in [
        (&["fuse", "-m", "base", "-a", "adapters", "-q", "-o"], "fused"),
        (&["convert", "-a", "adapters", "--to", "mlx", "-q", "-o"], "of-mlx"),
    ] {
        for name in [output, "other"] {
            place.write(&format!(".{name}.partial-99-0/model.safetensors"), "half of it");
        }
        place.ok(&[&command[..], &[output]].concat());
        assert!(!place.path(&format!(".{output}.partial-99-0")).exists());
        assert!(place.path(".other.partial-99-0").exists(), "it is another output's");
    }
}

#[cfg(unix)]
#[test]
fn a_fuse_that_is_ended_by_a_signal_leaves_nothing() {
    let place = Place::new();
    place.write_data();
    place.write_shape();
    // Large enough to be caught while it is written.
    let mut config: serde_json::Value =
        serde_json::from_str(&place.read("shape/config.json")).unwrap();
    config["vocab_size"] = 100_000.into();
    place.write("shape/config.json", &config.to_string());
    let train = ["train", "--from-config", "shape", "--fine-tune-type", "full", "--data", "data"];
    place.ok(&[&train[..], &["--output", "base", "--steps", "1", "-q", "--no-plot"]].concat());
    let left = || -> Vec<String> {
        let entries = std::fs::read_dir(place.path("")).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.contains("fused")).collect()
    };
    let mut interrupted = 0;
    for signal in [libc::SIGTERM, libc::SIGINT] {
        for _ in 0..10 {
            let mut child =
                place.start(&["fuse", "-m", "base", "--to", "f32", "-o", "fused", "-q"], &[]);
            let is_writing = || left().iter().any(|name| name.starts_with(".fused.partial-"));
            while !is_writing() && child.try_wait().unwrap().is_none() {
                std::thread::yield_now();
            }
            if child.try_wait().unwrap().is_none() {
                crate::common::send(&child, signal);
            }
            let output = child.wait_with_output().unwrap();
            if output.status.code() == Some(130) {
                assert_eq!(text(&output.stderr), "");
                let written = left();
                assert!(written.is_empty() || written == ["fused"], "{written:?}");
                interrupted += 1;
                break;
            }
            // It was faster.
            std::fs::remove_dir_all(place.path("fused")).unwrap();
        }
        let _ = std::fs::remove_dir_all(place.path("fused"));
    }
    assert_eq!(interrupted, 2, "it was always faster than the signal");
}
