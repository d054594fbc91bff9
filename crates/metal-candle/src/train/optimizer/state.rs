//! What an optimiser keeps from step to step, its step, and its part of a checkpoint.

use super::{
    AdafactorOptions, AdamOptions, AdamWOptions, LionOptions, MuonOptions, Optimizer, SgdOptions,
};
use crate::adapter::{Entry, Parameters};
use crate::model::Weights;
use crate::train::Gradients;
use crate::{Error, Result};
use candle_core::{DType, Tensor};
use metal_candle_kernels::{adafactor, adamw, adamw8bit, flat, lion, muon, sgd};
use std::path::Path;

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
    let all = entries.iter().map(elements).sum::<usize>();
    let each = |name| floats(name, all);
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

/// The learning rates of a step.
#[derive(Debug, Clone, Copy)]
pub(in crate::train) struct Rates {
    /// Of all parameters.
    pub base: f64,
    /// What that of an adapter's B is multiplied by, which only Adam and AdamW heed.
    pub b_ratio: f64,
}

impl From<f64> for Rates {
    fn from(base: f64) -> Self {
        Self { base, b_ratio: 1.0 }
    }
}

/// An optimiser with what it keeps.
#[derive(Debug)]
pub(in crate::train) struct OptimizerState {
    optimizer: Optimizer,
    tensors: Vec<(&'static str, Tensor)>,
}

impl OptimizerState {
    /// As it is before the first step.
    pub fn new(optimizer: Optimizer, parameters: &Parameters) -> Result<Self> {
        let device = parameters.values().device();
        let tensors = layout(&optimizer, parameters.entries())
            .into_iter()
            .map(|part| Ok((part.name, Tensor::zeros(part.count, part.dtype, device)?)))
            .collect::<Result<_>>()?;
        Ok(Self { optimizer, tensors })
    }

    /// What a checkpoint keeps of it, by name.
    pub fn tensors(&self) -> Vec<(String, Tensor)> {
        self.tensors.iter().map(|(name, tensor)| ((*name).to_string(), tensor.clone())).collect()
    }

    /// Reads what [`Self::tensors`] gave.
    ///
    /// # Errors
    /// When the file cannot be read or is another optimiser's.
    pub fn load(optimizer: Optimizer, parameters: &Parameters, path: &Path) -> Result<Self> {
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
        let device = parameters.values().device();
        let tensors = layout
            .into_iter()
            .map(|Part { name, count, dtype }| {
                let tensor = match dtype {
                    DType::U8 => weights.bytes(name, count, device)?,
                    _ => weights.tensor(name, &[count], dtype, device)?,
                };
                Ok((name, tensor))
            })
            .collect::<Result<_>>()?;
        Ok(Self { optimizer, tensors })
    }

    /// Step `number`, from 1, with gradients clipped to `clip_norm`. Gives their norm before that; when it
    /// isn't finite, no step is made. The gradients are zero afterwards.
    pub fn step(
        &self,
        parameters: &Parameters,
        gradients: &Gradients,
        rates: impl Into<Rates>,
        number: usize,
        clip_norm: Option<f64>,
    ) -> Result<f64> {
        let norm = self.change(parameters, gradients, rates.into(), number, clip_norm);
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
    ) -> Result<f64> {
        let learning_rate = rates.base;
        let (values, gradients) = (parameters.values(), gradients.buffer());
        let decayed = parameters.decayed();
        let adam = |names: [&str; 2], options: &AdamWOptions| -> Result<f64> {
            let options = adamw_options(options, learning_rate);
            let [m, v] = [self.kept(names[0])?, self.kept(names[1])?];
            if rates.b_ratio != 1.0 {
                let clip = (number, clip_norm);
                return step_at_two_rates(parameters, gradients, [m, v], rates, clip, &options);
            }
            Ok(adamw::clipped_step(values, gradients, m, v, number, clip_norm, decayed, &options)?)
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
                Ok(sgd::clipped_step(values, gradients, v, number, clip_norm, decayed, &options)?)
            }
            Optimizer::Lion(options) => {
                let LionOptions { beta1, beta2, weight_decay } = *options;
                let options = lion::Options { learning_rate, beta1, beta2, weight_decay };
                let m = self.kept("lion.momentum")?;
                Ok(lion::clipped_step(values, gradients, m, clip_norm, decayed, &options)?)
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

/// AdamW's step, of every B at a rate of its own (LoRA+).
fn step_at_two_rates(
    parameters: &Parameters,
    gradients: &Tensor,
    [m, v]: [&Tensor; 2],
    rates: Rates,
    (number, clip_norm): (usize, Option<f64>),
    options: &adamw::Options,
) -> Result<f64> {
    let norm = flat::norm(gradients)?;
    if let Some(scale) = flat::clip_scale(norm, clip_norm) {
        for entry in parameters.entries().iter().filter(|entry| elements(entry) > 0) {
            let count = elements(entry);
            let part = |all: &Tensor| all.narrow(0, entry.offset, count);
            let (p, g, m, v) = (part(parameters.values())?, part(gradients)?, part(m)?, part(v)?);
            let ratio = if entry.name.ends_with(".lora_B") { rates.b_ratio } else { 1.0 };
            let options = adamw::Options { learning_rate: rates.base * ratio, ..*options };
            let decayed = if entry.shape.rank() >= 2 { count } else { 0 };
            adamw::step(&p, &g, &m, &v, number, scale, decayed, &options)?;
        }
    }
    flat::fill_zero(gradients)?;
    Ok(norm)
}

fn adamw_options(options: &AdamWOptions, learning_rate: f64) -> adamw::Options {
    let AdamWOptions { beta1, beta2, epsilon, weight_decay, bias_correction } = *options;
    adamw::Options { learning_rate, beta1, beta2, epsilon, weight_decay, bias_correction }
}
