//! Other programs' words for where data come from, as the sources that they mean here.

use super::data::{KEYS, check};
use super::keys::{Keys, cut, shown, suggestion};
use serde_yaml_ng::{Mapping, Value};
use std::path::Path;

/// What a key of a source is called elsewhere, and here.
type Names = &'static [(&'static str, &'static str)];

/// mlx-lm's `hf_dataset`: a data set of the hub, or several. Where no split is named, `mlx_lm` takes these.
pub fn hf_dataset(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    const NAMES: Names = &[
        ("path", "path"),
        ("name", "path"),
        ("prompt_feature", "prompt_column"),
        ("completion_feature", "completion_column"),
        ("text_feature", "text_column"),
        ("chat_feature", "messages_column"),
        ("train_split", "split"),
        ("valid_split", "valid_split"),
        ("test_split", "test_split"),
    ];
    let sources = each(name, value, |name, written| {
        let mut source = Mapping::new();
        for (key, value) in written {
            let key = key.as_str().unwrap_or_default();
            match (key, value) {
                (_, Value::Null) => {}
                // It has the settings' own, as every source here.
                ("mask_prompt", _) => {
                    return Err(format!("{name}.mask_prompt: stands beside hf_dataset, not in it"));
                }
                ("config", Value::Mapping(config)) => {
                    for (key, value) in config {
                        let own = match key.as_str().unwrap_or_default() {
                            "name" => "config",
                            "revision" => "revision",
                            other => {
                                return Err(format!(
                                    "{name}.config.{other}: is not supported; name and revision are"
                                ));
                            }
                        };
                        put(&mut source, own, &format!("{name}.config"), value)?;
                    }
                }
                ("config", Value::String(_)) => put(&mut source, "config", name, value)?,
                _ => put(&mut source, own(name, key, NAMES)?, name, value)?,
            }
        }
        if let Some(Value::String(path)) = source.get("path")
            && Path::new(path).exists()
        {
            return Err(format!(
                "{name}.path: {} is on this machine, expected the id of a data set of the hub; give what is here as `data`",
                cut(path)
            ));
        }
        for (key, default) in [("split", "train[:80%]"), ("valid_split", "train[-10%:]")] {
            if !source.contains_key(key) {
                source.insert(key.into(), default.into());
            }
        }
        Ok(source)
    })?;
    insert(keys, name, sources)
}

/// axolotl's `datasets`: files and data sets of the hub, one after the other.
pub fn datasets(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    const NAMES: Names = &[
        ("path", "path"),
        ("name", "config"),
        ("split", "split"),
        ("revision", "revision"),
        ("field", "text_column"),
        ("field_messages", "messages_column"),
    ];
    let sources = each(name, value, |name, written| {
        let mut source = Mapping::new();
        for (key, value) in written {
            match (key.as_str().unwrap_or_default(), value) {
                (_, Value::Null) | ("ds_type", _) => {}
                ("message_property_mappings", Value::Mapping(names))
                    if names.iter().all(|(theirs, ours)| theirs == ours) || is_share_gpt(names) => {
                }
                // What is learned here, too.
                ("roles_to_train", Value::Sequence(roles))
                    if roles.iter().all(|role| role.as_str() == Some("assistant")) => {}
                ("train_on_eos", Value::String(when)) if when == "turn" => {}
                ("message_field_role", Value::String(key))
                    if matches!(key.as_str(), "role" | "from") => {}
                ("message_field_content", Value::String(key))
                    if matches!(key.as_str(), "content" | "value") => {}
                ("message_property_mappings", _) => {
                    return Err(format!(
                        "{name}.message_property_mappings: is {}; messages have a role and a content, or ShareGPT's from \
                         and value",
                        shown(value)
                    ));
                }
                ("type", Value::String(kind))
                    if kind == "chat_template" || kind == "completion" => {}
                ("type", _) => {
                    return Err(format!(
                        "{name}.type: is {}, expected chat_template or completion; records are known by their keys \
                         here, and go through the model's chat template",
                        shown(value)
                    ));
                }
                (key, _) => put(&mut source, own(name, key, NAMES)?, name, value)?,
            }
        }
        // Whole texts, whatever else the records have.
        if written.get("type").and_then(Value::as_str) == Some("completion") {
            source.entry("text_column".into()).or_insert("text".into());
        }
        Ok(source)
    })?;
    insert(keys, name, sources)
}

/// Whether the keys of messages are those of ShareGPT's, which are known.
fn is_share_gpt(names: &Mapping) -> bool {
    names.iter().all(|(ours, theirs)| {
        matches!(
            (ours.as_str(), theirs.as_str()),
            (Some("role"), Some("from")) | (Some("content"), Some("value"))
        )
    })
}

/// The sources of a mapping, or of a list of them.
fn each(
    name: &str,
    value: &Value,
    source: impl Fn(&str, &Mapping) -> Result<Mapping, String>,
) -> Result<Vec<Value>, String> {
    let one = |name: &str, value: &Value| match value {
        Value::Mapping(written) => source(name, written).map(Value::Mapping),
        other => Err(format!("{name}: is {}, expected a mapping with path", shown(other))),
    };
    match value {
        Value::Sequence(list) => list
            .iter()
            .enumerate()
            .map(|(index, value)| one(&format!("{name}[{index}]"), value))
            .collect(),
        value => Ok(vec![one(name, value)?]),
    }
}

