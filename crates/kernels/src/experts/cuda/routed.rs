//! The experts of tokens that the device has chosen, see `kernel.cu`, `packed.cuh`, `sorted.cuh` and `fragments.cuh`.

use super::MODULE;
use crate::backend::cuda::{Array, Cuda, by_dtype, is_recording};
use crate::experts::routed::{
    Described, FEW_TOKENS, Form, Layer, Matrix, OPERATION, Options, Owned,
};
use crate::quantized::cuda::Described as DescribedMatrix;
use candle_core::{DType, Error, Result, Tensor, bail};

const WARP: u32 = 32;
/// Threads of a block of products.
const THREADS: u32 = 256;
/// Rows of a tile, columns of one of units and of outputs, and bytes of its stages, as in `sorted.cuh`.
const TILE_ROWS: usize = 64;
const UNIT_COLUMNS: usize = 64;
const OUTPUT_COLUMNS: usize = 128;
const SORTED_SHARED: u32 = 3 * (64 + 128) * 64 * 2;
/// Rows of a small tile, which packed matrices have, too, and bytes of the stages of theirs, as in `fragments.cuh`.
const SMALL_TILE_ROWS: usize = 32;
const FRAGMENTS_SHARED: u32 = 3 * (16 << 10);
/// What a single row is filled up to, and bytes of the sums of warps that share its depth.
const SINGLE_DEPTH: usize = 512;
const SUMS_SHARED: u32 = 8 << 10;
/// Choices of an expert, on average, up to which each choice's row is multiplied by itself, by matrices as they are and by packed
/// ones, and up to which these are multiplied by small tiles.
const ONE_BY_ONE: f64 = 0.66;
const PACKED_ONE_BY_ONE: f64 = 0.4;
const IN_SMALL_TILES: f64 = 24.0;

/// How rows are multiplied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    /// Each choice's row by itself.
    OneByOne,
    /// By tiles of so many rows of an expert.
    Tiles(usize),
}

#[cfg(test)]
thread_local! {
    /// For tests and measurements.
    pub(crate) static OTHER_WAY: std::cell::Cell<Option<Way>> = const { std::cell::Cell::new(None) };
}

impl Way {
    /// Of so many choices for a layer's experts.
    fn of(layer: &Layer, choices: usize) -> Self {
        if layer.most <= FEW_TOKENS {
            return Self::OneByOne;
        }
        #[cfg(test)]
        if let Some(way) = OTHER_WAY.get() {
            return way;
        }
        let of_each = choices as f64 / layer.experts.len() as f64;
        let is_packed = layer.forms.iter().all(|form| *form != Form::Dense);
        let one_by_one = if is_packed { PACKED_ONE_BY_ONE } else { ONE_BY_ONE };
        if of_each <= one_by_one {
            Self::OneByOne
        } else if is_packed && of_each <= IN_SMALL_TILES {
            Self::Tiles(SMALL_TILE_ROWS)
        } else {
            Self::Tiles(TILE_ROWS)
        }
    }
}

/// The kernel `$name`, in pieces, for matrices of a form and rows of a dtype.
macro_rules! by_form {
    ($($name:literal)+, $form:literal, $dtype:expr) => {
        match $dtype {
            DType::BF16 => concat!($($name,)+ $form, "_bf16"),
            DType::F16 => concat!($($name,)+ $form, "_f16"),
            _ => concat!($($name,)+ $form, "_f32"),
        }
    };
    ($($name:literal)+, $form:expr, $dtype:expr) => {
        match $form {
            Form::Dense => by_form!($($name)+, "", $dtype),
            Form::Mxfp4 => by_form!($($name)+, "_e2m1", $dtype),
            Form::Table => by_form!($($name)+, "_table", $dtype),
            Form::E4m3 => by_form!($($name)+, "_e4m3", $dtype),
            Form::Integers { bits: 2 } => by_form!($($name)+, "_2_bits", $dtype),
            Form::Integers { bits: 3 } => by_form!($($name)+, "_3_bits", $dtype),
            Form::Integers { bits: 4 } => by_form!($($name)+, "_4_bits", $dtype),
            Form::Integers { bits: 5 } => by_form!($($name)+, "_5_bits", $dtype),
            Form::Integers { bits: 6 } => by_form!($($name)+, "_6_bits", $dtype),
            Form::Integers { .. } => by_form!($($name)+, "_8_bits", $dtype),
            Form::TableBlocks => by_form!($($name)+, "_table_blocks", $dtype),
            Form::Blocks { bits: 2 } => by_form!($($name)+, "_2_bits_blocks", $dtype),
            Form::Blocks { bits: 3 } => by_form!($($name)+, "_3_bits_blocks", $dtype),
            Form::Blocks { bits: 4 } => by_form!($($name)+, "_4_bits_blocks", $dtype),
            Form::Blocks { bits: 5 } => by_form!($($name)+, "_5_bits_blocks", $dtype),
            Form::Blocks { .. } => by_form!($($name)+, "_6_bits_blocks", $dtype),
        }
    };
}

