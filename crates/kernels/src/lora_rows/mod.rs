//! Low-rank adapters (LoRA, Hu et al. 2021, <https://arxiv.org/abs/2106.09685>) of a batch whose rows have different
//! ones, added to what the frozen weights gave (as in Punica, Chen et al. 2023, <https://arxiv.org/abs/2310.18547>):
//!
//! ```text
//! y[n] += s·(x[n]·A)·B        A, B and s are those of row n's adapter
//! ```
//!
//! Ranks may differ from adapter to adapter, and rows without an adapter stay as they are. Adapters are laid out once
//! ([`Factors`], [`Adapters`]), the rows of a batch once a pass ([`Rows`]), and all layers share them.
//!
//! Sums are made in f32 (f64 for f64), in an order that follows from the shape of a layer and the rank of a row's
//! adapter alone, so a row gets the same bits whatever other rows there are.

mod cpu;
#[cfg(feature = "cuda")]
mod cuda;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
mod metal;
#[cfg(test)]
mod tests;

use crate::backend::cpu::{collapsed_rows, dispatch};
use crate::backend::{
    dtype_of_sums, on_gpu, require_dtype, require_numbers, require_rank, require_shape,
    require_together, rows_and_columns,
};
use crate::copy;
use candle_core::{DType, Device, Result, Tensor, bail};
use std::ops::Range;
use std::sync::Arc;

const OPERATION: &str = "lora_rows";

/// The low-rank matrices of one adapter for one layer, as the kernels read them.
#[derive(Debug)]
pub struct Factors {
    /// A and B. On CUDA transposed, `(padded rank, in)` and `(out, padded rank)`, in the dtype of the activations;
    /// elsewhere `(in, rank)` and `(rank, out)`, in the type of the sums.
    a: Tensor,
    b: Tensor,
    scale: f64,
    dtype: DType,
    inner: usize,
    outer: usize,
    rank: usize,
}

/// What ranks are filled up to on CUDA, with zeros, so that rows of B begin at multiples of 16 bytes.
const RANKS: usize = 8;

impl Factors {
    /// Lays out A `(in, rank)` and B `(rank, out)`, of any float dtypes, for activations of `dtype`; `scale` is what
    /// their product is multiplied by. On CUDA these are copies in that dtype, to which f32 is rounded; elsewhere f32
    /// that is contiguous isn't copied.
    ///
    /// # Errors
    /// When the shapes don't fit each other, a dtype isn't a float, the tensors aren't on one device, or there is no
    /// memory.
    pub fn new(a: &Tensor, b: &Tensor, scale: f64, dtype: DType) -> Result<Factors> {
        require_together(OPERATION, &[a, b])?;
        require_rank(OPERATION, "A", a, 2, "(in, rank)")?;
        let (inner, rank) = a.dims2()?;
        require_rank(OPERATION, "B", b, 2, "(rank, out)")?;
        let outer = b.dim(1)?;
        require_shape(OPERATION, "B", b, &[rank, outer])?;
        if !dtype.is_float() {
            bail!("metal-candle-kernels: {OPERATION}: found {dtype:?} activations, expected floats")
        }
        let (a, b) = if a.device().is_cuda() {
            let padded = rank.next_multiple_of(RANKS);
            let filled_up = |tensor: &Tensor, shape: (usize, usize), dim: usize| {
                let tensor = copy::cast(&tensor.t()?.contiguous()?, dtype)?;
                if rank == padded || tensor.elem_count() == 0 {
                    return Ok(tensor);
                }
                let whole = Tensor::zeros(shape, dtype, a.device())?;
                copy::write(&whole, &tensor, dim, 0)?;
                Ok::<_, candle_core::Error>(whole)
            };
            (filled_up(a, (padded, inner), 0)?, filled_up(b, (outer, padded), 1)?)
        } else {
            let sums = dtype_of_sums(dtype);
            let laid_out = |tensor: &Tensor| copy::cast(&tensor.contiguous()?, sums);
            (laid_out(a)?, laid_out(b)?)
        };
        Ok(Factors { a, b, scale, dtype, inner, outer, rank })
    }
}

