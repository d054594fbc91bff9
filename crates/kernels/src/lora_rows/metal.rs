//! Low-rank adapters of rows on Metal, see `kernel.metal`. Buffers are bound one by one there, so a dispatch takes a
//! few adapters.

use super::{Adapters, ITEM_NUMBERS, ITEM_ROWS, OPERATION, Rows, Target};
use crate::backend::cpu::collapsed_rows;
use crate::backend::metal::{Argument, Array, Dispatch, Metal, by_dtype, size};
use candle_core::{DType, Result, Tensor};

/// Adapters of a dispatch.
const BOUND: usize = 8;
/// Simdgroups of 32 threads that add up a product with A; the kernel has room for the sums of as many threads.
const SIMDGROUPS: usize = 8;

/// The adapters of a dispatch for a layer, and their items.
struct Part {
    target: usize,
    a: Vec<Array>,
    b: Vec<Array>,
    ranks: [u32; BOUND],
    scales: [f32; BOUND],
    items: usize,
    /// `Sizes` in `kernel.metal`.
    sizes: [u32; 8],
}

impl Part {
    fn arguments<'a>(
        &'a self,
        [from, to]: [&'a Array; 2],
        numbers: &'a Array,
        factors: &'a [Array],
    ) -> Vec<Argument<'a>> {
        let mut arguments = vec![
            Argument::Input(from),
            Argument::Output(to),
            Argument::Input(numbers),
            Argument::U32s(&self.sizes),
            Argument::U32s(&self.ranks),
        ];
        // Those that aren't there are never read.
        let bound = factors.iter().chain(factors.iter().cycle()).take(BOUND);
        arguments.extend(bound.map(Argument::Input));
        arguments
    }
}

pub(super) fn add_updates(
    x: &Tensor,
    inner: usize,
    targets: &[Target],
    adapters: &Adapters,
    rows: &Rows,
) -> Result<()> {
    let metal = Metal::of(x)?;
    let x = metal.collapsed_rows(x)?;
    let numbers = metal.contiguous(&rows.uploaded)?;
    let ys = targets.iter().map(|target| metal.strided(target.y)).collect::<Result<Vec<_>>>()?;
    let of_target =
        |target: &Target| metal.empty((rows.plan.places, target.sizes.most_rank), DType::F32);
    let xas = targets.iter().map(of_target).collect::<Result<Vec<_>>>()?;
    let number = |number| size(OPERATION, number);
    let stride = |array: &Array, columns: usize| {
        number(collapsed_rows(array.tensor.layout()).map_or(columns, |(_, _, stride)| stride))
    };

    let mut parts: Vec<Part> = Vec::new();
    for (index, target) in targets.iter().enumerate() {
        // Neighbouring segments whose adapters have the layer, so that the items of a part are neighbours.
        let (mut item, mut open) = (rows.plan.items, false);
        for (segment, of_segment) in rows.segments.iter().enumerate() {
            let items = of_segment.places.len().div_ceil(ITEM_ROWS);
            let first_item = item;
            item += items * ITEM_NUMBERS;
            let Some(factors) = adapters.of(target.layer, of_segment.adapter) else {
                open = false;
                continue;
            };
            let full = parts.last().is_none_or(|part| part.a.len() == BOUND);
            if !open || full {
                let sizes = [
                    number(first_item)?,
                    number(rows.plan.order)?,
                    number(segment)?,
                    number(inner)?,
                    number(target.sizes.outer)?,
                    number(target.sizes.most_rank)?,
                    stride(&x, inner)?,
                    stride(&ys[index], target.sizes.outer)?,
                ];
                let (ranks, scales) = ([0; BOUND], [0.0; BOUND]);
                let (a, b) = (Vec::new(), Vec::new());
                parts.push(Part { target: index, a, b, ranks, scales, items: 0, sizes });
                open = true;
            }
            if let Some(part) = parts.last_mut() {
                let place = part.a.len();
                part.ranks[place] = number(factors.rank)?;
                part.scales[place] = factors.scale as f32;
                part.a.push(metal.contiguous(&factors.a)?);
                part.b.push(metal.contiguous(&factors.b)?);
                part.items += items;
            }
        }
    }
    let down = by_dtype!("lora_rows_down", x.dtype)?;
    let up = by_dtype!("lora_rows_up", x.dtype)?;
    let arguments: Vec<_> = parts
        .iter()
        .map(|part| {
            let (xa, y) = (&xas[part.target], &ys[part.target]);
            let mut of_up = part.arguments([xa, y], &numbers, &part.b);
            of_up.push(Argument::F32s(&part.scales));
            (part.arguments([&x, xa], &numbers, &part.a), of_up)
        })
        .collect();
    let mut dispatches: Vec<Dispatch> = Vec::with_capacity(2 * parts.len());
    // All products with A first, which don't wait for each other.
    for (part, (of_down, _)) in parts.iter().zip(&arguments) {
        let groups = |_| [1, part.items, 1];
        dispatches.push(metal.by_simdgroups(down, SIMDGROUPS, groups, of_down)?);
    }
    for (part, (_, of_up)) in parts.iter().zip(&arguments) {
        let outer = targets[part.target].sizes.outer;
        dispatches.push(metal.by_thread(up, outer, part.items, of_up)?);
    }
    metal.run(&dispatches)
}
