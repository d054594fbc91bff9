//! LoRA adapters in GGUF files.
//!
//! `general.type` is `adapter`, `adapter.type` is `lora`, and each matrix that the adapter updates has two tensors,
//! `<its name>.lora_a (r, in)` and `<its name>.lora_b (out, r)`. Its scale is `adapter.lora.alpha / r`, or 1 where alpha
//! is 0. Rows of B have the order of the matrix's.

use std::collections::BTreeMap;
use std::path::Path;

use candle_core::{DType, Device, Tensor};

use super::architecture::{self, Target};
use super::container::Container;
use super::export::dense_bytes;
use super::rows;
use super::types::GgmlType;
use super::writer::{Metadata, write_container};
use super::{GgufTensor, row_bytes};
use crate::adapter::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, Adapter};
use crate::files::cut;
use crate::model::{Config, Model};
use crate::{Error, Result, files};
use serde_json::json;

const ALPHA: &str = "adapter.lora.alpha";

/// The update of one linear layer, `scale · B · A`.
#[derive(Clone, Debug)]
pub struct AdapterLayer {
    /// Its path in the model, such as `model.layers.0.self_attn.q_proj`.
    pub path: String,
    /// `(r, in)` f32 on the CPU.
    pub a: Tensor,
    /// `(out, r)` f32 on the CPU.
    pub b: Tensor,
    /// What the product is multiplied by.
    pub scale: f64,
}

/// Reads an adapter for a base of this shape.
///
/// # Errors
/// [`Error::File`] when it is no GGUF file of an adapter, is for another architecture, or its tensors don't fit
/// together; [`Error::Unsupported`] for one that is more than LoRA on linear layers.
pub fn read_adapter(path: impl AsRef<Path>, config: &Config) -> Result<Vec<AdapterLayer>> {
    let file = Container::open(path.as_ref())?;
    let target = Target::of(config)?;
    for (key, expected) in [
        ("general.type", "adapter"),
        ("adapter.type", "lora"),
        (super::config::ARCHITECTURE, target.name),
    ] {
        let found = file.text(key)?;
        let fits = |found: &str| match key {
            super::config::ARCHITECTURE => target.takes_adapter_for(found, config),
            _ => found == expected,
        };
        if !found.is_some_and(fits) {
            let found = found.map_or("missing".into(), |found| format!("{:?}", cut(found)));
            return Err(file.invalid(key, format!("is {found}; expected {expected:?}")));
        }
    }
    if file.has("adapter.alora.invocation_tokens") {
        return Err(Error::Unsupported(format!(
            "{}: adapter.alora.invocation_tokens; an adapter that acts from a token on",
            file.path().display()
        )));
    }
    let alpha = file.float(ALPHA)?.unwrap_or(0.0);
    let mut halves: BTreeMap<String, [Option<Tensor>; 2]> = BTreeMap::new();
    for (name, info) in file.tensors() {
        let invalid =
            |problem: String| Error::file(file.path(), format!("tensor {:?} {problem}", cut(name)));
        let (weight, which) = match (name.strip_suffix(".lora_a"), name.strip_suffix(".lora_b")) {
            (Some(weight), _) => (weight, 0),
            (_, Some(weight)) => (weight, 1),
            _ => return Err(invalid("is neither A nor B of an update".into())),
        };
        let ours = architecture::from_gguf(config, weight);
        let path = ours.as_deref().and_then(|name| name.strip_suffix(".weight"));
        let Some(path) =
            path.filter(|path| path.starts_with("model.layers.") && !path.ends_with("norm"))
        else {
            return Err(invalid("updates what is no linear layer of the model".into()));
        };
        let [rows_count, width] = info.shape.as_slice() else {
            return Err(invalid(format!("has shape {:?}; expected a matrix", info.shape)));
        };
        let mut bytes = std::borrow::Cow::Borrowed(file.data(info));
        let heads = ours.as_deref().and_then(|name| architecture::rotated_heads(config, name));
        if let Some(heads) = heads.filter(|_| which == 1 && target.interleaved) {
            let ours = row_bytes(info).and_then(|size| rows::deinterleave(&bytes, size, heads));
            let problem =
                || invalid(format!("has {rows_count} rows, which {heads} heads don't divide"));
            bytes = std::borrow::Cow::Owned(ours.ok_or_else(problem)?);
        }
        let shape = vec![*rows_count, *width];
        let Some(dense) = (GgufTensor { kind: info.kind, shape, bytes }).dense() else {
            return Err(invalid(format!("is {}; expected F32, F16 or BF16", info.kind)));
        };
        let slot = halves.entry(path.to_string()).or_default();
        slot[which] = Some(dense?.to_dtype(DType::F32)?);
    }
    let layer = |(path, halves): (String, [Option<Tensor>; 2])| {
        let [Some(a), Some(b)] = halves else {
            return Err(Error::file(file.path(), format!("{path} has only one of A and B")));
        };
        let ((rank, _), (_, other)) = (a.dims2()?, b.dims2()?);
        if rank != other || rank == 0 {
            let message = format!("{path} has an A of rank {rank} and a B of rank {other}");
            return Err(Error::file(file.path(), message));
        }
        let scale = if alpha == 0.0 { 1.0 } else { alpha / rank as f64 };
        Ok(AdapterLayer { path, a, b, scale })
    };
    halves.into_iter().map(layer).collect()
}

