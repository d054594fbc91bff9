//! Passes that read one more token of each text, recorded on the device: the host can't launch their many short
//! kernels as fast as they run.

use super::{Next, PagedCache, Ragged, Stretch, Updates};
use crate::adapter::{Adapter, AdapterVersion};
use crate::model::Model;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use metal_candle_kernels::recording::Recording;
use std::sync::{Arc, Weak};

/// Tokens whose keys an item of attention's work has. A text has room for as many at least, and parts of so few need not be
/// put together.
const RANGE: usize = 256;
/// Recordings that are kept.
const MOST: usize = 48;

/// Passes that were recorded, the last used at the end. They have one memory, that of the one with the most rows.
#[derive(Default)]
pub(super) struct Recordings {
    recordings: Vec<(Shape, Recording)>,
    /// What was read last: worth recording when it comes again.
    last: Option<Shape>,
    /// What cannot be recorded.
    refused: Vec<Shape>,
    runs: u64,
    is_off: bool,
    /// The host has a part in the choice of more rows' experts.
    most_rows: Option<usize>,
}

/// What a recording is made for.
#[derive(Clone, PartialEq)]
struct Shape {
    rows: usize,
    room: usize,
    adapters: Adapters,
}

/// The adapters of its texts.
#[derive(Clone)]
enum Adapters {
    /// The same for all, or none.
    Same(Option<AdapterVersion>),
    /// Any of those that were laid out.
    Any(Weak<Updates>),
}

impl PartialEq for Adapters {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Same(a), Self::Same(b)) => a == b,
            (Self::Any(a), Self::Any(b)) => a.ptr_eq(b),
            _ => false,
        }
    }
}

impl Adapters {
    /// Those of the texts; `None` where a recording cannot have them.
    fn of(stretches: &[Stretch], model: &Model, cache: &PagedCache) -> Result<Option<Self>> {
        let mut adapters: Vec<Option<&Arc<Adapter>>> = Vec::new();
        for Stretch { adapter, .. } in stretches {
            if !adapters.iter().any(|known| known.map(Arc::as_ptr) == adapter.map(Arc::as_ptr)) {
                adapters.push(*adapter);
            }
        }
        if let [adapter] = adapters[..]
            && !(cache.batch_invariant && adapter.is_some())
        {
            // Weights that are trained are converted whenever they are read, a model's size of memory.
            let is_possible = adapter.is_none_or(|adapter| !adapter.is_full());
            return Ok(is_possible.then(|| Self::Same(adapter.map(AdapterVersion::of))));
        }
        let adapters: Vec<_> = adapters.into_iter().flatten().collect();
        let updates = cache.updates.of(&adapters, model)?;
        Ok(updates.are_all_of(&adapters).then(|| Self::Any(Arc::downgrade(&updates))))
    }

    /// Whether they are still there, as they were.
    fn is_current(&self) -> bool {
        match self {
            Self::Same(adapter) => adapter.as_ref().is_none_or(AdapterVersion::is_current),
            Self::Any(updates) => updates.strong_count() > 0,
        }
    }
}

impl Shape {
    /// For these stretches, whose longest text has `total` tokens; `None` where a recording is of no use.
    fn of(
        stretches: &[Stretch],
        total: usize,
        model: &Model,
        cache: &PagedCache,
    ) -> Result<Option<Shape>> {
        let is_next = |stretch: &Stretch| stretch.logits == 1 && stretch.tokens.len() == 1;
        let room = total.next_power_of_two().max(RANGE);
        if !stretches.iter().all(is_next) || model.ropes_change(total, room) {
            return Ok(None);
        }
        let rows = match stretches.len() {
            rows @ ..=8 => rows.next_power_of_two(),
            rows @ ..=64 => rows.next_multiple_of(8),
            rows @ ..=256 => rows.next_multiple_of(16),
            rows => rows.next_multiple_of(32),
        };
        // A recording goes through the ranges that the longest text may have, of each text.
        let ranges = |keys: usize| keys.div_ceil(RANGE);
        let needed: usize = stretches.iter().map(|stretch| ranges(stretch.start + 1)).sum();
        if rows * ranges(room) > (4 * needed).max(1024) {
            return Ok(None);
        }
        let adapters = Adapters::of(stretches, model, cache)?;
        Ok(adapters.map(|adapters| Shape { rows, room, adapters }))
    }

    /// What the texts are, as numbers that a recording of this shape reads.
    fn next(&self, stretches: &[Stretch], cache: &PagedCache, device: &Device) -> Result<Next> {
        let updates = match &self.adapters {
            Adapters::Same(_) => None,
            Adapters::Any(updates) => Some(updates.upgrade().ok_or_else(|| {
                Error::option("adapters", "are no longer those that were laid out")
            })?),
        };
        Next::new(stretches, [self.rows, self.room], updates.as_ref(), cache, device)
    }
}

/// What a recording gave for the stretches.
fn logits_of(recording: &Recording, stretches: &[Stretch]) -> Result<Tensor> {
    Ok(recording.output().narrow(0, 0, stretches.len())?)
}

impl Recordings {
    /// Forgets them, and makes none any more.
    pub fn stop(&mut self) {
        *self = Self { is_off: true, runs: self.runs, ..Self::default() };
    }

