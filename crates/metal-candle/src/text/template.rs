//! Chat templates: a conversation to the text a model was trained on, as `transformers` renders it.
//!
//! A template is Jinja with `trim_blocks`, `lstrip_blocks`, loop controls, Python's string and dict methods, the
//! functions `raise_exception` and `strftime_now`, `transformers`' own `tojson`, and the block
//! `{% generation %}...{% endgeneration %}` around what the model writes. Its variables are `messages`, `tools`,
//! `documents`, `add_generation_prompt`, the special tokens (`bos_token`, `eos_token`, ...) and whatever the caller
//! adds. Not all of Python is there: `"%s" % x`, for one, is an error.

use std::fmt::Write as _;
use std::ops::Range;
use std::sync::{LazyLock, Mutex};

use chrono::NaiveDateTime;
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, Value, machinery};
use regex::{Captures, Regex};
use self_cell::self_cell;
use serde_json::Map;

use super::guard::{self, Program};
use super::json::to_template_value;
use super::message::Message;
use super::python::python_method;
use crate::files::cut_to;
use crate::foreign::contained;
use crate::hash::Hash;
use crate::{Error, Result};

/// Marks the start of a generation block in a rendering. Unicode keeps these code points out of text
/// (noncharacters), and no template trims them as white space.
const BLOCK_START: char = '\u{fdd0}';
/// Marks the end of a generation block.
const BLOCK_END: char = '\u{fdd1}';
/// Marks the start of a message's content; see the spans.
pub(super) const CONTENT_START: char = '\u{fdd2}';
/// Marks the end of a message's content.
pub(super) const CONTENT_END: char = '\u{fdd3}';

/// Whether this marks a place in a rendering.
pub(super) fn is_mark(character: char) -> bool {
    (BLOCK_START..=CONTENT_END).contains(&character)
}

/// How to render a conversation.
#[derive(Debug, Clone, Copy, Default)]
pub struct RenderOptions<'a> {
    /// End with the header of the turn that the model is to write.
    pub add_generation_prompt: bool,
    /// The tools the model may call, as JSON schemas. With several templates, `tool_use` is taken when these are given.
    pub tools: Option<&'a [serde_json::Value]>,
    /// More variables for the template, such as `enable_thinking` or `documents`; they win over the special tokens.
    pub variables: Option<&'a Map<String, serde_json::Value>>,
    /// What `strftime_now` says the time is; `None` is the time of the call. A run that must repeat gives one.
    pub now: Option<NaiveDateTime>,
}

/// The chat templates of one tokenizer: usually one, sometimes several by name.
#[derive(Debug)]
pub struct ChatTemplate {
    templates: Vec<Named>,
    fingerprint: u64,
    special_variables: Vec<(String, String)>,
    /// The texts of special tokens, longest first.
    pub(super) special_tokens: Vec<String>,
    /// The texts of the tokens that end a generation.
    pub(super) end_tokens: Vec<String>,
    /// By roles, whether a template writes contents that are lists of parts, as far as it was tried.
    pub(super) writes_parts: Mutex<Vec<(String, bool)>>,
}

/// One template. A parse error is kept and given when it is first used, so that a folder whose template this engine
/// can't parse still serves for plain text.
#[derive(Debug)]
struct Named {
    name: String,
    engine: std::result::Result<Engine, String>,
    has_blocks: bool,
}

/// What renders a template: its instructions, and the filters and functions that they call.
#[derive(Debug)]
struct Engine {
    environment: Environment<'static>,
    program: Compiled,
}

self_cell! {
    struct Compiled {
        owner: String,
        #[covariant]
        dependent: Program,
    }

    impl {Debug}
}

/// A rendering and the byte ranges of its generation blocks.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Marked {
    pub(super) text: String,
    pub(super) blocks: Vec<Range<usize>>,
}

impl ChatTemplate {
    /// A template from its source.
    ///
    /// `special_variables` are the special tokens by the names templates know them by (`bos_token`, `eos_token`, ...).
    /// `special_tokens` are the texts of all special tokens and `end_tokens` those that end a generation; the spans of
    /// [`ChatTemplate::render_with_spans`] need them.
    ///
    /// # Errors
    /// [`Error::Template`] when the source does not parse.
    pub fn new(
        source: &str,
        special_variables: Vec<(String, String)>,
        special_tokens: Vec<String>,
        end_tokens: Vec<String>,
    ) -> Result<Self> {
        let named = vec![("default".to_string(), "chat template".to_string(), source.to_string())];
        let template = Self::from_named(named, special_variables, special_tokens, end_tokens);
        template.pick(None)?;
        Ok(template)
    }