/// Writes an adapter for a base of this shape, in f32, whole or not at all. GGUF has one alpha for all layers; where
/// their scales are not all the same over their ranks, the difference goes into B.
///
/// # Errors
/// [`Error::Option`] for a layer that the base doesn't have or whose A and B don't fit it; [`Error::Io`] when the file cannot be written.
pub fn write_adapter(
    path: impl AsRef<Path>,
    config: &Config,
    layers: &[AdapterLayer],
) -> Result<()> {
    let target = Target::of(config)?;
    let mut alpha = 0.0;
    let mut tensors = Vec::new();
    let mut names = Vec::new();
    for layer in layers {
        let invalid = |problem: String| Error::option(&layer.path, problem);
        let name = format!("{}.weight", layer.path);
        let Some(theirs) = architecture::to_gguf(config, &name) else {
            return Err(invalid("is no linear layer of the model".into()));
        };
        let ((rank, _), (_, other)) = (layer.a.dims2()?, layer.b.dims2()?);
        if rank != other || rank == 0 {
            return Err(invalid(format!("has an A of rank {rank} and a B of rank {other}")));
        }
        let own = layer.scale * rank as f64;
        if alpha == 0.0 {
            alpha = own;
        }
        // The scale of the file for it is alpha / rank.
        let factor = if own == alpha { 1.0 } else { own / alpha };
        for (which, tensor) in [("lora_a", &layer.a), ("lora_b", &layer.b)] {
            let shape = tensor.dims().to_vec();
            names.push((format!("{theirs}.{which}"), shape, GgmlType::F32));
        }
        tensors.push((name, &layer.a, 1.0));
        tensors.push((String::new(), &layer.b, factor));
    }
    let mut metadata = Metadata::default();
    metadata.text(super::config::ARCHITECTURE, target.name);
    metadata.text("general.type", "adapter");
    metadata.text("adapter.type", "lora");
    metadata.float(ALPHA, alpha);
    write_container(path.as_ref(), &metadata, &names, |index| {
        let Some((name, tensor, factor)) = tensors.get(index) else { return Ok(Vec::new()) };
        if !name.is_empty() {
            return dense_bytes(tensor, GgmlType::F32);
        }
        let scaled = if *factor == 1.0 { (*tensor).clone() } else { (*tensor * *factor)? };
        let bytes = dense_bytes(&scaled.to_device(&Device::Cpu)?, GgmlType::F32)?;
        // The A of the same layer stands before.
        let name = index.checked_sub(1).and_then(|index| tensors.get(index)).map(|(name, ..)| name);
        let heads = name.and_then(|name| architecture::rotated_heads(config, name));
        let Some(heads) = heads.filter(|_| target.interleaved) else { return Ok(bytes) };
        let rank = tensor.dim(1)?;
        rows::interleave(&bytes, 4 * rank, heads).ok_or_else(|| {
            let name = name.map_or("", String::as_str);
            Error::option(name, format!("has a B whose rows {heads} heads don't divide"))
        })
    })
}

