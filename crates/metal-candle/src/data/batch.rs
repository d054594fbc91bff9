//! Examples to batches: by length, or packed several to a row.
//!
//! An example of n tokens takes n - 1 places of a row: place i reads token i and is to predict token i + 1. In a packed
//! row the examples stand one behind the other; positions start again at 0 with each, and `first_key` tells attention
//! the first place a place may look back to.
//!
//! The two sequences of a pair stand in one row, and the places that read their common beginning are there once: `[p c r]`
//! stands for `[p c]` and `[p r]`. Attention sees it so ([`SharedBeginnings`]); all else that a model computes for a
//! place depends on nothing but that place.

use std::ops::Range;
use std::sync::Arc;

use super::dataset::{DataOptions, Dataset, SampleKind};
use super::store;
use super::teacher::Teacher;
use crate::parallel::Group;
use crate::random::SplitMix64;
use crate::{Error, Result, bounds};
use metal_candle_kernels::cross_entropy::Targets;
use serde::{Deserialize, Serialize};

/// The target of a place whose prediction the loss does not count.
pub const IGNORED: u32 = u32::MAX;

/// Rows that packing keeps open at once. More find tighter fits, at more comparisons an example.
const OPEN_ROWS: usize = 64;

/// Row lengths are rounded up to a multiple of this, so that kernels meet few different ones.
const LENGTH_STEP: usize = 8;

/// How examples become batches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BatchOptions {
    /// Rows of a batch; the last one of an epoch may have fewer.
    pub batch_size: usize,
    /// The longest row; also what packing fills rows up to.
    pub max_seq_length: usize,
    /// Put several examples in a row.
    pub packing: bool,
    /// What the order of each epoch is drawn from.
    pub seed: u64,
    /// Draw a new order each epoch; otherwise every epoch is the same.
    pub shuffle: bool,
    /// Compute the common beginning of a pair's sequences once for both.
    pub share_prompts: bool,
}

impl Default for BatchOptions {
    fn default() -> Self {
        Self {
            batch_size: 4,
            max_seq_length: DataOptions::default().max_seq_length,
            packing: false,
            seed: 0,
            shuffle: true,
            share_prompts: true,
        }
    }
}

impl BatchOptions {
    /// Checks every value.
    ///
    /// # Errors
    /// [`Error::Option`] about the first that cannot work.
    pub fn validate(&self) -> Result<()> {
        bounds::check("batch_size", self.batch_size, &bounds::BATCH_SIZE)?;
        bounds::check("max_seq_length", self.max_seq_length, &bounds::TOKENS)
    }
}

/// Which examples, by index, stand in each row of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchPlan {
    /// The rows; each holds at least one example.
    pub rows: Vec<Vec<usize>>,
}

/// What an answer is to the loss.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The better one of a pair; the next answer is the other.
    Chosen,
    /// The other one.
    Rejected,
    /// A good one.
    Desirable,
    /// One that isn't good.
    Undesirable,
}

/// An answer whose log-probability a loss asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// Its example, by index in the data set.
    pub example: usize,
    /// What it is.
    pub role: Role,
    /// The places of the batch, in row-major order, that predict its tokens.
    pub places: Vec<u32>,
    /// The places that predict the other tokens of its sequence, where they are asked for.
    pub prompt: Vec<u32>,
}

/// How attention sees a batch in which sequences share their beginnings: every sequence with a beginning of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedBeginnings {
    /// Places of a row there.
    pub length: usize,
    /// `(rows, length)`: the place of the batch, in row-major order, that each place there is a copy of.
    pub source: Vec<u32>,
    /// `(rows, the batch's length)`: the place there, in row-major order, where the result of each place is read.
    pub result: Vec<u32>,
}

/// Several tokens to predict at each place, with their shares, which add up to 1.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Distributions {
    /// `(rows, length, k)`: the tokens, or [`IGNORED`] in place of one that is missing; the first one where the loss doesn't
    /// count the place.
    pub tokens: Vec<u32>,
    /// `(rows, length, k)`: their shares, 0 for what is missing.
    pub shares: Vec<f32>,
    /// What the cross entropy of all places lacks to be the divergence from a teacher, in nats: of each place the sum of
    /// `p·ln p` over the teacher's tokens, times the teacher's share.
    pub offset: f64,
}

