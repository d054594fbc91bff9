//! What may be written: tokens are drawn from those alone with which a text can still become one of a grammar's, as a
//! JSON schema's, by `llguidance`.
//!
//! Grammars come from strangers. `llguidance` goes from a rule to the next by recursion, so each is compiled on a thread whose
//! stack has room for as many rules as its text may have; [`bounds`] refuses what would take too long, and what takes long
//! nevertheless is given up, with few such threads at once.

mod bounds;

use crate::foreign::contained;
use crate::text::Tokenizer;
use crate::{Error, Result};
use llguidance::api::{GrammarInit, GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{SimpleVob, TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};
use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

/// The option that errors are about.
const OPTION: &str = "grammar";
/// Bytes of a grammar's text, at most.
const LARGEST: usize = 1 << 20;
/// Bytes of stack for each byte of a grammar's text, of which the shortest rules take an eighth, and for all else. What
/// isn't used takes no memory.
const STACK_OF_BYTE: usize = 4 << 10;
const STACK: usize = 8 << 20;
/// How long a grammar may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// Grammars that are compiled at once, and how long others wait for a place among them.
const AT_ONCE: usize = 4;
const WAITING: Duration = Duration::from_secs(2);

/// Compiles grammars for the tokens of one model.
pub struct Grammars {
    factory: Arc<ParserFactory>,
    places: Arc<Places>,
}

impl fmt::Debug for Grammars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammars")
    }
}

/// What a text has to be, in tokens; a clone shares what was compiled.
#[derive(Clone)]
pub struct Grammar {
    start: Arc<Mutex<Matcher>>,
}

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Grammar")
    }
}

/// The bytes of each token, as a tree.
struct Vocabulary {
    trie: TokTrie,
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    /// Not as the tokenizer would, so no token is forced.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

impl Grammars {
    /// The option that an error names when others take too long, and the same may be compiled later.
    pub const BUSY: &str = "grammars";

    /// For a model whose logits are of `vocabulary` tokens.
    ///
    /// # Errors
    /// [`Error::Unsupported`] when the bytes of the tokenizer's tokens cannot be told.
    pub fn new(tokenizer: &Tokenizer, vocabulary: usize) -> Result<Self> {
        let mut words = tokenizer.token_bytes()?;
        words.resize(vocabulary.max(words.len()), None);
        let words: Vec<Vec<u8>> = (0..)
            .zip(words)
            .map(|(id, bytes): (u32, _)| {
                bytes.unwrap_or_else(|| {
                    let name = tokenizer.id_to_token(id).unwrap_or_else(|| format!("<[{id}]>"));
                    [&[TokTrie::SPECIAL_TOKEN_MARKER], name.as_bytes()].concat()
                })
            })
            .collect();
        let count = u32::try_from(words.len()).map_err(candle_core::Error::wrap)?;
        let mut ends = tokenizer.eos_ids().to_vec();
        ends.retain(|id| *id < count);
        let compile = || {
            // Where no token ends a text, one stands for its end that is none, so it is never drawn.
            let end = ends.first().copied().unwrap_or(count);
            let mut info = TokRxInfo::new(count, end);
            let mut words = words;
            if end == count {
                info.vocab_size += 1;
                words.push([&[TokTrie::SPECIAL_TOKEN_MARKER][..], b"<end>"].concat());
            }
            let trie = TokTrie::from(&info, &words);
            let trie = if ends.len() > 1 { trie.with_eos_tokens(&ends) } else { trie };
            let environment: TokEnv = Arc::new(Vocabulary { trie });
            ParserFactory::new_simple(&environment).map(|mut factory| {
                factory.quiet();
                factory.limits_mut().verbose_errors = false;
                factory
            })
        };
        match contained(compile) {
            Ok(Ok(factory)) => Ok(Self { factory: Arc::new(factory), places: Arc::default() }),
            Ok(Err(error)) => {
                Err(Error::Unsupported(format!("grammars of this tokenizer: {error}")))
            }
            Err(panic) => Err(Error::Unsupported(format!("grammars of this tokenizer: {panic}"))),
        }
    }

