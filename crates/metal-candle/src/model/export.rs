//! The folder of a whole model.

use super::formats::checkpoint;
use crate::files::companions::copy_companions;
use crate::{Error, Result, files};
use candle_core::{DType, Tensor};
use serde_json::Value;
use std::collections::HashMap;
use std::path::Path;

/// Writes a model whose weights are dense, in `dtype`.
pub(crate) fn write(
    folder: &Path,
    config: &Value,
    dtype: DType,
    tensors: &[(String, Tensor)],
    companions: Option<&Path>,
) -> Result<()> {
    let name = dtype_name(dtype)?;
    let mut config = config.clone();
    let Some(map) = config.as_object_mut() else {
        return Err(Error::option("config", "has no JSON object to write as config.json"));
    };
    let key = if map.contains_key("dtype") { "dtype" } else { "torch_dtype" };
    map.insert(key.into(), name.into());
    if map.contains_key("torch_dtype") {
        map.insert("torch_dtype".into(), name.into());
    }
    for key in checkpoint::KEYS {
        map.remove(key);
    }
    let index = folder.join("model.safetensors.index.json");
    if index.exists() {
        return Err(Error::file(
            index,
            "belongs to another model in this folder; give another one",
        ));
    }
    let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
    files::write_safetensors(folder.join("model.safetensors"), tensors, Some(metadata))?;
    let path = folder.join("config.json");
    let bytes = serde_json::to_vec_pretty(&config)
        .map_err(|error| Error::file(&path, error.to_string()))?;
    files::write_bytes_atomic(&path, &bytes)?;
    match companions {
        Some(from) => copy_companions(from, folder),
        None => Ok(()),
    }
}

/// The word for a dtype in `config.json`.
pub(super) fn dtype_name(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("float32"),
        DType::F16 => Ok("float16"),
        DType::BF16 => Ok("bfloat16"),
        other => Err(Error::Unsupported(format!("weights in {other:?}; f32, f16 and bf16 are"))),
    }
}

pub(super) fn is_finite(tensor: &Tensor) -> Result<bool> {
    let largest = tensor.to_dtype(DType::F32)?.abs()?.flatten_all()?.max(0)?;
    Ok(largest.to_scalar::<f32>()?.is_finite())
}
