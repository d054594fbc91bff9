//! The keys of a file, or of the flags, each under this program's name and with a value of its kind.

use super::words::{self, Meaning, SCHEDULERS, WORDS};
use super::{Settings, data};
use clap::{Arg, Args, Command};
use metal_candle::adapter::{Biases, StartFrom};
use metal_candle::engine::CacheDtype;
use serde_yaml_ng::{Mapping, Value};

/// Keys that say the same thing in different ways. A flag of a group takes the place of all of
/// them in the file.
pub const GROUPS: &[&[&str]] = &[
    &["epochs", "steps"],
    &["warmup_ratio", "warmup_steps"],
    &["alpha", "scale"],
    &["layers", "num_layers"],
    &["schedule", "lr_schedule"],
    &["warmup_ratio", "lr_schedule"],
    &["warmup_steps", "lr_schedule"],
    &["min_learning_rate", "lr_schedule"],
];

/// Whether two keys say the same thing.
pub fn same(a: &str, b: &str) -> bool {
    a == b || GROUPS.iter().any(|group| group.contains(&a) && group.contains(&b))
}

/// How keys are written.
#[derive(Debug, Clone, Copy)]
pub enum Style {
    /// As in a file.
    File,
    /// As flags, with `--` and hyphens.
    Flags,
}

impl Style {
    fn write(self, key: &str) -> String {
        match self {
            Self::File => key.into(),
            Self::Flags => format!("--{}", key.replace('_', "-")),
        }
    }
}

/// This program's name of each key, and the one under which it came.
#[derive(Debug, Default)]
pub struct Origins(Vec<(String, String)>);

impl Origins {
    /// How a setting was written, if it was.
    pub fn of(&self, key: &str) -> Option<&str> {
        self.0.iter().find(|(name, _)| name == key).map(|(_, written)| written.as_str())
    }
}

/// Settings that were written down.
#[derive(Debug, Default)]
pub struct Keys {
    map: Mapping,
    origins: Origins,
    /// The optimiser that is named, if one is.
    optimizer: Option<String>,
    /// Whether PEFT's switch for DoRA is on, which beside LoRA says which kind it is.
    pub(super) has_dora: bool,
    /// How it is written that there is an adapter, whose kind may be said elsewhere.
    pub(super) peft: Option<String>,
}

impl Keys {
    /// The settings that a mapping holds, in this program's words or other programs'.
    pub fn read(mapping: &Mapping, style: Style) -> Result<Self, String> {
        let known = known();
        let named = mapping.get("optimizer").or(mapping.get("optim")).and_then(Value::as_str);
        let mut keys = Self {
            optimizer: named.map(String::from),
            has_dora: has_dora(mapping),
            ..Self::default()
        };
        let mut written = Vec::with_capacity(mapping.len());
        for (key, value) in mapping {
            let Some(key) = key.as_str() else {
                return Err(format!("expected keys that are words, found {}", kind(key)));
            };
            if !value.is_null() && !is_overruled(key, value, mapping) {
                written.push((key, value));
            }
        }
        let is_known = |key: &str| {
            words::meaning(key).is_some() || known.iter().any(|name| name.as_str() == key)
        };
        let unknown: Vec<&str> =
            written.iter().map(|(key, _)| *key).filter(|key| !is_known(key)).collect();
        if !unknown.is_empty() {
            return Err(unknown_keys(&unknown, &known));
        }
        for (key, value) in written {
            let name = style.write(key);
            match words::meaning(key) {
                Some(meaning) => words::apply(meaning, &mut keys, &name, value)?,
                None => keys.insert(key, &name, value.clone())?,
            }
        }
        if let (Some(peft), Some(origin)) = (&keys.peft, keys.origins.of("fine_tune_type"))
            && is_full(&keys.map)
        {
            return Err(format!("`{origin}` and `{peft}` contradict each other; keep one of them"));
        }
        // transformers gives bitsandbytes' Lion the betas of its Adam. It isn't written, so it has no origin.
        let is_lion = |word: &&str| matches!(*word, "lion_32bit" | "paged_lion_32bit");
        if keys.map.get("optimizer").and_then(Value::as_str).filter(is_lion).is_some()
            && !keys.map.contains_key("beta2")
        {
            keys.map.insert("beta2".into(), 0.999.into());
        }
        Ok(keys)
    }