/// A batch: arrays of `(rows, length)`, row-major.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Batch {
    /// Number of rows.
    pub rows: usize,
    /// Places in a row.
    pub length: usize,
    /// The token at each place; 0 in padding.
    pub input_ids: Vec<u32>,
    /// The token to predict at each place, or [`IGNORED`].
    pub targets: Vec<u32>,
    /// What is to be predicted instead, where a teacher was asked for.
    pub distributions: Option<Distributions>,
    /// The position in its sequence of each place, from 0; 0 in padding.
    pub positions: Vec<u32>,
    /// The place in its row where the sequence of each place starts: a place attends to those from there to itself. In
    /// padding, the place itself. With shared beginnings, of the places that attention sees.
    pub first_key: Vec<u32>,
    /// Where sequences share their beginnings.
    pub shared: Option<SharedBeginnings>,
    /// Answers whose log-probabilities are compared, by rows; those of a pair one behind the other.
    pub answers: Vec<Answer>,
    /// Places that are not padding.
    pub tokens: usize,
    /// Places whose target counts.
    pub target_tokens: usize,
}

/// What a loss asks for beside the trainable tokens.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Asked {
    /// The prompts of chosen answers.
    pub prompts: bool,
    /// The teacher's distributions, with this share; the rest is the token's own.
    pub teacher: Option<f64>,
}

/// Makes the batches of each epoch, the same from the same options on every platform.
#[derive(Debug, Clone)]
pub struct Batcher {
    dataset: Arc<Dataset>,
    options: BatchOptions,
}

impl Batcher {
    /// A batcher over a data set.
    ///
    /// # Errors
    /// As [`BatchOptions::validate`]; [`Error::Option`] when an example does not fit a row of `max_seq_length`.
    pub fn new(dataset: Arc<Dataset>, options: BatchOptions) -> Result<Self> {
        options.validate()?;
        let places = |index| dataset.length(index).saturating_sub(1);
        if let Some(index) =
            (0..dataset.len()).find(|index| places(*index) > options.max_seq_length)
        {
            return Err(Error::option(
                "max_seq_length",
                format!(
                    "is {}, but example {index} has {} tokens; build the data set with the same limit",
                    options.max_seq_length,
                    dataset.length(index)
                ),
            ));
        }
        Ok(Self { dataset, options })
    }

    /// How the examples become batches.
    pub fn options(&self) -> &BatchOptions {
        &self.options
    }

    /// The data set.
    pub fn dataset(&self) -> &Arc<Dataset> {
        &self.dataset
    }

    /// The batches of an epoch. Every example is in exactly one of them; of sources with weights, as many of each
    /// source as its share of the data set's number of examples, which go on from epoch to epoch.
    ///
    /// Packed: the examples in random order, each into the first open row with room. Otherwise: the examples by length,
    /// those of the same length in random order, cut into batches, and the batches in random order. The random numbers
    /// are a [`SplitMix64`] stream of the seed and the epoch.
    pub fn epoch(&self, epoch: usize) -> Vec<BatchPlan> {
        let mut random = SplitMix64::stream(self.options.seed, epoch as u64);
        let mut order = self.dataset.drawn(self.options.seed, epoch, self.options.shuffle);
        if self.options.shuffle {
            random.shuffle(&mut order);
        }
        let rows = if self.options.packing {
            self.pack(&order)
        } else {
            order.sort_by_cached_key(|index| self.places_of(*index));
            order.into_iter().map(|index| vec![index]).collect()
        };
        let mut plans: Vec<BatchPlan> = rows
            .chunks(self.options.batch_size)
            .map(|rows| BatchPlan { rows: rows.to_vec() })
            .collect();
        if self.options.shuffle && !self.options.packing {
            random.shuffle(&mut plans);
        }
        plans
    }

    /// How many batches an epoch has. Unless rows are packed, all have as many.
    pub fn batch_count(&self, epoch: usize) -> usize {
        match self.options.packing {
            true => self.epoch(epoch).len(),
            false => self.dataset.drawn_count().div_ceil(self.options.batch_size),
        }
    }

    /// Every example once, by length, without chance.
    pub(crate) fn by_length(&self) -> Vec<BatchPlan> {
        let mut order: Vec<usize> = (0..self.dataset.len()).collect();
        order.sort_by_cached_key(|index| self.places_of(*index));
        let batches = order.chunks(self.options.batch_size);
        batches
            .map(|rows| BatchPlan { rows: rows.iter().map(|row| vec![*row]).collect() })
            .collect()
    }

