//! `generate --prompts`: a file of prompts to a file of answers, many at once.
//!
//! Answers are added to a file beside the output as they end, each with the line that it answers. A run that is killed
//! goes on from there, if all that the answers follow from is what it was, and tries again what has failed; when all are
//! there, they are written to the output in the order of the prompts, and the file beside it goes.

use crate::engine::{AtOnce, Writing, Written, write_all};
use crate::errors::{FAILURE, INTERRUPTED, SUCCESS, usage};
use crate::interrupt;
use crate::models::{Loaded, check_adapter};
use crate::output::{self, Terminal, are, grouped, plural};
use crate::progress::Bar;
use crate::settings::cut;
use crate::{prompts, run_folder};
use anyhow::Context;
use clap::Args;
use metal_candle::adapter::Adapter;
use metal_candle::engine::{Engine, EngineOptions, Order, Request};
use metal_candle::files::{BYTE_ORDER_MARK, plain, write_atomic};
use metal_candle::generate::{FinishReason, GenerateOptions};
use metal_candle::model::Quantization;
use metal_candle::text::{Message, Tokenizer};
use metal_candle::train::FolderLock;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use std::cell::Cell;
use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

/// What is asked for when there are many prompts.
#[derive(Debug, Args)]
#[command(next_help_heading = "Many prompts")]
pub struct Batch {
    /// A file of JSON objects, one a line, each with a `prompt` or `messages`; `system`, `adapter` and the sampling
    /// options are those of the command unless a line says otherwise, and `id` and `metadata` are passed on
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_file"], requires = "output")]
    pub prompts: Option<PathBuf>,
    /// The file of answers, in the order of the prompts; a run that was stopped goes on
    #[arg(short, long, value_name = "FILE", requires = "prompts", conflicts_with_all = ["prompt", "prompt_file"])]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub at_once: AtOnce,
}

/// A line of the prompts.
#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Line {
    id: Option<Value>,
    metadata: Option<Value>,
    prompt: Option<String>,
    messages: Option<Vec<Map<String, Value>>>,
    system: Option<String>,
    /// `null` is the model without an adapter.
    #[serde(deserialize_with = "given")]
    adapter: Option<Option<PathBuf>>,
    max_tokens: Option<usize>,
    temperature: Option<f64>,
    top_k: Option<usize>,
    top_p: Option<f64>,
    min_p: Option<f64>,
    repetition_penalty: Option<f64>,
    presence_penalty: Option<f64>,
    frequency_penalty: Option<f64>,
    logit_bias: Option<BTreeMap<u32, f32>>,
    seed: Option<u64>,
    stop: Option<Stop>,
    ignore_eos: Option<bool>,
}

/// A value that is there, be it null.
fn given<'de, D: Deserializer<'de>>(reader: D) -> Result<Option<Option<PathBuf>>, D::Error> {
    Option::deserialize(reader).map(Some)
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Stop {
    One(String),
    Several(Vec<String>),
}

/// An answer, as it is written.
#[derive(Debug, Serialize, Deserialize)]
struct Answer {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    metadata: Option<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    finish_reason: Option<FinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    prompt_tokens: usize,
    tokens: usize,
}

/// The first line of the file beside the output: what its answers follow from beside the prompts and the adapters.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Head {
    program: String,
    /// Where the model lay, which decides nothing.
    model: String,
    settings: Value,
}

/// A line of the file beside the output: an answer, what it answers, and the fingerprint of the adapter that it was written
/// with.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    line: String,
    adapter: Option<String>,
    answer: Answer,
}

/// What a line asks for, and the line.
struct Asked {
    line: String,
    id: Option<Value>,
    metadata: Option<Value>,
    adapter: Option<Arc<Used>>,
    request: Request,
}

/// An adapter that answers are written with.
struct Used {
    folder: PathBuf,
    adapter: Arc<Adapter>,
    fingerprint: String,
}

impl Used {
    fn new(folder: &Path, adapter: Arc<Adapter>) -> anyhow::Result<Arc<Self>> {
        let fingerprint = format!("{:016x}", adapter.fingerprint()?);
        Ok(Arc::new(Self { folder: folder.to_path_buf(), adapter, fingerprint }))
    }
}

