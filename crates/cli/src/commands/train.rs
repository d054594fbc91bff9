//! `train`: fine-tune a model.

use crate::errors::{self, FAILURE, INTERRUPTED, SUCCESS, check_name, usage};
use crate::interrupt;
use crate::models::{self, quantizations, set_threads};
use crate::output::{self, Terminal, plural, say, shell_word};
use crate::plot::terminal_curve;
use crate::processes::{self, Gpus, TIME_TO_SAVE};
use crate::run_folder::{CONFIG, Resume, Start};
use crate::settings::file::File;
use crate::settings::{
    ActivationPlacement, BaseCompute, BasePlacement, Best, Course, DataFlags, FineTuneType,
    Foreign, Loss, LossType, Matmul, ObjectiveName, OptimizerName, OptimizerPlacement, Precision,
    Processor, Settings, cut, told,
};
use crate::template::TemplateFlags;
use crate::training::{LAST_STEPS_SKIPPED, Run, Summary};
use crate::wrap::stdout_columns;
use clap::Args;
use clap::builder::BoolishValueParser;
use indexmap::IndexMap;
use metal_candle::Error;
use metal_candle::adapter::{Biases, StartFrom};
use metal_candle::data::BatchOptions;
use metal_candle::model::Quantization;
use metal_candle::parallel::Member;
use metal_candle::parallel::launcher::launched;
use metal_candle::train::batch_rows;
use serde::Serialize;
use serde_yaml_ng::{Mapping, Value};
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

const EXAMPLES: &str = "\
Examples:
  metal-candle train --model HuggingFaceTB/SmolLM2-135M-Instruct --data data/
  metal-candle train -m model/ -d data.jsonl --valid-fraction 0.1 --epochs 3 --rank 8
  metal-candle train -m model/ -d own.jsonl:3 -d owner/name:1 --prompt-column question --completion-column answer
  metal-candle train -c lora_config.yaml --learning-rate 1e-4
  metal-candle train -m model/ -d preferences.jsonl --objective dpo
  metal-candle train --resume --output adapters
  metal-candle train -c lora_config.yaml --resume=auto    # on a machine that may be taken away
  metal-candle train -m model/ -d data/ --gpus all

Every flag is a key of the YAML file too, with _ for -; flags win over the file. There `data` is a path, or a \
list of paths and of mappings with path, weight, config, revision, split and the columns of that source; the flags \
for these hold for sources that don't say them, those about a data set on the hub where there is only one. Words of mlx-lm, PEFT, \
transformers, TRL, Unsloth, axolotl and LLaMA-Factory are understood as well, as keys and as flags, where \
they mean the same; --adapter-path is mlx-lm's word for --output. A run leaves the adapter, checkpoints/, \
metrics.jsonl, tensorboard/, loss.svg, loss.png and train_config.yaml in its output folder.";

/// What the command is told.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Arguments {
    /// Settings in a YAML file
    #[arg(short, long, value_name = "YAML")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: Flags,
    /// Continue a run: from this checkpoint or run folder, or from the newest checkpoint of the output folder that is whole; with `auto`, start it where there is none. A checkpoint that was copied out of its run's folder needs --output. With more --steps or --epochs than before, the steps that follow have the learning rates of a run that was this long from the beginning
    #[arg(long, value_name = "DIR|auto", num_args = 0..=1, conflicts_with = "overwrite", help_heading = "Output")]
    resume: Option<Option<PathBuf>>,
    /// Begin again in a folder that holds a run, whose files are removed; others stay
    #[arg(long, help_heading = "Output")]
    overwrite: bool,
    /// Write no event files for TensorBoard
    #[arg(long, help_heading = "Output")]
    no_tensorboard: bool,
    /// Draw no loss curve
    #[arg(long, help_heading = "Output")]
    no_plot: bool,
    /// Show what would be trained, and stop
    #[arg(long, help_heading = "Output")]
    dry_run: bool,
    /// Report as one JSON object on stdout
    #[arg(long, help_heading = "Output")]
    json: bool,
    /// Train on so many NVIDIA GPUs of this machine, a process each with a batch of its own
    #[arg(long, value_name = "N|all", help_heading = "Device")]
    gpus: Option<Gpus>,
    /// Seconds that one of several processes waits for another before it ends the run; while the first writes files, the others wait ten times as long
    #[arg(long, value_name = "SECONDS", default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=604_800), help_heading = "Device")]
    collective_timeout: u64,
    // Last, as it gives the flags above other names.
    #[command(flatten)]
    foreign: Foreign,
}

