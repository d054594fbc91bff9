//! Where settings come from, and what happens to mistakes in them.

mod common;

use common::Place;

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
fn the_example_of_mlx_lm_is_accepted_as_it_is() {
    let place = Place::with_model();
    place.write("lora_config.yaml", MLX_EXAMPLE);
    let plan = place.json(&["train", "-c", "lora_config.yaml", "--dry-run", "--json"]);
    let settings = &plan["settings"];
    assert_eq!(settings["rank"], 8);
    assert_eq!(settings["alpha"], 160.0);
    assert_eq!(plan["steps"], 1000);
    assert_eq!(plan["lora"]["modules"], serde_json::json!(["q_proj", "v_proj"]));
    assert_eq!(plan["lora"]["adapted"], 6);

    let schedule = MLX_EXAMPLE.replace("\n# ", "\n").replace("\n#", "\n");
    place.write("with_schedule.yaml", &schedule);
    let plan = place.json(&["train", "-c", "with_schedule.yaml", "--dry-run", "--json"]);
    assert_eq!(plan["settings"]["beta2"], 0.98);
    assert_eq!(plan["settings"]["epsilon"], 1e-6);
    assert_eq!(plan["peak_learning_rate"], 1e-5);
    assert_eq!(plan["settings"]["lr_schedule"]["warmup"], 100);
}

#[test]
fn mistakes_in_the_file_are_wrong_usage() {
    let place = Place::new();
    for (content, expected) in [
        ("batch_sise: 4", "unknown key `batch_sise`; did you mean `batch_size`"),
        ("rank: 4\nr: 8", "`rank` and `r` say the same thing"),
        ("rank: four", "rank: invalid type"),
        ("- rank", "expected a mapping"),
        ("rank: [", "run.yaml"),
    ] {
        place.write("run.yaml", content);
        let stderr = place.fails(2, &["train", "-c", "run.yaml", "-m", "m", "-d", "d"]);
        assert!(stderr.contains(expected), "{content}: {stderr}");
    }
    let stderr = place.fails(2, &["train", "-c", "none.yaml"]);
    assert!(stderr.contains("none.yaml"), "{stderr}");
}

#[test]
fn values_out_of_range_are_wrong_usage() {
    let place = Place::new();
    for (flags, expected) in [
        (&["--rank", "0"][..], "rank: is 0"),
        (&["--rank", "many"], "invalid value 'many'"),
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
        (&["--sample-every", "5"], "sample_prompt"),
        (&["--epochs", "1", "--steps", "2"], "cannot be used with"),
        (&["--device", "cuda"], "no CUDA"),
        (&["--device", "cpu", "--matmul", "mps"], "matmul: is only for Metal"),
        (&["--fine-tune-type", "dora"], "invalid value 'dora'"),
        (&["--from-config", "x"], "keep one of them"),
        (&["--rank-pattern", "q_proj"], "is not NAME=VALUE"),
    ] {
        let arguments = [&["train", "-m", "m", "-d", "d"], flags].concat();
        let stderr = place.fails(2, &arguments);
        assert!(stderr.contains(expected), "{flags:?}: {stderr}");
    }
    let stderr = place.fails(2, &["train", "-m", "m"]);
    assert!(stderr.contains("--data"), "{stderr}");
}

#[test]
fn help_and_completions_are_written() {
    let place = Place::new();
    let help = place.ok(&["train", "--help"]);
    for word in ["--learning-rate", "[default: 2e-4]", "While it trains", "metal-candle train -c"] {
        assert!(help.contains(word), "{word}");
    }
    let completions = place.ok(&["completions", "bash"]);
    assert!(completions.contains("complete -F") && completions.contains("--learning-rate"));
    assert!(place.ok(&["--version"]).starts_with("metal-candle "));
    place.fails(2, &["tarin"]);
}
