//! The settings of a training run: one field is one key of the YAML file and one flag.

mod data;
mod defaults;
pub mod file;
mod keys;
mod mlx;
mod objective;
mod optimizer;
mod programs;
mod sources;
mod unused;
mod values;
mod words;
pub mod yaml;

pub use data::{Data, DataFlags, Entry};
pub use defaults::told;
pub use keys::{cut, has_no_flag, is_full, of_kind};
pub use objective::{Best, LossType, ObjectiveName};
pub use optimizer::OptimizerName;
pub use values::{
    ActivationPlacement, BaseCompute, BasePlacement, Course, FineTuneType, Loss, Matmul,
    OptimizerPlacement, Precision, Processor,
};
pub use words::Foreign;

use crate::bounds;
use crate::errors::usage;
use crate::models::check_matmul;
use crate::template;
use indexmap::IndexMap;
use metal_candle::adapter::{
    self, Biases, EvaConfig, LoraConfig, StartFrom, Targets, TokenIndices,
};
use metal_candle::data::{BatchOptions, DataOptions, HeldOut};
use metal_candle::model::Quantization;
use metal_candle::train::{
    Duration, LearningRate, MAX_STEPS, MlxSchedule, ScheduleOptions, TrainOptions, Warmup,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::path::{Path, PathBuf};

/// The options of EVA's start.
const EVA: &[&str] = &["eva_rho", "eva_tau", "eva_whiten", "eva_adjust_scaling_factors"];

/// The settings of a training run, as the YAML file and the flags give them over the defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    pub model: Option<String>,
    pub revision: Option<String>,
    pub from_config: Option<PathBuf>,
    pub data: Data,
    pub data_config: Option<String>,
    pub data_revision: Option<String>,
    pub data_split: Option<String>,
    pub prompt_column: Option<String>,
    pub completion_column: Option<String>,
    pub text_column: Option<String>,
    pub messages_column: Option<String>,
    /// The text of the chat template in place of the model's own; before completion it may be a file.
    pub chat_template: Option<String>,
    pub chat_template_kwargs: Map<String, Value>,
    pub output: PathBuf,

    pub fine_tune_type: FineTuneType,
    pub rank: usize,
    pub alpha: Option<f64>,
    /// mlx-lm's word: alpha over rank.
    pub scale: Option<f64>,
    pub dropout: f32,
    pub rslora: bool,
    pub target_modules: Targets,
    pub exclude_modules: Option<Targets>,
    pub num_layers: Option<i64>,
    pub layers: Option<Vec<usize>>,
    pub rank_pattern: IndexMap<String, usize>,
    pub alpha_pattern: IndexMap<String, f64>,
    pub init_lora_weights: StartFrom,
    pub eva_rho: f64,
    pub eva_tau: f64,
    pub eva_whiten: bool,
    pub eva_adjust_scaling_factors: bool,
    pub bias: Biases,
    pub modules_to_save: Option<Vec<String>>,
    pub trainable_token_indices: Option<TokenIndices>,
    pub init_adapter: Option<PathBuf>,

    pub objective: ObjectiveName,
    pub teacher: Option<PathBuf>,
    pub kd_alpha: Option<f64>,
    pub beta: Option<f64>,
    pub loss_type: Option<LossType>,
    pub label_smoothing: Option<f64>,
    pub simpo_gamma: Option<f64>,
    pub desirable_weight: Option<f64>,
    pub undesirable_weight: Option<f64>,
    pub precompute_ref_log_probs: bool,
    pub share_prompts: bool,

    pub epochs: Option<f64>,
    pub steps: Option<u64>,
    pub batch_size: usize,
    pub grad_accumulation: usize,
    pub optimizer: OptimizerName,
    pub learning_rate: Option<f64>,
    pub schedule: Course,
    pub warmup_steps: Option<u64>,
    pub warmup_ratio: Option<f64>,
    pub min_learning_rate: f64,
    pub lr_schedule: Option<MlxSchedule>,
    pub weight_decay: Option<f64>,
    pub beta1: Option<f64>,
    pub beta2: Option<f64>,
    pub epsilon: Option<f64>,
    pub bias_correction: Option<bool>,
    pub momentum: Option<f64>,
    pub dampening: Option<f64>,
    pub nesterov: Option<bool>,
    pub ns_steps: Option<usize>,
    pub adamw_share: Option<f64>,
    pub scale_epsilon: Option<f64>,
    pub clip_threshold: Option<f64>,
    pub decay_rate: Option<f64>,
    pub scale_parameter: Option<bool>,
    pub relative_step: Option<bool>,
    pub warmup_init: Option<bool>,
    pub loraplus_lr_ratio: f64,
    pub clip_norm: f64,
    pub skip_limit: u64,

    pub max_seq_length: usize,
    pub packing: bool,
    pub loss_on: Loss,
    pub valid_fraction: f64,
    /// The time that a chat template that prints the date is told, kept over a resume.
    pub template_time: Option<String>,

    pub eval_every: u64,
    pub eval_batches: i64,
    pub report_every: u64,
    pub save_every: u64,
    pub epoch_ends: bool,
    pub keep: usize,
    pub keep_best: bool,
    pub patience: Option<u64>,
    pub best_by: Best,
    pub sample_every: u64,
    pub sample_prompt: Vec<String>,
    pub sample_tokens: usize,
    pub test: bool,
    pub test_batches: i64,
    pub tensorboard: bool,
    pub plot: bool,

    pub grad_checkpoint: bool,
    pub activation_placement: ActivationPlacement,
    pub seed: u64,
    pub dtype: Precision,
    pub quantize: Option<Quantization>,
    pub base_compute: BaseCompute,
    pub base_placement: BasePlacement,
    pub optimizer_placement: OptimizerPlacement,
    pub device: Processor,
    pub matmul: Option<Matmul>,
    pub threads: Option<usize>,
}

