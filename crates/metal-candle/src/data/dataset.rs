//! Tokens of records, what became of them, and the data sets that are made of them.

use std::fmt;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

use chrono::NaiveDateTime;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::files::HeldOut;
use super::store::{self, Store, Writer};
use super::teacher::{Taught, Teacher};
use crate::hash::Hash;
use crate::random::SplitMix64;
use crate::{Error, Result, bounds};

/// Which tokens the loss counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LossOn {
    /// Every token.
    All,
    /// What follows the prompt; in a conversation, the last turn of the assistant.
    Completion,
    /// Every turn of the assistant; in a prompt with its completion, the completion.
    Assistant,
}

/// How records become examples.
#[derive(Debug, Clone, PartialEq)]
pub struct DataOptions {
    /// An example keeps its first `max_seq_length` tokens; at least 2.
    pub max_seq_length: usize,
    /// Which tokens the loss counts. `None` goes by the record: conversations [`LossOn::Assistant`], prompts with a
    /// completion [`LossOn::Completion`], texts [`LossOn::All`].
    pub loss_on: Option<LossOn>,
    /// What is to be learned from records of files, as [`Objective::samples`](crate::train::Objective::samples) says: of a
    /// record with keys of several shapes, this one is taken. [`SampleKind::Plain`] takes the first of those that
    /// [`super::read_records`] knows.
    pub samples: SampleKind,
    /// More variables for the chat template.
    pub variables: Map<String, Value>,
    /// The time that the chat template's `strftime_now` says; `None` is the time at the start of the build. A template
    /// that prints the date makes other tokens the next day, so a run that must repeat gives one.
    pub now: Option<NaiveDateTime>,
    /// The most bytes of tokens that are kept in memory, at 4 a token. More of them go to a file without a name, which
    /// the system reads back as it is needed; the batches are the same.
    pub memory: u64,
    /// The folder of that file.
    pub folder: PathBuf,
}

impl Default for DataOptions {
    fn default() -> Self {
        Self {
            max_seq_length: 2048,
            loss_on: None,
            samples: SampleKind::default(),
            variables: Map::new(),
            now: None,
            memory: 1 << 30,
            folder: std::env::temp_dir(),
        }
    }
}

