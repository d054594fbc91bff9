//! `generate`: write a text, or many.

use crate::batch::{self, Batch};
use crate::engine::{Writer, Writing};
use crate::errors::{SUCCESS, usage};
use crate::models::{Placed, Ranks, Runtime, Source, set_threads};
use crate::output::{self, Terminal};
use crate::sampling::Sampling;
use crate::template::TemplateFlags;
use crate::thoughts::Text;
use crate::wrap::{Flow, stdout_columns};
use crate::{interrupt, prompts};
use anyhow::Context;
use clap::Args;
use metal_candle::files::BYTE_ORDER_MARK;
use metal_candle::generate::FinishReason;
use serde::Serialize;
use std::io::{IsTerminal, Read};
use std::path::PathBuf;
use std::time::Instant;

const EXAMPLES: &str = "\
Examples:
  metal-candle generate --model model/ --prompt 'Why is the sky blue?'
  metal-candle generate --adapter adapters --prompt-file question.txt --temperature 0
  echo 'Once upon a time' | metal-candle generate -m model/ --raw --max-tokens 50
  metal-candle generate -m model/ --prompts questions.jsonl --output answers.jsonl

With a chat template the prompt is a user's message; --raw continues the text as it is.";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    source: Source,
    /// The prompt; without it, and without --prompt-file, it is read from stdin
    #[arg(short, long, value_name = "TEXT", help_heading = "Prompt")]
    prompt: Option<String>,
    /// A file that holds the prompt; a line feed at its end is none of it
    #[arg(long, value_name = "FILE", conflicts_with = "prompt", help_heading = "Prompt")]
    prompt_file: Option<PathBuf>,
    /// A system message before the prompt
    #[arg(
        long,
        value_name = "TEXT",
        alias = "system-prompt",
        conflicts_with = "raw",
        help_heading = "Prompt"
    )]
    system: Option<String>,
    /// Continue the prompt as it is, without the chat template
    #[arg(long, alias = "ignore-chat-template", help_heading = "Prompt")]
    raw: bool,
    #[command(flatten)]
    template: TemplateFlags,
    #[command(flatten)]
    batch: Batch,
    #[command(flatten)]
    writing: Writing,
    #[command(flatten)]
    sampling: Sampling,
    #[command(flatten)]
    runtime: Runtime,
    #[command(flatten)]
    placed: Placed,
    #[command(flatten)]
    ranks: Ranks,
    /// Show the text while it is written; --stream=false shows it at the end
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = true, default_missing_value = "true", action = clap::ArgAction::Set, help_heading = "Output")]
    stream: bool,
    /// Report as one JSON object on stdout
    #[arg(long, help_heading = "Output")]
    json: bool,
}

#[derive(Serialize)]
struct Report {
    text: String,
    tokens: Vec<u32>,
    finish_reason: Option<FinishReason>,
    prompt_tokens: usize,
    prefill_tokens_per_second: f64,
    decode_tokens_per_second: f64,
}

impl Arguments {
    fn prompt(&self) -> anyhow::Result<String> {
        if let Some(prompt) = &self.prompt {
            return Ok(prompt.clone());
        }
        if let Some(path) = &self.prompt_file {
            let text = std::fs::read_to_string(path).map_err(metal_candle::Error::io(path))?;
            return Ok(bare(&text).to_string());
        }
        if std::io::stdin().is_terminal() {
            return Err(usage("no prompt: give --prompt or --prompt-file, or write it to stdin"));
        }
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text).context("cannot read the prompt from stdin")?;
        Ok(bare(&text).to_string())
    }
}

/// A text without the line feed that echo and editors put at its end, and without a byte-order mark.
fn bare(text: &str) -> &str {
    let text = text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text);
    match text.strip_suffix('\n') {
        Some(text) => text.strip_suffix('\r').unwrap_or(text),
        None => text,
    }
}