    /// First fit into rows of `max_seq_length`, the oldest row closing when too many are open.
    fn pack(&self, order: &[usize]) -> Vec<Vec<usize>> {
        let mut rows: Vec<Vec<usize>> = Vec::new();
        let mut open: Vec<(usize, usize)> = Vec::new();
        for &index in order {
            let needed = self.places_of(index);
            match open.iter().position(|(_, room)| *room >= needed) {
                Some(place) => {
                    let (row, room) = &mut open[place];
                    *room -= needed;
                    rows[*row].push(index);
                    if *room == 0 {
                        open.remove(place);
                    }
                }
                None => {
                    if open.len() == OPEN_ROWS {
                        open.remove(0);
                    }
                    open.push((rows.len(), self.options.max_seq_length.saturating_sub(needed)));
                    rows.push(vec![index]);
                }
            }
        }
        rows
    }

    /// The places that an example takes in a row.
    fn places_of(&self, index: usize) -> usize {
        if self.dataset.kind() != SampleKind::Pair {
            return self.dataset.length(index).saturating_sub(1);
        }
        match self.dataset.words(index) {
            Ok(words) => {
                let (chosen, rejected) = (words.0.len() - 1, words.1.len() - 1);
                chosen + rejected - self.shared(words)
            }
            Err(_) => 0,
        }
    }

    /// How many places a pair's sequences have in common: those that read the same tokens and predict none of an answer.
    fn shared(&self, (chosen, rejected): (&[u32], &[u32])) -> usize {
        if !self.options.share_prompts {
            return 0;
        }
        let same = chosen.iter().zip(rejected).take_while(|(a, b)| a == b).count();
        let answer = |words: &[u32]| words.iter().position(|word| store::is_trainable(*word));
        let first = answer(chosen).unwrap_or(0).min(answer(rejected).unwrap_or(0));
        // The place that reads the last common token predicts what follows it, which isn't common.
        same.min(first).saturating_sub(1)
    }

    /// The arrays of a batch. Rows are padded on the right to the longest one, rounded up to a multiple of 8 but not
    /// past `max_seq_length`.
    ///
    /// # Errors
    /// [`Error::Option`] when the plan is not one of this batcher's and has an index that is not in the data set.
    pub fn batch(&self, plan: &BatchPlan) -> Result<Batch> {
        self.batch_with(plan, Asked::default())
    }

    /// [`Self::batch`] with what a loss asks for.
    pub(crate) fn batch_with(&self, plan: &BatchPlan, asked: Asked) -> Result<Batch> {
        let prompts = asked.prompts;
        let teacher = match (asked.teacher, self.dataset.taught()) {
            (None, _) => None,
            (Some(share), Some(taught)) => Some((share, taught)),
            (Some(_), None) => {
                return Err(Error::option("data", "have no teacher, which is to be learned from"));
            }
        };
        let mut rows = Vec::with_capacity(plan.rows.len());
        for examples in &plan.rows {
            let mut row = Row::default();
            for &index in examples {
                let words = self.dataset.words(index)?;
                match self.dataset.kind() {
                    SampleKind::Plain => {
                        let places = row.sequence(words.0);
                        if let Some((_, taught)) = teacher {
                            for (token, place) in (1..).zip(&mut row.places[places]) {
                                place.taught = taught.row_of(index, token);
                            }
                        }
                    }
                    SampleKind::Labelled => {
                        let role = match self.dataset.is_desirable(index) {
                            true => Role::Desirable,
                            false => Role::Undesirable,
                        };
                        row.answer(index, role, words.0, 0..0, false);
                    }
                    SampleKind::Pair => {
                        let shared = row.run(words.0, 0..self.shared(words), prompts);
                        row.answer(index, Role::Chosen, words.0, shared.clone(), prompts);
                        row.answer(index, Role::Rejected, words.1, shared, false);
                    }
                }
            }
            rows.push(row);
        }
        let teacher = teacher.map(|(share, taught)| (share, taught.teacher.as_ref()));
        Ok(self.put_together(rows, teacher))
    }

