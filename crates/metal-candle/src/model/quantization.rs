//! Dense bases in fewer bits: which format a word names, and which weights it is for.

use super::layer::Kind;
use crate::{Error, Result};
use candle_core::Tensor;
use metal_candle_kernels::quantized::{Format, Quantized, quantize};
use std::fmt;
use std::str::FromStr;

/// A format that a model's weights are brought into while it is loaded. Norms and biases stay as they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    name: &'static str,
    format: Format,
    /// Whether the embedding and the head are brought into it, too.
    tables: bool,
}

/// Of the programs whose formats these are, bitsandbytes leaves the embedding and the head alone, MLX and llama.cpp
/// don't.
const ALL: &[Quantization] = {
    const fn new(name: &'static str, format: Format, tables: bool) -> Quantization {
        Quantization { name, format, tables }
    }
    const fn affine(name: &'static str, bits: usize) -> Quantization {
        new(name, Format::Affine { bits, group: 64 }, true)
    }
    &[
        new("nf4", Format::Nf4 { block: 64, nested: true }, false),
        new("fp4", Format::Fp4 { block: 64, nested: true }, false),
        affine("mlx2", 2),
        affine("mlx3", 3),
        affine("mlx4", 4),
        affine("mlx5", 5),
        affine("mlx6", 6),
        affine("mlx8", 8),
        new("mxfp4", Format::Mxfp4, true),
        new("mxfp8", Format::Mxfp8, true),
        new("nvfp4", Format::Nvfp4, true),
        new("q4_0", Format::Q4_0, true),
        new("q4_k", Format::Q4K, true),
        new("q5_k", Format::Q5K, true),
        new("q6_k", Format::Q6K, true),
        new("q8_0", Format::Q8_0, true),
        new("fp8", Format::Fp8Rows, false),
        new("int8", Format::Int8Rows, false),
    ]
};

impl Quantization {
    /// The words for all of them.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ALL.iter().map(|quantization| quantization.name)
    }

    /// A weight in this format; `None` where such a weight stays as it is.
    pub(super) fn of(self, name: &str, kind: Kind, weight: &Tensor) -> Result<Option<Quantized>> {
        let wanted = match kind {
            Kind::Linear => true,
            Kind::Table => self.tables,
            Kind::Norm | Kind::Bias => false,
        };
        if !wanted {
            return Ok(None);
        }
        let quantized = quantize(weight, self.format).map_err(|error| {
            Error::option(
                "quantize",
                format!("is {self}, which `{name}` can't be held in: {error}"),
            )
        });
        quantized.map(Some)
    }
}

impl fmt::Display for Quantization {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(self.name)
    }
}

impl FromStr for Quantization {
    type Err = String;

    fn from_str(word: &str) -> std::result::Result<Self, String> {
        ALL.iter().find(|it| it.name == word).copied().ok_or_else(|| {
            let names: Vec<&str> = Self::names().collect();
            format!("is {word:?}, expected one of {}", names.join(", "))
        })
    }
}
