//! The YAML file of a training run, in this program's words, mlx-lm's or PEFT's and transformers',
//! and how flags are laid over it.

use crate::errors::usage;
use crate::settings::Settings;
use serde_yaml_ng::{Mapping, Value};
use std::path::Path;

/// Other words for a key.
const ALIASES: &[(&str, &str)] = &[
    // mlx-lm
    ("adapter_path", "output"),
    ("grad_accumulation_steps", "grad_accumulation"),
    ("iters", "steps"),
    ("resume_adapter_file", "init_adapter"),
    ("steps_per_eval", "eval_every"),
    ("steps_per_report", "report_every"),
    ("val_batches", "eval_batches"),
    // PEFT
    ("base_model_name_or_path", "model"),
    ("layers_to_transform", "layers"),
    ("lora_alpha", "alpha"),
    ("lora_dropout", "dropout"),
    ("lora_r", "rank"),
    ("r", "rank"),
    ("use_rslora", "rslora"),
    // transformers and TRL
    ("adam_beta1", "beta1"),
    ("adam_beta2", "beta2"),
    ("adam_epsilon", "epsilon"),
    ("dataset_path", "data"),
    ("early_stopping_patience", "patience"),
    ("eval_steps", "eval_every"),
    ("gradient_accumulation_steps", "grad_accumulation"),
    ("gradient_checkpointing", "grad_checkpoint"),
    ("load_best_model_at_end", "keep_best"),
    ("logging_steps", "report_every"),
    ("lr_scheduler_type", "schedule"),
    ("max_grad_norm", "clip_norm"),
    ("max_length", "max_seq_length"),
    ("max_steps", "steps"),
    ("model_name_or_path", "model"),
    ("num_train_epochs", "epochs"),
    ("output_dir", "output"),
    ("per_device_train_batch_size", "batch_size"),
    ("save_steps", "save_every"),
    ("save_total_limit", "keep"),
    ("torch_dtype", "dtype"),
];

/// Keys that are understood without being settings of their own.
const OTHERS: &[&str] = &[
    "bias",
    "lora_parameters",
    "mask_prompt",
    "optim",
    "optimizer",
    "optimizer_config",
    "peft_type",
    "project_name",
    "report_to",
    "task_type",
    "train",
    "training_mode",
    "use_dora",
    "wandb",
];

/// Keys that say the same thing in different ways. A flag of a group takes the place of all of
/// them in the file.
const GROUPS: &[&[&str]] = &[
    &["epochs", "steps"],
    &["warmup_ratio", "warmup_steps"],
    &["alpha", "scale"],
    &["layers", "num_layers"],
    &["schedule", "lr_schedule"],
    &["warmup_ratio", "lr_schedule"],
    &["warmup_steps", "lr_schedule"],
    &["min_learning_rate", "lr_schedule"],
];

/// Reads a file into the keys of [`Settings`].
pub fn read(path: &Path) -> anyhow::Result<Mapping> {
    const LIMIT: u64 = 1 << 20;
    let bytes = metal_candle::files::read_limited(path, LIMIT).map_err(usage)?;
    let wrong = |message: String| usage(format!("{}: {message}", path.display()));
    let value: Value =
        serde_yaml_ng::from_slice(&bytes).map_err(|error| wrong(error.to_string()))?;
    match value {
        Value::Mapping(map) => canonical(map).map_err(wrong),
        Value::Null => Ok(Mapping::new()),
        other => {
            Err(wrong(format!("expected a mapping of keys to values, found {}", kind(&other))))
        }
    }
}

/// The settings of a file with the flags laid over it, over the defaults.
pub fn merge(file: Mapping, mut flags: Mapping) -> anyhow::Result<Settings> {
    let mut merged = file;
    flags.retain(|_, value| !value.is_null());
    for group in GROUPS {
        if group.iter().any(|key| flags.contains_key(*key)) {
            for key in *group {
                merged.remove(*key);
            }
        }
    }
    // A schedule of mlx-lm's holds its own peak.
    if let Some(rate) = flags.get("learning_rate")
        && let Some(Value::Mapping(schedule)) = merged.get_mut("lr_schedule")
        && let Some(Value::Sequence(arguments)) = schedule.get_mut("arguments")
        && let Some(first) = arguments.first_mut()
    {
        *first = rate.clone();
    }
    merged.extend(flags);
    let given: Vec<String> =
        merged.keys().filter_map(|key| key.as_str().map(String::from)).collect();
    let settings: Settings = serde_yaml_ng::from_value(Value::Mapping(merged)).map_err(usage)?;
    settings.complete(&given)
}

