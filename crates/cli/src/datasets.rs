//! Data for a run: files of this machine, or a data set of the hub.

use crate::errors::usage;
use crate::models;
use crate::output::Terminal;
use crate::settings::Settings;
use anyhow::Context;
use metal_candle::data::{DataFiles, Split};
use metal_candle::hub::{self, DatasetChoice, HubOptions};
use metal_candle::{Error, Result};
use std::path::Path;

/// The files of each split: those at the path `data`, or where nothing is and `data` is `owner/name`, those of the
/// hub's data set, downloaded if needed. Test data are fetched only if the settings ask for a test.
pub fn find(data: &Path, settings: &Settings, terminal: Terminal) -> anyhow::Result<DataFiles> {
    let id = data.to_str().filter(|id| hub::is_dataset_id(id) && !data.exists());
    let Some(id) = id else {
        let of_the_hub = [
            ("data_config", &settings.data_config),
            ("data_revision", &settings.data_revision),
            ("data_split", &settings.data_split),
        ];
        if let Some((key, _)) = of_the_hub.iter().find(|(_, value)| value.is_some()) {
            return Err(usage(format!(
                "{key}: is for a data set of the hub, and {} is none",
                data.display()
            )));
        }
        return Ok(DataFiles::find(data)?);
    };
    let wanted = |known: &[&str]| -> Result<Chosen> {
        let mut chosen = choose(known, settings.data_split.as_deref())?;
        if !settings.test {
            chosen.test = None;
        }
        Ok(chosen)
    };
    let choice = DatasetChoice {
        config: settings.data_config.as_deref(),
        revision: settings.data_revision.as_deref(),
        splits: &|known| {
            let Chosen { train, valid, test } = wanted(known)?;
            Ok([Some(train), valid, test].into_iter().flatten().collect())
        },
    };
    let options = HubOptions::from_env()?;
    let found = models::with_progress(terminal, |progress| {
        hub::resolve_dataset_with(id, &choice, &options, progress)
    })
    .with_context(|| {
        format!("there is no file or folder {id} here, so it is a data set of the hub")
    })?;
    let names = found.splits.keys().map(String::as_str).collect::<Vec<_>>();
    let chosen = wanted(&names)?;
    let files = |split: Option<&String>| {
        split.and_then(|split| found.splits.get(split)).cloned().unwrap_or_default()
    };
    let said = [Some(&chosen.train), chosen.valid.as_ref(), chosen.test.as_ref()];
    let said = said.into_iter().flatten().cloned().collect::<Vec<_>>().join(", ");
    terminal.note(format!("data set {id}, configuration {}: {said}", found.config));
    Ok(DataFiles {
        train: files(Some(&chosen.train)),
        valid: files(chosen.valid.as_ref()),
        test: files(chosen.test.as_ref()),
        origin: data.to_path_buf(),
    })
}

/// The names of the splits that are used.
#[derive(Debug, PartialEq)]
struct Chosen {
    train: String,
    valid: Option<String>,
    test: Option<String>,
}

/// The split to learn from, by `name` or by the words in the names that are `known`; and those for validation and test
/// by such words, of several the one that differs from the first in the word alone (`train_sft`, `test_sft`).
fn choose(known: &[&str], name: Option<&str>) -> Result<Chosen> {
    let named = |split| {
        let is_it = |name: &&str| Split::named(name) == Some(split);
        known.iter().copied().filter(is_it).collect::<Vec<_>>()
    };
    let train: &str = match (name, &named(Split::Train)[..], known) {
        (Some(name), _, _) => name,
        (None, [one], _) | (None, [], [one]) => one,
        _ => {
            return Err(Error::option(
                "data_split",
                format!(
                    "name the split to learn from with --data-split; there is {}",
                    known.join(", ")
                ),
            ));
        }
    };
    let rest = |name: &str| name.split_once(['_', '-', '.']).map(|(_, rest)| rest.to_string());
    let other = |split| {
        let mut others = named(split);
        others.retain(|name| *name != train);
        if others.len() > 1 {
            others.retain(|name| rest(name) == rest(train));
        }
        if let [one] = others[..] { Some(one.to_string()) } else { None }
    };
    Ok(Chosen { train: train.to_string(), valid: other(Split::Valid), test: other(Split::Test) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn splits_are_chosen_by_their_words() {
        let chosen = |known: &[&str], name| {
            let Chosen { train, valid, test } = choose(known, name).unwrap();
            [train, valid.unwrap_or_default(), test.unwrap_or_default()]
        };
        assert_eq!(chosen(&["test", "train", "validation"], None), ["train", "validation", "test"]);
        assert_eq!(chosen(&["all"], None), ["all", "", ""]);
        let zephyr = ["test_gen", "test_sft", "train_gen", "train_sft"];
        assert_eq!(chosen(&zephyr, Some("train_sft")), ["train_sft", "", "test_sft"]);
        let message = choose(&zephyr, None).unwrap_err().to_string();
        assert!(message.contains("--data-split; there is test_gen, test_sft"), "{message}");
        assert!(choose(&["a", "b"], None).is_err());
        assert_eq!(chosen(&["a", "dev1", "dev2"], Some("a")), ["a", "", ""]);
    }
}