    /// Adds a setting that came under the name `written`.
    pub fn insert(&mut self, key: &str, written: &str, value: Value) -> Result<(), String> {
        if value.is_null() {
            return Ok(());
        }
        if key == "data" {
            data::check(written, &value)?;
        }
        // One layer, or one prompt, needs no list.
        let value = match (key, value) {
            ("layers", one @ Value::Number(_)) | ("sample_prompt", one @ Value::String(_)) => {
                Value::Sequence(vec![one])
            }
            (_, value) => value,
        };
        let Some(setting) = parsed(key, &value) else {
            return Err(format!("{written}: is {}, expected {}", shown(&value), expected(key)));
        };
        if let Some((name, other)) = self.origins.0.iter().find(|(name, _)| same(name, key)) {
            // Said twice is no contradiction.
            if name == key
                && self.map.get(key).and_then(|value| parsed(key, value)) == Some(setting)
            {
                return Ok(());
            }
            return Err(format!("`{other}` and `{written}` say the same thing; keep one of them"));
        }
        self.origins.0.push((key.into(), written.into()));
        self.map.insert(key.into(), value);
        Ok(())
    }

    /// The optimiser whose options hold; where none is named, that of mlx-lm.
    pub fn optimizer(&self) -> &str {
        self.optimizer.as_deref().unwrap_or("adam")
    }

    /// The settings by this program's names, and how they were written.
    pub fn into_parts(self) -> (Mapping, Origins) {
        (self.map, self.origins)
    }
}

/// Whether these settings say that every weight is trained.
pub fn is_full(map: &Mapping) -> bool {
    map.get("fine_tune_type").and_then(Value::as_str) == Some("full")
}

/// Whether two values are the same setting, as 0 and 0.0 are.
pub fn is_same(a: &Value, b: &Value) -> bool {
    a == b || (a.is_number() && a.as_f64() == b.as_f64())
}

/// PEFT's and axolotl's switch for DoRA, which is off unless it is on.
fn has_dora(mapping: &Mapping) -> bool {
    ["use_dora", "peft_use_dora"].into_iter().any(|word| is_on(word, mapping))
}

fn is_on(word: &str, mapping: &Mapping) -> bool {
    mapping.get(word).and_then(Value::as_bool) == Some(true)
}

/// Whether another key keeps this one from meaning anything, in transformers and TRL: of two warm-ups the one that is 0,
/// any beside their constant schedule, LoRA's dropout where all is switched off, a kind of loss that is off where
/// another key says which tokens count, epochs beside a number of steps, and a dtype that is found out beside one that is
/// named. In LLaMA-Factory DPO's stage is that of other preferences, too, and DoRA a kind of LoRA.
fn is_overruled(key: &str, value: &Value, mapping: &Mapping) -> bool {
    let is_on = |word: &str| is_on(word, mapping);
    let is_off = value.as_bool() == Some(false);
    let is = |text: &str| value.as_str() == Some(text);
    let other = match key {
        "warmup_steps" => "warmup_ratio",
        "warmup_ratio" => "warmup_steps",
        "dropout" | "lora_dropout" => return is_on("disable_dropout"),
        "completion_only_loss" => return is_off && is_on("assistant_only_loss"),
        "assistant_only_loss" => {
            let said = |key| mapping.get(key).filter(|value| !value.is_null());
            let contradicts = |loss: &Value| loss.as_str() == Some("assistant");
            let is_said = said("loss_on").is_some_and(|loss| !contradicts(loss));
            return is_off && (is_said || said("completion_only_loss").is_some());
        }
        "num_train_epochs" | "num_epochs" => {
            return mapping.get("max_steps").and_then(Value::as_i64).is_some_and(|steps| steps > 0);
        }
        "dtype" | "torch_dtype" => return is("auto") && (is_on("bf16") || is_on("fp16")),
        "stage" => {
            let loss = mapping.get("pref_loss").and_then(Value::as_str);
            return is("dpo") && matches!(loss, Some("orpo" | "simpo"));
        }
        "fine_tune_type" | "finetuning_type" => return is("lora") && has_dora(mapping),
        _ => return false,
    };
    let is_constant = |word: &&str| mapping.get(*word).and_then(Value::as_str) == Some("constant");
    let other = mapping.get(other).and_then(Value::as_f64);
    // Of two that are 0 one is as good as the other.
    let is_second = key == "warmup_ratio" && other == Some(0.0);
    value.as_f64() == Some(0.0) && other.is_some_and(|other| other != 0.0 || is_second)
        || SCHEDULERS.iter().any(is_constant)
}