/// The keys of a file, each under this program's name.
struct Canonical {
    map: Mapping,
    /// Under which name each came.
    origins: Vec<(String, String)>,
}

impl Canonical {
    fn insert(&mut self, key: &str, written: &str, value: Value) -> Result<(), String> {
        let conflicts = |other: &str| {
            other == key
                || GROUPS.iter().any(|group| group.contains(&key) && group.contains(&other))
        };
        if let Some((_, other)) = self.origins.iter().find(|(other, _)| conflicts(other)) {
            return Err(format!("`{other}` and `{written}` say the same thing; keep one of them"));
        }
        let one = Mapping::from_iter([(Value::from(key), value.clone())]);
        if let Err(error) = serde_yaml_ng::from_value::<Settings>(Value::Mapping(one)) {
            let error = error.to_string();
            let error = error.strip_prefix(&format!("{key}: ")).unwrap_or(&error);
            return Err(format!("{written}: {error}"));
        }
        self.origins.push((key.into(), written.into()));
        self.map.insert(key.into(), value);
        Ok(())
    }
}

fn canonical(map: Mapping) -> Result<Mapping, String> {
    let known = known_keys();
    let mut canonical = Canonical { map: Mapping::new(), origins: Vec::new() };
    for (key, value) in map {
        let Some(key) = key.as_str() else {
            return Err(format!("expected keys that are words, found {}", kind(&key)));
        };
        let alias = ALIASES.iter().find(|(alias, _)| *alias == key).map(|(_, name)| *name);
        if OTHERS.contains(&key) {
            if !value.is_null() {
                special(&mut canonical, key, value)?;
            }
        } else if let Some(name) = alias.or(known.iter().find(|name| *name == key).map(|_| key)) {
            // transformers writes -1 for "go by epochs".
            let unset = value.is_null() || (key == "max_steps" && value.as_i64() == Some(-1));
            if !unset {
                canonical.insert(name, key, value)?;
            }
        } else {
            let names = known
                .iter()
                .map(String::as_str)
                .chain(ALIASES.iter().map(|(alias, _)| *alias))
                .chain(OTHERS.iter().copied());
            return Err(format!("unknown key `{key}`{}", suggestion(key, names)));
        }
    }
    Ok(canonical.map)
}

/// The names of all settings.
fn known_keys() -> Vec<String> {
    match serde_yaml_ng::to_value(Settings::default()) {
        Ok(Value::Mapping(map)) => {
            map.keys().filter_map(|key| key.as_str().map(String::from)).collect()
        }
        _ => Vec::new(),
    }
}

/// A key whose value decides about other settings.
fn special(canonical: &mut Canonical, key: &str, value: Value) -> Result<(), String> {
    let found = || serde_yaml_ng::to_string(&value).unwrap_or_default().trim().to_string();
    let wrong = |expected: &str| format!("{key}: is {}, expected {expected}", found());
    match key {
        "lora_parameters" => {
            let Value::Mapping(parameters) = value else {
                return Err(wrong("a mapping with rank, scale, dropout and keys"));
            };
            for (inner, value) in parameters {
                let inner = inner.as_str().unwrap_or_default();
                let name = match inner {
                    "keys" => "target_modules",
                    "rank" | "scale" | "dropout" | "alpha" => inner,
                    _ => {
                        return Err(format!(
                            "unknown key `{inner}` in lora_parameters{}",
                            suggestion(
                                inner,
                                ["rank", "scale", "dropout", "keys", "alpha"].into_iter()
                            )
                        ));
                    }
                };
                if !value.is_null() {
                    canonical.insert(name, &format!("lora_parameters.{inner}"), value)?;
                }
            }
        }
        "optimizer" | "optim" => match value.as_str() {
            Some("adamw" | "adamw_torch" | "adamw_torch_fused") => {}
            _ => return Err(format!("{key}: {} is not supported; adamw is", found())),
        },
        "optimizer_config" => optimizer_config(canonical, value)?,
        "mask_prompt" => {
            let mask = value.as_bool().ok_or_else(|| wrong("true or false"))?;
            canonical.insert("loss_on", key, if mask { "assistant" } else { "all" }.into())?;
        }
        "report_to" | "wandb" | "project_name" => match &value {
            Value::String(text) if key == "report_to" && text == "none" => {
                canonical.insert("tensorboard", key, false.into())?;
            }
            Value::String(text) if key == "report_to" && text == "tensorboard" => {
                canonical.insert("tensorboard", key, true.into())?;
            }
            _ => {
                return Err(format!(
                    "{key}: {} is not supported; every run writes metrics.jsonl and event files for \
                     TensorBoard (report_to: tensorboard)",
                    found()
                ));
            }
        },
        "train" if value.as_bool() != Some(true) => {
            return Err(wrong("true; to measure only, use `metal-candle evaluate`"));
        }
        "training_mode" if value.as_str() != Some("normal") => {
            return Err(format!("training_mode: {} is not supported; normal is", found()));
        }
        "use_dora" if value.as_bool() != Some(false) => {
            return Err("use_dora: DoRA is not supported; LoRA is".into());
        }
        "bias" if value.as_str() != Some("none") => {
            return Err(format!("bias: {} is not supported; none is", found()));
        }
        "task_type" if value.as_str() != Some("CAUSAL_LM") => {
            return Err(format!("task_type: {} is not supported; CAUSAL_LM is", found()));
        }
        "peft_type" if value.as_str() != Some("LORA") => {
            return Err(format!("peft_type: {} is not supported; LORA is", found()));
        }
        _ => {}
    }
    Ok(())
}

