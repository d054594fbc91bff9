//! Adapters: what is trained of a frozen model, and its files.
//!
//! An [`Adapter`] belongs to one [`Model`] and leaves it as it is, so any number of them share one. It has
//! a low-rank update for some linear layers, and tensors that stand in the place of some of the model's
//! weights: of all, where a model is fine-tuned in full. A forward pass names the adapter of each of its
//! rows ([`Input::with_adapter`](crate::pass::Input::with_adapter)).

mod config;
mod export;
mod files;
mod merged;
mod methods;
mod parameters;
mod partition;
mod plan;
mod tables;
#[cfg(test)]
mod tests;
mod version;

pub use config::{Biases, EvaConfig, LoraConfig, Resolved, StartFrom, Targets, TokenIndices};
pub use export::TrainedFiles;
use files::AdapterFile;
pub use files::mlx::MLX_WEIGHTS;
pub use files::peft::ADAPTER_WEIGHTS;
pub use files::{ADAPTER_CONFIG, AdapterFormat, read_config};
pub use merged::{Merged, MergedWeights};
pub(crate) use parameters::of_held;
pub use parameters::{Entry, Parameters};
pub(crate) use partition::{Kept, Partition, UnitName, Whole};

use crate::autograd::{Parameter, ParameterId};
use crate::hash::Hash;
use crate::model::layer::Linear;
use crate::model::weight::WeightId;
use crate::model::{Model, ModelId, Weights};
use crate::random::SplitMix64;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use merged::Merging;
use metal_candle_kernels::host;
pub(crate) use methods::dora::Lengths;
use methods::lora;
pub(crate) use methods::{LowRank, TableUpdate, eva};
use partition::Gathering;
use plan::{Outline, Plan, PlannedLora};
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
pub(crate) use version::AdapterVersion;

/// What is trained of a model, or has been.
#[derive(Debug)]
pub struct Adapter {
    model: ModelId,
    method: Method,
    /// By [`Linear::index`].
    updates: Vec<Option<LowRank>>,
    /// Of the embedding.
    embedding: Option<Arc<TableUpdate>>,
    /// Of the head.
    head_update: Option<Arc<TableUpdate>>,
    /// By [`WeightId::index`].
    replaced: Vec<Option<Parameter>>,
    /// The head of a model whose head is its embedding, which follows the embedding's replacement only where
    /// every weight is trained.
    head: Option<Parameter>,
    parts: Vec<Part>,
    parameters: Parameters,
    /// Where several processes have a part of them each.
    gathering: Option<Gathering>,
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

/// One trainable tensor, and what it is.
#[derive(Debug, Clone)]
struct Part {
    kind: PartKind,
    /// The path of the linear layer, or the name of the weight that it replaces.
    of: String,
    id: ParameterId,
    entry: Entry,
    /// What acts beside A or B if their start is taken off again: A₀ or -B₀.
    start: Option<Tensor>,
}

impl Part {
    /// What a file of ours has of it.
    fn outline(&self) -> Outline<'_> {
        let (dims, has_start) = (self.entry.shape.dims(), self.start.is_some());
        Outline { kind: self.kind, of: &self.of, dims, has_start }
    }
}

/// What a trainable tensor is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PartKind {
    /// A `(in, rank)` of a low-rank update.
    A,
    /// B `(rank, out)` of it.
    B,
    /// The lengths of DoRA, `(out)`.
    Magnitude,
    /// The bias of a layer that has an update too.
    Bias,
    /// A `(vocabulary, rank)` of the embedding's low-rank update.
    EmbeddingA,
    /// B `(rank, hidden)` of it.
    EmbeddingB,
    /// Some tokens' rows of the embedding or the head, `(tokens, hidden)`.
    Rows,
    /// What stands in the place of another weight.
    Weight,
}

/// Tells an error of what a folder's configuration asks for.
fn of_config(folder: &Path) -> impl Fn(Error) -> Error {
    |error| Error::file(folder.join(ADAPTER_CONFIG), error.to_string())
}

