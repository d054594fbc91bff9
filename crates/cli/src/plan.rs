//! What a run will do, before it does it.

use crate::errors::usage;
use crate::output::{are, bytes, grouped, plural, table};
use crate::settings::{
    ActivationPlacement, BasePlacement, Entry, FineTuneType, ObjectiveName, OptimizerPlacement,
    Settings,
};
use indexmap::IndexMap;
use metal_candle::adapter::{Biases, LoraConfig, StartFrom, Targets};
use metal_candle::data::{Dataset, Report};
use metal_candle::model::Model;
use metal_candle::train::LearningRate;
use serde::Serialize;

/// What will be trained.
#[derive(Debug, Clone, Serialize)]
pub struct Plan {
    pub model: String,
    pub family: &'static str,
    pub parameters: u64,
    pub trainable_parameters: u64,
    pub trainable_share: f64,
    pub lora: Option<LoraPlan>,
    pub data: DataPlan,
    pub steps: u64,
    /// Those that train together, each with a batch of its own.
    pub processes: usize,
    pub batches_per_epoch: u64,
    pub tokens_per_epoch: u64,
    pub objective: String,
    pub optimizer: String,
    /// None where the optimiser makes its own.
    pub peak_learning_rate: Option<f64>,
    pub memory: Memory,
    /// What computes, in which dtype, and why that was taken.
    pub compute: String,
    /// What a person should look at before the run is made.
    pub warnings: Vec<String>,
    pub settings: Settings,
}

/// Where adapters go.
#[derive(Debug, Clone, Serialize)]
pub struct LoraPlan {
    pub modules: Vec<String>,
    pub layers: Vec<usize>,
    pub adapted: usize,
}

/// What became of the records.
#[derive(Debug, Clone, Serialize)]
pub struct DataPlan {
    pub train: Report,
    pub valid: Option<Report>,
    pub test: Option<Report>,
}

/// Estimated memory, in bytes.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Memory {
    /// The frozen weights.
    pub weights: u64,
    /// Trained parameters and their gradients in f32, and what the optimiser keeps.
    pub training: u64,
    /// What a batch of the longest examples keeps on the device for its backward pass.
    pub activations: u64,
    /// What of all this lies in the memory of the machine instead, of each process.
    pub host: u64,
}

impl Memory {
    fn total(self) -> u64 {
        self.weights + self.training + self.activations
    }
}