/// mlx-lm's options of its optimisers.
fn optimizer_config(canonical: &mut Canonical, value: Value) -> Result<(), String> {
    let Value::Mapping(optimizers) = value else {
        return Err(format!(
            "optimizer_config: is {}, expected a mapping such as adamw: {{weight_decay: 0.01}}",
            kind(&value)
        ));
    };
    for (optimizer, options) in optimizers {
        let optimizer = optimizer.as_str().unwrap_or_default();
        let options = match options {
            Value::Mapping(options) => options,
            Value::Null => Mapping::new(),
            other => {
                return Err(format!(
                    "optimizer_config.{optimizer}: is {}, expected a mapping",
                    kind(&other)
                ));
            }
        };
        // mlx-lm reads only those of the optimiser that it uses.
        if optimizer != "adamw" {
            if options.is_empty() {
                continue;
            }
            return Err(format!(
                "optimizer_config.{optimizer}: {optimizer} is not supported; adamw is"
            ));
        }
        for (key, value) in options {
            let key = key.as_str().unwrap_or_default();
            let written = format!("optimizer_config.adamw.{key}");
            match (key, &value) {
                ("weight_decay", _) => canonical.insert("weight_decay", &written, value)?,
                ("eps", _) => canonical.insert("epsilon", &written, value)?,
                ("betas", Value::Sequence(betas)) if betas.len() == 2 => {
                    for (name, beta) in ["beta1", "beta2"].into_iter().zip(betas) {
                        canonical.insert(name, &written, beta.clone())?;
                    }
                }
                ("betas", _) => return Err(format!("{written}: expected two numbers")),
                ("bias_correction", Value::Bool(true)) => {}
                ("bias_correction", _) => {
                    return Err(format!("{written}: only true is supported"));
                }
                _ => {
                    return Err(format!(
                        "unknown key `{written}`{}",
                        suggestion(
                            key,
                            ["weight_decay", "eps", "betas", "bias_correction"].into_iter()
                        )
                    ));
                }
            }
        }
    }
    Ok(())
}

/// What a value is, for messages.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "nothing",
        Value::Bool(_) => "true or false",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Sequence(_) => "a list",
        Value::Mapping(_) => "a mapping",
        Value::Tagged(_) => "a tagged value",
    }
}

/// `; did you mean ...?` with the names that are close to `key`.
fn suggestion<'a>(key: &str, names: impl Iterator<Item = &'a str>) -> String {
    let mut close: Vec<(usize, &str)> = names
        .filter_map(|name| {
            let distance = edits(key, name);
            let related =
                name.len() >= 4 && key.len() >= 4 && (name.contains(key) || key.contains(name));
            (distance <= 1 + key.len() / 4 || related).then_some((distance, name))
        })
        .collect();
    close.sort_unstable();
    close.dedup();
    let close: Vec<String> = close.iter().take(4).map(|(_, name)| format!("`{name}`")).collect();
    if close.is_empty() {
        "; `metal-candle train --help` lists the flags, whose names are the keys".into()
    } else {
        format!("; did you mean {}?", close.join(" or "))
    }
}