/// What is known of a layer: 0 ranks where no adapter has it.
#[derive(Clone, Copy, Debug, Default)]
struct LayerSizes {
    inner: usize,
    outer: usize,
    most_rank: usize,
}

/// Adapters that rows of batches may have, for all layers. What they are made of stays in memory as long as this.
#[derive(Debug)]
pub struct Adapters {
    /// Of layer `l` and adapter `i` at `l·count + i`.
    factors: Vec<Option<Arc<Factors>>>,
    count: usize,
    layers: Vec<LayerSizes>,
    dtype: DType,
    /// Where CUDA finds the factors, of which it reads addresses, ranks and scales.
    #[cfg(feature = "cuda")]
    table: Option<Tensor>,
}

impl Adapters {
    /// `adapters[i][l]` are the factors of adapter `i` for layer `l`, where it has some, all laid out for activations
    /// of `dtype` on `device`.
    ///
    /// # Errors
    /// When adapters have different numbers of layers, or a layer different shapes, or factors were laid out for
    /// another dtype or device.
    pub fn new(
        adapters: &[Vec<Option<Arc<Factors>>>],
        dtype: DType,
        device: &Device,
    ) -> Result<Adapters> {
        let layer_count = adapters.first().map_or(0, Vec::len);
        let mut layers = vec![LayerSizes::default(); layer_count];
        let mut factors = vec![None; layer_count * adapters.len()];
        for (index, adapter) in adapters.iter().enumerate() {
            if adapter.len() != layer_count {
                bail!(
                    "metal-candle-kernels: {OPERATION}: adapter {index} has {} layers, expected {layer_count}",
                    adapter.len()
                )
            }
            for (place, (layer, found)) in layers.iter_mut().zip(adapter).enumerate() {
                let Some(found) = found else { continue };
                let sizes = LayerSizes {
                    inner: found.inner,
                    outer: found.outer,
                    most_rank: found.rank.max(layer.most_rank),
                };
                let alike = (layer.inner, layer.outer) == (sizes.inner, sizes.outer);
                if layer.most_rank > 0 && !alike {
                    bail!(
                        "metal-candle-kernels: {OPERATION}: adapter {index} is for a layer {place} of {} by {}, expected {} by {} as others have it",
                        sizes.outer,
                        sizes.inner,
                        layer.outer,
                        layer.inner
                    )
                }
                if found.dtype != dtype || !found.a.device().same_device(device) {
                    bail!(
                        "metal-candle-kernels: {OPERATION}: adapter {index} was laid out for {:?} on {:?}, expected {dtype:?} on {:?}",
                        found.dtype,
                        found.a.device().location(),
                        device.location()
                    )
                }
                if found.rank > 0 {
                    *layer = sizes;
                    factors[place * adapters.len() + index] = Some(found.clone());
                }
            }
        }
        #[cfg(feature = "cuda")]
        let table = match device.is_cuda() && !factors.is_empty() {
            true => Some(cuda::table(&factors, device)?),
            false => None,
        };
        Ok(Adapters {
            factors,
            count: adapters.len(),
            layers,
            dtype,
            #[cfg(feature = "cuda")]
            table,
        })
    }

    /// The factors of an adapter for a layer.
    fn of(&self, layer: usize, adapter: usize) -> Option<&Factors> {
        self.factors[layer * self.count..][..self.count].get(adapter)?.as_deref()
    }
}

/// The rows of one adapter.
#[derive(Clone, Debug)]
struct Segment {
    adapter: usize,
    /// Where they are in the order of rows by adapter.
    places: Range<usize>,
}

/// Some rows of a segment, which a block of a GPU takes at once.
const ITEM_ROWS: usize = 16;
/// Numbers of an item: its first place in the order, how many rows, the segment, and the adapter.
const ITEM_NUMBERS: usize = 4;
/// Counts that the numbers begin with: items, and rows that have an adapter.
const COUNTS: usize = 2;

/// Where the numbers of a batch are.
#[derive(Clone, Copy, Debug)]
struct Plan {
    /// The rows in the order of their adapters, and the adapter of each; there is room for so many.
    order: usize,
    adapters: usize,
    places: usize,
    /// The items, which have the rest.
    items: usize,
}