/// Everything that the answers need beside the prompts.
pub struct Given<'a> {
    pub loaded: &'a Loaded,
    /// What the model was brought into while it was loaded.
    pub quantization: Option<Quantization>,
    /// How many devices have a part of it each.
    pub ranks: usize,
    /// The folder of the adapter that is used where a line names none.
    pub adapter: Option<&'a Path>,
    pub options: GenerateOptions,
    /// Whether somebody said how many tokens a text has at most.
    pub says_max_tokens: bool,
    pub system: Option<&'a str>,
    pub raw: bool,
}

impl Given<'_> {
    /// What the answers follow from beside the prompts and the adapters; those of another run are not taken over.
    fn head(&self, writing: &Writing) -> anyhow::Result<Head> {
        // Whether a prompt is continued as it is follows from the template and `raw`.
        let GenerateOptions {
            max_tokens,
            sampling,
            stop,
            ignore_eos,
            top_logprobs: _,
            continues_prompt: _,
        } = &self.options;
        let model = &self.loaded.model;
        let setting = self.quantization.map(Quantization::setting);
        let value = |key: &str| setting.filter(|(name, _)| *name == key).map(|(_, value)| value);
        let mut bytes = 0;
        for path in model.files() {
            bytes += path.metadata().map_err(metal_candle::Error::io(path))?.len();
        }
        let settings = json!({
            "dtype": model.dtype().as_str(),
            "quantize": value("quantize"),
            "base_compute": value("base_compute"),
            "tensor_parallel": self.ranks,
            "cache_dtype": writing.cache_dtype.to_string(),
            "batch_invariant": writing.batch_invariant,
            "chat_template": self.loaded.tokenizer.chat_template().map(|it| it.fingerprint()),
            "chat_template_kwargs": self.loaded.variables,
            "system": self.system,
            "raw": self.raw,
            "max_tokens": max_tokens,
            "sampling": sampling,
            "stop": stop,
            "ignore_eos": ignore_eos,
            // These differ as well where the model is held otherwise, so they are compared last.
            WEIGHTS: format!("{:016x} of {bytes} bytes", model.fingerprint()?),
        });
        Ok(Head {
            program: concat!("metal-candle ", env!("CARGO_PKG_VERSION")).into(),
            model: output::path(&self.loaded.folder),
            settings,
        })
    }
}

/// The key of a hash of samples of all weights as they are held, and the size of their files.
const WEIGHTS: &str = "weights";

impl Head {
    /// Why what follows `before` are no answers of this run; `None` if they are.
    fn refusal(&self, before: &[u8]) -> Option<String> {
        let Ok(before) = serde_json::from_slice::<Self>(before) else {
            return Some(
                "is of another version of this program, which kept less of what its answers follow from".into(),
            );
        };
        if before.program != self.program {
            return Some(format!("is of {}, and this is {}", before.program, self.program));
        }
        let (key, was, is) = difference("", &before.settings, &self.settings)?;
        let of = |head: &Self, value: &Value| {
            let shown = match value {
                Value::Null => "none".into(),
                Value::String(text) => cut(text),
                other => cut(&other.to_string()),
            };
            if key == WEIGHTS { format!("{shown} in {}", head.model) } else { shown }
        };
        Some(format!(
            "has answers of a run with other settings: {key} was {} and is now {}",
            of(&before, &was),
            of(self, &is)
        ))
    }
}

/// The first place where two settings differ, its path below `key`, and the values.
fn difference(key: &str, before: &Value, now: &Value) -> Option<(String, Value, Value)> {
    let (Value::Object(befores), Value::Object(nows)) = (before, now) else {
        return (before != now).then(|| (key.into(), before.clone(), now.clone()));
    };
    nows.keys().chain(befores.keys()).find_map(|name| {
        let path = if key.is_empty() { name.clone() } else { format!("{key}.{name}") };
        let of = |map: &Map<String, Value>| map.get(name).cloned().unwrap_or_default();
        difference(&path, &of(befores), &of(nows))
    })
}

#[derive(Serialize)]
struct Report {
    answers: usize,
    failed: usize,
    prompt_tokens: usize,
    tokens: usize,
    seconds: f64,
    tokens_per_second: f64,
    output: String,
}

