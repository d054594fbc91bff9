//! What an optimiser keeps from step to step, its step, and its part of a checkpoint.

use super::{
    AdafactorOptions, AdamOptions, AdamWOptions, LionOptions, MuonOptions, Optimizer,
    OptimizerPlacement, SgdOptions,
};
use crate::adapter::{Entry, Kept, Parameters, Partition};
use crate::model::Weights;
use crate::parallel::Group;
use crate::train::Gradients;
use crate::{Error, Result};
use candle_core::{DType, Device, Tensor};
use metal_candle_kernels::flat::Clip;
use metal_candle_kernels::host::HostBuffers;
use metal_candle_kernels::{adafactor, adamw, adamw8bit, copy, flat, lion, muon, sgd};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// A flat buffer that an optimiser keeps, and its name in a checkpoint.
pub(super) struct Part {
    pub name: &'static str,
    pub count: usize,
    pub dtype: DType,
}

/// Everything that the optimiser keeps of these parameters. The names tell the optimiser; those of AdamW
/// have been in checkpoints before there were others.
pub(super) fn layout(optimizer: &Optimizer, entries: &[Entry]) -> Vec<Part> {
    let part = |name, count, dtype| Part { name, count, dtype };
    let floats = |name, count| part(name, count, DType::F32);
    let each = |name| floats(name, entries.iter().map(elements).sum());
    let mut parts = match optimizer {
        Optimizer::AdamW(_) => vec![each("first_moment"), each("second_moment")],
        Optimizer::Adam(_) => vec![each("adam.first_moment"), each("adam.second_moment")],
        Optimizer::Sgd(SgdOptions { momentum, .. }) if *momentum == 0.0 => Vec::new(),
        Optimizer::Sgd(_) => vec![each("sgd.momentum")],
        Optimizer::Lion(_) => vec![each("lion.momentum")],
        Optimizer::AdamW8bit(_) => {
            let runs = runs(entries);
            let sum = |short: bool, of: fn(&Run) -> usize| {
                runs.iter().filter(|run| run.short == short).map(of).sum::<usize>()
            };
            let (codes, scales) = (sum(true, |run| run.count), sum(true, Run::blocks));
            let whole = sum(false, |run| run.count);
            vec![
                part("adamw8bit.first_codes", codes, DType::U8),
                floats("adamw8bit.first_scales", scales),
                part("adamw8bit.second_codes", codes, DType::U8),
                floats("adamw8bit.second_scales", scales),
                floats("adamw8bit.first_moment", whole),
                floats("adamw8bit.second_moment", whole),
            ]
        }
        Optimizer::Adafactor(_) => {
            let [rows, columns] =
                [0, 1].map(|index| entries.iter().map(|entry| matrix(entry)[index]).sum::<usize>());
            vec![floats("adafactor.row_means", rows), floats("adafactor.column_means", columns)]
        }
        Optimizer::Muon(_) => {
            let (hidden, rest): (Vec<&Entry>, Vec<&Entry>) =
                entries.iter().partition(|entry| is_hidden_matrix(entry));
            let count =
                |entries: &[&Entry]| entries.iter().map(|entry| elements(entry)).sum::<usize>();
            vec![
                floats("muon.momentum", count(&hidden)),
                floats("muon.first_moment", count(&rest)),
                floats("muon.second_moment", count(&rest)),
            ]
        }
    };
    // A GPU has no memory of nothing.
    parts.retain(|part| part.count > 0);
    parts
}

fn elements(entry: &Entry) -> usize {
    entry.shape.elem_count()
}

/// The parameter as rows and columns; a vector is one row.
fn matrix(entry: &Entry) -> [usize; 2] {
    match entry.shape.dims().split_last() {
        Some((columns, leading)) => [leading.iter().product(), *columns],
        None => [1, 1],
    }
}

