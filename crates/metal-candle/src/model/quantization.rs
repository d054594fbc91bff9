//! Dense bases in fewer bits: which format a word names, and which weights it is for.

use super::layer::Kind;
use crate::error::tensor_message;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use metal_candle_kernels::devices::multiplies_fp8;
use metal_candle_kernels::quantized::{Arithmetic, Format, Quantized, quantize};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A format that a model's weights are brought into while it is loaded. Norms and biases stay as they are.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Quantization {
    name: &'static str,
    format: Format,
    /// Which weights are brought into it.
    scope: Scope,
    /// Bits that a weight takes with its share of the scales.
    bits: f64,
    /// How products with such weights are computed.
    arithmetic: Arithmetic,
}

/// Which of a model's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Scope {
    /// Linear layers, experts included.
    Linears,
    /// The embedding and the head, too.
    All,
    /// Those of experts alone.
    Experts,
}

/// Of the programs whose formats these are, bitsandbytes leaves the embedding and the head alone, MLX and llama.cpp
/// don't.
const ALL: &[Quantization] = {
    use Scope::{All, Experts, Linears};
    const fn new(name: &'static str, format: Format, scope: Scope, bits: f64) -> Quantization {
        Quantization { name, format, scope, bits, arithmetic: Arithmetic::Float }
    }
    const fn affine(name: &'static str, bits: usize) -> Quantization {
        new(name, Format::Affine { bits, group: 64 }, All, bits as f64 + 0.5)
    }
    &[
        new("nf4", Format::Nf4 { block: 64, nested: true }, Linears, 4.127),
        new("fp4", Format::Fp4 { block: 64, nested: true }, Linears, 4.127),
        affine("mlx2", 2),
        affine("mlx3", 3),
        affine("mlx4", 4),
        affine("mlx5", 5),
        affine("mlx6", 6),
        affine("mlx8", 8),
        new("mxfp4", Format::Mxfp4, All, 4.25),
        // As gpt-oss is published.
        new("mxfp4-experts", Format::Mxfp4, Experts, 4.25),
        new("mxfp8", Format::Mxfp8, All, 8.25),
        new("nvfp4", Format::Nvfp4, All, 4.5),
        new("q4_0", Format::Q4_0, All, 4.5),
        new("q4_k", Format::Q4K, All, 4.625),
        new("q5_k", Format::Q5K, All, 5.625),
        new("q6_k", Format::Q6K, All, 6.5625),
        new("q8_0", Format::Q8_0, All, 8.5),
        new("fp8", Format::Fp8Rows, Linears, 8.0),
        new("int8", Format::Int8Rows, Linears, 8.0),
    ]
};

impl Quantization {
    /// Linear layers held in e4m3 with a scale a row, which also multiply in it: their inputs and the gradients that
    /// come back to them are rounded to e4m3, too ([`Arithmetic::Fp8`]). For NVIDIA's Hopper alone. It is written as
    /// `fp8-compute`, which is none of [`Self::names`], as it is more than a format.
    pub const FP8_COMPUTE: Self = Self {
        name: "fp8-compute",
        format: Format::Fp8Rows,
        scope: Scope::Linears,
        bits: 8.0,
        arithmetic: Arithmetic::Fp8,
    };

    /// Linear layers held in integers of 8 bits with a scale a row, which also multiply them: their inputs and the
    /// gradients that come back to them are rounded to such, too ([`Arithmetic::Int8Rows`]). For the processor alone. It
    /// is written as `int8-compute`, which is none of [`Self::names`] either.
    pub const INT8_COMPUTE: Self = Self {
        name: "int8-compute",
        format: Format::Int8Rows,
        scope: Scope::Linears,
        bits: 8.0,
        arithmetic: Arithmetic::Int8Rows,
    };