/// Which adapter each row of a batch has: made once a pass, for all layers.
#[derive(Debug)]
pub struct Rows {
    count: usize,
    order: Vec<u32>,
    segments: Vec<Segment>,
    /// How many adapters there are at least.
    adapters: usize,
    plan: Plan,
    numbers: Vec<u32>,
    /// The same on the device.
    uploaded: Tensor,
}

impl Rows {
    /// The adapter of each row, as an index of [`Adapters`].
    ///
    /// # Errors
    /// When there are more than 2³¹ rows, or the device has no memory.
    pub fn new(adapters: &[Option<usize>], device: &Device) -> Result<Rows> {
        Self::plan(adapters, None, device)
    }

    /// The same with room for as many rows to have any of `count` adapters. The numbers of batches with as many rows
    /// and one room may take each other's place: see [`Rows::numbers`].
    ///
    /// # Errors
    /// Like [`Rows::new`], and when a row has an adapter beyond the count.
    pub fn with_room(adapters: &[Option<usize>], count: usize, device: &Device) -> Result<Rows> {
        if let Some(adapter) = adapters.iter().flatten().find(|adapter| **adapter >= count) {
            bail!(
                "metal-candle-kernels: {OPERATION}: a row has adapter {adapter}, expected less than {count}"
            )
        }
        Self::plan(adapters, Some(count), device)
    }

    fn plan(adapters: &[Option<usize>], room: Option<usize>, device: &Device) -> Result<Rows> {
        let count = adapters.len();
        let most = adapters.iter().flatten().max().copied().unwrap_or(0).max(count);
        if i32::try_from(most).is_err() {
            bail!(
                "metal-candle-kernels: {OPERATION}: {most} rows or adapters are too many, expected less than 2^31"
            )
        }
        let mut order: Vec<u32> = (0..count as u32).collect();
        order.retain(|row| adapters[*row as usize].is_some());
        order.sort_by_key(|row| adapters[*row as usize]);
        let of_place = |place: usize| adapters[order[place] as usize].unwrap_or_default();
        let mut segments: Vec<Segment> = Vec::new();
        for place in 0..order.len() {
            match segments.last_mut() {
                Some(segment) if segment.adapter == of_place(place) => segment.places.end += 1,
                _ => segments.push(Segment { adapter: of_place(place), places: place..place + 1 }),
            }
        }
        let mut items = Vec::new();
        for (index, Segment { adapter, places }) in segments.iter().enumerate() {
            for first in places.clone().step_by(ITEM_ROWS) {
                let rows = ITEM_ROWS.min(places.end - first);
                items.push([first as u32, rows as u32, index as u32, *adapter as u32]);
            }
        }
        let (places, item_room) = match room {
            None => (order.len(), items.len()),
            // A segment ends with an item that isn't full.
            Some(adapters) => (count, count.min(adapters + count / ITEM_ROWS)),
        };
        let first_item = COUNTS + 2 * places;
        let plan = Plan { order: COUNTS, adapters: COUNTS + places, places, items: first_item };
        let mut numbers = vec![0; first_item + ITEM_NUMBERS * item_room];
        numbers[..COUNTS].copy_from_slice(&[items.len() as u32, order.len() as u32]);
        numbers[plan.order..][..order.len()].copy_from_slice(&order);
        for (place, number) in numbers[plan.adapters..][..order.len()].iter_mut().enumerate() {
            *number = of_place(place) as u32;
        }
        let items = items.as_flattened();
        numbers[plan.items..][..items.len()].copy_from_slice(items);
        let known = segments.iter().map(|segment| segment.adapter + 1).max().unwrap_or(0);
        let uploaded = Tensor::from_slice(&numbers, numbers.len(), device)?;
        let adapters = room.unwrap_or(known);
        Ok(Rows { count, order, segments, adapters, plan, numbers, uploaded })
    }

    /// What a GPU reads of the batch.
    ///
    /// They may be the inputs of a [`Recording`](crate::recording::Recording), whose work makes the same rows read
    /// them there with [`Rows::reading`], and which then runs on the numbers of other batches that have as many rows
    /// and the same room. A recording stays with the [`Adapters`] that it was made with.
    pub fn numbers(&self) -> &[u32] {
        &self.numbers
    }