impl Default for Settings {
    fn default() -> Self {
        // Whole, so that an option that the library gets has to be thought of here.
        let LoraConfig {
            rank,
            alpha: _,
            dropout,
            rslora,
            targets,
            exclude,
            layers,
            last_layers,
            rank_pattern,
            alpha_pattern,
            dora: _,
            start,
            eva,
            layer_ranks: _,
            bias,
            modules_to_save,
            trainable_token_indices,
        } = LoraConfig::default();
        let EvaConfig { rho, tau, whiten, adjust_scaling_factors } = eva;
        let TrainOptions {
            objective,
            precompute_ref_log_probs,
            steps: _,
            grad_accumulation,
            learning_rate: _,
            optimizer,
            optimizer_placement,
            loraplus_lr_ratio,
            clip_norm,
            skip_limit,
            grad_checkpoint,
            activation_placement,
            seed,
            report_every,
            eval_every,
            eval_batches,
            save_every,
            epoch_ends,
            keep,
            keep_best,
            patience,
            best_by,
            sample_every,
        } = TrainOptions::new(1, LearningRate::default());
        let ScheduleOptions {
            schedule,
            learning_rate: _,
            min_learning_rate,
            warmup: _,
            warmup_init: _,
        } = ScheduleOptions::default();
        let BatchOptions {
            batch_size,
            max_seq_length,
            packing,
            seed: _,
            shuffle: _,
            share_prompts,
        } = BatchOptions::default();
        Self {
            model: None,
            revision: None,
            from_config: None,
            data: Data::default(),
            data_config: None,
            data_revision: None,
            data_split: None,
            prompt_column: None,
            completion_column: None,
            text_column: None,
            messages_column: None,
            chat_template: None,
            chat_template_kwargs: Map::new(),
            output: "adapters".into(),
            fine_tune_type: FineTuneType::default(),
            rank,
            alpha: None,
            scale: None,
            dropout,
            rslora,
            target_modules: targets,
            exclude_modules: exclude,
            num_layers: last_layers.and_then(|layers| i64::try_from(layers).ok()),
            layers,
            rank_pattern,
            alpha_pattern,
            init_lora_weights: start,
            eva_rho: rho,
            eva_tau: tau,
            eva_whiten: whiten,
            eva_adjust_scaling_factors: adjust_scaling_factors,
            bias,
            modules_to_save: (!modules_to_save.is_empty()).then_some(modules_to_save),
            trainable_token_indices,
            init_adapter: None,
            objective: objective.into(),
            teacher: None,
            kd_alpha: None,
            beta: None,
            loss_type: None,
            label_smoothing: None,
            simpo_gamma: None,
            desirable_weight: None,
            undesirable_weight: None,
            precompute_ref_log_probs,
            share_prompts,
            epochs: None,
            steps: None,
            batch_size,
            grad_accumulation,
            optimizer: optimizer.into(),
            learning_rate: None,
            schedule: schedule.into(),
            warmup_steps: None,
            warmup_ratio: None,
            min_learning_rate,
            lr_schedule: None,
            weight_decay: None,
            beta1: None,
            beta2: None,
            epsilon: None,
            bias_correction: None,
            momentum: None,
            dampening: None,
            nesterov: None,
            ns_steps: None,
            adamw_share: None,
            scale_epsilon: None,
            clip_threshold: None,
            decay_rate: None,
            scale_parameter: None,
            relative_step: None,
            warmup_init: None,
            loraplus_lr_ratio,
            clip_norm: clip_norm.unwrap_or(0.0),
            skip_limit,
            max_seq_length,
            packing,
            loss_on: DataOptions::default().loss_on.into(),
            valid_fraction: 0.0,
            template_time: None,
            eval_every,
            eval_batches: all_or(eval_batches),
            report_every,
            save_every,
            epoch_ends,
            keep,
            keep_best,
            patience,
            best_by: best_by.into(),
            sample_every,
            sample_prompt: Vec::new(),
            sample_tokens: 64,
            test: false,
            test_batches: all_or(eval_batches),
            tensorboard: true,
            plot: true,
            grad_checkpoint,
            activation_placement: activation_placement.into(),
            seed,
            dtype: Precision::default(),
            quantize: None,
            base_compute: BaseCompute::default(),
            base_placement: BasePlacement::default(),
            optimizer_placement: optimizer_placement.into(),
            device: Processor::default(),
            matmul: None,
            threads: None,
        }
    }
}

