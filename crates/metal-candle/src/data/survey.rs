//! What data are: their format and shape, how long their records are, and what a run would make of them.
//!
//! Records are read in parts, as for training. Of each, its length and a hash are kept, 12 bytes.

use std::collections::BTreeMap;
use std::path::Path;

use rayon::prelude::*;
use serde::Serialize;

use super::body::Body;
use super::columns::Columns;
use super::dataset::{DataOptions, Example, SampleKind};
use super::format;
use super::record::{Record, Shape};
use super::rows::{RowContent, Rows};
use super::source::DataSource;
use super::tokenize::Builder;
use crate::hash::Hash;
use crate::text::Tokenizer;
use crate::{Error, Result};

/// What a file is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Described {
    /// How its records are written: JSON Lines, CSV, Parquet, ...
    pub format: &'static str,
    /// gzip or zstd.
    pub compression: Option<&'static str>,
    /// What keys its first record has, where columns are not named; `None` for plain text.
    pub shape: Option<&'static str>,
    /// The keys of its first record that a record is taken from.
    pub taken: Vec<String>,
    /// The other keys of its first record.
    pub passed_over: Vec<String>,
}

/// Says what a file is by its first record; nothing about a pipe, which can be read once only.
///
/// # Errors
/// [`Error::Io`], [`Error::File`] and [`Error::Record`] when it cannot be read.
pub fn describe(path: &Path, columns: &Columns) -> Result<Option<Described>> {
    if !std::fs::metadata(path).map_err(Error::io(path))?.is_file() {
        return Ok(None);
    }
    let input = format::open(path)?;
    let mut described = Described {
        format: input.format.name(),
        compression: input.compression,
        shape: None,
        taken: Vec::new(),
        passed_over: Vec::new(),
    };
    drop(input);
    let first = Rows::open(path)?.next().transpose()?;
    if let Some(RowContent::Value(serde_json::Value::Object(fields))) = first.map(|row| row.content)
    {
        let taken: Vec<&str> = if columns.is_empty() {
            let shape = Shape::of(&fields, SampleKind::default());
            described.shape = shape.map(Shape::name);
            shape.map_or(&[][..], Shape::keys).to_vec()
        } else {
            columns.keys(&fields)
        };
        let is_taken = |key: &str| {
            taken.iter().any(|taken| *taken == key || taken.split('.').next() == Some(key))
        };
        let keys = fields.into_iter().map(|(key, _)| key);
        (described.taken, described.passed_over) = keys.partition(|key| is_taken(key));
    }
    Ok(Some(described))
}

/// How records are measured.
#[derive(Debug, Clone, Copy)]
pub enum Reading<'a> {
    /// By the characters of their texts.
    Characters,
    /// By their tokens.
    Tokens {
        /// What makes the tokens.
        tokenizer: &'a Tokenizer,
        /// How a run would make examples of the records.
        options: &'a DataOptions,
        /// How many tokens the model was made for.
        context: Option<usize>,
    },
}

/// What a survey found.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Survey {
    /// Records; of plain text read by tokens, the examples that it becomes.
    pub records: usize,
    /// How many there are of each kind, by [`Body::kind`].
    pub kinds: BTreeMap<&'static str, usize>,
    /// Their lengths before anything is cut, in tokens or characters; none without records.
    pub lengths: Option<Lengths>,
    /// Records that say the same as one before.
    pub duplicates: usize,
    /// Records with an empty completion or text, which have no length.
    pub empty: usize,
    /// What is known by tokens alone.
    pub tokens: Option<TokenCounts>,
}

/// Lengths of records: nearest ranks of them in order.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Lengths {
    /// All together.
    pub total: u64,
    /// The shortest.
    pub min: u32,
    /// Half of the records are not longer.
    pub median: u32,
    /// Of 100 records, 95 are not longer.
    pub p95: u32,
    /// The longest.
    pub max: u32,
}

/// What a run makes of records.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct TokenCounts {
    /// Tokens that are learned.
    pub learned: u64,
    /// Records that are cut at `max_seq_length`.
    pub cut: usize,
    /// Tokens that are cut away there.
    pub cut_tokens: u64,
    /// Records that are longer than the model's context; none where that is not known.
    pub beyond_context: Option<usize>,
    /// Records that nothing is learned from, empty ones included.
    pub nothing_learned: usize,
}

/// What one record comes to.
#[derive(Debug, Clone, Copy)]
struct Measured {
    kind: &'static str,
    hash: u64,
    /// `None` when it is empty.
    length: Option<u32>,
    learned: u32,
}

