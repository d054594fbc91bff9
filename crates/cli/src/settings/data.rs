//! Where data come from, as a file and the flags say it: one source or several, each with its weight, its part of a data
//! set on the hub and its columns.

use super::keys::{kind, shown, suggestion};
use crate::errors::usage;
use clap::Args;
use metal_candle::data::{Columns, Source};
use metal_candle::hub;
use serde::{Deserialize, Serialize};
use serde_yaml_ng::Value;
use std::path::Path;

/// The sources of a run. In a file: a path, or a list of paths and mappings.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct Data(pub Vec<Entry>);

/// One source.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// A file, a folder, or the id of a data set on the hub.
    pub path: String,
    /// Its share of an epoch, relative to the other sources'.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weight: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub config: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub revision: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub split: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub valid_split: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub test_split: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_column: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_column: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text_column: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub messages_column: Option<String>,
}

/// What holds for the sources that don't say it themselves.
#[derive(Debug, Clone, Default, PartialEq, Args, Serialize)]
pub struct DataFlags {
    /// The configuration of a data set on the hub [default: its default or only one]
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    pub data_config: Option<String>,
    /// The branch, tag or commit of a data set on the hub [default: main]
    #[arg(long, value_name = "REVISION", help_heading = "Data")]
    pub data_revision: Option<String>,
    /// The split of a data set on the hub, or a part of it such as train[:1000] or train[-10%:] [default: by its name]
    #[arg(long, value_name = "NAME", help_heading = "Data")]
    pub data_split: Option<String>,
    /// The column that holds the prompt, or a text with columns in it: 'Question: {question}'
    #[arg(long, value_name = "COLUMN|TEXT", help_heading = "Data")]
    pub prompt_column: Option<String>,
    /// The column that holds what is to be learned, or a text with columns in it
    #[arg(long, value_name = "COLUMN|TEXT", help_heading = "Data")]
    pub completion_column: Option<String>,
    /// The column that holds plain text, or a text with columns in it
    #[arg(long, value_name = "COLUMN|TEXT", help_heading = "Data")]
    pub text_column: Option<String>,
    /// The column that holds a conversation, a list of messages
    #[arg(long, value_name = "COLUMN", help_heading = "Data")]
    pub messages_column: Option<String>,
}

/// The keys of a source in a file.
pub const KEYS: [&str; 11] = [
    "path",
    "weight",
    "config",
    "revision",
    "split",
    "valid_split",
    "test_split",
    "prompt_column",
    "completion_column",
    "text_column",
    "messages_column",
];

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    One(Item),
    Several(Vec<Item>),
}

#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Item {
    Path(String),
    Entry(Box<Entry>),
}

impl From<Written> for Data {
    fn from(written: Written) -> Self {
        let items = match written {
            Written::One(item) => vec![item],
            Written::Several(items) => items,
        };
        let entry = |item| match item {
            Item::Path(path) => Entry::at(&path),
            Item::Entry(entry) => *entry,
        };
        Self(items.into_iter().map(entry).collect())
    }
}

impl From<Data> for Written {
    fn from(data: Data) -> Self {
        let mut items: Vec<Item> = data
            .0
            .into_iter()
            .map(|entry| match entry.is_plain() {
                true => Item::Path(entry.path),
                false => Item::Entry(entry.into()),
            })
            .collect();
        match (items.pop(), items.is_empty()) {
            (Some(one), true) => Self::One(one),
            (last, _) => {
                items.extend(last);
                Self::Several(items)
            }
        }
    }
}

impl Entry {
    /// The source that is written as a path or as `PATH:WEIGHT`. What exists by its whole name is a path.
    pub fn at(written: &str) -> Self {
        let weighted = written.rsplit_once(':').and_then(|(path, weight)| {
            let is_number = weight.starts_with(|c: char| c.is_ascii_digit() || "+-.".contains(c));
            let weight = weight.parse().ok().filter(|_| is_number && !path.is_empty())?;
            (!Path::new(written).exists()).then(|| (path.to_string(), Some(weight)))
        });
        let (path, weight) = weighted.unwrap_or_else(|| (written.to_string(), None));
        Self { path, weight, ..Self::default() }
    }

    /// Whether a path is all that it says, and is read as one.
    fn is_plain(&self) -> bool {
        *self == Self::at(&self.path)
    }

    /// The id of a data set on the hub, if that is what it names.
    pub fn hub_id(&self) -> Option<&str> {
        Some(self.path.as_str()).filter(|id| hub::is_dataset_id(id) && !Path::new(id).exists())
    }