impl Adapter {
    /// A new adapter on the layers that `config` selects, which starts where `config` says.
    ///
    /// # Errors
    /// For a configuration that doesn't fit the model, and for EVA's start unless its ranks are known: it takes data, and
    /// [`train::eva::start`](crate::train::eva::start).
    pub fn new(model: &Model, config: &LoraConfig, seed: u64) -> Result<Self> {
        if config.start == StartFrom::Eva && config.layer_ranks.is_none() {
            return Err(Error::option("init_lora_weights", "is eva, which needs training data"));
        }
        Self::new_with(model, config, seed, &HashMap::new())
    }

    /// [`Self::new`], with the A `(in, rank)` that these paths start from.
    pub(crate) fn new_with(
        model: &Model,
        config: &LoraConfig,
        seed: u64,
        found: &HashMap<String, Tensor>,
    ) -> Result<Self> {
        let adapter = Self::lora(model, config)?;
        let parameters = &adapter.parameters;
        for (index, update) in adapter.updates.iter().flatten().enumerate() {
            let (input, rank) = update.a.tensor().dims2()?;
            let random = SplitMix64::stream(seed, index as u64);
            let a = match (config.start, &update.start) {
                (_, Some(start)) => {
                    parameters.set(update.b.id(), &start.minus_b.neg()?)?;
                    start.a.clone()
                }
                (StartFrom::Gaussian, None) => lora::gaussian(input, rank, random)?,
                (_, None) => lora::kaiming(input, rank, random)?,
            };
            parameters.set(update.a.id(), &a.to_device(model.device())?)?;
        }
        let layers = adapter.updates.iter().flatten().count();
        let tables = [&adapter.embedding, &adapter.head_update].into_iter().flatten();
        for (index, update) in tables.enumerate() {
            let random = SplitMix64::stream(seed, (layers + index) as u64);
            if let Some((id, start)) = update.start(config.start, random)? {
                parameters.set(id, &start.to_device(model.device())?)?;
            }
        }
        for part in adapter.parts.iter().filter(|part| part.kind == PartKind::A) {
            if let Some(a) = found.get(&part.of) {
                parameters.set(part.id, &a.to_device(model.device())?)?;
            }
        }
        adapter.set_lengths(model)?;
        Ok(adapter)
    }

    /// The adapter of a folder of PEFT's or of mlx-lm's.
    ///
    /// # Errors
    /// For files that are missing or malformed, that ask for what isn't supported, or that are of an adapter
    /// for another model.
    pub fn load(model: &Model, folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref();
        let (file, planned) = Self::open(model, folder)?;
        // Others' files don't have what PiSSA and OLoRA took from the weights, which is found again here.
        let starts = planned.starts(|id| model.dense(id)).map_err(of_config(folder))?;
        let adapter = planned.build(starts).map_err(of_config(folder))?;
        file.read(&adapter.parts, &adapter.parameters, Some(model))?;
        Ok(adapter)
    }

    /// [`Self::load`] beside others who use the model's device, which is used while what `turn` gives is held alone: what
    /// PiSSA and OLoRA took from the weights is found again without it, by the CPU, and up to a rank of 128. On a large base
    /// even that can take hours, which nothing interrupts.
    ///
    /// # Errors
    /// As [`Self::load`], and for a higher rank of such an adapter.
    pub fn load_in_turns<T>(
        model: &Model,
        folder: impl AsRef<Path>,
        turn: impl Fn() -> T,
    ) -> Result<Self> {
        /// The time that is needed grows with the third power of the rank.
        const MOST: usize = 128;
        let folder = folder.as_ref();
        let (file, planned) = Self::open(model, folder)?;
        if let Some((rank, path)) = planned.largest_start().filter(|(rank, _)| *rank > MOST) {
            return Err(Error::file(
                folder.join(ADAPTER_CONFIG),
                format!(
                    "init_lora_weights says that the update of `{path}`, of rank {rank}, started from its weight, and the \
                     file doesn't have this start; beside others it is found again up to a rank of {MOST}. `metal-candle \
                     convert --to mlx` makes a plain LoRA adapter of it"
                ),
            ));
        }
        let on_the_host = |id| {
            let _turn = turn();
            Ok(Cow::Owned(host::on_the_host(&*model.dense(id)?)?))
        };
        let starts = planned.starts(on_the_host).map_err(of_config(folder))?;
        let _turn = turn();
        let adapter = planned.build(starts).map_err(of_config(folder))?;
        file.read(&adapter.parts, &adapter.parameters, Some(model))?;
        model.device().synchronize()?;
        Ok(adapter)
    }

