//! The experts of tokens that the device has chosen, see `kernel.cu`, `packed.cuh` and `sorted.cuh`.

use super::MODULE;
use crate::backend::cuda::{Array, Cuda, by_dtype, is_recording};
use crate::experts::routed::{
    Described, FEW_TOKENS, Form, Layer, Matrix, OPERATION, Options, Owned,
};
use crate::quantized::cuda::Described as DescribedMatrix;
use candle_core::{DType, Result, Tensor, bail};

const WARP: u32 = 32;
/// Threads of a block of products, and columns that it has, as in `kernel.cu`.
const THREADS: u32 = 256;
const COLUMNS: usize = 16;
/// Rows of a tile, and columns of one of units and of outputs, as in `sorted.cuh`.
const TILE_ROWS: usize = 64;
const UNIT_COLUMNS: usize = 64;
const OUTPUT_COLUMNS: usize = 128;
const TILES_SHARED: u32 = 3 * (64 + 128) * 64 * 2;
/// Choices of an expert, on average, up to which each choice's row is multiplied by itself, by matrices as they are, and by packed
/// ones, whose tiles take longer to unpack than to read.
const ONE_BY_ONE: f64 = 0.66;
const PACKED_ONE_BY_ONE: f64 = 1.6;

#[cfg(test)]
thread_local! {
    /// For measurements: how many tokens' rows are multiplied by themselves.
    pub(crate) static OTHER_ONE_BY_ONE: std::cell::Cell<Option<usize>> =
        const { std::cell::Cell::new(None) };
}