/// Measures the records of sources, and finds the one at the index `wanted`.
///
/// # Errors
/// As [`super::tokenize`], but for data of which nothing is left to learn.
pub fn survey(
    sources: &[DataSource],
    reading: Reading,
    wanted: Option<usize>,
) -> Result<(Survey, Option<Record>)> {
    let (builder, wanted_as) = match reading {
        Reading::Characters => (None, SampleKind::default()),
        Reading::Tokens { tokenizer, options, .. } => {
            (Some(Builder::new(tokenizer, options)), options.samples)
        }
    };
    let mut found = None;
    let mut index = 0;
    let mut tally = Tally::new(reading);
    for source in sources {
        source.in_parts(wanted_as, |records| {
            if let Some(place) = wanted.and_then(|wanted| wanted.checked_sub(index)) {
                found = found.take().or_else(|| records.get(place).cloned());
            }
            index += records.len();
            let measured: Vec<Result<Vec<Measured>>> = records
                .par_iter()
                .map(|record| {
                    measure(builder.as_ref(), &record.body).map_err(|error| record.named(0, error))
                })
                .collect();
            for measured in measured {
                measured?.into_iter().for_each(|measured| tally.add(measured));
            }
            Ok(())
        })?;
    }
    Ok((tally.finish(), found))
}

fn measure(builder: Option<&Builder>, body: &Body) -> Result<Vec<Measured>> {
    let of = |hash, length: Option<usize>, learned: usize| Measured {
        kind: body.kind(),
        hash,
        length: length.map(clamped),
        learned: clamped(learned),
    };
    let Some(builder) = builder else {
        let characters = body.texts().map(|text| text.chars().count()).sum();
        let length = (!body.is_empty()).then_some(characters);
        return Ok(vec![of(body.fingerprint(), length, 0)]);
    };
    let most = builder.options.max_seq_length;
    if let Body::Document { text, last } = body
        && !text.is_empty()
    {
        let examples = builder.windows(text, *last)?;
        let hash = |example: &Example| {
            let mut hash = Hash::new();
            example.ids.iter().for_each(|id| hash.add(&id.to_le_bytes()));
            hash.finish()
        };
        return Ok(examples
            .iter()
            .map(|example| of(hash(example), Some(example.ids.len()), learned(example, most)))
            .collect());
    }
    let mut examples = Vec::new();
    for part in body.parts() {
        let Some(written) = builder.write(part)? else {
            return Ok(vec![of(body.fingerprint(), None, 0)]);
        };
        examples.push(builder.encode(&written, usize::MAX)?.0);
    }
    // Of a pair the longer sequence is what has to fit.
    let length = examples.iter().map(|example| example.ids.len()).max();
    Ok(vec![of(body.fingerprint(), length, learned_of_all(&examples, most))])
}

/// How many tokens of a record's examples are learned: of a pair none if its answers, as they are cut, are the same, or if
/// nothing of one is left.
fn learned_of_all(examples: &[Example], most: usize) -> usize {
    let counts: Vec<usize> = examples.iter().map(|example| learned(example, most)).collect();
    if let [chosen, rejected] = examples {
        let are_equal = chosen.ids.iter().take(most).eq(rejected.ids.iter().take(most));
        if are_equal || counts.contains(&0) {
            return 0;
        }
    }
    counts.iter().sum()
}

/// How many of an example's first tokens are learned; the very first is nobody's prediction.
fn learned(example: &Example, most: usize) -> usize {
    example.trainable.iter().take(most).skip(1).filter(|learned| **learned).count()
}

fn clamped(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

struct Tally {
    survey: Survey,
    lengths: Vec<u32>,
    hashes: Vec<u64>,
    most: usize,
    context: Option<usize>,
}

impl Tally {
    fn new(reading: Reading) -> Self {
        let mut survey = Survey::default();
        let (most, context) = match reading {
            Reading::Characters => (usize::MAX, None),
            Reading::Tokens { options, context, .. } => {
                survey.tokens = Some(TokenCounts {
                    beyond_context: context.map(|_| 0),
                    ..TokenCounts::default()
                });
                (options.max_seq_length, context)
            }
        };
        Self { survey, lengths: Vec::new(), hashes: Vec::new(), most, context }
    }

    fn add(&mut self, Measured { kind, hash, length, learned }: Measured) {
        let survey = &mut self.survey;
        survey.records += 1;
        *survey.kinds.entry(kind).or_default() += 1;
        survey.empty += usize::from(length.is_none());
        self.hashes.push(hash);
        self.lengths.extend(length);
        let Some(tokens) = &mut survey.tokens else { return };
        let length = length.unwrap_or(0) as usize;
        let over = length.saturating_sub(self.most);
        tokens.learned += u64::from(learned);
        tokens.cut += usize::from(over > 0);
        tokens.cut_tokens += over as u64;
        tokens.nothing_learned += usize::from(learned == 0);
        if let (Some(context), Some(count)) = (self.context, &mut tokens.beyond_context) {
            *count += usize::from(length > context);
        }
    }

    fn finish(mut self) -> Survey {
        self.hashes.sort_unstable();
        self.hashes.dedup();
        self.survey.duplicates = self.survey.records - self.hashes.len();
        self.lengths.sort_unstable();
        let lengths = &self.lengths;
        let rank =
            |percent: usize| lengths[(lengths.len() * percent).div_ceil(100).saturating_sub(1)];
        self.survey.lengths = lengths.first().zip(lengths.last()).map(|(min, max)| Lengths {
            total: lengths.iter().map(|length| u64::from(*length)).sum(),
            min: *min,
            median: rank(50),
            p95: rank(95),
            max: *max,
        });
        self.survey
    }
}

/// A record as the model reads it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Shown {
    /// Its text in order, up to where it is cut, with the special tokens around it.
    pub pieces: Vec<Piece>,
    /// Its tokens.
    pub tokens: usize,
    /// Those that are learned.
    pub learned: usize,
    /// Those that are cut away at `max_seq_length`.
    pub cut: usize,
}

