//! EVA's start (`adapter/methods/eva.rs`): what the model's linear layers read of the training data, batch by batch, until
//! the directions in which it varies most stay.
//!
//! The rules are those of PEFT's `initialize_lora_eva_weights`, with two differences. Inputs count where the loss counts
//! the prediction made of them, where PEFT looks at labels that aren't shifted, so at the tokens that are predicted. And
//! a batch of which fewer inputs count than directions are looked for is taken in with the next one instead of skipped.
//! Of a pair the places of both answers count, and those that stand for the beginnings of both never do.

use crate::adapter::{Adapter, LoraConfig, Resolved, StartFrom, eva};
use crate::autograd::Tape;
use crate::data::{Batch, BatchPlan, Batcher};
use crate::model::Model;
use crate::model::layer::Linear;
use crate::pass::{Input, Observer};
use crate::{Error, Result, bounds};
use candle_core::{DType, Tensor};
use indexmap::IndexMap;
use metal_candle_kernels::devices;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Passes over the data after which directions that still move never stay.
const MOST_EPOCHS: usize = 100;

/// How far the search is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Batches so far.
    pub batches: usize,
    /// How many inputs have directions that stayed.
    pub settled: usize,
    /// How many inputs there are; layers that read the same one share it.
    pub inputs: usize,
}

/// What was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Batches that were read.
    pub batches: usize,
    /// Places of them whose predictions the loss counts.
    pub tokens: usize,
    /// The rank of each layer, by path; 0 is no adapter.
    pub ranks: IndexMap<String, usize>,
}

/// A new adapter on the layers that `config` selects, each with the rank and the A that EVA finds for it by reading
/// `batches` with the frozen model, `rows` of their rows at a time: as many as one process has of a batch, which may be
/// that of several, as each reads all of them. `progress` is told before every pass.
///
/// # Errors
/// For a configuration that isn't EVA's or doesn't fit the model, for passes without rows, and for data with fewer tokens
/// that count than a layer needs, or of which the directions never stay.
pub fn start(
    model: &Model,
    config: &LoraConfig,
    seed: u64,
    batches: &Batcher,
    rows: usize,
    progress: &mut dyn FnMut(Progress),
) -> Result<(Adapter, Found)> {
    if config.start != StartFrom::Eva {
        return Err(Error::option(
            "init_lora_weights",
            format!("is {}, expected eva", config.start),
        ));
    }
    bounds::check("batch_size", rows, &bounds::BATCH_SIZE)?;
    let watch = Arc::new(Watch::new(model, config)?);
    batches.dataset().check_vocabulary(model.config().vocab_size)?;
    let (mut read, mut tokens) = (0, 0);
    'search: for epoch in 0.. {
        for plan in batches.epoch(epoch).iter().flat_map(|plan| in_passes(plan, rows)) {
            let (settled, inputs) = watch.settled();
            let batch = batches.batch(&plan)?;
            if batch.target_tokens == 0 {
                continue;
            }
            progress(Progress { batches: read, settled, inputs });
            if inputs > 0 && settled == inputs {
                break 'search;
            }
            read += 1;
            tokens += batch.target_tokens;
            devices::step(model.device(), || watch.read(model, &batch))?;
            watch.distribute();
        }
        watch.check_tokens(tokens)?;
        if epoch + 1 == MOST_EPOCHS {
            let (settled, inputs) = watch.settled();
            if settled == inputs {
                break;
            }
            let tau = config.eva.tau;
            return Err(Error::option(
                "eva_tau",
                format!(
                    "is {tau}, but after {read} batches the directions of {settled} of {inputs} inputs stay so much the \
                     same; a lower one is met sooner"
                ),
            ));
        }
    }
    let (ranks, starts) = watch.finish()?;
    let config = LoraConfig { layer_ranks: Some(ranks.clone()), ..config.clone() };
    let adapter = Adapter::new_with(model, &config, seed, &starts)?;
    Ok((adapter, Found { batches: read, tokens, ranks }))
}

/// A batch as passes of so many rows.
fn in_passes(plan: &BatchPlan, rows: usize) -> impl Iterator<Item = BatchPlan> {
    plan.rows.chunks(rows).map(|rows| BatchPlan { rows: rows.to_vec() })
}