    /// The words for all of them.
    pub fn names() -> impl Iterator<Item = &'static str> {
        ALL.iter().map(|quantization| quantization.name)
    }

    /// The format.
    pub(super) fn format(self) -> Format {
        self.format
    }

    /// About how many bits a weight takes with its share of the scales, in linear layers but those of experts, in experts,
    /// and in the embedding and the head; `None` where such weights stay as they are.
    pub fn bits_per_weight(self) -> [Option<f64>; 3] {
        [Kind::Linear, Kind::Expert, Kind::Table].map(|kind| self.wants(kind).then_some(self.bits))
    }

    /// Whether such a weight is brought into it.
    pub(super) fn wants(self, kind: Kind) -> bool {
        match kind {
            Kind::Expert => true,
            Kind::Linear => self.scope != Scope::Experts,
            Kind::Table => self.scope == Scope::All,
            Kind::Norm | Kind::Bias | Kind::Sinks | Kind::Router => false,
        }
    }

    /// Whether it is for experts alone.
    pub(super) fn is_of_experts(self) -> bool {
        self.scope == Scope::Experts
    }

    /// About how many bytes a weight of so many elements takes; `None` where such a weight stays as it is.
    pub(super) fn size_in_bytes(self, kind: Kind, elements: usize) -> Option<usize> {
        self.wants(kind).then_some((elements as f64 * self.bits / 8.0) as usize)
    }

    /// The setting that asks for it, and the setting's value.
    pub fn setting(self) -> (&'static str, &'static str) {
        match self.arithmetic {
            Arithmetic::Fp8 => ("base_compute", "fp8"),
            Arithmetic::Int8Rows => ("base_compute", "int8"),
            _ => ("quantize", self.name),
        }
    }

    /// An error that names the setting and says what is wrong with its value.
    pub(super) fn error(self, problem: impl fmt::Display) -> Error {
        let (setting, value) = self.setting();
        Error::option(setting, format!("is {value}, {problem}"))
    }

    /// An error unless products with such weights are computed on the device.
    pub(super) fn check_device(self, device: &Device) -> Result<()> {
        let fits = match self.arithmetic {
            Arithmetic::Fp8 => multiplies_fp8(device)?,
            Arithmetic::Int8Rows => device.is_cpu(),
            Arithmetic::Float => true,
        };
        if fits {
            return Ok(());
        }
        let found = match device {
            Device::Cpu => "the processor",
            Device::Cuda(_) if self.arithmetic == Arithmetic::Fp8 => "another NVIDIA GPU",
            Device::Cuda(_) => "an NVIDIA GPU",
            Device::Metal(_) => "a Metal device",
        };
        let expected = match self.arithmetic {
            Arithmetic::Int8Rows => {
                "which only the processor computes in (device: cpu; NVIDIA's Hopper has base_compute: fp8)"
            }
            _ => {
                "which needs an NVIDIA GPU of compute capability 9.0 (Hopper: H100, H200) and a build with kernels \
                 for it (the processor has base_compute: int8)"
            }
        };
        Err(self.error(format!("{expected}, and the device is {found}")))
    }

    /// A weight of the CPU in this format.
    pub(super) fn apply(self, name: &str, weight: &Tensor) -> Result<Quantized> {
        let quantized = quantize(weight, self.format).map_err(|error| {
            let why = tensor_message(&error);
            self.error(format!("which `{name}` can't be held in: {why}"))
        })?;
        let quantized = quantized.with_arithmetic(self.arithmetic);
        if self.arithmetic == Arithmetic::Int8Rows && !quantized.multiplies_integers() {
            return Err(self.error(format!(
                "which multiplies matrices of at most 131072 rows and columns, and `{name}` has {:?}",
                quantized.shape()
            )));
        }
        Ok(quantized)
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

impl Serialize for Quantization {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name)
    }
}

impl<'de> Deserialize<'de> for Quantization {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        let word = String::deserialize(deserializer)?;
        match [Self::FP8_COMPUTE, Self::INT8_COMPUTE].into_iter().find(|it| it.name == word) {
            Some(compute) => Ok(compute),
            None => word.parse().map_err(D::Error::custom),
        }
    }
}
