//! `data`: what data are, and what a run would make of them.

use crate::bounds;
use crate::colour::{self, BRACKETS};
use crate::datasets::{self, Found, Wanted};
use crate::errors::{SUCCESS, usage};
use crate::models::Source;
use crate::output::{self, Terminal, are, grouped, plural, table};
use crate::settings::{Data, DataFlags, Loss};
use crate::template::TemplateFlags;
use clap::Args;
use metal_candle::data::{
    Body, DataOptions, DataSource, Described, Reading, Record, Shown, Survey, describe, survey,
};
use metal_candle::model::Config;
use metal_candle::text::{Message, Tokenizer};
use serde::Serialize;

const EXAMPLES: &str = "\
Examples:
  metal-candle data data/
  metal-candle data examples.jsonl --model model/ --record 3
  metal-candle data owner/name --prompt-column question --completion-column answer --json

Lengths are in tokens with --model or --adapter, and in characters without. The record is shown as the \
model's chat template writes it, with what is learned of it in colour, or in brackets where there is none.";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Files, folders with files of the splits, or ids of data sets on the hub
    #[arg(value_name = "PATH|ID", required = true)]
    data: Vec<String>,
    #[command(flatten)]
    sources: DataFlags,
    /// The record that is shown, counted from 1 in the first split
    #[arg(long, value_name = "N", default_value_t = 1, help_heading = "Data")]
    record: usize,
    /// Tokens of an example at most; what is longer is cut, and counted
    #[arg(long, value_name = "N", default_value_t = DataOptions::default().max_seq_length, help_heading = "Data")]
    max_seq_length: usize,
    /// The tokens that the loss counts
    #[arg(long, value_enum, default_value_t, help_heading = "Data")]
    loss_on: Loss,
    #[command(flatten)]
    template: TemplateFlags,
    /// Report as one JSON object on stdout
    #[arg(long, help_heading = "Output")]
    json: bool,
    #[command(flatten)]
    source: Source,
}

#[derive(Serialize)]
struct Report {
    files: Vec<File>,
    /// In what lengths are.
    unit: &'static str,
    max_seq_length: usize,
    /// Tokens that the model was made for.
    context: Option<usize>,
    splits: Vec<Split>,
    record: Option<OneRecord>,
}

#[derive(Serialize)]
struct File {
    split: String,
    path: String,
    #[serde(flatten)]
    described: Option<Described>,
}

#[derive(Serialize)]
struct Split {
    split: String,
    #[serde(flatten)]
    survey: Survey,
}

#[derive(Serialize)]
struct OneRecord {
    number: usize,
    split: String,
    path: Option<String>,
    line: Option<usize>,
    kind: &'static str,
    /// As the model reads it; none without a model.
    #[serde(flatten)]
    shown: Option<Shown>,
    /// Its texts as they stand in the data, by who says them; none with a model.
    texts: Option<Vec<(String, String)>>,
}

/// Shows.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let terminal = terminal(arguments.json);
    bounds::check("max_seq_length", arguments.max_seq_length, &bounds::TOKENS)?;
    let Some(wanted) = arguments.record.checked_sub(1) else {
        return Err(usage("record: is 0, expected at least 1"));
    };
    let data = Data::of(&arguments.data).without_weights()?;
    let found = datasets::find(&data, &arguments.sources, Wanted::Everything, terminal)?;
    let model = match (&arguments.source.model, &arguments.source.adapter) {
        (None, None) => {
            let (template, usual) = (&arguments.template, DataOptions::default());
            for (key, is_given) in [
                ("chat_template", template.chat_template.is_some()),
                ("chat_template_kwargs", template.chat_template_kwargs.is_some()),
                ("max_seq_length", arguments.max_seq_length != usual.max_seq_length),
                ("loss_on", arguments.loss_on != Loss::default()),
            ] {
                if is_given {
                    return Err(usage(format!("{key}: needs a tokenizer; give --model")));
                }
            }
            None
        }
        _ => {
            let folder = arguments.source.folder(terminal)?;
            let tokenizer = arguments.source.tokenizer(&folder, &arguments.template)?;
            Some((tokenizer, Config::load(&folder)?.context()))
        }
    };
    let options = DataOptions {
        max_seq_length: arguments.max_seq_length,
        loss_on: arguments.loss_on.for_data(),
        variables: arguments.template.variables(),
        ..DataOptions::default()
    };
    let reading = match &model {
        None => Reading::Characters,
        Some((tokenizer, context)) => {
            Reading::Tokens { tokenizer, options: &options, context: Some(*context) }
        }
    };
    let mut report = Report {
        files: files(&found)?,
        unit: if model.is_some() { "tokens" } else { "characters" },
        max_seq_length: arguments.max_seq_length,
        context: model.as_ref().map(|(_, context)| *context),
        splits: Vec::new(),
        record: None,
    };
    for name in names(&found) {
        let sources: Vec<DataSource> = found
            .iter()
            .filter(|found| found.split == name)
            .map(|found| found.source.clone())
            .collect();
        let place = Some(wanted).filter(|_| report.splits.is_empty());
        let (survey, record) = survey(&sources, reading, place)?;
        if let Some(record) = record {
            let tokenizer = model.as_ref().map(|(tokenizer, _)| (tokenizer, &options));
            report.record = Some(one_record(&record, arguments.record, &name, tokenizer)?);
        } else if place.is_some() {
            return Err(usage(format!(
                "record: is {}, but the {name} data have {}",
                arguments.record,
                plural(survey.records as u64, "record")
            )));
        }
        report.splits.push(Split { split: name, survey });
    }
    if terminal.json {
        output::json(&report)?;
    } else {
        write(&report)?;
    }
    Ok(SUCCESS)
}