/// A layer that gets an adapter.
#[derive(Debug)]
struct Target {
    path: String,
    /// What it was told.
    rank: usize,
    /// How many directions are looked for.
    directions: usize,
}

/// What some layers read.
#[derive(Debug)]
struct Seen {
    /// By their place among the targets.
    layers: Vec<usize>,
    wanted: usize,
    directions: eva::Directions,
    /// Inputs `(n, in)` of batches that were too small.
    waiting: Vec<Tensor>,
    /// Whether each direction has stayed.
    stayed: Vec<bool>,
    /// The highest rank among the layers, as far as is known.
    rank: usize,
}

impl Seen {
    fn is_settled(&self) -> bool {
        // Those beyond the highest rank aren't asked for.
        let needed = self.stayed.get(..self.rank);
        needed.is_some_and(|needed| needed.iter().all(|stayed| *stayed))
    }

    /// Takes in inputs `(n, in)`.
    fn add(&mut self, inputs: Tensor, tau: f64) -> Result<()> {
        self.waiting.push(inputs);
        let count = self.waiting.iter().map(|inputs| inputs.dims()[0]).sum::<usize>();
        if count < self.wanted {
            return Ok(());
        }
        let inputs = Tensor::cat(&std::mem::take(&mut self.waiting), 0)?;
        let cosines = self.directions.update(&inputs)?;
        self.stayed = vec![false; self.wanted];
        self.stayed.iter_mut().zip(cosines).for_each(|(stayed, cosine)| *stayed = cosine >= tau);
        Ok(())
    }
}

/// Watches a forward pass.
#[derive(Debug)]
struct Watch {
    targets: Vec<Target>,
    /// The targets among the decoder's linear layers, by [`Linear::index`].
    linears: HashMap<usize, usize>,
    /// The head among the targets.
    head: Option<usize>,
    tau: f64,
    whiten: bool,
    /// The places of the batch under way that count.
    places: Mutex<Option<Tensor>>,
    inputs: Mutex<Vec<Seen>>,
}

impl Watch {
    fn new(model: &Model, config: &LoraConfig) -> Result<Self> {
        let told = LoraConfig { layer_ranks: None, ..config.clone() };
        let resolved = told.resolve(&model.target_paths(), model.config().layers.len())?;
        let mut targets = Vec::with_capacity(resolved.len());
        let (mut linears, mut head) = (HashMap::new(), None);
        for Resolved { path, rank, .. } in resolved {
            let linear = model.linears().find(|linear| linear.path == path);
            let width = match linear {
                Some(linear) => linear.input,
                // As in PEFT, the embedding starts as it does otherwise: it reads no vectors.
                None if path == Model::EMBEDDING => continue,
                None => model.config().hidden_size,
            };
            if rank > width {
                return Err(Error::option(
                    "rank",
                    format!(
                        "is {rank}, but `{path}` reads {width} numbers; expected at most so many"
                    ),
                ));
            }
            match linear {
                Some(linear) => {
                    linears.insert(linear.index, targets.len());
                }
                None => head = Some(targets.len()),
            }
            let most = (rank as f64 * config.eva.rho).round_ties_even();
            targets.push(Target { path, rank, directions: (most as usize).min(width) });
        }
        if targets.is_empty() {
            return Err(Error::option(
                "init_lora_weights",
                "is eva, which is for linear layers, and `embed_tokens` is none",
            ));
        }
        let (tau, whiten) = (config.eva.tau, config.eva.whiten);
        let (places, inputs) = (Mutex::default(), Mutex::default());
        Ok(Self { targets, linears, head, tau, whiten, places, inputs })
    }

    fn inputs(&self) -> MutexGuard<'_, Vec<Seen>> {
        self.inputs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// How many inputs have directions that stayed, and how many there are.
    fn settled(&self) -> (usize, usize) {
        let inputs = self.inputs();
        (inputs.iter().filter(|seen| seen.is_settled()).count(), inputs.len())
    }

    /// Reads a batch that has places which count.
    fn read(self: &Arc<Self>, model: &Model, batch: &Batch) -> Result<()> {
        *self.places.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(Tensor::new(batch.counted_places(), model.device())?);
        let input = Input::batch(batch, model.device())?.with_observer(self.clone());
        let hidden = model.forward(&Tape::inference(), &input)?;
        match self.head {
            Some(head) => self.take_in(&[head], hidden.tensor()),
            None => Ok(()),
        }
    }

