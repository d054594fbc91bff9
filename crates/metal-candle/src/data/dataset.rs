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
    /// Records left out because no token of theirs is trainable.
    pub dropped_untrainable: usize,
    /// Tokens of all examples.
    pub tokens: usize,
    /// Trainable tokens of all examples.
    pub trainable_tokens: usize,
    /// Tokens of the longest example.
    pub longest: usize,
    /// Tokens of the average example.
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
    trainable: u32,
    truncated: bool,
    empty: bool,
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
    pub fn push(&mut self, example: &Example) -> Result<()> {
        let mut outcome =
            Outcome { truncated: example.ids.len() > self.max_seq_length, ..Outcome::default() };
        self.words.clear();
        let tokens = example.ids.iter().zip(&example.trainable).take(self.max_seq_length);
        for (index, (&id, &trainable)) in tokens.enumerate() {
            // Nothing predicts the first token of a row.
            let trainable = trainable && index > 0;
            outcome.trainable += u32::from(trainable);
            self.words.push(store::word(id, trainable).ok_or_else(|| {
                Error::Tokenizer(format!("gave the token id {id}; at most 2147483647 is supported"))
            })?);
        }
        if outcome.trainable > 0 {
            outcome.length = self.words.len() as u32;
            self.writer.push(&self.words)?;
        }
        self.outcomes.push(outcome);
        Ok(())
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
    /// What became of the records.
    pub report: Report,
}

impl Dataset {
    /// A data set of examples.
    ///
    /// # Errors
    /// [`Error::Option`] for an example with fewer than 2 tokens, without a mask value for each token, without a token
    /// to learn, or with a token id above 2³¹; and when there is none.
    pub fn from_examples(examples: &[Example]) -> Result<Self> {
        let longest = examples.iter().map(|example| example.ids.len()).max().unwrap_or(0);
        let memory = u64::MAX;
        let mut collector = Collector::new(&DataOptions {
            max_seq_length: longest.max(2),
            memory,
            ..DataOptions::default()
        })?;
        for (index, example) in examples.iter().enumerate() {
            let (ids, mask) = (example.ids.len(), example.trainable.len());
            if ids < 2 || ids != mask {
                return Err(Error::option(
                    "data",
                    format!(
                        "example {index} has {ids} tokens and {mask} mask values, expected 2 or more of each, as many \
                         of one as of the other"
                    ),
                ));
            }
            if !example.trainable.iter().skip(1).any(|&trainable| trainable) {
                return Err(Error::option(
                    "data",
                    format!("example {index} has no token to learn"),
                ));
            }
            collector.push(example)?;
        }
        if examples.is_empty() {
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
        for (index, (outcome, chosen)) in outcomes.iter().zip(chosen).enumerate() {
            if *chosen {
                report.records += 1;
                report.truncated += usize::from(outcome.truncated);
                report.dropped_empty += usize::from(outcome.empty);
                report.dropped_untrainable += usize::from(outcome.length == 0 && !outcome.empty);
                if outcome.length > 0 {
                    let Outcome { length, trainable, .. } = *outcome;
                    report.tokens += length as usize;
                    report.trainable_tokens += trainable as usize;
                    report.longest = report.longest.max(length as usize);
                    entries.push(Entry { start, length });
                }
            }
            start += u64::from(outcome.length);
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
                    "none of the {} records has a trainable token: {} are empty, {} were cut at max_seq_length \
                     {max_seq_length}, and what is left holds nothing that loss_on asks for (is there an assistant's \
                     turn in it?)",
                    report.records, report.dropped_empty, report.truncated
                )
            };
            return Err(Error::option("data", why));
        }
        report.mean_length = report.tokens as f64 / report.examples as f64;
        let mixture = mixture(&parts)?;
        Ok(Self { store: store.clone(), entries, mixture, report })
    }

    /// The number of examples.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether there is no example; there always is one.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The example at an index.
    pub fn get(&self, index: usize) -> Option<Example> {
        self.entries.get(index).map(|entry| self.example(entry))
    }

    /// The examples, in the order of their records.
    pub fn iter(&self) -> impl Iterator<Item = Example> + '_ {
        self.entries.iter().map(|entry| self.example(entry))
    }

    fn example(&self, entry: &Entry) -> Example {
        let words = self.words_of(entry);
        Example {
            ids: words.iter().map(|&word| store::id(word)).collect(),
            trainable: words.iter().map(|&word| store::is_trainable(word)).collect(),
        }
    }

    /// The words of an example; see [`super::store`].
    pub(super) fn words(&self, index: usize) -> Result<&[u32]> {
        let entry = self.entries.get(index).ok_or_else(|| {
            let count = self.len();
            Error::option("data", format!("have no example {index}; there are {count}"))
        })?;
        Ok(self.words_of(entry))
    }

    fn words_of(&self, entry: &Entry) -> &[u32] {
        // The store was written with the entries.
        let start = entry.start as usize;
        &self.store.words()[start..start + entry.length as usize]
    }

    /// The tokens of an example that there is.
    pub(super) fn length(&self, index: usize) -> usize {
        self.entries[index].length as usize
    }

    /// How many examples have more than `limit` tokens.
    pub fn longer_than(&self, limit: usize) -> usize {
        self.entries.iter().filter(|entry| entry.length as usize > limit).count()
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

    /// A hash of every token and mask, and of the weights (XXH3), by which a resumed run knows its data.
    pub fn fingerprint(&self) -> u64 {
        let mut hash = Hash::new();
        for words in self.entries.iter().map(|entry| self.words_of(entry)) {
            hash.add(&(words.len() as u32).to_le_bytes());
            for &word in words {
                hash.add(&store::id(word).to_le_bytes());
                hash.add(&u32::from(store::is_trainable(word)).to_le_bytes());
            }
        }
        for part in &self.mixture {
            hash.add(&(part.examples.end as u64).to_le_bytes());
            hash.add(&part.weight.to_le_bytes());
        }
        hash.finish()
    }

    /// That every token is a row of an embedding of `vocabulary` rows.
    ///
    /// # Errors
    /// [`Error::Option`] naming the first token that is not.
    pub fn check_vocabulary(&self, vocabulary: usize) -> Result<()> {
        let words = self.entries.iter().flat_map(|entry| self.words_of(entry));
        let mut ids = words.map(|&word| store::id(word));
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
