//! Which files of a data set's repository are which split, by the rules of Hugging Face's
//! `datasets`: what the card says, or else what the files are called.
//!
//! A card is the YAML at the beginning of `README.md`. Its `configs` name configurations and their
//! `data_files`, as patterns in which `*` and `?` stay in a folder, `**` does not, and `[a-z]` is one
//! character. Without them, splits go by shards (`data/train-00000-of-00002.parquet`), by words in
//! the names of folders (`dev/1.jsonl`) or by words in the names of files (`train_2.csv`), the first
//! of these that is found anywhere; and if none is, everything is `train`. Files of the most frequent
//! format count. Hidden files, and folders
//! that start with `__`, have to be named.

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;
use serde_yaml_ng::Value;

use crate::files;

/// The revision at which the hub keeps a Parquet copy of data sets, as `<config>/<split>/<n>.parquet`.
pub(super) const CONVERTED: &str = "refs/convert/parquet";
/// A card that is YAML and nothing else.
pub(super) const YAML_CARD: &str = ".huggingface.yaml";
/// What the only configuration of a repository without a card is called.
const DEFAULT: &str = "default";

/// Words for each split in the names of files and folders.
const WORDS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "dev", "val"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];
/// What stands between words, in brackets.
const GAP: &str = "[-._ 0-9]";
/// Files about the data, which are none unless they are named.
const ABOUT: [&str; 5] =
    ["README.md", "config.json", "dataset_info.json", "dataset_infos.json", "dataset_dict.json"];
/// Keys of a configuration that say how its files are to be read, which is not supported.
const READING: [&str; 12] = [
    "sep",
    "delimiter",
    "names",
    "column_names",
    "header",
    "skiprows",
    "field",
    "encoding",
    "quotechar",
    "quoting",
    "escapechar",
    "sample_by",
];

/// How a file's records are written, by its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Format {
    Parquet,
    Json,
    Csv,
    Tsv,
    /// Data only where there is nothing else, as many a repository has notes in it.
    Text,
}

/// What is read, for messages.
pub(super) const READ: &str =
    ".parquet, .json, .jsonl, .csv, .tsv and .txt, also with .gz or .zst after it";

fn format(path: &str) -> Option<Format> {
    let name = path.to_ascii_lowercase();
    let plain = [".gz", ".zst"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
    let (_, extension) = plain.rsplit_once('.')?;
    match extension {
        "parquet" => Some(Format::Parquet),
        "json" | "jsonl" | "ndjson" => Some(Format::Json),
        "csv" => Some(Format::Csv),
        "tsv" => Some(Format::Tsv),
        "txt" => Some(Format::Text),
        _ => None,
    }
}

/// The files of each split.
pub(super) type Splits = BTreeMap<String, Vec<String>>;

/// One configuration of a data set.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Config {
    pub(super) name: String,
    is_default: bool,
    /// The folder that its files are in, with `/` at the end; or nothing.
    folder: String,
    /// The patterns of each split, if the card has them.
    patterns: Option<Vec<(String, Vec<String>)>>,
    /// A key that says how to read the files.
    reading: Option<String>,
}

impl Config {
    fn unnamed(folder: String) -> Self {
        Self { name: DEFAULT.to_string(), is_default: true, folder, patterns: None, reading: None }
    }
}

/// The configurations that a card names, in its order; none if it has no `configs`. The YAML stands
/// between `---` unless the card is nothing else.
///
/// # Errors
/// What is wrong with it, and where.
pub(super) fn read_card(card: &str, is_yaml: bool) -> Result<Vec<Config>, String> {
    let Some(section) = configs_section(card, is_yaml) else { return Ok(Vec::new()) };
    let value: Value = files::parse_yaml(section.as_bytes())
        .map_err(|message| format!("what it says of configs {message}"))?;
    let list = match value.get("configs") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Sequence(list)) => list,
        Some(_) => return Err("configs is no list".into()),
    };
    let configs = list.iter().map(read_config).collect::<Result<Vec<_>, _>>()?;
    let mut names = BTreeSet::new();
    match configs.iter().find(|config| !names.insert(&config.name)) {
        Some(twice) => Err(format!("configs has {} twice", twice.name)),
        None => Ok(configs),
    }
}