/// Answers a file of prompts.
pub fn run(
    (at_once, writing): (&AtOnce, &Writing),
    prompts: &Path,
    output: &Path,
    given: &Given,
    terminal: Terminal,
) -> anyhow::Result<u8> {
    let engine_options = writing.options_for(at_once);
    engine_options.validate().map_err(usage)?;
    let asked = read(prompts, given)?;
    let _lock = run_folder::hold(FolderLock::acquire_beside(output))?;
    let exists = || usage(format!("output: {} exists already; choose another", output.display()));
    if output.exists() && !Partial::path(output).exists() {
        return Err(exists());
    }
    let mut partial = Partial::open(output, &given.head(writing)?, &asked)?;
    let written = if output.exists() {
        // A run that was killed in its last moment has written it.
        if !partial.is_all_of(output)? {
            return Err(exists());
        }
        Counts::default()
    } else {
        partial.tell(terminal);
        partial.forget_errors();
        match answer(engine_options, writing, given, &asked, &mut partial, terminal)? {
            Some(written) => {
                partial.write(output)?;
                written
            }
            None => return Ok(INTERRUPTED),
        }
    };
    let failed = partial.finish()?;
    interrupt::unwatch();
    let Counts { prompt_tokens, tokens, seconds } = written;
    let report = Report {
        answers: asked.len(),
        failed,
        prompt_tokens,
        tokens,
        seconds,
        tokens_per_second: if tokens == 0 { 0.0 } else { tokens as f64 / seconds },
        output: output::path(output),
    };
    if terminal.json {
        output::json(&report)?;
    } else {
        terminal.note(format!(
            "{}: {}, {} at {} a second",
            output.display(),
            plural(asked.len() as u64, "answer"),
            plural(report.tokens as u64, "token"),
            grouped(report.tokens_per_second as u64)
        ));
    }
    if failed > 0 {
        let are = are(failed as u64, "answer");
        let what = if failed == 1 { "an error" } else { "errors" };
        terminal.note(format!("{are} {what}"));
        return Ok(FAILURE);
    }
    Ok(SUCCESS)
}

/// What was read and written.
#[derive(Default)]
struct Counts {
    prompt_tokens: usize,
    tokens: usize,
    seconds: f64,
}

/// Writes the answers that are not there yet; `None` when it was told to stop.
fn answer(
    mut engine_options: EngineOptions,
    writing: &Writing,
    given: &Given,
    asked: &[Asked],
    partial: &mut Partial,
    terminal: Terminal,
) -> anyhow::Result<Option<Counts>> {
    engine_options.draft_model = writing.draft_model(given.loaded, terminal)?;
    engine_options.order = Order::Longest;
    let stop = interrupt::watch("stopping; the same command goes on from here");
    let mut engine =
        Engine::new(&given.loaded.model, Some(&given.loaded.tokenizer), engine_options)?;
    let bar = Bar::new(
        terminal,
        "{bar:30} {pos}/{len} answers  {wide_msg} {elapsed}, {eta} left",
        asked.len() as u64,
    );
    let started = Instant::now();
    let mut left: Vec<usize> =
        (0..asked.len()).filter(|index| partial.answers[*index].is_none()).collect();
    // The engine doesn't see all of them at once.
    left.sort_by_key(|&index| Reverse(asked[index].request.options.max_tokens));
    let ended = Cell::new(asked.len() - left.len());
    let (mut tokens, mut prompt_tokens) = (0, 0);
    let requests = left.into_iter().map(|index| (index, asked[index].request.clone()));
    let keep = |index: usize, written: Result<Written, String>| {
        ended.set(ended.get() + 1);
        let answer = written.map(|Written { text, finished }| {
            prompt_tokens += finished.prompt_tokens;
            tokens += finished.tokens;
            (text, finished.reason, finished.tokens)
        });
        partial.add(asked, index, answer)
    };
    let show = |so_far: u64| {
        if let Some(bar) = bar.drawn() {
            bar.set_position(ended.get() as u64);
            let rate = so_far as f64 / started.elapsed().as_secs_f64();
            bar.set_message(format!("{} tok/s", grouped(rate as u64)));
        }
        !stop.load(Ordering::Relaxed)
    };
    let has_all = write_all(&mut engine, &given.loaded.tokenizer, requests, keep, show)?;
    let seconds = started.elapsed().as_secs_f64();
    Ok(has_all.then_some(Counts { prompt_tokens, tokens, seconds }))
}