/// Whether Muon is for it: a matrix that is neither the embedding nor the head.
pub(super) fn is_hidden_matrix(entry: &Entry) -> bool {
    let is_outer = |part: &str| ["embed_tokens", "lm_head"].contains(&part);
    entry.shape.rank() == 2 && !entry.name.split('.').any(is_outer)
}

/// How many outputs a matrix has for every input. LoRA's are stored `(inputs, outputs)`, weights the other
/// way round.
pub(super) fn outputs_per_input(entry: &Entry) -> f64 {
    let [rows, columns] = matrix(entry).map(|size| size as f64);
    let lora = [".lora_A", ".lora_B", ".lora_embedding_A", ".lora_embedding_B"]
        .iter()
        .any(|name| entry.name.ends_with(name));
    if lora { columns / rows } else { rows / columns }
}

/// Neighbouring parameters whose moments are kept in one way.
struct Run {
    offset: usize,
    count: usize,
    decays: bool,
    /// In 8 bits.
    short: bool,
}

impl Run {
    fn blocks(&self) -> usize {
        self.count.div_ceil(adamw8bit::BLOCK)
    }
}

/// What is kept in 8 bits, and what isn't. No block has elements of two parameters.
fn runs(entries: &[Entry]) -> Vec<Run> {
    /// As in bitsandbytes.
    const SMALLEST: usize = 4096;
    let mut runs: Vec<Run> = Vec::new();
    for entry in entries {
        let (count, decays) = (elements(entry), entry.shape.rank() >= 2);
        let short = count >= SMALLEST;
        match runs.last_mut() {
            Some(last)
                if (last.short, last.decays) == (short, decays)
                    && (!short || last.count.is_multiple_of(adamw8bit::BLOCK)) =>
            {
                last.count += count;
            }
            _ => runs.push(Run { offset: entry.offset, count, decays, short }),
        }
    }
    runs
}

/// Of `count` elements, those of which each of so many ranks keeps the numbers, by rank.
pub(super) fn shares(count: usize, ranks: usize) -> Vec<Range<usize>> {
    /// Shares begin where vectors of any kernel may.
    const ALIGNMENT: usize = 64;
    let length = count.div_ceil(ranks).next_multiple_of(ALIGNMENT);
    let place = |rank: usize| (rank * length).min(count);
    (0..ranks).map(|rank| place(rank)..place(rank + 1)).collect()
}

/// Where a rank's part of what is kept lies.
#[derive(Debug, Clone, Copy, Default)]
pub(in crate::train) struct Home<'a> {
    pub placement: OptimizerPlacement,
    pub group: Group<'a>,
}

impl Home<'_> {
    /// The shares of all ranks, if each keeps its own of parameters that all have.
    fn shares(self, parameters: &Parameters) -> Option<Vec<Range<usize>>> {
        let is_shared = self.placement != OptimizerPlacement::Device
            && self.group.size() > 1
            && parameters.partition().is_none();
        is_shared.then(|| shares(parameters.len(), self.group.size()))
    }
}

/// The learning rates of a step.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct Rates {
    /// Of all parameters.
    pub base: f64,
    /// What that of an adapter's B and of what is moved with it is multiplied by, which only Adam and AdamW heed.
    pub b_ratio: f64,
}

impl From<f64> for Rates {
    fn from(base: f64) -> Self {
        Self { base, b_ratio: 1.0 }
    }
}

/// Whether it is a B, or moved with it, for which PEFT's LoRA+ takes every vector: biases, and DoRA's magnitudes. The
/// two factors of an embedding aren't.
pub(in crate::train) fn is_moved_with_b(entry: &Entry) -> bool {
    entry.name.ends_with(".lora_B") || entry.shape.rank() == 1
}

/// Gives what of a part lies in these ranges, one after the other, in the memory of the host.
type Read<'a> = dyn Fn(&Part, &[Range<usize>]) -> Result<Tensor> + 'a;