    /// The same rows, of which a GPU reads the numbers `(count)` u32 that are given here, contiguous, and written by
    /// the host, or by other work than what comes just before [`add_updates`]. On the CPU they stay what they are.
    ///
    /// # Errors
    /// When there are more or fewer, they are no u32, not contiguous, or on another device.
    pub fn reading(&self, numbers: &Tensor) -> Result<Rows> {
        require_numbers(OPERATION, &self.uploaded, numbers)?;
        Ok(Rows {
            order: self.order.clone(),
            segments: self.segments.clone(),
            numbers: self.numbers.clone(),
            uploaded: numbers.clone(),
            ..*self
        })
    }
}

/// A layer of a call: its sizes, its place among the adapters' layers, and its y.
#[derive(Clone, Copy)]
struct Target<'a> {
    layer: usize,
    sizes: LayerSizes,
    y: &'a Tensor,
}

/// Adds the updates of the rows' adapters to the results of some layers that read the same `x` `(.., in)`, in place.
/// `layers` are their places in `adapters`, and what their frozen weights gave, `y` `(.., out)` in the dtype of `x`: as
/// many rows as `rows` has, each row contiguous and all at one distance from each other.
///
/// On CUDA, f16 and bf16 are multiplied by tensor cores where sizes and distances of rows are multiples of 8 and they
/// begin at multiples of 16 bytes; what `x·A` gives has 16 bits or more there. It is two launches, whatever
/// the number of adapters, for each four layers that are so, and two for each four that aren't.
///
/// # Errors
/// When a shape or dtype doesn't fit, rows don't lie so, a layer or a row's adapter isn't among the adapters, or not
/// all is on one device.
pub fn add_updates(
    x: &Tensor,
    layers: &[(usize, &Tensor)],
    adapters: &Adapters,
    rows: &Rows,
) -> Result<()> {
    let (count, inner) = rows_and_columns(OPERATION, "x", x)?;
    require_together(OPERATION, &[x, &rows.uploaded])?;
    require_dtype(OPERATION, "x", x, adapters.dtype)?;
    if count != rows.count {
        bail!("metal-candle-kernels: {OPERATION}: x has {count} rows, expected {}", rows.count)
    }
    if rows.adapters > adapters.count {
        bail!(
            "metal-candle-kernels: {OPERATION}: rows have {} adapters, of which there are {}",
            rows.adapters,
            adapters.count
        )
    }
    let mut targets = Vec::with_capacity(layers.len());
    for (layer, y) in layers.iter().copied() {
        require_together(OPERATION, &[x, y])?;
        require_dtype(OPERATION, "y", y, x.dtype())?;
        let Some(sizes) = adapters.layers.get(layer).copied() else {
            if adapters.count == 0 {
                continue;
            }
            bail!(
                "metal-candle-kernels: {OPERATION}: there is no layer {layer}, expected less than {}",
                adapters.layers.len()
            )
        };
        if sizes.most_rank == 0 {
            continue;
        }
        if (count, sizes.outer) != rows_and_columns(OPERATION, "y", y)? || sizes.inner != inner {
            bail!(
                "metal-candle-kernels: {OPERATION}: found x {:?} and y {:?} for layer {layer}, expected {count} rows of {} and of {}",
                x.dims(),
                y.dims(),
                sizes.inner,
                sizes.outer
            )
        }
        if collapsed_rows(y.layout()).is_none() {
            bail!(
                "metal-candle-kernels: {OPERATION}: the rows of y don't lie at one distance from each other"
            )
        }
        if y.elem_count() > 0 {
            targets.push(Target { layer, sizes, y });
        }
    }
    if targets.is_empty() || rows.plan.places == 0 {
        return Ok(());
    }
    on_gpu!(x, gpu => gpu::add_updates(x, inner, &targets, adapters, rows));
    dispatch!(OPERATION, x.dtype(), T => cpu::add_updates::<T>(x, inner, &targets, adapters, rows))
}