/// The settings that flags can give; what is not given is null.
#[derive(Debug, Default, Args, Serialize)]
#[command(mut_args(told()))]
pub struct Flags {
    /// A model's folder, or its id on the Hugging Face hub
    #[arg(short, long, value_name = "DIR|ID", help_heading = "Model and data")]
    model: Option<String>,
    /// The branch, tag or commit of a model on the hub [default: main]
    #[arg(long, value_name = "REVISION", help_heading = "Model and data")]
    revision: Option<String>,
    /// Train random weights of this config.json's shape; its folder holds the tokenizer. Needs --fine-tune-type full
    #[arg(long, value_name = "DIR", help_heading = "Model and data")]
    from_config: Option<PathBuf>,
    /// A folder with train.jsonl, and if wanted valid.jsonl and test.jsonl; one file; or the id of a data set on the hub. May be given several times: with weights, each source has its share of an epoch, in which one without a weight counts 1; without any, every record is in an epoch once
    #[arg(short, long, value_name = "PATH|ID[:WEIGHT]", help_heading = "Model and data")]
    data: Option<Vec<String>>,
    #[command(flatten)]
    #[serde(flatten)]
    sources: DataFlags,
    #[command(flatten)]
    #[serde(flatten)]
    template: TemplateFlags,
    /// Where everything is written
    #[arg(
        short,
        long,
        value_name = "DIR",
        visible_alias = "adapter-path",
        help_heading = "Output"
    )]
    output: Option<PathBuf>,

    /// What is trained
    #[arg(long, value_enum, help_heading = "LoRA")]
    fine_tune_type: Option<FineTuneType>,
    /// The rank r of the update
    #[arg(short, long, value_name = "N", help_heading = "LoRA")]
    rank: Option<usize>,
    /// The update is multiplied by alpha / rank [default: twice the rank]
    #[arg(long, value_name = "X", help_heading = "LoRA")]
    alpha: Option<f64>,
    /// The probability of dropping an input of the update
    #[arg(long, value_name = "P", help_heading = "LoRA")]
    dropout: Option<f32>,
    /// Multiply by alpha / sqrt(rank) instead
    #[arg(long, value_name = "BOOL", num_args = 0..=1, value_parser = BoolishValueParser::new(), default_missing_value = "true", help_heading = "LoRA")]
    rslora: Option<bool>,
    /// The adapted linear layers, embed_tokens and lm_head: names with commas between, a regular expression of the whole path, or all-linear, which is without these two
    #[arg(long, value_name = "NAMES|REGEX", help_heading = "LoRA")]
    target_modules: Option<String>,
    /// Layers that are left out, likewise
    #[arg(long, value_name = "NAMES|REGEX", help_heading = "LoRA")]
    exclude_modules: Option<String>,
    /// Only the last N decoder layers; -1 is all, as is the default
    #[arg(
        long,
        value_name = "N",
        allow_negative_numbers = true,
        conflicts_with = "layers",
        help_heading = "LoRA"
    )]
    num_layers: Option<i64>,
    /// Only these decoder layers, counted from 0, with commas between
    #[arg(long, value_name = "N,N..", value_delimiter = ',', help_heading = "LoRA")]
    layers: Option<Vec<usize>>,
    /// Other ranks for layers whose path ends so
    #[arg(long, value_name = "NAME=N,..", value_parser = patterns::<usize>, help_heading = "LoRA")]
    rank_pattern: Option<IndexMap<String, usize>>,
    /// Other alphas, likewise
    #[arg(long, value_name = "NAME=X,..", value_parser = patterns::<f64>, help_heading = "LoRA")]
    alpha_pattern: Option<IndexMap<String, f64>>,
    /// Where A and B start: kaiming, gaussian, pissa, pissa_niter_N, olora or eva, which reads some of the data first
    #[arg(long, value_name = "START", help_heading = "LoRA")]
    init_lora_weights: Option<StartFrom>,
    /// How many times its rank eva may give a layer, while the ranks of all layers together stay; 1 leaves them as they are, but for layers that read the same
    #[arg(long, value_name = "X", help_heading = "LoRA")]
    eva_rho: Option<f64>,
    /// How little eva's directions have to change by a batch, as a cosine, to be taken
    #[arg(long, value_name = "X", help_heading = "LoRA")]
    eva_tau: Option<f64>,
    /// Divide eva's directions by the square roots of their singular values
    #[arg(long, value_name = "BOOL", num_args = 0..=1, value_parser = BoolishValueParser::new(), default_missing_value = "true", help_heading = "LoRA")]
    eva_whiten: Option<bool>,
    /// Where eva changes a rank, change alpha with it
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "LoRA")]
    eva_adjust_scaling_factors: Option<bool>,
    /// Biases that are trained too: none, lora_only or all
    #[arg(long, value_name = "WHICH", help_heading = "LoRA")]
    bias: Option<Biases>,
    /// Modules whose weights are trained whole, such as embed_tokens and lm_head, with commas between
    #[arg(long, value_name = "NAME,..", value_delimiter = ',', help_heading = "LoRA")]
    modules_to_save: Option<Vec<String>>,
    /// Tokens whose rows of the embedding, and of a head that is the embedding, are trained, with commas between; in a file also of each by itself, as {embed_tokens: [..], lm_head: [..]}
    #[arg(long, value_name = "ID,..", value_delimiter = ',', help_heading = "LoRA")]
    trainable_token_indices: Option<Vec<u32>>,
    /// Start from this adapter's weights, and take its LoRA settings
    #[arg(long, value_name = "DIR", visible_alias = "resume-adapter-file", help_heading = "LoRA")]
    init_adapter: Option<PathBuf>,

    /// What is minimised
    #[arg(long, value_enum, help_heading = "Objective")]
    objective: Option<ObjectiveName>,
    /// What a teacher says of the data, as `logprobs` writes it
    #[arg(long, value_name = "FILE", help_heading = "Objective")]
    teacher: Option<PathBuf>,
    /// The teacher's share in distill; the rest is that of the data's own tokens [default: 1]
    #[arg(long, value_name = "X", help_heading = "Objective")]
    kd_alpha: Option<f64>,
    /// How much a preference counts, and in dpo and kto how strongly the model is held to the reference [default: 0.1]
    #[arg(long, value_name = "X", help_heading = "Objective")]
    beta: Option<f64>,
    /// The function of dpo [default: sigmoid]
    #[arg(long, value_enum, help_heading = "Objective")]
    loss_type: Option<LossType>,
    /// The share of preferences that are the wrong way round, of dpo's loss robust and of simpo [default: 0]
    #[arg(long, value_name = "X", help_heading = "Objective")]
    label_smoothing: Option<f64>,
    /// The margin that simpo aims at [default: 0.5]
    #[arg(long, value_name = "X", help_heading = "Objective")]
    simpo_gamma: Option<f64>,
    /// What the losses of good answers are multiplied by in kto [default: 1]
    #[arg(long, value_name = "X", help_heading = "Objective")]
    desirable_weight: Option<f64>,
    /// What those of the others are [default: 1]
    #[arg(long, value_name = "X", help_heading = "Objective")]
    undesirable_weight: Option<f64>,
    /// Compute what the reference says of all answers before the first step, and keep it in a file
    #[arg(long, value_name = "BOOL", num_args = 0..=1, value_parser = BoolishValueParser::new(), default_missing_value = "true", help_heading = "Objective")]
    precompute_ref_log_probs: Option<bool>,
    /// Compute the prompt of a pair once for both answers
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Objective")]
    share_prompts: Option<bool>,

    /// Passes over the data; fractions are allowed
    #[arg(long, value_name = "X", conflicts_with = "steps", help_heading = "Training")]
    epochs: Option<f64>,
    /// Optimiser steps, instead of epochs
    #[arg(long, value_name = "N", visible_alias = "iters", help_heading = "Training")]
    steps: Option<u64>,
    /// Rows of a batch
    #[arg(short, long, value_name = "N", help_heading = "Training")]
    batch_size: Option<usize>,
    /// Batches that make one step
    #[arg(long, value_name = "N", help_heading = "Training")]
    grad_accumulation: Option<usize>,
    /// What turns gradients into steps
    #[arg(long, value_enum, help_heading = "Training")]
    optimizer: Option<OptimizerName>,
    /// The highest learning rate; unless given, a tenth of this with --fine-tune-type full, and a twentieth with an --objective of preferences
    #[arg(short, long, value_name = "X", help_heading = "Training")]
    learning_rate: Option<f64>,
    /// How it moves after the warm-up
    #[arg(long, value_enum, help_heading = "Training")]
    schedule: Option<Course>,
    /// Steps of the warm-up
    #[arg(long, value_name = "N", conflicts_with = "warmup_ratio", help_heading = "Training")]
    warmup_steps: Option<u64>,
    /// The warm-up's share of all steps
    #[arg(long, value_name = "X", help_heading = "Training")]
    warmup_ratio: Option<f64>,
    /// The learning rate at the end
    #[arg(long, value_name = "X", help_heading = "Training")]
    min_learning_rate: Option<f64>,
    /// Weight decay of matrices
    #[arg(long, value_name = "X", help_heading = "Training")]
    weight_decay: Option<f64>,
    /// Decay of the first moment, or its share in Lion's steps
    #[arg(long, value_name = "X", help_heading = "Training")]
    beta1: Option<f64>,
    /// Decay of the second moment, or of Lion's momentum
    #[arg(long, value_name = "X", help_heading = "Training")]
    beta2: Option<f64>,
    /// Added to the root of Adam's second moment, or to Adafactor's squares
    #[arg(long, value_name = "X", help_heading = "Training")]
    epsilon: Option<f64>,
    /// Correct Adam's moments for beginning at zero, which mlx-lm leaves out unless told
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Training")]
    bias_correction: Option<bool>,
    /// Momentum of SGD and Muon
    #[arg(long, value_name = "X", help_heading = "Training")]
    momentum: Option<f64>,
    /// The share of a gradient that SGD's momentum leaves out
    #[arg(long, value_name = "X", help_heading = "Training")]
    dampening: Option<f64>,
    /// Nesterov's momentum
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true", help_heading = "Training")]
    nesterov: Option<bool>,
    /// Gradients with a larger norm are scaled down to it; 0 is off
    #[arg(long, value_name = "X", help_heading = "Training")]
    clip_norm: Option<f64>,
    /// What the learning rate of every B of a linear layer, bias and magnitude is multiplied by, as in LoRA+; for adamw
    /// and adam
    #[arg(long, value_name = "X", help_heading = "LoRA")]
    loraplus_lr_ratio: Option<f64>,
    /// Steps in a row with a NaN or infinite loss or gradient after which the run ends
    #[arg(long, value_name = "N", help_heading = "Training")]
    skip_limit: Option<u64>,
    /// Recompute each layer in the backward pass: less memory, more time
    #[arg(long, value_name = "BOOL", num_args = 0..=1, value_parser = BoolishValueParser::new(), default_missing_value = "true", help_heading = "Training")]
    grad_checkpoint: Option<bool>,
    /// Where activations wait for the backward pass
    #[arg(long, value_enum, help_heading = "Training")]
    activation_placement: Option<ActivationPlacement>,
    /// What all random numbers follow from
    #[arg(long, value_name = "N", help_heading = "Training")]
    seed: Option<u64>,

    /// Tokens of an example at most; what is longer is cut, and counted
    #[arg(long, value_name = "N", help_heading = "Model and data")]
    max_seq_length: Option<usize>,
    /// Put several examples in a row, with attention kept inside each
    #[arg(long, value_name = "BOOL", num_args = 0..=1, value_parser = BoolishValueParser::new(), default_missing_value = "true", help_heading = "Model and data")]
    packing: Option<bool>,
    /// The tokens that the loss counts
    #[arg(long, value_enum, help_heading = "Model and data")]
    loss_on: Option<Loss>,
    /// The share of the training records that is held out when there is no valid.jsonl
    #[arg(long, value_name = "X", help_heading = "Model and data")]
    valid_fraction: Option<f64>,

    /// Steps between evaluations on the validation data; 0 for only at the end
    #[arg(
        long,
        value_name = "N",
        visible_alias = "steps-per-eval",
        help_heading = "While it trains"
    )]
    eval_every: Option<u64>,
    /// Batches of an evaluation; -1 is all
    #[arg(
        long,
        value_name = "N",
        visible_alias = "val-batches",
        allow_negative_numbers = true,
        help_heading = "While it trains"
    )]
    eval_batches: Option<i64>,
    /// Steps between reports
    #[arg(
        long,
        value_name = "N",
        visible_alias = "steps-per-report",
        help_heading = "While it trains"
    )]
    report_every: Option<u64>,
    /// Steps between checkpoints; 0 for only at the end
    #[arg(long, value_name = "N", help_heading = "While it trains")]
    save_every: Option<u64>,
    /// Checkpoints that are kept, beside the best
    #[arg(long, value_name = "N", help_heading = "While it trains")]
    keep: Option<usize>,
    /// End with the parameters of the best evaluation
    #[arg(long, value_name = "BOOL", num_args = 0..=1, value_parser = BoolishValueParser::new(), default_missing_value = "true", help_heading = "While it trains")]
    keep_best: Option<bool>,
    /// Evaluations without a better one after which the run ends
    #[arg(long, value_name = "N", help_heading = "While it trains")]
    patience: Option<u64>,
    /// Which evaluation is better
    #[arg(long, value_enum, help_heading = "While it trains")]
    best_by: Option<Best>,
    /// Steps between samples; 0 for none
    #[arg(long, value_name = "N", help_heading = "While it trains")]
    sample_every: Option<u64>,
    /// A prompt to sample with; may be given several times
    #[arg(long, value_name = "TEXT", help_heading = "While it trains")]
    sample_prompt: Option<Vec<String>>,
    /// Tokens of a sample at most
    #[arg(long, value_name = "N", help_heading = "While it trains")]
    sample_tokens: Option<usize>,
    /// Evaluate on test.jsonl at the end
    #[arg(long, value_name = "BOOL", num_args = 0..=1, value_parser = BoolishValueParser::new(), default_missing_value = "true", help_heading = "While it trains")]
    test: Option<bool>,
    /// Batches of that evaluation; -1 is all
    #[arg(long, value_name = "N", allow_negative_numbers = true, help_heading = "While it trains")]
    test_batches: Option<i64>,

    /// The dtype of weights and activations
    #[arg(long, value_enum, help_heading = "Device")]
    dtype: Option<Precision>,
    /// Hold the frozen weights of a dense model in fewer bits: QLoRA with bitsandbytes' nf4, or others' formats
    #[arg(long, value_name = "FORMAT", value_parser = quantizations(), help_heading = "Device")]
    quantize: Option<Quantization>,
    /// What the frozen linear layers are multiplied in
    #[arg(long, value_enum, help_heading = "Device")]
    base_compute: Option<BaseCompute>,
    /// Where the weights lie between their uses
    #[arg(long, value_enum, help_heading = "Device")]
    base_placement: Option<BasePlacement>,
    /// Where what the optimiser keeps lies
    #[arg(long, value_enum, help_heading = "Device")]
    optimizer_placement: Option<OptimizerPlacement>,
    /// The device that computes
    #[arg(long, value_enum, help_heading = "Device")]
    device: Option<Processor>,
    /// Who makes the large products of linear layers on Metal [default: fused]
    #[arg(long, value_enum, help_heading = "Device")]
    matmul: Option<Matmul>,
    /// Threads that compute [default: one a core]
    #[arg(long, value_name = "N", help_heading = "Device")]
    threads: Option<usize>,

    #[arg(skip)]
    tensorboard: Option<bool>,
    #[arg(skip)]
    plot: Option<bool>,
}

