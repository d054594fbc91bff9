//! An adapter under construction: what it trains of a model, by names and shapes, before anything has memory or is
//! computed. The header of a file is compared with that first.

use super::methods::dora::Magnitude;
use super::methods::lora::{LaidOut, Start};
use super::methods::{self, LowRank};
use super::partition::Partition;
use super::tables::PlannedTable;
use super::{
    Adapter, Biases, Entry, LoraConfig, Method, Parameters, Part, PartKind, Resolved, StartFrom,
};
use crate::autograd::Parameter;
use crate::model::Model;
use crate::model::layer::Linear;
use crate::model::weight::WeightId;
use crate::{Error, Result};
use candle_core::{DType, Device, Shape, Tensor};
use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

/// The trainable tensors of an adapter before they have memory.
#[derive(Default)]
pub(super) struct Plan {
    parts: Vec<(PartKind, String)>,
    pub parameters: Vec<(String, Shape)>,
}

impl Plan {
    /// Adds a tensor, and gives its place among them.
    pub fn add(&mut self, kind: PartKind, of: &str, shape: impl Into<Shape>) -> usize {
        let name = match kind {
            PartKind::A => format!("{of}.lora_A"),
            PartKind::B => format!("{of}.lora_B"),
            PartKind::Magnitude => format!("{of}.lora_magnitude_vector"),
            PartKind::Bias => format!("{of}.bias"),
            PartKind::EmbeddingA => format!("{of}.lora_embedding_A"),
            PartKind::EmbeddingB => format!("{of}.lora_embedding_B"),
            PartKind::Rows => format!("{of}.token_adapter.trainable_tokens_delta"),
            PartKind::Weight => of.to_string(),
        };
        self.parts.push((kind, of.to_string()));
        self.parameters.push((name, shape.into()));
        self.parts.len() - 1
    }

    /// What each tensor is, what it is of, and its shape.
    pub fn outlines(&self) -> impl Iterator<Item = Outline<'_>> {
        let parts = self.parts.iter().zip(&self.parameters);
        parts.map(|((kind, of), (_, shape))| Outline {
            kind: *kind,
            of,
            dims: shape.dims(),
            has_start: false,
        })
    }

    /// Every weight of the model.
    pub fn full(model: &Model) -> Self {
        let mut plan = Self::default();
        for (name, id) in model.named_weights() {
            plan.add(PartKind::Weight, name, model.frozen().shape(id));
        }
        plan
    }

    /// Gives all of them memory, zeroed.
    pub fn allocate(self, device: &Device) -> Result<(Parameters, Vec<Part>, Vec<Parameter>)> {
        self.allocate_cut(device, |_| Ok(None))
    }

    /// [`Self::allocate`], cut as `partition` says for their layout. What is in parts has no view.
    pub fn allocate_cut(
        self,
        device: &Device,
        partition: impl FnOnce(&[Entry]) -> Result<Option<Partition>>,
    ) -> Result<(Parameters, Vec<Part>, Vec<Parameter>)> {
        let (parameters, ids) = Parameters::cut(&self.parameters, device, partition)?;
        let mut parts = Vec::with_capacity(ids.len());
        let mut views = Vec::with_capacity(ids.len());
        for ((kind, of), id) in self.parts.into_iter().zip(ids) {
            parts.push(Part { kind, of, id, entry: parameters.entry(id)?.clone(), start: None });
            let is_cut = parameters.partition().is_some_and(|cut| cut.unit_of(id).is_some());
            let view = match is_cut {
                true => Tensor::zeros(0, DType::F32, &Device::Cpu)?,
                false => parameters.view(id)?,
            };
            views.push(Parameter::new(view, id));
        }
        Ok((parameters, parts, views))
    }
}

/// A trainable tensor without its memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outline<'a> {
    pub kind: PartKind,
    /// The path of the linear layer, or the name of the weight that it replaces.
    pub of: &'a str,
    pub dims: &'a [usize],
    /// Whether a file has what A or B started from, too.
    pub has_start: bool,
}

/// What is trained of a linear layer, by its places in the plan.
struct PlannedLayer<'m> {
    linear: &'m Linear,
    rank: usize,
    scale: f64,
    a: usize,
    b: usize,
    magnitude: Option<usize>,
    bias: Option<(WeightId, usize)>,
}

/// An adapter of a model as its configuration describes it, without memory.
pub(super) struct PlannedLora<'m> {
    model: &'m Model,
    config: LoraConfig,
    pub plan: Plan,
    layers: Vec<PlannedLayer<'m>>,
    tables: Vec<PlannedTable>,
    /// The weights that are trained whole: the model's, or `None` for the head of a model whose head is the embedding;
    /// and their places in the plan.
    replacements: Vec<(Option<WeightId>, usize)>,
}