impl Plan {
    /// The plan as a person reads it.
    pub fn describe(&self) -> String {
        let settings = &self.settings;
        let share = 100.0 * self.trainable_share;
        let mut rows = vec![
            ("Model", format!("{} ({})", self.model, self.family)),
            ("Parameters", grouped(self.parameters)),
            ("Trained", format!("{} ({share:.2} %)", grouped(self.trainable_parameters))),
        ];
        if let Some(lora) = &self.lora {
            rows.push((
                if settings.fine_tune_type == FineTuneType::Dora { "DoRA" } else { "LoRA" },
                format!(
                    "rank {}, alpha {}{}, dropout {}, on {} in {}{}",
                    settings.rank,
                    settings.alpha.unwrap_or_default(),
                    if settings.rslora { ", rank-stabilised" } else { "" },
                    settings.dropout,
                    lora.modules.join(", "),
                    layers(&lora.layers),
                    match settings.init_lora_weights {
                        StartFrom::Kaiming | StartFrom::Gaussian => String::new(),
                        start => format!(", starts as {start}"),
                    },
                ),
            ));
            let modules = settings.modules_to_save.iter().flatten().cloned();
            let biases = match settings.bias {
                Biases::None => None,
                Biases::LoraOnly => Some("the biases of these layers".to_string()),
                Biases::All => Some("all biases".to_string()),
            };
            let tokens = settings.trainable_token_indices.as_ref().map(|tokens| tokens.to_string());
            let whole: Vec<String> = modules.chain(biases).chain(tokens).collect();
            if !whole.is_empty() {
                rows.push(("Trained whole", whole.join(", ")));
            }
        }
        rows.push(("Data", format!("training: {}", self.data.train)));
        if let Some(shares) = shares(&settings.data.0) {
            rows.push(("", shares));
        }
        for (name, report) in [("validation", &self.data.valid), ("test", &self.data.test)] {
            if let Some(report) = report {
                rows.push(("", format!("{name}: {report}")));
            }
        }
        if self.data.valid.is_none() {
            rows.push(("", "validation: none".into()));
        }
        rows.push((
            "Run",
            format!(
                "{} of {} x {} rows{}{}, {} and {} tokens an epoch",
                plural(self.steps, "step"),
                settings.grad_accumulation,
                settings.batch_size,
                if settings.packing { " (packed)" } else { "" },
                match self.processes {
                    1 => String::new(),
                    processes => format!(" in each of {processes} processes"),
                },
                plural(self.batches_per_epoch, "batch"),
                grouped(self.tokens_per_epoch),
            ),
        ));
        if settings.objective != ObjectiveName::Sft {
            let compares = settings.objective().is_ok_and(|objective| objective.uses_reference());
            let on = settings.init_adapter.as_ref().filter(|_| compares);
            let reference = on.map(|folder| format!("; the reference is {}", folder.display()));
            rows.push((
                "Objective",
                format!("{}{}", self.objective, reference.unwrap_or_default()),
            ));
        }
        rows.push(("Optimizer", self.optimizer.clone()));
        rows.push(("Learning rate", rate(self.peak_learning_rate, settings)));
        rows.push(("Computes", self.compute.clone()));
        rows.push((
            "Memory",
            format!(
                "about {}: weights {}, training {}, activations {}{}",
                bytes(self.memory.total()),
                bytes(self.memory.weights),
                bytes(self.memory.training),
                bytes(self.memory.activations),
                match self.memory.host {
                    0 => String::new(),
                    host => format!("; of the machine's {} for each process", bytes(host)),
                }
            ),
        ));
        rows.push(("Output", settings.output.display().to_string()));
        table(&rows)
    }
}

/// The learning rate, which Adafactor may make by itself.
fn rate(peak: Option<f64>, settings: &Settings) -> String {
    let rate = match peak {
        Some(peak) => format!("{peak:e} at its peak"),
        None if settings.warmup_init == Some(true) => {
            "1 over the root of the step, at most 0.000001 times the step (relative_step, warmup_init)".into()
        }
        None => "1 over the root of the step, at most 0.01 (relative_step)".into(),
    };
    match settings.scale_parameter {
        Some(true) => format!("{rate}, times the size of each parameter (scale_parameter)"),
        _ => rate,
    }
}

fn layers(layers: &[usize]) -> String {
    let contiguous = layers.windows(2).all(|pair| matches!(pair, [a, b] if *b == a + 1));
    match layers {
        [] => "no layer".into(),
        [one] => format!("layer {one}"),
        [first, .., last] if contiguous => format!("layers {first} to {last}"),
        _ => {
            format!("layers {}", layers.iter().map(usize::to_string).collect::<Vec<_>>().join(", "))
        }
    }
}

pub fn lora_plan(config: &LoraConfig, model: &Model) -> anyhow::Result<LoraPlan> {
    let resolved = config.resolve(&model.target_paths(), model.config().layers.len())?;
    let modules = names(resolved.iter().map(|linear| linear.path.as_str()));
    let mut layers = Vec::new();
    for linear in &resolved {
        let layer = linear.path.split('.').find_map(|part| part.parse().ok());
        if let Some(layer) = layer.filter(|layer| !layers.contains(layer)) {
            layers.push(layer);
        }
    }
    Ok(LoraPlan { modules, layers, adapted: resolved.len() })
}

/// The last parts of paths, each once.
fn names<'a>(paths: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for path in paths {
        let name = path.rsplit('.').next().unwrap_or_default();
        if !names.iter().any(|known| known == name) {
            names.push(name.into());
        }
    }
    names
}