/// An optimiser with what it keeps, or this rank's share of it.
#[derive(Debug)]
pub(in crate::train) struct OptimizerState {
    optimizer: Optimizer,
    tensors: Vec<(&'static str, Tensor)>,
    /// The elements that they are of.
    share: Range<usize>,
    /// Those of each rank, if others keep a share, too.
    shares: Option<Vec<Range<usize>>>,
    /// How all that is kept is cut, if parameters are.
    partition: Option<Arc<Partition>>,
    /// What the tensors lie in, where that is the memory of the host.
    host: Option<HostBuffers>,
}

impl OptimizerState {
    /// As it is before the first step.
    pub fn new(optimizer: Optimizer, parameters: &Parameters, home: Home) -> Result<Self> {
        Self::made(optimizer, parameters, home, None)
    }

    /// With what `read` gives of each part, or zeros.
    fn made(
        optimizer: Optimizer,
        parameters: &Parameters,
        home: Home,
        read: Option<&Read>,
    ) -> Result<Self> {
        let partition = parameters.partition().cloned();
        if partition.is_some() {
            optimizer.check_in_parts()?;
        }
        if partition.is_none() || home.placement == OptimizerPlacement::Host {
            home.placement.check(&optimizer, home.group.size())?;
        }
        let device = parameters.values().device();
        let shares = home.shares(parameters);
        let mine = shares.as_ref().and_then(|shares| shares.get(home.group.rank()).cloned());
        let share = mine.clone().unwrap_or(0..parameters.values().elem_count());
        // Where there are shares, all that is kept is of each element. A GPU has no memory of nothing.
        let of_part = |part: &Part| match &partition {
            Some(_) => share.clone(),
            None => mine.clone().unwrap_or(0..part.count),
        };
        let mut parts = layout(&optimizer, parameters.entries());
        parts.retain(|part| !of_part(part).is_empty());
        let read = |part: &Part| -> Result<Option<Tensor>> {
            let Some(read) = read else { return Ok(None) };
            let Some(partition) = &partition else { return read(part, &[of_part(part)]).map(Some) };
            let (ranges, places): (Vec<_>, Vec<_>) = partition.held().into_iter().unzip();
            let (found, own) =
                (read(part, &ranges)?, Tensor::zeros(partition.len(), part.dtype, &Device::Cpu)?);
            let mut start = 0;
            for (range, place) in ranges.iter().zip(places) {
                own.slice_set(&found.narrow(0, start, range.len())?, 0, place)?;
                start += range.len();
            }
            Ok(Some(own))
        };
        let mut tensors = Vec::with_capacity(parts.len());
        if home.placement == OptimizerPlacement::Host {
            let like = parts.iter().map(|part| (vec![of_part(part).len()], part.dtype));
            let host = HostBuffers::new(&like.collect::<Vec<_>>(), device)?;
            for (part, tensor) in parts.iter().zip(host.tensors()) {
                if let Some(read) = read(part)? {
                    tensor.slice_set(&read, 0, 0)?;
                }
                tensors.push((part.name, tensor.clone()));
            }
            let host = Some(host);
            return Ok(Self { optimizer, tensors, share, shares, partition, host });
        }
        for part in &parts {
            let tensor = match read(part)? {
                Some(read) => read.to_device(device)?,
                None => copy::zeros(of_part(part).len(), part.dtype, device)?,
            };
            tensors.push((part.name, tensor));
        }
        Ok(Self { optimizer, tensors, share, shares, partition, host: None })
    }

    /// Whether other ranks keep a part of it, too.
    pub fn is_shared(&self) -> bool {
        self.shares.is_some() || self.partition.is_some()
    }

    /// What lies where of what is kept of each element, as [`Partition::pieces`] says it; `None` where this rank has all.
    fn pieces(&self) -> Option<Vec<(usize, Range<usize>)>> {
        let of_shares = |shares: &Vec<Range<usize>>| {
            shares.iter().map(|share| 0..share.len()).enumerate().collect()
        };
        let of_parts = self.partition.as_ref().map(|partition| partition.pieces());
        of_parts.or_else(|| self.shares.as_ref().map(of_shares))
    }