/// `NAME=VALUE` with commas between.
fn patterns<T: std::str::FromStr>(text: &str) -> Result<IndexMap<String, T>, String> {
    text.split(',')
        .map(|pair| {
            let (name, value) =
                pair.rsplit_once('=').ok_or_else(|| format!("`{pair}` is not NAME=VALUE"))?;
            let value =
                value.trim().parse().map_err(|_| format!("`{value}` is no number for it"))?;
            Ok((name.trim().to_string(), value))
        })
        .collect()
}

/// Paths of a run's settings that aren't here, as where it is continued in another folder than it was begun in.
#[derive(Debug, Default)]
struct Absent {
    config: PathBuf,
    /// Each with its key.
    paths: Vec<(&'static str, String)>,
}

impl Absent {
    /// Those of the settings in this file.
    fn of(config: PathBuf, saved: &Mapping) -> Self {
        const KEYS: [&str; 5] = ["model", "data", "from_config", "init_adapter", "teacher"];
        let texts = |value: &Value| -> Vec<String> {
            let values = match value {
                Value::Sequence(values) => values.as_slice(),
                one => std::slice::from_ref(one),
            };
            let path =
                |value: &Value| value.get("path").unwrap_or(value).as_str().map(String::from);
            values.iter().filter_map(path).collect()
        };
        let of_key = |key: &'static str| {
            let given = saved.get(key).map(texts).unwrap_or_default();
            given.into_iter().map(move |path| (key, path))
        };
        let is_absent = |path: &Path| path.is_relative() && !path.exists();
        let paths = KEYS.into_iter().flat_map(of_key);
        Self { config, paths: paths.filter(|(_, path)| is_absent(Path::new(path))).collect() }
    }