    /// Templates as `(name, origin, source)`; one that does not parse is an error only when it is used.
    pub(super) fn from_named(
        sources: Vec<(String, String, String)>,
        special_variables: Vec<(String, String)>,
        mut special_tokens: Vec<String>,
        end_tokens: Vec<String>,
    ) -> Self {
        special_tokens.retain(|token| !token.is_empty());
        special_tokens.sort_by_key(|token| std::cmp::Reverse(token.len()));
        let mut hash = Hash::new();
        let texts = sources
            .iter()
            .flat_map(|(name, _, source)| [name, source])
            .chain(special_variables.iter().flat_map(|(name, text)| [name, text]));
        for text in texts {
            hash.add(&(text.len() as u64).to_le_bytes());
            hash.add(text.as_bytes());
        }
        let templates = sources
            .into_iter()
            .map(|(name, origin, source)| {
                if let Err(message) = guard::check_length(&source) {
                    let engine = Err(format!("{origin}: {message}"));
                    return Named { name, engine, has_blocks: false };
                }
                let (source, has_blocks) = mark_generation_blocks(&as_python_reads(&source));
                Named { name, engine: compile(&origin, source), has_blocks }
            })
            .collect();
        let fingerprint = hash.finish();
        let writes_parts = Mutex::default();
        Self { templates, fingerprint, special_variables, special_tokens, end_tokens, writes_parts }
    }

    /// A hash of the templates' texts and of what they are told about special tokens (XXH3).
    pub fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    /// Whether a variable of this name stands in one of the templates; a template that doesn't parse may have any.
    pub fn mentions(&self, variable: &str) -> bool {
        let is_part = |character: char| character.is_alphanumeric() || character == '_';
        let mut sources = self.sources();
        sources.any(|source| {
            source.is_none_or(|text| text.split(|it| !is_part(it)).any(|word| word == variable))
        })
    }

    /// Whether this text stands in one of the templates that parse.
    pub fn contains(&self, text: &str) -> bool {
        self.sources().flatten().any(|source| source.contains(text))
    }

    /// The text of each template, as far as it parses.
    fn sources(&self) -> impl Iterator<Item = Option<&str>> {
        let engines = self.templates.iter().map(|template| template.engine.as_ref().ok());
        engines.map(|engine| engine.map(|it| it.program.borrow_owner().as_str()))
    }

    /// Renders a conversation.
    ///
    /// As in `transformers` 5, a message's keys that are null are left out, and reasoning given under one of the names
    /// `reasoning_content`, `thinking`, `reasoning` is there under the first two.
    ///
    /// # Errors
    /// [`Error::Template`]: the template does not parse, refuses the conversation, or the conversation holds a code
    /// point from U+FDD0 to U+FDD3, which this library marks spans with.
    pub fn render(&self, messages: &[Message], options: &RenderOptions) -> Result<String> {
        self.check_marks(messages, options)?;
        Ok(self.render_marked(messages, options)?.text)
    }

    /// Whether a token begins texts.
    pub(super) fn is_bos(&self, token: &str) -> bool {
        self.special_variables.iter().any(|(name, text)| name == "bos_token" && text == token)
    }

    /// Whether the template that these options choose says itself what the model writes.
    pub(super) fn has_generation_blocks(&self, options: &RenderOptions) -> Result<bool> {
        Ok(self.pick(options.tools)?.0.has_blocks)
    }

    /// Refuses marks in the input: they would be taken for our own.
    pub(super) fn check_marks(&self, messages: &[Message], options: &RenderOptions) -> Result<()> {
        let in_messages =
            messages.iter().flat_map(|message| message.fields().values()).any(holds_mark);
        let in_tools = options.tools.into_iter().flatten().any(holds_mark);
        let in_variables = options.variables.into_iter().flat_map(Map::values).any(holds_mark);
        if in_messages || in_tools || in_variables {
            return Err(Error::Template(
                "the conversation holds a code point from U+FDD0 to U+FDD3; Unicode keeps these out of text, and spans \
                 are marked with them here: remove it"
                    .into(),
            ));
        }
        Ok(())
    }