impl<'m> PlannedLora<'m> {
    /// As `config` describes it.
    pub fn new(model: &'m Model, config: LoraConfig) -> Result<Self> {
        let layer_count = model.config().layers.len();
        let paths = model.target_paths();
        config.refuse_experts(model)?;
        let resolved = config.resolve(&paths, layer_count)?;
        if model.is_tensor_parallel() {
            check_cuts(&config, &resolved)?;
        }
        let linears: HashMap<&str, &Linear> =
            model.linears().map(|linear| (linear.path.as_str(), linear)).collect();
        let mut plan = Plan::default();
        let mut layers = Vec::with_capacity(resolved.len());
        let mut tables = Vec::new();
        for layer @ Resolved { path, rank, scale } in &resolved {
            if [Model::EMBEDDING, Model::HEAD].contains(&path.as_str()) {
                tables.push(PlannedTable::low_rank(model, &config, layer, &mut plan)?);
                continue;
            }
            let linear = *linears.get(path.as_str()).ok_or_else(|| {
                Error::option("target_modules", format!("`{path}` is no layer of this model"))
            })?;
            let Linear { input, output, .. } = *linear;
            let most = match config.start {
                StartFrom::Eva => input,
                start if start.takes_from_weight() => input.min(output),
                _ => input.max(output),
            };
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
            let magnitude = config.dora.then(|| plan.add(PartKind::Magnitude, path, output));
            let bias = linear.bias.filter(|_| config.bias != Biases::None);
            let bias = bias.map(|id| (id, plan.add(PartKind::Bias, path, output)));
            let (rank, scale) = (*rank, *scale);
            layers.push(PlannedLayer { linear, rank, scale, a, b, magnitude, bias });
        }
        PlannedTable::add_rows(model, &config, &mut tables, &mut plan)?;
        let replacements = plan_replacements(model, &config, &mut plan, (&resolved, &tables))?;
        Ok(Self { model, config, plan, layers, tables, replacements })
    }

    /// What the layers start from, in their order, where that is taken from their weights, which `weight` gives.
    pub fn starts<'w>(
        &self,
        weight: impl Fn(WeightId) -> Result<Cow<'w, Tensor>>,
    ) -> Result<Vec<Option<Start>>> {
        let start = |layer: &PlannedLayer| {
            let PlannedLayer { linear, rank, scale, .. } = layer;
            let weight = || weight(linear.weight);
            methods::start(self.config.start, weight, *rank, *scale, &linear.path)
        };
        self.layers.iter().map(start).collect()
    }

    /// The largest rank of a layer whose start is taken from its weight, and its path.
    pub fn largest_start(&self) -> Option<(usize, &str)> {
        let layers = self.layers.iter().filter(|_| self.config.start.takes_from_weight());
        layers.map(|layer| (layer.rank, layer.linear.path.as_str())).max()
    }

    /// The adapter, whose A, B and lengths are zero, with what [`Self::starts`] has found.
    pub fn build(self, starts: Vec<Option<Start>>) -> Result<Adapter> {
        let Self { model, config, plan, layers, tables, replacements } = self;
        let (parameters, mut parts, views) = plan.allocate(model.device())?;
        let mut updates: Vec<Option<LowRank>> = model.linears().map(|_| None).collect();
        let mut replaced = vec![None; model.frozen().len()];
        let mut head = None;
        let mut replace = |place: Option<WeightId>, view: &Parameter| -> Result<()> {
            let weight = model.dense(place.unwrap_or(model.embedding))?;
            parameters.set(view.id(), &weight)?;
            match place {
                Some(id) => replaced[id.index()] = Some(view.clone()),
                None => head = Some(view.clone()),
            }
            Ok(())
        };
        for (place, part) in replacements {
            replace(place, &views[part])?;
        }
        let stream = layers.len() as u64;
        for (stream, (layer, start)) in layers.into_iter().zip(starts).enumerate() {
            let PlannedLayer { linear, rank: _, scale, a, b, magnitude, bias } = layer;
            if let Some((id, part)) = bias {
                replace(Some(id), &views[part])?;
            }
            let on_device = |start: Start| -> Result<Start> {
                let Start { a, minus_b } = start;
                let device = model.device();
                Ok(Start { a: a.to_device(device)?, minus_b: minus_b.to_device(device)? })
            };
            let start = start.map(on_device).transpose()?;
            if let Some(start) = &start {
                parts[a].start = Some(start.a.clone());
                parts[b].start = Some(start.minus_b.clone());
            }
            let magnitude = magnitude.map(|part| -> Result<Magnitude> {
                Magnitude::new(views[part].clone(), &*model.dense(linear.weight)?)
            });
            updates[linear.index] = Some(LowRank {
                a: views[a].clone(),
                b: views[b].clone(),
                scale,
                dropout: config.dropout,
                stream: stream as u64,
                start,
                magnitude: magnitude.transpose()?,
                laid_out: LaidOut::default(),
            });
        }
        let (mut embedding, mut head_update) = (None, None);
        for planned in tables {
            let is_head = planned.path == Model::HEAD;
            let is_both = !is_head && model.head.is_none() && planned.is_rows();
            let update = Arc::new(planned.update(model, &config, &parameters, &views, stream)?);
            if is_head || is_both {
                head_update = Some(update.clone());
            }
            if !is_head {
                embedding = Some(update);
            }
        }
        let layer_count = model.config().layers.len();
        let method = Method::Lora { config: Box::new(config), layer_count };
        Ok(Adapter {
            model: model.id(),
            method,
            updates,
            embedding,
            head_update,
            replaced,
            head,
            parts,
            parameters,
            gathering: None,
        })
    }
}

