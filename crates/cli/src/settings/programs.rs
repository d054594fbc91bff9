//! Whose training file it is, and what holds where it says nothing: mlx-lm's, LLaMA-Factory's, axolotl's or TRL's. A file
//! that has a key which only one of them has gets that program's values, so that it trains the same way. What stays
//! different is told.
//!
//! The values are those of TRL 1.5's `SFTConfig`, `DPOConfig` and `ModelConfig`, transformers 5.24's `TrainingArguments`,
//! axolotl's schemas and LLaMA-Factory's `hparams`; for mlx-lm's see [`mlx`].

use super::keys::{is_same, same, shown};
use super::{Settings, mlx};
use serde_yaml_ng::{Mapping, Value};
use std::path::Path;

/// A program other than this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    Mlx,
    LlamaFactory,
    Axolotl,
    Trl,
}

/// Keys that no other program has, this one included. What LLaMA-Factory's and axolotl's files share with TRL's is told
/// apart by their own.
const OWN: &[(Program, &[&str])] = &[
    (
        Program::LlamaFactory,
        &[
            "cutoff_len",
            "finetuning_type",
            "lora_target",
            "mask_history",
            "overwrite_cache",
            "pref_beta",
            "pref_loss",
            "preprocessing_num_workers",
            "quantization_bit",
            "stage",
            "template",
        ],
    ),
    (
        Program::Axolotl,
        &[
            "base_model",
            "dataset_prepared_path",
            "datasets",
            "evals_per_epoch",
            "lora_modules_to_save",
            "lora_target_linear",
            "micro_batch_size",
            "num_epochs",
            "pad_to_sequence_len",
            "sample_packing",
            "saves_per_epoch",
            "sequence_len",
            "train_on_inputs",
            "val_set_size",
        ],
    ),
    (
        Program::Trl,
        &[
            "assistant_only_loss",
            "completion_only_loss",
            "dataset_name",
            "dataset_train_split",
            "model_init_kwargs",
            "model_name_or_path",
            "use_peft",
        ],
    ),
];

/// Settings of an adapter: a file with one of them has one in mind.
const OF_ADAPTERS: &[&str] = &[
    "alpha",
    "dropout",
    "init_adapter",
    "init_lora_weights",
    "layers",
    "num_layers",
    "quantize",
    "rank",
    "rslora",
    "scale",
    "target_modules",
];

/// What a file leaves to its program.
#[derive(Debug)]
pub struct Unsaid {
    /// Settings by this program's names.
    pub defaults: Mapping,
    /// What is not as in that program, whatever the settings.
    pub differences: Vec<String>,
}

/// The program that a file is known to be of, and the key that says so. `written` are its keys as they stand there.
pub fn sign(written: &Mapping) -> Option<(Program, &'static str)> {
    if let Some(key) = mlx::sign(written) {
        return Some((Program::Mlx, key));
    }
    OWN.iter().find_map(|(program, keys)| {
        let has_value = |key: &&&str| written.get(**key).is_some_and(|value| !value.is_null());
        keys.iter().find(has_value).map(|key| (*program, *key))
    })
}

/// What is known of a file and of the flags beside it.
struct Given<'a> {
    /// The file's keys as they stand there.
    written: &'a Mapping,
    said: &'a Mapping,
    flags: &'a Mapping,
    /// Whether it is said that there is an adapter, of a kind that is said elsewhere.
    has_adapter: bool,
}

impl Given<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.flags.get(key).or_else(|| self.said.get(key))
    }

    /// Whether this or what is said in its place is given.
    fn has(&self, key: &str) -> bool {
        let mut given = self.said.keys().chain(self.flags.keys()).filter_map(Value::as_str);
        given.any(|other| same(other, key))
    }

    fn is(&self, key: &str, value: &str) -> bool {
        self.get(key).and_then(Value::as_str) == Some(value)
    }

    fn is_on(&self, key: &str) -> bool {
        self.get(key).and_then(Value::as_bool) == Some(true)
    }

    /// Whether the file has this key, in its own words, as true or false.
    fn is_written(&self, key: &str, value: bool) -> bool {
        self.written.get(key).and_then(Value::as_bool) == Some(value)
    }

    /// Whether nothing is said of an adapter.
    fn has_no_adapter(&self) -> bool {
        let is_said = |key: &&str| self.has(key);
        !self.has_adapter && !self.has("fine_tune_type") && !OF_ADAPTERS.iter().any(is_said)
    }
}

impl Program {
    pub fn name(self) -> &'static str {
        match self {
            Self::Mlx => "mlx-lm",
            Self::LlamaFactory => "LLaMA-Factory",
            Self::Axolotl => "axolotl",
            Self::Trl => "TRL",
        }
    }
}

/// What is left unsaid by a file of `program`, which says `said`, and by flags. Of mlx-lm's, batches become steps.
pub fn unsaid(
    program: Program,
    written: &Mapping,
    has_adapter: bool,
    said: &mut Mapping,
    flags: &Mapping,
) -> Unsaid {
    let given = &Given { written, said, flags, has_adapter };
    let mut found = Unsaid { defaults: Mapping::new(), differences: Vec::new() };
    match program {
        Program::Mlx => return mlx::unsaid(said, flags),
        Program::LlamaFactory => found.of_llama_factory(given),
        Program::Axolotl => found.of_axolotl(given),
        Program::Trl => found.of_trl(given),
    }
    found
}