/// That each pattern of ranks and alphas is about some layer that is adapted, and of what is excluded one, of the
/// linear layers with these paths in so many decoder layers.
pub fn check_patterns(config: &LoraConfig, paths: &[String], layers: usize) -> anyhow::Result<()> {
    let adapted = config.resolve(paths, layers)?;
    let ranks = config.rank_pattern.keys().map(|pattern| ("rank_pattern", pattern));
    let alphas = config.alpha_pattern.keys().map(|pattern| ("alpha_pattern", pattern));
    for (key, pattern) in ranks.chain(alphas) {
        // A rank that only it gives shows what it matches.
        let alone = LoraConfig {
            rank: 1,
            rank_pattern: IndexMap::from([(pattern.clone(), 2)]),
            alpha_pattern: IndexMap::new(),
            ..config.clone()
        };
        if alone.resolve(paths, layers)?.iter().all(|linear| linear.rank == 1) {
            let adapted = names(adapted.iter().map(|linear| linear.path.as_str()));
            return Err(usage(format!(
                "{key}: {pattern} matches no layer that is adapted; they are {}",
                adapted.join(", ")
            )));
        }
    }
    let excluded: Vec<(&String, Targets)> = match &config.exclude {
        None => Vec::new(),
        Some(Targets::Names(names)) => {
            names.iter().map(|name| (name, Targets::Names(vec![name.clone()]))).collect()
        }
        Some(targets @ Targets::Pattern(pattern)) => vec![(pattern, targets.clone())],
    };
    // What it would adapt by itself is what it matches. Files for several models name more than one has.
    let matches = |targets: &Targets| {
        let alone = LoraConfig { targets: targets.clone(), ..LoraConfig::default() };
        alone.resolve(paths, layers).is_ok()
    };
    match excluded.first() {
        Some((pattern, _)) if !excluded.iter().any(|(_, targets)| matches(targets)) => {
            Err(usage(format!(
                "exclude_modules: {pattern} matches no layer of this model; they are {}",
                names(paths.iter().map(String::as_str)).join(", ")
            )))
        }
        _ => Ok(()),
    }
}

/// The highest learning rate of a run of `steps` steps. It rises to the peak, or falls to it, and goes on in one
/// direction.
pub fn highest(rate: &LearningRate, steps: u64) -> f64 {
    rate.peak().max(rate.at(0)).max(rate.at(steps.saturating_sub(1)))
}

/// How much memory a step takes, with parameters and gradients of `training` bytes and what the optimiser keeps: from
/// what each layer keeps for its backward pass, the inputs of two norms, of the projections and of the activation, and
/// the attention's own.
pub fn memory(
    settings: &Settings,
    model: &Model,
    processes: u64,
    training: u64,
    kept_by_optimizer: u64,
    longest: usize,
) -> Memory {
    let config = model.config();
    let full = settings.fine_tune_type == FineTuneType::Full;
    let element = model.dtype().size_in_bytes() as u64;
    let row = if settings.packing { settings.max_seq_length } else { longest };
    let tokens = (settings.batch_size * row) as u64;
    let heads = ((2 * config.heads + 2 * config.kv_heads) * config.head_dim) as u64;
    let hidden = config.hidden_size as u64;
    let columns = config.mlp_columns() as u64;
    // What a token's experts give, which is kept for their weights' gradients, and its gradient.
    let of_experts = config.experts.map_or(0, |experts| 2 * experts.active as u64 * hidden);
    let layer = 5 * hidden + heads + 4 * columns + of_experts;
    let layers = config.layers.len() as u64;
    // Of a layer that is computed again, what it is given and what attention gives.
    let again = hidden + (config.heads * config.head_dim) as u64;
    // Of one that isn't, what may wait elsewhere: queries, keys and values, and the gate.
    let apart = heads - (config.heads * config.head_dim) as u64 + columns;
    let parts =
        if settings.grad_checkpoint { [layer, 0, again] } else { [0, layer - apart, apart] };
    let (kept, elsewhere) = kept_and_elsewhere(settings.activation_placement, layers, parts);
    // The loss looks at some logits at a time, on a GPU at more of them.
    let most = if model.device().is_cpu() { 1 << 20 } else { 1 << 27 };
    let logits = (tokens * config.vocab_size as u64).min(most) * size_of::<f32>() as u64;
    // Every weight that is trained was moved out of the model, and its value and gradient are f32.
    let weights = match full {
        true => training / (2 * size_of::<f32>() as u64) * element,
        false => model.size_in_bytes() as u64,
    };
    // What is always there; a layer is there beside the one before it.
    let tables = if config.tie_word_embeddings { hidden } else { 2 * hidden } * element;
    let resident = (tables * config.vocab_size as u64).min(weights);
    let away = weights - resident;
    let two_layers = (2 * away / layers.max(1)).min(away);
    let is_sharded = settings.base_placement == BasePlacement::Sharded;
    let (weights, host) = match settings.base_placement {
        // What is put together beside the parts: the embedding or the head and two layers, and the gradients of one of them
        // and of what was before it. Without checkpoints all of it stays until the backward pass.
        BasePlacement::Sharded if full => {
            let gradients = 2 * away.div_ceil(layers.max(1)).max(resident) / element * 4;
            let together = if settings.grad_checkpoint { resident + two_layers } else { weights };
            (together + gradients, 0)
        }
        _ if full => (0, 0),
        BasePlacement::Device => (weights, 0),
        BasePlacement::Host => (resident + two_layers, away),
        BasePlacement::Sharded => (resident + two_layers + away.div_ceil(processes), 0),
    };
    let kept_here = kept_by_optimizer.div_ceil(processes);
    let training = if full && is_sharded { training.div_ceil(processes) } else { training };
    let (training, host) = match settings.optimizer_placement {
        OptimizerPlacement::Device if full && is_sharded => (training + kept_here, host),
        OptimizerPlacement::Device => (training + kept_by_optimizer, host),
        OptimizerPlacement::Host => (training, host + kept_here),
        OptimizerPlacement::Sharded => (training + kept_here, host),
    };
    let (activations, host) =
        (tokens * kept * element + logits, host + tokens * elsewhere * element);
    Memory { weights, host, training, activations }
}

