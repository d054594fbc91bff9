//! Where settings come from, and what happens to mistakes in them.

use crate::common::Place;

/// The example file of mlx-lm, its keys and values as they are.
const MLX_EXAMPLE: &str = r#"
model: "base"
train: true
fine_tune_type: lora
training_mode: normal
optimizer: adamw
# optimizer_config:
#   adamw:
#     betas: [0.9, 0.98]
#     eps: 1e-6
#     weight_decay: 0.05
#     bias_correction: true
data: "data"
seed: 0
num_layers: 16
batch_size: 4
iters: 1000
val_batches: 25
learning_rate: 1e-5
steps_per_report: 10
steps_per_eval: 200
resume_adapter_file: null
adapter_path: "adapters"
save_every: 100
test: false
test_batches: 100
max_seq_length: 2048
grad_checkpoint: false
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
#lr_schedule:
#  name: cosine_decay
#  warmup: 100
#  warmup_init: 1e-7
#  arguments: [1e-5, 1000, 1e-7]
"#;

#[test]
fn rows_of_tokens_are_told_by_a_flag_or_by_a_file() {
    let place = Place::with_model();
    place.write("run.yaml", "model: base\ndata: data\ntrainable_token_indices: {lm_head: [7]}\n");
    let plan = |flags: &[&str]| {
        let arguments = ["train", "-c", "run.yaml", "--steps", "2", "--dry-run", "--json"];
        place.json(&[&arguments, flags].concat())
    };
    let key = "trainable_token_indices";
    assert_eq!(plan(&[])["settings"][key], serde_json::json!({ "lm_head": [7] }));
    let by_flag = plan(&["--trainable-token-indices", "5,3"]);
    assert_eq!(by_flag["settings"][key], serde_json::json!([5, 3]));
    let tables = plan(&["--target-modules", "q_proj,embed_tokens"]);
    assert_eq!(tables["lora"]["modules"], serde_json::json!(["q_proj", "embed_tokens"]));
    place.write("run.yaml", "model: base\ndata: data\ntrainable_token_indices: all\n");
    let stderr = place.fails(2, &["train", "-c", "run.yaml", "--dry-run"]);
    assert!(stderr.contains("ids of tokens in a list, or a mapping of such lists"), "{stderr}");
}

#[test]
fn flags_win_over_the_file_and_the_file_over_defaults() {
    let place = Place::with_model();
    place.write("run.yaml", "model: base\ndata: data\nrank: 4\nbatch_size: 2\nepochs: 3\n");
    let plan = place.json(&[
        "train",
        "-c",
        "run.yaml",
        "--rank",
        "2",
        "--steps",
        "7",
        "--dry-run",
        "--json",
    ]);
    let settings = &plan["settings"];
    assert_eq!(settings["rank"], 2);
    assert_eq!(settings["alpha"], 4.0);
    assert_eq!(settings["batch_size"], 2);
    assert_eq!(settings["learning_rate"], 2e-4);
    assert_eq!((&settings["steps"], &settings["epochs"]), (&7.into(), &serde_json::Value::Null));
    assert_eq!(plan["steps"], 7);
    assert!(!place.path("adapters").exists(), "a dry run writes nothing");
}

#[test]
fn unknown_instructions_of_the_processor_are_wrong_usage() {
    let place = Place::with_model();
    let arguments = ["train", "-m", "base", "-d", "data", "--steps", "2", "--dry-run"];
    for (name, code) in [("baseline", 0), ("avx3", 2)] {
        let output = place.command(&arguments).env("METAL_CANDLE_SIMD", name).output().unwrap();
        let stderr = crate::common::text(&output.stderr);
        assert_eq!(output.status.code(), Some(code), "{name}: {stderr}");
        let told = stderr.contains("METAL_CANDLE_SIMD is \"avx3\", expected");
        assert!(told == (code != 0) && (!told || stderr.contains("baseline")), "{name}: {stderr}");
    }
}