fn read_config(value: &Value) -> Result<Config, String> {
    let Value::Mapping(map) = value else {
        return Err("configs has an entry that is no mapping".into());
    };
    let name =
        value.get("config_name").and_then(text).ok_or("an entry of configs has no config_name")?;
    let wrong = |key: &str, expected: &str| format!("configs, {name}: {key} is not {expected}");
    let is_default = match value.get("default") {
        None | Some(Value::Null) => false,
        Some(value) => value.as_bool().ok_or_else(|| wrong("default", "true or false"))?,
    };
    let folder = match value.get("data_dir") {
        None | Some(Value::Null) => String::new(),
        Some(value) => text(value).ok_or_else(|| wrong("data_dir", "a folder's name"))?,
    };
    let folder = folder.trim_start_matches("./").trim_matches('/');
    let folder =
        if folder.is_empty() || folder == "." { String::new() } else { format!("{folder}/") };
    let patterns = match value.get("data_files") {
        None | Some(Value::Null) => None,
        Some(value) => Some(read_patterns(value).ok_or_else(|| {
            wrong("data_files", "a pattern, a list of patterns, or a list of split and path")
        })?),
    };
    let reading =
        map.keys().filter_map(Value::as_str).find(|key| READING.contains(key)).map(str::to_string);
    Ok(Config { name, is_default, folder, patterns, reading })
}

/// The patterns of each split; `None` if `value` is not how they are written.
fn read_patterns(value: &Value) -> Option<Vec<(String, Vec<String>)>> {
    let paths = |value: &Value| match value {
        Value::Sequence(list) => list.iter().map(text).collect::<Option<Vec<_>>>(),
        one => Some(vec![text(one)?]),
    };
    let Value::Sequence(list) = value else {
        return Some(vec![("train".into(), paths(value)?)]);
    };
    if !list.iter().any(Value::is_mapping) {
        return Some(vec![("train".into(), paths(value)?)]);
    }
    let mut splits: Vec<(String, Vec<String>)> = Vec::new();
    for entry in list {
        let split = text(entry.get("split")?)?;
        let is_new = splits.iter().all(|(known, _)| *known != split);
        let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == '.';
        if split.is_empty() || !split.chars().all(is_name) || !is_new {
            return None;
        }
        splits.push((split, paths(entry.get("path")?)?));
    }
    Some(splits)
}

/// A text, or a number or truth value that was meant as one.
fn text(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(value) => Some(value.to_string()),
        _ => None,
    }
}

/// The lines of `configs` in a card. The rest of it, which can be long, is of no use here.
fn configs_section(card: &str, is_yaml: bool) -> Option<String> {
    let card = card.trim_start_matches('\u{feff}');
    let card = if is_yaml { card } else { card.trim_start() };
    let mut lines = card.lines();
    if !is_yaml && lines.next()?.trim_end() != "---" {
        return None;
    }
    let mut section = String::new();
    for line in lines.take_while(|line| line.trim_end() != "---") {
        let is_key = !line.starts_with([' ', '\t', '-', '#', ']', '}']) && !line.trim().is_empty();
        if is_key && !section.is_empty() {
            break;
        }
        if !section.is_empty() || line.starts_with("configs:") {
            section.push_str(line);
            section.push('\n');
        }
    }
    (!section.is_empty()).then_some(section)
}

/// The configuration of this name; or the default one, or the only one.
///
/// # Errors
/// Which ones there are.
pub(super) fn choose(configs: Vec<Config>, name: Option<&str>) -> Result<Config, String> {
    let configs = if configs.is_empty() { vec![Config::unnamed(String::new())] } else { configs };
    let is_only = configs.len() == 1;
    let names = configs.iter().map(|config| config.name.clone()).collect::<Vec<_>>();
    let is_chosen = |config: &Config| match name {
        Some(name) => config.name == name,
        None => is_only || config.is_default || config.name == DEFAULT,
    };
    let mut chosen = configs.into_iter().filter(is_chosen);
    match (chosen.next(), chosen.next(), name) {
        (Some(config), None, _) => Ok(config),
        (None, _, Some(name)) => {
            Err(format!("there is no configuration {name:?}; there is {}", list(&names)))
        }
        _ => Err(format!("choose one of its configurations: {}", list(&names))),
    }
}

