//! The experts of a few tokens, see `kernel.cu` and `packed.cuh`.

use super::MODULE;
use crate::backend::cuda::{Cuda, by_dtype, is_recording};
use crate::experts::few::{Form, Layer, Matrix, Options, Owned};
use crate::quantized::cuda::Described;
use candle_core::{DType, Result, Tensor};

const WARP: u32 = 32;
/// Threads of a block of products, and columns that it has, as in `kernel.cu`.
const THREADS: u32 = 256;
const COLUMNS: usize = 16;

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
    (forms, sizes): ([Form; 2], [usize; 2]),
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
                    Matrix::Packed(packed) => match Described::new(&cuda, packed)? {
                        Some(described) => words.extend(described.words()),
                        None => return Ok(None),
                    },
                }
            }
        }
        Ok(Some(Tensor::from_vec(words.clone(), words.len(), device)?))
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
    let biases = has_biases
        .then(|| Tensor::from_vec(addresses.clone(), addresses.len(), device))
        .transpose()?;
    Ok(Some(Layer { experts, dtype, forms, sizes, tables: [into, back], biases }))
}

pub(crate) fn forward(
    layer: &Layer,
    x: &Tensor,
    logits: &Tensor,
    options: Options,
) -> Result<Tensor> {
    let Layer { experts, dtype, forms: [into, back], sizes: [hidden, width], tables, biases } =
        layer;
    let Options { active, normalized, activation } = options;
    let cuda = Cuda::of(x)?;
    let tokens = x.dim(0)?;
    let (x, logits) = (cuda.contiguous(x)?, cuda.contiguous(logits)?);
    let [to_units, to_outputs] = tables.each_ref().map(|table| cuda.contiguous(table));
    let (to_units, to_outputs) = (to_units?, to_outputs?);
    let biases = biases.as_ref().map(|biases| cuda.contiguous(biases)).transpose()?;
    let biases = biases.as_ref().map_or(0, |biases| biases.pointer);
    // The tables have only their addresses.
    if is_recording() {
        for expert in experts {
            for weight in &expert.weights {
                match weight {
                    Matrix::Dense(weight) => drop(cuda.strided(weight)?),
                    Matrix::Packed(packed) => drop(Described::new(&cuda, packed)?),
                }
            }
            for bias in expert.biases.iter().flatten() {
                cuda.strided(bias)?;
            }
        }
    }
    let choices = tokens * active;
    if choices == 0 {
        return Ok(cuda.zeros((tokens, *hidden), *dtype)?.tensor);
    }
    let chosen = cuda.empty((2, choices), DType::U32)?;
    let shares = cuda.empty((tokens, active), DType::F32)?;
    let name = by_dtype!("experts_route", logits.dtype)?;
    let launch = MODULE.launch(&cuda, name, (tokens as u32, 1, 1), WARP, 0)?.overlapping();
    let (count, active, normalized) = (experts.len() as i32, active as i32, i32::from(normalized));
    // SAFETY: there are (tokens, count) logits, two numbers for each choice, and a share of each.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&logits.pointer).arg(&chosen.pointer).arg(&shares.pointer);
            arguments.arg(&count).arg(&active).arg(&normalized);
        })?;
    }
    let size = dtype.size_in_bytes();
    let grid = |columns: usize| (columns.div_ceil(COLUMNS) as u32, choices as u32, 1);
    let unit = cuda.empty((choices, *width), *dtype)?;
    let name = by_form!("experts_unit", into, *dtype);
    let launch = MODULE.launch(&cuda, name, grid(*width), THREADS, (hidden * size) as u32)?;
    let launch = launch.overlapping();
    let (inner, outer, code) = (*hidden as i32, *width as i32, activation.code() as i32);
    // SAFETY: x has (tokens, hidden) elements, the unit (choices, width), and the tables what says where the weights and biases
    // of all experts lie that are chosen.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&x.pointer).arg(&to_units.pointer).arg(&biases).arg(&chosen.pointer);
            arguments.arg(&unit.pointer).arg(&inner).arg(&outer).arg(&active).arg(&code);
        })?;
    }
    let y = cuda.empty((choices, *hidden), *dtype)?;
    let name = by_form!("experts_down", back, *dtype);
    let launch = MODULE.launch(&cuda, name, grid(*hidden), THREADS, (width * size) as u32)?;
    let launch = launch.overlapping();
    // SAFETY: as above; y has (choices, hidden) elements.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(&unit.pointer).arg(&to_outputs.pointer).arg(&biases);
            arguments.arg(&chosen.pointer).arg(&y.pointer).arg(&outer).arg(&inner);
        })?;
    }
    let places = chosen.tensor.get(1)?.reshape((tokens, options.active))?;
    super::combine(&y.tensor, &shares.tensor, &places)
}
