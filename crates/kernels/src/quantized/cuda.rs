//! Matrices in fewer bits on CUDA, see `kernel.cu`, `few_rows.cuh` and `streamed.cuh`.

pub(crate) use super::source::Normed;
use super::source::{NormedRows, Source};
use super::{Levels, OPERATION, Quantized, Scales};
use crate::backend::cuda::{Array, Cuda, Launch, Matrix, Module, by_dtype, module};
use crate::glu::Activation;
use crate::matmul::cuda::{Adapter, sliced_adapters, takes_ranks};
use crate::matmul::with_last_dimension;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{D, DType, Result, Tensor, bail};

static MODULE: Module = module!("quantized");

/// Rows that the own kernels multiply by matrices in fewer bits, at most.
const FEW_ROWS: usize = 8;

/// Rows of a streaming kernel, at most.
pub(crate) const MOST_STREAMED: usize = 4;

/// Threads of a block of every kernel here.
const THREADS: usize = 256;
const WARPS: usize = THREADS / 32;

/// What codes stand for.
const INTEGERS: i32 = 0;
const TABLE: i32 = 1;
const E4M3: i32 = 2;

/// How scales are stored.
const PLAIN_F32: i32 = 0;
const PLAIN_F16: i32 = 1;
const PLAIN_BF16: i32 = 2;
const CODED_E8M0: i32 = 3;
const CODED_E4M3: i32 = 4;
const NESTED: i32 = 5;
const BLOCKS: i32 = 6;
const SIGNED_BLOCKS: i32 = 7;

/// Projections of one launch.
const MOST: usize = 4;

/// Outputs of a task.
const OUTPUTS: usize = 16;

/// Groups of a multiple of so many elements have loops of their own, and rows are a multiple of it, as it is what a
/// lane multiplies at once.
const WIDE: usize = 64;

/// Shared memory of the levels of all pairs of codes of 4 bits, a copy for every lane.
const PAIRS_SHARED: usize = 256 * 32 * size_of::<u32>();

/// A matrix as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Packed {
    codes: u64,
    scales: u64,
    offsets: u64,
    large: u64,
    large_offsets: u64,
    table: u64,
    levels: [f32; 16],
    number: f32,
    bits: i32,
    kind: i32,
    zero: i32,
    scale_kind: i32,
    group: i32,
    shift: i32,
    unused: i32,
}

// SAFETY: it is plain numbers, laid out as the kernels declare them.
unsafe impl DeviceRepr for Packed {}

/// A matrix that is unpacked, as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Unpacked {
    weight: Packed,
    to: u64,
    elements: i64,
    eights: i32,
    unused: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct AllUnpacked {
    at: [Unpacked; MOST],
}

// SAFETY: it is plain numbers, laid out as the kernels declare them.
unsafe impl DeviceRepr for AllUnpacked {}

/// A layer as the kernels take it.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Projection {
    weight: Packed,
    bias: u64,
    a: u64,
    b: u64,
    y: u64,
    outer: i32,
    rank: i32,
    first_task: i32,
    column: i32,
    scale: f32,
    unused: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Projections {
    at: [Projection; MOST],
    count: i32,
    ranks: i32,
    tasks: i32,
    pairs: i32,
    gate: i32,
    unused: i32,
}

// SAFETY: it is plain numbers, laid out as the kernels declare them.
unsafe impl DeviceRepr for Projections {}

/// A matrix as kernels elsewhere find it by a table: `Packed` in numbers.cuh.
pub(crate) struct Described(Ready);

impl Described {
    /// `None` where something doesn't begin at 16 bytes. What it points into is the matrix's.
    pub(crate) fn new(cuda: &Cuda, matrix: &Quantized) -> Result<Option<Self>> {
        let ready = Ready::new(cuda, matrix)?;
        Ok((!ready.is_copied).then_some(Self(ready)))
    }

    /// Its words, as they lie in memory.
    pub(crate) fn words(&self) -> [u32; size_of::<Packed>() / size_of::<u32>()] {
        // SAFETY: plain numbers of four and eight bytes, without gaps.
        unsafe { std::mem::transmute(self.0.packed) }
    }
}