impl Settings {
    /// Fills in what follows from other settings and checks everything that neither the model nor
    /// the data decides. `given` are the keys that were written down, not defaults.
    pub fn complete(mut self, given: &[String]) -> anyhow::Result<Self> {
        if self.data.0.is_empty() {
            return Err(usage("no data: give --data a folder with train.jsonl, or a .jsonl file"));
        }
        self.data.completed(&self.data_flags())?;
        if let Some(given) = &self.chat_template {
            self.chat_template = Some(template::source(given)?);
        }
        match (&self.model, &self.from_config, self.fine_tune_type) {
            (None, None, _) => {
                return Err(usage(
                    "no model: give --model a model's folder or an id such as HuggingFaceTB/SmolLM2-135M-Instruct",
                ));
            }
            (Some(_), Some(_), _) => {
                return Err(usage(
                    "model and from_config: random weights are no model's; keep one of them",
                ));
            }
            (None, Some(_), FineTuneType::Lora | FineTuneType::Dora) => {
                return Err(usage(
                    "from_config: random weights have nothing for LoRA to build on; add --fine-tune-type full",
                ));
            }
            _ => {}
        }
        let written = [Some(&mut self.target_modules), self.exclude_modules.as_mut()];
        for targets in written.into_iter().flatten() {
            if let Targets::Pattern(text) = targets {
                *targets = parse_targets(text);
            }
        }
        if self.fine_tune_type == FineTuneType::Full {
            const LORA_ONLY: &[&str] = &[
                "num_layers",
                "layers",
                "exclude_modules",
                "init_adapter",
                "modules_to_save",
                TokenIndices::KEY,
            ];
            let all = self.num_layers == Some(-1);
            if let Some(key) = LORA_ONLY.iter().find(|key| {
                given.iter().any(|given| given == *key) && !(**key == "num_layers" && all)
            }) {
                return Err(usage(format!(
                    "{key}: only LoRA can be on a part of the model; with fine_tune_type full every weight is trained"
                )));
            }
        }
        if let Some(folder) = self.init_adapter.clone() {
            self.take_adapter(&folder, given)?;
        }
        if self.init_lora_weights != StartFrom::Eva {
            if let Some(key) = EVA.iter().find(|key| given.iter().any(|given| given == *key)) {
                return Err(usage(format!(
                    "{key}: is an option of eva, and init_lora_weights is {}",
                    self.init_lora_weights
                )));
            }
        } else if self.fine_tune_type == FineTuneType::Full {
            return Err(usage(
                "init_lora_weights: is eva, which is a start of adapters, but fine_tune_type is full, which trains every \
                 weight; expected lora or dora",
            ));
        }
        if self.epochs.is_none() && self.steps.is_none() {
            match Duration::default() {
                Duration::Epochs(epochs) => self.epochs = Some(epochs),
                Duration::Steps(steps) => self.steps = Some(steps),
            }
        }
        if self.lr_schedule.is_none() && self.warmup_steps.is_none() && self.warmup_ratio.is_none()
        {
            match Warmup::default() {
                Warmup::Ratio(ratio) => self.warmup_ratio = Some(ratio),
                Warmup::Steps(steps) => self.warmup_steps = Some(steps),
            }
        }
        if let Some(scale) = self.scale.take() {
            if !self.rank_pattern.is_empty() {
                return Err(usage(
                    "scale and rank_pattern: a scale holds for one rank; give alpha and alpha_pattern instead",
                ));
            }
            let rank = self.rank as f64;
            self.alpha = Some(scale * if self.rslora { rank.sqrt() } else { rank });
        }
        self.alpha.get_or_insert(LoraConfig::default_alpha(self.rank));
        self.learning_rate = Some(self.peak_learning_rate());
        let completed = self.complete_optimizer()?;
        completed.check()?;
        Ok(completed)
    }