    /// The shapes and dtypes of what [`Self::all_kept`] gives, put together.
    pub fn outline(optimizer: &Optimizer, parameters: &Parameters) -> Vec<(Vec<usize>, DType)> {
        let layout = layout(optimizer, parameters.entries());
        layout.iter().map(|part| (vec![part.count], part.dtype)).collect()
    }

    /// What a checkpoint has of it, by name.
    ///
    /// # Errors
    /// When the device fails.
    pub fn all_kept(&self, parameters: &Parameters) -> Result<Vec<(String, Kept)>> {
        if self.host.is_some() {
            // The last step may be at work on it.
            parameters.values().device().synchronize()?;
        }
        let kept = layout(&self.optimizer, parameters.entries()).into_iter().map(|part| {
            let found = self.tensors.iter().find(|(name, _)| *name == part.name);
            let tensor = found.map(|(_, tensor)| tensor.clone());
            (part.name.to_string(), Kept::new("what the optimiser keeps", tensor, self.pieces()))
        });
        Ok(kept.collect())
    }

    /// Reads what [`Self::all_kept`] gave, or this rank's share of it.
    ///
    /// # Errors
    /// When the file cannot be read or is another optimiser's.
    pub fn load(
        optimizer: Optimizer,
        parameters: &Parameters,
        home: Home,
        path: &Path,
    ) -> Result<Self> {
        let weights = Weights::from_files([path])?;
        let layout = layout(&optimizer, parameters.entries());
        let mut found: Vec<&str> = weights.names().collect();
        let mut expected: Vec<&str> = layout.iter().map(|part| part.name).collect();
        found.sort_unstable();
        expected.sort_unstable();
        if found != expected {
            let list = |names: &[&str]| match names {
                [] => "nothing".to_string(),
                names => names.join(", "),
            };
            return Err(Error::file(
                path,
                format!(
                    "holds {}, but {} keeps {}; resume with the optimiser that the run began with",
                    list(&found),
                    optimizer.name(),
                    list(&expected)
                ),
            ));
        }
        let read = |part: &Part, ranges: &[Range<usize>]| match part.dtype {
            // Which no other rank has a part of.
            DType::U8 => weights.bytes(part.name, part.count, &Device::Cpu),
            dtype => weights.elements(part.name, part.count, ranges, dtype),
        };
        Self::made(optimizer, parameters, home, Some(&read))
    }

    /// Step `number`, from 1, with gradients clipped to `clip_norm`. Gives their norm before that; when it
    /// isn't finite, no step is made. The gradients are zero afterwards. Where each rank has a share, it makes the step of
    /// that and gives it to all others, so what comes out are the bits of a step by one of them.
    ///
    /// # Errors
    /// When the device fails, and as [`Collectives::spread`](crate::parallel::Collectives::spread).
    pub fn step(
        &self,
        parameters: &Parameters,
        gradients: &Gradients,
        rates: impl Into<Rates>,
        number: usize,
        clip_norm: Option<f64>,
        group: Group,
    ) -> Result<f64> {
        let norm = self.change(parameters, gradients, rates.into(), number, clip_norm, group);
        if let Some(shares) = &self.shares {
            // Of its own share the step has done it.
            let rests = [0..self.share.start, self.share.end..gradients.buffer().elem_count()];
            for rest in rests.into_iter().filter(|rest| !rest.is_empty()) {
                flat::fill_zero(&gradients.buffer().narrow(0, rest.start, rest.len())?)?;
            }
            if norm.as_ref().is_ok_and(|norm| norm.is_finite()) {
                group.spread("the parameters after a step", parameters.values(), shares)?;
            }
        }
        parameters.changed();
        norm
    }

