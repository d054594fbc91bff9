//! A tokenizer as metadata: read as the files of a tokenizer, and written from them.
//!
//! | `tokenizer.ggml.model` | what it is | in `tokenizer.json` |
//! |---|---|---|
//! | `gpt2` | BPE of bytes; `tokenizer.ggml.pre` names the splitting | BPE with merges |
//! | `llama` | SentencePiece: pairs are merged in the order of the scores of what they give | BPE whose merges are made of the scores, with bytes for what the vocabulary lacks |
//! | `none` | llama.cpp takes token ids alone | `tokenizer.huggingface.json` |
//!
//! What is no token of a text's own is told by `tokenizer.ggml.token_type`. Which tokens end a text: `eos_token_id`,
//! `eot_token_id` and `eom_token_id`. Files that name no `eot_token_id` leave it to their reader to know such tokens by their texts.

use std::collections::{BTreeSet, HashMap, HashSet};

use serde_json::{Map, Value, json};
use tokenizers::Model as _;
use tokenizers::models::bpe::BPE;

use super::container::Container;
use super::pre_tokenizers::PreTokenizer;
use super::writer::Metadata;
use crate::files::{self, cut, cut_to};
use crate::foreign::contained;
use crate::model::Config;
use crate::text::{Tokenizer, TokenizerFiles};
use crate::{Error, Result};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const TYPES: &str = "tokenizer.ggml.token_type";
const SCORES: &str = "tokenizer.ggml.scores";
const MERGES: &str = "tokenizer.ggml.merges";
const ADD_BOS: &str = "tokenizer.ggml.add_bos_token";
const ADD_EOS: &str = "tokenizer.ggml.add_eos_token";
const ADD_PREFIX: &str = "tokenizer.ggml.add_space_prefix";
const BOS: &str = "tokenizer.ggml.bos_token_id";
const EOS: &str = "tokenizer.ggml.eos_token_id";
const EOT: &str = "tokenizer.ggml.eot_token_id";
const EOM: &str = "tokenizer.ggml.eom_token_id";
const UNK: &str = "tokenizer.ggml.unknown_token_id";
const PAD: &str = "tokenizer.ggml.padding_token_id";
const TEMPLATE: &str = "tokenizer.chat_template";
const TEMPLATES: &str = "tokenizer.chat_templates";
const WHOLE: &str = "tokenizer.huggingface.json";
const NAME: &str = "general.name";

/// What stands for a space in SentencePiece's tokens.
const SPACE: char = '▁';
/// The longest token, in bytes, whose merges are made: their number grows with the length, their making with its square.
const LONGEST_MERGED: usize = 512;
/// The bytes of the halves of all merges that are made, at most: tokens of one letter, each longer by one than the one before,
/// have as many merges as the square of their number, where real vocabularies have a few a token. In memory a short merge is
/// some 15 times as large as its halves, so this is about 1 GB while a tokenizer is read.
const MOST_MERGED: usize = 64 << 20;
/// More than that are in no vocabulary.
const MOST_TOKENS: usize = 1 << 24;

/// `tokenizer.ggml.token_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Type {
    Normal = 1,
    Unknown = 2,
    Control = 3,
    UserDefined = 4,
    Unused = 5,
    Byte = 6,
}

impl Type {
    fn from_number(number: i128) -> Option<Self> {
        const ALL: [Type; 6] = [
            Type::Normal,
            Type::Unknown,
            Type::Control,
            Type::UserDefined,
            Type::Unused,
            Type::Byte,
        ];
        ALL.into_iter().find(|kind| *kind as i128 == number)
    }
}

/// Texts of tokens that end what a model writes, of the families that this library has; llama.cpp knows them by
/// their texts, too.
const ENDS: [&str; 8] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "</s>",
];

/// The vocabulary of a file.
struct Vocabulary<'a> {
    tokens: Vec<&'a str>,
    types: Vec<Type>,
}

impl Vocabulary<'_> {
    fn text(&self, id: Option<usize>) -> Option<&str> {
        self.tokens.get(id?).copied()
    }

    /// Tokens with their ids that are part of the tokenizer.
    fn used(&self) -> impl Iterator<Item = (usize, &str, Type)> {
        let both = self.tokens.iter().zip(&self.types).enumerate();
        both.map(|(id, (token, kind))| (id, *token, *kind))
            .filter(|(_, token, kind)| *kind != Type::Unused && !token.is_empty())
    }
}

/// The files of the tokenizer in a file.
pub(super) fn read(file: &Container) -> Result<TokenizerFiles> {
    let Some(model) = file.text(MODEL)? else {
        return Err(file.invalid(MODEL, "missing; the file has no tokenizer"));
    };
    let templates = templates(file)?;
    if matches!(model, "none" | "no_vocab") {
        let Some(whole) = file.text(WHOLE)? else {
            return Err(file.invalid(MODEL, format!("is {model:?}; the file has no tokenizer")));
        };
        let description: Value =
            files::parse_json(whole.as_bytes()).map_err(|message| file.invalid(WHOLE, message))?;
        let texts = token_texts(&description);
        let text = |id: usize| texts.get(&id).cloned();
        let (tokenizer_config, generation_config) = special(file, text, Vec::new())?;
        return Ok(TokenizerFiles {
            tokenizer: whole.as_bytes().to_vec(),
            tokenizer_config,
            generation_config,
            chat_templates: templates,
        });
    }
    let vocabulary = vocabulary(file)?;
    let text = |id: usize| vocabulary.text(Some(id)).map(String::from);
    let ends = match file.has(EOT) {
        true => Vec::new(),
        false => vocabulary
            .used()
            .filter(|(_, token, kind)| *kind == Type::Control && ENDS.contains(token))
            .map(|(id, ..)| id)
            .collect(),
    };
    let (mut tokenizer_config, generation_config) = special(file, text, ends)?;
    let description = match model {
        "gpt2" => byte_pairs(file, &vocabulary, &mut tokenizer_config)?,
        "llama" => sentence_piece(file, &vocabulary, &mut tokenizer_config)?,
        other => {
            return Err(Error::Unsupported(format!(
                "{}: {MODEL} = {:?}; gpt2 and llama are supported",
                file.path().display(),
                cut(other)
            )));
        }
    };
    Ok(TokenizerFiles {
        tokenizer: description.to_string().into_bytes(),
        tokenizer_config,
        generation_config,
        chat_templates: templates,
    })
}

fn vocabulary(file: &Container) -> Result<Vocabulary<'_>> {
    let Some(tokens) = file.texts(TOKENS)? else {
        return Err(file.invalid(TOKENS, "missing; a tokenizer needs it"));
    };
    if tokens.len() > MOST_TOKENS {
        let message = format!("has {} tokens; at most {MOST_TOKENS} are allowed", tokens.len());
        return Err(file.invalid(TOKENS, message));
    }
    let types = match file.whole_numbers(TYPES)? {
        None => vec![Type::Normal; tokens.len()],
        Some(types) if types.len() != tokens.len() => {
            return Err(file.invalid(
                TYPES,
                format!("has {} entries; there are {} tokens", types.len(), tokens.len()),
            ));
        }
        // A type of 0 is none in particular.
        Some(types) => types
            .into_iter()
            .map(|number| Type::from_number(number).unwrap_or(Type::Normal))
            .collect(),
    };
    let vocabulary = Vocabulary { tokens, types };
    let mut seen = HashSet::new();
    if let Some((id, token, _)) = vocabulary.used().find(|(_, token, _)| !seen.insert(*token)) {
        let message = format!("token {id}, {:?}, comes twice", cut(token));
        return Err(file.invalid(TOKENS, message));
    }
    Ok(vocabulary)
}

