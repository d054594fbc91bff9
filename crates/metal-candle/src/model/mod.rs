//! Models: `config.json` becomes one decoder for all supported families, and its weights are read. A
//! model is frozen; what can be trained is an [`Adapter`](crate::adapter::Adapter).

pub(crate) mod arrivals;
pub mod config;
pub(crate) mod export;
mod families;
pub(crate) mod formats;
pub(crate) mod layer;
mod load;
mod placement;
mod quantization;
pub mod rope;
mod tensor_parallel;
pub(crate) mod weight;
pub mod weights;

pub use config::Config;
pub use export::{Companions, GgufFormat, ModelFormat};
pub use load::{stored_bytes, stored_dtype};
pub use placement::{Holding, Placement, Shards};
pub use quantization::Quantization;
pub(crate) use tensor_parallel::Sums;
pub use tensor_parallel::TensorRank;
pub use weights::Weights;

use crate::hash::Hash;
use crate::random::SplitMix64;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use layer::{Builder, Experts, FeedForward, Kind, Layer, Linear, Norm, Source};
use metal_candle_kernels::experts::routed;
use metal_candle_kernels::quantized::Weight;
use placement::Away;
use rope::RopeTables;
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use tensor_parallel::InParts;
use weight::{FrozenWeights, Storage, WeightId, sample};

/// A decoder-only language model on a device.
///
/// Its weights never change, so any number of passes, sessions and adapters share one; of one that lies in parts on several
/// devices ([`parallel::tensor`](crate::parallel::tensor)) adapters do, and one engine at a time computes with it.
#[derive(Debug)]
pub struct Model {
    id: ModelId,
    config: Config,
    dtype: DType,
    device: Device,
    weights: Arc<FrozenWeights>,
    pub(crate) embedding: WeightId,
    pub(crate) layers: Vec<Arc<Layer>>,
    pub(crate) norm: Norm,
    /// `None` where the head is the embedding.
    pub(crate) head: Option<WeightId>,
    pub(crate) rope_tables: RopeTables,
    /// What the weights were read from.
    files: Vec<PathBuf>,
    /// Bytes that the weights would take, if there are none.
    outlined: Option<usize>,
    /// Whose part of every layer this has, where ranks have a part each.
    pub(crate) rank: Option<TensorRank>,
    /// The parts of ranks that this stands for.
    ranks: Vec<Arc<Model>>,
    /// Whether somebody computes with them, which one alone may.
    pub(crate) ranks_are_taken: AtomicBool,
}

/// Tells a model from every other one in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ModelId(u64);

impl ModelId {
    fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

impl Model {
    /// The path of the embedding.
    pub const EMBEDDING: &str = "model.embed_tokens";
    /// The path of the head, which may be the embedding.
    pub const HEAD: &str = "lm_head";

    /// A model with random weights: normal with the configuration's `initializer_range` (0.02 if
    /// it has none), norms at one, biases at zero.
    pub fn random(config: Config, dtype: DType, device: &Device, seed: u64) -> Result<Self> {
        Self::random_with(config, dtype, device, seed, Holding::default())
    }

    /// As [`Self::random`], with the weights held as said.
    ///
    /// # Errors
    /// For an `initializer_range` that is no number, and as [`Self::from_fn_with`].
    pub fn random_with(
        config: Config,
        dtype: DType,
        device: &Device,
        seed: u64,
        holding: Holding,
    ) -> Result<Self> {
        let deviation = match config.raw.get("initializer_range") {
            None => 0.02,
            Some(value) => value
                .as_f64()
                .filter(|value| value.is_finite() && *value >= 0.0)
                .ok_or_else(|| {
                    Error::option(
                        "initializer_range",
                        format!("is {value}, expected a number of at least 0"),
                    )
                })?,
        };
        let norm = 1.0 - config.norm_weight_offset;
        let mut source = Random { deviation, norm, dtype, seed, index: 0 };
        Self::build(config, dtype, device, holding, &mut source)
    }

    /// A model whose weights `weight(name, shape)` gives, under the names of a checkpoint. They are
    /// brought to `dtype` and `device` if need be.
    ///
    /// # Errors
    /// When a weight has another shape than the configuration asks for.
    pub fn from_fn<F>(config: Config, dtype: DType, device: &Device, weight: F) -> Result<Self>
    where
        F: FnMut(&str, &[usize]) -> Result<Tensor>,
    {
        Self::from_fn_with(config, dtype, device, Holding::default(), weight)
    }