    /// An error, with what is to be known of the path that it is about.
    fn explain(&self, error: anyhow::Error) -> anyhow::Error {
        let told = errors::describe(&error);
        match self.paths.iter().find(|(_, path)| told.contains(path)) {
            Some((key, path)) => error.context(format!(
                "{path} is from the settings of the run ({}); if it is a path, it is relative to the folder in which the run was \
                 begun: go on from there, or give --{}",
                self.config.display(),
                key.replace('_', "-")
            )),
            None => error,
        }
    }
}

/// What a person should know of the settings.
#[derive(Debug, Default)]
struct Told {
    /// That the run isn't as its file says, which is told also where only errors are.
    warning: Option<String>,
    note: Option<String>,
}

/// The settings, what happens to what is in the output folder, what a person should know, and which paths aren't here.
fn settings(
    mut arguments: Arguments,
    processes: usize,
) -> anyhow::Result<(Settings, Start, Told, Absent)> {
    if arguments.no_tensorboard {
        arguments.flags.tensorboard = Some(false);
    }
    if arguments.no_plot {
        arguments.flags.plot = Some(false);
    }
    let mut file = arguments.config.as_deref().map(File::read).transpose()?;
    let mut start =
        Start { overwrite: arguments.overwrite, dry_run: arguments.dry_run, ..Start::default() };
    let (mut absent, mut warning) = (Absent::default(), None);
    if let Some(given) = &arguments.resume {
        let in_file =
            file.as_ref().and_then(|file| file.map.get("output")?.as_str().map(PathBuf::from));
        let output = arguments.flags.output.clone().or(in_file);
        let folder = output.clone().unwrap_or_else(|| Settings::default().output);
        start.resume = Resume::find(given.as_deref(), &folder)?;
        let run = start.resume.as_ref().map_or(Some(folder), Resume::run);
        // Without another file, the run goes on as it was told when it began.
        let saved = run.as_ref().map(|run| run.join(CONFIG)).filter(|saved| saved.is_file());
        if start.resume.is_some()
            && let Some(config) = saved
        {
            let mut saved = File::read(&config)?;
            saved.resume_from = None;
            match &mut file {
                None => {
                    absent = Absent::of(config, &saved.map);
                    file = Some(saved);
                }
                Some(file) => {
                    file.resume_from = None;
                    if let Some(time) = saved.map.get("template_time") {
                        file.map.insert("template_time".into(), time.clone());
                    }
                    // What `auto` stood for where the run began.
                    if let (None, Some(dtype)) = (file.map.get("dtype"), saved.map.get("dtype")) {
                        file.map.insert("dtype".into(), dtype.clone());
                    }
                }
            }
        }
        // The rows of a batch of all processes together stay, however many there are now.
        if let Some(resume) = &start.resume
            && let Some(rows) = batch_rows(resume.from())?
        {
            let map = &mut file.get_or_insert_default().map;
            warning = divide(rows, processes, arguments.flags.batch_size, map)?;
        }
        let Some(output) = output.or(run) else {
            let checkpoint = start.resume.as_ref().map_or(Path::new("auto"), Resume::from);
            return Err(usage(format!(
                "resume: {} doesn't lie in its run's folder, as checkpoints/ beside {CONFIG}, so it isn't known where the run \
                 is to write; give --output",
                checkpoint.display()
            )));
        };
        arguments.flags.output = Some(output);
    }
    let Flags { output, from_config, init_adapter, teacher, .. } = &arguments.flags;
    for (key, path) in [
        ("output", output),
        ("from_config", from_config),
        ("init_adapter", init_adapter),
        ("teacher", teacher),
    ] {
        path.as_deref().map_or(Ok(()), |path| check_name(key, path))?;
    }
    let mut flags = match serde_yaml_ng::to_value(&arguments.flags)? {
        Value::Mapping(flags) => flags,
        _ => Mapping::new(),
    };
    flags.extend(arguments.foreign.0);
    let merged = file.unwrap_or_default().merge(&flags);
    let (settings, note) = merged.map_err(|error| absent.explain(error))?;
    Ok((settings, start, Told { warning, note }, absent))
}