    pub(super) fn render_marked(
        &self,
        messages: &[Message],
        options: &RenderOptions,
    ) -> Result<Marked> {
        let (template, engine) = self.pick(options.tools)?;
        let now = options.now.unwrap_or_else(|| chrono::Local::now().naive_local());
        let mut context: Vec<(String, Value)> = Vec::new();
        for (name, token) in &self.special_variables {
            context.push((name.clone(), Value::from(token.as_str())));
        }
        let tools = options
            .tools
            .map(|tools| Value::from(tools.iter().map(to_template_value).collect::<Vec<_>>()));
        context.push(("strftime_now".into(), strftime_now(now)));
        context.push((
            "messages".into(),
            Value::from(messages.iter().map(message_value).collect::<Vec<_>>()),
        ));
        context.push(("tools".into(), tools.unwrap_or_else(|| Value::from(()))));
        context.push(("documents".into(), Value::from(())));
        context.push(("add_generation_prompt".into(), Value::from(options.add_generation_prompt)));
        for (name, value) in options.variables.into_iter().flatten() {
            context.push((name.clone(), to_template_value(value)));
        }
        let input = (messages.iter().flat_map(|message| message.fields().values()))
            .chain(options.tools.into_iter().flatten())
            .chain(options.variables.into_iter().flat_map(Map::values))
            .map(size)
            .sum::<usize>();
        context.push((guard::INPUT.into(), Value::from(input)));
        let rendered = engine.render(Value::from_pairs(context))?;
        if template.has_blocks {
            split_blocks(&rendered)
        } else {
            Ok(Marked { text: rendered, blocks: Vec::new() })
        }
    }

    fn pick(&self, tools: Option<&[serde_json::Value]>) -> Result<(&Named, &Engine)> {
        let by_name = |name: &str| self.templates.iter().find(|template| template.name == name);
        let found = tools.and_then(|_| by_name("tool_use")).or_else(|| by_name("default")).ok_or_else(|| {
            let names: Vec<_> = self.templates.iter().map(|template| template.name.as_str()).collect();
            Error::Template(format!(
                "the tokenizer has the templates {} but none is named \"default\": pass the one to use",
                names.join(", ")
            ))
        })?;
        match &found.engine {
            Ok(engine) => Ok((found, engine)),
            Err(message) => Err(Error::Template(message.clone())),
        }
    }
}

impl Engine {
    fn render(&self, context: Value) -> Result<String> {
        let mut rendered = String::new();
        let outcome = contained(|| {
            let mut out = machinery::make_string_output(&mut rendered);
            let program = self.program.borrow_dependent();
            let Program { instructions, blocks } = program;
            let escape = AutoEscape::None;
            machinery::eval(&self.environment, instructions, context, blocks, &mut out, escape)
                .map(|_| ())
                .map_err(|error| in_words(&error))
        });
        match outcome {
            Ok(Ok(())) => Ok(rendered),
            Ok(Err(message)) => Err(Error::Template(message)),
            Err(panic) => Err(Error::Template(format!("its engine gave up on it ({panic})"))),
        }
    }
}

/// The bytes of text in a value, and some for each value.
fn size(value: &serde_json::Value) -> usize {
    8 + match value {
        serde_json::Value::String(text) => text.len(),
        serde_json::Value::Array(items) => items.iter().map(size).sum(),
        serde_json::Value::Object(fields) => {
            fields.iter().map(|(key, value)| key.len() + size(value)).sum()
        }
        _ => 0,
    }
}

/// What templates are called in messages of their engine.
const TEMPLATE: &str = "chat template";

fn compile(origin: &str, source: String) -> std::result::Result<Engine, String> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder()
        .trim_blocks(true)
        .lstrip_blocks(true)
        .build()
        .map_err(|error| format!("{origin}: {error}"))?;
    guard::install(&mut environment);
    environment.set_unknown_method_callback(|state, value, method, arguments| {
        guard::call_method(state, value, method, arguments, |state| {
            python_method(state, value, method, arguments)
        })
    });
    environment.add_function(
        "raise_exception",
        |message: String| -> std::result::Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{REFUSED}{message}")))
        },
    );
    let program = contained(|| {
        Compiled::try_new(source, |source| guard::compile(TEMPLATE, source, &syntax))
            .map_err(|error| in_words(&error))
    })
    .unwrap_or_else(|panic| Err(format!("its engine gave up on it ({panic})")))
    .map_err(|message| format!("{origin}: {message}"))?;
    Ok(Engine { environment, program })
}

/// What an error of `raise_exception` begins with, to tell it from a mistake in the template.
const REFUSED: &str = "the template refused the conversation: ";

/// The longest message of a template or of its engine that is passed on, in characters.
const LONGEST_MESSAGE: usize = 1000;

/// The error a person can act on: the innermost one, with the template's line.
fn in_words(error: &minijinja::Error) -> String {
    cut_to(&all_words(error), LONGEST_MESSAGE)
}