/// The settings of which one key is given; `None` if its value is of another kind.
fn parsed(key: &str, value: &Value) -> Option<Settings> {
    let one = Mapping::from_iter([(Value::from(key), value.clone())]);
    serde_yaml_ng::from_value(Value::Mapping(one)).ok()
}

/// The names of all settings.
pub fn known() -> Vec<String> {
    match serde_yaml_ng::to_value(Settings::default()) {
        Ok(Value::Mapping(map)) => {
            map.keys().filter_map(|key| key.as_str().map(String::from)).collect()
        }
        _ => Vec::new(),
    }
}

/// The flag of a key.
fn flag(key: &str) -> Option<Arg> {
    let command = crate::commands::train::Flags::augment_args(Command::new("train"));
    command.get_arguments().find(|flag| flag.get_id() == key).cloned()
}

/// Whether a key stands in files alone.
pub fn has_no_flag(key: &str) -> bool {
    known().iter().any(|known| known == key) && flag(key).is_none()
}

/// What the value of a key has to be, as its flag says it.
fn expected(key: &str) -> String {
    let Some(flag) = flag(key) else {
        return of_kind(match key {
            "scale" => "X",
            "ns_steps" => "N",
            "adamw_share" | "scale_epsilon" | "clip_threshold" | "decay_rate" => "X",
            "scale_parameter" | "relative_step" | "warmup_init" => "BOOL",
            "epoch_ends" | "tensorboard" | "plot" => "BOOL",
            "lr_schedule" => "SCHEDULE",
            _ => "TEXT",
        });
    };
    let words: Vec<String> =
        flag.get_possible_values().iter().map(|value| value.get_name().to_string()).collect();
    let kind = flag.get_value_names().and_then(|names| names.first()).map(ToString::to_string);
    match (words.as_slice(), kind.as_deref()) {
        ([], Some(kind)) => of_kind(kind),
        (_, Some("BOOL")) => of_kind("BOOL"),
        (words, _) => format!("one of {}", words.join(", ")),
    }
}

/// What help texts abbreviate.
pub fn of_kind(value_name: &str) -> String {
    match value_name {
        "N" | "K" => "a whole number",
        "SECONDS" => "a whole number of seconds",
        "MB" => "a whole number of megabytes",
        "DTYPE" => return format!("one of {}", CacheDtype::ALL.map(CacheDtype::name).join(", ")),
        "X" | "P" => "a number",
        "BOOL" => "true or false",
        "N,N.." => "whole numbers in a list",
        "NAME=N,.." => "names, each with a whole number",
        "NAME=X,.." => "names, each with a number",
        "ID=X" => "a token's id, = and a number",
        "ID,.." => "ids of tokens in a list, or a mapping of such lists",
        "NAME,.." => "names in a list",
        "START" => StartFrom::WORDS,
        "WHICH" => Biases::WORDS,
        "JSON" => "a JSON object such as {\"enable_thinking\": false}",
        "NAMES|REGEX" => "names in a list, a regular expression, or all-linear",
        "SCHEDULE" => "a mapping with name and arguments, as mlx-lm has it",
        _ => "a text",
    }
    .into()
}

/// What a value is, for messages.
pub fn kind(value: &Value) -> &'static str {
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

/// A value in a message, as YAML has it, in one line of a readable length.
pub fn shown(value: &Value) -> String {
    let text = match value {
        Value::Null => "nothing".to_string(),
        Value::Bool(on) => on.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) if text.is_empty() => "an empty text".into(),
        Value::String(text) if is_quoted(text) => format!("\"{text}\""),
        Value::String(text) => text.clone(),
        Value::Sequence(list) => {
            // No more than what is shown is put together.
            let items: Vec<String> = list.iter().take(20).map(shown).collect();
            format!("[{}{}]", items.join(", "), if list.len() > 20 { ", …" } else { "" })
        }
        Value::Mapping(map) => {
            let pairs: Vec<String> = map
                .iter()
                .take(20)
                .map(|(key, value)| format!("{}: {}", shown(key), shown(value)))
                .collect();
            format!("{{{}}}", pairs.join(", "))
        }
        Value::Tagged(tagged) => shown(&tagged.value),
    };
    cut(&text)
}