impl Unsaid {
    fn default(&mut self, given: &Given, key: &str, value: Value) {
        if !given.has(key) {
            self.defaults.insert(key.into(), value);
        }
    }

    fn differs(&mut self, how: impl Into<String>) {
        self.differences.push(how.into());
    }

    /// What all three have; whether every weight is trained, as where nothing is said of an adapter `without_one`.
    fn of_all(&mut self, given: &Given, without_one: bool) -> bool {
        let trains_all = without_one && given.has_no_adapter();
        if trains_all {
            self.default(given, "fine_tune_type", "full".into());
        }
        self.default(given, "weight_decay", 0.0.into());
        trains_all || given.is("fine_tune_type", "full")
    }

    /// transformers' values, but for this learning rate.
    fn of_transformers(&mut self, given: &Given, rate: f64) {
        for (key, value) in [
            ("learning_rate", Value::from(rate)),
            ("schedule", "linear".into()),
            ("warmup_steps", 0.into()),
            ("epochs", 3.into()),
            ("batch_size", 8.into()),
        ] {
            self.default(given, key, value);
        }
    }

    fn of_llama_factory(&mut self, given: &Given) {
        let is_full = self.of_all(given, false);
        self.of_transformers(given, 5e-5);
        if !is_full {
            self.default(given, "rank", 8.into());
        }
        self.differs("an example that is too long is cut at its end, there its prompt first");
        self.differs(
            "`instruction` and `input` are joined by an empty line, there by a line break",
        );
        if let Some(template) = given.written.get("template").filter(|it| !it.is_null()) {
            self.differs(format!(
                "conversations go through the model's chat template, or the one of chat_template, not by \
                 template: {}",
                shown(template)
            ));
        }
        if given.is_on("packing") && !given.is_written("neat_packing", true) {
            self.differs("packed examples don't see each other");
        }
        if given.is("objective", "orpo") {
            self.differs("ORPO's loss of the answer that is preferred is also over its prompt");
        }
    }

    fn of_axolotl(&mut self, given: &Given) {
        let is_full = self.of_all(given, true);
        self.default(given, "max_seq_length", 512.into());
        self.default(given, "batch_size", 1.into());
        let is_half = ["bf16", "fp16", "float16", "bfloat16"]
            .iter()
            .any(|key| given.written.get(*key).is_some_and(|value| value.as_bool() != Some(false)));
        if given.is_written("bf16", false) && !is_half {
            self.default(given, "dtype", "f32".into());
        }
        self.differs(
            "what is longer than max_seq_length is cut, where axolotl leaves conversations out and divides texts",
        );
        if !given.has("warmup_steps") {
            self.differs("the warm-up isn't limited to 100 steps");
        }
        if !is_full && !given.has("target_modules") {
            self.differs(TARGETS);
        }
        if given.is_written("train_on_inputs", true) {
            self.differs("with train_on_inputs the headers of turns are learned, too");
        }
        if given.is("objective", "simpo") {
            self.differs("SimPO adds no likelihood of the answer that is preferred");
        }
    }

    fn of_trl(&mut self, given: &Given) {
        let is_full = self.of_all(given, true);
        let is_sft = !given.has("objective") || given.is("objective", "sft");
        self.of_transformers(given, if is_sft { 2e-5 } else { 1e-6 });
        self.default(given, "max_seq_length", 1024.into());
        if !is_full {
            if !given.has("scale") {
                self.default(given, "alpha", 32.into());
            }
            self.default(given, "dropout", 0.05.into());
            if !given.has("target_modules") {
                self.differs(TARGETS);
            }
        }
        if is_sft && !given.has("loss_on") {
            self.differs(
                "of conversations the model's turns alone are learned, there everything unless assistant_only_loss is true \
                 (loss_on: all)",
            );
        }
        self.differs("prompts and answers that are plain texts go through the chat template");
    }

    /// What a person should know of a file that was known by the key `sign`.
    pub fn notice(&self, program: Program, file: &Path, sign: &str) -> String {
        let own = serde_yaml_ng::to_value(Settings::default()).unwrap_or_default();
        let is_own =
            |key: &Value, value: &Value| is_same(own.get(key).unwrap_or(&Value::Null), value);
        let values: Vec<String> = self
            .defaults
            .iter()
            .filter(|(key, value)| !is_own(key, value))
            .map(|(key, value)| format!("{} {}", shown(key), shown(value)))
            .collect();
        let name = program.name();
        let unsaid = if values.is_empty() {
            String::new()
        } else {
            format!(" Where it says nothing, {name}'s values hold: {}.", values.join(", "))
        };
        format!(
            "{} is read as {name}'s, because of `{sign}`.{unsaid} What differs from {name}: {}.",
            file.display(),
            self.differences.join("; ")
        )
    }
}

const TARGETS: &str = "an adapter is on all linear layers, there on q_proj and v_proj of most families (target_modules)";