/// The tokens of a `tokenizer.json` by id.
fn token_texts(description: &Value) -> HashMap<usize, String> {
    let id = |value: &Value| value.as_u64().and_then(|id| usize::try_from(id).ok());
    let vocabulary = description.pointer("/model/vocab").and_then(Value::as_object);
    let of_model = vocabulary
        .into_iter()
        .flatten()
        .filter_map(|(token, value)| Some((id(value)?, token.clone())));
    let added = description.get("added_tokens").and_then(Value::as_array);
    let of_added = added.into_iter().flatten().filter_map(|token| {
        Some((id(token.get("id")?)?, token.get("content")?.as_str()?.to_string()))
    });
    of_model.chain(of_added).collect()
}

/// The special tokens, as `tokenizer_config.json` and `generation_config.json` name them.
fn special(
    file: &Container,
    text: impl Fn(usize) -> Option<String>,
    more_ends: Vec<usize>,
) -> Result<(Map<String, Value>, Map<String, Value>)> {
    let (mut by_name, mut by_id) = (Map::new(), Map::new());
    // SentencePiece's models have these where a file doesn't say.
    let default = |key: &str| match (file.text(MODEL), key) {
        (Ok(Some("llama")), BOS) => Some(1),
        (Ok(Some("llama")), EOS) => Some(2),
        (Ok(Some("llama")), UNK) => Some(0),
        _ => None,
    };
    let id_of = |key: &str| -> Result<Option<(usize, String)>> {
        let stated = file.count(key)?;
        let Some(id) = stated.or(default(key)) else { return Ok(None) };
        match text(id) {
            Some(text) => Ok(Some((id, text))),
            None if stated.is_none() => Ok(None),
            None => Err(file.invalid(key, format!("is {id}, which is no token"))),
        }
    };
    for (key, name, id_name) in [
        (BOS, "bos_token", Some("bos_token_id")),
        (EOS, "eos_token", None),
        (PAD, "pad_token", Some("pad_token_id")),
        (UNK, "unk_token", None),
    ] {
        if let Some((id, text)) = id_of(key)? {
            by_name.insert(name.into(), json!(text));
            if let Some(id_name) = id_name {
                by_id.insert(id_name.into(), json!(id));
            }
        }
    }
    let mut ends = Vec::new();
    for key in [EOS, EOT, EOM] {
        ends.extend(id_of(key)?.map(|(id, _)| id));
    }
    ends.extend(more_ends);
    let mut seen = BTreeSet::new();
    ends.retain(|id| seen.insert(*id));
    if !ends.is_empty() {
        by_id.insert("eos_token_id".into(), json!(ends));
    }
    by_name.insert("clean_up_tokenization_spaces".into(), json!(false));
    by_name.insert("tokenizer_class".into(), json!("PreTrainedTokenizerFast"));
    Ok((by_name, by_id))
}

fn templates(file: &Container) -> Result<Vec<(String, String)>> {
    let mut found = Vec::new();
    if let Some(template) = file.text(TEMPLATE)? {
        found.push(("default".to_string(), template.to_string()));
    }
    for name in file.texts(TEMPLATES)?.unwrap_or_default() {
        if let Some(template) = file.text(&format!("{TEMPLATE}.{name}"))? {
            found.push((name.to_string(), template.to_string()));
        }
    }
    Ok(found)
}

/// Whether the file has white space after special tokens belong to them, as Phi 3's does: nothing but its name says so.
fn strips(file: &Container) -> Result<bool> {
    let name = file.text(NAME)?.unwrap_or_default().to_lowercase();
    Ok(name.contains("phi-3") || name.contains("phi3"))
}

/// The special tokens of Phi 3 behind which white space stays.
const UNSTRIPPED: [&str; 3] = ["<unk>", "<s>", "<|endoftext|>"];

fn added_tokens(file: &Container, vocabulary: &Vocabulary) -> Result<Vec<Value>> {
    let strips = strips(file)?;
    let tokens = vocabulary.used().filter_map(|(id, token, kind)| {
        let special = match kind {
            Type::Control | Type::Unknown => true,
            Type::UserDefined => false,
            _ => return None,
        };
        let rstrip = strips && !UNSTRIPPED.contains(&token);
        Some(json!({ "id": id, "content": token, "single_word": false, "lstrip": false,
            "rstrip": rstrip, "normalized": false, "special": special }))
    });
    Ok(tokens.collect())
}

/// What is put around a text: the steps of the post-processor.
fn around(
    file: &Container,
    config: &mut Map<String, Value>,
    add_bos: bool,
) -> Result<Option<Value>> {
    let add_bos = file.flag(ADD_BOS)?.unwrap_or(add_bos);
    let add_eos = file.flag(ADD_EOS)?.unwrap_or(false);
    config.insert("add_bos_token".into(), json!(add_bos));
    config.insert("add_eos_token".into(), json!(add_eos));
    let (mut single, mut pair) = (Vec::new(), Vec::new());
    let mut tokens = Map::new();
    let mut special = |name: &str, key: &str, stated: bool| -> Result<Option<String>> {
        let Some(text) = config.get(name).and_then(Value::as_str) else {
            // A default without a token for it is nobody's wish.
            return match stated {
                true => Err(file.invalid(key, format!("is true, but no {name} is named"))),
                false => Ok(None),
            };
        };
        let id = file.count(key)?.or(match key {
            BOS => Some(1),
            _ => Some(2),
        });
        tokens.insert(text.into(), json!({ "id": text, "ids": [id], "tokens": [text] }));
        Ok(Some(text.to_string()))
    };
    let bos = match add_bos {
        true => special("bos_token", BOS, file.has(ADD_BOS))?,
        false => None,
    };
    let eos = match add_eos {
        true => special("eos_token", EOS, file.has(ADD_EOS))?,
        false => None,
    };
    if bos.is_none() && eos.is_none() {
        return Ok(None);
    }
    for (sequence, number) in [("A", 0), ("B", 1)] {
        let mut steps = Vec::new();
        let token = |text: &str| json!({ "SpecialToken": { "id": text, "type_id": number } });
        steps.extend(bos.as_deref().map(token));
        steps.push(json!({ "Sequence": { "id": sequence, "type_id": number } }));
        steps.extend(eos.as_deref().map(token));
        if number == 0 {
            single = steps.clone();
        }
        pair.extend(steps);
    }
    Ok(Some(json!({ "type": "TemplateProcessing", "single": single, "pair": pair,
        "special_tokens": tokens })))
}

