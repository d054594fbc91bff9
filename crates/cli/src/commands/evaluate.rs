//! `evaluate`: loss and perplexity of a model on data, and how many of its answers are those that the data have.

use crate::bounds;
use crate::datasets::Wanted;
use crate::engine::{AtOnce, Writing, Written, write_all};
use crate::errors::{SUCCESS, usage};
use crate::interrupt;
use crate::measured::Measured;
use crate::models::{Loaded, Placed, Runtime, Source, set_threads};
use crate::output::{self, Terminal, are, grouped, plural};
use crate::progress::Bar;
use crate::run_folder;
use crate::settings::limit;
use crate::template::TemplateFlags;
use crate::thoughts::Text;
use clap::Args;
use metal_candle::data::{Dataset, Example, Report as DataReport, SampleKind};
use metal_candle::engine::{Engine, EngineOptions, Request};
use metal_candle::files::write_atomic;
use metal_candle::generate::{FinishReason, GenerateOptions, SamplingOptions};
use metal_candle::train::{Evaluation, FolderLock, TOKEN_ACCURACY, evaluate};
use serde::Serialize;
use std::collections::BTreeMap;
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
    /// Batches to read, and with --generate as many examples; -1 is all
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
    /// Examples that are cut, or whose prompt leaves no room for an answer in the model's context.
    left_out: usize,
    /// Answers that could not be written.
    failed: usize,
    tokens: usize,
    seconds: f64,
}

/// A line of the file of answers.
#[derive(Serialize)]
struct Answer<'a> {
    /// `None` where no file is written.
    prompt: Option<String>,
    expected: &'a str,
    /// `None` where it could not be written.
    answer: Option<&'a str>,
    exact: bool,
    finish_reason: Option<FinishReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<&'a str>,
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
    bounds::check("max_tokens", arguments.max_tokens, &bounds::TOKENS)?;
    let Arguments { generate, writing, at_once, .. } = &arguments;
    if !generate && !writing.is_usual(at_once) {
        return Err(usage("the engine's flags are for answers, which --generate asks for"));
    }
    let options = writing.options_for(at_once);
    options.validate().map_err(usage)?;
    if let Some(path) = arguments.answers.as_ref().filter(|path| path.exists()) {
        return Err(usage(format!("answers: {} exists already; choose another", path.display())));
    }
    set_threads(arguments.runtime.threads)?;
    interrupt::install()?;
    // That the answers can't be written shows before they are there.
    let answers = arguments.answers.as_ref();
    let _lock =
        answers.map(|path| run_folder::hold(FolderLock::acquire_beside(path))).transpose()?;
    let sources = arguments.data.find(Wanted::Measuring(None), terminal)?;
    writing.check_draft(&arguments.source, terminal)?;
    let loaded = arguments.source.load(
        &arguments.runtime,
        &arguments.placed,
        &arguments.template,
        terminal,
    )?;
    let reader = (&loaded.tokenizer, &loaded.variables, None);
    let batches = arguments.data.batches(&sources, reader, loaded.model.config(), terminal)?;
    check_kind(batches.dataset().kind())?;
    let limit = limit(arguments.batches);
    let asked = match generate {
        true => Some(Asked::new(&arguments, &loaded, batches.dataset(), limit, terminal)?),
        false => None,
    };
    let evaluation = evaluate(&loaded.model, loaded.adapter.as_ref(), &batches, limit)?;
    if !terminal.json {
        let accuracy = evaluation.metrics.get(TOKEN_ACCURACY).copied().unwrap_or(f64::NAN);
        output::line(format!(
            "loss {:.4}, perplexity {:.4}, {:.1} % of tokens the likeliest, on {} tokens in {:.1} s",
            evaluation.loss,
            evaluation.perplexity.unwrap_or(f64::NAN),
            100.0 * accuracy,
            grouped(evaluation.tokens),
            evaluation.seconds
        ))?;
    }
    let (answers, kept) = match asked {
        Some(asked) => {
            let (answers, kept) = asked.answers(&arguments, &loaded, options, terminal)?;
            (Some(answers), kept)
        }
        None => (None, Ok(())),
    };
    if terminal.json {
        let data = batches.dataset().report.clone();
        output::json(&Report { evaluation, data, answers })?;
    } else if let Some(Answers { count, exact, containing, tokens, seconds, .. }) = answers {
        output::line(format!(
            "{:.1} % of {} answers right to the letter, {:.1} % have the right one in them, {} tokens in {seconds:.1} s",
            100.0 * exact,
            grouped(count as u64),
            100.0 * containing,
            grouped(tokens as u64),
        ))?;
    }
    kept?;
    Ok(SUCCESS)
}

/// That examples are sequences.
fn check_kind(kind: SampleKind) -> anyhow::Result<()> {
    let instead = match kind {
        SampleKind::Plain => return Ok(()),
        SampleKind::Pair => {
            "; to measure the chosen answers alone, give --completion-column chosen, or --messages-column chosen where \
             they are whole conversations"
        }
        SampleKind::Labelled => "",
    };
    Err(usage(format!(
        "data: are {}, and evaluate compares no answers; `train` measures them as its validation data{instead}",
        kind.name()
    )))
}