fn all_words(error: &minijinja::Error) -> String {
    let mut innermost = error;
    let mut next = std::error::Error::source(error);
    while let Some(source) = next {
        if let Some(inner) = source.downcast_ref::<minijinja::Error>() {
            innermost = inner;
        }
        next = source.source();
    }
    if let Some(detail) = innermost.detail().filter(|detail| detail.starts_with(REFUSED)) {
        return detail.to_string();
    }
    if let Some(words) = guard::in_words(innermost) {
        return words.to_string();
    }
    let line = innermost.line().or_else(|| error.line());
    let mut words = String::new();
    if let Some(line) = line {
        let _ = write!(words, "line {line}: ");
    }
    let _ = match innermost.detail() {
        Some(detail) => write!(words, "{}: {detail}", innermost.kind()),
        None => write!(words, "{}", innermost.kind()),
    };
    words
}

fn strftime_now(now: NaiveDateTime) -> Value {
    Value::from_function(move |format: String| -> std::result::Result<String, minijinja::Error> {
        let mut text = String::new();
        // chrono reports a format it does not know, or a time zone's (there is none here), as an error of the write.
        write!(text, "{}", now.format(&format)).map_err(|_| {
            minijinja::Error::new(
                ErrorKind::InvalidOperation,
                format!("strftime_now: cannot format a time as {format:?}"),
            )
        })?;
        Ok(text)
    })
}

/// The message as templates see it.
fn message_value(message: &Message) -> Value {
    let given = |name: &str| message.get(name).filter(|value| !value.is_null());
    let reasoning = ["reasoning_content", "thinking", "reasoning"].into_iter().find_map(given);
    let mut fields = Map::new();
    if let Some(reasoning) = reasoning {
        fields.insert("thinking".into(), reasoning.clone());
    }
    for (key, value) in message.fields().iter().filter(|(_, value)| !value.is_null()) {
        fields.insert(key.clone(), value.clone());
    }
    if let Some(reasoning) = reasoning {
        fields.insert("reasoning_content".into(), reasoning.clone());
    }
    to_template_value(&serde_json::Value::Object(fields))
}

fn holds_mark(value: &serde_json::Value) -> bool {
    match value {
        serde_json::Value::String(text) => text.contains(is_mark),
        serde_json::Value::Array(items) => items.iter().any(holds_mark),
        serde_json::Value::Object(fields) => {
            fields.iter().any(|(key, value)| key.contains(is_mark) || holds_mark(value))
        }
        _ => false,
    }
}

/// Rewrites what the engine reads otherwise than Jinja: the escapes of Python in strings, and a newline behind
/// `{% raw %}`, which stays. Every line keeps its number.
fn as_python_reads(source: &str) -> String {
    static RAW: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\A\{%[-+]?\s*raw\s*(?<right>[-+]?)%\}").expect("the expression is a constant")
    });
    static END_RAW: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(r"\{%[-+]?\s*endraw\s*[-+]?%\}").expect("the expression is a constant")
    });
    // Jinja reads every kind of line end as a newline.
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut rewritten = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(open) = rest.find('{') {
        let (before, tag) = rest.split_at(open);
        rewritten.push_str(before);
        let length = if tag.starts_with("{#") {
            tag.get(2..).and_then(|text| text.find("#}")).map_or(tag.len(), |place| 2 + place)
        } else if let Some(captures) = RAW.captures(tag) {
            let begin = captures.get(0).map_or(0, |whole| whole.end());
            if captures.name("right").is_some_and(|right| right.is_empty()) {
                // The engine keeps the newline behind `+%}` only.
                rewritten.push_str(tag.get(..begin - 2).unwrap_or_default());
                rewritten.push_str("+%}");
                rest = tag.get(begin..).unwrap_or_default();
                let length = END_RAW.find(rest).map_or(rest.len(), |end| end.end());
                let (raw, behind) = rest.split_at(length);
                rewritten.push_str(raw);
                rest = behind;
                continue;
            }
            END_RAW.find(tag).map_or(tag.len(), |end| end.end())
        } else if tag.starts_with("{{") || tag.starts_with("{%") {
            rest = with_python_strings(tag, &mut rewritten);
            continue;
        } else {
            1
        };
        let (same, behind) = tag.split_at(length);
        rewritten.push_str(same);
        rest = behind;
    }
    rewritten.push_str(rest);
    rewritten
}

