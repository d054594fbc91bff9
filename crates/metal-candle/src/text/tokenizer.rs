//! A model folder's tokenizer: `tokenizer.json`, its special tokens, its chat templates, and the tokens that end a text.
//!
//! | what | from |
//! |---|---|
//! | vocabulary, merges, normalisation | `tokenizer.json` |
//! | `bos_token`, `eos_token`, `pad_token`, `unk_token`, ... | `tokenizer_config.json`, then `special_tokens_map.json` |
//! | more tokens that templates know by name | `extra_special_tokens`, when it is an object, and all keys that end in `_token` in `tokenizer_config.json` |
//! | chat templates | `chat_template.jinja` and `additional_chat_templates/*.jinja`, then `chat_template` in `tokenizer_config.json`, then `chat_template.json` |
//! | token ids that end a generation | `eos_token_id` (one or a list) in `generation_config.json`, then in `config.json`, then the id of `eos_token` |
//! | ids of the beginning and of padding | `bos_token_id`, `pad_token_id` in the same order |

use std::path::{Path, PathBuf};

use llguidance::toktrie::TokTrie;
use serde_json::{Map, Value};
use tokenizers::PostProcessorWrapper;

use super::message::kind;
use super::stream::DecodeStream;
use super::template::ChatTemplate;
use crate::files::companions::{
    CHAT_TEMPLATE, GENERATION_CONFIG, PROCESSOR_TEMPLATE, SENTENCE_PIECE, SPECIAL_TOKENS,
    TOKENIZER, TOKENIZER_CONFIG, more_templates, template_path,
};
use crate::files::{self, cut_to, plain, short};
use crate::foreign::contained;
use crate::gguf::{GgufFile, is_gguf};
use crate::{Error, Result};

/// The largest `tokenizer.json` that is read, in bytes.
const MAX_TOKENIZER_BYTES: u64 = 512 << 20;
/// How deep lists and objects of a part of `tokenizer.json` may be nested.
const DEEPEST_PART: usize = 16;
/// How many times as long a part's replacements may make a text.
const MOST_GROWTH: f64 = 1024.0;

/// The special tokens templates know by name.
const NAMED_TOKENS: [&str; 7] =
    ["bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"];

/// The key of `tokenizer_config.json` with more of them: an object from names to tokens, or a list of tokens without
/// names.
const EXTRA_TOKENS: &str = "extra_special_tokens";

/// Token ids, and for each the bytes `start..end` of the text that it stands for.
pub type Encoded = (Vec<u32>, Vec<(usize, usize)>);

/// How much of a long text is tokenized at first for each token that is wanted; a token of most texts has 3 to 6 bytes.
const PREFIX_BYTES_A_TOKEN: usize = 8;
/// The least that is tokenized of a long text.
const LEAST_PREFIX_BYTES: usize = 4096;

/// Text to token ids and back.
#[derive(Debug)]
pub struct Tokenizer {
    folder: PathBuf,
    inner: tokenizers::Tokenizer,
    named: Vec<(String, String)>,
    special_tokens: Vec<String>,
    eos_ids: Vec<u32>,
    eos_id: Option<u32>,
    bos_id: Option<u32>,
    pad_id: Option<u32>,
    chat_template: Option<ChatTemplate>,
}

impl Tokenizer {
    /// Reads the tokenizer of a model's folder or GGUF file.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::File`]: no `tokenizer.json`, or one of the files is not what it should be. A chat
    /// template that does not parse is an error only when it is used.
    pub fn load(folder: &Path) -> Result<Self> {
        match is_gguf(folder) {
            true => GgufFile::open(folder)?.tokenizer(),
            false => Self::from_sources(folder, Sources::read(folder)?),
        }
    }

    /// A tokenizer of what its files would say; `place` is what errors name.
    ///
    /// # Errors
    /// As [`Tokenizer::load`].
    pub fn from_files(place: &Path, files: &TokenizerFiles) -> Result<Self> {
        let source = |fields: &Map<String, Value>| Source {
            path: place.to_path_buf(),
            fields: fields.clone(),
        };
        let template = |(name, template): &(String, String)| {
            (name.clone(), place.display().to_string(), template.clone())
        };
        let sources = Sources {
            tokenizer: (place.to_path_buf(), files.tokenizer.clone()),
            tokenizer_config: source(&files.tokenizer_config),
            special_tokens_map: source(&Map::new()),
            generation_config: source(&files.generation_config),
            config: source(&Map::new()),
            templates: files.chat_templates.iter().map(template).collect(),
        };
        Self::from_sources(place, sources)
    }