/// Gives each process its part of the rows that a batch of the run has, whatever the file says of them; what a person should
/// know of that.
///
/// # Errors
/// When they can't be divided so, or `flag` says otherwise.
fn divide(
    rows: usize,
    processes: usize,
    flag: Option<usize>,
    file: &mut Mapping,
) -> anyhow::Result<Option<String>> {
    const KEY: &str = "batch_size";
    let each = rows_of_each(rows, processes)?;
    let divided = format!(
        "a batch of this run has {}, divided over {}",
        plural(rows as u64, "row"),
        plural(processes as u64, "process")
    );
    match flag {
        Some(flag) if flag as u64 != each => {
            return Err(usage(format!(
                "{KEY}: is {flag}, but {divided}; give --batch-size {each}, or leave it out"
            )));
        }
        Some(_) => return Ok(None),
        None => {}
    }
    let before = file.insert(KEY.into(), each.into());
    let before = before.unwrap_or_else(|| BatchOptions::default().batch_size.into());
    if before == each {
        return Ok(None);
    }
    let before = serde_yaml_ng::to_string(&before)?;
    Ok(Some(format!("warning: {KEY} is {each} in place of {}: {divided}", cut(before.trim()))))
}

/// The part of each process of a batch whose rows are those of all processes together.
fn rows_of_each(rows: usize, processes: usize) -> anyhow::Result<u64> {
    if rows.is_multiple_of(processes) {
        return Ok((rows / processes) as u64);
    }
    let counts: Vec<String> =
        (1..=rows).filter(|count| rows.is_multiple_of(*count)).map(|it| it.to_string()).collect();
    Err(usage(format!(
        "resume: a batch of this run has {}, which {processes} processes can't share equally; start {}",
        plural(rows as u64, "row"),
        counts.join(" or ")
    )))
}