    /// Batches for KTO's estimate of the KL divergence: of labelled answers, each one's prompt with the nearest answer
    /// before it, or, around the end, after it, that belongs to another prompt. How many there are, and those of them
    /// that are this rank's.
    pub(crate) fn mismatched(
        &self,
        examples: &[usize],
        group: Group<'_>,
    ) -> Result<(usize, Vec<Batch>)> {
        let split = |index: &usize| {
            let words = self.dataset.words(*index)?.0;
            let first = words.iter().position(|word| store::is_trainable(*word));
            Ok(words.split_at(first.unwrap_or(words.len())))
        };
        let texts = examples.iter().map(split).collect::<Result<Vec<_>>>()?;
        let count = texts.len();
        let other = |number: usize| {
            let mut before = (1..count).map(|back| texts[(number + count - back) % count]);
            before.find(|(prompt, _)| *prompt != texts[number].0)
        };
        let pairs: Vec<_> = (0..count)
            .filter_map(|number| Some((examples[number], texts[number].0, other(number)?.1)))
            .collect();
        let mut rows = Vec::with_capacity(pairs.len());
        for (index, prompt, answer) in group.share(&pairs) {
            let mut words = [prompt, answer].concat();
            words.truncate(self.options.max_seq_length);
            let mut row = Row::default();
            row.answer(index, Role::Undesirable, &words, 0..0, false);
            rows.push(row);
        }
        // Batches are those of all ranks, of which each reads its part at a time.
        let most = self.options.batch_size.div_ceil(group.size());
        let mut batches = Vec::new();
        while !rows.is_empty() {
            let rest = rows.split_off(most.min(rows.len()));
            batches.push(self.put_together(std::mem::replace(&mut rows, rest), None));
        }
        Ok((pairs.len(), batches))
    }

    /// Rows of one length, with the distributions of a teacher that has this share.
    fn put_together(&self, rows: Vec<Row>, teacher: Option<(f64, &Teacher)>) -> Batch {
        let padded = |longest: usize| {
            longest.next_multiple_of(LENGTH_STEP).min(self.options.max_seq_length).max(longest)
        };
        let length = padded(rows.iter().map(|row| row.places.len()).max().unwrap_or(0));
        let shares = rows.iter().any(|row| row.sequences.iter().any(|runs| runs.len() > 1));
        let apart = |row: &Row| row.sequences.iter().flatten().map(Range::len).sum::<usize>();
        let seen = match shares {
            true => padded(rows.iter().map(apart).max().unwrap_or(0)),
            false => length,
        };
        let mut batch = Batch { rows: rows.len(), length, ..Batch::default() };
        let mut distributions = teacher.map(|_| Distributions::default());
        let mut beginnings =
            SharedBeginnings { length: seen, source: Vec::new(), result: Vec::new() };
        for (number, row) in rows.into_iter().enumerate() {
            let (first, first_seen) = ((number * length) as u32, (number * seen) as u32);
            for place in &row.places {
                batch.input_ids.push(place.input);
                batch.targets.push(place.target);
                batch.positions.push(place.position);
                batch.target_tokens += usize::from(place.target != IGNORED);
            }
            batch.tokens += row.places.len();
            let end = (number + 1) * length;
            batch.input_ids.resize(end, 0);
            batch.targets.resize(end, IGNORED);
            batch.positions.resize(end, 0);
            if let (Some(distributions), Some((share, teacher))) = (&mut distributions, teacher) {
                for place in &row.places {
                    distributions.push(place, share, teacher);
                }
                distributions.resize(end, share, teacher);
            }
            // A place of a common beginning is read where it stands first. Padding is read from padding, or from
            // anywhere, as nothing comes of it.
            let mut result: Vec<u32> = vec![u32::MAX; length];
            let mut place = 0u32;
            for runs in row.sequences {
                let start = place;
                for from in runs.into_iter().flatten() {
                    batch.first_key.push(start);
                    beginnings.source.push(first + from as u32);
                    if result[from] == u32::MAX {
                        result[from] = first_seen + place;
                    }
                    place += 1;
                }
            }
            for padding in place..seen as u32 {
                batch.first_key.push(padding);
                beginnings.source.push(first + padding % length as u32);
            }
            let unread = |place: usize, found: u32| match found {
                u32::MAX => first_seen + (place % seen.max(1)) as u32,
                found => found,
            };
            beginnings
                .result
                .extend(result.into_iter().enumerate().map(|(p, found)| unread(p, found)));
            batch.answers.extend(row.answers.into_iter().map(|mut answer| {
                let places = answer.places.iter_mut().chain(&mut answer.prompt);
                places.for_each(|place| *place += first);
                answer
            }));
        }
        batch.shared = shares.then_some(beginnings);
        batch.distributions = distributions;
        batch
    }
}

