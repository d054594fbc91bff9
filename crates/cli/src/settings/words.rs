//! The words of other programs: mlx-lm, PEFT, transformers, TRL, Unsloth, axolotl and LLaMA-Factory. A
//! row of [`WORDS`] holds for a key of the file and for the flag of that name. A word is understood where
//! it means exactly what a setting of this program does, and otherwise answered with the right one.

use super::keys::{Keys, shown, suggestion};
use super::sources::{datasets, hf_dataset};
use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches};
use serde_yaml_ng::{Mapping, Value};

/// What a word means.
pub enum Meaning {
    /// Another name of this key, for the same values.
    Key(&'static str),
    /// As [`Self::Key`], but as a flag no other name of the key's: what it means depends on other words.
    Apart(&'static str),
    /// Its value says what it sets.
    Sets(fn(&mut Keys, &str, &Value) -> Result<(), String>),
    /// Changes nothing here as long as its value is one of these. Otherwise: why it is refused.
    Neutral(Accepted, &'static str),
    /// Is refused; what there is instead.
    Instead(&'static str),
}

/// Values that change nothing.
pub enum Accepted {
    /// Every one.
    All,
    /// Those by which other programs say that something is off: null, false, 0 and what is empty.
    Off,
    /// What is empty, and these. That something is off would change it.
    EmptyOr(&'static [&'static str]),
}

use Accepted::{All, EmptyOr, Off};
use Meaning::{Apart, Instead, Key, Neutral, Sets};

const QUANTISED: &str = "it is not supported; `quantize: nf4` is QLoRA's base";
const OWN_WAY: &str = "several GPUs are asked for by --gpus; `optimizer_placement` and `base_placement` say what \
                       they share";
const REPORTS: &str =
    "every run writes metrics.jsonl and event files for TensorBoard; leave it out";
const DATA: &str = "data are given as `data`: a file, a folder, or the id of a data set on the hub";
const LORA_KIND: &str = "only LoRA itself is supported; leave it out";
const NOT_TRANSPOSED: &str = "no supported model stores its weights so; leave it out";
const BITSANDBYTES: &str = "bitsandbytes' nf4 is meant here; `quantize` names the other formats";

/// transformers' and axolotl's words for the schedule.
pub const SCHEDULERS: [&str; 2] = ["lr_scheduler_type", "lr_scheduler"];

/// All of them.
pub const WORDS: &[(&str, Meaning)] = &[
    // mlx-lm
    ("adapter_path", Key("output")),
    ("chat_feature", Key("messages_column")),
    ("clear_cache_threshold", Neutral(All, "")),
    ("completion_feature", Key("completion_column")),
    ("config", Neutral(Off, "one file cannot name another")),
    ("grad_accumulation_steps", Key("grad_accumulation")),
    ("hf_dataset", Sets(hf_dataset)),
    ("iters", Key("steps")),
    ("lora_layers", Key("num_layers")),
    ("lora_parameters", Sets(lora_parameters)),
    ("mask_prompt", Sets(completion_or_all)),
    ("optimizer_config", Sets(optimizer_config)),
    ("project_name", Neutral(All, "")),
    ("prompt_feature", Key("prompt_column")),
    ("report_to", Sets(report_to)),
    ("resume_adapter_file", Key("init_adapter")),
    ("steps_per_eval", Key("eval_every")),
    ("steps_per_report", Key("report_every")),
    ("text_feature", Key("text_column")),
    ("train", Sets(train)),
    ("training_mode", Neutral(EmptyOr(&["normal"]), "normal is the only one there is")),
    ("trust_remote_code", Neutral(All, "")),
    ("val_batches", Key("eval_batches")),
    ("wandb", Neutral(Off, REPORTS)),
    // PEFT
    ("alora_invocation_tokens", Neutral(Off, LORA_KIND)),
    ("arrow_config", Neutral(Off, LORA_KIND)),
    ("auto_mapping", Neutral(Off, "it is not supported; leave it out")),
    ("base_model_name_or_path", Key("model")),
    ("corda_config", Neutral(Off, LORA_KIND)),
    ("ensure_weight_tying", Neutral(Off, "it is not supported; leave it out")),
    ("eva_config", Sets(eva_config)),
    ("fan_in_fan_out", Neutral(Off, NOT_TRANSPOSED)),
    ("inference_mode", Neutral(All, "")),
    ("layer_replication", Neutral(Off, LORA_KIND)),
    ("layers_pattern", Neutral(EmptyOr(&["layers"]), "decoder layers are called layers here")),
    ("layers_to_transform", Key("layers")),
    ("loftq_config", Neutral(Off, QUANTISED)),
    ("lora_alpha", Key("alpha")),
    (
        "lora_bias",
        Neutral(Off, "the update has no bias of its own; `bias` trains those of the layers"),
    ),
    ("lora_dropout", Key("dropout")),
    ("lora_r", Key("rank")),
    ("megatron_config", Neutral(Off, OWN_WAY)),
    ("megatron_core", Neutral(All, "")),
    ("peft_type", Neutral(EmptyOr(&["LORA"]), "LORA is the only one there is")),
    ("peft_version", Neutral(All, "")),
    ("qalora_group_size", Neutral(All, "")),
    ("r", Key("rank")),
    ("runtime_config", Neutral(All, "")),
    ("target_parameters", Neutral(Off, "adapters are on linear layers; see `target_modules`")),
    ("task_type", Neutral(EmptyOr(&["CAUSAL_LM"]), "CAUSAL_LM is the only one there is")),
    ("use_bdlora", Neutral(Off, LORA_KIND)),
    ("use_dora", Sets(dora)),
    ("use_qalora", Neutral(Off, QUANTISED)),
    ("use_rslora", Key("rslora")),
    // transformers and TRL
    (
        "activation_offloading",
        Sets(|keys, name, value| {
            let place = if boolean(name, value)? { "host" } else { "device" };
            keys.insert("activation_placement", name, place.into())
        }),
    ),
    ("adam_beta1", Key("beta1")),
    ("adam_beta2", Key("beta2")),
    ("adam_epsilon", Apart("epsilon")),
    ("assistant_only_loss", Sets(assistant_only_loss)),
    ("attn_implementation", Neutral(All, "")),
    ("auto_find_batch_size", Neutral(Off, "give batch_size; --dry-run estimates the memory")),
    ("bf16", Sets(|keys, name, value| half(keys, name, value, "bf16"))),
    ("bnb_4bit_quant_type", Neutral(EmptyOr(&["nf4"]), BITSANDBYTES)),
    ("completion_only_loss", Sets(completion_or_all)),
    ("chat_template_path", Key("chat_template")),
    (
        "ref_model",
        Neutral(Off, "the reference is the frozen model, or the adapter of `init_adapter`"),
    ),
    (
        "disable_dropout",
        Sets(|keys, name, value| match boolean(name, value)? {
            true => keys.insert("dropout", name, 0.into()),
            false => Ok(()),
        }),
    ),
    ("reference_free", Neutral(Off, "simpo and orpo have no reference, see `objective`")),
    ("truncation_mode", Neutral(EmptyOr(&["keep_start"]), "sequences keep their beginning")),
    ("dataloader_num_workers", Neutral(All, "")),
    ("dataloader_pin_memory", Neutral(All, "")),
    ("dataset_config", Key("data_config")),
    ("dataset_name", Key("data")),
    ("dataset_num_proc", Neutral(All, "")),
    ("dataset_path", Key("data")),
    (
        "dataset_test_split",
        Instead(
            "validation data are the split of that name, or held out by `valid_fraction`; leave it out",
        ),
    ),
    ("dataset_text_field", Key("text_column")),
    ("dataset_train_split", Key("data_split")),
    ("ddp_find_unused_parameters", Neutral(All, "")),
    ("ddp_timeout", Neutral(All, "")),
    ("deepspeed", Neutral(Off, OWN_WAY)),
    ("do_eval", Neutral(All, "")),
    ("do_train", Sets(train)),
    ("early_stopping_patience", Key("patience")),
    ("eval_packing", Neutral(All, "")),
    ("eval_steps", Key("eval_every")),
    ("eval_strategy", Sets(|keys, name, value| strategy(keys, name, value, "eval_every"))),
    ("evaluation_strategy", Sets(|keys, name, value| strategy(keys, name, value, "eval_every"))),
    ("fp16", Sets(|keys, name, value| half(keys, name, value, "f16"))),
    ("fsdp", Neutral(Off, OWN_WAY)),
    ("gradient_accumulation_steps", Key("grad_accumulation")),
    ("gradient_checkpointing", Key("grad_checkpoint")),
    ("gradient_checkpointing_kwargs", Neutral(All, "")),
    ("group_by_length", Neutral(All, "")),
    ("hub_model_id", Neutral(All, "")),
    ("hub_private_repo", Neutral(All, "")),
    ("hub_strategy", Neutral(All, "")),
    ("label_names", Neutral(Off, "it is not supported; see `loss_on`")),
    ("label_smoothing_factor", Neutral(Off, "label smoothing is not supported")),
    ("load_best_model_at_end", Key("keep_best")),
    ("load_in_4bit", Sets(|keys, name, value| bits(keys, name, value, "nf4"))),
    ("load_in_8bit", Sets(|keys, name, value| bits(keys, name, value, "int8"))),
    ("log_level", Neutral(All, "")),
    ("log_level_replica", Neutral(All, "")),
    ("logging_dir", Neutral(Off, "event files stand in tensorboard/ of the output folder")),
    ("logging_first_step", Neutral(Off, "reports are made every report_every steps")),
    ("logging_steps", Key("report_every")),
    ("logging_strategy", Neutral(EmptyOr(&["steps"]), "reports are made every report_every steps")),
    ("lora_target_modules", Key("target_modules")),
    ("lora_task_type", Neutral(EmptyOr(&["CAUSAL_LM"]), "CAUSAL_LM is the only one there is")),
    ("lr", Key("learning_rate")),
    ("lr_scheduler_kwargs", Neutral(Off, "it is not supported; see `min_learning_rate`")),
    ("lr_scheduler_type", Sets(schedule)),
    ("max_grad_norm", Key("clip_norm")),
    ("max_length", Key("max_seq_length")),
    ("max_steps", Sets(max_steps)),
    ("model_init_kwargs", Neutral(Off, "it is not supported; see `dtype`")),
    ("model_name_or_path", Key("model")),
    ("model_revision", Key("revision")),
    ("neftune_noise_alpha", Neutral(Off, "noise on embeddings is not supported")),
    ("num_train_epochs", Apart("epochs")),
    ("optim", Apart("optimizer")),
    ("output_dir", Key("output")),
    // A folder that holds a run is never overwritten without the flag.
    ("overwrite_output_dir", Neutral(All, "")),
    // How many are evaluated at once changes no result.
    ("per_device_eval_batch_size", Neutral(All, "")),
    ("per_device_train_batch_size", Key("batch_size")),
    ("push_to_hub", Neutral(Off, "nothing is uploaded; leave it out, or false")),
    ("remove_unused_columns", Neutral(All, "")),
    (
        "resume_from_checkpoint",
        Neutral(Off, "it is the flag --resume here, which a file cannot give"),
    ),
    ("run_name", Neutral(All, "")),
    ("save_only_model", Neutral(All, "")),
    (
        "save_safetensors",
        Neutral(EmptyOr(&["true"]), "files are safetensors; leave it out, or true"),
    ),
    ("save_steps", Key("save_every")),
    ("save_strategy", Sets(|keys, name, value| strategy(keys, name, value, "save_every"))),
    ("save_total_limit", Key("keep")),
    ("tf32", Neutral(All, "")),
    ("torch_compile", Neutral(All, "")),
    ("torch_dtype", Key("dtype")),
    (
        "use_cpu",
        Sets(|keys, name, value| match boolean(name, value)? {
            true => keys.insert("device", name, "cpu".into()),
            false => Ok(()),
        }),
    ),
    ("use_liger_kernel", Neutral(All, "")),
    (
        "use_peft",
        Sets(|keys, name, value| match boolean(name, value)? {
            true => {
                keys.peft = Some(name.into());
                Ok(())
            }
            false => keys.insert("fine_tune_type", name, "full".into()),
        }),
    ),
    ("wandb_project", Neutral(Off, REPORTS)),
    // Unsloth
    ("random_state", Key("seed")),
    (
        "use_gradient_checkpointing",
        Sets(|keys, name, value| {
            let on = value.as_str() == Some("unsloth") || boolean(name, value)?;
            keys.insert("grad_checkpoint", name, on.into())
        }),
    ),
    // axolotl
    ("adapter", Sets(adapter)),
    ("base_model", Key("model")),
    ("chat_template_jinja", Key("chat_template")),
    ("dataset_prepared_path", Neutral(All, "")),
    ("datasets", Sets(datasets)),
    ("eval_batch_size", Neutral(All, "")),
    ("eval_sample_packing", Neutral(All, "")),
    (
        "excess_length_strategy",
        Neutral(EmptyOr(&["truncate"]), "what is longer than max_seq_length is cut"),
    ),
    (
        "evals_per_epoch",
        Sets(|keys, name, value| per_epoch(keys, name, value, "eval_every", "evaluations")),
    ),
    ("flash_attention", Neutral(All, "")),
    ("kto_desirable_weight", Key("desirable_weight")),
    ("kto_undesirable_weight", Key("undesirable_weight")),
    // Liger's kernels, and axolotl's below, compute the same.
    ("liger_fused_linear_cross_entropy", Neutral(All, "")),
    ("liger_glu_activation", Neutral(All, "")),
    ("liger_layer_norm", Neutral(All, "")),
    ("liger_rms_norm", Neutral(All, "")),
    ("liger_rope", Neutral(All, "")),
    ("lora_fan_in_fan_out", Neutral(Off, NOT_TRANSPOSED)),
    ("lora_mlp_kernel", Neutral(All, "")),
    ("lora_model_dir", Key("init_adapter")),
    ("lora_modules_to_save", Key("modules_to_save")),
    ("lora_o_kernel", Neutral(All, "")),
    ("lora_qkv_kernel", Neutral(All, "")),
    (
        "lora_target_linear",
        Sets(|keys, name, value| match boolean(name, value)? {
            true => keys.insert("target_modules", name, "all-linear".into()),
            false => Ok(()),
        }),
    ),
    // Runs end at infinite losses.
    ("loss_watchdog_patience", Neutral(All, "")),
    ("loss_watchdog_threshold", Neutral(All, "")),
    ("lr_scheduler", Sets(schedule)),
    ("micro_batch_size", Key("batch_size")),
    ("model_type", Sets(model_type)),
    ("num_epochs", Apart("epochs")),
    ("orpo_alpha", Key("beta")),
    // Padding is never learned, nor attended to.
    ("pad_to_sequence_len", Neutral(All, "")),
    ("peft_init_lora_weights", Key("init_lora_weights")),
    ("peft_use_dora", Sets(dora)),
    ("rl", Sets(objective)),
    ("rl_beta", Key("beta")),
    ("sample_packing", Key("packing")),
    (
        "saves_per_epoch",
        Sets(|keys, name, value| per_epoch(keys, name, value, "save_every", "checkpoints")),
    ),
    ("sequence_len", Key("max_seq_length")),
    ("special_tokens", Sets(special_tokens)),
    ("strict", Neutral(All, "")),
    // The files of the tokenizer say what it is.
    ("tokenizer_type", Neutral(All, "")),
    ("train_on_inputs", Sets(|keys, name, value| loss_if(keys, name, value, "all"))),
    ("val_set_size", Sets(held_out)),
    // Names within the service that wandb_project asks for.
    ("wandb_entity", Neutral(All, "")),
    ("wandb_name", Neutral(All, "")),
    ("xformers_attention", Neutral(All, "")),
    // LLaMA-Factory
    ("adapter_name_or_path", Key("init_adapter")),
    ("cutoff_len", Key("max_seq_length")),
    ("dataset", Neutral(Off, DATA)),
    ("finetuning_type", Key("fine_tune_type")),
    ("flash_attn", Neutral(All, "")),
    ("lora_rank", Key("rank")),
    (
        "lora_target",
        Sets(|keys, name, value| {
            let all = value.as_str() == Some("all");
            keys.insert(
                "target_modules",
                name,
                if all { "all-linear".into() } else { value.clone() },
            )
        }),
    ),
    ("mask_history", Sets(|keys, name, value| loss_if(keys, name, value, "completion"))),
    (
        "max_samples",
        Instead(
            "the number of records is not limited here; of a data set on the hub `data_split: train[:1000]` takes the \
             first, a file has to be cut before",
        ),
    ),
    (
        "neat_packing",
        Sets(|keys, name, value| match boolean(name, value)? {
            true => keys.insert("packing", name, true.into()),
            false => Ok(()),
        }),
    ),
    ("overwrite_cache", Neutral(All, "")),
    ("plot_loss", Key("plot")),
    ("kto_chosen_weight", Key("desirable_weight")),
    ("kto_rejected_weight", Key("undesirable_weight")),
    ("pref_beta", Key("beta")),
    (
        "pref_loss",
        Sets(|keys, name, value| match value.as_str() {
            Some("orpo" | "simpo") => keys.insert("objective", name, value.clone()),
            _ => keys.insert("loss_type", name, value.clone()),
        }),
    ),
    ("preprocessing_num_workers", Neutral(All, "")),
    ("quantization_bit", Sets(quantization_bit)),
    ("quantization_method", Neutral(EmptyOr(&["bitsandbytes", "bnb"]), BITSANDBYTES)),
    ("quantization_type", Neutral(EmptyOr(&["nf4"]), BITSANDBYTES)),
    ("stage", Sets(objective)),
    ("template", Sets(template)),
    ("train_on_prompt", Sets(|keys, name, value| loss_if(keys, name, value, "all"))),
    ("val_size", Sets(held_out)),
];

/// The row of a word.
pub fn meaning(word: &str) -> Option<&'static Meaning> {
    WORDS.iter().find(|(name, _)| *name == word).map(|(_, meaning)| meaning)
}

/// Applies a word that is no name of a key. `written` is how the user has written it.
pub fn apply(
    meaning: &Meaning,
    keys: &mut Keys,
    written: &str,
    value: &Value,
) -> Result<(), String> {
    match meaning {
        Key(key) | Apart(key) => keys.insert(key, written, value.clone()),
        Sets(_) | Instead(_) if value.is_null() => Ok(()),
        Sets(sets) => sets(keys, written, value),
        Neutral(accepted, why) => {
            let text = match value {
                Value::String(text) => text.clone(),
                Value::Bool(on) => on.to_string(),
                _ => String::new(),
            };
            let neutral = match accepted {
                All => true,
                Off => is_off(value),
                EmptyOr(others) => is_empty(value) || others.contains(&text.as_str()),
            };
            if neutral { Ok(()) } else { Err(format!("{written}: is {}; {why}", shown(value))) }
        }
        Instead(what) => Err(format!("{written}: {what}")),
    }
}

fn is_off(value: &Value) -> bool {
    value.as_bool() == Some(false) || value.as_f64() == Some(0.0) || is_empty(value)
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::String(text) => text.is_empty(),
        Value::Sequence(list) => list.is_empty(),
        Value::Mapping(map) => map.is_empty(),
        _ => false,
    }
}

fn wrong(name: &str, value: &Value, expected: &str) -> String {
    format!("{name}: is {}, expected {expected}", shown(value))
}

fn boolean(name: &str, value: &Value) -> Result<bool, String> {
    value.as_bool().ok_or_else(|| wrong(name, value, "true or false"))
}

/// A 16-bit dtype that is switched on.
fn half(keys: &mut Keys, name: &str, value: &Value, dtype: &str) -> Result<(), String> {
    match value {
        Value::String(text) if text == "auto" => keys.insert("dtype", name, "auto".into()),
        _ if boolean(name, value)? => keys.insert("dtype", name, dtype.into()),
        _ => Ok(()),
    }
}

/// A base in fewer bits that is switched on.
fn bits(keys: &mut Keys, name: &str, value: &Value, format: &str) -> Result<(), String> {
    match boolean(name, value)? {
        true => keys.insert("quantize", name, format.into()),
        false => Ok(()),
    }
}

/// LLaMA-Factory's name of a chat template, of which its files are told that it isn't read. A flag is refused.
fn template(_: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    match name.starts_with("--") {
        true => Err(format!(
            "{name}: is {}, but conversations go through the model's own chat template, or the one of `chat_template`; leave \
             it out if that is the same",
            shown(value)
        )),
        false => Ok(()),
    }
}

/// LLaMA-Factory's number of bits, of bitsandbytes' formats.
fn quantization_bit(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    match value.as_u64() {
        Some(4) => keys.insert("quantize", name, "nf4".into()),
        Some(8) => keys.insert("quantize", name, "int8".into()),
        _ => Err(wrong(name, value, "4 (nf4) or 8 (int8); `quantize` names the other formats")),
    }
}

fn dora(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    match boolean(name, value)? {
        true => keys.insert("fine_tune_type", name, "dora".into()),
        false => Ok(()),
    }
}

/// The class by which transformers loads a model, of which the model's own files decide here.
fn model_type(_: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    let is_usual = |class: &str| {
        ["ForCausalLM", "ForConditionalGeneration"].iter().any(|end| class.ends_with(end))
    };
    match value.as_str().is_some_and(is_usual) {
        true => Ok(()),
        false => {
            Err(wrong(name, value, "AutoModelForCausalLM, or the like; config.json says the rest"))
        }
    }
}

/// transformers' constant rate has no warm-up; the other of that kind is constant_with_warmup.
fn schedule(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    keys.insert("schedule", name, value.clone())?;
    match value.as_str() {
        Some("constant") => keys.insert("warmup_steps", name, 0.into()),
        _ => Ok(()),
    }
}

/// Padding is never learned, so its token may be any; the others are what the tokenizer's files say.
fn special_tokens(_: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    let Value::Mapping(tokens) = value else {
        return Err(wrong(name, value, "a mapping such as pad_token: <pad>"));
    };
    match tokens.iter().find(|(key, value)| key.as_str() != Some("pad_token") && !is_off(value)) {
        None => Ok(()),
        Some((key, value)) => Err(format!(
            "{name}.{}: is {}; special tokens are those of the tokenizer's files, but for pad_token, which changes \
             nothing",
            shown(key),
            shown(value)
        )),
    }
}

/// The objective by its name, where IPO is one of DPO's losses.
fn objective(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    match value.as_str() {
        Some("sft" | "dpo" | "simpo" | "orpo" | "kto") => {
            keys.insert("objective", name, value.clone())
        }
        Some("ipo") => {
            keys.insert("objective", name, "dpo".into())?;
            keys.insert("loss_type", name, "ipo".into())
        }
        _ => Err(wrong(name, value, "sft, dpo, ipo, simpo, orpo or kto")),
    }
}

/// A kind of loss whose absence is what is usual here, too.
fn loss_if(keys: &mut Keys, name: &str, value: &Value, loss: &str) -> Result<(), String> {
    match boolean(name, value)? {
        true => keys.insert("loss_on", name, loss.into()),
        false => Ok(()),
    }
}

/// The loss of what follows the prompt, or else of every token: mlx-lm's `mask_prompt`, which masks everything before a
/// conversation's last message, and TRL's `completion_only_loss`, which goes by the data only where it has no value.
fn completion_or_all(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    let loss = if boolean(name, value)? { "completion" } else { "all" };
    keys.insert("loss_on", name, loss.into())
}

/// TRL's loss of the assistant's turns. Where it is off, TRL learns every token of conversations, but of prompts with
/// completions the completions, and which of these the data are isn't known yet.
fn assistant_only_loss(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    match boolean(name, value)? {
        true => keys.insert("loss_on", name, "assistant".into()),
        false => Err(wrong(
            name,
            value,
            "true. TRL then learns every token of conversations, which is `loss_on: all` here, and of prompts with \
             completions the completions, which is `loss_on: completion`; write the one that you want into the file in \
             its place",
        )),
    }
}

fn train(_: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    match boolean(name, value)? {
        true => Ok(()),
        false => Err(wrong(name, value, "true; to measure only, use `metal-candle evaluate`")),
    }
}

fn max_steps(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    // transformers writes -1 for "go by epochs".
    if value.as_i64() == Some(-1) { Ok(()) } else { keys.insert("steps", name, value.clone()) }
}

/// When to evaluate or to save. An epoch's end has both, of which neither changes what is trained.
fn strategy(keys: &mut Keys, name: &str, value: &Value, every: &str) -> Result<(), String> {
    match value {
        Value::String(text) if text == "steps" => Ok(()),
        Value::String(text) if text == "epoch" => {
            keys.insert("epoch_ends", name, true.into())?;
            keys.insert(every, name, 0.into())
        }
        Value::String(text) if text == "no" => keys.insert(every, name, 0.into()),
        Value::Bool(false) => keys.insert(every, name, 0.into()),
        _ => {
            let best = if every == "save_every" { ", and `keep_best` for the best" } else { "" };
            Err(wrong(
                name,
                value,
                &format!("steps, epoch or no; see `{every}`, which counts steps{best}"),
            ))
        }
    }
}

/// How many evaluations or checkpoints an epoch has, of which one is at its end. How many steps it has is only known
/// with the data.
fn per_epoch(
    keys: &mut Keys,
    name: &str,
    value: &Value,
    every: &str,
    what: &str,
) -> Result<(), String> {
    match value.as_u64() {
        Some(0) => strategy(keys, name, &"no".into(), every),
        Some(1) => strategy(keys, name, &"epoch".into(), every),
        _ => Err(wrong(
            name,
            value,
            &format!(
                "1, at each epoch's end, or 0; for more {what} give `{every}` the steps between them, of which --dry-run \
                 tells how many there are"
            ),
        )),
    }
}

fn adapter(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    // axolotl's files name DoRA by a switch beside this.
    let kind = if keys.has_dora { "dora" } else { "lora" };
    match value.as_str() {
        Some("lora") => keys.insert("fine_tune_type", name, kind.into()),
        Some("qlora") => {
            keys.insert("fine_tune_type", name, kind.into())?;
            keys.insert("quantize", name, "nf4".into())
        }
        _ => Err(format!(
            "{name}: is {}; `output` is the folder that the adapter is written to (mlx-lm's adapter_path), \
             and `init_adapter` one to start from",
            shown(value)
        )),
    }
}

/// A share, as here, or a number of records, which is not supported.
fn held_out(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    match value.as_f64() {
        Some(share) if share >= 1.0 => Err(wrong(
            name,
            value,
            "a share of the training records below 1, as in `valid_fraction`",
        )),
        _ => keys.insert("valid_fraction", name, value.clone()),
    }
}

fn report_to(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    let services: Vec<&str> = match value {
        Value::String(text) => text.split(',').map(str::trim).collect(),
        Value::Sequence(list) => match list.iter().map(Value::as_str).collect() {
            Some(services) => services,
            None => return Err(wrong(name, value, "none or tensorboard")),
        },
        _ => return Err(wrong(name, value, "none or tensorboard")),
    };
    match services.as_slice() {
        [] | ["none"] => keys.insert("tensorboard", name, false.into()),
        ["tensorboard"] => keys.insert("tensorboard", name, true.into()),
        _ => Err(wrong(name, value, &format!("none or tensorboard; {REPORTS}"))),
    }
}

fn lora_parameters(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    const INNER: [&str; 5] = ["rank", "scale", "dropout", "keys", "alpha"];
    let Value::Mapping(parameters) = value else {
        return Err(wrong(name, value, "a mapping with rank, scale, dropout and keys"));
    };
    for (inner, value) in parameters {
        let inner = inner.as_str().unwrap_or_default();
        if !INNER.contains(&inner) {
            let close = suggestion(inner, INNER.into_iter());
            return Err(format!("unknown key `{inner}` in {name}{close}"));
        }
        let key = if inner == "keys" { "target_modules" } else { inner };
        keys.insert(key, &format!("{name}.{inner}"), value.clone())?;
    }
    Ok(())
}

/// PEFT's options of EVA.
fn eva_config(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    const INNER: [&str; 6] =
        ["rho", "tau", "use_label_mask", "label_mask_value", "whiten", "adjust_scaling_factors"];
    let Value::Mapping(options) = value else {
        return Err(wrong(
            name,
            value,
            "a mapping with rho, tau, whiten and adjust_scaling_factors",
        ));
    };
    for (inner, value) in options {
        let inner = inner.as_str().unwrap_or_default();
        let written = format!("{name}.{inner}");
        match inner {
            "use_label_mask" if value.as_bool() != Some(true) => {
                return Err(wrong(
                    &written,
                    value,
                    "true: the tokens that the loss leaves out don't count",
                ));
            }
            "use_label_mask" | "label_mask_value" => {}
            _ if INNER.contains(&inner) => {
                keys.insert(&format!("eva_{inner}"), &written, value.clone())?;
            }
            _ => {
                let close = suggestion(inner, INNER.into_iter());
                return Err(format!("unknown key `{inner}` in {name}{close}"));
            }
        }
    }
    Ok(())
}

/// mlx-lm's options of its optimisers. It reads only those of the one that it uses.
fn optimizer_config(keys: &mut Keys, name: &str, value: &Value) -> Result<(), String> {
    const OPTIONS: [&str; 13] = [
        "weight_decay",
        "eps",
        "betas",
        "bias_correction",
        "momentum",
        "dampening",
        "nesterov",
        "ns_steps",
        "clip_threshold",
        "decay_rate",
        "scale_parameter",
        "relative_step",
        "warmup_init",
    ];
    let Value::Mapping(optimizers) = value else {
        return Err(wrong(name, value, "a mapping such as adamw: {weight_decay: 0.01}"));
    };
    for (optimizer, options) in optimizers {
        let Some(optimizer) = optimizer.as_str() else {
            return Err(wrong(name, optimizer, "the name of an optimiser"));
        };
        let name = format!("{name}.{optimizer}");
        let options = match options {
            Value::Mapping(options) => options,
            Value::Null => continue,
            other => return Err(wrong(&name, other, "a mapping of options")),
        };
        if optimizer != keys.optimizer() {
            continue;
        }
        for (option, value) in options {
            let option = option.as_str().unwrap_or_default();
            let name = format!("{name}.{option}");
            match (option, value) {
                ("eps", Value::Sequence(both)) if both.len() == 2 => {
                    for (key, epsilon) in ["epsilon", "scale_epsilon"].into_iter().zip(both) {
                        keys.insert(key, &name, epsilon.clone())?;
                    }
                }
                ("eps", _) => keys.insert("epsilon", &name, value.clone())?,
                ("beta_1", Value::Null) => {}
                ("beta_1", _) => return Err(wrong(&name, value, "null: there is no first moment")),
                ("betas", Value::Sequence(betas)) if betas.len() == 2 => {
                    for (key, beta) in ["beta1", "beta2"].into_iter().zip(betas) {
                        keys.insert(key, &name, beta.clone())?;
                    }
                }
                ("betas", _) => return Err(wrong(&name, value, "two numbers")),
                _ if OPTIONS.contains(&option) => keys.insert(option, &name, value.clone())?,
                _ => {
                    let close = suggestion(option, OPTIONS.into_iter());
                    return Err(format!("unknown key `{name}`{close}"));
                }
            }
        }
    }
    Ok(())
}

/// Words of other programs as flags. Another name of a key is a hidden name of its flag; the others are
/// hidden flags of their own, whose values are read as the file's are. The flags of the command have to
/// be known before.
#[derive(Debug, Default)]
pub struct Foreign(pub Mapping);

impl Args for Foreign {
    fn augment_args(mut command: Command) -> Command {
        let flags: Vec<String> =
            command.get_arguments().map(|flag| flag.get_id().to_string()).collect();
        for flag in &flags {
            let mut names: Vec<String> = Vec::new();
            for (word, meaning) in WORDS {
                if matches!(meaning, Key(key) if key == flag) {
                    names.push((*word).into());
                }
            }
            if flag.contains('_') {
                names.push(flag.clone());
            }
            let hyphens: Vec<String> = names.iter().map(|name| name.replace('_', "-")).collect();
            names.extend(hyphens);
            command = command.mut_arg(flag, |arg| {
                let own = arg.get_long_and_visible_aliases().unwrap_or_default();
                names.retain(|name| !own.contains(&name.as_str()));
                names.sort_unstable();
                names.dedup();
                arg.aliases(names)
            });
        }
        for (word, meaning) in WORDS {
            let is_flag = |key: &&str| flags.iter().any(|flag| flag == key);
            if flags.iter().any(|flag| flag == word) || matches!(meaning, Key(key) if is_flag(key))
            {
                continue;
            }
            let mut flag = Arg::new(*word)
                .long(word.replace('_', "-"))
                .hide(true)
                .action(ArgAction::Set)
                .num_args(0..=1)
                .default_missing_value("true")
                .allow_negative_numbers(true);
            if word.contains('_') {
                flag = flag.alias(*word);
            }
            command = command.arg(flag);
        }
        command
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Foreign {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut words = Mapping::new();
        for (word, _) in WORDS {
            if let Ok(Some(text)) = matches.try_get_one::<String>(word) {
                // Python's True and False, too.
                let value = match text.as_str() {
                    "True" => true.into(),
                    "False" => false.into(),
                    _ => serde_yaml_ng::from_str(text).unwrap_or_else(|_| text.as_str().into()),
                };
                words.insert((*word).into(), value);
            }
        }
        Ok(Self(words))
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_lead_to_settings_and_are_none_themselves() {
        let known = super::super::keys::known();
        for (index, (word, meaning)) in WORDS.iter().enumerate() {
            if let Key(key) | Apart(key) = meaning {
                assert!(known.iter().any(|known| known == key), "{word} -> {key}");
            }
            assert!(!known.iter().any(|known| known == word), "{word} is a setting");
            assert!(WORDS[..index].iter().all(|(other, _)| other != word), "{word} comes twice");
        }
    }

    #[test]
    fn what_changes_nothing_is_accepted_and_what_would_is_refused() {
        let check = |word: &str, yaml: &str| {
            let value: Value = serde_yaml_ng::from_str(yaml).unwrap();
            let mut keys = Keys::default();
            apply(meaning(word).unwrap(), &mut keys, word, &value)?;
            Ok::<_, String>(keys.into_parts().0.len())
        };
        for (word, neutral, refused) in [
            ("peft_type", "LORA", "IA3"),
            ("task_type", "CAUSAL_LM", "SEQ_CLS"),
            ("lora_bias", "false", "true"),
            ("target_parameters", "null", "[experts]"),
            ("fan_in_fan_out", "false", "true"),
            ("loftq_config", "{}", "{bits: 4}"),
            ("deepspeed", "null", "{stage: 2}"),
            ("eval_strategy", "steps", "best"),
            ("max_steps", "-1", "many"),
            ("train", "true", "false"),
            ("model_type", "LlamaForCausalLM", "AutoModelForSequenceClassification"),
            ("excess_length_strategy", "truncate", "raise"),
            ("lora_fan_in_fan_out", "false", "true"),
            ("bnb_4bit_quant_type", "nf4", "fp4"),
            ("quantization_method", "bnb", "gptq"),
            ("peft_use_dora", "false", "3"),
            ("assistant_only_loss", "null", "false"),
            ("use_peft", "true", "3"),
            ("save_safetensors", "true", "false"),
            ("logging_strategy", "steps", "false"),
            ("layers_pattern", "[]", "false"),
        ] {
            assert_eq!(check(word, neutral), Ok(0), "{word}: {neutral}");
            let error = check(word, refused).unwrap_err();
            assert!(error.starts_with(&format!("{word}: is ")), "{error}");
        }
        assert_eq!(check("special_tokens", "{pad_token: <pad>, eos_token: null}"), Ok(0));
        let error = check("special_tokens", "{eos_token: <end>}").unwrap_err();
        assert!(error.starts_with("special_tokens.eos_token: is <end>; "), "{error}");
        assert_eq!(check("template", "qwen"), Ok(0));
        assert_eq!(check("max_samples", "null"), Ok(0));
        assert!(check("max_samples", "3").unwrap_err().starts_with("max_samples: "));
        let error =
            check("target_parameters", &format!("[{}]", vec!["w"; 1000].join(", "))).unwrap_err();
        assert!(error.chars().count() < 250, "{error}");
    }
}