/// This program's name of a source's key.
fn own(name: &str, key: &str, names: Names) -> Result<&'static str, String> {
    let found = names.iter().map(|(theirs, ours)| (*theirs, *ours));
    let found =
        found.chain(KEYS.into_iter().map(|key| (key, key))).find(|(theirs, _)| *theirs == key);
    found.map(|(_, ours)| ours).ok_or_else(|| {
        let known = names.iter().map(|(theirs, _)| *theirs);
        format!("unknown key `{name}.{key}`{}", suggestion(key, known))
    })
}

fn put(source: &mut Mapping, key: &str, name: &str, value: &Value) -> Result<(), String> {
    match source.insert(key.into(), value.clone()) {
        Some(before) if before != *value => {
            Err(format!("{name}: says {} and {} for the same thing", shown(&before), shown(value)))
        }
        _ => Ok(()),
    }
}

fn insert(keys: &mut Keys, name: &str, sources: Vec<Value>) -> Result<(), String> {
    if sources.is_empty() {
        return Ok(());
    }
    let value = Value::Sequence(sources);
    check(name, &value)?;
    keys.insert("data", name, value)
}

#[cfg(test)]
mod tests {
    use super::super::data::{Data, Entry};
    use super::*;

    fn read(
        word: fn(&mut Keys, &str, &Value) -> Result<(), String>,
        yaml: &str,
    ) -> Result<Vec<Entry>, String> {
        let mut keys = Keys::default();
        word(&mut keys, "word", &serde_yaml_ng::from_str(yaml).unwrap())?;
        let data = keys.into_parts().0.remove("data").unwrap_or_default();
        Ok(serde_yaml_ng::from_value::<Data>(data).unwrap().0)
    }

    #[test]
    fn data_sets_of_mlx_lm_are_sources() {
        let found = read(
            hf_dataset,
            "{path: o/n, prompt_feature: q, completion_feature: a, train_split: 'train[:1000]', \
             valid_split: 'train[-100:]', config: {name: en, revision: v1}}",
        );
        let text = |text: &str| Some(text.to_string());
        let expected = Entry {
            path: "o/n".into(),
            config: text("en"),
            revision: text("v1"),
            split: text("train[:1000]"),
            valid_split: text("train[-100:]"),
            prompt_column: text("q"),
            completion_column: text("a"),
            ..Entry::default()
        };
        assert_eq!(found.unwrap(), [expected]);
        let found = read(hf_dataset, "[{path: o/n}, {name: o/m, chat_feature: turns}]").unwrap();
        assert_eq!(found[0].split.as_deref(), Some("train[:80%]"));
        assert_eq!(found[0].valid_split.as_deref(), Some("train[-10%:]"));
        assert_eq!(
            (found[1].path.as_str(), found[1].messages_column.as_deref()),
            ("o/m", Some("turns"))
        );
    }

    #[test]
    fn data_sets_of_axolotl_are_sources() {
        let found = read(
            datasets,
            "[{path: a.jsonl, type: chat_template, field_messages: turns, ds_type: json, \
             message_property_mappings: {role: role, content: content}}, \
             {path: o/n, name: en, split: 'train[:10%]', type: completion, field: body}]",
        )
        .unwrap();
        assert_eq!(
            (found[0].path.as_str(), found[0].messages_column.as_deref()),
            ("a.jsonl", Some("turns"))
        );
        assert_eq!(
            (found[1].config.as_deref(), found[1].text_column.as_deref()),
            (Some("en"), Some("body"))
        );
        assert_eq!((found[1].split.as_deref(), found[1].weight), (Some("train[:10%]"), None));
        // What is the default there, and here; and whole texts of the column that it has there.
        let found = read(
            datasets,
            "[{path: a, type: chat_template, roles_to_train: [assistant], train_on_eos: turn, \
             message_property_mappings: {role: from, content: value}}, {path: b, type: completion}]",
        )
        .unwrap();
        assert_eq!(found[0].messages_column, None);
        assert_eq!(found[1].text_column.as_deref(), Some("text"));
    }

    #[test]
    fn mistakes_are_named() {
        let mlx: fn(&mut Keys, &str, &Value) -> Result<(), String> = hf_dataset;
        for (word, yaml, expected) in [
            (mlx, "3", "word: is 3, expected a mapping with path"),
            (mlx, "[{prompt_feature: q}]", "word[0]: is a mapping without a path"),
            (
                mlx,
                "{path: o/n, promt_feature: q}",
                "unknown key `word.promt_feature`; did you mean `prompt_feature`",
            ),
            (mlx, "{path: o/n, config: {data_dir: x}}", "word.config.data_dir: is not supported"),
            (mlx, "{path: src}", "word.path: src is on this machine, expected the id"),
            (mlx, "{path: o/n, name: o/m}", "word: says o/n and o/m for the same thing"),
            (
                datasets,
                "[{path: a, message_property_mappings: {role: speaker}}]",
                "word[0].message_property_mappings: is {role: speaker}; messages have a role",
            ),
            (
                datasets,
                "[{path: a, type: alpaca}]",
                "word[0].type: is alpaca, expected chat_template",
            ),
        ] {
            let error = read(word, yaml).unwrap_err();
            assert!(error.starts_with(expected), "{yaml}: {error}");
        }
    }
}