impl DataOptions {
    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::Option`] about the first that cannot work.
    pub fn validate(&self) -> Result<()> {
        let length = self.max_seq_length;
        bounds::check("max_seq_length", length, &bounds::TOKENS)?;
        if length < 2 {
            return Err(Error::option(
                "max_seq_length",
                format!("is {length}, but a token and its prediction are 2"),
            ));
        }
        Ok(())
    }
}

/// One record's tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Example {
    /// The token ids, at least 2.
    pub ids: Vec<u32>,
    /// Whether the loss counts the prediction of the token at the same index; false at index 0.
    pub trainable: Vec<bool>,
}

/// What one record is to learn from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sample {
    /// A sequence, whose trainable tokens are learned.
    Plain(Example),
    /// Two answers to one prompt. Both sequences have the prompt; the trainable tokens are the answers.
    Pair {
        /// The sequence with the better answer.
        chosen: Example,
        /// The sequence with the other.
        rejected: Example,
    },
    /// An answer, the trainable tokens of a sequence, and whether it is a good one.
    Labelled {
        /// The sequence.
        answer: Example,
        /// Whether it is.
        desirable: bool,
    },
}

/// Which of the [`Sample`]s a data set has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum SampleKind {
    /// [`Sample::Plain`].
    #[default]
    Plain,
    /// [`Sample::Pair`].
    Pair,
    /// [`Sample::Labelled`].
    Labelled,
}

impl SampleKind {
    /// What people call them, in the plural.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "sequences",
            Self::Pair => "preference pairs",
            Self::Labelled => "labelled answers",
        }
    }
}

/// What became of the records.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// Records given. Of a plain text file, each piece that fits an example is one.
    pub records: usize,
    /// Examples made of them.
    pub examples: usize,
    /// Records cut to the longest sequence allowed, also those that were then dropped.
    pub truncated: usize,
    /// Records left out because there is nothing to learn in them: an empty completion or text.
    pub dropped_empty: usize,
    /// Records left out because no token of theirs is trainable; of a pair, because an answer has none.
    pub dropped_untrainable: usize,
    /// Pairs left out because both answers are the same, maybe as they were cut.
    pub dropped_equal: usize,
    /// Tokens of all examples.
    pub tokens: usize,
    /// Trainable tokens of all examples.
    pub trainable_tokens: usize,
    /// Tokens of the longest sequence.
    pub longest: usize,
    /// Tokens of the average sequence.
    pub mean_length: f64,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} examples of {} records, {} tokens ({} trainable), {:.1} tokens on average, {} at most",
            self.examples,
            self.records,
            self.tokens,
            self.trainable_tokens,
            self.mean_length,
            self.longest
        )?;
        if self.truncated > 0 {
            write!(f, "; {} truncated", self.truncated)?;
        }
        if self.dropped_untrainable > 0 {
            write!(
                f,
                "; {} dropped because nothing in them is trainable",
                self.dropped_untrainable
            )?;
        }
        if self.dropped_equal > 0 {
            write!(f, "; {} dropped because both answers are the same", self.dropped_equal)?;
        }
        if self.dropped_empty > 0 {
            write!(f, "; {} dropped because they are empty", self.dropped_empty)?;
        }
        Ok(())
    }
}

/// What became of a record.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Outcome {
    /// The example's tokens; 0 when the record was dropped.
    length: u32,
    /// The tokens of a pair's other sequence.
    rejected: u32,
    kind: SampleKind,
    desirable: bool,
    trainable: u32,
    truncated: bool,
    empty: bool,
    equal: bool,
}

/// Records that have been tokenized, of which data sets are made.
#[derive(Debug)]
pub struct Tokenized {
    store: Store,
    outcomes: Vec<Outcome>,
    /// Where the records of each source end, and its weight.
    sources: Vec<(usize, Option<f64>)>,
    max_seq_length: usize,
}

/// Takes the tokens of records, one record after the other.
pub(super) struct Collector {
    writer: Writer,
    outcomes: Vec<Outcome>,
    sources: Vec<(usize, Option<f64>)>,
    max_seq_length: usize,
    words: Vec<u32>,
}

impl Collector {
    pub fn new(options: &DataOptions) -> Result<Self> {
        options.validate()?;
        Ok(Self {
            writer: Writer::new(options.memory, options.folder.clone()),
            outcomes: Vec::new(),
            sources: Vec::new(),
            max_seq_length: options.max_seq_length,
            words: Vec::new(),
        })
    }

    /// A record in which there is nothing to learn.
    pub fn push_empty(&mut self) {
        self.outcomes.push(Outcome { empty: true, ..Outcome::default() });
    }

    /// A whole record, or the start of one that is longer than an example can be.
    pub fn push(&mut self, sample: &Sample) -> Result<()> {
        self.words.clear();
        let mut outcome = Outcome::default();
        let [length, rejected] = match sample {
            Sample::Plain(example) => [self.add(example, &mut outcome)?, 0],
            Sample::Labelled { answer, desirable } => {
                (outcome.kind, outcome.desirable) = (SampleKind::Labelled, *desirable);
                [self.add(answer, &mut outcome)?, 0]
            }
            Sample::Pair { chosen, rejected } => {
                outcome.kind = SampleKind::Pair;
                let chosen = self.add(chosen, &mut outcome)?;
                let of_chosen = outcome.trainable;
                let rejected = self.add(rejected, &mut outcome)?;
                let (first, second) = self.words.split_at(chosen as usize);
                let of_both = [of_chosen, outcome.trainable - of_chosen];
                let ids =
                    |words: &[u32]| words.iter().map(|word| store::id(*word)).collect::<Vec<_>>();
                // An answer of which nothing is left can't be compared, nor one with itself.
                outcome.equal = !of_both.contains(&0) && ids(first) == ids(second);
                if outcome.equal || of_both.contains(&0) {
                    outcome.trainable = 0;
                }
                [chosen, rejected]
            }
        };
        if outcome.trainable > 0 {
            (outcome.length, outcome.rejected) = (length, rejected);
            self.writer.push(&self.words)?;
        }
        self.outcomes.push(outcome);
        Ok(())
    }

    /// Adds the words of a sequence, as many as it may have, and gives their number.
    fn add(&mut self, example: &Example, outcome: &mut Outcome) -> Result<u32> {
        outcome.truncated |= example.ids.len() > self.max_seq_length;
        let tokens = example.ids.iter().zip(&example.trainable).take(self.max_seq_length);
        let before = self.words.len();
        for (index, (&id, &trainable)) in tokens.enumerate() {
            // Nothing predicts the first token of a row.
            let trainable = trainable && index > 0;
            outcome.trainable += u32::from(trainable);
            self.words.push(store::word(id, trainable).ok_or_else(|| {
                Error::Tokenizer(format!("gave the token id {id}; at most 2147483647 is supported"))
            })?);
        }
        Ok((self.words.len() - before) as u32)
    }

    /// Ends a source; the records from the end of the one before on are its own.
    pub fn end_source(&mut self, weight: Option<f64>) {
        self.sources.push((self.outcomes.len(), weight));
    }

    pub fn finish(self) -> Result<Tokenized> {
        Ok(Tokenized {
            store: self.writer.finish()?,
            outcomes: self.outcomes,
            sources: self.sources,
            max_seq_length: self.max_seq_length,
        })
    }
}

impl Tokenized {
    /// All of it as one data set.
    ///
    /// # Errors
    /// [`Error::Option`] when no example is left, or when a source with a weight has none.
    pub fn into_dataset(self) -> Result<Dataset> {
        let everything = vec![true; self.outcomes.len()];
        let store = Arc::new(self.store);
        Dataset::select(&store, &self.outcomes, &self.sources, self.max_seq_length, &everything)
    }

    /// What is left when records are held out, and those.
    ///
    /// # Errors
    /// As [`Tokenized::into_dataset`], for either; [`Error::Option`] when the fraction is not between 0 and 1, or when
    /// there is only one record.
    pub fn hold_out(self, held_out: HeldOut) -> Result<(Dataset, Dataset)> {
        let held = held_out.choose(self.outcomes.len())?;
        let kept: Vec<bool> = held.iter().map(|held| !held).collect();
        let store = Arc::new(self.store);
        let unweighted: Vec<_> = self.sources.iter().map(|(end, _)| (*end, None)).collect();
        Ok((
            Dataset::select(&store, &self.outcomes, &self.sources, self.max_seq_length, &kept)?,
            Dataset::select(&store, &self.outcomes, &unweighted, self.max_seq_length, &held)?,
        ))
    }
}

/// Where an example lies in the store.
#[derive(Debug, Clone, Copy)]
struct Entry {
    start: u64,
    length: u32,
    /// The tokens of a pair's other sequence, behind the first.
    rejected: u32,
    desirable: bool,
}

/// A source's share of an epoch.
#[derive(Debug, Clone, PartialEq)]
struct Part {
    examples: Range<usize>,
    weight: f64,
    /// How many of its examples an epoch has.
    drawn: usize,
}

/// Examples to learn from or to measure with. Of more than [`DataOptions::memory`] only an index is in memory.
#[derive(Debug, Clone)]
pub struct Dataset {
    store: Arc<Store>,
    entries: Vec<Entry>,
    /// Empty when every example is in an epoch once.
    mixture: Vec<Part>,
    kind: SampleKind,
    /// What a teacher says of the examples.
    taught: Option<Taught>,
    /// What became of the records.
    pub report: Report,
}

impl Dataset {
    /// A data set of examples.
    ///
    /// # Errors
    /// [`Error::Option`] for an example with fewer than 2 tokens, without a mask value for each token, without a token
    /// to learn, or with a token id of 2³¹ or above; and when there is none.
    pub fn from_examples(examples: &[Example]) -> Result<Self> {
        let samples: Vec<_> = examples.iter().cloned().map(Sample::Plain).collect();
        Self::from_samples(&samples)
    }

    /// A data set of samples, all of one kind.
    ///
    /// # Errors
    /// As [`Self::from_examples`], about any sequence of them; [`Error::Option`] also for a pair whose sequences are the
    /// same, and for samples of several kinds.
    pub fn from_samples(samples: &[Sample]) -> Result<Self> {
        let lengths = samples.iter().flat_map(Sample::sequences).map(|example| example.ids.len());
        let longest = lengths.max().unwrap_or(0);
        let memory = u64::MAX;
        let mut collector = Collector::new(&DataOptions {
            max_seq_length: longest.max(2),
            memory,
            ..DataOptions::default()
        })?;
        for (index, sample) in samples.iter().enumerate() {
            for example in sample.sequences() {
                let (ids, mask) = (example.ids.len(), example.trainable.len());
                if ids < 2 || ids != mask {
                    return Err(Error::option(
                        "data",
                        format!(
                            "example {index} has {ids} tokens and {mask} mask values, expected 2 or more of each, as \
                             many of one as of the other"
                        ),
                    ));
                }
                if let Some(id) = example.ids.iter().find(|id| store::word(**id, false).is_none()) {
                    return Err(Error::option(
                        "data",
                        format!(
                            "example {index} has the token id {id}; at most 2147483647 is supported"
                        ),
                    ));
                }
                if !example.trainable.iter().skip(1).any(|&trainable| trainable) {
                    return Err(Error::option(
                        "data",
                        format!("example {index} has no token to learn"),
                    ));
                }
            }
            if let Sample::Pair { chosen, rejected } = sample
                && chosen.ids == rejected.ids
            {
                return Err(Error::option(
                    "data",
                    format!("example {index} has the same answer twice"),
                ));
            }
            collector.push(sample)?;
        }
        if samples.is_empty() {
            return Err(Error::option("data", "there are no examples"));
        }
        collector.end_source(None);
        collector.finish()?.into_dataset()
    }

    fn select(
        store: &Arc<Store>,
        outcomes: &[Outcome],
        sources: &[(usize, Option<f64>)],
        max_seq_length: usize,
        chosen: &[bool],
    ) -> Result<Self> {
        let mut report = Report::default();
        let mut entries = Vec::new();
        let mut parts: Vec<(Range<usize>, Option<f64>)> = Vec::new();
        let mut sources = sources.iter().peekable();
        let (mut start, mut first) = (0, 0);
        let mut kind = None;
        for (index, (outcome, chosen)) in outcomes.iter().zip(chosen).enumerate() {
            if *chosen {
                report.records += 1;
                report.truncated += usize::from(outcome.truncated);
                report.dropped_empty += usize::from(outcome.empty);
                report.dropped_equal += usize::from(outcome.equal);
                let dropped = outcome.length == 0 && !outcome.empty && !outcome.equal;
                report.dropped_untrainable += usize::from(dropped);
                if outcome.length > 0 {
                    let Outcome { length, rejected, trainable, desirable, .. } = *outcome;
                    let before = *kind.get_or_insert(outcome.kind);
                    if before != outcome.kind {
                        return Err(Error::option(
                            "data",
                            format!(
                                "record {} is one of {}, but those before are {}; a run takes one kind",
                                index + 1,
                                outcome.kind.name(),
                                before.name()
                            ),
                        ));
                    }
                    report.tokens += (length + rejected) as usize;
                    report.trainable_tokens += trainable as usize;
                    report.longest = report.longest.max(length.max(rejected) as usize);
                    entries.push(Entry { start, length, rejected, desirable });
                }
            }
            start += u64::from(outcome.length) + u64::from(outcome.rejected);
            while let Some((_, weight)) = sources.next_if(|(end, _)| *end <= index + 1) {
                parts.push((first..entries.len(), *weight));
                first = entries.len();
            }
        }
        report.examples = entries.len();
        if entries.is_empty() {
            let why = if report.records == 0 {
                "there are no records".to_string()
            } else {
                format!(
                    "none of the {} records has a trainable token: {} are empty, {} have the same answer twice, {} were \
                     cut at max_seq_length {max_seq_length}, and what is left holds nothing that loss_on asks for (is \
                     there an assistant's turn in it?)",
                    report.records, report.dropped_empty, report.dropped_equal, report.truncated
                )
            };
            return Err(Error::option("data", why));
        }
        let kind = kind.unwrap_or_default();
        let sequences = if kind == SampleKind::Pair { 2 } else { 1 } * report.examples;
        report.mean_length = report.tokens as f64 / sequences as f64;
        let mixture = mixture(&parts)?;
        Ok(Self { store: store.clone(), entries, mixture, kind, taught: None, report })
    }

    /// The data set with what a teacher says of its examples.
    ///
    /// # Errors
    /// [`Error::File`] when it says nothing of one, or of a token of it that is to be learned; or when the data are no
    /// sequences to learn.
    pub fn with_teacher(mut self, teacher: &Arc<Teacher>) -> Result<Self> {
        self.taught = Some(Taught::find(&self, teacher)?);
        Ok(self)
    }

    /// What a teacher says of the examples.
    pub(super) fn taught(&self) -> Option<&Taught> {
        self.taught.as_ref()
    }

    /// Whether a teacher says something of the examples.
    pub fn has_teacher(&self) -> bool {
        self.taught.is_some()
    }

    /// The answers of pairs one by one: each chosen one as a good one, and each rejected one as one that isn't. Other
    /// data sets stay as they are.
    #[must_use]
    pub fn unpaired(mut self) -> Self {
        if self.kind != SampleKind::Pair {
            return self;
        }
        let single = |start, length, desirable| Entry { start, length, rejected: 0, desirable };
        let answers = |entry: &Entry| {
            let second = entry.start + u64::from(entry.length);
            [single(entry.start, entry.length, true), single(second, entry.rejected, false)]
        };
        self.entries = self.entries.iter().flat_map(answers).collect();
        for part in &mut self.mixture {
            part.examples = 2 * part.examples.start..2 * part.examples.end;
            part.drawn *= 2;
        }
        self.report.examples *= 2;
        self.kind = SampleKind::Labelled;
        self
    }

    /// The number of examples.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no example; there always is one.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// What its examples are.
    pub fn kind(&self) -> SampleKind {
        self.kind
    }

    /// The sequence of the example at an index; of a pair the chosen one.
    pub fn get(&self, index: usize) -> Option<Example> {
        self.entries.get(index).map(|entry| example(self.words_of(entry).0))
    }

    /// The example at an index.
    pub fn sample(&self, index: usize) -> Option<Sample> {
        self.entries.get(index).map(|entry| {
            let (words, rejected) = self.words_of(entry);
            match self.kind {
                SampleKind::Plain => Sample::Plain(example(words)),
                SampleKind::Pair => {
                    Sample::Pair { chosen: example(words), rejected: example(rejected) }
                }
                SampleKind::Labelled => {
                    Sample::Labelled { answer: example(words), desirable: entry.desirable }
                }
            }
        })
    }

    /// The sequences of the examples, of pairs the chosen ones, in the order of their records.
    pub fn iter(&self) -> impl Iterator<Item = Example> + '_ {
        self.entries.iter().map(|entry| example(self.words_of(entry).0))
    }

    /// The words of an example, and of a pair's other sequence; see [`super::store`].
    pub(super) fn words(&self, index: usize) -> Result<(&[u32], &[u32])> {
        let entry = self.entries.get(index).ok_or_else(|| {
            let count = self.len();
            Error::option("data", format!("have no example {index}; there are {count}"))
        })?;
        Ok(self.words_of(entry))
    }

    fn words_of(&self, entry: &Entry) -> (&[u32], &[u32]) {
        // The store was written with the entries.
        let start = entry.start as usize;
        let words = &self.store.words()[start..][..(entry.length + entry.rejected) as usize];
        words.split_at(entry.length as usize)
    }

    /// Whether an answer that there is, of labelled ones, is a good one.
    pub(super) fn is_desirable(&self, index: usize) -> bool {
        self.entries[index].desirable
    }

    /// The tokens of an example that there is; of a pair of the longer sequence.
    pub(super) fn length(&self, index: usize) -> usize {
        let entry = &self.entries[index];
        entry.length.max(entry.rejected) as usize
    }

    /// How many examples have more than `limit` tokens.
    pub fn longer_than(&self, limit: usize) -> usize {
        (0..self.len()).filter(|index| self.length(*index) > limit).count()
    }

    /// How many examples an epoch has.
    pub(super) fn drawn_count(&self) -> usize {
        match self.mixture.is_empty() {
            true => self.len(),
            false => self.mixture.iter().map(|part| part.drawn).sum(),
        }
    }

    /// The examples of an epoch, by index, not shuffled among each other: every one once, or of each source as many as
    /// its weight asks for. These go on from epoch to epoch through all of the source's examples, in an order that is
    /// new for each pass when `shuffle`.
    pub(super) fn drawn(&self, seed: u64, epoch: usize, shuffle: bool) -> Vec<usize> {
        if self.mixture.is_empty() {
            return (0..self.len()).collect();
        }
        let mut drawn = Vec::with_capacity(self.len());
        for (number, part) in self.mixture.iter().enumerate() {
            let seed = SplitMix64::stream(seed, number as u64).next_u64();
            let count = part.examples.len();
            let (mut from, mut left) = (epoch.wrapping_mul(part.drawn), part.drawn);
            while left > 0 {
                let (pass, place) = (from / count, from % count);
                let mut order: Vec<usize> = part.examples.clone().collect();
                if shuffle {
                    SplitMix64::stream(seed, pass as u64).shuffle(&mut order);
                }
                let taken = left.min(count - place);
                drawn.extend(order.into_iter().skip(place).take(taken));
                from += taken;
                left -= taken;
            }
        }
        drawn
    }

    /// A hash of every token and mask, of the weights and of what a teacher says (XXH3), by which a resumed run knows its data.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Hash::new();
        for entry in &self.entries {
            let (words, rejected) = self.words_of(entry);
            hash.add(&(words.len() as u32).to_le_bytes());
            for &word in words.iter().chain(rejected) {
                hash.add(&store::id(word).to_le_bytes());
                hash.add(&u32::from(store::is_trainable(word)).to_le_bytes());
            }
            if self.kind != SampleKind::Plain {
                hash.add(&entry.rejected.to_le_bytes());
                hash.add(&[u8::from(entry.desirable)]);
            }
        }
        for part in &self.mixture {
            hash.add(&(part.examples.end as u64).to_le_bytes());
            hash.add(&part.weight.to_le_bytes());
        }
        if let Some(taught) = &self.taught {
            hash.add(&taught.hash().to_le_bytes());
        }
        hash.finish()
    }

    /// That every token is a row of an embedding of `vocabulary` rows.
    ///
    /// # Errors
    /// [`Error::Option`] naming the first token that is not, and [`Error::File`] about one that a teacher names.
    pub fn check_vocabulary(&self, vocabulary: usize) -> Result<()> {
        let words = self.entries.iter().flat_map(|entry| {
            let (words, rejected) = self.words_of(entry);
            words.iter().chain(rejected)
        });
        let mut ids = words.map(|&word| store::id(word));
        if let Some(taught) = &self.taught {
            taught.check_vocabulary(vocabulary)?;
        }
        match ids.find(|&id| id as usize >= vocabulary) {
            Some(id) => Err(Error::option(
                "data",
                format!(
                    "has token {id}, but the model's vocabulary has {vocabulary}; the tokenizer is not this model's"
                ),
            )),
            None => Ok(()),
        }
    }
}

impl Sample {
    /// Its sequences: the chosen one of a pair first.
    pub fn sequences(&self) -> impl Iterator<Item = &Example> {
        match self {
            Self::Plain(example) | Self::Labelled { answer: example, .. } => [Some(example), None],
            Self::Pair { chosen, rejected } => [Some(chosen), Some(rejected)],
        }
        .into_iter()
        .flatten()
    }
}

fn example(words: &[u32]) -> Example {
    Example {
        ids: words.iter().map(|&word| store::id(word)).collect(),
        trainable: words.iter().map(|&word| store::is_trainable(word)).collect(),
    }
}

/// Each source's share of as many examples as there are together, by largest remainders; nothing without weights.
fn mixture(parts: &[(Range<usize>, Option<f64>)]) -> Result<Vec<Part>> {
    let wrong = |message: String| Error::option("data weight", message);
    let weights: Vec<f64> = parts.iter().filter_map(|(_, weight)| *weight).collect();
    if weights.is_empty() {
        return Ok(Vec::new());
    }
    if weights.len() != parts.len() {
        return Err(wrong(format!(
            "{} of {} sources have one; give each a weight, or none",
            weights.len(),
            parts.len()
        )));
    }
    if let Some(weight) = weights.iter().find(|weight| !(weight.is_finite() && **weight > 0.0)) {
        return Err(wrong(format!("is {weight}, expected a positive number")));
    }
    let total: usize = parts.iter().map(|(examples, _)| examples.len()).sum();
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|weight| total as f64 * (weight / sum)).collect();
    let mut drawn: Vec<usize> = exact.iter().map(|share| share.floor() as usize).collect();
    let mut order: Vec<usize> = (0..exact.len()).collect();
    order.sort_by(|a, b| {
        let rest = |index: &usize| exact[*index].fract();
        rest(b).total_cmp(&rest(a))
    });
    let missing = total.saturating_sub(drawn.iter().sum());
    for index in order.into_iter().cycle().take(missing) {
        drawn[index] += 1;
    }
    let mut mixture = Vec::with_capacity(parts.len());
    for (number, (((examples, _), weight), drawn)) in
        parts.iter().zip(weights).zip(drawn).enumerate()
    {
        if examples.is_empty() {
            return Err(wrong(format!("source {} has no example", number + 1)));
        }
        if drawn == 0 {
            return Err(wrong(format!(
                "{weight} of {sum} is less than one of the {total} examples of an epoch; raise it, or leave the source \
                 out"
            )));
        }
        mixture.push(Part { examples: examples.clone(), weight, drawn });
    }
    Ok(mixture)
}
