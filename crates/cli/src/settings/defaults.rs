//! What the help of a flag says of its default, which is the setting's.

use super::optimizer::{OPTIONS, OptimizerName};
use super::{FineTuneType, Settings};
use clap::{Arg, ValueEnum};
use metal_candle::train::{Duration, Warmup};
use serde_yaml_ng::{Mapping, Value};
use std::collections::BTreeMap;

/// Adds to a flag's help the default of the setting it has the name of. Nothing is said of what is off, empty, or
/// follows from the model and the machine.
pub fn told() -> impl FnMut(Arg) -> Arg {
    let defaults = defaults();
    move |flag| match defaults.get(flag.get_id().as_str()) {
        Some(default) => {
            let help = flag.get_help().map(ToString::to_string).unwrap_or_default();
            flag.help(format!("{help} [default: {default}]"))
        }
        None => flag,
    }
}

/// What is said, by keys.
fn defaults() -> BTreeMap<String, String> {
    let mut settings = Settings::default();
    // What is only known when all is put together.
    if let Duration::Epochs(epochs) = Duration::default() {
        settings.epochs = Some(epochs);
    }
    if let Warmup::Ratio(ratio) = Warmup::default() {
        settings.warmup_ratio = Some(ratio);
    }
    let written = match serde_yaml_ng::to_value(&settings) {
        Ok(Value::Mapping(written)) => written,
        _ => Mapping::new(),
    };
    let mut defaults: BTreeMap<String, String> = written
        .iter()
        .filter(|(_, value)| **value != Value::Bool(false))
        .filter_map(|(key, value)| Some((key.as_str()?.to_string(), word(value)?)))
        .collect();
    for key in ["learning_rate"].iter().chain(OPTIONS) {
        defaults.insert((*key).into(), of_optimizers(key));
    }
    defaults
}

/// A default that each optimiser has, as `adam, adamw 2e-4; sgd 0.1`, or as `true` where all have the same.
fn of_optimizers(key: &str) -> String {
    let mut values: Vec<(String, Vec<String>)> = Vec::new();
    for name in OptimizerName::value_variants() {
        let optimizer = name.optimizer();
        let value = match key {
            "learning_rate" => {
                let every_weight = Settings::default().fine_tune_type == FineTuneType::Full;
                Some(number(optimizer.default_learning_rate(every_weight)))
            }
            _ => name.defaults().ok().and_then(|options| word(options.get(key)?)),
        };
        let Some(value) = value else { continue };
        match values.iter_mut().find(|(known, _)| *known == value) {
            Some((_, names)) => names.push(optimizer.name().into()),
            None => values.push((value, vec![optimizer.name().into()])),
        }
    }
    match values.as_slice() {
        [(value, _)] => value.clone(),
        _ => {
            let each: Vec<String> = values
                .iter()
                .map(|(value, names)| format!("{} {value}", names.join(", ")))
                .collect();
            each.join("; ")
        }
    }
}

/// A value that is one word or number.
fn word(value: &Value) -> Option<String> {
    match value {
        Value::Bool(on) => Some(on.to_string()),
        Value::String(text) => Some(text.clone()),
        Value::Number(value) if value.is_f64() => value.as_f64().map(number),
        Value::Number(value) => Some(value.to_string()),
        _ => None,
    }
}

fn number(value: f64) -> String {
    if value != 0.0 && value.abs() < 0.01 { format!("{value:e}") } else { value.to_string() }
}

#[cfg(test)]
mod tests {
    use crate::commands::train::Flags;
    use clap::{Args, Command};

    #[test]
    fn help_tells_each_default_once() {
        let command = Flags::augment_args(Command::new("train"));
        let help = |id: &str| {
            let flag = command.get_arguments().find(|flag| flag.get_id() == id).unwrap();
            flag.get_help().unwrap().to_string()
        };
        for (flag, expected) in [
            ("rank", "The rank r of the update [default: 16]"),
            ("dropout", " [default: 0]"),
            ("epochs", " [default: 1]"),
            ("warmup_ratio", " [default: 0.03]"),
            ("target_modules", " [default: all-linear]"),
            ("schedule", " [default: cosine]"),
            ("eval_batches", " [default: -1]"),
            ("output", " [default: adapters]"),
            (
                "learning_rate",
                " [default: adam, adamw, adamw8bit 2e-4; sgd 0.1; lion 2e-5; adafactor, muon 1e-3]",
            ),
            ("beta1", " [default: 0.9]"),
            ("epsilon", " [default: adam, adamw, adamw8bit 1e-8; adafactor 1e-30]"),
            ("nesterov", " [default: sgd false; muon true]"),
        ] {
            assert!(help(flag).ends_with(expected), "{}", help(flag));
        }
        assert!(!help("packing").contains("default"), "{}", help("packing"));
        for flag in command.get_arguments() {
            let help = flag.get_help().unwrap().to_string();
            assert!(help.matches("[default:").count() < 2, "{help}");
        }
    }
}