/// Whether a text would be something else without quotes around it.
fn is_quoted(text: &str) -> bool {
    let value = Some(text).filter(|text| text.len() <= 24).map(serde_yaml_ng::from_str);
    matches!(value, Some(Ok(Value::Null | Value::Bool(_) | Value::Number(_))))
}

/// The beginning of a text, at a readable length.
pub fn cut(text: &str) -> String {
    const MOST: usize = 60;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.into(),
    }
}

const HELP: &str = "; `metal-candle train --help` lists the flags, whose names are the keys";

/// That there are no such keys, with those that may be meant.
fn unknown_keys(unknown: &[&str], known: &[String]) -> String {
    const MOST: usize = 20;
    let words = WORDS.iter().filter(|(_, meaning)| !matches!(meaning, Meaning::Instead(_)));
    let names = || known.iter().map(String::as_str).chain(words.clone().map(|(word, _)| *word));
    if let [key] = unknown {
        return format!("unknown key `{}`{}", cut(key), suggestion(key, names()));
    }
    let each = unknown.iter().take(MOST).map(|key| match closest(key, names()).first() {
        Some(close) => format!("`{}` (did you mean {close}?)", cut(key)),
        None => format!("`{}`", cut(key)),
    });
    let more = if unknown.len() > MOST { ", …" } else { "" };
    format!("unknown keys {}{more}{HELP}", each.collect::<Vec<_>>().join(", "))
}

/// `; did you mean ...?` with the names that are close to `key`.
pub fn suggestion<'a>(key: &str, names: impl Iterator<Item = &'a str>) -> String {
    match closest(key, names) {
        close if close.is_empty() => HELP.into(),
        close => format!("; did you mean {}?", close.join(" or ")),
    }
}

/// The names that are close to `key`, the closest first, in quotes.
fn closest<'a>(key: &str, names: impl Iterator<Item = &'a str>) -> Vec<String> {
    // What is much longer than a word is none that was mistyped.
    let is_word = key.len() <= 64;
    let mut close: Vec<(usize, &str)> = names
        .filter_map(|name| {
            let distance = if is_word { strsim::levenshtein(key, name) } else { usize::MAX };
            let related =
                name.len() >= 4 && key.len() >= 4 && (name.contains(key) || key.contains(name));
            (distance <= 1 + key.len() / 4 || related).then_some((distance, name))
        })
        .collect();
    close.sort_unstable();
    close.dedup();
    close.iter().take(4).map(|(_, name)| format!("`{name}`")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shown_at_a_readable_length() {
        let value: Value = serde_yaml_ng::from_str("{a: [1, x, null], b: ''}").unwrap();
        assert_eq!(shown(&value), "{a: [1, x, nothing], b: an empty text}");
        for text in ["1e-4", "3", "true", "null"] {
            assert_eq!(shown(&Value::from(text)), format!("\"{text}\""));
        }
        let long = Value::Sequence(vec![Value::from(1); 100_000]);
        assert_eq!(shown(&long).chars().count(), 61);
    }

    #[test]
    fn all_unknown_keys_are_told_at_once() {
        let read = |yaml: &str| {
            Keys::read(&serde_yaml_ng::from_str(yaml).unwrap(), Style::File).unwrap_err()
        };
        let error = read("{zzzz: 1, rank: 4, learning_rat: 1, unset: null}");
        let expected = "unknown keys `zzzz`, `learning_rat` (did you mean `learning_rate`?); ";
        assert!(error.starts_with(expected), "{error}");
        assert!(read("zzzz: 1").starts_with("unknown key `zzzz`; "));
        let many: Vec<String> = (0..1000).map(|index| format!("zzzz{index}: 1")).collect();
        assert!(read(&many.join("\n")).chars().count() < 400);
    }

    #[test]
    fn what_help_texts_abbreviate_is_told_in_words() {
        for (name, expected) in [
            ("K", "a whole number"),
            ("SECONDS", "a whole number of seconds"),
            ("MB", "a whole number of megabytes"),
            ("DTYPE", "one of model, mxint8"),
            ("TEXT", "a text"),
        ] {
            assert_eq!(of_kind(name), expected);
        }
    }

    #[test]
    fn some_keys_stand_in_files_alone() {
        assert!(has_no_flag("decay_rate") && has_no_flag("lr_schedule"));
        assert!(!has_no_flag("rank") && !has_no_flag("zzzz"));
    }
}