    fn from_sources(folder: &Path, sources: Sources) -> Result<Self> {
        let (path, bytes) = &sources.tokenizer;
        let inner = read_tokenizer(path, bytes)?;
        let mut named = Vec::new();
        for name in NAMED_TOKENS {
            let found = match token_text(&sources.tokenizer_config, name)? {
                Some(token) => Some(token),
                None => token_text(&sources.special_tokens_map, name)?,
            };
            if let Some(token) = found {
                named.push((name.to_string(), token));
            }
        }
        named.extend(more_named_tokens(&sources.tokenizer_config)?);

        let id_of = |name: &str| {
            named
                .iter()
                .find(|(other, _)| other == name)
                .and_then(|(_, token)| inner.token_to_id(token))
        };
        let ids = |key: &str, name: &str| -> Result<Vec<u32>> {
            for source in [&sources.generation_config, &sources.config] {
                if let Some(ids) = token_ids(source, key)? {
                    return Ok(ids);
                }
            }
            Ok(id_of(name).into_iter().collect())
        };
        let eos_ids = ids("eos_token_id", "eos_token")?;
        let eos_id = id_of("eos_token").or(eos_ids.first().copied());
        let bos_id = ids("bos_token_id", "bos_token")?.first().copied();
        let pad_id = ids("pad_token_id", "pad_token")?.first().copied();

        let mut special_tokens: Vec<String> = inner
            .get_added_tokens_decoder()
            .into_values()
            .filter(|token| token.special)
            .map(|token| token.content)
            .collect();
        special_tokens.extend(named.iter().map(|(_, token)| token.clone()));
        special_tokens.sort();
        special_tokens.dedup();

        let mut tokenizer = Self {
            folder: folder.to_path_buf(),
            inner,
            named,
            special_tokens,
            eos_ids,
            eos_id,
            bos_id,
            pad_id,
            chat_template: None,
        };
        tokenizer.take_templates(sources.templates);
        Ok(tokenizer)
    }

    /// Takes the chat templates of a folder, such as that of an adapter, in place of those it has, if there are any;
    /// they are looked for as in a model's folder. Gives the source of the one named `default`, or of the only one.
    ///
    /// # Errors
    /// [`Error::Io`] or [`Error::File`] when a file cannot be read. A template that does not parse is an error only when
    /// it is used.
    pub fn take_chat_template(&mut self, folder: &Path) -> Result<Option<String>> {
        let sources = read_templates(folder)?;
        let source = default_template(&sources);
        self.take_templates(sources);
        Ok(source)
    }

    fn take_templates(&mut self, sources: Vec<(String, String, String)>) {
        if !sources.is_empty() {
            self.chat_template = Some(ChatTemplate::from_named(
                sources,
                self.named.clone(),
                self.special_tokens.clone(),
                self.end_tokens(),
            ));
        }
    }

    /// Token ids of a text. `add_special` adds what the tokenizer puts around a text, such as the BOS token; a rendered
    /// conversation has these already.
    ///
    /// # Errors
    /// [`Error::Tokenizer`]: the text cannot be tokenized, for instance for want of an unknown token.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = self.call("encode a text", |inner| inner.encode_fast(text, add_special))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Token ids of a text, and the bytes `(start, end)` of the text that each stands for.
    ///
    /// A character spread over several tokens gives each of them its whole range; a token that was added around the
    /// text has an empty range at 0. The spaces that belong to a token are in its range.
    ///
    /// # Errors
    /// [`Error::Tokenizer`]: the text cannot be tokenized.
    pub fn encode_with_offsets(&self, text: &str, add_special: bool) -> Result<Encoded> {
        let encoding = self.call("encode a text", |inner| inner.encode(text, add_special))?;
        Ok((encoding.get_ids().to_vec(), encoding.get_offsets().to_vec()))
    }

