//! The gradients of an adapter's parameters, which whoever trains it owns.

use crate::adapter::{Entry, Parameters, Partition, of_held};
use crate::autograd::{GradientSink, ParameterId, TableGradient};
use crate::model::Shards;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use metal_candle_kernels::{copy, embedding, flat};
use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// One flat f32 buffer in the layout of [`Parameters::values`], to which a backward pass adds.
///
/// Where several processes have a part of each matrix, the gradients of a unit of them are collected whole, and added up
/// over the processes once they are complete, while the backward pass goes on; each adds the sum of its part to its buffer.
/// [`Self::settle`] waits for that.
#[derive(Debug)]
pub struct Gradients {
    buffer: Tensor,
    entries: Vec<Entry>,
    parts: Option<Parts>,
}

/// The gradients of units on their way into the buffer.
#[derive(Debug)]
struct Parts {
    partition: Arc<Partition>,
    under_way: Mutex<UnderWay>,
}

#[derive(Debug, Default)]
struct UnderWay {
    collected: Option<Collected>,
    /// A unit that is being added up, and its gradients.
    summed: Option<(usize, Tensor)>,
}

/// A unit whose gradients come.
#[derive(Debug)]
struct Collected {
    unit: usize,
    /// Whole and flat.
    gradients: Tensor,
    missing: BTreeSet<usize>,
}

impl Gradients {
    /// Zeros for all of the parameters.
    pub fn new(parameters: &Parameters) -> Result<Self> {
        let values = parameters.values();
        let buffer = copy::zeros(values.elem_count(), DType::F32, values.device())?;
        let parts = parameters
            .partition()
            .map(|partition| Parts { partition: partition.clone(), under_way: Mutex::default() });
        Ok(Self { buffer, entries: parameters.entries().to_vec(), parts })
    }

    /// All gradients that this process has, in f32: `(len)`, unless parameters are in parts.
    pub fn buffer(&self) -> &Tensor {
        &self.buffer
    }

    /// What of the buffer is still to be added up over the processes once the passes are over: what isn't in parts.
    pub(super) fn unsummed(&self) -> Range<usize> {
        let start = self.parts.as_ref().map_or(0, |parts| parts.partition.matrices());
        start..self.buffer.elem_count()
    }

    /// Whether the processes have a part each.
    pub(super) fn are_in_parts(&self) -> bool {
        self.parts.is_some()
    }

    /// What lies where in the gradients of all parameters.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// The gradient of the parameter `id`, as a view.
    ///
    /// # Errors
    /// When there is no such parameter, and for a matrix in parts.
    pub fn view(&self, id: ParameterId) -> Result<Tensor> {
        let partition = self.parts.as_ref().map(|parts| &*parts.partition);
        of_held(self.entry(id)?, &self.buffer, partition)
    }

    fn entry(&self, id: ParameterId) -> Result<&Entry> {
        self.entries.get(id.0).ok_or_else(|| {
            Error::option("parameter", format!("{} of {} does not exist", id.0, self.entries.len()))
        })
    }

    /// Sets every gradient to zero.
    pub fn clear(&self) -> Result<()> {
        if let Some(parts) = &self.parts {
            parts.forget()?;
        }
        Ok(flat::fill_zero(&self.buffer)?)
    }

    /// Multiplies what is in the buffer, once all is there.
    pub(super) fn scale(&self, factor: f64) -> Result<()> {
        /// Elements of which there is a copy at a time.
        const PIECE: usize = 1 << 24;
        let len = self.buffer.elem_count();
        for start in (0..len).step_by(PIECE) {
            let piece = self.buffer.narrow(0, start, PIECE.min(len - start))?;
            let copy = piece.force_contiguous()?;
            flat::fill_zero(&piece)?;
            flat::accumulate(&piece, &copy, factor)?;
        }
        Ok(())
    }

    /// Waits until what was collected of matrices in parts is in the buffer. All processes call this at the same place.
    ///
    /// # Errors
    /// [`Error::Rank`] naming a process that is lost.
    pub fn settle(&self) -> Result<()> {
        let Some(parts) = &self.parts else { return Ok(()) };
        let mut under_way = parts.under_way();
        parts.begin_sum(&self.buffer, &mut under_way)?;
        parts.end_sum(&self.buffer, &mut under_way)
    }

