//! Parameters of which each of several processes has a part: where every weight of a model is trained, values, gradients
//! and what the optimiser keeps are cut (ZeRO's third stage; Rajbhandari et al., 2019, arXiv:1910.02054).
//!
//! The matrices of a layer, the embedding and the head are a unit each, which is put together for its use in the model's
//! dtype, the next one while one is computed, and whose gradients are added up once they are complete. A process has the
//! same part of each unit; vectors, which are small, it has whole.

use super::{Entry, Parameters};
use crate::autograd::{Parameter, ParameterId};
use crate::model::Shards;
use crate::model::arrivals::{Arrivals, Transfers};
use crate::parallel::Group;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::copy;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Parts and matrices begin at multiples of so many elements.
const ALIGNMENT: usize = 128;

/// What is put together at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum UnitName {
    Embedding,
    Layer(usize),
    Head,
}

/// A unit's place.
#[derive(Debug)]
struct Unit {
    name: UnitName,
    /// Its parameters.
    entries: Range<usize>,
    /// In the buffer of all parameters.
    range: Range<usize>,
    /// Elements of a process's part; what the last ones have beyond the end is zero.
    part: usize,
    /// Where the own part begins in the own buffer.
    start: usize,
}

/// How parameters are cut.
#[derive(Debug)]
pub(crate) struct Partition {
    shards: Arc<dyn Shards>,
    units: Vec<Unit>,
    /// Vectors, in the buffer of all parameters.
    vectors: Range<usize>,
    /// The fingerprint of the model that they are of.
    pub model: u64,
}

impl Partition {
    /// Of these parameters of a model with this fingerprint, matrices before vectors; `unit` says where a matrix belongs.
    ///
    /// # Errors
    /// When the matrices of a unit don't lie together.
    pub fn new(
        entries: &[Entry],
        unit: impl Fn(&Entry) -> Option<UnitName>,
        shards: &Arc<dyn Shards>,
        model: u64,
    ) -> Result<Self> {
        let mut units: Vec<Unit> = Vec::new();
        let end = |entry: &Entry| entry.range().end;
        let matrices = entries.iter().take_while(|entry| entry.shape.rank() >= 2).count();
        for (index, entry) in entries[..matrices].iter().enumerate() {
            let name = unit(entry).ok_or_else(|| {
                Error::Unsupported(format!(
                    "`{}` in parts with several processes, as it belongs to no layer",
                    entry.name
                ))
            })?;
            let is_next = units.last().is_some_and(|last| last.name == name);
            if !is_next && units.iter().any(|other| other.name == name) {
                return Err(Error::option(
                    &entry.name,
                    "lies apart from the other matrices of its layer",
                ));
            }
            if !is_next {
                let (entries, range) = (index..index, entry.offset..entry.offset);
                units.push(Unit { name, entries, range, part: 0, start: 0 });
            }
            if let Some(last) = units.last_mut() {
                (last.entries.end, last.range.end) = (index + 1, end(entry));
            }
        }
        let mut start = 0;
        for unit in &mut units {
            unit.part = unit.range.len().div_ceil(shards.size()).next_multiple_of(ALIGNMENT);
            unit.start = start;
            start += unit.part;
        }
        let vectors = units.last().map_or(0, |last| last.range.end)..entries.last().map_or(0, end);
        Ok(Self { shards: shards.clone(), units, vectors, model })
    }

    /// How many processes have parts.
    pub fn size(&self) -> usize {
        self.shards.size()
    }

    /// The processes.
    pub fn shards(&self) -> &Arc<dyn Shards> {
        &self.shards
    }

    /// Elements of matrices in the own buffer, which come first.
    pub fn matrices(&self) -> usize {
        self.units.last().map_or(0, |last| last.start + last.part)
    }

    /// Elements of the own buffer.
    pub fn len(&self) -> usize {
        self.matrices() + self.vectors.len()
    }

    /// Where a parameter of which this process has all lies in the own buffer; nowhere for one in parts.
    pub fn place(&self, entry: &Entry) -> Option<Range<usize>> {
        let start = entry.offset.checked_sub(self.vectors.start)?;
        let start = self.matrices() + start;
        Some(start..start + entry.shape.elem_count())
    }

    /// The unit of a parameter in parts.
    pub fn unit_of(&self, id: ParameterId) -> Option<usize> {
        self.units.iter().position(|unit| unit.entries.contains(&id.0))
    }

    /// The parameters of a unit.
    pub fn entries(&self, unit: usize) -> Range<usize> {
        self.units[unit].entries.clone()
    }

    /// Where a unit begins in the buffer of all parameters.
    pub fn offset(&self, unit: usize) -> usize {
        self.units[unit].range.start
    }

