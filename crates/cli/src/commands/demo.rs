//! `demo`: teach a small model, which is part of this program, to answer questions, and if wanted to prefer one form of
//! answer over another.

use crate::engine::{Written, write_all};
use crate::errors::{INTERRUPTED, check_name, usage};
use crate::interrupt;
use crate::models::{Runtime, set_threads};
use crate::output::{self, Terminal, shell_word, table};
use crate::plot;
use crate::processes;
use crate::progress::Bar;
use crate::prompts;
use crate::run_folder::Start;
use crate::settings::{Data, Settings};
use crate::training::{Run, Summary};
use crate::wrap::stdout_columns;
use anyhow::{Context, bail};
use clap::Args;
use metal_candle::adapter::Adapter;
use metal_candle::data::{Body, Record, read_records};
use metal_candle::engine::{Engine, EngineOptions, Request};
use metal_candle::generate::GenerateOptions;
use metal_candle::model::Model;
use metal_candle::text::{Message, Tokenizer};
use metal_candle::{Error, files};
use serde::Serialize;
use serde_json::Map;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

mod preferences;

macro_rules! asset {
    ($path:literal) => {
        ($path, include_bytes!(concat!("../../demo/", $path)))
    };
}

/// What the demo works on, as files below its folder.
const ASSETS: &[(&str, &[u8])] = &[
    asset!("base/config.json"),
    asset!("base/generation_config.json"),
    asset!("base/model.safetensors"),
    asset!("base/tokenizer.json"),
    asset!("base/tokenizer_config.json"),
    asset!("instructions/train.jsonl"),
    asset!("instructions/valid.jsonl"),
    asset!("instructions/test.jsonl"),
];

/// The file by which a folder is known as one that a demo has made, whose files the next one may replace.
const MARK: &str = "metal-candle-demo.txt";
const MARKED: &str = "\
`metal-candle demo` has made this folder. Run again, it replaces base, instructions and adapter here, and with
--preferences forms, preferences, forms-adapter and preferring-adapter. Without this file it leaves the folder alone.
";

/// Questions that are answered at once.
const AT_ONCE: usize = 32;

/// The share of held-out questions that the adapter has to answer. Less means that this build
/// computes something wrong.
const EXPECTED: f64 = 0.9;

/// What is about to happen.
const INTRODUCTION: &str = "\
This model has read plain statements of facts, never a question in a chat. LoRA now teaches it to \
answer, with conversations about some of the facts. The questions it is asked before and after are \
about others.
";

/// Answers are a few words.
const ANSWER_TOKENS: usize = 24;

/// Questions that are shown with their answers.
const SHOWN: usize = 6;

/// Fine-tune a small model that comes with this program, and ask it questions before and after.
#[derive(Debug, Args)]
#[command(after_help = "Example:\n  metal-candle demo --output /tmp/demo")]
pub struct Arguments {
    /// Where the model, the data and the adapter are written: a new or empty folder, or that of a demo before, which is replaced
    #[arg(short, long, value_name = "DIR", default_value = "metal-candle-demo")]
    output: PathBuf,
    /// The result as one JSON object on stdout
    #[arg(long)]
    json: bool,
    /// Where the run's random numbers begin
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Teach answers of two forms instead, and then by DPO to prefer one of them
    #[arg(long)]
    preferences: bool,
    #[command(flatten)]
    runtime: Runtime,
}

/// A held-out question.
struct Question {
    text: String,
    answer: String,
}

#[derive(Debug, Serialize)]
struct Report {
    questions: usize,
    exact_match_before: f64,
    exact_match_after: f64,
    seconds: f64,
    training: Summary,
}

pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    processes::refuse("demo")?;
    let terminal = terminal(arguments.json);
    check_name("output", &arguments.output)?;
    set_threads(arguments.runtime.threads)?;
    let started = Instant::now();
    let folder = &arguments.output;
    take(folder)?;
    unpack(folder)?;

    interrupt::install()?;
    if arguments.preferences {
        return preferences::run(&arguments, terminal);
    }
    let settings = settings(folder, arguments.seed, &arguments.runtime).complete(&[])?;
    let start = Start { overwrite: true, ..Start::default() };
    let run = Run::prepare(settings, start, terminal)?;
    terminal.note(INTRODUCTION);
    terminal.note(run.plan.describe());

    let questions = questions(&folder.join("instructions/test.jsonl"))?;
    let greedy = GenerateOptions::default();
    let before =
        ask((&run.model, None), &run.tokenizer, &questions, "asking the base", &greedy, terminal)?;
    let summary = run.train(terminal)?;
    if summary.interrupted {
        terminal.note(summary.describe());
        return Ok(INTERRUPTED);
    }
    let after = ask(
        (&run.model, run.adapter.as_ref()),
        &run.tokenizer,
        &questions,
        "asking again",
        &greedy,
        terminal,
    )?;
    let (was, is) = (exact(&questions, &before), exact(&questions, &after));

    if terminal.json {
        output::json(&Report {
            questions: questions.len(),
            exact_match_before: was,
            exact_match_after: is,
            seconds: started.elapsed().as_secs_f64(),
            training: summary,
        })?;
    } else {
        let columns = stdout_columns().unwrap_or(76).min(76);
        output::write(&format!("{}\n", plot::terminal_curve(&summary.curve, columns)))?;
        output::line(side_by_side(&questions, &before, &after))?;
        output::line(table(&[
            ("Held-out questions", questions.len().to_string()),
            ("Exact match before", percent(was)),
            ("Exact match after", percent(is)),
            ("Whole time", format!("{:.0} s", started.elapsed().as_secs_f64())),
            ("Loss curve", folder.join("adapter/loss.png").display().to_string()),
            ("Adapter", folder.join("adapter").display().to_string()),
        ]))?;
        output::prose(&next_steps(folder))?;
    }
    if is < EXPECTED {
        bail!(
            "the adapter answers {} of the held-out questions, expected at least {}; this build \
             computes something wrong",
            percent(is),
            percent(EXPECTED)
        );
    }
    Ok(0)
}

/// Takes the folder, which has to be new, empty or a demo's.
fn take(folder: &Path) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder).map_err(Error::io(folder)).context("the demo's folder")?;
    let mark = folder.join(MARK);
    let is_empty = std::fs::read_dir(folder).map_err(Error::io(folder))?.next().is_none();
    if !is_empty && !mark.is_file() {
        return Err(usage(format!(
            "output: {} is not empty, and has no {MARK}, by which a demo's folder is known; choose another, or remove it",
            folder.display()
        )));
    }
    // The first file of all, so that a demo that is broken off can be run again.
    std::fs::write(&mark, MARKED).map_err(Error::io(&mark)).context("the demo's folder")
}

/// Writes what the demo works on, so that every other command can be tried on it.
fn unpack(folder: &Path) -> anyhow::Result<()> {
    for (name, bytes) in ASSETS {
        let path = folder.join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent)
                .map_err(Error::io(parent))
                .context("the demo's folder")?;
        }
        files::write_bytes_atomic(&path, bytes)?;
    }
    Ok(())
}

fn settings(folder: &Path, seed: u64, runtime: &Runtime) -> Settings {
    Settings {
        model: Some(folder.join("base").display().to_string()),
        data: Data::of(&[folder.join("instructions").display().to_string()]),
        output: folder.join("adapter"),
        rank: 8,
        alpha: Some(16.0),
        learning_rate: Some(2e-3),
        warmup_steps: Some(10),
        weight_decay: Some(0.0),
        batch_size: 16,
        epochs: Some(8.0),
        max_seq_length: 64,
        eval_every: 40,
        report_every: 8,
        save_every: 0,
        keep: 1,
        seed,
        dtype: runtime.dtype,
        quantize: runtime.quantize,
        base_compute: runtime.base_compute,
        device: runtime.device,
        matmul: runtime.matmul,
        threads: runtime.threads,
        ..Settings::default()
    }
}

fn questions(path: &Path) -> anyhow::Result<Vec<Question>> {
    read_records(path)?.into_iter().map(|record| question(record, path)).collect()
}

fn question(record: Record, path: &Path) -> anyhow::Result<Question> {
    let Body::Messages { messages, .. } = record.body else {
        bail!("{}: expected conversations", path.display());
    };
    match messages.as_slice() {
        [question, answer] => {
            Ok(Question { text: text(question, path)?, answer: text(answer, path)? })
        }
        _ => bail!("{}: expected a question and an answer", path.display()),
    }
}