/// Trains, together with the processes that a launcher has started with this one.
pub fn run(arguments: Arguments, terminal: impl Fn(bool) -> Terminal) -> anyhow::Result<u8> {
    let mut terminal = terminal(arguments.json);
    let launched = launched();
    let is_first = launched.as_ref().is_none_or(|launched| launched.rank == 0);
    terminal.quiet |= !is_first;
    let (dry_run, limit) = (arguments.dry_run, Duration::from_secs(arguments.collective_timeout));
    let gpus = match (&launched, arguments.gpus) {
        (Some(launched), Some(_)) if !launched.is_own() => {
            launched.refuse("--gpus").map_err(usage)?;
            None
        }
        (None, Some(gpus)) => Some(gpus.count(Gpus::FLAG)?),
        _ => None,
    };
    let processes = launched.as_ref().map_or(gpus.unwrap_or(1), |launched| launched.size);
    let asked = arguments.gpus;
    if gpus.is_some_and(|count| count > 1) {
        let template = arguments.flags.template.chat_template.as_deref();
        for (key, path) in
            [("config", arguments.config.as_deref()), ("chat_template", template.map(Path::new))]
        {
            path.map_or(Ok(()), |path| processes::check_shared(key, path))?;
        }
    }
    let (mut settings, mut start, told, absent) = settings(arguments, processes)?;
    if let Some(gpus) = asked {
        settings.device = gpus.device(settings.device, Gpus::FLAG)?;
    }
    if let Some(count) = gpus.filter(|count| *count > 1) {
        return processes::start(count);
    }
    if let Some(warning) = told.warning.filter(|_| is_first) {
        say(warning);
    }
    if let Some(note) = told.note {
        terminal.note(note);
    }
    set_threads(settings.threads.or_else(|| launched.as_ref().and_then(processes::threads)))?;
    interrupt::install()?;
    let device = models::device_of(settings.device, launched.as_ref())?;
    if let Some(launched) = &launched {
        launched.check(&device).map_err(usage)?;
    }
    start.device = Some(device.clone());
    // It lasts as long as the process.
    let member: &'static Member = Box::leak(Box::new(Member::join(&device, limit)?));
    start.group = member.group();
    start.shards = member.shards();
    let group = start.group;
    let done = train(settings, start, dry_run, terminal)
        .map_err(|error| absent.explain(error))
        .and_then(|code| Ok(member.leave().map(|()| code)?));
    if let Err(error) = &done
        && group.size() > 1
    {
        say(format!("error: {}", errors::describe(error)));
        if !group.is_root() && ends_rank_0_as_well(error) {
            // It may have a checkpoint to finish. Some launchers end all when one ends, and so does MPI.
            member.outlast_root(TIME_TO_SAVE);
        }
        // The others would wait for this one.
        member.abort(errors::exit_code(error));
    }
    done
}

