//! `logprobs`: what a model finds likeliest in place of each token of data, for another to be distilled from it.

use crate::bounds;
use crate::datasets::Wanted;
use crate::errors::{INTERRUPTED, SUCCESS, usage};
use crate::interrupt;
use crate::measured::Measured;
use crate::models::{self, Placed, Runtime, Source, another_vocabulary, set_threads};
use crate::output::{Terminal, grouped};
use crate::progress::Bar;
use crate::template::TemplateFlags;
use crate::training::template_time;
use clap::Args;
use metal_candle::data::TOP_K;
use metal_candle::text::Tokenizer;
use metal_candle::train::write_teacher;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

const EXAMPLES: &str = "\
Examples:
  metal-candle logprobs --model teacher/ --data data/train.jsonl --student student/ -o teacher.safetensors
  metal-candle train --model student/ --data data/train.jsonl --objective distill --teacher teacher.safetensors";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    #[command(flatten)]
    source: Source,
    /// The model that is to learn, whose tokenizer and chat template make the tokens; it must have the teacher's
    /// vocabulary [default: the teacher's own]
    #[arg(long, value_name = "DIR|ID", help_heading = "Model")]
    student: Option<String>,
    #[command(flatten)]
    data: Measured,
    /// The likeliest tokens to keep in place of each
    #[arg(long, value_name = "N", default_value_t = 64, help_heading = "Output")]
    top_k: usize,
    /// The file to write; it must not exist
    #[arg(short, long, value_name = "FILE", help_heading = "Output")]
    output: PathBuf,
    #[command(flatten)]
    template: TemplateFlags,
    #[command(flatten)]
    runtime: Runtime,
    #[command(flatten)]
    placed: Placed,
}

/// Writes what the model says.
pub fn run(arguments: Arguments, terminal: Terminal) -> anyhow::Result<u8> {
    let Arguments { source, student, data, top_k, output, template, runtime, placed } = arguments;
    bounds::check("top_k", top_k, &TOP_K)?;
    if output.exists() {
        return Err(usage(format!("output: {} exists already; choose another", output.display())));
    }
    let folder = output.parent().filter(|folder| !folder.as_os_str().is_empty());
    if let Some(folder) = folder.filter(|folder| !folder.is_dir()) {
        return Err(usage(format!("output: there is no folder {}", folder.display())));
    }
    set_threads(runtime.threads)?;
    interrupt::install()?;
    let sources = data.find(Wanted::Everything, terminal)?;
    let student = match student {
        None => None,
        Some(student) => {
            let mut tokenizer = Tokenizer::load(&models::resolve(&student, None, terminal)?)?;
            template.apply(&mut tokenizer)?;
            // Before the model is loaded.
            let teacher = Tokenizer::load(&source.folder(terminal)?)?;
            if let Some(id) = tokenizer.first_difference(&teacher) {
                let both = [("student", &tokenizer), ("teacher", &teacher)];
                return Err(another_vocabulary("student", id, both));
            }
            Some(tokenizer)
        }
    };
    // What the template is told concerns the one that is used.
    let of_teacher = if student.is_some() { TemplateFlags::default() } else { template.clone() };
    let loaded = source.load(&runtime, &placed, &of_teacher, terminal)?;
    let mut time = None;
    let now = template_time(&mut time)?;
    let variables = template.variables();
    let reader = (student.as_ref().unwrap_or(&loaded.tokenizer), &variables, Some(now));
    let batches = data.batches(&sources, reader, loaded.model.config(), terminal)?;
    if let Some(student) = &student {
        // Added tokens, too.
        let used: BTreeSet<u32> =
            batches.dataset().iter().flat_map(|example| example.ids).collect();
        let is_known = |id: &u32| student.id_to_token(*id) == loaded.tokenizer.id_to_token(*id);
        if let Some(id) = used.into_iter().find(|id| !is_known(id)) {
            let both = [("student", student), ("teacher", &loaded.tokenizer)];
            return Err(another_vocabulary("student", id, both));
        }
    }
    let stop = interrupt::watch("stopping; nothing is written");
    let examples = batches.dataset().len() as u64;
    let bar = Bar::new(terminal, "{bar:30} {pos}/{len} examples, {eta} left", examples);
    let (model, adapter) = (&loaded.model, loaded.adapter.as_ref());
    let written =
        write_teacher(model, adapter, &batches, (top_k, time.as_deref()), &output, &mut |done| {
            if let Some(bar) = bar.drawn() {
                bar.set_position(done as u64);
            }
            !stop.load(Ordering::Relaxed)
        })?;
    drop(bar);
    if !written {
        return Ok(INTERRUPTED);
    }
    terminal.note(format!(
        "{}: the {top_k} likeliest in place of each of {} tokens",
        output.display(),
        grouped(batches.dataset().report.trainable_tokens as u64)
    ));
    Ok(SUCCESS)
}