    fn change(
        &self,
        parameters: &Parameters,
        gradients: &Gradients,
        rates: Rates,
        number: usize,
        clip_norm: Option<f64>,
        group: Group,
    ) -> Result<f64> {
        let learning_rate = rates.base;
        let gradients = gradients.buffer();
        if self.share.is_empty() {
            return Ok(flat::norm(gradients)?);
        }
        let of_share = |all: &Tensor| all.narrow(0, self.share.start, self.share.len());
        let (values, own) = (&of_share(parameters.values())?, &of_share(gradients)?);
        let decayed = parameters.decayed().clamp(self.share.start, self.share.end);
        let decayed = decayed - self.share.start;
        // A number is its own norm.
        let norm = match &self.partition {
            Some(partition) => Some(norm_of_parts(gradients, partition, group)?),
            None => None,
        };
        let of_all = self.shares.is_some().then_some(gradients);
        let clip = Clip { max_norm: clip_norm, norm_of: norm.as_ref().or(of_all) };
        let adam = |names: [&str; 2], options: &AdamWOptions| -> Result<f64> {
            let options = adamw_options(options, learning_rate);
            let [m, v] = [self.kept(names[0])?, self.kept(names[1])?];
            // What is in parts has no B.
            if rates.b_ratio != 1.0 && self.partition.is_none() {
                let clip = (number, clip_norm);
                return self.step_at_two_rates(
                    parameters,
                    gradients,
                    [m, v],
                    rates,
                    clip,
                    &options,
                );
            }
            Ok(adamw::clipped_step(values, own, m, v, number, clip, decayed, &options)?)
        };
        match &self.optimizer {
            Optimizer::AdamW(options) => adam(["first_moment", "second_moment"], options),
            Optimizer::Adam(options) => {
                let AdamOptions { beta1, beta2, epsilon, bias_correction } = *options;
                let options =
                    AdamWOptions { beta1, beta2, epsilon, weight_decay: 0.0, bias_correction };
                adam(["adam.first_moment", "adam.second_moment"], &options)
            }
            Optimizer::Sgd(options) => {
                let SgdOptions { momentum, dampening, nesterov, weight_decay } = *options;
                let options =
                    sgd::Options { learning_rate, momentum, dampening, nesterov, weight_decay };
                let v = (momentum != 0.0).then(|| self.kept("sgd.momentum")).transpose()?;
                Ok(sgd::clipped_step(values, own, v, number, clip, decayed, &options)?)
            }
            Optimizer::Lion(options) => {
                let LionOptions { beta1, beta2, weight_decay } = *options;
                let options = lion::Options { learning_rate, beta1, beta2, weight_decay };
                let m = self.kept("lion.momentum")?;
                Ok(lion::clipped_step(values, own, m, clip, decayed, &options)?)
            }
            // These go over the parameters one after the other, so the norm comes first.
            optimizer => {
                let norm = flat::norm(gradients)?;
                let Some(scale) = flat::clip_scale(norm, clip_norm) else {
                    flat::fill_zero(gradients)?;
                    return Ok(norm);
                };
                match optimizer {
                    Optimizer::AdamW8bit(options) => {
                        let options = adamw_options(options, learning_rate);
                        self.step_in_8_bits(parameters, gradients, number, scale, &options)?;
                    }
                    Optimizer::Adafactor(options) => {
                        let rate = learning_rate;
                        self.step_by_adafactor(
                            parameters, gradients, rate, number, scale, options,
                        )?;
                    }
                    Optimizer::Muon(options) => {
                        let rate = learning_rate;
                        self.step_by_muon(parameters, gradients, rate, number, scale, options)?;
                    }
                    other => {
                        return Err(Error::option(
                            "optimizer",
                            format!("{} makes no step", other.name()),
                        ));
                    }
                }
                Ok(norm)
            }
        }
    }