    /// As [`Self::from_fn`], with the weights held as said: brought into fewer bits, one after the other, or kept elsewhere.
    ///
    /// # Errors
    /// As [`Self::from_fn`] and [`Self::load_with`].
    pub fn from_fn_with<F>(
        config: Config,
        dtype: DType,
        device: &Device,
        holding: impl Into<Holding>,
        weight: F,
    ) -> Result<Self>
    where
        F: FnMut(&str, &[usize]) -> Result<Tensor>,
    {
        Self::build(config, dtype, device, holding.into(), &mut Given { weight, dtype })
    }

    fn build(
        config: Config,
        dtype: DType,
        device: &Device,
        Holding { quantization, placement }: Holding,
        source: &mut dyn Source,
    ) -> Result<Self> {
        if let Some(quantization) = quantization {
            quantization.check_device(device)?;
            if quantization.is_of_experts() && config.experts.is_none() {
                let family = config.architecture.model_type();
                return Err(quantization.error(format!("and a {family} model has no experts")));
            }
        }
        let rank = match &placement {
            Placement::TensorParallel(rank) => Some(rank),
            _ => None,
        };
        rank.map_or(Ok(()), |rank| rank.check(&config))?;
        let table = [config.vocab_size, config.hidden_size];
        let weights = FrozenWeights::new(dtype);
        let config_of = &config;
        let mut builder =
            Builder { config: config_of, source, device, quantization, rank, weights, linears: 0 };
        let embedding =
            builder.weight(format!("{}.weight", Self::EMBEDDING), &table, Kind::Table)?;
        let mut away = Away::new(&placement, device)?;
        let mut layers = Vec::with_capacity(config.layers.len());
        for index in 0..config.layers.len() {
            let layer = Layer::build(index, &mut builder)?;
            if let Some(away) = &mut away {
                away.take(&layer, &mut builder.weights)?;
            }
            layers.push(Arc::new(layer));
        }
        let norm = builder.norm("model.norm", config.hidden_size)?;
        let has_head = !config.tie_word_embeddings && rank.is_none_or(TensorRank::has_head);
        let head = has_head
            .then(|| builder.weight(format!("{}.weight", Self::HEAD), &table, Kind::Table))
            .transpose()?;
        let mut weights = builder.weights;
        if let Some(away) = away {
            weights.keep_away(away);
        }
        let weights = Arc::new(weights);
        let rank = rank.cloned();
        Ok(Self {
            id: ModelId::new(),
            config,
            dtype,
            device: device.clone(),
            weights,
            embedding,
            layers,
            norm,
            head,
            rope_tables: RopeTables::default(),
            files: Vec::new(),
            outlined: None,
            rank,
            ranks: Vec::new(),
            ranks_are_taken: AtomicBool::new(false),
        })
    }

    /// What stands for the parts that tensor-parallel ranks have, in their order. It has no weights of its own and computes
    /// nothing; an [`Engine`](crate::engine::Engine) of it does so with all of them, and adapters for it lie in the memory
    /// of the host.
    pub(crate) fn over(ranks: Vec<Arc<Self>>) -> Result<Self> {
        let Some(first) = ranks.first() else {
            return Err(Error::option("tensor_parallel", "is 0, expected at least 1"));
        };
        let mut source = InParts;
        let holding = Holding::default();
        let config = first.config.clone();
        let mut model = Self::build(config, first.dtype, &Device::Cpu, holding, &mut source)?;
        model.files.clone_from(&first.files);
        model.outlined = Some(ranks.iter().map(|rank| rank.size_in_bytes()).sum());
        model.ranks = ranks;
        Ok(model)
    }

    /// The parts of tensor-parallel ranks that this stands for; none where it has its weights itself.
    pub(crate) fn ranks(&self) -> &[Arc<Self>] {
        &self.ranks
    }

    /// Whether it lies in parts on several devices, so that only an [`Engine`](crate::engine::Engine) computes with it.
    pub fn is_tensor_parallel(&self) -> bool {
        !self.ranks.is_empty()
    }

    /// The shape of the decoder.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The device the model is on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// The dtype of the weights and activations.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The files that the weights were read from; none for a model that was made otherwise.
    pub fn files(&self) -> &[PathBuf] {
        &self.files
    }

    /// How many weights the model has.
    pub fn weight_count(&self) -> usize {
        self.named_weights().map(|(_, id)| self.weights.shape(id).elem_count()).sum()
    }

