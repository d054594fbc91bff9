//! Dense matrices in fewer bits, as the programs round them whose files have these formats: a file a family.
//!
//! Where a format's program divides, multiplies by the reciprocal, or computes in f16, so is it done here: codes and
//! scales equal theirs bit for bit.

mod bitsandbytes;
mod ggml;
mod mlx;
mod rows;

use super::{OPERATION, Quantized};
use crate::backend::cpu::{Input, PARALLEL_CHUNK, for_each_chunk2};
use crate::backend::{require_rank, require_together};
use candle_core::{DType, Device, Result, Tensor, bail};
use std::sync::atomic::{AtomicBool, Ordering};

pub use bitsandbytes::dynamic_map;
pub use rows::spread_blocks;

/// A format that dense matrices can be brought into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// bitsandbytes' NF4 in blocks of so many elements, an even number; 64 as a rule.
    Nf4 {
        /// Elements of a block.
        block: usize,
        /// Whether scales are quantised too ("double quantisation").
        nested: bool,
    },
    /// bitsandbytes' FP4.
    Fp4 {
        /// Elements of a block.
        block: usize,
        /// Whether scales are quantised too.
        nested: bool,
    },
    /// MLX's integers with a scale and an offset a group.
    Affine {
        /// 2, 3, 4, 5, 6 or 8.
        bits: usize,
        /// 32, 64 or 128, which divides a row.
        group: usize,
    },
    /// MLX's `mxfp4`: e2m1 with e8m0 scales of 32.
    Mxfp4,
    /// MLX's `mxfp8`: e4m3 with e8m0 scales of 32.
    Mxfp8,
    /// MLX's `nvfp4`: e2m1 with e4m3 scales of 16.
    Nvfp4,
    /// ggml's Q4_0.
    Q4_0,
    /// ggml's Q4_1.
    Q4_1,
    /// ggml's Q5_0, which llama.cpp has in place of Q4_K where rows aren't multiples of 256.
    Q5_0,
    /// ggml's Q5_1, so in place of Q5_K.
    Q5_1,
    /// ggml's Q8_0, so in place of Q6_K.
    Q8_0,
    /// ggml's Q4_K.
    Q4K,
    /// ggml's Q5_K.
    Q5K,
    /// ggml's Q6_K.
    Q6K,
    /// e4m3 with an f32 scale a row.
    Fp8Rows,
    /// e4m3 with an f32 scale for 128 x 128 elements.
    Fp8Blocks,
    /// 8-bit integers with an f32 scale a row.
    Int8Rows,
}

/// Brings `x` `(out, in)`, f32, bf16 or f16 on the CPU, into a format.
///
/// # Errors
/// When `x` is another tensor, has numbers that aren't finite, or a size that the format cannot have.
pub fn quantize(x: &Tensor, format: Format) -> Result<Quantized> {
    let source = Source::new(x)?;
    match format {
        Format::Nf4 { block, nested } => bitsandbytes::nf4(&source, block, nested),
        Format::Fp4 { block, nested } => bitsandbytes::fp4(&source, block, nested),
        Format::Affine { bits, group } => mlx::affine(&source, bits, group),
        Format::Mxfp4 => mlx::mxfp4(&source),
        Format::Mxfp8 => mlx::mxfp8(&source),
        Format::Nvfp4 => mlx::nvfp4(&source),
        Format::Q4_0 => ggml::q4_0(&source),
        Format::Q4_1 => ggml::q4_1(&source),
        Format::Q5_0 => ggml::q5_0(&source),
        Format::Q5_1 => ggml::q5_1(&source),
        Format::Q8_0 => ggml::q8_0(&source),
        Format::Q4K => ggml::q4_k(&source),
        Format::Q5K => ggml::q5_k(&source),
        Format::Q6K => ggml::q6_k(&source),
        Format::Fp8Rows => rows::fp8_rows(&source),
        Format::Fp8Blocks => rows::fp8_blocks(&source),
        Format::Int8Rows => rows::int8_rows(&source),
    }
}

/// A dense matrix to be read.
struct Source {
    shape: (usize, usize),
    dtype: DType,
    input: Input,
}

impl Source {
    fn new(x: &Tensor) -> Result<Self> {
        require_rank(OPERATION, "x", x, 2, "(out, in)")?;
        require_together(OPERATION, &[x])?;
        if !x.device().is_cpu() {
            bail!("metal-candle-kernels: {OPERATION}: x is on a GPU, expected it on the CPU")
        }
        if !matches!(x.dtype(), DType::F32 | DType::BF16 | DType::F16) {
            bail!(
                "metal-candle-kernels: {OPERATION}: x is {:?}, expected F32, BF16 or F16",
                x.dtype()
            )
        }
        if x.elem_count() == 0 {
            bail!(
                "metal-candle-kernels: {OPERATION}: x has shape {:?}, expected at least one element",
                x.dims()
            )
        }
        Ok(Self { shape: x.dims2()?, dtype: x.dtype(), input: Input::contiguous(x)? })
    }