    /// How many passes were repeated.
    pub fn runs(&self) -> u64 {
        self.runs
    }

    /// What [`Model::next_logits`] gives for the stretches, if that can be recorded and is worth it. The next pass
    /// overwrites it.
    pub fn read(
        &mut self,
        stretches: &[Stretch],
        total: usize,
        model: &Model,
        cache: &PagedCache,
    ) -> Result<Option<Tensor>> {
        if self.is_off || !Recording::is_supported(model.device()) || model.is_away() {
            return Ok(None);
        }
        let most = self.most_rows(model, cache);
        let shape = Shape::of(stretches, total, model, cache)?.filter(|shape| shape.rows <= most);
        // Recordings hold what adapters that are gone were laid out as.
        self.recordings.retain(|(other, _)| other.adapters.is_current());
        let again = shape.is_some() && self.last == shape;
        self.last.clone_from(&shape);
        let Some(shape) = shape else { return Ok(None) };
        if let Some(logits) = self.run(&shape, stretches, cache, None)? {
            return Ok(Some(logits));
        }
        if !again || self.refused.contains(&shape) {
            return Ok(None);
        }
        let recording = self.record(shape, stretches, model, cache)?;
        recording.map(|(_, recording)| logits_of(recording, stretches)).transpose()
    }

    /// As [`Self::read`], for stretches whose `tokens` the device will know: repeats a pass that was recorded, or launches one
    /// that isn't worth it. [`Self::read`] has those first that are.
    pub fn read_ahead(
        &mut self,
        stretches: &[Stretch],
        total: usize,
        tokens: &Tensor,
        model: &Model,
        cache: &PagedCache,
    ) -> Result<Option<Tensor>> {
        let most = self.most_rows(model, cache);
        if self.is_off || model.is_away() || stretches.len() > most {
            return Ok(None);
        }
        self.recordings.retain(|(other, _)| other.adapters.is_current());
        let shape = Shape::of(stretches, total, model, cache)?.filter(|shape| shape.rows <= most);
        let Some(shape) = shape else {
            if Adapters::of(stretches, model, cache)?.is_none() {
                return Ok(None);
            }
            self.last = None;
            let ragged = Ragged::new(stretches, total, cache, model.device())?.reading(tokens)?;
            return Ok(Some(model.next_logits(&ragged, cache)?));
        };
        let logits = self.run(&shape, stretches, cache, Some(tokens))?;
        if logits.is_some() {
            self.last = Some(shape);
        }
        Ok(logits)
    }

    /// Rows that a pass may have in which the host has no part.
    fn most_rows(&mut self, model: &Model, cache: &PagedCache) -> usize {
        *self.most_rows.get_or_insert_with(|| match model.tokens_without_host() {
            None => usize::MAX,
            Some(_) if cache.batch_invariant => 0,
            Some(most) => most,
        })
    }

    /// Repeats the pass of this shape, if it was recorded.
    fn run(
        &mut self,
        shape: &Shape,
        stretches: &[Stretch],
        cache: &PagedCache,
        tokens: Option<&Tensor>,
    ) -> Result<Option<Tensor>> {
        let known = self.recordings.iter().position(|(other, _)| other == shape);
        let Some(place) = known else { return Ok(None) };
        // The host reads these numbers alone.
        let next = shape.next(stretches, cache, &Device::Cpu)?;
        // The last used stands last.
        self.recordings[place..].rotate_left(1);
        let Some((_, recording)) = self.recordings.last_mut() else { return Ok(None) };
        match tokens {
            None => recording.run(next.inputs())?,
            Some(tokens) => recording.run_after(tokens, next.inputs())?,
        }
        self.runs += 1;
        Ok(Some(logits_of(recording, stretches)?))
    }

    fn record(
        &mut self,
        shape: Shape,
        stretches: &[Stretch],
        model: &Model,
        cache: &PagedCache,
    ) -> Result<Option<&(Shape, Recording)>> {
        let next = shape.next(stretches, cache, model.device())?;
        self.refused.retain(|other| other.adapters.is_current());
        if self.recordings.len() >= MOST {
            self.recordings.remove(0);
        }
        let largest = self.recordings.iter().max_by_key(|(other, _)| other.rows);
        let work = |inputs: &Tensor| model.next_logits_of(inputs, &next, cache);
        let recording = match largest {
            Some((other, recording)) if other.rows >= shape.rows => {
                Recording::in_memory_of(recording, model.device(), next.inputs(), work)
            }
            _ => {
                // Theirs would be memory beside that of this one, where they could have it together.
                self.recordings.clear();
                Recording::new(model.device(), next.inputs(), work)
            }
        };
        match recording {
            Ok(recording) => {
                self.recordings.push((shape, recording));
                Ok(self.recordings.last())
            }
            // Other ranks have made other sums than the usual way would make again.
            Err(error) if model.rank.is_some() => Err(error),
            // As with operations that the host has a part in; what else is wrong, the usual way tells.
            Err(error) => {
                tracing::debug!("a pass of {} rows cannot be recorded: {error}", shape.rows);
                self.refused.push(shape);
                Ok(None)
            }
        }
    }
}