/// A linear layer with or without an adapter.
pub(crate) struct Layer<'a> {
    /// `(outer, inner)`
    pub(crate) weight: &'a Quantized,
    /// `(outer)`, contiguous, in the dtype of x.
    pub(crate) bias: Option<u64>,
    pub(crate) adapter: Option<Adapter>,
}

/// A matrix as kernels take it, with what it points into, which begins at 16 bytes.
struct Ready {
    packed: Packed,
    /// Whether a kernel has just copied something of it.
    is_copied: bool,
    _arrays: Vec<Array>,
}

impl Ready {
    fn new(cuda: &Cuda, matrix: &Quantized) -> Result<Self> {
        let mut arrays = Vec::with_capacity(5);
        let mut is_copied = false;
        let mut pointer = |tensor: &Tensor| -> Result<u64> {
            let mut array = cuda.contiguous(tensor)?;
            if !array.pointer.is_multiple_of(16) {
                array = cuda.copy(tensor)?;
                is_copied = true;
            }
            let pointer = array.pointer;
            arrays.push(array);
            Ok(pointer)
        };
        let Ok(group) = i32::try_from(matrix.group.min(matrix.elements().max(1))) else {
            bail!(
                "metal-candle-kernels: {OPERATION} on CUDA: a group has {} elements, expected less than 2^31",
                matrix.group
            )
        };
        let whole_group = group as usize == matrix.group && matrix.group.is_power_of_two();
        let mut packed = Packed {
            codes: pointer(&matrix.codes)?,
            bits: matrix.levels.bits() as i32,
            group,
            shift: if whole_group { group.trailing_zeros() as i32 } else { -1 },
            ..Packed::default()
        };
        match matrix.levels {
            Levels::Integers { zero, .. } => {
                (packed.kind, packed.zero) = (INTEGERS, i32::from(zero));
            }
            Levels::Table(levels) => (packed.kind, packed.levels) = (TABLE, *levels),
            Levels::E4m3 => packed.kind = E4M3,
        }
        match &matrix.scales {
            Scales::Plain { scales, offsets } => {
                packed.scale_kind = match scales.dtype() {
                    DType::F32 => PLAIN_F32,
                    DType::F16 => PLAIN_F16,
                    _ => PLAIN_BF16,
                };
                packed.scales = pointer(scales)?;
                if let Some(offsets) = offsets {
                    packed.offsets = pointer(offsets)?;
                }
            }
            Scales::E8m0(scales) => {
                (packed.scale_kind, packed.scales) = (CODED_E8M0, pointer(scales)?);
            }
            Scales::E4m3 { scales, overall } => {
                (packed.scale_kind, packed.number) = (CODED_E4M3, *overall);
                packed.scales = pointer(scales)?;
            }
            Scales::Nested { codes, table, scales, offset } => {
                (packed.scale_kind, packed.number) = (NESTED, *offset);
                packed.scales = pointer(codes)?;
                packed.table = pointer(table)?;
                packed.large = pointer(scales)?;
            }
            Scales::Blocks { scales, signed, large, offsets } => {
                packed.scale_kind = if *signed { SIGNED_BLOCKS } else { BLOCKS };
                packed.scales = pointer(scales)?;
                packed.large = pointer(large)?;
                if let Some((offsets, large)) = offsets {
                    packed.offsets = pointer(offsets)?;
                    packed.large_offsets = pointer(large)?;
                }
            }
        }
        Ok(Ready { packed, is_copied, _arrays: arrays })
    }

    /// Whether numbers can be written eight at a time where rows of `columns` begin.
    fn in_eights(&self, matrix: &Quantized, columns: usize) -> bool {
        columns.is_multiple_of(8)
            && self.packed.group % 8 == 0
            && matrix.elements() / 8 < u32::MAX as usize
    }
}

pub(super) fn dequantize(matrix: &Quantized, dtype: DType) -> Result<Tensor> {
    match dequantize_all(&[matrix], dtype)?.pop() {
        Some(out) => Ok(out),
        None => bail!("metal-candle-kernels: {OPERATION}: a matrix gave nothing"),
    }
}

