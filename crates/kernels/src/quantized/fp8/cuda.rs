//! Rounding rows on CUDA, and the operands of products of codes, see `kernel.cu`.

use super::{OPERATION, Part};
use crate::backend::cuda::{Array, Cuda, Matrix, Module, Rows, TILE, module};
use crate::backend::rows_and_columns;
use crate::quantized::Quantized;
use candle_core::cuda_backend::cudarc::driver::DeviceRepr;
use candle_core::{DType, Result, Tensor, bail};

static MODULE: Module = module!("fp8");

/// Of one launch.
pub(crate) const MOST_PARTS: usize = 4;

/// Of a block that rounds, at most: two such have a multiprocessor's registers.
const THREADS: usize = 448;

/// Columns that a thread has in registers.
const HELD: usize = 8 * 8;

/// Of a block that rounds short rows, at most, and what a thread of it has in registers.
const SHORT_THREADS: usize = 896;
const SHORT_HELD: usize = 8 * EIGHTS;
const EIGHTS: usize = 4;

/// Rows and columns of a tile that is transposed.
const SIDE: usize = 128;

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct RoundedPart {
    x: u64,
    scales: u64,
    stride: i64,
    first: i32,
    unused: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Rounding {
    parts: [RoundedPart; MOST_PARTS],
    codes: u64,
    scales: u64,
    stride: i64,
    count: i32,
    rows: i32,
    columns: i32,
    eights: i32,
}

// SAFETY: it is plain numbers, laid out as the kernels declare them.
unsafe impl DeviceRepr for Rounding {}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct TransposedPart {
    codes: u64,
    first: i32,
    outer: i32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Transposing {
    parts: [TransposedPart; MOST_PARTS],
    to: u64,
    stride: i64,
    inner: i32,
    unused: i32,
}

// SAFETY: it is plain numbers, laid out as the kernel declares them.
unsafe impl DeviceRepr for Transposing {}

/// Codes in rows that begin at 16 bytes, with their scales.
pub(crate) struct Codes {
    /// Of u8.
    pub(crate) matrix: Matrix,
    pub(crate) columns: usize,
    /// The address of a scale a row, as far as whole tiles of products reach; 0 where there are none.
    pub(crate) scales: u64,
    _memory: Vec<Tensor>,
}

#[cfg(test)]
impl Codes {
    /// The memory of the codes, or of the scales.
    pub(super) fn tensor(&self, index: usize) -> Tensor {
        self._memory[index].clone()
    }
}

/// The codes of a matrix `(out, in)` as they lie, for an `in` that is a multiple of 16, with its rows' scales.
pub(crate) fn codes_of(cuda: &Cuda, weight: &Quantized) -> Result<Codes> {
    let (codes, scales) = parts_of(cuda, weight)?;
    let (_, inner) = weight.shape;
    Ok(Codes {
        matrix: Matrix::new(codes.pointer, DType::U8, inner),
        columns: inner,
        scales: scales.pointer,
        _memory: vec![codes.tensor, scales.tensor],
    })
}

/// A matrix's codes and scales where they begin at 16 bytes.
fn parts_of(cuda: &Cuda, weight: &Quantized) -> Result<(Array, Array)> {
    let Some(scales) = weight.fp8_scales() else {
        bail!(
            "metal-candle-kernels: {OPERATION} on CUDA: a product of codes with a matrix that isn't in e4m3 with a scale a row"
        )
    };
    Ok((aligned(cuda, &weight.codes)?, aligned(cuda, scales)?))
}

fn aligned(cuda: &Cuda, tensor: &Tensor) -> Result<Array> {
    let array = cuda.contiguous(tensor)?;
    if array.pointer.is_multiple_of(16) { Ok(array) } else { cuda.copy(tensor) }
}

/// The columns of matrices `(out, in)` one below the other, as rows `(in, sum of out)` without scales. Their `in` are
/// one multiple of 4, and so is every `out`.
pub(crate) fn transposed(cuda: &Cuda, weights: &[&Quantized]) -> Result<Codes> {
    let inner = weights.first().map_or(0, |weight| weight.shape.1);
    let columns: usize = weights.iter().map(|weight| weight.shape.0).sum();
    let stride = columns.next_multiple_of(16);
    let to = cuda.empty((inner, stride), DType::U8)?;
    let mut first = 0;
    for weights in weights.chunks(MOST_PARTS) {
        let mut all =
            Transposing { to: to.pointer, stride: stride as i64, ..Transposing::default() };
        all.inner = size(inner)?;
        let mut memory = Vec::with_capacity(weights.len());
        for (weight, part) in weights.iter().zip(&mut all.parts) {
            let (codes, _) = parts_of(cuda, weight)?;
            let outer = weight.shape.0;
            *part =
                TransposedPart { codes: codes.pointer, first: size(first)?, outer: size(outer)? };
            first += outer;
            memory.push(codes);
        }
        let most = weights.iter().map(|weight| weight.shape.0).max().unwrap_or(0);
        let (across, down) = (inner.div_ceil(SIDE) as u32, most.div_ceil(SIDE) as u32);
        let grid = (across, down, weights.len() as u32);
        let launch = MODULE.launch(cuda, "transpose_codes", grid, 256, 0)?.overlapping();
        // SAFETY: as the kernel declares them; `memory` holds what the pointers point into.
        unsafe {
            launch.with(|arguments| {
                arguments.arg(&all);
            })?;
        }
    }
    let matrix = Matrix::new(to.pointer, DType::U8, stride);
    Ok(Codes { matrix, columns, scales: 0, _memory: vec![to.tensor] })
}

/// Rows in bf16 or f16, side by side and rounded: matrices of so many columns, each with the address of what its columns
/// are multiplied by first, or 0.
pub(crate) fn round_to_codes(
    cuda: &Cuda,
    rows: usize,
    parts: &[(Matrix, usize, u64)],
) -> Result<Codes> {
    let columns: usize = parts.iter().map(|(_, columns, _)| columns).sum();
    let stride = columns.next_multiple_of(16);
    let codes = cuda.empty((rows, stride), DType::U8)?;
    let scales = cuda.empty(rows.next_multiple_of(TILE), DType::F32)?;
    let mut all = rounding(rows, parts, stride)?;
    (all.codes, all.scales) = (codes.pointer, scales.pointer);
    let is_short = all.eights == 1 && columns <= SHORT_THREADS * SHORT_HELD;
    let dtype = parts.first().map(|(matrix, ..)| matrix.dtype);
    let name = match (dtype, is_short, parts.len()) {
        (Some(DType::BF16), true, 1) => "round_short_bf16",
        (Some(DType::F16), true, 1) => "round_short_f16",
        (Some(DType::BF16), true, _) => "round_short_parts_bf16",
        (Some(DType::F16), true, _) => "round_short_parts_f16",
        (Some(DType::BF16), false, _) => "round_to_codes_bf16",
        (Some(DType::F16), false, _) => "round_to_codes_f16",
        (other, ..) => bail!(
            "metal-candle-kernels: {OPERATION} on CUDA: rows in {other:?} to be rounded to codes, expected BF16 or F16"
        ),
    };
    let shape = match (is_short, all.eights) {
        (true, _) => (SHORT_HELD, SHORT_THREADS),
        (false, 1) => (HELD, THREADS),
        _ => (HELD / 8, THREADS),
    };
    launch(cuda, name, &all, shape, None)?;
    Ok(Codes {
        matrix: Matrix::new(codes.pointer, DType::U8, stride),
        columns,
        scales: scales.pointer,
        _memory: vec![codes.tensor, scales.tensor],
    })
}

pub(super) fn round_to_numbers(parts: &[Part], dtype: DType) -> Result<Tensor> {
    let Some((first, _)) = parts.first() else {
        bail!("metal-candle-kernels: {OPERATION} on CUDA: no rows to be rounded, expected some")
    };
    let cuda = Cuda::of(first)?;
    let (rows, _) = rows_and_columns(OPERATION, "x", first)?;
    let (mut of_all, mut all_scales): (Vec<(Rows, usize)>, Vec<Option<Array>>) = Default::default();
    for (x, scales) in parts {
        let (_, columns) = rows_and_columns(OPERATION, "x", x)?;
        of_all.push((cuda.rows(x)?, columns));
        all_scales.push(scales.map(|scales| cuda.contiguous(scales)).transpose()?);
    }
    let parts: Vec<_> = of_all
        .iter()
        .zip(&all_scales)
        .map(|((rows, columns), scales)| {
            (rows.matrix, *columns, scales.as_ref().map_or(0, |scales| scales.pointer))
        })
        .collect();
    let columns = parts.iter().map(|(_, columns, _)| columns).sum();
    let numbers = cuda.empty((rows, columns), dtype)?;
    let all = rounding(rows, &parts, columns)?;
    let from = first.dtype();
    let name = match (from, dtype) {
        (DType::F32, DType::F32) => "round_to_f32_f32",
        (DType::BF16, DType::F32) => "round_to_f32_bf16",
        (DType::F16, DType::F32) => "round_to_f32_f16",
        (DType::BF16, DType::BF16) => "round_to_same_bf16",
        (DType::F16, DType::F16) => "round_to_same_f16",
        _ => bail!(
            "metal-candle-kernels: {OPERATION} on CUDA: rows in {from:?} to be rounded to {dtype:?}, expected F32, BF16 or F16, to that or F32"
        ),
    };
    launch(&cuda, name, &all, (HELD / 8, THREADS), Some(numbers.pointer))?;
    Ok(numbers.tensor)
}

/// What kernels are told of rows, whose results are `stride` elements apart.
fn rounding(rows: usize, parts: &[(Matrix, usize, u64)], stride: usize) -> Result<Rounding> {
    if parts.len() > MOST_PARTS {
        bail!(
            "metal-candle-kernels: {OPERATION} on CUDA: {} parts of rows to be rounded, expected {MOST_PARTS} at most",
            parts.len()
        )
    }
    let mut all =
        Rounding { count: size(parts.len())?, stride: stride as i64, ..Default::default() };
    let (mut first, mut eights) = (0, true);
    for ((matrix, columns, scales), part) in parts.iter().zip(&mut all.parts) {
        *part = RoundedPart {
            x: matrix.pointer,
            scales: *scales,
            stride: matrix.stride as i64,
            first: size(first)?,
            unused: 0,
        };
        first += columns;
        eights &=
            matrix.has_aligned_rows() && columns.is_multiple_of(8) && scales.is_multiple_of(16);
    }
    (all.rows, all.columns, all.eights) = (size(rows)?, size(first)?, i32::from(eights));
    Ok(all)
}

/// A thread has so many columns in registers, and a block so many threads at most.
fn launch(
    cuda: &Cuda,
    name: &'static str,
    all: &Rounding,
    (of_thread, most): (usize, usize),
    numbers: Option<u64>,
) -> Result<()> {
    let columns = all.columns as usize;
    let threads = columns.div_ceil(of_thread).next_multiple_of(32).clamp(32, most);
    let at_once = 2 * THREADS / threads * cuda.multiprocessors()?;
    let blocks = (all.rows as usize).min(at_once);
    let grid = (blocks as u32, 1, 1);
    let launch = MODULE.launch(cuda, name, grid, threads as u32, 0)?.overlapping();
    // SAFETY: as the kernels declare them; the caller holds what the pointers point into.
    unsafe {
        launch.with(|arguments| {
            arguments.arg(all);
            if let Some(numbers) = &numbers {
                arguments.arg(numbers);
            }
        })
    }
}

/// A size as the kernels take it.
fn size(size: usize) -> Result<i32> {
    match i32::try_from(size) {
        Ok(size) => Ok(size),
        Err(_) => bail!(
            "metal-candle-kernels: rows to be rounded on CUDA have a size of {size}, expected less than 2^31"
        ),
    }
}
