//! Frozen matrices in 2 to 8 bits a number: what the 4- and 8-bit formats of bitsandbytes, MLX, GGUF and
//! others have in common.
//!
//! The elements of a matrix `(out, in)` are numbered row by row. Each has a code, and each group of
//! neighbours a scale and, in some formats, an offset, of which formats keep the scales themselves
//! in fewer bits:
//!
//! ```text
//! w[e] = level(code[e]) · scale[e / group] + offset[e / group]        in f32, rounded after each step
//! ```
//!
//! Codes lie as a stream of bits that begins at the lowest bit of the first byte. A group may go on in the next
//! row. What a file has in another order is put into this one when it is read.

pub(crate) mod cpu;
#[cfg(feature = "cuda")]
pub(crate) mod cuda;
pub(crate) mod fp8;
pub(crate) mod int8;
#[cfg(any(feature = "metal", feature = "metal-emulation", test))]
pub(crate) mod metal;
mod narrow;
mod quantize;
#[cfg(feature = "cuda")]
mod source;
#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
mod weight;

use crate::backend::{on_gpu, require_dtype, require_rank, require_shape, require_together};
use candle_core::{DType, Device, Result, Tensor, bail};

#[doc(inline)]
pub use metal_candle_cpu::quantized::{BLOCK, Levels, NESTED};
pub use quantize::{Format, dynamic_map, quantize, spread_blocks};
pub use weight::Weight;
pub(crate) use weight::{WeightInput, WeightNumbers, WeightRead};

const OPERATION: &str = "quantized";

/// NF4 of QLoRA (Dettmers et al. 2023, <https://arxiv.org/abs/2305.14314>, appendix E): quantiles of the normal
/// distribution.
pub const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// bitsandbytes' FP4: a sign, two bits of exponent and one of mantissa, the largest of which is 1.
pub const FP4: [f32; 16] = [
    0.0,
    0.005_208_333_3,
    0.666_666_7,
    1.0,
    0.333_333_34,
    0.5,
    0.166_666_67,
    0.25,
    0.0,
    -0.005_208_333_3,
    -0.666_666_7,
    -1.0,
    -0.333_333_34,
    -0.5,
    -0.166_666_67,
    -0.25,
];

/// OCP's e2m1, of MXFP4 and NVFP4.
pub const E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// GGUF's IQ4_NL and IQ4_XS.
pub const IQ4: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0,
    89.0, 113.0,
];

/// The scales of a matrix's groups. All tensors are contiguous and have one dimension.
#[derive(Clone, Debug)]
pub enum Scales {
    /// As they are: f32, f16 or bf16.
    Plain {
        /// `(groups)`
        scales: Tensor,
        /// `(groups)` of the same dtype; 0 where there are none.
        offsets: Option<Tensor>,
    },
    /// `2^(code - 127)`, OCP's e8m0: `(groups)` u8.
    E8m0(Tensor),
    /// `e4m3(code) · overall`, as NVFP4 has them.
    E4m3 {
        /// `(groups)` u8
        scales: Tensor,
        /// What all are multiplied by.
        overall: f32,
    },
    /// bitsandbytes' double quantisation: `table[code] · scales[group / 256] + offset`.
    Nested {
        /// `(groups)` u8
        codes: Tensor,
        /// `(256)` f32
        table: Tensor,
        /// `(groups / 256)` f32
        scales: Tensor,
        /// The mean of all scales.
        offset: f32,
    },
    /// Of ggml's K quants: the scale `large[e / 256] · code`, the offset `-(large_offset[e / 256] · code)`. The
    /// number of elements is a multiple of 256.
    Blocks {
        /// `(groups)` u8, or i8 in its bits if `signed`.
        scales: Tensor,
        /// Whether the codes of scales are signed.
        signed: bool,
        /// `(elements / 256)` f16
        large: Tensor,
        /// The codes `(groups)` u8 and `(elements / 256)` f16 of the offsets.
        offsets: Option<(Tensor, Tensor)>,
    },
}

impl Scales {
    /// The tensors, with the name, length and dtypes that each should have.
    fn tensors(
        &self,
        elements: usize,
        groups: usize,
    ) -> Vec<(&'static str, &Tensor, usize, &[DType])> {
        const FLOATS: &[DType] = &[DType::F32, DType::F16, DType::BF16];
        const BYTES: &[DType] = &[DType::U8];
        match self {
            Self::Plain { scales, offsets } => {
                let scales = ("scales", scales, groups, FLOATS);
                let offsets = offsets.as_ref().map(|offsets| ("offsets", offsets, groups, FLOATS));
                [scales].into_iter().chain(offsets).collect()
            }
            Self::E8m0(scales) | Self::E4m3 { scales, .. } => {
                vec![("scales", scales, groups, BYTES)]
            }
            Self::Nested { codes, table, scales, .. } => vec![
                ("the scales' codes", codes, groups, BYTES),
                ("the scales' table", table, 256, &[DType::F32]),
                ("the scales' scales", scales, groups.div_ceil(NESTED), &[DType::F32]),
            ],
            Self::Blocks { scales, large, offsets, .. } => {
                let large_count = elements / BLOCK;
                let mut tensors = vec![
                    ("scales", scales, groups, BYTES),
                    ("the blocks' scales", large, large_count, &[DType::F16][..]),
                ];
                if let Some((offsets, large)) = offsets {
                    tensors.push(("offsets", offsets, groups, BYTES));
                    tensors.push(("the blocks' offsets", large, large_count, &[DType::F16]));
                }
                tensors
            }
        }
    }