/// The lines of a file of prompts, each checked before the first is answered.
fn read(path: &Path, given: &Given) -> anyhow::Result<Vec<Asked>> {
    let file = File::open(path).map_err(metal_candle::Error::io(path))?;
    let mut adapters = Adapters::new(given)?;
    let mut asked = Vec::new();
    for (number, line) in (1..).zip(BufReader::new(file).lines()) {
        let mut line = line.with_context(|| format!("{}:{number}", path.display()))?;
        if number == 1 && line.starts_with(BYTE_ORDER_MARK) {
            line.drain(..BYTE_ORDER_MARK.len());
        }
        if line.trim().is_empty() {
            continue;
        }
        let index = asked.len();
        let read = parse(&line).and_then(|parsed| ask(line, parsed, index, given, &mut adapters));
        asked.push(read.map_err(|error| usage(format!("{}:{number}: {error:#}", path.display())))?);
    }
    if asked.is_empty() {
        return Err(usage(format!("{}: has no prompts", path.display())));
    }
    Ok(asked)
}

fn parse(line: &str) -> anyhow::Result<Line> {
    let mut reader = serde_json::Deserializer::from_str(line);
    let read = serde_path_to_error::deserialize(&mut reader);
    let parsed = read.map_err(|error| {
        let (key, message) = (error.path().to_string(), plain(&error.inner().to_string()));
        match key.as_str() {
            "." => anyhow::anyhow!("{message}"),
            _ => anyhow::anyhow!("{key}: {message}"),
        }
    })?;
    reader.end().map_err(|_| anyhow::anyhow!("something follows the object"))?;
    Ok(parsed)
}

/// The adapter that is used where a line names none, and those that lines name.
struct Adapters {
    given: Option<Arc<Used>>,
    named: HashMap<PathBuf, Arc<Used>>,
}

impl Adapters {
    fn new(given: &Given) -> anyhow::Result<Self> {
        let both = given.adapter.zip(given.loaded.adapter.clone());
        let given = both.map(|(folder, adapter)| Used::new(folder, adapter)).transpose()?;
        Ok(Self { given, named: HashMap::new() })
    }
}

/// What a line asks for, with what it leaves to the command.
fn ask(
    text: String,
    line: Line,
    index: usize,
    given: &Given,
    adapters: &mut Adapters,
) -> anyhow::Result<Asked> {
    let loaded = given.loaded;
    let (prompt, mut options) = (tokens(&line, given)?, options(&line, index, given)?);
    if line.max_tokens.is_none() && !given.says_max_tokens {
        // Where nobody says, a text ends where the model's context does, for which the cache has room in any case.
        let context = loaded.model.config().context();
        options.max_tokens = options.max_tokens.min(context.saturating_sub(prompt.len()).max(1));
    }
    let adapter = match line.adapter {
        None => adapters.given.clone(),
        Some(None) => None,
        Some(Some(folder)) => Some(match adapters.named.get(&folder) {
            Some(used) => used.clone(),
            None => {
                check_adapter(&folder).context("adapter")?;
                let adapter = Arc::new(Adapter::load(&loaded.model, &folder)?);
                let used = Used::new(&folder, adapter)?;
                adapters.named.entry(folder).or_insert(used).clone()
            }
        }),
    };
    let request = Request {
        prompt,
        options,
        adapter: adapter.as_ref().map(|used| used.adapter.clone()),
        ..Request::default()
    };
    Ok(Asked { line: text, id: line.id, metadata: line.metadata, adapter, request })
}

