//! The bytes of quantised matrices in files, to and from [`Quantized`]: a file a family. Nothing here opens a
//! file; errors say what a part is and what it should be, and the caller says in which file.

pub(crate) mod awq;
pub(crate) mod bitsandbytes;
pub(crate) mod checkpoint;
pub(crate) mod experts;
pub(crate) mod fp8;
pub(crate) mod gguf_blocks;
pub(crate) mod gptq;
mod int4;
pub(crate) mod mlx;
#[cfg(test)]
mod tests;

pub(crate) use super::weights::Stored;

use crate::error::tensor_message;
use candle_core::{DType, Device, Tensor};
use half::f16;
use metal_candle_kernels::quantized::Quantized;

/// What was read, or what is wrong with it.
pub(crate) type Parsed<T> = std::result::Result<T, String>;

/// A tensor to be written.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// What follows the layer's name and a dot, such as `weight.absmax`.
    pub(crate) name: String,
    /// As [`Stored::dtype`].
    pub(crate) dtype: &'static str,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Stored<'_> {
    /// An error when the dtype is none of `dtypes`, or the bytes aren't those of the shape.
    fn require_dtype(&self, name: &str, dtypes: &[&str]) -> Parsed<()> {
        if !dtypes.contains(&self.dtype) {
            return Err(format!("{name} is {}, expected {}", self.dtype, dtypes.join(" or ")));
        }
        let size = match self.dtype {
            "F64" | "I64" | "U64" => 8,
            "F32" | "I32" | "U32" => 4,
            "F16" | "BF16" | "I16" | "U16" => 2,
            _ => 1,
        };
        let expected = elements(self.shape).and_then(|count| count.checked_mul(size));
        if expected != Some(self.bytes.len()) {
            return Err(format!(
                "{name} has {} bytes, expected those of {:?} {}",
                self.bytes.len(),
                self.shape,
                self.dtype
            ));
        }
        Ok(())
    }

    /// As [`Self::require_dtype`], and an error when the shape is another one.
    fn require(&self, name: &str, dtypes: &[&str], shape: &[usize]) -> Parsed<()> {
        self.require_dtype(name, dtypes)?;
        if self.shape != shape {
            return Err(format!("{name} has shape {:?}, expected {shape:?}", self.shape));
        }
        Ok(())
    }

    /// The two dimensions of a matrix.
    fn matrix(&self, name: &str) -> Parsed<(usize, usize)> {
        match *self.shape {
            [outer, inner] if outer > 0 && inner > 0 => Ok((outer, inner)),
            _ => Err(format!("{name} has shape {:?}, expected two dimensions", self.shape)),
        }
    }

    /// All numbers of an F32, F16 or BF16 tensor in its dtype, in one dimension.
    fn floats(&self, name: &str) -> Parsed<Tensor> {
        self.require_dtype(name, &["F32", "F16", "BF16"])?;
        let dtype = match self.dtype {
            "F32" => DType::F32,
            "F16" => DType::F16,
            _ => DType::BF16,
        };
        let count = self.bytes.len() / dtype.size_in_bytes();
        Tensor::from_raw_buffer(self.bytes, dtype, &[count], &Device::Cpu)
            .map_err(|error| tensor_message(&error))
    }

    /// As [`Self::floats`], in f32.
    fn f32s(&self, name: &str) -> Parsed<Vec<f32>> {
        let floats = self.floats(name)?;
        floats.to_dtype(DType::F32).and_then(|it| it.to_vec1()).map_err(|it| tensor_message(&it))
    }

    /// The words of an I32 or U32 tensor.
    fn words(&self) -> Vec<u32> {
        self.bytes.as_chunks().0.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
    }
}

/// The part of this name, or an error.
fn required<'a>(part: &impl Fn(&str) -> Option<Stored<'a>>, name: &str) -> Parsed<Stored<'a>> {
    part(name).ok_or_else(|| format!("{name} is missing"))
}

/// How many elements a shape has.
fn elements(shape: &[usize]) -> Option<usize> {
    shape.iter().try_fold(1usize, |count, size| count.checked_mul(*size))
}

fn bytes_tensor(bytes: Vec<u8>) -> Parsed<Tensor> {
    let count = bytes.len();
    Tensor::from_vec(bytes, count, &Device::Cpu).map_err(|error| tensor_message(&error))
}

fn f32_tensor(numbers: Vec<f32>) -> Parsed<Tensor> {
    let count = numbers.len();
    Tensor::from_vec(numbers, count, &Device::Cpu).map_err(|error| tensor_message(&error))
}

fn f16_tensor(numbers: Vec<f16>) -> Parsed<Tensor> {
    let count = numbers.len();
    Tensor::from_vec(numbers, count, &Device::Cpu).map_err(|error| tensor_message(&error))
}

/// The bytes of a tensor of u8.
fn bytes_of(tensor: &Tensor) -> Parsed<Vec<u8>> {
    tensor.to_vec1().map_err(|error| tensor_message(&error))
}

/// The numbers of a tensor of f16.
fn f16s_of(tensor: &Tensor) -> Parsed<Vec<f16>> {
    tensor.to_vec1().map_err(|error| tensor_message(&error))
}

/// A tensor of floats as a file has it: its dtype's name and its bytes.
fn stored_floats(tensor: &Tensor) -> Parsed<(&'static str, Vec<u8>)> {
    let message = |error: candle_core::Error| tensor_message(&error);
    Ok(match tensor.dtype() {
        DType::F32 => {
            let numbers = tensor.to_vec1::<f32>().map_err(message)?;
            ("F32", numbers.into_iter().flat_map(f32::to_le_bytes).collect())
        }
        DType::F16 => {
            let numbers = tensor.to_vec1::<f16>().map_err(message)?;
            ("F16", numbers.into_iter().flat_map(f16::to_le_bytes).collect())
        }
        DType::BF16 => {
            let numbers = tensor.to_vec1::<half::bf16>().map_err(message)?;
            ("BF16", numbers.into_iter().flat_map(half::bf16::to_le_bytes).collect())
        }
        other => return Err(format!("scales are {other:?}, expected F32, F16 or BF16")),
    })
}

/// A matrix on the host.
fn on_host(matrix: &Quantized) -> Parsed<Quantized> {
    matrix.to_device(&Device::Cpu).map_err(|error| tensor_message(&error))
}

/// What [`Quantized::new`] gives, with its message.
fn assembled(matrix: candle_core::Result<Quantized>) -> Parsed<Quantized> {
    matrix.map_err(|error| tensor_message(&error))
}