    /// Texts that are JSON of a schema (<https://json-schema.org>).
    ///
    /// # Errors
    /// [`Error::Option`] when it is no schema, has what isn't supported, is too large, or takes too long.
    pub fn json_schema(&self, schema: &Value) -> Result<Grammar> {
        self.compile(Source::Schema(schema.clone()))
    }

    /// Texts that are a JSON object.
    ///
    /// # Errors
    /// [`Error::Option`] when there is no room for it.
    pub fn json_object(&self) -> Result<Grammar> {
        self.json_schema(&json!({"type": "object"}))
    }

    /// Texts that a regular expression matches as a whole, in the syntax of Rust's `regex`.
    ///
    /// # Errors
    /// As [`Self::json_schema`].
    pub fn regex(&self, pattern: &str) -> Result<Grammar> {
        self.compile(Source::Regex(pattern.into()))
    }

    /// One of these texts.
    ///
    /// # Errors
    /// [`Error::Option`] when there is none, or too many.
    pub fn choice(&self, choices: &[String]) -> Result<Grammar> {
        if choices.is_empty() {
            return Err(Error::option(
                OPTION,
                "is a choice of nothing; expected at least one text",
            ));
        }
        let choices: Vec<String> =
            choices.iter().map(|choice| Value::from(choice.as_str()).to_string()).collect();
        self.lark(&format!("start: {}", choices.join(" | ")))
    }

    /// Texts of a grammar in `llguidance`'s form of Lark
    /// (<https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md>).
    ///
    /// # Errors
    /// As [`Self::json_schema`].
    pub fn lark(&self, source: &str) -> Result<Grammar> {
        self.compile(Source::Lark(source.into()))
    }

    /// The bytes of a token: those that it stands for in a text, or those of a special token's name. Empty for an id
    /// without a token.
    pub fn token_bytes(&self, token: u32) -> &[u8] {
        let bytes = self.factory.tok_env().tok_trie().token(token);
        match bytes {
            [TokTrie::SPECIAL_TOKEN_MARKER, name @ ..] if !name.is_empty() => name,
            bytes => bytes,
        }
    }

    fn compile(&self, source: Source) -> Result<Grammar> {
        let wrong = |what: String| Error::option(OPTION, what);
        let length = source.length();
        if length > LARGEST {
            return Err(wrong(format!("has {length} bytes, expected at most {LARGEST}")));
        }
        let Some(place) = Places::take(&self.places) else {
            let what =
                format!("{AT_ONCE} grammars that take long are being compiled; ask again later");
            return Err(Error::option(Grammars::BUSY, what));
        };
        let (sender, compiled) = mpsc::channel();
        let factory = self.factory.clone();
        let thread = std::thread::Builder::new()
            .name("grammar".into())
            .stack_size(STACK + STACK_OF_BYTE * length)
            .spawn(move || {
                let matcher = contained(|| compile(&factory, source)).unwrap_or_else(Err);
                drop(place);
                // Whoever has given up needs no answer.
                let _ = sender.send(matcher);
            });
        thread.map_err(|error| wrong(format!("has no thread that compiles it: {error}")))?;
        match compiled.recv_timeout(PATIENCE) {
            Ok(Ok(matcher)) => Ok(Grammar { start: Arc::new(Mutex::new(matcher)) }),
            Ok(Err(error)) => Err(wrong(format!("cannot be followed: {error}"))),
            Err(RecvTimeoutError::Timeout) => {
                let seconds = PATIENCE.as_secs();
                Err(wrong(format!("takes more than {seconds} s to compile; make it simpler")))
            }
            Err(RecvTimeoutError::Disconnected) => Err(wrong("cannot be compiled".into())),
        }
    }
}

/// What a grammar is compiled from.
enum Source {
    Schema(Value),
    Regex(String),
    Lark(String),
}

impl Source {
    fn length(&self) -> usize {
        match self {
            Self::Schema(schema) => schema.to_string().len(),
            Self::Regex(text) | Self::Lark(text) => text.len(),
        }
    }