    /// Elements of a unit that is put together, and where the own part is: in the unit, and in the own buffer.
    pub fn own(&self, unit: usize) -> (usize, Range<usize>, Range<usize>) {
        let Unit { part, start, .. } = self.units[unit];
        let first = self.shards.rank() * part;
        (part * self.size(), first..first + part, start..start + part)
    }

    /// What of `range` of the buffer of all parameters lies where in the own buffer: pairs of ranges.
    fn overlaps(&self, range: &Range<usize>) -> Vec<(Range<usize>, usize)> {
        let rank = self.shards.rank();
        let own = self.units.iter().map(|unit| {
            let first = unit.range.start + rank * unit.part;
            (first.min(unit.range.end)..(first + unit.part).min(unit.range.end), unit.start)
        });
        let own = own.chain([(self.vectors.clone(), self.matrices())]);
        let cut = |(part, start): (Range<usize>, usize)| {
            let both = part.start.max(range.start)..part.end.min(range.end);
            (both.start < both.end).then(|| (both.clone(), start + both.start - part.start))
        };
        own.filter_map(cut).collect()
    }

    /// Writes the own part of `values`, which are those of a contiguous `range` of all parameters, into the own buffer.
    pub fn write(&self, buffer: &Tensor, range: &Range<usize>, values: &Tensor) -> Result<()> {
        for (both, place) in self.overlaps(range) {
            let part = values.narrow(0, both.start - range.start, both.len())?;
            copy::write(buffer, &copy::cast(&part.contiguous()?, buffer.dtype())?, 0, place)?;
        }
        Ok(())
    }

    /// What of the buffer of all parameters lies in the own buffer, and where.
    pub fn held(&self) -> Vec<(Range<usize>, usize)> {
        self.overlaps(&(0..self.vectors.end))
    }

    /// What lies where, in the order of the buffer of all parameters: whose part it is, and where that begins in this
    /// process's own buffer, and how long it is.
    pub fn pieces(&self) -> Vec<(usize, Range<usize>)> {
        let mut pieces = Vec::new();
        for Unit { range, part, start, .. } in &self.units {
            for rank in 0..self.size() {
                let length = range.len().saturating_sub(rank * part).min(*part);
                pieces.push((rank, *start..start + length));
            }
        }
        pieces.push((0, self.matrices()..self.len()));
        pieces
    }
}

/// A flat tensor that a checkpoint has: it is here, or each rank has pieces of it.
#[derive(Debug)]
pub(crate) struct Kept {
    what: &'static str,
    /// Or this rank's pieces, if it has some.
    tensor: Option<Tensor>,
    /// Whose the pieces are, and where in that rank's tensor, in their order.
    pieces: Option<Vec<(usize, Range<usize>)>>,
}

impl Kept {
    /// `what` goes into messages.
    pub fn new(
        what: &'static str,
        tensor: Option<Tensor>,
        pieces: Option<Vec<(usize, Range<usize>)>>,
    ) -> Self {
        Self { what, tensor, pieces }
    }

    /// Puts it together for the first rank, which gets each stretch of its elements in their order, with the place of the
    /// first one, on a device or the host. Where ranks have pieces, all of them call this.
    ///
    /// # Errors
    /// As [`Collectives::spread`](crate::parallel::Collectives::spread), and those of `take`.
    pub fn put_together(
        &self,
        group: Group,
        device: &Device,
        mut take: impl FnMut(usize, &Tensor) -> Result<()>,
    ) -> Result<()> {
        /// Elements that are sent at a time.
        const PIECE: usize = 16 << 20;
        let Some(pieces) = &self.pieces else {
            return match &self.tensor {
                Some(tensor) if group.is_root() => take(0, &tensor.flatten_all()?),
                _ => Ok(()),
            };
        };
        let mut place = 0;
        for (rank, range) in pieces {
            let own = self.tensor.as_ref().filter(|_| *rank == group.rank());
            for start in (range.start..range.end).step_by(PIECE) {
                let length = PIECE.min(range.end - start);
                // By itself, as all that it is a view of would be copied to another device.
                let piece = own.map(|own| own.narrow(0, start, length)?.force_contiguous());
                let mut piece = piece.transpose()?;
                // That of the first rank stays where it is.
                if *rank != 0 {
                    let sent = match piece {
                        Some(piece) => piece.to_device(device)?,
                        None => Tensor::zeros(length, DType::F32, device)?,
                    };
                    let of_rank = |other| if other == *rank { 0..length } else { 0..0 };
                    let parts: Vec<Range<usize>> = (0..group.size()).map(of_rank).collect();
                    group.spread(self.what, &sent, &parts)?;
                    piece = Some(sent);
                }
                if group.is_root() {
                    let missing = || Error::option("checkpoint", "lacks a part that rank 0 has");
                    take(place, &piece.ok_or_else(missing)?)?;
                }
                place += length;
            }
        }
        Ok(())
    }