#[test]
fn the_example_of_mlx_lm_is_accepted_as_it_is() {
    let place = Place::with_model();
    place.write("lora_config.yaml", MLX_EXAMPLE);
    let plan = place.json(&["train", "-c", "lora_config.yaml", "--dry-run", "--json"]);
    let settings = &plan["settings"];
    assert_eq!(settings["rank"], 8);
    assert_eq!(settings["alpha"], 160.0);
    assert_eq!((&settings["loss_on"], &settings["clip_norm"]), (&"all".into(), &0.0.into()));
    assert_eq!((&settings["schedule"], &settings["warmup_steps"]), (&"constant".into(), &0.into()));
    assert_eq!(settings["weight_decay"], 0.01, "that of mlx's AdamW");
    assert_eq!(plan["steps"], 1000);
    assert_eq!(plan["lora"]["modules"], serde_json::json!(["q_proj", "v_proj"]));
    assert_eq!(plan["lora"]["adapted"], 6);

    let output = place.run(&["train", "-c", "lora_config.yaml", "--dry-run"]);
    let notice = crate::common::text(&output.stderr);
    assert!(notice.contains("read as mlx-lm's") && notice.contains("loss_on all"), "{notice}");

    let schedule = MLX_EXAMPLE.replace("\n# ", "\n").replace("\n#", "\n");
    place.write("with_schedule.yaml", &schedule);
    let plan = place.json(&["train", "-c", "with_schedule.yaml", "--dry-run", "--json"]);
    assert_eq!(plan["settings"]["beta2"], 0.98);
    assert_eq!(plan["settings"]["epsilon"], 1e-6);
    assert_eq!(plan["peak_learning_rate"], 1e-5);
    assert_eq!(plan["settings"]["lr_schedule"]["warmup"], 100);

    // mlx-lm's Adafactor takes none.
    place.write("adafactor.yaml", "model: base\ndata: data\niters: 4\noptimizer: adafactor\n");
    let plan = place.json(&["train", "-c", "adafactor.yaml", "--dry-run", "--json"]);
    assert!(plan["peak_learning_rate"].is_null(), "{plan}");
}

#[test]
fn a_rate_that_is_the_optimizers_own_is_planned_as_such() {
    let place = Place::with_model();
    place.write("run.yaml", "model: base\ndata: data\niters: 4\noptimizer: adafactor\n");
    let output = place.run(&["train", "-c", "run.yaml", "--dry-run"]);
    let (plan, notice) = (&output.stdout, crate::common::text(&output.stderr));
    assert!(notice.contains("relative_step true"), "{notice}");
    let plan = crate::common::text(plan);
    assert!(plan.contains("(relative_step)") && !plan.contains("at its peak"), "{plan}");
}

#[test]
fn mistakes_in_the_file_are_wrong_usage() {
    let place = Place::new();
    for (content, expected) in [
        ("batch_sise: 4", "unknown key `batch_sise`; did you mean `batch_size`"),
        ("rank: 4\nr: 8", "`rank` and `r` say the same thing"),
        ("rank: four", "rank: is four, expected a whole number"),
        ("- rank", "expected a mapping"),
        ("rank: [", "run.yaml: is not YAML"),
        ("rank: 4\nrank: 8", "the key \"rank\" stands there twice"),
        ("lora_rank: 0", "run.yaml: lora_rank (rank): is 0, expected"),
    ] {
        place.write("run.yaml", content);
        let stderr = place.fails(2, &["train", "-c", "run.yaml", "-m", "m", "-d", "d"]);
        assert!(stderr.contains(expected), "{content}: {stderr}");
    }
    let stderr = place.fails(2, &["train", "-c", "none.yaml"]);
    assert!(stderr.contains("none.yaml"), "{stderr}");
}