/// Names for a message, not too many of them.
pub(super) fn list<S: AsRef<str>>(names: &[S]) -> String {
    const SHOWN: usize = 40;
    let shown = names.iter().take(SHOWN).map(AsRef::as_ref).collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// The configurations of the hub's Parquet copy.
pub(super) fn converted(files: &[&str]) -> Vec<Config> {
    let mut configs: BTreeMap<&str, BTreeMap<&str, Vec<String>>> = BTreeMap::new();
    for file in files {
        if let [config, split, name] = file.split('/').collect::<Vec<_>>()[..]
            && format(name) == Some(Format::Parquet)
        {
            // Of large data sets, only the beginning is copied.
            let split = split.strip_prefix("partial-").unwrap_or(split);
            let patterns = configs.entry(config).or_default().entry(split).or_default();
            patterns.push(file.to_string());
        }
    }
    let config = |(name, splits): (&str, BTreeMap<&str, Vec<String>>)| Config {
        name: name.to_string(),
        patterns: Some(splits.into_iter().map(|(split, files)| (split.into(), files)).collect()),
        is_default: false,
        ..Config::unnamed(String::new())
    };
    configs.into_iter().map(config).collect()
}

/// The files of each split, in the order of their names; none where the card names a split that no
/// file fits.
///
/// # Errors
/// What there is instead.
pub(super) fn splits(files: &[&str], config: &Config) -> Result<Splits, String> {
    if let Some(key) = &config.reading {
        return Err(format!(
            "configuration {} sets {key} for reading its files, which is not supported",
            config.name
        ));
    }
    let mut found = match &config.patterns {
        Some(patterns) => patterns
            .iter()
            .map(|(split, patterns)| Ok((split.clone(), matches(files, &config.folder, patterns)?)))
            .collect::<Result<Splits, String>>()?,
        None => by_name(files, &config.folder)?,
    };
    let matched = found.values().flatten().cloned().collect::<Vec<_>>();
    let count = |wanted: Format| matched.iter().filter(|file| format(file) == Some(wanted)).count();
    // The first of those that are equally many.
    let best = [Format::Tsv, Format::Csv, Format::Json, Format::Parquet]
        .into_iter()
        .max_by_key(|format| count(*format))
        .filter(|format| count(*format) > 0)
        .unwrap_or(Format::Text);
    if count(best) == 0 && (!matched.is_empty() || config.patterns.is_none()) {
        let all = files.iter().map(|file| file.to_string()).collect();
        let other = if matched.is_empty() { all } else { matched };
        let has = if other.is_empty() { "nothing".to_string() } else { list(&other) };
        return Err(format!(
            "there is no data that is read ({READ}), but {has}; the revision {CONVERTED} is a copy that can be \
             read, if the hub made one"
        ));
    }
    for (split, files) in &mut found {
        let is_notes = |file: &String| matches!(format(file), None | Some(Format::Text));
        let is_other = |file: &String| format(file) != Some(best) && !is_notes(file);
        if !files.is_empty() && files.iter().all(is_other) {
            return Err(format!(
                "the files of the split {split} have another format than the others: {}",
                list(files)
            ));
        }
        files.retain(|file| format(file) == Some(best));
    }
    if config.patterns.is_none() {
        found.retain(|_, files| !files.is_empty());
    }
    Ok(found)
}

/// The splits of files by their names.
fn by_name(files: &[&str], folder: &str) -> Result<Splits, String> {
    let files = files.iter().copied().filter(|file| format(file).is_some()).collect::<Vec<_>>();
    let digits = "[0-9]".repeat(5);
    let mut shards = Splits::new();
    for file in matches(&files, folder, &[format!("data/*-{digits}-of-{digits}*.*")])? {
        let name = file.rsplit_once('/').map_or(file.as_str(), |(_, name)| name);
        // The last of all places where the number may begin.
        let split = name.rmatch_indices("-of-").find_map(|(at, _)| {
            let (split, number) = name.get(..at)?.rsplit_once('-')?;
            (number.len() == 5 && number.bytes().all(|b| b.is_ascii_digit())).then_some(split)
        });
        if let Some(split) = split {
            shards.entry(split.to_string()).or_default().push(file);
        }
    }
    if !shards.is_empty() {
        return Ok(shards);
    }
    let in_folders = |word: &str| {
        vec![
            format!("**/{word}/**"),
            format!("**/{word}{GAP}*/**"),
            format!("**/*{GAP}{word}/**"),
            format!("**/*{GAP}{word}{GAP}*/**"),
        ]
    };
    let in_names = |word: &str| vec![format!("**/{word}{GAP}*"), format!("**/*{GAP}{word}{GAP}*")];
    for has_folders in [true, false] {
        let mut splits = Splits::new();
        for (split, words) in WORDS {
            let patterns = words
                .iter()
                .flat_map(|word| if has_folders { in_folders(word) } else { in_names(word) })
                .collect::<Vec<_>>();
            let files = matches(&files, folder, &patterns)?;
            if !files.is_empty() {
                splits.insert(split.to_string(), files);
            }
        }
        if !splits.is_empty() {
            return Ok(splits);
        }
    }
    Ok(Splits::from([("train".to_string(), matches(&files, folder, &["**".to_string()])?)]))
}

/// The files in `folder` that one of the patterns fits.
fn matches(files: &[&str], folder: &str, patterns: &[String]) -> Result<Vec<String>, String> {
    let mut found = BTreeSet::new();
    for pattern in patterns {
        let pattern = pattern.trim_start_matches("./");
        if pattern.contains("://") {
            return Err(format!(
                "its data lies elsewhere, at {pattern:?}; only files of the repository are fetched"
            ));
        }
        // The folder's name is no pattern.
        let regex = regex(pattern)?;
        let name = |path: &str| path.rsplit('/').next().unwrap_or_default().to_string();
        let last = name(pattern);
        for file in files {
            let Some(inner) = file.strip_prefix(folder) else { continue };
            let about = ABOUT.contains(&name(inner).as_str()) && name(inner) != last;
            if !about && hidden(inner) == hidden(pattern) && regex.is_match(inner) {
                found.insert(file.to_string());
            }
        }
    }
    Ok(found.into_iter().collect())
}

/// How many parts of a path or a pattern are hidden, and how many of its folders are special.
fn hidden(path: &str) -> (usize, usize) {
    let folders = path.rsplit_once('/').map_or("", |(folders, _)| folders);
    (
        path.split('/').filter(|part| part.starts_with('.')).count(),
        folders.split('/').filter(|part| part.starts_with("__")).count(),
    )
}

/// The regular expression of a pattern.
fn regex(pattern: &str) -> Result<Regex, String> {
    let parts = pattern.split('/').collect::<Vec<_>>();
    let mut text = String::from("(?s)^");
    for (index, part) in parts.iter().enumerate() {
        let is_last = index + 1 == parts.len();
        match (*part, is_last) {
            ("**", true) => text.push_str(".*"),
            ("**", false) => text.push_str("(?:.+/)?"),
            ("*", true) => text.push_str("[^/]+"),
            (part, is_last) => {
                push_part(&mut text, part);
                if !is_last {
                    text.push('/');
                }
            }
        }
    }
    text.push('$');
    Regex::new(&text).map_err(|_| format!("{pattern:?} is no pattern for files"))
}

/// What a part between two `/` stands for.
fn push_part(text: &mut String, part: &str) {
    let mut rest = part;
    while let Some(c) = rest.chars().next() {
        rest = rest.get(c.len_utf8()..).unwrap_or_default();
        match c {
            '*' if rest.starts_with('*') => {
                rest = rest.trim_start_matches('*');
                text.push_str(".*");
            }
            '*' => text.push_str("[^/]*"),
            '?' => text.push_str("[^/]"),
            '[' => match class(rest) {
                Some((class, after)) => {
                    text.push_str(&class);
                    rest = after;
                }
                None => text.push_str("\\["),
            },
            other => text.push_str(&regex::escape(other.encode_utf8(&mut [0; 4]))),
        }
    }
}

/// The characters of a bracket that has just been opened, and what comes after it; `None` if it is
/// not closed.
fn class(rest: &str) -> Option<(String, &str)> {
    let (is_not, inner) = match rest.strip_prefix('!') {
        Some(inner) => (true, inner),
        None => (false, rest),
    };
    // A bracket that closes at once is a character.
    let skip = inner.chars().next()?.len_utf8();
    let end = skip + inner.get(skip..)?.find(']')?;
    let characters = inner.get(..end)?.chars().collect::<Vec<_>>();
    let mut class = String::from(if is_not { "[^/" } else { "[" });
    let mut rest = characters.as_slice();
    loop {
        let escape = |c: char| format!("\\x{{{:x}}}", u32::from(c));
        rest = match rest {
            [] => break,
            [from, '-', to, after @ ..] => {
                class.push_str(&format!("{}-{}", escape(*from), escape(*to)));
                after
            }
            [one, after @ ..] => {
                class.push_str(&escape(*one));
                after
            }
        };
    }
    class.push(']');
    Some((class, inner.get(end + 1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(yaml: &str) -> Config {
        let card =
            format!("---\nlicense: mit\nconfigs:\n{yaml}\nother: [1]\n---\n# Title\nconfigs: no\n");
        choose(read_card(&card, false).unwrap(), None).unwrap()
    }

    fn wrong(yaml: &str) -> String {
        read_card(&format!("configs:{yaml}\n"), true).unwrap_err()
    }

    /// `split: file file; split: file`
    fn shown(splits: Result<Splits, String>) -> String {
        let splits = splits.unwrap();
        let line =
            |(split, files): (&String, &Vec<String>)| format!("{split}: {}", files.join(" "));
        splits.iter().map(line).collect::<Vec<_>>().join("; ")
    }

    fn by_names(files: &[&str]) -> String {
        shown(splits(files, &Config::unnamed(String::new())))
    }

    #[test]
    fn a_pattern_fits_as_in_datasets() {
        for (pattern, fits, fits_not) in [
            (
                "data/*.csv",
                vec!["data/a.csv", "data/.csv"],
                vec!["a.csv", "data/b/a.csv", "data/a.csv.gz"],
            ),
            ("**/a.csv", vec!["a.csv", "x/a.csv", "x/y/a.csv"], vec!["xa.csv"]),
            ("x/**", vec!["x/a", "x/y/a"], vec!["a", "xx/a"]),
            ("**", vec!["a", "x/a"], vec![]),
            ("**.csv", vec!["a.csv", "x/a.csv"], vec!["a.csv.gz"]),
            ("a?c", vec!["abc"], vec!["ac", "a/c"]),
            ("a[0-9]", vec!["a5"], vec!["a", "ab", "a-"]),
            ("a[!0-9]", vec!["ab"], vec!["a5", "a/"]),
            ("a[-. 0-9]b", vec!["a-b", "a b", "a.b", "a3b"], vec!["a_b"]),
            ("a[]]", vec!["a]"], vec!["a"]),
            ("a[b", vec!["a[b"], vec!["ab"]),
            ("a+(b)", vec!["a+(b)"], vec!["aab"]),
        ] {
            let regex = regex(pattern).unwrap();
            assert!(fits.iter().all(|path| regex.is_match(path)), "{pattern}");
            assert!(!fits_not.iter().any(|path| regex.is_match(path)), "{pattern}");
        }
        assert!(regex("a[z-a]").is_err());
    }

    #[test]
    fn splits_go_by_shards_then_folders_then_names() {
        assert_eq!(
            by_names(&[
                "data/train-00000-of-00002.parquet",
                "data/train-00001-of-00002-abc.parquet",
                "data/test_sft-00000-of-00001.parquet",
                "dev/x.parquet"
            ]),
            "test_sft: data/test_sft-00000-of-00001.parquet; train: data/train-00000-of-00002.parquet \
             data/train-00001-of-00002-abc.parquet"
        );
        assert_eq!(
            by_names(&["a/train/1.json", "a/my_dev/1.json", "other/test.json", "README.md"]),
            "train: a/train/1.json; validation: a/my_dev/1.json"
        );
        assert_eq!(
            by_names(&[
                "train_1.csv",
                "x/data.training.csv",
                "val.csv",
                "eval-0.csv",
                "trains.csv"
            ]),
            "test: eval-0.csv; train: train_1.csv x/data.training.csv; validation: val.csv"
        );
        assert_eq!(by_names(&["b.jsonl.gz", "x/a.jsonl"]), "train: b.jsonl.gz x/a.jsonl");
    }

    #[test]
    fn what_is_no_data_is_left_out() {
        assert_eq!(
            by_names(&[
                ".gitattributes",
                "LICENSE.txt",
                "README.md",
                "dataset_info.json",
                "__cache__/a.jsonl",
                ".x/a.jsonl",
                "a.jsonl",
                "notes.txt",
                "test_it.py"
            ]),
            "train: a.jsonl"
        );
        assert_eq!(by_names(&["a.txt"]), "train: a.txt");
        // The more frequent format; Parquet where there are as many.
        assert_eq!(by_names(&["a.csv", "a.parquet"]), "train: a.parquet");
        assert_eq!(by_names(&["a.csv", "b.csv", "a.parquet"]), "train: a.csv b.csv");
        let message = splits(&["a.zip", "load.py"], &Config::unnamed(String::new())).unwrap_err();
        assert!(message.contains("a.zip, load.py") && message.contains(".parquet"), "{message}");
        assert!(message.contains(CONVERTED), "{message}");
        let message = splits(
            &["train.csv", "train.tsv", "train2.csv", "test.tsv"],
            &Config::unnamed(String::new()),
        );
        assert!(message.unwrap_err().contains("another format than the others: test.tsv"));
    }

    #[test]
    fn a_card_names_the_files_of_each_split() {
        let files =
            ["d/en/a.csv", "d/en/b.csv", "d/fr/a.csv", "x.csv", ".h/a.csv", "d/en/train.csv"];
        let split = |yaml: &str| shown(splits(&files, &config(yaml)));
        assert_eq!(
            split(
                "- config_name: one\n  data_files:\n  - split: train\n    path: d/*/a.csv\n  \
                 - split: extra\n    path: [./x.csv, \"d/en/b*\"]"
            ),
            "extra: d/en/b.csv x.csv; train: d/en/a.csv d/fr/a.csv"
        );
        assert_eq!(split("- {config_name: one, data_files: x.csv}"), "train: x.csv");
        assert_eq!(
            split("- config_name: one\n  data_files: ['.h/*', x.csv]"),
            "train: .h/a.csv x.csv"
        );
        assert_eq!(split("- config_name: one\n  data_dir: d/fr"), "train: d/fr/a.csv");
        assert_eq!(
            split("- config_name: one\n  data_dir: ./d/\n  data_files: 'en/[ab].csv'"),
            "train: d/en/a.csv d/en/b.csv"
        );
        // Whether a split without files is an error depends on whether it is wanted.
        assert_eq!(split("- {config_name: one, data_files: none/*}"), "train: ");
        let message =
            splits(&files, &config("- {config_name: one, data_files: x.csv, sep: ;}")).unwrap_err();
        assert!(message.contains("sets sep"), "{message}");
        let message =
            splits(&files, &config("- {config_name: one, data_files: 's3://a/b'}")).unwrap_err();
        assert!(message.contains("lies elsewhere"), "{message}");
    }

    #[test]
    fn one_configuration_is_chosen() {
        let card = |extra: &str| {
            let yaml = format!("configs:\n- config_name: en\n- config_name: fr\n{extra}");
            read_card(&yaml, true).unwrap()
        };
        let name = |configs, name| choose(configs, name).map(|config| config.name);
        assert_eq!(name(card(""), Some("fr")).unwrap(), "fr");
        let message = name(card(""), None).unwrap_err();
        assert!(message.contains("choose one of its configurations: en, fr"), "{message}");
        let message = name(card(""), Some("de")).unwrap_err();
        assert!(message.contains("\"de\"; there is en, fr"), "{message}");
        assert_eq!(name(card("  default: true\n"), None).unwrap(), "fr");
        assert_eq!(name(card("- config_name: default\n"), None).unwrap(), "default");
        assert_eq!(name(Vec::new(), None).unwrap(), "default");
        assert!(name(Vec::new(), Some("en")).is_err());
    }

    #[test]
    fn a_card_that_cannot_be_read_is_refused() {
        assert!(wrong(" 3").contains("no list"));
        assert!(wrong("\n- [").contains("what it says of configs is not YAML"));
        assert!(wrong("\n- a").contains("no mapping"));
        assert!(wrong("\n- data_files: a").contains("no config_name"));
        assert!(wrong("\n- config_name: a\n- config_name: a").contains("a twice"));
        for data_files in
            ["{a: b}", "[{split: a}]", "[{split: a/b, path: c}]", "[[a]]", "[{split: a, path: {}}]"]
        {
            let message = wrong(&format!("\n- {{config_name: a, data_files: {data_files}}}"));
            assert!(message.contains("a: data_files is not"), "{data_files}: {message}");
        }
        let deep = "[".repeat(1 << 20);
        assert!(wrong(&format!(" {deep}")).contains("nested"));
        assert!(wrong(&format!("\n{}a", "- ".repeat(1 << 19))).contains("nested"));
        assert!(read_card("# no front matter\nconfigs: 3\n", false).unwrap().is_empty());
        assert!(read_card("---\nlicense: mit\n---\nconfigs: 3\n", false).unwrap().is_empty());
    }

    #[test]
    fn the_hubs_copy_has_a_folder_for_each_configuration_and_split() {
        let files = [
            "en/train/0000.parquet",
            "en/train/0001.parquet",
            "en/partial-test/0000.parquet",
            "fr/train/0.parquet",
        ];
        let configs = converted(&files);
        let en = choose(configs.clone(), Some("en")).unwrap();
        assert_eq!(
            shown(splits(&files, &en)),
            "test: en/partial-test/0000.parquet; train: en/train/0000.parquet en/train/0001.parquet"
        );
        assert!(choose(configs, None).is_err());
    }
}