fn tokens(line: &Line, given: &Given) -> anyhow::Result<Vec<u32>> {
    let Loaded { tokenizer, variables, .. } = given.loaded;
    let system = line.system.as_deref().or(given.system);
    match (&line.prompt, &line.messages) {
        (Some(prompt), None) => {
            anyhow::ensure!(!prompt.trim().is_empty(), "prompt: is empty");
            anyhow::ensure!(
                !given.raw || line.system.is_none(),
                "system: is for the chat template, and with --raw a prompt is continued as it is; leave one out"
            );
            needs_template(line.system.as_ref().map(|_| "system"), tokenizer)?;
            Ok(prompts::encode(tokenizer, prompt, system, given.raw, variables)?)
        }
        (None, Some(messages)) => {
            anyhow::ensure!(
                !given.raw,
                "messages: are for the chat template, which --raw leaves out; give a prompt, or leave --raw out"
            );
            needs_template(Some("messages"), tokenizer)?;
            let mut all: Vec<Message> = Vec::new();
            let first = messages.first().and_then(|it| it.get("role"));
            if first.and_then(Value::as_str) != Some("system") {
                all.extend(system.map(|system| Message::new("system", system)));
            } else if line.system.is_some() {
                anyhow::bail!("has both system and a message of the system, expected one of them");
            }
            for (number, fields) in messages.iter().enumerate() {
                let message = Message::from_fields(fields.clone())
                    .and_then(|message| message.check_text().map(|()| message))
                    .map_err(|error| anyhow::anyhow!("messages[{number}]: {error}"))?;
                all.push(message);
            }
            Ok(prompts::encode_chat(tokenizer, &all, variables)?)
        }
        (None, None) => anyhow::bail!("has neither prompt nor messages"),
        (Some(_), Some(_)) => anyhow::bail!("has both prompt and messages, expected one of them"),
    }
}

fn needs_template(key: Option<&str>, tokenizer: &Tokenizer) -> anyhow::Result<()> {
    match (key, tokenizer.chat_template()) {
        (Some(key), None) => anyhow::bail!("{key}: this model has no chat template"),
        _ => Ok(()),
    }
}

/// The sampling options of a line. Lines without a seed have different ones, so that a prompt may come several times.
fn options(line: &Line, index: usize, given: &Given) -> anyhow::Result<GenerateOptions> {
    let mut options = given.options.clone();
    let sampling = &mut options.sampling;
    sampling.seed = line.seed.unwrap_or(sampling.seed.wrapping_add(index as u64));
    let numbers = [
        (line.temperature, &mut sampling.temperature),
        (line.top_p, &mut sampling.top_p),
        (line.min_p, &mut sampling.min_p),
        (line.repetition_penalty, &mut sampling.repetition_penalty),
        (line.presence_penalty, &mut sampling.presence_penalty),
        (line.frequency_penalty, &mut sampling.frequency_penalty),
    ];
    for (number, option) in numbers {
        *option = number.unwrap_or(*option);
    }
    sampling.top_k = line.top_k.unwrap_or(sampling.top_k);
    if let Some(bias) = &line.logit_bias {
        sampling.logit_bias = bias.clone();
    }
    options.max_tokens = line.max_tokens.unwrap_or(options.max_tokens);
    options.ignore_eos = line.ignore_eos.unwrap_or(options.ignore_eos);
    options.continues_prompt =
        line.messages.is_none() && prompts::is_continued(&given.loaded.tokenizer, given.raw);
    match &line.stop {
        None => {}
        Some(Stop::One(stop)) => options.stop = vec![stop.clone()],
        Some(Stop::Several(stop)) => options.stop = stop.clone(),
    }
    options.validate()?;
    Ok(options)
}

/// The answers so far, in memory and in a file beside the output.
struct Partial {
    path: PathBuf,
    file: File,
    answers: Vec<Option<Answer>>,
}

impl Partial {
    /// Where it is.
    fn path(output: &Path) -> PathBuf {
        let mut name = output.file_name().unwrap_or_default().to_os_string();
        name.push(".partial");
        output.with_file_name(name)
    }

