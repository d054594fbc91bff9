//! Adapters: what is trained of a frozen model, and its files.
//!
//! An [`Adapter`] belongs to one [`Model`] and leaves it as it is, so any number of them share one. It has
//! a low-rank update for some linear layers, and tensors that stand in the place of some of the model's
//! weights: of all, where a model is fine-tuned in full. A forward pass names the adapter of each of its
//! rows ([`Input::with_adapter`](crate::pass::Input::with_adapter)).

mod config;
mod export;
mod files;
mod parameters;
#[cfg(test)]
mod tests;

pub use config::{LoraConfig, Resolved, Targets};
pub use export::TrainedFiles;
pub use files::peft::{ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_config};
pub use parameters::{Entry, Parameters};

use crate::autograd::{Parameter, ParameterId};
use crate::model::layer::Linear;
use crate::model::weight::WeightId;
use crate::model::{Model, ModelId, Weights};
use crate::random::SplitMix64;
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use metal_candle_kernels::{copy, matmul};
use std::collections::HashMap;
use std::path::Path;

/// What is trained of a model, or has been.
#[derive(Debug)]
pub struct Adapter {
    model: ModelId,
    method: Method,
    /// By [`Linear::index`].
    updates: Vec<Option<LowRank>>,
    /// By [`WeightId::index`].
    replaced: Vec<Option<Parameter>>,
    parts: Vec<Part>,
    parameters: Parameters,
}

/// How a model is adapted.
#[derive(Debug, Clone)]
enum Method {
    Lora {
        config: Box<LoraConfig>,
        layer_count: usize,
    },
    /// Every weight is replaced.
    Full,
}

/// The low-rank update of one linear layer.
#[derive(Debug)]
pub(crate) struct LowRank {
    /// `(in, rank)`
    pub a: Parameter,
    /// `(rank, out)`
    pub b: Parameter,
    /// What `x·A·B` is multiplied by.
    pub scale: f64,
    /// The probability of dropping an input in training.
    pub dropout: f32,
    /// Sets this layer's dropout apart from the other layers'.
    pub stream: u64,
}

impl LowRank {
    /// `weight + scale · (A·B)ᵀ`, in the weight's dtype and summed in f32.
    fn added_to(&self, weight: &Tensor) -> Result<Tensor> {
        // (A · B)ᵀ = Bᵀ · Aᵀ, which `linear` reads as Bᵀ times the rows of A.
        let update = matmul::linear(&self.b.tensor().t()?.contiguous()?, self.a.tensor(), None)?;
        let update = update.affine(self.scale, 0.0)?;
        let sum = (copy::cast(weight, DType::F32)? + update)?;
        Ok(copy::cast(&sum, weight.dtype())?)
    }
}

/// One trainable tensor, and what it is.
#[derive(Debug, Clone)]
struct Part {
    kind: PartKind,
    /// The path of the linear layer, or the name of the weight that it replaces.
    of: String,
    id: ParameterId,
    entry: Entry,
}

/// What a trainable tensor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartKind {
    /// A `(in, rank)` of a low-rank update.
    A,
    /// B `(rank, out)` of it.
    B,
    /// A weight in the model's place.
    Weight,
}

/// The trainable tensors of an adapter before they have memory.
#[derive(Default)]
struct Plan {
    parts: Vec<(PartKind, String)>,
    parameters: Vec<(String, Shape)>,
}

impl Plan {
    /// Adds a tensor, and gives its place in [`Planned::views`].
    fn add(&mut self, kind: PartKind, of: &str, shape: impl Into<Shape>) -> usize {
        let name = match kind {
            PartKind::A => format!("{of}.lora_A"),
            PartKind::B => format!("{of}.lora_B"),
            PartKind::Weight => of.to_string(),
        };
        self.parts.push((kind, of.to_string()));
        self.parameters.push((name, shape.into()));
        self.parts.len() - 1
    }

    /// Every weight of the model.
    fn full(model: &Model) -> Self {
        let mut plan = Self::default();
        for (name, id) in model.named_weights() {
            plan.add(PartKind::Weight, name, model.frozen().shape(id).clone());
        }
        plan
    }

