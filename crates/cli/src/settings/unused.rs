//! Settings that others leave without a use. What a flag asks for is refused then; what a file holds is told, where other
//! programs' files always hold it.

use super::{Course, FineTuneType, Settings};
use crate::errors::usage;
use serde_yaml_ng::Mapping;
use std::path::Path;

/// What an adapter has, and full fine-tuning has no use for.
const OF_ADAPTERS: &[&str] = &[
    "rank",
    "alpha",
    "scale",
    "dropout",
    "rslora",
    "target_modules",
    "rank_pattern",
    "alpha_pattern",
    "init_lora_weights",
    "bias",
    "loraplus_lr_ratio",
];

/// A file as far as it matters here.
pub struct Said<'a> {
    pub path: &'a Path,
    /// Its settings, but for those that flags take the place of.
    pub map: &'a Mapping,
    /// Whether it is mlx-lm's.
    pub is_mlx: bool,
    /// Whether the layers to adapt stand in `lora_parameters`, which mlx-lm reads for adapters alone.
    pub has_mlx_targets: bool,
}

/// What a person should know about settings of a file that are not used, where `settings` are what it and the flags say.
///
/// # Errors
/// [`crate::errors::Usage`] for those that can't be meant.
pub fn check(settings: &Settings, file: &Said, flags: &Mapping) -> anyhow::Result<Option<String>> {
    let stays = settings.schedule == Course::Constant && settings.lr_schedule.is_none();
    let has_unused_rate = stays && settings.min_learning_rate > 0.0;
    if has_unused_rate && flags.contains_key("min_learning_rate") {
        return Err(usage(format!(
            "min_learning_rate: is {:e}, but schedule is constant, which stays at the peak; expected 0, or the schedule \
             linear or cosine",
            settings.min_learning_rate
        )));
    }
    let told = |unused: &str, why: &str| {
        format!("warning: {}: not used, as {why}: {unused}", file.path.display())
    };
    let rate = has_unused_rate
        .then(|| told("min_learning_rate", "schedule is constant, which stays at the peak"));
    let is_given = |key: &str| flags.contains_key(key) || file.map.contains_key(key);
    // A switch that is written down was meant to be off.
    let lacks = |key: &str, switch: &str| {
        let by_flag = flags.contains_key(key) && !flags.contains_key(switch);
        by_flag || (is_given(key) && !is_given(switch))
    };
    if settings.sample_every == 0
        && !settings.sample_prompt.is_empty()
        && lacks("sample_prompt", "sample_every")
    {
        return Err(usage(
            "sample_prompt: nothing is sampled with it, as sample_every is 0; give sample_every the steps between samples",
        ));
    }
    // mlx-lm's files hold it whether they test or not.
    let by_flag = flags.contains_key("test_batches");
    if !settings.test && lacks("test_batches", "test") && (by_flag || !file.is_mlx) {
        return Err(usage("test_batches: there is no evaluation on test data; add test"));
    }
    if settings.fine_tune_type != FineTuneType::Full {
        return Ok(rate);
    }
    // A ratio of 1 is none.
    let has_ratio = settings.loraplus_lr_ratio != 1.0;
    let of_adapters = || OF_ADAPTERS.iter().filter(|key| has_ratio || **key != "loraplus_lr_ratio");
    let is_mistake = |key: &&&str| {
        let by_file = **key == "target_modules" && !file.has_mlx_targets;
        flags.contains_key(**key) || (by_file && file.map.contains_key(**key))
    };
    if let Some(key) = of_adapters().find(is_mistake) {
        return Err(usage(format!(
            "{key}: is an option of adapters, but fine_tune_type is full, which trains every weight; leave it out, or say \
             fine_tune_type: lora"
        )));
    }
    let unused: Vec<&str> =
        of_adapters().copied().filter(|key| file.map.contains_key(*key)).collect();
    let unused = (!unused.is_empty())
        .then(|| told(&unused.join(", "), "fine_tune_type is full, which trains every weight"));
    Ok(rate.into_iter().chain(unused).reduce(|all, one| format!("{all}\n{one}")))
}