/// The numbers of matrices on one device, of which a launch makes several.
pub(super) fn dequantize_all(matrices: &[&Quantized], dtype: DType) -> Result<Vec<Tensor>> {
    let mut outputs = Vec::with_capacity(matrices.len());
    for together in matrices.chunks(MOST) {
        let name = by_dtype!("dequantize", dtype)?;
        let cuda = Cuda::on(together[0].device())?;
        let (mut all, mut threads) = (AllUnpacked::default(), 0);
        let mut weights = Vec::with_capacity(together.len());
        for (matrix, place) in together.iter().zip(&mut all.at) {
            let (elements, out) = (matrix.elements(), cuda.empty(matrix.shape, dtype)?);
            if elements == 0 {
                outputs.push(out.tensor);
                continue;
            }
            let ready = Ready::new(&cuda, matrix)?;
            // What remains beside whole eights is read one by one.
            let eights = ready.in_eights(matrix, 8);
            threads = threads.max(if eights { elements.div_ceil(8) } else { elements });
            *place = Unpacked {
                weight: ready.packed,
                to: out.pointer,
                elements: elements as i64,
                eights: i32::from(eights),
                unused: 0,
            };
            weights.push(ready);
            outputs.push(out.tensor);
        }
        if threads == 0 {
            continue;
        }
        let count = together.len();
        let most = (16 * cuda.multiprocessors()?).div_ceil(count);
        let grid = (threads.div_ceil(THREADS).min(most) as u32, count as u32, 1);
        let launch = MODULE.launch(&cuda, name, grid, THREADS as u32, 0)?.overlapping();
        // SAFETY: as the kernel declares it; each matrix has so many elements, and so has what it is written to.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&all);
            })?;
        }
    }
    Ok(outputs)
}

pub(super) fn rows(matrix: &Quantized, ids: &Tensor, dtype: DType) -> Result<Tensor> {
    let cuda = Cuda::on(matrix.device())?;
    let name = by_dtype!("quantized_rows", dtype)?;
    let (outer, inner) = matrix.shape;
    let (batch, seq) = ids.dims2()?;
    let out = cuda.empty((batch, seq, inner), dtype)?;
    if out.tensor.elem_count() == 0 {
        return Ok(out.tensor);
    }
    let Ok(positions) = u32::try_from(batch * seq) else {
        bail!("metal-candle-kernels: {OPERATION}: {batch} x {seq} ids are too many for one launch")
    };
    let (ready, ids) = (Ready::new(&cuda, matrix)?, cuda.contiguous(ids)?);
    let eights = ready.in_eights(matrix, inner);
    let threads = if eights { inner / 8 } else { inner };
    let threads = threads.next_multiple_of(32).min(THREADS) as u32;
    let launch = MODULE.launch(&cuda, name, (positions, 1, 1), threads, 0)?.overlapping();
    let (outer, inner, eights) = (outer as i64, inner as i64, i32::from(eights));
    // SAFETY: as the kernel declares them; ids beyond the table aren't looked up.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&ready.packed).arg(&ids.pointer).arg(&out.pointer).arg(&outer);
            arguments.arg(&inner).arg(&eights);
        })?;
    }
    Ok(out.tensor)
}

