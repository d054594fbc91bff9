//! Kahneman-Tversky optimisation (Ethayarajh et al., 2024, arXiv:2402.01306): of a good answer with the log-ratio x
//! `w·(1 - σ(β·(x - z)))`, of another `w·(1 - σ(β·(z - x)))`, where z estimates how far the policy is from the reference:
//! the mean log-ratio of answers that belong to other prompts, or 0 if that is negative.

use super::{Compared, Score, Slopes, Totals, check_beta, sigmoid};
use crate::{Result, bounds};
use serde::{Deserialize, Serialize};

/// What KTO is told.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KtoOptions {
    /// How strongly the policy is held to the reference.
    pub beta: f64,
    /// What the losses of good answers are multiplied by.
    pub desirable_weight: f64,
    /// What those of the others are.
    pub undesirable_weight: f64,
}

impl Default for KtoOptions {
    fn default() -> Self {
        Self { beta: 0.1, desirable_weight: 1.0, undesirable_weight: 1.0 }
    }
}

impl KtoOptions {
    pub(super) fn validate(&self) -> Result<()> {
        check_beta(self.beta)?;
        bounds::positive("desirable_weight", self.desirable_weight, bounds::BETA)?;
        bounds::positive("undesirable_weight", self.undesirable_weight, bounds::BETA)
    }

    /// Adds an answer.
    pub(super) fn compare(
        &self,
        desirable: bool,
        score: &Score,
        totals: &Totals,
        to: &mut Compared,
    ) {
        let (weight, sign, name) = match desirable {
            true => (self.desirable_weight, 1.0, "chosen"),
            false => (self.undesirable_weight, -1.0, "rejected"),
        };
        let x = self.beta * sign * (score.log_ratio() - totals.kl);
        let samples = totals.samples as f64;
        to.loss += weight * sigmoid(-x) / samples;
        let slope = -weight * sigmoid(x) * sigmoid(-x) * self.beta * sign / samples;
        to.slopes.push(Slopes { answer: slope, prompt: 0.0 });
        to.metrics.add(&format!("rewards/{name}"), self.beta * score.log_ratio());
        to.metrics.add(&format!("logps/{name}"), score.policy);
        to.metrics.add("kl", totals.kl);
    }
}