    /// Takes LoRA's settings from the adapter that training starts from.
    fn take_adapter(&mut self, folder: &Path, given: &[String]) -> anyhow::Result<()> {
        let folder = adapter_folder(folder)?;
        let (config, _) = adapter::read_config(&folder)?;
        let scale = self.scale.map(|scale| scale * self.rank as f64);
        let num_layers = config.last_layers.and_then(|layers| i64::try_from(layers).ok());
        let differs = [
            ("rank", self.rank != config.rank),
            ("alpha", self.alpha.is_some_and(|alpha| alpha != config.alpha)),
            ("scale", scale.is_some_and(|alpha| alpha != config.alpha)),
            ("dropout", self.dropout != config.dropout),
            ("rslora", self.rslora != config.rslora),
            ("target_modules", self.target_modules != config.targets),
            ("exclude_modules", self.exclude_modules != config.exclude),
            ("layers", self.layers != config.layers),
            ("num_layers", self.num_layers.filter(|layers| *layers != -1) != num_layers),
            ("rank_pattern", self.rank_pattern != config.rank_pattern),
            ("alpha_pattern", self.alpha_pattern != config.alpha_pattern),
            ("init_lora_weights", self.init_lora_weights != config.start),
            ("bias", self.bias != config.bias),
            (
                "modules_to_save",
                self.modules_to_save.clone().unwrap_or_default() != config.modules_to_save,
            ),
            (TokenIndices::KEY, self.trainable_token_indices != config.trainable_token_indices),
            ("fine_tune_type", (self.fine_tune_type == FineTuneType::Dora) != config.dora),
        ];
        for (key, differs) in differs {
            if differs && given.iter().any(|given| given == key) {
                return Err(usage(format!(
                    "{key}: is not that of the adapter in {}, which training starts from; leave it out",
                    folder.display()
                )));
            }
        }
        self.rank = config.rank;
        self.alpha = Some(config.alpha);
        self.scale = None;
        self.dropout = config.dropout;
        self.rslora = config.rslora;
        self.target_modules = config.targets;
        self.exclude_modules = config.exclude;
        self.layers = config.layers;
        self.num_layers = num_layers;
        self.rank_pattern = config.rank_pattern;
        self.alpha_pattern = config.alpha_pattern;
        self.init_lora_weights = config.start;
        self.bias = config.bias;
        self.modules_to_save = Some(config.modules_to_save);
        self.trainable_token_indices = config.trainable_token_indices;
        self.fine_tune_type = if config.dora { FineTuneType::Dora } else { FineTuneType::Lora };
        self.init_adapter = Some(folder);
        Ok(())
    }

    /// What a dense model is brought into while it is loaded.
    pub fn quantization(&self) -> anyhow::Result<Option<Quantization>> {
        self.base_compute.quantization(self.quantize)
    }

