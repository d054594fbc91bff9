//! Writing a model as a GGUF file.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Tensor};

use super::architecture::{self, Target};
use super::types::GgmlType;
use super::vocabulary::{self, UnknownTokenizer};
use super::writer::{Metadata, write_container};
use super::{config, rows, shifted, weights_of};
use crate::model::Config;
use crate::text::TokenizerFiles;
use crate::{Error, Result};

/// What a file is to hold beside the tensors.
#[derive(Clone, Copy, Debug)]
pub struct Export<'a> {
    /// The shape of the model.
    pub config: &'a Config,
    /// Its tokenizer; without one, llama.cpp takes token ids alone.
    pub tokenizer: Option<&'a TokenizerFiles>,
    /// What happens if llama.cpp cannot have that tokenizer.
    pub unknown_tokenizer: UnknownTokenizer,
    /// The model's name, for people.
    pub name: Option<&'a str>,
}

/// A tensor that is to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct ExportTensor {
    /// As in a checkpoint.
    pub name: String,
    /// The outermost dimension first.
    pub shape: Vec<usize>,
    /// As [`storage`] gives it.
    pub kind: GgmlType,
}

/// How a tensor is stored where matrices are to be stored as `wanted`: llama.cpp has norms and biases in f32, and
/// rows that are no whole blocks become f16.
pub fn storage(shape: &[usize], wanted: GgmlType) -> GgmlType {
    match shape {
        [_] => GgmlType::F32,
        [.., width] if wanted.row_bytes(*width).is_some() => wanted,
        _ => GgmlType::F16,
    }
}

/// The number in `general.file_type` of a file whose matrices are mostly of a type.
fn file_type(tensors: &[ExportTensor]) -> Option<usize> {
    let mut sizes = BTreeMap::new();
    for tensor in tensors.iter().filter(|tensor| tensor.shape.len() > 1) {
        *sizes.entry(tensor.kind).or_insert(0) += tensor.shape.iter().product::<usize>();
    }
    let (kind, _) = sizes.into_iter().max_by_key(|(_, size)| *size)?;
    Some(match kind.name() {
        "F32" => 0,
        "F16" => 1,
        "Q4_0" => 2,
        "Q4_1" => 3,
        "Q8_0" => 7,
        "Q5_0" => 8,
        "Q5_1" => 9,
        "Q2_K" => 10,
        "Q3_K" => 12,
        "Q4_K" => 15,
        "Q5_K" => 17,
        "Q6_K" => 18,
        "IQ4_NL" => 25,
        "IQ4_XS" => 30,
        "BF16" => 32,
        "MXFP4" => 38,
        _ => return None,
    })
}

/// Writes a model whole or not at all. `tensors` are all of the model's weights under the names of a checkpoint;
/// `encode` gives the elements or blocks of each, row by row as a checkpoint has them, when its turn comes.
///
/// # Errors
/// [`Error::Unsupported`] for a model or a tokenizer that llama.cpp would run as another one, with what differs;
/// [`Error::Option`] for a tensor that is missing, belongs to no part of the model, has another shape than its configuration says or
/// is stored as llama.cpp cannot have it; what `encode` returns; and [`Error::Io`] when the file cannot be written.
pub fn write(
    path: impl AsRef<Path>,
    export: &Export,
    tensors: &[ExportTensor],
    mut encode: impl FnMut(&ExportTensor) -> Result<Vec<u8>>,
) -> Result<()> {
    let model = export.config;
    let target = Target::of(model)?;
    let mut metadata = Metadata::default();
    let ropes = config::write(model, &mut metadata)?;
    metadata.text("general.type", "model");
    if let Some(number) = file_type(tensors) {
        metadata.count("general.file_type", number)?;
    }
    if tensors.iter().any(|tensor| !tensor.kind.is_dense()) {
        metadata.count("general.quantization_version", 2)?;
    }
    let phi3 = match export.tokenizer {
        Some(files) => vocabulary::write(files, model, export.unknown_tokenizer, &mut metadata)?,
        None => {
            metadata.text("tokenizer.ggml.model", "none");
            false
        }
    };
    // llama.cpp knows Phi 3's way with white space by the name alone.
    let name = export.name.map(String::from);
    let name = if phi3 { Some(format!("Phi-3 {}", name.unwrap_or_default())) } else { name };
    if let Some(name) = name {
        metadata.text("general.name", name.trim());
    }

    complete(model, tensors)?;
    let mut descriptions = Vec::with_capacity(ropes.len() + tensors.len());
    for (name, values) in &ropes {
        descriptions.push((name.clone(), vec![values.len()], GgmlType::F32));
    }
    // The tensors of each, of which those of all experts of a layer are one.
    let mut parts: Vec<Vec<&ExportTensor>> = Vec::with_capacity(tensors.len());
    let mut stacks: BTreeMap<String, Vec<&ExportTensor>> = BTreeMap::new();
    for tensor in tensors {
        let invalid = |problem: String| Error::option(&tensor.name, problem);
        let Some(name) = architecture::to_gguf(model, &tensor.name) else {
            let family = model.architecture.model_type();
            return Err(invalid(format!("belongs to no part of a {family} model")));
        };
        if tensor.shape.len() == 1 && tensor.kind != GgmlType::F32 {
            let kind = tensor.kind;
            return Err(invalid(format!("is {kind}; llama.cpp has F32 for norms and biases")));
        }
        if architecture::holds_experts(model, &name) {
            stacks.entry(name).or_default().push(tensor);
            continue;
        }
        descriptions.push((name, tensor.shape.clone(), tensor.kind));
        parts.push(vec![tensor]);
    }
    for (name, experts) in stacks {
        let (shape, kind) = stack(model, &name, &experts)?;
        descriptions.push((name, shape, kind));
        parts.push(experts);
    }
    write_container(path.as_ref(), &metadata, &descriptions, |index| {
        if let Some((_, values)) = ropes.get(index) {
            return Ok(values.iter().flat_map(|value| value.to_le_bytes()).collect());
        }
        let mut all = Vec::new();
        for tensor in parts.get(index - ropes.len()).into_iter().flatten() {
            all.extend(arranged(model, target, tensor, encode(tensor)?)?);
        }
        Ok(all)
    })
}