    fn step_in_8_bits(
        &self,
        parameters: &Parameters,
        gradients: &Tensor,
        number: usize,
        scale: f32,
        options: &adamw::Options,
    ) -> Result<()> {
        let (mut codes, mut scales, mut whole) = (0, 0, 0);
        for run in runs(parameters.entries()) {
            let [p, g] =
                [parameters.values(), gradients].map(|all| all.narrow(0, run.offset, run.count));
            let (p, g) = (p?, g?);
            let options = adamw::Options {
                weight_decay: if run.decays { options.weight_decay } else { 0.0 },
                ..*options
            };
            if run.short {
                let of = |name, start, count| self.part_of(name, start, count);
                let moments = adamw8bit::Moments {
                    m_codes: &of("adamw8bit.first_codes", codes, run.count)?,
                    m_scales: &of("adamw8bit.first_scales", scales, run.blocks())?,
                    v_codes: &of("adamw8bit.second_codes", codes, run.count)?,
                    v_scales: &of("adamw8bit.second_scales", scales, run.blocks())?,
                };
                adamw8bit::step(&p, &g, moments, number, scale, &options)?;
                codes += run.count;
                scales += run.blocks();
            } else {
                let m = self.part_of("adamw8bit.first_moment", whole, run.count)?;
                let v = self.part_of("adamw8bit.second_moment", whole, run.count)?;
                adamw::step(&p, &g, &m, &v, number, scale, run.count, &options)?;
                flat::fill_zero(&g)?;
                whole += run.count;
            }
        }
        Ok(())
    }

    fn step_by_adafactor(
        &self,
        parameters: &Parameters,
        gradients: &Tensor,
        learning_rate: f64,
        number: usize,
        scale: f32,
        options: &AdafactorOptions,
    ) -> Result<()> {
        let (mut row, mut column) = (0, 0);
        for entry in parameters.entries().iter().filter(|entry| elements(entry) > 0) {
            let [rows, columns] = matrix(entry);
            let [p, g] = [parameters.values(), gradients]
                .map(|all| entry.of(all)?.reshape((rows, columns)).map_err(Error::from));
            let row_means = self.part_of("adafactor.row_means", row, rows)?;
            let column_means = self.part_of("adafactor.column_means", column, columns)?;
            let options = adafactor::Options {
                learning_rate,
                epsilon: options.epsilon,
                scale_epsilon: options.scale_epsilon,
                clip_threshold: options.clip_threshold,
                decay_rate: options.decay_rate,
                scale_parameter: options.scale_parameter,
                relative_step: options.relative_step,
                warmup_init: options.warmup_init,
                weight_decay: if entry.shape.rank() >= 2 { options.weight_decay } else { 0.0 },
            };
            adafactor::step(&p?, &g?, &row_means, &column_means, number, scale, &options)?;
            row += rows;
            column += columns;
        }
        Ok(())
    }

    fn step_by_muon(
        &self,
        parameters: &Parameters,
        gradients: &Tensor,
        learning_rate: f64,
        number: usize,
        scale: f32,
        options: &MuonOptions,
    ) -> Result<()> {
        let MuonOptions { momentum, nesterov, weight_decay, ns_steps, adamw_share } = *options;
        let rest = AdamWOptions { weight_decay, ..AdamWOptions::default() };
        let rest = adamw_options(&rest, learning_rate * adamw_share);
        let hidden = muon::Options { learning_rate, momentum, nesterov, weight_decay };
        let (mut of_hidden, mut of_rest) = (0, 0);
        for entry in parameters.entries().iter().filter(|entry| elements(entry) > 0) {
            let count = elements(entry);
            let [p, g] =
                [parameters.values(), gradients].map(|all| all.narrow(0, entry.offset, count));
            let (p, g) = (p?, g?);
            if is_hidden_matrix(entry) {
                let [rows, columns] = matrix(entry);
                let m = self.part_of("muon.momentum", of_hidden, count)?;
                let update = Tensor::zeros(count, DType::F32, p.device())?;
                muon::step(&p, &g, &m, &update, scale, &hidden)?;
                let direction = muon::orthogonalize(&update.reshape((rows, columns))?, ns_steps)?;
                let rate = learning_rate * outputs_per_input(entry).max(1.0).sqrt();
                flat::accumulate(&p.reshape((rows, columns))?, &direction, -rate)?;
                of_hidden += count;
            } else {
                let m = self.part_of("muon.first_moment", of_rest, count)?;
                let v = self.part_of("muon.second_moment", of_rest, count)?;
                let decayed = if entry.shape.rank() >= 2 { count } else { 0 };
                adamw::step(&p, &g, &m, &v, number, scale, decayed, &rest)?;
                flat::fill_zero(&g)?;
                of_rest += count;
            }
        }
        Ok(())
    }

