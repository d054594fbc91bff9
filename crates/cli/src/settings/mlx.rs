//! Training files of mlx-lm: how they are recognised, and what holds where they say nothing.
//!
//! `CONFIG_DEFAULTS` of mlx-lm's `lora.py` (0.32) decides there. A file that has a key which only mlx-lm
//! has gets the same values here, so that it trains the same way. What stays different is told.

use super::keys::same;
use super::programs::Unsaid;
use serde_yaml_ng::{Mapping, Value};

/// Keys that no other program has, this one included.
const OWN: &[&str] = &[
    "adapter_path",
    "grad_accumulation_steps",
    "iters",
    "lora_layers",
    "lora_parameters",
    "mask_prompt",
    "optimizer_config",
    "resume_adapter_file",
    "steps_per_eval",
    "steps_per_report",
    "val_batches",
];

/// Keys that no other program has either, but that a file may hold without a value.
const OWN_WITH_VALUE: &[&str] =
    &["chat_feature", "completion_feature", "hf_dataset", "prompt_feature", "text_feature"];

/// Settings that LoRA has no use for without an adapter to make.
const LORA: &[&str] = &["rank", "scale", "num_layers"];

/// The key by which a file is known to be mlx-lm's, if it is. `written` are its keys as they stand there.
pub fn sign(written: &Mapping) -> Option<&'static str> {
    let has_value = |key: &&&str| written.get(**key).is_some_and(|value| !value.is_null());
    OWN.iter()
        .find(|key| written.contains_key(**key))
        .or_else(|| OWN_WITH_VALUE.iter().find(has_value))
        .copied()
}

/// What is left unsaid by a file, which says `said`, and by flags. Where the file counts mlx-lm's batches, these become steps
/// of the optimiser; flags count those.
pub fn unsaid(said: &mut Mapping, flags: &Mapping) -> Unsaid {
    let mut differences = vec![
        "batches come in another order".to_string(),
        "mlx-lm also learns the padding token that follows an example".to_string(),
    ];
    let mut defaults = Mapping::new();
    let get = |key: &str| flags.get(key).or_else(|| said.get(key));
    let full = get("fine_tune_type").and_then(Value::as_str) == Some("full");
    let has = |key: &str| get(key).is_some();
    for (key, value) in [
        ("loss_on", Value::from("all")),
        ("clip_norm", 0.into()),
        ("schedule", "constant".into()),
        ("warmup_steps", 0.into()),
        ("learning_rate", 1e-5.into()),
        ("batch_size", 4.into()),
        ("steps", 1000.into()),
        ("max_seq_length", 2048.into()),
        ("rank", 8.into()),
        ("scale", 20.into()),
        ("num_layers", 16.into()),
        ("report_every", 10.into()),
        ("eval_every", 200.into()),
        ("save_every", 100.into()),
        ("eval_batches", 25.into()),
        ("test_batches", 500.into()),
    ] {
        let adapter = LORA.contains(&key) && (full || has("init_adapter"));
        let scheduled = key == "learning_rate" && has("lr_schedule");
        let mut given = said.keys().chain(flags.keys()).filter_map(Value::as_str);
        if !(adapter || scheduled || given.any(|other| same(other, key))) {
            defaults.insert(key.into(), value);
        }
    }
    let optimizer = get("optimizer").and_then(Value::as_str);
    // MLX's two correct no bias unless told.
    if matches!(optimizer, None | Some("adam" | "adamw")) && !has("bias_correction") {
        defaults.insert("bias_correction".into(), false.into());
    }
    if optimizer == Some("adafactor") {
        for key in ["scale_parameter", "relative_step"] {
            if !has(key) {
                defaults.insert(key.into(), true.into());
            }
        }
    }
    if optimizer == Some("muon") {
        if !has("weight_decay") {
            defaults.insert("weight_decay".into(), 0.01.into());
        }
        differences.push(
            "Muon's decay isn't part of the gradient, AdamW moves vectors, the embedding and the head, and a \
             step is as large as a matrix has outputs for an input, in mlx-lm rows for a column"
                .into(),
        );
    }
    if optimizer.is_none() {
        defaults.insert("optimizer".into(), "adam".into());
    }
    if get("loss_on").and_then(Value::as_str) == Some("completion") {
        differences
            .push("with mask_prompt, too, what the template writes after the last message".into());
    }
    if full {
        differences
            .push("every weight is trained, in mlx-lm those of the last num_layers layers".into());
    }
    let accumulated = get("grad_accumulation").and_then(Value::as_u64).unwrap_or(1);
    if accumulated > 1 {
        for key in ["steps", "report_every", "eval_every", "save_every"] {
            for map in [&mut *said, &mut defaults] {
                if let Some(batches) = map.get(key).and_then(Value::as_u64) {
                    map.insert(key.into(), (batches / accumulated).max(1).into());
                }
            }
        }
        differences.push(format!(
            "steps are the optimiser's, {accumulated} batches each, in whose sum every token weighs the same"
        ));
    }
    Unsaid { defaults, differences }
}