    /// The schemas in it.
    fn check(&self) -> Result<(), String> {
        match self {
            Self::Schema(schema) => bounds::check_schema(schema),
            Self::Regex(_) => Ok(()),
            Self::Lark(source) => bounds::check_lark(source),
        }
    }

    fn grammar(self) -> TopLevelGrammar {
        match self {
            Self::Schema(schema) => TopLevelGrammar::from_json_schema(schema),
            Self::Regex(pattern) => TopLevelGrammar::from_regex(&pattern),
            Self::Lark(source) => {
                TopLevelGrammar::from_grammar(GrammarWithLexer::from_lark(source))
            }
        }
    }
}

/// What follows a grammar, at the beginning of a text.
fn compile(factory: &ParserFactory, source: Source) -> Result<Matcher, String> {
    source.check()?;
    let (limits, tokens) = (factory.limits(), factory.tok_env().clone());
    let read = GrammarInit::Serialized(source.grammar()).to_internal(Some(tokens), limits.clone());
    let (rules, lexer) = read.map_err(|error| error.to_string())?;
    bounds::check_expressions(lexer.regex_builder.exprset())?;
    bounds::check_start(&lexer, limits)?;
    let parser = factory.create_parser_from_init_default(GrammarInit::Internal(rules, lexer));
    let mut matcher = Matcher::new(parser);
    match matcher.get_error() {
        Some(error) => Err(error),
        None => {
            matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
            Ok(matcher)
        }
    }
}

/// Places of grammars that are being compiled.
#[derive(Default)]
struct Places {
    taken: Mutex<usize>,
    changed: Condvar,
}

impl Places {
    /// One of them, unless none is given back in time.
    fn take(places: &Arc<Self>) -> Option<Place> {
        let taken = places.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let waited = places.changed.wait_timeout_while(taken, WAITING, |taken| *taken >= AT_ONCE);
        let (mut taken, outcome) = waited.unwrap_or_else(PoisonError::into_inner);
        if outcome.timed_out() {
            return None;
        }
        *taken += 1;
        Some(Place(places.clone()))
    }
}

/// One of the [`Places`], which is given back when this is dropped.
struct Place(Arc<Places>);

impl Drop for Place {
    fn drop(&mut self) {
        *self.0.taken.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        self.0.changed.notify_one();
    }
}

impl Grammar {
    /// At the beginning of a text.
    pub(super) fn begin(&self) -> Result<Constraint> {
        // A panic while it was copied has left it as it was.
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        match contained(|| start.deep_clone()) {
            Ok(matcher) => Ok(Constraint { matcher, allowed: None }),
            Err(panic) => Err(failed(&panic)),
        }
    }
}

/// Where a text is in its grammar.
pub(super) struct Constraint {
    matcher: Matcher,
    allowed: Option<SimpleVob>,
}

fn failed(reason: &dyn fmt::Display) -> Error {
    Error::option(OPTION, format!("cannot be followed any further: {reason}"))
}

impl Constraint {
    /// Finds the tokens that may come next, which takes up to a millisecond.
    ///
    /// # Errors
    /// When the grammar is too complex here.
    pub fn find_allowed(&mut self) -> Result<()> {
        if self.allowed.is_none() {
            let found = contained(|| self.matcher.compute_mask_or_eos());
            let found = found.map_err(|panic| failed(&panic))?;
            self.allowed = Some(found.map_err(|error| failed(&error))?);
        }
        Ok(())
    }

    /// The tokens that may come next, once they are found.
    pub fn allowed(&self) -> Option<&SimpleVob> {
        self.allowed.as_ref()
    }

    /// Goes on with a token; says whether the text is whole and nothing may follow.
    ///
    /// # Errors
    /// When the token may not come here.
    pub fn take(&mut self, token: u32) -> Result<bool> {
        self.allowed = None;
        let taken = contained(|| self.matcher.consume_token(token));
        taken.map_err(|panic| failed(&panic))?.map_err(|error| failed(&error))?;
        Ok(self.matcher.is_stopped())
    }
}