/// Every key with values that it may not be made for. What is no mistake is planned, and nothing crashes.
#[test]
fn any_value_of_any_key_is_a_plan_or_a_message() {
    let place = Place::with_model();
    let plan = place.json(&["train", "-m", "base", "-d", "data", "--dry-run", "--json"]);
    let keys: Vec<&String> = plan["settings"].as_object().unwrap().keys().collect();
    let long = format!("\"{}\"", "a".repeat(100_000));
    let values = [
        "-1",
        "0",
        "1",
        "0.5",
        "1e400",
        "-.inf",
        ".nan",
        "99999999999999999999",
        "4294967296",
        "18446744073709551615",
        "true",
        "null",
        "\"\"",
        "\"\\e[31m\"",
        "[1, [2]]",
        "[]",
        "{a: {b: 1}}",
        "{}",
        "all",
        "auto",
        "2020-13-45",
        &long,
    ];
    let (mut planned, mut refused) = (0, 0);
    for (number, key) in keys.iter().enumerate() {
        // Each value meets a third of the keys, and each key a third of the values.
        for value in values.iter().skip(number % 3).step_by(3) {
            let rest: String = [("model", "base"), ("data", "data")]
                .into_iter()
                .filter(|(other, _)| other != key)
                .map(|(key, value)| format!("{key}: {value}\n"))
                .collect();
            place.write("run.yaml", &format!("{rest}{key}: {value}\n"));
            let output = place.run(&["train", "-c", "run.yaml", "--dry-run", "-q"]);
            let stderr = crate::common::text(&output.stderr);
            let what = format!("{key}: {} {stderr}", &value[..value.len().min(60)]);
            match output.status.code() {
                Some(0) => planned += 1,
                Some(1 | 2) => refused += 1,
                _ => panic!("{what}"),
            }
            assert!(stderr.len() < 3000 && !stderr.contains("panicked"), "{what}");
            for word in ["Some(", "untagged", "expected u", "expected f", "struct "] {
                assert!(!stderr.contains(word), "{what}");
            }
        }
    }
    assert!(planned > 50 && refused > 50, "{planned} planned, {refused} refused");
}

#[test]
fn words_of_other_programs_are_flags_too() {
    let place = Place::with_model();
    let plan = place.json(&[
        "train",
        "--train",
        "--model_name_or_path",
        "base",
        "--data",
        "data",
        "--lora-r",
        "4",
        "--lora_alpha",
        "12",
        "--max-steps",
        "3",
        "--per-device-train-batch-size",
        "2",
        "--gradient-accumulation-steps",
        "2",
        "--bf16",
        "True",
        "--eval_strategy",
        "no",
        "--save-strategy",
        "epoch",
        "--warmup-ratio",
        "0.5",
        "--mask-prompt",
        "--adapter-path",
        "out",
        "--dry-run",
        "--json",
    ]);
    let settings = &plan["settings"];
    assert_eq!((&settings["rank"], &settings["alpha"]), (&4.into(), &12.0.into()));
    assert_eq!((&settings["batch_size"], &settings["grad_accumulation"]), (&2.into(), &2.into()));
    assert_eq!((&settings["dtype"], &settings["loss_on"]), (&"bf16".into(), &"completion".into()));
    assert_eq!((&settings["eval_every"], &settings["output"]), (&0.into(), &"out".into()));
    assert_eq!((&settings["save_every"], &settings["epoch_ends"]), (&0.into(), &true.into()));
    for (flags, expected) in [
        (&["--load-in-4bit", "--quantize", "q8_0"][..], "say the same thing"),
        (&["--quantize", "nf5"], "invalid value 'nf5' for '--quantize"),
        (&["--base-compute", "fp8", "--quantize", "nf4"], "base_compute: is fp8, which holds"),
        (&["--quantize", "fp8-compute"], "invalid value 'fp8-compute' for '--quantize"),
        (&["--base-compute", "fp8", "--fine-tune-type", "full"], "base_compute: is fp8, but"),
        (&["--base-compute", "int8", "--quantize", "int8"], "base_compute: is int8, which holds"),
        (&["--quantize", "int8-compute"], "invalid value 'int8-compute' for '--quantize"),
        (&["--base-compute", "int8", "--fine-tune-type", "full"], "base_compute: is int8, but"),
        (&["--base-compute", "int4"], "invalid value 'int4' for '--base-compute"),
        (&["--adapter", "x"], "--adapter: is x; `output` is the folder"),
        (&["--bf16", "--dtype", "f32"], "`--dtype` and `--bf16` say the same thing"),
        (&["--eval-strategy", "best"], "--eval-strategy: is best, expected steps, epoch or no"),
        (&["--optimizer", "adagrad"], "invalid value 'adagrad' for '--optimizer"),
    ] {
        let stderr = place.fails(2, &[&["train", "-m", "m", "-d", "d"], flags].concat());
        assert!(stderr.contains(expected), "{flags:?}: {stderr}");
    }
}