    /// The columns that its records are taken from.
    pub fn columns(&self) -> anyhow::Result<Columns> {
        let source = |key: &str, text: &Option<String>| {
            text.as_deref().map(|text| Source::parse(key, text)).transpose().map_err(usage)
        };
        let columns = Columns {
            prompt: source("prompt_column", &self.prompt_column)?,
            completion: source("completion_column", &self.completion_column)?,
            text: source("text_column", &self.text_column)?,
            messages: self.messages_column.clone(),
        };
        columns.check().map_err(usage)?;
        Ok(columns)
    }

    fn has_columns(&self) -> bool {
        let columns = [
            &self.prompt_column,
            &self.completion_column,
            &self.text_column,
            &self.messages_column,
        ];
        columns.into_iter().any(Option::is_some)
    }
}

impl Data {
    /// The sources by the words of a command line.
    pub fn of(paths: &[String]) -> Self {
        Self(paths.iter().map(|path| Entry::at(path)).collect())
    }

    /// Its paths, as messages name it.
    pub fn name(&self) -> String {
        self.0.iter().map(|entry| entry.path.as_str()).collect::<Vec<_>>().join(", ")
    }

    /// Every source with all that holds for it. Columns hold for each that names none; what is said of a data set on
    /// the hub holds for the only one there is.
    pub fn completed(&self, flags: &DataFlags) -> anyhow::Result<Vec<Entry>> {
        let mut entries = self.0.clone();
        let ids: Vec<String> =
            entries.iter().filter_map(|entry| entry.hub_id().map(String::from)).collect();
        for (key, value) in [
            ("data_config", &flags.data_config),
            ("data_revision", &flags.data_revision),
            ("data_split", &flags.data_split),
        ] {
            let Some(value) = value else { continue };
            let [id] = ids.as_slice() else {
                return Err(usage(match ids.as_slice() {
                    [] => {
                        format!("{key}: is for a data set of the hub, and {} is none", self.name())
                    }
                    _ => format!(
                        "{key}: there are several data sets of the hub, {}; in a file each source of `data` has a \
                         {} of its own",
                        ids.join(" and "),
                        key.trim_start_matches("data_")
                    ),
                }));
            };
            for entry in entries.iter_mut().filter(|entry| entry.hub_id().is_some()) {
                let own = match key {
                    "data_config" => &mut entry.config,
                    "data_revision" => &mut entry.revision,
                    _ => &mut entry.split,
                };
                if own.as_ref().is_some_and(|own| own != value) {
                    return Err(usage(format!(
                        "{key}: the source {id} has a {} of its own; keep one of them",
                        key.trim_start_matches("data_")
                    )));
                }
                *own = Some(value.clone());
            }
        }
        let weighted = entries.iter().any(|entry| entry.weight.is_some());
        for entry in &mut entries {
            if !entry.has_columns() {
                entry.prompt_column.clone_from(&flags.prompt_column);
                entry.completion_column.clone_from(&flags.completion_column);
                entry.text_column.clone_from(&flags.text_column);
                entry.messages_column.clone_from(&flags.messages_column);
            }
            entry.columns()?;
            if weighted {
                let weight = *entry.weight.get_or_insert(1.0);
                if !(weight.is_finite() && weight > 0.0) {
                    return Err(usage(format!(
                        "data: the weight of {} is {weight}, expected a positive number",
                        entry.path
                    )));
                }
            }
        }
        Ok(entries)
    }

    /// That no source has a weight, which only an epoch of training has a use for.
    pub fn without_weights(self) -> anyhow::Result<Self> {
        match self.0.iter().find(|entry| entry.weight.is_some()) {
            Some(entry) => Err(usage(format!(
                "data: there is no {}:{}; weights are for training, leave the number out",
                entry.path,
                entry.weight.unwrap_or_default()
            ))),
            None => Ok(self),
        }
    }
}

/// What is wrong with the value of `data`, or of a word for it, called `name`.
pub fn check(name: &str, value: &Value) -> Result<(), String> {
    match value {
        Value::Sequence(items) => items
            .iter()
            .enumerate()
            .try_for_each(|(index, item)| check_item(&format!("{name}[{index}]"), item)),
        one => check_item(name, one),
    }
}