/// Writes a tag with its strings' escapes rewritten, and gives what stands behind the tag.
fn with_python_strings<'a>(tag: &'a str, rewritten: &mut String) -> &'a str {
    let end = if tag.starts_with("{{") { "}}" } else { "%}" };
    let mut rest = tag.get(2..).unwrap_or_default();
    rewritten.push_str(tag.get(..2).unwrap_or_default());
    let mut open = 0usize;
    while let Some(character) = rest.chars().next() {
        if open == 0 && rest.starts_with(end) {
            break;
        }
        rest = rest.get(character.len_utf8()..).unwrap_or_default();
        rewritten.push(character);
        match character {
            '(' | '[' | '{' => open += 1,
            ')' | ']' | '}' => open = open.saturating_sub(1),
            '"' | '\'' => rest = with_python_escapes(rest, character, rewritten),
            _ => {}
        }
    }
    rest
}

/// Writes a string up to and with its quote, with those of Python's escapes that the engine reads otherwise written as
/// what they stand for; gives what stands behind it.
fn with_python_escapes<'a>(text: &'a str, quote: char, rewritten: &mut String) -> &'a str {
    let mut joined_lines = 0;
    let mut rest = text;
    while let Some(place) = rest.find([quote, '\\']) {
        let (before, behind) = rest.split_at(place);
        rewritten.push_str(before);
        rest = behind.get(1..).unwrap_or_default();
        if behind.starts_with(quote) {
            rewritten.push(quote);
            // Newlines that the string lost, so that lines keep their numbers.
            rewritten.push_str(&"\n".repeat(joined_lines));
            return rest;
        }
        let Some(escape) = rest.chars().next() else { break };
        rest = rest.get(escape.len_utf8()..).unwrap_or_default();
        match escape {
            '\n' => joined_lines += 1,
            'a' => rewritten.push_str("\\x07"),
            'v' => rewritten.push_str("\\x0b"),
            '/' => rewritten.push_str("\\\\/"),
            'U' => {
                let digits = rest.get(..8).unwrap_or_default();
                match u32::from_str_radix(digits, 16).ok().and_then(char::from_u32) {
                    // A quote or backslash keeps its meaning.
                    Some(character) if character.is_ascii() => {
                        let _ = write!(rewritten, "\\x{:02x}", u32::from(character));
                    }
                    Some(character) => rewritten.push(character),
                    // The engine refuses this, as Python does that.
                    None => {
                        rewritten.push_str("\\uU");
                        continue;
                    }
                }
                rest = rest.get(8..).unwrap_or_default();
            }
            other => {
                rewritten.push('\\');
                rewritten.push(other);
            }
        }
    }
    rewritten.push_str(rest);
    ""
}

/// Rewrites `{% generation %}` and `{% endgeneration %}` to statements the engine knows that print a mark.
///
/// Each becomes two statements with the mark between them: the first keeps the tag's left white space control and the
/// second its right one, so the text around stays what it would be. `with` gives the block a scope of its own, which
/// it has in `transformers`. Tags in comments and raw blocks stay as they are.
fn mark_generation_blocks(source: &str) -> (String, bool) {
    static TAGS: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(
            r"(?s)\{#.*?#\}|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}|\{%(?<left>[-+]?)\s*(?<end>end)?(?<tag>generation)\s*(?<right>[-+]?)%\}",
        )
        .expect("the expression is a constant")
    });
    let mut found = false;
    let marked = TAGS.replace_all(source, |captures: &Captures| {
        let part = |name: &str| captures.name(name).map_or("", |part| part.as_str());
        let (left, right) = (part("left"), part("right"));
        if part("tag").is_empty() {
            return captures.get(0).map_or(String::new(), |whole| whole.as_str().to_string());
        }
        found = true;
        if part("end").is_empty() {
            format!("{{%{left} with %}}{{{{ \"{BLOCK_START}\" }}}}{{% if true {right}%}}")
        } else {
            format!("{{%{left} endif %}}{{{{ \"{BLOCK_END}\" }}}}{{% endwith {right}%}}")
        }
    });
    (marked.into_owned(), found)
}

/// Takes the marks of generation blocks out of a rendering and says where they were.
fn split_blocks(rendered: &str) -> Result<Marked> {
    let mut text = String::with_capacity(rendered.len());
    let mut blocks = Vec::new();
    let mut open = None;
    for character in rendered.chars() {
        match (character, open) {
            (BLOCK_START, None) => open = Some(text.len()),
            (BLOCK_END, Some(start)) => {
                blocks.push(start..text.len());
                open = None;
            }
            (BLOCK_START | BLOCK_END, _) => {
                return Err(Error::Template(
                    "generation blocks are nested; one must end before the next starts".into(),
                ));
            }
            (other, _) => text.push(other),
        }
    }
    match open {
        None => Ok(Marked { text, blocks }),
        Some(_) => Err(Error::Template(
            "a generation block's end was cut away from the rendered text".into(),
        )),
    }
}
