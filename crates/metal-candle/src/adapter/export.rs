//! What is left of training in a folder: an adapter as PEFT writes it, or the whole model.

use super::files::peft;
use super::{Adapter, LoraConfig, Method, Part};
use crate::model::{Companions, Model, export};
use crate::text::CHAT_TEMPLATE;
use crate::{Error, Result, files};
use candle_core::{DType, Device, Tensor};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// How the parameters of an adapter are written into a folder, without their values: as PEFT does or, where
/// every weight is trained, as a model in f32. Another thread can write them from a copy of the values.
#[derive(Debug, Clone)]
pub struct TrainedFiles {
    kind: Kind,
    parts: Vec<Part>,
    chat_template: Option<String>,
}

#[derive(Debug, Clone)]
enum Kind {
    Lora { config: Box<LoraConfig>, layer_count: usize, base_model: String },
    Model { config: Value, companions: Option<PathBuf> },
}

impl TrainedFiles {
    /// Writes this chat template beside the weights, as transformers and TRL do.
    #[must_use]
    pub fn with_chat_template(mut self, source: Option<String>) -> Self {
        self.chat_template = source;
        self
    }

    /// Writes the files into the existing `folder`, each whole or not at all. `values` are those of all parameters, as
    /// [`Parameters::values`](super::Parameters::values) has them where they aren't in parts, on any device.
    ///
    /// # Errors
    /// When `values` are of another length, or a file cannot be written.
    pub fn write(&self, folder: impl AsRef<Path>, values: &Tensor) -> Result<()> {
        let folder = folder.as_ref();
        let count: usize = self.parts.iter().map(|part| part.entry.shape.elem_count()).sum();
        if values.elem_count() != count {
            return Err(Error::option(
                "values",
                format!("are {}, expected {count}: those of all parameters", values.elem_count()),
            ));
        }
        match &self.kind {
            Kind::Lora { config, layer_count, base_model } => {
                // An adapter that is there has its template.
                if let Some(source) = &self.chat_template {
                    files::write_bytes_atomic(folder.join(CHAT_TEMPLATE), source)?;
                }
                peft::write(folder, config, *layer_count, base_model, &self.parts, values)
            }
            Kind::Model { config, companions } => {
                let tensors: Vec<(String, Tensor)> = self
                    .parts
                    .iter()
                    .map(|part| Ok((part.of.clone(), part.entry.of(values)?)))
                    .collect::<Result<_>>()?;
                let chat_template = self.chat_template.as_deref();
                let companions =
                    companions.as_deref().map(|from| Companions { from, chat_template });
                export::write(folder, config, DType::F32, None, &tensors, companions)
            }
        }
    }
}

impl Adapter {
    /// How the parameters are written. `base_model` is what an adapter's files name as the model it belongs to;
    /// from `companions` the tokenizer's files are copied beside a whole model.
    ///
    /// # Errors
    /// When the adapter is another model's.
    pub fn files(
        &self,
        model: &Model,
        base_model: &str,
        companions: Option<&Path>,
    ) -> Result<TrainedFiles> {
        self.check(model)?;
        let kind = match &self.method {
            Method::Lora { config, layer_count } => Kind::Lora {
                config: config.clone(),
                layer_count: *layer_count,
                base_model: base_model.into(),
            },
            Method::Full => Kind::Model {
                config: model.config().raw.clone(),
                companions: companions.map(Path::to_path_buf),
            },
        };
        let mut parts = self.parts.clone();
        // The thread that writes them needs nothing of the device.
        for start in parts.iter_mut().filter_map(|part| part.start.as_mut()) {
            *start = start.to_device(&Device::Cpu)?;
        }
        Ok(TrainedFiles { kind, parts, chat_template: None })
    }
}
