//! Passes that read one more token of each text, recorded on the device: the host can't launch their many short
//! kernels as fast as they run.

use crate::Result;
use crate::adapter::AdapterVersion;
use crate::model::Model;
use crate::pass::{Next, PagedCache, Stretch};
use candle_core::{Device, Tensor};
use metal_candle_kernels::recording::Recording;
use std::sync::Arc;

/// Tokens that a text has room for at least, and those whose keys a part of attention's work has.
const LEAST_ROOM: usize = 512;
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
}

/// What a recording is made for.
#[derive(Clone, PartialEq)]
struct Shape {
    rows: usize,
    room: usize,
    adapter: Option<AdapterVersion>,
}

impl Shape {
    /// For these stretches, whose longest text has `total` tokens; `None` where a recording is of no use.
    fn of(stretches: &[Stretch], total: usize, model: &Model) -> Option<Shape> {
        let adapter = stretches.first()?.adapter;
        let alike = stretches.iter().all(|stretch| {
            let same = stretch.adapter.map(Arc::as_ptr) == adapter.map(Arc::as_ptr);
            same && stretch.logits == 1 && stretch.tokens.len() == 1
        });
        let room = total.next_power_of_two().max(LEAST_ROOM);
        // Weights that are trained are converted whenever they are read, a model's size of memory.
        if !alike || adapter.is_some_and(|it| it.is_full()) || model.ropes_change(total, room) {
            return None;
        }
        let rows = match stretches.len() {
            rows @ ..=8 => rows.next_power_of_two(),
            rows @ ..=64 => rows.next_multiple_of(8),
            rows => rows.next_multiple_of(32),
        };
        // A recording goes through the ranges that the longest text may have, of each text.
        let ranges = |keys: usize| keys.div_ceil(RANGE);
        let needed: usize = stretches.iter().map(|stretch| ranges(stretch.start + 1)).sum();
        if rows * ranges(room) > (4 * needed).max(1024) {
            return None;
        }
        Some(Shape { rows, room, adapter: adapter.map(AdapterVersion::of) })
    }

    /// Whether its adapter is still there, as it was.
    fn is_current(&self) -> bool {
        self.adapter.as_ref().is_none_or(AdapterVersion::is_current)
    }
}

impl Recordings {
    /// What [`Model::next_logits`] gives for the stretches, if that can be recorded and is worth it. The next pass
    /// overwrites it.
    pub fn read(
        &mut self,
        stretches: &[Stretch],
        total: usize,
        model: &Model,
        cache: &PagedCache,
    ) -> Result<Option<Tensor>> {
        if !Recording::is_supported(model.device()) || model.is_away() {
            return Ok(None);
        }
        let shape = Shape::of(stretches, total, model);
        let again = shape.is_some() && self.last == shape;
        self.last.clone_from(&shape);
        let Some(shape) = shape else { return Ok(None) };
        let known = self.recordings.iter().position(|(other, _)| *other == shape);
        let recording = match known {
            Some(place) => {
                let (shape, mut recording) = self.recordings.remove(place);
                // The host reads these numbers alone.
                let next = Next::new(stretches, [shape.rows, shape.room], cache, &Device::Cpu)?;
                recording.run(next.inputs())?;
                self.recordings.push((shape, recording));
                self.recordings.last()
            }
            None if again && !self.refused.contains(&shape) => {
                self.record(shape, stretches, model, cache)?
            }
            None => None,
        };
        let Some((_, recording)) = recording else { return Ok(None) };
        Ok(Some(recording.output().narrow(0, 0, stretches.len())?))
    }

    fn record(
        &mut self,
        shape: Shape,
        stretches: &[Stretch],
        model: &Model,
        cache: &PagedCache,
    ) -> Result<Option<&(Shape, Recording)>> {
        let adapter = stretches.first().and_then(|stretch| stretch.adapter);
        let next = Next::new(stretches, [shape.rows, shape.room], cache, model.device())?;
        self.recordings.retain(|(other, _)| other.is_current());
        self.refused.retain(Shape::is_current);
        if self.recordings.len() >= MOST {
            self.recordings.remove(0);
        }
        let largest = self.recordings.iter().max_by_key(|(other, _)| other.rows);
        let work = |inputs: &Tensor| model.next_logits_of(inputs, &next, adapter, cache);
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
            // As with operations that the host has a part in; what else is wrong, the usual way tells.
            Err(_) => {
                self.refused.push(shape);
                Ok(None)
            }
        }
    }
}