#[test]
fn products_in_8_bit_floats_want_hopper() {
    let place = Place::with_model();
    for command in [
        &["train", "-m", "base", "-d", "data", "--dry-run"][..],
        &["train", "-m", "base", "-d", "data"],
        &["generate", "-m", "base", "-p", "a"],
        &["evaluate", "-m", "base", "-d", "data"],
    ] {
        let flags = [command, &["--device", "cpu", "--base-compute", "fp8"]].concat();
        let stderr = place.fails(1, &flags);
        assert!(stderr.contains("base_compute: is fp8, which needs an NVIDIA GPU"), "{stderr}");
        assert!(stderr.contains("the device is the processor"), "{stderr}");
    }
}

#[test]
fn the_processor_computes_in_8_bit_integers() {
    let place = Place::with_model();
    fn of<'a>(command: &[&'a str]) -> Vec<&'a str> {
        [command, &["--device", "cpu", "--base-compute", "int8"]].concat()
    }
    let dry = ["train", "-m", "base", "-d", "data", "--dry-run", "--json"];
    let memory = |plan: &serde_json::Value| plan["memory"]["weights"].as_u64().unwrap();
    let plan = place.json(&of(&dry));
    assert_eq!(plan["settings"]["base_compute"], "int8");
    let (plain, int8) = (memory(&place.json(&dry)), memory(&plan));
    assert!(int8 < plain, "{int8} of {plain}");
    let loss = |folder: &str| {
        let flags = ["evaluate", "-m", "base", "-d", "data", "--json", "-a", folder];
        place.json(&of(&flags))["loss"].as_f64().unwrap()
    };
    for (folder, steps) in [("one", "1"), ("many", "30")] {
        let flags = [
            "train",
            "-m",
            "base",
            "-d",
            "data",
            "--steps",
            steps,
            "-o",
            folder,
            "--learning-rate",
            "3e-3",
        ];
        place.ok(&of(&flags));
    }
    let (before, after) = (loss("one"), loss("many"));
    assert!(after < 0.98 * before, "{after} after {before}");
    let generate = ["generate", "-m", "base", "-p", "a", "-a", "many", "--max-tokens", "4"];
    place.ok(&of(&generate));
}

#[test]
fn where_a_base_may_lie() {
    let place = Place::with_model();
    let train = ["train", "-m", "base", "-d", "data", "--device", "cpu", "--base-placement"];
    for (flags, expected) in [
        (&["host"][..], "base_placement: is host, which needs grad_checkpoint: true"),
        (&["host", "--grad-checkpoint"], "base_placement: is host, which is for NVIDIA GPUs"),
        (&["sharded", "--grad-checkpoint"], "base_placement: is sharded, which needs several"),
        (&["host", "--fine-tune-type", "full"], "base_placement: is host, but fine_tune_type"),
        (
            &["sharded", "--fine-tune-type", "full"],
            "base_placement: is sharded, which needs several",
        ),
        (
            &["sharded", "--fine-tune-type", "full", "--optimizer", "muon"],
            "base_placement: is sharded, but muon makes no step of a part of every matrix",
        ),
        (&["sharded", "--grad-checkpoint", "--sample-every", "5"], "but sample_every is set"),
        (&["sharded", "--grad-checkpoint", "--objective", "kto"], "but the objective is kto"),
    ] {
        let stderr = place.fails(2, &[&train[..], flags].concat());
        assert!(stderr.contains(expected), "{flags:?}: {stderr}");
    }
    let stderr =
        place.fails(2, &[&train[..], &["sharded", "--grad-checkpoint", "--dry-run"]].concat());
    assert!(stderr.contains("with one, expected device or host"), "{stderr}");
    for (command, expected) in [
        (&["generate", "-m", "base", "-p", "a"][..], "is host, which is for NVIDIA GPUs"),
        (&["bench"], "unknown flag --base-placement"),
        (&["serve", "-m", "base"], "unknown flag --base-placement"),
    ] {
        let flags = [command, &["--device", "cpu", "--base-placement", "host"]].concat();
        let stderr = place.fails(2, &flags);
        assert!(stderr.contains(expected), "{flags:?}: {stderr}");
    }
}