/// A `tokenizer.json` of these parts.
fn description(parts: [(&str, Value); 6]) -> Value {
    let mut description = Map::new();
    description.insert("version".into(), json!("1.0"));
    description.insert("truncation".into(), Value::Null);
    description.insert("padding".into(), Value::Null);
    description.extend(parts.map(|(name, part)| (name.to_string(), part)));
    Value::Object(description)
}

fn bpe(vocabulary: &Vocabulary, merges: Vec<[&str; 2]>, rest: Value) -> Value {
    let tokens: Map<String, Value> =
        vocabulary.used().map(|(id, token, _)| (token.to_string(), json!(id))).collect();
    let mut model = json!({ "type": "BPE", "dropout": null, "continuing_subword_prefix": null,
        "end_of_word_suffix": null, "vocab": tokens, "merges": merges });
    if let (Value::Object(model), Value::Object(rest)) = (&mut model, rest) {
        model.extend(rest);
    }
    model
}

/// BPE of bytes.
fn byte_pairs(
    file: &Container,
    vocabulary: &Vocabulary,
    config: &mut Map<String, Value>,
) -> Result<Value> {
    let name = file.text(PRE)?.unwrap_or("default");
    let Some(pre) = PreTokenizer::named(name) else {
        return Err(Error::Unsupported(format!(
            "{}: {PRE} = {:?}; the supported pre-tokenizers are {}",
            file.path().display(),
            cut(name),
            PreTokenizer::known()
        )));
    };
    if !file.has(PRE) {
        tracing::warn!(
            "{}: doesn't say how a text is split into tokens ({PRE}); it is old, and its texts may be split as its \
             model never saw them. Convert the model again",
            file.path().display()
        );
    }
    let Some(merges) = file.texts(MERGES)? else {
        return Err(file.invalid(MERGES, "missing; a tokenizer of the model gpt2 needs it"));
    };
    let merges = merges
        .iter()
        .enumerate()
        .map(|(index, merge)| {
            // A token may begin with a space.
            let first = merge.chars().next().map_or(0, char::len_utf8);
            let space = merge.get(first..).and_then(|rest| rest.find(' ')).map(|at| first + at);
            space.and_then(|at| Some([merge.get(..at)?, merge.get(at + 1..)?])).ok_or_else(|| {
                let message = format!("number {index}, {:?}, is no pair of tokens", cut(merge));
                file.invalid(MERGES, message)
            })
        })
        .collect::<Result<Vec<_>>>()?;
    let model = bpe(
        vocabulary,
        merges,
        json!({ "unk_token": null, "fuse_unk": false, "byte_fallback": false,
            "ignore_merges": pre.ignore_merges }),
    );
    let bytes = json!({ "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false,
        "use_regex": false });
    let post = match around(file, config, pre.add_bos)? {
        Some(template) => json!({ "type": "Sequence", "processors": [bytes, template] }),
        None => bytes,
    };
    Ok(description([
        ("added_tokens", Value::Array(added_tokens(file, vocabulary)?)),
        ("normalizer", if pre.nfc { json!({ "type": "NFC" }) } else { Value::Null }),
        ("pre_tokenizer", pre.split.description()),
        ("post_processor", post),
        (
            "decoder",
            json!({ "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true }),
        ),
        ("model", model),
    ]))
}

/// SentencePiece's BPE.
fn sentence_piece(
    file: &Container,
    vocabulary: &Vocabulary,
    config: &mut Map<String, Value>,
) -> Result<Value> {
    let Some(scores) = file.floats(SCORES)? else {
        return Err(file.invalid(SCORES, "missing; a tokenizer of the model llama needs it"));
    };
    if scores.len() != vocabulary.tokens.len() {
        return Err(file.invalid(
            SCORES,
            format!("has {} entries; there are {} tokens", scores.len(), vocabulary.tokens.len()),
        ));
    }
    if file.has("tokenizer.ggml.remove_extra_whitespaces")
        && file.flag("tokenizer.ggml.remove_extra_whitespaces")? == Some(true)
    {
        let path = file.path().display();
        return Err(Error::Unsupported(format!(
            "{path}: tokenizer.ggml.remove_extra_whitespaces = true; white space is kept"
        )));
    }
    let prefix = file.flag(ADD_PREFIX)?.unwrap_or(true);
    config.insert("add_prefix_space".into(), json!(prefix));
    let pieces: Vec<(usize, &str)> = vocabulary
        .used()
        .filter(|(.., kind)| *kind == Type::Normal)
        .map(|(id, token, _)| (id, token))
        .collect();
    let mut order: Vec<(usize, &str, f32)> =
        pieces.iter().filter_map(|(id, token)| Some((*id, *token, *scores.get(*id)?))).collect();
    // Of equal ones, the first in the vocabulary is merged first.
    order.sort_by(|(_, _, a), (_, _, b)| b.total_cmp(a));
    let ids: HashMap<&str, usize> = pieces.iter().map(|(id, token)| (*token, *id)).collect();
    let (mut merges, mut bytes) = (Vec::new(), 0);
    for (id, token, _) in order {
        if token.len() > LONGEST_MERGED {
            let message = format!("token {id} has {} bytes; at most {LONGEST_MERGED}", token.len());
            return Err(file.invalid(TOKENS, message));
        }
        let found = pairs(token, &ids);
        bytes += found.len() * token.len();
        if bytes > MOST_MERGED {
            let message = format!(
                "its tokens are made of two others in more ways than a vocabulary's: the merges have more than {} MiB",
                MOST_MERGED >> 20
            );
            return Err(file.invalid(TOKENS, message));
        }
        merges.extend(found);
    }
    let unknown = config.get("unk_token").cloned().unwrap_or(Value::Null);
    let model = bpe(
        vocabulary,
        merges,
        json!({ "unk_token": unknown, "fuse_unk": true, "byte_fallback": true,
            "ignore_merges": false }),
    );
    let replace = |from: &str, to: &str| json!({ "type": "Replace", "pattern": { "String": from }, "content": to });
    let space = SPACE.to_string();
    let normalizer = match prefix {
        true => json!({ "type": "Sequence", "normalizers": [
            { "type": "Prepend", "prepend": space }, replace(" ", &space) ] }),
        false => replace(" ", &space),
    };
    let mut decoders =
        vec![replace(&space, " "), json!({ "type": "ByteFallback" }), json!({ "type": "Fuse" })];
    if prefix {
        decoders.push(json!({ "type": "Strip", "content": " ", "start": 1, "stop": 0 }));
    }
    Ok(description([
        ("added_tokens", Value::Array(added_tokens(file, vocabulary)?)),
        ("normalizer", normalizer),
        ("pre_tokenizer", Value::Null),
        ("post_processor", around(file, config, true)?.unwrap_or(Value::Null)),
        ("decoder", json!({ "type": "Sequence", "decoders": decoders })),
        ("model", model),
    ]))
}

/// The pairs of tokens that make a token, in the order in which transformers merges them.
fn pairs<'a>(token: &'a str, ids: &HashMap<&str, usize>) -> Vec<[&'a str; 2]> {
    let mut found: Vec<(usize, usize, [&str; 2])> = token
        .char_indices()
        .skip(1)
        .filter_map(|(at, _)| {
            let (left, right) = token.split_at_checked(at)?;
            Some((*ids.get(left)?, *ids.get(right)?, [left, right]))
        })
        .collect();
    found.sort();
    found.into_iter().map(|(.., pair)| pair).collect()
}

/// What happens to a tokenizer that llama.cpp cannot have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownTokenizer {
    /// The file isn't written.
    #[default]
    Refuse,
    /// The file has no vocabulary that llama.cpp knows, which then takes token ids alone, and the whole of
    /// `tokenizer.json` for who can use it, as this library can.
    KeepWhole,
}

