//! Models: `config.json` becomes one decoder for all supported families, its weights are read,
//! and one forward serves training, evaluation and generation.

mod cache;
pub mod config;
mod decoder;
mod export;
mod linear;
pub mod rope;
pub mod weights;

pub use cache::KvCache;
pub use config::Config;
pub use export::TrainedFiles;
pub use weights::Weights;

use crate::adapter::{self, Entry, LoraConfig, ParameterStore};
use crate::autograd::{ParameterId, Tape, Value, Weight};
use crate::data::Batch;
use crate::hash::Hash;
use crate::random::SplitMix64;
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use decoder::{Kind, Layer, Norm, Pass, Source};
use linear::{Linear, Lora, weight_as};
use metal_candle_kernels::{arithmetic, copy, cross_entropy, matmul};
use rope::RopeTables;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Rows whose loss is computed at a time in training.
const LOSS_CHUNK: usize = 512;

/// A decoder-only language model on a device.
#[derive(Debug)]
pub struct Model {
    config: Config,
    dtype: DType,
    device: Device,
    embedding: Weight,
    layers: Vec<Arc<Layer>>,
    norm: Norm,
    /// `None` where the head is the embedding.
    head: Option<Weight>,
    training: Option<Training>,
    rope_tables: RopeTables,
    /// What the weights were read from.
    files: Vec<PathBuf>,
}

/// What of a model is trained.
#[derive(Debug)]
struct Training {
    store: ParameterStore,
    /// The adapter's configuration; `None` when every weight is trained.
    adapter: Option<LoraConfig>,
}

/// Tokens for one forward pass, each `(batch, seq)`.
#[derive(Debug, Clone)]
pub struct Input {
    ids: Tensor,
    positions: Positions,
    first_key: Option<Tensor>,
}

#[derive(Debug, Clone)]
enum Positions {
    /// `(batch, seq)`
    Known(Vec<u32>),
    /// Of one token, `(1)` u32, less than `below`.
    OnDevice { position: Tensor, below: usize },
}

impl Input {
    /// One text whose first token stands at position `start`.
    pub fn sequence(ids: &[u32], start: usize, device: &Device) -> Result<Self> {
        let positions = (start..start + ids.len())
            .map(|position| u32::try_from(position).map_err(candle_core::Error::wrap))
            .collect::<candle_core::Result<_>>()?;
        let positions = Positions::Known(positions);
        Ok(Self { ids: Tensor::new(ids, device)?.unsqueeze(0)?, positions, first_key: None })
    }

    /// One token and its position, `(2)` u32 on the device, for a cache with room for `room` tokens, in
    /// which it isn't counted.
    pub(crate) fn on_device(token_and_position: &Tensor, room: usize) -> Result<Self> {
        let ids = token_and_position.narrow(0, 0, 1)?.unsqueeze(0)?;
        let position = token_and_position.narrow(0, 1, 1)?;
        let positions = Positions::OnDevice { position, below: room };
        Ok(Self { ids, positions, first_key: None })
    }

    /// The rows of a batch, with attention kept inside each record.
    pub fn batch(batch: &Batch, device: &Device) -> Result<Self> {
        let shape = (batch.rows, batch.length);
        Ok(Self {
            ids: Tensor::from_slice(&batch.input_ids, shape, device)?,
            positions: Positions::Known(batch.positions.clone()),
            first_key: Some(Tensor::from_slice(&batch.first_key, shape, device)?),
        })
    }
}

/// How a training forward pass runs.
#[derive(Debug, Clone, Copy, Default)]
pub struct PassOptions {
    /// Where dropout begins; `None` switches it off.
    pub dropout_seed: Option<u64>,
    /// Recompute each layer in the backward pass instead of storing its activations, but for what its
    /// attention gives.
    pub checkpoint: bool,
}

/// The loss of a batch, before it is divided by the number of tokens.
#[derive(Debug)]
pub struct Loss {
    /// The cross entropy summed over the target tokens, a scalar in nats.
    pub sum: Value,
    /// How many target tokens there were.
    pub tokens: usize,
}