/// A kernel, columns of a block of it, and bytes of its shared memory.
struct Kernel {
    name: &'static str,
    columns: usize,
    shared: u32,
}

/// The kernel of units or of outputs for a layer's matrices of a form, in tiles of so many rows or one by one; a block has
/// `$columns` of matrices that lie as they are, in tiles.
macro_rules! kernel_of {
    ($what:literal, $columns:expr, $layer:expr, $form:expr, $tile:expr, $inner:expr) => {{
        let dtype = $layer.dtype;
        match $tile {
            tile if $form != Form::Dense && $layer.most > FEW_TOKENS => {
                let names = [
                    by_form!("experts_packed_" $what "_1", $form, dtype),
                    by_form!("experts_packed_" $what "_32", $form, dtype),
                    by_form!("experts_packed_" $what "_64", $form, dtype),
                ];
                Self::of_packed(names, tile, $inner)
            }
            Some(_) => {
                let name = by_form!("experts_sorted_" $what, "", dtype);
                Self { name, columns: $columns, shared: SORTED_SHARED }
            }
            None => Self::of_rows(by_form!("experts_" $what, $form, dtype), dtype, $inner),
        }
    }};
}

impl Kernel {
    fn of_units(layer: &Layer, form: Form, tile: Option<usize>, inner: usize) -> Self {
        kernel_of!("unit", UNIT_COLUMNS, layer, form, tile, inner)
    }

    fn of_outputs(layer: &Layer, form: Form, tile: Option<usize>, inner: usize) -> Self {
        kernel_of!("down", OUTPUT_COLUMNS, layer, form, tile, inner)
    }