/// Inner indices of a lane that share a scale at least, where the kernels for a few rows have a loop for such levels
/// and scales.
fn unit(matrix: &Quantized) -> Option<usize> {
    let (_, inner) = matrix.shape;
    if !inner.is_multiple_of(WIDE)
        || matrix.elements() > u32::MAX as usize
        || i32::try_from(matrix.group).is_err()
    {
        return None;
    }
    let (wide, of_32, of_16) =
        (matrix.group.is_multiple_of(WIDE), matrix.group == 32, matrix.group == 16);
    let in_blocks = matches!(matrix.scales, Scales::Blocks { .. });
    let (plain, shifts) = match &matrix.scales {
        Scales::Plain { offsets, .. } => (true, offsets.is_some()),
        Scales::Blocks { offsets, .. } => (false, offsets.is_some()),
        _ => (false, false),
    };
    let nested = matches!(matrix.scales, Scales::Nested { .. });
    let takes = |takes: bool, unit: usize| takes.then_some(unit);
    match matrix.levels {
        Levels::E4m3 => takes((wide || of_32) && !(shifts || nested || in_blocks), 32),
        Levels::Table(_) if wide => takes(!(shifts || in_blocks), WIDE),
        Levels::Table(_) if of_32 => takes(!(shifts || in_blocks || nested), 32),
        Levels::Table(_) => takes(of_16 && !(plain || in_blocks || nested), 16),
        Levels::Integers { bits: 8, .. } => takes((wide || of_32) && plain, 32),
        Levels::Integers { .. } if wide => takes(plain, WIDE),
        Levels::Integers { bits: 4 | 5, .. } => takes(of_32 && (plain || in_blocks), 32),
        Levels::Integers { bits: 2, .. } => takes(of_16 && in_blocks, 16),
        Levels::Integers { bits: 3 | 6, .. } => takes(of_16 && in_blocks && !shifts, 16),
        Levels::Integers { .. } => None,
    }
}

/// Whether [`few_rows`] takes layers with these weights and ranks of adapters.
pub(crate) fn takes<'a>(
    rows: usize,
    inner: usize,
    mut weights: impl Iterator<Item = &'a Quantized>,
    ranks: impl Iterator<Item = usize>,
) -> bool {
    (1..=FEW_ROWS).contains(&rows)
        && takes_ranks(rows, inner, ranks)
        && weights.all(|weight| unit(weight).is_some())
}

/// `(y, x·A)` of some layers for `x` `(.., inner)` of up to eight rows that [`takes`] said yes to; without
/// the second unless `keeps_xa`.
pub(crate) fn few_rows(
    cuda: &Cuda,
    x: &Tensor,
    sizes: (usize, usize),
    layers: &[Layer],
    keeps_xa: bool,
) -> Result<Vec<(Tensor, Option<Tensor>)>> {
    let x_rows = cuda.rows(x)?;
    let copied;
    let mut matrix = x_rows.matrix;
    if !matrix.has_aligned_rows() {
        copied = cuda.copy(x)?;
        matrix = Matrix::of(&copied, sizes.1);
    }
    let mut outputs = Vec::with_capacity(layers.len());
    for together in in_launches(layers) {
        let read = (matrix, Source::plain(matrix));
        few_rows_at_once(cuda, x, read, sizes, (together, None), keeps_xa, &mut outputs)?;
    }
    Ok(outputs)
}

/// The layers that a launch has each: one kind of levels, groups and scales.
fn in_launches<'l, 'w>(layers: &'l [Layer<'w>]) -> impl Iterator<Item = &'l [Layer<'w>]> {
    let kind = |layer: &Layer| {
        let weight = layer.weight;
        let is_wide = weight.group.is_multiple_of(WIDE);
        (unit(weight), weight.levels, is_wide, Form::of(&weight.scales))
    };
    layers.chunk_by(move |one, next| kind(one) == kind(next)).flat_map(|alike| alike.chunks(MOST))
}

/// The sum of x and the residual, and the outputs of layers of its norm, of so many rows and inner indices, or the gated
/// unit of two; nothing where no streaming kernel makes the norm, or the unit.
pub(crate) fn of_normed(
    cuda: &Cuda,
    normed: Normed,
    sizes: (usize, usize),
    layers: &[Layer],
    gate: Option<Activation>,
) -> Result<Option<(Tensor, Vec<Tensor>)>> {
    if gate.is_some() && in_launches(layers).count() != 1 {
        return Ok(None);
    }
    let (rows, inner) = sizes;
    let most = cuda.most_shared_memory()?;
    let rank = |layer: &Layer| layer.adapter.as_ref().map_or(0, |adapter| adapter.rank);
    let streams = |together: &[Layer]| {
        let ranks = together.iter().map(rank);
        let kernel =
            takes_ranks(rows, inner, ranks.clone()).then(|| Streamed::of(together[0].weight));
        kernel.flatten().is_some_and(|kernel| kernel.name(rows, inner, ranks.sum(), most).is_some())
    };
    // Without layers nothing would store the sum.
    if layers.is_empty() || !in_launches(layers).all(streams) {
        return Ok(None);
    }
    let Some(mut normed) = NormedRows::new(cuda, normed)? else { return Ok(None) };
    let mut outputs = Vec::with_capacity(layers.len());
    for together in in_launches(layers) {
        let read = (normed.x, normed.for_launch());
        few_rows_at_once(cuda, &normed.shaped, read, sizes, (together, gate), false, &mut outputs)?;
    }
    let ys = outputs.into_iter().map(|(y, _)| y).collect();
    Ok(Some((normed.sum.tensor, ys)))
}