    fn map(&self, mut f: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(match self {
            Self::Plain { scales, offsets } => Self::Plain {
                scales: f(scales)?,
                offsets: offsets.as_ref().map(&mut f).transpose()?,
            },
            Self::E8m0(scales) => Self::E8m0(f(scales)?),
            Self::E4m3 { scales, overall } => Self::E4m3 { scales: f(scales)?, overall: *overall },
            Self::Nested { codes, table, scales, offset } => Self::Nested {
                codes: f(codes)?,
                table: f(table)?,
                scales: f(scales)?,
                offset: *offset,
            },
            Self::Blocks { scales, signed, large, offsets } => Self::Blocks {
                scales: f(scales)?,
                signed: *signed,
                large: f(large)?,
                offsets: match offsets {
                    Some((offsets, large)) => Some((f(offsets)?, f(large)?)),
                    None => None,
                },
            },
        })
    }
}

/// What products with a matrix round besides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arithmetic {
    /// The rows are multiplied as they are.
    #[default]
    Float,
    /// On the CPU, where codes are [`Levels::Integers`] of 8 bits around 128 with a plain f32 scale a row of the matrix, no
    /// offsets, and at most 131072 rows and columns, linear layers ([`matmul`](crate::matmul),
    /// [`lora_linear`](crate::lora_linear)) round what they multiply by it to integers of 8 bits first, for any number of
    /// rows. `round` gives each row a 127th of its largest magnitude as its scale, of which its numbers become the nearest
    /// multiples:
    ///
    /// ```text
    /// y  = round(x)·Wᵀ + bias + s·(x̃·A)·B
    /// dx = round(dy·diag(c))·L + ..            W = diag(c)·L: scales of rows, and integers
    /// ```
    ///
    /// Products are sums of integers, multiplied by the scales of the row and of the matrix's row, in this order, so that
    /// their bits are the same with any instruction set. The gradients of several layers that read the same input are
    /// rounded each for itself. What an adapter adds and its gradients are computed as ever. A GPU refuses such matrices.
    Int8Rows,
    /// Where codes are [`Levels::E4m3`] with a plain f32 scale a row of the matrix and no offsets, linear layers
    /// ([`matmul`](crate::matmul), [`lora_linear`](crate::lora_linear)) round what they multiply by it to e4m3 first,
    /// on the CPU and on CUDA, for any number of rows. `round` gives each row a power of two as its scale, of which its
    /// numbers become the nearest multiples by an e4m3:
    ///
    /// ```text
    /// y  = round(x)·Wᵀ + bias + s·(x̃·A)·B
    /// dx = round(dy·diag(c))·L + ..            W = diag(c)·L: scales of rows, and what codes stand for
    /// ```
    ///
    /// The gradients of several layers that read the same input are rounded as one row. What an adapter adds and its
    /// gradients are computed as ever. With NVIDIA's Hopper, many rows in bf16 or f16 are multiplied as codes, whose
    /// sums have about 14 bits of mantissa there; elsewhere this arithmetic is slower than [`Self::Float`], and there
    /// is none on Metal.
    Fp8,
}

/// A matrix `(out, in)` in fewer bits.
#[derive(Clone, Debug)]
pub struct Quantized {
    shape: (usize, usize),
    levels: Levels,
    group: usize,
    codes: Tensor,
    scales: Scales,
    arithmetic: Arithmetic,
}

impl Quantized {
    /// Of `shape` `(out, in)`, with `codes` `(⌈out·in·bits / 8⌉)` u8.
    ///
    /// # Errors
    /// When the sizes, dtypes or devices of the parts don't fit together.
    pub fn new(
        shape: (usize, usize),
        levels: Levels,
        group: usize,
        codes: Tensor,
        scales: Scales,
    ) -> Result<Self> {
        let Some(elements) = shape.0.checked_mul(shape.1).filter(|it| it.checked_mul(8).is_some())
        else {
            bail!("metal-candle-kernels: {OPERATION}: a matrix of {shape:?} is too large")
        };
        if let Levels::Integers { bits, .. } = levels
            && !matches!(bits, 2..=6 | 8)
        {
            bail!("metal-candle-kernels: {OPERATION}: codes have {bits} bits, expected 2 to 6 or 8")
        }
        if group == 0 {
            bail!("metal-candle-kernels: {OPERATION}: a group has no elements, expected at least 1")
        }
        if let Scales::Blocks { .. } = scales
            && !(elements.is_multiple_of(BLOCK) && BLOCK.is_multiple_of(group))
        {
            bail!(
                "metal-candle-kernels: {OPERATION}: {elements} elements in groups of {group} don't make whole blocks of {BLOCK}"
            )
        }
        let bytes = (elements * levels.bits()).div_ceil(8);
        let groups = elements.div_ceil(group);
        let parts = scales.tensors(elements, groups);
        let parts = parts.into_iter().chain([("codes", &codes, bytes, &[DType::U8][..])]);
        for (name, tensor, length, dtypes) in parts {
            require_together(OPERATION, &[&codes, tensor])?;
            require_shape(OPERATION, name, tensor, &[length])?;
            if !dtypes.contains(&tensor.dtype()) {
                bail!(
                    "metal-candle-kernels: {OPERATION}: {name} is {:?}, expected one of {dtypes:?}",
                    tensor.dtype()
                )
            }
        }
        if let Scales::Plain { scales, offsets: Some(offsets) } = &scales {
            require_dtype(OPERATION, "offsets", offsets, scales.dtype())?;
        }
        let (codes, scales) = (codes.contiguous()?, scales.map(Tensor::contiguous)?);
        let arithmetic = Arithmetic::default();
        Ok(Self { shape, levels, group, codes, scales, arithmetic })
    }