impl Model {
    /// Reads a model from a folder with `config.json` and safetensors, as `dtype` on `device`.
    ///
    /// # Errors
    /// For a file that is missing or malformed, a tensor of another shape than the configuration
    /// asks for or with a NaN in it, and an architecture that is not supported.
    pub fn load(folder: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        Self::read(folder.as_ref(), dtype, device, Weights::tensor)
    }

    /// The model of a folder without its weights, which are zero and take no memory: for counting what
    /// it has, and for checking that its files fit its configuration.
    ///
    /// # Errors
    /// As [`Self::load`], but for those of the weights' values.
    pub fn outline(folder: impl AsRef<Path>, dtype: DType, device: &Device) -> Result<Self> {
        Self::read(folder.as_ref(), dtype, device, Weights::outline)
    }

    fn read(folder: &Path, dtype: DType, device: &Device, tensor: ReadTensor) -> Result<Self> {
        let config = Config::load(folder)?;
        let weights = Weights::open(folder)?.check_finite(true);
        let mut source = Stored { weights, tensor, dtype, device: device.clone() };
        let mut model = Self::build(config, dtype, device, &mut source)?;
        model.files = source.weights.files().map(Path::to_path_buf).collect();
        let unread: Vec<&str> = source
            .weights
            .unread()
            .into_iter()
            // Written by some tools although they can be derived or, with tied embeddings, are
            // the embedding again.
            .filter(|name| {
                !name.ends_with("rotary_emb.inv_freq") && !name.ends_with("lm_head.weight")
            })
            .collect();
        if let Some(first) = unread.first() {
            return Err(Error::file(
                folder,
                format!(
                    "{} tensors of the checkpoint, such as `{first}`, belong to no part of a {} \
                     model as its config.json describes it",
                    unread.len(),
                    model.config.architecture.model_type(),
                ),
            ));
        }
        Ok(model)
    }

    /// A model with random weights: normal with the configuration's `initializer_range` (0.02 if
    /// it has none), norms at one, biases at zero.
    pub fn random(config: Config, dtype: DType, device: &Device, seed: u64) -> Result<Self> {
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
        let mut source = Random { deviation, norm, dtype, device: device.clone(), seed, index: 0 };
        Self::build(config, dtype, device, &mut source)
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
        let mut source = Given { weight, dtype, device: device.clone() };
        Self::build(config, dtype, device, &mut source)
    }