    /// What these targets read, `(batch, seq, in)`.
    fn take_in(&self, layers: &[usize], x: &Tensor) -> Result<()> {
        let mut inputs = self.inputs();
        let place = inputs.iter().position(|seen| seen.layers == layers).unwrap_or(inputs.len());
        if place == inputs.len() {
            let wanted = layers.iter().map(|layer| self.targets[*layer].directions).max();
            let wanted = wanted.unwrap_or_default();
            inputs.push(Seen {
                layers: layers.to_vec(),
                wanted,
                directions: eva::Directions::new(wanted),
                waiting: Vec::new(),
                stayed: Vec::new(),
                rank: wanted,
            });
        }
        let seen = &mut inputs[place];
        if seen.is_settled() {
            return Ok(());
        }
        let places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(places) = places.as_ref() else { return Ok(()) };
        let (batch, length, width) = x.dims3()?;
        let rows = x.reshape((batch * length, width))?.index_select(places, 0)?;
        seen.add(rows.to_dtype(DType::F32)?, self.tau)?;
        if seen.directions.is_finite() {
            return Ok(());
        }
        let path = layers.first().map_or("", |layer| &self.targets[*layer].path);
        Err(Error::option(
            "init_lora_weights",
            format!(
                "is eva, but what `{path}` reads of the training data isn't finite; --dtype f32 may help"
            ),
        ))
    }

    /// The rank of each target by what is known; `None` while some inputs have no directions yet.
    fn ranks(&self, inputs: &[Seen]) -> Option<Vec<usize>> {
        if inputs.iter().any(|seen| !seen.directions.is_known()) {
            return None;
        }
        let mut shares = vec![Vec::new(); self.targets.len()];
        for seen in inputs {
            for layer in &seen.layers {
                // Of all that read the same as many as of the one of the highest rank, as in PEFT.
                shares[*layer] = seen.directions.shares();
            }
        }
        let shares: Vec<&[f64]> = shares.iter().map(Vec::as_slice).collect();
        Some(eva::ranks(&shares, self.targets.iter().map(|target| target.rank).sum()))
    }

    /// Sees which directions are asked for now.
    fn distribute(&self) {
        let mut inputs = self.inputs();
        if let Some(ranks) = self.ranks(&inputs) {
            for seen in inputs.iter_mut() {
                seen.rank = seen.layers.iter().map(|layer| ranks[*layer]).max().unwrap_or_default();
            }
        }
    }

    /// That a pass over the data with so many tokens that count was enough to find directions.
    fn check_tokens(&self, tokens: usize) -> Result<()> {
        let needed = self.targets.iter().map(|target| target.directions).max().unwrap_or_default();
        if tokens >= needed && tokens > 0 {
            return Ok(());
        }
        Err(Error::option(
            "init_lora_weights",
            format!(
                "is eva, which looks for up to {needed} directions (rank x eva_rho) and needs as many tokens that the loss \
                 counts, but the training data have {tokens}; take more data, or a lower rank or eva_rho"
            ),
        ))
    }

    /// The rank of each target by its path, and the A `(in, rank)` of those that have one.
    fn finish(&self) -> Result<(IndexMap<String, usize>, HashMap<String, Tensor>)> {
        let inputs = self.inputs();
        let found = self.ranks(&inputs).unwrap_or_default();
        let mut starts = HashMap::new();
        for seen in inputs.iter() {
            for layer in seen.layers.iter().filter(|layer| found[**layer] > 0) {
                let start = seen.directions.start(found[*layer], self.whiten)?;
                starts.insert(self.targets[*layer].path.clone(), start);
            }
        }
        let paths = self.targets.iter().map(|target| target.path.clone());
        Ok((paths.zip(found).collect(), starts))
    }
}

impl Observer for Watch {
    fn see(&self, layers: &[&Linear], x: &Tensor) -> Result<()> {
        let targets: Vec<usize> =
            layers.iter().filter_map(|layer| self.linears.get(&layer.index).copied()).collect();
        if targets.is_empty() { Ok(()) } else { self.take_in(&targets, x) }
    }
}