    /// Of packed matrices, as in `fragments.cuh`: for single rows, and tiles of 32 and of 64.
    fn of_packed(
        [one, small, large]: [&'static str; 3],
        tile: Option<usize>,
        inner: usize,
    ) -> Self {
        let (name, columns, shared) = match tile {
            None => (one, 32, SUMS_SHARED.max(inner.next_multiple_of(SINGLE_DEPTH) as u32 * 2)),
            Some(SMALL_TILE_ROWS) => (small, 64, FRAGMENTS_SHARED),
            Some(_) => (large, 128, FRAGMENTS_SHARED),
        };
        Self { name, columns, shared }
    }

    /// Of rows one by one, as in `kernel.cu`.
    fn of_rows(name: &'static str, dtype: DType, inner: usize) -> Self {
        Self { name, columns: 16, shared: (inner * dtype.size_in_bytes()) as u32 }
    }
}

pub(crate) fn layer(
    experts: Vec<Owned>,
    dtype: DType,
    Described { forms, sizes, most }: Described,
) -> Result<Option<Layer>> {
    let Some(Owned { weights: [first, ..], .. }) = experts.first() else { return Ok(None) };
    let device = match first {
        Matrix::Dense(weight) => weight.device(),
        Matrix::Packed(packed) => packed.device(),
    };
    let cuda = Cuda::on(device)?;
    // Where something doesn't lie as kernels read it, none does.
    let address = |tensor: &Tensor, alignment: u64| {
        let pointer = cuda.strided(tensor)?.pointer;
        let fits = tensor.is_contiguous() && pointer.is_multiple_of(alignment);
        Ok::<_, candle_core::Error>(fits.then_some(pointer))
    };
    let table = |layers: &[usize]| -> Result<Option<Tensor>> {
        let mut words: Vec<u32> = Vec::new();
        for expert in &experts {
            for layer in layers {
                match &expert.weights[*layer] {
                    Matrix::Dense(weight) => match address(weight, 16)? {
                        Some(pointer) => words.extend([pointer as u32, (pointer >> 32) as u32]),
                        None => return Ok(None),
                    },
                    Matrix::Packed(packed) => match DescribedMatrix::new(&cuda, packed)? {
                        Some(described) => words.extend(described.words()),
                        None => return Ok(None),
                    },
                }
            }
        }
        Ok(Some(Tensor::from_slice(&words, words.len(), device)?))
    };
    let (Some(into), Some(back)) = (table(&[0, 1])?, table(&[2])?) else { return Ok(None) };
    let mut addresses = Vec::with_capacity(3 * experts.len());
    for bias in experts.iter().flat_map(|expert| &expert.biases) {
        match bias.as_ref().map_or(Ok(Some(0)), |bias| address(bias, 2))? {
            Some(pointer) => addresses.push(pointer as i64),
            None => return Ok(None),
        }
    }
    let has_biases = addresses.iter().any(|address| *address != 0);
    let biases =
        has_biases.then(|| Tensor::from_slice(&addresses, addresses.len(), device)).transpose()?;
    Ok(Some(Layer { experts, dtype, forms, sizes, most, tables: [into, back], biases }))
}

pub(crate) fn forward(
    layer: &Layer,
    x: &Tensor,
    logits: &Tensor,
    options: Options,
) -> Result<Tensor> {
    let cuda = Cuda::of(x)?;
    let (tokens, choices) = (x.dim(0)?, x.dim(0)? * options.active);
    if choices == 0 {
        return Ok(cuda.zeros((tokens, layer.sizes[0]), layer.dtype)?.tensor);
    }
    if i32::try_from(choices).is_err() {
        bail!("metal-candle-kernels: {OPERATION}: {choices} choices are too many for one launch")
    }
    let given = Given::new(&cuda, layer, x)?;
    let chosen = Chosen::new(&cuda, logits, options)?;
    let sorted = match Way::of(layer, choices) {
        Way::OneByOne => None,
        Way::Tiles(rows) => Some(given.sorted(&chosen, options, rows)?),
    };
    let y = given.outputs(&chosen, sorted.as_ref(), options)?;
    let places = match sorted {
        Some(sorted) => sorted.places.tensor,
        None => chosen.experts.tensor.get(1)?,
    };
    let places = places.reshape((tokens, options.active))?;
    super::combine(&y.tensor, &chosen.shares.tensor, &places)
}

/// Which experts tokens have.
struct Chosen {
    /// `(2, choices)`: the experts, and the choices in their order.
    experts: Array,
    /// `(tokens, active)`
    shares: Array,
}

impl Chosen {
    fn new(cuda: &Cuda, logits: &Tensor, options: Options) -> Result<Self> {
        let (tokens, count) = logits.dims2()?;
        let Options { active, normalized, .. } = options;
        let logits = cuda.contiguous(logits)?;
        let experts = cuda.empty((2, tokens * active), DType::U32)?;
        let shares = cuda.empty((tokens, active), DType::F32)?;
        let name = by_dtype!("experts_route", logits.dtype)?;
        let launch = MODULE.launch(cuda, name, (tokens as u32, 1, 1), WARP, 0)?.overlapping();
        let (count, active, normalized) = (count as i32, active as i32, i32::from(normalized));
        // SAFETY: there are (tokens, count) logits, two numbers for each choice, and a share of each.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&logits.pointer).arg(&experts.pointer).arg(&shares.pointer);
                arguments.arg(&count).arg(&active).arg(&normalized);
            })?;
        }
        Ok(Self { experts, shares })
    }
}

/// Choices in the order of experts.
struct Sorted {
    /// `(choices)`: of each place the token, and of each choice the place.
    tokens: Array,
    places: Array,
    /// `(tiles, 4)`
    items: Array,
    tiles: usize,
    /// Of a tile.
    rows: usize,
}

/// A layer and its input, as kernels take them.
struct Given<'a> {
    cuda: &'a Cuda<'a>,
    layer: &'a Layer,
    x: Array,
    to_units: Array,
    to_outputs: Array,
    biases: Option<Array>,
}

impl<'a> Given<'a> {
    fn new(cuda: &'a Cuda<'a>, layer: &'a Layer, x: &Tensor) -> Result<Self> {
        let mut x = cuda.contiguous(x)?;
        if !x.pointer.is_multiple_of(16) {
            x = cuda.copy(&x.tensor)?;
        }
        let [to_units, to_outputs] = layer.tables.each_ref().map(|table| cuda.contiguous(table));
        let biases = layer.biases.as_ref().map(|biases| cuda.contiguous(biases)).transpose()?;
        // The tables have only their addresses.
        if is_recording() {
            for expert in &layer.experts {
                for weight in &expert.weights {
                    match weight {
                        Matrix::Dense(weight) => drop(cuda.strided(weight)?),
                        Matrix::Packed(packed) => drop(DescribedMatrix::new(cuda, packed)?),
                    }
                }
                for bias in expert.biases.iter().flatten() {
                    cuda.strided(bias)?;
                }
            }
        }
        Ok(Self { cuda, layer, x, to_units: to_units?, to_outputs: to_outputs?, biases })
    }