/// The updates of an adapter, as they act.
///
/// # Errors
/// [`Error::Unsupported`] for an adapter that has more than low-rank updates: GGUF has no tensors for that.
pub fn adapter_layers(model: &Model, adapter: &Adapter) -> Result<Vec<AdapterLayer>> {
    adapter.check(model)?;
    let refuse = |what: &str| {
        Err(Error::Unsupported(format!(
            "a GGUF adapter with {what}; GGUF has A and B alone. Merge it into its base"
        )))
    };
    let replaces = model.named_weights().any(|(_, id)| adapter.replacement(id).is_some());
    if replaces || adapter.is_full() {
        return refuse("weights or biases of its own");
    }
    if adapter.embedding_update().is_some() || adapter.head_update().is_some() {
        return refuse("updates of the embedding or the head");
    }
    let mut layers = Vec::new();
    for linear in model.linears() {
        let Some(update) = adapter.update(linear) else { continue };
        if update.magnitude.is_some() {
            return refuse("DoRA's lengths");
        }
        let (a, b) = update.effective()?;
        let turned = |tensor: Tensor| -> Result<Tensor> {
            Ok(tensor.to_device(&Device::Cpu)?.to_dtype(DType::F32)?.t()?.contiguous()?)
        };
        let (path, scale) = (linear.path.clone(), update.scale);
        layers.push(AdapterLayer { path, a: turned(a)?, b: turned(b)?, scale });
    }
    Ok(layers)
}

/// Writes updates as a folder of PEFT's, which [`Adapter::load`] reads; whole or not at all.
///
/// # Errors
/// [`Error::Option`] when there is none, [`Error::Io`] when the folder cannot be written.
pub fn save_as_peft(
    folder: impl AsRef<Path>,
    layers: &[AdapterLayer],
    base_model: &str,
) -> Result<()> {
    let Some(first) = layers.first() else {
        return Err(Error::option("adapter", "updates no layer; expected at least one"));
    };
    let rank_of = |layer: &AdapterLayer| Ok::<_, Error>(layer.a.dim(0)?);
    let rank = rank_of(first)?;
    let alpha = first.scale * rank as f64;
    let (mut ranks, mut alphas) = (serde_json::Map::new(), serde_json::Map::new());
    let mut tensors = Vec::new();
    for layer in layers {
        let own = rank_of(layer)?;
        if own != rank {
            ranks.insert(layer.path.clone(), json!(own));
        }
        let own_alpha = layer.scale * own as f64;
        if own_alpha != alpha {
            alphas.insert(layer.path.clone(), json!(own_alpha));
        }
        for (which, tensor) in [("lora_A", &layer.a), ("lora_B", &layer.b)] {
            let name = format!("base_model.model.{}.{which}.weight", layer.path);
            tensors.push((name, tensor.clone()));
        }
    }
    let paths: Vec<&str> = layers.iter().map(|layer| layer.path.as_str()).collect();
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base_model,
        "r": rank, "lora_alpha": alpha, "lora_dropout": 0.0, "target_modules": paths,
        "rank_pattern": ranks, "alpha_pattern": alphas, "bias": "none", "fan_in_fan_out": false,
        "init_lora_weights": true, "inference_mode": true,
    });
    files::write_folder_atomic(folder, |folder| {
        let metadata = [("format".to_string(), "pt".to_string())].into_iter().collect();
        files::write_safetensors(folder.join(ADAPTER_WEIGHTS), &tensors, Some(metadata))?;
        let path = folder.join(ADAPTER_CONFIG);
        let bytes = serde_json::to_vec_pretty(&config)
            .map_err(|error| Error::file(&path, error.to_string()))?;
        files::write_bytes_atomic(path, bytes)
    })
}