/// The shape and kind of what the weights of a layer's experts, in their order, are together.
fn stack(model: &Config, name: &str, experts: &[&ExportTensor]) -> Result<(Vec<usize>, GgmlType)> {
    let expected = architecture::experts_from_gguf(model, name).unwrap_or_default();
    let (Some(first), true) =
        (experts.first(), experts.iter().map(|it| &it.name).eq(expected.iter()))
    else {
        return Err(Error::option(name, "has other experts than the model, or in another order"));
    };
    if let Some(other) =
        experts.iter().find(|it| (&it.shape, it.kind) != (&first.shape, first.kind))
    {
        return Err(Error::option(
            &other.name,
            format!(
                "is {} {:?}, and {} is {} {:?}; a layer's experts are one tensor",
                other.kind, other.shape, first.name, first.kind, first.shape
            ),
        ));
    }
    let shape = [experts.len()].into_iter().chain(first.shape.iter().copied());
    Ok((shape.collect(), first.kind))
}

/// Checks that a model has all its weights, and each of them in its shape.
fn complete(config: &Config, tensors: &[ExportTensor]) -> Result<()> {
    let mut given: BTreeMap<&str, &[usize]> =
        tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.shape.as_slice())).collect();
    for (name, shape) in weights_of(config)? {
        match given.remove(name.as_str()) {
            Some(found) if found == shape => {}
            Some(found) => {
                let problem = format!("has shape {found:?}; config.json asks for {shape:?}");
                return Err(Error::option(name, problem));
            }
            None => return Err(Error::option(name, "is missing; a model needs all its weights")),
        }
    }
    match given.into_keys().next() {
        None => Ok(()),
        Some(name) => {
            Err(Error::option(name, "belongs to no part of the model as config.json describes it"))
        }
    }
}

/// Bytes of a tensor as llama.cpp has them.
fn arranged(
    config: &Config,
    target: &Target,
    tensor: &ExportTensor,
    bytes: Vec<u8>,
) -> Result<Vec<u8>> {
    if target.shifted_norms && architecture::is_norm(&tensor.name) {
        return Ok(shifted(&bytes, 1.0));
    }
    let heads = architecture::rotated_heads(config, &tensor.name).filter(|_| target.interleaved);
    let Some(heads) = heads else { return Ok(bytes) };
    let row_bytes = match tensor.shape.as_slice() {
        [_] => Some(tensor.kind.block_bytes()),
        [_, width] => tensor.kind.row_bytes(*width),
        _ => None,
    };
    row_bytes.and_then(|row_bytes| rows::interleave(&bytes, row_bytes, heads)).ok_or_else(|| {
        let found = bytes.len();
        Error::option(&tensor.name, format!("has {found} bytes, which {heads} heads don't divide"))
    })
}

/// The elements of a tensor as F32, F16 or BF16.
///
/// # Errors
/// [`Error::Option`] for another type, and for values that are too large for f16; [`Error::Tensor`] when the tensor
/// cannot be converted.
pub fn dense_bytes(tensor: &Tensor, kind: GgmlType) -> Result<Vec<u8>> {
    let dtype = match kind {
        GgmlType::F32 => DType::F32,
        GgmlType::F16 => DType::F16,
        GgmlType::BF16 => DType::BF16,
        other => {
            return Err(Error::option("type", format!("is {other}; expected F32, F16 or BF16")));
        }
    };
    let tensor = tensor.to_device(&candle_core::Device::Cpu)?.to_dtype(dtype)?.flatten_all()?;
    Ok(match dtype {
        DType::F32 => tensor.to_vec1::<f32>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
        DType::F16 => {
            let values = tensor.to_vec1::<half::f16>()?;
            if values.iter().any(|value| value.is_infinite()) {
                return Err(Error::option("type", "F16 cannot hold its values; use BF16 or F32"));
            }
            values.iter().flat_map(|x| x.to_le_bytes()).collect()
        }
        _ => tensor.to_vec1::<half::bf16>()?.iter().flat_map(|x| x.to_le_bytes()).collect(),
    })
}