    /// The first tokens of a text as [`Tokenizer::encode_with_offsets`] gives them: at least `most` of them, or all.
    ///
    /// Of a text much longer than that, only as much is tokenized as it takes: a token counts as one of the text's when
    /// two prefixes of different lengths agree on it and on all before it. Splitting and merging look at what stands
    /// around a place, so only tokens near the end of a prefix differ from those of the whole.
    ///
    /// # Errors
    /// [`Error::Tokenizer`]: the text cannot be tokenized.
    pub fn encode_first(&self, text: &str, add_special: bool, most: usize) -> Result<Encoded> {
        let prefix = |bytes: usize| text.get(..text.floor_char_boundary(bytes)).unwrap_or(text);
        let mut bytes = most.saturating_mul(PREFIX_BYTES_A_TOKEN).max(LEAST_PREFIX_BYTES);
        while bytes.saturating_mul(3) < text.len() {
            let (mut ids, mut offsets) = self.encode_with_offsets(prefix(bytes), add_special)?;
            let (more_ids, more_offsets) =
                self.encode_with_offsets(prefix(bytes + bytes / 4), add_special)?;
            let same = ids
                .iter()
                .zip(&offsets)
                .zip(more_ids.iter().zip(&more_offsets))
                .take_while(|(token, other)| token == other)
                .count();
            if same >= most {
                ids.truncate(same);
                offsets.truncate(same);
                return Ok((ids, offsets));
            }
            bytes = bytes.saturating_mul(2);
        }
        self.encode_with_offsets(text, add_special)
    }

