//! Examples to batches: by length, or packed several to a row.
//!
//! An example of n tokens takes n - 1 places of a row: place i reads token i and is to predict token i + 1. In a packed
//! row the examples stand one behind the other; positions start again at 0 with each, and `first_key` tells attention
//! the first place a place may look back to.

use std::sync::Arc;

use super::dataset::{DataOptions, Dataset};
use super::store;
use crate::random::SplitMix64;
use crate::{Error, Result, bounds};
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
}

impl Default for BatchOptions {
    fn default() -> Self {
        Self {
            batch_size: 4,
            max_seq_length: DataOptions::default().max_seq_length,
            packing: false,
            seed: 0,
            shuffle: true,
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

/// A batch: arrays of `(rows, length)`, row-major.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Batch {
    /// Number of rows.
    pub rows: usize,
    /// Places in a row.
    pub length: usize,
    /// The token at each place; 0 in padding.
    pub input_ids: Vec<u32>,
    /// The token to predict at each place, or [`IGNORED`].
    pub targets: Vec<u32>,
    /// The position in its example of each place, from 0; 0 in padding.
    pub positions: Vec<u32>,
    /// The place in its row where the example of each place starts: a place attends to those from there to itself. In
    /// padding, the place itself.
    pub first_key: Vec<u32>,
    /// Places that are not padding.
    pub tokens: usize,
    /// Places whose target counts.
    pub target_tokens: usize,
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
            order.sort_by_key(|index| self.places_of(*index));
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

    fn places_of(&self, index: usize) -> usize {
        self.dataset.length(index).saturating_sub(1)
    }

    /// The arrays of a batch. Rows are padded on the right to the longest one, rounded up to a multiple of 8 but not
    /// past `max_seq_length`.
    ///
    /// # Errors
    /// [`Error::Option`] when the plan is not one of this batcher's and has an index that is not in the data set.
    pub fn batch(&self, plan: &BatchPlan) -> Result<Batch> {
        let words = |row: &Vec<usize>| row.iter().map(|&index| self.dataset.words(index)).collect();
        let rows: Vec<Vec<&[u32]>> = plan.rows.iter().map(words).collect::<Result<_>>()?;
        let used = |row: &Vec<&[u32]>| {
            row.iter().map(|words| words.len().saturating_sub(1)).sum::<usize>()
        };
        let longest = rows.iter().map(used).max().unwrap_or(0);
        let length =
            longest.next_multiple_of(LENGTH_STEP).min(self.options.max_seq_length).max(longest);
        let size = rows.len() * length;
        let mut batch = Batch {
            rows: rows.len(),
            length,
            input_ids: Vec::with_capacity(size),
            targets: Vec::with_capacity(size),
            positions: Vec::with_capacity(size),
            first_key: Vec::with_capacity(size),
            tokens: 0,
            target_tokens: 0,
        };
        for (number, row) in rows.into_iter().enumerate() {
            let mut place = 0;
            for words in row {
                let first = place;
                let predicted = words.iter().skip(1);
                for (position, (&input, &target)) in words.iter().zip(predicted).enumerate() {
                    let trainable = store::is_trainable(target);
                    batch.input_ids.push(store::id(input));
                    batch.targets.push(if trainable { store::id(target) } else { IGNORED });
                    batch.positions.push(position as u32);
                    batch.first_key.push(first as u32);
                    batch.target_tokens += usize::from(trainable);
                    place += 1;
                }
            }
            batch.tokens += place;
            let end = (number + 1) * length;
            batch.input_ids.resize(end, 0);
            batch.targets.resize(end, IGNORED);
            batch.positions.resize(end, 0);
            batch.first_key.extend((place..length).map(|place| place as u32));
        }
        Ok(batch)
    }
}