/// The names of the splits, in the order in which they were found.
fn names(found: &[Found]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for found in found {
        if !names.contains(&found.split) {
            names.push(found.split.clone());
        }
    }
    names
}

fn files(found: &[Found]) -> anyhow::Result<Vec<File>> {
    let mut files = Vec::new();
    for Found { split, source, .. } in found {
        for path in &source.files {
            let described = describe(path, &source.columns)?;
            files.push(File { split: split.clone(), path: output::path(path), described });
        }
    }
    Ok(files)
}

fn one_record(
    record: &Record,
    number: usize,
    split: &str,
    model: Option<(&Tokenizer, &DataOptions)>,
) -> anyhow::Result<OneRecord> {
    let shown =
        model.map(|(tokenizer, options)| Shown::new(record, tokenizer, options)).transpose()?;
    let origin = record.origin.as_ref();
    Ok(OneRecord {
        number,
        split: split.into(),
        path: origin.map(|origin| output::path(&origin.path)),
        line: origin.map(|origin| origin.line),
        kind: record.body.kind(),
        texts: shown.is_none().then(|| texts(&record.body)),
        shown,
    })
}

/// The texts of a record, by who says them or what they are.
fn texts(body: &Body) -> Vec<(String, String)> {
    let of = |message: &Message| (message.role().to_string(), message.texts().collect::<String>());
    let named = |name: &str, text: &str| (name.to_string(), text.to_string());
    match body {
        Body::Messages { messages, .. } => messages.iter().map(of).collect(),
        Body::ChatCompletion { prompt, completion, .. } => {
            prompt.iter().chain(completion).map(of).collect()
        }
        Body::PromptCompletion { prompt, completion } => {
            vec![named("prompt", prompt), named("completion", completion)]
        }
        Body::Instruction { before, instruction, input, output } => {
            let mut texts: Vec<_> = before.iter().map(of).collect();
            texts.push(named("instruction", instruction));
            texts.extend((!input.is_empty()).then(|| named("input", input)));
            texts.push(named("output", output));
            texts
        }
        Body::Text { text } | Body::Document { text, .. } => vec![named("text", text)],
        Body::Pair { chosen, rejected } => {
            let of = |name: &str, answer: &Body| {
                let texts = texts(answer).into_iter();
                texts.map(|(who, text)| (format!("{name}: {who}"), text)).collect::<Vec<_>>()
            };
            [of("chosen", chosen), of("rejected", rejected)].concat()
        }
        Body::Labelled { answer, desirable } => {
            let mut texts = texts(answer);
            texts.push(named("label", &desirable.to_string()));
            texts
        }
    }
}

fn write(report: &Report) -> anyhow::Result<()> {
    for file in &report.files {
        output::line(describe_file(file))?;
    }
    for split in &report.splits {
        output::line(format!("\n{}", split.split))?;
        output::prose(&table(&rows(report, &split.survey)))?;
    }
    if let Some(record) = &report.record {
        write_record(record)?;
    }
    Ok(())
}