    /// The paths of the decoder's linear layers, which adapters can target.
    pub fn linear_paths(&self) -> Vec<String> {
        self.linears().map(|linear| linear.path.clone()).collect()
    }

    /// The paths of all that adapters can target: the linear layers, the embedding and the head.
    pub fn target_paths(&self) -> Vec<String> {
        let mut paths = self.linear_paths();
        paths.extend([Self::EMBEDDING.to_string(), Self::HEAD.to_string()]);
        paths
    }

    /// This model without the values of its weights, for use with an adapter that trains every one of them
    /// ([`Adapter::full`](crate::adapter::Adapter::full)) and has them.
    #[must_use]
    pub fn without_weights(mut self) -> Self {
        Arc::make_mut(&mut self.weights).clear();
        self
    }

    /// This model with all weights in its dtype, also those that were held in fewer bits.
    ///
    /// # Errors
    /// When there is no memory.
    pub fn dequantize(self) -> Result<Self> {
        self.map_weights(|_, weight| Ok(weight))
    }

    /// Whether some of its weights are held in fewer bits.
    pub fn is_quantized(&self) -> bool {
        self.named_weights().any(|(_, id)| match self.weights.storage(id) {
            Storage::Quantized(_) => true,
            Storage::Absent(absent) => absent.is_quantized,
            Storage::Dense(_) | Storage::Moved(_) | Storage::InParts(_) => false,
        }) || self.ranks.iter().any(|rank| rank.is_quantized())
    }

    /// Of how many tokens its device chooses the experts without the host; `None` where it has no experts.
    pub(crate) fn tokens_without_host(&self) -> Option<usize> {
        self.config.experts.as_ref()?;
        let of_layer = |experts: &Experts| {
            let held: Option<Vec<_>> =
                experts.experts.iter().map(|expert| expert.held(&self.weights)).collect();
            routed::most_tokens(&held?, self.dtype).ok()?
        };
        let layers = self.layers.iter().filter_map(|layer| match &layer.feed_forward {
            FeedForward::Mlp(_) => None,
            FeedForward::Experts(experts) => Some(of_layer(experts).unwrap_or(0)),
        });
        Some(layers.min().filter(|_| self.device.is_cuda()).unwrap_or(0))
    }

    /// Whether matrices of its layers lie elsewhere than on its device, and come to it for their layer alone. Such a
    /// model is trained with gradient checkpointing.
    pub fn is_away(&self) -> bool {
        self.weights.are_away()
    }

    /// Whether other processes have parts of its layers, and have to make each pass that this one makes.
    pub fn is_sharded(&self) -> bool {
        self.shards().is_some()
    }

    /// The processes that have a part of its layers each, where they do.
    pub(crate) fn shards(&self) -> Option<&Arc<dyn Shards>> {
        self.weights.shards()
    }

    /// Whether its weights are zeros, as only their shapes were asked for.
    pub(crate) fn is_outline(&self) -> bool {
        self.outlined.is_some()
    }

    /// Bytes of memory that its weights take, wherever they lie, or would take where there is only an outline of them.
    pub fn size_in_bytes(&self) -> usize {
        let sizes = self.named_weights().map(|(_, id)| match self.weights.storage(id) {
            Storage::Dense(tensor) => tensor.elem_count() * tensor.dtype().size_in_bytes(),
            Storage::Quantized(quantized) => quantized.size_in_bytes(),
            Storage::Absent(absent) => absent.bytes,
            Storage::Moved(_) | Storage::InParts(_) => 0,
        });
        self.outlined.unwrap_or_else(|| sizes.sum())
    }

    /// This model with other values of its weights, one after the other.
    pub(crate) fn map_weights(
        mut self,
        mut map: impl FnMut(WeightId, Tensor) -> Result<Tensor>,
    ) -> Result<Self> {
        let ids: Vec<WeightId> = self.named_weights().map(|(_, id)| id).collect();
        let weights = Arc::make_mut(&mut self.weights);
        for id in ids {
            let tensor = weights.take(id)?;
            weights.set(id, Storage::Dense(map(id, tensor)?));
        }
        weights.keep_here();
        self.id = ModelId::new();
        Ok(self)
    }

    /// This model with a head of its own, where that was the embedding.
    pub(crate) fn with_head(mut self, head: Tensor) -> Self {
        let name = format!("{}.weight", Self::HEAD);
        let weights = Arc::make_mut(&mut self.weights);
        self.head = Some(weights.push(name, Kind::Table, Storage::Dense(head)));
        self.config.untie();
        self.id = ModelId::new();
        self
    }