    /// The text of token ids; bytes that are not UTF-8 become U+FFFD. `skip_special` leaves special tokens out.
    ///
    /// # Errors
    /// [`Error::Tokenizer`]: the decoder fails.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        self.call("decode tokens", |inner| inner.decode(ids, skip_special))
    }

    /// Decodes tokens as they come, without special tokens and without splitting a character.
    pub fn decode_stream(&self) -> DecodeStream<'_> {
        DecodeStream::new(self, true)
    }

    /// As [`Tokenizer::decode_stream`], of tokens that continue `prompt`: gives what they add to its text. Decoders that
    /// take a space off the beginning of a text, as that of Llama 2 does, would otherwise take it off these tokens. Of a
    /// character that the prompt ends within, the last bytes come as U+FFFD.
    ///
    /// # Errors
    /// [`Error::Tokenizer`]: the decoder fails.
    pub fn decode_stream_after(&self, prompt: &[u32]) -> Result<DecodeStream<'_>> {
        DecodeStream::after(self, true, prompt)
    }

    /// Whether [`Tokenizer::decode`] leaves an id out: one without a token, or of a special token if it skips these.
    pub(super) fn leaves_out(&self, id: u32, skip_special: bool) -> bool {
        let added = self.inner.get_added_vocabulary();
        let token = self.inner.id_to_token(id);
        token.is_none_or(|token| skip_special && added.is_special_token(&token))
    }

    /// The ids that end a generation, in the order the folder gives them; empty when it names none.
    pub fn eos_ids(&self) -> &[u32] {
        &self.eos_ids
    }

    /// The id that ends a text in training: that of the tokenizer's `eos_token`, else the first of
    /// [`Tokenizer::eos_ids`].
    pub fn eos_id(&self) -> Option<u32> {
        self.eos_id
    }

    /// The id that begins a text, if the model has one.
    pub fn bos_id(&self) -> Option<u32> {
        self.bos_id
    }

    /// The id for padding, if the model has one.
    pub fn pad_id(&self) -> Option<u32> {
        self.pad_id
    }

    /// The id of a token given as it stands in the vocabulary.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// A token as it stands in the vocabulary.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The first id that stands for other tokens in this vocabulary and in another. Ids that one of them lacks don't count, and
    /// neither do added tokens, which models of one family name differently.
    pub fn first_difference(&self, other: &Self) -> Option<u32> {
        let (own, others) =
            (self.inner.get_added_tokens_decoder(), other.inner.get_added_tokens_decoder());
        let differs = |id: u32| {
            let both = self.id_to_token(id).zip(other.id_to_token(id));
            both.is_some_and(|(one, another)| one != another)
        };
        let ids = self.inner.get_vocab(false).into_values();
        ids.filter(|id| !own.contains_key(id) && !others.contains_key(id) && differs(*id)).min()
    }

    /// The bytes that each token stands for in a text, by id; `None` for special tokens and for ids without a token.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the decoder is neither of bytes nor falls back to them.
    pub(crate) fn token_bytes(&self) -> Result<Vec<Option<Vec<u8>>>> {
        let unsupported = |reason: &dyn std::fmt::Display| {
            let path = self.folder.join(TOKENIZER);
            Error::Unsupported(format!("the bytes of the tokens of {}: {reason}", path.display()))
        };
        let text = self.call("be written", |inner| inner.to_string(false))?;
        let json: Value = serde_json::from_str(&text).map_err(|error| unsupported(&error))?;
        let words = contained(|| llguidance::token_bytes_from_tokenizer_json(&json));
        let words = words.map_err(|panic| unsupported(&panic))?;
        let words = words.map_err(|error| unsupported(&error))?;
        let marked = |word: &[u8]| word.first() == Some(&TokTrie::SPECIAL_TOKEN_MARKER);
        Ok(words
            .into_iter()
            .map(|word| (!word.is_empty() && !marked(&word)).then_some(word))
            .collect())
    }

    /// How many tokens there are, added ones included. A model's embedding may have more rows.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The chat template, if the folder has one or [`Tokenizer::set_chat_template`] gave one.
    pub fn chat_template(&self) -> Option<&ChatTemplate> {
        self.chat_template.as_ref()
    }

    /// The chat template.
    ///
    /// # Errors
    /// [`Error::File`] when there is none.
    pub fn require_chat_template(&self) -> Result<&ChatTemplate> {
        self.chat_template.as_ref().ok_or_else(|| {
            Error::file(
                &self.folder,
                "the tokenizer has no chat template (looked for chat_template.jinja, \"chat_template\" in \
                 tokenizer_config.json, and chat_template.json), so conversations cannot be rendered: use records with \
                 \"text\" or with \"prompt\" and \"completion\" strings, or pass a template",
            )
        })
    }

    /// Takes a chat template's source in place of the folder's.
    ///
    /// # Errors
    /// [`Error::Template`] when the source does not parse.
    pub fn set_chat_template(&mut self, source: &str) -> Result<()> {
        let template = ChatTemplate::new(
            source,
            self.named.clone(),
            self.special_tokens.clone(),
            self.end_tokens(),
        )?;
        self.chat_template = Some(template);
        Ok(())
    }

    /// Calls `tokenizers`, which may fail and may panic.
    fn call<T>(
        &self,
        what: &str,
        call: impl FnOnce(&tokenizers::Tokenizer) -> tokenizers::Result<T>,
    ) -> Result<T> {
        let failed = |reason: &str| {
            let path = self.folder.join(TOKENIZER);
            Error::Tokenizer(format!("{} cannot {what}: {reason}", path.display()))
        };
        match contained(|| call(&self.inner)) {
            Ok(Ok(result)) => Ok(result),
            Ok(Err(error)) => Err(failed(&error.to_string())),
            Err(panic) => Err(failed(&format!("`tokenizers` gave up on it ({panic})"))),
        }
    }

    fn end_tokens(&self) -> Vec<String> {
        self.eos_ids
            .iter()
            .chain(&self.eos_id)
            .filter_map(|id| self.inner.id_to_token(*id))
            .collect()
    }
}

/// Reads the content of `tokenizer.json`. Not all that can be written there is something that `tokenizers` can do: some
/// of it panics.
fn read_tokenizer(path: &Path, bytes: &[u8]) -> Result<tokenizers::Tokenizer> {
    let description: Value =
        files::parse_json(bytes).map_err(|message| Error::file(path, message))?;
    check_parts(&description).map_err(|message| Error::file(path, message))?;
    drop(description);
    contained(|| {
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| {
            Error::file(
                path,
                format!(
                    "not a tokenizer this library can read: {}",
                    cut_to(&plain(&error.to_string()), 300)
                ),
            )
        })?;
        // What the file says about training lengths is not for us: rows are cut and padded elsewhere.
        inner.with_padding(None);
        inner.with_truncation(None).map_err(|error| {
            Error::file(path, format!("truncation cannot be switched off: {error}"))
        })?;
        keep_spaces_in_offsets(&mut inner, path)?;
        Ok(inner)
    })
    .unwrap_or_else(|panic| {
        Err(Error::file(path, format!("not a tokenizer that `tokenizers` can read: {panic}")))
    })
}