    fn check_placement(&self) -> anyhow::Result<()> {
        let word = match self.base_placement {
            BasePlacement::Device => return Ok(()),
            BasePlacement::Host => "host",
            BasePlacement::Sharded => "sharded",
        };
        let is_full = self.fine_tune_type == FineTuneType::Full;
        let problem = if is_full && self.base_placement == BasePlacement::Host {
            "but fine_tune_type is full, which trains every weight; expected lora or dora, whose base is frozen, or \
             base_placement: sharded"
        } else if !is_full && !self.grad_checkpoint {
            "which needs grad_checkpoint: true, as the weights of a layer are on the GPU for its use alone"
        } else if is_full && self.objective()?.estimates_kl() {
            "but the objective is kto, which is for adapters; expected another"
        } else if self.base_placement == BasePlacement::Sharded && self.objective()?.estimates_kl()
        {
            "but the objective is kto, whose processes make different numbers of passes; expected another, or base_placement: host"
        } else if self.base_placement == BasePlacement::Sharded && self.sample_every > 0 {
            "but sample_every is set, and one process alone can't write texts with its part of the weights; set it to 0"
        } else if is_full {
            return self.optimizer()?.check_in_parts().map_err(|error| usage(error.to_string()));
        } else {
            return Ok(());
        };
        Err(usage(format!("base_placement: is {word}, {problem}")))
    }

    fn check(&self) -> anyhow::Result<()> {
        check_matmul(self.matmul, self.dtype, self.device, "--dtype f16 or --dtype f32")?;
        self.quantization()?;
        if let (Some((_, word, _)), FineTuneType::Full) =
            (self.base_compute.described(), self.fine_tune_type)
        {
            return Err(usage(format!(
                "base_compute: is {word}, but fine_tune_type is full, which trains every weight; expected lora or dora, \
                 whose base is frozen"
            )));
        }
        if let (Some(quantization), FineTuneType::Full) = (self.quantize, self.fine_tune_type) {
            return Err(usage(format!(
                "quantize: is {quantization}, but fine_tune_type is full, which trains every weight; expected lora \
                 or dora, whose base is frozen"
            )));
        }
        self.check_placement()?;
        if self.fine_tune_type != FineTuneType::Full {
            if let Some(layers) = self.num_layers.filter(|&layers| layers != -1 && layers < 1) {
                return Err(usage(format!(
                    "num_layers: is {layers}, expected at least 1, or -1 for all layers"
                )));
            }
            self.lora()?.validate().map_err(usage)?;
        }
        self.duration().validate().map_err(usage)?;
        if let Some(held_out) = self.held_out() {
            held_out.validate().map_err(usage)?;
        }
        self.batch_options().validate().map_err(usage)?;
        self.data_options().validate().map_err(usage)?;
        bounds::check("sample_tokens", self.sample_tokens, &bounds::TOKENS)?;
        bounds::check("threads", self.threads.unwrap_or(1), &bounds::THREADS)?;
        for (key, batches) in
            [("eval_batches", self.eval_batches), ("test_batches", self.test_batches)]
        {
            if batches != -1 && batches < 1 {
                return Err(usage(format!(
                    "{key}: is {batches}, expected at least 1, or -1 for all"
                )));
            }
        }
        if self.sample_every > 0 && self.sample_prompt.is_empty() {
            return Err(usage("sample_every: there is nothing to continue; give a sample_prompt"));
        }
        // The length of the run is not known yet; everything else is checked as it will be used.
        let schedule = self.schedule_options();
        let steps = self.steps.unwrap_or(MAX_STEPS);
        match &self.lr_schedule {
            Some(schedule) => schedule.build(),
            None => schedule.build(steps),
        }
        .map_err(usage)?;
        let rate = LearningRate::constant(self.peak_learning_rate()).map_err(usage)?;
        self.train_options(steps, rate)?.validate().map_err(usage)?;
        Ok(())
    }

    /// What holds for the sources of data that don't say it themselves.
    pub fn data_flags(&self) -> DataFlags {
        DataFlags {
            data_config: self.data_config.clone(),
            data_revision: self.data_revision.clone(),
            data_split: self.data_split.clone(),
            prompt_column: self.prompt_column.clone(),
            completion_column: self.completion_column.clone(),
            text_column: self.text_column.clone(),
            messages_column: self.messages_column.clone(),
        }
    }