    /// Gives all of them memory, zeroed.
    fn allocate(self, device: &Device) -> Result<(Parameters, Vec<Part>, Vec<Parameter>)> {
        let (parameters, ids) = Parameters::new(&self.parameters, device)?;
        let mut parts = Vec::with_capacity(ids.len());
        let mut views = Vec::with_capacity(ids.len());
        for ((kind, of), id) in self.parts.into_iter().zip(ids) {
            parts.push(Part { kind, of, id, entry: parameters.entry(id)?.clone() });
            views.push(Parameter::new(parameters.view(id)?, id));
        }
        Ok((parameters, parts, views))
    }
}

impl Adapter {
    /// A new LoRA adapter on the layers that `config` selects. A starts Kaiming-uniform with `a = √5` as in
    /// PEFT, which is uniform in ±1/√in, and B at zero.
    ///
    /// # Errors
    /// For a configuration that doesn't fit the model.
    pub fn new(model: &Model, config: &LoraConfig, seed: u64) -> Result<Self> {
        let adapter = Self::outline(model, config)?;
        for (index, low_rank) in adapter.updates.iter().flatten().enumerate() {
            let (input, rank) = low_rank.a.tensor().dims2()?;
            let bound = 1.0 / (input as f64).sqrt();
            let mut random = SplitMix64::stream(seed, index as u64);
            let a: Vec<f32> = (0..input * rank)
                .map(|_| ((2.0 * random.uniform() - 1.0) * bound) as f32)
                .collect();
            let a = Tensor::from_vec(a, (input, rank), &Device::Cpu)?;
            adapter.parameters.set(low_rank.a.id(), &a.to_device(model.device())?)?;
        }
        Ok(adapter)
    }

    /// The adapter of a PEFT folder.
    ///
    /// # Errors
    /// For files that are missing or malformed, that ask for what isn't supported, or that are of an adapter
    /// for another model.
    pub fn load(model: &Model, folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let (config, _) = read_config(folder)?;
        let adapter = Self::outline(model, &config)
            .map_err(|error| Error::file(folder.join(ADAPTER_CONFIG), error.to_string()))?;
        adapter.load_parameters(folder)?;
        Ok(adapter)
    }

    /// An adapter that trains every weight of the model, from their values: full fine-tuning. It needs nothing
    /// more of the model but its structure ([`Model::without_weights`]).
    ///
    /// # Errors
    /// When the model has no weights any more, or there is no memory for another copy in f32.
    pub fn full(model: &Model) -> Result<Self> {
        let (parameters, parts, views) = Plan::full(model).allocate(model.device())?;
        let mut replaced = vec![None; model.frozen().len()];
        for ((_, id), view) in model.named_weights().zip(views) {
            parameters.set(view.id(), model.frozen().tensor(id)?)?;
            replaced[id.index()] = Some(view);
        }
        let updates = model.linears().map(|_| None).collect();
        Ok(Self { model: model.id(), method: Method::Full, updates, replaced, parts, parameters })
    }

    /// How the parameters of [`Self::full`] are laid out, without any.
    pub fn full_entries(model: &Model) -> Vec<Entry> {
        Parameters::layout(&Plan::full(model).parameters).0
    }