/// Writes a text.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let terminal = terminal(arguments.json);
    if arguments.batch.prompts.is_none()
        && let Some(flag) = arguments.batch.at_once.unusual()
    {
        return Err(usage(format!(
            "{flag}: is for many prompts, and there is one; leave it out, or give --prompts"
        )));
    }
    set_threads(arguments.runtime.threads)?;
    interrupt::install()?;
    // A mistake is told before the model is loaded.
    let prompt = match &arguments.batch.prompts {
        Some(_) => String::new(),
        None => arguments.prompt()?,
    };
    if arguments.batch.prompts.is_none() && prompt.trim().is_empty() {
        return Err(usage("prompt: is empty"));
    }
    arguments.writing.check_draft(&arguments.source, terminal)?;
    let loaded = arguments.source.load_on(
        &arguments.ranks.devices(arguments.runtime.device, &arguments.writing)?,
        &arguments.runtime,
        &arguments.placed,
        &arguments.template,
        terminal,
    )?;
    let mut options = arguments.sampling.resolve(&loaded.folder)?;
    if arguments.system.is_some() && loaded.tokenizer.chat_template().is_none() {
        return Err(usage("system: this model has no chat template to put a system message in"));
    }
    if let (Some(prompts), Some(output)) = (&arguments.batch.prompts, &arguments.batch.output) {
        let given = batch::Given {
            loaded: &loaded,
            quantization: arguments.runtime.quantization()?,
            ranks: arguments.ranks.count(&arguments.writing)?,
            adapter: arguments.source.adapter.as_deref(),
            options,
            says_max_tokens: arguments.sampling.says_max_tokens(),
            system: arguments.system.as_deref(),
            raw: arguments.raw,
        };
        let engine = (&arguments.batch.at_once, &arguments.writing);
        return batch::run(engine, prompts, output, &given, terminal);
    }
    options.continues_prompt = prompts::is_continued(&loaded.tokenizer, arguments.raw);
    let ids = prompts::encode(
        &loaded.tokenizer,
        &prompt,
        arguments.system.as_deref(),
        arguments.raw,
        &loaded.variables,
    )?;

    let stream = arguments.stream && !terminal.json;
    let mut writer = Writer::new(&loaded, &arguments.writing, terminal)?;
    let prompt_tokens = ids.len();
    writer.prepare(prompt_tokens, options.max_tokens)?;
    let started = Instant::now();
    let mut prefilled = None;
    let mut shown = Text::new(&loaded.tokenizer, &options)?;
    let (mut text, mut tokens) = (String::new(), Vec::new());
    let mut flow = Flow::new(stdout_columns());
    let mut show = |more: &str| -> anyhow::Result<()> {
        if stream && !more.is_empty() {
            output::write(&flow.push(more))?;
        }
        text.push_str(more);
        Ok(())
    };
    let finished = writer.write(ids, options, |piece| {
        prefilled.get_or_insert_with(Instant::now);
        tokens.extend(piece.token);
        show(&shown.push(piece)?)?;
        Ok(true)
    })?;
    show(&shown.finish())?;
    let prefilled = prefilled.unwrap_or_else(Instant::now);
    let decode = prefilled.elapsed().as_secs_f64();
    // Without the token that ends it.
    tokens.truncate(finished.map_or(0, |finished| finished.tokens));
    let report = Report {
        finish_reason: finished.map(|finished| finished.reason),
        prompt_tokens,
        prefill_tokens_per_second: prompt_tokens as f64 / (prefilled - started).as_secs_f64(),
        // The first one came with the prompt.
        decode_tokens_per_second: tokens.len().saturating_sub(1) as f64 / decode.max(1e-9),
        tokens,
        text,
    };
    tracing::info!(
        "{} prompt tokens at {:.1} a second, {} tokens at {:.1} a second",
        report.prompt_tokens,
        report.prefill_tokens_per_second,
        report.tokens.len(),
        report.decode_tokens_per_second
    );
    if terminal.json {
        output::json(&report)?;
    } else if stream {
        output::write(&format!("{}\n", flow.finish()))?;
    } else {
        output::line(&report.text)?;
    }
    Ok(SUCCESS)
}