fn few_rows_at_once(
    cuda: &Cuda,
    x: &Tensor,
    (matrix, source): (Matrix, Source),
    (rows, inner): (usize, usize),
    (layers, gate): (&[Layer], Option<Activation>),
    keeps_xa: bool,
    outputs: &mut Vec<(Tensor, Option<Tensor>)>,
) -> Result<()> {
    let dtype = matrix.dtype;
    let mut all = Projections { count: size(layers.len())?, ..Default::default() };
    // One more than its number, where there is one.
    all.gate = gate.map_or(0, |activation| 1 + activation.code() as i32);
    let (mut tasks, mut ranks) = (0, 0);
    let mut ys = Vec::with_capacity(layers.len());
    let mut weights: Vec<Ready> = Vec::with_capacity(layers.len());
    for (index, (layer, place)) in layers.iter().zip(&mut all.at).enumerate() {
        let (outer, _) = layer.weight.shape;
        // A unit takes the place of what its second layer gives, and the first one's isn't written.
        let is_written = gate.is_none() || index > 0;
        let y = is_written.then(|| cuda.empty(with_last_dimension(x, outer), dtype)).transpose()?;
        let ready = Ready::new(cuda, layer.weight)?;
        if let Levels::Table(_) = layer.weight.levels {
            all.pairs = i32::from(dtype != DType::F32);
        }
        *place = Projection {
            weight: ready.packed,
            bias: layer.bias.unwrap_or(0),
            y: y.as_ref().map_or(0, |y| y.pointer),
            outer: size(outer)?,
            first_task: size(tasks)?,
            column: size(ranks)?,
            ..Default::default()
        };
        if let Some(adapter) = &layer.adapter {
            place.a = adapter.a;
            place.b = adapter.b;
            place.rank = size(adapter.rank)?;
            place.scale = adapter.scale as f32;
            ranks += adapter.rank;
        }
        tasks += outer.div_ceil(OUTPUTS);
        weights.push(ready);
        ys.push(y);
    }
    (all.tasks, all.ranks) = (size(tasks)?, size(ranks)?);
    let kept = keeps_xa && ranks > 0;
    let xa = kept.then(|| cuda.empty(with_last_dimension(x, ranks), dtype)).transpose()?;
    let parts = match ranks {
        0 => None,
        _ => {
            let adapters = layers.iter().map(|layer| layer.adapter.as_ref());
            Some(sliced_adapters(cuda, (matrix, source.normed()), (rows, inner), adapters)?)
        }
    };
    let Some(weight) = layers.first().map(|layer| layer.weight) else { return Ok(()) };
    let streamed = match dtype != DType::F32 && cuda.has_warpgroups()? {
        true => Streamed::of(weight),
        false => None,
    };
    let most = cuda.most_shared_memory()?;
    let launch = match streamed.and_then(|kernel| kernel.name(rows, inner, ranks, most)) {
        Some(name) => {
            let tasks = if gate.is_some() { tasks / 2 } else { tasks };
            let blocks = tasks.clamp(1, cuda.multiprocessors()?);
            let (threads, shared) = (Streamed::THREADS as u32, most as u32);
            let launch = MODULE.launch(cuda, name, (blocks as u32, 1, 1), threads, shared)?;
            // It reads the weights before the previous kernel ends.
            let may_overlap = !weights.iter().any(|weight| weight.is_copied);
            let launch = if may_overlap { launch.overlapping() } else { launch };
            FewRows { launch, source: Some(source) }
        }
        None => {
            let name = kernel(rows, weight, dtype)?;
            let blocks = (all.tasks as usize).clamp(1, 2 * cuda.multiprocessors()?);
            let pairs = if all.pairs != 0 { PAIRS_SHARED } else { 0 };
            let floats = rows * (2 * WARPS * OUTPUTS + ranks);
            let shared = (pairs + floats * size_of::<f32>()) as u32;
            let launch =
                MODULE.launch(cuda, name, (blocks as u32, 1, 1), THREADS as u32, shared)?;
            FewRows { launch: launch.overlapping(), source: None }
        }
    };
    launch.run(matrix, (rows, inner), &all, xa.as_ref(), parts.as_ref())?;
    let mut column = 0;
    for (layer, y) in layers.iter().zip(ys) {
        let Some(y) = y else { continue };
        let xa = match (layer.adapter.as_ref().filter(|_| keeps_xa), &xa) {
            (Some(Adapter { rank, .. }), Some(xa)) => {
                column += rank;
                Some(xa.tensor.narrow(D::Minus1, column - rank, *rank)?)
            }
            (Some(_), None) => Some(cuda.empty(with_last_dimension(x, 0), dtype)?.tensor),
            (None, _) => None,
        };
        outputs.push((y.tensor, xa));
    }
    Ok(())
}

