//! `evaluate`: loss and perplexity of a model on data, and how many of its answers are those that the data have.

use crate::datasets::Wanted;
use crate::engine::{AtOnce, Writing, write_all};
use crate::errors::{SUCCESS, usage};
use crate::interrupt;
use crate::measured::Measured;
use crate::models::{Loaded, Placed, Runtime, Source, set_threads};
use crate::output::{self, Terminal, are, grouped};
use crate::progress::Bar;
use crate::settings::limit;
use crate::template::TemplateFlags;
use clap::Args;
use metal_candle::data::{Dataset, Example, Report as DataReport};
use metal_candle::engine::{Engine, EngineOptions, Request};
use metal_candle::files::write_atomic;
use metal_candle::generate::{FinishReason, GenerateOptions, SamplingOptions};
use metal_candle::train::{Evaluation, TOKEN_ACCURACY, evaluate};
use serde::Serialize;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  metal-candle evaluate --model model/ --data data/test.jsonl
  metal-candle evaluate --adapter adapters --data data/ --split valid --json
  metal-candle evaluate -m model/ -d data/test.jsonl --generate --answers answers.jsonl
  metal-candle evaluate -m model/ -d owner/name --prompt-column question --completion-column answer";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    data: Measured,
    /// Batches to read; -1 is all
    #[arg(long, value_name = "N", default_value_t = -1, allow_negative_numbers = true, help_heading = "Data")]
    batches: i64,
    /// Let the model write the last answer of each example, with its likeliest tokens, and compare it with the data's
    #[arg(long, help_heading = "Answers")]
    generate: bool,
    /// Tokens of an answer at most
    #[arg(short = 'n', long, value_name = "N", default_value_t = GenerateOptions::default().max_tokens, requires = "generate", help_heading = "Answers")]
    max_tokens: usize,
    /// A file for the answers beside the data's, a JSON object a line
    #[arg(long, value_name = "FILE", requires = "generate", help_heading = "Answers")]
    answers: Option<PathBuf>,
    #[command(flatten)]
    at_once: AtOnce,
    #[command(flatten)]
    writing: Writing,
    #[command(flatten)]
    template: TemplateFlags,
    #[command(flatten)]
    runtime: Runtime,
    #[command(flatten)]
    placed: Placed,
    /// Report as one JSON object on stdout
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    #[serde(flatten)]
    evaluation: Evaluation,
    data: DataReport,
    #[serde(skip_serializing_if = "Option::is_none")]
    answers: Option<Answers>,
}

/// What became of the answers.
#[derive(Serialize)]
struct Answers {
    /// How many were written.
    count: usize,
    /// The share that is the data's answer, but for white space around it.
    exact: f64,
    /// The share in which the data's answer stands.
    containing: f64,
    /// Examples whose prompt leaves no room for an answer in the model's context.
    without_room: usize,
    tokens: usize,
    seconds: f64,
}

/// A line of the file of answers.
#[derive(Serialize)]
struct Answer<'a> {
    prompt: String,
    expected: &'a str,
    answer: &'a str,
    exact: bool,
    finish_reason: FinishReason,
}

/// Evaluates.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let terminal = terminal(arguments.json);
    if arguments.batches != -1 && arguments.batches < 1 {
        return Err(usage(format!(
            "batches: is {}, expected at least 1, or -1 for all",
            arguments.batches
        )));
    }
    let options = arguments.writing.options_for(&arguments.at_once);
    options.validate().map_err(usage)?;
    if let Some(path) = arguments.answers.as_ref().filter(|path| path.exists()) {
        return Err(usage(format!("answers: {} exists already; choose another", path.display())));
    }
    set_threads(arguments.runtime.threads)?;
    interrupt::install()?;
    let sources = arguments.data.find(Wanted::Measuring(None), terminal)?;
    let loaded = arguments.source.load(
        &arguments.runtime,
        &arguments.placed,
        &arguments.template,
        terminal,
    )?;
    let reader = (&loaded.tokenizer, &loaded.variables, None);
    let batches = arguments.data.batches(&sources, reader, loaded.model.config(), terminal)?;
    let limit = limit(arguments.batches);
    let evaluation = evaluate(&loaded.model, loaded.adapter.as_ref(), &batches, limit)?;
    let answers = match arguments.generate {
        true => Some(answers(&arguments, &loaded, batches.dataset(), options, terminal)?),
        false => None,
    };
    if terminal.json {
        let data = batches.dataset().report.clone();
        output::json(&Report { evaluation, data, answers })?;
        return Ok(SUCCESS);
    }
    let accuracy = evaluation.metrics.get(TOKEN_ACCURACY).copied().unwrap_or(f64::NAN);
    output::line(format!(
        "loss {:.4}, perplexity {:.4}, {:.1} % of tokens the likeliest, on {} tokens in {:.1} s",
        evaluation.loss,
        evaluation.perplexity.unwrap_or(f64::NAN),
        100.0 * accuracy,
        grouped(evaluation.tokens),
        evaluation.seconds
    ))?;
    if let Some(Answers { count, exact, containing, tokens, seconds, .. }) = answers {
        output::line(format!(
            "{:.1} % of {} answers right to the letter, {:.1} % have the right one in them, {} tokens in {seconds:.1} s",
            100.0 * exact,
            grouped(count as u64),
            100.0 * containing,
            grouped(tokens as u64),
        ))?;
    }
    Ok(SUCCESS)
}

