//! The settings of the optimiser: which one, its options, and the learning rate that goes with it.

use super::{FineTuneType, Settings};
use crate::errors::usage;
use clap::ValueEnum;
use metal_candle::train::{
    AdafactorOptions, AdamOptions, AdamWOptions, LionOptions, MuonOptions, Optimizer, SgdOptions,
};
use serde::{Deserialize, Serialize};
use serde_yaml_ng::{Mapping, Value};

/// The optimiser.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerName {
    /// Adam, without weight decay
    Adam,
    /// AdamW
    // Whether moments are paged out where a GPU has no room changes no step.
    #[serde(
        alias = "adamw_torch",
        alias = "adamw_torch_fused",
        alias = "adamw_hf",
        alias = "paged_adamw",
        alias = "paged_adamw_32bit"
    )]
    #[value(
        name = "adamw",
        aliases = ["adamw_torch", "adamw_torch_fused", "adamw_hf", "paged_adamw", "paged_adamw_32bit"]
    )]
    AdamW,
    /// Stochastic gradient descent
    Sgd,
    /// Lion: half of AdamW's memory
    // Words of files and of --optim, as another beta2 goes with them; see `Keys::read`.
    #[serde(alias = "lion_32bit", alias = "paged_lion_32bit")]
    Lion,
    /// AdamW with moments of 8 bits: a quarter of its memory
    #[serde(alias = "adamw_8bit", alias = "adamw_bnb_8bit", alias = "paged_adamw_8bit")]
    #[value(name = "adamw8bit", aliases = ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"])]
    AdamW8bit,
    /// Adafactor: next to no memory
    Adafactor,
    /// Muon: orthogonal momentum for matrices, AdamW for the rest
    Muon,
}

/// Every key that is an option of some optimiser.
pub const OPTIONS: &[&str] = &[
    "weight_decay",
    "beta1",
    "beta2",
    "epsilon",
    "bias_correction",
    "momentum",
    "dampening",
    "nesterov",
    "ns_steps",
    "adamw_share",
    "scale_epsilon",
    "clip_threshold",
    "decay_rate",
    "scale_parameter",
    "relative_step",
    "warmup_init",
];

impl From<Optimizer> for OptimizerName {
    fn from(optimizer: Optimizer) -> Self {
        match optimizer {
            Optimizer::Adam(_) => Self::Adam,
            Optimizer::AdamW(_) => Self::AdamW,
            Optimizer::Sgd(_) => Self::Sgd,
            Optimizer::Lion(_) => Self::Lion,
            Optimizer::AdamW8bit(_) => Self::AdamW8bit,
            Optimizer::Adafactor(_) => Self::Adafactor,
            Optimizer::Muon(_) => Self::Muon,
        }
    }
}

impl OptimizerName {
    /// The optimiser with its defaults.
    pub fn optimizer(self) -> Optimizer {
        match self {
            Self::Adam => Optimizer::Adam(AdamOptions::default()),
            Self::AdamW => Optimizer::AdamW(AdamWOptions::default()),
            Self::Sgd => Optimizer::Sgd(SgdOptions::default()),
            Self::Lion => Optimizer::Lion(LionOptions::default()),
            Self::AdamW8bit => Optimizer::AdamW8bit(AdamWOptions::default()),
            Self::Adafactor => Optimizer::Adafactor(AdafactorOptions::default()),
            Self::Muon => Optimizer::Muon(MuonOptions::default()),
        }
    }

    /// Its options with their defaults, by their keys.
    pub fn defaults(self) -> anyhow::Result<Mapping> {
        // Behind the optimiser's name.
        match serde_yaml_ng::to_value(self.optimizer())? {
            Value::Tagged(named) => Ok(serde_yaml_ng::from_value(named.value)?),
            _ => Ok(Mapping::new()),
        }
    }

    /// The optimiser with these options.
    fn with(self, options: Mapping) -> Result<Optimizer, serde_yaml_ng::Error> {
        let options = Value::Mapping(options);
        Ok(match self {
            Self::Adam => Optimizer::Adam(serde_yaml_ng::from_value(options)?),
            Self::AdamW => Optimizer::AdamW(serde_yaml_ng::from_value(options)?),
            Self::Sgd => Optimizer::Sgd(serde_yaml_ng::from_value(options)?),
            Self::Lion => Optimizer::Lion(serde_yaml_ng::from_value(options)?),
            Self::AdamW8bit => Optimizer::AdamW8bit(serde_yaml_ng::from_value(options)?),
            Self::Adafactor => Optimizer::Adafactor(serde_yaml_ng::from_value(options)?),
            Self::Muon => Optimizer::Muon(serde_yaml_ng::from_value(options)?),
        })
    }
}

impl Settings {
    /// The highest learning rate.
    pub fn peak_learning_rate(&self) -> f64 {
        self.learning_rate.unwrap_or_else(|| {
            let every_weight = self.fine_tune_type == FineTuneType::Full;
            self.optimizer.optimizer().default_learning_rate(every_weight) / self.rate_divisor()
        })
    }

    /// The optimiser, with the options that were given and the defaults of the others.
    pub fn optimizer(&self) -> anyhow::Result<Optimizer> {
        self.optimizer.with(self.optimizer_options()?).map_err(usage)
    }

    /// Fills in the options of the optimiser that weren't given.
    pub fn complete_optimizer(self) -> anyhow::Result<Self> {
        let options = self.optimizer_options()?;
        let mut settings = serde_yaml_ng::to_value(&self)?;
        if let Value::Mapping(settings) = &mut settings {
            for key in OPTIONS {
                settings.remove(*key);
            }
            settings.extend(options);
        }
        Ok(serde_yaml_ng::from_value(settings)?)
    }

    /// The options of the optimiser by their keys.
    fn optimizer_options(&self) -> anyhow::Result<Mapping> {
        let mut options = self.optimizer.defaults()?;
        let Value::Mapping(settings) = serde_yaml_ng::to_value(self)? else { return Ok(options) };
        for key in OPTIONS {
            let Some(given) = settings.get(*key).filter(|given| !given.is_null()) else { continue };
            if let Some(option) = options.get_mut(*key) {
                *option = given.clone();
            } else if given.as_f64() != Some(0.0) && given.as_bool() != Some(false) {
                let name = serde_yaml_ng::to_string(&self.optimizer)?;
                let has: Vec<&str> = options.keys().filter_map(Value::as_str).collect();
                return Err(usage(format!(
                    "{key}: {} has no such option; it has {}",
                    name.trim(),
                    has.join(", ")
                )));
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_option_is_that_of_some_optimizer() {
        let options: BTreeSet<String> = OptimizerName::value_variants()
            .iter()
            .flat_map(|name| name.defaults().unwrap().into_iter())
            .map(|(key, _)| key.as_str().unwrap().to_string())
            .collect();
        assert_eq!(options, OPTIONS.iter().map(|key| key.to_string()).collect());
    }
}
