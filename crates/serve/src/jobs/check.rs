//! What a file of data is: its records and their tokens, all that is wrong with it by lines, and a look at the first
//! record as the model reads it.
//!
//! Lines are taken some at a time. What the library finds wrong with one is kept, and the rest is read without it.

use metal_candle::data::{DataOptions, DataSource, Reading, Shown, Survey, survey};
use metal_candle::files::BYTE_ORDER_MARK;
use metal_candle::text::Tokenizer;
use metal_candle::{Error, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;

/// Lines that are read together, and bytes of them.
const LINES: usize = 256;
const BYTES: usize = 4 << 20;
/// The longest line; no model reads so much at once.
const LONGEST_LINE: u64 = 16 << 20;
/// After so many problems the rest of a file isn't looked at.
const MOST_PROBLEMS: usize = 100;
const EXPECTED: &str = "expected JSON Lines, a JSON object on each line";

/// What is wrong with a line.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Problem {
    /// Counted from 1.
    pub line: usize,
    pub message: String,
}

/// A part of a record as the model reads it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub(crate) struct Part {
    pub text: String,
    /// Whether its tokens are learned.
    pub trained: bool,
}

/// What a file of data is.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct Report {
    /// Records without problems.
    pub records: usize,
    /// How many there are of each kind.
    pub kinds: BTreeMap<&'static str, usize>,
    /// Their tokens.
    pub tokens: u64,
    /// Those that are learned.
    pub trained_tokens: u64,
    /// Tokens of the longest record.
    pub longest: usize,
    /// Tokens that an example has at most.
    pub max_tokens: usize,
    /// Records that are cut there.
    pub truncated: usize,
    /// Records that nothing is learned from.
    pub nothing_learned: usize,
    pub problems: Vec<Problem>,
    /// Whether there were so many problems that the rest was not looked at.
    pub stopped: bool,
    /// The first record.
    pub example: Vec<Part>,
}

impl Report {
    /// All problems in a sentence.
    pub fn told(&self) -> String {
        const SHOWN: usize = 5;
        let told = |problem: &Problem| format!("line {}: {}", problem.line, problem.message);
        let mut text: Vec<String> = self.problems.iter().take(SHOWN).map(told).collect();
        match self.problems.len().saturating_sub(SHOWN) {
            0 => {}
            more if self.stopped => text.push(format!("and at least {more} more lines")),
            more => text.push(format!("and {more} more lines")),
        }
        text.join("; ")
    }

    fn add(&mut self, survey: &Survey) {
        self.records += survey.records;
        for (kind, count) in &survey.kinds {
            *self.kinds.entry(kind).or_default() += count;
        }
        if let Some(lengths) = survey.lengths {
            self.tokens += lengths.total;
            self.longest = self.longest.max(lengths.max as usize);
        }
        if let Some(tokens) = survey.tokens {
            self.trained_tokens += tokens.learned;
            self.truncated += tokens.cut;
            self.nothing_learned += tokens.nothing_learned;
        }
    }
}

/// A line and its number.
type Line = (usize, Vec<u8>);

/// Looks at a file. `is_given_up` is asked now and then; after that the report is of a part of the file.
///
/// # Errors
/// When the file cannot be read, or not written beside others for a while.
pub(crate) fn check(
    path: &Path,
    tokenizer: &Tokenizer,
    options: &DataOptions,
    is_given_up: &dyn Fn() -> bool,
) -> Result<Report> {
    let file = File::open(path).map_err(Error::io(path))?;
    let mut reader = BufReader::with_capacity(1 << 16, file);
    let mut report = Report { max_tokens: options.max_seq_length, ..Report::default() };
    let mut number = 0;
    loop {
        let mut lines: Vec<Line> = Vec::new();
        let mut bytes = 0;
        let mut at_end = false;
        while lines.len() < LINES && bytes < BYTES {
            let mut line = Vec::new();
            (&mut reader)
                .take(LONGEST_LINE + 1)
                .read_until(b'\n', &mut line)
                .map_err(Error::io(path))?;
            if line.is_empty() {
                at_end = true;
                break;
            }
            number += 1;
            if line.len() as u64 > LONGEST_LINE {
                let message = format!("is longer than {} MiB; {EXPECTED}", LONGEST_LINE >> 20);
                report.problems.push(Problem { line: number, message });
                report.stopped = true;
                break;
            }
            if number == 1 && line.starts_with(BYTE_ORDER_MARK.as_bytes()) {
                line.drain(..BYTE_ORDER_MARK.len());
            }
            bytes += line.len();
            match line.trim_ascii().first() {
                None => {}
                Some(b'{') => lines.push((number, line)),
                Some(_) => {
                    let message = format!("is not an object; {EXPECTED}");
                    report.problems.push(Problem { line: number, message });
                }
            }
            if report.problems.len() >= MOST_PROBLEMS {
                break;
            }
        }
        add_lines(&mut report, lines, tokenizer, options)?;
        report.problems.sort_by_key(|problem| problem.line);
        report.stopped |= report.problems.len() >= MOST_PROBLEMS;
        report.problems.truncate(MOST_PROBLEMS);
        if at_end || report.stopped || is_given_up() {
            return Ok(report);
        }
    }
}

/// Adds lines to a report, and leaves out those with problems.
fn add_lines(
    report: &mut Report,
    mut lines: Vec<Line>,
    tokenizer: &Tokenizer,
    options: &DataOptions,
) -> Result<()> {
    while !lines.is_empty() && report.problems.len() < MOST_PROBLEMS {
        let mut file = tempfile::Builder::new()
            .suffix(".jsonl")
            .tempfile_in(&options.folder)
            .map_err(Error::io(&options.folder))?;
        for (_, line) in &lines {
            let written = file.write_all(line.trim_ascii()).and_then(|()| file.write_all(b"\n"));
            written.map_err(Error::io(file.path()))?;
        }
        let source = DataSource::new([file.path().to_path_buf()]);
        let reading = Reading::Tokens { tokenizer, options, context: None };
        let wanted = report.example.is_empty().then_some(0);
        let (place, message) = match survey(&[source], reading, wanted) {
            Ok((found, record)) => {
                report.add(&found);
                if let Some(record) = record {
                    let shown = Shown::new(&record, tokenizer, options)?;
                    let part = |piece: metal_candle::data::Piece| Part {
                        text: piece.text,
                        trained: piece.learned,
                    };
                    report.example = shown.pieces.into_iter().map(part).collect();
                }
                return Ok(());
            }
            Err(Error::Record { line, message, .. }) => (line - 1, message),
            // What is wrong with the file is wrong with its beginning.
            Err(Error::File { message, .. }) => (0, message),
            Err(error) => return Err(error),
        };
        if place >= lines.len() {
            return Err(Error::option("data", format!("has a line that is not there: {message}")));
        }
        let (line, _) = lines.remove(place);
        let message = metal_candle::readable(&message).into_owned();
        report.problems.push(Problem { line, message });
    }
    Ok(())
}