    /// What LoRA is told.
    pub fn lora(&self) -> anyhow::Result<LoraConfig> {
        let last_layers = match self.num_layers {
            None | Some(-1) => None,
            Some(layers) => Some(usize::try_from(layers).map_err(|_| {
                usage(format!("num_layers: is {layers}, expected at least 1, or -1 for all layers"))
            })?),
        };
        Ok(LoraConfig {
            rank: self.rank,
            alpha: self.alpha.unwrap_or(LoraConfig::default_alpha(self.rank)),
            dropout: self.dropout,
            rslora: self.rslora,
            targets: self.target_modules.clone(),
            exclude: self.exclude_modules.clone(),
            layers: self.layers.clone(),
            last_layers,
            rank_pattern: self.rank_pattern.clone(),
            alpha_pattern: self.alpha_pattern.clone(),
            dora: self.fine_tune_type == FineTuneType::Dora,
            start: self.init_lora_weights,
            eva: EvaConfig {
                rho: self.eva_rho,
                tau: self.eva_tau,
                whiten: self.eva_whiten,
                adjust_scaling_factors: self.eva_adjust_scaling_factors,
            },
            layer_ranks: None,
            bias: self.bias,
            modules_to_save: self.modules_to_save.clone().unwrap_or_default(),
            trainable_token_indices: self.trainable_token_indices.clone(),
        })
    }

    fn schedule_options(&self) -> ScheduleOptions {
        ScheduleOptions {
            schedule: self.schedule.into(),
            learning_rate: self.peak_learning_rate(),
            min_learning_rate: self.min_learning_rate,
            warmup: match (self.warmup_steps, self.warmup_ratio) {
                (Some(steps), _) => Warmup::Steps(steps),
                (None, Some(ratio)) => Warmup::Ratio(ratio),
                (None, None) => Warmup::default(),
            },
            ..ScheduleOptions::default()
        }
    }

    /// The learning rate of a run of `steps` steps.
    pub fn learning_rate(&self, steps: u64) -> metal_candle::Result<LearningRate> {
        match &self.lr_schedule {
            Some(schedule) => schedule.build(),
            None => self.schedule_options().build(steps),
        }
    }

    /// How long the run is.
    pub fn duration(&self) -> Duration {
        match (self.steps, self.epochs) {
            (Some(steps), _) => Duration::Steps(steps),
            (None, Some(epochs)) => Duration::Epochs(epochs),
            (None, None) => Duration::default(),
        }
    }

    /// How records become examples.
    pub fn data_options(&self) -> DataOptions {
        DataOptions {
            max_seq_length: self.max_seq_length,
            loss_on: self.loss_on.for_data(),
            variables: self.chat_template_kwargs.clone(),
            ..DataOptions::default()
        }
    }

    /// How examples become batches.
    pub fn batch_options(&self) -> BatchOptions {
        BatchOptions {
            batch_size: self.batch_size,
            max_seq_length: self.max_seq_length,
            packing: self.packing,
            seed: self.seed,
            share_prompts: self.share_prompts,
            ..BatchOptions::default()
        }
    }

    /// What is held out where there is no validation data.
    pub fn held_out(&self) -> Option<HeldOut> {
        (self.valid_fraction != 0.0)
            .then_some(HeldOut { fraction: self.valid_fraction, seed: self.seed })
    }

    /// What the trainer is told, for a run of `steps` steps.
    pub fn train_options(
        &self,
        steps: u64,
        learning_rate: LearningRate,
    ) -> anyhow::Result<TrainOptions> {
        Ok(TrainOptions {
            objective: self.objective()?,
            precompute_ref_log_probs: self.precompute_ref_log_probs,
            steps,
            grad_accumulation: self.grad_accumulation,
            learning_rate,
            optimizer: self.optimizer()?,
            optimizer_placement: self.optimizer_placement.into(),
            loraplus_lr_ratio: match self.fine_tune_type {
                // There is no B; see `unused`.
                FineTuneType::Full => 1.0,
                FineTuneType::Lora | FineTuneType::Dora => self.loraplus_lr_ratio,
            },
            clip_norm: (self.clip_norm != 0.0).then_some(self.clip_norm),
            skip_limit: self.skip_limit,
            grad_checkpoint: self.grad_checkpoint,
            activation_placement: self.activation_placement.into(),
            seed: self.seed,
            report_every: self.report_every,
            eval_every: self.eval_every,
            eval_batches: limit(self.eval_batches),
            save_every: self.save_every,
            epoch_ends: self.epoch_ends,
            keep: self.keep,
            keep_best: self.keep_best,
            patience: self.patience,
            best_by: self.best_by.into(),
            sample_every: self.sample_every,
        })
    }