impl Batch {
    /// The places, in row-major order, whose target counts.
    pub(crate) fn counted_places(&self) -> Vec<u32> {
        let places = (0..).zip(&self.targets);
        places.filter(|(_, target)| **target != IGNORED).map(|(place, _)| place).collect()
    }

    /// What a loss of all tokens is to predict.
    pub fn loss_targets(&self) -> Targets<'_> {
        match &self.distributions {
            None => Targets::new(&self.targets),
            Some(Distributions { tokens, shares, .. }) => {
                Targets { tokens, shares: Some(shares), weights: None }
            }
        }
    }

    /// What the cross entropy of [`Self::loss_targets`] lacks to be the loss; see [`Distributions::offset`].
    pub fn loss_offset(&self) -> f64 {
        self.distributions.as_ref().map_or(0.0, |it| it.offset)
    }
}

impl Distributions {
    /// How many tokens there are at each place: the teacher's, and the place's own unless the teacher has all of it.
    fn width(share: f64, teacher: &Teacher) -> usize {
        teacher.width() + usize::from(share < 1.0)
    }

    /// Adds a place.
    fn push(&mut self, place: &Place, share: f64, teacher: &Teacher) {
        let end = self.tokens.len() + Self::width(share, teacher);
        if let (true, Some(row)) = (place.target != IGNORED, place.taught) {
            let (likeliest, negative_entropy) = teacher.distribution(row);
            self.offset += share * negative_entropy;
            let mut own = (share < 1.0).then_some(1.0 - share);
            if let Some(own) = &mut own {
                let named = likeliest.iter().find(|(token, _)| *token == place.target);
                *own += share * named.map_or(0.0, |(_, probability)| *probability);
            }
            let own = own.map(|own| (place.target, own));
            let others =
                likeliest.into_iter().filter(|(token, _)| own.is_none_or(|own| own.0 != *token));
            let others = others.map(|(token, probability)| (token, share * probability));
            for (token, share) in own.into_iter().chain(others) {
                self.tokens.push(token);
                self.shares.push(share as f32);
            }
        }
        self.tokens.resize(end, IGNORED);
        self.shares.resize(end, 0.0);
    }

    /// Adds padding up to so many places.
    fn resize(&mut self, places: usize, share: f64, teacher: &Teacher) {
        let end = places * Self::width(share, teacher);
        self.tokens.resize(end, IGNORED);
        self.shares.resize(end, 0.0);
    }
}

/// A place of a row.
struct Place {
    input: u32,
    target: u32,
    position: u32,
    /// The teacher's row about the target.
    taught: Option<usize>,
}

/// A row in the making; places are counted from its beginning.
#[derive(Default)]
struct Row {
    places: Vec<Place>,
    /// The places of each sequence, in runs.
    sequences: Vec<Vec<Range<usize>>>,
    answers: Vec<Answer>,
}

impl Row {
    /// Adds the places that read `words[of]` of a sequence, and gives where they stand. Untrainable tokens are predicted
    /// where `all`.
    fn run(&mut self, words: &[u32], of: Range<usize>, all: bool) -> Range<usize> {
        let start = self.places.len();
        let predicted = words.iter().skip(1).copied();
        let pairs = words.iter().copied().zip(predicted).enumerate();
        for (position, (input, target)) in pairs.skip(of.start).take(of.len()) {
            self.places.push(Place {
                input: store::id(input),
                target: if all || store::is_trainable(target) {
                    store::id(target)
                } else {
                    IGNORED
                },
                position: position as u32,
                taught: None,
            });
        }
        start..self.places.len()
    }

    /// Adds a sequence, and gives where it stands.
    fn sequence(&mut self, words: &[u32]) -> Range<usize> {
        let run = self.run(words, 0..words.len().saturating_sub(1), false);
        self.sequences.push(vec![run.clone()]);
        run
    }

