//! The settings of the objective: which one, and its options.

use super::Settings;
use crate::errors::usage;
use clap::ValueEnum;
use metal_candle::train::objectives::{
    DistillOptions, DpoLoss, DpoOptions, KtoOptions, OrpoOptions, PREFERENCE_RATE_DIVISOR,
    SimPoOptions,
};
use metal_candle::train::{BestBy, Objective};
use serde::{Deserialize, Serialize};

/// What is minimised.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum ObjectiveName {
    /// The loss of the tokens to learn: supervised fine-tuning
    #[default]
    Sft,
    /// The divergence from a teacher's likeliest tokens, see --teacher
    Distill,
    /// Direct preference optimisation, of chosen and rejected answers
    Dpo,
    /// Simple preference optimisation, without a reference model
    Simpo,
    /// Fine-tuning on chosen answers, and their odds over the rejected ones
    Orpo,
    /// Kahneman-Tversky optimisation, of answers labelled one by one
    Kto,
}

impl From<Objective> for ObjectiveName {
    fn from(objective: Objective) -> Self {
        match objective {
            Objective::Sft => Self::Sft,
            Objective::Distill(_) => Self::Distill,
            Objective::Dpo(_) => Self::Dpo,
            Objective::SimPo(_) => Self::Simpo,
            Objective::Orpo(_) => Self::Orpo,
            Objective::Kto(_) => Self::Kto,
        }
    }
}

/// DPO's function of the margin.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub enum LossType {
    /// The logistic loss of the paper
    Sigmoid,
    /// The hinge loss
    Hinge,
    /// The squared distance of IPO, of means over tokens
    Ipo,
    /// The logistic loss for labels some of which are wrong
    Robust,
    /// The logistic loss of means over tokens
    SigmoidNorm,
}

impl From<LossType> for DpoLoss {
    fn from(loss: LossType) -> Self {
        match loss {
            LossType::Sigmoid => Self::Sigmoid,
            LossType::Hinge => Self::Hinge,
            LossType::Ipo => Self::Ipo,
            LossType::Robust => Self::Robust,
            LossType::SigmoidNorm => Self::SigmoidNorm,
        }
    }
}

/// Which evaluation is the best.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Best {
    /// That with the lowest loss
    Loss,
    /// That where the better answer has the higher reward most often
    Accuracy,
    /// That where its reward is higher by most
    Margin,
}

impl From<BestBy> for Best {
    fn from(best_by: BestBy) -> Self {
        match best_by {
            BestBy::Loss => Self::Loss,
            BestBy::Accuracy => Self::Accuracy,
            BestBy::Margin => Self::Margin,
        }
    }
}

impl From<Best> for BestBy {
    fn from(best: Best) -> Self {
        match best {
            Best::Loss => Self::Loss,
            Best::Accuracy => Self::Accuracy,
            Best::Margin => Self::Margin,
        }
    }
}

impl Settings {
    /// What the usual learning rate is divided by.
    pub(super) fn rate_divisor(&self) -> f64 {
        match self.objective {
            ObjectiveName::Sft | ObjectiveName::Distill => 1.0,
            _ => PREFERENCE_RATE_DIVISOR,
        }
    }

    /// The objective with its options.
    pub fn objective(&self) -> anyhow::Result<Objective> {
        use ObjectiveName::{Distill, Dpo, Kto, Orpo, Sft, Simpo};
        let name = self.objective;
        let takers: [(&str, bool, &[ObjectiveName]); 9] = [
            ("teacher", self.teacher.is_some(), &[Distill]),
            ("kd_alpha", self.kd_alpha.is_some(), &[Distill]),
            ("beta", self.beta.is_some(), &[Dpo, Simpo, Orpo, Kto]),
            ("loss_type", self.loss_type.is_some(), &[Dpo]),
            ("label_smoothing", self.label_smoothing.is_some(), &[Dpo, Simpo]),
            ("simpo_gamma", self.simpo_gamma.is_some(), &[Simpo]),
            ("desirable_weight", self.desirable_weight.is_some(), &[Kto]),
            ("undesirable_weight", self.undesirable_weight.is_some(), &[Kto]),
            ("precompute_ref_log_probs", self.precompute_ref_log_probs, &[Dpo, Kto]),
        ];
        for (key, given, of) in takers {
            if given && !of.contains(&name) {
                let word = |name: &ObjectiveName| match name.to_possible_value() {
                    Some(value) => value.get_name().to_string(),
                    None => String::new(),
                };
                let names: Vec<String> = of.iter().map(word).collect();
                return Err(usage(format!(
                    "{key}: is an option of {}, and the objective is {}",
                    names.join(", "),
                    word(&name)
                )));
            }
        }
        Ok(match name {
            Sft => Objective::Sft,
            Distill => {
                if self.teacher.is_none() {
                    return Err(usage(
                        "teacher: is missing, which the objective distill learns from; `logprobs` writes one",
                    ));
                }
                let default = DistillOptions::default();
                Objective::Distill(DistillOptions {
                    kd_alpha: self.kd_alpha.unwrap_or(default.kd_alpha),
                })
            }
            Dpo => {
                let default = DpoOptions::default();
                Objective::Dpo(DpoOptions {
                    beta: self.beta.unwrap_or(default.beta),
                    loss: self.loss_type.map_or(default.loss, DpoLoss::from),
                    label_smoothing: self.label_smoothing.unwrap_or(default.label_smoothing),
                })
            }
            Simpo => {
                let default = SimPoOptions::default();
                Objective::SimPo(SimPoOptions {
                    beta: self.beta.unwrap_or(default.beta),
                    simpo_gamma: self.simpo_gamma.unwrap_or(default.simpo_gamma),
                    label_smoothing: self.label_smoothing.unwrap_or(default.label_smoothing),
                })
            }
            Orpo => {
                let default = OrpoOptions::default();
                Objective::Orpo(OrpoOptions { beta: self.beta.unwrap_or(default.beta) })
            }
            Kto => {
                let default = KtoOptions::default();
                let undesirable = default.undesirable_weight;
                Objective::Kto(KtoOptions {
                    beta: self.beta.unwrap_or(default.beta),
                    desirable_weight: self.desirable_weight.unwrap_or(default.desirable_weight),
                    undesirable_weight: self.undesirable_weight.unwrap_or(undesirable),
                })
            }
        })
    }
}