    /// The settings as a YAML file that `-c` accepts, without keys that others make meaningless.
    pub fn to_yaml(&self) -> anyhow::Result<String> {
        const LORA: &[&str] = &[
            "rank",
            "alpha",
            "dropout",
            "rslora",
            "target_modules",
            "exclude_modules",
            "num_layers",
            "layers",
            "rank_pattern",
            "alpha_pattern",
            "init_lora_weights",
            "bias",
            "modules_to_save",
            TokenIndices::KEY,
        ];
        const SCHEDULE: &[&str] =
            &["schedule", "warmup_steps", "warmup_ratio", "min_learning_rate"];
        let mut value = serde_yaml_ng::to_value(self)?;
        if let serde_yaml_ng::Value::Mapping(map) = &mut value {
            let mut skipped: Vec<&str> = Vec::new();
            if self.fine_tune_type == FineTuneType::Full || self.init_adapter.is_some() {
                skipped.extend(LORA);
            }
            if self.fine_tune_type == FineTuneType::Full {
                skipped.push("loraplus_lr_ratio");
            }
            if self.lr_schedule.is_some() {
                skipped.extend(SCHEDULE);
            }
            if self.init_lora_weights != StartFrom::Eva {
                skipped.extend(EVA);
            }
            map.retain(|key, value| {
                !value.is_null() && !key.as_str().is_some_and(|key| skipped.contains(&key))
            });
        }
        Ok(serde_yaml_ng::to_string(&value)?)
    }
}

/// A number of batches as a person writes it, where -1 is all of them.
fn all_or(batches: Option<usize>) -> i64 {
    batches.and_then(|batches| i64::try_from(batches).ok()).unwrap_or(-1)
}

/// A number of batches, where -1 is all of them.
pub fn limit(batches: i64) -> Option<usize> {
    usize::try_from(batches).ok()
}

/// Targets as a person writes them: `all-linear`, a list of names, or a regular expression, which
/// is recognised by a character that no name has.
pub fn parse_targets(text: &str) -> Targets {
    if text == Targets::ALL_LINEAR || text.chars().any(|c| r"\*+?()[]{}^$|".contains(c)) {
        Targets::Pattern(text.to_string())
    } else {
        Targets::Names(
            text.split(',')
                .map(|name| name.trim().to_string())
                .filter(|name| !name.is_empty())
                .collect(),
        )
    }
}

