//! Products of rows that lie expert by expert, for elements of 2 bytes, see `grouped.cuh`.

use super::MODULE;
use crate::backend::cuda::{Array, Cuda};
use crate::experts::grouped::{Expert, OPERATION};
use crate::quantized::Weight;
use candle_core::{DType, Result, Tensor, bail};

/// As in `grouped.cuh`.
const THREADS: u32 = 256;
const ROWS: usize = 64;
const COLUMNS: usize = 128;
const SHARED: u32 = 3 * (ROWS + COLUMNS) as u32 * 64 * 2;
/// Terms of a sum at most.
const MOST_TERMS: usize = 2;
/// Numbers of 64 bits of an item: the addresses of its weights, where its rows begin, and how many they are.
const ITEM: usize = MOST_TERMS + 1;
/// Elements that are copied at once.
const CHUNK: usize = 8;

/// What the kernel takes as it is.
pub(crate) fn takes(x: &Tensor, experts: &[Expert], shapes: &[(usize, usize)]) -> bool {
    let fits = |(outer, inner): &(usize, usize)| {
        outer.is_multiple_of(CHUNK) && inner.is_multiple_of(CHUNK)
    };
    let is_dense = |weight: &Weight| match weight {
        Weight::Dense(weight) => weight.dtype() == x.dtype() && weight.is_contiguous(),
        Weight::Quantized(_) => false,
    };
    matches!(x.dtype(), DType::BF16 | DType::F16)
        && shapes.iter().all(fits)
        && shapes.len() <= MOST_TERMS
        && experts.iter().flat_map(|expert| &expert.weights).all(is_dense)
}

/// `x·Wᵀ` for each of the experts' weights.
pub(crate) fn forward(
    x: &Tensor,
    experts: &[Expert],
    shapes: &[(usize, usize)],
) -> Result<Option<Vec<Tensor>>> {
    let mut outputs = Vec::with_capacity(shapes.len());
    for (layer, (outer, inner)) in shapes.iter().enumerate() {
        match multiply(&[x], experts, &[layer], [*inner, *outer], false)? {
            Some(output) => outputs.push(output),
            None => return Ok(None),
        }
    }
    Ok(Some(outputs))
}

/// `Σ dy·W` over the experts' weights with a gradient.
pub(crate) fn backward_input(
    dys: &[Option<&Tensor>],
    experts: &[Expert],
    shapes: &[(usize, usize)],
) -> Result<Option<Tensor>> {
    let (mut lefts, mut layers, mut depths) = (Vec::new(), Vec::new(), Vec::new());
    for (layer, (dy, (outer, _))) in dys.iter().zip(shapes).enumerate() {
        let Some(dy) = dy else { continue };
        lefts.push(*dy);
        layers.push(layer);
        depths.push(*outer);
    }
    let inner = shapes.first().map_or(0, |(_, inner)| *inner);
    let alike = shapes.iter().all(|(_, other)| *other == inner);
    match depths.as_slice() {
        [depth, rest @ ..] if alike && rest.iter().all(|other| other == depth) => {
            multiply(&lefts, experts, &layers, [*depth, inner], true)
        }
        _ => Ok(None),
    }
}

/// The sum over terms, each a left side and which of the experts' weights it is multiplied by; `across` where the weights are
/// `(depth, columns)`. `None` where something doesn't begin at 16 bytes.
fn multiply(
    lefts: &[&Tensor],
    experts: &[Expert],
    layers: &[usize],
    [depth, columns]: [usize; 2],
    across: bool,
) -> Result<Option<Tensor>> {
    let (Some(first), true) = (lefts.first(), lefts.len() <= MOST_TERMS) else { return Ok(None) };
    let (cuda, dtype, rows) = (Cuda::of(first)?, first.dtype(), first.dim(0)?);
    let lefts = lefts.iter().map(|left| cuda.contiguous(left)).collect::<Result<Vec<Array>>>()?;
    let mut aligned = lefts.iter().all(|left| left.pointer.is_multiple_of(16));
    let (mut items, mut start) = (Vec::new(), 0);
    for expert in experts {
        let mut addresses = [0; MOST_TERMS];
        for (address, layer) in addresses.iter_mut().zip(layers) {
            if let Some(Weight::Dense(weight)) = expert.weights.get(*layer) {
                let pointer = cuda.strided(weight)?.pointer;
                aligned &= pointer.is_multiple_of(16);
                *address = pointer as i64;
            }
        }
        for first in (0..expert.rows).step_by(ROWS) {
            let count = (expert.rows - first).min(ROWS);
            items.extend(addresses);
            items.push((start + first) as i64 | (count as i64) << 32);
        }
        start += expert.rows;
    }
    if !aligned {
        return Ok(None);
    }
    let y = cuda.empty((rows, columns), dtype)?;
    if rows * columns == 0 {
        return Ok(Some(y.tensor));
    }
    let count = items.len() / ITEM;
    let (Ok(_), Ok(tiles)) = (i32::try_from(rows), u16::try_from(count)) else {
        bail!("metal-candle-kernels: {OPERATION}: {rows} rows are too many for one launch")
    };
    let items = cuda.upload(&items, items.len())?;
    let name = match (across, dtype) {
        (false, DType::BF16) => "experts_grouped_bf16",
        (false, _) => "experts_grouped_f16",
        (true, DType::BF16) => "experts_across_bf16",
        (true, _) => "experts_across_f16",
    };
    let grid = (columns.div_ceil(COLUMNS) as u32, u32::from(tiles), 1);
    let launch = MODULE.launch(&cuda, name, grid, THREADS, SHARED)?.overlapping();
    let second = lefts.last().map_or(0, |left| left.pointer);
    let (depth, columns, terms) = (depth as i32, columns as i32, lefts.len() as i32);
    // SAFETY: the left sides have (rows, depth) elements, the result (rows, columns), and each weight (columns, depth), or across
    // (depth, columns).
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&lefts[0].pointer).arg(&second).arg(&items.pointer).arg(&y.pointer);
            arguments.arg(&depth).arg(&columns).arg(&terms);
        })?;
    }
    Ok(Some(y.tensor))
}
