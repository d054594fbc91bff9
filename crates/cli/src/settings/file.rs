//! The YAML file of a training run, in this program's words or other programs', and how flags are laid
//! over it.

use super::Settings;
use super::keys::{GROUPS, Keys, Origins, Style, is_full, is_same, kind};
use super::optimizer::{OPTIONS, OptimizerName};
use super::programs::{self, Program};
use super::unused::{self, Said};
use super::words::SCHEDULERS;
use super::yaml;
use crate::errors::{Usage, usage};
use serde_yaml_ng::{Mapping, Value};
use std::path::{Path, PathBuf};

/// What a file says.
#[derive(Debug, Default)]
pub struct File {
    /// Settings by this program's names.
    pub map: Mapping,
    /// The checkpoint from which the run of this file was about to go on, by a path from the file's folder.
    pub resume_from: Option<PathBuf>,
    path: PathBuf,
    /// How the settings are written there.
    origins: Origins,
    /// Its keys as they stand there.
    written: Mapping,
    /// Whether it says that there is an adapter, of a kind that is said elsewhere.
    has_adapter: bool,
    /// Whose it is known to be, and the key that says so.
    sign: Option<(Program, &'static str)>,
}

/// The key of [`File::resume_from`]. It is in a run's settings from when it is told to go on from another checkpoint than its
/// newest one until that is its newest one, so a run that is killed meanwhile goes on from there.
const RESUME_FROM: &str = "resume_from";

/// The settings of a run that is about to go on from a checkpoint.
pub fn with_resume_from(settings: String, checkpoint: &Path) -> anyhow::Result<String> {
    let mut note = Mapping::new();
    note.insert(RESUME_FROM.into(), serde_yaml_ng::to_value(checkpoint)?);
    Ok(settings + &serde_yaml_ng::to_string(&note)?)
}

impl File {
    /// Reads a file.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let wrong = |message: String| usage(format!("{}: {message}", path.display()));
        let mut written = match yaml::read(path).map_err(usage)? {
            Value::Mapping(map) => map,
            Value::Null => Mapping::new(),
            other => {
                return Err(wrong(format!(
                    "expected a mapping of keys to values, found {}",
                    kind(&other)
                )));
            }
        };
        let resume_from = match written.remove(RESUME_FROM) {
            Some(Value::String(checkpoint)) => Some(checkpoint.into()),
            Some(other) => {
                return Err(wrong(format!(
                    "{RESUME_FROM}: expected the path of a checkpoint, found {}",
                    kind(&other)
                )));
            }
            None => None,
        };
        let mut file = Self::from_mapping(&written).map_err(wrong)?;
        file.resume_from = resume_from;
        file.path = path.to_path_buf();
        Ok(file)
    }

    fn from_mapping(written: &Mapping) -> Result<Self, String> {
        let keys = Keys::read(written, Style::File)?;
        let has_adapter = keys.peft.is_some();
        let (map, origins) = keys.into_parts();
        let sign = programs::sign(written);
        Ok(Self { map, origins, written: written.clone(), has_adapter, sign, ..Self::default() })
    }

    /// The settings of the file with the flags laid over it, over the defaults; and what a person should
    /// know about the file.
    pub fn merge(mut self, flags: &Mapping) -> anyhow::Result<(Settings, Option<String>)> {
        if let Some(checkpoint) = &self.resume_from {
            return Err(usage(format!(
                "{}: {RESUME_FROM}: is {}, from where the run of this file was to go on when it was ended; continue it with \
                 --resume, or remove the key for another run",
                self.path.display(),
                checkpoint.display()
            )));
        }
        let flags = Keys::read(flags, Style::Flags).map_err(usage)?;
        let mut said = std::mem::take(&mut self.map);
        let has_adapter = self.has_adapter || flags.peft.is_some();
        if flags.peft.is_some() && is_full(&said) {
            said.remove("fine_tune_type");
        }
        let (mut flags, written) = flags.into_parts();
        self.fit_schedule(&mut said, &mut flags)?;
        for group in GROUPS {
            if group.iter().any(|key| flags.contains_key(*key)) {
                for key in *group {
                    said.remove(*key);
                }
            }
        }
        // What one schedule has none of, another may have.
        let has_no_warmup =
            self.origins.of("warmup_steps").is_some_and(|origin| SCHEDULERS.contains(&origin));
        if has_no_warmup && flags.contains_key("schedule") {
            said.remove("warmup_steps");
        }
        let unused_options = self.fit_optimizer(&mut said, &mut flags, &written)?;
        let unsaid = self.sign.map(|(program, sign)| {
            let unsaid = programs::unsaid(program, &self.written, has_adapter, &mut said, &flags);
            (program, sign, unsaid)
        });
        // A schedule of mlx-lm's holds its own peak.
        if let Some(rate) = flags.get("learning_rate")
            && let Some(Value::Mapping(schedule)) = said.get_mut("lr_schedule")
            && let Some(Value::Sequence(arguments)) = schedule.get_mut("arguments")
            && let Some(first) = arguments.first_mut()
        {
            *first = rate.clone();
        }
        said.retain(|key, _| !flags.contains_key(key));
        let given: Vec<String> = said
            .keys()
            .chain(flags.keys())
            .filter_map(|key| key.as_str().map(String::from))
            .collect();
        let mut merged =
            unsaid.as_ref().map(|(.., unsaid)| unsaid.defaults.clone()).unwrap_or_default();
        merged.extend(said.clone());
        merged.extend(flags.clone());
        let settings: Settings =
            serde_yaml_ng::from_value(Value::Mapping(merged)).map_err(usage)?;
        let file = Said {
            path: &self.path,
            map: &said,
            is_mlx: self.is_mlx(),
            has_mlx_targets: self
                .origins
                .of("target_modules")
                .is_some_and(|origin| origin.starts_with("lora_parameters.")),
        };
        let unused = unused::check(&settings, &file, &flags)?;
        let notices = unsaid
            .map(|(program, sign, unsaid)| unsaid.notice(program, &self.path, sign))
            .into_iter();
        let notices = notices.chain(unused_options).chain(unused);
        let notice = notices.reduce(|all, one| format!("{all}\n{one}"));
        let settings = settings.complete(&given).map_err(|error| self.named(error, &said))?;
        Ok((settings, notice))
    }

    fn is_mlx(&self) -> bool {
        matches!(self.sign, Some((Program::Mlx, _)))
    }