    /// The weights of an adapter's folder, and what it trains of the model: both fit together, which is all that has been
    /// looked at.
    fn open<'m>(model: &'m Model, folder: &Path) -> Result<(AdapterFile, PlannedLora<'m>)> {
        let (format, mut config, _) = files::read(folder)?;
        let file = AdapterFile::open(folder, format)?;
        file.fit(&mut config, &model.target_paths(), model.config().layers.len())
            .map_err(of_config(folder))?;
        let planned = PlannedLora::new(model, config).map_err(of_config(folder))?;
        file.check(planned.plan.outlines(), true)?;
        Ok((file, planned))
    }

    /// An adapter that trains every weight of the model, from their values: full fine-tuning. It needs nothing
    /// more of the model but its structure ([`Model::without_weights`]). Where several processes have a part of each of the
    /// model's layers, they have a part of every matrix that is trained, too.
    ///
    /// # Errors
    /// When the model has no weights any more, or there is no memory for another copy in f32.
    pub fn full(model: &Model) -> Result<Self> {
        if model.is_tensor_parallel() {
            return Err(Error::Unsupported(
                "training a model in parts on several devices (tensor parallelism)".into(),
            ));
        }
        let units = Self::units(model);
        let cut = |entries: &[Entry]| {
            let unit = |entry: &Entry| units.get(entry.name.as_str()).copied();
            let cut = |shards| Partition::new(entries, unit, shards, model.fingerprint()?);
            model.shards().map(cut).transpose()
        };
        let (parameters, parts, views) = Plan::full(model).allocate_cut(model.device(), cut)?;
        let mut replaced = vec![None; model.frozen().len()];
        for ((_, id), view) in model.named_weights().zip(views) {
            parameters.set(view.id(), &*model.dense(id)?)?;
            replaced[id.index()] = Some(view);
        }
        let updates = model.linears().map(|_| None).collect();
        let (embedding, head_update) = (None, None);
        let head = replaced[model.embedding.index()].clone().filter(|_| model.head.is_none());
        let gathering = Gathering::new(&parameters, model.dtype());
        let (model, method) = (model.id(), Method::Full);
        Ok(Self {
            model,
            method,
            updates,
            embedding,
            head_update,
            replaced,
            head,
            parts,
            parameters,
            gathering,
        })
    }

    /// Where each matrix of a model belongs, by its name.
    fn units(model: &Model) -> HashMap<&str, UnitName> {
        let name = |id| model.frozen().name(id);
        let layers = model.layers.iter().enumerate().flat_map(|(index, layer)| {
            layer
                .matrices()
                .into_iter()
                .map(move |it| (it.weight, UnitName::Layer(index)))
                .collect::<Vec<_>>()
        });
        let head = model.head.map(|head| (head, UnitName::Head));
        let all = layers.chain([(model.embedding, UnitName::Embedding)]).chain(head);
        all.map(|(id, unit)| (name(id), unit)).collect()
    }

    /// How the parameters of [`Self::full`] are laid out, without any.
    pub fn full_entries(model: &Model) -> Vec<Entry> {
        Parameters::layout(&Plan::full(model).parameters).0
    }

    /// What of this adapter the part of a model has that is a tensor-parallel rank's, on its device.
    ///
    /// # Errors
    /// When there is no memory.
    pub(crate) fn part_for(&self, part: &Model) -> Result<Self> {
        let mut plan = Plan::default();
        let mut planned = Vec::new();
        for linear in part.linears() {
            let Some(update) = self.update(linear) else { continue };
            let (a, b) = update.effective()?;
            let [a, b] = match &linear.cut {
                Some(cut) => cut.factors([&a, &b])?,
                None => [a, b],
            };
            let places = [(PartKind::A, &a), (PartKind::B, &b)];
            let places = places.map(|(kind, it)| plan.add(kind, &linear.path, it.shape().clone()));
            planned.push((linear, update, places, [a, b]));
        }
        let (parameters, parts, views) = plan.allocate(part.device())?;
        let mut updates: Vec<Option<LowRank>> = part.linears().map(|_| None).collect();
        for (linear, update, places, values) in planned {
            let [a, b] = places.map(|place| views[place].clone());
            for (view, value) in [&a, &b].into_iter().zip(values) {
                parameters.set(view.id(), &value.to_device(part.device())?)?;
            }
            updates[linear.index] = Some(LowRank {
                a,
                b,
                scale: update.scale,
                dropout: 0.0,
                stream: update.stream,
                start: None,
                magnitude: None,
                laid_out: lora::LaidOut::default(),
            });
        }
        Ok(Self {
            model: part.id(),
            method: self.method.clone(),
            updates,
            embedding: None,
            head_update: None,
            replaced: vec![None; part.frozen().len()],
            head: None,
            parts,
            parameters,
            gathering: None,
        })
    }

    /// An adapter as `config` describes it, whose A, B and lengths are zero.
    fn lora(model: &Model, config: &LoraConfig) -> Result<Self> {
        let planned = PlannedLora::new(model, config.clone())?;
        let starts = planned.starts(|id| model.dense(id))?;
        planned.build(starts)
    }

    /// Sets DoRA's lengths to those of the merged rows, so that training starts from the model as it is.
    fn set_lengths(&self, model: &Model) -> Result<()> {
        for linear in model.linears() {
            let Some(update) = self.update(linear) else { continue };
            let Some(magnitude) = &update.magnitude else { continue };
            let (a, b) = update.effective()?;
            let weight = model.dense(linear.weight)?;
            let norms = magnitude.norms(&weight, &a, &b, update.scale)?;
            self.parameters.set(magnitude.parameter.id(), &norms)?;
        }
        Ok(())
    }

    /// Its configuration; `None` where every weight is trained.
    pub fn config(&self) -> Option<&LoraConfig> {
        match &self.method {
            Method::Lora { config, .. } => Some(config),
            Method::Full => None,
        }
    }

    /// An error where several processes have a part of its parameters each.
    fn require_whole(&self, what: &str) -> Result<()> {
        match self.gathering.is_some() {
            true => Err(Error::Unsupported(format!(
                "{what} while several processes have a part of the parameters each (base_placement: sharded); what is written \
                 at the end of a run is whole"
            ))),
            false => Ok(()),
        }
    }

    /// A hash of its configuration and of all its parameters as they are now (XXH3), by which one that was trained anew in the
    /// same folder is told from the one before.
    ///
    /// # Errors
    /// When a device fails.
    pub fn fingerprint(&self) -> Result<u64> {
        let mut hash = Hash::new();
        hash.add(format!("{:?}", self.config()).as_bytes());
        hash.add(&self.parameters.fingerprint()?.to_le_bytes());
        Ok(hash.finish())
    }

    /// Its trainable tensors.
    pub fn parameters(&self) -> &Parameters {
        &self.parameters
    }

    /// Whether it was made for this very model: one that was loaded from the same files is another.
    ///
    /// # Errors
    /// [`Error::Option`] when it was not.
    pub(crate) fn check(&self, model: &Model) -> Result<()> {
        if self.model == model.id() {
            Ok(())
        } else {
            Err(Error::option(
                "adapter",
                "was made for another model than the one it is used with, which may be the same files loaded again; \
                 Adapter::load makes it for this one",
            ))
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

    /// Whether what it makes of a linear layer is more than an update that is added to its result: the weight or the bias
    /// is another, or the result's columns are multiplied.
    pub(crate) fn is_apart(&self, linear: &Linear) -> bool {
        let mut weights = [Some(linear.weight), linear.bias].into_iter().flatten();
        weights.any(|id| self.replacement(id).is_some())
            || self.update(linear).is_some_and(|update| update.magnitude.is_some())
    }

    /// Whether nothing is changed but by updates that are added to the results of linear layers.
    pub(crate) fn is_updates_alone(&self) -> bool {
        let mut updates = self.updates.iter().flatten();
        self.replaced.iter().all(Option::is_none)
            && self.head.is_none()
            && self.head_update.is_none()
            && self.embedding.is_none()
            && updates.all(|update| update.magnitude.is_none())
    }

    /// What is added to the embedding.
    pub(crate) fn embedding_update(&self) -> Option<&TableUpdate> {
        self.embedding.as_deref()
    }

    /// What is added to the head.
    pub(crate) fn head_update(&self) -> Option<&TableUpdate> {
        self.head_update.as_deref()
    }

    /// What stands in the place of the head, where the model's is its embedding.
    pub(crate) fn tied_head(&self) -> Option<&Parameter> {
        self.head.as_ref()
    }

    /// How many processes have a part of its parameters each, where they do.
    pub(crate) fn shards(&self) -> Option<usize> {
        self.parameters.partition().map(|partition| partition.size())
    }

    /// Parameters of which several processes have a part each, put together; `next` begins to come. Nothing where this
    /// process has all.
    ///
    /// # Errors
    /// [`Error::Rank`] naming a process that is lost, and when the device has no room.
    pub(crate) fn bring(
        &self,
        unit: UnitName,
        next: Option<UnitName>,
    ) -> Result<Option<Arc<Whole>>> {
        let generation = self.parameters.generation();
        let bring = |gathering: &Gathering| gathering.bring(unit, next, generation);
        self.gathering.as_ref().map(bring).transpose()
    }

    /// What stands in the place of a weight; of a parameter in parts without its numbers, which [`Self::bring`] gives.
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
            Method::Lora { .. } => {
                let file = AdapterFile::open(folder, AdapterFormat::of(folder)?)?;
                file.check(self.parts.iter().map(Part::outline), false)?;
                file.read(&self.parts, &self.parameters, None)
            }
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
    /// f32, and what replaces weights in their place. Where the head was the embedding and both were trained
    /// apart, it has a head of its own.
    ///
    /// `model` is the very one that the adapter was made for: [`Arc::try_unwrap`] takes it out of the last `Arc`. For the
    /// same files loaded again, [`Self::load`] the adapter with what was loaded. [`Merged`] leaves the model as it is.
    ///
    /// # Errors
    /// [`Error::Option`] when the adapter was made for another model, [`Error::Unsupported`] when several processes have a
    /// part of it each; and when there is no memory.
    pub fn merge(&self, model: Model) -> Result<Model> {
        self.check(&model)?;
        self.require_whole("merging")?;
        let merging = Merging::new(self, &model);
        let own_head = merging.own_head(&model)?;
        let model = model.map_weights(|id, weight| merging.weight(id, weight))?;
        Ok(match own_head {
            Some(head) => model.with_head(head),
            None => model,
        })
    }

    /// Writes the adapter as a PEFT folder. `base_model` is what it names as its base.
    ///
    /// # Errors
    /// As [`Self::save_as`].
    pub fn save(&self, folder: impl AsRef<Path>, base_model: &str) -> Result<()> {
        self.save_as(folder, base_model, AdapterFormat::Peft)
    }

    /// Writes the adapter's files in this format into the existing `folder`. `base_model` is what they name as its
    /// base.
    ///
    /// # Errors
    /// When it trains every weight, the format can't say what it is (before anything is written), or a file cannot
    /// be written.
    pub fn save_as(
        &self,
        folder: impl AsRef<Path>,
        base_model: &str,
        format: AdapterFormat,
    ) -> Result<()> {
        let (folder, values) = (folder.as_ref(), self.parameters.values());
        let Method::Lora { config, layer_count } = &self.method else {
            return Err(Error::option(
                "adapter",
                "trains every weight; merge it and save the model",
            ));
        };
        match format {
            AdapterFormat::Peft => {
                files::peft::write(folder, config, *layer_count, base_model, &self.parts, values)
            }
            AdapterFormat::Mlx => files::mlx::write(
                folder,
                &self.updated_layers()?,
                config.dropout,
                *layer_count,
                base_model,
                &self.parts,
                values,
            ),
        }
    }

    /// The linear layers that have an update.
    fn updated_layers(&self) -> Result<Vec<Resolved>> {
        // Both in the order of the model's layers.
        let parts = self.parts.iter().filter(|part| part.kind == PartKind::A);
        let layers = parts.zip(self.updates.iter().flatten()).map(|(part, update)| {
            let (_, rank) = part.entry.shape.dims2()?;
            // What A and B started from is written beside them.
            let rank = if part.start.is_some() { 2 * rank } else { rank };
            Ok(Resolved { path: part.of.clone(), rank, scale: update.scale })
        });
        layers.collect()
    }
}