    /// All of it in the memory of the host, for the first rank; the others get nothing. What is here stays where it is.
    ///
    /// # Errors
    /// As [`Self::put_together`].
    pub fn whole(&self, group: Group, device: &Device) -> Result<Option<Tensor>> {
        let Some(pieces) = &self.pieces else {
            return Ok(self.tensor.clone().filter(|_| group.is_root()));
        };
        let count = pieces.iter().map(|(_, range)| range.len()).sum();
        let mut all = Vec::with_capacity(if group.is_root() { count } else { 0 });
        self.put_together(group, device, |_, piece| {
            all.extend(piece.to_vec1::<f32>()?);
            Ok(())
        })?;
        let whole = || Ok(Tensor::from_vec(all, count, &Device::Cpu)?);
        group.is_root().then(whole).transpose()
    }
}

/// How units come to the device.
#[derive(Debug)]
struct Units {
    partition: Arc<Partition>,
    /// The own parts.
    values: Tensor,
    entries: Vec<Entry>,
    /// In which units are put together.
    dtype: DType,
}

/// A unit that is on its way: the whole, and the part that is given for it.
struct Coming {
    whole: Tensor,
    _part: Tensor,
}

/// The parameters of a unit, put together on the device.
#[derive(Debug)]
pub(crate) struct Whole(BTreeMap<usize, Tensor>);

impl Whole {
    /// One of them.
    pub fn get(&self, id: ParameterId) -> Option<Parameter> {
        self.0.get(&id.0).map(|tensor| Parameter::new(tensor.clone(), id))
    }
}

impl Transfers for Units {
    /// A unit, and of which [`Parameters::generation`].
    type Piece = (usize, u64);
    type Coming = Coming;
    type Here = Whole;

    fn begin(&self, (unit, _): (usize, u64)) -> Result<Coming> {
        let (_, _, own) = self.partition.own(unit);
        let part = copy::cast(&self.values.narrow(0, own.start, own.len())?, self.dtype)?;
        let whole = self.partition.shards.begin(std::slice::from_ref(&part))?.pop();
        let missing = || candle_core::Error::msg("processes gave nothing for a part");
        Ok(Coming { whole: whole.ok_or_else(missing)?, _part: part })
    }

    fn end(&self) -> Result<()> {
        self.partition.shards.end()
    }

    fn unpack(&self, (unit, _): (usize, u64), came: Coming) -> Result<Whole> {
        let offset = self.partition.offset(unit);
        let tensors = self.partition.entries(unit).map(|index| {
            let Entry { shape, offset: start, .. } = &self.entries[index];
            let flat = came.whole.narrow(0, start - offset, shape.elem_count())?;
            let matrix = flat.reshape(shape)?;
            // Kernels want that.
            let is_aligned = (start - offset).is_multiple_of(ALIGNMENT);
            Ok((index, if is_aligned { matrix } else { matrix.copy()? }))
        });
        Ok(Whole(tensors.collect::<Result<_>>()?))
    }
}

/// Puts the units of an adapter's parameters together.
#[derive(Debug)]
pub(crate) struct Gathering(Arrivals<Units>);

impl Gathering {
    /// In `dtype`; `None` for parameters that aren't in parts.
    pub fn new(parameters: &Parameters, dtype: DType) -> Option<Self> {
        let partition = parameters.partition()?.clone();
        let (values, entries) = (parameters.values().clone(), parameters.entries().to_vec());
        Some(Self(Arrivals::new(Units { partition, values, entries, dtype })))
    }

    /// A unit as the parameters are now; `next` begins to come. The head of a model whose head is its embedding is that.
    /// All processes call this in the same order.
    ///
    /// # Errors
    /// As [`Shards::begin`].
    pub fn bring(
        &self,
        unit: UnitName,
        next: Option<UnitName>,
        generation: u64,
    ) -> Result<Arc<Whole>> {
        let units = &self.0.transfers.partition.units;
        let find = |name: UnitName| {
            let of = |name| units.iter().position(|unit| unit.name == name);
            of(name).or_else(|| of(UnitName::Embedding).filter(|_| name == UnitName::Head))
        };
        let found = find(unit)
            .ok_or_else(|| Error::option("adapter", format!("has no parameters of {unit:?}")))?;
        let next = next.and_then(find).map(|next| (next, generation));
        self.0.bring((found, generation), next)
    }
}