/// Whether rank 0 finds the same by itself: that another rank is lost, after which it saves a checkpoint, or that the run
/// diverges, when that of an earlier step may be under way.
fn ends_rank_0_as_well(error: &anyhow::Error) -> bool {
    match error.downcast_ref() {
        Some(Error::Rank { rank, .. }) => *rank > 0,
        Some(Error::Diverged(_)) => true,
        _ => false,
    }
}

fn train(
    settings: Settings,
    start: Start,
    dry_run: bool,
    terminal: Terminal,
) -> anyhow::Result<u8> {
    let is_root = start.group.is_root();
    let run = Run::prepare(settings, start, terminal)?;
    if dry_run && !is_root {
        return Ok(SUCCESS);
    }
    if dry_run {
        return if terminal.json {
            output::json(&run.plan)
        } else {
            output::prose(&run.plan.describe())
        }
        .map(|()| SUCCESS);
    }
    terminal.note(run.plan.describe());
    let summary = run.train(terminal)?;
    if !is_root {
        return Ok(exit_code(&summary));
    }
    if terminal.json {
        output::json(&summary)?;
    } else {
        if !terminal.quiet && std::io::stdout().is_terminal() {
            let columns = stdout_columns().unwrap_or(80);
            output::write(&terminal_curve(&summary.curve, columns))?;
        }
        output::prose(&summary.describe())?;
    }
    if summary.interrupted {
        say(format!(
            "A checkpoint was saved. To continue: metal-candle train --resume --output {}",
            shell_word(&summary.output.display().to_string())
        ));
        return Ok(exit_code(&summary));
    }
    if summary.outcome == LAST_STEPS_SKIPPED {
        say(format!(
            "error: the last {} changed nothing, as the loss or the gradient was NaN or infinite; a lower \
             learning rate, clipping or f32 may help. What was saved are the parameters of step {}",
            plural(summary.skipped_in_a_row, "step"),
            summary.step - summary.skipped_in_a_row
        ));
        return Ok(exit_code(&summary));
    }
    terminal.note(format!("Next: {}", run.next_command()));
    Ok(exit_code(&summary))
}