    /// Adds a contribution to a parameter: in the buffer, or to what is collected of its unit.
    fn add(&self, id: ParameterId, add: impl FnOnce(&Tensor) -> Result<()>) -> Result<()> {
        let unit =
            self.parts.as_ref().and_then(|parts| Some((parts, parts.partition.unit_of(id)?)));
        match unit {
            None => add(&self.view(id)?),
            Some((parts, unit)) => parts.collect(&self.buffer, unit, (id, self.entry(id)?), add),
        }
    }
}

impl Parts {
    fn under_way(&self) -> MutexGuard<'_, UnderWay> {
        self.under_way.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn shards(&self) -> &dyn Shards {
        &**self.partition.shards()
    }

    /// Adds a contribution to the unit's gradients, and begins to add these up once they are complete. Units come one after
    /// the other, in the same order for all processes.
    fn collect(
        &self,
        buffer: &Tensor,
        unit: usize,
        (id, entry): (ParameterId, &Entry),
        add: impl FnOnce(&Tensor) -> Result<()>,
    ) -> Result<()> {
        let mut under_way = self.under_way();
        if under_way.collected.as_ref().is_some_and(|collected| collected.unit != unit) {
            self.begin_sum(buffer, &mut under_way)?;
        }
        let collected = match &mut under_way.collected {
            Some(collected) => collected,
            none => {
                let (length, ..) = self.partition.own(unit);
                let gradients = Tensor::zeros(length, DType::F32, buffer.device())?;
                let missing = self.partition.entries(unit).collect();
                none.insert(Collected { unit, gradients, missing })
            }
        };
        let start = entry.offset - self.partition.offset(unit);
        let place = collected.gradients.narrow(0, start, entry.shape.elem_count())?;
        add(&place.reshape(entry.shape.clone())?)?;
        collected.missing.remove(&id.0);
        if collected.missing.is_empty() {
            self.begin_sum(buffer, &mut under_way)?;
        }
        Ok(())
    }

    /// Begins to add up what was collected, behind the sum of the unit before.
    fn begin_sum(&self, buffer: &Tensor, under_way: &mut UnderWay) -> Result<()> {
        let Some(Collected { unit, gradients, .. }) = under_way.collected.take() else {
            return Ok(());
        };
        self.end_sum(buffer, under_way)?;
        let (_, gradients) = under_way.summed.insert((unit, gradients));
        self.shards().begin_sum(gradients)
    }

    /// Lets what is left of a pass that failed go.
    fn forget(&self) -> Result<()> {
        let mut under_way = self.under_way();
        under_way.collected = None;
        if under_way.summed.is_some() {
            self.shards().end_sum()?;
        }
        under_way.summed = None;
        Ok(())
    }

    /// Waits for a sum, and adds the own part of it to the buffer.
    fn end_sum(&self, buffer: &Tensor, under_way: &mut UnderWay) -> Result<()> {
        let Some((unit, gradients)) = &under_way.summed else { return Ok(()) };
        // What is still written to stays where it is if this fails.
        self.shards().end_sum()?;
        let (_, of_unit, own) = self.partition.own(*unit);
        let sum = gradients.narrow(0, of_unit.start, of_unit.len())?;
        flat::accumulate(&buffer.narrow(0, own.start, own.len())?, &sum, 1.0)?;
        under_way.summed = None;
        Ok(())
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        if self.forget().is_err() {
            // Somebody may still write there.
            std::mem::forget(self.under_way().summed.take());
        }
    }
}

/// Adds each contribution to the buffer.
impl GradientSink for &Gradients {
    fn accept(&mut self, id: ParameterId, gradient: Tensor) -> Result<()> {
        self.add(id, |place| Ok(flat::accumulate(place, &gradient, 1.0)?))
    }

    fn accept_all(&mut self, gradients: Vec<(ParameterId, Tensor)>) -> Result<()> {
        if self.parts.is_some() {
            return gradients.into_iter().try_for_each(|(id, gradient)| self.accept(id, gradient));
        }
        let places: Vec<Tensor> =
            gradients.iter().map(|(id, _)| self.view(*id)).collect::<Result<_>>()?;
        let gradients = gradients.iter().map(|(_, gradient)| gradient);
        let pairs: Vec<(&Tensor, &Tensor)> = places.iter().zip(gradients).collect();
        Ok(flat::accumulate_all(&pairs, 1.0)?)
    }

    fn accept_rows(&mut self, id: ParameterId, gradient: TableGradient) -> Result<()> {
        self.add(id, |place| Ok(embedding::accumulate(place, &gradient.rows, &gradient.ids)?))
    }
}