/// Writes the last answer of each example, and compares.
fn answers(
    arguments: &Arguments,
    loaded: &Loaded,
    dataset: &Dataset,
    options: EngineOptions,
    terminal: Terminal,
) -> anyhow::Result<Answers> {
    let context = loaded.model.config().max_position_embeddings;
    let (mut requests, mut expected, mut without_room) = (Vec::new(), Vec::new(), 0);
    for example in dataset.iter() {
        let Some((prompt, answer)) = last_answer(&example) else {
            return Err(usage(
                "generate: there is an example without a prompt; expected conversations or prompts with completions",
            ));
        };
        let left = context.saturating_sub(prompt.len());
        if left == 0 {
            without_room += 1;
            continue;
        }
        let sampling = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
        let max_tokens = arguments.max_tokens.min(left);
        requests.push(Request {
            prompt: prompt.to_vec(),
            options: GenerateOptions { max_tokens, sampling, ..GenerateOptions::default() },
            adapter: loaded.adapter.clone(),
            ..Request::default()
        });
        expected.push(loaded.tokenizer.decode(answer, true)?);
    }
    if without_room > 0 {
        let are = are(without_room as u64, "prompt");
        terminal.note(format!("warning: {are} as long as the model's context, {context} tokens"));
    }
    let prompts: Vec<_> = requests.iter().map(|request| request.prompt.clone()).collect();
    let draft_model = arguments.writing.draft_model(&loaded.model, terminal)?;
    let options = EngineOptions { draft_model, ..options };
    let bar = Bar::new(terminal, "{bar:30} {pos}/{len} answers {elapsed}", requests.len() as u64);
    let started = Instant::now();
    let mut engine = Engine::new(&loaded.model, Some(&loaded.tokenizer), options)?;
    let written = write_all(&mut engine, requests, || {
        if let Some(bar) = bar.drawn() {
            bar.inc(1);
        }
    })?;
    drop(bar);
    let seconds = started.elapsed().as_secs_f64();
    let mut lines = Vec::with_capacity(written.len());
    for ((prompt, expected), written) in prompts.iter().zip(&expected).zip(&written) {
        let (expected, answer) = (expected.trim(), written.text.trim());
        lines.push(Answer {
            prompt: loaded.tokenizer.decode(prompt, false)?,
            expected,
            answer,
            exact: expected == answer,
            finish_reason: written.finished.reason,
        });
    }
    if let Some(path) = &arguments.answers {
        write_lines(path, &lines)?;
    }
    let share = |holds: &dyn Fn(&Answer) -> bool| {
        lines.iter().filter(|line| holds(line)).count() as f64 / lines.len().max(1) as f64
    };
    Ok(Answers {
        count: lines.len(),
        exact: share(&|line| line.exact),
        containing: share(&|line| line.answer.contains(line.expected)),
        without_room,
        tokens: written.iter().map(|written| written.finished.tokens).sum(),
        seconds,
    })
}

/// The last answer that the loss counts, and what comes before it; `None` if nothing does.
fn last_answer(example: &Example) -> Option<(&[u32], &[u32])> {
    let end = 1 + example.trainable.iter().rposition(|trainable| *trainable)?;
    let start = 1 + example.trainable[..end].iter().rposition(|trainable| !trainable)?;
    // The first token never counts, so alone it may be no prompt.
    (start > 1).then(|| (&example.ids[..start], &example.ids[start..end]))
}

fn write_lines(path: &Path, lines: &[impl Serialize]) -> anyhow::Result<()> {
    Ok(write_atomic(path, |file| {
        for line in lines {
            serde_json::to_writer(&mut *file, line)?;
            file.write_all(b"\n")?;
        }
        Ok(())
    })?)
}