/// How scales are stored, as far as the streaming kernels differ.
#[derive(Clone, Copy, PartialEq)]
enum Form {
    Floats,
    Codes,
    Nested,
    Blocks,
}

impl Form {
    fn of(scales: &Scales) -> Self {
        match scales {
            Scales::Plain { .. } => Self::Floats,
            Scales::E8m0(_) | Scales::E4m3 { .. } => Self::Codes,
            Scales::Nested { .. } => Self::Nested,
            Scales::Blocks { .. } => Self::Blocks,
        }
    }
}

/// A kernel of streamed.cuh, which says what its numbers mean, for a weight in groups of 16, 32 or multiples of 64.
struct Streamed {
    /// For one, two and four rows.
    names: [&'static str; 3],
    bits: usize,
    is_table: bool,
    is_whole: bool,
    group: usize,
    chunks: usize,
    teams: usize,
}

impl Streamed {
    /// Threads of a block.
    const THREADS: usize = 27 * 32;

    /// The one for such weights, on Hopper.
    fn of(weight: &Quantized) -> Option<Self> {
        macro_rules! names {
            ($format:literal) => {
                [
                    concat!("quantized_streamed_1_", $format),
                    concat!("quantized_streamed_2_", $format),
                    concat!("quantized_streamed_4_", $format),
                ]
            };
        }
        // Scales of a row's part are found at multiples of 256 columns.
        unit(weight).filter(|_| weight.shape.1.is_multiple_of(256))?;
        let group = if weight.group.is_multiple_of(WIDE) { WIDE } else { weight.group };
        let form = Form::of(&weight.scales);
        let (names, chunks, teams) = match (weight.levels, group, form) {
            (Levels::Table(_), WIDE, Form::Floats) => (names!("table_64"), 2, 2),
            (Levels::Table(_), WIDE, Form::Nested) => (names!("table_64_nested"), 2, 2),
            (Levels::Table(_), 32, Form::Floats) => (names!("table_32"), 2, 1),
            (Levels::Table(_), 32, Form::Codes) => (names!("table_32_coded"), 2, 2),
            (Levels::Table(_), 16, Form::Codes) => (names!("table_16_coded"), 2, 2),
            (Levels::E4m3, WIDE, Form::Floats) => (names!("e4m3_64"), 1, 2),
            (Levels::E4m3, 32, Form::Codes) => (names!("e4m3_32_coded"), 1, 2),
            (Levels::Integers { bits, .. }, WIDE, Form::Floats) => match bits {
                2 => (names!("2_bits_64"), 2, 2),
                3 => (names!("3_bits_64"), 2, 2),
                4 => (names!("4_bits_64"), 2, 2),
                5 => (names!("5_bits_64"), 2, 2),
                6 => (names!("6_bits_64"), 1, 2),
                _ => (names!("8_bits_64"), 1, 2),
            },
            (Levels::Integers { bits: 4, .. }, 32, Form::Floats) => (names!("4_bits_32"), 2, 1),
            (Levels::Integers { bits: 5, .. }, 32, Form::Floats) => (names!("5_bits_32"), 2, 1),
            (Levels::Integers { bits: 8, .. }, 32, Form::Floats) => (names!("8_bits_32"), 1, 2),
            (Levels::Integers { bits, .. }, 16, Form::Blocks) => match bits {
                2 => (names!("2_bits_16_blocks"), 2, 2),
                3 => (names!("3_bits_16_blocks"), 2, 2),
                6 => (names!("6_bits_16_blocks"), 1, 2),
                _ => return None,
            },
            (Levels::Integers { bits, .. }, 32, Form::Blocks) => match bits {
                4 => (names!("4_bits_32_blocks"), 2, 2),
                5 => (names!("5_bits_32_blocks"), 2, 2),
                _ => return None,
            },
            _ => return None,
        };
        Some(Self {
            names,
            bits: weight.levels.bits(),
            is_table: matches!(weight.levels, Levels::Table(_)),
            is_whole: matches!(weight.levels, Levels::Integers { .. }),
            group,
            chunks,
            teams,
        })
    }

