//! The demo of preferences: the model learns to answer in two forms alike, then by DPO to prefer one of them.

use super::{Arguments, Question, ask, percent, questions, settings};
use crate::errors::INTERRUPTED;
use crate::output::{self, Terminal, table};
use crate::plot;
use crate::run_folder::Start;
use crate::settings::{Data, ObjectiveName, Settings};
use crate::training::{Run, Summary};
use crate::wrap::stdout_columns;
use anyhow::{Context, bail};
use metal_candle::files;
use metal_candle::generate::GenerateOptions;
use serde::Serialize;
use serde_json::{Value, json};
use std::path::Path;
use std::time::Instant;

/// What is about to happen.
const INTRODUCTION: &str = "\
LoRA teaches the model to answer in two forms alike: \"It is blue.\" and \"We say it is blue.\" Then it is shown pairs \
of both, of which the second is the better one, and learns by DPO to answer so. The questions it is asked are others.
";

/// What the answers of the instructions begin with, and what the better ones do.
const PLAIN: &str = "It is ";
const BETTER: &str = "We say it is ";

/// The least that has to come out of it; less means that this build computes something wrong.
const EXPECTED_FORM: f64 = 0.9;
const EXPECTED: f64 = 0.95;
const EXPECTED_RIGHT: f64 = 0.85;

#[derive(Debug, Serialize)]
struct Report {
    questions: usize,
    preferred_before: f64,
    preferred_after: f64,
    right_before: f64,
    right_after: f64,
    accuracy: f64,
    seconds: f64,
    training: [Summary; 2],
}

/// Trains twice, and asks after each.
pub fn run(arguments: &Arguments, terminal: Terminal) -> anyhow::Result<u8> {
    let started = Instant::now();
    let folder = &arguments.output;
    for split in ["train", "valid"] {
        write(folder, split)?;
    }
    let questions = questions(&folder.join("instructions/test.jsonl"))?;
    terminal.note(INTRODUCTION);

    let both = Settings {
        data: Data::of(&[folder.join("forms").display().to_string()]),
        output: folder.join("forms-adapter"),
        ..settings(folder, arguments.seed, &arguments.runtime)
    };
    let preferring = Settings {
        data: Data::of(&[folder.join("preferences").display().to_string()]),
        output: folder.join("preferring-adapter"),
        init_adapter: Some(both.output.clone()),
        objective: ObjectiveName::Dpo,
        learning_rate: Some(1.5e-4),
        epochs: Some(3.0),
        eval_every: 10,
        report_every: 2,
        ..both.clone()
    };
    let Some((first, before)) = train(both, &questions, terminal)? else {
        return Ok(INTERRUPTED);
    };
    let Some((second, after)) = train(preferring, &questions, terminal)? else {
        return Ok(INTERRUPTED);
    };

    let accuracies = second.validation.as_ref().map(|found| &found.metrics);
    let accuracy = accuracies
        .and_then(|metrics| metrics.get("rewards/accuracies").copied())
        .context("the run was not evaluated")?;
    let report = Report {
        questions: questions.len(),
        preferred_before: preferred(&before),
        preferred_after: preferred(&after),
        right_before: right(&questions, &before),
        right_after: right(&questions, &after),
        accuracy,
        seconds: started.elapsed().as_secs_f64(),
        training: [first, second],
    };
    if terminal.json {
        output::json(&report)?;
    } else {
        let columns = stdout_columns().unwrap_or(76).min(76);
        let [_, curve] = &report.training;
        output::write(&format!("{}\n", plot::terminal_curve(&curve.curve, columns)))?;
        output::line(table(&[
            ("Held-out questions", report.questions.to_string()),
            ("Preferred form before", percent(report.preferred_before)),
            ("Preferred form after", percent(report.preferred_after)),
            ("Right before, in either form", percent(report.right_before)),
            ("Right after, in either form", percent(report.right_after)),
            ("Held-out pairs told apart", percent(report.accuracy)),
            ("Whole time", format!("{:.0} s", report.seconds)),
            ("Curves", folder.join("preferring-adapter/loss.png").display().to_string()),
        ]))?;
    }
    if report.preferred_after < EXPECTED_FORM
        || accuracy < EXPECTED
        || report.right_after < EXPECTED_RIGHT
    {
        bail!(
            "after DPO {} of the answers have the preferred form, {} of the held-out pairs are told apart and {} of the \
             answers are right, expected at least {}, {} and {}; this build computes something wrong",
            percent(report.preferred_after),
            percent(accuracy),
            percent(report.right_after),
            percent(EXPECTED_FORM),
            percent(EXPECTED),
            percent(EXPECTED_RIGHT)
        );
    }
    Ok(0)
}

/// A run and the answers that are drawn from what it gave; `None` when it was interrupted.
fn train(
    settings: Settings,
    questions: &[Question],
    terminal: Terminal,
) -> anyhow::Result<Option<(Summary, Vec<String>)>> {
    let start = Start { overwrite: true, ..Start::default() };
    let run = Run::prepare(settings.complete(&[])?, start, terminal)?;
    terminal.note(run.plan.describe());
    let summary = run.train(terminal)?;
    if summary.interrupted {
        terminal.note(summary.describe());
        return Ok(None);
    }
    let mut drawn = GenerateOptions::default();
    drawn.sampling.temperature = 1.0;
    let policy = (&run.model, run.adapter.as_ref());
    let answers = ask(policy, &run.tokenizer, questions, "asking", &drawn, terminal)?;
    Ok(Some((summary, answers)))
}

/// Writes the questions of a split with answers of both forms, as conversations and as pairs.
fn write(folder: &Path, split: &str) -> anyhow::Result<()> {
    let (mut forms, mut pairs) = (String::new(), String::new());
    for Question { text, answer } in questions(&folder.join(format!("instructions/{split}.jsonl")))?
    {
        let Some(rest) = answer.strip_prefix(PLAIN) else {
            bail!("instructions/{split}.jsonl: {answer:?} doesn't begin with {PLAIN:?}");
        };
        let better = format!("{BETTER}{rest}");
        let user = json!({"role": "user", "content": text});
        let says = |answer: &str| json!({"role": "assistant", "content": answer});
        let add = |to: &mut String, record: Value| to.push_str(&format!("{record}\n"));
        for answer in [&answer, &better] {
            add(&mut forms, json!({"messages": [user, says(answer)]}));
        }
        let pair =
            json!({"prompt": [user], "chosen": [says(&better)], "rejected": [says(&answer)]});
        add(&mut pairs, pair);
    }
    for (name, content) in [("forms", forms), ("preferences", pairs)] {
        let folder = folder.join(name);
        std::fs::create_dir_all(&folder)
            .map_err(metal_candle::Error::io(&folder))
            .context("the demo's folder")?;
        files::write_bytes_atomic(folder.join(format!("{split}.jsonl")), content)?;
    }
    Ok(())
}

fn preferred(answers: &[String]) -> f64 {
    let preferred = answers.iter().filter(|answer| answer.trim().starts_with(BETTER));
    preferred.count() as f64 / answers.len().max(1) as f64
}

/// The share of answers that say the right thing, in whichever form.
fn right(questions: &[Question], answers: &[String]) -> f64 {
    let is_right = |(question, found): &(&Question, &String)| {
        let expected = question.answer.strip_prefix(PLAIN);
        let said = found.trim();
        let said = said.strip_prefix(BETTER).or(said.strip_prefix(PLAIN));
        expected.is_some() && said == expected
    };
    questions.iter().zip(answers).filter(is_right).count() as f64 / questions.len().max(1) as f64
}