/// Writes a tokenizer's files as metadata. Gives whether its special tokens take the white space behind them with
/// them, which the model's name has to say.
///
/// # Errors
/// [`Error::Unsupported`] for a tokenizer that llama.cpp would not have the same tokens of, with the reason, unless
/// `unknown` says otherwise; [`Error::File`] when the files are malformed.
pub(super) fn write(
    files: &TokenizerFiles,
    config: &Config,
    unknown: UnknownTokenizer,
    metadata: &mut Metadata,
) -> Result<bool> {
    let place = std::path::Path::new("tokenizer.json");
    let tokenizer = Tokenizer::from_files(place, files)?;
    let whole = std::str::from_utf8(&files.tokenizer)
        .map_err(|_| Error::file(place, "is no text in UTF-8"))?;
    let description: Value =
        files::parse_json(whole.as_bytes()).map_err(|message| Error::file(place, message))?;
    let source = Source { files, config, tokenizer: &tokenizer, description: &description };
    match source.vocabulary() {
        Ok(vocabulary) => vocabulary.write(metadata),
        Err(reason) if unknown == UnknownTokenizer::Refuse => {
            return Err(Error::Unsupported(format!(
                "a GGUF file with this tokenizer, of which llama.cpp would make other tokens: {reason}"
            )));
        }
        Err(reason) => {
            tracing::warn!("the GGUF file has no tokenizer for llama.cpp: {reason}");
            metadata.text(MODEL, "none");
            metadata.text(WHOLE, whole);
        }
    }
    source.write_special(metadata)?;
    for (index, (name, template)) in files.chat_templates.iter().enumerate() {
        // The first is everybody's where none is called so.
        let named = files.chat_templates.iter().any(|(name, _)| name == "default");
        let key = match name.as_str() {
            "default" => TEMPLATE.to_string(),
            _ if index == 0 && !named => TEMPLATE.to_string(),
            name => format!("{TEMPLATE}.{name}"),
        };
        metadata.text(&key, &without_generation(template));
    }
    let more = files.chat_templates.iter().map(|(name, _)| name.as_str());
    let named = files.chat_templates.iter().any(|(name, _)| name == "default");
    let more: Vec<&str> = more
        .enumerate()
        .filter(|(index, name)| *name != "default" && (named || *index > 0))
        .map(|(_, name)| name)
        .collect();
    if !more.is_empty() {
        metadata.texts(TEMPLATES, more);
    }
    Ok(source.is_phi3())
}

/// A template without the marks of what the model writes, which only transformers knows: blocks that are always there
/// instead, which leave white space as it was.
fn without_generation(template: &str) -> String {
    let replace = |text: &str, from: &str, to: &str| {
        let Ok(mark) = regex::Regex::new(&format!(r"\{{%([-+]?)\s*{from}\s*([-+]?)%\}}")) else {
            return text.to_string();
        };
        mark.replace_all(text, format!("{{%$1 {to} $2%}}")).into_owned()
    };
    replace(&replace(template, "generation", "if true"), "endgeneration", "endif")
}

/// A vocabulary as it is written.
struct Written {
    model: &'static str,
    pre: &'static str,
    tokens: Vec<String>,
    types: Vec<i32>,
    scores: Option<Vec<f32>>,
    merges: Option<Vec<String>>,
    prefix: Option<bool>,
    add_bos: bool,
    add_eos: bool,
}

impl Written {
    fn write(&self, metadata: &mut Metadata) {
        metadata.text(MODEL, self.model);
        metadata.text(PRE, self.pre);
        let tokens: Vec<&str> = self.tokens.iter().map(String::as_str).collect();
        metadata.texts(TOKENS, tokens);
        metadata.whole_numbers(TYPES, &self.types);
        if let Some(scores) = &self.scores {
            metadata.floats(SCORES, scores);
        }
        if let Some(merges) = &self.merges {
            let merges: Vec<&str> = merges.iter().map(String::as_str).collect();
            metadata.texts(MERGES, merges);
        }
        if let Some(prefix) = self.prefix {
            metadata.flag(ADD_PREFIX, prefix);
        }
        metadata.flag(ADD_BOS, self.add_bos);
        metadata.flag(ADD_EOS, self.add_eos);
    }
}

/// A tokenizer that is to be written. Reasons why it cannot be are texts.
struct Source<'a> {
    files: &'a TokenizerFiles,
    config: &'a Config,
    tokenizer: &'a Tokenizer,
    description: &'a Value,
}

/// A token that is looked for in a text before it is split.
struct Added<'a> {
    id: usize,
    content: &'a str,
    special: bool,
    normalized: bool,
}