/// The exit code of a run that came to this.
fn exit_code(summary: &Summary) -> u8 {
    match summary {
        Summary { interrupted: true, .. } => INTERRUPTED,
        Summary { outcome: LAST_STEPS_SKIPPED, .. } => FAILURE,
        _ => SUCCESS,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        arguments: Arguments,
    }

    #[test]
    fn a_run_goes_on_with_the_rows_of_its_batches_whatever_its_file_says_of_them() {
        let folder = tempfile::tempdir().unwrap();
        let checkpoint = folder.path().join("run/checkpoints/step-00000004");
        std::fs::create_dir_all(&checkpoint).unwrap();
        let state = "{\"fingerprint\": {\"batch_size\": 8}}";
        std::fs::write(checkpoint.join("trainer_state.json"), state).unwrap();
        let path = |name: &str| folder.path().join(name).display().to_string();
        let resumed = |file: &str, processes, flags: &[&str]| {
            std::fs::write(path("run.yaml"), format!("model: m\ndata: d\n{file}")).unwrap();
            let (config, run) = (path("run.yaml"), path("run"));
            let words = ["train", "-c", &config, "-o", &run, "--resume=auto"];
            let command = Command::try_parse_from([&words[..], flags].concat()).unwrap();
            settings(command.arguments, processes)
                .map(|(settings, _, told, _)| {
                    (settings.batch_size, told.warning.unwrap_or_default())
                })
                .map_err(|error| error.to_string())
        };
        let two = "batch_size: 2";
        assert_eq!(resumed(two, 4, &[]), Ok((2, String::new())));
        let (rows, said) = resumed(two, 2, &[]).unwrap();
        assert_eq!(rows, 4);
        assert_eq!(
            said,
            "warning: batch_size is 4 in place of 2: a batch of this run has 8 rows, divided over 2 processes"
        );
        // The default, and another program's word.
        assert!(
            resumed("", 1, &[]).unwrap().1.starts_with("warning: batch_size is 8 in place of 4: ")
        );
        let (rows, said) = resumed("per_device_train_batch_size: 2", 1, &[]).unwrap();
        assert_eq!(rows, 8);
        assert!(said.ends_with("divided over 1 process"), "{said}");
        // A flag may say the same, and nothing else.
        assert_eq!(resumed(two, 2, &["--batch-size", "4"]), Ok((4, String::new())));
        let error = resumed(two, 2, &["--per-device-train-batch-size", "2"]).unwrap_err();
        assert!(error.starts_with("batch_size: is 2, but a batch of this run has 8"), "{error}");
        assert!(error.contains("give --batch-size 4"), "{error}");
        let error = resumed(two, 3, &[]).unwrap_err();
        assert!(
            error.contains("3 processes can't share equally; start 1 or 2 or 4 or 8"),
            "{error}"
        );
    }

    #[test]
    fn flags_of_other_programs_mean_together_what_they_mean_there() {
        let words = "train -m m -d d --max_steps 5 --num_train_epochs 3 --optim lion_32bit";
        let command = Command::try_parse_from(words.split(' ')).unwrap();
        let settings = settings(command.arguments, 1).unwrap().0;
        assert_eq!((settings.steps, settings.epochs), (Some(5), None));
        assert_eq!(settings.beta2, Some(0.999));
    }

    #[test]
    fn ranks_stay_while_rank_0_ends_by_the_same_error() {
        let rank = |rank| Error::Rank { rank, message: "is lost".into() };
        for (error, expected) in [
            (rank(2), true),
            (rank(0), false),
            (Error::Diverged("5 steps in a row were skipped".into()), true),
            (Error::Unsupported("this".into()), false),
        ] {
            let told = error.to_string();
            assert_eq!(ends_rank_0_as_well(&error.into()), expected, "{told}");
        }
    }
}