/// The kernel `$name` for matrices of a form and rows of a dtype.
macro_rules! by_form {
    ($name:literal, $form:literal, $dtype:expr) => {
        match $dtype {
            DType::BF16 => concat!($name, $form, "_bf16"),
            DType::F16 => concat!($name, $form, "_f16"),
            _ => concat!($name, $form, "_f32"),
        }
    };
    ($name:literal, $form:expr, $dtype:expr) => {
        match $form {
            Form::Dense => by_form!($name, "", $dtype),
            Form::Table => by_form!($name, "_table", $dtype),
            Form::E4m3 => by_form!($name, "_e4m3", $dtype),
            Form::Integers { bits: 2 } => by_form!($name, "_2_bits", $dtype),
            Form::Integers { bits: 3 } => by_form!($name, "_3_bits", $dtype),
            Form::Integers { bits: 4 } => by_form!($name, "_4_bits", $dtype),
            Form::Integers { bits: 5 } => by_form!($name, "_5_bits", $dtype),
            Form::Integers { bits: 6 } => by_form!($name, "_6_bits", $dtype),
            Form::Integers { .. } => by_form!($name, "_8_bits", $dtype),
        }
    };
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
    let is_packed = layer.forms.iter().any(|form| *form != Form::Dense);
    let most_of_each = if is_packed { PACKED_ONE_BY_ONE } else { ONE_BY_ONE };
    let is_one_by_one = choices as f64 <= most_of_each * layer.experts.len() as f64;
    #[cfg(test)]
    let is_one_by_one = OTHER_ONE_BY_ONE.get().map_or(is_one_by_one, |most| tokens <= most);
    let (y, places) = match !is_one_by_one && layer.most > FEW_TOKENS {
        true => given.sorted(&chosen, options)?,
        false => (given.one_by_one(&chosen, options)?, chosen.experts.tensor.get(1)?),
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

    /// What each choice gives, `(choices, hidden)`.
    fn one_by_one(&self, chosen: &Chosen, options: Options) -> Result<Array> {
        let Self { cuda, layer, x, to_units, to_outputs, .. } = self;
        let Layer { dtype, forms: [into, back], sizes: [hidden, width], .. } = layer;
        let choices = chosen.experts.tensor.dim(1)?;
        let size = dtype.size_in_bytes();
        let grid = |columns: usize| (columns.div_ceil(COLUMNS) as u32, choices as u32, 1);
        let unit = cuda.empty((choices, *width), *dtype)?;
        let name = by_form!("experts_unit", into, *dtype);
        let launch = MODULE.launch(cuda, name, grid(*width), THREADS, (hidden * size) as u32)?;
        let launch = launch.overlapping();
        let (inner, outer, active) = (*hidden as i32, *width as i32, options.active as i32);
        let (code, biases) = (options.activation.code() as i32, self.biases());
        // SAFETY: x has (tokens, hidden) elements, the unit (choices, width), and the tables what says where the weights and
        // biases of all experts lie that are chosen.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&x.pointer).arg(&to_units.pointer).arg(&biases);
                arguments.arg(&chosen.experts.pointer).arg(&unit.pointer).arg(&inner).arg(&outer);
                arguments.arg(&active).arg(&code);
            })?;
        }
        let y = cuda.empty((choices, *hidden), *dtype)?;
        let name = by_form!("experts_down", back, *dtype);
        let launch = MODULE.launch(cuda, name, grid(*hidden), THREADS, (width * size) as u32)?;
        let launch = launch.overlapping();
        // SAFETY: as above; y has (choices, hidden) elements.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&unit.pointer).arg(&to_outputs.pointer).arg(&biases);
                arguments.arg(&chosen.experts.pointer).arg(&y.pointer).arg(&outer).arg(&inner);
            })?;
        }
        Ok(y)
    }

    /// What each choice gives, `(choices, hidden)` in the order of experts, and where each choice's row is.
    fn sorted(&self, chosen: &Chosen, options: Options) -> Result<(Array, Tensor)> {
        let Self { cuda, layer, x, to_units, to_outputs, .. } = self;
        let Layer { dtype, forms: [into, back], sizes: [hidden, width], .. } = layer;
        let (choices, count) = (chosen.experts.tensor.dim(1)?, layer.experts.len());
        // Of each expert one tile may not be full.
        let most = choices / TILE_ROWS + count.min(choices);
        let (tokens, places) = (cuda.empty(choices, DType::U32)?, cuda.empty(choices, DType::U32)?);
        let items = cuda.empty((most, 4), DType::U32)?;
        let launch = MODULE.launch(cuda, "experts_sort", (count as u32, 1, 1), THREADS, 0)?;
        let launch = launch.overlapping();
        let numbers = [choices as i32, options.active as i32, count as i32, most as i32];
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
        let Ok(tiles) = u16::try_from(most) else {
            bail!(
                "metal-candle-kernels: {OPERATION}: {choices} choices are too many for one launch"
            )
        };
        let grid = |columns: usize, of_tile: usize| {
            (columns.div_ceil(of_tile) as u32, u32::from(tiles), 1)
        };
        let (code, biases) = (options.activation.code() as i32, self.biases());
        let (inner, outer) = (*hidden as i32, *width as i32);
        let unit = cuda.empty((choices, *width), *dtype)?;
        let name = by_form!("experts_sorted_unit", into, *dtype);
        let launch =
            MODULE.launch(cuda, name, grid(*width, UNIT_COLUMNS), THREADS, TILES_SHARED)?;
        // SAFETY: as in `one_by_one`; the tokens are those of x.
        unsafe {
            launch.overlapping().with(|arguments| {
                arguments.arg(&x.pointer).arg(&to_units.pointer).arg(&biases).arg(&items.pointer);
                arguments.arg(&tokens.pointer).arg(&unit.pointer).arg(&inner).arg(&outer);
                arguments.arg(&code);
            })?;
        }
        let y = cuda.empty((choices, *hidden), *dtype)?;
        let name = by_form!("experts_sorted_down", back, *dtype);
        let launch =
            MODULE.launch(cuda, name, grid(*hidden, OUTPUT_COLUMNS), THREADS, TILES_SHARED)?;
        // SAFETY: as above.
        unsafe {
            launch.overlapping().with(|arguments| {
                arguments.arg(&unit.pointer).arg(&to_outputs.pointer).arg(&biases);
                arguments.arg(&items.pointer).arg(&y.pointer).arg(&outer).arg(&inner);
            })?;
        }
        Ok((y, places.tensor))
    }
}