/// The weights that are trained whole: the model's, or `None` for the head of a model whose head is the
/// embedding; and their places in the plan.
fn plan_replacements(
    model: &Model,
    config: &LoraConfig,
    plan: &mut Plan,
    (resolved, tables): (&[Resolved], &[PlannedTable]),
) -> Result<Vec<(Option<WeightId>, usize)>> {
    const HEAD: &str = Model::HEAD;
    let modules = &config.modules_to_save;
    // PEFT compares the ends of the paths as texts.
    let mut used = vec![false; modules.len()];
    let mut saved = |path: &str| {
        let mut is_saved = false;
        for (module, used) in modules.iter().zip(&mut used) {
            let is_meant = path.ends_with(module.as_str());
            *used |= is_meant;
            is_saved |= is_meant;
        }
        is_saved
    };
    let adapted = |path: &str| {
        resolved.iter().any(|layer| layer.path == path)
            || tables.iter().any(|table| table.changes(model, path))
    };
    let refuse_both = |path: &str| {
        Err(Error::option(
            "modules_to_save",
            format!("has `{path}`, which gets an adapter; expected one of both"),
        ))
    };
    let mut found = Vec::new();
    for (name, id) in model.named_weights() {
        let (path, tensor) = name.rsplit_once('.').unwrap_or((name, ""));
        let is_bias = config.bias == Biases::All && tensor == "bias" && !adapted(path);
        if saved(path) {
            if adapted(path) {
                return refuse_both(path);
            }
        } else if !is_bias {
            continue;
        }
        let shape = model.frozen().shape(id);
        found.push((Some(id), plan.add(PartKind::Weight, name, shape)));
    }
    if model.head.is_none() && saved(HEAD) {
        if adapted(HEAD) {
            return refuse_both(HEAD);
        }
        let shape = model.frozen().shape(model.embedding);
        found.push((None, plan.add(PartKind::Weight, &format!("{HEAD}.weight"), shape)));
    }
    if let Some(index) = used.iter().position(|used| !used) {
        return Err(Error::option(
            "modules_to_save",
            format!(
                "has `{}`, but no part of this model is called so; expected embed_tokens, norm, lm_head or \
                 a linear layer",
                modules[index]
            ),
        ));
    }
    Ok(found)
}

/// An error unless ranks that have a part of a model each can have an adapter's parts, too: updates of linear layers
/// that don't take anything from the weights, which nobody has whole.
fn check_cuts(config: &LoraConfig, resolved: &[Resolved]) -> Result<()> {
    let is_table = |path: &str| [Model::EMBEDDING, Model::HEAD].contains(&path);
    let table = resolved.iter().any(|layer| is_table(&layer.path));
    let has = [
        ("DoRA", config.dora),
        ("a start that is taken from the weights (PiSSA, OLoRA)", config.start.takes_from_weight()),
        ("biases", config.bias != Biases::None),
        ("weights that it replaces (modules_to_save)", !config.modules_to_save.is_empty()),
        (
            "rows for some tokens (trainable_token_indices)",
            config.trainable_token_indices.is_some(),
        ),
        ("an update of the embedding or the head", table),
    ];
    match has.into_iter().find(|(_, is_there)| *is_there) {
        None => Ok(()),
        Some((what, _)) => Err(Error::Unsupported(format!(
            "an adapter with {what} for a model in parts on several devices (tensor parallelism); LoRA of linear layers is"
        ))),
    }
}