fn describe_file(File { split, path, described }: &File) -> String {
    let Some(described) = described else { return format!("{split}: {path}") };
    let mut text = format!("{split}: {path}, {}", described.format);
    if let Some(compression) = described.compression {
        text.push_str(&format!(" in {compression}"));
    }
    if let Some(shape) = described.shape {
        text.push_str(&format!(", {shape}"));
    }
    for (what, columns) in [("taken", &described.taken), ("passed over", &described.passed_over)] {
        if !columns.is_empty() {
            text.push_str(&format!("; {what}: {}", columns.join(", ")));
        }
    }
    text
}

/// What was found of a split.
fn rows(report: &Report, survey: &Survey) -> Vec<(&'static str, String)> {
    let kinds: Vec<String> = survey
        .kinds
        .iter()
        .map(|(kind, count)| format!("{} {kind}", grouped(*count as u64)))
        .collect();
    let count = |count: usize| are(count as u64, "record");
    let mut rows = vec![
        ("Records", format!("{}: {}", grouped(survey.records as u64), kinds.join(", "))),
        (
            "Duplicates",
            match survey.duplicates {
                0 => "none".into(),
                others => format!("{} the same as one before", count(others)),
            },
        ),
    ];
    if let Some(lengths) = survey.lengths {
        let number = |length: u32| grouped(u64::from(length));
        rows.push((
            "Length",
            format!(
                "{} {}; of a record min {}, median {}, p95 {}, max {}",
                grouped(lengths.total),
                report.unit,
                number(lengths.min),
                number(lengths.median),
                number(lengths.p95),
                number(lengths.max),
            ),
        ));
    }
    let Some(tokens) = survey.tokens else {
        rows.push((
            "Empty",
            match survey.empty {
                0 => "none".into(),
                empty => format!("{} without a completion or text", count(empty)),
            },
        ));
        rows.push(("Tokens", "not counted; --model gives a tokenizer".into()));
        return rows;
    };
    rows.push(("Learned", format!("{} tokens", grouped(tokens.learned))));
    rows.push((
        "Nothing learned",
        match tokens.nothing_learned {
            0 => "none".into(),
            nothing => format!("{} left out, {} of them empty", count(nothing), survey.empty),
        },
    ));
    rows.push((
        "Cut",
        match tokens.cut {
            0 => format!("none at --max-seq-length {}", report.max_seq_length),
            cut => format!(
                "{} cut at --max-seq-length {}, by {} tokens in all",
                count(cut),
                report.max_seq_length,
                grouped(tokens.cut_tokens)
            ),
        },
    ));
    if let (Some(beyond), Some(context)) = (tokens.beyond_context, report.context) {
        let context = grouped(context as u64);
        rows.push((
            "Context",
            match beyond {
                0 => {
                    format!("none is longer than the {context} tokens that the model was made for")
                }
                beyond => format!(
                    "{} longer than the {context} tokens that the model was made for",
                    count(beyond)
                ),
            },
        ));
    }
    rows
}

fn write_record(record: &OneRecord) -> anyhow::Result<()> {
    let place = match (&record.path, record.line) {
        (Some(path), Some(line)) => format!(" ({path}:{line})"),
        _ => String::new(),
    };
    let title = format!("\nRecord {} of {}{place}", record.number, record.split);
    let Some(shown) = &record.shown else {
        output::line(title)?;
        let texts = record.texts.iter().flatten().map(|(name, text)| format!("{name}: {text}\n"));
        return output::prose(&texts.collect::<String>());
    };
    let colours = colour::on_stdout();
    let marked = match colours {
        true => "in green".to_string(),
        false => format!("between {} and {}", BRACKETS[0], BRACKETS[1]),
    };
    output::line(format!(
        "{title}: {}, of which {} learned, {marked}",
        plural(shown.tokens as u64, "token"),
        match shown.learned {
            1 => "1 is".into(),
            learned => format!("{} are", grouped(learned as u64)),
        }
    ))?;
    let pieces = shown.pieces.iter().map(|piece| (piece.text.as_str(), piece.learned));
    let mut text = colour::mark(pieces, colours);
    if !text.ends_with('\n') {
        text.push('\n');
    }
    output::write_as_it_is(&text)?;
    if shown.cut > 0 {
        output::line(format!("and {} that are cut", plural(shown.cut as u64, "token")))?;
    }
    if shown.pieces.is_empty() {
        output::line("nothing: it is left out, as its completion or text is empty")?;
    }
    Ok(())
}