    /// A hash of the configuration and of the beginning of every frozen weight (XXH3), by which
    /// a resumed run knows its base.
    pub fn fingerprint(&self) -> Result<u64> {
        let mut hash = Hash::new();
        hash.add(format!("{:?} {}", self.dtype, self.config.raw).as_bytes());
        for (name, id) in self.named_weights() {
            let bytes = match self.weights.storage(id) {
                Storage::Dense(tensor) => sample(&Weight::Dense(tensor))?,
                Storage::Quantized(quantized) => sample(&Weight::Quantized(quantized))?,
                Storage::Absent(absent) => absent.sample.clone(),
                // What an adapter trains instead isn't part of the base, and ranks have parts.
                Storage::Moved(_) | Storage::InParts(_) => continue,
            };
            hash.add(name.as_bytes());
            hash.add(&bytes);
        }
        for rank in &self.ranks {
            hash.add(&rank.fingerprint()?.to_le_bytes());
        }
        Ok(hash.finish())
    }

    /// The values of a weight as they are, or in the model's dtype where they are held in fewer bits.
    ///
    /// # Errors
    /// When they were moved into an adapter, or there is no memory.
    pub(crate) fn dense(&self, id: WeightId) -> Result<Cow<'_, Tensor>> {
        self.weights.dense(id)
    }

    pub(crate) fn id(&self) -> ModelId {
        self.id
    }

    pub(crate) fn frozen(&self) -> &Arc<FrozenWeights> {
        &self.weights
    }

    /// The linear layers that adapters can have.
    pub(crate) fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.layers.iter().flat_map(|layer| layer.linears())
    }

    /// Every weight under its name in the checkpoint: of each layer the linear layers, experts included, then the others.
    pub(crate) fn named_weights(&self) -> impl Iterator<Item = (&str, WeightId)> {
        let layers = self.layers.iter().flat_map(|layer| {
            let matrices = layer.matrices().into_iter();
            let weights = matrices.flat_map(|linear| [Some(linear.weight), linear.bias]).flatten();
            weights.chain(layer.others())
        });
        let ids = std::iter::once(self.embedding).chain(layers).chain([self.norm.weight]);
        ids.chain(self.head).map(|id| (self.weights.name(id), id))
    }
}

/// Weights that the caller gives.
struct Given<F> {
    weight: F,
    dtype: DType,
}

impl<F: FnMut(&str, &[usize]) -> Result<Tensor>> Source for Given<F> {
    fn weight(
        &mut self,
        name: &str,
        shape: &[usize],
        _kind: Kind,
        device: &Device,
    ) -> Result<Storage> {
        let tensor = (self.weight)(name, shape)?;
        if tensor.dims() != shape {
            let problem = format!("has shape {:?}, expected {shape:?}", tensor.dims());
            return Err(Error::option(name, problem));
        }
        Ok(Storage::Dense(tensor.to_dtype(self.dtype)?.to_device(device)?))
    }
}

/// Weights for a model that is trained from nothing.
struct Random {
    deviation: f64,
    norm: f64,
    dtype: DType,
    seed: u64,
    index: u64,
}

impl Source for Random {
    fn weight(
        &mut self,
        name: &str,
        shape: &[usize],
        kind: Kind,
        device: &Device,
    ) -> Result<Storage> {
        let tensor = match kind {
            Kind::Bias | Kind::Sinks => Tensor::zeros(shape, DType::F32, &Device::Cpu)?,
            Kind::Norm => Tensor::full(self.norm as f32, shape, &Device::Cpu)?,
            Kind::Linear | Kind::Expert | Kind::Router | Kind::Table => {
                let mut random = SplitMix64::stream(self.seed, self.index);
                let count: usize = shape.iter().product();
                let mut values: Vec<f32> = Vec::new();
                values.try_reserve_exact(count).map_err(|_| {
                    Error::option(
                        "config.json",
                        format!("{name} of {shape:?} does not fit into memory"),
                    )
                })?;
                values.extend((0..count).map(|_| (random.normal() * self.deviation) as f32));
                Tensor::from_vec(values, shape, &Device::Cpu)?
            }
        };
        self.index += 1;
        Ok(Storage::Dense(tensor.to_dtype(self.dtype)?.to_device(device)?))
    }
}