/// Checks what is done to a text before and after the model: how deep it is nested, and how much longer it may make a
/// text, as sixty replacements of one letter by two would fill any memory.
fn check_parts(description: &Value) -> Result<(), String> {
    for part in ["normalizer", "pre_tokenizer", "post_processor", "decoder"] {
        let Some(value) = description.get(part) else { continue };
        if nests_deeper(value, DEEPEST_PART) {
            return Err(format!(
                "{part}: lists and objects are nested more than {DEEPEST_PART} deep"
            ));
        }
        let growth = growth(value);
        if growth > MOST_GROWTH {
            return Err(format!(
                "{part}: its replacements may make a text {growth:.0} times as long; at most \
                 {MOST_GROWTH} times is allowed"
            ));
        }
    }
    Ok(())
}

fn nests_deeper(value: &Value, depth: usize) -> bool {
    let nested = |value: &Value| match depth.checked_sub(1) {
        Some(depth) => nests_deeper(value, depth),
        None => true,
    };
    match value {
        Value::Array(items) => items.iter().any(nested),
        Value::Object(fields) => fields.values().any(nested),
        _ => false,
    }
}

/// How many times as long the replacements within a part may make a text, one after the other.
fn growth(value: &Value) -> f64 {
    match value {
        Value::Array(items) => items.iter().map(growth).product(),
        Value::Object(fields) => {
            let length = |key: &str| match fields.get(key) {
                Some(Value::String(text)) => Some(text.len()),
                // A regular expression may match a single character.
                Some(Value::Object(pattern)) => {
                    Some(pattern.get("String").and_then(Value::as_str).map_or(1, str::len))
                }
                _ => None,
            };
            match (fields.get("type").and_then(Value::as_str), length("content"), length("pattern"))
            {
                (Some("Replace"), Some(content), pattern) => {
                    (content as f64 / pattern.unwrap_or(1).max(1) as f64).max(1.0)
                }
                _ => fields.values().map(growth).product(),
            }
        }
        _ => 1.0,
    }
}

/// Makes byte-level post-processors leave a token's spaces in its range. By default they cut them off, and then a
/// token of spaces has no place, and a loss mask would lose it.
fn keep_spaces_in_offsets(inner: &mut tokenizers::Tokenizer, path: &Path) -> Result<()> {
    fn untrim(value: &mut Value) {
        match value {
            Value::Object(fields) => fields.iter_mut().for_each(|(key, value)| {
                if key == "trim_offsets" {
                    *value = Value::Bool(false);
                } else {
                    untrim(value);
                }
            }),
            Value::Array(items) => items.iter_mut().for_each(untrim),
            _ => {}
        }
    }
    let Some(processor) = inner.get_post_processor() else { return Ok(()) };
    let broken = |error: serde_json::Error| Error::file(path, format!("post_processor: {error}"));
    let mut description = serde_json::to_value(processor).map_err(broken)?;
    untrim(&mut description);
    let processor: PostProcessorWrapper = serde_json::from_value(description).map_err(broken)?;
    inner.with_post_processor(Some(processor));
    Ok(())
}