impl<'a> Source<'a> {
    fn part(&self, name: &str) -> Option<&'a Value> {
        self.description.get(name).filter(|part| !part.is_null())
    }

    fn model(&self, key: &str) -> Option<&'a Value> {
        self.description.get("model")?.get(key).filter(|value| !value.is_null())
    }

    fn flag(&self, key: &str) -> bool {
        self.model(key).and_then(Value::as_bool).unwrap_or(false)
    }

    fn vocabulary(&self) -> Result<Written, String> {
        let kind = self.model("type").and_then(Value::as_str).unwrap_or("BPE");
        if kind != "BPE" {
            return Err(format!("its model is {kind}; BPE can be written"));
        }
        for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
            if self.model(key).and_then(Value::as_str).is_some_and(|text| !text.is_empty()) {
                return Err(format!("its model has a {key}"));
            }
        }
        match self.flag("byte_fallback") {
            true => self.sentence_piece(),
            false => self.byte_pairs(),
        }
    }

    /// Those that the model has a place for. A tokenizer may have more, as that of Gemma 3 without images does, and one that
    /// was given a `pad_token`: no text that the model can read has them.
    fn added(&self) -> Result<Vec<Added<'a>>, String> {
        let size = self.config.vocab_size;
        let tokens = self.description.get("added_tokens").and_then(Value::as_array);
        let (mut stripped, mut beyond) = (Vec::new(), Vec::new());
        let mut added = Vec::new();
        for token in tokens.into_iter().flatten() {
            let flag = |key: &str| token.get(key).and_then(Value::as_bool).unwrap_or(false);
            let id =
                token.get("id").and_then(Value::as_u64).and_then(|id| usize::try_from(id).ok());
            let content = token.get("content").and_then(Value::as_str);
            let (Some(id), Some(content)) = (id, content) else {
                return Err("an added token has no id or no content".into());
            };
            if id >= size {
                beyond.push(cut(content));
                continue;
            }
            if flag("lstrip") || flag("rstrip") || flag("single_word") {
                stripped.push(content);
            }
            let (special, normalized) = (flag("special"), flag("normalized"));
            added.push(Added { id, content, special, normalized });
        }
        if let Some(first) = beyond.first() {
            tracing::warn!(
                "the tokenizer has {} tokens beyond the model's vocabulary of {size}, such as {first:?}; the GGUF file is \
                 written without them, as the model has no weights for them",
                beyond.len()
            );
        }
        if !stripped.is_empty() && !self.is_phi3() {
            tracing::warn!(
                "{} tokens, such as {:?}, take white space around them with them, which llama.cpp doesn't do",
                stripped.len(),
                cut(stripped.first().unwrap_or(&""))
            );
        }
        Ok(added)
    }

    /// Whether its special tokens take the white space behind them with them as those of Phi 3 do.
    fn is_phi3(&self) -> bool {
        let tokens = self.description.get("added_tokens").and_then(Value::as_array);
        let flag = |token: &Value, key: &str| token.get(key).and_then(Value::as_bool) == Some(true);
        self.config.architecture.model_type() == "phi3"
            && tokens.is_some_and(|tokens| {
                tokens.iter().any(|token| flag(token, "rstrip"))
                    && tokens.iter().all(|token| {
                        let content = token.get("content").and_then(Value::as_str);
                        let stripped = !content.is_some_and(|text| UNSTRIPPED.contains(&text));
                        flag(token, "rstrip") == stripped
                            && !flag(token, "lstrip")
                            && !flag(token, "single_word")
                    })
            })
    }

    /// Tokens by id, with a type for each; those that nothing says become `[PAD<id>]`.
    fn tokens(
        &self,
        added: &[Added],
        kind: impl Fn(&str) -> Type,
    ) -> Result<(Vec<String>, Vec<i32>), String> {
        let vocab =
            self.model("vocab").and_then(Value::as_object).ok_or("its model has no vocabulary")?;
        let mut tokens: Vec<Option<(String, Type)>> = vec![None; self.config.vocab_size];
        let mut set = |id: Option<usize>, token: String, kind: Type| {
            let size = self.config.vocab_size;
            match id.and_then(|id| tokens.get_mut(id)) {
                Some(slot) => {
                    *slot = Some((token, kind));
                    Ok(())
                }
                None => Err(format!(
                    "its token {:?} has no place in the model's vocabulary of {size}",
                    cut(&token)
                )),
            }
        };
        for (token, id) in vocab {
            let id = id.as_u64().and_then(|id| usize::try_from(id).ok());
            set(id, token.clone(), kind(token))?;
        }
        for token in added {
            let (content, kind) = match (token.special, kind(token.content)) {
                (_, Type::Unknown) => (token.content.to_string(), Type::Unknown),
                (true, _) => (token.content.to_string(), Type::Control),
                // It is looked for in a text whose spaces are replaced already.
                (false, _) if token.normalized => {
                    (token.content.replace(SPACE, " "), Type::UserDefined)
                }
                (false, _) => (token.content.to_string(), Type::UserDefined),
            };
            set(Some(token.id), content, kind)?;
        }
        let mut seen = HashSet::new();
        let mut texts = Vec::with_capacity(tokens.len());
        let mut types = Vec::with_capacity(tokens.len());
        for (id, token) in tokens.into_iter().enumerate() {
            let (text, kind) = token.unwrap_or_else(|| (format!("[PAD{id}]"), Type::Unused));
            if text.is_empty() || !seen.insert(text.clone()) {
                return Err(format!("its token {id}, {:?}, is empty or comes twice", cut(&text)));
            }
            texts.push(text);
            types.push(kind as i32);
        }
        Ok((texts, types))
    }

    fn merges(&self) -> Result<Vec<[&'a str; 2]>, String> {
        let merges = self.model("merges").and_then(Value::as_array);
        let pair = |merge: &'a Value| match merge {
            Value::String(text) => text.split_once(' ').map(|(left, right)| [left, right]),
            Value::Array(pair) => match pair.as_slice() {
                [left, right] => Some([left.as_str()?, right.as_str()?]),
                _ => None,
            },
            _ => None,
        };
        let merges = merges.into_iter().flatten();
        merges.map(|merge| pair(merge).ok_or_else(|| "a merge is no pair".into())).collect()
    }

    fn byte_pairs(&self) -> Result<Written, String> {
        match self.part("normalizer") {
            None => {}
            // llama.cpp doesn't normalise; most texts are in this form already.
            Some(normalizer) if normalizer.get("type") == Some(&json!("NFC")) => {}
            Some(other) => return Err(format!("its normalizer is {}", files_short(other))),
        }
        let Some(pre_tokenizer) = self.part("pre_tokenizer") else {
            return Err("it has no pre-tokenizer".into());
        };
        let Some(like) = PreTokenizer::like(pre_tokenizer) else {
            return Err(format!(
                "its pre-tokenizer is {}; those of {} are known",
                files_short(pre_tokenizer),
                PreTokenizer::known()
            ));
        };
        let ignores = self.flag("ignore_merges");
        let added = self.added()?;
        let pre = match like.iter().find(|pre| pre.ignore_merges == ignores) {
            Some(pre) => pre,
            // Where merges lead to every token, it makes no difference.
            None if self.merges_reach_every_token(&added)? => {
                like.first().ok_or("no pre-tokenizer")?
            }
            None => {
                return Err(format!(
                    "its ignore_merges is {ignores}, and some of its tokens are no merges of others; llama.cpp has the \
                     other way with its pre-tokenizer"
                ));
            }
        };
        let (tokens, types) = self.tokens(&added, |_| Type::Normal)?;
        let merge = |[left, right]: [&str; 2]| match left.contains(' ') || right.contains(' ') {
            true => Err("a merge has a space in it".to_string()),
            false => Ok(format!("{left} {right}")),
        };
        let merges = self.merges()?.into_iter().map(merge).collect::<Result<_, String>>()?;
        let (add_bos, add_eos) = self.around()?;
        Ok(Written {
            model: "gpt2",
            pre: pre.name(),
            tokens,
            types,
            scores: None,
            merges: Some(merges),
            prefix: None,
            add_bos,
            add_eos,
        })
    }

    /// Whether BPE makes each token of its text again.
    fn merges_reach_every_token(&self, added: &[Added]) -> Result<bool, String> {
        let mut model = self.description.get("model").cloned().unwrap_or(Value::Null);
        if let Value::Object(model) = &mut model {
            model.insert("ignore_merges".into(), json!(false));
            model.insert("type".into(), json!("BPE"));
        }
        let added: HashSet<usize> = added.iter().map(|token| token.id).collect();
        let reached = contained(|| {
            let model: BPE =
                serde_json::from_str(&model.to_string()).map_err(|error| error.to_string())?;
            for (token, id) in model.get_vocab() {
                if added.contains(&(id as usize)) {
                    continue;
                }
                let found = model.tokenize(&token).map_err(|error| error.to_string())?;
                if found.len() != 1 {
                    return Ok(false);
                }
            }
            Ok(true)
        });
        reached.unwrap_or_else(Err)
    }

    fn sentence_piece(&self) -> Result<Written, String> {
        let prefix = self.prefix()?;
        let unknown = self.model("unk_token").and_then(Value::as_str);
        let kind = |token: &str| {
            let byte = token.strip_prefix("<0x").and_then(|rest| rest.strip_suffix('>'));
            match byte.map(|digits| digits.len() == 2 && u8::from_str_radix(digits, 16).is_ok()) {
                Some(true) => Type::Byte,
                _ if Some(token) == unknown => Type::Unknown,
                _ => Type::Normal,
            }
        };
        let added = self.added()?;
        let (tokens, types) = self.tokens(&added, kind)?;
        let ids: HashMap<&str, usize> = tokens
            .iter()
            .zip(&types)
            .enumerate()
            .filter(|(_, (_, kind))| **kind == Type::Normal as i32)
            .map(|(id, (token, _))| (token.as_str(), id))
            .collect();

        // A token's score follows from its place among the results of merges, which SentencePiece makes of all pairs.
        let merges = self.merges()?;
        let mut scores = vec![0.0; tokens.len()];
        let mut last = None;
        let (mut made, mut counted) = (HashSet::new(), 0usize);
        for [left, right] in &merges {
            let result = format!("{left}{right}");
            let Some(id) = ids.get(result.as_str()).copied() else { continue };
            counted += 1;
            if last != Some(id) && !made.insert(id) {
                return Err(format!(
                    "its merges that make {:?} don't follow each other, so no score of a token says their order",
                    cut(&result)
                ));
            }
            last = Some(id);
            if let Some(score) = scores.get_mut(id) {
                *score = -(made.len() as f32);
            }
        }
        let mut expected = 0;
        for token in ids.keys() {
            if token.len() > LONGEST_MERGED {
                return Err(format!("a token has {} bytes", token.len()));
            }
            let pairs = pairs(token, &ids);
            expected += pairs.len();
            if let Some([left, right]) = pairs.first()
                && !ids.get(token).is_some_and(|id| made.contains(id))
            {
                return Err(lacking(left, right));
            }
        }
        if expected != counted {
            let known: HashSet<[&str; 2]> = merges.iter().copied().collect();
            let all = ids.keys().flat_map(|token| pairs(token, &ids));
            let lacks = all.into_iter().filter(|pair| !known.contains(pair)).min();
            return Err(match lacks {
                Some([left, right]) => lacking(left, right),
                None => "some of its merges come twice".into(),
            });
        }
        let least = made.len() as f32;
        for (id, score) in scores.iter_mut().enumerate() {
            if !made.contains(&id) && types.get(id) == Some(&(Type::Normal as i32)) {
                *score = -(least + 1.0 + id as f32);
            }
        }
        let (add_bos, add_eos) = self.around()?;
        Ok(Written {
            model: "llama",
            pre: "default",
            tokens,
            types,
            scores: Some(scores),
            merges: None,
            prefix: Some(prefix),
            add_bos,
            add_eos,
        })
    }

    /// Whether a space is put before a text, of what replaces its spaces.
    fn prefix(&self) -> Result<bool, String> {
        let space = SPACE.to_string();
        let replaces = |step: &Value| {
            step.get("type") == Some(&json!("Replace"))
                && step.pointer("/pattern/String") == Some(&json!(" "))
                && step.get("content") == Some(&json!(space))
        };
        let prepends = |step: &Value| {
            step.get("type") == Some(&json!("Prepend"))
                && step.get("prepend") == Some(&json!(space))
        };
        // Where spaces are replaced already, splitting at them does nothing.
        let idle = |step: &Value| {
            step.get("type") == Some(&json!("Split"))
                && step.pointer("/pattern/String") == Some(&json!(" "))
        };
        let normalizer = self.part("normalizer");
        let pre_tokenizer = self.part("pre_tokenizer");
        match (normalizer, pre_tokenizer) {
            (Some(normalizer), pre) if pre.is_none_or(idle) => {
                let steps = normalizer.get("normalizers").and_then(Value::as_array);
                match steps.map(Vec::as_slice) {
                    Some([first, second]) if prepends(first) && replaces(second) => Ok(true),
                    Some([only]) if replaces(only) => Ok(false),
                    None if replaces(normalizer) => Ok(false),
                    _ => Err(format!("its normalizer is {}", files_short(normalizer))),
                }
            }
            (None, Some(pre))
                if pre.get("type") == Some(&json!("Metaspace"))
                    && pre.get("replacement") == Some(&json!(space))
                    && pre.get("split") == Some(&json!(false)) =>
            {
                match pre.get("prepend_scheme").and_then(Value::as_str) {
                    None | Some("always") => Ok(true),
                    Some("never") => Ok(false),
                    // llama.cpp puts one behind each special token or nowhere.
                    Some("first") => {
                        let chat = !self.files.chat_templates.is_empty();
                        tracing::warn!(
                            "the tokenizer puts a space before the beginning of a text alone; in the GGUF file it is {}",
                            match chat {
                                true => "left out, which is right for rendered conversations",
                                false => "put behind special tokens, too",
                            }
                        );
                        Ok(!chat)
                    }
                    Some(other) => Err(format!("its prepend_scheme is {:?}", cut(other))),
                }
            }
            _ => Err("spaces are not replaced as SentencePiece does".into()),
        }
    }

    /// Whether the beginning and the end of a text get a token.
    fn around(&self) -> Result<(bool, bool), String> {
        let Some(post) = self.part("post_processor") else { return Ok((false, false)) };
        let steps = match post.get("processors").and_then(Value::as_array) {
            Some(steps) => steps.iter().collect(),
            None => vec![post],
        };
        let mut found = (false, false);
        for step in steps {
            match step.get("type").and_then(Value::as_str) {
                Some("ByteLevel") => {}
                Some("TemplateProcessing") => {
                    let single = step.get("single").and_then(Value::as_array);
                    let single: Vec<Option<&str>> = single
                        .into_iter()
                        .flatten()
                        .map(|part| part.pointer("/SpecialToken/id").and_then(Value::as_str))
                        .collect();
                    let is = |token: &str, id: Option<u32>| {
                        id.is_some() && self.tokenizer.token_to_id(token) == id
                    };
                    let bos = |token: &str| is(token, self.tokenizer.bos_id());
                    let eos = |token: &str| is(token, self.tokenizer.eos_id());
                    found = match single.as_slice() {
                        [None] => (false, false),
                        [Some(first), None] if bos(first) => (true, false),
                        [None, Some(last)] if eos(last) => (false, true),
                        [Some(first), None, Some(last)] if bos(first) && eos(last) => (true, true),
                        _ => {
                            return Err(
                                "what its post-processor puts around a text is not bos_token and eos_token"
                                    .into(),
                            );
                        }
                    };
                }
                other => {
                    return Err(format!(
                        "its post-processor is {}",
                        cut(other.unwrap_or("of no type"))
                    ));
                }
            }
        }
        Ok(found)
    }

    fn write_special(&self, metadata: &mut Metadata) -> Result<()> {
        let mut id = |key: &str, id: Option<u32>| match id {
            Some(id) => metadata.count(key, id as usize),
            None => Ok(()),
        };
        let named = |name: &str| {
            let token = self.files.tokenizer_config.get(name)?;
            let token = token.as_str().or_else(|| token.get("content")?.as_str())?;
            self.tokenizer.token_to_id(token)
        };
        // An id that no token has, as a configuration's default may be, would make the file unreadable.
        let is_token = |id: &u32| (*id as usize) < self.config.vocab_size;
        let ends = self.tokenizer.eos_ids().iter().copied().filter(is_token);
        let first = self.tokenizer.eos_id().filter(is_token).or(ends.clone().next());
        let mut others = ends.filter(|id| Some(*id) != first);
        id(BOS, self.tokenizer.bos_id().filter(is_token))?;
        id(EOS, first)?;
        // Said even where it is the same, as readers look for one by its text otherwise.
        id(EOT, others.next().or(first))?;
        id(EOM, others.next())?;
        id(UNK, named("unk_token").filter(is_token))?;
        id(PAD, self.tokenizer.pad_id().filter(is_token))?;
        for other in others {
            let text = self.tokenizer.id_to_token(other).unwrap_or_default();
            if !ENDS.contains(&text.as_str()) {
                return Err(Error::Unsupported(format!(
                    "a GGUF file of a model whose texts end with {:?}, too: GGUF names three such tokens",
                    cut(&text)
                )));
            }
        }
        Ok(())
    }
}