/// How many elements a token has on the device, and in the memory of the machine, of layers of which one at a time has the
/// first number of them, each has the second there, and the third where `placement` says.
fn kept_and_elsewhere(
    placement: ActivationPlacement,
    layers: u64,
    [once, each, placed]: [u64; 3],
) -> (u64, u64) {
    // Those of some layers are on their way.
    const ON_THEIR_WAY: u64 = 4;
    let here = once + layers * each;
    match placement {
        ActivationPlacement::Device => (here + layers * placed, 0),
        ActivationPlacement::Host => (here + layers.min(ON_THEIR_WAY) * placed, layers * placed),
    }
}

/// Each source's share of an epoch, where they have weights.
fn shares(sources: &[Entry]) -> Option<String> {
    if sources.iter().all(|source| source.weight.is_none()) {
        return None;
    }
    let weight = |source: &Entry| source.weight.unwrap_or(1.0);
    let sum: f64 = sources.iter().map(weight).sum();
    let share =
        |source: &Entry| format!("{:.1} % of {}", 100.0 * weight(source) / sum, source.path);
    Some(format!("an epoch is {}", sources.iter().map(share).collect::<Vec<_>>().join(", ")))
}

/// What to say of records that are longer than the model was made for. `data` are the data sets by their names.
pub fn length_warnings(
    settings: &Settings,
    context: usize,
    data: &[(&str, &Dataset)],
) -> Vec<String> {
    let most = settings.max_seq_length;
    if most <= context {
        return Vec::new();
    }
    let mut warnings: Vec<String> = data
        .iter()
        .filter_map(|(name, data)| {
            let longer = data.longer_than(context);
            (longer > 0).then(|| {
                format!(
                    "in the {name} data {} longer than the {} tokens that this model was made for, and the longest has \
                     {}; --max-seq-length {context} cuts them there, and a model with a longer context reads them whole",
                    are(longer as u64, "example"),
                    grouped(context as u64),
                    grouped(data.report.longest as u64),
                )
            })
        })
        .collect();
    if warnings.is_empty() && most != Settings::default().max_seq_length {
        warnings.push(format!(
            "max_seq_length: is {most}, and this model was made for {context} tokens; no example is longer than that \
             here, so a lower one changes nothing"
        ));
    }
    warnings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_that_the_optimizer_makes_is_told_as_it_makes_it() {
        let told = |peak, warmup_init, scale_parameter| {
            let (warmup_init, scale_parameter) = (Some(warmup_init), Some(scale_parameter));
            rate(peak, &Settings { warmup_init, scale_parameter, ..Settings::default() })
        };
        assert_eq!(told(Some(1e-4), false, false), "1e-4 at its peak");
        assert!(told(None, false, false).contains("at most 0.01 (relative_step)"));
        assert!(told(None, true, false).contains("at most 0.000001 times the step"));
        for (peak, warmup_init) in [(Some(1e-4), false), (None, false), (None, true)] {
            let told = told(peak, warmup_init, true);
            assert!(
                told.ends_with(", times the size of each parameter (scale_parameter)"),
                "{told}"
            );
        }
    }

    #[test]
    fn patterns_are_about_layers_that_are_adapted() {
        let paths = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj"];
        let paths = paths.map(String::from);
        let check = |ranks: &[&str], alphas: &[&str]| {
            let config = LoraConfig {
                rank_pattern: ranks.iter().map(|key| (key.to_string(), 4)).collect(),
                alpha_pattern: alphas.iter().map(|key| (key.to_string(), 4.0)).collect(),
                ..LoraConfig::default()
            };
            check_patterns(&config, &paths, 1).map_err(|error| error.to_string())
        };
        assert_eq!(check(&["q_proj", "mlp\\..*"], &["up_proj", "q_proj"]), Ok(()));
        let expected =
            "rank_pattern: q_prj matches no layer that is adapted; they are q_proj, up_proj";
        assert_eq!(check(&["q_proj", "q_prj"], &[]), Err(expected.into()));
        assert!(check(&[], &["zz"]).unwrap_err().starts_with("alpha_pattern: zz matches no layer"));
    }

    #[test]
    fn what_is_excluded_is_a_layer_of_the_model() {
        let paths = ["model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj", "lm_head"];
        let paths = paths.map(String::from);
        let check = |exclude: Targets| {
            let config = LoraConfig { exclude: Some(exclude), ..LoraConfig::default() };
            check_patterns(&config, &paths, 1).map_err(|error| error.to_string())
        };
        let names =
            |names: &[&str]| Targets::Names(names.iter().map(ToString::to_string).collect());
        let pattern = |pattern: &str| Targets::Pattern(pattern.into());
        // The head isn't adapted anyway.
        for right in
            [names(&["vision", "lm_head"]), names(&["q_proj"]), names(&[]), pattern(r".*\.mlp\..*")]
        {
            assert_eq!(check(right), Ok(()));
        }
        let told = |name| {
            let message = "matches no layer of this model; they are q_proj, up_proj, lm_head";
            Err(format!("exclude_modules: {name} {message}"))
        };
        assert_eq!(check(names(&["zzz", "vision"])), told("zzz"));
        assert_eq!(check(pattern("mlp.*")), told("mlp.*"));
    }

    #[test]
    fn a_rate_may_be_highest_at_the_end() {
        use metal_candle::train::MlxSchedule;
        let mlx = |arguments: &[f64], warmup_init| MlxSchedule {
            name: "linear_schedule".into(),
            warmup: 4,
            warmup_init,
            arguments: arguments.to_vec(),
        };
        let highest = |schedule: MlxSchedule| highest(&schedule.build().unwrap(), 20);
        assert_eq!(highest(mlx(&[1e-7, 1e-4, 10.0], 0.0)), 1e-4);
        assert_eq!(highest(mlx(&[1e-4, 1e-7, 10.0], 0.0)), 1e-4);
        assert_eq!(highest(mlx(&[1e-5, 1e-7, 10.0], 1e-3)), 1e-3);
    }

    #[test]
    fn what_waits_elsewhere_is_not_on_the_device() {
        let placed = |placement| kept_and_elsewhere(placement, 32, [7, 10, 3]);
        assert_eq!(placed(ActivationPlacement::Device), (7 + 32 * 13, 0));
        assert_eq!(placed(ActivationPlacement::Host), (7 + 32 * 10 + 4 * 3, 32 * 3));
        // A small model has all of it on its way.
        let small = kept_and_elsewhere(ActivationPlacement::Host, 2, [0, 1, 5]);
        assert_eq!(small, (2 + 10, 10));
    }
}