    /// The same matrix, with products computed as said.
    pub fn with_arithmetic(self, arithmetic: Arithmetic) -> Self {
        Self { arithmetic, ..self }
    }

    /// Whether products with it are those of [`Arithmetic::Int8Rows`]: it is of that arithmetic, and its codes, scales and
    /// size are such as that is for.
    pub fn multiplies_integers(&self) -> bool {
        self.int8_scales().is_some()
    }

    /// How products are computed.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// `(out, in)`
    pub fn shape(&self) -> (usize, usize) {
        self.shape
    }

    /// What its codes stand for.
    pub fn levels(&self) -> Levels {
        self.levels
    }

    /// Elements of a group.
    pub fn group(&self) -> usize {
        self.group
    }

    /// `(⌈out·in·bits / 8⌉)` u8
    pub fn codes(&self) -> &Tensor {
        &self.codes
    }

    /// The scales of its groups.
    pub fn scales(&self) -> &Scales {
        &self.scales
    }

    /// Where it is.
    pub fn device(&self) -> &Device {
        self.codes.device()
    }

    /// Bytes of memory that it takes.
    pub fn size_in_bytes(&self) -> usize {
        let tensors = self.parts().into_iter().chain([&self.codes]);
        tensors.map(|tensor| tensor.elem_count() * tensor.dtype().size_in_bytes()).sum()
    }

    /// The same on another device.
    ///
    /// # Errors
    /// When the device has no room.
    pub fn to_device(&self, device: &Device) -> Result<Self> {
        self.map(|tensor| tensor.to_device(device))
    }

    /// The same with what `f` gives for each of the tensors that it consists of, always in the same order: its codes
    /// first. They are to have the same shapes and dtypes, and be contiguous, wherever they lie.
    ///
    /// # Errors
    /// That of `f`.
    pub fn map(&self, mut f: impl FnMut(&Tensor) -> Result<Tensor>) -> Result<Self> {
        let codes = f(&self.codes)?;
        let (shape, levels, group, arithmetic) =
            (self.shape, self.levels, self.group, self.arithmetic);
        Ok(Self { shape, levels, group, codes, scales: self.scales.map(f)?, arithmetic })
    }

    /// The numbers, `(out, in)` in f32, bf16 or f16, rounded from f32.
    ///
    /// # Errors
    /// For another dtype, or when there is no memory.
    pub fn dequantize(&self, dtype: DType) -> Result<Tensor> {
        on_gpu!(&self.codes, gpu => gpu::dequantize(self, dtype));
        cpu::dequantize(self, dtype)
    }

    /// Whether all its numbers, on the CPU, are finite.
    ///
    /// # Errors
    /// When it is elsewhere.
    pub fn is_finite(&self) -> Result<bool> {
        cpu::is_finite(self)
    }

    /// Rows of the matrix, `(batch, seq, in)` in `dtype`, for `ids` `(batch, seq)` u32 below `out`: the
    /// [embedding](crate::embedding) of a table in fewer bits.
    ///
    /// # Errors
    /// As [`embedding::forward`](crate::embedding::forward), and for a dtype that isn't f32, bf16 or f16.
    pub fn rows(&self, ids: &Tensor, dtype: DType) -> Result<Tensor> {
        require_together(OPERATION, &[&self.codes, ids])?;
        require_rank(OPERATION, "ids", ids, 2, "(batch, seq)")?;
        require_dtype(OPERATION, "ids", ids, DType::U32)?;
        on_gpu!(&self.codes, gpu => gpu::rows(self, ids, dtype));
        cpu::rows(self, ids, dtype)
    }

    fn elements(&self) -> usize {
        self.shape.0 * self.shape.1
    }

    /// The tensors of its scales, in the order of their declaration.
    fn parts(&self) -> Vec<&Tensor> {
        let elements = self.elements();
        let parts = self.scales.tensors(elements, elements.div_ceil(self.group));
        parts.into_iter().map(|(_, tensor, ..)| tensor).collect()
    }
}