    /// AdamW's step, of every B and what is moved with it at a rate of its own (LoRA+).
    fn step_at_two_rates(
        &self,
        parameters: &Parameters,
        gradients: &Tensor,
        [m, v]: [&Tensor; 2],
        rates: Rates,
        (number, clip_norm): (usize, Option<f64>),
        options: &adamw::Options,
    ) -> Result<f64> {
        let norm = flat::norm(gradients)?;
        if let Some(scale) = flat::clip_scale(norm, clip_norm) {
            for entry in parameters.entries() {
                let start = entry.offset.max(self.share.start);
                let end = (entry.offset + elements(entry)).min(self.share.end);
                if start >= end {
                    continue;
                }
                let count = end - start;
                let [p, g] =
                    [parameters.values(), gradients].map(|all| all.narrow(0, start, count));
                let [m, v] = [m, v].map(|own| own.narrow(0, start - self.share.start, count));
                let ratio = if is_moved_with_b(entry) { rates.b_ratio } else { 1.0 };
                let options = adamw::Options { learning_rate: rates.base * ratio, ..*options };
                let decayed = if entry.shape.rank() >= 2 { count } else { 0 };
                adamw::step(&p?, &g?, &m?, &v?, number, scale, decayed, &options)?;
            }
        }
        flat::fill_zero(gradients)?;
        Ok(norm)
    }

    /// What is kept under this name.
    fn kept(&self, name: &str) -> Result<&Tensor> {
        let found = self.tensors.iter().find(|(kept, _)| *kept == name);
        found.map(|(_, tensor)| tensor).ok_or_else(|| {
            Error::option("optimizer", format!("{} keeps no {name}", self.optimizer.name()))
        })
    }

    /// `count` elements of it, as a view.
    fn part_of(&self, name: &str, start: usize, count: usize) -> Result<Tensor> {
        Ok(self.kept(name)?.narrow(0, start, count)?)
    }
}

/// The norm of gradients of which each rank has a part, `(1)`.
fn norm_of_parts(gradients: &Tensor, partition: &Partition, group: Group) -> Result<Tensor> {
    let square = |range: Range<usize>| -> Result<f64> {
        match range.is_empty() {
            true => Ok(0.0),
            false => Ok(flat::norm(&gradients.narrow(0, range.start, range.len())?)?.powi(2)),
        }
    };
    let mut matrices = [square(0..partition.matrices())?];
    group.add_up("the norm of the gradients", &mut matrices)?;
    let vectors = square(partition.matrices()..partition.len())?;
    let norm = (matrices[0] + vectors).sqrt();
    Ok(Tensor::new(&[norm as f32], gradients.device())?)
}

fn adamw_options(options: &AdamWOptions, learning_rate: f64) -> adamw::Options {
    let AdamWOptions { beta1, beta2, epsilon, weight_decay, bias_correction } = *options;
    adamw::Options { learning_rate, beta1, beta2, epsilon, weight_decay, bias_correction }
}