    /// Brings a warm-up by flag into the file's schedule of mlx-lm, if it has one.
    fn fit_schedule(&self, said: &mut Mapping, flags: &mut Mapping) -> anyhow::Result<()> {
        let Some(Value::Mapping(schedule)) = said.get_mut("lr_schedule") else { return Ok(()) };
        if flags.contains_key("schedule") {
            return Ok(());
        }
        for (key, instead) in [
            ("warmup_ratio", "give --warmup-steps"),
            ("min_learning_rate", "change its arguments there"),
        ] {
            if flags.contains_key(key) {
                return Err(usage(format!(
                    "{key}: {} has an lr_schedule, which says this itself; {instead}, or give --schedule, which takes its place",
                    self.path.display()
                )));
            }
        }
        if let Some(steps) = flags.remove("warmup_steps") {
            schedule.insert("warmup".into(), steps);
        }
        Ok(())
    }

    /// Leaves out the options of the file that the optimiser has no use for, and says which go with another one by flag.
    /// `written` is how the flags were.
    fn fit_optimizer(
        &self,
        said: &mut Mapping,
        flags: &mut Mapping,
        written: &Origins,
    ) -> anyhow::Result<Option<String>> {
        let parsed = |name: Option<&Value>| -> anyhow::Result<Option<OptimizerName>> {
            name.cloned().map(serde_yaml_ng::from_value).transpose().map_err(usage)
        };
        let of_file = match (parsed(said.get("optimizer"))?, self.is_mlx()) {
            (Some(named), _) => named,
            (None, true) => OptimizerName::Adam,
            (None, false) => Settings::default().optimizer,
        };
        let used = parsed(flags.get("optimizer"))?.unwrap_or(of_file);
        // One that came with the file's word for its optimiser goes with that.
        if flags.contains_key("optimizer") && self.origins.of("beta2").is_none() {
            said.remove("beta2");
        }
        let (defaults, options) = (of_file.defaults()?, used.defaults()?);
        let (mut unused, mut has_shared) = (Vec::new(), false);
        // The same option of another optimiser has other values.
        if options != defaults {
            for key in OPTIONS {
                let Some(value) = said.remove(*key) else { continue };
                let is_default = defaults.get(*key).is_some_and(|usual| is_same(usual, &value));
                if !is_default && written.of(key).is_none() {
                    unused.push(self.origins.of(key).unwrap_or(key));
                    has_shared |= options.contains_key(*key);
                }
            }
        }
        // And one that came with a flag's word gives way to one that is written.
        if said.contains_key("beta2") && written.of("beta2").is_none() {
            flags.remove("beta2");
        }
        // transformers' words for Adam, which stand in its files whatever the optimiser is.
        let of_adam: &[&str] = match used {
            OptimizerName::Lion => &["epsilon"],
            OptimizerName::Sgd | OptimizerName::Adafactor => &["epsilon", "beta1", "beta2"],
            _ => &[],
        };
        let is_adams = |origin: &str| origin.trim_start_matches('-').starts_with("adam");
        for key in of_adam {
            if let Some(flag) = written.of(key).filter(|flag| is_adams(flag)) {
                let name = used.optimizer().name();
                return Err(usage(format!(
                    "{flag}: is Adam's, but optimizer is {name}; leave it out"
                )));
            }
            if self.origins.of(key).is_some_and(is_adams) {
                said.remove(*key);
            }
        }
        Ok((!unused.is_empty()).then(|| {
            let used = used.optimizer().name();
            let kept = match has_shared {
                true => format!("; give as flags those that {used} is to have"),
                false => String::new(),
            };
            format!(
                "warning: {}: options of {}, left out with {} {used}: {}{kept}",
                self.path.display(),
                of_file.optimizer().name(),
                written.of("optimizer").unwrap_or_default(),
                unused.join(", ")
            )
        }))
    }