    /// The kernel for so many rows, if two stages have room in so much shared memory.
    fn name(&self, rows: usize, inner: usize, ranks: usize, most: usize) -> Option<&'static str> {
        let (name, rows) = match (rows, self.names) {
            (1, [one, ..]) => (one, 1),
            (2, [_, two, _]) => (two, 2),
            (3 | 4, [.., four]) => (four, 4),
            _ => return None,
        };
        (self.bytes(rows, inner, ranks) <= most).then_some(name)
    }

    /// Bytes of shared memory with two stages, as `Places` in streamed.cuh has them.
    fn bytes(&self, rows: usize, inner: usize, ranks: usize) -> usize {
        const MULTIPLIERS: usize = 16;
        const FINISHERS: usize = 2;
        const MOST_SLOTS: usize = 16;
        let width = 128 * MULTIPLIERS * self.chunks;
        let pad = match self.bits {
            4 => 64,
            2 | 6 => 32,
            _ => 16,
        };
        let slot = OUTPUTS * (width * self.bits / 8 + pad);
        let shifts = self.is_whole && (self.group != 16 || self.bits == 2);
        let entry = if shifts { 8 } else { 4 };
        let of_quad = 128 / self.group * entry;
        let scales = OUTPUTS * (width / self.group * entry + of_quad.max(16));
        let scale_slots = self.teams + 1;
        let table = if self.is_table { 256 * 256 } else { 0 };
        let zeros = 256;
        let parts = if rows == 1 { 4 } else { 1 };
        let sums = FINISHERS * MULTIPLIERS * parts * rows * OUTPUTS * size_of::<f32>();
        let gates = 2 * rows * OUTPUTS * size_of::<f32>();
        let barriers = 8 * (2 * MOST_SLOTS + 2 * scale_slots + 2 * FINISHERS + 2);
        let unit = match (self.is_whole, self.group) {
            (true, group) => group.min(32),
            (false, WIDE) => 128,
            (false, _) => 64,
        };
        let x = rows * (2 * inner + inner / unit * 16);
        let xa = (rows * ranks * size_of::<f32>()).next_multiple_of(16);
        table + scale_slots * scales + zeros + sums + gates + barriers + x + xa + 2 * slot
    }
}