#[test]
fn where_the_optimizers_state_may_lie() {
    let place = Place::with_model();
    let train = ["train", "-m", "base", "-d", "data", "--device", "cpu", "--optimizer-placement"];
    for (flags, expected) in [
        (&["host"][..], "optimizer_placement: is host, which is for NVIDIA GPUs"),
        (&["sharded"], "optimizer_placement: is sharded, which needs several processes"),
        (&["host", "--optimizer", "adafactor"], "but adafactor keeps next to nothing"),
        (&["host", "--optimizer", "sgd"], "but sgd without momentum keeps nothing"),
        (&["disk"], "invalid value 'disk' for '--optimizer-placement"),
    ] {
        for more in [&[][..], &["--dry-run"]] {
            let stderr = place.fails(2, &[&train[..], flags, more].concat());
            assert!(stderr.contains(expected), "{flags:?}: {stderr}");
        }
    }
    assert!(!place.path("run").exists());
}

#[test]
fn where_activations_may_wait() {
    let place = Place::with_model();
    let train = ["train", "-m", "base", "-d", "data", "--device", "cpu"];
    for (flags, expected) in [
        (&["--activation-placement", "host"][..], "activation_placement: is host, which is for"),
        (&["--activation-offloading"], "activation_placement: is host, which is for NVIDIA GPUs"),
        (&["--activation-placement", "disk"], "invalid value 'disk' for '--activation-placement"),
    ] {
        for more in [&[][..], &["--dry-run"], &["--grad-checkpoint"]] {
            let stderr = place.fails(2, &[&train[..], flags, more].concat());
            assert!(stderr.contains(expected), "{flags:?}: {stderr}");
        }
    }
    assert!(!place.path("run").exists());
    let bench = ["bench", "--device", "cpu", "--activation-placement", "host"];
    assert!(place.fails(2, &bench).contains("is host, which is for NVIDIA GPUs"));
}