    /// A mistake, with the file and the word there if it is in what the file says.
    fn named(&self, error: anyhow::Error, said: &Mapping) -> anyhow::Error {
        let Some(Usage(message)) = error.downcast_ref() else { return error };
        match message.split_once(": ") {
            Some((key, what)) if said.contains_key(key) => {
                let name = match self.origins.of(key) {
                    Some(origin) if origin != key => format!("{origin} ({key})"),
                    _ => key.to_string(),
                };
                usage(format!("{}: {name}: {what}", self.path.display()))
            }
            _ => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{FineTuneType, Precision};
    use super::*;

    fn mapping(yaml: &str) -> Mapping {
        serde_yaml_ng::from_str(yaml).unwrap_or_else(|error| panic!("{yaml}: {error}"))
    }

    fn with_flags(yaml: &str, flags: &str) -> Result<(Settings, Option<String>), String> {
        let mut file = File::from_mapping(&mapping(yaml))?;
        for key in ["model", "data"] {
            file.map.entry(key.into()).or_insert("x".into());
        }
        file.merge(&mapping(flags)).map_err(|error| error.to_string())
    }

    fn parse(yaml: &str) -> Result<Settings, String> {
        with_flags(yaml, "{}").map(|(settings, _)| settings)
    }

    #[test]
    fn words_of_mlx_peft_and_transformers_mean_the_same() {
        let own =
            parse("rank: 4\nalpha: 8\ndropout: 0.1\nsteps: 10\nbatch_size: 2\nschedule: linear")
                .unwrap();
        let peft = "r: 4\nlora_alpha: 8\nlora_dropout: 0.1\nmax_steps: 10\n\
                    per_device_train_batch_size: 2\nlr_scheduler_type: linear";
        assert_eq!(parse(peft).unwrap(), own);
        let axolotl = "adapter: lora\nlora_r: 4\nlora_alpha: 8\nlora_dropout: 0.1\nmax_steps: 10\n\
                       micro_batch_size: 2\nlr_scheduler: linear\nload_in_4bit: false\nflash_attention: true";
        let own_as = |unsaid: &str| {
            let own = "rank: 4\nalpha: 8\ndropout: 0.1\nsteps: 10\nbatch_size: 2\nschedule: linear";
            parse(&format!("{own}\n{unsaid}")).unwrap()
        };
        let as_axolotl = own_as("weight_decay: 0\nmax_seq_length: 512");
        assert_eq!(parse(axolotl).unwrap(), as_axolotl);
        let factory = "stage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank: 4\nlora_alpha: 8\n\
                       lora_target: all\nlora_dropout: 0.1\nmax_steps: 10\nlr_scheduler_type: linear\n\
                       per_device_train_batch_size: 2";
        let as_factory = own_as("weight_decay: 0\nwarmup_steps: 0\nlearning_rate: 5e-5");
        assert_eq!(parse(factory).unwrap(), as_factory);
        let axolotl_in_full = "model_type: AutoModelForCausalLM\ntokenizer_type: AutoTokenizer\n\
                               dataset_prepared_path: prepared\neval_sample_packing: false\n\
                               pad_to_sequence_len: true\nspecial_tokens: {pad_token: <pad>}\n\
                               wandb_entity: me\nwandb_name: one\nxformers_attention: true\n\
                               lora_fan_in_fan_out: false\npeft_use_dora: false";
        assert_eq!(parse(&format!("{axolotl}\n{axolotl_in_full}")).unwrap(), as_axolotl);
        let factory_in_full = "run_name: one\ndataloader_num_workers: 4\nremove_unused_columns: false\n\
                               template: qwen\noverwrite_cache: true\npreprocessing_num_workers: 16\n\
                               ddp_timeout: 180000000\nbnb_4bit_quant_type: nf4\nquantization_method: bnb";
        assert_eq!(parse(&format!("{factory}\n{factory_in_full}")).unwrap(), as_factory);
        let four_bits = parse("quantization_bit: 4\nlora_modules_to_save: [lm_head]").unwrap();
        assert_eq!(four_bits.quantize, parse("quantize: nf4").unwrap().quantize);
        assert_eq!(four_bits.modules_to_save, Some(vec!["lm_head".into()]));
        let pasted = "peft_type: LORA\ntask_type: CAUSAL_LM\nbias: none\ninference_mode: false\n\
                      modules_to_save: null\ninit_lora_weights: true\nfan_in_fan_out: false\n\
                      loftq_config: {}\nmegatron_core: megatron.core\nuse_dora: false\nlayers_pattern: null\n\
                      layers_to_transform: null\nr: 4\nlora_alpha: 8\nlora_dropout: 0.1\nuse_rslora: false\n\
                      rank_pattern: {}\nsteps: 10\nbatch_size: 2\nschedule: linear\nhf_dataset: null";
        assert_eq!(parse(pasted).unwrap(), own);
        let trl = "model_name_or_path: m\ndataset_name: o/n\ndataset_config: en\ndataset_text_field: body\n\
                   chat_template_path: '{{ messages }}'";
        let ours = "model: m\ndata: o/n\ndata_config: en\ntext_column: body\nchat_template: '{{ messages }}'\n\
                    fine_tune_type: full\nlearning_rate: 2e-5\nschedule: linear\nwarmup_steps: 0\nepochs: 3\n\
                    batch_size: 8\nweight_decay: 0\nmax_seq_length: 1024";
        let read = |yaml: &str| {
            let file = File::from_mapping(&mapping(yaml)).unwrap();
            file.merge(&Mapping::new()).unwrap().0
        };
        assert_eq!(read(trl), read(ours));
        assert_eq!(parse("layers_to_transform: 3").unwrap().layers, Some(vec![3]));
        let eva = parse("init_lora_weights: eva\neva_rho: 1.5\neva_whiten: true").unwrap();
        let peft = "init_lora_weights: eva\neva_config: {rho: 1.5, tau: 0.99, use_label_mask: true, \
                    label_mask_value: -100, whiten: true, adjust_scaling_factors: true}";
        assert_eq!(parse(peft).unwrap(), eva);
        assert_eq!(parse(&eva.to_yaml().unwrap()).unwrap(), eva);
        assert_eq!(parse(&own.to_yaml().unwrap()).unwrap(), own);
    }

    #[test]
    fn what_a_program_has_unsaid_holds_for_its_files() {
        let read = |yaml: &str, flags: &str| {
            let (settings, notice) =
                with_flags(yaml, flags).unwrap_or_else(|error| panic!("{yaml}: {error}"));
            (settings, notice.unwrap_or_default())
        };
        // No adapter is full fine-tuning in TRL and axolotl.
        let (trl, notice) = read("model_name_or_path: m\nassistant_only_loss: true", "{}");
        assert_eq!(trl.fine_tune_type, FineTuneType::Full);
        assert_eq!((trl.learning_rate, trl.epochs), (Some(2e-5), Some(3.0)));
        assert_eq!((trl.warmup_steps, trl.weight_decay), (Some(0), Some(0.0)));
        assert!(notice.contains("is read as TRL's, because of `assistant_only_loss`"), "{notice}");
        assert!(notice.contains("fine_tune_type full") && !notice.contains("loss_on"), "{notice}");
        let (peft, notice) = read("model_name_or_path: m\nuse_peft: true\nlora_r: 64", "{}");
        assert_eq!((peft.fine_tune_type, peft.rank), (FineTuneType::Lora, 64));
        assert_eq!((peft.alpha, peft.dropout), (Some(32.0), 0.05));
        assert!(
            notice.contains("loss_on: all") && notice.contains("q_proj and v_proj"),
            "{notice}"
        );
        // A flag of an adapter asks for one.
        let (flagged, _) = read("model_name_or_path: m", "rank: 4");
        assert_eq!((flagged.fine_tune_type, flagged.rank), (FineTuneType::Lora, 4));
        let preferences = read("model_name_or_path: m\nuse_peft: true", "objective: dpo").0;
        assert_eq!(preferences.learning_rate, Some(1e-6));
        let axolotl = "base_model: m\nlearning_rate: 1e-4\nbf16: false\nfp16: false\nrl: simpo";
        let (axolotl, notice) = read(axolotl, "{}");
        assert_eq!(axolotl.fine_tune_type, FineTuneType::Full);
        assert_eq!((axolotl.batch_size, axolotl.max_seq_length), (1, 512));
        assert_eq!((axolotl.dtype, axolotl.warmup_steps), (Precision::F32, None));
        assert!(notice.contains("likelihood") && notice.contains("100 steps"), "{notice}");
        let half = read("base_model: m\nadapter: lora\nlora_target_linear: true\nbf16: auto", "{}");
        assert_eq!((half.0.fine_tune_type, half.0.dtype), (FineTuneType::Lora, Precision::Auto));
        assert!(!half.1.contains("q_proj"), "{}", half.1);
        let (factory, notice) = read("stage: sft\ntemplate: qwen3\npacking: true", "{}");
        assert_eq!((factory.fine_tune_type, factory.rank), (FineTuneType::Lora, 8));
        assert_eq!((factory.learning_rate, factory.batch_size), (Some(5e-5), 8));
        assert!(
            notice.contains("template: qwen3") && notice.contains("see each other"),
            "{notice}"
        );
        assert!(read("template: qwen3", "{}").1.contains("because of `template`"));
        let error = with_flags("rank: 4", "template: qwen3").unwrap_err();
        assert!(error.contains("--template: is qwen3, but"), "{error}");
        // What stands in any of their files leaves ours as they are.
        assert_eq!(read("lora_alpha: 8\nnum_train_epochs: 2", "{}").1, "");
    }

    #[test]
    fn every_flag_is_a_key() {
        let flags = serde_yaml_ng::to_value(crate::commands::train::Flags::default()).unwrap();
        let known = super::super::keys::known();
        for key in flags.as_mapping().unwrap().keys() {
            assert!(known.iter().any(|name| Some(name.as_str()) == key.as_str()), "{key:?}");
        }
    }

    #[test]
    fn mistakes_are_named() {
        for (yaml, expected) in [
            ("r: 4\nrank: 8", "`r` and `rank` say the same thing"),
            ("iters: 4\nnum_train_epochs: 1", "`iters` and `num_train_epochs` say the same thing"),
            ("lora_parameters: {rank: 4}\nrank: 5", "`lora_parameters.rank` and `rank`"),
            ("learning_rat: 1", "unknown key `learning_rat`; did you mean `learning_rate`"),
            ("batch_size: many", "batch_size: is many, expected a whole number"),
            ("packing: 3", "packing: is 3, expected true or false"),
            ("layers: [0, x]", "layers: is [0, x], expected whole numbers in a list"),
            ("rank_pattern: 3", "rank_pattern: is 3, expected names, each with a whole number"),
            ("lr_schedule: cosine", "lr_schedule: is cosine, expected a mapping with name"),
            (
                "eval_strategy: best",
                "eval_strategy: is best, expected steps, epoch or no; see `eval_every`",
            ),
            (
                "saves_per_epoch: 2",
                "saves_per_epoch: is 2, expected 1, at each epoch's end, or 0; for more checkpoints give `save_every`",
            ),
            ("learning_rate: '1e-4'", "learning_rate: is \"1e-4\", expected a number"),
            ("quantization_bit: 3", "quantization_bit: is 3, expected 4 (nf4) or 8 (int8)"),
            ("sample_prompt: hello", "sample_prompt: nothing is sampled with it"),
            ("test_batches: 5", "test_batches: there is no evaluation on test data"),
            (
                "fine_tune_type: full\ntarget_modules: q_proj",
                "target_modules: is an option of adapters, but fine_tune_type is full",
            ),
            (
                "save_steps: 50\nsave_strategy: epoch",
                "`save_steps` and `save_strategy` say the same",
            ),
            ("epoch_ends: 3", "epoch_ends: is 3, expected true or false"),
            ("bf16: true\ndtype: f16", "`bf16` and `dtype` say the same thing"),
            ("steps_per_report: -1", "steps_per_report: is -1, expected a whole number"),
            ("optimizer: adagrad", "optimizer: is adagrad, expected one of adam, adamw"),
            ("optimizer: adamw\nmomentum: 0.9", "momentum: adamw has no such option; it has beta1"),
            ("optimizer: adam\nweight_decay: 0.1", "weight_decay: adam has no such option"),
            ("optim: sgd\nnesterov: true", "nesterov: needs a momentum"),
            (
                "optimizer: lion\noptimizer_config: {lion: {eps: 1}}",
                "optimizer_config.lion.eps (epsilon): lion has no such option",
            ),
            (
                "optimizer: adamw\noptimizer_config: {adamw: {betas: 1}}",
                "optimizer_config.adamw.betas: is 1, expected two numbers",
            ),
            (
                "optimizer: adamw\noptimizer_config: {adamw: {beta: 1}}",
                "unknown key `optimizer_config.adamw.beta`",
            ),
            ("optimizer: muon\nns_steps: 2.5", "ns_steps: is 2.5, expected"),
            (
                "optimizer: adafactor\noptimizer_config: {adafactor: {beta_1: 0.9}}",
                "beta_1: is 0.9, expected null",
            ),
            ("beta1: .nan", "beta1: is NaN"),
            ("fine_tune_type: vera", "fine_tune_type: is vera, expected one of lora, dora, full"),
            (
                "init_lora_weights: corda",
                "init_lora_weights: is corda, expected kaiming, gaussian, pissa",
            ),
            ("eva_rho: 1.5", "eva_rho: is an option of eva, and init_lora_weights is kaiming"),
            ("init_lora_weights: eva\neva_rho: 0.5", "eva_rho: is 0.5, expected at least 1"),
            ("init_lora_weights: eva\neva_tau: 1", "eva_tau: is 1, expected above 0 and below 1"),
            (
                "init_lora_weights: eva\nfine_tune_type: full",
                "init_lora_weights: is eva, which is a start of adapters",
            ),
            ("eva_config: {rhoo: 1}", "unknown key `rhoo` in eva_config; did you mean `rho`"),
            (
                "eva_config: {use_label_mask: false}",
                "eva_config.use_label_mask: is false, expected true",
            ),
            ("bias: some", "bias: is some, expected none, lora_only or all"),
            ("report_to: [3]", "report_to: is [3], expected none or tensorboard"),
            ("wandb: project", "wandb: is project; every run writes metrics.jsonl"),
            (
                "lr_schedule: {name: cosine_decay, arguments: [1, 2]}\nschedule: linear",
                "`lr_schedule` and `schedule`",
            ),
            ("data: [a, 3]\nmodel: m", "data[1]: is 3, expected a path"),
            ("hf_dataset: {path: o/n, promt_feature: q}", "unknown key `hf_dataset.promt_feature`"),
            ("prompt_column: '{q'", "prompt_column: a { has no }"),
            ("prompt_column: q\ntext_column: t", "columns: a record is taken from a prompt"),
            ("chat_template: chatml", "chat_template: there is no file chatml"),
            (
                "chat_template_kwargs: [a]",
                "chat_template_kwargs: is [a], expected a JSON object such as",
            ),
            ("rank: 0", "rank: is 0"),
            ("learning_rate: .nan", "learning_rate"),
            ("num_layers: 0", "num_layers: is 0"),
        ] {
            let error = parse(yaml).unwrap_err();
            assert!(error.contains(expected), "{yaml}: {error}");
        }
    }

    #[test]
    fn flags_take_the_place_of_what_says_the_same() {
        let (settings, _) = with_flags(
            "{epochs: 3, lr_schedule: {name: cosine_decay, arguments: [1.0e-3, 10]}}",
            "{steps: 5, learning_rate: 2.0e-3}",
        )
        .unwrap();
        assert_eq!((settings.steps, settings.epochs), (Some(5), None));
        assert_eq!(settings.learning_rate(5).unwrap().peak(), 2e-3);
    }

    #[test]
    fn what_full_fine_tuning_has_no_use_for_is_refused_as_flags_and_told_in_files() {
        for flag in [
            "rank: 4",
            "alpha: 8",
            "dropout: 0.1",
            "rslora: true",
            "target_modules: q_proj",
            "rank_pattern: {q_proj: 2}",
            "alpha_pattern: {q_proj: 2}",
            "init_lora_weights: pissa",
            "bias: all",
            "loraplus_lr_ratio: 16",
        ] {
            let error = with_flags("{fine_tune_type: full}", flag).unwrap_err();
            let key = flag.split(':').next().unwrap();
            assert!(error.starts_with(&format!("{key}: is an option of adapters")), "{error}");
        }
        let written = "iters: 4\nfine_tune_type: full\n\
                       lora_parameters: {rank: 8, scale: 20.0, dropout: 0.0, keys: [q_proj]}";
        let (settings, notice) = with_flags(written, "{}").unwrap();
        let notice = notice.unwrap();
        assert!(notice.ends_with("every weight: rank, scale, dropout, target_modules"), "{notice}");
        // Norms and biases move as everything else.
        let written = "fine_tune_type: full\nloraplus_lr_ratio: 16";
        let (full, notice) = with_flags(written, "{}").unwrap();
        assert!(notice.unwrap().ends_with("every weight: loraplus_lr_ratio"));
        let rate = metal_candle::train::LearningRate::default();
        assert_eq!(full.train_options(4, rate.clone()).unwrap().loraplus_lr_ratio, 1.0);
        assert_eq!(with_flags(&full.to_yaml().unwrap(), "{}").unwrap().1, None);
        let of_adapters = parse("loraplus_lr_ratio: 16").unwrap();
        assert_eq!(of_adapters.train_options(4, rate).unwrap().loraplus_lr_ratio, 16.0);
        assert!(of_adapters.to_yaml().unwrap().contains("loraplus_lr_ratio: 16"));
        // What a run keeps says nothing of adapters.
        let kept = settings.to_yaml().unwrap();
        assert_eq!(with_flags(&kept, "{}").unwrap().1, None);
    }

    #[test]
    fn a_rate_that_a_schedule_never_reaches_is_told_or_refused() {
        let (_, notice) = with_flags("{min_learning_rate: 1.0e-5}", "schedule: constant").unwrap();
        assert!(notice.unwrap().ends_with("stays at the peak: min_learning_rate"));
        let error = with_flags("{schedule: constant}", "min_learning_rate: 1.0e-5").unwrap_err();
        assert!(
            error.starts_with("min_learning_rate: is 1e-5, but schedule is constant"),
            "{error}"
        );
    }

    #[test]
    fn what_waits_for_a_switch_needs_it() {
        for flags in ["sample_prompt: [hi]", "test_batches: 3"] {
            let kept = parse("steps: 3").unwrap().to_yaml().unwrap();
            assert!(with_flags(&kept, flags).is_err(), "{flags}");
        }
        // Said to be off, or of mlx-lm, whose files have it always.
        for yaml in [
            "sample_prompt: hi\nsample_every: 0",
            "test: false\ntest_batches: 3",
            "iters: 3\ntest_batches: 3",
        ] {
            assert!(parse(yaml).is_ok(), "{yaml}");
        }
    }

    #[test]
    fn paged_optimizers_are_those_that_are_not() {
        use crate::settings::OptimizerName;
        for (name, expected) in [
            ("paged_adamw_32bit", OptimizerName::AdamW),
            ("paged_adamw_8bit", OptimizerName::AdamW8bit),
            ("paged_lion_32bit", OptimizerName::Lion),
        ] {
            assert_eq!(parse(&format!("optim: {name}")).unwrap().optimizer, expected, "{name}");
        }
    }

    #[test]
    fn lion_of_transformers_has_its_adams_beta2_unless_told() {
        for (yaml, beta2) in [
            ("optim: lion_32bit", 0.999),
            ("optimizer: paged_lion_32bit", 0.999),
            ("optim: lion_32bit\nadam_beta2: 0.95", 0.95),
            ("optimizer: lion", 0.99),
        ] {
            let settings = parse(yaml).unwrap();
            assert_eq!(settings.beta2, Some(beta2), "{yaml}");
            assert_eq!(parse(&settings.to_yaml().unwrap()).unwrap(), settings, "{yaml}");
        }
        for (yaml, flag, beta2) in [
            ("{}", "lion_32bit", 0.999),
            ("optim: adamw_torch\nadam_beta2: 0.95", "lion_32bit", 0.999),
            ("optim: lion_32bit\nadam_beta2: 0.95", "paged_lion_32bit", 0.95),
            // The word is replaced, and what goes with it.
            ("optim: lion_32bit", "lion", 0.99),
        ] {
            let (settings, _) = with_flags(yaml, &format!("optim: {flag}")).unwrap();
            assert_eq!(settings.beta2, Some(beta2), "{yaml} {flag}");
        }
        // Nobody has written it.
        assert_eq!(with_flags("optim: lion_32bit", "optimizer: adamw").unwrap().1, None);
    }

    #[test]
    fn without_peft_every_weight_is_trained() {
        use crate::settings::FineTuneType;
        let kind = |yaml: &str| parse(yaml).map(|settings| settings.fine_tune_type);
        assert_eq!(kind("use_peft: true"), Ok(FineTuneType::Lora));
        // As TRL writes all of its options.
        let dump = "use_peft: false\nlora_r: 16\nlora_alpha: 32\nlora_target_modules: null";
        assert_eq!(kind(dump), Ok(FineTuneType::Full));
        assert!(kind("use_peft: false\nfine_tune_type: lora").unwrap_err().contains("keep one"));
        assert!(kind("use_peft: true\nfine_tune_type: full").unwrap_err().contains("keep one"));
        // As a flag it undoes that, and leaves the kind of adapter to other words.
        for (yaml, flags, expected) in [
            ("use_peft: false", "use_peft: true", FineTuneType::Lora),
            ("fine_tune_type: full", "use_peft: true", FineTuneType::Lora),
            ("use_dora: true", "use_peft: true", FineTuneType::Dora),
            ("use_peft: true\nfine_tune_type: dora", "{}", FineTuneType::Dora),
            ("use_peft: true", "use_peft: false", FineTuneType::Full),
        ] {
            let (settings, _) = with_flags(yaml, flags).unwrap();
            assert_eq!(settings.fine_tune_type, expected, "{yaml} {flags}");
        }
    }

    #[test]
    fn what_other_programs_always_write_together_is_no_contradiction() {
        for (yaml, same) in [
            ("stage: dpo\npref_loss: orpo\npref_beta: 0.2", "objective: orpo\nbeta: 0.2"),
            ("stage: dpo\npref_loss: simpo", "objective: simpo"),
            ("stage: dpo\npref_loss: hinge", "objective: dpo\nloss_type: hinge"),
            ("finetuning_type: lora\nuse_dora: true", "fine_tune_type: dora"),
            ("adapter: lora\npeft_use_dora: true", "fine_tune_type: dora"),
            ("peft_use_dora: true\nadapter: qlora", "fine_tune_type: dora\nquantize: nf4"),
            ("warmup_ratio: 0.0\nwarmup_steps: 0", "warmup_steps: 0"),
            ("max_steps: 500\nnum_train_epochs: 3.0", "steps: 500"),
            ("max_steps: -1\nnum_train_epochs: 3.0", "epochs: 3"),
            ("bf16: true\ntorch_dtype: auto", "dtype: bf16"),
        ] {
            // What a known program leaves unsaid is for another test.
            let said = |mut settings: Settings| {
                let own = parse(same).unwrap();
                let Settings { objective, beta, loss_type, fine_tune_type, quantize, .. } =
                    settings;
                if programs::sign(&mapping(yaml)).is_some() {
                    settings = own;
                }
                Settings { objective, beta, loss_type, fine_tune_type, quantize, ..settings }
            };
            assert_eq!(said(parse(yaml).unwrap()), parse(same).unwrap(), "{yaml}");
        }
        for yaml in [
            "stage: kto\npref_loss: orpo",
            "finetuning_type: full\nuse_dora: true",
            "bf16: true\ntorch_dtype: float16",
            "max_steps: 5\nepochs: 3",
        ] {
            assert!(parse(yaml).unwrap_err().contains("say the same thing"), "{yaml}");
        }
    }

    #[test]
    fn options_are_those_of_the_optimizer() {
        use metal_candle::train::{
            AdafactorOptions, AdamOptions, AdamWOptions, LionOptions, MuonOptions, Optimizer,
            SgdOptions,
        };
        for (yaml, optimizer, rate) in [
            ("{}", Optimizer::default(), 2e-4),
            ("optim: adamw_torch_fused", Optimizer::default(), 2e-4),
            (
                "optimizer: adam\nlearning_rate: 3.0e-4\noptimizer_config: {adam: {bias_correction: false, eps: 1.0e-6}, sgd: {momentum: 1}}",
                Optimizer::Adam(AdamOptions {
                    bias_correction: false,
                    epsilon: 1e-6,
                    ..AdamOptions::default()
                }),
                3e-4,
            ),
            (
                "optimizer: sgd\nmomentum: 0.9\nnesterov: true",
                Optimizer::Sgd(SgdOptions {
                    momentum: 0.9,
                    nesterov: true,
                    ..SgdOptions::default()
                }),
                0.1,
            ),
            ("optim: adamw_bnb_8bit", Optimizer::AdamW8bit(AdamWOptions::default()), 2e-4),
            (
                "optimizer: adafactor\nlearning_rate: 0.5\noptimizer_config: {adafactor: {eps: [1.0e-20, 0.1], beta_1: null, scale_parameter: false, warmup_init: true}}",
                Optimizer::Adafactor(AdafactorOptions {
                    epsilon: 1e-20,
                    scale_epsilon: 0.1,
                    relative_step: true,
                    warmup_init: true,
                    ..AdafactorOptions::default()
                }),
                0.5,
            ),
            ("optimizer: adafactor", Optimizer::Adafactor(AdafactorOptions::default()), 1e-3),
            (
                "optimizer: muon\nns_steps: 3\nnesterov: false",
                Optimizer::Muon(MuonOptions {
                    ns_steps: 3,
                    nesterov: false,
                    ..MuonOptions::default()
                }),
                1e-3,
            ),
            (
                "optimizer: lion\nbeta1: 0.8\nlearning_rate: 1.0e-3",
                Optimizer::Lion(LionOptions { beta1: 0.8, ..LionOptions::default() }),
                1e-3,
            ),
        ] {
            let settings = parse(yaml).unwrap();
            assert_eq!(settings.optimizer().unwrap(), optimizer, "{yaml}");
            assert_eq!(settings.peak_learning_rate(), rate, "{yaml}");
            assert_eq!(parse(&settings.to_yaml().unwrap()).unwrap(), settings, "{yaml}");
        }
        for (yaml, rate) in [
            ("fine_tune_type: full", 2e-5),
            ("{fine_tune_type: full, optimizer: sgd}", 0.01),
            ("{fine_tune_type: full, learning_rate: 3.0e-4}", 3e-4),
        ] {
            assert_eq!(parse(yaml).unwrap().peak_learning_rate(), rate, "{yaml}");
        }
    }

    #[test]
    fn a_mistake_names_the_file_and_the_word_that_is_written_there() {
        let mut file =
            File::from_mapping(&mapping("{save_total_limit: 0, model: m, data: d}")).unwrap();
        file.path = "w.yaml".into();
        let error = file.merge(&Mapping::new()).unwrap_err();
        let expected = "w.yaml: save_total_limit (keep): is 0, expected at least 1";
        assert!(error.to_string().starts_with(expected), "{error}");
        assert!(error.is::<Usage>());
        // A flag's is the flag's.
        let error = with_flags("rank: 4", "rank: 0").unwrap_err();
        assert!(error.starts_with("rank: is 0"), "{error}");
    }

    #[test]
    fn adams_options_of_transformers_are_adams() {
        let dump = "adam_beta1: 0.8\nadam_beta2: 0.99\nadam_epsilon: 1.0e-7";
        for (optim, beta1, beta2, epsilon) in [
            ("adamw_torch", Some(0.8), Some(0.99), Some(1e-7)),
            ("lion", Some(0.8), Some(0.99), None),
            ("sgd", None, None, None),
            ("adafactor", None, None, Some(1e-30)),
        ] {
            let settings = parse(&format!("optim: {optim}\n{dump}")).unwrap();
            let found = (settings.beta1, settings.beta2, settings.epsilon);
            assert_eq!(found, (beta1, beta2, epsilon), "{optim}");
        }
        let error = with_flags("optim: adafactor", "adam_epsilon: 1.0e-7").unwrap_err();
        assert!(
            error.starts_with("--adam-epsilon: is Adam's, but optimizer is adafactor"),
            "{error}"
        );
        let (settings, _) = with_flags("optim: adafactor", "epsilon: 1.0e-20").unwrap();
        assert_eq!(settings.epsilon, Some(1e-20));
    }

    #[test]
    fn options_stay_with_their_optimizer_and_are_told_where_they_go() {
        let yaml = "optim: adamw_torch\nweight_decay: 0.1\nadam_beta2: 0.95\nbeta1: 0.9";
        for flag in ["adamw", "adamw8bit"] {
            let (settings, notice) = with_flags(yaml, &format!("optimizer: {flag}")).unwrap();
            assert_eq!((settings.weight_decay, settings.beta2), (Some(0.1), Some(0.95)), "{flag}");
            assert_eq!(notice, None, "{flag}");
        }
        let (settings, notice) = with_flags(yaml, "{optimizer: lion, beta2: 0.98}").unwrap();
        assert_eq!(settings.beta2, Some(0.98));
        let expected = "options of adamw, left out with --optimizer lion: weight_decay; give as flags those that \
                        lion is to have";
        assert!(notice.unwrap().ends_with(expected));
        let momentum = with_flags("optimizer: sgd\nmomentum: 0.9", "optim: lion").unwrap().1;
        assert!(
            momentum.unwrap().ends_with("options of sgd, left out with --optim lion: momentum")
        );
        // What is as it is without being written is no loss.
        let decay = with_flags("optimizer: lion\nweight_decay: 0", "optimizer: adamw").unwrap().1;
        assert_eq!(decay, None);
    }

    #[test]
    fn a_schedule_of_mlx_lm_stays_under_flags_or_is_named() {
        let yaml =
            "lr_schedule: {name: cosine_decay, warmup: 100, arguments: [1.0e-5, 1000, 1.0e-7]}";
        let (settings, _) = with_flags(yaml, "warmup_steps: 10").unwrap();
        let schedule = settings.lr_schedule.unwrap();
        assert_eq!((schedule.warmup, schedule.arguments), (10, vec![1e-5, 1000.0, 1e-7]));
        for (flag, instead) in [
            ("warmup_ratio: 0.1", "give --warmup-steps, or give --schedule"),
            ("min_learning_rate: 1.0e-6", "change its arguments there, or give --schedule"),
        ] {
            let error = with_flags(yaml, flag).unwrap_err();
            assert!(error.contains("has an lr_schedule") && error.contains(instead), "{error}");
            let (settings, _) = with_flags(yaml, &format!("{{schedule: linear, {flag}}}")).unwrap();
            assert_eq!(settings.lr_schedule, None);
        }
    }

    #[test]
    fn another_optimizer_takes_no_options_from_the_file() {
        for (flags, beta1, epsilon) in
            [("optimizer: lion", 0.9, None), ("optimizer: adamw", 0.5, Some(1e-3))]
        {
            let (settings, _) = with_flags("{epsilon: 1.0e-3, beta1: 0.5}", flags).unwrap();
            assert_eq!((settings.beta1, settings.epsilon), (Some(beta1), epsilon), "{flags}");
        }
    }

    #[test]
    fn switches_of_other_programs_set_what_they_mean() {
        use crate::settings::{Loss, Precision};
        let loss = |yaml: &str| parse(yaml).unwrap().loss_on;
        assert_eq!(loss("mask_prompt: true"), Loss::Completion);
        assert_eq!(loss("mask_prompt: false"), Loss::All);
        assert_eq!(loss("assistant_only_loss: true"), Loss::Assistant);
        assert_eq!(loss("train_on_inputs: false"), Loss::Auto);
        // TRL's two, of which one that is off means every token unless the other says more.
        assert_eq!(loss("completion_only_loss: true"), Loss::Completion);
        assert_eq!(loss("completion_only_loss: false"), Loss::All);
        assert_eq!(loss("completion_only_loss: null"), Loss::Auto);
        let both = |completion: bool, assistant: bool| {
            loss(&format!("completion_only_loss: {completion}\nassistant_only_loss: {assistant}"))
        };
        assert_eq!(both(false, false), Loss::All);
        assert_eq!(both(false, true), Loss::Assistant);
        assert_eq!(both(true, false), Loss::Completion);
        assert_eq!(loss("assistant_only_loss: false\nloss_on: all"), Loss::All);
        let refused = |yaml: &str| parse(yaml).unwrap_err();
        for more in ["", "loss_on: assistant", "loss_on: null", "completion_only_loss: null"] {
            let error = refused(&format!("assistant_only_loss: false\n{more}"));
            let expected =
                "assistant_only_loss: is false, expected true. TRL then learns every token";
            assert!(error.starts_with(expected) && error.contains("`loss_on: all`"), "{error}");
            assert!(error.contains("write the one that you want into the file in"), "{error}");
        }
        let dtype = |yaml: &str| parse(yaml).unwrap().dtype;
        assert_eq!(dtype("bf16: true\nfp16: false\ntorch_dtype: bfloat16"), Precision::Bf16);
        assert_eq!(dtype("bf16: false\nfp16: true"), Precision::F16);
        assert_eq!(dtype("bf16: auto"), Precision::Auto);
        let settings =
            parse("eval_strategy: no\nsave_strategy: 'no'\nreport_to: [tensorboard]").unwrap();
        assert_eq!((settings.eval_every, settings.save_every), (0, 0));
        let ends = |yaml: &str| {
            let settings = parse(yaml).unwrap();
            let rate = metal_candle::train::LearningRate::default();
            let options = settings.train_options(10, rate).unwrap();
            assert_eq!(options.epoch_ends, settings.epoch_ends);
            (options.epoch_ends, options.eval_every, options.save_every)
        };
        assert_eq!(ends("save_strategy: steps"), (false, 200, 100));
        assert_eq!(ends("save_strategy: epoch"), (true, 200, 0));
        assert_eq!(ends("saves_per_epoch: 1\neval_strategy: no"), (true, 0, 0));
        assert_eq!(ends("save_strategy: epoch\neval_strategy: epoch"), (true, 0, 0));
        assert_eq!(ends("epoch_ends: true\nevals_per_epoch: 1"), (true, 0, 100));
        let warmup =
            |yaml: &str| parse(yaml).map(|settings| (settings.warmup_steps, settings.warmup_ratio));
        assert_eq!(warmup("warmup_steps: 0\nwarmup_ratio: 0.1").unwrap(), (None, Some(0.1)));
        // transformers' constant rate has none.
        let usual = (None, Some(0.03));
        assert_eq!(warmup("schedule: constant").unwrap(), usual);
        assert_eq!(warmup("lr_scheduler_type: constant").unwrap(), (Some(0), None));
        let unset = "warmup_ratio: 0.0\nlr_scheduler: constant\nwarmup_steps: 0";
        assert_eq!(warmup(unset).unwrap(), (Some(0), None));
        let word = "lr_scheduler_type: constant_with_warmup\n";
        assert_eq!(warmup(word).unwrap(), usual);
        assert_eq!(warmup(&format!("{word}warmup_steps: 3")).unwrap(), (Some(3), None));
        let ignored = "lr_scheduler_type: constant\nwarmup_ratio: 0.03";
        assert_eq!(warmup(ignored).unwrap(), (Some(0), None));
        let (settings, _) = with_flags("lr_scheduler_type: constant", "schedule: cosine").unwrap();
        assert_eq!((settings.warmup_steps, settings.warmup_ratio), usual);
        // TRL's switch for LoRA's dropout, too.
        assert_eq!(parse("disable_dropout: true").unwrap().dropout, 0.0);
        assert_eq!(parse("disable_dropout: false\nlora_dropout: 0.5").unwrap().dropout, 0.5);
        assert_eq!(parse("lora_dropout: 0.5\ndisable_dropout: true").unwrap().dropout, 0.0);
    }

    #[test]
    fn a_file_of_mlx_lm_trains_as_it_does_there() {
        use crate::settings::{Course, Loss};
        let (settings, notice) = with_flags("train: true\niters: 40", "{}").unwrap();
        let expected = Settings {
            model: settings.model.clone(),
            data: settings.data.clone(),
            loss_on: Loss::All,
            clip_norm: 0.0,
            schedule: Course::Constant,
            warmup_steps: Some(0),
            learning_rate: Some(1e-5),
            steps: Some(40),
            rank: 8,
            alpha: Some(160.0),
            num_layers: Some(16),
            eval_batches: 25,
            test_batches: 500,
            optimizer: crate::settings::OptimizerName::Adam,
            beta1: Some(0.9),
            beta2: Some(0.999),
            epsilon: Some(1e-8),
            bias_correction: Some(false),
            ..Settings::default()
        };
        assert_eq!(settings, expected);
        let notice = notice.unwrap();
        for part in ["`iters`", "loss_on all", "clip_norm 0", "num_layers 16", "another order"] {
            assert!(notice.contains(part), "{part}: {notice}");
        }
        assert!(!notice.contains("save_every") && !notice.contains("Some("), "{notice}");

        let said = "iters: 40\nmask_prompt: true\nnum_layers: -1\noptimizer: adamw\n\
                    optimizer_config: {adamw: {bias_correction: true}}\n\
                    lora_parameters: {rank: 4, scale: 2.0, dropout: 0.1, keys: [self_attn.q_proj]}\n\
                    lr_schedule: {name: cosine_decay, warmup: 4, arguments: [1.0e-4, 36]}";
        let (settings, notice) = with_flags(said, "{clip_norm: 1, grad_accumulation: 2}").unwrap();
        assert_eq!((settings.loss_on, settings.num_layers), (Loss::Completion, Some(-1)));
        assert_eq!((settings.rank, settings.alpha, settings.dropout), (4, Some(8.0), 0.1));
        assert_eq!((settings.weight_decay, settings.clip_norm), (Some(0.01), 1.0));
        assert_eq!(settings.bias_correction, Some(true));
        assert_eq!(settings.learning_rate(40).unwrap().at(5), 1e-4);
        let notice = notice.unwrap();
        for part in ["loss_on", "clip_norm", "schedule", "bias"] {
            assert!(!notice.contains(part), "{part}: {notice}");
        }

        // mlx-lm counts batches.
        let (settings, _) =
            with_flags("iters: 42\ngrad_accumulation_steps: 4\nsteps_per_report: 20", "{}")
                .unwrap();
        assert_eq!((settings.steps, settings.report_every, settings.eval_every), (Some(10), 5, 50));
        // The accumulation may be a flag; what flags count are steps.
        let steps = |yaml: &str, flags: &str| {
            let (settings, _) = with_flags(yaml, flags).unwrap();
            (settings.steps, settings.eval_every)
        };
        assert_eq!(steps("iters: 100", "grad_accumulation: 4"), (Some(25), 50));
        let four = "iters: 100\ngrad_accumulation_steps: 4";
        assert_eq!(steps(four, "{}"), (Some(25), 50));
        assert_eq!(steps(four, "grad_accumulation: 1"), (Some(100), 200));
        assert_eq!(steps(four, "{steps: 60, eval_every: 20}"), (Some(60), 20));
        // Switches are told, too, and follow the optimiser that is used.
        let told = |flags: &str| with_flags("iters: 4", flags).unwrap().1.unwrap();
        assert!(told("{}").contains("bias_correction false"));
        let notice = told("optimizer: adafactor");
        for part in ["scale_parameter true", "relative_step true"] {
            assert!(notice.contains(part) && !notice.contains("bias"), "{notice}");
        }
        // In this program's own words nothing of it holds.
        let (settings, notice) =
            with_flags("steps: 40\nnum_layers: 16\nfine_tune_type: lora", "{}").unwrap();
        assert_eq!((settings.loss_on, settings.clip_norm, notice), (Loss::Auto, 1.0, None));
    }
}