    fn biases(&self) -> u64 {
        self.biases.as_ref().map_or(0, |biases| biases.pointer)
    }

    /// The choices in the order of experts, in tiles of so many rows.
    fn sorted(&self, chosen: &Chosen, options: Options, rows: usize) -> Result<Sorted> {
        let Self { cuda, layer, .. } = self;
        let (choices, count) = (chosen.experts.tensor.dim(1)?, layer.experts.len());
        // Of each expert one tile may not be full.
        let most = choices / rows + count.min(choices);
        let Ok(tiles) = u16::try_from(most) else {
            bail!(
                "metal-candle-kernels: {OPERATION}: {choices} choices are too many for one launch"
            )
        };
        let (tokens, places) = (cuda.empty(choices, DType::U32)?, cuda.empty(choices, DType::U32)?);
        let items = cuda.empty((most, 4), DType::U32)?;
        let launch = MODULE.launch(cuda, "experts_sort", (count as u32, 1, 1), THREADS, 0)?;
        let launch = launch.overlapping();
        let numbers = [choices, options.active, count, most, rows].map(|number| number as i32);
        // SAFETY: there is a number for each choice in all three, and so many items.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&chosen.experts.pointer).arg(&tokens.pointer).arg(&places.pointer);
                arguments.arg(&items.pointer);
                for number in &numbers {
                    arguments.arg(number);
                }
            })?;
        }
        Ok(Sorted { tokens, places, items, tiles: tiles.into(), rows })
    }

    /// What each choice gives, `(choices, hidden)`, in their order or in that of experts.
    fn outputs(&self, chosen: &Chosen, sorted: Option<&Sorted>, options: Options) -> Result<Array> {
        let Self { cuda, layer, x, to_units, to_outputs, .. } = self;
        let Layer { dtype, forms: [into, back], sizes: [hidden, width], .. } = layer;
        let choices = chosen.experts.tensor.dim(1)?;
        let rows = sorted.map(|sorted| sorted.rows);
        let launch = |kernel: Kernel, columns: usize| {
            let tiles = sorted.map_or(choices, |sorted| sorted.tiles) as u32;
            let grid = (columns.div_ceil(kernel.columns) as u32, tiles, 1);
            Ok::<_, Error>(
                MODULE.launch(cuda, kernel.name, grid, THREADS, kernel.shared)?.overlapping(),
            )
        };
        let (inner, outer, active) = (*hidden as i32, *width as i32, options.active as i32);
        let (code, biases) = (options.activation.code() as i32, self.biases());
        let [items, tokens] = match sorted {
            Some(sorted) => [sorted.items.pointer, sorted.tokens.pointer],
            None => [0, 0],
        };
        let unit = cuda.empty((choices, *width), *dtype)?;
        // SAFETY: x has (tokens, hidden) elements, the unit (choices, width), and the tables what says where the weights and
        // biases of all experts lie that are chosen. The tokens of sorted choices are those of x.
        unsafe {
            launch(Kernel::of_units(layer, *into, rows, *hidden), *width)?.with(|arguments| {
                arguments.arg(&x.pointer).arg(&to_units.pointer).arg(&biases).arg(&items);
                arguments.arg(&tokens).arg(&chosen.experts.pointer).arg(&unit.pointer);
                arguments.arg(&inner).arg(&outer).arg(&active).arg(&code);
            })?;
        }
        let y = cuda.empty((choices, *hidden), *dtype)?;
        // SAFETY: as above; y has (choices, hidden) elements.
        unsafe {
            launch(Kernel::of_outputs(layer, *back, rows, *width), *hidden)?.with(|arguments| {
                arguments.arg(&unit.pointer).arg(&to_outputs.pointer).arg(&biases).arg(&items);
                arguments.arg(&chosen.experts.pointer).arg(&y.pointer).arg(&outer).arg(&inner);
            })?;
        }
        Ok(y)
    }
}
