//! `generate --prompts`: a file of prompts to a file of answers, many at once.
//!
//! Answers are added to a file beside the output as they end, each with the line that it answers. A run that is killed
//! goes on from there; when all are there, they are written to the output in the order of the prompts, and the file
//! beside it goes.

use crate::engine::{AtOnce, Writing, Written, write_all};
use crate::errors::{FAILURE, INTERRUPTED, SUCCESS, usage};
use crate::interrupt;
use crate::models::{Loaded, check_adapter};
use crate::output::{self, Terminal, are, grouped, plural};
use crate::progress::Bar;
use crate::prompts;
use anyhow::Context;
use clap::Args;
use metal_candle::adapter::Adapter;
use metal_candle::engine::{Engine, Request};
use metal_candle::files::{plain, write_atomic};
use metal_candle::generate::{FinishReason, GenerateOptions};
use metal_candle::text::{Message, Tokenizer};
use metal_candle::train::FolderLock;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};
use std::cell::Cell;
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

/// A line of the file beside the output: an answer and what it answers.
#[derive(Debug, Serialize, Deserialize)]
struct Kept {
    line: String,
    answer: Answer,
}

/// What a line asks for, and the line.
struct Asked {
    line: String,
    id: Option<Value>,
    metadata: Option<Value>,
    request: Request,
}

/// Everything that the answers need beside the prompts.
pub struct Given<'a> {
    pub loaded: &'a Loaded,
    /// The folder of the adapter that is used where a line names none.
    pub adapter: Option<&'a Path>,
    pub options: GenerateOptions,
    /// Whether somebody said how many tokens a text has at most.
    pub says_max_tokens: bool,
    pub system: Option<&'a str>,
    pub raw: bool,
}