/// The kernel that multiplies so many rows by such a weight.
fn kernel(rows: usize, weight: &Quantized, dtype: DType) -> Result<&'static str> {
    macro_rules! named {
        ($two:literal, $eight:literal) => {
            if rows <= 2 { by_dtype!($two, dtype) } else { by_dtype!($eight, dtype) }
        };
    }
    match (weight.levels, unit(weight)) {
        (Levels::Table(_), Some(16)) => {
            named!("quantized_two_rows_table_16", "quantized_eight_rows_table_16")
        }
        (Levels::Table(_), Some(32)) => {
            named!("quantized_two_rows_table_32", "quantized_eight_rows_table_32")
        }
        (Levels::Table(_), Some(WIDE)) => {
            named!("quantized_two_rows_table_64", "quantized_eight_rows_table_64")
        }
        (Levels::E4m3, Some(32)) => named!("quantized_two_rows_e4m3", "quantized_eight_rows_e4m3"),
        (Levels::Integers { bits: 2, .. }, Some(16)) => {
            named!("quantized_two_rows_2_bits_16", "quantized_eight_rows_2_bits_16")
        }
        (Levels::Integers { bits: 2, .. }, Some(WIDE)) => {
            named!("quantized_two_rows_2_bits_64", "quantized_eight_rows_2_bits_64")
        }
        (Levels::Integers { bits: 3, .. }, Some(16)) => {
            named!("quantized_two_rows_3_bits_16", "quantized_eight_rows_3_bits_16")
        }
        (Levels::Integers { bits: 3, .. }, Some(WIDE)) => {
            named!("quantized_two_rows_3_bits_64", "quantized_eight_rows_3_bits_64")
        }
        (Levels::Integers { bits: 4, .. }, Some(32)) => {
            named!("quantized_two_rows_4_bits_32", "quantized_eight_rows_4_bits_32")
        }
        (Levels::Integers { bits: 4, .. }, Some(WIDE)) => {
            named!("quantized_two_rows_4_bits_64", "quantized_eight_rows_4_bits_64")
        }
        (Levels::Integers { bits: 5, .. }, Some(32)) => {
            named!("quantized_two_rows_5_bits_32", "quantized_eight_rows_5_bits_32")
        }
        (Levels::Integers { bits: 5, .. }, Some(WIDE)) => {
            named!("quantized_two_rows_5_bits_64", "quantized_eight_rows_5_bits_64")
        }
        (Levels::Integers { bits: 6, .. }, Some(16)) => {
            named!("quantized_two_rows_6_bits_16", "quantized_eight_rows_6_bits_16")
        }
        (Levels::Integers { bits: 6, .. }, Some(WIDE)) => {
            named!("quantized_two_rows_6_bits_64", "quantized_eight_rows_6_bits_64")
        }
        (Levels::Integers { bits: 8, .. }, Some(32)) => {
            named!("quantized_two_rows_8_bits", "quantized_eight_rows_8_bits")
        }
        _ => bail!(
            "metal-candle-kernels: {OPERATION} on CUDA: a weight of {:?} in groups of {} isn't laid out for a few rows",
            weight.shape,
            weight.group
        ),
    }
}

/// A launch of a kernel for a few rows.
struct FewRows {
    launch: Launch,
    /// For the streaming kernels.
    source: Option<Source>,
}

impl FewRows {
    fn run(
        self,
        x: Matrix,
        (rows, inner): (usize, usize),
        all: &Projections,
        xa: Option<&Array>,
        parts: Option<&(Array, i32)>,
    ) -> Result<()> {
        let part_rows = rows.next_power_of_two() as i32;
        let (stride, rows, inner) = (x.stride as i64, rows as i32, size(inner)?);
        let xa = xa.map_or(0, |xa| xa.pointer);
        let slices = parts.map_or(0, |(_, slices)| *slices);
        let parts = parts.map_or(0, |(parts, _)| parts.pointer);
        // SAFETY: as the kernels declare them; the caller holds what the pointers point into.
        unsafe {
            self.launch.with(|arguments| {
                arguments.arg(all);
                match &self.source {
                    Some(source) => arguments.arg(source),
                    None => arguments.arg(&x.pointer).arg(&stride),
                };
                arguments.arg(&rows).arg(&inner);
                arguments.arg(&xa).arg(&parts).arg(&slices).arg(&part_rows);
            })
        }
    }
}

/// A size as the kernels take it.
fn size(size: usize) -> Result<i32> {
    match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!(
            "metal-candle-kernels: a quantised layer on CUDA has a size of {size}, expected less than 2^31"
        ),
    }
}