    fn elements(&self) -> usize {
        self.shape.0 * self.shape.1
    }

    /// An error when a row isn't made of whole groups.
    fn require_groups(&self, group: usize, format: &str) -> Result<()> {
        if !self.shape.1.is_multiple_of(group) {
            bail!(
                "metal-candle-kernels: {OPERATION}: rows have {} elements, expected a multiple of {group} for {format}",
                self.shape.1
            )
        }
        Ok(())
    }

    /// Lets `quantize(index, numbers, codes)` turn each unit of `unit` neighbours into a code a number and whatever
    /// else there is to keep of it. Gives the codes as a stream of `bits` bits each. The last unit may be
    /// shorter.
    fn units<S: Clone + Default + Send>(
        &self,
        unit: usize,
        bits: usize,
        quantize: impl Fn(usize, &[f32], &mut [u8]) -> S + Sync,
    ) -> Result<(Tensor, Vec<S>)> {
        let elements = self.elements();
        // Eight units at least, so that every task's codes begin at a byte.
        let units = PARALLEL_CHUNK.div_ceil(unit).next_multiple_of(8);
        let (count, bytes) = (units * unit, units * unit * bits / 8);
        let mut codes = vec![0u8; (elements * bits).div_ceil(8)];
        let mut kept = vec![S::default(); elements.div_ceil(unit)];
        let read = self.input.read();
        let values = read.values::<f32>()?;
        let finite = AtomicBool::new(true);
        for_each_chunk2(
            &mut codes,
            bytes,
            &mut kept,
            units,
            #[inline(always)]
            |task, codes, kept| {
                let start = task * count;
                let mut numbers = vec![0f32; count.min(elements - start)];
                values.read(start, &mut numbers);
                if !numbers.iter().all(|number| number.is_finite()) {
                    finite.store(false, Ordering::Relaxed);
                    return;
                }
                let mut wide = vec![0u8; numbers.len()];
                let parts = numbers.chunks(unit).zip(wide.chunks_mut(unit)).zip(kept);
                for (index, ((numbers, codes), kept)) in parts.enumerate() {
                    *kept = quantize(task * units + index, numbers, codes);
                }
                pack(&wide, bits, codes);
            },
        );
        if !finite.into_inner() {
            bail!("metal-candle-kernels: {OPERATION}: x has numbers that are NaN or infinite")
        }
        Ok((bytes_tensor(codes)?, kept))
    }
}

/// Codes of `bits` bits, the first in the lowest bits of the first byte.
fn pack(codes: &[u8], bits: usize, out: &mut [u8]) {
    for (codes, out) in codes.chunks(8).zip(out.chunks_mut(bits)) {
        let mut word = 0u64;
        for (index, code) in codes.iter().enumerate() {
            word |= u64::from(*code) << (index * bits);
        }
        out.copy_from_slice(&word.to_le_bytes()[..out.len()]);
    }
}

fn bytes_tensor(bytes: Vec<u8>) -> Result<Tensor> {
    let count = bytes.len();
    Tensor::from_vec(bytes, count, &Device::Cpu)
}

fn f32_tensor(numbers: Vec<f32>) -> Result<Tensor> {
    let count = numbers.len();
    Tensor::from_vec(numbers, count, &Device::Cpu)
}

/// The largest magnitude.
#[inline(always)]
fn largest(numbers: &[f32]) -> f32 {
    numbers.iter().fold(0.0, |most, number| most.max(number.abs()))
}

/// The nearest 8-bit float with 4 bits of exponent and 3 of mantissa, of two the even one; 448 beyond that.
#[inline(always)]
pub(super) fn to_e4m3(x: f32) -> u8 {
    // One unit of this number is 2^-9, the unit of e4m3's subnormal numbers.
    const ALIGN: u32 = 141 << 23;
    let bits = x.to_bits();
    let magnitude = bits & 0x7fff_ffff;
    let subnormal = (f32::from_bits(magnitude) + f32::from_bits(ALIGN)).to_bits() - ALIGN;
    let odd = magnitude >> 20 & 1;
    let normal = magnitude.wrapping_sub(120 << 23).wrapping_add(0x7ffff + odd) >> 20;
    let finite = if magnitude < 121 << 23 { subnormal } else { normal };
    let code = if magnitude >= 448f32.to_bits() { 0x7e } else { finite };
    code as u8 | (bits >> 24) as u8 & 0x80
}