/// The folder of an adapter that is given as a folder or, as mlx-lm does, as the file of weights.
fn adapter_folder(path: &Path) -> anyhow::Result<PathBuf> {
    if path.is_dir() {
        return Ok(path.to_path_buf());
    }
    match (path.file_name().and_then(|name| name.to_str()), path.parent()) {
        (Some(adapter::ADAPTER_WEIGHTS | adapter::MLX_WEIGHTS), Some(folder)) if path.is_file() => {
            Ok(if folder.as_os_str().is_empty() { ".".into() } else { folder.to_path_buf() })
        }
        _ if path.exists() => Err(usage(format!(
            "init_adapter: {} is not supported; expected a folder with {} and {} or {}",
            path.display(),
            adapter::ADAPTER_CONFIG,
            adapter::ADAPTER_WEIGHTS,
            adapter::MLX_WEIGHTS
        ))),
        _ => Err(usage(format!("init_adapter: there is no {}", path.display()))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::ValueEnum;
    use metal_candle::generate::GenerateOptions;
    use metal_candle::train::Optimizer;

    fn complete(settings: Settings) -> anyhow::Result<Settings> {
        let (model, data) = (Some("model".into()), Data::of(&["data".into()]));
        Settings { model, data, ..settings }.complete(&[])
    }

    #[test]
    fn defaults_are_those_of_the_library() {
        let settings = complete(Settings::default()).unwrap();
        assert_eq!(settings.lora().unwrap(), LoraConfig::default());
        assert_eq!(settings.data_options(), DataOptions::default());
        assert_eq!(settings.batch_options(), BatchOptions::default());
        assert_eq!(settings.schedule_options(), ScheduleOptions::default());
        assert_eq!(settings.duration(), Duration::default());
        let rate = settings.learning_rate(7).unwrap();
        let options = TrainOptions::new(7, rate.clone());
        assert_eq!(settings.train_options(7, rate).unwrap(), options);
        assert_eq!(Settings::default().optimizer, OptimizerName::from(Optimizer::default()));
        for name in OptimizerName::value_variants() {
            let named = complete(Settings { optimizer: *name, ..Settings::default() }).unwrap();
            let optimizer = named.optimizer().unwrap();
            assert_eq!(optimizer, name.optimizer());
            assert_eq!(OptimizerName::from(optimizer), *name);
            assert_eq!(named.peak_learning_rate(), optimizer.default_learning_rate(false));
        }
    }

    #[test]
    fn a_value_is_refused_in_the_words_of_the_library() {
        let default = Settings::default;
        let train = || TrainOptions::new(1, LearningRate::default());
        let schedule = ScheduleOptions::default;
        let lora = LoraConfig::default;
        let generate = GenerateOptions { max_tokens: 0, ..GenerateOptions::default() };
        for (settings, refused) in [
            (Settings { rank: 0, ..default() }, LoraConfig { rank: 0, ..lora() }.validate()),
            (
                Settings { alpha: Some(2e9), ..default() },
                LoraConfig { alpha: 2e9, ..lora() }.validate(),
            ),
            (
                Settings { dropout: 1.1, ..default() },
                LoraConfig { dropout: 1.1, ..lora() }.validate(),
            ),
            (
                Settings { grad_accumulation: 0, ..default() },
                TrainOptions { grad_accumulation: 0, ..train() }.validate(),
            ),
            (
                Settings { eval_every: u64::MAX, ..default() },
                TrainOptions { eval_every: u64::MAX, ..train() }.validate(),
            ),
            (
                Settings { clip_norm: -1.0, ..default() },
                TrainOptions { clip_norm: Some(-1.0), ..train() }.validate(),
            ),
            (
                Settings { min_learning_rate: -1.0, ..default() },
                ScheduleOptions { min_learning_rate: -1.0, ..schedule() }.build(1).map(drop),
            ),
            (
                Settings { batch_size: 0, ..default() },
                BatchOptions { batch_size: 0, ..BatchOptions::default() }.validate(),
            ),
            (
                Settings { max_seq_length: 1, ..default() },
                DataOptions { max_seq_length: 1, ..DataOptions::default() }.validate(),
            ),
            (
                Settings { valid_fraction: 1.0, ..default() },
                HeldOut { fraction: 1.0, seed: 0 }.validate(),
            ),
            (Settings { steps: Some(0), ..default() }, Duration::Steps(0).validate()),
            (Settings { epochs: Some(0.0), ..default() }, Duration::Epochs(0.0).validate()),
        ] {
            let refused = refused.unwrap_err().to_string();
            let (key, _) = refused.split_once(':').unwrap();
            assert!(keys::known().iter().any(|known| known == key), "{refused}");
            assert_eq!(complete(settings).unwrap_err().to_string(), refused);
        }
        let sampled = complete(Settings { sample_tokens: 0, ..default() }).unwrap_err();
        let refused = generate.validate().unwrap_err().to_string();
        assert_eq!(sampled.to_string(), refused.replace("max_tokens", "sample_tokens"));
    }

    #[test]
    fn targets_are_names_or_a_pattern() {
        assert_eq!(parse_targets("all-linear"), Targets::all_linear());
        assert_eq!(
            parse_targets("q_proj, self_attn.v_proj"),
            Targets::Names(vec!["q_proj".into(), "self_attn.v_proj".into()])
        );
        assert_eq!(parse_targets(r".*\.q_proj"), Targets::Pattern(r".*\.q_proj".into()));
    }
}