    /// Takes over what an earlier run has left.
    fn open(output: &Path, head: &Head, asked: &[Asked]) -> anyhow::Result<Self> {
        let path = Self::path(output);
        let io = |error| metal_candle::Error::Io { path: path.clone(), source: error };
        let refused = |what: String| {
            let path = path.display();
            usage(format!("output: {path} {what}; choose another output, or remove it"))
        };
        let mut answers: Vec<Option<Answer>> = asked.iter().map(|_| None).collect();
        let found = match fs::read(&path) {
            Ok(found) => Some(found),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => return Err(io(error).into()),
        };
        let mut file =
            OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(io)?;
        let mut length = 0;
        let lines = found.as_deref().unwrap_or_default().split_inclusive(|byte| *byte == b'\n');
        for (number, line) in lines.enumerate() {
            // What was cut off by a kill is written again.
            if !line.ends_with(b"\n") {
                break;
            }
            length += line.len() as u64;
            if number == 0 {
                if let Some(refusal) = head.refusal(line) {
                    return Err(refused(refusal));
                }
                continue;
            }
            let kept: Kept = serde_json::from_slice(line).map_err(|_| {
                metal_candle::Error::file(&path, format!("line {} is no answer", number + 1))
            })?;
            let index = kept.answer.index;
            let asked = asked.get(index).filter(|asked| asked.line == kept.line);
            let Some((asked, slot)) = asked.zip(answers.get_mut(index)) else {
                return Err(refused("has answers to other prompts".into()));
            };
            let used = asked.adapter.as_deref();
            if used.map(|used| &used.fingerprint) != kept.adapter.as_ref() {
                let was = kept.adapter.as_deref().unwrap_or("none");
                let is = used.map_or("none".into(), |Used { folder, fingerprint, .. }| {
                    format!("{fingerprint} in {}", folder.display())
                });
                return Err(refused(format!(
                    "has an answer to the prompt {index} by another adapter: it was {was} and is now {is}"
                )));
            }
            *slot = Some(kept.answer);
        }
        file.set_len(length).map_err(io)?;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)).map_err(io)?;
        if length == 0 {
            let head = serde_json::to_string(head)? + "\n";
            file.write_all(head.as_bytes()).map_err(io)?;
        }
        Ok(Self { path, file, answers })
    }

    /// Says how much is there already.
    fn tell(&self, terminal: Terminal) {
        let there = self.answers.iter().flatten().count();
        let failed = self.failed();
        if there > failed {
            terminal.note(format!("{} there already", are((there - failed) as u64, "answer")));
        }
        if failed > 0 {
            terminal
                .note(format!("{} tried again, after errors before", are(failed as u64, "answer")));
        }
    }

    /// How many answers are errors.
    fn failed(&self) -> usize {
        self.answers.iter().flatten().filter(|answer| answer.error.is_some()).count()
    }

    /// Lets what has failed be tried again: another cache may have room for it.
    fn forget_errors(&mut self) {
        for slot in &mut self.answers {
            slot.take_if(|answer| answer.error.is_some());
        }
    }

    /// Adds an answer: its text, how it ended and how many tokens it has, or why there is none.
    fn add(
        &mut self,
        asked: &[Asked],
        index: usize,
        answer: Result<(String, FinishReason, usize), String>,
    ) -> anyhow::Result<()> {
        let Asked { line, id, metadata, adapter, request } = &asked[index];
        let (text, finish_reason, tokens, error) = match answer {
            Ok((text, reason, tokens)) => (Some(text), Some(reason), tokens, None),
            Err(error) => (None, None, 0, Some(error)),
        };
        let answer = Answer {
            index,
            id: id.clone(),
            metadata: metadata.clone(),
            text,
            finish_reason,
            error,
            prompt_tokens: request.prompt.len(),
            tokens,
        };
        let adapter = adapter.as_ref().map(|used| used.fingerprint.clone());
        let kept = Kept { line: line.clone(), adapter, answer };
        let text = serde_json::to_string(&kept)? + "\n";
        self.file.write_all(text.as_bytes()).map_err(metal_candle::Error::io(&self.path))?;
        self.answers[index] = Some(kept.answer);
        Ok(())
    }

    /// Writes all answers, in the order of the prompts.
    fn write(&self, output: &Path) -> anyhow::Result<()> {
        Ok(write_atomic(output, |writer| self.write_to(writer))?)
    }

    fn write_to(&self, writer: &mut impl Write) -> std::io::Result<()> {
        for answer in self.answers.iter().flatten() {
            serde_json::to_writer(&mut *writer, answer)?;
            writer.write_all(b"\n")?;
        }
        Ok(())
    }

    /// Whether the output has been written, with all answers.
    fn is_all_of(&self, output: &Path) -> anyhow::Result<bool> {
        let mut expected = Vec::new();
        self.write_to(&mut expected)?;
        let found = fs::read(output).map_err(metal_candle::Error::io(output))?;
        Ok(self.answers.iter().all(Option::is_some) && found == expected)
    }

    /// Goes once the output is there; says how many answers are errors.
    fn finish(self) -> anyhow::Result<usize> {
        fs::remove_file(&self.path).map_err(metal_candle::Error::io(&self.path))?;
        Ok(self.failed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head() -> Head {
        let settings =
            json!({"quantize": null, "sampling": {"top_k": 3}, WEIGHTS: "1f of 9 bytes"});
        Head { program: "metal-candle 1.0.0".into(), model: "base".into(), settings }
    }

    fn asked(count: usize) -> Vec<Asked> {
        (0..count)
            .map(|index| Asked {
                line: format!("{{\"prompt\": \"{index}\"}}"),
                id: None,
                metadata: None,
                adapter: None,
                request: Request::default(),
            })
            .collect()
    }

    #[test]
    fn what_differs_from_the_run_before_is_named_with_both_values() {
        let told = |change: &dyn Fn(&mut Head)| {
            let mut now = head();
            change(&mut now);
            now.refusal(&serde_json::to_vec(&head()).unwrap()).unwrap_or_default()
        };
        assert_eq!(told(&|_| ()), "");
        assert_eq!(told(&|now| now.model = "moved".into()), "", "where it lies decides nothing");
        let of = "has answers of a run with other settings: ";
        for (key, value, expected) in [
            ("/quantize", json!("q4_0"), "quantize was none and is now q4_0"),
            ("/sampling/top_k", json!(4), "sampling.top_k was 3 and is now 4"),
            ("/weights", json!("2e"), "weights was 1f of 9 bytes in base and is now 2e in base"),
        ] {
            let told = told(&|now| *now.settings.pointer_mut(key).unwrap() = value.clone());
            assert_eq!(told, format!("{of}{expected}"));
        }
        let told = told(&|now| now.program = "metal-candle 2.0.0".into());
        assert_eq!(told, "is of metal-candle 1.0.0, and this is metal-candle 2.0.0");
        // As it was written before the settings stood apart.
        let former = json!({"program": "metal-candle 1.0.0", "model": "base", "dtype": "f32"});
        let told = head().refusal(former.to_string().as_bytes()).unwrap();
        assert!(told.contains("another version of this program"), "{told}");
    }

    #[test]
    fn errors_are_tried_again_and_an_output_that_was_written_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let (output, asked) = (folder.path().join("out.jsonl"), asked(3));
        let open = || Partial::open(&output, &head(), &asked).unwrap();
        let mut partial = open();
        let good = || Ok(("yes".to_string(), FinishReason::Stop, 1));
        partial.add(&asked, 2, good()).unwrap();
        partial.add(&asked, 0, Err("no room".into())).unwrap();
        partial.write(&output).unwrap();
        assert!(!partial.is_all_of(&output).unwrap(), "one is missing");

        let mut partial = open();
        assert_eq!((partial.answers.iter().flatten().count(), partial.failed()), (2, 1));
        partial.forget_errors();
        assert!(partial.answers[0].is_none() && partial.answers[2].is_some());
        partial.add(&asked, 0, good()).unwrap();
        partial.add(&asked, 1, Err("no room".into())).unwrap();
        fs::write(&output, "another's\n").unwrap();
        assert!(!partial.is_all_of(&output).unwrap());
        partial.write(&output).unwrap();

        // What was tried again counts, and so does what has failed at last.
        let partial = open();
        assert!(partial.is_all_of(&output).unwrap());
        assert_eq!(partial.finish().unwrap(), 1);
        assert!(!Partial::path(&output).exists());
    }

    #[test]
    fn answers_by_another_adapter_are_not_taken_over() {
        let folder = tempfile::tempdir().unwrap();
        let (output, asked) = (folder.path().join("out.jsonl"), asked(1));
        let mut partial = Partial::open(&output, &head(), &asked).unwrap();
        partial.add(&asked, 0, Err("no room".into())).unwrap();
        let path = Partial::path(&output);
        let text = fs::read_to_string(&path).unwrap();
        fs::write(&path, text.replace("\"adapter\":null", "\"adapter\":\"1f\"")).unwrap();
        let error = Partial::open(&output, &head(), &asked).map(|_| ()).unwrap_err().to_string();
        assert!(
            error.contains("prompt 0 by another adapter: it was 1f and is now none"),
            "{error}"
        );
    }
}