fn lacking(left: &str, right: &str) -> String {
    format!(
        "its vocabulary has {:?} but no merge of {:?} and {:?}, which SentencePiece would make",
        cut(&format!("{left}{right}")),
        cut(left),
        cut(right)
    )
}

fn files_short(value: &Value) -> String {
    cut_to(&value.to_string(), 200)
}

#[cfg(test)]
mod tests {
    use super::super::testing::{fixture, fixture_folder};
    use super::super::writer::write_container;
    use super::*;

    /// What is read of metadata.
    fn found(metadata: &Metadata) -> Result<TokenizerFiles> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.gguf");
        write_container(&path, metadata, &[], |_| Ok(Vec::new())).unwrap();
        read(&Container::open(&path).unwrap())
    }

    /// Metadata of two letters and two more tokens, but for what `change` does.
    fn small(model: &str, without: &[&str], change: impl Fn(&mut Metadata)) -> Metadata {
        let mut metadata = Metadata::default();
        change(&mut metadata);
        let has = |key: &str| !without.contains(&key);
        metadata.text(MODEL, model);
        if has(TOKENS) {
            metadata.texts(TOKENS, ["a", "b", "ab", "<x>"]);
        }
        if has(TYPES) {
            metadata.whole_numbers(TYPES, &[1, 1, 1, 3]);
        }
        if has(SCORES) && model == "llama" {
            metadata.floats(SCORES, &[-3.0, -2.0, -1.0, 0.0]);
        }
        if has(MERGES) && model == "gpt2" {
            metadata.texts(MERGES, ["a b"]);
        }
        if has(PRE) {
            metadata.text(PRE, "gpt-2");
        }
        metadata
    }

    #[test]
    fn what_is_wrong_with_a_vocabulary_is_told_by_its_key() {
        assert!(found(&small("gpt2", &[], |_| {})).is_ok());
        assert!(found(&small("gpt2", &[TYPES, PRE], |_| {})).is_ok());
        for (metadata, expected) in [
            (Metadata::default(), "tokenizer.ggml.model: missing"),
            (small("none", &[], |_| {}), "the file has no tokenizer"),
            (small("rwkv", &[], |_| {}), "tokenizer.ggml.model = \"rwkv\""),
            (small("gpt2", &[TOKENS], |_| {}), "tokenizer.ggml.tokens: missing"),
            (small("gpt2", &[MERGES], |_| {}), "tokenizer.ggml.merges: missing"),
            (small("llama", &[SCORES], |_| {}), "tokenizer.ggml.scores: missing"),
            (
                small("gpt2", &[PRE], |it| it.text(PRE, "bert")),
                "tokenizer.ggml.pre = \"bert\"; the supported pre-tokenizers are llama-bpe",
            ),
            (
                small("gpt2", &[MERGES], |it| it.texts(MERGES, ["a b", "ab"])),
                "number 1, \"ab\", is no pair",
            ),
            (
                small("gpt2", &[TYPES], |it| it.whole_numbers(TYPES, &[1])),
                "has 1 entries; there are 4 tokens",
            ),
            (
                small("llama", &[SCORES], |it| it.floats(SCORES, &[1.0])),
                "has 1 entries; there are 4 tokens",
            ),
            (
                small("gpt2", &[TOKENS], |it| it.texts(TOKENS, ["a", "b", "a", "c"])),
                "token 2, \"a\", comes twice",
            ),
            (
                small("gpt2", &[], |it| it.count(BOS, 9).unwrap()),
                "tokenizer.ggml.bos_token_id: is 9, which is no token",
            ),
            (small("gpt2", &[], |it| it.flag(ADD_BOS, true)), "is true, but no bos_token is named"),
            (
                small("llama", &[TOKENS], |it| {
                    let long = "a".repeat(600);
                    it.texts(TOKENS, ["a", "b", long.as_str(), "c"]);
                }),
                "token 2 has 600 bytes",
            ),
            (
                small("llama", &[TOKENS, TYPES, SCORES], |it| {
                    let runs = |letter: &'static str| (1..=512).map(|count| letter.repeat(count));
                    let tokens: Vec<String> = runs("a").chain(runs("b")).collect();
                    let tokens: Vec<&str> = tokens.iter().map(String::as_str).collect();
                    it.floats(SCORES, &vec![0.0; tokens.len()]);
                    it.texts(TOKENS, tokens);
                }),
                "tokenizer.ggml.tokens: its tokens are made of two others in more ways",
            ),
        ] {
            let error = found(&metadata).unwrap_err().to_string();
            assert!(error.contains(expected), "{error} lacks {expected}");
            assert!(error.contains("a.gguf"), "{error}");
        }
    }

    #[test]
    fn merges_follow_from_scores() {
        let metadata = small("llama", &[TOKENS, TYPES, SCORES], |it| {
            it.texts(TOKENS, ["<unk>", "<s>", "</s>", "a", "b", "ab", "aa", "aab"]);
            it.whole_numbers(TYPES, &[2, 3, 3, 1, 1, 1, 1, 1]);
            it.floats(SCORES, &[0.0, 0.0, 0.0, -9.0, -9.0, -1.0, -2.0, -3.0]);
        });
        let files = found(&metadata).unwrap();
        let description: Value = serde_json::from_slice(&files.tokenizer).unwrap();
        assert_eq!(
            description["model"]["merges"],
            json!([["a", "b"], ["a", "a"], ["a", "ab"], ["aa", "b"]])
        );
        let tokenizer = Tokenizer::from_files(std::path::Path::new("a"), &files).unwrap();
        // The better pair goes first, though another stands before it.
        assert_eq!(tokenizer.encode("aab", true).unwrap()[..1], [1]);
        let description = description.to_string();
        assert!(description.contains("\"prepend\":\"▁\""), "{description}");
    }

    #[test]
    fn three_end_tokens_are_kept_and_more_are_refused() {
        let mut files = TokenizerFiles::read(&fixture_folder("tokenizer")).unwrap();
        let mut config = fixture("llama");
        config.vocab_size = 400;
        let mut write = |ids: Value| -> Result<TokenizerFiles> {
            files.generation_config.insert("eos_token_id".into(), ids);
            let mut metadata = Metadata::default();
            super::write(&files, &config, UnknownTokenizer::Refuse, &mut metadata)?;
            found(&metadata)
        };
        for ids in [json!([362, 360, 369]), json!([362, 360]), json!([362])] {
            let read = write(ids.clone()).unwrap();
            let unique = read.generation_config["eos_token_id"].clone();
            assert_eq!(unique, ids);
        }
        // One that everybody knows by its text, and one that nobody does.
        assert!(write(json!([362, 360, 369, 371])).is_ok());
        // What no token has can end nothing.
        let read = write(json!([9999, 362, 32000])).unwrap();
        assert_eq!(read.generation_config["eos_token_id"], json!([362]));
        let error = write(json!([362, 360, 369, 365])).unwrap_err().to_string();
        assert!(error.contains("\"<pad>\""), "{error}");
    }

    #[test]
    fn tokenizers_that_llama_cpp_cannot_have_are_refused_with_the_reason() {
        let mut config = fixture("llama");
        config.vocab_size = 500;
        let reason = |folder: &str, change: &dyn Fn(&mut Value), size: usize| {
            let mut files = TokenizerFiles::read(&fixture_folder(folder)).unwrap();
            let mut description: Value = serde_json::from_slice(&files.tokenizer).unwrap();
            change(&mut description);
            files.tokenizer = description.to_string().into_bytes();
            let config = Config { vocab_size: size, ..config.clone() };
            let mut metadata = Metadata::default();
            match super::write(&files, &config, UnknownTokenizer::Refuse, &mut metadata) {
                Ok(_) => "written".to_string(),
                Err(error) => error.to_string(),
            }
        };
        let (bytes, pieces) = ("tokenizer", "tokenizer-sp");
        for (found, expected) in [
            (reason(bytes, &|_| {}, 500), "written"),
            (reason(bytes, &|it| it["normalizer"] = json!({ "type": "NFC" }), 500), "written"),
            // Merges reach every token of this one.
            (reason(bytes, &|it| it["model"]["ignore_merges"] = json!(true), 500), "written"),
            (
                reason(bytes, &|it| it["normalizer"] = json!({ "type": "Lowercase" }), 500),
                "its normalizer is",
            ),
            (
                reason(
                    bytes,
                    &|it| it["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("a+"),
                    500,
                ),
                "its pre-tokenizer is",
            ),
            (
                reason(
                    bytes,
                    &|it| {
                        it["post_processor"] = json!({ "type": "TemplateProcessing",
                    "single": [{ "SpecialToken": { "id": "<pad>", "type_id": 0 } },
                        { "Sequence": { "id": "A", "type_id": 0 } }],
                    "pair": [{ "Sequence": { "id": "A", "type_id": 0 } }, { "Sequence": { "id": "B", "type_id": 0 } }],
                    "special_tokens": { "<pad>": { "id": "<pad>", "ids": [365], "tokens": ["<pad>"] } } })
                    },
                    500,
                ),
                "is not bos_token and eos_token",
            ),
            (reason(bytes, &|_| {}, 359), "has no place in the model's vocabulary of 359"),
            (
                reason(
                    bytes,
                    &|it| {
                        it["model"] =
                            json!({ "type": "WordLevel", "vocab": { "a": 0 }, "unk_token": "a" })
                    },
                    500,
                ),
                "its model is WordLevel",
            ),
            // It was trained, so it lacks merges that SentencePiece would make.
            (reason(pieces, &|_| {}, 500), "which SentencePiece would make"),
            (reason(pieces, &|it| it["normalizer"] = Value::Null, 500), "spaces are not replaced"),
            (
                reason(
                    pieces,
                    &|it| {
                        let merges = it["model"]["merges"].as_array_mut().unwrap();
                        merges.push(merges[0].clone());
                    },
                    500,
                ),
                "so no score of a token says their order",
            ),
        ] {
            assert!(found.contains(expected), "{found} lacks {expected}");
        }
    }

    #[test]
    fn added_tokens_without_a_place_in_the_model_are_left_out() {
        let files = TokenizerFiles::read(&fixture_folder("tokenizer")).unwrap();
        let written = |size: usize| {
            let config = Config { vocab_size: size, ..fixture("llama") };
            let mut metadata = Metadata::default();
            super::write(&files, &config, UnknownTokenizer::Refuse, &mut metadata).unwrap();
            Tokenizer::from_files(std::path::Path::new("a"), &found(&metadata).unwrap()).unwrap()
        };
        // The fixture's last token is 377; <think> is 374.
        let (whole, cut) = (written(378), written(374));
        assert_eq!(whole.token_to_id("<think>"), Some(374));
        assert_eq!(cut.token_to_id("<think>"), None);
        assert_eq!(cut.token_to_id("[/INST]"), whole.token_to_id("[/INST]"));
        let text = "[INST] one two [/INST]";
        assert_eq!(cut.encode(text, false).unwrap(), whole.encode(text, false).unwrap());
    }

    #[test]
    fn marks_of_what_the_model_writes_become_blocks_that_always_are() {
        let template = "{%- generation %}a{% endgeneration -%} {%generation%}{{ generation }}";
        assert_eq!(
            without_generation(template),
            "{%- if true %}a{% endif -%} {% if true %}{{ generation }}"
        );
    }

    #[test]
    fn white_space_behind_the_special_tokens_of_phi_3_belongs_to_them() {
        let metadata = small("llama", &[TOKENS, TYPES, SCORES], |it| {
            it.text(NAME, "Phi-3 mini");
            it.texts(TOKENS, ["<unk>", "<s>", "</s>", "▁", "<|end|>"]);
            it.whole_numbers(TYPES, &[2, 3, 3, 1, 3]);
            it.floats(SCORES, &[0.0; 5]);
        });
        let files = found(&metadata).unwrap();
        let description: Value = serde_json::from_slice(&files.tokenizer).unwrap();
        let flags: Vec<bool> = description["added_tokens"]
            .as_array()
            .unwrap()
            .iter()
            .map(|token| token["rstrip"].as_bool().unwrap())
            .collect();
        assert_eq!(flags, [false, false, true, true]);
        // And back.
        let config = Config { vocab_size: 5, ..fixture("phi3") };
        let mut written = Metadata::default();
        assert!(super::write(&files, &config, UnknownTokenizer::KeepWhole, &mut written).unwrap());
        let config = Config { vocab_size: 5, ..fixture("llama") };
        let mut written = Metadata::default();
        assert!(!super::write(&files, &config, UnknownTokenizer::KeepWhole, &mut written).unwrap());
    }
}