#[test]
fn a_dry_run_reads_no_weights() {
    let place = Place::with_model();
    let dry = ["train", "-m", "base", "-d", "data", "--dry-run", "--json"];
    let plan = || {
        let mut plan = place.json(&dry);
        plan["settings"]["template_time"].take();
        plan
    };
    let before = plan();
    // A weight that is not a number stops what reads it.
    let path = place.path("base/model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let end = bytes.len();
    bytes[end - 64..].fill(0xff);
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(plan(), before);
    let full = place.json(&[&dry[..], &["--fine-tune-type", "full"]].concat());
    assert_eq!(full["trainable_parameters"], before["parameters"]);
    let stderr = place.fails(1, &["train", "-m", "base", "-d", "data"]);
    assert!(stderr.contains("NaN"), "{stderr}");
    // What the headers say is checked.
    bytes.truncate(end - 64);
    std::fs::write(&path, &bytes).unwrap();
    let stderr = place.fails(1, &dry);
    assert!(stderr.contains("model.safetensors"), "{stderr}");
}

#[test]
fn values_out_of_range_are_wrong_usage() {
    let place = Place::new();
    for (flags, expected) in [
        (&["--rank", "0"][..], "rank: is 0"),
        (&["--rank", "many"], "--rank: is many, expected a whole number"),
        (&["--batch-size", "0"], "batch_size: is 0"),
        (&["--dropout", "1.5"], "dropout: is 1.5"),
        (&["--learning-rate", "nan"], "learning_rate"),
        (&["--warmup-ratio", "2"], "warmup_ratio"),
        (&["--epochs", "0"], "epochs: is 0"),
        (&["--steps", "0"], "steps: is 0"),
        (&["--clip-norm=-1"], "clip_norm"),
        (&["--max-seq-length", "1"], "max_seq_length: is 1"),
        (&["--valid-fraction", "1"], "valid_fraction: is 1"),
        (&["--threads", "0"], "threads: is 0"),
        (&["--threads", "99999999999"], "threads: is 99999999999, expected at most 1024"),
        (&["--batch-size", "99999999999"], "batch_size: is 99999999999, expected at most"),
        (&["--grad-accumulation", "99999999999"], "grad_accumulation: is 99999999999"),
        (&["--rank", "99999999999"], "rank: is 99999999999, expected at most"),
        (&["--max-seq-length", "99999999999"], "max_seq_length: is 99999999999"),
        (&["--steps", "99999999999"], "steps: is 99999999999, expected at most"),
        (&["--epochs", "1e30"], "epochs: is 1000000000000000000000000000000"),
        (&["--learning-rate", "1e30"], "expected at most 1000"),
        (&["--save-every", "99999999999"], "save_every: is 99999999999"),
        (&["--sample-tokens", "99999999999"], "sample_tokens: is 99999999999"),
        (&["--sample-every", "5"], "sample_prompt"),
        (&["--epochs", "1", "--steps", "2"], "cannot be used with"),
        #[cfg(not(feature = "cuda"))]
        (&["--device", "cuda"], "no CUDA"),
        (&["--device", "cpu", "--matmul", "mps"], "matmul: is only for Metal"),
        (&["--fine-tune-type", "vera"], "invalid value 'vera'"),
        (&["--from-config", "x"], "keep one of them"),
        (&["--rank-pattern", "q_proj"], "is not NAME=VALUE"),
    ] {
        let arguments = [&["train", "-m", "m", "-d", "d"], flags].concat();
        let stderr = place.fails(2, &arguments);
        assert!(stderr.contains(expected), "{flags:?}: {stderr}");
    }
    let stderr = place.fails(2, &["train", "-m", "m"]);
    assert!(stderr.contains("--data"), "{stderr}");
    let none = ["evaluate", "-m", "m", "-d", "d", "--generate", "--max-tokens", "0"];
    let stderr = place.fails(2, &none);
    assert!(stderr.contains("max_tokens: is 0, expected at least 1"), "{stderr}");
    for arguments in [
        &["generate", "-m", "m", "-p", "x", "--threads", "99999999999"][..],
        &["chat", "-m", "m", "--threads", "99999999999"],
        &["evaluate", "-m", "m", "-d", "d", "--threads", "99999999999"],
        &["evaluate", "-m", "m", "-d", "d", "--batch-size", "99999999999"],
        &["fuse", "-m", "m", "-a", "a", "-o", "o", "--threads", "99999999999"],
        &["bench", "--threads", "99999999999"],
        &["bench", "--samples", "99999999999"],
        &["demo", "--threads", "99999999999"],
    ] {
        let stderr = place.fails(2, arguments);
        assert!(stderr.contains("is 99999999999, expected at most"), "{arguments:?}: {stderr}");
    }
}

#[test]
fn help_and_completions_are_written() {
    let place = Place::new();
    let help = place.ok(&["train", "--help"]);
    for word in ["--learning-rate", "lion 2e-5", "While it trains", "metal-candle train -c"] {
        assert!(help.contains(word), "{word}");
    }
    let completions = place.ok(&["completions", "bash"]);
    assert!(completions.contains("complete -F") && completions.contains("--learning-rate"));
    assert!(place.ok(&["--version"]).starts_with("metal-candle "));
    place.fails(2, &["tarin"]);
}