/// The prompts of examples, and their answers.
struct Asked {
    requests: Vec<Request>,
    expected: Vec<String>,
    left_out: usize,
}

impl Asked {
    /// Of as many examples as `limit` batches have.
    fn new(
        arguments: &Arguments,
        loaded: &Loaded,
        dataset: &Dataset,
        limit: Option<usize>,
        terminal: Terminal,
    ) -> anyhow::Result<Self> {
        let context = loaded.model.config().context();
        let most = limit.map_or(usize::MAX, |batches| arguments.data.examples(batches));
        let mut asked = Self { requests: Vec::new(), expected: Vec::new(), left_out: 0 };
        for example in dataset.iter().take(most) {
            let Some((prompt, answer)) = last_answer(&example) else {
                return Err(usage(
                    "generate: there is an example without a prompt; expected conversations or prompts with completions",
                ));
            };
            let left = context.saturating_sub(prompt.len());
            let length = example.ids.len();
            let is_cut =
                length >= arguments.data.max_seq_length() && prompt.len() + answer.len() == length;
            if left == 0 || is_cut {
                asked.left_out += 1;
                continue;
            }
            let sampling = SamplingOptions { temperature: 0.0, ..SamplingOptions::default() };
            let max_tokens = arguments.max_tokens.min(left);
            asked.requests.push(Request {
                prompt: prompt.to_vec(),
                options: GenerateOptions { max_tokens, sampling, ..GenerateOptions::default() },
                adapter: loaded.adapter.clone(),
                ..Request::default()
            });
            asked.expected.push(Text::of_tokens(&loaded.tokenizer, answer)?);
        }
        if asked.left_out > 0 {
            let are = are(asked.left_out as u64, "example");
            terminal.note(format!(
                "warning: {are} not answered, as --max-seq-length cuts the answer or the model's context ends before it"
            ));
        }
        Ok(asked)
    }

    /// Writes the answers and compares; and whether the file of them could be written, which takes nothing from what
    /// was found.
    fn answers(
        self,
        arguments: &Arguments,
        loaded: &Loaded,
        options: EngineOptions,
        terminal: Terminal,
    ) -> anyhow::Result<(Answers, anyhow::Result<()>)> {
        let Self { requests, expected, left_out } = self;
        let prompts: Vec<_> = requests.iter().map(|request| request.prompt.clone()).collect();
        let draft_model = arguments.writing.draft_model(loaded, terminal)?;
        let options = EngineOptions { draft_model, ..options };
        let bar =
            Bar::new(terminal, "{bar:30} {pos}/{len} answers {elapsed}", requests.len() as u64);
        let started = Instant::now();
        let mut engine = Engine::new(&loaded.model, Some(&loaded.tokenizer), options)?;
        let mut all: BTreeMap<usize, Result<Written, String>> = BTreeMap::new();
        let ended = |index: usize, written: Result<Written, String>| {
            all.insert(index, written);
            if let Some(bar) = bar.drawn() {
                bar.inc(1);
            }
            Ok(())
        };
        write_all(&mut engine, &loaded.tokenizer, requests.into_iter().enumerate(), ended, |_| {
            true
        })?;
        drop(bar);
        let seconds = started.elapsed().as_secs_f64();
        let (mut lines, mut failed, mut tokens) = (Vec::with_capacity(all.len()), 0, 0);
        for (index, written) in &all {
            let (prompt, expected) = (&prompts[*index], expected[*index].trim());
            let is_written = arguments.answers.is_some();
            let prompt = is_written.then(|| loaded.tokenizer.decode(prompt, false)).transpose()?;
            let (answer, finish_reason, error) = match written {
                Ok(Written { text, finished }) => {
                    tokens += finished.tokens;
                    (Some(text.trim()), Some(finished.reason), None)
                }
                Err(error) => {
                    failed += 1;
                    (None, None, Some(error.as_str()))
                }
            };
            let exact = answer == Some(expected);
            lines.push(Answer { prompt, expected, answer, exact, finish_reason, error });
        }
        if let Some(Answer { error: Some(error), .. }) = lines.iter().find(|it| it.error.is_some())
        {
            let what = plural(failed as u64, "answer");
            terminal.note(format!("warning: {what} could not be written, the first: {error}"));
        }
        let kept = arguments.answers.as_ref().map_or(Ok(()), |path| write_lines(path, &lines));
        let share = |holds: &dyn Fn(&Answer) -> bool| {
            lines.iter().filter(|line| holds(line)).count() as f64 / lines.len().max(1) as f64
        };
        let contains = |line: &Answer| line.answer.is_some_and(|it| it.contains(line.expected));
        let answers = Answers {
            count: lines.len(),
            exact: share(&|line| line.exact),
            containing: share(&contains),
            left_out,
            failed,
            tokens,
            seconds,
        };
        Ok((answers, kept))
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_are_compared_are_not_measured() {
        assert!(check_kind(SampleKind::Plain).is_ok());
        for (kind, expected) in [
            (SampleKind::Pair, "data: are preference pairs, and evaluate compares no answers"),
            (SampleKind::Labelled, "data: are labelled answers, and evaluate compares no answers"),
        ] {
            let error = check_kind(kind).unwrap_err().to_string();
            assert!(error.starts_with(expected) && !error.contains("objective"), "{error}");
        }
    }
}