/// A part of a record.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Piece {
    /// What stands there.
    pub text: String,
    /// Whether its tokens are learned.
    pub learned: bool,
}

impl Shown {
    /// A record as it is learned. Of a piece of plain text, the first example that it becomes.
    ///
    /// # Errors
    /// Those of [`super::tokenize`] about the record.
    pub fn new(record: &Record, tokenizer: &Tokenizer, options: &DataOptions) -> Result<Self> {
        Self::of(&record.body, tokenizer, options).map_err(|error| record.named(0, error))
    }

    fn of(body: &Body, tokenizer: &Tokenizer, options: &DataOptions) -> Result<Self> {
        let builder = Builder::new(tokenizer, options);
        let mut shown = Self::default();
        if let Body::Document { text, last } = body {
            if let Some(example) = builder.windows(text, *last)?.first() {
                shown.tokens = example.ids.len();
                shown.learned = learned(example, usize::MAX);
                shown.add(&tokenizer.decode(&example.ids, false)?, true);
            }
            return Ok(shown);
        }
        if let Body::Pair { chosen, rejected } = body {
            for (name, answer) in [("chosen", chosen), ("rejected", rejected)] {
                let of_answer = Self::of(answer, tokenizer, options)?;
                shown.tokens += of_answer.tokens;
                shown.learned += of_answer.learned;
                shown.cut += of_answer.cut;
                shown.add(&format!("[{name}]\n"), false);
                of_answer.pieces.iter().for_each(|piece| shown.add(&piece.text, piece.learned));
                shown.add("\n", false);
            }
            return Ok(shown);
        }
        if let Body::Labelled { answer, .. } = body {
            return Self::of(answer, tokenizer, options);
        }
        let Some(written) = builder.write(body)? else { return Ok(shown) };
        let (example, offsets) = builder.encode(&written, usize::MAX)?;
        shown.tokens = example.ids.len();
        shown.learned = learned(&example, options.max_seq_length);
        shown.cut = shown.tokens.saturating_sub(options.max_seq_length);
        let kept = example.ids.iter().zip(&example.trainable).zip(&offsets);
        let mut place = 0;
        for (index, ((id, trainable), (start, end))) in
            kept.take(options.max_seq_length).enumerate()
        {
            let is_learned = *trainable && index > 0;
            if *end > place {
                // What stands between two tokens, which a tokenizer may leave out, comes with the second.
                shown.add(written.text.get(place..*end).unwrap_or_default(), is_learned);
                place = *end;
            } else if start == end {
                // It was put around the text.
                shown.add(&tokenizer.id_to_token(*id).unwrap_or_default(), is_learned);
            }
        }
        if shown.cut == 0 {
            shown.add(written.text.get(place..).unwrap_or_default(), false);
        }
        Ok(shown)
    }

    fn add(&mut self, text: &str, learned: bool) {
        match self.pieces.last_mut() {
            _ if text.is_empty() => {}
            Some(last) if last.learned == learned => last.text.push_str(text),
            _ => self.pieces.push(Piece { text: text.to_string(), learned }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_learned_from_a_pair_of_equal_answers() {
        let example = |ids: &[u32]| Example {
            ids: ids.to_vec(),
            trainable: (0..ids.len()).map(|index| index > 1).collect(),
        };
        let learned = |chosen: &[u32], rejected: &[u32], most| {
            learned_of_all(&[example(chosen), example(rejected)], most)
        };
        assert_eq!(learned(&[1, 2, 3], &[1, 2, 4, 5], 9), 3);
        assert_eq!(learned(&[1, 2, 3], &[1, 2, 3], 9), 0);
        // As they are cut, too; and where nothing is left of one.
        assert_eq!(learned(&[1, 2, 3, 4], &[1, 2, 3, 5], 3), 0);
        assert_eq!(learned(&[1, 2], &[1, 2, 3], 9), 0);
        assert_eq!(learned_of_all(&[example(&[1, 2, 3])], 9), 1);
    }
}
