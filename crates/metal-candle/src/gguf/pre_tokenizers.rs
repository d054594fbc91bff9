//! How a text is split before its pieces become tokens: llama.cpp's names for it (`tokenizer.ggml.pre`), and what
//! `tokenizer.json` says for each.

use serde_json::{Value, json};

/// How a text is split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Split {
    /// By GPT-2's expression, which `tokenizers` has built in.
    Gpt2,
    /// Digits one by one, and what lies between as GPT-2 does.
    DigitsThenGpt2,
    /// By expressions, one after the other.
    By(&'static [&'static str]),
}

/// A pre-tokenizer of llama.cpp.
#[derive(Debug)]
pub(super) struct PreTokenizer {
    /// Its names; the first is written.
    names: &'static [&'static str],
    pub split: Split,
    /// Whether a piece that is a token is taken as one, whatever the merges make of it.
    pub ignore_merges: bool,
    /// Whether a text begins with the BOS token where the file doesn't say.
    pub add_bos: bool,
    /// Whether the models that have it normalise to NFC, which llama.cpp doesn't.
    pub nfc: bool,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// What files have that don't say how they split, of the time before that was asked.
const DEFAULT: [&str; 4] = [
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    "[0-9][0-9][0-9]",
];

const fn plain(names: &'static [&'static str], split: Split) -> PreTokenizer {
    PreTokenizer { names, split, ignore_merges: false, add_bos: false, nfc: false }
}

/// Those of the families that this library has, and what shares their splitting.
static ALL: [PreTokenizer; 8] = [
    PreTokenizer {
        ignore_merges: true,
        add_bos: true,
        ..plain(&["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"], Split::By(&[LLAMA3]))
    },
    plain(&["dbrx", "smaug-bpe"], Split::By(&[LLAMA3])),
    PreTokenizer {
        nfc: true,
        ..plain(&["qwen2", "deepseek-r1-qwen", "megrez"], Split::By(&[QWEN2]))
    },
    PreTokenizer { ignore_merges: true, add_bos: true, ..plain(&["tekken"], Split::By(&[TEKKEN])) },
    plain(&["gpt-4o", "llama4"], Split::By(&[GPT4O])),
    plain(
        &["smollm", "refact", "starcoder", "command-r", "codeshell", "exaone"],
        Split::DigitsThenGpt2,
    ),
    plain(&["gpt-2", "olmo", "mpt", "phi-2", "jais", "gigachat"], Split::Gpt2),
    plain(&["default"], Split::By(&DEFAULT)),
];

impl PreTokenizer {
    /// The one with this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        ALL.iter().find(|pre| pre.names.contains(&name))
    }

    /// The name that is written.
    pub fn name(&self) -> &'static str {
        self.names.first().copied().unwrap_or_default()
    }

    /// All names.
    pub fn known() -> String {
        ALL.iter().flat_map(|pre| pre.names).copied().collect::<Vec<_>>().join(", ")
    }

    /// Those that split a text as the `pre_tokenizer` of a `tokenizer.json` does.
    pub fn like(description: &Value) -> Option<Vec<&'static Self>> {
        let split = split_of(description)?;
        let same = |pre: &&Self| match (pre.split, &split) {
            (Split::Gpt2, Found::Gpt2) | (Split::DigitsThenGpt2, Found::DigitsThenGpt2) => true,
            (Split::By([expression]), Found::By(found)) => expression == found,
            _ => false,
        };
        let found: Vec<&Self> = ALL.iter().filter(same).collect();
        (!found.is_empty()).then_some(found)
    }
}

impl Split {
    /// As `pre_tokenizer` in a `tokenizer.json`.
    pub fn description(self) -> Value {
        let bytes = |use_regex: bool| json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex });
        let mut steps: Vec<Value> = match self {
            Self::Gpt2 => return bytes(true),
            Self::DigitsThenGpt2 => vec![json!({ "type": "Digits", "individual_digits": true })],
            Self::By(expressions) => expressions
                .iter()
                .map(|expression| {
                    json!({ "type": "Split", "pattern": { "Regex": expression },
                        "behavior": "Isolated", "invert": false })
                })
                .collect(),
        };
        steps.push(bytes(self == Self::DigitsThenGpt2));
        json!({ "type": "Sequence", "pretokenizers": steps })
    }
}

enum Found<'a> {
    Gpt2,
    DigitsThenGpt2,
    By(&'a str),
}

fn split_of(description: &Value) -> Option<Found<'_>> {
    let mut steps = Vec::new();
    flatten(description, &mut steps);
    let kind =
        |step: &Value| step.get("type").and_then(Value::as_str).unwrap_or_default().to_string();
    let flag = |step: &Value, key: &str, default: bool| {
        step.get(key).map_or(Some(default), Value::as_bool)
    };
    let (bytes, before) = steps.split_last()?;
    if kind(bytes) != "ByteLevel" || flag(bytes, "add_prefix_space", true)? {
        return None;
    }
    let use_regex = flag(bytes, "use_regex", true)?;
    match before {
        [] if use_regex => Some(Found::Gpt2),
        [digits] if use_regex && kind(digits) == "Digits" => {
            flag(digits, "individual_digits", false)?.then_some(Found::DigitsThenGpt2)
        }
        [split] if !use_regex && kind(split) == "Split" => {
            let expression = split.get("pattern")?.get("Regex")?.as_str()?;
            // Both give all pieces where the expression matches every text.
            let pieces = match split.get("behavior")?.as_str()? {
                "Isolated" => !flag(split, "invert", false)?,
                "Removed" => flag(split, "invert", false)?,
                _ => false,
            };
            pieces.then_some(Found::By(expression))
        }
        _ => None,
    }
}

fn flatten<'a>(description: &'a Value, steps: &mut Vec<&'a Value>) {
    match description.get("pretokenizers").and_then(Value::as_array) {
        // Its nesting was checked when the tokenizer was read.
        Some(inner) => inner.iter().for_each(|inner| flatten(inner, steps)),
        None => steps.push(description),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_of_a_splitting_is_known_by_its_description() {
        let mut names = std::collections::BTreeSet::new();
        for pre in &ALL {
            for name in pre.names {
                assert!(names.insert(name), "{name}");
                assert_eq!(PreTokenizer::named(name).unwrap().name(), pre.name());
            }
            let found = PreTokenizer::like(&pre.split.description());
            match pre.name() {
                // Only read.
                "default" => assert!(found.is_none()),
                name => assert!(found.unwrap().iter().any(|found| found.name() == name)),
            }
        }
        assert!(PreTokenizer::named("bert").is_none());
    }

    #[test]
    fn other_splittings_are_not_taken_for_one_of_these() {
        let split = |behavior: &str, invert: bool, expression: &str| {
            json!({ "type": "Sequence", "pretokenizers": [
                { "type": "Split", "pattern": { "Regex": expression }, "behavior": behavior, "invert": invert },
                { "type": "ByteLevel", "add_prefix_space": false, "use_regex": false } ] })
        };
        assert!(PreTokenizer::like(&split("Removed", true, QWEN2)).is_some());
        for other in [
            split("Removed", false, QWEN2),
            split("Isolated", true, QWEN2),
            split("Isolated", false, "a+"),
            json!({ "type": "ByteLevel", "add_prefix_space": true, "use_regex": true }),
            json!({ "type": "ByteLevel", "add_prefix_space": false, "use_regex": false }),
            json!({ "type": "Metaspace" }),
            json!({ "type": "Sequence", "pretokenizers": [] }),
            Value::Null,
        ] {
            assert!(PreTokenizer::like(&other).is_none(), "{other}");
        }
    }
}