fn check_item(name: &str, value: &Value) -> Result<(), String> {
    let map = match value {
        Value::String(_) => return Ok(()),
        Value::Mapping(map) => map,
        other => {
            return Err(format!(
                "{name}: is {}, expected a path, the id of a data set on the hub, or a mapping with path and weight",
                shown(other)
            ));
        }
    };
    for (key, value) in map {
        let key = key.as_str().unwrap_or_default();
        if !KEYS.contains(&key) {
            return Err(format!("unknown key `{name}.{key}`{}", suggestion(key, KEYS.into_iter())));
        }
        let (fits, expected) = match key {
            "weight" => (value.is_number(), "a number"),
            _ => (value.is_string(), "a text"),
        };
        let unset = value.is_null() && key != "path";
        if !(fits || unset) {
            return Err(format!("{name}.{key}: is {}, expected {expected}", shown(value)));
        }
    }
    match map.get("path") {
        Some(_) => Ok(()),
        None => Err(format!("{name}: is {} without a path", kind(value))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(yaml: &str) -> Data {
        let value: Value = serde_yaml_ng::from_str(yaml).unwrap();
        check("data", &value).unwrap_or_else(|error| panic!("{yaml}: {error}"));
        serde_yaml_ng::from_value(value).unwrap()
    }

    #[test]
    fn a_source_is_a_path_or_more_and_is_written_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let colon = folder.path().join("a:2").display().to_string();
        std::fs::write(&colon, "").unwrap();
        for (yaml, expected) in [
            ("a.jsonl", vec![("a.jsonl", None)]),
            (
                "[a.jsonl, 'b:0.5', {path: c, weight: 3}]",
                vec![("a.jsonl", None), ("b", Some(0.5)), ("c", Some(3.0))],
            ),
            ("owner/name:2", vec![("owner/name", Some(2.0))]),
            ("'C:\\data'", vec![("C:\\data", None)]),
            ("'a:nan'", vec![("a:nan", None)]),
            ("{path: 'x:2'}", vec![("x:2", None)]),
            (colon.as_str(), vec![(colon.as_str(), None)]),
            ("[]", vec![]),
        ] {
            let found = data(yaml);
            let parts: Vec<_> =
                found.0.iter().map(|entry| (entry.path.as_str(), entry.weight)).collect();
            assert_eq!(parts, expected, "{yaml}");
            assert_eq!(data(&serde_yaml_ng::to_string(&found).unwrap()), found, "{yaml}");
        }
        assert_eq!(serde_yaml_ng::to_string(&data("a.jsonl")).unwrap(), "a.jsonl\n");
    }

    #[test]
    fn mistakes_in_a_source_are_named() {
        for (yaml, expected) in [
            ("3", "data: is 3, expected a path"),
            ("[a, 3]", "data[1]: is 3, expected a path"),
            ("[{path: a, wieght: 2}]", "unknown key `data[0].wieght`; did you mean `weight`?"),
            ("{weight: 2}", "data: is a mapping without a path"),
            ("{path: a, weight: many}", "data.weight: is many, expected a number"),
            ("{path: a, config: 3}", "data.config: is 3, expected a text"),
            ("{path: null}", "data.path: is nothing, expected a text"),
        ] {
            let error = check("data", &serde_yaml_ng::from_str(yaml).unwrap()).unwrap_err();
            assert!(error.starts_with(expected), "{yaml}: {error}");
        }
    }

    #[test]
    fn what_holds_for_all_is_given_to_those_that_say_nothing() {
        let flags = |config: &str, prompt: &str| DataFlags {
            data_config: Some(config.into()).filter(|config: &String| !config.is_empty()),
            prompt_column: Some(prompt.into()).filter(|prompt: &String| !prompt.is_empty()),
            ..DataFlags::default()
        };
        let entries = data("[a.jsonl, {path: o/n, text_column: t}]")
            .completed(&flags("en", "Q: {q}"))
            .unwrap();
        assert_eq!((entries[0].config.as_deref(), entries[0].weight), (None, None));
        assert!(entries[0].columns().unwrap().prompt.is_some());
        assert_eq!(entries[1].config.as_deref(), Some("en"));
        assert!(entries[1].columns().unwrap().prompt.is_none());
        let entries = data("['a:2', b]").completed(&DataFlags::default()).unwrap();
        assert_eq!(
            entries.iter().map(|entry| entry.weight).collect::<Vec<_>>(),
            [Some(2.0), Some(1.0)]
        );
        for (yaml, config, prompt, expected) in [
            ("a.jsonl", "en", "", "data_config: is for a data set of the hub, and a.jsonl is none"),
            (
                "[o/n, o/m]",
                "en",
                "",
                "data_config: there are several data sets of the hub, o/n and o/m",
            ),
            (
                "{path: o/n, config: fr}",
                "en",
                "",
                "data_config: the source o/n has a config of its own",
            ),
            ("a", "", "{q", "prompt_column: a { has no }"),
            ("{path: a, prompt_column: q, text_column: t}", "", "", "columns: a record is taken"),
            ("['a:0', b]", "", "", "data: the weight of a is 0, expected a positive number"),
        ] {
            let error = data(yaml).completed(&flags(config, prompt)).unwrap_err().to_string();
            assert!(error.starts_with(expected), "{yaml}: {error}");
        }
        assert!(data("'a:2'").without_weights().unwrap_err().to_string().contains("no a:2"));
    }
}