fn text(message: &Message, path: &Path) -> anyhow::Result<String> {
    message.text().with_context(|| format!("{}: a message has no text", path.display()))
}

fn ask(
    (model, adapter): (&Arc<Model>, Option<&Arc<Adapter>>),
    tokenizer: &Tokenizer,
    questions: &[Question],
    what: &'static str,
    options: &GenerateOptions,
    terminal: Terminal,
) -> anyhow::Result<Vec<String>> {
    let template = "{bar:24} {msg}: {pos}/{len} questions";
    let bar = Bar::new(terminal, template, questions.len() as u64);
    match bar.drawn() {
        Some(bar) => bar.set_message(what),
        None => terminal.note(format!("{what} {} held-out questions", questions.len())),
    }
    let request = |(question, seed): (&Question, u64)| -> anyhow::Result<Request> {
        let prompt = prompts::encode(tokenizer, &question.text, None, false, &Map::new())?;
        let mut options = GenerateOptions { max_tokens: ANSWER_TOKENS, ..options.clone() };
        options.sampling.seed = seed;
        Ok(Request { prompt, options, adapter: adapter.cloned(), ..Request::default() })
    };
    let requests: Vec<_> = questions.iter().zip(0..).map(request).collect::<Result<_, _>>()?;
    let most = requests.iter().map(|it| it.prompt.len() + it.options.max_tokens).max();
    let usual = EngineOptions::default();
    let cache_tokens = most.unwrap_or(1).next_multiple_of(usual.block_size) * AT_ONCE;
    let options =
        EngineOptions { max_sequences: AT_ONCE, cache_tokens: Some(cache_tokens), ..usual };
    let mut engine = Engine::new(model, Some(tokenizer), options)?;
    let mut answers = vec![String::new(); requests.len()];
    let ended = |index: usize, written: Result<Written, String>| {
        answers[index] = written.map_err(anyhow::Error::msg)?.text;
        if let Some(bar) = bar.drawn() {
            bar.inc(1);
        }
        Ok(())
    };
    write_all(&mut engine, tokenizer, requests.into_iter().enumerate(), ended, |_| true)?;
    Ok(answers)
}

/// The share of answers that are right to the letter.
fn exact(questions: &[Question], answers: &[String]) -> f64 {
    let right =
        questions.iter().zip(answers).filter(|(question, found)| question.answer == found.trim());
    right.count() as f64 / questions.len().max(1) as f64
}

fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

fn side_by_side(questions: &[Question], before: &[String], after: &[String]) -> String {
    let step = (questions.len() / SHOWN).max(1);
    let mut text = String::new();
    for index in (0..questions.len()).step_by(step).take(SHOWN) {
        let mark = if after[index].trim() == questions[index].answer { "✓" } else { "✗" };
        text.push_str(&format!(
            "{}\n  before  {}\n  after   {} {mark}\n",
            questions[index].text,
            shortened(&before[index]),
            shortened(&after[index]),
        ));
    }
    text
}

fn shortened(text: &str) -> String {
    const MOST: usize = 60;
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None if line.is_empty() => "(nothing)".into(),
        None => line,
    }
}

fn next_steps(folder: &Path) -> String {
    let path = |name: &str| shell_word(&folder.join(name).display().to_string());
    let (base, adapter) = (path("base"), path("adapter"));
    format!(
        "Try next:\n  \
         metal-candle chat --model {base} --adapter {adapter}\n  \
         metal-candle fuse --model {base} --adapter {adapter} --output {}\n\
         On a model and data of your own:\n  \
         metal-candle train --model Qwen/Qwen2.5-0.5B-Instruct --data examples.jsonl --output my-adapter\n",
        path("fused")
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_demo_takes_what_a_demo_left_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("new/demo");
        take(&folder).unwrap();
        unpack(&folder).unwrap();
        std::fs::remove_file(folder.join("base/config.json")).unwrap();
        // Also what one left that was broken off, or of another version.
        take(&folder).unwrap();
        unpack(&folder).unwrap();
        std::fs::remove_file(folder.join(MARK)).unwrap();
        let error = take(&folder).unwrap_err();
        assert_eq!(crate::errors::exit_code(&error), crate::errors::USAGE);
        assert!(error.to_string().contains("is not empty"), "{error}");
        assert!(!folder.join(MARK).exists());
    }
}