impl Given<'_> {
    /// What the answers follow from beside the prompts; those of another run are not taken over.
    fn settings(&self) -> Value {
        let GenerateOptions { max_tokens, sampling, stop, ignore_eos, top_logprobs: _ } =
            &self.options;
        json!({
            "program": concat!("metal-candle ", env!("CARGO_PKG_VERSION")),
            "model": output::path(&self.loaded.folder),
            "dtype": self.loaded.model.dtype().as_str(),
            "adapter": self.adapter.map(output::path),
            "template": self.loaded.tokenizer.chat_template().map(|it| it.fingerprint()),
            "variables": self.loaded.variables,
            "system": self.system,
            "raw": self.raw,
            "max_tokens": max_tokens,
            "sampling": sampling,
            "stop": stop,
            "ignore_eos": ignore_eos,
        })
    }
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
    let mut engine_options = writing.options_for(at_once);
    engine_options.validate().map_err(usage)?;
    if output.exists() {
        return Err(usage(format!("output: {} exists already; choose another", output.display())));
    }
    let asked = read(prompts, given)?;
    let _lock = FolderLock::acquire_beside(output)?;
    let mut partial = Partial::open(output, given, &asked, terminal)?;
    engine_options.draft_model = writing.draft_model(&given.loaded.model, terminal)?;
    let stop = interrupt::watch("stopping; the same command goes on from here");
    let mut engine =
        Engine::new(&given.loaded.model, Some(&given.loaded.tokenizer), engine_options)?;
    let bar = Bar::new(
        terminal,
        "{bar:30} {pos}/{len} answers  {wide_msg} {elapsed}, {eta} left",
        asked.len() as u64,
    );
    let started = Instant::now();
    let left: Vec<usize> =
        (0..asked.len()).filter(|index| partial.answers[*index].is_none()).collect();
    let ended = Cell::new(asked.len() - left.len());
    let (mut tokens, mut prompt_tokens) = (0, 0);
    let requests = left.into_iter().map(|index| (index, asked[index].request.clone()));
    let keep = |index: usize, written: Result<Written, String>| {
        ended.set(ended.get() + 1);
        let answer = written.map(|Written { text, finished }| {
            prompt_tokens += finished.prompt_tokens;
            (text, finished.reason, finished.tokens)
        });
        partial.add(&asked, index, answer)
    };
    let show = |so_far: u64| {
        tokens = so_far;
        if let Some(bar) = bar.drawn() {
            bar.set_position(ended.get() as u64);
            let rate = so_far as f64 / started.elapsed().as_secs_f64();
            bar.set_message(format!("{} tok/s", grouped(rate as u64)));
        }
        !stop.load(Ordering::Relaxed)
    };
    if !write_all(&mut engine, requests, keep, show)? {
        return Ok(INTERRUPTED);
    }
    drop(bar);
    interrupt::unwatch();
    let seconds = started.elapsed().as_secs_f64();
    let failed = partial.finish(output)?;
    let report = Report {
        answers: asked.len(),
        failed,
        prompt_tokens,
        tokens: tokens as usize,
        seconds,
        tokens_per_second: tokens as f64 / seconds,
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

/// The lines of a file of prompts, each checked before the first is answered.
fn read(path: &Path, given: &Given) -> anyhow::Result<Vec<Asked>> {
    let file = File::open(path).map_err(metal_candle::Error::io(path))?;
    let mut adapters = HashMap::new();
    let mut asked = Vec::new();
    for (number, line) in (1..).zip(BufReader::new(file).lines()) {
        let line = line.with_context(|| format!("{}:{number}", path.display()))?;
        if line.trim().is_empty() {
            continue;
        }
        let index = asked.len();
        let request = parse(&line)
            .and_then(|line| request(line, index, given, &mut adapters))
            .map_err(|error| usage(format!("{}:{number}: {error:#}", path.display())))?;
        let (id, metadata, request) = request;
        asked.push(Asked { line, id, metadata, request });
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

type Adapters = HashMap<PathBuf, Arc<Adapter>>;

/// What a line asks for, with what it leaves to the command.
fn request(
    line: Line,
    index: usize,
    given: &Given,
    adapters: &mut Adapters,
) -> anyhow::Result<(Option<Value>, Option<Value>, Request)> {
    let loaded = given.loaded;
    let (prompt, mut options) = (tokens(&line, given)?, options(&line, index, given)?);
    if line.max_tokens.is_none() && !given.says_max_tokens {
        // Where nobody says, a text ends where the model's context does, for which the cache has room in any case.
        let context = loaded.model.config().max_position_embeddings;
        options.max_tokens = options.max_tokens.min(context.saturating_sub(prompt.len()).max(1));
    }
    let adapter = match line.adapter {
        None => loaded.adapter.clone(),
        Some(None) => None,
        Some(Some(folder)) => Some(match adapters.get(&folder) {
            Some(adapter) => adapter.clone(),
            None => {
                check_adapter(&folder).context("adapter")?;
                let adapter = Arc::new(Adapter::load(&loaded.model, &folder)?);
                adapters.entry(folder).or_insert(adapter).clone()
            }
        }),
    };
    Ok((line.id, line.metadata, Request { prompt, options, adapter, ..Request::default() }))
}

fn tokens(line: &Line, given: &Given) -> anyhow::Result<Vec<u32>> {
    let Loaded { tokenizer, variables, .. } = given.loaded;
    let system = line.system.as_deref().or(given.system);
    match (&line.prompt, &line.messages) {
        (Some(prompt), None) => {
            anyhow::ensure!(!prompt.trim().is_empty(), "prompt: is empty");
            needs_template(line.system.as_ref().map(|_| "system"), tokenizer)?;
            Ok(prompts::encode(tokenizer, prompt, system, given.raw, variables)?)
        }
        (None, Some(messages)) => {
            needs_template(Some("messages"), tokenizer)?;
            let mut all: Vec<Message> = Vec::new();
            let has_system = messages.first().and_then(|it| it.get("role"));
            if has_system.and_then(Value::as_str) != Some("system") {
                all.extend(system.map(|system| Message::new("system", system)));
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
    /// Takes over what an earlier run has left.
    fn open(
        output: &Path,
        given: &Given,
        asked: &[Asked],
        terminal: Terminal,
    ) -> anyhow::Result<Self> {
        let mut name = output.file_name().unwrap_or_default().to_os_string();
        name.push(".partial");
        let path = output.with_file_name(name);
        let settings = given.settings().to_string();
        let io = |error| metal_candle::Error::Io { path: path.clone(), source: error };
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
            if number == 0 {
                if line.trim_ascii_end() != settings.as_bytes() {
                    return Err(usage(format!(
                        "output: {} has answers of a run with other settings or another model; choose another \
                         output, or remove it",
                        path.display()
                    )));
                }
            } else {
                let kept: Kept = serde_json::from_slice(line).map_err(|_| {
                    metal_candle::Error::file(&path, format!("line {} is no answer", number + 1))
                })?;
                let same =
                    asked.get(kept.answer.index).is_some_and(|asked| asked.line == kept.line);
                let slot = answers.get_mut(kept.answer.index).filter(|_| same);
                *slot.ok_or_else(|| {
                    usage(format!(
                        "output: {} has answers to other prompts; choose another output, or remove it",
                        path.display()
                    ))
                })? = Some(kept.answer);
            }
            length += line.len() as u64;
        }
        file.set_len(length).map_err(io)?;
        std::io::Seek::seek(&mut file, std::io::SeekFrom::End(0)).map_err(io)?;
        if length == 0 {
            file.write_all(format!("{settings}\n").as_bytes()).map_err(io)?;
        }
        let there = answers.iter().flatten().count();
        if there > 0 {
            terminal.note(format!("{} there already", are(there as u64, "answer")));
        }
        Ok(Self { path, file, answers })
    }

    /// Adds an answer: its text, how it ended and how many tokens it has, or why there is none.
    fn add(
        &mut self,
        asked: &[Asked],
        index: usize,
        answer: Result<(String, FinishReason, usize), String>,
    ) -> anyhow::Result<()> {
        let Asked { line, id, metadata, request } = &asked[index];
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
        let kept = Kept { line: line.clone(), answer };
        let text = serde_json::to_string(&kept)? + "\n";
        self.file.write_all(text.as_bytes()).map_err(metal_candle::Error::io(&self.path))?;
        self.answers[index] = Some(kept.answer);
        Ok(())
    }

    /// Writes the output; says how many answers are errors.
    fn finish(self, output: &Path) -> anyhow::Result<usize> {
        write_atomic(output, |writer| {
            for answer in self.answers.iter().flatten() {
                serde_json::to_writer(&mut *writer, answer)?;
                writer.write_all(b"\n")?;
            }
            Ok(())
        })?;
        fs::remove_file(&self.path).map_err(metal_candle::Error::io(&self.path))?;
        Ok(self.answers.iter().flatten().filter(|answer| answer.error.is_some()).count())
    }
}