/// What the files of a tokenizer say, for a tokenizer that has none or is written into another file.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenizerFiles {
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`, with what `special_tokens_map.json` adds.
    pub tokenizer_config: Map<String, Value>,
    /// Of `generation_config.json`, or else of `config.json`: `eos_token_id`, `bos_token_id` and `pad_token_id`.
    pub generation_config: Map<String, Value>,
    /// Names and sources of chat templates; a single one is called `default`.
    pub chat_templates: Vec<(String, String)>,
}

impl TokenizerFiles {
    /// Reads those of a model's folder or GGUF file.
    ///
    /// # Errors
    /// As [`Tokenizer::load`].
    pub fn read(folder: &Path) -> Result<Self> {
        if is_gguf(folder) {
            return GgufFile::open(folder)?.tokenizer_files();
        }
        let sources = Sources::read(folder)?;
        let mut tokenizer_config = sources.tokenizer_config.fields;
        for (key, value) in sources.special_tokens_map.fields {
            let slot = tokenizer_config.entry(key).or_insert(Value::Null);
            if slot.is_null() {
                *slot = value;
            }
        }
        let mut generation_config = Map::new();
        for key in ["eos_token_id", "bos_token_id", "pad_token_id"] {
            for source in [&sources.generation_config, &sources.config] {
                if token_ids(source, key)?.is_some()
                    && let Some(value) = source.fields.get(key)
                {
                    generation_config.insert(key.to_string(), value.clone());
                    break;
                }
            }
        }
        let template = |(name, _, source): (String, String, String)| (name, source);
        Ok(Self {
            tokenizer: sources.tokenizer.1,
            tokenizer_config,
            generation_config,
            chat_templates: sources.templates.into_iter().map(template).collect(),
        })
    }

    /// Writes them into a folder.
    ///
    /// # Errors
    /// [`Error::Io`] when one cannot be written.
    pub fn write(&self, folder: &Path) -> Result<()> {
        files::write_bytes_atomic(folder.join(TOKENIZER), &self.tokenizer)?;
        let objects = [
            (TOKENIZER_CONFIG, &self.tokenizer_config),
            (GENERATION_CONFIG, &self.generation_config),
        ];
        for (name, object) in objects {
            let path = folder.join(name);
            let bytes = serde_json::to_vec_pretty(object)
                .map_err(|error| Error::file(&path, error.to_string()))?;
            files::write_bytes_atomic(path, bytes)?;
        }
        for (name, source) in &self.chat_templates {
            files::write_bytes_atomic(template_path(folder, name)?, source)?;
        }
        Ok(())
    }
}

/// What a tokenizer is made of, with where it was found.
struct Sources {
    tokenizer: (PathBuf, Vec<u8>),
    tokenizer_config: Source,
    special_tokens_map: Source,
    generation_config: Source,
    config: Source,
    templates: Vec<(String, String, String)>,
}

impl Sources {
    fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(TOKENIZER);
        if !path.exists() {
            let hint = if folder.join(SENTENCE_PIECE).is_file() {
                "; there is a SentencePiece tokenizer.model, which is not read: save the tokenizer as tokenizer.json \
                 with transformers (AutoTokenizer.from_pretrained(folder).save_pretrained(folder))"
            } else {
                "; a model folder needs one"
            };
            return Err(Error::file(&path, format!("no such file{hint}")));
        }
        let bytes = files::read_limited(&path, MAX_TOKENIZER_BYTES)?;
        Ok(Self {
            tokenizer: (path, bytes),
            tokenizer_config: read_object(&folder.join(TOKENIZER_CONFIG))?,
            special_tokens_map: read_object(&folder.join(SPECIAL_TOKENS))?,
            generation_config: read_object(&folder.join(GENERATION_CONFIG))?,
            config: read_object(&folder.join("config.json"))?,
            templates: read_templates(folder)?,
        })
    }
}

/// A JSON file's object with the file's path; empty when there is no such file.
struct Source {
    path: PathBuf,
    fields: Map<String, Value>,
}

fn read_object(path: &Path) -> Result<Source> {
    if !path.exists() {
        return Ok(Source { path: path.to_path_buf(), fields: Map::new() });
    }
    match files::read_json(path)? {
        Value::Object(fields) => Ok(Source { path: path.to_path_buf(), fields }),
        other => Err(Error::file(path, format!("expected a JSON object, found {}", kind(&other)))),
    }
}

/// The text of a special token: a string, or an object with its text under `content`.
fn token_text(source: &Source, name: &str) -> Result<Option<String>> {
    match source.fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(token)) => Ok(Some(token.clone())),
        Some(Value::Object(fields)) => match fields.get("content") {
            Some(Value::String(token)) => Ok(Some(token.clone())),
            _ => Err(Error::file(
                &source.path,
                format!("{name:?} is an object without a string under \"content\""),
            )),
        },
        Some(other) => Err(Error::file(
            &source.path,
            format!("{name:?} is {}, expected a string or an object with \"content\"", kind(other)),
        )),
    }
}

/// The special tokens that the configuration names beside the usual ones, such as `image_token`.
fn more_named_tokens(source: &Source) -> Result<Vec<(String, String)>> {
    let is_token = |value: &Value| value.get("content").unwrap_or(value).is_string();
    let mut fields = source.fields.clone();
    fields.retain(|name, value| name.ends_with("_token") && is_token(value));
    if let Some(Value::Object(more)) = source.fields.get(EXTRA_TOKENS) {
        fields.extend(more.clone());
    }
    fields.retain(|name, _| !NAMED_TOKENS.contains(&name.as_str()));
    let extra = Source { path: source.path.clone(), fields };
    let tokens = extra
        .fields
        .keys()
        .map(|name| Ok(token_text(&extra, name)?.map(|token| (name.clone(), token))));
    tokens.filter_map(Result::transpose).collect()
}

/// One token id or a list of them; `None` when the key is absent, null, or an empty list.
fn token_ids(source: &Source, key: &str) -> Result<Option<Vec<u32>>> {
    let value = match source.fields.get(key) {
        None | Some(Value::Null) => return Ok(None),
        Some(value) => value,
    };
    let items = match value {
        Value::Array(items) => items.as_slice(),
        single => std::slice::from_ref(single),
    };
    // A negative id is how some configurations say that there is none.
    let ids = items
        .iter()
        .filter(|item| item.as_i64().is_none_or(|id| id >= 0))
        .map(|item| {
            item.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
                Error::file(
                    &source.path,
                    format!("{key:?} holds {}, expected a token id or a list of them", short(item)),
                )
            })
        })
        .collect::<Result<Vec<_>>>()?;
    Ok(if ids.is_empty() { None } else { Some(ids) })
}

/// The source of the chat template in a folder, such as that of an adapter, if there is one: of several, of that
/// named `default`, or of the first.
///
/// # Errors
/// [`Error::Io`] or [`Error::File`] when a file cannot be read.
pub fn chat_template_in(folder: &Path) -> Result<Option<String>> {
    Ok(default_template(&read_templates(folder)?))
}

fn default_template(templates: &[(String, String, String)]) -> Option<String> {
    let found = templates.iter().find(|(name, ..)| name == "default").or(templates.first());
    found.map(|(.., source)| source.clone())
}

/// The folder's chat templates as `(name, where from, source)`.
fn read_templates(folder: &Path) -> Result<Vec<(String, String, String)>> {
    let read = |path: &Path| files::read_text(path, files::MAX_JSON_BYTES);
    let mut found = Vec::new();
    let single = folder.join(CHAT_TEMPLATE);
    if single.exists() {
        found.push(("default".to_string(), single.display().to_string(), read(&single)?));
    }
    for path in more_templates(folder)? {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        found.push((name, path.display().to_string(), read(&path)?));
    }
    if !found.is_empty() {
        return Ok(found);
    }
    found = templates_of(&read_object(&folder.join(TOKENIZER_CONFIG))?)?;
    if !found.is_empty() {
        return Ok(found);
    }
    templates_of(&read_object(&folder.join(PROCESSOR_TEMPLATE))?)
}

/// The value under `chat_template`: a template, or a list of `{"name": ..., "template": ...}`.
fn templates_of(source: &Source) -> Result<Vec<(String, String, String)>> {
    let wrong = |found: &str| {
        Error::file(
            &source.path,
            format!(
                "\"chat_template\" is {found}, expected a string or a list of {{\"name\": ..., \"template\": ...}}"
            ),
        )
    };
    let origin = source.path.display().to_string();
    match source.fields.get("chat_template") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(template)) => Ok(vec![("default".into(), origin, template.clone())]),
        Some(Value::Array(items)) => items
            .iter()
            .map(|item| {
                let part = |key: &str| item.get(key).and_then(Value::as_str).map(str::to_string);
                match (part("name"), part("template")) {
                    (Some(name), Some(template)) => Ok((name, origin.clone(), template)),
                    _ => Err(wrong("a list with something else in it")),
                }
            })
            .collect(),
        Some(other) => Err(wrong(kind(other))),
    }
}