    /// An adapter whose parameters are all zero.
    fn outline(model: &Model, config: &LoraConfig) -> Result<Self> {
        let layer_count = model.config().layers.len();
        let resolved = config.resolve(&model.linear_paths(), layer_count)?;
        let linears: HashMap<&str, &Linear> =
            model.linears().map(|linear| (linear.path.as_str(), linear)).collect();
        let mut plan = Plan::default();
        let mut planned = Vec::with_capacity(resolved.len());
        for Resolved { path, rank, scale } in &resolved {
            let Linear { index, input, output, .. } =
                **linears.get(path.as_str()).ok_or_else(|| {
                    Error::option("target_modules", format!("`{path}` is no layer of this model"))
                })?;
            let most = input.max(output);
            if *rank > most {
                return Err(Error::option(
                    "rank",
                    format!(
                        "is {rank}, but `{path}` is {output} by {input}; expected at most {most}"
                    ),
                ));
            }
            let a = plan.add(PartKind::A, path, (input, *rank));
            let b = plan.add(PartKind::B, path, (*rank, output));
            planned.push((index, a, b, *scale));
        }
        let (parameters, parts, views) = plan.allocate(model.device())?;
        let mut updates: Vec<Option<LowRank>> = model.linears().map(|_| None).collect();
        for (stream, (index, a, b, scale)) in planned.into_iter().enumerate() {
            updates[index] = Some(LowRank {
                a: views[a].clone(),
                b: views[b].clone(),
                scale,
                dropout: config.dropout,
                stream: stream as u64,
            });
        }
        let (method, replaced) = (
            Method::Lora { config: Box::new(config.clone()), layer_count },
            vec![None; model.frozen().len()],
        );
        Ok(Self { model: model.id(), method, updates, replaced, parts, parameters })
    }

    /// Its configuration; `None` where every weight is trained.
    pub fn config(&self) -> Option<&LoraConfig> {
        match &self.method {
            Method::Lora { config, .. } => Some(config),
            Method::Full => None,
        }
    }

    /// Its trainable tensors.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Whether it was made for this model.
    ///
    /// # Errors
    /// When it was not.
    pub(crate) fn check(&self, model: &Model) -> Result<()> {
        if self.model == model.id() {
            Ok(())
        } else {
            Err(Error::option("adapter", "was made for another model than the one it is used with"))
        }
    }

    /// Whether every weight is replaced.
    pub fn is_full(&self) -> bool {
        matches!(self.method, Method::Full)
    }

    /// The update of a linear layer.
    pub(crate) fn update(&self, linear: &Linear) -> Option<&LowRank> {
        self.updates.get(linear.index)?.as_ref()
    }

    /// What stands in the place of a weight.
    pub(crate) fn replacement(&self, weight: WeightId) -> Option<&Parameter> {
        self.replaced.get(weight.index())?.as_ref()
    }

    /// Reads the values of the parameters from a folder that [`Self::save`] or a checkpoint has written for
    /// the same parameters.
    ///
    /// # Errors
    /// For a file that is missing or malformed, and for one of other parameters.
    pub fn load_parameters(&self, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        match &self.method {
            Method::Lora { .. } => files::peft::read_weights(folder, &self.parts, &self.parameters),
            Method::Full => {
                let saved = Weights::open(folder)?;
                let device = self.parameters.values().device();
                for Part { of, id, entry, .. } in &self.parts {
                    let value = saved.tensor(of, entry.shape.dims(), DType::F32, device)?;
                    self.parameters.set(*id, &value)?;
                }
                Ok(())
            }
        }
    }

    /// The model with this adapter in its weights: `W + scale · (A·B)ᵀ`, in the weights' dtype and summed in
    /// f32, and what replaces weights in their place.
    ///
    /// # Errors
    /// When the adapter is another model's, or there is no memory.
    pub fn merge(&self, model: Model) -> Result<Model> {
        self.check(&model)?;
        let updates: HashMap<usize, &LowRank> = model
            .linears()
            .filter_map(|linear| Some((linear.weight.index(), self.update(linear)?)))
            .collect();
        model.map_weights(|id, weight| {
            if let Some(parameter) = self.replacement(id) {
                return Ok(copy::cast(parameter.tensor(), weight.dtype())?);
            }
            match updates.get(&id.index()) {
                Some(update) => update.added_to(&weight),
                None => Ok(weight),
            }
        })
    }

    /// Writes the adapter as a PEFT folder. `base_model` is what it names as its base.
    ///
    /// # Errors
    /// When it trains every weight, or a file cannot be written.
    pub fn save(&self, folder: impl AsRef<Path>, base_model: &str) -> Result<()> {
        match &self.method {
            Method::Lora { config, layer_count } => files::peft::write(
                folder.as_ref(),
                config,
                *layer_count,
                base_model,
                &self.parts,
                self.parameters.values(),
            ),
            Method::Full => {
                Err(Error::option("adapter", "trains every weight; merge it and save the model"))
            }
        }
    }
}