    fn build(
        config: Config,
        dtype: DType,
        device: &Device,
        source: &mut dyn Source,
    ) -> Result<Self> {
        let table = [config.vocab_size, config.hidden_size];
        let embedding = source.weight("model.embed_tokens.weight".into(), &table, Kind::Matrix)?;
        let layers = (0..config.layers.len())
            .map(|index| Ok(Arc::new(Layer::build(&config, index, source)?)))
            .collect::<Result<_>>()?;
        let norm = decoder::build_norm(&config, "model.norm".into(), config.hidden_size, source)?;
        let head = (!config.tie_word_embeddings)
            .then(|| source.weight("lm_head.weight".into(), &table, Kind::Matrix))
            .transpose()?;
        let device = device.clone();
        Ok(Self {
            config,
            dtype,
            device,
            embedding,
            layers,
            norm,
            head,
            training: None,
            rope_tables: RopeTables::default(),
            files: Vec::new(),
        })
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

    /// The trainable parameters, once [`Self::add_lora`] or [`Self::train_all`] has made some.
    pub fn parameters(&self) -> Option<&ParameterStore> {
        self.training.as_ref().map(|training| &training.store)
    }

    /// The configuration of the adapter, if there is one.
    pub fn adapter(&self) -> Option<&LoraConfig> {
        self.training.as_ref().and_then(|training| training.adapter.as_ref())
    }

    /// How many weights the model has, the adapter's not counted.
    pub fn weight_count(&self) -> usize {
        self.named_weights().map(|(_, weight)| weight.tensor().elem_count()).sum()
    }

    /// The paths of the decoder's linear layers, which adapters can target.
    pub fn linear_paths(&self) -> Vec<String> {
        self.linears().map(|linear| linear.path.clone()).collect()
    }

    /// An empty KV cache for this model.
    pub fn new_cache(&self) -> KvCache {
        KvCache::new(self.layers.len())
    }

    /// Puts LoRA adapters on the layers that `config` selects and makes them what is trained. A
    /// starts Kaiming-uniform with `a = √5` as in PEFT, which is uniform in ±1/√in, and B at zero.
    pub fn add_lora(&mut self, config: &LoraConfig, seed: u64) -> Result<()> {
        self.attach(config, |index, _path, (input, rank), (_, output)| {
            let bound = 1.0 / (input as f64).sqrt();
            let mut random = SplitMix64::stream(seed, index as u64);
            let a: Vec<f32> = (0..input * rank)
                .map(|_| ((2.0 * random.uniform() - 1.0) * bound) as f32)
                .collect();
            let a = Tensor::from_vec(a, (input, rank), &Device::Cpu)?;
            Ok((a, Tensor::zeros((rank, output), DType::F32, &Device::Cpu)?))
        })
    }

    /// Puts the adapter of a PEFT folder on the model.
    pub fn load_adapter(&mut self, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        let (config, _) = adapter::read_config(folder)?;
        let resolved =
            config.resolve(&self.linear_paths(), self.layers.len()).map_err(|error| {
                Error::file(folder.join(adapter::ADAPTER_CONFIG), error.to_string())
            })?;
        let features: HashMap<&str, (usize, usize)> = self
            .linears()
            .map(|linear| Ok((linear.path.as_str(), linear.features()?)))
            .collect::<Result<_>>()?;
        let mut layers = Vec::with_capacity(resolved.len());
        for layer in resolved {
            if let Some(&features) = features.get(layer.path.as_str()) {
                layers.push((layer.path, layer.rank, features));
            }
        }
        let pairs = adapter::read_weights(folder, &layers, &Device::Cpu)?;
        let mut pairs: HashMap<String, (Tensor, Tensor)> =
            layers.into_iter().map(|(path, ..)| path).zip(pairs).collect();
        self.attach(&config, |_, path, _, _| {
            pairs.remove(path).ok_or_else(|| {
                Error::file(
                    folder.join(adapter::ADAPTER_WEIGHTS),
                    format!("has nothing for `{path}`"),
                )
            })
        })
    }

    /// Reads the values of the trainable parameters from a folder that [`Self::save_adapter`] or,
    /// in full fine-tuning, [`Self::save`] has written for the same parameters.
    pub fn load_parameters(&self, folder: impl AsRef<Path>) -> Result<()> {
        let folder = folder.as_ref();
        let Some(Training { store, adapter }) = &self.training else {
            return Err(Error::option("model", "has no trainable parameters to read"));
        };
        let set = |weight: &Weight, value: &Tensor| match weight.parameter() {
            Some(id) => store.set(id, value),
            None => Ok(()),
        };
        if adapter.is_some() {
            let mut layers = Vec::new();
            let mut weights = Vec::new();
            for linear in self.linears() {
                if let Some(lora) = &linear.lora {
                    let rank = lora.a.tensor().dim(1)?;
                    layers.push((linear.path.clone(), rank, linear.features()?));
                    weights.push((&lora.a, &lora.b));
                }
            }
            let pairs = adapter::read_weights(folder, &layers, &self.device)?;
            for ((a, b), (a_value, b_value)) in weights.into_iter().zip(pairs) {
                set(a, &a_value)?;
                set(b, &b_value)?;
            }
        } else {
            let saved = Weights::open(folder)?;
            for (name, weight) in self.named_weights() {
                let value =
                    saved.tensor(&name, weight.tensor().dims(), DType::F32, &self.device)?;
                set(weight, &value)?;
            }
        }
        Ok(())
    }

    fn attach<F>(&mut self, config: &LoraConfig, mut initial: F) -> Result<()>
    where
        F: FnMut(usize, &str, (usize, usize), (usize, usize)) -> Result<(Tensor, Tensor)>,
    {
        if self.training.is_some() {
            return Err(Error::option("adapter", "the model is being trained already"));
        }
        let resolved = config.resolve(&self.linear_paths(), self.layers.len())?;
        let mut wanted: HashMap<String, adapter::Resolved> =
            resolved.into_iter().map(|layer| (layer.path.clone(), layer)).collect();
        let mut parameters: Vec<(String, Shape)> = Vec::new();
        for linear in self.linears() {
            if let Some(layer) = wanted.get(&linear.path) {
                let (input, output) = linear.features()?;
                if layer.rank > input.max(output) {
                    return Err(Error::option(
                        "rank",
                        format!(
                            "is {}, but `{}` is {output} by {input}; expected at most {}",
                            layer.rank,
                            linear.path,
                            input.max(output)
                        ),
                    ));
                }
                parameters.push((format!("{}.lora_A", linear.path), (input, layer.rank).into()));
                parameters.push((format!("{}.lora_B", linear.path), (layer.rank, output).into()));
            }
        }
        let (store, ids) = ParameterStore::new(&parameters, &self.device)?;
        let mut ids = ids.into_iter();
        let mut stream = 0;
        for linear in self.linears_mut()? {
            let Some(layer) = wanted.remove(&linear.path) else { continue };
            let (Some(a), Some(b)) = (ids.next(), ids.next()) else { continue };
            let (input, output) = linear.features()?;
            let (a_value, b_value) =
                initial(stream, &linear.path, (input, layer.rank), (layer.rank, output))?;
            store.set(a, &a_value.to_device(store.values().device())?)?;
            store.set(b, &b_value.to_device(store.values().device())?)?;
            linear.lora = Some(Lora {
                a: Weight::trainable(store.view(a)?, a),
                b: Weight::trainable(store.view(b)?, b),
                scale: layer.scale,
                dropout: config.dropout,
                stream: stream as u64,
            });
            stream += 1;
        }
        self.training = Some(Training { store, adapter: Some(config.clone()) });
        Ok(())
    }

    fn weight_shapes(&self) -> Vec<(String, Shape)> {
        self.named_weights().map(|(name, weight)| (name, weight.tensor().shape().clone())).collect()
    }

    /// How the trained parameters are laid out, or all weights as long as none are.
    pub fn trainable_entries(&self) -> Vec<Entry> {
        match self.parameters() {
            Some(store) => store.entries().to_vec(),
            None => ParameterStore::layout(&self.weight_shapes()).0,
        }
    }

    /// Makes every weight trainable: they move into the flat f32 buffer.
    pub fn train_all(&mut self) -> Result<()> {
        if self.training.is_some() {
            return Err(Error::option("fine_tune_type", "the model is being trained already"));
        }
        let (store, ids) = ParameterStore::new(&self.weight_shapes(), &self.device)?;
        let ids: Vec<ParameterId> = ids;
        for (weight, id) in self.weights_mut()?.into_iter().zip(ids) {
            store.set(id, weight.tensor())?;
            *weight = Weight::trainable(store.view(id)?, id);
        }
        self.training = Some(Training { store, adapter: None });
        Ok(())
    }

    /// Adds the adapter into the weights it belongs to and removes it.
    pub fn merge_adapter(&mut self) -> Result<()> {
        if self.adapter().is_none() {
            return Err(Error::option("adapter", "the model has none to merge"));
        }
        for linear in self.linears_mut()? {
            if linear.lora.is_some() {
                linear.weight = Weight::frozen(linear.merged_weight()?);
                linear.lora = None;
            }
        }
        self.training = None;
        Ok(())
    }

    /// The hidden states after the last norm, `(batch, seq, hidden)`. With a cache, the tokens
    /// follow those it holds, and are added to it.
    pub fn forward(
        &self,
        tape: &Tape,
        input: &Input,
        cache: Option<&mut KvCache>,
        options: PassOptions,
    ) -> Result<Value> {
        if let Some(cache) = cache.as_deref() {
            self.check_cache(tape, input, cache)?;
        }
        let (batch, seq) = input.ids.dims2()?;
        let (positions, total, before) = match &input.positions {
            Positions::Known(positions) => {
                let total = positions.iter().max().map_or(0, |&last| last as usize + 1);
                (Tensor::from_slice(positions, (batch, seq), &self.device)?, total, None)
            }
            Positions::OnDevice { position, below } => {
                (position.unsqueeze(0)?, *below, Some(position.clone()))
            }
        };
        let ropes = self.config.ropes.iter().enumerate();
        let ropes = ropes
            .map(|(index, rope)| self.rope_tables.cos_sin(index, rope, &positions, total))
            .collect::<Result<_>>()?;
        let pass = Arc::new(Pass {
            ropes,
            first_key: input.first_key.clone(),
            before,
            dropout_seed: options.dropout_seed,
        });
        let table = tape.weight(&self.embedding);
        let x = tape.cast(&tape.embedding(&table, &input.ids)?, self.dtype)?;
        let x = if self.config.embedding_scale == 1.0 {
            x
        } else {
            tape.scale(&x, self.config.embedding_scale)?
        };
        let caches = cache.map(|cache| cache.layers.as_mut_slice());
        let stream = decoder::run_layers(&self.layers, tape, x, &pass, caches, options.checkpoint)?;
        Ok(stream.normed(tape, Some(&self.norm))?.1)
    }

    fn check_cache(&self, tape: &Tape, input: &Input, cache: &KvCache) -> Result<()> {
        let problem = if cache.layers.len() != self.layers.len() {
            format!("has {} layers, the model has {}", cache.layers.len(), self.layers.len())
        } else if tape.is_recording() {
            "cannot be used while gradients are recorded".into()
        } else {
            match &input.positions {
                Positions::Known(positions)
                    if positions.first().is_some_and(|&first| first as usize != cache.len()) =>
                {
                    format!("holds {} tokens; the input has to start at that position", cache.len())
                }
                _ => return Ok(()),
            }
        };
        Err(Error::option("cache", problem))
    }

    /// A hash of the configuration and of the beginning of every frozen weight (XXH3), by which
    /// a resumed run knows its base.
    pub fn fingerprint(&self) -> Result<u64> {
        const SAMPLE: usize = 256;
        let mut hash = Hash::new();
        let mut add = |bytes: &[u8]| hash.add(bytes);
        add(format!("{:?} {}", self.dtype, self.config.raw).as_bytes());
        for (name, weight) in
            self.named_weights().filter(|(_, weight)| weight.parameter().is_none())
        {
            add(name.as_bytes());
            let flat = weight.tensor().flatten_all()?;
            let sample = flat.narrow(0, 0, SAMPLE.min(flat.elem_count()))?;
            for value in copy::cast(&sample, DType::F32)?.to_vec1::<f32>()? {
                add(&value.to_le_bytes());
            }
        }
        Ok(hash.finish())
    }

    /// The logits `(batch, seq, vocabulary)` of hidden states, in f32.
    pub fn logits(&self, hidden: &Tensor) -> Result<Tensor> {
        let head = self.head.as_ref().unwrap_or(&self.embedding).tensor();
        let head = copy::cast(head, hidden.dtype())?;
        let logits = copy::cast(&matmul::linear(hidden, &head, None)?, DType::F32)?;
        let logits = match self.config.logits_scale {
            1.0 => logits,
            factor => arithmetic::scale(&logits, factor)?,
        };
        Ok(match self.config.final_softcap {
            Some(cap) => arithmetic::softcap(&logits, cap)?,
            None => logits,
        })
    }

    /// The cross entropy of a batch, summed over its target tokens.
    pub fn loss(&self, tape: &Tape, batch: &Batch, options: PassOptions) -> Result<Loss> {
        let input = Input::batch(batch, &self.device)?;
        let hidden = self.forward(tape, &input, None, options)?;
        let rows = batch.rows * batch.length;
        let hidden = tape.reshape(&hidden, (rows, self.config.hidden_size))?;
        let head = weight_as(tape, self.head.as_ref().unwrap_or(&self.embedding), self.dtype)?;
        let options = cross_entropy::Options {
            softcap: self.config.final_softcap,
            logit_scale: self.config.logits_scale,
            chunk: LOSS_CHUNK,
        };
        let (sum, tokens) = tape.cross_entropy(&hidden, &head, &batch.targets, &options)?;
        Ok(Loss { sum, tokens })
    }

    fn linears(&self) -> impl Iterator<Item = &Linear> {
        self.layers.iter().flat_map(|layer| layer.linears())
    }

    fn linears_mut(&mut self) -> Result<Vec<&mut Linear>> {
        let mut linears = Vec::new();
        for layer in &mut self.layers {
            linears.extend(exclusive(layer)?.linears_mut());
        }
        Ok(linears)
    }

    /// Every weight under its name in the checkpoint. The order is that of [`Self::weights_mut`].
    fn named_weights(&self) -> impl Iterator<Item = (String, &Weight)> {
        let mut weights = vec![("model.embed_tokens.weight".to_string(), &self.embedding)];
        for layer in &self.layers {
            for linear in layer.linears() {
                weights.push((format!("{}.weight", linear.path), &linear.weight));
                weights.extend(
                    linear.bias.as_ref().map(|bias| (format!("{}.bias", linear.path), bias)),
                );
            }
            weights
                .extend(layer.norms().map(|norm| (format!("{}.weight", norm.path), &norm.weight)));
        }
        weights.push((format!("{}.weight", self.norm.path), &self.norm.weight));
        weights.extend(self.head.as_ref().map(|head| ("lm_head.weight".to_string(), head)));
        weights.into_iter()
    }

    fn weights_mut(&mut self) -> Result<Vec<&mut Weight>> {
        let mut weights = vec![&mut self.embedding];
        for layer in &mut self.layers {
            // Linear layers before norms, as in `named_weights`.
            let layer = exclusive(layer)?;
            let (linears, norms) = layer.linears_and_norms_mut();
            for linear in linears {
                weights.push(&mut linear.weight);
                weights.extend(&mut linear.bias);
            }
            weights.extend(norms.into_iter().map(|norm| &mut norm.weight));
        }
        weights.push(&mut self.norm.weight);
        weights.extend(&mut self.head);
        Ok(weights)
    }
}

/// A layer for changing; only a backward pass that is still to run would share it.
fn exclusive(layer: &mut Arc<Layer>) -> Result<&mut Layer> {
    Arc::get_mut(layer)
        .ok_or_else(|| Error::option("model", "is in use by a tape and cannot be changed now"))
}

/// Weights that the caller gives.
struct Given<F> {
    weight: F,
    dtype: DType,
    device: Device,
}

impl<F: FnMut(&str, &[usize]) -> Result<Tensor>> Source for Given<F> {
    fn weight(&mut self, name: String, shape: &[usize], _kind: Kind) -> Result<Weight> {
        let tensor = (self.weight)(&name, shape)?;
        if tensor.dims() != shape {
            let problem = format!("has shape {:?}, expected {shape:?}", tensor.dims());
            return Err(Error::option(name, problem));
        }
        Ok(Weight::frozen(tensor.to_dtype(self.dtype)?.to_device(&self.device)?))
    }
}

/// [`Weights::tensor`], or what stands in its place.
type ReadTensor = fn(&Weights, &str, &[usize], DType, &Device) -> Result<Tensor>;

/// Weights from a checkpoint.
struct Stored {
    weights: Weights,
    tensor: ReadTensor,
    dtype: DType,
    device: Device,
}

impl Source for Stored {
    fn weight(&mut self, name: String, shape: &[usize], _kind: Kind) -> Result<Weight> {
        // A checkpoint of the decoder without its head has no `model.` before its names.
        let bare = name
            .strip_prefix("model.")
            .filter(|bare| !self.weights.contains(&name) && self.weights.contains(bare));
        let name = bare.unwrap_or(&name);
        let tensor = (self.tensor)(&self.weights, name, shape, self.dtype, &self.device)?;
        Ok(Weight::frozen(tensor))
    }
}

/// Weights for a model that is trained from nothing.
struct Random {
    deviation: f64,
    norm: f64,
    dtype: DType,
    device: Device,
    seed: u64,
    index: u64,
}

impl Source for Random {
    fn weight(&mut self, name: String, shape: &[usize], kind: Kind) -> Result<Weight> {
        let tensor = match kind {
            Kind::Bias => Tensor::zeros(shape, DType::F32, &Device::Cpu)?,
            Kind::Norm => Tensor::full(self.norm as f32, shape, &Device::Cpu)?,
            Kind::Matrix => {
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
        Ok(Weight::frozen(tensor.to_dtype(self.dtype)?.to_device(&self.device)?))
    }
}