/// How many letters are to be inserted, removed or changed to make one word of the other.
fn edits(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut above_left = i;
        let mut left = i + 1;
        for (cell, y) in row.iter_mut().skip(1).zip(&b) {
            let best = (above_left + usize::from(x != *y)).min(*cell + 1).min(left + 1);
            above_left = std::mem::replace(cell, best);
            left = best;
        }
        if let Some(first) = row.first_mut() {
            *first = i + 1;
        }
    }
    row.last().copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(yaml: &str) -> Result<Settings, String> {
        let Value::Mapping(map) = serde_yaml_ng::from_str(yaml).unwrap() else { panic!("{yaml}") };
        let mut map = canonical(map)?;
        for key in ["model", "data"] {
            map.entry(key.into()).or_insert("x".into());
        }
        merge(map, Mapping::new()).map_err(|error| error.to_string())
    }

    #[test]
    fn words_of_mlx_peft_and_transformers_mean_the_same() {
        let own =
            parse("rank: 4\nalpha: 8\ndropout: 0.1\nsteps: 10\nbatch_size: 2\nschedule: linear")
                .unwrap();
        let peft = "r: 4\nlora_alpha: 8\nlora_dropout: 0.1\nmax_steps: 10\n\
                    per_device_train_batch_size: 2\nlr_scheduler_type: linear";
        assert_eq!(parse(peft).unwrap(), own);
        let mlx = "lora_parameters: {rank: 4, scale: 2.0, dropout: 0.1}\niters: 10\nbatch_size: 2\nschedule: linear";
        assert_eq!(parse(mlx).unwrap(), own);
        assert_eq!(parse(&own.to_yaml().unwrap()).unwrap(), own);
    }

    #[test]
    fn every_flag_is_a_key() {
        let flags = serde_yaml_ng::to_value(crate::commands::train::Flags::default()).unwrap();
        let known = known_keys();
        for key in flags.as_mapping().unwrap().keys() {
            assert!(known.iter().any(|name| Some(name.as_str()) == key.as_str()), "{key:?}");
        }
    }

    #[test]
    fn aliases_lead_to_settings() {
        let known = known_keys();
        for (alias, name) in ALIASES {
            assert!(known.iter().any(|known| known == name), "{alias} -> {name}");
            assert!(!known.iter().any(|known| known == alias), "{alias}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (yaml, expected) in [
            ("r: 4\nrank: 8", "`r` and `rank` say the same thing"),
            ("iters: 4\nnum_train_epochs: 1", "`iters` and `num_train_epochs` say the same thing"),
            ("lora_parameters: {rank: 4}\nrank: 4", "`lora_parameters.rank` and `rank`"),
            ("learning_rat: 1", "unknown key `learning_rat`; did you mean `learning_rate`"),
            ("batch_size: many", "batch_size: invalid type"),
            ("steps_per_report: -1", "steps_per_report: invalid value"),
            ("optimizer: adam", "optimizer: adam is not supported; adamw is"),
            ("fine_tune_type: dora", "fine_tune_type: unknown variant `dora`"),
            ("wandb: project", "wandb: project is not supported"),
            (
                "lr_schedule: {name: cosine_decay, arguments: [1, 2]}\nschedule: linear",
                "`lr_schedule` and `schedule`",
            ),
            ("rank: 0", "rank: is 0"),
            ("learning_rate: .nan", "learning_rate"),
            ("num_layers: 0", "num_layers: is 0"),
        ] {
            let error = parse(yaml).unwrap_err();
            assert!(error.contains(expected), "{yaml}: {error}");
        }
    }

    #[test]
    fn flags_take_the_place_of_what_says_the_same() {
        let Value::Mapping(file) = serde_yaml_ng::from_str(
            "{model: x, data: y, epochs: 3, lr_schedule: {name: cosine_decay, arguments: [1.0e-3, 10]}}",
        )
        .unwrap() else {
            panic!()
        };
        let flags =
            Mapping::from_iter([("steps".into(), 5.into()), ("learning_rate".into(), 2e-3.into())]);
        let settings = merge(file, flags).unwrap();
        assert_eq!((settings.steps, settings.epochs), (Some(5), None));
        assert_eq!(settings.learning_rate(5).unwrap().peak(), 2e-3);
    }

    #[test]
    fn a_masked_prompt_leaves_the_loss_on_the_assistant() {
        use crate::settings::Loss;
        assert_eq!(parse("mask_prompt: true").unwrap().loss_on, Loss::Assistant);
        assert_eq!(parse("mask_prompt: false").unwrap().loss_on, Loss::All);
        assert_eq!(parse("mask_prompt: null").unwrap().loss_on, Loss::Auto);
    }

    #[test]
    fn edits_are_counted() {
        assert_eq!(edits("kitten", "sitting"), 3);
        assert_eq!(edits("", "abc"), 3);
        assert_eq!(edits("abc", "abc"), 0);
    }
}