    /// Adds a sequence with an answer, whose first places are the run `beginning`, which is there already.
    fn answer(
        &mut self,
        example: usize,
        role: Role,
        words: &[u32],
        beginning: Range<usize>,
        prompts: bool,
    ) {
        let before = beginning.len();
        let run = self.run(words, before..words.len().saturating_sub(1), prompts);
        let mut answer = Answer { example, role, places: Vec::new(), prompt: Vec::new() };
        if prompts {
            answer.prompt.extend(beginning.clone().map(|place| place as u32));
        }
        for (place, target) in run.clone().zip(words.iter().skip(before + 1)) {
            if store::is_trainable(*target) {
                answer.places.push(place as u32);
            } else if prompts {
                answer.prompt.push(place as u32);
            }
        }
        self.answers.push(answer);
        let runs = [beginning, run].into_iter().filter(|run| !run.is_empty());
        self.sequences.push(runs.collect());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::data::{Example, Sample};
    use crate::parallel::Collectives;
    use candle_core::{Device, Tensor};

    /// A data set of prompts and answers of a token each.
    fn labelled(texts: &[(u32, u32)]) -> Arc<Dataset> {
        let answer = |(prompt, answer): (u32, u32)| Sample::Labelled {
            answer: Example { ids: vec![prompt, answer, 9], trainable: vec![false, true, true] },
            desirable: true,
        };
        let samples: Vec<_> = texts.iter().copied().map(answer).collect();
        Arc::new(Dataset::from_samples(&samples).unwrap())
    }

    /// The second of two ranks, which are never asked for anything else.
    #[derive(Debug)]
    struct Second;

    impl Collectives for Second {
        fn rank(&self) -> usize {
            1
        }

        fn size(&self) -> usize {
            2
        }

        fn gather(&self, _: &'static str, _: &[u8]) -> Result<Vec<Vec<u8>>> {
            unreachable!()
        }

        fn sum(&self, _: &'static str, _: &Tensor) -> Result<()> {
            unreachable!()
        }

        fn spread(&self, _: &'static str, _: &Tensor, _: &[Range<usize>]) -> Result<()> {
            unreachable!()
        }

        fn takes(&self, _: &Device) -> bool {
            unreachable!()
        }
    }

    #[test]
    fn a_rank_reads_its_part_of_a_batch_of_mismatched_answers_at_a_time() {
        let texts: Vec<(u32, u32)> = (1..9).map(|prompt| (prompt, prompt + 10)).collect();
        let options = BatchOptions { batch_size: 4, max_seq_length: 8, ..BatchOptions::default() };
        let batcher = Batcher::new(labelled(&texts), options).unwrap();
        let examples: Vec<usize> = (0..texts.len()).collect();
        let rows = |group: Group<'_>| {
            let (count, batches) = batcher.mismatched(&examples, group).unwrap();
            assert_eq!(count, texts.len());
            batches.iter().map(|batch| batch.rows).collect::<Vec<_>>()
        };
        assert_eq!(rows(Group::default()), [4, 4]);
        assert_eq!(rows(Group::new(&Second)), [2, 2]);
    }

    #[test]
    fn a_mismatched_answer_belongs_to_another_prompt() {
        let mismatched = |texts: &[(u32, u32)]| {
            let options = BatchOptions { max_seq_length: 8, ..BatchOptions::default() };
            let batcher = Batcher::new(labelled(texts), options).unwrap();
            let examples: Vec<usize> = (0..texts.len()).collect();
            let (count, batches) = batcher.mismatched(&examples, Group::default()).unwrap();
            let answers = batches.iter().flat_map(|batch| {
                batch.answers.iter().map(|answer| {
                    let first = answer.places[0] as usize;
                    (batch.input_ids[first], batch.targets[first])
                })
            });
            let answers: Vec<_> = answers.collect();
            assert_eq!(answers.len(), count);
            answers
        };
        assert_eq!(mismatched(&[(1, 5), (2, 6), (3, 7)]), [(1, 7), (2, 5), (3, 6)]);
        // The answers of two pairs, and of one prompt alone.
        let pairs = [(1, 5), (1, 6), (2, 7), (2, 8)];
        assert_eq!(mismatched(&pairs), [(1, 8), (1, 8), (2, 6), (2, 6)]);
        assert_eq!(mismatched(&[(1, 5), (1, 6)]), []);
    }
}
