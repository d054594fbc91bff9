//! Products of rows that lie expert by expert, for elements of 2 bytes, see `grouped.cuh`.

use super::MODULE;
use crate::backend::cuda::{Array, Cuda};
use crate::experts::grouped::{Expert, Layer, OPERATION};
use crate::quantized::Weight;
use candle_core::{DType, Result, Tensor, bail};

/// As in `grouped.cuh`.
const THREADS: u32 = 256;
const ROWS: usize = 64;
const COLUMNS: usize = 128;
const SHARED: u32 = 3 * (ROWS + COLUMNS) as u32 * 64 * 2;
/// Terms of a sum at most.
const MOST_TERMS: usize = 2;
/// Numbers of 64 bits of an item: the addresses of its weights and its bias, where its rows begin, and how many they are.
const ITEM: usize = MOST_TERMS + 2;
/// Bytes of unpacked weights that there are at once.
const MOST_UNPACKED: usize = 1 << 30;
/// Elements that are copied at once.
const CHUNK: usize = 8;

/// What the kernel takes, packed weights after they are unpacked.
pub(crate) fn takes(x: &Tensor, experts: &[Expert], shapes: &[(usize, usize)]) -> bool {
    let fits = |(outer, inner): &(usize, usize)| {
        outer.is_multiple_of(CHUNK) && inner.is_multiple_of(CHUNK)
    };
    let is_taken = |Layer { weight, bias }: &Layer| {
        let is_weight = match weight {
            Weight::Dense(weight) => weight.dtype() == x.dtype() && weight.is_contiguous(),
            Weight::Quantized(_) => !weight.rounds_rows(),
        };
        is_weight && bias.is_none_or(|bias| bias.dtype() == x.dtype() && bias.is_contiguous())
    };
    matches!(x.dtype(), DType::BF16 | DType::F16)
        && shapes.iter().all(fits)
        && shapes.len() <= MOST_TERMS
        && experts.iter().flat_map(|expert| &expert.layers).all(is_taken)
}

/// `x·Wᵀ + b` for each of the experts' layers.
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

/// The sum over terms, each a left side and which of the experts' layers' weights it is multiplied by; `across` where the weights
/// are `(depth, columns)`, else with the bias. `None` where something doesn't begin at 16 bytes.
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
    let is_aligned = |pointer: u64| pointer.is_multiple_of(16);
    if !lefts.iter().all(|left| is_aligned(left.pointer)) || !are_aligned(&cuda, experts)? {
        return Ok(None);
    }
    let y = cuda.empty((rows, columns), dtype)?;
    if rows * columns == 0 {
        return Ok(Some(y.tensor));
    }
    if i32::try_from(rows).is_err() {
        bail!("metal-candle-kernels: {OPERATION}: {rows} rows are too many for one launch")
    }
    let name = match (across, dtype) {
        (false, DType::BF16) => "experts_grouped_bf16",
        (false, _) => "experts_grouped_f16",
        (true, DType::BF16) => "experts_across_bf16",
        (true, _) => "experts_across_f16",
    };
    let bytes = depth * columns * layers.len() * dtype.size_in_bytes();
    let at_once = match experts.iter().flat_map(|expert| &expert.layers).any(is_packed) {
        true => (MOST_UNPACKED / bytes.max(1)).max(1),
        false => experts.len(),
    };
    let mut start = 0;
    for experts in experts.chunks(at_once) {
        let weights = experts.iter().flat_map(|it| layers.iter().map(|layer| it.layers[*layer]));
        let weights = Weight::all_to_dense(weights.map(|layer| layer.weight), dtype)?;
        let mut items = Vec::new();
        for (expert, weights) in experts.iter().zip(weights.chunks_exact(layers.len())) {
            let mut item = [0; ITEM];
            for (address, weight) in item.iter_mut().zip(weights) {
                *address = cuda.strided(weight)?.pointer as i64;
            }
            if let (false, Some(bias)) = (across, expert.layers[layers[0]].bias) {
                item[MOST_TERMS] = cuda.strided(bias)?.pointer as i64;
            }
            for first in (0..expert.rows).step_by(ROWS) {
                let count = (expert.rows - first).min(ROWS);
                item[ITEM - 1] = (start + first) as i64 | (count as i64) << 32;
                items.extend(item);
            }
            start += expert.rows;
        }
        if items.is_empty() {
            continue;
        }
        let Ok(tiles) = u16::try_from(items.len() / ITEM) else {
            bail!("metal-candle-kernels: {OPERATION}: {rows} rows are too many for one launch")
        };
        let items = cuda.upload(&items, items.len())?;
        let grid = (columns.div_ceil(COLUMNS) as u32, u32::from(tiles), 1);
        let launch = MODULE.launch(&cuda, name, grid, THREADS, SHARED)?.overlapping();
        let second = lefts.last().map_or(0, |left| left.pointer);
        let (depth, columns, terms) = (depth as i32, columns as i32, lefts.len() as i32);
        // SAFETY: the left sides have (rows, depth) elements, the result (rows, columns), each weight (columns, depth), or across
        // (depth, columns), and a bias (columns).
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&lefts[0].pointer).arg(&second).arg(&items.pointer).arg(&y.pointer);
                arguments.arg(&depth).arg(&columns).arg(&terms);
            })?;
        }
    }
    Ok(Some(y.tensor))
}

fn is_packed(layer: &Layer) -> bool {
    matches!(layer.weight, Weight::Quantized(_))
}

/// Whether dense weights begin at 16 bytes, and biases at pairs.
fn are_aligned(cuda: &Cuda, experts: &[Expert]) -> Result<bool> {
    for Layer { weight, bias } in experts.iter().flat_map(|expert| &expert.layers) {
        if let Weight::Dense(weight) = weight
            && !cuda.strided(weight)?.pointer.is_multiple_of(16)
        {
            return Ok(false);
        }
        if let Some(bias) = bias
            && !cuda.strided(bias)?.pointer.is_multiple_of(4)
        {
            return Ok(false);
        }
    }
    Ok(true)
}
